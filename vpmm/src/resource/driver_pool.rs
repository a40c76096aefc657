//! The driver's stream-ordered allocator.

use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cuda_sys::types::*;

use super::description::Description;
use super::facts::{Checks, Facts};
use super::identity::Identity;
use super::memory_resource::MemoryResource;
use super::request::{MIN_ALIGN, check_align, is_of_nothing, rounded};
use crate::capture::{BesideCaptures, stream_is_capturing};
use crate::device::{Device, StreamHandle};
use crate::driver::{Driver, Failure};
use crate::error::{Error, Result};
use crate::location::Sharing;
use crate::units::{Bytes, DevicePtr};

/// What a [`DriverPool`] is made with.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct DriverPoolConfig {
    /// Memory that the pool takes when it is made, in bytes. At first 0.
    pub initial_bytes: u64,
    /// What the pool keeps at a synchronisation, in bytes. At first everything: what a pool gives back
    /// there it has to take again, at the price of milliseconds.
    pub release_threshold_bytes: u64,
    /// The most that the pool may hold, in bytes; `None` for what the driver allows. Not 0, which is no limit
    /// to the driver.
    pub max_bytes: Option<u64>,
    /// Whether and how other processes can import the pool, by [`DriverPool::raw`] and
    /// `cuMemPoolExportToShareableHandle`. Such a pool never gives memory back.
    pub sharing: Sharing,
}

impl Default for DriverPoolConfig {
    fn default() -> Self {
        Self {
            initial_bytes: 0,
            release_threshold_bytes: u64::MAX,
            max_bytes: None,
            sharing: Sharing::None,
        }
    }
}

/// Memory from a pool of the driver's, its own or a borrowed one: `cuMemAllocFromPoolAsync` and
/// `cuMemFreeAsync`, each in the order of its stream.
///
/// RMM calls the first `cuda_async_memory_resource` and the second `cuda_async_view_memory_resource`;
/// the calls are in the CUDA driver API's "Stream Ordered Memory Allocator".
///
/// The driver says of a double free that its outcome is undefined, so what is allocated is kept in a
/// table, and every wrong free is found. Memory that others took from a borrowed pool is theirs to free.
///
/// # Captures
/// On a stream that captures both calls are refused, [`Error::StreamCapturing`], and the capture goes on. The
/// driver would make nodes of the graph of them: memory that the graph owns, and that goes when it does,
/// though a pool above would keep it as any other. So the pools over this one serve a capture what they
/// have, and do not grow in it. Memory of graphs is [`Pool::graph_pool`](crate::Pool::graph_pool)'s.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let sim = cuda_sim::Simulator::builder().build()?;
/// # let driver = vpmm::Driver::new(sim.driver())?;
/// # let device = driver.device(0)?;
/// # let stream = device.stream()?;
/// use vpmm::resource::{DriverPool, DriverPoolConfig, MemoryResource};
///
/// let mut config = DriverPoolConfig::default();
/// config.initial_bytes = 64 << 20;
/// let pool = DriverPool::new(&device, &config)?;
/// let ptr = pool.allocate(1 << 20, 256, stream.handle())?;
/// pool.deallocate(ptr, 1 << 20, 256, stream.handle())?;
/// assert!(pool.reserved_bytes()? >= 64 << 20);
/// # Ok(())
/// # }
/// ```
pub struct DriverPool {
    device: Device,
    pool: CUmemoryPool,
    /// What it was made with; `None` for a borrowed one.
    config: Option<DriverPoolConfig>,
    live: Mutex<HashMap<u64, u64>>,
    identity: Identity,
}

// SAFETY: a pool handle is a token that any thread may pass to the driver; the table is locked.
unsafe impl Send for DriverPool {}
// SAFETY: as above.
unsafe impl Sync for DriverPool {}

impl DriverPool {
    /// A pool of its own on this device.
    ///
    /// One driver call or two; with initial memory it waits for a stream of its own once.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the device has no pools, [`Error::SharingUnsupported`],
    /// [`Error::Config`] for a maximum of 0, [`Error::Driver`], also where there is no memory for the initial size.
    pub fn new(device: &Device, config: &DriverPoolConfig) -> Result<Self> {
        use CUdevice_attribute as A;
        if config.max_bytes == Some(0) {
            let reason = "a pool has at least 1 byte; no limit is none given".to_owned();
            return Err(Error::Config { name: "max_bytes", value: "0".to_owned(), reason });
        }
        if device.attribute(A::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)? == 0 {
            return Err(Error::Unsupported { what: "stream-ordered allocator on this device" });
        }
        let kind = config.sharing.handle_type();
        let kinds = device.attribute(A::CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES)?;
        if config.sharing != Sharing::None && kinds as u32 & kind.0 == 0 {
            let (ordinal, sharing) = (device.ordinal(), config.sharing);
            return Err(Error::SharingUnsupported { ordinal, sharing });
        }
        let properties = CUmemPoolProps {
            allocType: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            handleTypes: kind,
            location: device.location(),
            maxSize: config.max_bytes.map_or(0, |bytes| bytes as usize),
            ..Default::default()
        };
        let driver = device.driver();
        let _context = device.enter()?;
        let _beside = BesideCaptures::enter(driver)?;
        let mut handle: CUmemoryPool = ptr::null_mut();
        // SAFETY: both pointers are to live values of the right types.
        unsafe { driver.cuMemPoolCreate(&mut handle, &properties) }?;
        // From here on the pool is destroyed at drop, whatever comes next.
        let pool = Self::over(device, handle, Some(*config));
        let mut keep = config.release_threshold_bytes;
        let threshold = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        // SAFETY: the pool is alive; the attribute is a cuuint64_t, which the pointer is to.
        unsafe {
            driver.cuMemPoolSetAttribute(handle, threshold, (&raw mut keep).cast::<c_void>())
        }?;
        if config.initial_bytes > 0 {
            pool.prime(driver, config.initial_bytes)?;
        }
        Ok(pool)
    }

    /// A pool that is somebody else's: a device's default pool, for example.
    ///
    /// # Safety
    /// The pool must be alive as long as the value, and its memory reachable from this device.
    pub unsafe fn borrow(device: &Device, pool: CUmemoryPool) -> Self {
        Self::over(device, pool, None)
    }

    fn over(device: &Device, pool: CUmemoryPool, config: Option<DriverPoolConfig>) -> Self {
        let device = device.clone();
        Self { device, pool, config, live: Mutex::default(), identity: Identity::unique() }
    }

    /// Has the pool take so much memory, and keep it.
    fn prime(&self, driver: &Driver, bytes: u64) -> Result<()> {
        // Of its own, so that no other is waited for, and no capture is in the way.
        let stream = self.device.stream()?;
        let raw = stream.handle().raw();
        let mut address = 0;
        // SAFETY: the pointer is to a live CUdeviceptr, the pool and the stream are alive.
        unsafe { driver.cuMemAllocFromPoolAsync(&mut address, bytes as usize, self.pool, raw) }
            .map_err(|failure| failure.about(bytes))?;
        // SAFETY: just allocated, and used by nobody.
        if let Err(failure) = unsafe { driver.cuMemFreeAsync(address, raw) } {
            // In use it would outlive the pool. The error to report is the first one.
            if stream.synchronize().is_ok() {
                // SAFETY: it was not freed, and all of its stream's work is complete.
                let _ = unsafe { driver.cuMemFree_v2(address) };
            }
            return Err(failure.into());
        }
        // So that it is every stream's at once.
        stream.synchronize()
    }

    /// The driver's handle of the pool. A pool of this value's own is alive while the value is.
    pub fn raw(&self) -> CUmemoryPool {
        self.pool
    }

    /// What the pool holds of the device's memory, in bytes, in use or not. One driver call.
    ///
    /// # Errors
    /// [`Error::Driver`], [`Error::ContextLost`].
    pub fn reserved_bytes(&self) -> Result<u64> {
        Ok(self.get(CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?)
    }

    /// The most that the pool has held, in bytes. One driver call.
    ///
    /// # Errors
    /// [`Error::Driver`], [`Error::ContextLost`].
    pub fn peak_reserved_bytes(&self) -> Result<u64> {
        Ok(self.get(CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)?)
    }

    /// What of it is in use, in bytes, as the driver counts. One driver call.
    ///
    /// # Errors
    /// [`Error::Driver`], [`Error::ContextLost`].
    pub fn used_bytes(&self) -> Result<u64> {
        Ok(self.get(CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?)
    }

    fn get(&self, attribute: CUmemPool_attribute) -> Result<u64, Failure> {
        let driver = self.device.driver();
        let _beside = BesideCaptures::enter(driver)?;
        let mut value = 0_u64;
        // SAFETY: the pool is alive; the attributes asked for are each a cuuint64_t, which the pointer is
        // to.
        unsafe {
            driver.cuMemPoolGetAttribute(self.pool, attribute, (&raw mut value).cast::<c_void>())
        }?;
        Ok(value)
    }

    /// Gives memory that is free back to the device, as long as `keep_bytes` or more are left of it:
    /// `cuMemPoolTrimTo`. The driver has it in pieces, so that more may stay.
    ///
    /// # Errors
    /// [`Error::Driver`], [`Error::ContextLost`].
    pub fn trim_to(&self, keep_bytes: u64) -> Result<()> {
        let driver = self.device.driver();
        let _beside = BesideCaptures::enter(driver)?;
        // SAFETY: the pool is alive.
        Ok(unsafe { driver.cuMemPoolTrimTo(self.pool, keep_bytes as usize) }?)
    }

    fn live(&self) -> MutexGuard<'_, HashMap<u64, u64>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl MemoryResource for DriverPool {
    /// One driver call for the memory, five around it.
    ///
    /// # Errors
    /// [`Error::BadAlignment`], [`Error::AlignmentUnsupported`] above 256 bytes,
    /// [`Error::SizeOverflow`], [`Error::StreamCapturing`], [`Error::Driver`], [`Error::ContextLost`], [`Error::Forked`].
    fn allocate(&self, bytes: usize, align: usize, stream: StreamHandle) -> Result<DevicePtr> {
        check_align(align, MIN_ALIGN)?;
        if bytes == 0 {
            return Ok(DevicePtr::NULL);
        }
        let rounded = rounded(bytes)?;
        let _context = self.device.enter()?;
        let driver = self.device.driver();
        let _beside = BesideCaptures::enter(driver)?;
        self.device.check_lives(stream)?;
        if stream_is_capturing(driver, stream)? {
            return Err(Error::StreamCapturing);
        }
        let mut address = 0;
        // SAFETY: the pointer is to a live CUdeviceptr, the pool is alive, and whoever made the
        // stream handle vouches for its stream.
        unsafe {
            let stream = stream.raw();
            driver.cuMemAllocFromPoolAsync(&mut address, rounded as usize, self.pool, stream)
        }
        .map_err(|failure| failure.about(bytes as u64))?;
        self.live().insert(address, bytes as u64);
        Ok(DevicePtr::from_address(address))
    }

    /// One driver call for the memory, five around it.
    ///
    /// # Errors
    /// [`Error::ForeignPointer`], for one freed already too; [`Error::WrongSize`],
    /// [`Error::StreamCapturing`], [`Error::Driver`], [`Error::ContextLost`], [`Error::Forked`].
    fn deallocate(
        &self,
        ptr: DevicePtr,
        bytes: usize,
        _align: usize,
        stream: StreamHandle,
    ) -> Result<()> {
        if is_of_nothing(ptr, bytes)? {
            return Ok(());
        }
        let _context = self.device.enter()?;
        let driver = self.device.driver();
        let _beside = BesideCaptures::enter(driver)?;
        let (address, given_bytes) = (ptr.address(), bytes as u64);
        let find = |live: &HashMap<u64, u64>| match live.get(&address) {
            Some(&bytes) if bytes == given_bytes => Ok(()),
            Some(&bytes) => Err(Error::WrongSize { address, given_bytes, bytes }),
            None => Err(Error::ForeignPointer { address }),
        };
        // What is wrong with a pointer is said first, so that who looks for its owner goes on looking.
        find(&self.live())?;
        self.device.check_lives(stream)?;
        if stream_is_capturing(driver, stream)? {
            return Err(Error::StreamCapturing);
        }
        {
            // Out of the table first: once the driver has it, it may hand it out again.
            let mut live = self.live();
            find(&live)?;
            live.remove(&address);
        }
        // SAFETY: the table had the address, so it is allocated and freed once; whoever made the
        // stream handle vouches for its stream.
        unsafe { driver.cuMemFreeAsync(address, stream.raw()) }.map_err(|failure| {
            self.live().insert(address, given_bytes);
            failure.about(given_bytes)
        })
    }

    fn facts(&self) -> Facts {
        Facts::of_device_memory().with_stream_order(true).with_checks(Checks::PointersAndSizes)
    }

    fn describe(&self) -> Description {
        let device = self.device.ordinal();
        let Some(config) = &self.config else {
            return Description::new("cuda-async-view").with("device", device);
        };
        let mut description = Description::new("cuda-async").with("device", device);
        if config.initial_bytes > 0 {
            description = description.with("initial", Bytes(config.initial_bytes));
        }
        if config.release_threshold_bytes != u64::MAX {
            description = description.with("keeps", Bytes(config.release_threshold_bytes));
        }
        if let Some(most) = config.max_bytes {
            description = description.with("max", Bytes(most));
        }
        if config.sharing != Sharing::None {
            description = description.with("sharing", config.sharing);
        }
        description
    }

    fn identity(&self) -> Identity {
        self.identity
    }

    fn device(&self) -> Option<&Device> {
        Some(&self.device)
    }
}

/// A pool of the value's own ends; the driver keeps it until its last allocation is freed.
impl Drop for DriverPool {
    fn drop(&mut self) {
        if self.config.is_some() {
            let driver = self.device.driver();
            // A driver that is shutting down answers with an error, which leaves nothing to do.
            let Ok(_beside) = BesideCaptures::enter(driver) else { return };
            // SAFETY: made in `new`, destroyed once here.
            let _: Result<(), Failure> = unsafe { driver.cuMemPoolDestroy(self.pool) };
        }
    }
}

impl fmt::Debug for DriverPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DriverPool")
            .field("pool", &self.pool)
            .field("config", &self.config)
            .finish()
    }
}

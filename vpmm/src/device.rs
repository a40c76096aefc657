//! Devices, their primary contexts, and streams by their handles.

use std::ffi::c_int;
use std::fmt;
use std::marker::PhantomData;
use std::ptr;
use std::sync::Arc;

use cuda_sys::types::*;

use crate::driver::{Awaited, Driver, Failure, Realm};
use crate::error::{Error, Result};

struct Inner {
    driver: Driver,
    ordinal: u32,
    device: CUdevice,
    context: CUcontext,
    /// The context's number, which none after it has: a device that was reset has its next primary
    /// context at the same handle.
    context_id: u64,
}

// SAFETY: a context handle is a process-wide token that any thread may push; the
// driver synchronises its own state.
unsafe impl Send for Inner {}
// SAFETY: as above; nothing in it changes after construction.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: retained once in `Device::open`, released once here. A driver that is
        // already shutting down answers with an error, which leaves nothing to do.
        let _ = unsafe { self.driver.cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// A device with its primary context retained. Cheap to clone.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

impl Device {
    pub(crate) fn open(driver: &Driver, ordinal: u32) -> Result<Self> {
        driver.check_process()?;
        let mut device: CUdevice = 0;
        // An ordinal past c_int's range cannot exist; -1 lets the driver say so.
        let number = c_int::try_from(ordinal).unwrap_or(-1);
        // SAFETY: the pointer is to a live CUdevice.
        if let Err(failure) = unsafe { driver.cuDeviceGet(&mut device, number) } {
            return Err(match (failure.code, driver.device_count()) {
                (CUresult::CUDA_ERROR_INVALID_DEVICE, Ok(count)) => {
                    Error::NoDevice { ordinal, count }
                }
                _ => failure.into(),
            });
        }
        let mut context: CUcontext = ptr::null_mut();
        // SAFETY: the pointer is to a live CUcontext; the device came from the driver.
        unsafe { driver.cuDevicePrimaryCtxRetain(&mut context, device) }?;
        let driver = driver.clone();
        let mut inner = Inner { driver, ordinal, device, context, context_id: 0 };
        // SAFETY: the context was retained just now; the pointer is to a live number.
        unsafe { inner.driver.cuCtxGetId(context, &mut inner.context_id) }?;
        Ok(Self(Arc::new(inner)))
    }

    /// The driver that the device belongs to.
    pub fn driver(&self) -> &Driver {
        &self.0.driver
    }

    /// The device's number.
    pub fn ordinal(&self) -> u32 {
        self.0.ordinal
    }

    /// The primary context, for calls that this crate does not make itself.
    /// It stays retained while this device or a clone lives.
    pub fn context(&self) -> CUcontext {
        self.0.context
    }

    /// What the maker calls the device.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn name(&self) -> Result<String> {
        let mut name = [0_u8; 256];
        // SAFETY: the buffer has the length given, one byte less than all so that the last stays NUL.
        unsafe { self.0.driver.cuDeviceGetName(name.as_mut_ptr().cast(), 255, self.0.device) }?;
        let text = name.split(|byte| *byte == 0).next().unwrap_or_default();
        Ok(String::from_utf8_lossy(text).into_owned())
    }

    /// One of the driver's device attributes.
    ///
    /// # Errors
    /// [`Error::Driver`]: `CUDA_ERROR_INVALID_VALUE` for one that the driver does not know.
    pub fn attribute(&self, attribute: CUdevice_attribute) -> Result<i32> {
        let mut value = 0;
        // SAFETY: the pointer is to a live c_int.
        unsafe { self.0.driver.cuDeviceGetAttribute(&mut value, attribute, self.0.device) }?;
        Ok(value)
    }

    /// Whether memory that is mapped can be made for GPUDirect RDMA: whether the platform has that at all, and for such
    /// memory.
    pub(crate) fn can_map_for_rdma(&self) -> bool {
        use CUdevice_attribute as A;
        let needed = [
            A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED,
            A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
        ];
        // A driver that is too old to know them has none.
        needed.into_iter().all(|attribute| self.attribute(attribute).is_ok_and(|has| has != 0))
    }

    /// The device's memory in bytes, in use or not.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn total_memory(&self) -> Result<u64> {
        let mut bytes = 0;
        // SAFETY: the pointer is to a live usize.
        unsafe { self.0.driver.cuDeviceTotalMem_v2(&mut bytes, self.0.device) }?;
        Ok(bytes as u64)
    }

    /// The device's memory that nobody uses, in bytes, as the driver counts it.
    ///
    /// # Errors
    /// [`Error::Driver`], [`Error::ContextLost`].
    pub fn free_memory(&self) -> Result<u64> {
        let _context = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both pointers are to live usizes.
        unsafe { self.0.driver.cuMemGetInfo_v2(&mut free, &mut total) }?;
        Ok(free as u64)
    }

    /// Whether the device has the virtual memory management that pools are built on.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn supports_vmm(&self) -> Result<bool> {
        let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
        Ok(self.attribute(attribute)? != 0)
    }

    /// The granule: the least bytes of one physical handle, and what addresses and sizes of
    /// mappings are multiples of. 2 MiB on every discrete GPU so far.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn granularity(&self) -> Result<u64> {
        Ok(self.granularity_of(&CUmemAllocationProp {
            type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            location: self.location(),
            ..Default::default()
        })?)
    }

    /// The granule of one kind of memory.
    pub(crate) fn granularity_of(&self, kind: &CUmemAllocationProp) -> Result<u64, Failure> {
        let option = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let mut bytes = 0;
        // SAFETY: both pointers are to live values of the right types.
        unsafe { self.0.driver.cuMemGetAllocationGranularity(&mut bytes, kind, option) }?;
        Ok(bytes as u64)
    }

    /// Whether this device can reach memory on another one, by NVLink or PCIe; a device reaches its
    /// own. Both are taken by their number, in this device's driver. Where it is so,
    /// [`Pool::set_access`](crate::Pool::set_access) can open a pool to it.
    ///
    /// One driver call: `cuDeviceCanAccessPeer`, in the CUDA driver API's "Peer Context Memory
    /// Access".
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn can_access(&self, owner: &Self) -> Result<bool> {
        if self.0.ordinal == owner.0.ordinal {
            return Ok(true);
        }
        let mut can = 0;
        // SAFETY: the pointer is to a live c_int.
        unsafe { self.0.driver.cuDeviceCanAccessPeer(&mut can, self.0.device, owner.0.device) }?;
        Ok(can != 0)
    }

    /// Waits until all work on the device's primary context has finished. What was freed before is
    /// then everybody's in every pool of this driver on the device.
    ///
    /// While a stream of the context captures the driver refuses it, and ends the capture.
    /// `cuCtxSynchronize`.
    ///
    /// # Errors
    /// [`Error::Driver`], [`Error::ContextLost`].
    pub fn synchronize(&self) -> Result<()> {
        let _context = self.enter()?;
        self.0.driver.tell_wait_for(Awaited::Device(self.0.ordinal), || {
            // SAFETY: no arguments.
            unsafe { self.0.driver.cuCtxSynchronize() }
        })
    }

    /// This device as a place where memory is, or is reached from.
    pub(crate) fn location(&self) -> CUmemLocation {
        CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: self.0.device }
    }

    /// Makes the primary context current on this thread until the guard is dropped.
    /// Two cheap queries where it is current already: 28 ns on an H200's host. Whatever touches a
    /// stream or an event of the device enters first, so that nothing of a context that was reset
    /// reaches the driver.
    pub(crate) fn enter(&self) -> Result<ContextGuard<'_>> {
        let driver = &self.0.driver;
        driver.check_process()?;
        self.check_context()?;
        let mut current: CUcontext = ptr::null_mut();
        // SAFETY: the pointer is to a live CUcontext.
        unsafe { driver.cuCtxGetCurrent(&mut current) }?;
        let pushed = current != self.0.context;
        if pushed {
            // SAFETY: the primary context is retained, so it can be made current.
            unsafe { driver.cuCtxPushCurrent_v2(self.0.context) }?;
        }
        Ok(ContextGuard { driver, pushed, _thread: PhantomData })
    }

    /// The number of its context, which comes no more after a reset.
    pub(crate) fn context_id(&self) -> u64 {
        self.0.context_id
    }

    /// Fails where somebody has reset the device. Its streams and events went with the context then,
    /// which a driver does not always notice: asked about a stream that is gone it may name any
    /// context, or crash.
    fn check_context(&self) -> Result<()> {
        let mut id = 0;
        // SAFETY: the handle is that of a primary context, which the driver goes on knowing; the
        // pointer is to a live number.
        unsafe { self.0.driver.cuCtxGetId(self.0.context, &mut id) }?;
        if id == self.0.context_id {
            return Ok(());
        }
        let code = CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED;
        Err(Error::ContextLost { call: "cuCtxGetId", code })
    }

    /// Makes the primary context that has come after this one current until the guard is dropped, where the device was
    /// reset and one has come.
    pub(crate) fn enter_next(&self) -> Result<Option<ContextGuard<'_>>> {
        let driver = &self.0.driver;
        let mut id = 0;
        // SAFETY: as in `check_context`.
        let asked = unsafe { driver.cuCtxGetId(self.0.context, &mut id) }.map_err(Error::from);
        match asked {
            Err(error) if error.is_context_dead() => return Ok(None),
            asked => asked?,
        }
        if id == self.0.context_id {
            // It is there still, and has failed.
            return Ok(None);
        }
        // SAFETY: the handle is that of the primary context that there is now.
        unsafe { driver.cuCtxPushCurrent_v2(self.0.context) }?;
        Ok(Some(ContextGuard { driver, pushed: true, _thread: PhantomData }))
    }

    /// Fails where a handle has outlived its stream, as far as the library sees the stream's end.
    pub(crate) fn check_lives(&self, stream: StreamHandle) -> Result<()> {
        if self.0.driver.has_ended(stream) { Err(Error::StreamEnded) } else { Ok(()) }
    }

    /// Fails unless the stream belongs to this device's primary context, which must be current.
    pub(crate) fn check_stream(&self, stream: StreamHandle) -> Result<()> {
        self.check_lives(stream)?;
        let driver = &self.0.driver;
        let mut context: CUcontext = ptr::null_mut();
        // SAFETY: whoever made the handle vouches that its stream is alive; the pointer is to a
        // live CUcontext.
        unsafe { driver.cuStreamGetCtx(stream.raw(), &mut context) }?;
        if context == self.0.context {
            return Ok(());
        }
        // SAFETY: the context of a live stream is alive.
        unsafe { driver.cuCtxPushCurrent_v2(context) }?;
        let guard = ContextGuard { driver, pushed: true, _thread: PhantomData };
        let mut device: CUdevice = 0;
        // SAFETY: the pointer is to a live CUdevice, and a context is current.
        let answer = unsafe { driver.cuCtxGetDevice(&mut device) };
        drop(guard);
        answer?;
        if device == self.0.device {
            return Err(Error::WrongContext { device: self.0.ordinal });
        }
        // CUdevice is the ordinal in every driver so far; the type only says it is an int.
        let stream_device = u32::try_from(device).unwrap_or(u32::MAX);
        Err(Error::WrongDevice { stream_device, pool_device: self.0.ordinal })
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("ordinal", &self.0.ordinal).finish()
    }
}

/// Gives the thread its former context back at drop.
pub(crate) struct ContextGuard<'a> {
    driver: &'a Driver,
    pushed: bool,
    /// The current context is a thread's: the guard must not leave the thread.
    _thread: PhantomData<*const ()>,
}

impl Drop for ContextGuard<'_> {
    fn drop(&mut self) {
        if self.pushed {
            let mut context: CUcontext = ptr::null_mut();
            // SAFETY: pops what `enter` pushed on this thread; a context destroyed meanwhile makes
            // the driver answer with an error, after which nothing is left to restore.
            let _ = unsafe { self.driver.cuCtxPopCurrent_v2(&mut context) };
        }
    }
}

/// A stream by its handle.
///
/// Made from a [`Stream`](crate::Stream) it also knows which stream that is and that the library sees its end,
/// which is what lets a pool serve it without a driver call. Made [from a raw
/// handle](Self::from_raw) it knows neither, and each call asks the driver.
///
/// [`StreamHandle::LEGACY`] and [`StreamHandle::PER_THREAD`] name the default streams; they are
/// resolved at each call, in the pool's context and on the calling thread.
#[derive(Clone, Copy)]
pub struct StreamHandle {
    raw: CUstream,
    /// The [`Driver`] that will tell its pools when the stream ends, above the driver's number for
    /// the stream, which it never uses again: one word, so that a handle is passed in two registers.
    /// 0 for a stream whose end nobody tells.
    key: u64,
}

/// Bits of the driver's number for a stream. It counts up.
const NUMBER_BITS: u32 = 64 - Realm::BITS;

// SAFETY: a stream handle is a token that any thread may pass to the driver.
unsafe impl Send for StreamHandle {}
// SAFETY: as above.
unsafe impl Sync for StreamHandle {}

impl StreamHandle {
    /// The legacy default stream, which waits for every blocking stream of its context.
    pub const LEGACY: Self =
        Self { raw: ptr::without_provenance_mut(LEGACY_ADDRESS), key: Self::LEGACY_KEY };

    /// The calling thread's own default stream.
    pub const PER_THREAD: Self = Self::foreign(ptr::without_provenance_mut(2));

    /// A stream made elsewhere (`CUstream`, `cudaStream_t`: one type). Null is the legacy stream.
    ///
    /// # Safety
    /// The stream must be alive in every call that this handle is passed to: a driver may crash
    /// on the handle of a destroyed stream. The pool keeps no handle after a call returns.
    pub unsafe fn from_raw(stream: CUstream) -> Self {
        if stream.addr() <= LEGACY_ADDRESS { Self::LEGACY } else { Self::foreign(stream) }
    }

    pub(crate) const fn foreign(raw: CUstream) -> Self {
        Self { raw, key: 0 }
    }

    /// The same stream, whose end will be told to the pools of a driver.
    pub(crate) fn with_number(self, id: u64, realm: Realm) -> Self {
        Self { key: Self::key_of(id, realm).unwrap_or(0), ..self }
    }

    /// The raw handle.
    pub const fn raw(self) -> CUstream {
        self.raw
    }

    /// The stream's number, where its end will be told to the pools of this driver.
    #[inline]
    pub(crate) fn known_to(self, realm: Realm) -> Option<u64> {
        let known = self.key >> NUMBER_BITS == realm.number();
        (known && realm != Realm::NONE).then_some(self.key & NUMBER)
    }

    /// What tells the stream from all others of the process whose end is told: the legacy stream,
    /// which has none, is one of them. 0 for others.
    #[inline(always)]
    pub(crate) fn key(self) -> u64 {
        self.key
    }

    pub(crate) const LEGACY_KEY: u64 = u64::MAX;

    /// The key of a stream by its number; `None` where that is too large, or drivers were too many.
    pub(crate) fn key_of(id: u64, realm: Realm) -> Option<u64> {
        let fits = realm != Realm::NONE && id <= NUMBER;
        fits.then_some(realm.number() << NUMBER_BITS | id)
    }
}

const NUMBER: u64 = (1 << NUMBER_BITS) - 1;

/// The legacy stream's handle. Null means it, too.
const LEGACY_ADDRESS: usize = 1;

/// Two handles are equal that the driver takes for one.
impl PartialEq for StreamHandle {
    fn eq(&self, other: &Self) -> bool {
        self.raw == other.raw
    }
}

impl Eq for StreamHandle {}

impl std::hash::Hash for StreamHandle {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.raw.hash(state);
    }
}

impl fmt::Debug for StreamHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StreamHandle({:p})", self.raw)
    }
}

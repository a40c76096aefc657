//! Requests smaller than a page: the driver's stream-ordered allocator, on a memory pool of its own.
//!
//! Of its own, because the device's default pool gives its memory back at every synchronisation,
//! and to change that would change it for everybody in the process.
//!
//! Every call on a memory pool invalidates a capture that runs on the same thread, whatever stream
//! the call is about, unless the thread is in relaxed mode: hence [`BesideCaptures`] around each.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr;
use std::sync::Mutex;

use cuda_sys::types::*;

use crate::backing::Backing;
use crate::device::{Device, StreamHandle};
use crate::driver::{Driver, Failure};
use crate::error::{Error, Result};
use crate::event::BesideCaptures;
use crate::location::{Access, Location};
use crate::units::DevicePtr;

/// The bit of a tag that marks a small allocation.
pub(super) const SMALL_TAG: u32 = 1 << 31;

#[derive(Clone, Copy)]
struct Live {
    bytes: u64,
    tag: u32,
}

#[derive(Default)]
struct Book {
    live: BTreeMap<u64, Live>,
    live_bytes: u64,
    last_tag: u32,
}

pub(super) struct Small {
    pool: CUmemoryPool,
    book: Mutex<Book>,
}

// SAFETY: a pool handle is a token that any thread may pass to the driver; the book is locked.
unsafe impl Send for Small {}
// SAFETY: as above.
unsafe impl Sync for Small {}

impl Small {
    /// A pool that keeps what it holds, or `None` where the device has no memory pools of this kind
    /// of memory.
    pub(super) fn new(device: &Device, backing: &Backing) -> Result<Option<Self>> {
        use CUdevice_attribute as A;
        let attribute = match backing.location() {
            Location::Device => A::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED,
            Location::Host => A::CU_DEVICE_ATTRIBUTE_HOST_MEMORY_POOLS_SUPPORTED,
            Location::HostNuma(_) => A::CU_DEVICE_ATTRIBUTE_HOST_NUMA_MEMORY_POOLS_SUPPORTED,
        };
        if device.attribute(attribute)? == 0 {
            return Ok(None);
        }
        let properties = CUmemPoolProps {
            allocType: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            location: backing.cuda_location(),
            ..Default::default()
        };
        let _beside = BesideCaptures::enter(device.driver())?;
        let mut pool: CUmemoryPool = ptr::null_mut();
        // SAFETY: both pointers are to live values of the right types.
        unsafe { device.driver().cuMemPoolCreate(&mut pool, &properties) }?;
        let small = Self { pool, book: Mutex::default() };
        let mut keep = u64::MAX;
        let attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        // SAFETY: the pool is alive; this attribute is a cuuint64_t.
        let set = unsafe {
            device.driver().cuMemPoolSetAttribute(pool, attribute, (&raw mut keep).cast::<c_void>())
        };
        // A pool on the host is the host's alone at first.
        let opened = set.and_then(|()| match backing.location() {
            Location::Device => Ok(()),
            Location::Host | Location::HostNuma(_) => {
                small.set_access(device.driver(), device, Access::ReadWrite)
            }
        });
        if let Err(failure) = opened {
            small.destroy(device.driver());
            return Err(failure.into());
        }
        Ok(Some(small))
    }

    /// Sets what a device may do with the pool's memory, now and from now on. The driver's pools
    /// know no read-only access (an H200 answers NOT_SUPPORTED): who may read may write, too.
    pub(super) fn set_access(
        &self,
        driver: &Driver,
        device: &Device,
        access: Access,
    ) -> Result<(), Failure> {
        let _beside = BesideCaptures::enter(driver)?;
        let granted = if access == Access::Read { Access::ReadWrite } else { access };
        let access = CUmemAccessDesc { location: device.location(), flags: granted.flags() };
        // SAFETY: the pool is alive; the pointer is to one live descriptor.
        unsafe { driver.cuMemPoolSetAccess(self.pool, &access, 1) }
    }

    pub(super) fn malloc(
        &self,
        driver: &Driver,
        bytes: u64,
        stream: StreamHandle,
    ) -> Result<DevicePtr, Failure> {
        let _beside = BesideCaptures::enter(driver)?;
        let mut address = 0;
        // SAFETY: the pointer is to a live CUdeviceptr, the pool is alive, and whoever made the
        // stream handle vouches for its stream.
        unsafe {
            driver.cuMemAllocFromPoolAsync(&mut address, bytes as usize, self.pool, stream.raw())
        }?;
        let mut book = super::lock(&self.book);
        book.last_tag = (book.last_tag + 1) % SMALL_TAG;
        let tag = book.last_tag | SMALL_TAG;
        book.live.insert(address, Live { bytes, tag });
        book.live_bytes += bytes;
        Ok(DevicePtr::tagged(address, tag))
    }

    /// Frees a small allocation; `None` where the pointer has nothing to do with one.
    pub(super) fn free(
        &self,
        driver: &Driver,
        ptr: DevicePtr,
        stream: StreamHandle,
    ) -> Option<Result<()>> {
        let address = ptr.address();
        let live = {
            let mut book = super::lock(&self.book);
            match book.find(ptr) {
                Ok(live) => {
                    book.live.remove(&address);
                    book.live_bytes -= live.bytes;
                    live
                }
                Err(not_live) => return not_live.map(Err),
            }
        };
        // The book forgets the address first: once the driver has it, it may hand it out again.
        let freed = BesideCaptures::enter(driver).and_then(|_beside| {
            // SAFETY: the address is a live allocation of this pool, taken out of the book just now.
            unsafe { driver.cuMemFreeAsync(address, stream.raw()) }
        });
        match freed {
            Ok(()) => Some(Ok(())),
            Err(failure) => {
                let mut book = super::lock(&self.book);
                book.live.insert(address, live);
                book.live_bytes += live.bytes;
                Some(Err(failure.about(live.bytes)))
            }
        }
    }

    /// Whether an address is in a small allocation.
    pub(super) fn holds(&self, address: u64) -> bool {
        let book = super::lock(&self.book);
        let before = book.live.range(..=address).next_back();
        before.is_some_and(|(start, live)| address - start < live.bytes)
    }

    pub(super) fn live_bytes(&self) -> u64 {
        super::lock(&self.book).live_bytes
    }

    pub(super) fn count(&self) -> u64 {
        super::lock(&self.book).live.len() as u64
    }

    /// Physical bytes that the driver's pool holds now.
    pub(super) fn reserved(&self, driver: &Driver) -> Result<u64, Failure> {
        self.read(driver, CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)
    }

    /// The most that it has held.
    pub(super) fn peak_reserved(&self, driver: &Driver) -> Result<u64, Failure> {
        self.read(driver, CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)
    }

    fn read(&self, driver: &Driver, attribute: CUmemPool_attribute) -> Result<u64, Failure> {
        let _beside = BesideCaptures::enter(driver)?;
        let mut value = 0_u64;
        // SAFETY: the pool is alive; these attributes are cuuint64_t.
        unsafe {
            driver.cuMemPoolGetAttribute(self.pool, attribute, (&raw mut value).cast::<c_void>())
        }?;
        Ok(value)
    }

    /// Gives back to the device what no allocation uses.
    pub(super) fn trim(&self, driver: &Driver) -> Result<(), Failure> {
        let _beside = BesideCaptures::enter(driver)?;
        // SAFETY: the pool is alive.
        unsafe { driver.cuMemPoolTrimTo(self.pool, 0) }
    }

    /// Ends the pool; the driver frees it when the last allocation is freed.
    pub(super) fn destroy(&self, driver: &Driver) {
        let Ok(_beside) = BesideCaptures::enter(driver) else { return };
        for address in std::mem::take(&mut super::lock(&self.book).live).into_keys() {
            // SAFETY: live allocations of this pool, whose uses the caller of `destroy` has seen end.
            let _ = unsafe { driver.cuMemFreeAsync(address, StreamHandle::LEGACY.raw()) };
        }
        // SAFETY: the pool is alive, and not used after.
        let _ = unsafe { driver.cuMemPoolDestroy(self.pool) };
    }
}

impl Book {
    /// The allocation that a pointer names, or why it names none: nothing where it is no business
    /// of small allocations at all.
    fn find(&self, ptr: DevicePtr) -> Result<Live, Option<Error>> {
        let address = ptr.address();
        let marked = ptr.tag() & SMALL_TAG != 0;
        match self.live.range(..=address).next_back() {
            Some((start, live)) if *start == address => {
                if ptr.tag() != 0 && ptr.tag() != live.tag {
                    return Err(Some(Error::StalePointer { address }));
                }
                Ok(*live)
            }
            Some((start, live)) if address < start + live.bytes => {
                Err(Some(Error::InteriorPointer { address, start: *start }))
            }
            _ => Err(marked.then_some(Error::DoubleFree { address })),
        }
    }
}

//! Requests smaller than a page: the driver's stream-ordered allocator, on a memory pool of its own.
//!
//! Of its own, because the device's default pool gives its memory back at every synchronisation,
//! and to change that would change it for everybody in the process.
//!
//! Every call on a memory pool invalidates a capture that runs on the same thread, whatever stream
//! the call is about, unless the thread is in relaxed mode: hence [`BesideCaptures`] around each.

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;
use std::ptr;
use std::sync::Mutex;

use cuda_sys::types::*;

use super::Caller;
use crate::backing::Backing;
use crate::capture::BesideCaptures;
use crate::device::{Device, StreamHandle};
use crate::driver::{Driver, Failure};
use crate::error::{Error, Result};
use crate::location::{Access, Location};
use crate::ordering::Reuse;
use crate::units::DevicePtr;

/// The bit of a tag that marks a small allocation.
pub(super) const SMALL_TAG: u32 = 1 << 31;

#[derive(Clone, Copy)]
pub(super) struct Live {
    pub(super) bytes: u64,
    pub(super) tag: u32,
    /// The id of the stream that it was allocated on.
    pub(super) stream: u64,
}

#[derive(Default)]
struct Book {
    live: BTreeMap<u64, Live>,
    live_bytes: u64,
    /// Freed, but used on other streams: the driver does not know yet.
    kept: HashMap<u64, Live>,
    kept_bytes: u64,
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
    pub(super) fn new(device: &Device, backing: &Backing, reuse: Reuse) -> Result<Option<Self>> {
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
        let set = small.set_up(device.driver(), reuse);
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

    /// Keeps what it holds, and switches off what the pool's settings do not allow: all is on at first.
    fn set_up(&self, driver: &Driver, reuse: Reuse) -> Result<(), Failure> {
        use CUmemPool_attribute as A;
        self.set(driver, A::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, u64::MAX)?;
        for (on, attribute) in [
            (reuse.follow_event_dependencies, A::CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES),
            (reuse.opportunistic, A::CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC),
            (reuse.internal_dependencies, A::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES),
        ] {
            if !on {
                self.set(driver, attribute, 0)?;
            }
        }
        Ok(())
    }

    /// Sets an attribute. Those that are an int read the low half of the number.
    fn set(
        &self,
        driver: &Driver,
        attribute: CUmemPool_attribute,
        value: u64,
    ) -> Result<(), Failure> {
        let _beside = BesideCaptures::enter(driver)?;
        let mut value = value;
        // SAFETY: the pool is alive; attributes are a cuuint64_t or, at the same address on a
        // little-endian machine, an int.
        unsafe {
            driver.cuMemPoolSetAttribute(self.pool, attribute, (&raw mut value).cast::<c_void>())
        }
    }

    /// Makes what is held now the most that was.
    pub(super) fn reset_peak(&self, driver: &Driver) -> Result<(), Failure> {
        self.set(driver, CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, 0)
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
        caller: Caller,
    ) -> Result<DevicePtr, Failure> {
        let _beside = BesideCaptures::enter(driver)?;
        let mut address = 0;
        // SAFETY: the pointer is to a live CUdeviceptr, the pool is alive, and whoever made the
        // stream handle vouches for its stream.
        unsafe {
            let stream = caller.stream.raw();
            driver.cuMemAllocFromPoolAsync(&mut address, bytes as usize, self.pool, stream)
        }?;
        let mut book = super::lock(&self.book);
        book.last_tag = (book.last_tag + 1) % SMALL_TAG;
        let tag = book.last_tag | SMALL_TAG;
        book.live.insert(address, Live { bytes, tag, stream: caller.stream_id });
        book.live_bytes += bytes;
        Ok(DevicePtr::tagged(address, tag))
    }

    /// Takes a small allocation out of the caller's hands, to be freed now or, where it is to be
    /// kept, later; `None` where the pointer has nothing to do with one.
    pub(super) fn take(&self, ptr: DevicePtr, keep: bool) -> Option<Result<Live>> {
        let address = ptr.address();
        let mut book = super::lock(&self.book);
        let live = match book.find(ptr) {
            Ok(live) => live,
            Err(not_live) => return not_live.map(Err),
        };
        book.live.remove(&address);
        book.live_bytes -= live.bytes;
        if keep {
            book.keep(address, live);
        }
        Some(Ok(live))
    }

    /// Whether a pointer is a small allocation that may be freed.
    pub(super) fn check_live(&self, ptr: DevicePtr) -> Result<bool> {
        match super::lock(&self.book).find(ptr) {
            Ok(_) => Ok(true),
            Err(None) => Ok(false),
            Err(Some(error)) => Err(error),
        }
    }

    /// Gives the driver an allocation that [`take`](Self::take) took and did not keep. The book has
    /// forgotten the address: once the driver has it, it may hand it out again.
    pub(super) fn free_taken(
        &self,
        driver: &Driver,
        address: u64,
        live: Live,
        stream: StreamHandle,
    ) -> Result<()> {
        self.tell_free(driver, address, stream).map_err(|failure| {
            let mut book = super::lock(&self.book);
            book.live.insert(address, live);
            book.live_bytes += live.bytes;
            failure.about(live.bytes)
        })
    }

    /// Gives the driver an allocation that was kept, of so many bytes. Where that fails it is still kept.
    pub(super) fn free_kept(
        &self,
        driver: &Driver,
        address: u64,
        stream: StreamHandle,
    ) -> Result<u64> {
        let Some(kept) = super::lock(&self.book).unkeep(address) else { return Ok(0) };
        match self.tell_free(driver, address, stream) {
            Ok(()) => Ok(kept.bytes),
            Err(failure) => {
                super::lock(&self.book).keep(address, kept);
                Err(failure.about(kept.bytes))
            }
        }
    }

    fn tell_free(
        &self,
        driver: &Driver,
        address: u64,
        stream: StreamHandle,
    ) -> Result<(), Failure> {
        let _beside = BesideCaptures::enter(driver)?;
        // SAFETY: the address is an allocation of this pool that the driver takes for live: the
        // caller has just taken it out of the book.
        unsafe { driver.cuMemFreeAsync(address, stream.raw()) }
    }

    /// Undoes a [`take`](Self::take) that kept.
    pub(super) fn leave_live(&self, address: u64) {
        let mut book = super::lock(&self.book);
        if let Some(live) = book.unkeep(address) {
            book.live.insert(address, live);
            book.live_bytes += live.bytes;
        }
    }

    /// The allocation that an address is in, and its start.
    pub(super) fn containing(&self, address: u64) -> Option<(u64, Live)> {
        let book = super::lock(&self.book);
        let (start, live) = book.live.range(..=address).next_back()?;
        (address - start < live.bytes).then_some((*start, *live))
    }

    /// Whether the book has an allocation that was freed and is kept.
    pub(super) fn keeps(&self, address: u64) -> bool {
        super::lock(&self.book).kept.contains_key(&address)
    }

    /// Whether an address is in a small allocation.
    pub(super) fn holds(&self, address: u64) -> bool {
        self.containing(address).is_some()
    }

    pub(super) fn live_bytes(&self) -> u64 {
        super::lock(&self.book).live_bytes
    }

    /// Checks the sums of the book.
    pub(super) fn check(&self) -> Result<(), String> {
        let book = super::lock(&self.book);
        let live: u64 = book.live.values().map(|live| live.bytes).sum();
        let kept: u64 = book.kept.values().map(|kept| kept.bytes).sum();
        if (live, kept) != (book.live_bytes, book.kept_bytes) {
            return Err(format!(
                "small allocations: {live} and {kept} bytes live and kept, {} and {} entered",
                book.live_bytes, book.kept_bytes
            ));
        }
        if let Some(address) = book.kept.keys().find(|address| book.live.contains_key(address)) {
            return Err(format!("the small allocation at {address:#x} is live and freed"));
        }
        Ok(())
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

    /// Gives back to the device what no allocation uses, down to so many bytes.
    pub(super) fn trim_to(&self, driver: &Driver, keep_bytes: u64) -> Result<(), Failure> {
        let _beside = BesideCaptures::enter(driver)?;
        // SAFETY: the pool is alive.
        unsafe { driver.cuMemPoolTrimTo(self.pool, keep_bytes as usize) }
    }

    /// Ends the pool; the driver frees it when the last allocation is freed.
    pub(super) fn destroy(&self, driver: &Driver) {
        let Ok(_beside) = BesideCaptures::enter(driver) else { return };
        let book = std::mem::take(&mut *super::lock(&self.book));
        let mut left = book.live.into_keys().chain(book.kept.into_keys()).peekable();
        if left.peek().is_some() {
            // On a stream that is nobody's: the legacy one is forbidden beside a blocking stream's capture, which
            // the driver would end, and the thread's own may be capturing.
            let flags = CUstream_flags_enum::CU_STREAM_NON_BLOCKING.0;
            let mut own: CUstream = ptr::null_mut();
            // SAFETY: the pointer is to a live CUstream, and the context is current.
            let made = unsafe { driver.cuStreamCreate(&mut own, flags) };
            let stream = if made.is_ok() { own } else { StreamHandle::LEGACY.raw() };
            for address in left {
                // SAFETY: live allocations of this pool, whose uses the caller of `destroy` has seen end.
                let _ = unsafe { driver.cuMemFreeAsync(address, stream) };
            }
            if made.is_ok() {
                // SAFETY: made above, and nobody else has it. What it was given is done all the same.
                let _ = unsafe { driver.cuStreamDestroy_v2(own) };
            }
        }
        // SAFETY: the pool is alive, and not used after.
        let _ = unsafe { driver.cuMemPoolDestroy(self.pool) };
    }
}

impl Book {
    fn keep(&mut self, address: u64, live: Live) {
        self.kept.insert(address, live);
        self.kept_bytes += live.bytes;
    }

    fn unkeep(&mut self, address: u64) -> Option<Live> {
        let kept = self.kept.remove(&address)?;
        self.kept_bytes -= kept.bytes;
        Some(kept)
    }

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
            _ => {
                let freed = marked || self.kept.contains_key(&address);
                Err(freed.then_some(Error::DoubleFree { address }))
            }
        }
    }
}

//! The pool as its users see it.

use std::fmt;
use std::sync::Arc;

use crate::default::{Core, Helper, PoolConfig};
use crate::device::{Device, StreamHandle};
use crate::error::Result;
use crate::location::Access;
use crate::paged::{Layout, PagedConfig, PagedPool};
use crate::sharing::{Export, Source};
use crate::stats::Stats;
use crate::units::DevicePtr;
use crate::validate::Violation;

/// A pool of device memory, in stream order.
///
/// Memory from [`malloc`](Self::malloc) may be used by work enqueued on that stream after the
/// call, and [`free`](Self::free) may be called while work that uses the memory is still queued on
/// the stream given to it. Both return without waiting for the GPU.
///
/// Any thread may use it. Dropping it waits for the work before its frees (for the whole context,
/// where allocations were never freed) and gives everything back, such allocations included.
pub struct Pool {
    /// First, so that its thread has ended when the memory is given back.
    _helper: Option<Helper>,
    profile: Profile,
}

enum Profile {
    Default(Arc<Core>),
    Paged(Box<PagedPool>),
}

impl Pool {
    /// A pool of the default profile: blocks in steps of 512 bytes (above 16 KiB of at most a
    /// sixteenth, above 64 KiB of 4 KiB), placed by best fit;
    /// memory made in extents of many sizes, grown in place where that is possible, and brought
    /// together by mapping it elsewhere where it is scattered.
    ///
    /// What a stream has freed serves the same stream at once, without a driver call. Another
    /// stream gets it once its work has finished, which the pool finds out by one event for
    /// everything freed so far.
    ///
    /// # Streams
    /// - [`Stream`](crate::Stream)s made by this pool's [`Driver`](crate::Driver) and the legacy
    ///   default stream: the event is recorded when somebody wants the memory, and before the
    ///   stream is destroyed.
    /// - Handles from elsewhere, and per-thread default streams: nobody tells when they end, so the
    ///   event is recorded at each free, and each call asks the driver which stream
    ///   the handle means. Such a stream cannot allocate or free while it captures a graph
    ///   ([`Error::StreamCapturing`]): even the question which one it is would end the capture.
    /// - A library's stream may capture: no event is recorded on it meanwhile. The graph must be
    ///   launched where it comes after the work enqueued on the stream before the capture, and what
    ///   it uses must stay allocated while it may run.
    ///
    /// Reserves addresses; makes no memory yet. Starts a thread where
    /// [`background`](PoolConfig::background) asks for one.
    ///
    /// # Errors
    /// [`Error::Config`], [`Error::VmmUnsupported`], [`Error::LocationUnsupported`],
    /// [`Error::SharingUnsupported`], [`Error::AddressSpaceExhausted`], [`Error::NoThread`],
    /// [`Error::Driver`].
    ///
    /// [`Error::Config`]: crate::Error::Config
    /// [`Error::VmmUnsupported`]: crate::Error::VmmUnsupported
    /// [`Error::LocationUnsupported`]: crate::Error::LocationUnsupported
    /// [`Error::SharingUnsupported`]: crate::Error::SharingUnsupported
    /// [`Error::AddressSpaceExhausted`]: crate::Error::AddressSpaceExhausted
    /// [`Error::NoThread`]: crate::Error::NoThread
    /// [`Error::Driver`]: crate::Error::Driver
    /// [`Error::StreamCapturing`]: crate::Error::StreamCapturing
    pub fn new(device: &Device, config: &PoolConfig) -> Result<Self> {
        let core = Core::new(device, config)?;
        Ok(Self { _helper: Helper::start(&core)?, profile: Profile::Default(core) })
    }

    /// A pool of the paged profile: everything rounds up to pages of 2 MiB (or another multiple of
    /// the device's granularity), one physical handle a page; smaller requests go to the driver's
    /// stream-ordered allocator. Fragmented free pages are made contiguous by mapping them
    /// elsewhere, without a copy and without waiting for the GPU.
    ///
    /// Reserves `va_size_bytes` of addresses and maps `initial_pages`, one by one.
    ///
    /// # Errors
    /// [`Error::Config`] for a setting that the device cannot have, [`Error::VmmUnsupported`],
    /// [`Error::LocationUnsupported`], [`Error::SharingUnsupported`],
    /// [`Error::OutOfMemory`] for the initial pages, [`Error::AddressSpaceExhausted`],
    /// [`Error::Driver`].
    ///
    /// [`Error::Config`]: crate::Error::Config
    /// [`Error::VmmUnsupported`]: crate::Error::VmmUnsupported
    /// [`Error::LocationUnsupported`]: crate::Error::LocationUnsupported
    /// [`Error::SharingUnsupported`]: crate::Error::SharingUnsupported
    /// [`Error::OutOfMemory`]: crate::Error::OutOfMemory
    /// [`Error::AddressSpaceExhausted`]: crate::Error::AddressSpaceExhausted
    /// [`Error::Driver`]: crate::Error::Driver
    pub fn paged(device: &Device, config: &PagedConfig) -> Result<Self> {
        let pool = Box::new(PagedPool::new(device, config)?);
        Ok(Self { _helper: None, profile: Profile::Paged(pool) })
    }

    /// Allocates `bytes` for use on `stream`. The address is a multiple of 512 bytes in the default
    /// profile; in the paged one of the page for requests of a page or more, of 256 for smaller
    /// ones.
    ///
    /// Free memory of this stream, and memory that no stream can still be using, is handed out
    /// at once; else memory is moved and made, some 30 µs for each physical handle on an H200
    /// (`benches/results/h200-2026-11-21`, `gather`).
    ///
    /// # Errors
    /// [`Error::ZeroSize`], [`Error::SizeOverflow`], [`Error::OutOfMemory`],
    /// [`Error::AddressSpaceExhausted`], [`Error::WrongDevice`], [`Error::WrongContext`],
    /// [`Error::StreamCapturing`], [`Error::ContextLost`], [`Error::Driver`]. The pool is as it
    /// was before the call.
    ///
    /// [`Error::ZeroSize`]: crate::Error::ZeroSize
    /// [`Error::SizeOverflow`]: crate::Error::SizeOverflow
    /// [`Error::OutOfMemory`]: crate::Error::OutOfMemory
    /// [`Error::AddressSpaceExhausted`]: crate::Error::AddressSpaceExhausted
    /// [`Error::WrongDevice`]: crate::Error::WrongDevice
    /// [`Error::WrongContext`]: crate::Error::WrongContext
    /// [`Error::StreamCapturing`]: crate::Error::StreamCapturing
    /// [`Error::ContextLost`]: crate::Error::ContextLost
    /// [`Error::Driver`]: crate::Error::Driver
    #[inline]
    pub fn malloc(&self, bytes: usize, stream: impl Into<StreamHandle>) -> Result<DevicePtr> {
        match &self.profile {
            Profile::Default(pool) => pool.malloc(bytes, stream.into()),
            Profile::Paged(pool) => pool.malloc(bytes, stream.into()),
        }
    }

    /// Frees an allocation once everything enqueued on `stream` so far has finished. The stream
    /// need not be the one of the allocation; uses on other streams must be ordered before.
    ///
    /// # Errors
    /// [`Error::DoubleFree`], [`Error::StalePointer`], [`Error::InteriorPointer`],
    /// [`Error::ForeignPointer`], [`Error::WrongDevice`], [`Error::WrongContext`],
    /// [`Error::StreamCapturing`], [`Error::ContextLost`], [`Error::Driver`]. The allocation is
    /// then still the caller's.
    ///
    /// [`Error::DoubleFree`]: crate::Error::DoubleFree
    /// [`Error::StalePointer`]: crate::Error::StalePointer
    /// [`Error::InteriorPointer`]: crate::Error::InteriorPointer
    /// [`Error::ForeignPointer`]: crate::Error::ForeignPointer
    /// [`Error::WrongDevice`]: crate::Error::WrongDevice
    /// [`Error::WrongContext`]: crate::Error::WrongContext
    /// [`Error::StreamCapturing`]: crate::Error::StreamCapturing
    /// [`Error::ContextLost`]: crate::Error::ContextLost
    /// [`Error::Driver`]: crate::Error::Driver
    #[inline]
    pub fn free(&self, ptr: DevicePtr, stream: impl Into<StreamHandle>) -> Result<()> {
        match &self.profile {
            Profile::Default(pool) => pool.free(ptr, stream.into()),
            Profile::Paged(pool) => pool.free(ptr, stream.into()),
        }
    }

    /// The device whose streams the memory is for, and which has it where
    /// [`Location`](crate::Location) does not say otherwise.
    pub fn device(&self) -> &Device {
        match &self.profile {
            Profile::Default(pool) => pool.device(),
            Profile::Paged(pool) => pool.device(),
        }
    }

    /// Sets what another device may do with the pool's memory: all that it holds, and all that it
    /// will hold, wherever it is mapped. At first no other device may do anything.
    ///
    /// The work that uses the memory there must be ordered by its caller, as on any stream that is
    /// not the allocation's. A right that is given is there for work enqueued after the call. One is
    /// taken away at once: work of that device that uses the memory, also what was freed already,
    /// must have finished, since the call does not wait for it. Other devices' work goes on.
    ///
    /// One driver call for each run of mapped addresses, some 10 µs for each physical handle in it on
    /// an H200; requests that have to grow the pool wait meanwhile. `cuMemSetAccess`, in the
    /// CUDA driver API's "Virtual Memory Management"; for the small requests of the paged profile
    /// `cuMemPoolSetAccess`, in "Stream Ordered Memory Allocator". Every later growth opens its
    /// memory to all devices in the one call that it makes anyway.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let sim = cuda_sim::Simulator::builder().devices(2).build()?;
    /// # let driver = vpmm::Driver::new(sim.driver())?;
    /// use vpmm::Access;
    ///
    /// let (device, peer) = (driver.device(0)?, driver.device(1)?);
    /// let pool = vpmm::Pool::new(&device, &vpmm::PoolConfig::default())?;
    /// if peer.can_access(&device)? {
    ///     pool.set_access(&peer, Access::ReadWrite)?;
    /// }
    /// assert_eq!(pool.access(&peer), Access::ReadWrite);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// In the paged profile small requests come from a pool of the driver's, which knows no read-only
    /// access: with [`Access::Read`](crate::Access::Read) those can be written, too.
    ///
    /// # Errors
    /// [`Error::PeerUnsupported`] where the device cannot reach the memory, [`Error::OwnerAccess`] for
    /// less than everything to the pool's own device, [`Error::ContextLost`], [`Error::Driver`]. The
    /// device then has the access that it had.
    ///
    /// [`Error::PeerUnsupported`]: crate::Error::PeerUnsupported
    /// [`Error::OwnerAccess`]: crate::Error::OwnerAccess
    /// [`Error::ContextLost`]: crate::Error::ContextLost
    /// [`Error::Driver`]: crate::Error::Driver
    pub fn set_access(&self, device: &Device, access: Access) -> Result<()> {
        match &self.profile {
            Profile::Default(pool) => pool.set_access(device, access),
            Profile::Paged(pool) => pool.set_access(device, access),
        }
    }

    /// What a device may do with the pool's memory. No driver call.
    pub fn access(&self, device: &Device) -> Access {
        match &self.profile {
            Profile::Default(pool) => pool.access_of(device),
            Profile::Paged(pool) => pool.access_of(device),
        }
    }

    /// One allocation, to be sent to another process: see [`Export`]. The pool must have been made with
    /// [`sharing`](PoolConfig::sharing). With it go the physical handles that it lies on, whole; they
    /// never move again (in the paged profile no page of the pool does). Free the allocation only when
    /// the other process has finished with it: its memory is the pool's again from then on.
    ///
    /// Host-side, no driver call; a request that has to grow the pool waits meanwhile.
    ///
    /// # Errors
    /// [`Error::NotShareable`] for a pool without sharing, and for a request of the paged profile that
    /// is smaller than a page; [`Error::ForeignPointer`], [`Error::InteriorPointer`],
    /// [`Error::DoubleFree`], [`Error::StalePointer`].
    ///
    /// [`Error::NotShareable`]: crate::Error::NotShareable
    /// [`Error::ForeignPointer`]: crate::Error::ForeignPointer
    /// [`Error::InteriorPointer`]: crate::Error::InteriorPointer
    /// [`Error::DoubleFree`]: crate::Error::DoubleFree
    /// [`Error::StalePointer`]: crate::Error::StalePointer
    pub fn export(&self, ptr: DevicePtr) -> Result<Export<'_>> {
        Export::new(self.source(), Some(ptr.address()))
    }

    /// The whole pool, to be sent to another process, and sent again when it has grown: see [`Export`].
    /// The other process finds every address of this one by
    /// [`Imported::translate`](crate::Imported::translate). No driver call.
    ///
    /// # Errors
    /// [`Error::NotShareable`](crate::Error::NotShareable) for a pool without sharing.
    pub fn export_all(&self) -> Result<Export<'_>> {
        Export::new(self.source(), None)
    }

    fn source(&self) -> &(dyn Source + Sync) {
        match &self.profile {
            Profile::Default(pool) => pool.as_ref(),
            Profile::Paged(pool) => pool.as_ref(),
        }
    }

    /// What the pool holds. Two driver calls in the paged profile, for the memory of small requests;
    /// none in the default one, but a look into the fronts of other threads (a system call).
    pub fn stats(&self) -> Stats {
        match &self.profile {
            Profile::Default(pool) => pool.stats(),
            Profile::Paged(pool) => pool.stats(),
        }
    }

    /// What stands where, as text: see [`Layout`].
    pub fn layout(&self) -> Layout {
        match &self.profile {
            Profile::Default(pool) => pool.layout(),
            Profile::Paged(pool) => pool.layout(),
        }
    }

    /// Checks every invariant of the pool's books, from scratch. For tests: it looks at every page.
    ///
    /// # Errors
    /// The first invariant that does not hold.
    pub fn validate(&self) -> Result<(), Violation> {
        match &self.profile {
            Profile::Default(pool) => pool.validate(),
            Profile::Paged(pool) => pool.validate(),
        }
    }
}

/// The numbers of [`Pool::stats`], the driver calls by name, and every region in ascending order
/// of addresses.
impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.profile {
            Profile::Default(pool) => pool.debug(f),
            Profile::Paged(pool) => pool.debug(f),
        }
    }
}

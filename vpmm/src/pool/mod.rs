//! The pool as its users see it.

mod family;
mod heaps;
mod limits;
mod ordering;
mod places;

use std::fmt;
use std::sync::Arc;

use crate::default::{Core, Helper, PoolConfig};
use crate::device::{Device, StreamHandle};
use crate::error::Result;
use crate::heap::Heap;
use crate::heaps::{Heaps, Terms};
use crate::layout::Layout;
use crate::paged::{PagedConfig, PagedPool};
use crate::stats::Stats;
use crate::units::DevicePtr;
use crate::validate::Violation;
use family::Family;

pub use heaps::{GraphPool, Tagged};

/// A pool of device memory, in stream order.
///
/// Memory from [`malloc`](Self::malloc) may be used by work enqueued on that stream after the
/// call, and [`free`](Self::free) may be called while work that uses the memory is still queued on
/// the stream given to it. Both return without waiting for the GPU.
///
/// Any thread may use it. Dropping it waits for the work before its frees (for the whole context,
/// where allocations were never freed) and gives everything back, such allocations included.
///
/// A clone is the same pool: it lives until the last one is dropped.
#[derive(Clone)]
pub struct Pool {
    /// Here, and not in the family, so that the hot path has one pointer to follow.
    profile: Profile,
    family: Arc<Family>,
}

#[derive(Clone)]
enum Profile {
    Default(Arc<Core>),
    Paged(Arc<PagedPool>),
}

impl Profile {
    fn heap(&self) -> Arc<dyn Heap> {
        match self {
            Self::Default(pool) => Arc::clone(pool) as _,
            Self::Paged(pool) => Arc::clone(pool) as _,
        }
    }
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
    ///   ([`Error::StreamCapturing`]): even the question which one it is would end the capture. Where
    ///   a [graph's pool](Self::graph_pool) is open to that capture it can.
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
        let helper = Helper::start(&core)?;
        Ok(Self::of(
            Profile::Default(core),
            helper,
            Terms::of(config.limit_bytes, config.pending_policy, config.reuse),
        ))
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
        let pool = PagedPool::new(device, config)?;
        Ok(Self::of(
            Profile::Paged(pool),
            None,
            Terms::of(config.limit_bytes, config.pending_policy, config.reuse),
        ))
    }

    fn of(profile: Profile, helper: Option<Helper>, terms: Terms) -> Self {
        let core = match &profile {
            Profile::Default(core) => Some(Arc::clone(core)),
            Profile::Paged(_) => None,
        };
        let heaps = Heaps::new(profile.heap(), core, terms);
        if let Profile::Paged(pool) = &profile {
            let small: std::sync::Weak<dyn crate::budget::Besides> = Arc::downgrade(pool) as _;
            profile.heap().backing().budget().count_besides(small);
        }
        let family = Arc::new(Family::new(profile.heap(), heaps, helper));
        Self { profile, family }
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
            Profile::Paged(pool) => self.malloc_paged(pool, bytes, stream.into()),
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
            Profile::Paged(pool) => self.free_paged(pool, ptr, stream.into()),
        }
    }

    /// Everything but the hot path.
    fn heap(&self) -> &(dyn Heap + 'static) {
        self.family.main()
    }

    /// The device whose streams the memory is for, and which has it where
    /// [`Location`](crate::Location) does not say otherwise.
    pub fn device(&self) -> &Device {
        self.heap().device()
    }

    /// What the pool holds, its [graphs' pools](Self::graph_pool) and [tagged heaps](Self::tagged)
    /// included. Two driver calls in the paged profile, for the memory of small requests;
    /// none in the default one, but a look into the fronts of other threads (a system call).
    pub fn stats(&self) -> Stats {
        let mut stats = self.heap().stats();
        stats.add(&self.family.heaps.stats());
        stats
    }

    /// What stands where, as text: see [`Layout`].
    pub fn layout(&self) -> Layout {
        self.heap().layout()
    }

    /// Checks every invariant of the pool's books, from scratch. For tests: it looks at every page.
    ///
    /// # Errors
    /// The first invariant that does not hold.
    pub fn validate(&self) -> Result<(), Violation> {
        self.heap().validate()?;
        self.family.heaps.validate()
    }
}

/// The numbers of [`Pool::stats`], the driver calls by name, and every region in ascending order
/// of addresses.
impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.heap().debug(f)
    }
}

//! The pool as its users see it.

mod by_address;
mod current;
mod family;
mod heaps;
mod lifetime;
mod limits;
mod ordering;
mod out_of_memory;
mod places;
mod registry;

pub use current::CurrentPool;
pub use out_of_memory::OutOfMemoryCallback;

use std::fmt;
use std::sync::Arc;

use crate::default::{AtHand, Core, Freed, Helper, PoolConfig};
use crate::device::{Device, StreamHandle};
use crate::error::Result;
use crate::heap::Heap;
use crate::heaps::{Heaps, Terms};
use crate::layout::Layout;
use crate::location::Location;
use crate::paged::{PagedConfig, PagedPool};
use crate::snapshot::Segment;
use crate::stats::Stats;
use crate::units::DevicePtr;
use crate::validate::Violation;
use family::Family;
use out_of_memory::Shortage;
use registry::{Handles, Registry};

pub use heaps::{GraphPool, Tagged};

/// A pool of device memory, in stream order.
///
/// Memory from [`malloc`](Self::malloc) may be used by work enqueued on that stream after the
/// call, and [`free`](Self::free) may be called while work that uses the memory is still queued on
/// the stream given to it. Neither waits for the GPU, but a `malloc` that would find no memory
/// otherwise: as long as the pool's [`WaitPolicy`](crate::WaitPolicy) says, by default until what was
/// freed before is finished with.
///
/// Any thread may use it. A clone is a handle of the same pool, and equal to it.
///
/// # The end of a pool
/// When its last handle is dropped and nothing of it is allocated, the pool waits for the work before
/// its frees and gives everything back.
///
/// With allocations out it lives on, owned by its [`Driver`](crate::Driver), as a driver's pool does after
/// `cuMemPoolDestroy`: memory that is free goes back, as far as the GPU has finished with it, at once and each time
/// that a further eighth of what was allocated has been freed, if that is 16 MiB. [`Pool::of`] finds the pool from
/// a pointer and gives a handle again, with which everything can be done; [`Pool::free_any`] frees through one.
/// When such a handle is dropped and nothing is allocated any more the pool ends as above. What is never freed
/// keeps its memory, the device and the driver's value until the process ends. [`Pool::destroy`] ends a pool with
/// all that is allocated.
///
/// # Forks
/// In a child of the process nothing of a pool works, as nothing of the driver does: calls that can
/// fail do so by [`Error::Forked`](crate::Error::Forked), others have nothing to tell, and a drop
/// leaves everything to the parent, which goes on unharmed.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let sim = cuda_sim::Simulator::builder().build()?;
/// # let driver = vpmm::Driver::new(sim.driver())?;
/// # let device = driver.device(0)?;
/// # let stream = device.stream()?;
/// use vpmm::{Pool, PoolConfig};
///
/// let pool = Pool::new(&device, &PoolConfig::default())?;
/// let ptr = pool.malloc(1 << 20, &stream)?;
/// drop(pool);
/// Pool::free_any(&driver, ptr, &stream)?; // and everything goes back to the device
/// assert!(Pool::of(&driver, ptr.address()).is_none());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Pool {
    /// Here, and not in the family, so that the hot path has one pointer to follow.
    profile: Profile,
    family: Arc<Family>,
    /// Last, so that nothing of a handle is left when the last one ends the pool.
    handles: Arc<Handles>,
}

/// Two handles are equal that are of one pool.
impl PartialEq for Pool {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.family, &other.family)
    }
}

impl Eq for Pool {}

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
        device.driver().check_process()?;
        let core = Core::new(device, config)?;
        // Another thread may be telling it of a stream just now, in whose hands it must not end.
        let helper = Helper::start(&core).inspect_err(|_| core.retire())?;
        let terms = Terms {
            limit_bytes: config.limit_bytes,
            release_threshold_bytes: config.release_threshold_bytes,
            pending_policy: config.pending_policy,
            reuse: config.reuse,
            out_of_memory: config.out_of_memory,
            moves_per_second: config.moves_per_second,
            patience: config.patience,
        };
        Ok(Self::open(Profile::Default(core), helper, terms))
    }

    /// A pool of the paged profile: everything rounds up to pages of 2 MiB (or another multiple of
    /// the device's granularity), one physical handle a page; smaller requests go to the driver's
    /// stream-ordered allocator. Fragmented free pages are made contiguous by mapping them
    /// elsewhere, without a copy and without waiting for the GPU.
    ///
    /// Reserves `va_size_bytes` of addresses and maps `initial_pages`, one by one.
    ///
    /// A thread that ends while its own default stream still has work with small requests may hang in
    /// the driver, and with it every other that calls the driver (580.159 does, without this library
    /// too): have it wait for the stream first.
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
        device.driver().check_process()?;
        let pool = PagedPool::new(device, config)?;
        // What this profile has no setting for is as by default in heaps of the other.
        let PoolConfig { moves_per_second, patience, .. } = PoolConfig::default();
        let terms = Terms {
            limit_bytes: config.limit_bytes,
            release_threshold_bytes: config.release_threshold_bytes,
            pending_policy: config.pending_policy,
            reuse: config.reuse,
            out_of_memory: config.out_of_memory,
            moves_per_second,
            patience,
        };
        Ok(Self::open(Profile::Paged(pool), None, terms))
    }

    fn open(profile: Profile, helper: Option<Helper>, terms: Terms) -> Self {
        let policy = terms.out_of_memory;
        let core = match &profile {
            Profile::Default(core) => Some(Arc::clone(core)),
            Profile::Paged(_) => None,
        };
        let heaps = Heaps::new(profile.heap(), core, terms);
        let registry = Arc::clone(Registry::of(profile.heap().device().driver()));
        registry.enter(Arc::new(Family::new(profile, heaps, helper, Shortage::new(policy))))
    }

    /// Allocates `bytes` for use on `stream`. The address is a multiple of 512 bytes in the default
    /// profile; in the paged one of the page for requests of a page or more, of 256 for smaller
    /// ones.
    ///
    /// Free memory of this stream, and memory that no stream can still be using, is handed out
    /// at once; else memory is moved and made, some 30 µs for each physical handle on an H200
    /// (`benches/results/h200-2026-11-21`, `gather`).
    ///
    /// Where no memory is found, callbacks are asked ([`on_out_of_memory`](Self::on_out_of_memory)),
    /// and the request waits as long as [`WaitPolicy`](crate::WaitPolicy) says. The error carries a
    /// [map](crate::Error::map) of the pool.
    ///
    /// # Errors
    /// [`Error::ZeroSize`], [`Error::SizeOverflow`], [`Error::OutOfMemory`],
    /// [`Error::AddressSpaceExhausted`], [`Error::WrongDevice`], [`Error::WrongContext`],
    /// [`Error::StreamCapturing`], [`Error::StreamEnded`], [`Error::ContextLost`], [`Error::Driver`]. The
    /// pool is as it was before the call.
    ///
    /// [`Error::ZeroSize`]: crate::Error::ZeroSize
    /// [`Error::SizeOverflow`]: crate::Error::SizeOverflow
    /// [`Error::OutOfMemory`]: crate::Error::OutOfMemory
    /// [`Error::AddressSpaceExhausted`]: crate::Error::AddressSpaceExhausted
    /// [`Error::WrongDevice`]: crate::Error::WrongDevice
    /// [`Error::WrongContext`]: crate::Error::WrongContext
    /// [`Error::StreamCapturing`]: crate::Error::StreamCapturing
    /// [`Error::StreamEnded`]: crate::Error::StreamEnded
    /// [`Error::ContextLost`]: crate::Error::ContextLost
    /// [`Error::Driver`]: crate::Error::Driver
    #[inline]
    pub fn malloc(&self, bytes: usize, stream: impl Into<StreamHandle>) -> Result<DevicePtr> {
        let stream = stream.into();
        // What is called is called last, with what is in registers: then hits save none.
        if let Profile::Default(pool) = &self.profile {
            match pool.malloc_at_hand(bytes, stream) {
                AtHand::Served(ptr) => return Ok(ptr),
                AtHand::Loose(routed) => return self.malloc_loosely(pool, routed),
                AtHand::Missed(routed) => return self.malloc_behind(pool, routed),
                AtHand::Unknown => {}
            }
        }
        self.malloc_beyond(bytes, stream)
    }

    /// Frees an allocation once everything enqueued on `stream` so far has finished. The stream
    /// need not be the one of the allocation; that one's work until the allocation, and uses on other
    /// streams, must be ordered before. Also where nothing was done with the memory: its own stream had
    /// it at once, and may still be at work with what it was before.
    ///
    /// Two threads that free one pointer at the same instant may both succeed in the default
    /// profile, which then hands the block out twice; a free that comes later is told.
    ///
    /// # Errors
    /// [`Error::DoubleFree`], [`Error::StalePointer`], [`Error::InteriorPointer`],
    /// [`Error::ForeignPointer`], [`Error::WrongDevice`], [`Error::WrongContext`],
    /// [`Error::StreamCapturing`], [`Error::StreamEnded`], [`Error::ContextLost`], [`Error::Driver`]. The
    /// allocation is then still the caller's.
    ///
    /// [`Error::DoubleFree`]: crate::Error::DoubleFree
    /// [`Error::StalePointer`]: crate::Error::StalePointer
    /// [`Error::InteriorPointer`]: crate::Error::InteriorPointer
    /// [`Error::ForeignPointer`]: crate::Error::ForeignPointer
    /// [`Error::WrongDevice`]: crate::Error::WrongDevice
    /// [`Error::WrongContext`]: crate::Error::WrongContext
    /// [`Error::StreamCapturing`]: crate::Error::StreamCapturing
    /// [`Error::StreamEnded`]: crate::Error::StreamEnded
    /// [`Error::ContextLost`]: crate::Error::ContextLost
    /// [`Error::Driver`]: crate::Error::Driver
    #[inline]
    pub fn free(&self, ptr: DevicePtr, stream: impl Into<StreamHandle>) -> Result<()> {
        let stream = stream.into();
        if let Profile::Default(pool) = &self.profile {
            match pool.free_at_hand(ptr, stream) {
                Freed::Done => return Ok(()),
                Freed::Full(routed, start) => return pool.free_behind(routed, start),
                Freed::Missed(started) => return pool.free_in_time(started),
                Freed::Unknown => {}
            }
        }
        self.free_beyond(ptr, stream)
    }

    /// Everything but the hot path.
    fn heap(&self) -> &(dyn Heap + 'static) {
        self.family.main()
    }

    /// Turns a child of the process away, before it takes a lock that a thread of the parent held.
    fn check_process(&self) -> Result<()> {
        self.device().driver().check_process()
    }

    /// What every address is a multiple of, in bytes.
    #[inline]
    pub(crate) fn alignment(&self) -> usize {
        match &self.profile {
            Profile::Default(_) => 512,
            Profile::Paged(_) => 256,
        }
    }

    /// What the profile is called.
    pub(crate) fn profile_name(&self) -> &'static str {
        match &self.profile {
            Profile::Default(_) => "default",
            Profile::Paged(_) => "paged",
        }
    }

    /// What tells this pool from others that live: the same for all its handles.
    pub(crate) fn number(&self) -> u64 {
        Arc::as_ptr(&self.family) as u64
    }

    /// Physical memory of all its heaps, in bytes.
    pub(crate) fn held(&self) -> u64 {
        self.heap().backing().budget().held()
    }

    /// Whether the host can use the memory.
    pub(crate) fn is_on_host(&self) -> bool {
        self.heap().backing().location() != Location::Device
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
        if self.check_process().is_err() {
            return Stats::default();
        }
        let mut stats = self.heap().stats();
        stats.add(&self.family.heaps.stats());
        stats
    }

    /// What stands where in the main heap, as text: see [`Layout`]. [`snapshot`](Self::snapshot) is of all.
    pub fn layout(&self) -> Layout {
        match self.check_process() {
            Ok(()) => self.heap().layout(),
            Err(_) => Layout { pieces: Vec::new() },
        }
    }

    /// Every segment and block of all the pool's heaps, by heap and address; without small requests of
    /// the paged profile. For tools: it looks at every block, and requests that have to go beyond their
    /// front wait meanwhile.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let sim = cuda_sim::Simulator::builder().build()?;
    /// # let driver = vpmm::Driver::new(sim.driver())?;
    /// # let device = driver.device(0)?;
    /// # let stream = device.stream()?;
    /// use vpmm::snapshot::BlockState;
    ///
    /// let pool = vpmm::Pool::new(&device, &vpmm::PoolConfig::default())?;
    /// let ptr = pool.malloc(3 << 20, &stream)?;
    /// let segments = pool.snapshot();
    /// let live: Vec<_> = segments
    ///     .iter()
    ///     .flat_map(|segment| &segment.blocks)
    ///     .filter(|block| block.state == BlockState::Live)
    ///     .collect();
    /// assert_eq!((live[0].address, live[0].bytes), (ptr.address(), 3 << 20));
    /// # pool.free(ptr, &stream)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn snapshot(&self) -> Vec<Segment> {
        match self.check_process() {
            Ok(()) => self.family.heaps.snapshot(),
            Err(_) => Vec::new(),
        }
    }

    /// Checks every invariant of the pool's books, from scratch. For tests: it looks at every page, and
    /// in the default profile at every 512 bytes of memory, and of the addresses for small blocks, an
    /// eighth of all, also where there is no memory. No other thread may be using the pool
    /// meanwhile: what it is in the middle of may be taken for a violation.
    ///
    /// # Errors
    /// The first invariant that does not hold.
    pub fn validate(&self) -> Result<(), Violation> {
        if self.check_process().is_err() {
            return Ok(());
        }
        self.heap().validate()?;
        self.family.heaps.validate()
    }
}

/// The main heap's numbers, as in [`Pool::stats`], the driver calls by name, and its every region in ascending
/// order of addresses.
impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.check_process() {
            Ok(()) => self.heap().debug(f),
            Err(error) => write!(f, "Pool({error})"),
        }
    }
}

//! The default profile.
//!
//! ```text
//! malloc ─ front      a stack of the block's class: one for each stream and thread
//!        ─ space      best fit over the stream's own and nobody's free blocks
//!        ─ streams    what others freed: their epochs closed, asked about, passed
//!        ─ growth     a window with the least to map; new extents or moved ones
//!        ─ ladder     all this in order; then wait, give back, fail with a map
//! free   ─ front, else the stream's open epoch; no event
//! ```
//!
//! Sizes and addresses are in units of 512 bytes ([`class`]), memory in granules of 2 MiB, in
//! extents of any number of them ([`memory`]). [`tags`](space::tags) say what every unit is, and
//! [`lifetimes`] which blocks stay. Beside requests a thread may work ahead ([`helper`]).
//!
//! Locks, in the order in which they may be taken: `growing`, a shard's `eager`, `revoking`,
//! `registry`, being inside a front, `space`. No driver call is made under `space` or in a front.
//! The helper's `bell` is taken under any, and nothing under that.
//! Builds with debug assertions, so all tests, check both ([`Rank`]).

mod access;
mod aside;
mod calls;
mod class;
mod config;
mod counters;
mod front;
mod growth;
mod heap;
mod helper;
mod ladder;
mod lifetimes;
mod memory;
mod report;
mod shared;
mod space;
mod streams;
mod teardown;
mod validate;

pub(crate) use calls::{AtHand, Freed, Routed};
pub use config::{Background, PoolConfig};
pub(crate) use helper::Helper;
pub(crate) use memory::sleep::Run;

use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Weak};
use std::time::Instant;

use smallvec::SmallVec;

use crate::backing::Backing;
use crate::device::{Device, StreamHandle};
use crate::driver::{Awaited, Realm, StreamWatcher};
use crate::error::{Error, Result};
use crate::lock::{Asymmetry, Ordered, OrderedGuard, Rank, SpinLock};
use crate::ordering::{Mark, next_pool};
use crate::reservation::{Reservation, TABLE_BYTES};
use crate::units::DevicePtr;
use aside::Aside;
use class::UNIT_BYTES;
use config::Checked;
use front::admit::{Registry, Routes};
use growth::policy::Policy;
use memory::Memory;
use space::Space;
use space::tags::{SPAN_UNITS, Tags};

fn lock<T>(mutex: &Ordered<T>) -> OrderedGuard<'_, T> {
    mutex.lock()
}

/// From a pool's making on the tags of so much have the host's pages, where its first request goes and where those
/// go that have fresh windows next, each of which halves what is left of the addresses: a gigabyte asked for by
/// 2 MiB meets hardly a fault, which would come to a fifth and more of what that costs.
const PREPARED_BYTES: u64 = 1 << 28;
const PREPARED_WINDOWS: u32 = 16;

/// Granules are at least so long: what the tags count memory in.
const SPAN_BYTES: u64 = UNIT_BYTES * SPAN_UNITS as u64;

/// A pool of the default profile.
pub(crate) struct Core {
    /// What marks of this pool carry.
    number: u64,
    device: Device,
    backing: Backing,
    config: Checked,
    policy: Policy,
    asymmetry: Asymmetry,
    /// What streams of the same driver say they are of.
    realm: Realm,
    base: u64,
    granule_bytes: u64,
    granules: u32,
    tags: Tags,
    routes: Routes,
    aside: Aside,
    growing: Ordered<()>,
    /// What the device has, where that is less than the pool may have.
    full: memory::full::Full,
    opening: growth::opening::Opening,
    /// The stream that is asked about next.
    asked: AtomicUsize,
    registry: Ordered<Registry>,
    revoking: Ordered<()>,
    space: SpinLock<Space>,
    /// When the pool was made.
    made: Instant,
    /// Calls the helper, where there is one.
    bell: helper::Bell,
    /// The end has begun.
    retired: AtomicBool,
    /// Nothing uses the memory any more.
    quiet: AtomicBool,
    /// The addresses; given back last.
    _reservation: Reservation,
}

impl Core {
    pub(crate) fn new(device: &Device, config: &PoolConfig) -> Result<Arc<Self>> {
        let backing =
            Backing::new(device, config.location, config.sharing, config.gpu_direct_rdma)?;
        let core = Self::of(backing, device, config, false)?;
        core.prepare();
        Ok(core)
    }

    /// Has the host's memory ready for the first memory's tags, for the first stream's front and for the shortcuts
    /// to fronts: a page fault takes as long as a hundred hits, and the first requests would meet hundreds of them.
    fn prepare(&self) {
        let bytes = (self.policy.capacity * self.granule_bytes).min(PREPARED_BYTES);
        let units = (bytes / SPAN_BYTES) as u32 * SPAN_UNITS;
        let large = self.tags.large();
        let apart = (large.end - large.start) / PREPARED_WINDOWS;
        let starts = (0..PREPARED_WINDOWS).map(|at| large.start + at * apart);
        let windows = starts.map(|start| start..start + units.min(apart));
        self.tags.prepare_first(units / 8, windows);
        lock(&self.registry).prepare();
        self.routes.prepare();
    }

    /// What a heap of such memory counts it in. What is smaller would do for the driver, but not for the tags.
    pub(crate) fn granule_of(backing: &Backing) -> u64 {
        backing.granule_bytes().max(SPAN_BYTES)
    }

    /// A heap of such memory; `fixed` where free memory, too, is to stay where it is.
    fn of(
        backing: Backing,
        device: &Device,
        config: &PoolConfig,
        fixed: bool,
    ) -> Result<Arc<Self>> {
        let granule_bytes = Self::granule_of(&backing);
        if !granule_bytes.is_power_of_two() {
            return Err(Error::VmmUnsupported { ordinal: device.ordinal() });
        }
        let config = config.check(granule_bytes, device.total_memory()?)?;
        let _context = device.enter()?;
        let granules = config.granules;
        let bytes = u64::from(granules) * granule_bytes;
        let exhausted = Error::AddressSpaceExhausted { bytes };
        let small = granules / 8;
        // One granule between the parts is never mapped.
        let granule_units = (granule_bytes / UNIT_BYTES) as u32;
        let (units, split) = (granules * granule_units, (small + 1) * granule_units);
        let tags = Tags::new(units, split).ok_or_else(|| exhausted.clone())?;
        let routes = Routes::new().ok_or_else(|| exhausted.clone())?;
        let refused = |failure: crate::driver::Failure| {
            if failure.is_out_of_memory() { exhausted } else { failure.about(bytes) }
        };
        // The large part begins with a table of the GPU's pages.
        let before = match bytes {
            TABLE_BYTES.. => (u64::from(small + 1) * granule_bytes).wrapping_neg() % TABLE_BYTES,
            _ => 0,
        };
        let reservation = Reservation::new(device.driver(), before + bytes).map_err(refused)?;
        let base = reservation.base() + before;
        let memory = Memory::new(base, granules, granule_bytes, small);
        let limited = config.limit_bytes.is_some();
        let mut space =
            Space::new(memory, limited, config.reuse.opportunistic, config.moves_per_second);
        space.patient = !config.patience.is_zero();
        let core = Arc::new(Self {
            number: next_pool(),
            device: device.clone(),
            backing,
            policy: Policy::new(config.capacity, limited, fixed),
            config,
            asymmetry: Asymmetry::detect(),
            realm: device.driver().realm(),
            base,
            granule_bytes,
            granules,
            tags,
            routes,
            aside: Aside::default(),
            growing: Ordered::new(Rank::Growing, ()),
            full: memory::full::Full::default(),
            opening: growth::opening::Opening::default(),
            asked: AtomicUsize::new(0),
            registry: Ordered::new(Rank::Registry, Registry::default()),
            revoking: Ordered::new(Rank::Revoking, ()),
            space: SpinLock::ranked(Rank::Space, space),
            made: Instant::now(),
            retired: AtomicBool::new(false),
            quiet: AtomicBool::new(false),
            bell: helper::Bell::default(),
            _reservation: reservation,
        });
        let watcher: Weak<dyn StreamWatcher> = Arc::downgrade(&core) as _;
        device.driver().watch_streams(watcher);
        Ok(core)
    }

    #[inline(always)]
    fn pointer(&self, unit: u32) -> DevicePtr {
        DevicePtr::from_address(self.base + u64::from(unit) * UNIT_BYTES)
    }

    /// The unit of a pointer, where it is one of this pool's and at the start of a unit at which a block may start.
    fn unit_of(&self, address: u64) -> Option<u32> {
        self.unit_at(address).filter(|unit| self.tags.may_start(*unit))
    }

    /// The unit of a pointer, where it is one of this pool's and at the start of a unit.
    #[inline(always)]
    fn unit_at(&self, address: u64) -> Option<u32> {
        // What is not a multiple of a unit becomes larger than any unit.
        let unit = address.wrapping_sub(self.base).rotate_right(UNIT_BYTES.ilog2());
        (unit < u64::from(self.tags.units())).then_some(unit as u32)
    }
}

impl StreamWatcher for Core {
    fn stream_ends(&self, stream: StreamHandle) {
        let Some(id) = stream.known_to(self.realm) else { return };
        if let Some(left) = self.forget(id) {
            self.end_stream(stream, left.index());
        }
    }

    fn marks(&self, of: Awaited) -> SmallVec<[Mark; 2]> {
        self.marks_before(of)
    }

    fn passed(&self, mark: &Mark) {
        // The wait has succeeded whatever comes of giving memory back.
        let _ = self.mark_passed(mark);
    }
}

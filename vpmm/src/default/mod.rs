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
//! That of the tags' leaves is taken under `space`, the helper's `bell` under any, and nothing under either.
//! Builds with debug assertions, so all tests, check both ([`Rank`]).

mod access;
mod aside;
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
use class::{UNIT_BYTES, units_of};
use config::Checked;
use front::admit::{Registry, Routes};
use front::shard::Slot;
use growth::policy::Policy;
use ladder::Request;
use memory::Memory;
use space::book::Recording;
use space::tags::{SPAN_UNITS, Tag, Tags};
use space::{Part, Space};

fn lock<T>(mutex: &Ordered<T>) -> OrderedGuard<'_, T> {
    mutex.lock()
}

/// A stream's epoch is closed on its own account, so that what it has freed is everybody's before
/// the next asks, when another stream lacked memory lately and this much is open, or a 32nd of the
/// pool.
const OPEN_BYTES: u64 = 16 << 20;

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
        let backing = Backing::new(device, config.location, config.sharing)?;
        let core = Self::of(backing, device, config, false)?;
        core.prepare();
        Ok(core)
    }

    /// Has the host's memory ready for the first memory's tags, and for the first stream's front: a page fault takes
    /// as long as a hundred hits, and the first requests would meet hundreds of them.
    fn prepare(&self) {
        let bytes = (self.policy.capacity * self.granule_bytes).min(PREPARED_BYTES);
        let units = (bytes / SPAN_BYTES) as u32 * SPAN_UNITS;
        let large = self.tags.large();
        let apart = (large.end - large.start) / PREPARED_WINDOWS;
        let starts = (0..PREPARED_WINDOWS).map(|at| large.start + at * apart);
        let windows = starts.map(|start| start..start + units.min(apart));
        self.tags.prepare_first(units / 8, windows);
        lock(&self.registry).prepare();
    }

    /// A heap of such memory; `fixed` where free memory, too, is to stay where it is.
    fn of(
        backing: Backing,
        device: &Device,
        config: &PoolConfig,
        fixed: bool,
    ) -> Result<Arc<Self>> {
        // What is smaller would do for the driver, but not for the tags.
        let granule_bytes = backing.granule_bytes().max(SPAN_BYTES);
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

    #[inline]
    pub(crate) fn malloc(&self, bytes: usize, stream: StreamHandle) -> Result<DevicePtr> {
        match self.malloc_at_hand(bytes, stream) {
            Some(ptr) => Ok(ptr),
            None => self.malloc_outside(bytes, stream),
        }
    }

    /// What needs neither the driver nor a lock but the space's: from the front, or from the free
    /// memory behind it.
    #[inline(always)]
    pub(crate) fn malloc_at_hand(&self, bytes: usize, stream: StreamHandle) -> Option<DevicePtr> {
        self.unit_at_hand(bytes, stream).map(|start| self.pointer(start))
    }

    /// The first unit of the same.
    ///
    /// Nothing here can fail or panic, and nothing is called but at the end: an error's place on
    /// the stack, and registers saved for what comes after a call, would cost as much as the front
    /// does.
    #[inline]
    fn unit_at_hand(&self, bytes: usize, stream: StreamHandle) -> Option<u32> {
        let units = units_of(bytes as u64)?;
        let slot = self.route(stream)?;
        // SAFETY: the shortcut is the calling thread's, which is inside no front between calls.
        let Some(mut front) = (unsafe { slot.enter_at_once() }) else {
            return self.malloc_in_time(slot, units);
        };
        if let Some(start) = front.pop(units) {
            self.tags.set_live(start, units, slot.label());
            return Some(start);
        }
        if front.is_loose() {
            drop(front);
            return self.malloc_loosely(slot, units);
        }
        drop(front);
        self.malloc_behind(slot, units)
    }

    /// The front has no block of exactly this size: one that is a little longer.
    #[inline(never)]
    fn malloc_loosely(&self, slot: &Slot, units: u32) -> Option<u32> {
        // SAFETY: as in `unit_at_hand`; the front was left before the call.
        if let Some(mut front) = unsafe { slot.enter_at_once() }
            && let Some((start, units)) = front.pop_loose(units)
        {
            self.tags.set_live(start, units, slot.label());
            return Some(start);
        }
        self.malloc_behind(slot, units)
    }

    /// The front cannot be entered at once.
    #[cold]
    #[inline(never)]
    fn malloc_in_time(&self, slot: &Slot, units: u32) -> Option<u32> {
        // SAFETY: as in `unit_at_hand`.
        if let Some(mut front) = unsafe { slot.enter() } {
            let exact = front.pop(units).map(|start| (start, units));
            if let Some((start, units)) = exact.or_else(|| front.pop_loose(units)) {
                self.tags.set_live(start, units, slot.label());
                return Some(start);
            }
        }
        self.malloc_behind(slot, units)
    }

    /// The front has no block for the request: best fit over what lies behind it.
    #[inline(never)]
    fn malloc_behind(&self, slot: &Slot, units: u32) -> Option<u32> {
        // SAFETY: as in `unit_at_hand`; the front was left before the call.
        let cached = unsafe { slot.enter() }.map(|mut front| front.cached());
        let mut space = self.space.lock();
        if let Some(cached) = cached {
            space.note_front(cached);
        }
        if space.ebbs(self.made) {
            drop(space);
            self.flush_own(slot.index, Some(Part::Large));
            space = self.space.lock();
        }
        let placed = space.place(&self.tags, slot.index, units, Part::of_size(units));
        space.note_peak();
        placed
    }

    /// A request that nothing at hand serves: the first of a stream or a thread, a foreign stream's,
    /// one that memory has to be found for, or one that cannot be served.
    #[cold]
    #[inline(never)]
    pub(crate) fn malloc_outside(&self, bytes: usize, handle: StreamHandle) -> Result<DevicePtr> {
        // One with a shortcut has found nothing at hand: that leads to streams of ours only.
        if let Some(units) = units_of(bytes as u64)
            && let Some(slot) = self.route(handle)
        {
            let request = Request { stream: slot.index, handle, units };
            return self.climb_on(request).map(|start| self.pointer(start));
        }
        self.device.driver().check_process()?;
        if let Some(served) = self.malloc_aside(bytes, handle) {
            return served;
        }
        let units = self.check_size(bytes as u64)?;
        let admitted = self.admit(handle)?;
        if !admitted.eager
            && let Some(slot) = self.claim_front(&admitted)
            // SAFETY: the front is the calling thread's, which is inside none.
            && let Some(mut front) = unsafe { slot.enter() }
            && let Some(start) = front.pop(units)
        {
            self.tags.set_live(start, units, slot.label());
            return Ok(self.pointer(start));
        }
        let request = Request { stream: admitted.stream, handle, units };
        self.climb(request).map(|start| self.pointer(start))
    }

    fn check_size(&self, bytes: u64) -> Result<u32> {
        if bytes == 0 {
            return Err(Error::ZeroSize);
        }
        if bytes.checked_next_multiple_of(self.granule_bytes).is_none() {
            return Err(Error::SizeOverflow { bytes, unit_bytes: self.granule_bytes });
        }
        units_of(bytes).ok_or_else(|| match self.out_of_memory(0) {
            Error::OutOfMemory {
                free_bytes,
                largest_free_bytes,
                mapped_bytes,
                live_bytes,
                limit_bytes,
                map,
                ..
            } => Error::OutOfMemory {
                requested_bytes: bytes,
                free_bytes,
                largest_free_bytes,
                mapped_bytes,
                live_bytes,
                limit_bytes,
                map,
            },
            other => other,
        })
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

    #[inline]
    pub(crate) fn free(&self, ptr: DevicePtr, stream: StreamHandle) -> Result<()> {
        if self.free_at_hand(ptr, stream) { Ok(()) } else { self.free_outside(ptr, stream) }
    }

    /// The free of an allocation by a thread that has a front of the stream. Like
    /// [`unit_at_hand`](Self::unit_at_hand) it cannot fail, and calls nothing but at its end.
    #[inline]
    pub(crate) fn free_at_hand(&self, ptr: DevicePtr, stream: StreamHandle) -> bool {
        let Some(start) = self.unit_at(ptr.address()) else { return false };
        let Some(units) = self.tags.live_at(start) else { return false };
        let Some(slot) = self.route(stream) else { return false };
        // SAFETY: the shortcut is the calling thread's, which is inside no front between calls.
        let Some(mut front) = (unsafe { slot.enter_at_once() }) else {
            return self.free_in_time(slot, start, units);
        };
        // Before the push: from there on the block may be handed out again.
        self.tags.set_cached_whole(start, units);
        if front.push(start, units) {
            return true;
        }
        drop(front);
        self.free_behind(slot, start, units)
    }

    /// The front cannot be entered at once.
    #[cold]
    #[inline(never)]
    fn free_in_time(&self, slot: &Slot, start: u32, units: u32) -> bool {
        // SAFETY: as in `free_at_hand`.
        let Some(mut front) = (unsafe { slot.enter() }) else { return false };
        self.tags.set_cached(start, units);
        if front.push(start, units) {
            return true;
        }
        drop(front);
        self.free_behind(slot, start, units)
    }

    /// The front has no room for the block, which is nobody's: others go behind it, and the block
    /// where they were. True: the block is freed.
    #[inline(never)]
    fn free_behind(&self, slot: &Slot, start: u32, units: u32) -> bool {
        let stream = slot.index;
        // SAFETY: as in `free_at_hand`; the front was left before the call.
        let front = unsafe { slot.enter() };
        let mut space = self.space.lock();
        let share = space.share_of_each();
        let kept = front.is_some_and(|mut front| {
            space.note_front(front.cached());
            if front.refuses(units, share) {
                return false;
            }
            front.make_room(units, share, |start, units| {
                space.take_back(&self.tags, stream, start, units);
            });
            let kept = front.push(start, units);
            space.note_front(front.cached());
            kept
        });
        if !kept {
            space.take_back(&self.tags, stream, start, units);
        }
        let much = self.is_much_open(&space, stream);
        drop(space);
        if much {
            self.close_own(stream);
        }
        true
    }

    fn is_much_open(&self, space: &Space, stream: u32) -> bool {
        let book = &space.books[stream as usize];
        book.wanted
            && space.opportunistic
            && matches!(book.recording, Recording::Lazy(_))
            && matches!(book.stage, space::book::Stage::Clear | space::book::Stage::Passed)
            && book.open_units() * UNIT_BYTES
                > OPEN_BYTES.max(space.memory.mapped() * self.granule_bytes / 32)
    }

    /// Closes a stream's epoch so that what it has freed is everybody's by the time that somebody
    /// asks. The free has succeeded whatever comes of it.
    #[cold]
    fn close_own(&self, stream: u32) {
        if let Ok(_context) = self.device.enter() {
            // A failure is met again by the next who asks, and told then.
            let _ = self.advance(stream, false);
        }
    }

    /// A free without a front, or of a pointer that is not an allocation's.
    #[cold]
    #[inline(never)]
    pub(crate) fn free_outside(&self, ptr: DevicePtr, handle: StreamHandle) -> Result<()> {
        self.device.driver().check_process()?;
        if let Some(freed) = self.free_aside(ptr, handle) {
            return freed;
        }
        self.free_as(ptr, handle, || self.admit(handle))
    }

    fn free_as<'a>(
        &'a self,
        ptr: DevicePtr,
        handle: StreamHandle,
        admit: impl FnOnce() -> Result<front::admit::Admitted<'a>>,
    ) -> Result<()> {
        let start = self.unit_of(ptr.address());
        let tag = start.map_or(Tag::None, |start| self.tags.get(start));
        let Some(start) = start.filter(|_| tag.live_units().is_some()) else {
            return Err(self.not_live(ptr.address()));
        };
        let admitted = admit()?;
        let stream = admitted.stream;
        if matches!(tag, Tag::Noted(_)) {
            return self.free_noted(start, handle, stream, ptr);
        }
        if admitted.eager {
            return self.free_eagerly(start, handle, stream, ptr);
        }
        self.claim_front(&admitted);
        let mut space = self.space.lock();
        // Again, under the lock: two threads may free one pointer at a time.
        let Tag::Live(units) = self.tags.get(start) else {
            drop(space);
            return Err(self.not_live(ptr.address()));
        };
        space.take_back(&self.tags, stream, start, units);
        let much = self.is_much_open(&space, stream);
        drop(space);
        if much {
            self.close_own(stream);
        }
        Ok(())
    }

    /// A free on a stream whose end nobody tells: the event is recorded now.
    fn free_eagerly(
        &self,
        start: u32,
        handle: StreamHandle,
        stream: u32,
        ptr: DevicePtr,
    ) -> Result<()> {
        let _context = self.device.enter()?;
        let _in_order = lock(&self.shard(stream).eager);
        let event = self.record_now(handle)?;
        let mut space = self.space.lock();
        space.note_record(stream, event);
        let Tag::Live(units) = self.tags.get(start) else {
            drop(space);
            return Err(self.not_live(ptr.address()));
        };
        space.take_back(&self.tags, stream, start, units);
        Ok(())
    }
}

impl StreamWatcher for Core {
    fn stream_ends(&self, stream: StreamHandle) {
        let Some(id) = stream.known_to(self.realm) else { return };
        let index = lock(&self.registry).forget(id);
        if let Some(index) = index {
            self.end_stream(stream, index);
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

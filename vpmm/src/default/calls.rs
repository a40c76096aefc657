//! `malloc` and `free`: the front's hits, what lies behind them, and what comes without a front.
//!
//! Hits are compiled into the caller, for whom they are a function without calls: what a call needs, an error's
//! place on the stack and registers saved for what comes after it, would cost a good part of what the front does.
//! So whatever is not a hit is one call at the end, which has what was found out so far, if that is in registers,
//! and finds out the rest again.

use super::class::{SMALL_UNITS, UNIT_BYTES, units_of};
use super::front::Cached;
use super::front::admit::Admitted;
use super::front::shard::{Entered, Slot};
use super::front::tide::Ebb;
use super::ladder::Request;
use super::space::book::{Recording, Stage};
use super::space::tags::{Live, StartTag, Tag};
use super::space::{Part, Space};
use super::{Core, lock};
use crate::device::StreamHandle;
use crate::error::{Error, Result};
use crate::lock::SpinGuard;
use crate::units::DevicePtr;

/// A stream's epoch is closed on its own account, so that what it has freed is everybody's before
/// the next asks, when another stream lacked memory lately and this much is open, or a 32nd of the
/// pool.
const OPEN_BYTES: u64 = 16 << 20;

/// What a request found at hand.
pub(crate) enum AtHand<'a> {
    /// A block of the front.
    Served(DevicePtr),
    /// A front, without a block of exactly that size, which may have one that is a little longer.
    Loose(Routed<'a>),
    /// A front that has none, or cannot be entered at once.
    Missed(Routed<'a>),
    /// No front, or no size that can be served.
    Unknown,
}

/// A size, and the calling thread's front of a stream. In two registers.
#[derive(Clone, Copy)]
pub(crate) struct Routed<'a> {
    slot: &'a Slot,
    units: u32,
}

impl Routed<'_> {
    /// The size as it is rounded up.
    pub(crate) fn bytes(self) -> usize {
        // What was asked for was a `usize`; rounded up it is at most 512 GiB.
        (u64::from(self.units) * UNIT_BYTES) as usize
    }
}

/// What came of a free at hand.
pub(crate) enum Freed<'a> {
    /// It is done.
    Done,
    /// There is a front, and no room in it for so many units, which start there and are nobody's.
    Full(Routed<'a>, u32),
    /// There is a front, which cannot be entered at once, or does not keep what starts there.
    Missed(Started<'a>),
    /// There is no front, or the pointer is not the pool's.
    Unknown,
}

/// A free of what starts at a unit of the pool, by the same. In two registers.
#[derive(Clone, Copy)]
pub(crate) struct Started<'a> {
    slot: &'a Slot,
    start: u32,
}

impl Core {
    pub(crate) fn malloc(&self, bytes: usize, stream: StreamHandle) -> Result<DevicePtr> {
        let routed = match self.malloc_at_hand(bytes, stream) {
            AtHand::Served(ptr) => return Ok(ptr),
            AtHand::Loose(routed) | AtHand::Missed(routed) => routed,
            AtHand::Unknown => return self.malloc_outside(bytes, stream),
        };
        let at_hand = self.malloc_loosely(routed).or_else(|| self.malloc_behind(routed));
        at_hand.map_or_else(|| self.malloc_climbing(routed), Ok)
    }

    /// What the calling thread's front of the stream serves. It cannot fail, and calls nothing.
    #[inline(always)]
    pub(crate) fn malloc_at_hand(&self, bytes: usize, stream: StreamHandle) -> AtHand<'_> {
        let Some(slot) = self.route(stream) else { return AtHand::Unknown };
        let Some(units) = units_of(bytes as u64) else { return AtHand::Unknown };
        let routed = Routed { slot, units };
        // SAFETY: the shortcut is the calling thread's, which is inside no front between calls.
        let Some(mut front) = (unsafe { slot.enter_at_once() }) else {
            return AtHand::Missed(routed);
        };
        match self.pop(slot, &mut front, units) {
            Some(start) => AtHand::Served(self.pointer(start)),
            None if front.is_loose() => AtHand::Loose(routed),
            None => AtHand::Missed(routed),
        }
    }

    /// A block of the front of exactly this size.
    #[inline(always)]
    fn pop(&self, slot: &Slot, front: &mut Entered<'_>, units: u32) -> Option<u32> {
        if units <= SMALL_UNITS {
            self.pop_in::<false>(slot, front, units)
        } else {
            self.pop_in::<true>(slot, front, units)
        }
    }

    #[inline(always)]
    fn pop_in<const LARGE: bool>(
        &self,
        slot: &Slot,
        front: &mut Entered<'_>,
        units: u32,
    ) -> Option<u32> {
        let start = front.pop::<LARGE>(units)?;
        // SAFETY: fronts hold blocks of the pool, small ones of the small part and large ones of the large.
        unsafe { self.tags.set_live::<LARGE>(start, units, slot.label()) };
        Some(start)
    }

    #[inline(always)]
    fn pop_loose(&self, slot: &Slot, front: &mut Entered<'_>, units: u32) -> Option<u32> {
        let (start, units) = front.pop_loose(units)?;
        // SAFETY: as in `pop_in`; it is a large one.
        unsafe { self.tags.set_live::<true>(start, units, slot.label()) };
        Some(start)
    }

    /// A block of a loose front that is a little longer than the request.
    #[inline(always)]
    pub(crate) fn malloc_loosely(&self, routed: Routed<'_>) -> Option<DevicePtr> {
        let Routed { slot, units } = routed;
        // SAFETY: as in `malloc_at_hand`; the front was left there.
        let mut front = unsafe { slot.enter_at_once() }?;
        self.pop_loose(slot, &mut front, units).map(|start| self.pointer(start))
    }

    /// What needs neither the driver nor a lock but the space's: best fit over what lies behind the front.
    #[inline(always)]
    pub(crate) fn malloc_behind(&self, routed: Routed<'_>) -> Option<DevicePtr> {
        let Routed { slot, units } = routed;
        // SAFETY: as in `malloc_at_hand`; the front was left there.
        let cached = match unsafe { slot.enter_at_once() } {
            Some(mut front) => Some(front.cached()),
            None => match self.pop_in_time(slot, units) {
                Ok(start) => return Some(self.pointer(start)),
                Err(cached) => cached,
            },
        };
        let mut space = self.space.lock();
        if let Some(cached) = cached {
            space.note_front(cached);
        }
        if let Some(ebb) = space.ebb(self.made) {
            space = self.ebbs(space, ebb, slot.index);
        }
        // The heap may have fallen asleep since: see `place_awake`.
        if self.is_asleep() {
            return None;
        }
        let placed = space.place(&self.tags, slot.index, units, Part::of_size(units));
        space.note_peak();
        placed.map(|start| self.pointer(start))
    }

    /// Callers have much less than they had: empties the stream's own front of what may pin memory.
    #[cold]
    fn ebbs<'a>(
        &'a self,
        space: SpinGuard<'a, Space>,
        ebb: Ebb,
        stream: u32,
    ) -> SpinGuard<'a, Space> {
        let is_little = space.is_little();
        drop(space);
        // What streams have freed to their fronts is not known before they come.
        let in_fronts = is_little.then(|| self.units_in_fronts());
        self.space.lock().note_ebb(ebb, in_fronts, self.made);
        self.flush_own(stream, Some(Part::Large));
        self.space.lock()
    }

    /// A block of the front, which cannot be entered at once; else what the front has, unless it is revoked.
    #[cold]
    #[inline(never)]
    fn pop_in_time(&self, slot: &Slot, units: u32) -> Result<u32, Option<Cached>> {
        // SAFETY: as in `malloc_at_hand`.
        let mut front = unsafe { slot.enter() }.ok_or(None)?;
        let popped = self.pop(slot, &mut front, units);
        let popped = popped.or_else(|| self.pop_loose(slot, &mut front, units));
        popped.ok_or_else(|| Some(front.cached()))
    }

    /// A request that nothing at hand serves.
    #[cold]
    #[inline(never)]
    pub(crate) fn malloc_climbing(&self, routed: Routed<'_>) -> Result<DevicePtr> {
        let Routed { slot, units } = routed;
        let request = Request { stream: slot.index, handle: None, units };
        self.climb_on(request).map(|start| self.pointer(start))
    }

    /// The handle of a request's stream.
    pub(crate) fn routed_handle(&self, routed: Routed<'_>) -> Result<StreamHandle> {
        self.booked_handle(routed.slot.index)
    }

    /// A request without a shortcut to a front: the first of a stream or a thread, a foreign stream's, or one that
    /// cannot be served.
    #[cold]
    #[inline(never)]
    pub(crate) fn malloc_outside(&self, bytes: usize, handle: StreamHandle) -> Result<DevicePtr> {
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
            && let Some(start) = self.pop(slot, &mut front, units)
        {
            return Ok(self.pointer(start));
        }
        let request = Request { stream: admitted.stream, handle: Some(handle), units };
        self.climb(request).map(|start| self.pointer(start))
    }

    pub(super) fn check_size(&self, bytes: u64) -> Result<u32> {
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

    pub(crate) fn free(&self, ptr: DevicePtr, stream: StreamHandle) -> Result<()> {
        match self.free_at_hand(ptr, stream) {
            Freed::Done => Ok(()),
            Freed::Full(routed, start) => self.free_behind(routed, start),
            Freed::Missed(started) => self.free_in_time(started),
            Freed::Unknown => self.free_outside(ptr, stream),
        }
    }

    /// The free of an allocation by a thread whose front of the stream has room for it. It cannot fail, and calls
    /// nothing.
    #[inline(always)]
    pub(crate) fn free_at_hand(&self, ptr: DevicePtr, stream: StreamHandle) -> Freed<'_> {
        let Some(slot) = self.route(stream) else { return Freed::Unknown };
        let Some(start) = self.unit_at(ptr.address()) else { return Freed::Unknown };
        // SAFETY: the shortcut is the calling thread's, which is inside no front between calls.
        match unsafe { slot.enter_at_once() } {
            Some(front) => self.free_to(front, slot, start),
            None => Freed::Missed(Started { slot, start }),
        }
    }

    /// Frees what starts at a unit of the pool to a front, if it is an allocation that fronts keep.
    #[inline(always)]
    fn free_to<'a>(&self, front: Entered<'_>, slot: &'a Slot, start: u32) -> Freed<'a> {
        if self.tags.is_small(start) {
            // SAFETY: the unit is the pool's, and of this part.
            match unsafe { self.tags.live_small(start) } {
                Some(live) => Self::push::<false, _>(front, slot, start, live),
                None => Freed::Missed(Started { slot, start }),
            }
        } else {
            // SAFETY: as before.
            match unsafe { self.tags.live_large(start) } {
                Some(live) => Self::push::<true, _>(front, slot, start, live),
                None => Freed::Missed(Started { slot, start }),
            }
        }
    }

    #[inline(always)]
    fn push<'a, const LARGE: bool, T: StartTag>(
        mut front: Entered<'_>,
        slot: &'a Slot,
        start: u32,
        live: Live<'_, T>,
    ) -> Freed<'a> {
        // Before the push: what is left to remember is less. And before the front is left: from there on the block may
        // be handed out again.
        live.set_cached();
        if front.push::<LARGE>(start, live.units) {
            Freed::Done
        } else {
            Freed::Full(Routed { slot, units: live.units }, start)
        }
    }

    /// The front cannot be entered at once, or what starts there is not an allocation that it would keep.
    #[inline(never)]
    pub(crate) fn free_in_time(&self, started: Started<'_>) -> Result<()> {
        let Started { slot, start } = started;
        // SAFETY: as in `free_at_hand`.
        let freed = unsafe { slot.enter() }.map(|front| self.free_to(front, slot, start));
        match freed {
            Some(Freed::Done) => Ok(()),
            Some(Freed::Full(routed, start)) => self.free_behind(routed, start),
            _ => self.free_outside(self.pointer(start), self.booked_handle(slot.index)?),
        }
    }

    /// The front has no room for a block, which is nobody's: others go behind it, and the block where they were.
    #[inline(never)]
    pub(crate) fn free_behind(&self, routed: Routed<'_>, start: u32) -> Result<()> {
        let Routed { slot, units } = routed;
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
            let kept = if units <= SMALL_UNITS {
                front.push::<false>(start, units)
            } else {
                front.push::<true>(start, units)
            };
            space.note_front(front.cached());
            kept
        });
        if !kept {
            space.take_back(&self.tags, stream, start, units);
        }
        self.leave_freed(space, stream);
        Ok(())
    }

    /// Leaves the space after a free.
    #[inline]
    fn leave_freed(&self, space: SpinGuard<'_, Space>, stream: u32) {
        let much = self.is_much_open(&space, stream);
        drop(space);
        if much {
            self.close_own(stream);
        }
    }

    fn is_much_open(&self, space: &Space, stream: u32) -> bool {
        let book = &space.books[stream as usize];
        book.wanted
            && space.opportunistic
            && matches!(book.recording, Recording::Lazy(_))
            && matches!(book.stage, Stage::Clear | Stage::Passed)
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

    pub(super) fn free_as<'a>(
        &'a self,
        ptr: DevicePtr,
        handle: StreamHandle,
        admit: impl FnOnce() -> Result<Admitted<'a>>,
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
        self.leave_freed(space, stream);
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

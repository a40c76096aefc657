//! One number for every unit of the address space: what begins there, or ends.
//!
//! | at | tag |
//! |---|---|
//! | the first unit of an allocation | live, with its size |
//! | the next one with a tag | its stream; where it has no second, that is in the first |
//! | the first unit, where more is noted about the allocation elsewhere | noted, with its size |
//! | the first unit of a block in a front, or that waits for further streams | cached, with its size |
//! | the first and the last unit of a free block | free, with its node |
//! | everywhere else | nothing |
//!
//! Where large blocks are, one number serves for 4 KiB: everything there is whole pages of that.
//!
//! So the size of an allocation, the state of a pointer and both neighbours of a block are one
//! load each, without a node for anything live. The table is as long as the address space and
//! costs memory only where it was written: 4 bytes for each 512 (or 4096) at most, a
//! few for a large block.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use super::class::{LARGE_STEP, SMALL_UNITS};

/// A tag: 2 bits of its kind above 30 of a size or a node.
const KIND: u32 = 3 << 30;
const LIVE: u32 = 1 << 30;
const CACHED: u32 = 2 << 30;
const FREE: u32 = 3 << 30;

/// Nodes have 29 bits. With the next bit it is an allocation instead: one that is as short as can
/// be, with its stream, or a noted one, with its size in short.
const RARE: u32 = FREE | 1 << 29;
const NOTED: u32 = RARE | 1 << 28;
const RARE_VALUE: u32 = (1 << 28) - 1;

/// What a unit's tag says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Tag {
    /// Neither a start nor an end of anything.
    None,
    /// An allocation of so many units starts here.
    Live(u32),
    /// The same, and more is noted about it.
    Noted(u32),
    /// A block of so many units starts here that is in a front or waits for further streams.
    Cached(u32),
    /// The free block of this node starts or ends here.
    Free(u32),
}

impl Tag {
    /// The units of the allocation that starts here.
    #[inline(always)]
    pub(super) fn live_units(self) -> Option<u32> {
        match self {
            Self::Live(units) | Self::Noted(units) => Some(units),
            Self::None | Self::Cached(_) | Self::Free(_) => None,
        }
    }
}

/// Where in the table a unit's tag is.
#[derive(Clone, Copy)]
pub(super) struct Place(usize);

impl Place {
    /// The place of the unit before the one that is the first at this place: of the last unit of
    /// a block, where this is the place of its end.
    #[inline(always)]
    pub(super) fn before(self) -> Self {
        Self(self.0.wrapping_sub(1))
    }
}

/// The table. Any thread may read and write it: a tag is written by whoever owns its unit at that
/// time, and others only learn from it that they do not.
pub(super) struct Tags {
    table: NonNull<AtomicU32>,
    length: usize,
    units: u32,
    /// The first unit of the large part.
    split: u32,
}

// SAFETY: the table is of atomics, alive until drop; the pointer itself never changes.
unsafe impl Send for Tags {}
// SAFETY: as above.
unsafe impl Sync for Tags {}

impl Tags {
    /// A table for so many units, of which those from `split` on are the large part; `None` where
    /// the system does not give the address space.
    pub(super) fn new(units: u32, split: u32) -> Option<Self> {
        let length = (split + units.checked_sub(split)?.div_ceil(LARGE_STEP)) as usize;
        let layout = Self::layout(length)?;
        // SAFETY: the layout is not empty, as `layout` makes sure.
        let table = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { table: table.cast(), length, units, split })
    }

    fn layout(units: usize) -> Option<Layout> {
        Layout::array::<AtomicU32>(units).ok().filter(|layout| layout.size() > 0)
    }

    pub(super) fn units(&self) -> u32 {
        self.units
    }

    /// How many units from this one on have one tag together.
    #[inline(always)]
    pub(super) fn step(&self, unit: u32) -> u32 {
        if unit < self.split { 1 } else { LARGE_STEP }
    }

    /// Whether a block may start at the unit.
    #[inline(always)]
    pub(super) fn may_start(&self, unit: u32) -> bool {
        unit < self.split || (unit - self.split).is_multiple_of(LARGE_STEP)
    }

    /// The first unit of those that have one tag together with this one.
    pub(super) fn first_with(&self, unit: u32) -> u32 {
        if unit < self.split { unit } else { unit - (unit - self.split) % LARGE_STEP }
    }

    #[inline(always)]
    fn entry(&self, at: Place) -> Option<&AtomicU32> {
        // SAFETY: the index is within the table, which is zeroed (a valid state of atomics) and
        // alive while `self` is.
        (at.0 < self.length).then(|| unsafe { self.table.add(at.0).as_ref() })
    }

    /// The tag of a unit; nothing beyond the table.
    #[inline(always)]
    pub(super) fn get(&self, unit: u32) -> Tag {
        self.read(self.place_of(unit))
    }

    /// The tag at a place; nothing beyond the table.
    #[inline(always)]
    pub(super) fn read(&self, at: Place) -> Tag {
        let raw = self.entry(at).map_or(0, |tag| tag.load(Ordering::Relaxed));
        let value = raw & !KIND;
        match raw & KIND {
            LIVE => Tag::Live(value),
            CACHED => Tag::Cached(value),
            FREE if raw & RARE == RARE => self.rare(at, raw),
            FREE => Tag::Free(value),
            _ => Tag::None,
        }
    }

    #[cold]
    #[inline(never)]
    fn rare(&self, at: Place, raw: u32) -> Tag {
        if raw & NOTED == NOTED {
            Tag::Noted(long(raw & RARE_VALUE))
        } else {
            Tag::Live(self.step_at(at))
        }
    }

    /// The units that have one tag together, at a place.
    #[inline(always)]
    fn step_at(&self, at: Place) -> u32 {
        if at.0 < self.split as usize { 1 } else { LARGE_STEP }
    }

    /// The index of the stream that the allocation at a place was made on; `None` where there was
    /// no room for it.
    pub(super) fn stream_at(&self, at: Place) -> Option<u32> {
        let load = |at| self.entry(at).map_or(0, |tag| tag.load(Ordering::Relaxed));
        if self.read(at).live_units()? > self.step_at(at) {
            return Some(load(Place(at.0 + 1)));
        }
        let raw = load(at);
        (raw & NOTED != NOTED).then_some(raw & RARE_VALUE)
    }

    /// Where the tag of a unit is.
    #[inline(always)]
    pub(super) fn place_of(&self, unit: u32) -> Place {
        let large = self.split.wrapping_add(unit.wrapping_sub(self.split) / LARGE_STEP);
        Place((if unit < self.split { unit } else { large }) as usize)
    }

    /// The first unit of a range, which is of one part, that has a tag. Pages that are not whole in
    /// the range do not count.
    pub(super) fn first_in(&self, range: std::ops::Range<u32>) -> Option<u32> {
        let step = self.step(range.start);
        let first = range.start.checked_next_multiple_of(step)?;
        let end = range.end.min(self.units);
        (first..end).step_by(step as usize).find(|unit| {
            let whole = unit + step <= end;
            whole && self.get(*unit) != Tag::None
        })
    }

    #[inline(always)]
    fn write(&self, at: Place, raw: u32) {
        if let Some(tag) = self.entry(at) {
            tag.store(raw, Ordering::Relaxed);
        }
    }

    /// Notes an allocation. The stream beside it stays when the block is freed: it is no tag.
    #[inline(always)]
    pub(super) fn set_live(&self, start: u32, units: u32, stream: u32) {
        let at = self.place_of(start);
        if units > self.step_at(at) {
            self.write(at, LIVE | units);
            self.write(Place(at.0 + 1), stream & !KIND);
        } else {
            self.write(at, RARE | (stream & RARE_VALUE));
        }
    }

    /// Notes more about the allocation at a place, which keeps its size.
    pub(super) fn set_noted(&self, at: Place, units: u32) {
        self.write(at, NOTED | short(units));
    }

    #[inline(always)]
    pub(super) fn set_cached(&self, at: Place, units: u32) {
        self.write(at, CACHED | units);
    }

    #[inline(always)]
    pub(super) fn set_free(&self, at: Place, node: u32) {
        self.write(at, FREE | node);
    }

    #[inline(always)]
    pub(super) fn clear(&self, at: Place) {
        self.write(at, 0);
    }
}

/// A size in 28 bits: large ones are whole pages.
fn short(units: u32) -> u32 {
    if units <= SMALL_UNITS { units } else { SMALL_UNITS + units / LARGE_STEP }
}

/// The size that is so in short.
fn long(short: u32) -> u32 {
    if short <= SMALL_UNITS { short } else { (short - SMALL_UNITS) * LARGE_STEP }
}

impl Drop for Tags {
    fn drop(&mut self) {
        if let Some(layout) = Self::layout(self.length) {
            // SAFETY: allocated in `new` with this very layout.
            unsafe { dealloc(self.table.as_ptr().cast(), layout) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_say_what_was_written_and_nothing_elsewhere() {
        let Some(tags) = Tags::new(100, 100) else { panic!("no memory for 400 bytes") };
        tags.set_live(0, 5, 7);
        tags.set_cached(tags.place_of(5), 7);
        tags.set_free(tags.place_of(99), 3);
        tags.set_live(100, 1, 0);
        assert_eq!(tags.stream_at(tags.place_of(0)), Some(7));
        let read = [0, 1, 5, 99, 100, u32::MAX].map(|unit| tags.get(unit));
        let [live, none, cached, free, beyond, far] = read;
        assert_eq!((live, none, cached), (Tag::Live(5), Tag::None, Tag::Cached(7)));
        assert_eq!((free, beyond, far), (Tag::Free(3), Tag::None, Tag::None));
        let first = [0..100, 1..100, 6..99, 6..200, 200..300].map(|range| tags.first_in(range));
        assert_eq!(first, [Some(0), Some(5), None, Some(99), None]);
        assert!(Tags::new(0, 0).is_none());
    }

    #[test]
    fn allocations_know_their_stream_and_may_be_noted() {
        let Some(tags) = Tags::new(96, 16) else { panic!("no memory for 104 bytes") };
        // Of one tag and of more, where each unit has one and where pages have.
        for (start, units) in [(1, 1), (2, 2), (4, 12), (16, 8), (24, 16), (40, 56)] {
            let at = tags.place_of(start);
            tags.set_live(start, units, (1 << 28) - 3);
            assert_eq!(tags.get(start), Tag::Live(units));
            assert_eq!(tags.stream_at(at), Some((1 << 28) - 3));
            assert!(tags.first_in(start + 1..start + units).is_none());
            tags.set_noted(at, units);
            assert_eq!(tags.get(start), Tag::Noted(units));
            let kept = units > tags.step(start);
            assert_eq!(tags.stream_at(at), kept.then_some((1 << 28) - 3));
            tags.set_cached(at, units);
            assert_eq!((tags.get(start), tags.stream_at(at)), (Tag::Cached(units), None));
        }
        let most = super::super::class::MAX_UNITS;
        for units in [1, SMALL_UNITS, SMALL_UNITS + LARGE_STEP, most] {
            assert!(short(units) <= RARE_VALUE && long(short(units)) == units, "{units}");
        }
    }

    #[test]
    fn pages_of_the_large_part_have_one_tag() {
        let Some(tags) = Tags::new(96, 16) else { panic!("no memory for 104 bytes") };
        tags.set_live(15, 1, 0);
        tags.set_live(16, 8, 0);
        tags.set_free(tags.place_of(24), 7);
        tags.set_free(tags.place_of(96).before(), 7);
        assert_eq!(
            (tags.get(15), tags.get(16), tags.get(23)),
            (Tag::Live(1), Tag::Live(8), Tag::Live(8))
        );
        assert_eq!(
            (tags.get(24), tags.get(32), tags.get(88)),
            (Tag::Free(7), Tag::None, Tag::Free(7))
        );
        assert_eq!((tags.step(15), tags.step(16)), (1, 8));
        assert!(tags.may_start(15) && tags.may_start(24) && !tags.may_start(25));
    }
}

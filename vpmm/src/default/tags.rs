//! One number for every unit of the address space: what begins there, or ends.
//!
//! | at | tag |
//! |---|---|
//! | the first unit of an allocation | live, with its size and its stream |
//! | the same, where more is noted about it elsewhere | noted, with the same |
//! | the first unit of a block in a front, or that waits for further streams | cached, with its size |
//! | the first and the last unit of a free block | free, with its node |
//! | everywhere else | nothing |
//!
//! Where large blocks are, one number serves for 4 KiB: everything there is whole pages of that.
//!
//! So the size of an allocation, the state of a pointer and both neighbours of a block are one
//! load each, without a node for anything live. The table is as long as the address space and
//! costs memory only where it was written: 8 bytes for each 512 (or 4096) at most, a
//! few for a large block.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use super::class::LARGE_STEP;

/// A tag, from the lowest bit: 32 bits of a size or a node, 28 of a stream's index, 4 of its kind.
const STREAM_SHIFT: u32 = 32;
const STREAMS: u64 = (1 << 28) - 1;
const KIND: u64 = 15 << 60;
const LIVE: u64 = 1 << 60;
const CACHED: u64 = 2 << 60;
const FREE: u64 = 3 << 60;
const NOTED: u64 = 4 << 60;

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
    table: NonNull<AtomicU64>,
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
        Layout::array::<AtomicU64>(units).ok().filter(|layout| layout.size() > 0)
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
    fn entry(&self, at: Place) -> Option<&AtomicU64> {
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
        let value = raw as u32;
        match raw & KIND {
            LIVE => Tag::Live(value),
            NOTED => Tag::Noted(value),
            CACHED => Tag::Cached(value),
            FREE => Tag::Free(value),
            _ => Tag::None,
        }
    }

    /// The index of the stream that the allocation at a place was made on.
    pub(super) fn stream_at(&self, at: Place) -> u32 {
        let raw = self.entry(at).map_or(0, |tag| tag.load(Ordering::Relaxed));
        (raw >> STREAM_SHIFT & STREAMS) as u32
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
    fn write(&self, at: Place, raw: u64) {
        if let Some(tag) = self.entry(at) {
            tag.store(raw, Ordering::Relaxed);
        }
    }

    #[inline(always)]
    pub(super) fn set_live(&self, start: u32, units: u32, stream: u32) {
        self.write(self.place_of(start), LIVE | Self::of_stream(stream) | u64::from(units));
    }

    /// Notes more about the allocation at a place, which keeps its size and its stream.
    pub(super) fn set_noted(&self, at: Place, units: u32) {
        self.write(at, NOTED | Self::of_stream(self.stream_at(at)) | u64::from(units));
    }

    #[inline(always)]
    fn of_stream(stream: u32) -> u64 {
        (u64::from(stream) & STREAMS) << STREAM_SHIFT
    }

    #[inline(always)]
    pub(super) fn set_cached(&self, at: Place, units: u32) {
        self.write(at, CACHED | u64::from(units));
    }

    #[inline(always)]
    pub(super) fn set_free(&self, at: Place, node: u32) {
        self.write(at, FREE | u64::from(node));
    }

    #[inline(always)]
    pub(super) fn clear(&self, at: Place) {
        self.write(at, 0);
    }
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
        let Some(tags) = Tags::new(100, 100) else { panic!("no memory for 800 bytes") };
        tags.set_live(0, 5, 7);
        tags.set_cached(tags.place_of(5), 7);
        tags.set_free(tags.place_of(99), 3);
        tags.set_live(100, 1, 0);
        tags.set_live(7, 1, 1 << 27);
        tags.set_noted(tags.place_of(7), 1);
        assert_eq!((tags.get(7), tags.stream_at(tags.place_of(7))), (Tag::Noted(1), 1 << 27));
        tags.clear(tags.place_of(7));
        assert_eq!(tags.stream_at(tags.place_of(0)), 7);
        let read = [0, 1, 5, 99, 100, u32::MAX].map(|unit| tags.get(unit));
        let [live, none, cached, free, beyond, far] = read;
        assert_eq!((live, none, cached), (Tag::Live(5), Tag::None, Tag::Cached(7)));
        assert_eq!((free, beyond, far), (Tag::Free(3), Tag::None, Tag::None));
        let first = [0..100, 1..100, 6..99, 6..200, 200..300].map(|range| tags.first_in(range));
        assert_eq!(first, [Some(0), Some(5), None, Some(99), None]);
        assert!(Tags::new(0, 0).is_none());
    }

    #[test]
    fn pages_of_the_large_part_have_one_tag() {
        let Some(tags) = Tags::new(96, 16) else { panic!("no memory for 208 bytes") };
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

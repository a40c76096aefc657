//! One number for every unit of the address space: what begins there, or ends.
//!
//! | at | tag |
//! |---|---|
//! | the first unit of an allocation | live, with its size |
//! | the first unit of a block in a front | cached, with its size |
//! | the first and the last unit of a free block | free, with its node |
//! | everywhere else | nothing |
//!
//! So the size of an allocation, the state of a pointer and both neighbours of a block are one
//! load each, without a node for anything live. The table is as long as the address space and
//! costs memory only where it was written: 4 bytes for each 512 at most, a few for a large block.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

const KIND: u32 = 3 << 30;
const LIVE: u32 = 1 << 30;
const CACHED: u32 = 2 << 30;
const FREE: u32 = 3 << 30;

/// What a unit's tag says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Tag {
    /// Neither a start nor an end of anything.
    None,
    /// An allocation of so many units starts here.
    Live(u32),
    /// A block of so many units in a front starts here.
    Cached(u32),
    /// The free block of this node starts or ends here.
    Free(u32),
}

/// The table. Any thread may read and write it: a tag is written by whoever owns its unit at that
/// time, and others only learn from it that they do not.
pub(super) struct Tags {
    table: NonNull<AtomicU32>,
    units: usize,
}

// SAFETY: the table is of atomics, alive until drop; the pointer itself never changes.
unsafe impl Send for Tags {}
// SAFETY: as above.
unsafe impl Sync for Tags {}

impl Tags {
    /// A table for so many units, or `None` where the system does not give the address space.
    pub(super) fn new(units: u32) -> Option<Self> {
        let layout = Self::layout(units as usize)?;
        // SAFETY: the layout is not empty, as `layout` makes sure.
        let table = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { table: table.cast(), units: units as usize })
    }

    fn layout(units: usize) -> Option<Layout> {
        Layout::array::<AtomicU32>(units).ok().filter(|layout| layout.size() > 0)
    }

    pub(super) fn units(&self) -> u32 {
        self.units as u32
    }

    #[inline(always)]
    fn at(&self, unit: u32) -> Option<&AtomicU32> {
        // SAFETY: the index is within the table, which is zeroed (a valid state of atomics) and
        // alive while `self` is.
        ((unit as usize) < self.units).then(|| unsafe { self.table.add(unit as usize).as_ref() })
    }

    /// The tag of a unit; nothing beyond the table.
    #[inline(always)]
    pub(super) fn get(&self, unit: u32) -> Tag {
        let raw = self.at(unit).map_or(0, |tag| tag.load(Ordering::Relaxed));
        let value = raw & !KIND;
        match raw & KIND {
            LIVE => Tag::Live(value),
            CACHED => Tag::Cached(value),
            FREE => Tag::Free(value),
            _ => Tag::None,
        }
    }

    /// The first unit of a range that has a tag.
    pub(super) fn first_in(&self, range: std::ops::Range<u32>) -> Option<u32> {
        let end = (range.end as usize).min(self.units);
        let length = end.checked_sub(range.start as usize)?;
        // SAFETY: the units are within the table, which is zeroed (a valid state of atomics) and
        // alive while `self` is; all access to it is atomic.
        let tags = unsafe {
            std::slice::from_raw_parts(self.table.as_ptr().add(range.start as usize), length)
        };
        let found = tags.iter().position(|tag| tag.load(Ordering::Relaxed) != 0)?;
        Some(range.start + found as u32)
    }

    #[inline(always)]
    fn set(&self, unit: u32, raw: u32) {
        if let Some(tag) = self.at(unit) {
            tag.store(raw, Ordering::Relaxed);
        }
    }

    #[inline(always)]
    pub(super) fn set_live(&self, start: u32, units: u32) {
        self.set(start, LIVE | units);
    }

    #[inline(always)]
    pub(super) fn set_cached(&self, start: u32, units: u32) {
        self.set(start, CACHED | units);
    }

    #[inline(always)]
    pub(super) fn set_free(&self, unit: u32, node: u32) {
        self.set(unit, FREE | node);
    }

    #[inline(always)]
    pub(super) fn clear(&self, unit: u32) {
        self.set(unit, 0);
    }
}

impl Drop for Tags {
    fn drop(&mut self) {
        if let Some(layout) = Self::layout(self.units) {
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
        let Some(tags) = Tags::new(100) else { panic!("no memory for 400 bytes") };
        tags.set_live(0, 5);
        tags.set_cached(5, 7);
        tags.set_free(99, 3);
        tags.set_live(100, 1);
        let read = [0, 1, 5, 99, 100, u32::MAX].map(|unit| tags.get(unit));
        let [live, none, cached, free, beyond, far] = read;
        assert_eq!((live, none, cached), (Tag::Live(5), Tag::None, Tag::Cached(7)));
        assert_eq!((free, beyond, far), (Tag::Free(3), Tag::None, Tag::None));
        let first = [0..100, 1..100, 6..99, 6..200, 200..300].map(|range| tags.first_in(range));
        assert_eq!(first, [Some(0), Some(5), None, Some(99), None]);
        assert!(Tags::new(0).is_none());
    }
}

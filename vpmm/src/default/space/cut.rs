//! Which free block a request is cut from, and at which end.
//!
//! An extent moves only in one piece: a block in one half of it keeps the other half from
//! everybody who would need it elsewhere. A cut is as dear as what it takes from the extents that
//! are wholly free, beyond its own length or not: memory that could not be moved anyway is the
//! best to use.

#![forbid(unsafe_code)]

use super::free_set::Block;
use super::{Part, Space};
use crate::default::lifetimes::ways::Fate;

/// Blocks of each owner that are compared where a limit is set, the smallest first.
const COMPARED: u32 = 16;

/// Blocks of each owner that are looked at where a request's fate is known, the smallest first: all that suffice,
/// as a rule (in a training 17 to 25 on average), and no more however many there are. Without a limit and in haste fewer:
/// hardly anything may move then, and what takes the largest blocks apart has more made.
const LOOKED_AT: u32 = 64;
const LOOKED_AT_IN_HASTE: u32 = 8;

/// Where in a free block a request goes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum End {
    First,
    Last,
}

impl Space {
    /// Where a large request that is placed with care goes: by its fate where that is known, else where it
    /// takes the least movable memory where that is scarce.
    #[inline(never)]
    pub(super) fn choose(&self, stream: u32, units: u32, part: Part) -> Option<(u32, End)> {
        let course = &self.books[stream as usize].course;
        match self.lifetimes.foretell(course, units) {
            Some(fate) => self.apart(stream, units, part, fate),
            None if self.is_scarce() => self.least_loss(stream, units, part),
            None => self.best_fit(stream, units, part).map(|block| (block.id(), End::First)),
        }
    }

    /// What stays at the lowest address, what goes at the highest, of all that is looked at.
    ///
    /// What goes is in nobody's way at the crest, wherever it was. In the blocks that it fits best it would fill
    /// gaps that what stays is to lie in; and that then takes the start of what the largest requests had in the
    /// round before, and they have memory moved to its other end, round for round.
    fn apart(&self, stream: u32, units: u32, part: Part, fate: Fate) -> Option<(u32, End)> {
        // The lowest of these is the highest block.
        let (turned, end) = match fate {
            Fate::Stays => (0, End::First),
            Fate::Goes => (u32::MAX, End::Last),
        };
        let most = if self.is_in_haste() { LOOKED_AT_IN_HASTE } else { LOOKED_AT };
        let mut found = None;
        let mut lowest = u32::MAX;
        for set in self.usable_sets(stream, part) {
            found = set.lowest_of(units, most, turned, &mut lowest).or(found);
        }
        found.map(|block| (block.id(), end))
    }

    /// The free block of which a request takes the least movable memory, and the end that it
    /// takes; of those that are equal the best fit. It looks at the few smallest only.
    #[inline(never)]
    pub(super) fn least_loss(&self, stream: u32, units: u32, part: Part) -> Option<(u32, End)> {
        let mut found = None;
        let mut least = (u32::MAX, u32::MAX, u32::MAX);
        for set in self.usable_sets(stream, part) {
            set.smallest(units, COMPARED, |block| {
                let (lost, end) = self.loss(block, units);
                let order = (lost, block.units(), block.start());
                // No block starts at the last unit of all.
                if order < least {
                    (least, found) = (order, Some((block.id(), end)));
                }
            });
        }
        found
    }

    /// The units of wholly free extents that a request breaks or covers at the end of a free block
    /// where those are fewer; and that end.
    ///
    /// Reckoned without a branch wherever it may go either way: nobody foresees where in a block
    /// extents begin and end.
    #[inline]
    pub(super) fn loss(&self, block: &Block, units: u32) -> (u32, End) {
        let (start, end) = (block.start(), block.end());
        let granule_units = self.memory.granule_units();
        if block.units() < granule_units {
            return (0, End::First);
        }
        let bounds = |unit: u32| {
            let extent = self.memory.extent_at(self.memory.granule_of(unit));
            extent.map(|(_, extent)| (extent.start * granule_units, extent.end() * granule_units))
        };
        // All of a free block has memory.
        let (Some(at_start), Some(at_end), Some(at_cut), Some(at_last_cut)) =
            (bounds(start), bounds(end - 1), bounds(start + units - 1), bounds(end - units))
        else {
            return (0, End::First);
        };
        // Whole extents lie from here to there, if any do.
        let first = if at_start.0 == start { start } else { at_start.1 };
        let last = if at_end.1 == end { end } else { at_end.0 };
        let last = last.max(first);
        let lost_at_start = at_cut.1.clamp(first, last) - first;
        let lost_at_end = last - at_last_cut.0.clamp(first, last);
        // A block that ends at a hole can grow there.
        let grows = end.is_multiple_of(granule_units) && bounds(end).is_none();
        if lost_at_end < lost_at_start && !grows {
            (lost_at_end, End::Last)
        } else {
            (lost_at_start, End::First)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::default::front::Cached;
    use crate::default::memory::Memory;
    use crate::default::space::book::{Book, Recording};
    use crate::default::space::owner::Owner;
    use crate::default::space::tags::Tags;
    use crate::physical::Extent;

    const GRANULES: u32 = 64;
    /// The granule of 2 MiB in units of 512 bytes.
    const UNITS: u32 = 4096;

    /// A space whose large part is mapped from its start, by extents of these lengths.
    fn mapped_by(lengths: &[u32]) -> Space {
        let mut memory = Memory::new(0, GRANULES, 2 << 20, 7);
        let mut at = memory.range(Part::Large).start;
        for (number, granules) in lengths.iter().enumerate() {
            memory.reserve(at, *granules);
            memory.settle(at);
            memory.enter(Extent(number as u64 + 1), at, *granules);
            at += granules;
        }
        Space::new(memory, true, true, 0)
    }

    fn free(start: u32, units: u32) -> Block {
        let block = Block::vacant(0);
        block.set(start, units, Owner::NOBODY);
        block
    }

    fn movable(space: &Space, start: u32, end: u32) -> u32 {
        let mut granules = 0;
        if start < end {
            space.whole_extents(&free(start, end - start), |_, extent| granules += extent.granules);
        }
        granules * UNITS
    }

    #[test]
    fn a_loss_is_the_movable_memory_before_less_that_after() {
        let mut seed = 7_u64;
        let mut random = |bound: u32| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) as u32 % bound
        };
        let mut ends = [0, 0];
        for _ in 0..if cfg!(miri) { 20 } else { 2000 } {
            let lengths: Vec<u32> = (0..6).map(|_| 1 + random(8)).collect();
            let mapped: u32 = lengths.iter().sum();
            let space = mapped_by(&lengths);
            let base = space.memory.split_unit();
            let start = base + random(mapped * UNITS - 1);
            let end = match random(4) {
                0 => base + mapped * UNITS,
                _ => start + 1 + random(base + mapped * UNITS - start),
            };
            let units = 1 + random(end - start);
            let before = movable(&space, start, end);
            let at_start = before - movable(&space, start + units, end);
            let at_end = before - movable(&space, start, end - units);
            let by_hole = end == base + mapped * UNITS;
            let expected = if at_end < at_start && !by_hole {
                (at_end, End::Last)
            } else {
                (at_start, End::First)
            };
            let found = space.loss(&free(start, end - start), units);
            assert_eq!(found, expected, "{units} of {start}..{end} over {lengths:?}");
            ends[found.1 as usize] += 1;
        }
        assert!(ends.iter().all(|times| *times > 0), "{ends:?}");
    }

    /// It gives away more for each hit than care would save, and its requests come from here more often.
    #[test]
    fn requests_of_a_loose_front_have_the_best_fit() {
        for is_loose in [false, true] {
            let mut space = mapped_by(&[2, 2, 2]);
            space.books.push(Book::new(Recording::Eager, 0));
            let base = space.memory.split_unit();
            let Some(tags) = Tags::new(GRANULES * UNITS, base) else {
                panic!("no memory for the tags")
            };
            // A whole extent, and one with what is left of another before it.
            space.give(&tags, base, 2 * UNITS, Owner::NOBODY);
            space.give(&tags, base + 3 * UNITS, 3 * UNITS, Owner::NOBODY);
            space.note_front(Cached { now: 0, least: 0, change: 0, is_loose });
            let expected = if is_loose { base } else { base + 3 * UNITS };
            assert_eq!(space.place(&tags, 0, UNITS, Part::Large), Some(expected));
        }
    }
}

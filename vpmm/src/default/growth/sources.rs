//! Which free extents move to where a request grows, and in which order.

#![forbid(unsafe_code)]

use super::plan::{Fill, Piece, Source, Window};
use crate::default::memory::Resident;
use crate::default::space::free_set::Block;
use crate::default::space::{Part, Space};

impl Space {
    /// Whole extents in free memory that the stream may use, outside the window. Those `leaving_least` beside
    /// them first, or without regard to that.
    pub(super) fn sources(&self, stream: u32, window: &Window, leaving_least: bool) -> Sources {
        let granule_units = self.memory.granule_units();
        let in_window = |block: &Block| block.end() > window.start && block.start() < window.end;
        let mut sources = Sources::of_at_most(self.memory.handles());
        for part in Part::ALL {
            for block in self
                .usable_sets(stream, part)
                .into_iter()
                .flat_map(|set| set.of_at_least(granule_units))
            {
                // Of a block that goes on behind the window what lies there.
                let from = if in_window(block) { window.end } else { block.start() };
                let left = if leaving_least { left_for_each(block, granule_units) } else { 0 };
                self.extents_within(from, block.end(), |number, extent| {
                    if !extent.exported {
                        sources.add(number, extent, block, left);
                    }
                });
            }
        }
        sources.ranks.sort_unstable();
        sources
    }

    /// Whether the whole free extents that a stream may use come to less than a request.
    pub(in crate::default) fn lacks_whole(&self, stream: u32, units: u32) -> bool {
        !self.has_whole(stream, u64::from(units.div_ceil(self.memory.granule_units())))
    }

    /// Whether the whole free extents that a stream may use come to so many granules.
    pub(super) fn has_whole(&self, stream: u32, granules: u64) -> bool {
        let granule_units = self.memory.granule_units();
        let mut there = 0;
        let sets = Part::ALL.map(|part| self.usable_sets(stream, part));
        for block in sets.into_iter().flatten().flat_map(|set| set.of_at_least(granule_units)) {
            if there >= granules {
                return true;
            }
            self.whole_extents(block, |_, extent| {
                there += if extent.exported { 0 } else { u64::from(extent.granules) };
            });
        }
        there >= granules
    }

    /// Calls `visit` with every extent that a free block covers whole.
    pub(in crate::default) fn whole_extents(
        &self,
        block: &Block,
        visit: impl FnMut(u32, &Resident),
    ) {
        self.extents_within(block.start(), block.end(), visit);
    }

    /// Calls `visit` with every extent that lies whole within a range of units, all of which have
    /// memory.
    pub(in crate::default) fn extents_within(
        &self,
        start: u32,
        end: u32,
        mut visit: impl FnMut(u32, &Resident),
    ) {
        let granule_units = self.memory.granule_units();
        let first = start.div_ceil(granule_units);
        let end = end / granule_units;
        let mut at = first;
        while at < end {
            let Some((number, extent)) = self.memory.extent_at(at) else { return };
            if extent.start >= first && extent.end() <= end {
                visit(number, &extent);
            }
            at = extent.end();
        }
    }
}

/// What would be left of a free block if all of its whole granules moved away, for each of those: the
/// beginning of one more and the end of another, which hardly anybody else could have. In 64ths of a granule,
/// less than 128.
fn left_for_each(block: &Block, granule_units: u32) -> u32 {
    let before = block.start().next_multiple_of(granule_units) - block.start();
    let left = before + block.end() % granule_units;
    let whole = block.units().saturating_sub(left) / granule_units;
    64 * left / granule_units / whole.max(1)
}

/// Free extents that may be moved.
#[derive(Default)]
pub(super) struct Sources {
    found: Vec<Piece>,
    /// The order in which they are taken, the least first: what it goes by, above the place among
    /// them. One number, which sorts several times faster than all of it apart.
    ranks: Vec<u128>,
    pub(super) granules: u64,
}

impl Sources {
    /// None yet; with room for so many, or a good part of them.
    fn of_at_most(extents: usize) -> Self {
        let room = extents.min(256);
        Self { found: Vec::with_capacity(room), ranks: Vec::with_capacity(room), granules: 0 }
    }

    /// The longest first, since each costs the same; of those from the free blocks that leave the least (less
    /// than 128) for each; of those from the smallest, which makes the fewest pieces of the rest, from their
    /// ends.
    fn add(&mut self, number: u32, extent: &Resident, block: &Block, left: u32) {
        // No extent has so many granules that seven bits less would not do.
        let first = !extent.granules << 7 | left;
        let order = [first, block.units(), !extent.start, self.found.len() as u32];
        self.ranks.push(order.into_iter().fold(0, |rank, next| rank << 32 | u128::from(next)));
        let (handle, owner, block) = (extent.handle, block.owner(), block.id());
        let source = Source::Moved { number, handle, owner, block };
        self.found.push(Piece { source, granules: extent.granules });
        self.granules += u64::from(extent.granules);
    }

    /// Takes extents that fit into what is missing, of them so many at most; returns how many granules they
    /// come to.
    pub(super) fn take(&mut self, fill: &mut Fill, missing: u32, most: u32) -> u32 {
        let (mut taken, mut left) = (0, most);
        let found = &self.found;
        self.ranks.retain(|rank| {
            let piece = found[*rank as u32 as usize];
            let fits = piece.granules <= missing - taken && left > 0;
            if fits {
                taken += piece.granules;
                left -= 1;
                fill.pieces.push(piece);
            }
            !fits
        });
        self.granules -= u64::from(taken);
        taken
    }

    /// Takes the smallest extent of `at_least` to `at_most` granules.
    pub(super) fn take_longer(
        &mut self,
        fill: &mut Fill,
        at_least: u32,
        at_most: u32,
    ) -> Option<u32> {
        let piece = |at: &usize| self.found[self.ranks[*at] as u32 as usize];
        let fitting = (0..self.ranks.len())
            .filter(|at| (at_least..=at_most).contains(&piece(at).granules))
            .min_by_key(|at| piece(at).granules)?;
        let best = piece(&fitting);
        self.ranks.remove(fitting);
        fill.pieces.push(best);
        self.granules -= u64::from(best.granules);
        Some(best.granules)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::default::space::owner::Owner;
    use crate::physical::Extent;

    const UNITS: u32 = 4096;

    fn free(start: u32, units: u32) -> Block {
        let block = Block::vacant(0);
        block.set(start, units, Owner::NOBODY);
        block
    }

    fn resident(start: u32, granules: u32) -> Resident {
        let mut resident = Resident::vacant(Extent(u64::from(start)));
        (resident.start, resident.granules) = (start, granules);
        resident
    }

    /// The first granules of what moves, in order, when all of it does.
    fn order(of: &[(&Block, u32, u32)], leaving_least: bool) -> Vec<u32> {
        let mut sources = Sources::default();
        for (number, (block, start, granules)) in of.iter().enumerate() {
            let left = if leaving_least { left_for_each(block, UNITS) } else { 0 };
            sources.add(number as u32, &resident(*start, *granules), block, left);
        }
        sources.ranks.sort_unstable();
        let mut fill = Fill { start: 0, granules: 0, pieces: smallvec::SmallVec::new() };
        let all = sources.granules as u32;
        assert_eq!(sources.take(&mut fill, all, u32::MAX), all);
        let number = |piece: &Piece| match piece.source {
            Source::Moved { number, .. } => of[number as usize].1,
            _ => u32::MAX,
        };
        fill.pieces.iter().map(number).collect()
    }

    #[test]
    fn what_is_left_counts_by_what_moves_and_never_comes_to_128() {
        let left = |start, end: u32| left_for_each(&free(start, end - start), UNITS);
        assert_eq!([left(0, UNITS), left(3 * UNITS, 9 * UNITS)], [0, 0]);
        assert_eq!([left(UNITS / 2, 2 * UNITS), left(0, 4 * UNITS + UNITS / 2)], [32, 8]);
        assert_eq!([left(1, 3 * UNITS - 1), left(UNITS - 1, 3 * UNITS + 1)], [127, 0]);
        assert_eq!(left(1, UNITS + UNITS / 2), 95);
    }

    #[test]
    fn the_longest_move_first_then_what_leaves_least_then_the_smallest_from_their_ends() {
        let (whole, odd) = (free(10 * UNITS, 2 * UNITS), free(20 * UNITS, UNITS + UNITS / 2));
        let long = free(30 * UNITS - UNITS / 2, 4 * UNITS + UNITS / 2);
        let of = [(&whole, 10, 1), (&whole, 11, 1), (&odd, 20, 1), (&long, 30, 1), (&long, 31, 3)];
        assert_eq!(order(&of, true), [31, 11, 10, 30, 20]);
        assert_eq!(order(&of, false), [31, 20, 11, 10, 30]);
    }
}

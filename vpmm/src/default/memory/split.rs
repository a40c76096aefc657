//! Extents of which two addresses have a part each.
//!
//! Only whole extents can be mapped, and only wholly free ones can move: what is free of an extent beside a
//! block that stays would be lost to everything longer. But a handle may be mapped at two addresses. So a
//! request that would lack memory may begin with the free end of one extent, and end with the free beginning
//! of another:
//!
//! ```text
//!   before   ├─ live ─┬── free ──┤              ├─ free ─┬───── live ────┤
//!   split    ├─ live ─┤                                  ├───── live ────┤
//!                     ├── the request ──┬── whole extents ──┬────────┤      elsewhere
//! ```
//!
//! Every byte is at one of the two addresses. What an address has of the other part is nothing there: it has
//! no tag, and no block covers it. Either part is allocated and freed as all memory is. When both are free,
//! or one is and what was beside it has moved away, that one goes back beside the other, and the extent is
//! whole again: *rejoined*. The addresses that it leaves are a zombie.
//!
//! The two parts have no line of any cache in common: blocks here begin and end at pages of 4 KiB. (CUDA
//! promises nothing of one *byte* that is used through two addresses at once: "Virtual Aliasing Support" in
//! its programming guide. No byte ever is: it changes its address as memory does that moves.)

#![forbid(unsafe_code)]

use std::cmp::Reverse;
use std::ops::Range;

use super::{Memory, Resident};
use crate::default::growth::plan::{Gap, Piece, Source, Window};
use crate::default::growth::policy::Policy;
use crate::default::space::free_set::Block;
use crate::default::space::owner::Owner;
use crate::default::space::tags::{Tag, Tags};
use crate::default::space::{Part, Space};
use crate::fence::{Fence, TimelineId};
use crate::physical::Extent;

/// Free blocks looked at for parts of extents, the longest of each owner's.
const LOOKED_AT: usize = 2048;

/// Parts that are compared for each end of a request, the longest.
const COMPARED: usize = 32;

/// Which part of an extent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Side {
    Low,
    High,
}

/// A free part of an extent, up to one of its ends.
#[derive(Clone, Copy, Debug)]
pub(in crate::default) struct Rest {
    /// The extent by its number and its handle, and its granules.
    pub(in crate::default) number: u32,
    pub(in crate::default) handle: Extent,
    pub(in crate::default) granules: u32,
    /// Who owned the free memory, and its node.
    pub(in crate::default) owner: Owner,
    pub(in crate::default) block: u32,
    side: Side,
    /// Where it begins now, and its units.
    pub(in crate::default) start: u32,
    pub(in crate::default) units: u32,
}

impl Rest {
    pub(in crate::default) fn end(&self) -> u32 {
        self.start + self.units
    }

    /// As much of it as is needed, up to the extent's end.
    fn of_units(self, units: u32) -> Self {
        let start = match self.side {
            Side::Low => self.start,
            Side::High => self.end() - units,
        };
        Self { start, units, ..self }
    }
}

/// An extent in two parts.
#[derive(Clone, Copy, Debug)]
pub(in crate::default) struct Split {
    pub(in crate::default) number: u32,
    /// The part that was mapped elsewhere for it.
    moved: Side,
    /// Behind this nothing uses that part through the other's addresses any more.
    pub(super) since: Fence,
}

/// The free parts of extents that a request may have: of each kind the longest, in that order, and of those
/// that are as long the lowest first.
#[derive(Default)]
pub(super) struct Rests {
    low: Vec<Rest>,
    high: Vec<Rest>,
}

impl Rests {
    fn add(&mut self, rest: Rest) {
        let of_side = match rest.side {
            Side::Low => &mut self.low,
            Side::High => &mut self.high,
        };
        let order = |rest: &Rest| (Reverse(rest.units), rest.start);
        let at = of_side.partition_point(|better| order(better) <= order(&rest));
        if at < COMPARED {
            of_side.truncate(COMPARED - 1);
            of_side.insert(at, rest);
        }
    }

    /// Whether no part of a block of so many units would be among them.
    fn are_longer_than(&self, units: u32) -> bool {
        [&self.low, &self.high].iter().all(|of_side| {
            of_side.len() == COMPARED && of_side.last().is_some_and(|rest| rest.units > units)
        })
    }

    /// What a request takes before and behind whole granules so that it needs the fewest of those, of that
    /// the least; and how many granules it still needs.
    fn ends(&self, units: u32, granule_units: u32) -> (Option<Rest>, Option<Rest>, u32) {
        let firsts = || [None].into_iter().chain(self.high.iter().map(Some));
        let lasts = || [None].into_iter().chain(self.low.iter().map(Some));
        let length = |rest: Option<&Rest>| rest.map_or(0, |rest| rest.units);
        let mut best = ((units.div_ceil(granule_units), 0, 0), None, None);
        for (first, last) in firsts().flat_map(|first| lasts().map(move |last| (first, last))) {
            let there = length(first) + length(last);
            let whole = units.saturating_sub(there).div_ceil(granule_units);
            // An extent has two parts at most.
            let same = first.zip(last).is_some_and(|(first, last)| first.number == last.number);
            // One that would do alone does alone.
            let alone = |one| units.saturating_sub(length(one)).div_ceil(granule_units) == whole;
            let spare = first.is_some() && last.is_some() && (alone(first) || alone(last));
            if same || spare || length(first).max(length(last)) >= units {
                continue;
            }
            let pieces = u32::from(first.is_some()) + u32::from(last.is_some());
            let order = (whole, pieces, there);
            if order < best.0 {
                best = (order, first, last);
            }
        }
        let ((whole, ..), first, last) = best;
        // The one behind as much as is left, or the one before where there is none.
        let left = units - whole.min(units / granule_units) * granule_units;
        match (first, last) {
            (Some(first), Some(last)) => {
                (Some(*first), Some(last.of_units(left - first.units)), whole)
            }
            (Some(first), None) => (Some(first.of_units(left)), None, whole),
            (None, Some(last)) => (None, Some(last.of_units(left)), whole),
            (None, None) => (None, None, whole),
        }
    }
}

impl Space {
    /// The parts of extents that a stream may have for windows in the large part.
    pub(super) fn rests(&self, stream: u32) -> Rests {
        let mut rests = Rests::default();
        let mut left = LOOKED_AT;
        for set in self.usable_sets(stream, Part::Large) {
            for block in set.largest_first().take(left) {
                if rests.are_longer_than(block.units()) {
                    break;
                }
                left -= 1;
                let ends = [(block.start(), Side::High), (block.end() - 1, Side::Low)];
                let of_block = ends.map(|(inside, side)| self.rest_of(block, inside, side));
                of_block.into_iter().flatten().for_each(|rest| rests.add(rest));
            }
        }
        rests
    }

    /// What a free block has of the extent that it begins in, up to that one's end, or of the one that it ends
    /// in, up to that one's beginning: of the one that is at `inside`.
    fn rest_of(&self, block: &Block, inside: u32, side: Side) -> Option<Rest> {
        let granule_units = self.memory.granule_units();
        let number = self.memory.number_at(self.memory.granule_of(inside))?;
        let extent = self.memory.extent(number);
        if extent.is_split() || extent.exported {
            return None;
        }
        let (first, behind) = (extent.start * granule_units, extent.end() * granule_units);
        let (start, end) = match side {
            Side::Low => (first, block.end()),
            Side::High => (block.start(), behind),
        };
        let is_part = first < start || end < behind;
        let covers = block.start() <= start && end <= block.end();
        let (handle, granules) = (extent.handle, extent.granules);
        let (owner, block, units) = (block.owner(), block.id(), end.checked_sub(start)?);
        (is_part && covers).then_some(Rest {
            number,
            handle,
            granules,
            owner,
            block,
            side,
            start,
            units,
        })
    }

    /// A fresh window that begins and ends with what others leave of extents; `None` where it would lack no
    /// less for that.
    pub(in crate::default) fn between(
        &self,
        stream: u32,
        units: u32,
        policy: &Policy,
    ) -> Option<Window> {
        let granule_units = self.memory.granule_units();
        let (first, last, cost) = self.rests(stream).ends(units, granule_units);
        let instead = units.div_ceil(granule_units);
        if cost >= instead {
            return None;
        }
        let granules_of = |rest: &Option<Rest>| rest.map_or(0, |rest| rest.granules);
        let granules = granules_of(&first) + cost + granules_of(&last);
        let (at, _) = self.fresh_addresses(granules, Part::Large, policy)?;
        let start = (at + granules_of(&first)) * granule_units - first.map_or(0, |rest| rest.units);
        let gaps = [Gap { start: at, granules, beyond: 0 }].into_iter().collect();
        Some(Window { start, end: start + units, gaps, cost, first, last, instead })
    }

    /// The extent of a rest was mapped from a granule of addresses on, too: it is split.
    pub(in crate::default) fn split(&mut self, rest: &Rest, at: u32) {
        let granule_units = self.memory.granule_units();
        let cut = match rest.side {
            Side::Low => rest.units,
            Side::High => rest.granules * granule_units - rest.units,
        };
        let since = self.fence_of(rest.owner);
        self.memory.split(Split { number: rest.number, moved: rest.side, since }, at, cut);
        self.transit_units -= u64::from(rest.units);
    }

    /// Makes split extents whole again of which both parts are free, or one and nothing free is beside it any
    /// more; with `any` all of which one part is free. Returns whether there were such.
    pub(in crate::default) fn rejoin(&mut self, tags: &Tags, any: bool) -> bool {
        let splits = self.memory.splits.len();
        for at in (0..self.memory.splits.len()).rev() {
            let split = self.memory.splits[at];
            let number = split.number;
            if self.memory.extent(number).exported {
                continue;
            }
            let [low, high] = [Side::Low, Side::High].map(|side| {
                self.free_part(tags, number, side)
                    .filter(|(block, _)| self.may_leave(&split, side, *block))
            });
            let any = any || (low.is_some() && high.is_some());
            let goes = |part: &Option<(u32, bool)>| part.is_some_and(|(_, alone)| alone || any);
            match (low, high) {
                (Some((block, _)), _) if goes(&low) => {
                    self.rejoin_from(tags, number, Side::Low, block)
                }
                (_, Some((block, _))) if goes(&high) => {
                    self.rejoin_from(tags, number, Side::High, block)
                }
                _ => {}
            }
        }
        self.memory.splits.len() < splits
    }

    /// Whether the addresses of one part, which that free block covers, may be unmapped behind the fence of
    /// that alone: those that the other part had before may still be in use for it, too.
    fn may_leave(&self, split: &Split, side: Side, block: u32) -> bool {
        let Fence { timeline, sequence } = split.since;
        let owner = self.blocks.get(block).owner().of_stream();
        side == split.moved
            || split.since == Fence::PASSED
            || owner.is_some_and(|(stream, _)| TimelineId(stream) == timeline)
            || self.books[timeline.0 as usize].passed >= sequence
    }

    /// Whether a stream's open epoch is what an extent in two parts waits for, to be whole again.
    pub(in crate::default) fn split_waits(&self, stream: u32) -> bool {
        let book = &self.books[stream as usize];
        let waits = |fence: Fence| {
            fence.timeline == TimelineId(stream)
                && fence != Fence::PASSED
                && fence.sequence > book.passed
        };
        self.memory.splits.iter().any(|split| waits(split.since))
    }

    /// The free block that covers a part of a split extent, and whether it is nothing more.
    fn free_part(&self, tags: &Tags, number: u32, side: Side) -> Option<(u32, bool)> {
        let part = self.memory.part_of_split(number, side);
        let Tag::Free(id) = tags.get(match side {
            Side::Low => part.end - 1,
            Side::High => part.start,
        }) else {
            return None;
        };
        let block = self.blocks.get(id);
        let covers = block.start() <= part.start && part.end <= block.end();
        covers.then_some((id, block.units() == part.end - part.start))
    }

    /// Has a free part go back beside the other: the address that it leaves is a zombie.
    fn rejoin_from(&mut self, tags: &Tags, number: u32, side: Side, block: u32) {
        let granule_units = self.memory.granule_units();
        let part = self.memory.part_of_split(number, side);
        let owner = self.blocks.get(block).owner();
        let units = part.end - part.start;
        self.take_ranges(tags, &mut [(block, part.start, part.end)]);
        self.transit_units -= u64::from(units);
        let offset = match side {
            Side::Low => 0,
            Side::High => self.memory.extent(number).cut,
        };
        let left = self.memory.rejoin(number, side);
        let extent = *self.memory.extent(number);
        self.memory.retire([left], left + extent.granules, self.fence_of(owner));
        let start = extent.start * granule_units + offset;
        let owner = self.now(owner);
        self.give(tags, start, units, owner);
    }
}

impl Window {
    /// Whether it has part of an extent at an end.
    pub(in crate::default) fn shares(&self) -> bool {
        self.first.is_some() || self.last.is_some()
    }

    /// The pieces before and behind the others of a gap.
    pub(in crate::default) fn shared_pieces(&self, gap: usize) -> (Option<Piece>, Option<Piece>) {
        let piece = |rest: Rest| Piece { source: Source::Shared(rest), granules: rest.granules };
        let first = self.first.filter(|_| gap == 0).map(piece);
        (first, self.last.filter(|_| gap + 1 == self.gaps.len()).map(piece))
    }
}

impl Resident {
    /// Whether another address has a part of it.
    pub(in crate::default) fn is_split(&self) -> bool {
        self.cut > 0
    }
}

impl Memory {
    /// An extent was mapped at further addresses, which have one side of it from here on.
    fn split(&mut self, split: Split, at: u32, cut: u32) {
        let extent = self.extent_mut(split.number);
        (extent.cut, extent.twin) = (cut, at);
        if split.moved == Side::Low {
            std::mem::swap(&mut extent.start, &mut extent.twin);
        }
        let granules = extent.granules;
        self.write_twin(at, granules, split.number + 1);
        self.splits.push(split);
    }

    /// One side's addresses are given up; returns the first.
    fn rejoin(&mut self, number: u32, side: Side) -> u32 {
        self.splits.retain(|split| split.number != number);
        let extent = self.extent_mut(number);
        let left = match side {
            Side::Low => std::mem::replace(&mut extent.start, extent.twin),
            Side::High => extent.twin,
        };
        (extent.cut, extent.twin) = (0, 0);
        let granules = extent.granules;
        self.note_left(number, left);
        self.write_twin(left, granules, 0);
        left
    }

    /// The units of one side of a split extent, at its own addresses.
    fn part_of_split(&self, number: u32, side: Side) -> Range<u32> {
        let extent = self.extent(number);
        let granule_units = self.granule_units();
        match side {
            Side::Low => extent.start * granule_units..extent.start * granule_units + extent.cut,
            Side::High => {
                let end = (extent.twin + extent.granules) * granule_units;
                extent.twin * granule_units + extent.cut..end
            }
        }
    }

    /// The units that have memory of their own at a granule with memory: all, or some, or none.
    pub(in crate::default) fn units_at(&self, granule: u32) -> Range<u32> {
        let granule_units = self.granule_units();
        let (first, end) = (granule * granule_units, (granule + 1) * granule_units);
        let number = match self.extent_at(granule) {
            Some((number, extent)) if extent.is_split() => number,
            _ => return first..end,
        };
        let low = self.part_of_split(number, Side::Low);
        let extent = self.extent(number);
        let here = match (extent.start..extent.end()).contains(&granule) {
            true => low,
            false => self.part_of_split(number, Side::High),
        };
        here.start.clamp(first, end)..here.end.clamp(first, end)
    }

    /// The units that split extents have at both their addresses without being there.
    pub(super) fn elsewhere(&self) -> impl Iterator<Item = Range<u32>> {
        let granule_units = self.granule_units();
        self.splits.iter().flat_map(move |split| {
            let extent = self.extent(split.number);
            let [low, high] = [extent.start, extent.twin].map(|granule| granule * granule_units);
            let behind = low + extent.cut..extent.end() * granule_units;
            [behind, high..high + extent.cut]
        })
    }

    /// Whether the extent at these addresses is split.
    pub(in crate::default) fn is_split_at(&self, granule: u32) -> bool {
        self.extent_at(granule).is_some_and(|(_, extent)| extent.is_split())
    }

    /// Granules of further addresses of split extents.
    pub(in crate::default) fn split_granules(&self) -> u64 {
        self.splits.iter().map(|split| u64::from(self.extent(split.number).granules)).sum()
    }
}

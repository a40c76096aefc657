//! What the pool's lock guards: free blocks, streams' epochs, physical memory and its addresses.
//!
//! Nothing here calls the driver.

use super::book::Book;
use super::class::SMALL_UNITS;
use super::free_set::{Block, FreeSet};
use super::memory::Memory;
use super::owner::Owner;
use super::tags::{Tag, Tags};
use crate::arena::Arena;
use crate::event::Event;
use crate::physical::Extent;

/// Small blocks live in addresses of their own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Part {
    Small,
    Large,
}

impl Part {
    pub(super) const ALL: [Self; 2] = [Self::Small, Self::Large];

    #[inline]
    pub(super) fn of_size(units: u32) -> Self {
        if units <= SMALL_UNITS { Self::Small } else { Self::Large }
    }

    pub(super) fn other(self) -> Self {
        match self {
            Self::Small => Self::Large,
            Self::Large => Self::Small,
        }
    }
}

pub(super) struct Space {
    /// What belongs to nobody, by part.
    pub(super) common: [FreeSet; 2],
    pub(super) books: Vec<Book>,
    pub(super) memory: Memory,
    /// Events that nobody uses now.
    pub(super) events: Vec<Event>,
    /// Handles that the driver would not take back.
    pub(super) orphans: Vec<Extent>,
    /// Units that callers have or that are in fronts.
    pub(super) out_units: u64,
    /// Blocks of the same.
    pub(super) out_blocks: u64,
    /// Bytes of regions of operations under way.
    pub(super) transit_units: u64,
    /// Blocks that came back, ever: tells growth whether anything was freed since the last.
    pub(super) returns: u64,
    pub(super) growth: super::grow::Growth,
    pub(super) counters: super::counters::Counters,
    /// Last, so that it outlives the sets.
    pub(super) blocks: Arena<Block>,
}

// SAFETY: the space owns every node that its sets link (the arena is private to it), so moving the
// whole to another thread moves all of them. It is not Sync: nodes hold `Cell`s.
unsafe impl Send for Space {}

impl Space {
    pub(super) fn new(memory: Memory) -> Self {
        Self {
            common: [const { FreeSet::new() }; 2],
            books: Vec::new(),
            memory,
            events: Vec::new(),
            orphans: Vec::new(),
            out_units: 0,
            out_blocks: 0,
            transit_units: 0,
            returns: 0,
            growth: super::grow::Growth::default(),
            counters: super::counters::Counters::default(),
            blocks: Arena::new(),
        }
    }

    #[inline]
    pub(super) fn part_of(&self, unit: u32) -> Part {
        if unit < self.memory.split_unit() { Part::Small } else { Part::Large }
    }

    #[inline]
    fn set_mut(&mut self, owner: Owner, part: Part) -> &mut FreeSet {
        match owner.of_stream() {
            None => &mut self.common[part as usize],
            Some((index, parity)) => &mut self.books[index as usize].sets[parity][part as usize],
        }
    }

    #[inline]
    fn link(&mut self, id: u32) {
        let block = std::ptr::from_ref(self.blocks.get(id));
        // SAFETY: the arena keeps the node in place and alive; nothing below touches the arena.
        let block = unsafe { &*block };
        let part = self.part_of(block.start());
        // SAFETY: the node stays where it is until it is unlinked, is unlinked before it changes,
        // and callers link only what is in no set.
        unsafe { self.set_mut(block.owner(), part).insert(block) };
    }

    #[inline]
    fn unlink(&mut self, id: u32) {
        let block = std::ptr::from_ref(self.blocks.get(id));
        // SAFETY: as in `link`.
        let block = unsafe { &*block };
        let part = self.part_of(block.start());
        // SAFETY: a free block is in the set that its owner and its address name.
        unsafe { self.set_mut(block.owner(), part).remove(block) };
    }

    /// Makes units free, and one with neighbours of the same owner. The caller owns them, and no
    /// tag of theirs but the first matters any more.
    #[inline]
    pub(super) fn give(&mut self, tags: &Tags, start: u32, units: u32, owner: Owner) {
        let (mut first, mut end) = (start, start + units);
        let mut node = None;
        if let Tag::Free(left) = tags.get(start.wrapping_sub(1))
            && self.blocks.get(left).owner() == owner
        {
            self.unlink(left);
            first = self.blocks.get(left).start();
            tags.clear(start - 1);
            node = Some(left);
        }
        if let Tag::Free(right) = tags.get(end)
            && self.blocks.get(right).owner() == owner
        {
            self.unlink(right);
            tags.clear(end);
            end = self.blocks.get(right).end();
            if node.is_some() {
                self.blocks.give_back(right);
            } else {
                node = Some(right);
            }
        }
        if owner != Owner::NOBODY {
            (first, end) = self.absorb(tags, first, end);
        }
        tags.clear(start);
        let node = node.unwrap_or_else(|| self.blocks.take(Block::vacant));
        self.blocks.get(node).set(first, end - first, owner);
        tags.set_free(first, node);
        tags.set_free(end - 1, node);
        self.link(node);
    }

    /// Takes nobody's neighbours out that are no longer than a block that a stream frees, to be one
    /// with it: the stream's next requests find one block where there would be two, and what
    /// others lose by it for a while is no more than they lose by the stream's using the block.
    #[inline]
    fn absorb(&mut self, tags: &Tags, mut first: u32, mut end: u32) -> (u32, u32) {
        if let Tag::Free(left) = tags.get(first.wrapping_sub(1)) {
            let block = self.blocks.get(left);
            if block.owner() == Owner::NOBODY && block.units() <= end - first {
                // It may be the first tag of a neighbour that is part of the block by now.
                tags.clear(first);
                first = self.take_whole(tags, left).0;
            }
        }
        if let Tag::Free(right) = tags.get(end) {
            let block = self.blocks.get(right);
            if block.owner() == Owner::NOBODY && block.units() <= end - first {
                tags.clear(end - 1);
                let (start, units, _) = self.take_whole(tags, right);
                end = start + units;
            }
        }
        (first, end)
    }

    /// Takes a whole free block out.
    pub(super) fn take_whole(&mut self, tags: &Tags, id: u32) -> (u32, u32, Owner) {
        self.unlink(id);
        let block = self.blocks.get(id);
        let taken = (block.start(), block.units(), block.owner());
        self.blocks.give_back(id);
        tags.clear(taken.0);
        tags.clear(taken.0 + taken.1 - 1);
        taken
    }

    /// Takes the first units of a free block out.
    #[inline]
    pub(super) fn take_head(&mut self, tags: &Tags, id: u32, units: u32) -> u32 {
        self.unlink(id);
        let block = self.blocks.get(id);
        let (start, rest) = (block.start(), block.units() - units);
        tags.clear(start);
        if rest == 0 {
            tags.clear(start + units - 1);
            self.blocks.give_back(id);
        } else {
            block.set(start + units, rest, block.owner());
            // The last tag names the node already.
            tags.set_free(start + units, id);
            self.link(id);
        }
        start
    }

    /// Best fit over what the stream may use: its own and nobody's, the smallest of all.
    #[inline]
    pub(super) fn best_fit(&self, stream: u32, units: u32, part: Part) -> Option<u32> {
        let part = part as usize;
        let book = &self.books[stream as usize];
        let own = book.sets[0][part].best_fit(units);
        let other = book.sets[1][part].best_fit(units);
        let nobodys = self.common[part].best_fit(units);
        let smaller = |a: Option<_>, b: Option<_>| match (a, b) {
            (Some(a), Some(b)) => Some(if Block::units(b) < Block::units(a) { b } else { a }),
            (a, b) => a.or(b),
        };
        smaller(smaller(own, other), nobodys).map(Block::id)
    }

    /// Hands out the best fit.
    #[inline]
    pub(super) fn place(
        &mut self,
        tags: &Tags,
        stream: u32,
        units: u32,
        part: Part,
    ) -> Option<u32> {
        let id = self.best_fit(stream, units, part)?;
        let start = self.take_head(tags, id, units);
        self.hand_out(tags, start, units);
        Some(start)
    }

    #[inline]
    pub(super) fn hand_out(&mut self, tags: &Tags, start: u32, units: u32) {
        tags.set_live(start, units);
        self.out_units += u64::from(units);
        self.out_blocks += 1;
    }

    /// Takes a block back from a caller or a front, as free memory of the stream's open epoch.
    #[inline]
    pub(super) fn take_back(&mut self, tags: &Tags, stream: u32, start: u32, units: u32) {
        self.out_units -= u64::from(units);
        self.out_blocks -= 1;
        self.returns += 1;
        let owner = self.books[stream as usize].open_owner(stream);
        self.give(tags, start, units, owner);
    }

    /// The free block that starts at the unit, if the stream may use it.
    pub(super) fn usable_at(&self, tags: &Tags, unit: u32, stream: u32) -> Option<&Block> {
        let Tag::Free(id) = tags.get(unit) else { return None };
        let block = self.blocks.get(id);
        (block.start() == unit && block.owner().is_usable_by(stream)).then_some(block)
    }

    /// The free block that ends before the unit, if the stream may use it.
    pub(super) fn usable_before(&self, tags: &Tags, unit: u32, stream: u32) -> Option<&Block> {
        let Tag::Free(id) = tags.get(unit.wrapping_sub(1)) else { return None };
        let block = self.blocks.get(id);
        (block.end() == unit && block.owner().is_usable_by(stream)).then_some(block)
    }

    /// The sets that a stream may use, in one part.
    pub(super) fn usable_sets(&self, stream: u32, part: Part) -> [&FreeSet; 3] {
        let book = &self.books[stream as usize];
        [&book.sets[0][part as usize], &book.sets[1][part as usize], &self.common[part as usize]]
    }

    /// Best fit over runs: neighbours that the sets keep apart because their owners differ, but
    /// that this stream may use all the same. Looks at no more than `LOOKED_AT` blocks.
    pub(super) fn place_in_run(
        &mut self,
        tags: &Tags,
        stream: u32,
        units: u32,
        part: Part,
    ) -> Option<u32> {
        const LOOKED_AT: usize = 2048;
        let kinds = self.usable_sets(stream, part).iter().filter(|set| !set.is_empty()).count();
        if kinds < 2 {
            return None;
        }
        let mut best: Option<(u64, u32)> = None;
        let book = &self.books[stream as usize];
        let own = book.sets.iter().flat_map(|sets| sets[part as usize].from_size(1));
        for block in own.take(LOOKED_AT) {
            let mut first = block;
            while let Some(left) = self.usable_before(tags, first.start(), stream) {
                first = left;
            }
            let (mut total, mut end) = (u64::from(first.units()), first.end());
            while let Some(right) = self.usable_at(tags, end, stream) {
                total += u64::from(right.units());
                end = right.end();
            }
            if total >= u64::from(units) && best.is_none_or(|(least, _)| total < least) {
                best = Some((total, first.start()));
            }
        }
        let (_, start) = best?;
        self.take_run(tags, start, units);
        self.hand_out(tags, start, units);
        Some(start)
    }

    /// Takes units out of neighbouring free blocks, from the start of the first.
    fn take_run(&mut self, tags: &Tags, start: u32, units: u32) {
        let (mut at, end) = (start, start + units);
        while at < end {
            let Tag::Free(id) = tags.get(at) else { return };
            let take = self.blocks.get(id).units().min(end - at);
            self.take_head(tags, id, take);
            at += take;
        }
    }

    /// Free units, whoever owns them.
    pub(super) fn free_units(&self) -> u64 {
        let common: u64 = self.common.iter().map(FreeSet::units).sum();
        common + self.books.iter().map(Book::units).sum::<u64>()
    }

    /// The largest free block, whoever owns it.
    pub(super) fn largest_free_units(&self) -> u32 {
        let own = self.books.iter().flat_map(|book| book.sets.iter().flatten());
        let sets = own.chain(&self.common);
        sets.filter_map(FreeSet::largest).map(Block::units).max().unwrap_or(0)
    }
}

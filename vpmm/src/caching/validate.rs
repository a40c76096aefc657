//! A check of the books from scratch: see the invariants at the top of `books`.

#![forbid(unsafe_code)]

use super::block::{Block, NONE, State};
use super::books::Books;
use super::size::Kind;
use super::stats::{Tallies, Tally};
use crate::validate::Violation;

const PARTITION: &str = "C1 Partition";
const COALESCED: &str = "C2 Coalesced";
const SETS: &str = "C3 Sets";
const POINTERS: &str = "C4 Pointers";
const COUNTS: &str = "C5 Counts";

fn fail(invariant: &'static str, detail: String) -> Result<(), Violation> {
    Err(Violation { invariant, detail })
}

/// Counted while the segments are walked.
#[derive(Default)]
struct Count {
    tallies: Tallies,
    blocks: usize,
    free: usize,
    of_places: Vec<u32>,
}

impl Books {
    pub(super) fn validate(&self) -> Result<(), Violation> {
        let mut count = Count { of_places: vec![0; self.places.len()], ..Count::default() };
        for (start, segment) in &self.segments {
            let end = self.walk(*start, segment.head, &mut count)?;
            if end != start + segment.bytes {
                fail(PARTITION, format!("the segment at {start:#x} ends at {end:#x}"))?;
            }
            let kind = self.arena.get(segment.head).kind.get();
            count.tallies.segment.increase(kind, 1);
            count.tallies.reserved_bytes.increase(kind, segment.bytes);
        }
        for (id, leaving) in &self.leaving {
            let block = self.arena.get(*id);
            if block.state.get() != State::Leaving || block.is_split() {
                fail(PARTITION, format!("{:#x} does not leave", leaving.ptr.address()))?;
            }
            count.blocks += 1;
            count.of_places[leaving.place as usize] += 1;
            count.tallies.segment.increase(block.kind.get(), 1);
            count.tallies.reserved_bytes.increase(block.kind.get(), leaving.bytes);
        }
        self.check_sets(&count)?;
        self.check_counts(&count)
    }

    /// Walks the blocks of a segment: where they end.
    fn walk(&self, start: u64, head: u32, count: &mut Count) -> Result<u64, Violation> {
        let (mut at, mut previous, mut next) = (start, NONE, head);
        let mut was_free = false;
        let of_head = (self.arena.get(head).place.get(), self.arena.get(head).kind.get());
        while next != NONE {
            let block = self.arena.get(next);
            let linked = block.previous.get() == previous && block.address() == at;
            let alike = (block.place.get(), block.kind.get()) == of_head && block.bytes() > 0;
            if !linked || !alike {
                fail(PARTITION, format!("the block at {at:#x} is not where it should be"))?;
            }
            let free = block.state.get() == State::Free;
            if free && was_free {
                fail(COALESCED, format!("{at:#x} and the block before it are free"))?;
            }
            self.count_block(block, count)?;
            (at, previous, was_free) = (block.end(), next, free);
            next = block.next.get();
        }
        Ok(at)
    }

    fn count_block(&self, block: &Block, count: &mut Count) -> Result<(), Violation> {
        let (kind, bytes) = (block.kind.get(), block.bytes());
        let tallies = &mut count.tallies;
        count.blocks += 1;
        count.of_places[block.place.get() as usize] += 1;
        let state = block.state.get();
        match state {
            State::Allocated => {
                tallies.allocation.increase(kind, 1);
                tallies.allocated_bytes.increase(kind, bytes);
                if self.live.get(block.address()) != Some(block.id()) {
                    fail(POINTERS, format!("{:#x} is allocated and unknown", block.address()))?;
                }
            }
            State::Free => {
                count.free += 1;
                if block.is_split() {
                    tallies.inactive_split.increase(kind, 1);
                    tallies.inactive_split_bytes.increase(kind, bytes);
                }
            }
            State::Waiting if block.waits.get() > 0 => {}
            state => fail(PARTITION, format!("{:#x} is {state:?}", block.address()))?,
        }
        if matches!(state, State::Allocated | State::Waiting) {
            tallies.active.increase(kind, 1);
            tallies.active_bytes.increase(kind, bytes);
            tallies.requested_bytes.increase(kind, block.requested.get());
        }
        Ok(())
    }

    fn check_sets(&self, count: &Count) -> Result<(), Violation> {
        let mut free = 0;
        for (index, place) in self.places.iter().enumerate() {
            for kind in Kind::BOTH {
                let set = &place.sets[kind as usize];
                let own = |block: &Block| {
                    let of = (block.place.get() as usize, block.kind.get(), block.state.get());
                    of == (index, kind, State::Free)
                };
                if !set.agrees() || !set.iter().all(own) {
                    fail(SETS, format!("the set of place {index}, {kind:?}"))?;
                }
                free += set.blocks();
            }
        }
        if free != count.free {
            fail(SETS, format!("{free} blocks in sets, {} free", count.free))?;
        }
        Ok(())
    }

    fn check_counts(&self, count: &Count) -> Result<(), Violation> {
        let (mine, found) = (&self.tallies, &count.tallies);
        let pairs: [(&str, &Tally, &Tally); 9] = [
            ("allocation", &mine.allocation, &found.allocation),
            ("segment", &mine.segment, &found.segment),
            ("active", &mine.active, &found.active),
            ("inactive_split", &mine.inactive_split, &found.inactive_split),
            ("allocated_bytes", &mine.allocated_bytes, &found.allocated_bytes),
            ("reserved_bytes", &mine.reserved_bytes, &found.reserved_bytes),
            ("active_bytes", &mine.active_bytes, &found.active_bytes),
            ("inactive_split_bytes", &mine.inactive_split_bytes, &found.inactive_split_bytes),
            ("requested_bytes", &mine.requested_bytes, &found.requested_bytes),
        ];
        for (name, mine, found) in pairs {
            let current = |tally: &Tally| {
                let array = tally.array();
                (array.small_pool.current, array.large_pool.current)
            };
            if current(mine) != current(found) {
                let detail = format!("{name}: {:?}, {:?} found", current(mine), current(found));
                fail(COUNTS, detail)?;
            }
        }
        if self.arena.in_use() != count.blocks {
            fail(COUNTS, format!("{} nodes, {} blocks", self.arena.in_use(), count.blocks))?;
        }
        if self.live.len() as u64 != mine.allocation.current() {
            fail(POINTERS, format!("{} pointers are known", self.live.len()))?;
        }
        if self.held_bytes() < mine.reserved_bytes.current() {
            fail(COUNTS, format!("{} bytes held", self.held_bytes()))?;
        }
        let of_places: Vec<u32> = self.places.iter().map(|place| place.blocks).collect();
        if of_places != count.of_places {
            fail(COUNTS, format!("{of_places:?} blocks, {:?} found", count.of_places))?;
        }
        Ok(())
    }
}

//! Segments: from upstream, and on their way back.

use super::{Books, put_free, take_free};
use crate::caching::block::{Block, NONE, State};
use crate::caching::free_set::FreeSet;
use crate::caching::size::Kind;
use crate::units::DevicePtr;

/// A segment: what upstream gave in one piece.
#[derive(Clone, Copy)]
pub(in crate::caching) struct Segment {
    /// As upstream gave it.
    pub(in crate::caching) ptr: DevicePtr,
    pub(in crate::caching) bytes: u64,
    /// Its first block, whose node stays the same.
    pub(in crate::caching) head: u32,
}

/// A segment that was taken out to go back upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::caching) struct Leaving {
    id: u32,
    pub(in crate::caching) ptr: DevicePtr,
    pub(in crate::caching) bytes: u64,
    pub(in crate::caching) place: u32,
}

impl Books {
    /// Notes that so many bytes are being got from upstream; `false` where that is more than may
    /// be held.
    pub(in crate::caching) fn reserve(&mut self, bytes: u64, limit: Option<u64>) -> bool {
        let Some(held) = self.held_bytes.checked_add(bytes) else { return false };
        let within = limit.is_none_or(|limit| held <= limit);
        if within {
            self.held_bytes = held;
        }
        within
    }

    /// Upstream did not give what was reserved.
    pub(in crate::caching) fn unreserve(&mut self, bytes: u64) {
        self.held_bytes -= bytes;
    }

    pub(in crate::caching) fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    /// Takes in a segment that upstream gave, after [`reserve`](Self::reserve), and serves the
    /// request that it was got for.
    pub(in crate::caching) fn add_segment(
        &mut self,
        place: u32,
        (ptr, segment_bytes): (DevicePtr, u64),
        (bytes, requested): (u64, u64),
    ) -> (u64, u32) {
        let (kind, address) = (Kind::of(bytes), ptr.address());
        let id = self.make(place, kind, address, segment_bytes);
        let block = self.arena.get(id);
        block.previous.set(NONE);
        block.next.set(NONE);
        self.segments.insert(address, Segment { ptr, bytes: segment_bytes, head: id });
        self.tallies.segment.increase(kind, 1);
        self.tallies.reserved_bytes.increase(kind, segment_bytes);
        if segment_bytes >= self.rules.max_split_bytes {
            self.tallies.oversize_segments.increase(kind, 1);
        }
        self.tallies.num_device_alloc += 1;
        self.hand_out(id, bytes, requested)
    }

    /// Takes out every segment that is one free block.
    pub(in crate::caching) fn take_idle(&mut self) -> Vec<Leaving> {
        self.take_where(&[Kind::Large, Kind::Small], |_| true)
    }

    /// Takes out such whole free segments of these pools.
    fn take_where(&mut self, kinds: &[Kind], wanted: impl Fn(&Block) -> bool) -> Vec<Leaving> {
        let sets = self
            .places
            .iter()
            .flat_map(|place| kinds.iter().map(|kind| &place.sets[*kind as usize]));
        let blocks = sets.flat_map(FreeSet::iter).filter(|block| !block.is_split());
        let ids: Vec<u32> = blocks.filter(|block| wanted(block)).map(Block::id).collect();
        ids.into_iter().map(|id| self.take_segment(id)).collect()
    }

    fn take_segment(&mut self, id: u32) -> Leaving {
        let block = self.arena.get(id);
        take_free(&mut self.places, block);
        block.state.set(State::Leaving);
        let (address, bytes, place) = (block.address(), block.bytes(), block.place.get());
        let segment = self.segments.remove(&address);
        let ptr = segment.map_or(DevicePtr::from_address(address), |segment| segment.ptr);
        let leaving = Leaving { id, ptr, bytes, place };
        self.leaving.insert(id, leaving);
        leaving
    }

    /// Takes out segments of at least the maximum split size that the stream has free, so that a
    /// request finds room: one that is long enough, or else several, the longest first. `false`
    /// where all that there are do not suffice.
    pub(in crate::caching) fn take_oversize(
        &mut self,
        place: u32,
        bytes: u64,
    ) -> (Vec<Leaving>, bool) {
        let least = self.rules.max_split_bytes;
        if least == u64::MAX {
            return (Vec::new(), false);
        }
        let wanted = bytes.max(least);
        let set = &self.places[place as usize].sets[Kind::of(bytes) as usize];
        let mut ids: Vec<u32> = Vec::new();
        let mut sum = 0;
        let long_enough = set.best_fit(wanted).filter(|block| !block.is_split());
        if let Some(block) = long_enough {
            ids.push(block.id());
            sum = block.bytes();
        } else {
            let all: Vec<&Block> = set.iter().filter(|block| block.bytes() >= least).collect();
            for block in all.into_iter().rev().filter(|block| !block.is_split()) {
                if sum >= wanted {
                    break;
                }
                sum += block.bytes();
                ids.push(block.id());
            }
        }
        (ids.into_iter().map(|id| self.take_segment(id)).collect(), sum >= wanted)
    }

    /// Takes out whole free segments of the large pool that have been free for longer than is usual
    /// now, until so many bytes are out or none is older than that.
    pub(in crate::caching) fn take_aged(&mut self, bytes: u64) -> Vec<Leaving> {
        let now = self.searches[Kind::Large as usize];
        let age = |block: &Block| now - block.freed_at.get();
        let large = self.places.iter().map(|place| &place.sets[Kind::Large as usize]);
        let whole = large.flat_map(FreeSet::iter).filter(|block| !block.is_split());
        let mut ages: Vec<(u64, u64, u32)> =
            whole.map(|block| (age(block), block.bytes(), block.id())).collect();
        let mut taken = Vec::new();
        let mut sum = 0;
        while sum < bytes && !ages.is_empty() {
            let mean = ages.iter().map(|of| of.0 as f64).sum::<f64>() / ages.len() as f64;
            ages.retain(|(age, bytes, id)| {
                let old = *age as f64 >= mean;
                if old {
                    sum += bytes;
                    taken.push(*id);
                }
                !old
            });
        }
        taken.into_iter().map(|id| self.take_segment(id)).collect()
    }

    /// Upstream has a segment back.
    pub(in crate::caching) fn segment_left(&mut self, segment: Leaving) {
        let kind = self.arena.get(segment.id).kind.get();
        self.leaving.remove(&segment.id);
        self.held_bytes -= segment.bytes;
        self.tallies.segment.decrease(kind, 1);
        self.tallies.reserved_bytes.decrease(kind, segment.bytes);
        if segment.bytes >= self.rules.max_split_bytes {
            self.tallies.oversize_segments.decrease(kind, 1);
        }
        self.tallies.num_device_free += 1;
        self.end(segment.id);
    }

    /// Upstream did not take a segment.
    pub(in crate::caching) fn segment_stays(&mut self, segment: Leaving) {
        self.leaving.remove(&segment.id);
        let Leaving { id: head, ptr, bytes, .. } = segment;
        self.segments.insert(ptr.address(), Segment { ptr, bytes, head });
        put_free(&mut self.places, self.arena.get(segment.id));
    }
}

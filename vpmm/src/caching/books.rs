//! The books of a caching allocator: which block is where, and whose. No driver, no lock.
//!
//! - **C1 Partition.** A segment is its blocks, in order, without gap or overlap; one on its way back
//!   is one block.
//! - **C2 Coalesced.** No two free blocks are neighbours.
//! - **C3 Sets.** A free block is in the set of its place and pool, and nothing else is in any.
//! - **C4 Pointers.** The table of pointers has the allocated blocks, and no others.
//! - **C5 Counts.** What is counted is what a count from scratch finds.

use std::collections::{BTreeMap, HashMap};

use smallvec::SmallVec;

use super::block::{Block, NONE, State};
use super::free_set::FreeSet;
use super::size::{Kind, MIN_BLOCK_SIZE, SMALL_SIZE};
use super::stats::Tallies;
use super::table::Table;
use crate::arena::Arena;
use crate::device::StreamHandle;
use crate::error::{Error, Result};
use crate::units::DevicePtr;

/// What decides about splitting and fitting.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    /// `u64::MAX` where every block is split.
    pub(super) max_split_bytes: u64,
    pub(super) max_non_split_rounding_bytes: u64,
    /// Whether anybody asks for how long a block has been free.
    pub(super) ages: bool,
}

impl Rules {
    #[inline]
    fn splits(self, kind: Kind, bytes: u64, remaining: u64) -> bool {
        match kind {
            Kind::Small => remaining >= MIN_BLOCK_SIZE as u64,
            Kind::Large => bytes < self.max_split_bytes && remaining > SMALL_SIZE as u64,
        }
    }

    /// Whether the best fit is good enough: what is not split is not taken for much less.
    #[inline]
    fn fits(self, bytes: u64, found: u64) -> bool {
        if bytes < self.max_split_bytes {
            found < self.max_split_bytes
        } else {
            found - bytes < self.max_non_split_rounding_bytes
        }
    }
}

/// A stream's part of the books.
pub(super) struct Place {
    /// The stream's number.
    pub(super) stream: u64,
    pub(super) sets: [FreeSet; 2],
    /// Blocks that belong to it, in any state.
    pub(super) blocks: u32,
    /// Uses by it that allocations are noted for.
    pub(super) pins: u32,
}

/// A further stream that uses an allocation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Use {
    pub(super) place: u32,
    /// What to record on, where nobody tells of the stream's end.
    pub(super) on: StreamHandle,
}

pub(super) type Uses = SmallVec<[Use; 2]>;

/// A segment: what upstream gave in one piece.
#[derive(Clone, Copy)]
pub(super) struct Segment {
    /// As upstream gave it.
    pub(super) ptr: DevicePtr,
    pub(super) bytes: u64,
    /// Its first block, whose node stays the same.
    pub(super) head: u32,
}

/// A segment that was taken out to go back upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Leaving {
    id: u32,
    pub(super) ptr: DevicePtr,
    pub(super) bytes: u64,
    pub(super) place: u32,
}

pub(super) struct Books {
    pub(super) places: Vec<Place>,
    pub(super) by_stream: Table,
    /// The stream that was asked for last, and its place.
    last: (u64, u32),
    /// Allocated blocks by address.
    pub(super) live: Table,
    pub(super) segments: BTreeMap<u64, Segment>,
    /// Segments on their way back: the driver may give their addresses out again before it is known
    /// here that they have arrived.
    pub(super) leaving: BTreeMap<u32, Leaving>,
    /// Of blocks with `noted`.
    uses: HashMap<u32, Uses>,
    pub(super) tallies: Tallies,
    rules: Rules,
    /// Searches in each pool, while somebody asks for ages.
    searches: [u64; 2],
    /// Bytes of all segments, and of those that are being got.
    held_bytes: u64,
    /// The last allocation's number; numbers are never 0.
    tag: u32,
    /// Last, so that it outlives the sets when the books are dropped.
    pub(super) arena: Arena<Block>,
}

// SAFETY: the books own every node that their sets point to (the arena is private to this room and
// nodes are reached through the books alone), so moving the whole to another thread moves all of it.
// They are not Sync: nodes hold `Cell`s.
unsafe impl Send for Books {}

/// No stream's number.
const NO_STREAM: u64 = 0;

impl Books {
    pub(super) fn new(rules: Rules) -> Self {
        Self {
            places: Vec::new(),
            by_stream: Table::new(),
            last: (NO_STREAM, 0),
            live: Table::new(),
            segments: BTreeMap::new(),
            leaving: BTreeMap::new(),
            uses: HashMap::new(),
            tallies: Tallies::default(),
            rules,
            searches: [0; 2],
            held_bytes: 0,
            tag: 0,
            arena: Arena::new(),
        }
    }

    /// The place of a stream that has one.
    #[inline]
    pub(super) fn place_of(&mut self, stream: u64) -> Option<u32> {
        if self.last.0 != stream {
            self.last = (stream, self.by_stream.get(stream)?);
        }
        Some(self.last.1)
    }

    /// Gives a stream a place: a vacant one, or a new one.
    pub(super) fn enrol(&mut self, stream: u64, vacant: Option<u32>) -> u32 {
        let place = vacant.unwrap_or_else(|| {
            let sets = [FreeSet::new(), FreeSet::new()];
            self.places.push(Place { stream, sets, blocks: 0, pins: 0 });
            self.places.len() as u32 - 1
        });
        self.forget_stream(place);
        self.places[place as usize].stream = stream;
        self.by_stream.insert(stream, place);
        place
    }

    /// The place's stream has ended: its number means nothing any more.
    pub(super) fn forget_stream(&mut self, place: u32) {
        let stream = std::mem::replace(&mut self.places[place as usize].stream, NO_STREAM);
        if self.by_stream.get(stream) == Some(place) {
            self.by_stream.remove(stream);
        }
        self.last = (NO_STREAM, 0);
    }

    /// Serves a rounded request from what the stream has free: its address, and its number.
    #[inline]
    pub(super) fn allocate(
        &mut self,
        place: u32,
        bytes: u64,
        requested: u64,
    ) -> Option<(u64, u32)> {
        let kind = Kind::of(bytes);
        if self.rules.ages {
            self.searches[kind as usize] += 1;
        }
        let set = &mut self.places[place as usize].sets[kind as usize];
        let id = set.best_fit(bytes).filter(|found| self.rules.fits(bytes, found.bytes()))?.id();
        self.take_free(id);
        Some(self.hand_out(id, bytes, requested))
    }

    /// Takes a block out of its set.
    #[inline]
    fn take_free(&mut self, id: u32) {
        let block = self.arena.get(id);
        debug_assert_eq!(block.state.get(), State::Free);
        let set = &mut self.places[block.place.get() as usize].sets[block.kind.get() as usize];
        // SAFETY: the block is free, and a free block is in the set of its place and pool (C3).
        unsafe { set.remove(block) };
    }

    /// Puts a block that becomes free into its set.
    #[inline]
    fn put_freed(&mut self, id: u32) {
        let block = self.arena.get(id);
        if self.rules.ages {
            block.freed_at.set(self.searches[block.kind.get() as usize]);
        }
        self.put_free(id);
    }

    /// Puts a block that is in no set into its own.
    #[inline]
    fn put_free(&mut self, id: u32) {
        let block = self.arena.get(id);
        debug_assert_ne!(block.state.get(), State::Free);
        block.state.set(State::Free);
        let kind = block.kind.get() as usize;
        // SAFETY: the arena keeps the node in place as long as the books live, which drop the sets
        // before it; its bounds are changed only while it is in no set; it was not free, so it is in
        // none now (C3).
        unsafe { self.places[block.place.get() as usize].sets[kind].insert(block) };
    }

    /// A node for addresses of a place. The rest of its fields is the caller's to set.
    #[inline]
    fn make(&mut self, place: u32, kind: Kind, address: u64, bytes: u64) -> u32 {
        let id = self.arena.take(Block::vacant);
        let block = self.arena.get(id);
        block.set_bounds(address, bytes);
        block.place.set(place);
        block.kind.set(kind);
        self.places[place as usize].blocks += 1;
        id
    }

    /// Ends a node that is in no set.
    #[inline]
    fn end(&mut self, id: u32) {
        let block = self.arena.get(id);
        block.state.set(State::Vacant);
        self.places[block.place.get() as usize].blocks -= 1;
        self.arena.give_back(id);
    }

    /// Gives a block that is in no set to a caller, what it has too much split off.
    #[inline]
    fn hand_out(&mut self, id: u32, bytes: u64, requested: u64) -> (u64, u32) {
        let block = self.arena.get(id);
        let (kind, place) = (block.kind.get(), block.place.get());
        let (whole, address) = (block.bytes(), block.address());
        let was_split = block.is_split();
        if self.rules.splits(kind, bytes, whole - bytes) {
            let rest = self.make(place, kind, address + bytes, whole - bytes);
            let (block, rest) = (self.arena.get(id), self.arena.get(rest));
            let next = block.next.get();
            rest.previous.set(id);
            rest.next.set(next);
            block.next.set(rest.id());
            block.set_bounds(address, bytes);
            if next != NONE {
                self.arena.get(next).previous.set(rest.id());
            }
            self.put_freed(rest.id());
            if was_split {
                self.tallies.inactive_split_bytes.decrease(kind, bytes);
            } else {
                self.tallies.inactive_split_bytes.increase(kind, whole - bytes);
                self.tallies.inactive_split.increase(kind, 1);
            }
        } else if was_split {
            self.tallies.inactive_split_bytes.decrease(kind, whole);
            self.tallies.inactive_split.decrease(kind, 1);
        }
        let block = self.arena.get(id);
        self.tag = if self.tag == u32::MAX { 1 } else { self.tag + 1 };
        block.tag.set(self.tag);
        block.state.set(State::Allocated);
        block.requested.set(requested);
        self.live.insert(address, id);
        let bytes = block.bytes();
        self.tallies.allocation.increase(kind, 1);
        self.tallies.allocated_bytes.increase(kind, bytes);
        self.tallies.active.increase(kind, 1);
        self.tallies.active_bytes.increase(kind, bytes);
        self.tallies.requested_bytes.increase(kind, requested);
        if bytes >= self.rules.max_split_bytes {
            self.tallies.oversize_allocations.increase(kind, 1);
        }
        (address, self.tag)
    }

    /// Notes that so many bytes are being got from upstream; `false` where that is more than may
    /// be held.
    pub(super) fn reserve(&mut self, bytes: u64, limit: Option<u64>) -> bool {
        let Some(held) = self.held_bytes.checked_add(bytes) else { return false };
        let within = limit.is_none_or(|limit| held <= limit);
        if within {
            self.held_bytes = held;
        }
        within
    }

    /// Upstream did not give what was reserved.
    pub(super) fn unreserve(&mut self, bytes: u64) {
        self.held_bytes -= bytes;
    }

    pub(super) fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    /// Takes in a segment that upstream gave, after [`reserve`](Self::reserve), and serves the
    /// request that it was got for.
    pub(super) fn add_segment(
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

    /// The allocated block of a pointer.
    #[inline]
    pub(super) fn find(&self, ptr: DevicePtr) -> Result<&Block> {
        if let Some(id) = self.live.get(ptr.address()) {
            let block = self.arena.get(id);
            if ptr.tag() == 0 || ptr.tag() == block.tag.get() {
                return Ok(block);
            }
        }
        Err(self.not_live(ptr))
    }

    /// What is wrong with a pointer that is no allocation's.
    #[cold]
    fn not_live(&self, ptr: DevicePtr) -> Error {
        let address = ptr.address();
        let within = self.segments.range(..=address).next_back();
        let Some((_, segment)) = within.filter(|(start, of)| address - *start < of.bytes) else {
            return Error::ForeignPointer { address };
        };
        let mut block = self.arena.get(segment.head);
        while block.end() <= address && block.next.get() != NONE {
            block = self.arena.get(block.next.get());
        }
        let (allocated, start) = (block.state.get() == State::Allocated, block.address());
        match (allocated, start == address) {
            (true, true) => Error::StalePointer { address },
            (true, false) if ptr.tag() == 0 => Error::InteriorPointer { address, start },
            (true, false) => Error::StalePointer { address },
            (false, _) => Error::DoubleFree { address },
        }
    }

    /// Notes a further stream's use of an allocation; none of its own.
    pub(super) fn note_use(&mut self, ptr: DevicePtr, of: Use) -> Result<()> {
        let block = self.find(ptr)?;
        if block.place.get() == of.place {
            return Ok(());
        }
        block.noted.set(true);
        let uses = self.uses.entry(block.id()).or_default();
        match uses.iter_mut().find(|known| known.place == of.place) {
            // The handle that came last is the one that is alive.
            Some(known) => *known = of,
            None => {
                uses.push(of);
                self.places[of.place as usize].pins += 1;
            }
        }
        Ok(())
    }

    /// The further streams that use an allocation, with its number; none where it can be freed at
    /// once, which is then done.
    #[inline]
    pub(super) fn free_unless_noted(&mut self, ptr: DevicePtr) -> Result<Option<(Uses, u32)>> {
        let block = self.find(ptr)?;
        if block.noted.get() {
            let uses = self.uses.get(&block.id()).cloned().unwrap_or_default();
            return Ok(Some((uses, block.tag.get())));
        }
        let id = block.id();
        self.leave_caller(id);
        self.become_free(id);
        Ok(None)
    }

    /// Takes an allocation with further uses back from its caller: its block, which waits for so
    /// many streams. Where that is none it is free already.
    pub(super) fn free_noted(&mut self, ptr: DevicePtr, waits: u32) -> Result<u32> {
        let block = self.find(ptr)?;
        let id = block.id();
        block.noted.set(false);
        block.waits.set(waits);
        for of in self.uses.remove(&id).unwrap_or_default() {
            self.places[of.place as usize].pins -= 1;
        }
        self.leave_caller(id);
        if waits == 0 {
            self.become_free(id);
        } else {
            self.arena.get(id).state.set(State::Waiting);
        }
        Ok(id)
    }

    /// One of the streams that a block waits for has come past its free.
    pub(super) fn wait_is_over(&mut self, id: u32) {
        let block = self.arena.get(id);
        debug_assert_eq!(block.state.get(), State::Waiting);
        let waits = block.waits.get() - 1;
        block.waits.set(waits);
        if waits == 0 {
            self.become_free(id);
        }
    }

    #[inline]
    fn leave_caller(&mut self, id: u32) {
        let block = self.arena.get(id);
        let (kind, bytes) = (block.kind.get(), block.bytes());
        self.live.remove(block.address());
        self.tallies.allocation.decrease(kind, 1);
        self.tallies.allocated_bytes.decrease(kind, bytes);
        if bytes >= self.rules.max_split_bytes {
            self.tallies.oversize_allocations.decrease(kind, 1);
        }
    }

    /// Makes a block that is in no set free, and one with its free neighbours.
    #[inline]
    fn become_free(&mut self, id: u32) {
        let block = self.arena.get(id);
        let (kind, bytes) = (block.kind.get(), block.bytes());
        self.tallies.active.decrease(kind, 1);
        self.tallies.active_bytes.decrease(kind, bytes);
        self.tallies.requested_bytes.decrease(kind, block.requested.get());
        let (mut blocks, mut split_bytes) = (0, 0);
        let mut kept = id;
        let previous = block.previous.get();
        let next = block.next.get();
        if self.is_free(previous) {
            split_bytes -= self.arena.get(previous).bytes() as i64;
            blocks -= 1;
            self.take_free(previous);
            self.absorb_next(previous);
            kept = previous;
        }
        if self.is_free(next) {
            split_bytes -= self.arena.get(next).bytes() as i64;
            blocks -= 1;
            self.take_free(next);
            self.absorb_next(kept);
        }
        let block = self.arena.get(kept);
        if block.is_split() {
            split_bytes += block.bytes() as i64;
            blocks += 1;
        }
        // Taken out of its set above, where it was in one.
        block.state.set(State::Vacant);
        self.put_freed(kept);
        self.tallies.inactive_split.change(kind, blocks);
        self.tallies.inactive_split_bytes.change(kind, split_bytes);
    }

    #[inline]
    fn is_free(&self, id: u32) -> bool {
        id != NONE && self.arena.get(id).state.get() == State::Free
    }

    /// Makes a block one with its right neighbour, whose node ends. Neither is in a set.
    #[inline]
    fn absorb_next(&mut self, id: u32) {
        let block = self.arena.get(id);
        let absorbed = self.arena.get(block.next.get());
        let next = absorbed.next.get();
        block.set_bounds(block.address(), block.bytes() + absorbed.bytes());
        block.next.set(next);
        if next != NONE {
            self.arena.get(next).previous.set(id);
        }
        self.end(absorbed.id());
    }

    /// Takes out every segment that is one free block.
    pub(super) fn take_idle(&mut self) -> Vec<Leaving> {
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
        self.take_free(id);
        let block = self.arena.get(id);
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
    pub(super) fn take_oversize(&mut self, place: u32, bytes: u64) -> (Vec<Leaving>, bool) {
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
    pub(super) fn take_aged(&mut self, bytes: u64) -> Vec<Leaving> {
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
    pub(super) fn segment_left(&mut self, segment: Leaving) {
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
    pub(super) fn segment_stays(&mut self, segment: Leaving) {
        self.leaving.remove(&segment.id);
        let Leaving { id: head, ptr, bytes, .. } = segment;
        self.segments.insert(ptr.address(), Segment { ptr, bytes, head });
        self.put_free(segment.id);
    }

    /// Free blocks, their bytes, and those of the longest.
    pub(super) fn free(&self) -> (usize, u64, u64) {
        let sets = || self.places.iter().flat_map(|place| &place.sets);
        let sizes = || sets().flat_map(FreeSet::iter).map(Block::bytes);
        (sets().map(FreeSet::blocks).sum(), sizes().sum(), sizes().max().unwrap_or(0))
    }

    /// Host memory that the books take.
    pub(super) fn metadata_bytes(&self) -> usize {
        let sets = self.places.iter().flat_map(|place| &place.sets);
        self.arena.capacity() * size_of::<Block>()
            + self.live.bytes()
            + self.by_stream.bytes()
            + self.places.capacity() * size_of::<Place>()
            + sets.map(FreeSet::heap_bytes).sum::<usize>()
            + self.uses.capacity() * (size_of::<u32>() + size_of::<Uses>())
            + self.segments.len() * (size_of::<u64>() + size_of::<Segment>())
    }
}

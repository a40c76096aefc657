//! The books of a caching allocator: which block is where, and whose. No driver, no lock.
//!
//! - **C1 Partition.** A segment is its blocks, in order, without gap or overlap; one on its way back
//!   is one block.
//! - **C2 Coalesced.** No two free blocks are neighbours.
//! - **C3 Sets.** A free block is in the set of its place and pool, and nothing else is in any.
//! - **C4 Pointers.** The table of pointers has the allocated blocks, and no others.
//! - **C5 Counts.** What is counted is what a count from scratch finds.

mod ids;
mod segments;
mod waiting;

pub(super) use segments::{Leaving, Segment};
pub(super) use waiting::{Open, Since};

use std::collections::{BTreeMap, HashMap};

use ids::Ids;
use smallvec::SmallVec;

use super::block::{Block, NONE, State};
use super::free_set::FreeSet;
use super::size::{Kind, MIN_BLOCK_SIZE, SMALL_SIZE};
use super::stats::Tallies;
use super::table::{Found, Table};
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
    /// Freed blocks that it may still use, without an event yet.
    pub(super) open: Open,
}

/// What a free has done.
#[derive(Clone, Copy, Debug)]
pub(super) enum Freed {
    /// All. Where a place is named, so much waits for its stream that an event is due.
    Done { due: Option<u32> },
    /// Nothing yet: a further stream that uses the allocation of this number needs an event at once.
    Noted(u32),
}

/// A further stream that uses an allocation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Use {
    pub(super) place: u32,
    /// What to record on, where nobody tells of the stream's end.
    pub(super) on: StreamHandle,
}

pub(super) type Uses = SmallVec<[Use; 2]>;

/// An allocation that is noted for more is looked at for streams that are over, with each that comes.
const FEW_USES: usize = 8;

/// A note that was made, for who has to undo it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Noted {
    block: u32,
    tag: u32,
    place: u32,
    /// What was noted of the stream before.
    former: Option<Use>,
    /// The allocation is noted for so many streams now, one more than before, that some may be over.
    pub(super) is_one_of_many: bool,
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
    uses: HashMap<u32, Uses, Ids>,
    pub(super) tallies: Tallies,
    rules: Rules,
    /// Blocks that wait for a stream without an event, counted once for each stream.
    open_waits: usize,
    /// Counts waits: the time, as far as marks are concerned.
    waits: u64,
    /// Searches in each pool, while somebody asks for ages.
    searches: [u64; 2],
    /// Bytes of all segments, and of those that are being got.
    held_bytes: u64,
    /// The last allocation's number; numbers are never 0.
    tag: u32,
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
            uses: HashMap::default(),
            tallies: Tallies::default(),
            open_waits: 0,
            waits: 0,
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

    /// Gives a stream a place: a vacant one, or a new one. `is_lazy`: its end is told, and events can be
    /// recorded on it until then.
    pub(super) fn enrol(&mut self, stream: u64, vacant: Option<u32>, is_lazy: bool) -> u32 {
        let place = vacant.unwrap_or_else(|| {
            let sets = [FreeSet::new(), FreeSet::new()];
            self.places.push(Place { stream, sets, blocks: 0, pins: 0, open: Open::default() });
            self.places.len() as u32 - 1
        });
        self.forget_stream(place);
        self.places[place as usize].stream = stream;
        self.places[place as usize].open.is_lazy = is_lazy;
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
        take_free(&mut self.places, self.arena.get(id));
        Some(self.hand_out(id, bytes, requested))
    }

    /// A node for addresses of a place. The rest of its fields is the caller's to set.
    #[inline(always)]
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

    /// How many searches there were, for a block that becomes free now.
    #[inline]
    fn now(&self, kind: Kind) -> u64 {
        self.searches[kind as usize]
    }

    /// Gives a block that is in no set to a caller, what it has too much split off.
    #[inline]
    fn hand_out(&mut self, id: u32, bytes: u64, requested: u64) -> (u64, u32) {
        let block = self.arena.get(id);
        let (kind, whole, address) = (block.kind.get(), block.bytes(), block.address());
        let was_split = block.is_split();
        let mut given = whole;
        if self.rules.splits(kind, bytes, whole - bytes) {
            let rest = self.make(block.place.get(), kind, address + bytes, whole - bytes);
            let (block, rest) = (self.arena.get(id), self.arena.get(rest));
            let next = block.next.get();
            rest.previous.set(id);
            rest.next.set(next);
            block.next.set(rest.id());
            block.set_bounds(address, bytes);
            if next != NONE {
                self.arena.get(next).previous.set(rest.id());
            }
            rest.freed_at.set(self.now(kind));
            put_free(&mut self.places, rest);
            if was_split {
                self.tallies.inactive_split_bytes.decrease(kind, bytes);
            } else {
                self.tallies.inactive_split_bytes.increase(kind, whole - bytes);
                self.tallies.inactive_split.increase(kind, 1);
            }
            given = bytes;
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
        self.tallies.allocation.increase(kind, 1);
        self.tallies.allocated_bytes.increase(kind, given);
        self.tallies.active.increase(kind, 1);
        self.tallies.active_bytes.increase(kind, given);
        self.tallies.requested_bytes.increase(kind, requested);
        if given >= self.rules.max_split_bytes {
            self.tallies.oversize_allocations.increase(kind, 1);
        }
        (address, self.tag)
    }

    /// The allocated block of a pointer.
    #[inline]
    pub(super) fn find(&self, ptr: DevicePtr) -> Result<&Block> {
        self.look_up(ptr).map(|(_, block)| block)
    }

    #[inline]
    fn look_up(&self, ptr: DevicePtr) -> Result<(Found, &Block)> {
        if let Some(found) = self.live.entry(ptr.address()) {
            let block = self.arena.get(found.node);
            if ptr.tag() == 0 || ptr.tag() == block.tag.get() {
                return Ok((found, block));
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
    pub(super) fn note_use(&mut self, ptr: DevicePtr, of: Use) -> Result<Option<Noted>> {
        let block = self.find(ptr)?;
        if block.place.get() == of.place {
            return Ok(None);
        }
        let (id, tag) = (block.id(), block.tag.get());
        block.noted.set(true);
        let uses = self.uses.entry(id).or_default();
        let former = match uses.iter_mut().find(|known| known.place == of.place) {
            // The handle that came last is the one that is alive.
            Some(known) => Some(std::mem::replace(known, of)),
            None => {
                uses.push(of);
                self.places[of.place as usize].pins += 1;
                None
            }
        };
        let is_one_of_many = former.is_none() && uses.len() > FEW_USES;
        Ok(Some(Noted { block: id, tag, place: of.place, former, is_one_of_many }))
    }

    /// Takes out the uses of streams that are over, unless the allocation has been freed since the note: nothing has to
    /// wait for those.
    pub(super) fn forget_users_gone(&mut self, noted: &Noted, is_over: impl Fn(u32) -> bool) {
        let block = self.arena.get(noted.block);
        let is_it = block.state.get() == State::Allocated && block.tag.get() == noted.tag;
        let Some(uses) = self.uses.get_mut(&noted.block).filter(|_| is_it) else { return };
        uses.retain(|of| {
            let stays = of.place == noted.place || !is_over(of.place);
            self.places[of.place as usize].pins -= u32::from(!stays);
            stays
        });
    }

    /// Undoes a note, unless the allocation has been freed since.
    pub(super) fn forget_use(&mut self, noted: Noted) {
        let block = self.arena.get(noted.block);
        let is_it = block.state.get() == State::Allocated && block.tag.get() == noted.tag;
        let Some(uses) = self.uses.get_mut(&noted.block).filter(|_| is_it) else { return };
        let Some(at) = uses.iter().position(|of| of.place == noted.place) else { return };
        match noted.former {
            Some(former) => uses[at] = former,
            None => {
                uses.swap_remove(at);
                self.places[noted.place as usize].pins -= 1;
            }
        }
        if uses.is_empty() {
            block.noted.set(false);
            self.uses.remove(&noted.block);
        }
    }

    /// Frees an allocation, unless a further stream that it is noted for needs an event at once.
    #[inline]
    pub(super) fn free(&mut self, ptr: DevicePtr) -> Result<Freed> {
        let (found, block) = self.look_up(ptr)?;
        if block.noted.get() {
            return Ok(self.free_with_uses(found));
        }
        self.leave_caller(found);
        self.become_free(found.node);
        Ok(Freed::Done { due: None })
    }

    /// Takes an allocation with further uses back from its caller: its block, which waits for so
    /// many streams. Where that is none it is free already.
    pub(super) fn free_noted(&mut self, ptr: DevicePtr, waits: u32) -> Result<u32> {
        let (found, _) = self.look_up(ptr)?;
        for of in self.uses.remove(&found.node).unwrap_or_default() {
            self.places[of.place as usize].pins -= 1;
        }
        self.leave_for(found, waits);
        Ok(found.node)
    }

    /// Takes an allocation back from its caller: a block that waits for so many streams.
    #[inline]
    fn leave_for(&mut self, found: Found, waits: u32) {
        self.leave_caller(found);
        let block = self.arena.get(found.node);
        block.noted.set(false);
        block.waits.set(waits);
        if waits == 0 {
            self.become_free(found.node);
        } else {
            block.state.set(State::Waiting);
        }
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

    #[inline(always)]
    fn leave_caller(&mut self, found: Found) {
        self.live.remove_entry(found);
        let block = self.arena.get(found.node);
        let (kind, bytes) = (block.kind.get(), block.bytes());
        self.tallies.allocation.decrease(kind, 1);
        self.tallies.allocated_bytes.decrease(kind, bytes);
        if bytes >= self.rules.max_split_bytes {
            self.tallies.oversize_allocations.decrease(kind, 1);
        }
    }

    /// Makes a block that is in no set free, and one with its free neighbours.
    #[inline]
    fn become_free(&mut self, id: u32) {
        let arena = &self.arena;
        let block = arena.get(id);
        let kind = block.kind.get();
        self.tallies.active.decrease(kind, 1);
        self.tallies.active_bytes.decrease(kind, block.bytes());
        self.tallies.requested_bytes.decrease(kind, block.requested.get());
        let (mut blocks, mut split_bytes) = (0, 0);
        let (mut kept, mut ended) = (block, [NONE; 2]);
        // Both are looked at before either is one with the block.
        let (previous, next) = (free(arena, block.previous.get()), free(arena, block.next.get()));
        if let Some(previous) = previous {
            (blocks, split_bytes) = (-1, -(previous.bytes() as i64));
            take_free(&mut self.places, previous);
            absorb(arena, previous, block);
            (kept, ended[0]) = (previous, id);
        }
        if let Some(next) = next {
            (blocks, split_bytes) = (blocks - 1, split_bytes - next.bytes() as i64);
            take_free(&mut self.places, next);
            absorb(arena, kept, next);
            ended[1] = next.id();
        }
        if kept.is_split() {
            (blocks, split_bytes) = (blocks + 1, split_bytes + kept.bytes() as i64);
        }
        kept.freed_at.set(self.now(kind));
        put_free(&mut self.places, kept);
        for id in ended {
            if id != NONE {
                self.end(id);
            }
        }
        self.tallies.inactive_split.change(kind, blocks);
        self.tallies.inactive_split_bytes.change(kind, split_bytes);
    }

    /// Free blocks, their bytes, and those of the longest.
    pub(super) fn cached(&self) -> (usize, u64, u64) {
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
            + self.places.iter().map(|place| place.open.heap_bytes()).sum::<usize>()
            + self.uses.capacity() * (size_of::<u32>() + size_of::<Uses>())
            + self.segments.len() * (size_of::<u64>() + size_of::<Segment>())
    }
}

/// Takes a free block out of its set; it is nothing in particular then.
#[inline(always)]
fn take_free(places: &mut [Place], block: &Block) {
    debug_assert_eq!(block.state.get(), State::Free);
    block.state.set(State::Vacant);
    let set = &mut places[block.place.get() as usize].sets[block.kind.get() as usize];
    // SAFETY: the block was free, and a free block is in the set of its place and pool (C3).
    unsafe { set.remove(block) };
}

/// Puts a block of the books' arena that is in no set into its own.
#[inline(always)]
fn put_free(places: &mut [Place], block: &Block) {
    debug_assert_ne!(block.state.get(), State::Free);
    block.state.set(State::Free);
    let set = &mut places[block.place.get() as usize].sets[block.kind.get() as usize];
    // SAFETY: the arena keeps the node in place as long as the books live, and no set looks at its
    // nodes when it is dropped; its bounds are changed only while it is in no set; it was not free, so
    // it is in none now (C3).
    unsafe { set.insert(block) };
}

/// A neighbour, if it is free.
#[inline(always)]
fn free(arena: &Arena<Block>, id: u32) -> Option<&Block> {
    let block = (id != NONE).then(|| arena.get(id))?;
    (block.state.get() == State::Free).then_some(block)
}

/// Gives a block the addresses of its right neighbour, whose node is to be ended. Neither is in a set.
#[inline(always)]
fn absorb(arena: &Arena<Block>, block: &Block, right: &Block) {
    let next = right.next.get();
    block.set_bounds(block.address(), block.bytes() + right.bytes());
    block.next.set(next);
    if next != NONE {
        arena.get(next).previous.set(block.id());
    }
}

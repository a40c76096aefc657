//! What stands where in the pieces that a pool has from upstream.
//!
//! ```text
//! chunk  [live 256][free, lane 2, epoch 7][live 1024][free, lane 0]     nodes, linked by address
//! ```
//!
//! What was freed last stands aside as it is, by lane and size, for the next request of that size: joined with
//! nothing, in no set, and bounded. [`Blocks::settle`] makes it free blocks like others; who looks at what other
//! lanes have free does that first.
//!
//! A chunk is what was got from upstream at once; blocks never reach from one into another. A free block
//! belongs to a lane (a stream), or to lane 0, which is nobody: then every stream may have it. Its epoch
//! says how late its lane may still use it. Neighbours of one lane are one block.

#![forbid(unsafe_code)]

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

use super::sizes::{Sized, Sizes, UNIT};
use crate::error::{Error, Result};
use crate::units::DevicePtr;

/// The lane of free memory that is nobody's.
pub(super) const NOBODY: u32 = 0;
/// In the place of a lane: the block is allocated.
const LIVE: u32 = u32::MAX;
/// In the place of a node: there is none.
const NONE: u32 = u32::MAX;
/// In the place of a lane: the block was freed, and further streams may still be using it.
const KEPT: u32 = u32::MAX - 1;
/// Added to a lane: the block is free, and stands aside.
const ASIDE: u32 = 1 << 31;

/// Stacks of blocks that stand aside, for each lane: one size each.
const STACKS: usize = 64;
/// Blocks in each stack.
const DEPTH: usize = 8;
/// What a lane may have aside, in bytes; or this fraction of all chunks; or one block.
const ASIDE_BYTES: u64 = 8 << 20;
const ASIDE_OF_ALL: u64 = 64;

/// Freed blocks of one lane and size, the latest last.
#[derive(Clone, Copy, Debug)]
struct Stack {
    bytes: u64,
    count: u8,
    nodes: [u32; DEPTH],
}

/// What stands aside of one lane.
#[derive(Debug)]
struct Front {
    stacks: [Stack; STACKS],
    bytes: u64,
}

impl Front {
    fn new() -> Box<Self> {
        let empty = Stack { bytes: 0, count: 0, nodes: [NONE; DEPTH] };
        Box::new(Self { stacks: [empty; STACKS], bytes: 0 })
    }

    #[inline]
    fn stack(&mut self, bytes: u64) -> &mut Stack {
        let hash = (bytes / UNIT).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 58;
        &mut self.stacks[hash as usize % STACKS]
    }
}

#[derive(Clone, Copy, Debug)]
struct Node {
    start: u64,
    bytes: u64,
    /// The neighbours in the chunk.
    previous: u32,
    next: u32,
    lane: u32,
    /// Of a free block: up to which of its lane's epochs it was in use.
    epoch: u64,
    /// Of a live block: what was asked for.
    asked: u64,
}

/// What was got from upstream at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    pub(super) ptr: DevicePtr,
    pub(super) bytes: u64,
    first: u32,
}

/// Addresses are far from random, but their low bits are zero: the middle of a product is well mixed.
#[derive(Default)]
pub(super) struct AddressHasher(u64);

impl Hasher for AddressHasher {
    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    #[inline]
    fn write_u64(&mut self, number: u64) {
        let product = (self.0 ^ number).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = product ^ product >> 32;
    }
}

pub(super) type ByAddress<T> = HashMap<u64, T, BuildHasherDefault<AddressHasher>>;

/// All chunks of a pool and the blocks in them.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    nodes: Vec<Node>,
    vacant: Vec<u32>,
    /// Every block that is live or stands aside, by its address.
    known: ByAddress<u32>,
    live_bytes: u64,
    chunks: BTreeMap<u64, Chunk>,
    chunk_bytes: u64,
    live_count: usize,
    /// The free blocks of each lane.
    free: Vec<Sizes>,
    /// What stands aside of each lane.
    fronts: Vec<Option<Box<Front>>>,
}

impl Blocks {
    /// Bytes of all chunks.
    pub(super) fn held(&self) -> u64 {
        self.chunk_bytes
    }

    /// Bytes of all live blocks, rounded as they are.
    pub(super) fn live_bytes(&self) -> u64 {
        self.live_bytes
    }

    pub(super) fn live_count(&self) -> usize {
        self.live_count
    }

    pub(super) fn free_bytes(&self) -> u64 {
        self.chunk_bytes - self.live_bytes
    }

    /// The longest free block of any lane, in bytes.
    pub(super) fn longest_free(&self) -> u64 {
        self.free.iter().map(Sizes::longest).max().unwrap_or(0)
    }

    /// Whether anything of a lane is free, aside or not.
    pub(super) fn has_free(&self, lane: u32) -> bool {
        let front = self.fronts.get(lane as usize).and_then(Option::as_ref);
        let free = self.free.get(lane as usize);
        free.is_some_and(|free| !free.is_empty()) || front.is_some_and(|front| front.bytes > 0)
    }

    /// A block of just this size that stands aside for a lane is handed out again.
    #[inline]
    pub(super) fn take_aside(&mut self, lane: u32, bytes: u64, asked: u64) -> Option<u64> {
        let front = self.fronts.get_mut(lane as usize)?.as_mut()?;
        let stack = front.stack(bytes);
        if stack.bytes != bytes || stack.count == 0 {
            return None;
        }
        stack.count -= 1;
        let id = stack.nodes[stack.count as usize % DEPTH];
        front.bytes -= bytes;
        let node = &mut self.nodes[id as usize];
        (node.lane, node.asked) = (LIVE, asked);
        self.live_bytes += bytes;
        self.live_count += 1;
        Some(node.start)
    }

    /// Puts a freed block aside, if there is room.
    #[inline]
    fn put_aside(&mut self, id: u32, lane: u32, bytes: u64) -> bool {
        let most = ASIDE_BYTES.max(self.chunk_bytes / ASIDE_OF_ALL);
        let Some(Some(front)) = self.fronts.get_mut(lane as usize) else {
            return self.open_front(id, lane, bytes);
        };
        if front.bytes != 0 && front.bytes + bytes > most {
            return false;
        }
        let stack = front.stack(bytes);
        if stack.bytes != bytes {
            if stack.count != 0 {
                return self.replace_stack(id, lane, bytes);
            }
            stack.bytes = bytes;
        }
        if stack.count as usize == DEPTH {
            return false;
        }
        stack.nodes[stack.count as usize] = id;
        stack.count += 1;
        front.bytes += bytes;
        self.nodes[id as usize].lane = lane | ASIDE;
        true
    }

    #[cold]
    fn open_front(&mut self, id: u32, lane: u32, bytes: u64) -> bool {
        let lane_index = lane as usize;
        if lane_index >= self.fronts.len() {
            self.fronts.resize_with(lane_index + 1, || None);
        }
        self.fronts[lane_index] = Some(Front::new());
        self.put_aside(id, lane, bytes)
    }

    /// The stack has blocks of another size, which settle.
    #[cold]
    fn replace_stack(&mut self, id: u32, lane: u32, bytes: u64) -> bool {
        let Some(Some(front)) = self.fronts.get_mut(lane as usize) else { return false };
        let stack = front.stack(bytes);
        let former = *stack;
        (stack.bytes, stack.count) = (bytes, 0);
        front.bytes -= former.bytes * u64::from(former.count);
        former.nodes[..former.count as usize].iter().for_each(|former| self.settle_one(*former));
        self.put_aside(id, lane, bytes)
    }

    fn settle_one(&mut self, id: u32) {
        let node = &mut self.nodes[id as usize];
        node.lane &= !ASIDE;
        let start = node.start;
        self.known.remove(&start);
        self.enter(id);
    }

    /// What stands aside of a lane becomes free blocks like others.
    pub(super) fn settle(&mut self, lane: u32) {
        let Some(Some(front)) = self.fronts.get_mut(lane as usize) else { return };
        if front.bytes == 0 {
            return;
        }
        front.bytes = 0;
        let mut all: Vec<u32> = Vec::new();
        for stack in &mut front.stacks {
            all.extend(&stack.nodes[..stack.count as usize]);
            stack.count = 0;
        }
        all.into_iter().for_each(|id| self.settle_one(id));
    }

    /// What stands aside of any lane becomes free blocks like others.
    pub(super) fn settle_all(&mut self) {
        (0..self.fronts.len() as u32).for_each(|lane| self.settle(lane));
    }

    /// The smallest sufficient block of a lane.
    #[inline]
    pub(super) fn best_fit(&self, lane: u32, bytes: u64) -> Option<Sized> {
        self.free.get(lane as usize)?.best_fit(bytes)
    }

    /// The epoch of a free block.
    pub(super) fn epoch(&self, block: Sized) -> u64 {
        self.nodes[block.node as usize].epoch
    }

    fn make(&mut self, node: Node) -> u32 {
        match self.vacant.pop() {
            Some(id) => {
                self.nodes[id as usize] = node;
                id
            }
            None => {
                self.nodes.push(node);
                (self.nodes.len() - 1) as u32
            }
        }
    }

    fn entry(&self, id: u32) -> Sized {
        let node = &self.nodes[id as usize];
        Sized { bytes: node.bytes, start: node.start, node: id }
    }

    fn free_set(&mut self, lane: u32) -> &mut Sizes {
        let lane = lane as usize;
        if lane >= self.free.len() {
            self.free.resize_with(lane + 1, Sizes::default);
        }
        &mut self.free[lane]
    }

    /// A new chunk, free.
    pub(super) fn add_chunk(&mut self, ptr: DevicePtr, bytes: u64, lane: u32, epoch: u64) {
        let start = ptr.address();
        let (previous, next) = (NONE, NONE);
        let first = self.make(Node { start, bytes, previous, next, lane, epoch, asked: 0 });
        self.chunks.insert(start, Chunk { ptr, bytes, first });
        self.chunk_bytes += bytes;
        let entry = self.entry(first);
        self.free_set(lane).insert(entry);
    }

    /// Hands out the first bytes of a free block; the rest stays as it is.
    #[inline]
    pub(super) fn take(&mut self, block: Sized, bytes: u64, asked: u64) -> u64 {
        let id = block.node;
        let node = self.nodes[id as usize];
        self.free_set(node.lane).remove(block);
        if node.bytes > bytes {
            let rest = self.make(Node {
                start: node.start + bytes,
                bytes: node.bytes - bytes,
                previous: id,
                next: node.next,
                ..node
            });
            if node.next != NONE {
                self.nodes[node.next as usize].previous = rest;
            }
            self.nodes[id as usize].next = rest;
            let entry = self.entry(rest);
            self.free_set(node.lane).insert(entry);
        }
        let taken = &mut self.nodes[id as usize];
        (taken.bytes, taken.lane, taken.asked) = (bytes, LIVE, asked);
        self.known.insert(node.start, id);
        self.live_bytes += bytes;
        self.live_count += 1;
        node.start
    }

    /// The same as [`find`](Self::find), without the reason where there is none.
    #[inline]
    pub(super) fn find_live(&self, address: u64, asked: u64) -> Option<u32> {
        let id = *self.known.get(&address)?;
        let node = &self.nodes[id as usize];
        (node.lane == LIVE && node.asked == asked).then_some(id)
    }

    /// The live block that begins at an address and was asked for with this size.
    #[inline]
    pub(super) fn find(&self, address: u64, asked: u64) -> Result<u32> {
        let Some(&id) = self.known.get(&address) else { return Err(self.why_not(address)) };
        let node = &self.nodes[id as usize];
        if node.lane != LIVE {
            return Err(Error::DoubleFree { address });
        }
        let bytes = node.asked;
        if bytes == asked {
            Ok(id)
        } else {
            Err(Error::WrongSize { address, given_bytes: asked, bytes })
        }
    }

    /// Whether a live block begins at an address; else what is wrong with it.
    pub(super) fn find_any(&self, address: u64) -> Result<()> {
        let Some(&id) = self.known.get(&address) else { return Err(self.why_not(address)) };
        let live = self.nodes[id as usize].lane == LIVE;
        if live { Ok(()) } else { Err(Error::DoubleFree { address }) }
    }

    /// Whether an address is in a chunk.
    #[cfg(test)]
    pub(super) fn holds(&self, address: u64) -> bool {
        let below = self.chunks.range(..=address).next_back();
        below.is_some_and(|(start, chunk)| address - start < chunk.bytes)
    }

    /// What is wrong with an address that no live block begins at.
    #[cold]
    fn why_not(&self, address: u64) -> Error {
        let below = self.chunks.range(..=address).next_back();
        let Some((_, chunk)) = below.filter(|(start, chunk)| address - **start < chunk.bytes)
        else {
            return Error::ForeignPointer { address };
        };
        let holds = |node: &&Node| address - node.start < node.bytes;
        match self.chunk_nodes(chunk).map(|id| &self.nodes[id as usize]).find(holds) {
            Some(node) if node.lane == LIVE => {
                Error::InteriorPointer { address, start: node.start }
            }
            _ => Error::DoubleFree { address },
        }
    }

    fn chunk_nodes(&self, chunk: &Chunk) -> impl Iterator<Item = u32> + '_ {
        let next = |id: &u32| Some(self.nodes[*id as usize].next).filter(|next| *next != NONE);
        std::iter::successors(Some(chunk.first), next)
    }

    /// Makes a live block free.
    #[inline]
    pub(super) fn free(&mut self, id: u32, lane: u32, epoch: u64) {
        let node = &mut self.nodes[id as usize];
        node.epoch = epoch;
        let (start, bytes) = (node.start, node.bytes);
        self.live_bytes -= bytes;
        self.live_count -= 1;
        // No neighbour's until it has its place.
        if !self.put_aside(id, lane, bytes) {
            self.nodes[id as usize].lane = lane;
            self.known.remove(&start);
            self.enter(id);
        }
    }

    /// A live block is its caller's no more, and nobody's yet.
    pub(super) fn keep(&mut self, id: u32) {
        let node = &mut self.nodes[id as usize];
        node.lane = KEPT;
        self.live_bytes -= node.bytes;
        self.live_count -= 1;
    }

    /// A kept block becomes nobody's.
    pub(super) fn let_go(&mut self, id: u32) {
        let node = &mut self.nodes[id as usize];
        (node.lane, node.epoch) = (NOBODY, 0);
        let start = node.start;
        self.known.remove(&start);
        self.enter(id);
    }

    /// Puts a free block that is in no set into its lane's, joined with its neighbours: which block it is then.
    fn enter(&mut self, id: u32) -> u32 {
        let mut id = id;
        let node = self.nodes[id as usize];
        if node.next != NONE && self.nodes[node.next as usize].lane == node.lane {
            self.leave(node.next);
            self.absorb_next(id);
        }
        if node.previous != NONE && self.nodes[node.previous as usize].lane == node.lane {
            self.leave(node.previous);
            self.absorb_next(node.previous);
            id = node.previous;
        }
        let entry = self.entry(id);
        self.free_set(node.lane).insert(entry);
        id
    }

    fn leave(&mut self, id: u32) {
        let (entry, lane) = (self.entry(id), self.nodes[id as usize].lane);
        self.free_set(lane).remove(entry);
    }

    /// Makes a block and the one behind it one. Neither is in a set.
    fn absorb_next(&mut self, id: u32) {
        let gone = self.nodes[id as usize].next;
        let next = self.nodes[gone as usize];
        let node = &mut self.nodes[id as usize];
        node.bytes += next.bytes;
        node.epoch = node.epoch.max(next.epoch);
        node.next = next.next;
        if next.next != NONE {
            self.nodes[next.next as usize].previous = id;
        }
        self.vacant.push(gone);
    }

    /// Gives a free block to another lane, or to its own anew: which block it is then.
    fn hand_over(&mut self, id: u32, lane: u32, epoch: u64) -> u32 {
        self.leave(id);
        let node = &mut self.nodes[id as usize];
        (node.lane, node.epoch) = (lane, epoch);
        self.enter(id)
    }

    /// What a lane has up to an epoch becomes nobody's.
    pub(super) fn pass(&mut self, lane: u32, epoch: u64) {
        self.settle(lane);
        let Some(free) = self.free.get(lane as usize) else { return };
        let passed: Vec<u32> = free
            .iter()
            .map(|block| block.node)
            .filter(|id| self.nodes[*id as usize].epoch <= epoch)
            .collect();
        // Of one lane, no two are neighbours: none of them goes while another is handed over.
        for id in passed {
            self.hand_over(id, NOBODY, 0);
        }
    }

    /// Neighbouring free blocks that together have enough bytes: each with its lane and epoch. Only
    /// of lanes that `usable` says. The first that is found, in the order of addresses.
    pub(super) fn run(&self, bytes: u64, usable: impl Fn(u32) -> bool) -> Option<Run> {
        for chunk in self.chunks.values().filter(|chunk| chunk.bytes >= bytes) {
            let mut run = Run::default();
            for id in self.chunk_nodes(chunk) {
                let node = &self.nodes[id as usize];
                if node.lane >= ASIDE || !usable(node.lane) {
                    run.clear();
                    continue;
                }
                run.push(id, node);
                if run.bytes >= bytes {
                    return Some(run);
                }
            }
        }
        None
    }

    /// Gives all blocks of a run to one lane; they become one.
    pub(super) fn join(&mut self, run: &Run, lane: u32, epoch: u64) {
        let end = run.start + run.bytes;
        let mut joined = self.hand_over(run.first, lane, epoch);
        loop {
            // What stands next may have been the lane's already, and is in it then.
            let node = self.nodes[joined as usize];
            if node.start + node.bytes >= end || node.next == NONE {
                return;
            }
            joined = self.hand_over(node.next, lane, epoch);
        }
    }

    /// All blocks of a chunk that is wholly free, in lanes that `usable` says: of the longest such.
    pub(super) fn whole_chunk(&self, usable: impl Fn(u32) -> bool) -> Option<Run> {
        let is_free = |id: u32| {
            let lane = self.nodes[id as usize].lane;
            lane < ASIDE && usable(lane)
        };
        let whole = |chunk: &&Chunk| self.chunk_nodes(chunk).all(is_free);
        let chunk = self.chunks.values().filter(whole).max_by_key(|chunk| chunk.bytes)?;
        let mut run = Run::default();
        self.chunk_nodes(chunk).for_each(|id| run.push(id, &self.nodes[id as usize]));
        Some(run)
    }

    /// Takes out a chunk whose blocks are these.
    pub(super) fn remove_chunk(&mut self, whole: &Run) -> Option<Chunk> {
        let chunk = self.chunks.remove(&whole.start)?;
        let nodes: Vec<u32> = self.chunk_nodes(&chunk).collect();
        for id in nodes {
            self.leave(id);
            self.vacant.push(id);
        }
        self.chunk_bytes -= chunk.bytes;
        Some(chunk)
    }

    /// Takes out every chunk, for the end.
    pub(super) fn drain(&mut self) -> Vec<Chunk> {
        let chunks = std::mem::take(self).chunks;
        chunks.into_values().collect()
    }

    /// Every chunk.
    pub(super) fn chunks(&self) -> impl Iterator<Item = &Chunk> {
        self.chunks.values()
    }

    /// Every block of a chunk, in the order of addresses: its bytes, and whether it is live.
    pub(super) fn pieces(&self, chunk: &Chunk) -> impl Iterator<Item = (u64, bool)> + '_ {
        self.chunk_nodes(chunk).map(|id| {
            let node = &self.nodes[id as usize];
            (node.bytes, node.lane == LIVE)
        })
    }

    /// Whether all that must hold does: the name of what does not.
    #[cfg(test)]
    pub(super) fn check(&self) -> std::result::Result<(), &'static str> {
        let (mut live, mut free, mut aside, mut kept) = (0, 0, 0, 0);
        for chunk in self.chunks.values() {
            let (mut at, mut previous, mut last_lane) = (chunk.ptr.address(), NONE, LIVE);
            for id in self.chunk_nodes(chunk) {
                let node = self.nodes[id as usize];
                if node.start != at || node.previous != previous {
                    return Err("blocks of a chunk follow one another");
                }
                if node.lane >= ASIDE && self.known.get(&node.start) != Some(&id) {
                    return Err("a live block, and one aside, is in the table");
                }
                if node.lane == LIVE {
                    live += node.bytes;
                } else if node.lane == KEPT {
                    kept += node.bytes;
                } else if node.lane >= ASIDE {
                    let front = self.fronts[(node.lane & !ASIDE) as usize].as_ref();
                    let has = |stack: &Stack| {
                        stack.bytes == node.bytes
                            && stack.nodes[..stack.count as usize].contains(&id)
                    };
                    if !front.is_some_and(|front| front.stacks.iter().any(has)) {
                        return Err("a block aside is in its lane's front");
                    }
                    aside += node.bytes;
                } else {
                    if node.lane == last_lane {
                        return Err("neighbours of one lane are one block");
                    }
                    free += node.bytes;
                    if !self.free[node.lane as usize].iter().any(|entry| entry == self.entry(id)) {
                        return Err("a free block is in its lane's set");
                    }
                }
                (at, previous, last_lane) = (node.start + node.bytes, id, node.lane);
            }
            if at != chunk.ptr.address() + chunk.bytes {
                return Err("blocks cover their chunk");
            }
        }
        let in_sets: u64 = self.free.iter().map(Sizes::bytes).sum();
        let in_fronts: u64 = self.fronts.iter().flatten().map(|front| front.bytes).sum();
        if aside != in_fronts || live + free + aside + kept != self.chunk_bytes {
            return Err("every byte is live, free, aside or kept");
        }
        if live != self.live_bytes || free != in_sets {
            return Err("sums are right");
        }
        Ok(())
    }
}

/// Free neighbours of several lanes.
#[derive(Debug, Default)]
pub(super) struct Run {
    /// The first of them.
    first: u32,
    start: u64,
    bytes: u64,
    /// Lane and epoch of each.
    blocks: Vec<(u32, u64)>,
}

impl Run {
    fn clear(&mut self) {
        self.bytes = 0;
        self.blocks.clear();
    }

    fn push(&mut self, id: u32, node: &Node) {
        if self.blocks.is_empty() {
            (self.first, self.start) = (id, node.start);
        }
        self.bytes += node.bytes;
        self.blocks.push((node.lane, node.epoch));
    }

    /// The lanes that have a part in it, each with its latest epoch.
    pub(super) fn lanes(&self) -> Vec<(u32, u64)> {
        let mut lanes = self.blocks.clone();
        lanes.sort_unstable_by_key(|(lane, epoch)| (*lane, std::cmp::Reverse(*epoch)));
        lanes.dedup_by_key(|(lane, _)| *lane);
        lanes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Step {
        Take { lane: u32, units: u64 },
        Again { lane: u32, units: u64 },
        Free { which: usize, lane: u32 },
        Keep { which: usize },
        LetGo { which: usize },
        Pass { lane: u32, back: u64 },
        Join { units: u64, lane: u32 },
        Chunk { units: u64, lane: u32 },
        Remove,
    }

    fn step() -> impl Strategy<Value = Step> {
        let lane = 0_u32..4;
        prop_oneof![
            4 => (lane.clone(), 1_u64..90).prop_map(|(lane, units)| Step::Take { lane, units }),
            2 => (lane.clone(), 1_u64..90).prop_map(|(lane, units)| Step::Again { lane, units }),
            4 => (any::<usize>(), 1_u32..4).prop_map(|(which, lane)| Step::Free { which, lane }),
            1 => any::<usize>().prop_map(|which| Step::Keep { which }),
            1 => any::<usize>().prop_map(|which| Step::LetGo { which }),
            1 => (1_u32..4, 0_u64..20).prop_map(|(lane, back)| Step::Pass { lane, back }),
            1 => (1_u64..200, 1_u32..4).prop_map(|(units, lane)| Step::Join { units, lane }),
            1 => (1_u64..400, lane).prop_map(|(units, lane)| Step::Chunk { units, lane }),
            1 => Just(Step::Remove),
        ]
    }

    proptest! {
        /// Any steps keep what must hold, and no two live blocks overlap.
        #[test]
        fn what_must_hold_does(steps in proptest::collection::vec(step(), 1..200)) {
            let mut blocks = Blocks::default();
            let mut live: Vec<(u64, u64)> = Vec::new();
            let mut kept: Vec<u32> = Vec::new();
            let (mut base, mut epoch) = (1_u64 << 40, 1);
            for step in steps {
                epoch += 1;
                match step {
                    Step::Again { lane, units } => {
                        let asked = units * UNIT - 3;
                        if let Some(address) = blocks.take_aside(lane, units * UNIT, asked) {
                            prop_assert!(live.iter().all(|(start, _)| *start != address));
                            live.push((address, units * UNIT));
                        }
                    }
                    Step::Take { lane, units } => {
                        if let Some(found) = blocks.best_fit(lane, units * UNIT) {
                            let address = blocks.take(found, units * UNIT, units * UNIT - 3);
                            let apart = |(start, bytes): &(u64, u64)| {
                                address >= start + bytes || address + units * UNIT <= *start
                            };
                            prop_assert!(live.iter().all(apart));
                            live.push((address, units * UNIT));
                        }
                    }
                    Step::Free { which, lane } if !live.is_empty() => {
                        let (address, bytes) = live.swap_remove(which % live.len());
                        prop_assert!(blocks.find(address, bytes).is_err(), "a wrong size");
                        let node = blocks.find(address, bytes - 3);
                        prop_assert!(node.is_ok());
                        blocks.free(node.unwrap_or(0), lane, epoch);
                        let again = blocks.find(address, bytes - 3);
                        let is_double = matches!(again, Err(Error::DoubleFree { .. }));
                        prop_assert!(is_double);
                    }
                    Step::Keep { which } if !live.is_empty() => {
                        let (address, bytes) = live.swap_remove(which % live.len());
                        let Some(id) = blocks.find_live(address, bytes - 3) else {
                            return Err(TestCaseError::fail("it is live"));
                        };
                        blocks.keep(id);
                        let again = blocks.find(address, bytes - 3);
                        let is_double = matches!(again, Err(Error::DoubleFree { .. }));
                        prop_assert!(is_double);
                        kept.push(id);
                    }
                    Step::LetGo { which } if !kept.is_empty() => {
                        blocks.let_go(kept.swap_remove(which % kept.len()));
                    }
                    Step::Free { .. } | Step::Keep { .. } | Step::LetGo { .. } => {}
                    Step::Pass { lane, back } => blocks.pass(lane, epoch.saturating_sub(back)),
                    Step::Join { units, lane } => {
                        blocks.settle_all();
                        if let Some(run) = blocks.run(units * UNIT, |_| true) {
                            prop_assert!(!run.lanes().is_empty());
                            blocks.join(&run, lane, epoch);
                            prop_assert!(blocks.best_fit(lane, units * UNIT).is_some());
                        }
                    }
                    Step::Chunk { units, lane } => {
                        let ptr = DevicePtr::from_address(base);
                        blocks.add_chunk(ptr, units * UNIT, lane, epoch);
                        // Some touch, and are not one for that.
                        base += (units + units % 2) * UNIT;
                    }
                    Step::Remove => {
                        blocks.settle_all();
                        let held = blocks.held();
                        if let Some(whole) = blocks.whole_chunk(|_| true) {
                            let Some(chunk) = blocks.remove_chunk(&whole) else {
                                return Err(TestCaseError::fail("the chunk is there"));
                            };
                            prop_assert_eq!(blocks.held() + chunk.bytes, held);
                            prop_assert!(!blocks.holds(chunk.ptr.address()));
                        }
                    }
                }
                prop_assert_eq!(blocks.check(), Ok(()));
            }
        }
    }

    /// Two streams' blocks side by side, behind as many that are live: each is looked at a few times, not each
    /// time that another joins.
    #[test]
    #[cfg_attr(miri, ignore = "it takes long")]
    fn joining_many_blocks_takes_time_by_their_number() {
        const HALF: u64 = 1 << 16;
        let mut blocks = Blocks::default();
        blocks.add_chunk(DevicePtr::from_address(1 << 40), 2 * HALF * UNIT, NOBODY, 0);
        let mut take = || {
            let block = blocks.best_fit(NOBODY, UNIT).expect("free");
            blocks.take(block, UNIT, UNIT)
        };
        let all: Vec<u64> = (0..2 * HALF).map(|_| take()).collect();
        for (number, address) in all[HALF as usize..].iter().enumerate() {
            let id = blocks.find(*address, UNIT).expect("live");
            blocks.free(id, 1 + number as u32 % 2, 1);
        }
        blocks.settle_all();
        let start = std::time::Instant::now();
        let run = blocks.run(HALF * UNIT, |_| true).expect("the second half");
        blocks.join(&run, 3, 2);
        let took = start.elapsed();
        assert_eq!(blocks.best_fit(3, UNIT).map(|block| block.bytes), Some(HALF * UNIT));
        assert!(took < std::time::Duration::from_secs(2), "{took:?}");
    }

    #[test]
    fn wrong_pointers_are_told_apart() {
        let mut blocks = Blocks::default();
        blocks.add_chunk(DevicePtr::from_address(0x10000), 4 * UNIT, NOBODY, 0);
        let whole = blocks.best_fit(NOBODY, UNIT).expect("free");
        let address = blocks.take(whole, 2 * UNIT, 500);
        assert_eq!(address, 0x10000);
        let why = |address, bytes| blocks.find(address, bytes).expect_err("wrong").to_string();
        assert!(why(address, 499).contains("500 bytes"));
        assert!(why(address + 8, 500).contains("inside"));
        assert!(why(address + 3 * UNIT, 500).contains("double free"));
        assert!(why(address + 4 * UNIT, 500).contains("does not come"));
        assert!(why(1, 500).contains("does not come"));
    }
}

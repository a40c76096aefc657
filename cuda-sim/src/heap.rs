//! What the driver's own allocators divide: chunks of physical memory, cut into blocks.
//!
//! cuMemAlloc and the memory pools share it. A free block is either common, when the work that
//! freed it has run, or belongs to the stream it was freed on, whose later work may have it at
//! once. Neighbours of one kind in one chunk are one block.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use cuda_sys::types::CUresult;
use rustc_hash::FxHashMap;

use crate::address::{AccessRights, Owner, RESERVATION_UNIT};
use crate::memory::Space;
use crate::physical::{GRANULE, Seat};
use crate::race::{Clock, PhysicalId, StreamKey};
use crate::stream::{Point, Recorded};

/// Every block is a multiple of this and aligned to it.
const ALIGNMENT: u64 = 512;

#[derive(Debug)]
enum Block {
    /// In use; the size that was asked for.
    Live {
        size: u64,
        requested: u64,
    },
    Free(Free),
}

/// A free block: after which point, and after everything in which clock, it may be used.
#[derive(Clone, Debug)]
struct Free {
    size: u64,
    /// `None` once that point has been passed.
    point: Option<Point>,
    clock: Arc<Clock>,
}

#[derive(Debug)]
struct Chunk {
    size: u64,
    physical: PhysicalId,
}

/// A block handed out, and what its first use has to come after.
#[derive(Debug)]
pub(crate) struct Taken {
    pub(crate) address: u64,
    /// The work on another stream that must be waited for, if it may not have run yet.
    pub(crate) after: Recorded,
}

/// Which free blocks a request may have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wish<'a> {
    pub(crate) bytes: u64,
    /// Blocks freed on this stream are fine.
    pub(crate) stream: Option<StreamKey>,
    /// So are those freed before this clock.
    pub(crate) knows: Option<&'a Clock>,
    /// Whether common blocks are fine, though the host may not know that they are free.
    pub(crate) common: bool,
}

#[derive(Debug)]
pub(crate) struct Heap {
    pub(crate) seat: Seat,
    /// The least size of a chunk.
    chunk_bytes: u64,
    chunks: BTreeMap<u64, Chunk>,
    blocks: BTreeMap<u64, Block>,
    common: BTreeSet<(u64, u64)>,
    of_stream: FxHashMap<StreamKey, BTreeSet<(u64, u64)>>,
    /// Blocks of each stream in the order of their points.
    pending: FxHashMap<StreamKey, VecDeque<(u64, u64)>>,
    /// Chunks that are one common block.
    empty: BTreeSet<u64>,
    pub(crate) rights: AccessRights,
    pub(crate) live: usize,
    pub(crate) reserved: u64,
    pub(crate) reserved_high: u64,
    pub(crate) used: u64,
    pub(crate) used_high: u64,
    /// The most bytes that chunks may have; 0 for no limit.
    pub(crate) max_bytes: u64,
}

impl Heap {
    pub(crate) fn new(seat: Seat, chunk_bytes: u64) -> Self {
        Self {
            seat,
            chunk_bytes,
            chunks: BTreeMap::new(),
            blocks: BTreeMap::new(),
            common: BTreeSet::new(),
            of_stream: FxHashMap::default(),
            pending: FxHashMap::default(),
            empty: BTreeSet::new(),
            rights: AccessRights::default().with(seat.owner(), 3),
            live: 0,
            reserved: 0,
            reserved_high: 0,
            used: 0,
            used_high: 0,
            max_bytes: 0,
        }
    }

    /// Blocks whose points have been passed become common.
    pub(crate) fn settle(&mut self, completed: impl Fn(StreamKey) -> u64) {
        let mut passed = Vec::new();
        self.pending.retain(|&stream, queue| {
            let done = completed(stream);
            while let Some(&(seq, address)) = queue.front().filter(|(seq, _)| *seq <= done) {
                passed.push((Point { stream, seq }, address));
                queue.pop_front();
            }
            !queue.is_empty()
        });
        for (point, address) in passed {
            match self.blocks.get(&address) {
                Some(Block::Free(free)) if free.point == Some(point) => {
                    let free = Free { point: None, ..free.clone() };
                    self.remove_free(address);
                    self.insert_free(address, free);
                }
                // It grew or was taken since.
                _ => {}
            }
        }
    }

    /// Whether a free block still waits for its point.
    pub(crate) fn has_pending(&self) -> bool {
        self.pending.values().any(|queue| !queue.is_empty())
    }

    /// The best fit among the free blocks that a request may have.
    pub(crate) fn take(&mut self, wish: Wish<'_>) -> Option<Taken> {
        let size = wish.bytes.checked_next_multiple_of(ALIGNMENT)?;
        let fit = |set: &BTreeSet<(u64, u64)>| set.range((size, 0)..).next().copied();
        let own = wish.stream.and_then(|stream| self.of_stream.get(&stream)).and_then(fit);
        let common = Some(&self.common).filter(|_| wish.common).and_then(fit);
        let found = [own, common].into_iter().flatten().min().or_else(|| {
            let knows = wish.knows?;
            let known = |&&(_, address): &&(u64, u64)| match self.blocks.get(&address) {
                Some(Block::Free(free)) => {
                    free.point.is_none_or(|point| knows.get(point.stream) >= point.seq)
                }
                _ => false,
            };
            let sets = self.of_stream.values().chain([&self.common]);
            sets.filter_map(|set| set.range((size, 0)..).find(known)).min().copied()
        })?;
        Some(self.cut(found.1, size, wish.bytes))
    }

    /// The best fit among all free blocks, whatever they wait for.
    pub(crate) fn take_any(&mut self, bytes: u64) -> Option<Taken> {
        let size = bytes.checked_next_multiple_of(ALIGNMENT)?;
        let sets = self.of_stream.values().chain([&self.common]);
        let found = sets.filter_map(|set| set.range((size, 0)..).next()).min().copied()?;
        Some(self.cut(found.1, size, bytes))
    }

    /// Gets a chunk for a request from the device.
    pub(crate) fn grow(&mut self, space: &mut Space, bytes: u64) -> Result<(), CUresult> {
        const OOM: CUresult = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        let exact = bytes.checked_next_multiple_of(GRANULE).ok_or(OOM)?;
        let room = match self.max_bytes {
            0 => u64::MAX,
            limit => limit.saturating_sub(self.reserved),
        };
        if exact > room {
            return Err(OOM);
        }
        let generous = exact.max(self.chunk_bytes).min(room / GRANULE * GRANULE);
        let mut size = generous;
        let physical = match space.physical.create(self.seat, size) {
            Err(_) if exact < generous => {
                size = exact;
                space.physical.create(self.seat, size)?
            }
            other => other?,
        };
        let address = match space.addresses.reserve(size, RESERVATION_UNIT, 0, Owner::Driver) {
            Ok(address) => address,
            Err(code) => {
                space.physical.release(physical);
                return Err(code);
            }
        };
        space.addresses.map(address, size, physical, 0)?;
        self.chunks.insert(address, Chunk { size, physical });
        self.set_rights_of(space, address, size);
        self.reserved += size;
        self.reserved_high = self.reserved_high.max(self.reserved);
        self.insert_free(address, Free { size, point: None, clock: Arc::default() });
        Ok(())
    }

    /// Gives chunks that are wholly free back to the device, the lowest first, as far as `keep`
    /// bytes stay reserved.
    pub(crate) fn trim(&mut self, space: &mut Space, keep: u64) {
        if self.reserved <= keep {
            return;
        }
        for address in self.empty.clone() {
            let size = self.chunks.get(&address).map_or(0, |chunk| chunk.size);
            if self.reserved.saturating_sub(size) < keep {
                continue;
            }
            self.remove_free(address);
            let Some(chunk) = self.chunks.remove(&address) else { continue };
            self.reserved -= size;
            // A whole chunk is one mapping in one reservation of the driver's: neither fails.
            let _ = space.addresses.unmap(address, size, Owner::Driver, None);
            let _ = space.addresses.free(address, size, Owner::Driver);
            if space.physical.release(chunk.physical) {
                space.forget(chunk.physical);
            }
        }
    }

    /// Frees a live block for work after `after`; `None` if no live block begins there.
    pub(crate) fn free(&mut self, address: u64, after: Option<Recorded>) -> Option<u64> {
        let Some(Block::Live { size, requested }) = self.blocks.get(&address) else { return None };
        let (size, requested) = (*size, *requested);
        self.blocks.remove(&address);
        self.live -= 1;
        self.used -= size;
        let (point, clock) = match after {
            Some(Recorded { point, clock }) => (Some(point), clock),
            None => (None, Arc::default()),
        };
        self.insert_free(address, Free { size, point, clock });
        Some(requested)
    }

    /// The live block that holds an address: its start and the size that was asked for.
    pub(crate) fn find(&self, address: u64) -> Option<(u64, u64)> {
        match self.blocks.range(..=address).next_back()? {
            (&start, Block::Live { size, requested }) if address < start + size => {
                Some((start, *requested))
            }
            _ => None,
        }
    }

    /// Changes who may use the memory, now and from now on.
    pub(crate) fn set_rights(&mut self, space: &mut Space, rights: AccessRights) {
        self.rights = rights;
        for (&address, chunk) in &self.chunks {
            self.set_rights_of(space, address, chunk.size);
        }
    }

    fn set_rights_of(&self, space: &mut Space, address: u64, size: u64) {
        let rights = self.rights;
        // The chunk is one whole mapping, so that this cannot fail.
        let _ = space.addresses.set_access(address, size, |_| rights, None);
    }

    fn cut(&mut self, address: u64, size: u64, requested: u64) -> Taken {
        let free = self.remove_free(address);
        let none = Point { stream: StreamKey(0), seq: 0 };
        let after = free.as_ref().map_or_else(
            || Recorded { point: none, clock: Arc::default() },
            |free| Recorded { point: free.point.unwrap_or(none), clock: Arc::clone(&free.clock) },
        );
        self.blocks.insert(address, Block::Live { size, requested });
        self.live += 1;
        self.used += size;
        self.used_high = self.used_high.max(self.used);
        if let Some(free) = free.filter(|free| free.size > size) {
            self.insert_free(address + size, Free { size: free.size - size, ..free });
        }
        Taken { address, after }
    }

    fn insert_free(&mut self, address: u64, free: Free) {
        let (mut address, mut free) = (address, free);
        let border = |at: u64| self.chunks.contains_key(&at);
        let before = (!border(address))
            .then(|| self.blocks.range(..address).next_back())
            .flatten()
            .and_then(|(&at, block)| joinable(block, &free).map(|_| at));
        let after = address + free.size;
        let next = (!border(after))
            .then(|| self.blocks.get(&after))
            .flatten()
            .and_then(|block| joinable(block, &free).map(|_| after));
        for at in [before, next].into_iter().flatten() {
            if let Some(other) = self.remove_free(at) {
                address = address.min(at);
                free = free.joined(other);
            }
        }
        match free.point {
            None => {
                self.common.insert((free.size, address));
                if self.chunks.get(&address).is_some_and(|chunk| chunk.size == free.size) {
                    self.empty.insert(address);
                }
            }
            Some(point) => {
                self.of_stream.entry(point.stream).or_default().insert((free.size, address));
                let queue = self.pending.entry(point.stream).or_default();
                // A remainder of an older block may come late: keep the queue in order.
                let at = queue.partition_point(|(seq, _)| *seq <= point.seq);
                queue.insert(at, (point.seq, address));
            }
        }
        self.blocks.insert(address, Block::Free(free));
    }

    fn remove_free(&mut self, address: u64) -> Option<Free> {
        let Some(Block::Free(free)) = self.blocks.get(&address) else { return None };
        let free = free.clone();
        self.blocks.remove(&address);
        match free.point {
            None => {
                self.common.remove(&(free.size, address));
                self.empty.remove(&address);
            }
            Some(point) => {
                if let Some(set) = self.of_stream.get_mut(&point.stream) {
                    set.remove(&(free.size, address));
                    if set.is_empty() {
                        self.of_stream.remove(&point.stream);
                    }
                }
            }
        }
        Some(free)
    }
}

fn joinable<'a>(block: &'a Block, with: &Free) -> Option<&'a Free> {
    let stream = |free: &Free| free.point.map(|point| point.stream);
    match block {
        Block::Free(free) if stream(free) == stream(with) => Some(free),
        _ => None,
    }
}

impl Free {
    fn joined(self, other: Self) -> Self {
        let seq = |free: &Self| free.point.map_or(0, |point| point.seq);
        let point = if seq(&self) >= seq(&other) { self.point } else { other.point };
        let clock = if self.clock.covers(&other.clock) {
            self.clock
        } else if other.clock.covers(&self.clock) {
            other.clock
        } else {
            let mut clock = Clock::clone(&self.clock);
            clock.join(&other.clock);
            Arc::new(clock)
        };
        Self { size: self.size + other.size, point, clock }
    }
}

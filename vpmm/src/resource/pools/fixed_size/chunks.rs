//! The blocks of all chunks, found by their addresses without a lock.
//!
//! ```text
//! address ─▶ window ─▶ slot ─▶ chunk ─▶ block
//! ```
//!
//! Chunks come and never go before the end, so whoever reads needs no lock: a chunk is entered whole before
//! its number is, and a number before an address of it is handed out. Slots are hashed by *windows*, powers of
//! two at least as long as a chunk: a chunk is in one or two of them. When a table is half full the next one,
//! twice as long, takes its place; those before it stay, for whoever still reads them.

#![forbid(unsafe_code)]

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use crate::error::{Error, Result};
use crate::units::DevicePtr;

/// In the place of what was asked for: the block is free. No request has no bytes.
const FREE: u64 = 0;

/// Added to it: further streams use the block. No request is so long.
const NOTED: u64 = 1 << 63;

/// The first table's slots, and the first row's chunks.
const FIRST: usize = 16;

/// Tables and rows, each twice as long as the one before: more chunks than 32 bits can count.
const DOUBLINGS: usize = 28;

/// A block: the number of its chunk, and its own there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct BlockId {
    chunk: u32,
    index: u32,
}

#[derive(Debug)]
struct Chunk {
    ptr: DevicePtr,
    /// For each block what was asked for, or [`FREE`].
    asked: Box<[AtomicU64]>,
}

/// Every chunk. One thread at a time adds some; any number looks for blocks meanwhile.
#[derive(Debug)]
pub(super) struct Chunks {
    block_bytes: u64,
    /// The blocks' length is a power of two: this one.
    block_shift: Option<u32>,
    window_shift: u32,
    count: AtomicU32,
    rows: [OnceLock<Box<[OnceLock<Chunk>]>>; DOUBLINGS],
    /// Numbers of chunks, and one more; 0 is none.
    tables: [OnceLock<Box<[AtomicU32]>>; DOUBLINGS],
    /// The table that is looked in.
    latest: AtomicUsize,
}

impl Chunks {
    pub(super) fn new(block_bytes: u64, blocks_at_once: u64) -> Self {
        let chunk_bytes = block_bytes * blocks_at_once;
        Self {
            block_bytes,
            block_shift: block_bytes.is_power_of_two().then(|| block_bytes.trailing_zeros()),
            window_shift: chunk_bytes.next_power_of_two().trailing_zeros(),
            count: AtomicU32::new(0),
            rows: [const { OnceLock::new() }; DOUBLINGS],
            tables: [const { OnceLock::new() }; DOUBLINGS],
            latest: AtomicUsize::new(0),
        }
    }

    /// How many there are.
    pub(super) fn count(&self) -> u32 {
        self.count.load(Ordering::Acquire)
    }

    /// Enters a chunk of free blocks, whose first address this is. Not two threads at a time.
    pub(super) fn add(&self, ptr: DevicePtr, blocks: u64) -> Option<u32> {
        let number = self.count.load(Ordering::Relaxed);
        let (row, at) = place_of(number);
        let row = self
            .rows
            .get(row)?
            .get_or_init(|| (0..FIRST << row).map(|_| OnceLock::new()).collect());
        let asked = (0..blocks).map(|_| AtomicU64::new(FREE)).collect();
        row.get(at)?.set(Chunk { ptr, asked }).ok()?;
        self.count.store(number + 1, Ordering::Release);
        let latest = self.latest.load(Ordering::Relaxed);
        // Each has two slots at most, and half of them stay empty.
        if 4 * (number as usize + 1) <= FIRST << latest {
            self.enter(self.table(latest)?, number);
        } else {
            let next = latest + 1;
            let table = self.table(next)?;
            (0..=number).for_each(|number| self.enter(table, number));
            self.latest.store(next, Ordering::Release);
        }
        Some(number)
    }

    fn table(&self, number: usize) -> Option<&[AtomicU32]> {
        let empty = || (0..FIRST << number).map(|_| AtomicU32::new(0)).collect();
        Some(self.tables.get(number)?.get_or_init(empty))
    }

    fn enter(&self, table: &[AtomicU32], number: u32) {
        let Some(chunk) = self.chunk(number) else { return };
        let start = chunk.ptr.address();
        let last = start + (chunk.asked.len() as u64 * self.block_bytes - 1);
        let (first, last) = (start >> self.window_shift, last >> self.window_shift);
        for window in first..=last {
            let mut slots = slots(window, table.len());
            let is_empty = |at: &usize| table[*at].load(Ordering::Relaxed) == 0;
            if let Some(at) = slots.find(is_empty) {
                table[at].store(number + 1, Ordering::Release);
            }
        }
    }

    #[inline]
    fn chunk(&self, number: u32) -> Option<&Chunk> {
        let (row, at) = place_of(number);
        self.rows.get(row)?.get()?.get(at)?.get()
    }

    /// The block that an address is in, and how far.
    #[inline]
    pub(super) fn find(&self, address: u64) -> Option<(BlockId, u64)> {
        let table = self.tables.get(self.latest.load(Ordering::Acquire))?.get()?;
        for at in slots(address >> self.window_shift, table.len()) {
            let number = table[at].load(Ordering::Acquire).checked_sub(1)?;
            let chunk = self.chunk(number)?;
            let offset = address.wrapping_sub(chunk.ptr.address());
            let index = match self.block_shift {
                Some(shift) => offset >> shift,
                None => offset / self.block_bytes,
            };
            if index < chunk.asked.len() as u64 {
                let inside = offset - index * self.block_bytes;
                return Some((BlockId { chunk: number, index: index as u32 }, inside));
            }
        }
        None
    }

    #[inline]
    fn asked(&self, block: BlockId) -> Option<(&AtomicU64, u64)> {
        let chunk = self.chunk(block.chunk)?;
        let address = chunk.ptr.address() + u64::from(block.index) * self.block_bytes;
        Some((chunk.asked.get(block.index as usize)?, address))
    }

    /// Hands out a free block that the caller has to itself: its address.
    #[inline]
    pub(super) fn take(&self, block: BlockId, asked: u64) -> Option<u64> {
        let (of, address) = self.asked(block)?;
        of.store(asked, Ordering::Relaxed);
        Some(address)
    }

    /// Takes back what begins at an address and was asked for with this size: of several threads that free
    /// one block at a time one has it.
    #[inline]
    pub(super) fn free(&self, address: u64, asked: u64) -> Result<BlockId> {
        // A size that a caller gives may have the bit of a note.
        if asked & NOTED == 0
            && let Some(block) = self.exchange(address, asked)
        {
            return Ok(block);
        }
        Err(self.why_not(address, asked))
    }

    /// The block that begins at an address, free from here on, if this was in the place of what was asked for.
    #[inline]
    fn exchange(&self, address: u64, from: u64) -> Option<BlockId> {
        let (block, inside) = self.find(address)?;
        let (of, _) = self.asked(block).filter(|_| inside == 0)?;
        let exchanged = of.compare_exchange(from, FREE, Ordering::Relaxed, Ordering::Relaxed);
        exchanged.is_ok().then_some(block)
    }

    /// Notes that further streams use what begins at an address.
    pub(super) fn note(&self, address: u64) -> Result<()> {
        if let Some((block, 0)) = self.find(address)
            && let Some((of, _)) = self.asked(block)
            && of
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |asked| {
                    (asked != FREE).then_some(asked | NOTED)
                })
                .is_ok()
        {
            return Ok(());
        }
        // No size is given, and so none is wrong.
        Err(self.why_not(address, FREE))
    }

    /// As [`free`](Self::free), of what was noted.
    pub(super) fn free_noted(&self, address: u64, asked: u64) -> Option<BlockId> {
        if asked & NOTED == 0 { self.exchange(address, asked | NOTED) } else { None }
    }

    /// That free does not come about.
    pub(super) fn take_back_noted(&self, block: BlockId, asked: u64) {
        self.take_back(block, asked | NOTED);
    }

    /// What is wrong with a free.
    #[cold]
    fn why_not(&self, address: u64, asked: u64) -> Error {
        let Some((block, inside)) = self.find(address) else {
            return Error::ForeignPointer { address };
        };
        let bytes = self.asked(block).map_or(FREE, |(of, _)| of.load(Ordering::Relaxed) & !NOTED);
        match (bytes, inside) {
            (FREE, _) => Error::DoubleFree { address },
            (_, 0) => Error::WrongSize { address, given_bytes: asked, bytes },
            _ => Error::InteriorPointer { address, start: address - inside },
        }
    }

    /// The free that [`free`](Self::free) began does not come about.
    pub(super) fn take_back(&self, block: BlockId, asked: u64) {
        let _ = self.take(block, asked);
    }

    /// The blocks of a chunk.
    pub(super) fn blocks_of(&self, chunk: u32) -> impl DoubleEndedIterator<Item = BlockId> + use<> {
        let count = self.chunk(chunk).map_or(0, |chunk| chunk.asked.len() as u32);
        (0..count).map(move |index| BlockId { chunk, index })
    }

    /// How many blocks are allocated: all are looked at.
    pub(super) fn live(&self) -> u64 {
        let chunks = (0..self.count()).filter_map(|number| self.chunk(number));
        let is_live = |of: &&AtomicU64| of.load(Ordering::Relaxed) != FREE;
        chunks.map(|chunk| chunk.asked.iter().filter(is_live).count() as u64).sum()
    }

    /// Every chunk's pointer.
    pub(super) fn pointers(&self) -> impl Iterator<Item = DevicePtr> + '_ {
        (0..self.count()).filter_map(|number| Some(self.chunk(number)?.ptr))
    }
}

/// In which row a chunk is, and where there.
#[inline]
fn place_of(number: u32) -> (usize, usize) {
    // The rows before row n have FIRST * (2^n - 1) places.
    let nth = number as usize / FIRST + 1;
    let row = nth.ilog2() as usize;
    (row, number as usize - FIRST * ((1 << row) - 1))
}

/// The slots of a window, in the order in which they are looked at.
#[inline]
fn slots(window: u64, count: usize) -> impl Iterator<Item = usize> {
    let first = (window.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as usize;
    (0..count).map(move |step| first.wrapping_add(step) & (count - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: u64 = 1 << 40;

    fn chunks(block_bytes: u64, at_once: u64, count: u64, gap: u64) -> Chunks {
        let chunks = Chunks::new(block_bytes, at_once);
        for number in 0..count {
            let address = BASE + number * (block_bytes * at_once + gap);
            assert_eq!(chunks.add(DevicePtr::from_address(address), at_once), Some(number as u32));
        }
        chunks
    }

    #[test]
    fn every_address_has_its_block() {
        // Chunks side by side and apart, within windows and across them.
        for (bytes, at_once, gap) in [(256, 1, 0), (768, 5, 256), (4096, 8, 0), (768, 3, 1 << 20)] {
            let count = 300;
            let chunks = chunks(bytes, at_once, count, gap);
            for number in 0..count {
                let start = BASE + number * (bytes * at_once + gap);
                for index in 0..at_once {
                    let block = BlockId { chunk: number as u32, index: index as u32 };
                    let address = start + index * bytes;
                    assert_eq!(chunks.find(address), Some((block, 0)));
                    assert_eq!(chunks.find(address + bytes - 1), Some((block, bytes - 1)));
                    assert_eq!(chunks.take(block, 7), Some(address));
                }
                if gap > 0 {
                    assert_eq!(chunks.find(start + at_once * bytes), None);
                    assert_eq!(chunks.find(start - 1), None);
                }
            }
            assert_eq!(chunks.find(BASE - 1), None);
            assert_eq!(chunks.find(0), None);
            assert_eq!(chunks.live(), count * at_once);
            assert_eq!(chunks.pointers().count() as u64, count);
        }
    }

    #[test]
    fn places_follow_one_another() {
        let mut last = (0, 0);
        for number in 1..10_000 {
            let place = place_of(number);
            let next = (last.0, last.1 + 1);
            assert!(place == next || place == (last.0 + 1, 0) && next.1 == FIRST << last.0);
            last = place;
        }
        let (row, at) = place_of(u32::MAX - 1);
        assert!(row < 32 && at < FIRST << row);
    }

    #[test]
    fn wrong_frees_have_names() {
        let chunks = chunks(1024, 4, 2, 0);
        let address = chunks.blocks_of(1).next().and_then(|block| chunks.take(block, 1000));
        let address = address.expect("a block");
        let why = |address, asked| chunks.free(address, asked).expect_err("wrong").to_string();
        assert!(why(address, 999).contains("1000 bytes"));
        assert!(why(address + 8, 1000).contains("inside"));
        assert!(why(address + 1024, 1000).contains("double free"));
        assert!(why(address + 4096, 1000).contains("does not come"));
        let block = chunks.free(address, 1000).expect("right");
        assert!(why(address, 1000).contains("double free"));
        chunks.take_back(block, 1000);
        assert_eq!(chunks.live(), 1);
    }

    #[test]
    fn of_threads_that_free_one_block_one_has_it() {
        let chunks = chunks(256, 64, 1, 0);
        for block in chunks.blocks_of(0) {
            let address = chunks.take(block, 100).expect("a block");
            let freed = std::thread::scope(|scope| {
                let free = || usize::from(chunks.free(address, 100).is_ok());
                let threads = [(); 2].map(|()| scope.spawn(free));
                threads.into_iter().map(|thread| thread.join().expect("no panic")).sum::<usize>()
            });
            assert_eq!(freed, 1);
        }
    }
}

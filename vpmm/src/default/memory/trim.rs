//! Physical memory given back.

use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::Resident;
use crate::default::space::Space;
use crate::default::space::book::{Recording, Stage};
use crate::default::space::free_set::Block;
use crate::default::space::owner::Owner;
use crate::default::space::tags::Tags;
use crate::default::{Core, lock};
use crate::error::Result;
use crate::ordering::Mark;
use crate::physical::{release, release_all};

/// How long, and how often at least, events are asked about that were recorded for a trim: on a
/// stream that has nothing else to do one takes some microseconds to pass. Of many streams each is asked about
/// less often, when so many questions have come together, but twice.
const PATIENCE: Duration = Duration::from_micros(100);
const ASKED: u32 = 32;
const ASKED_TOGETHER: usize = 512;

/// A run of neighbouring extents on its way back: its first granule, its granules, its extents.
pub(in crate::default) struct Run {
    start: u32,
    granules: u32,
    pub(in crate::default) extents: SmallVec<[u32; 8]>,
    /// The free memory on it, and whose it is.
    taken: SmallVec<[(u32, u32, Owner); 4]>,
}

/// Free blocks without anything between them: the units of all, and each by its node.
pub(in crate::default) struct Stretch {
    start: u32,
    end: u32,
    blocks: SmallVec<[(u32, u32, u32, Owner); 2]>,
}

impl Core {
    /// Gives wholly free extents back until no more than so many bytes are held. The longest go
    /// first: each costs the same.
    pub(in crate::default) fn trim(&self, keep_bytes: u64) -> Result<u64> {
        let _context = self.device.enter()?;
        let _growing = lock(&self.growing);
        // What is free is not there to be given back, or is about to go.
        if self.is_asleep() {
            return Ok(0);
        }
        if self.space.lock().memory.mapped() * self.granule_bytes <= keep_bytes {
            return Ok(self.retry_orphans());
        }
        self.flush_fronts(|_| true);
        // What is known to be free goes all the same.
        let mut looked = self.look_around();
        // That leaves addresses, which something may still be using.
        let rejoined = self.space.lock().rejoin(&self.tags, true);
        if rejoined {
            looked = looked.and(self.look_around());
        }
        self.reap(u64::MAX, Duration::MAX);
        let runs = self.space.lock().take_surplus(&self.tags, keep_bytes);
        let mut released = 0;
        let mut failed = None;
        for run in runs {
            if failed.is_some() {
                self.space.lock().keep(&self.tags, &run);
                continue;
            }
            match self.give_back(&run) {
                Ok(bytes) => released += bytes,
                Err(error) => failed = Some(error),
            }
        }
        released += self.retry_orphans();
        failed.map_or(looked.map(|()| released), Err)
    }

    /// Gives back all that a heap holds which [nothing uses](Self::is_unused), and asks no stream anything: the bytes
    /// that went back, and whether all has. What the driver refuses stays, to be tried again.
    pub(crate) fn give_all_back(&self) -> Result<(u64, bool)> {
        let _context = self.device.enter()?;
        let _growing = lock(&self.growing);
        let refused = self.reap(u64::MAX, Duration::MAX);
        let runs = {
            let mut space = self.space.lock();
            let stretches = stretches_of(space.every_free_block());
            let found = space.movable(&stretches);
            space.take_runs(&self.tags, found, &stretches)
        };
        let given: u64 = runs.iter().filter_map(|run| self.give_back(run).ok()).sum();
        let given = given + self.retry_orphans();
        let space = self.space.lock();
        let is_empty = space.memory.mapped() == 0 && space.orphans.is_empty();
        Ok((given, refused.is_none() && is_empty))
    }

    /// Waits on the host for what was freed so far, as far as events tell of it or `with_device`: a trim finds it
    /// then, also where its stream goes on.
    pub(in crate::default) fn wait_for_past(&self, with_device: bool) -> Result<()> {
        let _context = self.device.enter()?;
        self.flush_fronts(|_| true);
        let marks = self.every_mark();
        let waited = if with_device { self.wait_for_frees() } else { self.wait_for_streams() };
        let mut space = self.space.lock();
        for mark in &marks {
            space.settle_past(&self.tags, mark);
        }
        waited
    }

    /// A mark of each stream, in their order.
    pub(super) fn every_mark(&self) -> Vec<Mark> {
        let mut space = self.space.lock();
        let streams = 0..space.books.len() as u32;
        streams.map(|stream| space.take_mark(self.number, stream)).collect()
    }

    /// Finds out what has passed: closes every stream's epoch and asks about its event. Memory
    /// changes its owner for that only as it does whenever an epoch passes. A stream that the driver refuses
    /// something about is told when all others were asked about.
    fn look_around(&self) -> Result<()> {
        let mut marks = self.every_mark();
        let begun = Instant::now();
        let (mut asked, mut together, mut failed) = (0, 0, None);
        loop {
            marks.retain(|mark| match self.advance(mark.stream, false) {
                Ok(_) => true,
                Err(error) => {
                    failed.get_or_insert(error);
                    false
                }
            });
            together += marks.len();
            let mut space = self.space.lock();
            marks.retain(|mark| !space.settle_past(&self.tags, mark));
            drop(space);
            asked += 1;
            let often = asked >= ASKED || (asked >= 2 && together >= ASKED_TOGETHER);
            if marks.is_empty() || (often && begun.elapsed() >= PATIENCE) {
                return failed.map_or(Ok(()), Err);
            }
            std::hint::spin_loop();
        }
    }

    /// Unmaps a run and releases its handles; returns the bytes that went back.
    pub(in crate::default) fn give_back(&self, run: &Run) -> Result<u64> {
        let driver = self.device.driver();
        let bytes = u64::from(run.granules) * self.granule_bytes;
        let address = self.base + u64::from(run.start) * self.granule_bytes;
        // SAFETY: whole extents that the pool mapped here; they were taken out of free memory that
        // no stream can be using, and nobody else finds them.
        if let Err(failure) = unsafe { crate::mapping::unmap(driver, address, bytes) } {
            self.space.lock().keep(&self.tags, run);
            return Err(failure.about(bytes));
        }
        let handles = self.space.lock().forget(run);
        self.backing.gave_up(bytes);
        let mut released = bytes;
        for (handle, bytes) in handles {
            let mut orphans = Vec::new();
            // SAFETY: the pool's own handle, out of its tables and mapped nowhere any more.
            unsafe { release_all(driver, [handle], &mut orphans) };
            let mut lost = Vec::new();
            // SAFETY: as above; what the driver did not take is tried once more.
            unsafe { release_all(driver, orphans, &mut lost) };
            if let Some(handle) = lost.pop() {
                released -= bytes;
                self.space.lock().orphans.push((handle, bytes));
            }
        }
        Ok(released)
    }

    /// Tries again what the driver would not take back before; returns the bytes that went back.
    pub(in crate::default) fn retry_orphans(&self) -> u64 {
        let mut orphans = std::mem::take(&mut self.space.lock().orphans);
        let mut released = 0;
        orphans.retain(|&(handle, bytes)| {
            // SAFETY: a handle that the pool gave up and that is in no table; one that goes is forgotten here.
            let is_gone = unsafe { release(self.device.driver(), handle) }.is_ok();
            released += if is_gone { bytes } else { 0 };
            !is_gone
        });
        self.space.lock().orphans.append(&mut orphans);
        released
    }
}

/// Free blocks in stretches.
fn stretches_of<'a>(blocks: impl Iterator<Item = &'a Block>) -> Vec<Stretch> {
    let mut blocks: Vec<(u32, u32, u32, Owner)> =
        blocks.map(|block| (block.id(), block.start(), block.end(), block.owner())).collect();
    blocks.sort_unstable_by_key(|block| block.1);
    let mut stretches: Vec<Stretch> = Vec::new();
    for block in blocks {
        let (_, start, end, _) = block;
        match stretches.last_mut() {
            Some(last) if last.end == start => {
                last.end = end;
                last.blocks.push(block);
            }
            _ => stretches.push(Stretch { start, end, blocks: [block].into_iter().collect() }),
        }
    }
    stretches
}

impl Space {
    /// Takes extents out that are wholly free and of the past, as far as more than `keep_bytes` is
    /// held without them, in runs of neighbours.
    fn take_surplus(&mut self, tags: &Tags, keep_bytes: u64) -> Vec<Run> {
        let stretches = self.stretches();
        let mut found = self.movable(&stretches);
        self.retain_surplus(&mut found, keep_bytes);
        self.take_runs(tags, found, &stretches)
    }

    /// The extents that lie wholly in these stretches and may go, each with its number and its stretch.
    pub(in crate::default) fn movable(&self, stretches: &[Stretch]) -> Vec<(Resident, u32, usize)> {
        let mut found = Vec::new();
        for (at, stretch) in stretches.iter().enumerate() {
            self.extents_within(stretch.start, stretch.end, |number, extent| {
                if !extent.exported && extent.zombies == 0 {
                    found.push((*extent, number, at));
                }
            });
        }
        found
    }

    /// Takes extents out of the free memory, in runs of neighbours.
    pub(in crate::default) fn take_runs(
        &mut self,
        tags: &Tags,
        mut found: Vec<(Resident, u32, usize)>,
        stretches: &[Stretch],
    ) -> Vec<Run> {
        found.sort_unstable_by_key(|(extent, ..)| extent.start);
        let granule_units = self.memory.granule_units();
        let mut ranges: SmallVec<[(u32, u32, u32); 8]> = SmallVec::new();
        let mut runs: Vec<Run> = Vec::new();
        for (extent, number, at) in found {
            let (from, to) = (extent.start * granule_units, extent.end() * granule_units);
            let joins = runs.last().is_some_and(|run| run.start + run.granules == extent.start);
            if !joins {
                let (extents, taken) = (SmallVec::new(), SmallVec::new());
                runs.push(Run { start: extent.start, granules: 0, extents, taken });
            }
            let Some(run) = runs.last_mut() else { continue };
            run.granules += extent.granules;
            run.extents.push(number);
            for (id, start, end, owner) in &stretches[at].blocks {
                let (start, end) = ((*start).max(from), (*end).min(to));
                if start < end {
                    ranges.push((*id, start, end));
                    run.taken.push((start, end - start, *owner));
                }
            }
            self.memory.reserve_mapped(extent.start, extent.granules);
            self.leaving_units += u64::from(to - from);
        }
        self.take_ranges(tags, &mut ranges);
        runs
    }

    /// Free memory of the past in stretches, each by address, whoever owns its parts.
    pub(in crate::default) fn stretches(&self) -> Vec<Stretch> {
        stretches_of(self.blocks_of_the_past())
    }

    /// Keeps of the extents those that are to go: the longest that are not too long, and where
    /// that leaves something over the shortest of the others.
    fn retain_surplus(&self, found: &mut Vec<(Resident, u32, usize)>, keep_bytes: u64) {
        let kept = keep_bytes / self.memory.granule_bytes();
        let mut surplus = self.memory.mapped().saturating_sub(kept);
        found.sort_unstable_by_key(|(extent, ..)| (!extent.granules, !extent.start));
        let mut shortest = None;
        found.retain(|candidate| {
            let granules = u64::from(candidate.0.granules);
            let goes = granules <= surplus;
            if goes {
                surplus -= granules;
            } else {
                shortest = Some(*candidate);
            }
            goes
        });
        found.extend(shortest.filter(|_| surplus > 0));
    }

    /// Free blocks that no stream can still be using: nobody's, and those of streams that were
    /// freed before what the host has seen of them.
    fn blocks_of_the_past(&self) -> impl Iterator<Item = &Block> {
        let of_books = self.books.iter().flat_map(|book| {
            let closed = book.open_parity() ^ 1;
            let sets = book.sets.iter().enumerate();
            sets.flat_map(move |(parity, sets)| {
                let whole = parity == closed && book.stage == Stage::Passed;
                let blocks = sets.iter().flat_map(|set| set.of_at_least(1));
                blocks.filter(move |block| whole || block.is_before(book.seen))
            })
        });
        let common = self.common.iter().flat_map(|set| set.of_at_least(1));
        common.chain(of_books)
    }

    /// Notes that what was freed before a mark is of the past, if it is; whether there is nothing
    /// more to be asked about.
    fn settle_past(&mut self, tags: &Tags, mark: &Mark) -> bool {
        let book = &self.books[mark.stream as usize];
        let passed = book.passed >= mark.epoch;
        // Events of frees alone say nothing of uses that something still waits for.
        let eager = book.recording == Recording::Eager;
        if passed && !(eager && book.deferred_until > book.passed) {
            self.settle_epoch(tags, mark, false);
        }
        let book = &self.books[mark.stream as usize];
        let asks = matches!(book.stage, Stage::Recorded(_) | Stage::Passed);
        let closes = book.stage == Stage::Clear && self.has_open(mark.stream);
        passed || !(asks || closes)
    }

    fn end_transit(&mut self, run: &Run) {
        let units = u64::from(run.granules * self.memory.granule_units());
        self.transit_units -= units;
        self.leaving_units -= units;
    }

    /// A run stays after all.
    fn keep(&mut self, tags: &Tags, run: &Run) {
        self.end_transit(run);
        for number in &run.extents {
            let start = self.memory.extent(*number).start;
            self.memory.settle(start);
        }
        for (start, units, owner) in &run.taken {
            self.give(tags, *start, *units, self.now(*owner));
        }
    }

    /// A run was unmapped: its handles, each with its bytes.
    fn forget(&mut self, run: &Run) -> SmallVec<[(crate::physical::Extent, u64); 8]> {
        self.end_transit(run);
        let handles = run.extents.iter().map(|number| self.memory.leave(*number));
        handles.collect()
    }
}

//! Physical memory given back.

use smallvec::SmallVec;

use super::memory::Resident;
use super::owner::Owner;
use super::space::{Part, Space};
use super::tags::Tags;
use super::{Core, lock};
use crate::error::Result;
use crate::physical::release_all;

/// A run of neighbouring extents on its way back: its first granule, its granules, its extents.
struct Run {
    start: u32,
    granules: u32,
    extents: SmallVec<[u32; 8]>,
}

impl Core {
    /// Gives wholly free extents back until no more than so many bytes are held. The longest go
    /// first: each costs the same.
    pub(super) fn trim(&self, keep_bytes: u64) -> Result<u64> {
        let _context = self.device.enter()?;
        let _growing = lock(&self.growing);
        if self.space.lock().memory.mapped() * self.granule_bytes <= keep_bytes {
            return Ok(0);
        }
        self.flush_fronts(|_| true);
        self.settle_for_release()?;
        self.reap(u64::MAX);
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
        self.retry_orphans();
        failed.map_or(Ok(released), Err)
    }

    /// Makes everything that has passed nobody's, the memory of a sole stream too.
    fn settle_for_release(&self) -> Result<()> {
        self.space.lock().releases = true;
        let polled = self.poll(None, true);
        let mut space = self.space.lock();
        for stream in 0..space.books.len() as u32 {
            while space.drain(&self.tags, stream) {}
        }
        space.releases = false;
        drop(space);
        polled.map(|_| ())
    }

    /// Unmaps a run and releases its handles; returns the bytes that went back.
    fn give_back(&self, run: &Run) -> Result<u64> {
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
        let mut released = bytes;
        for (handle, bytes) in handles {
            let mut orphans = Vec::new();
            // SAFETY: the pool's own handle, out of its tables and mapped nowhere any more.
            unsafe { release_all(driver, [handle], &mut orphans) };
            if !orphans.is_empty() {
                released -= bytes;
                self.space.lock().orphans.append(&mut orphans);
            }
        }
        Ok(released)
    }

    /// Tries again what the driver would not take back before.
    fn retry_orphans(&self) {
        let orphans = std::mem::take(&mut self.space.lock().orphans);
        let mut left = Vec::new();
        // SAFETY: handles that the pool gave up and that are in no table.
        unsafe { release_all(self.device.driver(), orphans, &mut left) };
        self.space.lock().orphans.append(&mut left);
    }
}

impl Space {
    /// Takes extents out that are wholly nobody's, as far as more than `keep_bytes` is held
    /// without them, in runs of neighbours.
    fn take_surplus(&mut self, tags: &Tags, keep_bytes: u64) -> Vec<Run> {
        // While addresses of moved memory are still mapped, what has moved would not come back.
        let moved_stay = self.zombie_granules() > 0;
        let mut found: Vec<(Resident, u32, u32)> = Vec::new();
        for part in Part::ALL {
            for block in self.common[part as usize].of_at_least(self.memory.granule_units()) {
                self.whole_extents(block, |number, extent| {
                    if !(extent.exported || (extent.moved && moved_stay)) {
                        found.push((*extent, number, block.id()));
                    }
                });
            }
        }
        found.sort_unstable_by_key(|(extent, ..)| (!extent.granules, !extent.start));
        let mut surplus = self.memory.mapped() - self.granules_to_keep(keep_bytes);
        found.retain(|(extent, ..)| {
            let goes = u64::from(extent.granules) <= surplus;
            surplus -= if goes { u64::from(extent.granules) } else { 0 };
            goes
        });
        let granule_units = self.memory.granule_units();
        let mut ranges: SmallVec<[(u32, u32, u32); 8]> = found
            .iter()
            .map(|(extent, _, block)| {
                (*block, extent.start * granule_units, extent.end() * granule_units)
            })
            .collect();
        self.take_ranges(tags, &mut ranges);
        found.sort_unstable_by_key(|(extent, ..)| extent.start);
        let mut runs: Vec<Run> = Vec::new();
        for (extent, number, _) in found {
            self.memory.reserve_mapped(extent.start, extent.granules);
            match runs.last_mut() {
                Some(run) if run.start + run.granules == extent.start => {
                    run.granules += extent.granules;
                    run.extents.push(number);
                }
                _ => runs.push(Run {
                    start: extent.start,
                    granules: extent.granules,
                    extents: [number].into_iter().collect(),
                }),
            }
        }
        runs
    }

    fn granules_to_keep(&self, keep_bytes: u64) -> u64 {
        keep_bytes.div_ceil(self.memory.granule_bytes()).min(self.memory.mapped())
    }

    /// A run stays after all.
    fn keep(&mut self, tags: &Tags, run: &Run) {
        let granule_units = self.memory.granule_units();
        self.transit_units -= u64::from(run.granules * granule_units);
        for number in &run.extents {
            let start = self.memory.extent(*number).start;
            self.memory.settle(start);
        }
        self.give(tags, run.start * granule_units, run.granules * granule_units, Owner::NOBODY);
    }

    /// A run was unmapped: its handles, each with its bytes.
    fn forget(&mut self, run: &Run) -> SmallVec<[(crate::physical::Extent, u64); 8]> {
        let granule_units = self.memory.granule_units();
        self.transit_units -= u64::from(run.granules * granule_units);
        let handles = run.extents.iter().map(|number| self.memory.leave(*number));
        handles.collect()
    }
}

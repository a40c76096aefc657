//! Giving memory back to the device.

use std::collections::{BTreeMap, HashMap};

use super::small::Small;
use super::space::Space;
use super::{PagedPool, SMALL_CHUNK_BYTES};
use crate::device::StreamHandle;
use crate::error::{Error, Result};
use crate::physical::{self, Extent};
use crate::region::{NodeId, Region, State};

/// Which pages zombies are still mapped to. To give such a page up frees no memory until the zombie
/// is unmapped; so it is kept.
#[derive(Default)]
pub(super) struct Aliases {
    /// Page by page, by address.
    mapped: BTreeMap<u64, Extent>,
    /// How often each is in there.
    of_extent: HashMap<Extent, u32>,
}

impl Aliases {
    pub(super) fn add(&mut self, address: u64, extent: Extent) {
        self.mapped.insert(address, extent);
        *self.of_extent.entry(extent).or_default() += 1;
    }

    /// A range was unmapped.
    pub(super) fn remove(&mut self, start: u64, bytes: u64) {
        while let Some((&address, &extent)) = self.mapped.range(start..start + bytes).next() {
            self.mapped.remove(&address);
            if let Some(count) = self.of_extent.get_mut(&extent) {
                *count -= 1;
                if *count == 0 {
                    self.of_extent.remove(&extent);
                }
            }
        }
    }

    fn has(&self, extent: Extent) -> bool {
        self.of_extent.contains_key(&extent)
    }

    /// Page by page, in ascending order of addresses.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, Extent)> {
        self.mapped.iter().map(|(address, extent)| (*address, *extent))
    }

    /// The counts of all extents together.
    pub(super) fn counted(&self) -> u64 {
        self.of_extent.values().map(|count| u64::from(*count)).sum()
    }
}

impl PagedPool {
    pub(crate) fn trim_to(&self, keep_bytes: u64) -> Result<u64> {
        let _context = self.device.enter()?;
        let driver = self.device.driver();
        // No page is mapped or moved meanwhile.
        let _growing = self.lock_growing();
        let small = self.small.as_ref();
        let mut small_held = small.map_or(Ok(0), |small| small.reserved(driver))?;
        let excess = |small_held: u64| {
            (self.lock_space().mapped.saturating_add(small_held)).saturating_sub(keep_bytes)
        };
        if excess(small_held) == 0 {
            return Ok(self.retry_orphans());
        }
        // What is known to be free goes all the same.
        let asked = self.ask_every_stream();
        self.reap_pages(u64::MAX);
        let mut gone = self.retry_orphans();
        gone += self.trim_pages(excess(small_held))?;
        if let Some(small) = small.filter(|_| small_held > 0) {
            self.free_small_on_own_stream()?;
            small_held = small.reserved(driver)?;
            let excess = excess(small_held);
            if excess > 0 {
                gone += self.give_small_back(small, small_held, excess)?;
            }
        }
        asked.map(|()| gone)
    }

    /// Has the driver's pool, which holds so much, give back `excess` bytes or a piece more, as far as its pieces are
    /// free; returns how many bytes went.
    fn give_small_back(&self, small: &Small, held: u64, excess: u64) -> Result<u64> {
        let driver = self.device.driver();
        let most = held.saturating_sub(excess);
        // The driver keeps at least what it is told to, so a piece goes only where as much is left: told the most that
        // is to be kept it would give nothing back of a single piece that is longer.
        let mut least = most.saturating_sub(SMALL_CHUNK_BYTES - 1);
        loop {
            small.trim_to(driver, least)?;
            let left = small.reserved(driver)?;
            if left <= most || least == 0 {
                return Ok(held.saturating_sub(left));
            }
            // Pieces for requests that are longer, or such as are in use.
            least = if least < SMALL_CHUNK_BYTES { 0 } else { least / 2 };
        }
    }

    /// Small allocations that only wait to be given to the driver: on the calling thread's own default
    /// stream, which no other thread makes capture; not while this one does.
    fn free_small_on_own_stream(&self) -> Result<()> {
        let own = StreamHandle::PER_THREAD;
        if !self.lock_space().uses.has_small() || self.is_capturing(own)? {
            return Ok(());
        }
        self.free_ready_small(self.id_of(own)?, own)
    }

    /// Gives free pages back, `excess` bytes or a page more; returns how many bytes went.
    pub(super) fn trim_pages(&self, excess: u64) -> Result<u64> {
        let mut spare = self.lock_space().take_spare(excess).into_iter();
        let mut gone = 0;
        for run in spare.by_ref() {
            match self.give_run_back(run) {
                Ok(bytes) => gone += bytes,
                Err(error) => {
                    let mut space = self.lock_space();
                    for run in spare {
                        let fence = space.map.region(run).fence();
                        space.set_free(run, fence);
                    }
                    return Err(error);
                }
            }
        }
        Ok(gone)
    }

    /// Unmaps a run of free pages in transit and gives its pages up.
    fn give_run_back(&self, run: NodeId) -> Result<u64> {
        let driver = self.device.driver();
        let (start, bytes, fence) = {
            let space = self.lock_space();
            let region = space.map.region(run);
            (region.start(), region.bytes(), region.fence())
        };
        // SAFETY: whole pages with their current mappings, this thread's alone while they are in
        // transit; they were free, and the host has seen complete what used them.
        let unmapped = unsafe { crate::mapping::unmap(driver, start, bytes) };
        let mut space = self.lock_space();
        if let Err(failure) = unmapped {
            space.set_free(run, fence);
            return Err(failure.about(bytes));
        }
        let page = space.page;
        let mut extents = Vec::with_capacity((bytes / page) as usize);
        space.chunk_of(run).drain_extents(start, bytes, |extent| extents.push(extent));
        space.mapped -= bytes;
        space.set_hole(run);
        drop(space);
        self.backing.gave_up(bytes);
        let mut extents = extents.into_iter();
        while let Some(extent) = extents.next() {
            // SAFETY: a page of the pool's, out of its table and mapped nowhere; this thread's alone.
            if let Err(failure) = unsafe { physical::release(driver, extent) } {
                // Tried again when the pool next grows or is trimmed.
                self.lock_space().orphans.extend([extent].into_iter().chain(extents));
                return Err(Error::from(failure));
            }
        }
        Ok(bytes)
    }
}

impl Space {
    /// Takes free pages that would free memory into transit, in runs: `bytes` or a page more, from
    /// the smallest regions first, since those are of least use.
    fn take_spare(&mut self, bytes: u64) -> Vec<NodeId> {
        let mut candidates: Vec<NodeId> = self.map.idle().map(Region::id).collect();
        // What has finished, but may not be given to other streams because a question told so.
        for timeline in self.timelines.ids() {
            let pending = self.map.pending(timeline);
            let complete = |region: &&Region| self.timelines.is_complete(region.fence());
            candidates.extend(pending.take_while(complete).map(Region::id));
        }
        let (mut missing, mut taken) = (bytes, Vec::new());
        for region in candidates {
            if missing == 0 {
                break;
            }
            missing = missing.saturating_sub(self.carve(region, missing, &mut taken));
        }
        taken
    }

    /// Takes runs of pages out of one free region; what is left stays as it is.
    fn carve(&mut self, id: NodeId, missing: u64, taken: &mut Vec<NodeId>) -> u64 {
        let region = self.map.region(id);
        let (start, state, fence) = (region.start(), region.state(), region.fence());
        let chunk = &self.chunks[region.reservation() as usize];
        let pages = chunk.extents(start, region.bytes()).flatten();
        let spare = (start..)
            .step_by(self.page as usize)
            .zip(pages)
            .filter(|(_, extent)| !self.shared.contains(extent) && !self.aliases.has(*extent));
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for (address, _) in spare.take(missing.div_ceil(self.page) as usize) {
            match runs.last_mut() {
                Some((first, bytes)) if *first + *bytes == address => *bytes += self.page,
                _ => runs.push((address, self.page)),
            }
        }
        let mut found = 0;
        for (first, bytes) in runs {
            let before = first - self.map.region(id).start();
            if before > 0 {
                self.take_head(id, before, state, fence);
            }
            taken.push(self.take_head(id, bytes, State::Transit, fence));
            found += bytes;
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_an_alias_as_long_as_one_zombie_has_it() {
        let (page, other) = (Extent(7), Extent(8));
        let mut aliases = Aliases::default();
        aliases.add(0x1000, page);
        aliases.add(0x2000, other);
        aliases.add(0x5000, page);
        aliases.remove(0x1000, 0x1000);
        assert!(aliases.has(page) && aliases.has(other));
        aliases.remove(0x2000, 0x4000);
        assert!(!aliases.has(page) && !aliases.has(other));
        assert_eq!((aliases.iter().count(), aliases.counted()), (0, 0));
    }
}

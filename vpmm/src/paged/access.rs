//! Other devices' access to the pool's memory.

use super::PagedPool;
use super::space::Space;
use crate::device::Device;
use crate::error::Result;
use crate::location::Access;
use crate::region::State;

impl PagedPool {
    pub(crate) fn access_of(&self, device: &Device) -> Access {
        self.backing.access_of(device)
    }

    pub(crate) fn set_access(&self, device: &Device, access: Access) -> Result<()> {
        if !self.backing.may_set(device, access)? {
            return Ok(());
        }
        let _context = self.device.enter()?;
        let driver = self.device.driver();
        // No page is mapped or moved meanwhile.
        let _growing = self.lock_growing();
        let before = self.backing.access_of(device);
        if let Some(small) = &self.small {
            small.set_access(driver, device, access)?;
        }
        let runs = self.lock_space().runs();
        // SAFETY: the runs are whole pages with their current mappings, which are unmapped only
        // after they have moved: under `growing`.
        let set = unsafe { self.backing.set_access(device, access, &runs) };
        if set.is_err()
            && let Some(small) = &self.small
        {
            // The error to report is the first one.
            if small.set_access(driver, device, before).is_err() {
                self.backing.tear(device);
            }
        }
        set
    }
}

impl Space {
    /// The addresses of all pages, where they are now, in runs without a hole: where each begins and
    /// its bytes. Zombies are no page's address any more; memory in transit is, if it is being freed.
    fn runs(&self) -> Vec<(u64, u64)> {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for region in self.map.iter() {
            if matches!(region.state(), State::Hole | State::Zombie) {
                continue;
            }
            let chunk = &self.chunks[region.reservation() as usize];
            let extents = chunk.extents(region.start(), region.bytes());
            for (start, extent) in (region.start()..).step_by(self.page as usize).zip(extents) {
                match runs.last_mut() {
                    _ if extent.is_none() => {}
                    Some((first, bytes)) if *first + *bytes == start => *bytes += self.page,
                    _ => runs.push((start, self.page)),
                }
            }
        }
        runs
    }
}

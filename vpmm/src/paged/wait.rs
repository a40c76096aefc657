//! The host's wait for what was freed, where a request finds no memory without it.

use super::PagedPool;
use crate::capture::BesideCaptures;
use crate::error::Result;
use crate::event::Event;
use crate::fence::Fence;
use crate::region::State;

impl PagedPool {
    /// Waits until the GPU has come past everything that was freed so far, which is everybody's then;
    /// answers whether it had anything to wait for. It has not as long as a stream may be made to wait
    /// for another one's memory, unless memory is kept for uses on further streams: no stream waits for
    /// those. Nor can one be made to wait for pages that are to be given back for a small request, or, once
    /// something is exported, for any: what waits would have to move.
    pub(crate) fn wait_for_pending(&self, bytes: u64) -> Result<bool> {
        let waits = {
            let _context = self.device.enter()?;
            self.record_due()?;
            let space = self.lock_space();
            let lacks_pages = self.small.is_some()
                && bytes < self.config.page
                && space.map.totals().regions(State::Pending) > 0;
            let streams_wait =
                self.config.reuse.internal_dependencies && !lacks_pages && space.shared.is_empty();
            !streams_wait || !space.uses.deferred().is_empty()
        };
        if waits { self.wait_for_frees() } else { Ok(false) }
    }

    /// The same whatever streams may be made to wait for.
    pub(crate) fn wait_for_frees(&self) -> Result<bool> {
        let _context = self.device.enter()?;
        let driver = self.device.driver();
        self.record_due()?;
        let newest: Vec<(Fence, Event)> = {
            let space = self.lock_space();
            // What a question found complete has to pass, too.
            let newest = |id| space.timelines.newest_until(id, u64::MAX);
            let newest = space.timelines.ids().filter_map(newest);
            newest.filter_map(|fence| Some((fence, space.timelines.event(fence)?))).collect()
        };
        for (fence, event) in &newest {
            {
                let _beside = BesideCaptures::enter(driver)?;
                event.wait(driver)?;
            }
            // Where the fence was given up meanwhile, the wait was for another record of the event;
            // this then does nothing.
            let mut space = self.lock_space();
            space.pass(*fence);
            space.host_waits += 1;
        }
        Ok(!newest.is_empty())
    }
}

//! The host's wait for what was freed, where a request finds no memory without it.

use super::PagedPool;
use super::space::Space;
use crate::capture::{BesideCaptures, device_is_capturing, wait_for_context};
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
            let space = self.lock_space();
            let lacks_pages = self.small.is_some()
                && bytes < self.config.page
                && space.map.totals().regions(State::Pending) > 0;
            let streams_wait =
                self.config.reuse.internal_dependencies && !lacks_pages && space.shared.is_empty();
            !streams_wait || !space.uses.deferred().is_empty()
        };
        let is_enough = |space: &Space| {
            space.shared.is_empty() && space.free_bytes() - space.uses.deferred_bytes() >= bytes
        };
        if waits { self.wait_until(is_enough) } else { Ok(false) }
    }

    /// The same whatever streams may be made to wait for; for the device only `with_device`. Where the driver refuses
    /// the wait for one stream, the others are waited for all the same; that is an error if nothing is gained so.
    pub(crate) fn wait_for_frees(&self, with_device: bool) -> Result<bool> {
        self.wait_until(|_| !with_device)
    }

    /// `is_enough`: without a wait for the device, if what is left takes that.
    fn wait_until(&self, is_enough: impl Fn(&Space) -> bool) -> Result<bool> {
        let _context = self.device.enter()?;
        let driver = self.device.driver();
        let mut refused = self.record_due().err();
        let newest: Vec<(Fence, Event)> = {
            let space = self.lock_space();
            // What a question found complete has to pass, too.
            let newest = |id| space.timelines.newest_until(id, u64::MAX);
            let newest = space.timelines.ids().filter_map(newest);
            newest.filter_map(|fence| Some((fence, space.timelines.event(fence)?))).collect()
        };
        let mut waited = false;
        for (fence, event) in newest {
            let answer = {
                let _beside = BesideCaptures::enter(driver)?;
                event.wait(driver)
            };
            let mut space = self.lock_space();
            match answer {
                // Where the fence was given up meanwhile, the wait was for another record of the event;
                // this then does nothing.
                Ok(()) => {
                    space.pass(fence);
                    space.host_waits += 1;
                    waited = true;
                }
                // As where it is asked about: a capture has it, and another is to be recorded.
                Err(failure) if failure.is_of_capture() => {
                    space.is_captured(fence);
                }
                Err(failure) => refused = refused.or(Some(failure)),
            }
        }
        let suffices = is_enough(&self.lock_space());
        let lost = if suffices { Ok(false) } else { self.wait_for_lost() };
        waited |= matches!(lost, Ok(true));
        match (refused, lost) {
            (Some(failure), _) if !waited => Err(failure.into()),
            (None, Err(error)) if !waited => Err(error),
            _ => Ok(waited),
        }
    }

    /// Waits for the device where something freed was used on streams that nobody here can record on: those that ended
    /// without a last event, and other threads' own. Not beside a capture that is known of, which that would end.
    /// Whether it has waited.
    fn wait_for_lost(&self) -> Result<bool> {
        // What is lost from here on is not waited for.
        let mark = {
            let space = self.lock_space();
            if !space.uses.has_due() {
                return Ok(false);
            }
            self.mark_of_every_stream(&space)
        };
        if device_is_capturing(&self.device)? {
            return Ok(false);
        }
        let driver = self.device.driver();
        let _beside = BesideCaptures::enter(driver)?;
        let waited = wait_for_context(driver)?;
        if waited {
            let mut space = self.lock_space();
            space.pass_mark(&mark);
            space.host_waits += 1;
        }
        Ok(waited)
    }
}

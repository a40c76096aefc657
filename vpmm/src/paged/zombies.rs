//! Phase 0: addresses whose memory lives elsewhere are unmapped once nothing uses them.
//! And the questions to the driver about fences, which are asked without the pool's lock.

use super::PagedPool;
use super::space::Space;
use crate::capture::BesideCaptures;
use crate::error::Result;
use crate::fence::{Fence, TimelineId};
use crate::region::{Region, State};

/// Pages unmapped within one call: the cost of unmapping follows the pages,
/// and one request should not pay for all.
const PAGES_PER_CALL: u64 = 64;

impl PagedPool {
    /// Asks about the zombies of one stream (each call the next stream's), and unmaps what may be.
    /// One query, and a second where the first says yes; no call at all where there is no zombie.
    pub(super) fn reap(&self) -> Result<()> {
        let oldest = {
            let mut space = self.lock_space();
            if space.map.totals().regions(State::Zombie) == 0 {
                return Ok(());
            }
            space.next_zombie_fence()
        };
        if let Some(oldest) = oldest {
            // The newest answers for all the others, but may be long in coming.
            if self.ask(oldest)? {
                let newest =
                    self.lock_space().map.newest_zombie(oldest.timeline).map(Region::fence);
                newest.map_or(Ok(true), |newest| self.ask(newest))?;
            }
        }
        self.reap_ready();
        Ok(())
    }

    /// Unmaps some zombies whose fence has passed. What the driver refuses to unmap stays a zombie.
    pub(super) fn reap_ready(&self) {
        self.reap_pages(PAGES_PER_CALL);
    }

    /// Unmaps zombies whose fence has passed, at most so many pages of them.
    pub(super) fn reap_pages(&self, most: u64) {
        let mut left = most;
        while left > 0 {
            let (id, start, bytes) = {
                let mut space = self.lock_space();
                let Some(zombie) = space.map.ready_zombies().next() else { return };
                let (whole, start) = (zombie.id(), zombie.start());
                let bytes = zombie.bytes().min(left.saturating_mul(self.config.page));
                (space.take_head(whole, bytes, State::Transit, Fence::PASSED), start, bytes)
            };
            // SAFETY: a zombie is whole pages that the pool mapped and has not unmapped; its fence
            // was seen complete by the host, and that fence covers every use of these addresses:
            // the caller freed the memory before its pages moved.
            let unmapped = unsafe { crate::mapping::unmap(self.device.driver(), start, bytes) };
            let mut space = self.lock_space();
            if unmapped.is_err() {
                space.set_zombie(id, Fence::PASSED);
                space.failed_unmaps += 1;
                return;
            }
            space.aliases.remove(start, bytes);
            space.set_hole(id);
            left -= bytes / self.config.page;
        }
    }

    /// Before a request takes what needs more than its own stream's order: asks about every stream
    /// that something waits for, or about those of deferred frees and those that have ended alone where
    /// questions may give no memory away.
    pub(super) fn ask_all(&self) -> Result<()> {
        if self.config.reuse.opportunistic {
            return self.ask_every_stream();
        }
        let deferred = self.ask_deferred();
        let ended =
            self.ask_streams(|space, timeline| space.timelines.newest_of_ended(timeline).is_some());
        deferred.and(ended)
    }

    /// Asks about every stream that something waits for. One that the driver refuses to answer for is no reason
    /// not to ask about the others: the first such failure is told when all were asked.
    pub(super) fn ask_every_stream(&self) -> Result<()> {
        let recorded = self.record_due();
        let asked = self.ask_streams(|space, timeline| space.timelines.newest(timeline).is_some());
        recorded.map_err(Into::into).and(asked)
    }

    /// Asks about some of the streams.
    fn ask_streams(&self, some: impl Fn(&Space, TimelineId) -> bool) -> Result<()> {
        let timelines: Vec<TimelineId> = {
            let space = self.lock_space();
            space.timelines.ids().filter(|timeline| some(&space, *timeline)).collect()
        };
        self.ask_each(timelines)
    }

    /// Asks about each of some streams, whatever comes of the others: see
    /// [`ask_every_stream`](Self::ask_every_stream).
    pub(super) fn ask_each(&self, timelines: impl IntoIterator<Item = TimelineId>) -> Result<()> {
        let answers = timelines.into_iter().map(|timeline| self.ask_timeline(timeline));
        answers.fold(Ok(()), Result::and)
    }

    /// Asks about one stream: the newest fence first, because it answers for all; else how far the stream has come,
    /// by twice as many more each time and then between the last two, however many frees it has come past.
    fn ask_timeline(&self, timeline: TimelineId) -> Result<()> {
        let newest = self.lock_space().timelines.newest(timeline);
        let Some(newest) = newest else { return Ok(()) };
        if self.ask(newest)? {
            return Ok(());
        }
        let (mut entries, mut not_yet, mut grows) = (0, newest.sequence, true);
        loop {
            let fence = self.lock_space().timelines.open_after(timeline, entries, not_yet);
            let Some(fence) = fence else { return Ok(()) };
            if self.ask(fence)? {
                entries = if grows { 2 * entries + 1 } else { entries / 2 };
            } else if entries == 0 {
                return Ok(());
            } else {
                (entries, not_yet, grows) = (entries / 2, fence.sequence, false);
            }
        }
    }

    /// Asks the driver about one fence, and notes it when it is complete: then it has passed, unless
    /// questions may give no memory away.
    pub(super) fn ask(&self, fence: Fence) -> Result<bool> {
        let driver = self.device.driver();
        let event = {
            let space = self.lock_space();
            match space.timelines.event(fence) {
                Some(event) => event,
                None => return Ok(space.timelines.is_complete(fence)),
            }
        };
        let answer = {
            let _beside = BesideCaptures::enter(driver)?;
            event.is_complete(driver)
        };
        let complete = match answer {
            // A capture began and ended around the record, and has the event. A later fence of the
            // stream answers for this one; a use on it is recorded anew.
            Err(failure) if failure.is_of_capture() => {
                self.lock_space().is_captured(fence);
                false
            }
            answer => answer?,
        };
        if complete {
            // Where the fence was given up while the question was out, the answer is about another
            // record of the event; these then do nothing.
            let mut space = self.lock_space();
            if self.config.reuse.opportunistic {
                space.pass(fence);
            } else {
                space.see_complete(fence);
            }
        }
        Ok(complete)
    }
}

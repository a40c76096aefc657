//! Phase 1: memory that is mapped, contiguous, and usable without waiting.

use super::space::Space;
use crate::fence::{Fence, TimelineId};
use crate::region::{NodeId, Region, State};
use crate::units::DevicePtr;

impl Space {
    /// Best fit over what the stream freed itself and what is idle: the smallest region that is
    /// large enough, the stream's own where two are alike. O(log regions), no driver call.
    pub(super) fn place(&mut self, timeline: TimelineId, bytes: u64) -> Option<DevicePtr> {
        let own = self.map.best_pending(timeline, bytes);
        let idle = self.map.best_idle(bytes);
        let best = match (own, idle) {
            (Some(own), Some(idle)) if idle.bytes() < own.bytes() => idle,
            (Some(own), _) => own,
            (None, idle) => idle?,
        };
        let id = best.id();
        let head = self.take_head(id, bytes, State::Transit, Fence::PASSED);
        Some(self.hand_out(head, timeline))
    }

    /// Best fit over runs of neighbours that were freed apart: regions with different fences stay
    /// apart in the trees so that none waits for more than its own work, but the stream that
    /// freed them, or anybody once they have passed, needs no fence at all.
    ///
    /// Idle neighbours are one region already, so every run of several has a region of the
    /// stream's own in it. O(regions the stream has pending).
    pub(super) fn place_in_run(&mut self, timeline: TimelineId, bytes: u64) -> Option<DevicePtr> {
        let mut best: Option<(u64, NodeId)> = None;
        for own in self.map.pending(timeline) {
            // A run is looked at once, from its first region of the stream's own.
            let Some(first) = self.run_start(own, timeline) else { continue };
            let total = self.run_bytes(first, timeline);
            if total >= bytes && best.is_none_or(|(least, _)| total < least) {
                best = Some((total, first));
            }
        }
        let (_, first) = best?;
        let parts = self.take_run(first, bytes);
        let whole = self.join_transit(&parts)?;
        Some(self.hand_out(whole, timeline))
    }

    /// The first region of the run that one of the stream's own is in; `None` where another of its own comes
    /// before that. O(1): idle neighbours are one.
    fn run_start(&self, own: &Region, timeline: TimelineId) -> Option<NodeId> {
        let mut first = own.id();
        while let Some(before) = self.map.previous(first).filter(|r| Self::usable_by(r, timeline)) {
            if before.state() == State::Pending {
                return None;
            }
            first = before.id();
        }
        Some(first)
    }

    fn run_bytes(&self, first: NodeId, timeline: TimelineId) -> u64 {
        let mut total = self.map.region(first).bytes();
        let mut last = first;
        while let Some(after) = self.map.next(last).filter(|r| Self::usable_by(r, timeline)) {
            total += after.bytes();
            last = after.id();
        }
        total
    }

    /// Takes `bytes` from the start of a run, region by region, into transit.
    pub(super) fn take_run(&mut self, first: NodeId, bytes: u64) -> Vec<NodeId> {
        let mut parts = Vec::new();
        let mut next = Some(first);
        let mut missing = bytes;
        while let Some(id) = next.filter(|_| missing > 0) {
            next = self.map.next(id).map(Region::id);
            let take = missing.min(self.map.region(id).bytes());
            let fence = self.map.region(id).fence();
            parts.push(self.take_head(id, take, State::Transit, fence));
            missing -= take;
        }
        parts
    }
}

//! Phase 2, on paper: which hole, which pages move into it, how many are new.
//!
//! ```text
//!        [-10][1][4][-3][hole …]                 a request for 11
//!          └────8────┐   │
//!        [~8][-2][1][4][-3 ······8][hole …]      8 pages more stand behind the 3
//!                      └────11────┘
//! ```
//!
//! Planning moves regions into transit, so that no other thread takes them while the driver
//! works without the lock; [`Space::abandon`] moves them back.

use super::space::Space;
use crate::fence::{Fence, TimelineId};
use crate::ordering::PendingPolicy;
use crate::region::{NodeId, Region, State};

/// Memory that moves: a region in transit that carries the fence of its last use.
pub(super) struct Source {
    pub(super) region: NodeId,
    pub(super) fence: Fence,
}

/// A request's way through phase 2.
pub(super) struct Plan {
    /// Regions in transit that are in place already, below and above the target.
    pub(super) below: Vec<NodeId>,
    pub(super) above: Vec<NodeId>,
    /// The part of a hole that pages are mapped into, in transit.
    pub(super) target: NodeId,
    pub(super) sources: Vec<Source>,
    pub(super) new_bytes: u64,
}

/// Where a request could stand.
#[derive(Clone, Copy)]
struct Site {
    hole: NodeId,
    /// The first region of the usable run below the hole, if that is part of the site.
    below: Option<NodeId>,
    /// How many of the bytes usable above the hole are part of the site.
    above: u64,
    /// Bytes of the hole that have to be mapped.
    fill: u64,
}

/// What planning came to.
pub(super) enum Planned {
    Ready(Plan),
    /// No hole is large enough.
    NeedsAddresses,
    /// Free memory and the limit together do not cover the request.
    NoMemory,
}

impl Space {
    /// Plans `bytes` for a stream; `room` is how many bytes of new memory the limit allows, and
    /// `policy` when the stream may be made to wait for others: never, if there is none.
    pub(super) fn plan(
        &mut self,
        timeline: TimelineId,
        bytes: u64,
        room: u64,
        policy: Option<PendingPolicy>,
    ) -> Planned {
        let Some(site) = self.choose_site(timeline, bytes) else {
            // Addresses that nothing can be mapped at would stay the pool's.
            let covered = self.harvestable(timeline, policy).saturating_add(room);
            let serves = covered / self.page * self.page >= bytes;
            return if serves { Planned::NeedsAddresses } else { Planned::NoMemory };
        };
        let mut plan = self.occupy(site);
        let mut missing = site.fill;
        missing -= self.harvest_own_and_idle(timeline, missing, &mut plan.sources);
        if policy == Some(PendingPolicy::WaitFirst) {
            missing -= self.harvest_others(timeline, missing, &mut plan.sources);
        }
        plan.new_bytes = missing.min(room / self.page * self.page);
        missing -= plan.new_bytes;
        if policy.is_some() {
            missing -= self.harvest_others(timeline, missing, &mut plan.sources);
        }
        if missing > 0 {
            self.abandon(plan, false);
            return Planned::NoMemory;
        }
        Planned::Ready(plan)
    }

    /// The site with the least to map, then the smallest hole, then the lowest. O(holes).
    ///
    /// A site is some of: free memory right below a hole, the hole, free memory right above it.
    /// The tail of the space is one among them: free memory with the great hole behind it.
    fn choose_site(&self, timeline: TimelineId, bytes: u64) -> Option<Site> {
        let mut best: Option<(u64, u64, Site)> = None;
        for hole in self.map.holes() {
            let (first, below) = self.usable_below(hole, timeline);
            let above = self.usable_above(hole, timeline);
            let (id, size) = (hole.id(), hole.bytes());
            let sites = [
                (below + size >= bytes).then(|| Site {
                    hole: id,
                    below: first,
                    above: 0,
                    fill: bytes.saturating_sub(below),
                }),
                (above + size >= bytes).then(|| Site {
                    hole: id,
                    below: None,
                    above,
                    fill: bytes.saturating_sub(above),
                }),
                (below + size + above >= bytes && below + size < bytes).then(|| Site {
                    hole: id,
                    below: first,
                    above: bytes - below - size,
                    fill: size,
                }),
            ];
            for site in sites.into_iter().flatten() {
                if best.is_none_or(|(fill, least, _)| (site.fill, size) < (fill, least)) {
                    best = Some((site.fill, size, site));
                }
            }
        }
        best.map(|(.., site)| site)
    }

    fn usable_below(&self, hole: &Region, timeline: TimelineId) -> (Option<NodeId>, u64) {
        let (mut first, mut total, mut at) = (None, 0, hole.id());
        while let Some(before) = self.map.previous(at).filter(|r| Self::usable_by(r, timeline)) {
            at = before.id();
            first = Some(at);
            total += before.bytes();
        }
        (first, total)
    }

    fn usable_above(&self, hole: &Region, timeline: TimelineId) -> u64 {
        let (mut total, mut at) = (0, hole.id());
        while let Some(after) = self.map.next(at).filter(|r| Self::usable_by(r, timeline)) {
            at = after.id();
            total += after.bytes();
        }
        total
    }

    /// Moves a site into transit. Its free parts keep their fences: should the plan be abandoned,
    /// they are free again under the same terms.
    fn occupy(&mut self, site: Site) -> Plan {
        let hole = site.hole;
        let after = self.map.next(hole).map(Region::id);
        let below = match site.below {
            Some(first) => {
                let end = self.map.region(hole).start();
                let below = end - self.map.region(first).start();
                self.take_run(first, below)
            }
            None => Vec::new(),
        };
        let target = if site.above > 0 {
            self.take_tail(hole, site.fill, State::Transit, Fence::PASSED)
        } else {
            self.take_head(hole, site.fill, State::Transit, Fence::PASSED)
        };
        let above = match after.filter(|_| site.above > 0) {
            Some(first) => self.take_run(first, site.above),
            None => Vec::new(),
        };
        Plan { below, above, target, sources: Vec::new(), new_bytes: 0 }
    }

    /// Takes up to `missing` bytes that need no wait: the stream's own, the oldest first, then
    /// idle ones, the smallest regions first. Returns how many it found.
    pub(super) fn harvest_own_and_idle(
        &mut self,
        timeline: TimelineId,
        missing: u64,
        sources: &mut Vec<Source>,
    ) -> u64 {
        if !self.shared.is_empty() {
            return 0; // what other processes may have stays where it is
        }
        let mut found = 0;
        while found < missing {
            let own = self.map.oldest_pending(timeline);
            let Some(region) = own.or_else(|| self.map.idle().next()) else { break };
            let id = region.id();
            found += self.harvest(id, missing - found, sources);
        }
        found
    }

    /// Takes up to `missing` bytes that other streams may still use, the oldest first.
    pub(super) fn harvest_others(
        &mut self,
        timeline: TimelineId,
        missing: u64,
        sources: &mut Vec<Source>,
    ) -> u64 {
        if missing == 0 || !self.shared.is_empty() {
            return 0;
        }
        let others = self.timelines.ids().filter(|other| *other != timeline);
        let pending = others.flat_map(|other| self.map.pending(other));
        let mut by_age: Vec<_> =
            pending.map(|region| (region.fence().sequence, region.id())).collect();
        by_age.sort_unstable_by_key(|(sequence, _)| *sequence);
        let mut found = 0;
        for (_, id) in by_age {
            if found == missing {
                break;
            }
            found += self.harvest(id, missing - found, sources);
        }
        found
    }

    /// What the two before would find at most. O(the stream's pending regions).
    fn harvestable(&self, timeline: TimelineId, policy: Option<PendingPolicy>) -> u64 {
        if !self.shared.is_empty() {
            return 0;
        }
        let pending = match policy {
            // What waits for uses on further streams is nobody's to have.
            Some(_) => self.map.totals().bytes(State::Pending) - self.uses.deferred_bytes(),
            None => self.map.pending(timeline).map(Region::bytes).sum(),
        };
        self.map.totals().bytes(State::Idle) + pending
    }

    /// Takes the first pages of one region; what is left over keeps its stream, fence and age.
    fn harvest(&mut self, id: NodeId, missing: u64, sources: &mut Vec<Source>) -> u64 {
        let region = self.map.region(id);
        let (bytes, fence) = (region.bytes().min(missing), region.fence());
        let region = self.take_head(id, bytes, State::Transit, fence);
        sources.push(Source { region, fence });
        bytes
    }

    /// Puts everything back as it was before the plan. A target that the driver would not unmap
    /// again is a zombie that may be unmapped at any time: no work has ever used it.
    pub(super) fn abandon(&mut self, plan: Plan, target_is_mapped: bool) {
        if target_is_mapped {
            self.set_zombie(plan.target, Fence::PASSED);
            self.failed_unmaps += 1;
        } else {
            self.set_hole(plan.target);
        }
        let sources = plan.sources.into_iter().map(|source| source.region);
        for part in sources.chain(plan.below).chain(plan.above) {
            let fence = self.map.region(part).fence();
            self.set_free(part, fence);
        }
    }
}

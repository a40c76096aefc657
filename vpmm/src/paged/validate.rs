//! The invariants, checked from scratch.

use std::collections::HashMap;

use super::PagedPool;
use super::deferred::{Deferred, Kept};
use super::small::Small;
use super::space::Space;
use crate::fence::Fence;
use crate::region::{Region, State, Totals, joinable};
use crate::validate::Violation;

impl PagedPool {
    /// Checks I1, I2, I3 and I7 over the whole pool. O(pages + regions + uses), under the pool's lock.
    pub(crate) fn validate(&self) -> Result<(), Violation> {
        let space = self.lock_space();
        space.check_partition()?;
        space.check_residence()?;
        space.check_order()?;
        space.check_metadata()?;
        self.check_uses(&space)
    }

    /// I3 for what is used on further streams: every use is of an allocation, everything deferred
    /// waits for something, and small allocations are in both books.
    fn check_uses(&self, space: &Space) -> Result<(), Violation> {
        let broken = |detail: String| Err(Violation { invariant: "I3 Order", detail });
        let small = self.small.as_ref();
        if let Some(Err(detail)) = small.map(Small::check) {
            return broken(detail);
        }
        for (address, uses) in space.uses.live() {
            // In the middle of a free: taken from the caller, and not deferred yet.
            let of_pages = space.map.containing(address).is_some_and(|region| {
                let taken = matches!(region.state(), State::Live | State::Transit);
                taken && region.start() == address
            });
            let of_small = small.is_some_and(|small| {
                small.containing(address).is_some_and(|(start, _)| start == address)
                    || small.keeps(address)
            });
            if !of_pages && !of_small {
                return broken(format!("{address:#x} is used on {} streams, and free", uses.len()));
            }
        }
        if !space.uses.agree() {
            return broken("what each stream is used for is not what is noted".to_owned());
        }
        if !space.uses.deferred().agree() {
            return broken("what deferred frees wait for is not what is noted".to_owned());
        }
        for deferred in space.uses.deferred().iter() {
            if let Some(of) = deferred
                .uses
                .iter()
                .find(|of| of.fence.is_some_and(|fence| space.timelines.is_complete(fence)))
            {
                return broken(format!("{:?} waits for {of:?}, which is over", deferred.kept));
            }
            match deferred.kept {
                Kept::Pages(id) => {
                    let region = space.map.region(id);
                    let waits = region.state() == State::Pending
                        && region.fence().timeline == space.uses.timeline();
                    if !waits || deferred.uses.is_empty() {
                        return broken(format!(
                            "the {:?} region at {:#x} is deferred for {} uses",
                            region.state(),
                            region.start(),
                            deferred.uses.len()
                        ));
                    }
                }
                Kept::Small(address) => {
                    let kept = small.is_some_and(|small| small.keeps(address));
                    if !kept && !deferred.is_being_freed() {
                        return broken(format!("the small allocation at {address:#x} is not kept"));
                    }
                }
            }
        }
        let of_pages = |deferred: &&Deferred| matches!(deferred.kept, Kept::Pages(_));
        let deferred = space.uses.deferred().iter().filter(of_pages).count();
        let waiting = || space.map.pending(space.uses.timeline());
        let (regions, bytes) = (waiting().count(), waiting().map(Region::bytes).sum::<u64>());
        if (regions, bytes) != (deferred, space.uses.deferred_bytes()) {
            let entered = space.uses.deferred_bytes();
            return broken(format!(
                "{regions} regions wait for uses, of {bytes} bytes; {deferred} are deferred, of {entered}"
            ));
        }
        Ok(())
    }
}

impl Space {
    fn check_partition(&self) -> Result<(), Violation> {
        let broken = |detail: String| Err(Violation { invariant: "I1 Partition", detail });
        for (number, chunk) in self.chunks.iter().enumerate() {
            let mut at = chunk.base();
            let of_chunk = self.map.iter().filter(|region| region.reservation() == number as u32);
            let mut before: Option<&crate::region::Region> = None;
            for region in of_chunk {
                if region.start() != at || region.bytes() == 0 {
                    return broken(format!(
                        "{:#x} is followed by a region at {:#x}",
                        at,
                        region.start()
                    ));
                }
                if before.is_some_and(|before| joinable(before, region)) {
                    return broken(format!("the neighbours at {:#x} could be one", region.start()));
                }
                if !(region.start() - chunk.base()).is_multiple_of(self.page)
                    || !region.bytes().is_multiple_of(self.page)
                {
                    return broken(format!(
                        "the region at {:#x} is not whole pages",
                        region.start()
                    ));
                }
                at = region.end();
                before = Some(region);
            }
            if at != chunk.base() + chunk.bytes() {
                return broken(format!("reservation {number} is covered up to {at:#x} only"));
            }
        }
        let mut totals = HashMap::new();
        for region in self.map.iter() {
            let (bytes, count) = totals.entry(region.state() as usize).or_insert((0, 0));
            *bytes += region.bytes();
            *count += 1;
        }
        let kept: Totals = self.map.totals();
        for state in State::ALL {
            let counted: (u64, u64) = totals.get(&(state as usize)).copied().unwrap_or_default();
            if counted != (kept.bytes(state), kept.regions(state)) {
                return broken(format!("{state:?} is {counted:?}, the totals say {kept:?}"));
            }
        }
        Ok(())
    }

    fn check_residence(&self) -> Result<(), Violation> {
        let broken = |detail: String| Err(Violation { invariant: "I2 Residence", detail });
        let mut seen = std::collections::HashSet::new();
        for extent in self.chunks.iter().flat_map(|chunk| chunk.used().0) {
            if !seen.insert(extent) {
                return broken(format!("{extent:?} has two current mappings"));
            }
        }
        if seen.len() as u64 * self.page != self.mapped {
            return broken(format!("{} extents, but {} bytes mapped", seen.len(), self.mapped));
        }
        for region in self.map.iter() {
            let chunk = &self.chunks[region.reservation() as usize];
            let resident = chunk.extents(region.start(), region.bytes()).flatten().count() as u64;
            let pages = region.bytes() / self.page;
            let right = match region.state() {
                State::Live | State::Idle | State::Pending => resident == pages,
                State::Zombie | State::Hole => resident == 0,
                State::Transit => true,
            };
            if !right {
                return broken(format!(
                    "{resident} of {pages} pages of the {:?} region at {:#x} have memory",
                    region.state(),
                    region.start()
                ));
            }
        }
        let mut owners = 0;
        for region in self.map.iter().filter(|region| region.state() == State::Live) {
            owners += 1;
            let chunk = &self.chunks[region.reservation() as usize];
            if chunk.owner(region.start()).map(|(id, _)| id) != Some(region.id()) {
                return broken(format!(
                    "the allocation at {:#x} is not found by its address",
                    region.start()
                ));
            }
        }
        let entered: usize = self.chunks.iter().map(|chunk| chunk.used().1).sum();
        if entered != owners {
            return broken(format!("{entered} owners entered, {owners} allocations"));
        }
        self.check_aliases()
    }

    fn check_aliases(&self) -> Result<(), Violation> {
        let broken = |detail: String| Err(Violation { invariant: "I2 Residence", detail });
        for (address, extent) in self.aliases.iter() {
            // In transit: being unmapped.
            let state = self.map.containing(address).map(crate::region::Region::state);
            if !matches!(state, Some(State::Zombie | State::Transit)) {
                return broken(format!(
                    "{extent:?} is an alias at {address:#x}, which is {state:?}"
                ));
            }
        }
        let (mapped, counted) = (self.aliases.iter().count() as u64, self.aliases.counted());
        if mapped != counted {
            return broken(format!("{mapped} pages of zombies, {counted} counted"));
        }
        Ok(())
    }

    fn check_order(&self) -> Result<(), Violation> {
        let broken = |detail: String| Err(Violation { invariant: "I3 Order", detail });
        let mut holders: HashMap<u64, (Fence, u32)> = HashMap::new();
        for region in self.map.iter().filter(|region| region.fence() != Fence::PASSED) {
            let fence = region.fence();
            if fence.timeline == self.uses.timeline() {
                continue; // kept for uses, which are checked with those
            }
            let waits = matches!(region.state(), State::Pending | State::Zombie);
            if !waits && region.state() != State::Transit {
                return broken(format!(
                    "the {:?} region at {:#x} carries a fence",
                    region.state(),
                    region.start()
                ));
            }
            let over = match region.state() {
                State::Zombie => self.timelines.is_complete(fence),
                _ => self.timelines.has_passed(fence),
            };
            if over {
                if waits {
                    return broken(format!(
                        "the region at {:#x} waits for a fence that has passed",
                        region.start()
                    ));
                }
                continue;
            }
            if self.timelines.event(fence).is_none() {
                return broken(format!(
                    "the fence of the region at {:#x} has no event",
                    region.start()
                ));
            }
            holders.entry(fence.sequence).or_insert((fence, 0)).1 += 1;
        }
        let live = self.uses.live().flat_map(|(_, uses)| uses);
        let deferred = self.uses.deferred();
        let of_deferred = deferred.iter().flat_map(|deferred| &deferred.uses);
        let of_uses = live.chain(of_deferred).filter_map(|of| of.fence);
        for fence in of_uses.chain(deferred.iter().map(|deferred| deferred.own)) {
            if !self.timelines.has_passed(fence) {
                holders.entry(fence.sequence).or_insert((fence, 0)).1 += 1;
            }
        }
        for (fence, counted) in holders.values() {
            if self.timelines.holders(*fence) != *counted {
                return broken(format!(
                    "{fence:?} has {counted} holders, {} entered",
                    self.timelines.holders(*fence)
                ));
            }
        }
        let all: u64 = holders.values().map(|(_, counted)| u64::from(*counted)).sum();
        if all != self.timelines.total_holders() {
            return broken(format!(
                "{all} holders of fences, {} entered",
                self.timelines.total_holders()
            ));
        }
        Ok(())
    }

    fn check_metadata(&self) -> Result<(), Violation> {
        let broken = |detail: String| Err(Violation { invariant: "I7 Bounded metadata", detail });
        let regions = self.map.iter().count();
        if self.map.nodes() != regions {
            return broken(format!("{} nodes for {regions} regions", self.map.nodes()));
        }
        let live = self.uses.live().map(|(_, uses)| uses.len());
        let deferred = self.uses.deferred().iter().map(|deferred| 1 + deferred.uses.len());
        let uses: usize = live.chain(deferred).sum();
        let allowed = 2 * (regions + uses) + 34 * self.timelines.slots();
        if self.timelines.entries() > allowed {
            return broken(format!("{} fences for {regions} regions", self.timelines.entries()));
        }
        for (follower, followed) in self.follows.iter() {
            let mut seen = std::collections::HashSet::new();
            for (other, until) in followed {
                if *other == follower || !seen.insert(other) {
                    return broken(format!("{follower:?} follows {other:?}, or twice"));
                }
                if *until > self.timelines.last_sequence() {
                    return broken(format!("{follower:?} follows what is still to come"));
                }
            }
        }
        Ok(())
    }
}

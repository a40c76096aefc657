//! Phase 2, done: pages mapped at fresh addresses, new pages made, nothing copied.
//!
//! The driver's calls run without the pool's lock, so that other threads go on allocating from
//! what is mapped. One thread at a time is in here (the `growing` lock), so that two requests
//! cannot each starve on what the other holds in transit.

use std::ptr;
use std::sync::MutexGuard;

use cuda_sys::types::{CUstream, CUstream_flags_enum};

use super::plan::{Plan, Planned};
use super::small::Small;
use super::space::Space;
use super::{Caller, PagedPool};
use crate::capture::BesideCaptures;
use crate::device::StreamHandle;
use crate::driver::Failure;
use crate::error::{Error, Result};
use crate::event::Event;
use crate::fence::Fence;
use crate::location::Location;
use crate::mapping::NewMappings;
use crate::physical::{self, Extent};
use crate::region::{Region, State};
use crate::reservation::Reservation;
use crate::units::DevicePtr;

impl PagedPool {
    /// Makes `bytes` contiguous for the caller's stream, by moving free pages and adding new ones.
    pub(super) fn remap(&self, caller: Caller, bytes: u64) -> Result<DevicePtr> {
        let growing = self.lock_growing();
        self.retry_orphans();
        let mut trims = self.backing.budget().limit().and(self.small.as_ref());
        let mut plan = loop {
            let room = self.room()?;
            let mut space = self.lock_space();
            let timeline = space.timeline(caller.stream_id);
            // Another thread may have freed something while this one waited for the lock.
            let placed =
                space.place(timeline, bytes).or_else(|| space.place_in_run(timeline, bytes));
            if let Some(ptr) = placed {
                return Ok(ptr);
            }
            match space.plan(timeline, bytes, room, self.config.waits()) {
                Planned::Ready(plan) => break plan,
                Planned::NoMemory => {
                    drop(space);
                    // What the driver holds unused for small requests counts towards the limit.
                    match trims.take() {
                        Some(small) => self.trim_small(small)?,
                        None => return Err(self.out_of_memory(bytes)),
                    }
                }
                Planned::NeedsAddresses => {
                    drop(space);
                    self.reserve(bytes)?;
                }
            }
        };
        let mut new = Vec::new();
        let result = self.carry_out(&mut plan, caller, &mut new);
        let ptr = match result {
            Ok(extents) => self.commit(&mut self.lock_space(), caller, plan, extents),
            Err(unfinished) => return Err(self.give_up(plan, new, unfinished, bytes)),
        };
        drop(growing);
        self.reap_ready();
        Ok(ptr)
    }

    /// Makes the pages that a new pool starts with, as idle memory.
    pub(super) fn preallocate(&self, bytes: u64) -> Result<()> {
        let _growing = self.lock_growing();
        let mut plan = {
            let mut space = self.lock_space();
            let hole = space.map.holes().find(|hole| hole.bytes() >= bytes).map(Region::id);
            let Some(hole) = hole else {
                return Err(Error::AddressSpaceExhausted { bytes });
            };
            let target = space.take_head(hole, bytes, State::Transit, Fence::PASSED);
            Plan {
                below: Vec::new(),
                above: Vec::new(),
                target,
                sources: Vec::new(),
                new_bytes: bytes,
            }
        };
        let mut new = Vec::new();
        let result = self.create(&mut new, bytes).map_err(Unfinished::from);
        let result = result.and_then(|()| self.map(&plan, &new).map(NewMappings::keep));
        match result {
            Ok(()) => {
                let mut space = self.lock_space();
                self.enter_target(&mut space, &mut plan, &new);
                space.set_free(plan.target, Fence::PASSED);
                Ok(())
            }
            Err(unfinished) => Err(self.give_up(plan, new, unfinished, bytes)),
        }
    }

    /// Reserves a further chunk that holds at least `bytes`.
    pub(super) fn reserve(&self, bytes: u64) -> Result<()> {
        let bytes = bytes.max(self.config.va_bytes);
        let reservation = Reservation::new(self.device.driver(), bytes).map_err(|failure| {
            if failure.is_out_of_memory() {
                Error::AddressSpaceExhausted { bytes }
            } else {
                failure.about(bytes)
            }
        })?;
        self.lock_space().add_chunk(reservation);
        Ok(())
    }

    /// How many bytes of new memory the limit allows, and the device could have. What nothing can come of is not to be
    /// found out page by page, with all that others might want of the device taken meanwhile.
    fn room(&self) -> Result<u64> {
        let mapped = self.lock_space().mapped;
        let of_device = match self.backing.location() {
            Location::Device => self.device.total_memory()?.saturating_sub(mapped),
            Location::Host | Location::HostNuma(_) => u64::MAX,
        };
        let Some(limit) = self.backing.budget().limit() else { return Ok(of_device) };
        let small =
            self.small.as_ref().map_or(Ok(0), |small| small.reserved(self.device.driver()))?;
        let own = limit.saturating_sub(mapped).saturating_sub(small);
        Ok(own.min(self.backing.budget().room()).min(of_device))
    }

    /// Everything that the driver has to do for a plan. On failure what it did is undone.
    /// Pages that were made are in `new`, whatever the outcome.
    fn carry_out(
        &self,
        plan: &mut Plan,
        caller: Caller,
        new: &mut Vec<Extent>,
    ) -> Result<Vec<Extent>, Unfinished> {
        if let Err(failure) = self.create(new, plan.new_bytes) {
            if !failure.is_out_of_memory() {
                return Err(failure.into());
            }
            // The device has no more. What is free by now may make up for it: what was freed, or has become idle,
            // since the plan was made, and what other streams have freed.
            let made = new.len() as u64 * self.config.page;
            let missing = plan.new_bytes - made;
            let mut space = self.lock_space();
            let timeline = space.timeline(caller.stream_id);
            let mut found = space.harvest_own_and_idle(timeline, missing, &mut plan.sources);
            if self.config.waits().is_some() {
                found += space.harvest_others(timeline, missing - found, &mut plan.sources);
            }
            plan.new_bytes = made;
            if found < missing {
                return Err(Unfinished { error: None, target_is_mapped: false });
            }
        }
        let extents: Vec<Extent> = {
            let space = self.lock_space();
            let sources = plan.sources.iter().map(|source| space.map.region(source.region));
            let moved = sources.flat_map(|region| {
                let chunk = &space.chunks[region.reservation() as usize];
                chunk.extents(region.start(), region.bytes()).flatten()
            });
            moved.chain(new.iter().copied()).collect()
        };
        let mappings = self.map(plan, &extents)?;
        if let Err(failure) = self.hold_back(plan, caller) {
            let undone = mappings.undo();
            return Err(Unfinished { error: Some(failure), target_is_mapped: undone.is_err() });
        }
        mappings.keep();
        Ok(extents)
    }

    /// Has the driver give back what it holds unused for small requests, with what waited for further streams and
    /// need not any more.
    pub(super) fn trim_small(&self, small: &Small) -> Result<(), Failure> {
        // What fails is as it was, and told to the next small request or trim.
        let _ = self.free_small_at_once();
        small.trim_to(self.device.driver(), 0)
    }

    /// Small allocations that only wait to be given to the driver, on a stream made for that, which has nothing else
    /// to do and is waited for: else the driver could not give up what it got. No driver call where there is none.
    fn free_small_at_once(&self) -> Result<()> {
        if !self.lock_space().uses.has_small() {
            return Ok(());
        }
        let asked = self.ask_deferred();
        let driver = self.device.driver();
        let _beside = BesideCaptures::enter(driver)?;
        let flags = CUstream_flags_enum::CU_STREAM_NON_BLOCKING.0;
        let mut stream: CUstream = ptr::null_mut();
        // SAFETY: the pointer is to a live CUstream, and the context is current.
        unsafe { driver.cuStreamCreate(&mut stream, flags) }?;
        let own = StreamHandle::foreign(stream);
        let number = self.id_of(own).map_err(Error::from);
        let freed = number.and_then(|number| self.free_ready_small(number, own));
        // SAFETY: made above, and nobody else has it.
        let waited = unsafe { driver.cuStreamSynchronize(stream) };
        // SAFETY: as above; it is not used after.
        let ended: Result<(), Failure> = unsafe { driver.cuStreamDestroy_v2(stream) };
        asked.and(freed).and(waited.and(ended).map_err(Error::from))
    }

    /// Makes pages. Where the device has none left, what the small requests' pool keeps unused is
    /// given back and the page tried once more.
    fn create(&self, new: &mut Vec<Extent>, bytes: u64) -> Result<(), Failure> {
        let mut trimmed = false;
        for _ in 0..bytes / self.config.page {
            let make = || self.backing.create(self.config.page);
            let extent = match make() {
                Err(failure) if failure.is_out_of_memory() && !trimmed => {
                    trimmed = true;
                    if let Some(small) = &self.small {
                        self.trim_small(small)?;
                    }
                    make()?
                }
                result => result?,
            };
            new.push(extent);
        }
        Ok(())
    }

    /// Maps extents side by side into the plan's target and opens them to the device.
    fn map(&self, plan: &Plan, extents: &[Extent]) -> Result<NewMappings<'_>, Unfinished> {
        let start = self.lock_space().map.region(plan.target).start();
        let mut mappings = NewMappings::at(self.device.driver(), start);
        let mapped = extents.iter().try_for_each(|extent| {
            // SAFETY: the target was a hole and is in transit: reserved, unmapped, this thread's
            // alone, and as long as the extents together. The extents are pages of the pool, or
            // made just now; none is released before the pool's drop.
            unsafe { mappings.push(*extent, self.config.page) }
        });
        match mapped.and_then(|()| self.backing.open(&mappings)) {
            Ok(()) => Ok(mappings),
            Err(failure) => {
                let undone = mappings.undo();
                Err(Unfinished { error: Some(failure), target_is_mapped: undone.is_err() })
            }
        }
    }

    /// Orders the caller's stream after the last uses of memory that other streams freed: one wait
    /// on the GPU for each of those streams, on the newest fence, which covers the older ones.
    fn hold_back(&self, plan: &Plan, caller: Caller) -> Result<(), Failure> {
        let waits: Vec<Event> = {
            let mut space = self.lock_space();
            let own = space.timeline(caller.stream_id);
            let mut newest: Vec<Fence> = Vec::new();
            let foreign = plan.sources.iter().map(|source| source.fence);
            for fence in foreign.filter(|f| *f != Fence::PASSED && f.timeline != own) {
                match newest.iter_mut().find(|known| known.timeline == fence.timeline) {
                    Some(known) if known.sequence < fence.sequence => *known = fence,
                    Some(_) => {}
                    None => newest.push(fence),
                }
            }
            // A fence that has passed meanwhile has no event, and needs none. The regions in
            // transit hold the others, so that their events are not recorded anew before the wait.
            newest.into_iter().filter_map(|fence| space.timelines.event(fence)).collect()
        };
        for event in waits {
            event.hold_back(self.device.driver(), caller.stream)?;
            self.lock_space().device_waits += 1;
        }
        Ok(())
    }

    /// Makes the plan's outcome the state of the pool: pages belong to their new addresses, their
    /// old ones are zombies, and the whole goes to the caller.
    fn commit(
        &self,
        space: &mut Space,
        caller: Caller,
        mut plan: Plan,
        extents: Vec<Extent>,
    ) -> DevicePtr {
        let page = self.config.page;
        let mut aliases = Vec::new();
        for source in &plan.sources {
            let region = space.map.region(source.region);
            let (start, bytes) = (region.start(), region.bytes());
            let chunk = space.chunk_of(source.region);
            for address in (start..start + bytes).step_by(page as usize) {
                let former = chunk.take_extent(address);
                aliases.extend(former.map(|extent| (address, extent)));
            }
            space.pages_moved += bytes / page;
        }
        aliases.into_iter().for_each(|(address, extent)| space.aliases.add(address, extent));
        self.enter_target(space, &mut plan, &extents);
        for source in &plan.sources {
            let fence = space.map.region(source.region).fence();
            space.set_zombie(source.region, fence);
        }
        let target = plan.target;
        let mut parts = plan.below;
        parts.push(target);
        parts.extend(plan.above);
        let whole = space.join_transit(&parts).unwrap_or(target);
        let timeline = space.timeline(caller.stream_id);
        space.hand_out(whole, timeline)
    }

    /// Enters the extents mapped at the target into the page table, and counts the new ones.
    fn enter_target(&self, space: &mut Space, plan: &mut Plan, extents: &[Extent]) {
        let page = self.config.page;
        let start = space.map.region(plan.target).start();
        let chunk = space.chunk_of(plan.target);
        for (address, extent) in (start..).step_by(page as usize).zip(extents) {
            chunk.set_extent(address, *extent);
        }
        space.pages_created += plan.new_bytes / page;
        space.mapped += plan.new_bytes;
        space.peak_mapped = space.peak_mapped.max(space.mapped);
    }

    /// Puts everything back as it was before the plan, and says what went wrong.
    fn give_up(&self, plan: Plan, new: Vec<Extent>, unfinished: Unfinished, bytes: u64) -> Error {
        self.backing.gave_up(new.len() as u64 * self.config.page);
        let orphans = self.give_back(new);
        {
            let mut space = self.lock_space();
            space.orphans.extend(orphans);
            if unfinished.target_is_mapped {
                self.enter_aliases(&mut space, &plan);
            }
            space.abandon(plan, unfinished.target_is_mapped);
        }
        match unfinished.error {
            Some(failure) if !failure.is_out_of_memory() => failure.about(bytes),
            _ => self.out_of_memory(bytes),
        }
    }

    /// Notes that a target that stays mapped is mapped to the sources' pages, as far as that came.
    fn enter_aliases(&self, space: &mut Space, plan: &Plan) {
        let mut address = space.map.region(plan.target).start();
        for source in &plan.sources {
            let region = space.map.region(source.region);
            let chunk = &space.chunks[region.reservation() as usize];
            for extent in chunk.extents(region.start(), region.bytes()).flatten() {
                space.aliases.add(address, extent);
                address += self.config.page;
            }
        }
    }

    /// Gives pages back to the device that never came into use; returns those that it refused.
    pub(super) fn give_back(&self, extents: Vec<Extent>) -> Vec<Extent> {
        let mut orphans = Vec::new();
        // SAFETY: pages made for a plan that was given up, or refused before: in no page table,
        // and this thread's alone.
        unsafe { physical::release_all(self.device.driver(), extents, &mut orphans) };
        orphans
    }

    /// Gives back once more what the driver would not take before; returns how many bytes went.
    pub(super) fn retry_orphans(&self) -> u64 {
        let refused = std::mem::take(&mut self.lock_space().orphans);
        if refused.is_empty() {
            return 0;
        }
        let tried = refused.len();
        let orphans = self.give_back(refused);
        let gone = tried - orphans.len();
        self.lock_space().orphans.extend(orphans);
        gone as u64 * self.config.page
    }

    /// Says where the memory is, small requests' included.
    pub(super) fn out_of_memory(&self, requested_bytes: u64) -> Error {
        let small = self.small.as_ref();
        let small_live = small.map_or(0, Small::live_bytes);
        let driver = self.device.driver();
        // The error to report is that memory ran out, whatever this question comes to.
        let small_mapped =
            small.and_then(|small| small.reserved(driver).ok()).unwrap_or(small_live);
        let space = self.lock_space();
        Error::OutOfMemory {
            requested_bytes,
            free_bytes: space.free_bytes(),
            // What waits for uses on further streams is nobody's to have.
            largest_free_bytes: space.map.largest_free_but(space.uses.timeline()),
            mapped_bytes: space.mapped + small_mapped,
            live_bytes: space.map.totals().bytes(State::Live) + small_live,
            limit_bytes: self.backing.budget().limit(),
            map: None,
        }
    }

    pub(super) fn lock_growing(&self) -> MutexGuard<'_, ()> {
        super::lock(&self.growing)
    }
}

/// A plan that the driver did not let through.
struct Unfinished {
    /// `None` where memory ran out.
    error: Option<Failure>,
    /// The driver would not undo mappings at the target: it has to be unmapped later.
    target_is_mapped: bool,
}

impl From<Failure> for Unfinished {
    fn from(failure: Failure) -> Self {
        Self { error: Some(failure), target_is_mapped: false }
    }
}

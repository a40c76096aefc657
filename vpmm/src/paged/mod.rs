//! The paged profile: the seed design, every request in whole pages.
//!
//! ```text
//! malloc ─ phase 0  one question about zombies; unmap those whose fence has passed      zombies
//!        ─ phase 1  best fit over the stream's own and idle memory                      place
//!                   what streams that it follows have freed                             ordering
//!                   ask about pending fences, then best fit and runs of neighbours      zombies, place
//!        ─ phase 2  a site for the request, pages moved into it, the rest made new      plan, remap
//! free   ─ an event on the caller's stream, then the region is pending;
//!          where others use it too an event on each, and it is nobody's until they passed  recorded, uses
//! ```
//!
//! Locks, in the order in which they may be taken: `growing`, a timeline's `recording`, `space`,
//! the small pool's book. No driver call that may be slow is made under `space`.

mod access;
mod chunk;
mod config;
mod deferred;
mod free_pieces;
mod heap;
mod ordering;
mod place;
mod plan;
mod recorded;
mod remap;
mod report;
mod shared;
mod small;
mod snapshot;
mod space;
mod trim;
mod uses;
mod validate;
mod wait;
mod zombies;

pub use config::PagedConfig;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::backing::Backing;
use crate::capture::{BesideCaptures, stream_is_capturing, wait_at_end};
use crate::device::{Device, StreamHandle};
use crate::driver::{Failure, StreamWatcher};
use crate::error::{Error, Result};
use crate::event::Event;
use crate::ordering::next_pool;
use crate::region::{NodeId, State};
use crate::units::{DevicePtr, round_up};
use config::Checked;
use deferred::Kept;
use small::Small;
use space::Space;
use uses::Uses;

/// Locks without regard to poison: nothing here panics with a lock held, and a panic elsewhere in
/// a caller's thread must not take the pool from all others.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the driver's pools take from the device at a time.
const SMALL_CHUNK_BYTES: u64 = 32 << 20;

/// A stream that was found fit for this pool, by handle for the driver and by id for the books.
#[derive(Clone, Copy)]
struct Caller {
    stream: StreamHandle,
    stream_id: u64,
}

/// A pool of the paged profile.
pub(crate) struct PagedPool {
    /// What marks of this pool carry.
    number: u64,
    device: Device,
    backing: Backing,
    config: Checked,
    growing: Mutex<()>,
    space: Mutex<Space>,
    /// `None` where the device has no memory pools: small requests then take a whole page.
    small: Option<Small>,
    /// The end has begun.
    retired: AtomicBool,
    /// Nothing uses the memory any more.
    quiet: AtomicBool,
}

impl PagedPool {
    pub(crate) fn new(device: &Device, config: &PagedConfig) -> Result<Arc<Self>> {
        let backing =
            Backing::new(device, config.location, config.sharing, config.gpu_direct_rdma)?;
        let checked = config.check(backing.granule_bytes())?;
        let _context = device.enter()?;
        let small = Small::new(device, &backing, config.reuse)?;
        if small.is_none() && checked.page == u64::MAX {
            return Err(config.nothing_serves(checked.page));
        }
        let config = checked;
        let space = Mutex::new(Space::new(config.page));
        let (device, growing) = (device.clone(), Mutex::new(()));
        let number = next_pool();
        let (retired, quiet) = (AtomicBool::new(false), AtomicBool::new(false));
        let pool = Self { number, device, backing, config, growing, space, small, retired, quiet };
        if pool.config.page < u64::MAX {
            pool.reserve(pool.config.initial_bytes)?;
        }
        if pool.config.initial_bytes > 0 {
            pool.preallocate(pool.config.initial_bytes)?;
        }
        let pool = Arc::new(pool);
        let watcher: Weak<dyn StreamWatcher> = Arc::downgrade(&pool) as _;
        pool.device.driver().watch_streams(watcher);
        Ok(pool)
    }

    fn lock_space(&self) -> MutexGuard<'_, Space> {
        lock(&self.space)
    }

    #[inline(never)]
    pub(crate) fn malloc(&self, bytes: usize, stream: StreamHandle) -> Result<DevicePtr> {
        self.device.driver().check_process()?;
        let requested = bytes as u64;
        if requested == 0 {
            return Err(Error::ZeroSize);
        }
        let _context = self.device.enter()?;
        let caller = self.admit(stream)?;
        if let Some(small) = self.small.as_ref().filter(|_| requested < self.config.page) {
            return self.malloc_small(small, requested, caller);
        }
        let overflow = Error::SizeOverflow { bytes: requested, unit_bytes: self.config.page };
        let bytes = round_up(requested, self.config.page).ok_or(overflow)?;
        let reaped = self.reap();
        {
            let mut space = self.lock_space();
            let timeline = space.timeline(caller.stream_id);
            if let Some(ptr) = space.place(timeline, bytes) {
                return Ok(ptr);
            }
        }
        if let Some(ptr) = self.take_followed(caller, bytes)? {
            return Ok(ptr);
        }
        match reaped.and(self.ask_all()) {
            Ok(()) => self.remap(caller, bytes),
            // A failure about one stream's work, while another's is over, is none of the request's.
            Err(error) => self.place_now(caller, bytes).ok_or(error),
        }
    }

    /// Serves a request from what is mapped side by side and may be used at once.
    fn place_now(&self, caller: Caller, bytes: u64) -> Option<DevicePtr> {
        let mut space = self.lock_space();
        let timeline = space.timeline(caller.stream_id);
        space.place(timeline, bytes).or_else(|| space.place_in_run(timeline, bytes))
    }

    fn malloc_small(&self, small: &Small, bytes: u64, caller: Caller) -> Result<DevicePtr> {
        let settled = self.settle_small(caller.stream_id, caller.stream);
        match self.malloc_from_driver(small, bytes, caller) {
            Err(error) if error.is_out_of_memory() && !error.is_hopeless() => {
                self.malloc_in_place_of_pages(small, bytes, caller, settled.err().unwrap_or(error))
            }
            served => served,
        }
    }

    /// A small request, as far as the limit and the driver's pool allow it.
    fn malloc_from_driver(&self, small: &Small, bytes: u64, caller: Caller) -> Result<DevicePtr> {
        // The driver's memory counts as the pool's until the driver has it back.
        if !self.backing.count(bytes) {
            return Err(self.out_of_memory(bytes));
        }
        small.malloc(self.device.driver(), bytes, caller).map_err(|failure| {
            self.backing.gave_up(bytes);
            if failure.is_out_of_memory() {
                self.out_of_memory(bytes)
            } else {
                failure.about(bytes)
            }
        })
    }

    /// A small request that found no memory: again when the driver has given back what it has free, and then as long
    /// as free pages can be given back for it. `error` is what it comes to if there are none.
    #[cold]
    fn malloc_in_place_of_pages(
        &self,
        small: &Small,
        bytes: u64,
        caller: Caller,
        mut error: Error,
    ) -> Result<DevicePtr> {
        // No other request takes the room for pages meanwhile.
        let _growing = self.lock_growing();
        // What the driver has free for small requests may be in pieces that are too short for this one.
        if self.bytes_over_limit(bytes) == 0 && self.trim_small(small).is_ok() {
            match self.malloc_from_driver(small, bytes, caller) {
                Err(again) if again.is_out_of_memory() => {}
                served => return served,
            }
        }
        if self.lock_space().free_bytes() == 0 {
            return Err(error);
        }
        if let Err(failure) = self.ask_every_stream() {
            error = failure;
        }
        self.reap_pages(u64::MAX);
        loop {
            let missing = match self.bytes_over_limit(bytes) {
                0 => bytes.max(SMALL_CHUNK_BYTES),
                over => over,
            };
            if self.trim_pages(missing)? == 0 {
                return Err(error);
            }
            match self.malloc_from_driver(small, bytes, caller) {
                Err(again) if again.is_out_of_memory() => {
                    error = if error.is_out_of_memory() { again } else { error }
                }
                served => return served,
            }
        }
    }

    /// How far a small request would go beyond the limit, which may have been set after the pool was made.
    fn bytes_over_limit(&self, bytes: u64) -> u64 {
        let budget = self.backing.budget();
        let Some(limit) = budget.limit() else { return 0 };
        budget.held().saturating_add(bytes).saturating_sub(limit)
    }

    #[inline(never)]
    pub(crate) fn free(&self, ptr: DevicePtr, stream: StreamHandle) -> Result<()> {
        self.device.driver().check_process()?;
        let _context = self.device.enter()?;
        let caller = self.admit(stream)?;
        let address = ptr.address();
        let mut space = self.lock_space();
        let used = space.uses.are_noted(address);
        if let Some(small) = &self.small
            && let Some(taken) = small.take(ptr, used)
        {
            drop(space);
            return self.free_small(small, address, taken?, used, caller);
        }
        let (id, tag) = space.take_back(ptr)?;
        let timeline = space.timeline(caller.stream_id);
        let recording = space.timelines.recording(timeline);
        let spare = space.events.pop();
        drop(space);
        let uses = if used { self.record_uses(address, caller.stream_id) } else { Ok(()) };
        if let Err(error) = uses {
            let mut space = self.lock_space();
            space.events.extend(spare);
            space.leave_live(id, tag);
            return Err(error);
        }
        // Records and their sequence numbers must be in one order on a stream: a later fence that
        // has passed proves the earlier ones. So one thread at a time records on it.
        let in_order = lock(&recording);
        let recorded = self.record_by(spare, stream);
        let mut space = self.lock_space();
        match recorded {
            Ok(event) => {
                let timeline = space.timeline(caller.stream_id);
                let fence = space.timelines.push(timeline, event);
                let uses = match used {
                    true => self.take_uses(&mut space, address, caller.stream_id),
                    false => Uses::new(),
                };
                // `push` counts one holder: the region, from here on, or what is kept about it.
                if uses.is_empty() {
                    space.map.set(id, State::Pending, fence);
                    space.coalesce(id);
                } else {
                    space.defer(Kept::Pages(id), caller.stream_id, fence, uses);
                }
                drop(in_order);
                Ok(())
            }
            Err(failure) => {
                space.unprove(address);
                space.leave_live(id, tag);
                Err(failure.into())
            }
        }
    }

    /// Finds out which stream a handle means now, and whether this pool can serve it.
    fn admit(&self, stream: StreamHandle) -> Result<Caller> {
        // What is noted as the library's own has not ended.
        let noted = stream.known_to(self.device.driver().realm()).filter(|id| {
            let space = self.lock_space();
            space.streams.get(*id).is_some() && space.timelines.find(*id).is_some()
        });
        if noted.is_none() {
            self.device.check_lives(stream)?;
        }
        // First of all: on a capturing stream even the question for its id ends the capture.
        if self.is_capturing(stream)? {
            return Err(Error::StreamCapturing);
        }
        let stream_id = self.id_of(stream)?;
        if noted == Some(stream_id) {
            return Ok(Caller { stream, stream_id });
        }
        // Ids are never used twice, so a stream with a timeline was found fit before.
        let known = {
            let mut space = self.lock_space();
            let known = space.timelines.find(stream_id).is_some();
            if known {
                self.remember(&mut space, stream, stream_id);
            }
            known
        };
        if !known {
            self.device.check_stream(stream)?;
            let mut space = self.lock_space();
            space.timeline(stream_id);
            self.remember(&mut space, stream, stream_id);
            if !self.is_the_librarys(stream) && stream != StreamHandle::LEGACY {
                space.came_by(stream, stream_id);
            }
        }
        Ok(Caller { stream, stream_id })
    }

    /// As [`admit`](Self::admit), for what the host notes about a stream: its id. No driver call for
    /// one of the library's that has called before, and no question that a capture would not bear.
    fn recognise(&self, stream: StreamHandle) -> Result<u64> {
        let Some(stream_id) = stream.known_to(self.device.driver().realm()) else {
            let _context = self.device.enter()?;
            return self.admit(stream).map(|caller| caller.stream_id);
        };
        if self.lock_space().streams.get(stream_id).is_none() {
            let _context = self.device.enter()?;
            self.device.check_stream(stream)?;
            self.remember(&mut self.lock_space(), stream, stream_id);
        }
        Ok(stream_id)
    }

    /// Notes a stream that the library owns, or the legacy one: found fit, and its end is told.
    fn remember(&self, space: &mut Space, stream: StreamHandle, stream_id: u64) {
        if self.is_the_librarys(stream) || stream == StreamHandle::LEGACY {
            space.streams.add(stream_id, stream);
        }
    }

    /// Also where the driver may not be asked: see [`stream_is_capturing`].
    fn is_capturing(&self, stream: StreamHandle) -> Result<bool, Failure> {
        stream_is_capturing(self.device.driver(), stream)
    }

    fn id_of(&self, stream: StreamHandle) -> Result<u64, Failure> {
        let mut stream_id = 0;
        // SAFETY: whoever made the handle vouches that its stream is alive; the pointer is live.
        unsafe { self.device.driver().cuStreamGetId(stream.raw(), &mut stream_id) }?;
        Ok(stream_id)
    }
}

impl PagedPool {
    /// The first part of the end, where the pool's owner lets go of it: waits for the work that uses
    /// the memory, and is then out of the driver's list, so that the pool ends in no other thread that
    /// happens to tell it something.
    pub(crate) fn retire(&self) {
        let driver = self.device.driver();
        if driver.is_forked() || self.retired.swap(true, Ordering::Relaxed) {
            return;
        }
        let waited = self.device.enter().and_then(|_context| Ok(self.wait_for_all()?));
        let allocated = || self.lock_space().map.totals().regions(State::Live) > 0;
        let is_at_rest = |error| self.backing.is_at_rest_after(&error, allocated());
        let quiet = waited.map_or_else(is_at_rest, |()| true);
        self.quiet.store(quiet, Ordering::Relaxed);
        driver.unwatch_streams(self);
    }

    /// Waits until no work uses the pool's memory: for the last fence of every stream, and for the
    /// whole context only where callers never freed something, a stream could not be recorded on, or the
    /// driver refuses a wait, since that ends every capture in it.
    fn wait_for_all(&self) -> Result<(), Failure> {
        let driver = self.device.driver();
        let _beside = BesideCaptures::enter(driver)?;
        let small = self.small.as_ref().map_or(0, Small::count);
        let last: Vec<Event> = {
            let space = self.lock_space();
            let never_freed = small > 0 || space.map.totals().regions(State::Live) > 0;
            if never_freed || space.uses.has_due() {
                drop(space);
                return wait_at_end(&self.device);
            }
            let newest = space.timelines.ids().filter_map(|id| space.timelines.newest(id));
            newest.filter_map(|fence| space.timelines.event(fence)).collect()
        };
        let waited = last.into_iter().try_for_each(|event| event.wait(driver));
        waited.or_else(|_| wait_at_end(&self.device))
    }
}

impl Drop for PagedPool {
    /// Waits for the work that uses the pool's memory, then gives everything back; without a wait where that work went
    /// with its context. Another error on the way leaves the rest to the driver, which reclaims it with the process.
    fn drop(&mut self) {
        self.retire();
        if !*self.quiet.get_mut() {
            return;
        }
        let driver = self.device.driver();
        let context = match self.device.enter() {
            // What is allocated was waited for above.
            Err(error) if !self.backing.is_at_rest_after(&error, false) => return,
            entered => entered.ok(),
        };
        if context.is_some()
            && let Some(small) = &self.small
        {
            small.destroy(driver);
        }
        let space = self.space.get_mut().unwrap_or_else(PoisonError::into_inner);
        let mapped: Vec<(NodeId, u64, u64)> = space
            .map
            .iter()
            .filter(|region| region.state() != State::Hole)
            .map(|region| (region.id(), region.start(), region.bytes()))
            .collect();
        let mut extents = std::mem::take(&mut space.orphans);
        for (id, start, bytes) in mapped {
            // SAFETY: every region but holes is whole pages that the pool mapped; all work that may use them has
            // finished, or ended with the context that it ran in.
            let _ = unsafe { crate::mapping::unmap(driver, start, bytes) };
            space.chunk_of(id).drain_extents(start, bytes, |extent| extents.push(extent));
        }
        // SAFETY: the pool's own handles, taken out of its tables; the pool ends here.
        unsafe { crate::physical::release_all(driver, extents, &mut Vec::new()) };
        if context.is_none() {
            // Its events went with it.
            return;
        }
        let events: Vec<Event> = space.timelines.drain().chain(space.events.drain(..)).collect();
        for event in events {
            // SAFETY: the pool ends here; nobody else has its events.
            let _ = unsafe { event.destroy(driver) };
        }
    }
}

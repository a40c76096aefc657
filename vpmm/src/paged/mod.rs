//! The paged profile: the seed design, every request in whole pages.
//!
//! ```text
//! malloc ─ phase 0  one question about zombies; unmap those whose fence has passed      zombies
//!        ─ phase 1  best fit over the stream's own and idle memory                      place
//!                   ask about pending fences, then best fit and runs of neighbours      zombies, place
//!        ─ phase 2  a site for the request, pages moved into it, the rest made new      plan, remap
//! free   ─ an event on the caller's stream, then the region is pending
//! ```
//!
//! Locks, in the order in which they may be taken: `growing`, a timeline's `recording`, `space`,
//! the small pool's book. No driver call that may be slow is made under `space`.

mod access;
mod chunk;
mod config;
mod heap;
mod place;
mod plan;
mod remap;
mod shared;
mod small;
mod space;
mod validate;
mod zombies;

pub use config::PagedConfig;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cuda_sys::types::CUstreamCaptureStatus;

use crate::backing::Backing;
use crate::device::{Device, StreamHandle};
use crate::driver::Failure;
use crate::error::{Error, Result};
use crate::event::{BesideCaptures, Event};
use crate::fence::Fence;
use crate::layout::{Layout, Piece};
use crate::region::{NodeId, State};
use crate::stats::Stats;
use crate::units::{DevicePtr, round_up};
use config::Checked;
use small::Small;
use space::Space;

/// Locks without regard to poison: nothing here panics with a lock held, and a panic elsewhere in
/// a caller's thread must not take the pool from all others.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A stream that was found fit for this pool, by handle for the driver and by id for the books.
#[derive(Clone, Copy)]
struct Caller {
    stream: StreamHandle,
    stream_id: u64,
}

/// A pool of the paged profile.
pub(crate) struct PagedPool {
    device: Device,
    backing: Backing,
    config: Checked,
    growing: Mutex<()>,
    space: Mutex<Space>,
    /// `None` where the device has no memory pools: small requests then take a whole page.
    small: Option<Small>,
}

impl PagedPool {
    pub(crate) fn new(device: &Device, config: &PagedConfig) -> Result<Arc<Self>> {
        let backing = Backing::new(device, config.location, config.sharing)?;
        let config = config.check(backing.granule_bytes())?;
        let _context = device.enter()?;
        let small = Small::new(device, &backing)?;
        if small.is_none() && config.page == u64::MAX {
            return Err(Error::Config {
                name: "VPMM_PAGE_SIZE",
                value: config.page.to_string(),
                reason: "the device has no memory pools to serve requests without pages".to_owned(),
            });
        }
        let space = Mutex::new(Space::new(config.page));
        let (device, growing) = (device.clone(), Mutex::new(()));
        let pool = Self { device, backing, config, growing, space, small };
        if pool.config.page < u64::MAX {
            pool.reserve(pool.config.initial_bytes)?;
        }
        if pool.config.initial_bytes > 0 {
            pool.preallocate(pool.config.initial_bytes)?;
        }
        Ok(Arc::new(pool))
    }

    fn lock_space(&self) -> MutexGuard<'_, Space> {
        lock(&self.space)
    }

    #[inline(never)]
    pub(crate) fn malloc(&self, bytes: usize, stream: StreamHandle) -> Result<DevicePtr> {
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
        self.reap()?;
        {
            let mut space = self.lock_space();
            let timeline = space.timeline(caller.stream_id);
            if let Some(ptr) = space.place(timeline, bytes) {
                return Ok(ptr);
            }
        }
        self.ask_all()?;
        self.remap(caller, bytes)
    }

    fn malloc_small(&self, small: &Small, bytes: u64, caller: Caller) -> Result<DevicePtr> {
        if let Some(limit) = self.config.limit_bytes {
            let held = self.backing.budget().held().saturating_add(small.live_bytes());
            if held.saturating_add(bytes) > limit {
                return Err(self.out_of_memory(bytes));
            }
        }
        small.malloc(self.device.driver(), bytes, caller.stream).map_err(|failure| {
            if failure.is_out_of_memory() {
                self.out_of_memory(bytes)
            } else {
                failure.about(bytes)
            }
        })
    }

    #[inline(never)]
    pub(crate) fn free(&self, ptr: DevicePtr, stream: StreamHandle) -> Result<()> {
        let _context = self.device.enter()?;
        let caller = self.admit(stream)?;
        let driver = self.device.driver();
        if let Some(freed) = self.small.as_ref().and_then(|small| small.free(driver, ptr, stream)) {
            return freed;
        }
        let (id, tag, event, recording) = {
            let mut space = self.lock_space();
            let (id, tag) = space.take_back(ptr)?;
            let timeline = space.timeline(caller.stream_id);
            (id, tag, space.events.pop(), space.timelines.recording(timeline))
        };
        // Records and their sequence numbers must be in one order on a stream: a later fence that
        // has passed proves the earlier ones. So one thread at a time records on it.
        let in_order = lock(&recording);
        let recorded = event.map_or_else(|| Event::new(driver), Ok).and_then(|event| {
            event
                .record(driver, stream)
                .map(|()| event)
                .inspect_err(|_| self.lock_space().events.push(event))
        });
        let mut space = self.lock_space();
        match recorded {
            Ok(event) => {
                let timeline = space.timeline(caller.stream_id);
                let fence = space.timelines.push(timeline, event);
                // `push` counts one holder: the region, from here on.
                space.map.set(id, State::Pending, fence);
                space.coalesce(id);
                drop(in_order);
                Ok(())
            }
            Err(failure) => {
                space.leave_live(id, tag);
                Err(failure.into())
            }
        }
    }

    /// Finds out which stream a handle means now, and whether this pool can serve it.
    fn admit(&self, stream: StreamHandle) -> Result<Caller> {
        let driver = self.device.driver();
        // First of all: on a capturing stream even the question for its id ends the capture.
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: whoever made the handle vouches that its stream is alive; the pointer is live.
        unsafe { driver.cuStreamIsCapturing(stream.raw(), &mut status) }?;
        if status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            return Err(Error::StreamCapturing);
        }
        let mut stream_id = 0;
        // SAFETY: as above.
        unsafe { driver.cuStreamGetId(stream.raw(), &mut stream_id) }?;
        // Ids are never used twice, so a stream with a timeline was found fit before.
        if self.lock_space().timelines.find(stream_id).is_none() {
            self.device.check_stream(stream)?;
            self.lock_space().timeline(stream_id);
        }
        Ok(Caller { stream, stream_id })
    }

    pub(crate) fn stats(&self) -> Stats {
        let driver = self.device.driver();
        let small = self.small.as_ref();
        // A driver that no longer answers has no numbers to give; the pool's own still stand.
        let read = |read: fn(&Small, &crate::Driver) -> Result<u64, Failure>| {
            small.and_then(|small| read(small, driver).ok()).unwrap_or(0)
        };
        let (small_mapped_bytes, peak_small_mapped_bytes) =
            (read(Small::reserved), read(Small::peak_reserved));
        let space = self.lock_space();
        let totals = space.map.totals();
        Stats {
            live_bytes: totals.bytes(State::Live),
            idle_bytes: totals.bytes(State::Idle),
            pending_bytes: totals.bytes(State::Pending),
            hole_bytes: totals.bytes(State::Hole),
            zombie_bytes: totals.bytes(State::Zombie),
            transit_bytes: totals.bytes(State::Transit),
            mapped_bytes: space.mapped,
            peak_mapped_bytes: space.peak_mapped,
            reserved_bytes: space.chunks.iter().map(chunk::Chunk::bytes).sum(),
            small_live_bytes: small.map_or(0, Small::live_bytes),
            small_mapped_bytes,
            peak_small_mapped_bytes,
            live_count: totals.regions(State::Live),
            idle_count: totals.regions(State::Idle),
            pending_count: totals.regions(State::Pending),
            hole_count: totals.regions(State::Hole),
            zombie_count: totals.regions(State::Zombie),
            reservation_count: space.chunks.len() as u64,
            small_live_count: small.map_or(0, Small::count),
            stream_count: space.timelines.len() as u64,
            page_size_bytes: self.config.page,
            exported_bytes: space.shared.len() as u64 * space.page,
            pages_created: space.pages_created,
            pages_moved: space.pages_moved,
            failed_unmaps: space.failed_unmaps,
            ..Stats::default()
        }
    }

    pub(crate) fn layout(&self) -> Layout {
        let space = self.lock_space();
        let pieces = space.map.iter().map(|region| Piece {
            state: region.state(),
            pages: region.bytes() / self.config.page,
            latest: region.start() == space.latest,
            reservation: region.reservation(),
        });
        Layout { pieces: pieces.collect() }
    }

    /// Metrics, then every region in ascending order of addresses.
    pub(crate) fn debug(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        struct Line(u64, u64, State, Fence, Option<u64>);
        impl fmt::Debug for Line {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let Self(start, bytes, state, fence, stream) = self;
                write!(f, "{start:#x} +{bytes:#x} {state:?}")?;
                match stream {
                    Some(stream) => write!(f, " stream {stream} fence {}", fence.sequence),
                    None => Ok(()),
                }
            }
        }
        let stats = self.stats();
        let lines: Vec<Line> = {
            let space = self.lock_space();
            let line = |region: &crate::region::Region| {
                let fence = region.fence();
                let stream =
                    (fence != Fence::PASSED).then(|| space.timelines.stream(fence.timeline));
                Line(region.start(), region.bytes(), region.state(), fence, stream)
            };
            space.map.iter().map(line).collect()
        };
        f.debug_struct("Pool")
            .field("profile", &"paged")
            .field("device", &self.device.ordinal())
            .field("stats", &stats)
            .field("driver_calls", &self.device.driver().calls())
            .field("regions", &lines)
            .finish()
    }
}

impl PagedPool {
    /// Waits until no work uses the pool's memory: for the last fence of every stream, and for the
    /// whole context only where callers never freed something, since that ends every capture in it.
    fn wait_for_all(&self) -> Result<(), Failure> {
        let driver = self.device.driver();
        let _beside = BesideCaptures::enter(driver)?;
        let small = self.small.as_ref().map_or(0, Small::count);
        let last: Vec<Event> = {
            let space = self.lock_space();
            if small > 0 || space.map.totals().regions(State::Live) > 0 {
                drop(space);
                // SAFETY: no arguments.
                return unsafe { driver.cuCtxSynchronize() };
            }
            let newest = space.timelines.ids().filter_map(|id| space.timelines.newest(id));
            newest.filter_map(|fence| space.timelines.event(fence)).collect()
        };
        last.into_iter().try_for_each(|event| event.wait(driver))
    }
}

impl Drop for PagedPool {
    /// Waits for the work that uses the pool's memory, then gives everything back. An error on the
    /// way (a context that went first) leaves the rest to the driver, which reclaims it with the
    /// process.
    fn drop(&mut self) {
        let driver = self.device.driver();
        let Ok(_context) = self.device.enter() else { return };
        if self.wait_for_all().is_err() {
            return;
        }
        if let Some(small) = &self.small {
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
            // SAFETY: every region but holes is whole pages that the pool mapped; all work on the
            // device has finished.
            let _ = unsafe { crate::mapping::unmap(driver, start, bytes) };
            space.chunk_of(id).drain_extents(start, bytes, |extent| extents.push(extent));
        }
        // SAFETY: the pool's own handles, taken out of its tables; the pool ends here.
        unsafe { crate::physical::release_all(driver, extents, &mut Vec::new()) };
        let events: Vec<Event> = space.timelines.drain().chain(space.events.drain(..)).collect();
        for event in events {
            // SAFETY: the pool ends here; nobody else has its events.
            let _ = unsafe { event.destroy(driver) };
        }
    }
}

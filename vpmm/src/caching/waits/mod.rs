//! Freed blocks that further streams may still use: for each such stream an event behind the free.
//!
//! ```text
//! allocated ──free──▶ open ──somebody lacks memory, or an event is due──▶ waiting ──passed──▶ free
//!             │                                                            ▲
//!             └──foreign and default streams: an event at the free─────────┤
//!                         │                                                │ recorded when the stream
//!                         └────────▶ deferred ─────────────────────────────┘ has stopped capturing
//! ```
//!
//! | stream | event |
//! |---|---|
//! | of the library | one for all that was freed until somebody lacks memory ([`books`](super::books) keeps it till then), or until that is much. None while it captures: it would become a node of the graph |
//! | from elsewhere, legacy default stream | at each free: nobody tells of its end; or it would harm others' captures later |
//! | another thread's default stream | at the next request of that thread |
//! | ended | its last one, recorded at its end, stands for all |
//!
//! One queue for each stream, oldest first, so that one that is stuck holds nobody else's up.

mod lives;

pub(super) use lives::Life;

use std::collections::VecDeque;
use std::sync::TryLockError;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;

use super::books::{Since, Use};
use super::core::{ASK_EACH, ASK_SELDOM, Core, lock};
use crate::capture::{BesideCaptures, Recorded, record_beside_captures, stream_is_capturing};
use crate::device::StreamHandle;
use crate::driver::Driver;
use crate::error::{Error, Result};
use crate::event::Event;
use crate::units::DevicePtr;

/// Looks at an event that was recorded just now.
const LOOKS: u32 = 4;

/// Blocks that wait for an event.
struct Waiter {
    /// `None`: the stream's last one.
    event: Option<Event>,
    /// The oldest first.
    blocks: Vec<Since>,
}

/// A block that waits for an event that is still to be recorded.
struct Deferred {
    place: u32,
    on: On,
    block: u32,
    since: u64,
}

/// Where a deferred event is to be recorded.
#[derive(Clone, Copy, PartialEq, Eq)]
enum On {
    /// On the place's stream, whose end is told.
    Place,
    /// On the default stream of the thread that it belongs to, by that thread.
    PerThread,
    /// Nowhere any more: only the host can see the work complete.
    Nowhere,
}

/// One stream's.
struct OfPlace {
    life: Life,
    queue: VecDeque<Waiter>,
    /// Deferred blocks.
    deferred: u32,
    /// It is about to end.
    leaves: bool,
}

/// All that is waited for.
#[derive(Default)]
pub(super) struct Waits {
    places: Vec<OfPlace>,
    /// Places with a queue.
    busy: Vec<u32>,
    deferred: Vec<Deferred>,
    /// Events to use again: as many as ever were waited for at a time, at most.
    spare: Vec<Event>,
    /// Threads that wait for events of the queues now, without the lock.
    waiting: u32,
    /// Events that passed meanwhile. They may be waited for still, so none is recorded elsewhere before that is
    /// over.
    resting: Vec<Event>,
    /// Lists to use again, empty.
    lists: Vec<Vec<Since>>,
    /// Places on whose streams memory goes back upstream now, without the lock, each with the thread that gives it.
    /// Such a stream does not end before that is over.
    lent: Vec<(u32, usize)>,
    /// So many requests go by before one asks again: while nothing passes, twice as many each time.
    pause: usize,
}

/// What a free has recorded for one stream.
enum Made {
    /// Nothing: that can be done at any time.
    Open,
    Event(Event),
    Last,
    Deferred(On),
}

impl Waits {
    /// An event of a queue has had its turn.
    fn let_go(&mut self, event: Event) {
        if self.waiting == 0 { self.spare.push(event) } else { self.resting.push(event) }
    }

    fn enqueue(&mut self, place: u32, waiter: Waiter) {
        let queue = &mut self.places[place as usize].queue;
        if queue.is_empty() {
            self.busy.push(place);
        }
        queue.push_back(waiter);
    }

    fn put(&mut self, core: &Core, place: u32, block: u32, made: Made) {
        let event = match made {
            Made::Open => {
                // If an event is due, the next free finds it so.
                let _ = core.books.lock().wait_for(place, block);
                return;
            }
            Made::Event(event) => Some(event),
            Made::Last => None,
            Made::Deferred(on) => {
                let since = core.books.lock().next_wait();
                return self.defer(Deferred { place, on, block, since });
            }
        };
        let since = core.books.lock().next_wait();
        self.enqueue_one(place, event, Since { block, since });
    }

    fn enqueue_one(&mut self, place: u32, event: Option<Event>, wait: Since) {
        let mut blocks = self.lists.pop().unwrap_or_default();
        blocks.push(wait);
        self.enqueue(place, Waiter { event, blocks });
    }

    /// An event for all that waits for a place's stream without one, unless that captures. The context
    /// must be current.
    fn close(&mut self, core: &Core, place: u32) -> Result<()> {
        let Life::Lasting(handle) = self.places[place as usize].life else { return Ok(()) };
        let empty = self.lists.pop().unwrap_or_default();
        let blocks = core.books.lock().take_open(place, empty);
        if blocks.is_empty() {
            self.lists.push(blocks);
            return Ok(());
        }
        let spare = self.spare.pop();
        let (unused, outcome) = match record_beside_captures(core.device.driver(), handle, spare) {
            Ok(Recorded::On(event)) => {
                self.enqueue(place, Waiter { event: Some(event), blocks });
                return Ok(());
            }
            Ok(Recorded::Capturing(spare)) => (spare, Ok(())),
            Err(failure) => (spare, Err(failure.into())),
        };
        self.spare.extend(unused);
        core.books.lock().reopen(place, &blocks);
        outcome
    }

    /// The same for every stream: those of them that had something.
    fn close_all(&mut self, core: &Core) -> Result<SmallVec<[u32; 8]>> {
        let places = core.books.lock().open_places();
        places.iter().try_for_each(|place| self.close(core, *place))?;
        Ok(places)
    }

    fn defer(&mut self, of: Deferred) {
        self.places[of.place as usize].deferred += 1;
        self.deferred.push(of);
    }

    /// Tells those who look without the lock how many waits there are.
    fn publish(&mut self, core: &Core) {
        let queues = self.busy.iter().map(|place| self.places[*place as usize].queue.len());
        let count = queues.sum::<usize>() + self.deferred.len();
        let before = core.outstanding.swap(count, Ordering::Relaxed);
        if before == 0 && count != 0 {
            self.pause(core, core.requests.load(Ordering::Relaxed), ASK_EACH);
        }
    }

    /// So many requests go by before one asks again.
    fn pause(&mut self, core: &Core, request: usize, requests: usize) {
        self.pause = requests;
        core.ask_at.store(request.wrapping_add(requests), Ordering::Relaxed);
    }

    /// Records what a free has to wait for on one stream; nothing where its work is over.
    fn record(&mut self, core: &Core, of: &Use) -> Result<Option<Made>> {
        let driver = core.device.driver();
        let (on, deferred) = match self.places[of.place as usize].life {
            Life::Over => return Ok(None),
            Life::Ended(_) | Life::Lost(_) => return Ok(Some(Made::Last)),
            Life::Lasting(handle) if handle != StreamHandle::LEGACY => return Ok(Some(Made::Open)),
            Life::Lasting(handle) => (handle, On::Place),
            Life::Foreign if of.on == StreamHandle::PER_THREAD => {
                if place_of_this_thread(core)? != Some(of.place) {
                    return Ok(Some(Made::Deferred(On::PerThread)));
                }
                (of.on, On::PerThread)
            }
            Life::Foreign => (of.on, On::Nowhere),
        };
        let spare = self.spare.pop();
        match record_beside_captures(driver, on, spare) {
            Ok(Recorded::On(event)) => Ok(Some(Made::Event(event))),
            Ok(Recorded::Capturing(spare)) => {
                self.spare.extend(spare);
                // The handle is good for this call only.
                let kept = deferred != On::Nowhere;
                if kept { Ok(Some(Made::Deferred(deferred))) } else { Err(Error::StreamCapturing) }
            }
            Err(failure) => {
                self.spare.extend(spare);
                Err(failure.into())
            }
        }
    }

    /// Records what was deferred, where that is possible now: one event for all that waits for a stream.
    fn retry_deferred(&mut self, core: &Core) -> Result<()> {
        let mut wanted: SmallVec<[(u32, On); 4]> = SmallVec::new();
        for of in self.deferred.iter().filter(|of| of.on != On::Nowhere) {
            if !wanted.contains(&(of.place, of.on)) {
                wanted.push((of.place, of.on));
            }
        }
        let is_asked = wanted.iter().any(|(_, on)| *on == On::PerThread);
        let own = if is_asked { place_of_this_thread(core)? } else { None };
        let driver = core.device.driver();
        for (place, on) in wanted {
            let handle = match (on, self.places[place as usize].life) {
                (On::Place, Life::Lasting(handle)) => handle,
                (On::PerThread, _) if own == Some(place) => StreamHandle::PER_THREAD,
                _ => continue,
            };
            let spare = self.spare.pop();
            match record_beside_captures(driver, handle, spare) {
                Ok(Recorded::Capturing(spare)) => self.spare.extend(spare),
                Ok(Recorded::On(event)) => self.end_deferral(place, on, Some(event)),
                Err(failure) => {
                    self.spare.extend(spare);
                    return Err(failure.into());
                }
            }
        }
        Ok(())
    }

    /// All that an event was to be recorded for on a place's stream waits for this one; `None`: for the stream's
    /// last.
    fn end_deferral(&mut self, place: u32, on: On, event: Option<Event>) {
        let mut blocks = self.lists.pop().unwrap_or_default();
        self.deferred.retain(|of| {
            let is_it = of.place == place && of.on == on;
            if is_it {
                blocks.push(Since { block: of.block, since: of.since });
            }
            !is_it
        });
        self.places[place as usize].deferred -= blocks.len() as u32;
        blocks.sort_unstable_by_key(|wait| wait.since);
        self.enqueue(place, Waiter { event, blocks });
    }

    /// Takes everything as far as it has come. The context must be current, beside captures.
    fn advance(&mut self, core: &Core) -> Result<()> {
        self.advance_but(core, &[])
    }

    /// The same but for the queues of some places.
    fn advance_but(&mut self, core: &Core, settled: &[u32]) -> Result<()> {
        self.retry_deferred(core)?;
        let mut at = 0;
        while let Some(place) = self.busy.get(at).copied() {
            if !settled.contains(&place) {
                self.advance_queue(core, place)?;
            }
            if self.places[place as usize].queue.is_empty() {
                self.busy.swap_remove(at);
            } else {
                at += 1;
            }
        }
        Ok(())
    }

    /// An event for all that waits, and a look at every one.
    fn settle(&mut self, core: &Core) -> Result<()> {
        // All of them before any is asked about: they pass meanwhile.
        let fresh = self.close_all(core)?;
        let looked = fresh.iter().try_for_each(|place| self.look_at_fresh(core, *place));
        self.busy.retain(|place| !self.places[*place as usize].queue.is_empty());
        looked?;
        self.advance_but(core, &fresh)
    }

    /// Looks a few times at an event that was recorded just now, on a stream that may have nothing to do: a
    /// segment from upstream costs a hundred times as much. All earlier ones have passed with it.
    fn look_at_fresh(&mut self, core: &Core, place: u32) -> Result<()> {
        for _ in 0..LOOKS {
            match self.last_has_passed(core, place)? {
                Some(true) => {
                    let waiting = self.places[place as usize].queue.len();
                    self.pop(core, place, waiting);
                    return Ok(());
                }
                Some(false) => {}
                None => break,
            }
        }
        self.advance_queue(core, place)
    }

    /// Whether a queue's last event has passed; `None` where it has none, or no answer.
    fn last_has_passed(&self, core: &Core, place: u32) -> Result<Option<bool>> {
        let last = self.places[place as usize].queue.back().and_then(|waiter| waiter.event);
        let Some(event) = last else { return Ok(None) };
        match event.is_complete(core.device.driver()) {
            Ok(passed) => Ok(Some(passed)),
            // It is found out again where its turn comes.
            Err(failure) if failure.is_of_capture() => Ok(None),
            Err(failure) => Err(failure.into()),
        }
    }

    fn advance_queue(&mut self, core: &Core, place: u32) -> Result<()> {
        let mut passed = 0_u32;
        while let Some(first) = self.places[place as usize].queue.front() {
            let event = first.event;
            let waiting = self.places[place as usize].queue.len();
            // Where one has passed all may have: the last one answers for the others.
            if passed == 1 && waiting > 1 && self.last_has_passed(core, place)? == Some(true) {
                self.pop(core, place, waiting);
                return Ok(());
            }
            let Some(event) = event else {
                if !self.settle_end(core, place as usize)? {
                    return Ok(());
                }
                self.pop(core, place, 1);
                continue;
            };
            match event.is_complete(core.device.driver()) {
                Ok(true) => {
                    self.pop(core, place, 1);
                    passed += 1;
                }
                Ok(false) => return Ok(()),
                // A capture that began and ended in between has taken the record along.
                Err(failure) if failure.is_of_capture() => {
                    self.defer_first(core, place);
                }
                Err(failure) => return Err(failure.into()),
            }
        }
        Ok(())
    }

    /// The first of a queue have waited long enough.
    fn pop(&mut self, core: &Core, place: u32, count: usize) {
        let mut books = core.books.lock();
        let events = if self.waiting == 0 { &mut self.spare } else { &mut self.resting };
        for mut waiter in self.places[place as usize].queue.drain(..count) {
            events.extend(waiter.event);
            waiter.blocks.drain(..).for_each(|wait| books.wait_is_over(wait.block));
            self.lists.push(waiter.blocks);
        }
    }

    /// The first of a queue has no event after all.
    fn defer_first(&mut self, core: &Core, place: u32) {
        let of = &mut self.places[place as usize];
        let Some(Waiter { event, mut blocks }) = of.queue.pop_front() else { return };
        let life = of.life;
        event.into_iter().for_each(|event| self.let_go(event));
        let on = match life {
            Life::Lasting(handle) if handle != StreamHandle::LEGACY => {
                return core.books.lock().reopen(place, &blocks);
            }
            Life::Lasting(_) => On::Place,
            _ => On::Nowhere,
        };
        for Since { block, since } in blocks.drain(..) {
            self.defer(Deferred { place, on, block, since });
        }
        self.lists.push(blocks);
    }

    /// Takes every wait as far as it has come.
    fn advance_all(&mut self, core: &Core) -> Result<()> {
        let advanced = self.close_all(core).and_then(|_| self.advance(core));
        let advanced = advanced.and_then(|()| self.settle_each_end(core));
        self.publish(core);
        advanced
    }

    /// Behind these events is everything that can be waited for.
    fn last_events(&self) -> Vec<Event> {
        let of_queues = self.busy.iter().filter_map(|place| {
            let queue = &self.places[*place as usize].queue;
            // What is behind the last one is behind all.
            queue.iter().rev().find_map(|waiter| waiter.event)
        });
        let of_ends = self.places.iter().filter_map(|of| match of.life {
            Life::Ended(event) => Some(event),
            _ => None,
        });
        of_queues.chain(of_ends).collect()
    }

    /// The host has seen complete what was enqueued before `point`, on a place's stream or on all.
    pub(super) fn passed(&mut self, core: &Core, place: Option<u32>, point: u64) {
        let of_mark = |at: u32| place.is_none_or(|place| place == at);
        for at in self.busy.clone().into_iter().filter(|at| of_mark(*at)) {
            let is_past =
                |waiter: &Waiter| waiter.blocks.last().is_none_or(|wait| wait.since <= point);
            let queue = &self.places[at as usize].queue;
            let past = queue.iter().take_while(|waiter| is_past(waiter)).count();
            if past != 0 {
                self.pop(core, at, past);
            }
            // Some of those that share an event may have been freed later.
            if let Some(first) = self.places[at as usize].queue.front_mut() {
                let passed = first.blocks.partition_point(|wait| wait.since <= point);
                let mut books = core.books.lock();
                first.blocks.drain(..passed).for_each(|wait| books.wait_is_over(wait.block));
            }
        }
        {
            let mut books = core.books.lock();
            let open = books.open_places();
            open.into_iter().filter(|at| of_mark(*at)).for_each(|at| books.pass_open(at, point));
        }
        self.busy.retain(|at| !self.places[*at as usize].queue.is_empty());
        for index in (0..self.deferred.len()).rev() {
            if of_mark(self.deferred[index].place) && self.deferred[index].since <= point {
                let Deferred { place, block, .. } = self.deferred.swap_remove(index);
                self.places[place as usize].deferred -= 1;
                core.books.lock().wait_is_over(block);
            }
        }
        for (at, of) in self.places.iter_mut().enumerate() {
            if matches!(of.life, Life::Lost(since) if since <= point && of_mark(at as u32)) {
                of.life = Life::Over;
            }
        }
        self.publish(core);
    }

    /// Who has the lock has the events to themselves.
    pub(super) fn destroy_events(&mut self, driver: &Driver) {
        let queued = self.places.iter_mut().flat_map(|of| {
            let last = match of.life {
                Life::Ended(event) => Some(event),
                _ => None,
            };
            of.queue.drain(..).filter_map(|waiter| waiter.event).chain(last)
        });
        for event in self.spare.drain(..).chain(self.resting.drain(..)).chain(queued) {
            // SAFETY: the owner ends, and nobody else has its events.
            let _ = unsafe { event.destroy(driver) };
        }
    }
}

/// The place of the calling thread's default stream. While it captures nobody can tell.
fn place_of_this_thread(core: &Core) -> Result<Option<u32>> {
    if stream_is_capturing(core.device.driver(), StreamHandle::PER_THREAD)? {
        return Ok(None);
    }
    let stream = core.ask_number(StreamHandle::PER_THREAD)?;
    Ok(core.books.lock().place_of(stream))
}

impl Core {
    /// A free of an allocation that further streams use.
    #[cold]
    #[inline(never)]
    pub(super) fn free_used(&self, ptr: DevicePtr) -> Result<()> {
        let mut waits = lock(&self.waits);
        let uses = self.books.lock().uses_of(ptr)?;
        let _context = self.device.enter()?;
        let mut made: SmallVec<[(u32, Made); 2]> = SmallVec::new();
        let mut recorded = Ok(());
        for of in &uses {
            match waits.record(self, of) {
                Ok(one) => made.extend(one.map(|one| (of.place, one))),
                Err(error) => {
                    recorded = Err(error);
                    break;
                }
            }
        }
        // Again, by number: another thread may have freed it meanwhile.
        let freed = recorded.and_then(|()| self.books.lock().free_noted(ptr, made.len() as u32));
        match freed {
            Ok(block) => {
                made.into_iter().for_each(|(place, one)| waits.put(self, place, block, one));
                waits.publish(self);
                Ok(())
            }
            Err(error) => {
                let events = made.into_iter().filter_map(|(_, one)| match one {
                    Made::Event(event) => Some(event),
                    Made::Open | Made::Last | Made::Deferred(_) => None,
                });
                waits.spare.extend(events);
                Err(error)
            }
        }
    }

    /// Asks about what is waited for, unless another thread does so now. `request`: the number of the one
    /// that does.
    #[cold]
    #[inline(never)]
    pub(super) fn advance_waits(&self, request: usize) -> Result<()> {
        let mut waits = match self.waits.try_lock() {
            Ok(waits) => waits,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(()),
        };
        let _context = self.device.enter()?;
        let _beside = BesideCaptures::enter(self.device.driver())?;
        let before = self.outstanding.load(Ordering::Relaxed);
        let advanced = waits.advance(self);
        waits.publish(self);
        let has_passed = self.outstanding.load(Ordering::Relaxed) < before;
        let pause = if has_passed { ASK_EACH } else { (2 * waits.pause).min(ASK_SELDOM) };
        waits.pause(self, request, pause);
        advanced
    }

    /// An event for what waits for a place's stream. What fails here is tried again when an event is
    /// due again, or somebody lacks memory; the free that found it due is done.
    #[cold]
    #[inline(never)]
    pub(super) fn close_due(&self, place: u32) {
        let mut waits = lock(&self.waits);
        if let Ok(_context) = self.device.enter() {
            let _ = waits.close(self, place);
        }
        waits.publish(self);
    }

    /// For a request that lacks memory: an event for all that waits, and a look at every one. Whether
    /// there was any. `has_open`: whether any may wait without an event.
    pub(super) fn settle_uses(&self, has_open: bool) -> Result<bool> {
        if self.outstanding.load(Ordering::Relaxed) == 0 && !has_open {
            return Ok(false);
        }
        let mut waits = lock(&self.waits);
        let _context = self.device.enter()?;
        let _beside = BesideCaptures::enter(self.device.driver())?;
        let settled = waits.settle(self);
        waits.publish(self);
        settled.map(|()| true)
    }

    /// Waits on the host for everything that can be waited for. Without the lock meanwhile: what is
    /// waited for may depend on a thread that comes here first.
    pub(super) fn wait_for_uses(&self) -> Result<()> {
        let _context = self.device.enter()?;
        let driver = self.device.driver();
        let _beside = BesideCaptures::enter(driver)?;
        let events = {
            let mut waits = lock(&self.waits);
            waits.advance_all(self)?;
            waits.waiting += 1;
            waits.last_events()
        };
        let waited = events.into_iter().try_for_each(|event| match event.wait(driver) {
            // Which is found out below.
            Err(failure) if failure.is_of_capture() => Ok(()),
            waited => waited,
        });
        let mut waits = lock(&self.waits);
        waits.waiting -= 1;
        if waits.waiting == 0 {
            let mut resting = std::mem::take(&mut waits.resting);
            waits.spare.append(&mut resting);
        }
        waited?;
        waits.advance_all(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::caching::{CachingAllocator, CachingConfig};

    #[test]
    #[cfg_attr(miri, ignore = "the simulator calls the system")]
    fn streams_that_end_leave_no_lists() {
        let sim = cuda_sim::Simulator::builder().build().expect("a simulator");
        let driver = crate::Driver::new(sim.driver()).expect("a driver");
        let device = driver.device(0).expect("a device");
        let allocator = CachingAllocator::new(&device, &CachingConfig::default()).expect("one");
        let own = device.stream().expect("a stream");
        for _ in 0..64 {
            let side = device.stream().expect("a stream");
            let ptr = allocator.malloc(1000, &own).expect("memory");
            allocator.record_stream(ptr, &side).expect("noted");
            allocator.free(ptr).expect("freed");
            drop(side);
            allocator.empty_cache().expect("all has passed");
        }
        let kept = lock(&allocator.core().waits).lists.len();
        assert!(kept <= 2, "{kept} lists");
    }
}

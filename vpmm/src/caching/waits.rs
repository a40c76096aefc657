//! Freed blocks that further streams may still use: an event for each such stream, recorded at the
//! free, and asked about at later requests.
//!
//! ```text
//! allocated ──free──▶ waiting ──every event has passed──▶ free
//!                     │    ▲
//!                     ▼    │ recorded when the stream has stopped capturing
//!                    deferred
//! ```
//!
//! One queue for each stream, oldest first, so that one that is stuck holds nobody else's up. No
//! event is recorded on a stream that captures: it would become a node of the graph. No event is
//! recorded on a stream that has ended: its last one, recorded at its end, stands for all.

use std::collections::VecDeque;
use std::sync::TryLockError;
use std::sync::atomic::Ordering;

use cuda_sys::types::CUresult;
use smallvec::SmallVec;

use super::books::{Books, Use};
use super::core::{Core, lock};
use crate::default::{Recorded, record_beside_captures, stream_is_capturing};
use crate::device::StreamHandle;
use crate::driver::Driver;
use crate::error::{Error, Result};
use crate::event::{BesideCaptures, Event};
use crate::units::DevicePtr;

/// What is known of the stream at a place.
#[derive(Clone, Copy, Debug)]
pub(super) enum Life {
    /// Alive, and its end will be told.
    Lasting(StreamHandle),
    /// Nobody tells of its end: its handle is good for a call that it is given to.
    Foreign,
    /// Ended; behind this event nothing of its work is left.
    Ended(Event),
    /// Ended, and so has all its work.
    Over,
    /// Ended where no event could be recorded, at this point in time.
    Lost(u64),
}

/// A block that waits for an event.
struct Waiter {
    /// `None`: the stream's last one.
    event: Option<Event>,
    block: u32,
    since: u64,
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
    /// Counts waits: the time, as far as marks are concerned.
    sequence: u64,
}

/// What a free has recorded for one stream.
enum Made {
    Event(Event),
    Last,
    Deferred(On),
}

impl Waits {
    pub(super) fn now(&self) -> u64 {
        self.sequence
    }

    /// A place has a new stream.
    pub(super) fn begin(&mut self, place: u32, life: Life) {
        match self.places.get_mut(place as usize) {
            Some(of) => of.life = life,
            None => self.places.push(OfPlace { life, queue: VecDeque::new(), deferred: 0 }),
        }
    }

    /// A place to give to a new stream, if there is one: of a stream whose work is over, whose memory
    /// the new one inherits; or of one that nobody may ever name again and that has no memory.
    pub(super) fn vacant(&self, books: &Books) -> Option<u32> {
        let vacant = |(of, place): (&OfPlace, &super::books::Place)| {
            let unnamed = place.pins == 0 && of.queue.is_empty() && of.deferred == 0;
            unnamed
                && match of.life {
                    Life::Over => true,
                    Life::Foreign | Life::Lost(_) => place.blocks == 0,
                    Life::Lasting(_) | Life::Ended(_) => false,
                }
        };
        self.places.iter().zip(&books.places).position(vacant).map(|place| place as u32)
    }

    /// Asks about streams that have ended whether their work has too.
    pub(super) fn settle_ends(&mut self, core: &Core) -> Result<()> {
        let driver = core.device.driver();
        let ended = |of: &OfPlace| matches!(of.life, Life::Ended(_));
        if !self.places.iter().any(ended) {
            return Ok(());
        }
        let _beside = BesideCaptures::enter(driver)?;
        for place in 0..self.places.len() {
            self.settle_end(driver, place)?;
        }
        Ok(())
    }

    /// Whether a stream that has ended has nothing left to do. Where it never recorded its end,
    /// nobody can tell.
    fn settle_end(&mut self, driver: &Driver, place: usize) -> Result<bool> {
        match self.places[place].life {
            Life::Over => Ok(true),
            Life::Ended(event) => {
                let life = match event.is_complete(driver) {
                    Ok(true) => Life::Over,
                    Ok(false) => return Ok(false),
                    // A capture that began and ended in between has taken the record along.
                    Err(failure) if failure.code == CUresult::CUDA_ERROR_CAPTURED_EVENT => {
                        Life::Lost(self.sequence)
                    }
                    Err(failure) => return Err(failure.into()),
                };
                self.spare.push(event);
                self.places[place].life = life;
                Ok(matches!(life, Life::Over))
            }
            Life::Lasting(_) | Life::Foreign | Life::Lost(_) => Ok(false),
        }
    }

    /// The stream at a place is about to end: a last event covers all that it was given.
    pub(super) fn stream_ends(&mut self, core: &Core, place: u32, handle: StreamHandle) {
        self.sequence += 1;
        let unused = {
            let books = core.books.lock();
            let (of, known) = (&self.places[place as usize], &books.places[place as usize]);
            known.blocks == 0 && known.pins == 0 && of.queue.is_empty() && of.deferred == 0
        };
        let life = if unused { Life::Over } else { self.last_life(core, handle) };
        self.places[place as usize].life = life;
        // What was to be recorded on it is covered by that.
        for index in (0..self.deferred.len()).rev() {
            let of = &self.deferred[index];
            if of.place == place && of.on == On::Place {
                let Deferred { block, since, .. } = self.deferred.swap_remove(index);
                self.places[place as usize].deferred -= 1;
                self.enqueue(place, Waiter { event: None, block, since });
            }
        }
        self.publish(core);
    }

    fn last_life(&mut self, core: &Core, handle: StreamHandle) -> Life {
        let lost = Life::Lost(self.sequence);
        let Ok(_context) = core.device.enter() else { return lost };
        let spare = self.spare.pop();
        let unused = match record_beside_captures(core.device.driver(), handle, spare) {
            Ok(Recorded::On(event)) => return Life::Ended(event),
            Ok(Recorded::Capturing(spare)) => spare,
            Err(_) => spare,
        };
        self.spare.extend(unused);
        lost
    }

    fn enqueue(&mut self, place: u32, waiter: Waiter) {
        let queue = &mut self.places[place as usize].queue;
        if queue.is_empty() {
            self.busy.push(place);
        }
        queue.push_back(waiter);
    }

    fn put(&mut self, place: u32, block: u32, made: Made) {
        self.sequence += 1;
        let since = self.sequence;
        match made {
            Made::Event(event) => self.enqueue(place, Waiter { event: Some(event), block, since }),
            Made::Last => self.enqueue(place, Waiter { event: None, block, since }),
            Made::Deferred(on) => self.defer(Deferred { place, on, block, since }),
        }
    }

    fn defer(&mut self, of: Deferred) {
        self.places[of.place as usize].deferred += 1;
        self.deferred.push(of);
    }

    /// Tells those who look without the lock how many waits there are.
    fn publish(&self, core: &Core) {
        let queues = self.busy.iter().map(|place| self.places[*place as usize].queue.len());
        let count = queues.sum::<usize>() + self.deferred.len();
        core.outstanding.store(count, Ordering::Relaxed);
    }

    /// Records what a free has to wait for on one stream; nothing where its work is over.
    fn record(&mut self, core: &Core, of: &Use) -> Result<Option<Made>> {
        let driver = core.device.driver();
        let (on, deferred) = match self.places[of.place as usize].life {
            Life::Over => return Ok(None),
            Life::Ended(_) | Life::Lost(_) => return Ok(Some(Made::Last)),
            Life::Lasting(handle) => (handle, On::Place),
            Life::Foreign if of.on == StreamHandle::PER_THREAD => {
                if !is_of_this_thread(core, of.place)? {
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

    /// Records what was deferred, where that is possible now.
    fn retry_deferred(&mut self, core: &Core) -> Result<()> {
        let driver = core.device.driver();
        for index in (0..self.deferred.len()).rev() {
            let (place, on) = (self.deferred[index].place, self.deferred[index].on);
            let handle = match (on, self.places[place as usize].life) {
                (On::Place, Life::Lasting(handle)) => handle,
                (On::PerThread, _) if is_of_this_thread(core, place)? => StreamHandle::PER_THREAD,
                _ => continue,
            };
            let spare = self.spare.pop();
            match record_beside_captures(driver, handle, spare) {
                Ok(Recorded::Capturing(spare)) => self.spare.extend(spare),
                Ok(Recorded::On(event)) => {
                    let Deferred { block, since, .. } = self.deferred.swap_remove(index);
                    self.places[place as usize].deferred -= 1;
                    self.enqueue(place, Waiter { event: Some(event), block, since });
                }
                Err(failure) => {
                    self.spare.extend(spare);
                    return Err(failure.into());
                }
            }
        }
        Ok(())
    }

    /// Takes everything as far as it has come. The context must be current, beside captures.
    fn advance(&mut self, core: &Core) -> Result<()> {
        self.retry_deferred(core)?;
        let driver = core.device.driver();
        let mut at = 0;
        while let Some(place) = self.busy.get(at).copied() {
            self.advance_queue(core, driver, place)?;
            if self.places[place as usize].queue.is_empty() {
                self.busy.swap_remove(at);
            } else {
                at += 1;
            }
        }
        Ok(())
    }

    fn advance_queue(&mut self, core: &Core, driver: &Driver, place: u32) -> Result<()> {
        while let Some(first) = self.places[place as usize].queue.front() {
            let Some(event) = first.event else {
                if !self.settle_end(driver, place as usize)? {
                    return Ok(());
                }
                self.pop(core, place);
                continue;
            };
            match event.is_complete(driver) {
                Ok(true) => self.pop(core, place),
                Ok(false) => return Ok(()),
                // A capture that began and ended in between has taken the record along.
                Err(failure) if failure.code == CUresult::CUDA_ERROR_CAPTURED_EVENT => {
                    self.defer_first(place);
                }
                Err(failure) => return Err(failure.into()),
            }
        }
        Ok(())
    }

    /// The first of a queue has waited long enough.
    fn pop(&mut self, core: &Core, place: u32) {
        if let Some(waiter) = self.places[place as usize].queue.pop_front() {
            self.spare.extend(waiter.event);
            core.books.lock().wait_is_over(waiter.block);
        }
    }

    /// The first of a queue has no event after all.
    fn defer_first(&mut self, place: u32) {
        let of = &mut self.places[place as usize];
        let Some(Waiter { event, block, since }) = of.queue.pop_front() else { return };
        let on = if matches!(of.life, Life::Lasting(_)) { On::Place } else { On::Nowhere };
        self.spare.extend(event);
        self.defer(Deferred { place, on, block, since });
    }

    /// Waits on the host for every event there is.
    fn wait(&mut self, core: &Core) -> Result<()> {
        let driver = core.device.driver();
        let _beside = BesideCaptures::enter(driver)?;
        self.advance(core)?;
        for place in self.busy.clone() {
            let of = &self.places[place as usize];
            // What is behind the last one is behind all.
            if let Some(event) = of.queue.iter().rev().find_map(|waiter| waiter.event) {
                event.wait(driver)?;
            }
        }
        for place in 0..self.places.len() {
            if let Life::Ended(event) = self.places[place].life {
                event.wait(driver)?;
                self.settle_end(driver, place)?;
            }
        }
        self.advance(core)
    }

    /// The host has seen complete what was enqueued before `point`, on a place's stream or on all.
    pub(super) fn passed(&mut self, core: &Core, place: Option<u32>, point: u64) {
        let of_mark = |at: u32| place.is_none_or(|place| place == at);
        for at in self.busy.clone().into_iter().filter(|at| of_mark(*at)) {
            let is_past = |waiter: &Waiter| waiter.since <= point;
            while self.places[at as usize].queue.front().is_some_and(is_past) {
                self.pop(core, at);
            }
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

    /// The stream to give a place's memory back on; `None` where it is not known to be alive, or
    /// captures. What is over needs no stream in particular. `alive`: a place with a stream that the
    /// caller vouches for.
    pub(super) fn stream_of(
        &self,
        driver: &Driver,
        place: u32,
        alive: Option<(u32, StreamHandle)>,
    ) -> Option<StreamHandle> {
        match self.places[place as usize].life {
            Life::Lasting(handle) => {
                let capturing = stream_is_capturing(driver, handle).unwrap_or(true);
                (!capturing).then_some(handle)
            }
            Life::Over => Some(StreamHandle::LEGACY),
            Life::Foreign => alive.filter(|of| of.0 == place).map(|(_, handle)| handle),
            Life::Ended(_) | Life::Lost(_) => None,
        }
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
        for event in self.spare.drain(..).chain(queued) {
            // SAFETY: the owner ends, and nobody else has its events.
            let _ = unsafe { event.destroy(driver) };
        }
    }
}

/// Whether the calling thread's default stream is the one at a place. While it captures nobody can
/// tell.
fn is_of_this_thread(core: &Core, place: u32) -> Result<bool> {
    if stream_is_capturing(core.device.driver(), StreamHandle::PER_THREAD)? {
        return Ok(false);
    }
    let stream = core.ask_number(StreamHandle::PER_THREAD)?;
    Ok(core.books.lock().places[place as usize].stream == stream)
}

impl Core {
    /// A free of an allocation that further streams use.
    #[cold]
    #[inline(never)]
    pub(super) fn free_used(&self, ptr: DevicePtr, uses: &[Use]) -> Result<()> {
        let mut waits = lock(&self.waits);
        let _context = self.device.enter()?;
        let mut made: SmallVec<[(u32, Made); 2]> = SmallVec::new();
        let mut recorded = Ok(());
        for of in uses {
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
                made.into_iter().for_each(|(place, one)| waits.put(place, block, one));
                waits.publish(self);
                Ok(())
            }
            Err(error) => {
                let events = made.into_iter().filter_map(|(_, one)| match one {
                    Made::Event(event) => Some(event),
                    Made::Last | Made::Deferred(_) => None,
                });
                waits.spare.extend(events);
                Err(error)
            }
        }
    }

    /// Asks about what is waited for, unless another thread does so now.
    #[cold]
    #[inline(never)]
    pub(super) fn advance_waits(&self) -> Result<()> {
        let mut waits = match self.waits.try_lock() {
            Ok(waits) => waits,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(()),
        };
        let _context = self.device.enter()?;
        let _beside = BesideCaptures::enter(self.device.driver())?;
        let advanced = waits.advance(self);
        waits.publish(self);
        advanced
    }

    /// Waits on the host for everything that can be waited for.
    pub(super) fn wait_for_uses(&self) -> Result<()> {
        let mut waits = lock(&self.waits);
        let _context = self.device.enter()?;
        let waited = waits.wait(self);
        waits.publish(self);
        waited
    }
}

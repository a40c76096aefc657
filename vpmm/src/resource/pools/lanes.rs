//! What each stream has freed, and how another stream may come after it.
//!
//! Every stream that calls has a lane. What it frees carries the lane's epoch, a number that only grows.
//! An event recorded on the stream covers every epoch up to its own; when it is seen complete these have
//! *passed*, and what carries them is nobody's. A stream that is made to wait for the event may use it
//! at once.
//!
//! | stream | event |
//! |---|---|
//! | of this library, legacy default stream | recorded when somebody else wants the memory, or when the stream ends |
//! | any other, per-thread default streams | recorded at each free: nobody tells when they end, and on a per-thread one only its own thread can record. Refused while they capture: the question which one it is would end the capture |
//! | capturing, of this library | none until the capture has ended: it would become a node of the graph |
//! | ended | the one recorded at its end; without one, a wait for the device |
//!
//! - **L1** What is in a lane is safe for work enqueued on its stream after the call: what it took over from
//!   another it has waited for first.
//! - **L2** An event counts for an epoch only if it was recorded, outside of any capture, after everything
//!   that carries that epoch was put there. So whoever waits for a lane waits for all that the lane itself
//!   has waited for.
//! - **L3** Epochs of a lane only grow, whichever stream has it: an old wait says nothing about a new stream.

use smallvec::SmallVec;

use crate::capture::{
    BesideCaptures, device_is_capturing, stream_is_capturing, wait_at_end, wait_for_context,
};
use crate::device::{Device, StreamHandle};
use crate::driver::{Awaited, Driver, Failure, StreamWatcher};
use crate::error::{Error, Result};
use crate::event::Event;
use crate::lock::SpinLock;
use crate::ordering::{Mark, next_pool};

use super::blocks::{ByAddress, NOBODY};

/// The legacy default stream's number here; the driver's own numbers do not come so far.
const LEGACY: u64 = u64::MAX;

/// No stream's number.
const NO_STREAM: u64 = u64::MAX - 1;

/// Spare events that are kept.
const SPARES: usize = 64;

/// Which stream a handle means.
#[derive(Clone, Copy, Debug)]
pub(super) struct Named {
    stream: u64,
    recording: Recording,
    handle: StreamHandle,
}

impl Named {
    /// The stream's number, which no other stream ever has.
    pub(super) fn stream(self) -> u64 {
        self.stream
    }

    /// Whether its end is told, or it has none: then it is known by its handle, too.
    #[inline]
    pub(super) fn is_told(self) -> bool {
        self.recording != Recording::Eager
    }
}

/// When events are recorded on a lane's stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Recording {
    /// When somebody wants one.
    Lazy(StreamHandle),
    /// At each free.
    Eager,
    /// Never again; the last one covers everything.
    Ended,
    /// Never again, and there is none that covers everything.
    Lost,
}

/// An event, and up to which epoch it covers its lane.
#[derive(Clone, Copy, Debug)]
struct Record {
    event: Event,
    covers: u64,
}

#[derive(Debug)]
struct Lane {
    stream: u64,
    recording: Recording,
    /// What is freed now carries this.
    epoch: u64,
    /// The latest epoch that anything carries.
    freed: u64,
    /// Up to here all is complete.
    passed: u64,
    /// The event that is asked about.
    asked: Option<Record>,
    /// A later one, of streams that one is recorded on without being wanted.
    latest: Option<Record>,
    /// Other lanes that this stream has waited for, each up to an epoch.
    waited: SmallVec<[(u32, u64); 4]>,
}

impl Lane {
    fn covered(&self) -> u64 {
        let records = [self.asked, self.latest];
        records.into_iter().flatten().map(|record| record.covers).fold(self.passed, u64::max)
    }

    fn waited_for(&self, lane: u32) -> u64 {
        self.waited.iter().find(|(of, _)| *of == lane).map_or(0, |(_, epoch)| *epoch)
    }

    fn note_wait(&mut self, lane: u32, epoch: u64) {
        match self.waited.iter_mut().find(|(of, _)| *of == lane) {
            Some((_, known)) => *known = (*known).max(epoch),
            None => self.waited.push((lane, epoch)),
        }
    }

    /// The epoch of all that was freed so far, and that nothing has which is freed from now on.
    fn end_epoch(&mut self) -> u64 {
        self.epoch += 1;
        self.epoch - 1
    }
}

/// The lanes of one pool.
#[derive(Debug)]
pub(super) struct Lanes {
    device: Device,
    by_stream: ByAddress<u32>,
    /// The stream that called last, and its lane.
    last: (u64, u32),
    /// The first is nobody's.
    lanes: Vec<Lane>,
    spare: Vec<Event>,
    /// The pool ends, and waits for some of the events.
    retires: bool,
    /// What tells this pool's marks from others'.
    number: u64,
}

/// Finds out which stream a handle means: without a driver call for a stream of this library and the legacy
/// default stream, with three or more for others.
#[inline(always)]
pub(super) fn name(device: &Device, handle: StreamHandle) -> Result<Named> {
    device.driver().check_process()?;
    match number_of(device, handle) {
        Some(stream) => Ok(Named { stream, recording: Recording::Lazy(handle), handle }),
        None => name_by_the_driver(device, handle),
    }
}

#[cold]
fn name_by_the_driver(device: &Device, handle: StreamHandle) -> Result<Named> {
    let _context = device.enter()?;
    let driver = device.driver();
    // First of all: on a capturing stream even the question for its number ends the capture.
    if stream_is_capturing(driver, handle)? {
        return Err(Error::StreamCapturing);
    }
    let mut stream = 0;
    // SAFETY: whoever made the handle vouches that its stream is alive; the pointer is to a live u64.
    unsafe { driver.cuStreamGetId(handle.raw(), &mut stream) }?;
    Ok(Named { stream, recording: Recording::Eager, handle })
}

/// The number of a stream that is known by its handle.
#[inline]
pub(super) fn number_of(device: &Device, handle: StreamHandle) -> Option<u64> {
    let known = handle.known_to(device.driver().realm());
    known.or_else(|| (handle == StreamHandle::LEGACY).then_some(LEGACY))
}

impl Lanes {
    pub(super) fn new(device: &Device) -> Self {
        let mut lanes = Self {
            device: device.clone(),
            by_stream: ByAddress::default(),
            last: (NO_STREAM, NOBODY),
            lanes: Vec::new(),
            spare: Vec::new(),
            retires: false,
            number: next_pool(),
        };
        lanes.add(0, Recording::Ended);
        lanes
    }

    fn driver(&self) -> &Driver {
        self.device.driver()
    }

    fn add(&mut self, stream: u64, recording: Recording) -> u32 {
        self.lanes.push(Lane {
            stream,
            recording,
            epoch: 1,
            freed: 0,
            passed: 0,
            asked: None,
            latest: None,
            waited: SmallVec::new(),
        });
        (self.lanes.len() - 1) as u32
    }

    /// Every lane but nobody's.
    pub(super) fn all(&self) -> impl Iterator<Item = u32> + use<> {
        1..self.lanes.len() as u32
    }

    /// The lane of a stream that has one and is known by its handle.
    #[inline]
    pub(super) fn known(&self, named: Named) -> Option<u32> {
        if named.recording == Recording::Eager {
            return None;
        }
        if self.last.0 == named.stream {
            return Some(self.last.1);
        }
        let lane = *self.by_stream.get(&named.stream)?;
        (self.lanes[lane as usize].recording != Recording::Eager).then_some(lane)
    }

    /// What is freed on the stream of a [known](Self::known) lane now carries the epoch that this returns.
    #[inline]
    pub(super) fn freed_on_known(&mut self, lane: u32) -> u64 {
        let known = &mut self.lanes[lane as usize];
        known.freed = known.epoch;
        known.epoch
    }

    /// The lane of a stream, made if there is none; `is_empty` tells whether nothing is in a lane, so that
    /// it can be given to another stream.
    #[inline]
    pub(super) fn lane(&mut self, named: Named, is_empty: impl Fn(u32) -> bool) -> Result<u32> {
        if let Some(lane) = self.known(named) {
            self.last = (named.stream, lane);
            return Ok(lane);
        }
        let lane = self.find(named, is_empty)?;
        if self.lanes[lane as usize].recording != Recording::Eager {
            self.last = (named.stream, lane);
        }
        Ok(lane)
    }

    fn find(&mut self, named: Named, is_empty: impl Fn(u32) -> bool) -> Result<u32> {
        match self.by_stream.get(&named.stream) {
            Some(&lane) => {
                let known = &mut self.lanes[lane as usize];
                // A stream met by its raw handle first may turn out to be the library's own. What it has
                // freed is covered by its last event, what it will free by later ones.
                if known.recording == Recording::Eager && named.recording != Recording::Eager {
                    known.recording = named.recording;
                }
                Ok(lane)
            }
            None => self.open(named, is_empty),
        }
    }

    #[cold]
    fn open(&mut self, named: Named, is_empty: impl Fn(u32) -> bool) -> Result<u32> {
        {
            let _context = self.device.enter()?;
            if named.stream != LEGACY {
                self.device.check_stream(named.handle)?;
            }
        }
        let unused = |lane: &u32| {
            let recording = self.lanes[*lane as usize].recording;
            !matches!(recording, Recording::Lazy(_)) && is_empty(*lane)
        };
        let vacant = self.all().find(unused);
        let lane = match vacant {
            Some(lane) => {
                let known = &mut self.lanes[lane as usize];
                // One that was lent again has another lane now.
                if self.by_stream.get(&known.stream) == Some(&lane) {
                    self.by_stream.remove(&known.stream);
                }
                let records = [known.asked.take(), known.latest.take()];
                (known.stream, known.recording) = (named.stream, named.recording);
                known.passed = known.epoch;
                known.epoch += 1;
                known.waited.clear();
                records.into_iter().flatten().for_each(|record| self.keep(record.event));
                lane
            }
            None => self.add(named.stream, named.recording),
        };
        self.by_stream.insert(named.stream, lane);
        Ok(lane)
    }

    /// What is freed on a lane's stream now carries the epoch that this returns. Where nobody will tell of
    /// the stream's end, an event is recorded; if that fails nothing has changed.
    #[inline]
    pub(super) fn freed(&mut self, lane: u32, named: Named) -> Result<u64> {
        if self.lanes[lane as usize].recording != Recording::Eager {
            return Ok(self.freed_on_known(lane));
        }
        let device = self.device.clone();
        let _context = device.enter()?;
        self.record_latest(lane, named.handle)
    }

    /// The epoch that all is in that a lane's stream was given so far. `named`: what it was used by.
    pub(super) fn used_until(&mut self, lane: u32, named: Named) -> Result<u64> {
        let known = &mut self.lanes[lane as usize];
        match known.recording {
            Recording::Lazy(_) => Ok(self.freed_on_known(lane)),
            // Its last event is behind all of it, or only a wait for the device is.
            Recording::Ended | Recording::Lost => Ok(known.freed),
            Recording::Eager => {
                let own = named.handle != StreamHandle::PER_THREAD
                    || name(&self.device, named.handle).is_ok_and(|own| own.stream == named.stream);
                if own {
                    return self.freed(lane, named);
                }
                // Another thread's default stream: that thread's next free records behind it.
                let known = &mut self.lanes[lane as usize];
                known.freed = known.epoch;
                Ok(known.epoch)
            }
        }
    }

    /// Puts an event behind everything on a stream so far: what carries the epoch returned is covered.
    fn record_latest(&mut self, lane: u32, handle: StreamHandle) -> Result<u64> {
        let event = match self.lanes[lane as usize].latest {
            Some(record) => record.event,
            None => self.event()?,
        };
        if let Err(failure) = event.record(self.driver(), handle) {
            if self.lanes[lane as usize].latest.is_none() {
                self.keep(event);
            }
            return Err(failure.into());
        }
        let known = &mut self.lanes[lane as usize];
        let covers = known.epoch;
        known.latest = Some(Record { event, covers });
        known.freed = covers;
        known.epoch += 1;
        Ok(covers)
    }

    /// An event, of which the context must be current.
    fn event(&mut self) -> Result<Event, Failure> {
        match self.spare.pop() {
            Some(event) => Ok(event),
            None => Event::new(self.driver()),
        }
    }

    fn keep(&mut self, event: Event) {
        if self.spare.len() < SPARES || self.retires {
            self.spare.push(event);
        } else {
            // SAFETY: the record that had it is gone. The driver lets an event go once it is complete.
            let _ = unsafe { event.destroy(self.driver()) };
        }
    }

    /// Records an event on a stream of this library that covers all that it has freed; `None` on a stream
    /// that captures. `into` is the lane's latest, if it has one.
    fn record_all(
        &mut self,
        lane: u32,
        handle: StreamHandle,
        into: Option<Event>,
    ) -> Result<Option<Record>, Failure> {
        if stream_is_capturing(self.driver(), handle)? {
            return Ok(None);
        }
        let event = match into {
            Some(event) => event,
            None => self.event()?,
        };
        if let Err(failure) = event.record(self.driver(), handle) {
            if into.is_none() {
                self.keep(event);
            }
            return Err(failure);
        }
        // A capture that began in between has the event: to ask about it, or to wait for it, would be in that
        // one's way, and so is what was there before not to be used any more.
        let counts = stream_is_capturing(self.driver(), handle);
        if !matches!(counts, Ok(false)) {
            if into.is_some() {
                self.lanes[lane as usize].latest = None;
            }
            self.keep(event);
            return counts.map(|_| None);
        }
        let known = &mut self.lanes[lane as usize];
        let covers = known.epoch;
        known.epoch += 1;
        Ok(Some(Record { event, covers }))
    }

    /// An event of a lane proves nothing: a capture has it that ended before it was seen there. Another may be
    /// recorded, but for a stream that has ended.
    fn is_captured(&mut self, lane: u32, event: Event) {
        let known = &mut self.lanes[lane as usize];
        let is_it = |record: &mut Record| record.event == event;
        let gone = [known.asked.take_if(is_it), known.latest.take_if(is_it)];
        if known.recording == Recording::Ended && known.covered() < known.freed {
            known.recording = Recording::Lost;
        }
        gone.into_iter().flatten().for_each(|record| self.keep(record.event));
    }

    /// Asks how far a lane's stream has come: the epoch up to which all is complete now, if that is more
    /// than before. At most two events are asked about.
    pub(super) fn poll(&mut self, lane: u32) -> Result<Option<u64>> {
        if !self.has_pending(lane) {
            return Ok(None);
        }
        let device = self.device.clone();
        let _context = device.enter()?;
        let _beside = BesideCaptures::enter(device.driver())?;
        let before = self.lanes[lane as usize].passed;
        for _ in 0..2 {
            if !self.has_pending(lane) {
                break;
            }
            let known = &mut self.lanes[lane as usize];
            let record = match (known.asked, known.recording) {
                (Some(record), _) => Some(record),
                (None, Recording::Lazy(handle)) if known.latest.is_none() => {
                    self.record_all(lane, handle, None)?
                }
                _ => known.latest.take(),
            };
            let Some(record) = record else { break };
            self.lanes[lane as usize].asked = Some(record);
            match record.event.is_complete(self.driver()) {
                Ok(true) => self.see_passed(lane, record.covers),
                Ok(false) => break,
                Err(failure) if failure.is_of_capture() => {
                    self.is_captured(lane, record.event);
                }
                Err(failure) => return Err(failure.into()),
            }
        }
        let passed = self.lanes[lane as usize].passed;
        Ok((passed > before).then_some(passed))
    }

    /// Whether anything carries an epoch that has not passed.
    fn has_pending(&self, lane: u32) -> bool {
        let known = &self.lanes[lane as usize];
        known.freed > known.passed
    }

    /// Whether a lane's stream has ended, with a last event behind it.
    pub(super) fn has_ended(&self, lane: u32) -> bool {
        self.lanes[lane as usize].recording == Recording::Ended
    }

    /// Whether a lane's stream has ended and all its work has.
    pub(super) fn is_over(&self, lane: u32) -> bool {
        self.has_ended(lane) && !self.has_pending(lane)
    }

    /// Everything up to an epoch is complete: events that cover no more are of no use.
    fn see_passed(&mut self, lane: u32, epoch: u64) {
        let known = &mut self.lanes[lane as usize];
        known.passed = known.passed.max(epoch);
        let passed = known.passed;
        let done = |record: &mut Record| record.covers <= passed;
        let gone = [known.asked.take_if(done), known.latest.take_if(done)];
        gone.into_iter().flatten().for_each(|record| self.keep(record.event));
    }

    /// Makes a stream wait on the GPU for another lane, up to an epoch, unless it has. `false` where that
    /// cannot be: one of the two captures a graph, or the other has been lost.
    pub(super) fn come_after(
        &mut self,
        to: u32,
        named: Named,
        from: u32,
        epoch: u64,
    ) -> Result<bool> {
        if from == to || self.is_after(to, from, epoch) {
            return Ok(true);
        }
        let device = self.device.clone();
        let _context = device.enter()?;
        let _beside = BesideCaptures::enter(device.driver())?;
        if stream_is_capturing(self.driver(), named.handle)? {
            return Ok(false);
        }
        let known = &self.lanes[from as usize];
        let covering = [known.asked, known.latest].into_iter().flatten();
        let record = match covering.filter(|record| record.covers >= epoch).min_by_key(|r| r.covers)
        {
            Some(record) => record,
            None => {
                let Recording::Lazy(handle) = known.recording else { return Ok(false) };
                let latest = known.latest.map(|record| record.event);
                let Some(record) = self.record_all(from, handle, latest)? else {
                    return Ok(false);
                };
                self.lanes[from as usize].latest = Some(record);
                record
            }
        };
        match record.event.hold_back(self.driver(), named.handle) {
            Ok(()) => {}
            Err(failure) if failure.is_of_capture() => {
                self.is_captured(from, record.event);
                return Ok(false);
            }
            Err(failure) => return Err(failure.into()),
        }
        self.lanes[to as usize].note_wait(from, record.covers);
        Ok(true)
    }

    /// Whether a stream comes after another lane up to an epoch, without a further wait.
    pub(super) fn is_after(&self, to: u32, from: u32, epoch: u64) -> bool {
        let passed = self.lanes[from as usize].passed;
        epoch <= passed || epoch <= self.lanes[to as usize].waited_for(from)
    }

    /// What was put into a lane that its stream did not free itself, but has waited for, carries the epoch
    /// that this returns.
    pub(super) fn put(&mut self, lane: u32, named: Named) -> u64 {
        match self.freed(lane, named) {
            Ok(epoch) => epoch,
            // Without an event it stays the stream's own until one is recorded.
            Err(_) => {
                let known = &mut self.lanes[lane as usize];
                known.freed = known.epoch;
                known.epoch
            }
        }
    }

    /// A lane for what a stream had that has none and can be given none, and the epoch that it carries: only a wait
    /// for the device tells when that is complete.
    pub(super) fn put_lost(&mut self) -> (u32, u64) {
        let lane = self.add(NO_STREAM, Recording::Lost);
        (lane, self.freed_on_known(lane))
    }

    /// Whether nobody can record behind what is pending of a lane: its stream is gone without an event, or
    /// another thread's.
    pub(super) fn is_lost(&self, lane: u32) -> bool {
        let known = &self.lanes[lane as usize];
        let can_record = matches!(known.recording, Recording::Lazy(_));
        !can_record && self.has_pending(lane) && known.covered() < known.freed
    }

    /// Events behind all that is pending, as far as there can be any; from here on none is destroyed before
    /// the end.
    fn last_records(&mut self) -> Result<Vec<(u32, Record)>> {
        self.retires = true;
        let mut last = Vec::new();
        for lane in self.all().filter(|lane| self.has_pending(*lane)).collect::<Vec<_>>() {
            let known = &self.lanes[lane as usize];
            if let Recording::Lazy(handle) = known.recording
                && known.covered() < known.freed
            {
                let latest = known.latest.map(|record| record.event);
                let record = self.record_all(lane, handle, latest)?;
                if record.is_some() {
                    self.lanes[lane as usize].latest = record;
                }
            }
            let known = &self.lanes[lane as usize];
            let records = [known.asked, known.latest].into_iter().flatten();
            last.extend(records.max_by_key(|record| record.covers).map(|record| (lane, record)));
        }
        Ok(last)
    }

    /// What is pending of each lane, up to which epoch. What is freed from now on is no part of it.
    pub(super) fn pending(&mut self) -> Vec<(u32, u64)> {
        let pending: Vec<u32> = self.all().filter(|lane| self.has_pending(*lane)).collect();
        pending.into_iter().map(|lane| (lane, self.lanes[lane as usize].end_epoch())).collect()
    }

    /// The host has waited for everything in the context: what was pending before has passed.
    pub(super) fn device_passed(&mut self, pending: &[(u32, u64)]) {
        // Epochs of a lane only grow: whose it may be by now, these are before.
        pending.iter().for_each(|(lane, epoch)| self.see_passed(*lane, *epoch));
    }

    /// Up to here all of a lane is complete.
    pub(super) fn passed(&self, lane: u32) -> u64 {
        self.lanes[lane as usize].passed
    }

    /// A stream of this library is about to end: the last chance to record on it. `is_used` tells whether a lane's
    /// stream was noted for what is allocated, which it may have used until now.
    pub(super) fn stream_ends(&mut self, handle: StreamHandle, is_used: impl Fn(u32) -> bool) {
        let Some(stream) = number_of(&self.device, handle) else { return };
        let Some(lane) = self.by_stream.remove(&stream) else { return };
        // Who lent it may lend it again, under the same number: the lane can be another stream's by then.
        self.last = (NO_STREAM, NOBODY);
        let known = &mut self.lanes[lane as usize];
        if is_used(lane) {
            known.freed = known.epoch;
        }
        if known.covered() >= known.freed {
            self.lanes[lane as usize].recording = Recording::Ended;
            return;
        }
        let latest = known.latest.map(|record| record.event);
        let device = self.device.clone();
        let recorded = device.enter().and_then(|_context| {
            let _beside = BesideCaptures::enter(device.driver())?;
            Ok(self.record_all(lane, handle, latest)?)
        });
        let known = &mut self.lanes[lane as usize];
        match recorded {
            Ok(Some(record)) => (known.latest, known.recording) = (Some(record), Recording::Ended),
            _ => known.recording = Recording::Lost,
        }
    }

    /// What the host is about to wait for, as far as it matters here.
    pub(super) fn marks(&mut self, of: Awaited) -> SmallVec<[Mark; 2]> {
        let lanes: SmallVec<[u32; 4]> = match of {
            _ if !of.is_of(&self.device) => SmallVec::new(),
            Awaited::Stream(handle, _) => {
                let stream = number_of(&self.device, handle);
                stream.and_then(|stream| self.by_stream.get(&stream).copied()).into_iter().collect()
            }
            Awaited::Device(_) => self.all().collect(),
        };
        let pending = lanes.into_iter().filter(|lane| self.has_pending(*lane));
        let pending: SmallVec<[u32; 4]> = pending.collect();
        let mut marks = SmallVec::new();
        for lane in pending {
            let known = &mut self.lanes[lane as usize];
            // What is freed from now on is not waited for.
            let point = known.end_epoch();
            marks.push(Mark { pool: self.number, stream: lane, point, epoch: known.stream });
        }
        marks
    }

    /// The host has waited for what was marked: the lane and the epoch up to which all is complete.
    pub(super) fn see_mark(&mut self, mark: &Mark) -> Option<(u32, u64)> {
        let known = self.lanes.get(mark.stream as usize)?;
        if mark.pool != self.number || known.stream != mark.epoch {
            return None;
        }
        self.see_passed(mark.stream, mark.point);
        Some((mark.stream, mark.point))
    }

    /// Destroys every event.
    pub(super) fn end(&mut self) {
        let records =
            self.lanes.iter_mut().flat_map(|lane| [lane.asked.take(), lane.latest.take()]);
        let events: Vec<Event> =
            records.flatten().map(|record| record.event).chain(self.spare.drain(..)).collect();
        for event in events {
            // SAFETY: nobody has the event any more. After the context's end the driver answers with an
            // error, which leaves nothing to do.
            let _ = unsafe { event.destroy(self.driver()) };
        }
    }

    /// Lanes that are some stream's, for reports.
    pub(super) fn len(&self) -> usize {
        self.by_stream.len()
    }
}

const _: () = assert!(NOBODY == 0);

/// Waits on the host for everything in the context, for a request on a stream: `false`, and no wait, where that
/// or another that is known of captures, since the wait would end its capture. Not under the lock of a pool: what is
/// waited for may depend on a thread that comes there first.
pub(super) fn wait_for_device_beside(device: &Device, stream: StreamHandle) -> Result<bool> {
    let driver = device.driver();
    let _context = device.enter()?;
    let _beside = BesideCaptures::enter(driver)?;
    let captures = stream_is_capturing(driver, stream)? || device_is_capturing(device)?;
    Ok(!captures && wait_for_context(driver)?)
}

/// The end of a pool, before its memory goes back: waits on the host for all that was freed, takes the pool out
/// of the driver's list, and destroys its events. Whether all of its work is known to be complete: else its memory
/// is nobody's to give to others. `of_callers`: something is allocated still, and goes back in the order of a stream.
/// Nobody tells which streams use it, so only a wait for the device will do.
#[must_use]
pub(super) fn retire<S, W: StreamWatcher>(
    watcher: &W,
    state: &SpinLock<S>,
    lanes: impl Fn(&mut S) -> &mut Lanes,
    of_callers: bool,
) -> bool {
    let waited = wait_for_all(state, &lanes, of_callers);
    let driver = lanes(&mut state.lock()).driver().clone();
    // Streams were told until now; and nobody is in a call of the pool afterwards.
    driver.unwatch_streams(watcher);
    lanes(&mut state.lock()).end();
    waited.is_ok()
}

/// Waits for all that was freed so far, for the device where there is no event for it, or one that fails. Without
/// the lock meanwhile: what is waited for may depend on a thread that comes here first, to tell a stream's end.
fn wait_for_all<S>(
    state: &SpinLock<S>,
    lanes: &impl Fn(&mut S) -> &mut Lanes,
    of_callers: bool,
) -> Result<()> {
    let device = lanes(&mut state.lock()).device.clone();
    let driver = device.driver();
    if !of_callers && lanes(&mut state.lock()).pending().is_empty() {
        return Ok(());
    }
    let _context = device.enter()?;
    let _beside = BesideCaptures::enter(driver)?;
    if !of_callers {
        let _ = wait_for_events(state, lanes, driver);
    }
    let left = lanes(&mut state.lock()).pending();
    if of_callers || !left.is_empty() {
        wait_at_end(&device)?;
        for (lane, epoch) in left {
            lanes(&mut state.lock()).see_passed(lane, epoch);
        }
    }
    Ok(())
}

/// Waits for what events there are; what they prove complete has passed.
fn wait_for_events<S>(
    state: &SpinLock<S>,
    lanes: &impl Fn(&mut S) -> &mut Lanes,
    driver: &Driver,
) -> Result<()> {
    let last = lanes(&mut state.lock()).last_records()?;
    for (lane, record) in last {
        record.event.wait(driver)?;
        lanes(&mut state.lock()).see_passed(lane, record.covers);
    }
    Ok(())
}

//! A graph's own memory, from its first capture to its release.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use super::captures::is_in_capture;
use super::lock;
use crate::capture::{BesideCaptures, wait_for_context};
use crate::default::Core;
use crate::device::{Device, StreamHandle};
use crate::error::{Error, Result};
use crate::event::Event;
use crate::stats::Stats;
use crate::units::DevicePtr;

/// A point of a stream behind the last launches, or the last uses; several threads may ask about it at a time.
struct LastUse {
    device: Device,
    event: Event,
}

impl LastUse {
    /// Records it on a stream that is not capturing. The device's context is current.
    fn record(device: &Device, stream: StreamHandle) -> Result<Arc<Self>> {
        let event = super::record(device, stream)?;
        Ok(Arc::new(Self { device: device.clone(), event }))
    }

    /// Whether the stream has come past it; with `wait` the host waits until it has.
    fn has_passed(&self, wait: bool) -> Result<bool> {
        let _context = self.device.enter()?;
        let driver = self.device.driver();
        let _beside = BesideCaptures::enter(driver)?;
        let answer = match wait {
            true => self.event.wait(driver).map(|()| true),
            false => self.event.is_complete(driver),
        };
        match answer {
            // A capture that began and ended around the record has taken it along: only the whole
            // device's work tells now.
            Err(failure) if failure.is_of_capture() => Ok(wait && wait_for_context(driver)?),
            answer => Ok(answer?),
        }
    }
}

impl Drop for LastUse {
    fn drop(&mut self) {
        let Ok(_context) = self.device.enter() else { return };
        // SAFETY: made for this value, which nobody has any more.
        let _ = unsafe { self.event.destroy(self.device.driver()) };
    }
}

/// Where in its life a graph's heap is.
enum Life {
    /// Captures take memory from it, and graphs that use it may be launched.
    Open,
    /// Its last handle was dropped: no graph is launched any more, but those launched before may
    /// still run. So many heaps were dropped before.
    Dropped(u64),
    /// Released: when the event has passed nothing runs any more.
    Released(Arc<LastUse>),
    /// Nothing runs any more.
    Quiet,
}

/// Memory of before a capture that a stream freed in it. The heap hands it out again once the stream's part is over,
/// as graphs come after all that the stream had been given before; the memory itself cannot go before that is done.
struct FreedInCapture {
    /// What the stream is called there.
    number: u64,
    /// The number of this among what waits for the device, should it come to that.
    at: u64,
    /// Behind the capture; none where nothing could be recorded yet.
    last_use: Option<Arc<LastUse>>,
}

/// What was allocated in captures that are not over, by address, and under which number.
pub(super) type Made = HashMap<u64, u64>;

/// Streams asked about for one that comes: twice as many as come.
const ASKED_FOR_ONE: usize = 2;

/// What is known of the heap's end once nothing runs any more.
enum End {
    /// Something is allocated, as far as anybody has looked, or waits for its stream; see [`Core::is_unused`].
    Ahead(Option<u64>),
    /// Nothing is told of streams' ends any more, so none may be asked anything.
    Over,
}

pub(crate) struct Graph {
    pub(super) core: Arc<Core>,
    /// Held during calls under a number of a capture, so that the number does not end meanwhile.
    pub(super) calls: Mutex<Made>,
    life: Mutex<Life>,
    end: Mutex<End>,
    freed: Mutex<VecDeque<FreedInCapture>>,
}

impl Graph {
    pub(super) fn new(core: Arc<Core>) -> Self {
        let (life, end) = (Mutex::new(Life::Open), Mutex::new(End::Ahead(None)));
        Self { core, calls: Mutex::default(), life, end, freed: Mutex::default() }
    }

    pub(super) fn check_open(&self) -> Result<()> {
        match *lock(&self.life) {
            Life::Open => Ok(()),
            _ => Err(Error::GraphPool { reason: "it has been released" }),
        }
    }

    pub(crate) fn stats(&self) -> Stats {
        self.core.stats()
    }

    pub(super) fn is_open(&self) -> bool {
        matches!(*lock(&self.life), Life::Open)
    }

    /// Records that graphs launched so far, all of them before this point of the stream, are the
    /// last.
    pub(super) fn release(&self, stream: StreamHandle) -> Result<()> {
        let device = self.core.device();
        let _context = device.enter()?;
        device.check_stream(stream)?;
        let mut life = lock(&self.life);
        if !matches!(*life, Life::Open) {
            return Err(Error::GraphPool { reason: "it has been released" });
        }
        *life = Life::Released(LastUse::record(device, stream)?);
        Ok(())
    }

    /// Before memory of before a capture is freed in that by the stream of this number. `at`: the number of this
    /// among what waits for the device.
    pub(super) fn note_free(&self, number: u64, at: impl FnOnce() -> u64) {
        let mut freed = lock(&self.freed);
        if !freed.iter().any(|of| of.number == number) {
            freed.push_back(FreedInCapture { number, at: at(), last_use: None });
        }
    }

    /// The part in a capture of the stream of this number is over: what it freed is for the next capture. Whether an
    /// event is to be behind it.
    pub(super) fn end_part(&self, number: u64) -> bool {
        self.core.end_held(number);
        lock(&self.freed).iter().any(|of| of.number == number)
    }

    /// The stream captures no more. Where nothing can be recorded on it the host's next wait for the device tells
    /// what it is done with.
    pub(super) fn end_part_behind(&self, number: u64, stream: StreamHandle) {
        let is_it = |of: &&mut FreedInCapture| of.number == number && of.last_use.is_none();
        if lock(&self.freed).iter_mut().find(is_it).is_none() {
            return;
        }
        let Ok(_context) = self.core.device().enter() else { return };
        let Ok(last_use) = LastUse::record(self.core.device(), stream) else { return };
        if let Some(of) = lock(&self.freed).iter_mut().find(is_it) {
            of.last_use = Some(last_use);
        }
        self.ask_some();
    }

    /// Asks about the first of the streams that freed such memory: whether it has done all that it had been
    /// given before, and is forgotten; nothing where there is none. With `wait` the host waits for it, if it can.
    fn ask_first(&self, wait: bool) -> Result<Option<bool>> {
        let last_use = match lock(&self.freed).front() {
            None => return Ok(None),
            Some(FreedInCapture { last_use: None, .. }) => return Ok(Some(false)),
            Some(FreedInCapture { last_use: Some(last_use), .. }) => Arc::clone(last_use),
        };
        if !last_use.has_passed(wait)? {
            return Ok(Some(false));
        }
        let is_it = |of: &FreedInCapture| {
            of.last_use.as_ref().is_some_and(|known| Arc::ptr_eq(known, &last_use))
        };
        lock(&self.freed).retain(|of| !is_it(of));
        Ok(Some(true))
    }

    /// Forgets some that have, so that few are noted more than have not.
    fn ask_some(&self) {
        for _ in 0..ASKED_FOR_ONE {
            if !self.ask_first(false).is_ok_and(|passed| passed == Some(true)) {
                let mut freed = lock(&self.freed);
                if let Some(first) = freed.pop_front() {
                    freed.push_back(first);
                }
            }
        }
    }

    /// Whether all of them have.
    fn frees_have_passed(&self, wait: bool) -> Result<bool> {
        loop {
            match self.ask_first(wait)? {
                None => return Ok(true),
                Some(false) => return Ok(false),
                Some(true) => {}
            }
        }
    }

    /// No graph that uses the memory will be launched any more.
    pub(super) fn drop_handle(&self, dropped: u64) {
        let mut life = lock(&self.life);
        if let Life::Open = *life {
            *life = Life::Dropped(dropped);
        }
    }

    /// The host has seen everything on the device complete since this many things waited for that.
    pub(super) fn device_passed(&self, number: u64) {
        {
            let mut life = lock(&self.life);
            if matches!(*life, Life::Dropped(at) if at <= number) {
                *life = Life::Quiet;
            }
        }
        let over: VecDeque<FreedInCapture> = {
            let mut freed = lock(&self.freed);
            let (over, left) =
                std::mem::take(&mut *freed).into_iter().partition(|of| of.at <= number);
            *freed = left;
            over
        };
        // Without the lock: their events go.
        drop(over);
    }

    /// Whether no graph that uses the memory runs any more, nor work of before a capture that freed some of it.
    /// With `wait` the host waits for the events of both.
    pub(super) fn is_quiet(&self, wait: bool) -> Result<bool> {
        let last = match &*lock(&self.life) {
            Life::Open | Life::Dropped(_) => return Ok(false),
            Life::Quiet => None,
            Life::Released(last) => Some(Arc::clone(last)),
        };
        if let Some(last) = last {
            if !last.has_passed(wait)? {
                return Ok(false);
            }
            *lock(&self.life) = Life::Quiet;
        }
        self.frees_have_passed(wait)
    }

    /// Gives back what the heap of a graph holds that is [quiet](Self::is_quiet), where nothing of it is in use: the
    /// bytes that went back, and whether that was the heap's end, once. Other threads may have come to it in the list,
    /// and wait here.
    pub(super) fn end_unused(&self) -> Result<Option<(u64, bool)>> {
        let mut end = lock(&self.end);
        let End::Ahead(last) = &mut *end else { return Ok(None) };
        // A capture of another graph's may have freed the last of it just now.
        if !self.core.is_unused(last)? || !lock(&self.freed).is_empty() {
            return Ok(None);
        }
        // What the driver refuses now would be lost with the heap.
        let (given, is_all) = self.core.give_all_back()?;
        if is_all {
            *end = End::Over;
            self.core.retire_unused();
        }
        Ok(Some((given, is_all)))
    }

    /// A request on a stream of the capture that the graph's pool is open to.
    pub(super) fn malloc(
        &self,
        bytes: usize,
        stream: StreamHandle,
        number: u64,
        made: &mut Made,
    ) -> Result<DevicePtr> {
        let ptr = self.core.malloc_held(bytes, stream, number)?;
        // Work between the begin and the capture is as that of before.
        if is_in_capture(self.core.device(), stream) {
            made.insert(ptr.address(), number);
        } else {
            made.remove(&ptr.address());
        }
        Ok(ptr)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        self.core.retire();
    }
}

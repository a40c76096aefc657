//! A graph's own memory, from its first capture to its release.

use std::sync::{Arc, Mutex};

use super::lock;
use crate::capture::BesideCaptures;
use crate::default::Core;
use crate::device::{Device, StreamHandle};
use crate::error::{Error, Result};
use crate::event::Event;
use crate::stats::Stats;
use crate::units::DevicePtr;

/// A point of a stream behind the last launches; several threads may ask about it at a time.
struct LastUse {
    device: Device,
    event: Event,
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
    pub(super) calls: Mutex<()>,
    life: Mutex<Life>,
    end: Mutex<End>,
}

impl Graph {
    pub(super) fn new(core: Arc<Core>) -> Self {
        let (life, end) = (Mutex::new(Life::Open), Mutex::new(End::Ahead(None)));
        Self { core, calls: Mutex::new(()), life, end }
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
        let event = super::record(device, stream)?;
        *life = Life::Released(Arc::new(LastUse { device: device.clone(), event }));
        Ok(())
    }

    /// No graph that uses the memory will be launched any more.
    pub(super) fn drop_handle(&self, dropped: u64) {
        let mut life = lock(&self.life);
        if let Life::Open = *life {
            *life = Life::Dropped(dropped);
        }
    }

    /// The host has seen everything on the device complete since this many were dropped.
    pub(super) fn device_passed(&self, dropped: u64) {
        let mut life = lock(&self.life);
        if matches!(*life, Life::Dropped(at) if at <= dropped) {
            *life = Life::Quiet;
        }
    }

    /// Whether no graph that uses the memory runs any more. With `wait` the host waits for the
    /// event of a release.
    pub(super) fn is_quiet(&self, wait: bool) -> Result<bool> {
        let last = match &*lock(&self.life) {
            Life::Open | Life::Dropped(_) => return Ok(false),
            Life::Quiet => return Ok(true),
            Life::Released(last) => Arc::clone(last),
        };
        let device = self.core.device();
        let _context = device.enter()?;
        let driver = device.driver();
        let _beside = BesideCaptures::enter(driver)?;
        if wait {
            last.event.wait(driver)?;
        } else if !last.event.is_complete(driver)? {
            return Ok(false);
        }
        *lock(&self.life) = Life::Quiet;
        Ok(true)
    }

    /// Ends the heap of a graph that is [quiet](Self::is_quiet) where nothing of it is in use: how much it held,
    /// once. Other threads may have come to it in the list, and wait here.
    pub(super) fn end_unused(&self) -> Result<Option<u64>> {
        let mut end = lock(&self.end);
        let End::Ahead(last) = &mut *end else { return Ok(None) };
        if !self.core.is_unused(last)? {
            return Ok(None);
        }
        let mapped = self.core.stats().mapped_bytes;
        *end = End::Over;
        self.core.retire_unused();
        Ok(Some(mapped))
    }

    /// A request on a stream of the capture that the graph's pool is open to.
    pub(super) fn malloc(
        &self,
        bytes: usize,
        stream: StreamHandle,
        number: u64,
    ) -> Result<DevicePtr> {
        self.core.malloc_held(bytes, stream, number)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        self.core.retire();
    }
}

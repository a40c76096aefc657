//! Calls that are not this heap's, or not now.
//!
//! While a graph with memory of its own is captured, and while the heap sleeps, no stream has a
//! shortcut to its shard: every call takes the way outside, and asks here first. So the way inside
//! is what it would be without either.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use super::{Core, lock};
use crate::device::{Device, StreamHandle};
use crate::error::{Error, Result};
use crate::heap::Beside;
use crate::units::DevicePtr;

#[derive(Default)]
pub(super) struct Aside {
    /// Whether streams have no shortcuts. Changes under the registry's lock.
    closed: AtomicBool,
    asleep: AtomicBool,
    /// The pool's other heaps, where this is its main one.
    beside: OnceLock<Weak<dyn Beside>>,
}

impl Aside {
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    pub(super) fn is_asleep(&self) -> bool {
        self.asleep.load(Ordering::Acquire)
    }

    fn beside(&self) -> Option<Arc<dyn Beside>> {
        self.beside.get().and_then(Weak::upgrade)
    }

    /// Has the pool's other heaps give back what they can do without.
    pub(super) fn make_room(&self, wait: bool) -> bool {
        self.beside().is_some_and(|beside| beside.make_room(wait))
    }
}

impl Core {
    /// Tells the pool's main heap of the others.
    pub(crate) fn set_beside(&self, beside: Weak<dyn Beside>) {
        // Once, when the pool is made.
        let _ = self.aside.beside.set(beside);
    }

    /// From now on every call asks here first, or none does.
    pub(crate) fn set_closed(&self, closed: bool) {
        let _registry = lock(&self.registry);
        self.aside.closed.store(closed, Ordering::Relaxed);
        if closed {
            self.routes.clear();
        }
    }

    pub(super) fn set_asleep(&self, asleep: bool) {
        self.aside.asleep.store(asleep, Ordering::Release);
        self.set_closed(asleep);
    }

    pub(crate) fn is_asleep(&self) -> bool {
        self.aside.is_asleep()
    }

    /// A sleeping heap neither hands memory out nor makes any.
    pub(super) fn check_awake(&self) -> Result<()> {
        if self.aside.is_asleep() { Err(Error::Asleep) } else { Ok(()) }
    }

    /// A request that is another heap's, or that comes while this one sleeps.
    pub(super) fn malloc_aside(
        &self,
        bytes: usize,
        stream: StreamHandle,
    ) -> Option<Result<DevicePtr>> {
        if !self.aside.is_closed() {
            return None;
        }
        if self.aside.is_asleep() {
            return Some(Err(Error::Asleep));
        }
        self.aside.beside()?.malloc(bytes, stream)
    }

    /// A free of another heap's memory, or of this one's on a stream that must not be asked now.
    pub(super) fn free_aside(&self, ptr: DevicePtr, stream: StreamHandle) -> Option<Result<()>> {
        if !self.has_address(ptr.address()) {
            return self.aside.beside()?.free(ptr, stream);
        }
        if !self.aside.is_closed() || self.number_of(stream).is_some() {
            return None;
        }
        let free = |number| self.free_held(ptr, stream, number);
        self.aside.beside()?.while_capturing(stream, &free)
    }

    /// Whether a stream is known by its handle, without a question to the driver.
    pub(crate) fn knows(&self, stream: StreamHandle) -> bool {
        self.number_of(stream).is_some()
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Whether an address is one of this heap's, with memory or without.
    pub(crate) fn has_address(&self, address: u64) -> bool {
        address.wrapping_sub(self.base) < u64::from(self.granules) * self.granule_bytes
    }
}

//! One call at a time.

#![forbid(unsafe_code)]

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::device::StreamHandle;
use crate::error::Result;
use crate::resource::{Description, MemoryResource};
use crate::units::DevicePtr;

/// Lets one thread at a time into what is below.
///
/// Every resource of this crate may be called by many threads at once, and is faster without. This is
/// for one that wraps something that may not, a [`Callback`](crate::resource::Callback) into a C library
/// for example. A callback below must not call this again. RMM: `thread_safe_resource_adaptor`.
#[derive(Debug)]
pub struct ThreadSafe<R> {
    upstream: R,
    turn: Mutex<()>,
}

impl<R: MemoryResource> ThreadSafe<R> {
    /// One call at a time of this.
    pub fn new(upstream: R) -> Self {
        Self { upstream, turn: Mutex::new(()) }
    }

    /// What is below. Calls made through this reference wait for nobody.
    pub fn upstream(&self) -> &R {
        &self.upstream
    }

    fn turn(&self) -> Result<MutexGuard<'_, ()>> {
        // In a child of the process the turn may be for ever that of a thread of the parent.
        self.upstream.device().map_or(Ok(()), |device| device.driver().check_process())?;
        Ok(self.turn.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl<R: MemoryResource> MemoryResource for ThreadSafe<R> {
    fn allocate(&self, bytes: usize, align: usize, stream: StreamHandle) -> Result<DevicePtr> {
        let _turn = self.turn()?;
        self.upstream.allocate(bytes, align, stream)
    }

    fn deallocate(
        &self,
        ptr: DevicePtr,
        bytes: usize,
        align: usize,
        stream: StreamHandle,
    ) -> Result<()> {
        let _turn = self.turn()?;
        self.upstream.deallocate(ptr, bytes, align, stream)
    }

    fn describe(&self) -> Description {
        Description::new("thread-safe").over(self.upstream.describe())
    }

    fn record_stream(&self, ptr: DevicePtr, stream: StreamHandle) -> Result<()> {
        let _turn = self.turn()?;
        self.upstream.record_stream(ptr, stream)
    }

    passes_on!(facts, identity, device, held_bytes);
}

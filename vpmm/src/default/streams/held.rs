//! Streams in a graph's capture.
//!
//! Such a stream cannot be asked for its number, which would end the capture, and nothing can be
//! recorded on it. Its callers give it a number instead, for as long as the capture lasts. What it
//! frees is its own until then, and serves its next requests; after that, in a heap of graphs,
//! whoever asks, since graphs of one heap do not run at the same time. In a pool's main heap an
//! event is recorded when the capture has ended.

use std::sync::Arc;

use crate::backing::Backing;
use crate::default::ladder::Request;
use crate::default::space::book::{Recording, Stage};
use crate::default::{Core, PoolConfig, lock};
use crate::device::{Device, StreamHandle};
use crate::error::Result;
use crate::units::DevicePtr;

impl Core {
    /// A further heap of a pool; `fixed` where nothing in it is to move, be it free or not.
    pub(crate) fn beside(
        backing: Backing,
        device: &Device,
        config: &PoolConfig,
        fixed: bool,
    ) -> Result<Arc<Self>> {
        Self::of(backing, device, config, fixed)
    }

    /// As `malloc`, for a stream in a capture by this number.
    pub(crate) fn malloc_held(
        &self,
        bytes: usize,
        handle: StreamHandle,
        number: u64,
    ) -> Result<DevicePtr> {
        let units = self.check_size(bytes as u64)?;
        let admitted = self.admit_as(handle, number, Recording::Held)?;
        let request = Request { stream: admitted.stream, handle: Some(handle), units };
        self.climb(request).map(|start| self.pointer(start))
    }

    /// As `free`, for a stream in a capture by this number.
    pub(crate) fn free_held(
        &self,
        ptr: DevicePtr,
        handle: StreamHandle,
        number: u64,
    ) -> Result<()> {
        self.free_as(ptr, handle, || self.admit_as(handle, number, Recording::Held))
    }

    /// A number means nothing any more. What was freed under it is whoever's.
    pub(crate) fn end_held(&self, number: u64) {
        let Some(left) = self.forget(number) else { return };
        let index = left.index();
        let mut space = self.space.lock();
        let book = &mut space.books[index as usize];
        book.recording = Recording::Ended;
        book.stage = Stage::Passed;
        book.passed = book.epoch;
        space.settle_deferred_of(&self.tags, index);
        while space.drain(&self.tags, index) {}
    }

    /// A number means nothing any more. What was freed under it waits for what the stream, which
    /// is no longer capturing, has been given so far.
    pub(crate) fn end_held_behind(&self, number: u64, handle: StreamHandle) {
        if let Some(left) = self.forget(number) {
            self.end_stream(handle, left.index());
        }
    }

    /// Whether the number was ever used here.
    pub(crate) fn has_held(&self, number: u64) -> bool {
        lock(&self.registry).knows(number)
    }

    /// Whether nothing of this heap is in use: no allocation is out, and the host has seen complete
    /// whatever was enqueued before the frees. Asks about every stream, waits for none.
    ///
    /// `last` is the caller's to keep from call to call: the epoch that a sole stream's last frees are in, which
    /// keeps its memory when that has passed, as it keeps what it frees later.
    pub(crate) fn is_unused(&self, last: &mut Option<u64>) -> Result<bool> {
        let _context = self.device.enter()?;
        self.flush_fronts(|_| true);
        {
            let space = self.space.lock();
            if space.out_blocks > 0 {
                *last = None;
                return Ok(false);
            }
            if last.is_none() {
                *last = space.books.first().map(|book| book.epoch);
            }
        }
        self.poll(None, true)?;
        self.poll_deferred(true)?;
        Ok(self.all_passed(*last))
    }
}

//! Allocations that further streams use: their memory is kept, when they are freed, until those
//! streams have come past the free.
//!
//! ```text
//! live ──record_stream──▶ noted ──free──▶ deferred ──the others' epochs have passed──▶ free
//! ```
//!
//! Nothing is recorded for it but the events that close epochs anyway: a deferred block waits for
//! the epoch that was open on each further stream when it was freed. No stream waits on the GPU.

use smallvec::SmallVec;

use super::book::Recording;
use super::fences::stream_is_capturing;
use super::owner::Owner;
use super::space::Space;
use super::tags::{Tag, Tags};
use super::{Core, lock};
use crate::device::StreamHandle;
use crate::error::{Error, Result};
use crate::units::DevicePtr;

/// A further stream that uses an allocation.
#[derive(Clone, Copy)]
pub(super) struct Use {
    pub(super) stream: u32,
    /// Where nobody tells of the stream's end: what to record on at the free.
    on: Option<StreamHandle>,
}

pub(super) type Uses = SmallVec<[Use; 2]>;

/// A freed block that waits for further streams.
pub(super) struct Deferred {
    pub(super) start: u32,
    pub(super) units: u32,
    /// The stream that it was freed on, at that time: which may have it again before.
    pub(super) own: Wait,
    /// The further streams.
    pub(super) waits: SmallVec<[Wait; 2]>,
}

/// What has to pass of a stream: the epoch, or a mark of at least this number.
#[derive(Clone, Copy)]
pub(super) struct Wait {
    pub(super) stream: u32,
    epoch: u64,
    mark: u64,
}

impl Core {
    pub(super) fn note_use(&self, ptr: DevicePtr, handle: StreamHandle) -> Result<()> {
        let is_live = |start: &u32| self.tags.get(*start).live_units().is_some();
        let Some(start) = self.unit_of(ptr.address()).filter(is_live) else {
            return Err(self.not_live(ptr.address()));
        };
        let admitted = self.admit(handle)?;
        let mut space = self.space.lock();
        let Some(units) = self.tags.get(start).live_units() else {
            drop(space);
            return Err(self.not_live(ptr.address()));
        };
        let stream = admitted.stream;
        let uses = space.uses.entry(start).or_default();
        if uses.iter().all(|of| of.stream != stream) {
            uses.push(Use { stream, on: admitted.eager.then_some(handle) });
            space.books[stream as usize].pins += 1;
        }
        self.tags.set_noted(start, units);
        Ok(())
    }

    /// A free of an allocation that further streams use.
    pub(super) fn free_noted(
        &self,
        start: u32,
        handle: StreamHandle,
        stream: u32,
        ptr: DevicePtr,
    ) -> Result<()> {
        // Streams whose end nobody tells get their event now, the free's own among them. They are
        // known alive: the caller keeps them until this returns.
        let (uses, eager) = {
            let space = self.space.lock();
            let eager = space.books[stream as usize].recording == Recording::Eager;
            (space.uses.get(&start).cloned().unwrap_or_default(), eager)
        };
        let mut waits: SmallVec<[Wait; 2]> = SmallVec::new();
        for (of, on) in uses.iter().filter_map(|of| Some((of.stream, of.on?))) {
            if of != stream && self.is_within_reach(of, on)? {
                waits.push(self.record_use(of, on)?);
            }
        }
        let own = if eager { Some(self.record_use(stream, handle)?) } else { None };
        let mut space = self.space.lock();
        // Again, under the lock: two threads may free one pointer at a time.
        let (Tag::Noted(units), Some(uses)) = (self.tags.get(start), space.uses.remove(&start))
        else {
            drop(space);
            return Err(self.not_live(ptr.address()));
        };
        for of in &uses {
            space.books[of.stream as usize].pins -= 1;
            let covered =
                of.stream == stream || waits.iter().any(|known| known.stream == of.stream);
            if !covered {
                waits.push(space.wait_for_open(of.stream));
            }
        }
        let own = own.unwrap_or_else(|| space.wait_for_open(stream));
        space.defer(&self.tags, Deferred { start, units, own, waits });
        Ok(())
    }

    /// Whether a handle still means the stream: another thread's default stream cannot be recorded
    /// on. What it uses waits until that thread frees something on it, or until the host has waited
    /// for the whole device.
    fn is_within_reach(&self, stream: u32, on: StreamHandle) -> Result<bool> {
        if on != StreamHandle::PER_THREAD {
            return Ok(true);
        }
        let _context = self.device.enter()?;
        let driver = self.device.driver();
        if stream_is_capturing(driver, on)? {
            return Err(Error::StreamCapturing);
        }
        let mut number = 0;
        // SAFETY: the calling thread's default stream is always alive; the pointer is live.
        unsafe { driver.cuStreamGetId(on.raw(), &mut number) }?;
        Ok(number == self.shard(stream).stream())
    }

    /// Records an event behind everything on a stream whose end nobody tells.
    fn record_use(&self, stream: u32, on: StreamHandle) -> Result<Wait> {
        let _context = self.device.enter()?;
        if stream_is_capturing(self.device.driver(), on)? {
            return Err(Error::StreamCapturing);
        }
        let _in_order = lock(&self.shard(stream).eager);
        let event = self.record_now(on)?;
        let mut space = self.space.lock();
        space.note_record(stream, event);
        Ok(space.wait_for_open(stream))
    }

    /// Takes the epochs that deferred frees wait for as far as they go now.
    pub(super) fn poll_deferred(&self) -> Result<()> {
        let mut streams: SmallVec<[u32; 8]> = {
            let space = self.space.lock();
            let waits = space.deferred.iter().flat_map(|block| &block.waits);
            waits.map(|wait| wait.stream).collect()
        };
        if streams.is_empty() {
            return Ok(());
        }
        let _context = self.device.enter()?;
        streams.sort_unstable();
        streams.dedup();
        for stream in streams {
            self.advance(stream, false)?;
        }
        Ok(())
    }
}

impl Space {
    /// What has to pass of a stream for everything on it so far to have finished.
    fn wait_for_open(&self, stream: u32) -> Wait {
        let book = &self.books[stream as usize];
        Wait { stream, epoch: book.epoch, mark: book.marks }
    }

    fn defer(&mut self, tags: &Tags, block: Deferred) {
        self.out_units -= u64::from(block.units);
        self.out_blocks -= 1;
        self.deferred_units += u64::from(block.units);
        tags.set_cached(tags.place_of(block.start), block.units);
        for wait in block.waits.iter().chain([&block.own]) {
            let book = &mut self.books[wait.stream as usize];
            book.pins += 1;
            book.deferred_until = book.deferred_until.max(wait.epoch);
        }
        self.deferred.push(block);
        self.settle_deferred(tags);
    }

    /// Frees what has waited long enough.
    pub(super) fn settle_deferred(&mut self, tags: &Tags) {
        let mut at = 0;
        while let Some(block) = self.deferred.get(at) {
            let Some(owner) = self.owner_after(block) else {
                at += 1;
                continue;
            };
            let Deferred { start, units, own, waits } = self.deferred.swap_remove(at);
            for of in waits.iter().chain([&own]) {
                let book = &mut self.books[of.stream as usize];
                book.pins -= 1;
                if book.pins == 0 {
                    book.deferred_until = 0;
                }
            }
            self.deferred_units -= u64::from(units);
            self.returns += 1;
            self.give(tags, start, units, owner);
        }
    }

    /// Whose a deferred block is, once the further streams have come past its free.
    fn owner_after(&self, block: &Deferred) -> Option<Owner> {
        if !block.waits.iter().all(|wait| self.is_over(wait)) {
            return None;
        }
        let stream = block.own.stream;
        let book = &self.books[stream as usize];
        let passed = self.is_over(&block.own);
        match book.recording {
            Recording::Lazy(_) if !(passed && (self.opportunistic || self.awaits)) => {
                Some(book.open_owner(stream))
            }
            // The event that was recorded at the free is not the open epoch's any more.
            Recording::Eager => passed.then_some(Owner::NOBODY),
            Recording::Ended | Recording::Lost if !passed => Some(book.open_owner(stream)),
            _ => Some(Owner::NOBODY),
        }
    }

    fn is_over(&self, wait: &Wait) -> bool {
        let book = &self.books[wait.stream as usize];
        book.passed >= wait.epoch || book.seen >= wait.mark
    }
}

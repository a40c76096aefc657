//! Recording on streams that allocations are used on beside the one that frees them.
//!
//! A stream is recorded on when the allocation is freed; or when the stream ends, if that is before;
//! or later, where it was capturing at the free: an event recorded then would be the graph's.

use super::deferred::Kept;
use super::small::{Live, Small};
use super::space::Space;
use super::uses::{Scope, Uses};
use super::{Caller, PagedPool, lock};
use crate::device::StreamHandle;
use crate::driver::Failure;
use crate::error::{Error, Result};
use crate::event::Event;
use crate::units::DevicePtr;

impl PagedPool {
    pub(crate) fn record_stream(&self, ptr: DevicePtr, stream: StreamHandle) -> Result<()> {
        let stream_id = self.recognise(stream)?;
        let gone = self.lock_space().users_gone(ptr.address(), stream_id);
        if !gone.is_empty()
            && let Ok(_context) = self.device.enter()
        {
            for fence in gone {
                // What fails is as it was, and met by whoever asks next.
                let _ = self.ask(fence);
            }
        }
        let mut space = self.lock_space();
        // Under the lock, as a free does: what is noted is of this allocation, not of the next there.
        let small = self.small.as_ref().map_or(Ok(false), |small| small.check_live(ptr))?;
        if !small {
            space.check_live(ptr)?;
        }
        let lasts = self.outlasts_a_free(stream);
        space.forget_users_gone(ptr.address());
        let former = space.uses.note(ptr.address(), stream_id, stream, lasts);
        former.into_iter().for_each(|fence| space.release(fence));
        Ok(())
    }

    /// Whether a handle may be used after the free that it was kept for: the library tells the end of
    /// its own streams, and the default streams have none (a thread has always one of its own).
    fn outlasts_a_free(&self, handle: StreamHandle) -> bool {
        self.is_the_librarys(handle)
            || handle == StreamHandle::LEGACY
            || handle == StreamHandle::PER_THREAD
    }

    pub(super) fn is_the_librarys(&self, handle: StreamHandle) -> bool {
        handle.known_to(self.device.driver().realm()).is_some()
    }

    /// Records on every stream that an allocation is used on, for its free on the stream `own`. On
    /// failure nothing is recorded, as far as the books go.
    pub(super) fn record_uses(&self, address: u64, own: u64) -> Result<()> {
        let open = self.lock_space().uses.to_record(address, own);
        for (stream, handle) in open {
            let recorded = self.record_use(stream, handle, Scope::Freed(address));
            let refused = match recorded {
                // A capturing stream of somebody else's, which may be gone when the capture is.
                Ok(false) if !self.outlasts_a_free(handle) => Error::StreamCapturing,
                Ok(_) => continue,
                Err(failure) => failure.into(),
            };
            self.lock_space().unprove(address);
            return Err(refused);
        }
        Ok(())
    }

    /// Enters a record on a stream as the proof of uses there, where some still need one. `false`
    /// where the stream cannot be recorded on now.
    fn record_use(&self, stream: u64, handle: StreamHandle, scope: Scope) -> Result<bool, Failure> {
        let recording = {
            let mut space = self.lock_space();
            let timeline = space.timeline(stream);
            space.timelines.recording(timeline)
        };
        // Nobody records on a stream that has ended: its end is told under this lock, too.
        let _in_order = lock(&recording);
        if !self.lock_space().uses.needs(stream, scope) {
            return Ok(true);
        }
        let Some(event) = self.record_unless_capturing(stream, handle)? else { return Ok(false) };
        self.lock_space().prove(stream, event, scope);
        Ok(true)
    }

    /// Records an event on a stream of this id: none where it is capturing, or where the handle
    /// means the calling thread's default stream and that is another.
    fn record_unless_capturing(
        &self,
        stream: u64,
        handle: StreamHandle,
    ) -> Result<Option<Event>, Failure> {
        if self.is_capturing(handle)? {
            return Ok(None);
        }
        if handle == StreamHandle::PER_THREAD && self.id_of(handle)? != stream {
            return Ok(None);
        }
        let event = self.record(handle)?;
        // A capture that began in between has the event now. Unlike at a free on the stream itself
        // that is no mistake of the caller's: the capture is another thread's.
        match self.is_capturing(handle) {
            Ok(false) => Ok(Some(event)),
            captured => {
                self.lock_space().events.push(event);
                captured.map(|_| None)
            }
        }
    }

    /// Records an event on a stream. Whoever calls this holds the timeline's `recording`.
    pub(super) fn record(&self, stream: StreamHandle) -> Result<Event, Failure> {
        let spare = self.lock_space().events.pop();
        self.record_by(spare, stream)
    }

    /// As [`record`](Self::record), with an event taken from the store before, if there was one.
    pub(super) fn record_by(
        &self,
        spare: Option<Event>,
        stream: StreamHandle,
    ) -> Result<Event, Failure> {
        let driver = self.device.driver();
        let event = spare.map_or_else(|| Event::new(driver), Ok)?;
        match event.record(driver, stream) {
            Ok(()) => Ok(event),
            Err(failure) => {
                self.lock_space().events.push(event);
                Err(failure)
            }
        }
    }

    /// Tries again to record on streams that were capturing when memory was freed: on each, though the driver
    /// refuses one.
    pub(super) fn record_due(&self) -> Result<(), Failure> {
        let (mut due, of_threads) = {
            let space = self.lock_space();
            if !space.uses.has_due() {
                return Ok(());
            }
            space.uses.due()
        };
        // However many threads there were: those that have ended stay among them.
        let own = if of_threads { self.threads_own_due() } else { Ok(None) };
        due.extend(own.as_ref().ok().copied().flatten());
        let record = |(stream, handle)| self.record_use(stream, handle, Scope::Due).map(drop);
        due.into_iter().map(record).fold(own.map(drop), Result::and)
    }

    /// The calling thread's own stream, where something freed waits for that and it can be recorded on.
    fn threads_own_due(&self) -> Result<Option<(u64, StreamHandle)>, Failure> {
        let own = StreamHandle::PER_THREAD;
        if self.is_capturing(own)? {
            return Ok(None);
        }
        let stream = self.id_of(own)?;
        let needs = self.lock_space().uses.needs(stream, Scope::Due);
        Ok(needs.then_some((stream, own)))
    }

    /// A stream is about to be destroyed: what was used on it gets its event now. Where there can be
    /// none (it is capturing, or the driver refuses), such memory is kept until the host has waited
    /// for the whole device.
    pub(super) fn end_of_stream(&self, handle: StreamHandle) {
        let Some(stream) = handle.known_to(self.device.driver().realm()) else { return };
        if self.lock_space().uses.needs(stream, Scope::Ending)
            && let Ok(_context) = self.device.enter()
        {
            // What cannot be recorded is not lost yet: see above.
            let _ = self.record_use(stream, handle, Scope::Ending);
        }
        let recording = {
            let space = self.lock_space();
            let timeline = space.timelines.find(stream);
            timeline.map(|timeline| space.timelines.recording(timeline))
        };
        // Whoever is recording on it by the books comes to the end of that first.
        let _in_order = recording.as_ref().map(|recording| lock(recording));
        let mut space = self.lock_space();
        let timeline = space.timelines.find(stream);
        space.uses.forget_handle(stream, timeline);
        space.streams.remove(stream);
        if let Some(timeline) = timeline {
            space.end(timeline);
        }
    }

    /// Gives small allocations whose uses are over back to the driver.
    ///
    /// Not on the stream that they were freed on, unless that is the stream of the request that
    /// finds it so: by now it may have ended, or be capturing a graph, which the free would become
    /// a part of. Its own event is waited for instead; then no order is left to keep, and the
    /// request's stream, which is alive, does not capture, and wants memory, does as well as any.
    pub(super) fn free_ready_small(&self, stream: u64, handle: StreamHandle) -> Result<()> {
        let Some(small) = &self.small else { return Ok(()) };
        loop {
            let Some(address) = self.lock_space().next_ready_small(Some(stream)) else {
                return Ok(());
            };
            let freed = small.free_kept(self.device.driver(), address, handle);
            self.lock_space().small_is_free(address, freed.is_ok());
            self.backing.gave_up(freed?);
        }
    }

    /// Before a small request: asks about what freed ones wait for, and gives the driver what it may
    /// have. No driver call where none waits.
    pub(super) fn settle_small(&self, stream: u64, handle: StreamHandle) -> Result<()> {
        if !self.lock_space().uses.has_small() {
            return Ok(());
        }
        let asked = self.ask_deferred();
        self.free_ready_small(stream, handle).and(asked)
    }

    /// Asks about what deferred frees wait for.
    pub(super) fn ask_deferred(&self) -> Result<()> {
        let recorded = self.record_due();
        let timelines = self.lock_space().waited_for();
        recorded.map_err(Into::into).and(self.ask_each(timelines))
    }

    /// Frees a small allocation just taken out of the book, and kept there if it is used elsewhere.
    pub(super) fn free_small(
        &self,
        small: &Small,
        address: u64,
        taken: Live,
        used: bool,
        caller: Caller,
    ) -> Result<()> {
        if !used {
            let freed = small.free_taken(self.device.driver(), address, taken, caller.stream);
            return freed.inspect(|()| self.backing.gave_up(taken.bytes));
        }
        let freed = self.defer_small(address, caller.stream_id, caller.stream);
        if freed.is_err() {
            small.leave_live(address);
        }
        freed
    }

    /// Records a small allocation's free and its uses; the driver gets it when those are over.
    fn defer_small(&self, address: u64, stream_id: u64, stream: StreamHandle) -> Result<()> {
        self.record_uses(address, stream_id)?;
        let recording = {
            let mut space = self.lock_space();
            let timeline = space.timeline(stream_id);
            space.timelines.recording(timeline)
        };
        let in_order = lock(&recording);
        let event = self.record(stream).inspect_err(|_| self.lock_space().unprove(address))?;
        {
            let mut space = self.lock_space();
            let timeline = space.timeline(stream_id);
            let own = space.timelines.push(timeline, event);
            let uses = self.take_uses(&mut space, address, stream_id);
            space.defer(Kept::Small(address), stream_id, own, uses);
        }
        drop(in_order);
        // Nothing may be left to wait for. Should the driver refuse it now, it is asked again.
        let _ = self.free_ready_small(stream_id, stream);
        Ok(())
    }

    /// Takes out what a free on the stream `own` has to wait for.
    pub(super) fn take_uses(&self, space: &mut Space, address: u64, own: u64) -> Uses {
        space.take_uses(address, own, |handle| self.outlasts_a_free(handle))
    }
}

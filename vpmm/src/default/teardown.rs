//! The end of a pool.

use std::sync::atomic::Ordering;

use super::Core;
use super::memory::Backed;
use super::space::book::Recording;
use crate::capture::{BesideCaptures, wait_at_end};
use crate::driver::Failure;
use crate::error::Error;
use crate::event::Event;
use crate::region::State;

impl Core {
    /// The first part of the end, where the pool's owner lets go of it: waits for the work that uses
    /// the memory. Events are still recorded for that, so the ends of streams are told to the pool
    /// until it is done; and then it is out of the driver's list, so that it ends in no other thread
    /// that happens to tell it something.
    pub(crate) fn retire(&self) {
        let driver = self.device.driver();
        if driver.is_forked() || self.retired.swap(true, Ordering::Relaxed) {
            return;
        }
        let waited = self.device.enter().and_then(|_context| {
            self.flush_fronts(|_| true);
            Ok(self.wait_for_all()?)
        });
        let allocated = || self.stats().live_count > 0;
        let is_at_rest = |error| self.is_at_rest_after(&error, allocated());
        let quiet = waited.map_or_else(is_at_rest, |()| true);
        self.quiet.store(quiet, Ordering::Relaxed);
        driver.unwatch_streams(self);
    }

    /// The same of a heap that nobody can ask for anything any more, and of which
    /// [`is_unused`](Self::is_unused) has said that it is: there is nothing to wait for. A stream that captures
    /// by now could not be asked again.
    pub(crate) fn retire_unused(&self) {
        let driver = self.device.driver();
        if driver.is_forked() || self.retired.swap(true, Ordering::Relaxed) {
            return;
        }
        self.quiet.store(true, Ordering::Relaxed);
        driver.unwatch_streams(self);
    }

    /// Waits until no work uses the pool's memory: for the last event of every stream, and for the
    /// whole context only where callers never freed something (or a stream ended in a capture, or the driver would
    /// not undo a mapping), since that ends every capture in it.
    fn wait_for_all(&self) -> Result<(), Failure> {
        let driver = self.device.driver();
        let live = self.stats().live_count > 0;
        // Copies to there could not be waited for, and are on a stream that nobody knows here.
        let is_stuck = !self.space.lock().memory.numbers_of(Backed::Stuck).is_empty();
        let _beside = BesideCaptures::enter(driver)?;
        // What a stream cannot be asked about now leaves only the wait for the context.
        if live || is_stuck || !self.wait_for_frees().is_ok_and(|_| self.all_passed(None)) {
            return wait_at_end(&self.device);
        }
        Ok(())
    }

    /// Whether nothing uses the memory, though a wait for what does has failed with this.
    pub(crate) fn is_at_rest_after(&self, error: &Error, allocated: bool) -> bool {
        self.backing.is_at_rest_after(error, allocated)
    }

    /// Whether nothing waits for any stream. A sole one's last frees are in the epoch `last`, or else in the one
    /// before the open one.
    pub(super) fn all_passed(&self, last: Option<u64>) -> bool {
        let space = self.space.lock();
        let waiting = |book: &super::space::book::Book| {
            let sole = space.books.len() == 1 && matches!(book.recording, Recording::Lazy(_));
            // A sole stream keeps its memory when its fence has passed.
            let last = last.unwrap_or(book.epoch - 1);
            !(book.is_empty() || (sole && book.passed >= last))
        };
        !space.books.iter().any(waiting)
            && space.deferred.is_empty()
            && space.memory.map.totals().regions(State::Zombie)
                == space.memory.map.ready_zombies().count() as u64
    }
}

impl Drop for Core {
    /// Waits for the work that uses the pool's memory, then gives everything back; without a wait where that work went
    /// with its context. Another error on the way leaves the rest to the driver, which reclaims it with the process.
    fn drop(&mut self) {
        self.retire();
        if !*self.quiet.get_mut() {
            return;
        }
        let device = self.device.clone();
        let driver = device.driver();
        let context = match device.enter() {
            // What is allocated was waited for above.
            Err(error) if !self.is_at_rest_after(&error, false) => return,
            entered => entered.ok(),
        };
        let space = self.space.get_mut();
        for region in space.memory.map.iter().filter(|region| region.state() != State::Hole) {
            let address = space.memory.address_of(region.start() as u32);
            let bytes = region.bytes() * space.memory.granule_bytes();
            // SAFETY: every region but holes is whole extents that the pool mapped; everything that
            // may use them has finished, or ended with the context that it ran in.
            let _ = unsafe { crate::mapping::unmap(driver, address, bytes) };
        }
        let orphans = std::mem::take(&mut space.orphans).into_iter().map(|(handle, _)| handle);
        let held = space.memory.extents().filter(|(_, of)| of.backed != Backed::Gone);
        let handles = held.map(|(_, extent)| extent.handle).chain(orphans);
        // SAFETY: the pool's own handles, each once; the pool ends here.
        unsafe { crate::physical::release_all(driver, handles, &mut Vec::new()) };
        if context.is_none() {
            // Its events went with it.
            return;
        }
        let mut events: Vec<Event> = space.events.drain(..).collect();
        for book in &mut space.books {
            events.extend(book.last_record.take());
            events.extend(book.fences.drain(..).map(|fence| fence.event));
            if let super::space::book::Stage::Recorded(event) = book.stage {
                events.push(event);
            }
        }
        for event in events {
            // SAFETY: the pool ends here; nobody else has its events.
            let _ = unsafe { event.destroy(driver) };
        }
    }
}

//! Before a patient pool grows: a block that another stream freed, ready or with a wait on the GPU.
//!
//! A host that is ahead of the GPU frees everything of a step, and then asks for memory on another stream,
//! for the next one's data: all that was freed still waits for the GPU. Where the asking stream waits for it
//! there, the host goes on, and the pool stays as large as it is. But the two streams do not run side by side
//! then up to that point, which a program may have meant them to; so that happens seldom, and where streams go
//! on taking from each other the pool grows.
//!
//! One block is taken, and the rest stays whose it was. Were everything that is ready nobody's at once, a
//! stream that has most of the memory would find it in two halves at every step, what it used in the last one
//! and what it did not, and blocks of neither become one with blocks of the other.

use std::time::Duration;

use smallvec::SmallVec;

use super::fences::Record;
use crate::capture::{BesideCaptures, Recorded, record_beside_captures, stream_is_capturing};
use crate::default::ladder::Request;
use crate::default::space::book::{Recording, Stage};
use crate::default::space::owner::Owner;
use crate::default::space::tags::Tags;
use crate::default::space::{Part, Space};
use crate::default::{Core, lock};
use crate::device::StreamHandle;
use crate::error::Result;
use crate::event::Event;

/// Blocks that may be borrowed with a wait, and so many more each second.
const AT_FIRST: u64 = 128;
const PER_SECOND: u64 = 16;

/// Blocks that were borrowed with a wait.
#[derive(Default)]
pub(in crate::default) struct Borrowed(u64);

impl Borrowed {
    /// Whether one more may be, so long after the pool was made.
    fn may(&self, now: Duration) -> bool {
        self.0 < AT_FIRST.saturating_add(now.as_secs().saturating_mul(PER_SECOND))
    }
}

/// A block that was taken out for a request.
struct Loan {
    start: u32,
    owner: Owner,
    /// The stream that freed it, on which an event is to be recorded; a spare one if there is any.
    from: u32,
    on: StreamHandle,
    spare: Option<Event>,
}

impl Core {
    /// Serves a request from what a stream keeps to itself, where that has become ready.
    pub(in crate::default) fn take_ready(&self, request: Request) -> Result<Option<u32>> {
        if self.config.patience.is_zero() || !self.config.reuse.opportunistic {
            return Ok(None);
        }
        let driver = self.device.driver();
        let records: SmallVec<[(u32, Record); 2]> = {
            let space = self.space.lock();
            let others = (0..space.books.len() as u32).filter(|at| *at != request.stream);
            let keeping = others.filter(|at| space.keeps_its_own(*at));
            keeping.filter_map(|at| Some((at, space.record_of(at)?))).collect()
        };
        for (stream, record) in records {
            let answer = {
                let _beside = BesideCaptures::enter(driver)?;
                record.event.is_complete(driver)
            };
            // Who asks next finds out what is wrong with it, and does something about that.
            if let Ok(true) = answer {
                self.space.lock().pass(&self.tags, stream, record);
            }
        }
        Ok(self.space.lock().place_passed(&self.tags, request))
    }

    /// Serves a request from what another stream has freed, which the request's stream waits for. Where
    /// there is no such block, or either stream takes part in a capture, nothing has happened.
    pub(in crate::default) fn borrow(&self, request: Request) -> Option<u32> {
        if self.config.patience.is_zero() || !self.config.reuse.internal_dependencies {
            return None;
        }
        let loan = {
            let mut space = self.space.lock();
            match space.borrowed.may(self.made.elapsed()) {
                true => space.take_loan(&self.tags, request),
                false => None,
            }
        };
        let loan = loan?;
        let waits = self.hold_back(request, &loan);
        let mut space = self.space.lock();
        space.transit_units -= u64::from(request.units);
        if waits {
            space.borrowed.0 += 1;
            space.counters.device_waits += 1;
            space.hand_out(&self.tags, request.stream, loan.start, request.units);
            space.note_peak();
            return Some(loan.start);
        }
        let owner = space.now(loan.owner);
        space.give(&self.tags, loan.start, request.units, owner);
        None
    }

    /// Makes the request's stream wait for everything that the loan's has been given; `false` where either
    /// cannot now, for whatever reason: the pool may still grow. The loan was freed before, and is nobody's
    /// but this call's.
    fn hold_back(&self, request: Request, loan: &Loan) -> bool {
        let driver = self.device.driver();
        // Its owner may be about to destroy the stream, and waits for us here; or has done so.
        let _not_ending = lock(&self.shard(loan.from).eager);
        let recording = self.space.lock().books[loan.from as usize].recording;
        let is_free = |stream| stream_is_capturing(driver, stream).is_ok_and(|captures| !captures);
        let handle = self.handle_of(request).ok().filter(|handle| is_free(*handle));
        let Some(handle) = handle.filter(|_| recording == Recording::Lazy(loan.on)) else {
            self.space.lock().events.extend(loan.spare);
            return false;
        };
        let (event, waits) = match record_beside_captures(driver, loan.on, loan.spare) {
            Ok(Recorded::On(event)) => {
                let waits = BesideCaptures::enter(driver)
                    .and_then(|_beside| event.hold_back(driver, handle));
                (Some(event), waits.is_ok())
            }
            Ok(Recorded::Capturing(spare)) => (spare, false),
            Err(_) => (loan.spare, false),
        };
        // The wait is for this record, whatever the event is used for from here on.
        self.space.lock().events.extend(event);
        waits
    }
}

impl Space {
    /// Whether what a stream freed stays its own when it is ready, for others to have by the block: in a
    /// patient pool, the stream that most of the free memory waits for. Not where that has passed as soon as
    /// it was closed, so that all the stream freed becomes nobody's in one piece; and not where memory is
    /// short, so that all of it is to come together.
    pub(super) fn keeps_its_own(&self, stream: u32) -> bool {
        let book = &self.books[stream as usize];
        let keeps = self.patient && self.awaits == 0 && !self.gathers;
        let is_lazy = matches!(book.recording, Recording::Lazy(_));
        keeps && is_lazy && !book.at_once && book.units() > self.free_units() / 2
    }

    /// The best fit of what has become ready and has not been given back to its stream yet.
    fn place_passed(&mut self, tags: &Tags, request: Request) -> Option<u32> {
        let part = Part::of_size(request.units) as usize;
        let passed = self.books.iter().filter(|book| book.stage == Stage::Passed);
        let closed = passed.map(|book| &book.sets[book.open_parity() ^ 1][part]);
        let best = closed
            .filter_map(|set| set.best_fit(request.units))
            .min_by_key(|block| (block.units(), block.start()))?;
        let (id, start) = (best.id(), best.start());
        self.take_head(tags, id, request.units);
        self.hand_out(tags, request.stream, start, request.units);
        self.note_peak();
        Some(start)
    }

    /// Takes the best fit out of what other streams freed.
    fn take_loan(&mut self, tags: &Tags, request: Request) -> Option<Loan> {
        let is_lazy = |recording| matches!(recording, Recording::Lazy(_));
        // An event would have to be behind what an eager stream is handed.
        if !is_lazy(self.books[request.stream as usize].recording) {
            return None;
        }
        let part = Part::of_size(request.units) as usize;
        let others = self
            .books
            .iter()
            .enumerate()
            .filter(|(at, book)| *at as u32 != request.stream && is_lazy(book.recording));
        let best = others
            .flat_map(|(_, book)| &book.sets)
            .filter_map(|sets| sets[part].best_fit(request.units))
            .min_by_key(|block| (block.units(), block.start()))?;
        let (id, start, owner) = (best.id(), best.start(), best.owner());
        let (from, _) = owner.of_stream()?;
        let Recording::Lazy(on) = self.books[from as usize].recording else { return None };
        self.take_head(tags, id, request.units);
        self.transit_units += u64::from(request.units);
        Some(Loan { start, owner, from, on, spare: self.events.pop() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_blocks_are_borrowed_at_first_and_few_each_second() {
        let may = |borrowed, seconds| Borrowed(borrowed).may(Duration::from_secs(seconds));
        assert!(may(0, 0) && may(AT_FIRST - 1, 0) && !may(AT_FIRST, 0));
        assert!(may(AT_FIRST + 2 * PER_SECOND - 1, 2) && !may(AT_FIRST + 2 * PER_SECOND, 2));
        assert!(may(u64::MAX - 1, u64::MAX) && !may(u64::MAX, u64::MAX));
    }
}

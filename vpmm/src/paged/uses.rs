//! Uses of allocations on further streams, and frees that wait for them: the books.
//!
//! ```text
//! live        uses: [stream, how to reach it]        the stream ends: an event, recorded as it does
//!   │ free    an event on each of the streams, and the free's own on its stream
//! deferred    free, but no stream's to use: `Pending` on a timeline that is nobody's
//!   │ the uses are complete
//! pending     as if nobody else had used it
//! ```
//!
//! Uses name streams by id, which does not come again as a timeline's place does. A use holds its
//! fence, as a region does. Nothing here calls the driver.

use std::collections::{BTreeMap, HashMap, HashSet};

use smallvec::SmallVec;

use super::deferred::{Deferred, DeferredFrees, Kept};
use super::space::Space;
use crate::device::StreamHandle;
use crate::event::Event;
use crate::fence::{Fence, TimelineId};
use crate::region::State;

/// What an allocation's memory is used by beside the stream that it is freed on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Use {
    pub(super) stream: u64,
    /// What an event can be recorded by; `None` once the stream has ended, and once the allocation
    /// is freed if its maker keeps the stream alive until then only.
    handle: Option<StreamHandle>,
    /// What its end is known by: after the free, or after the stream's end.
    pub(super) fence: Option<Fence>,
}

pub(super) type Uses = SmallVec<[Use; 2]>;

/// Streams that have ended asked about for one that an allocation is noted for: twice as many as come.
const ASKED_FOR_ONE: usize = 2;

impl Use {
    /// The last event of a stream that has ended.
    fn last(&self) -> Option<Fence> {
        self.fence.filter(|_| self.handle.is_none())
    }
}

/// Which uses a record is the proof of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Scope {
    /// That of the allocation that is being freed.
    Freed(u64),
    /// Those of freed memory that have none yet.
    Due,
    /// All: the stream ends.
    Ending,
}

pub(super) struct UseBook {
    /// Of live allocations, by the address of the first byte.
    live: HashMap<u64, Uses>,
    /// Which of them each stream can still be recorded on for.
    open: HashMap<u64, HashSet<u64>>,
    deferred: DeferredFrees,
    /// Of pages that are among them.
    deferred_bytes: u64,
    /// Frees of small allocations that were deferred: the newest on each timeline.
    own_of_small: BTreeMap<TimelineId, u64>,
    /// No stream's: what regions of deferred frees wait for, each under a number of its own.
    timeline: TimelineId,
}

impl UseBook {
    pub(super) fn new(timeline: TimelineId) -> Self {
        let (live, open, deferred) = Default::default();
        Self { live, open, deferred, deferred_bytes: 0, own_of_small: BTreeMap::new(), timeline }
    }

    pub(super) fn timeline(&self) -> TimelineId {
        self.timeline
    }

    pub(super) fn live(&self) -> impl Iterator<Item = (u64, &Uses)> {
        self.live.iter().map(|(address, uses)| (*address, uses))
    }

    pub(super) fn deferred(&self) -> &DeferredFrees {
        &self.deferred
    }

    /// Bytes of pages that were freed and wait for uses on further streams.
    pub(super) fn deferred_bytes(&self) -> u64 {
        self.deferred_bytes
    }

    /// Whether a live allocation is used on other streams.
    pub(super) fn are_noted(&self, address: u64) -> bool {
        !self.live.is_empty() && self.live.contains_key(&address)
    }

    /// Whether something freed waits for a stream that could not be recorded on.
    pub(super) fn has_due(&self) -> bool {
        self.deferred.has_due()
    }

    pub(super) fn has_small(&self) -> bool {
        self.deferred.has_small()
    }

    /// Whether a deferred free waits for a fence of a timeline.
    pub(super) fn waits_for(&self, timeline: TimelineId) -> bool {
        self.deferred.waits_for(timeline)
    }

    /// Notes a use of a live allocation. Twice is once, by the handle that lasts longer. A stream that was lent, and
    /// whose loan is over, has the event of its end no more: the next one is to be behind this use, too. Its fence is
    /// the caller's to release.
    pub(super) fn note(
        &mut self,
        address: u64,
        stream: u64,
        handle: StreamHandle,
        lasts: bool,
    ) -> Option<Fence> {
        let uses = self.live.entry(address).or_default();
        let known = match uses.iter_mut().find(|known| known.stream == stream) {
            Some(known) if known.handle.is_some() => {
                if lasts {
                    known.handle = Some(handle);
                }
                return None;
            }
            Some(known) => known,
            None => {
                uses.push(Use { stream, handle: None, fence: None });
                uses.last_mut()?
            }
        };
        known.handle = Some(handle);
        self.open.entry(stream).or_default().insert(address);
        known.fence.take()
    }

    /// Takes out what is noted about a live allocation.
    fn take_live(&mut self, address: u64) -> Uses {
        let uses = self.live.remove(&address).unwrap_or_default();
        for of in uses.iter().filter(|of| of.handle.is_some()) {
            if let Some(addresses) = self.open.get_mut(&of.stream) {
                addresses.remove(&address);
                if addresses.is_empty() {
                    self.open.remove(&of.stream);
                }
            }
        }
        uses
    }

    /// Whether each stream's allocations are noted as they are with the allocations.
    pub(super) fn agree(&self) -> bool {
        let mut open: HashMap<u64, HashSet<u64>> = HashMap::new();
        for (address, uses) in &self.live {
            for of in uses.iter().filter(|of| of.handle.is_some()) {
                open.entry(of.stream).or_default().insert(*address);
            }
        }
        open == self.open
    }

    /// The streams of a live allocation to record on, but for one.
    pub(super) fn to_record(&self, address: u64, own: u64) -> SmallVec<[(u64, StreamHandle); 2]> {
        let uses = self.live.get(&address).into_iter().flatten();
        let open = uses.filter(|known| known.stream != own && known.fence.is_none());
        open.filter_map(|known| Some((known.stream, known.handle?))).collect()
    }

    /// The streams that something freed waits for and that can be recorded on, perhaps; and whether there are threads'
    /// own ones beside them, which are not listed: only one of them can be this thread's.
    pub(super) fn due(&self) -> (SmallVec<[(u64, StreamHandle); 2]>, bool) {
        let mut due: SmallVec<[(u64, StreamHandle); 2]> = SmallVec::new();
        let mut of_threads = false;
        let uses = self.deferred.due().flat_map(|deferred| &deferred.uses);
        for of in uses.filter(|of| of.fence.is_none()) {
            match of.handle {
                Some(handle) if handle == StreamHandle::PER_THREAD => of_threads = true,
                Some(handle) if due.iter().all(|(id, _)| *id != of.stream) => {
                    due.push((of.stream, handle));
                }
                _ => {}
            }
        }
        (due, of_threads)
    }

    /// Whether a record on a stream would be the proof of a use.
    pub(super) fn needs(&self, stream: u64, scope: Scope) -> bool {
        let of_live = |uses: &Uses| {
            let mut of_stream = uses.iter().filter(|of| of.stream == stream);
            of_stream.any(|of| of.handle.is_some())
        };
        let mut deferred = self.deferred.due().flat_map(|deferred| &deferred.uses);
        let mut due = || deferred.any(|of| of.stream == stream && of.fence.is_none());
        match scope {
            Scope::Freed(address) => self.live.get(&address).is_some_and(of_live),
            Scope::Due => due(),
            Scope::Ending => self.open.contains_key(&stream) || due(),
        }
    }

    /// A stream has ended, which has this timeline: nobody records on it any more.
    pub(super) fn forget_handle(&mut self, stream: u64, timeline: Option<TimelineId>) {
        let forget = |uses: &mut Uses| {
            let of_stream = uses.iter_mut().filter(|of| of.stream == stream);
            of_stream.for_each(|of| of.handle = None);
        };
        for address in self.open.remove(&stream).unwrap_or_default() {
            self.live.get_mut(&address).into_iter().for_each(forget);
        }
        let mut numbers = self.deferred.due_numbers();
        numbers
            .extend(timeline.into_iter().flat_map(|of| self.deferred.numbers_of(of, 0, u64::MAX)));
        numbers.into_iter().for_each(|number| self.deferred.change(number, forget));
    }
}

impl Space {
    /// What the ends are known by of streams that an allocation is noted for and that have ended with work to do, a few
    /// of them, where another stream comes: it may outlive a great many, as weights outlive requests.
    pub(super) fn users_gone(&self, address: u64, comes: u64) -> SmallVec<[Fence; ASKED_FOR_ONE]> {
        let uses = self.uses.live.get(&address);
        let uses = uses.filter(|uses| uses.iter().all(|of| of.stream != comes));
        let last = uses.into_iter().flatten().filter_map(Use::last);
        last.filter(|fence| !self.timelines.is_complete(*fence)).take(ASKED_FOR_ONE).collect()
    }

    /// Takes out an allocation's uses on streams that are over: nothing has to wait for those.
    pub(super) fn forget_users_gone(&mut self, address: u64) {
        let Some(uses) = self.uses.live.get_mut(&address) else { return };
        let timelines = &self.timelines;
        let mut over: SmallVec<[Fence; 4]> = SmallVec::new();
        uses.retain(|of| {
            let last = of.last().filter(|fence| timelines.is_complete(*fence));
            over.extend(last);
            last.is_none()
        });
        over.into_iter().for_each(|fence| self.release(fence));
    }

    /// Enters an event just recorded on a stream as the proof of uses there.
    pub(super) fn prove(&mut self, stream: u64, event: Event, scope: Scope) {
        let timeline = self.timeline(stream);
        let fence = self.timelines.push(timeline, event);
        let mut former: SmallVec<[Fence; 4]> = SmallVec::new();
        {
            let (timelines, book) = (&mut self.timelines, &mut self.uses);
            let mut enter = |of: &mut Use| {
                timelines.hold(fence);
                former.extend(of.fence.replace(fence));
            };
            let open = |of: &&mut Use| of.stream == stream && of.handle.is_some();
            let mut enter_all = |uses: &mut Uses| uses.iter_mut().filter(open).for_each(&mut enter);
            match scope {
                Scope::Freed(address) => {
                    book.live.get_mut(&address).into_iter().for_each(enter_all)
                }
                Scope::Ending => {
                    for address in book.open.get(&stream).into_iter().flatten() {
                        book.live.get_mut(address).into_iter().for_each(&mut enter_all);
                    }
                }
                Scope::Due => {}
            }
            if !matches!(scope, Scope::Freed(_)) {
                let due = |of: &&mut Use| of.stream == stream && of.fence.is_none();
                for number in book.deferred.due_numbers() {
                    book.deferred
                        .change(number, |uses| uses.iter_mut().filter(due).for_each(&mut enter));
                }
            }
        }
        former.into_iter().for_each(|fence| self.release(fence));
        // The uses hold it now, and not whoever recorded it.
        self.release(fence);
    }

    /// Forgets what was recorded for a free that failed. What a stream's end proved stays proved.
    pub(super) fn unprove(&mut self, address: u64) {
        let uses = self.uses.live.get_mut(&address).into_iter().flatten();
        let open = uses.filter(|of| of.handle.is_some());
        let records: Uses =
            open.filter_map(|of| Some(Use { fence: Some(of.fence.take()?), ..*of })).collect();
        records.into_iter().filter_map(|of| of.fence).for_each(|fence| self.release(fence));
    }

    /// Takes out the uses that a free on a stream has to wait for. `lasts` tells which handles may
    /// still be used after it.
    pub(super) fn take_uses(
        &mut self,
        address: u64,
        own: u64,
        lasts: impl Fn(StreamHandle) -> bool,
    ) -> Uses {
        let mut uses = self.uses.take_live(address);
        uses.retain(|of| {
            of.handle = of.handle.filter(|handle| lasts(*handle));
            let waits = of.stream != own && !self.is_over(of);
            if !waits && let Some(fence) = of.fence {
                self.release(fence);
            }
            waits
        });
        uses
    }

    /// A fence whose event came into a graph proves nothing: deferred frees that wait for it need
    /// another record.
    pub(super) fn is_captured(&mut self, fence: Fence) {
        let mut given_up = 0;
        let Fence { timeline, sequence } = fence;
        for number in self.uses.deferred.numbers_of(timeline, sequence, sequence) {
            self.uses.deferred.change(number, |uses| {
                let of_fence = |of: &&mut Use| of.fence == Some(fence) && of.handle.is_some();
                for of in uses.iter_mut().filter(of_fence) {
                    of.fence = None;
                    given_up += 1;
                }
            });
        }
        (0..given_up).for_each(|_| self.release(fence));
    }

    fn is_over(&self, of: &Use) -> bool {
        of.fence.is_some_and(|fence| self.timelines.is_complete(fence))
    }

    /// Keeps freed memory until its uses are over. `own` is the free's fence, just pushed.
    pub(super) fn defer(&mut self, kept: Kept, stream: u64, own: Fence, uses: Uses) {
        if let Kept::Pages(id) = kept {
            let timeline = self.uses.timeline;
            let sequence = self.timelines.next_sequence();
            self.set(id, State::Pending, Fence { timeline, sequence });
            self.uses.deferred_bytes += self.map.region(id).bytes();
        }
        let deferred = Deferred::new(kept, stream, own, uses);
        let book = &mut self.uses;
        if deferred.is_small() {
            let newest = book.own_of_small.entry(own.timeline).or_default();
            *newest = own.sequence.max(*newest);
        }
        book.deferred.push(deferred);
    }

    /// Gives up waiting for uses that are over, now that more of a timeline is complete. Pages that wait for none
    /// any more are as if they had been freed then; small allocations are the driver's to free: see
    /// [`next_ready_small`](Self::next_ready_small).
    pub(super) fn settle(&mut self, timeline: TimelineId) {
        while let Some((fence, number)) = self.uses.deferred.first_of(timeline)
            && self.timelines.is_complete(fence)
        {
            self.settle_one(number, |_| false);
        }
    }

    /// The same of one free, and of uses that are over for another reason.
    fn settle_one(&mut self, number: u64, is_over: impl Fn(&Use) -> bool) {
        let Some(mut deferred) = self.uses.deferred.take(number) else { return };
        deferred.uses.retain(|of| {
            let over = is_over(of) || self.is_over(of);
            if over && let Some(fence) = of.fence {
                self.release(fence);
            }
            !over
        });
        match deferred.kept {
            Kept::Pages(id) if deferred.uses.is_empty() => {
                self.uses.deferred_bytes -= self.map.region(id).bytes();
                self.set_free(id, deferred.own);
                self.release(deferred.own);
            }
            _ => self.uses.deferred.put(number, deferred),
        }
    }

    /// The host has waited for what one stream, or every one, was given up to a number: uses that
    /// could not be recorded are over, too, where they are of what was freed before.
    pub(super) fn settle_by(&mut self, point: u64, stream: Option<u64>) {
        let before = self.uses.deferred.numbered_due();
        let before = before.filter(|(_, deferred)| deferred.own.sequence <= point);
        let before: Vec<u64> = before.map(|(number, _)| number).collect();
        for number in before {
            self.settle_one(number, |of| {
                of.fence.is_none() && stream.is_none_or(|stream| stream == of.stream)
            });
        }
    }

    /// The timelines that deferred frees wait for. O(those).
    pub(super) fn waited_for(&mut self) -> SmallVec<[TimelineId; 4]> {
        let (timelines, book) = (&self.timelines, &mut self.uses);
        // What is complete once stays so, and an older free of the same stream is if a newer one is.
        book.own_of_small.retain(|timeline, newest| {
            !timelines.is_complete(Fence { timeline: *timeline, sequence: *newest })
        });
        let own = book.own_of_small.keys().copied();
        let own = own.filter(|timeline| !book.waits_for(*timeline));
        book.deferred.timelines().chain(own).collect()
    }

    /// A small allocation that the driver may have back, on the stream of a request (or on any):
    /// its uses are over, and so is what came before the free, unless that was on this stream.
    /// Whoever takes it says how it went: [`small_is_free`](Self::small_is_free).
    pub(super) fn next_ready_small(&mut self, stream: Option<u64>) -> Option<u64> {
        let (timelines, deferred) = (&self.timelines, &mut self.uses.deferred);
        let own = stream.and_then(|stream| timelines.find(stream));
        deferred.take_ready(own, |deferred| {
            Some(deferred.stream) == stream || timelines.is_complete(deferred.own)
        })
    }

    /// What the driver said to a small allocation taken by
    /// [`next_ready_small`](Self::next_ready_small).
    pub(super) fn small_is_free(&mut self, address: u64, done: bool) {
        let Some(own) = self.uses.deferred.end_ready(address, done) else { return };
        if !self.uses.has_small() {
            self.uses.own_of_small.clear();
        }
        self.release(own);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A handle that is passed to no driver.
    fn handle(number: usize) -> StreamHandle {
        // SAFETY: the books compare handles and give them back; nobody calls the driver with them.
        unsafe { StreamHandle::from_raw(std::ptr::without_provenance_mut(number)) }
    }

    #[test]
    fn a_stream_is_noted_once_and_by_the_handle_that_lasts_longer() {
        let mut book = UseBook::new(TimelineId(0));
        assert!(!book.are_noted(0x1000));
        book.note(0x1000, 7, handle(70), false);
        book.note(0x1000, 8, handle(80), true);
        book.note(0x1000, 7, handle(71), true);
        book.note(0x1000, 8, handle(81), false);
        let open = book.to_record(0x1000, 0);
        assert_eq!(open.as_slice(), [(7, handle(71)), (8, handle(80))]);
        assert_eq!(book.to_record(0x1000, 7).as_slice(), [(8, handle(80))], "but for its own");
        assert!(book.are_noted(0x1000) && !book.are_noted(0x2000));
    }

    #[test]
    fn a_stream_that_has_ended_is_not_recorded_on() {
        let mut book = UseBook::new(TimelineId(0));
        book.note(0x1000, 7, handle(70), true);
        book.note(0x2000, 8, handle(80), true);
        assert!(book.needs(7, Scope::Ending) && book.needs(7, Scope::Freed(0x1000)));
        assert!(!book.needs(7, Scope::Freed(0x2000)) && !book.needs(7, Scope::Due));
        book.forget_handle(7, None);
        assert!(!book.needs(7, Scope::Ending) && book.to_record(0x1000, 0).is_empty());
        assert!(book.needs(8, Scope::Ending), "the other goes on");
        assert!(book.are_noted(0x1000), "what is not proved is not forgotten");
    }

    /// It was lent, and is used again: what its end proved is no proof of that.
    #[test]
    fn a_stream_that_is_noted_after_its_end_is_recorded_on_again() {
        let mut space = Space::new(2 << 20);
        assert!(space.uses.note(0x1000, 7, handle(70), true).is_none());
        let timeline = space.timeline(7);
        space.prove(7, Event::foreign(std::ptr::null_mut()), Scope::Ending);
        space.uses.forget_handle(7, Some(timeline));
        assert!(space.uses.to_record(0x1000, 0).is_empty());
        let former = space.uses.note(0x1000, 7, handle(71), false);
        former.into_iter().for_each(|fence| space.release(fence));
        assert!(former.is_some() && space.timelines.total_holders() == 0);
        assert_eq!(space.uses.to_record(0x1000, 0).as_slice(), [(7, handle(71))]);
        assert!(space.uses.agree() && space.uses.needs(7, Scope::Freed(0x1000)));
    }

    #[test]
    fn a_free_among_many_noted_allocations_costs_what_it_costs_among_few() {
        let frees_among = |allocations: u64| {
            let mut space = Space::new(2 << 20);
            for address in 0..allocations {
                space.uses.note(address, 7, handle(70), true);
            }
            let start = std::time::Instant::now();
            for address in 0..200 {
                space.prove(7, Event::foreign(std::ptr::null_mut()), Scope::Freed(address));
                space.unprove(address);
            }
            start.elapsed()
        };
        // The machine may be busy with something else in either.
        let is_as_fast = |_| {
            let few = frees_among(200);
            let many = frees_among(if cfg!(miri) { 2_000 } else { 200_000 });
            println!("{few:?} among 200, {many:?} among a thousand times as many");
            many < 50 * few
        };
        assert!((0..8).any(is_as_fast));
    }

    #[test]
    fn an_end_of_a_stream_among_many_noted_allocations_costs_what_it_costs_among_few() {
        let ends_among = |allocations: u64| {
            let mut space = Space::new(2 << 20);
            for address in 0..allocations {
                space.uses.note(address, 7, handle(70), true);
            }
            for at in 0..200 {
                space.uses.note(at, 1000 + at, handle(80), true);
            }
            let start = std::time::Instant::now();
            for stream in 1000..1200 {
                let timeline = space.timeline(stream);
                assert!(space.uses.needs(stream, Scope::Ending));
                space.prove(stream, Event::foreign(std::ptr::null_mut()), Scope::Ending);
                space.uses.forget_handle(stream, Some(timeline));
                assert!(!space.uses.needs(stream, Scope::Ending));
                assert!(!space.uses.needs(stream + 1000, Scope::Ending), "nothing is used on it");
            }
            start.elapsed()
        };
        // The machine may be busy with something else in either.
        let is_as_fast = |_| {
            let few = ends_among(200);
            let many = ends_among(if cfg!(miri) { 2_000 } else { 200_000 });
            println!("{few:?} among 200, {many:?} among a thousand times as many");
            many < 50 * few
        };
        assert!((0..8).any(is_as_fast));
    }

    #[test]
    fn a_request_beside_many_frees_that_wait_costs_what_it_costs_beside_few() {
        let event = Event::foreign(std::ptr::null_mut());
        let requests_beside = |frees: u64| {
            let mut space = Space::new(2 << 20);
            let (own, side) = (space.timeline(1), space.timeline(7));
            for address in 0..frees {
                let fence = Some(space.timelines.push(side, event));
                let freed = space.timelines.push(own, event);
                let uses: Uses = [Use { stream: 7, handle: None, fence }].into_iter().collect();
                space.defer(Kept::Small(address), 1, freed, uses);
            }
            let mut request = || {
                assert!(space.uses.has_small() && !space.uses.has_due());
                assert!(space.waited_for().contains(&side));
                let freed = space.timelines.push(own, event);
                space.pass(freed);
                assert_eq!(space.next_ready_small(Some(1)), None);
            };
            request(); // all frees on its own stream pass
            let start = std::time::Instant::now();
            (0..200).for_each(|_| request());
            let took = start.elapsed();
            let newest = space.timelines.newest(side).unwrap();
            space.pass(newest);
            assert_eq!(space.next_ready_small(Some(2)), Some(0), "they have waited for that");
            took
        };
        // The machine may be busy with something else in either.
        let is_as_fast = |_| {
            let few = requests_beside(200);
            let many = requests_beside(if cfg!(miri) { 2_000 } else { 200_000 });
            println!("{few:?} beside 200, {many:?} beside a thousand times as many");
            many < 50 * few
        };
        assert!((0..8).any(is_as_fast));
    }

    /// Each pass is a matter of the frees that waited for it.
    #[test]
    fn frees_that_are_over_one_by_one_cost_no_more_beside_many_that_wait() {
        let event = Event::foreign(std::ptr::null_mut());
        let passes_beside = |frees: u64| {
            let mut space = Space::new(2 << 20);
            let [own, slow, quick] = [1, 7, 8].map(|stream| space.timeline(stream));
            let mut fences = Vec::new();
            for address in 0..2 * frees {
                let (stream, side) = if address < frees { (7, slow) } else { (8, quick) };
                let fence = space.timelines.push(side, event);
                let freed = space.timelines.push(own, event);
                let uses = [Use { stream, handle: None, fence: Some(fence) }].into_iter().collect();
                space.defer(Kept::Small(address), 1, freed, uses);
                fences.push(fence);
            }
            let start = std::time::Instant::now();
            for (fence, address) in fences.into_iter().zip(0..).skip(frees as usize) {
                space.pass(fence);
                assert_eq!(space.next_ready_small(Some(1)), Some(address));
                space.small_is_free(address, true);
            }
            assert_eq!(space.next_ready_small(Some(1)), None);
            start.elapsed()
        };
        let took = passes_beside(if cfg!(miri) { 100 } else { 16_000 });
        assert!(took < std::time::Duration::from_secs(2), "{took:?}");
    }

    #[test]
    fn a_use_that_cannot_be_proved_is_over_when_the_host_has_waited_for_what_was_given_before() {
        let mut space = Space::new(2 << 20);
        let timeline = space.timeline(1);
        let own = Fence { timeline, sequence: space.timelines.next_sequence() };
        let lost: Uses = [Use { stream: 7, handle: None, fence: None }].into_iter().collect();
        space.defer(Kept::Small(0x1000), 1, own, lost);
        assert!(space.uses.has_due() && space.uses.due().0.is_empty(), "nothing to record on");
        space.settle_by(own.sequence - 1, None);
        assert!(space.uses.has_due(), "a wait for what came before the free");
        space.settle_by(own.sequence, Some(8));
        assert!(space.uses.has_due(), "a wait for another stream");
        space.settle_by(own.sequence, None);
        assert!(!space.uses.has_due(), "a wait for the whole device");
        assert_eq!(space.next_ready_small(Some(2)), None, "what came before the free is not over");
        assert_eq!(space.next_ready_small(Some(1)), Some(0x1000), "but on the stream of the free");
        assert_eq!(space.next_ready_small(Some(1)), None, "somebody has it");
        space.small_is_free(0x1000, false);
        assert_eq!(space.next_ready_small(Some(1)), Some(0x1000), "tried again");
        space.small_is_free(0x1000, true);
        assert!(!space.uses.has_small());
    }
}

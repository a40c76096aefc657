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

use std::collections::{BTreeMap, HashMap};

use smallvec::SmallVec;

use super::space::Space;
use crate::device::StreamHandle;
use crate::event::Event;
use crate::fence::{Fence, TimelineId};
use crate::region::{NodeId, State};

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

/// Freed memory that waits for uses on other streams.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kept {
    /// A region, pending on the timeline that is nobody's.
    Pages(NodeId),
    /// A small allocation that the driver still takes for live.
    Small(u64),
}

#[derive(Debug)]
pub(super) struct Deferred {
    pub(super) kept: Kept,
    /// The stream of the free, and the free itself, held.
    pub(super) stream: u64,
    pub(super) own: Fence,
    pub(super) uses: Uses,
    /// Somebody is giving it to the driver now.
    freeing: bool,
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
    deferred: Vec<Deferred>,
    counts: Counts,
    /// Frees of small allocations that were deferred: the newest on each timeline.
    own_of_small: BTreeMap<TimelineId, u64>,
    /// No stream's: what regions of deferred frees wait for, each under a number of its own.
    timeline: TimelineId,
}

/// What deferred frees wait for, counted, so that a request need not go through all of them to see that there is
/// nothing for it to do.
#[derive(Default, PartialEq, Eq, Debug)]
pub(super) struct Counts {
    /// Uses without a fence.
    due: usize,
    /// Uses with a fence, by timeline.
    fenced: BTreeMap<TimelineId, usize>,
    /// Small allocations.
    small: usize,
    /// Those that wait for no use and are in nobody's hands.
    ready: usize,
}

impl Counts {
    fn add(&mut self, of: &Use) {
        match of.fence {
            Some(fence) => *self.fenced.entry(fence.timeline).or_default() += 1,
            None => self.due += 1,
        }
    }

    fn take(&mut self, of: &Use) {
        let Some(fence) = of.fence else {
            self.due -= 1;
            return;
        };
        if let Some(count) = self.fenced.get_mut(&fence.timeline) {
            *count -= 1;
            if *count == 0 {
                self.fenced.remove(&fence.timeline);
            }
        }
    }
}

impl UseBook {
    pub(super) fn new(timeline: TimelineId) -> Self {
        let (live, deferred, counts) = (HashMap::new(), Vec::new(), Counts::default());
        Self { live, deferred, counts, own_of_small: BTreeMap::new(), timeline }
    }

    pub(super) fn timeline(&self) -> TimelineId {
        self.timeline
    }

    pub(super) fn live(&self) -> impl Iterator<Item = (u64, &Uses)> {
        self.live.iter().map(|(address, uses)| (*address, uses))
    }

    pub(super) fn deferred(&self) -> &[Deferred] {
        &self.deferred
    }

    /// Whether a live allocation is used on other streams.
    pub(super) fn are_noted(&self, address: u64) -> bool {
        !self.live.is_empty() && self.live.contains_key(&address)
    }

    /// Whether something freed waits for a stream that could not be recorded on.
    pub(super) fn has_due(&self) -> bool {
        self.counts.due > 0
    }

    pub(super) fn has_small(&self) -> bool {
        self.counts.small > 0
    }

    /// Whether a deferred free waits for a fence of a timeline.
    pub(super) fn waits_for(&self, timeline: TimelineId) -> bool {
        self.counts.fenced.contains_key(&timeline)
    }

    /// Whether the counts are those of the list, for validation.
    pub(super) fn are_counted(&self) -> bool {
        let mut counted = Counts::default();
        for deferred in &self.deferred {
            deferred.uses.iter().for_each(|of| counted.add(of));
            counted.small += usize::from(deferred.is_small());
            counted.ready += usize::from(deferred.is_ready());
        }
        counted == self.counts
    }

    /// Notes a use of a live allocation. Twice is once, by the handle that lasts longer.
    pub(super) fn note(&mut self, address: u64, stream: u64, handle: StreamHandle, lasts: bool) {
        let uses = self.live.entry(address).or_default();
        match uses.iter_mut().find(|known| known.stream == stream) {
            Some(known) if lasts && known.handle.is_some() => known.handle = Some(handle),
            Some(_) => {}
            None => uses.push(Use { stream, handle: Some(handle), fence: None }),
        }
    }

    /// The streams of a live allocation to record on, but for one.
    pub(super) fn to_record(&self, address: u64, own: u64) -> SmallVec<[(u64, StreamHandle); 2]> {
        let uses = self.live.get(&address).into_iter().flatten();
        let open = uses.filter(|known| known.stream != own && known.fence.is_none());
        open.filter_map(|known| Some((known.stream, known.handle?))).collect()
    }

    /// The streams that something freed waits for and that can be recorded on, perhaps.
    pub(super) fn due(&self) -> SmallVec<[(u64, StreamHandle); 2]> {
        let mut due: SmallVec<[(u64, StreamHandle); 2]> = SmallVec::new();
        let uses = self.deferred.iter().flat_map(|deferred| &deferred.uses);
        for of in uses.filter(|of| of.fence.is_none()) {
            if let Some(handle) = of.handle.filter(|_| due.iter().all(|(id, _)| *id != of.stream)) {
                due.push((of.stream, handle));
            }
        }
        due
    }

    /// Whether a record on a stream would be the proof of a use.
    pub(super) fn needs(&self, stream: u64, scope: Scope) -> bool {
        let of_live = |uses: &Uses| {
            let mut of_stream = uses.iter().filter(|of| of.stream == stream);
            of_stream.any(|of| of.handle.is_some())
        };
        let mut deferred = self.deferred.iter().flat_map(|deferred| &deferred.uses);
        let mut due = || deferred.any(|of| of.stream == stream && of.fence.is_none());
        match scope {
            Scope::Freed(address) => self.live.get(&address).is_some_and(of_live),
            Scope::Due => due(),
            Scope::Ending => due() || self.live.values().any(of_live),
        }
    }

    /// A stream has ended: nobody records on it any more.
    pub(super) fn forget_handle(&mut self, stream: u64) {
        let deferred = self.deferred.iter_mut().flat_map(|deferred| &mut deferred.uses);
        let all = self.live.values_mut().flatten().chain(deferred);
        all.filter(|of| of.stream == stream).for_each(|of| of.handle = None);
    }
}

impl Space {
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
                Scope::Ending => book.live.values_mut().for_each(&mut enter_all),
                Scope::Due => {}
            }
            if !matches!(scope, Scope::Freed(_)) {
                let deferred = book.deferred.iter_mut().flat_map(|deferred| &mut deferred.uses);
                let due = |of: &&mut Use| of.stream == stream && of.fence.is_none();
                for of in deferred.filter(due) {
                    book.counts.take(of);
                    enter(of);
                    book.counts.add(of);
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
        let mut uses = self.uses.live.remove(&address).unwrap_or_default();
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
        let UseBook { deferred, counts, .. } = &mut self.uses;
        for of in deferred.iter_mut().flat_map(|deferred| &mut deferred.uses) {
            if of.fence == Some(fence) && of.handle.is_some() {
                counts.take(of);
                of.fence = None;
                counts.add(of);
                given_up += 1;
            }
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
        }
        let deferred = Deferred { kept, stream, own, uses, freeing: false };
        let book = &mut self.uses;
        deferred.uses.iter().for_each(|of| book.counts.add(of));
        if deferred.is_small() {
            book.counts.small += 1;
            book.counts.ready += usize::from(deferred.is_ready());
            let newest = book.own_of_small.entry(own.timeline).or_default();
            *newest = own.sequence.max(*newest);
        }
        book.deferred.push(deferred);
    }

    /// Gives up waiting for uses that are over. Pages that wait for none any more are as if they had
    /// been freed then; small allocations are the driver's to free: see
    /// [`next_ready_small`](Self::next_ready_small).
    pub(super) fn settle(&mut self) {
        let mut at = 0;
        while at < self.uses.deferred.len() {
            let was_ready = self.uses.deferred[at].is_ready();
            let mut uses = std::mem::take(&mut self.uses.deferred[at].uses);
            uses.retain(|of| {
                let over = self.is_over(of);
                if over && let Some(fence) = of.fence {
                    self.uses.counts.take(of);
                    self.release(fence);
                }
                !over
            });
            let Deferred { kept, own, .. } = self.uses.deferred[at];
            match kept {
                Kept::Pages(id) if uses.is_empty() => {
                    self.uses.deferred.swap_remove(at);
                    self.set_free(id, own);
                    self.release(own);
                }
                _ => {
                    let book = &mut self.uses;
                    book.deferred[at].uses = uses;
                    let is_ready = book.deferred[at].is_ready();
                    book.counts.ready += usize::from(is_ready && !was_ready);
                    at += 1;
                }
            }
        }
    }

    /// The host has waited for what one stream, or every one, was given up to a number: uses that
    /// could not be recorded are over, too, where they are of what was freed before.
    pub(super) fn settle_by(&mut self, point: u64, stream: Option<u64>) {
        let UseBook { deferred, counts, .. } = &mut self.uses;
        let has_due = counts.due > 0;
        for deferred in deferred.iter_mut() {
            if has_due && deferred.own.sequence <= point {
                let was_ready = deferred.is_ready();
                let of_mark = |of: &Use| stream.is_none_or(|stream| stream == of.stream);
                deferred.uses.retain(|of| {
                    let stays = of.fence.is_some() || !of_mark(of);
                    if !stays {
                        counts.take(of);
                    }
                    stays
                });
                counts.ready += usize::from(deferred.is_ready() && !was_ready);
            }
        }
        self.settle();
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
        book.counts.fenced.keys().copied().chain(own).collect()
    }

    /// A small allocation that the driver may have back, on the stream of a request (or on any):
    /// its uses are over, and so is what came before the free, unless that was on this stream.
    /// Whoever takes it says how it went: [`small_is_free`](Self::small_is_free).
    pub(super) fn next_ready_small(&mut self, stream: Option<u64>) -> Option<u64> {
        if self.uses.counts.ready == 0 {
            return None;
        }
        let timelines = &self.timelines;
        let address = self.uses.deferred.iter_mut().find_map(|deferred| {
            let Kept::Small(address) = deferred.kept else { return None };
            let in_order = Some(deferred.stream) == stream || timelines.is_complete(deferred.own);
            (deferred.is_ready() && in_order).then(|| {
                deferred.freeing = true;
                address
            })
        })?;
        self.uses.counts.ready -= 1;
        Some(address)
    }

    /// What the driver said to a small allocation taken by
    /// [`next_ready_small`](Self::next_ready_small).
    pub(super) fn small_is_free(&mut self, address: u64, done: bool) {
        let is_it = |deferred: &Deferred| deferred.freeing && deferred.kept == Kept::Small(address);
        let Some(at) = self.uses.deferred.iter().position(is_it) else { return };
        if done {
            let deferred = self.uses.deferred.swap_remove(at);
            self.uses.counts.small -= 1;
            if self.uses.counts.small == 0 {
                self.uses.own_of_small.clear();
            }
            self.release(deferred.own);
        } else {
            self.uses.deferred[at].freeing = false;
            self.uses.counts.ready += 1;
        }
    }
}

impl Deferred {
    fn is_small(&self) -> bool {
        matches!(self.kept, Kept::Small(_))
    }

    /// Whether it is a small allocation that waits for no use and is in nobody's hands.
    fn is_ready(&self) -> bool {
        self.is_small() && self.uses.is_empty() && !self.freeing
    }

    pub(super) fn is_being_freed(&self) -> bool {
        self.freeing
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
        book.forget_handle(7);
        assert!(!book.needs(7, Scope::Ending) && book.to_record(0x1000, 0).is_empty());
        assert!(book.needs(8, Scope::Ending), "the other goes on");
        assert!(book.are_noted(0x1000), "what is not proved is not forgotten");
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
        let few = frees_among(200);
        let many = frees_among(if cfg!(miri) { 2_000 } else { 200_000 });
        assert!(many < 50 * few, "{few:?} among 200, {many:?} among a thousand times as many");
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
        let few = requests_beside(200);
        let many = requests_beside(if cfg!(miri) { 2_000 } else { 200_000 });
        assert!(many < 50 * few, "{few:?} beside 200, {many:?} beside a thousand times as many");
    }

    #[test]
    fn a_use_that_cannot_be_proved_is_over_when_the_host_has_waited_for_what_was_given_before() {
        let mut space = Space::new(2 << 20);
        let timeline = space.timeline(1);
        let own = Fence { timeline, sequence: space.timelines.next_sequence() };
        let lost: Uses = [Use { stream: 7, handle: None, fence: None }].into_iter().collect();
        space.defer(Kept::Small(0x1000), 1, own, lost);
        assert!(space.uses.has_due() && space.uses.due().is_empty(), "nothing to record on");
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

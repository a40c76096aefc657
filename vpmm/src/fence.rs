//! Fences: the proof that work on a stream up to a point has finished, or the means to wait for it.
//!
//! ```text
//! timeline of stream 7:   passed ≤ 41 │ 44 ── 45 ── 52     sequence numbers grow with time
//!                                     │ ev    –     ev     an event each, or none once unused
//! ```
//!
//! A stream runs its work in order, so its events complete in the order in which they were
//! recorded: one event found complete proves every earlier fence of the same timeline, and one
//! query answers for any number of regions. A fence is counted by the regions that carry it;
//! when the last one goes, its event is handed back for the next free, complete or not, so the
//! fences alive never outnumber the regions alive (I7).
//!
//! A fence can be known to be complete before it *passes*, that is, before memory that waits for it
//! is everybody's: a pool may not give memory away because of a question that it asked for another
//! reason (see [`Reuse`](crate::Reuse)).
//!
//! This room is plain bookkeeping: it is generic over the event and calls nobody.

#![forbid(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

/// A timeline's place in [`Timelines`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub(crate) struct TimelineId(pub(crate) u32);

/// A point on a timeline.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Fence {
    pub(crate) timeline: TimelineId,
    pub(crate) sequence: u64,
}

impl Fence {
    /// The fence that has always passed: memory that no stream has a claim on.
    pub(crate) const PASSED: Self = Self { timeline: TimelineId(u32::MAX), sequence: 0 };
}

struct Entry<E> {
    sequence: u64,
    holders: u32,
    /// `None` once nobody holds the fence: the entry waits to be swept.
    event: Option<E>,
}

struct Timeline<E> {
    stream: u64,
    passed: u64,
    /// Complete up to here, as a question told; at least `passed`.
    complete: u64,
    /// The last number before the stream's end was told; 0 for never.
    ended: u64,
    entries: VecDeque<Entry<E>>,
    unheld: usize,
    /// Held while an event is recorded and entered, so that sequence numbers follow the order of
    /// the records on the stream, without holding the pool's lock during the record.
    recording: Arc<Mutex<()>>,
}

impl<E> Timeline<E> {
    fn position(&self, sequence: u64) -> Option<usize> {
        self.entries.binary_search_by_key(&sequence, |entry| entry.sequence).ok()
    }

    fn is_held(&self, sequence: u64) -> bool {
        self.position(sequence).is_some_and(|at| self.entries[at].event.is_some())
    }

    /// The place behind the entries up to a number.
    fn behind(&self, sequence: u64) -> usize {
        self.entries.partition_point(|entry| entry.sequence <= sequence)
    }

    /// Drops entries that nobody holds, once they outnumber the others.
    fn sweep(&mut self) {
        while self.entries.back().is_some_and(|entry| entry.event.is_none()) {
            self.entries.pop_back();
            self.unheld -= 1;
        }
        while self.entries.front().is_some_and(|entry| entry.event.is_none()) {
            self.entries.pop_front();
            self.unheld -= 1;
        }
        if self.unheld * 2 > self.entries.len() + 32 {
            self.entries.retain(|entry| entry.event.is_some());
            self.unheld = 0;
        }
    }
}

/// All timelines of a pool, one per stream that has freed memory, keyed by the stream's id.
///
/// Ids and not handles: a destroyed stream's handle is given to the next stream while its work
/// may still run.
pub(crate) struct Timelines<E> {
    by_stream: HashMap<u64, TimelineId>,
    slots: Vec<Timeline<E>>,
    vacant: Vec<TimelineId>,
    /// One counter for all timelines, so that a slot reused for another stream cannot confuse
    /// the old stream's fences with the new one's.
    last_sequence: u64,
}

impl<E: Copy> Timelines<E> {
    pub(crate) fn new() -> Self {
        Self { by_stream: HashMap::new(), slots: Vec::new(), vacant: Vec::new(), last_sequence: 0 }
    }

    pub(crate) fn find(&self, stream: u64) -> Option<TimelineId> {
        self.by_stream.get(&stream).copied()
    }

    /// The stream's timeline, made if there is none.
    pub(crate) fn open(&mut self, stream: u64) -> TimelineId {
        if let Some(known) = self.find(stream) {
            return known;
        }
        let id = match self.vacant.pop() {
            Some(id) => {
                self.slots[id.0 as usize].stream = stream;
                id
            }
            None => self.add_slot(stream),
        };
        self.by_stream.insert(stream, id);
        id
    }

    /// A timeline that is no stream's, is not listed among [`ids`](Self::ids), and stays. Fences on
    /// it are the caller's own numbers; they never pass.
    pub(crate) fn reserve(&mut self) -> TimelineId {
        self.add_slot(0)
    }

    fn add_slot(&mut self, stream: u64) -> TimelineId {
        let id = TimelineId(self.slots.len() as u32);
        self.slots.push(Timeline {
            stream,
            passed: 0,
            complete: 0,
            ended: 0,
            entries: VecDeque::new(),
            unheld: 0,
            recording: Arc::new(Mutex::new(())),
        });
        id
    }

    /// The number of the fence entered last, on whatever timeline.
    pub(crate) fn last_sequence(&self) -> u64 {
        self.last_sequence
    }

    /// A number that no fence has.
    pub(crate) fn next_sequence(&mut self) -> u64 {
        self.last_sequence += 1;
        self.last_sequence
    }

    /// Forgets a timeline that holds no fence; `unused` tells whether anything else refers to it.
    pub(crate) fn close_unused(&mut self, unused: impl Fn(TimelineId) -> bool) {
        let (slots, vacant) = (&self.slots, &mut self.vacant);
        self.by_stream.retain(|_, id| {
            let slot = &slots[id.0 as usize];
            let idle =
                slot.entries.is_empty() && Arc::strong_count(&slot.recording) == 1 && unused(*id);
            if idle {
                vacant.push(*id);
            }
            !idle
        });
    }

    /// How many streams have a timeline.
    pub(crate) fn len(&self) -> usize {
        self.by_stream.len()
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = TimelineId> + '_ {
        self.by_stream.values().copied()
    }

    /// How many slots there are, vacant ones included: an upper bound of the ids given out.
    pub(crate) fn slots(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn stream(&self, id: TimelineId) -> u64 {
        self.slots[id.0 as usize].stream
    }

    pub(crate) fn recording(&self, id: TimelineId) -> Arc<Mutex<()>> {
        Arc::clone(&self.slots[id.0 as usize].recording)
    }

    /// Enters an event just recorded on the timeline's stream, held once.
    pub(crate) fn push(&mut self, id: TimelineId, event: E) -> Fence {
        let sequence = self.next_sequence();
        self.slots[id.0 as usize].entries.push_back(Entry {
            sequence,
            holders: 1,
            event: Some(event),
        });
        Fence { timeline: id, sequence }
    }

    pub(crate) fn has_passed(&self, fence: Fence) -> bool {
        fence == Fence::PASSED || fence.sequence <= self.slots[fence.timeline.0 as usize].passed
    }

    /// Whether the host has seen the fence complete, whatever follows from that.
    pub(crate) fn is_complete(&self, fence: Fence) -> bool {
        fence == Fence::PASSED || fence.sequence <= self.slots[fence.timeline.0 as usize].complete
    }

    /// One more region carries the fence.
    pub(crate) fn hold(&mut self, fence: Fence) {
        if self.has_passed(fence) {
            return;
        }
        let slot = &mut self.slots[fence.timeline.0 as usize];
        if let Some(at) = slot.position(fence.sequence) {
            slot.entries[at].holders += 1;
        }
    }

    /// One region fewer carries the fence; gives the event back with the last.
    pub(crate) fn release(&mut self, fence: Fence) -> Option<E> {
        if self.has_passed(fence) {
            return None;
        }
        let slot = &mut self.slots[fence.timeline.0 as usize];
        let entry = slot.position(fence.sequence).map(|at| &mut slot.entries[at])?;
        entry.holders -= 1;
        if entry.holders > 0 {
            return None;
        }
        let event = entry.event.take();
        slot.unheld += 1;
        slot.sweep();
        event
    }

    /// The event of a fence that has not passed.
    pub(crate) fn event(&self, fence: Fence) -> Option<E> {
        if self.has_passed(fence) {
            return None;
        }
        let slot = &self.slots[fence.timeline.0 as usize];
        slot.position(fence.sequence).and_then(|at| slot.entries[at].event)
    }

    /// A fence of a timeline that is not known to be complete and is older than `before`: that many entries after
    /// the oldest, or the newest where there are not so many.
    pub(crate) fn open_after(&self, id: TimelineId, entries: usize, before: u64) -> Option<Fence> {
        let slot = &self.slots[id.0 as usize];
        let (first, end) = (slot.behind(slot.complete), slot.behind(before - 1));
        let at = first.saturating_add(entries);
        let held = |entry: &&Entry<E>| entry.event.is_some();
        let entry = match slot.entries.range(at.min(end)..end).find(held) {
            None if first < end => slot.entries.range(first..at.min(end)).rfind(held)?,
            entry => entry?,
        };
        Some(Fence { timeline: id, sequence: entry.sequence })
    }

    /// The newest fence of a timeline that is not known to be complete: if it is, all are.
    pub(crate) fn newest(&self, id: TimelineId) -> Option<Fence> {
        let slot = &self.slots[id.0 as usize];
        let open = slot.entries.range(slot.behind(slot.complete)..);
        let entry = open.rev().find(|entry| entry.event.is_some())?;
        Some(Fence { timeline: id, sequence: entry.sequence })
    }

    /// The newest fence of a timeline up to a number that has not passed.
    pub(crate) fn newest_until(&self, id: TimelineId, sequence: u64) -> Option<Fence> {
        let slot = self.slots.get(id.0 as usize)?;
        let until = slot.entries.range(..slot.behind(sequence));
        let entry = until.rev().find(|entry| entry.event.is_some())?;
        Some(Fence { timeline: id, sequence: entry.sequence })
    }

    /// The timeline's stream has ended: nothing comes after what was entered so far. Where a stream was only lent
    /// and comes again, what it frees then is not of before its end.
    pub(crate) fn end(&mut self, id: TimelineId) {
        self.slots[id.0 as usize].ended = self.last_sequence;
    }

    /// The newest fence of before the end of a timeline's stream that has not passed.
    pub(crate) fn newest_of_ended(&self, id: TimelineId) -> Option<Fence> {
        self.newest_until(id, self.slots.get(id.0 as usize)?.ended)
    }

    /// The same of those that are known to be complete.
    pub(crate) fn complete_of_ended(&self, id: TimelineId) -> Option<Fence> {
        let slot = self.slots.get(id.0 as usize)?;
        self.newest_until(id, slot.ended.min(slot.complete))
    }

    /// Notes that a question found a fence complete, and with it all earlier ones of its timeline.
    /// They keep their events. Does nothing where the fence is no longer held, as [`pass`](Self::pass).
    pub(crate) fn see_complete(&mut self, fence: Fence) -> bool {
        let slot = &mut self.slots[fence.timeline.0 as usize];
        if !slot.is_held(fence.sequence) {
            return false;
        }
        slot.complete = slot.complete.max(fence.sequence);
        true
    }

    /// Notes that a fence was seen complete, and with it all earlier ones of its timeline.
    /// Their events go to `recycle`.
    ///
    /// Does nothing where the fence is no longer held: its event may have been recorded anew
    /// between the query and now, so that the answer says nothing about this fence.
    pub(crate) fn pass(&mut self, fence: Fence, mut recycle: impl FnMut(E)) -> bool {
        let slot = &mut self.slots[fence.timeline.0 as usize];
        if !slot.is_held(fence.sequence) {
            return false;
        }
        while slot.entries.front().is_some_and(|entry| entry.sequence <= fence.sequence) {
            match slot.entries.pop_front().and_then(|entry| entry.event) {
                Some(event) => recycle(event),
                None => slot.unheld -= 1,
            }
        }
        slot.passed = fence.sequence;
        slot.complete = slot.complete.max(fence.sequence);
        true
    }

    /// Takes every event out, for the end of the pool.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = E> + '_ {
        self.slots
            .iter_mut()
            .flat_map(|slot| slot.entries.drain(..).filter_map(|entry| entry.event))
    }

    /// Entries kept, held or not: what I7 bounds.
    pub(crate) fn entries(&self) -> usize {
        self.slots.iter().map(|slot| slot.entries.len()).sum()
    }

    /// How many regions hold the fence, for [`validate`](crate::Pool::validate).
    pub(crate) fn holders(&self, fence: Fence) -> u32 {
        let Some(slot) = self.slots.get(fence.timeline.0 as usize) else { return 0 };
        slot.position(fence.sequence).map_or(0, |at| slot.entries[at].holders)
    }

    /// The sum of holders over all fences that have not passed.
    pub(crate) fn total_holders(&self) -> u64 {
        let entries = self.slots.iter().flat_map(|slot| &slot.entries);
        entries.map(|entry| u64::from(entry.holders)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_complete_event_passes_all_earlier_fences_of_its_stream_only() {
        let mut timelines = Timelines::new();
        let (a, b) = (timelines.open(7), timelines.open(8));
        let first = timelines.push(a, 'x');
        let other = timelines.push(b, 'o');
        let second = timelines.push(a, 'y');
        let third = timelines.push(a, 'z');
        let mut recycled = Vec::new();
        assert!(timelines.pass(second, |event| recycled.push(event)));
        assert_eq!(recycled, ['x', 'y']);
        assert!(timelines.has_passed(first) && timelines.has_passed(second));
        assert!(!timelines.has_passed(third) && !timelines.has_passed(other));
        assert_eq!(
            (timelines.open_after(a, 0, u64::MAX), timelines.newest(a)),
            (Some(third), Some(third))
        );
    }

    #[test]
    fn an_event_comes_back_with_the_last_holder() {
        let mut timelines = Timelines::new();
        let a = timelines.open(1);
        let fence = timelines.push(a, 'x');
        timelines.hold(fence);
        assert_eq!(timelines.release(fence), None);
        assert_eq!(timelines.release(fence), Some('x'));
        assert_eq!(timelines.entries(), 0);
    }

    #[test]
    fn an_answer_about_a_fence_given_up_meanwhile_is_ignored() {
        let mut timelines = Timelines::new();
        let a = timelines.open(1);
        let stuck = timelines.push(a, 's');
        let fence = timelines.push(a, 'x');
        assert_eq!(timelines.release(fence), Some('x'));
        assert!(!timelines.pass(fence, |_| panic!("nothing passed")));
        assert!(!timelines.has_passed(stuck));
    }

    #[test]
    fn entries_stay_bounded_behind_a_fence_that_never_passes() {
        let mut timelines = Timelines::new();
        let a = timelines.open(1);
        let stuck = timelines.push(a, 0);
        let mut held = timelines.push(a, 1);
        for event in 2..if cfg!(miri) { 200 } else { 100_000 } {
            let next = timelines.push(a, event);
            assert!(timelines.release(held).is_some());
            held = next;
        }
        assert!(timelines.entries() < 64, "{} entries", timelines.entries());
        assert!(!timelines.has_passed(stuck));
    }

    #[test]
    fn what_a_question_found_complete_has_not_passed_for_everybody() {
        let mut timelines = Timelines::new();
        let a = timelines.open(1);
        let (first, second, third) =
            (timelines.push(a, 'x'), timelines.push(a, 'y'), timelines.push(a, 'z'));
        assert!(timelines.see_complete(second));
        assert!(timelines.is_complete(first) && timelines.is_complete(second));
        assert!(!timelines.has_passed(first) && !timelines.is_complete(third));
        assert_eq!(
            (timelines.open_after(a, 0, u64::MAX), timelines.newest(a)),
            (Some(third), Some(third))
        );
        // Who waits for them gives them up one by one, and the events come back.
        assert_eq!(timelines.release(first), Some('x'));
        assert!(!timelines.see_complete(first), "nobody holds it any more");
        // A wait of the host's makes them everybody's, as far as it goes.
        assert_eq!(timelines.newest_until(a, second.sequence), Some(second));
        assert!(timelines.pass(second, |event| assert_eq!(event, 'y')));
        assert!(timelines.has_passed(second) && !timelines.has_passed(third));
        assert_eq!(timelines.newest_until(a, second.sequence), None);
    }

    #[test]
    fn open_fences_are_found_by_their_place_and_no_further_than_those_that_are_held() {
        let mut timelines = Timelines::new();
        let (a, b) = (timelines.open(1), timelines.open(2));
        let fences: Vec<Fence> = (0..40).map(|event| timelines.push(a, event)).collect();
        timelines.push(b, 99);
        let open = |timelines: &Timelines<i32>, entries, before| {
            let fence = timelines.open_after(a, entries, before)?;
            fences.iter().position(|known| *known == fence)
        };
        let end = u64::MAX;
        assert_eq!([0, 7, 39, 40, usize::MAX].map(|at| open(&timelines, at, end)), {
            [Some(0), Some(7), Some(39), Some(39), Some(39)]
        });
        let seventh = fences[7].sequence;
        assert_eq!([0, 3, 7].map(|at| open(&timelines, at, seventh)), [Some(0), Some(3), Some(6)]);
        assert_eq!(open(&timelines, 0, fences[0].sequence), None);
        timelines.see_complete(fences[4]);
        assert_eq!([0, 9].map(|at| open(&timelines, at, seventh)), [Some(5), Some(6)]);
        // What nobody holds is passed over, upwards first.
        fences[5..8].iter().for_each(|fence| assert!(timelines.release(*fence).is_some()));
        assert_eq!([0, 2, 4].map(|at| open(&timelines, at, end)), [Some(8), Some(8), Some(9)]);
        assert_eq!(open(&timelines, 0, fences[8].sequence), None);
        timelines.see_complete(fences[39]);
        assert_eq!((open(&timelines, 0, end), timelines.newest(a)), (None, None));
    }

    #[test]
    fn a_reserved_timeline_is_no_streams_and_its_fences_never_pass() {
        let mut timelines: Timelines<char> = Timelines::new();
        let own = timelines.reserve();
        let fence = Fence { timeline: own, sequence: timelines.next_sequence() };
        timelines.hold(fence);
        assert!(!timelines.has_passed(fence) && timelines.event(fence).is_none());
        assert_eq!((timelines.release(fence), timelines.ids().count()), (None, 0));
        timelines.close_unused(|_| true);
        assert_ne!(timelines.open(7), own);
        assert_eq!(timelines.total_holders(), 0);
    }

    #[test]
    fn a_closed_timeline_leaves_no_claim_behind() {
        let mut timelines = Timelines::new();
        let a = timelines.open(1);
        let fence = timelines.push(a, 'x');
        timelines.close_unused(|_| true);
        assert_eq!(timelines.find(1), Some(a), "it still holds a fence");
        timelines.pass(fence, |_| ());
        timelines.close_unused(|_| true);
        assert_eq!(timelines.find(1), None);
        let again = timelines.open(2);
        assert_eq!(again, a, "the slot is used again");
        assert!(timelines.has_passed(fence), "the old stream's fence stays passed");
        assert!(!{
            let new = timelines.push(again, 'y');
            timelines.has_passed(new)
        });
    }
}

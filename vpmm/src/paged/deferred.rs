//! Frees that wait for uses on other streams, by what they wait for.
//!
//! Where a stream is far behind they are many. So whatever comes to pass is a matter of those that waited for it,
//! and a small allocation that the driver may have back is found without a look at those that it may not.

#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::uses::Uses;
use crate::fence::{Fence, TimelineId};
use crate::region::NodeId;

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

impl Deferred {
    pub(super) fn new(kept: Kept, stream: u64, own: Fence, uses: Uses) -> Self {
        Self { kept, stream, own, uses, freeing: false }
    }

    pub(super) fn is_small(&self) -> bool {
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

/// Frees under their numbers, by the number of a fence.
type ByFence = BTreeMap<TimelineId, BTreeSet<(u64, u64)>>;

fn insert(into: &mut ByFence, fence: Fence, number: u64) {
    into.entry(fence.timeline).or_default().insert((fence.sequence, number));
}

fn remove(from: &mut ByFence, fence: Fence, number: u64) {
    if let Some(of_timeline) = from.get_mut(&fence.timeline) {
        of_timeline.remove(&(fence.sequence, number));
        if of_timeline.is_empty() {
            from.remove(&fence.timeline);
        }
    }
}

/// What they wait for.
#[derive(Default, PartialEq, Eq, Debug)]
struct Index {
    /// Those with a use that has no fence.
    due: BTreeSet<u64>,
    /// Uses with a fence, by that.
    fenced: ByFence,
    /// Small allocations.
    small: usize,
    /// Those that wait for no use and are in nobody's hands, by the free's own fence.
    ready: ByFence,
}

impl Index {
    fn enter(&mut self, number: u64, of: &Deferred) {
        for fence in of.uses.iter().map(|of| of.fence) {
            match fence {
                Some(fence) => insert(&mut self.fenced, fence, number),
                None => _ = self.due.insert(number),
            }
        }
        self.small += usize::from(of.is_small());
        if of.is_ready() {
            insert(&mut self.ready, of.own, number);
        }
    }

    fn leave(&mut self, number: u64, of: &Deferred) {
        for fence in of.uses.iter().map(|of| of.fence) {
            match fence {
                Some(fence) => remove(&mut self.fenced, fence, number),
                None => _ = self.due.remove(&number),
            }
        }
        self.small -= usize::from(of.is_small());
        if of.is_ready() {
            remove(&mut self.ready, of.own, number);
        }
    }
}

/// All of them.
#[derive(Default)]
pub(super) struct DeferredFrees {
    /// Under numbers that rise.
    all: BTreeMap<u64, Deferred>,
    last: u64,
    index: Index,
    /// Small allocations that somebody is giving to the driver, by address.
    freeing: HashMap<u64, u64>,
}

impl DeferredFrees {
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Deferred> {
        self.all.values()
    }

    pub(super) fn push(&mut self, deferred: Deferred) {
        self.last += 1;
        self.put(self.last, deferred);
    }

    /// Takes one out.
    pub(super) fn take(&mut self, number: u64) -> Option<Deferred> {
        let deferred = self.all.remove(&number)?;
        self.index.leave(number, &deferred);
        Some(deferred)
    }

    /// Puts one that was taken out back, changed perhaps.
    pub(super) fn put(&mut self, number: u64, deferred: Deferred) {
        self.index.enter(number, &deferred);
        self.all.insert(number, deferred);
    }

    pub(super) fn has_small(&self) -> bool {
        self.index.small > 0
    }

    /// Whether one has a use without a fence.
    pub(super) fn has_due(&self) -> bool {
        !self.index.due.is_empty()
    }

    /// Those with a use that has no fence.
    pub(super) fn due(&self) -> impl Iterator<Item = &Deferred> {
        self.numbered_due().map(|(_, deferred)| deferred)
    }

    /// The same with their numbers.
    pub(super) fn numbered_due(&self) -> impl Iterator<Item = (u64, &Deferred)> {
        self.index.due.iter().filter_map(|number| Some((*number, self.all.get(number)?)))
    }

    /// And the numbers alone.
    pub(super) fn due_numbers(&self) -> Vec<u64> {
        self.index.due.iter().copied().collect()
    }

    /// Changes what one waits for.
    pub(super) fn change(&mut self, number: u64, change: impl FnOnce(&mut Uses)) {
        if let Some(mut deferred) = self.take(number) {
            change(&mut deferred.uses);
            self.put(number, deferred);
        }
    }

    /// The timelines of the uses' fences.
    pub(super) fn timelines(&self) -> impl Iterator<Item = TimelineId> {
        self.index.fenced.keys().copied()
    }

    /// Whether one waits for a fence of a timeline.
    pub(super) fn waits_for(&self, timeline: TimelineId) -> bool {
        self.index.fenced.contains_key(&timeline)
    }

    /// The oldest fence of a timeline that one waits for, and its number.
    pub(super) fn first_of(&self, timeline: TimelineId) -> Option<(Fence, u64)> {
        let (sequence, number) = *self.index.fenced.get(&timeline)?.first()?;
        Some((Fence { timeline, sequence }, number))
    }

    /// The numbers of those that wait for fences of a timeline from one number to another.
    pub(super) fn numbers_of(&self, timeline: TimelineId, from: u64, to: u64) -> Vec<u64> {
        let of_timeline = self.index.fenced.get(&timeline).into_iter();
        let waiting = of_timeline.flat_map(|of| of.range((from, 0)..=(to, u64::MAX)));
        waiting.map(|(_, number)| *number).collect()
    }

    /// Takes a small allocation that waits for no use in hand, whose free's own fence `may_go` allows, of this
    /// timeline first: its address.
    pub(super) fn take_ready(
        &mut self,
        timeline: Option<TimelineId>,
        may_go: impl Fn(&Deferred) -> bool,
    ) -> Option<u64> {
        let ready = &self.index.ready;
        let own = timeline.and_then(|timeline| ready.get(&timeline));
        // What is older on a timeline may go if what is newer may.
        let oldest = own.into_iter().chain(ready.values()).filter_map(BTreeSet::first);
        let number = oldest
            .map(|(_, number)| *number)
            .find(|number| self.all.get(number).is_some_and(&may_go))?;
        let mut deferred = self.take(number)?;
        let Kept::Small(address) = deferred.kept else { return None };
        deferred.freeing = true;
        self.put(number, deferred);
        self.freeing.insert(address, number);
        Some(address)
    }

    /// What became of one that was taken in hand: it is gone, and this its own fence, or it is ready again.
    pub(super) fn end_ready(&mut self, address: u64, done: bool) -> Option<Fence> {
        let number = self.freeing.remove(&address)?;
        let mut deferred = self.take(number)?;
        if done {
            return Some(deferred.own);
        }
        deferred.freeing = false;
        self.put(number, deferred);
        None
    }

    /// Whether what they wait for is what is noted about it, for validation.
    pub(super) fn agree(&self) -> bool {
        let mut index = Index::default();
        self.all.iter().for_each(|(number, deferred)| index.enter(*number, deferred));
        let freeing = self.all.values().filter(|deferred| deferred.freeing).count();
        index == self.index && freeing == self.freeing.len()
    }
}

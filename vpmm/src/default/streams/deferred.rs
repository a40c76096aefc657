//! Freed blocks that wait for further streams, each with one of those that it waits for.
//!
//! They are many where a stream is far behind. So what comes to pass on a stream is a matter of those blocks that
//! wait for it: each is *parked* there, in the order of what has to pass, and looked at when that has.

#![forbid(unsafe_code)]

use std::collections::VecDeque;

use smallvec::SmallVec;

/// A freed block that waits for further streams.
pub(in crate::default) struct Deferred {
    pub(in crate::default) start: u32,
    pub(in crate::default) units: u32,
    /// The stream that it was freed on, at that time: which may have it again before.
    pub(in crate::default) own: Wait,
    /// The further streams.
    pub(in crate::default) waits: SmallVec<[Wait; 2]>,
}

/// What has to pass of a stream: the epoch, or a mark of at least this number.
#[derive(Clone, Copy, Debug)]
pub(in crate::default) struct Wait {
    pub(in crate::default) stream: u32,
    pub(in crate::default) epoch: u64,
    pub(in crate::default) mark: u64,
}

/// All of them, each at a place that it keeps.
#[derive(Default)]
pub(in crate::default) struct DeferredFrees {
    places: Vec<Option<Deferred>>,
    vacant: Vec<u32>,
}

impl DeferredFrees {
    pub(in crate::default) fn len(&self) -> usize {
        self.places.len() - self.vacant.len()
    }

    pub(in crate::default) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What a look at all of them takes.
    pub(super) fn places(&self) -> usize {
        self.places.len()
    }

    pub(in crate::default) fn iter(&self) -> impl Iterator<Item = &Deferred> {
        self.places.iter().flatten()
    }

    pub(super) fn get(&self, at: u32) -> Option<&Deferred> {
        self.places.get(at as usize)?.as_ref()
    }

    /// Adds one: its place.
    pub(super) fn add(&mut self, block: Deferred) -> u32 {
        match self.vacant.pop() {
            Some(at) => {
                self.places[at as usize] = Some(block);
                at
            }
            None => {
                self.places.push(Some(block));
                self.places.len() as u32 - 1
            }
        }
    }

    /// Takes one out. Where none is left all places go, so that a look at all of them is one at few again.
    pub(super) fn take(&mut self, at: u32) -> Option<Deferred> {
        let block = self.places.get_mut(at as usize)?.take()?;
        self.vacant.push(at);
        if self.is_empty() {
            self.places.clear();
            self.vacant.clear();
        }
        Some(block)
    }
}

/// A deferred block by its place, and what it waits for.
#[derive(Clone, Copy, Debug)]
pub(in crate::default) struct Parked {
    pub(in crate::default) wait: Wait,
    pub(in crate::default) at: u32,
}

/// The blocks that wait for one stream, first those that what passes first is enough for.
#[derive(Default)]
pub(in crate::default) struct ParkedFrees(VecDeque<Parked>);

impl ParkedFrees {
    pub(in crate::default) fn iter(&self) -> impl Iterator<Item = &Parked> {
        self.0.iter()
    }

    /// Marks and epochs rise together.
    pub(super) fn add(&mut self, parked: Parked) {
        let order = |of: &Parked| (of.wait.mark, of.wait.epoch);
        // Behind all others but for those that waited for another stream before.
        let is_last = self.0.back().is_none_or(|last| order(last) <= order(&parked));
        let at = if is_last {
            self.0.len()
        } else {
            self.0.partition_point(|of| order(of) <= order(&parked))
        };
        self.0.insert(at, parked);
    }

    pub(super) fn first(&self) -> Option<Parked> {
        self.0.front().copied()
    }

    pub(super) fn take_first(&mut self) {
        self.0.pop_front();
    }

    pub(super) fn take_all(&mut self) -> VecDeque<Parked> {
        std::mem::take(&mut self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait(mark: u64) -> Wait {
        Wait { stream: 1, epoch: mark / 2, mark }
    }

    #[test]
    fn what_passes_first_comes_first_whenever_it_was_parked() {
        let mut parked = ParkedFrees::default();
        for (at, mark) in [5, 7, 7, 6, 2, 9].into_iter().enumerate() {
            parked.add(Parked { wait: wait(mark), at: at as u32 });
        }
        let order: Vec<u32> = parked.iter().map(|parked| parked.at).collect();
        assert_eq!(order, [4, 0, 3, 1, 2, 5]);
        parked.take_first();
        assert_eq!(parked.first().map(|parked| parked.at), Some(0));
    }

    #[test]
    fn places_are_used_again_and_go_with_the_last() {
        let mut frees = DeferredFrees::default();
        let own = wait(1);
        let block = |start| Deferred { start, units: 1, own, waits: SmallVec::new() };
        let [first, second] = [10, 11].map(|start| frees.add(block(start)));
        assert_eq!(frees.take(first).map(|block| block.start), Some(10));
        assert!(frees.take(first).is_none() && frees.get(first).is_none() && frees.len() == 1);
        assert_eq!((frees.add(block(12)), frees.places()), (first, 2));
        assert_eq!(frees.iter().map(|block| block.start).collect::<Vec<_>>(), [12, 11]);
        assert!(frees.take(second).is_some() && frees.take(first).is_some());
        assert_eq!((frees.len(), frees.places()), (0, 0));
    }
}

//! An allocator of number ranges: virtual addresses, and offsets in the files behind memory.

use std::collections::{BTreeMap, BTreeSet};

/// Free ranges, kept by start (to join neighbours) and by size (to find the best fit).
///
/// Both views hold the same ranges; ranges do not touch, and none is empty. Every operation
/// costs O(log n) in the number of free ranges.
#[derive(Debug, Default)]
pub(crate) struct Ranges {
    by_start: BTreeMap<u64, u64>,
    by_size: BTreeSet<(u64, u64)>,
}

impl Ranges {
    /// All of `start..start + size` free.
    pub(crate) fn new(start: u64, size: u64) -> Self {
        let mut ranges = Self::default();
        if size > 0 {
            ranges.insert(start, size);
        }
        ranges
    }

    /// Takes the lowest of the smallest ranges that hold `size` at a multiple of `align`, a
    /// power of two.
    pub(crate) fn take(&mut self, size: u64, align: u64) -> Option<u64> {
        let fits = |&(free, start): &(u64, u64)| {
            let at = start.checked_next_multiple_of(align)?;
            (at.checked_add(size)? <= start + free).then_some((start, at))
        };
        // Any range of at least `size + align - 1` fits, so this looks at few.
        let (start, at) = self.by_size.range((size, 0)..).find_map(fits)?;
        self.carve(start, at, size);
        Some(at)
    }

    /// Takes exactly `at..at + size`; false if any of it is taken.
    pub(crate) fn take_at(&mut self, at: u64, size: u64) -> bool {
        let Some(end) = at.checked_add(size) else { return false };
        match self.by_start.range(..=at).next_back() {
            Some((&start, &free)) if end <= start + free => {
                self.carve(start, at, size);
                true
            }
            _ => false,
        }
    }

    /// Gives a range back, which must have been taken.
    pub(crate) fn give_back(&mut self, at: u64, size: u64) {
        let (mut start, mut end) = (at, at + size);
        if let Some((&before, &free)) = self.by_start.range(..at).next_back()
            && before + free == at
        {
            self.remove(before, free);
            start = before;
        }
        if let Some(&free) = self.by_start.get(&end) {
            self.remove(end, free);
            end += free;
        }
        self.insert(start, end - start);
    }

    fn carve(&mut self, start: u64, at: u64, size: u64) {
        let Some(&free) = self.by_start.get(&start) else { return };
        self.remove(start, free);
        if at > start {
            self.insert(start, at - start);
        }
        let (end, taken_end) = (start + free, at + size);
        if end > taken_end {
            self.insert(taken_end, end - taken_end);
        }
    }

    fn insert(&mut self, start: u64, size: u64) {
        self.by_start.insert(start, size);
        self.by_size.insert((size, start));
    }

    fn remove(&mut self, start: u64, size: u64) {
        self.by_start.remove(&start);
        self.by_size.remove(&(size, start));
    }
}

#[cfg(test)]
mod tests {
    use super::Ranges;

    #[test]
    fn best_fit_then_lowest() {
        let mut ranges = Ranges::new(0, 100);
        assert!(ranges.take_at(10, 5));
        assert!(ranges.take_at(30, 5));
        assert_eq!(ranges.take(10, 1), Some(0));
        assert_eq!(ranges.take(16, 1), Some(35));
        ranges.give_back(10, 5);
        assert_eq!(ranges.take(20, 1), Some(10));
        assert_eq!(ranges.take(50, 1), None);
    }

    #[test]
    fn alignment_leaves_the_front() {
        let mut ranges = Ranges::new(3, 61);
        assert_eq!(ranges.take(8, 16), Some(16));
        assert_eq!(ranges.take(13, 1), Some(3));
        assert!(!ranges.take_at(20, 1));
    }

    #[test]
    fn neighbours_join() {
        let mut ranges = Ranges::new(0, 12);
        for at in [0, 4, 8] {
            assert!(ranges.take_at(at, 4));
        }
        assert_eq!(ranges.take(1, 1), None);
        ranges.give_back(0, 4);
        ranges.give_back(8, 4);
        ranges.give_back(4, 4);
        assert_eq!(ranges.take(12, 1), Some(0));
    }
}

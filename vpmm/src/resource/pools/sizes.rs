//! Free blocks by size and address: exact best fit, in a step or two where a class has one block.
//!
//! Size classes under a bitmap of those that have any. The least block of each class stands by itself;
//! what else there is, of all classes, is in one ordered set.

#![forbid(unsafe_code)]

use std::collections::BTreeSet;

/// What sizes are counted in, in bytes.
pub(super) const UNIT: u64 = crate::resource::MIN_ALIGN as u64;

/// Classes for each doubling, as a power of two.
const FINENESS: u32 = 5;
/// The longest block is less than this many units: 256 TiB.
const MOST: u64 = 1 << 40;
const CLASSES: usize = ((40 - FINENESS + 1) << FINENESS) as usize;
const WORDS: usize = CLASSES.div_ceil(64);

/// The longest block, in bytes.
pub(super) const MOST_BYTES: u64 = (MOST - 1) * UNIT;

/// A free block in the order of the set: by size, then by address. With it goes the number of its node.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Sized {
    pub(super) bytes: u64,
    pub(super) start: u64,
    pub(super) node: u32,
}

/// Free blocks of one owner.
#[derive(Debug, Default)]
pub(super) struct Sizes {
    occupied: [u64; WORDS],
    /// Which words have occupied classes.
    summary: u64,
    /// Classes that have more than one block.
    crowded: [u64; WORDS],
    /// The least block of each occupied class; elsewhere what was there last. Empty until the first
    /// block comes.
    least: Vec<Sized>,
    others: BTreeSet<Sized>,
}

/// The class of a size; sizes up to 2^[`FINENESS`] units have one each.
#[inline]
fn class_of(bytes: u64) -> usize {
    let units = (bytes / UNIT).clamp(1, MOST - 1);
    let doubling = units.ilog2();
    if doubling < FINENESS {
        return units as usize;
    }
    let step = doubling - FINENESS;
    ((u64::from(step) << FINENESS) + (units >> step)) as usize
}

impl Sizes {
    /// The sum of the sizes, in bytes.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> u64 {
        self.iter().map(|block| block.bytes).sum()
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.summary == 0
    }

    #[inline]
    pub(super) fn insert(&mut self, block: Sized) {
        let class = class_of(block.bytes);
        let (word, bit) = (class / 64, 1 << (class % 64));
        if self.occupied[word] & bit == 0 {
            self.occupied[word] |= bit;
            self.summary |= 1 << word;
            if self.least.is_empty() {
                self.least.resize(CLASSES, Sized { bytes: 0, start: 0, node: 0 });
            }
            self.least[class] = block;
            return;
        }
        self.crowded[word] |= bit;
        let least = &mut self.least[class];
        let further = if block < *least { std::mem::replace(least, block) } else { block };
        self.others.insert(further);
    }

    /// Takes out a block that is in the set.
    #[inline]
    pub(super) fn remove(&mut self, block: Sized) {
        let class = class_of(block.bytes);
        let (word, bit) = (class / 64, 1 << (class % 64));
        if self.crowded[word] & bit != 0 {
            return self.remove_from_crowd(class, block);
        }
        debug_assert_eq!(self.least[class], block);
        self.occupied[word] &= !bit;
        if self.occupied[word] == 0 {
            self.summary &= !(1 << word);
        }
    }

    fn remove_from_crowd(&mut self, class: usize, block: Sized) {
        if self.least[class] != block {
            let was_there = self.others.remove(&block);
            debug_assert!(was_there);
        } else if let Some(next) = self.others.range(block..).next().copied() {
            // Of the same class, since that has more than one.
            self.others.remove(&next);
            self.least[class] = next;
        }
        let least = self.least[class];
        let more = self.others.range(least..).next();
        if more.is_none_or(|next| class_of(next.bytes) != class) {
            self.crowded[class / 64] &= !(1 << (class % 64));
        }
    }

    /// The smallest block of at least so many bytes, and of those the lowest.
    #[inline]
    pub(super) fn best_fit(&self, bytes: u64) -> Option<Sized> {
        if self.is_empty() {
            return None;
        }
        let class = class_of(bytes);
        let (word, bit) = (class / 64, 1 << (class % 64));
        if self.occupied[word] & bit != 0 {
            let least = self.least[class];
            if least.bytes >= bytes {
                return Some(least);
            }
            if self.crowded[word] & bit != 0 {
                let from = Sized { bytes, start: 0, node: 0 };
                let next = self.others.range(from..).next().copied();
                if let Some(next) = next.filter(|next| class_of(next.bytes) == class) {
                    return Some(next);
                }
            }
        }
        Some(self.least[self.next_class(class + 1)?])
    }

    /// The first occupied class that is not below this one.
    #[inline]
    fn next_class(&self, class: usize) -> Option<usize> {
        let word = class / 64;
        if word >= WORDS {
            return None;
        }
        let here = self.occupied[word] & (u64::MAX << (class % 64));
        if here != 0 {
            return Some(word * 64 + here.trailing_zeros() as usize);
        }
        let later = self.summary & (u64::MAX << word) & !(1 << word);
        if later == 0 {
            return None;
        }
        let word = later.trailing_zeros() as usize;
        Some(word * 64 + self.occupied[word].trailing_zeros() as usize)
    }

    /// The longest block, in bytes; 0 where there is none.
    pub(super) fn longest(&self) -> u64 {
        self.iter().map(|block| block.bytes).max().unwrap_or(0)
    }

    /// Every block, in no order.
    pub(super) fn iter(&self) -> impl Iterator<Item = Sized> + '_ {
        let occupied = self.occupied.iter().enumerate().flat_map(|(word, bits)| {
            (0..64).filter(move |bit| bits & (1 << bit) != 0).map(move |bit| word * 64 + bit)
        });
        occupied.map(|class| self.least[class]).chain(self.others.iter().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Against a plain sorted set: the same best fit after any inserts and removals.
        #[test]
        fn best_fit_is_exact(
            steps in proptest::collection::vec((0_u8..3, 1_u64..40, 0_u32..40), 1..200),
        ) {
            let (mut sizes, mut model) = (Sizes::default(), BTreeSet::new());
            for (number, (action, size, shift)) in steps.into_iter().enumerate() {
                let bytes = (size << (shift % 20)) * UNIT;
                let fits = model.range(Sized { bytes, start: 0, node: 0 }..).next().copied();
                prop_assert_eq!(sizes.best_fit(bytes), fits);
                match (action, fits) {
                    (0, Some(block)) => {
                        sizes.remove(block);
                        model.remove(&block);
                    }
                    (1, _) if !model.is_empty() => {
                        let at = number * 7 % model.len();
                        let block = *model.iter().nth(at).expect("in range");
                        sizes.remove(block);
                        model.remove(&block);
                    }
                    _ => {
                        let start = (number as u64 * 7919 % 1009) << 40 | number as u64;
                        let block = Sized { bytes, start, node: number as u32 };
                        sizes.insert(block);
                        model.insert(block);
                    }
                }
                prop_assert_eq!(sizes.bytes(), model.iter().map(|block| block.bytes).sum::<u64>());
                prop_assert_eq!(sizes.longest(), model.last().map_or(0, |block| block.bytes));
                prop_assert_eq!(sizes.iter().count(), model.len());
                prop_assert_eq!(sizes.is_empty(), model.is_empty());
            }
        }
    }

    #[test]
    fn the_longest_sizes_have_a_class() {
        assert!(class_of(MOST_BYTES) < CLASSES);
        assert_eq!(class_of(UNIT), 1);
        const { assert!(WORDS <= 64) };
    }
}

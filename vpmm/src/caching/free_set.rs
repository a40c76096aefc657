//! Free blocks of one stream in one pool, by size and then address: exact best fit in a few steps.
//!
//! PyTorch keeps one ordered set of (stream, size, address). Here each stream has a set of its own,
//! and within it sizes are in classes, 64 for each doubling, under a bitmap of those that have any:
//! the order is the same, in trees a few nodes deep. The least block of a class stands by itself,
//! and most classes have no other.

use intrusive_collections::{Bound, KeyAdapter, RBTree, RBTreeLink, UnsafeRef, intrusive_adapter};

use super::block::{Block, Key};

/// Classes for each doubling, as a power of two.
const FINENESS: u32 = 6;
/// Sizes have at most so many bits, counted in units of 512 bytes.
const UNIT_BITS: u32 = 64 - UNIT_SHIFT;
const UNIT_SHIFT: u32 = 9;
const CLASSES: usize = ((UNIT_BITS - FINENESS + 1) << FINENESS) as usize;
const WORDS: usize = CLASSES / 64;

const _: () = assert!(WORDS <= 64 && CLASSES.is_multiple_of(64));

intrusive_adapter!(SizeAdapter = UnsafeRef<Block>: Block { link => RBTreeLink });

impl<'a> KeyAdapter<'a> for SizeAdapter {
    type Key = Key;

    #[inline]
    fn get_key(&self, block: &'a Block) -> Key {
        block.key()
    }
}

/// The class of a size in bytes; sizes up to 32 KiB have one each.
#[inline]
fn class_of(bytes: u64) -> usize {
    let units = bytes >> UNIT_SHIFT;
    let Some(doubling) = units.checked_ilog2() else { return 0 };
    if doubling < FINENESS {
        return units as usize;
    }
    let step = doubling - FINENESS;
    ((step as usize) << FINENESS) + (units >> step) as usize
}

/// Which classes of a run of 64 have blocks.
#[derive(Clone, Copy)]
struct Word {
    /// At least one.
    occupied: u64,
    /// More than one.
    crowded: u64,
}

/// A set of free blocks.
pub(super) struct FreeSet {
    words: [Word; WORDS],
    /// Which words have occupied classes.
    summary: u64,
    /// The least block of each occupied class; elsewhere what was there last. As long as the
    /// highest class that ever had one asks for, like `others`.
    least: Vec<Option<UnsafeRef<Block>>>,
    /// The other blocks of crowded classes.
    others: Vec<RBTree<SizeAdapter>>,
    blocks: usize,
}

impl FreeSet {
    pub(super) const fn new() -> Self {
        const NO_WORD: Word = Word { occupied: 0, crowded: 0 };
        let words = [NO_WORD; WORDS];
        Self { words, summary: 0, least: Vec::new(), others: Vec::new(), blocks: 0 }
    }

    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Host memory that it takes beside itself and the nodes.
    pub(super) fn heap_bytes(&self) -> usize {
        self.least.capacity() * size_of::<Option<UnsafeRef<Block>>>()
            + self.others.capacity() * size_of::<RBTree<SizeAdapter>>()
    }

    #[inline]
    fn is_occupied(&self, class: usize) -> bool {
        self.words[class / 64].occupied & 1 << (class % 64) != 0
    }

    #[inline]
    fn is_crowded(&self, class: usize) -> bool {
        self.words[class / 64].crowded & 1 << (class % 64) != 0
    }

    /// # Safety
    /// The block stays alive and in place, and its bounds unchanged, while it is in the set; it is
    /// in no set yet.
    #[inline]
    pub(super) unsafe fn insert(&mut self, block: &Block) {
        self.blocks += 1;
        let class = class_of(block.bytes());
        // SAFETY: the caller vouches for the block's life; the reference is not null.
        let block = unsafe { UnsafeRef::from_raw(block) };
        let word = &mut self.words[class / 64];
        let bit = 1 << (class % 64);
        if word.occupied & bit != 0 {
            return self.enter_crowd(class, block);
        }
        word.occupied |= bit;
        self.summary |= 1 << (class / 64);
        match self.least.get_mut(class) {
            Some(least) => *least = Some(block),
            None => self.enter_highest(class, block),
        }
    }

    /// Enters a block of a class above all that there were.
    #[cold]
    #[inline(never)]
    fn enter_highest(&mut self, class: usize, block: UnsafeRef<Block>) {
        let classes = (class + 1).next_multiple_of(64);
        self.least.resize_with(classes, || None);
        self.others.resize_with(classes, || RBTree::new(SizeAdapter::new()));
        self.least[class] = Some(block);
    }

    /// Enters a block where the class has one.
    #[inline(never)]
    fn enter_crowd(&mut self, class: usize, block: UnsafeRef<Block>) {
        self.words[class / 64].crowded |= 1 << (class % 64);
        let further = match &mut self.least[class] {
            Some(least) if block.key() < least.key() => std::mem::replace(least, block),
            _ => block,
        };
        self.others[class].insert(further);
    }

    /// # Safety
    /// The block is in this set.
    #[inline]
    pub(super) unsafe fn remove(&mut self, block: &Block) {
        self.blocks -= 1;
        let class = class_of(block.bytes());
        let word = &mut self.words[class / 64];
        let bit = 1 << (class % 64);
        if word.crowded & bit != 0 {
            // SAFETY: passed on to the caller.
            return unsafe { self.leave_crowd(class, block) };
        }
        word.occupied &= !bit;
        if word.occupied == 0 {
            self.summary &= !(1 << (class / 64));
        }
    }

    /// # Safety
    /// The block is in this set, in this class.
    #[inline(never)]
    unsafe fn leave_crowd(&mut self, class: usize, block: &Block) {
        let others = &mut self.others[class];
        let least = &mut self.least[class];
        if least.as_deref().is_some_and(|least| std::ptr::eq(least, block)) {
            *least = others.front_mut().remove();
        } else {
            // SAFETY: the caller vouches for membership, and a block that is not the least of its
            // class is in the class's tree.
            unsafe { others.cursor_mut_from_ptr(block) }.remove();
        }
        if others.is_empty() {
            self.words[class / 64].crowded &= !(1 << (class % 64));
        }
    }

    /// The smallest block of at least so many bytes, and of those the lowest.
    #[inline]
    pub(super) fn best_fit(&self, bytes: u64) -> Option<&Block> {
        let class = class_of(bytes);
        if self.is_occupied(class) {
            let least = self.least[class].as_deref();
            if least.is_some_and(|least| least.bytes() >= bytes) {
                return least;
            }
            if self.is_crowded(class) {
                let key = Key::of_bytes(bytes);
                if let Some(block) = self.others[class].lower_bound(Bound::Included(&key)).get() {
                    return Some(block);
                }
            }
        }
        self.least[self.next_class(class + 1)?].as_deref()
    }

    /// The first class from `class` upwards that has a block.
    #[inline]
    fn next_class(&self, class: usize) -> Option<usize> {
        let word = class / 64;
        let here = self.words.get(word)?.occupied & u64::MAX << (class % 64);
        if here != 0 {
            return Some(word * 64 + here.trailing_zeros() as usize);
        }
        // The mask drops this word and those below it; where there is none above it is nothing.
        let above = self.summary & u64::MAX.checked_shl(word as u32 + 1).unwrap_or(0);
        (above != 0).then(|| {
            let word = above.trailing_zeros() as usize;
            word * 64 + self.words[word].occupied.trailing_zeros() as usize
        })
    }

    /// Every block, the smallest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Block> {
        let classes = std::iter::successors(self.next_class(0), |class| self.next_class(class + 1));
        classes
            .flat_map(|class| self.least[class].as_deref().into_iter().chain(&self.others[class]))
    }

    /// Whether what is kept beside the blocks agrees with them.
    pub(super) fn agrees(&self) -> bool {
        let mut blocks = 0;
        let mut last = None;
        let whole = (0..CLASSES).all(|class| {
            let others = self.others.get(class);
            let crowded = others.is_some_and(|others| !others.is_empty());
            if self.is_crowded(class) != crowded || (crowded && !self.is_occupied(class)) {
                return false;
            }
            let least = self.least.get(class).and_then(Option::as_deref);
            let least = least.filter(|_| self.is_occupied(class));
            let of_class = least.into_iter().chain(others.into_iter().flatten());
            of_class.into_iter().all(|block| {
                blocks += 1;
                let ordered = last.replace(block.key()) < Some(block.key());
                ordered && class_of(block.bytes()) == class
            }) && least.is_some() == self.is_occupied(class)
        });
        let summary = (0..WORDS)
            .all(|word| (self.summary >> word & 1 != 0) == (self.words[word].occupied != 0));
        whole && summary && blocks == self.blocks
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::arena::Arena;

    #[test]
    fn classes_are_in_the_order_of_sizes_and_within_bounds() {
        let mut last = 0;
        let ends = (22..64).flat_map(|bit| [(1 << bit) - 512, 1 << bit, (1 << bit) + 512]);
        for bytes in (0..2_000_000).step_by(512).chain(ends).chain([u64::MAX]) {
            let class = class_of(bytes);
            assert!(class >= last && class < CLASSES, "{bytes} is in class {class}");
            last = class;
        }
    }

    #[test]
    fn best_fit_agrees_with_a_sorted_map() {
        // Dropped after the set, which walks the nodes that are still in it.
        let mut arena = Arena::new();
        let mut set = FreeSet::new();
        let mut model: BTreeMap<(u64, u64), u32> = BTreeMap::new();
        let mut seed = 1_u64;
        let mut random = |bound: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % bound
        };
        for step in 0..if cfg!(miri) { 300 } else { 20_000 } {
            if model.len() < 200 && random(5) > 1 {
                let id = arena.take(Block::vacant);
                let doubling = 1 + random(24);
                let bytes = 512 * (1 + random(1 << doubling));
                let address = 256 * random(1 << 40);
                if model.contains_key(&(bytes, address)) {
                    arena.give_back(id);
                    continue;
                }
                arena.get(id).set_bounds(address, bytes);
                // SAFETY: new from the arena, which outlives the set's use.
                unsafe { set.insert(arena.get(id)) };
                model.insert((bytes, address), id);
            } else if let Some(key) = {
                let at = random(model.len().max(1) as u64) as usize;
                model.keys().nth(at).copied()
            } {
                let Some(id) = model.remove(&key) else { panic!("a key of the model") };
                // SAFETY: inserted above and not removed since.
                unsafe { set.remove(arena.get(id)) };
                arena.give_back(id);
            }
            let doubling = 1 + random(24);
            let wanted = 512 * (1 + random(1 << doubling));
            let best = model.range((wanted, 0)..).next().map(|(_, id)| *id);
            assert_eq!(set.best_fit(wanted).map(Block::id), best);
            assert!(step % 64 != 0 || set.agrees());
            assert_eq!(set.blocks(), model.len());
        }
        let ids: Vec<u32> = set.iter().map(Block::id).collect();
        assert_eq!(ids, model.into_values().collect::<Vec<_>>());
    }
}

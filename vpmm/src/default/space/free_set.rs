//! Free blocks by size and address: exact best fit in a few steps.
//!
//! Size classes under a bitmap of those that have any. The smallest sufficient block (of those the
//! lowest) is in the request's own class, or the least of the next class that has one. The least
//! block of each class is known; what else the class has is in a red-black tree, a few nodes deep.

use std::cell::Cell;
use std::ptr::NonNull;

use intrusive_collections::{Bound, KeyAdapter, RBTree, RBTreeLink, UnsafeRef, intrusive_adapter};

use super::owner::Owner;

/// Classes for each doubling, as a power of two: one word of them.
const FINENESS: u32 = 6;
/// A word for each doubling, and as many as make a power of two: a class that is cut off there needs no look at
/// whether it is one. What is free side by side may be longer than any allocation: as long as the large part, which
/// is seven eighths at most of what 32 bits count.
const WORDS: usize = (u32::BITS as usize).next_power_of_two();
const CLASSES: usize = WORDS << FINENESS;

const _: () = assert!(WORDS <= 64);

/// A free block: the node that its first and last tag name. It is in one line of the processor's cache.
#[repr(align(64))]
pub(in crate::default) struct Block {
    link: RBTreeLink,
    /// Size above address, both in units: the order of the trees in one comparison.
    key: Cell<u64>,
    owner: Cell<Owner>,
    /// Of its size, while it is in a set.
    class: Cell<u32>,
    id: u32,
    /// The owner's count of marks when something of the block was freed last.
    freed_at: Cell<u64>,
}

impl Block {
    pub(in crate::default) fn vacant(id: u32) -> Self {
        Self {
            link: RBTreeLink::new(),
            key: Cell::new(0),
            owner: Cell::new(Owner::NOBODY),
            class: Cell::new(0),
            id,
            freed_at: Cell::new(0),
        }
    }

    /// The node's number, which the block's tags hold.
    #[inline]
    pub(in crate::default) fn id(&self) -> u32 {
        self.id
    }

    #[inline]
    fn class(&self) -> usize {
        self.class.get() as usize
    }

    #[inline]
    pub(in crate::default) fn set(&self, start: u32, units: u32, owner: Owner) {
        self.set_bounds(start, units);
        self.owner.set(owner);
    }

    /// It is no block, and begins and ends where none does.
    #[inline]
    pub(super) fn set_nowhere(&self) {
        self.key.set(u64::MAX >> 32);
    }

    #[inline]
    fn set_bounds(&self, start: u32, units: u32) {
        self.key.set(u64::from(units) << 32 | u64::from(start));
    }

    #[inline]
    pub(in crate::default) fn start(&self) -> u32 {
        self.key.get() as u32
    }

    #[inline]
    pub(in crate::default) fn units(&self) -> u32 {
        (self.key.get() >> 32) as u32
    }

    #[inline]
    pub(in crate::default) fn end(&self) -> u32 {
        self.start() + self.units()
    }

    /// Whoever calls sees to it that the block is in this owner's set.
    #[inline]
    pub(super) fn set_owner(&self, owner: Owner) {
        self.owner.set(owner);
    }

    /// Whether all of it was freed before its owner's mark with this number was taken.
    #[inline]
    pub(in crate::default) fn is_before(&self, mark: u64) -> bool {
        self.freed_at.get() <= mark
    }

    #[inline]
    pub(in crate::default) fn freed_at(&self) -> u64 {
        self.freed_at.get()
    }

    #[inline]
    pub(super) fn set_freed_at(&self, marks: u64) {
        self.freed_at.set(marks);
    }

    #[inline]
    pub(in crate::default) fn owner(&self) -> Owner {
        self.owner.get()
    }
}

intrusive_adapter!(SizeAdapter = UnsafeRef<Block>: Block { link => RBTreeLink });

impl<'a> KeyAdapter<'a> for SizeAdapter {
    type Key = u64;

    #[inline]
    fn get_key(&self, block: &'a Block) -> u64 {
        block.key.get()
    }
}

/// The class of a size, by its exponent and fraction as a float, like the front's classes. Larger
/// sizes are in the same class or in higher ones, and where they round the same holds; sizes up to
/// 2^[`FINENESS`] have one each.
#[inline]
fn class_of(units: u32) -> usize {
    const DROPPED: u32 = f32::MANTISSA_DIGITS - 1 - FINENESS;
    const FIRST: u32 = 1_f32.to_bits() >> DROPPED;
    // Signed, since that is one instruction; and longer, since there is a sign.
    let float = i64::from(units) as f32;
    ((float.to_bits() >> DROPPED) - FIRST) as usize
}

/// Which classes of a run of 64 have blocks.
#[derive(Clone, Copy)]
struct Word {
    /// At least one.
    occupied: u64,
    /// More than one.
    crowded: u64,
}

impl Word {
    const NONE: Self = Self { occupied: 0, crowded: 0 };
}

/// Free blocks of one owner in one part of the address space.
///
/// The least block of a class is in no tree: a class rarely has another, and then nothing is
/// linked, searched or balanced.
pub(in crate::default) struct FreeSet {
    words: [Word; WORDS],
    /// Which words have occupied classes.
    summary: u64,
    /// The least block of each occupied class; elsewhere what was there last. Empty until the first
    /// block comes, then zeros that take the host's memory page by page as they are written: a pool of many
    /// streams has thousands of sets, and its first request has none of them yet.
    least: Vec<Option<NonNull<Block>>>,
    /// The other blocks of crowded classes. Empty until there is such a class.
    others: Vec<RBTree<SizeAdapter>>,
    units: u64,
    blocks: u32,
}

impl Default for FreeSet {
    fn default() -> Self {
        Self::new()
    }
}

impl FreeSet {
    pub(super) const fn new() -> Self {
        Self {
            words: [Word::NONE; WORDS],
            summary: 0,
            least: Vec::new(),
            others: Vec::new(),
            units: 0,
            blocks: 0,
        }
    }

    /// The sum of the sizes.
    #[inline]
    pub(in crate::default) fn units(&self) -> u64 {
        self.units
    }

    pub(in crate::default) fn blocks(&self) -> u32 {
        self.blocks
    }

    #[inline]
    pub(in crate::default) fn is_empty(&self) -> bool {
        self.summary == 0
    }

    #[inline(always)]
    fn word(&self, class: usize) -> &Word {
        &self.words[class / 64 % WORDS]
    }

    #[inline(always)]
    fn word_mut(&mut self, class: usize) -> &mut Word {
        &mut self.words[class / 64 % WORDS]
    }

    #[inline]
    fn is_occupied(&self, class: usize) -> bool {
        self.word(class).occupied & 1 << (class % 64) != 0
    }

    #[inline]
    fn is_crowded(&self, class: usize) -> bool {
        self.word(class).crowded & 1 << (class % 64) != 0
    }

    /// # Safety
    /// The block stays alive and in place, and its size and address unchanged, while it is in the
    /// set; it is in no set yet.
    #[inline]
    pub(super) unsafe fn insert(&mut self, block: &Block) {
        self.units += u64::from(block.units());
        self.blocks += 1;
        // SAFETY: the caller vouches for the block's life; the reference is not null.
        self.enter(class_of(block.units()), unsafe { UnsafeRef::from_raw(block) });
    }

    /// # Safety
    /// The block is in this set.
    #[inline]
    pub(super) unsafe fn remove(&mut self, block: &Block) {
        self.units -= u64::from(block.units());
        self.blocks -= 1;
        // SAFETY: passed on to the caller.
        unsafe { self.leave(block) };
    }

    /// Gives a block of the set other bounds.
    ///
    /// # Safety
    /// The block is in this set.
    #[inline(always)]
    pub(super) unsafe fn change(&mut self, block: &Block, start: u32, units: u32) {
        self.units = self.units - u64::from(block.units()) + u64::from(units);
        let (class, next) = (block.class(), class_of(units));
        if class != next || self.is_crowded(class) {
            // SAFETY: passed on to the caller.
            unsafe { self.leave(block) };
            block.set_bounds(start, units);
            // SAFETY: whoever inserted the block vouched for its life; the reference is not null.
            self.enter(next, unsafe { UnsafeRef::from_raw(block) });
        } else {
            block.set_bounds(start, units);
        }
    }

    #[inline]
    fn enter(&mut self, class: usize, block: UnsafeRef<Block>) {
        block.class.set(class as u32);
        let word = self.word_mut(class);
        let bit = 1 << (class % 64);
        if word.occupied & bit != 0 {
            return self.enter_crowd(class, block);
        }
        word.occupied |= bit;
        self.summary |= 1 << (class / 64);
        match self.least.get_mut(class) {
            Some(least) => *least = Some(NonNull::from(&*block)),
            None => self.enter_first(class, block),
        }
    }

    #[cold]
    #[inline(never)]
    fn enter_first(&mut self, class: usize, block: UnsafeRef<Block>) {
        // Not `resize`, which would write all of it.
        self.least = vec![None; CLASSES];
        self.least[class] = Some(NonNull::from(&*block));
    }

    /// Enters a block where the class has one.
    #[inline(never)]
    fn enter_crowd(&mut self, class: usize, block: UnsafeRef<Block>) {
        self.word_mut(class).crowded |= 1 << (class % 64);
        if self.others.is_empty() {
            self.others.resize_with(CLASSES, || RBTree::new(SizeAdapter::new()));
        }
        let further = match self.least(class) {
            Some(least) if block.key.get() < least.key.get() => {
                self.least[class] = Some(NonNull::from(&*block));
                least
            }
            _ => block,
        };
        self.others[class].insert(further);
    }

    /// The least block of an occupied class.
    #[inline(always)]
    fn least(&self, class: usize) -> Option<UnsafeRef<Block>> {
        let block = (*self.least.get(class)?)?;
        // SAFETY: whoever inserted the block vouched for its life while it is in the set, which it is as long
        // as nobody else is here and the class is occupied.
        Some(unsafe { UnsafeRef::from_raw(block.as_ptr()) })
    }

    /// # Safety
    /// The block is in this set.
    #[inline]
    unsafe fn leave(&mut self, block: &Block) {
        let class = block.class();
        let word = self.word_mut(class);
        let bit = 1 << (class % 64);
        if word.crowded & bit != 0 {
            // SAFETY: passed on to the caller.
            return unsafe { self.leave_crowd(class, block) };
        }
        word.occupied &= !bit;
        // Without a branch: whether a word has another class goes either way.
        self.summary &= !(u64::from(word.occupied == 0) << (class / 64));
    }

    /// # Safety
    /// The block is in this set, in this class.
    #[inline(never)]
    unsafe fn leave_crowd(&mut self, class: usize, block: &Block) {
        let others = &mut self.others[class];
        let least = &mut self.least[class];
        if least.is_some_and(|least| std::ptr::eq(least.as_ptr(), block)) {
            *least = others.front_mut().remove().map(|next| NonNull::from(&*next));
        } else {
            // SAFETY: the caller vouches for membership, and a block that is not the least of its
            // class is in the class's tree.
            unsafe { others.cursor_mut_from_ptr(block) }.remove();
        }
        if others.is_empty() {
            self.word_mut(class).crowded &= !(1 << (class % 64));
        }
    }

    /// The smallest block of at least `units`, and of those the lowest. Whoever keeps it sees to it
    /// that the arena of the nodes outlives it.
    #[inline]
    pub(in crate::default) fn best_fit(&self, units: u32) -> Option<UnsafeRef<Block>> {
        if self.is_empty() { None } else { self.search(units) }
    }

    fn search(&self, units: u32) -> Option<UnsafeRef<Block>> {
        let class = class_of(units);
        // Whether the class has any goes either way: any of a longer class is long enough.
        let least = self.least(self.next_class(class)?)?;
        if least.units() >= units {
            return Some(least);
        }
        if self.is_crowded(class) {
            let least = u64::from(units) << 32;
            let least = Bound::Included(&least);
            if let Some(block) = self.others[class].lower_bound(least).clone_pointer() {
                return Some(block);
            }
        }
        self.least(self.next_class(class + 1)?)
    }

    /// The first class from `class` upwards that has a block.
    #[inline]
    fn next_class(&self, class: usize) -> Option<usize> {
        let word = class / 64;
        if word >= WORDS {
            return None;
        }
        let here = self.words[word].occupied & u64::MAX << (class % 64);
        if here != 0 {
            return Some(word * 64 + here.trailing_zeros() as usize);
        }
        // The mask drops this word and those below it; word + 1 is at most 63 here or no word.
        let above = self.summary & u64::MAX.checked_shl(word as u32 + 1).unwrap_or(0);
        (above != 0).then(|| {
            let word = above.trailing_zeros() as usize;
            word * 64 + self.words[word].occupied.trailing_zeros() as usize
        })
    }

    /// The largest block.
    pub(super) fn largest(&self) -> Option<&Block> {
        (self.summary != 0).then(|| {
            let word = self.summary.ilog2() as usize;
            let class = word * 64 + self.words[word].occupied.ilog2() as usize;
            let last = self.others.get(class).and_then(|others| others.back().get());
            last.or(self.least_of(class))
        })?
    }

    /// The last class below `end` that has a block.
    fn previous_class(&self, end: usize) -> Option<usize> {
        let word = end / 64;
        let here = self.words.get(word).map_or(0, |of| of.occupied & !(u64::MAX << (end % 64)));
        if here != 0 {
            return Some(word * 64 + here.ilog2() as usize);
        }
        let word =
            (self.summary & !u64::MAX.checked_shl(word as u32).unwrap_or(0)).checked_ilog2()?;
        Some(word as usize * 64 + self.words[word as usize].occupied.ilog2() as usize)
    }

    /// Every block, the largest first.
    pub(in crate::default) fn largest_first(&self) -> impl Iterator<Item = &Block> {
        let classes = std::iter::successors(self.previous_class(CLASSES), |class| {
            self.previous_class(*class)
        });
        classes.flat_map(|class| {
            let others = self.others.get(class).into_iter().flat_map(|others| others.iter().rev());
            others.chain(self.least_of(class))
        })
    }

    /// Any block.
    pub(in crate::default) fn first(&self) -> Option<&Block> {
        self.least_of(self.next_class(0)?)
    }

    /// The least block of an occupied class, for as long as the set is borrowed.
    fn least_of(&self, class: usize) -> Option<&Block> {
        let block = (*self.least.get(class)?)?;
        // SAFETY: as in `least`; it stays in the set while that is borrowed.
        Some(unsafe { block.as_ref() })
    }

    /// Whether what is kept beside the blocks agrees with them: their sum and number, which classes
    /// have any or several, and that the least of each is in its place.
    pub(in crate::default) fn agrees(&self) -> bool {
        let (mut units, mut blocks) = (0, 0);
        let whole = (0..CLASSES).all(|class| {
            let others = self.others.get(class);
            let crowded = others.is_some_and(|others| !others.is_empty());
            if self.is_crowded(class) != crowded || (crowded && !self.is_occupied(class)) {
                return false;
            }
            let least = if self.is_occupied(class) { self.least_of(class) } else { None };
            let of_class = least.into_iter().chain(others.into_iter().flatten());
            let mut last = None;
            of_class.into_iter().all(|block| {
                units += u64::from(block.units());
                blocks += 1;
                let ordered = last.replace(block.key.get()) < Some(block.key.get());
                ordered && class_of(block.units()) == class && block.class() == class
            }) && least.is_some() == self.is_occupied(class)
        });
        let summary = (0..WORDS)
            .all(|word| (self.summary >> word & 1 != 0) == (self.words[word].occupied != 0));
        whole && summary && (units, blocks) == (self.units, self.blocks)
    }

    /// Visits the smallest blocks of at least so many units, `most` of them: as [`of_at_least`](Self::of_at_least)
    /// would, but for requests, whose time an iterator of iterators would be a good part of.
    #[inline]
    pub(super) fn smallest<'a>(&'a self, units: u32, most: u32, mut visit: impl FnMut(&'a Block)) {
        let (first, mut left) = (class_of(units), most);
        let mut word = first / 64;
        let mut sufficient = u64::MAX << (first % 64);
        loop {
            let of = self.words[word % WORDS];
            let mut classes = of.occupied & sufficient;
            while classes != 0 {
                let class = word * 64 + classes.trailing_zeros() as usize;
                let mut meet = |block: &'a Block| {
                    // Only the request's own class has blocks that are too small.
                    if block.units() >= units && left > 0 {
                        left -= 1;
                        visit(block);
                    }
                    left > 0
                };
                let mut goes_on = self.least_of(class).is_none_or(&mut meet);
                if goes_on && of.crowded & classes & classes.wrapping_neg() != 0 {
                    let mut others = self.others.get(class).into_iter().flatten();
                    goes_on = others.all(meet);
                }
                if !goes_on {
                    return;
                }
                classes &= classes - 1;
            }
            let words = self.summary & (u64::MAX << word << 1);
            if words == 0 {
                return;
            }
            word = words.trailing_zeros() as usize;
            sufficient = u64::MAX;
        }
    }

    /// Of the smallest blocks of at least so many units, `most` of them, the one whose start with its bits `turned` is
    /// the lowest, if that is lower than `lowest`; with it. A loop of its own since it is the most of what a large
    /// request takes that is placed by its fate.
    pub(super) fn lowest_of<'a>(
        &'a self,
        units: u32,
        most: u32,
        turned: u32,
        lowest: &mut u32,
    ) -> Option<&'a Block> {
        let first = class_of(units);
        let (mut found, mut low, mut left) = (None, *lowest, most);
        let mut meet = |block: &'a Block| {
            let start = block.start() ^ turned;
            if start < low {
                (low, found) = (start, Some(block));
            }
            left -= 1;
            left > 0
        };
        let mut goes_on = most > 0;
        // Only the request's own class has blocks that are too small.
        if goes_on && self.is_occupied(first) {
            let mut of_class = self.of_class(first).filter(|block| block.units() >= units);
            goes_on = of_class.all(&mut meet);
        }
        let mut word = first / 64;
        let mut longer = u64::MAX << (first % 64) << 1;
        while goes_on {
            let of = self.words[word % WORDS];
            let mut classes = of.occupied & longer;
            while classes != 0 {
                let class = word * 64 + classes.trailing_zeros() as usize;
                goes_on = self.least_of(class).is_some_and(&mut meet);
                if goes_on && of.crowded >> (class % 64) & 1 != 0 {
                    goes_on = self.others.get(class).into_iter().flatten().all(&mut meet);
                }
                if !goes_on {
                    break;
                }
                classes &= classes - 1;
            }
            let words = self.summary & (u64::MAX << word << 1);
            if words == 0 {
                break;
            }
            word = words.trailing_zeros() as usize;
            longer = u64::MAX;
        }
        *lowest = low;
        found
    }

    /// The blocks of an occupied class, the smallest first.
    fn of_class(&self, class: usize) -> impl Iterator<Item = &Block> {
        let others = self.others.get(class).into_iter().flatten();
        self.least_of(class).into_iter().chain(others)
    }

    /// Every block behind one of so many units at that start, in the order of sizes and then of addresses; behind
    /// none of no units are all.
    pub(in crate::default) fn behind(
        &self,
        units: u32,
        start: u32,
    ) -> impl Iterator<Item = &Block> {
        let key = u64::from(units) << 32 | u64::from(start);
        let class = class_of(units.max(1));
        let least = Some(class).filter(|class| self.is_occupied(*class));
        let least = least.and_then(|class| self.least_of(class));
        let others = self.others.get(class).into_iter();
        let others = others.flat_map(move |of| of.range(Bound::Excluded(&key), Bound::Unbounded));
        let of_class = least.into_iter().filter(move |block| block.key.get() > key).chain(others);
        let longer =
            std::iter::successors(self.next_class(class + 1), |class| self.next_class(class + 1));
        of_class.chain(longer.flat_map(|class| {
            let others = self.others.get(class).into_iter().flatten();
            self.least_of(class).into_iter().chain(others)
        }))
    }

    /// Every block of at least about `units` (a class more, at most), the smallest first.
    pub(in crate::default) fn of_at_least(&self, units: u32) -> impl Iterator<Item = &Block> {
        let first = class_of(units);
        let classes =
            std::iter::successors(self.next_class(first), |class| self.next_class(class + 1));
        classes.flat_map(|class| {
            let others = self.others.get(class).into_iter().flatten();
            self.least_of(class).into_iter().chain(others)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::Arena;

    #[test]
    fn classes_are_in_the_order_of_sizes_and_within_bounds() {
        let mut last = 0;
        let long = [(1 << 30) - 1, (1 << 31) - 1, 1 << 31, (1 << 31) + (1 << 30), 7 << 29];
        for units in (1..5_000_000).step_by(3).chain(long) {
            let class = class_of(units);
            assert!(class >= last && class < CLASSES, "{units} is in class {class}");
            last = class;
        }
    }

    fn smallest(set: &FreeSet, units: u32, most: u32) -> Vec<(u32, u32)> {
        let mut found = Vec::new();
        set.smallest(units, most, |block| found.push((block.units(), block.start())));
        found
    }

    /// The same of a list.
    fn smallest_of(list: &[(u32, u32, u32)], units: u32, most: usize) -> Vec<(u32, u32)> {
        let mut list: Vec<_> = list.iter().map(|(units, start, _)| (*units, *start)).collect();
        list.sort_unstable();
        list.retain(|block| block.0 >= units);
        list.truncate(most);
        list
    }

    #[test]
    fn best_fit_agrees_with_a_sorted_list() {
        // Dropped after the set, which walks the nodes that are still in it.
        let mut arena = Arena::new();
        let mut set = FreeSet::new();
        let mut model: Vec<(u32, u32, u32)> = Vec::new();
        let mut seed = 1_u64;
        let mut random = |bound: u32| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) as u32 % bound
        };
        for step in 0..if cfg!(miri) { 300 } else { 20_000 } {
            if model.len() < 200 && random(5) > 1 {
                let id = arena.take(Block::vacant);
                let doubling = 1 + random(20);
                let units = 1 + random(1 << doubling);
                let start = step * 1000;
                arena.get(id).set(start, units, Owner::NOBODY);
                // SAFETY: new from the arena, which outlives the set's use.
                unsafe { set.insert(arena.get(id)) };
                model.push((units, start, id));
            } else if !model.is_empty() {
                let (units, start, id) = model.swap_remove(random(model.len() as u32) as usize);
                assert_eq!((arena.get(id).units(), arena.get(id).start()), (units, start));
                // SAFETY: inserted above and not removed since.
                unsafe { set.remove(arena.get(id)) };
                arena.give_back(id);
            }
            if let Some(at) =
                (random(2) == 0 && !model.is_empty()).then(|| random(model.len() as u32) as usize)
            {
                let (units, start, id) = model[at];
                // Mostly within the class or the next: what is left of a block, or a little more.
                let units = (units - random(1 + units / 16)) + random(1 + units / 64);
                let units = if random(4) == 0 { 1 + random(units) } else { units };
                // SAFETY: inserted above and not removed since.
                unsafe { set.change(arena.get(id), start + 1, units) };
                model[at] = (units, start + 1, id);
            }
            let doubling = 1 + random(20);
            let wanted = 1 + random(1 << doubling);
            let best = model.iter().filter(|(units, ..)| *units >= wanted).min();
            let found = set.best_fit(wanted).map(|block| (block.units(), block.start()));
            assert_eq!(found, best.map(|(units, start, _)| (*units, *start)));
            assert_eq!(set.largest().map(Block::units), model.iter().map(|of| of.0).max());
            let most = random(8);
            let expected = smallest_of(&model, wanted, most as usize);
            assert_eq!(smallest(&set, wanted, most), expected);
            for turned in [0, u32::MAX] {
                let bound = if random(4) == 0 { random(step.max(1)) * 1000 } else { u32::MAX };
                let mut lowest = bound;
                let found = set.lowest_of(wanted, most, turned, &mut lowest);
                let starts = expected.iter().map(|of| of.1 ^ turned).filter(|start| *start < bound);
                assert_eq!(found.map(|block| block.start() ^ turned), starts.min());
                assert_eq!(lowest, found.map_or(bound, |block| block.start() ^ turned));
            }
            if step % 16 == 0 {
                let place = (wanted & 63, random(step.max(1)) * 1000);
                let mut behind: Vec<_> =
                    model.iter().map(|of| (of.0, of.1)).filter(|of| *of > place).collect();
                behind.sort_unstable();
                let found = set.behind(place.0, place.1).map(|of| (of.units(), of.start()));
                assert!(found.eq(behind.into_iter()));
            }
            assert!(step % 64 != 0 || set.agrees());
            assert_eq!(set.units(), model.iter().map(|of| u64::from(of.0)).sum::<u64>());
        }
        let sizes: Vec<u32> = set.of_at_least(1).map(Block::units).collect();
        assert!(sizes.is_sorted() && sizes.len() == model.len() && set.agrees());
        let backwards: Vec<u32> = set.largest_first().map(Block::units).collect();
        assert!(backwards.iter().rev().eq(&sizes));
    }
}

//! The front: blocks freed last on a stream by one thread, for that stream's next requests.
//!
//! A hit is a pop and a push on a stack of the block's class. What the front holds does not
//! coalesce and is of no use to other streams, so it is bounded: in number for each class, in
//! bytes in all; and it is emptied before the pool grows.
//!
//! Large blocks are handed out again for exactly their size. Programs ask for the same sizes over
//! and over, and what a looser fit leaves unused inside a block is lost to everybody until the
//! block is freed. Where sizes do not come again, though, an exact front is only in the way: then
//! it goes *loose*, holds more, and takes a block that is up to a sixteenth too long; above 4 MiB
//! twice that, but no more than 4 MiB on top of the sixteenth. A pool with a limit is never loose.

pub(super) mod admit;
pub(super) mod shard;
pub(super) mod tide;

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use crate::default::class::{
    LARGE_CLASSES, SMALL_CLASSES, SMALL_UNITS, large_class, small_class, small_units,
};
use crate::default::space::{Part, Share};

/// Blocks of one small class: so many units of them, or without a limit the stream's share of a
/// fraction of the pool up to the most that there is place for.
const SMALL_CLASS_UNITS: u32 = 512;
const SMALL_CLASS_OF_POOL: u64 = 8192;
const SMALL_CLASS_MOST: u32 = 4096;
/// But every class may have a few, and none has more than so many.
const SMALL_FEW: u16 = 4;
const SMALL_DEPTH: usize = 512;
/// Shorter blocks count as so many units.
const SMALL_LEAST: u32 = 4;
/// Blocks of one large class.
const LARGE_DEPTH: usize = 4;
/// Large blocks in all: 8 MiB, or the stream's share of a fraction of the pool (less with a limit,
/// more while the front is loose), or a single block that is longer. An exact front keeps a 32nd of
/// its share; where many streams make that little, a 64th of the pool as long as all together keep
/// no more than an eighth. More for one or two streams keeps a training from settling. And its part of
/// what the pool has beyond the most that was live.
const LARGE_UNITS: u32 = 1 << 14;
const EXACT_OF_SHARE: u64 = 32;
const EXACT_OF_POOL: u64 = 64;
const EXACT_TOGETHER: u64 = 8;
const EXACT_OF_LIMITED: u64 = 64;
const LOOSE_OF_POOL: u64 = 4;
/// A loose fit leaves at most this fraction of the request unused, of a request of more than 4 MiB as much again,
/// up to 4 MiB: of large blocks a front has few, and a sixteenth fits two requests in five.
const LOOSE_FIT: u32 = 16;
const LONG_UNITS: u32 = 1 << 13;
const LONG_MORE: u32 = 1 << 13;
/// How a front judges itself: every large block that comes counts against it, every one that goes
/// out for its exact size for it. Down at one bound it goes loose, and exact again at the middle.
const HIT: i64 = 4;
const LOOSE_AT: i64 = -128;
const EXACT_AT: i64 = 0;
const MOST: i64 = 128;

/// Where the stack of each small class begins, and behind the last one.
const SMALL_STACKS: [u16; SMALL_CLASSES + 1] = {
    let mut stacks = [0; SMALL_CLASSES + 1];
    let mut class = 0;
    while class < SMALL_CLASSES {
        let depth = SMALL_CLASS_MOST / small_units(class);
        let depth = if depth < SMALL_DEPTH as u32 { depth as u16 } else { SMALL_DEPTH as u16 };
        stacks[class + 1] = stacks[class] + depth;
        class += 1;
    }
    stacks
};
/// Words of bits, one for each large class.
const LARGE_WORDS: usize = LARGE_CLASSES.div_ceil(64);
const SMALL_PLACES: usize = SMALL_STACKS[SMALL_CLASSES] as usize;

#[derive(Clone, Copy, Default)]
struct Held {
    start: u32,
    units: u32,
}

impl Held {
    const NONE: Self = Self { start: 0, units: 0 };
}

/// The blocks of one large class: a line of the processor's cache.
///
/// The first place holds the depth, as a block of no units: who looks for a size at the top of an
/// empty stack finds that it is not there by the comparison that he makes anyway.
#[repr(align(64))]
struct Stack {
    units: [u32; 8],
    starts: [u32; 8],
}

const _: () = assert!(LARGE_DEPTH < 8);

impl Stack {
    #[inline(always)]
    fn depth(&self) -> usize {
        self.starts[0] as usize
    }

    #[inline(always)]
    fn set_depth(&mut self, depth: usize) {
        self.starts[0] = depth as u32;
    }

    #[inline(always)]
    fn at(&self, place: usize) -> Held {
        Held { start: self.starts[place % 8], units: self.units[place % 8] }
    }

    #[inline(always)]
    fn put(&mut self, place: usize, block: Held) {
        self.starts[place % 8] = block.start;
        self.units[place % 8] = block.units;
    }

    /// The block that came last, or one of no units.
    #[inline(always)]
    fn top(&self) -> Held {
        self.at(self.depth())
    }

    /// Where there is room.
    #[inline(always)]
    fn push(&mut self, block: Held) {
        let depth = self.depth() + 1;
        self.put(depth, block);
        self.set_depth(depth);
    }

    fn blocks(&self) -> impl Iterator<Item = Held> {
        (1..=self.depth()).map(|place| self.at(place))
    }

    /// Takes the block at a place out; the top has its place then.
    fn take(&mut self, place: usize) -> Held {
        let block = self.at(place);
        self.put(place, self.top());
        self.set_depth(self.depth() - 1);
        block
    }

    /// Where blocks have at least `units` and at most so many more: a bit for each place. Without
    /// a branch, since nobody foresees which.
    #[inline(always)]
    fn fitting(&self, units: u32, more: u32) -> u32 {
        let fits = |place: usize| u32::from(self.units[place].wrapping_sub(units) <= more) << place;
        let all = (1..=LARGE_DEPTH).fold(0, |all, place| all | fits(place));
        all & ((2 << self.depth()) - 1)
    }
}

/// How many units a front holds. Beside it, so that others can look whether it holds anything.
#[derive(Default)]
pub(super) struct Counts {
    large: AtomicU32,
    small: AtomicU32,
}

impl Counts {
    #[inline(always)]
    fn of<const LARGE: bool>(&self) -> &AtomicU32 {
        if LARGE { &self.large } else { &self.small }
    }

    #[inline(always)]
    fn get<const LARGE: bool>(&self) -> u32 {
        self.of::<LARGE>().load(Relaxed)
    }

    /// Only whoever is in the front changes what is here.
    #[inline(always)]
    fn set<const LARGE: bool>(&self, units: u32) {
        self.of::<LARGE>().store(units, Relaxed);
    }

    #[inline(always)]
    fn take<const LARGE: bool>(&self, units: u32) {
        self.set::<LARGE>(self.get::<LARGE>() - units);
    }

    /// Of all sizes.
    #[inline(always)]
    pub(super) fn units(&self) -> u32 {
        self.get::<true>() + self.get::<false>()
    }
}

/// What others learn of a front's units.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cached {
    pub(super) now: u64,
    /// The least since the front was asked last.
    pub(super) least: u64,
    /// What it has more than then.
    pub(super) change: i64,
    pub(super) is_loose: bool,
}

/// What one thread has in front of one stream. What every call needs comes first.
#[repr(C)]
pub(super) struct Front {
    /// The block of any class that came last, small and large, which is not on its stack yet; or one of no units.
    ///
    /// A program that frees and asks for the same again has it back through this one place. By way
    /// of a stack the processor would have to know the block's size, and so read its tag, before it
    /// could know whether the next request finds another block there. Small and large ones apart, so that
    /// what came before need not be asked which it is.
    last: [Held; 2],
    /// The fewest units since somebody looked last, and those that there were then.
    least: u32,
    told: u32,
    /// The most units of large blocks.
    bound: u32,
    /// One longer than all of the bound is kept while there is less than this: 1 or, for none, 0.
    alone: u32,
    /// Brought between its bounds whenever somebody asks what is here, and wide enough for all hits
    /// until then.
    score: i64,
    loose: bool,
    may_be_loose: bool,
    /// The most of one small class.
    small_class_units: u32,
    /// How many blocks each small class has, and how many it may have.
    small_depths: [Depth; SMALL_CLASSES],
    small: [u32; SMALL_PLACES],
    /// A bit for each large class that may have blocks.
    filled: [u64; LARGE_WORDS],
    large: [Stack; LARGE_CLASSES],
}

#[derive(Clone, Copy)]
struct Depth {
    now: u16,
    most: u16,
}

/// How many blocks each small class may have, where each may have so many units.
fn small_depths(class_units: u32) -> impl Iterator<Item = u16> {
    (0..SMALL_CLASSES).map(move |class| {
        let places = SMALL_STACKS[class + 1] - SMALL_STACKS[class];
        let blocks = class_units.div_ceil(small_units(class).max(SMALL_LEAST));
        places.min(SMALL_FEW.max(u16::try_from(blocks).unwrap_or(u16::MAX)))
    })
}

impl Front {
    #[cfg(test)]
    fn new(may_be_loose: bool) -> Self {
        // SAFETY: zeros are an empty front.
        let mut front: Self = unsafe { std::mem::zeroed() };
        front.begin(may_be_loose);
        front
    }

    /// Makes a front of memory that is all zeros, with no block in it. Its stacks, sixteen pages and more,
    /// stay untouched.
    pub(super) fn begin(&mut self, may_be_loose: bool) {
        self.bound = LARGE_UNITS;
        self.alone = 1;
        self.may_be_loose = may_be_loose;
        self.bound_small(SMALL_CLASS_UNITS);
    }

    fn bound_small(&mut self, class_units: u32) {
        if self.small_class_units != class_units {
            self.small_class_units = class_units;
            let depths = self.small_depths.iter_mut().zip(small_depths(class_units));
            depths.for_each(|(depth, most)| depth.most = most);
        }
    }

    /// A block of exactly so many units, as `units_of` rounds them: its start.
    #[inline(always)]
    pub(super) fn pop<const LARGE: bool>(&mut self, units: u32, counts: &Counts) -> Option<u32> {
        let start = match self.pop_last::<LARGE>(units) {
            Some(start) => start,
            None if LARGE => self.pop_large(units)?,
            None => self.pop_small(small_class(units))?,
        };
        let left = counts.get::<LARGE>() - units;
        counts.set::<LARGE>(left);
        self.note_least(left + if LARGE { counts.get::<false>() } else { counts.get::<true>() });
        if LARGE {
            self.score += HIT;
        }
        Some(start)
    }

    /// The block that came last, if it is of so many units: its start.
    #[inline(always)]
    fn pop_last<const LARGE: bool>(&mut self, units: u32) -> Option<u32> {
        let last = self.last_mut::<LARGE>();
        if last.units != units {
            return None;
        }
        last.units = 0;
        Some(last.start)
    }

    #[inline(always)]
    fn last_mut<const LARGE: bool>(&mut self) -> &mut Held {
        &mut self.last[usize::from(LARGE)]
    }

    /// The block that came last of those in the size's large class, if it is of so many units: its start.
    #[inline(always)]
    fn pop_large(&mut self, units: u32) -> Option<u32> {
        let stack = self.large.get_mut(large_class(units))?;
        let block = stack.top();
        if block.units != units {
            return None;
        }
        stack.set_depth(stack.depth() - 1);
        Some(block.start)
    }

    /// The block of a small class that came last: its start.
    #[inline(always)]
    fn pop_small(&mut self, class: usize) -> Option<u32> {
        let depth = self.small_depths.get_mut(class)?;
        let now = depth.now.checked_sub(1)?;
        let start = *self.small.get(usize::from(SMALL_STACKS[class] + now))?;
        depth.now = now;
        Some(start)
    }

    /// Notes how little is left after a block has gone out.
    #[inline(always)]
    fn note_least(&mut self, left: u32) {
        // Without a branch: whether it is less than ever goes either way.
        self.least = self.least.min(left);
    }

    /// Takes out a block of the next longer small class that has one: its start, and its units.
    pub(super) fn take_longer(&mut self, units: u32, counts: &Counts) -> Option<(u32, u32)> {
        let longer = small_class(units) + 1..SMALL_CLASSES;
        let class = longer.into_iter().find(|class| self.small_depths[*class].now > 0)?;
        let units = small_units(class);
        let start = self.pop_small(class)?;
        counts.take::<false>(units);
        Some((start, units))
    }

    #[inline(always)]
    pub(super) fn is_loose(&self) -> bool {
        self.loose
    }

    /// A block of at least `units` that leaves little unused, where the front is loose: its start,
    /// and its units. Longer ones are in the same class or in the next two.
    #[inline(always)]
    pub(super) fn pop_loose(&mut self, units: u32, counts: &Counts) -> Option<(u32, u32)> {
        if !self.loose || units <= SMALL_UNITS {
            return None;
        }
        let (class, is_long) = (large_class(units), units > LONG_UNITS);
        // One branch for all: which of them has any goes either way.
        if !self.may_have(class) & !self.may_have(class + 1) & !is_long {
            return None;
        }
        let [own, next, third] = self.large.get(class..class + 3)? else { return None };
        let more = units / LOOSE_FIT;
        let more = if is_long { more + more.min(LONG_MORE) } else { more };
        // The class's own before the next ones', and of those what came last.
        let third = if is_long { third.fitting(units, more) } else { 0 };
        let fitting = own.fitting(units, more) << 16 | next.fitting(units, more) << 8 | third;
        let best = fitting.checked_ilog2()? as usize;
        let block = self.take(class + 2 - best / 8, best % 8, counts);
        self.note_least(counts.units());
        Some(block)
    }

    #[inline(always)]
    fn may_have(&self, class: usize) -> bool {
        let word = self.filled.get(class / 64).copied().unwrap_or(0);
        word >> (class % 64) & 1 != 0
    }

    /// Takes a large block out; the top of its stack has its place then.
    fn take(&mut self, class: usize, place: usize, counts: &Counts) -> (u32, u32) {
        let block = self.large[class].take(place);
        counts.take::<true>(block.units);
        (block.start, block.units)
    }

    /// Keeps a block, if there is room for it.
    #[inline(always)]
    pub(super) fn push<const LARGE: bool>(
        &mut self,
        start: u32,
        units: u32,
        counts: &Counts,
    ) -> bool {
        let held = counts.get::<LARGE>();
        // The sum is not too large: nothing beyond the bound is kept but one single block.
        if LARGE && held + units > self.bound && held >= self.alone {
            return false;
        }
        let last = *self.last_mut::<LARGE>();
        if last.units != 0 && !(if LARGE { self.put_large(last) } else { self.put_small(last) }) {
            return false;
        }
        *self.last_mut::<LARGE>() = Held { start, units };
        counts.set::<LARGE>(held + units);
        if LARGE {
            self.score -= 1;
        }
        true
    }

    /// Puts a small block on its stack, where there is room for it.
    #[inline(always)]
    fn put_small(&mut self, Held { start, units }: Held) -> bool {
        let class = small_class(units);
        let Some(depth) = self.small_depths.get_mut(class) else { return false };
        if depth.now >= depth.most {
            return false;
        }
        let at = usize::from(SMALL_STACKS[class] + depth.now);
        let Some(place) = self.small.get_mut(at) else { return false };
        *place = start;
        depth.now += 1;
        true
    }

    /// The same of a large one.
    #[inline(always)]
    fn put_large(&mut self, block: Held) -> bool {
        let class = large_class(block.units);
        let Some(stack) = self.large.get_mut(class) else { return false };
        if stack.depth() >= LARGE_DEPTH {
            return false;
        }
        stack.push(block);
        self.filled[class / 64] |= 1 << (class % 64);
        true
    }

    /// Whether there is no place for a block of `units` whatever goes: for a large one where none is to stay, and
    /// none is left.
    #[inline]
    pub(super) fn refuses(&self, units: u32, share: Share, counts: &Counts) -> bool {
        let has_large = counts.get::<true>() > 0;
        units > SMALL_UNITS && share.keeps_no_large && self.alone == 0 && !has_large
    }

    /// Makes room for a block of `units` where the pool and the stream's share of it are `share`: half of
    /// the stack that the block before it goes to is for `spill`, where that is full; or everything
    /// large, where all of it is too much.
    pub(super) fn make_room(
        &mut self,
        units: u32,
        share: Share,
        counts: &Counts,
        mut spill: impl FnMut(u32, u32),
    ) {
        self.judge(share);
        let is_large = units > SMALL_UNITS;
        match self.last[usize::from(is_large)].units {
            0 => {}
            large if is_large => self.halve_large(large, counts, &mut spill),
            small => self.halve_small(small, share.each, counts, &mut spill),
        }
        if is_large && counts.get::<true>().saturating_add(units) > self.bound {
            self.spill_large(counts, spill);
        }
    }

    /// Has half of a large class go where its stack is full. The oldest go.
    fn halve_large(&mut self, units: u32, counts: &Counts, mut spill: impl FnMut(u32, u32)) {
        let class = large_class(units);
        if self.large[class].depth() == LARGE_DEPTH {
            for place in (1..=LARGE_DEPTH / 2).rev() {
                let (start, units) = self.take(class, place, counts);
                spill(start, units);
            }
        }
    }

    /// The same of a small class.
    fn halve_small(
        &mut self,
        units: u32,
        share: u64,
        counts: &Counts,
        mut spill: impl FnMut(u32, u32),
    ) {
        if self.may_be_loose {
            let of_pool = u32::try_from(share / SMALL_CLASS_OF_POOL).unwrap_or(u32::MAX);
            self.bound_small(of_pool.clamp(SMALL_CLASS_UNITS, SMALL_CLASS_MOST));
        }
        let class = small_class(units);
        let [first, end] = [class, class + 1].map(|class| usize::from(SMALL_STACKS[class]));
        let Depth { now: depth, most } = self.small_depths[class];
        if depth < most {
            return;
        }
        let gone = depth.div_ceil(2);
        let stack = &mut self.small[first..end];
        for start in &stack[..usize::from(gone)] {
            spill(*start, units);
        }
        // The oldest go; those freed last, whose tags are in the processor's cache, stay.
        stack.copy_within(usize::from(gone)..usize::from(depth), 0);
        self.small_depths[class].now = depth - gone;
        counts.take::<false>(u32::from(gone) * units);
    }

    /// Goes loose, or exact again, as the score says.
    fn judge(&mut self, share: Share) {
        if share.keeps_no_large {
            self.loose = false;
            self.bound = 0;
            self.alone = 0;
            return;
        }
        self.alone = 1;
        if self.score <= LOOSE_AT && self.may_be_loose {
            self.loose = true;
        } else if self.score >= EXACT_AT {
            self.loose = false;
        }
        // Each by a constant, which is no division.
        let most = if self.loose {
            share.each / LOOSE_OF_POOL
        } else if self.may_be_loose {
            (share.each / EXACT_OF_SHARE)
                .max(share.pool / EXACT_OF_POOL)
                .min(share.each / EXACT_TOGETHER)
                .max(share.spare)
        } else {
            share.each / EXACT_OF_LIMITED
        };
        let bound = u32::try_from(most).unwrap_or(u32::MAX >> 1);
        self.bound = bound.max(LARGE_UNITS);
    }

    fn spill_large(&mut self, counts: &Counts, mut spill: impl FnMut(u32, u32)) {
        let last = std::mem::replace(self.last_mut::<true>(), Held::NONE);
        if last.units > 0 {
            spill(last.start, last.units);
        }
        for (word, first) in self.filled.iter_mut().zip((0..).step_by(64)) {
            let mut classes = std::mem::take(word);
            while classes != 0 {
                let stack = &mut self.large[first + classes.trailing_zeros() as usize];
                classes &= classes - 1;
                stack.blocks().for_each(|block| spill(block.start, block.units));
                stack.set_depth(0);
            }
        }
        counts.set::<true>(0);
    }

    /// Empties the front, of one part's sizes or all.
    pub(super) fn spill(
        &mut self,
        sizes: Option<Part>,
        counts: &Counts,
        mut spill: impl FnMut(u32, u32),
    ) {
        if counts.get::<true>() > 0 && sizes != Some(Part::Small) {
            self.spill_large(counts, &mut spill);
        }
        if counts.get::<false>() > 0 && sizes != Some(Part::Large) {
            self.spill_small(counts, spill);
        }
    }

    /// The blocks of a small class.
    fn stack(&self, class: usize) -> &[u32] {
        let first = usize::from(SMALL_STACKS[class]);
        &self.small[first..first + usize::from(self.small_depths[class].now)]
    }

    fn spill_small(&mut self, counts: &Counts, mut spill: impl FnMut(u32, u32)) {
        let last = std::mem::replace(self.last_mut::<false>(), Held::NONE);
        if last.units > 0 {
            spill(last.start, last.units);
        }
        for class in 0..SMALL_CLASSES {
            self.stack(class).iter().for_each(|start| spill(*start, small_units(class)));
            self.small_depths[class].now = 0;
        }
        counts.set::<false>(0);
    }

    /// What is here now, and the least since this was asked last. Whoever asks tells the space
    /// ([`note_front`](crate::default::space::Space::note_front)): what has changed is said once.
    pub(super) fn cached(&mut self, counts: &Counts) -> Cached {
        self.score = self.score.clamp(LOOSE_AT, MOST);
        let now = counts.units();
        let least = std::mem::replace(&mut self.least, now);
        let told = std::mem::replace(&mut self.told, now);
        let change = i64::from(now) - i64::from(told);
        let least = u64::from(least.min(now));
        Cached { now: u64::from(now), least, change, is_loose: self.loose }
    }

    /// What was here when somebody asked last.
    pub(super) fn told(&self) -> u32 {
        self.told
    }

    pub(super) fn blocks(&self) -> u64 {
        let small: u64 = self.small_depths.iter().map(|depth| u64::from(depth.now)).sum();
        let last = self.last.iter().map(|block| u64::from(block.units > 0)).sum::<u64>();
        // Stacks that nothing was ever on stay untouched.
        let large = self.filled.iter().zip((0..).step_by(64)).flat_map(|(word, first)| {
            let classes = std::iter::successors(Some(*word), |classes| {
                classes.checked_sub(1).map(|less| classes & less)
            });
            let classes = classes.take_while(|classes| *classes != 0);
            classes.map(move |classes| first + classes.trailing_zeros() as usize)
        });
        last + small + large.map(|class| self.large[class].depth() as u64).sum::<u64>()
    }

    /// Whether this is what the front holds.
    pub(super) fn agrees(&self, counts: &Counts) -> bool {
        let (mut large, mut small) = (0, 0);
        self.each(|_, units| *(if units > SMALL_UNITS { &mut large } else { &mut small }) += units);
        (large, small) == (counts.get::<true>(), counts.get::<false>())
    }

    /// Every block: start and units.
    pub(super) fn each(&self, mut visit: impl FnMut(u32, u32)) {
        for class in 0..SMALL_CLASSES {
            self.stack(class).iter().for_each(|start| visit(*start, small_units(class)));
        }
        let last = self.last.into_iter().filter(|block| block.units > 0);
        let large = self.large.iter().flat_map(Stack::blocks);
        last.chain(large).for_each(|block| visit(block.start, block.units));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of a pool of so many GiB with so much to spare, what an exact front of one of so many streams keeps: MiB.
    fn kept(gib: u64, spare_gib: u64, streams: u64) -> u32 {
        let each = |gib: u64| (gib << 21) / streams;
        let share = Share {
            pool: gib << 21,
            each: each(gib),
            spare: each(spare_gib),
            keeps_no_large: false,
        };
        let mut front = Front::new(true);
        front.judge(share);
        front.bound >> 11
    }

    #[test]
    fn exact_fronts_keep_a_part_of_the_pool_together_and_of_what_it_has_to_spare() {
        // One stream, and two.
        assert_eq!([kept(16, 0, 1), kept(16, 0, 2)], [512, 256]);
        // Four times as many streams keep as much each until all together keep an eighth.
        assert_eq!([4, 8, 16].map(|streams| kept(16, 0, streams)), [256, 256, 128]);
        // Its part of what the pool has beyond the most that was live, where that is more.
        assert_eq!([kept(16, 1, 16), kept(16, 3, 16)], [128, 192]);
        // A small pool.
        assert_eq!(kept(0, 0, 1), 8);
    }

    #[test]
    fn a_front_that_is_to_keep_no_large_block_keeps_small_ones_and_large_ones_later() {
        let large = 2 * SMALL_UNITS;
        let none = Share { pool: 1 << 21, each: 1 << 21, spare: 0, keeps_no_large: true };
        let (mut front, held) = (Front::new(true), Counts::default());
        assert!(front.push::<true>(0, large, &held) && !front.refuses(large, none, &held));
        let mut gone = Vec::new();
        front.make_room(large, none, &held, |start, units| gone.push((start, units)));
        assert_eq!(gone, [(0, large)]);
        assert!(!front.push::<true>(512, large, &held) && front.push::<false>(1024, 8, &held));
        assert_eq!([large, 8].map(|units| front.refuses(units, none, &held)), [true, false]);
        assert_eq!(front.pop::<true>(large, &held), None);
        assert_eq!(front.pop::<false>(8, &held), Some(1024));
        let some = Share { keeps_no_large: false, ..none };
        assert!(!front.refuses(large, some, &held));
        front.make_room(large, some, &held, |_, _| ());
        assert!(front.push::<true>(512, large, &held) && front.agrees(&held));
        assert_eq!(front.pop::<true>(large, &held), Some(512));
        assert!(front.agrees(&held) && held.units() == 0);
    }

    #[test]
    fn a_loose_front_takes_what_is_a_sixteenth_too_long_and_above_4_mib_an_eighth() {
        const MIB: u32 = 1 << 11;
        let held = Counts::default();
        let mut front = Front::new(true);
        front.bound = u32::MAX >> 1;
        let mut fits = |block: u32, request: u32, loose: bool| {
            front.loose = loose;
            assert!(front.push::<true>(8, block, &held));
            // What came last is not on its stack yet.
            assert!(front.push::<true>(0, 8 << 20, &held));
            let found = front.pop_loose(request, &held);
            assert!(found.is_none() || found == Some((8, block)), "{found:?}");
            front.spill(None, &held, |_, _| ());
            found.is_some()
        };
        for (request, more) in [
            (MIB, MIB / 16),
            (4 * MIB, 4 * MIB / 16),
            (4 * MIB + 8, 4 * MIB / 8),
            (7 * MIB, 7 * MIB / 8),
            (33 * MIB, 33 * MIB / 8),
            (64 * MIB, 8 * MIB),
            (128 * MIB, 12 * MIB),
        ] {
            // The classes looked at end before an eighth where they are narrowest.
            let reach = if request == 7 * MIB { more / 2 } else { more };
            let tried =
                [0, 8, reach - 8, reach].map(|longer| fits(request + longer, request, true));
            assert_eq!(tried, [true; 4], "{request}");
            assert!(!fits(request + more + 8, request, true), "{request}");
            assert!(!fits(request - 8, request, true) && !fits(request + 8, request, false));
        }
    }

    #[test]
    fn no_number_of_hits_makes_a_front_loose() {
        let units = 2 * SMALL_UNITS;
        let (mut front, held) = (Front::new(true), Counts::default());
        // As after some hundred million hits that nobody asked about.
        front.score = i64::from(i32::MAX);
        for _ in 0..3 {
            assert!(front.push::<true>(8, units, &held));
            assert_eq!(front.pop::<true>(units, &held), Some(8));
        }
        front.cached(&held);
        front.make_room(units, Share::default(), &held, |_, _| ());
        assert!(!front.loose && front.score == MOST);
    }
}

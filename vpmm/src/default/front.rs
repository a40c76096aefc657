//! The front: blocks freed last on a stream by one thread, for that stream's next requests.
//!
//! A hit is a pop and a push on a stack of the block's class. What the front holds does not
//! coalesce and is of no use to other streams, so it is bounded: in number for each class, in
//! bytes in all; and it is emptied before the pool grows.
//!
//! Large blocks are handed out again for exactly their size. Programs ask for the same sizes over
//! and over, and what a looser fit leaves unused inside a block is lost to everybody until the
//! block is freed. Where sizes do not come again, though, an exact front is only in the way: then
//! it goes *loose*, holds more, and takes a block that is up to a sixteenth too long. A pool with
//! a limit is never loose.

use super::class::{
    LARGE_CLASSES, SMALL_CLASSES, SMALL_UNITS, large_class, small_class, small_units,
};
use super::space::Part;

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
/// more while the front is loose), or a single block that is longer.
const LARGE_UNITS: u32 = 1 << 14;
const EXACT_OF_POOL: u64 = 32;
const EXACT_OF_LIMITED: u64 = 64;
const LOOSE_OF_POOL: u64 = 4;
/// A loose fit leaves at most this fraction of the request unused.
const LOOSE_FIT: u32 = 16;
/// How a front judges itself: every large block that comes counts against it, every one that goes
/// out for its exact size for it. Down at one bound it goes loose, and exact again at the middle.
const HIT: i32 = 4;
const LOOSE_AT: i32 = -128;
const EXACT_AT: i32 = 0;
const MOST: i32 = 128;

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
const _: () = assert!(LARGE_CLASSES.is_multiple_of(8) && LARGE_CLASSES <= 64 * 8);
const SMALL_PLACES: usize = SMALL_STACKS[SMALL_CLASSES] as usize;

#[derive(Clone, Copy, Default)]
struct Held {
    start: u32,
    units: u32,
}

/// Units in a front.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cached {
    pub(super) now: u64,
    /// The least since the front was asked last.
    pub(super) least: u64,
    /// What it has more than then.
    pub(super) change: i64,
}

/// What one thread has in front of one stream.
pub(super) struct Front {
    small_depth: [u16; SMALL_CLASSES],
    small: [u32; SMALL_PLACES],
    large_depth: [u8; LARGE_CLASSES],
    large: [[Held; LARGE_DEPTH]; LARGE_CLASSES],
    /// Large classes, eight for each bit, of which one may have blocks.
    eights: u64,
    large_units: u32,
    /// With those of small blocks.
    units: u32,
    /// The most of one small class.
    small_class_units: u32,
    /// The fewest units since somebody looked last, and those that there were then.
    least: u32,
    told: u32,
    /// The most of `large_units`.
    bound: u32,
    score: i32,
    loose: bool,
    may_be_loose: bool,
}

impl Front {
    pub(super) fn new(may_be_loose: bool) -> Self {
        Self {
            small_depth: [0; SMALL_CLASSES],
            small: [0; SMALL_PLACES],
            large_depth: [0; LARGE_CLASSES],
            large: [[Held::default(); LARGE_DEPTH]; LARGE_CLASSES],
            eights: 0,
            large_units: 0,
            units: 0,
            small_class_units: SMALL_CLASS_UNITS,
            least: 0,
            told: 0,
            bound: LARGE_UNITS,
            score: 0,
            loose: false,
            may_be_loose,
        }
    }

    /// A block for `units`, as `units_of` rounds them: its start, and its units.
    #[inline(always)]
    pub(super) fn pop(&mut self, units: u32) -> Option<(u32, u32)> {
        if units <= SMALL_UNITS {
            let class = small_class(units);
            return Some((self.pop_small(class, units)?, units));
        }
        let class = large_class(units);
        if let Some(top) = self.large_depth[class].checked_sub(1)
            && let block = self.large[class][top as usize % LARGE_DEPTH]
            && block.units == units
        {
            self.large_depth[class] = top;
            self.large_units -= units;
            self.units -= units;
            self.score = (self.score + HIT).min(MOST);
            return Some((block.start, units));
        }
        if self.loose { self.pop_loose(units, class) } else { None }
    }

    /// The block of a small class, of so many units, that came last: its start.
    #[inline(always)]
    fn pop_small(&mut self, class: usize, units: u32) -> Option<u32> {
        let depth = self.small_depth[class].checked_sub(1)?;
        let start = *self.small.get(usize::from(SMALL_STACKS[class] + depth))?;
        self.small_depth[class] = depth;
        self.units -= units;
        Some(start)
    }

    /// Takes out a block of the next longer small class that has one: its start, and its units.
    pub(super) fn take_longer(&mut self, units: u32) -> Option<(u32, u32)> {
        let longer = small_class(units) + 1..SMALL_CLASSES;
        let class = longer.into_iter().find(|class| self.small_depth[*class] > 0)?;
        let units = small_units(class);
        Some((self.pop_small(class, units)?, units))
    }

    /// A block of at least `units` that leaves little unused. Longer ones are in the same class or
    /// in the next.
    #[inline(never)]
    fn pop_loose(&mut self, units: u32, class: usize) -> Option<(u32, u32)> {
        let fits = units..=units + units / LOOSE_FIT;
        for class in class..(class + 2).min(LARGE_CLASSES) {
            let depth = usize::from(self.large_depth[class]);
            let held = &self.large[class][..depth];
            if let Some(at) = held.iter().rposition(|block| fits.contains(&block.units)) {
                return Some(self.take(class, at));
            }
        }
        None
    }

    /// Takes a large block out; the top of its stack has its place then.
    fn take(&mut self, class: usize, at: usize) -> (u32, u32) {
        let block = self.large[class][at];
        let top = self.large_depth[class] - 1;
        self.large[class][at] = self.large[class][top as usize % LARGE_DEPTH];
        self.large_depth[class] = top;
        self.large_units -= block.units;
        self.units -= block.units;
        (block.start, block.units)
    }

    /// Keeps a block, if there is room for it.
    #[inline(always)]
    pub(super) fn push(&mut self, start: u32, units: u32) -> bool {
        if units <= SMALL_UNITS {
            let class = small_class(units);
            let depth = self.small_depth[class];
            let at = SMALL_STACKS[class] + depth;
            if at >= SMALL_STACKS[class + 1] || self.is_full(depth, units) {
                return false;
            }
            let Some(place) = self.small.get_mut(usize::from(at)) else { return false };
            *place = start;
            self.small_depth[class] = depth + 1;
            self.units += units;
            return true;
        }
        let class = large_class(units);
        let depth = self.large_depth[class] as usize;
        let held = self.large_units;
        if depth >= LARGE_DEPTH || (held > 0 && units.saturating_add(held) > self.bound) {
            return false;
        }
        self.score = (self.score - 1).max(LOOSE_AT);
        self.large[class][depth] = Held { start, units };
        self.large_depth[class] = depth as u8 + 1;
        self.eights |= 1 << (class / 8);
        self.large_units = held + units;
        self.units += units;
        true
    }

    /// Whether a small class has enough. One block more may be beyond the bound.
    #[inline(always)]
    fn is_full(&self, depth: u16, units: u32) -> bool {
        depth >= SMALL_FEW && u32::from(depth) * units.max(SMALL_LEAST) >= self.small_class_units
    }

    /// Makes room for a block of `units` where the stream's share of the pool is `share`: half of
    /// its class goes to `spill`, or everything large, where all of it is too much.
    pub(super) fn make_room(&mut self, units: u32, share: u64, mut spill: impl FnMut(u32, u32)) {
        if units > SMALL_UNITS {
            self.judge(share);
            let class = large_class(units);
            if usize::from(self.large_depth[class]) == LARGE_DEPTH {
                for at in (0..LARGE_DEPTH / 2).rev() {
                    let (start, units) = self.take(class, at);
                    spill(start, units);
                }
            }
            if self.large_units.saturating_add(units) > self.bound {
                self.spill_large(spill);
            }
            return;
        }
        if self.may_be_loose {
            let of_pool = u32::try_from(share / SMALL_CLASS_OF_POOL).unwrap_or(u32::MAX);
            self.small_class_units = of_pool.clamp(SMALL_CLASS_UNITS, SMALL_CLASS_MOST);
        }
        let class = small_class(units);
        let [first, end] = [class, class + 1].map(|class| usize::from(SMALL_STACKS[class]));
        let depth = self.small_depth[class];
        if first + usize::from(depth) < end && !self.is_full(depth, units) {
            return;
        }
        let gone = depth.div_ceil(2);
        let stack = &mut self.small[first..end];
        for start in &stack[..usize::from(gone)] {
            spill(*start, units);
        }
        // The oldest go; those freed last, whose tags are in the processor's cache, stay.
        stack.copy_within(usize::from(gone)..usize::from(depth), 0);
        self.small_depth[class] = depth - gone;
        self.units -= u32::from(gone) * units;
    }

    /// Goes loose, or exact again, as the score says.
    fn judge(&mut self, share: u64) {
        if self.score <= LOOSE_AT && self.may_be_loose {
            self.loose = true;
        } else if self.score >= EXACT_AT {
            self.loose = false;
        }
        let of_pool = if self.loose {
            LOOSE_OF_POOL
        } else if self.may_be_loose {
            EXACT_OF_POOL
        } else {
            EXACT_OF_LIMITED
        };
        let bound = u32::try_from(share / of_pool).unwrap_or(u32::MAX >> 1);
        self.bound = bound.max(LARGE_UNITS);
    }

    fn spill_large(&mut self, mut spill: impl FnMut(u32, u32)) {
        let mut eights = std::mem::take(&mut self.eights);
        while eights != 0 {
            let first = eights.trailing_zeros() as usize * 8;
            eights &= eights - 1;
            for class in first..first + 8 {
                let depth = usize::from(std::mem::take(&mut self.large_depth[class]));
                let blocks = &self.large[class][..depth];
                blocks.iter().for_each(|block| spill(block.start, block.units));
            }
        }
        self.units -= self.large_units;
        self.large_units = 0;
    }

    /// Empties the front, of one part's sizes or all.
    pub(super) fn spill(&mut self, sizes: Option<Part>, mut spill: impl FnMut(u32, u32)) {
        if self.large_units > 0 && sizes != Some(Part::Small) {
            self.spill_large(&mut spill);
        }
        if self.units > self.large_units && sizes != Some(Part::Large) {
            self.spill_small(spill);
        }
    }

    /// The blocks of a small class.
    fn stack(&self, class: usize) -> &[u32] {
        let first = usize::from(SMALL_STACKS[class]);
        &self.small[first..first + usize::from(self.small_depth[class])]
    }

    fn spill_small(&mut self, mut spill: impl FnMut(u32, u32)) {
        for class in 0..SMALL_CLASSES {
            self.stack(class).iter().for_each(|start| spill(*start, small_units(class)));
            self.small_depth[class] = 0;
        }
        self.units = self.large_units;
    }

    #[inline(always)]
    pub(super) fn units(&self) -> u32 {
        self.units
    }

    /// Notes how little is left after a block has gone out.
    #[inline(always)]
    pub(super) fn note_least(&mut self) {
        self.least = self.least.min(self.units);
    }

    /// What is here now, and the least since this was asked last.
    pub(super) fn cached(&mut self) -> Cached {
        let now = self.units;
        let least = std::mem::replace(&mut self.least, now);
        let told = std::mem::replace(&mut self.told, now);
        let change = i64::from(now) - i64::from(told);
        Cached { now: u64::from(now), least: u64::from(least.min(now)), change }
    }

    pub(super) fn blocks(&self) -> u64 {
        let small: u64 = self.small_depth.iter().map(|depth| u64::from(*depth)).sum();
        small + self.large_depth.iter().map(|depth| u64::from(*depth)).sum::<u64>()
    }

    /// Every block: start and units.
    pub(super) fn each(&self, mut visit: impl FnMut(u32, u32)) {
        for class in 0..SMALL_CLASSES {
            self.stack(class).iter().for_each(|start| visit(*start, small_units(class)));
        }
        for (class, depth) in self.large_depth.iter().enumerate() {
            for block in &self.large[class][..usize::from(*depth)] {
                visit(block.start, block.units);
            }
        }
    }
}

//! One number for every unit of the address space: what begins there, or ends.
//!
//! | at | tag |
//! |---|---|
//! | the first unit of an allocation | live, with its size |
//! | the next one with a tag | its stream's label; where it has no second, that is in the first |
//! | the two behind that, of a large one | what its [fate](crate::default::lifetimes) is told by |
//! | the first unit, where more is noted about the allocation elsewhere | noted, with its size |
//! | the first unit of a block in a front, or that waits for further streams | cached, with its size |
//! | the first and the last unit of a free block | free, with its node |
//! | everywhere else | nothing |
//!
//! Where large blocks are, one number serves for 4 KiB: everything there is whole pages of that.
//!
//! So the size of an allocation, the state of a pointer and both neighbours of a block are two
//! loads each, without a node for anything live.
//!
//! ```text
//! unit ─▶ its span of 2 MiB ─▶ directory ─▶ the span's leaf ─▶ tag      without memory: a leaf of
//!                                                                       none, the same for all
//! ```
//!
//! A span has a leaf only while it has memory, and where memory moves that goes with it. A table by
//! address would have another page of the host's memory touched for every few MiB that move, for
//! ever new addresses; to the system that is a fault of some microseconds, which costs the pool
//! more than the move's own book-keeping.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use rustix::mm::{Advice, madvise};

use super::Part;
use crate::default::class::{LARGE_STEP, SMALL_UNITS};
use crate::lock::{Rank, SpinLock};

/// A tag: 2 bits of its kind above 30 of a size or a node.
const KIND: u32 = 3 << 30;
const LIVE: u32 = 1 << 30;
const CACHED: u32 = 2 << 30;
const FREE: u32 = 3 << 30;

/// Nodes have 29 bits. With the next bit it is an allocation instead: one that is as short as can
/// be, with its stream, or a noted one, with its size in short.
const RARE: u32 = FREE | 1 << 29;
const NOTED: u32 = RARE | 1 << 28;
const NOTED_VALUE: u32 = (1 << 28) - 1;
/// Of those as short as can be: a page of the large part.
const PAGE: u32 = 1 << 27;
const RARE_VALUE: u32 = PAGE - 1;

/// Streams' labels have so many bits.
pub(in crate::default) const LABEL: u32 = RARE_VALUE;

/// A span: what has a leaf of its own. Granules are spans or several of them.
pub(in crate::default) const SPAN_UNITS: u32 = 1 << SPAN_BITS;
const SPAN_BITS: u32 = 12;

/// An entry of the directory: where the leaf begins, above the number of low bits of a unit's
/// number that do not tell tags apart.
const BITS: u32 = 31;
const LARGE_BITS: u32 = LARGE_STEP.ilog2();

const _: () = assert!(leaf_of(Part::Small) & BITS == 0 && leaf_of(Part::Large) & BITS == 0);

/// What a unit's tag says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::default) enum Tag {
    /// Neither a start nor an end of anything.
    None,
    /// An allocation of so many units starts here.
    Live(u32),
    /// The same, and more is noted about it.
    Noted(u32),
    /// A block of so many units starts here that is in a front or waits for further streams.
    Cached(u32),
    /// The free block of this node starts or ends here.
    Free(u32),
}

impl Tag {
    /// The units of the allocation that starts here.
    #[inline(always)]
    pub(in crate::default) fn live_units(self) -> Option<u32> {
        match self {
            Self::Live(units) | Self::Noted(units) => Some(units),
            Self::None | Self::Cached(_) | Self::Free(_) => None,
        }
    }
}

/// Where among all leaves a unit's tag is, as long as its memory stays where it is.
#[derive(Clone, Copy)]
pub(in crate::default) struct Place(usize);

/// Numbers, zero at first, that cost the host's memory only where they were written.
struct Zeroed {
    start: NonNull<AtomicU32>,
    length: usize,
}

// SAFETY: the memory is of atomics, alive until drop; the pointer itself never changes.
unsafe impl Send for Zeroed {}
// SAFETY: as above.
unsafe impl Sync for Zeroed {}

impl Zeroed {
    /// `None` for none, and where the system does not give the address space.
    fn new(length: usize) -> Option<Self> {
        let layout = Self::layout(length)?;
        // SAFETY: the layout is not empty, as `layout` makes sure.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { start: start.cast(), length })
    }

    fn layout(length: usize) -> Option<Layout> {
        Layout::array::<AtomicU32>(length).ok().filter(|layout| layout.size() > 0)
    }

    #[inline(always)]
    fn get(&self, at: usize) -> Option<&AtomicU32> {
        // SAFETY: the index is within the memory, which is zeroed (a valid state of atomics) and
        // alive while `self` is.
        (at < self.length).then(|| unsafe { self.start.add(at).as_ref() })
    }

    /// The number there; 0 beyond the end.
    #[inline(always)]
    fn load(&self, at: usize) -> u32 {
        self.get(at).map_or(0, |number| number.load(Ordering::Relaxed))
    }

    /// Has pages behind some of the numbers, which stay as they are.
    fn touch(&self, range: Range<usize>) {
        if cfg!(miri) {
            return;
        }
        // SAFETY: it touches no memory of the program's.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        let Ok(page @ 1..) = usize::try_from(page) else { return };
        let (first, end) =
            (range.start * size_of::<u32>(), range.end.min(self.length) * size_of::<u32>());
        let start = self.start.as_ptr().addr();
        // Whole pages of this memory alone.
        let Some(first) = (start + first).checked_next_multiple_of(page) else { return };
        let end = (start + end) / page * page;
        if first >= end {
            return;
        }
        let pages = self.start.as_ptr().with_addr(first).cast();
        // Linux before 5.14 refuses, and has them touched one by one later.
        // SAFETY: the range lies within this allocation, of which the call changes no byte.
        let _ = unsafe { madvise(pages, end - first, Advice::LinuxPopulateWrite) };
    }

    #[inline(always)]
    fn store(&self, at: usize, number: u32) {
        if let Some(entry) = self.get(at) {
            entry.store(number, Ordering::Relaxed);
        }
    }

    /// The number there, without a look at whether there is one.
    ///
    /// # Safety
    /// There is.
    #[inline(always)]
    unsafe fn within(&self, at: usize) -> &AtomicU32 {
        debug_assert!(at < self.length);
        // SAFETY: the caller vouches for the index; the memory is as in `get`.
        unsafe { self.start.add(at).as_ref() }
    }
}

impl Drop for Zeroed {
    fn drop(&mut self) {
        if let Some(layout) = Self::layout(self.length) {
            // SAFETY: allocated in `new` with this very layout.
            unsafe { dealloc(self.start.as_ptr().cast(), layout) };
        }
    }
}

/// Leaves that no span has.
struct Unused {
    /// What begins here never was one's, up to the end of all leaves.
    next: u32,
    end: u32,
    /// By part: those that came back, without a tag.
    vacant: [Vec<u32>; 2],
}

/// The tags. Any thread may read and write them: a tag is written by whoever owns its unit at that
/// time, and others only learn from it that they do not. Leaves come and go with memory, under the
/// space's lock; who owns a unit keeps the leaf.
pub(in crate::default) struct Tags {
    /// By span; 0 where there is no memory.
    directory: Zeroed,
    /// All leaves. The first is that of spans without memory.
    leaves: Zeroed,
    unused: SpinLock<Unused>,
    /// Leaves up to this one's place have the host's memory.
    ready: AtomicUsize,
    units: u32,
    /// The first unit of the large part.
    split: u32,
}

impl Tags {
    /// For so many units, of which those from `split` on are the large part, all of them whole
    /// spans; `None` where the system does not give the address space.
    pub(in crate::default) fn new(units: u32, split: u32) -> Option<Self> {
        let spans = [split, units.checked_sub(split)?].map(|units| (units / SPAN_UNITS) as usize);
        let [small, large] = Part::ALL.map(|part| leaf_of(part) as usize * spans[part as usize]);
        // The first leaf is as long as any.
        let first = leaf_of(Part::Small);
        let end = u32::try_from(first as usize + small + large).ok()?;
        Some(Self {
            directory: Zeroed::new(spans[0] + spans[1])?,
            leaves: Zeroed::new(end as usize)?,
            unused: SpinLock::ranked(
                Rank::Leaves,
                Unused { next: first, end, vacant: Default::default() },
            ),
            ready: AtomicUsize::new(0),
            units,
            split,
        })
    }

    /// Has the system find the host's memory for the first so many spans of the large part, or for an eighth
    /// as many of the small part, at once. Only a help.
    pub(in crate::default) fn prepare_first(&self, spans: u32) {
        let end = leaf_of(Part::Small) as usize + spans as usize * leaf_of(Part::Large) as usize;
        self.leaves.touch(0..end);
        self.ready.store(end, Ordering::Relaxed);
    }

    pub(in crate::default) fn units(&self) -> u32 {
        self.units
    }

    /// How many units from this one on have one tag together.
    #[inline(always)]
    pub(in crate::default) fn step(&self, unit: u32) -> u32 {
        if unit < self.split { 1 } else { LARGE_STEP }
    }

    /// Whether a block may start at the unit.
    #[inline(always)]
    pub(in crate::default) fn may_start(&self, unit: u32) -> bool {
        unit < self.split || unit.is_multiple_of(LARGE_STEP)
    }

    /// The first unit of those that have one tag together with this one.
    pub(in crate::default) fn first_with(&self, unit: u32) -> u32 {
        unit - unit % self.step(unit)
    }

    /// Where the tag of a unit is.
    #[inline(always)]
    pub(in crate::default) fn place_of(&self, unit: u32) -> Place {
        let entry = self.directory.load((unit / SPAN_UNITS) as usize);
        // By the low bits of the entry, which are its `BITS`.
        let number = (unit % SPAN_UNITS).wrapping_shr(entry);
        Place(((entry & !BITS) + number) as usize)
    }

    /// The place of the unit before this one, which is the first at its place: of the last unit of
    /// a block, where this is its end.
    #[inline(always)]
    pub(super) fn before(&self, at: Place, unit: u32) -> Place {
        if unit.is_multiple_of(SPAN_UNITS) {
            self.elsewhere(unit.wrapping_sub(1))
        } else {
            Place(at.0 - 1)
        }
    }

    /// The place behind that of this unit, which is the first there.
    #[inline(always)]
    fn behind(&self, at: Place, unit: u32) -> Place {
        // Leaves begin at multiples of the shortest one's length, and end before one.
        if (at.0 + 1).is_multiple_of(leaf_of(Part::Large) as usize) {
            // Not by a call: the way through the front has none, and so saves no registers.
            self.place_of(unit + self.step(unit))
        } else {
            Place(at.0 + 1)
        }
    }

    /// The place of a unit in another span than the one before.
    #[inline(never)]
    fn elsewhere(&self, unit: u32) -> Place {
        self.place_of(unit)
    }

    /// The tag of a unit; nothing where there is no memory.
    #[inline(always)]
    pub(in crate::default) fn get(&self, unit: u32) -> Tag {
        self.read(self.place_of(unit))
    }

    /// The tag at a place.
    #[inline(always)]
    pub(super) fn read(&self, at: Place) -> Tag {
        let raw = self.leaf(at).load(Ordering::Relaxed);
        let value = raw & !KIND;
        match raw & KIND {
            LIVE => Tag::Live(value),
            CACHED => Tag::Cached(value),
            FREE if raw & RARE == RARE => rare(raw),
            FREE => Tag::Free(value),
            _ => Tag::None,
        }
    }

    /// The units of the allocation that starts at a place, about which nothing more is noted.
    #[inline(always)]
    pub(in crate::default) fn live_at(&self, at: Place) -> Option<u32> {
        let raw = self.leaf(at).load(Ordering::Relaxed);
        if raw & KIND == LIVE {
            Some(raw & !KIND)
        } else if raw & NOTED == RARE {
            Some(if raw & PAGE == 0 { 1 } else { LARGE_STEP })
        } else {
            None
        }
    }

    /// The label of the stream that the allocation at this unit was made on; `None` where there was
    /// no room for it.
    pub(in crate::default) fn label_at(&self, unit: u32) -> Option<u32> {
        let at = self.place_of(unit);
        if self.read(at).live_units()? > self.step(unit) {
            return Some(self.leaf(self.behind(at, unit)).load(Ordering::Relaxed));
        }
        let raw = self.leaf(at).load(Ordering::Relaxed);
        (raw & NOTED != NOTED).then_some(raw & LABEL)
    }

    /// The first unit of a range, which is of one part, that has a tag. Pages that are not whole in
    /// the range do not count.
    pub(in crate::default) fn first_in(&self, range: Range<u32>) -> Option<u32> {
        let step = self.step(range.start);
        let first = range.start.checked_next_multiple_of(step)?;
        let end = range.end.min(self.units);
        (first..end).step_by(step as usize).find(|unit| {
            let whole = unit + step <= end;
            whole && self.get(*unit) != Tag::None
        })
    }

    #[inline(always)]
    fn write(&self, at: Place, raw: u32) {
        debug_assert!(at.0 as u32 >= leaf_of(Part::Small), "a tag where there is no memory");
        self.leaf(at).store(raw, Ordering::Relaxed);
    }

    #[inline(always)]
    fn leaf(&self, at: Place) -> &AtomicU32 {
        // SAFETY: places are made here only, and used with the tags that made them. One is made by an entry of
        // the directory, which is 0 (where the unit is none of the space's, too) or where a leaf begins that
        // `Unused::take` has found to end within all leaves, and of the leaf's length, so that every unit of
        // the span has a place in it; or it is the next one in the same leaf; or the one before that of a
        // unit that is not its span's first, and no such unit's place is 0.
        unsafe { self.leaves.within(at.0) }
    }

    /// Notes an allocation. The label beside it stays when the block is freed: it is no tag.
    #[inline(always)]
    pub(in crate::default) fn set_live(&self, start: u32, units: u32, label: u32) {
        self.set_live_at(self.place_of(start), start, units, label);
    }

    /// The same where the place of the first unit is known.
    #[inline(always)]
    pub(super) fn set_live_at(&self, at: Place, start: u32, units: u32, label: u32) {
        if units > LARGE_STEP || units > self.step(start) {
            self.write(at, LIVE | units);
            self.write(self.behind(at, start), label & LABEL);
        } else {
            let page = if units == 1 { 0 } else { PAGE };
            self.write(at, RARE | page | (label & LABEL));
        }
    }

    /// Notes three numbers of 30 bits inside an allocation that has five tags or more. They are no tags, and stay
    /// as long as the block is nobody else's.
    pub(super) fn set_inside(&self, start: u32, numbers: [u32; 3]) {
        self.inside_places(start).into_iter().zip(numbers).for_each(|(at, number)| {
            self.write(at, number & !KIND);
        });
    }

    /// The same; or anything, where nothing was noted.
    pub(super) fn inside(&self, start: u32) -> [u32; 3] {
        self.inside_places(start).map(|at| self.leaf(at).load(Ordering::Relaxed) & !KIND)
    }

    /// The places of the third tag to the fifth: the second is the label.
    fn inside_places(&self, start: u32) -> [Place; 3] {
        let step = self.step(start);
        let third = self.place_of(start + 2 * step);
        let fourth = self.behind(third, start + 2 * step);
        [third, fourth, self.behind(fourth, start + 3 * step)]
    }

    /// Notes more about the allocation at a unit, which keeps its size.
    pub(in crate::default) fn set_noted(&self, start: u32, units: u32) {
        self.write(self.place_of(start), NOTED | short(units));
    }

    #[inline(always)]
    pub(in crate::default) fn set_cached(&self, at: Place, units: u32) {
        self.write(at, CACHED | units);
    }

    #[inline(always)]
    pub(super) fn set_free(&self, at: Place, node: u32) {
        self.write(at, FREE | node);
    }

    #[inline(always)]
    pub(super) fn clear(&self, at: Place) {
        self.write(at, 0);
    }

    /// These units, whole spans, have memory from now on, in which nothing begins or ends yet.
    pub(in crate::default) fn add(&self, units: Range<u32>) {
        let mut unused = self.unused.lock();
        for span in units.start / SPAN_UNITS..units.end / SPAN_UNITS {
            let entry = unused.take(self.part_of(span));
            self.directory.store(span as usize, entry);
        }
    }

    /// Has the system find the host's memory for the tags of these units at once: a fault for each page of
    /// them, as blocks are handed out there one by one, costs more. Only a help.
    pub(in crate::default) fn prepare(&self, units: Range<u32>) {
        let Some(last) = units.end.checked_sub(1).filter(|last| *last >= units.start) else {
            return;
        };
        let [first, last] = [units.start, last].map(|unit| self.place_of(unit).0);
        // Leaves that other spans had before may be anywhere, and have their pages.
        let each = leaf_of(self.part_of(units.start / SPAN_UNITS)) as usize;
        let spans = ((units.end - 1) / SPAN_UNITS - units.start / SPAN_UNITS) as usize;
        let there = last < self.ready.load(Ordering::Relaxed);
        if !there && last.checked_sub(first).is_some_and(|tags| tags / each <= spans) {
            self.leaves.touch(first..last + 1);
        }
    }

    /// Memory that is wholly free goes from one unit, and those behind it, to another.
    pub(in crate::default) fn carry(&self, from: u32, to: u32, units: u32) {
        let mut unused = self.unused.lock();
        for step in 0..units / SPAN_UNITS {
            let [from, to] = [from, to].map(|first| first / SPAN_UNITS + step);
            let mut entry = self.directory.load(from as usize);
            self.directory.store(from as usize, 0);
            if self.part_of(from) != self.part_of(to) {
                unused.vacant[self.part_of(from) as usize].push(entry);
                entry = unused.take(self.part_of(to));
            }
            self.directory.store(to as usize, entry);
        }
    }

    /// These units have no memory any more.
    pub(in crate::default) fn remove(&self, units: Range<u32>) {
        let mut unused = self.unused.lock();
        for span in units.start / SPAN_UNITS..units.end / SPAN_UNITS {
            let entry = self.directory.load(span as usize);
            self.directory.store(span as usize, 0);
            unused.vacant[self.part_of(span) as usize].push(entry);
        }
    }

    fn part_of(&self, span: u32) -> Part {
        if span * SPAN_UNITS < self.split { Part::Small } else { Part::Large }
    }
}

impl Unused {
    /// The entry of a leaf for a span of a part. There is one for each, or where there were none it would be
    /// that of spans without memory.
    fn take(&mut self, part: Part) -> u32 {
        self.vacant[part as usize].pop().unwrap_or_else(|| {
            let start = self.next;
            if self.end - start < leaf_of(part) {
                return 0;
            }
            self.next += leaf_of(part);
            match part {
                Part::Small => start,
                Part::Large => start | LARGE_BITS,
            }
        })
    }
}

/// The length of a span's leaf.
const fn leaf_of(part: Part) -> u32 {
    match part {
        Part::Small => SPAN_UNITS,
        Part::Large => SPAN_UNITS / LARGE_STEP,
    }
}

/// What a tag says that is neither a node nor a size.
#[cold]
#[inline(never)]
fn rare(raw: u32) -> Tag {
    if raw & NOTED == NOTED {
        Tag::Noted(long(raw & NOTED_VALUE))
    } else {
        Tag::Live(if raw & PAGE == 0 { 1 } else { LARGE_STEP })
    }
}

/// A size in 28 bits: large ones are whole pages.
fn short(units: u32) -> u32 {
    if units <= SMALL_UNITS { units } else { SMALL_UNITS + units / LARGE_STEP }
}

/// The size that is so in short.
fn long(short: u32) -> u32 {
    if short <= SMALL_UNITS { short } else { (short - SMALL_UNITS) * LARGE_STEP }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Six spans, all with memory, of which so many are the small part.
    fn tags(small: u32) -> Tags {
        let Some(tags) = Tags::new(6 * SPAN_UNITS, small * SPAN_UNITS) else {
            panic!("no memory for 120 KiB")
        };
        tags.add(0..6 * SPAN_UNITS);
        tags
    }

    #[test]
    fn to_prepare_pages_changes_no_tag() {
        let tags = tags(2);
        let starts = [3, SPAN_UNITS + 8, 2 * SPAN_UNITS, 6 * SPAN_UNITS - 16];
        starts.iter().for_each(|start| tags.set_live(*start, 16, 5));
        // Over both parts, within a span, over all there is, beyond it, and nothing.
        let [all, some] = [6 * SPAN_UNITS, SPAN_UNITS + 9];
        for units in
            [0..all, 3..some, some..all, 0..all + SPAN_UNITS, 7..7, Range { start: 9, end: 2 }]
        {
            tags.prepare(units);
            let live = starts.map(|start| tags.get(start).live_units());
            assert_eq!(live, [Some(16); 4]);
        }
    }

    #[test]
    fn tags_say_what_was_written_and_nothing_elsewhere() {
        let tags = tags(6);
        let end = tags.units();
        tags.set_live(0, 5, 7);
        tags.set_cached(tags.place_of(5), 7);
        tags.set_free(tags.place_of(end - 1), 3);
        assert_eq!(tags.label_at(0), Some(7));
        let read = [0, 1, 5, end - 1, end, u32::MAX].map(|unit| tags.get(unit));
        let [live, none, cached, free, beyond, far] = read;
        assert_eq!((live, none, cached), (Tag::Live(5), Tag::None, Tag::Cached(7)));
        assert_eq!((free, beyond, far), (Tag::Free(3), Tag::None, Tag::None));
        let ends = [(0, Tag::None), (SPAN_UNITS, Tag::None), (6, Tag::Cached(7)), (end, free)];
        assert!(
            ends.iter()
                .all(|(end, tag)| { tags.read(tags.before(tags.place_of(*end), *end)) == *tag })
        );
        let ranges = [0..end, 1..end, 6..end - 1, 6..end + 9, end..end + 9];
        let first = ranges.map(|range| tags.first_in(range));
        assert_eq!(first, [Some(0), Some(5), None, Some(end - 1), None]);
        assert!(Tags::new(0, 0).is_none());
    }

    #[test]
    fn allocations_know_their_stream_and_may_be_noted() {
        let tags = tags(1);
        // Of one tag and of more, where each unit has one and where pages have, at the end of a
        // span and over several.
        let large = SPAN_UNITS;
        let blocks = [(1, 1), (2, 2), (4, 12), (large - 1, 1), (large, 8), (large + 8, 4080)];
        for (start, units) in blocks.into_iter().chain([(2 * large - 8, 16), (3 * large, 8192)]) {
            let at = tags.place_of(start);
            tags.set_live(start, units, RARE_VALUE - 2);
            assert_eq!(tags.get(start), Tag::Live(units));
            assert_eq!(tags.label_at(start), Some(RARE_VALUE - 2));
            assert!(tags.first_in(start + 1..start + units).is_none());
            tags.set_noted(start, units);
            assert_eq!(tags.get(start), Tag::Noted(units));
            let kept = units > tags.step(start);
            assert_eq!(tags.label_at(start), kept.then_some(RARE_VALUE - 2));
            tags.set_cached(at, units);
            assert_eq!((tags.get(start), tags.label_at(start)), (Tag::Cached(units), None));
        }
        let most = crate::default::class::MAX_UNITS;
        for units in [1, SMALL_UNITS, SMALL_UNITS + LARGE_STEP, most] {
            assert!(short(units) <= NOTED_VALUE && long(short(units)) == units, "{units}");
        }
    }

    #[test]
    fn what_is_noted_inside_an_allocation_is_no_tag() {
        let tags = tags(1);
        let value = !KIND;
        // In both parts, and where the numbers are in the next span's leaf, or two of them or one.
        let starts = [0, SPAN_UNITS, 2 * SPAN_UNITS - 16, 3 * SPAN_UNITS - 24, 4 * SPAN_UNITS - 32];
        for start in starts {
            tags.set_live(start, 136, 5);
            tags.set_inside(start, [value - start, start, 3]);
            assert_eq!(tags.inside(start), [value - start, start, 3]);
            assert_eq!((tags.get(start), tags.label_at(start)), (Tag::Live(136), Some(5)));
            assert!(tags.first_in(start + tags.step(start)..start + 136).is_none());
            tags.set_cached(tags.place_of(start), 136);
            assert_eq!(tags.inside(start), [value - start, start, 3]);
            tags.clear(tags.place_of(start));
        }
    }

    #[test]
    fn pages_of_the_large_part_have_one_tag() {
        let tags = tags(1);
        let large = SPAN_UNITS;
        tags.set_live(large - 1, 1, 0);
        tags.set_live(large, 8, 0);
        tags.set_free(tags.place_of(large + 8), 7);
        tags.set_free(tags.before(tags.place_of(2 * large), 2 * large), 7);
        let [small, page, same] = [large - 1, large, large + 7].map(|unit| tags.get(unit));
        assert_eq!((small, page, same), (Tag::Live(1), Tag::Live(8), Tag::Live(8)));
        let [first, inside, last] =
            [large + 8, large + 16, 2 * large - 8].map(|unit| tags.get(unit));
        assert_eq!((first, inside, last), (Tag::Free(7), Tag::None, Tag::Free(7)));
        assert_eq!((tags.step(large - 1), tags.step(large)), (1, 8));
        assert!(tags.may_start(large - 1) && tags.may_start(large + 8));
        assert!(!tags.may_start(large + 9) && tags.first_with(large + 9) == large + 8);
    }

    #[test]
    fn leaves_come_and_go_with_memory() {
        let Some(tags) = Tags::new(6 * SPAN_UNITS, 2 * SPAN_UNITS) else {
            panic!("no memory for 120 KiB")
        };
        let [add, remove] = [Tags::add, Tags::remove].map(|change| {
            let tags = &tags;
            move |spans: Range<u32>| change(tags, spans.start * SPAN_UNITS..spans.end * SPAN_UNITS)
        });
        let carry = |from: u32, to: u32, spans: u32| {
            tags.carry(from * SPAN_UNITS, to * SPAN_UNITS, spans * SPAN_UNITS);
        };
        let each_has_its_own = |spans: &[u32]| {
            let with = (0..6).filter(|span| tags.place_of(span * SPAN_UNITS).0 > 0);
            assert_eq!(with.collect::<Vec<_>>(), spans);
            let places = || spans.iter().map(|span| (tags.place_of(span * SPAN_UNITS), *span));
            places().for_each(|(at, span)| tags.set_free(at, span));
            places().for_each(|(at, span)| assert_eq!(tags.read(at), Tag::Free(span)));
            places().for_each(|(at, _)| tags.clear(at));
        };
        each_has_its_own(&[]);
        add(0..1);
        add(3..5);
        each_has_its_own(&[0, 3, 4]);
        // Within a part, then into the other and back.
        carry(3, 2, 2);
        each_has_its_own(&[0, 2, 3]);
        carry(2, 1, 1);
        each_has_its_own(&[0, 1, 3]);
        carry(0, 4, 1);
        remove(1..2);
        each_has_its_own(&[3, 4]);
        // All that is needed from here on was another's before.
        let next = tags.unused.lock().next;
        add(1..2);
        carry(1, 5, 1);
        carry(3, 0, 1);
        each_has_its_own(&[0, 4, 5]);
        assert_eq!(tags.unused.lock().next, next + leaf_of(Part::Large));
    }
}

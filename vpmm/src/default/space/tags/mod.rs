//! For every unit of the address space: what begins there, or ends.
//!
//! | at | tag |
//! |---|---|
//! | the first unit of an allocation | live, with its size and its stream's label |
//! | the same, where more is noted about the allocation elsewhere | noted, with both |
//! | the first unit of a block in a front, or that waits for further streams | cached, with its size |
//! | the first and the last unit of a free block | free, with its node |
//! | everywhere else | nothing |
//!
//! So the size of an allocation, the state of a pointer and both neighbours of a block are two
//! loads each, without a node for anything live.
//!
//! ```text
//! unit of the small part ─▶ its word              unit of the large part ─▶ its cell
//! ```
//!
//! In the small part each unit has a [word]; the label is in the next one. In the large part, where everything
//! is whole pages of 4 KiB and hardly a block is short, there is a [cell] for every 64 KiB: longer blocks have
//! their tags there. Most of them begin and end where none did before, and with a word for each page each of them
//! would have another line of the host's memory brought near. Of short ones, a free one, which is what was cut off,
//! is known to the cell that it ends in; where two end there, and of small blocks that had no other place, pages
//! have words.
//!
//! What more is noted about an allocation lies where its length leaves tags unused, and reads as none: in the cell behind
//! that of its start, as a rule, so that no other line of memory is needed for it.
//!
//! All of it lies in tables by address, of which the host's memory holds what was written: a page for 14 MiB of the
//! large part, so that memory which moves to new addresses seldom meets one that has to be found.

mod cell;
#[cfg(test)]
mod model;
mod word;
mod zeroed;

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use crate::default::class::{LARGE_STEP, SMALL_UNITS};
pub(super) use cell::CELL_UNITS;
pub(in crate::default) use word::LABEL;
use zeroed::Zeroed;

/// Units of a span: granules are spans or several of them.
pub(in crate::default) const SPAN_UNITS: u32 = 4096;

/// Cells of a span of the large part, and numbers: two for each cell, for what starts and for what ends there. As
/// many again as fill a line of the processor's cache keep what lies alike in all spans from having the same place
/// in that cache.
const CELLS: usize = (SPAN_UNITS / CELL_UNITS) as usize;
const SPAN: usize = 2 * CELLS + 8;

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

/// An allocation, by the number that says so.
pub(in crate::default) struct Live<'a, T: StartTag> {
    tag: &'a T,
    said: T::Value,
    pub(in crate::default) units: u32,
}

impl<T: StartTag> Live<'_, T> {
    /// It is in a front now.
    #[inline(always)]
    pub(in crate::default) fn set_cached(&self) {
        T::set_cached(self);
    }
}

/// A number that says what starts at a unit.
pub(in crate::default) trait StartTag: Sized {
    type Value;

    fn set_cached(live: &Live<'_, Self>);
}

impl StartTag for AtomicU32 {
    type Value = u32;

    #[inline(always)]
    fn set_cached(live: &Live<'_, Self>) {
        live.tag.store(word::cached(live.units), Relaxed);
    }
}

impl StartTag for AtomicU64 {
    type Value = u64;

    #[inline(always)]
    fn set_cached(live: &Live<'_, Self>) {
        live.tag.store(cell::live_cached(live.said), Relaxed);
    }
}

/// The tags. Any thread may read and write them: a tag is written by whoever owns its unit at that
/// time, and others only learn from it that they do not. What ends in a cell is written under the space's lock.
pub(in crate::default) struct Tags {
    /// Words of the small part.
    words: Zeroed<AtomicU32>,
    /// Cells of the large part.
    cells: Zeroed<AtomicU64>,
    /// What the [fate](crate::default::lifetimes) of an allocation is told by that has no cell for itself, at the
    /// place of the one that it starts in.
    fates: Zeroed<AtomicU64>,
    /// Words of the pages of the large part, for short blocks.
    pages: Zeroed<AtomicU32>,
    /// Of a unit the bits that count, in the small part and in all: so many that the first unit behind either, and the
    /// last that has a number, have a place in the tables where nothing is written.
    small: u32,
    all: u32,
    /// Places of cells that have the host's memory since the beginning.
    ready: OnceLock<Box<[Range<usize>]>>,
    units: u32,
    /// The first unit of the large part.
    split: u32,
}

impl Tags {
    /// For so many units, of which those from `split` on are the large part, all of them whole
    /// spans; `None` where the system does not give the address space.
    pub(in crate::default) fn new(units: u32, split: u32) -> Option<Self> {
        if split > units {
            return None;
        }
        let [small, all] = [split, units].map(mask_beyond);
        let numbers = |mask: u32| mask as usize + 1;
        let cells = numbers(all).div_ceil(SPAN_UNITS as usize) * SPAN;
        Some(Self {
            words: Zeroed::new(numbers(small))?,
            cells: Zeroed::new(cells)?,
            fates: Zeroed::new(cells)?,
            pages: Zeroed::new(numbers(all).div_ceil(LARGE_STEP as usize))?,
            small,
            all,
            ready: OnceLock::new(),
            units,
            split,
        })
    }

    /// Has the system find the host's memory for the tags of so many small units and of these large ones at once.
    /// Only a help.
    pub(in crate::default) fn prepare_first(
        &self,
        small: u32,
        large: impl Iterator<Item = Range<u32>>,
    ) {
        self.words.touch(0..small as usize);
        let ready = large.map(|units| cell(units.start)..cell(units.end));
        let ready = ready.inspect(|cells| self.cells.touch(cells.clone())).collect();
        let _ = self.ready.set(ready);
    }

    pub(in crate::default) fn units(&self) -> u32 {
        self.units
    }

    /// The units of the large part.
    pub(in crate::default) fn large(&self) -> Range<u32> {
        self.split..self.units
    }

    #[inline(always)]
    pub(in crate::default) fn is_small(&self, unit: u32) -> bool {
        unit < self.split
    }

    /// Whether a block has the words of pages, where it is in the large part.
    #[inline(always)]
    fn is_short(&self, start: u32, units: u32) -> bool {
        units <= CELL_UNITS && !self.is_small(start)
    }

    /// How many units from this one on have one tag together.
    #[inline(always)]
    pub(in crate::default) fn step(&self, unit: u32) -> u32 {
        if self.is_small(unit) { 1 } else { LARGE_STEP }
    }

    /// Whether a block may start at the unit.
    #[inline(always)]
    pub(in crate::default) fn may_start(&self, unit: u32) -> bool {
        self.is_small(unit) || unit.is_multiple_of(LARGE_STEP)
    }

    /// The first unit of those that have one tag together with this one.
    pub(in crate::default) fn first_with(&self, unit: u32) -> u32 {
        unit - unit % self.step(unit)
    }

    /// The word of a unit of the small part.
    #[inline(always)]
    fn word(&self, unit: u32) -> &AtomicU32 {
        // SAFETY: there is a word for whatever these bits may be.
        unsafe { self.words.within((unit & self.small) as usize) }
    }

    /// What starts in a unit's cell.
    #[inline(always)]
    fn start(&self, unit: u32) -> &AtomicU64 {
        // SAFETY: there are two numbers for each cell, whatever these bits may be.
        unsafe { self.cells.within(cell(unit & self.all)) }
    }

    /// What ends in a unit's cell.
    #[inline(always)]
    fn end(&self, unit: u32) -> &AtomicU64 {
        // SAFETY: as in `start`.
        unsafe { self.cells.within(cell(unit & self.all) + 1) }
    }

    /// The word of a page of the large part.
    #[inline]
    fn page(&self, unit: u32) -> &AtomicU32 {
        // SAFETY: there is a word for each page, whatever these bits may be.
        unsafe { self.pages.within(((unit & self.all) / LARGE_STEP) as usize) }
    }

    /// The tag of a unit; nothing where there is no memory.
    #[inline]
    pub(in crate::default) fn get(&self, unit: u32) -> Tag {
        if self.is_small(unit) {
            return word::read(self.word(unit).load(Relaxed));
        }
        let end = self.end(unit).load(Relaxed);
        match cell::read(self.start(unit).load(Relaxed), self.first_with(unit)) {
            Tag::None => match cell::ending_node(end, unit).or_else(|| self.short_at(unit)) {
                Some(node) => Tag::Free(node),
                None if cell::has_short(end) => word::read(self.page(unit).load(Relaxed)),
                None => Tag::None,
            },
            tag => tag,
        }
    }

    /// The small allocation that starts at a unit of the small part, where nothing more is noted about it.
    ///
    /// # Safety
    /// There is such a unit in that part.
    #[inline(always)]
    pub(in crate::default) unsafe fn live_small(&self, unit: u32) -> Option<Live<'_, AtomicU32>> {
        // SAFETY: by the caller's word.
        let tag = unsafe { self.known_word(unit) };
        let said = tag.load(Relaxed);
        let units = word::live_units(said)?;
        (units <= SMALL_UNITS).then_some(Live { tag, said, units })
    }

    /// The large allocation that starts at a unit of the large part, where nothing more is noted about it.
    ///
    /// # Safety
    /// There is such a unit in that part.
    #[inline(always)]
    pub(in crate::default) unsafe fn live_large(&self, unit: u32) -> Option<Live<'_, AtomicU64>> {
        // SAFETY: by the caller's word.
        let tag = unsafe { self.known_cell(unit) };
        let said = tag.load(Relaxed);
        let units = cell::live_units(said, unit)?;
        Some(Live { tag, said, units })
    }

    /// # Safety
    /// There is such a unit in the small part.
    #[inline(always)]
    unsafe fn known_word(&self, unit: u32) -> &AtomicU32 {
        debug_assert!(unit < self.units && self.is_small(unit));
        // SAFETY: by the caller's word; each unit of that part has a word.
        unsafe { self.words.within(unit as usize) }
    }

    /// # Safety
    /// There is such a unit in the large part.
    #[inline(always)]
    unsafe fn known_cell(&self, unit: u32) -> &AtomicU64 {
        debug_assert!(unit < self.units && !self.is_small(unit));
        // SAFETY: by the caller's word; each unit of that part has a cell, of two numbers.
        unsafe { self.cells.within(cell(unit)) }
    }

    /// The label of the stream that the allocation at this unit was made on; `None` where there was
    /// no room for it.
    pub(in crate::default) fn label_at(&self, unit: u32) -> Option<u32> {
        let units = self.get(unit).live_units()?;
        let word = |unit: u32| {
            let word = if self.is_small(unit) { self.word(unit) } else { self.page(unit) };
            word.load(Relaxed)
        };
        if !self.is_small(unit) && !self.is_short(unit, units) {
            return Some(cell::label(self.start(unit).load(Relaxed)));
        }
        let step = self.step(unit);
        if units > step { Some(word(unit + step)) } else { word::label(word(unit)) }
    }

    /// The first unit of a range, which is of one part, that has a tag. Pages that are not whole in
    /// the range do not count.
    pub(in crate::default) fn first_in(&self, range: Range<u32>) -> Option<u32> {
        let step = self.step(range.start);
        let first = range.start.checked_next_multiple_of(step)?;
        let end = range.end.min(self.units);
        let mut unit = first;
        while unit < end && end - unit >= step {
            if !self.is_small(unit) && unit.is_multiple_of(CELL_UNITS) && self.is_bare(unit) {
                unit = unit.saturating_add(CELL_UNITS);
                continue;
            }
            if self.get(unit) != Tag::None {
                return Some(unit);
            }
            unit += step;
        }
        None
    }

    /// The last unit with a tag from `first` to a unit; of a page its first one.
    pub(in crate::default) fn last_up_to(&self, unit: u32, first: u32) -> Option<u32> {
        let mut at = self.first_with(unit);
        while at >= first {
            let cell = at - at % CELL_UNITS;
            let is_last = at - cell == CELL_UNITS - LARGE_STEP;
            if !self.is_small(at) && is_last && self.is_bare(cell) {
                at = cell;
            } else if self.get(at) != Tag::None {
                return Some(at);
            }
            at = self.first_with(at.checked_sub(1)?);
        }
        None
    }

    /// Whether nothing starts or ends in a cell of the large part.
    fn is_bare(&self, cell: u32) -> bool {
        let word = |cell: u32| self.end(cell).load(Relaxed);
        let starts = cell::has_start(self.start(cell).load(Relaxed));
        // What ends in the next one may start here.
        let reaches_back =
            |next| cell::short(word(next)).is_some_and(|(behind, units, _)| behind < units);
        !starts
            && cell::is_bare_end(word(cell))
            && !cell.checked_add(CELL_UNITS).is_some_and(reaches_back)
    }

    /// The node of the free block that ends before a unit of this part.
    #[inline(always)]
    pub(super) fn free_before_in<const LARGE: bool>(&self, unit: u32) -> Option<u32> {
        let last = unit.wrapping_sub(1);
        if !LARGE {
            return word::free_node(self.word(last).load(Relaxed));
        }
        let end = self.end(last).load(Relaxed);
        match cell::ending_node(end, last) {
            None if cell::has_short(end) => self.free_page(last),
            node => node,
        }
    }

    /// The node of the free block that starts at a unit.
    #[inline(always)]
    pub(super) fn free_at_in<const LARGE: bool>(&self, unit: u32) -> Option<u32> {
        if !LARGE {
            return word::free_node(self.word(unit).load(Relaxed));
        }
        let start = self.start(unit).load(Relaxed);
        match cell::free_node(start, unit) {
            None if !cell::starts(start, unit) => self.free_short(unit),
            node => node,
        }
    }

    /// The same, where no longer block starts there.
    #[cold]
    #[inline(never)]
    fn free_short(&self, unit: u32) -> Option<u32> {
        self.short_at(unit).or_else(|| {
            let end = self.end(unit).load(Relaxed);
            if cell::has_short(end) { self.free_page(unit) } else { None }
        })
    }

    /// The node of the short free block that starts with a page, where the cell knows it that it ends in: the page's
    /// own or the next one.
    fn short_at(&self, unit: u32) -> Option<u32> {
        let unit = self.first_with(unit);
        let first = unit - unit % CELL_UNITS;
        [Some(first), first.checked_add(CELL_UNITS)].into_iter().flatten().find_map(|cell| {
            let end = self.end(cell).load(Relaxed);
            let (behind, units, node) = cell::short(end)?;
            (cell + behind - units == unit).then_some(node)
        })
    }

    #[inline(never)]
    fn free_page(&self, unit: u32) -> Option<u32> {
        word::free_node(self.page(unit).load(Relaxed))
    }

    /// Notes an allocation of what was in a front. The label stays when a block of the small part is freed: it is no
    /// tag.
    ///
    /// # Safety
    /// There are such units, small ones in the small part or large ones in the large.
    #[inline(always)]
    pub(in crate::default) unsafe fn set_live<const LARGE: bool>(
        &self,
        start: u32,
        units: u32,
        label: u32,
    ) {
        if LARGE {
            // SAFETY: by the caller's word.
            return unsafe { self.known_cell(start) }
                .store(cell::live(start, units, label), Relaxed);
        }
        let (word, behind) = word::live(units, 1, label);
        // SAFETY: by the caller's word.
        unsafe { self.known_word(start) }.store(word, Relaxed);
        if let Some(label) = behind {
            // SAFETY: as before; it is longer than a unit.
            unsafe { self.known_word(start + 1) }.store(label, Relaxed);
        }
    }

    #[inline(always)]
    fn set_live_in<const LARGE: bool>(&self, start: u32, units: u32, label: u32) {
        if LARGE {
            debug_assert!(units > CELL_UNITS);
            return self.start(start).store(cell::live(start, units, label), Relaxed);
        }
        let (word, behind) = word::live(units, 1, label);
        self.word(start).store(word, Relaxed);
        if let Some(label) = behind {
            self.word(start + 1).store(label, Relaxed);
        }
    }

    /// Notes an allocation, of whatever was free. Under the space's lock.
    #[inline(always)]
    pub(super) fn hand_out_in<const LARGE: bool>(&self, start: u32, units: u32, label: u32) {
        if LARGE && units <= CELL_UNITS {
            return self.hand_out_short(start, units, label);
        }
        self.set_live_in::<LARGE>(start, units, label);
    }

    #[cold]
    #[inline(never)]
    fn hand_out_short(&self, start: u32, units: u32, label: u32) {
        let (word, behind) = word::live(units, LARGE_STEP, label);
        self.set_page(start, word);
        if let Some(label) = behind {
            self.page(start + LARGE_STEP).store(label, Relaxed);
        }
    }

    /// Notes three numbers of 30 bits beside an allocation that has five units or more. They are no tags, and stay
    /// as long as the block is nobody else's. Under the space's lock.
    pub(super) fn set_inside(&self, start: u32, units: u32, numbers: [u32; 3]) {
        let numbers = numbers.map(|number| number & !word::KIND);
        if self.is_small(start) {
            let words = numbers.into_iter().zip(start + 2..);
            return words.for_each(|(word, unit)| self.word(unit).store(word, Relaxed));
        }
        let [low, high] = self.inside_of(start, units);
        let [low_said, high_said] = cell::beside(numbers);
        low.store(low_said, Relaxed);
        high.store(high_said, Relaxed);
    }

    /// The same; or anything, where nothing was noted.
    pub(super) fn inside(&self, start: u32, units: u32) -> [u32; 3] {
        if self.is_small(start) {
            let word = |unit| self.word(unit).load(Relaxed) & !word::KIND;
            return [2, 3, 4].map(|behind| word(start + behind));
        }
        cell::of_beside(self.inside_of(start, units).map(|number| number.load(Relaxed)))
    }

    /// The numbers of the cell behind that of a start, where nothing else begins or ends in it: mostly in the same
    /// line of the processor's cache as the start's own. Else those of that cell in a table of their own.
    #[inline]
    fn inside_of(&self, start: u32, units: u32) -> [&AtomicU64; 2] {
        debug_assert!(units > CELL_UNITS);
        let before = CELL_UNITS - start % CELL_UNITS;
        if units - before >= CELL_UNITS {
            let next = start + before;
            return [self.start(next), self.end(next)];
        }
        let at = cell(start & self.all);
        // SAFETY: as in `start`: fates have the places of cells.
        [at, at + 1].map(|at| unsafe { self.fates.within(at) })
    }

    /// Notes more about the allocation at a unit, which keeps its size.
    pub(in crate::default) fn set_noted(&self, start: u32, units: u32) {
        if self.is_small(start) {
            self.word(start).store(word::noted(units), Relaxed);
        } else if self.is_short(start, units) {
            self.page(start).store(word::noted(units), Relaxed);
        } else {
            let start = self.start(start);
            start.store(cell::noted(start.load(Relaxed)), Relaxed);
        }
    }

    /// Notes that an allocation is in a front, or waits.
    pub(in crate::default) fn set_cached(&self, start: u32, units: u32) {
        if self.is_short(start, units) {
            self.page(start).store(word::cached(units), Relaxed);
        } else {
            self.set_cached_whole(start, units);
        }
    }

    /// The same where it is no short one of the large part.
    pub(in crate::default) fn set_cached_whole(&self, start: u32, units: u32) {
        if self.is_small(start) {
            self.word(start).store(word::cached(units), Relaxed);
        } else {
            debug_assert!(units > CELL_UNITS);
            self.start(start).store(cell::cached(start, units), Relaxed);
        }
    }

    /// Notes a free block of this part where nothing starts or ends. Under the space's lock, as all that follows.
    #[inline(always)]
    pub(super) fn set_free_in<const LARGE: bool>(&self, start: u32, units: u32, node: u32) {
        self.set_free_start_in::<LARGE>(start, units, node);
        self.set_free_end_in::<LARGE>(start, units, node);
    }

    /// A short one of the large part is known by its end.
    #[inline(always)]
    fn set_free_start_in<const LARGE: bool>(&self, start: u32, units: u32, node: u32) {
        if !LARGE {
            self.word(start).store(word::free(node), Relaxed);
        } else if units > CELL_UNITS {
            self.start(start).store(cell::free(start, node), Relaxed);
        }
    }

    #[inline(always)]
    fn set_free_end_in<const LARGE: bool>(&self, start: u32, units: u32, node: u32) {
        let last = start + units - 1;
        if !LARGE {
            return self.word(last).store(word::free(node), Relaxed);
        }
        let end = self.end(last);
        let word = end.load(Relaxed);
        if cell::may_end(word) || cell::ending_node(word, last).is_some() {
            end.store(cell::with_end(word, last, units, node), Relaxed);
        } else {
            self.share_cell(start, units, node);
        }
    }

    /// Two free blocks end in a cell: a short one has the words of its pages instead.
    #[cold]
    #[inline(never)]
    fn share_cell(&self, start: u32, units: u32, node: u32) {
        let last = start + units - 1;
        let end = self.end(last);
        let (mut short, mut of_short, mut node_of_short) = (start, units, node);
        if units > CELL_UNITS {
            let word = end.load(Relaxed);
            let Some((behind, units, node)) = cell::short(word) else { return };
            (short, of_short, node_of_short) =
                (last - last % CELL_UNITS + behind - units, units, node);
            end.store(cell::without_end(word), Relaxed);
        }
        for unit in [short, short + of_short - LARGE_STEP] {
            self.set_page(unit, word::free(node_of_short));
        }
        if units > CELL_UNITS {
            end.store(cell::with_end(end.load(Relaxed), last, units, node), Relaxed);
        }
    }

    /// Writes the word of a page, and that its cell has one more such, if so.
    #[inline(never)]
    fn set_page(&self, unit: u32, word: u32) {
        let page = self.page(unit);
        if !word::is_tag(page.load(Relaxed)) {
            let end = self.end(unit);
            end.store(cell::with_short(end.load(Relaxed)), Relaxed);
        }
        page.store(word, Relaxed);
    }

    /// Nothing starts at the unit any more.
    #[inline(always)]
    pub(super) fn clear_start_in<const LARGE: bool>(&self, unit: u32) {
        if !LARGE {
            self.word(unit).store(0, Relaxed);
        } else if cell::starts(self.start(unit).load(Relaxed), unit) {
            self.start(unit).store(0, Relaxed);
        } else if cell::has_short(self.end(unit).load(Relaxed)) {
            self.clear_page(unit);
        }
    }

    /// No free block ends before the unit any more.
    #[inline(always)]
    pub(super) fn clear_end_in<const LARGE: bool>(&self, unit: u32) {
        let last = unit - 1;
        if !LARGE {
            return self.word(last).store(0, Relaxed);
        }
        let end = self.end(last).load(Relaxed);
        if cell::ending_node(end, last).is_some() {
            self.end(last).store(cell::without_end(end), Relaxed);
        } else if cell::has_short(end) {
            self.clear_page(last);
        }
    }

    /// Clears the word of a page.
    #[inline(never)]
    fn clear_page(&self, unit: u32) {
        let page = self.page(unit);
        if word::is_tag(page.load(Relaxed)) {
            let end = self.end(unit);
            end.store(cell::without_short(end.load(Relaxed)), Relaxed);
        }
        page.store(0, Relaxed);
    }

    /// Of a free block so many units remain, the last ones. Where it started there is to be an allocation next.
    #[inline(always)]
    pub(super) fn cut_head_in<const LARGE: bool>(
        &self,
        start: u32,
        taken: u32,
        rest: u32,
        node: u32,
    ) {
        if LARGE && taken <= CELL_UNITS {
            self.clear_start_in::<LARGE>(start);
        }
        if rest == 0 {
            self.clear_end_in::<LARGE>(start + taken);
        } else if LARGE && rest <= CELL_UNITS {
            self.clear_end_in::<LARGE>(start + taken + rest);
            self.set_free_end_in::<LARGE>(start + taken, rest, node);
        } else {
            // The last tag names the node already.
            self.set_free_start_in::<LARGE>(start + taken, rest, node);
        }
    }

    /// Of a free block so many units remain, the first ones, one at least.
    #[inline(always)]
    pub(super) fn cut_tail_in<const LARGE: bool>(
        &self,
        start: u32,
        rest: u32,
        taken: u32,
        node: u32,
    ) {
        self.clear_end_in::<LARGE>(start + rest + taken);
        if LARGE && rest <= CELL_UNITS {
            self.clear_start_in::<LARGE>(start);
        }
        // Where one unit is left, it is the first and the last.
        self.set_free_end_in::<LARGE>(start, rest, node);
    }

    /// As [`free_before_in`](Self::free_before_in), whichever part the unit is of, and so on.
    #[inline]
    pub(super) fn free_before(&self, unit: u32) -> Option<u32> {
        if self.is_small(unit.wrapping_sub(1)) {
            self.free_before_in::<false>(unit)
        } else {
            self.free_before_in::<true>(unit)
        }
    }

    #[inline]
    pub(super) fn free_at(&self, unit: u32) -> Option<u32> {
        if self.is_small(unit) {
            self.free_at_in::<false>(unit)
        } else {
            self.free_at_in::<true>(unit)
        }
    }

    pub(super) fn clear_start(&self, unit: u32) {
        if self.is_small(unit) {
            self.clear_start_in::<false>(unit)
        } else {
            self.clear_start_in::<true>(unit)
        }
    }

    pub(super) fn clear_end(&self, unit: u32) {
        if self.is_small(unit - 1) {
            self.clear_end_in::<false>(unit)
        } else {
            self.clear_end_in::<true>(unit)
        }
    }

    /// Has the system find the host's memory for the tags of these units at once: a fault for each page of
    /// them, as blocks are handed out there one by one, costs more. Only a help.
    pub(in crate::default) fn prepare(&self, units: Range<u32>) {
        let Some(last) = units.end.checked_sub(1).filter(|last| *last >= units.start) else {
            return;
        };
        if self.is_small(units.start) {
            return self.words.touch(units.start as usize..last as usize + 1);
        }
        let cells = cell(units.start)..cell(last) + 2;
        let is_ready = |ready: &Range<usize>| ready.start <= cells.start && cells.end <= ready.end;
        if !self.ready.get().is_some_and(|all| all.iter().any(is_ready)) {
            self.cells.touch(cells);
        }
    }
}

/// The place of a unit's cell.
#[inline(always)]
fn cell(unit: u32) -> usize {
    2 * (unit / CELL_UNITS) as usize + (SPAN - 2 * CELLS) * (unit / SPAN_UNITS) as usize
}

/// The bits of all units up to the one behind so many, and a last one.
fn mask_beyond(units: u32) -> u32 {
    u32::MAX.unbounded_shr(units.leading_zeros())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::default::class::MAX_UNITS;

    /// Six spans, of which so many are the small part.
    fn tags(small: u32) -> Tags {
        let tags = Tags::new(6 * SPAN_UNITS, small * SPAN_UNITS);
        tags.unwrap_or_else(|| panic!("no memory for 300 KiB"))
    }

    /// In whichever part they are.
    impl Tags {
        fn hand_out(&self, start: u32, units: u32, label: u32) {
            if self.is_small(start) {
                self.hand_out_in::<false>(start, units, label);
            } else {
                self.hand_out_in::<true>(start, units, label);
            }
        }

        /// What was in a front is an allocation again.
        pub(super) fn set_live_again(&self, start: u32, units: u32, label: u32) {
            assert!(self.is_small(start) == (units <= SMALL_UNITS) && start + units <= self.units);
            // SAFETY: as asserted.
            unsafe {
                if units <= SMALL_UNITS {
                    self.set_live::<false>(start, units, label);
                } else {
                    self.set_live::<true>(start, units, label);
                }
            }
        }

        /// The units of what fronts keep.
        pub(super) fn live_at(&self, unit: u32) -> Option<u32> {
            if unit >= self.units {
                return None;
            }
            // SAFETY: there is such a unit, of that part.
            unsafe {
                if self.is_small(unit) {
                    self.live_small(unit).map(|live| live.units)
                } else {
                    self.live_large(unit).map(|live| live.units)
                }
            }
        }

        pub(in crate::default) fn set_free(&self, start: u32, units: u32, node: u32) {
            if self.is_small(start) {
                self.set_free_in::<false>(start, units, node);
            } else {
                self.set_free_in::<true>(start, units, node);
            }
        }

        fn cut_head(&self, start: u32, taken: u32, rest: u32, node: u32) {
            if self.is_small(start) {
                self.cut_head_in::<false>(start, taken, rest, node);
            } else {
                self.cut_head_in::<true>(start, taken, rest, node);
            }
        }

        fn cut_tail(&self, start: u32, rest: u32, taken: u32, node: u32) {
            if self.is_small(start) {
                self.cut_tail_in::<false>(start, rest, taken, node);
            } else {
                self.cut_tail_in::<true>(start, rest, taken, node);
            }
        }
    }

    /// Lengths of blocks, short ones and longer ones, in the large part.
    const SHORT: [u32; 3] = [LARGE_STEP, 2 * LARGE_STEP, CELL_UNITS];
    const LONG: [u32; 3] = [CELL_UNITS + LARGE_STEP, 2 * SPAN_UNITS - 8, 2 * SPAN_UNITS];

    /// Whether no unit has a tag, and no cell says that its pages have some.
    fn is_clear(tags: &Tags) -> bool {
        let large = (tags.split..tags.units).step_by(CELL_UNITS as usize);
        let has_short = |unit| cell::has_short(tags.end(unit).load(Relaxed));
        let parts = [0..tags.split, tags.split..tags.units];
        parts.into_iter().all(|part| tags.first_in(part).is_none())
            && !large.into_iter().any(has_short)
    }

    #[test]
    fn to_prepare_pages_changes_no_tag() {
        let tags = tags(2);
        let starts = [3, SPAN_UNITS + 8, 2 * SPAN_UNITS, 6 * SPAN_UNITS - 136];
        starts.iter().for_each(|start| tags.hand_out(*start, 136, 5));
        // Over both parts, within a span, over all there is, beyond it, and nothing.
        let [all, some] = [6 * SPAN_UNITS, SPAN_UNITS + 9];
        for units in
            [0..all, 3..some, some..all, 0..all + SPAN_UNITS, 7..7, Range { start: 9, end: 2 }]
        {
            tags.prepare(units);
            let live = starts.map(|start| tags.get(start).live_units());
            assert_eq!(live, [Some(136); 4]);
        }
    }

    #[test]
    fn tags_say_what_was_written_and_nothing_elsewhere() {
        let tags = tags(6);
        let end = tags.units();
        tags.hand_out(0, 5, 7);
        tags.set_cached(5, 7);
        tags.set_free(end - 1, 1, 3);
        assert_eq!(tags.label_at(0), Some(7));
        let read = [0, 1, 5, end - 1, end, u32::MAX].map(|unit| tags.get(unit));
        let [live, none, cached, free, beyond, far] = read;
        assert_eq!((live, none, cached), (Tag::Live(5), Tag::None, Tag::Cached(7)));
        assert_eq!((free, beyond, far), (Tag::Free(3), Tag::None, Tag::None));
        assert_eq!(
            [0, SPAN_UNITS, 6, end].map(|end| tags.free_before(end)),
            [None, None, None, Some(3)]
        );
        assert_eq!(
            [0, 5, end - 1, end].map(|start| tags.free_at(start)),
            [None, None, Some(3), None]
        );
        let ranges = [0..end, 1..end, 6..end - 1, 6..end + 9, end..end + 9];
        let first = ranges.map(|range| tags.first_in(range));
        assert_eq!(first, [Some(0), Some(5), None, Some(end - 1), None]);
    }

    #[test]
    fn allocations_know_their_stream_and_may_be_noted() {
        let tags = tags(1);
        // Of one tag and of more, where each unit has one and where pages have, at the end of a
        // span and over several; and long ones wherever they may begin in a cell.
        let large = SPAN_UNITS;
        let blocks = [(1, 1), (2, 2), (4, 12), (large - 1, 1), (large, 8), (large + 8, 4080)];
        let at_ends = [(2 * large - 8, 16), (3 * large, 8192), (3 * large - 8, 136)];
        let anywhere = (0..16).map(|page| (3 * large + 8 * page, LONG[0]));
        for (start, units) in blocks.into_iter().chain(at_ends).chain(anywhere) {
            tags.hand_out(start, units, LABEL - 2);
            assert_eq!(tags.get(start), Tag::Live(units));
            assert_eq!(tags.label_at(start), Some(LABEL - 2));
            assert!(tags.first_in(start + 1..start + units).is_none());
            let is_usual = tags.is_small(start) == (units <= SMALL_UNITS);
            assert_eq!(tags.live_at(start), is_usual.then_some(units));
            tags.set_noted(start, units);
            assert_eq!((tags.get(start), tags.live_at(start)), (Tag::Noted(units), None));
            let kept = units > tags.step(start);
            assert_eq!(tags.label_at(start), kept.then_some(LABEL - 2));
            tags.set_cached(start, units);
            assert_eq!((tags.get(start), tags.label_at(start)), (Tag::Cached(units), None));
            tags.clear_start(start);
        }
        assert!(is_clear(&tags));
        // The longest there may be.
        tags.hand_out(large, MAX_UNITS, LABEL);
        assert_eq!((tags.get(large), tags.label_at(large)), (Tag::Live(MAX_UNITS), Some(LABEL)));
        tags.set_noted(large, MAX_UNITS);
        assert_eq!(tags.get(large), Tag::Noted(MAX_UNITS));
    }

    #[test]
    fn what_is_noted_inside_an_allocation_is_no_tag() {
        let tags = tags(1);
        let value = !word::KIND;
        // In both parts, at the end of a span and elsewhere; with a cell that has nothing else, and without one.
        let starts = [0, SPAN_UNITS, 2 * SPAN_UNITS - 16, 3 * SPAN_UNITS - 24, 4 * SPAN_UNITS - 32];
        for (start, units) in starts.into_iter().flat_map(|start| [136, 400].map(|of| (start, of)))
        {
            tags.hand_out(start, units, 5);
            for numbers in [[value - start, start, 3], [start, value, value - 1], [value; 3]] {
                tags.set_inside(start, units, numbers);
                assert_eq!(tags.inside(start, units), numbers);
            }
            assert_eq!((tags.get(start), tags.label_at(start)), (Tag::Live(units), Some(5)));
            assert!(tags.first_in(start + tags.step(start)..start + units).is_none());
            tags.set_cached(start, units);
            assert_eq!(tags.inside(start, units), [value; 3]);
            tags.clear_start(start);
        }
        // From two cells on one lies behind the start's that has nothing else.
        for start in (5 * SPAN_UNITS..5 * SPAN_UNITS + CELL_UNITS).step_by(LARGE_STEP as usize) {
            tags.set_inside(start, 2 * CELL_UNITS, [value; 3]);
            // SAFETY: fates have the places of cells.
            assert_eq!(unsafe { tags.fates.within(cell(start)) }.load(Relaxed), 0);
        }
        // Its cells are soon passed over again, and tags have their places.
        let cells = || (SPAN_UNITS..5 * SPAN_UNITS).step_by(CELL_UNITS as usize);
        assert!(cells().all(|cell| tags.is_bare(cell)));
        for cell in cells() {
            tags.set_free(cell + 8, 16, 7);
            assert_eq!((tags.get(cell), tags.free_at(cell + 8)), (Tag::None, Some(7)));
            assert_eq!(tags.free_before(cell + 24), Some(7));
            tags.clear_start(cell + 8);
            tags.clear_end(cell + 24);
            tags.hand_out(cell, CELL_UNITS + 8, 9);
            assert_eq!((tags.live_at(cell), tags.label_at(cell)), (Some(136), Some(9)));
            tags.clear_start(cell);
            assert!(tags.is_bare(cell));
        }
    }

    #[test]
    fn pages_of_the_large_part_have_one_tag() {
        let tags = tags(1);
        let large = SPAN_UNITS;
        tags.hand_out(large - 1, 1, 0);
        tags.hand_out(large, 8, 0);
        tags.set_free(large + 8, SPAN_UNITS - 8, 7);
        let [small, page, same] = [large - 1, large, large + 7].map(|unit| tags.get(unit));
        assert_eq!((small, page, same), (Tag::Live(1), Tag::Live(8), Tag::Live(8)));
        let [first, inside, last] =
            [large + 8, large + 16, 2 * large - 8].map(|unit| tags.get(unit));
        assert_eq!((first, inside, last), (Tag::Free(7), Tag::None, Tag::Free(7)));
        assert_eq!((tags.step(large - 1), tags.step(large)), (1, 8));
        assert!(tags.may_start(large - 1) && tags.may_start(large + 8));
        assert!(!tags.may_start(large + 9) && tags.first_with(large + 9) == large + 8);
    }

    /// All that a block leaves behind it and before it is gone with it, wherever its ends are in their cells.
    #[test]
    fn blocks_of_the_large_part_come_and_go() {
        let tags = tags(1);
        for page in 0..2 * CELL_UNITS / LARGE_STEP {
            let start = 2 * SPAN_UNITS - CELL_UNITS + page * LARGE_STEP;
            for units in SHORT.into_iter().chain(LONG) {
                let end = start + units;
                tags.set_free(start, units, u32::MAX >> 3);
                assert_eq!([tags.get(start), tags.get(end - 1)], [Tag::Free(u32::MAX >> 3); 2]);
                let nodes = [tags.free_at(start), tags.free_before(end)];
                assert_eq!(nodes, [Some(u32::MAX >> 3); 2]);
                assert_eq!([tags.free_before(start), tags.free_at(end)], [None; 2]);
                // Beside it one of the same cells.
                tags.set_free(end, LARGE_STEP, 1);
                tags.hand_out(start - LARGE_STEP, LARGE_STEP, 2);
                let seen = tags.first_in(start + LARGE_STEP..end - LARGE_STEP);
                assert_eq!(seen, None, "{page} {units}");
                tags.clear_start(start);
                tags.clear_end(end);
                assert_eq!([tags.get(start), tags.get(end - 1)], [Tag::None; 2]);
                let beside = (tags.get(start - 1), tags.free_at(end), tags.label_at(start - 1));
                assert_eq!(beside, (Tag::Live(LARGE_STEP), Some(1), Some(2)));
                tags.clear_start(end);
                tags.clear_end(end + LARGE_STEP);
                tags.clear_start(start - LARGE_STEP);
                assert!(is_clear(&tags));
            }
        }
    }

    /// Short free blocks have the words of pages where a longer one has the cell, whichever came first.
    #[test]
    fn a_cell_is_the_longer_ones() {
        let (tags, length) = (tags(1), LONG[0]);
        for short in SHORT.into_iter().filter(|units| *units < CELL_UNITS) {
            let start = 2 * SPAN_UNITS;
            for (before, is_free) in [(true, true), (true, false), (false, true), (false, false)] {
                // Before what starts in the cell, and behind what ends there.
                let middle = start + short;
                let end = middle + length;
                let give = |node| tags.set_free(start, short, node);
                if before {
                    give(1);
                }
                if is_free {
                    tags.set_free(middle, length, 2);
                } else {
                    tags.hand_out(middle, length, 2);
                }
                if !before {
                    give(1);
                }
                tags.set_free(end, short, 3);
                let long = if is_free { Tag::Free(2) } else { Tag::Live(length) };
                assert_eq!(
                    [start, middle, end].map(|at| tags.get(at)),
                    [Tag::Free(1), long, Tag::Free(3)]
                );
                let ends = [middle, end, end + short].map(|at| tags.free_before(at));
                assert_eq!(ends, [Some(1), is_free.then_some(2), Some(3)]);
                assert_eq!([start, end].map(|at| tags.free_at(at)), [Some(1), Some(3)]);
                let seen = (start..end + short).filter(|unit| unit % LARGE_STEP == 0);
                let seen = seen.filter(|unit| tags.get(*unit) != Tag::None).count();
                let pages = if short > LARGE_STEP { 2 } else { 1 };
                assert_eq!(seen, 2 * pages + 1 + usize::from(is_free));
                for unit in [start, middle, end] {
                    tags.clear_start(unit);
                }
                for unit in [middle, end, end + short] {
                    tags.clear_end(unit);
                }
                assert!(is_clear(&tags), "{short} {before} {is_free}");
            }
        }
    }

    /// Short ones of long ones, long ones of long ones, and all of it, from both ends.
    #[test]
    fn blocks_are_cut() {
        let lengths = || SHORT.into_iter().chain(LONG);
        for small in [1, 6] {
            let tags = tags(small);
            let start = SPAN_UNITS + 24;
            for (taken, rest) in
                lengths().flat_map(|taken| lengths().map(move |rest| (taken, rest)))
            {
                let (middle, end) = (start + taken, start + taken + rest);
                tags.set_free(start, taken + rest, 9);
                tags.cut_head(start, taken, rest, 9);
                tags.hand_out(start, taken, 4);
                let seen = (tags.get(start), tags.free_at(middle), tags.free_before(end));
                assert_eq!(seen, (Tag::Live(taken), Some(9), Some(9)), "{taken} {rest}");
                assert_eq!(tags.free_before(middle), None);
                tags.cut_head(middle, rest, 0, 9);
                tags.hand_out(middle, rest, 4);
                assert_eq!((tags.get(middle), tags.free_before(end)), (Tag::Live(rest), None));
                tags.clear_start(start);
                tags.clear_start(middle);

                tags.set_free(start, taken + rest, 9);
                tags.cut_tail(start, taken, rest, 9);
                tags.hand_out(middle, rest, 4);
                let seen = (tags.free_at(start), tags.free_before(middle), tags.get(middle));
                assert_eq!(seen, (Some(9), Some(9), Tag::Live(rest)), "{taken} {rest}");
                assert_eq!(tags.free_before(end), None);
                tags.clear_start(start);
                tags.clear_end(middle);
                tags.clear_start(middle);
                // What is beside labels is no tag.
                assert!(is_clear(&tags), "{taken} {rest}");
            }
        }
    }
    /// What is behind a part or before it, or of a number that no unit has, has a place where nothing is.
    #[test]
    fn every_number_has_a_place_and_every_cell_its_own() {
        for (spans, small) in [(1, 0), (6, 1), (6, 6), (8, 7), (9, 8), (16, 15), (33, 4)] {
            let (units, split) = (spans * SPAN_UNITS, small * SPAN_UNITS);
            let Some(tags) = Tags::new(units, split) else { panic!("no memory for 2 MiB") };
            let (mut last, mut places) = (None, 0);
            for unit in (split..units).step_by(CELL_UNITS as usize) {
                let place = std::ptr::from_ref(tags.start(unit)).addr();
                assert!(last < Some(place), "{unit} of {units}");
                last = Some(place);
                places += 1;
                tags.start(unit).store(cell::live(unit, CELL_UNITS + 8, 1), Relaxed);
                tags.end(unit).store(cell::with_end(0, unit, 8, 1), Relaxed);
            }
            assert_eq!(places, (spans - small) * (SPAN_UNITS / CELL_UNITS));
            (0..split).for_each(|unit| tags.word(unit).store(word::free(unit), Relaxed));
            let far = [u32::MAX, u32::MAX - SPAN_UNITS, u32::MAX / 2 + 1];
            for unit in far.into_iter().filter(|unit| unit & tags.all >= units).chain([units]) {
                assert_eq!(tags.get(unit), Tag::None, "{unit} of {units}");
                assert_eq!(tags.page(unit).load(Relaxed), 0);
            }
            let before = [tags.free_before(0), tags.free_before_in::<false>(0)];
            assert_eq!(before, [None; 2], "{units}");
            assert_eq!(tags.free_at_in::<false>(split), None);
            assert_eq!(tags.free_before_in::<true>(split), None);
        }
        assert!(Tags::new(0, SPAN_UNITS).is_none());
    }
}

//! What the pool's lock guards: free blocks, streams' epochs, physical memory and its addresses.
//!
//! Nothing here calls the driver.

pub(super) mod book;
pub(super) mod cut;
pub(super) mod free_set;
pub(super) mod owner;
pub(super) mod tags;

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::{Duration, Instant};

use intrusive_collections::UnsafeRef;

use crate::arena::Arena;
use crate::default::class::SMALL_UNITS;
use crate::default::front::Cached;
use crate::default::front::tide::{Ebb, Tide};
use crate::default::lifetimes::{self, Birth, Lifetimes};
use crate::default::memory::Memory;
use crate::event::Event;
use crate::physical::Extent;
use book::Book;
use cut::End;
use free_set::{Block, FreeSet};
use owner::Owner;
use tags::{CELL_UNITS, Tags};

/// With less than this fraction of the most that was live a program is as good as at its beginning.
const AS_GOOD_AS_NOTHING: u64 = 64;

/// Whether it is, is looked at more closely where less than this fraction seems to be live: what streams have freed to
/// their fronts is not known before they come.
const LITTLE: u64 = 8;

/// What fronts keep of what the pool has beyond the most that was live, which is nobody's loss; and the same once
/// callers have given back all: a program that goes through the same again finds more of it where it was.
const OF_SPARE: (u64, u64) = (1, 2);
const OF_SPARE_AGAIN: (u64, u64) = (3, 4);

/// Small blocks live in addresses of their own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Part {
    Small,
    Large,
}

impl Part {
    pub(super) const ALL: [Self; 2] = [Self::Small, Self::Large];

    #[inline]
    pub(super) fn of_size(units: u32) -> Self {
        if units <= SMALL_UNITS { Self::Small } else { Self::Large }
    }

    /// The large part or the small one.
    #[inline(always)]
    const fn of(large: bool) -> Self {
        if large { Self::Large } else { Self::Small }
    }

    pub(super) fn other(self) -> Self {
        match self {
            Self::Small => Self::Large,
            Self::Large => Self::Small,
        }
    }
}

/// Units of the pool, what is each stream's of them, and what its fronts may keep of what the pool has beyond the
/// most that was live.
#[derive(Clone, Copy, Default)]
pub(super) struct Share {
    pub(super) pool: u64,
    pub(super) each: u64,
    pub(super) spare: u64,
    /// Whether no large block is to stay in a front.
    pub(super) keeps_no_large: bool,
}

/// A share found once for as long as what it is of stays as it is: a division for each block that comes
/// back costs more than what it is for.
#[derive(Default)]
struct Shared {
    of: Shareable,
    share: Share,
}

/// What shares are of: granules of the pool, the most units that were live, and streams; whether fronts
/// keep large blocks, and whether what comes now comes again.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Shareable {
    granules: u64,
    peak_live: u64,
    streams: u64,
    keeps_no_large: bool,
    comes_again: bool,
}

pub(super) struct Space {
    /// What belongs to nobody, by part.
    pub(super) common: [FreeSet; 2],
    pub(super) books: Vec<Book>,
    /// The last of the books' labels.
    pub(super) labels: u32,
    pub(super) memory: Memory,
    /// From so many units out on large blocks are placed where others lose the least. All where somebody
    /// set a limit, none where nobody did and the program is in haste.
    pub(super) scarce_from: u64,
    /// Events that nobody uses now.
    pub(super) events: Vec<Event>,
    /// Handles that the driver would not take back, and their bytes.
    pub(super) orphans: Vec<(Extent, u64)>,
    /// Units that callers have or that are in fronts.
    pub(super) out_units: u64,
    /// Blocks of the same.
    pub(super) out_blocks: u64,
    /// Units in fronts, each as it was when it was asked last.
    in_fronts: u64,
    /// Whether the front that was asked last is loose.
    pub(super) is_loose: bool,
    /// The most units that callers had: see [`Stats::peak_live_bytes`](crate::Stats).
    pub(super) peak_live: u64,
    /// Units of memory of operations under way; and those of them whose addresses are in transit as well.
    pub(super) transit_units: u64,
    pub(super) leaving_units: u64,
    /// Freed blocks that wait for further streams, and their units.
    pub(super) deferred: crate::default::streams::deferred::DeferredFrees,
    pub(super) deferred_units: u64,
    /// The stream that such blocks wait for and that is asked about next.
    pub(super) deferred_asked: u32,
    /// Further streams that use an allocation, by its first unit: of noted allocations.
    pub(super) uses: std::collections::HashMap<u32, crate::default::streams::noted::Uses>,
    /// Whether memory becomes everybody's because a query says so.
    pub(super) opportunistic: bool,
    /// Whether requests may wait, here or on the GPU, before the pool grows.
    pub(super) patient: bool,
    /// Whether all memory is to come together, since there is hardly any more to be had.
    pub(super) gathers: bool,
    pub(super) borrowed: crate::default::streams::borrow::Borrowed,
    /// Threads that wait on the host for all that was freed.
    pub(super) awaits: u32,
    /// What each stream's share of the pool is, and of what it was found.
    shared: Shared,
    /// Blocks that came back, ever: tells growth whether anything was freed since the last, and how long the
    /// program has gone on.
    pub(super) returns: u64,
    tide: Tide,
    pub(super) lifetimes: Lifetimes,
    pub(super) growth: crate::default::growth::plan::Growth,
    pub(super) pace: crate::default::growth::pace::Pace,
    pub(super) waited: crate::default::streams::patience::Waited,
    pub(super) counters: crate::default::counters::Counters,
    /// Last, so that it outlives the sets.
    pub(super) blocks: Arena<Block>,
}

/// Gives a node back that is in no set any more.
///
/// It is nowhere then, so that a tag which names it still is not believed. There is none but after one pointer was freed
/// by two threads at the same instant, which the path through the front does not notice: the books count wrong from
/// there on, and blocks may overlap. But each is a union of such as were handed out, in the set that its owner and its
/// start name, and no node is taken out of a set that it is not in.
#[inline]
fn vacate(blocks: &mut Arena<Block>, block: &Block) {
    block.set_nowhere();
    blocks.give_back(block.id());
}

// SAFETY: the space owns every node that its sets link (the arena is private to it), so moving the
// whole to another thread moves all of them. It is not Sync: nodes hold `Cell`s.
unsafe impl Send for Space {}

impl Space {
    pub(super) fn new(
        memory: Memory,
        limited: bool,
        opportunistic: bool,
        moves_per_second: u32,
    ) -> Self {
        Self {
            common: [const { FreeSet::new() }; 2],
            books: Vec::new(),
            labels: 0,
            memory,
            scarce_from: if limited { 0 } else { u64::MAX },
            events: Vec::new(),
            orphans: Vec::new(),
            out_units: 0,
            out_blocks: 0,
            in_fronts: 0,
            is_loose: false,
            peak_live: 0,
            transit_units: 0,
            leaving_units: 0,
            deferred: crate::default::streams::deferred::DeferredFrees::default(),
            deferred_units: 0,
            deferred_asked: 0,
            uses: std::collections::HashMap::new(),
            opportunistic,
            patient: false,
            gathers: false,
            borrowed: crate::default::streams::borrow::Borrowed::default(),
            awaits: 0,
            shared: Shared::default(),
            returns: 0,
            tide: Tide::default(),
            lifetimes: Lifetimes::new(limited),
            growth: crate::default::growth::plan::Growth::default(),
            pace: crate::default::growth::pace::Pace::new(moves_per_second),
            waited: crate::default::streams::patience::Waited::default(),
            counters: crate::default::counters::Counters::default(),
            blocks: Arena::new(),
        }
    }

    /// The pool, and what each stream's share of it is.
    #[inline]
    pub(super) fn share_of_each(&mut self) -> Share {
        let (granules, streams) = (self.memory.mapped(), self.books.len() as u64);
        let (peak_live, keeps_no_large) = (self.peak_live, self.lifetimes.is_on());
        let comes_again = self.pace.made_once().is_some();
        let of = Shareable { granules, peak_live, streams, keeps_no_large, comes_again };
        if self.shared.of != of {
            let pool = granules * u64::from(self.memory.granule_units());
            let each = |units: u64| units / streams.max(1);
            let spare = pool.saturating_sub(of.peak_live);
            let (part, whole) = if comes_again { OF_SPARE_AGAIN } else { OF_SPARE };
            let (each, spare) = (each(pool), each(spare) / whole * part);
            self.shared = Shared { of, share: Share { pool, each, spare, keeps_no_large } };
        }
        self.shared.share
    }

    #[inline]
    pub(super) fn part_of(&self, unit: u32) -> Part {
        if unit < self.memory.split_unit() { Part::Small } else { Part::Large }
    }

    #[inline]
    fn set_mut(&mut self, owner: Owner, part: Part) -> &mut FreeSet {
        match owner.of_stream() {
            None => &mut self.common[part as usize],
            Some((index, parity)) => &mut self.books[index as usize].sets[parity][part as usize],
        }
    }

    /// The node of a free block, apart from the borrow of the space.
    #[inline]
    fn node(&self, id: u32) -> UnsafeRef<Block> {
        // SAFETY: the arena keeps its nodes alive and in place as long as the space lives; nothing
        // in this file keeps the reference longer than it has the space.
        unsafe { UnsafeRef::from_raw(self.blocks.get(id)) }
    }

    #[inline]
    fn unlink(&mut self, block: &Block, part: Part) {
        // SAFETY: a free block is in the set that its owner and its address name.
        unsafe { self.set_mut(block.owner(), part).remove(block) };
    }

    /// Gives a free block other bounds, within its part.
    #[inline]
    fn resize(&mut self, block: &Block, part: Part, start: u32, units: u32) {
        // SAFETY: as in `unlink`.
        unsafe { self.set_mut(block.owner(), part).change(block, start, units) };
    }

    /// Makes units free, and one with neighbours of the same owner. The caller owns them, and no
    /// tag of theirs but the first matters any more.
    ///
    /// A stream's block also is one with nobody's neighbours that are no longer than itself: the
    /// stream's next requests find one block where there would be two, and what others lose by it
    /// for a while is no more than they lose by the stream's using the block.
    #[inline]
    pub(super) fn give(&mut self, tags: &Tags, start: u32, units: u32, owner: Owner) {
        let now = owner.of_stream().map_or(0, |(stream, _)| self.books[stream as usize].marks);
        self.give_freed_at(tags, start, units, owner, now);
    }

    /// As [`give`](Self::give), for what was freed before so many of its owner's marks.
    #[inline]
    pub(super) fn give_freed_at(
        &mut self,
        tags: &Tags,
        start: u32,
        units: u32,
        owner: Owner,
        freed_at: u64,
    ) {
        match self.part_of(start) {
            Part::Small => self.give_in::<false>(tags, start, units, owner, freed_at),
            Part::Large => self.give_in::<true>(tags, start, units, owner, freed_at),
        }
    }

    fn give_in<const LARGE: bool>(
        &mut self,
        tags: &Tags,
        start: u32,
        units: u32,
        owner: Owner,
        freed_at: u64,
    ) {
        let part = usize::from(LARGE);
        let Self { common, books, blocks, .. } = self;
        // A neighbour that is nobody's too is one with all that is nobody's behind it; beyond a stream's own
        // there may be something of nobody's.
        let (own, mut nobodys) = match owner.of_stream() {
            None => (&mut common[part], None),
            Some((index, parity)) => {
                let nobodys = Some(&mut common[part]).filter(|set| !set.is_empty());
                (&mut books[index as usize].sets[parity][part], nobodys)
            }
        };
        let (mut first, mut end) = (start, start + units);
        // The node that becomes the block's, and whether it is in the owner's set.
        let mut kept: Option<(UnsafeRef<Block>, bool)> = None;
        let mut freed_at = freed_at;
        let mut absorb = |block: u32, so_far: u32, by: End, at: u32| {
            // SAFETY: the arena keeps its nodes alive and in place as long as the space lives.
            let block = unsafe { UnsafeRef::from_raw(blocks.get(block)) };
            let (start, units) = (block.start(), block.units());
            // A tag is taken at its word only where the node says the same: see `vacate`.
            let meets = match by {
                End::Last => start + units,
                End::First => start,
            };
            if meets != at {
                return None;
            }
            let is_own = block.owner() == owner;
            if is_own {
                freed_at = freed_at.max(block.freed_at());
                if kept.is_some() {
                    // SAFETY: a free block is in the set that its owner and its address name.
                    unsafe { own.remove(&block) };
                }
            } else {
                let nobodys = nobodys.as_mut().filter(|_| block.owner() == Owner::NOBODY)?;
                if units > so_far {
                    return None;
                }
                // SAFETY: as above.
                unsafe { nobodys.remove(&block) };
            }
            match kept {
                Some(_) => vacate(blocks, &block),
                None => kept = Some((block, is_own)),
            }
            Some((start, units, is_own && nobodys.is_none()))
        };
        // What was short may become long, whose tags are elsewhere.
        let is_short = |units| LARGE && units <= CELL_UNITS;
        if is_short(units) {
            tags.clear_start_in::<LARGE>(start);
        }
        while let Some(left) = tags.free_before_in::<LARGE>(first)
            && let Some((start, units, last)) = absorb(left, end - first, End::Last, first)
        {
            tags.clear_start_in::<LARGE>(first);
            tags.clear_end_in::<LARGE>(first);
            if is_short(units) {
                tags.clear_start_in::<LARGE>(start);
            }
            first = start;
            if last {
                break;
            }
        }
        while let Some(right) = tags.free_at_in::<LARGE>(end)
            && let Some((_, more, last)) = absorb(right, end - first, End::First, end)
        {
            tags.clear_start_in::<LARGE>(end);
            // What is given has no last tag.
            if end != start + units {
                tags.clear_end_in::<LARGE>(end);
            }
            if is_short(more) {
                tags.clear_end_in::<LARGE>(end + more);
            }
            end += more;
            if last {
                break;
            }
        }
        let node = match kept {
            Some((node, true)) => {
                // SAFETY: as above.
                unsafe { own.change(&node, first, end - first) };
                node
            }
            other => {
                let node = other.map_or_else(
                    || {
                        let id = blocks.take(Block::vacant);
                        // SAFETY: as above.
                        unsafe { UnsafeRef::from_raw(blocks.get(id)) }
                    },
                    |(node, _)| node,
                );
                node.set(first, end - first, owner);
                // SAFETY: the node stays where it is, and changes only through the set, until it is
                // taken out; it is in none now.
                unsafe { own.insert(&node) };
                node
            }
        };
        // Of the whole, although parts of it may have been freed before.
        node.set_freed_at(freed_at);
        tags.set_free_in::<LARGE>(first, end - first, node.id());
    }

    /// Has two owners change sets: what was one's is the other's.
    pub(super) fn exchange(&mut self, part: Part, a: Owner, b: Owner) {
        let set_of_a = std::mem::take(self.set_mut(a, part));
        let set_of_b = std::mem::replace(self.set_mut(b, part), set_of_a);
        *self.set_mut(a, part) = set_of_b;
        for owner in [a, b] {
            self.set_mut(owner, part).of_at_least(1).for_each(|block| block.set_owner(owner));
        }
    }

    /// Takes a whole free block out.
    pub(super) fn take_whole(&mut self, tags: &Tags, id: u32) -> (u32, u32, Owner) {
        let block = self.node(id);
        let (start, units) = (block.start(), block.units());
        self.unlink(&block, self.part_of(start));
        tags.clear_start(start);
        tags.clear_end(start + units);
        vacate(&mut self.blocks, &block);
        (start, units, block.owner())
    }

    /// Takes the last units of a free block out, which has more: where they start.
    #[inline]
    fn cut_tail<const LARGE: bool>(&mut self, tags: &Tags, block: &Block, units: u32) -> u32 {
        let (first, rest) = (block.start(), block.units() - units);
        tags.cut_tail_in::<LARGE>(first, rest, units, block.id());
        self.resize(block, Part::of(LARGE), first, rest);
        first + rest
    }

    /// Takes the first units of a free block out.
    pub(super) fn take_head(&mut self, tags: &Tags, id: u32, units: u32) {
        let block = self.node(id);
        tags.clear_start(block.start());
        match self.part_of(block.start()) {
            Part::Small => self.cut_head::<false>(tags, &block, units),
            Part::Large => self.cut_head::<true>(tags, &block, units),
        }
    }

    /// The same, but what the first of them is is for the caller to say.
    #[inline(always)]
    fn cut_head<const LARGE: bool>(&mut self, tags: &Tags, block: &Block, units: u32) {
        let (start, rest) = (block.start(), block.units() - units);
        tags.cut_head_in::<LARGE>(start, units, rest, block.id());
        if rest == 0 {
            self.unlink(block, Part::of(LARGE));
            vacate(&mut self.blocks, block);
        } else {
            self.resize(block, Part::of(LARGE), start + units, rest);
        }
    }

    /// Best fit over what the stream may use: its own and nobody's, the smallest of all.
    #[inline]
    pub(super) fn best_fit(&self, stream: u32, units: u32, part: Part) -> Option<UnsafeRef<Block>> {
        let part = part as usize;
        let book = &self.books[stream as usize];
        let smaller = |a: Option<UnsafeRef<Block>>, set: &FreeSet| match (a, set.best_fit(units)) {
            (Some(a), Some(b)) => Some(if b.units() < a.units() { b } else { a }),
            (a, b) => a.or(b),
        };
        let own = smaller(book.sets[0][part].best_fit(units), &book.sets[1][part]);
        smaller(own, &self.common[part])
    }

    /// Whether large blocks are placed with care. That is in vain where the front gives away a sixteenth of a
    /// block for a hit, as it does where sizes do not come again, and would be most of what a request costs.
    #[inline]
    pub(super) fn is_scarce(&self) -> bool {
        self.out_units >= self.scarce_from && !self.is_loose
    }

    /// Whether nobody set a limit and the program is in haste, as of the last growth.
    pub(super) fn is_in_haste(&self) -> bool {
        self.scarce_from == u64::MAX
    }

    /// Hands out the best fit, or where memory is scarce what costs the least movable memory.
    #[inline]
    pub(super) fn place(
        &mut self,
        tags: &Tags,
        stream: u32,
        units: u32,
        part: Part,
    ) -> Option<u32> {
        match part {
            Part::Small => self.place_in::<false>(tags, stream, units),
            Part::Large => self.place_in::<true>(tags, stream, units),
        }
    }

    #[inline]
    fn place_in<const LARGE: bool>(&mut self, tags: &Tags, stream: u32, units: u32) -> Option<u32> {
        let part = Part::of(LARGE);
        let cares = self.lifetimes.is_on() || self.is_scarce();
        let (block, end) = if LARGE && cares {
            let (id, end) = self.choose(stream, units, part)?;
            (self.node(id), end)
        } else {
            (self.best_fit(stream, units, part)?, End::First)
        };
        let start = if end == End::Last && block.units() > units {
            self.cut_tail::<LARGE>(tags, &block, units)
        } else {
            let start = block.start();
            self.cut_head::<LARGE>(tags, &block, units);
            start
        };
        self.hand_out_in::<LARGE>(tags, stream, start, units);
        Some(start)
    }

    pub(super) fn hand_out(&mut self, tags: &Tags, stream: u32, start: u32, units: u32) {
        match self.part_of(start) {
            Part::Small => self.hand_out_in::<false>(tags, stream, start, units),
            Part::Large => self.hand_out_in::<true>(tags, stream, start, units),
        }
    }

    #[inline]
    fn hand_out_in<const LARGE: bool>(&mut self, tags: &Tags, stream: u32, start: u32, units: u32) {
        tags.hand_out_in::<LARGE>(start, units, self.books[stream as usize].label);
        self.out_units += u64::from(units);
        self.out_blocks += 1;
        if units > SMALL_UNITS {
            if self.lifetimes.is_on() {
                self.note_birth(tags, stream, start, units);
            } else {
                self.lifetimes.pass_by(stream);
            }
        }
        self.memory.cover(start, units);
    }

    #[inline(never)]
    fn note_birth(&mut self, tags: &Tags, stream: u32, start: u32, units: u32) {
        let live = self.live_units();
        let course = &mut self.books[stream as usize].course;
        let birth = self.lifetimes.begin(stream, course, units, live);
        tags.set_inside(start, units, birth.noted());
    }

    #[inline(never)]
    fn note_end(&mut self, tags: &Tags, stream: u32, start: u32, units: u32) {
        let birth = Birth::of_noted(tags.inside(start, units));
        let course = &mut self.books[stream as usize].course;
        self.lifetimes.end(course, units, birth);
    }

    /// Notes what a front has and had, and with it the most that callers had.
    #[inline]
    pub(super) fn note_front(&mut self, front: Cached) {
        self.is_loose = front.is_loose;
        self.in_fronts = self.in_fronts.wrapping_add_signed(front.change);
        let cached = self.in_fronts.saturating_sub(front.now) + front.least;
        self.peak_live = self.peak_live.max(self.out_units.saturating_sub(cached));
    }

    /// What callers have: what is out and in no front.
    #[inline]
    fn live_units(&self) -> u64 {
        self.out_units.saturating_sub(self.in_fronts)
    }

    /// Notes what callers have now.
    #[inline]
    pub(super) fn note_peak(&mut self) {
        self.peak_live = self.peak_live.max(self.live_units());
    }

    /// Whether callers have so much less than they had that fronts are better emptied, of a pool made then: what
    /// [`note_ebb`](Self::note_ebb) is told.
    #[inline]
    pub(super) fn ebb(&mut self, made: Instant) -> Option<Ebb> {
        let ebb = self.tide.ebb(self.live_units());
        if !ebb.is_some_and(|ebb| ebb.is_first) && self.lifetimes.is_overdue() {
            let now = self.moment(made);
            self.lifetimes.look(now);
        }
        ebb
    }

    /// Whether so little seems to be live that it may be as good as nothing.
    pub(super) fn is_little(&self) -> bool {
        self.live_units() < self.peak_live / LITTLE
    }

    /// Notes an ebb. Where little seems to be live: what all fronts have.
    pub(super) fn note_ebb(&mut self, ebb: Ebb, in_fronts: Option<u64>, made: Instant) {
        let nothing = self.peak_live / AS_GOOD_AS_NOTHING;
        if in_fronts.is_some_and(|units| self.out_units.saturating_sub(units) < nothing) {
            self.begin_anew(made);
        }
        if ebb.is_first {
            let end = self.moment(made);
            self.lifetimes.end_round(end);
        }
    }

    /// Callers have given back as good as all that they had.
    #[cold]
    fn begin_anew(&mut self, made: Instant) {
        self.lifetimes.begin_anew();
        let now = self.moment(made);
        self.pace.begin_anew(now.at, now.made, self.returns);
    }

    /// Now, of a pool made then; without a rate of moves no time counts, and each program counts as in haste.
    fn moment(&self, made: Instant) -> lifetimes::Moment {
        let at = if self.pace.has_rate() { made.elapsed() } else { Duration::ZERO };
        lifetimes::Moment { at, made: self.counters.created }
    }

    /// Takes a block back from a caller or a front, as free memory of the stream's open epoch.
    #[inline]
    pub(super) fn take_back(&mut self, tags: &Tags, stream: u32, start: u32, units: u32) {
        self.out_units -= u64::from(units);
        self.out_blocks -= 1;
        self.returns += 1;
        if units > SMALL_UNITS && self.lifetimes.is_on() {
            self.note_end(tags, stream, start, units);
        }
        let owner = self.books[stream as usize].open_owner(stream);
        self.give(tags, start, units, owner);
    }

    /// The free block that starts at the unit, if the stream may use it.
    pub(super) fn usable_at(&self, tags: &Tags, unit: u32, stream: u32) -> Option<&Block> {
        // There a tag would be a page of the host's memory by itself, which a pool's first request would wait for.
        if self.memory.ends_part(unit) {
            return None;
        }
        let id = tags.free_at(unit)?;
        let block = self.blocks.get(id);
        (block.start() == unit && block.owner().is_usable_by(stream)).then_some(block)
    }

    /// The free block that ends before the unit, if the stream may use it.
    pub(super) fn usable_before(&self, tags: &Tags, unit: u32, stream: u32) -> Option<&Block> {
        // As in `usable_at`.
        if unit == 0 || unit == self.memory.split_unit() {
            return None;
        }
        let id = tags.free_before(unit)?;
        let block = self.blocks.get(id);
        (block.end() == unit && block.owner().is_usable_by(stream)).then_some(block)
    }

    /// The sets that a stream may use, in one part.
    pub(super) fn usable_sets(&self, stream: u32, part: Part) -> [&FreeSet; 3] {
        let book = &self.books[stream as usize];
        [&book.sets[0][part as usize], &book.sets[1][part as usize], &self.common[part as usize]]
    }

    /// Best fit over runs: neighbours that the sets keep apart because their owners differ, but
    /// that this stream may use all the same. Looks at the runs of no more than `LOOKED_AT` blocks, the
    /// smallest of its own and, where it has more, the longest, which are what is short of a long request;
    /// and at a long run only once: what two streams freed by turns may be one of thousands.
    pub(super) fn place_in_run(
        &mut self,
        tags: &Tags,
        stream: u32,
        units: u32,
        part: Part,
    ) -> Option<u32> {
        const LOOKED_AT: usize = 2048;
        const LONG: usize = 8;
        let kinds = self.usable_sets(stream, part).iter().filter(|set| !set.is_empty()).count();
        if kinds < 2 {
            return None;
        }
        let mut best: Option<(u32, u32)> = None;
        // The long ones, by their ends.
        let mut known = BTreeMap::new();
        let book = &self.books[stream as usize];
        let own = || book.sets.iter().map(|sets| &sets[part as usize]);
        let all = own().map(|set| set.blocks() as usize).sum::<usize>() <= LOOKED_AT;
        let (smallest, longest_of_each) =
            if all { (LOOKED_AT, 0) } else { (LOOKED_AT / 2, LOOKED_AT / 4) };
        let smallest = own().flat_map(|set| set.of_at_least(1)).take(smallest);
        let longest = own().flat_map(|set| set.largest_first().take(longest_of_each));
        for block in smallest.chain(longest) {
            let around = known.range(block.end()..).next();
            if around.is_some_and(|(_, start)| *start <= block.start()) {
                continue;
            }
            let (Range { start, end }, blocks) = self.usable_run(tags, block, stream);
            if blocks > LONG {
                known.insert(end, start);
            }
            let total = end - start;
            if total >= units && best.is_none_or(|(least, _)| total < least) {
                best = Some((total, start));
            }
        }
        let (_, start) = best?;
        self.take_run(tags, start, units);
        self.hand_out(tags, stream, start, units);
        self.note_peak();
        Some(start)
    }

    /// The run that a free block of a stream's is in, all around it that the stream may use; and of how many
    /// blocks it is.
    fn usable_run(&self, tags: &Tags, block: &Block, stream: u32) -> (Range<u32>, usize) {
        let (mut start, mut end, mut blocks) = (block.start(), block.end(), 1);
        while let Some(left) = self.usable_before(tags, start, stream) {
            start = left.start();
            blocks += 1;
        }
        while let Some(right) = self.usable_at(tags, end, stream) {
            end = right.end();
            blocks += 1;
        }
        (start..end, blocks)
    }

    /// Takes units out of neighbouring free blocks, from the start of the first.
    fn take_run(&mut self, tags: &Tags, start: u32, units: u32) {
        let (mut at, end) = (start, start + units);
        while at < end {
            let Some(id) = tags.free_at(at) else { return };
            let take = self.blocks.get(id).units().min(end - at);
            self.take_head(tags, id, take);
            at += take;
        }
    }

    /// Whether this is the pool's only stream, and one that keeps what it frees.
    pub(super) fn is_sole(&self, stream: u32) -> bool {
        let lazy = |book: &Book| matches!(book.recording, book::Recording::Lazy(_));
        self.books.len() == 1 && self.books.get(stream as usize).is_some_and(lazy)
    }

    /// Free units, whoever owns them: what is neither out, nor waits for further streams, nor is in transit. Summed
    /// up from the sets it would take a look at every stream.
    pub(super) fn free_units(&self) -> u64 {
        let all = self.memory.mapped() * u64::from(self.memory.granule_units());
        let others = self.out_units + self.deferred_units + self.transit_units;
        all.saturating_sub(others)
    }

    /// The same by the sets.
    pub(super) fn free_units_of_sets(&self) -> u64 {
        let common: u64 = self.common.iter().map(FreeSet::units).sum();
        common + self.books.iter().map(Book::units).sum::<u64>()
    }

    /// The largest free block, whoever owns it.
    pub(super) fn largest_free_units(&self) -> u32 {
        let own = self.books.iter().flat_map(|book| book.sets.iter().flatten());
        let sets = own.chain(&self.common);
        sets.filter_map(FreeSet::largest).map(Block::units).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::default::class::LARGE_STEP;
    use book::Recording;
    use tags::Tag;

    #[test]
    fn fronts_keep_half_of_what_is_to_spare_and_of_what_comes_again_three_quarters() {
        let mut memory = Memory::new(0, 64, 2 << 20, 8);
        let at = memory.range(Part::Large).start;
        memory.reserve(at, 16);
        memory.settle(at);
        memory.enter(Extent(1), at, 16);
        let mut space = Space::new(memory, false, true, 1000);
        for _ in 0..2 {
            space.books.push(Book::new(book::Recording::Eager, 0));
        }
        space.peak_live = 12 * u64::from(space.memory.granule_units());
        let kept = |space: &mut Space| {
            let Share { each, spare, .. } = space.share_of_each();
            [each, spare].map(|units| units / u64::from(space.memory.granule_units() / 4))
        };
        // Of sixteen granules four are to spare; in quarters of a granule, for each of two streams.
        assert_eq!(kept(&mut space), [32, 4]);
        space.returns = 1000;
        space.begin_anew(Instant::now());
        assert_eq!(kept(&mut space), [32, 6]);
    }

    /// As after a pointer was freed by two threads at once: beside a block are tags of a node that is elsewhere, and
    /// of one that is no block's.
    #[test]
    fn a_tag_is_not_believed_where_its_node_lies_elsewhere() {
        let mut space = Space::new(Memory::new(0, 64, 2 << 20, 8), false, true, 0);
        let Some(tags) = Tags::new(64 << 12, 9 << 12) else { panic!("no memory for the tags") };
        let start = 10 << 12;
        let mut give = |at: u32| {
            space.give(&tags, start + at, 8, Owner::NOBODY);
            let Some(id) = tags.free_at(start + at) else { panic!("no block") };
            id
        };
        let [elsewhere, gone] = [64, 128].map(&mut give);
        space.take_whole(&tags, gone);
        tags.set_free(start + 16, 8, elsewhere);
        tags.set_free(start + 32, 8, gone);
        space.give(&tags, start + 24, 8, Owner::NOBODY);
        let common = &space.common[Part::Large as usize];
        assert!(common.agrees());
        assert_eq!((common.blocks(), common.units(), space.blocks.in_use()), (2, 16, 2));
    }

    /// A space of one stream, with free memory in the large part: where each block begins there, its units, and
    /// whether it is the stream's or nobody's.
    fn of_blocks(blocks: &[(u32, u32, bool)]) -> (Space, Tags, u32) {
        let mut space = Space::new(Memory::new(0, 64, 2 << 20, 8), false, true, 0);
        let Some(tags) = Tags::new(64 << 12, 9 << 12) else { panic!("no memory for the tags") };
        space.books.push(Book::new(Recording::Eager, 0));
        let first = 10 << 12;
        for (at, units, is_own) in blocks {
            let owner = if *is_own { space.books[0].open_owner(0) } else { Owner::NOBODY };
            space.give(&tags, first + at, *units, owner);
        }
        (space, tags, first)
    }

    /// What streams have freed to their fronts is known once they come again.
    #[test]
    fn a_program_is_at_its_beginning_again_by_what_all_fronts_have() {
        let (mut space, _, _) = of_blocks(&[]);
        space.returns = 1000;
        let made = Instant::now();
        let mut begins = |live: u64, in_fronts: u64| {
            space.out_units = live;
            space.note_peak();
            let ebb = space.ebb(made)?;
            space.note_ebb(ebb, space.is_little().then_some(in_fronts), made);
            let begins = space.pace.made_once().is_some();
            space.pace = crate::default::growth::pace::Pace::new(0);
            Some(begins)
        };
        assert_eq!(begins(64 << 10, 0), None);
        // An eighth seems to be live: nobody looks closer.
        assert_eq!(begins(8 << 10, 8 << 10), Some(false));
        assert_eq!([begins(7000, 5976), begins(6000, 4977)], [Some(false), Some(true)]);
        assert_eq!(begins(6000, 6000), None, "no ebb");
    }

    /// What others lose by it is no more than by the stream's using what it frees.
    #[test]
    fn a_streams_block_takes_in_nobodys_neighbours_that_are_no_longer() {
        for (before, behind, whole) in [(8, 8, 32), (16, 16, 48), (24, 8, 24), (8, 40, 24)] {
            let blocks = [(64 - before, before, false), (80, behind, false), (64, 16, true)];
            let (space, _, _) = of_blocks(&blocks);
            let own = space.books[0].units();
            assert_eq!(own, whole, "{before} before and {behind} behind");
            assert_eq!(
                own + space.common[Part::Large as usize].units(),
                u64::from(before + behind + 16)
            );
        }
    }

    /// Of runs of neighbours the shortest that is long enough, from its start.
    #[test]
    fn a_run_is_the_shortest_that_suffices() {
        let runs = [(0, 40), (256, 24), (512, 16), (768, 32)];
        let blocks =
            runs.iter().flat_map(|(at, half)| [(*at, *half, true), (at + half, half + 8, false)]);
        let blocks: Vec<_> = blocks.collect();
        let (mut space, tags, first) = of_blocks(&blocks);
        assert_eq!(space.common[Part::Large as usize].blocks(), 4, "none became the stream's");
        let mut place = |units| space.place_in_run(&tags, 0, units, Part::Large);
        assert_eq!(place(56), Some(first + 256));
        assert_eq!(place(64), Some(first + 768));
        assert_eq!([place(88), place(88)], [Some(first), None]);
    }

    /// Short blocks and longer ones of the large part, which two streams free and nobody owns in the end.
    #[test]
    fn blocks_leave_no_tag_inside_what_they_become() {
        let mut space = Space::new(Memory::new(0, 64, 2 << 20, 8), false, true, 0);
        let Some(tags) = Tags::new(64 << 12, 9 << 12) else { panic!("no memory for the tags") };
        let (first, end) = (10 << 12, 11 << 12);
        space.books.extend([(); 2].map(|()| Book::new(Recording::Eager, 0)));
        space.give(&tags, first, end - first, Owner::NOBODY);
        let mut live: BTreeMap<u32, u32> = BTreeMap::new();
        let mut seed = 1_u64;
        let mut random = |bound: usize| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) as usize % bound
        };
        for _ in 0..if cfg!(miri) { 100 } else { 4000 } {
            let stream = random(2);
            match random(8) {
                0..=3 => {
                    let most = [4, 16, 60][random(3)];
                    let pages = 1 + random(most) as u32;
                    let units = pages * LARGE_STEP;
                    let placed = space.place(&tags, stream as u32, units, Part::Large);
                    live.extend(placed.map(|start| (start, units)));
                }
                4..=6 if !live.is_empty() => {
                    let freed = live.iter().nth(random(live.len()));
                    let Some((start, units)) = freed.map(|(start, units)| (*start, *units)) else {
                        continue;
                    };
                    live.remove(&start);
                    space.take_back(&tags, stream as u32, start, units);
                }
                _ => {
                    let sets = space.books[stream].sets.iter().flatten();
                    let Some(id) = sets.flat_map(FreeSet::first).map(Block::id).next() else {
                        continue;
                    };
                    let (start, units, _) = space.take_whole(&tags, id);
                    space.give(&tags, start, units, Owner::NOBODY);
                }
            }
            let mut blocks: Vec<_> =
                live.iter().map(|(start, units)| (*start, *units, Tag::Live(*units))).collect();
            let free = space.every_free_block();
            blocks.extend(free.map(|of| (of.start(), of.units(), Tag::Free(of.id()))));
            blocks.sort_unstable_by_key(|(start, ..)| *start);
            let mut at = first;
            for (start, units, tag) in blocks {
                assert_eq!((start, tags.get(start)), (at, tag));
                at += units;
                let last = at - LARGE_STEP;
                let is_tagged = matches!(tag, Tag::Free(_)) && last > start;
                assert_eq!(tags.first_in(start + LARGE_STEP..at), is_tagged.then_some(last));
            }
            assert_eq!(at, end);
        }
    }
}

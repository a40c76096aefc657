//! Where a request that nothing fits is put, and from what: the plan, without the driver.
//!
//! A *window* is free memory and holes in a row, as long as the request. Its holes are *gaps*,
//! filled with new extents or with wholly free ones from elsewhere. A free block that ends at a
//! hole grows in place: that window lacks the least.

use std::cmp::Reverse;
use std::time::Duration;

use smallvec::SmallVec;

use super::policy::{Allowance, Growths, Policy, SIXTEENTHS_AT_MOST, has_sixteenths};
use super::sources::Sources;
use crate::default::memory::split::Rest;
use crate::default::space::owner::Owner;
use crate::default::space::tags::Tags;
use crate::default::space::{Part, Space};
use crate::fence::{Fence, TimelineId};
use crate::physical::Extent;
use crate::region::{Region, State};

/// Holes looked at for one request, these many of the largest and then the smallest, and windows of which memory is
/// sought for. What lies beside the largest is what grows in place.
const HOLES_LOOKED_AT: usize = 4096;
const LARGEST_LOOKED_AT: usize = 16;
const WINDOWS_TRIED: usize = 8;

/// Free blocks and holes gone through for all of these together, each time that one is: a long request's windows go
/// over many holes, and each of those begins a window of its own.
const STEPS: u32 = 1 << 14;
const STEPS_AT_THE_UTMOST: u32 = 1 << 17;

/// A program has grown when the most that was live has risen by this fraction.
const RISEN: u64 = 4;

/// What growth remembers from one time to the next.
#[derive(Default)]
pub(in crate::default) struct Growth {
    /// `Space::returns` when it grew last.
    returns_then: u64,
    /// Growths of each part in a row with nothing freed between.
    streaks: [u32; 2],
    /// The largest request that it served, in granules.
    pub(in crate::default) largest: u32,
    /// The most units that were live when the program had grown last.
    grown_to: u64,
    /// All moves that there had been when the pool first had half as much again as was live at most.
    moves_when_half: Option<u64>,
    /// Handles made beyond what was needed, ever: they are no reason to move more.
    spent: u64,
    /// The granule behind the memory made last.
    pub(in crate::default) frontier: Option<u32>,
}

/// Unmapped addresses that the window needs memory at.
#[derive(Clone, Copy, Debug)]
pub(in crate::default) struct Gap {
    pub(in crate::default) start: u32,
    pub(in crate::default) granules: u32,
    /// Granules of hole behind it: how far it could be filled beyond the need.
    pub(in crate::default) beyond: u32,
}

#[derive(Clone, Copy, Debug)]
pub(in crate::default) enum Source {
    New,
    /// An extent by its number, its handle, who owned the free memory on it, and the node of that.
    Moved {
        number: u32,
        handle: Extent,
        owner: Owner,
        block: u32,
    },
    /// A part of an extent that stays where it is, too.
    Shared(Rest),
}

/// An extent to be mapped, behind the one before it in its gap.
#[derive(Clone, Copy, Debug)]
pub(in crate::default) struct Piece {
    pub(in crate::default) source: Source,
    pub(in crate::default) granules: u32,
}

impl Piece {
    /// The number of an extent that is there already.
    fn number(&self) -> Option<u32> {
        match self.source {
            Source::New => None,
            Source::Moved { number, .. } => Some(number),
            Source::Shared(rest) => Some(rest.number),
        }
    }
}

/// A gap with what fills it.
#[derive(Debug)]
pub(in crate::default) struct Fill {
    pub(in crate::default) start: u32,
    pub(in crate::default) granules: u32,
    pub(in crate::default) pieces: SmallVec<[Piece; 4]>,
}

/// What is to be done, all of it taken out of the space.
#[derive(Debug)]
pub(in crate::default) struct Job {
    pub(in crate::default) start: u32,
    pub(in crate::default) units: u32,
    /// The free blocks in the window.
    pub(in crate::default) taken: SmallVec<[(u32, u32, Owner); 4]>,
    pub(in crate::default) fills: SmallVec<[Fill; 2]>,
    /// Handles to be made beyond what is needed.
    pub(in crate::default) spent: u32,
}

impl Job {
    fn moved(&self) -> impl Iterator<Item = &Piece> {
        let pieces = self.fills.iter().flat_map(|fill| &fill.pieces);
        pieces.filter(|piece| !matches!(piece.source, Source::New))
    }

    /// The extents that it moves.
    pub(super) fn moves(&self) -> u64 {
        self.moved().count() as u64
    }

    /// And the granules of them.
    pub(super) fn moved_granules(&self) -> u64 {
        self.moved().map(|piece| u64::from(piece.granules)).sum()
    }

    /// The granules that it makes.
    pub(super) fn new_granules(&self) -> u64 {
        let pieces = self.fills.iter().flat_map(|fill| &fill.pieces);
        let new = pieces.filter(|piece| matches!(piece.source, Source::New));
        new.map(|piece| u64::from(piece.granules)).sum()
    }
}

/// A window that would do.
pub(in crate::default) struct Window {
    /// Units, as the request is long; what its last gap is filled beyond that does not count.
    pub(in crate::default) start: u32,
    pub(in crate::default) end: u32,
    pub(in crate::default) gaps: SmallVec<[Gap; 2]>,
    pub(in crate::default) cost: u32,
    /// Parts of extents at the ends of its gaps, which it does not lack; and what it would lack without.
    pub(in crate::default) first: Option<Rest>,
    pub(in crate::default) last: Option<Rest>,
    pub(in crate::default) instead: u32,
}

impl Window {
    /// Units of its free memory before the first gap and behind the last that are no whole granule.
    fn used_up(&self, granule_units: u32) -> u32 {
        let before = self
            .gaps
            .first()
            .map_or(0, |gap| (gap.start * granule_units).saturating_sub(self.start));
        let behind = self
            .gaps
            .last()
            .map_or(0, |gap| self.end.saturating_sub((gap.start + gap.granules) * granule_units));
        before % granule_units + behind % granule_units
    }
}

/// How far growth goes for a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::default) enum Reach {
    /// Beyond the request, for those to come.
    Ahead,
    /// As far as it needs.
    Needed,
    /// As far as it takes, since nothing else is left to try: over any number of gaps.
    Utmost,
}

impl Reach {
    /// Gaps of one window at most: each is mapped by a call of its own.
    fn gaps(self) -> usize {
        match self {
            Self::Ahead | Self::Needed => 64,
            Self::Utmost => usize::MAX,
        }
    }

    /// Steps to its windows.
    fn steps(self) -> u32 {
        match self {
            Self::Ahead | Self::Needed => STEPS,
            Self::Utmost => STEPS_AT_THE_UTMOST,
        }
    }
}

/// What is asked of growth.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    /// Granules that may be made.
    pub(super) room: u64,
    pub(super) reach: Reach,
    /// Whether memory went back for this request, so that new memory comes before moves.
    pub(super) exchanged: bool,
}

/// What growth may use.
#[derive(Clone, Copy, Debug)]
pub(super) struct Means {
    pub(super) wanted: Wanted,
    /// Extents that moved lately.
    pub(super) moved_lately: u64,
    /// Extents that moved beyond what may go on for ever; and those of them since the program had grown last.
    pub(super) excess: u64,
    pub(super) unsettled: u64,
    /// Extents that have moved since the pool first had half as much again as was live at most.
    pub(super) moved_since_half: u64,
    /// Whether moves take more of the program's time than they are worth for one request only.
    pub(super) restive: bool,
    /// Whether moves take a good part of the program's time.
    pub(super) hurried: bool,
    /// The extents that had been made when callers first gave back as good as all that they had, if they did.
    pub(super) made_once: Option<u64>,
    /// Handles that may be made beyond what is needed.
    pub(super) saved: u64,
    /// Whether the program has had much time of its own.
    pub(super) long_at_work: bool,
    /// Mappings that a request has time for.
    pub(super) in_time: u32,
}

/// What a request finds, whichever window it gets.
struct Outlook {
    means: Means,
    growths: Growths,
    /// From how many granules of free extents on they move before more are made.
    enough: Option<u64>,
    /// Whether there may be so many.
    may_move_first: bool,
    /// Granules that are made before a window has parts of extents.
    room: u64,
}

impl Outlook {
    /// What a request may have made and moved that has so many handles already, where so many more are saved up.
    fn allowance(&self, policy: &Policy, saved: u64, before: u32) -> Allowance {
        let Means { long_at_work, in_time, .. } = self.means;
        Allowance {
            in_haste: policy.is_in_haste(saved),
            long_at_work,
            roomy: self.growths.is_roomy(),
            settles: policy.settles(self.growths),
            saved,
            before,
            in_time,
        }
    }
}

impl Space {
    /// Plans a request of a stream. `None` where neither new memory nor free extents that the
    /// stream may use suffice.
    pub(super) fn plan(
        &mut self,
        tags: &Tags,
        stream: u32,
        units: u32,
        part: Part,
        policy: &Policy,
        means: Means,
    ) -> Option<Job> {
        self.scarce_from = policy.scarce_from(self.peak_live, means.saved);
        // Whatever window: without a look at any, nor at each extent for each of them.
        let room = means.wanted.room.saturating_mul(u64::from(self.memory.granule_units()));
        if self.usable_units(stream).saturating_add(room) < u64::from(units) {
            return None;
        }
        let outlook = self.outlook(policy, means, units, part);
        let windows = self.windows(tags, stream, units, part, policy, &outlook);
        // The first that can be filled: between two mappings only exact sums of lengths can.
        windows.into_iter().find_map(|window| {
            let (fills, spent) = self.fill(stream, &window, policy, &outlook)?;
            Some(self.take_out(tags, stream, units, &window, fills, spent))
        })
    }

    /// What growth may use now.
    pub(super) fn means(&mut self, wanted: Wanted, now: Duration, in_time: u32) -> Means {
        let made = self.counters.created;
        let pace = &mut self.pace;
        if self.peak_live > self.growth.grown_to + self.growth.grown_to / RISEN {
            self.growth.grown_to = self.peak_live;
            pace.note_grown();
        }
        let peak_live = self.peak_live / u64::from(self.memory.granule_units());
        let has_half = has_sixteenths(self.memory.mapped(), peak_live, SIXTEENTHS_AT_MOST);
        let when_half = has_half.then(|| self.growth.moves_when_half.unwrap_or(pace.ever()));
        self.growth.moves_when_half = when_half;
        let moved_since_half = when_half.map_or(0, |then| pace.ever() - then);
        Means {
            wanted,
            moved_lately: pace.moves(now, made),
            excess: pace.excess(now),
            unsettled: pace.unsettled(now),
            moved_since_half,
            restive: pace.is_restive(now),
            hurried: pace.is_hurried(now),
            made_once: pace.made_once(),
            saved: pace.saved(now),
            long_at_work: pace.is_long_at_work(now),
            in_time,
        }
    }

    /// Whether a job moves so many short extents that a long one is better made instead.
    pub(super) fn is_better_exchanged(&self, job: &Job, policy: &Policy, means: Means) -> bool {
        let (moves, granules) = (job.moves(), job.moved_granules());
        if means.wanted.exchanged || moves == 0 || granules > means.wanted.room {
            return false;
        }
        let part = self.part_of(job.start);
        let growths = self.outlook(policy, means, job.units, part).growths;
        policy.exchanges(growths, means.saved, moves, granules)
    }

    fn outlook(&self, policy: &Policy, means: Means, units: u32, part: Part) -> Outlook {
        let granule_units = u64::from(self.memory.granule_units());
        let live = self.out_units / granule_units;
        // What raises the most that was live needs memory for good, whatever sizes come later.
        let raises = self.out_units + u64::from(units) > self.peak_live;
        let needed = self.counters.created.saturating_sub(self.growth.spent);
        let growths = Growths {
            streak: self.streaks()[part as usize],
            created: needed,
            made: self.counters.created,
            moved: means.moved_lately,
            excess: means.excess,
            unsettled: means.unsettled,
            moved_since_half: means.moved_since_half,
            hurried: means.hurried,
            made_once: means.made_once,
            peak_live: self.peak_live / granule_units,
            mapped: self.memory.mapped(),
            random: !raises && policy.is_random(self.is_loose, means.restive, self.returns),
        };
        // A granule that small blocks took from the large part would be lacking there, round for round.
        let is_little = part == Part::Small && !policy.limited && self.has_few_small();
        let enough = policy.moves_first(live, growths, means.saved);
        let enough = enough.filter(|_| !means.wanted.exchanged && !is_little);
        // A first look without walking: free memory that is too little cannot be extents enough.
        debug_assert_eq!(self.free_units(), self.free_units_of_sets());
        let free = self.free_units() / granule_units;
        let may_move_first = !policy.fixed && enough.is_some_and(|enough| free >= enough);
        // Parts of extents are for what would be missing, and not instead of memory that is there: they keep both
        // their extents in place. What raises the most that was live is seldom, of a program whose rounds are known,
        // and what would be made for it would stay.
        let is_seldom = raises && policy.is_at_leisure(means.saved) && self.lifetimes.knows();
        let room = if is_seldom { 0 } else { means.wanted.room };
        Outlook { means, growths, enough, may_move_first, room }
    }

    /// The windows that lack the least memory, of those with as little first the one that uses up the
    /// most of granules which others have a part of, then the lowest; and a fresh one, before or after
    /// those that save nothing.
    fn windows(
        &self,
        tags: &Tags,
        stream: u32,
        units: u32,
        part: Part,
        policy: &Policy,
        outlook: &Outlook,
    ) -> SmallVec<[Window; WINDOWS_TRIED + 1]> {
        let range = self.memory.range(part);
        let is_of_part = |hole: &&Region| range.contains(&(hole.start() as u32));
        let map = &self.memory.map;
        let largest: SmallVec<[&Region; LARGEST_LOOKED_AT]> =
            map.largest_holes().filter(is_of_part).take(LARGEST_LOOKED_AT).collect();
        let is_smaller = |hole: &&Region| largest.iter().all(|known| known.id() != hole.id());
        let smallest = map.holes().filter(is_of_part).take_while(is_smaller);
        let reach = outlook.means.wanted.reach;
        let mut steps = reach.steps();
        let whole = units.div_ceil(self.memory.granule_units());
        let order = |window: &Window| {
            (window.cost, Reverse(window.used_up(self.memory.granule_units())), window.start)
        };
        let mut found: SmallVec<[Window; WINDOWS_TRIED + 1]> = SmallVec::new();
        for hole in largest.iter().copied().chain(smallest).take(HOLES_LOOKED_AT) {
            let left = self.window_from(tags, stream, units, hole, reach.gaps(), &mut steps);
            let right = self.window_to(tags, stream, units, hole, &mut steps);
            if steps == 0 {
                break;
            }
            for window in left.into_iter().chain(right) {
                let at = found.partition_point(|better| order(better) <= order(&window));
                if at < WINDOWS_TRIED {
                    found.truncate(WINDOWS_TRIED - 1);
                    found.insert(at, window);
                }
            }
        }
        if let Some(fresh) = self.fresh_window(units, part, policy) {
            let saves = if policy.prefers_fresh(outlook.means.saved) { whole } else { whole + 1 };
            let at = found.partition_point(|window| window.cost < saves);
            found.insert(at, fresh);
        }
        // No look at the parts of all extents where they would not be taken in the end.
        let missing = u64::from(whole).saturating_sub(outlook.room);
        let needless =
            || missing == 0 || (outlook.may_move_first && self.has_whole(stream, missing));
        if !outlook.means.wanted.exchanged
            && !policy.fixed
            && part == Part::Large
            && !needless()
            && let Some(between) = self.between(stream, units, policy)
        {
            let at = found.partition_point(|window| window.cost <= between.cost);
            found.insert(at, between);
        }
        found
    }

    /// The window that begins with the free memory before a hole, with so many gaps at most. None is found in more
    /// than so many `steps`, which are fewer after.
    fn window_from(
        &self,
        tags: &Tags,
        stream: u32,
        units: u32,
        hole: &Region,
        most_gaps: usize,
        steps: &mut u32,
    ) -> Option<Window> {
        let mut step = || steps.checked_sub(1).map(|left| *steps = left);
        let granule_units = self.memory.granule_units();
        let mut start = hole.start() as u32 * granule_units;
        while let Some(left) = self.usable_before(tags, start, stream) {
            step()?;
            start = left.start();
        }
        // The whole hole may be part of it only if the window ends there or goes on behind it.
        let end = u64::from(start) + u64::from(units);
        let mut window = Window {
            start,
            end: u32::try_from(end).ok()?,
            gaps: SmallVec::new(),
            cost: 0,
            first: None,
            last: None,
            instead: 0,
        };
        let mut hole = hole;
        loop {
            step()?;
            let (first, last) = (hole.start() as u32, hole.end() as u32);
            // Neighbours of different owners may do without the hole.
            if u64::from(first) * u64::from(granule_units) >= end {
                return Some(window);
            }
            let needed = end.div_ceil(u64::from(granule_units)).min(u64::from(last)) as u32 - first;
            window.gaps.push(Gap { start: first, granules: needed, beyond: last - first - needed });
            window.cost += needed;
            let mut at = last * granule_units;
            if u64::from(at) >= end {
                return Some(window);
            }
            while let Some(right) = self.usable_at(tags, at, stream) {
                step()?;
                at = right.end();
                if u64::from(at) >= end {
                    return Some(window);
                }
            }
            if !at.is_multiple_of(granule_units) {
                return None;
            }
            hole = self.memory.hole_at(at / granule_units)?;
            if hole.start() as u32 != at / granule_units || window.gaps.len() >= most_gaps {
                return None;
            }
        }
    }

    /// The window that ends with the free memory behind a hole, where it leaves some of the hole; in as many steps as
    /// the other.
    fn window_to(
        &self,
        tags: &Tags,
        stream: u32,
        units: u32,
        hole: &Region,
        steps: &mut u32,
    ) -> Option<Window> {
        let granule_units = self.memory.granule_units();
        let (first, last) =
            (hole.start() as u32 * granule_units, hole.end() as u32 * granule_units);
        let mut end = last;
        while let Some(right) = self.usable_at(tags, end, stream) {
            *steps = steps.checked_sub(1)?;
            end = right.end();
        }
        let start = end.checked_sub(units).filter(|start| (first + 1..last).contains(start))?;
        if end == last {
            return None;
        }
        let from = self.memory.granule_of(start);
        let granules = hole.end() as u32 - from;
        let gap = Gap { start: from, granules, beyond: 0 };
        Some(Window {
            start,
            end,
            gaps: [gap].into_iter().collect(),
            cost: granules,
            first: None,
            last: None,
            instead: granules,
        })
    }

    /// A window of its own, with room behind it to grow into.
    fn fresh_window(&self, units: u32, part: Part, policy: &Policy) -> Option<Window> {
        let cost = units.div_ceil(self.memory.granule_units());
        let (at, beyond) = self.fresh_addresses(cost, part, policy)?;
        let start = at * self.memory.granule_units();
        let gaps = [Gap { start: at, granules: cost, beyond }].into_iter().collect();
        let (end, instead) = (start + units, cost);
        Some(Window { start, end, gaps, cost, first: None, last: None, instead })
    }

    /// The first of so many granules of unmapped addresses, in the midst of most of them; and how many
    /// more follow.
    pub(in crate::default) fn fresh_addresses(
        &self,
        granules: u32,
        part: Part,
        policy: &Policy,
    ) -> Option<(u32, u32)> {
        let range = self.memory.range(part);
        let largest =
            self.memory.map.largest_holes().find(|hole| range.contains(&(hole.start() as u32)))?;
        let (first, length) = (largest.start() as u32, largest.bytes() as u32);
        if granules > length {
            return None;
        }
        let extends = self.memory.map.previous(largest.id()).is_some();
        let half = length / 2;
        let roomy = half >= granules && u64::from(half) >= policy.apart();
        let apart = part == Part::Large && extends && roomy;
        let start = if apart { first + length / 2 } else { first };
        Some((start, first + length - start - granules))
    }

    /// Finds memory for every gap of a window; and how many handles beyond the need that takes.
    fn fill(
        &self,
        stream: u32,
        window: &Window,
        policy: &Policy,
        outlook: &Outlook,
    ) -> Option<(SmallVec<[Fill; 2]>, u32)> {
        let means = outlook.means;
        let short = means.wanted.room < u64::from(window.cost);
        let mut sources = Sources::default();
        if outlook.may_move_first || (short && !policy.fixed) {
            sources = self.sources(stream, window, policy.leaves_least(means.saved));
        }
        let move_first = outlook.enough.is_some_and(|enough| sources.granules >= enough);
        if u64::from(window.cost) > means.wanted.room + sources.granules {
            return None;
        }
        let there = sources.granules + outlook.room;
        if window.shares() && there >= u64::from(window.instead) {
            return None;
        }
        let mut room = means.wanted.room;
        let mut fills = SmallVec::new();
        let mut spent = 0;
        for (at, gap) in window.gaps.iter().enumerate() {
            let mut fill = Fill { start: gap.start, granules: 0, pieces: SmallVec::new() };
            let (first, last) = window.shared_pieces(at);
            let shared = |piece: &Option<Piece>| piece.map_or(0, |piece| piece.granules);
            let mut missing = gap.granules - shared(&first) - shared(&last);
            fill.pieces.extend(first);
            let before = |fill: &Fill| {
                let fills = fills.iter().chain([fill]).map(|fill: &Fill| fill.pieces.len());
                fills.sum::<usize>() as u32
            };
            if move_first {
                let allowed = outlook.allowance(policy, means.saved, before(&fill));
                missing -= sources.take(&mut fill, missing, policy.moves_at_once(allowed));
            }
            // What has to be moved goes before what is new, where its lengths leave something over.
            let beyond_room = missing - u64::from(missing).min(room) as u32;
            missing -= sources.take(&mut fill, beyond_room, u32::MAX);
            // What is short now is less than any extent that is left: the shortest of those that are
            // not too long, and less of what is new.
            let short = missing - u64::from(missing).min(room) as u32;
            if short > 0
                && let Some(longer) = sources.take_longer(&mut fill, short, missing)
            {
                missing -= longer;
            }
            let new = u64::from(missing).min(room) as u32;
            if new == missing {
                let ahead = if means.wanted.reach == Reach::Ahead {
                    policy.ahead(outlook.growths, missing)
                } else {
                    0
                };
                let more = u64::from(ahead.min(gap.beyond)).min(room - u64::from(new)) as u32;
                let saved = means.saved.saturating_sub(u64::from(spent));
                if more > 0 {
                    let pieces = policy.ahead_pieces(new + more, saved);
                    spent += pieces.len() as u32 - 1;
                    let new = |granules| Piece { source: Source::New, granules };
                    fill.pieces.extend(pieces.map(new));
                } else {
                    let allowed = outlook.allowance(policy, saved, before(&fill));
                    spent += self.create(&mut fill, new, policy, window, allowed);
                }
                room -= u64::from(new + more);
            } else {
                // Only extents are left that are too long, and there must be addresses for all of one.
                let extra = sources.take_longer(&mut fill, missing, missing + gap.beyond)?;
                debug_assert!(extra >= missing);
            }
            fill.pieces.extend(last);
            fill.granules = fill.pieces.iter().map(|piece| piece.granules).sum();
            fills.push(fill);
        }
        Some((fills, spent))
    }

    /// Growths of each part in a row with nothing freed between. A program that loads what it works on asks for a
    /// few small blocks among hundreds of large ones: neither says anything about how the other goes on.
    fn streaks(&self) -> [u32; 2] {
        if self.growth.returns_then == self.returns { self.growth.streaks } else { [0; 2] }
    }

    /// Lengths of new extents for a window. Where the policy says so the granule that the window
    /// ends in the midst of is one by itself: the next block begins there, and whichever of the two
    /// stays keeps no more than that from moving. Returns how many of the saved handles it takes.
    fn create(
        &self,
        fill: &mut Fill,
        granules: u32,
        policy: &Policy,
        window: &Window,
        allowed: Allowance,
    ) -> u32 {
        if granules == 0 {
            return 0;
        }
        let granule_units = self.memory.granule_units();
        let request = (window.end - window.start).div_ceil(granule_units);
        let in_midst = |unit: u32| !unit.is_multiple_of(granule_units);
        // What shares no granule keeps nothing of others in its place.
        let shares = in_midst(window.start) || in_midst(window.end);
        let mut mapped = self.memory.mapped();
        // The first request of all stays the first throughout.
        let is_first = mapped == 0;
        let largest = u64::from(self.growth.largest.max(request));
        let extent = |mapped| {
            let mapped = if is_first { 0 } else { mapped };
            policy.extent(
                mapped,
                u64::from(request),
                largest,
                shares,
                allowed.in_haste,
                allowed.in_time,
            )
        };
        let shares_last =
            in_midst(window.end) && self.memory.granule_of(window.end) + 1 == fill.start + granules;
        let apart = u32::from(shares_last && policy.parts_ends(granules, extent(mapped)));
        let mut left = granules - apart;
        let shortest = policy.at_least(left, allowed);
        let length = |mapped| extent(mapped).max(shortest);
        let longest = policy.at_leisure(length(mapped), left, mapped, u64::from(request), allowed);
        let spent = left.div_ceil(longest) - left.div_ceil(length(mapped));
        while left > 0 {
            let granules = length(mapped).min(longest).min(left);
            fill.pieces.push(Piece { source: Source::New, granules });
            left -= granules;
            mapped += u64::from(granules);
        }
        if apart > 0 {
            fill.pieces.push(Piece { source: Source::New, granules: apart });
        }
        spent
    }

    /// Takes the window and the sources out of the space: nobody else finds them from here on.
    fn take_out(
        &mut self,
        tags: &Tags,
        stream: u32,
        units: u32,
        window: &Window,
        fills: SmallVec<[Fill; 2]>,
        spent: u32,
    ) -> Job {
        let granule_units = self.memory.granule_units();
        let end = window.start + units;
        let mut taken = SmallVec::new();
        let mut at = window.start;
        for fill in &fills {
            let from = fill.start * granule_units;
            if at < from {
                at = self.take_free(tags, at, from, stream, &mut taken);
                debug_assert_eq!(at, from);
            }
            self.memory.reserve(fill.start, fill.granules);
            at = (fill.start + fill.granules) * granule_units;
        }
        if at < end {
            self.take_free(tags, at, end, stream, &mut taken);
        }
        self.take_extents(tags, &fills);
        self.transit_units +=
            taken.iter().map(|part: &(u32, u32, Owner)| u64::from(part.1)).sum::<u64>();
        Job { start: window.start, units, taken, fills, spent }
    }

    /// Takes free blocks out from `at` to `end`; of the last only what lies before `end`.
    fn take_free(
        &mut self,
        tags: &Tags,
        at: u32,
        end: u32,
        stream: u32,
        taken: &mut SmallVec<[(u32, u32, Owner); 4]>,
    ) -> u32 {
        let mut at = at;
        while at < end {
            let Some(block) = self.usable_at(tags, at, stream) else { break };
            let (id, owner, units) = (block.id(), block.owner(), block.units().min(end - at));
            self.take_head(tags, id, units);
            taken.push((at, units, owner));
            at += units;
        }
        at
    }

    /// Takes the free units on extents out of the free blocks that cover them.
    fn take_extents(&mut self, tags: &Tags, fills: &[Fill]) {
        let granule_units = self.memory.granule_units();
        let mut moved: SmallVec<[(u32, u32, u32); 8]> = fills
            .iter()
            .flat_map(|fill| &fill.pieces)
            .filter_map(|piece| match piece.source {
                Source::New => None,
                Source::Moved { number, block, .. } => {
                    let extent = self.memory.extent(number);
                    Some((block, extent.start * granule_units, extent.end() * granule_units))
                }
                Source::Shared(rest) => Some((rest.block, rest.start, rest.end())),
            })
            .collect();
        self.take_ranges(tags, &mut moved);
    }

    /// Takes ranges of units out of free blocks, each given as the block's node, the first unit and
    /// the one behind the last.
    pub(in crate::default) fn take_ranges(&mut self, tags: &Tags, ranges: &mut [(u32, u32, u32)]) {
        ranges.sort_unstable();
        // All are out before any rest goes back: a rest may become one with a neighbour, and that
        // must not be a block that is still to be taken by its node.
        let whole: SmallVec<[(u32, u32, Owner); 8]> = ranges
            .chunk_by(|a, b| a.0 == b.0)
            .map(|of_block| self.take_whole(tags, of_block[0].0))
            .collect();
        for (of_block, (start, units, owner)) in ranges.chunk_by(|a, b| a.0 == b.0).zip(whole) {
            let mut at = start;
            for (_, from, to) in of_block {
                if at < *from {
                    self.give(tags, at, from - at, owner);
                }
                at = *to;
                self.transit_units += u64::from(to - from);
            }
            if at < start + units {
                self.give(tags, at, start + units - at, owner);
            }
        }
    }

    /// Puts a job that came to nothing back. `stuck` tells of which fills the driver would not
    /// undo the mapping: those addresses are to be unmapped later.
    pub(super) fn abandon(&mut self, tags: &Tags, job: &Job, stuck: &[bool]) {
        for (start, units, owner) in &job.taken {
            self.transit_units -= u64::from(*units);
            self.give(tags, *start, *units, self.now(*owner));
        }
        let granule_units = self.memory.granule_units();
        for (index, fill) in job.fills.iter().enumerate() {
            let stuck = stuck.get(index).copied().unwrap_or(false);
            self.memory.unreserve(fill.start, stuck);
            self.counters.failed_unmaps += u64::from(stuck);
            let mut at = fill.start;
            for piece in &fill.pieces {
                if stuck {
                    self.memory.note_stuck(at, piece.number());
                }
                at += piece.granules;
                let (start, units, owner) = match piece.source {
                    Source::New => continue,
                    Source::Moved { number, owner, .. } => {
                        let extent = self.memory.extent(number);
                        (extent.start * granule_units, extent.granules * granule_units, owner)
                    }
                    Source::Shared(rest) => (rest.start, rest.units, rest.owner),
                };
                self.transit_units -= u64::from(units);
                self.give(tags, start, units, self.now(owner));
            }
        }
    }

    /// What an owner has become while its memory was in transit: a stream's memory that was taken
    /// in an epoch before the open one may count as the open one's again, which waits for more
    /// than needed and never for less.
    pub(in crate::default) fn now(&self, owner: Owner) -> Owner {
        match owner.of_stream() {
            None => owner,
            Some((index, _)) => self.books[index as usize].own_again(index),
        }
    }

    /// Enters what a job came to, and hands the block out. `handles` are those made, in order.
    pub(super) fn commit(
        &mut self,
        tags: &Tags,
        stream: u32,
        job: &Job,
        handles: &mut dyn Iterator<Item = Extent>,
    ) -> u32 {
        let granule_units = self.memory.granule_units();
        for (_, units, _) in &job.taken {
            self.transit_units -= u64::from(*units);
        }
        let mut end = job.start + job.units;
        let mut left: SmallVec<[(u32, u32, Fence); 8]> = SmallVec::new();
        for fill in &job.fills {
            self.memory.settle(fill.start);
            let mut at = fill.start;
            for piece in &fill.pieces {
                match piece.source {
                    Source::New => {
                        if let Some(handle) = handles.next() {
                            self.memory.enter(handle, at, piece.granules);
                            self.counters.created += 1;
                            self.counters.created_granules += u64::from(piece.granules);
                        }
                    }
                    Source::Moved { number, owner, .. } => {
                        let from = self.memory.rehome(number, at);
                        left.push((from, piece.granules, self.fence_of(owner)));
                        self.transit_units -= u64::from(piece.granules * granule_units);
                        self.counters.moved += 1;
                        self.counters.moved_granules += u64::from(piece.granules);
                    }
                    Source::Shared(rest) => {
                        self.split(&rest, at);
                        self.counters.moved += 1;
                        self.counters.moved_granules += u64::from(rest.granules);
                    }
                }
                at += piece.granules;
            }
            // What is not the block's of a shared extent is elsewhere.
            if !fill.pieces.last().is_some_and(|piece| matches!(piece.source, Source::Shared(_))) {
                end = end.max(at * granule_units);
            }
            if fill.pieces.last().is_some_and(|piece| matches!(piece.source, Source::New)) {
                self.growth.frontier = Some(at);
            }
        }
        self.retire_runs(&mut left);
        self.pace.spend(u64::from(job.spent));
        self.growth.spent += u64::from(job.spent);
        self.counters.growths += 1;
        self.growth.largest = self.growth.largest.max(job.units.div_ceil(granule_units));
        self.growth.streaks = self.streaks();
        self.growth.streaks[self.part_of(job.start) as usize] += 1;
        self.growth.returns_then = self.returns;
        self.hand_out(tags, stream, job.start, job.units);
        self.note_peak();
        let rest = job.start + job.units;
        if let Some(lead) = job.fills.first().map(|fill| fill.start * granule_units)
            && lead < job.start
            && !self.memory.is_split_at(self.memory.granule_of(job.start))
        {
            let owner = self.books[stream as usize].own_again(stream);
            self.give(tags, lead, job.start - lead, owner);
        }
        if rest < end {
            // Moved memory may still be in use by its stream, which is this one or nobody.
            let owner = self.books[stream as usize].own_again(stream);
            let all_new = job.fills.last().is_some_and(|fill| {
                fill.pieces.iter().all(|piece| matches!(piece.source, Source::New))
            });
            let owner = if all_new && !self.is_sole(stream) { Owner::NOBODY } else { owner };
            self.give(tags, rest, end - rest, owner);
        }
        rest
    }

    /// Makes zombies of the addresses that extents have left: neighbours at once, which most are.
    fn retire_runs(&mut self, left: &mut [(u32, u32, Fence)]) {
        left.sort_unstable_by_key(|(start, ..)| *start);
        let joins = |low: &(u32, u32, Fence), high: &(u32, u32, Fence)| {
            low.0 + low.1 == high.0 && low.2 == high.2
        };
        for run in left.chunk_by(joins) {
            if let Some((last, granules, fence)) = run.last() {
                self.memory.retire(run.iter().map(|(start, ..)| *start), last + granules, *fence);
            }
        }
    }

    /// The fence behind which nothing uses memory of this owner, as it is now.
    pub(in crate::default) fn fence_of(&self, owner: Owner) -> Fence {
        match owner.of_stream() {
            None => Fence::PASSED,
            Some((index, _)) if self.books[index as usize].is_over() => Fence::PASSED,
            Some((index, _)) => {
                // The open epoch, whichever it was taken in: it may wait for more than needed.
                let sequence = self.books[index as usize].epoch;
                Fence { timeline: TimelineId(index), sequence }
            }
        }
    }

    /// Granules that are zombies, waiting or not.
    pub(in crate::default) fn zombie_granules(&self) -> u64 {
        self.memory.map.totals().bytes(State::Zombie)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::default::memory::Memory;

    /// What moved before a pool had the most that a restless one gets at once is no reason for more, nor is what
    /// moved while a program that had grown had less than that again.
    #[test]
    fn what_moves_counts_again_from_when_the_pool_had_half_as_much_again() {
        let mut space = Space::new(Memory::new(0, 64, 2 << 20, 8), false, true, 0);
        let granule_units = u64::from(space.memory.granule_units());
        let moved = |space: &mut Space, peak_granules: u64, moves: u64| {
            space.peak_live = peak_granules * granule_units;
            space.pace.note(moves);
            let wanted = Wanted { room: 64, reach: Reach::Ahead, exchanged: false };
            space.means(wanted, Duration::ZERO, 100).moved_since_half
        };
        // Nothing is mapped, which is enough while nothing was live.
        assert_eq!([moved(&mut space, 0, 7), moved(&mut space, 0, 5)], [0, 5]);
        assert_eq!([moved(&mut space, 8, 3), moved(&mut space, 8, 3)], [0, 0]);
        assert_eq!([moved(&mut space, 0, 2), moved(&mut space, 0, 4)], [0, 4]);
    }
}

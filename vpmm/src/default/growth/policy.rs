//! How long extents are, when memory moves before more is made, how far ahead growth maps.
//!
//! A driver call costs what it costs for each handle, whatever its length; but only a handle that
//! is wholly free can be moved, so that a long one under a short block that stays is lost to
//! everybody else. Length is thus the trade between driver time and memory held. Granules
//! throughout.

#![forbid(unsafe_code)]

use std::ops::RangeInclusive;

use super::pace::AT_LEISURE;

/// New extents are at most this fraction of the pool, or of the request where that is longer:
/// their number grows with the pool's logarithm, and what one short block can hold in its place
/// stays the same small share. In haste they are longer: a program that does nothing but grow waits for
/// the driver as long as for everything else, and holds half a per cent more for a fifth of that less, by the model.
const OF_POOL: u64 = 140;
const OF_POOL_IN_HASTE: u64 = 96;
const OF_REQUEST: u64 = 96;

/// The first request of all, when nothing is known of how the program goes on: one extent from so many
/// granules on, which is the quickest, and so many extents below, of which one short block that comes
/// later holds one in its place: a model's first parameter may be converted, and its place is another's then.
const WHOLE: u64 = 256;
const OF_FIRST: u64 = 16;

/// Where time has been saved up extents are as short as this fraction of the pool, or of the limit, and one
/// request has so many made and moved at once, where that leaves any to be made: 3 ms. Once a program is long
/// at work it is as many however long the driver takes, which it does where it was left alone for a while: to
/// make fewer then would be to hold more. Shorter ones, a 720th, hold a third of a per cent less for a fifth more
/// driver time, and the request that moves the most of them is twice as long. Where no limit is set a request
/// never has more made than that, saved up or not.
const OF_POOL_AT_LEISURE: u64 = 400;
const OF_LIMIT_AT_LEISURE: u64 = 4400;
const AT_ONCE: u32 = 64;

/// In haste one request has at most so many extents made, and at most so many moved where more can be made: 3 ms. On
/// a slower machine (`opening`) fewer are made; and fewer moved where more have moved than were made, and the pool has
/// so much of the most that was live. Else what is made in their place stays for good: a language model's training
/// would hold 1.04 to 1.06 of its peak, and one on samples of a graph up to 1.09, for a millisecond less. Each that
/// moves takes the place of three quarters of one that is made, but so many are made beside in any case. The longest
/// move first, so that what stays away is little. With a limit there may be more: what does not move for one request
/// has to for another.
///
/// Fewer are made than may be moved: the next request as large has all of them moved, and others beside.
const MADE_IN_HASTE: u32 = 32;
const MADE_WITH_LIMIT: u32 = 100;
const MADE_BESIDE_MOVES: u32 = 8;
const ROOMY: (u64, u64) = (33, 32);
const MOVED_IN_HASTE: u32 = 54;
const MOVED_WITH_LIMIT: u32 = 120;

/// With a limit only what is saved up beyond this: a program that fills its memory within a tenth of a
/// second has no time for shorter extents, and moves little enough with those that it has.
const KEPT_AT_LIMIT: u64 = 2048;

/// Where a limit is set: at most this fraction of it, so that nearly everything can be brought
/// together when the limit is reached; but this fraction of the request where that is longer, so
/// that no request moves too many, nor at leisure.
const OF_LIMIT: u64 = 1376;
const OF_REQUEST_AT_LIMIT: u64 = 68;
const OF_REQUEST_AT_LEISURE: u64 = 112;

/// Twice as long, and a half of the request at most, where a request has time for fewer mappings than this: by a
/// driver that takes a tenth longer for each than the quickest that was measured. Each extent has its price then,
/// and a ResNet's training, of which as much fits either way, waits a third less for the driver; what is asked for
/// in sizes that do not come again needs more. Only from an eighth of the limit on: what fills the first stays longest.
const IN_TIME_IF_QUICK: u32 = 92;
const OF_REQUEST_IF_SLOW: u64 = 2;
const TIMES_IF_SLOW: u64 = 2;
const SLOW_FROM: u64 = 8;

/// Where `OF_LIMIT` comes to one granule, extents are of one or two, so that their mean is this fraction of
/// the largest request so far: a program whose requests are large for its limit asks for a good part of it
/// at once later, of which every extent has to be moved.
const OF_LARGEST_AT_LIMIT: u64 = 36;

/// The fraction of the pool while it is far from the limit: less than without one, since a limit
/// bounds the length anyway.
const OF_POOL_WITH_LIMIT: u64 = 24;

/// The distance of fresh windows: a fraction of what the pool may hold.
const APART: u64 = 8;

/// Memory moves before more is made when whole free extents come to this fraction of what is
/// live: moving one costs hardly more than making one. With a limit to grow to it may come to
/// more: each move leaves two ends of granules behind that nothing fits in. Where sizes do not come again
/// it may, too, once moves take some of the program's time: what was brought together for one request is no
/// use to the next, and a little more memory is, for all of them.
const MOVED_FIRST: u64 = 400;
const MOVED_FIRST_AT_LEISURE: u64 = 800;
const MOVED_FIRST_WITH_LIMIT: u64 = 4;
const MOVED_FIRST_AT_RANDOM: u64 = 32;

/// Whether sizes come again is known from so many blocks on that came back behind fronts: a loop that has gone on
/// for some time. A program of a few thousand requests, however much it moves for them, may hold little.
const SIZES_KNOWN: u64 = 1 << 15;

/// That fraction doubles whenever this many more extents have moved lately for each that was made, be it for need
/// or shorter than need be: while a pool finds its size moves are worth their time, but a loop whose requests
/// never settle would do nothing else.
const MOVES_EACH: u64 = 2;

/// From this many growths of a part in a row on, with nothing freed between, a program is filling its
/// memory and will ask again. Requests of up to 8 MiB (in granules of 2 MiB) then get an extent for
/// those to come too, each time longer, until the pool has doubled and up to 256 MiB; in a pool of more
/// than five times that up to 32 MiB, since whatever stays in the last of them may hold it in its place. Not
/// where a limit is set: what is ahead of one request may be missing for another.
const STREAK: u32 = 5;
const AHEAD_NEEDED: u32 = 4;
const AHEAD_MOST: u64 = 128;
const AHEAD_MOST_OF_LARGE: u64 = 16;
const LARGE: u64 = 5 * AHEAD_MOST;

/// That is mapped in one piece, or at leisure in extents of so many granules: one short block holds all of
/// its extent in its place, and a program that has loaded what it works on asks for other sizes.
const AHEAD_PIECE: u32 = 4;

/// Once so many extents have moved for each that was made, beyond what may go on for ever and since the program had
/// grown last, its requests do not settle in what the pool has, and would go on to have it moved for every few of
/// them. Then nothing moves first until the pool has so many sixteenths of the most that was live, and two more for
/// each further extent that has moved for each that was made, or the most at once where moves take a good part of
/// the program's time; and up to five eighths of that growth maps this fraction of the pool ahead, whatever the
/// request.
///
/// So many already, for each that was made until then, where moves take a good part of the program's time and it has
/// begun from nothing again; and the pool is to have twice what was live at once. It goes through the same once more,
/// which would cost as much each further time. Fronts keep three quarters of what is to spare then; what one stream of
/// several asks for beyond its own is to lie together in the rest.
const RESTLESS: u64 = 8;
const RESTLESS_AGAIN: u64 = 2;
const SIXTEENTHS_AT_REST: u64 = 18;
const SIXTEENTHS_EACH: u64 = 2;
const SIXTEENTHS_AGAIN: u64 = 32;
pub(super) const SIXTEENTHS_AT_MOST: u64 = 24;
const OF_POOL_RESTLESS: u64 = 64;

/// Where memory goes on moving with that, and takes a good part of the program's time, another sixteenth whenever as
/// many extents have moved again as were made, and so many at the very most: several streams hold much that is not
/// the others'.
const SIXTEENTHS_IN_A_HURRY: u64 = 28;

/// From so many on for each that was made extents are no longer short at leisure: what moves again and again
/// had better be long.
const UNSETTLED: u64 = 3;

/// From then on a request at leisure that would have so many extents moved, and not more, which are shorter on
/// average than this fraction of what new ones are, has a new one made instead; and as much memory goes back in the
/// shortest extents that nobody uses. It costs what their move does, once.
const EXCHANGED: RangeInclusive<u64> = 4..=100;
const SHORT: u64 = 2;

/// Where time has been saved up blocks are placed with care from this part of the most on that was live.
/// Below it what they are placed in comes to an end before memory does.
const SCARCE_FROM: (u64, u64) = (9, 10);

/// The numbers behind growth.
#[derive(Clone, Debug)]
pub(in crate::default) struct Policy {
    /// The most that the pool may hold: its limit, or what the device has.
    pub(in crate::default) capacity: u64,
    /// Whether that is a limit that somebody set.
    pub(super) limited: bool,
    /// Whether free memory stays where it is, too.
    pub(super) fixed: bool,
}

impl Policy {
    pub(in crate::default) fn new(capacity: u64, limited: bool, fixed: bool) -> Self {
        Self { capacity, limited, fixed }
    }

    /// The length of the next new extent, at most, where no request was larger than `largest`, and one has time
    /// for so many mappings. Twice as long at a limit where the request `shares` no granule with others.
    pub(in crate::default) fn extent(
        &self,
        mapped: u64,
        request: u64,
        largest: u64,
        shares: bool,
        in_haste: bool,
        in_time: u32,
    ) -> u32 {
        const LONGEST: u64 = 1 << 18;
        if mapped == 0 {
            let parts = if request < WHOLE { OF_FIRST } else { 1 };
            return request.div_ceil(parts).clamp(1, LONGEST) as u32;
        }
        let granules = if self.limited {
            let of_limit = self.capacity / OF_LIMIT;
            let of_limit = match of_limit {
                0 | 1 => one_or_two(mapped, largest),
                _ if in_time >= IN_TIME_IF_QUICK || mapped < self.capacity / SLOW_FROM => of_limit,
                _ => (request / OF_REQUEST_IF_SLOW).clamp(of_limit, of_limit * TIMES_IF_SLOW),
            };
            let of_pool = (mapped / OF_POOL_WITH_LIMIT).min(of_limit);
            of_pool.max(request / OF_REQUEST_AT_LIMIT) << u32::from(!shares)
        } else {
            let of_pool = if in_haste { OF_POOL_IN_HASTE } else { OF_POOL };
            (mapped / of_pool).max(request / OF_REQUEST)
        };
        granules.clamp(1, LONGEST) as u32
    }

    /// The length of new extents at most, where `length` would do for `granules` more of a request
    /// and so many further handles may be made.
    pub(super) fn at_leisure(
        &self,
        length: u32,
        granules: u32,
        mapped: u64,
        request: u64,
        allowed: Allowance,
    ) -> u32 {
        let saved = allowed.saved;
        if mapped == 0 || saved == 0 || !allowed.settles {
            return length;
        }
        let needed = granules.div_ceil(length);
        let saved = if self.limited { saved.saturating_sub(KEPT_AT_LIMIT) } else { saved };
        let saved = u32::try_from(saved).unwrap_or(u32::MAX);
        let handles = needed.saturating_add(saved).min(needed.max(allowed.at_once()));
        let shortest = if self.limited {
            (self.capacity / OF_LIMIT_AT_LEISURE).max(request / OF_REQUEST_AT_LEISURE)
        } else {
            mapped / OF_POOL_AT_LEISURE
        };
        let shortest = u32::try_from(shortest).unwrap_or(u32::MAX);
        granules.div_ceil(handles.max(1)).max(shortest).clamp(1, length)
    }

    /// The length of new extents at least, of a request that so many granules are made for.
    pub(super) fn at_least(&self, granules: u32, allowed: Allowance) -> u32 {
        let moves = allowed.before - allowed.before / 4;
        let handles = if self.limited {
            MADE_WITH_LIMIT.saturating_sub(moves)
        } else {
            MADE_IN_HASTE.saturating_sub(moves).min(allowed.makes_in_time())
        };
        match (self.limited, allowed.in_haste) {
            (_, true) => granules.div_ceil(handles.max(MADE_BESIDE_MOVES)),
            (false, false) => granules.div_ceil(AT_ONCE),
            (true, false) => 1,
        }
    }

    /// How many extents may be moved for a request that could have more made.
    pub(super) fn moves_at_once(&self, allowed: Allowance) -> u32 {
        let most = match (self.limited, allowed.in_haste) {
            (_, false) => return u32::MAX,
            (true, true) => MOVED_WITH_LIMIT,
            (false, true) if !allowed.roomy => MOVED_IN_HASTE,
            (false, true) => MOVED_IN_HASTE.min(allowed.in_time.saturating_sub(MADE_BESIDE_MOVES)),
        };
        most.saturating_sub(allowed.before)
    }

    /// Whether few handles are saved up.
    pub(super) fn is_in_haste(&self, saved: u64) -> bool {
        saved < AT_LEISURE + if self.limited { KEPT_AT_LIMIT } else { 0 }
    }

    /// Whether nobody set a limit and many handles are saved up.
    pub(super) fn is_at_leisure(&self, saved: u64) -> bool {
        !self.limited && saved >= AT_LEISURE
    }

    /// Whether what moves does not move again and again: then time that has been saved up goes into shorter
    /// extents. With a limit to grow to what is lacking has to be moved anyway.
    pub(super) fn settles(&self, growths: Growths) -> bool {
        self.limited || growths.excess <= growths.created.max(1) * UNSETTLED
    }

    /// Fresh windows stand as far apart as this at least, while there are addresses for that: each
    /// can grow in place then.
    pub(super) fn apart(&self) -> u64 {
        self.capacity / APART
    }

    /// Whether a fresh window comes before a window among what is there already that lacks as
    /// much. It leaves better holes, and long extents one by one; but at a limit every end of a
    /// granule counts, and so it does where so many handles are saved up that extents are short.
    pub(super) fn prefers_fresh(&self, saved: u64) -> bool {
        !self.limited && saved < AT_LEISURE
    }

    /// Whether what moves comes from where the least is left beside it.
    pub(super) fn leaves_least(&self, saved: u64) -> bool {
        self.limited || saved >= AT_LEISURE
    }

    /// From how much on that is out large blocks are placed where others lose the least, if so much was live
    /// at the most and so many handles are saved up. Without a limit and in haste it makes no difference to
    /// what is held.
    pub(super) fn scarce_from(&self, peak_live: u64, saved: u64) -> u64 {
        match saved {
            _ if self.limited => 0,
            AT_LEISURE.. => peak_live / SCARCE_FROM.1 * SCARCE_FROM.0,
            _ => u64::MAX,
        }
    }

    /// Whether the granule that a request ends in is an extent by itself, where so many are made in extents of such
    /// a length. It is one handle more, which is too dear while there is room, and where there are two without it.
    pub(super) fn parts_ends(&self, granules: u32, length: u32) -> bool {
        self.limited && granules > length.saturating_mul(2)
    }

    /// From how many granules of free extents on they move before more are made, where so many handles
    /// are saved up; none where moving is no use.
    pub(super) fn moves_first(&self, live: u64, growths: Growths, saved: u64) -> Option<u64> {
        let part = match saved {
            _ if self.limited => MOVED_FIRST_WITH_LIMIT,
            _ if growths.random => MOVED_FIRST_AT_RANDOM,
            AT_LEISURE.. => MOVED_FIRST_AT_LEISURE,
            _ => MOVED_FIRST,
        };
        let granules = (live / part).max(1);
        match growths.sixteenths_at_rest() {
            Some(rest) if !self.limited => growths.has_sixteenths(rest).then_some(granules),
            _ => {
                let doublings = growths.moved / (growths.made.max(1) * MOVES_EACH);
                Some(granules << doublings.min(24))
            }
        }
    }

    /// The lengths of extents for so many granules, of which some are ahead, where so many handles are
    /// saved up.
    pub(super) fn ahead_pieces(
        &self,
        granules: u32,
        saved: u64,
    ) -> impl ExactSizeIterator<Item = u32> + use<> {
        let piece = if saved < AT_LEISURE { granules.max(1) } else { AHEAD_PIECE };
        (0..granules.div_ceil(piece)).map(move |at| piece.min(granules - at * piece))
    }

    /// Whether a request for which so many extents of so many granules would move has long ones made instead,
    /// and as much memory in short ones goes back.
    pub(super) fn exchanges(
        &self,
        growths: Growths,
        saved: u64,
        moves: u64,
        granules: u64,
    ) -> bool {
        let length = u64::from(self.extent(growths.mapped, 1, 1, false, false, u32::MAX));
        !self.fixed
            && saved >= AT_LEISURE
            && !self.settles(growths)
            && EXCHANGED.contains(&moves)
            && granules * SHORT <= moves * length
    }

    /// Whether sizes do not come again, and moves for them take some of the program's time: where a stream's
    /// front is loose, moves are frequent, and so many blocks have come back that it is known.
    pub(super) fn is_random(&self, loose: bool, restive: bool, returns: u64) -> bool {
        loose && restive && returns >= SIZES_KNOWN
    }

    /// Granules to map beyond the need of a request that needs `needed`.
    pub(super) fn ahead(&self, growths: Growths, needed: u32) -> u32 {
        if self.limited {
            return 0;
        }
        let Growths { streak, mapped, .. } = growths;
        let rest = growths.sixteenths_at_rest();
        let granules = if rest.is_some_and(|rest| !growths.has_sixteenths(16 + (rest - 16) * 5 / 8))
        {
            mapped / OF_POOL_RESTLESS
        } else if streak >= STREAK && needed <= AHEAD_NEEDED {
            let most = if mapped > LARGE { AHEAD_MOST_OF_LARGE } else { mapped.min(AHEAD_MOST) };
            (u64::from(needed) << (streak - STREAK + 2).min(16)).min(most)
        } else {
            0
        };
        u32::try_from(granules).unwrap_or(u32::MAX)
    }
}

/// One granule or two, by turns that make the mean what the largest request asks for.
fn one_or_two(mapped: u64, largest: u64) -> u64 {
    let sixteenths = (largest * 16 / OF_LARGEST_AT_LIMIT).clamp(16, 32);
    // Eleven and sixteen have no common divisor: as the pool grows every sixteenth has its turn.
    (sixteenths + mapped * 11 % 16) / 16
}

/// What a request may have made and moved.
#[derive(Clone, Copy, Debug)]
pub(super) struct Allowance {
    /// Whether few handles are saved up.
    pub(super) in_haste: bool,
    pub(super) long_at_work: bool,
    /// Whether requests have had more moved than made, and the pool has some room all the same.
    pub(super) roomy: bool,
    /// Whether what moves does not move again and again.
    pub(super) settles: bool,
    /// Handles that may be made beyond what is needed.
    pub(super) saved: u64,
    /// What moves for the same request, or was made for it.
    pub(super) before: u32,
    /// Mappings that the request has time for.
    pub(super) in_time: u32,
}

impl Allowance {
    /// How many handles one request makes at most where time has been saved up.
    fn at_once(self) -> u32 {
        let in_time = if self.long_at_work { u32::MAX } else { self.makes_in_time() };
        AT_ONCE.saturating_sub(self.before).min(in_time).max(1)
    }

    /// How many handles may be made in what time is left: each takes a little longer than one that moves.
    fn makes_in_time(self) -> u32 {
        let left = self.in_time.saturating_sub(self.before);
        left - left / 8
    }
}

/// How a pool has grown.
#[derive(Clone, Copy, Debug)]
pub(super) struct Growths {
    /// Growths in a row, with nothing freed between.
    pub(super) streak: u32,
    /// Extents made, for need; and all.
    pub(super) created: u64,
    pub(super) made: u64,
    /// Extents moved lately.
    pub(super) moved: u64,
    /// Extents moved beyond what may go on for ever; and those of them since the program had grown last.
    pub(super) excess: u64,
    pub(super) unsettled: u64,
    /// Extents moved since the pool first had half as much again as was live at most.
    pub(super) moved_since_half: u64,
    /// Whether moves take a good part of the program's time.
    pub(super) hurried: bool,
    /// The extents that had been made when callers first gave back as good as all that they had, if they did: what
    /// comes now comes again.
    pub(super) made_once: Option<u64>,
    /// The most granules that were live.
    pub(super) peak_live: u64,
    /// The granules that the pool has.
    pub(super) mapped: u64,
    /// Whether the program's sizes do not come again, and moves for them take some of its time.
    pub(super) random: bool,
}

impl Growths {
    /// Whether more extents have moved than were made, and the pool has some room all the same.
    pub(super) fn is_roomy(&self) -> bool {
        self.excess > self.created.max(1) && self.mapped * ROOMY.1 >= self.peak_live * ROOMY.0
    }

    /// How many sixteenths of the most that was live a restless pool is to have before anything moves first;
    /// `None` where it is not restless.
    fn sixteenths_at_rest(&self) -> Option<u64> {
        let made = self.made.max(1);
        if let (true, Some(made)) = (self.hurried, self.made_once) {
            // Made for need then: what is made instead of moves is no reason to move again.
            return (self.unsettled > made * RESTLESS_AGAIN).then_some(SIXTEENTHS_AGAIN);
        }
        (self.unsettled > made * RESTLESS).then(|| {
            if self.hurried {
                let further = self.moved_since_half / made;
                return further.saturating_add(SIXTEENTHS_AT_MOST).min(SIXTEENTHS_IN_A_HURRY);
            }
            let further = (self.unsettled / made).saturating_sub(RESTLESS);
            further
                .saturating_mul(SIXTEENTHS_EACH)
                .saturating_add(SIXTEENTHS_AT_REST)
                .min(SIXTEENTHS_AT_MOST)
        })
    }

    /// Whether the pool has so many sixteenths of the most that was live.
    fn has_sixteenths(&self, sixteenths: u64) -> bool {
        has_sixteenths(self.mapped, self.peak_live, sixteenths)
    }
}

/// Whether so many granules are so many sixteenths of the most that was live.
pub(super) fn has_sixteenths(mapped: u64, peak_live: u64, sixteenths: u64) -> bool {
    mapped * 16 >= peak_live * sixteenths
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_sizes_do_not_come_again_little_moves_first() {
        let calm = Growths {
            streak: 0,
            created: 100,
            made: 100,
            moved: 0,
            excess: 0,
            unsettled: 0,
            moved_since_half: 0,
            peak_live: 3200,
            mapped: 3200,
            hurried: false,
            made_once: None,
            random: false,
        };
        let random = Growths { random: true, ..calm };
        let [free, limited] = [false, true].map(|limited| Policy::new(1 << 20, limited, false));
        let first = |policy: &Policy, growths, saved| policy.moves_first(3200, growths, saved);
        assert_eq!([calm, random].map(|growths| first(&free, growths, 0)), [Some(8), Some(100)]);
        assert_eq!(first(&free, random, AT_LEISURE), Some(100));
        assert_eq!([calm, random].map(|growths| first(&limited, growths, 0)), [Some(800); 2]);
        // Nobody knows that after a few requests.
        assert!(
            [SIZES_KNOWN, SIZES_KNOWN - 1].map(|n| free.is_random(true, true, n)) == [true, false]
        );
        assert!(
            !free.is_random(false, true, SIZES_KNOWN) && !free.is_random(true, false, SIZES_KNOWN)
        );
    }

    #[test]
    fn many_short_extents_are_exchanged_where_moves_never_settle() {
        let growths = Growths {
            streak: 0,
            created: 100,
            made: 100,
            moved: 0,
            excess: 301,
            unsettled: 301,
            moved_since_half: 0,
            hurried: false,
            made_once: None,
            random: false,
            peak_live: 1400,
            mapped: 1400,
        };
        let policy = Policy::new(1 << 20, false, false);
        let exchanges =
            |growths, moves, granules| policy.exchanges(growths, AT_LEISURE, moves, granules);
        // New extents would be of ten granules: those that move are up to five long.
        assert_eq!([3, 4, 100, 101].map(|n| exchanges(growths, n, n)), [false, true, true, false]);
        assert_eq!([50, 51].map(|granules| exchanges(growths, 10, granules)), [true, false]);
        assert!(!exchanges(Growths { excess: 300, ..growths }, 10, 10), "it may settle");
        assert!(!exchanges(Growths { mapped: 250, ..growths }, 10, 10), "new ones are as short");
        assert!(!policy.exchanges(growths, AT_LEISURE - 1, 10, 10), "it is in haste");
        for (limited, fixed) in [(true, false), (false, true)] {
            let policy = Policy::new(1 << 20, limited, fixed);
            assert!(!policy.exchanges(growths, AT_LEISURE, 10, 10));
        }
    }

    #[test]
    fn what_moves_for_a_request_counts_among_what_is_made_at_once() {
        let policy = Policy::new(1 << 20, false, false);
        let allowed = |before| Allowance {
            in_haste: false,
            long_at_work: false,
            roomy: false,
            settles: true,
            saved: 4096,
            before,
            in_time: 98,
        };
        let later = |before| Allowance { long_at_work: true, ..allowed(before) };
        assert_eq!([0, 50, 300].map(|moves| allowed(moves).at_once()), [64, 14, 1]);
        assert_eq!([0, 50, 300].map(|moves| later(moves).at_once()), [64, 14, 1]);
        // 300 granules more of a pool of 3,000: by one each, or by what would have been made in haste.
        let length = |moves| policy.at_leisure(18, 300, 3000, 300, allowed(moves));
        assert_eq!([0, 50, 300].map(length), [7, 18, 18]);
        let unsettled = Allowance { settles: false, ..allowed(0) };
        assert_eq!(policy.at_leisure(18, 300, 3000, 300, unsettled), 18);
        assert_eq!([0, 50, 300].map(|moves| policy.at_least(300, allowed(moves))), [5, 5, 5]);
        assert_eq!(policy.moves_at_once(allowed(300)), u32::MAX);
        let slow = |at| Allowance { in_time: 50, ..at };
        assert_eq!([slow(allowed(0)), slow(later(0))].map(Allowance::at_once), [44, 64]);
    }

    #[test]
    fn in_haste_a_request_has_few_extents_made_and_moved() {
        let [free, limited] = [false, true].map(|limited| Policy::new(1 << 20, limited, false));
        let in_haste = Allowance {
            in_haste: true,
            long_at_work: true,
            roomy: true,
            settles: false,
            saved: 0,
            before: 0,
            in_time: 98,
        };
        let at_least = |policy: &Policy, in_time| {
            [0, 20, 80, 300]
                .map(|before| policy.at_least(1200, Allowance { before, in_time, ..in_haste }))
        };
        // Thirty-two, or seventeen beside twenty that move, or at most eight.
        assert_eq!(at_least(&free, 98), [38, 71, 150, 150]);
        assert_eq!(at_least(&limited, 98), [12, 15, 30, 150]);
        let moves = |policy: &Policy, in_time| {
            [0, 50, 300]
                .map(|before| policy.moves_at_once(Allowance { before, in_time, ..in_haste }))
        };
        assert_eq!([moves(&free, 98), moves(&limited, 98)], [[54, 4, 0], [120, 70, 0]]);
        let at_leisure = Allowance { in_haste: false, ..in_haste };
        assert_eq!([&free, &limited].map(|of| of.moves_at_once(at_leisure)), [u32::MAX; 2]);
        let few = [AT_LEISURE - 1, AT_LEISURE, KEPT_AT_LIMIT, 2 * KEPT_AT_LIMIT];
        assert_eq!(few.map(|saved| free.is_in_haste(saved)), [true, false, false, false]);
        assert_eq!(few.map(|saved| limited.is_in_haste(saved)), [true, true, true, false]);
        // Fewer where they take longer; what has to be moved at a limit has to be in any case, and what moves once may.
        assert_eq!(
            [at_least(&free, 32), at_least(&limited, 32)],
            [[43, 110, 150, 150], [12, 15, 30, 150]]
        );
        assert_eq!([moves(&free, 32), moves(&limited, 32)], [[24, 0, 0], [120, 70, 0]]);
        let tight = Allowance { roomy: false, in_time: 48, ..in_haste };
        assert_eq!(free.moves_at_once(tight), 54);
    }

    /// What stays in the last extent that was mapped ahead pins it: in a large pool that is little.
    #[test]
    fn ahead_doubles_a_small_pool_and_is_short_in_a_large_one() {
        let policy = Policy::new(1 << 20, false, false);
        let growths = Growths {
            streak: 20,
            created: 100,
            made: 100,
            moved: 0,
            excess: 0,
            unsettled: 0,
            moved_since_half: 0,
            peak_live: 100,
            mapped: 0,
            hurried: false,
            made_once: None,
            random: false,
        };
        let ahead = [1, 40, LARGE, LARGE + 1, 100_000]
            .map(|mapped| policy.ahead(Growths { mapped, ..growths }, 1));
        assert_eq!(ahead, [1, 40, 128, 16, 16]);
    }

    #[test]
    fn extents_are_longer_in_haste_but_where_a_limit_is_set() {
        let lengths = |limited, request| {
            let policy = Policy::new(1 << 20, limited, false);
            [false, true]
                .map(|in_haste| policy.extent(13_440, request, request, true, in_haste, 98))
        };
        assert_eq!([lengths(false, 1), lengths(false, 19_200)], [[96, 140], [200, 200]]);
        let [at_leisure, in_haste] = lengths(true, 1);
        assert_eq!(at_leisure, in_haste);
    }

    #[test]
    fn with_a_slower_driver_and_a_limit_large_requests_have_longer_extents() {
        let lengths = |capacity, limited, in_time| {
            let policy = Policy::new(capacity, limited, false);
            let mapped = capacity / SLOW_FROM;
            [1, 11, 500].map(|request| policy.extent(mapped, request, 500, true, true, in_time))
        };
        let [quick, slow] = [IN_TIME_IF_QUICK, IN_TIME_IF_QUICK - 1];
        assert_eq!(lengths(5504, true, quick), [4, 4, 7]);
        assert_eq!(lengths(5504, true, slow), [4, 5, 8]);
        assert_eq!(lengths(20_000, true, slow), [14, 14, 28]);
        let policy = Policy::new(20_000, true, false);
        assert_eq!(policy.extent(20_000 / SLOW_FROM - 1, 500, 500, true, true, slow), 14);
        // Nor where they are of a granule or two, or there is no limit.
        for (capacity, limited) in [(2000, true), (20_000, false)] {
            let [quick, slow] = [quick, slow].map(|in_time| lengths(capacity, limited, in_time));
            assert_eq!(quick, slow);
        }
    }

    #[test]
    fn the_first_request_of_all_comes_in_sixteen_or_in_one() {
        let first = |request| {
            Policy::new(1 << 20, false, false).extent(0, request, request, true, true, 98)
        };
        assert_eq!([1, 16, 17, 125, 255, 256, 512].map(first), [1, 1, 2, 8, 16, 256, 512]);
    }

    #[test]
    fn at_a_small_limit_every_other_extent_is_longer_where_requests_are_large() {
        let lengths = |capacity, largest| -> u32 {
            let policy = Policy::new(capacity, true, false);
            (1000..1016).map(|mapped| policy.extent(mapped, 1, largest, true, true, 98)).sum()
        };
        assert_eq!(
            [0, 36, 54, 72, 1000].map(|largest| lengths(1400, largest)),
            [16, 16, 24, 32, 32]
        );
        // Where that fraction of the limit is more than a granule it is long enough.
        assert_eq!([0, 1000].map(|largest| lengths(2752, largest)), [32, 32]);
    }

    /// Else a loop whose requests never settle grows without end, since less and less moves.
    #[test]
    fn a_restless_pool_moves_nothing_until_it_has_an_eighth_more_than_was_live_and_half_as_a_rule()
    {
        let policy = Policy::new(1 << 20, false, false);
        let calm = Growths {
            streak: 0,
            created: 100,
            made: 100,
            moved: 800,
            excess: 800,
            unsettled: 800,
            moved_since_half: 0,
            hurried: false,
            made_once: None,
            random: false,
            peak_live: 4000,
            mapped: 4000,
        };
        let first = |excess, mapped| {
            let growths = Growths { moved: excess, unsettled: excess, mapped, ..calm };
            policy.moves_first(4000, growths, 0)
        };
        assert_eq!([first(800, 4000), first(801, 4000)], [Some(10 << 4), None]);
        let in_a_hurry = |mapped| {
            let growths = Growths { moved: 801, unsettled: 801, hurried: true, mapped, ..calm };
            policy.moves_first(4000, growths, 0)
        };
        assert_eq!([5999, 6000].map(in_a_hurry), [None, Some(10)]);
        // Sooner where all was given back before; but not if it has time.
        let again = |hurried, unsettled, mapped| {
            let anew = Growths { made_once: Some(50), hurried, ..calm };
            let growths = Growths { moved: 0, unsettled, mapped, ..anew };
            policy.moves_first(4000, growths, 0)
        };
        assert_eq!([100, 101].map(|moved| again(true, moved, 7999)), [Some(10), None]);
        assert_eq!(again(true, 101, 8000), Some(10));
        assert_eq!(
            [101, 800, 801].map(|moved| again(false, moved, 4000)),
            [Some(10), Some(10), None]
        );
        // And a sixteenth more each time that as many have moved again as were made.
        let since_half = |moved_since_half, mapped| {
            let restless = Growths { moved: 801, unsettled: 801, hurried: true, ..calm };
            policy.moves_first(4000, Growths { moved_since_half, mapped, ..restless }, 0)
        };
        assert_eq!([since_half(99, 6000), since_half(100, 6000)], [Some(10), None]);
        assert_eq!([since_half(100, 6249), since_half(100, 6250)], [None, Some(10)]);
        assert_eq!([since_half(u64::MAX, 6999), since_half(u64::MAX, 7000)], [None, Some(10)]);
        assert_eq!([first(801, 4499), first(801, 4500)], [None, Some(10)]);
        assert_eq!([first(900, 4999), first(900, 5000)], [None, Some(10)]);
        assert_eq!([first(u64::MAX, 5999), first(u64::MAX, 6000)], [None, Some(10)]);
        // Short extents that were made at leisure count, too: there are more that may move.
        let beyond_need = Growths { made: 101, unsettled: 801, ..calm };
        assert_eq!(policy.moves_first(4000, beyond_need, 0), Some(10 << 3));
        // What may go on for ever, or moved before the program had grown, makes no pool restless, but has it move
        // less.
        assert_eq!(policy.moves_first(4000, Growths { excess: 900, ..calm }, 0), Some(10 << 4));
        assert_eq!(policy.moves_first(4000, Growths { moved: 900, ..calm }, 0), Some(10 << 4));
        let ahead =
            |excess, mapped| policy.ahead(Growths { unsettled: excess, mapped, ..calm }, 1000);
        assert_eq!([ahead(800, 4000), ahead(801, 4000), ahead(801, 4250)], [0, 62, 0]);
        let limited = Policy::new(1 << 20, true, false);
        let roomy = |excess, mapped| Growths { excess, mapped, ..calm }.is_roomy();
        assert_eq!([roomy(101, 4125), roomy(100, 4125), roomy(101, 4124)], [true, false, false]);
        let short = |policy: &Policy, excess| policy.settles(Growths { excess, ..calm });
        assert_eq!(
            [short(&policy, 300), short(&policy, 301), short(&limited, 301)],
            [true, false, true]
        );
    }
}

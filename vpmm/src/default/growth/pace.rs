//! How much a pool has moved lately, and how much finer than need be it may grow.
//!
//! Moving instead of growing keeps the pool small and costs time, again and again where a program's
//! requests never settle. So moves count against further ones, and time makes up for them: a
//! program that works between its requests may go on moving, a loop that does nothing else soon
//! gets more memory instead. So does one that does the same for a long time: what it moves for then is
//! less and less, until it has what it needs.
//!
//! New memory in shorter extents keeps a pool small, too, and costs time once. That is saved up while the
//! program does something else than grow: one that has been at work for a while grows by short extents, one
//! that grows all at once by long ones.

#![forbid(unsafe_code)]

use std::time::Duration;

use super::again::{Again, Mark};

/// Handles that are saved up at most; and while one move is made up for.
const MOST_SAVED: u64 = 4096;
const SAVED_EACH: u32 = 32;

/// The time of the first so many is not saved up: 16 milliseconds by default. What ends within them gains
/// nothing by a smaller pool.
const NOT_SAVED: u128 = 512;

/// One move in so many for which there is time may go on for ever: 250 a second by default, a per cent of one
/// thread's time.
const LASTING: u32 = 4;

/// From one move for each so many handles on time makes up for fewer.
const WORN: u64 = 3;

/// Moves at so many times that rate are more than they are worth for a program whose sizes do not come again: 500
/// a second by default, 2 %.
const RESTIVE: u64 = 2;

/// Moves at so many times that rate are a good part of the program's time, 8,000 a second by default, some 20 %.
const HURRIED: u64 = 32;

/// And of a whole round, 4,000 a second: what it takes then it takes each time.
const HURRIED_AGAIN: u64 = 16;

/// A program is long at work that has had so much time of its own. It can bear a longer request then.
const LONG: Duration = Duration::from_millis(256);

/// From so many on a program is at leisure: it has been at work for some time, and can bear what costs more
/// than it gains at once.
pub(in crate::default) const AT_LEISURE: u64 = 256;

/// What emptying all fronts comes to: as much as a move. Every stream finds its front empty then.
pub(in crate::default) const EMPTIED: u64 = SAVED_EACH as u64;

/// Moves that count, and handles that are saved up, as of the last look.
pub(in crate::default) struct Pace {
    per_second: u32,
    moves: u64,
    /// All moves that there were, and those of them until the program had grown last.
    ever: u64,
    until_grown: u64,
    again: Again,
    /// Up to when time has been made up for, since the pool was made.
    until: Duration,
    saved: u64,
    /// Up to when time has been saved up, of the program's own.
    saved_until: Duration,
    /// What growth has taken: no time of the program's own.
    grown: Duration,
}

impl Pace {
    pub(in crate::default) fn new(per_second: u32) -> Self {
        let [until, saved_until, grown] = [Duration::ZERO; 3];
        let [moves, ever, until_grown, saved] = [0; 4];
        let again = Again::default();
        Self { per_second, moves, ever, until_grown, again, until, saved, saved_until, grown }
    }

    /// Whether time makes up for moves.
    pub(in crate::default) fn has_rate(&self) -> bool {
        self.per_second > 0
    }

    pub(super) fn note(&mut self, moves: u64) {
        self.moves += moves;
        self.ever += moves;
    }

    /// The moves that still count, so long after the pool was made, which has made so many handles.
    ///
    /// Time makes up for the fewer the more often handles have moved already, by the square of that from a
    /// third of them on: a pool that goes on moving for requests that come again and again had better grow a
    /// little.
    pub(super) fn moves(&mut self, now: Duration, made: u64) -> u64 {
        let Some(each) = Duration::from_secs(1).checked_div(self.per_second) else {
            return self.moves;
        };
        if each.is_zero() {
            // More than anybody can count: as many as there are.
            self.moves = 0;
            return 0;
        }
        let squared = |moves: u64| u128::from(moves) * u128::from(moves);
        let each = each.as_nanos();
        let worn = each.saturating_mul(squared(self.ever.saturating_mul(WORN)));
        let worn = worn / squared(made.max(1));
        let each = worn.max(each);
        let passed = now.saturating_sub(self.until).as_nanos();
        // Idle time is not saved up: no move counts less than nothing.
        let made_up = u64::try_from(passed / each).unwrap_or(u64::MAX);
        if made_up >= self.moves {
            self.moves = 0;
            self.until = now;
        } else {
            self.moves -= made_up;
            // No more than what has passed.
            let nanos = u64::try_from(each * u128::from(made_up)).unwrap_or(u64::MAX);
            self.until += Duration::from_nanos(nanos);
        }
        self.moves
    }

    /// The moves that there were beyond those that may go on for ever.
    pub(super) fn excess(&self, now: Duration) -> u64 {
        self.ever.saturating_sub(lasting(self.per_second, now))
    }

    /// Those of them since the program had grown last: what moved before tells nothing of whether it settles.
    pub(super) fn unsettled(&self, now: Duration) -> u64 {
        self.excess(now).min(self.ever - self.until_grown)
    }

    /// All moves that there were.
    pub(super) fn ever(&self) -> u64 {
        self.ever
    }

    /// The program has grown.
    pub(super) fn note_grown(&mut self) {
        self.until_grown = self.ever;
    }

    /// Callers have given back as good as all that they had, so long after the pool was made, which has made so many
    /// extents and taken so many blocks back: what comes now comes again.
    pub(in crate::default) fn begin_anew(&mut self, now: Duration, made: u64, returns: u64) {
        let mark = Mark { at: now, returns, moves: self.ever, grown: self.grown };
        let many = |passed| lasting(self.per_second, passed).saturating_mul(HURRIED_AGAIN);
        self.again.begin(mark, made, many);
    }

    /// The extents that had been made when they first did, if they did.
    pub(in crate::default) fn made_once(&self) -> Option<u64> {
        self.again.made_once()
    }

    /// Whether moves take more of the program's time than they are worth where they are for one request only.
    pub(super) fn is_restive(&self, now: Duration) -> bool {
        self.is_beyond(now, RESTIVE)
    }

    /// Whether moves take a good part of the program's time: of its last round, or else of all.
    pub(super) fn is_hurried(&self, now: Duration) -> bool {
        self.again.was_hurried().unwrap_or_else(|| self.is_beyond(now, HURRIED))
    }

    fn is_beyond(&self, now: Duration, times: u64) -> bool {
        self.has_rate() && self.ever > lasting(self.per_second, now).saturating_mul(times)
    }

    /// The pool has grown for so long.
    pub(in crate::default) fn note_growth(&mut self, took: Duration) {
        self.grown = self.grown.saturating_add(took);
    }

    /// Whether the program has had much time of its own, so long after the pool was made; without a rate no time
    /// counts.
    pub(super) fn is_long_at_work(&self, now: Duration) -> bool {
        self.has_rate() && now.saturating_sub(self.grown) >= LONG
    }

    /// The handles that may be made beyond what is needed, so long after the pool was made.
    pub(in crate::default) fn saved(&mut self, now: Duration) -> u64 {
        let per_second = self.per_second.saturating_mul(SAVED_EACH);
        let Some(each) = Duration::from_secs(1).checked_div(per_second) else { return 0 };
        let each = each.as_nanos().max(1);
        let own = now.saturating_sub(self.grown);
        let own = own.saturating_sub(Duration::from_nanos((each * NOT_SAVED) as u64));
        let passed = own.saturating_sub(self.saved_until).as_nanos();
        let earned = u64::try_from(passed / each).unwrap_or(u64::MAX);
        if earned >= MOST_SAVED {
            (self.saved, self.saved_until) = (MOST_SAVED, own);
        } else {
            self.saved = (self.saved + earned).min(MOST_SAVED);
            self.saved_until += Duration::from_nanos(each as u64 * earned);
        }
        self.saved
    }

    pub(in crate::default) fn spend(&mut self, handles: u64) {
        self.saved = self.saved.saturating_sub(handles);
    }
}

/// The moves that may go on for ever at such a rate, for so long.
fn lasting(per_second: u32, passed: Duration) -> u64 {
    let lasting = passed.as_micros() * u128::from(per_second / LASTING) / 1_000_000;
    u64::try_from(lasting).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLI: Duration = Duration::from_millis(1);

    #[test]
    fn time_makes_up_for_moves_and_is_not_saved() {
        let mut pace = Pace::new(100);
        assert_eq!(pace.moves(500 * MILLI, 100), 0);
        pace.note(10);
        assert_eq!(pace.moves(500 * MILLI, 100), 10);
        // One each ten milliseconds; what is left of one counts at the next look.
        assert_eq!(pace.moves(515 * MILLI, 100), 9);
        assert_eq!(pace.moves(520 * MILLI, 100), 8);
        assert_eq!(pace.moves(519 * MILLI, 100), 8);
        assert_eq!(pace.moves(3600 * 1000 * MILLI, 100), 0);
        pace.note(5);
        assert_eq!(pace.moves(3600 * 1000 * MILLI + 9 * MILLI, 100), 5);
    }

    #[test]
    fn the_more_often_handles_have_moved_the_less_time_makes_up_for() {
        let mut pace = Pace::new(100);
        pace.note(30);
        // A half of sixty has moved, one and a half of those that wear: one move in 22.5 milliseconds.
        assert_eq!(pace.moves(22 * MILLI, 60), 30);
        assert_eq!(pace.moves(23 * MILLI, 60), 29);
        assert_eq!(pace.moves(45 * MILLI, 60), 28);
        // A third of ninety: one in ten. And of more.
        assert_eq!(pace.moves(55 * MILLI, 90), 27);
        assert_eq!(pace.moves(65 * MILLI, 270), 26);
        pace.note(u64::MAX / 2);
        assert!(pace.moves(3600 * 1000 * MILLI, 0) > u64::MAX / 4);
    }

    #[test]
    fn a_pool_is_restive_before_it_is_hurried_and_neither_without_a_rate() {
        let mut pace = Pace::new(100);
        pace.note(101);
        // 25 a second may go on: 50 are restive, 800 hurried.
        let both = |pace: &Pace, at: Duration| [pace.is_restive(at), pace.is_hurried(at)];
        assert_eq!(both(&pace, 100 * MILLI), [true, true]);
        assert_eq!(
            [1000, 2000, 2040].map(|at| both(&pace, at * MILLI)),
            [[true, false], [true, false], [false, false]]
        );
        let mut pace = Pace::new(0);
        pace.note(1000);
        assert_eq!(both(&pace, MILLI), [false, false]);
    }

    #[test]
    fn some_moves_may_go_on_for_ever() {
        let mut pace = Pace::new(100);
        pace.note(60);
        assert_eq!([0, 1000, 2000, 3000].map(|at| pace.excess(at * MILLI)), [60, 35, 10, 0]);
        let mut pace = Pace::new(0);
        pace.note(60);
        assert_eq!(pace.excess(Duration::MAX), 60);
        let mut pace = Pace::new(u32::MAX);
        pace.note(60);
        assert_eq!(pace.excess(MILLI), 0);
    }

    #[test]
    fn what_moved_before_a_program_had_grown_says_nothing_of_whether_it_settles() {
        let mut pace = Pace::new(0);
        pace.note(60);
        pace.note_grown();
        assert_eq!([pace.unsettled(MILLI), pace.excess(MILLI)], [0, 60]);
        pace.note(7);
        assert_eq!([pace.unsettled(MILLI), pace.excess(MILLI)], [7, 67]);
        // Nor do those that may go on for ever.
        let mut pace = Pace::new(100);
        pace.note(60);
        pace.note_grown();
        pace.note(30);
        let counted = |seconds: u32| pace.unsettled(seconds * 1000 * MILLI);
        assert_eq!([0, 1, 3, 4].map(counted), [30, 30, 15, 0]);
    }

    #[test]
    fn moves_in_no_time_are_hurried() {
        let mut pace = Pace::new(1000);
        assert!(!pace.is_hurried(Duration::ZERO));
        pace.note(8001);
        assert!(pace.is_hurried(1000 * MILLI) && !pace.is_hurried(1004 * MILLI));
        let mut pace = Pace::new(0);
        pace.note(60);
        assert!(!pace.is_hurried(MILLI), "no time is known there");
    }

    #[test]
    fn a_round_that_is_known_decides_whether_a_pool_is_hurried() {
        let mut pace = Pace::new(1000);
        pace.note(4001);
        assert!(!pace.is_hurried(1000 * MILLI));
        pace.begin_anew(1000 * MILLI, 7, 1000);
        assert!(pace.is_hurried(3600 * 1000 * MILLI), "4,001 in the last round");
        pace.note(4000);
        pace.begin_anew(2000 * MILLI, 8, 2000);
        assert!(!pace.is_hurried(2000 * MILLI));
        pace.note_growth(101 * MILLI);
        pace.begin_anew(3000 * MILLI, 9, 3000);
        assert!(pace.is_hurried(3000 * MILLI), "growth took more than a tenth");
        assert_eq!(pace.made_once(), Some(7));
        let mut pace = Pace::new(0);
        pace.note(8001);
        pace.begin_anew(Duration::ZERO, 7, 1000);
        assert!(!pace.is_hurried(MILLI), "no time is known there");
    }

    #[test]
    fn growth_is_no_time_at_work() {
        let mut pace = Pace::new(1000);
        assert!(!pace.is_long_at_work(255 * MILLI) && pace.is_long_at_work(256 * MILLI));
        pace.note_growth(100 * MILLI);
        assert!(!pace.is_long_at_work(355 * MILLI) && pace.is_long_at_work(356 * MILLI));
        assert!(!Pace::new(0).is_long_at_work(Duration::MAX), "no time is known there");
    }

    #[test]
    fn handles_are_saved_up_to_a_bound_and_spent() {
        let mut pace = Pace::new(PER_SECOND);
        let saved = |pace: &mut Pace, halves| pace.saved(START + EACH * halves / 2);
        assert_eq!([pace.saved(Duration::ZERO), pace.saved(START)], [0, 0]);
        assert_eq!([saved(&mut pace, 5), saved(&mut pace, 6)], [2, 3]);
        pace.spend(2);
        assert_eq!([saved(&mut pace, 6), saved(&mut pace, 8)], [1, 2]);
        assert_eq!(pace.saved(3600 * 1000 * MILLI), MOST_SAVED);
        pace.spend(MOST_SAVED + 1);
        assert_eq!(pace.saved(3600 * 1000 * MILLI), 0);
        assert_eq!(Pace::new(0).saved(Duration::MAX), 0);
        assert_eq!(Pace::new(u32::MAX).saved(MILLI), MOST_SAVED);
    }

    #[test]
    fn nothing_is_saved_up_while_the_pool_grows() {
        let mut pace = Pace::new(PER_SECOND);
        pace.note_growth(4 * EACH);
        assert_eq!([pace.saved(START + 4 * EACH), pace.saved(START + 6 * EACH)], [0, 2]);
        pace.note_growth(2 * EACH);
        assert_eq!([pace.saved(START + 8 * EACH), pace.saved(START + 9 * EACH)], [2, 3]);
    }

    /// What saves one handle at so many moves a second, and from when on.
    const PER_SECOND: u32 = 4000 / SAVED_EACH;
    const EACH: Duration = Duration::from_micros(250);
    const START: Duration = Duration::from_micros(250 * NOT_SAVED as u64);

    #[test]
    fn without_a_rate_all_moves_count_for_ever() {
        let mut pace = Pace::new(0);
        pace.note(7);
        assert_eq!(pace.moves(Duration::MAX, 100), 7);
        let mut pace = Pace::new(u32::MAX);
        pace.note(u64::MAX / 2);
        assert_eq!(pace.moves(Duration::ZERO, 0), 0);
    }
}

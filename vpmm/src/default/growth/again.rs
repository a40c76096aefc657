//! Programs that begin from nothing again: callers have given back as good as all that they had.
//!
//! What comes then comes again. What a pool lacked for it the first time it lacks each further time, and a program
//! that spends a good part of its time on having memory moved for that had better have more. A whole round tells
//! whether it does, however long the driver takes.

#![forbid(unsafe_code)]

use std::time::Duration;

/// What growth takes of a round in which the program was in a hurry: one part in so many.
const HURRIED_PART: u32 = 10;

/// What is shorter than a round of any program that it could matter to belongs to the next.
const TELLING: Duration = Duration::from_millis(1);

/// And what has fewer blocks that come back behind fronts: a pool that is primed by a large one has done nothing but
/// grow when that is given back.
const TELLING_BLOCKS: u64 = 128;

/// How far a pool has come.
#[derive(Clone, Copy, Default)]
pub(super) struct Mark {
    /// So long after it was made.
    pub(super) at: Duration,
    /// All blocks that have come back behind fronts.
    pub(super) returns: u64,
    /// All moves that there were.
    pub(super) moves: u64,
    /// What growth has taken.
    pub(super) grown: Duration,
}

#[derive(Default)]
pub(super) struct Again {
    /// The extents that had been made when callers first gave back all.
    made_once: Option<u64>,
    /// When they did last.
    last: Mark,
    was_hurried: Option<bool>,
}

impl Again {
    /// Callers have given back as good as all; so many extents have been made, and `many` moves take a good part of
    /// such a time.
    pub(super) fn begin(&mut self, now: Mark, made: u64, many: impl FnOnce(Duration) -> u64) {
        let last = self.last;
        if now.returns.saturating_sub(last.returns) < TELLING_BLOCKS {
            return;
        }
        self.made_once.get_or_insert(made);
        let passed = now.at.saturating_sub(last.at);
        if passed >= TELLING {
            let grew = now.grown.saturating_sub(last.grown);
            let moved = now.moves.saturating_sub(last.moves);
            self.was_hurried = Some(grew > passed / HURRIED_PART || moved > many(passed));
            self.last = now;
        }
    }

    pub(super) fn made_once(&self) -> Option<u64> {
        self.made_once
    }

    /// Whether moves took a good part of the program's time in the last round, if there was one.
    pub(super) fn was_hurried(&self) -> Option<bool> {
        self.was_hurried
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLI: Duration = Duration::from_millis(1);

    #[test]
    fn a_round_is_hurried_by_its_growth_or_its_moves() {
        let mut again = Again::default();
        let mut now = Mark::default();
        let mut round = |took: Duration, grew: Duration, moves: u64| {
            now.returns += TELLING_BLOCKS;
            now.at += took;
            now.grown += grew;
            now.moves += moves;
            again.begin(now, now.moves, |passed| passed.as_millis() as u64);
            again.was_hurried()
        };
        assert_eq!(round(MILLI / 2, MILLI / 2, 0), None);
        // What ended within less than a millisecond belongs to the next.
        assert_eq!(round(MILLI / 2, Duration::ZERO, 1), Some(true));
        assert_eq!(round(10 * MILLI, MILLI, 10), Some(false));
        assert_eq!(round(10 * MILLI, MILLI + MILLI / 100, 0), Some(true));
        assert_eq!(round(10 * MILLI, Duration::ZERO, 11), Some(true));
        assert_eq!(round(MILLI / 2, Duration::ZERO, 0), Some(true));
        assert_eq!(round(MILLI / 2, Duration::ZERO, 1), Some(false));
        assert_eq!(again.made_once(), Some(0));
    }

    #[test]
    fn a_few_blocks_are_no_round() {
        let mut again = Again::default();
        let mut now = Mark::default();
        let mut begin = |returned: u64, grew: Duration, made: u64| {
            now.at += 10 * MILLI;
            now.returns += returned;
            now.grown += grew;
            again.begin(now, made, |_| 0);
            (again.was_hurried(), again.made_once())
        };
        assert_eq!(begin(1, 9 * MILLI, 1), (None, None));
        assert_eq!(begin(TELLING_BLOCKS - 2, Duration::ZERO, 2), (None, None));
        assert_eq!(begin(1, Duration::ZERO, 3), (Some(true), Some(3)));
        assert_eq!(begin(1, 9 * MILLI, 4), (Some(true), Some(3)));
        assert_eq!(begin(TELLING_BLOCKS, Duration::ZERO, 5), (Some(true), Some(3)));
        assert_eq!(begin(TELLING_BLOCKS, Duration::ZERO, 6), (Some(false), Some(3)));
    }
}

//! Ebbs of what callers have.
//!
//! What a front keeps pins memory in places that the last requests left to chance. A program that
//! goes round and round would find other gaps in each round for that, and where memory is short
//! each of them would move something. Emptied of large blocks while most memory is free, fronts leave
//! little of one round to the next: the same requests find much the same free blocks. (Small blocks
//! lie apart, and to take them out too would cost more than it gains.)

#![forbid(unsafe_code)]

/// An ebb begins below this share of the crest before it.
const EBB: (u64, u64) = (5, 8);

/// On the way down the next comes when less than this share is left of what the last one saw.
const LOWER: (u64, u64) = (7, 8);

/// What callers have, as far as an ebb depends on it. Units.
#[derive(Default)]
pub(in crate::default) struct Tide {
    /// Less than this is an ebb.
    mark: u64,
    /// One has been told since the last crest.
    is_low: bool,
}

/// An ebb that has not been told yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::default) struct Ebb {
    /// It is the first after a crest.
    pub(in crate::default) is_first: bool,
}

impl Tide {
    /// The ebb that this is, if it is one.
    #[inline]
    pub(in crate::default) fn ebb(&mut self, live: u64) -> Option<Ebb> {
        let share = |(part, whole)| live / whole * part;
        if live < self.mark {
            self.mark = share(LOWER);
            return Some(Ebb { is_first: !std::mem::replace(&mut self.is_low, true) });
        }
        let mark = share(EBB);
        if mark > self.mark {
            self.mark = mark;
            self.is_low = false;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ebb_is_told_once_for_each_step_down_and_again_after_a_crest() {
        let mut tide = Tide::default();
        let mut ebb = |live| tide.ebb(live).map(|ebb| ebb.is_first);
        let [first, further] = [Some(true), Some(false)];
        assert_eq!([0, 400, 800, 500].map(&mut ebb), [None; 4]);
        assert_eq!([496, 440, 432, 0, 0].map(&mut ebb), [first, None, further, further, None]);
        // Half of what a crest was is a low tide only after that crest.
        assert_eq!([80, 40, 800, 400].map(&mut ebb), [None, first, None, first]);
    }
}

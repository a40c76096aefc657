//! Where mappings begin that are still to be unmapped.
//!
//! Neighbouring zombies are one region, and one driver call unmaps all mappings in it; but it takes some
//! 15 µs for each of them, and a zombie of a pool at its limit comes to thousands. So a request unmaps some,
//! up to where one ends.

#![forbid(unsafe_code)]

use std::ops::Range;

/// A bit for each granule of addresses.
pub(super) struct Starts(Vec<u64>);

impl Starts {
    pub(super) fn new(granules: u32) -> Self {
        Self(vec![0; granules.div_ceil(u64::BITS) as usize])
    }

    pub(super) fn note(&mut self, granule: u32) {
        if let Some(word) = self.0.get_mut((granule / u64::BITS) as usize) {
            *word |= 1 << (granule % u64::BITS);
        }
    }

    /// What began in a range is unmapped.
    pub(super) fn forget(&mut self, range: Range<u32>) {
        let mut at = range.start;
        while let Some(start) = self.next(at, range.end) {
            self.0[(start / u64::BITS) as usize] &= !(1 << (start % u64::BITS));
            at = start + 1;
        }
    }

    /// How far so many mappings reach, of those that a range is whole ones of; and how many they are.
    pub(super) fn first(&self, most: u64, range: Range<u32>) -> (u32, u64) {
        let (mut at, mut count) = (range.start, 0);
        while at < range.end && count < most {
            at = self.next(at + 1, range.end).unwrap_or(range.end);
            count += 1;
        }
        (at, count)
    }

    /// Where the first mapping at or above a granule begins.
    pub(super) fn next(&self, from: u32, end: u32) -> Option<u32> {
        let mut at = from;
        while at < end {
            let word = self.0.get((at / u64::BITS) as usize)? >> (at % u64::BITS);
            if word != 0 {
                return Some(at + word.trailing_zeros()).filter(|found| *found < end);
            }
            at = (at / u64::BITS + 1) * u64::BITS;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_mappings_end_where_the_next_begins() {
        let mut starts = Starts::new(300);
        [3, 4, 64, 127, 128, 250].into_iter().for_each(|at| starts.note(at));
        assert_eq!(starts.first(1, 3..200), (4, 1));
        assert_eq!(starts.first(3, 3..200), (127, 3));
        assert_eq!(starts.first(9, 3..200), (200, 5));
        assert_eq!(starts.first(2, 128..300), (300, 2));
        assert_eq!(starts.first(0, 3..200), (3, 0));
        assert_eq!(starts.first(u64::MAX, 250..251), (251, 1));
        starts.forget(4..128);
        assert_eq!([0, 4, 200].map(|from| starts.next(from, 300)), [Some(3), Some(128), Some(250)]);
        assert_eq!([starts.next(4, 128), starts.next(251, 9000)], [None; 2]);
        assert_eq!(starts.first(1, 3..300), (128, 1));
    }
}

//! How sizes are rounded, and how much is asked of the device for them.

#![forbid(unsafe_code)]

use std::fmt;

/// Every block is a multiple of this, so no block is smaller.
pub const MIN_BLOCK_SIZE: usize = 512;
/// The largest request, rounded, that the small pool serves.
pub const SMALL_SIZE: usize = 1 << 20;
/// A segment of the small pool.
pub const SMALL_BUFFER: usize = 2 << 20;
/// A segment for requests above [`SMALL_SIZE`] and below [`MIN_LARGE_ALLOC`].
pub const LARGE_BUFFER: usize = 20 << 20;
/// The least request, rounded, that gets a segment of its own size.
pub const MIN_LARGE_ALLOC: usize = 10 << 20;
/// What segments of their request's own size are multiples of.
pub const ROUND_LARGE: usize = 2 << 20;

/// A request rounded up as the allocator does by default: to multiples of [`MIN_BLOCK_SIZE`], none
/// to one such. A size that cannot be rounded in a `usize` stays as it is; the allocator refuses it.
///
/// ```
/// use vpmm::caching::{MIN_BLOCK_SIZE, round_size};
/// assert_eq!(round_size(1), MIN_BLOCK_SIZE);
/// assert_eq!(round_size(513), 1024);
/// ```
pub const fn round_size(size: usize) -> usize {
    if size < MIN_BLOCK_SIZE {
        return MIN_BLOCK_SIZE;
    }
    match size.checked_next_multiple_of(MIN_BLOCK_SIZE) {
        Some(rounded) => rounded,
        None => size,
    }
}

/// The bytes of the segment that is made for a rounded size, where nothing cached serves it.
///
/// ```
/// use vpmm::caching::get_allocation_size;
/// assert_eq!(get_allocation_size(512), 2 << 20);
/// assert_eq!(get_allocation_size((1 << 20) + 512), 20 << 20);
/// assert_eq!(get_allocation_size((10 << 20) + 512), 12 << 20);
/// ```
pub const fn get_allocation_size(size: usize) -> usize {
    match segment_bytes(size as u64, LARGE_BUFFER as u64) {
        Some(bytes) => bytes as usize,
        None => size,
    }
}

/// The same with another length of the segments in the middle; `None` where it overflows.
pub(super) const fn segment_bytes(rounded: u64, middle: u64) -> Option<u64> {
    if rounded <= SMALL_SIZE as u64 {
        Some(SMALL_BUFFER as u64)
    } else if rounded < MIN_LARGE_ALLOC as u64 {
        Some(middle)
    } else {
        rounded.checked_next_multiple_of(ROUND_LARGE as u64)
    }
}

/// Which of the two pools.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum Kind {
    Small,
    Large,
}

impl Kind {
    pub(super) const BOTH: [Self; 2] = [Self::Small, Self::Large];

    /// The pool that serves a rounded size.
    #[inline]
    pub(super) fn of(rounded: u64) -> Self {
        if rounded <= SMALL_SIZE as u64 { Self::Small } else { Self::Large }
    }
}

/// Into how many equal steps each doubling of sizes is divided for rounding: PyTorch's
/// `roundup_power2_divisions`. One number for sizes below 2 MiB, one for each doubling from there,
/// and one for all from 32 GiB up. Where it is 0 or 1, sizes are rounded to [`MIN_BLOCK_SIZE`] only.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Divisions([u32; Self::INTERVALS]);

impl Divisions {
    pub(super) const INTERVALS: usize = 16;

    /// The same number for all sizes.
    ///
    /// `None` unless it is 0 or a power of two.
    pub fn uniform(divisions: u32) -> Option<Self> {
        (divisions == 0 || divisions.is_power_of_two()).then_some(Self([divisions; 16]))
    }

    /// Sets the number for sizes from `from_mib` MiB (a power of two) to twice that.
    ///
    /// `None`, and nothing set, where either is not what it must be.
    pub fn set(&mut self, from_mib: u64, divisions: u32) -> Option<()> {
        let valid = divisions == 0 || divisions.is_power_of_two();
        let interval = interval_of(from_mib.checked_mul(1 << 20)?);
        if !valid || !from_mib.is_power_of_two() {
            return None;
        }
        self.0[interval] = divisions;
        Some(())
    }

    /// Sets the numbers of a range of intervals.
    pub(super) fn fill(&mut self, intervals: impl std::ops::RangeBounds<usize>, divisions: u32) {
        for (interval, of) in self.0.iter_mut().enumerate() {
            if intervals.contains(&interval) {
                *of = divisions;
            }
        }
    }

    /// The number for a size.
    pub fn of(&self, bytes: u64) -> u32 {
        self.0[interval_of(bytes)]
    }

    /// Whether any size is rounded by it.
    pub(super) fn any(&self) -> bool {
        self.0.iter().any(|of| *of > 1)
    }

    /// A request rounded up; `None` where that overflows.
    pub(super) fn round(&self, bytes: u64) -> Option<u64> {
        match self.step(bytes) {
            Some(step) => bytes.checked_next_multiple_of(step),
            None => round_plain(bytes),
        }
    }

    /// What sizes like this one are multiples of; `None` for [`MIN_BLOCK_SIZE`].
    fn step(&self, bytes: u64) -> Option<u64> {
        let divisions = u64::from(self.of(bytes));
        // Above 512 bytes a division, so that a step is a multiple of 512.
        let is_divided = divisions > 1 && bytes > MIN_BLOCK_SIZE as u64 * divisions;
        is_divided.then(|| (1 << bytes.ilog2()) / divisions)
    }

    /// The longest request that is not rounded to more than this, a multiple of [`MIN_BLOCK_SIZE`].
    pub(super) fn longest(&self, rounded: u64) -> u64 {
        self.step(rounded).map_or(rounded, |step| rounded - rounded % step)
    }
}

/// As PyTorch takes them: one number, or a list of the least MiB and the number for each doubling.
impl fmt::Display for Divisions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (numbers, most) = (self.0, self.0[Self::INTERVALS - 1]);
        // The first of a list counts for what is less as well, and the last one for what is more.
        let Some(first) = numbers.iter().position(|of| *of != numbers[0]) else {
            return write!(f, "{most}");
        };
        let last = numbers.iter().rposition(|of| *of != most).map_or(0, |at| at + 1);
        let mut open = '[';
        for (interval, of) in numbers.iter().enumerate().take(last + 1).skip(first - 1) {
            write!(f, "{open}{}:{of}", 1_u64 << interval)?;
            open = ',';
        }
        write!(f, ",>:{most}]")
    }
}

fn interval_of(bytes: u64) -> usize {
    let mib = bytes >> 20;
    (mib.checked_ilog2().unwrap_or(0) as usize).min(Divisions::INTERVALS - 1)
}

/// A request rounded up to multiples of 512; `None` where that overflows.
#[inline]
pub(super) fn round_plain(bytes: u64) -> Option<u64> {
    const UNIT: u64 = MIN_BLOCK_SIZE as u64;
    Some(bytes.max(1).checked_add(UNIT - 1)? & !(UNIT - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn sizes_at_the_borders() {
        for (size, rounded) in [(0, 512), (1, 512), (511, 512), (512, 512), (513, 1024)] {
            assert_eq!(round_size(size), rounded);
            assert_eq!(round_plain(size as u64), Some(rounded as u64));
        }
        assert_eq!(round_size(usize::MAX), usize::MAX);
        assert_eq!(round_plain(u64::MAX), None);
        assert_eq!(round_plain(u64::MAX - 511), Some(u64::MAX - 511));
    }

    #[test]
    fn segments_at_the_borders() {
        for (size, segment) in [
            (512, SMALL_BUFFER),
            (SMALL_SIZE, SMALL_BUFFER),
            (SMALL_SIZE + 512, LARGE_BUFFER),
            (MIN_LARGE_ALLOC - 512, LARGE_BUFFER),
            (MIN_LARGE_ALLOC, MIN_LARGE_ALLOC),
            (MIN_LARGE_ALLOC + 512, MIN_LARGE_ALLOC + ROUND_LARGE),
            (usize::MAX, usize::MAX),
        ] {
            assert_eq!(get_allocation_size(size), segment);
        }
        assert_eq!(segment_bytes(u64::MAX - 511, 0), None);
    }

    #[test]
    fn doublings_are_divided() {
        let Some(four) = Divisions::uniform(4) else { panic!("a power of two") };
        // The example of PyTorch's documentation: 1200 in four steps between 1024 and 2048.
        assert_eq!(four.round(1200), Some(1536), "below 512 a step: multiples of 512");
        for (bytes, rounded) in [
            (2048, 2048),
            (2049, 2560),
            (5 * MIB, 5 * MIB),
            (5 * MIB + 1, 6 * MIB),
            (7 * MIB + 1, 8 * MIB),
            (8 * MIB, 8 * MIB),
        ] {
            assert_eq!(four.round(bytes), Some(rounded), "{bytes}");
        }
        assert_eq!(four.round(u64::MAX), None);
        assert_eq!(Divisions::uniform(3), None);
    }

    #[test]
    fn every_rounding_is_a_multiple_of_512_and_not_below_its_size() {
        for divisions in [0, 1, 2, 4, 8, 64, 1024] {
            let Some(rule) = Divisions::uniform(divisions) else { panic!("a power of two") };
            for bytes in
                (0..4096).chain((0..48).flat_map(|bit| [1 << bit, (1 << bit) + 1, 3 << bit]))
            {
                let rounded = rule.round(bytes).unwrap_or(0);
                assert!(rounded >= bytes.max(1) && rounded.is_multiple_of(512));
                assert!(rounded < bytes.max(256) * 2 + 512);
            }
        }
    }

    #[test]
    fn intervals_have_numbers_of_their_own() {
        let mut rule = Divisions::default();
        assert_eq!(rule.set(256, 2), Some(()));
        assert_eq!((rule.set(3, 2), rule.set(4, 3), rule.set(u64::MAX, 1)), (None, None, None));
        assert_eq!((rule.of(256 * MIB - 1), rule.of(256 * MIB), rule.of(512 * MIB)), (0, 2, 0));
        rule.fill(10.., 8);
        assert_eq!((rule.of(1024 * MIB), rule.of(u64::MAX)), (8, 8));
        assert_eq!(rule.round(300 * MIB), Some(384 * MIB));
        assert!(rule.any() && !Divisions::default().any());
    }
}

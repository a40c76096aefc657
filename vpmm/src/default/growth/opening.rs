//! How long the driver takes to open a mapping, and how many one request has time for.
//!
//! Opening is most of what growth costs, and goes by mappings, not by bytes. It takes 20 microseconds on one
//! machine and 26 to 40 on others, so what a number of mappings takes is known only from the calls that were
//! made.

#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// A request's time in the driver, where it need not be longer.
const IN_TIME: Duration = Duration::from_micros(2550);

/// What is to be done for a mapping besides: it is made, and what was mapped there before is noted.
const BESIDES: u32 = 6_000;

/// On the quickest machine that was measured; what a pool begins with.
const QUICKEST: u32 = 20_000;

/// One call's share of the mean, as a shift, and what counts at most: a call that waited for something says
/// nothing about the next.
const SHARE: u32 = 3;
const MOST: u32 = 80_000;

/// The mean of what a mapping took, in nanoseconds.
pub(in crate::default) struct Opening(AtomicU32);

impl Default for Opening {
    fn default() -> Self {
        Self(AtomicU32::new(QUICKEST))
    }
}

impl Opening {
    /// Opening so many mappings took so long. Of two threads' calls at once one may not count.
    pub(super) fn note(&self, took: Duration, mappings: usize) {
        let each = took.as_nanos() / mappings.max(1) as u128;
        let each = u32::try_from(each).unwrap_or(MOST).min(MOST);
        let mean = self.0.load(Ordering::Relaxed);
        self.0.store(mean - (mean >> SHARE) + (each >> SHARE), Ordering::Relaxed);
    }

    /// The mappings that a request has time for.
    pub(super) fn in_time(&self) -> u32 {
        let each = self.0.load(Ordering::Relaxed) + BESIDES;
        IN_TIME.as_nanos() as u32 / each
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MICRO: Duration = Duration::from_micros(1);

    #[test]
    fn the_longer_opening_takes_the_fewer_have_time() {
        let opening = Opening::default();
        assert_eq!(opening.in_time(), 98);
        (0..30).for_each(|_| opening.note(40 * 39 * MICRO, 40));
        assert_eq!(opening.in_time(), 57);
        (0..60).for_each(|_| opening.note(20 * MICRO, 1));
        assert!((96..=98).contains(&opening.in_time()));
        (0..60).for_each(|_| opening.note(Duration::ZERO, 0));
        assert!(opening.in_time() > 390);
    }

    #[test]
    fn one_call_that_waited_says_little() {
        let opening = Opening::default();
        opening.note(Duration::MAX, 1);
        assert_eq!(opening.in_time(), 2_550_000 / (17_500 + 10_000 + 6_000));
        (0..100).for_each(|_| opening.note(Duration::MAX, 1));
        assert_eq!(opening.in_time(), 29);
    }
}

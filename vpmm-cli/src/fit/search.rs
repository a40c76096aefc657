//! The search for a limit: outwards until one is enough, then by halves.
//!
//! Limits are counted in granules here. Nothing below the peak of live bytes can be
//! enough, so the search begins there: most allocators end near it.

use std::ops::RangeInclusive;

/// How many granules above the found limit are tried one by one.
const NEXT: u64 = 4;

/// Further limits that are tried, in thousandths above the found one.
const THOUSANDTHS_ABOVE: [u64; 4] = [5, 10, 20, 50];

/// A limit that is enough.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Enough<T> {
    /// The limit; the attempt at the next lower one failed, or nothing lower was possible.
    pub(super) granules: u64,
    /// What the attempt at it came to.
    pub(super) result: T,
    /// Limits above it that were tried and were not enough, in ascending order.
    pub(super) fails_above: Vec<u64>,
}

/// Finds a limit within `range` that is enough although the next lower one is not.
/// `attempt` tells what came of a limit, `None` where it was not enough.
///
/// If every limit above one that is enough were enough, this would be the smallest.
/// It is not quite so, since a larger limit leads an allocator other ways: hence
/// the attempts above.
///
/// # Errors
/// The first of `attempt`.
pub(super) fn search<T, E>(
    range: RangeInclusive<u64>,
    mut attempt: impl FnMut(u64) -> Result<Option<T>, E>,
) -> Result<Option<Enough<T>>, E> {
    let (least, most) = range.into_inner();
    if least > most {
        return Ok(None);
    }
    // Outwards: `short` is not enough, `tried` may be.
    let mut short = None;
    let mut tried = least;
    // A thousandth of the least: half of what allocators need above it is not much more.
    let mut step = (least / 1024).max(1);
    let (mut granules, mut result) = loop {
        if let Some(result) = attempt(tried)? {
            break (tried, result);
        }
        if tried == most {
            return Ok(None);
        }
        short = Some(tried);
        tried = tried.saturating_add(step).min(most);
        step = step.saturating_mul(2);
    };
    // By halves: `granules` is enough.
    while let Some(lower) = short.filter(|lower| granules - lower > 1) {
        let middle = lower + (granules - lower) / 2;
        match attempt(middle)? {
            Some(better) => (granules, result) = (middle, better),
            None => short = Some(middle),
        }
    }
    let mut fails_above = Vec::new();
    for above in limits_above(granules, most) {
        if attempt(above)?.is_none() {
            fails_above.push(above);
        }
    }
    Ok(Some(Enough { granules, result, fails_above }))
}

/// The limits above `found` that are tried, ascending, each once.
fn limits_above(found: u64, most: u64) -> Vec<u64> {
    let next = (1..=NEXT).map(|more| found.saturating_add(more));
    let further = THOUSANDTHS_ABOVE
        .map(|part| found.saturating_add(found.saturating_mul(part).div_ceil(1000)));
    let mut limits: Vec<u64> = next.chain(further).filter(|limit| *limit <= most).collect();
    limits.sort_unstable();
    limits.dedup();
    limits
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    /// The limit that is found where `enough` says what is, and every limit that was tried.
    fn found(
        range: RangeInclusive<u64>,
        enough: impl Fn(u64) -> bool,
    ) -> (Option<Enough<u64>>, Vec<u64>) {
        let mut tried = Vec::new();
        let found = search(range, |limit| {
            tried.push(limit);
            Ok::<_, Infallible>(enough(limit).then_some(limit))
        });
        let Ok(found) = found;
        (found, tried)
    }

    #[test]
    fn every_threshold_is_found_exactly() {
        for (least, most) in [(1, 1), (1, 300), (7, 40), (1000, 1300), (8221, 8900)] {
            for threshold in least..=most {
                let (found, tried) = found(least..=most, |limit| limit >= threshold);
                let found = found.expect("the largest is enough");
                assert_eq!((found.granules, found.result), (threshold, threshold));
                assert!(found.fails_above.is_empty());
                assert!(tried.iter().all(|limit| (least..=most).contains(limit)));
                assert!(tried.len() < 40, "{tried:?}");
            }
        }
    }

    #[test]
    fn the_least_possible_is_tried_first() {
        let (found, tried) = found(50..=1000, |_| true);
        assert_eq!(found.unwrap().granules, 50);
        assert_eq!(tried, [50, 51, 52, 53, 54]);
    }

    #[test]
    fn nothing_is_enough() {
        assert_eq!(found(5..=100, |_| false).0, None);
        let (least, most) = (5, 4);
        assert_eq!(found(least..=most, |_| true), (None, vec![]), "more than the device has");
        assert_eq!(found(5..=100, |_| false).1.last(), Some(&100), "the largest was tried");
    }

    #[test]
    fn failures_above_are_told() {
        let (found, _) =
            found(1000..=9000, |limit| limit >= 1010 && limit != 1012 && limit != 1031);
        let found = found.unwrap();
        assert_eq!((found.granules, found.fails_above), (1010, vec![1012, 1031]));
    }

    #[test]
    fn an_error_ends_the_search() {
        let mut left = 3;
        let found = search(1..=1000, |_| {
            left -= 1;
            if left == 0 { Err("lost") } else { Ok(None::<()>) }
        });
        assert_eq!((found, left), (Err("lost"), 0));
    }
}

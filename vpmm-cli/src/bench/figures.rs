//! From what was measured to figures.

/// What a case came to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Figures {
    /// Threads that called the allocator.
    pub threads: u32,
    /// Calls of the allocator that were timed together, over all threads.
    pub ops: u64,
    /// Nanoseconds per call, of one thread.
    pub ns_per_op: f64,
    /// The median of single calls, in nanoseconds.
    pub p50_ns: f64,
    /// 99 of 100 calls took at most this.
    pub p99_ns: f64,
    /// 999 of 1000 calls took at most this.
    pub p999_ns: f64,
    /// The slowest call.
    pub max_ns: f64,
    /// Calls of all threads together, in millions a second.
    pub mops_per_s: f64,
    /// The most bytes live at one time.
    pub peak_live_bytes: u64,
    /// The most bytes of device memory that the allocator held at one time.
    pub peak_mapped_bytes: u64,
    /// Driver calls that the allocator made during the timed calls.
    pub driver_calls: u64,
}

/// Where single calls lie, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Percentiles {
    pub(crate) p50_ns: f64,
    pub(crate) p99_ns: f64,
    pub(crate) p999_ns: f64,
    pub(crate) max_ns: f64,
}

impl Percentiles {
    /// Of samples in nanoseconds, each of which holds `overhead_ns` that are not the call's.
    pub(crate) fn of(mut samples: Vec<f64>, overhead_ns: f64) -> Self {
        samples.sort_unstable_by(f64::total_cmp);
        // Nearest rank: the smallest sample that so many of 1000 do not exceed.
        let at = |per_mille: usize| {
            let rank = (samples.len() * per_mille).div_ceil(1000).max(1);
            samples.get(rank - 1).map_or(0.0, |ns| (ns - overhead_ns).max(0.0))
        };
        Self { p50_ns: at(500), p99_ns: at(990), p999_ns: at(999), max_ns: at(1000) }
    }
}

/// The middle of several figures; the lower one of two.
pub(super) fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_unstable_by(f64::total_cmp);
    figures.get(figures.len().saturating_sub(1) / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_ranks() {
        let of = |count: u32| Percentiles::of((1..=count).rev().map(f64::from).collect(), 0.0);
        let p = of(1000);
        assert_eq!((p.p50_ns, p.p99_ns, p.p999_ns, p.max_ns), (500.0, 990.0, 999.0, 1000.0));
        let p = of(3);
        assert_eq!((p.p50_ns, p.p99_ns, p.p999_ns, p.max_ns), (2.0, 3.0, 3.0, 3.0));
        let p = of(1);
        assert_eq!((p.p50_ns, p.max_ns), (1.0, 1.0));
        assert_eq!(of(0).max_ns, 0.0);
    }

    #[test]
    fn the_overhead_is_taken_off_and_no_call_takes_less_than_nothing() {
        let p = Percentiles::of(vec![20.0, 30.0, 100.0], 25.0);
        assert_eq!((p.p50_ns, p.max_ns), (5.0, 75.0));
        assert_eq!(Percentiles::of(vec![20.0], 25.0).p50_ns, 0.0);
    }

    #[test]
    fn the_median_is_one_of_the_figures() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0]), 1.0);
        assert_eq!(median(vec![]), 0.0);
    }
}

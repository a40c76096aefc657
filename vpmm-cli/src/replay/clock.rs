//! How the time inside the allocator is told from the time around it.
//!
//! A clock reading costs as much as a fast allocation, so calls are not timed
//! one by one: a [`Stopwatch`] runs over a stretch of the replay loop and is
//! stopped only while something else happens (device work of `--verify`, waits
//! for another thread, the progress bar). What the stopwatch itself costs is
//! measured and taken off per stretch; what the loop costs is measured on an
//! allocator that does nothing and taken off per operation.

use std::time::{Duration, Instant};

/// Sums up stretches of time.
#[derive(Debug, Default)]
pub(super) struct Stopwatch {
    total: Duration,
    stretches: u64,
    started: Option<Instant>,
}

impl Stopwatch {
    pub(super) fn start(&mut self) {
        self.started = Some(Instant::now());
    }

    pub(super) fn stop(&mut self) {
        if let Some(started) = self.started.take() {
            self.total += started.elapsed();
            self.stretches += 1;
        }
    }

    /// Does something else meanwhile.
    pub(super) fn apart<T>(&mut self, other: impl FnOnce() -> T) -> T {
        self.stop();
        let done = other();
        self.start();
        done
    }

    /// Nanoseconds of all stretches, the stopwatch's own cost taken off.
    pub(super) fn nanoseconds(&self, costs: &Costs) -> f64 {
        let own = costs.stretch_ns * self.stretches as f64;
        (self.total.as_nanos() as f64 - own).max(0.0)
    }
}

/// What the measuring itself costs on this machine.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Costs {
    /// One empty stretch, in nanoseconds.
    pub(super) stretch_ns: f64,
    /// The replay loop around one operation, in nanoseconds.
    pub(super) operation_ns: f64,
}

impl Costs {
    /// Measures an empty stretch; the loop's cost is left at 0.
    pub(super) fn of_clock() -> Self {
        const STRETCHES: usize = 1001;
        let mut seen = [Duration::ZERO; STRETCHES];
        // The median: interruptions only ever lengthen a stretch.
        let stretch_ns = least(times(STRETCHES) / 10, || {
            for stretch in &mut seen {
                let started = Instant::now();
                *stretch = started.elapsed();
            }
            seen.sort_unstable();
            seen[STRETCHES / 2].as_nanos() as f64
        });
        Self { stretch_ns, operation_ns: 0.0 }
    }
}

/// The least of what is measured so often. What takes microseconds is to be measured often: on a processor that
/// others use as well most of a few times are slow, and what is taken off then leaves nothing of what is measured
/// later.
pub(super) fn least(times: u32, measure: impl FnMut() -> f64) -> f64 {
    std::iter::repeat_with(measure).take(times.max(1) as usize).fold(f64::INFINITY, f64::min)
}

/// How often so many operations that cost next to nothing are done in some ten milliseconds: thrice at least.
pub(super) fn times(operations: usize) -> u32 {
    (5_000_000 / operations.max(1)).clamp(3, 1000) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_lies_between_start_and_stop_counts() {
        let mut watch = Stopwatch::default();
        watch.stop();
        assert_eq!((watch.total, watch.stretches), (Duration::ZERO, 0));
        watch.start();
        std::thread::sleep(Duration::from_millis(3));
        watch.stop();
        let seen = watch.total;
        std::thread::sleep(Duration::from_millis(3));
        watch.stop();
        assert_eq!((watch.total, watch.stretches), (seen, 1));
        assert!(watch.nanoseconds(&Costs::default()) >= 3e6);
    }

    #[test]
    fn a_cost_is_that_of_the_best_of_many_times() {
        let mut costs = [9.0, 9.0, 8.0, 9.0, 3.0, 5.0].into_iter();
        assert_eq!(least(6, || costs.next().unwrap()), 3.0);
        assert_eq!((times(0), times(4), times(12_000), times(150_000)), (1000, 1000, 416, 33));
        assert_eq!(times(10_000_000), 3);
    }

    #[test]
    fn costs_are_taken_off_and_never_give_less_than_nothing() {
        let watch = Stopwatch { total: Duration::from_nanos(100), stretches: 3, started: None };
        let costs = |stretch_ns| Costs { stretch_ns, operation_ns: 0.0 };
        assert_eq!(watch.nanoseconds(&costs(20.0)), 40.0);
        assert_eq!(watch.nanoseconds(&costs(50.0)), 0.0);
    }
}

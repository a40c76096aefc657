//! The time in the driver calls that allocators make.
//!
//! `vpmm`'s pools call through [`vpmm::Driver`], which can measure its calls; allocators made of
//! the command's own calls have a [`CallClock`]. A [`DriverTimer`] reads both.
//!
//! Reading the clock costs as much as the cheapest driver calls. What it adds is measured first
//! and taken off in [`DriverTimer::since`].

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cuda_sys::types::CUresult;
use vpmm::Driver;

/// Sums up calls and their time.
#[derive(Debug, Default)]
pub(super) struct CallClock {
    calls: AtomicU64,
    nanoseconds: AtomicU64,
}

impl CallClock {
    /// Makes a call and adds its time.
    pub(super) fn time(&self, call: impl FnOnce() -> CUresult) -> CUresult {
        let started = Instant::now();
        let code = call();
        // 584 years of nanoseconds fit.
        self.nanoseconds.fetch_add(started.elapsed().as_nanos() as u64, Ordering::Relaxed);
        self.calls.fetch_add(1, Ordering::Relaxed);
        code
    }

    fn read(&self) -> Reading {
        Reading {
            calls: self.calls.load(Ordering::Relaxed),
            nanoseconds: self.nanoseconds.load(Ordering::Relaxed),
        }
    }
}

/// The clock around the allocators' driver calls of one machine. Clones are the same clock.
#[derive(Clone, Debug)]
pub struct DriverTimer {
    driver: Driver,
    calls: Arc<CallClock>,
    costs: Costs,
}

/// What a clock costs a call, in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct Costs {
    /// How much longer than the call itself the clock shows.
    shown_ns: f64,
    /// How much longer than without the clock the caller waits.
    added_ns: f64,
}

/// A reading: calls so far, and their time as the clock shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    calls: u64,
    nanoseconds: u64,
}

/// What lies between two readings, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DriverSpent {
    /// Time in the driver, as it would have been without the clock.
    pub driver_ns: f64,
    /// What the clock itself took, for whoever measured the whole from outside.
    pub clock_ns: f64,
}

impl DriverTimer {
    /// Measures every call through the driver from now on, and those that are given the clock
    /// of [`calls`](Self::calls).
    pub(super) fn start(driver: &Driver) -> Self {
        driver.measure_calls(true);
        Self { driver: driver.clone(), calls: Arc::default(), costs: Costs::measured() }
    }

    /// The clock for calls that do not go through [`vpmm::Driver`].
    pub(super) fn calls(&self) -> Arc<CallClock> {
        Arc::clone(&self.calls)
    }

    /// The clock as it stands.
    pub fn read(&self) -> Reading {
        let own = self.calls.read();
        // 584 years of nanoseconds fit.
        let nanoseconds = self.driver.time_in_calls().as_nanos() as u64;
        Reading {
            calls: own.calls + self.driver.calls().total(),
            nanoseconds: own.nanoseconds + nanoseconds,
        }
    }

    /// The time of so many calls as it would have been without the clock, which shows it too long.
    pub(super) fn without_clock(&self, calls: u64, shown: Duration) -> Duration {
        shown.saturating_sub(Duration::from_secs_f64(calls as f64 * self.costs.shown_ns / 1e9))
    }

    /// What was spent in the driver since `earlier`, by all threads together.
    pub fn since(&self, earlier: Reading) -> DriverSpent {
        self.costs.taken_off(earlier, self.read())
    }
}

impl Costs {
    fn taken_off(&self, earlier: Reading, later: Reading) -> DriverSpent {
        let calls = later.calls.saturating_sub(earlier.calls) as f64;
        let shown = later.nanoseconds.saturating_sub(earlier.nanoseconds) as f64;
        DriverSpent {
            driver_ns: (shown - calls * self.shown_ns).max(0.0),
            clock_ns: calls * self.added_ns,
        }
    }

    /// Measures the clock around a call that does nothing.
    fn measured() -> Self {
        const ROUNDS: usize = 21;
        const CALLS_A_ROUND: u32 = 500;
        extern "C" fn nothing() -> CUresult {
            CUresult::CUDA_SUCCESS
        }
        let nothing: extern "C" fn() -> CUresult = black_box(nothing);
        let per_call = |ns: u128| ns as f64 / f64::from(CALLS_A_ROUND);
        let round = |call: &dyn Fn() -> CUresult| {
            let started = Instant::now();
            for _ in 0..CALLS_A_ROUND {
                black_box(call());
            }
            per_call(started.elapsed().as_nanos())
        };
        let rounds = (0..ROUNDS).map(|_| {
            let clock = CallClock::default();
            let bare_ns = round(&|| nothing());
            let clocked_ns = round(&|| clock.time(|| nothing()));
            let shown_ns = per_call(u128::from(clock.read().nanoseconds));
            Measured { bare_ns, clocked_ns, shown_ns }
        });
        Self::of(rounds)
    }

    /// The least of each, since interruptions only ever lengthen one, and only then what lies between: of a round
    /// whose bare calls were interrupted that would be nothing.
    fn of(rounds: impl Iterator<Item = Measured>) -> Self {
        let least = rounds.reduce(|a, b| Measured {
            bare_ns: a.bare_ns.min(b.bare_ns),
            clocked_ns: a.clocked_ns.min(b.clocked_ns),
            shown_ns: a.shown_ns.min(b.shown_ns),
        });
        least.map_or(Self { shown_ns: 0.0, added_ns: 0.0 }, |of| Self {
            shown_ns: (of.shown_ns - of.bare_ns).max(0.0),
            added_ns: (of.clocked_ns - of.bare_ns).max(0.0),
        })
    }
}

/// A call that does nothing, in nanoseconds: bare, with the clock around it, and as the clock shows it.
struct Measured {
    bare_ns: f64,
    clocked_ns: f64,
    shown_ns: f64,
}

#[cfg(test)]
mod tests {
    use std::thread;

    use vpmm::Stream;

    use super::*;
    use crate::backend::AllocatorSpec;
    use crate::device::{Machine, Setup};

    fn machine() -> Machine {
        let machine = Machine::simulated(Setup { time_driver: true, ..Setup::default() }).unwrap();
        machine.calls().enter().unwrap();
        machine
    }

    #[test]
    fn only_the_allocators_calls_count() {
        let machine = machine();
        let timer = machine.timer().unwrap();
        let before = timer.read();
        thread::sleep(Duration::from_millis(2));
        machine.calls().synchronize().unwrap();
        assert_eq!(timer.since(before), DriverSpent::default(), "device work is no allocator's");
        machine.allocator_calls().synchronize().unwrap();
        let spent = timer.since(before);
        assert!(spent.driver_ns > 0.0 && spent.driver_ns < 2e6, "{spent:?}");
        assert!(spent.clock_ns > 0.0, "{spent:?}");
    }

    #[test]
    fn a_machine_without_a_clock_is_not_timed() {
        assert!(Machine::simulated(Setup::default()).unwrap().timer().is_none());
    }

    /// The driver time would otherwise be too small, and nobody would see it.
    #[test]
    fn every_call_of_every_allocator_is_timed() {
        let machine = machine();
        let timer = machine.timer().unwrap();
        let streams = machine.streams(2).unwrap();
        let handles: Vec<_> = streams.iter().map(Stream::handle).collect();
        let simulator = machine.simulator().unwrap();
        for allocator in &AllocatorSpec::DIRECT {
            let (calls, before) = (simulator.calls(), timer.read());
            let backend = allocator.open(&machine, Some(16 << 20)).unwrap();
            for bytes in [700, 3 << 20, 5 << 20, 64 << 20] {
                let Ok(address) = backend.allocate(bytes, handles[0]) else { continue };
                // SAFETY: allocated above, freed once.
                unsafe { backend.free(address, bytes, handles[1]) }.unwrap();
            }
            let now = timer.read();
            let timed = now.calls - before.calls;
            assert!(timed >= 6, "{allocator}");
            assert_eq!(timed, simulator.calls() - calls, "{allocator}");
            // No call takes less than some nanoseconds.
            assert!(now.nanoseconds - before.nanoseconds >= timed, "{allocator}");
        }
    }

    /// Interruptions only ever lengthen what is measured, also what is taken off.
    #[test]
    fn what_is_interrupted_does_not_make_the_clock_cheaper() {
        let rounds =
            [(2.0, 50.0, 28.0), (300.0, 49.0, 27.0), (3.0, 400.0, 350.0), (2.0, 52.0, 29.0)];
        let rounds = rounds.into_iter().map(|(bare_ns, clocked_ns, shown_ns)| Measured {
            bare_ns,
            clocked_ns,
            shown_ns,
        });
        let costs = Costs::of(rounds);
        assert_eq!((costs.shown_ns, costs.added_ns), (25.0, 47.0));
    }

    #[test]
    fn the_clocks_own_cost_is_taken_off() {
        let costs = Costs { shown_ns: 20.0, added_ns: 50.0 };
        let reading = |calls, nanoseconds| Reading { calls, nanoseconds };
        let spent = costs.taken_off(reading(3, 1_000), reading(13, 2_200));
        assert_eq!(spent, DriverSpent { driver_ns: 1_000.0, clock_ns: 500.0 });
        let spent = costs.taken_off(reading(0, 0), reading(10, 150));
        assert_eq!(spent.driver_ns, 0.0, "never less than nothing");
    }
}

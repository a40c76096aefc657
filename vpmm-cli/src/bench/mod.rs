//! What single calls of an allocator cost, case by case.
//!
//! ```text
//! Case ─ script ─▶ Warm ─ loops ─▶ rounds, single calls ─▶ Figures
//!                └▶ Cold ─ loops ─▶ fresh pools ──────────┘
//! ```
//!
//! **Calls.** Sizes, slots and streams are written down before any clock runs.
//! **Time.** A round is timed as a whole, without a clock at single calls, and what its loop
//! costs on an allocator that does nothing is taken off. Percentiles come from a further round
//! with a clock at every call, whose cost is taken off as well.
//! **Amount.** A short trial finds out how fast the allocator is; slow ones make fewer calls.
//!
//! No work is enqueued on the device: these are the host's costs.

mod case;
mod cold;
mod figures;
mod loops;
mod meeting;
mod random;
mod script;
mod subject;
mod warm;
mod zombies;

pub use case::{Case, CaseError, CaseList};
pub use figures::Figures;
pub(crate) use figures::Percentiles;

use std::time::{Duration, Instant};

use vpmm::{Stream, StreamHandle};

use crate::backend::{
    AllocatorSpec, CudaAsync, CudaMalloc, PoolBackend, StackBackend, lacks_memory,
};
use crate::bytes::ByteCount;
use crate::device::{self, Calls, Machine, Stall};
use loops::Hands;
use script::{Extent, Lane, Script, Warm, Zombies};
use subject::Subject;

/// Why a case has no figures.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// The allocator or the device failed.
    #[error(transparent)]
    Allocator(#[from] vpmm::Error),
    /// The system has no thread for each of the case's.
    #[error("no thread for each thread of the case: {0}")]
    Threads(#[from] std::io::Error),
    /// To prepare the case would take longer than anybody waits.
    #[error("left out: {calls} allocations of {call_ns:.0} ns each have to be made first")]
    TooSlow {
        /// Allocations before anything is timed.
        calls: usize,
        /// What each takes.
        call_ns: f64,
    },
    /// The allocator might wait for the stream that stands still in the case, for ever.
    #[error("left out: it may wait for the device, of which a stream stands still in this case")]
    Waits,
    /// The device has too little memory for the case, and an allocator that lacks some might wait for
    /// the stream that stands still.
    #[error("left out: {needed} have to be free on the device, and {free} are")]
    LittleMemory {
        /// What the case may take.
        needed: ByteCount,
        /// What there is.
        free: ByteCount,
    },
    /// Less has moved than was to, as where pages are longer than what moves.
    #[error("left out: only {waiting} of {expected} zombies wait")]
    FewZombies {
        /// How many wait.
        waiting: u64,
        /// How many were to.
        expected: u64,
    },
    /// There was nothing to time.
    #[error("nothing was timed")]
    Nothing,
}

impl BenchError {
    /// Whether memory ran out, or there never would have been so much.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Allocator(error) if lacks_memory(error))
    }

    /// Whether the case was left out, and nothing failed.
    pub fn is_left_out(&self) -> bool {
        matches!(
            self,
            Self::TooSlow { .. }
                | Self::Waits
                | Self::LittleMemory { .. }
                | Self::FewZombies { .. }
        )
    }
}

/// How much is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    /// As much as steady figures need.
    Full,
    /// As little as shows that a case works; the figures mean nothing.
    Quick,
}

/// A round takes this long where any number of calls will do; else it should not take longer, unless
/// the case needs more calls.
const ROUND: Duration = Duration::from_millis(150);

/// All rounds together should not take longer than this.
const ROUNDS: Duration = Duration::from_millis(600);
/// As many may be needed where rounds are short, for one that nothing disturbs.
const MOST_ROUNDS: f64 = 50.0;

/// A case that takes longer to prepare is left out.
const LONGEST_SETUP: Duration = Duration::from_secs(20);

/// Pools on which a cold case is measured.
const POOLS: usize = 9;

/// In a quick run: pools, and the divisor of what is live in the cases about live allocations.
const QUICK_POOLS: usize = 2;
const QUICK_DIVISOR: u32 = 100;

/// A machine to measure on.
pub struct Bench<'a> {
    machine: &'a Machine,
    calls: Calls<'a>,
    amount: Amount,
}

impl<'a> Bench<'a> {
    /// Measures on `machine`, whose driver calls should not be timed.
    pub fn new(machine: &'a Machine, amount: Amount) -> Self {
        Self { machine, calls: machine.calls(), amount }
    }

    /// Runs a case on an allocator made for it.
    ///
    /// # Errors
    /// [`BenchError`].
    pub fn run(&self, case: Case, allocator: &AllocatorSpec) -> Result<Figures, BenchError> {
        let machine = self.machine;
        let direct = !matches!(allocator, AllocatorSpec::CudaMalloc | AllocatorSpec::Stack(_));
        if matches!(case, Case::Zombies { .. }) && !direct {
            return Err(BenchError::Waits);
        }
        match allocator {
            AllocatorSpec::Default => self.on(case, |limit| PoolBackend::standard(machine, limit)),
            AllocatorSpec::Paged => self.on(case, |limit| PoolBackend::paged(machine, limit)),
            AllocatorSpec::CudaAsync => self.on(case, |limit| CudaAsync::new(machine, limit)),
            AllocatorSpec::CudaMalloc => self.on(case, |limit| Ok(CudaMalloc::new(machine, limit))),
            AllocatorSpec::Stack(stack) => {
                self.on(case, |limit| StackBackend::new(stack, machine, limit))
            }
        }
    }

    fn on<S: Subject>(
        &self,
        case: Case,
        open: impl Fn(Option<u64>) -> vpmm::Result<S>,
    ) -> Result<Figures, BenchError> {
        self.enter()?;
        let call_ns = self.trial(case, &open)?;
        let script = case.script(self.extent(case, call_ns));
        // Streams outlive the pools that are used with them.
        let streams = self.machine.streams(script.streams())?;
        let handles: Vec<StreamHandle> = streams.iter().map(Stream::handle).collect();
        let figures = match script {
            Script::Cold(script) => {
                let pools = if self.is_quick() { QUICK_POOLS } else { POOLS };
                cold::run(&script, pools, self, open, &handles)?
            }
            Script::Warm(script) => {
                let rounds = self.rounds(&script, call_ns)?;
                let subject = open(None)?;
                let work = || warm::run(&script, rounds, self, &subject, &handles);
                let figures = match &script.zombies {
                    None => work()?,
                    Some(zombies) => {
                        self.check_memory(&script, zombies)?;
                        zombies::among(zombies, self, &subject, &handles, work)?
                    }
                };
                subject.check_logs()?;
                figures
            }
        };
        self.synchronize()?;
        Ok(figures)
    }

    fn is_quick(&self) -> bool {
        self.amount == Amount::Quick
    }

    /// Makes the device's context current on this thread.
    fn enter(&self) -> vpmm::Result<()> {
        self.calls.enter()
    }

    /// Waits for the device.
    fn synchronize(&self) -> vpmm::Result<()> {
        self.calls.synchronize()
    }

    /// Has the driver be done with memory that was given back: see [`device::settle`].
    fn settle(&self) {
        device::settle(self.machine);
    }

    /// Has a stream stand still.
    fn stall(&self, stream: StreamHandle) -> vpmm::Result<Stall<'a>> {
        Stall::new(self.machine.calls(), stream)
    }

    /// Whether no allocator has to run out of memory while a stream stands still.
    fn check_memory(&self, script: &Warm, zombies: &Zombies) -> Result<(), BenchError> {
        // Twice what is live: no allocator holds as much more in the random cases.
        let lanes: u64 = script.lanes.iter().map(Lane::peak_live_bytes).sum();
        let needed = zombies.needed_bytes() + 2 * lanes;
        let free = self.machine.device().free_memory()?;
        if free < needed {
            let (needed, free) = (ByteCount(needed), ByteCount(free));
            return Err(BenchError::LittleMemory { needed, free });
        }
        Ok(())
    }

    /// Nanoseconds that a call roughly takes: the first thread's part of the case, made small and
    /// run twice on a pool of its own. 0 for a cold case, which is what it is.
    fn trial<S: Subject>(
        &self,
        case: Case,
        open: impl Fn(Option<u64>) -> vpmm::Result<S>,
    ) -> vpmm::Result<f64> {
        const CALLS: u64 = 512;
        let Script::Warm(script) =
            case.script(Extent { calls: CALLS, live_divisor: QUICK_DIVISOR })
        else {
            return Ok(0.0);
        };
        let Some(lane) = script.lanes.first() else { return Ok(0.0) };
        let streams = self.machine.streams(script.streams)?;
        let handles: Vec<StreamHandle> = streams.iter().map(Stream::handle).collect();
        let subject = open(None)?;
        let mut hands = Hands::new(&subject, &handles, lane.slots);
        let spent = hands.run_steps(&lane.setup).and_then(|()| {
            hands.run(&lane.body)?;
            let started = Instant::now();
            hands.run(&lane.body)?;
            Ok(started.elapsed())
        });
        let freed = hands.let_go();
        let spent = spent?;
        freed.map(|()| spent.as_nanos() as f64 / lane.body.calls().max(1) as f64)
    }

    /// How many calls of a round an allocator of that speed makes.
    fn extent(&self, case: Case, call_ns: f64) -> Extent {
        let calls = case.calls();
        if self.is_quick() {
            let live_divisor = QUICK_DIVISOR;
            return Extent { calls: calls.least.min(2_000), live_divisor };
        }
        // Threads may well wait for each other.
        let each_ns = call_ns * f64::from(case.thread_count());
        let affordable = ROUND.as_nanos() as f64 / each_ns.max(f64::MIN_POSITIVE);
        let calls = (affordable as u64).clamp(calls.least, calls.full.max(calls.least));
        Extent { calls, live_divisor: 1 }
    }

    /// How long a round is whose calls may be any number; `None` for as many as the case has.
    fn round_time(&self) -> Option<Duration> {
        (!self.is_quick()).then_some(ROUND)
    }

    /// How many rounds are affordable at that speed.
    fn rounds(&self, script: &Warm, call_ns: f64) -> Result<usize, BenchError> {
        let setup: usize = script.lanes.iter().map(|lane| lane.setup.len()).sum();
        if setup as f64 * call_ns > LONGEST_SETUP.as_nanos() as f64 {
            return Err(BenchError::TooSlow { calls: setup, call_ns });
        }
        if self.is_quick() {
            return Ok(1);
        }
        let by_time = script.lanes.iter().all(|lane| lane.body.part().is_some());
        let calls: u64 = script.lanes.iter().map(|lane| lane.body.calls()).sum();
        let round_ns =
            if by_time { ROUND.as_nanos() as f64 } else { (call_ns * calls as f64).max(1.0) };
        Ok((ROUNDS.as_nanos() as f64 / round_ns).clamp(1.0, MOST_ROUNDS) as usize)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::device::Setup;
    use cuda_sim::Simulator;

    /// Serves so many allocations and refuses every later one.
    struct Failing {
        left: AtomicU64,
        live: AtomicU64,
    }

    impl Failing {
        fn after(allocations: u64) -> Self {
            Self { left: AtomicU64::new(allocations), live: AtomicU64::new(0) }
        }
    }

    impl Subject for &Failing {
        type Ptr = u64;

        const NONE: u64 = 0;

        fn address(ptr: u64) -> u64 {
            ptr
        }

        fn allocate(&self, bytes: u64, _stream: StreamHandle) -> vpmm::Result<u64> {
            let one_less = |left: u64| left.checked_sub(1);
            match self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less) {
                Ok(left) => {
                    self.live.fetch_add(1, Ordering::Relaxed);
                    Ok(left)
                }
                Err(_) => Err(vpmm::Error::AddressSpaceExhausted { bytes }),
            }
        }

        unsafe fn free(&self, _ptr: u64, _stream: StreamHandle) -> vpmm::Result<()> {
            self.live.fetch_sub(1, Ordering::Relaxed);
            Ok(())
        }

        fn peak_mapped_bytes(&self) -> vpmm::Result<u64> {
            Ok(0)
        }

        fn driver_calls(&self) -> u64 {
            0
        }
    }

    /// Whichever phase it happens in, on whichever thread: nobody waits for ever, everything is
    /// freed, and the error is told.
    #[test]
    fn a_failure_ends_a_case_on_every_thread() {
        let machine = Machine::simulated(Setup::default()).unwrap();
        let bench = Bench::new(&machine, Amount::Quick);
        let cases = [
            ("threads_8", 5_000),
            ("live_10k", 800),
            ("zombies_10k", 4_000),
            ("grow_512x2MiB", 2_100),
        ];
        for (name, enough) in cases {
            let case: Case = name.parse().unwrap();
            let mut failures = 0;
            for allocations in (0..enough).step_by(enough as usize / 37) {
                let subject = Failing::after(allocations);
                let result = bench.on(case, |_| Ok(&subject));
                assert_eq!(subject.live.load(Ordering::Relaxed), 0, "{name} {allocations}");
                match result {
                    Ok(_) => {}
                    Err(BenchError::Allocator(vpmm::Error::AddressSpaceExhausted { .. })) => {
                        failures += 1;
                    }
                    Err(other) => panic!("{name} {allocations}: {other}"),
                }
            }
            assert!(failures > 5, "{name}: {failures}");
        }
    }

    /// Of two threads one is slow, as if somebody kept interrupting it.
    #[derive(Default)]
    struct OneSlow {
        streams: Mutex<Vec<StreamHandle>>,
    }

    const SLOW: Duration = Duration::from_micros(2_000);
    const FAST: Duration = Duration::from_micros(100);

    impl Subject for &OneSlow {
        type Ptr = u64;

        const NONE: u64 = 0;

        fn address(ptr: u64) -> u64 {
            ptr
        }

        fn allocate(&self, _bytes: u64, stream: StreamHandle) -> vpmm::Result<u64> {
            let mut streams = self.streams.lock().unwrap();
            let place = streams.iter().position(|known| *known == stream);
            let place = place.unwrap_or_else(|| {
                streams.push(stream);
                streams.len() - 1
            });
            drop(streams);
            // The trial's stream may or may not come again: of two in a row one is even.
            std::thread::sleep(if place % 2 == 0 { SLOW } else { FAST });
            Ok(1)
        }

        unsafe fn free(&self, _ptr: u64, _stream: StreamHandle) -> vpmm::Result<()> {
            Ok(())
        }

        fn peak_mapped_bytes(&self) -> vpmm::Result<u64> {
            Ok(0)
        }

        fn driver_calls(&self) -> u64 {
            0
        }
    }

    #[test]
    fn a_thread_that_is_late_keeps_no_other_from_going_on() {
        let machine = Machine::simulated(Setup::default()).unwrap();
        let bench = Bench::new(&machine, Amount::Full);
        let subject = OneSlow::default();
        let figures = bench.on("threads_2".parse().unwrap(), |_| Ok(&subject)).unwrap();
        // Two calls in each slow allocation's time. Had both made as many, it were twice that.
        let of_slow = 2.0 / SLOW.as_micros() as f64;
        assert!(figures.mops_per_s > 3.0 * of_slow, "{figures:?}");
        // All of them within the time, and none faster than it can be.
        let of_both = of_slow + 2.0 / FAST.as_micros() as f64;
        assert!(figures.mops_per_s < 1.1 * of_both, "{figures:?}");
    }

    /// What is noted of all allocators that a case makes.
    #[derive(Default)]
    struct Notes {
        opened: AtomicU64,
        /// The allocators in the order of their first allocations, and the handles that had been made by then.
        first: Mutex<Vec<(u64, u64)>>,
    }

    /// One of them, by its number.
    struct Fresh<'a> {
        notes: &'a Notes,
        machine: &'a Machine,
        number: u64,
        each: Duration,
        /// Driver calls after so many allocations.
        calls: fn(number: u64, allocations: u64) -> u64,
        allocations: AtomicU64,
        live: AtomicU64,
        most_live: AtomicU64,
    }

    impl<'a> Fresh<'a> {
        fn new(
            notes: &'a Notes,
            machine: &'a Machine,
            each: fn(number: u64) -> Duration,
            calls: fn(u64, u64) -> u64,
        ) -> Self {
            let number = notes.opened.fetch_add(1, Ordering::Relaxed);
            let [allocations, live, most_live] = [0; 3].map(AtomicU64::new);
            let each = each(number);
            Self { notes, machine, number, each, calls, allocations, live, most_live }
        }
    }

    impl Subject for Fresh<'_> {
        type Ptr = u64;

        const NONE: u64 = 0;

        fn address(ptr: u64) -> u64 {
            ptr
        }

        fn allocate(&self, _bytes: u64, _stream: StreamHandle) -> vpmm::Result<u64> {
            if self.allocations.fetch_add(1, Ordering::Relaxed) == 0 {
                let counts = self.machine.simulator().unwrap().call_counts();
                let handles = counts.get("cuMemCreate").copied().unwrap_or_default();
                self.notes.first.lock().unwrap().push((self.number, handles));
            }
            let live = self.live.fetch_add(1, Ordering::Relaxed) + 1;
            self.most_live.fetch_max(live, Ordering::Relaxed);
            if !self.each.is_zero() {
                std::thread::sleep(self.each);
            }
            Ok(1)
        }

        unsafe fn free(&self, _ptr: u64, _stream: StreamHandle) -> vpmm::Result<()> {
            self.live.fetch_sub(1, Ordering::Relaxed);
            Ok(())
        }

        /// Told as memory held: the allocator's number, and the most allocations at one time.
        fn peak_mapped_bytes(&self) -> vpmm::Result<u64> {
            Ok(self.number * 1000 + self.most_live.load(Ordering::Relaxed))
        }

        fn driver_calls(&self) -> u64 {
            (self.calls)(self.number, self.allocations.load(Ordering::Relaxed))
        }
    }

    #[test]
    fn a_cold_case_is_the_middle_one_of_fresh_allocators_behind_another_one() {
        let machine = Machine::simulated(Setup::default()).unwrap();
        let bench = Bench::new(&machine, Amount::Quick);
        let notes = Notes::default();
        let each = |number| Duration::from_micros(if number == 0 { 400 } else { 20 });
        let calls = |number, allocations| 5 + (number + 1) * allocations;
        let case = "grow_512x2MiB".parse().unwrap();
        let figures = bench.on(case, |_| Ok(Fresh::new(&notes, &machine, each, calls))).unwrap();
        // Two pools for the time and two for single calls, each of them awake behind another one, and that behind
        // what settles the driver.
        let first = notes.first.lock().unwrap().clone();
        let numbers: Vec<u64> = first.iter().map(|(number, _)| *number).collect();
        assert_eq!(numbers, [1, 0, 3, 2, 5, 4, 7, 6]);
        // Two handles at least are made and given back before each.
        for (at, (_, handles)) in (1..).zip(first.iter().step_by(2)) {
            assert!(*handles >= 2 * at, "{first:?}");
        }
        // The faster of the two pools is told, its calls and its memory too; an operation is one of the 512.
        assert_eq!((figures.ops, figures.driver_calls), (512, 3 * 512));
        assert_eq!(figures.peak_mapped_bytes, 2_512);
        for of_one in [figures.ns_per_op, figures.p50_ns] {
            assert!((20e3..512.0 * 20e3).contains(&of_one), "{figures:?}");
        }
    }

    /// Of threads that only begin and end at the same time some may never have met.
    #[test]
    fn all_that_is_live_at_one_time_has_been_so_before_the_clock_starts() {
        let machine = Machine::simulated(Setup::default()).unwrap();
        let bench = Bench::new(&machine, Amount::Quick);
        let notes = Notes::default();
        let open = |_| Ok(Fresh::new(&notes, &machine, |_| Duration::ZERO, |_, _| 0));
        let figures = bench.on("threads_16".parse().unwrap(), open).unwrap();
        assert_eq!(figures.peak_mapped_bytes, 1_016, "the second allocator's, 16 at once");
    }

    /// Up to when streams have what they need of each other.
    #[test]
    fn what_settles_late_is_done_until_it_needs_no_driver_call() {
        let machine = Machine::simulated(Setup::default()).unwrap();
        let bench = Bench::new(&machine, Amount::Quick);
        let notes = Notes::default();
        // A thousand at first and in each round: for four of them.
        let calls = |_, allocations: u64| allocations.min(4_500);
        let open = |_| Ok(Fresh::new(&notes, &machine, |_| Duration::ZERO, calls));
        let figures = bench.on("streams_1000".parse().unwrap(), open).unwrap();
        assert_eq!((figures.ops, figures.driver_calls), (2_000, 0));
    }

    #[test]
    fn an_allocator_that_does_nothing_takes_next_to_nothing() {
        let machine = Machine::simulated(Setup::default()).unwrap();
        let bench = Bench::new(&machine, Amount::Quick);
        let clock_ns = loops::clock_ns();
        let body = script::Body::Pairs { bytes: 512, stream: 0, pairs: 10_000 };
        let loop_ns = loops::loop_ns(&body, 0, &[StreamHandle::LEGACY]);
        let figures =
            |name: &str| bench.on(name.parse().unwrap(), |_| Ok(subject::Nothing)).unwrap();
        // Whatever else runs on the machine makes some of them longer.
        let is_so = |_| {
            let (warm, cold) = (figures("pair_512"), figures("grow_512x2MiB"));
            warm.ns_per_op < loop_ns / 2.0
                && warm.p50_ns < clock_ns / 2.0
                && cold.p50_ns < clock_ns / 2.0
        };
        assert!((0..8).any(is_so), "{:?}, {loop_ns} {clock_ns}", figures("pair_512"));
    }

    #[test]
    fn as_many_rounds_as_there_is_time_for() {
        let machine = Machine::simulated(Setup::default()).unwrap();
        let bench = Bench::new(&machine, Amount::Full);
        let rounds = |name: &str, call_ns| {
            let case: Case = name.parse().unwrap();
            let Script::Warm(script) = case.script(bench.extent(case, call_ns)) else { panic!() };
            bench.rounds(&script, call_ns).unwrap()
        };
        // Each is as long as it is, however fast the calls are.
        assert_eq!((rounds("pair_512", 3.0), rounds("threads_8", 9_000.0)), (4, 4));
        assert_eq!((rounds("random_4MiB", 300.0), rounds("random_4MiB", 10.0)), (10, 50));
        assert_eq!(rounds("random_4MiB", 75_000.0), 1);
    }

    #[test]
    fn slow_allocators_make_fewer_calls_and_fast_ones_all() {
        let machine = Machine::simulated(Setup::default()).unwrap();
        let bench = Bench::new(&machine, Amount::Full);
        let calls = |name: &str, call_ns| bench.extent(name.parse().unwrap(), call_ns).calls;
        assert_eq!(calls("pair_1MiB", 5.0), 2_000_000);
        assert_eq!(calls("pair_1MiB", 300.0), 500_000, "200,000 pairs and more on a fast driver");
        assert_eq!(calls("pair_64MiB", 75_000.0), 2_000);
        assert_eq!(calls("threads_8", 300.0), 62_500);
        assert_eq!(calls("random_4MiB", 75_000.0), 10_000, "less would not be the case any more");
        assert_eq!(calls("random_4MiB", 0.0), 200_000);
    }

    #[test]
    fn zombies_are_left_out_where_memory_might_run_out() {
        let simulator = Simulator::builder().memory_bytes(60 << 30).build().unwrap();
        let driver = vpmm::Driver::new(simulator.driver()).unwrap();
        let machine = Machine::of(driver.device(0).unwrap());
        let bench = Bench::new(&machine, Amount::Full);
        let error =
            bench.run("zombies_10k".parse().unwrap(), &AllocatorSpec::CudaAsync).unwrap_err();
        assert!(error.is_left_out() && error.to_string().contains("and 64.4 GB are"), "{error}");
    }

    #[test]
    fn what_takes_too_long_to_prepare_is_left_out() {
        let machine = Machine::simulated(Setup::default()).unwrap();
        let bench = Bench::new(&machine, Amount::Full);
        let case: Case = "live_1M".parse().unwrap();
        let Script::Warm(script) = case.script(Extent { calls: 400, live_divisor: 1 }) else {
            panic!("a warm case")
        };
        assert!(bench.rounds(&script, 19_000.0).is_ok());
        let error = bench.rounds(&script, 21_000.0).unwrap_err();
        assert!(error.is_left_out() && error.to_string().contains("1000000 allocations"));
    }
}

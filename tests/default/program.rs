//! Random programs over several streams against a model, with work that completes adversarially.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::{CUresult, CUstream};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use vpmm::{Background, Error, PendingPolicy, Stats, Stream, StreamHandle};

use crate::rig::{self, GRANULE, KIB, MIB, config};
use crate::support::streams::make;
use crate::support::{Held, Rig, Watched, call, cases};

/// What a program takes its streams to be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// Made by the library.
    Owned,
    /// Made by the driver, and known to the pool by the raw handle.
    Raw {
        blocking: bool,
    },
    Legacy,
    PerThread,
}

/// A stream of a program.
enum Lane {
    Owned(Stream),
    Raw(CUstream),
    Default(StreamHandle),
}

impl Lane {
    fn new(rig: &Rig, kind: Kind) -> Self {
        match kind {
            Kind::Owned => Self::Owned(rig.stream()),
            Kind::Raw { blocking } => Self::Raw(make(rig, u32::from(!blocking)).0),
            Kind::Legacy => Self::Default(StreamHandle::LEGACY),
            Kind::PerThread => Self::Default(StreamHandle::PER_THREAD),
        }
    }

    fn handle(&self) -> StreamHandle {
        match self {
            Self::Owned(stream) => stream.handle(),
            // SAFETY: the stream is destroyed in `end` only, which takes the lane.
            Self::Raw(stream) => unsafe { StreamHandle::from_raw(*stream) },
            Self::Default(handle) => *handle,
        }
    }

    fn end(self, rig: &Rig) {
        if let Self::Raw(stream) = self {
            call!(rig.driver, cuStreamDestroy_v2(stream));
        }
    }
}

#[derive(Clone, Debug)]
enum Action {
    Malloc {
        bytes: u64,
        lane: usize,
    },
    Free {
        which: prop::sample::Index,
        lane: usize,
    },
    /// Everything that was allocated on a stream, in the order of allocation or the other way
    /// round.
    FreeAll {
        lane: usize,
        backwards: bool,
    },
    /// A further stream uses an allocation, after the stream that it was made on, and the pool is
    /// told; the free is not ordered after that.
    Use {
        which: prop::sample::Index,
        lane: usize,
    },
    /// A stream is made to come after another one, and the pool is told.
    Follow {
        from: usize,
        to: usize,
    },
    /// The host waits for a stream, and tells the pool or not.
    Synchronize {
        lane: usize,
        tells: bool,
    },
    /// Free memory is given back.
    Trim {
        keep: u64,
    },
    /// Some of every stream's work runs; the host does not learn of it.
    Advance {
        steps: usize,
    },
    /// A stream is destroyed with work and frees pending, and another takes its place and, where
    /// it is the driver's, its handle.
    Replace {
        lane: usize,
    },
}

/// An action, and which of the driver calls fails that the pool makes in it, if any.
type Step = (Action, Option<u64>);

const LIMIT: u64 = 20;

pub(crate) fn bytes() -> impl Strategy<Value = u64> {
    prop_oneof![
        2 => 1..2 * KIB,
        3 => 1..64 * KIB,
        2 => 63 * KIB..66 * KIB,
        4 => 64 * KIB..2 * MIB,
        2 => (2 * MIB - 2 * KIB)..(2 * MIB + 2 * KIB),
        3 => 2 * MIB..12 * MIB,
        2 => (1..10_u64).prop_map(|granules| granules * GRANULE),
        1 => (12 * MIB)..(44 * MIB),
    ]
}

fn action(lanes: usize) -> impl Strategy<Value = Action> {
    let lane = 0..lanes;
    let which = any::<prop::sample::Index>();
    prop_oneof![
        10 => (bytes(), lane.clone()).prop_map(|(bytes, lane)| Action::Malloc { bytes, lane }),
        7 => (which.clone(), lane.clone())
            .prop_map(|(which, lane)| Action::Free { which, lane }),
        1 => (lane.clone(), any::<bool>())
            .prop_map(|(lane, backwards)| Action::FreeAll { lane, backwards }),
        2 => (which, lane.clone()).prop_map(|(which, lane)| Action::Use { which, lane }),
        1 => (lane.clone(), lane.clone()).prop_map(|(from, to)| Action::Follow { from, to }),
        1 => (lane.clone(), any::<bool>())
            .prop_map(|(lane, tells)| Action::Synchronize { lane, tells }),
        1 => (0..LIMIT).prop_map(|keep| Action::Trim { keep }),
        2 => (1..12_usize).prop_map(|steps| Action::Advance { steps }),
        1 => lane.prop_map(|lane| Action::Replace { lane }),
    ]
}

fn kind() -> impl Strategy<Value = Kind> {
    prop_oneof![
        4 => Just(Kind::Owned),
        2 => any::<bool>().prop_map(|blocking| Kind::Raw { blocking }),
        1 => Just(Kind::Legacy),
        1 => Just(Kind::PerThread),
    ]
}

pub(crate) fn schedule() -> impl Strategy<Value = Schedule> {
    prop_oneof![
        1 => Just(Schedule::Eager),
        2 => (1..20_u32).prop_map(|patience| Schedule::Late { patience }),
        2 => Just(Schedule::Random),
        2 => Just(Schedule::Manual),
    ]
}

#[derive(Clone, Debug)]
struct Program {
    kinds: Vec<Kind>,
    steps: Vec<Step>,
    schedule: Schedule,
    seed: u64,
    policy: PendingPolicy,
    reuse: [bool; 3],
    /// Whether requests may wait before the pool grows.
    patient: bool,
    /// Of addresses.
    granules: u64,
    is_limited: bool,
    /// Of memory on the device: less than the limit, or all there is.
    device_granules: u64,
    moves_per_second: u32,
    /// Allocations that the program leaves to the pool's end.
    leaves_rest: bool,
    /// Granules that a helper keeps mapped ahead, where there is one.
    helper: Option<u64>,
}

/// A call that fails now and then, in some programs.
fn fault() -> impl Strategy<Value = Option<u64>> {
    prop_oneof![5 => Just(None), 1 => (1..10_u64).prop_map(Some)]
}

fn program(helper: impl Strategy<Value = Option<u64>>) -> impl Strategy<Value = Program> {
    let kinds = prop::collection::vec(kind(), 1..5);
    let actions = kinds.prop_flat_map(|kinds| {
        let lanes = kinds.len();
        let well = (action(lanes), Just(None));
        let badly = (action(lanes), fault());
        let steps = prop_oneof![
            2 => prop::collection::vec(well, 1..100),
            1 => prop::collection::vec(badly, 1..100),
        ];
        (Just(kinds), steps)
    });
    let policy = prop_oneof![Just(PendingPolicy::GrowFirst), Just(PendingPolicy::WaitFirst)];
    let granules = prop_oneof![1 => 16..40_u64, 3 => Just(8 * LIMIT)];
    let device = prop_oneof![3 => Just(2 * LIMIT), 1 => LIMIT / 2..LIMIT];
    // As most programs are: without a limit, with as many moves as time makes up for, or all.
    let rate = prop_oneof![2 => Just(0), 1 => Just(1000), 1 => Just(u32::MAX)];
    let space = (granules, device, any::<bool>(), rate);
    let reuse = prop_oneof![2 => Just([true; 3]), 1 => any::<[bool; 3]>()];
    let policies = (policy, reuse, any::<bool>());
    (actions, schedule(), any::<u64>(), policies, space, any::<bool>(), helper).prop_map(
        |((kinds, steps), schedule, seed, policies, space, leaves_rest, helper)| Program {
            kinds,
            steps,
            schedule,
            seed,
            policy: policies.0,
            reuse: policies.1,
            patient: policies.2,
            granules: space.0,
            device_granules: space.1,
            is_limited: space.2,
            moves_per_second: space.3,
            leaves_rest,
            helper,
        },
    )
}

/// Granules that an allocation keeps in their places, at most.
fn pinned(bytes: u64) -> u64 {
    // Small sizes round up by at most a sixteenth.
    (bytes + bytes / 16 + 512).div_ceil(GRANULE) + 1
}

/// How often the programs so far came to each step of the ladder.
#[derive(Default)]
struct Reached {
    grown: AtomicU64,
    moved: AtomicU64,
    device_waits: AtomicU64,
    host_waits: AtomicU64,
    deferred: AtomicU64,
    given_back: AtomicU64,
    zombies: AtomicU64,
    idle: AtomicU64,
    refusals: AtomicU64,
    failures: AtomicU64,
}

impl Reached {
    fn add(&self, stats: &Stats, run: &Run<'_>) {
        let add = |counter: &AtomicU64, number| counter.fetch_add(number, Ordering::Relaxed);
        add(&self.grown, stats.extents_created);
        add(&self.moved, stats.extents_moved);
        add(&self.device_waits, stats.device_waits);
        add(&self.host_waits, stats.host_waits);
        add(&self.zombies, stats.zombie_count);
        add(&self.idle, stats.idle_count);
        add(&self.refusals, run.refusals);
        add(&self.deferred, run.deferred);
        add(&self.given_back, run.given_back / GRANULE);
        add(&self.failures, run.faults.met.get());
    }

    fn numbers(&self) -> [(&'static str, u64); 10] {
        [
            ("new extents", &self.grown),
            ("moved extents", &self.moved),
            ("waits on the device", &self.device_waits),
            ("waits on the host", &self.host_waits),
            ("frees of what further streams use", &self.deferred),
            ("granules given back", &self.given_back),
            ("zombies", &self.zombies),
            ("idle blocks", &self.idle),
            ("requests refused", &self.refusals),
            ("calls of the pool that failed", &self.failures),
        ]
        .map(|(name, counter)| (name, counter.load(Ordering::Relaxed)))
    }
}

/// An allocation of a program.
struct Lived {
    held: Held,
    /// The lane that it was made on.
    of: usize,
    /// Those that the pool was told of.
    uses: Vec<usize>,
}

/// A program under way.
struct Run<'a> {
    watched: Watched<'a>,
    lanes: Vec<Lane>,
    live: Vec<Lived>,
    refusals: u64,
    deferred: u64,
    given_back: u64,
    faults: Faults,
    /// Granules that there are, for all that is live.
    most: u64,
    /// Whether addresses and the device's memory are enough for the limit.
    ample: bool,
    /// Whether nobody else makes memory.
    alone: bool,
}

/// The code of the driver's answer where a call was made to fail.
const FAULT: CUresult = CUresult::CUDA_ERROR_UNKNOWN;

/// Calls of the driver that fail.
struct Faults {
    sim: Simulator,
    /// Which one of the pool's next call.
    next: Cell<Option<u64>>,
    /// Calls of the pool that failed.
    met: Cell<u64>,
}

impl Faults {
    /// Does something in which the step's fault comes, which is its only one.
    fn during<T>(&self, call: impl FnOnce() -> T) -> T {
        if let Some(n) = self.next.take() {
            self.sim.fail_call(n, FAULT);
        }
        let result = call();
        self.sim.clear_faults();
        result
    }

    /// The same of a call of the pool. `None`: it failed by the fault, and has done nothing.
    fn during_call<T>(&self, call: impl FnOnce() -> Result<T, Error>) -> Option<Result<T, Error>> {
        let has_fault = self.next.get().is_some();
        let result = self.during(call);
        if has_fault && matches!(result, Err(Error::Driver { code: FAULT, .. })) {
            self.met.set(self.met.get() + 1);
            return None;
        }
        Some(result)
    }
}

impl Run<'_> {
    fn free(&mut self, index: usize, lane: usize) {
        let Lived { held, of, uses } = &self.live[index];
        let is_deferred = uses.iter().any(|used| *used != lane);
        let (from, to) = (self.lanes[*of].handle(), self.lanes[lane].handle());
        if *of != lane {
            // The program's own duty: the freeing stream comes after the writing one.
            self.watched.rig.order(from, to);
        }
        let (watched, faults, alone) = (&self.watched, &self.faults, self.alone);
        let freed = watched.free_by(*held, to, |ptr, stream| {
            let free = || watched.pool.free(ptr, stream);
            let before = rig::held(&watched.pool.stats());
            let freed = faults.during_call(free);
            freed.unwrap_or_else(|| {
                watched.validate();
                // A helper may have done something meanwhile.
                if alone {
                    assert_eq!(rig::held(&watched.pool.stats()), before, "a free that failed");
                }
                free()
            })
        });
        freed.expect("a free");
        self.live.swap_remove(index);
        self.deferred += u64::from(is_deferred);
    }

    fn free_all(&mut self, lane: usize, backwards: bool) {
        let of_lane = |lived: &Lived| lived.of == lane;
        while let Some(index) = if backwards {
            self.live.iter().rposition(of_lane)
        } else {
            self.live.iter().position(of_lane)
        } {
            self.free(index, lane);
            self.watched.validate();
        }
    }

    /// Frees what a stream uses further, by the stream that it was made on.
    fn free_used(&mut self, lane: usize) {
        while let Some(index) = self.live.iter().position(|lived| lived.uses.contains(&lane)) {
            self.free(index, self.live[index].of);
        }
    }

    fn malloc(&mut self, bytes: u64, lane: usize) -> Result<(), TestCaseError> {
        let (watched, faults, alone) = (&self.watched, &self.faults, self.alone);
        let malloc = |bytes, stream| {
            let malloc = || watched.pool.malloc(bytes, stream);
            let before = rig::held(&watched.pool.stats());
            faults.during_call(malloc).unwrap_or_else(|| {
                watched.validate();
                if alone {
                    assert_eq!(rig::held(&watched.pool.stats()), before, "one that failed");
                }
                malloc()
            })
        };
        match watched.malloc_by(bytes, self.lanes[lane].handle(), malloc) {
            Ok(held) => self.live.push(Lived { held, of: lane, uses: Vec::new() }),
            Err(Error::OutOfMemory { requested_bytes, largest_free_bytes, .. }) => {
                let live: u64 = self.live.iter().map(|of| pinned(of.held.bytes)).sum();
                let stats = self.watched.pool.stats();
                // What stays apart behind a long extent that is in use in part is not promised.
                let movable = stats.extent_count * GRANULE == stats.mapped_bytes || live == 0;
                let fits = live + bytes.div_ceil(GRANULE) <= self.most;
                prop_assert!(
                    largest_free_bytes < requested_bytes && !(self.ample && movable && fits),
                    "{bytes} bytes refused with {live} granules pinned: {:?}",
                    self.watched.pool
                );
                self.refusals += 1;
            }
            Err(other) => prop_assert!(false, "{other}"),
        }
        Ok(())
    }

    fn step(&mut self, action: &Action, kinds: &[Kind]) -> Result<(), TestCaseError> {
        let rig = self.watched.rig;
        match *action {
            Action::Malloc { bytes, lane } => self.malloc(bytes, lane)?,
            Action::Free { which, lane } => {
                if !self.live.is_empty() {
                    self.free(which.index(self.live.len()), lane);
                }
            }
            Action::FreeAll { lane, backwards } => self.free_all(lane, backwards),
            Action::Use { which, lane } => {
                if !self.live.is_empty() {
                    let index = which.index(self.live.len());
                    let lived = &mut self.live[index];
                    let to = self.lanes[lane].handle();
                    rig.order(self.lanes[lived.of].handle(), to);
                    lived.held.check(rig, to);
                    let note = || self.watched.pool.record_stream(lived.held.ptr, to);
                    let noted = self.faults.during_call(note).unwrap_or_else(note);
                    noted.expect("a noted use");
                    lived.uses.push(lane);
                }
            }
            Action::Follow { from, to } => {
                let (from, to) = (self.lanes[from].handle(), self.lanes[to].handle());
                let take = || self.watched.pool.mark(from);
                let mark = self.faults.during_call(take).unwrap_or_else(take).expect("a mark");
                rig.order(from, to);
                self.watched.pool.follows(to, &mark).expect("a stream that follows");
            }
            Action::Synchronize { lane, tells } => {
                let lane = self.lanes[lane].handle();
                let mark = tells.then(|| self.watched.pool.mark(lane).expect("a mark"));
                call!(rig.driver, cuCtxSetCurrent(rig.device.context()));
                call!(rig.driver, cuStreamSynchronize(lane.raw()));
                if let Some(mark) = mark {
                    let tell = || self.watched.pool.passed(&mark);
                    let told = self.faults.during_call(tell).unwrap_or_else(tell);
                    told.expect("a mark that has passed");
                }
            }
            Action::Trim { keep } => {
                let before = self.watched.pool.stats().mapped_bytes;
                let free = rig.device.free_memory().expect("the device's free memory");
                let has_fault = self.faults.next.get().is_some();
                let trim = || self.watched.pool.trim_to(keep * GRANULE);
                let gone = self.faults.during_call(trim).unwrap_or_else(trim).expect("a trim");
                let after = self.watched.pool.stats().mapped_bytes;
                self.given_back += gone;
                // A helper may make memory meanwhile; and what the driver does not take back at once is not
                // the pool's any more, nor the device's. A later trim has it go, and tells it.
                if self.alone && !has_fault {
                    prop_assert!(before - after <= gone);
                    prop_assert_eq!(rig.device.free_memory().expect("the same") - free, gone);
                }
            }
            Action::Advance { steps } => {
                let sim = rig.sim.as_ref().expect("a simulated rig");
                for _ in 0..steps {
                    sim.advance_all();
                }
            }
            Action::Replace { lane } => {
                // Whatever it still holds goes first, as a program would do it.
                self.free_all(lane, false);
                self.free_used(lane);
                match self.lanes.remove(lane) {
                    Lane::Owned(stream) => self.faults.during(|| drop(stream)),
                    other => other.end(rig),
                }
                self.lanes.insert(lane, Lane::new(rig, kinds[lane]));
            }
        }
        self.watched.validate();
        prop_assert!(self.watched.usage() <= self.most);
        Ok(())
    }
}

/// Runs a program to its end.
fn run(program: &Program, reached: &Reached) -> Result<(), TestCaseError> {
    let sim = Simulator::builder()
        .schedule(program.schedule)
        .seed(program.seed)
        // A little is the rig's own.
        .memory_bytes((program.device_granules + 1) * GRANULE)
        .build()
        .expect("a simulator");
    let rig = Rig::on(sim.clone());
    let most = if program.is_limited { LIMIT } else { program.device_granules };
    let mut config = config(LIMIT, program.granules);
    if !program.is_limited {
        config.limit_bytes = None;
    }
    config.moves_per_second = program.moves_per_second;
    config.pending_policy = program.policy;
    let [follow, ask, wait] = program.reuse;
    config.reuse.follow_event_dependencies = follow;
    config.reuse.opportunistic = ask;
    config.reuse.internal_dependencies = wait;
    config.patience = Duration::from_micros(if program.patient { 100 } else { 0 });
    config.background = program.helper.map(|ahead_granules| {
        let mut background = Background::default();
        // It looks all the time, and meets the program at every step.
        background.period = Duration::ZERO;
        background.ahead_bytes = ahead_granules * GRANULE;
        background
    });
    let lanes = program.kinds.iter().map(|kind| Lane::new(&rig, *kind)).collect();
    let (watched, mut lanes) = {
        let mut run = Run {
            watched: rig.pool(&config),
            lanes,
            live: Vec::new(),
            refusals: 0,
            deferred: 0,
            given_back: 0,
            faults: Faults { sim: sim.clone(), next: Cell::default(), met: Cell::default() },
            most,
            alone: program.helper.is_none(),
            ample: program.granules == 8 * LIMIT && most <= program.device_granules,
        };
        for (action, fault) in &program.steps {
            run.faults.next.set(*fault);
            run.step(action, &program.kinds)?;
            run.faults.next.set(None);
        }
        reached.add(&run.watched.pool.stats(), &run);
        if !program.leaves_rest {
            for lane in 0..run.lanes.len() {
                run.free_all(lane, true);
            }
            prop_assert_eq!(run.watched.pool.stats().live_count, 0);
        }
        let Run { watched, lanes, .. } = run;
        (watched, lanes.into_iter())
    };
    // One stream goes before the pool, the others after it.
    lanes.next().into_iter().for_each(|lane| lane.end(&rig));
    if program.seed.is_multiple_of(2) {
        watched.assert_intact();
    }
    drop(watched);
    prop_assert_eq!(rig.mismatches(), 0);
    lanes.for_each(|lane| lane.end(&rig));
    let has_faults = program.steps.iter().any(|(_, fault)| fault.is_some());
    // Those that are left go with the context. A fault may have come to the end of one.
    prop_assert!(has_faults || sim.leaks().events == 0, "{:?}", sim.leaks());
    drop(rig);
    sim.assert_clean();
    let mut leaks = sim.leaks();
    if has_faults {
        // The one that a stream's end came to.
        leaks.streams = 0;
    }
    prop_assert!(leaks.is_empty(), "{leaks:?}");
    Ok(())
}

/// Allocations never overlap and keep what was written into them; memory is refused only when what
/// is live leaves too few granules that can be brought together; nothing is left at the end.
fn run_all(helper: impl Strategy<Value = Option<u64>>) {
    let reached = Reached::default();
    let config = ProptestConfig {
        cases: cases(),
        // A failure is printed; there is no file beside a test that has several.
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    let mut runner = TestRunner::new(config);
    let outcome = runner.run(&program(helper), |program| run(&program, &reached));
    outcome.unwrap_or_else(|error| panic!("{error}"));
    println!("{:?}", reached.numbers());
    for (what, number) in reached.numbers() {
        assert!(number >= u64::from(cases()) / 16, "only {number} {what}");
    }
}

#[test]
fn random_programs() {
    run_all(Just(None));
}

#[test]
fn random_programs_beside_a_helper() {
    run_all((0..6_u64).prop_map(Some));
}

//! Random programs in several threads at a time on one pool, with work that completes adversarially.
//!
//! What the threads meet in differs from run to run, so a failure is shrunk a little only: it is printed
//! with its scripts, and comes again by many runs of these.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cuda_sim::{Schedule, Simulator};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use vpmm::{Background, PendingPolicy, Stream};

use crate::program::{bytes, schedule};
use crate::rig::{GRANULE, config};
use crate::support::changed::changed;
use crate::support::{Held, Lcg, Meeting, Rig, Watched, cases};

/// Of memory, where there is a limit; else the device has twice as much.
const LIMIT: u64 = 20;

/// Lets other threads go first, now and then: around driver calls, where the pool holds few locks or none and
/// what it has learnt may be about nothing any more.
fn dawdle() {
    static THREADS: AtomicU64 = AtomicU64::new(1);
    thread_local!(static RANDOM: Cell<u64> = Cell::new(THREADS.fetch_add(1, Ordering::Relaxed)));
    let mut random = Lcg(RANDOM.get());
    match random.below(16) {
        0 => std::thread::sleep(Duration::from_micros(50)),
        1..4 => std::thread::yield_now(),
        _ => {}
    }
    RANDOM.set(random.0);
}

macro_rules! dawdling {
    ($($module:ident: $function:ident($($argument:ident: $type:ty),*);)*) => {
        $(mod $module {
            use super::dawdle;
            use crate::support::changed::replaced;
            replaced!($function($($argument: $type),*), dawdle(), dawdle());
        })*

        fn put_dawdling(api: &mut cuda_sys::DriverApi) {
            $($module::put(api);)*
        }
    };
}

dawdling! {
    record: cuEventRecord(event: CUevent, stream: CUstream);
    query: cuEventQuery(event: CUevent);
    hold_back: cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: u32);
    capture_question: cuStreamIsCapturing(stream: CUstream, status: *mut CUstreamCaptureStatus);
    unmap: cuMemUnmap(address: CUdeviceptr, bytes: usize);
}

/// Which streams a thread has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Streams {
    Own,
    Shared,
    Both,
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
    /// An allocation becomes another thread's, which frees it when it comes to that.
    Give {
        which: prop::sample::Index,
        to: usize,
    },
    /// What other threads have given is freed, after their work on it.
    FreeGiven {
        lane: usize,
    },
    /// A further stream uses an allocation, and the pool is told; the free is not ordered after that.
    Use {
        which: prop::sample::Index,
        lane: usize,
    },
    /// The thread's own stream comes after the shared one, or the other way round, and the pool is told.
    Follow {
        backwards: bool,
    },
    Synchronize {
        lane: usize,
    },
    Trim {
        keep: u64,
    },
    /// Some of every stream's work runs; the host does not learn of it.
    Advance {
        steps: usize,
    },
    /// The thread gives its own stream up, which ends with the last allocation of it, in whichever thread
    /// that is, and has another one.
    Replace,
    /// Everything is counted.
    Look,
}

fn action() -> impl Strategy<Value = Action> {
    let lane = 0..2_usize;
    let which = any::<prop::sample::Index>();
    prop_oneof![
        10 => (bytes(), lane.clone()).prop_map(|(bytes, lane)| Action::Malloc { bytes, lane }),
        6 => (which.clone(), lane.clone()).prop_map(|(which, lane)| Action::Free { which, lane }),
        2 => (which.clone(), 0..4_usize).prop_map(|(which, to)| Action::Give { which, to }),
        1 => lane.clone().prop_map(|lane| Action::FreeGiven { lane }),
        2 => (which, lane.clone()).prop_map(|(which, lane)| Action::Use { which, lane }),
        1 => any::<bool>().prop_map(|backwards| Action::Follow { backwards }),
        1 => lane.prop_map(|lane| Action::Synchronize { lane }),
        1 => (0..LIMIT).prop_map(|keep| Action::Trim { keep }),
        2 => (1..12_usize).prop_map(|steps| Action::Advance { steps }),
        1 => Just(Action::Replace),
        1 => Just(Action::Look),
    ]
}

/// A thread's actions, round by round.
type Script = Vec<Vec<Action>>;

#[derive(Clone, Debug)]
struct Crowd {
    threads: Vec<(Streams, Script)>,
    schedule: Schedule,
    seed: u64,
    is_limited: bool,
    moves_per_second: u32,
    policy: PendingPolicy,
    reuse: [bool; 3],
    /// Whether requests may wait before the pool grows.
    patient: bool,
    /// Whether a helper works beside them.
    helped: bool,
    /// Whether threads dawdle in driver calls.
    dawdles: bool,
}

fn crowd() -> impl Strategy<Value = Crowd> {
    let streams = prop_oneof![Just(Streams::Own), Just(Streams::Shared), Just(Streams::Both)];
    let rounds = prop::collection::vec(prop::collection::vec(action(), 0..25), 3);
    let threads = prop::collection::vec((streams, rounds), 2..5);
    let policy = prop_oneof![Just(PendingPolicy::GrowFirst), Just(PendingPolicy::WaitFirst)];
    let reuse = prop_oneof![2 => Just([true; 3]), 1 => any::<[bool; 3]>()];
    let rate = prop_oneof![Just(0), Just(u32::MAX)];
    let helped = prop_oneof![3 => Just(false), 1 => Just(true)];
    let space = (any::<bool>(), rate, any::<bool>(), helped, any::<bool>());
    (threads, schedule(), any::<u64>(), policy, reuse, space).prop_map(
        |(threads, schedule, seed, policy, reuse, space)| Crowd {
            threads,
            schedule,
            seed,
            is_limited: space.0,
            moves_per_second: space.1,
            policy,
            reuse,
            patient: space.2,
            helped: space.3,
            dawdles: space.4,
        },
    )
}

/// An allocation, with the stream that it was made on: that lasts as long.
struct Lived {
    held: Held,
    of: Arc<Stream>,
}

/// How often threads came to what they are together for.
#[derive(Default)]
struct Reached {
    given: AtomicU64,
    moved: AtomicU64,
    device_waits: AtomicU64,
    host_waits: AtomicU64,
    uses: AtomicU64,
    refusals: AtomicU64,
}

impl Reached {
    fn count(counter: &AtomicU64, number: u64) {
        counter.fetch_add(number, Ordering::Relaxed);
    }

    fn numbers(&self) -> [(&'static str, u64); 6] {
        [
            ("blocks given to another thread", &self.given),
            ("moved extents", &self.moved),
            ("waits on the device", &self.device_waits),
            ("waits on the host", &self.host_waits),
            ("uses of further streams", &self.uses),
            ("requests refused", &self.refusals),
        ]
        .map(|(name, counter)| (name, counter.load(Ordering::Relaxed)))
    }
}

/// What threads have in common.
struct Common<'a> {
    watched: &'a Watched<'a>,
    sim: &'a Simulator,
    shared: Arc<Stream>,
    /// What was given to each of the threads.
    given: Vec<Mutex<Vec<Lived>>>,
    reached: &'a Reached,
}

/// A thread under way.
struct Member<'a> {
    common: &'a Common<'a>,
    number: usize,
    own: Option<Arc<Stream>>,
    is_sharing: bool,
    live: Vec<Lived>,
}

impl Member<'_> {
    fn lane(&self, lane: usize) -> Arc<Stream> {
        match &self.own {
            Some(own) if lane == 0 || !self.is_sharing => Arc::clone(own),
            _ => Arc::clone(&self.common.shared),
        }
    }

    fn free(&self, lived: Lived, stream: &Arc<Stream>) {
        let Lived { held, of } = lived;
        if !Arc::ptr_eq(&of, stream) {
            // The program's own duty: the freeing stream comes after the writing one.
            self.common.watched.rig.order(&*of, &**stream);
        }
        self.common.watched.free(held, &**stream);
    }

    fn free_given(&self, stream: &Arc<Stream>) {
        let given = std::mem::take(&mut *self.common.given[self.number].lock().unwrap());
        given.into_iter().for_each(|lived| self.free(lived, stream));
    }

    fn act(&mut self, action: &Action) {
        let Common { watched, sim, shared, given, reached } = self.common;
        match action {
            Action::Malloc { bytes, lane } => {
                let of = self.lane(*lane);
                match watched.try_malloc(*bytes, &*of) {
                    Ok(held) => self.live.push(Lived { held, of }),
                    Err(error) => {
                        assert!(error.is_out_of_memory(), "{error}");
                        Reached::count(&reached.refusals, 1);
                    }
                }
            }
            Action::Free { which, lane } if !self.live.is_empty() => {
                let lived = self.live.swap_remove(which.index(self.live.len()));
                self.free(lived, &self.lane(*lane));
            }
            Action::Give { which, to } if !self.live.is_empty() => {
                let lived = self.live.swap_remove(which.index(self.live.len()));
                given[to % given.len()].lock().unwrap().push(lived);
                Reached::count(&reached.given, 1);
            }
            Action::FreeGiven { lane } => self.free_given(&self.lane(*lane)),
            Action::Use { which, lane } if !self.live.is_empty() => {
                let Lived { held, of } = &self.live[which.index(self.live.len())];
                // The shared stream, too, of a thread that allocates nothing on it.
                let to = if *lane == 0 { self.lane(0) } else { Arc::clone(shared) };
                watched.rig.order(&**of, &*to);
                held.check(watched.rig, &*to);
                watched.pool.record_stream(held.ptr, &*to).expect("a noted use");
                Reached::count(&reached.uses, 1);
            }
            Action::Follow { backwards } => {
                let (mut from, mut to) = (Arc::clone(shared), self.lane(0));
                if *backwards {
                    std::mem::swap(&mut from, &mut to);
                }
                let mark = watched.pool.mark(&*from).expect("a mark");
                watched.rig.order(&*from, &*to);
                watched.pool.follows(&*to, &mark).expect("a stream that follows");
            }
            Action::Synchronize { lane } => {
                self.lane(*lane).synchronize().expect("the stream finishes")
            }
            Action::Trim { keep } => {
                watched.pool.trim_to(keep * GRANULE).expect("a trim");
            }
            Action::Advance { steps } => {
                for _ in 0..*steps {
                    sim.advance_all();
                }
            }
            Action::Replace => {
                if self.own.is_some() {
                    self.own = Some(Arc::new(watched.rig.stream()));
                }
            }
            Action::Look => {
                let stats = watched.pool.stats();
                assert!(stats.live_bytes <= stats.mapped_bytes, "{stats:?}");
                watched.pool.snapshot();
            }
            // Nothing is live.
            Action::Free { .. } | Action::Give { .. } | Action::Use { .. } => {}
        }
    }
}

/// Runs the scripts, each in its thread, with a look at the whole pool after each round.
fn run_threads(common: &Common<'_>, threads: &[(Streams, Script)]) {
    let meeting = Meeting::of(threads.len());
    std::thread::scope(|scope| {
        for (number, (streams, script)) in threads.iter().enumerate() {
            let meeting = &meeting;
            scope.spawn(move || {
                let own =
                    (*streams != Streams::Shared).then(|| Arc::new(common.watched.rig.stream()));
                let is_sharing = *streams != Streams::Own;
                let mut member = Member { common, number, own, is_sharing, live: Vec::new() };
                for actions in script {
                    let part = || actions.iter().for_each(|one| member.act(one));
                    if !meeting.after(part, || common.watched.validate()) {
                        return;
                    }
                }
                let last = member.lane(0);
                std::mem::take(&mut member.live)
                    .into_iter()
                    .for_each(|lived| member.free(lived, &last));
                // What comes later is freed in `run`.
                member.free_given(&last);
            });
        }
    });
}

fn run(crowd: &Crowd, reached: &Reached) -> Result<(), TestCaseError> {
    let sim = Simulator::builder()
        .schedule(crowd.schedule)
        .seed(crowd.seed)
        // A little is the rig's own.
        .memory_bytes((2 * LIMIT + 1) * GRANULE)
        .build()
        .expect("a simulator");
    let rig = match crowd.dawdles {
        true => Rig::with(changed(&sim, put_dawdling), sim.clone()),
        false => Rig::on(sim.clone()),
    };
    let mut config = config(LIMIT, 8 * LIMIT);
    if !crowd.is_limited {
        config.limit_bytes = None;
    }
    config.moves_per_second = crowd.moves_per_second;
    config.pending_policy = crowd.policy;
    let [follow, ask, wait] = crowd.reuse;
    config.reuse.follow_event_dependencies = follow;
    config.reuse.opportunistic = ask;
    config.reuse.internal_dependencies = wait;
    config.patience = Duration::from_micros(if crowd.patient { 100 } else { 0 });
    config.background = crowd.helped.then(|| {
        let mut background = Background::default();
        background.period = Duration::ZERO;
        background.ahead_bytes = 2 * GRANULE;
        background
    });
    let watched = rig.pool(&config);
    {
        let given = crowd.threads.iter().map(|_| Mutex::default()).collect();
        let shared = Arc::new(rig.stream());
        let common = Common { watched: &watched, sim: &sim, shared, given, reached };
        run_threads(&common, &crowd.threads);
        // What was given to threads that had ended.
        for number in 0..crowd.threads.len() {
            let (own, live) = (None, Vec::new());
            let heir = Member { common: &common, number, own, is_sharing: true, live };
            heir.free_given(&common.shared);
        }
    }
    let stats = watched.pool.stats();
    Reached::count(&reached.moved, stats.extents_moved);
    Reached::count(&reached.device_waits, stats.device_waits);
    Reached::count(&reached.host_waits, stats.host_waits);
    prop_assert_eq!((stats.live_count, stats.live_bytes), (0, 0));
    watched.assert_intact();
    drop(watched);
    // Those that are left go with the context.
    prop_assert_eq!(sim.leaks().events, 0);
    drop(rig);
    sim.assert_clean();
    let leaks = sim.leaks();
    prop_assert!(leaks.is_empty(), "{leaks:?}");
    Ok(())
}

/// Allocations of several threads never overlap, keep what was written into them and meet no use that
/// comes unordered; the books agree whenever the threads stand still; nothing is left at the end.
#[test]
fn random_programs_in_several_threads() {
    let reached = Reached::default();
    let config = ProptestConfig {
        cases: cases(),
        failure_persistence: None,
        max_shrink_iters: 100,
        ..ProptestConfig::default()
    };
    let mut runner = TestRunner::new(config);
    let outcome = runner.run(&crowd(), |crowd| run(&crowd, &reached));
    outcome.unwrap_or_else(|error| panic!("{error}"));
    println!("{:?}", reached.numbers());
    for (what, number) in reached.numbers() {
        assert!(number >= u64::from(cases()) / 16, "only {number} {what}");
    }
}

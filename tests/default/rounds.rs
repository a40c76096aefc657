//! Programs that go round and round: recorded ones, replayed on one pool.

use std::cell::Cell;
use std::thread::sleep;
use std::time::{Duration, Instant};

use cuda_sim::{Simulator, SpinHandle};
use vpmm::{DevicePtr, Driver, Pool, PoolConfig, Stream};
use vpmm_cli::trace::{Action, Trace};

/// A recording on a pool.
struct Rounds {
    trace: Trace,
    pool: Pool,
    streams: Vec<Stream>,
    sim: Simulator,
}

impl Rounds {
    /// One of the repository's traces on a pool for which time does not pass, so that it moves and grows the
    /// same in each run.
    fn of(name: &str) -> Self {
        Self::with(&format!("traces/{name}.csv.gz"), 0)
    }

    /// The same on one that holds no more than so many thousandths of what is live at the peak.
    fn limited(name: &str, thousandths: u64) -> Self {
        let limit = |trace: &Trace| Some(trace.peak_live_bytes / 1000 * thousandths);
        Self::made(&format!("traces/{name}.csv.gz"), 0, limit)
    }

    fn with(file: &str, moves_per_second: u32) -> Self {
        Self::made(file, moves_per_second, |_| None)
    }

    fn made(file: &str, moves_per_second: u32, limit: impl FnOnce(&Trace) -> Option<u64>) -> Self {
        // From the package's folder, where tests are run: the folder at build time may be another machine's.
        let trace = Trace::open(file).unwrap();
        let sim = Simulator::builder().build().unwrap();
        let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
        let mut config = PoolConfig::default();
        config.moves_per_second = moves_per_second;
        config.limit_bytes = limit(&trace);
        let pool = Pool::new(&device, &config).unwrap();
        let streams = (0..trace.streams).map(|_| device.stream().unwrap()).collect();
        Self { trace, pool, streams, sim }
    }

    /// The recording once; what it does not free goes at its end. How many extents were made or moved.
    fn round(&self) -> u64 {
        self.round_at(|_| {})
    }

    /// The same where each call comes after a wait.
    fn round_at(&self, wait: impl Fn(usize)) -> u64 {
        let changed = || {
            let stats = self.pool.stats();
            stats.extents_created + stats.extents_moved
        };
        let before = changed();
        let mut live: Vec<Option<DevicePtr>> = vec![None; self.trace.allocations.len()];
        for (at, operation) in self.trace.operations.iter().enumerate() {
            wait(at);
            let stream = &self.streams[operation.stream as usize];
            let slot = operation.slot as usize;
            match operation.action {
                Action::Allocate => {
                    let bytes = usize::try_from(self.trace.allocations[slot].bytes).unwrap();
                    live[slot] = Some(self.pool.malloc(bytes, stream).unwrap());
                }
                Action::Free => {
                    live[slot]
                        .take()
                        .into_iter()
                        .for_each(|ptr| self.pool.free(ptr, stream).unwrap());
                }
            }
        }
        for (allocation, ptr) in self.trace.allocations.iter().zip(live) {
            let stream = &self.streams[allocation.stream as usize];
            ptr.into_iter().for_each(|ptr| self.pool.free(ptr, stream).unwrap());
        }
        changed() - before
    }

    /// The same where each call comes at its time in the recording.
    fn round_at_its_own_pace(&self) -> u64 {
        let begin = Instant::now();
        self.round_at(|at| {
            let left = self.trace.times[at].saturating_sub(begin.elapsed());
            if left >= Duration::from_micros(200) {
                sleep(left);
            }
        })
    }

    fn held(&self) -> f64 {
        self.pool.stats().peak_mapped_bytes as f64 / self.trace.peak_live_bytes as f64
    }

    fn end(self) {
        drop(self.pool);
        self.sim.assert_clean();
    }
}

/// The same requests find the same gaps once a round has found all it needs, because fronts leave little
/// of one round to the next. Had they large blocks again only in the midst of a round, and not at its begin,
/// gpt_train would change 77 extents in its second round and hold 1.0147, instead of one and 1.0101.
#[test]
fn trainings_settle() {
    for (name, again, held) in [("gpt_train", 5, 1.0125), ("resnet_train", 20, 1.0225)] {
        let rounds = Rounds::of(name);
        let changes: Vec<u64> = (0..30).map(|_| rounds.round()).collect();
        assert!(
            changes[1] <= again && changes[1..].iter().sum::<u64>() < 30,
            "{name}: {changes:?}"
        );
        assert!(rounds.held() < held, "{name} holds {}", rounds.held());
        rounds.end();
    }
}

/// A pool without a rate of moves takes no notice of time. When large requests counted as in haste by the clock,
/// what such a pool made and moved differed from run to run, and a loaded machine's trainings settled late.
#[test]
fn without_a_rate_time_makes_no_difference() {
    let run = |wait: Duration| {
        let rounds = Rounds::of("gpt_train");
        let pause = |_| {
            let begin = Instant::now();
            while begin.elapsed() < wait {
                std::hint::spin_loop();
            }
        };
        let changes: Vec<u64> = (0..5).map(|_| rounds.round_at(pause)).collect();
        rounds.end();
        changes
    };
    assert_eq!(run(Duration::ZERO), run(Duration::from_micros(2)));
}

/// What a program holds that goes through its requests once, without a pause, with the rate of moves that pools
/// have. When sizes counted as known after a handful of requests cupy_mix held 1.17.
///
/// The least of three: by the time that the machine takes a pool comes to be at leisure or not, and serve_streams
/// held 1.05 to 1.11 in 64 rounds, gpt_train up to 1.017 beside other tests.
#[test]
fn a_first_round_at_full_speed_holds_little_more_than_is_live() {
    let rate = PoolConfig::default().moves_per_second;
    let most =
        [("gpt_train", 1.02), ("resnet_train", 1.015), ("cupy_mix", 1.06), ("serve_streams", 1.1)];
    for (name, most) in most {
        let held = [(); 3].map(|()| {
            let rounds = Rounds::with(&format!("traces/{name}.csv.gz"), rate);
            rounds.round();
            let held = rounds.held();
            rounds.end();
            held
        });
        assert!(held.iter().any(|held| *held < most), "{name} holds {held:?}");
    }
}

/// A program that goes through the same once more at full speed, and has memory moved for a good part of its time, gets
/// more instead soon: when eight moves for each extent made came before that, as in a first round, cupy_mix made and
/// moved two thirds to four fifths as much in each of its next three rounds as in its first.
///
/// The least of three: how fast it goes decides.
#[test]
fn what_comes_again_at_full_speed_moves_less_and_less() {
    let rate = PoolConfig::default().moves_per_second;
    for name in ["cupy_mix", "serve_streams"] {
        let changes = [(); 3].map(|()| {
            let rounds = Rounds::with(&format!("traces/{name}.csv.gz"), rate);
            let changes = [(); 5].map(|()| rounds.round());
            println!("{name} {changes:?} {}", rounds.held());
            rounds.end();
            changes
        });
        let settles = |changes: &[u64; 5]| changes[2..].iter().sum::<u64>() < changes[0] / 4;
        assert!(changes.iter().any(settles), "{name} changes {changes:?}");
    }
}

/// A pool that is primed by one large block has done nothing but grow when that is given back, which is no round of a
/// program in a hurry: where it counted as one cupy_mix held 1.5 of its peak and more in its first round.
///
/// The least of three: how fast it goes decides.
#[test]
fn a_primed_pool_moves_memory_before_it_makes_more() {
    let rate = PoolConfig::default().moves_per_second;
    let held = [(); 3].map(|()| {
        let rounds = Rounds::with("traces/cupy_mix.csv.gz", rate);
        let half = usize::try_from(rounds.trace.peak_live_bytes / 2).unwrap();
        let primed = rounds.pool.malloc(half, &rounds.streams[0]).unwrap();
        rounds.pool.free(primed, &rounds.streams[0]).unwrap();
        rounds.round();
        let held = rounds.held();
        rounds.end();
        held
    });
    assert!(held.iter().any(|held| *held < 1.35), "holds {held:?}");
}

/// A training with varying lengths moves about as much as it makes while it grows, which is no reason to make
/// long extents: it has time for short ones between its requests. With those it holds 1.007; with long ones
/// once more has moved than was made 1.021, with at most 60 made at once 1.017.
#[test]
fn a_training_at_its_own_pace_holds_little_more_than_is_live() {
    let recording = "benches/results/simulated-2026-11-23-growing/gpt_run.csv.gz";
    let rounds = Rounds::with(recording, PoolConfig::default().moves_per_second);
    rounds.round_at_its_own_pace();
    assert!(rounds.held() < 1.012, "holds {}", rounds.held());
    rounds.end();
}

/// A training whose steps are all the same, with one request for much at each one's peak. While what stays up to
/// there lay among what goes before it held 1.119 at full speed and 1.136 at its own pace, and with a limit it
/// completed from 1.051 on. While what goes lay in the smallest gaps it moved 6,700 extents there, round for round.
#[test]
fn what_a_step_keeps_lies_apart_from_what_it_gives_back() {
    let recording = "benches/results/simulated-2026-11-25-same-steps/gpt_cycle1.csv.gz";
    let rate = PoolConfig::default().moves_per_second;
    let rounds = Rounds::with(recording, rate);
    rounds.round();
    assert!(rounds.held() < 1.06, "holds {}", rounds.held());
    rounds.end();
    let rounds = Rounds::with(recording, rate);
    rounds.round_at_its_own_pace();
    assert!(rounds.held() < 1.04, "holds {} at its own pace", rounds.held());
    rounds.end();
    let limit = |trace: &Trace| Some(trace.peak_live_bytes / 100 * 104);
    let rounds = Rounds::made(recording, rate, limit);
    rounds.round();
    let moved = rounds.pool.stats().extents_moved;
    assert!(moved < 1_500, "moved {moved} at a limit");
    rounds.end();
}

/// A server turns its memory over and over, and moves it by dozens of short extents until it has long ones
/// instead: without that it held 1.32 of its peak, and moved 6,650 times instead of 3,690.
#[test]
fn a_server_at_its_own_pace_comes_to_have_long_extents() {
    let rounds =
        Rounds::with("traces/serve_streams.csv.gz", PoolConfig::default().moves_per_second);
    rounds.round_at_its_own_pace();
    let moved = rounds.pool.stats().extents_moved;
    assert!(rounds.held() < 1.15 && moved < 5_500, "holds {}, moved {moved}", rounds.held());
    rounds.end();
}

/// A server that fills a small limit asks for a fifth of it at once, of which every extent has to be moved: 190
/// if all are one granule long, and at the smallest limit at which it completes 264, six milliseconds.
#[test]
fn at_a_small_limit_a_large_request_moves_no_more_than_it_has_time_for() {
    const MOST: u64 = 150;
    let rounds = Rounds::limited("serve_streams", 1020);
    let moved = || rounds.pool.stats().extents_moved;
    let (before, most) = (Cell::new(0), Cell::new(0));
    rounds.round_at(|_| {
        let now = moved();
        most.set(most.get().max(now - before.replace(now)));
    });
    assert!(most.get() <= MOST, "{} moves", most.get());
    rounds.end();
}

/// Programs of many kinds, all of whose requests come at once: what they hold, and that none of their requests
/// has more extents made or moved than takes some milliseconds. Without a bound lora's has 69 made and 16 moved,
/// cudagraphs' 89 made and 4. The last three are of those that no constant was chosen with; the sentences of
/// `longer` grow, which is no reason to grow as a program that never settles does: it held 1.24.
#[test]
fn programs_in_haste_hold_little_and_no_request_of_theirs_takes_long() {
    let most = [
        ("moe", 1.02),
        ("seq2seq", 1.02),
        ("lora", 1.03),
        ("gnn", 1.03),
        ("unet", 1.04),
        ("cudagraphs", 1.07),
        ("server", 1.06),
    ];
    let further = [("longer", 1.12), ("gathered", 1.14), ("detects", 1.065)];
    let known = most.map(|of| ("simulated-2026-11-25-programs", of));
    let further = further.map(|of| ("simulated-2026-11-28-unseen", of));
    for (folder, (name, most)) in known.into_iter().chain(further) {
        let file = format!("benches/results/{folder}/{name}.csv.gz");
        let rounds = Rounds::with(&file, 0);
        let handles = || {
            let stats = rounds.pool.stats();
            (stats.extents_created, stats.extents_moved)
        };
        let (before, worst) = (Cell::new(handles()), Cell::new((0, 0)));
        rounds.round_at(|_| {
            let (made, moved) = handles();
            let (made_then, moved_then) = before.replace((made, moved));
            let (made_most, moved_most) = worst.get();
            worst.set((made_most.max(made - made_then), moved_most.max(moved - moved_then)));
        });
        let (made, moved) = worst.get();
        assert!(made <= 40 && moved <= 56, "{name}: {made} made, {moved} moved at the most");
        assert!(rounds.held() < most, "{name} holds {}", rounds.held());
        rounds.end();
    }
}

/// Requests that never settle in little more than is live are given more, but not ever more.
#[test]
fn a_restless_program_stops_growing() {
    let rounds = Rounds::of("cupy_mix");
    let changes: Vec<u64> = (0..40).map(|_| rounds.round()).collect();
    assert!(rounds.held() < 1.65, "holds {} after {changes:?}", rounds.held());
    rounds.end();
}

/// A loader's stream asks for the next batch when all that a step freed still waits for the GPU, which is a
/// step behind. Were that no use to it the pool would grow with each step, for whoever has it next.
#[test]
fn a_loader_beside_a_training_does_not_make_the_pool_grow() {
    const STEPS: usize = 60;
    let sim = Simulator::builder().build().unwrap();
    let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
    let (training, loading) = (device.stream().unwrap(), device.stream().unwrap());
    let mut config = PoolConfig::default();
    config.moves_per_second = u32::MAX;
    config.patience = Duration::from_nanos(1);
    let pool = Pool::new(&device, &config).unwrap();
    let malloc =
        |mib: f64, stream: &Stream| pool.malloc((mib * 1048576.0) as usize, stream).unwrap();
    let size = |step: usize| [1.0, 0.55, 0.8, 0.35][step % 4];
    let mut ahead = malloc(90.0 * size(0), &loading);
    let mut behind: Option<SpinHandle> = None;
    let mut mapped = Vec::new();
    for step in 0..STEPS {
        let batch = std::mem::replace(&mut ahead, malloc(90.0 * size(step + 1), &loading));
        pool.record_stream(batch, &training).unwrap();
        let forward: Vec<DevicePtr> = (0..60)
            .map(|layer| malloc(size(step) * [61.0, 30.7, 61.0, 15.3][layer * 4 / 60], &training))
            .collect();
        let now = sim.spin(training.handle().raw()).unwrap();
        behind.replace(now).into_iter().for_each(SpinHandle::release);
        forward.into_iter().rev().for_each(|ptr| pool.free(ptr, &training).unwrap());
        pool.free(batch, &loading).unwrap();
        mapped.push(pool.stats().mapped_bytes >> 20);
    }
    let stats = pool.stats();
    assert!(mapped[STEPS - 1] * 100 <= mapped[3] * 104, "{mapped:?} {stats:?}");
    // Most steps look in vain; not all do, since some find a block to borrow.
    assert!(stats.host_waits < STEPS as u64 * 3 / 4, "{stats:?}");
    pool.free(ahead, &loading).unwrap();
    drop(behind);
    drop(pool);
    drop((training, loading));
    sim.assert_clean();
}

//! Every driver call fails in turn: the pool is as it was before the request (I5), nothing is
//! lost, and the same request succeeds when the driver does its part again.

use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::CUresult;
use vpmm::{Device, DevicePtr, Driver, Error, PagedConfig, PendingPolicy, Pool, Stats, Stream};

use crate::rig::{PAGE, config};
use crate::support::Rig;
use crate::support::faults::{self, Fault};

/// What must not change when a request fails. Idle and pending together, because time may pass.
fn held(stats: &Stats) -> (u64, u64, u64, u64, u64) {
    let live = (stats.live_bytes, stats.live_count);
    (live.0, live.1, stats.free_bytes(), stats.mapped_bytes, stats.small_live_bytes)
}

/// Two streams, memory that has to move, grow and be waited for; uses on a further stream, memory of a
/// stream that is followed, and a trim; small requests too.
struct Program<'a> {
    pool: &'a Pool,
    streams: [Stream; 2],
    held: Vec<Option<DevicePtr>>,
}

const STEPS: usize = 23;

/// The step that gives memory back: what is gone before it fails stays so.
const TRIM: usize = STEPS - 1;

impl<'a> Program<'a> {
    fn new(device: &Device, pool: &'a Pool) -> Self {
        let streams = [(); 2].map(|()| device.stream().unwrap());
        Self { pool, streams, held: Vec::new() }
    }

    /// One request; on failure the program is as before.
    fn step(&mut self, step: usize) -> Result<(), Error> {
        let page = PAGE as usize;
        match step {
            0..4 => self.malloc(2 * page, 0),
            4 => self.malloc(1000, 1),
            5 => self.free(0, 0),
            6 => self.free(2, 1),
            7 => self.malloc(3 * page, 1), // grows, or waits
            8 => self.free(4, 1),
            9 => self.malloc(4 * page, 0), // moves
            10 => self.free(1, 0),
            11 => self.malloc(2 * page, 1),
            12 => self.record(3, 1),
            13 => self.free(3, 0), // kept for the other stream
            14 => self.malloc(1000, 0),
            15 => self.record(8, 1),
            16 => self.free(8, 0), // the same
            17 => self.malloc(1000, 1),
            18 => self.free(5, 1),
            19 => self.pool.follows(&self.streams[0], &self.pool.mark(&self.streams[1])?),
            20 => self.malloc(5 * page, 0), // with what the other stream freed
            21 => self.streams[0].synchronize(),
            _ => self.pool.trim_to(0).map(drop),
        }
    }

    fn record(&mut self, index: usize, stream: usize) -> Result<(), Error> {
        self.pool.record_stream(self.held[index].expect("not freed"), &self.streams[stream])
    }

    fn malloc(&mut self, bytes: usize, stream: usize) -> Result<(), Error> {
        let ptr = self.pool.malloc(bytes, &self.streams[stream])?;
        self.held.push(Some(ptr));
        Ok(())
    }

    fn free(&mut self, index: usize, stream: usize) -> Result<(), Error> {
        let ptr = self.held[index].expect("not freed before");
        self.pool.free(ptr, &self.streams[stream])?;
        self.held[index] = None;
        Ok(())
    }
}

fn settings(policy: PendingPolicy) -> PagedConfig {
    let mut config = config(PAGE, 1);
    config.va_size_bytes = 12 * PAGE; // so that further reservations are part of the program
    config.limit_bytes = Some(13 * PAGE + 40 * (1 << 20));
    config.pending_policy = policy;
    config
}

/// Runs the program with one fault armed before one step. Returns whether the fault was met.
fn run(schedule: Schedule, policy: PendingPolicy, at: usize, fault: Fault) -> bool {
    let sim = Simulator::builder().schedule(schedule).seed(5).build().unwrap();
    let driver = Driver::new(sim.driver()).unwrap();
    let device = driver.device(0).unwrap();
    let mut met = false;
    {
        let pool = Pool::paged(&device, &settings(policy)).unwrap();
        let mut program = Program::new(&device, &pool);
        for step in 0..STEPS {
            if step == at {
                let before = held(&pool.stats());
                fault.arm(&sim);
                let result = program.step(step);
                sim.clear_faults();
                pool.validate().unwrap_or_else(|violation| panic!("step {step}: {violation}"));
                if result.is_ok() {
                    continue;
                }
                met = true;
                let after = held(&pool.stats());
                if step == TRIM {
                    assert_eq!((after.0, after.1, after.4), (before.0, before.1, before.4));
                } else {
                    assert_eq!(after, before, "step {step} failed and changed something");
                }
            }
            program.step(step).unwrap_or_else(|error| panic!("step {step} after a fault: {error}"));
            pool.validate().unwrap_or_else(|violation| panic!("step {step}: {violation}"));
        }
        drop(program);
        pool.destroy().unwrap();
    }
    drop(device);
    sim.assert_clean();
    let leaks = sim.leaks();
    assert!(leaks.is_empty(), "{leaks:?}");
    met
}

/// A fault at each call of each step: see [`faults::every_call_of_every_step`].
fn every_call_of_every_step(
    schedule: Schedule,
    policy: PendingPolicy,
    fault: impl Fn(u64) -> Fault,
) {
    let run = |step, fault| run(schedule, policy, step, fault);
    let failures = faults::every_call_of_every_step(STEPS, 3, fault, run);
    assert!(failures > 2 * STEPS, "only {failures} faults were met");
}

#[test]
fn one_call_fails() {
    for code in [CUresult::CUDA_ERROR_UNKNOWN, CUresult::CUDA_ERROR_OUT_OF_MEMORY] {
        every_call_of_every_step(Schedule::Eager, PendingPolicy::GrowFirst, |n| {
            Fault::Once(n, code)
        });
    }
}

#[test]
fn one_call_fails_while_nothing_finishes() {
    let schedule = Schedule::Manual;
    every_call_of_every_step(schedule, PendingPolicy::WaitFirst, |n| {
        Fault::Once(n, CUresult::CUDA_ERROR_UNKNOWN)
    });
}

#[test]
fn all_calls_fail_from_one_on() {
    for policy in [PendingPolicy::GrowFirst, PendingPolicy::WaitFirst] {
        let code = CUresult::CUDA_ERROR_UNKNOWN;
        every_call_of_every_step(Schedule::Eager, policy, |n| Fault::FromThen(n, code));
    }
}

#[test]
fn a_pool_that_cannot_be_made_leaves_nothing_behind() {
    let open = |device: &Device| Pool::paged(device, &settings(PendingPolicy::GrowFirst));
    assert!(faults::every_call_of_making(open) > 5);
}

#[test]
fn a_stream_whose_last_event_cannot_be_recorded_is_waited_for_with_the_device() {
    for bytes in [1000, PAGE] {
        let rig = Rig::simulated(Schedule::Late { patience: 2 });
        let sim = rig.sim.clone().expect("a simulated rig");
        let watched = rig.small_pool(0);
        let (own, side) = (rig.stream(), rig.stream());
        let held = watched.malloc(bytes, &own);
        rig.order(&own, &side);
        held.check(&rig, &side);
        watched.pool.record_stream(held.ptr, &side).unwrap();
        sim.fail_nth("cuEventRecord", 1, CUresult::CUDA_ERROR_UNKNOWN);
        drop(side);
        watched.validate();
        watched.free(held, &own);
        own.synchronize().unwrap();
        let other = watched.malloc(bytes, &own);
        assert_ne!(other.address(), held.address(), "nobody knows when that work is over");
        rig.device.synchronize().unwrap();
        let again = [(); 3].map(|()| watched.malloc(bytes, &own));
        assert!(again.iter().any(|again| again.address() == held.address()));
        again.into_iter().chain([other]).for_each(|held| watched.free(held, &own));
        watched.assert_intact();
    }
}

#[test]
fn a_zombie_that_cannot_be_unmapped_stays_one_and_is_tried_again() {
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let driver = Driver::new(sim.driver()).unwrap();
    let device = driver.device(0).unwrap();
    let pool = Pool::paged(&device, &config(PAGE, 0)).unwrap();
    let stream = device.stream().unwrap();
    let held = [(); 4].map(|()| pool.malloc(PAGE as usize, &stream).unwrap());
    pool.free(held[0], &stream).unwrap();
    pool.free(held[2], &stream).unwrap();
    pool.malloc(2 * PAGE as usize, &stream).unwrap();
    // Something to be placed in afterwards, so that nothing but phase 0 unmaps.
    pool.free(held[1], &stream).unwrap();
    pool.free(held[3], &stream).unwrap();
    stream.synchronize().unwrap();
    sim.fail_nth("cuMemUnmap", 1, CUresult::CUDA_ERROR_UNKNOWN);
    pool.malloc(PAGE as usize, &stream).unwrap();
    assert_eq!(
        (pool.stats().failed_unmaps, pool.stats().zombie_count),
        (1, 2),
        "{}",
        pool.layout()
    );
    pool.validate().unwrap();
    pool.malloc(PAGE as usize, &stream).unwrap();
    assert_eq!(pool.stats().zombie_count, 0, "{}", pool.layout());
    sim.assert_clean();
}

/// A wait that the driver refuses is no reason not to wait for what other streams freed.
#[test]
fn a_wait_for_one_stream_that_fails_leaves_what_others_freed() {
    let sim = Simulator::builder().build().unwrap();
    let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
    let mut config = config(PAGE, 0);
    config.limit_bytes = Some(6 * PAGE);
    (config.reuse.opportunistic, config.reuse.internal_dependencies) = (false, false);
    let pool = Pool::paged(&device, &config).unwrap();
    let streams = [(); 4].map(|()| device.stream().unwrap());
    let malloc = |at: usize| pool.malloc(2 * PAGE as usize, &streams[at]);
    for refused in 1..=3 {
        let held = [0, 1, 2].map(|at| malloc(at).unwrap());
        held.iter().zip(&streams).for_each(|(ptr, stream)| pool.free(*ptr, stream).unwrap());
        sim.fail_nth("cuEventSynchronize", refused, CUresult::CUDA_ERROR_UNKNOWN);
        let waits = pool.stats().host_waits;
        let taken = [(); 2].map(|()| malloc(3).unwrap());
        assert_eq!(pool.stats().host_waits, waits + 2);
        let last = malloc(3).unwrap();
        assert_eq!(pool.stats().host_waits, waits + 3);
        for ptr in taken.into_iter().chain([last]) {
            pool.free(ptr, &streams[3]).unwrap();
        }
        device.synchronize().unwrap();
        pool.validate().unwrap();
    }
    // Where nothing else was waited for it is told.
    let held = malloc(0).unwrap();
    let rest = pool.malloc(4 * PAGE as usize, &streams[1]).unwrap();
    pool.free(held, &streams[0]).unwrap();
    sim.fail_nth("cuEventSynchronize", 1, CUresult::CUDA_ERROR_UNKNOWN);
    let refused = malloc(3);
    assert!(matches!(refused, Err(Error::Driver { .. })), "{refused:?}");
    pool.free(rest, &streams[1]).unwrap();
    pool.validate().unwrap();
    sim.assert_clean();
}

/// A request that fails half way and cannot be undone leaves a zombie, too, and is counted as one.
#[test]
fn a_mapping_that_cannot_be_undone_is_counted() {
    let sim = Simulator::builder().build().unwrap();
    let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
    let pool = Pool::paged(&device, &config(PAGE, 0)).unwrap();
    let stream = device.stream().unwrap();
    for call in ["cuMemSetAccess", "cuMemUnmap"] {
        sim.fail_nth(call, 1, CUresult::CUDA_ERROR_UNKNOWN);
    }
    pool.malloc(2 * PAGE as usize, &stream).unwrap_err();
    let stats = pool.stats();
    assert_eq!((stats.failed_unmaps, stats.zombie_bytes), (1, 2 * PAGE), "{}", pool.layout());
    pool.malloc(2 * PAGE as usize, &stream).unwrap();
    assert_eq!((pool.stats().failed_unmaps, pool.stats().zombie_count), (1, 0));
    pool.validate().unwrap();
    sim.assert_clean();
}

/// A pool that ends gives its memory back though the driver refuses one of the calls that it waits by.
#[test]
fn an_end_in_which_a_wait_fails_gives_everything_back() {
    for call in 1..8 {
        let sim = Simulator::builder().schedule(Schedule::Late { patience: 8 }).build().unwrap();
        let rig = Rig::on(sim.clone());
        let before = sim.leaks();
        let pool = Pool::paged(&rig.device, &config(PAGE, 0)).unwrap();
        let stream = rig.stream();
        let ptr = pool.malloc(PAGE as usize, &stream).unwrap();
        rig.fill(ptr.address(), PAGE, 1, stream.handle());
        pool.free(ptr, &stream).unwrap();
        sim.fail_nth("cuEventSynchronize", call, CUresult::CUDA_ERROR_UNKNOWN);
        drop(pool);
        sim.clear_faults();
        drop(stream);
        assert_eq!(sim.leaks(), before, "at call {call}");
        rig.assert_clean();
    }
}

/// The pool holds nothing any more but that: a trim offers it again all the same.
#[test]
fn a_page_that_the_driver_keeps_is_offered_again_where_the_pool_holds_nothing_else() {
    let sim = Simulator::builder().build().unwrap();
    let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
    let pool = Pool::paged(&device, &config(PAGE, 1)).unwrap();
    sim.fail_nth("cuMemRelease", 1, CUresult::CUDA_ERROR_UNKNOWN);
    assert!(pool.trim_to(0).is_err());
    assert_eq!((pool.stats().mapped_bytes, sim.memory_used(0)), (0, PAGE));
    assert_eq!((pool.trim_to(0).unwrap(), sim.memory_used(0)), (PAGE, 0));
    pool.validate().unwrap();
    drop((pool, device));
    sim.assert_clean();
}

/// Four streams, of which each of three has freed two pages of six; the work has finished.
fn with_the_frees_of_three(
    set: impl Fn(&mut vpmm::PagedConfig),
    work: impl Fn(&Simulator, &Pool, &Stream),
) {
    let sim = Simulator::builder().build().unwrap();
    let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
    let mut config = config(PAGE, 0);
    config.reuse.internal_dependencies = false;
    set(&mut config);
    let pool = Pool::paged(&device, &config).unwrap();
    let streams = [(); 4].map(|()| device.stream().unwrap());
    let malloc = |at: usize| pool.malloc(2 * PAGE as usize, &streams[at]).unwrap();
    let held = [0, 1, 2].map(malloc);
    held.iter().zip(&streams).for_each(|(ptr, stream)| pool.free(*ptr, stream).unwrap());
    work(&sim, &pool, &streams[3]);
    sim.clear_faults();
    pool.validate().unwrap();
    drop((pool, streams, device));
    sim.assert_clean();
}

/// A question that the driver refuses about one stream does not hide what others freed.
#[test]
fn a_question_that_fails_leaves_what_other_streams_freed() {
    let code = CUresult::CUDA_ERROR_UNKNOWN;
    for n in 1..=3 {
        // Served by what the others freed: no error, and nothing grows.
        with_the_frees_of_three(
            |_| {},
            |sim, pool, stream| {
                sim.fail_nth("cuEventQuery", n, code);
                let ptr = pool.malloc(2 * PAGE as usize, stream).unwrap();
                assert_eq!(pool.stats().mapped_bytes, 6 * PAGE);
                assert_eq!(pool.stats().pending_bytes, 2 * PAGE, "of the stream not asked about");
                pool.free(ptr, stream).unwrap();
            },
        );
        // They are not enough: the failure is told, and what they freed is everybody's all the same.
        with_the_frees_of_three(
            |_| {},
            |sim, pool, stream| {
                sim.fail_nth("cuEventQuery", n, code);
                let error = pool.malloc(7 * PAGE as usize, stream).unwrap_err();
                assert!(matches!(error, Error::Driver { call: "cuEventQuery", .. }), "{error}");
                assert_eq!(pool.stats().pending_bytes, 2 * PAGE);
            },
        );
        // A trim gives back what it may, and says that it could not ask about the rest.
        with_the_frees_of_three(
            |_| {},
            |sim, pool, _| {
                sim.fail_nth("cuEventQuery", n, code);
                let error = pool.trim_to(0).unwrap_err();
                assert!(matches!(error, Error::Driver { call: "cuEventQuery", .. }), "{error}");
                assert_eq!(pool.stats().mapped_bytes, 2 * PAGE);
            },
        );
        // Pages are given back for a small request.
        with_the_frees_of_three(
            |config| config.limit_bytes = Some(6 * PAGE),
            |sim, pool, stream| {
                sim.fail_nth("cuEventQuery", n, code);
                let ptr = pool.malloc(1000, stream).unwrap();
                pool.free(ptr, stream).unwrap();
            },
        );
    }
}

/// The same of what frees wait for that further streams use: of pages, and of small allocations.
#[test]
fn a_question_that_fails_leaves_what_waits_for_other_streams() {
    for (bytes, opportunistic) in [(2 * PAGE, true), (2 * PAGE, false), (1000, false)] {
        for n in 1..=3 {
            let sim = Simulator::builder().build().unwrap();
            let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
            let mut config = config(PAGE, 0);
            (config.reuse.opportunistic, config.reuse.internal_dependencies) =
                (opportunistic, false);
            config.limit_bytes = Some(6 * PAGE);
            let pool = Pool::paged(&device, &config).unwrap();
            let [own, sides @ ..] = [(); 4].map(|()| device.stream().unwrap());
            let malloc = |bytes: u64| pool.malloc(bytes as usize, &own);
            let held = sides.each_ref().map(|side| {
                let ptr = malloc(bytes).unwrap();
                pool.record_stream(ptr, side).unwrap();
                ptr
            });
            held.into_iter().for_each(|ptr| pool.free(ptr, &own).unwrap());
            sim.fail_nth("cuEventQuery", n, CUresult::CUDA_ERROR_UNKNOWN);
            let ptr = malloc(bytes).unwrap();
            let stats = pool.stats();
            let kept =
                if bytes < PAGE { stats.small_live_bytes - bytes } else { stats.pending_bytes };
            assert!(kept <= 2 * bytes, "at {n}: {kept} of {bytes}");
            pool.free(ptr, &own).unwrap();
            sim.clear_faults();
            pool.validate().unwrap();
            drop((pool, own, sides, device));
            sim.assert_clean();
        }
    }
}

/// Zombies of one stream that cannot be asked about are no reason to refuse a request of another.
#[test]
fn a_question_about_zombies_that_fails_leaves_requests_that_need_none() {
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
    let pool = Pool::paged(&device, &config(PAGE, 0)).unwrap();
    let stream = device.stream().unwrap();
    let held = [(); 4].map(|()| pool.malloc(PAGE as usize, &stream).unwrap());
    pool.free(held[0], &stream).unwrap();
    pool.free(held[2], &stream).unwrap();
    let moved = pool.malloc(2 * PAGE as usize, &stream).unwrap();
    pool.free(held[1], &stream).unwrap();
    assert_eq!(pool.stats().zombie_count, 2, "{}", pool.layout());
    sim.fail_nth("cuEventQuery", 1, CUresult::CUDA_ERROR_UNKNOWN);
    let ptr = pool.malloc(PAGE as usize, &stream).unwrap();
    assert_eq!(ptr.address(), held[1].address());
    pool.validate().unwrap();
    for ptr in [ptr, moved, held[3]] {
        pool.free(ptr, &stream).unwrap();
    }
    drop((pool, stream, device));
    sim.assert_clean();
}

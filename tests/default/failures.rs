//! Every driver call fails in turn: the pool is as it was before the request (I5), nothing is
//! lost, and the same request succeeds when the driver does its part again.

use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::*;
use vpmm::{
    Device, DevicePtr, Driver, Error, PendingPolicy, Pool, PoolConfig, Stream, StreamHandle,
    WaitPolicy,
};

use crate::rig::{GRANULE, bare, config, held};
use crate::support::call;
use crate::support::faults::{self, Fault};

/// The library's stream and a foreign one, memory that has to move, grow and be waited for.
struct Program<'a> {
    pool: &'a Pool,
    owned: [Stream; 2],
    raw: CUstream,
    held: Vec<Option<DevicePtr>>,
}

const STEPS: usize = 20;
const LIMIT: u64 = 12;

impl<'a> Program<'a> {
    fn new(device: &Device, pool: &'a Pool) -> Self {
        let owned = [(); 2].map(|()| device.stream().unwrap());
        call!(device.driver(), cuCtxSetCurrent(device.context()));
        let mut raw = std::ptr::null_mut();
        call!(device.driver(), cuStreamCreate(&mut raw, 0));
        Self { pool, owned, raw, held: Vec::new() }
    }

    fn stream(&self, number: usize) -> StreamHandle {
        match self.owned.get(number) {
            Some(stream) => stream.handle(),
            // SAFETY: the stream is destroyed after the program.
            None => unsafe { StreamHandle::from_raw(self.raw) },
        }
    }

    /// One request; on failure the program is as before.
    fn step(&mut self, step: usize) -> Result<(), Error> {
        let granule = GRANULE as usize;
        match step {
            0..4 => self.malloc(2 * granule, 0),
            4 => self.malloc(1000, 1),
            5 => self.malloc(granule / 2, 2),
            6 => self.free(0, 0),
            7 => self.free(2, 1),
            8 => self.free(5, 2),
            // Moves what stream 0 freed, or waits for it, or grows.
            9 => self.malloc(4 * granule, 0),
            10 => self.malloc(granule, 2),
            11 => self.free(1, 2),
            12 => self.malloc(3 * granule / 2, 1),
            13 => self.free(6, 0),
            14 => self.free(4, 1),
            // Everything that is free, from whichever stream.
            15 => self.malloc(5 * granule, 2),
            16 => self.free(9, 2),
            17 => self.free(3, 0),
            18 => self.malloc(6 * granule, 1),
            _ => self.free(8, 1),
        }
    }

    fn malloc(&mut self, bytes: usize, stream: usize) -> Result<(), Error> {
        let ptr = self.pool.malloc(bytes, self.stream(stream))?;
        self.held.push(Some(ptr));
        Ok(())
    }

    fn free(&mut self, index: usize, stream: usize) -> Result<(), Error> {
        let ptr = self.held[index].expect("not freed before");
        self.pool.free(ptr, self.stream(stream))?;
        self.held[index] = None;
        Ok(())
    }
}

fn settings(policy: PendingPolicy) -> PoolConfig {
    let mut config = config(LIMIT, 96);
    config.pending_policy = policy;
    config
}

/// Runs the program and does something just before one step and just after it (`ends_fail`: something that may come to
/// the end of an event). Answers how that step failed, if it did: it is then repeated.
fn run(
    schedule: Schedule,
    policy: PendingPolicy,
    at: usize,
    ends_fail: bool,
    before_step: impl Fn(&Simulator),
    after_step: impl Fn(&Simulator),
) -> Option<Error> {
    let sim = Simulator::builder().schedule(schedule).seed(5).build().unwrap();
    let driver = Driver::new(sim.driver()).unwrap();
    let device = driver.device(0).unwrap();
    let mut error = None;
    {
        let pool = Pool::new(&device, &settings(policy)).unwrap();
        let mut program = Program::new(&device, &pool);
        let raw = program.raw;
        for step in 0..STEPS {
            if step == at {
                let before = held(&pool.stats());
                before_step(&sim);
                let result = program.step(step);
                after_step(&sim);
                pool.validate().unwrap_or_else(|violation| panic!("step {step}: {violation}"));
                let Err(failure) = result else { continue };
                let now = held(&pool.stats());
                assert_eq!(now, before, "step {step} failed ({failure}) and changed something");
                error = Some(failure);
            }
            program.step(step).unwrap_or_else(|error| {
                panic!("step {step} after a fault at {at}: {error}\n{pool:?}")
            });
            pool.validate().unwrap_or_else(|violation| panic!("step {step}: {violation}"));
        }
        drop(program);
        pool.destroy().unwrap();
        call!(driver, cuStreamDestroy_v2(raw));
    }
    // Those that are left go with the context. Where all calls fail an event may stay that no longer has a use.
    assert!(ends_fail || sim.leaks().events == 0, "a fault at step {at}: {:?}", sim.leaks());
    drop(device);
    sim.assert_clean();
    let leaks = sim.leaks();
    assert!(leaks.is_empty(), "a fault at step {at}: {leaks:?}");
    error
}

/// A fault at each call of each step: see [`faults::every_call_of_every_step`].
fn every_call_of_every_step(
    schedule: Schedule,
    policy: PendingPolicy,
    fault: impl Fn(u64) -> Fault,
) {
    let failures = faults::every_call_of_every_step(STEPS, 6, fault, |step, fault| {
        let arm = |sim: &Simulator| fault.arm(sim);
        let ends_fail = matches!(fault, Fault::FromThen(..));
        run(schedule, policy, step, ends_fail, arm, Simulator::clear_faults).is_some()
    });
    assert!(failures > 3 * STEPS, "only {failures} faults were met");
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
fn one_call_fails_while_nothing_finishes_unasked() {
    for policy in [PendingPolicy::GrowFirst, PendingPolicy::WaitFirst] {
        every_call_of_every_step(Schedule::Manual, policy, |n| {
            Fault::Once(n, CUresult::CUDA_ERROR_UNKNOWN)
        });
    }
}

#[test]
fn all_calls_fail_from_one_on() {
    for schedule in [Schedule::Eager, Schedule::Manual] {
        let code = CUresult::CUDA_ERROR_UNKNOWN;
        every_call_of_every_step(schedule, PendingPolicy::GrowFirst, |n| Fault::FromThen(n, code));
    }
}

#[test]
fn the_device_is_out_of_memory() {
    let mut refused = 0;
    for schedule in [Schedule::Eager, Schedule::Manual] {
        for policy in [PendingPolicy::GrowFirst, PendingPolicy::WaitFirst] {
            for step in 0..STEPS {
                let none_left = |sim: &Simulator| sim.set_memory_limit(0, sim.memory_used(0));
                let enough = |sim: &Simulator| sim.set_memory_limit(0, 141 << 30);
                match run(schedule, policy, step, false, none_left, enough) {
                    None => (),
                    Some(Error::OutOfMemory { .. }) => refused += 1,
                    Some(other) => panic!("step {step}: {other}"),
                }
            }
        }
    }
    assert!(refused > 8, "only {refused} requests were refused");
}

/// What the driver does not take back is counted as kept, and offered again: at the next trim, and at the end.
#[test]
fn a_handle_that_the_driver_keeps_is_offered_again() {
    let sim = Simulator::builder().build().unwrap();
    let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
    let pool = Pool::new(&device, &config(16, 96)).unwrap();
    let stream = device.stream().unwrap();
    let used = sim.memory_used(0);
    let two = || {
        let ptr = pool.malloc(2 * GRANULE as usize, &stream).unwrap();
        pool.free(ptr, &stream).unwrap();
    };
    let refused = || {
        two();
        assert_eq!(pool.stats().extent_count, 2);
        // Both attempts at the first of two handles, and the one behind the second.
        let calls = [1, 2, 4];
        calls
            .into_iter()
            .for_each(|n| sim.fail_nth("cuMemRelease", n, CUresult::CUDA_ERROR_UNKNOWN));
        assert_eq!(pool.trim_to(0).unwrap(), GRANULE);
        pool.validate().unwrap();
        let stats = pool.stats();
        assert_eq!((stats.mapped_bytes, sim.memory_used(0) - used), (0, GRANULE));
    };
    refused();
    two();
    assert_eq!(pool.trim_to(0).unwrap(), 3 * GRANULE);
    assert_eq!(sim.memory_used(0), used);
    refused();
    drop(pool);
    assert_eq!(sim.memory_used(0), used);
    sim.assert_clean();
}

/// The pool holds nothing any more but that: a trim offers it again all the same, and so does a request that the
/// device lacks it for.
#[test]
fn a_handle_that_the_driver_keeps_is_offered_again_where_the_pool_holds_nothing_else() {
    let sim = Simulator::builder().build().unwrap();
    let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
    let pool = Pool::new(&device, &config(16, 96)).unwrap();
    let stream = device.stream().unwrap();
    let used = sim.memory_used(0);
    let refused = || {
        pool.free(pool.malloc(GRANULE as usize, &stream).unwrap(), &stream).unwrap();
        // Two attempts, and a third behind all others.
        for n in 1..=3 {
            sim.fail_nth("cuMemRelease", n, CUresult::CUDA_ERROR_UNKNOWN);
        }
        assert_eq!(pool.trim_to(0).unwrap(), 0);
        assert_eq!((pool.stats().mapped_bytes, sim.memory_used(0) - used), (0, GRANULE));
    };
    refused();
    assert_eq!(pool.trim_to(0).unwrap(), GRANULE);
    assert_eq!(sim.memory_used(0), used);
    refused();
    sim.set_memory_limit(0, used + 4 * GRANULE);
    let all = pool.malloc(4 * GRANULE as usize, &stream).unwrap();
    pool.validate().unwrap();
    pool.free(all, &stream).unwrap();
    drop(pool);
    assert_eq!(sim.memory_used(0), used);
    sim.assert_clean();
}

/// An error says which call failed, how, and how many bytes that was about.
#[test]
fn a_failure_says_which_call_which_answer_and_how_many_bytes() {
    let code = CUresult::CUDA_ERROR_NOT_PERMITTED;
    let sim = Simulator::builder().build().unwrap();
    let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
    let pool = Pool::new(&device, &config(16, 96)).unwrap();
    let stream = device.stream().unwrap();
    let fails = |call: &'static str, work: &dyn Fn() -> Result<(), Error>| {
        sim.fail_nth(call, 1, code);
        let error = work().unwrap_err();
        sim.clear_faults();
        let Error::Driver { call: named, code: told, bytes } = error else { panic!("{error}") };
        assert_eq!((named, told), (call, code));
        let text = error.to_string();
        assert!(text.contains(call) && text.contains(&told.to_string()), "{text}");
        assert_eq!(text.contains("MiB"), bytes > 0, "{text}");
        bytes
    };
    let malloc = |granules: u64| pool.malloc((granules * GRANULE) as usize, &stream);
    // A handle of several, all of what is opened at once, and what goes back.
    let part = |call| fails(call, &|| malloc(4).map(drop));
    for bytes in ["cuMemCreate", "cuMemMap"].map(part) {
        assert!((1..=4).any(|granules| bytes == granules * GRANULE), "{bytes}");
    }
    assert_eq!(part("cuMemSetAccess"), 4 * GRANULE);
    pool.free(malloc(4).unwrap(), &stream).unwrap();
    assert_eq!(fails("cuMemUnmap", &|| pool.trim_to(0).map(drop)), 4 * GRANULE);
    // No memory of its own.
    let held = malloc(1).unwrap();
    let free = || pool.free(held, StreamHandle::PER_THREAD);
    assert_eq!(fails("cuEventRecord", &free), 0);
    free().unwrap();
    drop(pool);
    sim.assert_clean();
}

#[test]
fn a_pool_that_cannot_be_made_leaves_nothing_behind() {
    let open = |device: &Device| Pool::new(device, &settings(PendingPolicy::GrowFirst));
    assert!(faults::every_call_of_making(open) > 3);
}

#[test]
fn a_zombie_that_cannot_be_unmapped_stays_one_and_is_tried_again() {
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let driver = Driver::new(sim.driver()).unwrap();
    let device = driver.device(0).unwrap();
    let pool = Pool::new(&device, &config(4, 96)).unwrap();
    let (stream, other) = (device.stream().unwrap(), device.stream().unwrap());
    let malloc = |granules: u64, stream: &Stream| {
        pool.malloc((granules * GRANULE) as usize, stream).unwrap()
    };
    let held = [(); 4].map(|()| malloc(1, &stream));
    pool.free(held[0], &stream).unwrap();
    pool.free(held[2], &stream).unwrap();
    let two = malloc(2, &stream);
    let zombies = pool.stats().zombie_count;
    assert!(zombies > 0, "{}", pool.layout());
    pool.free(held[1], &stream).unwrap();
    device.synchronize().unwrap();
    // Behind the front, and beyond what is free: zombies are looked at, although in vain.
    let refuse = || pool.malloc(3 * GRANULE as usize, &other).unwrap_err();
    // Before the pool would grow, and as the last step.
    for n in [1, 2] {
        sim.fail_nth("cuMemUnmap", n, CUresult::CUDA_ERROR_UNKNOWN);
    }
    // The first may only find out that the work has finished.
    let tried = (0..3).any(|_| refuse().is_out_of_memory() && pool.stats().failed_unmaps == 2);
    assert!(tried && pool.stats().zombie_count == zombies, "{}", pool.layout());
    pool.validate().unwrap();
    assert!(refuse().is_out_of_memory());
    assert_eq!((pool.stats().failed_unmaps, pool.stats().zombie_count), (2, 0));
    pool.validate().unwrap();
    pool.free(two, &stream).unwrap();
    pool.free(held[3], &stream).unwrap();
    drop(pool);
    sim.assert_clean();
}

/// Memory was mapped elsewhere for a request that failed, and the driver would not undo that: as long as it is mapped
/// there the device would have none of it back.
#[test]
fn what_is_mapped_elsewhere_by_a_failed_request_does_not_pass_for_given_back() {
    let sim = Simulator::builder().build().unwrap();
    let driver = Driver::new(sim.driver()).unwrap();
    let device = driver.device(0).unwrap();
    let pool = Pool::new(&device, &config(4, 96)).unwrap();
    let stream = device.stream().unwrap();
    let held = [(); 4].map(|()| pool.malloc(GRANULE as usize, &stream).unwrap());
    for ptr in [held[0], held[2]] {
        pool.free(ptr, bare(&stream)).unwrap();
    }
    let fault = CUresult::CUDA_ERROR_UNKNOWN;
    sim.fail_nth("cuMemSetAccess", 1, fault);
    sim.fail_nth("cuMemUnmap", 1, fault);
    let refused = pool.malloc(2 * GRANULE as usize, &stream);
    assert!(matches!(refused, Err(Error::Driver { call: "cuMemSetAccess", .. })), "{refused:?}");
    let stats = pool.stats();
    assert_eq!((stats.failed_unmaps, stats.zombie_bytes), (1, 2 * GRANULE), "{}", pool.layout());
    pool.validate().unwrap();
    let mut all = 0;
    for fails in [true, false] {
        if fails {
            sim.fail_nth("cuMemUnmap", 1, fault);
        }
        let free = device.free_memory().unwrap();
        let given = pool.trim_to(0).unwrap();
        assert_eq!(device.free_memory().unwrap() - free, given, "it fails: {fails}");
        all += given;
        pool.validate().unwrap();
    }
    assert_eq!((all, pool.stats().zombie_bytes), (2 * GRANULE, 0));
    for ptr in [held[1], held[3]] {
        pool.free(ptr, &stream).unwrap();
    }
    drop(pool);
    sim.assert_clean();
}

#[test]
fn a_lost_device_is_an_error_and_no_crash() {
    for code in [
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
        CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED,
        CUresult::CUDA_ERROR_DEINITIALIZED,
    ] {
        let sim = Simulator::builder().build().unwrap();
        let driver = Driver::new(sim.driver()).unwrap();
        let device = driver.device(0).unwrap();
        let pool = Pool::new(&device, &config(16, 96)).unwrap();
        let stream = device.stream().unwrap();
        let held = [(); 3].map(|()| pool.malloc(GRANULE as usize, &stream).unwrap());
        pool.free(held[0], &stream).unwrap();
        sim.lose_device(0, code);
        let error = pool.malloc(4 * GRANULE as usize, &stream).unwrap_err();
        assert!(error.is_context_lost(), "{error}");
        let error = pool.free(held[1], StreamHandle::PER_THREAD).unwrap_err();
        assert!(error.is_context_lost(), "{error}");
        pool.validate().unwrap();
        drop(stream);
        pool.validate().unwrap();
        pool.destroy().unwrap(); // and no panic here
        // Memory is no context's; of a driver that was shut down nothing more is asked.
        let is_left = code == CUresult::CUDA_ERROR_DEINITIALIZED;
        assert_eq!(sim.memory_used(0) > 0, is_left, "{code}");
    }
}

/// Three streams have freed two granules each of six, and a fourth asks.
fn with_the_frees_of_three(
    schedule: Schedule,
    set: impl Fn(&mut PoolConfig),
    work: impl Fn(&Simulator, &Pool, &Stream),
) {
    let sim = Simulator::builder().schedule(schedule).build().unwrap();
    let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
    let mut config = config(6, 96);
    config.reuse.internal_dependencies = false;
    set(&mut config);
    let pool = Pool::new(&device, &config).unwrap();
    let streams = [(); 4].map(|()| device.stream().unwrap());
    let malloc = |at: usize| pool.malloc(2 * GRANULE as usize, &streams[at]).unwrap();
    let held = [0, 1, 2].map(malloc);
    held.iter().zip(&streams).for_each(|(ptr, stream)| {
        pool.free(*ptr, StreamHandle::from(stream)).unwrap();
    });
    work(&sim, &pool, &streams[3]);
    sim.clear_faults();
    pool.validate().unwrap();
    drop((pool, streams, device));
    sim.assert_clean();
}

/// A question or a wait that the driver refuses for one stream does not hide what others freed: not where a request is
/// served by that, and not where memory is given back.
#[test]
fn a_call_that_fails_for_one_stream_leaves_what_others_freed() {
    let code = CUresult::CUDA_ERROR_UNKNOWN;
    for call in ["cuEventRecord", "cuEventQuery", "cuEventSynchronize"] {
        for n in 1..=3 {
            for opportunistic in [true, false] {
                let set = |config: &mut PoolConfig| config.reuse.opportunistic = opportunistic;
                // Nothing has finished but by a wait.
                with_the_frees_of_three(Schedule::Manual, set, |sim, pool, stream| {
                    sim.fail_nth(call, n, code);
                    let ptr = pool.malloc(2 * GRANULE as usize, stream);
                    let ptr = ptr.unwrap_or_else(|error| {
                        panic!("{call} {n}, opportunistic {opportunistic}: {error}")
                    });
                    pool.free(ptr, stream).unwrap();
                });
            }
            // Everything is found finished, by the last questions before the limit.
            let set = |config: &mut PoolConfig| config.out_of_memory = WaitPolicy::FailAtOnce;
            with_the_frees_of_three(Schedule::Eager, set, |sim, pool, stream| {
                sim.fail_nth(call, n, code);
                let ptr = pool.malloc(2 * GRANULE as usize, stream);
                let ptr = ptr.unwrap_or_else(|error| panic!("{call} {n}, at once: {error}"));
                pool.free(ptr, stream).unwrap();
            });
            if call == "cuEventSynchronize" {
                continue;
            }
            with_the_frees_of_three(
                Schedule::Eager,
                |_| {},
                |sim, pool, _| {
                    sim.fail_nth(call, n, code);
                    let trimmed = pool.trim_to(0);
                    assert!(
                        matches!(trimmed, Err(Error::Driver { .. })),
                        "{call} {n}: {trimmed:?}"
                    );
                    assert_eq!(pool.stats().mapped_bytes, 2 * GRANULE, "{call} {n}");
                },
            );
        }
    }
}

/// What one wait for all streams fails at is told where it was not enough without that stream.
#[test]
fn a_wait_that_fails_is_told_where_the_others_do_not_serve_the_request() {
    for n in 1..=3 {
        with_the_frees_of_three(
            Schedule::Manual,
            |_| {},
            |sim, pool, stream| {
                sim.fail_nth("cuEventSynchronize", n, CUresult::CUDA_ERROR_UNKNOWN);
                let waits = pool.stats().host_waits;
                let refused = pool.malloc(6 * GRANULE as usize, stream).unwrap_err();
                assert!(
                    matches!(refused, Error::Driver { call: "cuEventSynchronize", .. }),
                    "{refused}"
                );
                assert_eq!(pool.stats().host_waits, waits + 2);
                let ptr = pool.malloc(6 * GRANULE as usize, stream).unwrap();
                pool.free(ptr, stream).unwrap();
            },
        );
    }
}

/// An event that came into a graph is no error where it is waited for: another is recorded.
#[test]
fn an_event_that_a_capture_has_is_recorded_anew_where_it_is_waited_for() {
    for n in 1..=3 {
        with_the_frees_of_three(
            Schedule::Manual,
            |_| {},
            |sim, pool, stream| {
                sim.fail_nth("cuEventSynchronize", n, CUresult::CUDA_ERROR_CAPTURED_EVENT);
                let ptr = pool.malloc(6 * GRANULE as usize, stream).unwrap();
                pool.free(ptr, stream).unwrap();
            },
        );
    }
}

/// The same of what frees wait for that further streams use.
#[test]
fn a_question_that_fails_leaves_what_waits_for_other_streams() {
    for call in ["cuEventQuery", "cuEventRecord"] {
        for n in 1..=3 {
            let sim = Simulator::builder().build().unwrap();
            let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
            let mut config = config(6, 96);
            config.out_of_memory = WaitPolicy::FailAtOnce;
            let pool = Pool::new(&device, &config).unwrap();
            let [own, sides @ ..] = [(); 4].map(|()| device.stream().unwrap());
            let malloc = |bytes: u64| pool.malloc(bytes as usize, &own);
            let held = sides.each_ref().map(|side| {
                let ptr = malloc(2 * GRANULE).unwrap();
                pool.record_stream(ptr, side).unwrap();
                ptr
            });
            held.into_iter().for_each(|ptr| pool.free(ptr, &own).unwrap());
            sim.fail_nth(call, n, CUresult::CUDA_ERROR_UNKNOWN);
            let ptr = malloc(2 * GRANULE).unwrap_or_else(|error| panic!("{call} {n}: {error}"));
            pool.free(ptr, &own).unwrap();
            sim.clear_faults();
            pool.validate().unwrap();
            drop((pool, own, sides, device));
            sim.assert_clean();
        }
    }
}

/// It keeps a request neither from more memory nor from a wait on the GPU for another stream.
#[test]
fn a_call_that_fails_for_one_stream_leaves_a_request_what_serves_it_without() {
    let code = CUresult::CUDA_ERROR_UNKNOWN;
    for call in ["cuEventRecord", "cuEventQuery"] {
        let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
        let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
        let pool = Pool::new(&device, &config(60, 96)).unwrap();
        let streams = [(); 2].map(|()| device.stream().unwrap());
        let freed = pool.malloc(20 * GRANULE as usize, &streams[0]).unwrap();
        pool.free(freed, bare(&streams[0])).unwrap();
        let failed = || {
            let before = device.driver().calls();
            sim.fail_nth(call, 1, code);
            let ptr = pool.malloc(10 * GRANULE as usize, &streams[1]);
            let ptr = ptr.unwrap_or_else(|error| panic!("{call}: {error}"));
            assert!(device.driver().calls().since(&before).count(call) > 0);
            pool.free(ptr, &streams[1]).unwrap();
        };
        failed();
        pool.validate().unwrap();
        drop((pool, streams, device));
        sim.assert_clean();
    }
    for n in 1..=3 {
        let set = |config: &mut PoolConfig| {
            config.reuse.internal_dependencies = true;
            config.out_of_memory = WaitPolicy::FailAtOnce;
        };
        with_the_frees_of_three(Schedule::Manual, set, |sim, pool, stream| {
            sim.fail_nth("cuStreamWaitEvent", n, code);
            let ptr = pool.malloc(2 * GRANULE as usize, stream);
            let ptr = ptr.unwrap_or_else(|error| panic!("cuStreamWaitEvent {n}: {error}"));
            pool.free(ptr, stream).unwrap();
        });
    }
}

/// Nothing of a stream is handed over, nor closed anew, where the driver would not have another wait for it: its work
/// may still be using that.
#[test]
fn what_cannot_be_waited_for_is_not_handed_over() {
    let code = CUresult::CUDA_ERROR_UNKNOWN;
    for policy in [PendingPolicy::GrowFirst, PendingPolicy::WaitFirst] {
        let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
        let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
        let mut config = config(6, 96);
        config.pending_policy = policy;
        config.out_of_memory = WaitPolicy::FailAtOnce;
        let pool = Pool::new(&device, &config).unwrap();
        let [freeing, asking] = [(); 2].map(|()| device.stream().unwrap());
        let malloc = |granules: u64| pool.malloc((granules * GRANULE) as usize, &freeing).unwrap();
        let [closed, between, open] = [2, 1, 3].map(malloc);
        pool.free(closed, bare(&freeing)).unwrap();
        // Closes the epoch, whose event does not pass.
        pool.trim_to(0).unwrap();
        pool.free(open, bare(&freeing)).unwrap();
        let waits = pool.stats().device_waits;
        sim.fail_nth("cuStreamWaitEvent", 1, code);
        let refused = pool.malloc(GRANULE as usize, &asking);
        assert!(
            matches!(refused, Err(Error::Driver { call: "cuStreamWaitEvent", .. })),
            "{policy:?}: {refused:?}"
        );
        assert_eq!(pool.stats().device_waits, waits);
        pool.validate().unwrap();
        let served = pool.malloc(2 * GRANULE as usize, &asking).unwrap();
        assert_eq!((served, pool.stats().device_waits), (closed, waits + 1), "{policy:?}");
        pool.validate().unwrap();
        [between, served].into_iter().for_each(|ptr| pool.free(ptr, &asking).unwrap());
        drop((pool, freeing, asking, device));
        sim.assert_clean();
    }
}

/// Nor is a block borrowed where the event or the wait for it fails: the pool grows.
#[test]
fn what_cannot_be_waited_for_is_not_borrowed() {
    for call in ["cuEventRecord", "cuStreamWaitEvent"] {
        let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
        let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
        let mut config = config(16, 96);
        config.patience = std::time::Duration::from_nanos(1);
        let pool = Pool::new(&device, &config).unwrap();
        let [freeing, asking] = [(); 2].map(|()| device.stream().unwrap());
        let freed = pool.malloc(2 * GRANULE as usize, &freeing).unwrap();
        pool.free(freed, bare(&freeing)).unwrap();
        // With its event, so that the only one recorded is the loan's.
        pool.trim_to(0).unwrap();
        sim.fail_nth(call, 1, CUresult::CUDA_ERROR_UNKNOWN);
        let grown = pool.malloc(2 * GRANULE as usize, &asking).unwrap();
        assert_ne!(grown, freed, "{call}");
        assert_eq!((pool.stats().device_waits, pool.stats().mapped_bytes), (0, 4 * GRANULE));
        pool.validate().unwrap();
        let borrowed = pool.malloc(2 * GRANULE as usize, &asking).unwrap();
        assert_eq!((borrowed, pool.stats().device_waits), (freed, 1), "{call}");
        pool.validate().unwrap();
        [grown, borrowed].into_iter().for_each(|ptr| pool.free(ptr, &asking).unwrap());
        drop((pool, freeing, asking, device));
        sim.assert_clean();
        assert!(sim.leaks().is_empty(), "{call}: {:?}", sim.leaks());
    }
}

/// What a record failed at is no reason for a refusal once all was waited for: memory lacks then.
#[test]
fn a_failure_that_a_wait_made_up_for_is_not_told() {
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
    let pool = Pool::new(&device, &config(2, 96)).unwrap();
    let [freeing, asking] = [(); 2].map(|()| device.stream().unwrap());
    // Too little to be asked for before the limit is reached.
    let half = || pool.malloc(GRANULE as usize / 2, &freeing).unwrap();
    let [freed, kept] = [half(), half()];
    pool.free(freed, bare(&freeing)).unwrap();
    let (before, waits) = (device.driver().calls(), pool.stats().host_waits);
    sim.fail_nth("cuEventRecord", 1, CUresult::CUDA_ERROR_UNKNOWN);
    let refused = pool.malloc(2 * GRANULE as usize, &asking).unwrap_err();
    assert!(refused.is_out_of_memory(), "{refused}");
    // The one that failed, and another.
    assert_eq!(device.driver().calls().since(&before).count("cuEventRecord"), 2);
    assert_eq!(pool.stats().host_waits, waits + 1);
    pool.free(kept, &freeing).unwrap();
    let all = pool.malloc(2 * GRANULE as usize, &asking).unwrap();
    pool.free(all, &asking).unwrap();
    drop((pool, freeing, asking, device));
    sim.assert_clean();
}

/// Addresses run short, and a question about the stream that they wait for fails: there are enough left for more.
#[test]
fn a_question_about_addresses_that_fails_leaves_a_request_others() {
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
    let pool = Pool::new(&device, &config(72, 256)).unwrap();
    let streams = [(); 2].map(|()| device.stream().unwrap());
    let held = [(); 44].map(|()| pool.malloc(GRANULE as usize, &streams[0]).unwrap());
    held.iter().step_by(2).for_each(|ptr| pool.free(*ptr, bare(&streams[0])).unwrap());
    // What was free in between moves.
    pool.malloc(42 * GRANULE as usize, &streams[0]).unwrap();
    assert!(pool.stats().zombie_bytes > 16 * GRANULE);
    sim.fail_nth("cuEventQuery", 1, CUresult::CUDA_ERROR_UNKNOWN);
    let asked = device.driver().calls();
    pool.malloc(GRANULE as usize / 2, &streams[1]).unwrap();
    assert!(device.driver().calls().since(&asked).count("cuEventQuery") > 0);
    pool.validate().unwrap();
    drop((pool, streams, device));
    sim.assert_clean();
}

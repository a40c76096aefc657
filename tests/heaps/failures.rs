//! Every driver call of going to sleep and of waking fails in turn: the heap is awake or asleep, with
//! what it held, and the same call succeeds when the driver does its part again.

use std::collections::HashSet;
use std::fs;

use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::CUresult;
use vpmm::{Buffers, Contents, DevicePtr, Driver, Error, Pool, PoolConfig, Stream};

use crate::graph;
use crate::rig::{GRANULE, MIB};
use crate::sleep::path;
use crate::support::Rig;
use crate::support::faults::{Fault, every_call_of_every_step};

/// Little, so that the pool has few addresses to validate.
const MEMORY: u64 = 64 << 20;
const UNKNOWN: CUresult = CUresult::CUDA_ERROR_UNKNOWN;

/// A heap with memory in several runs, some of it free.
struct Scene {
    sim: Simulator,
    rig: Rig,
    pool: Pool,
    stream: Stream,
    held: Vec<(DevicePtr, u64)>,
}

impl Scene {
    fn new(schedule: Schedule) -> Self {
        let sim =
            Simulator::builder().memory_bytes(MEMORY).schedule(schedule).seed(5).build().unwrap();
        let rig = Rig::with(Driver::new(sim.driver()).unwrap(), sim.clone());
        // One that cannot be destroyed is lost.
        rig.may_leave_events();
        let mut config = PoolConfig::default();
        config.va_size_bytes = Some(32 * GRANULE);
        let pool = Pool::new(&rig.device, &config).unwrap();
        let stream = rig.stream();
        let tagged = pool.tagged("weights").unwrap();
        let sizes = [1000, GRANULE, MIB, 3 * GRANULE / 2, 2 * GRANULE, 70_000];
        let mut held: Vec<(DevicePtr, u64)> = sizes
            .into_iter()
            .map(|bytes| (tagged.malloc(bytes as usize, &stream).unwrap(), bytes))
            .collect();
        tagged.free(held.remove(2).0, &stream).unwrap();
        let scene = Self { sim, rig, pool, stream, held };
        scene.fill();
        // So that faults meet the calls of sleeping, and not those of what came before.
        scene.rig.device.synchronize().unwrap();
        scene
    }

    fn fill(&self) {
        for (index, (ptr, bytes)) in self.held.iter().enumerate() {
            self.rig.fill(ptr.address(), *bytes, (index as u64) << 40, self.stream.handle());
        }
    }

    fn check_some(&self, which: impl Fn(DevicePtr) -> bool) {
        for (index, (ptr, bytes)) in self.held.iter().enumerate() {
            if which(*ptr) {
                self.rig.check(ptr.address(), *bytes, (index as u64) << 40, self.stream.handle());
            }
        }
        assert_eq!(self.rig.mismatches(), 0);
    }

    /// Everything is awake, has what it held, and can be used.
    fn check_awake(&self) {
        let tagged = self.pool.tagged("weights").unwrap();
        assert!(!tagged.is_asleep());
        self.check_some(|_| true);
        let more = tagged.malloc(GRANULE as usize, &self.stream).unwrap();
        tagged.free(more, &self.stream).unwrap();
        self.pool.validate().unwrap();
    }

    fn is_asleep(&self) -> bool {
        self.pool.tagged("weights").unwrap().is_asleep()
    }

    /// `lost` where memory of the host may be: the driver refused everything.
    fn end(self, lost: bool) {
        let Self { sim, rig, pool, stream, held } = self;
        for (ptr, _) in held {
            pool.free(ptr, &stream).unwrap();
        }
        drop((stream, pool));
        let mut leaks = sim.leaks();
        if lost {
            leaks.host_allocations = 0;
        }
        drop(rig);
        sim.assert_clean();
        let handles = (leaks.handles, leaks.mappings, leaks.reservations, leaks.host_allocations);
        assert_eq!(handles, (0, 0, 0, 0), "{leaks:?}");
    }
}

/// Fails a call of `suspend`; what must hold after that. Whether one was met.
fn suspend_fails(schedule: Schedule, contents: &Contents, fault: Fault) -> bool {
    let scene = Scene::new(schedule);
    fault.arm(&scene.sim);
    let result = scene.pool.suspend("weights", &scene.stream, contents);
    scene.sim.clear_faults();
    scene.pool.validate().unwrap();
    let failed = result.is_err();
    match result {
        Ok(asleep) => {
            assert!(scene.is_asleep());
            let kept = scene.pool.tagged("weights").unwrap().stats().mapped_bytes;
            assert_eq!(kept, asleep.kept_bytes);
        }
        Err(Error::HalfAsleep { asleep, awake, .. }) => {
            let all: HashSet<u64> = asleep.iter().chain(&*awake).map(|p| p.address()).collect();
            assert_eq!(all, scene.held.iter().map(|(ptr, _)| ptr.address()).collect());
            assert_eq!(all.len(), asleep.len() + awake.len());
            scene.check_some(|ptr| awake.iter().any(|p| p.address() == ptr.address()));
            assert!(scene.is_asleep());
        }
        Err(error) => {
            assert!(!scene.is_asleep(), "{error}");
            scene.check_awake();
            scene.pool.suspend("weights", &scene.stream, contents).unwrap();
        }
    }
    scene.pool.resume("weights", &scene.stream).unwrap();
    if *contents == Contents::Discard {
        scene.fill();
    }
    scene.check_awake();
    scene.end(matches!(fault, Fault::FromThen(..)));
    failed
}

/// Fails a call of `resume`: it sleeps on, and wakes the next time.
fn resume_fails(schedule: Schedule, contents: &Contents, fault: Fault) -> bool {
    let scene = Scene::new(schedule);
    scene.pool.suspend("weights", &scene.stream, contents).unwrap();
    let free = scene.rig.device.free_memory().unwrap();
    fault.arm(&scene.sim);
    let result = scene.pool.resume("weights", &scene.stream);
    scene.sim.clear_faults();
    scene.pool.validate().unwrap();
    let failed = result.is_err();
    if let Err(error) = result {
        assert!(scene.is_asleep(), "{error}");
        let kept = scene.pool.tagged("weights").unwrap().stats().mapped_bytes;
        assert_eq!(scene.rig.device.free_memory().unwrap(), free - kept, "{error}");
        assert!(scene.pool.tagged("weights").unwrap().malloc(1000, &scene.stream).is_err());
        scene.pool.resume("weights", &scene.stream).unwrap();
    }
    if *contents == Contents::Discard {
        scene.fill();
    }
    scene.check_awake();
    scene.end(matches!(fault, Fault::FromThen(..)));
    failed
}

fn every_call(
    fault: impl Fn(u64) -> Fault,
    run: impl Fn(Schedule, &Contents, Fault) -> bool,
) -> usize {
    let path = path();
    let mut failures = 0;
    for (schedule, contents) in [
        (Schedule::Eager, Contents::Discard),
        (Schedule::Eager, Contents::Keep(Buffers::Retain)),
        (Schedule::Late { patience: 2 }, Contents::Keep(Buffers::Release)),
        (Schedule::Late { patience: 2 }, Contents::Save(path.clone())),
    ] {
        let mut unseen = 0;
        for n in 1.. {
            let failed = run(schedule, &contents, fault(n));
            failures += usize::from(failed);
            unseen = if failed { 0 } else { unseen + 1 };
            if unseen > 16 {
                break;
            }
        }
    }
    fs::remove_file(path).unwrap();
    failures
}

#[test]
fn one_call_fails_on_the_way_to_sleep() {
    for code in [UNKNOWN, CUresult::CUDA_ERROR_OUT_OF_MEMORY] {
        assert!(every_call(|n| Fault::Once(n, code), suspend_fails) > 60);
    }
}

#[test]
fn one_call_fails_on_the_way_back() {
    for code in [UNKNOWN, CUresult::CUDA_ERROR_OUT_OF_MEMORY] {
        assert!(every_call(|n| Fault::Once(n, code), resume_fails) > 60);
    }
}

#[test]
fn all_calls_fail_from_one_on() {
    assert!(every_call(|n| Fault::FromThen(n, UNKNOWN), suspend_fails) > 60);
    assert!(every_call(|n| Fault::FromThen(n, UNKNOWN), resume_fails) > 60);
}

/// A capture with memory of its own, and frees of other memory, step by step; the step `at` meets a
/// fault, and is done again. Whether it failed.
fn capture_fails(at: usize, fault: Fault) -> bool {
    let sim = Simulator::builder().memory_bytes(MEMORY).seed(5).build().unwrap();
    let rig = Rig::with(Driver::new(sim.driver()).unwrap(), sim.clone());
    // As in `Scene::new`.
    rig.may_leave_events();
    let mut config = PoolConfig::default();
    config.va_size_bytes = Some(32 * GRANULE);
    let pool = Pool::new(&rig.device, &config).unwrap();
    let mut failed = false;
    {
        let stream = rig.stream();
        let raw = graph::Raw::new(&rig, false);
        let mut held = [(); 2].map(|()| Some(pool.malloc(MIB as usize, raw.handle()).unwrap()));
        let mut scratch: Vec<DevicePtr> = Vec::new();
        let mut graphs = None;
        for step in 0..CAPTURE_STEPS {
            match step {
                3 => graph::begin(&rig, &stream, graph::RELAXED),
                5 => rig.order(&stream, raw.handle()),
                10 => rig.order(raw.handle(), &stream),
                11 => drop(graph::end(&rig, &stream)),
                _ => {}
            }
            let mut run = || {
                let graphs_of = || graphs.as_ref().expect("made in the first step");
                match step {
                    0 => graphs = Some(pool.graph_pool()?),
                    1 => graphs_of().begin(&stream)?,
                    2 | 4 => scratch.push(pool.malloc(GRANULE as usize, &stream)?),
                    6 => scratch.push(pool.malloc(MIB as usize, raw.handle())?),
                    7 | 8 => {
                        let index = step - 7;
                        if let Some(ptr) = held[index] {
                            pool.free(ptr, raw.handle())?;
                            held[index] = None;
                        }
                    }
                    9 => pool.free(scratch[2], raw.handle())?,
                    12 => graphs_of().end(&stream)?,
                    13 => pool.free(scratch[0], &stream)?,
                    14 => pool.free(scratch[1], raw.handle())?,
                    15 => graphs_of().release(&stream)?,
                    _ => {}
                }
                Ok::<(), Error>(())
            };
            if step == at {
                fault.arm(&sim);
                let result = run();
                sim.clear_faults();
                pool.validate().unwrap_or_else(|violation| panic!("step {step}: {violation}"));
                if result.is_ok() {
                    continue;
                }
                failed = true;
            }
            run().unwrap_or_else(|error| panic!("step {step} after a fault at {at}: {error}"));
            pool.validate().unwrap_or_else(|violation| panic!("step {step}: {violation}"));
        }
        drop(stream);
        let held = (0..20).all(|_| {
            rig.device.synchronize().unwrap();
            pool.trim_to(u64::MAX).unwrap();
            graphs.as_ref().is_some_and(|graphs| graphs.stats().mapped_bytes > 0)
        });
        assert!(!held, "the graph's memory is still held");
    }
    drop(pool);
    let leaks = sim.leaks();
    assert_eq!((leaks.handles, leaks.mappings, leaks.reservations), (0, 0, 0), "{leaks:?}");
    drop(rig);
    sim.assert_clean();
    failed
}

const CAPTURE_STEPS: usize = 16;

#[test]
fn one_call_fails_around_a_capture() {
    let fault = |n| Fault::Once(n, UNKNOWN);
    let failures = every_call_of_every_step(CAPTURE_STEPS, 6, fault, capture_fails);
    assert!(failures > 20, "only {failures} faults were met");
}

#[test]
fn all_calls_fail_around_a_capture() {
    let fault = |n| Fault::FromThen(n, UNKNOWN);
    let failures = every_call_of_every_step(CAPTURE_STEPS, 2, fault, capture_fails);
    assert!(failures > 20, "only {failures} faults were met");
}

#[test]
fn half_asleep_says_which() {
    for (name, nth) in [("cuMemMap", 1), ("cuMemSetAccess", 1)] {
        let scene = Scene::new(Schedule::Eager);
        scene.sim.fail_nth("cuMemUnmap", 2, UNKNOWN);
        scene.sim.fail_nth(name, nth, UNKNOWN);
        let keep = Contents::Keep(Buffers::Release);
        let error = scene.pool.suspend("weights", &scene.stream, &keep).unwrap_err();
        let Error::HalfAsleep { call, code, asleep, awake } = &error else { panic!("{error}") };
        assert_eq!((*call, *code), ("cuMemUnmap", UNKNOWN));
        assert!(!asleep.is_empty() && !awake.is_empty(), "{asleep:?}, {awake:?}");
        assert_eq!(asleep.len() + awake.len(), scene.held.len());
        scene.check_some(|ptr| awake.iter().any(|other| other.address() == ptr.address()));
        scene.pool.validate().unwrap();
        scene.pool.resume("weights", &scene.stream).unwrap();
        scene.check_awake();
        scene.end(false);
    }
}

#[test]
fn a_pool_may_end_while_a_heap_sleeps() {
    let path = path();
    for contents in
        [Contents::Discard, Contents::Keep(Buffers::Retain), Contents::Save(path.clone())]
    {
        for half in [false, true] {
            let scene = Scene::new(Schedule::Late { patience: 2 });
            if half {
                scene.sim.fail_nth("cuMemUnmap", 2, UNKNOWN);
                scene.sim.fail_nth("cuMemMap", 1, UNKNOWN);
            }
            let asleep = scene.pool.suspend("weights", &scene.stream, &contents);
            assert_eq!(asleep.is_err(), half);
            let Scene { sim, rig, pool, stream, .. } = scene;
            // With what is allocated in it.
            pool.destroy().map_err(|(_, error)| error).unwrap();
            drop(stream);
            let leaks = sim.leaks();
            drop(rig);
            sim.assert_clean();
            let left = (leaks.handles, leaks.mappings, leaks.reservations, leaks.host_allocations);
            assert_eq!(left, (0, 0, 0, 0), "{leaks:?}");
        }
    }
    fs::remove_file(path).unwrap();
}

#[test]
fn handles_that_the_driver_keeps_are_offered_again() {
    let scene = Scene::new(Schedule::Eager);
    let free = scene.rig.device.free_memory().unwrap();
    let mapped = scene.pool.stats().mapped_bytes;
    scene.sim.fail_nth("cuMemRelease", 1, UNKNOWN);
    let asleep = scene.pool.suspend("weights", &scene.stream, &Contents::Discard).unwrap();
    assert!(asleep.kept_bytes > 0 && asleep.bytes + asleep.kept_bytes == mapped);
    assert_eq!(scene.rig.device.free_memory().unwrap(), free + asleep.bytes);
    // Whatever looks after the heaps.
    drop(scene.pool.graph_pool().unwrap());
    assert_eq!(scene.rig.device.free_memory().unwrap(), free + mapped);
    scene.pool.resume("weights", &scene.stream).unwrap();
    scene.fill();
    scene.check_awake();
    scene.end(false);
}

/// The same of those that a trim gave up before.
#[test]
fn handles_that_the_driver_kept_before_are_offered_again_as_a_heap_falls_asleep() {
    for again in [0, 1] {
        let scene = Scene::new(Schedule::Eager);
        let free = || scene.rig.device.free_memory().unwrap();
        let (before, mapped) = (free(), scene.pool.stats().mapped_bytes);
        let tagged = scene.pool.tagged("weights").unwrap();
        let more = tagged.malloc(8 * GRANULE as usize, &scene.stream).unwrap();
        tagged.free(more, &scene.stream).unwrap();
        let refuse = |times| {
            (1..=times).for_each(|n| scene.sim.fail_nth("cuMemRelease", n, UNKNOWN));
        };
        refuse(64);
        assert_eq!(tagged.trim_to(mapped).unwrap(), 0);
        scene.sim.clear_faults();
        assert_eq!((scene.pool.stats().mapped_bytes, free() < before), (mapped, true));
        drop(tagged);
        refuse(again * 64);
        scene.pool.suspend("weights", &scene.stream, &Contents::Discard).unwrap();
        scene.sim.clear_faults();
        if again > 0 {
            // Whatever looks after the heaps.
            drop(scene.pool.graph_pool().unwrap());
        }
        assert_eq!(free(), before + mapped);
        scene.pool.resume("weights", &scene.stream).unwrap();
        scene.fill();
        scene.check_awake();
        scene.end(false);
    }
}

#[test]
fn a_device_that_others_have_filled_refuses_to_wake() {
    let scene = Scene::new(Schedule::Eager);
    let keep = Contents::Keep(Buffers::Release);
    scene.pool.suspend("weights", &scene.stream, &keep).unwrap();
    scene.sim.set_memory_limit(0, scene.sim.memory_used(0) + 3 * GRANULE);
    let refused = scene.pool.resume("weights", &scene.stream).unwrap_err();
    assert!(refused.is_out_of_memory(), "{refused}");
    assert!(scene.is_asleep());
    scene.pool.validate().unwrap();
    scene.sim.set_memory_limit(0, MEMORY);
    scene.pool.resume("weights", &scene.stream).unwrap();
    scene.check_awake();
    scene.end(false);
}

/// A free in a capture that the main heap can take only afterwards is made, whichever call fails then.
#[test]
fn a_free_that_waits_for_a_captures_end_is_not_lost() {
    for call in 1..24 {
        let sim = Simulator::builder().memory_bytes(MEMORY).seed(5).build().unwrap();
        let rig = Rig::with(Driver::new(sim.driver()).unwrap(), sim.clone());
        let mut config = vpmm::PagedConfig::default();
        config.va_size_bytes = 64 * GRANULE;
        let pool = Pool::paged(&rig.device, &config).unwrap();
        let stream = rig.stream();
        let ptr = pool.malloc(GRANULE as usize, &stream).unwrap();
        let graphs = pool.graph_pool().unwrap();
        graphs.begin(&stream).unwrap();
        graph::begin(&rig, &stream, graph::RELAXED);
        pool.free(ptr, &stream).unwrap();
        drop(graph::end(&rig, &stream));
        sim.fail_call(call, UNKNOWN);
        if graphs.end(&stream).is_err() {
            sim.clear_faults();
            graphs.end(&stream).unwrap();
        }
        sim.clear_faults();
        // Every call of a graph's pool sees to it again.
        graphs.begin(&stream).unwrap();
        graphs.end(&stream).unwrap();
        assert_eq!(pool.stats().live_count, 0, "after a fault at call {call}");
        assert!(pool.free(ptr, &stream).is_err(), "freed twice");
        pool.validate().unwrap();
    }
}

/// Nobody can record on it any more: they are made when the host has waited for the device.
#[test]
fn a_stream_ends_with_frees_that_wait_for_its_capture() {
    let sim = Simulator::builder().memory_bytes(MEMORY).seed(5).build().unwrap();
    let rig = Rig::with(Driver::new(sim.driver()).unwrap(), sim.clone());
    let mut config = vpmm::PagedConfig::default();
    config.va_size_bytes = 64 * GRANULE;
    let pool = Pool::paged(&rig.device, &config).unwrap();
    let (stream, other) = (rig.stream(), rig.stream());
    let ptr = pool.malloc(GRANULE as usize, &stream).unwrap();
    let graphs = pool.graph_pool().unwrap();
    graphs.begin(&stream).unwrap();
    graph::begin(&rig, &stream, graph::RELAXED);
    pool.free(ptr, &stream).unwrap();
    drop(stream);
    graphs.begin(&other).unwrap();
    graphs.end(&other).unwrap();
    assert_eq!(pool.stats().live_count, 1);
    assert!(matches!(pool.free(ptr, &other), Err(Error::DoubleFree { .. })));
    rig.device.synchronize().unwrap();
    assert_eq!(pool.stats().live_count, 0);
    pool.validate().unwrap();
    rig.assert_clean();
}

/// What had begun on a stream is over with it, whichever call fails then: another may come in its place.
#[test]
fn a_stream_that_ends_in_a_failure_ends_what_had_begun_on_it() {
    for fault in [Fault::Once, Fault::FromThen] {
        for call in 1..24 {
            let sim = Simulator::builder().memory_bytes(MEMORY).seed(5).build().unwrap();
            let rig = Rig::with(Driver::new(sim.driver()).unwrap(), sim.clone());
            let mut config = PoolConfig::default();
            config.va_size_bytes = Some(32 * GRANULE);
            let pool = Pool::new(&rig.device, &config).unwrap();
            let stream = rig.stream();
            let ptr = pool.malloc(MIB as usize, &stream).unwrap();
            let graphs = pool.graph_pool().unwrap();
            graphs.begin(&stream).unwrap();
            let scratch = pool.malloc(MIB as usize, &stream).unwrap();
            fault(call, UNKNOWN).arm(&sim);
            drop(stream);
            sim.clear_faults();
            let others = [(); 4].map(|()| rig.stream());
            for other in &others {
                let held = pool.malloc(MIB as usize, other).unwrap();
                assert_eq!(graphs.stats().live_count, 1, "after a fault at call {call}");
                pool.free(held, other).unwrap();
                assert!(matches!(graphs.end(other), Err(Error::GraphPool { .. })));
            }
            pool.free(scratch, &others[0]).unwrap();
            pool.free(ptr, &others[0]).unwrap();
            graphs.release(&others[0]).unwrap();
            pool.validate().unwrap();
        }
    }
}

/// Streams' ends are told to a pool once, however often its first heap could not be made.
#[test]
fn first_heaps_that_fail_leave_nothing_behind() {
    let sim = Simulator::builder().build().unwrap();
    let rig = Rig::with(Driver::new(sim.driver()).unwrap(), sim.clone());
    let pool = Pool::new(&rig.device, &PoolConfig::default()).unwrap();
    let fail = |times: usize| {
        for _ in 0..times {
            sim.fail_nth("cuMemAddressReserve", 1, UNKNOWN);
            pool.tagged("weights").map(drop).unwrap_err();
            sim.fail_nth("cuMemAddressReserve", 1, UNKNOWN);
            pool.graph_pool().map(drop).unwrap_err();
        }
        sim.clear_faults();
        let stream = rig.stream();
        let before = rig.driver.calls();
        drop(stream);
        rig.driver.calls().since(&before).total()
    };
    assert_eq!(fail(1), fail(8));
}

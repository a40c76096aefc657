//! The helper: a thread that works ahead of requests. Every test of it waits for what the thread is
//! to bring about, without a call that could have done it instead.

use std::time::{Duration, Instant};

use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::*;
use vpmm::{Background, Driver, Error, Pool, PoolConfig, StreamHandle};

use crate::rig::{GRANULE, KIB, MIB, bare, config};
use crate::support::changed::{changed, gated};
use crate::support::streams::{begin_capture, end_capture, make};
use crate::support::{Rig, call};

const OFTEN: Duration = Duration::from_micros(200);
/// Between two looks that no test waits for: only growth calls the helper.
const NEVER: Duration = Duration::from_secs(3600);

fn background(period: Duration, ahead_granules: u64) -> Background {
    let mut background = Background::default();
    background.period = period;
    background.ahead_bytes = ahead_granules * GRANULE;
    background
}

/// At most so many granules, and a helper.
fn helped(limit_granules: u64, period: Duration, ahead_granules: u64) -> PoolConfig {
    let mut config = config(limit_granules, 8 * limit_granules);
    config.background = Some(background(period, ahead_granules));
    config
}

/// Waits until something holds that another thread brings about.
#[track_caller]
fn eventually(pool: &Pool, what: &str, holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(10), "never {what}: {pool:?}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// The same of what waits for the device, which is let do whatever it is given meanwhile: when the thread
/// records an event is for it to say.
#[track_caller]
fn eventually_done(pool: &Pool, sim: &Simulator, what: &str, holds: impl Fn() -> bool) {
    eventually(pool, what, || {
        sim.run_until_idle();
        holds()
    });
}

/// Long enough for a hundred looks.
fn many_looks() {
    std::thread::sleep(Duration::from_millis(30));
}

fn simulated(schedule: Schedule) -> (Rig, Simulator) {
    let rig = Rig::simulated(schedule);
    let sim = rig.sim.clone().expect("a simulated rig");
    (rig, sim)
}

#[test]
fn what_a_stream_frees_is_nobodys_before_anybody_asks() {
    for past_the_front in [false, true] {
        let (rig, sim) = simulated(Schedule::Manual);
        let watched = rig.pool(&helped(16, OFTEN, 0));
        let pool = &watched.pool;
        let (a, b) = (rig.stream(), rig.stream());
        let of_b = watched.malloc(KIB, &b);
        let held = watched.malloc(8 * GRANULE, &a);
        let freeing = if past_the_front { bare(&a) } else { a.handle() };
        watched.free(held, freeing);
        // A front that nobody touches is emptied; what was in it still waits for its stream.
        eventually(pool, "out of the front", || pool.stats().cached_bytes == 0);
        many_looks();
        let of_a = pool.stats().pending_bytes;
        assert!(of_a >= 8 * GRANULE && pool.stats().idle_bytes < 8 * GRANULE, "{pool:?}");
        eventually_done(pool, &sim, "nobody's", || pool.stats().pending_bytes == 0);
        watched.validate();
        let (before, mapped) = (rig.driver.calls(), watched.usage());
        let taken = pool.malloc(8 * GRANULE as usize, &b).unwrap();
        let calls = rig.driver.calls().since(&before);
        // The thread may be on its way out of the look that made it nobody's: back to the context and the mode
        // of before. A request would have to get in first.
        let ways_out = ["cuCtxPopCurrent_v2", "cuThreadExchangeStreamCaptureMode"];
        let ways_out = ways_out.map(|call| calls.count(call));
        assert!(ways_out.into_iter().all(|count| count <= 1), "{calls:?}");
        assert_eq!(calls.total(), ways_out.into_iter().sum::<u64>(), "{calls:?}");
        assert_eq!(watched.usage(), mapped);
        pool.free(taken, &b).unwrap();
        watched.free(of_b, &b);
        watched.assert_intact();
    }
}

#[test]
fn a_foreign_streams_frees_are_nobodys_too() {
    let (rig, sim) = simulated(Schedule::Manual);
    let watched = rig.pool(&helped(16, OFTEN, 0));
    let pool = &watched.pool;
    let (raw, foreign) = make(&rig, 1);
    let held = watched.malloc(8 * GRANULE, foreign);
    watched.free(held, foreign);
    call!(rig.driver, cuStreamDestroy_v2(raw));
    many_looks();
    assert_eq!(pool.stats().idle_bytes, 0, "its work has not run");
    eventually_done(pool, &sim, "nobody's", || pool.stats().idle_bytes == 8 * GRANULE);
    watched.assert_intact();
}

/// A record on the legacy stream waits for blocking ones: what is open there is left open, also where an epoch before
/// it has passed.
#[test]
fn the_legacy_streams_open_epoch_is_left_to_those_who_lack_memory() {
    let (rig, sim) = simulated(Schedule::Manual);
    let watched = rig.pool(&helped(16, OFTEN, 0));
    let pool = &watched.pool;
    let of_other = watched.malloc(KIB, &rig.stream());
    let records =
        || rig.driver.calls().iter().find(|of| of.0 == "cuEventRecord").map_or(0, |of| of.1);
    let held = [(); 2].map(|()| watched.malloc(4 * GRANULE, StreamHandle::LEGACY));
    let before = records();
    watched.free(held[0], StreamHandle::LEGACY);
    eventually(pool, "out of the front", || pool.stats().cached_bytes == 0);
    many_looks();
    assert_eq!(records(), before);
    // Closes its epoch.
    pool.trim_to(0).unwrap();
    watched.free(held[1], StreamHandle::LEGACY);
    eventually(pool, "out of the front", || pool.stats().cached_bytes == 0);
    let before = records();
    eventually_done(pool, &sim, "nobody's", || pool.stats().idle_bytes >= 4 * GRANULE);
    many_looks();
    assert_eq!((records(), pool.stats().pending_bytes / GRANULE), (before, 4));
    watched.free(of_other, StreamHandle::LEGACY);
    watched.assert_intact();
}

#[test]
fn zombies_are_unmapped_with_nobody_calling() {
    let (rig, sim) = simulated(Schedule::Manual);
    let watched = rig.pool(&helped(4, OFTEN, 0));
    let pool = &watched.pool;
    let stream = rig.stream();
    let held = [(); 4].map(|()| watched.malloc(GRANULE, &stream));
    watched.free(held[0], &stream);
    watched.free(held[2], &stream);
    let two = watched.malloc(2 * GRANULE, &stream);
    many_looks();
    // The kernels that wrote there have not run.
    assert!(pool.stats().zombie_bytes > 0, "{pool:?}");
    eventually_done(pool, &sim, "unmapped", || pool.stats().zombie_bytes == 0);
    for held in [held[1], held[3], two] {
        watched.free(held, &stream);
    }
    watched.assert_intact();
}

#[test]
fn requests_find_memory_mapped_ahead() {
    let (rig, _) = simulated(Schedule::Late { patience: 3 });
    let watched = rig.pool(&helped(64, NEVER, 8));
    let pool = &watched.pool;
    let stream = rig.stream();
    let mut held = vec![watched.malloc(2 * GRANULE, &stream)];
    for round in 0..4 {
        let free = || pool.stats().free_bytes();
        eventually(pool, "mapped ahead", || free() >= 8 * GRANULE);
        watched.validate();
        assert_eq!(free(), 8 * GRANULE, "no more than was asked for");
        let before = rig.driver.calls();
        let taken = [(); 4].map(|()| pool.malloc(2 * GRANULE as usize, &stream).unwrap());
        let calls = rig.driver.calls().since(&before);
        assert_eq!(calls.total(), 0, "round {round}: {calls:?}");
        // In place: behind what was there before, in a row.
        let mut addresses: Vec<u64> = taken.iter().map(|ptr| ptr.address()).collect();
        addresses.sort_unstable();
        assert!(addresses.windows(2).all(|pair| pair[1] - pair[0] == 2 * GRANULE));
        assert_eq!((free(), watched.usage()), (0, 10 + round * 10));
        taken.into_iter().for_each(|ptr| pool.free(ptr, bare(&stream)).unwrap());
        held.push(watched.malloc(8 * GRANULE, &stream));
        assert_eq!(free(), 0, "{pool:?}");
        // Nothing is left: this one grows, and calls the helper.
        held.push(watched.malloc(2 * GRANULE, &stream));
    }
    held.into_iter().for_each(|held| watched.free(held, &stream));
    watched.assert_intact();
}

#[test]
fn memory_is_mapped_ahead_for_small_blocks_too() {
    let (rig, _) = simulated(Schedule::Eager);
    let watched = rig.pool(&helped(64, NEVER, 8));
    let stream = rig.stream();
    let small = watched.malloc(700, &stream);
    // An eighth of 8 granules, which is what the first request has left over almost: one more.
    eventually(&watched.pool, "mapped ahead", || watched.usage() == 2);
    let stats = watched.pool.stats();
    assert_eq!([stats.extents_created, stats.pages_created], [2; 2]);
    watched.validate();
    watched.free(small, &stream);
    watched.assert_intact();
}

#[test]
fn memory_ahead_stays_within_the_limit_and_leaves_some_of_it() {
    let (rig, _) = simulated(Schedule::Eager);
    let watched = rig.pool(&helped(16, NEVER, 1000));
    let stream = rig.stream();
    let first = watched.malloc(GRANULE, &stream);
    eventually(&watched.pool, "mapped ahead", || watched.usage() >= 14);
    many_looks();
    assert_eq!(watched.usage(), 14, "an eighth is left");
    // What is ahead is no loss to a request that is longer.
    let rest = watched.malloc(15 * GRANULE, &stream);
    assert_eq!(watched.usage(), 16);
    watched.free(first, &stream);
    watched.free(rest, &stream);
    watched.assert_intact();
}

/// A limit that is set later is one, too.
#[test]
fn memory_ahead_leaves_some_of_a_limit_that_was_lowered() {
    let (rig, _) = simulated(Schedule::Eager);
    for (limit, ahead) in [(16, 14), (12, 10), (16, 1000)] {
        let watched = rig.pool(&helped(64, NEVER, ahead));
        watched.pool.limit_to(Some(limit * GRANULE)).expect("a limit");
        let stream = rig.stream();
        let first = watched.malloc(GRANULE, &stream);
        eventually(&watched.pool, "mapped ahead", || watched.usage() >= limit - limit / 8);
        many_looks();
        assert_eq!(watched.usage(), limit - limit / 8, "an eighth is left");
        watched.free(first, &stream);
        watched.assert_intact();
    }
}

#[test]
fn nothing_is_mapped_ahead_where_the_device_is_nearly_full() {
    let (rig, sim) = simulated(Schedule::Eager);
    let watched = rig.pool(&helped(64, OFTEN, 16));
    let stream = rig.stream();
    let used = sim.memory_used(0);
    sim.set_memory_limit(0, used + 9 * GRANULE);
    // One for the request, and an eighth of the limit stays.
    let first = watched.malloc(GRANULE, &stream);
    many_looks();
    assert_eq!(watched.usage(), 1);
    sim.set_memory_limit(0, 141 << 30);
    many_looks();
    assert_eq!(watched.usage(), 1, "not asked again before the pool has grown");
    let second = watched.malloc(GRANULE, &stream);
    eventually(&watched.pool, "mapped ahead", || watched.usage() == 18);
    watched.free(first, &stream);
    watched.free(second, &stream);
    watched.assert_intact();
}

/// Fragments a pool on two streams, so that its helper has to record, ask, unmap and map. Requests
/// that a fault hits are made again. Leaves everything freed.
fn disorder(pool: &Pool, streams: &[vpmm::Stream; 2]) {
    let again = |work: &dyn Fn() -> Result<(), Error>| {
        let worked = (0..5).any(|_| work().is_ok());
        assert!(worked, "one fault, and five failures");
    };
    let malloc = |granules: u64, stream: &vpmm::Stream| {
        let ptr = std::cell::Cell::new(None);
        again(&|| {
            ptr.set(Some(pool.malloc((granules * GRANULE) as usize, stream)?));
            Ok(())
        });
        ptr.get().expect("five attempts")
    };
    let [a, b] = streams;
    let held: Vec<_> = (0..10).map(|_| malloc(1, a)).collect();
    for ptr in held.iter().step_by(2) {
        again(&|| pool.free(*ptr, bare(a)));
    }
    let moved = malloc(3, b);
    let more = malloc(2, a);
    for ptr in held.iter().skip(1).step_by(2).chain([&more]) {
        again(&|| pool.free(*ptr, a));
    }
    again(&|| pool.free(moved, b));
}

/// All free memory is nobody's, and no addresses wait.
fn is_settled(pool: &Pool) -> bool {
    let stats = pool.stats();
    stats.cached_bytes + stats.pending_bytes + stats.zombie_bytes + stats.transit_bytes == 0
        && stats.idle_bytes == stats.mapped_bytes
}

#[test]
fn pools_are_dropped_while_their_helpers_work() {
    for schedule in
        [Schedule::Eager, Schedule::Late { patience: 3 }, Schedule::Random, Schedule::Manual]
    {
        let sim = Simulator::builder().schedule(schedule).seed(3).build().unwrap();
        {
            let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
            for round in 0..40 {
                let pool = Pool::new(&device, &helped(24, OFTEN, round % 5)).unwrap();
                let streams = [(); 2].map(|()| device.stream().unwrap());
                disorder(&pool, &streams);
                std::thread::sleep(Duration::from_micros(50 * (round % 8)));
                // The streams before the pool, or after it.
                if round % 2 == 0 { drop((streams, pool)) } else { drop((pool, streams)) }
            }
        }
        sim.assert_clean();
        assert!(sim.leaks().is_empty(), "{schedule:?}: {:?}", sim.leaks());
    }
}

/// A helper that sleeps is woken, and one whose device is busy does not wait for it.
#[test]
fn a_helper_ends_at_once() {
    let (rig, _) = simulated(Schedule::Manual);
    for period in [NEVER, OFTEN] {
        let watched = rig.pool(&helped(24, period, 2));
        let streams = [(); 2].map(|()| rig.stream());
        let stall = rig.stall(streams[0].handle());
        disorder(&watched.pool, &streams);
        many_looks();
        // The pool waits for the work of its streams; so this, and no more, is in its way.
        drop(stall);
        let start = Instant::now();
        drop(watched);
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    }
    rig.assert_clean();
}

/// The helper's thread keeps nothing alive and is gone with the pool.
#[test]
fn many_pools_with_helpers_leave_no_threads() {
    let threads = || std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count);
    let rig = Rig::simulated(Schedule::Eager);
    let before = threads();
    for _ in 0..200 {
        drop(rig.pool(&helped(16, OFTEN, 1)));
    }
    // Other tests' threads come and go.
    assert!(threads() < before + 100, "{} threads of {before}", threads());
}

/// A fault at each of the first driver calls in turn, whichever thread makes it.
#[test]
fn one_call_fails() {
    let mut settled = 0;
    for code in [CUresult::CUDA_ERROR_UNKNOWN, CUresult::CUDA_ERROR_OUT_OF_MEMORY] {
        for n in 1..=120 {
            let sim = Simulator::builder().seed(n).build().unwrap();
            {
                let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
                let pool = Pool::new(&device, &helped(24, OFTEN, 4)).unwrap();
                let streams = [(); 2].map(|()| device.stream().unwrap());
                sim.fail_call(n, code);
                disorder(&pool, &streams);
                eventually(&pool, "settled", || is_settled(&pool));
                settled += 1;
                pool.validate().unwrap_or_else(|violation| panic!("call {n}: {violation}"));
                sim.clear_faults();
            }
            sim.assert_clean();
            assert!(sim.leaks().is_empty(), "call {n}: {:?}", sim.leaks());
        }
    }
    assert_eq!(settled, 240);
}

/// Faults in calls that only the helper makes here, or makes last: it does them again.
#[test]
fn the_helpers_own_calls_fail() {
    for name in [
        "cuEventCreate",
        "cuEventRecord",
        "cuEventQuery",
        "cuStreamIsCapturing",
        "cuThreadExchangeStreamCaptureMode",
        "cuCtxGetCurrent",
        "cuCtxPushCurrent_v2",
        "cuMemGetInfo_v2",
        "cuMemCreate",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemUnmap",
        "cuMemRelease",
    ] {
        let sim = Simulator::builder().build().unwrap();
        {
            let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
            let pool = Pool::new(&device, &helped(24, OFTEN, 4)).unwrap();
            let streams = [(); 2].map(|()| device.stream().unwrap());
            let frees = |ptr, stream| pool.free(ptr, bare(stream)).unwrap();
            let [a, b] = &streams;
            let held = [a, b].map(|stream| pool.malloc(3 * GRANULE as usize, stream).unwrap());
            frees(held[0], a);
            eventually(&pool, "settled", || pool.stats().pending_bytes == 0);
            // From here on, but for one growth, every call is the helper's.
            for n in 1..=3 {
                sim.fail_nth(name, n, CUresult::CUDA_ERROR_UNKNOWN);
            }
            let more = (0..5).find_map(|_| pool.malloc(9 * GRANULE as usize, a).ok());
            let more = more.unwrap_or_else(|| panic!("{name} fails three times at most"));
            for ptr in [held[1], more] {
                let freed = (0..5).any(|_| pool.free(ptr, bare(b)).is_ok());
                assert!(freed, "{name} fails three times at most");
            }
            eventually(&pool, "settled", || is_settled(&pool));
            sim.clear_faults();
            pool.validate().unwrap_or_else(|violation| panic!("{name}: {violation}"));
        }
        sim.assert_clean();
        assert!(sim.leaks().is_empty(), "{name}: {:?}", sim.leaks());
    }
}

/// Every call fails for a while: nothing is lost, and all is made up for.
#[test]
fn all_calls_fail_for_a_while() {
    let sim = Simulator::builder().build().unwrap();
    {
        let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
        let pool = Pool::new(&device, &helped(24, OFTEN, 4)).unwrap();
        let streams = [(); 2].map(|()| device.stream().unwrap());
        for round in 0..30 {
            disorder(&pool, &streams);
            sim.fail_all_calls_after(round, CUresult::CUDA_ERROR_UNKNOWN);
            many_looks();
            pool.validate().unwrap();
            sim.clear_faults();
            eventually(&pool, "settled", || is_settled(&pool));
            pool.validate().unwrap();
        }
    }
    sim.assert_clean();
    assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
}

#[test]
fn a_helper_stops_quietly_when_the_device_is_lost() {
    let sim = Simulator::builder().build().unwrap();
    let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
    let pool = Pool::new(&device, &helped(24, OFTEN, 2)).unwrap();
    let streams = [(); 2].map(|()| device.stream().unwrap());
    let held = pool.malloc(GRANULE as usize, &streams[0]).unwrap();
    disorder(&pool, &streams);
    let live = pool.malloc(3 * GRANULE as usize, &streams[1]).unwrap();
    pool.free(held, bare(&streams[0])).unwrap();
    sim.lose_device(0, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    // Something to do, on a device that is gone: it tries once and makes no call after that.
    pool.free(live, &streams[1]).unwrap();
    many_looks();
    let calls = sim.calls();
    many_looks();
    assert_eq!(sim.calls(), calls, "the helper goes on calling");
    let error = pool.malloc(23 * GRANULE as usize, &streams[0]).unwrap_err();
    assert!(error.is_context_lost(), "{error}");
    pool.validate().unwrap();
    drop(pool); // and no panic here
}

#[test]
fn two_pools_with_helpers_share_streams() {
    for schedule in [Schedule::Eager, Schedule::Random] {
        let sim = Simulator::builder().schedule(schedule).seed(8).build().unwrap();
        {
            let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
            let pools = [3, 0].map(|ahead| Pool::new(&device, &helped(24, OFTEN, ahead)).unwrap());
            for _ in 0..10 {
                let streams = [(); 2].map(|()| device.stream().unwrap());
                std::thread::scope(|scope| {
                    for pool in &pools {
                        let streams = &streams;
                        scope.spawn(move || disorder(pool, streams));
                    }
                });
                // The streams end with their last work pending; both pools are told.
            }
            for pool in &pools {
                eventually(pool, "settled", || is_settled(pool));
                pool.validate().unwrap();
            }
            let [first, second] = pools;
            drop(first);
            let streams = [(); 2].map(|()| device.stream().unwrap());
            disorder(&second, &streams);
            eventually(&second, "settled", || is_settled(&second));
        }
        sim.assert_clean();
        assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
    }
}

/// All that a helper does, while this thread captures in global mode.
#[test]
fn a_capture_of_another_thread_is_left_alone() {
    Rig::everywhere(|rig| {
        let capturing = rig.stream();
        begin_capture(rig, capturing.handle().raw());
        let streams = [(); 2].map(|()| rig.stream());
        // One with so little that memory has to be moved, one with room to map ahead.
        let pools = [(12, 0), (64, 4)].map(|(limit, ahead)| rig.pool(&helped(limit, OFTEN, ahead)));
        for _ in 0..3 {
            for watched in &pools {
                disorder(&watched.pool, &streams);
                eventually(&watched.pool, "settled", || is_settled(&watched.pool));
            }
        }
        // More than is free, so that the pool grows, and nothing is ahead of it.
        let pool = &pools[1].pool;
        let grown = pool.malloc(30 * GRANULE as usize, &streams[0]).unwrap();
        eventually(pool, "mapped ahead", || pool.stats().mapped_bytes >= 34 * GRANULE);
        pool.free(grown, &streams[0]).unwrap();
        let calls = rig.driver.calls();
        for name in ["cuEventRecord", "cuEventQuery", "cuMemUnmap", "cuMemGetInfo_v2"] {
            assert!(calls.count(name) > 0, "{name}: {calls:?}");
        }
        assert_eq!(end_capture(rig, capturing.handle().raw()), 0, "nodes");
        pools.iter().for_each(|watched| watched.assert_intact());
    });
}

/// A record on the legacy stream would end the capture of a blocking one that begins meanwhile: the
/// helper makes none. What the stream frees is there for those who ask.
#[test]
fn the_legacy_stream_is_left_to_requests() {
    let rig = Rig::simulated(Schedule::Eager);
    let watched = rig.pool(&helped(12, OFTEN, 0));
    let pool = &watched.pool;
    let stream = rig.stream();
    let of_stream = watched.malloc(MIB, &stream);
    let of_legacy = watched.malloc(8 * GRANULE, StreamHandle::LEGACY);
    let (raw, _) = make(&rig, 0);
    // What growth left over was the first stream's.
    eventually(pool, "settled", || pool.stats().pending_bytes == 0);
    begin_capture(&rig, raw);
    let records = rig.driver.calls().count("cuEventRecord");
    pool.free(of_legacy.ptr, StreamHandle::LEGACY).unwrap();
    many_looks();
    assert_eq!(rig.driver.calls().count("cuEventRecord"), records);
    assert_eq!(end_capture(&rig, raw), 0, "nodes");
    let taken = pool.malloc(11 * GRANULE as usize, &stream).unwrap();
    pool.free(taken, &stream).unwrap();
    pool.free(of_stream.ptr, &stream).unwrap();
    call!(rig.driver, cuStreamDestroy_v2(raw));
    watched.assert_intact();
}

gated!(record: cuEventRecord(event: CUevent, stream: CUstream));

/// A stream begins to capture after the helper has seen that it does not, and before the record,
/// which becomes part of the capture. The capture goes on, and the memory comes back later.
#[test]
fn a_record_that_falls_into_a_capture_is_made_again() {
    // With the capture still under way when the helper has recorded, and with it over.
    for ends_meanwhile in [false, true] {
        let sim = Simulator::builder().schedule(Schedule::Eager).build().unwrap();
        let driver = changed(&sim, record::put);
        let rig = Rig::with(driver, sim.clone());
        let pool = Pool::new(&rig.device, &helped(12, OFTEN, 0)).unwrap();
        let (stream, other) = (rig.stream(), rig.stream());
        let raw = stream.handle().raw();
        let _of_other = pool.malloc(KIB as usize, &other).unwrap();
        let ptr = pool.malloc(8 * GRANULE as usize, &stream).unwrap();
        // What growth left over may be the other stream's.
        eventually(&pool, "settled", || pool.stats().pending_bytes == 0);
        record::BEFORE.arm();
        pool.free(ptr, bare(&stream)).unwrap();
        record::BEFORE.wait();
        begin_capture(&rig, raw);
        record::AFTER.arm();
        record::BEFORE.open();
        record::AFTER.wait();
        if ends_meanwhile {
            assert_eq!(end_capture(&rig, raw), 0, "nodes");
            record::AFTER.open();
        } else {
            record::AFTER.open();
            many_looks();
            assert_eq!(end_capture(&rig, raw), 0, "nodes");
        }
        eventually(&pool, "nobody's", || pool.stats().idle_bytes >= 8 * GRANULE);
        pool.validate().unwrap();
        drop((pool, stream, other));
        rig.assert_clean();
    }
}

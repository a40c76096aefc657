//! Calls on capturing streams that have nothing to do with the graph's memory.

use std::time::{Duration, Instant};

use cuda_sim::{Schedule, Simulator};
use vpmm::{Error, Location, Sharing, StreamHandle};

use crate::graph::{self, MODES, RELAXED};
use crate::rig::{GRANULE, LIMIT, MIB, Profile};
use crate::support::changed::{Gate, changed, gated};
use crate::support::{Rig, Watched, call};

fn everywhere(test: impl Fn(&Rig, Profile)) {
    Rig::everywhere(|rig| Profile::BOTH.iter().for_each(|profile| test(rig, *profile)));
}

#[test]
fn ordinary_memory_may_be_freed_in_a_capture() {
    everywhere(|rig, profile| {
        let watched = rig.pool(profile, Location::Device);
        let pool = &watched.pool;
        let owned = rig.stream();
        let raw = graph::Raw::new(rig, false);
        for stream in [owned.handle(), raw.handle()] {
            for mode in MODES {
                let before = [(); 2].map(|()| pool.malloc(GRANULE as usize, stream).unwrap());
                // A kernel's first launch may wait for the device.
                rig.fill(before[0].address(), GRANULE, 2, stream);
                let stall = rig.stall(stream);
                rig.fill(before[0].address(), GRANULE, 3, stream);
                let graphs = pool.graph_pool().unwrap();
                graphs.begin(stream).unwrap();
                graph::begin(rig, stream, mode);
                for ptr in before {
                    pool.free(ptr, stream).unwrap();
                    let again = pool.free(ptr, stream);
                    assert!(
                        matches!(again, Err(Error::DoubleFree { .. } | Error::StalePointer { .. })),
                        "{again:?}"
                    );
                }
                let scratch = pool.malloc(MIB as usize, stream).unwrap();
                rig.fill(scratch.address(), MIB, 1, stream);
                pool.free(scratch, stream).unwrap();
                let mut graph = graph::stop(rig, stream);
                graphs.end(stream).unwrap();
                // Another stream does not get it before the work from before the capture is done.
                let other = rig.stream();
                let taken = watched.malloc(2 * GRANULE, &other);
                drop(stall);
                graph.prepare();
                watched.free(taken, &other);
                graph.launch(stream);
                graphs.release(stream).unwrap();
                watched.assert_intact();
                drop(graph);
            }
        }
    });
}

/// What a stream did before its capture is as little over when further streams have finished as when they
/// have not.
#[test]
fn ordinary_memory_with_further_uses_may_be_freed_in_a_capture() {
    everywhere(|rig, profile| {
        let watched = rig.pool(profile, Location::Device);
        let (raw, further, other) = (graph::Raw::new(rig, false), rig.stream(), rig.stream());
        let stream = raw.handle();
        let ptr = watched.pool.malloc(GRANULE as usize, stream).unwrap();
        rig.fill(ptr.address(), GRANULE, 6, stream);
        rig.order(stream, &further);
        rig.check(ptr.address(), GRANULE, 6, further.handle());
        // Of its own stream, too, which changes nothing.
        for used in [stream, further.handle()] {
            watched.pool.record_stream(ptr, used).unwrap();
        }
        rig.order(&further, stream);
        let stall = rig.stall(stream);
        rig.fill(ptr.address(), GRANULE, 7, stream);
        let graphs = watched.pool.graph_pool().unwrap();
        graphs.begin(stream).unwrap();
        graph::begin(rig, stream, RELAXED);
        watched.pool.free(ptr, stream).unwrap();
        further.synchronize().unwrap();
        let taken = [(); 3].map(|()| watched.malloc(GRANULE, &other));
        assert!(taken.iter().all(|taken| taken.address() != ptr.address()));
        let graph = graph::stop(rig, stream);
        graphs.end(stream).unwrap();
        taken.into_iter().for_each(|taken| watched.free(taken, &other));
        drop(stall);
        rig.device.synchronize().unwrap();
        graphs.release(stream).unwrap();
        watched.assert_intact();
        drop(graph);
    });
}

/// Memory that only a wait for the whole context would free is not worth a capture, which that would end.
#[test]
fn a_request_that_finds_no_memory_ends_no_capture() {
    Rig::everywhere(|rig| {
        for (blocking, of_graphs_pool, owned) in
            [(false, true, false), (true, false, false), (false, false, true)]
        {
            let watched = rig.pool(Profile::Default, Location::Device);
            let beside = rig.pool(Profile::Default, Location::Device);
            let (other, capturing) = (rig.stream(), rig.stream());
            let ended = rig.stream();
            let held = watched.malloc(2 * GRANULE, &ended);
            graph::begin(rig, &ended, RELAXED);
            watched.pool.free(held.ptr, &ended).unwrap();
            drop(ended);
            // The pools know of it by the stream, or by the graph's pool, of whichever of them; of a
            // blocking one by the legacy stream.
            let raw = graph::Raw::new(rig, blocking);
            let stream = if owned { capturing.handle() } else { raw.handle() };
            let known = watched.pool.malloc(MIB as usize, &capturing).unwrap();
            watched.pool.free(known, &capturing).unwrap();
            let graphs = beside.pool.graph_pool().unwrap();
            if of_graphs_pool {
                graphs.begin(stream).unwrap();
            }
            graph::begin(rig, stream, RELAXED);
            let refused = watched.pool.malloc((LIMIT * GRANULE) as usize, &other);
            let graph = graph::stop(rig, stream);
            let error = refused.expect_err("some of it is not known to be free");
            assert!(error.is_out_of_memory(), "{error}");
            if of_graphs_pool {
                graphs.end(stream).unwrap();
            }
            let all = watched.pool.malloc((LIMIT * GRANULE) as usize, &other).unwrap();
            watched.pool.free(all, &other).unwrap();
            watched.assert_intact();
            drop(graph);
        }
    });
}

static LEGACY_QUESTION: Gate = Gate::new();

mod question {
    use super::LEGACY_QUESTION;
    use crate::support::changed::replaced;

    const LEGACY: usize = 1;

    replaced!(
        cuStreamIsCapturing(stream: CUstream, status: *mut CUstreamCaptureStatus),
        if stream as usize == LEGACY { LEGACY_QUESTION.pass() }
    );
}

/// A thread finds that nothing captures, and is about to wait for the context. Meanwhile a capture begins.
#[test]
fn a_capture_that_begins_before_the_wait_is_not_ended() {
    let sim = Simulator::builder().build().unwrap();
    let rig = Rig::with(changed(&sim, question::put), sim.clone());
    let watched = rig.pool(Profile::Default, Location::Device);
    let pool = &watched.pool;
    let (other, ended) = (rig.stream(), rig.stream());
    let held = watched.malloc(2 * GRANULE, &ended);
    graph::begin(&rig, &ended, RELAXED);
    pool.free(held.ptr, &ended).unwrap();
    drop(ended);
    let graphs = pool.graph_pool().unwrap();
    let raw = graph::Raw::new(&rig, false);
    LEGACY_QUESTION.arm();
    let refused = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| pool.malloc((LIMIT * GRANULE) as usize, &other));
        LEGACY_QUESTION.wait();
        graphs.begin(raw.handle()).unwrap();
        graph::begin(&rig, raw.handle(), RELAXED);
        LEGACY_QUESTION.open();
        waiting.join().unwrap()
    });
    drop(graph::stop(&rig, raw.handle()));
    graphs.end(raw.handle()).unwrap();
    assert!(refused.expect_err("some of it is not known to be free").is_out_of_memory());
    watched.assert_intact();
}

#[test]
fn beside_a_capture_other_streams_and_threads_go_on() {
    everywhere(|rig, profile| {
        let watched = rig.pool(profile, Location::Device);
        let stream = rig.stream();
        let graphs = watched.pool.graph_pool().unwrap();
        graphs.begin(&stream).unwrap();
        graph::begin(rig, &stream, MODES[1]);
        let scratch = watched.pool.malloc(MIB as usize, &stream).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (own, raw) = (rig.stream(), graph::Raw::new(rig, true));
                for stream in [own.handle(), raw.handle(), StreamHandle::PER_THREAD] {
                    for _ in 0..10 {
                        let held = watched.malloc(MIB, stream);
                        watched.free(held, stream);
                    }
                }
            });
        });
        assert_eq!(graphs.stats().live_count, 1);
        watched.pool.free(scratch, &stream).unwrap();
        drop(graph::end(rig, &stream));
        graphs.end(&stream).unwrap();
        graphs.release(&stream).unwrap();
        watched.assert_intact();
    });
}

#[test]
fn a_graph_memory_freed_elsewhere_serves_the_next_capture_in_order() {
    everywhere(|rig, profile| {
        let watched = rig.pool(profile, Location::Device);
        let pool = &watched.pool;
        let (stream, other) = (rig.stream(), rig.stream());
        let graphs = pool.graph_pool().unwrap();
        graphs.begin(&stream).unwrap();
        graph::begin(rig, &stream, RELAXED);
        let output = pool.malloc(MIB as usize, &stream).unwrap();
        rig.fill(output.address(), MIB, 4, stream.handle());
        let first = graph::end(rig, &stream);
        graphs.end(&stream).unwrap();
        first.launch(&stream);
        rig.order(&stream, &other);
        rig.check(output.address(), MIB, 4, other.handle());
        pool.free(output, &other).unwrap();
        rig.device.synchronize().unwrap();
        graphs.begin(&stream).unwrap();
        graph::begin(rig, &stream, RELAXED);
        let second = pool.malloc(MIB as usize, &stream).unwrap();
        rig.fill(second.address(), MIB, 5, stream.handle());
        let graph = graph::end(rig, &stream);
        graphs.end(&stream).unwrap();
        graph.launch(&stream);
        rig.check(second.address(), MIB, 5, stream.handle());
        pool.free(second, &stream).unwrap();
        graphs.release(&stream).unwrap();
        watched.assert_intact();
        drop(first);
    });
}

#[test]
fn threads_capture_at_the_same_time() {
    everywhere(|rig, profile| {
        let pool = profile.open(&rig.device, Location::Device, Sharing::None).unwrap();
        let watched = Watched::new(rig, pool, 256, false);
        std::thread::scope(|scope| {
            for number in 1..=3_u64 {
                let watched = &watched;
                scope.spawn(move || {
                    let pool = &watched.pool;
                    let (owned, raw) = (rig.stream(), graph::Raw::new(rig, number % 2 == 0));
                    let other = rig.stream();
                    for round in 0..8 {
                        let stream = if round % 2 == 0 { owned.handle() } else { raw.handle() };
                        let seed = number << 50 | round << 40;
                        let graphs = pool.graph_pool().unwrap();
                        graphs.begin(stream).unwrap();
                        graph::begin(rig, stream, MODES[1]);
                        let scratch = pool.malloc(MIB as usize, stream).unwrap();
                        let ordinary = watched.malloc(MIB / 2, &other);
                        rig.fill(scratch.address(), MIB, seed, stream);
                        rig.check(scratch.address(), MIB, seed, stream);
                        pool.free(scratch, stream).unwrap();
                        watched.free(ordinary, &other);
                        let graph = graph::end(rig, stream);
                        graphs.end(stream).unwrap();
                        (0..5).for_each(|_| graph.launch(stream));
                        graphs.release(stream).unwrap();
                    }
                });
            }
        });
        watched.assert_intact();
    });
}

#[test]
fn a_stream_that_ends_ends_what_had_begun_on_it() {
    everywhere(|rig, profile| {
        let watched = rig.pool(profile, Location::Device);
        let pool = &watched.pool;
        let stream = rig.stream();
        let graphs = pool.graph_pool().unwrap();
        graphs.begin(&stream).unwrap();
        let live = pool.malloc(MIB as usize, &stream).unwrap();
        drop(stream);
        let stream = rig.stream();
        let held = watched.malloc(MIB, &stream);
        watched.free(held, &stream);
        assert_eq!(graphs.stats().live_count, 1);
        pool.free(live, &stream).unwrap();
        assert_eq!(graphs.stats().live_count, 0);
        assert!(matches!(graphs.end(&stream), Err(Error::GraphPool { .. })));
        graphs.release(&stream).unwrap();
        watched.assert_intact();
    });
}

gated!(create: cuMemCreate(
    handle: *mut CUmemGenericAllocationHandle,
    bytes: usize,
    properties: *const CUmemAllocationProp,
    flags: u64
));

/// A request in one capture lasts: the driver makes memory, or the host waits for some. Whoever ends another one
/// does not wait for that, nor with all who come after.
#[test]
fn a_request_in_one_capture_keeps_nobody_from_ending_another() {
    for profile in Profile::BOTH {
        let sim = Simulator::builder().build().unwrap();
        let rig = Rig::with(changed(&sim, create::put), sim.clone());
        let watched = rig.pool(profile, Location::Device);
        let pool = &watched.pool;
        let streams = [rig.stream(), rig.stream()];
        let graphs = [(); 2].map(|()| pool.graph_pool().unwrap());
        for (graphs, stream) in graphs.iter().zip(&streams) {
            graphs.begin(stream).unwrap();
            graph::begin(&rig, stream, RELAXED);
        }
        let early = pool.malloc(MIB as usize, &streams[1]).unwrap();
        create::BEFORE.arm();
        let (late, has_ended) = std::thread::scope(|scope| {
            let asks = scope.spawn(|| pool.malloc(MIB as usize, &streams[0]).unwrap());
            create::BEFORE.wait();
            let ends = scope.spawn(|| graphs[1].end(&streams[1]).unwrap());
            let begin = Instant::now();
            while !ends.is_finished() && begin.elapsed() < Duration::from_secs(10) {
                std::thread::sleep(Duration::from_millis(1));
            }
            let has_ended = ends.is_finished();
            create::BEFORE.open();
            ends.join().unwrap();
            (asks.join().unwrap(), has_ended)
        });
        assert!(has_ended, "{profile:?}");
        graphs[0].end(&streams[0]).unwrap();
        for (stream, ptr) in streams.iter().zip([late, early]) {
            drop(graph::stop(&rig, stream));
            pool.free(ptr, stream).unwrap();
        }
        watched.assert_intact();
    }
}

/// A thread frees on its own default stream in a capture. When that is over another thread comes by first, which means
/// another stream by the same handle: what the first thread's does with the memory is still ahead.
#[test]
fn a_free_on_a_threads_own_stream_in_a_capture_is_that_streams() {
    for profile in Profile::BOTH {
        let rig = Rig::simulated(Schedule::Eager);
        let watched = rig.pool(profile, Location::Device);
        let (pool, own) = (&watched.pool, StreamHandle::PER_THREAD);
        let all = LIMIT * GRANULE;
        let come_by = || {
            call!(rig.driver, cuCtxSetCurrent(rig.device.context()));
            let stream = rig.stream();
            let graphs = pool.graph_pool().unwrap();
            graphs.begin(&stream).unwrap();
            graphs.end(&stream).unwrap();
            pool.malloc(all as usize, &stream).map(|ptr| pool.free(ptr, &stream).unwrap())
        };
        for ends in [false, true] {
            let freed_in_capture = || {
                call!(rig.driver, cuCtxSetCurrent(rig.device.context()));
                let ptr = pool.malloc(all as usize, own).unwrap();
                let stall = rig.stall(own);
                rig.fill(ptr.address(), all, 1, own);
                let graphs = pool.graph_pool().unwrap();
                graphs.begin(own).unwrap();
                graph::begin(&rig, own, RELAXED);
                pool.free(ptr, own).unwrap();
                drop(graph::stop(&rig, own));
                let others = std::thread::scope(|scope| scope.spawn(come_by).join().unwrap());
                assert!(others.is_err_and(|error| error.is_out_of_memory()), "{profile:?}");
                drop(stall);
                // One whose thread ends without this stays until the host has waited for the device.
                if !ends {
                    graphs.end(own).unwrap();
                }
            };
            std::thread::scope(|scope| scope.spawn(freed_in_capture).join().unwrap());
            if ends {
                rig.device.synchronize().unwrap();
            }
            come_by().unwrap();
        }
        watched.assert_intact();
    }
}

gated!(query: cuEventQuery(event: CUevent));

/// A thread that looks whether a released graph's memory is unused stops. Meanwhile another finds that it is, and
/// its stream ends, which nobody is told any more.
#[test]
fn a_stream_of_a_graph_that_has_gone_is_not_asked() {
    for profile in Profile::BOTH {
        let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
        let rig = Rig::with(changed(&sim, query::put), sim.clone());
        let watched = rig.pool(profile, Location::Device);
        let pool = &watched.pool;
        let stream = rig.stream();
        let graphs = pool.graph_pool().unwrap();
        graphs.begin(&stream).unwrap();
        graph::begin(&rig, &stream, RELAXED);
        let live = pool.malloc(MIB as usize, &stream).unwrap();
        drop(graph::stop(&rig, &stream));
        graphs.end(&stream).unwrap();
        graphs.release(&stream).unwrap();
        sim.run_until_idle();
        query::BEFORE.arm();
        std::thread::scope(|scope| {
            let asker = scope.spawn(|| pool.trim_to(0).unwrap());
            query::BEFORE.wait();
            pool.free(live, &stream).unwrap();
            sim.run_until_idle();
            pool.trim_to(0).unwrap();
            let left = pool.stats().mapped_bytes;
            drop(stream);
            sim.run_until_idle();
            query::BEFORE.open();
            asker.join().unwrap();
            assert_eq!(left, 0, "it had gone");
        });
        watched.assert_intact();
    }
}

gated!(current: cuCtxGetCurrent(context: *mut CUcontext));

/// The pool's main heap knows that a stream ends, the others not yet. Meanwhile another thread sees to frees of
/// captures that are over: one on that stream cannot be made there any more, and is left to a wait for the device.
#[test]
fn a_free_of_a_capture_beside_the_end_of_its_stream_is_not_lost() {
    let sim = Simulator::builder().build().unwrap();
    let rig = Rig::with(changed(&sim, current::put), sim.clone());
    let watched = rig.pool(Profile::Paged, Location::Device);
    let pool = &watched.pool;
    let (stream, other) = (rig.stream(), rig.stream());
    let ptr = pool.malloc(GRANULE as usize, &stream).unwrap();
    let graphs = pool.graph_pool().unwrap();
    graphs.begin(&stream).unwrap();
    graph::begin(&rig, &stream, RELAXED);
    pool.free(ptr, &stream).unwrap();
    drop(graph::stop(&rig, &stream));
    std::thread::scope(|scope| {
        current::BEFORE.arm();
        scope.spawn(|| drop(stream));
        current::BEFORE.wait();
        graphs.begin(&other).unwrap();
        graphs.end(&other).unwrap();
        current::BEFORE.open();
    });
    rig.device.synchronize().unwrap();
    assert_eq!(pool.stats().live_count, 0);
    watched.assert_intact();
}

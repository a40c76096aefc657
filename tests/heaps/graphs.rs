//! Memory that is taken in captures, and the graphs that use it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cuda_sim::Simulator;
use cuda_sys::types::CUresult;
use vpmm::{DevicePtr, Error, GraphPool, Location, Pool, Sharing, Stream, StreamHandle};

use crate::graph::{self, Graph, MODES, RELAXED};
use crate::rig::{GRANULE, LIMIT, MIB, Profile};
use crate::support::changed::{changed, gated};
use crate::support::{Rig, Stall, Watched, call};

/// A captured program over memory from the graph's pool: a scratch block is filled, copied and
/// freed, its memory used again, and an output written. Answers the graph and the output.
fn capture<'a>(
    rig: &'a Rig,
    watched: &Watched<'_>,
    stream: StreamHandle,
    seed: u64,
) -> (Graph<'a>, DevicePtr) {
    let pool = &watched.pool;
    let scratch = pool.malloc(3 * MIB as usize, stream).unwrap();
    let output = pool.malloc(MIB as usize, stream).unwrap();
    rig.fill(scratch.address(), 3 * MIB, seed, stream);
    rig.check(scratch.address(), 3 * MIB, seed, stream);
    graph::copy(rig, output.address(), scratch.address(), MIB, stream);
    pool.free(scratch, stream).unwrap();
    let again = pool.malloc(3 * MIB as usize, stream).unwrap();
    assert_eq!(again.address(), scratch.address(), "freed in the capture, used again in it");
    rig.fill(again.address(), 3 * MIB, seed + 1, stream);
    rig.check(again.address(), 3 * MIB, seed + 1, stream);
    pool.free(again, stream).unwrap();
    rig.fill(output.address(), MIB, seed + 2, stream);
    (graph::end(rig, stream), output)
}

fn everywhere(test: impl Fn(&Rig, Profile)) {
    Rig::everywhere(|rig| Profile::BOTH.iter().for_each(|profile| test(rig, *profile)));
}

#[test]
fn a_graph_runs_a_thousand_times_beside_ordinary_traffic() {
    everywhere(|rig, profile| {
        // Other threads use the pool: its invariants are checked at the end.
        let pool = profile.open(&rig.device, Location::Device, Sharing::None).unwrap();
        let watched = Watched::new(rig, pool, 256, false);
        let stream = rig.stream();
        let graphs = watched.pool.graph_pool().unwrap();
        graphs.begin(&stream).unwrap();
        graph::begin(rig, &stream, MODES[1]);
        let (graph, output) = capture(rig, &watched, stream.handle(), 7 << 40);
        graphs.end(&stream).unwrap();
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let own = rig.stream();
                    let mut held = Vec::new();
                    let mut round = 0;
                    while !over.load(Ordering::Relaxed) || round < 50 {
                        held.push(watched.malloc((1 + round % 3) * MIB / 2, &own));
                        if held.len() > 3 {
                            watched.free(held.remove(round as usize % 3), &own);
                        }
                        round += 1;
                    }
                    held.into_iter().for_each(|held| watched.free(held, &own));
                });
            }
            for launch in 0..1000 {
                graph.launch(&stream);
                if launch % 10 == 0 {
                    let held = watched.malloc(MIB, &stream);
                    rig.check(output.address(), MIB, (7 << 40) + 2, stream.handle());
                    watched.free(held, &stream);
                }
            }
            over.store(true, Ordering::Relaxed);
        });
        watched.assert_intact();
        watched.pool.free(output, &stream).unwrap();
        graphs.release(&stream).unwrap();
        drop(graph);
    });
}

#[test]
fn every_mode_and_every_kind_of_stream() {
    everywhere(|rig, profile| {
        let watched = rig.pool(profile, Location::Device);
        let owned = rig.stream();
        let raw = [false, true].map(|blocking| graph::Raw::new(rig, blocking));
        // SAFETY: the streams live to the end.
        let bare = unsafe { StreamHandle::from_raw(owned.handle().raw()) };
        let streams =
            [owned.handle(), bare, raw[0].handle(), raw[1].handle(), StreamHandle::PER_THREAD];
        for (index, stream) in streams.into_iter().enumerate() {
            for mode in MODES {
                for begin_first in [true, false] {
                    let graphs = watched.pool.graph_pool().unwrap();
                    if begin_first {
                        graphs.begin(stream).unwrap();
                    }
                    graph::begin(rig, stream, mode);
                    if !begin_first {
                        graphs.begin(stream).unwrap();
                    }
                    let seed = (index as u64 + 1) << 44;
                    let (graph, output) = capture(rig, &watched, stream, seed);
                    graphs.end(stream).unwrap();
                    for _ in 0..3 {
                        graph.launch(stream);
                    }
                    rig.check(output.address(), MIB, seed + 2, stream);
                    watched.pool.free(output, stream).unwrap();
                    graphs.release(stream).unwrap();
                    assert_eq!(rig.mismatches(), 0, "stream {index}, {mode:?}");
                    drop(graphs);
                    watched.validate();
                }
            }
        }
        goes_back(&watched.pool, || watched.pool.stats().mapped_bytes);
    });
}

#[test]
fn forked_streams_take_part_and_others_do_not() {
    everywhere(|rig, profile| {
        let watched = rig.pool(profile, Location::Device);
        let pool = &watched.pool;
        let (stream, owned, other) = (rig.stream(), rig.stream(), rig.stream());
        let raw = graph::Raw::new(rig, true);
        let graphs = pool.graph_pool().unwrap();
        graphs.begin(&stream).unwrap();
        graph::begin(rig, &stream, RELAXED);
        let ordinary = watched.malloc(MIB, &other);
        let first = pool.malloc(MIB as usize, &stream).unwrap();
        let mut outputs = Vec::new();
        for fork in [owned.handle(), raw.handle()] {
            // Before it is forked it is a stream like any other.
            if profile == Profile::Default || fork == owned.handle() {
                let before = watched.malloc(MIB, fork);
                watched.free(before, fork);
            }
            rig.order(&stream, fork);
            let scratch = pool.malloc(MIB as usize, fork).unwrap();
            rig.fill(scratch.address(), MIB, 5, fork);
            pool.free(scratch, fork).unwrap();
            let output = pool.malloc(MIB as usize, fork).unwrap();
            assert_eq!(output.address(), scratch.address(), "the fork's own again");
            rig.fill(output.address(), MIB, fork.raw() as u64, fork);
            outputs.push((output, fork.raw() as u64));
            rig.order(fork, &stream);
        }
        let graph_bytes = graphs.stats().live_bytes;
        assert!(graph_bytes >= 3 * MIB, "{graph_bytes} bytes are the graph's");
        rig.fill(first.address(), MIB, 9, stream.handle());
        let graph = graph::end(rig, &stream);
        graphs.end(&stream).unwrap();
        watched.free(ordinary, &other);
        graph.launch(&other);
        for (output, seed) in outputs {
            rig.check(output.address(), MIB, seed, other.handle());
            pool.free(output, &other).unwrap();
        }
        pool.free(first, &other).unwrap();
        graphs.release(&other).unwrap();
        watched.assert_intact();
    });
}

#[test]
fn forks_that_run_side_by_side_share_nothing() {
    everywhere(|rig, profile| {
        let watched = rig.pool(profile, Location::Device);
        let pool = &watched.pool;
        let (stream, left, right) = (rig.stream(), rig.stream(), rig.stream());
        let graphs = pool.graph_pool().unwrap();
        graphs.begin(&stream).unwrap();
        graph::begin(rig, &stream, RELAXED);
        let scratch = |on: &vpmm::Stream, seed| {
            let scratch = pool.malloc(MIB as usize, on).unwrap();
            rig.fill(scratch.address(), MIB, seed, on.handle());
            pool.free(scratch, on).unwrap();
        };
        scratch(&stream, 1);
        let forks = [&left, &right];
        forks.iter().for_each(|fork| rig.order(&stream, *fork));
        for turn in 0..8 {
            scratch(forks[turn % 2], 2 + turn as u64);
        }
        scratch(&stream, 10);
        forks.iter().for_each(|fork| rig.order(*fork, &stream));
        scratch(&stream, 11);
        let graph = graph::end(rig, &stream);
        graphs.end(&stream).unwrap();
        graph.launch(&stream);
        graph.launch(&stream);
        graphs.release(&stream).unwrap();
        drop(graph);
        watched.assert_intact();
    });
}

#[test]
fn two_graphs_share_a_pool_one_after_another() {
    everywhere(|rig, profile| {
        let watched = rig.pool(profile, Location::Device);
        let stream = rig.stream();
        let graphs = watched.pool.graph_pool().unwrap();
        let mut captured = Vec::new();
        for seed in [1 << 40, 2 << 40] {
            graph::begin(rig, &stream, MODES[0]);
            graphs.begin(&stream).unwrap();
            captured.push(capture(rig, &watched, stream.handle(), seed));
            graphs.end(&stream).unwrap();
        }
        // What the first freed served the second.
        assert!(graphs.stats().mapped_bytes <= 4 * GRANULE, "{:?}", graphs.stats());
        for _ in 0..20 {
            for ((graph, output), seed) in captured.iter().zip([1 << 40, 2 << 40]) {
                graph.launch(&stream);
                rig.check(output.address(), MIB, seed + 2, stream.handle());
            }
        }
        for (_, output) in &captured {
            watched.pool.free(*output, &stream).unwrap();
        }
        graphs.release(&stream).unwrap();
        watched.assert_intact();
    });
}

/// Whatever looks after the heaps finds out, as often as it has to ask, that a graph's memory can go.
fn goes_back(pool: &Pool, held: impl Fn() -> u64) {
    let gone = (0..20).any(|_| {
        pool.trim_to(u64::MAX).unwrap();
        held() == 0
    });
    assert!(gone, "{} bytes are still held", held());
}

/// A released graph's memory stays while a stalled stream is still to read it, and goes when it has.
fn goes_back_after(pool: &Pool, graphs: &GraphPool, stall: Stall<'_>, stream: &Stream) {
    let held = || graphs.stats().mapped_bytes;
    pool.trim_to(0).unwrap();
    assert!(held() > 0, "the stream is still to read it");
    drop(stall);
    stream.synchronize().unwrap();
    goes_back(pool, held);
}

/// An open graph's pool with a graph that ran, and its output.
fn ran<'a>(
    rig: &'a Rig,
    watched: &Watched<'_>,
    stream: StreamHandle,
) -> (GraphPool, Graph<'a>, DevicePtr) {
    let graphs = watched.pool.graph_pool().unwrap();
    graphs.begin(stream).unwrap();
    graph::begin(rig, stream, MODES[0]);
    let (graph, output) = capture(rig, watched, stream, 3 << 40);
    graphs.end(stream).unwrap();
    (graphs, graph, output)
}

#[test]
fn release_waits_for_launches_but_the_host_does_not() {
    everywhere(|rig, profile| {
        let watched = rig.pool(profile, Location::Device);
        let stream = rig.stream();
        let (graphs, graph, output) = ran(rig, &watched, stream.handle());
        watched.pool.free(output, &stream).unwrap();
        // The first launch may wait for the device.
        graph.launch(&stream);
        stream.synchronize().unwrap();
        let stall = rig.stall(stream.handle());
        graph.launch(&stream);
        graphs.release(&stream).unwrap();
        let held = graphs.stats().mapped_bytes;
        assert!(held > 0, "the launch is still to run");
        assert!(matches!(graphs.release(&stream), Err(Error::GraphPool { .. })));
        assert!(matches!(graphs.begin(&stream), Err(Error::GraphPool { .. })));
        drop(stall);
        stream.synchronize().unwrap();
        goes_back(&watched.pool, || graphs.stats().mapped_bytes);
        watched.assert_intact();
    });
}

#[test]
fn a_trim_tells_of_a_released_graphs_memory_too() {
    everywhere(|rig, profile| {
        let watched = rig.pool(profile, Location::Device);
        let stream = rig.stream();
        let (graphs, graph, output) = ran(rig, &watched, stream.handle());
        watched.pool.free(output, &stream).unwrap();
        graphs.release(&stream).unwrap();
        stream.synchronize().unwrap();
        let free = rig.device.free_memory().unwrap();
        let given = watched.pool.trim_to(0).unwrap();
        assert_eq!(rig.device.free_memory().unwrap() - free, given);
        watched.assert_intact();
        drop(graph);
    });
}

/// A stream that freed some of it has ended in a capture of its own: only a wait for the device, which would
/// end the other capture, proves that it has finished.
#[test]
fn a_graphs_memory_goes_beside_a_capture_or_after_it() {
    everywhere(|rig, profile| {
        for has_finished in [true, false] {
            let watched = rig.pool(profile, Location::Device);
            let (stream, ended, capturing) = (rig.stream(), rig.stream(), rig.stream());
            let (graphs, graph, output) = ran(rig, &watched, stream.handle());
            rig.order(&stream, &ended);
            watched.pool.free(output, &ended).unwrap();
            graph::begin(rig, &ended, MODES[2]);
            drop(ended);
            if has_finished {
                rig.device.synchronize().unwrap();
            }
            graph::begin(rig, &capturing, MODES[2]);
            graphs.release(&stream).unwrap();
            let held = || graphs.stats().mapped_bytes;
            if has_finished {
                goes_back(&watched.pool, held);
            } else {
                watched.pool.trim_to(0).unwrap();
            }
            drop(graph::end(rig, &capturing));
            rig.device.synchronize().unwrap();
            goes_back(&watched.pool, held);
            watched.assert_intact();
            drop(graph);
        }
    });
}

/// Work of before the capture reads a graph's output, which is freed in that capture, another graph's perhaps. The
/// stream of the release comes after the launches alone.
#[test]
fn what_is_freed_in_a_capture_keeps_the_memory_until_the_stream_has_read_it() {
    everywhere(|rig, profile| {
        for captures in [true, false] {
            let watched = rig.pool(profile, Location::Device);
            let pool = &watched.pool;
            let (stream, releasing) = (rig.stream(), rig.stream());
            let (graphs, graph, output) = ran(rig, &watched, stream.handle());
            graph.launch(&stream);
            rig.order(&stream, &releasing);
            rig.check(output.address(), MIB, (3 << 40) + 2, stream.handle());
            stream.synchronize().unwrap();
            let stall = rig.stall(stream.handle());
            rig.check(output.address(), MIB, (3 << 40) + 2, stream.handle());
            let others = pool.graph_pool().unwrap();
            others.begin(&stream).unwrap();
            if captures {
                graph::begin(rig, &stream, MODES[2]);
            }
            pool.free(output, &stream).unwrap();
            if captures {
                drop(graph::stop(rig, &stream));
            }
            others.end(&stream).unwrap();
            graphs.release(&releasing).unwrap();
            releasing.synchronize().unwrap();
            goes_back_after(pool, &graphs, stall, &stream);
            watched.assert_intact();
            drop(graph);
        }
    });
}

/// As of before: what was allocated between the begin of a graph's pool and the capture, and used meanwhile.
#[test]
fn what_is_made_between_begin_and_capture_keeps_the_memory_until_the_stream_has_read_it() {
    everywhere(|rig, profile| {
        let watched = rig.pool(profile, Location::Device);
        let pool = &watched.pool;
        let (stream, releasing) = (rig.stream(), rig.stream());
        let graphs = pool.graph_pool().unwrap();
        graphs.begin(&stream).unwrap();
        let early = pool.malloc(MIB as usize, &stream).unwrap();
        rig.fill(early.address(), MIB, 7, stream.handle());
        rig.check(early.address(), MIB, 7, stream.handle());
        stream.synchronize().unwrap();
        let stall = rig.stall(stream.handle());
        rig.check(early.address(), MIB, 7, stream.handle());
        graph::begin(rig, &stream, MODES[2]);
        pool.free(early, &stream).unwrap();
        drop(graph::stop(rig, &stream));
        graphs.end(&stream).unwrap();
        graphs.release(&releasing).unwrap();
        releasing.synchronize().unwrap();
        goes_back_after(pool, &graphs, stall, &stream);
        watched.assert_intact();
    });
}

/// Memory that is not the graph's is freed in a capture that is over only after the end of the graph's pool: the
/// next call of any graph's pool sees to it, the release among them.
#[test]
fn a_release_sees_to_frees_of_a_capture_that_went_on() {
    everywhere(|rig, profile| {
        let watched = rig.pool(profile, Location::Device);
        let pool = &watched.pool;
        let raw = graph::Raw::new(rig, false);
        let stream = raw.handle();
        let ptr = pool.malloc(GRANULE as usize, stream).unwrap();
        let graphs = pool.graph_pool().unwrap();
        graphs.begin(stream).unwrap();
        graph::begin(rig, stream, MODES[2]);
        pool.free(ptr, stream).unwrap();
        graphs.end(stream).unwrap();
        drop(graph::stop(rig, stream));
        graphs.release(stream).unwrap();
        call!(rig.driver, cuStreamSynchronize(stream.raw()));
        pool.trim_to(0).unwrap();
        assert_eq!(pool.stats().mapped_bytes, 0, "{profile:?}");
        watched.assert_intact();
    });
}

/// As above, where there is no such call any more: the graph's pool was dropped, in the capture or after it. The
/// drop sees to them then, or the next wait for the device.
#[test]
fn frees_of_a_capture_that_went_on_are_made_though_the_graphs_pool_is_gone() {
    everywhere(|rig, profile| {
        for drops_in_capture in [false, true] {
            let watched = rig.pool(profile, Location::Device);
            let pool = &watched.pool;
            let raw = graph::Raw::new(rig, false);
            let (stream, other) = (raw.handle(), rig.stream());
            let before = pool.malloc(GRANULE as usize, stream).unwrap();
            let graphs = pool.graph_pool().unwrap();
            graphs.begin(stream).unwrap();
            graph::begin(rig, stream, RELAXED);
            pool.free(before, stream).unwrap();
            graphs.end(stream).unwrap();
            let mut graphs = Some(graphs);
            if drops_in_capture {
                graphs = None;
            }
            drop(graph::stop(rig, stream));
            drop(graphs);
            if drops_in_capture {
                rig.device.synchronize().unwrap();
            }
            assert_eq!(pool.stats().live_count, 0, "{drops_in_capture}");
            watched.free(watched.malloc(LIMIT * GRANULE, &other), &other);
            rig.device.synchronize().unwrap();
            pool.trim_to(0).unwrap();
            assert_eq!(pool.stats().mapped_bytes, 0, "{drops_in_capture}");
            watched.assert_intact();
        }
    });
}

/// Of a pool whose last handle goes then nothing is allocated any more.
#[test]
fn a_pool_ends_after_frees_of_a_capture_that_went_on() {
    everywhere(|rig, profile| {
        let pool = profile.open(&rig.device, Location::Device, Sharing::None).unwrap();
        let raw = graph::Raw::new(rig, false);
        let before = pool.malloc(GRANULE as usize, raw.handle()).unwrap();
        let graphs = pool.graph_pool().unwrap();
        graphs.begin(raw.handle()).unwrap();
        graph::begin(rig, raw.handle(), RELAXED);
        pool.free(before, raw.handle()).unwrap();
        graphs.end(raw.handle()).unwrap();
        drop(graph::stop(rig, raw.handle()));
        drop((graphs, pool));
        assert!(Pool::of(&rig.driver, before.address()).is_none(), "{profile:?}");
    });
}

/// As above, where the stream ends before any such call: its end sees to them.
#[test]
fn a_streams_end_sees_to_frees_of_a_capture_that_went_on() {
    Rig::everywhere(|rig| {
        for goes_on in [false, true] {
            let watched = rig.pool(Profile::Default, Location::Device);
            let (pool, heap) = (&watched.pool, watched.pool.tagged("weights").unwrap());
            let (stream, other) = (rig.stream(), rig.stream());
            // SAFETY: the stream is alive at each call that the handle is passed to.
            let bare = unsafe { StreamHandle::from_raw(stream.handle().raw()) };
            let ptr = pool.malloc(GRANULE as usize, bare).unwrap();
            let of_heap = heap.malloc(GRANULE as usize, &other).unwrap();
            let graphs = pool.graph_pool().unwrap();
            graphs.begin(&stream).unwrap();
            graph::begin(rig, &stream, MODES[2]);
            pool.free(ptr, bare).unwrap();
            heap.free(of_heap, &stream).unwrap();
            graphs.end(&stream).unwrap();
            if !goes_on {
                drop(graph::stop(rig, &stream));
            }
            drop(stream);
            let all = watched.malloc(LIMIT * GRANULE, &other);
            watched.free(all, &other);
            watched.assert_intact();
        }
    });
}

#[test]
fn what_is_live_at_the_release_keeps_the_memory() {
    everywhere(|rig, profile| {
        let watched = rig.pool(profile, Location::Device);
        let stream = rig.stream();
        let (graphs, graph, output) = ran(rig, &watched, stream.handle());
        graph.launch(&stream);
        graphs.release(&stream).unwrap();
        stream.synchronize().unwrap();
        drop(watched.pool.graph_pool().unwrap());
        assert!(graphs.stats().mapped_bytes > 0);
        rig.check(output.address(), MIB, (3 << 40) + 2, stream.handle());
        watched.pool.free(output, &stream).unwrap();
        stream.synchronize().unwrap();
        goes_back(&watched.pool, || graphs.stats().mapped_bytes);
        watched.assert_intact();
        drop(graph);
    });
}

/// A stream that is never without work, and keeps what it has freed since nobody else has any of the heap, would
/// always have some later event to wait for.
#[test]
fn what_a_busy_stream_freed_last_goes_back() {
    everywhere(|rig, profile| {
        let watched = rig.pool(profile, Location::Device);
        let stream = rig.stream();
        let graphs = watched.pool.graph_pool().unwrap();
        graphs.begin(&stream).unwrap();
        graph::begin(rig, &stream, RELAXED);
        let output = watched.pool.malloc(GRANULE as usize, &stream).unwrap();
        rig.fill(output.address(), GRANULE, 4 << 40, stream.handle());
        let graph = graph::end(rig, &stream);
        graphs.end(&stream).unwrap();
        // The first launches may wait for the device.
        graph.launch(&stream);
        drop(rig.stall(stream.handle()));
        graphs.release(&stream).unwrap();
        stream.synchronize().unwrap();
        let stall = rig.stall(stream.handle());
        watched.pool.free(output, &stream).unwrap();
        let next = rig.stall(stream.handle());
        drop(stall);
        let gone = (0..200).any(|_| {
            std::thread::sleep(Duration::from_millis(1));
            watched.pool.trim_to(u64::MAX).unwrap();
            graphs.stats().mapped_bytes == 0
        });
        assert!(gone);
        drop(next);
        watched.assert_intact();
        drop(graph);
    });
}

#[test]
fn dropped_pools_go_back_when_the_host_has_waited_for_the_device() {
    everywhere(|rig, profile| {
        let watched = rig.pool(profile, Location::Device);
        let (stream, other) = (rig.stream(), rig.stream());
        let (graphs, graph, output) = ran(rig, &watched, stream.handle());
        watched.pool.free(output, &stream).unwrap();
        graph.launch(&other);
        let mapped = watched.pool.stats().mapped_bytes;
        graph::begin(rig, &stream, MODES[0]);
        drop(graphs);
        let unharmed = graph::end(rig, &stream);
        assert_eq!(watched.pool.stats().mapped_bytes, mapped);
        stream.synchronize().unwrap();
        assert_eq!(watched.pool.stats().mapped_bytes, mapped, "launched elsewhere");
        rig.device.synchronize().unwrap();
        goes_back(&watched.pool, || watched.pool.stats().mapped_bytes);
        drop((graph, unharmed));
        watched.assert_intact();
    });
}

#[test]
fn a_pool_ends_with_graphs_that_were_not_released() {
    everywhere(|rig, profile| {
        let stream = rig.stream();
        let watched = rig.pool(profile, Location::Device);
        let (graphs, graph, _output) = ran(rig, &watched, stream.handle());
        graph.launch(&stream);
        drop(graphs);
        // With the launch under way and the output allocated.
        drop(watched);
        drop(graph);
        assert_eq!(rig.mismatches(), 0);
    });
}

#[test]
fn dropped_between_begin_and_end_it_has_ended() {
    everywhere(|rig, profile| {
        let watched = rig.pool(profile, Location::Device);
        let stream = rig.stream();
        let graphs = watched.pool.graph_pool().unwrap();
        graphs.begin(&stream).unwrap();
        let scratch = watched.pool.malloc(MIB as usize, &stream).unwrap();
        watched.pool.free(scratch, &stream).unwrap();
        drop(graphs);
        let held = watched.malloc(MIB, &stream);
        assert!(!(scratch.address()..scratch.address() + MIB).contains(&held.address()));
        watched.free(held, &stream);
        let next = watched.pool.graph_pool().unwrap();
        next.begin(&stream).unwrap();
        next.end(&stream).unwrap();
        watched.assert_intact();
    });
}

/// Memory that can sleep is freed on a stream from elsewhere that captures, through its heap as through the pool.
#[test]
fn a_tagged_heap_takes_a_free_in_a_capture() {
    everywhere(|rig, profile| {
        let watched = rig.pool(profile, Location::Device);
        let (pool, heap) = (&watched.pool, watched.pool.tagged("weights").unwrap());
        let raw = graph::Raw::new(rig, false);
        let stream = raw.handle();
        let [one, other] = [(); 2].map(|()| heap.malloc(GRANULE as usize, stream).unwrap());
        let graphs = pool.graph_pool().unwrap();
        graph::begin(rig, stream, RELAXED);
        let refused = heap.free(one, stream);
        assert!(matches!(refused, Err(Error::StreamCapturing)), "no graph's pool is open to it");
        graphs.begin(stream).unwrap();
        heap.free(one, stream).unwrap();
        pool.free(other, stream).unwrap();
        drop(graph::end(rig, stream));
        graphs.end(stream).unwrap();
        graphs.release(stream).unwrap();
        call!(rig.driver, cuStreamSynchronize(stream.raw()));
        assert_eq!(heap.stats().live_count, 0);
        watched.assert_intact();
    });
}

/// A wrong pointer is named when it is freed on a stream that captures, too, and does nothing to who has the memory.
#[test]
fn wrong_pointers_are_told_in_a_capture() {
    everywhere(|rig, profile| {
        let watched = rig.pool(profile, Location::Device);
        let pool = &watched.pool;
        let stream = rig.stream();
        // The small one last: for that a GPU's driver takes 32 MiB, all of the limit.
        for bytes in [GRANULE as usize, 3000] {
            let stale = pool.malloc(bytes, &stream).unwrap();
            pool.free(stale, &stream).unwrap();
            let held = pool.malloc(bytes, &stream).unwrap();
            assert_eq!(held.address(), stale.address(), "the stream's own");
            let graphs = pool.graph_pool().unwrap();
            graphs.begin(&stream).unwrap();
            graph::begin(rig, &stream, RELAXED);
            let inside = pool.free(DevicePtr::from_address(held.address() + 512), &stream);
            assert!(
                matches!(inside, Err(Error::InteriorPointer { .. })),
                "{profile:?}: {inside:?}"
            );
            // A pointer of the default profile's is no more than its address.
            if profile == Profile::Paged {
                let refused = pool.free(stale, &stream);
                assert!(matches!(refused, Err(Error::StalePointer { .. })), "{refused:?}");
            }
            pool.free(held, &stream).expect("it is the caller's");
            for again in [pool.record_stream(held, &rig.stream()), pool.free(held, &stream)] {
                assert!(matches!(again, Err(Error::DoubleFree { .. })), "{profile:?}: {again:?}");
            }
            drop(graph::end(rig, &stream));
            graphs.end(&stream).unwrap();
            graphs.release(&stream).unwrap();
        }
        watched.assert_intact();
    });
}

#[test]
fn misuse_is_told_by_name() {
    everywhere(|rig, profile| {
        let watched = rig.pool(profile, Location::Device);
        let (stream, other) = (rig.stream(), rig.stream());
        let pools = [(); 2].map(|()| watched.pool.graph_pool().unwrap());
        let misused = |result: Result<(), Error>| {
            assert!(matches!(result, Err(Error::GraphPool { .. })), "{result:?}");
        };
        misused(pools[0].end(&stream));
        misused(pools[0].begin(StreamHandle::LEGACY));
        pools[0].begin(&stream).unwrap();
        misused(pools[0].begin(&stream));
        misused(pools[1].begin(&stream));
        misused(pools[1].end(&stream));
        misused(pools[0].end(&other));
        misused(pools[0].release(&stream));
        pools[0].end(&stream).unwrap();
        graph::begin(rig, &stream, MODES[0]);
        assert!(matches!(pools[0].release(&stream), Err(Error::StreamCapturing)));
        drop(graph::end(rig, &stream));
        pools[0].release(&stream).unwrap();
        let ptr = watched.pool.malloc(MIB as usize, &stream).unwrap();
        watched.pool.free(ptr, &stream).unwrap();
        assert!(matches!(
            watched.pool.free(ptr, &stream),
            Err(Error::DoubleFree { .. } | Error::StalePointer { .. })
        ));
        watched.assert_intact();
    });
}

gated!(whose: cuStreamGetCtx(stream: CUstream, context: *mut CUcontext));

/// One thread frees memory of the main heap on a stream that takes part in a capture, and another ends the part
/// meanwhile: what was freed waits for the stream, and is not kept for a capture that is over.
#[test]
fn a_free_beside_the_end_of_its_streams_part_in_a_capture() {
    let sim = Simulator::builder().build().unwrap();
    let device = changed(&sim, whose::put).device(0).unwrap();
    let mut config = vpmm::PoolConfig::default();
    config.limit_bytes = Some(8 * GRANULE);
    let pool = Pool::new(&device, &config).unwrap();
    let [stream, other] = [(); 2].map(|()| device.stream().unwrap());
    // SAFETY: the stream lives longer than this.
    let bare = unsafe { StreamHandle::from_raw(stream.handle().raw()) };
    let ptr = pool.malloc(6 * GRANULE as usize, &other).unwrap();
    let graphs = pool.graph_pool().unwrap();
    graphs.begin(bare).unwrap();
    whose::BEFORE.arm();
    std::thread::scope(|scope| {
        let free = scope.spawn(|| pool.free(ptr, bare));
        whose::BEFORE.wait();
        let end = scope.spawn(|| graphs.end(bare));
        // Long enough for one that does not wait for the free; one that does is not held up by this.
        let begin = Instant::now();
        while !end.is_finished() && begin.elapsed() < Duration::from_millis(200) {
            std::thread::yield_now();
        }
        whose::BEFORE.open();
        free.join().unwrap().unwrap();
        end.join().unwrap().unwrap();
    });
    let again = pool.malloc(6 * GRANULE as usize, &other).unwrap();
    pool.free(again, &other).unwrap();
    graphs.release(&stream).unwrap();
    pool.validate().unwrap();
}

gated!(last_record: cuEventRecord(event: CUevent, stream: CUstream));

/// A capture begins on the stream that a graph is released on, just before the record that is to tell when its
/// launches are over, and takes that along. While it goes on the release is refused; once it is over it is not, and the
/// memory comes back when the device has been waited for.
#[test]
fn a_capture_that_takes_the_record_of_a_release() {
    for ends_meanwhile in [false, true] {
        let sim = Simulator::builder().build().unwrap();
        let rig = Rig::with(changed(&sim, last_record::put), sim);
        let mut config = vpmm::PoolConfig::default();
        config.limit_bytes = Some(8 * GRANULE);
        let pool = Pool::new(&rig.device, &config).unwrap();
        let stream = rig.stream();
        // SAFETY: the stream lives longer than this.
        let bare = unsafe { StreamHandle::from_raw(stream.handle().raw()) };
        let graphs = pool.graph_pool().unwrap();
        graphs.begin(bare).unwrap();
        let ptr = pool.malloc(6 * GRANULE as usize, bare).unwrap();
        pool.free(ptr, bare).unwrap();
        graphs.end(bare).unwrap();
        last_record::BEFORE.arm();
        std::thread::scope(|scope| {
            let release = scope.spawn(|| graphs.release(bare));
            last_record::BEFORE.wait();
            graph::begin(&rig, bare, RELAXED);
            last_record::AFTER.arm();
            last_record::BEFORE.open();
            last_record::AFTER.wait();
            if ends_meanwhile {
                drop(graph::end(&rig, bare));
            }
            last_record::AFTER.open();
            let released = release.join().unwrap();
            if !ends_meanwhile {
                assert!(matches!(released, Err(Error::StreamCapturing)), "{released:?}");
                drop(graph::end(&rig, bare));
                graphs.release(bare).unwrap();
            }
        });
        pool.trim_to(0).unwrap();
        // All of the limit is there for one request.
        let whole = pool.malloc(8 * GRANULE as usize, &stream).unwrap();
        pool.free(whole, &stream).unwrap();
        pool.validate().unwrap();
        drop((graphs, pool, stream));
        rig.assert_clean();
    }
}

/// What a capture freed of a tagged heap is everybody's when its stream's part is over, however that ends.
#[test]
fn tagged_memory_freed_in_a_capture_is_everybodys_in_the_end() {
    #[derive(Clone, Copy, PartialEq, Debug)]
    enum Ends {
        End,
        HandleDropped,
        StreamDestroyed,
        ForkDestroyed,
    }
    let all = [Ends::End, Ends::HandleDropped, Ends::StreamDestroyed, Ends::ForkDestroyed];
    for profile in Profile::BOTH {
        for ends in all {
            let rig = Rig::on(Simulator::builder().build().unwrap());
            let watched = rig.pool(profile, Location::Device);
            let pool = &watched.pool;
            let (stream, fork, other) = (rig.stream(), rig.stream(), rig.stream());
            let tagged = pool.tagged("weights").unwrap();
            let raw = graph::Raw::new(&rig, false);
            let on = if ends == Ends::StreamDestroyed { stream.handle() } else { raw.handle() };
            let freed_on = if ends == Ends::ForkDestroyed { fork.handle() } else { on };
            // On another stream than that of the free, which the heap does not know.
            let ptr = tagged.malloc((LIMIT * GRANULE) as usize, &other).unwrap();
            rig.order(&other, on);
            let graphs = pool.graph_pool().unwrap();
            graphs.begin(on).unwrap();
            graph::begin(&rig, on, RELAXED);
            if ends == Ends::ForkDestroyed {
                rig.order(on, &fork);
            }
            pool.free(ptr, freed_on).unwrap();
            if ends == Ends::ForkDestroyed {
                rig.order(&fork, on);
            }
            drop(graph::stop(&rig, on));
            match ends {
                Ends::End => graphs.end(on).unwrap(),
                Ends::ForkDestroyed => {
                    drop(fork);
                    graphs.end(on).unwrap();
                }
                Ends::HandleDropped => drop(graphs),
                Ends::StreamDestroyed => drop(stream),
            }
            // Not by the library, which would tell of it.
            call!(rig.driver, cuCtxSynchronize());
            pool.trim_to(0).unwrap();
            assert_eq!(pool.stats().mapped_bytes, 0, "{profile:?}, {ends:?}");
            watched.assert_intact();
        }
    }
}

/// A graph whose pool's last handle was dropped may run until the host has waited for its own device, though nothing is
/// allocated any more and heaps are looked through.
#[test]
fn memory_of_a_dropped_graph_stays_until_a_wait_for_its_device() {
    for profile in Profile::BOTH {
        let rig = Rig::on(Simulator::builder().devices(2).build().unwrap());
        let other_device = rig.driver.device(1).unwrap();
        let watched = rig.pool(profile, Location::Device);
        let pool = &watched.pool;
        let (stream, other) = (rig.stream(), rig.stream());
        let graphs = pool.graph_pool().unwrap();
        graphs.begin(&stream).unwrap();
        graph::begin(&rig, &stream, RELAXED);
        let ptr = pool.malloc(MIB as usize, &stream).unwrap();
        rig.fill(ptr.address(), MIB, 1, stream.handle());
        pool.free(ptr, &stream).unwrap();
        let graph = graph::end(&rig, &stream);
        graphs.end(&stream).unwrap();
        let mapped = || pool.stats().mapped_bytes;
        let before = mapped();
        assert!(before > 0);
        let stall = rig.stall(other.handle());
        graph.launch(&other);
        drop(graphs);
        drop(pool.graph_pool().unwrap());
        assert_eq!(mapped(), before, "{profile:?}: looked through");
        other_device.synchronize().unwrap();
        assert_eq!(mapped(), before, "{profile:?}: another device");
        drop(stall);
        rig.device.synchronize().unwrap();
        assert_eq!(mapped(), 0, "{profile:?}");
        drop(graph);
        watched.assert_intact();
    }
}

/// A thread's default stream is asked about as its capture is awaited; if that fails nothing has begun.
#[test]
fn a_begin_that_fails_has_not_begun() {
    let rig = Rig::on(Simulator::builder().build().unwrap());
    let watched = rig.pool(Profile::Default, Location::Device);
    let graphs = watched.pool.graph_pool().unwrap();
    let own = vpmm::StreamHandle::PER_THREAD;
    let code = CUresult::CUDA_ERROR_UNKNOWN;
    rig.sim.as_ref().unwrap().fail_nth("cuStreamGetCaptureInfo_v2", 1, code);
    let error = graphs.begin(own).unwrap_err();
    assert!(matches!(error, Error::Driver { code: named, .. } if named == code), "{error}");
    graphs.begin(own).unwrap();
    graphs.end(own).unwrap();
    graphs.release(own).unwrap();
    drop(graphs);
    watched.assert_intact();
}

/// What was freed in a capture on a stream that has ended is freed when the host has waited, and if that fails, with
/// the next wait.
#[test]
fn a_free_left_to_a_wait_that_fails_is_made_with_the_next() {
    let rig = Rig::on(Simulator::builder().build().unwrap());
    let watched = rig.pool(Profile::Paged, Location::Device);
    let pool = &watched.pool;
    let stream = rig.stream();
    let ptr = pool.malloc(GRANULE as usize, &stream).unwrap();
    let graphs = pool.graph_pool().unwrap();
    graphs.begin(&stream).unwrap();
    graph::begin(&rig, &stream, RELAXED);
    pool.free(ptr, &stream).unwrap();
    drop(graph::stop(&rig, &stream));
    drop(stream);
    let live = || pool.stats().live_count;
    assert_eq!(live(), 1);
    let sim = rig.sim.as_ref().unwrap();
    sim.fail_nth("cuEventRecord", 1, CUresult::CUDA_ERROR_UNKNOWN);
    rig.device.synchronize().unwrap();
    sim.clear_faults();
    assert_eq!(live(), 1);
    rig.device.synchronize().unwrap();
    assert_eq!(live(), 0);
    drop(graphs);
    rig.device.synchronize().unwrap();
    watched.assert_intact();
}

/// A stream that is destroyed takes no part any more: what it freed is for the next capture.
#[test]
fn memory_freed_by_a_stream_that_was_destroyed_is_for_the_next_capture() {
    for profile in Profile::BOTH {
        for is_forked in [false, true] {
            let rig = Rig::on(Simulator::builder().build().unwrap());
            let watched = rig.pool(profile, Location::Device);
            let pool = &watched.pool;
            let (stream, side, other) = (rig.stream(), rig.stream(), rig.stream());
            let graphs = pool.graph_pool().unwrap();
            graphs.begin(&stream).unwrap();
            graph::begin(&rig, &stream, RELAXED);
            let on = if is_forked { &side } else { &stream };
            if is_forked {
                rig.order(&stream, &side);
            }
            let ptr = pool.malloc(MIB as usize, on).unwrap();
            rig.fill(ptr.address(), MIB, 1, on.handle());
            pool.free(ptr, on).unwrap();
            if is_forked {
                rig.order(&side, &stream);
            }
            let first = graph::stop(&rig, &stream);
            if is_forked {
                drop(side);
                graphs.end(&stream).unwrap();
            } else {
                drop(stream);
            }
            graphs.begin(&other).unwrap();
            graph::begin(&rig, &other, RELAXED);
            let again = pool.malloc(MIB as usize, &other).unwrap();
            assert_eq!(again.address(), ptr.address(), "{profile:?}, forked {is_forked}");
            pool.free(again, &other).unwrap();
            let second = graph::stop(&rig, &other);
            graphs.end(&other).unwrap();
            graphs.release(&other).unwrap();
            rig.device.synchronize().unwrap();
            drop((first, second, graphs));
            watched.assert_intact();
        }
    }
}

/// What the driver will not take when a graph's memory goes is offered again, and not lost with it.
#[test]
fn memory_of_a_graph_that_the_driver_refuses_goes_later() {
    for profile in Profile::BOTH {
        for call in ["cuMemUnmap", "cuMemRelease"] {
            let rig = Rig::on(Simulator::builder().build().unwrap());
            let sim = rig.sim.as_ref().unwrap();
            let watched = rig.pool(profile, Location::Device);
            let pool = &watched.pool;
            let stream = rig.stream();
            let before = sim.leaks();
            let graphs = pool.graph_pool().unwrap();
            graphs.begin(&stream).unwrap();
            graph::begin(&rig, &stream, RELAXED);
            let ptr = pool.malloc(MIB as usize, &stream).unwrap();
            pool.free(ptr, &stream).unwrap();
            drop(graph::stop(&rig, &stream));
            graphs.end(&stream).unwrap();
            sim.fail_nth(call, 1, CUresult::CUDA_ERROR_UNKNOWN);
            graphs.release(&stream).unwrap();
            rig.device.synchronize().unwrap();
            pool.trim_to(u64::MAX).unwrap();
            let after = sim.leaks();
            assert_eq!((after.handles, after.mappings), (before.handles, before.mappings));
            assert_eq!(after.reservations, before.reservations, "{profile:?}, {call}");
            drop(graphs);
            watched.assert_intact();
        }
    }
}

/// A wait that had begun before a graph's pool was dropped tells nothing of what was launched since.
#[test]
fn a_wait_of_before_a_graphs_pool_was_dropped_proves_nothing() {
    // The wait may come to the simulator so late that it is for what was launched, too.
    assert!((0..20).any(|_| wait_of_before_a_drop()));
}

/// Whether that wait ended before what was launched since.
fn wait_of_before_a_drop() -> bool {
    let rig = Rig::on(Simulator::builder().build().unwrap());
    let watched = rig.pool(Profile::Default, Location::Device);
    let pool = &watched.pool;
    let (stream, busy, other) = (rig.stream(), rig.stream(), rig.stream());
    let graphs = pool.graph_pool().unwrap();
    graphs.begin(&stream).unwrap();
    graph::begin(&rig, &stream, RELAXED);
    let ptr = pool.malloc(MIB as usize, &stream).unwrap();
    rig.fill(ptr.address(), MIB, 1, stream.handle());
    pool.free(ptr, &stream).unwrap();
    let graph = graph::end(&rig, &stream);
    graphs.end(&stream).unwrap();
    let mapped = pool.stats().mapped_bytes;
    let first = rig.stall(busy.handle());
    let ended = std::thread::scope(|scope| {
        let calls = rig.driver.calls();
        let waiting = scope.spawn(|| rig.device.synchronize().unwrap());
        while rig.driver.calls().since(&calls).count("cuCtxSynchronize") == 0 {
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_millis(10));
        let second = rig.stall(other.handle());
        graph.launch(&other);
        drop(graphs);
        drop(first);
        let start = Instant::now();
        while !waiting.is_finished() && start.elapsed() < Duration::from_millis(500) {
            std::thread::yield_now();
        }
        let ended = waiting.is_finished();
        assert!(!ended || pool.stats().mapped_bytes == mapped);
        drop(second);
        ended
    });
    rig.device.synchronize().unwrap();
    assert_eq!(pool.stats().mapped_bytes, 0);
    drop(graph);
    watched.assert_intact();
    ended
}

//! What streams have of each other: with a wait on the GPU at the limit, by the loan of a block where the pool is patient,
//! and in no way beside captures.

use std::thread;
use std::time::{Duration, Instant};

use cuda_sim::Schedule;
use vpmm::{Error, PendingPolicy, StreamHandle, WaitPolicy};

use crate::rig::{GRANULE, KIB, MIB, config};
use crate::support::streams::{begin_capture, end_capture, make};
use crate::support::{Rig, call};

#[test]
fn at_the_limit_a_stream_waits_for_another_on_the_device_and_the_host_does_not() {
    Rig::everywhere(|rig| {
        let watched = rig.pool(&config(8, 64));
        let (a, b) = (rig.stream(), rig.stream());
        let held = watched.malloc(6 * GRANULE, &a);
        let stall = rig.stall(a.handle());
        watched.free(held, &a);
        let other = watched.malloc(5 * GRANULE, &b);
        let stats = watched.pool.stats();
        assert_eq!((stats.device_waits, stats.host_waits), (1, 0));
        watched.validate();
        drop(stall);
        watched.free(other, &b);
        watched.assert_intact();
    });
}

#[test]
fn growing_comes_before_waiting_for_another_stream_unless_asked_otherwise() {
    Rig::everywhere(|rig| {
        for (policy, waits, usage) in
            [(PendingPolicy::GrowFirst, 0, 4), (PendingPolicy::WaitFirst, 1, 2)]
        {
            let mut config = config(16, 96);
            config.pending_policy = policy;
            let watched = rig.pool(&config);
            let (a, b) = (rig.stream(), rig.stream());
            let held = watched.malloc(2 * GRANULE, &a);
            let stall = rig.stall(a.handle());
            watched.free(held, &a);
            let other = watched.malloc(2 * GRANULE, &b);
            let stats = watched.pool.stats();
            assert_eq!((stats.device_waits, watched.usage()), (waits, usage), "{policy:?}");
            drop(stall);
            watched.free(other, &b);
            watched.assert_intact();
        }
    });
}

/// A patient pool holds less where the GPU is just behind, and grows where it is not.
#[test]
fn a_patient_pool_looks_a_little_longer_and_then_grows() {
    Rig::everywhere(|rig| {
        for (stalled, patience_ms, usage) in [(false, 50, 2), (true, 50, 4), (true, 0, 4)] {
            let mut config = config(16, 96);
            config.patience = Duration::from_millis(patience_ms);
            config.reuse.internal_dependencies = false;
            let watched = rig.pool(&config);
            let (a, b) = (rig.stream(), rig.stream());
            // A 64th of it may be waited.
            thread::sleep(Duration::from_millis(320));
            let held = watched.malloc(2 * GRANULE, &a);
            let stall = stalled.then(|| rig.stall(a.handle()));
            watched.free(held, &a);
            // Which takes it out of the front.
            watched.pool.mark(&a).unwrap();
            let begin = Instant::now();
            let other = watched.malloc(2 * GRANULE, &b);
            let took = begin.elapsed();
            let stats = watched.pool.stats();
            assert_eq!((stats.device_waits, watched.usage()), (0, usage), "{stalled}");
            if stalled {
                assert_eq!(stats.host_waits, u64::from(patience_ms > 0));
                let waits = Duration::from_millis(4);
                assert!(patience_ms == 0 || took >= waits, "{took:?}");
                // Nor does it ask again at once: the time is used up.
                let next = watched.malloc(2 * GRANULE, &b);
                assert!(watched.pool.stats().host_waits <= 2);
                watched.free(next, &b);
            }
            drop(stall);
            watched.free(other, &b);
            watched.assert_intact();
        }
    });
}

/// Where the host is ahead: the asking stream waits for the block, on the GPU, and the rest stays whose
/// it was, also when it is ready.
#[test]
fn a_patient_pool_borrows_a_block_rather_than_grow() {
    Rig::everywhere(|rig| {
        let mut config = config(16, 96);
        config.patience = Duration::from_millis(1);
        let watched = rig.pool(&config);
        let (a, b) = (rig.stream(), rig.stream());
        let held = watched.malloc(5 * GRANULE, &a);
        let stall = rig.stall(a.handle());
        watched.free(held, &a);
        // Which takes it out of the front.
        watched.pool.mark(&a).unwrap();
        let first = watched.malloc(GRANULE, &b);
        let stats = watched.pool.stats();
        assert_eq!((stats.device_waits, stats.host_waits, watched.usage()), (1, 0, 5));
        drop(stall);
        // Not told to the pool.
        call!(rig.driver, cuStreamSynchronize(a.handle().raw()));
        let second = watched.malloc(GRANULE, &b);
        let rest = watched.malloc(3 * GRANULE, &a);
        assert_eq!((watched.pool.stats().device_waits, watched.usage()), (1, 5));
        watched.free(first, &b);
        watched.free(second, &b);
        watched.free(rest, &a);
        watched.assert_intact();
    });
}

/// A loader's few bytes for each step would have it wait, and leave it less to borrow what is large.
#[test]
fn a_patient_pool_grows_for_a_small_block() {
    Rig::everywhere(|rig| {
        let mut config = config(16, 96);
        config.patience = Duration::from_millis(50);
        let watched = rig.pool(&config);
        let (a, b) = (rig.stream(), rig.stream());
        // A 64th of it may be waited.
        thread::sleep(Duration::from_millis(320));
        let small: Vec<_> = (0..GRANULE / 4096).map(|_| watched.malloc(4096, &a)).collect();
        let stall = rig.stall(a.handle());
        small.into_iter().for_each(|held| watched.free(held, &a));
        watched.pool.mark(&a).unwrap();
        let before = watched.usage();
        let other = watched.malloc(4096, &b);
        let stats = watched.pool.stats();
        assert_eq!((stats.device_waits, stats.host_waits), (0, 0));
        assert_eq!(watched.usage(), before + 1);
        drop(stall);
        watched.free(other, &b);
        watched.assert_intact();
    });
}

/// A server's streams would go on waiting for each other.
#[test]
fn a_patient_pool_borrows_seldom() {
    let rig = Rig::simulated(Schedule::Eager);
    let mut config = config(400, 1024);
    config.patience = Duration::from_nanos(1);
    let watched = rig.pool(&config);
    let (a, b) = (rig.stream(), rig.stream());
    let held = watched.malloc(200 * GRANULE, &a);
    let stall = rig.stall(a.handle());
    watched.free(held, &a);
    watched.pool.mark(&a).unwrap();
    let begin = Instant::now();
    let blocks: Vec<_> = (0..180).map(|_| watched.malloc(GRANULE, &b)).collect();
    let waits = watched.pool.stats().device_waits;
    assert!((128..=128 + 16 * begin.elapsed().as_secs()).contains(&waits), "{waits}");
    assert_eq!(watched.usage(), 200 + 180 - waits);
    blocks.into_iter().for_each(|held| watched.free(held, &b));
    drop(stall);
    watched.assert_intact();
}

/// An event on either stream would become part of the graph.
#[test]
fn nothing_is_borrowed_from_or_for_a_stream_that_captures() {
    let rig = Rig::simulated(Schedule::Eager);
    for which in [0, 1] {
        let mut config = config(16, 96);
        config.patience = Duration::from_nanos(1);
        let watched = rig.pool(&config);
        let (a, b) = (rig.stream(), rig.stream());
        // An event is left over, which must not be lost.
        watched.free(watched.malloc(GRANULE, &b), &b);
        watched.pool.trim_to(0).unwrap();
        let held = watched.malloc(2 * GRANULE, &a);
        watched.free(held, &a);
        let stall = rig.stall(a.handle());
        watched.pool.mark(&a).unwrap();
        let capturing = [&a, &b][which].handle().raw();
        begin_capture(&rig, capturing);
        let other = watched.pool.malloc(2 * GRANULE as usize, &b).unwrap();
        watched.pool.free(other, &b).unwrap();
        assert_eq!((watched.pool.stats().device_waits, watched.usage()), (0, 4));
        assert_eq!(end_capture(&rig, capturing), 0, "nodes");
        drop(stall);
        watched.assert_intact();
    }
}

/// The legacy stream is captured, as good as, while a blocking one is: it makes no wait, and grows.
#[test]
fn the_legacy_stream_waits_for_nobody_beside_a_capture() {
    let patient = Duration::from_nanos(1);
    let waits = [
        (PendingPolicy::GrowFirst, patient),
        (PendingPolicy::GrowFirst, Duration::ZERO),
        (PendingPolicy::WaitFirst, Duration::ZERO),
    ];
    for ((policy, patience), limit) in waits.into_iter().flat_map(|how| [(how, 2), (how, 16)]) {
        let rig = Rig::simulated(Schedule::Eager);
        let mut config = config(limit, 96);
        (config.patience, config.pending_policy) = (patience, policy);
        config.out_of_memory = WaitPolicy::FailAtOnce;
        let watched = rig.pool(&config);
        let (pool, a) = (&watched.pool, rig.stream());
        let malloc = |granules: u64, stream: StreamHandle| {
            pool.malloc((granules * GRANULE) as usize, stream)
        };
        // The legacy stream is known to the pool by then.
        pool.free(malloc(1, StreamHandle::LEGACY).unwrap(), StreamHandle::LEGACY).unwrap();
        let held = malloc(2, a.handle()).unwrap();
        let stall = rig.stall(a.handle());
        pool.free(held, &a).unwrap();
        pool.mark(&a).unwrap();
        let (raw, _) = make(&rig, 0);
        begin_capture(&rig, raw);
        match malloc(2, StreamHandle::LEGACY) {
            Ok(other) => pool.free(other, StreamHandle::LEGACY).unwrap(),
            Err(error) => {
                assert!(limit == 2 && matches!(error, Error::OutOfMemory { .. }), "{error}")
            }
        }
        assert_eq!(pool.stats().device_waits, 0);
        assert_eq!(end_capture(&rig, raw), 0, "nodes");
        drop(stall);
        call!(rig.driver, cuStreamDestroy_v2(raw));
        watched.assert_intact();
    }
}

/// The freeing stream's work counts, not the allocating one's.
#[test]
fn a_free_is_ordered_on_the_stream_that_frees() {
    Rig::everywhere(|rig| {
        let watched = rig.small_pool();
        let (a, b) = (rig.stream(), rig.stream());
        for bytes in [4 * KIB, MIB, 2 * GRANULE] {
            let held = watched.malloc(bytes, &a);
            a.synchronize().unwrap();
            let stall = rig.stall(b.handle());
            watched.free(held, &b); // B is busy with a check of the contents
            let other = watched.malloc(bytes, &a);
            assert_ne!(other.address(), held.address(), "B may still read it");
            drop(stall);
            watched.free(other, &a);
        }
        watched.assert_intact();
    });
}

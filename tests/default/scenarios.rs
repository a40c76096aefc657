//! The steps of the ladder one by one, each with contents checked and with work that finishes at
//! once, late, at random, and on a GPU.

use std::thread;
use std::time::{Duration, Instant};

use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::{CUdeviceptr, CUresult};
use vpmm::{
    DevicePtr, Error, PendingPolicy, Pool, PoolConfig, Sharing, Stream, StreamHandle, WaitPolicy,
};

use crate::rig::{GRANULE, KIB, MIB, bare, config};
use crate::support::streams::{begin_capture, end_capture, make};
use crate::support::{Lcg, Rig, Watched, call};

#[test]
fn memory_grows_in_place_behind_what_is_free() {
    Rig::everywhere(|rig| {
        let watched = rig.small_pool();
        let stream = rig.stream();
        let mut last = watched.malloc(2 * GRANULE, &stream);
        let at = last.address();
        for granules in [4, 5, 9, 20] {
            watched.free(last, &stream);
            last = watched.malloc(granules * GRANULE, &stream);
            let stats = watched.pool.stats();
            assert_eq!((last.address(), watched.usage()), (at, granules));
            assert_eq!(stats.extents_moved, 0);
        }
        watched.free(last, &stream);
        watched.assert_intact();
    });
}

#[test]
fn neighbours_freed_in_any_order_serve_their_sum_in_place() {
    Rig::everywhere(|rig| {
        for order in [[1, 0, 2], [0, 1, 2], [2, 1, 0], [0, 2, 1]] {
            for part in [MIB, 3 * GRANULE] {
                let watched = rig.small_pool();
                let stream = rig.stream();
                let whole = watched.malloc(3 * part, &stream);
                watched.free(whole, &stream);
                let held = [(); 3].map(|()| watched.malloc(part, &stream));
                order.into_iter().for_each(|at: usize| watched.free(held[at], &stream));
                let usage = watched.usage();
                let again = watched.malloc(3 * part, &stream);
                assert_eq!(watched.usage(), usage, "{order:?}");
                assert_eq!(watched.pool.stats().extents_moved, 0, "{order:?}");
                watched.free(again, &stream);
                watched.assert_intact();
            }
        }
    });
}

#[test]
fn neighbours_of_different_owners_serve_their_sum_in_place() {
    Rig::everywhere(|rig| {
        let watched = rig.pool(&config(6, 96));
        let (a, b) = (rig.stream(), rig.stream());
        let whole = watched.malloc(6 * GRANULE, &b);
        watched.free(whole, &b);
        let (four, two) = (watched.malloc(4 * GRANULE, &b), watched.malloc(2 * GRANULE, &b));
        rig.order(&b, &a);
        watched.free(four, bare(&a));
        // Refused, after waiting for all that is free: it is nobody's then.
        assert!(watched.try_malloc(5 * GRANULE, &a).is_err());
        watched.free(two, bare(&b));
        let run = watched.malloc(6 * GRANULE, &b);
        assert_eq!((run.address(), watched.pool.stats().extents_moved), (whole.address(), 0));
        watched.free(run, &b);
        watched.assert_intact();
    });
}

#[test]
fn scattered_memory_is_moved_together_at_the_limit() {
    Rig::everywhere(|rig| {
        let watched = rig.pool(&config(16, 128));
        let stream = rig.stream();
        let mut held: Vec<_> = (0..16).map(|_| watched.malloc(GRANULE, &stream)).collect();
        held.sort_by_key(|held| held.address());
        let gone: Vec<_> = held.iter().copied().step_by(2).collect();
        gone.into_iter().for_each(|held| watched.free(held, &stream));
        let large = watched.malloc(8 * GRANULE, &stream);
        let stats = watched.pool.stats();
        assert!(stats.extents_moved > 0 && watched.usage() == 16, "{}", watched.pool.layout());
        assert_eq!((stats.host_waits, stats.device_waits), (0, 0), "it is the stream's own");
        watched.free(large, &stream);
        held.iter().skip(1).step_by(2).for_each(|held| watched.free(*held, &stream));
        watched.assert_intact();
    });
}

/// Random sizes that never settle: with all the moves it wants the pool stays small, with few it
/// grows until it needs none.
#[test]
fn moves_keep_a_pool_small_and_few_moves_let_it_grow() {
    let [few, many] = [0, u32::MAX].map(|moves_per_second| {
        let rig = Rig::simulated(Schedule::Eager);
        let mut settings = vpmm::PoolConfig::default();
        settings.moves_per_second = moves_per_second;
        let pool = vpmm::Pool::new(&rig.device, &settings).expect("a pool");
        let stream = rig.stream();
        let mut state = 1_u64;
        let mut random = |bound: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % bound
        };
        let mut bytes = || (10 * MIB + random(20 * MIB)) as usize;
        let mut held: Vec<_> = (0..20).map(|_| pool.malloc(bytes(), &stream).unwrap()).collect();
        let mut late = 0;
        for round in 0..20_000 {
            if round == 15_000 {
                late = pool.stats().extents_moved;
            }
            pool.free(held[round % 20], &stream).unwrap();
            held[round % 20] = pool.malloc(bytes(), &stream).unwrap();
        }
        let stats = pool.stats();
        (stats.peak_mapped_bytes, stats.extents_moved - late)
    });
    assert!(few.0 > many.0 + many.0 / 10, "{few:?} {many:?}");
    assert!(10 * few.1 < many.1, "{few:?} {many:?}");
}

/// The same with sizes that hardly fit each other: after some moves the pool grows ahead, and then hardly moves
/// any more, less than a seventh as often. For several rows of sizes, as one row is luck.
#[test]
fn what_never_settles_grows_ahead_until_it_does() {
    let moves = (1..=8).map(|seed| {
        let rig = Rig::simulated(Schedule::Eager);
        let mut settings = vpmm::PoolConfig::default();
        settings.moves_per_second = 0;
        let pool = vpmm::Pool::new(&rig.device, &settings).expect("a pool");
        let stream = rig.stream();
        let mut state: u64 = seed;
        let mut random = |bound: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % bound
        };
        let mut held = Vec::new();
        let mut early = 0;
        for round in 0..300_000 {
            if round == 200_000 {
                early = pool.stats().extents_moved;
            }
            if held.len() == 100 {
                let at = random(100) as usize;
                pool.free(held.swap_remove(at), &stream).unwrap();
            }
            let bytes = (2 * MIB + random(62 * MIB)) as usize;
            held.push(pool.malloc(bytes, &stream).unwrap());
        }
        let stats = pool.stats();
        assert!(3 * stats.peak_mapped_bytes < 4 * stats.peak_live_bytes, "{seed}: {stats:?}");
        (early, stats.extents_moved - early)
    });
    let moves: Vec<_> = moves.collect();
    let (early, late) = moves.iter().fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1));
    assert!(15 * late < early, "{moves:?}");
}

/// Where sizes do not come again a pool grows a little rather than move for one request what the next has no use
/// for. But a program that asks for more than it ever had needs memory for good: what is free moves for that.
///
/// The first is so of a program in haste only, which none is whose thread has to share its processor. So it may be
/// tried some times.
#[test]
fn more_than_was_ever_live_is_moved_for_though_sizes_do_not_come_again() {
    const MOST: usize = 30;
    let within = (0..MOST).map(|_| {
        let (within, beyond) = moved_within_and_beyond_the_most_that_was_live();
        assert!(beyond > 0);
        within
    });
    let in_vain: Vec<_> = within.take_while(|moved| *moved > 0).collect();
    assert!(in_vain.len() < MOST, "{in_vain:?}");
}

/// The extents that move for a request within the most that a program had, whose sizes did not come again, and
/// for one beyond.
fn moved_within_and_beyond_the_most_that_was_live() -> (u64, u64) {
    let rig = Rig::simulated(Schedule::Eager);
    let mut settings = vpmm::PoolConfig::default();
    // So few that any move at all is more than the program has time for.
    settings.moves_per_second = 3;
    let pool = vpmm::Pool::new(&rig.device, &settings).expect("a pool");
    let stream = rig.stream();
    let malloc = |bytes: u64| pool.malloc(bytes as usize, &stream).unwrap();
    let free = |ptr| pool.free(ptr, &stream).unwrap();
    let moved = |granules: u64| {
        let before = pool.stats().extents_moved;
        free(malloc(granules * GRANULE));
        pool.stats().extents_moved - before
    };
    // A thousand granules, of which every tenth is free at first.
    let blocks: Vec<_> = (0..100).map(|_| malloc(10 * GRANULE)).collect();
    blocks.iter().step_by(10).for_each(|block| free(*block));
    assert!(moved(110) > 0);
    (0..100).filter(|at| at % 10 > 0).for_each(|at| free(blocks[at]));
    let mut random = Lcg(7);
    let mut held: Vec<_> = (0..40).map(|_| malloc(MIB + random.below(30 * MIB))).collect();
    for _ in 0..200_000 {
        free(held.swap_remove(random.below(40) as usize));
        held.push(malloc(MIB + random.below(30 * MIB)));
    }
    held.into_iter().for_each(free);
    let peak = pool.stats().peak_live_bytes;
    let mut blocks: Vec<_> = (0..100).map(|_| malloc(10 * GRANULE)).collect();
    while pool.stats().live_bytes < peak {
        blocks.push(malloc(10 * GRANULE));
    }
    [50, 70].into_iter().for_each(|at: usize| free(blocks[at]));
    // Within the most that was live it grows, though a little less than a fiftieth is free.
    let within = moved(15);
    let beyond = moved(300);
    // With what is allocated: the simulator ends, and there is a place for the next.
    pool.destroy().expect("a whole device");
    (within, beyond)
}

/// What the limit leaves missing is less than any free extent: one of them moves all the same, and less is
/// made.
#[test]
fn what_is_short_at_the_limit_comes_from_a_longer_extent() {
    let rig = Rig::simulated(Schedule::Eager);
    let watched = rig.pool(&config(270, 3000));
    let stream = rig.stream();
    // The first request comes in sixteen extents, of which two will be whole.
    let all = watched.malloc(160 * GRANULE, &stream);
    watched.free(all, &stream);
    let parts = [19, 1, 19, 1, 120].map(|count| watched.malloc(count * GRANULE, &stream));
    assert_eq!(watched.pool.stats().extent_count, 16);
    // Enough that nothing moves before the limit is reached.
    watched.malloc(100 * GRANULE, &stream);
    let [first, _, third, ..] = parts;
    watched.free(first, &stream);
    watched.free(third, &stream);
    watched.malloc(21 * GRANULE, &stream);
    let stats = watched.pool.stats();
    assert_eq!((stats.extents_moved, stats.mapped_bytes), (2, 261 * GRANULE), "{stats:?}");
}

/// A program that loads small parts one after the other is served ahead. Few of them that stay keep little
/// from what it asks for next.
#[test]
fn what_was_mapped_ahead_at_leisure_can_move() {
    let rig = Rig::simulated(Schedule::Eager);
    let mut settings = vpmm::PoolConfig::default();
    settings.moves_per_second = u32::MAX;
    let pool = vpmm::Pool::new(&rig.device, &settings).expect("a pool");
    let stream = rig.stream();
    let parts: Vec<_> = (0..200).map(|_| pool.malloc(GRANULE as usize, &stream).unwrap()).collect();
    assert!(pool.stats().mapped_bytes > 210 * GRANULE, "ahead: {:?}", pool.stats());
    let gone = parts.iter().enumerate().filter(|(at, _)| at % 40 != 0);
    gone.for_each(|(_, part)| pool.free(*part, &stream).unwrap());
    pool.malloc(400 * GRANULE as usize, &stream).unwrap();
    let stats = pool.stats();
    assert!(stats.mapped_bytes - stats.live_bytes < 20 * GRANULE, "{stats:?}");
}

/// A few small blocks among hundreds of large ones are no reason to map more for small ones, which nothing else
/// can have; many in a row are.
#[test]
fn each_part_is_served_ahead_by_its_own_growths() {
    let rig = Rig::simulated(Schedule::Eager);
    let pool = vpmm::Pool::new(&rig.device, &vpmm::PoolConfig::default()).expect("a pool");
    let stream = rig.stream();
    let load = |bytes, times: u64| {
        for _ in 0..times {
            pool.malloc(bytes, &stream).unwrap();
        }
    };
    let mapped = || pool.stats().mapped_bytes / GRANULE;
    let eight = 8 * GRANULE as usize;
    load(eight, 100);
    assert_eq!(mapped(), 800);
    load(512, 1);
    assert_eq!(mapped(), 801, "one granule for a small block");
    load(eight, 1);
    assert_eq!(mapped(), 809);
    let few = 64 * KIB as usize;
    load(few, 32 * 40);
    let ahead = mapped() - 809 - 40;
    assert!((4..=16).contains(&ahead), "{ahead} granules ahead of forty");
}

/// What small blocks take from the large part is lacking there later, and moves back and forth: while it is a
/// thousandth of the pool it is made.
#[test]
fn the_small_part_takes_nothing_from_the_large_one_while_it_is_little() {
    let rig = Rig::simulated(Schedule::Eager);
    let pool = vpmm::Pool::new(&rig.device, &vpmm::PoolConfig::default()).expect("a pool");
    let stream = rig.stream();
    let large: Vec<_> =
        (0..100).map(|_| pool.malloc(32 * GRANULE as usize, &stream).unwrap()).collect();
    large.into_iter().step_by(2).for_each(|ptr| pool.free(ptr, &stream).unwrap());
    let fill = || {
        for _ in 0..32 {
            pool.malloc(64 * KIB as usize, &stream).unwrap();
        }
        let stats = pool.stats();
        (stats.mapped_bytes / GRANULE - 3200, stats.extents_moved)
    };
    assert_eq!([(); 6].map(|()| fill()), [(1, 0), (2, 0), (3, 0), (3, 1), (3, 2), (3, 3)]);
}

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

/// A loop that never settles is given more memory for its moves; not while its stream is busy anyway.
#[test]
fn moves_that_a_busy_stream_does_not_notice_do_not_count() {
    Rig::everywhere(|rig| {
        let [idle, busy] = [false, true].map(|stalls| {
            let mut config = config(256, 2048);
            config.limit_bytes = None;
            config.moves_per_second = 1;
            let watched = rig.pool(&config);
            let (pool, stream) = (&watched.pool, rig.stream());
            let malloc =
                |granules: u64| pool.malloc((granules * GRANULE) as usize, &stream).unwrap();
            let free = |ptr| pool.free(ptr, &stream).unwrap();
            let stall = stalls.then(|| rig.stall(stream.handle()));
            let mut random = Lcg(3);
            let mut blocks: Vec<_> = (0..12).map(|_| malloc(1 + random.below(12))).collect();
            for _ in 0..400 {
                free(blocks.swap_remove(random.below(12) as usize));
                blocks.push(malloc(1 + random.below(12)));
            }
            blocks.into_iter().for_each(free);
            drop(stall);
            let stats = pool.stats();
            watched.validate();
            (stats.extents_moved, stats.mapped_bytes / GRANULE)
        });
        assert!(busy.0 > idle.0 && busy.1 <= idle.1, "{idle:?} {busy:?}");
    });
}

/// Nor does a request lack anything where its stream cannot be marked for that, and no event is lost.
#[test]
fn memory_moves_for_a_stream_that_takes_no_event() {
    for captures in [false, true] {
        let rig = Rig::simulated(Schedule::Eager);
        let mut settings = config(5, 64);
        settings.moves_per_second = u32::MAX;
        let watched = rig.pool(&settings);
        let (stream, raw) = (rig.stream(), rig.stream());
        // What a trim has waited for leaves an event over.
        watched.free(watched.malloc(GRANULE, &raw), &raw);
        watched.pool.trim_to(0).unwrap();
        let held = [(); 5].map(|()| watched.malloc(GRANULE, &stream));
        held.iter().step_by(2).for_each(|held| watched.free(*held, bare(&stream)));
        let calls = || rig.driver.calls();
        let before = calls();
        if captures {
            begin_capture(&rig, stream.handle().raw());
        } else {
            let sim = rig.sim.as_ref().unwrap();
            sim.fail_nth("cuEventRecord", 1, CUresult::CUDA_ERROR_UNKNOWN);
        }
        let ptr = watched.pool.malloc(3 * GRANULE as usize, &stream).unwrap();
        let recorded = calls().since(&before).count("cuEventRecord");
        assert_eq!((watched.moved(), recorded), (2, u64::from(!captures)));
        if captures {
            assert_eq!(end_capture(&rig, stream.handle().raw()), 0, "nodes");
        }
        watched.pool.free(ptr, &stream).unwrap();
        held.iter().skip(1).step_by(2).for_each(|held| watched.free(*held, &stream));
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

#[test]
fn small_blocks_come_from_the_large_part_rather_than_not_at_all() {
    let rig = Rig::simulated(Schedule::Eager);
    let watched = rig.pool(&config(4, 64));
    let stream = rig.stream();
    let pinned = watched.malloc(7 * MIB, &stream);
    let half = watched.malloc(700 * KIB, &stream);
    // Nothing is left for a granule of the small part's own.
    let small = [(); 4].map(|()| watched.malloc(4 * KIB, &stream));
    assert_eq!(watched.usage(), 4);
    for held in small.into_iter().chain([pinned, half]) {
        watched.free(held, &stream);
    }
    watched.assert_intact();
}

/// What fronts keep is told small from large by its address alone, which this block would be taken for the wrong one
/// by.
#[test]
fn large_blocks_come_from_the_small_part_rather_than_not_at_all_and_are_in_no_front() {
    let rig = Rig::simulated(Schedule::Eager);
    let watched = rig.pool(&config(4, 64));
    let stream = rig.stream();
    let small = watched.malloc(4 * KIB, &stream);
    let pinned = watched.malloc(6 * MIB, &stream);
    // Only the small block's granule has room.
    for _ in 0..3 {
        let half = watched.malloc(700 * KIB, &stream);
        assert_eq!((watched.usage(), half.address() / GRANULE), (4, small.address() / GRANULE));
        watched.free(half, &stream);
        assert_eq!(watched.pool.stats().cached_bytes, 0);
        watched.assert_intact();
    }
    watched.free(pinned, &stream);
    watched.free(small, &stream);
    watched.assert_intact();
}

/// Small blocks have an eighth of the addresses: half of what a device has, and a quarter of what a tagged heap may
/// hold. What they need beyond that lies among large blocks, and a large one finds it again.
#[test]
fn small_blocks_fill_all_memory_and_not_only_their_own_addresses() {
    let sim = Simulator::builder().memory_bytes(80 * GRANULE).build().unwrap();
    let rig = Rig::on(sim);
    let stream = rig.stream();
    let sizes = [64 * KIB, 3 * KIB];
    // Each in a pool that has to grow for it.
    for (is_tagged, bytes) in [false, true].into_iter().flat_map(|tag| sizes.map(|of| (tag, of))) {
        let mut config = PoolConfig::default();
        config.limit_bytes = is_tagged.then_some(64 * GRANULE);
        let pool = Pool::new(&rig.device, &config).unwrap();
        let tagged = pool.tagged("cache").unwrap();
        let malloc = |bytes: u64| match is_tagged {
            false => pool.malloc(bytes as usize, &stream),
            true => tagged.malloc(bytes as usize, &stream),
        };
        // The rig holds some of the device's memory.
        let (most, least) = if is_tagged { (64, 64) } else { (80, 78) };
        let mut held = Vec::new();
        while let Ok(ptr) = malloc(bytes) {
            held.push(ptr);
        }
        let mapped = pool.stats().mapped_bytes / GRANULE;
        assert!((least..=most).contains(&mapped), "{mapped} granules of {most}");
        assert!(pool.stats().live_bytes > mapped * GRANULE / 8 * 7, "{:?}", pool.stats());
        pool.validate().unwrap();
        held.into_iter().for_each(|ptr| pool.free(ptr, &stream).unwrap());
        pool.free(malloc(40 * GRANULE).unwrap(), &stream).unwrap();
        pool.validate().unwrap();
    }
    rig.assert_clean();
}

/// What lay across many granules is noted there until something else does.
#[test]
fn an_address_of_a_long_block_that_is_gone_is_no_shorter_ones() {
    let rig = Rig::simulated(Schedule::Eager);
    let watched = rig.pool(&config(200, 400));
    let stream = rig.stream();
    let long = watched.malloc(130 * GRANULE, &stream);
    let inside = [30, 100].map(|granules| long.address() + granules * GRANULE);
    let found = |address| watched.pool.allocation(address).map(|of| of.start.address());
    assert_eq!(inside.map(found), [Some(long.address()); 2]);
    watched.free(long, bare(&stream));
    let short = watched.malloc(GRANULE, &stream);
    assert_eq!(short.address(), long.address());
    assert_eq!(inside.map(found), [None; 2]);
    assert_eq!(found(short.address() + 1), Some(short.address()));
    watched.free(short, &stream);
    watched.assert_intact();
}

/// However often memory was exported, it is as much.
#[test]
fn what_was_exported_again_counts_once() {
    let rig = Rig::simulated(Schedule::Eager);
    let mut settings = config(4, 64);
    settings.sharing = Sharing::FileDescriptor;
    let watched = rig.pool(&settings);
    let stream = rig.stream();
    let [first, _second] = [(); 2].map(|()| watched.malloc(GRANULE, &stream));
    for _ in 0..2 {
        drop(watched.pool.export(first.ptr).unwrap());
        assert_eq!(watched.pool.stats().exported_bytes, GRANULE);
    }
    watched.assert_intact();
}

/// Work that nothing was freed behind is waited for all the same.
#[test]
fn a_pool_that_ends_with_something_allocated_waits_for_the_work_on_it() {
    let rig = Rig::simulated(Schedule::Manual);
    let watched = rig.pool(&config(4, 64));
    let stream = rig.stream();
    watched.malloc(GRANULE, &stream).check(&rig, &stream);
    // The wait that is to find out whether a pool may end with that: the end waits itself.
    rig.sim.as_ref().unwrap().fail_nth("cuCtxSynchronize", 1, CUresult::CUDA_ERROR_UNKNOWN);
    drop(watched);
    assert_eq!(rig.mismatches(), 0);
    rig.assert_clean();
}

#[test]
fn everything_is_given_back_at_the_end() {
    for schedule in [Schedule::Late { patience: 100 }, Schedule::Manual, Schedule::Random] {
        let rig = Rig::simulated(schedule);
        let sim = rig.sim.clone().expect("a simulated rig");
        {
            let watched = rig.small_pool();
            let (one, two) = (rig.stream(), rig.stream());
            let held = [(); 4].map(|()| watched.malloc(GRANULE, &one));
            watched.free(held[1], &one);
            rig.order(&one, &two);
            watched.free(held[3], &two);
            let _never_freed = watched.malloc(2 * GRANULE, &two);
            let _small = watched.malloc(1000, StreamHandle::PER_THREAD);
        }
        drop(rig);
        sim.assert_clean();
        assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
    }
}

#[test]
fn each_device_gives_its_own_memory() {
    let sim = Simulator::builder().devices(2).build().unwrap();
    let driver = vpmm::Driver::new(sim.driver()).unwrap();
    let device = driver.device(1).unwrap();
    let pool = vpmm::Pool::new(&device, &config(16, 96)).unwrap();
    let stream = device.stream().unwrap();
    let ptr = pool.malloc(8 * GRANULE as usize, &stream).unwrap();
    assert_eq!((sim.memory_used(0), sim.memory_used(1)), (0, 8 * GRANULE));
    pool.free(ptr, &stream).unwrap();
    drop(pool);
    sim.assert_clean();
}

/// Statics are never dropped: the process ends with the pool alive, and ends well.
#[test]
fn a_pool_in_a_static_lives_to_the_end_of_the_process() {
    static POOL: std::sync::OnceLock<(Simulator, vpmm::Pool)> = std::sync::OnceLock::new();
    let (sim, pool) = POOL.get_or_init(|| {
        let sim = Simulator::builder().build().unwrap();
        let device = vpmm::Driver::new(sim.driver()).unwrap().device(0).unwrap();
        (sim, vpmm::Pool::new(&device, &config(16, 96)).unwrap())
    });
    let stream = pool.device().stream().unwrap();
    let freed = pool.malloc(GRANULE as usize, &stream).unwrap();
    pool.malloc(GRANULE as usize, &stream).unwrap();
    pool.free(freed, &stream).unwrap();
    pool.validate().unwrap();
    sim.assert_clean();
}

/// At the limit, with hardly more addresses: those that were given up wait for the stream, like what was freed.
#[test]
fn addresses_are_waited_for_like_memory() {
    for addresses in 16..24 {
        let rig = Rig::simulated(Schedule::Manual);
        let watched = rig.pool(&config(6, addresses));
        let stream = rig.stream();
        for _ in 0..6 {
            let all = [(); 6].map(|()| watched.malloc(GRANULE, &stream));
            let (gone, kept): (Vec<_>, Vec<_>) =
                all.into_iter().enumerate().partition(|(at, _)| at % 2 == 0);
            gone.into_iter().for_each(|(_, held)| watched.free(held, &stream));
            let together = watched.malloc(3 * GRANULE, &stream);
            watched.free(together, &stream);
            kept.into_iter().for_each(|(_, held)| watched.free(held, &stream));
        }
        watched.assert_intact();
    }
}

/// A pool without a limit, on a device of which others have so much that this many granules are left; the test gives
/// theirs back.
fn on_a_device_with(left: u64, test: impl Fn(&Watched<'_>, CUdeviceptr)) {
    let run = |rig: &Rig| {
        call!(rig.driver, cuCtxSetCurrent(rig.device.context()));
        let mut others = 0;
        let bytes = rig.device.free_memory().unwrap() - left * GRANULE;
        call!(rig.driver, cuMemAlloc_v2(&mut others, bytes as usize));
        let mut config = config(1, 2048);
        config.limit_bytes = None;
        let watched = rig.pool(&config);
        test(&watched, others);
        watched.assert_intact();
    };
    let sim = Simulator::builder().memory_bytes(1000 * GRANULE).build().unwrap();
    run(&Rig::on(sim));
    Rig::gpu().iter().for_each(run);
}

/// Of what is free a five hundredth of the pool is no reason to move it, nor are small blocks' granules for large
/// ones: as long as there is more.
#[test]
fn what_a_full_device_has_left_and_what_is_free_serve_a_request_together() {
    on_a_device_with(500, |watched, others| {
        let stream = watched.rig.stream();
        let [little, much] = [1, 490].map(|granules| watched.malloc(granules * GRANULE, &stream));
        watched.free(little, &stream);
        // A GPU may give away less than it says to have.
        let most = (1..=10).rev();
        let together = most.map(|granules| watched.try_malloc(granules * GRANULE, &stream));
        let together = together.filter_map(Result::ok).next().expect("a block");
        assert_eq!(watched.pool.stats().free_bytes(), 0);
        let refused = watched.try_malloc(GRANULE, &stream);
        assert!(refused.is_err_and(|error| error.is_out_of_memory()));
        call!(watched.rig.driver, cuMemFree_v2(others));
        let again = watched.malloc(GRANULE, &stream);
        [much, together, again].into_iter().for_each(|held| watched.free(held, &stream));
    });
    on_a_device_with(30, |watched, others| {
        let stream = watched.rig.stream();
        let small = watched.malloc(512, &stream);
        watched.free(small, &stream);
        let most = (1..=30).rev();
        let all = most.map(|granules| watched.try_malloc(granules * GRANULE, &stream));
        let all = all.filter_map(Result::ok).next().expect("a block");
        assert_eq!(watched.pool.stats().free_bytes(), 0);
        watched.free(all, &stream);
        call!(watched.rig.driver, cuMemFree_v2(others));
    });
}

#[test]
fn a_full_device_is_not_asked_at_every_request() {
    on_a_device_with(40, |watched, others| {
        let stream = watched.rig.stream();
        // A GPU may give away less than it says to have.
        let mut held: Vec<_> =
            (0..8).map_while(|_| watched.try_malloc(5 * GRANULE, &stream).ok()).collect();
        assert!(held.len() >= 7);
        let driver = &watched.rig.driver;
        let asked =
            || driver.calls().iter().find(|call| call.0 == "cuMemCreate").map_or(0, |c| c.1);
        let before = asked();
        for round in 0..20 {
            // Two that lie apart come together, and go apart again.
            watched.free(held.remove(round % 4), &stream);
            watched.free(held.remove(round % 4 + 1), &stream);
            let two = watched.malloc(10 * GRANULE, &stream);
            watched.free(two, &stream);
            held.extend([(); 2].map(|()| watched.malloc(5 * GRANULE, &stream)));
        }
        assert!(asked() - before <= 8, "asked {} times", asked() - before);
        call!(watched.rig.driver, cuMemFree_v2(others));
        held.into_iter().for_each(|held| watched.free(held, &stream));
    });
}

/// What is missing is moved at once, although it is more than a request in haste would have moved.
#[test]
fn a_full_device_is_not_asked_for_what_has_to_move() {
    on_a_device_with(130, |watched, others| {
        let stream = watched.rig.stream();
        let one = || watched.malloc(GRANULE, &stream);
        // Something comes back between any two, so that none is made ahead.
        let mut held: Vec<_> = (0..120)
            .map(|_| {
                watched.free(watched.malloc(KIB, &stream), bare(&stream));
                one()
            })
            .collect();
        let rest: Vec<_> =
            (0..10).map_while(|_| watched.try_malloc(GRANULE, &stream).ok()).collect();
        let calls = || watched.rig.driver.calls();
        let (before, begin) = (calls(), Instant::now());
        for _ in 0..12 {
            // Sixty, each between two that stay.
            held.sort_unstable_by_key(|held| held.address());
            let (go, stay): (Vec<_>, Vec<_>) =
                held.into_iter().enumerate().partition(|(at, _)| at % 2 == 0);
            go.into_iter().for_each(|(_, held)| watched.free(held, bare(&stream)));
            let long = watched.malloc(60 * GRANULE, &stream);
            watched.free(long, bare(&stream));
            held = stay.into_iter().map(|(_, held)| held).collect();
            held.extend((0..60).map(|_| one()));
        }
        // What a device has is known for a second.
        let asked = calls().since(&before).count("cuMemCreate");
        assert!(asked <= 6 + begin.elapsed().as_secs(), "asked {asked} times");
        call!(watched.rig.driver, cuMemFree_v2(others));
        held.into_iter().chain(rest).for_each(|held| watched.free(held, &stream));
    });
}

/// Memory was moved for a request that leaves some of it over: the stream that freed it may be using that still.
#[test]
fn what_is_left_over_of_moved_memory_waits_for_its_stream() {
    let rig = Rig::simulated(Schedule::Manual);
    let mut settings = config(4, 96);
    settings.out_of_memory = WaitPolicy::FailAtOnce;
    settings.reuse.internal_dependencies = false;
    let watched = rig.pool(&settings);
    let (stream, other) = (rig.stream(), rig.stream());
    let [a, b, c] = [(); 3].map(|()| watched.malloc(GRANULE, &stream));
    let d = watched.malloc(GRANULE, &other);
    [a, c].into_iter().for_each(|held| watched.free(held, bare(&stream)));
    let long = watched.malloc(GRANULE + GRANULE / 2, &stream);
    assert!(watched.moved() > 0, "{}", watched.layout());
    let refused = watched.pool.malloc(GRANULE as usize / 2, &other);
    assert!(matches!(refused, Err(Error::OutOfMemory { .. })), "{refused:?}");
    stream.synchronize().unwrap();
    let rest = watched.malloc(GRANULE / 2, &other);
    [b, long].into_iter().for_each(|held| watched.free(held, &stream));
    [d, rest].into_iter().for_each(|held| watched.free(held, &other));
    watched.assert_intact();
}

/// And what is left over of new memory is anybody's at once.
#[test]
fn what_is_left_over_of_new_memory_is_nobodys() {
    let rig = Rig::simulated(Schedule::Manual);
    let watched = rig.small_pool();
    let (stream, other) = (rig.stream(), rig.stream());
    let of_other = watched.malloc(GRANULE, &other);
    let long = watched.malloc(GRANULE + GRANULE / 2, &stream);
    let rest = watched.malloc(GRANULE / 2, &other);
    assert_eq!(watched.usage(), 3);
    watched.free(long, &stream);
    [rest, of_other].into_iter().for_each(|held| watched.free(held, &other));
    watched.assert_intact();
}

/// Of neighbours that move together some were nobody's, and the work of another's stream still uses where it was.
#[test]
fn neighbours_that_move_leave_addresses_each_behind_its_own_fence() {
    let rig = Rig::simulated(Schedule::Manual);
    let watched = rig.pool(&config(5, 96));
    let (stream, other) = (rig.stream(), rig.stream());
    let mine = watched.malloc(GRANULE, &stream);
    // Longer, so that it does not become the other's.
    let nobodys = watched.malloc(2 * GRANULE, &other);
    assert_eq!(mine.address() + GRANULE, nobodys.address());
    let [between, last] = [(); 2].map(|()| watched.malloc(GRANULE, &stream));
    watched.free(nobodys, bare(&other));
    other.synchronize().unwrap();
    [mine, last].into_iter().for_each(|held| watched.free(held, bare(&stream)));
    let long = watched.malloc(4 * GRANULE, &stream);
    assert_eq!(watched.moved(), 3, "{}", watched.layout());
    // Only what nobody waits for can be unmapped: the first one's contents have not been looked at.
    watched.pool.trim_to(0).unwrap();
    assert_eq!(watched.pool.stats().zombie_bytes, GRANULE, "{}", watched.layout());
    [between, long].into_iter().for_each(|held| watched.free(held, &stream));
    watched.assert_intact();
}

/// What two streams have freed of one extent goes back, though questions give nothing away.
#[test]
fn a_trim_gives_back_what_two_streams_have_freed_of_one_extent() {
    Rig::everywhere(|rig| {
        let mut settings = config(4, 96);
        settings.reuse.opportunistic = false;
        let watched = rig.pool(&settings);
        let (stream, other) = (rig.stream(), rig.stream());
        // So that what is left over of the first half's granule is nobody's.
        let known = watched.malloc(GRANULE, &other);
        let halves = [&stream, &other].map(|of| (watched.malloc(GRANULE / 2, of), of));
        assert_eq!(watched.usage(), 2);
        halves.into_iter().for_each(|(held, of)| watched.free(held, bare(of)));
        call!(rig.driver, cuStreamSynchronize(stream.handle().raw()));
        call!(rig.driver, cuStreamSynchronize(other.handle().raw()));
        assert_eq!(watched.pool.trim_to(0).unwrap(), GRANULE, "{}", watched.layout());
        watched.free(known, &other);
        watched.assert_intact();
    });
}

/// In whichever way a request is served that no front has a block for.
#[test]
fn peaks_count_what_comes_from_behind_fronts() {
    let rig = Rig::simulated(Schedule::Eager);
    let watched = rig.pool(&config(4, 96));
    let (stream, other) = (rig.stream(), rig.stream());
    let peak_of = |bytes: u64| {
        watched.pool.reset_peaks();
        let held = watched.malloc(bytes, bare(&stream));
        watched.free(held, bare(&stream));
        watched.pool.stats().peak_live_bytes
    };
    let of = |stream: &Stream, bytes: [u64; 2]| bytes.map(|bytes| watched.malloc(bytes, stream));
    let pair = of(&stream, [GRANULE; 2]);
    let nobodys = watched.malloc(2 * GRANULE, &other);
    pair.into_iter().for_each(|held| watched.free(held, bare(&stream)));
    assert_eq!(peak_of(2 * GRANULE), 4 * GRANULE, "a block");
    let halves = of(&stream, [GRANULE + GRANULE / 2, GRANULE / 2]);
    watched.free(halves[1], bare(&stream));
    assert_eq!(peak_of(KIB), 3 * GRANULE + GRANULE / 2 + 4 * KIB, "one among large ones");
    watched.free(halves[0], bare(&stream));
    let [first, last] = of(&stream, [GRANULE; 2]);
    watched.free(nobodys, bare(&other));
    other.synchronize().unwrap();
    watched.free(last, bare(&stream));
    assert_eq!(peak_of(3 * GRANULE), 4 * GRANULE, "neighbours");
    assert_eq!(watched.moved(), 0);
    watched.free(first, &stream);
    watched.assert_intact();
}

/// Memory that has moved goes back as soon as it is mapped nowhere else, whatever addresses others have left since.
#[test]
fn a_trim_gives_back_what_moved_before_beside_addresses_that_still_wait() {
    let rig = Rig::simulated(Schedule::Manual);
    let watched = rig.pool(&config(80, 400));
    let pool = &watched.pool;
    // Half of so many granules move.
    let scattered = |stream: &Stream, granules: u64| {
        let held: Vec<_> = (0..granules).map(|_| watched.malloc(GRANULE, stream)).collect();
        let (go, stay): (Vec<_>, Vec<_>) =
            held.into_iter().enumerate().partition(|(at, _)| at % 2 == 0);
        go.into_iter().for_each(|(_, held)| watched.free(held, bare(stream)));
        let moved = watched.malloc(granules / 2 * GRANULE, stream);
        stay.into_iter().map(|(_, held)| held).chain([moved]).collect::<Vec<_>>()
    };
    let zombies = || pool.stats().zombie_bytes / GRANULE;
    let (one, two) = (rig.stream(), rig.stream());
    let first = scattered(&one, 20);
    assert_eq!(zombies(), 10);
    rig.device.synchronize().unwrap();
    let second = scattered(&two, 24);
    // Those of before are unmapped by then.
    assert_eq!(zombies(), 12);
    first.into_iter().for_each(|held| watched.free(held, bare(&one)));
    one.synchronize().unwrap();
    assert_eq!(pool.trim_to(0).unwrap(), 20 * GRANULE);
    assert_eq!(zombies(), 12);
    watched.validate();
    second.into_iter().for_each(|held| watched.free(held, bare(&two)));
    rig.device.synchronize().unwrap();
    assert_eq!(pool.trim_to(0).unwrap(), 24 * GRANULE);
    watched.assert_intact();
}

/// The longest go first, since each costs the same, and no more than are to go; where those that are left are too long
/// one of them goes all the same.
#[test]
fn a_trim_gives_back_as_few_extents_as_it_takes() {
    let rig = Rig::simulated(Schedule::Eager);
    let mut settings = config(0, 256);
    settings.limit_bytes = None;
    let watched = rig.pool(&settings);
    let stream = rig.stream();
    // Sixteen extents of two granules, and four of one.
    let long = watched.malloc(32 * GRANULE, &stream);
    let short = [(); 4].map(|()| watched.malloc(GRANULE, &stream));
    let trim = |keep: u64| {
        let released = watched.pool.trim_to(keep * GRANULE).unwrap();
        watched.validate();
        let stats = watched.pool.stats();
        (released / GRANULE, stats.mapped_bytes / GRANULE, stats.extent_count)
    };
    assert_eq!(watched.pool.stats().extent_count, 20);
    watched.free(long, &stream);
    assert_eq!(trim(36), (0, 36, 20));
    assert_eq!(trim(35), (2, 34, 19));
    short.into_iter().for_each(|held| watched.free(held, &stream));
    assert_eq!(trim(30), (4, 30, 17));
    assert_eq!(trim(27), (3, 27, 15));
    assert_eq!(trim(3), (24, 3, 3));
    watched.assert_intact();
}

/// Two long neighbours, the stream's own and nobody's, serve a request however many shorter blocks the stream has.
#[test]
fn a_run_of_long_blocks_is_found_among_thousands_of_short_ones() {
    const SHORT: usize = 132 << 10;
    for short in [10, 2500] {
        let sim = Simulator::builder().memory_bytes(2 << 30).build().unwrap();
        let device = vpmm::Driver::new(sim.driver()).unwrap().device(0).unwrap();
        let pool = Pool::new(&device, &config(500, 4000)).unwrap();
        let [own, other] = [(); 2].map(|()| device.stream().unwrap());
        let malloc = |granules: u64| pool.malloc((granules * GRANULE) as usize, &own).unwrap();
        let all = pool.malloc(24 * GRANULE as usize, &other).unwrap();
        let shorts: Vec<_> = (0..2 * short).map(|_| pool.malloc(SHORT, &own).unwrap()).collect();
        pool.free(all, bare(&other)).unwrap();
        device.synchronize().unwrap();
        // Nothing beside the third can grow.
        let [first, second, _third] = [10, 12, 2].map(malloc);
        assert_eq!(first.address() + 10 * GRANULE, second.address());
        pool.free(second, bare(&own)).unwrap();
        device.synchronize().unwrap();
        let busy = sim.spin(own.handle().raw()).unwrap();
        shorts.iter().step_by(2).for_each(|ptr| pool.free(*ptr, bare(&own)).unwrap());
        pool.free(first, bare(&own)).unwrap();
        let before = pool.stats();
        assert_eq!(malloc(20), first, "{short}");
        let stats = pool.stats();
        assert_eq!(stats.extents_moved, before.extents_moved, "{short}");
        assert_eq!(stats.mapped_bytes, before.mapped_bytes, "{short}");
        drop(busy);
        pool.validate().unwrap();
    }
}

/// Small blocks have no addresses left, and the device has more memory again than when it was asked last: what they
/// get among large ones is made, too.
#[test]
fn small_blocks_without_addresses_have_what_the_device_has_again() {
    let sim = Simulator::builder().build().unwrap();
    let device = vpmm::Driver::new(sim.driver()).unwrap().device(0).unwrap();
    let pool = Pool::new(&device, &config(60, 64)).unwrap();
    let stream = device.stream().unwrap();
    let small = || pool.malloc(64 << 10, &stream);
    // An eighth of the addresses.
    (0..8 * GRANULE / (64 * KIB)).for_each(|_| _ = small().unwrap());
    let large = |granules: u64| pool.malloc((granules * GRANULE) as usize, &stream).unwrap();
    large(20);
    let apart = [(); 4].map(|()| large(1));
    [apart[0], apart[2]].into_iter().for_each(|ptr| pool.free(ptr, bare(&stream)).unwrap());
    assert_eq!(pool.stats().mapped_bytes, 32 * GRANULE);
    sim.set_memory_limit(0, sim.memory_used(0) + GRANULE);
    // One is made, and the device said to have no more; two move.
    large(3);
    assert_eq!(pool.stats().mapped_bytes, 33 * GRANULE);
    sim.set_memory_limit(0, sim.memory_used(0) + 4 * GRANULE);
    small().unwrap();
    assert_eq!(pool.stats().mapped_bytes, 34 * GRANULE);
    pool.validate().unwrap();
}

/// In blocks of two granules and more, so that every extent that is not in use can move whole.
#[test]
fn with_few_addresses_what_is_refused_lacks_memory_or_addresses_in_a_row() {
    const LIMIT: u64 = 64;
    let rig = Rig::simulated(Schedule::Eager);
    let stream = rig.stream();
    let mut lacked_a_row = 0;
    for seed in 0..500 {
        let mut random = Lcg(seed);
        let config = config(LIMIT, 70 + seed % 60);
        let pool = Pool::new(&rig.device, &config).unwrap();
        let mut live: Vec<(DevicePtr, u64)> = Vec::new();
        for _ in 0..200 {
            if random.below(2) > 0 && !live.is_empty() {
                let (ptr, _) = live.swap_remove(random.below(live.len() as u64) as usize);
                pool.free(ptr, &stream).unwrap();
                continue;
            }
            let granules = 2 * (1 + random.below(12));
            let used: u64 = live.iter().map(|(_, granules)| granules).sum();
            match pool.malloc((granules * GRANULE) as usize, &stream) {
                Ok(ptr) => live.push((ptr, granules)),
                Err(_) if used + granules > LIMIT => {}
                Err(error) => {
                    let layout = pool.layout().to_string();
                    assert!(longest_row(&layout) < granules, "{granules} in {layout}: {error}");
                    lacked_a_row += 1;
                }
            }
        }
        pool.validate().unwrap();
        live.iter().for_each(|(ptr, _)| pool.free(*ptr, &stream).unwrap());
    }
    assert!(lacked_a_row > 0);
    rig.assert_clean();
}

/// The most granules in a row of the large part that are in no allocation, but for those at its end, which are not
/// drawn.
fn longest_row(layout: &str) -> u64 {
    let large = layout.rsplit(" | ").next().unwrap_or_default();
    let (mut row, mut longest) = (0, 0);
    for piece in large.split(['[', ']']).filter(|piece| !piece.is_empty()) {
        match piece.strip_prefix(['-', '*', '~']) {
            Some(granules) => row += granules.parse::<u64>().unwrap(),
            None => row = 0,
        }
        longest = longest.max(row);
    }
    longest
}

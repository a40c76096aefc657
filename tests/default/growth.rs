//! Where memory comes from that is not there: from what is free side by side, from what is free elsewhere, and new; each
//! with contents checked.

use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::CUresult;
use vpmm::{Error, Pool, WaitPolicy};

use crate::rig::{GRANULE, MIB, bare, config};
use crate::support::streams::{begin_capture, end_capture};
use crate::support::{Lcg, Rig};

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

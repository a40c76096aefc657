//! Several threads on one pool.

use std::collections::VecDeque;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;

use cuda_sim::Schedule;
use vpmm::{Pool, PoolConfig, Stream, StreamHandle};

use crate::rig::{GRANULE, KIB, MIB, config};
use crate::support::{Held, Lcg, Rig, Watched};

fn some_bytes(random: &mut Lcg) -> u64 {
    match random.below(4) {
        0 => 1 + random.below(64 * KIB),
        1 => 1 + random.below(2 * MIB),
        2 => (1 + random.below(4)) * GRANULE,
        _ => 512 << random.below(10),
    }
}

/// Allocates and frees at random on one stream. What the limit refuses is done without.
fn traffic(watched: &Watched<'_>, stream: &Stream, seed: u64, ops: usize) {
    let mut random = Lcg(seed);
    let mut held = VecDeque::<Held>::new();
    for _ in 0..ops {
        if random.below(2) == 0 && held.len() < 6 {
            match watched.try_malloc(some_bytes(&mut random), stream) {
                Ok(one) => held.push_back(one),
                Err(error) => assert!(error.is_out_of_memory(), "{error}"),
            }
        } else if let Some(one) =
            if random.below(2) == 0 { held.pop_front() } else { held.pop_back() }
        {
            watched.free(one, stream);
        }
    }
    held.drain(..).for_each(|held| watched.free(held, stream));
}

const SCHEDULES: [Schedule; 3] =
    [Schedule::Eager, Schedule::Late { patience: 3 }, Schedule::Random];

fn nothing_is_left(watched: &Watched<'_>) {
    assert_eq!(watched.pool.stats().live_count, 0);
    watched.assert_intact();
}

/// Little memory, so that threads take from each other all the time.
#[test]
fn each_on_its_own_stream() {
    let test = |rig: &Rig| {
        let watched = rig.pool(&config(24, 192));
        for round in 0..3 {
            std::thread::scope(|scope| {
                for thread in 0..4 {
                    let watched = &watched;
                    scope.spawn(move || {
                        let stream = watched.rig.stream();
                        traffic(watched, &stream, round * 10 + thread, 150);
                    });
                }
            });
            nothing_is_left(&watched);
        }
    };
    SCHEDULES.into_iter().for_each(|schedule| test(&Rig::simulated(schedule)));
    Rig::gpu().iter().for_each(test);
}

#[test]
fn all_on_one_stream() {
    let test = |rig: &Rig| {
        let watched = rig.pool(&config(24, 192));
        let stream = rig.stream();
        for round in 0..3 {
            std::thread::scope(|scope| {
                for thread in 0..4 {
                    let (watched, stream) = (&watched, &stream);
                    scope.spawn(move || traffic(watched, stream, round * 10 + thread, 150));
                }
            });
            nothing_is_left(&watched);
        }
    };
    SCHEDULES.into_iter().for_each(|schedule| test(&Rig::simulated(schedule)));
    Rig::gpu().iter().for_each(test);
}

/// More threads at a time than a stream has fronts for, then others in the places of those that
/// have ended.
#[test]
fn more_threads_than_fronts() {
    let rig = Rig::simulated(Schedule::Random);
    let watched = rig.pool(&config(64, 256));
    let stream = rig.stream();
    for round in 0..3 {
        let all_here = Barrier::new(70);
        std::thread::scope(|scope| {
            for thread in 0..70 {
                let (watched, stream, all_here) = (&watched, &stream, &all_here);
                scope.spawn(move || {
                    let first = watched.malloc(8 * KIB, stream);
                    all_here.wait();
                    watched.free(first, stream);
                    let mut random = Lcg(round * 100 + thread);
                    for _ in 0..20 {
                        let held = watched.malloc(512 << random.below(9), stream);
                        watched.free(held, stream);
                    }
                });
            }
        });
        nothing_is_left(&watched);
        // What ended threads left in their fronts is found.
        let most = watched.usage();
        let large = watched.malloc(60 * GRANULE, &stream);
        assert!(watched.usage() <= most.max(64));
        watched.free(large, &stream);
    }
    watched.assert_intact();
}

/// Threads that hit their fronts all the time while another empties these to grow.
#[test]
fn fronts_are_emptied_while_in_use() {
    for shared in [false, true] {
        let rig = Rig::simulated(Schedule::Eager);
        let watched = rig.pool(&config(48, 192));
        let common = rig.stream();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (watched, common, done) = (&watched, &common, &done);
            scope.spawn(move || {
                let stream = watched.rig.stream();
                for step in 0..60 {
                    let granules = 4 + step % 20;
                    if let Ok(held) = watched.try_malloc(granules * GRANULE, &stream) {
                        watched.free(held, &stream);
                    }
                }
                done.store(true, Ordering::Release);
            });
            for thread in 0..3 {
                scope.spawn(move || {
                    let own = watched.rig.stream();
                    let stream = if shared { common } else { &own };
                    let mut random = Lcg(thread);
                    while !done.load(Ordering::Acquire) {
                        let bytes =
                            [512, 3 * KIB, 64 * KIB, MIB, 3 * MIB][random.below(5) as usize];
                        for _ in 0..50 {
                            let ptr = watched.pool.malloc(bytes as usize, stream).unwrap();
                            watched.pool.free(ptr, stream).unwrap();
                        }
                        let held = watched.malloc(bytes, stream);
                        watched.free(held, stream);
                    }
                });
            }
        });
        nothing_is_left(&watched);
    }
}

/// What one thread allocates another frees, on another stream.
#[test]
fn memory_is_handed_from_thread_to_thread() {
    for schedule in SCHEDULES {
        let rig = Rig::simulated(schedule);
        let watched = rig.pool(&config(32, 192));
        let streams = [(); 3].map(|()| rig.stream());
        std::thread::scope(|scope| {
            let (mut senders, mut receivers) = (VecDeque::new(), Vec::new());
            for _ in 0..3 {
                let (sender, receiver) = channel::<Held>();
                senders.push_back(sender);
                receivers.push(receiver);
            }
            // Each gives to the next.
            senders.rotate_left(1);
            for (thread, receiver) in receivers.into_iter().enumerate() {
                let sender = senders.pop_front().expect("one for each");
                let (watched, streams) = (&watched, &streams);
                scope.spawn(move || {
                    let mut random = Lcg(thread as u64);
                    let (own, former) = (&streams[thread], &streams[(thread + 2) % 3]);
                    for _ in 0..80 {
                        match watched.try_malloc(some_bytes(&mut random), own) {
                            Ok(held) => sender.send(held).expect("the next is there"),
                            Err(error) => assert!(error.is_out_of_memory(), "{error}"),
                        }
                        for held in receiver.try_iter() {
                            watched.rig.order(former, own);
                            watched.free(held, own);
                        }
                    }
                    drop(sender);
                    for held in receiver.iter() {
                        watched.rig.order(former, own);
                        watched.free(held, own);
                    }
                });
            }
        });
        nothing_is_left(&watched);
    }
}

/// Streams come and go with the threads, their work and frees still pending.
#[test]
fn streams_end_in_all_threads() {
    for schedule in SCHEDULES {
        let rig = Rig::simulated(schedule);
        let watched = rig.pool(&config(24, 192));
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let watched = &watched;
                scope.spawn(move || {
                    for round in 0..12 {
                        let stream = watched.rig.stream();
                        traffic(watched, &stream, thread * 100 + round, 15);
                    }
                });
            }
        });
        nothing_is_left(&watched);
    }
}

#[test]
fn threads_on_their_own_default_streams() {
    for schedule in SCHEDULES {
        let rig = Rig::simulated(schedule);
        let watched = rig.pool(&config(24, 192));
        for round in 0..4 {
            std::thread::scope(|scope| {
                for thread in 0..4 {
                    let watched = &watched;
                    scope.spawn(move || {
                        let mut random = Lcg(round * 10 + thread);
                        for _ in 0..15 {
                            let bytes = some_bytes(&mut random);
                            if let Ok(held) = watched.try_malloc(bytes, StreamHandle::PER_THREAD) {
                                watched.free(held, StreamHandle::PER_THREAD);
                            }
                        }
                    });
                }
            });
            // The threads have ended, and their streams with them.
            nothing_is_left(&watched);
        }
        let all = watched.malloc(20 * GRANULE, StreamHandle::LEGACY);
        watched.free(all, StreamHandle::LEGACY);
        watched.assert_intact();
    }
}

/// As PyTorch's forward and backward passes are: two threads in turn on one stream. What one of them
/// has in its front is the other's too before the pool grows, and nobody's as the peak is counted.
#[test]
fn two_threads_in_turn_on_one_stream_hold_no_more_than_one() {
    let rig = Rig::simulated(Schedule::Eager);
    let pool = Pool::new(&rig.device, &PoolConfig::default()).expect("a pool");
    let stream = rig.stream();
    // Each has its own front, the first one's full of what the second needs.
    let turn = |blocks: u64| {
        let malloc = |at: u64| pool.malloc(((40 + at % 3) * MIB) as usize, &stream);
        let held: Vec<_> = (0..blocks).map(|at| malloc(at).expect("served")).collect();
        held.into_iter().for_each(|ptr| pool.free(ptr, &stream).expect("freed"));
    };
    for round in 0..3 {
        std::thread::scope(|scope| {
            turn(10);
            scope.spawn(|| turn(10));
        });
        let stats = pool.stats();
        assert_eq!(stats.live_bytes, 0);
        assert!(stats.peak_live_bytes <= 410 * MIB, "round {round}: {stats:?}");
        assert!(stats.mapped_bytes <= 420 * MIB, "round {round}: {stats:?}");
        assert!(stats.peak_live_bytes >= 409 * MIB, "round {round}: {stats:?}");
    }
    pool.validate().expect("intact");
}

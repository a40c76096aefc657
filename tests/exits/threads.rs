//! Threads that end, and their default streams with them.

use std::sync::mpsc;

use vpmm::StreamHandle;

use crate::rig::{ALL, GRANULE, Profile, SIZES, bounded};
use crate::support::{Held, Rig, Watched};

const OWN: StreamHandle = StreamHandle::PER_THREAD;

/// Everything has come back to everybody.
fn all_is_free(watched: &Watched<'_>) {
    let rig = watched.rig;
    rig.device.synchronize().unwrap();
    assert_eq!(watched.pool.stats().live_bytes, 0);
    let stream = rig.stream();
    let all = watched.malloc(ALL * GRANULE, &stream);
    watched.free(all, &stream);
    watched.assert_intact();
}

/// The thread has freed, and on the simulator ended, its work has not: nobody is given the memory.
#[test]
fn a_thread_ends_with_frees_pending() {
    bounded("threads::a_thread_ends_with_frees_pending", || {
        Rig::each(|rig, profile| {
            let watched = rig.pool(profile);
            let stream = rig.stream();
            std::thread::scope(|scope| {
                let (tell, told) = mpsc::channel();
                let (end, ends) = mpsc::channel::<()>();
                let (watched, stream) = (&watched, &stream);
                let thread = scope.spawn(move || {
                    let held = SIZES.map(|bytes| watched.malloc(bytes, OWN));
                    let stall = rig.stall(OWN);
                    held.iter().for_each(|held| watched.free(*held, OWN));
                    tell.send((stall, held)).unwrap();
                    // A GPU's driver keeps a thread from ending while its default stream has work,
                    // and everybody else from the driver: this one ends with frees, but no work.
                    if rig.sim.is_none() {
                        let _ = ends.recv();
                    }
                });
                let (stall, freed) = told.recv().unwrap();
                if rig.sim.is_some() {
                    thread.join().unwrap();
                }
                let others = SIZES.map(|bytes| watched.malloc(bytes, stream));
                for (own, other) in freed.iter().flat_map(|own| others.map(|other| (own, other))) {
                    let apart = own.address() + own.bytes <= other.address()
                        || other.address() + other.bytes <= own.address();
                    assert!(apart, "{profile:?}: {own:?} is in use, and so is {other:?}");
                }
                drop(stall);
                drop(end);
                others.into_iter().for_each(|held| watched.free(held, stream));
            });
            drop(stream);
            all_is_free(&watched);
        });
    });
}

/// More threads than a pool has places for streams' fronts, one after another.
#[test]
fn threads_end_one_after_another() {
    bounded("threads::threads_end_one_after_another", || {
        Rig::each(|rig, profile| {
            let watched = rig.pool(profile);
            // Driver 580.159 hangs when a thread ends with work on its default stream that uses memory
            // of the driver's own pools; a few lines of CUDA alone show it.
            let all = rig.sim.is_some() || profile != Profile::Paged;
            let sizes = if all { &SIZES[..] } else { &SIZES[..2] };
            let mut left: Option<Held> = None;
            for round in 0..100_usize {
                left = std::thread::scope(|scope| {
                    let of_thread = || {
                        // What the thread before had allocated and left.
                        if let Some(held) = left {
                            rig.device.synchronize().unwrap();
                            watched.free(held, OWN);
                        }
                        let held = watched.malloc(sizes[round % sizes.len()], OWN);
                        let next = watched.malloc(sizes[(round + 1) % sizes.len()], OWN);
                        watched.free(held, OWN);
                        Some(next)
                    };
                    scope.spawn(of_thread).join().unwrap()
                });
            }
            rig.device.synchronize().unwrap();
            watched.free(left.unwrap(), StreamHandle::LEGACY);
            all_is_free(&watched);
        });
    });
}

/// Pools that end with the thread that has them, in a variable of its own, with frees pending on its
/// default stream.
#[test]
fn a_pool_ends_with_its_thread() {
    thread_local! {
        static POOLS: std::cell::RefCell<Vec<vpmm::Pool>> = const { std::cell::RefCell::new(Vec::new()) };
    }
    bounded("threads::a_pool_ends_with_its_thread", || {
        Rig::everywhere(|rig| {
            let used = || rig.sim.as_ref().map_or(0, |sim| sim.memory_used(0));
            let before = used();
            let in_thread = || {
                POOLS.with_borrow_mut(|pools| {
                    for profile in Profile::ALL {
                        let pool = profile.open(&rig.device);
                        for bytes in SIZES {
                            let ptr = pool.malloc(bytes as usize, OWN).unwrap();
                            rig.fill(ptr.address(), bytes, bytes, OWN);
                            rig.check(ptr.address(), bytes, bytes, OWN);
                            pool.free(ptr, OWN).unwrap();
                        }
                        pools.push(pool);
                    }
                });
            };
            // A join waits for the drop of the thread's variables; a scope's end would not.
            std::thread::scope(|scope| scope.spawn(in_thread).join().unwrap());
            assert_eq!(rig.mismatches(), 0);
            assert_eq!(used(), before);
        });
    });
}

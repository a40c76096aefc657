//! Threads that end, and their default streams with them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use cuda_sim::Simulator;
use vpmm::{Driver, Error, StreamHandle};

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

/// Has the system start no more threads for this one; `false` where it will not have that.
#[cfg(target_os = "linux")]
fn starts_no_more_threads() -> bool {
    let step = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let is = |call: libc::c_long, jt, jf| {
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, jt, jf, call as u32)
    };
    let mut steps = [
        // The number of the call.
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        is(libc::SYS_clone3, 1, 0),
        is(libc::SYS_clone, 0, 1),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EAGAIN as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    // SAFETY: numbers alone, and a program that is alive during the call.
    unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter) == 0
    }
}

/// A pool that cannot have its helper is told of streams for a moment, by a thread that does not end it.
#[cfg(target_os = "linux")]
#[test]
fn a_pool_without_its_helper_ends_where_it_was_to_begin() {
    bounded("threads::a_pool_without_its_helper_ends_where_it_was_to_begin", || {
        let sim = Simulator::builder().build().unwrap();
        let driver = Driver::new(sim.driver()).unwrap();
        let device = driver.device(0).unwrap();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        device.synchronize().unwrap();
                    }
                });
            }
            let start = Instant::now();
            let refused = starts_no_more_threads();
            while refused && start.elapsed() < Duration::from_secs(2) {
                for _ in 0..100 {
                    let error = Profile::Helped.try_open(&device).unwrap_err();
                    assert!(matches!(error, Error::NoThread(_)), "{error}");
                }
            }
            done.store(true, Ordering::Relaxed);
        });
        drop(device);
        sim.assert_clean();
    });
}

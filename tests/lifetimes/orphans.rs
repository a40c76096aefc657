//! Pools whose handles are dropped while allocations are out, and pools that are destroyed.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::{CUresult, CUstream_flags_enum, CUstreamCaptureMode};
use vpmm::{Background, DevicePtr, Driver, Error, Pool, PoolConfig, StreamHandle};

use crate::rig::{GRANULE, Profile, SMALL};
use crate::support::streams::make;
use crate::support::{Rig, call};

const SIZES: [u64; 4] = [3 * GRANULE, SMALL, GRANULE, 20 * SMALL];

fn fill(rig: &Rig, pool: &Pool, stream: StreamHandle) -> Vec<(DevicePtr, u64)> {
    let held = SIZES.map(|bytes| (pool.malloc(bytes as usize, stream).unwrap(), bytes));
    for (seed, (ptr, bytes)) in held.iter().enumerate() {
        rig.fill(ptr.address(), *bytes, seed as u64 + 1, stream);
    }
    held.to_vec()
}

/// Memory that the device has given to somebody, in the simulator. The driver's own pool ends when
/// the GPU has come past its frees.
fn used(rig: &Rig) -> u64 {
    rig.device.synchronize().unwrap();
    rig.sim.as_ref().map_or(0, |sim| sim.memory_used(0))
}

#[test]
fn what_is_out_stays_until_another_thread_frees_it() {
    Rig::everywhere(|rig| {
        let before = used(rig);
        for profile in Profile::BOTH {
            let stream = rig.stream();
            let pool = profile.open(&rig.device);
            let clone = pool.clone();
            let held = fill(rig, &pool, stream.handle());
            drop(pool);
            drop(clone);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    for (seed, (ptr, bytes)) in held.iter().enumerate() {
                        // Still there, with its contents.
                        rig.check(ptr.address(), *bytes, seed as u64 + 1, stream.handle());
                        Pool::free_any(&rig.driver, *ptr, &stream).unwrap();
                    }
                });
            });
            // Everything went back with the last one.
            assert_eq!(used(rig), before, "{profile:?}");
            for (ptr, _) in held {
                assert_eq!(Pool::of(&rig.driver, ptr.address()), None);
                let error = Pool::free_any(&rig.driver, ptr, &stream).unwrap_err();
                assert!(matches!(error, Error::ForeignPointer { .. }), "{error}");
            }
            assert_eq!(rig.mismatches(), 0);
        }
    });
}

/// An orphan that was found is a pool as any other, whoever dropped it before.
#[test]
fn an_orphan_is_a_pool_again() {
    Rig::everywhere(|rig| {
        let before = used(rig);
        for profile in Profile::BOTH {
            let stream = rig.stream();
            let mut pool = profile.open(&rig.device);
            let mut held = fill(rig, &pool, stream.handle());
            for round in 0..3 {
                let (live, reserved) = (pool.stats().live_bytes, pool.stats().reserved_bytes);
                drop(pool);
                // From an address inside of a long one and of a small one.
                pool = Pool::of(&rig.driver, held[round % 2].0.address() + 5).unwrap();
                assert_eq!(
                    (pool.stats().live_bytes, pool.stats().reserved_bytes),
                    (live, reserved)
                );
                let ptr = pool.malloc(GRANULE as usize, &stream).unwrap();
                held.push((ptr, GRANULE));
                pool.validate().unwrap();
            }
            drop(pool);
            let last = held.pop().unwrap();
            for (ptr, _) in held {
                Pool::free_any(&rig.driver, ptr, &stream).unwrap();
            }
            // The last one through a handle that stays: the pool goes on.
            let pool = Pool::of(&rig.driver, last.0.address()).unwrap();
            pool.free(last.0, &stream).unwrap();
            let ptr = pool.malloc(SMALL as usize, &stream).unwrap();
            pool.free(ptr, &stream).unwrap();
            pool.validate().unwrap();
            drop(pool);
            assert_eq!(used(rig), before);
        }
    });
}

/// What is freed of an orphan, by whatever handle, goes back before the last of it is freed.
#[test]
fn an_orphan_gives_back_what_is_freed_of_it() {
    let rig = Rig::simulated(Schedule::Eager);
    let bytes = 4 * GRANULE;
    for profile in Profile::BOTH {
        let before = used(&rig);
        let stream = rig.stream();
        let pool = profile.open(&rig.device);
        let mut held: Vec<DevicePtr> =
            (0..20).map(|_| pool.malloc(bytes as usize, &stream).unwrap()).collect();
        drop(pool);
        // As much again for what is not free to its end, and for what is not looked at each time.
        let most = |held: &[DevicePtr]| 2 * held.len() as u64 * bytes + 12 * GRANULE;
        while held.len() > 2 {
            Pool::free_any(&rig.driver, held.pop().unwrap(), &stream).unwrap();
            let is = used(&rig) - before;
            assert!(is <= most(&held), "{profile:?}: {is} with {} left", held.len());
        }
        // A handle that takes more, and gives it back.
        let found = Pool::of(&rig.driver, held[0].address()).unwrap();
        let more = found.malloc(40 * GRANULE as usize, &stream).unwrap();
        found.free(more, &stream).unwrap();
        drop(found);
        let is = used(&rig) - before;
        assert!(is <= most(&held), "{profile:?}: {is} after a handle that took more");
        held.into_iter().for_each(|ptr| Pool::free_any(&rig.driver, ptr, &stream).unwrap());
        assert_eq!(used(&rig), before);
    }
    rig.assert_clean();
}

/// A mistake with an orphan's pointer is named, and changes nothing.
#[test]
fn mistakes_with_an_orphan() {
    let rig = Rig::simulated(Schedule::Eager);
    for profile in Profile::BOTH {
        let stream = rig.stream();
        let pool = profile.open(&rig.device);
        let held = [GRANULE, GRANULE].map(|bytes| pool.malloc(bytes as usize, &stream).unwrap());
        drop(pool);
        let inside = DevicePtr::from_address(held[0].address() + 512);
        let error = Pool::free_any(&rig.driver, inside, &stream).unwrap_err();
        assert!(matches!(error, Error::InteriorPointer { .. }), "{error}");
        Pool::free_any(&rig.driver, held[0], &stream).unwrap();
        let error = Pool::free_any(&rig.driver, held[0], &stream).unwrap_err();
        assert!(matches!(error, Error::DoubleFree { .. }), "{error}");
        Pool::free_any(&rig.driver, held[1], &stream).unwrap();
    }
    rig.assert_clean();
}

/// The free that ends the pool comes while work that uses the memory is still queued: the pool waits
/// for that before it gives the memory back.
#[test]
fn the_last_free_comes_before_the_work_has_run() {
    Rig::everywhere(|rig| {
        for profile in Profile::BOTH {
            let stream = rig.stream();
            let pool = profile.open(&rig.device);
            let stall = rig.stall(stream.handle());
            let held = fill(rig, &pool, stream.handle());
            drop(pool);
            let ended = std::thread::scope(|scope| {
                let freeing = scope.spawn(|| {
                    for (seed, (ptr, bytes)) in held.iter().enumerate() {
                        rig.check(ptr.address(), *bytes, seed as u64 + 1, stream.handle());
                        Pool::free_any(&rig.driver, *ptr, &stream).unwrap();
                    }
                    Instant::now()
                });
                std::thread::sleep(Duration::from_millis(20));
                let released = Instant::now();
                drop(stall);
                freeing.join().unwrap() >= released
            });
            assert!(ended, "{profile:?}: the memory went back with work queued that uses it");
            assert_eq!(rig.mismatches(), 0);
        }
    });
}

/// Each thread frees one allocation: whichever is last ends the pool, once.
#[test]
fn many_threads_free_an_orphan() {
    for profile in Profile::BOTH {
        let rig = Rig::simulated(Schedule::Random);
        let before = used(&rig);
        for _ in 0..20 {
            let streams = [(); 4].map(|()| rig.stream());
            let pool = profile.open(&rig.device);
            let held = streams.each_ref().map(|stream| {
                [GRANULE, SMALL].map(|bytes| pool.malloc(bytes as usize, stream).unwrap())
            });
            let (start, driver) = (Barrier::new(held.len() + 1), &rig.driver);
            std::thread::scope(|scope| {
                for (stream, held) in streams.iter().zip(held) {
                    let start = &start;
                    scope.spawn(move || {
                        start.wait();
                        // A handle that was found, and one that is dropped at once.
                        let found = Pool::of(driver, held[0].address()).unwrap();
                        found.free(held[0], stream).unwrap();
                        drop(found);
                        Pool::free_any(driver, held[1], stream).unwrap();
                    });
                }
                start.wait();
                drop(pool);
            });
            assert_eq!(used(&rig), before);
        }
        rig.assert_clean();
    }
}

/// Frees of threads that have their front at hand, and need no handle, beside the drop of the last one.
#[test]
fn frees_without_a_handle_come_before_the_last_one_goes_or_end_the_pool() {
    let rig = Rig::simulated(Schedule::Eager);
    let before = used(&rig);
    for _ in 0..300 {
        let pool = Profile::Default.open(&rig.device);
        let start = Barrier::new(4);
        std::thread::scope(|scope| {
            for _ in 1..4 {
                let (rig, start, pool) = (&rig, &start, pool.clone());
                scope.spawn(move || {
                    let stream = rig.stream();
                    let held = [(); 8].map(|()| pool.malloc(SMALL as usize, &stream).unwrap());
                    drop(pool);
                    start.wait();
                    for ptr in held {
                        Pool::free_any(&rig.driver, ptr, &stream).unwrap();
                    }
                });
            }
            start.wait();
            drop(pool);
        });
        assert_eq!(used(&rig), before);
    }
    rig.assert_clean();
}

/// Driver, device, stream and pool go in every order, with and without something allocated.
#[test]
fn values_are_dropped_in_any_order() {
    for profile in Profile::BOTH {
        for (order, frees) in (0..24).flat_map(|order| [(order, true), (order, false)]) {
            let sim = Simulator::builder().build().unwrap();
            let driver = Driver::new(sim.driver()).unwrap();
            let device = driver.device(0).unwrap();
            let stream = device.stream().unwrap();
            let pool = profile.open(&device);
            let held = [GRANULE, SMALL].map(|bytes| pool.malloc(bytes as usize, &stream).unwrap());
            // Whoever frees comes after the allocations, on whatever stream.
            stream.synchronize().unwrap();
            // Another way to the same driver, for what is left of it.
            let other = (!frees).then(|| Profile::Default.open(&device));
            if frees {
                held.iter().for_each(|ptr| pool.free(*ptr, &stream).unwrap());
            }
            let mut values: Vec<Box<dyn std::any::Any>> =
                vec![Box::new(driver), Box::new(device), Box::new(stream), Box::new(pool)];
            let mut rest = order;
            for count in (1..=4).rev() {
                drop(values.remove(rest % count));
                rest /= count;
            }
            if let Some(other) = other {
                let driver = other.device().driver();
                for ptr in held {
                    Pool::free_any(driver, ptr, StreamHandle::LEGACY).unwrap();
                }
            }
            sim.assert_clean();
            assert!(sim.leaks().is_empty(), "{profile:?} {order}: {:?}", sim.leaks());
        }
    }
}

#[test]
fn destroy_gives_back_what_is_allocated() {
    Rig::everywhere(|rig| {
        let before = used(rig);
        for profile in Profile::BOTH {
            let stream = rig.stream();
            let pool = profile.open(&rig.device);
            let held = fill(rig, &pool, stream.handle());
            pool.destroy().unwrap();
            assert_eq!(used(rig), before);
            assert_eq!(Pool::of(&rig.driver, held[0].0.address()), None);
            // So does it with an orphan.
            let pool = profile.open(&rig.device);
            let held = fill(rig, &pool, stream.handle());
            drop(pool);
            Pool::of(&rig.driver, held[1].0.address()).unwrap().destroy().unwrap();
            assert_eq!(used(rig), before);
            assert_eq!(Pool::of(&rig.driver, held[0].0.address()), None);
        }
    });
}

/// Nobody can wait for the device while a stream captures: the pool comes back, and ends when that is over. A capture
/// that the library knows of is not harmed by the attempt.
#[test]
fn a_pool_is_not_destroyed_while_a_stream_captures() {
    let rig = Rig::simulated(Schedule::Eager);
    let before = used(&rig);
    for profile in Profile::BOTH {
        let (stream, capturing) = (rig.stream(), rig.stream());
        let (blocking, _) = make(&rig, 0);
        let (unknown, _) = make(&rig, CUstream_flags_enum::CU_STREAM_NON_BLOCKING.0);
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        let mut pool = profile.open(&rig.device);
        let held = fill(&rig, &pool, stream.handle());
        let raw = capturing.handle().raw();
        let mut graph = std::ptr::null_mut();
        for (of, ends) in [
            (raw, CUresult::CUDA_SUCCESS),
            (blocking, CUresult::CUDA_SUCCESS),
            (unknown, CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED),
        ] {
            call!(rig.driver, cuStreamBeginCapture_v2(of, mode));
            let (same, error) = pool.destroy().expect_err("nothing can be given back");
            assert!(matches!(error, Error::StreamCapturing), "{error}");
            let end = rig.driver.raw().cuStreamEndCapture.unwrap();
            // SAFETY: a live stream, and a live pointer.
            assert_eq!(unsafe { end(of, &mut graph) }, ends);
            if ends == CUresult::CUDA_SUCCESS {
                call!(rig.driver, cuGraphDestroy(graph));
            }
            // Nothing has changed.
            assert_eq!(Pool::of(&rig.driver, held[0].0.address()).as_ref(), Some(&same));
            same.validate().unwrap();
            pool = same;
        }
        pool.destroy().unwrap();
        for made in [blocking, unknown] {
            call!(rig.driver, cuStreamDestroy_v2(made));
        }
        assert_eq!(used(&rig), before, "{profile:?}");
        // With nothing allocated no capture is in the way, nor harmed.
        let pool = profile.open(&rig.device);
        fill(&rig, &pool, stream.handle())
            .into_iter()
            .for_each(|(ptr, _)| pool.free(ptr, &stream).unwrap());
        call!(rig.driver, cuStreamBeginCapture_v2(raw, mode));
        pool.destroy().unwrap();
        call!(rig.driver, cuStreamEndCapture(raw, &mut graph));
        call!(rig.driver, cuGraphDestroy(graph));
        assert_eq!(used(&rig), before, "{profile:?}");
    }
    rig.assert_clean();
}

#[test]
fn a_pool_with_other_handles_is_not_destroyed() {
    let rig = Rig::simulated(Schedule::Eager);
    for profile in Profile::BOTH {
        let stream = rig.stream();
        let pool = profile.open(&rig.device);
        let others = [(); 2].map(|()| pool.clone());
        let ptr = pool.malloc(GRANULE as usize, &stream).unwrap();
        let (pool, error) = pool.destroy().unwrap_err();
        assert!(matches!(error, Error::PoolShared { others: 2 }), "{error}");
        assert!(error.to_string().contains('2'), "{error}");
        // Nothing has changed.
        assert_eq!(Pool::of(&rig.driver, ptr.address()).as_ref(), Some(&pool));
        drop(others);
        pool.free(ptr, &stream).unwrap();
        pool.validate().unwrap();
        pool.destroy().unwrap();
    }
    rig.assert_clean();
}

/// What is never freed keeps its pool and the driver's value; nobody else is in its way.
#[test]
fn what_is_never_freed_is_kept() {
    let sim = Simulator::builder().build().unwrap();
    for profile in Profile::BOTH {
        let driver = Driver::new(sim.driver()).unwrap();
        let device = driver.device(0).unwrap();
        let stream = device.stream().unwrap();
        let pool = profile.open(&device);
        let ptr = pool.malloc(GRANULE as usize, &stream).unwrap();
        let before = sim.memory_used(0);
        drop((pool, stream, device));
        assert!(sim.memory_used(0) >= before - GRANULE && sim.memory_used(0) >= GRANULE);
        Pool::of(&driver, ptr.address()).unwrap().destroy().unwrap();
    }
    assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
    sim.assert_clean();
}

/// Handles come and go in many threads while one allocation keeps the pool.
#[test]
fn handles_are_found_and_dropped_all_the_time() {
    for profile in Profile::BOTH {
        let rig = Rig::simulated(Schedule::Eager);
        let before = used(&rig);
        let stream = rig.stream();
        let pool = profile.open(&rig.device);
        let ptr = pool.malloc(GRANULE as usize, &stream).unwrap();
        drop(pool);
        let driver = &rig.driver;
        std::thread::scope(|scope| {
            for _ in 0..3 {
                let stream = rig.stream();
                scope.spawn(move || {
                    for _ in 0..200 {
                        let pool = Pool::of(driver, ptr.address()).unwrap();
                        let own = pool.malloc(SMALL as usize, &stream).unwrap();
                        drop(pool);
                        Pool::free_any(driver, own, &stream).unwrap();
                    }
                });
            }
        });
        Pool::of(driver, ptr.address()).unwrap().validate().unwrap();
        Pool::free_any(driver, ptr, &stream).unwrap();
        assert_eq!(used(&rig), before);
        rig.assert_clean();
    }
}

/// A helper goes on working for an orphan, and ends with it.
#[test]
fn an_orphan_with_a_helper() {
    let sim = Simulator::builder().schedule(Schedule::Random).seed(7).build().unwrap();
    let driver = Driver::new(sim.driver()).unwrap();
    let device = driver.device(0).unwrap();
    for round in 0..10 {
        let mut background = Background::default();
        background.period = Duration::ZERO;
        background.ahead_bytes = GRANULE;
        let mut config = PoolConfig::default();
        config.background = Some(background);
        let pool = Pool::new(&device, &config).unwrap();
        let streams = [(); 2].map(|()| device.stream().unwrap());
        let held = [(); 6].map(|()| pool.malloc(GRANULE as usize, &streams[0]).unwrap());
        drop(pool);
        for (at, ptr) in held.into_iter().enumerate() {
            Pool::free_any(&driver, ptr, &streams[at % 2]).unwrap();
            std::thread::sleep(Duration::from_micros(50 * round));
        }
    }
    drop((device, driver));
    sim.assert_clean();
    assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
}

/// Questions about foreign addresses look at every pool; one that is destroyed meanwhile is gone when
/// that returns.
#[test]
fn a_pool_is_destroyed_while_others_look_for_theirs() {
    let rig = Rig::simulated(Schedule::Eager);
    let before = used(&rig);
    let (driver, done) = (&rig.driver, AtomicBool::new(false));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    assert_eq!(Pool::of(driver, 5), None);
                }
            });
        }
        let stream = rig.stream();
        for profile in [Profile::Default, Profile::Paged].repeat(50) {
            let pool = profile.open(&rig.device);
            let ptr = pool.malloc(SMALL as usize, &stream).unwrap();
            assert_eq!(Pool::of(driver, ptr.address()).as_ref(), Some(&pool));
            pool.destroy().unwrap();
            assert_eq!(used(&rig), before);
        }
        done.store(true, Ordering::Relaxed);
    });
    rig.assert_clean();
}

/// An orphan keeps what is allocated, and what shares its handles; the rest goes back at once.
#[test]
fn free_memory_of_an_orphan_goes_back() {
    let rig = Rig::simulated(Schedule::Eager);
    let before = used(&rig);
    for profile in Profile::BOTH {
        let stream = rig.stream();
        let pool = profile.open(&rig.device);
        let held = [(); 8].map(|()| pool.malloc(4 * GRANULE as usize, &stream).unwrap());
        assert!(used(&rig) >= before + 32 * GRANULE);
        held[1..].iter().for_each(|ptr| pool.free(*ptr, &stream).unwrap());
        drop(pool);
        assert_eq!(used(&rig), before + 4 * GRANULE, "{profile:?}");
        Pool::free_any(&rig.driver, held[0], &stream).unwrap();
        assert_eq!(used(&rig), before);
    }
    rig.assert_clean();
}

//! Callbacks that may make room.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};

use cuda_sim::{Schedule, Simulator};
use vpmm::{DevicePtr, Error, Pool, Recovery, Stream, WaitPolicy};

use crate::rig::{GRANULE, LIMIT, Profile};
use crate::support::Rig;

/// A full pool: every granule is an allocation.
fn full(rig: &Rig, profile: Profile, stream: &Stream) -> (Pool, Vec<DevicePtr>) {
    let pool = profile.tight(&rig.device);
    let held = (0..LIMIT).map(|_| pool.malloc(GRANULE as usize, stream).unwrap()).collect();
    (pool, held)
}

fn free_all(pool: &Pool, held: impl IntoIterator<Item = DevicePtr>, stream: &Stream) {
    held.into_iter().for_each(|ptr| pool.free(ptr, stream).unwrap());
    pool.validate().unwrap();
    assert_eq!(pool.stats().live_count, 0);
}

/// Frees the youngest of some allocations.
fn free_one(pool: &Pool, held: &Mutex<Vec<DevicePtr>>, stream: &Stream) -> Recovery {
    match held.lock().unwrap().pop() {
        Some(ptr) => {
            pool.free(ptr, stream).unwrap();
            Recovery::Retry
        }
        None => Recovery::GiveUp,
    }
}

#[test]
fn a_callback_frees_until_there_is_room() {
    Rig::everywhere(|rig| {
        for profile in Profile::BOTH {
            let stream = Arc::new(rig.stream());
            let (pool, held) = full(rig, profile, &stream);
            let (held, calls) = (Arc::new(Mutex::new(held)), Arc::new(AtomicUsize::new(0)));
            let callback = pool.on_out_of_memory({
                let (held, calls, stream) = (held.clone(), calls.clone(), stream.clone());
                move |pool, error| {
                    calls.fetch_add(1, Ordering::Relaxed);
                    // The sizes are there; the map comes when the request is given up.
                    let named = matches!(error, Error::OutOfMemory { requested_bytes, .. }
                        if *requested_bytes == 3 * GRANULE);
                    assert!(named && error.map().is_none(), "{error}");
                    free_one(pool, &held, &stream)
                }
            });
            let ptr = pool.malloc(3 * GRANULE as usize, &*stream).unwrap();
            assert_eq!(calls.load(Ordering::Relaxed), 3, "{profile:?}");
            // What is there is handed out without a question.
            pool.free(ptr, &*stream).unwrap();
            let ptr = pool.malloc(3 * GRANULE as usize, &*stream).unwrap();
            assert_eq!(calls.load(Ordering::Relaxed), 3);
            drop(callback);
            let rest = std::mem::take(&mut *held.lock().unwrap());
            assert_eq!(rest.len() as u64, LIMIT - 3);
            free_all(&pool, rest.into_iter().chain([ptr]), &stream);
        }
    });
}

/// No lock of the pool is held: the free is another thread's.
#[test]
fn a_callback_has_another_thread_free() {
    Rig::everywhere(|rig| {
        for profile in Profile::BOTH {
            let (stream, other) = (rig.stream(), Arc::new(rig.stream()));
            let (pool, held) = full(rig, profile, &stream);
            // What is freed on the other stream comes after its use on the first.
            rig.order(&stream, &*other);
            let held = Arc::new(Mutex::new(held));
            let _callback = pool.on_out_of_memory({
                let (held, other) = (held.clone(), other.clone());
                move |pool, _| {
                    std::thread::scope(|scope| {
                        let freeing = scope.spawn(|| {
                            let answer = free_one(pool, &held, &other);
                            pool.validate().unwrap();
                            answer
                        });
                        freeing.join().unwrap()
                    })
                }
            });
            let ptr = pool.malloc(2 * GRANULE as usize, &stream).unwrap();
            let rest = std::mem::take(&mut *held.lock().unwrap());
            assert_eq!(rest.len() as u64, LIMIT - 2);
            free_all(&pool, rest.into_iter().chain([ptr]), &stream);
        }
    });
}

/// Two threads are in the callback at the same time.
#[test]
fn callbacks_run_in_several_threads_at_once() {
    let rig = Rig::simulated(Schedule::Eager);
    for profile in Profile::BOTH {
        let stream = rig.stream();
        let (pool, held) = full(&rig, profile, &stream);
        let both = Arc::new(Barrier::new(2));
        let _callback = pool.on_out_of_memory(move |_, _| {
            both.wait();
            Recovery::GiveUp
        });
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let error = pool.malloc(GRANULE as usize, &rig.stream()).unwrap_err();
                    assert!(error.map().is_some(), "{error}");
                });
            }
        });
        free_all(&pool, held, &stream);
    }
    rig.assert_clean();
}

/// The device is full; what another pool has free is what is missing.
#[test]
fn a_callback_takes_memory_from_another_pool() {
    for (profile, trims) in Profile::BOTH.into_iter().flat_map(|of| [(of, true), (of, false)]) {
        let sim = Simulator::builder().memory_bytes(64 * GRANULE).build().unwrap();
        let rig = Rig::on(sim);
        let stream = rig.stream();
        let unlimited = || profile.limited(&rig.device, None, WaitPolicy::default());
        let (pool, other) = (unlimited(), unlimited());
        let ptr = other.malloc(40 * GRANULE as usize, &stream).unwrap();
        other.free(ptr, &stream).unwrap();
        let error = pool.malloc(40 * GRANULE as usize, &stream).unwrap_err();
        assert!(error.is_out_of_memory(), "{error}");
        let other = Mutex::new(Some(other));
        let _callback = pool.on_out_of_memory(move |_, _| {
            let mut other = other.lock().unwrap();
            let given_back = match &*other {
                Some(other) if trims => other.trim_to(0).unwrap() > 0,
                // The end of it.
                _ => other.take().is_some(),
            };
            if given_back { Recovery::Retry } else { Recovery::GiveUp }
        });
        let ptr = pool.malloc(40 * GRANULE as usize, &stream).unwrap();
        free_all(&pool, [ptr], &stream);
        rig.assert_clean();
    }
}

#[test]
fn a_callback_that_never_helps_is_asked_a_number_of_times() {
    let rig = Rig::simulated(Schedule::Eager);
    for profile in Profile::BOTH {
        let stream = rig.stream();
        let (pool, held) = full(&rig, profile, &stream);
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = calls.clone();
        let _callback = pool.on_out_of_memory(move |_, _| {
            counted.fetch_add(1, Ordering::Relaxed);
            Recovery::Retry
        });
        let error = pool.malloc(GRANULE as usize, &stream).unwrap_err();
        assert!(error.map().is_some(), "{error}");
        assert_eq!(calls.load(Ordering::Relaxed), 256);
        free_all(&pool, held, &stream);
    }
    rig.assert_clean();
}

/// In order of registration, each until it gives up.
#[test]
fn callbacks_are_asked_in_order() {
    let rig = Rig::simulated(Schedule::Eager);
    for profile in Profile::BOTH {
        let stream = Arc::new(rig.stream());
        let (pool, held) = full(&rig, profile, &stream);
        let (held, asked) = (Arc::new(Mutex::new(held)), Arc::new(Mutex::new(Vec::new())));
        // How many each may free.
        let callbacks = [(1, 0), (2, 2), (3, 1), (4, 1)].map(|(name, may_free)| {
            let (held, asked, stream) = (held.clone(), asked.clone(), stream.clone());
            let freed = AtomicUsize::new(0);
            pool.on_out_of_memory(move |pool, _| {
                asked.lock().unwrap().push(name);
                if freed.fetch_add(1, Ordering::Relaxed) < may_free {
                    free_one(pool, &held, &stream)
                } else {
                    Recovery::GiveUp
                }
            })
        });
        let ptr = pool.malloc(3 * GRANULE as usize, &*stream).unwrap();
        assert_eq!(*asked.lock().unwrap(), [1, 2, 2, 2, 3], "{profile:?}");
        drop(callbacks);
        let rest = std::mem::take(&mut *held.lock().unwrap());
        free_all(&pool, rest.into_iter().chain([ptr]), &stream);
    }
    rig.assert_clean();
}

#[test]
fn a_callback_goes_with_its_registration() {
    let rig = Rig::simulated(Schedule::Eager);
    for profile in Profile::BOTH {
        let stream = rig.stream();
        let (pool, held) = full(&rig, profile, &stream);
        let asked = Arc::new(Mutex::new(Vec::new()));
        let register = |name: u32, act: Box<dyn Fn() + Send + Sync>| {
            let asked = asked.clone();
            pool.on_out_of_memory(move |_, _| {
                asked.lock().unwrap().push(name);
                act();
                Recovery::GiveUp
            })
        };
        let fails = || {
            let error = pool.malloc(GRANULE as usize, &stream).unwrap_err();
            assert!(error.is_out_of_memory(), "{error}");
            std::mem::take(&mut *asked.lock().unwrap())
        };
        // The first removes itself and the third while they are being asked.
        let handles = Arc::new(Mutex::new(Vec::new()));
        let removing = handles.clone();
        let first = register(1, Box::new(move || removing.lock().unwrap().clear()));
        let second = register(2, Box::new(|| ()));
        let third = register(3, Box::new(|| ()));
        handles.lock().unwrap().extend([first, third]);
        assert_eq!(fails(), [1, 2]);
        assert_eq!(fails(), [2]);
        drop(second);
        assert_eq!(fails(), []);
        register(4, Box::new(|| ())).keep();
        assert_eq!(fails(), [4]);
        free_all(&pool, held, &stream);
        // A registration may outlive its pool.
        let late = register(5, Box::new(|| ()));
        drop(pool);
        drop(late);
    }
    rig.assert_clean();
}

/// A callback's own requests may fail: they call nobody.
#[test]
fn callbacks_are_not_called_from_callbacks() {
    let rig = Rig::simulated(Schedule::Eager);
    for profile in Profile::BOTH {
        let stream = Arc::new(rig.stream());
        let (pool, held) = full(&rig, profile, &stream);
        let (other, others) = full(&rig, profile, &stream);
        let calls = Arc::new(AtomicUsize::new(0));
        let own = |asked: Pool| {
            let (calls, stream) = (calls.clone(), stream.clone());
            move |pool: &Pool, _: &Error| {
                calls.fetch_add(1, Ordering::Relaxed);
                for pool in [pool, &asked] {
                    let error = pool.malloc(GRANULE as usize, &*stream).unwrap_err();
                    assert!(error.map().is_some(), "{error}");
                }
                Recovery::GiveUp
            }
        };
        let callbacks =
            [pool.on_out_of_memory(own(other.clone())), other.on_out_of_memory(own(pool.clone()))];
        for (round, pool) in [(1, &pool), (2, &other), (3, &pool)] {
            assert!(pool.malloc(GRANULE as usize, &*stream).is_err());
            assert_eq!(calls.load(Ordering::Relaxed), round);
        }
        drop(callbacks);
        free_all(&pool, held, &stream);
        free_all(&other, others, &stream);
    }
    rig.assert_clean();
}

/// Also after one that panicked.
#[test]
fn a_panic_in_a_callback_is_the_callers() {
    let rig = Rig::simulated(Schedule::Eager);
    for profile in Profile::BOTH {
        let stream = rig.stream();
        let (pool, held) = full(&rig, profile, &stream);
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = calls.clone();
        let _callback = pool.on_out_of_memory(move |_, _| {
            assert!(counted.fetch_add(1, Ordering::Relaxed) > 0, "the first time");
            Recovery::GiveUp
        });
        let request = || pool.malloc(GRANULE as usize, &stream);
        let first = std::panic::catch_unwind(std::panic::AssertUnwindSafe(request));
        assert!(first.is_err());
        assert!(request().is_err());
        assert_eq!(calls.load(Ordering::Relaxed), 2);
        free_all(&pool, held, &stream);
    }
    rig.assert_clean();
}

/// A limit that was set later may be a callback's to raise: it is asked for what is longer than that, too.
#[test]
fn a_callback_raises_a_limit_that_was_set_later() {
    let rig = Rig::simulated(Schedule::Eager);
    for profile in Profile::BOTH {
        for made_with in [Some(LIMIT * GRANULE), None] {
            let stream = rig.stream();
            let pool = profile.limited(&rig.device, made_with, WaitPolicy::default());
            pool.limit_to(Some(2 * GRANULE)).unwrap();
            let asked = Arc::new(AtomicUsize::new(0));
            let counted = asked.clone();
            let callback = pool.on_out_of_memory(move |pool, _| {
                // The first time not far enough.
                let limit = [Some(3 * GRANULE), None][counted.fetch_add(1, Ordering::Relaxed)];
                pool.limit_to(limit).unwrap();
                Recovery::Retry
            });
            let ptr = pool.malloc(8 * GRANULE as usize, &stream).unwrap();
            assert_eq!(asked.load(Ordering::Relaxed), 2, "{profile:?}");
            drop(callback);
            // Nobody raises it: the request is refused at once.
            pool.limit_to(Some(2 * GRANULE)).unwrap();
            let error = pool.malloc(9 * GRANULE as usize, &stream).unwrap_err();
            assert!(error.is_out_of_memory() && error.map().is_some(), "{error}");
            free_all(&pool, [ptr], &stream);
        }
    }
    rig.assert_clean();
}

/// Nobody is asked for what no pool of this size can give, or about other mistakes.
#[test]
fn callbacks_are_for_shortage_only() {
    let rig = Rig::simulated(Schedule::Eager);
    for profile in Profile::BOTH {
        let stream = rig.stream();
        let pool = profile.tight(&rig.device);
        let _callback = pool.on_out_of_memory(|_, error| panic!("asked about {error}"));
        assert!(pool.malloc(0, &stream).is_err());
        assert!(pool.malloc(usize::MAX, &stream).is_err());
        let error = pool.malloc(((LIMIT + 1) * GRANULE) as usize, &stream).unwrap_err();
        assert!(error.map().is_some(), "{error}");
        rig.sim.as_ref().unwrap().fail_nth(
            "cuMemMap",
            1,
            cuda_sys::types::CUresult::CUDA_ERROR_UNKNOWN,
        );
        let error = pool.malloc(GRANULE as usize, &stream).unwrap_err();
        assert!(!error.is_out_of_memory() && error.map().is_none(), "{error}");
    }
}

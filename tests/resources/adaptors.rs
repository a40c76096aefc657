//! What each adaptor does that others do not.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex, OnceLock, Weak, mpsc};
use std::time::Duration;

use cuda_sys::types::CUstream_flags_enum;
use vpmm::caching::{CachingAllocator, CachingConfig};
use vpmm::resource::*;
use vpmm::{DevicePtr, Error, MemoryResource, Pool, PoolConfig, StreamHandle};

use crate::subjects::{MIB, malloc, plain_pool};
use crate::support::streams::{begin_quiet_capture, end_capture, make};
use crate::support::{Rig, call};
use crate::watched::Watched;

const STREAM: StreamHandle = StreamHandle::LEGACY;

#[test]
fn limiting_counts_what_succeeded_only() {
    let inner = Limiting::new(HostMalloc::new(), 5000);
    let outer = Limiting::new(&inner, 1 << 20);
    let ptr = outer.allocate(4000, 256, STREAM).expect("memory");
    assert_eq!((outer.allocated_bytes(), inner.allocated_bytes()), (4096, 4096));
    // Refused below: nothing counts above.
    let error = outer.allocate(1000, 256, STREAM).expect_err("above the limit");
    assert!(matches!(error, Error::OutOfMemory { limit_bytes: Some(5000), .. }), "{error}");
    assert!(outer.allocate(usize::MAX - 5, 256, STREAM).is_err());
    assert_eq!((outer.allocated_bytes(), inner.allocated_bytes()), (4096, 4096));
    // A free that fails counts nothing either.
    assert!(outer.deallocate(ptr, 3000, 256, STREAM).is_err());
    assert_eq!(outer.allocated_bytes(), 4096);
    outer.deallocate(ptr, 4000, 256, STREAM).expect("freed");
    assert_eq!((outer.allocated_bytes(), inner.allocated_bytes()), (0, 0));
    // The limit itself can be had, in the unit given.
    let bytewise = Limiting::with_alignment(HostMalloc::new(), 1001, 1);
    let ptr = bytewise.allocate(1001, 256, STREAM).expect("all of it");
    bytewise.deallocate(ptr, 1001, 256, STREAM).expect("freed");
}

/// Two threads whose requests fit one after the other never fail each other by asking at the same time.
#[test]
fn limiting_refuses_nobody_for_a_request_that_is_refused() {
    let limiting = Limiting::new(HostMalloc::new(), 1 << 20);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                assert!(limiting.allocate(2 << 20, 256, STREAM).is_err());
            }
        });
        for _ in 0..20_000 {
            let ptr = limiting.allocate(1 << 20, 256, STREAM).expect("never in the way");
            limiting.deallocate(ptr, 1 << 20, 256, STREAM).expect("freed");
        }
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!(limiting.allocated_bytes(), 0);
}

#[test]
fn statistics_nest() {
    let statistics = Statistics::new(HostMalloc::new());
    let get = |bytes| statistics.allocate(bytes, 256, STREAM).expect("memory");
    let free = |ptr, bytes| statistics.deallocate(ptr, bytes, 256, STREAM).expect("freed");
    let (a, b) = (get(100), get(200));
    statistics.push();
    free(b, 200);
    let c = get(1000);
    statistics.push();
    let d = get(50);
    free(d, 50);
    let inner = statistics.pop().expect("pushed");
    assert_eq!(inner.bytes, Counter { current: 0, peak: 50, total: 50 });
    let outer = statistics.pop().expect("pushed");
    assert_eq!(outer.bytes, Counter { current: 800, peak: 850, total: 1050 });
    assert_eq!(outer.allocations, Counter { current: 0, peak: 1, total: 2 });
    let all = statistics.counters();
    assert_eq!(all.bytes, Counter { current: 1100, peak: 1150, total: 1350 });
    assert_eq!(all.allocations, Counter { current: 2, peak: 3, total: 4 });
    assert_eq!(statistics.pop(), None, "the last are never popped");
    // What fails, and what is nothing, does not count.
    assert!(statistics.allocate(usize::MAX, 256, STREAM).is_err());
    assert!(statistics.deallocate(a, 99, 256, STREAM).is_err());
    statistics.deallocate(DevicePtr::NULL, 0, 256, STREAM).expect("nothing");
    assert_eq!(get(0), DevicePtr::NULL);
    assert_eq!(statistics.counters(), all);
    free(a, 100);
    free(c, 1000);
}

/// A resource below that checks nothing, and counts what comes through.
fn addresses(calls: &AtomicUsize) -> impl MemoryResource + '_ {
    let next = AtomicU64::new(0x10_0000);
    Callback::new(
        Facts::of_device_memory(),
        move |bytes, _, _| {
            let step = bytes.next_multiple_of(256) as u64;
            Ok(DevicePtr::from_address(next.fetch_add(step, Ordering::Relaxed)))
        },
        |_, _, _, _| {
            calls.fetch_add(1, Ordering::Relaxed);
            Ok(())
        },
    )
}

/// What a function gave that nobody gets goes back to its owner.
#[test]
fn a_callback_frees_what_it_cannot_hand_out() {
    let freed = Mutex::new(Vec::new());
    let given = |address| DevicePtr::from_address(address);
    let callback = Callback::new(
        Facts::of_device_memory().aligned(256, 4096),
        |_, _, _| Ok(given(0x1200)),
        |ptr, bytes, align, _| {
            freed.lock().expect("no panic").push((ptr, bytes, align));
            Ok(())
        },
    );
    assert_eq!(callback.allocate(100, 512, STREAM).expect("aligned"), given(0x1200));
    let refused = callback.allocate(100, 1024, STREAM);
    let named = matches!(refused, Err(Error::AlignmentUnsupported { align: 1024, most: 512 }));
    assert!(named, "{refused:?}");
    assert_eq!(*freed.lock().expect("no panic"), [(given(0x1200), 100, 1024)]);
}

#[test]
fn tracking_refuses_and_reports_wrong_frees() {
    let (frees, findings) = (AtomicUsize::new(0), Arc::new(Mutex::new(Vec::new())));
    let mut config = TrackingConfig::default();
    config.backtraces = true;
    let seen = Arc::clone(&findings);
    config.report = Report::Callback(Arc::new(move |finding| {
        seen.lock().expect("no panic").push(finding.to_string());
    }));
    let tracking = Tracking::new(addresses(&frees), config);
    let (a, b) =
        [100, 200].map(|bytes| tracking.allocate(bytes, 256, STREAM).expect("memory")).into();
    let wrong = [
        tracking.deallocate(a, 101, 256, STREAM),
        tracking.deallocate(DevicePtr::from_address(a.address() + 256 * 99), 100, 256, STREAM),
        tracking.deallocate(a, 0, 256, STREAM),
        tracking.deallocate(DevicePtr::NULL, 5, 256, STREAM),
    ];
    assert!(matches!(wrong[0], Err(Error::WrongSize { bytes: 100, given_bytes: 101, .. })));
    assert!(wrong.iter().all(Result::is_err));
    assert_eq!(frees.load(Ordering::Relaxed), 0, "none of them was passed on");
    assert_eq!(findings.lock().expect("no panic").len(), 4);
    tracking.deallocate(a, 100, 256, STREAM).expect("freed");
    assert!(tracking.deallocate(a, 100, 256, STREAM).is_err(), "a double free");
    // What is left is reported at the end, with the place where it was made.
    let left = tracking.outstanding();
    assert_eq!((left.len(), left.bytes(), tracking.outstanding_bytes()), (1, 200, 200));
    assert_eq!(left.iter().next().map(|one| (one.ptr, one.number)), Some((b, 1)));
    drop(tracking);
    let findings = findings.lock().expect("no panic");
    let leak = findings.last().expect("a leak");
    assert!(leak.contains("1 allocation, 200 B") && leak.contains("number 1"), "{leak}");
    // Frames, by name where the program still has names.
    assert!(leak.lines().count() > 5 && leak.contains("0: "), "no backtrace in {leak}");
    assert_eq!(findings.len(), 6);
}

/// What is below may know better: that a pointer was freed behind the adaptor, or has another tag. What it gives out
/// while the free is under way has its place in the book.
#[test]
fn tracking_reports_wrong_frees_that_are_found_below() {
    let findings = Arc::new(Mutex::new(Vec::new()));
    let answer: Arc<Mutex<Option<Error>>> = Arc::default();
    let tracking: Arc<OnceLock<Weak<dyn MemoryResource>>> = Arc::default();
    let (answers, above) = (Arc::clone(&answer), Arc::clone(&tracking));
    let upstream = Callback::new(
        Facts::of_device_memory(),
        |_, _, _| Ok(DevicePtr::from_address(0x1000)),
        move |_, _, _, _| {
            let answer = answers.lock().expect("no panic").take();
            if let Some(Error::WrongSize { bytes, .. }) = answer {
                let tracking = above.get().and_then(Weak::upgrade).expect("made");
                tracking.allocate(bytes as usize, 256, STREAM).expect("the address again");
            }
            answer.map_or(Ok(()), Err)
        },
    );
    let mut config = TrackingConfig::default();
    let seen = Arc::clone(&findings);
    config.report = Report::Callback(Arc::new(move |finding| {
        seen.lock().expect("no panic").push(finding.to_string());
    }));
    let made = Arc::new(Tracking::new(upstream, config));
    let weak: Weak<dyn MemoryResource> = Arc::downgrade(&made) as _;
    assert!(tracking.set(weak).is_ok());
    let ptr = made.allocate(100, 256, STREAM).expect("an address");
    let address = ptr.address();
    let code = cuda_sys::types::CUresult::CUDA_ERROR_INVALID_VALUE;
    let refused = [
        (Error::ForeignPointer { address }, 1),
        (Error::StalePointer { address }, 1),
        (Error::DoubleFree { address }, 1),
        (Error::InteriorPointer { address, start: 0x800 }, 1),
        (Error::Driver { call: "cuMemFree_v2", code, bytes: 0 }, 1),
        (Error::Unsupported { what: "a free, for the test" }, 0),
        (Error::WrongSize { address, given_bytes: 100, bytes: 300 }, 1),
    ];
    for (error, told) in refused {
        *answer.lock().expect("no panic") = Some(error.clone());
        let refused = made.deallocate(ptr, 100, 256, STREAM).expect_err("refused below");
        assert_eq!(refused.to_string(), error.to_string());
        let findings = std::mem::take(&mut *findings.lock().expect("no panic"));
        assert_eq!(findings.len(), told, "{error}: {findings:?}");
        assert!(findings.iter().all(|finding| finding.ends_with(&error.to_string())));
    }
    // Which went to the next owner meanwhile, with its own size.
    assert_eq!(made.outstanding_bytes(), 300);
    made.deallocate(ptr, 300, 256, STREAM).expect("its own");
    assert!(made.outstanding().is_empty());
}

/// A free that is refused below, since the memory was freed behind the adaptor, takes no place from who has it by then.
#[test]
fn aligned_memory_that_came_again_during_a_free_is_the_new_owners() {
    let aligned: Arc<OnceLock<Weak<dyn MemoryResource>>> = Arc::default();
    let (above, refuses) = (Arc::clone(&aligned), AtomicBool::new(true));
    let upstream = Callback::new(
        Facts::of_device_memory(),
        |_, _, _| Ok(DevicePtr::from_address(0x1100)),
        move |ptr, _, _, _| {
            if refuses.swap(false, Ordering::Relaxed) {
                let aligned = above.get().and_then(Weak::upgrade).expect("made");
                aligned.allocate(300, 256, STREAM).expect("the address again");
                return Err(Error::DoubleFree { address: ptr.address() });
            }
            Ok(())
        },
    );
    let made = Arc::new(Aligned::new(upstream, 4096).expect("a power of two"));
    let weak: Weak<dyn MemoryResource> = Arc::downgrade(&made) as _;
    assert!(aligned.set(weak).is_ok());
    let ptr = made.allocate(100, 256, STREAM).expect("an address");
    made.deallocate(ptr, 100, 256, STREAM).expect_err("refused below");
    made.deallocate(ptr, 300, 256, STREAM).expect("its own");
}

/// What is below may give out more addresses than there is memory, as a reservation of them does.
#[test]
fn what_is_outstanding_may_be_more_than_can_be_counted() {
    let next = AtomicU64::new(1);
    let endless = Callback::new(
        Facts::of_device_memory(),
        |_, _, _| Ok(DevicePtr::from_address(256 * next.fetch_add(1, Ordering::Relaxed))),
        |_, _, _, _| Ok(()),
    );
    let found = Arc::new(Mutex::new(String::new()));
    let mut config = TrackingConfig::default();
    let told = Arc::clone(&found);
    config.report = Report::Callback(Arc::new(move |finding| {
        *told.lock().expect("no panic") = finding.to_string();
    }));
    let tracking = Tracking::new(endless, config);
    for _ in 0..3 {
        tracking.allocate(usize::MAX / 2, 256, STREAM).expect("addresses");
    }
    assert_eq!(tracking.outstanding_bytes(), u64::MAX);
    assert_eq!(tracking.outstanding().bytes(), u64::MAX);
    drop(tracking);
    let found = found.lock().expect("no panic");
    assert!(found.starts_with("never freed: 3 allocations, "), "{found}");
}

#[test]
fn tracking_reports_no_leak_where_there_is_none_and_survives_its_reporter() {
    let mut config = TrackingConfig::default();
    config.report = Report::Callback(Arc::new(|_| panic!("the reporter fails")));
    let tracking = Tracking::new(HostMalloc::new(), config.clone());
    let ptr = tracking.allocate(100, 256, STREAM).expect("memory");
    tracking.deallocate(ptr, 100, 256, STREAM).expect("freed");
    drop(tracking);
    let leaking = Tracking::new(HostMalloc::new(), config);
    leaking.allocate(100, 256, STREAM).expect("memory");
    drop(leaking);
}

/// There is a moment when memory is free below and still known above: another thread that gets the address
/// then must not be mistaken for its former owner.
#[test]
fn an_address_that_comes_again_at_once_is_the_new_owners() {
    /// Gives one address again and again, and its free takes long.
    fn one_address(taken: &AtomicBool) -> impl MemoryResource + '_ {
        Callback::new(
            Facts::of_device_memory(),
            |_, _, _| {
                while taken.swap(true, Ordering::AcqRel) {
                    std::thread::yield_now();
                }
                Ok(DevicePtr::from_address(0x1100))
            },
            |_, _, _, _| {
                taken.store(false, Ordering::Release);
                for _ in 0..20 {
                    std::thread::yield_now();
                }
                Ok(())
            },
        )
    }
    let taken = AtomicBool::new(false);
    let mut config = TrackingConfig::default();
    config.report = Report::Silent;
    let tracking = Tracking::new(one_address(&taken), config);
    let also_taken = AtomicBool::new(false);
    let aligned = Aligned::new(one_address(&also_taken), 512).expect("a power of two");
    for resource in [&tracking as &dyn MemoryResource, &aligned] {
        std::thread::scope(|scope| {
            for thread in 1..=2 {
                scope.spawn(move || {
                    for _ in 0..300 {
                        let bytes = 100 * thread;
                        let ptr = resource.allocate(bytes, 256, STREAM).expect("its turn");
                        resource.deallocate(ptr, bytes, 256, STREAM).expect("its own");
                    }
                });
            }
        });
    }
    assert!(tracking.outstanding().is_empty());
}

/// One of a caller's own, which adaptors stand on as on any other.
#[test]
fn a_panic_below_leaves_what_is_above_as_it_was() {
    let broken = AtomicBool::new(true);
    let calls = AtomicUsize::new(0);
    let upstream = || {
        let (broken, upstream) = (&broken, addresses(&calls));
        let panics = || assert!(!broken.load(Ordering::Relaxed), "for the test");
        let upstream = Arc::new(upstream);
        let below = Arc::clone(&upstream);
        Callback::new(
            Facts::of_device_memory(),
            move |bytes, align, stream| {
                panics();
                upstream.allocate(bytes, align, stream)
            },
            move |ptr, bytes, align, stream| {
                panics();
                below.deallocate(ptr, bytes, align, stream)
            },
        )
    };
    let panics = |call: &dyn Fn()| catch_unwind(AssertUnwindSafe(call)).is_err();
    let mut config = TrackingConfig::default();
    config.report = Report::Silent;
    let limiting = Limiting::new(upstream(), 1000);
    let tracking = Tracking::new(upstream(), config);
    let aligned = Aligned::new(upstream(), 4096).expect("a power of two");
    let all: [(&dyn MemoryResource, &dyn Fn() -> u64, u64); 3] = [
        (&limiting, &|| limiting.allocated_bytes(), 768),
        (&tracking, &|| tracking.outstanding_bytes(), 700),
        // It counts nothing.
        (&aligned, &|| 0, 0),
    ];
    for (resource, counted, of_one) in all {
        broken.store(true, Ordering::Relaxed);
        assert!(panics(&|| drop(resource.allocate(700, 256, STREAM))), "{}", resource.describe());
        assert_eq!(counted(), 0, "{}", resource.describe());
        broken.store(false, Ordering::Relaxed);
        let ptr = resource.allocate(700, 256, STREAM).expect("as if nothing had been asked for");
        broken.store(true, Ordering::Relaxed);
        assert!(panics(&|| drop(resource.deallocate(ptr, 700, 256, STREAM))));
        assert_eq!(counted(), of_one, "{}", resource.describe());
        broken.store(false, Ordering::Relaxed);
        resource.deallocate(ptr, 700, 256, STREAM).expect("it is known still");
        assert_eq!(counted(), 0, "{}", resource.describe());
    }
    assert_eq!(calls.load(Ordering::Relaxed), 3, "each was freed once");
}

/// A function below asks the pool that it is called for to make room, while that grows or gives back.
#[test]
fn a_function_below_a_pool_may_call_back() {
    type Slot = Arc<Mutex<Option<Arc<dyn Fn() + Send + Sync>>>>;
    fn call(slot: &Slot) {
        let call = slot.lock().expect("no panic").clone();
        if let Some(call) = call {
            call();
        }
    }
    fn below(rig: &Rig, slot: &Slot) -> impl MemoryResource + 'static {
        let below = malloc(rig);
        let also = below.clone();
        let (here, there) = (Arc::clone(slot), Arc::clone(slot));
        Callback::new(
            below.facts(),
            move |bytes, align, stream| {
                call(&here);
                below.allocate(bytes, align, stream)
            },
            move |ptr, bytes, align, stream| {
                call(&there);
                also.deallocate(ptr, bytes, align, stream)
            },
        )
    }
    let is_lacking = |result: Result<DevicePtr, Error>| {
        assert!(result.as_ref().is_err_and(Error::is_out_of_memory), "{result:?}");
    };
    Rig::everywhere(|rig| {
        let slot = Slot::default();
        let config = CoalescingConfig::default();
        let pool = CoalescingPool::new(below(rig, &slot), &rig.device, &config).expect("a pool");
        let (pool, times) = (Arc::new(pool), Arc::new(AtomicUsize::new(0)));
        let (weak, counts) = (Arc::downgrade(&pool), Arc::clone(&times));
        *slot.lock().expect("no panic") = Some(Arc::new(move || {
            let Some(pool) = weak.upgrade() else { return };
            assert_eq!(pool.trim(STREAM, true).expect("nothing"), 0);
            is_lacking(pool.allocate(1 << 40, 256, STREAM));
            counts.fetch_add(1, Ordering::Relaxed);
        }));
        let ptr = pool.allocate(1 << 20, 256, STREAM).expect("memory");
        pool.deallocate(ptr, 1 << 20, 256, STREAM).expect("freed");
        assert_eq!(pool.trim(STREAM, true).expect("all"), MIB);
        assert_eq!(times.load(Ordering::Relaxed), 2);
        drop(pool);

        let slot = Slot::default();
        let mut config = FixedSizeConfig::default();
        config.at_start = false;
        let blocks = FixedSize::new(below(rig, &slot), &rig.device, &config).expect("blocks");
        let blocks = Arc::new(blocks);
        let weak = Arc::downgrade(&blocks);
        *slot.lock().expect("no panic") = Some(Arc::new(move || {
            let Some(blocks) = weak.upgrade() else { return };
            is_lacking(blocks.allocate(1 << 20, 256, STREAM));
        }));
        let ptr = blocks.allocate(1 << 20, 256, STREAM).expect("memory");
        blocks.deallocate(ptr, 1 << 20, 256, STREAM).expect("freed");
    });
}

/// Two threads are each in a function below one resource, and call the other there, which has to grow.
#[test]
fn functions_below_two_resources_may_call_the_other_at_the_same_time() {
    type Shared = Arc<dyn MemoryResource>;
    type Other = Arc<OnceLock<Weak<dyn MemoryResource>>>;
    /// Refuses so many requests first. With the next one both threads are in.
    fn below(rig: &Rig, refuses: usize, asks: usize, met: &Arc<Barrier>, other: &Other) -> Shared {
        let below = malloc(rig);
        let also = below.clone();
        let left = AtomicUsize::new(refuses + 1);
        let (met, other) = (Arc::clone(met), Arc::clone(other));
        Arc::new(Callback::new(
            below.facts(),
            move |bytes, align, stream| {
                let less = |left: usize| left.checked_sub(1);
                match left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less) {
                    Ok(1) => {
                        met.wait();
                        let other = other.get().and_then(Weak::upgrade).expect("it lives");
                        if let Ok(ptr) = other.allocate(asks, 256, stream) {
                            other.deallocate(ptr, asks, 256, stream)?;
                        }
                    }
                    Ok(_) => return Ok(DevicePtr::NULL),
                    Err(_) => {}
                }
                below.allocate(bytes, align, stream)
            },
            move |ptr, bytes, align, stream| also.deallocate(ptr, bytes, align, stream),
        ))
    }
    let pool = |rig: &Rig, below| -> Shared {
        let config = CoalescingConfig::default();
        Arc::new(CoalescingPool::new(below, &rig.device, &config).expect("a pool"))
    };
    let blocks = |rig: &Rig, below| -> Shared {
        let mut config = FixedSizeConfig::default();
        config.at_start = false;
        Arc::new(FixedSize::new(below, &rig.device, &config).expect("blocks"))
    };
    let caching = |rig: &Rig, below| -> Shared {
        let config = CachingConfig::default();
        Arc::new(CachingAllocator::over(below, &rig.device, &config).expect("an allocator"))
    };
    type Make<'a> = &'a dyn Fn(&Rig, Shared) -> Shared;
    let all: [(Make<'_>, usize, usize); 3] =
        [(&pool, 0, 1 << 40), (&blocks, 0, 1 << 20), (&caching, 1, 1 << 40)];
    for (make, refuses, asks) in all {
        let rig = Rig::simulated(cuda_sim::Schedule::Eager);
        // The threads may end last.
        rig.may_leave_events();
        let met = Arc::new(Barrier::new(2));
        let others = [Other::default(), Other::default()];
        let each = others.each_ref();
        let each = each.map(|other| make(&rig, below(&rig, refuses, asks, &met, other)));
        let what = each[0].describe().to_string();
        for (other, resource) in others.iter().zip([&each[1], &each[0]]) {
            other.set(Arc::downgrade(resource)).expect("once");
        }
        let (done, finished) = mpsc::channel();
        for resource in each.clone() {
            let done = done.clone();
            std::thread::spawn(move || {
                let ptr = resource.allocate(1 << 20, 256, STREAM).expect("memory");
                resource.deallocate(ptr, 1 << 20, 256, STREAM).expect("freed");
                done.send(()).expect("the test goes on");
            });
        }
        for _ in 0..2 {
            let waited = finished.recv_timeout(Duration::from_secs(20));
            waited.unwrap_or_else(|_| panic!("two threads wait for each other: {what}"));
        }
    }
}

#[test]
fn a_failure_callback_is_asked_until_it_gives_up() {
    let limiting = Limiting::new(HostMalloc::new(), 1 << 20);
    let asked = Mutex::new(Vec::new());
    let resource = FailureCallback::new(&limiting, |bytes, error: &Error| {
        assert!(error.is_out_of_memory());
        let mut asked = asked.lock().expect("no panic");
        asked.push(bytes);
        asked.len() < 4
    });
    assert!(resource.allocate(2 << 20, 256, STREAM).is_err());
    assert_eq!(*asked.lock().expect("no panic"), [2 << 20; 4]);
    // Not for what more memory would not help.
    assert!(matches!(resource.allocate(1, 3, STREAM), Err(Error::BadAlignment { .. })));
    assert_eq!(asked.lock().expect("no panic").len(), 4);
}

#[test]
fn aligned_hands_out_a_part_and_gives_all_back() {
    let limiting = Limiting::new(plain_pool(&Rig::simulated(cuda_sim::Schedule::Eager)), 1 << 20);
    let aligned = Aligned::new(&limiting, 4096).expect("a power of two").from_bytes(5000);
    // Below the threshold: as asked for.
    let small = aligned.allocate(4000, 256, STREAM).expect("memory");
    assert_eq!(limiting.allocated_bytes(), 4096);
    let asked = aligned.allocate(1000, 1024, STREAM).expect("memory");
    assert!(asked.address().is_multiple_of(1024));
    let large = aligned.allocate(6000, 256, STREAM).expect("memory");
    assert!(large.address().is_multiple_of(4096));
    assert_eq!(limiting.allocated_bytes(), 4096 + 1792 + 9984);
    assert!(matches!(
        aligned.deallocate(large, 6001, 256, STREAM),
        Err(Error::WrongSize { bytes: 6000, .. })
    ));
    for (ptr, bytes, align) in [(small, 4000, 256), (asked, 1000, 1024), (large, 6000, 256)] {
        aligned.deallocate(ptr, bytes, align, STREAM).expect("freed");
    }
    assert!(aligned.deallocate(large, 6000, 256, STREAM).is_err());
    assert_eq!(limiting.allocated_bytes(), 0);
    assert!(matches!(
        aligned.allocate(usize::MAX - 100, 256, STREAM),
        Err(Error::SizeOverflow { .. })
    ));
    assert!(aligned.allocate(1, 1 << 60, STREAM).is_err());
}

/// What begins before the part that is handed out is an allocation below, and none of the callers'.
#[test]
fn aligned_refuses_a_second_free_where_a_part_begins_below() {
    let rig = Rig::simulated(cuda_sim::Schedule::Eager);
    let checked = plain_pool(&rig);
    let below: [&dyn MemoryResource; 2] = [&malloc(&rig), &checked];
    for below in below {
        let what = below.describe().to_string();
        let aligned = Aligned::new(below, 4096).expect("a power of two").from_bytes(20_000);
        // So that the next one lies where a part cannot begin.
        let first = aligned.allocate(256, 256, STREAM).expect("memory");
        // As long as the part and what is spared for it.
        let bytes = 8192 + 4096 - 256;
        let freed = aligned.allocate(bytes, 256, STREAM).expect("memory");
        aligned.deallocate(freed, bytes, 256, STREAM).expect("freed");
        let part = aligned.allocate(8192, 4096, STREAM).expect("memory");
        assert!(part.address() - freed.address() < 4096, "{what}: {freed} is where it begins");
        assert_ne!(part, freed, "{what}");
        let again = aligned.deallocate(freed, bytes, 256, STREAM);
        assert!(matches!(again, Err(Error::DoubleFree { .. })), "{what}: {again:?}");
        let noted = aligned.record_stream(freed, STREAM);
        assert!(noted.is_err(), "{what}");
        aligned.deallocate(part, 8192, 4096, STREAM).expect("it is allocated still");
        aligned.deallocate(first, 256, 256, STREAM).expect("freed");
    }
}

/// The longest request that a resource tells of is served, and one byte more is not.
#[test]
fn the_longest_request_is_known_through_what_aligns_and_what_has_bins() {
    fn is_right(resource: &dyn MemoryResource) {
        let most = resource.facts().max_bytes.expect("what is below has blocks of one size");
        let ptr = resource.allocate(most, 256, STREAM).expect("not too long");
        resource.deallocate(ptr, most, 256, STREAM).expect("freed");
        let longer = resource.allocate(most + 1, 256, STREAM);
        assert!(matches!(longer, Err(Error::RequestTooLong { .. })), "{most}: {longer:?}");
    }
    let rig = Rig::simulated(cuda_sim::Schedule::Eager);
    let blocks = |bytes: u64| {
        let mut config = FixedSizeConfig::default();
        (config.block_bytes, config.blocks_at_once) = (bytes as usize, 4);
        Arc::new(FixedSize::new(malloc(&rig), &rig.device, &config).expect("blocks"))
    };
    let small = blocks(MIB);
    for (alignment, from) in [(256, 0), (4096, 0), (4096, 5000), (4096, 2 << 20)] {
        let aligned = Aligned::new(Arc::clone(&small), alignment).expect("a power of two");
        is_right(&aligned.from_bytes(from));
    }
    let binning = Binning::new(small, &rig.device);
    is_right(&binning);
    binning.add_bin(2 << 10, blocks(4 * MIB)).expect("a bin for less than upstream's");
    is_right(&binning);
    // Its blocks are shorter than what it is for.
    binning.add_bin(4 << 20, blocks(3 * MIB)).expect("a bin for more");
    is_right(&binning);
}

#[test]
fn thread_safe_lets_one_in_at_a_time() {
    let inside = AtomicUsize::new(0);
    let enter = || {
        assert_eq!(inside.fetch_add(1, Ordering::AcqRel), 0, "two at a time");
        std::thread::yield_now();
        inside.fetch_sub(1, Ordering::AcqRel);
    };
    let below = Callback::new(
        Facts::of_device_memory(),
        |_, _, _| {
            enter();
            Ok(DevicePtr::from_address(0x100))
        },
        |_, _, _, _| {
            enter();
            Ok(())
        },
    );
    let safe = ThreadSafe::new(below);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..500 {
                    let ptr = safe.allocate(1, 256, STREAM).expect("memory");
                    safe.deallocate(ptr, 1, 256, STREAM).expect("freed");
                }
            });
        }
    });
}

#[test]
fn prefetch_moves_managed_memory_and_no_other() {
    let rig = Rig::simulated(cuda_sim::Schedule::Late { patience: 3 });
    let stream = rig.stream();
    let managed = Managed::new(&rig.device).expect("managed memory");
    let prefetched = |resource: &dyn MemoryResource| {
        let before = rig.driver.calls();
        let ptr = resource.allocate(1 << 20, 256, stream.handle()).expect("memory");
        resource.deallocate(ptr, 1 << 20, 256, stream.handle()).expect("freed");
        rig.driver.calls().since(&before).count("cuMemPrefetchAsync")
    };
    assert_eq!(prefetched(&Prefetch::new(managed.clone(), &rig.device)), 1);
    assert_eq!(prefetched(&Prefetch::new(plain_pool(&rig), &rig.device)), 0);
    // A hint that the driver refuses does no harm.
    let sim = rig.sim.as_ref().expect("simulated");
    sim.fail_nth("cuMemPrefetchAsync", 1, cuda_sys::types::CUresult::CUDA_ERROR_UNKNOWN);
    assert_eq!(prefetched(&Prefetch::new(managed, &rig.device)), 1);
    rig.assert_clean();
}

/// Which device a default stream is of is not said by the one that memory is brought to.
#[test]
fn prefetch_to_another_device_is_on_the_stream_that_was_given() {
    let two = cuda_sim::Simulator::builder().devices(2).build().expect("a simulator");
    let rig = Rig::on(two);
    let there = rig.beside(1);
    let managed = Managed::new(&rig.device).expect("managed memory");
    let prefetch = Prefetch::new(managed, &there.device);
    let prefetched = || {
        let before = rig.driver.calls();
        let ptr = prefetch.allocate(1 << 20, 256, STREAM).expect("memory");
        prefetch.deallocate(ptr, 1 << 20, 256, STREAM).expect("freed");
        rig.driver.calls().since(&before).count("cuMemPrefetchAsync")
    };
    assert_eq!(prefetched(), 1);
    // Beside a capture of a blocking stream the legacy stream is not to be used: that of the same device.
    for (captures, calls) in [(&rig, 0), (&there, 1)] {
        let (raw, _) = make(captures, CUstream_flags_enum::CU_STREAM_DEFAULT.0);
        begin_quiet_capture(captures, raw);
        assert_eq!(prefetched(), calls);
        end_capture(captures, raw);
        call!(rig.driver, cuStreamDestroy_v2(raw));
    }
    rig.assert_clean();
}

#[test]
fn bins_of_one_upstream_do_not_draw_it_each() {
    let rig = Rig::simulated(cuda_sim::Schedule::Eager);
    let binning = Binning::with_powers(DeviceMalloc::new(&rig.device), &rig.device, 18..=19);
    let binning = binning.expect("bins");
    binning.add_bin(8 << 20, Arc::new(DeviceMalloc::new(&rig.device)) as _).expect("a bin");
    assert_eq!(
        binning.describe().to_string(),
        "binning(bin=256 KiB bin=512 KiB bin=8 MiB)\n\
         ├─ fixed-size(block=256 KiB at-once=128)\n\
         ├─ fixed-size(block=512 KiB at-once=64)\n\
         ├─ device-malloc(device=0)\n\
         └─ device-malloc(device=0)"
    );
}

/// Blocks of a bin's own are taken a few at a time where upstream never has as much as 32 MiB.
#[test]
fn bins_of_their_own_fit_into_a_small_upstream() {
    let rig = Rig::simulated(cuda_sim::Schedule::Eager);
    let mut config = CoalescingConfig::default();
    config.max_bytes = Some(16 * MIB);
    let pool = CoalescingPool::new(malloc(&rig), &rig.device, &config).expect("a pool");
    let binning = Binning::with_powers(pool, &rig.device, 18..=21).expect("bins");
    let sizes = [1 << 18, 1 << 19, 1 << 20, 1 << 21];
    let held = sizes.map(|bytes| binning.allocate(bytes, 256, STREAM).expect("a block"));
    for (ptr, bytes) in held.into_iter().zip(sizes) {
        binning.deallocate(ptr, bytes, 256, STREAM).expect("freed");
    }
}

#[test]
fn a_binning_sends_each_size_to_its_bin() {
    Rig::everywhere(|rig| {
        let upstream = Arc::new(Statistics::new(DeviceMalloc::new(&rig.device)));
        let binning = Binning::new(Arc::clone(&upstream), &rig.device);
        let watched = Watched::new(rig, &binning);
        let stream = rig.stream();
        // Allocated before there is a bin for them, and freed when there is.
        let early = [1000, 300_000].map(|bytes| watched.allocate(bytes, &stream));
        binning.add_own_bin(4096).expect("a bin");
        let middle = Arc::new(Statistics::new(plain_pool(rig)));
        binning.add_bin(1 << 20, Arc::clone(&middle) as _).expect("a bin");
        binning.add_own_bin(4096).expect("there already");
        assert_eq!(binning.bins(), [4096, 1 << 20]);
        early.into_iter().for_each(|held| watched.free(held, &stream));
        let before = upstream.counters().allocations.current;
        let held = [4000, 4096, 4097, 1 << 20, (1 << 20) + 1]
            .map(|bytes| watched.allocate(bytes, &stream));
        assert_eq!(middle.counters().allocations.current, 2);
        // One chunk of blocks, and one that is longer than all bins.
        assert_eq!(upstream.counters().allocations.current, before + 2);
        // A size of another bin is no way around the check.
        // A block's may be where a piece of upstream's begins, which upstream would free.
        for wrong in [5000, (1 << 20) + 1] {
            let refused = binning.deallocate(held[0].ptr, wrong, 256, stream.handle());
            assert!(matches!(refused, Err(Error::WrongSize { .. })), "{wrong}: {refused:?}");
        }
        assert!(binning.deallocate(held[2].ptr, 100, 256, stream.handle()).is_err());
        held.into_iter().for_each(|held| watched.free(held, &stream));
        assert_eq!(middle.counters().allocations.current, 0);
        watched.assert_intact();
        let blind = Callback::new(
            Facts::of_device_memory(),
            |_, _, _| Ok(DevicePtr::NULL),
            |_, _, _, _| Ok(()),
        );
        assert!(matches!(binning.add_bin(512, Arc::new(blind)), Err(Error::Config { .. })));
        drop(binning);
        assert_eq!(upstream.counters().allocations.current, 0);
    });
}

/// The driver frees whatever it knows, and a piece that a pool has from it begins where the pool's first block
/// does: a bin of the driver's must not be given what it has not given.
#[test]
fn a_bin_frees_what_it_gave_and_nothing_else() {
    Rig::everywhere(|rig| {
        let mut config = CoalescingConfig::default();
        config.initial_bytes = 16 * MIB;
        let pool = CoalescingPool::new(malloc(rig), &rig.device, &config).expect("a pool");
        let below: [Arc<dyn MemoryResource>; 2] = [
            Arc::new(pool),
            Arc::new(Pool::new(&rig.device, &PoolConfig::default()).expect("a pool")),
        ];
        for upstream in below {
            let binning = Binning::new(upstream, &rig.device);
            let watched = Watched::new(rig, &binning);
            let stream = rig.stream();
            let early = watched.allocate(1000, &stream);
            let beside = watched.allocate(3 << 20, &stream);
            let counted = Arc::new(Statistics::new(malloc(rig)));
            binning.add_bin(4096, Arc::clone(&counted) as _).expect("a bin");
            watched.free(early, &stream);
            assert_eq!(counted.counters(), Counters::default());
            let own = watched.allocate(1000, &stream);
            assert_eq!(counted.counters().allocations.current, 1);
            // With a size of no bin, too, it is the bin's that gave it; the driver knows no sizes.
            watched.check(&own, &stream);
            watched.give_up(&own);
            binning.deallocate(own.ptr, 5000, 256, stream.handle()).expect("freed");
            assert_eq!(counted.counters().allocations.current, 0);
            watched.free(beside, &stream);
            watched.assert_intact();
        }
    });
}

/// The piece of a bin's resource begins where its first block does, and the driver knows no sizes: it would free the
/// piece, with all blocks that others have of it.
#[test]
fn a_size_of_no_bin_frees_no_piece_of_a_bin_s() {
    Rig::everywhere(|rig| {
        let binning = Binning::new(malloc(rig), &rig.device);
        let mut config = FixedSizeConfig::default();
        (config.block_bytes, config.blocks_at_once) = (4096, 4);
        let blocks = Arc::new(FixedSize::new(malloc(rig), &rig.device, &config).expect("blocks"));
        binning.add_bin(4096, Arc::clone(&blocks) as _).expect("a bin");
        let watched = Watched::new(rig, &binning);
        let stream = rig.stream();
        let held = [1000, 4096, 4096].map(|bytes| watched.allocate(bytes, &stream));
        for wrong in [5000, 16384, 1 << 20] {
            let refused = binning.deallocate(held[0].ptr, wrong, 256, stream.handle());
            assert!(matches!(refused, Err(Error::WrongSize { bytes: 1000, .. })), "{refused:?}");
        }
        // Of others it says nothing, and they go on where they are from.
        let counted = Arc::new(Mutex::new(0));
        let mut config = TrackingConfig::default();
        let seen = Arc::clone(&counted);
        config.report = Report::Callback(Arc::new(move |_| *seen.lock().expect("no panic") += 1));
        let tracked = Tracking::new(plain_pool(rig), config);
        binning.add_bin(1 << 20, Arc::new(tracked)).expect("a bin");
        for bytes in [4096, 1 << 20, 2 << 20] {
            let more = watched.allocate(bytes, &stream);
            watched.free(more, &stream);
        }
        held.into_iter().for_each(|held| watched.free(held, &stream));
        assert_eq!(*counted.lock().expect("no panic"), 0, "wrong frees");
        watched.assert_intact();
    });
}

#[test]
fn bins_are_added_while_others_allocate() {
    let rig = Rig::simulated(cuda_sim::Schedule::Late { patience: 3 });
    let binning = Binning::new(plain_pool(&rig), &rig.device);
    let watched = Watched::new(&rig, &binning);
    std::thread::scope(|scope| {
        for thread in 0..3_usize {
            let watched = &watched;
            scope.spawn(move || {
                let stream = watched.rig.stream();
                let mut kept = Vec::new();
                for number in 0..200 {
                    kept.push(watched.allocate((number * 7919 + thread) % 100_000 + 1, &stream));
                    if kept.len() > 10 {
                        watched.free(kept.swap_remove(number % 10), &stream);
                    }
                }
                kept.into_iter().for_each(|held| watched.free(held, &stream));
            });
        }
        for power in 8..17 {
            binning.add_own_bin(1 << power).expect("a bin");
            std::thread::yield_now();
        }
    });
    watched.assert_intact();
}

#[test]
fn an_arena_says_what_stands_where() {
    Rig::everywhere(|rig| {
        let mut config = ArenaConfig::default();
        config.arena_bytes = Some(64 * MIB);
        let arena =
            Arena::new(DeviceMalloc::new(&rig.device), &rig.device, &config).expect("an arena");
        let (one, two) = (rig.stream(), rig.stream());
        let small =
            [&one, &two].map(|stream| arena.allocate(1000, 256, stream.handle()).expect("memory"));
        let large = arena.allocate(10 << 20, 256, one.handle()).expect("memory");
        let dump = arena.dump();
        assert_eq!((dump.arena_bytes(), dump.superblock_bytes()), (64 * MIB, 8 * MIB));
        assert_eq!(
            (dump.free_bytes(), dump.largest_free_bytes(), dump.streams()),
            (46 * MIB, 46 * MIB, 2)
        );
        let text = dump.to_string();
        for line in [
            "superblocks: 2 of 8 MiB",
            "large allocations: 1 of 10 MiB",
            "fragmentation 0.0 %",
            "1 KiB in 1 allocations",
        ] {
            assert!(text.contains(line), "{line} is missing in\n{text}");
        }
        // From either stream.
        arena.deallocate(small[0], 1000, 256, two.handle()).expect("freed");
        arena.deallocate(small[1], 1000, 256, two.handle()).expect("freed");
        arena.deallocate(large, 10 << 20, 256, two.handle()).expect("freed");
        // All of it can be had again, the superblocks too.
        let all = arena.allocate(64 << 20, 256, one.handle()).expect("all of it");
        arena.deallocate(all, 64 << 20, 256, one.handle()).expect("freed");
        rig.assert_clean();
    });
}

#[test]
fn a_stack_prints_as_a_tree_and_says_what_it_can_do() {
    let rig = Rig::simulated(cuda_sim::Schedule::Eager);
    let mut config = CoalescingConfig::default();
    config.max_bytes = Some(1 << 30);
    let pool =
        CoalescingPool::new(DeviceMalloc::new(&rig.device), &rig.device, &config).expect("a pool");
    let binning = Binning::new(pool, &rig.device);
    binning.add_own_bin(1 << 20).expect("a bin");
    let stack = Logging::to_writer(
        Tracking::new(Limiting::new(binning, 1 << 30), TrackingConfig::default()),
        LogFormat::Full,
        std::io::sink(),
    );
    assert_eq!(
        stack.describe().to_string(),
        "logging(format=full to=a writer)
└─ tracking
   └─ limiting(limit=1 GiB)
      └─ binning(bin=1 MiB)
         ├─ fixed-size(block=1 MiB at-once=32)
         └─ pool(max=1 GiB)
            └─ device-malloc(device=0)"
    );
    let facts = stack.facts();
    assert!(facts.stream_ordered && facts.device_accessible && !facts.host_accessible);
    assert_eq!(facts.checks, Checks::PointersAndSizes);
    assert_eq!(stack.device().map(vpmm::Device::ordinal), Some(0));
}

#[test]
fn uses_on_further_streams_reach_the_pool_below() {
    Rig::everywhere(|rig| {
        let pool = Pool::new(&rig.device, &PoolConfig::default()).expect("a pool");
        let stack = Statistics::new(Aligned::new(pool, 4096).expect("a power of two"));
        let watched = Watched::new(rig, &stack);
        assert!(stack.facts().records_streams);
        let (own, other) = (rig.stream(), rig.stream());
        for _ in 0..4 {
            let held = watched.allocate(3 << 20, &own);
            rig.order(&own, &other);
            let stall = rig.stall(other.handle());
            watched.check(&held, &other);
            stack.record_stream(held.ptr, other.handle()).expect("noted");
            watched.free(held, &own);
            // Not before the other stream has read it.
            let next = watched.allocate(3 << 20, &own);
            drop(stall);
            watched.free(next, &own);
        }
        watched.assert_intact();
        let none = DeviceMalloc::new(&rig.device);
        let refused = none.record_stream(DevicePtr::NULL, own.handle());
        assert!(matches!(refused, Err(Error::Unsupported { .. })));
    });
}

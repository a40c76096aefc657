//! Memory from other resources, and the allocator as one.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread::{sleep, spawn, yield_now};
use std::time::Duration;

use cuda_sys::types::CUstream_flags_enum;
use vpmm::caching::{CachingAllocator, CachingConfig};
use vpmm::resource::{
    Callback, CoalescingConfig, CoalescingPool, DeviceMalloc, DriverPool, DriverPoolConfig,
    Limiting,
};
use vpmm::{MemoryResource, Pool, PoolConfig, Stream, StreamHandle};

use crate::rig::{KIB, MIB};
use crate::support::streams::make;
use crate::support::{Rig, call};

/// Resources to stand on: all but the first are in the order of streams.
fn upstreams(rig: &Rig) -> Vec<Arc<dyn MemoryResource>> {
    let mut config = PoolConfig::default();
    config.va_size_bytes = Some(1 << 32);
    let below = CachingAllocator::new(&rig.device, &CachingConfig::default()).unwrap();
    vec![
        Arc::new(DeviceMalloc::new(&rig.device)),
        Arc::new(DriverPool::new(&rig.device, &DriverPoolConfig::default()).unwrap()),
        Arc::new(Pool::new(&rig.device, &config).unwrap()),
        Arc::new(below),
    ]
}

#[test]
fn it_stands_on_any_resource() {
    Rig::everywhere(|rig| {
        for upstream in upstreams(rig) {
            let config = CachingConfig::default();
            let allocator = CachingAllocator::over(upstream, &rig.device, &config).unwrap();
            let cached = rig.observe(allocator);
            let (own, side) = (rig.stream(), rig.stream());
            for _ in 0..3 {
                let held = [900, 3 * MIB, 30 * MIB].map(|bytes| cached.malloc(bytes, &own));
                cached.look_from(&held[1], &own, &side);
                held.into_iter().for_each(|held| cached.free(held, &own));
                let other = cached.malloc(50 * KIB, &side);
                cached.free(other, &side);
                cached.allocator.empty_cache().unwrap();
                assert_eq!(cached.reserved(), 0);
            }
            cached.assert_intact();
        }
    });
}

/// No event tells when it is free; all work is waited for then.
#[test]
fn what_a_thread_that_is_gone_has_used_goes_back_at_the_end() {
    Rig::everywhere(|rig| {
        let below = Arc::new(Limiting::new(DeviceMalloc::new(&rig.device), u64::MAX));
        let config = CachingConfig::default();
        let allocator = CachingAllocator::over(Arc::clone(&below), &rig.device, &config).unwrap();
        let cached = rig.observe(allocator);
        let own = rig.stream();
        let held = cached.malloc(3 * MIB, &own);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                call!(rig.driver, cuCtxSetCurrent(rig.device.context()));
                cached.look_from(&held, &own, StreamHandle::PER_THREAD);
            });
        });
        cached.free(held, &own);
        assert!(below.allocated_bytes() > 0);
        drop(cached);
        assert_eq!(below.allocated_bytes(), 0);
    });
}

/// Another thread gives back what belongs to it: the driver must not be told a stream that is gone.
#[test]
fn a_stream_ends_once_memory_has_gone_back_on_it() {
    Rig::everywhere(|rig| {
        let pool = DriverPool::new(&rig.device, &DriverPoolConfig::default()).unwrap();
        let pool = Arc::new(pool);
        let (facts, above) = (pool.facts(), Arc::clone(&pool));
        let (under_way, is_under_way) = channel();
        let (ends, has_ended) =
            (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (seen_to_end, seen_ended) = (Arc::clone(&ends), Arc::clone(&has_ended));
        let upstream = Callback::new(
            facts,
            move |bytes, align, stream| above.allocate(bytes, align, stream),
            move |ptr, bytes, align, stream| {
                under_way.send(()).expect("the test waits");
                while !seen_to_end.load(Ordering::Acquire) {
                    yield_now();
                }
                // As long as the end takes where nobody is in its way.
                sleep(Duration::from_millis(50));
                assert!(!seen_ended.load(Ordering::Acquire), "ended before the free on it");
                pool.deallocate(ptr, bytes, align, stream)
            },
        );
        let allocator =
            CachingAllocator::over(upstream, &rig.device, &CachingConfig::default()).unwrap();
        let own = rig.stream();
        let ptr = allocator.malloc(3 << 20, &own).unwrap();
        allocator.free(ptr).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| allocator.empty_cache().unwrap());
            is_under_way.recv().expect("the free is under way");
            ends.store(true, Ordering::Release);
            drop(own);
            has_ended.store(true, Ordering::Release);
        });
        assert_eq!(allocator.memory_reserved(), 0);
        drop(allocator);
        rig.assert_clean();
    });
}

/// Whoever ends a stream waits for the function that it was given to: that must not wait for the end in turn.
#[test]
fn a_function_below_borrows_a_stream_that_ends_meanwhile() {
    Rig::everywhere(|rig| {
        let pool = DriverPool::new(&rig.device, &DriverPoolConfig::default()).unwrap();
        let pool = Arc::new(pool);
        let (facts, above, device) = (pool.facts(), Arc::clone(&pool), rig.device.clone());
        let (under_way, is_under_way) = channel();
        let upstream = Callback::new(
            facts,
            move |bytes, align, stream| above.allocate(bytes, align, stream),
            move |ptr, bytes, align, stream| {
                under_way.send(()).expect("the test is there");
                // As long as the end takes to come this far.
                sleep(Duration::from_millis(50));
                // SAFETY: it is alive in this call, and the value ends within.
                drop(unsafe { Stream::borrowed(&device, stream) }?);
                pool.deallocate(ptr, bytes, align, stream)
            },
        );
        let allocator =
            CachingAllocator::over(upstream, &rig.device, &CachingConfig::default()).unwrap();
        let (raw, bare) = make(rig, CUstream_flags_enum::CU_STREAM_NON_BLOCKING.0);
        // SAFETY: destroyed below.
        let lent = unsafe { Stream::borrowed(&rig.device, bare) }.unwrap();
        let ptr = allocator.malloc(3 << 20, &lent).unwrap();
        allocator.free(ptr).unwrap();
        let (done, is_done) = channel();
        let (handle, flushed) = (allocator.clone(), done.clone());
        spawn(move || {
            handle.empty_cache().expect("what can go");
            drop(handle);
            let _ = flushed.send(());
        });
        is_under_way.recv().expect("the free is under way");
        spawn(move || {
            drop(lent);
            let _ = done.send(());
        });
        for _ in 0..2 {
            is_done.recv_timeout(Duration::from_secs(20)).expect("each waits for the other");
        }
        // In the order of what is over.
        allocator.empty_cache().unwrap();
        assert_eq!(allocator.memory_reserved(), 0);
        drop(allocator);
        call!(rig.driver, cuStreamDestroy_v2(raw));
        rig.assert_clean();
    });
}

#[test]
fn segments_of_foreign_streams_stay_over_a_stream_ordered_resource() {
    Rig::everywhere(|rig| {
        for upstream in upstreams(rig).into_iter().filter(|of| of.facts().stream_ordered) {
            let config = CachingConfig::default();
            let allocator = CachingAllocator::over(upstream, &rig.device, &config).unwrap();
            let cached = rig.observe(allocator);
            let (raw, foreign) = make(rig, 1);
            let held = cached.malloc(3 * MIB, foreign);
            cached.free(held, foreign);
            cached.allocator.empty_cache().unwrap();
            assert_eq!(cached.reserved(), 20 * MIB, "nobody vouches for the stream");
            cached.assert_intact();
            call!(rig.driver, cuStreamDestroy_v2(raw));
            drop(cached);
            rig.assert_clean();
        }
    });
}

#[test]
fn a_thread_needs_no_context() {
    Rig::everywhere(|rig| {
        for upstream in upstreams(rig) {
            let config = CachingConfig::default();
            let allocator = CachingAllocator::over(upstream, &rig.device, &config).unwrap();
            let own = rig.stream();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let defaults = [Stream::legacy(&rig.device), Stream::per_thread(&rig.device)];
                    for stream in defaults.iter().chain([&own]) {
                        let ptr = allocator.malloc(3 << 20, stream).unwrap();
                        allocator.record_stream(ptr, StreamHandle::LEGACY).unwrap();
                        allocator.record_stream(ptr, own.handle()).unwrap();
                        allocator.free(ptr).unwrap();
                        drop(allocator.alloc_zeros::<u8>(9, stream).unwrap());
                        drop(allocator.alloc_copy(&[7_u8], stream).unwrap());
                    }
                    allocator.empty_cache().unwrap();
                });
            });
            // But for what belongs to the thread's own stream, over a resource in stream order.
            let left = allocator.memory_reserved();
            let ordered = allocator.upstream().facts().stream_ordered;
            assert_eq!(left, if ordered { 22 << 20 } else { 0 });
            allocator.validate().unwrap();
            drop(allocator);
            rig.assert_clean();
        }
    });
}

/// A function of the caller's may panic: what it was asked for is not held, and what it was given back stays.
#[test]
fn a_panic_below_leaves_it_as_it_was() {
    Rig::everywhere(|rig| {
        let (fails, malloc) = (Arc::new(AtomicBool::new(false)), DeviceMalloc::new(&rig.device));
        let (here, there) = (Arc::clone(&fails), Arc::clone(&fails));
        let below = malloc.clone();
        let upstream = Callback::new(
            malloc.facts(),
            move |bytes, align, stream| {
                assert!(!here.load(Ordering::Relaxed), "for the test");
                malloc.allocate(bytes, align, stream)
            },
            move |ptr, bytes, align, stream| {
                assert!(!there.load(Ordering::Relaxed), "for the test");
                below.deallocate(ptr, bytes, align, stream)
            },
        );
        let allocator =
            CachingAllocator::over(upstream, &rig.device, &CachingConfig::default()).unwrap();
        let cached = rig.observe(allocator);
        let total = rig.device.total_memory().unwrap();
        cached.allocator.set_memory_fraction(64.5 * MIB as f64 / total as f64).unwrap();
        let own = rig.stream();
        let panics = |call: &dyn Fn()| catch_unwind(AssertUnwindSafe(call)).is_err();
        fails.store(true, Ordering::Relaxed);
        for _ in 0..3 {
            assert!(panics(&|| drop(cached.allocator.malloc(30 << 20, &own))));
        }
        fails.store(false, Ordering::Relaxed);
        let held = [(); 2].map(|()| cached.malloc(32 * MIB, &own));
        held.into_iter().for_each(|held| cached.free(held, &own));
        fails.store(true, Ordering::Relaxed);
        assert!(panics(&|| drop(cached.allocator.empty_cache())));
        cached.validate();
        assert_eq!(cached.reserved(), 64 * MIB);
        fails.store(false, Ordering::Relaxed);
        cached.allocator.empty_cache().unwrap();
        assert_eq!(cached.reserved(), 0);
        cached.assert_intact();
    });
}

/// A function below that makes room by the allocator that it is called for, where that is about to do so.
#[test]
fn a_function_below_may_call_back() {
    Rig::everywhere(|rig| {
        let slot: Arc<Mutex<Option<CachingAllocator>>> = Arc::default();
        let above = |slot: &Mutex<Option<CachingAllocator>>| slot.lock().unwrap().clone();
        let (malloc, here, there) =
            (DeviceMalloc::new(&rig.device), Arc::clone(&slot), Arc::clone(&slot));
        let below = malloc.clone();
        let upstream = Callback::new(
            malloc.facts(),
            move |bytes, align, stream| {
                if let Some(allocator) = above(&here) {
                    allocator.empty_cache()?;
                }
                malloc.allocate(bytes, align, stream)
            },
            move |ptr, bytes, align, stream| {
                if let Some(allocator) = above(&there) {
                    allocator.empty_cache()?;
                    let refused = allocator.malloc(1 << 40, stream);
                    assert!(refused.is_err_and(|error| error.is_out_of_memory()));
                }
                below.deallocate(ptr, bytes, align, stream)
            },
        );
        let allocator =
            CachingAllocator::over(upstream, &rig.device, &CachingConfig::default()).unwrap();
        let cached = rig.observe(allocator.clone());
        let own = rig.stream();
        let held = [(); 3].map(|()| cached.malloc(30 * MIB, &own));
        held.into_iter().for_each(|held| cached.free(held, &own));
        *slot.lock().unwrap() = Some(allocator);
        let total = rig.device.total_memory().unwrap();
        cached.try_malloc(total, &own).map(drop).unwrap_err();
        assert_eq!(cached.reserved(), 0);
        let held = cached.malloc(30 * MIB, &own);
        cached.free(held, &own);
        cached.allocator.empty_cache().unwrap();
        assert_eq!(cached.reserved(), 0);
        *slot.lock().unwrap() = None;
        cached.assert_intact();
    });
}

#[test]
fn it_is_a_resource_itself() {
    Rig::everywhere(|rig| {
        let cached = rig.cached_with("max_split_size_mb:64");
        let allocator = &cached.allocator;
        let facts = allocator.facts();
        assert!(facts.stream_ordered && facts.records_streams && facts.device_accessible);
        let text = allocator.describe().to_string();
        assert_eq!(text, "caching(max_split_size_bytes=67108864)\n└─ device-malloc(device=0)");
        let all = "max_non_split_rounding_mb:40,large_segment_size_mb:10,\
                   roundup_power2_divisions:[256:1,>:8]";
        let text = rig.cached_with(all).allocator.describe().to_string();
        let shown = "caching(max_non_split_rounding_bytes=41943040 large_segment_bytes=10485760 \
                     roundup_power2_divisions=[128:1,256:8,>:8])\n";
        assert!(text.starts_with(shown), "{text}");
        assert!(allocator.is_equal(&allocator.clone()));
        assert!(!allocator.is_equal(&rig.cached().allocator));
        assert_eq!(*allocator, allocator.clone());
        let (own, side) = (rig.stream(), rig.stream());
        assert_eq!(allocator.held_bytes(), Some(0));
        let ptr = allocator.allocate(1000, 256, own.handle()).unwrap();
        assert_eq!(allocator.held_bytes(), Some(2 << 20));
        MemoryResource::record_stream(allocator, ptr, side.handle()).unwrap();
        allocator.deallocate(ptr, 1000, 256, own.handle()).unwrap();
        let ptr = allocator.allocate(1000, 256, StreamHandle::LEGACY).unwrap();
        allocator.deallocate(ptr, 1000, 256, StreamHandle::LEGACY).unwrap();
        cached.assert_intact();
    });
}

/// What nobody vouched for is waited for at the end, before a resource in stream order has it for others.
#[test]
fn segments_of_foreign_streams_go_back_when_their_work_is_over() {
    Rig::everywhere(|rig| {
        let mut config = CoalescingConfig::default();
        (config.initial_bytes, config.max_bytes) = (20 * MIB, Some(20 * MIB));
        let below = CoalescingPool::new(DeviceMalloc::new(&rig.device), &rig.device, &config);
        let below = Arc::new(below.unwrap());
        let config = CachingConfig::default();
        let allocator = CachingAllocator::over(Arc::clone(&below), &rig.device, &config).unwrap();
        let ((raw, foreign), own) = (make(rig, 1), rig.stream());
        let ptr = allocator.malloc(3 << 20, foreign).unwrap();
        rig.fill(ptr.address(), 3 * MIB, 1, foreign);
        allocator.free(ptr).unwrap();
        drop(allocator);
        assert_eq!(below.live_bytes(), 0);
        let ptr = below.allocate(20 << 20, 256, own.handle()).unwrap();
        rig.fill(ptr.address(), 20 * MIB, 2, own.handle());
        below.deallocate(ptr, 20 << 20, 256, own.handle()).unwrap();
        assert_eq!(rig.mismatches(), 0);
        rig.assert_clean();
        call!(rig.driver, cuStreamDestroy_v2(raw));
    });
}

/// The stream of a request is alive: its own segments go back for it, whoever made it.
#[test]
fn segments_of_a_foreign_stream_go_back_for_its_own_request() {
    Rig::everywhere(|rig| {
        let mut config = CoalescingConfig::default();
        (config.initial_bytes, config.max_bytes) = (40 * MIB, Some(40 * MIB));
        let below = CoalescingPool::new(DeviceMalloc::new(&rig.device), &rig.device, &config);
        let config = CachingConfig::default();
        let allocator = CachingAllocator::over(below.unwrap(), &rig.device, &config).unwrap();
        let cached = rig.observe(allocator);
        let (raw, foreign) = make(rig, 1);
        let held = cached.malloc(20 * MIB, foreign);
        cached.free(held, foreign);
        let held = cached.malloc(38 * MIB, foreign);
        cached.free(held, foreign);
        cached.assert_intact();
        call!(rig.driver, cuStreamDestroy_v2(raw));
    });
}

/// Garbage of a stream that has ended is nobody's before its work is over, where what is below orders it by a stream.
#[test]
fn garbage_of_a_stream_that_ended_stays_while_its_work_goes_on() {
    Rig::everywhere(|rig| {
        let mut config = CoalescingConfig::default();
        (config.initial_bytes, config.max_bytes) = (140 * MIB, Some(140 * MIB));
        let below = CoalescingPool::new(DeviceMalloc::new(&rig.device), &rig.device, &config);
        let config: CachingConfig = "garbage_collection_threshold:0.1".parse().unwrap();
        let allocator = CachingAllocator::over(below.unwrap(), &rig.device, &config).unwrap();
        let all = rig.device.total_memory().unwrap();
        allocator.set_memory_fraction(400.0 * MIB as f64 / all as f64).unwrap();
        let cached = rig.observe(allocator);
        let (own, side) = (rig.stream(), rig.stream());
        let held = cached.malloc(60 * MIB, &side);
        cached.free(held, &side);
        drop(side);
        let held = cached.malloc(100 * MIB, &own);
        cached.free(held, &own);
        cached.assert_intact();
    });
}

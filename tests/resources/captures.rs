//! Captures beside memory that a driver's pool gives: it would be the graph's.

use std::sync::Arc;

use cuda_sim::Schedule;
use cuda_sys::types::CUstream_flags_enum;
use vpmm::resource::*;
use vpmm::{Error, MemoryResource};

use crate::subjects::{MIB, SUBJECTS, driver_pool, malloc};
use crate::support::{Rig, call, streams};
use crate::watched::Watched;

const BYTES: usize = 7 << 20;

/// The pools over it serve what they have, and take what is freed; only that they grow is refused. Nothing gets
/// into the graph, and afterwards all is as it was.
#[test]
fn a_drivers_pool_gives_a_capture_nothing_and_takes_nothing() {
    Rig::everywhere(|rig| {
        for subject in SUBJECTS.iter().filter(|of| of.name.contains("cuda-async")) {
            println!("{}", subject.name);
            let resource = subject.make(rig);
            let watched = Watched::new(rig, &resource);
            let capturing = rig.stream();
            let stream = capturing.handle();
            let kept = watched.allocate(BYTES, &capturing);
            let once = watched.allocate(BYTES, &capturing);
            watched.free(once, &capturing);
            streams::begin_capture(rig, stream.raw());
            let mut held = Vec::new();
            let refusal = loop {
                match resource.allocate(BYTES, 256, stream) {
                    Ok(ptr) => held.push(ptr),
                    Err(error) => break error,
                }
            };
            // What an arena has it has from the start.
            let whole = subject.name.starts_with("arena");
            let named = matches!(refusal, Error::StreamCapturing);
            assert!(named || whole && refusal.is_out_of_memory(), "{}: {refusal}", subject.name);
            let is_plain = subject.name.starts_with("cuda-async");
            assert_eq!(held.is_empty(), is_plain, "{}", subject.name);
            for ptr in held {
                resource.deallocate(ptr, BYTES, 256, stream).expect("freed");
            }
            if is_plain {
                let refused = resource.deallocate(kept.ptr, BYTES, 256, stream);
                assert!(matches!(refused, Err(Error::StreamCapturing)), "{refused:?}");
            }
            assert_eq!(streams::end_capture(rig, stream.raw()), 0, "{}", subject.name);
            watched.free(kept, &capturing);
            let again: Vec<_> = (0..40).map(|_| watched.allocate(BYTES, &capturing)).collect();
            again.into_iter().for_each(|held| watched.free(held, &capturing));
            watched.assert_intact();
        }
    });
}

/// What a pool gives back on a stream that captures stays, and goes when the capture is over.
#[test]
fn a_piece_that_a_capture_is_in_the_way_of_goes_back_later() {
    Rig::everywhere(|rig| {
        let below = Arc::new(driver_pool(rig).expect("a driver's pool"));
        let config = CoalescingConfig::default();
        let pool = CoalescingPool::new(Arc::clone(&below), &rig.device, &config).expect("a pool");
        let stream = rig.stream();
        let ptr = pool.allocate(BYTES, 256, stream.handle()).expect("memory");
        let raw = stream.handle().raw();
        streams::begin_capture(rig, raw);
        pool.deallocate(ptr, BYTES, 256, stream.handle()).expect("freed");
        let refused = pool.trim(stream.handle(), true);
        assert!(matches!(refused, Err(Error::StreamCapturing)), "{refused:?}");
        assert_eq!(pool.pool_bytes(), 7 * MIB);
        assert_eq!(streams::end_capture(rig, raw), 0);
        assert_eq!(pool.trim(stream.handle(), true).expect("given back"), 7 * MIB);
        stream.synchronize().expect("the stream finishes");
        assert_eq!(below.used_bytes().expect("a number"), 0);
        drop(pool);
        rig.assert_clean();
    });
}

/// Segments whose stream's work is over go back on the legacy stream: which nobody may use while a blocking
/// stream captures.
#[test]
fn segments_stay_while_a_capture_forbids_the_legacy_stream() {
    Rig::everywhere(|rig| {
        let below = driver_pool(rig).expect("a driver's pool");
        let config = vpmm::caching::CachingConfig::default();
        let caching = vpmm::CachingAllocator::over(below, &rig.device, &config).expect("one");
        let own = rig.stream();
        let ptr = caching.malloc(BYTES, &own).expect("memory");
        caching.free(ptr).expect("freed");
        own.synchronize().expect("the stream finishes");
        drop(own);
        let (raw, _) = streams::make(rig, 0);
        streams::begin_capture(rig, raw);
        caching.empty_cache().expect("what can go");
        assert_eq!(caching.memory_reserved(), 20 * MIB);
        assert_eq!(streams::end_capture(rig, raw), 0);
        caching.empty_cache().expect("all goes");
        assert_eq!(caching.memory_reserved(), 0);
        call!(rig.driver, cuStreamDestroy_v2(raw));
        drop(caching);
        rig.assert_clean();
    });
}

/// Memory that only a wait for the device would prove free: that would end the capture of who asks, of a blocking
/// stream beside, or of one of the library's, whether the resource knows it or not.
#[test]
fn no_request_waits_for_the_device_beside_a_capture() {
    Rig::everywhere(|rig| {
        let mut config = CoalescingConfig::default();
        (config.initial_bytes, config.max_bytes) = (16 * MIB, Some(16 * MIB));
        let pool = CoalescingPool::new(malloc(rig), &rig.device, &config).expect("a pool");
        let limit = Limiting::new(malloc(rig), 16 * MIB);
        let mut config = FixedSizeConfig::default();
        (config.block_bytes, config.blocks_at_once) = (16 << 20, 1);
        let blocks = FixedSize::new(limit, &rig.device, &config).expect("blocks");
        let (blocking, _) = streams::make(rig, 0);
        for (resource, which) in [&pool as &dyn MemoryResource, &blocks]
            .into_iter()
            .flat_map(|resource| (0..4).map(move |which| (resource, which)))
        {
            let [ended, asking, known, unknown] = [(); 4].map(|()| rig.stream());
            let ptr = resource.allocate(16 << 20, 256, known.handle()).expect("memory");
            resource.deallocate(ptr, 16 << 20, 256, known.handle()).expect("freed");
            let ptr = resource.allocate(16 << 20, 256, ended.handle()).expect("memory");
            streams::begin_capture(rig, ended.handle().raw());
            resource.deallocate(ptr, 16 << 20, 256, ended.handle()).expect("freed");
            drop(ended);
            let library = [&asking, &known, &unknown].map(|stream| stream.handle().raw());
            let raw = [blocking, library[0], library[1], library[2]][which];
            streams::begin_capture(rig, raw);
            let refused = resource.allocate(16 << 20, 256, asking.handle());
            assert!(refused.as_ref().is_err_and(Error::is_out_of_memory), "{refused:?}");
            assert_eq!(streams::end_capture(rig, raw), 0);
            let ptr = resource.allocate(16 << 20, 256, asking.handle()).expect("after a wait");
            resource.deallocate(ptr, 16 << 20, 256, asking.handle()).expect("freed");
        }
        call!(rig.driver, cuStreamDestroy_v2(blocking));
        drop((pool, blocks));
        rig.assert_clean();
    });
}

/// A wait for the device says nothing of what is freed after it, on whichever stream.
#[test]
fn what_is_freed_after_a_wait_for_the_device_is_not_complete_by_it() {
    Rig::everywhere(|rig| {
        const HALF: usize = 8 << 20;
        let mut config = CoalescingConfig::default();
        (config.initial_bytes, config.max_bytes) = (16 * MIB, Some(16 * MIB));
        let pool = CoalescingPool::new(malloc(rig), &rig.device, &config).expect("a pool");
        let limit = Limiting::new(malloc(rig), 16 * MIB);
        let mut config = FixedSizeConfig::default();
        (config.block_bytes, config.blocks_at_once) = (HALF, 2);
        let blocks = FixedSize::new(limit, &rig.device, &config).expect("blocks");
        for resource in [&pool as &dyn MemoryResource, &blocks] {
            let watched = Watched::new(rig, resource);
            let [busy, ended, asking, other] = [(); 4].map(|()| rig.stream());
            // A block that was freed before the wait, and is in use again.
            let held = watched.allocate(HALF, &busy);
            let lost = resource.allocate(HALF, 256, ended.handle()).expect("memory");
            watched.free(held, &busy);
            let held = watched.allocate(HALF, &busy);
            streams::begin_capture(rig, ended.handle().raw());
            resource.deallocate(lost, HALF, 256, ended.handle()).expect("freed");
            drop(ended);
            let last = watched.allocate(HALF, &asking);
            let stall = rig.stall(busy.handle());
            watched.free(held, &busy);
            let again = watched.allocate(HALF, &other);
            drop(stall);
            watched.free(again, &other);
            watched.free(last, &asking);
            watched.assert_intact();
        }
    });
}

/// A request that is longer than all that a pool may have gives nothing back: no room that it makes is enough.
#[test]
fn a_request_beyond_the_maximum_gives_nothing_back() {
    Rig::everywhere(|rig| {
        let mut config = CoalescingConfig::default();
        (config.initial_bytes, config.max_bytes) = (16 * MIB, Some(16 * MIB));
        let pool = CoalescingPool::new(malloc(rig), &rig.device, &config).expect("a pool");
        let stream = rig.stream();
        let refused = pool.allocate(17 << 20, 256, stream.handle());
        assert!(matches!(refused, Err(Error::RequestTooLong { .. })), "{refused:?}");
        assert_eq!(pool.pool_bytes(), 16 * MIB);
    });
}

/// A driver's pool that takes its first memory while a blocking stream captures.
#[test]
fn a_drivers_pool_is_made_beside_a_capture() {
    Rig::everywhere(|rig| {
        for flags in [0, CUstream_flags_enum::CU_STREAM_NON_BLOCKING.0] {
            let (raw, _) = streams::make(rig, flags);
            streams::begin_capture(rig, raw);
            let mut config = DriverPoolConfig::default();
            config.initial_bytes = 16 * MIB;
            let pool = DriverPool::new(&rig.device, &config).expect("a pool");
            assert_eq!(streams::end_capture(rig, raw), 0);
            assert!(pool.reserved_bytes().expect("a number") >= 16 * MIB);
            call!(rig.driver, cuStreamDestroy_v2(raw));
        }
    });
}

/// So is one ended.
#[test]
fn a_drivers_pool_ends_beside_a_capture() {
    Rig::everywhere(|rig| {
        let pool = DriverPool::new(&rig.device, &DriverPoolConfig::default()).expect("a pool");
        let (raw, _) = streams::make(rig, CUstream_flags_enum::CU_STREAM_NON_BLOCKING.0);
        streams::begin_capture(rig, raw);
        drop(pool);
        assert_eq!(streams::end_capture(rig, raw), 0);
        call!(rig.driver, cuStreamDestroy_v2(raw));
        if let Some(sim) = &rig.sim {
            assert_eq!(sim.leaks().pools, 0);
        }
    });
}

/// To the driver 0 is no limit at all.
#[test]
fn a_drivers_pool_of_at_most_nothing_is_refused() {
    Rig::everywhere(|rig| {
        let mut config = DriverPoolConfig::default();
        config.max_bytes = Some(0);
        let refused = DriverPool::new(&rig.device, &config);
        assert!(matches!(refused, Err(Error::Config { name: "max_bytes", .. })), "{refused:?}");
    });
}

/// A pool that ends with what a stream freed that has ended in its capture could only wait for the device: not beside
/// another capture, which that would end.
#[test]
fn pools_that_end_with_what_is_lost_leave_captures_alone() {
    let rig = Rig::simulated(Schedule::Eager);
    let (ended, capturing) = (rig.stream(), rig.stream());
    let upstream = DeviceMalloc::new(&rig.device);
    let coalescing =
        CoalescingPool::new(upstream.clone(), &rig.device, &CoalescingConfig::default()).unwrap();
    let fixed = FixedSize::new(upstream, &rig.device, &FixedSizeConfig::default()).unwrap();
    let pools = [&coalescing as &dyn MemoryResource, &fixed];
    let held = pools.map(|pool| pool.allocate(1000, 256, ended.handle()).unwrap());
    streams::begin_capture(&rig, ended.handle().raw());
    for (pool, ptr) in pools.into_iter().zip(held) {
        pool.deallocate(ptr, 1000, 256, ended.handle()).unwrap();
    }
    drop(ended);
    let raw = capturing.handle().raw();
    streams::begin_capture(&rig, raw);
    drop((coalescing, fixed));
    assert_eq!(streams::end_capture(&rig, raw), 0);
    rig.assert_clean();
}

/// So are those that an event tells a pool's end of, which it waits for.
#[test]
fn pools_that_end_with_what_an_event_tells_of_leave_captures_alone() {
    Rig::everywhere(|rig| {
        let (busy, asking, capturing) = (rig.stream(), rig.stream(), rig.stream());
        let limit = Arc::new(Limiting::new(malloc(rig), 64 << 20));
        let mut config = CoalescingConfig::default();
        config.pending_policy = vpmm::PendingPolicy::GrowFirst;
        let coalescing =
            CoalescingPool::new(Arc::clone(&limit), &rig.device, &config).expect("a pool");
        let mut config = FixedSizeConfig::default();
        (config.block_bytes, config.blocks_at_once) = (4096, 2);
        let fixed = FixedSize::new(Arc::clone(&limit), &rig.device, &config).expect("blocks");
        let pools: [Box<dyn MemoryResource>; 2] = [Box::new(coalescing), Box::new(fixed)];
        for pool in pools {
            let watched = Watched::new(rig, &*pool);
            let [first, second] = [(); 2].map(|()| watched.allocate(4096, &busy));
            let stall = rig.stall(busy.handle());
            watched.free(first, &busy);
            // The stream is asked about, and frees more.
            let held = watched.allocate(4096, &asking);
            watched.free(held, &asking);
            watched.free(second, &busy);
            let raw = capturing.handle().raw();
            streams::begin_capture(rig, raw);
            drop(stall);
            let before = rig.driver.calls();
            drop(pool);
            let calls = rig.driver.calls().since(&before);
            assert_eq!(calls.count("cuCtxSynchronize"), 0, "events tell of everything");
            assert_eq!(streams::end_capture(rig, raw), 0);
        }
        assert_eq!(limit.allocated_bytes(), 0);
        assert_eq!(rig.mismatches(), 0);
    });
}

/// A pool's end waits for events without its lock, and what passes meanwhile takes none of them away.
#[test]
fn events_that_a_pools_end_waits_for_are_kept() {
    let rig = Rig::simulated(Schedule::Eager);
    let pool =
        CoalescingPool::new(malloc(&rig), &rig.device, &CoalescingConfig::default()).unwrap();
    let streams: Vec<_> = (0..100).map(|_| rig.stream()).collect();
    let take = |stream: &vpmm::Stream| pool.allocate(1000, 256, stream.handle()).unwrap();
    let held: Vec<_> = streams.iter().map(take).collect();
    let before = rig.driver.calls();
    let stall = rig.stall(streams[0].handle());
    for (stream, ptr) in streams.iter().zip(held) {
        pool.deallocate(ptr, 1000, 256, stream.handle()).unwrap();
    }
    std::thread::scope(|scope| {
        let ends = scope.spawn(move || drop(pool));
        let waits = || rig.driver.calls().since(&before).count("cuEventRecord") >= 100;
        while !waits() {
            std::thread::yield_now();
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
        for stream in &streams[1..] {
            stream.synchronize().unwrap();
        }
        let destroyed = rig.driver.calls().since(&before).count("cuEventDestroy_v2");
        drop(stall);
        ends.join().unwrap();
        assert_eq!(destroyed, 0, "the end waits for them");
    });
    rig.assert_clean();
}

/// Of the events that a pool has needed at one time it keeps some.
#[test]
fn events_that_are_not_needed_go_back() {
    let rig = Rig::simulated(Schedule::Eager);
    let pool =
        CoalescingPool::new(malloc(&rig), &rig.device, &CoalescingConfig::default()).unwrap();
    let (own, streams) = (rig.stream(), Vec::from_iter((0..100).map(|_| rig.stream())));
    let before = rig.driver.calls();
    let stalls: Vec<_> = streams.iter().map(|stream| rig.stall(stream.handle())).collect();
    let take = |stream: &vpmm::Stream| pool.allocate(1000, 256, stream.handle()).unwrap();
    let held: Vec<_> = streams.iter().map(take).collect();
    for (stream, ptr) in streams.iter().zip(held) {
        pool.deallocate(ptr, 1000, 256, stream.handle()).unwrap();
    }
    // It lacks memory, and asks them all.
    let large = pool.allocate(64 << 20, 256, own.handle()).unwrap();
    drop(stalls);
    rig.device.synchronize().unwrap();
    let calls = rig.driver.calls().since(&before);
    let (made, gone) = (calls.count("cuEventCreate"), calls.count("cuEventDestroy_v2"));
    assert!(made >= 100 && made - gone <= 64, "{made} made, {gone} gone");
    pool.deallocate(large, 64 << 20, 256, own.handle()).unwrap();
}

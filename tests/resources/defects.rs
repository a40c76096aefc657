//! What RMM's resources get wrong, one test each: sizes that wrap, pointers handed out twice, uses that
//! nothing orders, waits on the host, streams taken for others.

use cuda_sys::types::CUstream_flags_enum;
use vpmm::resource::*;
use vpmm::{Error, MemoryResource, PendingPolicy, StreamHandle};

use crate::subjects::{GIB, MIB, arena, malloc};
use crate::support::{Rig, call, streams};
use crate::watched::Watched;

/// A pool of so many bytes, and never more: what other streams have is needed.
fn full_pool<R: MemoryResource>(rig: &Rig, upstream: R, bytes: u64) -> CoalescingPool<R> {
    let mut config = CoalescingConfig::default();
    (config.initial_bytes, config.max_bytes) = (bytes, Some(bytes));
    CoalescingPool::new(upstream, &rig.device, &config).expect("a pool")
}

fn over_malloc(rig: &Rig, bytes: u64) -> CoalescingPool<DeviceMalloc> {
    full_pool(rig, DeviceMalloc::new(&rig.device), bytes)
}

/// There, a size near the end of the numbers wraps to a few bytes, and the pointer returned is the next
/// request's too.
#[test]
fn sizes_do_not_wrap() {
    Rig::everywhere(|rig| {
        let pool = over_malloc(rig, 16 * MIB);
        let arena = arena(rig, malloc(rig)).expect("an arena");
        for resource in [&pool as &dyn MemoryResource, &arena] {
            for less in [0, 1, 10, 254, 255, 256] {
                let refused = resource.allocate(usize::MAX - less, 256, StreamHandle::LEGACY);
                assert!(refused.is_err(), "{less} below the most");
            }
        }
        assert_eq!(pool.live_bytes(), 0);
    });
}

/// There, a pointer freed twice is handed out twice.
#[test]
fn a_double_free_hands_nothing_out_twice() {
    Rig::everywhere(|rig| {
        let pool = over_malloc(rig, 16 * MIB);
        let mut config = FixedSizeConfig::default();
        config.blocks_at_once = 16;
        let fixed =
            FixedSize::new(DeviceMalloc::new(&rig.device), &rig.device, &config).expect("blocks");
        let arena = arena(rig, malloc(rig)).expect("an arena");
        for resource in [&pool as &dyn MemoryResource, &fixed, &arena] {
            for stream in [rig.stream().handle(), StreamHandle::LEGACY, StreamHandle::PER_THREAD] {
                let ptr = resource.allocate(1000, 256, stream).expect("memory");
                resource.deallocate(ptr, 1000, 256, stream).expect("freed");
                let again = resource.deallocate(ptr, 1000, 256, stream);
                assert!(matches!(again, Err(Error::DoubleFree { .. })), "{again:?}");
                let two = [0, 1].map(|_| resource.allocate(1000, 256, stream).expect("memory"));
                assert_ne!(two[0], two[1]);
                for ptr in two {
                    resource.deallocate(ptr, 1000, 256, stream).expect("freed");
                }
            }
        }
    });
}

/// There, a stream that has merged others' memory into its own records no event for it: a third stream that
/// takes it from there does not wait for the first.
#[test]
fn a_third_stream_waits_for_the_first() {
    Rig::everywhere(|rig| {
        let (first, second) = (rig.stream(), rig.stream());
        let (third, fourth) = (rig.stream(), rig.stream());
        for foreign in [false, true] {
            let pool = over_malloc(rig, 16 * MIB);
            let watched = Watched::new(rig, &pool);
            let (raw, handle) = streams::make(rig, CUstream_flags_enum::CU_STREAM_NON_BLOCKING.0);
            let middle = if foreign { handle } else { second.handle() };
            // Two halves, each freed on a stream of its own behind a kernel that goes on.
            let parts = [(8 << 20, &first), (4 << 20, &fourth), (4 << 20, &fourth)];
            let parts = parts.map(|(bytes, of)| (watched.allocate(bytes, of), of));
            let last = parts[2].0.ptr;
            let stalls = [&first, &fourth].map(|of| rig.stall(of.handle()));
            parts.into_iter().for_each(|(held, of)| watched.free(held, of));
            // The middle stream joins them, and gives its part back unused.
            let ptr = pool.allocate(12 << 20, 256, middle).expect("taken over");
            // What this writes must be behind the check of what was there, though the stream that had that
            // is not the one whose memory it is now.
            let rest = watched.allocate(4 << 20, &third);
            assert_eq!(rest.ptr.address(), last.address());
            pool.deallocate(ptr, 12 << 20, 256, middle).expect("freed");
            let held = watched.allocate(12 << 20, &third);
            watched.free(rest, &third);
            drop(stalls);
            watched.free(held, &third);
            watched.assert_intact();
            drop(pool);
            call!(rig.driver, cuStreamDestroy_v2(raw));
        }
    });
}

/// The same where only a part is taken over and never used: the rest stays the first stream's.
#[test]
fn a_part_that_is_taken_over_leaves_the_rest_in_order() {
    Rig::everywhere(|rig| {
        let pool = over_malloc(rig, 16 * MIB);
        let watched = Watched::new(rig, &pool);
        let (first, second, third) = (rig.stream(), rig.stream(), rig.stream());
        let whole = watched.allocate(16 << 20, &first);
        let stall = rig.stall(first.handle());
        watched.free(whole, &first);
        let part = watched.allocate(4 << 20, &second);
        let rest = watched.allocate(12 << 20, &third);
        drop(stall);
        watched.free(part, &second);
        watched.free(rest, &third);
        watched.assert_intact();
    });
}

/// There, what a stream-ordered upstream gives is taken for everybody's: the part that the requesting stream
/// does not need goes to others, though upstream has ordered it for that stream alone.
#[test]
fn what_upstream_gave_one_stream_is_ordered_for_others() {
    Rig::everywhere(|rig| {
        for fixed in [false, true] {
            let mut config = DriverPoolConfig::default();
            config.initial_bytes = 64 * MIB;
            let upstream = DriverPool::new(&rig.device, &config).expect("a pool of the driver's");
            let upstream = std::sync::Arc::new(upstream);
            let below = Watched::new(rig, &upstream);
            let (first, second) = (rig.stream(), rig.stream());
            // The first stream's, freed behind work that goes on: the driver gives it to that stream.
            let used = [0, 1].map(|_| below.allocate(32 << 20, &first));
            let stall = rig.stall(first.handle());
            used.iter().for_each(|held| below.free(*held, &first));
            let resource: Box<dyn MemoryResource> = if fixed {
                let mut config = FixedSizeConfig::default();
                (config.block_bytes, config.blocks_at_once) = (32 << 20, 2);
                config.at_start = false;
                let upstream = std::sync::Arc::clone(&upstream);
                Box::new(FixedSize::new(upstream, &rig.device, &config).expect("blocks"))
            } else {
                let mut config = CoalescingConfig::default();
                config.max_bytes = Some(128 * MIB);
                let upstream = std::sync::Arc::clone(&upstream);
                Box::new(CoalescingPool::new(upstream, &rig.device, &config).expect("a pool"))
            };
            let watched = Watched::new(rig, &resource);
            let own = watched.allocate(32 << 20, &first);
            let rest = watched.allocate(32 << 20, &second);
            let again = [own, rest].map(|held| held.ptr) == used.map(|held| held.ptr);
            assert!(rig.sim.is_none() || again, "not the same memory: nothing was tested");
            drop(stall);
            watched.free(own, &first);
            watched.free(rest, &second);
            watched.assert_intact();
        }
    });
}

/// There, a free that the arena does not know throws where nothing may be thrown, and ends the program.
#[test]
fn an_arena_refuses_what_it_does_not_know() {
    Rig::everywhere(|rig| {
        let arena = arena(rig, malloc(rig)).expect("an arena");
        let other = DeviceMalloc::new(&rig.device);
        let (one, two) = (rig.stream(), rig.stream());
        for bytes in [1000, 4 << 20] {
            let foreign = other.allocate(bytes, 256, one.handle()).expect("memory");
            for stream in [&one, &two] {
                let refused = arena.deallocate(foreign, bytes, 256, stream.handle());
                assert!(matches!(refused, Err(Error::ForeignPointer { .. })), "{refused:?}");
            }
            other.deallocate(foreign, bytes, 256, one.handle()).expect("freed");
            let own = arena.allocate(bytes, 256, one.handle()).expect("memory");
            // The piece that a small one is the first of has 4 MiB.
            for wrong in [bytes - 1, 1, 4 << 20, 100 << 20].into_iter().filter(|of| *of != bytes) {
                let refused = arena.deallocate(own, wrong, 256, two.handle());
                assert!(refused.is_err(), "{wrong} bytes for {bytes}");
            }
            // Within that piece, which is nobody's allocation.
            let beside = arena.allocate(bytes, 256, one.handle()).expect("memory");
            for (ptr, wrong) in [own, beside].into_iter().flat_map(|of| [(of, 1), (of, 8 << 20)]) {
                let refused = arena.deallocate(ptr, wrong, 256, two.handle());
                let is_named = matches!(refused, Err(Error::WrongSize { bytes: of, .. })
                    if of == bytes as u64);
                assert!(is_named, "{wrong} bytes for {bytes}: {refused:?}");
            }
            arena.deallocate(beside, bytes, 256, one.handle()).expect("freed");
            let again = arena.deallocate(beside, 8 << 20, 256, one.handle());
            assert!(matches!(again, Err(Error::DoubleFree { .. })), "{again:?}");
            arena.deallocate(own, bytes, 256, one.handle()).expect("freed");
        }
    });
}

/// There, frees of large blocks, frees on another stream and every lack of memory wait on the host: here
/// a stream that goes on for ever keeps nobody.
#[test]
fn an_arena_never_waits_on_the_host() {
    Rig::everywhere(|rig| {
        let mut config = ArenaConfig::default();
        config.arena_bytes = Some(64 * MIB);
        let arena =
            Arena::new(DeviceMalloc::new(&rig.device), &rig.device, &config).expect("an arena");
        let watched = Watched::new(rig, &arena);
        let (busy, other) = (rig.stream(), rig.stream());
        let small: Vec<_> = (0..30).map(|_| watched.allocate(1 << 20, &busy)).collect();
        let large = watched.allocate(16 << 20, &busy);
        let before = rig.driver.calls();
        let stall = rig.stall(busy.handle());
        watched.free(large, &busy);
        for (number, held) in small.into_iter().enumerate() {
            // Half on a stream that comes after.
            if number % 2 == 0 {
                watched.free(held, &busy);
            } else {
                rig.order(&busy, &other);
                watched.free(held, &other);
            }
        }
        // More than any one stream has free: superblocks are called in.
        let all = watched.allocate(60 << 20, &other);
        watched.free(all, &other);
        let calls = rig.driver.calls().since(&before);
        for waits in ["cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize"] {
            assert_eq!(calls.count(waits), 0, "{waits}");
        }
        drop(stall);
        watched.assert_intact();
    });
}

/// There, a stream's arena and events are found by its handle, which a new stream may have: it inherits the
/// old one's memory with work under way.
#[test]
fn a_handle_that_comes_again_is_another_stream() {
    Rig::everywhere(|rig| {
        let (mut seen, mut came_again) = (Vec::new(), 0);
        let pool = over_malloc(rig, 32 * MIB);
        let arena = arena(rig, malloc(rig)).expect("an arena");
        for resource in [&pool as &dyn MemoryResource, &arena] {
            let watched = Watched::new(rig, resource);
            for _ in 0..20 {
                let (raw, handle) =
                    streams::make(rig, CUstream_flags_enum::CU_STREAM_NON_BLOCKING.0);
                came_again += usize::from(seen.contains(&(raw as usize)));
                seen.push(raw as usize);
                // The pool's memory is not enough for two of these.
                let held = watched.allocate(20 << 20, handle);
                let stall = rig.stall(handle);
                watched.free(held, handle);
                call!(rig.driver, cuStreamDestroy_v2(raw));
                // As a rule this stream has the handle of the one before, whose work goes on.
                let (raw, handle) =
                    streams::make(rig, CUstream_flags_enum::CU_STREAM_NON_BLOCKING.0);
                came_again += usize::from(seen.contains(&(raw as usize)));
                let next = watched.allocate(20 << 20, handle);
                drop(stall);
                watched.free(next, handle);
                call!(rig.driver, cuStreamDestroy_v2(raw));
            }
            watched.assert_intact();
        }
        assert!(rig.sim.is_none() || came_again > 0, "no handle came again: nothing was tested");
    });
}

/// There, every growth and every request that fails merges all streams' memory with waits, and each
/// memory of another stream costs a wait. Here one wait serves for all that was freed before it.
#[test]
fn no_wait_where_none_is_needed() {
    let rig = Rig::simulated(cuda_sim::Schedule::Eager);
    let (one, two) = (rig.stream(), rig.stream());
    // What is complete is taken without a wait.
    let pool = over_malloc(&rig, 16 * MIB);
    let watched = Watched::new(&rig, &pool);
    let before = rig.driver.calls();
    let held: Vec<_> = (0..16).map(|_| watched.allocate(1 << 20, &one)).collect();
    held.into_iter().for_each(|held| watched.free(held, &one));
    let held: Vec<_> = (0..16).map(|_| watched.allocate(1 << 20, &two)).collect();
    held.into_iter().for_each(|held| watched.free(held, &two));
    let calls = rig.driver.calls().since(&before);
    assert_eq!(calls.count("cuStreamWaitEvent"), 0);
    assert!(calls.count("cuEventRecord") <= 1, "{calls:?}");
    watched.assert_intact();
    // What is not costs one wait for all of it.
    let rig = Rig::simulated(cuda_sim::Schedule::Manual);
    let (one, two) = (rig.stream(), rig.stream());
    let pool = over_malloc(&rig, 16 * MIB);
    let blocks: Vec<_> =
        (0..16).map(|_| pool.allocate(1 << 20, 256, one.handle()).expect("memory")).collect();
    rig.fill(blocks[0].address(), 1 << 20, 1, one.handle());
    for ptr in blocks {
        pool.deallocate(ptr, 1 << 20, 256, one.handle()).expect("freed");
    }
    let before = rig.driver.calls();
    for _ in 0..16 {
        pool.allocate(1 << 20, 256, two.handle()).expect("taken over");
    }
    let calls = rig.driver.calls().since(&before);
    assert_eq!((calls.count("cuStreamWaitEvent"), calls.count("cuEventRecord")), (1, 1));
    // A request that can never be served makes nobody wait.
    let before = rig.driver.calls();
    assert!(pool.allocate(17 << 20, 256, one.handle()).is_err());
    assert_eq!(rig.driver.calls().since(&before).count("cuStreamWaitEvent"), 0);
}

/// A stream's own traffic makes no driver call at all.
#[test]
fn a_hit_makes_no_driver_call() {
    let rig = Rig::simulated(cuda_sim::Schedule::Late { patience: 3 });
    let pool = over_malloc(&rig, 64 * MIB);
    let arena = arena(&rig, malloc(&rig)).expect("an arena");
    let binning = Binning::with_powers(DeviceMalloc::new(&rig.device), &rig.device, 8..=20);
    let binning = binning.expect("bins");
    let stream = rig.stream();
    for resource in [&pool as &dyn MemoryResource, &arena, &binning] {
        for handle in [stream.handle(), StreamHandle::LEGACY] {
            let warm = |bytes: usize| {
                let ptr = resource.allocate(bytes, 256, handle).expect("memory");
                resource.deallocate(ptr, bytes, 256, handle).expect("freed");
            };
            (0..10).for_each(|power| warm(1000 << power));
            let before = rig.driver.calls();
            (0..10).for_each(|power| warm(1000 << power));
            assert_eq!(rig.driver.calls().since(&before).total(), 0, "{}", resource.describe());
        }
    }
}

/// What the pool is told first is the other's: growing first adds no dependency while there is room.
#[test]
fn growing_first_waits_for_nobody_while_there_is_room() {
    let rig = Rig::simulated(cuda_sim::Schedule::Manual);
    for (policy, waits) in [(PendingPolicy::GrowFirst, 0), (PendingPolicy::WaitFirst, 1)] {
        let mut config = CoalescingConfig::default();
        config.pending_policy = policy;
        let upstream = Limiting::new(DeviceMalloc::new(&rig.device), GIB);
        let pool = CoalescingPool::new(upstream, &rig.device, &config).expect("a pool");
        let (one, two) = (rig.stream(), rig.stream());
        let ptr = pool.allocate(8 << 20, 256, one.handle()).expect("memory");
        rig.fill(ptr.address(), 8 << 20, 1, one.handle());
        pool.deallocate(ptr, 8 << 20, 256, one.handle()).expect("freed");
        let before = rig.driver.calls();
        let next = pool.allocate(8 << 20, 256, two.handle()).expect("memory");
        assert_eq!(rig.driver.calls().since(&before).count("cuStreamWaitEvent"), waits);
        assert_eq!(next == ptr, waits == 1);
    }
}

/// Streams are made and gone without end: what the pool keeps of them is bounded.
#[test]
fn lanes_of_streams_that_are_gone_are_used_again() {
    let rig = Rig::simulated(cuda_sim::Schedule::Late { patience: 3 });
    let pool = over_malloc(&rig, 16 * MIB);
    let watched = Watched::new(&rig, &pool);
    let arena = arena(&rig, malloc(&rig)).expect("an arena");
    let in_arena = Watched::new(&rig, &arena);
    let before = rig.sim.as_ref().map(|sim| sim.leaks().events);
    for _ in 0..300 {
        let stream = rig.stream();
        let held = [&watched, &in_arena].map(|of| of.allocate(9 << 10, &stream));
        watched.free(held[0], &stream);
        in_arena.free(held[1], &stream);
        rig.device.synchronize().expect("the device finishes");
    }
    let after = rig.sim.as_ref().map(|sim| sim.leaks().events);
    assert!(after.zip(before).is_some_and(|(after, before)| after < before + 16), "{after:?}");
    assert!(arena.dump().streams() < 8, "{}", arena.dump());
    watched.assert_intact();
    // Not one event is left when they end.
    drop((watched, in_arena));
    drop((pool, arena));
    assert_eq!(rig.sim.as_ref().map(|sim| sim.leaks().events), Some(0));
}

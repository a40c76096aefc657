//! How pools grow, up to their maximum and upstream's.

use std::sync::Arc;

use vpmm::resource::*;
use vpmm::{Error, MemoryResource, StreamHandle};

use crate::subjects::{GIB, MIB};
use crate::support::Rig;
use crate::watched::Watched;

fn pool<R: MemoryResource>(
    rig: &Rig,
    upstream: R,
    initial_bytes: u64,
    max_bytes: Option<u64>,
) -> Result<CoalescingPool<R>, Error> {
    let mut config = CoalescingConfig::default();
    config.initial_bytes = initial_bytes;
    config.max_bytes = max_bytes;
    CoalescingPool::new(upstream, &rig.device, &config)
}

fn limited(rig: &Rig, bytes: u64) -> Limiting<DeviceMalloc> {
    Limiting::new(DeviceMalloc::new(&rig.device), bytes)
}

/// RMM's example, without a maximum: growth halves until the limiter lets it through.
#[test]
fn under_a_limiter_of_6000_bytes() {
    Rig::everywhere(|rig| {
        let pool = pool(rig, limited(rig, 6000), 0, None).expect("a pool");
        let watched = Watched::new(rig, &pool);
        let stream = StreamHandle::LEGACY;
        let kept = [1000, 4000, 500].map(|bytes| watched.allocate(bytes, stream));
        let error = watched.try_allocate(2000, 256, stream).expect_err("the limiter is in the way");
        assert!(error.is_out_of_memory(), "{error}");
        assert_eq!(pool.upstream().allocated_bytes(), 1024 + 4096 + 768, "growths");
        kept.into_iter().for_each(|held| watched.free(held, stream));
        watched.assert_intact();
    });
}

/// The same with a maximum: half of what it leaves is asked for.
#[test]
fn under_a_limiter_of_6000_bytes_and_a_maximum() {
    Rig::everywhere(|rig| {
        let pool = pool(rig, limited(rig, 6000), 0, Some(8192)).expect("a pool");
        let watched = Watched::new(rig, &pool);
        let stream = StreamHandle::LEGACY;
        let first = watched.allocate(1000, stream);
        assert_eq!(pool.pool_bytes(), 4096);
        let error = watched.try_allocate(4000, 256, stream).expect_err("the limiter is in the way");
        assert!(error.is_out_of_memory(), "{error}");
        let rest = [500, 2000].map(|bytes| watched.allocate(bytes, stream));
        assert_eq!(pool.pool_bytes(), 4096);
        rest.into_iter().chain([first]).for_each(|held| watched.free(held, stream));
        watched.assert_intact();
    });
}

#[test]
fn sizes_that_make_no_sense_are_refused() {
    let rig = Rig::simulated(cuda_sim::Schedule::Eager);
    for (initial, most) in [(100, None), (0, Some(1000)), (1024, Some(512))] {
        let made = pool(&rig, DeviceMalloc::new(&rig.device), initial, most);
        assert!(matches!(made, Err(Error::Config { .. })), "{initial} {most:?}");
    }
    let made = pool(&rig, DeviceMalloc::new(&rig.device), 1 << 50, None);
    assert!(made.is_err_and(|error| error.is_out_of_memory()));
    let mut config = FixedSizeConfig::default();
    for (bytes, count) in [(0, 1), (1, 0), (usize::MAX, 1), (1 << 40, 1 << 40)] {
        (config.block_bytes, config.blocks_at_once) = (bytes, count);
        let made = FixedSize::new(DeviceMalloc::new(&rig.device), &rig.device, &config);
        assert!(matches!(made, Err(Error::Config { .. })), "{bytes} {count}");
    }
    let mut config = ArenaConfig::default();
    config.arena_bytes = Some((1 << 20) - 1);
    let made = Arena::new(DeviceMalloc::new(&rig.device), &rig.device, &config);
    assert!(matches!(made, Err(Error::Config { .. })));
    assert!(Aligned::new(HostMalloc::new(), 48).is_err());
    assert!(Binning::with_powers(HostMalloc::new(), &rig.device, 40..=48).is_err());
}

#[test]
fn a_pool_that_is_all_there_may_be_serves_all_of_it() {
    Rig::everywhere(|rig| {
        let pool =
            pool(rig, DeviceMalloc::new(&rig.device), 64 * MIB, Some(64 * MIB)).expect("a pool");
        let watched = Watched::new(rig, &pool);
        let stream = rig.stream();
        let whole = watched.allocate(64 << 20, &stream);
        assert!(watched.try_allocate(1, 256, &stream).is_err_and(|error| error.is_out_of_memory()));
        watched.free(whole, &stream);
        let two = [0, 1].map(|_| watched.allocate(32 << 20, &stream));
        two.into_iter().for_each(|held| watched.free(held, &stream));
        assert_eq!(pool.pool_bytes(), 64 * MIB);
        watched.assert_intact();
    });
}

#[test]
fn two_buffers_of_a_quarter_of_what_is_free() {
    Rig::everywhere(|rig| {
        let quarter = (rig.device.free_memory().expect("a number") / 4) as usize;
        for initial in [0, 256 * MIB] {
            let pool = pool(rig, DeviceMalloc::new(&rig.device), initial, None).expect("a pool");
            let stream = rig.stream();
            let two = [0, 1].map(|_| pool.allocate(quarter, 256, stream.handle()).expect("memory"));
            assert_ne!(two[0], two[1]);
            for ptr in two {
                pool.deallocate(ptr, quarter, 256, stream.handle()).expect("freed");
            }
        }
        rig.assert_clean();
    });
}

/// Pieces that are wholly free and too short go back where the maximum is in the way of one that is not.
#[test]
fn at_the_maximum_free_pieces_make_room() {
    Rig::everywhere(|rig| {
        let limiting = limited(rig, 64 * MIB);
        let pool = pool(rig, limiting, 0, Some(64 * MIB)).expect("a pool");
        let watched = Watched::new(rig, &pool);
        let (one, two) = (rig.stream(), rig.stream());
        // 32, 16, 8 MiB and so on.
        let small: Vec<_> = (0..15).map(|_| watched.allocate(4 << 20, &one)).collect();
        assert!(pool.pool_bytes() > 56 * MIB);
        small.into_iter().for_each(|held| watched.free(held, &one));
        let large = watched.allocate(60 << 20, &two);
        assert!(pool.upstream().allocated_bytes() <= 64 * MIB);
        watched.free(large, &two);
        watched.assert_intact();
    });
}

#[test]
fn a_trim_gives_back_what_is_free() {
    Rig::everywhere(|rig| {
        let limiting = Arc::new(limited(rig, GIB));
        let pool = pool(rig, Arc::clone(&limiting), 0, None).expect("a pool");
        let watched = Watched::new(rig, &pool);
        let (one, two) = (rig.stream(), rig.stream());
        let kept = watched.allocate(1 << 20, &one);
        let freed = watched.allocate(256 << 20, &one);
        watched.free(freed, &one);
        let held = pool.pool_bytes();
        let stall = rig.stall(one.handle());
        let busy = watched.allocate(100 << 20, &one);
        watched.free(busy, &one);
        // The first stream is under way: nothing of its is the second's without a wait.
        assert_eq!(pool.trim(two.handle(), false).expect("a trim"), 0);
        drop(stall);
        assert_eq!(pool.trim(two.handle(), true).expect("a trim"), held - MIB);
        assert_eq!((pool.pool_bytes(), limiting.allocated_bytes()), (MIB, MIB));
        watched.free(kept, &one);
        watched.assert_intact();
        drop(pool);
        assert_eq!(limiting.allocated_bytes(), 0, "everything went back");
    });
}

/// A pool over a pool, and a resource shared by several owners.
#[test]
fn memory_goes_back_through_every_layer() {
    Rig::everywhere(|rig| {
        let bottom = Arc::new(limited(rig, GIB));
        let middle = Arc::new(pool(rig, Arc::clone(&bottom), 16 * MIB, None).expect("a pool"));
        let above = pool(rig, Arc::clone(&middle), 8 * MIB, None).expect("a pool");
        let mut config = ArenaConfig::default();
        config.arena_bytes = Some(32 * MIB);
        let arena = Arena::new(Arc::clone(&middle), &rig.device, &config).expect("an arena");
        let stream = rig.stream();
        for resource in [&above as &dyn MemoryResource, &arena, &middle] {
            let watched = Watched::new(rig, resource);
            let held = [1000, 3 << 20].map(|bytes| watched.allocate(bytes, &stream));
            held.into_iter().for_each(|held| watched.free(held, &stream));
            watched.assert_intact();
        }
        drop((above, arena));
        assert_eq!(middle.live_bytes(), 0);
        drop(middle);
        assert_eq!(bottom.allocated_bytes(), 0);
    });
}

/// Where there is not so much as was hoped for, but as much as is needed.
#[test]
fn a_growth_asks_for_no_less_than_is_needed() {
    Rig::everywhere(|rig| {
        let pool = pool(rig, limited(rig, 14 * MIB), 8 * MIB, None).expect("a pool");
        let watched = Watched::new(rig, &pool);
        let all = watched.allocate(8 << 20, StreamHandle::LEGACY);
        let more = watched.allocate(6 << 20, StreamHandle::LEGACY);
        assert_eq!(pool.pool_bytes(), 14 * MIB);
        // What is short is told in the pool's own numbers, not in those of what is below.
        watched.free(more, StreamHandle::LEGACY);
        let error = pool.allocate(7 << 20, 256, StreamHandle::LEGACY).expect_err("too much");
        let Error::OutOfMemory { requested_bytes, free_bytes, largest_free_bytes, .. } = error
        else {
            panic!("{error}");
        };
        assert_eq!((requested_bytes, free_bytes, largest_free_bytes), (7 * MIB, 0, 0));
        let small = watched.allocate(1 << 20, StreamHandle::LEGACY);
        watched.free(all, StreamHandle::LEGACY);
        let error = pool.allocate(11 << 20, 256, StreamHandle::LEGACY).expect_err("too much");
        let Error::OutOfMemory { free_bytes, largest_free_bytes, mapped_bytes, .. } = &error else {
            panic!("{error}");
        };
        assert!(*largest_free_bytes > 0 && free_bytes >= largest_free_bytes, "{error}");
        assert_eq!((*mapped_bytes, mapped_bytes - free_bytes), (pool.pool_bytes(), MIB));
        let Error::OutOfMemory { limit_bytes, live_bytes, .. } = &error else { return };
        assert_eq!((*limit_bytes, *live_bytes), (None, MIB));
        watched.free(small, StreamHandle::LEGACY);
        watched.assert_intact();
    });
}

/// Growing first is for what other streams may still use, not for what nobody does; and it ends at the maximum.
#[test]
fn a_pool_that_grows_first_uses_what_it_has() {
    Rig::everywhere(|rig| {
        let mut config = CoalescingConfig::default();
        (config.initial_bytes, config.max_bytes) = (8 * MIB, Some(8 * MIB));
        config.pending_policy = vpmm::PendingPolicy::GrowFirst;
        let pool = CoalescingPool::new(limited(rig, GIB), &rig.device, &config).expect("a pool");
        let watched = Watched::new(rig, &pool);
        let (own, busy) = (rig.stream(), rig.stream());
        // A part of it is the stream's, and the rest nobody's.
        let part = watched.allocate(1 << 20, &own);
        watched.free(part, &own);
        let before = rig.driver.calls();
        let all = watched.allocate(8 << 20, &own);
        let calls = rig.driver.calls().since(&before);
        assert_eq!((calls.count("cuStreamWaitEvent"), calls.count("cuMemFree_v2")), (0, 0));
        watched.free(all, &own);
        // No piece is wholly free, and the free part is another stream's.
        let [kept, other] = [1, 7].map(|mib| watched.allocate(mib << 20, &busy));
        let stall = rig.stall(busy.handle());
        watched.free(other, &busy);
        let taken = watched.allocate(7 << 20, &own);
        drop(stall);
        watched.free(taken, &own);
        watched.free(kept, &busy);
        watched.assert_intact();
    });
}

/// The best fit is the best of what the stream has and what nobody does.
#[test]
fn the_best_fit_may_be_nobodys() {
    let rig = Rig::simulated(cuda_sim::Schedule::Manual);
    let pool = pool(&rig, limited(&rig, GIB), 8 * MIB, None).expect("a pool");
    let (own, other) = (rig.stream(), rig.stream());
    let take = |kib: usize, on: &vpmm::Stream| pool.allocate(kib << 10, 256, on.handle()).unwrap();
    let free = |ptr, kib: usize, on: &vpmm::Stream| {
        pool.deallocate(ptr, kib << 10, 256, on.handle()).unwrap();
    };
    let [small, _between, large, _rest] =
        [(64, &other), (64, &other), (256, &own), (7 << 10, &own)].map(|(kib, on)| take(kib, on));
    rig.fill(large.address(), 256 << 10, 1, own.handle());
    free(small, 64, &other);
    other.synchronize().unwrap();
    free(large, 256, &own);
    // Whoever finds nothing has all that stands aside looked at.
    take(16 << 10, &other);
    assert_eq!(take(60, &own), small);
    assert_eq!(take(200, &own), large);
}

/// What pools stand on says whether their memory is managed.
#[test]
fn pools_of_managed_memory_say_so() {
    let rig = Rig::simulated(cuda_sim::Schedule::Eager);
    let managed = || Managed::new(&rig.device).expect("managed memory");
    let mut arena = ArenaConfig::default();
    arena.arena_bytes = Some(8 * MIB);
    let pools: [Box<dyn MemoryResource>; 4] = [
        Box::new(pool(&rig, managed(), 0, None).expect("a pool")),
        Box::new(
            FixedSize::new(managed(), &rig.device, &FixedSizeConfig::default()).expect("blocks"),
        ),
        Box::new(Arena::new(managed(), &rig.device, &arena).expect("an arena")),
        Box::new(Binning::with_powers(managed(), &rig.device, 18..=19).expect("bins")),
    ];
    for pool in pools {
        let facts = pool.facts();
        assert!(facts.managed && facts.host_accessible, "{}", pool.describe());
    }
}

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

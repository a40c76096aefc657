//! Memory from other resources, and the allocator as one.

use std::sync::Arc;

use vpmm::caching::{CachingAllocator, CachingConfig};
use vpmm::resource::{DriverPool, DriverPoolConfig};
use vpmm::{MemoryResource, Pool, PoolConfig, StreamHandle};

use crate::rig::{KIB, MIB};
use crate::support::streams::make;
use crate::support::{Rig, call};

/// Resources to stand on: the driver's pool and ours are in the order of streams.
fn upstreams(rig: &Rig) -> Vec<Arc<dyn MemoryResource>> {
    let mut config = PoolConfig::default();
    config.va_size_bytes = Some(1 << 32);
    let below = CachingAllocator::new(&rig.device, &CachingConfig::default()).unwrap();
    vec![
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
fn it_is_a_resource_itself() {
    Rig::everywhere(|rig| {
        let cached = rig.cached_with("max_split_size_mb:64");
        let allocator = &cached.allocator;
        let facts = allocator.facts();
        assert!(facts.stream_ordered && facts.records_streams && facts.device_accessible);
        let text = allocator.describe().to_string();
        assert_eq!(text, "caching(max_split_size_bytes=67108864)\n└─ device-malloc(device=0)");
        assert!(allocator.is_equal(&allocator.clone()));
        assert!(!allocator.is_equal(&rig.cached().allocator));
        assert_eq!(*allocator, allocator.clone());
        let (own, side) = (rig.stream(), rig.stream());
        let ptr = allocator.allocate(1000, 256, own.handle()).unwrap();
        MemoryResource::record_stream(allocator, ptr, side.handle()).unwrap();
        allocator.deallocate(ptr, 1000, 256, own.handle()).unwrap();
        let ptr = allocator.allocate(1000, 256, StreamHandle::LEGACY).unwrap();
        allocator.deallocate(ptr, 1000, 256, StreamHandle::LEGACY).unwrap();
        cached.assert_intact();
    });
}

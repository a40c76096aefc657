//! What is counted, what goes back to the device, and buffers that count themselves off.

use vpmm::caching::{BlockState, CachedBuffer, CachingAllocator, Stat};

use crate::rig::{KIB, MIB};
use crate::support::{Lcg, Rig, call};

fn stat(stat: Stat) -> [u64; 4] {
    [stat.current, stat.peak, stat.allocated, stat.freed]
}

#[test]
fn every_quantity_is_counted_in_both_pools_and_in_each() {
    Rig::everywhere(|rig| {
        let (cached, stream) = (rig.cached(), rig.stream());
        let small = cached.malloc(1000, &stream);
        let large = cached.malloc(3 * MIB + 1, &stream);
        cached.free(small, &stream);
        let stats = cached.allocator.stats();
        assert_eq!(stat(stats.allocation.all), [1, 2, 2, 1]);
        assert_eq!(stat(stats.allocation.small_pool), [0, 1, 1, 1]);
        assert_eq!(stat(stats.allocation.large_pool), [1, 1, 1, 0]);
        let rounded = 3 * MIB + 512;
        assert_eq!(stat(stats.allocated_bytes.small_pool), [0, 1024, 1024, 1024]);
        assert_eq!(stat(stats.allocated_bytes.large_pool), [rounded, rounded, rounded, 0]);
        let both = rounded + 1024;
        assert_eq!(stat(stats.allocated_bytes.all), [rounded, both, both, 1024]);
        assert_eq!(stat(stats.requested_bytes.small_pool), [0, 1000, 1000, 1000]);
        assert_eq!(stats.requested_bytes.large_pool.current, 3 * MIB + 1);
        assert_eq!(stat(stats.segment.all), [2, 2, 2, 0]);
        assert_eq!(stat(stats.reserved_bytes.small_pool), [2 * MIB, 2 * MIB, 2 * MIB, 0]);
        assert_eq!(stat(stats.reserved_bytes.all), [22 * MIB, 22 * MIB, 22 * MIB, 0]);
        // The small segment is whole again; of the large one something is left over.
        assert_eq!(stat(stats.inactive_split.small_pool), [0, 1, 1, 1]);
        assert_eq!(stat(stats.inactive_split.large_pool), [1, 1, 1, 0]);
        assert_eq!(stats.inactive_split_bytes.all.current, 20 * MIB - rounded);
        assert_eq!(stats.active, stats.allocation);
        assert_eq!(stats.active_bytes, stats.allocated_bytes);
        assert_eq!((stats.num_device_alloc, stats.num_device_free), (2, 0));
        cached.free(large, &stream);
        assert_eq!(cached.allocator.stats().inactive_split.all.current, 0);
        cached.assert_intact();
    });
}

#[test]
fn what_waits_is_active_and_not_allocated() {
    Rig::everywhere(|rig| {
        let cached = rig.cached();
        let (own, side) = (rig.stream(), rig.stream());
        let held = cached.malloc(3 * MIB, &own);
        let stall = rig.stall(side.handle());
        cached.look_from(&held, &own, &side);
        cached.free(held, &own);
        let stats = cached.allocator.stats();
        assert_eq!((stats.allocation.all.current, stats.active.all.current), (0, 1));
        assert_eq!(
            (stats.allocated_bytes.all.current, stats.active_bytes.all.current),
            (0, 3 * MIB)
        );
        assert_eq!(stats.requested_bytes.all.current, 3 * MIB);
        let [segment] = &cached.allocator.snapshot()[..] else { panic!("one segment") };
        assert_eq!((segment.active_size, segment.allocated_size), (3 * MIB, 0));
        assert_eq!(segment.blocks[0].state, BlockState::ActivePendingFree);
        assert_eq!(segment.blocks[0].state.name(), "active_pending_free");
        drop(stall);
        cached.allocator.empty_cache().unwrap();
        assert_eq!(cached.allocator.stats().num_sync_all_streams, 1);
        assert_eq!(cached.allocator.stats().active.all.current, 0);
        cached.assert_intact();
    });
}

#[test]
fn peaks_and_sums_start_anew_on_demand() {
    Rig::everywhere(|rig| {
        let (cached, stream) = (rig.cached(), rig.stream());
        let held = [(); 4].map(|()| cached.malloc(3 * MIB, &stream));
        let [kept, freed @ ..] = held;
        freed.into_iter().for_each(|held| cached.free(held, &stream));
        let allocator = &cached.allocator;
        assert_eq!(
            (allocator.max_memory_allocated(), allocator.memory_allocated()),
            (12 * MIB, 3 * MIB)
        );
        assert_eq!(allocator.cache_stats(), (3, 1));
        allocator.reset_peak_stats();
        assert_eq!(allocator.max_memory_allocated(), 3 * MIB);
        assert_eq!(allocator.max_memory_reserved(), 20 * MIB);
        assert_eq!(allocator.stats().allocation.all.allocated, 4, "sums stay");
        allocator.reset_accumulated_stats();
        let stats = allocator.stats();
        assert_eq!(stat(stats.allocation.all), [1, 1, 0, 0]);
        assert_eq!((stats.num_device_alloc, allocator.cache_stats()), (0, (0, 0)));
        cached.free(kept, &stream);
        assert_eq!(stat(allocator.stats().allocation.all), [0, 1, 0, 1]);
        cached.assert_intact();
    });
}

#[test]
fn hits_and_misses_are_requests() {
    Rig::everywhere(|rig| {
        let (cached, stream) = (rig.cached(), rig.stream());
        for round in 0..5 {
            let held = cached.malloc(3 * MIB, &stream);
            cached.free(held, &stream);
            assert_eq!(cached.allocator.cache_stats(), (round, 1));
        }
        assert!(cached.allocator.malloc(usize::MAX / 4, &stream).is_err());
        assert_eq!(cached.allocator.cache_stats(), (4, 2));
        cached.assert_intact();
    });
}

#[test]
fn what_is_emptied_is_the_devices_again() {
    Rig::everywhere(|rig| {
        let (cached, stream) = (rig.cached(), rig.stream());
        let free = || rig.device.free_memory().unwrap();
        let before = free();
        let held = [700, 3 * MIB, 40 * MIB, 100 * MIB].map(|bytes| cached.malloc(bytes, &stream));
        let held_bytes = cached.reserved();
        assert_eq!(held_bytes, 162 * MIB);
        assert_eq!(before - free(), held_bytes, "as the device counts");
        let [small, middle, large, largest] = held;
        [small, middle, largest].into_iter().for_each(|held| cached.free(held, &stream));
        assert_eq!(before - free(), held_bytes, "cached");
        assert_eq!(cached.allocator.cached_bytes(), 122 * MIB);
        cached.allocator.empty_cache().unwrap();
        assert_eq!((cached.reserved(), before - free()), (40 * MIB, 40 * MIB));
        // What is split is not given back.
        let [part, rest] = [MIB + 1, 9 * MIB].map(|bytes| cached.malloc(bytes, &stream));
        cached.free(rest, &stream);
        cached.free(large, &stream);
        cached.allocator.empty_cache().unwrap();
        assert_eq!((cached.reserved(), before - free()), (20 * MIB, 20 * MIB));
        cached.free(part, &stream);
        cached.allocator.empty_cache().unwrap();
        assert_eq!((cached.reserved(), before - free()), (0, 0));
        assert_eq!(cached.allocator.stats().num_device_free, 5);
        cached.assert_intact();
    });
}

#[test]
fn the_end_gives_everything_back() {
    Rig::everywhere(|rig| {
        let free = || rig.device.free_memory().unwrap();
        let (own, side) = (rig.stream(), rig.stream());
        let use_and_drop = || {
            let cached = rig.cached();
            let held = [700, 3 * MIB, 40 * MIB].map(|bytes| cached.malloc(bytes, &own));
            cached.look_from(&held[1], &own, &side);
            held.into_iter().for_each(|held| cached.free(held, &own));
            cached.allocator.clone()
        };
        // Once before, for what a driver takes for itself at the first work of a stream.
        drop(use_and_drop());
        let before = free();
        let other_handle = use_and_drop();
        assert_eq!(before - free(), 62 * MIB, "another handle has it");
        drop(other_handle);
        assert_eq!(before, free());
        rig.assert_clean();
    });
}

#[test]
fn buffers_are_zero_or_as_copied_and_count_themselves_off() {
    Rig::everywhere(|rig| {
        let (cached, stream) = (rig.cached(), rig.stream());
        let allocator = &cached.allocator;
        let read = |buffer: &CachedBuffer<u32>| -> Vec<u32> {
            let mut values = vec![u32::MAX; buffer.len()];
            stream.synchronize().unwrap();
            call!(
                rig.driver,
                cuMemcpyDtoH_v2(values.as_mut_ptr().cast(), buffer.address(), buffer.bytes())
            );
            values
        };
        // Something else was there before.
        let held = cached.malloc(40 * KIB, &stream);
        cached.free(held, &stream);
        let zeros: CachedBuffer<u32> = allocator.alloc_zeros(10_000, &stream).unwrap();
        assert_eq!(zeros.address(), held.address());
        assert_eq!(read(&zeros), vec![0; 10_000]);
        let values: Vec<u32> = (0..5000).map(|index| index * 7).collect();
        let copy = allocator.alloc_copy(&values, &stream).unwrap();
        assert_eq!((read(&copy), copy.len(), copy.is_empty()), (values, 5000, false));
        assert_eq!(allocator.memory_allocated(), 79 * 512 + 20 * KIB);
        drop(zeros);
        assert_eq!(allocator.memory_allocated(), 20 * KIB);
        drop(copy);
        assert_eq!(allocator.memory_allocated(), 0);
        // A buffer of nothing, and one that cannot be.
        let empty = allocator.alloc_zeros::<u64>(0, &stream).unwrap();
        assert_eq!((empty.address(), empty.bytes(), empty.is_empty()), (0, 0, true));
        assert!(allocator.alloc_copy::<u64>(&[], &stream).unwrap().record_stream(&stream).is_ok());
        assert!(allocator.alloc_zeros::<u64>(usize::MAX, &stream).is_err());
        assert_eq!(allocator.memory_allocated(), 0);
        cached.assert_intact();
    });
}

#[test]
fn a_buffer_used_elsewhere_is_kept_when_it_is_dropped() {
    Rig::everywhere(|rig| {
        let cached = rig.cached();
        let (own, side) = (rig.stream(), rig.stream());
        let buffer = cached.allocator.alloc_zeros::<u8>(3 << 20, &own).unwrap();
        let stall = rig.stall(side.handle());
        buffer.record_stream(&side).unwrap();
        drop(buffer);
        assert_eq!(cached.allocator.stats().active.all.current, 1);
        drop(stall);
        cached.allocator.empty_cache().unwrap();
        assert_eq!(cached.reserved(), 0);
        cached.assert_intact();
    });
}

#[test]
fn a_snapshot_is_every_block_of_every_segment() {
    Rig::everywhere(|rig| {
        let (cached, stream) = (rig.cached(), rig.stream());
        let held = [100, 2000, 5 * MIB, 12 * MIB].map(|bytes| cached.malloc(bytes, &stream));
        cached.free(held[1], &stream);
        let snapshot = cached.allocator.snapshot();
        assert!(snapshot.is_sorted_by_key(|segment| segment.address));
        let sum = |of: fn(&vpmm::caching::SnapshotSegment) -> u64| snapshot.iter().map(of).sum();
        let (stats, totals): (_, [u64; 4]) = (
            cached.allocator.stats(),
            [
                sum(|of| of.total_size),
                sum(|of| of.allocated_size),
                sum(|of| of.active_size),
                sum(|of| of.requested_size),
            ],
        );
        let counted = [
            stats.reserved_bytes,
            stats.allocated_bytes,
            stats.active_bytes,
            stats.requested_bytes,
        ];
        assert_eq!(totals, counted.map(|of| of.all.current));
        for segment in &snapshot {
            let mut at = segment.address;
            for block in &segment.blocks {
                assert_eq!(block.address, at);
                at += block.size;
            }
            assert_eq!((at, segment.device), (segment.address + segment.total_size, 0));
        }
        let streams: Vec<u64> = snapshot.iter().map(|segment| segment.stream).collect();
        assert!(streams.iter().all(|stream| *stream != 0 && *stream == streams[0]));
        for index in [0, 2, 3] {
            cached.free(held[index], &stream);
        }
        cached.assert_intact();
    });
}

#[test]
fn books_do_not_grow_with_the_number_of_calls() {
    Rig::everywhere(|rig| {
        let cached = rig.cached();
        let (own, side) = (rig.stream(), rig.stream());
        let mut random = Lcg(17);
        let mut live = Vec::new();
        let mut bytes_after = Vec::new();
        for round in 0..8 {
            for _ in 0..if rig.sim.is_some() { 3_000 } else { 30_000 } {
                if live.len() < 200 && random.below(5) < 3 {
                    let doubling = random.below(23);
                    let bytes = 1 + random.below(1 << doubling) as usize;
                    live.push(cached.allocator.malloc(bytes, &own).unwrap());
                } else if !live.is_empty() {
                    let ptr = live.swap_remove(random.below(live.len() as u64) as usize);
                    if random.below(8) == 0 {
                        cached.allocator.record_stream(ptr, &side).unwrap();
                    }
                    cached.allocator.free(ptr).unwrap();
                }
            }
            if round % 2 == 1 {
                live.drain(..).for_each(|ptr| cached.allocator.free(ptr).unwrap());
                cached.allocator.empty_cache().unwrap();
                assert_eq!(cached.allocator.block_count(), 0);
            }
            bytes_after.push(cached.allocator.metadata_bytes());
        }
        assert!(bytes_after[7] <= bytes_after[1] + bytes_after[1] / 8, "{bytes_after:?}");
        cached.assert_intact();
    });
}

/// Compiles only if it is so.
#[test]
fn handles_go_to_any_thread() {
    const fn any_thread<T: Send + Sync>() {}
    any_thread::<CachingAllocator>();
    any_thread::<CachedBuffer<*const u8>>();
}

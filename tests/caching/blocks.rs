//! Where requests are put: best fit, splitting, coalescing, two pools, sizes.

use vpmm::caching::{
    BlockState, LARGE_BUFFER, MIN_BLOCK_SIZE, MIN_LARGE_ALLOC, SMALL_BUFFER, SMALL_SIZE,
    get_allocation_size, round_size,
};

use crate::rig::{Cached, KIB, MIB};
use crate::support::Rig;

/// The blocks of all segments: bytes, and whether they are in use.
fn layout(cached: &Cached<'_>) -> Vec<Vec<(u64, bool)>> {
    let of =
        |block: &vpmm::caching::SnapshotBlock| (block.size, block.state != BlockState::Inactive);
    let snapshot = cached.allocator.snapshot();
    snapshot.iter().map(|segment| segment.blocks.iter().map(of).collect()).collect()
}

#[test]
fn segments_have_the_sizes_of_the_scheme() {
    Rig::everywhere(|rig| {
        let stream = rig.stream();
        for (bytes, segment) in [
            (1, SMALL_BUFFER),
            (SMALL_SIZE, SMALL_BUFFER),
            (SMALL_SIZE + 1, LARGE_BUFFER),
            (MIN_LARGE_ALLOC - 512, LARGE_BUFFER),
            (MIN_LARGE_ALLOC, MIN_LARGE_ALLOC),
            (MIN_LARGE_ALLOC + 1, MIN_LARGE_ALLOC + (2 << 20)),
        ] {
            let cached = rig.cached();
            let held = cached.malloc(bytes as u64, &stream);
            assert_eq!(cached.reserved(), segment as u64, "{bytes}");
            assert_eq!(get_allocation_size(round_size(bytes)), segment);
            cached.free(held, &stream);
            cached.assert_intact();
        }
    });
}

#[test]
fn the_smallest_block_that_fits_is_taken_and_of_those_the_lowest() {
    Rig::everywhere(|rig| {
        let (cached, stream) = (rig.cached(), rig.stream());
        // One segment: free blocks of 5, 3, 4 and 3 MiB, with something between them.
        let sizes = [5, 2, 3, 2, 4, 2];
        let held = sizes.map(|mib| cached.malloc(mib * MIB, &stream));
        assert_eq!(cached.reserved(), LARGE_BUFFER as u64);
        let start = held[0].address();
        for index in [0, 2, 4] {
            cached.free(held[index], &stream);
        }
        assert_eq!(cached.allocator.free_block_count(), 4, "and 2 MiB at the end");
        let at = |bytes| cached.malloc(bytes, &stream);
        // 3 MiB fits 3 exactly, though 5 comes first.
        let three = at(3 * MIB);
        assert_eq!(three.address(), start + 7 * MIB);
        let four = at(3 * MIB + 512);
        assert_eq!(four.address(), start + 12 * MIB);
        let [two, two_more] = [at(2 * MIB), at(2 * MIB)];
        assert_eq!(two.address(), start + 18 * MIB, "the last block, exactly");
        assert_eq!(two_more.address(), start, "then what is split");
        // Two of one size: the lower.
        cached.free(held[1], &stream);
        cached.free(held[3], &stream);
        assert_eq!(at(2 * MIB).address(), start + 10 * MIB, "5 and 2 have become one of 5");
        cached.assert_intact();
    });
}

#[test]
fn a_small_block_is_split_from_512_bytes_and_a_large_one_above_1_mib() {
    Rig::everywhere(|rig| {
        let (cached, stream) = (rig.cached(), rig.stream());
        let small = cached.malloc(SMALL_SIZE as u64, &stream);
        let rest = cached.malloc(SMALL_SIZE as u64 - 512, &stream);
        assert_eq!(layout(&cached), [[(MIB, true), (MIB - 512, true), (512, false)]]);
        assert_eq!(MIN_BLOCK_SIZE, 512);
        cached.free(small, &stream);
        cached.free(rest, &stream);
        cached.allocator.empty_cache().expect("all goes back");

        // 20 MiB less 18 less 1 leaves exactly 1 MiB: not above it.
        let large = cached.malloc(9 * MIB, &stream);
        let second = cached.malloc(9 * MIB, &stream);
        assert_eq!(layout(&cached), [[(9 * MIB, true), (9 * MIB, true), (2 * MIB, false)]]);
        let third = cached.malloc(MIB + 512, &stream);
        assert_eq!(layout(&cached), [[(9 * MIB, true), (9 * MIB, true), (2 * MIB, true)]]);
        cached.free(third, &stream);
        cached.free(second, &stream);
        // 11 MiB free: 10 of it leaves 1 MiB, which stays; 1 byte less is more, which goes.
        let ten = cached.malloc(10 * MIB, &stream);
        assert_eq!(layout(&cached), [[(9 * MIB, true), (11 * MIB, true)]]);
        cached.free(ten, &stream);
        let less = cached.malloc(10 * MIB - 512, &stream);
        let split = [(9 * MIB, true), (10 * MIB - 512, true), (MIB + 512, false)];
        assert_eq!(layout(&cached), [split]);
        cached.free(less, &stream);
        cached.free(large, &stream);
        cached.assert_intact();
    });
}

#[test]
fn free_neighbours_become_one_on_both_sides() {
    Rig::everywhere(|rig| {
        let (cached, stream) = (rig.cached(), rig.stream());
        // Every order of freeing three in the middle of a segment.
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let first = cached.malloc(256 * KIB, &stream);
            let middle = [1, 2, 3].map(|n| cached.malloc(n * 64 * KIB, &stream));
            let last = cached.malloc(256 * KIB, &stream);
            for index in order {
                cached.free(middle[index], &stream);
            }
            let (whole, rest) = ((256 * KIB, true), (2 * MIB - 896 * KIB, false));
            assert_eq!(layout(&cached), [[whole, (384 * KIB, false), whole, rest]]);
            cached.free(first, &stream);
            cached.free(last, &stream);
            assert_eq!(layout(&cached), [[(2 * MIB, false)]], "one whole segment");
            assert_eq!(cached.allocator.block_count(), 1);
        }
        cached.assert_intact();
    });
}

#[test]
fn segments_side_by_side_stay_apart() {
    Rig::everywhere(|rig| {
        let (cached, stream) = (rig.cached(), rig.stream());
        // However the driver places them, none becomes one with another.
        let held: Vec<_> = (0..8).map(|_| cached.malloc(12 * MIB, &stream)).collect();
        held.into_iter().for_each(|held| cached.free(held, &stream));
        assert_eq!(layout(&cached), vec![vec![(12 * MIB, false)]; 8]);
        cached.assert_intact();
    });
}

#[test]
fn small_and_large_requests_have_pools_of_their_own() {
    Rig::everywhere(|rig| {
        let (cached, stream) = (rig.cached(), rig.stream());
        let large = cached.malloc(2 * MIB, &stream);
        cached.free(large, &stream);
        // 20 MiB are free, of the large pool.
        let small = cached.malloc(MIB, &stream);
        assert_eq!(cached.reserved(), (LARGE_BUFFER + SMALL_BUFFER) as u64);
        cached.free(small, &stream);
        let small = cached.malloc(MIB - 512, &stream);
        let larger = cached.malloc(MIB + 512, &stream);
        assert_eq!(cached.reserved(), (LARGE_BUFFER + SMALL_BUFFER) as u64);
        let kinds: Vec<_> =
            cached.allocator.snapshot().iter().map(|of| (of.total_size, of.is_small)).collect();
        assert!(kinds.contains(&(2 * MIB, true)) && kinds.contains(&(20 * MIB, false)));
        cached.free(small, &stream);
        cached.free(larger, &stream);
        cached.assert_intact();
    });
}

#[test]
fn oversize_blocks_stay_whole_and_serve_their_like() {
    Rig::everywhere(|rig| {
        let settings = "max_split_size_mb:32,max_non_split_rounding_mb:24";
        let (cached, stream) = (rig.cached_with(settings), rig.stream());
        let oversize = cached.malloc(64 * MIB, &stream);
        assert_eq!(cached.allocator.stats().oversize_allocations.current, 1);
        cached.free(oversize, &stream);
        // Less than the maximum: not from what is not split.
        let less = cached.malloc(31 * MIB, &stream);
        assert_eq!(cached.reserved(), 96 * MIB);
        // Within 24 MiB of it, whole; at 24 MiB no more.
        let near = cached.malloc(40 * MIB + 512, &stream);
        assert_eq!((near.address(), cached.reserved()), (oversize.address(), 96 * MIB));
        assert_eq!(cached.allocator.memory_allocated(), (64 + 32) * MIB, "nothing split off");
        cached.free(near, &stream);
        let far = cached.malloc(40 * MIB, &stream);
        assert_eq!(cached.reserved(), (96 + 40) * MIB);
        let stats = cached.allocator.stats();
        assert_eq!((stats.oversize_segments.current, stats.oversize_segments.peak), (3, 3));
        assert_eq!(stats.max_split_size, Some(32 * MIB));
        cached.free(far, &stream);
        cached.free(less, &stream);
        cached.assert_intact();
    });
}

#[test]
fn sizes_are_rounded_to_divisions_of_their_doubling() {
    Rig::everywhere(|rig| {
        let cached = rig.cached_with("roundup_power2_divisions:[1:4,2:2,4:0,>:8]");
        let stream = rig.stream();
        for (bytes, rounded) in [
            (1000, 1024),
            (4097, 5 * KIB),
            (MIB + 1, MIB + 256 * KIB),
            (2 * MIB + 1, 3 * MIB),
            (4 * MIB + 1, 4 * MIB + 512 * KIB),
            (17 * MIB, 18 * MIB),
        ] {
            let held = cached.malloc(bytes, &stream);
            let stats = cached.allocator.stats();
            let of_segment = stats.inactive_split_bytes.all.current == 0;
            let expected = if of_segment { cached.reserved() } else { rounded };
            assert_eq!(stats.allocated_bytes.all.current, expected, "{bytes}");
            assert_eq!(stats.requested_bytes.all.current, bytes);
            cached.free(held, &stream);
            cached.allocator.empty_cache().expect("all goes back");
        }
        cached.assert_intact();
    });
}

#[test]
fn middle_segments_have_the_length_that_was_set() {
    Rig::everywhere(|rig| {
        let (cached, stream) = (rig.cached_with("large_segment_size_mb:64"), rig.stream());
        let held = cached.malloc(2 * MIB, &stream);
        assert_eq!(cached.reserved(), 64 * MIB);
        cached.free(held, &stream);
        cached.assert_intact();
    });
}

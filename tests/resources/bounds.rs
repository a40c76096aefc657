//! Requests that a resource can never serve: above its own maximum, or that of what is below it.

use std::sync::Arc;

use cuda_sim::Schedule;
use vpmm::caching::{CachingConfig, Divisions};
use vpmm::resource::*;
use vpmm::{CachingAllocator, Error, MemoryResource, Stream};

use crate::subjects::{MIB, Shared, malloc};
use crate::support::Rig;

/// Blocks of so many bytes, one at a time: nothing longer is to be had from below.
fn blocks(rig: &Rig, bytes: u64) -> Shared {
    let mut config = FixedSizeConfig::default();
    (config.block_bytes, config.blocks_at_once) = (bytes as usize, 1);
    Arc::new(FixedSize::new(malloc(rig), &rig.device, &config).expect("blocks"))
}

fn pool_of(rig: &Rig, upstream: Shared, max_bytes: Option<u64>) -> CoalescingPool<Shared> {
    let mut config = CoalescingConfig::default();
    config.max_bytes = max_bytes;
    CoalescingPool::new(upstream, &rig.device, &config).expect("a pool")
}

/// The longest request that a resource tells of is served, also beside others; one byte more never is, and is said to.
fn assert_bound(resource: &dyn MemoryResource, most: u64, stream: &Stream) {
    let stream = stream.handle();
    assert_eq!(resource.facts().max_bytes, Some(most as usize));
    for _ in 0..2 {
        let longer = resource.allocate(most as usize + 1, 256, stream);
        let Err(Error::RequestTooLong { bytes, most_bytes }) = longer else {
            panic!("{most}: {longer:?}");
        };
        assert_eq!((bytes, most_bytes), (most + 1, most));
        let ptr = resource.allocate(most as usize, 256, stream).expect("not too long");
        resource.deallocate(ptr, most as usize, 256, stream).expect("freed");
    }
}

#[test]
fn a_request_above_a_pools_maximum_is_too_long() {
    let rig = Rig::simulated(Schedule::Eager);
    let stream = rig.stream();
    assert_bound(&pool_of(&rig, Arc::new(malloc(&rig)), Some(16 * MIB)), 16 * MIB, &stream);
    let mut config = ArenaConfig::default();
    config.arena_bytes = Some(16 * MIB);
    assert_bound(&Arena::new(malloc(&rig), &rig.device, &config).unwrap(), 16 * MIB, &stream);
    // Where the smaller requests' arenas have it.
    config.arena_bytes = Some(MIB);
    assert_bound(&Arena::new(malloc(&rig), &rig.device, &config).unwrap(), MIB, &stream);
}

#[test]
fn what_is_below_bounds_what_a_pool_can_serve() {
    let rig = Rig::simulated(Schedule::Eager);
    let stream = rig.stream();
    let pool = |max_bytes| pool_of(&rig, blocks(&rig, MIB), max_bytes);
    assert_bound(&pool(None), MIB, &stream);
    assert_bound(&pool(Some(16 * MIB)), MIB, &stream);
    assert_bound(&pool(Some(MIB / 2)), MIB / 2, &stream);
    // A pool of a pool, and an arena of one.
    assert_bound(&pool_of(&rig, Arc::new(pool(Some(MIB / 2))), None), MIB / 2, &stream);
    let mut config = ArenaConfig::default();
    config.arena_bytes = Some(2 * MIB);
    let below = pool_of(&rig, Arc::new(malloc(&rig)), Some(3 * MIB));
    assert_bound(&Arena::new(below, &rig.device, &config).unwrap(), 2 * MIB, &stream);
}

/// A pool that would grow by more than one piece of what is below has grows by such a piece.
#[test]
fn a_pool_of_pieces_that_are_not_long_goes_on_growing() {
    let rig = Rig::simulated(Schedule::Eager);
    let stream = rig.stream();
    for max_bytes in [None, Some(64 * MIB)] {
        let pool = pool_of(&rig, blocks(&rig, MIB), max_bytes);
        let held: Vec<_> = (0..40)
            .map(|at| {
                let ptr = pool.allocate(600 << 10, 256, stream.handle());
                ptr.unwrap_or_else(|error| panic!("the {at}th: {error}"))
            })
            .collect();
        for ptr in held {
            pool.deallocate(ptr, 600 << 10, 256, stream.handle()).expect("freed");
        }
        assert_eq!(pool.live_bytes(), 0);
    }
}

/// A caching allocator asks for no longer segments than there are.
#[test]
fn a_caching_allocator_over_short_pieces_serves_what_fits_into_one() {
    let rig = Rig::simulated(Schedule::Eager);
    let stream = rig.stream();
    for most in [MIB, 16 * MIB, 21 * MIB] {
        let config = CachingConfig::default();
        let caching =
            CachingAllocator::over(blocks(&rig, most), &rig.device, &config).expect("one");
        assert_eq!(caching.facts().max_bytes, Some(most as usize));
        for bytes in [1000, MIB, 3 * MIB, 11 * MIB, most].map(|bytes| bytes.min(most) as usize) {
            let ptr = caching.allocate(bytes, 256, stream.handle());
            let ptr = ptr.unwrap_or_else(|error| panic!("{bytes} of {most}: {error}"));
            caching.deallocate(ptr, bytes, 256, stream.handle()).expect("freed");
            let longer = caching.allocate(most as usize + 1, 256, stream.handle());
            assert!(matches!(longer, Err(Error::RequestTooLong { .. })), "{longer:?}");
        }
    }
}

/// A bin of the resource's own that what is below never gives a block for takes no requests: they are served below.
#[test]
fn a_bin_that_nothing_below_is_long_enough_for_is_none() {
    let rig = Rig::simulated(Schedule::Eager);
    let stream = rig.stream();
    let binning = Binning::with_powers(blocks(&rig, 3 * MIB), &rig.device, 20..=23).expect("bins");
    binning.add_own_bin(12 << 20).expect("nothing is done");
    assert_eq!(binning.bins(), [MIB, 2 * MIB]);
    assert_bound(&binning, 3 * MIB, &stream);
}

/// What a bin takes is not served elsewhere, though what is below, or a longer bin, has longer pieces.
#[test]
fn the_longest_request_of_bins_is_one_that_comes_where_it_is_served() {
    let rig = Rig::simulated(Schedule::Eager);
    let stream = rig.stream();
    let served = |binning: &Binning<Shared>| {
        let most = binning.facts().max_bytes.expect("what is below has blocks of one size");
        let ptr = binning.allocate(most, 256, stream.handle()).expect("not too long");
        binning.deallocate(ptr, most, 256, stream.handle()).expect("freed");
        most as u64
    };
    let binning = Binning::new(blocks(&rig, 3 * MIB), &rig.device);
    binning.add_bin(8 << 20, blocks(&rig, 2 * MIB)).expect("a bin");
    assert_eq!(served(&binning), 2 * MIB);
    binning.add_bin(4 << 20, blocks(&rig, MIB)).expect("a bin");
    assert_eq!(served(&binning), MIB);
    binning.add_bin(9 << 20, blocks(&rig, 16 * MIB)).expect("a bin");
    assert_eq!(served(&binning), 9 * MIB);
}

/// Blocks are taken as many at a time as there are in one piece of what is below.
#[test]
fn blocks_of_one_size_fit_into_short_pieces() {
    let rig = Rig::simulated(Schedule::Eager);
    let stream = rig.stream();
    for at_start in [true, false] {
        let mut config = FixedSizeConfig::default();
        (config.block_bytes, config.blocks_at_once) = (1 << 20, 8);
        config.at_start = at_start;
        let made = FixedSize::new(blocks(&rig, 3 * MIB), &rig.device, &config);
        let short = made.unwrap_or_else(|error| panic!("{at_start}: {error}"));
        assert_bound(&short, MIB, &stream);
        assert_eq!(short.held_bytes(), Some(3 * MIB));
        config.block_bytes = 4 << 20;
        let refused = FixedSize::new(blocks(&rig, 3 * MIB), &rig.device, &config);
        let Err(Error::RequestTooLong { bytes, most_bytes }) = refused else {
            panic!("{at_start}: {refused:?}");
        };
        assert_eq!((bytes, most_bytes), (4 * MIB, 3 * MIB));
    }
}

/// A block that cannot be is named by its own setting, however many were to be taken at once.
#[test]
fn a_block_of_more_bytes_than_there_are_addresses_is_named() {
    let rig = Rig::simulated(Schedule::Eager);
    for bytes in [0, (1 << 48) + 1, 1 << 62, usize::MAX] {
        let mut config = FixedSizeConfig::default();
        (config.block_bytes, config.blocks_at_once) = (bytes, 1);
        let block = FixedSize::new(malloc(&rig), &rig.device, &config).map(drop);
        let bin = Binning::new(malloc(&rig), &rig.device).add_own_bin(bytes);
        for refused in [block, bin] {
            let Err(Error::Config { name, value, .. }) = refused else {
                panic!("{bytes}: {refused:?}");
            };
            assert_eq!((name, value), ("block_bytes", bytes.to_string()));
        }
    }
}

/// Where sizes are rounded by divisions the longest one is that is not rounded beyond what there is.
#[test]
fn the_longest_request_of_a_caching_allocator_is_not_rounded_up() {
    let rig = Rig::simulated(Schedule::Eager);
    let stream = rig.stream();
    for (divisions, below, most) in
        [(4, 9 * MIB, 8 * MIB), (4, 10 * MIB, 10 * MIB), (8, 9 * MIB, 9 * MIB), (2, 1792, 1536)]
    {
        let mut config = CachingConfig::default();
        config.roundup_power2_divisions = Divisions::uniform(divisions).expect("a power of two");
        let caching =
            CachingAllocator::over(blocks(&rig, below), &rig.device, &config).expect("one");
        assert_eq!(caching.facts().max_bytes, Some(most as usize), "{divisions} of {below}");
        let ptr = caching.allocate(most as usize, 256, stream.handle()).expect("not too long");
        caching.deallocate(ptr, most as usize, 256, stream.handle()).expect("freed");
        let longer = caching.allocate(most as usize + 1, 256, stream.handle());
        assert!(matches!(longer, Err(Error::RequestTooLong { .. })), "{longer:?}");
    }
}

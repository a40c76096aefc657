//! Requests that begin and end with what others leave of extents.

use cuda_sim::Schedule;
use vpmm::snapshot::Segment;
use vpmm::{Error, Stream, WaitPolicy};

use crate::rig::{GRANULE, KIB, config};
use crate::support::{Held, Lcg, Rig, Watched, call};

/// Parts of a granule, in pages.
const SHORT: u64 = 204 * 4 * KIB;
const LONG: u64 = GRANULE - SHORT;

/// Two granules of which one begins with what is free, and the other ends with it.
fn two_parts(watched: &Watched<'_>, stream: &Stream) -> [Held; 2] {
    let [a, b] = [SHORT, LONG].map(|bytes| watched.malloc(bytes, stream));
    let [c, d] = [LONG, SHORT].map(|bytes| watched.malloc(bytes, stream));
    assert_eq!(watched.pool.stats().mapped_bytes, 2 * GRANULE);
    watched.free(a, stream);
    watched.free(d, stream);
    [b, c]
}

#[test]
fn parts_of_two_extents_serve_one_request() {
    Rig::everywhere(|rig| {
        let watched = rig.pool(&config(2, 64));
        let stream = rig.stream();
        for _ in 0..3 {
            let kept = two_parts(&watched, &stream);
            let split = watched.malloc(2 * SHORT, &stream);
            // Both of the other parts, and what was there before, have the same address still.
            let stats = watched.pool.stats();
            assert_eq!((stats.mapped_bytes, stats.free_bytes()), (2 * GRANULE, 0));
            let refused = watched.pool.malloc(1, &stream);
            assert!(matches!(refused, Err(Error::OutOfMemory { .. })), "{refused:?}");
            watched.validate();
            // Each may be the one that goes first.
            let order = if stats.extents_moved % 4 == 0 { [0, 1, 2] } else { [2, 0, 1] };
            let mut all: Vec<_> = kept.into_iter().chain([split]).map(Some).collect();
            for at in order {
                watched.free(all[at].take().unwrap(), &stream);
                watched.validate();
            }
            let whole = watched.malloc(2 * GRANULE, &stream);
            watched.free(whole, &stream);
        }
        watched.assert_intact();
    });
}

/// An extent's memory is told of where it is, and not where it is only mapped.
#[test]
fn segments_have_what_is_there_of_an_extent_in_two_parts() {
    let rig = Rig::simulated(Schedule::Eager);
    let watched = rig.pool(&config(2, 64));
    let stream = rig.stream();
    let kept = two_parts(&watched, &stream);
    let split = watched.malloc(2 * SHORT, &stream);
    let look = || {
        let segments = watched.pool.snapshot();
        let (bytes, stats) = (|of: &Segment| of.bytes, watched.pool.stats());
        assert_eq!(segments.iter().map(bytes).sum::<u64>(), stats.mapped_bytes, "{segments:#x?}");
        let addresses = stats.mapped_bytes + stats.zombie_bytes + stats.hole_bytes;
        assert_eq!(addresses, stats.reserved_bytes, "{stats:?}");
        for segment in segments {
            let end = segment.blocks.iter().fold(segment.address, |at, block| {
                assert_eq!(block.address, at);
                at + block.bytes
            });
            assert_eq!(end, segment.address + segment.bytes);
        }
    };
    look();
    for held in kept.into_iter().chain([split]) {
        watched.free(held, &stream);
        look();
    }
    watched.assert_intact();
}

/// Each of the two would be kept in its place for longer than one granule more is worth, at leisure and in haste.
#[test]
fn extents_stay_whole_while_more_can_be_made() {
    for moves_per_second in [0, u32::MAX] {
        let rig = Rig::simulated(Schedule::Eager);
        let mut settings = config(3, 64);
        settings.limit_bytes = None;
        settings.moves_per_second = moves_per_second;
        let watched = rig.pool(&settings);
        let stream = rig.stream();
        let kept = two_parts(&watched, &stream);
        let third = watched.malloc(2 * SHORT, &stream);
        let stats = watched.pool.stats();
        assert_eq!((stats.mapped_bytes, stats.extents_moved), (3 * GRANULE, 0), "{stats:?}");
        kept.into_iter().chain([third]).for_each(|held| watched.free(held, &stream));
        watched.assert_intact();
    }
}

/// Where the blocks beside its ends go and it stays, the free parts are used where they are.
#[test]
fn what_is_beside_a_split_is_used_in_place() {
    Rig::everywhere(|rig| {
        let watched = rig.pool(&config(2, 64));
        let stream = rig.stream();
        let [b, c] = two_parts(&watched, &stream);
        let split = watched.malloc(2 * SHORT, &stream);
        watched.free(b, &stream);
        let again = watched.malloc(LONG, &stream);
        watched.free(c, &stream);
        let other = watched.malloc(LONG, &stream);
        assert_eq!(watched.pool.stats().mapped_bytes, 2 * GRANULE);
        watched.validate();
        [split, again, other].into_iter().for_each(|held| watched.free(held, &stream));
        // Nothing holds an extent in two parts any more.
        watched.pool.trim_to(0).unwrap();
        assert_eq!(watched.pool.stats().mapped_bytes, 0);
        watched.assert_intact();
    });
}

/// A part that moved may still be in use where it was, although the part that stayed is not.
#[test]
fn work_from_before_a_split_keeps_its_addresses() {
    Rig::everywhere(|rig| {
        let mut config = config(2, 64);
        config.out_of_memory = WaitPolicy::FailAtOnce;
        let watched = rig.pool(&config);
        let (stream, other) = (rig.stream(), rig.stream());
        let [a, b] = [SHORT, LONG].map(|bytes| watched.malloc(bytes, &stream));
        let c = watched.malloc(LONG, &other);
        let stall = rig.stall(stream.handle());
        let d = watched.malloc(SHORT, &stream);
        [a, d].into_iter().for_each(|held| watched.free(held, &stream));
        let split = watched.malloc(2 * SHORT, &stream);
        watched.free(c, &other);
        other.synchronize().unwrap();
        // Were the extent made whole for this, what is filled behind the stall would be nowhere.
        let refused = watched.pool.malloc((LONG + SHORT) as usize, &other);
        assert!(matches!(refused, Err(Error::OutOfMemory { .. })), "{refused:?}");
        drop(stall);
        [b, split].into_iter().for_each(|held| watched.free(held, &stream));
        watched.assert_intact();
    });
}

/// The last event of a stream that has ended has passed, but it freed too many blocks for all of them to be nobody's
/// at once. An address given up meanwhile waits for nothing: nobody will ask about that stream any more.
#[test]
fn what_goes_back_after_its_streams_end_waits_for_nothing() {
    let rig = Rig::simulated(Schedule::Manual);
    let many = 12_000 * 128 * KIB / GRANULE;
    let mut config = config(many + 2, 1024);
    config.out_of_memory = WaitPolicy::FailAtOnce;
    let watched = rig.pool(&config);
    let (ending, other) = (rig.stream(), rig.stream());
    let short: Vec<_> =
        (0..12_000).map(|_| watched.pool.malloc(128 << 10, &ending).unwrap()).collect();
    let [a, b] = [SHORT, LONG].map(|bytes| watched.malloc(bytes, &ending));
    let [c, d] = [LONG, SHORT].map(|bytes| watched.malloc(bytes, &ending));
    [a, d].into_iter().for_each(|held| watched.free(held, &ending));
    let split = watched.malloc(2 * SHORT, &ending);
    assert_eq!(watched.pool.stats().mapped_bytes, (many + 2) * GRANULE);
    watched.free(split, &ending);
    // Every other one, so that each is a block of its own.
    short.iter().step_by(2).for_each(|ptr| watched.pool.free(*ptr, &ending).unwrap());
    drop(ending);
    // Not by the library, which would tell the pool.
    call!(rig.driver, cuCtxSynchronize());
    let refused = watched.pool.malloc((9 * GRANULE) as usize, &other);
    assert!(matches!(refused, Err(Error::OutOfMemory { .. })), "{refused:?}");
    watched.validate();
    short.iter().skip(1).step_by(2).for_each(|ptr| watched.pool.free(*ptr, &other).unwrap());
    [b, c].into_iter().for_each(|held| watched.free(held, &other));
    rig.device.synchronize().unwrap();
    let all = watched.malloc((many + 2) * GRANULE, &other);
    watched.free(all, &other);
    rig.device.synchronize().unwrap();
    watched.pool.trim_to(0).unwrap();
    assert_eq!(watched.pool.stats().mapped_bytes, 0);
    watched.assert_intact();
}

/// Lengths that are no granules, at the limit: everything has its contents, and all comes together. (Without
/// what others leave of extents 141 are refused.)
#[test]
fn a_full_pool_of_odd_lengths_comes_together() {
    Rig::everywhere(|rig| {
        const LIMIT: u64 = 24;
        let watched = rig.pool(&config(LIMIT, 512));
        let stream = rig.stream();
        let mut random = Lcg(11);
        let mut held = Vec::new();
        let mut refused = 0;
        for _ in 0..400 {
            let bytes = (1 + random.below(900)) * 8 * KIB;
            if watched.pool.stats().live_bytes + bytes > LIMIT * GRANULE - GRANULE {
                let at = random.below(held.len() as u64) as usize;
                watched.free(held.swap_remove(at), &stream);
                continue;
            }
            match watched.try_malloc(bytes, &stream) {
                Ok(block) => held.push(block),
                Err(_) => refused += 1,
            }
        }
        watched.validate();
        assert!(refused < 140, "{refused} requests refused");
        held.into_iter().for_each(|block| watched.free(block, &stream));
        let all = watched.malloc(LIMIT * GRANULE, &stream);
        watched.free(all, &stream);
        watched.assert_intact();
    });
}

//! One limit over all heaps of a pool, and their numbers.

use vpmm::{Buffers, Contents, Error, Location};

use crate::rig::{GRANULE, LIMIT, Profile};
use crate::support::Rig;

#[test]
fn the_limit_is_for_all_heaps_together() {
    Rig::everywhere(|rig| {
        for profile in Profile::BOTH {
            let watched = rig.pool(profile, Location::Device);
            let pool = &watched.pool;
            let stream = rig.stream();
            let tagged = pool.tagged("weights").unwrap();
            let half = (LIMIT / 2 * GRANULE) as usize;
            let weights = tagged.malloc(half, &stream).unwrap();
            let ordinary = pool.malloc(half, &stream).unwrap();
            for refused in
                [tagged.malloc(GRANULE as usize, &stream), pool.malloc(GRANULE as usize, &stream)]
            {
                assert!(refused.as_ref().is_err_and(Error::is_out_of_memory), "{refused:?}");
            }
            assert_eq!(pool.stats().mapped_bytes, LIMIT * GRANULE);
            assert_eq!(tagged.stats().mapped_bytes, LIMIT / 2 * GRANULE);
            assert_eq!(pool.stats().live_bytes, LIMIT * GRANULE);
            // What sleeps does not count, and cannot wake while others have its room.
            pool.suspend("weights", &stream, &Contents::Keep(Buffers::Release)).unwrap();
            let more = pool.malloc(GRANULE as usize, &stream).unwrap();
            let refused = pool.resume("weights", &stream);
            assert!(refused.as_ref().is_err_and(Error::is_out_of_memory), "{refused:?}");
            assert!(tagged.is_asleep());
            pool.free(more, &stream).unwrap();
            pool.free(ordinary, &stream).unwrap();
            pool.free(weights, &stream).unwrap();
            watched.validate();
        }
    });
}

#[test]
fn released_graphs_make_room() {
    Rig::everywhere(|rig| {
        for profile in Profile::BOTH {
            let watched = rig.pool(profile, Location::Device);
            let pool = &watched.pool;
            let stream = rig.stream();
            let graphs = pool.graph_pool().unwrap();
            graphs.begin(&stream).unwrap();
            let all = (LIMIT * GRANULE) as usize;
            let scratch = pool.malloc(all, &stream).unwrap();
            pool.free(scratch, &stream).unwrap();
            graphs.end(&stream).unwrap();
            assert_eq!(pool.stats().mapped_bytes, LIMIT * GRANULE);
            graphs.release(&stream).unwrap();
            stream.synchronize().unwrap();
            drop(pool.graph_pool().unwrap());
            let held = watched.malloc(LIMIT * GRANULE, &stream);
            watched.free(held, &stream);
            watched.assert_intact();
        }
    });
}

//! Streams that end with work under way, that others made, that capture.

use cuda_sim::Schedule;
use cuda_sys::types::CUstream_flags_enum;
use vpmm::resource::*;
use vpmm::{Error, MemoryResource, Stream, StreamHandle};

use crate::subjects::{MIB, each, malloc};
use crate::support::{Rig, call, streams};
use crate::watched::Watched;

const BYTES: usize = 3 << 20;

#[test]
fn memory_of_a_destroyed_stream_is_used_again_in_order() {
    each(|rig, resource| {
        let watched = Watched::new(rig, resource);
        let after = rig.stream();
        for _ in 0..4 {
            let ended = rig.stream();
            let held: Vec<_> = (0..8).map(|_| watched.allocate(BYTES, &ended)).collect();
            if resource.facts().stream_ordered {
                // The frees are behind work that runs until the stall ends.
                let stall = rig.stall(ended.handle());
                held.into_iter().for_each(|held| watched.free(held, &ended));
                drop(ended);
                drop(stall);
            } else {
                held.into_iter().for_each(|held| watched.free(held, &ended));
                drop(ended);
            }
            let again: Vec<_> = (0..8).map(|_| watched.allocate(BYTES, &after)).collect();
            again.into_iter().for_each(|held| watched.free(held, &after));
        }
        watched.assert_intact();
    });
}

/// A stream has what it freed by whichever of its handles it comes again: by the library's own, or by the bare one, as a
/// program in C has it.
#[test]
fn a_stream_has_its_memory_by_each_of_its_handles() {
    let rig = Rig::simulated(Schedule::Manual);
    let device = &rig.device;
    let mut config = CoalescingConfig::default();
    config.max_bytes = Some(4 * MIB);
    let pool = CoalescingPool::new(malloc(&rig), device, &config).expect("a pool");
    let mut config = FixedSizeConfig::default();
    (config.block_bytes, config.blocks_at_once) = (2 << 20, 2);
    let upstream = Limiting::new(malloc(&rig), 4 * MIB);
    let blocks = FixedSize::new(upstream, device, &config).expect("blocks");
    let mut config = ArenaConfig::default();
    config.arena_bytes = Some(4 * MIB);
    let arena = Arena::new(malloc(&rig), device, &config).expect("an arena");
    let resources: [&dyn MemoryResource; 3] = [&pool, &blocks, &arena];
    for resource in resources {
        let stream = rig.stream();
        let own = stream.handle();
        // SAFETY: the stream outlives it.
        let bare = unsafe { StreamHandle::from_raw(own.raw()) };
        for (first, second) in [(own, bare), (bare, own), (own, own), (bare, bare)] {
            for stream in [first, second] {
                let held = [(); 2].map(|()| {
                    let made = resource.allocate(2 << 20, 256, stream);
                    made.unwrap_or_else(|error| panic!("{}: {error}", resource.describe()))
                });
                for ptr in held {
                    resource.deallocate(ptr, 2 << 20, 256, first).expect("freed");
                }
            }
        }
    }
}

/// As of `device.stream()?.handle()`, whose stream is gone at once. A driver may crash on it, or take it for the
/// stream that has come to its place.
#[test]
fn a_handle_that_has_outlived_its_stream_is_refused() {
    each(|rig, resource| {
        let watched = Watched::new(rig, resource);
        let stream = rig.stream();
        let held = watched.allocate(BYTES, &stream);
        let gone = rig.stream().handle();
        let known = {
            let known = rig.stream();
            let held = watched.allocate(BYTES, &known);
            watched.free(held, &known);
            known.handle()
        };
        // Perhaps where one of them was.
        let next = rig.stream();
        for gone in [gone, known] {
            // Some do not look at the stream.
            let ended = |error: Error| assert!(matches!(error, Error::StreamEnded), "{error}");
            match resource.allocate(BYTES, 256, gone) {
                Ok(ptr) => resource.deallocate(ptr, BYTES, 256, gone).expect("freed"),
                Err(error) => ended(error),
            }
            if resource.facts().records_streams {
                resource.record_stream(held.ptr, gone).map_or_else(ended, |()| panic!("noted"));
            }
        }
        watched.free(held, &stream);
        let held = watched.allocate(BYTES, &next);
        watched.free(held, &next);
        watched.assert_intact();
    });
}

#[test]
fn streams_that_others_made_and_destroyed() {
    each(|rig, resource| {
        let watched = Watched::new(rig, resource);
        let after = rig.stream();
        for round in 0..6 {
            let flags =
                if round % 2 == 0 { CUstream_flags_enum::CU_STREAM_NON_BLOCKING.0 } else { 0 };
            let (raw, handle) = streams::make(rig, flags);
            let held: Vec<_> = (0..4).map(|_| watched.allocate(BYTES, handle)).collect();
            held.into_iter().for_each(|held| watched.free(held, handle));
            call!(rig.driver, cuStreamDestroy_v2(raw));
            let again: Vec<_> = (0..4).map(|_| watched.allocate(BYTES, &after)).collect();
            again.into_iter().for_each(|held| watched.free(held, &after));
        }
        watched.assert_intact();
    });
}

/// A stream that somebody lends ends with the last value that borrows it, and lives on. Lent again it has its
/// number still, and nothing of who came to its place meanwhile.
#[test]
fn a_stream_that_is_lent_again_has_nothing_of_others() {
    each(|rig, resource| {
        if !resource.facts().stream_ordered {
            return;
        }
        let watched = Watched::new(rig, resource);
        let flags = CUstream_flags_enum::CU_STREAM_NON_BLOCKING.0;
        let [(raw, handle), (next, next_handle)] = [(); 2].map(|()| streams::make(rig, flags));
        // SAFETY: alive until the end of the test.
        let lent = || unsafe { Stream::borrowed(&rig.device, handle) }.expect("lent");
        let first = lent();
        let kept = watched.allocate(BYTES, &first);
        drop(first);
        let held = watched.allocate(BYTES, next_handle);
        let stall = rig.stall(next_handle);
        watched.free(held, next_handle);
        let second = lent();
        let again = watched.allocate(BYTES, &second);
        drop(stall);
        watched.free(again, &second);
        watched.free(kept, &second);
        watched.assert_intact();
        drop(second);
        call!(rig.driver, cuStreamDestroy_v2(raw));
        call!(rig.driver, cuStreamDestroy_v2(next));
    });
}

/// The same where the other comes when it has been lent again already: its end is told all the same.
#[test]
fn a_stream_that_is_lent_again_ends_again() {
    each(|rig, resource| {
        if !resource.facts().stream_ordered {
            return;
        }
        let watched = Watched::new(rig, resource);
        let other = rig.stream();
        let flags = CUstream_flags_enum::CU_STREAM_NON_BLOCKING.0;
        let [(raw, handle), (next, next_handle)] = [(); 2].map(|()| streams::make(rig, flags));
        // SAFETY: alive until the values that borrow it are dropped.
        let lent = || unsafe { Stream::borrowed(&rig.device, handle) }.expect("lent");
        let first = lent();
        let kept = watched.allocate(BYTES, &first);
        drop(first);
        let second = lent();
        let held = watched.allocate(BYTES, &second);
        let at_its_place = watched.allocate(BYTES, next_handle);
        watched.free(held, &second);
        watched.free(kept, &second);
        drop(second);
        call!(rig.driver, cuStreamDestroy_v2(raw));
        // Who lacks memory asks about it.
        let all: Vec<_> = (0..8).map(|_| watched.allocate(BYTES, &other)).collect();
        all.into_iter().for_each(|held| watched.free(held, &other));
        watched.free(at_its_place, next_handle);
        watched.assert_intact();
        call!(rig.driver, cuStreamDestroy_v2(next));
    });
}

/// A capture on another stream of this thread goes on whatever the resource does; one on a stream that it
/// is called with is served without harm, or refused by name without harm.
#[test]
fn captures_are_left_alone() {
    each(|rig, resource| {
        let watched = Watched::new(rig, resource);
        let (working, other) = (rig.stream(), rig.stream());
        let kept: Vec<_> = (0..4).map(|_| watched.allocate(BYTES, &working)).collect();
        let (raw, _) = streams::make(rig, CUstream_flags_enum::CU_STREAM_NON_BLOCKING.0);
        streams::begin_capture(rig, raw);
        kept.into_iter().for_each(|held| watched.free(held, &working));
        let again = watched.allocate(2 * BYTES, &other);
        watched.free(again, &other);
        streams::end_capture(rig, raw);
        call!(rig.driver, cuStreamDestroy_v2(raw));
        watched.assert_intact();
    });
}

/// What a stream has waited for is nothing to the one that has its place when it has ended.
#[test]
fn a_stream_in_the_place_of_one_that_has_waited_waits_itself() {
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
            let [busy, first] = [(); 2].map(|()| rig.stream());
            let both = [(); 2].map(|()| watched.allocate(HALF, &busy));
            let stall = rig.stall(busy.handle());
            both.into_iter().for_each(|held| watched.free(held, &busy));
            // The event that it waits for is behind both.
            let one = watched.allocate(HALF, &first);
            drop(first);
            let second = rig.stream();
            let other = watched.allocate(HALF, &second);
            drop(stall);
            rig.device.synchronize().expect("all is done");
            watched.free(one, &second);
            watched.free(other, &second);
            watched.assert_intact();
        }
    });
}

/// Resources that keep books of streams, on a stream of another that captures.
#[test]
fn a_foreign_stream_that_captures_is_refused() {
    each(|rig, resource| {
        let own_books = ["pool", "fixed-size", "arena", "vpmm"];
        if !own_books.contains(&resource.describe().name()) {
            return;
        }
        let (raw, handle) = streams::make(rig, CUstream_flags_enum::CU_STREAM_NON_BLOCKING.0);
        let ptr = resource.allocate(1000, 256, handle).expect("memory");
        streams::begin_capture(rig, raw);
        let refused = resource.allocate(1000, 256, handle);
        assert!(matches!(refused, Err(Error::StreamCapturing)), "{refused:?}");
        let refused = resource.deallocate(ptr, 1000, 256, handle);
        assert!(matches!(refused, Err(Error::StreamCapturing)), "{refused:?}");
        streams::end_capture(rig, raw);
        resource.deallocate(ptr, 1000, 256, handle).expect("freed");
        call!(rig.driver, cuStreamDestroy_v2(raw));
    });
}

/// A stream of the library that captures is served from its own memory, no event gets into its graph, and
/// what it frees is others' only after the capture.
#[test]
fn a_stream_of_the_library_that_captures_is_served() {
    each(|rig, resource| {
        if !["pool", "fixed-size", "arena"].contains(&resource.describe().name()) {
            return;
        }
        let watched = Watched::new(rig, resource);
        let (capturing, other) = (rig.stream(), rig.stream());
        let before = watched.allocate(BYTES, &capturing);
        watched.free(before, &capturing);
        let raw = capturing.handle().raw();
        streams::begin_capture(rig, raw);
        let ptr = resource.allocate(BYTES, 256, capturing.handle()).expect("its own memory");
        resource.deallocate(ptr, BYTES, 256, capturing.handle()).expect("freed");
        for _ in 0..3 {
            let elsewhere = watched.allocate(BYTES, &other);
            assert_ne!(elsewhere.ptr.address(), ptr.address());
            watched.free(elsewhere, &other);
        }
        assert_eq!(streams::end_capture(rig, raw), 0, "nothing of the resource's is in the graph");
        watched.assert_intact();
    });
}

/// While a blocking stream captures nobody may use the legacy stream, nor can tell what it has done: requests
/// on other streams are served all the same, and the capture goes on.
#[test]
fn memory_of_the_legacy_stream_is_left_alone_beside_a_capture() {
    each(|rig, resource| {
        if !["pool", "fixed-size", "arena", "binning", "caching"]
            .contains(&resource.describe().name())
        {
            return;
        }
        let watched = Watched::new(rig, resource);
        let other = rig.stream();
        let most = resource.facts().max_bytes.unwrap_or(64 << 20).min(64 << 20);
        let warm = watched.allocate(BYTES, &other);
        watched.free(warm, &other);
        let held: Vec<_> = (0..4).map(|_| watched.allocate(BYTES, StreamHandle::LEGACY)).collect();
        held.into_iter().for_each(|held| watched.free(held, StreamHandle::LEGACY));
        let (raw, _) = streams::make(rig, 0);
        streams::begin_capture(rig, raw);
        // More than there is of its own.
        let all: Vec<_> = (0..6).map(|_| resource.allocate(most, 256, other.handle())).collect();
        assert_eq!(streams::end_capture(rig, raw), 0);
        for ptr in all {
            let ptr = ptr.expect("memory");
            resource.deallocate(ptr, most, 256, other.handle()).expect("freed");
        }
        call!(rig.driver, cuStreamDestroy_v2(raw));
        watched.assert_intact();
    });
}

/// A raw handle that comes again is another stream's: the arena of the one that had it before is given up.
#[test]
fn an_arena_has_no_part_for_a_stream_whose_handle_has_come_again() {
    for schedule in [Schedule::Eager, Schedule::Late { patience: 2 }] {
        let rig = Rig::simulated(schedule);
        let mut config = ArenaConfig::default();
        config.arena_bytes = Some(2 << 30);
        let arena = Arena::new(DeviceMalloc::new(&rig.device), &rig.device, &config).expect("one");
        let watched = Watched::new(&rig, &arena);
        let mut first = None;
        for _ in 0..200 {
            let (raw, foreign) = streams::make(&rig, CUstream_flags_enum::CU_STREAM_NON_BLOCKING.0);
            assert_eq!(
                *first.get_or_insert(raw),
                raw,
                "the simulator hands the last one out again"
            );
            let held = watched.allocate(1000, foreign);
            watched.free(held, foreign);
            call!(rig.driver, cuStreamSynchronize(raw));
            call!(rig.driver, cuStreamDestroy_v2(raw));
            assert!(arena.dump().streams() <= 2, "{}", arena.dump());
        }
        watched.assert_intact();
    }
}

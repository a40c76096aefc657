//! The map that the error carries.

use cuda_sys::types::CUstream;
use vpmm::{Error, Holder, StreamHandle, WaitPolicy};

use crate::rig::{GRANULE, LIMIT, Profile, SMALL};
use crate::support::{Rig, call};

/// The driver's number of a stream.
fn number(rig: &Rig, stream: CUstream) -> u64 {
    let mut number = 0;
    call!(rig.driver, cuCtxSetCurrent(rig.device.context()));
    call!(rig.driver, cuStreamGetId(stream, &mut number));
    number
}

#[test]
fn the_map_says_what_the_pool_says() {
    Rig::everywhere(|rig| {
        for profile in Profile::BOTH {
            // The driver's pool for small requests makes 32 MiB at a time.
            let limit = (LIMIT + 16) * GRANULE;
            let pool = profile.limited(&rig.device, Some(limit), WaitPolicy::default());
            let stream = rig.stream();
            let small = pool.malloc(SMALL as usize, &stream).unwrap();
            let mut held = Vec::new();
            let error = loop {
                match pool.malloc(GRANULE as usize, &stream) {
                    Ok(ptr) => held.push(ptr),
                    Err(error) => break error,
                }
            };
            assert!(held.len() as u64 >= LIMIT);
            let map = error.map().expect("a map");
            assert_eq!(map.stats, pool.stats());
            assert_eq!(map.layout, pool.layout());
            assert_eq!(map.requested_bytes, GRANULE);
            assert_eq!(map.limit_bytes, Some(limit));
            let Error::OutOfMemory { free_bytes, live_bytes, mapped_bytes, .. } = error else {
                panic!("{error}")
            };
            let stats = &map.stats;
            assert_eq!(free_bytes, stats.free_bytes());
            assert_eq!(live_bytes, stats.live_bytes + stats.small_live_bytes);
            assert_eq!(mapped_bytes, stats.mapped_bytes + stats.small_mapped_bytes);
            // One line for the error, and many for the map.
            assert_eq!(error.to_string().lines().count(), 1);
            let text = map.to_string();
            assert!(text.lines().count() > 4, "{text}");
            for part in ["at most 56 MiB", "asked for     2 MiB", "layout", "in use"] {
                assert!(text.contains(part), "{part} is missing in:\n{text}");
            }
            assert!(!format!("{error:?}").contains("pieces"));
            held.into_iter().chain([small]).for_each(|ptr| pool.free(ptr, &stream).unwrap());
        }
    });
}

/// What a thread has in front of its stream is nobody's: a request that nothing could serve leaves it
/// there, and its error tells it from what callers have.
#[test]
fn what_is_in_a_front_is_not_live() {
    Rig::everywhere(|rig| {
        for (profile, limit) in
            Profile::BOTH.into_iter().flat_map(|it| [(it, None), (it, Some(LIMIT * GRANULE))])
        {
            let stream = rig.stream();
            // Longer than any pool's addresses, than the device, and than the limit.
            for bytes in [3 << 40, 1 << 40, (LIMIT + 1) * GRANULE] {
                if limit.is_none() && bytes < 1 << 40 {
                    continue;
                }
                let pool = profile.limited(&rig.device, limit, WaitPolicy::default());
                let kept = pool.malloc(2 * GRANULE as usize, &stream).unwrap();
                let freed = pool.malloc(GRANULE as usize, &stream).unwrap();
                pool.free(freed, &stream).unwrap();
                let error = pool.malloc(bytes as usize, &stream).unwrap_err();
                let stats = error.map().expect("a map").stats.clone();
                let Error::OutOfMemory { free_bytes, live_bytes, mapped_bytes, .. } = error else {
                    panic!("{error}")
                };
                assert_eq!(live_bytes, 2 * GRANULE, "{profile:?}, {bytes} at {limit:?}");
                assert_eq!(stats.live_bytes, live_bytes);
                assert_eq!(free_bytes, stats.free_bytes() + stats.cached_bytes);
                assert_eq!(mapped_bytes, free_bytes + live_bytes);
                // Whoever looks into fronts keeps the account of what was in them.
                pool.reset_peaks();
                for granules in [1, 4] {
                    let ptr = pool.malloc((granules * GRANULE) as usize, &stream).unwrap();
                    let stats = pool.stats();
                    assert_eq!(stats.live_bytes, (2 + granules) * GRANULE);
                    assert_eq!(stats.peak_live_bytes, stats.live_bytes, "{profile:?}, {limit:?}");
                    pool.free(ptr, &stream).unwrap();
                }
                pool.free(kept, &stream).unwrap();
            }
        }
    });
}

/// The largest free pieces, and who may have them.
#[test]
fn the_map_names_who_holds_what_is_free() {
    Rig::everywhere(|rig| {
        for profile in Profile::BOTH {
            let pool = profile.tight(&rig.device);
            let (one, two) = (rig.stream(), rig.stream());
            let held: Vec<_> = (0..LIMIT)
                .map(|at| {
                    let on = if at < 6 { &one } else { &two };
                    pool.malloc(GRANULE as usize, on).unwrap()
                })
                .collect();
            for (at, on) in [(0, &one), (1, &one), (7, &two), (3, &one)] {
                pool.free(held[at], on).unwrap();
            }
            // More than is free, and less than the limit.
            let error = pool.malloc(5 * GRANULE as usize, &one).unwrap_err();
            let map = error.map().expect("a map");
            let total: u64 = map.largest_free.iter().map(|piece| piece.bytes).sum();
            assert_eq!(total, 4 * GRANULE, "{map}");
            assert_eq!(total, map.stats.free_bytes());
            assert!(map.largest_free.is_sorted_by(|a, b| a.bytes >= b.bytes), "{map}");
            let known = [&one, &two].map(|stream| number(rig, stream.handle().raw()));
            for piece in &map.largest_free {
                match piece.holder {
                    Holder::Everybody => {}
                    Holder::Stream(stream) => assert!(known.contains(&stream), "{map}"),
                    other => panic!("{other}"),
                }
            }
            for (at, ptr) in held.into_iter().enumerate() {
                if ![0, 1, 7, 3].contains(&at) {
                    pool.free(ptr, if at < 6 { &one } else { &two }).unwrap();
                }
            }
        }
    });
}

/// What a busy stream has freed is that stream's in the map.
#[test]
fn a_busy_stream_is_named() {
    Rig::everywhere(|rig| {
        for (profile, stream) in Profile::BOTH
            .into_iter()
            .flat_map(|profile| [(profile, Some(rig.stream())), (profile, None)])
        {
            let pool = profile.limited(&rig.device, Some(LIMIT * GRANULE), WaitPolicy::FailAtOnce);
            let handle = stream.as_ref().map_or(StreamHandle::LEGACY, StreamHandle::from);
            let ptr = pool.malloc(4 * GRANULE as usize, handle).unwrap();
            let rest = pool.malloc(8 * GRANULE as usize, handle).unwrap();
            let stall = rig.stall(handle);
            pool.free(ptr, handle).unwrap();
            let error = pool.malloc(5 * GRANULE as usize, handle).unwrap_err();
            let map = error.map().expect("a map");
            assert_eq!(map.largest_free.len(), 1, "{map}");
            let piece = map.largest_free[0];
            assert_eq!((piece.start, piece.bytes), (ptr.address(), 4 * GRANULE));
            let expected = match (&stream, profile) {
                (Some(stream), _) => Holder::Stream(number(rig, stream.handle().raw())),
                (None, Profile::Default) => Holder::LegacyStream,
                (None, Profile::Paged) => Holder::Stream(number(rig, handle.raw())),
            };
            assert_eq!(piece.holder, expected, "{map}");
            assert!(map.to_string().contains(&format!("{:#x}", ptr.address())), "{map}");
            drop(stall);
            pool.free(rest, handle).unwrap();
        }
    });
}

/// So is what it has freed while it has yet to come to its end.
#[test]
fn a_stream_that_has_ended_is_named_while_its_work_goes_on() {
    Rig::everywhere(|rig| {
        for profile in Profile::BOTH {
            let pool = profile.limited(&rig.device, Some(LIMIT * GRANULE), WaitPolicy::FailAtOnce);
            let (ending, other) = (rig.stream(), rig.stream());
            let ptr = pool.malloc(4 * GRANULE as usize, &ending).unwrap();
            let rest = pool.malloc(8 * GRANULE as usize, &other).unwrap();
            let stall = rig.stall(ending.handle());
            pool.free(ptr, &ending).unwrap();
            let ended = Holder::Stream(number(rig, ending.handle().raw()));
            drop(ending);
            let error = pool.malloc(5 * GRANULE as usize, &other).unwrap_err();
            let map = error.map().expect("a map");
            let holders: Vec<_> = map.largest_free.iter().map(|piece| piece.holder).collect();
            assert_eq!(holders, [ended], "{profile:?}: {map}");
            drop(stall);
            pool.free(rest, &other).unwrap();
        }
    });
}

/// What was freed and is still used on another stream is nobody's to have.
#[test]
fn what_another_stream_uses_has_no_holder() {
    Rig::everywhere(|rig| {
        for profile in Profile::BOTH {
            let pool = profile.limited(&rig.device, Some(LIMIT * GRANULE), WaitPolicy::FailAtOnce);
            let (stream, user) = (rig.stream(), rig.stream());
            let [used, free, rest] = [4, 2, 6]
                .map(|granules| pool.malloc((granules * GRANULE) as usize, &stream).unwrap());
            let stall = rig.stall(user.handle());
            pool.record_stream(used, &user).unwrap();
            [used, free].into_iter().for_each(|ptr| pool.free(ptr, &stream).unwrap());
            let error = pool.malloc(5 * GRANULE as usize, &stream).unwrap_err();
            let map = error.map().expect("a map");
            let pieces: Vec<_> =
                map.largest_free.iter().map(|piece| (piece.start, piece.bytes)).collect();
            assert_eq!(pieces, [(free.address(), 2 * GRANULE)], "{map}");
            // Nor is it in what the error and the map's lines call free for somebody.
            assert_eq!(map.stats.pending_bytes + map.stats.idle_bytes, 6 * GRANULE, "{map}");
            assert_eq!(map.stats.deferred_bytes, 4 * GRANULE, "{map}");
            let text = map.to_string();
            assert!(text.contains("deferred    8 MiB, freed, and still used"), "{text}");
            assert!(!text.contains("12 MiB, free"), "{text}");
            let Error::OutOfMemory { largest_free_bytes, .. } = error else { panic!("{error}") };
            assert_eq!(largest_free_bytes, 2 * GRANULE, "{profile:?}");
            drop(stall);
            rig.device.synchronize().unwrap();
            let all = pool.malloc(6 * GRANULE as usize, &stream).unwrap();
            assert_eq!(pool.stats().deferred_bytes, 0);
            pool.free(all, &stream).unwrap();
            pool.free(rest, &stream).unwrap();
        }
    });
}

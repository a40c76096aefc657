//! How much a pool holds: trimming, the release threshold, peaks.

use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::CUresult;
use vpmm::{Sharing, Stream};

use crate::rig::{BLOCK, GRANULE, MIB, Profile, Settings};
use crate::support::{Held, Rig, Watched, call};

/// Trims, and holds the answer against what the device has more.
fn trim(watched: &Watched<'_>, keep_bytes: u64) -> u64 {
    let device = &watched.rig.device;
    let (free, held) = (device.free_memory().unwrap(), watched.mapped());
    let gone = watched.pool.trim_to(keep_bytes).unwrap();
    watched.validate();
    assert_eq!(device.free_memory().unwrap() - free, gone, "as the device counts");
    assert_eq!(held - watched.mapped(), gone, "as the pool counts");
    gone
}

/// Memory of several sizes, every other piece of it free.
fn scattered(watched: &Watched<'_>, stream: &Stream) -> Vec<Held> {
    let sizes = [BLOCK, GRANULE, 3 * GRANULE, 700, 2 * BLOCK, 2 * GRANULE, 64 << 10, BLOCK];
    let mut held: Vec<_> = sizes.iter().map(|bytes| watched.malloc(*bytes, stream)).collect();
    for index in [7, 5, 3, 1] {
        watched.free(held.remove(index), stream);
    }
    held
}

#[test]
fn everything_free_goes_back_and_is_made_again() {
    Rig::each(|rig, profile| {
        let watched = rig.pool(profile);
        let stream = rig.stream();
        for _ in 0..2 {
            let held = scattered(&watched, &stream);
            stream.synchronize().unwrap();
            assert!(trim(&watched, 0) >= BLOCK, "{}", watched.layout());
            for held in held {
                watched.free(held, &stream);
            }
            stream.synchronize().unwrap();
            assert!(trim(&watched, 0) >= 3 * BLOCK);
            assert_eq!(watched.mapped(), 0, "{}", watched.layout());
        }
        watched.assert_intact();
    });
}

#[test]
fn a_trim_stops_where_it_is_told_to() {
    Rig::each(|rig, profile| {
        let watched = rig.pool(profile);
        let stream = rig.stream();
        // Handles of many lengths, in either profile.
        let held: Vec<_> =
            (1..10).map(|granules| watched.malloc(granules * GRANULE, &stream)).collect();
        held.into_iter().for_each(|held| watched.free(held, &stream));
        stream.synchronize().unwrap();
        let mut keep = watched.mapped();
        assert_eq!(trim(&watched, keep), 0, "nothing is above it");
        assert_eq!(trim(&watched, u64::MAX), 0, "a trim to more than is there");
        while keep > 0 {
            keep = keep.saturating_sub(7 * GRANULE);
            trim(&watched, keep);
            assert!(watched.mapped() <= keep, "{} of {keep}", watched.mapped());
            if profile == Profile::Paged {
                assert_eq!(watched.mapped(), keep, "page by page");
            }
        }
        watched.assert_intact();
    });
}

/// The driver has memory for small requests in pieces, and gives none back with which less would be kept than it is
/// told to.
#[test]
fn a_trim_gives_back_what_small_requests_had_by_the_piece() {
    Rig::everywhere(|rig| {
        let stream = rig.stream();
        for threshold in [None, Some(MIB)] {
            let settings = Settings { release_threshold_bytes: threshold, ..Settings::default() };
            let watched = rig.pool_with(Profile::Paged, &settings);
            let (small, large) = (watched.malloc(700, &stream), watched.malloc(BLOCK, &stream));
            let kept = watched.malloc(GRANULE, &stream);
            watched.free(small, &stream);
            watched.free(large, &stream);
            stream.synchronize().unwrap();
            if threshold.is_none() {
                let of_small = watched.pool.stats().small_mapped_bytes;
                assert!(of_small > GRANULE + MIB, "{of_small}");
                assert_eq!(trim(&watched, GRANULE + MIB), BLOCK + of_small);
            }
            assert_eq!(watched.mapped(), GRANULE, "{threshold:?}");
            watched.free(kept, &stream);
            watched.assert_intact();
        }
    });
}

#[test]
fn what_the_gpu_may_still_use_is_kept_and_not_waited_for() {
    Rig::each(|rig, profile| {
        let watched = rig.pool(profile);
        let (busy, other) = (rig.stream(), rig.stream());
        let held = [(); 2].map(|()| watched.malloc(BLOCK, &busy));
        let of_other = watched.malloc(BLOCK, &other);
        let stall = rig.stall(busy.handle());
        watched.free(held[0], &busy);
        watched.free(of_other, &other);
        call!(rig.driver, cuStreamSynchronize(other.handle().raw()));
        assert_eq!(trim(&watched, 0), BLOCK, "the other stream's, found by a question");
        assert_eq!(trim(&watched, 0), 0, "returns, though the stream is busy");
        drop(stall);
        watched.free(held[1], &busy);
        busy.synchronize().unwrap();
        assert_eq!(trim(&watched, 0), 2 * BLOCK);
        watched.assert_intact();
    });
}

#[test]
fn memory_at_two_addresses_is_kept_until_it_is_at_one() {
    Rig::each(|rig, profile| {
        let settings = Settings { limit_bytes: Some(4 * BLOCK), ..Settings::default() };
        let watched = rig.pool_with(profile, &settings);
        let (busy, other) = (rig.stream(), rig.stream());
        let held = [(); 4].map(|()| watched.malloc(BLOCK, &busy));
        let stall = rig.stall(busy.handle());
        watched.free(held[0], &busy);
        watched.free(held[2], &busy);
        // Brought together at the limit; the former addresses wait for the busy stream.
        let moved = watched.malloc(2 * BLOCK, &busy);
        let zombies = watched.pool.stats().zombie_bytes;
        assert!(zombies >= BLOCK, "{}", watched.layout());
        watched.look_from(&moved, &busy, &other);
        watched.free(moved, &busy);
        trim(&watched, 0);
        drop(stall);
        for held in [held[1], held[3]] {
            watched.free(held, &busy);
        }
        busy.synchronize().unwrap();
        other.synchronize().unwrap();
        trim(&watched, 0);
        assert_eq!((watched.mapped(), watched.pool.stats().zombie_bytes), (0, 0));
        watched.assert_intact();
    });
}

#[test]
fn exported_memory_stays() {
    Rig::each(|rig, profile| {
        let settings = Settings { sharing: Sharing::FileDescriptor, ..Settings::default() };
        let watched = rig.pool_with(profile, &settings);
        let stream = rig.stream();
        let (shared, own) = (watched.malloc(BLOCK, &stream), watched.malloc(BLOCK, &stream));
        drop(watched.pool.export(shared.ptr).unwrap());
        let exported = watched.pool.stats().exported_bytes;
        assert!(exported >= BLOCK);
        watched.free(shared, &stream);
        watched.free(own, &stream);
        stream.synchronize().unwrap();
        assert_eq!(trim(&watched, 0), 2 * BLOCK - exported);
        assert_eq!(watched.mapped(), exported);
        watched.assert_intact();
    });
}

#[test]
fn a_trim_may_have_what_a_question_may_not_give_away() {
    Rig::each(|rig, profile| {
        let mut settings = Settings::default();
        settings.reuse.opportunistic = false;
        let watched = rig.pool_with(profile, &settings);
        let (a, b) = (rig.stream(), rig.stream());
        let held = [(); 2].map(|()| watched.malloc(BLOCK, &a));
        held.into_iter().for_each(|held| watched.free(held, &a));
        call!(rig.driver, cuStreamSynchronize(a.handle().raw()));
        assert_eq!(trim(&watched, BLOCK), BLOCK);
        // What is left is still the first stream's.
        let other = watched.malloc(BLOCK, &b);
        assert_eq!(watched.mapped(), 2 * BLOCK, "{}", watched.layout());
        let own = watched.malloc(BLOCK, &a);
        assert_eq!(watched.mapped(), 2 * BLOCK, "{}", watched.layout());
        watched.free(other, &b);
        watched.free(own, &a);
        watched.assert_intact();
    });
}

/// Frees two blocks and waits for them by `wait`: what the pool holds then.
fn held_after(
    rig: &Rig,
    profile: Profile,
    threshold: Option<u64>,
    wait: impl FnOnce(&Watched<'_>, &Stream),
) -> u64 {
    let settings = Settings { release_threshold_bytes: threshold, ..Settings::default() };
    let watched = rig.pool_with(profile, &settings);
    let stream = rig.stream();
    let held = [(); 2].map(|()| watched.malloc(BLOCK, &stream));
    held.into_iter().for_each(|held| watched.free(held, &stream));
    assert_eq!(watched.mapped(), 2 * BLOCK, "nothing goes before the host has waited");
    wait(&watched, &stream);
    let mapped = watched.mapped();
    watched.assert_intact();
    mapped
}

#[test]
fn what_is_above_the_threshold_goes_when_the_host_has_waited() {
    Rig::each(|rig, profile| {
        let waits: [fn(&Watched<'_>, &Stream); 3] = [
            |_, stream| stream.synchronize().unwrap(),
            |_, stream| stream.device().synchronize().unwrap(),
            |watched, stream| {
                let mark = watched.pool.mark(stream).unwrap();
                call!(watched.rig.driver, cuStreamSynchronize(stream.handle().raw()));
                watched.pool.passed(&mark).unwrap();
            },
        ];
        for wait in waits {
            assert_eq!(held_after(rig, profile, None, wait), 2 * BLOCK, "everything is kept");
            assert_eq!(held_after(rig, profile, Some(0), wait), 0);
            let kept = held_after(rig, profile, Some(BLOCK + MIB), wait);
            assert!((GRANULE..=BLOCK + MIB).contains(&kept), "{kept}");
            assert_eq!(held_after(rig, profile, Some(2 * BLOCK), wait), 2 * BLOCK);
        }
        // A wait that the pool is not told of changes nothing.
        let untold = held_after(rig, profile, Some(0), |watched, _| {
            call!(watched.rig.driver, cuCtxSynchronize());
        });
        assert_eq!(untold, 2 * BLOCK);
    });
}

#[test]
fn a_threshold_is_of_no_concern_to_what_is_in_use() {
    Rig::each(|rig, profile| {
        let settings = Settings { release_threshold_bytes: Some(0), ..Settings::default() };
        let watched = rig.pool_with(profile, &settings);
        let (stream, busy) = (rig.stream(), rig.stream());
        let held = [(); 2].map(|()| watched.malloc(BLOCK, &stream));
        let of_busy = watched.malloc(BLOCK, &busy);
        let stall = rig.stall(busy.handle());
        watched.free(of_busy, &busy);
        watched.free(held[0], &stream);
        stream.synchronize().unwrap();
        assert_eq!(watched.mapped(), 2 * BLOCK, "one in use, one that may be");
        drop(stall);
        watched.free(held[1], &stream);
        watched.assert_intact();
    });
}

#[test]
fn peaks_are_the_most_since_they_were_reset() {
    Rig::each(|rig, profile| {
        let watched = rig.pool(profile);
        let stream = rig.stream();
        let peaks = || {
            let stats = watched.pool.stats();
            (stats.peak_live_bytes, stats.peak_mapped_bytes)
        };
        assert_eq!(peaks(), (0, 0));
        let held = [(); 3].map(|()| watched.malloc(BLOCK, &stream));
        assert_eq!(peaks(), (3 * BLOCK, 3 * BLOCK));
        held[1..].iter().for_each(|held| watched.free(*held, &stream));
        stream.synchronize().unwrap();
        assert_eq!(peaks(), (3 * BLOCK, 3 * BLOCK));
        watched.pool.reset_peaks();
        assert_eq!(peaks(), (BLOCK, 3 * BLOCK), "what is in use and what is held now");
        watched.pool.trim_to(0).unwrap();
        watched.pool.reset_peaks();
        assert_eq!(peaks(), (BLOCK, BLOCK));
        let more = watched.malloc(BLOCK, &stream);
        assert_eq!(peaks(), (2 * BLOCK, 2 * BLOCK));
        watched.free(more, &stream);
        watched.free(held[0], &stream);
        watched.assert_intact();
    });
}

/// What is free in front of one stream no longer is when it has gone out again, though nobody has asked that
/// front since.
#[test]
fn peaks_count_what_has_gone_out_of_a_front() {
    Rig::each(|rig, profile| {
        let watched = rig.pool(profile);
        let (first, second) = (rig.stream(), rig.stream());
        let held = watched.malloc(BLOCK, &first);
        watched.free(held, &first);
        watched.pool.reset_peaks();
        let held = watched.malloc(BLOCK, &first);
        watched.pool.reset_peaks();
        let more = watched.malloc(2 * BLOCK, &second);
        watched.free(more, &second);
        assert_eq!(watched.pool.stats().peak_live_bytes, 3 * BLOCK);
        watched.free(held, &first);
        watched.assert_intact();
    });
}

#[test]
fn small_requests_leave_nothing_at_the_limit() {
    Rig::each(|rig, profile| {
        let settings = Settings { limit_bytes: Some(2 * BLOCK), ..Settings::default() };
        let watched = rig.pool_with(profile, &settings);
        let stream = rig.stream();
        let small = [(); 3].map(|()| watched.malloc(MIB, &stream));
        small.into_iter().for_each(|held| watched.free(held, &stream));
        stream.synchronize().unwrap();
        // All of the limit: what the small ones took has to go.
        let whole = watched.malloc(2 * BLOCK, &stream);
        watched.free(whole, &stream);
        watched.assert_intact();
    });
}

/// Nor do those whose memory waited for further streams, as soon as these have come past it.
#[test]
fn small_requests_with_further_uses_leave_nothing_at_the_limit() {
    Rig::each(|rig, profile| {
        let settings = Settings { limit_bytes: Some(2 * BLOCK), ..Settings::default() };
        let watched = rig.pool_with(profile, &settings);
        let (own, side, other) = (rig.stream(), rig.stream(), rig.stream());
        for synchronizes in [true, false] {
            for _ in 0..3 {
                let held = watched.malloc(MIB, &own);
                watched.look_from(&held, &own, &side);
                watched.free(held, &own);
            }
            match synchronizes {
                true => rig.device.synchronize().unwrap(),
                // Which the pool is not told of.
                false => call!(rig.driver, cuCtxSynchronize()),
            }
            let held = watched.malloc(2 * BLOCK, &other);
            watched.free(held, &other);
            watched.pool.trim_to(0).unwrap();
        }
        watched.assert_intact();
    });
}

#[test]
fn the_peak_of_small_requests_is_reset_too() {
    Rig::everywhere(|rig| {
        let watched = rig.pool(Profile::Paged);
        let stream = rig.stream();
        let held = watched.malloc(MIB, &stream);
        let peak = watched.pool.stats().peak_small_mapped_bytes;
        assert!(peak >= MIB);
        watched.free(held, &stream);
        stream.synchronize().unwrap();
        assert_eq!(watched.pool.trim_to(0).unwrap(), peak, "all that was held for them");
        assert_eq!(watched.pool.stats().peak_small_mapped_bytes, peak);
        watched.pool.reset_peaks();
        let stats = watched.pool.stats();
        assert_eq!((stats.peak_small_mapped_bytes, stats.small_mapped_bytes), (0, 0));
        watched.assert_intact();
    });
}

#[test]
fn a_trim_that_fails_half_way_has_given_back_what_it_did() {
    for profile in Profile::TESTED {
        for call in ["cuMemUnmap", "cuMemRelease"] {
            let failures = (1..).take_while(|n| trim_fails_at(*profile, call, *n)).count();
            // The default profile tries to release a handle twice.
            let tolerated = *profile == Profile::Default && call == "cuMemRelease";
            assert!(failures > 1 || tolerated, "{call}: only {failures} faults were met");
        }
    }
}

#[test]
fn a_zombie_that_cannot_be_unmapped_keeps_its_pages() {
    for profile in Profile::TESTED {
        let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
        let rig = Rig::on(sim.clone());
        let settings = Settings { limit_bytes: Some(4 * BLOCK), ..Settings::default() };
        let watched = rig.pool_with(*profile, &settings);
        let stream = rig.stream();
        let held = [(); 4].map(|()| watched.malloc(BLOCK, &stream));
        watched.free(held[0], &stream);
        watched.free(held[2], &stream);
        let moved = watched.malloc(2 * BLOCK, &stream);
        watched.free(moved, &stream);
        stream.synchronize().unwrap();
        assert!(watched.pool.stats().zombie_bytes >= BLOCK, "{}", watched.layout());
        sim.fail_nth("cuMemUnmap", 1, CUresult::CUDA_ERROR_UNKNOWN);
        let gone = trim(&watched, 0);
        assert!(gone < 2 * BLOCK, "some of it is still at a second address");
        assert_eq!(trim(&watched, 0), 2 * BLOCK - gone);
        [held[1], held[3]].into_iter().for_each(|held| watched.free(held, &stream));
        watched.assert_intact();
    }
}

/// Trims with the n-th of a driver function's calls failing; whether there was one.
fn trim_fails_at(profile: Profile, call: &str, n: u64) -> bool {
    let sim = Simulator::builder().schedule(Schedule::Eager).build().unwrap();
    let rig = Rig::on(sim.clone());
    let watched = rig.pool(profile);
    let stream = rig.stream();
    let held = scattered(&watched, &stream);
    stream.synchronize().unwrap();
    let before = (watched.mapped(), watched.pool.stats().live_bytes);
    sim.fail_nth(call, n, CUresult::CUDA_ERROR_UNKNOWN);
    let failed = watched.pool.trim_to(0);
    sim.clear_faults();
    watched.validate();
    let after = (watched.mapped(), watched.pool.stats().live_bytes);
    assert!(after.0 <= before.0 && after.1 == before.1);
    if let Err(error) = &failed {
        let named = matches!(error, vpmm::Error::Driver { call: named, .. } if *named == call);
        assert!(named, "{error}");
        // Asked again, the driver does it, and nothing is lost.
        watched.pool.trim_to(0).unwrap();
    }
    held.into_iter().for_each(|held| watched.free(held, &stream));
    stream.synchronize().unwrap();
    watched.pool.trim_to(0).unwrap();
    assert_eq!((watched.mapped(), sim.report().leaks.handles), (0, 0));
    watched.assert_intact();
    failed.is_err()
}

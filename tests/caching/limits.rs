//! Running out of memory: what is given back before a request is given up, and in which order.

use cuda_sim::Simulator;
use vpmm::Error;

use crate::rig::MIB;
use crate::support::{Rig, call};

/// A setting that lets so many MiB be held on this device.
fn fraction(rig: &Rig, mib: u64) -> String {
    let total = rig.device.total_memory().unwrap();
    // Half a MiB more, since a fraction has only so many digits.
    let fraction = (mib * MIB + MIB / 2) as f64 / total as f64;
    format!("per_process_memory_fraction:{fraction:.17}")
}

#[test]
fn at_the_limit_everything_free_goes_back_and_the_request_is_tried_again() {
    Rig::everywhere(|rig| {
        let (cached, stream) = (rig.cached_with(&fraction(rig, 100)), rig.stream());
        assert_eq!(cached.allocator.limit_bytes().map(|bytes| bytes / MIB), Some(100));
        let held = [40, 30, 30].map(|mib| cached.malloc(mib * MIB, &stream));
        cached.free(held[1], &stream);
        cached.free(held[2], &stream);
        // 60 MiB are free, in two pieces.
        let large = cached.malloc(60 * MIB, &stream);
        let stats = cached.allocator.stats();
        assert_eq!((stats.num_alloc_retries, stats.num_ooms), (1, 0));
        assert_eq!((stats.num_device_free, cached.reserved()), (2, 100 * MIB));
        let error = cached.try_malloc(11 * MIB, &stream).unwrap_err();
        match error {
            Error::OutOfMemory {
                requested_bytes, mapped_bytes, live_bytes, limit_bytes, ..
            } => {
                assert_eq!((requested_bytes, mapped_bytes), (11 * MIB, 100 * MIB));
                assert_eq!((live_bytes, limit_bytes), (100 * MIB, cached.allocator.limit_bytes()));
            }
            error => panic!("{error}"),
        }
        let stats = cached.allocator.stats();
        assert_eq!((stats.num_alloc_retries, stats.num_ooms), (2, 1));
        // And all is as it was.
        cached.free(large, &stream);
        let again = cached.malloc(60 * MIB, &stream);
        assert_eq!(cached.reserved(), 100 * MIB);
        cached.free(again, &stream);
        cached.free(held[0], &stream);
        cached.assert_intact();
    });
}

#[test]
fn the_devices_own_refusal_is_met_in_the_same_way() {
    let sim = Simulator::builder().memory_bytes(128 << 20).build().unwrap();
    let rig = Rig::on(sim);
    let (cached, stream) = (rig.cached(), rig.stream());
    let first = cached.malloc(60 * MIB, &stream);
    cached.free(first, &stream);
    let second = cached.malloc(100 * MIB, &stream);
    assert_eq!(cached.allocator.stats().num_alloc_retries, 1);
    let error = cached.try_malloc(60 * MIB, &stream).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { limit_bytes: None, .. }), "{error}");
    cached.free(second, &stream);
    cached.assert_intact();
}

#[test]
fn a_request_waits_for_further_streams_before_it_is_given_up() {
    Rig::everywhere(|rig| {
        let (cached, own) = (rig.cached_with(&fraction(rig, 64)), rig.stream());
        let side = rig.stream();
        let held = cached.malloc(64 * MIB, &own);
        let stall = rig.stall(side.handle());
        cached.look_from(&held, &own, &side);
        cached.free(held, &own);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(std::time::Duration::from_millis(20));
                drop(stall);
            });
            let again = cached.malloc(50 * MIB, &own);
            assert_eq!(again.address(), held.address(), "found whole, and not given back");
            assert_eq!(cached.allocator.stats().num_device_free, 0);
            cached.free(again, &own);
        });
        assert_eq!(cached.allocator.stats().num_sync_all_streams, 1);
        cached.assert_intact();
    });
}

#[test]
fn memory_of_other_streams_goes_back_for_a_request() {
    Rig::everywhere(|rig| {
        let (cached, own) = (rig.cached_with(&fraction(rig, 64)), rig.stream());
        let other = rig.stream();
        let held = cached.malloc(64 * MIB, &other);
        let stall = rig.stall(other.handle());
        cached.free(held, &other);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(std::time::Duration::from_millis(20));
                drop(stall);
            });
            // The driver waits for the device before the memory goes back.
            let again = cached.malloc(64 * MIB, &own);
            cached.free(again, &own);
        });
        cached.assert_intact();
    });
}

#[test]
fn oversize_blocks_go_back_first_and_no_more_than_is_needed() {
    Rig::everywhere(|rig| {
        let settings = format!("max_split_size_mb:32,{}", fraction(rig, 260));
        let (cached, stream) = (rig.cached_with(&settings), rig.stream());
        let held = [40, 60, 80, 20].map(|mib| cached.malloc(mib * MIB, &stream));
        held.into_iter().for_each(|held| cached.free(held, &stream));
        assert_eq!(cached.reserved(), 200 * MIB);
        // None is within 20 MiB of it; the longest two are enough.
        let large = cached.malloc(120 * MIB, &stream);
        let stats = cached.allocator.stats();
        assert_eq!((stats.num_device_free, stats.num_alloc_retries), (2, 0));
        assert_eq!(cached.reserved(), (40 + 20 + 120) * MIB);
        cached.free(large, &stream);
        // One that is long enough by itself.
        let large = cached.malloc(90 * MIB, &stream);
        assert_eq!(cached.allocator.stats().num_device_free, 3);
        assert_eq!(cached.reserved(), (40 + 20 + 90) * MIB);
        cached.free(large, &stream);
        cached.assert_intact();
    });
}

#[test]
fn garbage_goes_back_by_age_where_more_is_held_than_the_threshold() {
    Rig::everywhere(|rig| {
        let settings = format!("garbage_collection_threshold:0.5,{}", fraction(rig, 200));
        let (cached, stream) = (rig.cached_with(&settings), rig.stream());
        let old = [(); 2].map(|()| cached.malloc(32 * MIB, &stream));
        old.into_iter().for_each(|held| cached.free(held, &stream));
        let kept = cached.malloc(24 * MIB, &stream); // out of one of them
        let small = cached.malloc(100, &stream);
        cached.free(small, &stream);
        let recent = cached.malloc(40 * MIB, &stream);
        for _ in 0..20 {
            // Found in the pool each time: the others grow older by a search.
            let again = cached.malloc(5 * MIB, &stream);
            cached.free(again, &stream);
        }
        cached.free(recent, &stream);
        assert_eq!(cached.reserved(), 106 * MIB);
        // More than 100 MiB: 6 MiB are too many, and the whole block that is old goes.
        let next = cached.malloc(60 * MIB, &stream);
        let stats = cached.allocator.stats();
        assert_eq!((stats.num_device_free, stats.num_alloc_retries), (1, 0));
        assert_eq!(cached.reserved(), (106 - 32 + 60) * MIB, "of 32, 40 and the one in use");
        let again = cached.malloc(40 * MIB, &stream);
        assert_eq!(again.address(), recent.address(), "what was used last is there");
        [next, again, kept].into_iter().for_each(|held| cached.free(held, &stream));
        cached.assert_intact();
    });
}

#[test]
fn below_the_threshold_nothing_is_collected() {
    Rig::everywhere(|rig| {
        let settings = format!("garbage_collection_threshold:0.9,{}", fraction(rig, 200));
        let (cached, stream) = (rig.cached_with(&settings), rig.stream());
        for mib in [20, 30, 40, 50] {
            let held = cached.malloc(mib * MIB, &stream);
            cached.free(held, &stream);
        }
        assert_eq!(cached.allocator.stats().num_device_free, 0);
        cached.assert_intact();
    });
}

#[test]
fn a_fraction_set_later_counts_from_then_on() {
    Rig::everywhere(|rig| {
        let (cached, stream) = (rig.cached(), rig.stream());
        assert_eq!(cached.allocator.limit_bytes(), None);
        let held = cached.malloc(64 * MIB, &stream);
        cached.allocator.set_memory_fraction(0.0).unwrap();
        assert!(cached.try_malloc(12 * MIB, &stream).unwrap_err().is_out_of_memory());
        cached.free(held, &stream);
        let again = cached.malloc(64 * MIB, &stream);
        cached.free(again, &stream);
        cached.allocator.empty_cache().unwrap();
        assert!(cached.try_malloc(1, &stream).is_err());
        cached.allocator.set_memory_fraction(1.0).unwrap();
        let held = cached.malloc(1, &stream);
        cached.free(held, &stream);
        cached.assert_intact();
        call!(rig.driver, cuCtxSynchronize());
    });
}

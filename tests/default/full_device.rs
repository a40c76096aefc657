//! On a device of which others have nearly all.

use std::time::Instant;

use cuda_sim::Simulator;
use cuda_sys::types::CUdeviceptr;

use crate::rig::{GRANULE, KIB, bare, config};
use crate::support::{Rig, Watched, call};

/// A pool without a limit, on a device of which others have so much that this many granules are left; the test gives
/// theirs back.
fn on_a_device_with(left: u64, test: impl Fn(&Watched<'_>, CUdeviceptr)) {
    let run = |rig: &Rig| {
        call!(rig.driver, cuCtxSetCurrent(rig.device.context()));
        let mut others = 0;
        let bytes = rig.device.free_memory().unwrap() - left * GRANULE;
        call!(rig.driver, cuMemAlloc_v2(&mut others, bytes as usize));
        let mut config = config(1, 2048);
        config.limit_bytes = None;
        let watched = rig.pool(&config);
        test(&watched, others);
        watched.assert_intact();
    };
    let sim = Simulator::builder().memory_bytes(1000 * GRANULE).build().unwrap();
    run(&Rig::on(sim));
    Rig::gpu().iter().for_each(run);
}

/// Of what is free a five hundredth of the pool is no reason to move it, nor are small blocks' granules for large
/// ones: as long as there is more.
#[test]
fn what_a_full_device_has_left_and_what_is_free_serve_a_request_together() {
    on_a_device_with(500, |watched, others| {
        let stream = watched.rig.stream();
        let [little, much] = [1, 490].map(|granules| watched.malloc(granules * GRANULE, &stream));
        watched.free(little, &stream);
        // A GPU may give away less than it says to have.
        let most = (1..=10).rev();
        let together = most.map(|granules| watched.try_malloc(granules * GRANULE, &stream));
        let together = together.filter_map(Result::ok).next().expect("a block");
        assert_eq!(watched.pool.stats().free_bytes(), 0);
        let refused = watched.try_malloc(GRANULE, &stream);
        assert!(refused.is_err_and(|error| error.is_out_of_memory()));
        call!(watched.rig.driver, cuMemFree_v2(others));
        let again = watched.malloc(GRANULE, &stream);
        [much, together, again].into_iter().for_each(|held| watched.free(held, &stream));
    });
    on_a_device_with(30, |watched, others| {
        let stream = watched.rig.stream();
        let small = watched.malloc(512, &stream);
        watched.free(small, &stream);
        let most = (1..=30).rev();
        let all = most.map(|granules| watched.try_malloc(granules * GRANULE, &stream));
        let all = all.filter_map(Result::ok).next().expect("a block");
        assert_eq!(watched.pool.stats().free_bytes(), 0);
        watched.free(all, &stream);
        call!(watched.rig.driver, cuMemFree_v2(others));
    });
}

#[test]
fn a_full_device_is_not_asked_at_every_request() {
    on_a_device_with(40, |watched, others| {
        let stream = watched.rig.stream();
        // A GPU may give away less than it says to have.
        let mut held: Vec<_> =
            (0..8).map_while(|_| watched.try_malloc(5 * GRANULE, &stream).ok()).collect();
        assert!(held.len() >= 7);
        let driver = &watched.rig.driver;
        let asked =
            || driver.calls().iter().find(|call| call.0 == "cuMemCreate").map_or(0, |c| c.1);
        let before = asked();
        for round in 0..20 {
            // Two that lie apart come together, and go apart again.
            watched.free(held.remove(round % 4), &stream);
            watched.free(held.remove(round % 4 + 1), &stream);
            let two = watched.malloc(10 * GRANULE, &stream);
            watched.free(two, &stream);
            held.extend([(); 2].map(|()| watched.malloc(5 * GRANULE, &stream)));
        }
        assert!(asked() - before <= 8, "asked {} times", asked() - before);
        call!(watched.rig.driver, cuMemFree_v2(others));
        held.into_iter().for_each(|held| watched.free(held, &stream));
    });
}

/// What is missing is moved at once, although it is more than a request in haste would have moved.
#[test]
fn a_full_device_is_not_asked_for_what_has_to_move() {
    on_a_device_with(130, |watched, others| {
        let stream = watched.rig.stream();
        let one = || watched.malloc(GRANULE, &stream);
        // Something comes back between any two, so that none is made ahead.
        let mut held: Vec<_> = (0..120)
            .map(|_| {
                watched.free(watched.malloc(KIB, &stream), bare(&stream));
                one()
            })
            .collect();
        let rest: Vec<_> =
            (0..10).map_while(|_| watched.try_malloc(GRANULE, &stream).ok()).collect();
        let calls = || watched.rig.driver.calls();
        let (before, begin) = (calls(), Instant::now());
        for _ in 0..12 {
            // Sixty, each between two that stay.
            held.sort_unstable_by_key(|held| held.address());
            let (go, stay): (Vec<_>, Vec<_>) =
                held.into_iter().enumerate().partition(|(at, _)| at % 2 == 0);
            go.into_iter().for_each(|(_, held)| watched.free(held, bare(&stream)));
            let long = watched.malloc(60 * GRANULE, &stream);
            watched.free(long, bare(&stream));
            held = stay.into_iter().map(|(_, held)| held).collect();
            held.extend((0..60).map(|_| one()));
        }
        // What a device has is known for a second.
        let asked = calls().since(&before).count("cuMemCreate");
        assert!(asked <= 6 + begin.elapsed().as_secs(), "asked {asked} times");
        call!(watched.rig.driver, cuMemFree_v2(others));
        held.into_iter().chain(rest).for_each(|held| watched.free(held, &stream));
    });
}

//! Who may have what is free, and what is counted, where a request finds little or fails.

use cuda_sim::Schedule;
use cuda_sys::types::CUresult;
use vpmm::{Error, Pool, WaitPolicy};

use crate::rig::{PAGE, config};
use crate::support::Rig;

const UNKNOWN: CUresult = CUresult::CUDA_ERROR_UNKNOWN;

/// Two frees of a busy stream, and a request of another's that needs both: one wait is behind the later of them.
#[test]
fn a_wait_for_a_stream_is_behind_all_that_was_taken_of_it() {
    let rig = Rig::simulated(Schedule::Eager);
    let mut config = config(PAGE, 0);
    config.limit_bytes = Some(4 * PAGE);
    let watched = rig.pool(&config);
    let (a, b) = (rig.stream(), rig.stream());
    let [first, one, second, other] = [(); 4].map(|()| watched.pages(1, &a));
    let stall = rig.stall(a.handle());
    watched.free(first, &a);
    watched.free(second, &a);
    let two = watched.pages(2, &b);
    assert_eq!((watched.moved(), watched.pool.stats().device_waits), (2, 1));
    drop(stall);
    watched.free(two, &b);
    [one, other].into_iter().for_each(|held| watched.free(held, &a));
    watched.assert_intact();
}

/// A part of a page is nobody's to have.
#[test]
fn a_limit_between_two_pages_is_the_lower_one() {
    let rig = Rig::simulated(Schedule::Eager);
    let mut config = config(PAGE, 0);
    config.limit_bytes = Some(3 * PAGE + PAGE / 2);
    let watched = rig.pool(&config);
    let (a, b) = (rig.stream(), rig.stream());
    let two = watched.pages(2, &a);
    let stall = rig.stall(a.handle());
    watched.free(two, &a);
    let three = watched.pages(3, &b);
    assert_eq!((watched.usage(), watched.moved()), (3, 2));
    drop(stall);
    watched.free(three, &b);
    watched.assert_intact();
}

/// What a request had taken and could not use is its stream's again, and not everybody's.
#[test]
fn what_a_failed_request_gives_up_is_still_its_streams() {
    let rig = Rig::simulated(Schedule::Eager);
    let watched = rig.small_pool(0);
    let (a, b) = (rig.stream(), rig.stream());
    let two = watched.pages(2, &a);
    let stall = rig.stall(a.handle());
    watched.free(two, &a);
    let sim = rig.sim.as_ref().unwrap();
    for call in ["cuMemCreate", "cuMemMap", "cuMemSetAccess"] {
        sim.fail_nth(call, 1, UNKNOWN);
        let error = watched.try_malloc(4 * PAGE, &a).unwrap_err();
        assert!(matches!(error, Error::Driver { call: named, .. } if named == call), "{error}");
        let stats = watched.pool.stats();
        assert_eq!((stats.pending_bytes, stats.idle_bytes), (2 * PAGE, 0), "{call}");
    }
    let of_b = watched.pages(2, &b);
    assert_eq!((watched.usage(), watched.pool.stats().device_waits), (4, 0));
    let of_a = watched.pages(2, &a);
    assert_eq!((of_a.address(), watched.usage()), (two.address(), 4));
    drop(stall);
    watched.free(of_a, &a);
    watched.free(of_b, &b);
    watched.assert_intact();
}

#[test]
fn of_two_regions_alike_a_stream_takes_its_own() {
    let rig = Rig::simulated(Schedule::Eager);
    for own_is_lower in [true, false] {
        let watched = rig.small_pool(0);
        let (a, b) = (rig.stream(), rig.stream());
        let streams = if own_is_lower { [&a, &a, &b] } else { [&b, &a, &a] };
        let [low, between, high] = streams.map(|stream| watched.pages(1, stream));
        let (own, idle) = if own_is_lower { (low, high) } else { (high, low) };
        watched.free(idle, &b);
        b.synchronize().unwrap();
        let stall = rig.stall(a.handle());
        watched.free(own, &a);
        assert_eq!(watched.pool.stats().idle_bytes, PAGE);
        let again = watched.pages(1, &a);
        assert_eq!(again.address(), own.address());
        drop(stall);
        [between, again].into_iter().for_each(|held| watched.free(held, &a));
        watched.assert_intact();
    }
}

#[test]
fn of_two_runs_a_request_takes_the_shorter_one() {
    let rig = Rig::simulated(Schedule::Eager);
    for shorter_is_first in [true, false] {
        let watched = rig.small_pool(0);
        let stream = rig.stream();
        let held = [2, 2, 1, 1, 2, 1].map(|pages| watched.pages(pages, &stream));
        let stall = rig.stall(stream.handle());
        let order = if shorter_is_first { [3, 4, 0, 1] } else { [0, 1, 3, 4] };
        order.into_iter().for_each(|at| watched.free(held[at], &stream));
        let three = watched.pages(3, &stream);
        assert_eq!((three.address(), watched.usage()), (held[3].address(), 9));
        drop(stall);
        [held[2], held[5], three].into_iter().for_each(|held| watched.free(held, &stream));
        watched.assert_intact();
    }
}

/// Pages that a stream has finished with, though nobody has asked, and that zombies are mapped to as well.
#[test]
fn a_small_request_at_the_limit_has_what_is_free_by_now() {
    let rig = Rig::simulated(Schedule::Eager);
    let mut config = config(PAGE, 0);
    config.limit_bytes = Some(4 * PAGE);
    config.out_of_memory = WaitPolicy::FailAtOnce;
    let watched = rig.pool(&config);
    let stream = rig.stream();
    let [first, one, second, other] = [(); 4].map(|()| watched.pages(1, &stream));
    let stall = rig.stall(stream.handle());
    watched.free(first, &stream);
    watched.free(second, &stream);
    let two = watched.pages(2, &stream);
    assert_eq!(watched.pool.stats().zombie_bytes, 2 * PAGE);
    watched.free(two, &stream);
    drop(stall);
    // Not by the library, which would note it.
    let wait = rig.driver.raw().cuStreamSynchronize.unwrap();
    // SAFETY: a live stream.
    assert_eq!(unsafe { wait(stream.handle().raw()) }, CUresult::CUDA_SUCCESS);
    let small = watched.malloc(1000, &stream);
    assert_eq!(watched.pool.stats().zombie_bytes, 0);
    [one, other, small].into_iter().for_each(|held| watched.free(held, &stream));
    watched.assert_intact();
}

/// Pages that were made for a request that failed count no more, and those that the driver would not take back
/// are offered again: when the pool grows, is trimmed, and at its end.
#[test]
fn pages_of_a_failed_request_go_back_in_the_end() {
    let rig = Rig::simulated(Schedule::Eager);
    let sim = rig.sim.as_ref().unwrap();
    let mut config = config(PAGE, 0);
    config.limit_bytes = Some(3 * PAGE);
    let stream = rig.stream();
    let before = sim.leaks().handles;
    let kept = || sim.leaks().handles - before;
    for at_the_end in [false, true] {
        let pool = Pool::paged(&rig.device, &config).unwrap();
        let fail = |releases: u64| {
            sim.fail_nth("cuMemMap", 1, UNKNOWN);
            (1..=releases).for_each(|n| sim.fail_nth("cuMemRelease", n, UNKNOWN));
            pool.malloc(3 * PAGE as usize, &stream).unwrap_err();
        };
        fail(0);
        assert_eq!(kept(), 0);
        fail(2);
        assert_eq!((kept(), pool.stats().mapped_bytes), (2, 0));
        if at_the_end {
            drop(pool);
        } else {
            sim.fail_nth("cuMemRelease", 1, UNKNOWN);
            assert_eq!(pool.trim_to(0).unwrap(), PAGE);
            assert_eq!(kept(), 1);
            sim.fail_nth("cuMemRelease", 1, UNKNOWN);
            let ptr = pool.malloc(2 * PAGE as usize, &stream).unwrap();
            assert_eq!(kept(), 3, "it is tried once more by the next growth");
            let more = pool.malloc(PAGE as usize, &stream).unwrap();
            assert_eq!((kept(), pool.stats().mapped_bytes), (3, 3 * PAGE));
            [ptr, more].into_iter().for_each(|ptr| pool.free(ptr, &stream).unwrap());
            drop(pool);
        }
        assert_eq!(kept(), 0);
    }
}

/// An error's numbers are of small requests, too; and what waits for other streams is free, but nobody's to have.
#[test]
fn an_error_tells_of_all_that_the_pool_holds() {
    let rig = Rig::simulated(Schedule::Eager);
    let watched = rig.small_pool(0);
    let (a, b) = (rig.stream(), rig.stream());
    let small = watched.malloc(1000, &a);
    let (live, kept) = (watched.pages(2, &a), watched.pages(1, &a));
    watched.pool.record_stream(kept.ptr, &b).unwrap();
    let stall = rig.stall(b.handle());
    watched.free(kept, &a);
    let most = rig.device.total_memory().unwrap();
    let error = watched.try_malloc(most + PAGE, &a).unwrap_err();
    let Error::OutOfMemory { free_bytes, largest_free_bytes, mapped_bytes, live_bytes, .. } = error
    else {
        panic!("{error}")
    };
    let stats = watched.pool.stats();
    assert_eq!((free_bytes, largest_free_bytes), (PAGE, 0));
    assert!(stats.small_mapped_bytes > 0);
    assert_eq!(mapped_bytes, 3 * PAGE + stats.small_mapped_bytes);
    assert_eq!(live_bytes, 2 * PAGE + stats.small_live_bytes);
    assert!(stats.small_live_bytes >= 1000);
    drop(stall);
    [small, live].into_iter().for_each(|held| watched.free(held, &a));
    watched.assert_intact();
}

/// A use on the stream of the free itself is nothing to wait for.
#[test]
fn a_small_allocation_that_waits_for_nobody_is_the_drivers_at_once() {
    let rig = Rig::simulated(Schedule::Eager);
    let watched = rig.small_pool(0);
    let stream = rig.stream();
    let small = watched.malloc(1000, &stream);
    let at = |offset| vpmm::DevicePtr::from_address(small.address() + offset).address();
    let is_known = |address| watched.pool.allocation(address).is_some();
    assert_eq!([at(0), at(999), at(1000)].map(is_known), [true, true, false]);
    watched.pool.record_stream(small.ptr, &stream).unwrap();
    let calls = rig.driver.calls();
    watched.free(small, &stream);
    assert_eq!(rig.driver.calls().since(&calls).count("cuMemFreeAsync"), 1);
    watched.assert_intact();
}

/// The device has less than the pool could know: what was made of a request's pages, and what other streams freed,
/// make up for the rest.
#[test]
fn pages_of_others_make_up_for_those_that_the_device_has_not() {
    let sim = cuda_sim::Simulator::builder().memory_bytes(16 * PAGE).build().unwrap();
    let rig = Rig::on(sim);
    let (watched, beside) = (rig.small_pool(0), rig.small_pool(0));
    let (a, b) = (rig.stream(), rig.stream());
    // Two are left then beside the four.
    let other = beside.pages(rig.device.free_memory().unwrap() / PAGE - 6, &a);
    let four = watched.pages(4, &a);
    let stall = rig.stall(a.handle());
    watched.free(four, &a);
    let six = watched.pages(6, &b);
    let stats = watched.pool.stats();
    assert_eq!((watched.usage(), stats.pages_created, stats.pages_moved), (6, 6, 4));
    assert_eq!((stats.mapped_bytes, stats.device_waits), (6 * PAGE, 1));
    drop(stall);
    watched.free(six, &b);
    beside.free(other, &a);
    watched.assert_intact();
    beside.assert_intact();
}

/// An event that was at hand for a free that fails is there for the next.
#[test]
fn a_free_that_cannot_record_its_uses_loses_no_event() {
    let rig = Rig::simulated(Schedule::Eager);
    let watched = rig.small_pool(0);
    let (a, b) = (rig.stream(), rig.stream());
    let held = [(); 2].map(|()| watched.pages(1, &a));
    held.iter().for_each(|held| watched.pool.record_stream(held.ptr, &b).unwrap());
    watched.free(held[0], &a);
    rig.device.synchronize().unwrap();
    let sim = rig.sim.as_ref().unwrap();
    let events = sim.leaks().events;
    for _ in 0..3 {
        sim.fail_nth("cuEventRecord", 1, UNKNOWN);
        watched.pool.free(held[1].ptr, &a).unwrap_err();
    }
    watched.free(held[1], &a);
    assert_eq!(sim.leaks().events, events);
    watched.assert_intact();
}

//! Several threads on one allocator.

use std::time::{Duration, Instant};

use cuda_sim::{Schedule, Simulator};

use crate::rig::{Cached, KIB, MIB};
use crate::support::changed::{changed, gated};
use crate::support::{Held, Lcg, Rig};

gated!(getting: cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize));
gated!(waiting: cuEventSynchronize(event: CUevent));
gated!(giving: cuMemFree_v2(address: CUdeviceptr));
gated!(making_room: cuMemFree_v2(address: CUdeviceptr));

#[test]
fn threads_share_streams_memory_and_events() {
    for schedule in [Schedule::Eager, Schedule::Late { patience: 3 }, Schedule::Random] {
        let rig = Rig::simulated(schedule);
        share(&rig);
        rig.assert_clean();
    }
    if let Some(rig) = Rig::gpu() {
        share(&rig);
    }
}

fn share(rig: &Rig) {
    let settings = "max_split_size_mb:24,garbage_collection_threshold:0.01";
    let cached = rig.cached_with(settings);
    let common = rig.stream();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (cached, common) = (&cached, &common);
            scope.spawn(move || program(cached, common, Lcg(thread)));
        }
    });
    cached.allocator.empty_cache().unwrap();
    assert_eq!((cached.reserved(), cached.allocator.block_count()), (0, 0));
    cached.assert_intact();
}

fn program(cached: &Cached<'_>, common: &vpmm::Stream, mut random: Lcg) {
    // Streams come and go, too.
    for _ in 0..3 {
        let own = cached.rig.stream();
        let mut live: Vec<(Held, bool)> = Vec::new();
        for _ in 0..120 {
            let shared = random.below(3) == 0;
            let stream = if shared { common } else { &own };
            match random.below(6) {
                0..3 if live.len() < 16 => {
                    let bytes = [600, 30 * KIB, 2 * MIB, 7 * MIB, 25 * MIB];
                    let bytes = bytes[random.below(5) as usize];
                    live.push((cached.malloc(bytes, stream), shared));
                }
                3 | 4 if !live.is_empty() => {
                    let (held, shared) = live.swap_remove(random.below(live.len() as u64) as usize);
                    let (from, other) = if shared { (common, &own) } else { (&own, common) };
                    if random.below(2) == 0 {
                        cached.look_from(&held, from, other);
                    }
                    cached.free(held, from);
                }
                5 if random.below(20) == 0 => cached.allocator.empty_cache().unwrap(),
                _ => {}
            }
        }
        for (held, shared) in live {
            cached.free(held, if shared { common } else { &own });
        }
    }
}

#[test]
fn one_pointer_freed_by_many_threads_is_freed_once() {
    Rig::everywhere(|rig| {
        let cached = rig.cached();
        let (own, side) = (rig.stream(), rig.stream());
        for noted in [false, true] {
            for _ in 0..50 {
                let ptr = cached.allocator.malloc(3 << 20, &own).unwrap();
                if noted {
                    cached.allocator.record_stream(ptr, &side).unwrap();
                }
                let freed: usize = std::thread::scope(|scope| {
                    let free = || usize::from(cached.allocator.free(ptr).is_ok());
                    let threads = [(); 3].map(|()| scope.spawn(free));
                    threads.into_iter().map(|thread| thread.join().unwrap()).sum()
                });
                assert_eq!(freed, 1);
            }
            side.synchronize().unwrap();
        }
        cached.assert_intact();
    });
}

#[test]
fn nobody_waits_for_a_thread_that_gets_memory_or_gives_it_back() {
    let sim = Simulator::builder().schedule(Schedule::Eager).build().unwrap();
    let driver = changed(&sim, |api| {
        getting::put(api);
        giving::put(api);
    });
    let rig = Rig::with(driver, sim);
    let cached = rig.cached();
    let stream = rig.stream();
    let warm = cached.malloc(3 * MIB, &stream);
    let idle = cached.malloc(40 * MIB, &stream);
    cached.free(idle, &stream);
    std::thread::scope(|scope| {
        getting::AFTER.arm();
        let miss = scope.spawn(|| cached.allocator.malloc(64 << 20, &stream).unwrap());
        getting::AFTER.wait();
        let held = cached.malloc(5 * MIB, &stream);
        cached.free(held, &stream);
        getting::AFTER.open();
        let ptr = miss.join().unwrap();

        giving::AFTER.arm();
        let flush = scope.spawn(|| cached.allocator.empty_cache().unwrap());
        giving::AFTER.wait();
        // The driver has the segment again, and may give its address to somebody else at once.
        let other = cached.malloc(40 * MIB, &stream);
        assert_eq!(other.address(), idle.address(), "the case that is meant");
        assert_eq!(cached.reserved(), (20 + 64 + 40 + 40) * MIB, "both, for a moment");
        giving::AFTER.open();
        flush.join().unwrap();
        cached.free(other, &stream);
        cached.allocator.free(ptr).unwrap();
    });
    cached.free(warm, &stream);
    cached.allocator.empty_cache().unwrap();
    assert_eq!((cached.reserved(), cached.allocator.block_count()), (0, 0));
    cached.assert_intact();
    drop((cached, stream));
    drop(rig);
}

/// Who waits for further streams does so without the lock: meanwhile another thread may find an event passed that
/// is waited for, and it is not recorded elsewhere before the wait is over.
#[test]
fn who_waits_for_uses_waits_for_no_others() {
    let sim = Simulator::builder().schedule(Schedule::Late { patience: 3 }).build().unwrap();
    let rig = Rig::with(changed(&sim, waiting::put), sim);
    let cached = rig.cached();
    let (own, side, other) = (rig.stream(), rig.stream(), rig.stream());
    let (kept, first, second) =
        (cached.malloc(3 * MIB, &own), cached.malloc(3 * MIB, &own), cached.malloc(3 * MIB, &own));
    let stall = rig.stall(side.handle());
    cached.look_from(&first, &own, &side);
    cached.free(first, &own);
    std::thread::scope(|scope| {
        waiting::BEFORE.arm();
        let flush = scope.spawn(|| cached.allocator.empty_cache().unwrap());
        waiting::BEFORE.wait();
        drop(stall);
        side.synchronize().unwrap();
        let stall = rig.stall(other.handle());
        cached.look_from(&second, &own, &other);
        cached.free(second, &own);
        // It lacks memory: an event is recorded for what waits.
        let long = cached.malloc(64 * MIB, &own);
        waiting::BEFORE.open();
        let start = Instant::now();
        while !flush.is_finished() && start.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let waited_for_its_own = flush.is_finished();
        drop(stall);
        flush.join().unwrap();
        assert!(waited_for_its_own, "the other stream is none of what it was to wait for");
        cached.free(long, &own);
    });
    cached.free(kept, &own);
    cached.allocator.empty_cache().unwrap();
    assert_eq!((cached.reserved(), cached.allocator.block_count()), (0, 0));
    cached.assert_intact();
    drop((cached, own, side, other));
    drop(rig);
}

/// What one request gives back to stay below the threshold, or to make room, has not gone yet when another finds no
/// memory: that one waits for it, as for a flush.
#[test]
fn who_lacks_memory_waits_for_what_another_request_gives_back() {
    let settings = ["garbage_collection_threshold:0.3", "max_split_size_mb:32"];
    for settings in settings {
        let sim = Simulator::builder().schedule(Schedule::Eager).build().unwrap();
        let rig = Rig::with(changed(&sim, making_room::put), sim);
        let cached = rig.cached_with(settings);
        let fraction = 160.5 * MIB as f64 / rig.device.total_memory().unwrap() as f64;
        cached.allocator.set_memory_fraction(fraction).unwrap();
        let (stream, other) = (rig.stream(), rig.stream());
        let live = cached.malloc(30 * MIB, &stream);
        let idle = cached.malloc(100 * MIB, &stream);
        cached.free(idle, &stream);
        let request = |stream: &vpmm::Stream| cached.allocator.malloc(60 << 20, stream);
        std::thread::scope(|scope| {
            making_room::BEFORE.arm();
            // Only its own stream gives up what is too long to be split.
            let of_first = if settings.contains("split") { &stream } else { &other };
            let first = scope.spawn(move || request(of_first));
            making_room::BEFORE.wait();
            let second = scope.spawn(|| request(&other));
            let start = Instant::now();
            while !second.is_finished() && start.elapsed() < Duration::from_millis(200) {
                std::thread::sleep(Duration::from_millis(1));
            }
            making_room::BEFORE.open();
            for request in [first, second] {
                let ptr =
                    request.join().unwrap().unwrap_or_else(|error| panic!("{settings}: {error}"));
                cached.allocator.free(ptr).unwrap();
            }
        });
        assert_eq!(cached.allocator.stats().num_ooms, 0);
        cached.free(live, &stream);
        cached.assert_intact();
        drop((cached, stream, other));
        drop(rig);
    }
}

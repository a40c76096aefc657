//! Uses on further streams: memory is kept until their events have passed.

use std::sync::atomic::{AtomicU64, Ordering};

use cuda_sim::{Schedule, Simulator};
use vpmm::{Stream, StreamHandle};

use crate::rig::{Cached, KIB, MIB};
use crate::support::streams::make;
use crate::support::{Held, Lcg, Rig, call};

const SIZES: [u64; 3] = [1000, 3 * MIB, 24 * MIB];

/// More than anything cached here.
const LARGE: u64 = 192 * MIB;

/// A request for as much on the stream of the allocation does not get the memory that is kept.
fn assert_kept(cached: &Cached<'_>, held: &Held, stream: &Stream) {
    let other = cached.malloc(held.bytes, stream);
    let apart = other.address() + other.bytes <= held.address()
        || held.address() + held.bytes <= other.address();
    assert!(apart, "{:#x} is still in use", held.address());
    assert!(cached.allocator.stats().active.all.current > 1);
    cached.free(other, stream);
}

/// With all work finished, as much as is held is to be had without anything new.
fn assert_found_again(cached: &Cached<'_>, held: &Held, stream: &Stream) {
    call!(cached.rig.driver, cuCtxSynchronize());
    // A request that lacks memory asks about what waits.
    let lacking = cached.malloc(LARGE, stream);
    let stats = cached.allocator.stats();
    assert_eq!(stats.active.all.current, 1, "nothing waits any more");
    assert_eq!(stats.active_bytes.all.current, stats.allocated_bytes.all.current);
    let reserved = cached.reserved();
    let again = cached.malloc(held.bytes, stream);
    assert_eq!(cached.reserved(), reserved);
    cached.free(again, stream);
    cached.free(lacking, stream);
    assert_eq!(cached.allocator.stats().inactive_split.all.current, 0);
    cached.allocator.empty_cache().unwrap();
}

#[test]
fn memory_is_kept_until_the_other_streams_use_is_over() {
    Rig::everywhere(|rig| {
        for bytes in SIZES {
            let cached = rig.cached();
            let (own, side) = (rig.stream(), rig.stream());
            let held = cached.malloc(bytes, &own);
            let stall = rig.stall(side.handle());
            cached.look_from(&held, &own, &side);
            let calls = cached.calls(|| cached.free(held, &own));
            assert_eq!(calls.total(), 0, "nobody lacks it");
            let waits = cached.calls(|| {
                assert_kept(&cached, &held, &own);
                own.synchronize().unwrap(); // returns, though the other stream is stuck
                assert_kept(&cached, &held, &own);
            });
            assert_eq!(waits.count("cuStreamWaitEvent"), 0, "no stream waits for it");
            assert_eq!(waits.count("cuEventSynchronize"), 0, "nor the host");
            drop(stall);
            assert_found_again(&cached, &held, &own);
            cached.assert_intact();
        }
    });
}

#[test]
fn a_use_that_nobody_noted_is_a_race() {
    // That the tests here would notice.
    let rig = Rig::on(Simulator::builder().schedule(Schedule::Manual).build().unwrap());
    let sim = rig.sim.clone().expect("a simulated rig");
    let cached = rig.cached();
    let (own, side) = (rig.stream(), rig.stream());
    let held = cached.malloc(MIB, &own);
    rig.order(&own, &side);
    held.check(&rig, &side);
    cached.free(held, &own);
    let again = cached.malloc(MIB, &own);
    assert_eq!(again.address(), held.address());
    rig.device.synchronize().unwrap();
    assert!(!sim.report().races.is_empty());
}

#[test]
fn memory_is_kept_until_the_last_of_many_uses_is_over() {
    Rig::everywhere(|rig| {
        let cached = rig.cached();
        let own = rig.stream();
        let sides = [(); 6].map(|()| rig.stream());
        let held = cached.malloc(3 * MIB, &own);
        let mut stalls: Vec<_> = sides.iter().map(|side| rig.stall(side.handle())).collect();
        sides.iter().for_each(|side| cached.look_from(&held, &own, side));
        let calls = cached.calls(|| cached.free(held, &own));
        assert_eq!(calls.total(), 0);
        while let Some(stall) = stalls.pop() {
            // More each time, so that it lacks memory and asks.
            let lacking = cached.malloc(LARGE - 16 * MIB * (1 + stalls.len() as u64), &own);
            cached.free(lacking, &own);
            assert_kept(&cached, &held, &own);
            drop(stall);
            // By the driver itself, so that the allocator learns of it from its events alone.
            call!(rig.driver, cuStreamSynchronize(sides[stalls.len()].handle().raw()));
        }
        assert_found_again(&cached, &held, &own);
        cached.assert_intact();
    });
}

#[test]
fn a_stream_that_is_stuck_keeps_only_what_it_uses() {
    Rig::everywhere(|rig| {
        let cached = rig.cached();
        let (own, stuck, quick) = (rig.stream(), rig.stream(), rig.stream());
        let [first, second] = [(); 2].map(|()| cached.malloc(12 * MIB, &own));
        let stall = rig.stall(stuck.handle());
        cached.look_from(&first, &own, &stuck);
        cached.look_from(&second, &own, &quick);
        cached.free(first, &own);
        cached.free(second, &own);
        call!(rig.driver, cuStreamSynchronize(quick.handle().raw()));
        let again = cached.malloc(12 * MIB, &own);
        assert_eq!(again.address(), second.address(), "though the other was freed before");
        drop(stall);
        cached.free(again, &own);
        cached.assert_intact();
    });
}

#[test]
fn a_stream_noted_twice_or_the_own_one_costs_one_event_or_none() {
    Rig::everywhere(|rig| {
        let cached = rig.cached();
        let (own, side) = (rig.stream(), rig.stream());
        let held = cached.malloc(MIB, &own);
        let calls = cached.calls(|| {
            cached.allocator.record_stream(held.ptr, &own).unwrap();
            cached.allocator.free(held.ptr).unwrap();
        });
        assert_eq!(calls.total(), 0);
        cached.give_up(&held);
        let held = cached.malloc(MIB, &own);
        (0..3).for_each(|_| cached.look_from(&held, &own, &side));
        let calls = cached.calls(|| {
            cached.free(held, &own);
            assert_found_again(&cached, &held, &own);
        });
        assert_eq!(calls.count("cuEventRecord"), 1);
        cached.assert_intact();
    });
}

#[test]
fn what_is_free_beside_a_kept_block_is_of_use() {
    Rig::everywhere(|rig| {
        let cached = rig.cached();
        let (own, side) = (rig.stream(), rig.stream());
        let row = [(); 5].map(|()| cached.malloc(2 * MIB, &own));
        let stall = rig.stall(side.handle());
        cached.look_from(&row[2], &own, &side);
        row.into_iter().for_each(|held| cached.free(held, &own));
        // 4 MiB before it and 14 after it, in one segment.
        let [before, after] = [4, 14].map(|mib| cached.malloc(mib * MIB, &own));
        assert_eq!((before.address(), after.address()), (row[0].address(), row[3].address()));
        assert_eq!(cached.reserved(), 20 * MIB);
        let stats = cached.allocator.stats();
        assert_eq!((stats.active.all.current, stats.allocation.all.current), (3, 2));
        drop(stall);
        cached.free(before, &own);
        cached.free(after, &own);
        assert_found_again(&cached, &row[2], &own);
        cached.assert_intact();
    });
}

#[test]
fn a_host_that_has_waited_needs_no_event() {
    Rig::everywhere(|rig| {
        let cached = rig.cached();
        let (own, side) = (rig.stream(), rig.stream());
        let held = cached.malloc(3 * MIB, &own);
        cached.look_from(&held, &own, &side);
        cached.free(held, &own);
        side.synchronize().unwrap();
        assert_eq!(cached.allocator.stats().active.all.current, 0, "told by the wait");
        let calls = cached.calls(|| _ = cached.malloc(3 * MIB, &own));
        assert_eq!(calls.count("cuEventQuery"), 0);
        rig.device.synchronize().unwrap();
        cached.assert_intact();
    });
}

#[test]
fn a_free_on_another_stream_is_a_use_there() {
    Rig::everywhere(|rig| {
        use vpmm::MemoryResource;
        let cached = rig.cached();
        let (own, side) = (rig.stream(), rig.stream());
        let held = cached.malloc(3 * MIB, &own);
        let stall = rig.stall(side.handle());
        rig.order(&own, &side);
        held.check(rig, &side);
        cached.give_up(&held);
        let bytes = held.bytes as usize;
        cached.allocator.deallocate(held.ptr, bytes, 256, side.handle()).unwrap();
        assert_kept(&cached, &held, &own);
        drop(stall);
        assert_found_again(&cached, &held, &own);
        // On its own there is nothing to wait for.
        let held = cached.malloc(3 * MIB, &own);
        let calls = cached.calls(|| {
            cached.allocator.deallocate(held.ptr, bytes, 256, own.handle()).unwrap();
        });
        assert_eq!(calls.total(), 0);
        cached.give_up(&held);
        cached.assert_intact();
    });
}

#[test]
fn streams_of_every_kind_are_waited_for() {
    Rig::everywhere(|rig| {
        let cached = rig.cached();
        let own = rig.stream();
        let (raw, foreign) = make(rig, 0);
        for (side, stalled) in [
            (StreamHandle::LEGACY, StreamHandle::LEGACY),
            (StreamHandle::PER_THREAD, StreamHandle::PER_THREAD),
            (foreign, foreign),
        ] {
            let held = cached.malloc(3 * MIB, &own);
            let stall = rig.stall(stalled);
            cached.look_from(&held, &own, side);
            let calls = cached.calls(|| cached.free(held, &own));
            assert_eq!(calls.count("cuEventRecord"), 1, "{side:?}");
            assert_kept(&cached, &held, &own);
            drop(stall);
            assert_found_again(&cached, &held, &own);
        }
        cached.assert_intact();
        call!(rig.driver, cuStreamDestroy_v2(raw));
    });
}

#[test]
fn another_threads_default_stream_is_waited_for() {
    Rig::everywhere(|rig| {
        let cached = rig.cached();
        let own = rig.stream();
        let (to_thread, orders) = std::sync::mpsc::channel::<()>();
        let (to_test, answers) = std::sync::mpsc::channel::<()>();
        let held = cached.malloc(3 * MIB, &own);
        std::thread::scope(|scope| {
            let (cached, own) = (&cached, &own);
            scope.spawn(move || {
                call!(rig.driver, cuCtxSetCurrent(rig.device.context()));
                cached.look_from(&held, own, StreamHandle::PER_THREAD);
                to_test.send(()).unwrap();
                orders.recv().unwrap();
                // Its own next request records what only it can.
                let other = cached.malloc(KIB, StreamHandle::PER_THREAD);
                cached.free(other, StreamHandle::PER_THREAD);
                call!(rig.driver, cuStreamSynchronize(StreamHandle::PER_THREAD.raw()));
                to_test.send(()).unwrap();
            });
            answers.recv().unwrap();
            let calls = cached.calls(|| cached.free(held, own));
            assert_eq!(calls.count("cuEventRecord"), 0, "another thread's cannot be recorded on");
            assert_kept(cached, &held, own);
            to_thread.send(()).unwrap();
            answers.recv().unwrap();
            assert_found_again(cached, &held, own);
        });
        cached.assert_intact();
    });
}

/// One question and one event serve for all blocks that wait for one stream, however many they are.
#[test]
fn what_waits_for_another_threads_stream_is_not_asked_about_one_by_one() {
    Rig::everywhere(|rig| {
        const BLOCKS: usize = 100;
        let cached = rig.cached();
        let own = rig.stream();
        let (to_thread, orders) = std::sync::mpsc::channel::<()>();
        let (to_test, answers) = std::sync::mpsc::channel::<()>();
        let held: Vec<_> = (0..BLOCKS).map(|_| cached.malloc(MIB, &own)).collect();
        let (mut questions, records) = (0, AtomicU64::new(0));
        std::thread::scope(|scope| {
            let (cached, own, held, records) = (&cached, &own, &held, &records);
            scope.spawn(move || {
                call!(rig.driver, cuCtxSetCurrent(rig.device.context()));
                held.iter().for_each(|held| cached.look_from(held, own, StreamHandle::PER_THREAD));
                to_test.send(()).unwrap();
                orders.recv().unwrap();
                let calls = cached.calls(|| {
                    let other = cached.allocator.malloc(1, StreamHandle::PER_THREAD).unwrap();
                    cached.allocator.free(other).unwrap();
                });
                records.store(calls.count("cuEventRecord"), Ordering::Relaxed);
                call!(rig.driver, cuStreamSynchronize(StreamHandle::PER_THREAD.raw()));
                to_test.send(()).unwrap();
            });
            answers.recv().unwrap();
            held.iter().for_each(|held| cached.free(*held, own));
            // A request that lacks memory asks whether any of it is this thread's.
            let mut other = None;
            let calls = cached.calls(|| other = Some(cached.allocator.malloc(24 << 20, own)));
            questions = calls.total();
            cached.allocator.free(other.unwrap().unwrap()).unwrap();
            to_thread.send(()).unwrap();
            answers.recv().unwrap();
            // All of them are free again.
            cached.allocator.empty_cache().unwrap();
            assert_eq!(cached.reserved(), 0);
        });
        assert!(questions < BLOCKS as u64 / 2, "{questions} calls");
        assert_eq!(records.into_inner(), 1);
        cached.assert_intact();
    });
}

#[test]
fn a_wait_of_the_host_settles_a_thread_that_is_gone() {
    Rig::everywhere(|rig| {
        let cached = rig.cached();
        let own = rig.stream();
        let held = cached.malloc(3 * MIB, &own);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                call!(rig.driver, cuCtxSetCurrent(rig.device.context()));
                cached.look_from(&held, &own, StreamHandle::PER_THREAD);
                call!(rig.driver, cuStreamSynchronize(StreamHandle::PER_THREAD.raw()));
            });
        });
        cached.free(held, &own);
        assert_kept(&cached, &held, &own);
        cached.allocator.empty_cache().unwrap();
        assert!(cached.reserved() > 0, "nobody knows about the thread's stream");
        rig.device.synchronize().unwrap();
        cached.allocator.empty_cache().unwrap();
        assert_eq!(cached.reserved(), 0);
        cached.assert_intact();
    });
}

/// Blocks of one size that a stream uses, freed.
fn freed(cached: &Cached<'_>, own: &Stream, side: &Stream, count: usize) -> Vec<Held> {
    let all: Vec<_> = (0..count).map(|_| cached.malloc(2 * MIB, own)).collect();
    all.iter().for_each(|held| cached.look_from(held, own, side));
    all.iter().for_each(|held| cached.free(*held, own));
    all
}

#[test]
fn blocks_of_one_stream_share_an_event() {
    Rig::everywhere(|rig| {
        let cached = rig.cached();
        let (own, side) = (rig.stream(), rig.stream());
        let warm = freed(&cached, &own, &side, 10);
        rig.device.synchronize().unwrap();
        let stall = rig.stall(side.handle());
        let calls = cached.calls(|| assert_eq!(freed(&cached, &own, &side, 10).len(), 10));
        assert_eq!(calls.total(), 0);
        assert_eq!(
            (cached.allocator.stats().active.all.current, cached.reserved()),
            (10, 20 * MIB)
        );
        let mut lacking = Vec::new();
        let calls = cached.calls(|| lacking.push(cached.malloc(2 * MIB, &own)));
        assert_eq!(calls.count("cuEventRecord"), 1, "for all of them");
        assert_eq!(calls.count("cuStreamWaitEvent") + calls.count("cuEventSynchronize"), 0);
        assert!(lacking.iter().all(|of| warm.iter().all(|was| was.address() != of.address())));
        drop(stall);
        call!(rig.driver, cuStreamSynchronize(side.handle().raw()));
        // What it got for itself has room for nine more. Then the waits are over.
        let calls = cached.calls(|| lacking.extend((0..19).map(|_| cached.malloc(2 * MIB, &own))));
        assert_eq!(calls.count("cuEventRecord"), 0);
        assert_eq!(cached.reserved(), 40 * MIB);
        assert!(warm.iter().all(|was| lacking.iter().any(|of| of.address() == was.address())));
        lacking.into_iter().for_each(|held| cached.free(held, &own));
        cached.assert_intact();
    });
}

#[test]
fn what_many_frees_leave_waiting_has_an_event_before_anybody_lacks_it() {
    Rig::everywhere(|rig| {
        let cached = rig.cached();
        let (own, side) = (rig.stream(), rig.stream());
        let stall = rig.stall(side.handle());
        let calls = cached.calls(|| drop(freed(&cached, &own, &side, 100)));
        let records = calls.count("cuEventRecord");
        // One each 32, and one each time that memory was lacking before anything was freed: never.
        assert!((1..=4).contains(&records), "{records} records");
        drop(stall);
        call!(rig.driver, cuCtxSynchronize());
        // Requests that find something ask about events too, once in a while.
        for _ in 0..9 {
            let held = cached.malloc(1000, &own);
            cached.free(held, &own);
        }
        assert!(cached.allocator.stats().active.all.current < 32);
        cached.assert_intact();
    });
}

/// A stream has done a thousand things or none: one or two questions tell which.
#[test]
fn the_last_event_of_a_stream_answers_for_all_before() {
    let rig = Rig::simulated(Schedule::Eager);
    let cached = rig.cached();
    let (own, side) = (rig.stream(), rig.stream());
    // Six events: one each 32 blocks.
    let all: Vec<_> = (0..192).map(|_| cached.malloc(2 * MIB, &own)).collect();
    all.iter().for_each(|held| cached.look_from(held, &own, &side));
    let stall = rig.stall(side.handle());
    let calls = cached.calls(|| all.iter().for_each(|held| cached.free(*held, &own)));
    assert_eq!((calls.count("cuEventRecord"), calls.count("cuEventQuery")), (6, 0));
    drop(stall);
    call!(rig.driver, cuCtxSynchronize());
    // One that lacks memory: the first has passed, and the last has.
    let calls = cached.calls(|| {
        let lacking = cached.malloc(LARGE, &own);
        cached.free(lacking, &own);
    });
    assert_eq!(cached.allocator.stats().active.all.current, 0);
    assert_eq!(calls.count("cuEventQuery"), 2);
    // With something freed since, the event for that answers for all.
    let all: Vec<_> = (0..70).map(|_| cached.malloc(2 * MIB, &own)).collect();
    all.iter().for_each(|held| cached.look_from(held, &own, &side));
    all.iter().for_each(|held| cached.free(*held, &own));
    call!(rig.driver, cuCtxSynchronize());
    let calls = cached.calls(|| {
        let lacking = cached.malloc(2 * LARGE, &own);
        cached.free(lacking, &own);
    });
    assert_eq!(cached.allocator.stats().active.all.current, 0);
    assert_eq!((calls.count("cuEventRecord"), calls.count("cuEventQuery")), (1, 1));
    cached.assert_intact();
}

/// Requests that find something ask ever more rarely about a stream that gets nowhere, and at once about
/// everything when memory is lacking.
#[test]
fn a_stream_that_is_stuck_is_asked_about_ever_more_rarely() {
    let rig = Rig::simulated(Schedule::Eager);
    let cached = rig.cached();
    let (own, side) = (rig.stream(), rig.stream());
    let stall = rig.stall(side.handle());
    drop(freed(&cached, &own, &side, 32));
    let hits = |count: usize| {
        let calls = cached.calls(|| {
            for _ in 0..count {
                let held = cached.malloc(1000, &own);
                cached.free(held, &own);
            }
        });
        calls.count("cuEventQuery")
    };
    // The first of them gets a segment, and so asks about everything.
    assert!(hits(1) > 0);
    // After 8, 16, 32 and then each 64.
    assert_eq!(hits(8 + 16 + 32 + 64 * 4), 7);
    drop(stall);
    call!(rig.driver, cuCtxSynchronize());
    assert_eq!(hits(64), 1);
    assert_eq!(cached.allocator.stats().active.all.current, 0);
    cached.assert_intact();
}

#[test]
fn a_stream_that_ends_with_uses_open_has_one_event_for_all() {
    Rig::everywhere(|rig| {
        let cached = rig.cached();
        let (own, side) = (rig.stream(), rig.stream());
        let stall = rig.stall(side.handle());
        let kept = freed(&cached, &own, &side, 10);
        let calls = cached.calls(|| drop(side));
        assert_eq!(calls.count("cuEventRecord"), 1);
        let other = cached.malloc(2 * MIB, &own);
        assert!(kept.iter().all(|was| was.address() != other.address()));
        drop(stall);
        call!(rig.driver, cuCtxSynchronize());
        cached.free(other, &own);
        let lacking = cached.malloc(LARGE, &own);
        assert_eq!(cached.allocator.stats().active.all.current, 1);
        cached.free(lacking, &own);
        cached.assert_intact();
    });
}

#[test]
fn a_wait_of_the_host_settles_what_was_freed_before_and_no_more() {
    Rig::everywhere(|rig| {
        let cached = rig.cached();
        let (own, side) = (rig.stream(), rig.stream());
        let first = freed(&cached, &own, &side, 5);
        // By a wait that is told, while another thread frees more: see `Core::marks`.
        side.synchronize().unwrap();
        assert_eq!(cached.allocator.stats().active.all.current, 0);
        let stall = rig.stall(side.handle());
        let later = freed(&cached, &own, &side, 5);
        own.synchronize().unwrap();
        assert_eq!(cached.allocator.stats().active.all.current, 5, "it was the other's");
        assert_eq!(first[0].address(), later[0].address());
        drop(stall);
        rig.device.synchronize().unwrap();
        assert_eq!(cached.allocator.stats().active.all.current, 0);
        cached.assert_intact();
    });
}

/// What is freed while the host waits is not complete by that wait.
#[test]
fn what_is_freed_during_a_wait_of_the_host_is_not_settled_by_it() {
    Rig::everywhere(|rig| {
        let cached = rig.cached();
        let (own, side) = (rig.stream(), rig.stream());
        let first = rig.stall(side.handle());
        let before = freed(&cached, &own, &side, 5);
        let calls = rig.driver.calls();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| side.synchronize().unwrap());
            while rig.driver.calls().since(&calls).count("cuStreamSynchronize") == 0 {
                std::thread::yield_now();
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
            let second = rig.stall(side.handle());
            let later = freed(&cached, &own, &side, 5);
            assert_ne!(before[0].address(), later[0].address());
            drop(first);
            waits.join().unwrap();
            assert_eq!(cached.allocator.stats().active.all.current, 5, "those that came later");
            drop(second);
        });
        rig.device.synchronize().unwrap();
        assert_eq!(cached.allocator.stats().active.all.current, 0);
        cached.assert_intact();
    });
}

#[test]
fn random_uses_of_many_streams_never_race() {
    Rig::everywhere(|rig| {
        let cached = rig.cached();
        let streams: Vec<_> = (0..4).map(|_| rig.stream()).collect();
        let mut random = Lcg(5);
        let mut live: Vec<(Held, usize)> = Vec::new();
        for _ in 0..600 {
            let stream = random.below(4) as usize;
            match random.below(5) {
                0 | 1 if live.len() < 24 => {
                    let bytes =
                        [700, 90 * KIB, MIB + 5, 5 * MIB, 11 * MIB][random.below(5) as usize];
                    live.push((cached.malloc(bytes, &streams[stream]), stream));
                }
                2 if !live.is_empty() => {
                    let (held, own) = live[random.below(live.len() as u64) as usize];
                    cached.look_from(&held, &streams[own], &streams[stream]);
                }
                3 | 4 if !live.is_empty() => {
                    let (held, own) = live.swap_remove(random.below(live.len() as u64) as usize);
                    cached.free(held, &streams[own]);
                }
                _ => {}
            }
        }
        live.into_iter().for_each(|(held, own)| cached.free(held, &streams[own]));
        cached.allocator.empty_cache().unwrap();
        assert_eq!((cached.reserved(), cached.allocator.block_count()), (0, 0));
        cached.assert_intact();
    });
}

//! Uses on further streams: memory is kept until they are over, and no stream waits for that.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::CUresult;
use vpmm::{Error, Stream, StreamHandle};

use crate::rig::{BLOCK, GRANULE, Profile, Settings};
use crate::support::streams::{begin_capture, end_capture, make};
use crate::support::{Held, Rig, Watched, call};

/// Sizes of every kind that a profile serves in a way of its own.
const SIZES: [u64; 3] = [1000, GRANULE, BLOCK];

/// Requests for as much on the stream of the free: none gets the memory that is kept.
fn assert_kept(watched: &Watched<'_>, held: &Held, stream: &Stream) {
    let others = [(); 3].map(|()| watched.malloc(held.bytes, stream));
    for other in others {
        let apart = other.address() + other.bytes <= held.address()
            || held.address() + held.bytes <= other.address();
        assert!(apart, "{:#x} is still in use: {}", held.address(), watched.layout());
    }
    others.into_iter().for_each(|other| watched.free(other, stream));
}

/// With all work finished, what was kept is of use again: as much as was made so far needs no more
/// memory.
fn assert_found_again(watched: &Watched<'_>, bytes: u64, stream: &Stream) {
    call!(watched.rig.driver, cuCtxSynchronize());
    let mapped = watched.mapped();
    // A granule of the default profile may be the small blocks' own.
    let count = watched.pool.stats().mapped_bytes / bytes.max(GRANULE);
    let count = if bytes < BLOCK { count.saturating_sub(1).max(1) } else { count };
    let all: Vec<_> = (0..count).map(|_| watched.malloc(bytes, stream)).collect();
    assert_eq!(watched.mapped(), mapped, "{}", watched.layout());
    all.into_iter().for_each(|held| watched.free(held, stream));
    let stats = watched.pool.stats();
    assert_eq!((stats.live_bytes, stats.small_live_bytes), (0, 0));
}

/// A loader's data, which the GPU still reads: what is enqueued behind that may write there.
#[test]
fn what_waits_for_one_stream_alone_serves_that_one() {
    Rig::everywhere(|rig| {
        for bytes in [GRANULE, BLOCK] {
            let watched = rig.pool(Profile::Default);
            let (loader, training) = (rig.stream(), rig.stream());
            let batch = watched.malloc(bytes, &loader);
            let stall = rig.stall(training.handle());
            watched.look_from(&batch, &loader, &training);
            watched.free(batch, &loader);
            loader.synchronize().unwrap();
            let (mapped, host_waits) = (watched.mapped(), watched.pool.stats().host_waits);
            let more = watched.malloc(bytes, &training);
            assert_eq!(more.address(), batch.address());
            let stats = watched.pool.stats();
            assert_eq!((watched.mapped(), stats.host_waits), (mapped, host_waits));
            drop(stall);
            watched.free(more, &training);
            watched.assert_intact();
        }
    });
}

#[test]
fn what_waits_for_others_too_does_not() {
    Rig::everywhere(|rig| {
        // The stream that freed it, or a third one that uses it as well, has not come so far.
        for busy in 0..2 {
            let watched = rig.pool(Profile::Default);
            let streams = [rig.stream(), rig.stream(), rig.stream()];
            let [loader, training, third] = &streams;
            let batch = watched.malloc(BLOCK, loader);
            watched.look_from(&batch, loader, training);
            let stall = rig.stall([loader, third][busy].handle());
            if busy == 1 {
                watched.look_from(&batch, loader, third);
                loader.synchronize().unwrap();
            }
            watched.free(batch, loader);
            let more = watched.malloc(BLOCK, training);
            assert_ne!(more.address(), batch.address(), "{busy}");
            drop(stall);
            watched.free(more, training);
            watched.assert_intact();
        }
    });
}

#[test]
fn memory_is_kept_until_the_other_streams_use_is_over() {
    Rig::each(|rig, profile| {
        for bytes in SIZES {
            let watched = rig.pool(profile);
            let (own, side) = (rig.stream(), rig.stream());
            let held = watched.malloc(bytes, &own);
            let stall = rig.stall(side.handle());
            watched.look_from(&held, &own, &side);
            let before = rig.driver.calls();
            watched.free(held, &own);
            assert_kept(&watched, &held, &own);
            let waits = rig.driver.calls().since(&before).count("cuStreamWaitEvent");
            assert_eq!(waits, 0, "no stream waits for it");
            own.synchronize().unwrap(); // returns, though the other stream is stuck
            assert_kept(&watched, &held, &own);
            drop(stall);
            assert_found_again(&watched, bytes, &own);
            watched.assert_intact();
        }
    });
}

#[test]
fn a_use_that_nobody_noted_is_a_race() {
    // That the tests here would notice.
    for profile in Profile::TESTED {
        let rig = Rig::on(Simulator::builder().schedule(Schedule::Manual).build().unwrap());
        let sim = rig.sim.clone().expect("a simulated rig");
        let watched = rig.pool(*profile);
        let (own, side) = (rig.stream(), rig.stream());
        let held = watched.malloc(BLOCK, &own);
        rig.order(&own, &side);
        held.check(&rig, &side);
        watched.free(held, &own);
        let again = watched.malloc(BLOCK, &own);
        assert_eq!(again.address(), held.address());
        rig.device.synchronize().unwrap();
        assert!(!sim.report().races.is_empty());
    }
}

#[test]
fn memory_is_kept_until_the_last_of_many_uses_is_over() {
    Rig::each(|rig, profile| {
        for bytes in SIZES {
            let watched = rig.pool(profile);
            let own = rig.stream();
            let sides = [(); 8].map(|()| rig.stream());
            let held = watched.malloc(bytes, &own);
            let mut stalls: Vec<_> = sides.iter().map(|side| rig.stall(side.handle())).collect();
            sides.iter().for_each(|side| watched.look_from(&held, &own, side));
            watched.free(held, &own);
            while let Some(stall) = stalls.pop() {
                assert_kept(&watched, &held, &own);
                drop(stall);
                sides[stalls.len()].synchronize().unwrap();
            }
            assert_found_again(&watched, bytes, &own);
            watched.assert_intact();
        }
    });
}

#[test]
fn many_allocations_are_used_on_one_stream() {
    Rig::each(|rig, profile| {
        let watched = rig.pool(profile);
        let (own, side) = (rig.stream(), rig.stream());
        let held: Vec<_> = (0..12)
            .map(|index| watched.malloc([1000, GRANULE, 3 * GRANULE][index % 3], &own))
            .collect();
        let stall = rig.stall(side.handle());
        held.iter().for_each(|held| watched.look_from(held, &own, &side));
        held.iter().for_each(|held| watched.free(*held, &own));
        held.iter().for_each(|held| assert_kept(&watched, held, &own));
        drop(stall);
        assert_found_again(&watched, GRANULE, &own);
        watched.assert_intact();
    });
}

/// A side stream that is far behind: no free looks through all those before it.
#[test]
fn frees_that_wait_take_no_time_by_the_square_of_their_number() {
    const FREES: u64 = 50_000;
    let rig = Rig::simulated(Schedule::Eager);
    let pool = Profile::Default.open(&rig.device, &Settings::default()).expect("a pool");
    let (own, side) = (rig.stream(), rig.stream());
    let stall = rig.stall(side.handle());
    let start = Instant::now();
    for _ in 0..FREES {
        let ptr = pool.malloc(512, &own).expect("memory");
        pool.record_stream(ptr, &side).expect("the use is noted");
        pool.free(ptr, &own).expect("the free");
    }
    let took = start.elapsed();
    assert_eq!(pool.stats().pending_bytes, FREES * 512);
    drop(stall);
    rig.device.synchronize().expect("the device");
    assert_eq!(pool.stats().pending_bytes, 0, "{}", pool.layout());
    pool.validate().expect("the books");
    assert!(took < Duration::from_secs(2), "{took:?}");
}

#[test]
fn what_was_used_is_free_again_though_the_other_stream_has_more_to_do() {
    Rig::everywhere(|rig| {
        let watched = rig.pool(Profile::Default);
        let (own, side) = (rig.stream(), rig.stream());
        // More of them than events are kept.
        let held: Vec<_> = (0..12).map(|_| watched.malloc(BLOCK, &own)).collect();
        for held in &held {
            watched.look_from(held, &own, &side);
            watched.free(*held, &own);
        }
        // Not by the library, which would take note.
        call!(rig.driver, cuCtxSynchronize());
        let stall = rig.stall(side.handle());
        let mapped = watched.mapped();
        let again: Vec<_> = held.iter().map(|_| watched.malloc(BLOCK, &own)).collect();
        assert_eq!(watched.mapped(), mapped, "{}", watched.layout());
        drop(stall);
        again.into_iter().for_each(|held| watched.free(held, &own));
        watched.assert_intact();
    });
}

#[test]
fn a_stream_noted_twice_or_freed_on_is_noted_once_or_not_at_all() {
    Rig::each(|rig, profile| {
        for bytes in SIZES {
            let watched = rig.pool(profile);
            let (own, side) = (rig.stream(), rig.stream());
            // The events that are needed are there.
            let held = watched.malloc(bytes, &own);
            watched.look_from(&held, &own, &side);
            watched.free(held, &own);
            call!(rig.driver, cuCtxSynchronize());
            let held = watched.malloc(bytes, &own);
            (0..3).for_each(|_| watched.look_from(&held, &own, &side));
            watched.pool.record_stream(held.ptr, &own).unwrap();
            let before = rig.driver.calls();
            watched.free(held, &own);
            let calls = rig.driver.calls().since(&before);
            assert!(calls.count("cuEventRecord") <= 2, "one for each stream: {calls:?}");
            // Freed on the stream that is noted, by one that orders itself behind the other's work.
            let held = watched.malloc(bytes, &own);
            watched.look_from(&held, &own, &side);
            let stall = rig.stall(side.handle());
            watched.free(held, &side);
            let again = watched.malloc(bytes, &side);
            assert_eq!(again.address(), held.address(), "as if nothing had been noted");
            drop(stall);
            watched.free(again, &side);
            watched.assert_intact();
        }
    });
}

#[test]
fn a_stream_may_end_before_the_free() {
    Rig::each(|rig, profile| {
        for bytes in SIZES {
            let watched = rig.pool(profile);
            let (own, side) = (rig.stream(), rig.stream());
            let held = watched.malloc(bytes, &own);
            let stall = rig.stall(side.handle());
            watched.look_from(&held, &own, &side);
            drop(side); // its work goes on
            // Whoever gets its handle is not taken for it.
            let next = [(); 4].map(|()| rig.stream());
            watched.free(held, &own);
            assert_kept(&watched, &held, &own);
            drop(stall);
            assert_found_again(&watched, bytes, &own);
            watched.assert_intact();
            drop(next);
        }
    });
}

/// Whoever lends the stream tells of its end, and destroys it then.
#[test]
fn a_stream_noted_by_its_bare_handle_may_end_before_the_free_if_it_was_lent_since() {
    Rig::each(|rig, profile| {
        for (bytes, was_freed_on) in
            SIZES.into_iter().flat_map(|bytes| [(bytes, false), (bytes, true)])
        {
            let watched = rig.pool(profile);
            let own = rig.stream();
            let (raw, bare) = make(rig, 1);
            if was_freed_on {
                let held = watched.malloc(bytes, bare);
                watched.free(held, bare);
            }
            let held = watched.malloc(bytes, &own);
            let stall = rig.stall(bare);
            watched.look_from(&held, &own, bare);
            // SAFETY: the stream is destroyed after the last use of this.
            let lent = unsafe { Stream::borrowed(&rig.device, bare) }.expect("a lent stream");
            watched.pool.record_stream(held.ptr, &lent).expect("noted again");
            drop(lent);
            call!(rig.driver, cuStreamDestroy_v2(raw)); // its work goes on
            watched.free(held, &own);
            assert_kept(&watched, &held, &own);
            drop(stall);
            assert_found_again(&watched, bytes, &own);
            watched.assert_intact();
        }
    });
}

/// A loan that is over is not the stream's end but for what was noted by then: it is used again, by its bare handle or
/// lent once more.
#[test]
fn a_stream_noted_while_it_was_lent_is_waited_for_when_it_is_noted_again() {
    Rig::each(|rig, profile| {
        for (bytes, lend_again) in SIZES.into_iter().flat_map(|of| [(of, false), (of, true)]) {
            let watched = rig.pool(profile);
            let own = rig.stream();
            let (raw, bare) = make(rig, 1);
            // SAFETY: the stream is destroyed at the end of the test.
            let lend = || unsafe { Stream::borrowed(&rig.device, bare) }.expect("a lent stream");
            let held = watched.malloc(bytes, &own);
            let lent = lend();
            watched.look_from(&held, &own, &lent);
            drop(lent);
            call!(rig.driver, cuCtxSynchronize());
            let lent = lend_again.then(lend);
            let side = lent.as_ref().map_or(bare, Stream::handle);
            let stall = rig.stall(side);
            watched.look_from(&held, &own, side);
            watched.free(held, &own);
            assert_kept(&watched, &held, &own);
            drop(stall);
            assert_found_again(&watched, bytes, &own);
            watched.assert_intact();
            drop(lent);
            call!(rig.driver, cuStreamDestroy_v2(raw));
        }
    });
}

#[test]
fn a_stream_may_end_after_the_free() {
    Rig::each(|rig, profile| {
        for bytes in SIZES {
            let watched = rig.pool(profile);
            let (own, side) = (rig.stream(), rig.stream());
            let held = watched.malloc(bytes, &own);
            let stall = rig.stall(side.handle());
            watched.look_from(&held, &own, &side);
            watched.free(held, &own);
            drop(side);
            assert_kept(&watched, &held, &own);
            drop(stall);
            assert_found_again(&watched, bytes, &own);
            watched.assert_intact();
        }
    });
}

#[test]
fn the_stream_of_the_free_may_end_first() {
    Rig::each(|rig, profile| {
        for bytes in SIZES {
            let watched = rig.pool(profile);
            let (own, side, other) = (rig.stream(), rig.stream(), rig.stream());
            let held = watched.malloc(bytes, &own);
            let stall = rig.stall(side.handle());
            watched.look_from(&held, &own, &side);
            watched.free(held, &own);
            drop(own);
            assert_kept(&watched, &held, &other);
            drop(stall);
            assert_found_again(&watched, bytes, &other);
            watched.assert_intact();
        }
    });
}

#[test]
fn a_stream_may_be_capturing_at_the_free() {
    Rig::each(|rig, profile| {
        for bytes in SIZES {
            let watched = rig.pool(profile);
            let (own, side) = (rig.stream(), rig.stream());
            let held = watched.malloc(bytes, &own);
            let stall = rig.stall(side.handle());
            watched.look_from(&held, &own, &side);
            begin_capture(rig, side.handle().raw());
            watched.free(held, &own);
            assert_kept(&watched, &held, &own);
            assert_eq!(end_capture(rig, side.handle().raw()), 0, "nothing came into the graph");
            assert_kept(&watched, &held, &own);
            // The event that could not be recorded then is by the next request that lacks memory.
            let more = watched.malloc(8 * bytes, &own);
            watched.free(more, &own);
            drop(stall);
            assert_found_again(&watched, bytes, &own);
            watched.assert_intact();
        }
    });
}

#[test]
fn a_stream_may_end_while_it_captures() {
    Rig::each(|rig, profile| {
        for bytes in SIZES {
            for freed_before in [true, false] {
                let watched = rig.pool(profile);
                let (own, side) = (rig.stream(), rig.stream());
                let held = watched.malloc(bytes, &own);
                let stall = rig.stall(side.handle());
                watched.look_from(&held, &own, &side);
                begin_capture(rig, side.handle().raw());
                if freed_before {
                    watched.free(held, &own);
                }
                drop(side);
                if !freed_before {
                    watched.free(held, &own);
                }
                assert_kept(&watched, &held, &own);
                drop(stall);
                // Nothing tells when its work is over but a wait for the whole device.
                rig.device.synchronize().unwrap();
                assert_found_again(&watched, bytes, &own);
                watched.assert_intact();
            }
        }
    });
}

#[test]
fn a_foreign_stream_may_end_after_the_free() {
    Rig::each(|rig, profile| {
        for bytes in SIZES {
            let watched = rig.pool(profile);
            let own = rig.stream();
            let (raw, side) = make(rig, 1);
            let held = watched.malloc(bytes, &own);
            let stall = rig.stall(side);
            watched.look_from(&held, &own, side);
            watched.free(held, &own);
            call!(rig.driver, cuStreamDestroy_v2(raw));
            assert_kept(&watched, &held, &own);
            drop(stall);
            assert_found_again(&watched, bytes, &own);
            watched.assert_intact();
        }
    });
}

#[test]
fn a_threads_default_stream_is_waited_for_when_another_thread_frees() {
    Rig::each(|rig, profile| {
        for bytes in SIZES {
            let watched = rig.pool(profile);
            let own = rig.stream();
            let held = watched.malloc(bytes, &own);
            // The thread lives until its work is over: a GPU's driver has it wait for that.
            let (tell, told) = mpsc::channel();
            let (end, ends) = mpsc::channel::<()>();
            std::thread::scope(|scope| {
                let (watched, own, held) = (&watched, &own, &held);
                scope.spawn(move || {
                    let stall = rig.stall(StreamHandle::PER_THREAD);
                    watched.look_from(held, own, StreamHandle::PER_THREAD);
                    tell.send(stall).unwrap();
                    // Nothing is sent: the other end goes.
                    let _ = ends.recv();
                });
                let stall = told.recv().unwrap();
                watched.free(*held, own);
                assert_kept(watched, held, own);
                drop(stall);
                rig.device.synchronize().unwrap();
                assert_found_again(watched, bytes, own);
                drop(end);
            });
            watched.assert_intact();
        }
    });
}

/// When that is over nothing waits for it any more, though something else that its stream uses is allocated still: a
/// request that finds no memory does not wait for work that has nothing to do with the pool.
#[test]
fn a_threads_default_stream_is_waited_for_no_longer_than_what_was_freed() {
    for profile in Profile::BOTH {
        let rig = Rig::simulated(Schedule::Eager);
        let settings = Settings::default();
        let watched = rig.pool_with(profile, &settings);
        let own = rig.stream();
        let [freed, kept] = [(); 2].map(|()| watched.malloc(GRANULE, &own));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let before = watched.malloc(GRANULE, StreamHandle::PER_THREAD);
                watched.free(before, StreamHandle::PER_THREAD);
                watched.look_from(&freed, &own, StreamHandle::PER_THREAD);
                watched.look_from(&kept, &own, StreamHandle::PER_THREAD);
            });
        });
        watched.free(freed, &own);
        rig.device.synchronize().unwrap();
        assert_eq!(watched.pool.stats().deferred_bytes, 0);
        // What has finished there is known, too.
        watched.pool.trim_to(0).unwrap();
        let other = rig.stream();
        let stall = rig.stall(other.handle());
        let bytes = settings.limit_bytes.unwrap() as usize;
        let waited = std::thread::scope(|scope| {
            let request = scope.spawn(|| watched.pool.malloc(bytes, &own));
            let start = Instant::now();
            while !request.is_finished() && start.elapsed() < Duration::from_secs(5) {
                std::thread::sleep(Duration::from_millis(1));
            }
            let waited = !request.is_finished();
            drop(stall);
            assert!(request.join().unwrap().unwrap_err().is_out_of_memory());
            waited
        });
        assert!(!waited, "{profile:?}");
        watched.free(kept, &own);
        watched.assert_intact();
    }
}

/// What that thread freed before has an event, which says nothing of what its stream used since.
#[test]
fn a_threads_default_stream_is_waited_for_though_what_it_freed_before_has_passed() {
    Rig::each(|rig, profile| {
        for bytes in SIZES {
            let watched = rig.pool(profile);
            let own = rig.stream();
            let held = watched.malloc(bytes, &own);
            let (tell, told) = mpsc::channel();
            let (end, ends) = mpsc::channel::<()>();
            std::thread::scope(|scope| {
                let (watched, own, held) = (&watched, &own, &held);
                scope.spawn(move || {
                    let before = watched.malloc(GRANULE, StreamHandle::PER_THREAD);
                    watched.free(before, StreamHandle::PER_THREAD);
                    let stall = rig.stall(StreamHandle::PER_THREAD);
                    watched.look_from(held, own, StreamHandle::PER_THREAD);
                    tell.send(stall).unwrap();
                    // Nothing is sent: the other end goes.
                    let _ = ends.recv();
                });
                let stall = told.recv().unwrap();
                watched.free(*held, own);
                for _ in 0..2 {
                    assert_kept(watched, held, own);
                    watched.pool.trim_to(0).unwrap();
                }
                drop(stall);
                rig.device.synchronize().unwrap();
                assert_found_again(watched, bytes, own);
                drop(end);
            });
            watched.assert_intact();
        }
    });
}

#[test]
fn the_hosts_wait_for_the_other_stream_needs_no_question() {
    Rig::each(|rig, profile| {
        for bytes in [GRANULE, BLOCK] {
            let watched = rig.pool(profile);
            let (own, side) = (rig.stream(), rig.stream());
            let held = watched.malloc(bytes, &own);
            watched.look_from(&held, &own, &side);
            watched.free(held, &own);
            side.synchronize().unwrap();
            let before = rig.driver.calls();
            let again = watched.malloc(bytes, &own);
            assert_eq!(again.address(), held.address());
            let calls = rig.driver.calls().since(&before);
            assert_eq!((calls.count("cuEventQuery"), calls.count("cuMemCreate")), (0, 0));
            watched.free(again, &own);
            watched.assert_intact();
        }
    });
}

#[test]
fn questions_about_uses_are_asked_though_they_may_give_no_memory_away() {
    Rig::each(|rig, profile| {
        for bytes in SIZES {
            let mut settings = Settings::default();
            settings.reuse.opportunistic = false;
            let watched = rig.pool_with(profile, &settings);
            let (own, side) = (rig.stream(), rig.stream());
            let of_side = watched.malloc(bytes, &side);
            let held = watched.malloc(bytes, &own);
            let stall = rig.stall(side.handle());
            watched.look_from(&held, &own, &side);
            watched.free(held, &own);
            watched.free(of_side, &side);
            assert_kept(&watched, &held, &own);
            drop(stall);
            call!(rig.driver, cuCtxSynchronize());
            // Its own stream has it back. What the other freed, which the same answer tells of, it
            // has not.
            let again: Vec<_> = (0..8).map(|_| watched.malloc(bytes, &own)).collect();
            let addresses: Vec<_> = again.iter().map(Held::address).collect();
            // The default profile asks when nothing else is left of a granule.
            let asked = bytes >= GRANULE || profile == Profile::Paged;
            assert!(!asked || addresses.contains(&held.address()), "{}", watched.layout());
            if bytes >= GRANULE || profile == Profile::Default {
                // The driver, whose pool serves the others, knows of that wait.
                assert!(!addresses.contains(&of_side.address()), "{}", watched.layout());
            }
            again.into_iter().for_each(|held| watched.free(held, &own));
            watched.assert_intact();
        }
    });
}

#[test]
fn what_is_kept_is_free_to_its_owner_and_named_so() {
    Rig::each(|rig, profile| {
        for bytes in SIZES {
            let watched = rig.pool(profile);
            let (own, side) = (rig.stream(), rig.stream());
            let held = watched.malloc(bytes, &own);
            let stall = rig.stall(side.handle());
            watched.look_from(&held, &own, &side);
            watched.free(held, &own);
            for refused in [
                watched.pool.free(held.ptr, &own),
                watched.pool.free(vpmm::DevicePtr::from_address(held.address()), &own),
                watched.pool.record_stream(held.ptr, &side),
            ] {
                assert!(matches!(refused, Err(Error::DoubleFree { .. })), "{refused:?}");
            }
            let stats = watched.pool.stats();
            assert_eq!((stats.live_bytes, stats.live_count), (0, 0));
            assert_eq!((stats.small_live_bytes, stats.small_live_count), (0, 0));
            assert_eq!(watched.pool.allocation(held.address()), None);
            if bytes >= GRANULE {
                assert_eq!(stats.free_bytes() + stats.cached_bytes, bytes, "{}", watched.layout());
                assert_eq!(watched.pool.trim_to(0).unwrap(), 0, "it is in use");
            }
            drop(stall);
            call!(rig.driver, cuCtxSynchronize());
            // Twice, since the first may have to give a small one to the driver, in stream order.
            watched.pool.trim_to(0).unwrap();
            call!(rig.driver, cuCtxSynchronize());
            watched.pool.trim_to(0).unwrap();
            assert_eq!(watched.mapped(), 0, "{}", watched.layout());
            watched.assert_intact();
        }
    });
}

#[test]
fn what_is_no_allocation_is_noted_nowhere() {
    Rig::each(|rig, profile| {
        let (watched, other) = (rig.pool(profile), rig.pool(profile));
        let (own, side) = (rig.stream(), rig.stream());
        for bytes in SIZES {
            let held = watched.malloc(bytes, &own);
            let inside = vpmm::DevicePtr::from_address(held.address() + 512);
            let refused = watched.pool.record_stream(inside, &side);
            assert!(matches!(refused, Err(Error::InteriorPointer { .. })), "{refused:?}");
            let refused = other.pool.record_stream(held.ptr, &side);
            let named =
                matches!(refused, Err(Error::ForeignPointer { .. } | Error::DoubleFree { .. }));
            assert!(named, "{refused:?}");
            watched.free(held, &own);
            let refused = watched.pool.record_stream(held.ptr, &side);
            assert!(matches!(refused, Err(Error::DoubleFree { .. })), "{refused:?}");
            // The next allocation there has nobody else's use on it.
            let again = watched.malloc(bytes, &own);
            let before = rig.driver.calls();
            watched.free(again, &own);
            let records = rig.driver.calls().since(&before).count("cuEventRecord");
            assert!(records <= 1, "{records} records");
        }
        watched.assert_intact();
    });
}

#[test]
fn a_pool_that_ends_waits_for_uses_too() {
    for schedule in [Schedule::Late { patience: 50 }, Schedule::Random] {
        for profile in Profile::TESTED {
            let rig = Rig::simulated(schedule);
            let sim = rig.sim.clone().expect("a simulated rig");
            {
                let watched = rig.pool(*profile);
                let (own, side) = (rig.stream(), rig.stream());
                let held = SIZES.map(|bytes| watched.malloc(bytes, &own));
                held.iter().for_each(|held| watched.look_from(held, &own, &side));
                held.iter().for_each(|held| watched.free(*held, &own));
                // Some of the work has yet to come to its turn.
            }
            drop(rig);
            sim.assert_clean();
            assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
        }
    }
}

/// Nothing tells when the work of a thread's own stream is over once the thread has ended, nor that of a stream which
/// ended in its capture. A request that may wait for the GPU waits for the device then, and not beside a capture.
#[test]
fn a_request_waits_for_what_only_the_device_can_tell_of() {
    for profile in Profile::TESTED {
        for (is_thread, bytes) in [(true, BLOCK), (false, BLOCK), (true, 1000), (false, 1000)] {
            if bytes < BLOCK && *profile == Profile::Default {
                continue; // keeps a granule for such blocks
            }
            let rig = Rig::simulated(Schedule::Manual);
            let watched = rig.pool(*profile);
            let (own, capturing) = (rig.stream(), rig.stream());
            let held = watched.malloc(bytes, &own);
            own.synchronize().unwrap();
            if is_thread {
                std::thread::scope(|scope| {
                    let look = || watched.look_from(&held, &own, StreamHandle::PER_THREAD);
                    scope.spawn(look).join().unwrap();
                });
                watched.free(held, &own);
            } else {
                let side = rig.stream();
                watched.look_from(&held, &own, &side);
                begin_capture(&rig, side.handle().raw());
                watched.free(held, &own);
            }
            own.synchronize().unwrap();
            begin_capture(&rig, capturing.handle().raw());
            let most = Settings::default().limit_bytes.unwrap();
            let refused = watched.try_malloc(most, &own);
            assert!(refused.is_err_and(|error| error.is_out_of_memory()));
            assert_eq!(end_capture(&rig, capturing.handle().raw()), 0);
            let all = watched.malloc(most, &own);
            watched.free(all, &own);
            watched.assert_intact();
        }
    }
}

/// What events tell of comes first: where that is enough nobody waits for the device.
#[test]
fn a_request_does_not_wait_for_the_device_where_streams_are_enough() {
    for profile in Profile::TESTED {
        let rig = Rig::simulated(Schedule::Manual);
        let mut settings = Settings::default();
        settings.reuse.internal_dependencies = false;
        let watched = rig.pool_with(*profile, &settings);
        let (own, other) = (rig.stream(), rig.stream());
        let most = settings.limit_bytes.unwrap() / GRANULE;
        let held = watched.malloc(GRANULE, &own);
        let rest = watched.malloc((most - 1) * GRANULE, &other);
        own.synchronize().unwrap();
        std::thread::scope(|scope| {
            let look = || watched.look_from(&held, &own, StreamHandle::PER_THREAD);
            scope.spawn(look).join().unwrap();
        });
        watched.free(held, &own);
        watched.free(rest, &other);
        let calls = |bytes: u64| {
            let before = rig.driver.calls();
            let held = watched.malloc(bytes, &own);
            watched.free(held, &own);
            rig.driver.calls().since(&before).count("cuCtxSynchronize")
        };
        assert_eq!(calls((most - 1) * GRANULE), 0, "{profile:?}");
        assert_eq!(calls(most * GRANULE), 1, "{profile:?}");
        watched.assert_intact();
    }
}

/// What only a wait for the device would prove free is left to the driver where another stream captures: that wait
/// is refused, and would end the capture for nothing.
#[test]
fn a_pool_that_ends_beside_a_capture_leaves_that_alone() {
    for profile in Profile::TESTED {
        for bytes in SIZES {
            let rig = Rig::simulated(Schedule::Eager);
            let pool = profile.open(&rig.device, &Settings::default()).unwrap();
            let (own, side, capturing) = (rig.stream(), rig.stream(), rig.stream());
            let ptr = pool.malloc(bytes as usize, &own).unwrap();
            pool.record_stream(ptr, &side).unwrap();
            begin_capture(&rig, side.handle().raw());
            pool.free(ptr, &own).unwrap();
            // Nobody will know when its work is over.
            drop(side);
            begin_capture(&rig, capturing.handle().raw());
            drop(pool);
            assert_eq!(end_capture(&rig, capturing.handle().raw()), 0, "{profile:?}, {bytes}");
            rig.assert_clean();
        }
    }
}

#[test]
fn a_free_that_fails_leaves_allocation_and_uses_as_they_were() {
    for profile in Profile::TESTED {
        for bytes in SIZES {
            for n in 1.. {
                let rig = Rig::on(Simulator::builder().schedule(Schedule::Manual).build().unwrap());
                let sim = rig.sim.clone().expect("a simulated rig");
                let watched = rig.pool(*profile);
                let (own, first, second) = (rig.stream(), rig.stream(), rig.stream());
                let held = watched.malloc(bytes, &own);
                watched.look_from(&held, &own, &first);
                watched.look_from(&held, &own, &second);
                sim.fail_call(n, CUresult::CUDA_ERROR_UNKNOWN);
                let failed = watched.pool.free(held.ptr, &own);
                sim.clear_faults();
                watched.validate();
                if failed.is_ok() {
                    // The default profile records nothing at a free.
                    assert!(n > 3 || *profile == Profile::Default, "only {n} calls");
                    break;
                }
                assert_eq!(
                    watched.pool.allocation(held.address()).map(|of| of.start),
                    Some(held.ptr)
                );
                // More work on the noted streams after the failure: the free that succeeds covers it.
                // What was recorded by the one that failed is complete, and means nothing.
                sim.run_until_idle();
                let sides = if n % 2 == 0 { [&first, &second] } else { [&second, &first] };
                let stalls = sides.map(|side| {
                    let stall = rig.stall(side.handle());
                    held.check(&rig, side);
                    stall
                });
                watched.free(held, &own);
                own.synchronize().unwrap();
                for (stall, side) in stalls.into_iter().zip(sides) {
                    assert_kept(&watched, &held, &own);
                    drop(stall);
                    side.synchronize().unwrap();
                }
                assert_found_again(&watched, bytes, &own);
                watched.assert_intact();
            }
        }
    }
}

/// Threads that have ended leave uses on their own streams that nobody can record on: a request asks the driver no more
/// where they were many.
#[test]
fn ended_threads_cost_later_requests_no_driver_calls_each() {
    for profile in Profile::TESTED {
        let rig = Rig::simulated(Schedule::Eager);
        let pool = profile.open(&rig.device, &Settings::default()).unwrap();
        let own = rig.stream();
        let calls_after = |threads: usize| {
            for _ in 0..threads {
                let ptr = pool.malloc(GRANULE as usize, &own).unwrap();
                std::thread::scope(|scope| {
                    scope.spawn(|| pool.record_stream(ptr, StreamHandle::PER_THREAD).unwrap());
                });
                pool.free(ptr, &own).unwrap();
            }
            let before = rig.driver.calls();
            let ptr = pool.malloc(BLOCK as usize, &own).unwrap();
            let after = rig.driver.calls().since(&before);
            pool.free(ptr, &own).unwrap();
            ["cuStreamIsCapturing", "cuStreamGetId", "cuEventQuery"].map(|call| after.count(call))
        };
        let after_few = calls_after(2);
        assert_eq!(calls_after(50), after_few, "{profile:?}");
    }
}

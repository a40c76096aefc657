//! Streams of every kind: that end, whose handles come again, that capture, and the default ones.

use cuda_sim::Schedule;
use cuda_sys::types::CUresult;
use vpmm::{Error, Stream, StreamHandle, WaitPolicy};

use crate::rig::{GRANULE, KIB, MIB, bare, config};
use crate::support::streams::{begin_capture, end_capture, make};
use crate::support::{Rig, call};

const NON_BLOCKING: u32 = 1;

/// The handle is the old stream's, the stream is not: what the old one freed waits for its event.
#[test]
fn a_handle_that_comes_again_is_another_stream() {
    for bytes in [64 << 10, MIB, 3 * GRANULE] {
        let rig = Rig::simulated(Schedule::Manual);
        let watched = rig.pool(&config(12, 96));
        let (old, handle) = make(&rig, NON_BLOCKING);
        let held = watched.malloc(bytes, handle);
        watched.free(held, handle);
        call!(rig.driver, cuStreamDestroy_v2(old));
        let (new, handle) = make(&rig, NON_BLOCKING);
        assert_eq!(new, old, "the simulator hands the last handle out again");
        let other = watched.malloc(bytes, handle);
        assert_ne!(other.address(), held.address(), "the old stream's check has not run");
        rig.device.synchronize().unwrap();
        let third = watched.malloc(bytes, handle);
        watched.free(third, handle);
        watched.free(other, handle);
        rig.device.synchronize().unwrap();
        // Nothing is lost but what small blocks may keep.
        let stream = rig.stream();
        let all = watched.malloc(11 * GRANULE, &stream);
        watched.free(all, &stream);
        call!(rig.driver, cuStreamDestroy_v2(new));
        watched.assert_intact();
    }
}

#[test]
fn what_a_stream_freed_before_its_end_is_everybodys_when_it_has_finished() {
    let rig = Rig::simulated(Schedule::Manual);
    let watched = rig.pool(&config(12, 96));
    let other = rig.stream();
    let ending = rig.stream();
    let held = [MIB, 3 * GRANULE, 64 << 10].map(|bytes| watched.malloc(bytes, &ending));
    held.into_iter().for_each(|held| watched.free(held, &ending));
    drop(ending); // with all its work to do
    watched.validate();
    let early = watched.malloc(3 * GRANULE, &other);
    assert!(held.iter().all(|held| held.address() != early.address()), "still in use");
    watched.free(early, &other);
    rig.device.synchronize().unwrap();
    let late = watched.malloc(11 * GRANULE, &other);
    watched.free(late, &other);
    watched.assert_intact();
}

/// A foreign stream that was to come after another one, and never freed anything, leaves its place at once: whoever has
/// that next comes after nobody.
#[test]
fn what_a_stream_came_after_is_not_its_successors() {
    for ours in [false, true] {
        let rig = Rig::simulated(Schedule::Manual);
        let watched = rig.pool(&config(12, 96));
        let freeing = rig.stream();
        let held = watched.malloc(4 * GRANULE, &freeing);
        watched.free(held, &freeing);
        let mark = watched.pool.mark(&freeing).unwrap();
        let (old, handle) = make(&rig, NON_BLOCKING);
        rig.order(&freeing, handle);
        watched.pool.follows(handle, &mark).unwrap();
        call!(rig.driver, cuStreamDestroy_v2(old));
        let (raw, foreign) = make(&rig, NON_BLOCKING);
        let library = rig.stream();
        let next = if ours { library.handle() } else { foreign };
        let other = watched.malloc(4 * GRANULE, next);
        assert_ne!(
            other.address(),
            held.address(),
            "what was written there has not been looked at"
        );
        assert_eq!(watched.pool.stats().stream_count, 2, "it has the place");
        watched.free(other, next);
        watched.assert_intact();
        call!(rig.driver, cuStreamDestroy_v2(raw));
    }
}

#[test]
fn streams_that_come_and_go_leave_nothing() {
    for schedule in [Schedule::Eager, Schedule::Late { patience: 5 }, Schedule::Manual] {
        let rig = Rig::simulated(schedule);
        let watched = rig.pool(&config(32, 192));
        let keeper = rig.stream();
        let first = watched.malloc(MIB, &keeper);
        let events = |rig: &Rig| rig.sim.as_ref().map_or(0, |sim| sim.leaks().events);
        for round in 0..300_u64 {
            let stream = rig.stream();
            let held = watched.malloc((1 + round % 5) * MIB, &stream);
            watched.free(held, &stream);
            let (raw, handle) = make(&rig, NON_BLOCKING);
            let held = watched.malloc((1 + round % 3) * MIB, handle);
            watched.free(held, handle);
            call!(rig.driver, cuStreamDestroy_v2(raw));
            if round % 50 == 49 {
                rig.device.synchronize().unwrap();
                let held = watched.malloc(30 * GRANULE, &keeper);
                watched.free(held, &keeper);
                watched.validate();
            }
        }
        let stats = watched.pool.stats();
        assert!(stats.stream_count <= 220, "{} streams are remembered", stats.stream_count);
        assert!(events(&rig) <= 2 * 220 + 64, "{} events are kept", events(&rig));
        watched.free(first, &keeper);
        watched.assert_intact();
    }
}

/// Nobody lacks memory meanwhile, and nobody asks.
#[test]
fn streams_that_come_and_go_one_after_another_share_a_place() {
    for kind in [0, 1] {
        let rig = Rig::simulated(Schedule::Eager);
        let watched = rig.small_pool();
        let before = rig.sim.as_ref().unwrap().leaks().events;
        for _ in 0..400 {
            let (stream, raw) = (rig.stream(), make(&rig, NON_BLOCKING));
            let handle = if kind == 0 { stream.handle() } else { raw.1 };
            let held = watched.malloc(1000, handle);
            watched.free(held, handle);
            call!(rig.driver, cuStreamDestroy_v2(raw.0));
        }
        let events = rig.sim.as_ref().unwrap().leaks().events - before;
        assert!(events < 40, "{events} events are kept");
        assert_eq!(watched.usage(), 1);
        watched.assert_intact();
    }
}

#[test]
fn the_legacy_stream_is_one_of_the_pools_own() {
    Rig::everywhere(|rig| {
        let watched = rig.pool(&config(1, 64));
        let warm = watched.malloc(GRANULE, StreamHandle::LEGACY);
        watched.free(warm, StreamHandle::LEGACY);
        let before = rig.driver.calls();
        for _ in 0..100 {
            let ptr = watched.pool.malloc(GRANULE as usize, StreamHandle::LEGACY).unwrap();
            watched.pool.free(ptr, StreamHandle::LEGACY).unwrap();
        }
        assert_eq!(rig.driver.calls().since(&before).total(), 0);
        // A stream that does not wait for it gets its memory all the same.
        let stream = rig.stream();
        let held = watched.malloc(GRANULE, &stream);
        watched.free(held, &stream);
        watched.assert_intact();
    });
}

#[test]
fn memory_of_the_legacy_stream_is_not_given_away_while_it_is_busy() {
    let rig = Rig::simulated(Schedule::Manual);
    let watched = rig.small_pool();
    let stream = rig.stream();
    let held = watched.malloc(4 * GRANULE, StreamHandle::LEGACY);
    watched.free(held, StreamHandle::LEGACY);
    let other = watched.malloc(4 * GRANULE, &stream);
    assert_ne!(other.address(), held.address());
    watched.free(other, &stream);
    watched.assert_intact();
}

#[test]
fn each_thread_has_its_own_default_stream() {
    Rig::everywhere(|rig| {
        let watched = rig.pool(&config(8, 64));
        let per_thread = StreamHandle::PER_THREAD;
        std::thread::scope(|scope| {
            let threads = [(); 3].map(|()| {
                scope.spawn(|| {
                    let held = watched.malloc(2 * GRANULE, per_thread);
                    watched.free(held, per_thread);
                })
            });
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
        // The threads and their streams are gone; their memory is not.
        let held = watched.malloc(8 * GRANULE, per_thread);
        watched.free(held, per_thread);
        watched.assert_intact();
    });
}

#[test]
fn a_stream_of_the_library_may_capture() {
    Rig::everywhere(|rig| {
        let watched = rig.pool(&config(24, 192));
        let (capturing, other) = (rig.stream(), rig.stream());
        let held = [MIB, 2 * GRANULE].map(|bytes| watched.malloc(bytes, &capturing));
        let pool = &watched.pool;
        begin_capture(rig, capturing.handle().raw());
        // From the front and back, from behind it, and by growth.
        held.iter().for_each(|held| pool.free(held.ptr, &capturing).unwrap());
        for bytes in [MIB, 2 * GRANULE, 700, 9 * GRANULE] {
            let ptr = pool.malloc(bytes as usize, &capturing).unwrap();
            pool.free(ptr, &capturing).unwrap();
        }
        // Another stream wants memory meanwhile: what the capturing one freed cannot be asked for.
        let large = pool.malloc(12 * GRANULE as usize, &other).unwrap();
        pool.free(large, &other).unwrap();
        watched.validate();
        assert_eq!(end_capture(rig, capturing.handle().raw()), 0, "nodes");
        rig.device.synchronize().unwrap();
        // All but what small blocks may have kept: nothing of it was lost in the capture.
        let all = pool.malloc(23 * GRANULE as usize, &other).unwrap();
        pool.free(all, &other).unwrap();
        watched.validate();
    });
}

/// Also where it was met by its bare handle, as from another library, and the event of a free by that is under way.
#[test]
fn a_stream_of_the_library_that_was_met_by_its_bare_handle_may_capture() {
    for lent in [false, true] {
        let rig = Rig::simulated(Schedule::Manual);
        let watched = rig.pool(&config(24, 192));
        let (own, other) = (rig.stream(), rig.stream());
        let (raw, foreign) = make(&rig, NON_BLOCKING);
        let by_bare = if lent { foreign } else { bare(&own) };
        // SAFETY: the stream is destroyed behind the loan.
        let borrowed = || unsafe { Stream::borrowed(&rig.device, by_bare) }.unwrap();
        let stream = if lent { borrowed() } else { own };
        let [first, second] = [(); 2].map(|()| watched.malloc(2 * GRANULE, by_bare));
        watched.free(first, by_bare);
        let pool = &watched.pool;
        begin_capture(&rig, by_bare.raw());
        pool.free(second.ptr, &stream).unwrap();
        for bytes in [MIB, 2 * GRANULE] {
            let ptr = pool.malloc(bytes as usize, &stream).unwrap();
            pool.free(ptr, &stream).unwrap();
        }
        // What was written there before the capture has not been looked at.
        let beside = watched.malloc(2 * GRANULE, &other);
        watched.validate();
        assert_eq!(end_capture(&rig, by_bare.raw()), 0, "nodes");
        rig.sim.as_ref().unwrap().run_until_idle();
        watched.free(beside, &other);
        let all = pool.malloc(23 * GRANULE as usize, &other).unwrap();
        pool.free(all, &other).unwrap();
        watched.assert_intact();
        drop(stream);
        call!(rig.driver, cuStreamDestroy_v2(raw));
    }
}

#[test]
fn a_foreign_stream_that_captures_is_refused_and_goes_on_capturing() {
    Rig::everywhere(|rig| {
        let watched = rig.small_pool();
        let (raw, foreign) = make(rig, NON_BLOCKING);
        let held = watched.malloc(2 * GRANULE, foreign);
        for stream in [foreign, StreamHandle::PER_THREAD] {
            begin_capture(rig, stream.raw());
            for error in [
                watched.pool.malloc(MIB as usize, stream).unwrap_err(),
                watched.pool.free(held.ptr, stream).unwrap_err(),
            ] {
                assert!(matches!(error, Error::StreamCapturing), "{error}");
            }
            assert_eq!(end_capture(rig, stream.raw()), 0, "nodes");
        }
        watched.free(held, foreign);
        watched.assert_intact();
        call!(rig.driver, cuStreamDestroy_v2(raw));
    });
}

/// What only a wait for the device would free waits on beside a capture, also of a stream that the pool never met.
#[test]
fn a_capture_of_a_stream_that_the_pool_does_not_know_is_left_alone() {
    Rig::everywhere(|rig| {
        let watched = rig.pool(&config(12, 96));
        let [ended, asking, unknown] = [(); 3].map(|()| rig.stream());
        let pool = &watched.pool;
        let bytes = 11 * GRANULE as usize;
        let ptr = pool.malloc(bytes, &ended).unwrap();
        begin_capture(rig, ended.handle().raw());
        pool.free(ptr, &ended).unwrap();
        drop(ended);
        begin_capture(rig, unknown.handle().raw());
        let refused = pool.malloc(bytes, &asking);
        assert!(refused.as_ref().is_err_and(Error::is_out_of_memory), "{refused:?}");
        assert_eq!(end_capture(rig, unknown.handle().raw()), 0, "nodes");
        let ptr = pool.malloc(bytes, &asking).unwrap();
        pool.free(ptr, &asking).unwrap();
        watched.assert_intact();
    });
}

/// Everything that the pool does on this thread while another of its streams captures in global
/// mode: questions, growth, moves, waits on the device and the host, the end of a pool.
#[test]
fn a_capture_of_another_stream_is_left_alone() {
    Rig::everywhere(|rig| {
        let capturing = rig.stream();
        let mut limited = config(12, 96);
        for policy in [vpmm::PendingPolicy::GrowFirst, vpmm::PendingPolicy::WaitFirst] {
            limited.pending_policy = policy;
            let watched = rig.pool(&limited);
            let (a, b) = (rig.stream(), rig.stream());
            let (raw, foreign) = make(rig, NON_BLOCKING);
            let pool = &watched.pool;
            let malloc = |granules: u64, stream: StreamHandle| {
                pool.malloc((granules * GRANULE) as usize, stream).unwrap()
            };
            // Known before: the first use of a foreign stream asks for its number.
            pool.free(malloc(1, foreign), foreign).unwrap();
            begin_capture(rig, capturing.handle().raw());
            let held = [(); 10].map(|()| malloc(1, a.handle()));
            held.iter().step_by(2).for_each(|ptr| pool.free(*ptr, &a).unwrap());
            let moved = malloc(5, b.handle());
            pool.free(moved, &b).unwrap();
            held.iter().skip(1).step_by(2).for_each(|ptr| pool.free(*ptr, &a).unwrap());
            let all = malloc(11, foreign);
            assert!(pool.malloc(5 * GRANULE as usize, &b).is_err());
            pool.free(all, foreign).unwrap();
            let all = malloc(11, b.handle());
            pool.free(all, &b).unwrap();
            drop(watched);
            assert_eq!(end_capture(rig, capturing.handle().raw()), 0, "nodes, {policy:?}");
            call!(rig.driver, cuStreamDestroy_v2(raw));
        }
    });
}

/// The legacy stream cannot be asked about while a blocking stream captures: not even for an event.
#[test]
fn a_capture_of_a_blocking_stream_is_left_alone_by_the_legacy_streams_memory() {
    Rig::everywhere(|rig| {
        let watched = rig.pool(&config(12, 96));
        let stream = rig.stream();
        let pool = &watched.pool;
        let malloc = |granules: u64, stream: StreamHandle| {
            pool.malloc((granules * GRANULE) as usize, stream).unwrap()
        };
        let of_legacy = malloc(4, StreamHandle::LEGACY);
        let (raw, _) = make(rig, 0);
        begin_capture(rig, raw);
        pool.free(of_legacy, StreamHandle::LEGACY).unwrap();
        let others = [malloc(3, stream.handle()), malloc(4, stream.handle())];
        assert_eq!(end_capture(rig, raw), 0, "nodes");
        others.into_iter().for_each(|ptr| pool.free(ptr, &stream).unwrap());
        // Not lost, now that it can be asked for.
        pool.free(malloc(11, stream.handle()), &stream).unwrap();
        call!(rig.driver, cuStreamDestroy_v2(raw));
        watched.assert_intact();
    });
}

/// A stream that ends within its own capture takes no last event: its memory is found again by
/// waiting for the whole context, when that is all that is left.
#[test]
fn a_stream_that_ends_in_its_capture_does_not_take_its_memory_along() {
    let rig = Rig::simulated(Schedule::Manual);
    let watched = rig.pool(&config(8, 64));
    let (capturing, other) = (rig.stream(), rig.stream());
    let held = watched.malloc(6 * GRANULE, &capturing);
    watched.free(held, &capturing);
    begin_capture(&rig, capturing.handle().raw());
    drop(capturing);
    watched.validate();
    let again = watched.malloc(7 * GRANULE, &other);
    watched.validate();
    watched.free(again, &other);
    watched.assert_intact();
}

/// The driver would not let the pool in when the stream ended, but then let it be destroyed: nothing is asked of its
/// handle any more, and what it freed is had by a wait for the whole context.
#[test]
fn a_stream_whose_end_could_not_be_recorded_is_left_alone() {
    let rig = Rig::simulated(Schedule::Manual);
    let watched = rig.pool(&config(8, 64));
    let (ending, other) = (rig.stream(), rig.stream());
    let held = watched.malloc(6 * GRANULE, &ending);
    watched.free(held, &ending);
    let sim = rig.sim.as_ref().unwrap();
    sim.fail_call(1, CUresult::CUDA_ERROR_UNKNOWN);
    drop(ending);
    sim.clear_faults();
    watched.validate();
    let again = watched.malloc(7 * GRANULE, &other);
    watched.validate();
    watched.free(again, &other);
    watched.assert_intact();
}

/// Addresses that memory has left wait for the stream that used them. That ended without a last event, in a capture
/// or because the driver would not: a wait for the device is behind all that it did, and what has moved can go back.
#[test]
fn addresses_that_wait_for_a_lost_stream_do_so_until_the_device_was_waited_for() {
    for captures in [true, false] {
        let rig = Rig::simulated(Schedule::Manual);
        let sim = rig.sim.clone().unwrap();
        {
            let watched = rig.pool(&config(4, 64));
            let pool = &watched.pool;
            let stream = rig.stream();
            let held = [(); 4].map(|()| watched.malloc(GRANULE, &stream));
            watched.free(held[0], &stream);
            watched.free(held[2], &stream);
            let two = watched.malloc(2 * GRANULE, &stream);
            assert!(pool.stats().zombie_bytes > 0, "{pool:?}");
            for held in [held[1], held[3], two] {
                watched.free(held, &stream);
            }
            // Its closed epoch has an event.
            assert_eq!(pool.trim_to(0).unwrap(), 0);
            if captures {
                begin_capture(&rig, stream.handle().raw());
            } else {
                sim.fail_call(1, CUresult::CUDA_ERROR_UNKNOWN);
            }
            drop(stream);
            sim.clear_faults();
            watched.validate();
            rig.device.synchronize().unwrap();
            watched.validate();
            assert_eq!(pool.trim_to(0).unwrap(), 4 * GRANULE, "{pool:?}");
            assert_eq!(pool.stats().zombie_bytes, 0);
            watched.assert_intact();
        }
        drop(rig);
        assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
    }
}

/// All that a stream did which has ended is over. A wait for the device begins nothing anew of it: what it used, and is
/// freed after that, waits for nothing.
#[test]
fn what_a_stream_used_that_has_ended_waits_for_no_other_wait_for_the_device() {
    let rig = Rig::simulated(Schedule::Manual);
    let watched = rig.pool(&config(8, 64));
    let pool = &watched.pool;
    let (own, further) = (rig.stream(), rig.stream());
    let [first, second] = [(); 2].map(|()| watched.malloc(GRANULE, &own));
    rig.order(own.handle(), further.handle());
    for held in [first, second] {
        held.check(&rig, &further);
        pool.record_stream(held.ptr, &further).unwrap();
    }
    watched.free(first, &own);
    drop(further);
    // The last event of the stream is seen by the trim.
    for _ in 0..2 {
        rig.device.synchronize().unwrap();
        pool.trim_to(u64::MAX).unwrap();
        pool.trim_to(GRANULE).unwrap();
    }
    rig.device.synchronize().unwrap();
    watched.free(second, &own);
    assert_eq!(pool.stats().deferred_bytes, 0, "{pool:?}");
    own.synchronize().unwrap();
    assert_eq!(pool.trim_to(0).unwrap(), GRANULE, "{pool:?}");
    watched.assert_intact();
}

/// A mark from before a stream was lost says nothing of what it freed after that.
#[test]
fn what_a_lost_stream_freed_after_a_mark_that_has_passed_waits_for_the_device() {
    let rig = Rig::simulated(Schedule::Manual);
    let mut settings = config(4, 64);
    settings.out_of_memory = WaitPolicy::FailAtOnce;
    let watched = rig.pool(&settings);
    let (ending, other) = (rig.stream(), rig.stream());
    let held = watched.malloc(3 * GRANULE, &ending);
    call!(rig.driver, cuStreamSynchronize(ending.handle().raw()));
    let mark = watched.pool.mark(&ending).unwrap();
    watched.free(held, bare(&ending));
    begin_capture(&rig, ending.handle().raw());
    drop(ending);
    watched.pool.passed(&mark).unwrap();
    let refused = watched.pool.malloc(2 * GRANULE as usize, &other);
    assert!(matches!(refused, Err(Error::OutOfMemory { .. })), "{refused:?}");
    rig.device.synchronize().unwrap();
    let all = watched.malloc(4 * GRANULE, &other);
    watched.free(all, &other);
    watched.assert_intact();
}

/// What a further stream uses no more is not yet anybody's: the stream that freed it has ended with work to do.
#[test]
fn what_waited_for_another_stream_waits_for_its_own_that_has_ended() {
    let rig = Rig::simulated(Schedule::Eager);
    let mut settings = config(2, 64);
    settings.out_of_memory = WaitPolicy::FailAtOnce;
    settings.reuse.internal_dependencies = false;
    let watched = rig.pool(&settings);
    let (own, side, other) = (rig.stream(), rig.stream(), rig.stream());
    let held = watched.malloc(2 * GRANULE, &own);
    watched.pool.record_stream(held.ptr, &side).unwrap();
    let stall = rig.stall(own.handle());
    watched.free(held, &own);
    let stats = watched.pool.stats();
    assert_eq!((stats.deferred_bytes, stats.pending_count), (2 * GRANULE, 1));
    drop(own);
    let refused = watched.pool.malloc(GRANULE as usize, &other);
    assert!(matches!(refused, Err(Error::OutOfMemory { .. })), "{refused:?}");
    assert_eq!(watched.pool.stats().deferred_bytes, 0, "the further stream has finished");
    drop(stall);
    rig.device.synchronize().unwrap();
    let all = watched.malloc(2 * GRANULE, &other);
    watched.free(all, &other);
    watched.assert_intact();
}

/// And where questions give nothing away it stays with the stream that freed it.
#[test]
fn what_waited_for_another_stream_is_its_own_where_questions_give_nothing_away() {
    let rig = Rig::simulated(Schedule::Eager);
    let mut settings = config(4, 64);
    settings.reuse.opportunistic = false;
    settings.out_of_memory = WaitPolicy::FailAtOnce;
    let watched = rig.pool(&settings);
    let (own, side, other) = (rig.stream(), rig.stream(), rig.stream());
    let known = watched.malloc(GRANULE, &other);
    let held = watched.malloc(GRANULE, &own);
    watched.pool.record_stream(held.ptr, &side).unwrap();
    let stall = rig.stall(side.handle());
    watched.free(held, &own);
    // Asks about both streams, the own one first.
    let deferred_then = || {
        let refused = watched.pool.malloc(5 * GRANULE as usize, &other);
        assert!(refused.is_err(), "{refused:?}");
        watched.pool.stats().deferred_bytes
    };
    assert_eq!(deferred_then(), GRANULE);
    drop(stall);
    assert_eq!(deferred_then(), 0);
    let more = watched.malloc(GRANULE, &other);
    assert_eq!(watched.usage(), 3, "{:?}", watched.pool);
    let again = watched.malloc(GRANULE, &own);
    assert_eq!((again.address(), watched.usage()), (held.address(), 3));
    [known, more].into_iter().for_each(|held| watched.free(held, &other));
    watched.free(again, &own);
    watched.assert_intact();
}

/// Nothing is recorded on a foreign stream that captures, for what it uses either.
#[test]
fn a_free_of_what_a_capturing_foreign_stream_uses_is_refused() {
    let rig = Rig::simulated(Schedule::Eager);
    let watched = rig.small_pool();
    let (own, (raw, foreign)) = (rig.stream(), make(&rig, NON_BLOCKING));
    let held = watched.malloc(MIB, &own);
    watched.pool.record_stream(held.ptr, foreign).unwrap();
    begin_capture(&rig, raw);
    let before = rig.driver.calls();
    let refused = watched.pool.free(held.ptr, &own);
    assert!(matches!(refused, Err(Error::StreamCapturing)), "{refused:?}");
    assert_eq!(rig.driver.calls().since(&before).count("cuEventRecord"), 0);
    assert_eq!(end_capture(&rig, raw), 0, "nodes");
    watched.free(held, &own);
    call!(rig.driver, cuStreamDestroy_v2(raw));
    watched.assert_intact();
}

/// Nobody could record on another thread's default stream: what it uses is free when the host has waited, and not
/// when it begins to.
#[test]
fn what_a_threads_default_stream_uses_is_kept_by_a_wait_that_fails() {
    let rig = Rig::simulated(Schedule::Manual);
    let watched = rig.pool(&config(4, 64));
    let own = rig.stream();
    let held = watched.malloc(GRANULE, &own);
    own.synchronize().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            held.check(&rig, StreamHandle::PER_THREAD);
            watched.pool.record_stream(held.ptr, StreamHandle::PER_THREAD).unwrap();
        });
    });
    watched.free(held, &own);
    let deferred = || watched.pool.stats().deferred_bytes;
    let sim = rig.sim.as_ref().unwrap();
    sim.fail_nth("cuCtxSynchronize", 1, CUresult::CUDA_ERROR_UNKNOWN);
    rig.device.synchronize().unwrap_err();
    assert_eq!(deferred(), GRANULE);
    rig.device.synchronize().unwrap();
    assert_eq!(deferred(), 0);
    watched.assert_intact();
}

/// When a stream ends there may be an event that its closed epoch waits for, another of its last free, and a spare one for
/// the last of all.
#[test]
fn no_event_is_lost_with_a_stream() {
    // A foreign one, whose handle comes again; what it used is allocated still, or not.
    for uses in [false, true] {
        let rig = Rig::simulated(Schedule::Manual);
        let watched = rig.pool(&config(8, 64));
        let (own, (old, handle)) = (rig.stream(), make(&rig, NON_BLOCKING));
        let used = watched.malloc(GRANULE, &own);
        let held = [(); 2].map(|()| watched.malloc(GRANULE, handle));
        if uses {
            watched.pool.record_stream(used.ptr, handle).unwrap();
        }
        for held in held {
            watched.free(held, handle);
            watched.pool.trim_to(0).unwrap();
        }
        call!(rig.driver, cuStreamDestroy_v2(old));
        let (new, handle) = make(&rig, NON_BLOCKING);
        assert_eq!(new, old, "the simulator hands the last handle out again");
        let next = watched.malloc(GRANULE, handle);
        watched.free(next, handle);
        watched.free(used, &own);
        call!(rig.driver, cuStreamDestroy_v2(new));
        watched.assert_intact();
    }
    // One of the library's, whose last record fails. A spare event is there for it.
    let rig = Rig::simulated(Schedule::Eager);
    let watched = rig.pool(&config(8, 64));
    let (own, ending) = (rig.stream(), rig.stream());
    let held = [&own, &ending].map(|of| watched.malloc(GRANULE, of));
    watched.free(held[0], &own);
    watched.pool.trim_to(0).unwrap();
    watched.free(held[1], &ending);
    rig.sim.as_ref().unwrap().fail_nth("cuEventRecord", 1, CUresult::CUDA_ERROR_UNKNOWN);
    drop(ending);
    watched.validate();
    watched.assert_intact();
}

/// What a foreign stream has freed is in an epoch that is closed when it moves, and nothing is freed after that: the
/// event of the last free says of the addresses, too, when nobody uses them any more.
#[test]
fn addresses_that_a_foreign_stream_left_are_unmapped_though_it_frees_nothing_more() {
    let rig = Rig::simulated(Schedule::Manual);
    let watched = rig.pool(&config(4, 96));
    let other = rig.stream();
    let (raw, foreign) = make(&rig, NON_BLOCKING);
    // So that it is not the pool's only one.
    watched.free(watched.malloc(KIB, &other), &other);
    watched.pool.trim_to(0).unwrap();
    let held = [(); 4].map(|()| watched.malloc(GRANULE, foreign));
    let [a, b, c, d] = held;
    [a, c].into_iter().for_each(|held| watched.free(held, foreign));
    // Closes its epoch, which has not passed.
    watched.pool.trim_to(0).unwrap();
    let long = watched.malloc(2 * GRANULE, foreign);
    assert!(watched.pool.stats().zombie_bytes > 0, "{}", watched.layout());
    // Not by the library, which would tell the pool.
    call!(rig.driver, cuCtxSynchronize());
    watched.pool.trim_to(0).unwrap();
    assert_eq!(watched.pool.stats().zombie_bytes, 0, "{}", watched.layout());
    watched.validate();
    [b, d, long].into_iter().for_each(|held| watched.free(held, foreign));
    call!(rig.driver, cuStreamDestroy_v2(raw));
    watched.assert_intact();
}

/// A stream that comes to be a pool's only one finds nobody's memory there, which is not the
/// stream's: what it frees beside that becomes one with it all the same, when it has to.
#[test]
fn an_only_stream_does_not_keep_its_memory_apart_from_nobodys() {
    let rig = Rig::simulated(Schedule::Eager);
    let watched = rig.pool(&config(20, 160));
    let (raw, foreign) = make(&rig, NON_BLOCKING);
    let held = watched.malloc(1000, foreign);
    watched.free(held, foreign);
    // Refused, after everything that was freed has become nobody's.
    assert!(watched.try_malloc(21 * GRANULE, foreign).is_err());
    // Nothing waits for the foreign stream: the next has its place.
    let stream = rig.stream();
    let held = watched.malloc(512, &stream);
    watched.free(held, &stream);
    assert_eq!(watched.pool.stats().stream_count, 1);
    let all = watched.malloc(20 * GRANULE, &stream);
    watched.free(all, &stream);
    call!(rig.driver, cuStreamDestroy_v2(raw));
    watched.assert_intact();
}

/// A passed epoch's memory that stays its stream's becomes one with what that has freed since. Who follows the stream up
/// to a mark between the two has neither.
#[test]
fn what_is_one_with_what_was_freed_after_a_mark_is_not_of_before() {
    let rig = Rig::simulated(Schedule::Manual);
    let mut settings = config(4, 64);
    settings.reuse.opportunistic = false;
    settings.reuse.internal_dependencies = false;
    settings.out_of_memory = vpmm::WaitPolicy::FailAtOnce;
    let watched = rig.pool(&settings);
    let pool = &watched.pool;
    let (freeing, other) = (rig.stream(), rig.stream());
    let [before, after] = [(); 2].map(|()| watched.malloc(GRANULE, &freeing));
    assert_eq!(before.address() + GRANULE, after.address());
    let rest = watched.malloc(GRANULE, &other);
    let refuse = || assert!(pool.malloc(3 * GRANULE as usize, &other).is_err());
    watched.free(before, bare(&freeing));
    let mark = pool.mark(&freeing).unwrap();
    refuse(); // after the epoch was closed for it
    rig.sim.as_ref().unwrap().run_until_idle();
    watched.free(after, bare(&freeing));
    refuse(); // after that was found to have passed
    watched.validate();
    pool.follows(&other, &mark).unwrap();
    let early = pool.malloc(2 * GRANULE as usize, &other);
    assert!(early.is_err(), "what was written there has not been looked at");
    rig.device.synchronize().unwrap();
    let late = watched.malloc(2 * GRANULE, &other);
    assert_eq!(late.address(), before.address());
    [rest, late].into_iter().for_each(|held| watched.free(held, &other));
    watched.assert_intact();
}

/// The host has waited for what was before a mark. What was freed after that is in the same epoch, which was closed
/// meanwhile: that has not passed for it.
#[test]
fn a_mark_that_has_passed_says_nothing_of_what_was_freed_after_it() {
    let rig = Rig::simulated(Schedule::Manual);
    let watched = rig.pool(&config(24, 192));
    let (freeing, other) = (rig.stream(), rig.stream());
    let [before, apart, after] = [3, 1, 4].map(|count| watched.malloc(count * GRANULE, &freeing));
    watched.free(before, bare(&freeing));
    let mark = watched.pool.mark(&freeing).unwrap();
    let mut event = std::ptr::null_mut();
    call!(rig.driver, cuEventCreate(&mut event, 2));
    call!(rig.driver, cuEventRecord(event, freeing.handle().raw()));
    watched.free(after, bare(&freeing));
    // Lacks memory, and has the epoch closed for it.
    let first = watched.malloc(5 * GRANULE, &other);
    call!(rig.driver, cuEventSynchronize(event));
    call!(rig.driver, cuEventDestroy_v2(event));
    watched.pool.passed(&mark).unwrap();
    watched.validate();
    let second = watched.malloc(3 * GRANULE, &other);
    assert_eq!(second.address(), before.address(), "{}", watched.layout());
    let third = watched.malloc(4 * GRANULE, &other);
    assert_ne!(third.address(), after.address(), "what was written there has not been looked at");
    [first, second, third].into_iter().for_each(|held| watched.free(held, &other));
    watched.free(apart, &freeing);
    watched.assert_intact();
}

/// Memory moved while its stream's former epoch was closed: its old addresses wait for the next one.
#[test]
fn addresses_wait_for_the_epoch_that_was_open_when_they_were_left() {
    let rig = Rig::simulated(Schedule::Manual);
    let watched = rig.pool(&config(12, 96));
    let sim = rig.sim.as_ref().unwrap();
    let (stream, other) = (rig.stream(), rig.stream());
    let early = watched.malloc(2 * GRANULE, &stream);
    let single = [(); 6].map(|()| watched.malloc(GRANULE, &stream));
    let of_other = watched.malloc(GRANULE, &other);
    watched.free(early, bare(&stream));
    // Lacks memory, and has the epoch closed for it. Then there is no more.
    let more = watched.malloc(3 * GRANULE, &other);
    assert_eq!(watched.usage(), 12);
    single.iter().step_by(2).for_each(|held| watched.free(*held, bare(&stream)));
    let moved = watched.malloc(5 * GRANULE, &stream);
    assert!(watched.moved() >= 3, "{}", watched.layout());
    let zombies = watched.pool.stats().zombie_bytes;
    // Up to the event of the first epoch: seven were written, one has been looked at.
    (0..9).for_each(|_| assert!(sim.advance(stream.handle().raw())));
    watched.pool.trim_to(0).unwrap();
    assert_eq!(watched.pool.stats().zombie_bytes, zombies, "{}", watched.layout());
    rig.device.synchronize().unwrap();
    watched.pool.trim_to(0).unwrap();
    assert_eq!(watched.pool.stats().zombie_bytes, 0, "{}", watched.layout());
    single.iter().skip(1).step_by(2).for_each(|held| watched.free(*held, &stream));
    watched.free(moved, &stream);
    [of_other, more].into_iter().for_each(|held| watched.free(held, &other));
    watched.assert_intact();
}

/// What a stream has freed that has ended since is for anybody, though no question gives away what others freed: a
/// request asks about it before the pool grows.
#[test]
fn what_an_ended_stream_freed_comes_before_growth_though_nothing_is_opportunistic() {
    for streams in [1, 40] {
        for schedule in [Schedule::Eager, Schedule::Manual] {
            let late = matches!(schedule, Schedule::Manual);
            let rig = Rig::simulated(schedule);
            let mut settings = config(1024, 4096);
            settings.reuse.opportunistic = false;
            let watched = rig.pool(&settings);
            let (stays, asks) = (rig.stream(), rig.stream());
            let kept = watched.malloc(GRANULE, &stays);
            watched.free(kept, &stays);
            // More streams than are asked about for one request: they have freed nothing.
            let idle: Vec<_> = (0..streams).map(|_| rig.stream()).collect();
            for stream in idle.iter().chain([&asks]) {
                let held = watched.malloc(512, stream);
                watched.free(held, stream);
            }
            let ends = rig.stream();
            let held = watched.malloc(3 * GRANULE, &ends);
            watched.free(held, &ends);
            drop(ends);
            let made = watched.pool.stats().mapped_bytes;
            let before = rig.driver.calls();
            let held = watched.malloc(3 * GRANULE, &asks);
            let calls = rig.driver.calls().since(&before);
            let grew = calls.count("cuMemCreate") + calls.count("cuMemMap");
            assert_eq!(grew > 0, late, "{streams} streams: {calls:?}");
            assert_eq!(watched.pool.stats().mapped_bytes > made, late);
            // What the one freed that goes on is still its own.
            let one = watched.malloc(GRANULE, &stays);
            assert_eq!(one.address(), kept.address());
            watched.free(one, &stays);
            watched.free(held, &asks);
            watched.assert_intact();
        }
    }
}

/// Frees that wait for more streams than are asked about at first are found over by the last questions of all: the
/// request is served by them, and waits for nobody.
#[test]
fn what_many_streams_are_found_to_be_done_with_serves_a_request_at_the_limit_without_a_wait() {
    const SIDES: usize = 60;
    let rig = Rig::simulated(Schedule::Eager);
    let sim = rig.sim.as_ref().expect("a simulator");
    let watched = rig.pool(&config(SIDES as u64 + 2, 8 * SIDES as u64));
    let [own, busy] = [(); 2].map(|()| rig.stream());
    let sides: Vec<_> = (0..SIDES).map(|_| rig.stream()).collect();
    let spin = |stream: &Stream| sim.spin(stream.handle().raw()).unwrap();
    let done: Vec<_> = sides.iter().map(spin).collect();
    let last = [&own, &busy].map(spin);
    let pool = &watched.pool;
    let malloc = |bytes: u64, stream| pool.malloc(bytes as usize, stream).unwrap();
    let used: Vec<_> = sides
        .iter()
        .map(|side| {
            let ptr = malloc(GRANULE, &own);
            pool.record_stream(ptr, side).unwrap();
            ptr
        })
        .collect();
    pool.free(malloc(2 * GRANULE, &busy), bare(&busy)).unwrap();
    used.into_iter().for_each(|ptr| pool.free(ptr, &own).unwrap());
    drop(done);
    // By the driver, which does not tell the pool.
    sides.iter().for_each(|side| call!(rig.driver, cuStreamSynchronize(side.handle().raw())));
    assert_eq!(pool.stats().deferred_bytes, SIDES as u64 * GRANULE);
    let before = pool.stats();
    let all = malloc(SIDES as u64 * GRANULE, &own);
    let stats = pool.stats();
    assert_eq!((stats.device_waits, stats.host_waits), (before.device_waits, before.host_waits));
    pool.free(all, &own).unwrap();
    drop(last);
    watched.validate();
}

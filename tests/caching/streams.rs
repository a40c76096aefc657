//! Whose cached memory is: reuse by stream, and streams that end.

use vpmm::{Error, StreamHandle};

use crate::rig::{KIB, MIB};
use crate::support::streams::make;
use crate::support::{Rig, call};

#[test]
fn a_stream_has_its_own_memory_again_at_once_and_no_other_has_it() {
    Rig::everywhere(|rig| {
        for bytes in [1000, 3 * MIB, 24 * MIB] {
            let cached = rig.cached();
            let (own, other) = (rig.stream(), rig.stream());
            let held = cached.malloc(bytes, &own);
            let stall = rig.stall(own.handle());
            let calls = cached.calls(|| {
                cached.allocator.free(held.ptr).unwrap();
                let again = cached.allocator.malloc(bytes as usize, &own).unwrap();
                assert_eq!(again.address(), held.address(), "while the stream is stuck");
                cached.allocator.free(again).unwrap();
            });
            assert_eq!(calls.total(), 0, "{calls:?}");
            cached.give_up(&held);
            let elsewhere = cached.malloc(bytes, &other);
            assert_ne!(elsewhere.address(), held.address());
            drop(stall);
            // Even when everything has finished: a block never changes its stream.
            cached.free(elsewhere, &other);
            rig.device.synchronize().unwrap();
            let elsewhere = cached.malloc(bytes, &other);
            assert_ne!(elsewhere.address(), held.address());
            cached.free(elsewhere, &other);
            cached.assert_intact();
        }
    });
}

#[test]
fn default_streams_and_foreign_ones_have_memory_of_their_own() {
    Rig::everywhere(|rig| {
        let cached = rig.cached();
        let own = rig.stream();
        let (raw, foreign) = make(rig, 0);
        let streams = [StreamHandle::LEGACY, StreamHandle::PER_THREAD, foreign, own.handle()];
        let held = streams.map(|stream| cached.malloc(3 * MIB, stream));
        assert_eq!(cached.reserved(), 80 * MIB);
        let at = |index: usize| held[index].address();
        (0..4).for_each(|index| cached.free(held[index], streams[index]));
        for index in [2, 0, 3, 1] {
            let again = cached.malloc(3 * MIB, streams[index]);
            assert_eq!(again.address(), at(index));
            cached.free(again, streams[index]);
        }
        // A bare handle of the library's own stream is that stream.
        // SAFETY: the stream lives to the end of the test.
        let bare = unsafe { StreamHandle::from_raw(own.handle().raw()) };
        let again = cached.malloc(3 * MIB, bare);
        assert_eq!(again.address(), at(3));
        cached.free(again, bare);
        cached.assert_intact();
        call!(rig.driver, cuStreamDestroy_v2(raw));
    });
}

#[test]
fn a_new_stream_has_the_memory_of_one_that_ended_once_that_has_finished() {
    Rig::everywhere(|rig| {
        let cached = rig.cached();
        let first = rig.stream();
        let held = cached.malloc(3 * MIB, &first);
        let stall = rig.stall(first.handle());
        cached.free(held, &first);
        drop(first);
        // Its work still runs: whoever comes now gets memory of its own, whatever its handle.
        let second = rig.stream();
        let other = cached.malloc(3 * MIB, &second);
        assert_ne!(other.address(), held.address());
        drop(stall);
        rig.device.synchronize().unwrap();
        let third = rig.stream();
        let again = cached.malloc(3 * MIB, &third);
        assert_eq!(again.address(), held.address(), "nothing is left behind");
        assert_eq!(cached.reserved(), 40 * MIB);
        cached.free(other, &second);
        cached.free(again, &third);
        cached.assert_intact();
    });
}

#[test]
fn an_allocation_outlives_its_stream() {
    Rig::everywhere(|rig| {
        let cached = rig.cached();
        let (own, side) = (rig.stream(), rig.stream());
        let held = cached.malloc(3 * MIB, &own);
        rig.order(&own, &side);
        drop(own);
        let stall = rig.stall(side.handle());
        cached.allocator.record_stream(held.ptr, &side).unwrap();
        held.check(rig, &side);
        cached.give_up(&held);
        cached.allocator.free(held.ptr).unwrap();
        cached.validate();
        let next = rig.stream();
        let other = cached.malloc(3 * MIB, &next);
        assert_ne!(other.address(), held.address(), "another stream uses it still");
        drop(stall);
        cached.free(other, &next);
        cached.allocator.empty_cache().unwrap();
        assert_eq!(cached.reserved(), 0);
        cached.assert_intact();
    });
}

#[test]
fn uses_on_a_stream_that_ended_are_waited_for_by_its_last_event() {
    Rig::everywhere(|rig| {
        for freed_before in [true, false] {
            let cached = rig.cached();
            let (own, side) = (rig.stream(), rig.stream());
            let held = cached.malloc(3 * MIB, &own);
            let stall = rig.stall(side.handle());
            cached.look_from(&held, &own, &side);
            if freed_before {
                cached.free(held, &own);
                drop(side);
            } else {
                drop(side);
                let calls = cached.calls(|| cached.free(held, &own));
                assert_eq!(calls.count("cuEventRecord"), 0, "not on what is gone");
            }
            let other = cached.malloc(3 * MIB, &own);
            assert_ne!(other.address(), held.address());
            drop(stall);
            call!(rig.driver, cuCtxSynchronize());
            cached.free(other, &own);
            let again = cached.malloc(20 * MIB, &own);
            assert_eq!((again.address(), cached.reserved()), (held.address(), 20 * MIB));
            cached.free(again, &own);
            cached.assert_intact();
        }
    });
}

#[test]
fn streams_that_come_and_go_leave_nothing_behind() {
    Rig::everywhere(|rig| {
        let cached = rig.cached();
        let own = rig.stream();
        let mut bytes_after = Vec::new();
        for round in 0..60 {
            let side = rig.stream();
            let (raw, foreign) = make(rig, 0);
            let held = [3 * MIB, 70 * KIB].map(|bytes| cached.malloc(bytes, &side));
            let of_foreign = cached.malloc(5 * MIB, foreign);
            cached.look_from(&held[0], &side, &own);
            cached.look_from(&of_foreign, foreign, &side);
            cached.free(held[0], &side);
            cached.free(held[1], &side);
            cached.free(of_foreign, foreign);
            drop(side);
            call!(rig.driver, cuStreamSynchronize(foreign.raw()));
            call!(rig.driver, cuStreamDestroy_v2(raw));
            // What belongs to a stream from elsewhere goes back before others can have it.
            cached.allocator.empty_cache().unwrap();
            if round % 20 == 19 {
                bytes_after.push(cached.allocator.metadata_bytes());
            }
        }
        assert_eq!(cached.reserved(), 0);
        assert_eq!(bytes_after[0], bytes_after[2], "{bytes_after:?}");
        cached.assert_intact();
    });
}

#[test]
fn streams_of_other_devices_and_contexts_are_refused() {
    let sim = cuda_sim::Simulator::builder().devices(2).build().unwrap();
    let rig = Rig::on(sim);
    let cached = rig.cached();
    let stream = rig.driver.device(1).unwrap().stream().unwrap();
    let error = cached.allocator.malloc(1, &stream).unwrap_err();
    assert!(matches!(error, Error::WrongDevice { stream_device: 1, pool_device: 0 }), "{error}");
    call!(rig.driver, cuCtxSetCurrent(rig.device.context()));
    let mut context = std::ptr::null_mut();
    call!(rig.driver, cuCtxCreate_v2(&mut context, 0, 0));
    let mut raw = std::ptr::null_mut();
    call!(rig.driver, cuStreamCreate(&mut raw, 0));
    // SAFETY: the stream lives until it is destroyed below.
    let foreign = unsafe { StreamHandle::from_raw(raw) };
    let error = cached.allocator.malloc(1, foreign).unwrap_err();
    assert!(matches!(error, Error::WrongContext { device: 0 }), "{error}");
    call!(rig.driver, cuStreamDestroy_v2(raw));
    call!(rig.driver, cuCtxDestroy_v2(context));
    cached.assert_intact();
}

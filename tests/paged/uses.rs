//! Uses on further streams, where the profiles differ or the driver is held in the middle of a call.

use cuda_sim::{Schedule, Simulator};
use vpmm::{Error, StreamHandle};

use crate::rig::PAGE;
use crate::support::changed::{changed, gated};
use crate::support::streams::{begin_capture, end_capture, make};
use crate::support::{Rig, call};

#[test]
fn a_foreign_stream_that_captures_at_the_free_has_it_refused() {
    Rig::everywhere(|rig| {
        for bytes in [1000, PAGE] {
            let watched = rig.small_pool(0);
            let (own, first) = (rig.stream(), rig.stream());
            let (raw, side) = make(rig, 1);
            let held = watched.malloc(bytes, &own);
            for stream in [first.handle(), side] {
                rig.order(&own, stream);
                held.check(rig, stream);
                watched.pool.record_stream(held.ptr, stream).unwrap();
            }
            begin_capture(rig, raw);
            // Its handle may be gone when the capture is.
            let refused = watched.pool.free(held.ptr, &own);
            assert!(matches!(refused, Err(Error::StreamCapturing)), "{refused:?}");
            watched.validate();
            let refused = watched.pool.record_stream(held.ptr, side);
            assert!(matches!(refused, Err(Error::StreamCapturing)), "{refused:?}");
            assert_eq!(end_capture(rig, raw), 0, "nodes");
            watched.free(held, &own);
            call!(rig.driver, cuStreamDestroy_v2(raw));
            watched.assert_intact();
        }
    });
}

/// While a blocking stream captures nobody may use the legacy stream, nor ask about it: that is said by name, and
/// what was noted for it waits until the capture is over.
#[test]
fn the_legacy_stream_captures_as_far_as_anybody_can_tell() {
    Rig::everywhere(|rig| {
        for bytes in [1000, PAGE] {
            let watched = rig.small_pool(0);
            let own = rig.stream();
            let held = watched.malloc(bytes, &own);
            rig.order(&own, StreamHandle::LEGACY);
            held.check(rig, StreamHandle::LEGACY);
            watched.pool.record_stream(held.ptr, StreamHandle::LEGACY).unwrap();
            let (raw, _) = make(rig, 0);
            begin_capture(rig, raw);
            let refused = watched.pool.malloc(bytes as usize, StreamHandle::LEGACY);
            assert!(matches!(refused, Err(Error::StreamCapturing)), "{refused:?}");
            let refused = watched.pool.free(held.ptr, StreamHandle::LEGACY);
            assert!(matches!(refused, Err(Error::StreamCapturing)), "{refused:?}");
            watched.free(held, &own);
            watched.validate();
            let other = watched.malloc(bytes, &own);
            assert_ne!(other.address(), held.address(), "it waits");
            watched.free(other, &own);
            assert_eq!(end_capture(rig, raw), 0, "nodes");
            let again = watched.malloc(bytes, &own);
            watched.free(again, &own);
            watched.assert_intact();
            call!(rig.driver, cuStreamDestroy_v2(raw));
        }
    });
}

gated!(record: cuEventRecord(event: CUevent, stream: CUstream));

#[test]
fn a_capture_that_begins_before_the_record_does_not_pass_for_a_use_that_is_over() {
    // Ended before the pool looks again, or not.
    for ended in [false, true] {
        let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
        let rig = Rig::with(changed(&sim, record::put), sim.clone());
        let watched = rig.small_pool(0);
        let (own, side) = (rig.stream(), rig.stream());
        let held = watched.malloc(PAGE, &own);
        let stall = rig.stall(side.handle());
        rig.order(&own, &side);
        held.check(&rig, &side);
        watched.pool.record_stream(held.ptr, &side).unwrap();
        record::BEFORE.arm();
        std::thread::scope(|scope| {
            let free = scope.spawn(|| watched.pool.free(held.ptr, &own).unwrap());
            record::BEFORE.wait();
            begin_capture(&rig, side.handle().raw());
            record::AFTER.arm();
            record::BEFORE.open();
            record::AFTER.wait();
            if ended {
                end_capture(&rig, side.handle().raw());
            }
            record::AFTER.open();
            free.join().unwrap();
        });
        watched.validate();
        // The first that lacks memory finds the event captured; it is no error, and no proof.
        for _ in 0..2 {
            let other = watched.pool.malloc(PAGE as usize, &own).unwrap();
            assert_ne!(other.address(), held.address());
            watched.validate();
        }
        if !ended {
            assert_eq!(end_capture(&rig, side.handle().raw()), 0, "nodes");
        }
        // The second recorded anew, or this does.
        let more = watched.pool.malloc(PAGE as usize, &own).unwrap();
        assert_ne!(more.address(), held.address());
        drop(stall);
        sim.run_until_idle();
        let again = watched.pool.malloc(PAGE as usize, &own).unwrap();
        assert_eq!(again.address(), held.address(), "{}", watched.layout());
        watched.assert_intact();
    }
}

/// What the driver gets back when a pool ends is enqueued on no stream that others' captures forbid.
#[test]
fn a_pool_that_ends_with_a_free_that_waited_harms_no_capture() {
    Rig::everywhere(|rig| {
        let watched = rig.small_pool(0);
        let (own, side) = (rig.stream(), rig.stream());
        let held = watched.malloc(1000, &own);
        rig.order(&own, &side);
        let stall = rig.stall(side.handle());
        held.check(rig, side.handle());
        watched.pool.record_stream(held.ptr, &side).unwrap();
        watched.free(held, &own);
        let (raw, _) = make(rig, 0);
        begin_capture(rig, raw);
        drop(stall);
        drop(watched);
        assert_eq!(end_capture(rig, raw), 0, "nodes");
        call!(rig.driver, cuStreamDestroy_v2(raw));
    });
}

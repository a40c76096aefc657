//! Captures: no call ends one, and none becomes a part of one.

use std::sync::Arc;

use cuda_sim::Schedule;
use vpmm::caching::{CachingAllocator, CachingConfig};
use vpmm::resource::{DeviceMalloc, DriverPool, DriverPoolConfig, Limiting};
use vpmm::{Error, Stream, StreamHandle};

use crate::rig::{Cached, MIB};
use crate::support::streams::{begin_capture, end_capture, make};
use crate::support::{Rig, call};

/// Every call there is, on other streams than the one that captures.
fn everything(cached: &Cached<'_>, [own, side]: &[Stream; 2]) {
    let held = cached.malloc(3 * MIB, own);
    cached.allocator.record_stream(held.ptr, side).unwrap();
    cached.free(held, own);
    let again = cached.malloc(40 * MIB, own);
    cached.free(again, own);
    cached.allocator.empty_cache().unwrap();
}

#[test]
fn requests_beside_a_capture_leave_it_alone() {
    Rig::everywhere(|rig| {
        let cached = rig.cached();
        let streams = [rig.stream(), rig.stream()];
        let (raw, _) = make(rig, 1);
        // Kernels are loaded when they are launched first.
        everything(&cached, &streams);
        begin_capture(rig, raw);
        everything(&cached, &streams);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                call!(rig.driver, cuCtxSetCurrent(rig.device.context()));
                everything(&cached, &streams);
            });
        });
        assert_eq!(end_capture(rig, raw), 0, "nothing became a node");
        cached.assert_intact();
        call!(rig.driver, cuStreamDestroy_v2(raw));
    });
}

#[test]
fn a_librarys_stream_is_served_while_it_captures() {
    Rig::everywhere(|rig| {
        let cached = rig.cached();
        let stream = rig.stream();
        begin_capture(rig, stream.handle().raw());
        let calls = cached.calls(|| {
            // A miss, then a hit.
            for _ in 0..2 {
                let ptr = cached.allocator.malloc(3 << 20, &stream).unwrap();
                cached.allocator.free(ptr).unwrap();
            }
        });
        assert_eq!(calls.count("cuMemAlloc_v2"), 1);
        assert_eq!(end_capture(rig, stream.handle().raw()), 0);
        cached.assert_intact();
    });
}

#[test]
fn the_event_of_a_capturing_stream_is_recorded_when_that_is_over() {
    Rig::everywhere(|rig| {
        let cached = rig.cached();
        let (own, side) = (rig.stream(), rig.stream());
        let held = cached.malloc(3 * MIB, &own);
        let stall = rig.stall(side.handle());
        cached.look_from(&held, &own, &side);
        begin_capture(rig, side.handle().raw());
        let calls = cached.calls(|| cached.free(held, &own));
        assert_eq!(calls.count("cuEventRecord"), 0);
        for _ in 0..2 {
            let other = cached.malloc(3 * MIB, &own);
            assert_ne!(other.address(), held.address());
            cached.free(other, &own);
            cached.allocator.empty_cache().unwrap();
            assert!(cached.reserved() > 0, "it is still in use");
        }
        assert_eq!(end_capture(rig, side.handle().raw()), 0);
        let other = cached.malloc(3 * MIB, &own);
        assert_ne!(other.address(), held.address(), "the work before the capture still runs");
        drop(stall);
        cached.free(other, &own);
        cached.allocator.empty_cache().unwrap();
        assert_eq!(cached.reserved(), 0);
        cached.assert_intact();
    });
}

/// Also where it was met by its bare handle, as from another library.
#[test]
fn a_stream_that_was_met_by_its_bare_handle_is_the_librarys_from_then_on() {
    Rig::everywhere(|rig| {
        let driver_pool = DriverPool::new(&rig.device, &DriverPoolConfig::default()).unwrap();
        let config = CachingConfig::default();
        let cached =
            rig.observe(CachingAllocator::over(driver_pool, &rig.device, &config).unwrap());
        let (own, side) = (rig.stream(), rig.stream());
        // SAFETY: the stream outlives it.
        let bare = unsafe { StreamHandle::from_raw(side.handle().raw()) };
        let held = cached.malloc(3 * MIB, &own);
        let of_side = cached.malloc(3 * MIB, bare);
        cached.free(of_side, bare);
        cached.look_from(&held, &own, &side);
        begin_capture(rig, side.handle().raw());
        cached.free(held, &own);
        assert_eq!(end_capture(rig, side.handle().raw()), 0);
        // What is the stream's goes back on it.
        cached.allocator.empty_cache().unwrap();
        assert_eq!(cached.reserved(), 0);
        // By a request as well, that nothing cached serves.
        let next = rig.stream();
        // SAFETY: as above.
        let bare = unsafe { StreamHandle::from_raw(next.handle().raw()) };
        for (bytes, stream) in [(30 * MIB, bare), (40 * MIB, next.handle())] {
            let held = cached.malloc(bytes, stream);
            cached.free(held, stream);
        }
        cached.allocator.empty_cache().unwrap();
        assert_eq!(cached.reserved(), 0);
        cached.assert_intact();
    });
}

#[test]
fn a_foreign_stream_that_captures_is_refused_and_nothing_changes() {
    Rig::everywhere(|rig| {
        let cached = rig.cached();
        let own = rig.stream();
        let (raw, foreign) = make(rig, 1);
        let held = cached.malloc(3 * MIB, &own);
        cached.allocator.record_stream(held.ptr, foreign).unwrap();
        begin_capture(rig, raw);
        let refused = |result: vpmm::Result<()>| {
            assert!(matches!(result, Err(Error::StreamCapturing)), "{result:?}");
        };
        refused(cached.allocator.malloc(1, foreign).map(|_| ()));
        refused(cached.allocator.record_stream(held.ptr, foreign));
        refused(cached.allocator.free(held.ptr));
        assert_eq!(end_capture(rig, raw), 0);
        // A copy would be the graph's, with an address of the host's in it.
        let capturing = rig.stream();
        begin_capture(rig, capturing.handle().raw());
        refused(cached.allocator.alloc_copy(&[1_u8], &capturing).map(drop));
        assert_eq!(end_capture(rig, capturing.handle().raw()), 0);
        cached.free(held, &own);
        cached.assert_intact();
        call!(rig.driver, cuStreamDestroy_v2(raw));
    });
}

#[test]
fn a_stream_that_ends_while_it_captures_is_settled_by_a_wait_for_the_device() {
    Rig::everywhere(|rig| {
        let cached = rig.cached();
        let (own, side) = (rig.stream(), rig.stream());
        let of_side = cached.malloc(3 * MIB, &side);
        let held = cached.malloc(3 * MIB, &own);
        cached.look_from(&held, &own, &side);
        begin_capture(rig, side.handle().raw());
        cached.free(held, &own);
        cached.give_up(&of_side);
        cached.allocator.free(of_side.ptr).unwrap();
        drop(side);
        cached.allocator.empty_cache().unwrap();
        assert_eq!(cached.reserved(), 20 * MIB, "nobody knows when it has finished");
        rig.device.synchronize().unwrap();
        cached.allocator.empty_cache().unwrap();
        assert_eq!(cached.reserved(), 0);
        cached.assert_intact();
    });
}

#[test]
fn zeros_in_a_capture_are_a_node_of_the_graph() {
    Rig::everywhere(|rig| {
        let cached = rig.cached();
        let stream = rig.stream();
        let handle: StreamHandle = stream.handle();
        begin_capture(rig, handle.raw());
        let zeros = cached.allocator.alloc_zeros::<u32>(1000, &stream).unwrap();
        assert_eq!(end_capture(rig, handle.raw()), 1);
        drop(zeros);
        cached.assert_intact();
    });
}

/// An allocator that ends with what only a wait for the device would prove free leaves another stream's capture alone.
#[test]
fn an_allocator_that_ends_leaves_captures_alone() {
    let rig = Rig::simulated(Schedule::Eager);
    let (own, side, capturing) = (rig.stream(), rig.stream(), rig.stream());
    let allocator = CachingAllocator::new(&rig.device, &CachingConfig::default()).unwrap();
    let ptr = allocator.malloc(3 << 20, &own).unwrap();
    allocator.record_stream(ptr, &side).unwrap();
    begin_capture(&rig, side.handle().raw());
    allocator.free(ptr).unwrap();
    // Nobody will know when its work is over.
    drop(side);
    begin_capture(&rig, capturing.handle().raw());
    drop(allocator);
    assert_eq!(end_capture(&rig, capturing.handle().raw()), 0);
    rig.assert_clean();
}

/// Where events tell of all uses it waits for those, and everything goes back.
#[test]
fn an_allocator_that_ends_beside_a_capture_gives_everything_back() {
    Rig::everywhere(|rig| {
        let (own, side, capturing) = (rig.stream(), rig.stream(), rig.stream());
        let below = Arc::new(Limiting::new(DeviceMalloc::new(&rig.device), u64::MAX));
        let config = CachingConfig::default();
        let allocator = CachingAllocator::over(Arc::clone(&below), &rig.device, &config).unwrap();
        let ptr = allocator.malloc(3 << 20, &own).unwrap();
        rig.fill(ptr.address(), 3 << 20, 1, side.handle());
        allocator.record_stream(ptr, &side).unwrap();
        allocator.free(ptr).unwrap();
        begin_capture(rig, capturing.handle().raw());
        drop(allocator);
        assert_eq!(end_capture(rig, capturing.handle().raw()), 0);
        assert_eq!(below.allocated_bytes(), 0);
    });
}

/// Of a stream that has ended in its capture nobody knows when its work is over: what it was noted for is kept when it
/// is freed, until the device was waited for.
#[test]
fn what_a_stream_uses_that_ended_in_its_capture_is_kept() {
    Rig::everywhere(|rig| {
        let cached = rig.cached();
        let (own, side) = (rig.stream(), rig.stream());
        let held = cached.malloc(3 * MIB, &own);
        rig.order(&own, &side);
        let stall = rig.stall(side.handle());
        cached.allocator.record_stream(held.ptr, &side).unwrap();
        begin_capture(rig, side.handle().raw());
        drop(side);
        cached.free(held, &own);
        assert_eq!(cached.allocator.stats().active.all.current, 1);
        drop(stall);
        rig.device.synchronize().unwrap();
        assert_eq!(cached.allocator.stats().active.all.current, 0);
        cached.assert_intact();
    });
}

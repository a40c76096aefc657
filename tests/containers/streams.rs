//! Containers on several streams: what they order, what they keep alive, captures.

use std::sync::Arc;

use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::{CUresult, CUstream_flags_enum};
use vpmm::resource::{
    Binning, CoalescingConfig, CoalescingPool, DeviceMalloc, FixedSize, FixedSizeConfig, Limiting,
    Managed, PinnedHost,
};
use vpmm::{
    DeviceBuffer, DeviceScalar, DeviceVec, Error, Event, MemoryResource, Stream, StreamHandle,
    StreamPool,
};

use crate::resources::{Any, all, each, pool};
use crate::support::changed::{changed, gated};
use crate::support::streams::{begin_capture, end_capture, make};
use crate::support::{Rig, call};

const BYTES: u64 = 3 << 20;

/// A copy comes after what is under way on either's stream, and later uses on either after it.
#[test]
fn copies_between_streams() {
    each(|rig, resource| {
        let streams = [rig.stream(), rig.stream()];
        let from = DeviceBuffer::uninit(BYTES as usize, &streams[0], resource).unwrap();
        let mut to = DeviceBuffer::uninit(BYTES as usize, &streams[1], resource).unwrap();
        // Without the order of streams a free waits for the device.
        let ordered = resource.facts().stream_ordered;
        let stall = ordered.then(|| rig.stall(streams[0].handle()));
        rig.fill(from.ptr().address(), BYTES, 7, streams[0].handle());
        rig.fill(to.ptr().address(), BYTES, 8, streams[1].handle());
        to.as_mut_slice().copy_from(&from.as_slice()).unwrap();
        // The source is written again, and freed, at once.
        rig.fill(from.ptr().address(), BYTES, 9, streams[0].handle());
        drop(from);
        rig.check(to.ptr().address(), BYTES, 7, streams[1].handle());
        drop(stall);
        assert_eq!(rig.mismatches(), 0);
    });
}

/// The driver makes the copy wait for the source's stream, and will not make that wait for the copy: the
/// source is read to the end all the same before it is anybody else's.
#[test]
fn a_copy_that_the_sources_stream_cannot_wait_for() {
    let rig = Rig::on(Simulator::builder().schedule(Schedule::Manual).build().unwrap());
    let sim = rig.sim.clone().unwrap();
    let (pool, streams) = (pool(&rig), [rig.stream(), rig.stream()]);
    for (function, n) in [("cuEventCreate", 2), ("cuEventRecord", 2), ("cuStreamWaitEvent", 2)] {
        let bytes = BYTES as usize;
        let from = DeviceBuffer::uninit(bytes, &streams[0], &pool).unwrap();
        let mut to = DeviceBuffer::uninit(bytes, &streams[1], &pool).unwrap();
        rig.fill(from.ptr().address(), BYTES, 7, streams[0].handle());
        sim.fail_nth(function, n, CUresult::CUDA_ERROR_UNKNOWN);
        let copied = to.as_mut_slice().copy_from(&from.as_slice());
        sim.clear_faults();
        let source = from.ptr();
        drop(from);
        let next = DeviceBuffer::uninit(bytes, &streams[0], &pool).unwrap();
        assert_eq!(next.ptr().address(), source.address());
        rig.fill(source.address(), BYTES, 8, streams[0].handle());
        rig.check(to.ptr().address(), BYTES, 7, streams[1].handle());
        rig.device.synchronize().unwrap();
        assert_eq!(rig.mismatches(), 0, "{function}");
        copied.unwrap();
    }
    rig.assert_clean();
}

#[test]
fn a_container_goes_to_another_stream() {
    each(|rig, resource| {
        let streams = [rig.stream(), rig.stream()];
        let mut buffer = DeviceBuffer::uninit(BYTES as usize, &streams[0], resource).unwrap();
        // Without the order of streams a free waits for the device.
        let ordered = resource.facts().stream_ordered;
        let stall = ordered.then(|| rig.stall(streams[0].handle()));
        rig.fill(buffer.ptr().address(), BYTES, 5, streams[0].handle());
        buffer.set_stream(&streams[1]).unwrap();
        assert_eq!(buffer.stream().handle(), streams[1].handle());
        rig.check(buffer.ptr().address(), BYTES, 5, streams[1].handle());
        drop(buffer);
        // Its memory may come at once, in the order of the stream that freed it.
        let next = DeviceBuffer::uninit(BYTES as usize, &streams[1], resource).unwrap();
        drop(stall);
        rig.fill(next.ptr().address(), BYTES, 6, streams[1].handle());
        rig.check(next.ptr().address(), BYTES, 6, streams[1].handle());
        assert_eq!(rig.mismatches(), 0);
    });
}

/// A stream lives as long as a container on it.
#[test]
fn a_stream_is_dropped_before_its_containers() {
    each(|rig, resource| {
        let stream = rig.stream();
        let mut values = DeviceVec::from_slice(&[1_u32, 2, 3], &stream, resource).unwrap();
        drop(stream);
        values.set(1, 20).unwrap();
        values.resize(4, 7).unwrap();
        assert_eq!(values.to_vec().unwrap(), [1, 20, 3, 7]);
    });
}

/// What waits for the host is refused while the stream captures, and the capture goes on.
#[test]
fn a_stream_captures() {
    let rig = Rig::simulated(Schedule::Eager);
    let (stream, other) = (rig.stream(), rig.stream());
    let pool = pool(&rig);
    let mut values = DeviceVec::from_slice(&[1_u32, 2, 3, 4], &stream, &pool).unwrap();
    let outside = DeviceVec::from_slice(&[5_u32, 6, 7, 8], &other, &pool).unwrap();
    let mut longer = DeviceScalar::<u128, _>::uninit(&stream, &pool).unwrap();
    begin_capture(&rig, stream.handle().raw());
    let errors = [
        values.to_vec().unwrap_err(),
        values.get(0).unwrap_err(),
        values.as_mut_slice().copy_from_slice(&[0; 4]).unwrap_err(),
        values.as_mut_slice().copy_from(&outside.as_slice()).unwrap_err(),
        values.set_stream(&other).unwrap_err(),
    ];
    for error in errors {
        assert!(matches!(error, Error::StreamCapturing), "{error}");
    }
    // These are parts of the graph.
    values.set(0, 9).unwrap();
    values.slice_mut(1..).unwrap().fill(3).unwrap();
    longer.set(0x0102_0304_0506_0708_0000_0000_0000_0001).unwrap();
    assert_eq!(end_capture(&rig, stream.handle().raw()), 2 + 4);
    assert_eq!(values.to_vec().unwrap(), [1, 2, 3, 4], "a graph that was not launched");
    rig.assert_clean();
}

/// Other threads' captures are not harmed by what containers do elsewhere.
#[test]
fn another_stream_captures() {
    each(|rig, resource| {
        let (capturing, stream) = (rig.stream(), rig.stream());
        let mut values = DeviceVec::from_slice(&[1_u32; 100], &stream, resource).unwrap();
        begin_capture(rig, capturing.handle().raw());
        std::thread::scope(|scope| {
            let at_work = scope.spawn(|| {
                values.set(5, 6).unwrap();
                assert_eq!(values.get(5).unwrap(), 6);
                values.as_mut_slice().copy_from_slice(&[2; 100]).unwrap();
                let copy = values.copy(&stream, resource).unwrap();
                assert_eq!(copy.to_vec().unwrap(), [2; 100]);
                // Not dropped here: cuMemFree would end the capture.
                copy
            });
            let copy = at_work.join().unwrap();
            end_capture(rig, capturing.handle().raw());
            drop(copy);
        });
    });
}

/// The per-thread default stream is another one in each thread.
#[test]
fn a_container_of_a_thread_goes_to_another_thread() {
    each(|rig, resource| {
        let per_thread = Stream::per_thread(&rig.device);
        let buffer = DeviceBuffer::uninit(BYTES as usize, &per_thread, resource).unwrap();
        let stall = rig.stall(StreamHandle::PER_THREAD);
        rig.fill(buffer.ptr().address(), BYTES, 5, StreamHandle::PER_THREAD);
        drop(stall);
        std::thread::scope(|scope| {
            let elsewhere = scope.spawn(move || {
                // Behind what the first thread enqueued, though on another stream.
                let mut buffer = buffer;
                buffer.resize(2 * BYTES as usize).unwrap();
                rig.check(buffer.ptr().address(), BYTES, 5, StreamHandle::PER_THREAD);
                // The work is waited for before the thread ends.
                rig.device.synchronize().unwrap();
                drop(buffer);
            });
            elsewhere.join().unwrap();
        });
        assert_eq!(rig.mismatches(), 0);
    });
}

/// The wait for the device that this takes is not made beside a capture, which it would end.
#[test]
fn a_container_of_a_thread_waits_for_captures_elsewhere() {
    each(|rig, resource| {
        let (capturing, per_thread) = (rig.stream(), Stream::per_thread(&rig.device));
        let [values, dropped] =
            [(); 2].map(|()| DeviceVec::from_slice(&[1_u32; 100], &per_thread, resource).unwrap());
        begin_capture(rig, capturing.handle().raw());
        std::thread::scope(|scope| {
            let at_work = scope.spawn(move || {
                let mut values = values;
                let refused = values.get(5);
                assert!(matches!(refused, Err(Error::StreamCapturing)), "{refused:?}");
                let refused = values.set_stream(&capturing);
                assert!(matches!(refused, Err(Error::StreamCapturing)), "{refused:?}");
                // Its memory stays the resource's.
                drop(dropped);
                (values, capturing)
            });
            let (values, capturing) = at_work.join().unwrap();
            end_capture(rig, capturing.handle().raw());
            let elsewhere = scope.spawn(move || assert_eq!(values.get(5).unwrap(), 1));
            elsewhere.join().unwrap();
        });
    });
}

gated!(copying: cuMemcpyDtoDAsync_v2(
    to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream
));

/// What one thread is about to enqueue comes before what another does with the same container next.
#[test]
fn threads_that_share_a_container_of_a_thread_take_turns() {
    let sim = Simulator::builder().build().unwrap();
    let rig = Rig::with(changed(&sim, copying::put), sim);
    let pool = pool(&rig);
    let (per_thread, own) = (Stream::per_thread(&rig.device), rig.stream());
    let shared = DeviceBuffer::from_slice(&vec![5; BYTES as usize], &per_thread, &pool).unwrap();
    let mut copy = DeviceBuffer::zeroed(BYTES as usize, &own, &pool).unwrap();
    own.synchronize().unwrap();
    let stall = std::thread::scope(|scope| {
        copying::BEFORE.arm();
        let copies = scope.spawn(|| copy.as_mut_slice().copy_from(&shared.as_slice()).unwrap());
        copying::BEFORE.wait();
        scope.spawn(|| {
            std::thread::sleep(std::time::Duration::from_millis(200));
            copying::BEFORE.open();
        });
        // Whoever comes here before the copy was enqueued makes this thread the container's.
        assert_eq!(shared.as_slice().get(0).unwrap(), 5);
        let stall = rig.stall(own.handle());
        copying::BEFORE.open();
        copies.join().unwrap();
        stall
    });
    let address = shared.ptr().address();
    drop(shared);
    let next = DeviceBuffer::zeroed(BYTES as usize, &per_thread, &pool).unwrap();
    assert_eq!(next.ptr().address(), address, "the same memory");
    drop(stall);
    assert!(copy.as_slice().to_vec().unwrap().iter().all(|byte| *byte == 5));
    drop((next, copy));
    drop(pool);
    rig.assert_clean();
}

#[test]
fn streams_and_events() {
    Rig::everywhere(|rig| {
        let (first, second) = (rig.stream(), rig.stream());
        assert!(first.is_owned() && !first.is_capturing().unwrap());
        let events = [(); 2].map(|()| Event::with_timing(&rig.device).unwrap());
        let plain = Event::new(&rig.device).unwrap();
        assert!(plain.is_complete().unwrap(), "never recorded");
        let stall = rig.stall(first.handle());
        events[0].record(&first).unwrap();
        plain.record(&first).unwrap();
        second.wait_for(&plain).unwrap();
        events[1].record(&second).unwrap();
        assert!(!plain.is_complete().unwrap());
        drop(stall);
        second.synchronize().unwrap();
        events[1].synchronize().unwrap();
        assert!(plain.is_complete().unwrap() && events[0].is_complete().unwrap());
        let elapsed = events[1].elapsed_since(&events[0]).unwrap();
        assert!(elapsed.as_secs() < 60, "{elapsed:?}");
        assert!(matches!(plain.elapsed_since(&events[0]), Err(Error::Driver { .. })));
        // A clone is the same stream, and keeps it.
        let clone = first.clone();
        let handle = first.handle();
        drop(first);
        assert_eq!(clone.handle(), handle);
        clone.wait_for_stream(&clone).unwrap();
        clone.wait_for_stream(&second).unwrap();
        clone.synchronize().unwrap();
    });
}

/// While a blocking stream captures nobody may use the legacy stream, which the driver answers the question
/// with, too: to callers it is as if it captured, and the capture is left alone.
#[test]
fn the_legacy_stream_counts_as_capturing_beside_a_blocking_capture() {
    Rig::everywhere(|rig| {
        let resource = pool(rig);
        let (legacy, other) = (Stream::legacy(&rig.device), rig.stream());
        let mut buffer = DeviceBuffer::uninit(1024, &legacy, &resource).unwrap();
        assert!(!legacy.is_capturing().unwrap());
        let (raw, _) = make(rig, 0);
        begin_capture(rig, raw);
        assert!(legacy.is_capturing().unwrap() && !other.is_capturing().unwrap());
        for refused in [
            buffer.as_mut_slice().copy_from_slice(&[7; 1024]),
            other.wait_for_stream(&legacy),
            legacy.wait_for_stream(&other),
        ] {
            assert!(matches!(refused, Err(Error::StreamCapturing)), "{refused:?}");
        }
        // What needs no work on the stream is served.
        let more = DeviceBuffer::uninit(BYTES as usize, &legacy, &resource).unwrap();
        drop((more, buffer));
        assert_eq!(end_capture(rig, raw), 0, "nodes");
        assert!(!legacy.is_capturing().unwrap());
        call!(rig.driver, cuStreamDestroy_v2(raw));
    });
}

/// What is borrowed is its owner's to destroy.
#[test]
fn borrowed_streams_and_events() {
    Rig::everywhere(|rig| {
        let (raw, handle) = make(rig, 1);
        let mut raw_event = std::ptr::null_mut();
        call!(rig.driver, cuEventCreate(&mut raw_event, 2));
        // SAFETY: both are destroyed at the end of the test.
        let (stream, event) = unsafe {
            let stream = Stream::borrowed(&rig.device, handle).unwrap();
            (stream, Event::borrowed(&rig.device, raw_event))
        };
        assert!(!stream.is_owned());
        let pool = pool(rig);
        let buffer = DeviceBuffer::from_slice(&[1, 2, 3], &stream, &pool).unwrap();
        event.record(&stream).unwrap();
        event.synchronize().unwrap();
        assert_eq!(buffer.to_vec().unwrap(), [1, 2, 3]);
        assert_eq!(event.handle(), raw_event);
        drop((buffer, stream, event));
        call!(rig.driver, cuEventDestroy_v2(raw_event));
        call!(rig.driver, cuStreamDestroy_v2(raw));
    });
}

/// To a pool a borrowed stream is as its own: hits make no driver call, and its end is told before
/// its owner destroys it.
#[test]
fn a_borrowed_stream_costs_no_driver_call() {
    Rig::everywhere(|rig| {
        let (raw, handle) = make(rig, 1);
        let pool = pool(rig);
        let other = rig.stream();
        // SAFETY: the stream is destroyed after both values have been dropped.
        let [first, second] =
            [(); 2].map(|()| unsafe { Stream::borrowed(&rig.device, handle) }.unwrap());
        let bytes = BYTES as usize;
        let warm = pool.malloc(bytes, &first).unwrap();
        pool.free(warm, &first).unwrap();
        let before = rig.driver.calls();
        for stream in [&first, &second] {
            let ptr = pool.malloc(bytes, stream).unwrap();
            assert_eq!(ptr.address(), warm.address());
            pool.free(ptr, stream).unwrap();
        }
        assert_eq!(rig.driver.calls().since(&before).total(), 0);
        // One of them goes; the stream lives on, by the other.
        let held = pool.malloc(bytes, &first).unwrap();
        drop(first);
        let stall = rig.stall(handle);
        rig.fill(held.address(), BYTES, 3, handle);
        rig.check(held.address(), BYTES, 3, handle);
        pool.free(held, &second).unwrap();
        let next = pool.malloc(bytes, &other).unwrap();
        rig.fill(next.address(), BYTES, 4, other.handle());
        drop(stall);
        pool.free(next, &other).unwrap();
        let last = pool.malloc(2 * bytes, &second).unwrap();
        rig.fill(last.address(), 2 * BYTES, 5, handle);
        pool.free(last, &second).unwrap();
        drop(second);
        call!(rig.driver, cuStreamDestroy_v2(raw));
        // Nothing is recorded on a stream that is gone.
        let all = pool.malloc(4 * bytes, &other).unwrap();
        pool.free(all, &other).unwrap();
        pool.validate().unwrap();
        assert_eq!(rig.mismatches(), 0);
    });
}

#[test]
fn a_stream_that_captures_is_not_borrowed() {
    Rig::everywhere(|rig| {
        let (raw, handle) = make(rig, 1);
        begin_capture(rig, raw);
        // SAFETY: the stream is alive.
        let error = unsafe { Stream::borrowed(&rig.device, handle) }.unwrap_err();
        assert!(matches!(error, Error::StreamCapturing), "{error}");
        end_capture(rig, raw);
        call!(rig.driver, cuStreamDestroy_v2(raw));
    });
}

#[test]
fn a_pool_of_streams() {
    Rig::everywhere(|rig| {
        let error = StreamPool::new(&rig.device, 0).unwrap_err();
        assert!(matches!(error, Error::Config { name: "streams", .. }), "{error}");
        let streams = StreamPool::new(&rig.device, 3).unwrap();
        assert_eq!(streams.len(), 3);
        let round: Vec<StreamHandle> = (0..6).map(|_| streams.next().handle()).collect();
        assert_eq!(round[..3], round[3..]);
        assert!(round[0] != round[1] && round[1] != round[2] && round[0] != round[2]);
        assert_eq!(streams.get(4).handle(), streams.iter().nth(1).unwrap().handle());
        // Threads take turns.
        let counts = std::thread::scope(|scope| {
            let takers: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| (0..300).map(|_| streams.next().handle()).collect::<Vec<_>>())
                })
                .collect();
            let taken: Vec<_> =
                takers.into_iter().flat_map(|taker| taker.join().unwrap()).collect();
            let count = |one: &StreamHandle| taken.iter().filter(|got| *got == one).count();
            round[..3].iter().map(count).collect::<Vec<_>>()
        });
        assert_eq!(counts, [400; 3]);
    });
}

/// Whatever borrows one stream shares its owner: its end is told once, after the last of them.
#[test]
fn a_stream_is_borrowed_twice() {
    Rig::everywhere(|rig| {
        let (raw, foreign) = make(rig, 1);
        let pool = pool(rig);
        let pair = |stream: &Stream| {
            let before = rig.driver.calls();
            let ptr = pool.malloc(BYTES as usize, stream).unwrap();
            pool.free(ptr, stream).unwrap();
            rig.driver.calls().since(&before)
        };
        // SAFETY: the stream lives to the end of the test.
        let borrow = || unsafe { Stream::borrowed(&rig.device, foreign) }.unwrap();
        let (first, second) = (borrow(), borrow());
        pair(&first);
        let told = {
            let before = rig.driver.calls();
            drop(first);
            rig.driver.calls().since(&before)
        };
        assert_eq!(told.total(), 0, "it has not ended: {told:?}");
        assert_eq!(pair(&second).total(), 0, "the pool knows it still");
        let before = rig.driver.calls();
        drop(second);
        assert_eq!(rig.driver.calls().since(&before).count("cuEventRecord"), 1, "now it is told");
        // Anew, after its end.
        let third = borrow();
        pair(&third);
        assert_eq!(pair(&third).total(), 0);
        assert!(!third.is_owned());
        drop(third);
        call!(rig.driver, cuStreamDestroy_v2(raw));
        // One of the library's own is kept alive by what borrows it.
        let own = rig.stream();
        // SAFETY: as long as the borrowed value lives so does the stream.
        let bare = unsafe { StreamHandle::from_raw(own.handle().raw()) };
        // SAFETY: as above.
        let borrowed = unsafe { Stream::borrowed(&rig.device, bare) }.unwrap();
        drop(own);
        pair(&borrowed);
        assert!(borrowed.is_owned());
        borrowed.synchronize().unwrap();
    });
}

gated!(recording: cuEventRecord(event: CUevent, stream: CUstream));

/// By the handle of a loan that has ended: whoever lends it says that it lives.
#[test]
fn a_stream_is_borrowed_again_by_a_handle_that_pools_refuse() {
    Rig::everywhere(|rig| {
        let pool = pool(rig);
        let (raw, foreign) = make(rig, 0);
        // SAFETY: alive until the end of the test.
        let borrow = |handle| unsafe { Stream::borrowed(&rig.device, handle) }.unwrap();
        let former = borrow(foreign).handle();
        let error = pool.malloc(1 << 20, former).unwrap_err();
        assert!(matches!(error, Error::StreamEnded), "{error}");
        let again = borrow(former);
        let ptr = pool.malloc(1 << 20, &again).unwrap();
        pool.free(ptr, &again).unwrap();
        drop(again);
        call!(rig.driver, cuStreamDestroy_v2(raw));
    });
}

/// Who borrows a stream while another thread tells the end of its last value waits for that, and has
/// a new one.
#[test]
fn a_stream_is_borrowed_while_its_end_is_told() {
    let sim = Simulator::builder().schedule(Schedule::Eager).build().unwrap();
    let rig = Rig::with(changed(&sim, recording::put), sim);
    let (raw, foreign) = make(&rig, 1);
    let pool = pool(&rig);
    // SAFETY: the stream lives to the end of the test.
    let borrow = || unsafe { Stream::borrowed(&rig.device, foreign) }.unwrap();
    let first = borrow();
    let ptr = pool.malloc(BYTES as usize, &first).unwrap();
    pool.free(ptr, &first).unwrap();
    std::thread::scope(|scope| {
        recording::BEFORE.arm();
        let ends = scope.spawn(|| drop(first));
        recording::BEFORE.wait();
        let borrows = scope.spawn(|| {
            let second = borrow();
            let ptr = pool.malloc(BYTES as usize, &second).unwrap();
            pool.free(ptr, &second).unwrap();
        });
        std::thread::sleep(std::time::Duration::from_millis(50));
        let early = borrows.is_finished();
        recording::BEFORE.open();
        ends.join().unwrap();
        borrows.join().unwrap();
        assert!(!early, "its end was still being told");
    });
    call!(rig.driver, cuStreamDestroy_v2(raw));
    drop(pool);
    rig.assert_clean();
}

/// Threads that borrow one stream at a time, each for a while.
#[test]
fn a_stream_is_borrowed_by_many_threads() {
    Rig::everywhere(|rig| {
        let (raw, foreign) = make(rig, 1);
        let pool = pool(rig);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    call!(rig.driver, cuCtxSetCurrent(rig.device.context()));
                    for _ in 0..100 {
                        // SAFETY: the stream lives to the end of the test.
                        let stream = unsafe { Stream::borrowed(&rig.device, foreign) }.unwrap();
                        let ptr = pool.malloc(BYTES as usize, &stream).unwrap();
                        rig.fill(ptr.address(), BYTES, 3, stream.handle());
                        pool.free(ptr, &stream).unwrap();
                    }
                });
            }
        });
        pool.validate().unwrap();
        rig.device.synchronize().unwrap();
        call!(rig.driver, cuStreamDestroy_v2(raw));
        rig.assert_clean();
    });
}

/// A default stream's handle is the same on every device: the mark is on the device of the stream, or nowhere.
#[test]
fn an_event_is_not_recorded_on_another_devices_default_stream() {
    let rig = Rig::on(Simulator::builder().devices(2).build().unwrap());
    let other = rig.beside(1);
    for stream in [Stream::legacy(&other.device), Stream::per_thread(&other.device)] {
        let event = Event::new(&rig.device).unwrap();
        let error = event.record(&stream).unwrap_err();
        let code = CUresult::CUDA_ERROR_INVALID_HANDLE;
        assert!(matches!(error, Error::Driver { code: of, .. } if of == code), "{error}");
    }
    rig.assert_clean();
}

/// What is in the order of streams is in that of its own device's: a default stream of another one would be taken
/// for its own, and a free of the memory come before what still uses it.
#[test]
fn a_container_is_not_at_home_on_another_devices_stream() {
    let rig = Rig::on(Simulator::builder().devices(2).build().unwrap());
    let (other, stream, pool) = (rig.beside(1), rig.stream(), pool(&rig));
    let of_other =
        [other.stream(), Stream::legacy(&other.device), Stream::per_thread(&other.device)];
    let is_refused =
        |error: &Error| matches!(error, Error::WrongDevice { stream_device: 1, pool_device: 0 });
    for elsewhere in &of_other {
        let error = DeviceBuffer::uninit(1000, elsewhere, &pool).unwrap_err();
        assert!(is_refused(&error), "{error}");
        let mut buffer = DeviceBuffer::from_slice(&[1, 2, 3], &stream, &pool).unwrap();
        let error = buffer.set_stream(elsewhere).unwrap_err();
        assert!(is_refused(&error), "{error}");
        assert_eq!(buffer.stream().handle(), stream.handle(), "it stays");
        buffer.release().unwrap();
    }
    assert_eq!(pool.stats().live_count, 0);
    // Where streams do not matter to a free any will do.
    let managed = Managed::new(&rig.device).unwrap();
    let buffer = DeviceBuffer::from_slice(&[1, 2, 3], &of_other[1], managed).unwrap();
    assert_eq!(buffer.to_vec().unwrap(), [1, 2, 3]);
    drop(buffer);
    rig.assert_clean();
}

/// A free of what is in no order of streams waits for the device that the memory was made with, and for no other: what
/// a container's stream on another one still has to do is waited for before.
#[test]
fn a_container_on_another_devices_stream_is_freed_after_its_work() {
    const BYTES: usize = 1 << 20;
    let each: [fn(&Rig) -> Any; 2] = [
        |rig| Arc::new(Managed::new(&rig.device).unwrap()),
        |rig| Arc::new(PinnedHost::new(&rig.device)),
    ];
    for make in each {
        let late = Simulator::builder().devices(2).schedule(Schedule::Late { patience: 3 });
        let rig = Rig::on(late.build().unwrap());
        let (other, resource) = (rig.beside(1), make(&rig));
        for stream in [other.stream(), Stream::legacy(&other.device)] {
            let fresh = || DeviceBuffer::zeroed(BYTES, &stream, resource.clone()).unwrap();
            drop(fresh());
            fresh().release().unwrap();
            let mut grown = fresh();
            grown.resize(2 * BYTES).unwrap();
            drop(grown);
            // It comes home, and the free waits for what was enqueued elsewhere.
            let mut home = fresh();
            home.set_stream(&rig.stream()).unwrap();
            drop(home);
            let mut home = fresh();
            home.set_stream(&Stream::legacy(&rig.device)).unwrap();
            drop(home);
            let mut away = DeviceBuffer::zeroed(BYTES, &rig.stream(), resource.clone()).unwrap();
            away.set_stream(&stream).unwrap();
            away.as_mut_slice().fill(7).unwrap();
            drop(away);
        }
        rig.device.synchronize().unwrap();
        other.device.synchronize().unwrap();
        rig.assert_clean();
    }
}

/// A wait that cannot be made beside a capture is refused, and one that is not needed any more is none.
#[test]
fn a_container_on_another_devices_stream_that_cannot_be_waited_for() {
    let rig = Rig::on(Simulator::builder().devices(2).build().unwrap());
    let other = rig.beside(1);
    let resource = Limiting::new(Managed::new(&rig.device).unwrap(), 1 << 20);
    let (stream, captured) = (other.stream(), make(&other, 0));
    // SAFETY: it is destroyed below, after this value.
    let capturing = unsafe { Stream::borrowed(&other.device, captured.1) }.unwrap();
    let [kept, nothing] = [10, 0].map(|len| DeviceBuffer::uninit(len, &capturing, &resource));
    let lost = DeviceBuffer::uninit(10, &stream, &resource).unwrap();
    begin_capture(&other, captured.0);
    let error = kept.unwrap().release().unwrap_err();
    assert!(matches!(error, Error::StreamCapturing), "{error}");
    nothing.unwrap().release().unwrap();
    end_capture(&other, captured.0);
    assert_eq!(resource.allocated_bytes(), 512, "it stays the resource's");
    drop(capturing);
    rig.sim.as_ref().unwrap().lose_device(1, CUresult::CUDA_ERROR_ECC_UNCORRECTABLE);
    lost.release().unwrap();
    assert_eq!(resource.allocated_bytes(), 256);
    rig.assert_clean();
    // Its own objects cannot be ended any more.
    std::mem::forget((other, stream));
}

/// What a binning stands on says whose streams it takes.
#[test]
fn a_container_is_not_at_home_where_what_bins_stand_on_is_not() {
    let rig = Rig::on(Simulator::builder().devices(2).build().unwrap());
    let (other, stream) = (rig.beside(1), Stream::legacy(&rig.device));
    let binning = Binning::new(pool(&other), &rig.device);
    let error = DeviceBuffer::uninit(1000, &stream, &binning).unwrap_err();
    let is_refused = matches!(error, Error::WrongDevice { stream_device: 0, pool_device: 1 });
    assert!(is_refused, "{error}");
    rig.assert_clean();
}

/// A default stream's handle is the same on every device, and a wait for that of one says nothing of another's.
#[test]
fn a_wait_for_another_devices_default_stream_passes_nothing() {
    const BLOCK: usize = 4 << 20;
    let mut coalescing = CoalescingConfig::default();
    (coalescing.initial_bytes, coalescing.max_bytes) = (BLOCK as u64, Some(BLOCK as u64));
    let mut fixed = FixedSizeConfig::default();
    (fixed.block_bytes, fixed.blocks_at_once) = (BLOCK, 1);
    for name in ["the default profile", "the paged profile", "coalescing", "fixed size"] {
        let sim = Simulator::builder().devices(2).build().unwrap();
        let rig = Rig::on(sim);
        let (other, stream) = (rig.beside(1), rig.stream());
        let malloc = DeviceMalloc::new(&rig.device);
        let resource: Any = match name {
            "coalescing" => {
                Arc::new(CoalescingPool::new(malloc, &rig.device, &coalescing).unwrap())
            }
            "fixed size" => Arc::new(FixedSize::new(malloc, &rig.device, &fixed).unwrap()),
            _ => all(&rig).into_iter().find(|(of, _)| *of == name).unwrap().1,
        };
        let legacy = StreamHandle::LEGACY;
        let held = resource.allocate(BLOCK, 256, legacy).unwrap();
        rig.fill(held.address(), BLOCK as u64, 7, legacy);
        let stall = rig.stall(legacy);
        rig.check(held.address(), BLOCK as u64, 7, legacy);
        resource.deallocate(held, BLOCK, 256, legacy).unwrap();
        Stream::legacy(&other.device).synchronize().unwrap();
        let next = resource.allocate(BLOCK, 256, stream.handle());
        if let Ok(next) = &next {
            rig.fill(next.address(), BLOCK as u64, 8, stream.handle());
        }
        drop(stall);
        rig.device.synchronize().unwrap();
        assert_eq!(rig.mismatches(), 0, "{name}");
        match next {
            Ok(next) => resource.deallocate(next, BLOCK, 256, stream.handle()).unwrap(),
            Err(error) => assert!(error.is_out_of_memory(), "{name}: {error}"),
        }
        drop(resource);
        rig.assert_clean();
    }
}

/// To ask about an event, or to wait for it, is in no other capture's way.
#[test]
fn events_are_asked_about_beside_captures() {
    Rig::everywhere(|rig| {
        let (stream, capturing) = (rig.stream(), rig.stream());
        let events = [(); 2].map(|()| Event::with_timing(&rig.device).unwrap());
        events.iter().for_each(|event| event.record(&stream).unwrap());
        begin_capture(rig, capturing.handle().raw());
        events[1].is_complete().unwrap();
        events[1].synchronize().unwrap();
        events[1].elapsed_since(&events[0]).unwrap();
        stream.synchronize().unwrap();
        assert_eq!(end_capture(rig, capturing.handle().raw()), 0);
    });
}

/// The default streams end with nobody's value.
#[test]
fn a_default_stream_is_not_borrowed() {
    let rig = Rig::simulated(Schedule::Eager);
    for handle in [StreamHandle::LEGACY, StreamHandle::PER_THREAD] {
        let before = rig.driver.calls();
        // SAFETY: a default stream does not end.
        let stream = unsafe { Stream::borrowed(&rig.device, handle) }.unwrap();
        assert_eq!((stream.handle(), stream.is_owned()), (handle, false));
        assert_eq!(rig.driver.calls().since(&before).total(), 0);
    }
}

/// Parts of a container on the default stream of a thread have one home, which is entered once; and parts of two are
/// entered by all threads in one order.
#[test]
fn parts_are_copied_on_a_threads_default_stream() {
    Rig::everywhere(|rig| {
        let (stream, pool) = (Stream::per_thread(&rig.device), pool(rig));
        let mut values = DeviceVec::from_slice(&[1_u32, 2, 3, 4], &stream, &pool).unwrap();
        let (mut first, second) = values.as_mut_slice().split_at_mut(2).unwrap();
        first.copy_from(&second.as_slice()).unwrap();
        assert_eq!(values.to_vec().unwrap(), [3, 4, 3, 4]);
        let mut others = DeviceVec::from_slice(&[5_u32, 6, 7, 8], &stream, &pool).unwrap();
        {
            let (mut to, from) = values.as_mut_slice().split_at_mut(2).unwrap();
            let (mut back, there) = others.as_mut_slice().split_at_mut(2).unwrap();
            let both = std::sync::Barrier::new(2);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    both.wait();
                    (0..1000).for_each(|_| to.copy_from(&there.as_slice()).unwrap());
                });
                scope.spawn(|| {
                    both.wait();
                    (0..1000).for_each(|_| back.copy_from(&from.as_slice()).unwrap());
                });
            });
        }
        assert_eq!(values.to_vec().unwrap(), [7, 8, 3, 4]);
        assert_eq!(others.to_vec().unwrap(), [3, 4, 7, 8]);
    });
}

/// Which pool has memory of a stream that nobody tells the end of is found by its number, also for a wait of the host's.
#[test]
fn a_wait_for_a_passing_stream_is_told() {
    Rig::everywhere(|rig| {
        let mut config = CoalescingConfig::default();
        (config.initial_bytes, config.max_bytes) = (BYTES, Some(BYTES));
        let malloc = DeviceMalloc::new(&rig.device);
        let pool = CoalescingPool::new(malloc, &rig.device, &config).unwrap();
        let (raw, handle) = make(rig, CUstream_flags_enum::CU_STREAM_NON_BLOCKING.0);
        // SAFETY: it is destroyed below.
        let passing = unsafe { Stream::passing(&rig.device, handle) };
        let own = rig.stream();
        let take = |stream: &Stream| pool.allocate(BYTES as usize, 256, stream.handle()).unwrap();
        let free = |ptr, stream: &Stream| {
            pool.deallocate(ptr, BYTES as usize, 256, stream.handle()).unwrap();
        };
        free(take(&own), &own);
        let ptr = take(&passing);
        rig.fill(ptr.address(), BYTES, 1, handle);
        free(ptr, &passing);
        passing.synchronize().unwrap();
        let before = rig.driver.calls();
        let ptr = take(&own);
        assert_eq!(rig.driver.calls().since(&before).total(), 0, "nobody's");
        free(ptr, &own);
        call!(rig.driver, cuStreamDestroy_v2(raw));
    });
}

//! One thread allocates, another frees, in turn: a hundred times, over every pair of streams.

use std::ptr;
use std::sync::mpsc::sync_channel;

use cuda_sys::types::{CUevent, CUevent_flags_enum};
use vpmm::StreamHandle;

use crate::subjects::{Shared, each};
use crate::support::{Rig, call};
use crate::watched::{Held, Watched};

/// An event that passes from thread to thread.
struct Handed(CUevent);

// SAFETY: an event handle is a token that any thread may pass to the driver.
unsafe impl Send for Handed {}

/// Makes an event behind all work of a stream, on the thread that the stream may belong to.
fn behind(rig: &Rig, stream: StreamHandle) -> Handed {
    call!(rig.driver, cuCtxSetCurrent(rig.device.context()));
    let mut event = ptr::null_mut();
    let flags = CUevent_flags_enum::CU_EVENT_DISABLE_TIMING.0;
    call!(rig.driver, cuEventCreate(&mut event, flags));
    call!(rig.driver, cuEventRecord(event, stream.raw()));
    Handed(event)
}

fn hand_over(rig: &Rig, resource: &Shared, from: StreamHandle, to: StreamHandle) {
    let watched = Watched::new(rig, resource);
    let most = resource.facts().max_bytes.unwrap_or(1 << 20).min(1 << 20);
    // A few are under way at a time, so that each side meets memory that the other has freed.
    let (give, take) = sync_channel::<(Held, Handed)>(4);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0..100 {
                let bytes = (number * 7919 % most) + 8;
                let held = watched.allocate(bytes.min(most), from);
                give.send((held, behind(rig, from))).expect("the other thread listens");
            }
            drop(give);
            rig.device.synchronize().expect("the device finishes");
        });
        scope.spawn(|| {
            call!(rig.driver, cuCtxSetCurrent(rig.device.context()));
            for (held, event) in take {
                call!(rig.driver, cuStreamWaitEvent(to.raw(), event.0, 0));
                call!(rig.driver, cuEventDestroy_v2(event.0));
                watched.free(held, to);
            }
            rig.device.synchronize().expect("the device finishes");
        });
    });
    watched.assert_intact();
}

#[test]
fn from_thread_to_thread_on_one_stream() {
    each(|rig, resource| {
        let stream = rig.stream();
        hand_over(rig, resource, stream.handle(), stream.handle());
    });
}

#[test]
fn from_stream_to_stream() {
    each(|rig, resource| {
        let (a, b) = (rig.stream(), rig.stream());
        hand_over(rig, resource, a.handle(), b.handle());
        hand_over(rig, resource, b.handle(), a.handle());
    });
}

#[test]
fn between_default_streams() {
    each(|rig, resource| {
        let own = rig.stream();
        hand_over(rig, resource, StreamHandle::LEGACY, StreamHandle::LEGACY);
        hand_over(rig, resource, StreamHandle::PER_THREAD, StreamHandle::PER_THREAD);
        hand_over(rig, resource, StreamHandle::PER_THREAD, own.handle());
        hand_over(rig, resource, own.handle(), StreamHandle::LEGACY);
    });
}

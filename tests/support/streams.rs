//! Streams that the library did not make, and captures.

use cuda_sys::types::*;
use vpmm::{Error, StreamHandle};

use super::{Rig, Watched, call};

/// A stream made by the driver, in the context that is current.
fn made(rig: &Rig, flags: u32) -> (CUstream, StreamHandle) {
    let mut stream = std::ptr::null_mut();
    call!(rig.driver, cuStreamCreate(&mut stream, flags));
    // SAFETY: tests use the handle while the stream is alive.
    (stream, unsafe { StreamHandle::from_raw(stream) })
}

/// A stream made by the driver, in the context of the rig's device.
pub(crate) fn make(rig: &Rig, flags: u32) -> (CUstream, StreamHandle) {
    call!(rig.driver, cuCtxSetCurrent(rig.device.context()));
    made(rig, flags)
}

/// Begins a capture in global mode, which is the easiest to break.
pub(crate) fn begin_capture(rig: &Rig, stream: CUstream) {
    begin(rig, stream, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL);
}

/// Begins a capture that forbids other threads nothing.
pub(crate) fn begin_quiet_capture(rig: &Rig, stream: CUstream) {
    begin(rig, stream, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
}

fn begin(rig: &Rig, stream: CUstream, mode: CUstreamCaptureMode) {
    call!(rig.driver, cuCtxSetCurrent(rig.device.context()));
    call!(rig.driver, cuStreamBeginCapture_v2(stream, mode));
}

/// Ends a capture, which must be intact, and answers how many nodes it has.
pub(crate) fn end_capture(rig: &Rig, stream: CUstream) -> usize {
    let mut graph = std::ptr::null_mut();
    call!(rig.driver, cuStreamEndCapture(stream, &mut graph));
    assert!(!graph.is_null(), "the capture was invalidated");
    let mut nodes = 0;
    call!(rig.driver, cuGraphGetNodes(graph, std::ptr::null_mut(), &mut nodes));
    call!(rig.driver, cuGraphDestroy(graph));
    nodes
}

/// A stream of a second context of the pool's device is refused, by name.
pub(crate) fn assert_second_context_refused(watched: &Watched<'_>, bytes: usize) {
    let driver = &watched.rig.driver;
    let mut context = std::ptr::null_mut();
    call!(driver, cuCtxCreate_v2(&mut context, 0, 0));
    let (stream, handle) = made(watched.rig, 0);
    let error = watched.pool.malloc(bytes, handle).unwrap_err();
    assert!(matches!(error, Error::WrongContext { device: 0 }), "{error}");
    call!(driver, cuStreamDestroy_v2(stream));
    call!(driver, cuCtxDestroy_v2(context));
    watched.assert_intact();
}

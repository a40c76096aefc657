//! Captures and the graphs that they make, by raw calls.

use std::ptr;

use cuda_sys::types::*;
use vpmm::{Driver, StreamHandle};

use crate::support::{Rig, call};

pub(crate) const MODES: [CUstreamCaptureMode; 3] = [
    CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL,
    CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
    CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED,
];
pub(crate) const GLOBAL: CUstreamCaptureMode = MODES[0];
pub(crate) const RELAXED: CUstreamCaptureMode = MODES[2];

/// A graph that can be launched, until drop.
pub(crate) struct Graph<'a> {
    driver: &'a Driver,
    graph: CUgraph,
    executable: CUgraphExec,
}

/// A stream begins to capture.
pub(crate) fn begin(rig: &Rig, stream: impl Into<StreamHandle>, mode: CUstreamCaptureMode) {
    call!(rig.driver, cuStreamBeginCapture_v2(stream.into().raw(), mode));
}

/// The capture ends, unharmed.
pub(crate) fn end(rig: &Rig, stream: impl Into<StreamHandle>) -> Graph<'_> {
    let mut graph = stop(rig, stream);
    graph.prepare();
    graph
}

/// As [`end`], for a graph that is prepared later: a driver may wait for the device to do that.
pub(crate) fn stop(rig: &Rig, stream: impl Into<StreamHandle>) -> Graph<'_> {
    let driver = &rig.driver;
    let mut graph = ptr::null_mut();
    call!(driver, cuStreamEndCapture(stream.into().raw(), &mut graph));
    Graph { driver, graph, executable: ptr::null_mut() }
}

impl Graph<'_> {
    pub(crate) fn prepare(&mut self) {
        call!(self.driver, cuGraphInstantiateWithFlags(&mut self.executable, self.graph, 0));
    }

    pub(crate) fn launch(&self, stream: impl Into<StreamHandle>) {
        call!(self.driver, cuGraphLaunch(self.executable, stream.into().raw()));
    }
}

impl Drop for Graph<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            if !self.executable.is_null() {
                call!(self.driver, cuGraphExecDestroy(self.executable));
            }
            call!(self.driver, cuGraphDestroy(self.graph));
        }
    }
}

/// Enqueues a copy within the device.
pub(crate) fn copy(rig: &Rig, to: u64, from: u64, bytes: u64, stream: impl Into<StreamHandle>) {
    call!(rig.driver, cuMemcpyDtoDAsync_v2(to, from, bytes as usize, stream.into().raw()));
}

/// A stream made by raw calls, destroyed at drop.
pub(crate) struct Raw<'a> {
    driver: &'a Driver,
    stream: CUstream,
}

impl<'a> Raw<'a> {
    /// `blocking` ones are ordered with the legacy default stream.
    pub(crate) fn new(rig: &'a Rig, blocking: bool) -> Self {
        let flags = if blocking { 0 } else { CUstream_flags_enum::CU_STREAM_NON_BLOCKING.0 };
        let mut stream = ptr::null_mut();
        call!(rig.driver, cuCtxSetCurrent(rig.device.context()));
        call!(rig.driver, cuStreamCreate(&mut stream, flags));
        Self { driver: &rig.driver, stream }
    }

    pub(crate) fn handle(&self) -> StreamHandle {
        // SAFETY: alive while `self` is.
        unsafe { StreamHandle::from_raw(self.stream) }
    }
}

impl Drop for Raw<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            call!(self.driver, cuStreamDestroy_v2(self.stream));
        }
    }
}

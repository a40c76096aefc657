//! Stream capture: what is allowed, what invalidates, and what a graph replays.

mod support;

use std::ptr::null_mut;

use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::*;
use support::{GRANULE, Gpu, call, ok};

const GLOBAL: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
const THREAD_LOCAL: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
const RELAXED: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
const UNSUPPORTED: CUresult = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
const INVALIDATED: CUresult = CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
const NONE: CUstreamCaptureStatus = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
const ACTIVE: CUstreamCaptureStatus = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE;
const BROKEN: CUstreamCaptureStatus = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED;

impl Gpu {
    fn begin(&self, stream: CUstream, mode: CUstreamCaptureMode) {
        ok!(self, cuStreamBeginCapture_v2(stream, mode));
    }

    fn end(&self, stream: CUstream) -> Result<CUgraph, CUresult> {
        let mut graph = null_mut();
        match call!(self, cuStreamEndCapture(stream, &mut graph)) {
            CUresult::CUDA_SUCCESS => Ok(graph),
            code => {
                assert!(graph.is_null());
                Err(code)
            }
        }
    }

    fn status(&self, stream: CUstream) -> CUstreamCaptureStatus {
        let mut status = NONE;
        ok!(self, cuStreamIsCapturing(stream, &mut status));
        status
    }

    fn instantiate(&self, graph: CUgraph) -> CUgraphExec {
        let mut executable = null_mut();
        ok!(self, cuGraphInstantiateWithFlags(&mut executable, graph, 0));
        executable
    }
}

#[test]
fn captured_work_runs_at_each_launch() {
    let gpu = Gpu::new(Simulator::builder().schedule(Schedule::Late { patience: 9 }));
    let (stream, side) = (gpu.stream(), gpu.stream());
    let memory = gpu.alloc(8);
    gpu.begin(stream, GLOBAL);
    assert_eq!(gpu.status(stream), ACTIVE);
    let add = |at: u64| {
        move |memory: &mut cuda_sim::DeviceMemory<'_>| {
            let value = memory.read_u32(at)?;
            memory.write_u32(at, value + 1)
        }
    };
    gpu.sim.enqueue(stream, "add", add(memory)).unwrap();
    // A fork and a join through events take the other stream along.
    let fork = gpu.record(stream);
    ok!(gpu, cuStreamWaitEvent(side, fork, 0));
    assert_eq!(gpu.status(side), ACTIVE);
    gpu.sim.enqueue(side, "add", add(memory + 4)).unwrap();
    let join = gpu.record(side);
    ok!(gpu, cuStreamWaitEvent(stream, join, 0));
    let graph = gpu.end(stream).unwrap();
    assert_eq!((gpu.status(stream), gpu.status(side)), (NONE, NONE));
    let mut nodes = 0;
    ok!(gpu, cuGraphGetNodes(graph, null_mut(), &mut nodes));
    assert_eq!(nodes, 2);
    let executable = gpu.instantiate(graph);
    ok!(gpu, cuGraphDestroy(graph));
    ok!(gpu, cuStreamSynchronize(stream));
    assert_eq!(gpu.word(memory), 0, "capturing runs nothing");
    for _ in 0..3 {
        ok!(gpu, cuGraphLaunch(executable, side));
    }
    ok!(gpu, cuStreamSynchronize(side));
    assert_eq!((gpu.word(memory), gpu.word(memory + 4)), (3, 3));
    ok!(gpu, cuGraphExecDestroy(executable));
    assert_eq!(gpu.sim.leaks().graphs, 0);
    gpu.sim.assert_clean();
}

impl Gpu {
    /// Another stream joins the capture of a stream, which comes back to it after some work.
    fn fork(&self, stream: CUstream, side: CUstream, work: impl FnOnce(CUstream)) -> CUevent {
        let fork = self.record(stream);
        ok!(self, cuStreamWaitEvent(side, fork, 0));
        work(side);
        self.record(side)
    }

    fn launch(&self, graph: CUgraph, stream: CUstream) {
        let executable = self.instantiate(graph);
        ok!(self, cuGraphLaunch(executable, stream));
        ok!(self, cuGraphLaunch(executable, stream));
        ok!(self, cuGraphExecDestroy(executable));
        ok!(self, cuGraphDestroy(graph));
    }
}

#[test]
fn branches_of_a_graph_run_side_by_side() {
    for meets in [false, true] {
        let gpu = Gpu::new(Simulator::builder().schedule(Schedule::Late { patience: 9 }));
        let (stream, side, later) = (gpu.stream(), gpu.stream(), gpu.stream());
        let memory = gpu.alloc(8);
        gpu.begin(stream, GLOBAL);
        gpu.fill(memory, 1, 2, stream);
        let back = gpu.fork(stream, side, |side| gpu.fill(memory, 2, 1, side));
        // Beside the other stream's work, with that stream's bytes or without.
        gpu.fill(memory + if meets { 0 } else { 4 }, 3, 1, stream);
        ok!(gpu, cuStreamWaitEvent(stream, back, 0));
        gpu.fill(memory, 4, 2, stream);
        let graph = gpu.end(stream).unwrap();
        gpu.launch(graph, stream);
        // What comes after a launch comes after all branches, and the end of the stream ends none.
        let end = gpu.record(stream);
        ok!(gpu, cuStreamDestroy_v2(stream));
        ok!(gpu, cuStreamWaitEvent(later, end, 0));
        gpu.fill(memory, 5, 2, later);
        ok!(gpu, cuStreamSynchronize(later));
        assert_eq!((gpu.word(memory), gpu.word(memory + 4)), (5, 5));
        let races = gpu.sim.report().races;
        assert_eq!(races.len(), if meets { 2 } else { 0 }, "one a launch: {races:?}");
    }
}

/// The documentation: each launch comes after those before it of the same executable graph.
#[test]
fn launches_of_a_graph_come_one_after_another() {
    for branches in [false, true] {
        let gpu = Gpu::new(Simulator::builder().schedule(Schedule::Late { patience: 9 }));
        let (stream, side, other) = (gpu.stream(), gpu.stream(), gpu.stream());
        let memory = gpu.alloc(8);
        gpu.begin(stream, GLOBAL);
        if branches {
            let back = gpu.fork(stream, side, |side| gpu.fill(memory, 2, 1, side));
            gpu.fill(memory + 4, 2, 1, stream);
            ok!(gpu, cuStreamWaitEvent(stream, back, 0));
        }
        gpu.fill(memory, 3, 2, stream);
        let graph = gpu.end(stream).unwrap();
        let [first, second] = [(); 2].map(|()| gpu.instantiate(graph));
        let spin = gpu.sim.spin(stream).unwrap();
        ok!(gpu, cuGraphLaunch(first, stream));
        ok!(gpu, cuGraphLaunch(first, other));
        gpu.sim.run_until_idle();
        assert_eq!(gpu.word(memory), 0, "the second waits for the first");
        spin.release();
        ok!(gpu, cuStreamSynchronize(other));
        assert_eq!(gpu.word(memory), 3);
        gpu.sim.assert_clean();
        // Nothing orders the launches of two.
        ok!(gpu, cuGraphLaunch(first, stream));
        ok!(gpu, cuGraphLaunch(second, other));
        ok!(gpu, cuCtxSynchronize());
        assert!(!gpu.sim.report().races.is_empty());
    }
}

#[test]
fn a_graph_in_a_capture_keeps_its_branches() {
    let gpu = Gpu::new(Simulator::builder());
    let (stream, side) = (gpu.stream(), gpu.stream());
    let memory = gpu.alloc(8);
    gpu.begin(stream, GLOBAL);
    let back = gpu.fork(stream, side, |side| gpu.fill(memory, 2, 1, side));
    gpu.fill(memory, 3, 1, stream);
    ok!(gpu, cuStreamWaitEvent(stream, back, 0));
    let inner = gpu.end(stream).unwrap();
    gpu.begin(stream, GLOBAL);
    gpu.fill(memory, 1, 2, stream);
    gpu.launch(inner, stream);
    gpu.fill(memory, 4, 2, stream);
    let outer = gpu.end(stream).unwrap();
    let mut nodes = 0;
    ok!(gpu, cuGraphGetNodes(outer, null_mut(), &mut nodes));
    assert_eq!(nodes, 6, "two of its own, and twice two");
    gpu.launch(outer, side);
    ok!(gpu, cuStreamSynchronize(side));
    // In each launch of the inner one its two branches meet, and nothing else does.
    assert_eq!(gpu.sim.report().races.len(), 4);
}

#[test]
fn vmm_calls_and_other_streams_events_do_not_harm() {
    let gpu = Gpu::new(Simulator::builder());
    let (stream, other) = (gpu.stream(), gpu.stream());
    let range = gpu.reserve(GRANULE);
    gpu.begin(stream, GLOBAL);
    let handle = gpu.create(GRANULE);
    gpu.map(range, GRANULE, handle);
    ok!(gpu, cuMemUnmap(range, GRANULE));
    let event = gpu.record(other);
    assert_eq!(gpu.status(stream), ACTIVE);
    let graph = gpu.end(stream).unwrap();
    ok!(gpu, cuGraphDestroy(graph));
    ok!(gpu, cuEventQuery(event));
    gpu.sim.assert_clean();
}

#[test]
fn a_query_invalidates_a_global_capture() {
    let gpu = Gpu::new(Simulator::builder());
    let (stream, other) = (gpu.stream(), gpu.stream());
    let event = gpu.record(other);
    gpu.begin(stream, GLOBAL);
    assert_eq!(gpu.query(event), UNSUPPORTED);
    assert_eq!(gpu.status(stream), BROKEN);
    let memory = gpu.alloc_relaxed(4);
    assert_eq!(call!(gpu, cuMemsetD32Async(memory, 1, 1, stream)), INVALIDATED);
    assert_eq!(gpu.end(stream), Err(INVALIDATED));
    assert_eq!(gpu.status(stream), NONE);
    ok!(gpu, cuEventQuery(event));
}

impl Gpu {
    /// Allocates under a relaxed mode, which harms no capture.
    fn alloc_relaxed(&self, bytes: usize) -> u64 {
        let mut mode = RELAXED;
        ok!(self, cuThreadExchangeStreamCaptureMode(&mut mode));
        let address = self.alloc(bytes);
        ok!(self, cuThreadExchangeStreamCaptureMode(&mut mode));
        assert_eq!(mode, RELAXED);
        address
    }
}

#[test]
fn who_may_query_during_whose_capture() {
    // (capture's mode, whether by this thread, the querying thread's mode, allowed)
    let cases = [
        (GLOBAL, true, GLOBAL, false),
        (GLOBAL, false, GLOBAL, false),
        (GLOBAL, false, THREAD_LOCAL, true),
        (GLOBAL, true, THREAD_LOCAL, false),
        (GLOBAL, true, RELAXED, true),
        (GLOBAL, false, RELAXED, true),
        (THREAD_LOCAL, true, GLOBAL, false),
        (THREAD_LOCAL, false, GLOBAL, true),
        (RELAXED, true, GLOBAL, true),
        (RELAXED, false, GLOBAL, true),
    ];
    for (mode, own, mut thread_mode, allowed) in cases {
        let gpu = Gpu::new(Simulator::builder());
        let (stream, other) = (gpu.stream() as usize, gpu.stream());
        let event = gpu.record(other);
        if own {
            gpu.begin(stream as _, mode);
        } else {
            let context = gpu.retain(0) as usize;
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    ok!(gpu, cuCtxSetCurrent(context as _));
                    gpu.begin(stream as _, mode);
                });
            });
        }
        let expected = if allowed { CUresult::CUDA_SUCCESS } else { UNSUPPORTED };
        let asked = thread_mode;
        ok!(gpu, cuThreadExchangeStreamCaptureMode(&mut thread_mode));
        assert_eq!(gpu.query(event), expected, "{mode:?} {own} {asked:?}");
        let status = gpu.status(stream as _);
        assert_eq!(status, if allowed { ACTIVE } else { BROKEN }, "{mode:?} {own} {asked:?}");
    }
}

#[test]
fn captured_events_cannot_be_asked() {
    let gpu = Gpu::new(Simulator::builder());
    let stream = gpu.stream();
    gpu.begin(stream, RELAXED);
    let event = gpu.record(stream);
    assert_eq!(gpu.query(event), CUresult::CUDA_ERROR_CAPTURED_EVENT);
    assert_eq!(gpu.end(stream), Err(INVALIDATED));
    // It has no meaning until it is recorded in the open.
    let invalid = CUresult::CUDA_ERROR_INVALID_VALUE;
    assert_eq!(call!(gpu, cuEventSynchronize(event)), invalid);
    ok!(gpu, cuEventRecord(event, stream));
    ok!(gpu, cuEventSynchronize(event));
}

#[test]
fn the_legacy_stream_breaks_captures_of_blocking_streams() {
    for (flags, expected) in
        [(0, CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT), (1, CUresult::CUDA_SUCCESS)]
    {
        let gpu = Gpu::new(Simulator::builder());
        let stream = gpu.stream_with(flags);
        let memory = gpu.alloc(4);
        gpu.begin(stream, RELAXED);
        assert_eq!(call!(gpu, cuMemsetD32Async(memory, 1, 1, null_mut())), expected);
        assert_eq!(gpu.end(stream).is_ok(), expected == CUresult::CUDA_SUCCESS);
    }
}

#[test]
fn a_context_is_not_waited_for_where_a_stream_of_it_has_joined_a_capture() {
    let gpu = Gpu::new(Simulator::builder().devices(2));
    let stream = gpu.stream();
    let first = gpu.retain(0);
    let second = gpu.retain(1);
    let side = gpu.stream();
    ok!(gpu, cuCtxSetCurrent(first));
    gpu.begin(stream, RELAXED);
    let fork = gpu.record(stream);
    ok!(gpu, cuCtxSetCurrent(second));
    ok!(gpu, cuCtxSynchronize());
    ok!(gpu, cuStreamWaitEvent(side, fork, 0));
    assert_eq!(call!(gpu, cuCtxSynchronize()), UNSUPPORTED);
    assert_eq!(gpu.end(stream), Err(INVALIDATED));
    ok!(gpu, cuCtxSynchronize());
}

/// Nodes run where they were captured, wherever the graph is launched.
#[test]
fn a_graph_s_work_runs_on_the_devices_that_it_was_captured_on() {
    for schedule in [Schedule::Eager, Schedule::Late { patience: 9 }] {
        let gpu = Gpu::new(Simulator::builder().schedule(schedule).devices(2).peer_access(false));
        let first = gpu.retain(0);
        let (stream, here) = (gpu.stream(), gpu.alloc(8));
        let second = gpu.retain(1);
        let (side, there) = (gpu.stream(), gpu.alloc(8));
        let join = gpu.event();
        ok!(gpu, cuCtxSetCurrent(first));
        gpu.begin(stream, RELAXED);
        let fork = gpu.record(stream);
        ok!(gpu, cuStreamWaitEvent(side, fork, 0));
        gpu.fill(here, 1, 2, stream);
        gpu.fill(there, 2, 2, side);
        ok!(gpu, cuCtxSetCurrent(second));
        ok!(gpu, cuEventRecord(join, side));
        ok!(gpu, cuCtxSetCurrent(first));
        ok!(gpu, cuStreamWaitEvent(stream, join, 0));
        let graph = gpu.end(stream).unwrap();
        let executable = gpu.instantiate(graph);
        // And as part of another one.
        gpu.begin(side, RELAXED);
        ok!(gpu, cuGraphLaunch(executable, side));
        let outer = gpu.end(side).unwrap();
        let nested = gpu.instantiate(outer);
        for (executable, on) in [(executable, stream), (executable, side), (nested, stream)] {
            ok!(gpu, cuMemsetD8_v2(here, 0, 8));
            ok!(gpu, cuCtxSynchronize());
            ok!(gpu, cuGraphLaunch(executable, on));
            ok!(gpu, cuStreamSynchronize(on));
            assert_eq!([gpu.word(here), gpu.word(there)], [1, 2]);
        }
        gpu.sim.assert_clean();
    }
}

/// Like any other copy.
#[test]
fn a_copy_within_the_host_is_captured() {
    let gpu = Gpu::new(Simulator::builder());
    let stream = gpu.stream();
    let (from, mut to) = ([7_u8; 8], [0_u8; 8]);
    let target = (&raw mut to).cast::<u8>();
    gpu.begin(stream, RELAXED);
    ok!(gpu, cuMemcpyAsync(target as u64, from.as_ptr() as u64, 8, stream));
    let graph = gpu.end(stream).unwrap();
    let mut nodes = 0;
    ok!(gpu, cuGraphGetNodes(graph, null_mut(), &mut nodes));
    // SAFETY: the array lives on, and nothing writes it meanwhile.
    let now = || unsafe { target.read_volatile() };
    assert_eq!((nodes, now()), (1, 0));
    let executable = gpu.instantiate(graph);
    ok!(gpu, cuGraphLaunch(executable, stream));
    ok!(gpu, cuStreamSynchronize(stream));
    assert_eq!(now(), 7);
    gpu.sim.assert_clean();
}

#[test]
fn calls_on_memory_pools_invalidate_a_capture() {
    type OfPool = fn(&Gpu, CUmemoryPool, &CUmemPoolProps) -> CUresult;
    let calls: [OfPool; 4] = [
        |gpu, _, props| call!(gpu, cuMemPoolCreate(&mut null_mut(), props)),
        |gpu, pool, _| call!(gpu, cuMemPoolSetAccess(pool, &support::access(0, 3), 1)),
        |gpu, pool, props| {
            let (mut flags, mut place) = (CUmemAccess_flags(0), props.location);
            call!(gpu, cuMemPoolGetAccess(&mut flags, pool, &mut place))
        },
        |gpu, pool, _| call!(gpu, cuMemPoolDestroy(pool)),
    ];
    for call in calls {
        let gpu = Gpu::new(Simulator::builder());
        let props = CUmemPoolProps {
            allocType: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            location: support::location(0),
            ..Default::default()
        };
        let (stream, mut pool) = (gpu.stream(), null_mut());
        ok!(gpu, cuMemPoolCreate(&mut pool, &props));
        gpu.begin(stream, GLOBAL);
        assert_eq!(call(&gpu, pool, &props), UNSUPPORTED);
        assert_eq!(gpu.end(stream), Err(INVALIDATED));
        gpu.begin(stream, RELAXED);
        assert_eq!(call(&gpu, pool, &props), CUresult::CUDA_SUCCESS);
        assert!(gpu.end(stream).is_ok());
    }
}

/// cuEventRecordWithFlags and cuStreamWaitEvent: a flag for captures only.
#[test]
fn external_events_are_for_captures() {
    let gpu = Gpu::new(Simulator::builder());
    let (stream, event) = (gpu.stream(), gpu.event());
    let record = |flags| call!(gpu, cuEventRecordWithFlags(event, stream, flags));
    let wait = |flags| call!(gpu, cuStreamWaitEvent(stream, event, flags));
    let invalid = CUresult::CUDA_ERROR_INVALID_VALUE;
    assert_eq!([record(0), wait(0)], [CUresult::CUDA_SUCCESS; 2]);
    let outside = CUresult::CUDA_ERROR_ILLEGAL_STATE;
    assert_eq!([record(1), wait(1)], [outside; 2]);
    assert_eq!([record(2), wait(2)], [invalid; 2]);
    gpu.begin(stream, RELAXED);
    assert_eq!([record(1), wait(1)], [CUresult::CUDA_ERROR_NOT_SUPPORTED; 2]);
    assert_eq!([record(2), wait(2)], [invalid; 2]);
    ok!(gpu, cuGraphDestroy(gpu.end(stream).unwrap()));
}

#[test]
fn captures_end_where_they_began() {
    let gpu = Gpu::new(Simulator::builder());
    let (stream, side) = (gpu.stream(), gpu.stream());
    assert_eq!(gpu.end(stream), Err(CUresult::CUDA_ERROR_ILLEGAL_STATE));
    gpu.begin(stream, GLOBAL);
    let again = call!(gpu, cuStreamBeginCapture_v2(stream, GLOBAL));
    assert_eq!(again, CUresult::CUDA_ERROR_ILLEGAL_STATE);
    let fork = gpu.record(stream);
    ok!(gpu, cuStreamWaitEvent(side, fork, 0));
    gpu.sim.enqueue(side, "work", |_| Ok(())).unwrap();
    assert_eq!(gpu.end(stream), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED));
    assert_eq!(gpu.status(side), NONE);
    // An event from outside of the capture cannot be waited for in it.
    let outside = gpu.record(side);
    gpu.begin(stream, GLOBAL);
    let isolated = call!(gpu, cuStreamWaitEvent(stream, outside, 0));
    assert_eq!(isolated, CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    assert_eq!(gpu.end(stream), Err(INVALIDATED));
    // Nor may a stream be waited for while it is captured.
    gpu.begin(stream, RELAXED);
    assert_eq!(call!(gpu, cuStreamSynchronize(stream)), UNSUPPORTED);
    assert_eq!(gpu.end(stream), Err(INVALIDATED));
}

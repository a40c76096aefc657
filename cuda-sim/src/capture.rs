//! Stream capture and the graphs it makes.
//!
//! Work given to a capturing stream becomes a node instead of running. In a launched graph a node
//! comes after the nodes that it came after in the capture, and after no others: branches run side
//! by side, each chain of nodes on a lane of its own, which is a stream without a handle.

use std::sync::Arc;

use cuda_sys::types::{
    CUgraph, CUgraphEdgeData, CUgraphExec, CUgraphNode, CUresult, CUstream, CUstreamCaptureMode,
    CUstreamCaptureStatus,
};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::arguments::Out;
use crate::call::Call;
use crate::context::ContextKey;
use crate::handles::Handles;
use crate::race::StreamKey;
use crate::stream::{Kind, Recorded, Work};

/// A capture for the life of the simulator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CaptureId(u64);

/// A node by its place in its graph.
pub(crate) type NodeId = usize;

#[derive(Clone, Debug)]
struct Node {
    work: Work,
    what: Arc<str>,
    after: Vec<NodeId>,
    /// Of the stream that it was captured on.
    device: usize,
}

#[derive(Debug)]
struct Capture {
    mode: CUstreamCaptureMode,
    origin: StreamKey,
    thread: u64,
    invalid: bool,
    nodes: Vec<Node>,
    /// What the next node of each stream that takes part comes after.
    frontiers: FxHashMap<StreamKey, Vec<NodeId>>,
}

#[derive(Debug)]
struct Executable {
    nodes: Arc<[Node]>,
    /// The end of its last launch, which the next comes after on whatever stream.
    launched: Option<Recorded>,
}

#[derive(Debug)]
pub(crate) struct Captures {
    running: FxHashMap<CaptureId, Capture>,
    graphs: Handles<Arc<[Node]>>,
    executables: Handles<Executable>,
    next: u64,
}

impl Captures {
    pub(crate) fn new() -> Self {
        Self {
            running: FxHashMap::default(),
            graphs: Handles::new(4),
            executables: Handles::new(5),
            next: 1,
        }
    }

    /// Whether a capture is under way and nothing has made it invalid.
    pub(crate) fn is_valid(&self, id: CaptureId) -> bool {
        self.running.get(&id).is_some_and(|capture| !capture.invalid)
    }

    /// Graphs and executable graphs that were not destroyed.
    pub(crate) fn graphs(&self) -> usize {
        self.graphs.len() + self.executables.len()
    }

    /// What work that comes after a stream's captured work depends on.
    pub(crate) fn frontier(&self, id: CaptureId, stream: StreamKey) -> Vec<NodeId> {
        let capture = self.running.get(&id);
        capture.and_then(|capture| capture.frontiers.get(&stream)).cloned().unwrap_or_default()
    }
}

const GLOBAL: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
const RELAXED: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;

impl Call<'_> {
    /// Gives work to a stream: to its queue, or to the graph that it is captured into.
    pub(crate) fn submit(
        &mut self,
        stream: StreamKey,
        work: Work,
        what: &Arc<str>,
    ) -> Result<Option<Recorded>, CUresult> {
        let Some(id) = self.capture_of(stream)? else {
            return self.enqueue(stream, &[], work, what).map(Some);
        };
        let device = self.device_of(stream)?;
        if let Some(capture) = self.captures.running.get_mut(&id) {
            let frontier = capture.frontiers.entry(stream).or_default();
            let after = std::mem::replace(frontier, vec![capture.nodes.len()]);
            capture.nodes.push(Node { work, what: Arc::clone(what), after, device });
        }
        Ok(None)
    }

    /// The capture that work on a stream belongs to.
    ///
    /// # Errors
    /// If that capture is invalid, or if the stream is the legacy one and a stream that it
    /// orders with is capturing, which makes that capture invalid.
    pub(crate) fn capture_of(&mut self, stream: StreamKey) -> Result<Option<CaptureId>, CUresult> {
        if self.captures.running.is_empty() {
            return Ok(None);
        }
        let gone = CUresult::CUDA_ERROR_INVALID_HANDLE;
        let capture = self.streams.by_key.get(&stream).ok_or(gone)?.capture;
        if let Some(id) = capture {
            let invalid = self.captures.running.get(&id).is_none_or(|capture| capture.invalid);
            return if invalid {
                Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
            } else {
                Ok(Some(id))
            };
        }
        let beside: Vec<_> = self.captures_beside(stream)?.collect();
        if beside.is_empty() {
            return Ok(None);
        }
        beside.into_iter().for_each(|id| self.invalidate(id));
        Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
    }

    /// The captures of streams that the legacy stream orders with; none for other streams.
    fn captures_beside(
        &self,
        stream: StreamKey,
    ) -> Result<impl Iterator<Item = CaptureId> + '_, CUresult> {
        let gone = CUresult::CUDA_ERROR_INVALID_HANDLE;
        let stream = self.streams.by_key.get(&stream).ok_or(gone)?;
        let context = self.contexts.by_key.get(&stream.context).ok_or(gone)?;
        let blocking = (stream.kind == Kind::Legacy).then_some(&context.blocking);
        let capture = |key| self.streams.by_key.get(key).and_then(|stream| stream.capture);
        Ok(blocking.into_iter().flatten().filter_map(capture))
    }

    /// For calls that could break a capture: refuses while one is under way that this thread
    /// has not been told to ignore, and makes that capture invalid.
    pub(crate) fn forbid_in_capture(&mut self) -> Result<(), CUresult> {
        if self.captures.running.is_empty() {
            return Ok(());
        }
        let mode = *self.capture_mode();
        if mode == RELAXED {
            return Ok(());
        }
        let thread = self.thread;
        let harmed = |capture: &&mut Capture| {
            if capture.thread == thread {
                capture.mode != RELAXED
            } else {
                mode == GLOBAL && capture.mode == GLOBAL
            }
        };
        let mut any = false;
        for capture in self.captures.running.values_mut().filter(harmed) {
            capture.invalid = true;
            any = true;
        }
        if any { Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
    }

    /// For calls that wait for a whole context: refuses while any of its streams is capturing,
    /// whatever the modes and threads, and makes those captures invalid.
    pub(crate) fn forbid_beside_capture(&mut self, context: ContextKey) -> Result<(), CUresult> {
        let mut any = false;
        let state = &mut *self.state;
        for (id, capture) in &mut state.captures.running {
            let mut streams =
                capture.frontiers.keys().filter_map(|key| state.streams.by_key.get(key));
            if streams.any(|stream| stream.context == context && stream.capture == Some(*id)) {
                capture.invalid = true;
                any = true;
            }
        }
        if any { Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
    }

    /// For calls that cannot be captured: refuses if the stream is capturing.
    pub(crate) fn forbid_on_capturing(&mut self, stream: StreamKey) -> Result<(), CUresult> {
        if let Some(id) = self.capture_of(stream)? {
            self.invalidate(id);
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        Ok(())
    }

    pub(crate) fn invalidate(&mut self, id: CaptureId) {
        if let Some(capture) = self.captures.running.get_mut(&id) {
            capture.invalid = true;
        }
    }

    /// A stream waits for an event that was recorded in a capture, and so takes part in it.
    pub(crate) fn join_capture(
        &mut self,
        stream: StreamKey,
        own: Option<CaptureId>,
        id: CaptureId,
        nodes: Vec<NodeId>,
    ) -> Result<(), CUresult> {
        // The event has no meaning once its capture is over or broken.
        if !self.captures.is_valid(id) {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        if own.is_some_and(|own| own != id) {
            own.into_iter().for_each(|own| self.invalidate(own));
            self.invalidate(id);
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE);
        }
        let entry = self.streams.by_key.get(&stream).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
        if entry.kind == Kind::Legacy {
            self.invalidate(id);
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
        }
        let Some(capture) = self.captures.running.get_mut(&id) else {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        };
        let frontier = capture.frontiers.entry(stream).or_default();
        frontier.extend(nodes);
        frontier.sort_unstable();
        frontier.dedup();
        if let Some(entry) = self.streams.by_key.get_mut(&stream) {
            entry.capture = Some(id);
        }
        Ok(())
    }

    /// A stream that takes part in a capture is destroyed.
    pub(crate) fn abandon_capture(&mut self, stream: StreamKey) {
        let Some(id) = self.streams.by_key.get(&stream).and_then(|stream| stream.capture) else {
            return;
        };
        self.invalidate(id);
        if self.captures.running.get(&id).is_some_and(|capture| capture.origin == stream) {
            self.finish(id);
        }
    }

    /// Ends a capture, valid or not; the streams that took part are free again.
    fn finish(&mut self, id: CaptureId) -> Option<Capture> {
        let capture = self.captures.running.remove(&id)?;
        for stream in self.streams.by_key.values_mut() {
            if stream.capture == Some(id) {
                stream.capture = None;
            }
        }
        Some(capture)
    }
}

impl Capture {
    /// Whether everything captured on other streams comes before the origin's last work.
    fn is_joined(&self) -> bool {
        let mut before = FxHashSet::default();
        let mut wanted = self.frontiers.get(&self.origin).cloned().unwrap_or_default();
        while let Some(node) = wanted.pop() {
            if before.insert(node) {
                wanted.extend(&self.nodes[node].after);
            }
        }
        self.frontiers.values().flatten().all(|node| before.contains(node))
    }
}

pub(crate) fn begin(
    call: &mut Call<'_>,
    stream: CUstream,
    mode: CUstreamCaptureMode,
) -> Result<(), CUresult> {
    if mode.0 > RELAXED.0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let key = call.stream(stream)?;
    let thread = call.thread;
    let entry = call.streams.by_key.get_mut(&key).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
    if entry.kind == Kind::Legacy {
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    if entry.capture.is_some() {
        return Err(CUresult::CUDA_ERROR_ILLEGAL_STATE);
    }
    let id = CaptureId(call.captures.next);
    call.captures.next += 1;
    if let Some(entry) = call.streams.by_key.get_mut(&key) {
        entry.capture = Some(id);
    }
    let frontiers = FxHashMap::from_iter([(key, Vec::new())]);
    let capture =
        Capture { mode, origin: key, thread, invalid: false, nodes: Vec::new(), frontiers };
    call.captures.running.insert(id, capture);
    Ok(())
}

pub(crate) fn end(
    call: &mut Call<'_>,
    stream: CUstream,
    out: Out<CUgraph>,
) -> Result<(), CUresult> {
    out.set(std::ptr::null_mut())?;
    let key = call.stream(stream)?;
    let id = call.streams.by_key.get(&key).and_then(|stream| stream.capture);
    let id = id.ok_or(CUresult::CUDA_ERROR_ILLEGAL_STATE)?;
    let thread = call.thread;
    let capture = call.captures.running.get(&id).ok_or(CUresult::CUDA_ERROR_ILLEGAL_STATE)?;
    if capture.origin != key {
        call.invalidate(id);
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    }
    if capture.thread != thread && capture.mode != RELAXED {
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    }
    let capture = call.finish(id).ok_or(CUresult::CUDA_ERROR_ILLEGAL_STATE)?;
    if capture.invalid {
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    }
    if !capture.is_joined() {
        return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
    }
    let graph = call.captures.graphs.insert(capture.nodes.into());
    out.set(graph as CUgraph)
}

fn status(call: &mut Call<'_>, stream: CUstream) -> Result<(CUstreamCaptureStatus, u64), CUresult> {
    let key = call.stream(stream)?;
    let capture = call.streams.by_key.get(&key).and_then(|stream| stream.capture);
    let Some(id) = capture else {
        // Beside a capture of a blocking stream nobody can tell of the legacy one. The documentation says that
        // the question harms no capture, unlike its use.
        if call.captures_beside(key)?.next().is_some() {
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
        }
        return Ok((CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE, 0));
    };
    let valid = call.captures.running.get(&id).is_some_and(|capture| !capture.invalid);
    let status = if valid {
        CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE
    } else {
        CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED
    };
    Ok((status, id.0))
}

pub(crate) fn is_capturing(
    call: &mut Call<'_>,
    stream: CUstream,
    out: Out<CUstreamCaptureStatus>,
) -> Result<(), CUresult> {
    let status = status(call, stream)?.0;
    out.set(status)
}

pub(crate) fn info(
    call: &mut Call<'_>,
    stream: CUstream,
    status_out: Out<CUstreamCaptureStatus>,
    id_out: Out<u64>,
) -> Result<(), CUresult> {
    let (status, id) = status(call, stream)?;
    status_out.set(status)?;
    id_out.set_optional(id);
    Ok(())
}

/// Answers status and id; the graph under construction is not shown.
pub(crate) fn info_v2(
    call: &mut Call<'_>,
    stream: CUstream,
    status_out: Out<CUstreamCaptureStatus>,
    id_out: Out<u64>,
    graph: Out<CUgraph>,
    nodes: Out<*const CUgraphNode>,
    count: Out<usize>,
) -> Result<(), CUresult> {
    if !graph.is_null() || !nodes.is_null() || !count.is_null() {
        return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    }
    info(call, stream, status_out, id_out)
}

/// As [`info_v2`], which asks for the data of edges too.
#[expect(clippy::too_many_arguments, reason = "the driver's signature")]
pub(crate) fn info_v3(
    call: &mut Call<'_>,
    stream: CUstream,
    status_out: Out<CUstreamCaptureStatus>,
    id_out: Out<u64>,
    graph: Out<CUgraph>,
    nodes: Out<*const CUgraphNode>,
    edges: Out<*const CUgraphEdgeData>,
    count: Out<usize>,
) -> Result<(), CUresult> {
    if !edges.is_null() {
        return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    }
    info_v2(call, stream, status_out, id_out, graph, nodes, count)
}

pub(crate) fn exchange_mode(
    call: &mut Call<'_>,
    mode: Out<CUstreamCaptureMode>,
) -> Result<(), CUresult> {
    let new = mode.get()?;
    if new.0 > RELAXED.0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let old = std::mem::replace(call.capture_mode(), new);
    mode.set(old)
}

pub(crate) fn destroy_graph(call: &mut Call<'_>, graph: CUgraph) -> Result<(), CUresult> {
    let gone = call.captures.graphs.remove(graph as usize);
    gone.map(|_| ()).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
}

/// Answers the number of nodes; the nodes themselves have no handles.
pub(crate) fn graph_nodes(
    call: &mut Call<'_>,
    graph: CUgraph,
    nodes: Out<CUgraphNode>,
    count: Out<usize>,
) -> Result<(), CUresult> {
    let graph = call.captures.graphs.get(graph as usize);
    let length = graph.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?.len();
    if !nodes.is_null() {
        return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    }
    count.set(length)
}

pub(crate) fn instantiate(
    call: &mut Call<'_>,
    out: Out<CUgraphExec>,
    graph: CUgraph,
    flags: u64,
) -> Result<(), CUresult> {
    const ALL_FLAGS: u64 = 15;
    let nodes = call.captures.graphs.get(graph as usize).cloned();
    let nodes = nodes.filter(|_| flags & !ALL_FLAGS == 0);
    let nodes = nodes.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    out.required()?;
    let executable = Executable { nodes, launched: None };
    let executable = call.captures.executables.insert(executable);
    out.set(executable as CUgraphExec)
}

pub(crate) fn destroy_executable(
    call: &mut Call<'_>,
    executable: CUgraphExec,
) -> Result<(), CUresult> {
    let gone = call.captures.executables.remove(executable as usize);
    gone.map(|_| ()).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
}

pub(crate) fn launch(
    call: &mut Call<'_>,
    executable: CUgraphExec,
    stream: CUstream,
) -> Result<(), CUresult> {
    let handle = executable as usize;
    let executable = call.captures.executables.get(handle);
    let executable = executable.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    let (nodes, before) = (Arc::clone(&executable.nodes), executable.launched.clone());
    let stream = call.stream(stream)?;
    match call.capture_of(stream)? {
        Some(id) => call.embed(id, stream, &nodes),
        None => {
            let end = call.run_graph(stream, before, &nodes)?;
            if let Some(executable) = call.captures.executables.get_mut(handle) {
                executable.launched = end;
            }
            call.settle();
        }
    }
    Ok(())
}

/// The lane of each node, 0 for the launching stream's own, and how many there are: a node goes on in
/// the lane of the first node that it comes after and that nothing goes on from yet.
fn lanes_of(nodes: &[Node]) -> (Vec<usize>, usize) {
    let mut ends: Vec<NodeId> = Vec::new();
    let mut lanes: Vec<usize> = Vec::with_capacity(nodes.len());
    for (node, Node { after, .. }) in nodes.iter().enumerate() {
        let goes_on = after.iter().map(|before| lanes[*before]).zip(after);
        let mut goes_on = goes_on.filter(|(lane, before)| ends[*lane] == **before);
        let lane = goes_on.next().map_or(ends.len(), |(lane, _)| lane);
        if lane == ends.len() {
            ends.push(node);
        }
        ends[lane] = node;
        lanes.push(lane);
    }
    (lanes, ends.len())
}

/// The nodes that no other comes after.
fn last_of(nodes: &[Node]) -> impl Iterator<Item = NodeId> {
    let followed: FxHashSet<NodeId> = nodes.iter().flat_map(|node| &node.after).copied().collect();
    (0..nodes.len()).filter(move |node| !followed.contains(node))
}

impl Call<'_> {
    /// A graph is launched on a stream that captures: its nodes become the capture's.
    fn embed(&mut self, id: CaptureId, stream: StreamKey, nodes: &[Node]) {
        let Some(capture) = self.captures.running.get_mut(&id) else { return };
        if nodes.is_empty() {
            return;
        }
        let first = capture.nodes.len();
        let last = last_of(nodes).map(|node| first + node).collect();
        let before = capture.frontiers.insert(stream, last).unwrap_or_default();
        capture.nodes.extend(nodes.iter().map(|node| Node {
            after: match node.after.as_slice() {
                [] => before.clone(),
                after => after.iter().map(|node| first + node).collect(),
            },
            ..node.clone()
        }));
    }

    /// Gives a graph's nodes to a stream and to lanes beside it, after the launch `before`. What the
    /// stream gets later comes after all of them; their end, which the next launch comes after.
    fn run_graph(
        &mut self,
        stream: StreamKey,
        before: Option<Recorded>,
        nodes: &[Node],
    ) -> Result<Option<Recorded>, CUresult> {
        let (lanes, count) = lanes_of(nodes);
        let what: Arc<str> = self.name.into();
        // A lane is used again by the stream's next launch, which comes after this one anyway.
        let mut keys = vec![stream];
        let state = &mut *self.state;
        keys.extend(state.streams.lanes_beside(stream, count.saturating_sub(1), &state.host));
        let elsewhere = before.iter().any(|before| before.point.stream != stream);
        let start = if count > 1 || elsewhere {
            vec![self.append(stream, before.as_slice(), Work::Order, &what)?]
        } else {
            Vec::new()
        };
        let mut done: Vec<Recorded> = Vec::with_capacity(nodes.len());
        for (node, lane) in nodes.iter().zip(&lanes) {
            let mut after: Vec<_> = node.after.iter().map(|node| done[*node].clone()).collect();
            if after.is_empty() && *lane > 0 {
                after.clone_from(&start);
            }
            let (key, work, device) = (keys[*lane], node.work.clone(), Some(node.device));
            done.push(self.append_for(key, &after, work, &node.what, device)?);
        }
        if count > 1 {
            let last: Vec<_> = last_of(nodes).map(|node| done[node].clone()).collect();
            return self.append(stream, &last, Work::Order, &what).map(Some);
        }
        Ok(done.pop().or(before))
    }
}

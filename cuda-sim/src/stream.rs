//! Streams: queues of work, and what orders it.
//!
//! Each stream runs its items one after another. An item also waits for its dependencies,
//! points on other streams: the events that its stream was told to wait for, and the implicit
//! order between a context's legacy stream and its blocking streams. Each item carries the
//! vector clock of everything it comes after; ticks and positions are the same numbers.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use cuda_sys::types::CUresult;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::capture::CaptureId;
use crate::context::ContextKey;
use crate::event::EventKey;
use crate::handles::Handles;
use crate::memory::DeviceMemory;
use crate::race::{Clock, PhysicalId, StreamKey};

/// What a kernel stand-in is; it may run more than once in a replayed graph.
pub(crate) type Kernel =
    Arc<Mutex<dyn FnMut(&mut DeviceMemory<'_>) -> Result<(), CUresult> + Send>>;

/// What an item does when its turn comes.
#[derive(Clone)]
pub(crate) enum Work {
    /// Nothing: it only carries dependencies.
    Order,
    /// Stamps an event's time; `record` tells this record from later ones.
    Record { event: EventKey, record: u64 },
    /// Device work; the answer `CUDA_ERROR_NOT_READY` means that it is still running.
    Kernel(Kernel),
    /// A function on the host.
    Host(Arc<dyn Fn() + Send + Sync>),
    /// The same, told whether all before it went well.
    Callback(Arc<dyn Fn(CUresult) + Send + Sync>),
    /// Frees memory of cuMemAlloc.
    Free { address: u64 },
    /// Takes memory from its pool. To the race detector that is a write: every use of the bytes is to
    /// come after it.
    Take { physical: PhysicalId, range: Range<u64> },
    /// Gives memory back to its pool. To the race detector that is a write: whoever has the bytes next,
    /// every use of them is to be over.
    Return { physical: PhysicalId, range: Range<u64> },
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Order => "Order",
            Self::Record { .. } => "Record",
            Self::Kernel(_) => "Kernel",
            Self::Host(_) => "Host",
            Self::Callback(_) => "Callback",
            Self::Free { .. } => "Free",
            Self::Take { .. } => "Take",
            Self::Return { .. } => "Return",
        })
    }
}

/// A place in a stream: everything up to and including item `seq`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Point {
    pub(crate) stream: StreamKey,
    pub(crate) seq: u64,
}

/// A point and everything that is before it.
#[derive(Clone, Debug)]
pub(crate) struct Recorded {
    pub(crate) point: Point,
    pub(crate) clock: Arc<Clock>,
}

/// What an item is to do.
#[derive(Debug)]
pub(crate) struct Task {
    pub(crate) work: Work,
    /// Its name, for messages.
    pub(crate) what: Arc<str>,
    /// The last change of mappings before it was enqueued.
    pub(crate) generation: u64,
    /// The device that it runs on, where it was captured on another than its stream's.
    pub(crate) device: Option<usize>,
}

#[derive(Debug)]
pub(crate) struct Item {
    pub(crate) seq: u64,
    pub(crate) after: SmallVec<[Point; 2]>,
    pub(crate) clock: Arc<Clock>,
    pub(crate) task: Task,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Orders with every blocking stream of its context.
    Legacy,
    /// One per thread and context; blocking.
    PerThread,
    Blocking,
    NonBlocking,
}

#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) key: StreamKey,
    /// What cuStreamGetId answers: no other stream's, ever.
    pub(crate) id: u64,
    pub(crate) context: ContextKey,
    pub(crate) device: usize,
    pub(crate) kind: Kind,
    pub(crate) priority: i32,
    pub(crate) capture: Option<CaptureId>,
    /// Items given out so far, and the last that has run.
    pub(crate) enqueued: u64,
    pub(crate) completed: u64,
    /// The clock of the last item.
    pub(crate) clock: Arc<Clock>,
    pub(crate) queue: VecDeque<Item>,
    /// A host function of this stream runs outside the lock.
    pub(crate) running: bool,
    pub(crate) destroyed: bool,
    /// Streams without handles, for the branches of graphs that are launched on it.
    lanes: Vec<StreamKey>,
}

impl Stream {
    pub(crate) fn is_idle(&self) -> bool {
        self.completed == self.enqueued
    }

    /// The end of what was enqueued so far.
    pub(crate) fn end(&self) -> Recorded {
        let point = Point { stream: self.key, seq: self.enqueued };
        Recorded { point, clock: Arc::clone(&self.clock) }
    }

    /// Whether the legacy stream orders with it.
    pub(crate) fn is_blocking(&self) -> bool {
        matches!(self.kind, Kind::Blocking | Kind::PerThread)
    }
}

/// Every stream of a simulator, also destroyed ones whose work goes on.
#[derive(Debug)]
pub(crate) struct Streams {
    pub(crate) by_key: FxHashMap<StreamKey, Stream>,
    /// What cuStreamCreate gave out: never the special streams.
    pub(crate) handles: Handles<StreamKey>,
    /// Streams with unfinished items.
    pub(crate) active: BTreeSet<StreamKey>,
    /// What the work of streams that are gone came after, by context: the legacy stream still
    /// orders with it.
    residue: FxHashMap<ContextKey, Clock>,
    /// The work of all streams that are gone, by context and its device: who waits for a context
    /// or a device has seen it complete too.
    departed: FxHashMap<ContextKey, (usize, Clock)>,
    /// Work of destroyed blocking streams that a legacy stream's next item comes after.
    left_behind: FxHashMap<StreamKey, Vec<Recorded>>,
    /// The timelines of streams that are gone, each with its last item: what is created once the host
    /// has seen that complete comes after all of it, and goes on there. So clocks know as many streams
    /// as there are at a time, not as there ever were.
    ended: VecDeque<(StreamKey, u64)>,
    next: u64,
    next_id: u64,
}

/// How many timelines a new stream looks at for one to go on with.
const ENDED_LOOKS: usize = 8;

impl Streams {
    pub(crate) fn new() -> Self {
        Self {
            by_key: FxHashMap::default(),
            handles: Handles::new(1),
            active: BTreeSet::new(),
            residue: FxHashMap::default(),
            departed: FxHashMap::default(),
            left_behind: FxHashMap::default(),
            ended: VecDeque::new(),
            next: 1,
            next_id: 1,
        }
    }

    /// A timeline for a new stream, and its last item so far.
    fn timeline(&mut self, host: &Clock) -> (StreamKey, u64) {
        for _ in 0..ENDED_LOOKS.min(self.ended.len()) {
            let Some((key, last)) = self.ended.pop_front() else { break };
            if host.get(key) >= last {
                return (key, last);
            }
            self.ended.push_back((key, last));
        }
        self.next += 1;
        (StreamKey(self.next - 1), 0)
    }

    /// A new stream without a handle.
    pub(crate) fn create(
        &mut self,
        context: ContextKey,
        device: usize,
        kind: Kind,
        priority: i32,
        host: &Clock,
    ) -> StreamKey {
        let (key, last) = self.timeline(host);
        let id = self.next_id;
        self.next_id += 1;
        self.by_key.insert(
            key,
            Stream {
                key,
                id,
                context,
                device,
                kind,
                priority,
                capture: None,
                enqueued: last,
                completed: last,
                clock: Arc::new(Clock::new()),
                queue: VecDeque::new(),
                running: false,
                destroyed: false,
                lanes: Vec::new(),
            },
        );
        key
    }

    /// So many streams beside another one, which go with it. Nothing orders them with it, nor with others.
    pub(crate) fn lanes_beside(
        &mut self,
        key: StreamKey,
        count: usize,
        host: &Clock,
    ) -> Vec<StreamKey> {
        let Some(stream) = self.by_key.get_mut(&key) else { return Vec::new() };
        let (context, device, priority) = (stream.context, stream.device, stream.priority);
        let mut lanes = std::mem::take(&mut stream.lanes);
        while lanes.len() < count {
            lanes.push(self.create(context, device, Kind::NonBlocking, priority, host));
        }
        let used = lanes[..count].to_vec();
        if let Some(stream) = self.by_key.get_mut(&key) {
            stream.lanes = lanes;
        }
        used
    }

    /// Whether everything up to a point has run. Streams that are gone had nothing left to run.
    pub(crate) fn is_done(&self, point: Point) -> bool {
        self.by_key.get(&point.stream).is_none_or(|stream| stream.completed >= point.seq)
    }

    /// Appends an item that comes after the stream's own work, after `after`, and after
    /// everything that the host has seen complete.
    pub(crate) fn push(
        &mut self,
        key: StreamKey,
        siblings: &[StreamKey],
        host: &Clock,
        after: &[Recorded],
        task: Task,
    ) -> Option<Recorded> {
        let mut points = SmallVec::new();
        let mut clock = Clock::clone(&self.by_key.get(&key)?.clock);
        if !clock.covers(host) {
            clock.join(host);
        }
        let left_behind = self.left_behind.remove(&key).unwrap_or_default();
        for other in after.iter().chain(&left_behind) {
            if !self.is_done(other.point) {
                points.push(other.point);
            }
            clock.join(&other.clock);
        }
        for sibling in siblings {
            let Some(other) = self.by_key.get(sibling).filter(|other| other.key != key) else {
                continue;
            };
            if !other.is_idle() {
                points.push(other.end().point);
            }
            if clock.get(other.key) < other.enqueued {
                clock.join(&other.clock);
            }
        }
        let stream = self.by_key.get_mut(&key)?;
        if stream.kind == Kind::Legacy
            && let Some(residue) = self.residue.get(&stream.context)
            && !clock.covers(residue)
        {
            clock.join(residue);
        }
        let seq = clock.tick(key);
        let clock = Arc::new(clock);
        stream.enqueued = seq;
        stream.clock = Arc::clone(&clock);
        stream.queue.push_back(Item { seq, after: points, clock: Arc::clone(&clock), task });
        self.active.insert(key);
        Some(Recorded { point: Point { stream: key, seq }, clock })
    }

    /// Notes that the item at the head, already taken off the queue, has run.
    pub(crate) fn complete(&mut self, key: StreamKey, seq: u64) {
        let Some(stream) = self.by_key.get_mut(&key) else { return };
        stream.completed = seq;
        stream.running = false;
        if stream.is_idle() {
            self.active.remove(&key);
            if stream.destroyed {
                self.forget(key);
            }
        }
    }

    /// The next item of `legacy` comes after a stream that is about to be destroyed.
    pub(crate) fn leave_behind(&mut self, legacy: StreamKey, end: Recorded) {
        let runs = |end: &Recorded| {
            let stream = self.by_key.get(&end.point.stream);
            stream.is_some_and(|stream| stream.completed < end.point.seq)
        };
        let left = self.left_behind.entry(legacy).or_default();
        // What has run since is in the residue.
        left.retain(runs);
        left.push(end);
    }

    /// What destroyed streams leave that a legacy stream's next item comes after.
    pub(crate) fn left_behind(&self, legacy: StreamKey) -> &[Recorded] {
        self.left_behind.get(&legacy).map_or(&[], Vec::as_slice)
    }

    /// The stream takes no more work and is gone once what it has has run.
    pub(crate) fn destroy(&mut self, key: StreamKey) {
        let Some(stream) = self.by_key.get_mut(&key) else { return };
        stream.destroyed = true;
        let lanes = std::mem::take(&mut stream.lanes);
        if stream.is_idle() {
            self.forget(key);
        }
        lanes.into_iter().for_each(|lane| self.destroy(lane));
    }

    fn forget(&mut self, key: StreamKey) {
        let Some(stream) = self.by_key.remove(&key) else { return };
        let (device, departed) = self.departed.entry(stream.context).or_default();
        *device = stream.device;
        departed.join(&stream.clock);
        if stream.is_blocking() {
            self.residue.entry(stream.context).or_default().join(&stream.clock);
        }
        self.left_behind.remove(&key);
        self.ended.push_back((key, stream.enqueued));
    }

    /// What the finished work of streams that are gone came after, of one context.
    pub(crate) fn departed_from_context(&self, context: ContextKey) -> Option<Clock> {
        self.departed.get(&context).map(|(_, clock)| clock.clone())
    }

    /// The same, of all contexts of one device.
    pub(crate) fn departed_from_device(&self, device: usize) -> Vec<Clock> {
        let there = self.departed.values().filter(|(of, _)| *of == device);
        there.map(|(_, clock)| clock.clone()).collect()
    }

    /// Forgets what is kept for a context that is gone.
    pub(crate) fn forget_context(&mut self, context: ContextKey) {
        self.residue.remove(&context);
        self.departed.remove(&context);
    }
}

#[cfg(test)]
mod tests {
    use rustc_hash::FxHashSet;

    use super::*;

    /// A stream with one piece of work, which has run, and what the host learns by waiting for it.
    fn come_and_go(streams: &mut Streams, host: &Clock) -> (StreamKey, u64, Recorded) {
        let key = streams.create(ContextKey(1), 0, Kind::NonBlocking, 0, host);
        let id = streams.by_key[&key].id;
        let task = Task { work: Work::Order, what: "work".into(), generation: 0, device: None };
        let recorded = streams.push(key, &[], host, &[], task).unwrap();
        assert!(!streams.is_done(recorded.point));
        streams.by_key.get_mut(&key).unwrap().queue.pop_front();
        streams.complete(key, recorded.point.seq);
        assert!(streams.is_done(recorded.point));
        streams.destroy(key);
        (key, id, recorded)
    }

    #[test]
    fn what_destroyed_streams_leave_goes_when_it_has_run() {
        let (mut streams, host) = (Streams::new(), Clock::new());
        let legacy = streams.create(ContextKey(1), 0, Kind::Legacy, 0, &host);
        for _ in 0..100 {
            let key = streams.create(ContextKey(1), 0, Kind::Blocking, 0, &host);
            let task = Task { work: Work::Order, what: "work".into(), generation: 0, device: None };
            let recorded = streams.push(key, &[], &host, &[], task).unwrap();
            streams.leave_behind(legacy, recorded.clone());
            streams.destroy(key);
            assert_eq!(streams.left_behind[&legacy].len(), 1);
            streams.by_key.get_mut(&key).unwrap().queue.pop_front();
            streams.complete(key, recorded.point.seq);
            // The legacy stream's next work comes after it, whether it is kept or not.
            let residue = &streams.residue[&ContextKey(1)];
            assert!(residue.covers(&recorded.clock));
        }
        streams.destroy(legacy);
        assert!(streams.left_behind.is_empty());
    }

    #[test]
    fn streams_go_on_where_those_that_the_host_has_waited_for_ended() {
        let (mut streams, mut host) = (Streams::new(), Clock::new());
        let (mut keys, mut ids) = (FxHashSet::default(), FxHashSet::default());
        let mut before: Option<Recorded> = None;
        for _ in 0..100 {
            let (key, id, recorded) = come_and_go(&mut streams, &host);
            assert!(before.is_none_or(|before| recorded.clock.covers(&before.clock)));
            host.join(&recorded.clock);
            keys.insert(key);
            ids.insert(id);
            before = Some(recorded);
        }
        assert_eq!((keys.len(), ids.len()), (1, 100));
        // Not where nobody has waited.
        let unseen = [(); 20].map(|()| come_and_go(&mut streams, &host).0);
        assert_eq!(FxHashSet::from_iter(unseen).len(), 20);
    }
}

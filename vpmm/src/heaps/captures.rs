//! Which streams take part in captures that graphs' pools are open to.
//!
//! A capturing stream must not be asked which one it is: that ends the capture. So a begun stream is
//! known by its raw handle until the end, and another takes part if the driver says that it captures
//! the same graph. Either is given a number of our own, which heaps know it by.

use std::ptr;
use std::sync::Arc;
use std::thread::ThreadId;

use cuda_sys::types::{CUresult, CUstreamCaptureStatus};

use super::graph::Graph;
use crate::device::{Device, StreamHandle};
use crate::error::{Error, Result};
use crate::units::DevicePtr;

/// The driver counts its streams up from small numbers, and never comes so far.
const FIRST_NUMBER: u64 = 1 << 62;

/// A stream by its handle; a per-thread default stream with its thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Key {
    raw: usize,
    thread: Option<ThreadId>,
}

impl Key {
    fn of(stream: StreamHandle) -> Self {
        let per_thread = stream == StreamHandle::PER_THREAD;
        let thread = per_thread.then(|| std::thread::current().id());
        Self { raw: stream.raw() as usize, thread }
    }

    /// Whether the calling thread means this stream by its handle.
    fn is_reachable(self) -> bool {
        self.thread.is_none_or(|thread| thread == std::thread::current().id())
    }
}

/// A stream that takes part, and what it is called.
#[derive(Clone, Copy)]
pub(super) struct Participant {
    key: Key,
    pub(super) handle: StreamHandle,
    pub(super) number: u64,
}

impl Participant {
    /// Whether the stream can be recorded on: it is this thread's to name, and no longer captures.
    fn can_record(&self, device: &Device) -> bool {
        self.key.is_reachable() && matches!(capture_of(device, self.handle), Ok(Capture::None))
    }
}

/// A graph's pool from begin to end.
struct Begun {
    graph: Arc<Graph>,
    key: Key,
    handle: StreamHandle,
    /// The capture that the stream is in, as far as was asked.
    capture: Option<u64>,
    streams: Vec<Participant>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Capture {
    None,
    Active(u64),
    Invalid,
}

/// Asks which capture a stream is in; harms none.
fn capture_of(device: &Device, stream: StreamHandle) -> Result<Capture> {
    // It never captures, and beside a capture of a blocking stream it must not be asked.
    if stream == StreamHandle::LEGACY {
        return Ok(Capture::None);
    }
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let mut id = 0;
    let (graph, nodes, count) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
    // SAFETY: whoever made the handle vouches that its stream is alive; the two pointers are live,
    // and the others may be null.
    let asked = unsafe {
        device.driver().cuStreamGetCaptureInfo_v2(
            stream.raw(),
            &mut status,
            &mut id,
            graph,
            nodes,
            count,
        )
    };
    match asked {
        Ok(()) => Ok(match status {
            CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE => Capture::Active(id),
            CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => Capture::None,
            _ => Capture::Invalid,
        }),
        Err(failure) if failure.code == CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT => {
            Ok(Capture::None)
        }
        Err(failure) => Err(failure.into()),
    }
}

/// Whether a stream is in a capture now, as far as can be told.
pub(super) fn is_in_capture(device: &Device, stream: StreamHandle) -> bool {
    let asked = device.enter().and_then(|_context| capture_of(device, stream));
    matches!(asked, Ok(Capture::Active(_)))
}

pub(super) struct Captures {
    open: Vec<Begun>,
    next: u64,
    /// Streams whose part is over, but on which no event could be recorded yet.
    pub(super) ending: Vec<Participant>,
    /// Frees of a main heap that knows no streams in captures.
    pub(super) postponed: Vec<Postponed>,
}

/// A free that a capture was in the way of.
pub(super) struct Postponed {
    pub(super) ptr: DevicePtr,
    pub(super) when: When,
    key: Key,
    /// Its number among what waits for the device, should it come to that.
    number: u64,
}

impl Postponed {
    /// Whether the calling thread can make it on its stream.
    pub(super) fn is_reachable(&self) -> bool {
        self.key.is_reachable()
    }

    /// Whether it can be made on any stream, now that the host has waited for the device with so many that wait for
    /// that. So where its stream could be named still, as there may be no call of a graph's pool that does.
    pub(super) fn has_passed(&self, number: u64) -> bool {
        match self.when {
            When::DevicePassed(at) => at <= number,
            When::Ended(_) => self.number <= number,
        }
    }
}

/// When it can be made.
#[derive(Clone, Copy)]
pub(super) enum When {
    /// When this stream captures no more, on it.
    Ended(StreamHandle),
    /// When the host has waited for the device, since the stream cannot be named any more: this is the number
    /// of what waits for that.
    DevicePassed(u64),
}

impl Captures {
    pub(super) fn new() -> Self {
        Self { open: Vec::new(), next: FIRST_NUMBER, ending: Vec::new(), postponed: Vec::new() }
    }

    pub(super) fn is_open(&self) -> bool {
        !self.open.is_empty()
    }

    pub(super) fn is_open_to(&self, graph: &Arc<Graph>) -> bool {
        self.open.iter().any(|begun| Arc::ptr_eq(&begun.graph, graph))
    }

    pub(super) fn begin(&mut self, graph: &Arc<Graph>, handle: StreamHandle) -> Result<()> {
        let key = Key::of(handle);
        if self.open.iter().any(|begun| begun.key == key) {
            return Err(Error::GraphPool { reason: "one has begun on this stream" });
        }
        let (graph, capture, streams) = (Arc::clone(graph), None, Vec::new());
        self.open.push(Begun { graph, key, handle, capture, streams });
        Ok(())
    }

    /// Ends what has begun on a stream: the streams that took part.
    pub(super) fn end(
        &mut self,
        graph: &Arc<Graph>,
        handle: StreamHandle,
    ) -> Result<Vec<Participant>> {
        let key = Key::of(handle);
        let is_it = |begun: &Begun| begun.key == key && Arc::ptr_eq(&begun.graph, graph);
        let Some(at) = self.open.iter().position(is_it) else {
            return Err(Error::GraphPool { reason: "it has not begun on this stream" });
        };
        Ok(self.open.swap_remove(at).streams)
    }

    /// Ends everything that has begun with a graph's pool.
    pub(super) fn end_all(&mut self, graph: &Graph) -> Vec<Participant> {
        let is_it = |begun: &mut Begun| std::ptr::eq(Arc::as_ptr(&begun.graph), graph);
        self.open.extract_if(.., is_it).flat_map(|begun| begun.streams).collect()
    }

    /// A stream of the library's is about to be destroyed: what has begun on it is over, and its
    /// part in others.
    pub(super) fn stream_ends(&mut self, handle: StreamHandle) -> Vec<(Arc<Graph>, Participant)> {
        let key = Key::of(handle);
        let mut over = Vec::new();
        for begun in &mut self.open {
            let whole = begun.key == key;
            begun.streams.retain(|stream| {
                let ends = whole || stream.key == key;
                if ends {
                    over.push((Arc::clone(&begun.graph), *stream));
                }
                !ends
            });
        }
        self.open.retain(|begun| begun.key != key);
        over
    }

    /// The graph whose capture a stream takes part in, and what it is called there.
    pub(super) fn find(
        &mut self,
        device: &Device,
        handle: StreamHandle,
    ) -> Result<Option<(Arc<Graph>, u64)>> {
        let key = Key::of(handle);
        let begun = self.open.iter().position(|begun| begun.key == key);
        let at = match begun {
            Some(at) => at,
            None if self.open.is_empty() => return Ok(None),
            None => {
                let _context = device.enter()?;
                let Capture::Active(id) = capture_of(device, handle)? else { return Ok(None) };
                for begun in self.open.iter_mut().filter(|begun| begun.key.is_reachable()) {
                    if let Capture::Active(id) = capture_of(device, begun.handle)? {
                        begun.capture = Some(id);
                    }
                }
                let same = |begun: &Begun| begun.capture == Some(id);
                let Some(at) = self.open.iter().position(same) else { return Ok(None) };
                at
            }
        };
        let begun = &mut self.open[at];
        // Asked while the thread is here that alone can, if it is its default stream.
        if begun.key == key && key.thread.is_some() {
            let _context = device.enter()?;
            if let Capture::Active(id) = capture_of(device, handle)? {
                begun.capture = Some(id);
            }
        }
        let known = begun.streams.iter().find(|stream| stream.key == key);
        let number = match known {
            Some(stream) => stream.number,
            None => {
                let number = self.next;
                self.next += 1;
                begun.streams.push(Participant { key, handle, number });
                number
            }
        };
        Ok(Some((Arc::clone(&begun.graph), number)))
    }

    /// Takes out those whose part is over and that no longer capture.
    pub(super) fn take_ended(&mut self, device: &Device) -> Vec<Participant> {
        let (ended, still) =
            self.ending.drain(..).partition(|stream: &Participant| stream.can_record(device));
        self.ending = still;
        ended
    }

    /// Keeps a free for later; a second one of the same address is a mistake. `number`: the free's, among what
    /// waits for the device.
    pub(super) fn postpone(
        &mut self,
        ptr: DevicePtr,
        handle: StreamHandle,
        number: u64,
    ) -> Result<()> {
        if self.is_postponed(ptr.address()) {
            return Err(Error::DoubleFree { address: ptr.address() });
        }
        let (key, when) = (Key::of(handle), When::Ended(handle));
        self.postponed.push(Postponed { ptr, when, key, number });
        Ok(())
    }

    pub(super) fn is_postponed(&self, address: u64) -> bool {
        self.postponed.iter().any(|of| of.ptr.address() == address)
    }
}

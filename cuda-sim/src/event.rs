//! Events: points in streams that can be waited for and asked about.

use std::sync::Arc;

use cuda_sys::types::{CUevent, CUresult, CUstream};
use rustc_hash::FxHashMap;

use crate::arguments::Out;
use crate::call::Call;
use crate::capture::{CaptureId, NodeId};
use crate::context::ContextKey;
use crate::handles::Handles;
use crate::stream::{Recorded, Work};

/// An event for the life of the simulator; handle values are used again, keys are not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct EventKey(u64);

/// What an event was last recorded on.
#[derive(Clone, Debug)]
pub(crate) enum Last {
    Never,
    Stream(Recorded),
    /// A capture: the nodes that whoever waits depends on.
    Capture {
        capture: CaptureId,
        nodes: Vec<NodeId>,
    },
}

#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) context: ContextKey,
    flags: u32,
    pub(crate) last: Last,
    records: u64,
    /// When the last record was reached, in modelled time.
    reached_us: Option<f64>,
}

#[derive(Debug)]
pub(crate) struct Events {
    pub(crate) by_key: FxHashMap<EventKey, Event>,
    pub(crate) handles: Handles<EventKey>,
    next: u64,
}

/// Flags of cuEventCreate: blocking sync 1, no timing 2, interprocess 4.
const DISABLE_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;
const ALL_FLAGS: u32 = 7;

impl Events {
    pub(crate) fn new() -> Self {
        Self { by_key: FxHashMap::default(), handles: Handles::new(3), next: 1 }
    }

    /// A record was reached; it counts if the event was not recorded again or destroyed since.
    pub(crate) fn stamp(&mut self, event: EventKey, record: u64, now_us: f64) {
        if let Some(event) = self.by_key.get_mut(&event)
            && event.records == record
        {
            event.reached_us = Some(now_us);
        }
    }

    /// The events of a context that ends go with it.
    pub(crate) fn end_context(&mut self, context: ContextKey) {
        let handles: Vec<_> = self.handles.iter().map(|(value, key)| (value, *key)).collect();
        for (value, key) in handles {
            if self.by_key.get(&key).is_some_and(|event| event.context == context) {
                self.by_key.remove(&key);
                self.handles.remove(value);
            }
        }
    }
}

impl Call<'_> {
    /// The event behind a handle.
    pub(crate) fn event(&mut self, handle: CUevent) -> Result<EventKey, CUresult> {
        let value = handle as usize;
        if let Some(&key) = self.events.handles.get(value) {
            return Ok(key);
        }
        if self.events.handles.is_stale(value) {
            self.misuse(&format!("event {value:#x} was destroyed"));
        }
        Err(CUresult::CUDA_ERROR_INVALID_HANDLE)
    }

    /// An event that is about to be asked about or waited for by the host.
    fn observed(&mut self, handle: CUevent) -> Result<Option<Recorded>, CUresult> {
        let key = self.event(handle)?;
        let event = &self.events.by_key[&key];
        let (context, last) = (event.context, event.last.clone());
        match last {
            // Being asked about invalidates the capture that it belongs to.
            Last::Capture { capture, .. } if self.captures.is_valid(capture) => {
                self.invalidate(capture);
                Err(CUresult::CUDA_ERROR_CAPTURED_EVENT)
            }
            // Once the capture is over or broken, the event has no meaning at all.
            Last::Capture { .. } => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
            last => {
                self.forbid_in_capture()?;
                self.healthy(context)?;
                Ok(if let Last::Stream(recorded) = last { Some(recorded) } else { None })
            }
        }
    }
}

pub(crate) fn create(call: &mut Call<'_>, out: Out<CUevent>, flags: u32) -> Result<(), CUresult> {
    let context = call.current()?;
    let shared_but_timed = flags & INTERPROCESS != 0 && flags & DISABLE_TIMING == 0;
    if flags & !ALL_FLAGS != 0 || shared_but_timed {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    out.required()?;
    let key = EventKey(call.events.next);
    call.events.next += 1;
    let event = Event { context, flags, last: Last::Never, records: 0, reached_us: None };
    call.events.by_key.insert(key, event);
    let value = call.events.handles.insert(key);
    out.set(value as CUevent)
}

pub(crate) fn destroy(call: &mut Call<'_>, handle: CUevent) -> Result<(), CUresult> {
    let key = call.event(handle)?;
    call.events.handles.remove(handle as usize);
    let event = call.events.by_key.remove(&key);
    // It is gone, whatever has failed in its context.
    event.map_or(Ok(()), |event| call.healthy(event.context))
}

pub(crate) fn record(
    call: &mut Call<'_>,
    handle: CUevent,
    stream: CUstream,
) -> Result<(), CUresult> {
    let stream = call.stream(stream)?;
    let key = call.event(handle)?;
    let (context, flags) = (call.events.by_key[&key].context, call.events.by_key[&key].flags);
    if call.context_of(stream) != Some(context) {
        return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
    call.cost = Some(call.costs.event_record(flags & DISABLE_TIMING == 0));
    if let Some(capture) = call.capture_of(stream)? {
        let nodes = call.captures.frontier(capture, stream);
        return call.set_last(key, Last::Capture { capture, nodes });
    }
    let record = call.events.by_key[&key].records + 1;
    let what: Arc<str> = "cuEventRecord".into();
    let recorded = call.append(stream, &[], Work::Record { event: key, record }, &what)?;
    if let Some(event) = call.events.by_key.get_mut(&key) {
        event.records = record;
        event.reached_us = None;
        event.last = Last::Stream(recorded);
    }
    call.settle();
    Ok(())
}

pub(crate) fn record_with_flags(
    call: &mut Call<'_>,
    handle: CUevent,
    stream: CUstream,
    flags: u32,
) -> Result<(), CUresult> {
    call.require_no_flags(flags, stream)?;
    record(call, handle, stream)
}

impl Call<'_> {
    /// The one flag asks for a node of a graph, which is not modelled; outside of a capture there is none.
    fn require_no_flags(&mut self, flags: u32, stream: CUstream) -> Result<(), CUresult> {
        const EXTERNAL: u32 = 1;
        if flags == 0 {
            return Ok(());
        }
        let stream = self.stream(stream)?;
        match self.capture_of(stream)? {
            _ if flags != EXTERNAL => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
            Some(_) => Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
            None => Err(CUresult::CUDA_ERROR_ILLEGAL_STATE),
        }
    }

    fn set_last(&mut self, key: EventKey, last: Last) -> Result<(), CUresult> {
        let event = self.events.by_key.get_mut(&key);
        event.ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?.last = last;
        Ok(())
    }
}

pub(crate) fn query(call: &mut Call<'_>, handle: CUevent) -> Result<(), CUresult> {
    let recorded = call.observed(handle)?;
    let done = recorded.is_none_or(|recorded| call.poll(&[recorded]));
    call.cost = Some(call.costs.event_query(done));
    if !done {
        return Err(CUresult::CUDA_ERROR_NOT_READY);
    }
    let key = call.event(handle)?;
    call.healthy(call.events.by_key[&key].context)
}

pub(crate) fn synchronize(call: &mut Call<'_>, handle: CUevent) -> Result<(), CUresult> {
    let recorded = call.observed(handle)?;
    let context = call.event(handle).map(|key| call.events.by_key[&key].context)?;
    if let Some(recorded) = recorded {
        call.wait_and_observe(&recorded)?;
    }
    call.healthy(context)?;
    call.trim_pools_at_sync(context);
    Ok(())
}

pub(crate) fn elapsed(
    call: &mut Call<'_>,
    out: Out<f32>,
    start: CUevent,
    end: CUevent,
) -> Result<(), CUresult> {
    let (start, end) = (call.event(start)?, call.event(end)?);
    if call.events.by_key[&start].context != call.events.by_key[&end].context {
        return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
    call.healthy(call.events.by_key[&start].context)?;
    let mut times = [0.0; 2];
    for (key, time) in [start, end].into_iter().zip(&mut times) {
        let event = &call.events.by_key[&key];
        match event.last {
            Last::Stream(_) if event.flags & DISABLE_TIMING == 0 => {}
            Last::Capture { .. } => return Err(CUresult::CUDA_ERROR_CAPTURED_EVENT),
            Last::Never | Last::Stream(_) => return Err(CUresult::CUDA_ERROR_INVALID_HANDLE),
        }
        *time = event.reached_us.ok_or(CUresult::CUDA_ERROR_NOT_READY)?;
    }
    out.set(((times[1] - times[0]) / 1000.0) as f32)
}

pub(crate) fn wait(
    call: &mut Call<'_>,
    stream: CUstream,
    handle: CUevent,
    flags: u32,
) -> Result<(), CUresult> {
    call.require_no_flags(flags, stream)?;
    let stream = call.stream(stream)?;
    let key = call.event(handle)?;
    let last = call.events.by_key[&key].last.clone();
    let capturing = call.capture_of(stream)?;
    call.cost = Some(call.costs.stream_wait(match &last {
        Last::Stream(recorded) => call.streams.is_done(recorded.point),
        Last::Never | Last::Capture { .. } => true,
    }));
    match (last, capturing) {
        (Last::Never, _) => Ok(()),
        (Last::Stream(recorded), None) => {
            let what: Arc<str> = "cuStreamWaitEvent".into();
            call.enqueue(stream, &[recorded], Work::Order, &what).map(|_| ())
        }
        (Last::Stream(_), Some(capture)) => {
            call.invalidate(capture);
            Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION)
        }
        (Last::Capture { capture, nodes }, capturing) => {
            call.join_capture(stream, capturing, capture, nodes)
        }
    }
}

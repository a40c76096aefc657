//! What the process's pools did: the last so many requests, frees and failures, when asked for.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use super::mode::{self, Mode};
use crate::guard::guard;
use crate::status::vpmm_status;

/// Answers a number for where the program is, such as one of a stack of calls, which events keep. Called
/// in the thread that allocates or frees, before it does. It lets no exception out.
pub type vpmm_where = Option<unsafe extern "C" fn(context: *mut c_void) -> u64>;

/// What happened, by PyTorch's names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Action {
    Alloc,
    FreeCompleted,
    OutOfMemory,
}

impl Action {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Alloc => "alloc",
            Self::FreeCompleted => "free_completed",
            Self::OutOfMemory => "oom",
        }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Event {
    pub(super) action: Action,
    pub(super) device: u32,
    /// Of an event without memory: what was free in the pool.
    pub(super) address: u64,
    /// As asked for; of a free as the pool rounded.
    pub(super) bytes: u64,
    pub(super) stream: u64,
    pub(super) micros: u64,
    pub(super) at: u64,
    /// Tells it from all others.
    number: u64,
}

struct Trace {
    events: VecDeque<Event>,
    /// Events that were ever noted.
    noted: u64,
    most: usize,
    place: vpmm_where,
    context: usize,
}

static TRACE: Mutex<Trace> =
    Mutex::new(Trace { events: VecDeque::new(), noted: 0, most: 0, place: None, context: 0 });

fn trace() -> MutexGuard<'static, Trace> {
    TRACE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where the program is. The callback runs without the lock: it may take others.
pub(super) fn place() -> u64 {
    let (place, context) = {
        let trace = trace();
        (trace.place, trace.context)
    };
    let context = std::ptr::with_exposed_provenance_mut(context);
    // SAFETY: whoever gave it vouches that it can be called until another is given.
    place.map_or(0, |place| unsafe { place(context) })
}

/// Answers the event's number.
pub(super) fn note(
    action: Action,
    device: u32,
    address: u64,
    bytes: u64,
    stream: u64,
    at: u64,
) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let micros = now.as_micros() as u64;
    let mut trace = trace();
    while trace.events.len() >= trace.most.max(1) {
        trace.events.pop_front();
    }
    trace.noted += 1;
    let number = trace.noted;
    if trace.most > 0 {
        trace.events.push_back(Event {
            action,
            device,
            address,
            bytes,
            stream,
            micros,
            at,
            number,
        });
    }
    number
}

/// Takes an event back, where it is still kept: what it tells of did not happen.
pub(super) fn take_back(number: u64) {
    let mut trace = trace();
    if let Ok(at) = trace.events.binary_search_by_key(&number, |event| event.number) {
        trace.events.remove(at);
    }
}

/// The events so far, the oldest first; in a child of the process none.
pub(super) fn events() -> Vec<Event> {
    if super::check_process().is_err() {
        return Vec::new();
    }
    trace().events.iter().copied().collect()
}

/// Keeps the last `most` requests, frees and failures of the process's pools, for
/// `vpmm_process_snapshot`; what was kept before is forgotten. With 0, as at first, nothing is kept, and
/// a request costs nothing more. `place`, which may be null, is asked at each where the program is.
///
/// # Safety
/// `place` can be called with `context`, from any thread, until this is called again and calls under way
/// have ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_process_record_history(
    most: usize,
    place: vpmm_where,
    context: *mut c_void,
) -> vpmm_status {
    guard(|| {
        super::check_process()?;
        let mut trace = trace();
        // An address that only the callback knows.
        let context = context.expose_provenance();
        *trace = Trace { events: VecDeque::new(), noted: trace.noted, most, place, context };
        mode::set(Mode::Tracing, most > 0);
        Ok(())
    })
}

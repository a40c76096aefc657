//! Streams, events and host functions.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};

use super::*;

/// What a stream that is held answers.
const BUSY: CUresult = CUresult::CUDA_ERROR_NOT_READY;
const DONE: CUresult = CUresult::CUDA_SUCCESS;
const ILLEGAL_STATE: &[CUresult] = &[CUresult::CUDA_ERROR_ILLEGAL_STATE];

pub(crate) fn rows() -> Vec<Row> {
    vec![
        row("event query: never recorded", SUCCESS, |p| answer(p.query(p.event()?))),
        row("event synchronize: never recorded", SUCCESS, |p| answer(p.event_sync(p.event()?))),
        row("wait event: never recorded: no wait", SUCCESS, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let code = answer(p.wait(stream, p.event()?))?;
            p.stream_sync(stream)?;
            Ok(code)
        }),
        row("event query: work before it still runs", NOT_READY, |p| {
            let (stream, event) = (p.stream(NON_BLOCKING)?, p.event()?);
            let hold = p.hold(stream)?;
            p.record(event, stream)?;
            let code = answer(p.query(event));
            hold.release();
            code
        }),
        row("event query: work before it is done", SUCCESS, |p| {
            let (stream, event) = (p.stream(NON_BLOCKING)?, p.event()?);
            p.hold(stream)?.release();
            p.record(event, stream)?;
            p.event_sync(event)?;
            answer(p.query(event))
        }),
        row("event query: work behind it does not count", SUCCESS, |p| {
            let (stream, event) = (p.stream(NON_BLOCKING)?, p.event()?);
            p.record(event, stream)?;
            p.event_sync(event)?;
            let hold = p.hold(stream)?;
            let code = answer(p.query(event));
            hold.release();
            code
        }),
        row("event record: again: the new place counts", NOT_READY, |p| {
            let (stream, event) = (p.stream(NON_BLOCKING)?, p.event()?);
            p.record(event, stream)?;
            p.event_sync(event)?;
            let hold = p.hold(stream)?;
            p.record(event, stream)?;
            let code = answer(p.query(event));
            hold.release();
            code
        }),
        row("event record: again on an idle stream: the old place is forgotten", SUCCESS, |p| {
            let (busy, idle) = (p.stream(NON_BLOCKING)?, p.stream(NON_BLOCKING)?);
            let event = p.event()?;
            let hold = p.hold(busy)?;
            p.record(event, busy)?;
            p.record(event, idle)?;
            p.stream_sync(idle)?;
            let code = answer(p.query(event));
            hold.release();
            code
        }),
        row("wait event: a later record does not move the wait", SUCCESS, |p| {
            let (waits, other) = (p.stream(NON_BLOCKING)?, p.stream(NON_BLOCKING)?);
            let event = p.event()?;
            p.record(event, other)?;
            p.wait(waits, event)?;
            let hold = p.hold(other)?;
            p.record(event, other)?;
            let code = answer(p.stream_sync(waits));
            hold.release();
            code
        }),
        row("wait event: a record behind the wait does not matter to it", SUCCESS, |p| {
            let (waits, other) = (p.stream(NON_BLOCKING)?, p.stream(NON_BLOCKING)?);
            let event = p.event()?;
            let hold = p.hold(other)?;
            p.record(event, other)?;
            p.wait(waits, event)?;
            p.record(event, p.stream(NON_BLOCKING)?)?;
            let still = answer(p.stream_query(waits))?;
            hold.release();
            ensure(still == BUSY, "the stream waits for the first record")?;
            answer(p.stream_sync(waits))
        }),
        row("event destroy: while work before it runs", SUCCESS, |p| {
            let (stream, event) = (p.stream(NON_BLOCKING)?, p.event()?);
            let hold = p.hold(stream)?;
            p.record(event, stream)?;
            let code = answer(p.event_destroy(event));
            hold.release();
            code
        }),
        row("event destroy: while another stream waits for it: the wait stays", SUCCESS, |p| {
            let (first, second) = (p.stream(NON_BLOCKING)?, p.stream(NON_BLOCKING)?);
            let event = p.event()?;
            let hold = p.hold(first)?;
            p.record(event, first)?;
            p.wait(second, event)?;
            let code = answer(p.event_destroy(event));
            let still = answer(p.stream_query(second))?;
            hold.release();
            ensure(still == BUSY, "the second stream still waits")?;
            p.stream_sync(second)?;
            code
        }),
        row("event create: unknown flags", INVALID_VALUE, |p| answer(p.event_with(0x100))),
        row(
            "event query: no event",
            &[CUresult::CUDA_ERROR_INVALID_HANDLE, CUresult::CUDA_ERROR_INVALID_VALUE],
            |p| answer(p.query(std::ptr::null_mut())),
        ),
        row("elapsed time: between timed events", SUCCESS, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let (start, end) = (p.event_with(0)?, p.event_with(0)?);
            p.record(start, stream)?;
            p.record(end, stream)?;
            p.event_sync(end)?;
            ensure(p.elapsed(start, end)? >= 0.0, "time does not run backwards")?;
            Ok(DONE)
        }),
        row("elapsed time: of events without timing", INVALID_HANDLE, |p| {
            let (stream, event) = (p.stream(NON_BLOCKING)?, p.event()?);
            p.record(event, stream)?;
            p.event_sync(event)?;
            answer(p.elapsed(event, event))
        }),
        row("elapsed time: of events not recorded", INVALID_HANDLE, |p| {
            answer(p.elapsed(p.event_with(0)?, p.event_with(0)?))
        }),
        row("stream create: unknown flags", INVALID_VALUE, |p| answer(p.stream(0x100))),
        row("stream flags: as created", SUCCESS, |p| {
            let (a, b) = (p.stream(NON_BLOCKING)?, p.stream(BLOCKING)?);
            ensure(p.stream_flags(a)? == NON_BLOCKING, "non-blocking")?;
            ensure(p.stream_flags(b)? == BLOCKING, "blocking")?;
            Ok(DONE)
        }),
        row("stream create: with no context current", INVALID_CONTEXT, |p| {
            p.set_context(std::ptr::null_mut())?;
            answer(p.stream(NON_BLOCKING))
        }),
        row("stream query: idle", SUCCESS, |p| answer(p.stream_query(p.stream(NON_BLOCKING)?))),
        row("stream query: busy", NOT_READY, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let hold = p.hold(stream)?;
            let code = answer(p.stream_query(stream));
            hold.release();
            code
        }),
        row("stream query: the legacy stream beside a busy blocking one", NOT_READY, |p| {
            let stream = p.stream(BLOCKING)?;
            let hold = p.hold(stream)?;
            let code = answer(p.stream_query(LEGACY));
            hold.release();
            code
        }),
        row(
            "stream query: the legacy stream beside a busy one that does not block",
            SUCCESS,
            |p| {
                let stream = p.stream(NON_BLOCKING)?;
                let hold = p.hold(stream)?;
                let code = answer(p.stream_query(LEGACY));
                hold.release();
                code
            },
        ),
        row("event record: external, outside of a capture", ILLEGAL_STATE, |p| {
            answer(p.record_with(p.event()?, p.stream(NON_BLOCKING)?, 1))
        }),
        row("event wait: external, outside of a capture", ILLEGAL_STATE, |p| {
            answer(p.wait_with(p.stream(NON_BLOCKING)?, p.event()?, 1))
        }),
        row("event record: unknown flags", INVALID_VALUE, |p| {
            answer(p.record_with(p.event()?, p.stream(NON_BLOCKING)?, 2))
        }),
        row("event wait: unknown flags", INVALID_VALUE, |p| {
            answer(p.wait_with(p.stream(NON_BLOCKING)?, p.event()?, 2))
        }),
        row("stream destroy: while it works: the work goes on", SUCCESS, |p| {
            let (stream, event) = (p.stream(NON_BLOCKING)?, p.event()?);
            let hold = p.hold(stream)?;
            p.record(event, stream)?;
            let code = answer(p.stream_destroy(stream));
            let still = answer(p.query(event))?;
            hold.release();
            ensure(still == BUSY, "the event is pending after the stream is gone")?;
            p.event_sync(event)?;
            code
        }),
        row("stream id: never used again", SUCCESS, |p| {
            let mut ids = Vec::new();
            for _ in 0..16 {
                let stream = p.stream(NON_BLOCKING)?;
                ids.push(p.stream_id(stream)?);
                p.stream_destroy(stream)?;
            }
            ids.sort_unstable();
            ids.dedup();
            ensure(ids.len() == 16, "every id is new, whatever the handle")?;
            Ok(DONE)
        }),
        row("stream id: null and the legacy handle are one stream", SUCCESS, |p| {
            let null = p.stream_id(std::ptr::null_mut())?;
            ensure(null == p.stream_id(LEGACY)?, "the ids are equal")?;
            ensure(null != p.stream_id(PER_THREAD)?, "the per-thread stream is another")?;
            Ok(DONE)
        }),
        row("stream id: the per-thread handle is another stream on another thread", SUCCESS, |p| {
            let here = p.stream_id(PER_THREAD)?;
            let there = on_another_thread(p.target, |p| p.stream_id(PER_THREAD))?;
            ensure(here != there, "the ids differ")?;
            ensure(here == p.stream_id(PER_THREAD)?, "and this thread's stays")?;
            Ok(DONE)
        }),
        row("stream context: of the legacy stream, with a context", SUCCESS, |p| {
            ensure(p.stream_context(LEGACY)? == p.target.context, "the current one")?;
            Ok(DONE)
        }),
        row("stream context: of the legacy stream, with no context", INVALID_CONTEXT, |p| {
            p.set_context(std::ptr::null_mut())?;
            answer(p.stream_context(LEGACY))
        }),
        row("legacy stream: waits for blocking streams", NOT_READY, |p| {
            let hold = p.hold(p.stream(BLOCKING)?)?;
            pending_behind(p, LEGACY, hold)
        }),
        row("legacy stream: does not wait for non-blocking streams", SUCCESS, |p| {
            let hold = p.hold(p.stream(NON_BLOCKING)?)?;
            finished_beside(p, LEGACY, hold)
        }),
        row("legacy stream: waits for the per-thread stream", NOT_READY, |p| {
            let hold = p.hold(PER_THREAD)?;
            pending_behind(p, LEGACY, hold)
        }),
        row("blocking stream: waits for the legacy stream", NOT_READY, |p| {
            let stream = p.stream(BLOCKING)?;
            let hold = p.hold(LEGACY)?;
            pending_behind(p, stream, hold)
        }),
        row("per-thread stream: waits for the legacy stream", NOT_READY, |p| {
            let hold = p.hold(LEGACY)?;
            pending_behind(p, PER_THREAD, hold)
        }),
        row("non-blocking stream: does not wait for the legacy stream", SUCCESS, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let hold = p.hold(LEGACY)?;
            finished_beside(p, stream, hold)
        }),
        row("blocking stream: does not wait for other blocking streams", SUCCESS, |p| {
            let (busy, other) = (p.stream(BLOCKING)?, p.stream(BLOCKING)?);
            let hold = p.hold(busy)?;
            finished_beside(p, other, hold)
        }),
        row("context synchronize: waits for every stream", SUCCESS, |p| {
            let events = [p.event()?, p.event()?];
            for event in events {
                let stream = p.stream(NON_BLOCKING)?;
                let hold = p.hold(stream)?;
                p.record(event, stream)?;
                hold.release();
            }
            let code = answer(p.sync())?;
            for event in events {
                ensure(answer(p.query(event))? == DONE, "every event has passed")?;
            }
            Ok(code)
        }),
        row("host function: runs in stream order", SUCCESS, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let hold = p.hold(stream)?;
            let calls = AtomicU32::new(0);
            let code = run_on_host(p, stream, &calls, hold, |calls| {
                ensure(calls == 0, "not before the work ahead of it is done")
            })?;
            ensure(calls.load(Ordering::Acquire) == 1, "once, before the stream is idle")?;
            Ok(code)
        }),
        row("host function: may not call the driver", NOT_PERMITTED, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let question = Question {
                query: p.driver().cuEventQuery.ok_or(Trouble::Fact("no cuEventQuery".into()))?,
                event: p.event()?,
                code: AtomicU32::new(u32::MAX),
            };
            let data = std::ptr::from_ref(&question).cast_mut().cast();
            // SAFETY: the question outlives the stream's work, which is waited for below.
            let launched = unsafe { p.host_function(stream, Question::ask, data) };
            p.stream_sync(stream)?;
            launched?;
            Ok(CUresult(question.code.load(Ordering::Acquire)))
        }),
    ]
}

/// The documentation forbids every call; an H200's driver answers this one nevertheless.
const NOT_PERMITTED: &[CUresult] = &[CUresult::CUDA_ERROR_NOT_PERMITTED, CUresult::CUDA_SUCCESS];

/// A driver call that a host function makes.
struct Question {
    query: unsafe extern "C" fn(CUevent) -> CUresult,
    event: CUevent,
    code: AtomicU32,
}

impl Question {
    unsafe extern "C" fn ask(this: *mut c_void) {
        // SAFETY: the row passes a live question and waits for the call.
        let this = unsafe { &*this.cast::<Self>() };
        // SAFETY: the event exists until the row ends.
        let code = unsafe { (this.query)(this.event) };
        this.code.store(code.0, Ordering::Release);
    }
}

/// An event behind a stream's next work, while something else is held; then lets that go and
/// makes sure that everything ends.
fn behind(p: &Probe<'_>, stream: CUstream) -> Result<CUevent, Trouble> {
    let memory = p.open(&[p.g])?;
    let event = p.event()?;
    p.set32(memory, 1, 4, stream)?;
    p.record(event, stream)?;
    Ok(event)
}

fn pending_behind(p: &Probe<'_>, stream: CUstream, hold: Hold) -> Answer {
    let event = behind(p, stream)?;
    let code = answer(p.query(event));
    hold.release();
    p.event_sync(event)?;
    code
}

fn finished_beside(p: &Probe<'_>, stream: CUstream, hold: Hold) -> Answer {
    let event = behind(p, stream)?;
    // Were the stream waiting, this would never end; the watchdog then names the row.
    let mut code = answer(p.query(event))?;
    for _ in 0..100_000 {
        if code != BUSY {
            break;
        }
        std::thread::yield_now();
        code = answer(p.query(event))?;
    }
    hold.release();
    Ok(code)
}

fn run_on_host(
    p: &Probe<'_>,
    stream: CUstream,
    calls: &AtomicU32,
    hold: Hold,
    while_held: impl FnOnce(u32) -> Result<(), Trouble>,
) -> Answer {
    unsafe extern "C" fn count(calls: *mut c_void) {
        // SAFETY: `run_on_host` passes a live counter and waits for the call.
        unsafe { &*calls.cast::<AtomicU32>() }.fetch_add(1, Ordering::AcqRel);
    }
    let data = std::ptr::from_ref(calls).cast_mut().cast();
    // SAFETY: the counter may be used from any thread, and it outlives the stream's work: the
    // synchronisation below is reached on every path behind a successful launch.
    let launched = unsafe { p.host_function(stream, count, data) };
    let held = while_held(calls.load(Ordering::Acquire));
    hold.release();
    p.stream_sync(stream)?;
    held?;
    answer(launched)
}

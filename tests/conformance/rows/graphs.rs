//! Who takes part in a capture, graphs over mapped memory, and copies to page-locked memory beside
//! captures.

use super::capture::{harmed, unharmed};
use super::*;

const IMPLICIT: &[CUresult] = &[CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT];
const ACTIVE: CUstreamCaptureStatus = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE;
const NONE: CUstreamCaptureStatus = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;

pub(crate) fn rows() -> Vec<Row> {
    vec![
        row("capture info, global: of the capturing stream", SUCCESS, |p| info(p, GLOBAL)),
        row("capture info, thread-local: of the capturing stream", SUCCESS, |p| {
            info(p, THREAD_LOCAL)
        }),
        row("capture info, relaxed: of the capturing stream", SUCCESS, |p| info(p, RELAXED)),
        row("capture info: of a stream that does not capture", SUCCESS, |p| {
            let other = p.stream(NON_BLOCKING)?;
            let stream = capturing(p, GLOBAL)?;
            ensure(p.capture_info(other)?.0 == NONE, "the other stream does not capture")?;
            answer(p.end_capture(stream))
        }),
        row("capture info: a stream that joined has the same id", SUCCESS, |p| {
            let (out, back) = (p.event()?, p.event()?);
            let other = p.stream(BLOCKING)?;
            let stream = capturing(p, GLOBAL)?;
            p.record(out, stream)?;
            p.wait(other, out)?;
            let (status, id) = p.capture_info(other)?;
            ensure(status == ACTIVE && id == p.capture_info(stream)?.1, "one id for both")?;
            p.record(back, other)?;
            p.wait(stream, back)?;
            answer(p.end_capture(stream))
        }),
        row("capture info: the next capture has another id", SUCCESS, |p| {
            let stream = capturing(p, RELAXED)?;
            let first = p.capture_info(stream)?.1;
            p.end_capture(stream)?;
            ensure(p.capture_info(stream)?.0 == NONE, "it has ended")?;
            p.begin_capture(stream, RELAXED)?;
            ensure(p.capture_info(stream)?.1 != first, "the ids differ")?;
            answer(p.end_capture(stream))
        }),
        row("capture info: from another thread", SUCCESS, |p| {
            let stream = capturing(p, GLOBAL)?;
            let raw = stream as usize;
            let asked = on_another_thread(p.target, |p| {
                p.capture_info(raw as CUstream).map(|(status, id)| (status.0, id))
            });
            let (status, id) = asked?;
            ensure(status == ACTIVE.0 && id == p.capture_info(stream)?.1, "the same answer")?;
            answer(p.end_capture(stream))
        }),
        row("capture info: of the legacy stream beside a blocking capture", IMPLICIT, |p| {
            let stream = p.stream(BLOCKING)?;
            p.begin_capture(stream, RELAXED)?;
            answer(p.capture_info(LEGACY))
        }),
        // By the documentation the question harms no capture.
        row(
            "capture: ask whether the legacy stream captures beside a blocking one",
            IMPLICIT,
            |p| {
                let stream = p.stream(BLOCKING)?;
                p.begin_capture(stream, RELAXED)?;
                let code = answer(p.capture_status(LEGACY));
                unharmed(p, stream, code)
            },
        ),
        // This one neither, of which the documentation does not say so.
        row("capture info: asked of the legacy stream it harms no capture", IMPLICIT, |p| {
            let stream = p.stream(BLOCKING)?;
            p.begin_capture(stream, GLOBAL)?;
            let code = answer(p.capture_info(LEGACY));
            unharmed(p, stream, code)
        }),
        row(
            "capture: an event recorded on the legacy stream ends a blocking one's",
            IMPLICIT,
            |p| {
                let (event, stream) = (p.event()?, p.stream(BLOCKING)?);
                p.begin_capture(stream, RELAXED)?;
                let code = answer(p.record(event, LEGACY));
                harmed(p, stream, code)
            },
        ),
        row("capture, global: an event is waited for in relaxed thread mode", SUCCESS, |p| {
            let (event, other) = (p.event()?, p.stream(NON_BLOCKING)?);
            p.record(event, other)?;
            relaxed(p, |p| answer(p.event_sync(event)))
        }),
        row("capture, global: another stream is waited for in relaxed thread mode", SUCCESS, |p| {
            let other = p.stream(NON_BLOCKING)?;
            relaxed(p, |p| answer(p.stream_sync(other)))
        }),
        row("capture, global: page-locked memory in relaxed thread mode", SUCCESS, |p| {
            relaxed(p, |p| answer(p.host_words(512)))
        }),
        row("capture, global: page-locked memory is freed in relaxed thread mode", SUCCESS, |p| {
            let memory = p.host_words(512)?;
            relaxed(p, |p| answer(p.free_host(memory)))
        }),
        row("capture, global: copies to and from page-locked memory elsewhere", SUCCESS, |p| {
            let other = p.stream(NON_BLOCKING)?;
            let (at, memory) = (p.open(&[p.g])?, p.host_words(512)?);
            let stream = capturing(p, GLOBAL)?;
            p.save(memory, at, 4096, other)?;
            let code = answer(p.load(at, memory, 4096, other))?;
            ensure(p.capture_info(stream)?.0 == ACTIVE, "the capture is unharmed")?;
            p.end_capture(stream)?;
            Ok(code)
        }),
        row("copy: across mappings to page-locked memory and back", SUCCESS, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let (from, to) = (p.open(&[p.g, p.g])?, p.open(&[p.g, p.g])?);
            let memory = p.host_words(2 * p.g as usize / 8)?;
            p.set32(from + p.g - 8, 77, 4, stream)?;
            p.save(memory, from, 2 * p.g, stream)?;
            let code = answer(p.load(to, memory, 2 * p.g, stream))?;
            ensure(p.read32(to + p.g - 8, stream)? == 77, "below the border")?;
            ensure(p.read32(to + p.g + 4, stream)? == 77, "above the border")?;
            Ok(code)
        }),
        row("graph: launched over memory made anew at its addresses", SUCCESS, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let at = p.reserve(p.g)?;
            let first = p.create(p.g)?;
            p.map(at, p.g, 0, first)?;
            p.set_access(at, p.g)?;
            p.begin_capture(stream, GLOBAL)?;
            p.set32(at, 5, 16, stream)?;
            let graph = p.end_capture_as_graph(stream)?;
            p.launch_graph(&graph, stream)?;
            p.stream_sync(stream)?;
            p.unmap(at, p.g)?;
            p.release(first)?;
            let second = p.create(p.g)?;
            p.map(at, p.g, 0, second)?;
            p.set_access(at, p.g)?;
            p.set32(at, 1, 16, stream)?;
            let code = answer(p.launch_graph(&graph, stream))?;
            ensure(p.read32(at + 60, stream)? == 5, "the graph wrote to the new memory")?;
            Ok(code)
        }),
        row(
            "graph: launched again on another stream it waits for the first launch",
            NOT_READY,
            |p| {
                let at = p.open(&[p.g])?;
                let (stream, other) = (capturing(p, GLOBAL)?, p.stream(NON_BLOCKING)?);
                p.set32(at, 5, 16, stream)?;
                let graph = p.end_capture_as_graph(stream)?;
                let hold = p.hold(stream)?;
                p.launch_graph(&graph, stream)?;
                p.launch_graph(&graph, other)?;
                std::thread::sleep(std::time::Duration::from_millis(20));
                let code = answer(p.stream_query(other));
                hold.release();
                p.stream_sync(other)?;
                code
            },
        ),
    ]
}

/// A new stream that captures in this mode.
fn capturing(p: &Probe<'_>, mode: CUstreamCaptureMode) -> Result<CUstream, Trouble> {
    let stream = p.stream(NON_BLOCKING)?;
    p.begin_capture(stream, mode)?;
    Ok(stream)
}

/// The question who captures leaves the capture as it is.
fn info(p: &Probe<'_>, mode: CUstreamCaptureMode) -> Answer {
    let stream = capturing(p, mode)?;
    let (status, id) = p.capture_info(stream)?;
    ensure(status == ACTIVE, "the stream captures")?;
    ensure(p.capture_info(stream)? == (ACTIVE, id), "and still does")?;
    answer(p.end_capture(stream))
}

/// A call beside a global capture of this very thread, which is told to ignore it meanwhile.
fn relaxed(p: &Probe<'_>, call: impl FnOnce(&Probe<'_>) -> Answer) -> Answer {
    let stream = capturing(p, GLOBAL)?;
    let before = p.exchange_mode(RELAXED)?;
    let code = call(p);
    p.exchange_mode(before)?;
    let code = code?;
    ensure(p.capture_info(stream)?.0 == ACTIVE, "the capture is unharmed")?;
    ensure(answer(p.end_capture(stream))? == CUresult::CUDA_SUCCESS, "the capture ends well")?;
    Ok(code)
}

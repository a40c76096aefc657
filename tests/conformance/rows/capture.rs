//! Calls while a stream captures.

use super::*;

const UNSUPPORTED: &[CUresult] = &[CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED];
const INVALIDATED: &[CUresult] = &[CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED];
const ACTIVE: CUstreamCaptureStatus = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE;

pub(crate) fn rows() -> Vec<Row> {
    vec![
        row("capture: begin, work, end", SUCCESS, |p| {
            let at = p.open(&[p.g])?;
            let stream = capturing(p, GLOBAL)?;
            ensure(p.capture_status(stream)? == ACTIVE, "the stream is capturing")?;
            p.set32(at, 1, 4, stream)?;
            answer(p.end_capture(stream))
        }),
        row("capture: captured work does not run", SUCCESS, |p| {
            let reader = p.stream(NON_BLOCKING)?;
            let at = p.open(&[p.g])?;
            p.set32(at, 3, 4, reader)?;
            p.stream_sync(reader)?;
            let stream = capturing(p, RELAXED)?;
            p.set32(at, 4, 4, stream)?;
            let code = answer(p.end_capture(stream))?;
            ensure(p.read32(at, reader)? == 3, "the bytes are the old ones")?;
            Ok(code)
        }),
        row("capture, global: create", SUCCESS, |p| {
            let stream = capturing(p, GLOBAL)?;
            unharmed(p, stream, answer(p.create(p.g)))
        }),
        row("capture, global: map, set access, unmap", SUCCESS, |p| {
            let stream = capturing(p, GLOBAL)?;
            let at = p.open(&[p.g])?;
            unharmed(p, stream, answer(p.unmap(at, p.g)))
        }),
        row("capture, global: record an event on another stream", SUCCESS, |p| {
            let (event, other) = (p.event()?, p.stream(NON_BLOCKING)?);
            let stream = capturing(p, GLOBAL)?;
            unharmed(p, stream, answer(p.record(event, other)))
        }),
        row("capture, global: query an event", UNSUPPORTED, |p| {
            let event = p.event()?;
            let stream = capturing(p, GLOBAL)?;
            harmed(p, stream, answer(p.query(event)))
        }),
        row("capture, global: querying an event invalidates the capture", INVALIDATED, |p| {
            let event = p.event()?;
            let stream = capturing(p, GLOBAL)?;
            answer(p.query(event))?;
            answer(p.end_capture(stream))
        }),
        row("capture, global: query an event in relaxed thread mode", SUCCESS, |p| {
            let event = p.event()?;
            let stream = capturing(p, GLOBAL)?;
            let before = p.exchange_mode(RELAXED)?;
            let code = answer(p.query(event));
            p.exchange_mode(before)?;
            unharmed(p, stream, code)
        }),
        row("capture, global: query an event from another thread", UNSUPPORTED, |p| {
            let event = p.event()? as usize;
            let stream = capturing(p, GLOBAL)?;
            harmed(p, stream, answer(on_another_thread(p.target, |p| p.query(event as CUevent))))
        }),
        row("capture, global: reserve and unreserve", SUCCESS, |p| {
            let stream = capturing(p, GLOBAL)?;
            let at = p.reserve(p.g)?;
            unharmed(p, stream, answer(p.unreserve(at, p.g)))
        }),
        row("capture, global: release", SUCCESS, |p| {
            let handle = p.create(p.g)?;
            let stream = capturing(p, GLOBAL)?;
            unharmed(p, stream, answer(p.release(handle)))
        }),
        row("capture, global: alloc", UNSUPPORTED, |p| {
            let stream = capturing(p, GLOBAL)?;
            harmed(p, stream, answer(p.alloc(MIB)))
        }),
        row("capture, relaxed: alloc", SUCCESS, |p| {
            let stream = capturing(p, RELAXED)?;
            unharmed(p, stream, answer(p.alloc(MIB)))
        }),
        row("capture, global: free", UNSUPPORTED, |p| {
            let at = p.alloc(MIB)?;
            let stream = capturing(p, GLOBAL)?;
            harmed(p, stream, answer(p.free(at)))
        }),
        row("capture, global: create a stream", SUCCESS, |p| {
            let stream = capturing(p, GLOBAL)?;
            unharmed(p, stream, answer(p.stream(NON_BLOCKING)))
        }),
        row("capture, global: create an event", SUCCESS, |p| {
            let stream = capturing(p, GLOBAL)?;
            unharmed(p, stream, answer(p.event()))
        }),
        row("capture, global: work on another stream", SUCCESS, |p| {
            let (at, other) = (p.open(&[p.g])?, p.stream(NON_BLOCKING)?);
            let stream = capturing(p, GLOBAL)?;
            unharmed(p, stream, answer(p.set32(at, 1, 4, other)))
        }),
        row("capture, global: another stream waits for an event", SUCCESS, |p| {
            let (event, other) = (p.event()?, p.stream(NON_BLOCKING)?);
            p.record(event, p.stream(NON_BLOCKING)?)?;
            let stream = capturing(p, GLOBAL)?;
            unharmed(p, stream, answer(p.wait(other, event)))
        }),
        row("capture, global: query another stream", UNSUPPORTED, |p| {
            let other = p.stream(NON_BLOCKING)?;
            let stream = capturing(p, GLOBAL)?;
            harmed(p, stream, answer(p.stream_query(other)))
        }),
        row("capture, global: synchronize another stream", UNSUPPORTED, |p| {
            let other = p.stream(NON_BLOCKING)?;
            let stream = capturing(p, GLOBAL)?;
            harmed(p, stream, answer(p.stream_sync(other)))
        }),
        row("capture, global: synchronize with an event", UNSUPPORTED, |p| {
            let event = p.event()?;
            let stream = capturing(p, GLOBAL)?;
            harmed(p, stream, answer(p.event_sync(event)))
        }),
        row("capture, global: synchronize the context", UNSUPPORTED, |p| {
            let stream = capturing(p, GLOBAL)?;
            harmed(p, stream, answer(p.sync()))
        }),
        row("capture, relaxed: synchronize the context", UNSUPPORTED, |p| {
            let stream = capturing(p, RELAXED)?;
            harmed(p, stream, answer(p.sync()))
        }),
        row("capture, relaxed: synchronize the context from another thread", UNSUPPORTED, |p| {
            let stream = capturing(p, RELAXED)?;
            harmed(p, stream, answer(on_another_thread(p.target, |p| p.sync())))
        }),
        row("capture, global: the id of the capturing stream", UNSUPPORTED, |p| {
            let stream = capturing(p, GLOBAL)?;
            harmed(p, stream, answer(p.stream_id(stream)))
        }),
        row("capture, relaxed: the id of the capturing stream", UNSUPPORTED, |p| {
            let stream = capturing(p, RELAXED)?;
            harmed(p, stream, answer(p.stream_id(stream)))
        }),
        row("capture, global: the id of another stream", SUCCESS, |p| {
            let other = p.stream(NON_BLOCKING)?;
            let stream = capturing(p, GLOBAL)?;
            unharmed(p, stream, answer(p.stream_id(other)))
        }),
        row("capture, global: alloc async on another stream", UNSUPPORTED, |p| {
            let other = p.stream(NON_BLOCKING)?;
            let stream = capturing(p, GLOBAL)?;
            harmed(p, stream, answer(p.alloc_async(MIB, other)))
        }),
        row("capture, relaxed: alloc async on another stream", SUCCESS, |p| {
            let other = p.stream(NON_BLOCKING)?;
            let stream = capturing(p, RELAXED)?;
            unharmed(p, stream, answer(p.alloc_async(MIB, other)))
        }),
        row("capture, global: free async on another stream", UNSUPPORTED, |p| {
            let other = p.stream(NON_BLOCKING)?;
            let at = p.alloc_async(MIB, other)?;
            let stream = capturing(p, GLOBAL)?;
            harmed(p, stream, answer(p.free_async(at, other)))
        }),
        row("capture, global: find the default pool", SUCCESS, |p| {
            let stream = capturing(p, GLOBAL)?;
            unharmed(p, stream, answer(p.default_pool()))
        }),
        row("capture, global: a pool's attribute", UNSUPPORTED, |p| {
            let pool = p.default_pool()?;
            let attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            let stream = capturing(p, GLOBAL)?;
            harmed(p, stream, answer(p.pool_u64(pool, attribute)))
        }),
        row("capture, global: trim a pool", UNSUPPORTED, |p| {
            let pool = p.default_pool()?;
            let stream = capturing(p, GLOBAL)?;
            harmed(p, stream, answer(p.pool_trim(pool, 0)))
        }),
        row("capture, global: make a pool", UNSUPPORTED, |p| {
            let stream = capturing(p, GLOBAL)?;
            harmed(p, stream, answer(p.pool()))
        }),
        row("capture, global: end a pool", UNSUPPORTED, |p| {
            let pool = p.pool()?;
            let stream = capturing(p, GLOBAL)?;
            harmed(p, stream, answer(p.pool_destroy(pool)))
        }),
        row("capture, global: open a pool", UNSUPPORTED, |p| {
            let pool = p.pool()?;
            let stream = capturing(p, GLOBAL)?;
            harmed(p, stream, answer(p.pool_open(pool)))
        }),
        row("capture, global: who has access to a pool", UNSUPPORTED, |p| {
            let pool = p.pool()?;
            let stream = capturing(p, GLOBAL)?;
            harmed(p, stream, answer(p.pool_access(pool)))
        }),
        row("capture, relaxed: wait for an event that was never recorded", SUCCESS, |p| {
            let event = p.event()?;
            let stream = capturing(p, RELAXED)?;
            unharmed(p, stream, answer(p.wait(stream, event)))
        }),
        row("capture, global: choose the current pool", UNSUPPORTED, |p| {
            let pool = p.default_pool()?;
            let stream = capturing(p, GLOBAL)?;
            harmed(p, stream, answer(p.pool_choose(pool)))
        }),
        row("capture, global: how much memory is free", SUCCESS, |p| {
            let stream = capturing(p, GLOBAL)?;
            unharmed(p, stream, answer(p.memory_info()))
        }),
        row("capture, global: an address's range and kind", SUCCESS, |p| {
            let at = p.alloc(MIB)?;
            let stream = capturing(p, GLOBAL)?;
            p.address_range(at)?;
            let kind = CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED;
            unharmed(p, stream, answer(p.pointer_u64(at, kind)))
        }),
        row("capture, global: where the device sees page-locked memory", SUCCESS, |p| {
            let at = p.host_words(1)?;
            let stream = capturing(p, GLOBAL)?;
            p.host_flags(at)?;
            unharmed(p, stream, answer(p.host_device_pointer(at)))
        }),
        row("capture: an event of a capture that is over: query", INVALID_VALUE, |p| {
            let event = left_over(p)?;
            answer(p.query(event))
        }),
        row("capture: an event of a capture that is over: synchronize", INVALID_VALUE, |p| {
            let event = left_over(p)?;
            answer(p.event_sync(event))
        }),
        row(
            "capture: an event of a capture that is over: another stream waits",
            INVALID_VALUE,
            |p| {
                let event = left_over(p)?;
                answer(p.wait(p.stream(NON_BLOCKING)?, event))
            },
        ),
        row(
            "capture: an event of a capture that is over: another capture waits",
            INVALID_VALUE,
            |p| {
                let event = left_over(p)?;
                let stream = capturing(p, RELAXED)?;
                answer(p.wait(stream, event))
            },
        ),
        row("capture: an event of a capture that is over: recorded again", SUCCESS, |p| {
            let (event, stream) = (left_over(p)?, p.stream(NON_BLOCKING)?);
            p.record(event, stream)?;
            p.event_sync(event)?;
            answer(p.wait(p.stream(NON_BLOCKING)?, event))
        }),
        row("capture: a stream that joined and did nothing need not come back", SUCCESS, |p| {
            let (event, other) = (p.event()?, p.stream(NON_BLOCKING)?);
            let stream = capturing(p, RELAXED)?;
            p.record(event, stream)?;
            p.wait(other, event)?;
            p.end_capture(stream)?;
            p.record(event, other)?;
            answer(p.stream_sync(other))
        }),
        row("capture, global: page-locked host memory", UNSUPPORTED, |p| {
            let stream = capturing(p, GLOBAL)?;
            harmed(p, stream, answer(p.host_words(1)))
        }),
        row("capture, global: give page-locked host memory back", UNSUPPORTED, |p| {
            let at = p.host_words(1)?;
            let stream = capturing(p, GLOBAL)?;
            harmed(p, stream, answer(p.free_host(at)))
        }),
        row("capture, relaxed: give page-locked host memory back", SUCCESS, |p| {
            let at = p.host_words(1)?;
            let stream = capturing(p, RELAXED)?;
            unharmed(p, stream, answer(p.free_host(at)))
        }),
        row("capture, global: page-lock host memory", UNSUPPORTED, |p| {
            let mut whole = vec![0; 1 << 16];
            let stream = capturing(p, GLOBAL)?;
            let asked = p.register(&mut whole);
            let code = harmed(p, stream, answer(asked));
            asked.map_or(Ok(()), |at| unlock(p, at))?;
            code
        }),
        row("capture, global: unlock host memory", UNSUPPORTED, |p| {
            let mut whole = vec![0; 1 << 16];
            let at = p.register(&mut whole)?;
            let stream = capturing(p, GLOBAL)?;
            let asked = p.unregister(at);
            let code = harmed(p, stream, answer(asked));
            asked.or_else(|_| unlock(p, at))?;
            code
        }),
        row("capture, global: managed memory", UNSUPPORTED, |p| {
            let stream = capturing(p, GLOBAL)?;
            harmed(
                p,
                stream,
                answer(p.managed(MIB, CUmemAttach_flags_enum::CU_MEM_ATTACH_GLOBAL.0)),
            )
        }),
        row("capture, global: give managed memory back", UNSUPPORTED, |p| {
            let at = p.managed(MIB, CUmemAttach_flags_enum::CU_MEM_ATTACH_GLOBAL.0)?;
            let stream = capturing(p, GLOBAL)?;
            harmed(p, stream, answer(p.free(at)))
        }),
        row("capture, global: a pool's attribute in relaxed thread mode", SUCCESS, |p| {
            let pool = p.default_pool()?;
            let attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            let stream = capturing(p, GLOBAL)?;
            let before = p.exchange_mode(RELAXED)?;
            let code = answer(p.pool_u64(pool, attribute));
            p.exchange_mode(before)?;
            unharmed(p, stream, code)
        }),
        row(
            "capture, global: alloc async on another stream in relaxed thread mode",
            SUCCESS,
            |p| {
                let other = p.stream(NON_BLOCKING)?;
                let stream = capturing(p, GLOBAL)?;
                let before = p.exchange_mode(RELAXED)?;
                let code = answer(p.alloc_async(MIB, other));
                p.exchange_mode(before)?;
                unharmed(p, stream, code)
            },
        ),
        row("capture, global: alloc async from another thread", UNSUPPORTED, |p| {
            let other = p.stream(NON_BLOCKING)? as usize;
            let stream = capturing(p, GLOBAL)?;
            let code = on_another_thread(p.target, |p| p.alloc_async(MIB, other as CUstream));
            harmed(p, stream, answer(code))
        }),
        row("capture, thread-local: a pool's attribute from another thread", SUCCESS, |p| {
            let pool = p.default_pool()? as usize;
            let attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            let stream = capturing(p, THREAD_LOCAL)?;
            let code = on_another_thread(p.target, |p| p.pool_u64(pool as CUmemoryPool, attribute));
            unharmed(p, stream, answer(code))
        }),
        row("capture, global: synchronize another stream from another thread", UNSUPPORTED, |p| {
            let other = p.stream(NON_BLOCKING)? as usize;
            let stream = capturing(p, GLOBAL)?;
            let code = on_another_thread(p.target, |p| p.stream_sync(other as CUstream));
            harmed(p, stream, answer(code))
        }),
        row("capture, relaxed: the flags of the capturing stream", UNSUPPORTED, |p| {
            let stream = capturing(p, RELAXED)?;
            harmed(p, stream, answer(p.stream_flags(stream)))
        }),
        row("capture, relaxed: the context of the capturing stream", SUCCESS, |p| {
            let stream = capturing(p, RELAXED)?;
            unharmed(p, stream, answer(p.stream_context(stream)))
        }),
        row("capture, relaxed: destroy the capturing stream", SUCCESS, |p| {
            let stream = capturing(p, RELAXED)?;
            answer(p.stream_destroy(stream))
        }),
        row("capture, relaxed: another stream's work and its end", SUCCESS, |p| {
            let (at, other) = (p.open(&[p.g])?, p.stream(NON_BLOCKING)?);
            let stream = capturing(p, RELAXED)?;
            p.set32(at, 1, 4, other)?;
            unharmed(p, stream, answer(p.stream_sync(other)))
        }),
        row("capture, relaxed: copy to pageable memory on another stream", SUCCESS, |p| {
            let (at, other) = (p.open(&[p.g])?, p.stream(NON_BLOCKING)?);
            let stream = capturing(p, RELAXED)?;
            unharmed(p, stream, answer(p.read32(at, other)))
        }),
        row("capture, thread-local: query an event", UNSUPPORTED, |p| {
            let event = p.event()?;
            let stream = capturing(p, THREAD_LOCAL)?;
            harmed(p, stream, answer(p.query(event)))
        }),
        row("capture, thread-local: query an event from another thread", SUCCESS, |p| {
            let event = p.event()? as usize;
            let stream = capturing(p, THREAD_LOCAL)?;
            let code = answer(on_another_thread(p.target, |p| p.query(event as CUevent)));
            unharmed(p, stream, code)
        }),
        row("capture, relaxed: query an event", SUCCESS, |p| {
            let event = p.event()?;
            let stream = capturing(p, RELAXED)?;
            unharmed(p, stream, answer(p.query(event)))
        }),
        row(
            "capture: query an event recorded in it",
            &[CUresult::CUDA_ERROR_CAPTURED_EVENT],
            |p| {
                let event = p.event()?;
                let stream = capturing(p, RELAXED)?;
                p.record(event, stream)?;
                answer(p.query(event))
            },
        ),
        row("capture: query the capturing stream", UNSUPPORTED, |p| {
            let stream = capturing(p, RELAXED)?;
            answer(p.stream_query(stream))
        }),
        row("capture: synchronize the capturing stream", UNSUPPORTED, |p| {
            let stream = capturing(p, RELAXED)?;
            answer(p.stream_sync(stream))
        }),
        row(
            "capture: use the legacy stream while a blocking stream captures",
            &[CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT],
            |p| {
                let at = p.open(&[p.g])?;
                let stream = p.stream(BLOCKING)?;
                p.begin_capture(stream, RELAXED)?;
                answer(p.set32(at, 1, 4, LEGACY))
            },
        ),
        row("capture: of the legacy stream", UNSUPPORTED, |p| {
            answer(p.begin_capture(LEGACY, RELAXED))
        }),
        row(
            "capture: begin twice",
            &[CUresult::CUDA_ERROR_ILLEGAL_STATE, CUresult::CUDA_ERROR_INVALID_VALUE],
            |p| {
                let stream = capturing(p, RELAXED)?;
                answer(p.begin_capture(stream, RELAXED))
            },
        ),
        row(
            "capture: end what did not begin",
            &[CUresult::CUDA_ERROR_ILLEGAL_STATE, CUresult::CUDA_ERROR_INVALID_VALUE],
            |p| answer(p.end_capture(p.stream(NON_BLOCKING)?)),
        ),
        row("capture: another stream joins by an event and comes back", SUCCESS, |p| {
            let (out, back) = (p.event()?, p.event()?);
            let other = p.stream(NON_BLOCKING)?;
            let at = p.open(&[p.g])?;
            let stream = capturing(p, RELAXED)?;
            p.record(out, stream)?;
            p.wait(other, out)?;
            ensure(p.capture_status(other)? == ACTIVE, "the other stream captures, too")?;
            p.set32(at, 1, 4, other)?;
            p.record(back, other)?;
            p.wait(stream, back)?;
            answer(p.end_capture(stream))
        }),
        row(
            "capture: another stream joins and does not come back",
            &[CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED],
            |p| {
                let out = p.event()?;
                let other = p.stream(NON_BLOCKING)?;
                let at = p.open(&[p.g])?;
                let stream = capturing(p, RELAXED)?;
                p.record(out, stream)?;
                p.wait(other, out)?;
                p.set32(at, 1, 4, other)?;
                answer(p.end_capture(stream))
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

/// An event that was recorded in a capture which is over.
fn left_over(p: &Probe<'_>) -> Result<CUevent, Trouble> {
    let (event, at) = (p.event()?, p.open(&[p.g])?);
    let stream = capturing(p, RELAXED)?;
    p.set32(at, 1, 4, stream)?;
    p.record(event, stream)?;
    p.end_capture(stream)?;
    Ok(event)
}

/// Undoes a registration, whatever captures.
fn unlock(p: &Probe<'_>, at: u64) -> Asked<()> {
    let before = p.exchange_mode(RELAXED)?;
    let undone = p.unregister(at);
    p.exchange_mode(before)?;
    undone
}

/// The code, once it is sure that the call did not invalidate the capture.
pub(super) fn unharmed(p: &Probe<'_>, stream: CUstream, code: Answer) -> Answer {
    let code = code?;
    if p.capture_status(stream)? != ACTIVE {
        return Err(Trouble::Fact(format!("{code}, and the capture is invalidated")));
    }
    ensure(answer(p.end_capture(stream))? == CUresult::CUDA_SUCCESS, "the capture ends well")?;
    Ok(code)
}

/// The code, once it is sure that the call invalidated the capture.
pub(super) fn harmed(p: &Probe<'_>, stream: CUstream, code: Answer) -> Answer {
    let code = code?;
    if p.capture_status(stream)? == ACTIVE {
        return Err(Trouble::Fact(format!("{code}, and the capture is still valid")));
    }
    Ok(code)
}

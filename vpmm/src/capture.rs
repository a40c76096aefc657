//! Captures: streams whose work becomes a graph, and what may not be done beside them.

use std::sync::atomic::{AtomicU64, Ordering};

use cuda_sys::types::*;

use crate::device::{Device, StreamHandle};
use crate::driver::{Driver, Failure};
use crate::error::{Error, Result};
use crate::event::Event;

/// Whether nothing can be enqueued on the stream now but as part of a graph. So it is with the legacy
/// stream while a blocking one captures, which forbids its use: the driver refuses to answer then.
pub(crate) fn stream_is_capturing(driver: &Driver, stream: StreamHandle) -> Result<bool, Failure> {
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: whoever made the handle vouches that its stream is alive; the pointer is live.
    match unsafe { driver.cuStreamIsCapturing(stream.raw(), &mut status) } {
        Ok(()) => Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE),
        Err(failure) if failure.code == CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT => Ok(true),
        Err(failure) => Err(failure),
    }
}

/// Whether a capture is known of that a wait for all of a device's work would end: one that a pool is open to, one of
/// any of the library's streams and those that are lent, or a blocking stream's, beside which the legacy stream is not
/// to be used. Of others only their streams can be asked. The device's context is current.
pub(crate) fn device_is_capturing(device: &Device) -> Result<bool, Failure> {
    Ok(device.driver().companion::<OpenCaptures>().are_any() || some_stream_captures(device)?)
}

/// Whether one of the streams that can be asked captures now.
fn some_stream_captures(device: &Device) -> Result<bool, Failure> {
    let driver = device.driver();
    let captures = |stream| stream_is_capturing(driver, stream);
    Ok(captures(StreamHandle::LEGACY)? || driver.any_living(device.context_id(), captures)?)
}

/// The wait for a device's context without which an end gives nothing back: refused, as by the driver, beside a
/// capture that can be seen, which then goes on. The context is current.
pub(crate) fn wait_at_end(device: &Device) -> Result<(), Failure> {
    if some_stream_captures(device).unwrap_or(false) {
        let code = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        return Err(Failure { call: "cuCtxSynchronize", code });
    }
    // SAFETY: no arguments.
    unsafe { device.driver().cuCtxSynchronize() }
}

/// Waits on the host for all of the current context's work: `false` where that is refused beside a capture, by the
/// driver, which ends the capture, or here, where a pool is open to one. Whoever asked what captures there are has
/// asked about many streams, and a capture may have begun meanwhile.
pub(crate) fn wait_for_context(driver: &Driver) -> Result<bool, Failure> {
    if driver.companion::<OpenCaptures>().are_any() {
        return Ok(false);
    }
    // SAFETY: no arguments.
    match unsafe { driver.cuCtxSynchronize() } {
        Ok(()) => Ok(true),
        Err(failure) if failure.code == CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED => {
            Ok(false)
        }
        Err(failure) => Err(failure),
    }
}

/// [`Device::synchronize`] where that ends no capture that can be seen; else, and where the driver knows of another
/// one, which is over then, [`Error::StreamCapturing`].
pub(crate) fn synchronize_beside_captures(device: &Device) -> Result<()> {
    let _context = device.enter()?;
    if some_stream_captures(device)? {
        return Err(Error::StreamCapturing);
    }
    match device.synchronize() {
        Err(Error::Driver { code: CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, .. }) => {
            Err(Error::StreamCapturing)
        }
        waited => waited,
    }
}

/// What came of a record.
pub(crate) enum Recorded {
    On(Event),
    /// Not recorded, or not where it counts; the event comes back.
    Capturing(Option<Event>),
}

/// Records an event, unless the stream is capturing.
pub(crate) fn record_beside_captures(
    driver: &Driver,
    stream: StreamHandle,
    spare: Option<Event>,
) -> Result<Recorded, Failure> {
    if stream_is_capturing(driver, stream)? {
        return Ok(Recorded::Capturing(spare));
    }
    let event = match spare {
        Some(event) => event,
        None => Event::new(driver)?,
    };
    match event.record(driver, stream) {
        // Another thread may have begun a capture just before the record, which is then part of it,
        // and to ask about it would end it. One that began just after does no harm but this.
        Ok(()) if stream_is_capturing(driver, stream).unwrap_or(true) => {
            Ok(Recorded::Capturing(Some(event)))
        }
        Ok(()) => Ok(Recorded::On(event)),
        Err(failure) => {
            if spare.is_none() {
                // SAFETY: made above and given to nobody.
                let _ = unsafe { event.destroy(driver) };
            }
            Err(failure)
        }
    }
}

/// Lets this thread make calls that another thread's global-mode capture forbids, and would be
/// invalidated by (a query of an event among them), until drop.
pub(crate) struct BesideCaptures<'a> {
    driver: &'a Driver,
    former: CUstreamCaptureMode,
}

impl<'a> BesideCaptures<'a> {
    pub(crate) fn enter(driver: &'a Driver) -> Result<Self, Failure> {
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the pointer is to a live mode, which is exchanged for the thread's former one.
        unsafe { driver.cuThreadExchangeStreamCaptureMode(&mut mode) }?;
        Ok(Self { driver, former: mode })
    }
}

impl Drop for BesideCaptures<'_> {
    fn drop(&mut self) {
        let mut mode = self.former;
        // SAFETY: as in `enter`, with the mode that the thread had.
        let _ = unsafe { self.driver.cuThreadExchangeStreamCaptureMode(&mut mode) };
    }
}

/// How many pools of a driver have a graph's pool open. A companion of the driver.
#[derive(Default)]
pub(crate) struct OpenCaptures(AtomicU64);

impl OpenCaptures {
    /// A pool has opened its first one, or closed its last.
    pub(crate) fn count(&self, opened: bool) {
        match opened {
            true => self.0.fetch_add(1, Ordering::Relaxed),
            false => self.0.fetch_sub(1, Ordering::Relaxed),
        };
    }

    /// Whether a stream may be capturing, or about to.
    pub(crate) fn are_any(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }
}

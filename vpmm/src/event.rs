//! Events: marks on streams.

use std::ptr;

use cuda_sys::types::*;

use crate::device::StreamHandle;
use crate::driver::{Driver, Failure};

/// An event by its handle. Whoever holds it destroys it, or keeps it for another record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Event(CUevent);

// SAFETY: an event handle is a token that any thread may pass to the driver.
unsafe impl Send for Event {}
// SAFETY: as above; nothing in the value changes.
unsafe impl Sync for Event {}

impl Event {
    /// Makes an event without timing in the current context: an eighth of the cost of one with.
    pub(crate) fn new(driver: &Driver) -> Result<Self, Failure> {
        Self::with_flags(driver, CUevent_flags_enum::CU_EVENT_DISABLE_TIMING)
    }

    /// Makes an event that notes the time in the current context.
    pub(crate) fn with_timing(driver: &Driver) -> Result<Self, Failure> {
        Self::with_flags(driver, CUevent_flags_enum::CU_EVENT_DEFAULT)
    }

    /// An event of somebody else's.
    pub(crate) fn foreign(event: CUevent) -> Self {
        Self(event)
    }

    /// The raw handle.
    pub(crate) fn handle(self) -> CUevent {
        self.0
    }

    fn with_flags(driver: &Driver, flags: CUevent_flags_enum) -> Result<Self, Failure> {
        let mut event: CUevent = ptr::null_mut();
        let flags = flags.0;
        // SAFETY: the pointer is to a live CUevent.
        unsafe { driver.cuEventCreate(&mut event, flags) }?;
        Ok(Self(event))
    }

    /// Marks the point that the stream has been given work up to.
    pub(crate) fn record(self, driver: &Driver, stream: StreamHandle) -> Result<(), Failure> {
        // SAFETY: the event is alive (events die with their pool); whoever made the stream handle
        // vouches that its stream is.
        unsafe { driver.cuEventRecord(self.0, stream.raw()) }
    }

    /// Makes later work of the stream wait for the event on the GPU; the host goes on.
    pub(crate) fn hold_back(self, driver: &Driver, stream: StreamHandle) -> Result<(), Failure> {
        // SAFETY: as in `record`; no flags.
        unsafe { driver.cuStreamWaitEvent(stream.raw(), self.0, 0) }
    }

    /// Whether the work before the mark has finished.
    pub(crate) fn is_complete(self, driver: &Driver) -> Result<bool, Failure> {
        // SAFETY: the event is alive.
        match unsafe { driver.cuEventQuery(self.0) } {
            Ok(()) => Ok(true),
            Err(failure) if failure.code == CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            Err(failure) => Err(failure),
        }
    }

    /// Waits on the host until the work before the mark has finished.
    pub(crate) fn wait(self, driver: &Driver) -> Result<(), Failure> {
        // SAFETY: the event is alive.
        unsafe { driver.cuEventSynchronize(self.0) }
    }

    /// Milliseconds on the device between two marks that have been passed.
    pub(crate) fn elapsed_since(self, earlier: Self, driver: &Driver) -> Result<f32, Failure> {
        let mut milliseconds = 0.0;
        // SAFETY: both events are alive; the pointer is to a live f32.
        unsafe { driver.cuEventElapsedTime(&mut milliseconds, earlier.0, self.0) }?;
        Ok(milliseconds)
    }

    /// # Safety
    /// Nobody uses the event after.
    pub(crate) unsafe fn destroy(self, driver: &Driver) -> Result<(), Failure> {
        // SAFETY: the caller vouches that this is the last use.
        unsafe { driver.cuEventDestroy_v2(self.0) }
    }
}

//! Events, owned and borrowed.

use std::fmt;
use std::time::Duration;

use cuda_sys::types::CUevent;

use super::Stream;
use crate::capture::BesideCaptures;
use crate::device::Device;
use crate::error::Result;
use crate::event::Event as Raw;

/// A mark on a stream that others can wait for: one that the library made, destroyed at drop, or a
/// borrowed one.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let sim = cuda_sim::Simulator::builder().build()?;
/// # let driver = vpmm::Driver::new(sim.driver())?;
/// # let device = driver.device(0)?;
/// let (one, other) = (device.stream()?, device.stream()?);
/// let event = vpmm::Event::new(&device)?;
/// event.record(&one)?;
/// other.wait_for(&event)?; // on the GPU
/// event.synchronize()?; // on the host
/// assert!(event.is_complete()?);
/// # Ok(())
/// # }
/// ```
pub struct Event {
    raw: Raw,
    device: Device,
    owned: bool,
}

impl Event {
    /// Makes an event without timing, which costs an eighth of one with.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver), [`Error::ContextLost`](crate::Error::ContextLost).
    pub fn new(device: &Device) -> Result<Self> {
        let _context = device.enter()?;
        Ok(Self { raw: Raw::new(device.driver())?, device: device.clone(), owned: true })
    }

    /// Makes an event that notes the time: see [`elapsed_since`](Self::elapsed_since).
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_timing(device: &Device) -> Result<Self> {
        let _context = device.enter()?;
        Ok(Self { raw: Raw::with_timing(device.driver())?, device: device.clone(), owned: true })
    }

    /// An event that somebody else owns (`CUevent`, `cudaEvent_t`: one type) and destroys.
    ///
    /// # Safety
    /// The event is of the device's primary context, and alive while this value is.
    pub unsafe fn borrowed(device: &Device, event: CUevent) -> Self {
        Self { raw: Raw::foreign(event), device: device.clone(), owned: false }
    }

    /// Marks the point that the stream has been given work up to; a mark made before counts no more.
    /// On a stream that captures it becomes a part of the graph. `cuEventRecord`.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver): `CUDA_ERROR_INVALID_HANDLE` for a stream of another device;
    /// [`Error::ContextLost`](crate::Error::ContextLost).
    pub fn record(&self, stream: &Stream) -> Result<()> {
        // The stream's, not the event's: it says whose default stream a handle is.
        let _context = stream.device().enter()?;
        Ok(self.raw.record(stream.device().driver(), stream.handle())?)
    }

    /// Whether the work before the mark has finished; so it is with an event that was never recorded.
    /// Harms no other thread's capture. `cuEventQuery`.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver), [`Error::ContextLost`](crate::Error::ContextLost).
    pub fn is_complete(&self) -> Result<bool> {
        let _context = self.device.enter()?;
        let driver = self.device.driver();
        let _beside = BesideCaptures::enter(driver)?;
        Ok(self.raw.is_complete(driver)?)
    }

    /// Waits on the host until the work before the mark has finished. `cuEventSynchronize`.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver), [`Error::ContextLost`](crate::Error::ContextLost).
    pub fn synchronize(&self) -> Result<()> {
        let _context = self.device.enter()?;
        let driver = self.device.driver();
        let _beside = BesideCaptures::enter(driver)?;
        Ok(self.raw.wait(driver)?)
    }

    /// The time on the device between two marks, to about half a microsecond. Both events
    /// [note the time](Self::with_timing), and both marks have been passed. `cuEventElapsedTime`.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver): `CUDA_ERROR_INVALID_HANDLE` for events without a time
    /// or never recorded, `CUDA_ERROR_NOT_READY` where work before one still runs.
    pub fn elapsed_since(&self, earlier: &Self) -> Result<Duration> {
        let _context = self.device.enter()?;
        let driver = self.device.driver();
        let _beside = BesideCaptures::enter(driver)?;
        let milliseconds = self.raw.elapsed_since(earlier.raw, driver)?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
    }

    /// The device that the event belongs to.
    pub fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn raw(&self) -> Raw {
        self.raw
    }

    /// The raw handle, alive while this value is.
    pub fn handle(&self) -> CUevent {
        self.raw.handle()
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.owned
            && let Ok(_context) = self.device.enter()
        {
            // SAFETY: made for this value, which nobody has any more. The driver keeps it for waits
            // that are enqueued.
            let _ = unsafe { self.raw.destroy(self.device.driver()) };
        }
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Event({:p})", self.raw.handle())
    }
}

//! Streams, owned and borrowed.

use std::fmt;
use std::ptr;
use std::sync::Arc;

use cuda_sys::types::{CUstream, CUstream_flags_enum, CUstreamCaptureStatus};

use super::Event;
use crate::device::{Device, StreamHandle};
use crate::driver::{Awaited, Failure};
use crate::error::{Error, Result};
use crate::event::BesideCaptures;

/// A stream with its device: one that the library made, or a borrowed one.
///
/// Cheap to clone. What [`Device::stream`] made is destroyed when the last clone is dropped, after
/// which its work still runs to its end; so whatever keeps a clone (a
/// [`DeviceBuffer`](crate::DeviceBuffer) does) has a stream that is alive.
#[derive(Clone)]
pub struct Stream {
    handle: StreamHandle,
    device: Device,
    /// Destroys the stream; nobody does where it is borrowed.
    owner: Option<Arc<Owner>>,
}

struct Owner {
    device: Device,
    handle: StreamHandle,
}

impl Drop for Owner {
    fn drop(&mut self) {
        let driver = self.device.driver();
        driver.tell_end_of(self.handle);
        // SAFETY: taken in `Stream::own`, destroyed once here. An error means that the context went
        // first and took the stream along.
        let _: Result<(), Failure> = unsafe { driver.cuStreamDestroy_v2(self.handle.raw()) };
    }
}

impl Stream {
    /// Takes a new stream of a device whose context is current.
    ///
    /// # Safety
    /// The stream is alive, and nobody else destroys it.
    unsafe fn own(device: &Device, stream: CUstream) -> Result<Self> {
        let bare = StreamHandle::foreign(stream);
        // From here on the stream is destroyed at drop, whatever comes next.
        let mut owner = Owner { device: device.clone(), handle: bare };
        let (mut id, driver) = (0, device.driver());
        // SAFETY: the stream is alive; the pointer is to a live u64.
        unsafe { driver.cuStreamGetId(stream, &mut id) }?;
        let handle = bare.with_number(id, driver.realm());
        owner.handle = handle;
        Ok(Self { handle, device: device.clone(), owner: Some(Arc::new(owner)) })
    }

    /// A stream of this device that somebody else owns: one of the CUDA runtime's or of another
    /// library's ([`StreamHandle::from_raw`]), which is not destroyed here.
    ///
    /// # Safety
    /// The stream is of the device's primary context, and alive while this value or a clone of it is.
    pub unsafe fn borrowed(device: &Device, handle: StreamHandle) -> Self {
        Self { handle, device: device.clone(), owner: None }
    }

    /// The legacy default stream of a device: [`StreamHandle::LEGACY`].
    pub fn legacy(device: &Device) -> Self {
        Self { handle: StreamHandle::LEGACY, device: device.clone(), owner: None }
    }

    /// The default stream of whichever thread calls: [`StreamHandle::PER_THREAD`].
    pub fn per_thread(device: &Device) -> Self {
        Self { handle: StreamHandle::PER_THREAD, device: device.clone(), owner: None }
    }

    /// The handle, valid while this stream lives.
    #[inline]
    pub fn handle(&self) -> StreamHandle {
        self.handle
    }

    /// The device that the stream belongs to.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Whether the library made the stream, and destroys it.
    pub fn is_owned(&self) -> bool {
        self.owner.is_some()
    }

    /// Waits until everything enqueued so far has finished. What was freed on the stream before is
    /// then everybody's in every pool of this driver. Other streams' captures are not harmed.
    /// `cuStreamSynchronize`.
    ///
    /// # Errors
    /// [`Error::Driver`], [`Error::ContextLost`].
    pub fn synchronize(&self) -> Result<()> {
        let _context = self.device.enter()?;
        let _beside = BesideCaptures::enter(self.device.driver())?;
        self.device.driver().tell_wait_for(Awaited::Stream(self.handle), || {
            // SAFETY: the stream is alive while `self` is.
            unsafe { self.device.driver().cuStreamSynchronize(self.handle.raw()) }
        })
    }

    /// Makes what is enqueued here later wait for an event on the GPU; the host goes on. An event
    /// that was never recorded holds nothing back. `cuStreamWaitEvent`.
    ///
    /// # Errors
    /// [`Error::Driver`], [`Error::ContextLost`].
    pub fn wait_for(&self, event: &Event) -> Result<()> {
        let _context = self.device.enter()?;
        Ok(event.raw().hold_back(self.device.driver(), self.handle)?)
    }

    /// Makes what is enqueued here later wait for everything that is enqueued on another stream now:
    /// an event, recorded there and waited for here. Nothing for the stream itself.
    ///
    /// # Errors
    /// [`Error::StreamCapturing`] where either captures a graph, which is then as it was;
    /// [`Error::Driver`], [`Error::ContextLost`].
    pub fn wait_for_stream(&self, other: &Self) -> Result<()> {
        if self.is_the_same_as(other) {
            return Ok(());
        }
        if self.is_capturing()? || other.is_capturing()? {
            return Err(Error::StreamCapturing);
        }
        let event = Event::new(&other.device)?;
        event.record(other)?;
        self.wait_for(&event)
    }

    /// Whether a graph is captured from the stream. Harms no capture. `cuStreamIsCapturing`.
    ///
    /// # Errors
    /// [`Error::Driver`]; for the legacy stream `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT` while any
    /// blocking stream captures.
    pub fn is_capturing(&self) -> Result<bool> {
        let _context = self.device.enter()?;
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let driver = self.device.driver();
        // SAFETY: the stream is alive while `self` is; the pointer is to a live status.
        unsafe { driver.cuStreamIsCapturing(self.handle.raw(), &mut status) }?;
        Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// Whether the two are one stream: an alias that means different streams to different threads is
    /// the same only to one thread.
    fn is_the_same_as(&self, other: &Self) -> bool {
        self.handle == other.handle && self.device.ordinal() == other.device.ordinal()
    }
}

impl Device {
    /// Makes a stream that does not wait for the legacy default stream (`CU_STREAM_NON_BLOCKING`).
    ///
    /// # Errors
    /// [`Error::Driver`], [`Error::ContextLost`].
    pub fn stream(&self) -> Result<Stream> {
        let _context = self.enter()?;
        let flags = CUstream_flags_enum::CU_STREAM_NON_BLOCKING.0;
        let mut stream: CUstream = ptr::null_mut();
        // SAFETY: the pointer is to a live CUstream, and the context is current.
        unsafe { self.driver().cuStreamCreate(&mut stream, flags) }?;
        // SAFETY: it was made just now, and nobody else has it.
        unsafe { Stream::own(self, stream) }
    }
}

impl From<&Stream> for StreamHandle {
    #[inline]
    fn from(stream: &Stream) -> Self {
        stream.handle
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.handle, f)
    }
}

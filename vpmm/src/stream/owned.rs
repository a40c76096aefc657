//! Streams, owned and borrowed.

use std::fmt;
use std::ptr;
use std::sync::Arc;

use cuda_sys::types::{CUstream, CUstream_flags_enum};

use super::Event;
use super::owner::{self, Owner};
use crate::capture::{BesideCaptures, stream_is_capturing};
use crate::device::{Device, StreamHandle};
use crate::driver::Awaited;
use crate::error::{Error, Result};

/// A stream with its device: one that the library made, or a borrowed one.
///
/// Cheap to clone. What [`Device::stream`] made is destroyed when the last clone is dropped, after
/// which its work still runs to its end; so whatever keeps a clone (a
/// [`DeviceBuffer`](crate::DeviceBuffer) does) has a stream that is alive.
#[derive(Clone)]
pub struct Stream {
    handle: StreamHandle,
    device: Device,
    /// Tells the stream's end; none for the default streams, which do not end, or of which nobody can
    /// tell.
    owner: Option<Arc<Owner>>,
}

impl Stream {
    fn of(device: &Device, owner: Arc<Owner>) -> Self {
        Self { handle: owner.handle(), device: device.clone(), owner: Some(owner) }
    }

    /// A stream of this device that somebody else owns, one of the CUDA runtime's or of another
    /// library's ([`StreamHandle::from_raw`]), and destroys. To pools it is as one that the library
    /// made: they serve it without a driver call, and no event is recorded at its frees, since the
    /// last drop of this value and its clones tells them in time that it may end. All values that borrow
    /// one stream, in any thread, count as clones; one that borrows a stream of the library's own keeps
    /// that alive, too.
    ///
    /// # Errors
    /// [`Error::StreamCapturing`], with the capture as it was: the question for a stream's number would
    /// end it. [`Error::StreamEnded`] in a function below a caching allocator that is given the stream, which ends as
    /// soon as that is over. [`Error::WrongDevice`], [`Error::WrongContext`], [`Error::Driver`],
    /// [`Error::ContextLost`].
    ///
    /// # Safety
    /// The stream is alive while this value or a clone of it is. Their last drop counts as the stream's
    /// end: at that moment no other thread is in a call with the stream by its bare handle, since what it
    /// frees could be taken for work before the end.
    pub unsafe fn borrowed(device: &Device, handle: StreamHandle) -> Result<Self> {
        if handle == StreamHandle::LEGACY {
            return Ok(Self::legacy(device));
        }
        if handle == StreamHandle::PER_THREAD {
            return Ok(Self::per_thread(device));
        }
        let _context = device.enter()?;
        // That it lives is the caller's word, though it may be the handle of a former loan, which has ended.
        let handle = StreamHandle::foreign(handle.raw());
        let bare = Self { handle, device: device.clone(), owner: None };
        if bare.is_capturing()? {
            return Err(Error::StreamCapturing);
        }
        device.check_stream(handle)?;
        // SAFETY: the stream is alive, by the caller, of this device, and does not capture.
        let owner = unsafe { owner::borrow(device, handle) }?;
        Ok(Self::of(device, owner))
    }

    /// A stream of this device that somebody else owns, and that may end at any time after this value's
    /// last use: to pools it is as its bare handle, so each call asks the driver which stream it is, and
    /// each free records an event. For [`borrowed`](Self::borrowed) where nobody can say how long the
    /// stream lasts.
    ///
    /// # Safety
    /// The stream is of the device's primary context, and alive whenever this value or a clone is used.
    pub unsafe fn passing(device: &Device, handle: StreamHandle) -> Self {
        let handle = StreamHandle::foreign(handle.raw());
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

    /// The handle, valid while this stream lives. It does not keep the stream alive: pools and resources answer
    /// [`Error::StreamEnded`] to one that has outlived it, but not while another thread just drops the last
    /// value.
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
        self.owner.as_ref().is_some_and(|owner| owner.destroys())
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
        let awaited = Awaited::Stream(self.numbered(), self.device.ordinal());
        self.device.driver().tell_wait_for(awaited, || {
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

    /// Whether a graph is captured from the stream, so that what is enqueued on it does not run now. Harms
    /// no capture. `cuStreamIsCapturing`.
    ///
    /// So it is with the legacy stream, too, while any blocking stream captures: it is not captured itself,
    /// but whatever is enqueued on it would have to wait for the one that is, and so the driver refuses it,
    /// and ends the capture. It refuses this very question then
    /// (`CUDA_ERROR_STREAM_CAPTURE_IMPLICIT`, which ends no capture): the answer is yes.
    ///
    /// # Errors
    /// [`Error::Driver`], [`Error::ContextLost`].
    pub fn is_capturing(&self) -> Result<bool> {
        let _context = self.device.enter()?;
        Ok(stream_is_capturing(self.device.driver(), self.handle)?)
    }

    /// The handle with the number that pools know the stream by, also where nobody tells its end. The context is
    /// current. Without one where it cannot be had: while the stream captures the question would end that.
    fn numbered(&self) -> StreamHandle {
        if self.owner.is_some() || self.handle == StreamHandle::LEGACY {
            return self.handle;
        }
        let driver = self.device.driver();
        let Ok(false) = stream_is_capturing(driver, self.handle) else { return self.handle };
        // SAFETY: the stream is alive while `self` is, of the device whose context is current.
        let number = unsafe { owner::number_of(&self.device, self.handle) };
        number.map_or(self.handle, |number| self.handle.with_number(number, driver.realm()))
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
        // SAFETY: it was made just now, in the context that is current, and nobody else has it.
        let owner = unsafe { owner::own(self, StreamHandle::foreign(stream)) }?;
        Ok(Stream::of(self, owner))
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

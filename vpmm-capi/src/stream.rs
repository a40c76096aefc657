//! Streams by their raw handles, and whose end is told.

use std::ffi::c_void;
use std::sync::PoisonError;

use vpmm_core::{Device, Stream, StreamHandle};

use crate::driver::{Loaded, vpmm_driver};
use crate::guard::{Failure, given, guard, make};
use crate::status::vpmm_status;

impl Loaded {
    /// A raw handle as pools take it: with the stream's number where its end will be told.
    ///
    /// # Safety
    /// The stream is alive while the handle is used.
    pub(crate) unsafe fn stream(&self, raw: *mut c_void) -> StreamHandle {
        let streams = self.streams.read().unwrap_or_else(PoisonError::into_inner);
        match streams.get(&raw.addr()) {
            Some(stream) => stream.handle(),
            // SAFETY: the caller vouches for it.
            None => unsafe { StreamHandle::from_raw(raw.cast()) },
        }
    }

    fn lent(&self, raw: *mut c_void) -> Option<Stream> {
        let streams = self.streams.read().unwrap_or_else(PoisonError::into_inner);
        streams.get(&raw.addr()).cloned()
    }

    fn keep(&self, stream: Stream) -> *mut c_void {
        let raw: *mut c_void = stream.handle().raw().cast();
        let mut streams = self.streams.write().unwrap_or_else(PoisonError::into_inner);
        let former = streams.insert(raw.addr(), stream);
        drop(streams);
        drop(former);
        raw
    }

    fn take(&self, raw: *mut c_void) -> Result<Stream, Failure> {
        let mut streams = self.streams.write().unwrap_or_else(PoisonError::into_inner);
        let text = "the stream was neither made nor lent here";
        let unknown = || Failure::new(vpmm_status::VPMM_INVALID_ARGUMENT, text);
        streams.remove(&raw.addr()).ok_or_else(unknown)
    }

    fn open(&self, device: u32) -> Result<Device, Failure> {
        self.device(device)
    }
}

/// Makes a stream on a device, which does not wait for the default stream. `out` is a `CUstream`, which
/// is a `cudaStream_t`.
///
/// # Safety
/// `driver` is null or a handle; `out` is null or has room for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_stream_create(
    driver: *const vpmm_driver,
    device: u32,
    out: *mut *mut c_void,
) -> vpmm_status {
    let work = || {
        // SAFETY: the caller vouches for it.
        let loaded = &unsafe { given(driver, "driver") }?.0;
        let raw = loaded.keep(loaded.open(device)?.stream()?);
        Ok(raw)
    };
    // SAFETY: the caller vouches for it.
    unsafe { make(out, work) }
}

/// Destroys a stream that `vpmm_stream_create` made. Its work still runs to its end.
///
/// # Safety
/// `driver` is null or a handle; the stream is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_stream_destroy(
    driver: *const vpmm_driver,
    stream: *mut c_void,
) -> vpmm_status {
    guard(|| {
        // SAFETY: the caller vouches for it.
        let loaded = &unsafe { given(driver, "driver") }?.0;
        loaded.take(stream).map(drop)
    })
}

/// Tells of a stream that was made elsewhere and will not end before `vpmm_stream_take_back`. Pools
/// then serve it without a driver call, and record nothing at its frees; without this a pool asks about
/// the stream at each call, and records an event at each free, since it may end at any time.
///
/// Not for a stream that captures (`VPMM_BAD_STREAM`). For the default streams nothing is done.
///
/// # Safety
/// `driver` is null or a handle; the stream is alive, and of the device's primary context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_stream_lend(
    driver: *const vpmm_driver,
    device: u32,
    stream: *mut c_void,
) -> vpmm_status {
    guard(|| {
        // SAFETY: the caller vouches for it.
        let loaded = &unsafe { given(driver, "driver") }?.0;
        let device = loaded.open(device)?;
        // SAFETY: the caller vouches for it.
        let handle = unsafe { StreamHandle::from_raw(stream.cast()) };
        // Lent twice it stays lent. Of two threads that find it is not, both may lend it: their values are of
        // one owner, so that the one which takes the other's place tells no end.
        let lent = loaded.lent(stream).is_some();
        if !lent && handle != StreamHandle::LEGACY && handle != StreamHandle::PER_THREAD {
            // SAFETY: the caller vouches for it.
            loaded.keep(unsafe { Stream::borrowed(&device, handle) }?);
        }
        Ok(())
    })
}

/// Tells pools that a stream that was lent may end from here on.
///
/// # Safety
/// `driver` is null or a handle; the stream is alive, and no other thread is in a call with it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_stream_take_back(
    driver: *const vpmm_driver,
    stream: *mut c_void,
) -> vpmm_status {
    // SAFETY: the caller vouches for it.
    unsafe { vpmm_stream_destroy(driver, stream) }
}

/// Waits on the host for everything enqueued so far on a stream that was made or lent here, or on a
/// default one; what was freed there before is then
/// everybody's.
///
/// # Safety
/// `driver` is null or a handle; the stream is alive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_stream_synchronize(
    driver: *const vpmm_driver,
    device: u32,
    stream: *mut c_void,
) -> vpmm_status {
    guard(|| {
        // SAFETY: the caller vouches for it.
        let loaded = &unsafe { given(driver, "driver") }?.0;
        if let Some(known) = loaded.lent(stream) {
            return Ok(known.synchronize()?);
        }
        let device = loaded.open(device)?;
        // SAFETY: the caller vouches for it.
        let handle = unsafe { StreamHandle::from_raw(stream.cast()) };
        if handle == StreamHandle::LEGACY {
            return Ok(Stream::legacy(&device).synchronize()?);
        }
        if handle == StreamHandle::PER_THREAD {
            return Ok(Stream::per_thread(&device).synchronize()?);
        }
        let text = "the stream was neither made nor lent here";
        Err(Failure::new(vpmm_status::VPMM_INVALID_ARGUMENT, text))
    })
}

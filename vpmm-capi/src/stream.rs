//! Streams by their raw handles, and whose end is told.

use std::ffi::c_void;

use vpmm_core::{Device, Stream, StreamHandle};

use crate::driver::{Loaded, vpmm_driver};
use crate::guard::{Failure, given, guard, make};
use crate::status::vpmm_status;

impl Loaded {
    /// A raw handle as pools take it.
    ///
    /// # Safety
    /// The stream is alive while the handle is used.
    #[inline]
    pub(crate) unsafe fn stream(&self, raw: *mut c_void) -> StreamHandle {
        // SAFETY: the caller vouches for it.
        unsafe { self.streams.handle(raw) }
    }

    /// Takes out a stream that was made here, or one that was lent; nothing where one is taken back that was
    /// made here.
    fn take(&self, raw: *mut c_void, made: bool) -> Result<Option<Stream>, Failure> {
        self.check_process()?;
        let refused = |text| Err(Failure::new(vpmm_status::VPMM_INVALID_ARGUMENT, text));
        self.streams.change(|streams| {
            match (streams.get(&raw.addr()).map(Stream::is_owned), made) {
                (Some(true), true) | (Some(false), false) => Ok(streams.remove(&raw.addr())),
                (Some(true), false) => Ok(None),
                (Some(false), true) => {
                    refused("the stream was lent: only who made it can destroy it")
                }
                (None, _) => refused("the stream was neither made nor lent here"),
            }
        })
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
        let raw = loaded.streams.keep(loaded.open(device)?.stream()?);
        Ok(raw)
    };
    // SAFETY: the caller vouches for it.
    unsafe { make(out, work) }
}

/// Destroys a stream that `vpmm_stream_create` made, and no other. Its work still runs to its end.
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
        loaded.take(stream, true).map(drop)
    })
}

/// Tells of a stream that was made elsewhere and will not end before `vpmm_stream_take_back`. Pools
/// then serve it without a driver call, and record nothing at its frees; without this a pool asks about
/// the stream at each call, and records an event at each free, since it may end at any time.
///
/// Not for a stream that captures (`VPMM_BAD_STREAM`). For the default streams and for what
/// `vpmm_stream_create` made nothing is done.
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
        let lent = loaded.streams.get(stream).is_some();
        if !lent && handle != StreamHandle::LEGACY && handle != StreamHandle::PER_THREAD {
            // SAFETY: the caller vouches for it.
            loaded.streams.keep(unsafe { Stream::borrowed(&device, handle) }?);
        }
        Ok(())
    })
}

/// Tells pools that a stream that was lent may end from here on. For the default streams and for what
/// `vpmm_stream_create` made, whose end is told anyway, nothing is done.
///
/// # Safety
/// `driver` is null or a handle; the stream is alive, and no other thread is in a call with it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_stream_take_back(
    driver: *const vpmm_driver,
    stream: *mut c_void,
) -> vpmm_status {
    guard(|| {
        // SAFETY: the caller vouches for it.
        let loaded = &unsafe { given(driver, "driver") }?.0;
        // SAFETY: the caller vouches for it.
        let handle = unsafe { StreamHandle::from_raw(stream.cast()) };
        if handle == StreamHandle::LEGACY || handle == StreamHandle::PER_THREAD {
            return Ok(());
        }
        loaded.take(stream, false).map(drop)
    })
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
        loaded.check_process()?;
        if let Some(known) = loaded.streams.get(stream) {
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

#[cfg(test)]
mod tests {
    use std::ptr;

    use cuda_sys::types::{CUresult, CUstream, CUstream_flags_enum};

    use super::*;

    fn made_by(driver: &vpmm_driver) -> *mut c_void {
        let mut stream = ptr::null_mut();
        // SAFETY: a live driver, room for a pointer.
        let status = unsafe { vpmm_stream_create(driver, 0, &raw mut stream) };
        assert_eq!(status, vpmm_status::VPMM_OK);
        stream
    }

    /// A stream that the library did not make.
    fn made_elsewhere(loaded: &Loaded) -> CUstream {
        let (mut context, mut stream) = (ptr::null_mut(), ptr::null_mut());
        let retain = loaded.raw().cuDevicePrimaryCtxRetain.unwrap();
        let enter = loaded.raw().cuCtxSetCurrent.unwrap();
        let create = loaded.raw().cuStreamCreate.unwrap();
        // SAFETY: room for a context, and a device that there is.
        let retained = unsafe { retain(&raw mut context, 0) };
        // SAFETY: the context is retained, and not given back in this process.
        let entered = unsafe { enter(context) };
        let flags = CUstream_flags_enum::CU_STREAM_NON_BLOCKING.0;
        // SAFETY: room for a stream, in the current context.
        let created = unsafe { create(&raw mut stream, flags) };
        assert_eq!([retained, entered, created], [CUresult::CUDA_SUCCESS; 3]);
        stream
    }

    /// Whoever lends every stream that it is given, and takes it back, may be given one that was made here.
    #[test]
    fn what_was_made_is_not_destroyed_when_it_is_taken_back() {
        let driver = vpmm_driver(Loaded::load(Some("sim")).ok().unwrap());
        let stream = made_by(&driver);
        // SAFETY: a live driver and stream, not used again once it is destroyed.
        let calls = unsafe {
            [
                vpmm_stream_lend(&driver, 0, stream),
                vpmm_stream_take_back(&driver, stream),
                vpmm_stream_synchronize(&driver, 0, stream),
                vpmm_stream_destroy(&driver, stream),
            ]
        };
        assert_eq!(calls, [vpmm_status::VPMM_OK; 4]);
        // SAFETY: a live driver; of the stream the handle is looked up only.
        let again = unsafe { vpmm_stream_take_back(&driver, stream) };
        assert_eq!(again, vpmm_status::VPMM_INVALID_ARGUMENT);
    }

    #[test]
    fn for_default_streams_nothing_is_done() {
        let driver = vpmm_driver(Loaded::load(Some("sim")).ok().unwrap());
        for number in 0..3 {
            let stream = ptr::without_provenance_mut(number);
            // SAFETY: a live driver, and default streams, which do not end.
            let calls = unsafe {
                [vpmm_stream_lend(&driver, 0, stream), vpmm_stream_take_back(&driver, stream)]
            };
            assert_eq!(calls, [vpmm_status::VPMM_OK; 2], "{number}");
        }
    }

    /// It would not be destroyed, and nobody would hear of that.
    #[test]
    fn what_was_lent_is_not_destroyed_here() {
        let driver = vpmm_driver(Loaded::load(Some("sim")).ok().unwrap());
        let stream: *mut c_void = made_elsewhere(&driver.0).cast();
        // SAFETY: a live driver and stream.
        let calls = unsafe {
            [
                vpmm_stream_lend(&driver, 0, stream),
                vpmm_stream_destroy(&driver, stream),
                vpmm_stream_synchronize(&driver, 0, stream),
                vpmm_stream_take_back(&driver, stream),
                vpmm_stream_synchronize(&driver, 0, stream),
            ]
        };
        let unknown = vpmm_status::VPMM_INVALID_ARGUMENT;
        let ok = vpmm_status::VPMM_OK;
        assert_eq!(calls, [ok, unknown, ok, ok, unknown]);
        let destroy = driver.0.raw().cuStreamDestroy_v2.unwrap();
        // SAFETY: the stream is not used again.
        assert_eq!(unsafe { destroy(stream.cast()) }, CUresult::CUDA_SUCCESS);
    }
}

//! Copies and fills on the process's streams, and their order.

use std::ffi::c_void;

use vpmm_core::{DevicePtr, Stream, StreamHandle};

use super::{pool, streams};
use crate::guard::{Failure, guard};
use crate::status::vpmm_status;

fn address(pointer: *mut c_void) -> DevicePtr {
    DevicePtr::from_address(pointer.addr() as u64)
}

/// A stream as a value.
///
/// # Safety
/// The stream is of the device, and alive while the value is used.
unsafe fn stream(device: u32, raw: *mut c_void) -> Result<Stream, Failure> {
    let device = pool(device)?.device();
    Ok(streams::known(device, raw).unwrap_or_else(|| {
        // SAFETY: the caller vouches for it.
        unsafe { Stream::passing(device, StreamHandle::from_raw(raw.cast())) }
    }))
}

/// Copies from the host to a device, and waits for it.
///
/// # Safety
/// Both have so many bytes; the stream is of the device, and alive; who else uses the device's memory is
/// ordered before or after.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_process_upload(
    device: u32,
    to: *mut c_void,
    from: *const c_void,
    bytes: usize,
    on: *mut c_void,
) -> vpmm_status {
    guard(|| {
        // SAFETY: the caller vouches for it.
        let stream = unsafe { stream(device, on) }?;
        // SAFETY: the caller vouches for the bytes, which are there until the copy was waited for.
        unsafe { stream.upload(address(to), from.cast(), bytes) }?;
        Ok(stream.synchronize()?)
    })
}

/// Copies from a device to the host, and waits for it.
///
/// # Safety
/// As `vpmm_process_upload`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_process_download(
    device: u32,
    to: *mut c_void,
    from: *mut c_void,
    bytes: usize,
    on: *mut c_void,
) -> vpmm_status {
    guard(|| {
        // SAFETY: the caller vouches for it.
        let stream = unsafe { stream(device, on) }?;
        // SAFETY: as in `vpmm_process_upload`.
        unsafe { stream.download(to.cast(), address(from), bytes) }?;
        Ok(stream.synchronize()?)
    })
}

/// Copies on a device; returns at once.
///
/// # Safety
/// As `vpmm_process_upload`; both are there until the copy is done, and do not overlap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_process_copy(
    device: u32,
    to: *mut c_void,
    from: *mut c_void,
    bytes: usize,
    on: *mut c_void,
) -> vpmm_status {
    guard(|| {
        // SAFETY: the caller vouches for it.
        let stream = unsafe { stream(device, on) }?;
        // SAFETY: the caller vouches for it.
        Ok(unsafe { stream.copy(address(to), address(from), bytes) }?)
    })
}

/// Sets bytes on a device; returns at once.
///
/// # Safety
/// As `vpmm_process_upload`; the memory is there until it is filled.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_process_fill(
    device: u32,
    to: *mut c_void,
    value: u8,
    bytes: usize,
    on: *mut c_void,
) -> vpmm_status {
    guard(|| {
        // SAFETY: the caller vouches for it.
        let stream = unsafe { stream(device, on) }?;
        // SAFETY: the caller vouches for it.
        Ok(unsafe { stream.fill(address(to), value, bytes) }?)
    })
}

/// Has what is enqueued on a stream later wait, on the GPU, for what is enqueued on another now.
///
/// # Safety
/// Both streams are of the device, and alive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_process_wait_for(
    device: u32,
    waiting: *mut c_void,
    other: *mut c_void,
) -> vpmm_status {
    guard(|| {
        // SAFETY: the caller vouches for it.
        let (waiting, other) = unsafe { (stream(device, waiting)?, stream(device, other)?) };
        Ok(waiting.wait_for_stream(&other)?)
    })
}

/// Waits on the host for everything enqueued so far on a stream; what was freed there before is then
/// everybody's.
///
/// # Safety
/// The stream is of the device, and alive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_process_synchronize(device: u32, on: *mut c_void) -> vpmm_status {
    // SAFETY: the caller vouches for it.
    guard(|| Ok(unsafe { stream(device, on) }?.synchronize()?))
}

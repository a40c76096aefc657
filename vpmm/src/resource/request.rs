//! Checks of sizes and alignments that most resources share.

#![forbid(unsafe_code)]

use super::memory_resource::MemoryResource;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::units::{DevicePtr, round_up};

/// What every resource aligns to at least, in bytes: what the driver's own allocations are aligned to.
pub const MIN_ALIGN: usize = 256;

/// Fails unless an alignment is a power of two of at most `most` bytes.
#[inline]
pub(crate) fn check_align(align: usize, most: usize) -> Result<()> {
    if !align.is_power_of_two() {
        return Err(Error::BadAlignment { align });
    }
    if align > most { Err(Error::AlignmentUnsupported { align, most }) } else { Ok(()) }
}

/// `bytes` in whole units of [`MIN_ALIGN`].
#[inline]
pub(super) fn rounded(bytes: usize) -> Result<u64> {
    let (bytes, unit) = (bytes as u64, MIN_ALIGN as u64);
    round_up(bytes, unit).ok_or(Error::SizeOverflow { bytes, unit_bytes: unit })
}

/// Whether a free is of nothing: of what a request of 0 bytes gave.
///
/// # Errors
/// Where exactly one of the two is zero.
#[inline]
pub(crate) fn is_of_nothing(ptr: DevicePtr, bytes: usize) -> Result<bool> {
    match (ptr.is_null(), bytes) {
        (true, 0) => Ok(true),
        (true, _) => Err(Error::ForeignPointer { address: 0 }),
        (false, 0) => Err(Error::ZeroSize),
        (false, _) => Ok(false),
    }
}

/// Refuses a resource to stand on that takes the streams of another device: it would be given those of this one.
pub(crate) fn check_device<R: MemoryResource + ?Sized>(below: &R, device: &Device) -> Result<()> {
    let of_below = below.device().map_or(device.ordinal(), Device::ordinal);
    if of_below == device.ordinal() {
        return Ok(());
    }
    Err(Error::WrongDevice { stream_device: device.ordinal(), pool_device: of_below })
}

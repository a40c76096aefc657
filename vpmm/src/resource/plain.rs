//! Memory that the driver gives and takes back at once, whatever the stream.

use super::request::{MIN_ALIGN, check_align, is_of_nothing, rounded};
use crate::capture::BesideCaptures;
use crate::device::Device;
use crate::driver::{Driver, Failure};
use crate::error::Result;
use crate::units::DevicePtr;

/// Allocates by a call that is given the rounded size and answers an address. Its context is current, and it
/// harms no capture. `None` for no bytes.
pub(super) fn allocate(
    device: &Device,
    bytes: usize,
    align: usize,
    call: impl FnOnce(&Driver, usize) -> Result<u64, Failure>,
) -> Result<Option<u64>> {
    check_align(align, MIN_ALIGN)?;
    if bytes == 0 {
        return Ok(None);
    }
    let rounded = rounded(bytes)?;
    let _context = device.enter()?;
    let driver = device.driver();
    let _beside = BesideCaptures::enter(driver)?;
    let address = call(driver, rounded as usize).map_err(|failure| failure.about(bytes as u64))?;
    Ok(Some(address))
}

/// Frees by a call like [`allocate`]'s; nothing for null.
pub(super) fn deallocate(
    device: &Device,
    ptr: DevicePtr,
    bytes: usize,
    call: impl FnOnce(&Driver) -> Result<()>,
) -> Result<()> {
    if is_of_nothing(ptr, bytes)? {
        return Ok(());
    }
    let _context = device.enter()?;
    let driver = device.driver();
    let _beside = BesideCaptures::enter(driver)?;
    call(driver)
}

/// Frees by `cuMemFree`, which waits for the device that the memory was made with.
pub(super) fn free(device: &Device, ptr: DevicePtr, bytes: usize) -> Result<()> {
    deallocate(device, ptr, bytes, |driver| {
        // SAFETY: the address is the caller's to free, which the driver checks; it waits for what its device does with
        // the memory, and what others do has finished.
        unsafe { driver.cuMemFree_v2(ptr.address()) }.map_err(|failure| failure.about(bytes as u64))
    })
}

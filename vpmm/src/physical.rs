//! Extents: physical memory by handle, without addresses.

use cuda_sys::types::{CUmemAllocationProp, CUmemGenericAllocationHandle};

use crate::driver::{Driver, Failure};

/// A physical handle that nobody releases by itself: whoever holds it does.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub(crate) struct Extent(pub(crate) CUmemGenericAllocationHandle);

/// Makes physical memory. Its cost hardly follows the bytes.
pub(crate) fn create(
    driver: &Driver,
    bytes: u64,
    properties: &CUmemAllocationProp,
) -> Result<Extent, Failure> {
    let mut handle = 0;
    // SAFETY: both pointers are to live values of the right types; flags must be 0.
    unsafe { driver.cuMemCreate(&mut handle, bytes as usize, properties, 0) }?;
    Ok(Extent(handle))
}

/// Gives a handle up: its memory goes back to the device when no mapping is left.
///
/// # Safety
/// It came from [`create`], and nobody else maps or gives it up.
pub(crate) unsafe fn release(driver: &Driver, extent: Extent) -> Result<(), Failure> {
    // SAFETY: a live handle, by the caller's word.
    unsafe { driver.cuMemRelease(extent.0) }
}

/// Gives handles up: the memory of each goes back to the device when no mapping is left. A handle
/// that the driver will not take back goes to `orphans`, to be given up again later.
///
/// # Safety
/// The handles came from [`create`], and nobody else maps or gives up any of them.
pub(crate) unsafe fn release_all(
    driver: &Driver,
    extents: impl IntoIterator<Item = Extent>,
    orphans: &mut Vec<Extent>,
) {
    for extent in extents {
        // SAFETY: passed on to the caller; one that was released is forgotten here.
        if unsafe { release(driver, extent) }.is_err() {
            orphans.push(extent);
        }
    }
}

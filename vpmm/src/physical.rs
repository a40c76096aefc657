//! Extents: physical memory by handle, without addresses.

use cuda_sys::types::{CUmemAllocationProp, CUmemGenericAllocationHandle};

use crate::driver::{Driver, Failure};

/// A physical handle that nobody releases by itself: whoever holds it does.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub(crate) struct Extent(pub(crate) CUmemGenericAllocationHandle);

/// Makes physical memory. About 8 µs for 2 MiB and 21 µs for 1 GiB on an H200.
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

/// Gives a handle up. The memory goes back to the device when no mapping is left.
///
/// # Safety
/// The handle came from [`create`] and is given up once; nobody maps it after.
pub(crate) unsafe fn release(driver: &Driver, extent: Extent) -> Result<(), Failure> {
    // SAFETY: passed on to the caller.
    unsafe { driver.cuMemRelease(extent.0) }
}

/// Extents on their way into a pool: released at drop unless they are taken.
pub(crate) struct NewExtents<'a> {
    driver: &'a Driver,
    extents: Vec<Extent>,
}

impl<'a> NewExtents<'a> {
    pub(crate) fn new(driver: &'a Driver) -> Self {
        Self { driver, extents: Vec::new() }
    }

    pub(crate) fn create(
        &mut self,
        bytes: u64,
        properties: &CUmemAllocationProp,
    ) -> Result<(), Failure> {
        self.extents.push(create(self.driver, bytes, properties)?);
        Ok(())
    }

    pub(crate) fn as_slice(&self) -> &[Extent] {
        &self.extents
    }

    /// Hands the extents over: from now on the taker releases them.
    pub(crate) fn take(&mut self) -> Vec<Extent> {
        std::mem::take(&mut self.extents)
    }
}

impl Drop for NewExtents<'_> {
    fn drop(&mut self) {
        for extent in self.extents.drain(..) {
            // SAFETY: created here, not taken, given up once. What cannot be released is lost to
            // the driver; there is nobody to tell in a drop.
            let _ = unsafe { release(self.driver, extent) };
        }
    }
}

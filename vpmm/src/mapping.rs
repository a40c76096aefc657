//! Mappings: extents put at addresses.

use cuda_sys::types::CUmemAccessDesc;

use crate::driver::{Driver, Failure};
use crate::physical::Extent;

/// Mappings being made, upwards from an address in a hole: unmapped at drop unless kept.
pub(crate) struct NewMappings<'a> {
    driver: &'a Driver,
    start: u64,
    bytes: u64,
}

impl<'a> NewMappings<'a> {
    pub(crate) fn at(driver: &'a Driver, start: u64) -> Self {
        Self { driver, start, bytes: 0 }
    }

    /// Maps a whole extent behind those mapped before. The cheap part: no page table is written yet.
    ///
    /// # Safety
    /// The addresses are reserved, unmapped and nobody else's; the extent is alive and has
    /// exactly `bytes`.
    pub(crate) unsafe fn push(&mut self, extent: Extent, bytes: u64) -> Result<(), Failure> {
        // SAFETY: the caller vouches for address and extent; an offset other than 0 is not
        // supported by any driver, and flags must be 0.
        unsafe { self.driver.cuMemMap(self.start + self.bytes, bytes as usize, 0, extent.0, 0) }?;
        self.bytes += bytes;
        Ok(())
    }

    /// Opens all of it to those who may reach it, in one call.
    /// The dear part: its cost follows the number of handles, not the bytes.
    pub(crate) fn open_to(&self, everybody: &[CUmemAccessDesc]) -> Result<(), Failure> {
        // SAFETY: the range is exactly what was mapped here.
        unsafe { set_access(self.driver, self.start, self.bytes, everybody) }
    }

    /// Leaves the mappings in place: from now on the caller unmaps them.
    pub(crate) fn keep(mut self) {
        self.bytes = 0;
    }

    /// Unmaps what was mapped so far.
    pub(crate) fn undo(mut self) -> Result<(), Failure> {
        self.unmap()
    }

    fn unmap(&mut self) -> Result<(), Failure> {
        let bytes = std::mem::take(&mut self.bytes);
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: mapped here, whole mappings, and never handed to anybody: no work uses it.
        unsafe { unmap(self.driver, self.start, bytes) }
    }
}

impl Drop for NewMappings<'_> {
    fn drop(&mut self) {
        // Nobody to tell in a drop; callers that care call `undo`.
        let _ = self.unmap();
    }
}

/// Sets what some devices, or the host, may do with a range of whole mappings, in one call; everybody
/// else's access stays. Its cost follows the number of handles.
///
/// # Safety
/// The range is of whole mappings, without a hole.
pub(crate) unsafe fn set_access(
    driver: &Driver,
    start: u64,
    bytes: u64,
    access: &[CUmemAccessDesc],
) -> Result<(), Failure> {
    // SAFETY: the range by the caller's word; the descriptors are live and as many as said.
    unsafe { driver.cuMemSetAccess(start, bytes as usize, access.as_ptr(), access.len()) }
}

/// Unmaps a range of whole mappings in one call. Its cost follows the number of handles.
///
/// # Safety
/// The range is of whole mappings that this pool made, and the host has seen complete all work
/// that may use them.
pub(crate) unsafe fn unmap(driver: &Driver, start: u64, bytes: u64) -> Result<(), Failure> {
    // SAFETY: passed on to the caller.
    unsafe { driver.cuMemUnmap(start, bytes as usize) }
}

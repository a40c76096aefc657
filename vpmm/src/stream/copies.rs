//! Copies and fills by address, for callers who keep account of memory themselves.

use super::Stream;
use crate::error::Result;
use crate::units::DevicePtr;

impl Stream {
    /// Enqueues a copy from the host. From page-locked memory it runs beside the host; from other
    /// memory the driver may copy first, and wait. `cuMemcpyHtoDAsync`.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver), [`Error::ContextLost`](crate::Error::ContextLost).
    ///
    /// # Safety
    /// The host's bytes are there, and stay as they are until the copy is done; so are the device's,
    /// which nobody uses at that time who is not ordered before or after.
    pub unsafe fn upload(&self, to: DevicePtr, from: *const u8, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let _context = self.device().enter()?;
        let (to, raw) = (to.address(), self.handle().raw());
        // SAFETY: the stream is alive while `self` is; the caller vouches for the bytes.
        unsafe { self.device().driver().cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, raw) }
            .map_err(|failure| failure.about(bytes as u64))
    }

    /// Enqueues a copy to the host. `cuMemcpyDtoHAsync`.
    ///
    /// # Errors
    /// As [`upload`](Self::upload).
    ///
    /// # Safety
    /// Both are there until the copy is done; nobody uses the host's bytes before that, nor writes the
    /// device's unless ordered before or after.
    pub unsafe fn download(&self, to: *mut u8, from: DevicePtr, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let _context = self.device().enter()?;
        let (from, raw) = (from.address(), self.handle().raw());
        // SAFETY: as in `upload`.
        unsafe { self.device().driver().cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, raw) }
            .map_err(|failure| failure.about(bytes as u64))
    }

    /// Enqueues a copy on the device. `cuMemcpyDtoDAsync`.
    ///
    /// # Errors
    /// As [`upload`](Self::upload).
    ///
    /// # Safety
    /// Both are there until the copy is done, and do not overlap; nobody uses them meanwhile who is not
    /// ordered before or after.
    pub unsafe fn copy(&self, to: DevicePtr, from: DevicePtr, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let _context = self.device().enter()?;
        let (to, from, raw) = (to.address(), from.address(), self.handle().raw());
        // SAFETY: as in `upload`.
        unsafe { self.device().driver().cuMemcpyDtoDAsync_v2(to, from, bytes, raw) }
            .map_err(|failure| failure.about(bytes as u64))
    }

    /// Enqueues a fill of bytes. `cuMemsetD8Async`.
    ///
    /// # Errors
    /// As [`upload`](Self::upload).
    ///
    /// # Safety
    /// The memory is there until it is filled, and nobody uses it meanwhile who is not ordered before
    /// or after.
    pub unsafe fn fill(&self, to: DevicePtr, value: u8, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let _context = self.device().enter()?;
        let (to, raw) = (to.address(), self.handle().raw());
        // SAFETY: as in `upload`.
        unsafe { self.device().driver().cuMemsetD8Async(to, value, bytes, raw) }
            .map_err(|failure| failure.about(bytes as u64))
    }
}

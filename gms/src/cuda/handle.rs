//! Physical memory that is this process's to release.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use cuda_sys::types::CUmemGenericAllocationHandle;

use super::{Cuda, CudaError, FILE_DESCRIPTOR};

/// A reference to physical memory, released when this is dropped. The memory lives on while
/// mappings, exported descriptors or other processes need it.
#[derive(Debug)]
pub(crate) struct PhysicalHandle {
    cuda: Cuda,
    pub(super) raw: CUmemGenericAllocationHandle,
    bytes: u64,
}

impl PhysicalHandle {
    /// Makes memory of so many bytes, a multiple of the granularity. Needs no context.
    pub(crate) fn create(cuda: &Cuda, bytes: u64) -> Result<Self, CudaError> {
        let mut raw = 0;
        let properties = cuda.properties();
        // SAFETY: both pointers are to live values of the right types; flags must be 0.
        unsafe { cuda.table().cuMemCreate(&mut raw, bytes as usize, &properties, 0) }?;
        Ok(Self { cuda: cuda.clone(), raw, bytes })
    }

    /// Takes part in memory that another process exported. The descriptor is of no further use.
    ///
    /// That the memory is of so many bytes is the other process's word, which the driver holds it to
    /// when it is mapped.
    pub(super) fn import(cuda: &Cuda, file: &OwnedFd, bytes: u64) -> Result<Self, CudaError> {
        let mut raw = 0;
        let number = ptr::without_provenance_mut(file.as_raw_fd() as usize);
        let kind = FILE_DESCRIPTOR;
        // SAFETY: the pointer is to a live handle; this kind of shared handle is passed as the
        // descriptor's number in the pointer's place, and the descriptor is open.
        unsafe { cuda.table().cuMemImportFromShareableHandle(&mut raw, number, kind) }?;
        Ok(Self { cuda: cuda.clone(), raw, bytes })
    }

    /// Bytes of the memory.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A descriptor that names the memory in any process.
    pub(crate) fn export(&self) -> Result<OwnedFd, CudaError> {
        let mut file: c_int = -1;
        let (out, kind) = ((&raw mut file).cast(), FILE_DESCRIPTOR);
        // SAFETY: the handle is alive while this is; the pointer is to a live c_int, which this
        // kind of handle is; flags must be 0.
        unsafe { self.cuda.table().cuMemExportToShareableHandle(out, self.raw, kind, 0) }?;
        // SAFETY: a new descriptor that the driver made for its caller, who closes it.
        let file = unsafe { OwnedFd::from_raw_fd(file) };
        // Whether the driver's is closed in programs that are started is not said anywhere.
        let number = file.as_raw_fd();
        // SAFETY: the descriptor is open as long as `file`, which outlives this.
        let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
        let _ = rustix::io::fcntl_setfd(borrowed, rustix::io::FdFlags::CLOEXEC);
        Ok(file)
    }
}

impl Drop for PhysicalHandle {
    fn drop(&mut self) {
        // SAFETY: the handle was made by this driver and is released once, here.
        if let Err(error) = unsafe { self.cuda.table().cuMemRelease(self.raw) } {
            tracing::error!(%error, bytes = self.bytes, "memory could not be released");
            if let Some(tell) = self.cuda.0.on_lost.get() {
                tell(error);
            }
        }
    }
}

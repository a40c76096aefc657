//! Allocators as the timed loops see them: by static calls, which cost nothing to dispatch.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use vpmm::resource::MIN_ALIGN;
use vpmm::{DevicePtr, StreamHandle};

use crate::backend::{Backend, CudaAsync, CudaMalloc, PoolBackend, StackBackend, lost_text};

/// An allocator under test.
pub(super) trait Subject: Sync {
    /// What it hands out.
    type Ptr: Copy + PartialEq + Send;

    /// No allocation.
    const NONE: Self::Ptr;

    /// Where it is.
    fn address(ptr: Self::Ptr) -> u64;

    /// Allocates for use on `stream`.
    fn allocate(&self, bytes: u64, stream: StreamHandle) -> vpmm::Result<Self::Ptr>;

    /// Frees once the work on `stream` has finished.
    ///
    /// # Safety
    /// `ptr` must come from [`Subject::allocate`] of this very allocator and must not
    /// have been freed since: some allocators cannot tell.
    unsafe fn free(&self, ptr: Self::Ptr, stream: StreamHandle) -> vpmm::Result<()>;

    /// The most bytes of device memory held at one time.
    fn peak_mapped_bytes(&self) -> vpmm::Result<u64>;

    /// Driver calls so far.
    fn driver_calls(&self) -> u64;

    /// Has the allocator hold so much at most from now on, where that can be changed.
    fn limit_to(&self, _bytes: Option<u64>) -> vpmm::Result<()> {
        Ok(())
    }

    /// Fails where a log that it writes lacks rows.
    fn check_logs(&self) -> vpmm::Result<()> {
        Ok(())
    }

    /// Addresses that wait to be unmapped; `None` of an allocator that never moves anything.
    fn zombie_bytes(&self) -> Option<u64> {
        None
    }
}

/// A pool is freed into by the pointers that it hands out, as its users do.
impl Subject for PoolBackend<'_> {
    type Ptr = DevicePtr;

    const NONE: DevicePtr = DevicePtr::from_address(0);

    fn address(ptr: DevicePtr) -> u64 {
        ptr.address()
    }

    #[inline]
    fn allocate(&self, bytes: u64, stream: StreamHandle) -> vpmm::Result<DevicePtr> {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        self.pool().malloc(bytes, stream)
    }

    #[inline]
    unsafe fn free(&self, ptr: DevicePtr, stream: StreamHandle) -> vpmm::Result<()> {
        self.pool().free(ptr, stream)
    }

    fn peak_mapped_bytes(&self) -> vpmm::Result<u64> {
        Backend::peak_mapped_bytes(self)
    }

    fn driver_calls(&self) -> u64 {
        Backend::driver_calls(self)
    }

    fn limit_to(&self, bytes: Option<u64>) -> vpmm::Result<()> {
        self.pool().limit_to(bytes)
    }

    fn zombie_bytes(&self) -> Option<u64> {
        Some(self.pool().stats().zombie_bytes)
    }
}

/// An allocation of a resource: what its free is told.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Sized {
    ptr: DevicePtr,
    bytes: usize,
}

/// By dynamic calls, as stacks are.
impl Subject for StackBackend<'_> {
    type Ptr = Sized;

    const NONE: Sized = Sized { ptr: DevicePtr::NULL, bytes: 0 };

    fn address(allocation: Sized) -> u64 {
        allocation.ptr.address()
    }

    fn allocate(&self, bytes: u64, stream: StreamHandle) -> vpmm::Result<Sized> {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let ptr = self.resource().allocate(bytes, MIN_ALIGN, stream)?;
        Ok(Sized { ptr, bytes })
    }

    unsafe fn free(&self, Sized { ptr, bytes }: Sized, stream: StreamHandle) -> vpmm::Result<()> {
        self.resource().deallocate(ptr, bytes, MIN_ALIGN, stream)
    }

    fn peak_mapped_bytes(&self) -> vpmm::Result<u64> {
        Backend::peak_mapped_bytes(self)
    }

    fn driver_calls(&self) -> u64 {
        Backend::driver_calls(self)
    }

    fn check_logs(&self) -> vpmm::Result<()> {
        let lost = |(log, rows): (PathBuf, u64)| io::Error::other(lost_text(&log, rows));
        let first = self.lost_rows().into_iter().next().map(lost);
        first.map_or(Ok(()), |error| Err(vpmm::Error::LogFile(Arc::new(error))))
    }
}

/// An allocator that knows bare addresses only.
macro_rules! by_address {
    ($( $name:ident ),*) => { $(
        impl Subject for $name<'_> {
            type Ptr = u64;

            const NONE: u64 = 0;

            fn address(ptr: u64) -> u64 {
                ptr
            }

            fn allocate(&self, bytes: u64, stream: StreamHandle) -> vpmm::Result<u64> {
                Backend::allocate(self, bytes, stream)
            }

            unsafe fn free(&self, ptr: u64, stream: StreamHandle) -> vpmm::Result<()> {
                // SAFETY: the caller keeps the same contract.
                unsafe { Backend::free(self, ptr, 0, stream) }
            }

            fn peak_mapped_bytes(&self) -> vpmm::Result<u64> {
                Backend::peak_mapped_bytes(self)
            }

            fn driver_calls(&self) -> u64 {
                Backend::driver_calls(self)
            }
        }
    )* };
}

by_address!(CudaAsync, CudaMalloc);

/// The allocator that does nothing: what the loops cost by themselves.
pub(super) struct Nothing;

impl Subject for Nothing {
    // As large as the largest of the others, since pointers are stored.
    type Ptr = DevicePtr;

    const NONE: DevicePtr = DevicePtr::from_address(0);

    fn address(ptr: DevicePtr) -> u64 {
        ptr.address()
    }

    #[inline(never)]
    fn allocate(&self, bytes: u64, _stream: StreamHandle) -> vpmm::Result<DevicePtr> {
        Ok(DevicePtr::from_address(bytes))
    }

    #[inline(never)]
    unsafe fn free(&self, _ptr: DevicePtr, _stream: StreamHandle) -> vpmm::Result<()> {
        Ok(())
    }

    fn peak_mapped_bytes(&self) -> vpmm::Result<u64> {
        Ok(0)
    }

    fn driver_calls(&self) -> u64 {
        0
    }
}

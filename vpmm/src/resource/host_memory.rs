//! Which resources the host's own slices can stand on.

use std::sync::Arc;

use super::adaptors::{FailureCallback, Limiting, Logging, Statistics, ThreadSafe};
use super::host::HostMalloc;
use super::memory_resource::MemoryResource;
use super::pinned_host::PinnedHost;

/// A resource whose memory the host uses through its address, by values that own it:
/// [`PinnedVec`](crate::PinnedVec).
///
/// # Safety
/// An address is valid for the host's reads and writes of the bytes asked for, and nobody else's, until
/// it is freed; and it is freed by nothing but [`deallocate`](MemoryResource::deallocate) with the very
/// [`DevicePtr`](crate::DevicePtr) that `allocate` gave, not with one that was made of the bare address.
/// No copy of that pointer is handed out.
pub unsafe trait HostMemory: MemoryResource {}

// SAFETY: the program's allocator; pointers carry a tag, which a free compares.
unsafe impl HostMemory for HostMalloc {}

// SAFETY: the driver's page-locked memory; pointers carry a tag, which a free compares.
unsafe impl HostMemory for PinnedHost {}

// SAFETY: as the resource pointed to.
unsafe impl<R: HostMemory + ?Sized> HostMemory for &R {}
// SAFETY: as the resource pointed to.
unsafe impl<R: HostMemory + ?Sized> HostMemory for Box<R> {}
// SAFETY: as the resource pointed to.
unsafe impl<R: HostMemory + ?Sized> HostMemory for Arc<R> {}

/// Adaptors that pass pointers on as they come, and keep none to hand out.
macro_rules! passes_on {
    ($( $adaptor:ident ),*) => { $(
        // SAFETY: as the resource below, whose pointers these are.
        unsafe impl<R: HostMemory> HostMemory for $adaptor<R> {}
    )* };
}

passes_on!(Limiting, Logging, Statistics, ThreadSafe);

// SAFETY: as the resource below; the callback is told of failures only.
unsafe impl<R: HostMemory, F> HostMemory for FailureCallback<R, F> where Self: MemoryResource {}

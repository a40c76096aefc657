//! Pools of this crate as resources.

#![forbid(unsafe_code)]

use super::description::Description;
use super::facts::{Checks, Facts};
use super::identity::Identity;
use super::memory_resource::MemoryResource;
use super::request::{check_align, is_of_nothing};
use crate::device::{Device, StreamHandle};
use crate::error::Result;
use crate::pool::Pool;
use crate::units::DevicePtr;

/// A pool of either profile. What [`Pool::malloc`] and [`Pool::free`] say holds here; handles of one
/// pool are equal. A wrong size is not found.
impl MemoryResource for Pool {
    /// # Errors
    /// Those of [`Pool::malloc`], but for [`Error::ZeroSize`](crate::Error::ZeroSize);
    /// [`Error::BadAlignment`](crate::Error::BadAlignment);
    /// [`Error::AlignmentUnsupported`](crate::Error::AlignmentUnsupported) above 512 bytes in the
    /// default profile, above 256 in the paged one.
    #[inline]
    fn allocate(&self, bytes: usize, align: usize, stream: StreamHandle) -> Result<DevicePtr> {
        check_align(align, self.alignment())?;
        if bytes == 0 { Ok(DevicePtr::NULL) } else { self.malloc(bytes, stream) }
    }

    /// # Errors
    /// Those of [`Pool::free`].
    #[inline]
    fn deallocate(
        &self,
        ptr: DevicePtr,
        bytes: usize,
        _align: usize,
        stream: StreamHandle,
    ) -> Result<()> {
        if is_of_nothing(ptr, bytes)? { Ok(()) } else { self.free(ptr, stream) }
    }

    fn facts(&self) -> Facts {
        let align = self.alignment();
        Facts::of_device_memory()
            .accessible(true, self.is_on_host())
            .with_stream_order(true)
            .with_recorded_streams(true)
            .aligned(align, align)
            .with_checks(Checks::Pointers)
    }

    fn describe(&self) -> Description {
        Description::new("vpmm")
            .with("profile", self.profile_name())
            .with("device", Pool::device(self).ordinal())
    }

    fn identity(&self) -> Identity {
        Identity::of_pool(self.number())
    }

    fn device(&self) -> Option<&Device> {
        Some(Pool::device(self))
    }

    fn held_bytes(&self) -> Option<u64> {
        Some(self.held())
    }

    fn record_stream(&self, ptr: DevicePtr, stream: StreamHandle) -> Result<()> {
        Pool::record_stream(self, ptr, stream)
    }
}

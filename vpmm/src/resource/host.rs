//! The program's own memory.

use std::alloc::{Layout, alloc, dealloc};

use super::description::Description;
use super::facts::{Checks, Facts};
use super::identity::Identity;
use super::live::Live;
use super::memory_resource::MemoryResource;
use super::request::{MIN_ALIGN, check_align, is_of_nothing};
use crate::device::StreamHandle;
use crate::error::{Error, Result};
use crate::units::DevicePtr;

/// The greatest alignment that is asked of the program's allocator.
const MAX_ALIGN: usize = 1 << 21;

/// Memory of the program's own allocator, for tests of what stands on a resource: no driver and no
/// device. Streams are ignored, and devices in general cannot reach it.
///
/// It finds every wrong free. Memory is given back at drop, whether it was freed or not. RMM has
/// `system_memory_resource` for hosts whose memory the device reaches.
///
/// ```
/// use vpmm::resource::{HostMalloc, MemoryResource};
/// use vpmm::{Error, StreamHandle};
///
/// let host = HostMalloc::new();
/// let stream = StreamHandle::LEGACY;
/// let ptr = host.allocate(100, 4096, stream)?;
/// assert!(ptr.address() % 4096 == 0);
/// assert!(matches!(host.deallocate(ptr, 99, 4096, stream), Err(Error::WrongSize { .. })));
/// host.deallocate(ptr, 100, 4096, stream)?;
/// assert!(host.deallocate(ptr, 100, 4096, stream).is_err());
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug)]
pub struct HostMalloc {
    live: Live<Layout>,
    identity: Identity,
}

impl Default for HostMalloc {
    fn default() -> Self {
        Self::new()
    }
}

impl HostMalloc {
    /// With nothing allocated.
    pub fn new() -> Self {
        Self { live: Live::default(), identity: Identity::unique() }
    }
}

impl MemoryResource for HostMalloc {
    /// # Errors
    /// [`Error::BadAlignment`], [`Error::AlignmentUnsupported`] above 2 MiB, [`Error::SizeOverflow`],
    /// [`Error::OutOfMemory`].
    fn allocate(&self, bytes: usize, align: usize, _stream: StreamHandle) -> Result<DevicePtr> {
        check_align(align, MAX_ALIGN)?;
        if bytes == 0 {
            return Ok(DevicePtr::NULL);
        }
        let align = align.max(MIN_ALIGN);
        let overflow = Error::SizeOverflow { bytes: bytes as u64, unit_bytes: align as u64 };
        let layout = Layout::from_size_align(bytes, align).map_err(|_| overflow)?;
        // SAFETY: the layout is of at least one byte.
        let memory = unsafe { alloc(layout) };
        if memory.is_null() {
            return Err(Error::exhausted(bytes as u64, self.live.bytes(), None));
        }
        let address = memory.expose_provenance() as u64;
        Ok(self.live.enter(address, bytes, layout))
    }

    /// # Errors
    /// [`Error::ForeignPointer`], for one freed already and for a bare address too;
    /// [`Error::StalePointer`], [`Error::WrongSize`].
    fn deallocate(
        &self,
        ptr: DevicePtr,
        bytes: usize,
        _align: usize,
        _stream: StreamHandle,
    ) -> Result<()> {
        if is_of_nothing(ptr, bytes)? {
            return Ok(());
        }
        let layout = self.live.take(ptr, bytes)?;
        let memory = std::ptr::with_exposed_provenance_mut(ptr.address() as usize);
        // SAFETY: the table had it, so it came from `alloc` with this layout and was not freed.
        unsafe { dealloc(memory, layout) };
        Ok(())
    }

    fn facts(&self) -> Facts {
        Facts::of_device_memory()
            .accessible(false, true)
            .aligned(MIN_ALIGN, MAX_ALIGN)
            .with_checks(Checks::PointersAndSizes)
    }

    fn describe(&self) -> Description {
        Description::new("host-malloc")
    }

    fn identity(&self) -> Identity {
        self.identity
    }
}

impl Drop for HostMalloc {
    fn drop(&mut self) {
        for (address, layout) in self.live.drain() {
            // SAFETY: as in `deallocate`.
            unsafe { dealloc(std::ptr::with_exposed_provenance_mut(address as usize), layout) };
        }
    }
}

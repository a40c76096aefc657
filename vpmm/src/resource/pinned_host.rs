//! Page-locked host memory.

use std::sync::Arc;

use cuda_sys::types::CU_MEMHOSTALLOC_PORTABLE;

use super::description::Description;
use super::facts::{Checks, Facts};
use super::identity::Identity;
use super::live::Live;
use super::memory_resource::MemoryResource;
use super::plain;
use crate::device::{Device, StreamHandle};
use crate::error::Result;
use crate::units::DevicePtr;

/// Page-locked host memory from `cuMemHostAlloc`, given back by `cuMemFreeHost`: for copies that do not
/// stop the host, and for kernels that read over the link. The stream is ignored.
///
/// Both calls take hundreds of microseconds and more; a free waits for the device, so put a pool on it. The
/// memory is every device's of the process (`CU_MEMHOSTALLOC_PORTABLE`), but only this one is waited for: what
/// others do with it must have finished.
///
/// A free wants the very pointer that was given: the driver would free whatever page-locked memory it
/// is asked to, and a program may have slices on it. Clones share what is allocated. RMM calls it
/// `pinned_host_memory_resource`; the calls are in the CUDA driver API's "Memory Management".
#[derive(Clone, Debug)]
pub struct PinnedHost {
    device: Device,
    live: Arc<Live<()>>,
    identity: Identity,
}

impl PinnedHost {
    /// Host memory, for use with this device.
    pub fn new(device: &Device) -> Self {
        Self { device: device.clone(), live: Arc::default(), identity: Identity::unique() }
    }
}

impl MemoryResource for PinnedHost {
    /// One driver call.
    ///
    /// # Errors
    /// [`Error::BadAlignment`](crate::Error::BadAlignment),
    /// [`Error::AlignmentUnsupported`](crate::Error::AlignmentUnsupported) above 256 bytes,
    /// [`Error::SizeOverflow`](crate::Error::SizeOverflow),
    /// [`Error::Driver`](crate::Error::Driver),
    /// [`Error::ContextLost`](crate::Error::ContextLost).
    fn allocate(&self, bytes: usize, align: usize, _stream: StreamHandle) -> Result<DevicePtr> {
        let address = plain::allocate(&self.device, bytes, align, |driver, bytes| {
            let mut memory = std::ptr::null_mut();
            // SAFETY: the pointer is to a live pointer, and a context of the device is current.
            unsafe { driver.cuMemHostAlloc(&mut memory, bytes, CU_MEMHOSTALLOC_PORTABLE) }?;
            Ok(memory.expose_provenance() as u64)
        })?;
        Ok(address.map_or(DevicePtr::NULL, |address| self.live.enter(address, bytes, ())))
    }

    /// One driver call, which waits for the device.
    ///
    /// # Errors
    /// [`Error::ForeignPointer`](crate::Error::ForeignPointer), for one freed already and for a bare
    /// address too; [`Error::StalePointer`](crate::Error::StalePointer),
    /// [`Error::WrongSize`](crate::Error::WrongSize), [`Error::Driver`](crate::Error::Driver),
    /// [`Error::ContextLost`](crate::Error::ContextLost).
    fn deallocate(
        &self,
        ptr: DevicePtr,
        bytes: usize,
        _align: usize,
        _stream: StreamHandle,
    ) -> Result<()> {
        plain::deallocate(&self.device, ptr, bytes, |driver| {
            self.live.take(ptr, bytes)?;
            let memory = std::ptr::with_exposed_provenance_mut(ptr.address() as usize);
            // SAFETY: it was allocated here and not freed; the driver waits for what this device does with it, and
            // what others do has finished.
            unsafe { driver.cuMemFreeHost(memory) }.map_err(|failure| {
                self.live.put_back(ptr, bytes, ());
                failure.about(bytes as u64)
            })
        })
    }

    fn facts(&self) -> Facts {
        Facts::of_device_memory().accessible(true, true).with_checks(Checks::PointersAndSizes)
    }

    fn describe(&self) -> Description {
        Description::new("pinned-host")
    }

    fn identity(&self) -> Identity {
        self.identity
    }

    fn device(&self) -> Option<&Device> {
        Some(&self.device)
    }
}

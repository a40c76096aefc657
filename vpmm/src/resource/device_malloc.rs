//! The driver's plain allocator.

use super::description::Description;
use super::facts::{Checks, Facts};
use super::identity::Identity;
use super::memory_resource::MemoryResource;
use super::plain;
use crate::device::{Device, StreamHandle};
use crate::error::Result;
use crate::units::DevicePtr;

/// Device memory from `cuMemAlloc`, given back by `cuMemFree`. The stream is ignored.
///
/// Slow on purpose: an allocation costs 24 to 79 µs and more on an H200, and a free waits until the
/// whole device is idle. It is what pools stand on, and what they are compared with. All values of one
/// device are equal. RMM calls it `cuda_memory_resource`; the calls are in the CUDA driver API's
/// "Memory Management".
///
/// The driver finds pointers that it does not know. A wrong size is not found.
#[derive(Clone, Debug)]
pub struct DeviceMalloc {
    device: Device,
}

impl DeviceMalloc {
    /// Memory of this device.
    pub fn new(device: &Device) -> Self {
        Self { device: device.clone() }
    }
}

impl MemoryResource for DeviceMalloc {
    /// One driver call. Works while other streams capture graphs, and is no part of them.
    ///
    /// # Errors
    /// [`Error::BadAlignment`](crate::Error::BadAlignment),
    /// [`Error::AlignmentUnsupported`](crate::Error::AlignmentUnsupported) above 256 bytes,
    /// [`Error::SizeOverflow`](crate::Error::SizeOverflow),
    /// [`Error::Driver`](crate::Error::Driver),
    /// [`Error::ContextLost`](crate::Error::ContextLost).
    fn allocate(&self, bytes: usize, align: usize, _stream: StreamHandle) -> Result<DevicePtr> {
        let address = plain::allocate(&self.device, bytes, align, |driver, bytes| {
            let mut address = 0;
            // SAFETY: the pointer is to a live CUdeviceptr, and a context of the device is current.
            unsafe { driver.cuMemAlloc_v2(&mut address, bytes) }.map(|()| address)
        })?;
        Ok(address.map_or(DevicePtr::NULL, DevicePtr::from_address))
    }

    /// One driver call, which waits for the device.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver): `CUDA_ERROR_INVALID_VALUE` for a pointer that the
    /// driver does not know; [`Error::ContextLost`](crate::Error::ContextLost).
    fn deallocate(
        &self,
        ptr: DevicePtr,
        bytes: usize,
        _align: usize,
        _stream: StreamHandle,
    ) -> Result<()> {
        plain::free(&self.device, ptr, bytes)
    }

    fn facts(&self) -> Facts {
        Facts::of_device_memory().with_checks(Checks::Pointers)
    }

    fn describe(&self) -> Description {
        Description::new("device-malloc").with("device", self.device.ordinal())
    }

    fn identity(&self) -> Identity {
        Identity::of_device("device-malloc", &self.device)
    }

    fn device(&self) -> Option<&Device> {
        Some(&self.device)
    }
}

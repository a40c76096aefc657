//! Managed memory.

use cuda_sys::types::{CUdevice_attribute, CUmemAttach_flags_enum};

use super::description::Description;
use super::facts::{Checks, Facts};
use super::identity::Identity;
use super::memory_resource::MemoryResource;
use super::plain;
use crate::device::{Device, StreamHandle};
use crate::error::{Error, Result};
use crate::units::DevicePtr;

/// Managed memory from `cuMemAllocManaged`, given back by `cuMemFree`: the host and every device reach
/// it at one address, and its pages move to where they are used. The stream is ignored.
///
/// There can be more of it than a device has. A free waits for the device that the memory was made with, and
/// for no other: what another one does with it must have finished. Put
/// [`Prefetch`](super::Prefetch) on it to have the pages on the device before they are used. All values
/// of one driver are equal. RMM calls it `managed_memory_resource`; the calls are in the CUDA driver
/// API's "Memory Management".
#[derive(Clone, Debug)]
pub struct Managed {
    device: Device,
}

impl Managed {
    /// Managed memory, for use from this device.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the device has none, [`Error::Driver`].
    pub fn new(device: &Device) -> Result<Self> {
        if device.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY)? == 0 {
            return Err(Error::Unsupported { what: "managed memory on this device" });
        }
        Ok(Self { device: device.clone() })
    }
}

impl MemoryResource for Managed {
    /// One driver call.
    ///
    /// # Errors
    /// [`Error::BadAlignment`], [`Error::AlignmentUnsupported`] above 256 bytes,
    /// [`Error::SizeOverflow`], [`Error::Driver`], [`Error::ContextLost`].
    fn allocate(&self, bytes: usize, align: usize, _stream: StreamHandle) -> Result<DevicePtr> {
        let address = plain::allocate(&self.device, bytes, align, |driver, bytes| {
            let flags = CUmemAttach_flags_enum::CU_MEM_ATTACH_GLOBAL.0;
            let mut address = 0;
            // SAFETY: the pointer is to a live CUdeviceptr, and a context of the device is current.
            unsafe { driver.cuMemAllocManaged(&mut address, bytes, flags) }.map(|()| address)
        })?;
        Ok(address.map_or(DevicePtr::NULL, DevicePtr::from_address))
    }

    /// One driver call, which waits for the device that the memory was made with.
    ///
    /// # Errors
    /// [`Error::Driver`]: `CUDA_ERROR_INVALID_VALUE` for a pointer that the driver does not know;
    /// [`Error::ContextLost`].
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
        Facts::of_device_memory()
            .accessible(true, true)
            .with_managed(true)
            .with_checks(Checks::Pointers)
    }

    fn describe(&self) -> Description {
        Description::new("managed").with("device", self.device.ordinal())
    }

    fn identity(&self) -> Identity {
        Identity::of_kind("managed", self.device.driver().realm().number())
    }

    fn device(&self) -> Option<&Device> {
        Some(&self.device)
    }
}

//! What the driver tells of a device without a context, which one that is full, or another's alone, does
//! not give.

use std::ffi::c_int;

use cuda_sys::types::*;
use vpmm::Driver;

use super::calls::call;

/// A device of which nothing is taken.
#[derive(Debug)]
pub struct Bare<'a> {
    driver: &'a cuda_sys::Driver,
    device: CUdevice,
}

impl<'a> Bare<'a> {
    /// A device by its number.
    ///
    /// # Errors
    /// What the driver answers: `CUDA_ERROR_INVALID_DEVICE` for one that is not there.
    pub fn find(driver: &'a Driver, ordinal: u32) -> vpmm::Result<Self> {
        let mut bare = Self { driver: driver.raw(), device: 0 };
        let mut device: CUdevice = 0;
        // An ordinal past c_int's range cannot exist; -1 lets the driver say so.
        let number = c_int::try_from(ordinal).unwrap_or(-1);
        // SAFETY: the pointer is to a live CUdevice.
        unsafe { call!(bare, 0, cuDeviceGet(&mut device, number))? };
        bare.device = device;
        Ok(bare)
    }

    fn driver(&self) -> &cuda_sys::Driver {
        self.driver
    }

    fn counted(&self, call: impl FnOnce() -> CUresult) -> CUresult {
        call()
    }

    /// What the maker calls it.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn name(&self) -> vpmm::Result<String> {
        let mut name = [0_u8; 256];
        let text = name.as_mut_ptr().cast();
        // SAFETY: the buffer has the length given, one byte less than all so that the last stays NUL.
        unsafe { call!(self, 0, cuDeviceGetName(text, 255, self.device))? };
        let text = name.split(|byte| *byte == 0).next().unwrap_or_default();
        Ok(String::from_utf8_lossy(text).into_owned())
    }

    /// One of the driver's device attributes.
    ///
    /// # Errors
    /// What the driver answers: `CUDA_ERROR_INVALID_VALUE` for one that it does not know.
    pub fn attribute(&self, attribute: CUdevice_attribute) -> vpmm::Result<i32> {
        let mut value = 0;
        // SAFETY: the pointer is to a live c_int.
        unsafe { call!(self, 0, cuDeviceGetAttribute(&mut value, attribute, self.device))? };
        Ok(value)
    }

    /// Its memory in bytes, in use or not.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn total_memory(&self) -> vpmm::Result<u64> {
        let mut bytes = 0;
        // SAFETY: the pointer is to a live usize.
        unsafe { call!(self, 0, cuDeviceTotalMem_v2(&mut bytes, self.device))? };
        Ok(bytes as u64)
    }
}

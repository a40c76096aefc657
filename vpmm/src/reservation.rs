//! Reservations: ranges of device addresses, without memory.

use crate::driver::{Driver, Failure};

/// A range of addresses that belongs to this process until drop.
pub(crate) struct Reservation {
    driver: Driver,
    base: u64,
    bytes: u64,
}

impl Reservation {
    /// Reserves addresses, anywhere, aligned to the driver's granularity. Its cost does not follow
    /// the bytes.
    pub(crate) fn new(driver: &Driver, bytes: u64) -> Result<Self, Failure> {
        let mut base = 0;
        // SAFETY: the pointer is to a live CUdeviceptr; no hint, no alignment beyond the driver's.
        unsafe { driver.cuMemAddressReserve(&mut base, bytes as usize, 0, 0, 0) }?;
        Ok(Self { driver: driver.clone(), base, bytes })
    }

    pub(crate) fn base(&self) -> u64 {
        self.base
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: exactly the range that was reserved, once. Where something is still mapped in it
        // the driver refuses, and the addresses stay reserved: a leak, not a danger.
        let _ = unsafe { self.driver.cuMemAddressFree(self.base, self.bytes as usize) };
    }
}

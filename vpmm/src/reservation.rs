//! Reservations: ranges of device addresses, without memory.

use crate::driver::{Driver, Failure};

/// What a GPU has tables of pages for: memory mapped across a multiple of this takes one table more, and the first
/// mapping there waits for it to be made, a tenth of what opening 1 GiB takes.
pub(crate) const TABLE_BYTES: u64 = 1 << 30;

/// A range of addresses that belongs to this process until drop.
pub(crate) struct Reservation {
    driver: Driver,
    base: u64,
    bytes: u64,
}

impl Reservation {
    /// Reserves addresses, anywhere, aligned to the driver's granularity, or to [`TABLE_BYTES`] where there are
    /// as many. Its cost does not follow the bytes.
    pub(crate) fn new(driver: &Driver, bytes: u64) -> Result<Self, Failure> {
        let mut base = 0;
        let alignment = if bytes < TABLE_BYTES { 0 } else { TABLE_BYTES as usize };
        // SAFETY: the pointer is to a live CUdeviceptr; no hint.
        unsafe { driver.cuMemAddressReserve(&mut base, bytes as usize, alignment, 0, 0) }?;
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

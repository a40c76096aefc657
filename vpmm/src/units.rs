//! Addresses and sizes: the plain numbers that every other room computes with.

#![forbid(unsafe_code)]

use std::fmt;

/// A pointer to device memory, with the proof of which allocation it came from.
///
/// It is a number, not a Rust pointer: the host cannot read through it. Beside
/// the address it carries a *tag* that changes every time an address is handed
/// out, so that freeing a pointer that was already freed is found out even when
/// its address belongs to somebody else by then ([`Error::StalePointer`]).
/// A pointer made by [`DevicePtr::from_address`] has no tag and is not checked
/// for that; everything else is checked all the same.
///
/// [`Error::StalePointer`]: crate::Error::StalePointer
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct DevicePtr {
    address: u64,
    tag: u32,
}

impl DevicePtr {
    /// The pointer to nothing: what a resource gives for 0 bytes.
    pub const NULL: Self = Self::from_address(0);

    /// Whether it is the pointer to nothing.
    #[inline]
    pub const fn is_null(self) -> bool {
        self.address == 0
    }

    /// A pointer from a bare address, as it comes back from C or a kernel argument.
    pub const fn from_address(address: u64) -> Self {
        Self { address, tag: 0 }
    }

    pub(crate) const fn tagged(address: u64, tag: u32) -> Self {
        Self { address, tag }
    }

    /// The device address: what kernels and copies take (`CUdeviceptr`).
    pub const fn address(self) -> u64 {
        self.address
    }

    /// Zero for a pointer without a tag.
    pub(crate) const fn tag(self) -> u32 {
        self.tag
    }
}

impl fmt::Debug for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.address)
    }
}

impl fmt::Display for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl From<DevicePtr> for u64 {
    fn from(ptr: DevicePtr) -> u64 {
        ptr.address
    }
}

/// `bytes` rounded up to a multiple of `unit`, or `None` where that overflows
/// or `unit` is zero. `unit` need not be a power of two.
pub(crate) fn round_up(bytes: u64, unit: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(unit)
}

/// A number of bytes for people: whole binary units where they are exact, else three digits.
#[derive(Clone, Copy)]
pub(crate) struct Bytes(pub(crate) u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        let bytes = self.0;
        if bytes < 1024 {
            return write!(f, "{bytes} B");
        }
        let step = ((bytes.ilog2() / 10) as usize).min(UNITS.len());
        let name = UNITS[step - 1];
        let unit = 1_u64 << (10 * step);
        if bytes.is_multiple_of(unit) {
            write!(f, "{} {name}", bytes / unit)
        } else {
            write!(f, "{:.2} {name}", bytes as f64 / unit as f64)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_up_never_wraps() {
        assert_eq!(round_up(0, 4096), Some(0));
        assert_eq!(round_up(1, 4096), Some(4096));
        assert_eq!(round_up(4096, 4096), Some(4096));
        assert_eq!(round_up(u64::MAX - 5, 4096), None);
        assert_eq!(round_up(10, 3), Some(12));
        assert_eq!(round_up(10, 0), None);
    }

    #[test]
    fn bytes_read_well() {
        let shown = |bytes| Bytes(bytes).to_string();
        assert_eq!(shown(0), "0 B");
        assert_eq!(shown(1023), "1023 B");
        assert_eq!(shown(2 << 20), "2 MiB");
        assert_eq!(shown(3 << 29), "1.50 GiB");
        assert_eq!(shown(u64::MAX), "16.00 EiB");
    }

    #[test]
    fn a_pointer_shows_its_address() {
        assert_eq!(DevicePtr::tagged(0x7f00, 9).to_string(), "0x7f00");
        assert_eq!(u64::from(DevicePtr::from_address(5)), 5);
    }
}

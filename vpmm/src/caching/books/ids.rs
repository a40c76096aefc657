//! A hash of nodes' numbers, which nobody chooses: one multiplication.

#![forbid(unsafe_code)]

use std::hash::{BuildHasherDefault, Hasher};

pub(super) type Ids = BuildHasherDefault<OfId>;

/// The golden ratio's bits: close numbers come far apart.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

#[derive(Default)]
pub(super) struct OfId(u64);

impl Hasher for OfId {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u32(u32::from(*byte)));
    }

    #[inline]
    fn write_u32(&mut self, id: u32) {
        self.0 = (self.0 ^ u64::from(id)).wrapping_mul(SPREAD);
    }

    /// A table looks at the lowest bits and the highest: the lowest of a product are poor.
    #[inline]
    fn finish(&self) -> u64 {
        self.0.rotate_left(26)
    }
}

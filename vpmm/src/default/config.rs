//! Settings of the default profile.

#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use crate::paged::PendingPolicy;

/// Granules of addresses that a pool can have: units are counted in 32 bits.
const MOST_UNITS: u64 = u32::MAX as u64;

/// Settings of [`Pool::new`](crate::Pool::new).
///
/// ```
/// let mut config = vpmm::PoolConfig::default();
/// config.limit_bytes = Some(8 << 30);
/// ```
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct PoolConfig {
    /// The most physical memory that the pool may hold, rounded down to granules; what the device
    /// has by default.
    pub limit_bytes: Option<u64>,
    /// Bytes of addresses reserved; by default four times the device's memory, so that free memory
    /// can be brought together at addresses of its own while the old ones are still in use.
    /// Addresses cost no device memory, and host memory only where they are used: at most 1/128.
    /// Less than 2 TiB.
    pub va_size_bytes: Option<u64>,
    /// Whether to grow or to wait when only other streams' memory is free.
    pub pending_policy: PendingPolicy,
}

/// The settings with the device's numbers applied.
#[derive(Clone, Debug)]
pub(super) struct Checked {
    pub(super) limit_bytes: Option<u64>,
    pub(super) pending_policy: PendingPolicy,
    /// Granules of addresses.
    pub(super) granules: u32,
    /// Granules of memory, at most.
    pub(super) capacity: u64,
}

impl PoolConfig {
    pub(super) fn check(&self, granule_bytes: u64, device_bytes: u64) -> Result<Checked> {
        let granule_units = granule_bytes / super::class::UNIT_BYTES;
        let bytes = self.va_size_bytes.unwrap_or_else(|| device_bytes.saturating_mul(4));
        let most = MOST_UNITS / granule_units;
        let granules = match self.va_size_bytes {
            Some(bytes) if bytes / granule_bytes > most => {
                return Err(bad(bytes, "a pool has less than 2 TiB of addresses"));
            }
            _ => (bytes / granule_bytes).min(most),
        };
        // Both parts, the granule between them, and one to place something in each.
        if granules < 16 {
            return Err(bad(bytes, "a pool needs 16 granules of addresses at least"));
        }
        let capacity = self.limit_bytes.unwrap_or(device_bytes).min(device_bytes) / granule_bytes;
        Ok(Checked {
            limit_bytes: self.limit_bytes,
            pending_policy: self.pending_policy,
            granules: granules as u32,
            capacity,
        })
    }
}

fn bad(value: u64, reason: &str) -> Error {
    Error::Config { name: "va_size_bytes", value: value.to_string(), reason: reason.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRANULE: u64 = 2 << 20;

    #[test]
    fn addresses_are_four_times_the_memory_and_less_than_2_tib() {
        let checked = PoolConfig::default().check(GRANULE, 80 << 30).map(|of| of.granules);
        assert_eq!(checked.ok(), Some(4 * 40 * 1024));
        let checked = PoolConfig::default().check(GRANULE, 900 << 30).map(|of| of.granules);
        assert_eq!(checked.ok(), Some((1 << 20) - 1));
    }

    #[test]
    fn bad_sizes_are_named() {
        for bytes in [0, 4 << 20, 2 << 40] {
            let config = PoolConfig { va_size_bytes: Some(bytes), ..PoolConfig::default() };
            let error = config.check(GRANULE, 80 << 30).err();
            assert!(matches!(error, Some(Error::Config { name: "va_size_bytes", .. })), "{bytes}");
        }
    }
}

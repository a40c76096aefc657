//! Pools of both profiles to test.

#![allow(dead_code, reason = "each suite uses a part")]

use vpmm::{Device, PagedConfig, Pool, PoolConfig, Reuse, WaitPolicy};

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GRANULE: u64 = 2 * MIB;

/// The most granules that a tight pool may hold.
pub(crate) const LIMIT: u64 = 12;

/// Bytes of a request that the paged profile serves from the driver's own pool.
pub(crate) const SMALL: u64 = 1000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Profile {
    Default,
    Paged,
}

impl Profile {
    pub(crate) const BOTH: [Self; 2] = [Self::Default, Self::Paged];

    /// A pool without a limit.
    pub(crate) fn open(self, device: &Device) -> Pool {
        self.limited(device, None, WaitPolicy::default())
    }

    /// A pool of at most [`LIMIT`] granules.
    pub(crate) fn tight(self, device: &Device) -> Pool {
        self.limited(device, Some(LIMIT * GRANULE), WaitPolicy::default())
    }

    pub(crate) fn limited(
        self,
        device: &Device,
        limit_bytes: Option<u64>,
        policy: WaitPolicy,
    ) -> Pool {
        self.with(device, limit_bytes, policy, Reuse::default())
    }

    pub(crate) fn with(
        self,
        device: &Device,
        limit_bytes: Option<u64>,
        policy: WaitPolicy,
        reuse: Reuse,
    ) -> Pool {
        match self {
            Self::Default => {
                let mut config = PoolConfig::default();
                config.moves_per_second = 0;
                config.limit_bytes = limit_bytes;
                config.va_size_bytes = Some(128 * GRANULE);
                config.out_of_memory = policy;
                config.reuse = reuse;
                Pool::new(device, &config)
            }
            Self::Paged => {
                let mut config = PagedConfig::default();
                config.va_size_bytes = 128 * GRANULE;
                config.limit_bytes = limit_bytes;
                config.out_of_memory = policy;
                config.reuse = reuse;
                Pool::paged(device, &config)
            }
        }
        .expect("a pool")
    }
}

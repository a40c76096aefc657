//! Pools of both profiles to test.

use vpmm::{Device, Error, Location, PagedConfig, Pool, PoolConfig, Sharing};

use crate::support::{Rig, Watched};

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GRANULE: u64 = 2 * MIB;

/// The most that a pool may hold: the last granules come from movement.
pub(crate) const LIMIT: u64 = 12;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Profile {
    Default,
    Paged,
}

impl Profile {
    pub(crate) const BOTH: [Self; 2] = [Self::Default, Self::Paged];

    /// A pool of at most [`LIMIT`] granules.
    pub(crate) fn open(
        self,
        device: &Device,
        location: Location,
        sharing: Sharing,
    ) -> Result<Pool, Error> {
        self.open_for(device, location, sharing, false)
    }

    /// The same, which network cards may reach, or not.
    pub(crate) fn open_for(
        self,
        device: &Device,
        location: Location,
        sharing: Sharing,
        gpu_direct_rdma: bool,
    ) -> Result<Pool, Error> {
        match self {
            Self::Default => {
                let mut config = PoolConfig::default();
                config.moves_per_second = 0;
                config.limit_bytes = Some(LIMIT * GRANULE);
                config.va_size_bytes = Some(128 * GRANULE);
                config.location = location;
                config.sharing = sharing;
                config.gpu_direct_rdma = gpu_direct_rdma;
                Pool::new(device, &config)
            }
            Self::Paged => {
                let mut config = PagedConfig::default();
                config.va_size_bytes = 128 * GRANULE;
                config.limit_bytes = Some(LIMIT * GRANULE);
                config.location = location;
                config.sharing = sharing;
                config.gpu_direct_rdma = gpu_direct_rdma;
                Pool::paged(device, &config)
            }
        }
    }
}

impl Rig {
    pub(crate) fn pool(&self, profile: Profile, location: Location) -> Watched<'_> {
        self.watch(profile, profile.open(&self.device, location, Sharing::None).expect("a pool"))
    }

    pub(crate) fn watch(&self, profile: Profile, pool: Pool) -> Watched<'_> {
        let alignment = if profile == Profile::Default { 512 } else { 256 };
        Watched::new(self, pool, alignment, true)
    }
}

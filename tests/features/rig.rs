//! Pools of both profiles to test.

use vpmm::{
    Device, Error, PagedConfig, PendingPolicy, Pool, PoolConfig, Reuse, Sharing, StreamHandle,
};

use crate::support::{Held, Rig, Watched};

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GRANULE: u64 = 2 * MIB;

/// A request that both profiles give whole granules, and that no front of a thread's keeps from others
/// beside a second one like it.
pub(crate) const BLOCK: u64 = 16 * GRANULE;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Profile {
    Default,
    Paged,
}

/// What pools are made with here.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) limit_bytes: Option<u64>,
    pub(crate) pending_policy: PendingPolicy,
    pub(crate) reuse: Reuse,
    pub(crate) release_threshold_bytes: Option<u64>,
    pub(crate) sharing: Sharing,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            limit_bytes: Some(16 * BLOCK),
            pending_policy: PendingPolicy::default(),
            reuse: Reuse::default(),
            release_threshold_bytes: None,
            sharing: Sharing::None,
        }
    }
}

impl Profile {
    pub(crate) const BOTH: [Self; 2] = [Self::Default, Self::Paged];

    /// Those that have what is tested here.
    pub(crate) const TESTED: &[Self] = &Self::BOTH;

    pub(crate) fn open(self, device: &Device, settings: &Settings) -> Result<Pool, Error> {
        match self {
            Self::Default => {
                let mut config = PoolConfig::default();
                config.moves_per_second = 0;
                config.va_size_bytes = Some(64 * BLOCK);
                config.limit_bytes = settings.limit_bytes;
                config.pending_policy = settings.pending_policy;
                config.reuse = settings.reuse;
                config.release_threshold_bytes = settings.release_threshold_bytes;
                config.sharing = settings.sharing;
                Pool::new(device, &config)
            }
            Self::Paged => {
                let mut config = PagedConfig::default();
                config.va_size_bytes = 64 * BLOCK;
                config.limit_bytes = settings.limit_bytes;
                config.pending_policy = settings.pending_policy;
                config.reuse = settings.reuse;
                config.release_threshold_bytes = settings.release_threshold_bytes;
                config.sharing = settings.sharing;
                Pool::paged(device, &config)
            }
        }
    }
}

impl Rig {
    pub(crate) fn pool(&self, profile: Profile) -> Watched<'_> {
        self.pool_with(profile, &Settings::default())
    }

    pub(crate) fn pool_with(&self, profile: Profile, settings: &Settings) -> Watched<'_> {
        let pool = profile.open(&self.device, settings).expect("a pool");
        let alignment = if profile == Profile::Default { 512 } else { 256 };
        Watched::new(self, pool, alignment, true)
    }

    /// A test of each profile everywhere: see [`everywhere`](Self::everywhere).
    pub(crate) fn each(test: impl Fn(&Self, Profile)) {
        Self::everywhere(|rig| Profile::TESTED.iter().for_each(|profile| test(rig, *profile)));
    }
}

impl Watched<'_> {
    /// Enqueues a look at an allocation on another stream, after what its own was given so far, and
    /// notes that for the pool.
    pub(crate) fn look_from(
        &self,
        held: &Held,
        own: impl Into<StreamHandle>,
        other: impl Into<StreamHandle>,
    ) {
        let other = other.into();
        self.rig.order(own, other);
        held.check(self.rig, other);
        self.pool.record_stream(held.ptr, other).expect("the use is noted");
    }

    /// Bytes of physical memory, that for small requests included.
    pub(crate) fn mapped(&self) -> u64 {
        let stats = self.pool.stats();
        stats.mapped_bytes + stats.small_mapped_bytes
    }
}

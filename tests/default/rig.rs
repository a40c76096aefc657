//! Pools of the default profile to test.

use vpmm::{Pool, PoolConfig, Stats, Stream, StreamHandle};

use crate::support::{Rig, Watched};

pub(crate) const KIB: u64 = 1 << 10;
pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;
pub(crate) const GRANULE: u64 = 2 * MIB;

/// At most so many granules of memory, in few addresses: a check of the invariants looks at each
/// unit of them.
pub(crate) fn config(limit_granules: u64, address_granules: u64) -> PoolConfig {
    let mut config = PoolConfig::default();
    // The same program does the same every time.
    config.moves_per_second = 0;
    config.limit_bytes = Some(limit_granules * GRANULE);
    config.va_size_bytes = Some(address_granules * GRANULE);
    config
}

/// What must not change when a request fails: live memory, free memory whoever may use it, and
/// memory altogether. (Time may pass, so that what was pending is idle.)
pub(crate) fn held(stats: &Stats) -> [u64; 5] {
    let free = stats.free_bytes() + stats.cached_bytes;
    [stats.live_bytes, stats.live_count, free, stats.mapped_bytes, stats.transit_bytes]
}

/// A stream by its handle alone: what is freed with it goes past the front.
pub(crate) fn bare(stream: &Stream) -> StreamHandle {
    // SAFETY: the stream is alive while it is borrowed, which is longer than any call with this.
    unsafe { StreamHandle::from_raw(stream.handle().raw()) }
}

impl Rig {
    pub(crate) fn pool(&self, config: &PoolConfig) -> Watched<'_> {
        let pool = Pool::new(&self.device, config).expect("a pool");
        // Other threads may not use the pool while it is checked: tests say when.
        Watched::new(self, pool, 512, false)
    }

    /// A pool of at most 64 granules.
    pub(crate) fn small_pool(&self) -> Watched<'_> {
        self.pool(&config(64, 256))
    }
}

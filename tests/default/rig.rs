//! A pool of the default profile under observation, on the device of [`Rig`].

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use vpmm::{DevicePtr, Error, Pool, PoolConfig, Stats, StreamHandle};

#[path = "../support/rig.rs"]
mod device;

pub(crate) use device::{Rig, call};

pub(crate) const KIB: u64 = 1 << 10;
pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GRANULE: u64 = 2 * MIB;

/// At most so many granules of memory, in few addresses: a check of the invariants looks at each
/// unit of them.
pub(crate) fn config(limit_granules: u64, address_granules: u64) -> PoolConfig {
    let mut config = PoolConfig::default();
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

impl Rig {
    pub(crate) fn pool(&self, config: &PoolConfig) -> Watched<'_> {
        let pool = Pool::new(&self.device, config).expect("a pool");
        pool.validate().expect("a new pool is valid");
        Watched { rig: self, pool, next_seed: 1.into(), live: Mutex::default() }
    }

    /// A pool of at most 64 granules.
    pub(crate) fn small_pool(&self) -> Watched<'_> {
        self.pool(&config(64, 256))
    }
}

/// An allocation and what was written into it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    pub(crate) ptr: DevicePtr,
    pub(crate) bytes: u64,
    seed: u64,
}

impl Held {
    pub(crate) fn address(&self) -> u64 {
        self.ptr.address()
    }
}

/// A pool whose every allocation is looked up in a map of all that are live, filled with a pattern
/// as device work, and checked before it is freed. Any thread may use it.
pub(crate) struct Watched<'a> {
    pub(crate) rig: &'a Rig,
    pub(crate) pool: Pool,
    next_seed: AtomicU64,
    /// Bytes by address.
    live: Mutex<BTreeMap<u64, u64>>,
}

impl Watched<'_> {
    pub(crate) fn try_malloc(
        &self,
        bytes: u64,
        stream: impl Into<StreamHandle>,
    ) -> Result<Held, Error> {
        let stream = stream.into();
        let ptr = self.pool.malloc(bytes as usize, stream)?;
        self.enter(ptr.address(), bytes);
        let seed = self.next_seed.fetch_add(1 << 32, Ordering::Relaxed);
        self.rig.fill(ptr.address(), bytes, seed, stream);
        Ok(Held { ptr, bytes, seed })
    }

    fn enter(&self, start: u64, bytes: u64) {
        assert!(start.is_multiple_of(512), "{start:#x}");
        let mut live = self.live.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((other, length)) = live.range(..start + bytes).next_back() {
            assert!(other + length <= start, "{start:#x} +{bytes:#x} overlaps {other:#x}");
        }
        live.insert(start, bytes);
    }

    pub(crate) fn malloc(&self, bytes: u64, stream: impl Into<StreamHandle>) -> Held {
        match self.try_malloc(bytes, stream) {
            Ok(held) => held,
            Err(error) => panic!("malloc({bytes}): {error}\n{}", self.pool.layout()),
        }
    }

    /// Checks the contents, in stream order, and frees.
    pub(crate) fn free(&self, held: Held, stream: impl Into<StreamHandle>) {
        let stream = stream.into();
        self.rig.check(held.address(), held.bytes, held.seed, stream);
        // Before the free: from there on another thread may be given the address.
        let mut live = self.live.lock().unwrap_or_else(PoisonError::into_inner);
        assert_eq!(live.remove(&held.address()), Some(held.bytes));
        drop(live);
        self.pool.free(held.ptr, stream).expect("free");
    }

    /// Checks every invariant of the pool's books.
    pub(crate) fn validate(&self) {
        self.pool.validate().unwrap_or_else(|violation| panic!("{violation}\n{:?}", self.pool));
    }

    /// Granules of physical memory.
    pub(crate) fn usage(&self) -> u64 {
        self.pool.stats().mapped_bytes / GRANULE
    }

    /// The invariants hold, and everything that was checked was what had been written.
    pub(crate) fn assert_intact(&self) {
        self.validate();
        assert_eq!(self.rig.mismatches(), 0, "words differ from what was written");
        self.rig.assert_clean();
    }
}

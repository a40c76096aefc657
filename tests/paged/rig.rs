//! A pool of the paged profile under observation, on the device of [`Rig`].

use std::sync::atomic::{AtomicU64, Ordering};

use vpmm::{DevicePtr, Error, PagedConfig, Pool, Stream};

#[path = "../support/rig.rs"]
mod device;

pub(crate) use device::{Rig, Stall, call};

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const PAGE: u64 = 2 * MIB;

impl Rig {
    pub(crate) fn pool(&self, config: &PagedConfig) -> Watched<'_> {
        let pool = Pool::paged(&self.device, config).expect("a pool");
        pool.validate().expect("a new pool is valid");
        Watched { rig: self, pool, next_seed: 1.into() }
    }

    /// A pool of 2 MiB pages with small reservations.
    pub(crate) fn small_pool(&self, pages: u64) -> Watched<'_> {
        self.pool(&config(PAGE, pages))
    }
}

/// Pages of `page` bytes, `pages` of them at the start, in reservations of 4,096 pages.
pub(crate) fn config(page: u64, pages: u64) -> PagedConfig {
    let mut config = PagedConfig::default();
    config.page_size_bytes = Some(page);
    config.initial_pages = pages;
    config.va_size_bytes = 4096 * page;
    config
}

/// A pool whose every allocation is filled with a pattern as device work and checked before it is
/// freed, and whose invariants are checked after every step.
pub(crate) struct Watched<'a> {
    pub(crate) rig: &'a Rig,
    pub(crate) pool: Pool,
    next_seed: AtomicU64,
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

impl Watched<'_> {
    pub(crate) fn try_malloc(&self, bytes: u64, stream: &Stream) -> Result<Held, Error> {
        let result = self.pool.malloc(bytes as usize, stream);
        self.pool.validate().expect("valid after malloc");
        let ptr = result?;
        let seed = self.next_seed.fetch_add(1, Ordering::Relaxed);
        self.rig.fill(ptr.address(), bytes, seed, stream.handle());
        Ok(Held { ptr, bytes, seed })
    }

    pub(crate) fn malloc(&self, bytes: u64, stream: &Stream) -> Held {
        match self.try_malloc(bytes, stream) {
            Ok(held) => held,
            Err(error) => panic!("malloc({bytes}): {error}\n{}", self.pool.layout()),
        }
    }

    /// Allocates whole pages.
    pub(crate) fn pages(&self, pages: u64, stream: &Stream) -> Held {
        self.malloc(pages * self.pool.stats().page_size_bytes, stream)
    }

    /// Checks the contents, in stream order, and frees.
    pub(crate) fn free(&self, held: Held, stream: &Stream) {
        self.rig.check(held.address(), held.bytes, held.seed, stream.handle());
        self.pool.free(held.ptr, stream).expect("free");
        self.pool.validate().expect("valid after free");
    }

    pub(crate) fn layout(&self) -> String {
        self.pool.layout().to_string()
    }

    /// Pages of physical memory.
    pub(crate) fn usage(&self) -> u64 {
        let stats = self.pool.stats();
        stats.mapped_bytes / stats.page_size_bytes
    }

    pub(crate) fn moved(&self) -> u64 {
        self.pool.stats().pages_moved
    }

    /// Everything that was checked was what had been written.
    pub(crate) fn assert_intact(&self) {
        assert_eq!(self.rig.mismatches(), 0, "words differ from what was written");
        self.rig.assert_clean();
    }
}

//! Pools of the paged profile to test.

use vpmm::{PagedConfig, Pool, Stream};

use crate::support::{Held, Rig, Watched};

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const PAGE: u64 = 2 * MIB;

/// Pages of `page` bytes, `pages` of them at the start, in reservations of 4,096 pages.
pub(crate) fn config(page: u64, pages: u64) -> PagedConfig {
    let mut config = PagedConfig::default();
    config.page_size_bytes = Some(page);
    config.initial_pages = pages;
    config.va_size_bytes = 4096 * page;
    config
}

impl Rig {
    pub(crate) fn pool(&self, config: &PagedConfig) -> Watched<'_> {
        let pool = Pool::paged(&self.device, config).expect("a pool");
        // Small requests come from the driver, which aligns to 256 bytes.
        Watched::new(self, pool, 256, true)
    }

    /// A pool of 2 MiB pages with small reservations.
    pub(crate) fn small_pool(&self, pages: u64) -> Watched<'_> {
        self.pool(&config(PAGE, pages))
    }
}

impl Watched<'_> {
    /// Allocates whole pages.
    pub(crate) fn pages(&self, pages: u64, stream: &Stream) -> Held {
        self.malloc(pages * self.pool.stats().page_size_bytes, stream)
    }
}

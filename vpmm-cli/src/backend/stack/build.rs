//! Resources made of what a stack says.

use std::sync::Arc;

use vpmm::resource::{
    Aligned, Arena, ArenaConfig, Binning, CoalescingConfig, CoalescingPool, DeviceMalloc,
    DriverPool, DriverPoolConfig, FixedSize, FixedSizeConfig, HostMalloc, Limiting, LogFormat,
    Logging, Managed, PinnedHost, Prefetch, Statistics, ThreadSafe, Tracking, TrackingConfig,
};
use vpmm::{CachingAllocator, Device, MemoryResource, PagedConfig, Pool, PoolConfig};

use super::kinds::{Kind, Stack};

/// Any resource.
pub(super) type Any = Arc<dyn MemoryResource>;

/// Tells the most bytes that one resource at the bottom of a stack has held.
pub(super) type Peak = Box<dyn Fn() -> vpmm::Result<u64> + Send + Sync>;

/// What a stack is built from the bottom up with.
pub(super) struct Builder<'a> {
    pub(super) device: &'a Device,
    /// What the bottom may hold.
    pub(super) limit_bytes: Option<u64>,
    /// One for each bottom.
    pub(super) peaks: Vec<Peak>,
}

impl Builder<'_> {
    pub(super) fn build(&mut self, stack: &Stack) -> vpmm::Result<Any> {
        match stack.upstream() {
            None => self.bottom(stack.kind()),
            Some(below) => {
                let upstream = self.build(below)?;
                self.over(stack.kind(), upstream)
            }
        }
    }

    /// What makes memory itself.
    fn bottom(&mut self, kind: &Kind) -> vpmm::Result<Any> {
        let device = self.device;
        match kind {
            Kind::Default => {
                let mut config = PoolConfig::default();
                config.limit_bytes = self.limit_bytes;
                Ok(self.pool(Pool::new(device, &config)?))
            }
            Kind::Paged => {
                let mut config = PagedConfig::from_env()?;
                config.limit_bytes = self.limit_bytes.or(config.limit_bytes);
                Ok(self.pool(Pool::paged(device, &config)?))
            }
            Kind::CudaAsync => {
                let mut config = DriverPoolConfig::default();
                config.max_bytes = self.limit_bytes;
                let pool = Arc::new(DriverPool::new(device, &config)?);
                let told = Arc::clone(&pool);
                self.peaks.push(Box::new(move || told.peak_reserved_bytes()));
                Ok(pool)
            }
            Kind::Managed => Ok(self.counted(Managed::new(device)?)),
            Kind::Pinned => Ok(self.counted(PinnedHost::new(device))),
            Kind::Host => Ok(self.counted(HostMalloc::new())),
            // What is left makes memory by `cuMemAlloc`.
            _ => Ok(self.counted(DeviceMalloc::new(device))),
        }
    }

    fn pool(&mut self, pool: Pool) -> Any {
        let told = pool.clone();
        self.peaks.push(Box::new(move || {
            let stats = told.stats();
            Ok(stats.peak_mapped_bytes + stats.peak_small_mapped_bytes)
        }));
        Arc::new(pool)
    }

    /// A resource that does not tell what it holds and knows no limit.
    fn counted(&mut self, resource: impl MemoryResource + 'static) -> Any {
        let counted = Arc::new(Statistics::new(resource));
        let told = Arc::clone(&counted);
        self.peaks.push(Box::new(move || {
            let peak = told.counters().bytes.peak;
            Ok(u64::try_from(peak).unwrap_or(0))
        }));
        match self.limit_bytes {
            Some(limit) => Arc::new(Limiting::new(counted, limit)),
            None => counted,
        }
    }

    /// What stands on something else.
    fn over(&mut self, kind: &Kind, upstream: Any) -> vpmm::Result<Any> {
        let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        Ok(match kind {
            Kind::Limiting(limit) => Arc::new(Limiting::new(upstream, *limit)),
            Kind::Statistics => Arc::new(Statistics::new(upstream)),
            Kind::Tracking => Arc::new(Tracking::new(upstream, TrackingConfig::default())),
            Kind::Logging(path) => Arc::new(Logging::to_file(upstream, LogFormat::Rmm, path)?),
            Kind::Aligned(align) => Arc::new(Aligned::new(upstream, size(*align))?),
            Kind::ThreadSafe => Arc::new(ThreadSafe::new(upstream)),
            Kind::Prefetch => Arc::new(Prefetch::new(upstream, self.device)),
            Kind::Coalescing { initial_bytes, max_bytes } => {
                let mut config = CoalescingConfig::default();
                (config.initial_bytes, config.max_bytes) = (*initial_bytes, *max_bytes);
                Arc::new(CoalescingPool::new(upstream, self.device, &config)?)
            }
            Kind::FixedSize { block_bytes } => {
                let mut config = FixedSizeConfig::default();
                config.block_bytes = size(*block_bytes);
                Arc::new(FixedSize::new(upstream, self.device, &config)?)
            }
            Kind::Binning { least, most } => {
                Arc::new(Binning::with_powers(upstream, self.device, *least..=*most)?)
            }
            Kind::Arena { bytes } => {
                let mut config = ArenaConfig::default();
                config.arena_bytes = bytes.or(self.limit_bytes);
                Arc::new(Arena::new(upstream, self.device, &config)?)
            }
            Kind::Caching(config) => {
                Arc::new(CachingAllocator::over(upstream, self.device, config)?)
            }
            // Nothing else stands on anything.
            _ => upstream,
        })
    }
}

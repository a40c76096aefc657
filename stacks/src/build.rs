//! Resources made of what a stack says.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vpmm::resource::{
    Aligned, Arena, ArenaConfig, Binning, CoalescingConfig, CoalescingPool, DeviceMalloc,
    DriverPool, DriverPoolConfig, FixedSize, FixedSizeConfig, HostMalloc, Limiting, Logging,
    Managed, PinnedHost, Prefetch, Statistics, ThreadSafe, Tracking, TrackingConfig,
};
use vpmm::{CachingAllocator, Device, MemoryResource, PagedConfig, Pool, PoolConfig};

use crate::kinds::{Kind, Stack};
use crate::parse::StackError;

/// Any resource.
pub type Any = Arc<dyn MemoryResource>;

/// Tells the most bytes that one resource at the bottom of a stack has held.
pub type Peak = Box<dyn Fn() -> vpmm::Result<u64> + Send + Sync>;

/// Resources that may stand on each other, whoever made them: as many as a thread's stack of 2 MiB has room for, with
/// as much to spare.
const MOST_IN_ALL: usize = 1000;

/// A resource, what it stands on, and what it can be asked for beyond what all can.
#[derive(Clone)]
pub struct Built {
    resource: Any,
    face: Face,
    upstream: Option<Arc<Self>>,
    /// How many stand on each other below it.
    below: usize,
    /// What was added to it as bins, on which it stands, too. Clones have the same; no other has.
    bins: Arc<Mutex<Vec<Arc<Self>>>>,
}

/// A resource by its own type, where there is more to ask of it.
#[derive(Clone)]
#[non_exhaustive]
pub enum Face {
    /// A pool of either profile.
    Pool(Pool),
    /// Its counters.
    Statistics(Arc<Statistics<Any>>),
    /// What is outstanding.
    Tracking(Arc<Tracking<Any>>),
    /// How much is left.
    Limiting(Arc<Limiting<Any>>),
    /// Its rows, and the name of their file.
    Logging(Arc<Logging<Any>>, PathBuf),
    /// Further bins.
    Binning(Arc<Binning<Any>>),
    /// Nothing more.
    Other,
}

impl Built {
    /// A resource that was made elsewhere.
    pub fn new(resource: Any, upstream: Option<Arc<Self>>) -> Self {
        let below = upstream.as_ref().map_or(0, |upstream| upstream.height());
        Self { resource, face: Face::Other, upstream, below, bins: Arc::default() }
    }

    /// A pool.
    pub fn of_pool(pool: Pool) -> Self {
        Self::through(Arc::new(pool.clone()), pool)
    }

    /// A pool that is called through a resource of the caller's.
    pub fn through(resource: Any, pool: Pool) -> Self {
        let (face, upstream, below, bins) = (Face::Pool(pool), None, 0, Arc::default());
        Self { resource, face, upstream, below, bins }
    }

    /// One with a face, over something or nothing.
    fn with<R: MemoryResource + 'static>(
        resource: R,
        face: impl FnOnce(Arc<R>) -> Face,
        upstream: Option<&Arc<Self>>,
    ) -> Self {
        let resource = Arc::new(resource);
        let (face, bins) = (face(Arc::clone(&resource)), Arc::default());
        let below = upstream.map_or(0, |upstream| upstream.height());
        Self { face, resource, upstream: upstream.cloned(), below, bins }
    }

    /// The resource itself.
    pub fn resource(&self) -> &Any {
        &self.resource
    }

    /// What else can be asked of it.
    pub fn face(&self) -> &Face {
        &self.face
    }

    /// What it stands on, if it stands on one.
    pub fn upstream(&self) -> Option<&Arc<Self>> {
        self.upstream.as_ref()
    }

    /// Adds a bin to it by a function, for [`Binning::add_bin`]. `None`, and nothing done, where the bin is this or
    /// stands on it: its requests would go round for ever.
    pub fn with_bin<T, E>(
        &self,
        bin: &Arc<Self>,
        add: impl FnOnce() -> Result<T, E>,
    ) -> Option<Result<T, E>> {
        /// One at a time, as two may be each other's.
        static ADDING: Mutex<()> = Mutex::new(());
        let _alone = ADDING.lock().unwrap_or_else(PoisonError::into_inner);
        if bin.stands_on(self) {
            return None;
        }
        let added = add();
        if added.is_ok() {
            self.bins().push(Arc::clone(bin));
        }
        Some(added)
    }

    /// Whether so many more may stand on it: each call goes through all of them, as does their end.
    ///
    /// # Errors
    /// [`StackError::TooMany`].
    pub fn check_room(&self, more: usize) -> Result<(), StackError> {
        match self.height().saturating_add(more) {
            ..=MOST_IN_ALL => Ok(()),
            _ => Err(StackError::TooMany { most: MOST_IN_ALL }),
        }
    }

    /// How many stand on each other, with it.
    fn height(&self) -> usize {
        self.height_by(&mut HashMap::new())
    }

    /// The same, each asked once: bins may stand on the same ones.
    fn height_by(&self, known: &mut HashMap<usize, usize>) -> usize {
        if let Some(height) = known.get(&self.place()) {
            return *height;
        }
        let bins = self.bins().clone();
        let bins = bins.iter().map(|bin| bin.height_by(known)).max();
        let height = 1 + self.below.max(bins.unwrap_or(0));
        known.insert(self.place(), height);
        height
    }

    /// What tells it from all others that there are; clones have the same.
    fn place(&self) -> usize {
        Arc::as_ptr(&self.bins).addr()
    }

    fn bins(&self) -> MutexGuard<'_, Vec<Arc<Self>>> {
        self.bins.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it is another one, or its requests come there. Each is looked at once: bins may stand on the same ones.
    fn stands_on(&self, other: &Self) -> bool {
        let mut seen = HashSet::new();
        let mut left = vec![self.clone()];
        while let Some(next) = left.pop() {
            if Arc::ptr_eq(&next.bins, &other.bins) {
                return true;
            }
            if seen.insert(next.place()) {
                left.extend(
                    next.upstream.iter().chain(next.bins().iter()).map(|on| Self::clone(on)),
                );
            }
        }
        false
    }
}

impl fmt::Debug for Built {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Built").field(&self.resource.describe()).finish()
    }
}

/// Makes the resources of a stack, from the bottom up.
pub struct Builder<'a> {
    device: &'a Device,
    limit_bytes: Option<u64>,
    peaks: Option<Vec<Peak>>,
    given: Option<Arc<Built>>,
}

impl<'a> Builder<'a> {
    /// For a device.
    pub fn new(device: &'a Device) -> Self {
        Self { device, limit_bytes: None, peaks: None, given: None }
    }

    /// The same, where what makes memory may hold so many bytes at most.
    #[must_use]
    pub fn limited(self, limit_bytes: Option<u64>) -> Self {
        Self { limit_bytes, ..self }
    }

    /// The same, with what makes memory watched: [`into_peaks`](Self::into_peaks). What does not tell how
    /// much it holds is counted by a [`Statistics`] on it.
    #[must_use]
    pub fn measured(self) -> Self {
        Self { peaks: Some(Vec::new()), ..self }
    }

    /// The same, for stacks that stand on this: [`Stack::over_given`].
    #[must_use]
    pub fn over(self, given: Arc<Built>) -> Self {
        Self { given: Some(given), ..self }
    }

    /// How much each resource at a bottom has held, one for each.
    pub fn into_peaks(self) -> Vec<Peak> {
        self.peaks.unwrap_or_default()
    }

    /// Makes them.
    ///
    /// # Errors
    /// Those of the resources; [`vpmm::Error::Unsupported`] for a stack on something given where nothing
    /// was, [`vpmm::Error::WrongDevice`] where that takes the streams of another device.
    pub fn build(&mut self, stack: &Stack) -> vpmm::Result<Arc<Built>> {
        match (stack.upstream(), stack.kind()) {
            (None, Kind::Given) => self.given(),
            (None, kind) => self.bottom(kind).map(Arc::new),
            (Some(below), kind) => {
                let upstream = self.build(below)?;
                self.upon(kind, &upstream).map(Arc::new)
            }
        }
    }

    /// What was given. Not all that stand on it look whose streams it takes.
    fn given(&self) -> vpmm::Result<Arc<Built>> {
        let what = "a stack on something given without that";
        let given = self.given.clone().ok_or(vpmm::Error::Unsupported { what })?;
        let stream_device = self.device.ordinal();
        match given.resource().device().map(Device::ordinal) {
            Some(pool_device) if pool_device != stream_device => {
                Err(vpmm::Error::WrongDevice { stream_device, pool_device })
            }
            _ => Ok(given),
        }
    }

    /// What makes memory itself.
    fn bottom(&mut self, kind: &Kind) -> vpmm::Result<Built> {
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
            Kind::CudaAsync { initial_bytes, max_bytes, threshold_bytes } => {
                let mut config = DriverPoolConfig::default();
                config.initial_bytes = *initial_bytes;
                config.max_bytes = [*max_bytes, self.limit_bytes].into_iter().flatten().min();
                if let Some(threshold) = *threshold_bytes {
                    config.release_threshold_bytes = threshold;
                }
                let pool = Arc::new(DriverPool::new(device, &config)?);
                if let Some(peaks) = &mut self.peaks {
                    let told = Arc::clone(&pool);
                    peaks.push(Box::new(move || told.peak_reserved_bytes()));
                }
                Ok(Built::new(pool, None))
            }
            Kind::Managed => Ok(self.maker(Managed::new(device)?)),
            Kind::Pinned => Ok(self.maker(PinnedHost::new(device))),
            Kind::Host => Ok(self.maker(HostMalloc::new())),
            // What is left makes memory by `cuMemAlloc`.
            _ => Ok(self.maker(DeviceMalloc::new(device))),
        }
    }

    fn pool(&mut self, pool: Pool) -> Built {
        if let Some(peaks) = &mut self.peaks {
            let told = pool.clone();
            peaks.push(Box::new(move || {
                let stats = told.stats();
                Ok(stats.peak_mapped_bytes + stats.peak_small_mapped_bytes)
            }));
        }
        Built::of_pool(pool)
    }

    /// A resource that does not tell what it holds and knows no limit.
    fn maker(&mut self, resource: impl MemoryResource + 'static) -> Built {
        let mut any: Any = Arc::new(resource);
        if let Some(peaks) = &mut self.peaks {
            let counted = Arc::new(Statistics::new(any));
            let told = Arc::clone(&counted);
            peaks.push(Box::new(move || {
                let peak = told.counters().bytes.peak;
                Ok(u64::try_from(peak).unwrap_or(0))
            }));
            any = counted;
        }
        if let Some(limit) = self.limit_bytes {
            any = Arc::new(Limiting::new(any, limit));
        }
        Built::new(any, None)
    }

    /// What stands on something else.
    fn upon(&mut self, kind: &Kind, below: &Arc<Built>) -> vpmm::Result<Built> {
        let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        let (upstream, device) = (Arc::clone(&below.resource), self.device);
        let plain = |resource: Any| Built::new(resource, Some(Arc::clone(below)));
        Ok(match kind {
            Kind::Limiting(limit) => {
                Built::with(Limiting::new(upstream, *limit), Face::Limiting, Some(below))
            }
            Kind::Statistics => {
                Built::with(Statistics::new(upstream), Face::Statistics, Some(below))
            }
            Kind::Tracking { backtraces } => {
                let mut config = TrackingConfig::default();
                config.backtraces = *backtraces;
                Built::with(Tracking::new(upstream, config), Face::Tracking, Some(below))
            }
            Kind::Logging { file, format } => {
                let face = |logging| Face::Logging(logging, file.clone());
                Built::with(Logging::to_file(upstream, *format, file)?, face, Some(below))
            }
            Kind::Aligned { bytes, from_bytes } => {
                let aligned = Aligned::new(upstream, size(*bytes))?;
                plain(Arc::new(aligned.from_bytes(size(*from_bytes))))
            }
            Kind::ThreadSafe => plain(Arc::new(ThreadSafe::new(upstream))),
            Kind::Prefetch => plain(Arc::new(Prefetch::new(upstream, device))),
            Kind::Coalescing { initial_bytes, max_bytes } => {
                let mut config = CoalescingConfig::default();
                (config.initial_bytes, config.max_bytes) = (*initial_bytes, *max_bytes);
                plain(Arc::new(CoalescingPool::new(upstream, device, &config)?))
            }
            Kind::FixedSize { block_bytes, blocks_at_once } => {
                let mut config = FixedSizeConfig::default();
                config.block_bytes = size(*block_bytes);
                if let Some(blocks) = *blocks_at_once {
                    config.blocks_at_once = blocks as usize;
                }
                plain(Arc::new(FixedSize::new(upstream, device, &config)?))
            }
            Kind::Binning { powers } => {
                let binning = match *powers {
                    Some((least, most)) => Binning::with_powers(upstream, device, least..=most)?,
                    None => Binning::new(upstream, device),
                };
                Built::with(binning, Face::Binning, Some(below))
            }
            Kind::Arena { bytes } => {
                let mut config = ArenaConfig::default();
                config.arena_bytes = bytes.or(self.limit_bytes);
                plain(Arc::new(Arena::new(upstream, device, &config)?))
            }
            Kind::Caching(config) => {
                plain(Arc::new(CachingAllocator::over(upstream, device, config)?))
            }
            // Nothing else stands on anything.
            _ => plain(upstream),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is given for another device would be called with this one's streams.
    #[test]
    fn a_stack_stands_on_nothing_of_another_device() {
        let sim = cuda_sim::Simulator::builder().devices(2).build().unwrap();
        let driver = vpmm::Driver::new(sim.driver()).unwrap();
        let [one, other] = [0, 1].map(|ordinal| driver.device(ordinal).unwrap());
        let given: [Any; 2] = [Arc::new(DeviceMalloc::new(&other)), Arc::new(HostMalloc::new())];
        let [of_other, of_none] = given.map(|any| Arc::new(Built::new(any, None)));
        for text in ["statistics", "prefetch", "coalescing", "thread-safe(limiting(1MiB))"] {
            let stack = Stack::over_given(text).unwrap();
            let on = |device, given: &Arc<Built>| {
                Builder::new(device).over(Arc::clone(given)).build(&stack)
            };
            let wrong = on(&one, &of_other);
            let is_named =
                matches!(wrong, Err(vpmm::Error::WrongDevice { stream_device: 0, pool_device: 1 }));
            assert!(is_named, "{text}: {wrong:?}");
            for (device, given) in [(&other, &of_other), (&one, &of_none), (&other, &of_none)] {
                let built = on(device, given);
                assert!(built.is_ok(), "{text}: {built:?}");
            }
        }
    }

    /// Were each way down gone for itself, there would be as many as two to the power of the height.
    #[test]
    fn bins_that_share_what_is_below_them_are_soon_added() {
        let (told, heard) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let host = || Arc::new(Built::new(Arc::new(HostMalloc::new()), None));
            let add = |to: &Built, bin: &Arc<Built>| to.with_bin(bin, || Ok::<_, ()>(()));
            let mut top = host();
            for _ in 0..40 {
                let (left, right, next) = (host(), host(), host());
                for bin in [&left, &right] {
                    assert_eq!(add(bin, &top), Some(Ok(())));
                    assert_eq!(add(&next, bin), Some(Ok(())));
                }
                top = next;
            }
            assert!(top.check_room(MOST_IN_ALL - 81).is_ok());
            assert!(top.check_room(MOST_IN_ALL - 80).is_err());
            let bottom = Arc::clone(&top.bins()[0].bins()[0]);
            assert_eq!(add(&bottom, &top), None, "it would go round");
            told.send(()).unwrap();
        });
        assert_eq!(heard.recv_timeout(std::time::Duration::from_secs(20)), Ok(()));
    }

    /// Were each to ask twice, it would take as good as for ever.
    #[test]
    fn what_a_high_stack_is_able_to_do_is_soon_told() {
        for name in ["coalescing", "caching", "binning(10,12,UP)"] {
            let (told, heard) = std::sync::mpsc::channel();
            std::thread::spawn(move || {
                let sim = cuda_sim::Simulator::builder().build().unwrap();
                let driver = vpmm::Driver::new(sim.driver()).unwrap();
                let device = driver.device(0).unwrap();
                let form = if name.contains("UP") { name } else { &format!("{name}(UP)") };
                let (before, after) = form.split_once("UP").unwrap();
                let text = format!("{}cuda-async(max=1GiB){}", before.repeat(60), after.repeat(60));
                let built = Builder::new(&device).build(&text.parse().unwrap()).unwrap();
                assert!(built.resource().facts().stream_ordered);
                assert!(built.resource().describe().to_string().lines().count() > 60);
                let ptr = built.resource().allocate(1000, 256, vpmm::StreamHandle::LEGACY).unwrap();
                built.resource().deallocate(ptr, 1000, 256, vpmm::StreamHandle::LEGACY).unwrap();
                told.send(()).unwrap();
            });
            let told = heard.recv_timeout(std::time::Duration::from_secs(20));
            assert_eq!(told, Ok(()), "{name}");
        }
    }
}

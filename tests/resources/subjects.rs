//! Everything that the acceptance suite is run over.

use std::sync::Arc;

use cuda_sys::types::{CUmemoryPool, CUresult};
use vpmm::caching::CachingConfig;
use vpmm::resource::*;
use vpmm::{CachingAllocator, Error, MemoryResource, PagedConfig, PendingPolicy, Pool, PoolConfig};

use crate::support::Rig;

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;

pub(crate) type Shared = Arc<dyn MemoryResource>;

/// A resource, or a stack of them, by name.
pub(crate) struct Subject {
    pub(crate) name: &'static str,
    make: fn(&Rig) -> Result<Shared, Error>,
}

impl Subject {
    pub(crate) fn make(&self, rig: &Rig) -> Shared {
        self.try_make(rig).expect(self.name)
    }

    pub(crate) fn try_make(&self, rig: &Rig) -> Result<Shared, Error> {
        (self.make)(rig)
    }
}

/// The table: what a new resource is added to.
pub(crate) const SUBJECTS: &[Subject] = &[
    Subject { name: "device-malloc", make: |rig| shared(malloc(rig)) },
    Subject { name: "host-malloc", make: |_| shared(HostMalloc::new()) },
    Subject { name: "managed", make: |rig| shared(Managed::new(&rig.device)?) },
    Subject { name: "pinned-host", make: |rig| shared(PinnedHost::new(&rig.device)) },
    Subject { name: "cuda-async", make: |rig| shared(driver_pool(rig)?) },
    Subject { name: "cuda-async-view", make: |rig| shared(default_pool(rig)?) },
    Subject { name: "vpmm", make: |rig| shared(vpmm(rig)?) },
    Subject { name: "vpmm-paged", make: |rig| shared(paged(rig)?) },
    Subject { name: "callback", make: callback },
    Subject { name: "pool", make: |rig| shared(pool(rig, malloc(rig))?) },
    Subject { name: "pool-grow-first", make: |rig| shared(grow_first(rig)?) },
    Subject { name: "pool(cuda-async)", make: |rig| shared(pool(rig, driver_pool(rig)?)?) },
    Subject { name: "pool(vpmm)", make: |rig| shared(pool(rig, vpmm(rig)?)?) },
    Subject { name: "pool(pool)", make: |rig| shared(pool(rig, pool(rig, malloc(rig))?)?) },
    Subject { name: "pool(pinned)", make: |rig| shared(pool(rig, PinnedHost::new(&rig.device))?) },
    Subject { name: "fixed-size", make: |rig| shared(fixed_size(rig, malloc(rig))?) },
    Subject {
        name: "fixed-size(cuda-async)",
        make: |rig| shared(fixed_size(rig, driver_pool(rig)?)?),
    },
    Subject { name: "binning", make: |rig| shared(binning(rig)?) },
    Subject { name: "arena", make: |rig| shared(arena(rig, malloc(rig))?) },
    Subject { name: "arena(cuda-async)", make: |rig| shared(arena(rig, driver_pool(rig)?)?) },
    Subject { name: "caching", make: |rig| shared(caching(rig, malloc(rig))?) },
    Subject { name: "caching(cuda-async)", make: |rig| shared(caching(rig, driver_pool(rig)?)?) },
    Subject {
        name: "limiting(pool)",
        make: |rig| shared(Limiting::new(pool(rig, malloc(rig))?, 8 * GIB)),
    },
    Subject {
        name: "statistics(pool)",
        make: |rig| shared(Statistics::new(pool(rig, malloc(rig))?)),
    },
    Subject { name: "tracking(device-malloc)", make: |rig| shared(tracking(malloc(rig))) },
    Subject {
        name: "aligned(pool)",
        make: |rig| shared(Aligned::new(pool(rig, malloc(rig))?, 4096)?),
    },
    Subject {
        name: "thread-safe(arena)",
        make: |rig| shared(ThreadSafe::new(arena(rig, malloc(rig))?)),
    },
    Subject {
        name: "prefetch(managed)",
        make: |rig| shared(Prefetch::new(Managed::new(&rig.device)?, &rig.device)),
    },
    Subject {
        name: "failure-callback(vpmm)",
        make: |rig| shared(FailureCallback::new(vpmm(rig)?, |_, _| false)),
    },
    Subject {
        name: "logging(pool)",
        make: |rig| shared(logging(pool(rig, malloc(rig))?, LogFormat::Rmm)),
    },
    Subject { name: "caching(vpmm)", make: |rig| shared(caching(rig, vpmm(rig)?)?) },
    Subject { name: "deep", make: deep },
];

fn shared(resource: impl MemoryResource + 'static) -> Result<Shared, Error> {
    Ok(Arc::new(resource))
}

pub(crate) fn malloc(rig: &Rig) -> DeviceMalloc {
    DeviceMalloc::new(&rig.device)
}

pub(crate) fn driver_pool(rig: &Rig) -> Result<DriverPool, Error> {
    DriverPool::new(&rig.device, &DriverPoolConfig::default())
}

fn default_pool(rig: &Rig) -> Result<DriverPool, Error> {
    let mut pool: CUmemoryPool = std::ptr::null_mut();
    let device = i32::try_from(rig.device.ordinal()).expect("a small number");
    let call = "cuDeviceGetDefaultMemPool";
    let function = rig.driver.raw().cuDeviceGetDefaultMemPool.expect(call);
    // SAFETY: the pointer is to a live handle.
    let code = unsafe { function(&mut pool, device) };
    if code != CUresult::CUDA_SUCCESS {
        return Err(Error::Driver { call, code, bytes: 0 });
    }
    // SAFETY: a device's default pool is never destroyed.
    Ok(unsafe { DriverPool::borrow(&rig.device, pool) })
}

fn vpmm(rig: &Rig) -> Result<Pool, Error> {
    Pool::new(&rig.device, &PoolConfig::default())
}

fn paged(rig: &Rig) -> Result<Pool, Error> {
    let mut config = PagedConfig::default();
    config.va_size_bytes = 64 * GIB;
    Pool::paged(&rig.device, &config)
}

fn callback(rig: &Rig) -> Result<Shared, Error> {
    let below = Arc::new(malloc(rig));
    let also = Arc::clone(&below);
    let callback = Callback::new(
        below.facts(),
        move |bytes, align, stream| below.allocate(bytes, align, stream),
        move |ptr, bytes, align, stream| also.deallocate(ptr, bytes, align, stream),
    );
    shared(callback.with_device(&rig.device))
}

fn pool<R: MemoryResource>(rig: &Rig, upstream: R) -> Result<CoalescingPool<R>, Error> {
    let mut config = CoalescingConfig::default();
    config.initial_bytes = 16 * MIB;
    CoalescingPool::new(upstream, &rig.device, &config)
}

/// A pool of 16 MiB at first, over cuMemAlloc.
pub(crate) fn plain_pool(rig: &Rig) -> CoalescingPool<DeviceMalloc> {
    pool(rig, malloc(rig)).expect("a pool")
}

fn grow_first(rig: &Rig) -> Result<CoalescingPool<DeviceMalloc>, Error> {
    let mut config = CoalescingConfig::default();
    config.pending_policy = PendingPolicy::GrowFirst;
    CoalescingPool::new(malloc(rig), &rig.device, &config)
}

fn fixed_size<R: MemoryResource>(rig: &Rig, upstream: R) -> Result<FixedSize<R>, Error> {
    let mut config = FixedSizeConfig::default();
    config.block_bytes = 8 << 20;
    config.blocks_at_once = 32;
    FixedSize::new(upstream, &rig.device, &config)
}

fn binning(rig: &Rig) -> Result<Binning<CoalescingPool<DeviceMalloc>>, Error> {
    Binning::with_powers(pool(rig, malloc(rig))?, &rig.device, 18..=22)
}

pub(crate) fn arena<R: MemoryResource>(rig: &Rig, upstream: R) -> Result<Arena<R>, Error> {
    let mut config = ArenaConfig::default();
    config.arena_bytes = Some(6 * GIB);
    Arena::new(upstream, &rig.device, &config)
}

fn caching(rig: &Rig, upstream: impl MemoryResource + 'static) -> Result<CachingAllocator, Error> {
    CachingAllocator::over(upstream, &rig.device, &CachingConfig::default())
}

/// A log that nobody reads.
fn logging<R: MemoryResource>(upstream: R, format: LogFormat) -> Logging<R> {
    Logging::to_writer(upstream, format, std::io::sink())
}

/// Reports go nowhere: some tests make wrong frees.
fn tracking<R: MemoryResource>(upstream: R) -> Tracking<R> {
    let mut config = TrackingConfig::default();
    config.report = Report::Silent;
    Tracking::new(upstream, config)
}

/// One of nearly everything, typed and untyped.
fn deep(rig: &Rig) -> Result<Shared, Error> {
    let arena = shared(arena(rig, driver_pool(rig)?)?)?;
    let limiting = Limiting::new(Arc::clone(&arena), 6 * GIB);
    let aligned: Box<dyn MemoryResource> = Box::new(Aligned::new(limiting, 512)?);
    let callback = FailureCallback::new(Statistics::new(aligned), |_, _| false);
    shared(logging(tracking(ThreadSafe::new(callback)), LogFormat::Full))
}

/// Runs a test over every subject, everywhere.
pub(crate) fn each(test: impl Fn(&Rig, &Shared)) {
    Rig::everywhere(|rig| {
        for subject in SUBJECTS {
            let resource = subject.make(rig);
            println!("{}", subject.name);
            test(rig, &resource);
            drop(resource);
            rig.assert_clean();
        }
    });
}

#[test]
fn no_subject_comes_twice() {
    let mut names: Vec<_> = SUBJECTS.iter().map(|subject| subject.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), SUBJECTS.len());
}

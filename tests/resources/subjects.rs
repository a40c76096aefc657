//! Everything that the acceptance suite is run over.

use std::sync::Arc;

use cuda_sys::types::CUmemoryPool;
use vpmm::resource::*;
use vpmm::{MemoryResource, PagedConfig, PendingPolicy, Pool, PoolConfig};

use crate::support::{Rig, call};

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;

pub(crate) type Shared = Arc<dyn MemoryResource>;

/// A resource, or a stack of them, by name.
pub(crate) struct Subject {
    pub(crate) name: &'static str,
    make: fn(&Rig) -> Shared,
}

impl Subject {
    pub(crate) fn make(&self, rig: &Rig) -> Shared {
        (self.make)(rig)
    }
}

/// The table: what a new resource is added to.
pub(crate) const SUBJECTS: &[Subject] = &[
    Subject { name: "device-malloc", make: |rig| Arc::new(DeviceMalloc::new(&rig.device)) },
    Subject { name: "host-malloc", make: |_| Arc::new(HostMalloc::new()) },
    Subject { name: "managed", make: |rig| Arc::new(managed(rig)) },
    Subject { name: "pinned-host", make: |rig| Arc::new(PinnedHost::new(&rig.device)) },
    Subject { name: "cuda-async", make: |rig| Arc::new(driver_pool(rig)) },
    Subject { name: "cuda-async-view", make: |rig| Arc::new(default_pool(rig)) },
    Subject { name: "vpmm", make: |rig| Arc::new(vpmm(rig)) },
    Subject { name: "vpmm-paged", make: |rig| Arc::new(paged(rig)) },
    Subject { name: "callback", make: callback },
    Subject { name: "pool", make: |rig| Arc::new(pool(rig, DeviceMalloc::new(&rig.device))) },
    Subject { name: "pool-grow-first", make: |rig| Arc::new(grow_first(rig)) },
    Subject { name: "pool(cuda-async)", make: |rig| Arc::new(pool(rig, driver_pool(rig))) },
    Subject { name: "pool(vpmm)", make: |rig| Arc::new(pool(rig, vpmm(rig))) },
    Subject {
        name: "pool(pool)",
        make: |rig| Arc::new(pool(rig, pool(rig, DeviceMalloc::new(&rig.device)))),
    },
    Subject {
        name: "pool(pinned-host)",
        make: |rig| Arc::new(pool(rig, PinnedHost::new(&rig.device))),
    },
    Subject {
        name: "fixed-size",
        make: |rig| Arc::new(fixed_size(rig, DeviceMalloc::new(&rig.device))),
    },
    Subject {
        name: "fixed-size(cuda-async)",
        make: |rig| Arc::new(fixed_size(rig, driver_pool(rig))),
    },
    Subject { name: "binning", make: |rig| Arc::new(binning(rig)) },
    Subject { name: "arena", make: |rig| Arc::new(arena(rig, DeviceMalloc::new(&rig.device))) },
    Subject { name: "arena(cuda-async)", make: |rig| Arc::new(arena(rig, driver_pool(rig))) },
    Subject {
        name: "limiting(pool)",
        make: |rig| Arc::new(Limiting::new(plain_pool(rig), 8 * GIB)),
    },
    Subject { name: "statistics(pool)", make: |rig| Arc::new(Statistics::new(plain_pool(rig))) },
    Subject {
        name: "tracking(device-malloc)",
        make: |rig| Arc::new(tracking(DeviceMalloc::new(&rig.device))),
    },
    Subject {
        name: "aligned(pool)",
        make: |rig| Arc::new(Aligned::new(plain_pool(rig), 4096).expect("a power of two")),
    },
    Subject {
        name: "thread-safe(arena)",
        make: |rig| Arc::new(ThreadSafe::new(arena(rig, driver_pool(rig)))),
    },
    Subject {
        name: "prefetch(managed)",
        make: |rig| Arc::new(Prefetch::new(managed(rig), &rig.device)),
    },
    Subject {
        name: "failure-callback(vpmm)",
        make: |rig| Arc::new(FailureCallback::new(vpmm(rig), |_, _| false)),
    },
    Subject {
        name: "logging(pool)",
        make: |rig| Arc::new(logging(plain_pool(rig), LogFormat::Rmm)),
    },
    Subject { name: "deep", make: deep },
];

fn managed(rig: &Rig) -> Managed {
    Managed::new(&rig.device).expect("managed memory")
}

pub(crate) fn driver_pool(rig: &Rig) -> DriverPool {
    DriverPool::new(&rig.device, &DriverPoolConfig::default()).expect("a pool of the driver's")
}

fn default_pool(rig: &Rig) -> DriverPool {
    let mut pool: CUmemoryPool = std::ptr::null_mut();
    let device = i32::try_from(rig.device.ordinal()).expect("a small number");
    call!(rig.driver, cuDeviceGetDefaultMemPool(&mut pool, device));
    // SAFETY: a device's default pool is never destroyed.
    unsafe { DriverPool::borrow(&rig.device, pool) }
}

pub(crate) fn vpmm(rig: &Rig) -> Pool {
    Pool::new(&rig.device, &PoolConfig::default()).expect("a pool")
}

fn paged(rig: &Rig) -> Pool {
    let mut config = PagedConfig::default();
    config.va_size_bytes = 64 * GIB;
    Pool::paged(&rig.device, &config).expect("a pool")
}

fn callback(rig: &Rig) -> Shared {
    let below = Arc::new(DeviceMalloc::new(&rig.device));
    let also = Arc::clone(&below);
    let callback = Callback::new(
        below.facts(),
        move |bytes, align, stream| below.allocate(bytes, align, stream),
        move |ptr, bytes, align, stream| also.deallocate(ptr, bytes, align, stream),
    );
    Arc::new(callback.with_device(&rig.device))
}

pub(crate) fn pool<R: MemoryResource>(rig: &Rig, upstream: R) -> CoalescingPool<R> {
    let mut config = CoalescingConfig::default();
    config.initial_bytes = 16 * MIB;
    CoalescingPool::new(upstream, &rig.device, &config).expect("a pool")
}

pub(crate) fn plain_pool(rig: &Rig) -> CoalescingPool<DeviceMalloc> {
    pool(rig, DeviceMalloc::new(&rig.device))
}

fn grow_first(rig: &Rig) -> CoalescingPool<DeviceMalloc> {
    let mut config = CoalescingConfig::default();
    config.pending_policy = PendingPolicy::GrowFirst;
    CoalescingPool::new(DeviceMalloc::new(&rig.device), &rig.device, &config).expect("a pool")
}

fn fixed_size<R: MemoryResource>(rig: &Rig, upstream: R) -> FixedSize<R> {
    let mut config = FixedSizeConfig::default();
    config.block_bytes = 8 << 20;
    config.blocks_at_once = 32;
    FixedSize::new(upstream, &rig.device, &config).expect("blocks")
}

fn binning(rig: &Rig) -> Binning<CoalescingPool<DeviceMalloc>> {
    Binning::with_powers(plain_pool(rig), &rig.device, 18..=22).expect("bins")
}

pub(crate) fn arena<R: MemoryResource>(rig: &Rig, upstream: R) -> Arena<R> {
    let mut config = ArenaConfig::default();
    config.arena_bytes = Some(6 * GIB);
    Arena::new(upstream, &rig.device, &config).expect("an arena")
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
fn deep(rig: &Rig) -> Shared {
    let arena: Shared = Arc::new(arena(rig, driver_pool(rig)));
    let limiting = Limiting::new(Arc::clone(&arena), 6 * GIB);
    let aligned: Box<dyn MemoryResource> =
        Box::new(Aligned::new(limiting, 512).expect("a power of two"));
    let callback = FailureCallback::new(Statistics::new(aligned), |_, _| false);
    Arc::new(logging(tracking(ThreadSafe::new(callback)), LogFormat::Full))
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

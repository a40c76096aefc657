//! What containers stand on in these tests.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use vpmm::resource::{Description, DeviceMalloc, Facts};
use vpmm::{DevicePtr, Error, MemoryResource, PagedConfig, Pool, PoolConfig, Result, StreamHandle};

use crate::support::Rig;

pub(crate) type Any = Arc<dyn MemoryResource>;

pub(crate) fn pool(rig: &Rig) -> Pool {
    let mut config = PoolConfig::default();
    config.va_size_bytes = Some(1 << 30);
    Pool::new(&rig.device, &config).unwrap()
}

/// Resources with and without the order of streams.
pub(crate) fn all(rig: &Rig) -> [(&'static str, Any); 3] {
    let mut paged = PagedConfig::default();
    paged.va_size_bytes = 1 << 30;
    [
        ("the default profile", Arc::new(pool(rig))),
        ("the paged profile", Arc::new(Pool::paged(&rig.device, &paged).unwrap())),
        ("device malloc", Arc::new(DeviceMalloc::new(&rig.device))),
    ]
}

/// Runs a test with each resource on each device.
pub(crate) fn each(test: impl Fn(&Rig, &Any)) {
    Rig::everywhere(|rig| {
        for (name, resource) in all(rig) {
            println!("{name}");
            test(rig, &resource);
        }
    });
}

/// Counts what is allocated, and fails on demand.
pub(crate) struct Counting<R> {
    upstream: R,
    pub(crate) bytes: AtomicI64,
    pub(crate) live: AtomicI64,
    pub(crate) refuses: AtomicBool,
}

impl<R> Counting<R> {
    pub(crate) fn new(upstream: R) -> Self {
        let (bytes, live) = (AtomicI64::new(0), AtomicI64::new(0));
        Self { upstream, bytes, live, refuses: AtomicBool::new(false) }
    }

    #[track_caller]
    pub(crate) fn assert_live(&self, live: i64, bytes: i64) {
        assert_eq!(self.live.load(Ordering::Relaxed), live, "allocations");
        assert_eq!(self.bytes.load(Ordering::Relaxed), bytes, "bytes");
    }

    fn check(&self) -> Result<()> {
        let refuses = self.refuses.load(Ordering::Relaxed);
        if refuses { Err(Error::Unsupported { what: "patience" }) } else { Ok(()) }
    }
}

impl<R: MemoryResource> MemoryResource for Counting<R> {
    fn allocate(&self, bytes: usize, align: usize, stream: StreamHandle) -> Result<DevicePtr> {
        self.check()?;
        let ptr = self.upstream.allocate(bytes, align, stream)?;
        self.bytes.fetch_add(bytes as i64, Ordering::Relaxed);
        self.live.fetch_add(1, Ordering::Relaxed);
        Ok(ptr)
    }

    fn deallocate(
        &self,
        ptr: DevicePtr,
        bytes: usize,
        align: usize,
        stream: StreamHandle,
    ) -> Result<()> {
        self.check()?;
        self.upstream.deallocate(ptr, bytes, align, stream)?;
        self.bytes.fetch_sub(bytes as i64, Ordering::Relaxed);
        self.live.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }

    fn facts(&self) -> Facts {
        self.upstream.facts()
    }

    fn describe(&self) -> Description {
        Description::new("counting").over(self.upstream.describe())
    }
}

//! The pools of `vpmm`.

use std::mem::ManuallyDrop;

use vpmm::{DevicePtr, PagedConfig, Pool, PoolConfig, StreamHandle};

use super::Backend;
use crate::device::Machine;

/// A pool, and the driver calls that were made before there was one.
pub(crate) struct PoolBackend<'a> {
    machine: &'a Machine,
    pool: ManuallyDrop<Pool>,
    calls_before: vpmm::DriverCalls,
}

impl<'a> PoolBackend<'a> {
    /// The default profile.
    pub(crate) fn standard(machine: &'a Machine, limit_bytes: Option<u64>) -> vpmm::Result<Self> {
        let mut config = PoolConfig::default();
        config.limit_bytes = limit_bytes;
        Self::new(machine, || Pool::new(machine.device(), &config))
    }

    /// The paged profile, set by the environment.
    pub(crate) fn paged(machine: &'a Machine, limit_bytes: Option<u64>) -> vpmm::Result<Self> {
        let mut config = PagedConfig::from_env()?;
        if limit_bytes.is_some() {
            config.limit_bytes = limit_bytes;
        }
        Self::new(machine, || Pool::paged(machine.device(), &config))
    }

    fn new(machine: &'a Machine, open: impl FnOnce() -> vpmm::Result<Pool>) -> vpmm::Result<Self> {
        let calls_before = machine.driver().calls();
        Ok(Self { machine, pool: ManuallyDrop::new(open()?), calls_before })
    }

    /// The pool itself.
    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }
}

impl Backend for PoolBackend<'_> {
    fn allocate(&self, bytes: u64, stream: StreamHandle) -> vpmm::Result<u64> {
        // A size that does not fit is more than any device has, and refused as that.
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        self.pool.malloc(bytes, stream).map(DevicePtr::address)
    }

    unsafe fn free(&self, address: u64, _bytes: u64, stream: StreamHandle) -> vpmm::Result<()> {
        self.pool.free(DevicePtr::from_address(address), stream)
    }

    fn peak_mapped_bytes(&self) -> vpmm::Result<u64> {
        let stats = self.pool.stats();
        // In the paged profile the driver's pool holds requests smaller than a page. Neither gives
        // memory back while it can be used again, so the two peaks stand at the same time.
        Ok(stats.peak_mapped_bytes + stats.peak_small_mapped_bytes)
    }

    fn driver_calls(&self) -> u64 {
        self.machine.driver().calls().since(&self.calls_before).total()
    }

    fn map(&self) -> String {
        let stats = self.pool.stats();
        let pages = match stats.page_size_bytes {
            u64::MAX => "no pages".to_owned(),
            bytes => format!("pages of {bytes} bytes, live [n], free [-n], holes [*n]"),
        };
        let layout = self.pool.layout().to_string();
        let layout = if layout.is_empty() { "none mapped" } else { &layout };
        let beside = match stats.small_mapped_bytes {
            0 => String::new(),
            bytes => format!("; beside them {bytes} bytes for requests smaller than a page"),
        };
        format!("{pages}: {layout}{beside}")
    }
}

/// What a trace never frees goes with the pool, so that the next allocator finds the device empty.
impl Drop for PoolBackend<'_> {
    fn drop(&mut self) {
        // SAFETY: the pool is not used after.
        let pool = unsafe { ManuallyDrop::take(&mut self.pool) };
        // Refused where somebody has another handle, who then ends it, or a stream captures: then it goes with the
        // process.
        let _ = pool.destroy();
    }
}

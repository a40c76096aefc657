//! A pool under observation.

use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use vpmm::{DevicePtr, Error, Pool, StreamHandle};

use super::Rig;

/// An allocation and what was written into it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    pub(crate) ptr: DevicePtr,
    pub(crate) bytes: u64,
    pub(crate) seed: u64,
}

impl Held {
    pub(crate) fn address(&self) -> u64 {
        self.ptr.address()
    }

    /// Enqueues a check of the contents by a device, not the pool's own perhaps.
    pub(crate) fn check(&self, rig: &Rig, stream: impl Into<StreamHandle>) {
        rig.check(self.address(), self.bytes, self.seed, stream.into());
    }
}

/// A pool whose every allocation is looked up in a map of all that are live, filled with a pattern
/// as device work, and checked before it is freed. Any thread may use it.
pub(crate) struct Watched<'a> {
    pub(crate) rig: &'a Rig,
    pub(crate) pool: ManuallyDrop<Pool>,
    /// What every address is a multiple of.
    alignment: u64,
    /// Whether the invariants are checked after every step: for pools that can be while other
    /// threads use them.
    at_every_step: bool,
    next_seed: AtomicU64,
    /// Bytes by address.
    live: Mutex<BTreeMap<u64, u64>>,
}

impl<'a> Watched<'a> {
    pub(crate) fn new(rig: &'a Rig, pool: Pool, alignment: u64, at_every_step: bool) -> Self {
        let (next_seed, pool) = (AtomicU64::new(1), ManuallyDrop::new(pool));
        let watched =
            Self { rig, pool, alignment, at_every_step, next_seed, live: Mutex::default() };
        watched.validate();
        watched
    }
}

impl Watched<'_> {
    fn live(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn step(&self) {
        if self.at_every_step {
            self.validate();
        }
    }

    pub(crate) fn try_malloc(
        &self,
        bytes: u64,
        stream: impl Into<StreamHandle>,
    ) -> Result<Held, Error> {
        self.malloc_by(bytes, stream, |bytes, stream| self.pool.malloc(bytes, stream))
    }

    pub(crate) fn malloc_by(
        &self,
        bytes: u64,
        stream: impl Into<StreamHandle>,
        malloc: impl FnOnce(usize, StreamHandle) -> Result<DevicePtr, Error>,
    ) -> Result<Held, Error> {
        let stream = stream.into();
        let result = malloc(bytes as usize, stream);
        self.step();
        let ptr = result?;
        self.enter(ptr.address(), bytes);
        let seed = self.next_seed.fetch_add(1 << 32, Ordering::Relaxed);
        self.rig.fill(ptr.address(), bytes, seed, stream);
        Ok(Held { ptr, bytes, seed })
    }

    fn enter(&self, start: u64, bytes: u64) {
        assert!(start.is_multiple_of(self.alignment), "{start:#x}");
        let mut live = self.live();
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
        let freed = self.free_by(held, stream, |ptr, stream| self.pool.free(ptr, stream));
        freed.expect("free");
        self.step();
    }

    /// The same where the free itself may fail: the allocation is the caller's still.
    pub(crate) fn free_by(
        &self,
        held: Held,
        stream: impl Into<StreamHandle>,
        free: impl FnOnce(DevicePtr, StreamHandle) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let stream = stream.into();
        self.rig.check(held.address(), held.bytes, held.seed, stream);
        // Before the free: from there on another thread may be given the address.
        assert_eq!(self.live().remove(&held.address()), Some(held.bytes));
        let freed = free(held.ptr, stream);
        if freed.is_err() {
            self.live().insert(held.address(), held.bytes);
        }
        freed
    }

    /// Checks every invariant of the pool's books.
    pub(crate) fn validate(&self) {
        self.pool.validate().unwrap_or_else(|violation| panic!("{violation}\n{:?}", self.pool));
    }

    pub(crate) fn layout(&self) -> String {
        self.pool.layout().to_string()
    }

    /// Pages, or granules, of physical memory.
    pub(crate) fn usage(&self) -> u64 {
        let stats = self.pool.stats();
        stats.mapped_bytes / stats.page_size_bytes
    }

    pub(crate) fn moved(&self) -> u64 {
        self.pool.stats().pages_moved
    }

    /// The invariants hold, and everything that was checked was what had been written.
    pub(crate) fn assert_intact(&self) {
        self.validate();
        assert_eq!(self.rig.mismatches(), 0, "words differ from what was written");
        self.rig.assert_clean();
    }
}

/// The end of the pool, with what a test has not freed.
impl Drop for Watched<'_> {
    fn drop(&mut self) {
        // SAFETY: the pool is not used after.
        let pool = unsafe { ManuallyDrop::take(&mut self.pool) };
        if let Err((_, error)) = pool.destroy()
            && !std::thread::panicking()
        {
            panic!("{error}");
        }
    }
}

//! A caching allocator under observation.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use vpmm::caching::{CachingAllocator, CachingConfig};
use vpmm::{Error, StreamHandle};

use crate::support::{Held, Rig};

pub(crate) const KIB: u64 = 1 << 10;
pub(crate) const MIB: u64 = 1 << 20;

/// An allocator whose every allocation is looked up in a map of all that are live, filled with a
/// pattern as device work, and checked before it is freed; the books are checked at every step. Any
/// thread may use it.
pub(crate) struct Cached<'a> {
    pub(crate) rig: &'a Rig,
    pub(crate) allocator: CachingAllocator,
    next_seed: AtomicU64,
    /// Bytes by address.
    live: Mutex<BTreeMap<u64, u64>>,
}

impl Rig {
    pub(crate) fn cached(&self) -> Cached<'_> {
        self.cached_with("")
    }

    /// An allocator with settings as PyTorch's text has them.
    pub(crate) fn cached_with(&self, settings: &str) -> Cached<'_> {
        let config: CachingConfig = settings.parse().expect("settings");
        self.observe(CachingAllocator::new(&self.device, &config).expect("an allocator"))
    }

    pub(crate) fn observe(&self, allocator: CachingAllocator) -> Cached<'_> {
        let next_seed = AtomicU64::new(1);
        Cached { rig: self, allocator, next_seed, live: Mutex::default() }
    }
}

impl Cached<'_> {
    fn live(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn try_malloc(
        &self,
        bytes: u64,
        stream: impl Into<StreamHandle>,
    ) -> Result<Held, Error> {
        let stream = stream.into();
        let result = self.allocator.malloc(bytes as usize, stream);
        self.validate();
        let ptr = result?;
        let start = ptr.address();
        assert!(start.is_multiple_of(256), "{start:#x}");
        {
            let mut live = self.live();
            if let Some((other, length)) = live.range(..start + bytes).next_back() {
                assert!(other + length <= start, "{start:#x} +{bytes:#x} overlaps {other:#x}");
            }
            live.insert(start, bytes);
        }
        let seed = self.next_seed.fetch_add(1 << 32, Ordering::Relaxed);
        self.rig.fill(start, bytes, seed, stream);
        Ok(Held { ptr, bytes, seed })
    }

    pub(crate) fn malloc(&self, bytes: u64, stream: impl Into<StreamHandle>) -> Held {
        match self.try_malloc(bytes, stream) {
            Ok(held) => held,
            Err(error) => panic!("malloc({bytes}): {error}\n{:#?}", self.allocator.snapshot()),
        }
    }

    /// Checks the contents in the order of the allocation's stream, and frees.
    pub(crate) fn free(&self, held: Held, own: impl Into<StreamHandle>) {
        held.check(self.rig, own);
        self.give_up(&held);
        self.allocator.free(held.ptr).expect("free");
        self.validate();
    }

    /// An allocation is no longer the caller's: to be said before the free, since from there on
    /// another thread may be given the address.
    pub(crate) fn give_up(&self, held: &Held) {
        assert_eq!(self.live().remove(&held.address()), Some(held.bytes));
    }

    /// Enqueues a look at an allocation on another stream, after what its own was given so far, and
    /// notes that for the allocator.
    pub(crate) fn look_from(
        &self,
        held: &Held,
        own: impl Into<StreamHandle>,
        other: impl Into<StreamHandle>,
    ) {
        let other = other.into();
        self.rig.order(own, other);
        held.check(self.rig, other);
        self.allocator.record_stream(held.ptr, other).expect("the use is noted");
    }

    pub(crate) fn validate(&self) {
        let valid = self.allocator.validate();
        valid.unwrap_or_else(|violation| {
            panic!("{violation}\n{:#?}", self.allocator.snapshot());
        });
    }

    /// The books agree, and everything that was checked was what had been written.
    pub(crate) fn assert_intact(&self) {
        self.validate();
        assert_eq!(self.rig.mismatches(), 0, "words differ from what was written");
        self.rig.assert_clean();
    }

    pub(crate) fn reserved(&self) -> u64 {
        self.allocator.memory_reserved()
    }

    /// Driver calls during an action.
    pub(crate) fn calls(&self, action: impl FnOnce()) -> vpmm::DriverCalls {
        let before = self.rig.driver.calls();
        action();
        self.rig.driver.calls().since(&before)
    }
}

//! What all heaps of a pool may hold together.

#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{OnceLock, Weak};

/// Memory that counts, but that the driver's own pools make.
pub(crate) trait Besides: Send + Sync {
    fn bytes(&self) -> u64;
}

/// Bytes of physical memory, of every heap of one pool. Every handle is counted before it is made,
/// so that two heaps that grow at the same time cannot pass the limit together.
pub(crate) struct Budget {
    limit: AtomicU64,
    held: AtomicU64,
    besides: OnceLock<Weak<dyn Besides>>,
}

impl Budget {
    /// Without a limit.
    pub(crate) fn new() -> Self {
        let (limit, held) = (AtomicU64::new(u64::MAX), AtomicU64::new(0));
        Self { limit, held, besides: OnceLock::new() }
    }

    /// Sets the limit; what is held already stays.
    pub(crate) fn limit_to(&self, bytes: u64) {
        self.limit.store(bytes, Ordering::Relaxed);
    }

    /// The limit, where there is one.
    pub(crate) fn limit(&self) -> Option<u64> {
        Some(self.limit.load(Ordering::Relaxed)).filter(|limit| *limit != u64::MAX)
    }

    /// What is to be counted too.
    pub(crate) fn count_besides(&self, besides: Weak<dyn Besides>) {
        // Once, when the pool is made.
        let _ = self.besides.set(besides);
    }

    /// Bytes that count but are no handle's.
    pub(crate) fn besides(&self) -> u64 {
        let besides = self.besides.get().and_then(Weak::upgrade);
        besides.map_or(0, |besides| besides.bytes())
    }

    /// Bytes that may still be made.
    pub(crate) fn room(&self) -> u64 {
        let limit = self.limit.load(Ordering::Relaxed);
        if limit == u64::MAX {
            return u64::MAX;
        }
        limit.saturating_sub(self.held()).saturating_sub(self.besides())
    }

    /// Bytes of handles that are held.
    pub(crate) fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Counts a handle that is about to be made; `false` where the limit does not allow it.
    pub(crate) fn take(&self, bytes: u64) -> bool {
        let limit = self.limit.load(Ordering::Relaxed);
        let most = if limit == u64::MAX { u64::MAX } else { limit.saturating_sub(self.besides()) };
        let add = |held: u64| held.checked_add(bytes).filter(|sum| *sum <= most);
        self.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok()
    }

    /// A handle that was counted is given up, or was not made.
    pub(crate) fn give_back(&self, bytes: u64) {
        let less = |held: u64| Some(held.saturating_sub(bytes));
        let _ = self.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    struct Small(u64);

    impl Besides for Small {
        fn bytes(&self) -> u64 {
            self.0
        }
    }

    #[test]
    fn a_limit_is_for_all_together() {
        let budget = Budget::new();
        assert!(budget.take(50) && budget.room() == u64::MAX && budget.limit().is_none());
        budget.limit_to(100);
        assert_eq!(budget.limit(), Some(100));
        assert!(budget.take(40) && !budget.take(11) && budget.take(10));
        assert_eq!((budget.held(), budget.room()), (100, 0));
        budget.give_back(30);
        assert_eq!(budget.room(), 30);
        let small: Arc<dyn Besides> = Arc::new(Small(20));
        budget.count_besides(Arc::downgrade(&small));
        assert_eq!(budget.room(), 10);
        assert!(!budget.take(11) && budget.take(10));
    }
}

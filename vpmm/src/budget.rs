//! What all heaps of a pool may hold together.

#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of physical memory, of every heap of one pool. Every handle is counted before it is made, and so is what
/// the driver's own pools are asked for, so that two threads that grow at the same time cannot pass the limit
/// together.
pub(crate) struct Budget {
    limit: AtomicU64,
    held: AtomicU64,
}

impl Budget {
    /// Without a limit.
    pub(crate) fn new() -> Self {
        Self { limit: AtomicU64::new(u64::MAX), held: AtomicU64::new(0) }
    }

    /// Sets the limit; what is held already stays.
    pub(crate) fn limit_to(&self, bytes: u64) {
        self.limit.store(bytes, Ordering::Relaxed);
    }

    /// The limit, where there is one.
    pub(crate) fn limit(&self) -> Option<u64> {
        Some(self.limit.load(Ordering::Relaxed)).filter(|limit| *limit != u64::MAX)
    }

    /// Bytes that may still be made.
    pub(crate) fn room(&self) -> u64 {
        let limit = self.limit.load(Ordering::Relaxed);
        if limit == u64::MAX {
            return u64::MAX;
        }
        limit.saturating_sub(self.held())
    }

    /// Bytes that are held beyond the limit, where that was lowered.
    pub(crate) fn excess(&self) -> u64 {
        self.held().saturating_sub(self.limit.load(Ordering::Relaxed))
    }

    /// Bytes that are counted.
    pub(crate) fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Counts what is about to be made; `false` where the limit does not allow it.
    pub(crate) fn take(&self, bytes: u64) -> bool {
        let most = self.limit.load(Ordering::Relaxed);
        let add = |held: u64| held.checked_add(bytes).filter(|sum| *sum <= most);
        self.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok()
    }

    /// What was counted is given up, or was not made.
    pub(crate) fn give_back(&self, bytes: u64) {
        let less = |held: u64| Some(held.saturating_sub(bytes));
        let _ = self.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_for_all_together() {
        let budget = Budget::new();
        assert!(budget.take(50) && budget.room() == u64::MAX && budget.limit().is_none());
        budget.limit_to(100);
        assert_eq!(budget.limit(), Some(100));
        assert!(budget.take(40) && !budget.take(11) && budget.take(10));
        assert_eq!((budget.held(), budget.room()), (100, 0));
        budget.give_back(30);
        assert_eq!((budget.room(), budget.excess()), (30, 0));
        budget.limit_to(50);
        assert_eq!((budget.room(), budget.excess()), (0, 20));
    }
}

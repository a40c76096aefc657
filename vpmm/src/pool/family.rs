//! What belongs to a pool beside the heap that serves most requests: shared by all its handles.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::Profile;
use super::out_of_memory::Shortage;
use crate::default::Helper;
use crate::heap::Heap;
use crate::heaps::Heaps;
use crate::sharing::Span;

/// Everything of a pool: it ends when this does. The registry keeps it when no handle is left and
/// something is still allocated.
pub(super) struct Family {
    helper: Option<Helper>,
    /// The heaps beside the main one.
    pub(super) heaps: Arc<Heaps>,
    /// What handles get, to be without an indirection.
    profile: Profile,
    /// The heap that serves every request that says nothing else: the profile's.
    main: Arc<dyn Heap>,
    /// What is done where memory runs out.
    pub(super) shortage: Shortage,
    /// Nobody has had a handle at some time: free memory has been given back.
    abandoned: AtomicBool,
    /// No free finds it without a handle any more.
    pub(super) hidden: AtomicBool,
}

impl Family {
    pub(super) fn new(
        profile: Profile,
        heaps: Arc<Heaps>,
        helper: Option<Helper>,
        shortage: Shortage,
    ) -> Self {
        let main = profile.heap();
        let (abandoned, hidden) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { helper, heaps, profile, main, shortage, abandoned, hidden }
    }

    pub(super) fn profile(&self) -> Profile {
        self.profile.clone()
    }

    pub(super) fn main(&self) -> &(dyn Heap + 'static) {
        self.main.as_ref()
    }

    /// Addresses that are the pool's until its end.
    pub(super) fn windows(&self) -> Vec<Span> {
        self.main.windows()
    }

    /// Whether an address is in an allocation outside of [`windows`](Self::windows).
    pub(super) fn holds_outside(&self, address: u64) -> bool {
        // Further heaps come, and graphs' go: they are asked each time.
        self.main.holds_outside(address) || self.heaps.heap_of(address).is_some()
    }

    /// Whether something is in the hands of callers.
    pub(super) fn is_in_use(&self) -> bool {
        self.main.live_count() > 0 || self.heaps.live_count() > 0
    }

    /// Nobody has a handle any more, but allocations are out: the free memory is of no further use.
    /// Once, since a pool that is only freed from would else be asked at every free.
    pub(super) fn abandon(&self) {
        if !self.abandoned.swap(true, Ordering::Relaxed) {
            // What the driver would not take back goes when the pool ends.
            let _ = self.heaps.trim_to(0);
        }
    }
}

impl Drop for Family {
    /// Everything ends here, and in this thread: what tells pools about streams owns none of it
    /// afterwards.
    fn drop(&mut self) {
        // Its thread has ended before the memory goes.
        self.helper = None;
        self.heaps.retire();
        self.main.retire();
    }
}

//! What belongs to a pool beside the heap that serves most requests: shared by all its handles.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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
    /// What was left when free memory was given back last, because nobody had a handle.
    left: Mutex<Option<Left>>,
    /// No free finds it without a handle any more.
    pub(super) hidden: AtomicBool,
}

/// What a pool without handles has, in bytes.
#[derive(Clone, Copy)]
struct Left {
    live: u64,
    held: u64,
}

/// Free memory is given back again when this fraction of what was allocated has been freed since, and so many bytes; or
/// when the pool has grown by as many.
const FREED_SINCE: u64 = 8;
const LEAST_BYTES: u64 = 16 << 20;

impl Family {
    pub(super) fn new(
        profile: Profile,
        heaps: Arc<Heaps>,
        helper: Option<Helper>,
        shortage: Shortage,
    ) -> Self {
        let main = profile.heap();
        let (left, hidden) = (Mutex::new(None), AtomicBool::new(false));
        Self { helper, heaps, profile, main, shortage, left, hidden }
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

    /// Nobody has a handle any more, but allocations are out: the free memory is of no further use. Not at every
    /// free of a pool that is only freed from, since each is asked about then.
    pub(super) fn abandon(&self) {
        let now = self.now();
        {
            let mut left = self.left();
            if let Some(left) = left.as_mut()
                && left.live.saturating_sub(now.live) < LEAST_BYTES.max(left.live / FREED_SINCE)
                && now.held.saturating_sub(left.held) < LEAST_BYTES
            {
                // Whoever had a handle again may have left more.
                left.live = left.live.max(now.live);
                return;
            }
            // Whoever comes meanwhile leaves it to this thread.
            *left = Some(now);
        }
        // What the driver would not take back goes when the pool ends.
        let given = self.heaps.trim_to(0).unwrap_or(0);
        *self.left() = Some(Left { held: now.held.saturating_sub(given), ..now });
    }

    fn left(&self) -> MutexGuard<'_, Option<Left>> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Left {
        let mut stats = self.main.stats();
        stats.add(&self.heaps.stats());
        let live = stats.live_bytes + stats.small_live_bytes;
        Left { live, held: stats.mapped_bytes + stats.small_mapped_bytes }
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

//! The largest free regions, for people.

use super::PagedPool;
use crate::fence::Fence;
use crate::memory_map::{FreePiece, Holder, Largest};
use crate::region::State;

impl PagedPool {
    pub(crate) fn largest_free(&self) -> Vec<FreePiece> {
        let mut largest = Largest::default();
        let space = self.lock_space();
        let free = |state| matches!(state, State::Idle | State::Pending);
        for region in space.map.iter().filter(|region| free(region.state())) {
            let holder = || match region.fence() {
                Fence::PASSED => Holder::Everybody,
                fence => Holder::Stream(space.timelines.stream(fence.timeline)),
            };
            largest.offer(region.start(), region.bytes(), holder);
        }
        largest.into_pieces()
    }
}

//! The largest free regions, for people.

use super::PagedPool;
use crate::fence::Fence;
use crate::memory_map::{FreePiece, Holder, Largest};
use crate::region::{Region, State};

impl PagedPool {
    pub(crate) fn largest_free(&self) -> Vec<FreePiece> {
        let mut largest = Largest::default();
        let space = self.lock_space();
        // What waits for uses on further streams is nobody's to have.
        let waits = |region: &Region| region.fence().timeline == space.uses.timeline();
        let free = |region: &&Region| match region.state() {
            State::Idle => true,
            State::Pending => !waits(region),
            State::Live | State::Zombie | State::Hole | State::Transit => false,
        };
        for region in space.map.iter().filter(free) {
            let holder = || match region.fence() {
                Fence::PASSED => Holder::Everybody,
                fence => Holder::Stream(space.timelines.stream(fence.timeline)),
            };
            largest.offer(region.start(), region.bytes(), holder);
        }
        largest.into_pieces()
    }
}

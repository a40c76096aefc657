//! Every block of pages.

use super::PagedPool;
use crate::region::State;
use crate::snapshot::{Block, BlockState, Segment, Segments};

impl PagedPool {
    /// Every segment and block, without small requests, whose memory is the driver's pool's.
    pub(crate) fn snapshot(&self) -> Vec<Segment> {
        let space = self.lock_space();
        let mut segments = Segments::default();
        for region in space.map.iter() {
            let state = match region.state() {
                State::Live => BlockState::Live,
                // What waits for further streams has a fence of a timeline that is no stream's.
                State::Pending if region.fence().timeline == space.uses.timeline() => {
                    BlockState::Deferred
                }
                State::Pending => BlockState::Pending,
                State::Idle => BlockState::Idle,
                State::Zombie | State::Hole | State::Transit => continue,
            };
            let (address, bytes) = (region.start(), region.bytes());
            segments.extend_to(address, bytes, false);
            segments.put(Block { address, bytes, state, stream: None });
        }
        segments.into_vec()
    }
}

//! Every block of pages.

use super::PagedPool;
use crate::device::StreamHandle;
use crate::region::State;
use crate::snapshot::{Block, BlockState, Segment, Segments};

impl PagedPool {
    /// Every segment and block, without small requests, whose memory is the driver's pool's.
    pub(crate) fn snapshot(&self) -> Vec<Segment> {
        let space = self.lock_space();
        let is_legacy = |of: u64| space.streams.get(of) == Some(StreamHandle::LEGACY);
        let number = |stream: u64| if is_legacy(stream) { 0 } else { stream };
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
            let stream = match state {
                BlockState::Live => {
                    Some(space.chunks[region.reservation() as usize].stream(address))
                }
                BlockState::Pending => Some(space.timelines.stream(region.fence().timeline)),
                _ => None,
            };
            segments.put(Block { address, bytes, state, stream: stream.map(number) });
        }
        segments.into_vec()
    }
}

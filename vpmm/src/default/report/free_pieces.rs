//! The largest free blocks, for people.

use crate::default::class::UNIT_BYTES;
use crate::default::front::admit::LEGACY;
use crate::default::{Core, lock};
use crate::memory_map::{FreePiece, Holder, Largest};

impl Core {
    pub(crate) fn largest_free(&self) -> Vec<FreePiece> {
        let mut largest = Largest::default();
        // Through to the end, so that every block's stream is there.
        let registry = lock(&self.registry);
        let space = self.space.lock();
        for block in space.every_free_block() {
            let holder = || match block.owner().of_stream() {
                None => Holder::Everybody,
                Some((index, _)) => match registry.last_stream(index) {
                    LEGACY => Holder::LegacyStream,
                    stream => Holder::Stream(stream),
                },
            };
            let start = self.base + u64::from(block.start()) * UNIT_BYTES;
            largest.offer(start, u64::from(block.units()) * UNIT_BYTES, holder);
        }
        largest.into_pieces()
    }
}

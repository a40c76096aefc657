//! Every block that a pool has memory for.

#![forbid(unsafe_code)]

/// What a block is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum BlockState {
    /// In the hands of a caller.
    Live,
    /// Freed, and kept in front for one thread's next requests on the same stream.
    Cached,
    /// Freed, and waiting for uses on [further streams](crate::Pool::record_stream). The statistics count it
    /// as pending.
    Deferred,
    /// Free to its stream, which may still be using it.
    Pending,
    /// Free to every stream.
    Idle,
}

/// A piece of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Block {
    /// Its first byte.
    pub address: u64,
    /// Its bytes, as the pool rounded them.
    pub bytes: u64,
    /// What it is.
    pub state: BlockState,
    /// The driver's number (`cuStreamGetId`) of the stream that it was allocated on, or that freed it
    /// last; 0 for the legacy default stream. `None` where the pool does not keep it.
    pub stream: Option<u64>,
}

/// Which of a pool's heaps memory is of.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum HeapName {
    /// The one that serves requests that say nothing else.
    Main,
    /// A [graph's pool](crate::Pool::graph_pool); they are counted from 0.
    Graph(usize),
    /// A [tagged heap](crate::Pool::tagged).
    Tagged(String),
}

/// Contiguous addresses with memory.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Segment {
    /// The first byte.
    pub address: u64,
    /// Its bytes.
    pub bytes: u64,
    /// Whether it is for small blocks.
    pub is_small: bool,
    /// Which heap it is of.
    pub heap: HeapName,
    /// Whether its memory is the device's at the moment: see [`Pool::suspend`](crate::Pool::suspend).
    pub is_asleep: bool,
    /// Its blocks, in ascending order. What another thread just moves or takes is left out.
    pub blocks: Vec<Block>,
}

impl Segment {
    /// Bytes of blocks in one state.
    pub fn bytes_in(&self, state: BlockState) -> u64 {
        self.blocks.iter().filter(|block| block.state == state).map(|block| block.bytes).sum()
    }
}

/// Puts blocks in ascending order into segments.
#[derive(Default)]
pub(crate) struct Segments(Vec<Segment>);

impl Segments {
    /// Memory follows: in the segment that ends there, or in a new one.
    pub(crate) fn extend_to(&mut self, address: u64, bytes: u64, is_small: bool) {
        match self.0.last_mut() {
            Some(last) if last.address + last.bytes == address && last.is_small == is_small => {
                last.bytes += bytes;
            }
            _ => self.0.push(Segment {
                address,
                bytes,
                is_small,
                heap: HeapName::Main,
                is_asleep: false,
                blocks: Vec::new(),
            }),
        }
    }

    /// A block, which begins in the last segment.
    pub(crate) fn put(&mut self, block: Block) {
        if let Some(last) = self.0.last_mut() {
            last.blocks.push(block);
        }
    }

    pub(crate) fn into_vec(self) -> Vec<Segment> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_side_by_side_is_one_segment() {
        let mut segments = Segments::default();
        segments.extend_to(100, 50, true);
        segments.extend_to(150, 50, true);
        let block = |address, state| Block { address, bytes: 30, state, stream: None };
        segments.put(block(100, BlockState::Live));
        segments.put(block(130, BlockState::Idle));
        segments.extend_to(200, 50, false);
        segments.extend_to(300, 50, false);
        let segments = segments.into_vec();
        let of: Vec<_> =
            segments.iter().map(|of| (of.address, of.bytes, of.blocks.len())).collect();
        assert_eq!(of, [(100, 100, 2), (200, 50, 0), (300, 50, 0)]);
        assert_eq!(segments[0].bytes_in(BlockState::Live), 30);
        assert_eq!(segments[0].bytes_in(BlockState::Cached), 0);
    }
}

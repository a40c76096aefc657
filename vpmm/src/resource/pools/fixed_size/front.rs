//! The blocks that one stream freed last, for its next requests: under a lock of its own, so that streams
//! do not meet.

#![forbid(unsafe_code)]

use smallvec::SmallVec;

use super::chunks::BlockId;
use crate::lock::SpinLock;
use crate::resource::pools::blocks::NOBODY;

/// Blocks in a front.
const DEPTH: usize = 16;

/// What goes in or out of a front at once.
pub(super) const BATCH: usize = DEPTH / 2;

pub(super) type Batch = SmallVec<[BlockId; DEPTH]>;

/// No stream's number.
const NO_STREAM: u64 = u64::MAX - 1;

struct Stack {
    /// Whose it is.
    stream: u64,
    /// The stream's lane.
    lane: u32,
    /// The latest last.
    blocks: Batch,
}

/// What came of a block that was to be put into a front.
pub(super) enum Put {
    In,
    /// It is in, and these older ones are out: their lane has them.
    Over(u32, Batch),
    /// The front is another stream's by now, or nobody's.
    NotIts,
}

/// One stream's front. What is in it counts as freed when it leaves: no lane's epoch has it before.
///
/// Who has found it may come late: the stream has ended meanwhile, in another thread, and the front is another's.
/// So whose it is is looked at under its lock.
pub(super) struct Front(SpinLock<Stack>);

impl Front {
    pub(super) fn new(stream: u64, lane: u32) -> Self {
        Self(SpinLock::new(Stack { stream, lane, blocks: Batch::new() }))
    }

    /// It is another stream's from here on, and empty.
    pub(super) fn begin(&self, stream: u64, lane: u32) {
        let mut stack = self.0.lock();
        (stack.stream, stack.lane) = (stream, lane);
    }

    /// It is nobody's from here on: the lane that it was of, which may soon be another stream's, and the blocks.
    pub(super) fn end(&self) -> (u32, Batch) {
        let mut stack = self.0.lock();
        stack.stream = NO_STREAM;
        (std::mem::replace(&mut stack.lane, NOBODY), std::mem::take(&mut stack.blocks))
    }

    /// The stream's latest block.
    #[inline]
    pub(super) fn pop(&self, stream: u64) -> Option<BlockId> {
        let mut stack = self.0.lock();
        if stack.stream == stream { stack.blocks.pop() } else { None }
    }

    /// Puts in a block that the stream has freed. A full front gives its older half away first.
    #[inline]
    pub(super) fn push(&self, stream: u64, block: BlockId) -> Put {
        let mut stack = self.0.lock();
        if stack.stream != stream {
            return Put::NotIts;
        }
        if stack.blocks.len() < DEPTH {
            stack.blocks.push(block);
            return Put::In;
        }
        let older = stack.blocks.drain(..BATCH).collect();
        stack.blocks.push(block);
        Put::Over(stack.lane, older)
    }

    /// Puts blocks in, as far as there is room: those that there is none for.
    pub(super) fn fill(&self, blocks: impl Iterator<Item = BlockId>) -> Batch {
        let mut stack = self.0.lock();
        let mut rest = Batch::new();
        for block in blocks {
            let into = if stack.blocks.len() < DEPTH { &mut stack.blocks } else { &mut rest };
            into.push(block);
        }
        rest
    }

    /// Takes everything out: the lane that it goes to, and the blocks.
    pub(super) fn drain(&self) -> (u32, Batch) {
        let mut stack = self.0.lock();
        (stack.lane, std::mem::take(&mut stack.blocks))
    }

    /// The stream's lane, and how many blocks there are.
    pub(super) fn look(&self) -> (u32, usize) {
        let stack = self.0.lock();
        (stack.lane, stack.blocks.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resource::pools::fixed_size::chunks::Chunks;
    use crate::units::DevicePtr;

    #[test]
    fn who_has_found_it_and_comes_late_gets_and_leaves_nothing() {
        let chunks = Chunks::new(256, 4);
        let chunk = chunks.add(DevicePtr::from_address(1 << 40), 4).expect("a chunk");
        let [own, others] = [0, 1].map(|at| chunks.blocks_of(chunk).nth(at).expect("a block"));
        let front = Front::new(7, 1);
        assert!(matches!(front.push(7, own), Put::In));
        let (lane, left) = front.end();
        assert_eq!((lane, &left[..]), (1, &[own][..]));
        // Nobody's.
        assert!(front.pop(7).is_none() && matches!(front.push(7, own), Put::NotIts));
        // Another stream's.
        front.begin(8, 2);
        assert!(matches!(front.push(8, others), Put::In));
        assert!(front.pop(7).is_none() && matches!(front.push(7, own), Put::NotIts));
        assert_eq!(front.pop(8), Some(others));
        assert_eq!(front.pop(8), None);
    }
}

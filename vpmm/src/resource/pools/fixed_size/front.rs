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

struct Stack {
    /// The stream's lane.
    lane: u32,
    /// The latest last.
    blocks: Batch,
}

/// One stream's front. What is in it counts as freed when it leaves: no lane's epoch has it before.
pub(super) struct Front(SpinLock<Stack>);

impl Front {
    pub(super) fn new(lane: u32) -> Self {
        Self(SpinLock::new(Stack { lane, blocks: Batch::new() }))
    }

    /// It is another stream's from here on, and empty.
    pub(super) fn begin(&self, lane: u32) {
        self.0.lock().lane = lane;
    }

    /// It is nobody's from here on: the lane that it was of, which may soon be another stream's, and the blocks.
    pub(super) fn end(&self) -> (u32, Batch) {
        let mut stack = self.0.lock();
        (std::mem::replace(&mut stack.lane, NOBODY), std::mem::take(&mut stack.blocks))
    }

    #[inline]
    pub(super) fn pop(&self) -> Option<BlockId> {
        self.0.lock().blocks.pop()
    }

    /// Puts a block in. A full front gives its older half away first.
    #[inline]
    pub(super) fn push(&self, block: BlockId) -> Option<(u32, Batch)> {
        let mut stack = self.0.lock();
        if stack.blocks.len() < DEPTH {
            stack.blocks.push(block);
            return None;
        }
        let older = stack.blocks.drain(..BATCH).collect();
        stack.blocks.push(block);
        Some((stack.lane, older))
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

//! What is where.

#![forbid(unsafe_code)]

use super::block::{NONE, State};
use super::books::Books;
use super::core::LEGACY;
use super::size::Kind;

/// What a block is, under PyTorch's names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum BlockState {
    /// In the hands of a caller: `active_allocated`.
    ActiveAllocated,
    /// Freed, while further streams may still use it: `active_pending_free`.
    ActivePendingFree,
    /// Free: `inactive`.
    Inactive,
}

impl BlockState {
    /// PyTorch's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ActiveAllocated => "active_allocated",
            Self::ActivePendingFree => "active_pending_free",
            Self::Inactive => "inactive",
        }
    }
}

/// A piece of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct SnapshotBlock {
    /// Its first byte.
    pub address: u64,
    /// Its bytes.
    pub size: u64,
    /// What the caller asked for; 0 where it is free.
    pub requested_size: u64,
    /// What it is.
    pub state: BlockState,
}

/// A segment, and what it is cut into.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct SnapshotSegment {
    /// The device.
    pub device: u32,
    /// Its first byte.
    pub address: u64,
    /// Its bytes.
    pub total_size: u64,
    /// Bytes in the hands of callers.
    pub allocated_size: u64,
    /// These, and what was freed while further streams may still use it.
    pub active_size: u64,
    /// What callers asked for of the latter.
    pub requested_size: u64,
    /// The driver's number of the stream that it belongs to; 0 for the legacy default stream, and
    /// for one that has ended.
    pub stream: u64,
    /// Whether it is of the small pool: PyTorch's `segment_type`.
    pub is_small: bool,
    /// Its blocks, in order, without gap.
    pub blocks: Vec<SnapshotBlock>,
}

impl Books {
    /// Every segment, by address.
    pub(super) fn snapshot(&self, device: u32) -> Vec<SnapshotSegment> {
        let segments = self.segments.iter();
        segments
            .map(|(address, segment)| {
                let head = self.arena.get(segment.head);
                let stream = self.places[head.place.get() as usize].stream;
                let mut of = SnapshotSegment {
                    device,
                    address: *address,
                    total_size: segment.bytes,
                    allocated_size: 0,
                    active_size: 0,
                    requested_size: 0,
                    stream: if stream == LEGACY { 0 } else { stream },
                    is_small: head.kind.get() == Kind::Small,
                    blocks: Vec::new(),
                };
                let mut next = segment.head;
                while next != NONE {
                    let block = self.arena.get(next);
                    let (size, requested) = (block.bytes(), block.requested.get());
                    let (state, requested_size) = match block.state.get() {
                        State::Allocated => (BlockState::ActiveAllocated, requested),
                        State::Waiting => (BlockState::ActivePendingFree, requested),
                        State::Free | State::Leaving | State::Vacant => (BlockState::Inactive, 0),
                    };
                    of.allocated_size +=
                        if state == BlockState::ActiveAllocated { size } else { 0 };
                    of.active_size += if state == BlockState::Inactive { 0 } else { size };
                    of.requested_size += requested_size;
                    let address = block.address();
                    of.blocks.push(SnapshotBlock { address, size, requested_size, state });
                    next = block.next.get();
                }
                of
            })
            .collect()
    }
}

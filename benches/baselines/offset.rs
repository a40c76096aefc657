//! The crate offset-allocator: bins of sizes in a bitmap of two levels, at most an eighth of a
//! block is lost to its bin.

use offset_allocator::{Allocation, Allocator};

use super::{SPACE, UNIT, units};
use crate::rig::{Lane, Subject};

pub(crate) struct Offset(Allocator);

impl Offset {
    pub(crate) fn new() -> Self {
        let size = u32::try_from(SPACE / UNIT).expect("fewer units than 2^32");
        Self(Allocator::with_max_allocs(size, 1 << 20))
    }
}

impl Subject for Offset {
    type Block = Allocation;

    fn malloc(&mut self, bytes: usize, _lane: Lane) -> Allocation {
        let size = u32::try_from(units(bytes)).expect("fewer units than 2^32");
        self.0.allocate(size).expect("the space is large enough")
    }

    fn free(&mut self, block: Allocation, _lane: Lane) {
        self.0.free(block);
    }
}

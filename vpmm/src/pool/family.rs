//! What belongs to a pool beside the heap that serves most requests: shared by all its clones.

use std::sync::Arc;

use crate::default::Helper;
use crate::heap::Heap;
use crate::heaps::Heaps;

pub(super) struct Family {
    /// First, so that its thread has ended when the memory is given back.
    _helper: Option<Helper>,
    /// The heaps beside the main one.
    pub(super) heaps: Arc<Heaps>,
    /// The heap that serves every request that says nothing else.
    main: Arc<dyn Heap>,
}

impl Family {
    pub(super) fn new(main: Arc<dyn Heap>, heaps: Arc<Heaps>, helper: Option<Helper>) -> Self {
        Self { _helper: helper, heaps, main }
    }

    pub(super) fn main(&self) -> &(dyn Heap + 'static) {
        self.main.as_ref()
    }
}

//! The profile as one of the kinds of pool.

use std::fmt;

use super::PagedPool;
use super::small::Small;
use crate::allocation::Allocation;
use crate::device::{Device, StreamHandle};
use crate::error::Result;
use crate::heap::Heap;
use crate::layout::Layout;
use crate::location::Access;
use crate::memory_map::FreePiece;
use crate::ordering::Mark;
use crate::region::State;
use crate::snapshot::Segment;
use crate::stats::Stats;
use crate::units::DevicePtr;
use crate::validate::Violation;

impl Heap for PagedPool {
    fn retire(&self) {
        self.retire();
    }

    fn free(&self, ptr: DevicePtr, stream: StreamHandle) -> Result<()> {
        self.free(ptr, stream)
    }

    fn record_stream(&self, ptr: DevicePtr, stream: StreamHandle) -> Result<()> {
        self.record_stream(ptr, stream)
    }

    fn mark(&self, stream: StreamHandle) -> Result<Mark> {
        self.mark(stream)
    }

    fn follows(&self, stream: StreamHandle, mark: &Mark) -> Result<()> {
        self.follows(stream, mark)
    }

    fn passed(&self, mark: &Mark) -> Result<()> {
        self.passed(mark)
    }

    fn trim_to(&self, keep_bytes: u64) -> Result<u64> {
        self.trim_to(keep_bytes)
    }

    fn reset_peaks(&self) {
        self.reset_peaks();
    }

    fn allocation(&self, address: u64) -> Option<Allocation> {
        self.allocation(address)
    }

    fn access_of(&self, device: &Device) -> Access {
        self.access_of(device)
    }

    fn set_access(&self, device: &Device, access: Access) -> Result<()> {
        self.set_access(device, access)
    }

    fn wait_for_pending(&self, bytes: u64) -> Result<bool> {
        self.wait_for_pending(bytes)
    }

    fn wait_for_frees(&self, with_device: bool) -> Result<()> {
        self.wait_for_frees(with_device).map(|_| ())
    }

    fn has_lost(&self) -> bool {
        self.lock_space().uses.has_due()
    }

    fn live_count(&self) -> u64 {
        let of_pages = self.lock_space().map.totals().regions(State::Live);
        of_pages + self.small.as_ref().map_or(0, Small::count)
    }

    fn holds_outside(&self, address: u64) -> bool {
        self.small.as_ref().is_some_and(|small| small.holds(address))
    }

    fn largest_free(&self) -> Vec<FreePiece> {
        self.largest_free()
    }

    fn stats(&self) -> Stats {
        self.stats()
    }

    fn layout(&self) -> Layout {
        self.layout()
    }

    fn snapshot(&self) -> Vec<Segment> {
        self.snapshot()
    }

    fn validate(&self) -> Result<(), Violation> {
        self.validate()
    }

    fn debug(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.debug(f)
    }
}

//! The profile as one of the kinds of pool.

use std::fmt;

use super::Core;
use crate::allocation::Allocation;
use crate::device::{Device, StreamHandle};
use crate::error::Result;
use crate::heap::Heap;
use crate::layout::Layout;
use crate::location::Access;
use crate::memory_map::FreePiece;
use crate::ordering::Mark;
use crate::snapshot::Segment;
use crate::stats::Stats;
use crate::units::DevicePtr;
use crate::validate::Violation;

impl Heap for Core {
    fn retire(&self) {
        self.retire();
    }

    fn free(&self, ptr: DevicePtr, stream: StreamHandle) -> Result<()> {
        self.free(ptr, stream)
    }

    fn record_stream(&self, ptr: DevicePtr, stream: StreamHandle) -> Result<()> {
        self.note_use(ptr, stream)
    }

    fn mark(&self, stream: StreamHandle) -> Result<Mark> {
        self.take_mark(stream)
    }

    fn follows(&self, stream: StreamHandle, mark: &Mark) -> Result<()> {
        self.follow(stream, mark)
    }

    fn passed(&self, mark: &Mark) -> Result<()> {
        self.mark_passed(mark)
    }

    fn trim_to(&self, keep_bytes: u64) -> Result<u64> {
        self.trim(keep_bytes)
    }

    fn reset_peaks(&self) {
        self.restart_peaks();
    }

    fn allocation(&self, address: u64) -> Option<Allocation> {
        self.find(address)
    }

    fn access_of(&self, device: &Device) -> Access {
        self.access_of(device)
    }

    fn set_access(&self, device: &Device, access: Access) -> Result<()> {
        self.set_access(device, access)
    }

    /// The ladder's last step.
    fn wait_for_pending(&self, _bytes: u64) -> Result<bool> {
        Ok(false)
    }

    fn wait_for_frees(&self, with_device: bool) -> Result<()> {
        self.wait_for_past(with_device)
    }

    fn has_lost(&self) -> bool {
        self.has_lost()
    }

    fn live_count(&self) -> u64 {
        self.stats().live_count
    }

    fn holds_outside(&self, _address: u64) -> bool {
        false
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

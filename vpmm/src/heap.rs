//! What every kind of pool can do, apart from the hot path.

use std::fmt;

use crate::allocation::Allocation;
use crate::device::{Device, StreamHandle};
use crate::error::Result;
use crate::layout::Layout;
use crate::location::Access;
use crate::memory_map::FreePiece;
use crate::ordering::Mark;
use crate::sharing::Source;
use crate::snapshot::Segment;
use crate::stats::Stats;
use crate::units::DevicePtr;
use crate::validate::Violation;

/// The other heaps of a pool, for calls of the main one that are theirs.
pub(crate) trait Beside: Send + Sync {
    /// Serves a request whose stream takes part in the capture of a graph with memory of its own.
    fn malloc(&self, bytes: usize, stream: StreamHandle) -> Option<Result<DevicePtr>>;

    /// Frees what another heap handed out; `None` where none of them has the address.
    fn free(&self, ptr: DevicePtr, stream: StreamHandle) -> Option<Result<()>>;

    /// Makes a call with what a stream that takes part in such a capture is called there, and is until that returns;
    /// `None` for one that takes part in none.
    fn while_capturing(
        &self,
        stream: StreamHandle,
        call: &dyn Fn(u64) -> Result<()>,
    ) -> Option<Result<()>>;

    /// Gives back what other heaps can do without; `wait` for it on the host, too. Whether there
    /// was anything.
    fn make_room(&self, wait: bool) -> bool;
}

/// A pool of one profile. What each call means is said at the method of [`Pool`](crate::Pool) with
/// the same name.
pub(crate) trait Heap: Source + Send + Sync {
    /// The owner lets go: waits for the work that uses the memory, and is told of no stream's end any
    /// more. Nobody uses the pool from here on.
    fn retire(&self);

    fn free(&self, ptr: DevicePtr, stream: StreamHandle) -> Result<()>;

    fn record_stream(&self, ptr: DevicePtr, stream: StreamHandle) -> Result<()>;
    fn mark(&self, stream: StreamHandle) -> Result<Mark>;
    fn follows(&self, stream: StreamHandle, mark: &Mark) -> Result<()>;
    fn passed(&self, mark: &Mark) -> Result<()>;

    fn trim_to(&self, keep_bytes: u64) -> Result<u64>;
    fn reset_peaks(&self);
    fn allocation(&self, address: u64) -> Option<Allocation>;

    fn access_of(&self, device: &Device) -> Access;
    fn set_access(&self, device: &Device, access: Access) -> Result<()>;

    /// Waits on the host for what was freed, where that is more than a refused request of so many
    /// bytes has done; answers whether it did.
    fn wait_for_pending(&self, bytes: u64) -> Result<bool>;
    /// Waits on the host for what was freed so far, which is everybody's then: as far as events tell of it, or
    /// `with_device` for the rest.
    fn wait_for_frees(&self, with_device: bool) -> Result<()>;
    /// Whether there is such a rest.
    fn has_lost(&self) -> bool;
    /// Allocations in the hands of callers. No driver call.
    fn live_count(&self) -> u64;
    /// Whether an address is in an allocation that is in none of the reservations.
    fn holds_outside(&self, address: u64) -> bool;
    /// The largest free pieces, the largest first. No driver call.
    fn largest_free(&self) -> Vec<FreePiece>;

    fn stats(&self) -> Stats;
    fn layout(&self) -> Layout;
    fn snapshot(&self) -> Vec<Segment>;
    fn validate(&self) -> Result<(), Violation>;
    fn debug(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result;
}

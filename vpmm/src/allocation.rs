//! What a pool knows about one allocation.

#![forbid(unsafe_code)]

use crate::device::StreamHandle;
use crate::units::DevicePtr;

/// An allocation, found from any address in it: see [`Pool::allocation`](crate::Pool::allocation).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Allocation {
    /// Its first byte.
    pub start: DevicePtr,
    /// Its bytes, as the pool rounded them.
    pub bytes: u64,
    /// The stream that it was allocated on, where the library owns that and it has not ended, or
    /// where it is the legacy default stream.
    pub stream: Option<StreamHandle>,
}

//! What happened since the pool was made.

#![forbid(unsafe_code)]

#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub(super) struct Counters {
    /// Handles made, and their granules.
    pub(super) created: u64,
    pub(super) created_granules: u64,
    /// Handles mapped elsewhere, and their granules.
    pub(super) moved: u64,
    pub(super) moved_granules: u64,
    /// Requests that mapped something.
    pub(super) growths: u64,
    /// Times that other streams' memory was asked for before growing.
    pub(super) called_in: u64,
    /// Epochs closed.
    pub(super) closed: u64,
    /// Waits for the GPU: on the device and on the host.
    pub(super) device_waits: u64,
    pub(super) host_waits: u64,
    /// Times that the driver would not unmap a zombie.
    pub(super) failed_unmaps: u64,
}

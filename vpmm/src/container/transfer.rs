//! Copies that go on beside the host.

use std::fmt;
use std::mem::ManuallyDrop;

use bytemuck::Pod;

use super::pinned::PinnedVec;
use crate::error::Result;
use crate::resource::{MemoryResource, PinnedHost};
use crate::stream::Event;

/// A copy between page-locked memory and a device that is under way: it owns the host's values.
///
/// Its drop waits for the copy. Where that fails (the context is lost) the memory is never freed.
#[must_use = "the values are in here"]
pub struct Transfer<T: Pod, R: MemoryResource = PinnedHost> {
    values: ManuallyDrop<PinnedVec<T, R>>,
    done: Event,
}

impl<T: Pod, R: MemoryResource> Transfer<T, R> {
    /// The values of a copy, and an event recorded behind it.
    pub(super) fn new(values: PinnedVec<T, R>, done: Event) -> Self {
        Self { values: ManuallyDrop::new(values), done }
    }

    /// Whether the copy is done.
    ///
    /// # Errors
    /// Those of [`Event::is_complete`].
    pub fn is_complete(&self) -> Result<bool> {
        self.done.is_complete()
    }

    /// Waits for the copy on the host, and gives the values back.
    ///
    /// # Errors
    /// Those of [`Event::synchronize`].
    pub fn wait(self) -> Result<PinnedVec<T, R>> {
        self.done.synchronize()?;
        let mut transfer = ManuallyDrop::new(self);
        // SAFETY: neither field is used again, since the transfer is not dropped.
        let values = unsafe { ManuallyDrop::take(&mut transfer.values) };
        // SAFETY: as above.
        unsafe { std::ptr::drop_in_place(&raw mut transfer.done) };
        Ok(values)
    }
}

impl<T: Pod, R: MemoryResource> Drop for Transfer<T, R> {
    fn drop(&mut self) {
        if self.done.synchronize().is_ok() {
            // SAFETY: here alone, and `wait` does not come here once it has taken them.
            unsafe { ManuallyDrop::drop(&mut self.values) };
        }
    }
}

impl<T: Pod, R: MemoryResource> fmt::Debug for Transfer<T, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Transfer({:?})", self.done)
    }
}

//! A limit on what is allocated.

#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

use super::undo::or_undo;
use crate::device::StreamHandle;
use crate::error::{Error, Result};
use crate::resource::request::{MIN_ALIGN, check_align, is_of_nothing};
use crate::resource::{Description, MemoryResource};
use crate::units::{Bytes, DevicePtr, round_up};

/// Refuses requests that would bring what is allocated through it above a limit.
///
/// Each request counts in whole units of 256 bytes, or of another alignment. What is refused here counts nothing,
/// not for a moment: two threads that ask at the same time cannot fail each other. What is passed on counts from
/// before the call below, and no more once that has failed. One atomic operation a call beside those below.
/// RMM: `limiting_resource_adaptor`.
///
/// What was allocated through it must be freed through it, with its size, for its count to be right.
///
/// ```
/// use vpmm::resource::{HostMalloc, Limiting, MemoryResource};
/// use vpmm::StreamHandle;
///
/// let limiting = Limiting::new(HostMalloc::new(), 1000);
/// let stream = StreamHandle::LEGACY;
/// let ptr = limiting.allocate(700, 256, stream)?; // counts as 768
/// assert!(limiting.allocate(233, 256, stream).is_err_and(|error| error.is_out_of_memory()));
/// limiting.deallocate(ptr, 700, 256, stream)?;
/// assert_eq!(limiting.allocated_bytes(), 0);
/// # Ok::<(), vpmm::Error>(())
/// ```
#[derive(Debug)]
pub struct Limiting<R> {
    upstream: R,
    limit_bytes: u64,
    unit_bytes: u64,
    allocated: AtomicU64,
}

impl<R: MemoryResource> Limiting<R> {
    /// At most `limit_bytes` of this resource, counted in units of 256 bytes.
    pub fn new(upstream: R, limit_bytes: u64) -> Self {
        Self::with_alignment(upstream, limit_bytes, MIN_ALIGN)
    }

    /// At most `limit_bytes`, counted in units of this many bytes, of which 0 counts as 1.
    pub fn with_alignment(upstream: R, limit_bytes: u64, alignment: usize) -> Self {
        let unit_bytes = alignment.max(1) as u64;
        Self { upstream, limit_bytes, unit_bytes, allocated: AtomicU64::new(0) }
    }

    /// What is below.
    pub fn upstream(&self) -> &R {
        &self.upstream
    }

    /// The limit, in bytes.
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// What counts as allocated now, in bytes.
    pub fn allocated_bytes(&self) -> u64 {
        self.allocated.load(Ordering::Relaxed)
    }

    fn give_back(&self, units: u64) {
        let less = |allocated: u64| Some(allocated.saturating_sub(units));
        // Never refused: the closure always has an answer.
        let _ = self.allocated.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }
}

impl<R: MemoryResource> MemoryResource for Limiting<R> {
    /// # Errors
    /// [`Error::OutOfMemory`] with the limit; what is below.
    fn allocate(&self, bytes: usize, align: usize, stream: StreamHandle) -> Result<DevicePtr> {
        check_align(align, usize::MAX)?;
        let asked = bytes as u64;
        let unit_bytes = self.unit_bytes;
        let units =
            round_up(asked, unit_bytes).ok_or(Error::SizeOverflow { bytes: asked, unit_bytes })?;
        let more = |allocated: u64| {
            allocated.checked_add(units).filter(|allocated| *allocated <= self.limit_bytes)
        };
        self.allocated
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)
            .map_err(|allocated| Error::exhausted(units, allocated, Some(self.limit_bytes)))?;
        or_undo(|| self.upstream.allocate(bytes, align, stream), || self.give_back(units))
    }

    fn deallocate(
        &self,
        ptr: DevicePtr,
        bytes: usize,
        align: usize,
        stream: StreamHandle,
    ) -> Result<()> {
        if is_of_nothing(ptr, bytes)? {
            return Ok(());
        }
        self.upstream.deallocate(ptr, bytes, align, stream)?;
        self.give_back(round_up(bytes as u64, self.unit_bytes).unwrap_or(u64::MAX));
        Ok(())
    }

    fn describe(&self) -> Description {
        let description = Description::new("limiting").with("limit", Bytes(self.limit_bytes));
        let description = if self.unit_bytes == MIN_ALIGN as u64 {
            description
        } else {
            description.with("alignment", Bytes(self.unit_bytes))
        };
        description.over(self.upstream.describe())
    }

    passes_on!(facts, device, held_bytes, record_stream);
}

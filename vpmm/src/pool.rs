//! The pool as its users see it.

use std::fmt;

use crate::device::{Device, StreamHandle};
use crate::error::Result;
use crate::paged::{Layout, PagedConfig, PagedPool};
use crate::stats::Stats;
use crate::units::DevicePtr;
use crate::validate::Violation;

/// A pool of device memory, in stream order.
///
/// Memory from [`malloc`](Self::malloc) may be used by work enqueued on that stream after the
/// call, and [`free`](Self::free) may be called while work that uses the memory is still queued on
/// the stream given to it. Both return without waiting for the GPU.
///
/// Any thread may use it. Dropping it waits for the work before its frees (for the whole context,
/// where allocations were never freed) and gives everything back, such allocations included.
pub struct Pool {
    paged: PagedPool,
}

impl Pool {
    /// A pool of the paged profile: everything rounds up to pages of 2 MiB (or another multiple of
    /// the device's granularity), one physical handle a page; smaller requests go to the driver's
    /// stream-ordered allocator. Fragmented free pages are made contiguous by mapping them
    /// elsewhere, without a copy and without waiting for the GPU.
    ///
    /// Reserves `va_size_bytes` of addresses and maps `initial_pages`, one by one.
    ///
    /// # Errors
    /// [`Error::Config`] for a setting that the device cannot have, [`Error::VmmUnsupported`],
    /// [`Error::OutOfMemory`] for the initial pages, [`Error::AddressSpaceExhausted`],
    /// [`Error::Driver`].
    ///
    /// [`Error::Config`]: crate::Error::Config
    /// [`Error::VmmUnsupported`]: crate::Error::VmmUnsupported
    /// [`Error::OutOfMemory`]: crate::Error::OutOfMemory
    /// [`Error::AddressSpaceExhausted`]: crate::Error::AddressSpaceExhausted
    /// [`Error::Driver`]: crate::Error::Driver
    pub fn paged(device: &Device, config: &PagedConfig) -> Result<Self> {
        Ok(Self { paged: PagedPool::new(device, config)? })
    }

    /// Allocates `bytes` for use on `stream`. The address is a multiple of the page for requests
    /// of a page or more, of 256 for smaller ones.
    ///
    /// Free memory of this stream, and memory that no stream can still be using, is handed out
    /// at once; else pages are moved and made, some 30 µs for
    /// each on an H200 (`benches/results/h200-2026-11-21`, `gather`).
    ///
    /// # Errors
    /// [`Error::ZeroSize`], [`Error::SizeOverflow`], [`Error::OutOfMemory`],
    /// [`Error::AddressSpaceExhausted`], [`Error::WrongDevice`], [`Error::WrongContext`],
    /// [`Error::StreamCapturing`], [`Error::ContextLost`], [`Error::Driver`]. The pool is as it
    /// was before the call.
    ///
    /// [`Error::ZeroSize`]: crate::Error::ZeroSize
    /// [`Error::SizeOverflow`]: crate::Error::SizeOverflow
    /// [`Error::OutOfMemory`]: crate::Error::OutOfMemory
    /// [`Error::AddressSpaceExhausted`]: crate::Error::AddressSpaceExhausted
    /// [`Error::WrongDevice`]: crate::Error::WrongDevice
    /// [`Error::WrongContext`]: crate::Error::WrongContext
    /// [`Error::StreamCapturing`]: crate::Error::StreamCapturing
    /// [`Error::ContextLost`]: crate::Error::ContextLost
    /// [`Error::Driver`]: crate::Error::Driver
    pub fn malloc(&self, bytes: usize, stream: impl Into<StreamHandle>) -> Result<DevicePtr> {
        self.paged.malloc(bytes, stream.into())
    }

    /// Frees an allocation once everything enqueued on `stream` so far has finished. The stream
    /// need not be the one of the allocation; uses on other streams must be ordered before.
    ///
    /// # Errors
    /// [`Error::DoubleFree`], [`Error::StalePointer`], [`Error::InteriorPointer`],
    /// [`Error::ForeignPointer`], [`Error::WrongDevice`], [`Error::WrongContext`],
    /// [`Error::StreamCapturing`], [`Error::ContextLost`], [`Error::Driver`]. The allocation is
    /// then still the caller's.
    ///
    /// [`Error::DoubleFree`]: crate::Error::DoubleFree
    /// [`Error::StalePointer`]: crate::Error::StalePointer
    /// [`Error::InteriorPointer`]: crate::Error::InteriorPointer
    /// [`Error::ForeignPointer`]: crate::Error::ForeignPointer
    /// [`Error::WrongDevice`]: crate::Error::WrongDevice
    /// [`Error::WrongContext`]: crate::Error::WrongContext
    /// [`Error::StreamCapturing`]: crate::Error::StreamCapturing
    /// [`Error::ContextLost`]: crate::Error::ContextLost
    /// [`Error::Driver`]: crate::Error::Driver
    pub fn free(&self, ptr: DevicePtr, stream: impl Into<StreamHandle>) -> Result<()> {
        self.paged.free(ptr, stream.into())
    }

    /// The device that the memory is on.
    pub fn device(&self) -> &Device {
        self.paged.device()
    }

    /// What the pool holds. Two driver calls, for the memory of small requests.
    pub fn stats(&self) -> Stats {
        self.paged.stats()
    }

    /// What stands where, as text: see [`Layout`].
    pub fn layout(&self) -> Layout {
        self.paged.layout()
    }

    /// Checks every invariant of the pool's books, from scratch. For tests: it looks at every page.
    ///
    /// # Errors
    /// The first invariant that does not hold.
    pub fn validate(&self) -> Result<(), Violation> {
        self.paged.validate()
    }
}

/// The numbers of [`Pool::stats`], the driver calls by name, and every region in ascending order
/// of addresses.
impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.paged.debug(f)
    }
}

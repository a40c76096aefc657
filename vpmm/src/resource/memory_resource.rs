//! The trait.

#![forbid(unsafe_code)]

use super::description::Description;
use super::facts::Facts;
use super::identity::Identity;
use crate::device::{Device, StreamHandle};
use crate::error::{Error, Result};
use crate::units::DevicePtr;

/// Something that gives out memory, in the order of streams.
///
/// It is object-safe, and an `&R`, a `Box<R>` or an `Arc<R>` of a resource is one too, so that
/// adaptors take what is below them by value, by reference or shared, typed or as `dyn`.
///
/// What callers may rely on, whatever the resource:
/// - Memory may be used by work enqueued on the stream of the allocation after the call, and by work
///   that is ordered after that.
/// - Memory may be freed while work that uses it is still queued on the stream given to
///   [`deallocate`](Self::deallocate), or on one that this stream comes after.
/// - Memory that is allocated is nobody else's until it is freed: containers write it without `unsafe`.
/// - An address is a multiple of the alignment asked for, and of 256 bytes.
/// - A request of 0 bytes gives [`DevicePtr::NULL`], which can be freed.
/// - A call that fails has changed nothing; no call panics, on whatever arguments.
///
/// The streams are those of the device that the memory is for. The shape is that of RMM's
/// `device_memory_resource` and of CCCL's resource concept, with errors as values.
///
/// A resource of one's own:
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let sim = cuda_sim::Simulator::builder().build()?;
/// # let driver = vpmm::Driver::new(sim.driver())?;
/// # let device = driver.device(0)?;
/// # let stream = device.stream()?;
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use vpmm::resource::{Description, DeviceMalloc, Facts, Identity, MemoryResource};
/// use vpmm::{DevicePtr, Result, StreamHandle};
///
/// /// Counts requests.
/// struct Counting<R> {
///     upstream: R,
///     requests: AtomicU64,
/// }
///
/// impl<R: MemoryResource> MemoryResource for Counting<R> {
///     fn allocate(&self, bytes: usize, align: usize, stream: StreamHandle) -> Result<DevicePtr> {
///         self.requests.fetch_add(1, Ordering::Relaxed);
///         self.upstream.allocate(bytes, align, stream)
///     }
///     fn deallocate(
///         &self,
///         ptr: DevicePtr,
///         bytes: usize,
///         align: usize,
///         stream: StreamHandle,
///     ) -> Result<()> {
///         self.upstream.deallocate(ptr, bytes, align, stream)
///     }
///     fn facts(&self) -> Facts {
///         self.upstream.facts()
///     }
///     fn identity(&self) -> Identity {
///         self.upstream.identity() // it keeps no books: who frees does not matter
///     }
///     fn describe(&self) -> Description {
///         Description::new("counting").over(self.upstream.describe())
///     }
/// }
///
/// let counting = Counting { upstream: DeviceMalloc::new(&device), requests: AtomicU64::new(0) };
/// let ptr = counting.allocate(100, 256, stream.handle())?;
/// counting.deallocate(ptr, 100, 256, stream.handle())?;
/// assert_eq!(counting.requests.into_inner(), 1);
/// # Ok(())
/// # }
/// ```
pub trait MemoryResource: Send + Sync {
    /// Allocates `bytes` for use on `stream`. `align` is a power of two; what is less than 256 counts
    /// as 256. Returns without waiting for the GPU, unless the resource says otherwise.
    ///
    /// # Errors
    /// [`Error::BadAlignment`] where `align` is no power of two, [`Error::AlignmentUnsupported`] where
    /// it is more than [`Facts::max_align`], [`Error::SizeOverflow`], an error for which
    /// [`is_out_of_memory`](Error::is_out_of_memory) is true where there is no memory,
    /// [`Error::RequestTooLong`] where there never will be, and what else the resource says.
    fn allocate(&self, bytes: usize, align: usize, stream: StreamHandle) -> Result<DevicePtr>;

    /// Frees an allocation of `bytes` with `align`, both as they were asked for, once everything
    /// enqueued on `stream` so far has finished. The stream need not be the one of the allocation; that
    /// one's work until the allocation must be ordered before, as uses on other streams are.
    ///
    /// # Errors
    /// What the resource finds wrong with the pointer ([`Facts::checks`] says how much that is), and
    /// what its driver calls answer. The allocation is then still the caller's.
    fn deallocate(
        &self,
        ptr: DevicePtr,
        bytes: usize,
        align: usize,
        stream: StreamHandle,
    ) -> Result<()>;

    /// What the resource is able to do. The same at every call.
    fn facts(&self) -> Facts;

    /// What the resource is: its name, its settings, and what it stands on. Displayed, it is the
    /// stack drawn as a tree.
    fn describe(&self) -> Description;

    /// Whose memory this is: equal for two resources if each may free what the other has allocated.
    ///
    /// Unless said otherwise a resource is equal to itself alone. An adaptor that keeps no account of
    /// what is allocated can pass on what is below it.
    fn identity(&self) -> Identity {
        Identity::of_value(self)
    }

    /// The device whose streams the resource takes; `None` where it does not matter to it.
    fn device(&self) -> Option<&Device> {
        None
    }

    /// What the resource holds of the device or of what is below it, in bytes, allocated or not; `None`
    /// for one that holds nothing of its own. Cheap: no driver call in this crate's resources.
    fn held_bytes(&self) -> Option<u64> {
        None
    }

    /// Notes that an allocation is also used on another stream: after it is freed its memory is not
    /// handed out before what was enqueued there until the free has finished. Without this, such a use
    /// must be ordered before the free by the caller. See
    /// [`Pool::record_stream`](crate::Pool::record_stream).
    ///
    /// # Errors
    /// [`Error::Unsupported`] unless [`Facts::records_streams`] is set; then those of the resource.
    fn record_stream(&self, ptr: DevicePtr, stream: StreamHandle) -> Result<()> {
        let _ = (ptr, stream);
        Err(Error::Unsupported { what: "notes of uses on further streams" })
    }

    /// Whether memory of one may be freed by the other: whether their
    /// [identities](Self::identity) are equal.
    fn is_equal(&self, other: &dyn MemoryResource) -> bool {
        self.identity() == other.identity()
    }
}

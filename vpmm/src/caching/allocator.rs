//! The allocator as its users see it.

use std::fmt;
use std::sync::Arc;

use super::config::CachingConfig;
use super::core::Core;
use super::snapshot::SnapshotSegment;
use super::stats::CachingStats;
use crate::container::{DeviceVec, Pod};
use crate::device::{Device, StreamHandle};
use crate::error::Result;
use crate::resource::{DeviceMalloc, MemoryResource};
use crate::stream::Stream;
use crate::units::DevicePtr;
use crate::validate::Violation;

/// A caching allocator of device memory, by PyTorch's scheme: see the [module](super).
///
/// Memory of [`malloc`](Self::malloc) may be used by work enqueued on that stream after the call.
/// [`free`](Self::free) may be called while such work is still queued: the memory stays that
/// stream's, and its next request may have it at once, without a driver call. What other streams
/// use must be [told](Self::record_stream); then nobody has the memory before an event on each of
/// them has passed.
///
/// Any thread may use it. A clone is a handle of the same allocator.
///
/// # Where it differs from PyTorch
/// - Streams are known by the driver's number, not by their handle, which comes again: a new stream
///   has the memory of one that has ended once that one's work has finished, and not before.
/// - Memory that becomes whole when the host has waited for further streams serves the request that
///   waited; PyTorch gives it back, and may give up.
/// - No lock that cached memory is served under is held during a driver call that gets or gives back
///   memory.
/// - Wrong pointers are named: freed before, inside an allocation, foreign, out of date.
///
/// # Streams that end
/// A stream's end is the last drop of its [`Stream`](crate::Stream). Nothing is asked of it after
/// that: memory that was allocated on it can be freed later, and goes to a new stream. A
/// [borrowed](crate::Stream::borrowed) stream may live on. What is enqueued on it after the first drop
/// of a value that borrowed it is to the allocator another stream's, and must be
/// [told](Self::record_stream) where it uses memory that was allocated before.
///
/// # Captures
/// No call ends a capture. The library's own streams may allocate and free while they capture; an
/// event that is to be recorded on one is recorded when its capture is over. The graph must be
/// launched where it comes after the work before the capture, and what it uses must stay allocated
/// while it may run. A stream from elsewhere is refused while it captures
/// ([`Error::StreamCapturing`](crate::Error::StreamCapturing)).
///
/// # The end
/// When its last handle is dropped the allocator waits for the further streams of freed memory and
/// gives every segment back of which nothing is allocated. Others stay as they are until the
/// process ends.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let sim = cuda_sim::Simulator::builder().build()?;
/// # let driver = vpmm::Driver::new(sim.driver())?;
/// # let device = driver.device(0)?;
/// # let (compute, copies) = (device.stream()?, device.stream()?);
/// use vpmm::caching::{CachingAllocator, CachingConfig};
///
/// let allocator = CachingAllocator::new(&device, &CachingConfig::default())?;
/// let ptr = allocator.malloc(3 << 20, &compute)?;
/// // … kernels on `compute`; a copy on `copies`, ordered after them …
/// allocator.record_stream(ptr, &copies)?;
/// allocator.free(ptr)?;
///
/// assert_eq!(allocator.memory_allocated(), 0);
/// assert_eq!(allocator.memory_reserved(), 20 << 20);
/// allocator.empty_cache()?; // waits for `copies`
/// assert_eq!(allocator.memory_reserved(), 0);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct CachingAllocator {
    core: Arc<Core>,
    _owner: Arc<Owner>,
}

/// What all handles own together.
struct Owner(Arc<Core>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.retire();
    }
}

/// Two handles are equal that are of one allocator.
impl PartialEq for CachingAllocator {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.core, &other.core)
    }
}

impl Eq for CachingAllocator {}

impl CachingAllocator {
    /// An allocator of a device's memory, by `cuMemAlloc` and `cuMemFree`. It holds nothing at
    /// first.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) for settings that cannot be,
    /// [`Error::Driver`](crate::Error::Driver), [`Error::Forked`](crate::Error::Forked).
    pub fn new(device: &Device, config: &CachingConfig) -> Result<Self> {
        Self::over(DeviceMalloc::new(device), device, config)
    }

    /// An allocator of memory that a resource gives, for streams of a device.
    ///
    /// Over a resource that is [stream-ordered](crate::resource::Facts::stream_ordered) a segment
    /// goes back on the stream that it belongs to. Where that one was made elsewhere, or captures,
    /// the segment stays until a request on that stream lacks memory, or the allocator ends, which then
    /// waits for the whole device.
    ///
    /// Functions of the caller's in that resource may call this allocator: no lock is held that they would wait for.
    /// They must not wait for another thread that ends a stream: one that memory goes back on ends when that is over.
    /// To borrow it ([`Stream::borrowed`](crate::Stream::borrowed)) is refused then
    /// ([`Error::StreamEnded`](crate::Error::StreamEnded)); what they refuse with that stays, and goes back later.
    /// A value that they borrow before may become the last one: with it the stream ends at once.
    /// A request that they make while it flushes for the thread is out of memory where nothing cached serves it, and
    /// one that they make at every request never ends, as in any function that calls itself.
    ///
    /// # Errors
    /// As [`new`](Self::new); [`Error::WrongDevice`](crate::Error::WrongDevice) where the resource is for streams
    /// of another device.
    pub fn over(
        upstream: impl MemoryResource + 'static,
        device: &Device,
        config: &CachingConfig,
    ) -> Result<Self> {
        let core = Core::new(device, Box::new(upstream), config)?;
        Ok(Self { _owner: Arc::new(Owner(Arc::clone(&core))), core })
    }

    pub(super) fn core(&self) -> &Core {
        &self.core
    }

    /// The device whose streams it takes.
    pub fn device(&self) -> &Device {
        &self.core.device
    }

    /// Where segments come from.
    pub fn upstream(&self) -> &dyn MemoryResource {
        &*self.core.upstream
    }

    /// The settings that it was made with.
    pub fn config(&self) -> &CachingConfig {
        &self.core.config
    }

    /// Allocates memory for a stream. An address is a multiple of 256 bytes, and of 512 where
    /// upstream's are.
    ///
    /// No driver call where cached memory serves it and the stream is the library's or the legacy
    /// one; three to find out which stream another handle means. Where nothing cached serves it,
    /// freed blocks that wait for further streams are asked about before anything is got; while
    /// there are events to wait for, every eighth request does so too, and ever fewer, of 64 one at
    /// last, while none of them passes.
    ///
    /// # Errors
    /// [`Error::ZeroSize`](crate::Error::ZeroSize),
    /// [`Error::SizeOverflow`](crate::Error::SizeOverflow),
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory) after everything that is free was given
    /// back and the request tried again,
    /// [`Error::StreamCapturing`](crate::Error::StreamCapturing),
    /// [`Error::WrongDevice`](crate::Error::WrongDevice),
    /// [`Error::WrongContext`](crate::Error::WrongContext), [`Error::Forked`](crate::Error::Forked),
    /// and what upstream or the driver answers.
    #[inline]
    pub fn malloc(&self, bytes: usize, stream: impl Into<StreamHandle>) -> Result<DevicePtr> {
        self.core.malloc(bytes, stream.into())
    }

    /// Frees an allocation: its memory is its stream's again, behind what was enqueued there, or
    /// waits for the further streams that were [recorded](Self::record_stream).
    ///
    /// No driver call where there are none, or only streams of the library's; else an event for each
    /// foreign or default one. Where much waits for a stream, an event is recorded there for all of
    /// it.
    ///
    /// # Errors
    /// [`Error::DoubleFree`](crate::Error::DoubleFree),
    /// [`Error::StalePointer`](crate::Error::StalePointer),
    /// [`Error::InteriorPointer`](crate::Error::InteriorPointer),
    /// [`Error::ForeignPointer`](crate::Error::ForeignPointer); where a further stream was made
    /// elsewhere [`Error::StreamCapturing`](crate::Error::StreamCapturing);
    /// [`Error::Forked`](crate::Error::Forked), and what the driver answers. Nothing is freed then.
    #[inline]
    pub fn free(&self, ptr: DevicePtr) -> Result<()> {
        self.core.free(ptr)
    }

    /// Notes that an allocation is used on another stream too: when it is freed, its memory is kept
    /// until everything enqueued there up to then has finished. Noting a stream twice, or the
    /// allocation's own, changes nothing.
    ///
    /// A handle that was not made by this library must stay alive until the allocation is freed: the
    /// event is recorded then. One of the library's own may end at any time: its event is recorded
    /// when memory is lacking, or as it ends.
    ///
    /// # Errors
    /// Those of [`free`](Self::free) about pointers, and of [`malloc`](Self::malloc) about streams.
    pub fn record_stream(&self, ptr: DevicePtr, stream: impl Into<StreamHandle>) -> Result<()> {
        self.core.record_stream(ptr, stream.into())
    }

    /// Allocates room for so many values, and enqueues the writing of zeros into it.
    ///
    /// # Errors
    /// Those of [`malloc`](Self::malloc); nothing is allocated then.
    pub fn alloc_zeros<T: Pod>(&self, count: usize, stream: &Stream) -> Result<DeviceVec<T, Self>> {
        DeviceVec::zeroed(count, stream, self.clone())
    }

    /// Allocates room for values and copies them there. Waits until they are.
    ///
    /// # Errors
    /// Those of [`malloc`](Self::malloc); [`Error::StreamCapturing`](crate::Error::StreamCapturing)
    /// where the stream captures. Nothing is allocated then.
    pub fn alloc_copy<T: Pod>(&self, values: &[T], stream: &Stream) -> Result<DeviceVec<T, Self>> {
        DeviceVec::from_slice(values, stream, self.clone())
    }

    /// Waits for the further streams of freed blocks, and gives every segment back of which nothing
    /// is allocated. A call from a function below, while this allocator does just that in the same thread, does
    /// nothing.
    ///
    /// # Errors
    /// What the driver or upstream answers: what did not go back stays.
    pub fn empty_cache(&self) -> Result<()> {
        self.core.empty_cache()
    }

    /// From now on at most this fraction of the device's memory is held. What is held already stays
    /// until it is given back.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) unless it is from 0 to 1.
    pub fn set_memory_fraction(&self, fraction: f64) -> Result<()> {
        self.core.set_memory_fraction(fraction)
    }

    /// The most that may be held, where a fraction was set.
    pub fn limit_bytes(&self) -> Option<u64> {
        self.core.limit_bytes()
    }

    /// Bytes in the hands of callers, rounded.
    pub fn memory_allocated(&self) -> u64 {
        self.counted(|stats| stats.allocated_bytes.all.current)
    }

    /// The most that they have been.
    pub fn max_memory_allocated(&self) -> u64 {
        self.counted(|stats| stats.allocated_bytes.all.peak)
    }

    /// Bytes held: of all segments.
    pub fn memory_reserved(&self) -> u64 {
        self.counted(|stats| stats.reserved_bytes.all.current)
    }

    /// The most that they have been.
    pub fn max_memory_reserved(&self) -> u64 {
        self.counted(|stats| stats.reserved_bytes.all.peak)
    }

    /// Bytes of free blocks.
    pub fn cached_bytes(&self) -> u64 {
        self.guarded(0, |core| core.books.lock().cached().1)
    }

    /// Requests that a cached block served, and those that none did.
    pub fn cache_stats(&self) -> (u64, u64) {
        let stats = self.stats();
        (stats.hits, stats.misses)
    }

    /// Blocks, in every state.
    pub fn block_count(&self) -> usize {
        self.guarded(0, |core| core.books.lock().arena.in_use())
    }

    /// Free blocks.
    pub fn free_block_count(&self) -> usize {
        self.guarded(0, |core| core.books.lock().cached().0)
    }

    /// Host memory that the allocator's books take, in bytes. It follows the most blocks, streams
    /// and segments that there were at a time, not the number of calls.
    pub fn metadata_bytes(&self) -> usize {
        self.guarded(0, |core| core.books.lock().metadata_bytes())
    }

    /// Everything that is counted.
    pub fn stats(&self) -> CachingStats {
        let max_split = self.core.config.max_split_size_bytes;
        self.guarded(CachingStats::default(), |core| core.books.lock().tallies.stats(max_split))
    }

    /// Peaks start anew from what is now.
    pub fn reset_peak_stats(&self) {
        self.guarded((), |core| core.books.lock().tallies.reset_peaks());
    }

    /// Sums start anew, and counts of events.
    pub fn reset_accumulated_stats(&self) {
        self.guarded((), |core| core.books.lock().tallies.reset_accumulated());
    }

    /// Every segment with its blocks, by address: what `torch.cuda.memory_snapshot` tells.
    pub fn snapshot(&self) -> Vec<SnapshotSegment> {
        let device = self.core.device.ordinal();
        self.guarded(Vec::new(), |core| core.books.lock().snapshot(device))
    }

    /// Checks the books from scratch. Slow; for tests.
    ///
    /// # Errors
    /// The invariant that does not hold.
    pub fn validate(&self) -> Result<(), Violation> {
        self.guarded(Ok(()), |core| core.books.lock().validate())
    }

    fn counted(&self, of: impl Fn(&CachingStats) -> u64) -> u64 {
        of(&self.stats())
    }

    /// In a forked child nothing is known, and no lock is taken that a thread of the parent may hold.
    fn guarded<V>(&self, of_child: V, of: impl FnOnce(&Core) -> V) -> V {
        if self.core.device.driver().is_forked() { of_child } else { of(&self.core) }
    }
}

impl fmt::Debug for CachingAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CachingAllocator")
            .field("device", &self.core.device.ordinal())
            .field("allocated_bytes", &self.memory_allocated())
            .field("reserved_bytes", &self.memory_reserved())
            .finish_non_exhaustive()
    }
}

//! Values in device memory that is freed at drop.

use std::fmt;
use std::marker::PhantomData;

use super::allocator::CachingAllocator;
use crate::default::stream_is_capturing;
use crate::device::StreamHandle;
use crate::error::{Error, Result};
use crate::units::DevicePtr;

/// Room for values of a type in device memory, from
/// [`alloc_zeros`](CachingAllocator::alloc_zeros) or [`alloc_copy`](CachingAllocator::alloc_copy).
/// Dropped, it is freed, as by [`CachingAllocator::free`], and what is counted as allocated falls.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let sim = cuda_sim::Simulator::builder().build()?;
/// # let driver = vpmm::Driver::new(sim.driver())?;
/// # let device = driver.device(0)?;
/// # let stream = device.stream()?;
/// # let config = vpmm::caching::CachingConfig::default();
/// let allocator = vpmm::CachingAllocator::new(&device, &config)?;
/// let weights = allocator.alloc_copy(&[0.5_f32; 1000], &stream)?;
/// let sums = allocator.alloc_zeros::<f64>(10, &stream)?;
/// assert_eq!(allocator.memory_allocated(), 4096 + 512);
/// drop((weights, sums));
/// assert_eq!(allocator.memory_allocated(), 0);
/// # Ok(())
/// # }
/// ```
pub struct CachedBuffer<T> {
    allocator: CachingAllocator,
    /// Null for a buffer without bytes.
    ptr: DevicePtr,
    len: usize,
    _values: PhantomData<T>,
}

// SAFETY: the buffer is a number; the host never reaches the values through it. `T` says only what
// the bytes mean.
unsafe impl<T> Send for CachedBuffer<T> {}
// SAFETY: as above; nothing in it changes.
unsafe impl<T> Sync for CachedBuffer<T> {}

impl<T: Copy> CachedBuffer<T> {
    fn new(allocator: &CachingAllocator, len: usize, stream: StreamHandle) -> Result<Self> {
        let overflow = Error::SizeOverflow { bytes: len as u64, unit_bytes: size_of::<T>() as u64 };
        let bytes = len.checked_mul(size_of::<T>()).ok_or(overflow)?;
        let ptr = if bytes == 0 { DevicePtr::NULL } else { allocator.malloc(bytes, stream)? };
        Ok(Self { allocator: allocator.clone(), ptr, len, _values: PhantomData })
    }

    pub(super) fn zeroed(
        allocator: &CachingAllocator,
        len: usize,
        stream: StreamHandle,
    ) -> Result<Self> {
        let buffer = Self::new(allocator, len, stream)?;
        if buffer.bytes() > 0 {
            let _context = allocator.device().enter()?;
            let (driver, address) = (allocator.device().driver(), buffer.address());
            // SAFETY: the allocation has so many bytes, and is the stream's; whoever made the stream
            // handle vouches that its stream is alive.
            unsafe { driver.cuMemsetD8Async(address, 0, buffer.bytes(), stream.raw()) }
                .map_err(|failure| failure.about(buffer.bytes() as u64))?;
        }
        Ok(buffer)
    }

    pub(super) fn copied(
        allocator: &CachingAllocator,
        values: &[T],
        stream: StreamHandle,
    ) -> Result<Self> {
        let _context = allocator.device().enter()?;
        let driver = allocator.device().driver();
        // The graph would read the values when it is launched.
        if stream_is_capturing(driver, stream)? {
            return Err(Error::StreamCapturing);
        }
        let buffer = Self::new(allocator, values.len(), stream)?;
        let bytes = buffer.bytes();
        if bytes > 0 {
            let (to, from) = (buffer.address(), values.as_ptr().cast());
            // SAFETY: the allocation and the slice have so many bytes; both live past the wait below,
            // which is made whatever comes of the copy.
            let copied = unsafe { driver.cuMemcpyHtoDAsync_v2(to, from, bytes, stream.raw()) };
            // SAFETY: whoever made the stream handle vouches that its stream is alive.
            let waited = unsafe { driver.cuStreamSynchronize(stream.raw()) };
            copied.and(waited).map_err(|failure| failure.about(bytes as u64))?;
        }
        Ok(buffer)
    }
}

impl<T> CachedBuffer<T> {
    /// The address of the first value: what kernels and copies take; 0 where there are no bytes.
    pub fn address(&self) -> u64 {
        self.ptr.address()
    }

    /// The allocation.
    pub fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    /// How many values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes of all values.
    pub fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// As [`CachingAllocator::record_stream`].
    ///
    /// # Errors
    /// As there.
    pub fn record_stream(&self, stream: impl Into<StreamHandle>) -> Result<()> {
        if self.ptr.is_null() { Ok(()) } else { self.allocator.record_stream(self.ptr, stream) }
    }
}

impl<T> Drop for CachedBuffer<T> {
    fn drop(&mut self) {
        if !self.ptr.is_null() {
            // What cannot be freed now (a further stream's event cannot be recorded) stays allocated.
            let _ = self.allocator.free(self.ptr);
        }
    }
}

impl<T> fmt::Debug for CachedBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CachedBuffer").field("ptr", &self.ptr).field("len", &self.len).finish()
    }
}

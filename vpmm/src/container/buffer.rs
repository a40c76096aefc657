//! Bytes on a device.

use std::fmt;
use std::ops::RangeBounds;
use std::sync::Arc;

use super::block::Block;
use super::copy;
use super::slice::{DeviceSlice, DeviceSliceMut};
use crate::device::StreamHandle;
use crate::error::Result;
use crate::resource::{MIN_ALIGN, MemoryResource};
use crate::stream::Stream;
use crate::units::DevicePtr;

/// Bytes on a device, freed on their stream at drop. RMM has `device_buffer`.
///
/// `R` is the resource, by value, by reference or shared; without a word it is any one behind an `Arc`.
///
/// One on the default stream of the calling thread ([`Stream::per_thread`]) that another thread calls, or drops, is at
/// home on that one's from then on: the host waits for the device once. Beside a capture that wait is refused, which
/// harms none of the library's streams': the call answers [`Error::StreamCapturing`](crate::Error::StreamCapturing),
/// and after a drop the memory stays the resource's.
///
/// A resource whose frees wait for its device ([`Managed`](crate::resource::Managed),
/// [`PinnedHost`](crate::resource::PinnedHost), [`DeviceMalloc`](crate::resource::DeviceMalloc)) takes streams of other
/// devices, too. Those its frees do not wait for: there the host waits for the stream before memory goes back, which is
/// refused while that captures, as above.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let sim = cuda_sim::Simulator::builder().build()?;
/// # let driver = vpmm::Driver::new(sim.driver())?;
/// # let device = driver.device(0)?;
/// use vpmm::{DeviceBuffer, Pool, PoolConfig};
///
/// let pool = Pool::new(&device, &PoolConfig::default())?;
/// let stream = device.stream()?;
/// let mut buffer = DeviceBuffer::from_slice(b"on a device", &stream, &pool)?;
/// buffer.resize(14)?; // at another address, perhaps
/// buffer.slice_mut(11..)?.copy_from_slice(b" ->")?;
/// assert_eq!(buffer.to_vec()?, b"on a device ->");
/// # Ok(())
/// # }
/// ```
pub struct DeviceBuffer<R: MemoryResource = Arc<dyn MemoryResource>> {
    block: Block<R>,
    len: usize,
}

impl<R: MemoryResource> DeviceBuffer<R> {
    /// So many bytes with whatever was in the memory before. 0 take no memory.
    ///
    /// # Errors
    /// Those of the resource's [`allocate`](MemoryResource::allocate); [`Error::WrongDevice`](crate::Error::WrongDevice)
    /// as for [`set_stream`](Self::set_stream).
    pub fn uninit(len: usize, stream: &Stream, resource: R) -> Result<Self> {
        Self::uninit_aligned(len, MIN_ALIGN, stream, resource)
    }

    /// The same at an address that is a multiple of `align`, a power of two.
    ///
    /// # Errors
    /// As [`uninit`](Self::uninit); [`Error::BadAlignment`](crate::Error::BadAlignment),
    /// [`Error::AlignmentUnsupported`](crate::Error::AlignmentUnsupported).
    pub fn uninit_aligned(len: usize, align: usize, stream: &Stream, resource: R) -> Result<Self> {
        Ok(Self { block: Block::new(len, align, stream, resource)?, len })
    }

    /// So many bytes of 0, without a wait.
    ///
    /// # Errors
    /// As [`uninit`](Self::uninit); [`Error::Driver`](crate::Error::Driver).
    pub fn zeroed(len: usize, stream: &Stream, resource: R) -> Result<Self> {
        let mut buffer = Self::uninit(len, stream, resource)?;
        buffer.as_mut_slice().fill_zero()?;
        Ok(buffer)
    }

    /// A copy of bytes of the host's, which is waited for.
    ///
    /// # Errors
    /// As [`uninit`](Self::uninit) and [`DeviceSliceMut::copy_from_slice`].
    pub fn from_slice(host: &[u8], stream: &Stream, resource: R) -> Result<Self> {
        let mut buffer = Self::uninit(host.len(), stream, resource)?;
        buffer.as_mut_slice().copy_from_slice(host)?;
        Ok(buffer)
    }

    /// A copy on another stream, or the same, with memory of any resource; nothing is waited for.
    ///
    /// # Errors
    /// As [`uninit`](Self::uninit) and [`DeviceSliceMut::copy_from`].
    pub fn copy<S: MemoryResource>(&self, stream: &Stream, resource: S) -> Result<DeviceBuffer<S>> {
        let mut copy = DeviceBuffer::uninit(self.len, stream, resource)?;
        copy.as_mut_slice().copy_from(&self.as_slice())?;
        Ok(copy)
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes that there is memory for.
    pub fn capacity(&self) -> usize {
        self.block.bytes()
    }

    /// The address, for kernels; [`DevicePtr::NULL`] without memory.
    ///
    /// A bare one, not the pointer that the resource gave: who had that could free memory of the host's under
    /// the buffer, which is written all the same, and is a [`PinnedVec`](super::PinnedVec)'s by then.
    pub fn ptr(&self) -> DevicePtr {
        DevicePtr::from_address(self.block.ptr().address())
    }

    /// What the address is a multiple of.
    pub fn align(&self) -> usize {
        self.block.align()
    }

    /// The stream that the buffer is at home on.
    pub fn stream(&self) -> &Stream {
        self.block.home().given()
    }

    /// Goes to another stream. What is enqueued there from now on comes after everything that is
    /// enqueued on the old one; the host does not wait.
    ///
    /// # Errors
    /// Those of [`Stream::wait_for_stream`]; [`Error::WrongDevice`](crate::Error::WrongDevice) for a stream of another
    /// device than the resource's, where that is [in the order of streams](crate::resource::Facts::stream_ordered).
    /// The buffer stays where it was.
    pub fn set_stream(&mut self, stream: &Stream) -> Result<()> {
        self.block.move_to(stream)
    }

    /// Notes that the memory is also used on another stream, so that it is not handed out before that
    /// has finished, whenever it is freed: [`MemoryResource::record_stream`].
    ///
    /// # Errors
    /// As there; nothing for no memory.
    pub fn record_stream(&self, stream: impl Into<StreamHandle>) -> Result<()> {
        let ptr = self.block.ptr();
        if ptr.is_null() {
            return Ok(());
        }
        self.block.resource().record_stream(ptr, stream.into())
    }

    /// Where the memory is from.
    pub fn resource(&self) -> &R {
        self.block.resource()
    }

    /// All bytes.
    pub fn as_slice(&self) -> DeviceSlice<'_, u8> {
        DeviceSlice::new(self.block.home(), self.ptr().address(), self.len)
    }

    /// All bytes, to be written.
    pub fn as_mut_slice(&mut self) -> DeviceSliceMut<'_, u8> {
        DeviceSliceMut::new(self.block.home(), self.ptr().address(), self.len)
    }

    /// Some of the bytes.
    ///
    /// # Errors
    /// [`Error::OutOfRange`](crate::Error::OutOfRange).
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<DeviceSlice<'_, u8>> {
        self.as_slice().slice(range)
    }

    /// Some of the bytes, to be written.
    ///
    /// # Errors
    /// [`Error::OutOfRange`](crate::Error::OutOfRange).
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> Result<DeviceSliceMut<'_, u8>> {
        let (home, address) = (self.block.home(), self.block.ptr().address());
        DeviceSliceMut::new(home, address, self.len).into_part(range)
    }

    /// The bytes on the host; waits for the stream.
    ///
    /// # Errors
    /// As [`DeviceSlice::copy_to_slice`].
    pub fn to_vec(&self) -> Result<Vec<u8>> {
        self.as_slice().to_vec()
    }

    /// Sees to memory for so many bytes. Where there is less, other memory of exactly so much takes the
    /// place of the old, and the bytes are copied on the stream.
    ///
    /// # Errors
    /// Those of the resource, [`Error::Driver`](crate::Error::Driver); the buffer is as it was.
    pub fn reserve(&mut self, capacity: usize) -> Result<()> {
        if capacity <= self.capacity() { Ok(()) } else { self.reallocate(capacity) }
    }

    /// Makes it longer or shorter. The memory stays if it is long enough; bytes that come are as the
    /// memory was.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve).
    pub fn resize(&mut self, len: usize) -> Result<()> {
        self.reserve(len)?;
        self.len = len;
        Ok(())
    }

    /// Gives memory beyond the bytes back: exactly so much as they are takes its place.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve).
    pub fn shrink_to_fit(&mut self) -> Result<()> {
        if self.capacity() == self.len { Ok(()) } else { self.reallocate(self.len) }
    }

    fn reallocate(&mut self, capacity: usize) -> Result<()> {
        let len = self.len;
        self.block.replace(capacity, |home, old, new| {
            copy::across(&*home.turn()?, new.address(), old.address(), len)
        })
    }

    /// Frees the memory, as drop does, and says what came of it.
    ///
    /// # Errors
    /// Those of the resource's [`deallocate`](MemoryResource::deallocate).
    pub fn release(self) -> Result<()> {
        self.block.release()
    }
}

impl<R: MemoryResource> fmt::Debug for DeviceBuffer<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceBuffer({} of {:?})", self.len, self.block)
    }
}

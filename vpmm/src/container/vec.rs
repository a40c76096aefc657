//! Values on a device.

use std::fmt;
use std::marker::PhantomData;
use std::ops::RangeBounds;
use std::sync::Arc;

use bytemuck::Pod;

use super::buffer::DeviceBuffer;
use super::slice::{DeviceSlice, DeviceSliceMut};
use crate::device::StreamHandle;
use crate::error::{Error, Result};
use crate::resource::{MIN_ALIGN, MemoryResource};
use crate::stream::Stream;
use crate::units::DevicePtr;

/// Values of plain old data on a device, freed on their stream at drop. RMM has `device_uvector` and
/// `device_vector`.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let sim = cuda_sim::Simulator::builder().build()?;
/// # let driver = vpmm::Driver::new(sim.driver())?;
/// # let device = driver.device(0)?;
/// # let stream = device.stream()?;
/// use std::sync::Arc;
/// use vpmm::{DeviceVec, MemoryResource, resource::DeviceMalloc};
///
/// let resource: Arc<dyn MemoryResource> = Arc::new(DeviceMalloc::new(&device));
/// let mut values: DeviceVec<f32> = DeviceVec::filled(1.5, 1000, &stream, resource)?;
/// values.set(7, -2.0)?;
/// assert_eq!((values.get(7)?, values.get(8)?), (-2.0, 1.5));
/// assert!(values.get(1000).is_err());
/// # Ok(())
/// # }
/// ```
pub struct DeviceVec<T, R: MemoryResource = Arc<dyn MemoryResource>> {
    buffer: DeviceBuffer<R>,
    len: usize,
    values: PhantomData<T>,
}

impl<T: Pod, R: MemoryResource> DeviceVec<T, R> {
    /// So many values of whatever was in the memory before.
    ///
    /// # Errors
    /// Those of the resource's [`allocate`](MemoryResource::allocate); [`Error::SizeOverflow`].
    pub fn uninit(len: usize, stream: &Stream, resource: R) -> Result<Self> {
        let align = align_of::<T>().max(MIN_ALIGN);
        let buffer = DeviceBuffer::uninit_aligned(bytes::<T>(len)?, align, stream, resource)?;
        Ok(Self { buffer, len, values: PhantomData })
    }

    /// So many values of all zero bytes, without a wait.
    ///
    /// # Errors
    /// As [`uninit`](Self::uninit); [`Error::Driver`].
    pub fn zeroed(len: usize, stream: &Stream, resource: R) -> Result<Self> {
        let mut values = Self::uninit(len, stream, resource)?;
        values.as_mut_slice().fill_zero()?;
        Ok(values)
    }

    /// So many times this value: [`DeviceSliceMut::fill`].
    ///
    /// # Errors
    /// As [`uninit`](Self::uninit); [`Error::Driver`].
    pub fn filled(value: T, len: usize, stream: &Stream, resource: R) -> Result<Self> {
        let mut values = Self::uninit(len, stream, resource)?;
        values.as_mut_slice().fill(value)?;
        Ok(values)
    }

    /// A copy of values of the host's, which is waited for.
    ///
    /// # Errors
    /// As [`uninit`](Self::uninit) and [`DeviceSliceMut::copy_from_slice`].
    pub fn from_slice(host: &[T], stream: &Stream, resource: R) -> Result<Self> {
        let mut values = Self::uninit(host.len(), stream, resource)?;
        values.as_mut_slice().copy_from_slice(host)?;
        Ok(values)
    }

    /// A copy on another stream, or the same, with memory of any resource; nothing is waited for.
    ///
    /// # Errors
    /// As [`uninit`](Self::uninit) and [`DeviceSliceMut::copy_from`].
    pub fn copy<S: MemoryResource>(&self, stream: &Stream, resource: S) -> Result<DeviceVec<T, S>> {
        let mut copy = DeviceVec::uninit(self.len, stream, resource)?;
        copy.as_mut_slice().copy_from(&self.as_slice())?;
        Ok(copy)
    }

    /// Takes the bytes of a buffer for values.
    ///
    /// # Errors
    /// The buffer comes back with [`Error::LengthMismatch`] where its length is no multiple of a
    /// value's, or with [`Error::AlignmentUnsupported`] where values want a greater alignment.
    #[allow(clippy::result_large_err, reason = "the caller's buffer")]
    pub fn from_buffer(buffer: DeviceBuffer<R>) -> Result<Self, (DeviceBuffer<R>, Error)> {
        let (given, size) = (buffer.len(), size_of::<T>());
        let len = given.checked_div(size).unwrap_or(0);
        if len * size != given {
            return Err((buffer, Error::LengthMismatch { given, len: len * size }));
        }
        let (align, most) = (align_of::<T>(), buffer.align().max(MIN_ALIGN));
        if align > most {
            return Err((buffer, Error::AlignmentUnsupported { align, most }));
        }
        Ok(Self { buffer, len, values: PhantomData })
    }

    /// The memory as bytes.
    pub fn into_buffer(self) -> DeviceBuffer<R> {
        self.buffer
    }

    /// The number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The values that there is memory for.
    pub fn capacity(&self) -> usize {
        self.buffer.capacity().checked_div(size_of::<T>()).unwrap_or(usize::MAX)
    }

    /// The address, for kernels; [`DevicePtr::NULL`] without memory.
    pub fn ptr(&self) -> DevicePtr {
        self.buffer.ptr()
    }

    /// The stream that the values are at home on.
    pub fn stream(&self) -> &Stream {
        self.buffer.stream()
    }

    /// Goes to another stream: [`DeviceBuffer::set_stream`].
    ///
    /// # Errors
    /// As there.
    pub fn set_stream(&mut self, stream: &Stream) -> Result<()> {
        self.buffer.set_stream(stream)
    }

    /// Notes that the memory is also used on another stream, so that it is not handed out before that
    /// has finished, whenever it is freed: [`MemoryResource::record_stream`].
    ///
    /// # Errors
    /// As there; nothing for no memory.
    pub fn record_stream(&self, stream: impl Into<StreamHandle>) -> Result<()> {
        self.buffer.record_stream(stream)
    }

    /// Where the memory is from.
    pub fn resource(&self) -> &R {
        self.buffer.resource()
    }

    /// All values.
    pub fn as_slice(&self) -> DeviceSlice<'_, T> {
        self.buffer.as_slice().of(self.len)
    }

    /// All values, to be written.
    pub fn as_mut_slice(&mut self) -> DeviceSliceMut<'_, T> {
        let len = self.len;
        self.buffer.as_mut_slice().into_values(len)
    }

    /// Some of the values.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<DeviceSlice<'_, T>> {
        self.as_slice().slice(range)
    }

    /// Some of the values, to be written.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> Result<DeviceSliceMut<'_, T>> {
        self.as_mut_slice().into_part(range)
    }

    /// One value; waits for the stream.
    ///
    /// # Errors
    /// As [`DeviceSlice::get`].
    pub fn get(&self, index: usize) -> Result<T> {
        self.as_slice().get(index)
    }

    /// Sets one value: [`DeviceSliceMut::set`].
    ///
    /// # Errors
    /// As there.
    pub fn set(&mut self, index: usize, value: T) -> Result<()> {
        self.as_mut_slice().set(index, value)
    }

    /// All values on the host; waits for the stream.
    ///
    /// # Errors
    /// As [`DeviceSlice::copy_to_slice`].
    pub fn to_vec(&self) -> Result<Vec<T>> {
        self.as_slice().to_vec()
    }

    /// Sees to memory for so many values: [`DeviceBuffer::reserve`].
    ///
    /// # Errors
    /// As there; [`Error::SizeOverflow`].
    pub fn reserve(&mut self, capacity: usize) -> Result<()> {
        self.buffer.reserve(bytes::<T>(capacity)?)
    }

    /// Makes it longer or shorter. Values that come are as the memory was.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve).
    pub fn resize_uninit(&mut self, len: usize) -> Result<()> {
        self.buffer.resize(bytes::<T>(len)?)?;
        self.len = len;
        Ok(())
    }

    /// Makes it longer or shorter. Values that come are this one.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve) and [`DeviceSliceMut::fill`]; the values are then as they were.
    pub fn resize(&mut self, len: usize, value: T) -> Result<()> {
        let old = self.len;
        self.resize_uninit(len)?;
        if len > old {
            let filled = self.slice_mut(old..).and_then(|mut new| new.fill(value));
            if let Err(error) = filled {
                self.resize_uninit(old)?;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Gives memory beyond the values back: [`DeviceBuffer::shrink_to_fit`].
    ///
    /// # Errors
    /// As there.
    pub fn shrink_to_fit(&mut self) -> Result<()> {
        self.buffer.shrink_to_fit()
    }

    /// Frees the memory, as drop does, and says what came of it.
    ///
    /// # Errors
    /// Those of the resource's [`deallocate`](MemoryResource::deallocate).
    pub fn release(self) -> Result<()> {
        self.buffer.release()
    }
}

fn bytes<T>(len: usize) -> Result<usize> {
    let size = size_of::<T>();
    let overflow = Error::SizeOverflow { bytes: len as u64, unit_bytes: size as u64 };
    len.checked_mul(size).ok_or(overflow)
}

impl<T: Pod, R: MemoryResource> fmt::Debug for DeviceVec<T, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceVec({} values in {:?})", self.len, self.buffer)
    }
}

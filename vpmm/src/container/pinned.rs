//! Values in page-locked host memory.

use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::slice;

use bytemuck::Pod;

use super::block::Block;
use super::copy;
use super::slice::{DeviceSlice, DeviceSliceMut};
use super::transfer::Transfer;
use crate::error::{Error, Result};
use crate::resource::{HostMemory, MIN_ALIGN, MemoryResource, PinnedHost};
use crate::stream::{Event, Stream};

/// Values of plain old data in the host's memory, page-locked where the resource is: a slice for the
/// host, and what copies to and from devices run at full speed with, beside the host.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let sim = cuda_sim::Simulator::builder().build()?;
/// # let driver = vpmm::Driver::new(sim.driver())?;
/// # let device = driver.device(0)?;
/// # let stream = device.stream()?;
/// use vpmm::{DeviceVec, PinnedVec, resource::{DeviceMalloc, PinnedHost}};
///
/// let mut host = PinnedVec::zeroed(1000, &stream, PinnedHost::new(&device))?;
/// host[3] = 42_u32;
/// let mut values = DeviceVec::uninit(1000, &stream, DeviceMalloc::new(&device))?;
/// let upload = host.upload(&mut values.as_mut_slice())?; // goes on beside the host
/// let host = upload.wait()?;
/// assert_eq!((values.get(3)?, host[3]), (42, 42));
/// # Ok(())
/// # }
/// ```
pub struct PinnedVec<T, R: MemoryResource = PinnedHost> {
    block: Block<R>,
    len: usize,
    values: PhantomData<T>,
}

impl<T: Pod, R: HostMemory> PinnedVec<T, R> {
    /// So many values of all zero bytes. The stream is that of the memory's end.
    ///
    /// # Errors
    /// Those of the resource's [`allocate`](MemoryResource::allocate); [`Error::SizeOverflow`].
    pub fn zeroed(len: usize, stream: &Stream, resource: R) -> Result<Self> {
        // SAFETY: what the trait promises.
        unsafe { Self::zeroed_in(len, stream, resource) }
    }

    /// A copy of a slice.
    ///
    /// # Errors
    /// As [`zeroed`](Self::zeroed).
    pub fn from_slice(values: &[T], stream: &Stream, resource: R) -> Result<Self> {
        let mut copy = Self::zeroed(values.len(), stream, resource)?;
        copy.copy_from_slice(values);
        Ok(copy)
    }
}

impl<T: Pod, R: MemoryResource> PinnedVec<T, R> {
    /// As [`zeroed`](Self::zeroed), with any resource. One in the [order of streams](crate::resource::Facts::stream_ordered),
    /// as a pool is, gives memory that the stream may still be using: that is waited for.
    ///
    /// # Errors
    /// As there; for such a resource those of [`Stream::synchronize`], and [`Error::StreamCapturing`].
    ///
    /// # Safety
    /// The host can read and write the resource's memory at its addresses, and nobody frees, by the
    /// bare address, what this value has.
    pub unsafe fn zeroed_in(len: usize, stream: &Stream, resource: R) -> Result<Self> {
        let overflow = Error::SizeOverflow { bytes: len as u64, unit_bytes: size_of::<T>() as u64 };
        // No slice is longer than that.
        let fits = |bytes: &usize| isize::try_from(*bytes).is_ok();
        let bytes = len.checked_mul(size_of::<T>()).filter(fits).ok_or(overflow)?;
        let block = Block::new(bytes, align_of::<T>().max(MIN_ALIGN), stream, resource)?;
        if bytes > 0 && block.resource().facts().stream_ordered {
            copy::settle(block.home())?;
        }
        let values = Self { block, len, values: PhantomData };
        // SAFETY: the memory has so many bytes, and is nobody else's; zeros are values of `T`.
        unsafe { values.first().as_ptr().cast::<u8>().write_bytes(0, bytes) };
        Ok(values)
    }

    fn first(&self) -> NonNull<T> {
        let address = self.block.ptr().address() as usize;
        NonNull::new(std::ptr::with_exposed_provenance_mut(address)).unwrap_or(NonNull::dangling())
    }

    /// The stream of the memory's end.
    pub fn stream(&self) -> &Stream {
        self.block.home().given()
    }

    /// Where the memory is from.
    pub fn resource(&self) -> &R {
        self.block.resource()
    }

    /// Enqueues a copy to a device, which goes on while the host does: after what is on the device's
    /// stream, before what comes there. The values come back from the [`Transfer`].
    ///
    /// # Errors
    /// [`Error::LengthMismatch`] unless there are exactly as many; [`Error::StreamCapturing`],
    /// [`Error::Driver`], [`Error::ContextLost`]. The values are then gone.
    pub fn upload(self, to: &mut DeviceSliceMut<'_, T>) -> Result<Transfer<T, R>> {
        self.check_length(to.len())?;
        let (address, bytes) = (to.address(), self.len * size_of::<T>());
        self.transfer(&*to.home().turn()?, |stream, host| {
            // SAFETY: the transfer owns the values until it has waited for the copy, or for ever.
            unsafe { copy::enqueue_upload(stream, address, host, bytes) }
        })
    }

    /// Enqueues a copy from a device, which goes on while the host does. The values come back from the
    /// [`Transfer`].
    ///
    /// # Errors
    /// As [`upload`](Self::upload).
    pub fn download(self, from: &DeviceSlice<'_, T>) -> Result<Transfer<T, R>> {
        self.check_length(from.len())?;
        let (address, bytes) = (from.address(), self.len * size_of::<T>());
        self.transfer(&*from.home().turn()?, |stream, host| {
            // SAFETY: as in `upload`.
            unsafe { copy::enqueue_download(stream, host, address, bytes) }
        })
    }

    fn check_length(&self, len: usize) -> Result<()> {
        if self.len == len { Ok(()) } else { Err(Error::LengthMismatch { given: self.len, len }) }
    }

    fn transfer(
        self,
        stream: &Stream,
        enqueue: impl FnOnce(&Stream, *mut u8) -> Result<()>,
    ) -> Result<Transfer<T, R>> {
        if stream.is_capturing()? {
            return Err(Error::StreamCapturing);
        }
        let done = Event::new(stream.device())?;
        if self.len > 0 && size_of::<T>() > 0 {
            enqueue(stream, self.first().as_ptr().cast())?;
        }
        if let Err(error) = done.record(stream) {
            if stream.synchronize().is_err() {
                self.leak();
            }
            return Err(error);
        }
        Ok(Transfer::new(self, done))
    }

    /// Leaves the memory as it is, for a copy that could not be waited for.
    pub(super) fn leak(self) {
        let _ = ManuallyDrop::new(self);
    }
}

impl<T: Pod, R: MemoryResource> Deref for PinnedVec<T, R> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the memory has so many values, aligned, all of them written; nobody else has it
        // while this value is not in a transfer.
        unsafe { slice::from_raw_parts(self.first().as_ptr(), self.len) }
    }
}

impl<T: Pod, R: MemoryResource> DerefMut for PinnedVec<T, R> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and this is the only borrow.
        unsafe { slice::from_raw_parts_mut(self.first().as_ptr(), self.len) }
    }
}

impl<T: Pod + fmt::Debug, R: MemoryResource> fmt::Debug for PinnedVec<T, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

//! One value on a device.

use std::fmt;
use std::sync::Arc;

use bytemuck::Pod;

use super::vec::DeviceVec;
use crate::error::Result;
use crate::resource::MemoryResource;
use crate::stream::Stream;
use crate::units::DevicePtr;

/// One value on a device: what a kernel counts into, or reads a parameter from. RMM has
/// `device_scalar`.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let sim = cuda_sim::Simulator::builder().build()?;
/// # let driver = vpmm::Driver::new(sim.driver())?;
/// # let device = driver.device(0)?;
/// # let stream = device.stream()?;
/// use vpmm::{DeviceScalar, resource::DeviceMalloc};
///
/// let mut found = DeviceScalar::new(0_u64, &stream, DeviceMalloc::new(&device))?;
/// // … kernels on `stream` that add to `found.ptr()` …
/// found.set(found.get()? + 1)?;
/// assert_eq!(found.get()?, 1);
/// # Ok(())
/// # }
/// ```
pub struct DeviceScalar<T: Pod, R: MemoryResource = Arc<dyn MemoryResource>>(DeviceVec<T, R>);

impl<T: Pod, R: MemoryResource> DeviceScalar<T, R> {
    /// This value, without a wait where [`set`](Self::set) has none.
    ///
    /// # Errors
    /// Those of the resource's [`allocate`](MemoryResource::allocate), and of `set`.
    pub fn new(value: T, stream: &Stream, resource: R) -> Result<Self> {
        let mut scalar = Self::uninit(stream, resource)?;
        scalar.set(value)?;
        Ok(scalar)
    }

    /// Whatever was in the memory before.
    ///
    /// # Errors
    /// Those of the resource's [`allocate`](MemoryResource::allocate).
    pub fn uninit(stream: &Stream, resource: R) -> Result<Self> {
        DeviceVec::uninit(1, stream, resource).map(Self)
    }

    /// The value; waits for the stream.
    ///
    /// # Errors
    /// As [`DeviceSlice::get`](super::DeviceSlice::get).
    pub fn get(&self) -> Result<T> {
        self.0.get(0)
    }

    /// Sets the value: [`DeviceSliceMut::set`](super::DeviceSliceMut::set).
    ///
    /// # Errors
    /// As there.
    pub fn set(&mut self, value: T) -> Result<()> {
        self.0.set(0, value)
    }

    /// The address, for kernels.
    pub fn ptr(&self) -> DevicePtr {
        self.0.ptr()
    }

    /// The stream that the value is at home on.
    pub fn stream(&self) -> &Stream {
        self.0.stream()
    }

    /// Goes to another stream: [`DeviceBuffer::set_stream`](super::DeviceBuffer::set_stream).
    ///
    /// # Errors
    /// As there.
    pub fn set_stream(&mut self, stream: &Stream) -> Result<()> {
        self.0.set_stream(stream)
    }

    /// Where the memory is from.
    pub fn resource(&self) -> &R {
        self.0.resource()
    }
}

impl<T: Pod, R: MemoryResource> fmt::Debug for DeviceScalar<T, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceScalar({} on {:?})", self.ptr(), self.stream())
    }
}

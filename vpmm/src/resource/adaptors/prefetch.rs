//! Managed memory brought to the device before it is used.

use crate::capture::stream_is_capturing;
use crate::device::{Device, StreamHandle};
use crate::error::Result;
use crate::resource::{Description, MemoryResource};
use crate::units::DevicePtr;

/// Has the driver move every allocation to the device, in the order of its stream, so that the first
/// kernel meets no page faults: `cuMemPrefetchAsync`.
///
/// Does nothing where what is below is not managed ([`Facts::managed`](crate::resource::Facts)), nor on
/// a stream that captures a graph. A prefetch is a hint: the allocation is good whether the driver takes
/// it or not. RMM: `prefetch_resource_adaptor`.
#[derive(Debug)]
pub struct Prefetch<R> {
    upstream: R,
    device: Device,
}

impl<R: MemoryResource> Prefetch<R> {
    /// Moves what is allocated from this to the device.
    pub fn new(upstream: R, device: &Device) -> Self {
        Self { upstream, device: device.clone() }
    }

    /// What is below.
    pub fn upstream(&self) -> &R {
        &self.upstream
    }

    fn prefetch(&self, ptr: DevicePtr, bytes: usize, stream: StreamHandle) -> Result<()> {
        // What is below says whose default stream a handle is.
        let streams_of = self.upstream.device().unwrap_or(&self.device);
        let _context = streams_of.enter()?;
        let driver = streams_of.driver();
        streams_of.check_lives(stream)?;
        if stream_is_capturing(driver, stream)? {
            return Ok(());
        }
        let device = self.device.location().id;
        // SAFETY: the memory was just allocated with this length, and whoever made the stream handle
        // vouches for its stream.
        Ok(unsafe { driver.cuMemPrefetchAsync(ptr.address(), bytes, device, stream.raw()) }?)
    }
}

impl<R: MemoryResource> MemoryResource for Prefetch<R> {
    /// Two driver calls more than below, for managed memory.
    ///
    /// # Errors
    /// Those of what is below.
    fn allocate(&self, bytes: usize, align: usize, stream: StreamHandle) -> Result<DevicePtr> {
        let ptr = self.upstream.allocate(bytes, align, stream)?;
        if !ptr.is_null() && self.upstream.facts().managed {
            // Whatever the driver says to it, the memory can be used.
            let _ = self.prefetch(ptr, bytes, stream);
        }
        Ok(ptr)
    }

    fn deallocate(
        &self,
        ptr: DevicePtr,
        bytes: usize,
        align: usize,
        stream: StreamHandle,
    ) -> Result<()> {
        self.upstream.deallocate(ptr, bytes, align, stream)
    }

    fn describe(&self) -> Description {
        Description::new("prefetch")
            .with("device", self.device.ordinal())
            .over(self.upstream.describe())
    }

    passes_on!(facts, identity, device, held_bytes, record_stream);
}

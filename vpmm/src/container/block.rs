//! An allocation with an owner.

use std::fmt;

use super::copy;
use super::home::Home;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::resource::MemoryResource;
use crate::stream::Stream;
use crate::units::DevicePtr;

/// Memory of a resource, freed on its stream at drop.
pub(super) struct Block<R: MemoryResource> {
    ptr: DevicePtr,
    bytes: usize,
    align: usize,
    home: Home,
    resource: R,
    /// The memory is nobody's any more.
    freed: bool,
}

impl<R: MemoryResource> Block<R> {
    pub(super) fn new(bytes: usize, align: usize, stream: &Stream, resource: R) -> Result<Self> {
        check_device(&resource, stream)?;
        let ptr = resource.allocate(bytes, align, stream.handle())?;
        Ok(Self { ptr, bytes, align, home: Home::new(stream), resource, freed: false })
    }

    pub(super) fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn align(&self) -> usize {
        self.align
    }

    pub(super) fn home(&self) -> &Home {
        &self.home
    }

    /// Goes to another stream: see [`Home::move_to`].
    pub(super) fn move_to(&mut self, stream: &Stream) -> Result<()> {
        check_device(&self.resource, stream)?;
        self.home.move_to(stream)
    }

    pub(super) fn resource(&self) -> &R {
        &self.resource
    }

    /// Takes other memory of the same resource in the place of this, once `copy` has enqueued what is
    /// to be kept on the same stream. A failure leaves everything as it was.
    pub(super) fn replace(
        &mut self,
        bytes: usize,
        copy: impl FnOnce(&Home, DevicePtr, DevicePtr) -> Result<()>,
    ) -> Result<()> {
        let stream = self.home.turn()?.handle();
        let new = self.resource.allocate(bytes, self.align, stream)?;
        if let Err(error) = copy(&self.home, self.ptr, new) {
            // The first failure is the one to tell.
            let _ = self.resource.deallocate(new, bytes, self.align, stream);
            return Err(error);
        }
        let (old, old_bytes) = (self.ptr, self.bytes);
        (self.ptr, self.bytes) = (new, bytes);
        // The container has what was asked for. Memory that could not be freed stays the resource's.
        let _ = self.free(old, old_bytes);
        Ok(())
    }

    /// Gives memory of the resource back, once the stream is done with it.
    fn free(&self, ptr: DevicePtr, bytes: usize) -> Result<()> {
        let stream = self.home.given();
        if !ptr.is_null() && is_elsewhere(&self.resource, stream) {
            // The free waits for the memory's device alone. In a context that is lost nothing runs any more.
            match copy::settle(&self.home) {
                Ok(()) | Err(Error::ContextLost { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        let handle = self.home.turn()?.handle();
        self.resource.deallocate(ptr, bytes, self.align, handle)
    }

    fn deallocate(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.freed, true) {
            return Ok(());
        }
        self.free(self.ptr, self.bytes)
    }

    /// Frees the memory, and says what came of it.
    pub(super) fn release(mut self) -> Result<()> {
        self.deallocate()
    }
}

/// Refuses a stream of another device than a resource orders its memory by: the handle of a default stream, which
/// is the same for every device, it would take for that of its own.
fn check_device<R: MemoryResource>(resource: &R, stream: &Stream) -> Result<()> {
    let stream_device = stream.device().ordinal();
    match resource.device().map(Device::ordinal) {
        Some(own) if own != stream_device && resource.facts().stream_ordered => {
            Err(Error::WrongDevice { stream_device, pool_device: own })
        }
        _ => Ok(()),
    }
}

/// Whether a stream is of another device than a resource's memory, as it may be where [`check_device`] allows it.
fn is_elsewhere<R: MemoryResource>(resource: &R, stream: &Stream) -> bool {
    resource.device().is_some_and(|own| own.ordinal() != stream.device().ordinal())
}

impl<R: MemoryResource> Drop for Block<R> {
    fn drop(&mut self) {
        // Nobody is left to tell. Memory that could not be freed stays the resource's.
        let _ = self.deallocate();
    }
}

impl<R: MemoryResource> fmt::Debug for Block<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {} on {:?}", self.bytes, self.ptr, self.home.given())
    }
}

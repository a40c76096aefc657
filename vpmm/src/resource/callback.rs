//! Functions of the caller's as a resource.

#![forbid(unsafe_code)]

use std::fmt;

use super::description::Description;
use super::facts::Facts;
use super::identity::Identity;
use super::memory_resource::MemoryResource;
use super::request::{check_align, is_of_nothing};
use crate::device::{Device, StreamHandle};
use crate::error::{Error, Result};
use crate::units::DevicePtr;

/// Memory from two functions of the caller's: one that allocates (bytes, alignment, stream), and one
/// that frees (pointer, bytes, alignment, stream).
///
/// They are not called for requests of 0 bytes, nor for alignments beyond the [`Facts`] given. What an
/// allocation returns is checked to be aligned; a null pointer counts as out of memory. Errors of
/// one's own fit into [`Error::Resource`]. RMM: `callback_memory_resource`.
///
/// They may call what stands above: a pool that grows or gives back by them in this thread then serves what it has,
/// is out of memory where it would have to grow once more, and gives nothing back. They may call other pools of the
/// same [`Driver`](crate::Driver), too: of threads that would wait for each other, each in one pool and on its way into
/// another's growth, one is treated in the same way.
///
/// ```
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use vpmm::resource::{Callback, Facts, MemoryResource};
/// use vpmm::{DevicePtr, Error, StreamHandle};
///
/// let next = AtomicU64::new(0x10000);
/// let addresses = Callback::new(
///     Facts::of_device_memory(),
///     |bytes, _align, _stream| {
///         let step = bytes.next_multiple_of(256) as u64;
///         Ok(DevicePtr::from_address(next.fetch_add(step, Ordering::Relaxed)))
///     },
///     |_ptr, _bytes, _align, _stream| Ok(()),
/// );
/// let (a, b) = (addresses.allocate(1000, 256, StreamHandle::LEGACY)?,
///               addresses.allocate(1, 256, StreamHandle::LEGACY)?);
/// assert_eq!(b.address() - a.address(), 1024);
/// # Ok::<(), Error>(())
/// ```
pub struct Callback<A, F> {
    allocate: A,
    free: F,
    facts: Facts,
    device: Option<Device>,
    identity: Identity,
}

impl<A, F> Callback<A, F>
where
    A: Fn(usize, usize, StreamHandle) -> Result<DevicePtr> + Send + Sync,
    F: Fn(DevicePtr, usize, usize, StreamHandle) -> Result<()> + Send + Sync,
{
    /// A resource of these functions, which keep to these facts.
    pub fn new(facts: Facts, allocate: A, free: F) -> Self {
        Self { allocate, free, facts, device: None, identity: Identity::unique() }
    }

    /// The same, for streams of this device.
    #[must_use]
    pub fn with_device(mut self, device: &Device) -> Self {
        self.device = Some(device.clone());
        self
    }
}

impl<A, F> MemoryResource for Callback<A, F>
where
    A: Fn(usize, usize, StreamHandle) -> Result<DevicePtr> + Send + Sync,
    F: Fn(DevicePtr, usize, usize, StreamHandle) -> Result<()> + Send + Sync,
{
    /// # Errors
    /// Those of the function; [`Error::OutOfMemory`] where it returns a null pointer,
    /// [`Error::AlignmentUnsupported`] where it returns one that is not aligned, which is then freed.
    fn allocate(&self, bytes: usize, align: usize, stream: StreamHandle) -> Result<DevicePtr> {
        check_align(align, self.facts.max_align)?;
        if bytes == 0 {
            return Ok(DevicePtr::NULL);
        }
        let align = align.max(self.facts.min_align);
        let ptr = (self.allocate)(bytes, align, stream)?;
        if ptr.is_null() {
            return Err(Error::exhausted(bytes as u64, 0, None));
        }
        if ptr.address().is_multiple_of(align as u64) {
            return Ok(ptr);
        }
        (self.free)(ptr, bytes, align, stream)?;
        let most = 1 << ptr.address().trailing_zeros();
        Err(Error::AlignmentUnsupported { align, most })
    }

    /// # Errors
    /// Those of the function.
    fn deallocate(
        &self,
        ptr: DevicePtr,
        bytes: usize,
        align: usize,
        stream: StreamHandle,
    ) -> Result<()> {
        if is_of_nothing(ptr, bytes)? {
            return Ok(());
        }
        (self.free)(ptr, bytes, align.max(self.facts.min_align), stream)
    }

    fn facts(&self) -> Facts {
        self.facts
    }

    fn describe(&self) -> Description {
        Description::new("callback")
    }

    fn identity(&self) -> Identity {
        self.identity
    }

    fn device(&self) -> Option<&Device> {
        self.device.as_ref()
    }
}

impl<A, F> fmt::Debug for Callback<A, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Callback").field("facts", &self.facts).finish_non_exhaustive()
    }
}

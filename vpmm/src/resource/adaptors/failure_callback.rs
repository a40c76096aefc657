//! A callback that makes room.

#![forbid(unsafe_code)]

use std::fmt;

use crate::device::StreamHandle;
use crate::error::{Error, Result};
use crate::resource::{Description, MemoryResource};
use crate::units::DevicePtr;

/// Calls a function of the caller's when there is no memory for a request, and tries again as long as
/// that says so.
///
/// The function gets the bytes asked for and the error; it may free memory of this resource. It is
/// called for errors that [`is_out_of_memory`](Error::is_out_of_memory) is true for, and no others. It
/// must say `false` in the end: a function that always says `true` never lets a request fail. A pool above that
/// asks for more may be giving back already what it has free, and gives nothing back then when the function calls
/// it: what counts is how much it holds less. Threads
/// that fail at the same time call it at the same time. RMM: `failure_callback_resource_adaptor`.
///
/// ```
/// use std::sync::Mutex;
/// use vpmm::resource::{FailureCallback, HostMalloc, Limiting, MemoryResource};
/// use vpmm::StreamHandle;
///
/// let stream = StreamHandle::LEGACY;
/// let limiting = Limiting::new(HostMalloc::new(), 1 << 20);
/// let cache = Mutex::new(Some(limiting.allocate(1 << 20, 256, stream)?));
/// let resource = FailureCallback::new(&limiting, |_bytes, _error| {
///     let cached = cache.lock().unwrap().take();
///     cached.is_some_and(|ptr| limiting.deallocate(ptr, 1 << 20, 256, stream).is_ok())
/// });
/// let ptr = resource.allocate(1000, 256, stream)?; // in the place of what was cached
/// assert!(resource.allocate(1 << 20, 256, stream).is_err()); // nothing is left to give up
/// resource.deallocate(ptr, 1000, 256, stream)?;
/// # Ok::<(), vpmm::Error>(())
/// ```
pub struct FailureCallback<R, F> {
    upstream: R,
    callback: F,
}

impl<R, F> FailureCallback<R, F>
where
    R: MemoryResource,
    F: Fn(usize, &Error) -> bool + Send + Sync,
{
    /// Asks `callback` whether to try again.
    pub fn new(upstream: R, callback: F) -> Self {
        Self { upstream, callback }
    }

    /// What is below.
    pub fn upstream(&self) -> &R {
        &self.upstream
    }
}

impl<R, F> MemoryResource for FailureCallback<R, F>
where
    R: MemoryResource,
    F: Fn(usize, &Error) -> bool + Send + Sync,
{
    /// # Errors
    /// Those of what is below, when the callback has given up.
    fn allocate(&self, bytes: usize, align: usize, stream: StreamHandle) -> Result<DevicePtr> {
        loop {
            match self.upstream.allocate(bytes, align, stream) {
                Err(error) if error.is_out_of_memory() && (self.callback)(bytes, &error) => {}
                result => return result,
            }
        }
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
        Description::new("failure-callback").over(self.upstream.describe())
    }

    passes_on!(facts, identity, device, held_bytes, record_stream);
}

impl<R: fmt::Debug, F> fmt::Debug for FailureCallback<R, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FailureCallback").field("upstream", &self.upstream).finish_non_exhaustive()
    }
}

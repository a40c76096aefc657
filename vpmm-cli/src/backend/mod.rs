//! Allocators that a replay can run through, behind one small interface.

mod cuda_async;
mod cuda_malloc;
mod pool;
mod spec;
mod stack;

pub(crate) use cuda_async::CudaAsync;
pub(crate) use cuda_malloc::CudaMalloc;
pub(crate) use pool::PoolBackend;
pub use spec::{AllocatorList, AllocatorSpec, SpecError};
pub(crate) use stack::StackBackend;
pub use stacks::{Kind, Stack, StackError};

use std::path::{Path, PathBuf};

use vpmm::StreamHandle;

/// Whether memory ran out, or there never would have been so much: a request that is longer than all that an
/// allocator may have is one that lacks memory.
pub(crate) fn lacks_memory(error: &vpmm::Error) -> bool {
    use vpmm::Error::{RequestTooLong, SizeOverflow};
    error.is_out_of_memory() || matches!(error, RequestTooLong { .. } | SizeOverflow { .. })
}

/// Whether an allocator could not be made since it was given a setting that cannot be: what was asked for is wrong,
/// and nothing has failed. Requests have an alignment of the command's own.
pub(crate) fn is_bad_setting(error: &vpmm::Error) -> bool {
    use vpmm::Error::{AlignmentUnsupported, BadAlignment, Config};
    matches!(error, Config { .. } | BadAlignment { .. } | AlignmentUnsupported { .. })
}

/// `3 rows of the log a.csv could not be written`
pub(crate) fn lost_text(log: &Path, rows: u64) -> String {
    let (log, plural) = (log.display(), if rows == 1 { "" } else { "s" });
    format!("{rows} row{plural} of the log {log} could not be written")
}

/// An allocator under test: what it hands out, and what it cost.
///
/// All methods may be called from several threads at once, each of which has
/// made the device's context current.
pub trait Backend: Sync {
    /// Allocates at least `bytes` bytes (not 0) for use in work enqueued on
    /// `stream` from now on; returns the address.
    ///
    /// # Errors
    /// Out of memory, told by [`vpmm::Error::is_out_of_memory`], or a failure.
    fn allocate(&self, bytes: u64, stream: StreamHandle) -> vpmm::Result<u64>;

    /// Frees an allocation of `bytes`, as they were asked for; uses of it enqueued on `stream` before are finished first.
    ///
    /// # Safety
    /// `address` must come from [`Backend::allocate`] of this very allocator and
    /// must not have been freed since: some allocators cannot tell.
    ///
    /// # Errors
    /// What the allocator or the driver answers.
    unsafe fn free(&self, address: u64, bytes: u64, stream: StreamHandle) -> vpmm::Result<()>;

    /// The most bytes of device memory held at one time so far, in use or not.
    ///
    /// # Errors
    /// What the driver answers where it has to be asked.
    fn peak_mapped_bytes(&self) -> vpmm::Result<u64>;

    /// Whether work on the device can use the memory.
    fn is_for_the_device(&self) -> bool {
        true
    }

    /// Logs that it writes and that lack rows, and how many.
    fn lost_rows(&self) -> Vec<(PathBuf, u64)> {
        Vec::new()
    }

    /// How many driver calls the allocator has made so far.
    fn driver_calls(&self) -> u64;

    /// Where the bytes are, for people: printed when memory has run out.
    fn map(&self) -> String;
}

//! The host memory that stands for device memory: sparse files mapped whole.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{FallocateFlags, MemfdFlags, SeekFrom};
use rustix::mm::{MapFlags, ProtFlags};

/// One memfd with all of it mapped readable and writable. Untouched bytes read as zero and
/// cost nothing.
#[derive(Debug)]
pub(crate) struct Segment {
    file: OwnedFd,
    base: NonNull<u8>,
    size: u64,
}

// SAFETY: the mapping belongs to this value alone until it is dropped, and every use of its
// bytes goes through raw pointers under the simulator's lock.
unsafe impl Send for Segment {}
// SAFETY: as for `Send`; a shared reference gives out pointers, never references to bytes.
unsafe impl Sync for Segment {}

impl Segment {
    /// A new zeroed segment; `name` is visible to whoever receives its descriptor.
    pub(crate) fn create(name: &str, size: u64) -> io::Result<Self> {
        let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&file, size)?;
        Self::map(file, size)
    }

    /// The segment behind a descriptor that another simulator exported.
    pub(crate) fn adopt(file: OwnedFd) -> io::Result<Self> {
        let size = u64::try_from(rustix::fs::fstat(&file)?.st_size).unwrap_or(0);
        Self::map(file, size)
    }

    fn map(file: OwnedFd, size: u64) -> io::Result<Self> {
        let length = usize::try_from(size).map_err(|_| io::ErrorKind::OutOfMemory)?;
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                &file,
                0,
            )
        }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { file, base, size })
    }

    /// Bytes in the segment.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// The host address of a byte; `None` beyond the end.
    pub(crate) fn pointer(&self, offset: u64, length: u64) -> Option<*mut u8> {
        if offset.checked_add(length)? > self.size {
            return None;
        }
        // SAFETY: the offset was checked to lie within the one mapping that `base` points to,
        // whose size fits in isize because the kernel made it.
        Some(unsafe { self.base.as_ptr().add(offset as usize) })
    }

    /// Makes a range zero again and gives its memory back to the host.
    pub(crate) fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&self.file, flags, offset, length)?)
    }

    /// Copies `length` bytes at `offset` to the start of `to`, holes left out.
    pub(crate) fn copy_data_to(&self, offset: u64, length: u64, to: &Self) -> io::Result<()> {
        let end = offset + length;
        let mut at = offset;
        while at < end {
            let data = match rustix::fs::seek(&self.file, SeekFrom::Data(at)) {
                Ok(data) if data < end => data,
                Ok(_) | Err(rustix::io::Errno::NXIO) => break,
                Err(error) => return Err(error.into()),
            };
            let hole = rustix::fs::seek(&self.file, SeekFrom::Hole(data))?.min(end);
            let bytes = hole - data;
            let (Some(source), Some(target)) =
                (self.pointer(data, bytes), to.pointer(data - offset, bytes))
            else {
                return Err(io::ErrorKind::InvalidInput.into());
            };
            // SAFETY: both ranges were just checked to lie within their segments, and two
            // segments are separate mappings of separate files.
            unsafe { std::ptr::copy_nonoverlapping(source, target, bytes as usize) };
            at = hole;
        }
        Ok(())
    }
}

impl AsFd for Segment {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: the range is the one mapping made in `map`, and no pointer into it outlives
        // the last owner of the segment. An error leaves the range mapped, which is harmless.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.size as usize) };
    }
}

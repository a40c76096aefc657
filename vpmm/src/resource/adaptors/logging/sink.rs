//! Where rows go.

use std::fmt;
use std::fs::File;
use std::io::{self, IoSlice, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::{pwritev, retry_on_intr};
use rustix::mm::{Advice, MapFlags, MsyncFlags, ProtFlags, madvise, mmap, msync, munmap};

use crate::fork::Birthmark;

/// The part of a file that is mapped at a time: some 4,000 rows, little enough to stay in a processor's
/// cache from its zeroes to its rows. A multiple of every page size.
const WINDOW: usize = 256 << 10;

/// What a window holds at first, many times over.
static ZEROES: [u8; 4 << 10] = [0; 4 << 10];

/// One place that rows go to, whole and one after the other.
pub(super) struct Sink {
    to: Mutex<To>,
    lost: AtomicU64,
    /// Of a file, which a child shares with its parent.
    birthmark: Option<Birthmark>,
    name: String,
}

enum To {
    File(MappedFile),
    Writer(Box<dyn Write + Send>),
}

impl Sink {
    /// A file, emptied. What is no plain file (a pipe, a terminal) is written to.
    pub(super) fn file(path: &Path) -> io::Result<Self> {
        let file = File::options().read(true).write(true).create(true).truncate(true).open(path)?;
        let to = if file.metadata()?.is_file() {
            To::File(MappedFile::new(file, path)?)
        } else {
            To::Writer(Box::new(file))
        };
        let birthmark = Some(Birthmark::new().ok_or(io::ErrorKind::OutOfMemory)?);
        let (to, lost) = (Mutex::new(to), AtomicU64::new(0));
        Ok(Self { to, lost, birthmark, name: path.display().to_string() })
    }

    pub(super) fn writer(writer: Box<dyn Write + Send>) -> Self {
        let to = Mutex::new(To::Writer(writer));
        Self { to, lost: AtomicU64::new(0), birthmark: None, name: "a writer".to_owned() }
    }

    fn is_childs(&self) -> bool {
        self.birthmark.as_ref().is_some_and(Birthmark::is_childs)
    }

    fn to(&self) -> MutexGuard<'_, To> {
        self.to.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes a row; one that cannot be written is counted.
    pub(super) fn write(&self, row: &[u8]) {
        if self.is_childs() {
            return;
        }
        let written = match &mut *self.to() {
            To::File(file) => file.write(row),
            To::Writer(writer) => writer.write_all(row),
        };
        if written.is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    pub(super) fn flush(&self) -> io::Result<()> {
        if self.is_childs() {
            return Ok(());
        }
        match &mut *self.to() {
            To::File(file) => file.flush(),
            To::Writer(writer) => writer.flush(),
        }
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        if self.is_childs() {
            return;
        }
        if let To::File(file) = &mut *self.to() {
            file.cut();
        }
    }
}

impl fmt::Display for Sink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// A file that is written through a mapping of its end.
struct MappedFile {
    file: File,
    path: PathBuf,
    window: Option<NonNull<u8>>,
    /// Where in the file the window begins.
    start: u64,
    /// How much of the window is written.
    used: usize,
}

// SAFETY: the window is this value's own mapping, used through `&mut` alone.
unsafe impl Send for MappedFile {}

impl MappedFile {
    fn new(file: File, path: &Path) -> io::Result<Self> {
        let mut new = Self { file, path: path.to_owned(), window: None, start: 0, used: 0 };
        new.map(0)?;
        Ok(new)
    }

    /// Maps the window that begins at `start`, in place of the one that there is. The disk has the room
    /// before a byte of it is touched: a write to a mapping cannot fail otherwise than by a signal.
    fn map(&mut self, start: u64) -> io::Result<()> {
        match fallocate(&self.file, FallocateFlags::empty(), start, WINDOW as u64) {
            Ok(()) => {}
            // A file system that cannot promise room: the zeroes take it.
            Err(rustix::io::Errno::OPNOTSUPP) => self.file.set_len(start + WINDOW as u64)?,
            Err(error) => return Err(error.into()),
        }
        self.fill(start)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory; the file
        // is as long as that. Who cuts it meanwhile makes the next row a signal, as for every mapping.
        let window =
            unsafe { mmap(ptr::null_mut(), WINDOW, access, MapFlags::SHARED, &self.file, start) }?;
        // All its pages at once, which is cheaper than a fault for each. Linux before 5.14 refuses.
        // SAFETY: the mapping just made, whose contents this leaves as they are.
        let _ = unsafe { madvise(window, WINDOW, Advice::LinuxPopulateWrite) };
        self.unmap();
        self.window = NonNull::new(window.cast());
        self.start = start;
        self.used = 0;
        Ok(())
    }

    /// Writes the zeroes of the window at `start`. Its pages are then in the kernel's cache and dirty,
    /// which on ext4 costs a third of finding each by a fault: of reading it as zeroes, and of a
    /// transaction for its first write. In one call, by whose length the kernel chooses how large
    /// the pieces are in which it keeps them.
    fn fill(&self, start: u64) -> io::Result<()> {
        let window = [IoSlice::new(&ZEROES); WINDOW / ZEROES.len()];
        let written = retry_on_intr(|| pwritev(&self.file, &window, start))?;
        // What a call that stopped early has left.
        let (mut at, end) = (start + written as u64, start + WINDOW as u64);
        while at < end {
            let part = ZEROES.len().min((end - at) as usize);
            self.file.write_all_at(&ZEROES[..part], at)?;
            at += part as u64;
        }
        Ok(())
    }

    fn unmap(&mut self) {
        if let Some(window) = self.window.take() {
            // SAFETY: mapped in `map` with this length, and nobody has a pointer into it.
            let _ = unsafe { munmap(window.as_ptr().cast(), WINDOW) };
        }
    }

    /// All of a row, or nothing of it.
    fn write(&mut self, row: &[u8]) -> io::Result<()> {
        let (start, used) = (self.start, self.used);
        let result = self.write_parts(row);
        if result.is_err() && self.start == start {
            self.used = used;
        }
        result
    }

    fn write_parts(&mut self, row: &[u8]) -> io::Result<()> {
        let mut rest = row;
        while !rest.is_empty() {
            if self.used == WINDOW {
                self.map(self.start + WINDOW as u64)?;
            }
            let window = self.window.ok_or(io::ErrorKind::BrokenPipe)?;
            let (part, later) = rest.split_at(rest.len().min(WINDOW - self.used));
            // SAFETY: `used` and the part together are within the window, which is this value's own
            // writable mapping; the row is elsewhere.
            unsafe {
                let to = window.as_ptr().add(self.used);
                ptr::copy_nonoverlapping(part.as_ptr(), to, part.len());
            }
            self.used += part.len();
            rest = later;
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        if let Some(window) = self.window {
            // SAFETY: the mapping is this value's own, and alive.
            unsafe { msync(window.as_ptr().cast(), WINDOW, MsyncFlags::SYNC) }?;
        }
        self.file.sync_data()
    }

    /// Takes away what is behind the last row.
    fn cut(&mut self) {
        self.unmap();
        // A file that cannot be cut keeps its zero bytes.
        let _ = self.file.set_len(self.start + self.used as u64);
    }
}

impl fmt::Debug for MappedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MappedFile").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        self.unmap();
    }
}

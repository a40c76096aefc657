//! Where rows go.

use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::file::LogFile;
use super::row::{COMMON, Line};
use crate::fork::Birthmark;
use crate::lock::Alone;

/// One place that rows go to, whole and one after the other.
pub(super) struct Sink {
    to: To,
    lost: AtomicU64,
    /// A child shares a file with its parent, and lacks the thread that may be in a writer.
    birthmark: Option<Birthmark>,
    name: String,
}

enum To {
    File(LogFile),
    Writer(Writer),
}

/// Under a lock whose waiters sleep until they are woken: a write may take as long as the reader of a
/// pipe likes, and is somebody else's code. That may come back here, and is turned away.
struct Writer {
    turn: Alone,
    writer: Mutex<Box<dyn Write + Send>>,
}

impl Writer {
    fn new(writer: Box<dyn Write + Send>) -> Self {
        Self { turn: Alone::default(), writer: Mutex::new(writer) }
    }

    /// One that panics loses the row, and leaves the writer to the next: what is called above has been done, or
    /// is to be.
    fn write(&self, row: &[u8]) -> io::Result<()> {
        let write = || self.by(|writer| writer.write_all(row));
        catch_unwind(AssertUnwindSafe(write)).unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
    }

    fn by(&self, work: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
        let Some(_turn) = self.turn.enter() else {
            return Err(io::Error::other("the writer is at work in this thread"));
        };
        work(&mut **self.writer.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Sink {
    /// A file, emptied. What is no plain file (a pipe, a terminal) is written to.
    pub(super) fn file(path: &Path) -> io::Result<Self> {
        let mut options = File::options();
        let mut file = options.read(true).write(true).create(true).truncate(false).open(path)?;
        let to = if file.metadata()?.is_file() {
            if is_anothers(&file) {
                // Emptied, it would take the pages away that the other's next rows go to: a signal, and the
                // end of the process. The other keeps the file, and this one has the name.
                std::fs::remove_file(path)?;
                file = options.create_new(true).open(path)?;
                let _ = is_anothers(&file);
            }
            file.set_len(0)?;
            To::File(LogFile::new(file)?)
        } else {
            To::Writer(Writer::new(Box::new(file)))
        };
        let birthmark = Some(Birthmark::new().ok_or(io::ErrorKind::OutOfMemory)?);
        Ok(Self { to, lost: AtomicU64::new(0), birthmark, name: path.display().to_string() })
    }

    pub(super) fn writer(writer: Box<dyn Write + Send>) -> Self {
        let to = To::Writer(Writer::new(writer));
        // Without memory for it a child may wait for ever.
        let birthmark = Birthmark::new();
        Self { to, lost: AtomicU64::new(0), birthmark, name: "a writer".to_owned() }
    }

    #[inline]
    fn is_childs(&self) -> bool {
        self.birthmark.as_ref().is_some_and(Birthmark::is_childs)
    }

    /// Writes a row that is at most a line, which is put down where it goes; one that cannot be written
    /// is counted.
    #[inline]
    pub(super) fn put(&self, put: impl Fn(&mut Line<'_>)) {
        if self.is_childs() {
            return;
        }
        self.count(match &self.to {
            To::File(file) => file.put(put),
            To::Writer(writer) => {
                let mut bytes = [0; COMMON];
                let mut line = Line::new(&mut bytes);
                put(&mut line);
                writer.write(line.text())
            }
        });
    }

    /// Writes a row; one that cannot be written is counted.
    pub(super) fn write(&self, row: &[u8]) {
        if self.is_childs() {
            return;
        }
        self.count(match &self.to {
            To::File(file) => file.write(row),
            To::Writer(writer) => writer.write(row),
        });
    }

    #[inline]
    fn count(&self, written: io::Result<()>) {
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
        match &self.to {
            To::File(file) => file.flush(),
            To::Writer(writer) => writer.by(|writer| writer.flush()),
        }
    }
}

/// Whether another log is being written to a file, in this process or elsewhere; else it is this one's from here
/// on. Of a file system without locks nobody can tell.
fn is_anothers(file: &File) -> bool {
    flock(file, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK)
}

impl Drop for Sink {
    fn drop(&mut self) {
        if self.is_childs() {
            return;
        }
        if let To::File(file) = &mut self.to {
            file.cut();
        }
    }
}

impl fmt::Display for Sink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

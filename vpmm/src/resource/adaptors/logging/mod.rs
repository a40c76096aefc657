//! A log of every call.

mod clock;
mod digits;
mod file;
mod row;
mod sink;
mod time;

use std::fmt;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use cuda_sys::types::CUresult;

use super::undo::or_undo;
use crate::device::StreamHandle;
use crate::error::{Error, Result, of_path};
use crate::resource::{Description, MemoryResource};
use crate::units::DevicePtr;
use row::{Action, Line, Row};
use sink::Sink;
use time::Last;

/// How a [`Logging`] writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum LogFormat {
    /// RMM's own, byte for byte: what its replay benchmark and `vpmm replay` read.
    ///
    /// ```text
    /// Thread,Time,Action,Pointer,Size,Stream
    /// 17733,01:45:56.140640,allocate,0x7f000003e800,1000,0
    /// 17733,01:45:56.140685,free,0x7f0000004000,64,0x2
    /// 17733,01:45:56.140946,allocate failure,(nil),5000000,0x55d0c0ffee00
    /// ```
    #[default]
    Rmm,
    /// The same columns, and behind them: `Device` (its number), `Align` (as asked for), `Live` (bytes
    /// allocated through the log after the call), `Held` (bytes that the resource holds, where it
    /// says), `Nanoseconds` (how long the allocation took), `Date` (year, month, day), `Failure` (why a
    /// call failed, in quotes). What is not known is empty.
    Full,
}

/// Writes a row for every call, to a file or elsewhere. RMM: `logging_resource_adaptor`.
///
/// An allocation is logged when it has succeeded or failed, a free before it is passed on: an address
/// is never logged as allocated again before it is logged as freed. A free that fails is taken back by
/// a row that allocates the address again, with the size that it has; one of what is not allocated at all has a
/// further row of a free in the full format, which says so, and one of an address without a size, or the other way
/// round, no other row than that, of a null pointer. Times are local, as RMM's are; where
/// somebody sets the system's clock, a thread's rows may show it a millisecond late.
///
/// A file is written through a mapping of it, so that a row costs no system call, and none is lost when
/// the program crashes: what is in the mapping is the kernel's. At the drop the file is cut to its rows;
/// a program that ends without it leaves zero bytes behind the last row, which `vpmm replay` takes for the
/// end, and `truncate -s "$(tr -d '\0' < log | wc -c)" log` takes away. Rows that find no room on the disk are
/// counted ([`lost_rows`](Self::lost_rows)), and the calls go on. In a child of the process nothing
/// is written.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use vpmm::resource::{HostMalloc, LogFormat, Logging, MemoryResource};
/// use vpmm::StreamHandle;
///
/// let path = std::env::temp_dir().join(format!("doc-{}.csv", std::process::id()));
/// let logging = Logging::to_file(HostMalloc::new(), LogFormat::Rmm, &path)?;
/// let ptr = logging.allocate(1000, 256, StreamHandle::LEGACY)?;
/// logging.deallocate(ptr, 1000, 256, StreamHandle::LEGACY)?;
/// drop(logging);
/// let log = std::fs::read_to_string(&path)?;
/// assert_eq!(log.lines().next(), Some("Thread,Time,Action,Pointer,Size,Stream"));
/// assert_eq!(log.lines().count(), 3);
/// # std::fs::remove_file(&path)?;
/// # Ok(())
/// # }
/// ```
pub struct Logging<R> {
    upstream: R,
    format: LogFormat,
    sinks: Vec<Sink>,
    /// Of [`LogFormat::Full`].
    live: AtomicU64,
}

impl<R: MemoryResource> Logging<R> {
    /// Logs to a file, which is made, or emptied. One that another log is still being written to stays that
    /// one's, without a name, and a new one has its name.
    ///
    /// # Errors
    /// [`Error::LogFile`].
    pub fn to_file(upstream: R, format: LogFormat, path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let failed = |error| Error::LogFile(Arc::new(of_path(path, &error)));
        Ok(Self::new(upstream, format, Sink::file(path).map_err(failed)?))
    }

    /// Logs to the file that the environment variable `RMM_LOG_FILE` names, as RMM does where no name
    /// is given.
    ///
    /// # Errors
    /// [`Error::Config`] where it is not set, or set to nothing; [`Error::LogFile`].
    pub fn from_environment(upstream: R, format: LogFormat) -> Result<Self> {
        const NAME: &str = "RMM_LOG_FILE";
        let unset = || Error::Config {
            name: NAME,
            value: String::new(),
            reason: "it must name the file to log to".to_owned(),
        };
        let path = std::env::var_os(NAME).filter(|path| !path.is_empty()).ok_or_else(unset)?;
        Self::to_file(upstream, format, path)
    }

    /// Logs to anything, one write for each row, under a lock. A row whose write panics is
    /// [lost](Self::lost_rows), as one whose write fails, and one of a call that the writer itself makes.
    pub fn to_writer(upstream: R, format: LogFormat, writer: impl Write + Send + 'static) -> Self {
        Self::new(upstream, format, Sink::writer(Box::new(writer)))
    }

    fn new(upstream: R, format: LogFormat, sink: Sink) -> Self {
        sink.write(row::header(format));
        Self { upstream, format, sinks: vec![sink], live: AtomicU64::new(0) }
    }

    /// The same, writing the same rows to a further place.
    #[must_use]
    pub fn and_to_writer(mut self, writer: impl Write + Send + 'static) -> Self {
        let sink = Sink::writer(Box::new(writer));
        sink.write(row::header(self.format));
        self.sinks.push(sink);
        self
    }

    /// What is below.
    pub fn upstream(&self) -> &R {
        &self.upstream
    }

    /// Rows that could not be written, in all places together.
    pub fn lost_rows(&self) -> u64 {
        self.sinks.iter().map(Sink::lost).sum()
    }

    /// Has everything written to the disk, or wherever the rows go: waits for it.
    ///
    /// # Errors
    /// [`Error::LogFile`].
    pub fn flush(&self) -> Result<()> {
        let flushed = self.sinks.iter().try_for_each(Sink::flush);
        flushed.map_err(|error| Error::LogFile(Arc::new(error)))
    }

    #[inline]
    fn is_full(&self) -> bool {
        self.format == LogFormat::Full
    }

    /// Live bytes are counted where they are shown: an atomic operation for each row.
    #[inline]
    fn count(&self, bytes: u64) {
        if self.is_full() {
            self.live.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// How much of it was counted.
    #[inline]
    fn discount(&self, bytes: usize) -> u64 {
        if !self.is_full() {
            return 0;
        }
        let less = |live: u64| Some(live.saturating_sub(bytes as u64));
        // Never refused: the closure always has an answer.
        let live = self.live.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        live.map_or(0, |live| live.min(bytes as u64))
    }

    fn log(&self, row: Row<'_>) {
        match self.format {
            LogFormat::Rmm => Last::with(row.stream, |last, microseconds| {
                let put = |line: &mut Line<'_>| row.rmm(line, last, microseconds);
                self.sinks.iter().for_each(|sink| sink.put(put));
            }),
            LogFormat::Full => {
                let device = self.upstream.device().map(crate::device::Device::ordinal);
                let (live, held) = (self.live.load(Ordering::Relaxed), self.upstream.held_bytes());
                let text = row.full(device, live, held);
                self.sinks.iter().for_each(|sink| sink.write(&text));
            }
        }
    }
}

impl<R: MemoryResource> MemoryResource for Logging<R> {
    fn allocate(&self, bytes: usize, align: usize, stream: StreamHandle) -> Result<DevicePtr> {
        let start = self.is_full().then(Instant::now);
        let result = self.upstream.allocate(bytes, align, stream);
        let nanoseconds = start.map(|start| start.elapsed().as_nanos() as u64);
        let (action, ptr) = match &result {
            Ok(ptr) => {
                self.count(bytes as u64);
                (Action::Allocate, *ptr)
            }
            Err(_) => (Action::AllocateFailure, DevicePtr::NULL),
        };
        let (failure, stream) = (result.as_ref().err(), stream.raw() as usize);
        self.log(Row { action, ptr, bytes, align, stream, nanoseconds, failure });
        result
    }

    fn deallocate(
        &self,
        ptr: DevicePtr,
        bytes: usize,
        align: usize,
        stream: StreamHandle,
    ) -> Result<()> {
        let counted = self.discount(bytes);
        let row = Row {
            action: Action::Free,
            ptr,
            bytes,
            align,
            stream: stream.raw() as usize,
            nanoseconds: None,
            failure: None,
        };
        // What is half of nothing is refused as a rule, and no row could put the allocation back with its size.
        let is_odd = ptr.is_null() != (bytes == 0);
        if !is_odd {
            self.log(row);
        }
        // It is still allocated: so must it be for whoever replays the log.
        let take_back = |failure: Option<&Error>| {
            self.count(counted);
            let back = match failure {
                // Nothing is allocated there, and nothing was taken away: RMM's rows have no place for that.
                Some(
                    Error::DoubleFree { .. }
                    | Error::InteriorPointer { .. }
                    | Error::ForeignPointer { .. }
                    // So says the driver of a pointer that it does not know.
                    | Error::Driver { code: CUresult::CUDA_ERROR_INVALID_VALUE, .. },
                ) => None,
                _ if is_odd => None,
                // Of the size that it has, whatever it was to be freed with.
                Some(Error::WrongSize { bytes, .. }) => Some(usize::try_from(*bytes)),
                _ => Some(Ok(bytes)),
            };
            match back {
                Some(of) => {
                    let bytes = of.unwrap_or(bytes);
                    self.log(Row { action: Action::Allocate, bytes, failure, ..row });
                }
                None if self.is_full() => {
                    let ptr = if is_odd { DevicePtr::NULL } else { ptr };
                    self.log(Row { ptr, failure, ..row });
                }
                None => {}
            }
        };
        let free = || Ok(self.upstream.deallocate(ptr, bytes, align, stream));
        let result = or_undo(free, || take_back(None))?;
        if is_odd && result.is_ok() {
            self.log(row);
        }
        result.inspect_err(|error| take_back(Some(error)))
    }

    fn describe(&self) -> Description {
        let mut description = Description::new("logging");
        if self.is_full() {
            description = description.with("format", "full");
        }
        for sink in &self.sinks {
            description = description.with("to", sink);
        }
        description.over(self.upstream.describe())
    }

    passes_on!(facts, identity, device, held_bytes, record_stream);
}

impl<R: fmt::Debug> fmt::Debug for Logging<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Logging")
            .field("upstream", &self.upstream)
            .field("format", &self.format)
            .finish_non_exhaustive()
    }
}

//! What is allocated, where, and what was never freed.

#![forbid(unsafe_code)]

use std::backtrace::Backtrace;
use std::collections::HashMap;
use std::fmt;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cuda_sys::types::CUresult;

use super::undo::or_undo;
use crate::device::StreamHandle;
use crate::error::{Error, Result};
use crate::resource::request::is_of_nothing;
use crate::resource::{Checks, Description, Facts, MemoryResource};
use crate::units::{Bytes, DevicePtr};

/// Where a [`Tracking`] says what it finds.
#[derive(Clone, Default)]
#[non_exhaustive]
pub enum Report {
    /// On the standard error output.
    #[default]
    Stderr,
    /// To a function, which may be called from a drop and by several threads at once.
    Callback(Arc<dyn Fn(&Finding) + Send + Sync>),
    /// Nowhere.
    Silent,
}

impl fmt::Debug for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stderr => "Stderr",
            Self::Callback(_) => "Callback",
            Self::Silent => "Silent",
        })
    }
}

/// What a [`Tracking`] is made with.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct TrackingConfig {
    /// Whether to note where in the program each allocation was made: some microseconds each, more
    /// in programs with debug information. At first not.
    pub backtraces: bool,
    /// Where findings go. At first to the standard error output.
    pub report: Report,
}

/// Something that a [`Tracking`] has found.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Finding {
    /// A free that was refused, here or by what is below: of a pointer that is not allocated, or with a wrong size.
    WrongFree(Error),
    /// At the end of the adaptor: what was never freed.
    Leaks(Outstandings),
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WrongFree(error) => write!(f, "a wrong free: {error}"),
            Self::Leaks(leaks) => write!(f, "never freed: {leaks}"),
        }
    }
}

/// An allocation that is not freed yet.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Outstanding {
    /// Its address.
    pub ptr: DevicePtr,
    /// Its bytes, as they were asked for.
    pub bytes: usize,
    /// Its place among all allocations made through the adaptor, from 0.
    pub number: u64,
    /// The stream that it was allocated on, as a bare number: the stream may have ended.
    pub stream: usize,
    /// Where in the program it was made, if that is noted.
    pub backtrace: Option<Arc<Backtrace>>,
}

/// Allocations that are not freed yet, in the order in which they were made.
#[derive(Clone, Debug)]
pub struct Outstandings(Vec<Outstanding>);

impl Outstandings {
    /// One by one.
    pub fn iter(&self) -> std::slice::Iter<'_, Outstanding> {
        self.0.iter()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Their bytes together; `u64::MAX` where these are more.
    pub fn bytes(&self) -> u64 {
        sum_of(self.0.iter())
    }
}

/// Whether a free was refused for the pointer or the size that it was given.
fn is_about_pointer(error: &Error) -> bool {
    matches!(
        error,
        Error::DoubleFree { .. }
            | Error::StalePointer { .. }
            | Error::InteriorPointer { .. }
            | Error::ForeignPointer { .. }
            | Error::WrongSize { .. }
            // So says the driver of a pointer that it does not know.
            | Error::Driver { code: CUresult::CUDA_ERROR_INVALID_VALUE, .. }
    )
}

/// Addresses may be given out without memory behind them: of those there can be more than a number has room for.
fn sum_of<'a>(all: impl Iterator<Item = &'a Outstanding>) -> u64 {
    all.fold(0, |sum: u64, one| sum.saturating_add(one.bytes as u64))
}

impl fmt::Display for Outstandings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.len() == 1 { "" } else { "s" };
        write!(f, "{} allocation{plural}, {}", self.len(), Bytes(self.bytes()))?;
        for one in &self.0 {
            write!(f, "\n  {}: {}, number {}", one.ptr, Bytes(one.bytes as u64), one.number)?;
            write!(f, ", stream {:#x}", one.stream)?;
            if let Some(backtrace) = &one.backtrace {
                for line in backtrace.to_string().lines() {
                    write!(f, "\n    {line}")?;
                }
            }
        }
        Ok(())
    }
}

/// Knows every allocation until it is freed: refuses wrong frees, and reports at its end what was
/// never freed. RMM: `tracking_resource_adaptor`, which passes wrong frees on.
///
/// A table look-up under a lock at each call; with backtraces, microseconds for each allocation.
///
/// ```
/// use std::sync::{Arc, Mutex};
/// use vpmm::resource::{Finding, HostMalloc, MemoryResource, Report, Tracking, TrackingConfig};
/// use vpmm::StreamHandle;
///
/// let leaked = Arc::new(Mutex::new(0));
/// let seen = Arc::clone(&leaked);
/// let mut config = TrackingConfig::default();
/// config.backtraces = true;
/// config.report = Report::Callback(Arc::new(move |finding| {
///     if let Finding::Leaks(leaks) = finding {
///         *seen.lock().unwrap() = leaks.bytes();
///     }
/// }));
/// let tracking = Tracking::new(HostMalloc::new(), config);
/// tracking.allocate(100, 256, StreamHandle::LEGACY)?;
/// println!("{}", tracking.outstanding());
/// drop(tracking);
/// assert_eq!(*leaked.lock().unwrap(), 100);
/// # Ok::<(), vpmm::Error>(())
/// ```
#[derive(Debug)]
pub struct Tracking<R: MemoryResource> {
    upstream: R,
    config: TrackingConfig,
    book: Mutex<Book>,
}

#[derive(Debug, Default)]
struct Book {
    live: HashMap<u64, Outstanding>,
    made: u64,
}

impl<R: MemoryResource> Tracking<R> {
    /// Watches what is done with this.
    pub fn new(upstream: R, config: TrackingConfig) -> Self {
        Self { upstream, config, book: Mutex::default() }
    }

    /// What is below.
    pub fn upstream(&self) -> &R {
        &self.upstream
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is allocated now.
    pub fn outstanding(&self) -> Outstandings {
        let mut all: Vec<_> = self.book().live.values().cloned().collect();
        all.sort_unstable_by_key(|one| one.number);
        Outstandings(all)
    }

    /// The bytes of what is allocated now; `u64::MAX` where these are more.
    pub fn outstanding_bytes(&self) -> u64 {
        sum_of(self.book().live.values())
    }

    /// Never panics: it is called in the drop, and by frees in drops.
    fn tell(&self, finding: &Finding) {
        match &self.config.report {
            Report::Stderr => {
                // A program without an error output is told nothing.
                let _ = writeln!(std::io::stderr(), "vpmm: {finding}");
            }
            Report::Callback(callback) => {
                // The panic has been reported by the hook; the caller of a free has no part in it.
                let _ = catch_unwind(AssertUnwindSafe(|| callback(finding)));
            }
            Report::Silent => {}
        }
    }

    /// Takes an allocation out of the book, to be freed.
    fn take(&self, address: u64, bytes: usize) -> Result<Outstanding> {
        let mut book = self.book();
        let known = book.live.get(&address).map(|one| one.bytes as u64);
        match known {
            Some(known) if known == bytes as u64 => {}
            Some(bytes_of_it) => {
                let given_bytes = bytes as u64;
                return Err(Error::WrongSize { address, given_bytes, bytes: bytes_of_it });
            }
            None => return Err(Error::ForeignPointer { address }),
        }
        book.live.remove(&address).ok_or(Error::ForeignPointer { address })
    }
}

impl<R: MemoryResource> MemoryResource for Tracking<R> {
    fn allocate(&self, bytes: usize, align: usize, stream: StreamHandle) -> Result<DevicePtr> {
        let ptr = self.upstream.allocate(bytes, align, stream)?;
        if ptr.is_null() {
            return Ok(ptr);
        }
        let backtrace = self.config.backtraces.then(|| Arc::new(Backtrace::force_capture()));
        let stream = stream.raw() as usize;
        let mut book = self.book();
        let number = book.made;
        book.made += 1;
        let one = Outstanding { ptr, bytes, number, stream, backtrace };
        book.live.insert(ptr.address(), one);
        Ok(ptr)
    }

    /// # Errors
    /// [`Error::ForeignPointer`] and [`Error::WrongSize`]; those of what is below. What is wrong with the pointer is
    /// reported, too, whoever finds it.
    fn deallocate(
        &self,
        ptr: DevicePtr,
        bytes: usize,
        align: usize,
        stream: StreamHandle,
    ) -> Result<()> {
        let address = ptr.address();
        let taken = match is_of_nothing(ptr, bytes) {
            Ok(true) => return Ok(()),
            Ok(false) => self.take(address, bytes),
            Err(error) => Err(error),
        };
        // Out of the book first: once it is freed below, the address may come again.
        let taken = taken.inspect_err(|error| self.tell(&Finding::WrongFree(error.clone())))?;
        let free = || self.upstream.deallocate(ptr, bytes, align, stream);
        // Unless what is below has given the address to somebody else meanwhile, for whom it is in the book.
        let freed = or_undo(free, || {
            self.book().live.entry(address).or_insert(taken);
        });
        freed.inspect_err(|error| {
            if is_about_pointer(error) {
                self.tell(&Finding::WrongFree(error.clone()));
            }
        })
    }

    fn facts(&self) -> Facts {
        self.upstream.facts().with_checks(Checks::PointersAndSizes)
    }

    fn describe(&self) -> Description {
        let description = Description::new("tracking");
        let description =
            if self.config.backtraces { description.with("backtraces", "on") } else { description };
        description.over(self.upstream.describe())
    }

    passes_on!(device, held_bytes, record_stream);
}

impl<R: MemoryResource> Drop for Tracking<R> {
    /// Where this is a child of the process what is allocated is the parent's.
    fn drop(&mut self) {
        if self.upstream.device().is_some_and(|device| device.driver().is_forked()) {
            return;
        }
        let leaks = self.outstanding();
        if !leaks.is_empty() {
            self.tell(&Finding::Leaks(leaks));
        }
    }
}

//! Counts of what is allocated.

#![forbid(unsafe_code)]

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::device::StreamHandle;
use crate::error::Result;
use crate::resource::request::is_of_nothing;
use crate::resource::{Description, MemoryResource, or_undo};
use crate::units::DevicePtr;

/// One thing counted.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Counter {
    /// What there is now. Below zero where more was freed than allocated since counting began.
    pub current: i64,
    /// The most that there was; at least zero.
    pub peak: i64,
    /// All that there ever was.
    pub total: u64,
}

impl Counter {
    fn add(&mut self, amount: u64) {
        self.current = self.current.saturating_add_unsigned(amount);
        self.peak = self.peak.max(self.current);
        self.total = self.total.saturating_add(amount);
    }

    /// How much of it there was room for.
    fn subtract(&mut self, amount: u64) -> u64 {
        let before = self.current;
        self.current = self.current.saturating_sub_unsigned(amount);
        before.abs_diff(self.current)
    }

    /// What was subtracted is there after all.
    fn put_back(&mut self, amount: u64) {
        self.current = self.current.saturating_add_unsigned(amount);
        self.peak = self.peak.max(self.current);
    }

    /// Takes in what was counted after this stopped.
    fn append(&mut self, later: Self) {
        self.peak = self.peak.max(self.current.saturating_add(later.peak));
        self.current = self.current.saturating_add(later.current);
        self.total = self.total.saturating_add(later.total);
    }
}

/// What a [`Statistics`] has counted.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Counters {
    /// Bytes, as they were asked for.
    pub bytes: Counter,
    /// Allocations.
    pub allocations: Counter,
}

impl Counters {
    fn append(&mut self, later: Self) {
        self.bytes.append(later.bytes);
        self.allocations.append(later.allocations);
    }
}

impl fmt::Display for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (bytes, count) = (self.bytes, self.allocations);
        write!(
            f,
            "{} bytes in {} allocations; at most {} in {}; {} in {} in total",
            bytes.current, count.current, bytes.peak, count.peak, bytes.total, count.total
        )
    }
}

/// Counts bytes and allocations: now, at most, in total; nested where a part of the program is to be
/// looked at by itself. Requests of 0 bytes do not count. One short lock a call.
/// RMM: `statistics_resource_adaptor`.
///
/// ```
/// use vpmm::resource::{HostMalloc, MemoryResource, Statistics};
/// use vpmm::StreamHandle;
///
/// let statistics = Statistics::new(HostMalloc::new());
/// let stream = StreamHandle::LEGACY;
/// let kept = statistics.allocate(1000, 256, stream)?;
///
/// statistics.push();
/// let ptr = statistics.allocate(500, 256, stream)?;
/// statistics.deallocate(ptr, 500, 256, stream)?;
/// let part = statistics.pop().expect("pushed before");
/// assert_eq!((part.bytes.current, part.bytes.peak), (0, 500));
///
/// assert_eq!(statistics.counters().bytes.peak, 1500); // the part is in the whole
/// statistics.deallocate(kept, 1000, 256, stream)?;
/// # Ok::<(), vpmm::Error>(())
/// ```
#[derive(Debug)]
pub struct Statistics<R> {
    upstream: R,
    stack: Mutex<Stack>,
}

/// The counters that count, and those that wait below them.
#[derive(Debug, Default)]
struct Stack {
    top: Counters,
    below: Vec<Counters>,
}

impl<R: MemoryResource> Statistics<R> {
    /// Counts what is done with this.
    pub fn new(upstream: R) -> Self {
        Self { upstream, stack: Mutex::default() }
    }

    /// What is below.
    pub fn upstream(&self) -> &R {
        &self.upstream
    }

    fn stack(&self) -> MutexGuard<'_, Stack> {
        self.stack.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was counted since the last [`push`](Self::push), or since the start.
    pub fn counters(&self) -> Counters {
        self.stack().top
    }

    /// Begins to count anew, until [`pop`](Self::pop); returns what was counted so far.
    pub fn push(&self) -> Counters {
        let mut stack = self.stack();
        let former = std::mem::take(&mut stack.top);
        stack.below.push(former);
        former
    }

    /// Ends what [`push`](Self::push) began, and adds it to what had been counted before; returns what
    /// was counted since. `None`, and nothing done, where nothing was pushed.
    pub fn pop(&self) -> Option<Counters> {
        let mut stack = self.stack();
        let below = stack.below.pop()?;
        let part = std::mem::replace(&mut stack.top, below);
        stack.top.append(part);
        Some(part)
    }
}

impl<R: MemoryResource> MemoryResource for Statistics<R> {
    fn allocate(&self, bytes: usize, align: usize, stream: StreamHandle) -> Result<DevicePtr> {
        let ptr = self.upstream.allocate(bytes, align, stream)?;
        if bytes > 0 {
            let top = &mut self.stack().top;
            top.bytes.add(bytes as u64);
            top.allocations.add(1);
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
        if is_of_nothing(ptr, bytes)? {
            return Ok(());
        }
        // Counted first: once it is freed below, the memory may be another request's.
        let (counted, count) = {
            let top = &mut self.stack().top;
            (top.bytes.subtract(bytes as u64), top.allocations.subtract(1))
        };
        let free = || self.upstream.deallocate(ptr, bytes, align, stream);
        or_undo(free, || {
            let top = &mut self.stack().top;
            top.bytes.put_back(counted);
            top.allocations.put_back(count);
        })
    }

    fn describe(&self) -> Description {
        Description::new("statistics").over(self.upstream.describe())
    }

    passes_on!(facts, device, held_bytes, record_stream);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resource::{HostMalloc, Report, Tracking, TrackingConfig};

    #[test]
    fn what_was_freed_in_a_part_is_below_zero_there_and_no_peak_of_it() {
        let statistics = Statistics::new(HostMalloc::new());
        let stream = StreamHandle::LEGACY;
        let ptr = statistics.allocate(300, 256, stream).expect("memory");
        assert_eq!(statistics.push().bytes, Counter { current: 300, peak: 300, total: 300 });
        statistics.deallocate(ptr, 300, 256, stream).expect("freed");
        let part = statistics.pop().expect("a part");
        assert_eq!(part.bytes, Counter { current: -300, peak: 0, total: 0 });
        assert_eq!(statistics.counters().bytes, Counter { current: 0, peak: 300, total: 300 });
        assert_eq!(statistics.pop(), None);
        assert_eq!(statistics.counters().allocations.total, 1);
    }

    #[test]
    fn a_free_that_is_refused_counts_for_nothing() {
        let config = TrackingConfig { report: Report::Silent, ..TrackingConfig::default() };
        let statistics = Statistics::new(Tracking::new(HostMalloc::new(), config));
        let stream = StreamHandle::LEGACY;
        let ptr = statistics.allocate(300, 256, stream).expect("memory");
        let before = statistics.counters();
        for bytes in [1, 299, usize::MAX] {
            statistics.deallocate(ptr, bytes, 256, stream).expect_err("a wrong size");
            assert_eq!(statistics.counters(), before, "{bytes}");
        }
        statistics.deallocate(ptr, 300, 256, stream).expect("freed");
        assert_eq!(statistics.counters().bytes, Counter { current: 0, peak: 300, total: 300 });
    }
}

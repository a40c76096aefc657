//! What the allocator counts, under PyTorch's names.

#![forbid(unsafe_code)]

use super::size::Kind;

/// One quantity over time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Stat {
    /// Now.
    pub current: u64,
    /// The most that it has been, since the last reset of peaks.
    pub peak: u64,
    /// The sum of its increases, since the last reset of what is accumulated.
    pub allocated: u64,
    /// The sum of its decreases, since the same.
    pub freed: u64,
}

/// One quantity in both pools and in each.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct StatArray {
    /// Both pools together. Its peak is that of the sum.
    pub all: Stat,
    /// Requests of up to [`SMALL_SIZE`](super::SMALL_SIZE).
    pub small_pool: Stat,
    /// Larger ones.
    pub large_pool: Stat,
}

/// What an allocator counts: see [`CachingAllocator::stats`](super::CachingAllocator::stats). The
/// names are those of `torch.cuda.memory_stats`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct CachingStats {
    /// Allocations in the hands of callers.
    pub allocation: StatArray,
    /// Segments: pieces of memory got from upstream.
    pub segment: StatArray,
    /// Blocks in the hands of callers, or freed while further streams still use them.
    pub active: StatArray,
    /// Free blocks in segments that have others too: they cannot go back by themselves.
    pub inactive_split: StatArray,
    /// Bytes of `allocation`, rounded.
    pub allocated_bytes: StatArray,
    /// Bytes of `segment`.
    pub reserved_bytes: StatArray,
    /// Bytes of `active`.
    pub active_bytes: StatArray,
    /// Bytes of `inactive_split`.
    pub inactive_split_bytes: StatArray,
    /// Bytes of `active` as callers asked for them.
    pub requested_bytes: StatArray,
    /// Allocations of at least the maximum split size.
    pub oversize_allocations: Stat,
    /// Segments of at least the maximum split size.
    pub oversize_segments: Stat,
    /// Requests that upstream refused, and that were tried again after everything free was given
    /// back.
    pub num_alloc_retries: u64,
    /// Requests that ended out of memory.
    pub num_ooms: u64,
    /// Times that the host waited for every stream that a freed block waits for.
    pub num_sync_all_streams: u64,
    /// Segments got from upstream.
    pub num_device_alloc: u64,
    /// Segments given back.
    pub num_device_free: u64,
    /// Requests that a cached block served.
    pub hits: u64,
    /// Requests that none served.
    pub misses: u64,
    /// The maximum split size in bytes, where one is set.
    pub max_split_size: Option<u64>,
}

/// One quantity of both pools, as it is kept: what can be computed is not stored.
#[derive(Clone, Default)]
pub(super) struct Tally {
    current: [u64; 2],
    peak: [u64; 2],
    peak_of_both: u64,
    freed: [u64; 2],
    /// `current` at the last reset of what is accumulated.
    before: [u64; 2],
}

impl Tally {
    #[inline(always)]
    pub(super) fn increase(&mut self, kind: Kind, by: u64) {
        let (this, other) = (kind as usize, 1 - kind as usize);
        let current = self.current[this] + by;
        self.current[this] = current;
        self.peak[this] = self.peak[this].max(current);
        self.peak_of_both = self.peak_of_both.max(current + self.current[other]);
    }

    #[inline(always)]
    pub(super) fn decrease(&mut self, kind: Kind, by: u64) {
        self.current[kind as usize] -= by;
        self.freed[kind as usize] += by;
    }

    /// An increase or a decrease, whichever it is.
    #[inline(always)]
    pub(super) fn change(&mut self, kind: Kind, by: i64) {
        if by > 0 {
            self.increase(kind, by.unsigned_abs());
        } else if by < 0 {
            self.decrease(kind, by.unsigned_abs());
        }
    }

    pub(super) fn current(&self) -> u64 {
        self.current.iter().sum()
    }

    fn stat(&self, kind: Kind) -> Stat {
        let at = kind as usize;
        let (current, freed) = (self.current[at], self.freed[at]);
        let allocated = current + freed - self.before[at];
        Stat { current, peak: self.peak[at], allocated, freed }
    }

    pub(super) fn array(&self) -> StatArray {
        let (small_pool, large_pool) = (self.stat(Kind::Small), self.stat(Kind::Large));
        let all = Stat {
            current: small_pool.current + large_pool.current,
            peak: self.peak_of_both,
            allocated: small_pool.allocated + large_pool.allocated,
            freed: small_pool.freed + large_pool.freed,
        };
        StatArray { all, small_pool, large_pool }
    }

    fn reset_peak(&mut self) {
        self.peak = self.current;
        self.peak_of_both = self.current();
    }

    fn reset_accumulated(&mut self) {
        self.freed = [0; 2];
        self.before = self.current;
    }
}

/// Everything that is counted under the lock of the books.
#[derive(Clone, Default)]
pub(super) struct Tallies {
    pub(super) allocation: Tally,
    pub(super) segment: Tally,
    pub(super) active: Tally,
    pub(super) inactive_split: Tally,
    pub(super) allocated_bytes: Tally,
    pub(super) reserved_bytes: Tally,
    pub(super) active_bytes: Tally,
    pub(super) inactive_split_bytes: Tally,
    pub(super) requested_bytes: Tally,
    /// In the large pool.
    pub(super) oversize_allocations: Tally,
    pub(super) oversize_segments: Tally,
    pub(super) num_alloc_retries: u64,
    pub(super) num_ooms: u64,
    pub(super) num_sync_all_streams: u64,
    pub(super) num_device_alloc: u64,
    pub(super) num_device_free: u64,
    pub(super) hits: u64,
    pub(super) misses: u64,
}

impl Tallies {
    fn each(&mut self) -> [&mut Tally; 11] {
        [
            &mut self.allocation,
            &mut self.segment,
            &mut self.active,
            &mut self.inactive_split,
            &mut self.allocated_bytes,
            &mut self.reserved_bytes,
            &mut self.active_bytes,
            &mut self.inactive_split_bytes,
            &mut self.requested_bytes,
            &mut self.oversize_allocations,
            &mut self.oversize_segments,
        ]
    }

    pub(super) fn reset_peaks(&mut self) {
        self.each().into_iter().for_each(Tally::reset_peak);
    }

    /// Sums start anew, and the counts of events.
    pub(super) fn reset_accumulated(&mut self) {
        self.each().into_iter().for_each(Tally::reset_accumulated);
        self.num_alloc_retries = 0;
        self.num_ooms = 0;
        self.num_sync_all_streams = 0;
        self.num_device_alloc = 0;
        self.num_device_free = 0;
        self.hits = 0;
        self.misses = 0;
    }

    pub(super) fn stats(&self, max_split_size: Option<u64>) -> CachingStats {
        CachingStats {
            allocation: self.allocation.array(),
            segment: self.segment.array(),
            active: self.active.array(),
            inactive_split: self.inactive_split.array(),
            allocated_bytes: self.allocated_bytes.array(),
            reserved_bytes: self.reserved_bytes.array(),
            active_bytes: self.active_bytes.array(),
            inactive_split_bytes: self.inactive_split_bytes.array(),
            requested_bytes: self.requested_bytes.array(),
            oversize_allocations: self.oversize_allocations.array().all,
            oversize_segments: self.oversize_segments.array().all,
            num_alloc_retries: self.num_alloc_retries,
            num_ooms: self.num_ooms,
            num_sync_all_streams: self.num_sync_all_streams,
            num_device_alloc: self.num_device_alloc,
            num_device_free: self.num_device_free,
            hits: self.hits,
            misses: self.misses,
            max_split_size,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_and_peaks_start_anew_by_themselves() {
        let mut tally = Tally::default();
        tally.increase(Kind::Small, 10);
        tally.increase(Kind::Large, 5);
        tally.decrease(Kind::Small, 8);
        tally.increase(Kind::Large, 1);
        let array = tally.array();
        assert_eq!(array.small_pool, Stat { current: 2, peak: 10, allocated: 10, freed: 8 });
        assert_eq!(array.large_pool, Stat { current: 6, peak: 6, allocated: 6, freed: 0 });
        // The peak of the sum, not the sum of the peaks.
        assert_eq!(array.all, Stat { current: 8, peak: 15, allocated: 16, freed: 8 });
        tally.reset_peak();
        assert_eq!(tally.array().all, Stat { current: 8, peak: 8, allocated: 16, freed: 8 });
        tally.reset_accumulated();
        assert_eq!(tally.array().all, Stat { current: 8, peak: 8, allocated: 0, freed: 0 });
        tally.change(Kind::Large, -6);
        tally.change(Kind::Small, 3);
        tally.change(Kind::Small, 0);
        assert_eq!(tally.array().all, Stat { current: 5, peak: 8, allocated: 3, freed: 6 });
    }
}

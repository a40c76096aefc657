//! What a pool holds, in numbers.

#![forbid(unsafe_code)]

/// A snapshot of a pool's numbers. Bytes are of device memory or device addresses.
///
/// `live + cached + idle + pending + transit` is at most `mapped` and `asleep` plus what an operation of
/// another thread is mapping at this moment; with `zombie` and `hole` it is `reserved`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// In the hands of callers, rounded as the pool rounds.
    pub live_bytes: u64,
    /// The most that `live_bytes` has been since the pool was made or
    /// [`Pool::reset_peaks`](crate::Pool::reset_peaks) was called; where several threads or streams
    /// allocate, off by at most what went into the others' fronts, or out of them, since the pool was
    /// asked for its numbers before. Of several heaps it is the sum of theirs, which may be too much.
    pub peak_live_bytes: u64,
    /// Freed just now, and kept in front for the same stream: see the default profile's front.
    pub cached_bytes: u64,
    /// Free, and no stream can still be using it.
    pub idle_bytes: u64,
    /// Free, but the stream that freed it may still be using it; with what is deferred.
    pub pending_bytes: u64,
    /// The part of `pending_bytes` that no stream may have yet, because further streams that it was noted for
    /// ([`Pool::record_stream`](crate::Pool::record_stream)) may still be using it.
    pub deferred_bytes: u64,
    /// Addresses without memory.
    pub hole_bytes: u64,
    /// Addresses whose memory has moved, to be unmapped.
    pub zombie_bytes: u64,
    /// In the middle of an operation of another thread.
    pub transit_bytes: u64,
    /// Addresses of heaps that sleep: their memory is the device's.
    pub asleep_bytes: u64,
    /// Physical memory of the pages.
    pub mapped_bytes: u64,
    /// The most that `mapped_bytes` has been, since the same, and of several heaps as that.
    pub peak_mapped_bytes: u64,
    /// Addresses reserved.
    pub reserved_bytes: u64,
    /// Requests smaller than a page, in the hands of callers.
    pub small_live_bytes: u64,
    /// Physical memory that the driver's pool holds for them.
    pub small_mapped_bytes: u64,
    /// The most that it has held.
    pub peak_small_mapped_bytes: u64,
    /// Allocations, in the paged profile those of pages.
    pub live_count: u64,
    /// Blocks in fronts.
    pub cached_count: u64,
    /// Idle regions.
    pub idle_count: u64,
    /// Pending regions.
    pub pending_count: u64,
    /// Holes.
    pub hole_count: u64,
    /// Zombies.
    pub zombie_count: u64,
    /// Reservations.
    pub reservation_count: u64,
    /// Allocations smaller than a page.
    pub small_live_count: u64,
    /// Streams that the pool remembers.
    pub stream_count: u64,
    /// The page, in the default profile the granule; `u64::MAX` where pages are turned off.
    pub page_size_bytes: u64,
    /// Pages made since the pool was.
    pub pages_created: u64,
    /// Pages mapped elsewhere to close gaps.
    pub pages_moved: u64,
    /// Physical handles that the default profile holds.
    pub extent_count: u64,
    /// Bytes of physical memory that other processes may have, by an export: it does not move.
    pub exported_bytes: u64,
    /// Handles made since the pool was.
    pub extents_created: u64,
    /// Handles mapped elsewhere to close gaps.
    pub extents_moved: u64,
    /// Times that a stream was made to wait for another's memory, on the GPU.
    pub device_waits: u64,
    /// Times that a caller waited for the GPU.
    pub host_waits: u64,
    /// Times that the driver would not unmap a zombie, or undo a mapping for a request that failed.
    pub failed_unmaps: u64,
}

impl Stats {
    /// Adds another heap's numbers. Sums of peaks are at most too much.
    pub(crate) fn add(&mut self, other: &Self) {
        macro_rules! sum {
            ($( $field:ident )*) => { $( self.$field += other.$field; )* };
        }
        sum!(
            live_bytes peak_live_bytes cached_bytes idle_bytes pending_bytes deferred_bytes hole_bytes
            zombie_bytes transit_bytes asleep_bytes mapped_bytes peak_mapped_bytes reserved_bytes
            small_live_bytes small_mapped_bytes peak_small_mapped_bytes live_count cached_count
            idle_count pending_count hole_count zombie_count reservation_count small_live_count
            pages_created pages_moved extent_count exported_bytes extents_created extents_moved
            device_waits host_waits failed_unmaps
        );
        self.stream_count = self.stream_count.max(other.stream_count);
    }

    /// Adds what was counted of a heap that is no more.
    pub(crate) fn add_counts(&mut self, gone: &Self) {
        macro_rules! sum {
            ($( $field:ident )*) => { $( self.$field += gone.$field; )* };
        }
        sum!(
            pages_created pages_moved extents_created extents_moved device_waits host_waits
            failed_unmaps
        );
    }

    /// Peaks are at least these, of another time.
    pub(crate) fn raise_peaks(&mut self, then: &Self) {
        self.peak_live_bytes = self.peak_live_bytes.max(then.peak_live_bytes);
        self.peak_mapped_bytes = self.peak_mapped_bytes.max(then.peak_mapped_bytes);
    }

    /// Free bytes, whether or not their fences have passed.
    pub fn free_bytes(&self) -> u64 {
        self.idle_bytes + self.pending_bytes
    }
}

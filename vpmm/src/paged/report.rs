//! What the pool tells about itself: numbers, drawings, allocations.

use std::fmt;

use super::small::Small;
use super::{PagedPool, chunk};
use crate::allocation::Allocation;
use crate::driver::Failure;
use crate::fence::Fence;
use crate::layout::{Layout, Piece};
use crate::region::State;
use crate::stats::Stats;
use crate::units::DevicePtr;

impl PagedPool {
    pub(crate) fn stats(&self) -> Stats {
        let driver = self.device.driver();
        let small = self.small.as_ref();
        // A driver that no longer answers has no numbers to give; the pool's own still stand.
        let read = |read: fn(&Small, &crate::Driver) -> Result<u64, Failure>| {
            small.and_then(|small| read(small, driver).ok()).unwrap_or(0)
        };
        let (small_mapped_bytes, peak_small_mapped_bytes) =
            (read(Small::reserved), read(Small::peak_reserved));
        let space = self.lock_space();
        let totals = space.map.totals();
        Stats {
            live_bytes: totals.bytes(State::Live),
            peak_live_bytes: space.peak_live,
            idle_bytes: totals.bytes(State::Idle),
            pending_bytes: totals.bytes(State::Pending),
            deferred_bytes: space.uses.deferred_bytes(),
            hole_bytes: totals.bytes(State::Hole),
            zombie_bytes: totals.bytes(State::Zombie),
            transit_bytes: totals.bytes(State::Transit),
            mapped_bytes: space.mapped,
            peak_mapped_bytes: space.peak_mapped,
            reserved_bytes: space.chunks.iter().map(chunk::Chunk::bytes).sum(),
            small_live_bytes: small.map_or(0, Small::live_bytes),
            small_mapped_bytes,
            peak_small_mapped_bytes,
            live_count: totals.regions(State::Live),
            idle_count: totals.regions(State::Idle),
            pending_count: totals.regions(State::Pending),
            hole_count: totals.regions(State::Hole),
            zombie_count: totals.regions(State::Zombie),
            reservation_count: space.chunks.len() as u64,
            small_live_count: small.map_or(0, Small::count),
            stream_count: space.timelines.len() as u64,
            page_size_bytes: self.config.page,
            exported_bytes: space.shared.len() as u64 * space.page,
            pages_created: space.pages_created,
            pages_moved: space.pages_moved,
            device_waits: space.device_waits,
            host_waits: space.host_waits,
            failed_unmaps: space.failed_unmaps,
            ..Stats::default()
        }
    }

    pub(crate) fn layout(&self) -> Layout {
        let space = self.lock_space();
        let pieces = space.map.iter().map(|region| Piece {
            state: region.state(),
            pages: region.bytes() / self.config.page,
            latest: region.start() == space.latest,
            reservation: region.reservation(),
        });
        Layout { pieces: pieces.collect() }
    }

    /// Metrics, then every region in ascending order of addresses.
    pub(crate) fn debug(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        struct Line(u64, u64, State, Fence, Option<u64>);
        impl fmt::Debug for Line {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let Self(start, bytes, state, fence, stream) = self;
                write!(f, "{start:#x} +{bytes:#x} {state:?}")?;
                match stream {
                    Some(stream) => write!(f, " stream {stream} fence {}", fence.sequence),
                    None => Ok(()),
                }
            }
        }
        let stats = self.stats();
        let lines: Vec<Line> = {
            let space = self.lock_space();
            let line = |region: &crate::region::Region| {
                let fence = region.fence();
                let real = fence != Fence::PASSED && fence.timeline != space.uses.timeline();
                let stream = real.then(|| space.timelines.stream(fence.timeline));
                Line(region.start(), region.bytes(), region.state(), fence, stream)
            };
            space.map.iter().map(line).collect()
        };
        f.debug_struct("Pool")
            .field("profile", &"paged")
            .field("device", &self.device.ordinal())
            .field("stats", &stats)
            .field("driver_calls", &self.device.driver().calls())
            .field("regions", &lines)
            .finish()
    }

    /// Sets the peaks to what is in use and held now.
    pub(crate) fn reset_peaks(&self) {
        {
            let mut space = self.lock_space();
            space.peak_mapped = space.mapped;
            space.peak_live = space.map.totals().bytes(State::Live);
        }
        if let Some(small) = &self.small {
            // A driver that no longer answers has no peak to tell either.
            let _ = small.reset_peak(self.device.driver());
        }
    }

    /// The allocation that an address is in.
    pub(crate) fn allocation(&self, address: u64) -> Option<Allocation> {
        let space = self.lock_space();
        let small = self.small.as_ref().and_then(|small| small.containing(address));
        let (start, bytes, stream) = match small {
            Some((start, live)) => (DevicePtr::tagged(start, live.tag), live.bytes, live.stream),
            None => {
                let region = space.map.containing(address)?;
                let chunk = &space.chunks[region.reservation() as usize];
                // In the middle of a free there is no owner any more.
                let (_, tag) = chunk.owner(region.start())?;
                let start = DevicePtr::tagged(region.start(), tag);
                (start, region.bytes(), chunk.stream(region.start()))
            }
        };
        Some(Allocation { start, bytes, stream: space.streams.get(stream) })
    }
}

//! What a pool holds, for people.

pub(super) mod find;
pub(super) mod free_pieces;
pub(super) mod snapshot;

use std::fmt;

use smallvec::SmallVec;

use crate::default::Core;
use crate::default::class::UNIT_BYTES;
use crate::default::front::Cached;
use crate::default::front::shard::Shard;
use crate::default::lock;
use crate::layout::{Layout, Piece};
use crate::region::State;
use crate::stats::Stats;

impl Core {
    pub(crate) fn stats(&self) -> Stats {
        let stream_count = lock(&self.registry).streams() as u64;
        let (mut cached_units, mut cached_count) = (0, 0);
        let mut fronts: SmallVec<[Cached; 8]> = SmallVec::new();
        let _revoking = lock(&self.revoking);
        let shards = self.shards();
        // SAFETY: `revoking` is held, and this thread is inside no front.
        unsafe {
            Shard::reach(shards.iter().copied(), self.asymmetry, |_, front| {
                let cached = front.cached();
                fronts.push(cached);
                cached_units += cached.now;
                cached_count += front.blocks();
            });
        }
        let mut space = self.space.lock();
        // The most since the last look: what each front held least, beside what the others hold.
        fronts.into_iter().for_each(|front| space.note_front(front));
        space.note_peak();
        let totals = space.memory.map.totals();
        let bytes = |state| totals.bytes(state) * self.granule_bytes;
        let units = |units: u64| units * UNIT_BYTES;
        // Nothing else is in transit while the heap sleeps.
        let (asleep, transit) = match self.is_asleep() {
            true => (bytes(State::Transit), 0),
            false => (0, bytes(State::Transit)),
        };
        let common = &space.common;
        let sets = || space.books.iter().flat_map(|book| book.sets.iter().flatten());
        Stats {
            // Other threads may have gone on between the two looks.
            live_bytes: units(space.out_units.saturating_sub(cached_units)),
            peak_live_bytes: units(space.peak_live),
            cached_bytes: units(cached_units),
            idle_bytes: units(
                common.iter().map(crate::default::space::free_set::FreeSet::units).sum(),
            ),
            pending_bytes: units(
                sets().map(crate::default::space::free_set::FreeSet::units).sum::<u64>()
                    + space.deferred_units,
            ),
            deferred_bytes: units(space.deferred_units),
            hole_bytes: bytes(State::Hole)
                + (1 + space.memory.split_granules()) * self.granule_bytes,
            zombie_bytes: bytes(State::Zombie),
            transit_bytes: transit + units(space.transit_units - space.leaving_units),
            asleep_bytes: asleep,
            mapped_bytes: (space.memory.mapped() - space.memory.gone()) * self.granule_bytes,
            peak_mapped_bytes: space.memory.peak_mapped() * self.granule_bytes,
            reserved_bytes: u64::from(self.granules) * self.granule_bytes,
            live_count: space.out_blocks.saturating_sub(cached_count),
            cached_count,
            idle_count: common.iter().map(|set| u64::from(set.blocks())).sum(),
            pending_count: sets().map(|set| u64::from(set.blocks())).sum::<u64>()
                + space.deferred.len() as u64,
            hole_count: totals.regions(State::Hole),
            zombie_count: totals.regions(State::Zombie),
            reservation_count: 1,
            stream_count,
            page_size_bytes: self.granule_bytes,
            exported_bytes: space.memory.exported() * self.granule_bytes,
            extent_count: space.memory.handles() as u64,
            extents_created: space.counters.created + space.memory.renewed().0,
            extents_moved: space.counters.moved,
            pages_created: space.counters.created_granules + space.memory.renewed().1,
            pages_moved: space.counters.moved_granules,
            device_waits: space.counters.device_waits,
            host_waits: space.counters.host_waits,
            failed_unmaps: space.counters.failed_unmaps,
            ..Stats::default()
        }
    }

    /// Lets the peaks begin anew.
    pub(super) fn restart_peaks(&self) {
        // Looks into every front, too: what was least in them is behind us.
        let stats = self.stats();
        let mut space = self.space.lock();
        space.peak_live = stats.live_bytes / UNIT_BYTES;
        space.memory.reset_peak();
    }

    /// What stands where, by granules: one that is in use in part is drawn as in use.
    pub(crate) fn layout(&self) -> Layout {
        let space = self.space.lock();
        let granule_units = space.memory.granule_units();
        let mut free: Vec<(u32, u32)> = space
            .every_free_block()
            .map(|block| (block.start().div_ceil(granule_units), block.end() / granule_units))
            .filter(|(first, end)| first < end)
            .collect();
        free.sort_unstable();
        let mut pieces = Vec::new();
        for region in space.memory.map.iter() {
            let mut put = |state, pages: u32| {
                if pages > 0 {
                    let reservation = region.reservation();
                    pieces.push(Piece {
                        state,
                        pages: u64::from(pages),
                        latest: false,
                        reservation,
                    });
                }
            };
            let (start, end) = (region.start() as u32, region.end() as u32);
            if region.state() != State::Live {
                put(region.state(), end - start);
                continue;
            }
            let mut at = start;
            let from = free.partition_point(|(_, last)| *last <= start);
            for (first, last) in free[from..].iter().take_while(|(first, _)| *first < end) {
                let (first, last) = ((*first).max(start), (*last).min(end));
                put(State::Live, first - at);
                put(State::Idle, last - first);
                at = last;
            }
            put(State::Live, end - at);
        }
        Layout { pieces }
    }

    /// Metrics, then every free block and every stretch of addresses, in ascending order.
    pub(crate) fn debug(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        struct Line(u64, u64, String);
        impl fmt::Debug for Line {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let Self(start, bytes, what) = self;
                write!(f, "{start:#x} +{bytes:#x} {what}")
            }
        }
        let stats = self.stats();
        let lines: Vec<Line> = {
            let space = self.space.lock();
            let of_map = space.memory.map.iter().map(|region| {
                let bytes = region.bytes() * self.granule_bytes;
                let what = match region.state() {
                    State::Live => "mapped".to_owned(),
                    State::Zombie => format!("zombie, epoch {}", region.fence().sequence),
                    other => format!("{other:?}"),
                };
                Line(space.memory.address_of(region.start() as u32), bytes, what)
            });
            let free = space.every_free_block().map(|block| {
                let address = self.base + u64::from(block.start()) * UNIT_BYTES;
                let what = match block.owner().of_stream() {
                    None => "  free".to_owned(),
                    Some((stream, parity)) => {
                        let epoch = space.books[stream as usize].epoch_of(parity);
                        format!("  free, stream {stream} epoch {epoch}")
                    }
                };
                Line(address, u64::from(block.units()) * UNIT_BYTES, what)
            });
            let mut lines: Vec<Line> = of_map.chain(free).collect();
            // A stretch before what begins in it.
            lines.sort_by_key(|Line(start, bytes, _)| (*start, std::cmp::Reverse(*bytes)));
            lines
        };
        f.debug_struct("Pool")
            .field("profile", &"default")
            .field("device", &self.device.ordinal())
            .field("stats", &stats)
            .field("driver_calls", &self.device.driver().calls())
            .field("regions", &lines)
            .finish()
    }
}

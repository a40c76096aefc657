//! What a pool says of itself in one way, by what it says in another, and by what its callers know.

use vpmm::snapshot::{BlockState, Segment};

use super::*;

fn sum(segments: &[Segment], state: BlockState) -> u64 {
    segments.iter().map(|segment| segment.bytes_in(state)).sum()
}

impl World<'_> {
    /// Of every pool that there is a handle of, and that no thread of its own is at work in.
    pub(super) fn compare_books(&self) {
        for slot in self.slots.iter().filter(|slot| !slot.helped) {
            let live = self.live.iter().filter(|live| live.pool == slot.id);
            let had: Vec<(u64, u64)> = live.map(|live| (live.ptr.address(), live.bytes)).collect();
            compare(&slot.pool, &had);
        }
        let is_known = self.orphans.is_empty() && !self.slots.iter().any(|slot| slot.helped);
        if self.had_faults || !is_known {
            return;
        }
        let mapped: u64 = self.slots.iter().map(|slot| slot.pool.stats().mapped_bytes).sum();
        let used = self.sim.memory_used(self.rig.device.ordinal() as i32);
        // What is not of a pool's blocks is the pools' values.
        assert!((mapped..=mapped + GRANULE).contains(&used), "{used} used, {mapped} mapped");
    }
}

/// `had` is what callers have: addresses and bytes.
fn compare(pool: &Pool, had: &[(u64, u64)]) {
    let (stats, segments) = (pool.stats(), pool.snapshot());
    let parts = stats.live_bytes
        + stats.cached_bytes
        + stats.idle_bytes
        + stats.pending_bytes
        + stats.transit_bytes;
    assert!(parts <= stats.mapped_bytes + stats.asleep_bytes, "more than there is: {stats:#?}");
    assert_eq!(parts + stats.hole_bytes + stats.zombie_bytes, stats.reserved_bytes, "{stats:#?}");
    assert!(stats.deferred_bytes <= stats.pending_bytes, "{stats:#?}");
    assert!(stats.peak_live_bytes >= stats.live_bytes, "{stats:#?}");
    assert!(stats.peak_mapped_bytes >= stats.mapped_bytes, "{stats:#?}");
    assert_eq!(stats.transit_bytes, 0, "{stats:#?}");
    let count = |state| {
        let blocks = segments.iter().flat_map(|segment| &segment.blocks);
        blocks.filter(|block| block.state == state).count() as u64
    };
    assert_eq!(sum(&segments, BlockState::Live), stats.live_bytes, "{stats:#?}");
    assert_eq!(sum(&segments, BlockState::Cached), stats.cached_bytes, "{stats:#?}");
    assert_eq!(sum(&segments, BlockState::Deferred), stats.deferred_bytes, "{stats:#?}");
    assert_eq!(
        sum(&segments, BlockState::Pending),
        stats.pending_bytes - stats.deferred_bytes,
        "{stats:#?}"
    );
    assert_eq!(sum(&segments, BlockState::Idle), stats.idle_bytes, "{stats:#?}");
    assert_eq!(count(BlockState::Live), stats.live_count, "{stats:#?}");
    assert_eq!(count(BlockState::Cached), stats.cached_count, "{stats:#?}");
    assert_eq!(count(BlockState::Idle), stats.idle_count, "{stats:#?}");
    assert_eq!(
        count(BlockState::Pending) + count(BlockState::Deferred),
        stats.pending_count,
        "{stats:#?}"
    );
    let asleep: u64 =
        segments.iter().filter(|segment| segment.is_asleep).map(|segment| segment.bytes).sum();
    assert_eq!(asleep, stats.asleep_bytes, "{stats:#?}");
    let all: u64 = segments.iter().map(|segment| segment.bytes).sum();
    assert!(all <= stats.mapped_bytes + stats.asleep_bytes, "{stats:#?}");
    for segment in &segments {
        let mut at = segment.address;
        for block in &segment.blocks {
            assert_eq!(block.address, at, "no gap before a block");
            at += block.bytes;
        }
        assert_eq!(at, segment.address + segment.bytes, "the blocks are the segment");
    }
    let live: BTreeMap<u64, u64> = segments
        .iter()
        .flat_map(|segment| &segment.blocks)
        .filter(|block| block.state == BlockState::Live)
        .map(|block| (block.address, block.bytes))
        .collect();
    assert_eq!(live.len(), had.len(), "{stats:#?}");
    for (address, bytes) in had {
        assert!(live.get(address).is_some_and(|block| block >= bytes), "{address:#x}");
        let found = pool.allocation(*address).expect("it is live");
        assert_eq!((found.start.address(), found.bytes), (*address, live[address]));
    }
}

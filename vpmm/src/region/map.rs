//! The map of a pool's address space: every region, and the indexes that its state puts it in.

use super::index::{AddressIndex, Queue, SizeIndex};
use super::{NodeId, Region, State};
use crate::arena::Arena;
use crate::fence::{Fence, TimelineId};

/// Bytes and regions in each state.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Totals {
    bytes: [u64; State::ALL.len()],
    regions: [u64; State::ALL.len()],
}

impl Totals {
    pub(crate) fn bytes(&self, state: State) -> u64 {
        self.bytes[state as usize]
    }

    pub(crate) fn regions(&self, state: State) -> u64 {
        self.regions[state as usize]
    }

    fn add(&mut self, region: &Region) {
        self.bytes[region.state() as usize] += region.bytes();
        self.regions[region.state() as usize] += 1;
    }

    fn subtract(&mut self, region: &Region) {
        self.bytes[region.state() as usize] -= region.bytes();
        self.regions[region.state() as usize] -= 1;
    }
}

/// What one stream still has a claim on.
struct OfStream {
    pending_by_size: SizeIndex,
    pending: Queue,
    zombies: Queue,
}

/// All regions of a pool.
///
/// A node in use is in the address index, and in the indexes of its state:
///
/// | state | indexes |
/// |---|---|
/// | idle | `idle` |
/// | hole | `holes` |
/// | pending | `pending_by_size` and `pending` of its fence's timeline |
/// | zombie | `zombies` of its fence's timeline, or `ready` once its fence is [`Fence::PASSED`] |
/// | live, transit | none |
///
/// `link` and `unlink` keep that true; every unsafe block below rests on it.
pub(crate) struct RegionMap {
    by_address: AddressIndex,
    idle: SizeIndex,
    holes: SizeIndex,
    ready: Queue,
    streams: Vec<OfStream>,
    totals: Totals,
    /// Last, so that it outlives the indexes when the map is dropped.
    arena: Arena<Region>,
}

// SAFETY: the map owns every node that its indexes point to (the arena is private and nodes are
// reachable through the map alone), so moving the whole to another thread moves all of it. It is
// not Sync: nodes hold `Cell`s.
unsafe impl Send for RegionMap {}

impl RegionMap {
    pub(crate) fn new() -> Self {
        Self {
            by_address: AddressIndex::new(),
            idle: SizeIndex::new(),
            holes: SizeIndex::new(),
            ready: Queue::new(),
            streams: Vec::new(),
            totals: Totals::default(),
            arena: Arena::new(),
        }
    }

    pub(crate) fn totals(&self) -> Totals {
        self.totals
    }

    pub(crate) fn region(&self, id: NodeId) -> &Region {
        self.arena.get(id.0)
    }

    /// Nodes in use: as many as regions (I7).
    pub(crate) fn nodes(&self) -> usize {
        self.arena.in_use()
    }

    fn take(&mut self) -> NodeId {
        NodeId(self.arena.take(|id| Region::vacant(NodeId(id))))
    }

    /// Adds addresses that no region covers yet.
    pub(crate) fn add(&mut self, start: u64, bytes: u64, reservation: u32, state: State) -> NodeId {
        let id = self.take();
        let node = self.arena.get(id.0);
        node.start.set(start);
        node.bytes.set(bytes);
        node.reservation.set(reservation);
        node.state.set(state);
        node.fence.set(Fence::PASSED);
        // SAFETY: fresh from the arena, so in no index; the arena keeps it in place.
        unsafe { self.by_address.insert(node) };
        self.link(id);
        id
    }

    /// Moves a region to another state.
    pub(crate) fn set(&mut self, id: NodeId, state: State, fence: Fence) {
        self.unlink(id);
        let node = self.arena.get(id.0);
        node.state.set(state);
        node.fence.set(fence);
        self.link(id);
    }

    /// Makes the first `bytes` of a region a region of their own in another state (the whole
    /// region, where it has no more), and returns it. What remains keeps its place and age.
    pub(crate) fn take_head(
        &mut self,
        id: NodeId,
        bytes: u64,
        state: State,
        fence: Fence,
    ) -> NodeId {
        let node = self.arena.get(id.0);
        debug_assert!(bytes > 0 && bytes <= node.bytes());
        if bytes == node.bytes() {
            self.set(id, state, fence);
            return id;
        }
        let start = node.start();
        self.resize(id, start + bytes, node.bytes() - bytes);
        self.insert_part(start, bytes, id, state, fence)
    }

    /// As [`take_head`](Self::take_head), with the last bytes.
    pub(crate) fn take_tail(
        &mut self,
        id: NodeId,
        bytes: u64,
        state: State,
        fence: Fence,
    ) -> NodeId {
        let node = self.arena.get(id.0);
        debug_assert!(bytes > 0 && bytes <= node.bytes());
        if bytes == node.bytes() {
            self.set(id, state, fence);
            return id;
        }
        let start = node.start();
        let kept = node.bytes() - bytes;
        self.resize(id, start, kept);
        self.insert_part(start + kept, bytes, id, state, fence)
    }

    fn insert_part(
        &mut self,
        start: u64,
        bytes: u64,
        whole: NodeId,
        state: State,
        fence: Fence,
    ) -> NodeId {
        let reservation = self.region(whole).reservation();
        let id = self.take();
        let node = self.arena.get(id.0);
        node.start.set(start);
        node.bytes.set(bytes);
        node.reservation.set(reservation);
        node.state.set(state);
        node.fence.set(fence);
        // SAFETY: fresh from the arena, so in no index; the arena keeps it in place.
        unsafe { self.by_address.insert(node) };
        self.link(id);
        id
    }

    /// Joins a region with the neighbours it can be one with. Returns the region that remains and
    /// how many were absorbed, each of which held the same fence.
    pub(crate) fn coalesce(&mut self, id: NodeId) -> (NodeId, u32) {
        let mut kept = id;
        let mut absorbed = 0;
        if let Some(before) =
            self.previous(kept).filter(|before| joinable(before, self.region(kept)))
        {
            let before = before.id();
            self.absorb_next(before, kept);
            kept = before;
            absorbed += 1;
        }
        if let Some(after) = self.next(kept).filter(|after| joinable(self.region(kept), after)) {
            let after = after.id();
            self.absorb_next(kept, after);
            absorbed += 1;
        }
        (kept, absorbed)
    }

    /// Joins two neighbours whatever their fences say; `next` goes, `id` keeps state and fence.
    pub(crate) fn absorb_next(&mut self, id: NodeId, next: NodeId) {
        let (node, other) = (self.region(id), self.region(next));
        debug_assert!(node.end() == other.start() && node.reservation() == other.reservation());
        let (start, bytes) = (node.start(), node.bytes() + other.bytes());
        self.remove(next);
        self.resize(id, start, bytes);
    }

    fn remove(&mut self, id: NodeId) {
        self.unlink(id);
        // SAFETY: every node in use is in the address index.
        unsafe { self.by_address.remove(self.arena.get(id.0)) };
        self.arena.give_back(id.0);
    }

    /// Changes a region's bounds. Its place among its neighbours must stay the same.
    fn resize(&mut self, id: NodeId, start: u64, bytes: u64) {
        let node = self.arena.get(id.0);
        self.totals.subtract(node);
        let index = match node.state() {
            State::Idle => Some(&mut self.idle),
            State::Hole => Some(&mut self.holes),
            State::Pending => {
                Some(&mut self.streams[node.fence().timeline.0 as usize].pending_by_size)
            }
            State::Live | State::Zombie | State::Transit => None,
        };
        if let Some(index) = index {
            // SAFETY: the node's state and fence name this index, so it is in it.
            unsafe { index.remove(node) };
            node.start.set(start);
            node.bytes.set(bytes);
            // SAFETY: taken out just now; the arena keeps it in place.
            unsafe { index.insert(node) };
        } else {
            node.start.set(start);
            node.bytes.set(bytes);
        }
        self.totals.add(node);
    }

    /// Enters a node into the indexes of its state.
    fn link(&mut self, id: NodeId) {
        let node = self.arena.get(id.0);
        self.totals.add(node);
        match node.state() {
            // SAFETY: the node is in no index but the address index; the arena keeps it in place.
            State::Idle => unsafe { self.idle.insert(node) },
            // SAFETY: as above.
            State::Hole => unsafe { self.holes.insert(node) },
            State::Pending => {
                let of_stream = of_stream(&mut self.streams, node.fence().timeline);
                // SAFETY: as above.
                unsafe { of_stream.pending_by_size.insert(node) };
                // SAFETY: as above.
                unsafe { of_stream.pending.insert(node) };
            }
            State::Zombie if node.fence() == Fence::PASSED => {
                // SAFETY: as above.
                unsafe { self.ready.insert(node) }
            }
            State::Zombie => {
                let of_stream = of_stream(&mut self.streams, node.fence().timeline);
                // SAFETY: as above.
                unsafe { of_stream.zombies.insert(node) }
            }
            State::Live | State::Transit => {}
        }
    }

    /// Takes a node out of the indexes of its state; it stays in the address index.
    fn unlink(&mut self, id: NodeId) {
        let node = self.arena.get(id.0);
        self.totals.subtract(node);
        match node.state() {
            // SAFETY: the node's state and fence name this index, so it is in it.
            State::Idle => unsafe { self.idle.remove(node) },
            // SAFETY: as above.
            State::Hole => unsafe { self.holes.remove(node) },
            State::Pending => {
                let of_stream = &mut self.streams[node.fence().timeline.0 as usize];
                // SAFETY: as above.
                unsafe { of_stream.pending_by_size.remove(node) };
                // SAFETY: as above.
                unsafe { of_stream.pending.remove(node) };
            }
            // SAFETY: as above.
            State::Zombie if node.fence() == Fence::PASSED => unsafe { self.ready.remove(node) },
            State::Zombie => {
                let of_stream = &mut self.streams[node.fence().timeline.0 as usize];
                // SAFETY: as above.
                unsafe { of_stream.zombies.remove(node) };
            }
            State::Live | State::Transit => {}
        }
    }

    /// The region that `address` is in.
    pub(crate) fn containing(&self, address: u64) -> Option<&Region> {
        self.by_address.at_or_below(address).filter(|region| address < region.end())
    }

    /// The next region upwards in the same reservation.
    pub(crate) fn next(&self, id: NodeId) -> Option<&Region> {
        let node = self.region(id);
        // SAFETY: every node in use is in the address index.
        let next = unsafe { self.by_address.next(node) };
        next.filter(|next| next.reservation() == node.reservation())
    }

    /// The next region downwards in the same reservation.
    pub(crate) fn previous(&self, id: NodeId) -> Option<&Region> {
        let node = self.region(id);
        // SAFETY: every node in use is in the address index.
        let previous = unsafe { self.by_address.previous(node) };
        previous.filter(|previous| previous.reservation() == node.reservation())
    }

    /// The smallest idle region of at least `bytes`.
    pub(crate) fn best_idle(&self, bytes: u64) -> Option<&Region> {
        self.idle.best_fit(bytes)
    }

    /// The smallest region of at least `bytes` among those that wait for a fence of one stream.
    pub(crate) fn best_pending(&self, timeline: TimelineId, bytes: u64) -> Option<&Region> {
        self.streams.get(timeline.0 as usize)?.pending_by_size.best_fit(bytes)
    }

    /// Idle regions, the smallest first.
    pub(crate) fn idle(&self) -> impl Iterator<Item = &Region> {
        self.idle.iter()
    }

    /// Holes, the smallest first.
    pub(crate) fn holes(&self) -> impl Iterator<Item = &Region> {
        self.holes.iter()
    }

    /// The same, the largest first.
    pub(crate) fn largest_holes(&self) -> impl Iterator<Item = &Region> {
        self.holes.iter().rev()
    }

    /// The regions that wait for a fence of one stream, in the order in which they were freed.
    pub(crate) fn pending(&self, timeline: TimelineId) -> impl Iterator<Item = &Region> {
        self.streams.get(timeline.0 as usize).into_iter().flat_map(|of| of.pending.iter())
    }

    /// The region that one stream has waited for longest.
    pub(crate) fn oldest_pending(&self, timeline: TimelineId) -> Option<&Region> {
        self.streams.get(timeline.0 as usize)?.pending.front()
    }

    /// The oldest zombie that waits for a fence of one stream.
    pub(crate) fn oldest_zombie(&self, timeline: TimelineId) -> Option<&Region> {
        self.streams.get(timeline.0 as usize)?.zombies.front()
    }

    /// The newest zombie that waits for a fence of one stream.
    pub(crate) fn newest_zombie(&self, timeline: TimelineId) -> Option<&Region> {
        self.streams.get(timeline.0 as usize)?.zombies.back()
    }

    /// The zombies whose fence has passed.
    pub(crate) fn ready_zombies(&self) -> impl Iterator<Item = &Region> {
        self.ready.iter()
    }

    /// Whether no region waits for a fence of the stream.
    pub(crate) fn is_clear_of(&self, timeline: TimelineId) -> bool {
        self.streams.get(timeline.0 as usize).is_none_or(|of| {
            of.pending.is_empty() && of.pending_by_size.is_empty() && of.zombies.is_empty()
        })
    }

    /// The largest free region, whatever its fence, but for those that wait for fences of one timeline.
    pub(crate) fn largest_free_but(&self, timeline: TimelineId) -> u64 {
        let streams = self.streams.iter().enumerate();
        let others = streams.filter(|(at, _)| *at != timeline.0 as usize);
        let pending = others.filter_map(|(_, of)| of.pending_by_size.largest());
        pending.chain(self.idle.largest()).map(Region::bytes).max().unwrap_or(0)
    }

    /// Every region, in ascending address order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Region> {
        self.by_address.iter()
    }
}

/// The indexes of a stream, made at first use.
fn of_stream(streams: &mut Vec<OfStream>, timeline: TimelineId) -> &mut OfStream {
    let at = timeline.0 as usize;
    if at >= streams.len() {
        streams.resize_with(at + 1, || OfStream {
            pending_by_size: SizeIndex::new(),
            pending: Queue::new(),
            zombies: Queue::new(),
        });
    }
    &mut streams[at]
}

/// Whether two regions must be one (I1): adjacent, of one reservation, in one state, and with one
/// fence. Regions of callers and of operations under way stay as they are.
pub(crate) fn joinable(low: &Region, high: &Region) -> bool {
    let mergeable =
        matches!(low.state(), State::Idle | State::Hole | State::Pending | State::Zombie);
    mergeable
        && low.end() == high.start()
        && low.reservation() == high.reservation()
        && low.state() == high.state()
        && low.fence() == high.fence()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn fence(timeline: u32, sequence: u64) -> Fence {
        Fence { timeline: TimelineId(timeline), sequence }
    }

    fn shape(map: &RegionMap) -> Vec<(u64, u64, State)> {
        map.iter()
            .map(|region| (region.start() / MIB, region.bytes() / MIB, region.state()))
            .collect()
    }

    #[test]
    fn parts_are_taken_from_both_ends_and_join_again() {
        let mut map = RegionMap::new();
        let hole = map.add(0, 16 * MIB, 0, State::Hole);
        let low = map.take_head(hole, 4 * MIB, State::Idle, Fence::PASSED);
        let high = map.take_tail(hole, 2 * MIB, State::Live, Fence::PASSED);
        assert_eq!(shape(&map), [(0, 4, State::Idle), (4, 10, State::Hole), (14, 2, State::Live)]);
        assert_eq!(map.totals().bytes(State::Hole), 10 * MIB);
        map.set(high, State::Hole, Fence::PASSED);
        assert_eq!(map.coalesce(high), (hole, 1));
        map.set(low, State::Hole, Fence::PASSED);
        assert_eq!(map.coalesce(low).1, 1);
        assert_eq!(shape(&map), [(0, 16, State::Hole)]);
        assert_eq!(map.nodes(), 1);
    }

    #[test]
    fn best_fit_is_the_smallest_and_then_the_lowest() {
        let mut map = RegionMap::new();
        for (start, bytes) in [(0, 8), (16, 4), (32, 6), (48, 4)] {
            map.add(start * MIB, bytes * MIB, 0, State::Idle);
        }
        assert_eq!(map.best_idle(4 * MIB).map(Region::start), Some(16 * MIB));
        assert_eq!(map.best_idle(5 * MIB).map(Region::start), Some(32 * MIB));
        assert!(map.best_idle(9 * MIB).is_none());
    }

    #[test]
    fn pending_regions_keep_their_age_when_split_and_join_only_on_one_fence() {
        let mut map = RegionMap::new();
        let whole = map.add(0, 10 * MIB, 0, State::Live);
        let first = map.take_head(whole, 4 * MIB, State::Live, Fence::PASSED);
        map.set(first, State::Pending, fence(3, 1));
        map.set(whole, State::Pending, fence(3, 2));
        assert_eq!(map.coalesce(whole), (whole, 0), "different fences");
        let part = map.take_head(first, MIB, State::Pending, fence(3, 1));
        let ages: Vec<_> = map.pending(TimelineId(3)).map(Region::id).collect();
        assert_eq!(ages, [first, part, whole]);
        assert_eq!(map.coalesce(part).1, 1, "one fence");
        assert!(map.best_pending(TimelineId(3), 5 * MIB).is_some());
        assert!(map.best_pending(TimelineId(2), 1).is_none());
        assert!(!map.is_clear_of(TimelineId(3)) && map.is_clear_of(TimelineId(9)));
    }

    /// As where frees that waited for further streams come to be their own stream's, beside what that has freed since.
    #[test]
    fn a_region_that_is_older_than_many_is_entered_as_fast_as_beside_few() {
        const OLDER: u64 = 200;
        let entries_beside = |newer: u64| {
            let mut map = RegionMap::new();
            let regions: Vec<NodeId> =
                (0..OLDER + newer).map(|at| map.add(2 * at * MIB, MIB, 0, State::Live)).collect();
            let (older, others) = regions.split_at(OLDER as usize);
            for (sequence, id) in (OLDER..).zip(others) {
                map.set(*id, State::Pending, fence(0, sequence));
            }
            let start = std::time::Instant::now();
            for (sequence, id) in (0..).zip(older) {
                map.set(*id, State::Pending, fence(0, sequence));
            }
            let took = start.elapsed();
            let ages: Vec<NodeId> = map.pending(TimelineId(0)).map(Region::id).collect();
            assert_eq!(ages, regions);
            took
        };
        // The machine may be busy with something else in either.
        let is_as_fast = |_| {
            let few = entries_beside(OLDER);
            let many = entries_beside(if cfg!(miri) { 2_000 } else { 200_000 });
            println!("{few:?} beside 200, {many:?} beside a thousand times as many");
            many < 50 * few
        };
        assert!((0..8).any(is_as_fast));
    }

    #[test]
    fn reservations_that_touch_stay_apart() {
        let mut map = RegionMap::new();
        let low = map.add(0, 4 * MIB, 0, State::Hole);
        let high = map.add(4 * MIB, 4 * MIB, 1, State::Hole);
        assert_eq!(map.coalesce(low), (low, 0));
        assert!(map.next(low).is_none() && map.previous(high).is_none());
        assert_eq!(map.containing(5 * MIB).map(Region::id), Some(high));
        assert!(map.containing(8 * MIB).is_none());
    }

    #[test]
    fn nodes_are_used_again() {
        let mut map = RegionMap::new();
        let mut hole = map.add(0, 1024 * MIB, 0, State::Hole);
        for round in 0..if cfg!(miri) { 100 } else { 10_000 } {
            let part = match round % 2 {
                0 => map.take_head(hole, MIB, State::Idle, Fence::PASSED),
                _ => map.take_tail(hole, MIB, State::Idle, Fence::PASSED),
            };
            assert_eq!(map.nodes(), 2);
            map.set(part, State::Hole, Fence::PASSED);
            hole = map.coalesce(part).0;
            assert_eq!((map.nodes(), map.iter().count()), (1, 1));
        }
        assert_eq!(shape(&map), [(0, 1024, State::Hole)]);
    }
}

//! What the pool's lock guards: the map of regions, the timelines of streams, the page tables.
//!
//! Nothing here calls the driver. The functions keep three things in step:
//! a region that carries a fence holds it; an event that no region needs is kept for the next
//! record; a region whose fence has passed belongs to no stream.

use std::collections::{HashMap, HashSet, VecDeque};

use smallvec::SmallVec;

use super::chunk::Chunk;
use super::ordering::Follows;
use super::trim::Aliases;
use super::uses::UseBook;
use crate::device::StreamHandle;
use crate::error::Error;
use crate::event::Event;
use crate::fence::{Fence, TimelineId, Timelines};
use crate::physical::Extent;
use crate::region::{NodeId, Region, RegionMap, State};
use crate::reservation::Reservation;
use crate::stream::RawHandles;
use crate::units::DevicePtr;

/// Timelines are swept for streams that are gone when their number has doubled, from here on.
const FEW_TIMELINES: usize = 64;

pub(super) struct Space {
    pub(super) map: RegionMap,
    pub(super) timelines: Timelines<Event>,
    pub(super) chunks: SmallVec<[Chunk; 1]>,
    /// Events for the next frees.
    pub(super) events: Vec<Event>,
    /// Streams that zombies wait for, in the order in which they will be asked.
    pub(super) zombie_streams: VecDeque<TimelineId>,
    /// Pages that the driver would not take back when their plan was given up.
    pub(super) orphans: Vec<Extent>,
    pub(super) page: u64,
    /// Bytes of extents: what is live, free or in transit.
    pub(super) mapped: u64,
    pub(super) peak_mapped: u64,
    pub(super) peak_live: u64,
    /// The start of the allocation made last, for the drawing of the layout.
    pub(super) latest: u64,
    /// Zombies that the driver would not unmap, which stay zombies, and mappings that it would not undo, which
    /// become some.
    pub(super) failed_unmaps: u64,
    pub(super) pages_created: u64,
    pub(super) pages_moved: u64,
    /// Waits of streams for others' memory, and of the host for what was freed.
    pub(super) device_waits: u64,
    pub(super) host_waits: u64,
    /// Pages that other processes may have.
    pub(super) shared: HashSet<Extent>,
    /// Pages that zombies are mapped to.
    pub(super) aliases: Aliases,
    /// What is used on further streams.
    pub(super) uses: UseBook,
    /// Which streams come after which.
    pub(super) follows: Follows,
    /// The library's streams that have called, by id, until they end; and the legacy stream.
    pub(super) streams: Streams,
    /// Of the others, but for the threads' own.
    by_raw: RawHandles,
    last_tag: u32,
    sweep_timelines_at: usize,
}

/// Streams by id, with the one that called last at hand: it is most often the next, too.
#[derive(Default)]
pub(super) struct Streams {
    by_id: HashMap<u64, StreamHandle>,
    last: Option<u64>,
    legacy: Option<u64>,
}

impl Streams {
    pub(super) fn get(&self, id: u64) -> Option<StreamHandle> {
        self.by_id.get(&id).copied()
    }

    pub(super) fn add(&mut self, id: u64, stream: StreamHandle) {
        if self.last != Some(id) {
            self.last = Some(id);
            self.by_id.entry(id).or_insert(stream);
            if stream == StreamHandle::LEGACY {
                self.legacy = Some(id);
            }
        }
    }

    /// The legacy stream's id, if it has called.
    pub(super) fn legacy(&self) -> Option<u64> {
        self.legacy
    }

    pub(super) fn remove(&mut self, id: u64) {
        self.last = self.last.filter(|last| *last != id);
        self.by_id.remove(&id);
    }
}

impl Space {
    pub(super) fn new(page: u64) -> Self {
        let mut timelines = Timelines::new();
        let uses = UseBook::new(timelines.reserve());
        Self {
            map: RegionMap::new(),
            timelines,
            chunks: SmallVec::new(),
            events: Vec::new(),
            zombie_streams: VecDeque::new(),
            orphans: Vec::new(),
            page,
            mapped: 0,
            peak_mapped: 0,
            peak_live: 0,
            latest: 0,
            failed_unmaps: 0,
            pages_created: 0,
            pages_moved: 0,
            device_waits: 0,
            host_waits: 0,
            shared: HashSet::new(),
            aliases: Aliases::default(),
            uses,
            follows: Follows::default(),
            streams: Streams::default(),
            by_raw: RawHandles::default(),
            last_tag: 0,
            sweep_timelines_at: FEW_TIMELINES,
        }
    }

    /// The stream's timeline, made if there is none; forgets streams that have no claim left.
    pub(super) fn timeline(&mut self, stream: u64) -> TimelineId {
        if let Some(known) = self.timelines.find(stream) {
            return known;
        }
        if self.timelines.len() >= self.sweep_timelines_at {
            let map = &self.map;
            self.timelines.close_unused(|id| map.is_clear_of(id));
            self.sweep_timelines_at = (self.timelines.len() * 2).max(FEW_TIMELINES);
        }
        let timeline = self.timelines.open(stream);
        self.follows.forget(timeline);
        timeline
    }

    /// Takes a reservation in; all of it is one hole.
    pub(super) fn add_chunk(&mut self, reservation: Reservation) -> NodeId {
        let number = self.chunks.len() as u32;
        let hole = self.map.add(reservation.base(), reservation.bytes(), number, State::Hole);
        self.chunks.push(Chunk::new(reservation, self.page));
        hole
    }

    pub(super) fn chunk_of(&mut self, region: NodeId) -> &mut Chunk {
        let number = self.map.region(region).reservation() as usize;
        &mut self.chunks[number]
    }

    // Moving regions between states.

    /// Moves a region to another state, its hold on a fence included.
    pub(super) fn set(&mut self, id: NodeId, state: State, fence: Fence) {
        let former = self.map.region(id).fence();
        self.timelines.hold(fence);
        self.map.set(id, state, fence);
        self.release(former);
    }

    /// Moves the first `bytes` of a region to another state.
    pub(super) fn take_head(
        &mut self,
        id: NodeId,
        bytes: u64,
        state: State,
        fence: Fence,
    ) -> NodeId {
        if self.map.region(id).bytes() == bytes {
            self.set(id, state, fence);
            return id;
        }
        self.timelines.hold(fence);
        self.map.take_head(id, bytes, state, fence)
    }

    /// Moves the last `bytes` of a region to another state.
    pub(super) fn take_tail(
        &mut self,
        id: NodeId,
        bytes: u64,
        state: State,
        fence: Fence,
    ) -> NodeId {
        if self.map.region(id).bytes() == bytes {
            self.set(id, state, fence);
            return id;
        }
        self.timelines.hold(fence);
        self.map.take_tail(id, bytes, state, fence)
    }

    pub(super) fn coalesce(&mut self, id: NodeId) -> NodeId {
        let fence = self.map.region(id).fence();
        let (kept, absorbed) = self.map.coalesce(id);
        for _ in 0..absorbed {
            self.release(fence);
        }
        kept
    }

    /// Joins neighbours in transit into the first of them, which then carries no fence.
    pub(super) fn join_transit(&mut self, parts: &[NodeId]) -> Option<NodeId> {
        for part in parts {
            self.set(*part, State::Transit, Fence::PASSED);
        }
        let (first, rest) = parts.split_first()?;
        for part in rest {
            self.map.absorb_next(*first, *part);
        }
        Some(*first)
    }

    /// One holder of a fence fewer.
    pub(super) fn release(&mut self, fence: Fence) {
        let event = self.timelines.release(fence);
        self.events.extend(event);
    }

    /// Puts memory back among the free: pending where its fence has not passed, else idle.
    pub(super) fn set_free(&mut self, id: NodeId, fence: Fence) -> NodeId {
        if self.timelines.has_passed(fence) {
            self.set(id, State::Idle, Fence::PASSED);
        } else {
            self.set(id, State::Pending, fence);
        }
        self.coalesce(id)
    }

    /// Leaves addresses to be unmapped when their fence has passed.
    pub(super) fn set_zombie(&mut self, id: NodeId, fence: Fence) {
        if self.timelines.is_complete(fence) {
            self.set(id, State::Zombie, Fence::PASSED);
        } else {
            self.set(id, State::Zombie, fence);
            if !self.zombie_streams.contains(&fence.timeline) {
                self.zombie_streams.push_back(fence.timeline);
            }
        }
        self.coalesce(id);
    }

    pub(super) fn set_hole(&mut self, id: NodeId) {
        self.set(id, State::Hole, Fence::PASSED);
        self.coalesce(id);
    }

    /// Notes that a fence was seen complete: everything freed on its stream up to then is idle now.
    pub(super) fn pass(&mut self, fence: Fence) {
        let events = &mut self.events;
        if !self.timelines.pass(fence, |event| events.push(event)) {
            return;
        }
        let timeline = fence.timeline;
        while let Some(region) = self.map.oldest_pending(timeline) {
            if !self.timelines.has_passed(region.fence()) {
                break;
            }
            let id = region.id();
            self.set_free(id, Fence::PASSED);
        }
        self.settle_after(timeline);
    }

    /// Notes that a fence was seen complete by a question that gives no memory to other streams, but for what
    /// a stream freed that has ended since.
    pub(super) fn see_complete(&mut self, fence: Fence) {
        if self.timelines.see_complete(fence) {
            self.settle_after(fence.timeline);
            self.pass_ended(fence.timeline);
        }
    }

    /// A stream has ended, which has this timeline.
    pub(super) fn end(&mut self, timeline: TimelineId) {
        self.timelines.end(timeline);
        self.pass_ended(timeline);
    }

    /// A stream whose end nobody tells has come by a handle, for the first time: the one that had it before has ended.
    pub(super) fn came_by(&mut self, handle: StreamHandle, stream: u64) {
        let timelines = &self.timelines;
        let is_known = |known| timelines.find(known).is_some();
        let former = self.by_raw.came_by(handle, stream, is_known);
        // What was lent since has its end told.
        let Some(former) = former.filter(|former| self.streams.get(*former).is_none()) else {
            return;
        };
        let timeline = self.timelines.find(former);
        self.uses.forget_handle(former, timeline);
        timeline.into_iter().for_each(|timeline| self.end(timeline));
    }

    /// What an ended stream freed is nobody's as soon as it is known to be complete: it asks for it no more, and
    /// the host cannot wait for it by its name.
    fn pass_ended(&mut self, timeline: TimelineId) {
        if let Some(fence) = self.timelines.complete_of_ended(timeline) {
            self.pass(fence);
        }
    }

    /// What else waited for fences of a timeline that are complete now: zombies, deferred frees.
    fn settle_after(&mut self, timeline: TimelineId) {
        while let Some(region) = self.map.oldest_zombie(timeline) {
            if !self.timelines.is_complete(region.fence()) {
                break;
            }
            let id = region.id();
            self.set_zombie(id, Fence::PASSED);
        }
        if self.uses.waits_for(timeline) {
            self.settle(timeline);
        }
    }

    /// The fence that the oldest zombie of some stream waits for: each time another stream's, and
    /// streams without zombies are forgotten on the way.
    pub(super) fn next_zombie_fence(&mut self) -> Option<Fence> {
        while let Some(timeline) = self.zombie_streams.pop_front() {
            if let Some(zombie) = self.map.oldest_zombie(timeline) {
                self.zombie_streams.push_back(timeline);
                return Some(zombie.fence());
            }
        }
        None
    }

    // Handing memory out.

    /// Hands a region out to a caller on a stream.
    pub(super) fn hand_out(&mut self, id: NodeId, timeline: TimelineId) -> DevicePtr {
        self.set(id, State::Live, Fence::PASSED);
        let tag = self.next_tag();
        let start = self.map.region(id).start();
        let stream = self.timelines.stream(timeline);
        let chunk = self.chunk_of(id);
        chunk.set_owner(start, Some((id, tag)));
        chunk.set_stream(start, stream);
        self.latest = start;
        self.peak_live = self.peak_live.max(self.map.totals().bytes(State::Live));
        DevicePtr::tagged(start, tag)
    }

    /// Tags of pages lie below [`Small`](super::small::Small)'s and are never 0.
    fn next_tag(&mut self) -> u32 {
        self.last_tag =
            if self.last_tag >= super::small::SMALL_TAG - 1 { 1 } else { self.last_tag + 1 };
        self.last_tag
    }

    /// Takes an allocation back into the pool's hands, in transit until its fence is recorded.
    pub(super) fn take_back(&mut self, ptr: DevicePtr) -> Result<(NodeId, u32), Error> {
        let (number, id, tag) = self.find_live(ptr)?;
        self.chunks[number].set_owner(ptr.address(), None);
        self.set(id, State::Transit, Fence::PASSED);
        Ok((id, tag))
    }

    /// Whether a pointer may be freed.
    pub(super) fn check_live(&self, ptr: DevicePtr) -> Result<(), Error> {
        self.find_live(ptr).map(drop)
    }

    /// The allocation that a pointer names: its chunk, its region and its tag.
    fn find_live(&self, ptr: DevicePtr) -> Result<(usize, NodeId, u32), Error> {
        let address = ptr.address();
        let Some(number) = self.chunks.iter().position(|chunk| chunk.contains(address)) else {
            return Err(Error::ForeignPointer { address });
        };
        let Some((id, tag)) = self.chunks[number].owner(address) else {
            return Err(self.why_not_live(address));
        };
        if ptr.tag() != 0 && ptr.tag() != tag {
            return Err(Error::StalePointer { address });
        }
        Ok((number, id, tag))
    }

    /// Undoes [`take_back`](Self::take_back).
    pub(super) fn leave_live(&mut self, id: NodeId, tag: u32) {
        self.set(id, State::Live, Fence::PASSED);
        let start = self.map.region(id).start();
        self.chunk_of(id).set_owner(start, Some((id, tag)));
    }

    /// The allocation that starts at an address.
    pub(super) fn live_at(&self, address: u64) -> Result<NodeId, Error> {
        let chunk = self.chunks.iter().find(|chunk| chunk.contains(address));
        let chunk = chunk.ok_or(Error::ForeignPointer { address })?;
        chunk.owner(address).map(|(id, _)| id).ok_or_else(|| self.why_not_live(address))
    }

    fn why_not_live(&self, address: u64) -> Error {
        match self.map.containing(address) {
            Some(region) if region.state() == State::Live => {
                Error::InteriorPointer { address, start: region.start() }
            }
            Some(region) if matches!(region.state(), State::Zombie | State::Hole) => {
                Error::StalePointer { address }
            }
            Some(_) => Error::DoubleFree { address },
            None => Error::ForeignPointer { address },
        }
    }

    // Measures.

    pub(super) fn free_bytes(&self) -> u64 {
        let totals = self.map.totals();
        totals.bytes(State::Idle) + totals.bytes(State::Pending)
    }

    /// Whether a stream may use the region's memory with no further ordering.
    pub(super) fn usable_by(region: &Region, timeline: TimelineId) -> bool {
        match region.state() {
            State::Idle => true,
            State::Pending => region.fence().timeline == timeline,
            State::Live | State::Zombie | State::Hole | State::Transit => false,
        }
    }
}

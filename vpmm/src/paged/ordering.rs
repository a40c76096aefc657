//! What callers say about the order of streams: marks, and what follows from them.
//!
//! A mark is the number of the fence entered last: on its stream it covers every fence up to it. Where
//! the stream's place goes to another one, that one's fences all have greater numbers, so an old mark
//! says nothing about them; the stream's id is in the mark, in the place of an epoch.
//! A stream that follows another's mark may take what that stream freed before, as its own; so may
//! the other, whoever comes first.

use std::collections::HashMap;

use smallvec::{SmallVec, smallvec};

use super::space::Space;
use super::{Caller, PagedPool, lock};
use crate::device::StreamHandle;
use crate::driver::{Awaited, StreamWatcher};
use crate::error::{Error, Result};
use crate::fence::{Fence, TimelineId};
use crate::ordering::Mark;
use crate::region::{NodeId, Region, State};
use crate::units::DevicePtr;

/// Stands in a mark for every stream of the pool.
const EVERY_STREAM: u32 = u32::MAX;

/// Which streams come after which, and after what there.
#[derive(Default)]
pub(super) struct Follows(HashMap<TimelineId, Followed>);

/// Each timeline that is followed, once, and up to which number.
pub(super) type Followed = SmallVec<[(TimelineId, u64); 2]>;

impl Follows {
    /// Notes that one timeline comes after another's fences up to a number.
    pub(super) fn add(&mut self, follower: TimelineId, followed: TimelineId, until: u64) {
        let entries = self.0.entry(follower).or_default();
        match entries.iter_mut().find(|(known, _)| *known == followed) {
            Some((_, known)) => *known = until.max(*known),
            None => entries.push((followed, until)),
        }
    }

    /// A place that has gone to another stream: what is known of the former is not true of it.
    pub(super) fn forget(&mut self, follower: TimelineId) {
        self.0.remove(&follower);
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (TimelineId, &Followed)> {
        self.0.iter().map(|(follower, followed)| (*follower, followed))
    }
}

impl Space {
    /// What a timeline follows that still has something for it. What has not is forgotten: whatever
    /// is freed there later is beyond the mark.
    fn followed(&mut self, follower: TimelineId) -> Followed {
        let Some(entries) = self.follows.0.get_mut(&follower) else { return Followed::new() };
        let map = &self.map;
        entries.retain(|(followed, until)| {
            map.oldest_pending(*followed).is_some_and(|oldest| oldest.fence().sequence <= *until)
        });
        let found = entries.clone();
        if found.is_empty() {
            self.follows.forget(follower);
        }
        found
    }

    fn pending_until(&self, (timeline, until): (TimelineId, u64)) -> impl Iterator<Item = &Region> {
        self.map.pending(timeline).take_while(move |region| region.fence().sequence <= until)
    }

    /// Best fit over what the streams that this one follows freed before their marks. O(those
    /// regions), no driver call.
    fn place_followed(
        &mut self,
        timeline: TimelineId,
        followed: &Followed,
        bytes: u64,
    ) -> Option<DevicePtr> {
        let regions = followed.iter().flat_map(|mark| self.pending_until(*mark));
        let best = regions.filter(|region| region.bytes() >= bytes).min_by_key(|r| r.bytes())?.id();
        let head = self.take_head(best, bytes, State::Transit, Fence::PASSED);
        Some(self.hand_out(head, timeline))
    }

    /// Makes all that the followed streams freed before their marks a stream's own. `fence`, just
    /// pushed, was recorded on the stream after it was told to come behind them.
    fn adopt(&mut self, followed: &Followed, fence: Fence) {
        for mark in followed {
            let first = |space: &Self| space.pending_until(*mark).next().map(Region::id);
            while let Some(id) = first(self) {
                self.set(id, State::Pending, fence);
                let _: NodeId = self.coalesce(id);
            }
        }
        // The regions hold it now.
        self.release(fence);
    }
}

impl PagedPool {
    pub(crate) fn mark(&self, stream: StreamHandle) -> Result<Mark> {
        let stream_id = self.recognise(stream)?;
        let mut space = self.lock_space();
        let timeline = space.timeline(stream_id);
        Ok(self.mark_of(&space, timeline))
    }

    fn mark_of(&self, space: &Space, timeline: TimelineId) -> Mark {
        let point = space.timelines.last_sequence();
        Mark {
            pool: self.number,
            stream: timeline.0,
            point,
            epoch: space.timelines.stream(timeline),
        }
    }

    pub(super) fn mark_of_every_stream(&self, space: &Space) -> Mark {
        let point = space.timelines.last_sequence();
        Mark { pool: self.number, stream: EVERY_STREAM, point, epoch: 0 }
    }

    fn check_mark(&self, mark: &Mark) -> Result<()> {
        if mark.pool == self.number { Ok(()) } else { Err(Error::ForeignMark) }
    }

    pub(crate) fn follows(&self, stream: StreamHandle, mark: &Mark) -> Result<()> {
        self.check_mark(mark)?;
        let stream_id = self.recognise(stream)?;
        if !self.config.reuse.follow_event_dependencies {
            return Ok(());
        }
        let mut space = self.lock_space();
        let follower = space.timeline(stream_id);
        let followed = TimelineId(mark.stream);
        if follower != followed {
            space.follows.add(follower, followed, mark.point);
        }
        Ok(())
    }

    /// Serves a request from what the streams that its stream follows have freed. One event is
    /// recorded where no single region is long enough, and no question asked.
    pub(super) fn take_followed(&self, caller: Caller, bytes: u64) -> Result<Option<DevicePtr>> {
        let (followed, recording) = {
            let mut space = self.lock_space();
            let timeline = space.timeline(caller.stream_id);
            let followed = space.followed(timeline);
            if followed.is_empty() {
                return Ok(None);
            }
            if let Some(ptr) = space.place_followed(timeline, &followed, bytes) {
                return Ok(Some(ptr));
            }
            (followed, space.timelines.recording(timeline))
        };
        let _in_order = lock(&recording);
        let event = self.record(caller.stream)?;
        let mut space = self.lock_space();
        let timeline = space.timeline(caller.stream_id);
        let fence = space.timelines.push(timeline, event);
        space.adopt(&followed, fence);
        Ok(space.place(timeline, bytes).or_else(|| space.place_in_run(timeline, bytes)))
    }

    pub(crate) fn passed(&self, mark: &Mark) -> Result<()> {
        self.check_mark(mark)?;
        self.lock_space().pass_mark(mark);
        match self.config.release_threshold_bytes {
            Some(keep_bytes) => self.trim_to(self.backing.share_of(keep_bytes)).map(drop),
            None => Ok(()),
        }
    }
}

impl Space {
    /// The host has waited for what was marked: it is everybody's.
    pub(super) fn pass_mark(&mut self, mark: &Mark) {
        let (timelines, stream): (SmallVec<[TimelineId; 4]>, _) = match mark.stream {
            EVERY_STREAM => (self.timelines.ids().collect(), None),
            timeline => (smallvec![TimelineId(timeline)], Some(mark.epoch)),
        };
        for timeline in timelines {
            if let Some(fence) = self.timelines.newest_until(timeline, mark.point) {
                self.pass(fence);
            }
        }
        self.settle_by(mark.point, stream);
    }
}

impl StreamWatcher for PagedPool {
    fn stream_ends(&self, stream: StreamHandle) {
        self.end_of_stream(stream);
    }

    fn marks(&self, of: Awaited) -> SmallVec<[Mark; 2]> {
        let space = self.lock_space();
        match of {
            _ if !of.is_of(&self.device) => SmallVec::new(),
            Awaited::Stream(stream, _) => {
                let is_legacy = stream == StreamHandle::LEGACY;
                let legacy = space.streams.legacy().filter(|_| is_legacy);
                let id = stream.known_to(self.device.driver().realm()).or(legacy);
                let timeline = id.and_then(|id| space.timelines.find(id));
                timeline.map(|timeline| self.mark_of(&space, timeline)).into_iter().collect()
            }
            Awaited::Device(_) => smallvec![self.mark_of_every_stream(&space)],
        }
    }

    fn passed(&self, mark: &Mark) {
        // The wait went well. What could not be given back after it is still the pool's, and the
        // next wait, or a call of `trim_to`, tries again.
        let _: Result<()> = self.passed(mark);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: TimelineId = TimelineId(1);
    const B: TimelineId = TimelineId(2);

    #[test]
    fn a_later_mark_of_the_same_stream_takes_the_place_of_an_earlier_one() {
        let mut follows = Follows::default();
        follows.add(B, A, 5);
        follows.add(B, A, 9);
        follows.add(B, A, 7); // told late
        let entries: Vec<_> = follows.iter().map(|(of, entries)| (of, entries.to_vec())).collect();
        assert_eq!(entries, [(B, vec![(A, 9)])]);
        follows.forget(B);
        assert_eq!(follows.iter().count(), 0);
    }

    #[test]
    fn a_mark_that_nothing_is_left_of_is_forgotten() {
        let mut space = Space::new(2 << 20);
        let (a, b) = (space.timeline(1), space.timeline(2));
        space.follows.add(b, a, 5);
        assert!(space.followed(b).is_empty(), "nothing was freed");
        assert_eq!(space.follows.iter().count(), 0);
    }
}

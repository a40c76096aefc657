//! What callers say about the order of streams: marks, and what comes after them.
//!
//! A book counts its marks, and every free block carries its owner's count of the time when
//! something of it was freed last. So a mark costs no event and closes no epoch, and whether a
//! block was freed before it is one comparison.

use smallvec::SmallVec;

use crate::default::Core;
use crate::default::front::admit::Place;
use crate::default::ladder::Request;
use crate::default::space::book::{Follows, LookedAt, Recording, Stage};
use crate::default::space::owner::Owner;
use crate::default::space::tags::Tags;
use crate::default::space::{Part, Space};
use crate::device::StreamHandle;
use crate::driver::Awaited;
use crate::error::{Error, Result};
use crate::ordering::Mark;

/// Blocks of one followed stream looked at for one request, and of all of them together: a stream may follow
/// thousands.
const LOOKED_AT: usize = 256;
const LOOKED_AT_IN_ALL: usize = 4096;

/// Blocks of all followed streams looked at in vain for one request, for those that become the stream's own: the next
/// one goes on from there.
const LOOKED_AT_IN_VAIN: usize = 1 << 14;

/// Blocks that become another's in one go.
const HANDED_OVER: usize = 256;

/// Blocks that are looked at in one go for those that were freed before a mark.
const LOOKED_AT_FOR_MARK: usize = 2048;

impl Core {
    pub(in crate::default) fn take_mark(&self, handle: StreamHandle) -> Result<Mark> {
        let admitted = self.admit(handle)?;
        // What is in the front has no place in the books yet.
        self.flush_own(admitted.stream, None);
        Ok(self.space.lock().take_mark(self.number, admitted.stream))
    }

    /// Marks before a wait of the host. What the calling thread has in front comes out for that;
    /// what others have only where memory is to be given back.
    pub(in crate::default) fn marks_before(&self, of: Awaited) -> SmallVec<[Mark; 2]> {
        let place = match of {
            Awaited::Stream(handle, _) if of.is_of(&self.device) => self.known_stream(handle),
            _ => None,
        };
        let streams: SmallVec<[u32; 8]> = match of {
            _ if !of.is_of(&self.device) => SmallVec::new(),
            Awaited::Device(_) => (0..self.space.lock().books.len() as u32).collect(),
            Awaited::Stream(..) => place.iter().map(Place::index).collect(),
        };
        if streams.is_empty() {
            return SmallVec::new();
        }
        if self.config.release_threshold_bytes.is_some() {
            match streams[..] {
                [stream] => self.flush_stream(stream),
                _ => self.flush_fronts(|_| true),
            };
        } else {
            for stream in &streams {
                self.flush_own(*stream, None);
            }
        }
        let mut space = self.space.lock();
        let mut mark = |stream| {
            space.close_for_wait(&self.tags, stream);
            space.take_mark(self.number, stream)
        };
        streams.into_iter().map(&mut mark).collect()
    }

    pub(in crate::default) fn follow(&self, handle: StreamHandle, mark: &Mark) -> Result<()> {
        self.check_mark(mark)?;
        let admitted = self.admit(handle)?;
        if self.config.reuse.follow_event_dependencies && admitted.stream != mark.stream {
            self.space.lock().follow(admitted.stream, mark);
        }
        Ok(())
    }

    pub(in crate::default) fn mark_passed(&self, mark: &Mark) -> Result<()> {
        self.check_mark(mark)?;
        self.space.lock().settle_epoch(&self.tags, mark, true);
        while self.space.lock().drain(&self.tags, mark.stream) {}
        self.settle_whole_mark(mark);
        match self.config.release_threshold_bytes {
            Some(keep_bytes) => self.trim(self.backing.share_of(keep_bytes)).map(|_| ()),
            None => Ok(()),
        }
    }

    /// A second stream comes to what was the only one's: what the host has seen of that.
    pub(in crate::default) fn share_what_was_seen(&self, stream: u32) {
        let mark = {
            let space = self.space.lock();
            let book = &space.books[stream as usize];
            Mark { pool: self.number, stream, point: book.seen, epoch: 0 }
        };
        self.settle_whole_mark(&mark);
    }

    /// Makes all that was freed before a mark, which has passed, nobody's.
    fn settle_whole_mark(&self, mark: &Mark) {
        let mut looked_at = LookedAt::default();
        while self.space.lock().settle_mark(&self.tags, mark, &mut looked_at) {}
    }

    fn check_mark(&self, mark: &Mark) -> Result<()> {
        let known = (mark.stream as usize) < self.space.lock().books.len();
        if mark.pool == self.number && known { Ok(()) } else { Err(Error::ForeignMark) }
    }

    /// A block of a stream that the request's comes after; else all that the stream may have of
    /// those becomes its own. And frees that wait for further streams are asked about.
    pub(in crate::default) fn place_tied(&self, request: Request) -> Result<Option<u32>> {
        let Request { stream, units, .. } = request;
        let part = Part::of_size(units);
        {
            // It may have fallen asleep: see `place_awake`.
            let mut space = self.space.lock();
            if !self.is_asleep()
                && let Some(start) = space.place_followed(&self.tags, stream, units, part)
            {
                return Ok(Some(start));
            }
        }
        let mut in_vain = LOOKED_AT_IN_VAIN;
        while self.space.lock().take_followed(&self.tags, stream, &mut in_vain) {}
        match self.poll_deferred(false) {
            Ok(_) => Ok(None),
            // What waited for other streams than the one that failed may serve it.
            Err(error) => self.place_awake(request).map(Some).ok_or(error),
        }
    }
}

impl Space {
    /// Whether a stream follows others, or frees wait for further streams.
    pub(in crate::default) fn has_ties(&self, stream: u32) -> bool {
        !(self.books[stream as usize].follows.is_empty() && self.deferred.is_empty())
    }

    pub(in crate::default) fn take_mark(&mut self, pool: u64, stream: u32) -> Mark {
        let book = &mut self.books[stream as usize];
        let point = book.marks;
        book.marks += 1;
        Mark { pool, stream, point, epoch: book.epoch }
    }

    /// Closes an epoch that is about to be waited for: no event is needed for it then. The memory of
    /// an only stream stays in one set, unless something else waits for its epoch. Not where a stream
    /// takes no event: all that one which has ended did is over, and would be waited for again.
    fn close_for_wait(&mut self, tags: &Tags, stream: u32) {
        let book = &self.books[stream as usize];
        if !matches!(book.recording, Recording::Lazy(_) | Recording::Eager) {
            return;
        }
        let waits = book.deferred_until >= book.epoch || self.zombie_waits(stream);
        let gains = if self.is_sole(stream) { waits } else { self.has_open(stream) };
        if book.stage == Stage::Clear && gains && !book.is_unproved() {
            self.close(tags, stream);
        }
    }

    /// Notes that a stream comes after a mark, and after what the marked stream came after then.
    fn follow(&mut self, stream: u32, mark: &Mark) {
        let of_marked = self.books[mark.stream as usize].follows.clone();
        let carried = of_marked.iter().filter(|of| of.since <= mark.point && of.stream != stream);
        let book = &mut self.books[stream as usize];
        let since = book.marks;
        let looked_at = LookedAt::default();
        let direct = Follows { stream: mark.stream, mark: mark.point, since, looked_at };
        for of in carried.map(|of| Follows { since, ..*of }).chain([direct]) {
            match book.follows.binary_search_by_key(&of.stream, |known| known.stream) {
                Ok(at) if book.follows[at].mark < of.mark => book.follows[at] = of,
                Ok(_) => {}
                Err(at) => book.follows.insert(at, of),
            }
        }
    }

    /// The best fit of what followed streams freed before their marks, of what is looked at.
    fn place_followed(&mut self, tags: &Tags, stream: u32, units: u32, part: Part) -> Option<u32> {
        let of_stream = |stream: u32| {
            let sets = self.books[stream as usize].sets.iter();
            let blocks = sets.flat_map(move |sets| sets[part as usize].of_at_least(units));
            blocks.filter(move |block| block.units() >= units).take(LOOKED_AT)
        };
        let follows = &self.books[stream as usize].follows;
        let looked_at = follows
            .iter()
            .flat_map(|of| of_stream(of.stream).map(|block| (block, of.mark)))
            .take(LOOKED_AT_IN_ALL);
        let found = looked_at.filter(|(block, mark)| block.is_before(*mark));
        let best = found.map(|(block, _)| block).min_by_key(|of| (of.units(), of.start()))?;
        let (id, start) = (best.id(), best.start());
        self.take_head(tags, id, units);
        self.hand_out(tags, stream, start, units);
        self.note_peak();
        Some(start)
    }

    /// Makes some of what a stream may have of others its own, and forgets those of which nothing is left; whether
    /// there may be more, of which not so many are `in_vain`. Not where nobody tells of the stream's end: an event
    /// would have to be behind it.
    fn take_followed(&mut self, tags: &Tags, stream: u32, in_vain: &mut usize) -> bool {
        let book = &mut self.books[stream as usize];
        if !matches!(book.recording, Recording::Lazy(_)) {
            return false;
        }
        let owner = book.open_owner(stream);
        let mut follows = std::mem::take(&mut book.follows);
        let mut ids: SmallVec<[u32; 32]> = SmallVec::new();
        let mut left = LOOKED_AT_FOR_MARK;
        let mut may_be_more = false;
        follows.retain(|of| {
            may_be_more |= !self.look_before(of, &mut ids, &mut left, in_vain);
            may_be_more
        });
        self.books[stream as usize].follows = follows;
        self.hand_to(tags, &ids, owner);
        may_be_more && *in_vain > 0
    }

    /// Finds blocks of a followed stream that were freed before the mark, behind those that have been looked at;
    /// whether all have been now.
    fn look_before(
        &self,
        of: &mut Follows,
        found: &mut SmallVec<[u32; 32]>,
        left: &mut usize,
        in_vain: &mut usize,
    ) -> bool {
        let sets = self.books[of.stream as usize].sets.iter().flatten();
        for set in sets.skip(of.looked_at.set) {
            for block in set.behind(of.looked_at.units, of.looked_at.start) {
                if *left == 0 || *in_vain == 0 || found.len() == HANDED_OVER {
                    return false;
                }
                *left -= 1;
                (of.looked_at.units, of.looked_at.start) = (block.units(), block.start());
                if block.is_before(of.mark) {
                    found.push(block.id());
                } else {
                    *in_vain -= 1;
                }
            }
            of.looked_at = LookedAt { set: of.looked_at.set + 1, units: 0, start: 0 };
        }
        true
    }

    /// Makes blocks another owner's. None of them is one with another before.
    fn hand_to(&mut self, tags: &Tags, ids: &[u32], owner: Owner) {
        // All are out before one goes back, which may become one with a neighbour.
        let taken: SmallVec<[(u32, u32, Owner); 32]> =
            ids.iter().map(|id| self.take_whole(tags, *id)).collect();
        for (start, units, _) in taken {
            self.give(tags, start, units, owner);
        }
    }

    /// The host has seen everything before a mark, by a wait or by a question: of the epoch that was
    /// closed then nothing is left to be waited for.
    pub(in crate::default) fn settle_epoch(&mut self, tags: &Tags, mark: &Mark, waited: bool) {
        let book = &mut self.books[mark.stream as usize];
        book.seen = book.seen.max(mark.point);
        self.settle_deferred_of(tags, mark.stream);
        let book = &mut self.books[mark.stream as usize];
        if waited && book.recording == Recording::Lost && mark.point >= book.lost_at {
            self.end_lost(tags, mark.stream);
            return;
        }
        // The event of a stream that has ended covers more than the closed epoch.
        let has_end = matches!(book.recording, Recording::Ended | Recording::Lost);
        // Else the closed epoch is the one that was closed already when the mark was taken.
        if has_end || book.epoch > mark.epoch {
            return;
        }
        if waited {
            book.awaited = book.awaited.max(book.epoch - 1);
        }
        match book.stage {
            Stage::Recorded(event) => {
                book.stage = Stage::Passed;
                self.events.push(event);
            }
            Stage::Unrecorded => book.stage = Stage::Passed,
            // Somebody is about to record, and asks then.
            Stage::Recording | Stage::Passed | Stage::Clear => return,
        }
        let book = &mut self.books[mark.stream as usize];
        book.passed = book.passed.max(book.epoch - 1);
        self.epochs_passed(tags, mark.stream);
    }

    /// Makes some blocks that were freed before a mark, which has passed, nobody's, of those behind the ones that
    /// have been looked at; whether there may be more. The only stream of a pool keeps them.
    fn settle_mark(&mut self, tags: &Tags, mark: &Mark, looked_at: &mut LookedAt) -> bool {
        if self.is_sole(mark.stream) {
            return false;
        }
        let mut ids: SmallVec<[u32; 32]> = SmallVec::new();
        let mut left = LOOKED_AT_FOR_MARK;
        let mut may_be_more = false;
        'sets: for set in self.books[mark.stream as usize].sets.iter().flatten().skip(looked_at.set)
        {
            for block in set.behind(looked_at.units, looked_at.start) {
                if left == 0 || ids.len() == HANDED_OVER {
                    may_be_more = true;
                    break 'sets;
                }
                left -= 1;
                (looked_at.units, looked_at.start) = (block.units(), block.start());
                if block.is_before(mark.point) {
                    ids.push(block.id());
                }
            }
            *looked_at = LookedAt { set: looked_at.set + 1, units: 0, start: 0 };
        }
        self.hand_to(tags, &ids, Owner::NOBODY);
        may_be_more
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::default::memory::Memory;
    use crate::default::space::book::Book;

    const GRANULES: u32 = 1024;
    const SPLIT: u32 = 9;

    /// A space of two streams, with room for blocks in the large part.
    fn of_two_streams() -> (Space, Tags) {
        let mut space = Space::new(Memory::new(0, GRANULES, 2 << 20, SPLIT - 1), false, true, 0);
        let lazy = Recording::Lazy(StreamHandle::LEGACY);
        space.books.extend([Book::new(lazy, 0), Book::new(lazy, 1)]);
        let Some(tags) = Tags::new(GRANULES << 12, SPLIT << 12) else {
            panic!("no memory for the tags")
        };
        (space, tags)
    }

    /// Whatever is looked at in one go: all of it together is each block once.
    #[test]
    fn what_an_old_mark_covers_is_found_in_one_look_at_the_blocks() {
        let blocks = if cfg!(miri) { 600 } else { 20_000 };
        let (mut space, tags) = of_two_streams();
        let owner = space.books[0].open_owner(0);
        let give = |space: &mut Space, at: u32, units: u32| {
            space.give(&tags, (SPLIT << 12) + 40 * at, units, owner);
        };
        // What is covered comes behind as much that was freed later and is shorter.
        (0..blocks).for_each(|at| give(&mut space, 2 * at, 16));
        let mark = space.take_mark(0, 0);
        (0..blocks).for_each(|at| give(&mut space, 2 * at + 1, 8));
        let mut looked_at = LookedAt::default();
        let mut times = 1;
        while space.settle_mark(&tags, &mark, &mut looked_at) {
            times += 1;
        }
        assert_eq!(space.common[Part::Large as usize].blocks(), blocks);
        assert_eq!(space.books[0].units(), u64::from(8 * blocks));
        let most = 2 + blocks as usize / LOOKED_AT_FOR_MARK + blocks as usize / HANDED_OVER;
        assert!(times <= most, "{times} times, not {most}");
    }

    /// Whatever is looked at for one request: each block once for a mark, and nobody is followed of whom nothing is left.
    #[test]
    fn what_followed_streams_freed_is_looked_through_once() {
        let (streams, blocks) = if cfg!(miri) { (4, 20) } else { (20, 500) };
        let (mut space, tags) = of_two_streams();
        let lazy = Recording::Lazy(StreamHandle::LEGACY);
        space.books.extend((2..=streams).map(|at| Book::new(lazy, at)));
        let mut at = 0;
        let mut give = |space: &mut Space, stream: u32| {
            let owner = space.books[stream as usize].open_owner(stream);
            space.give(&tags, (SPLIT << 12) + 16 * at, 8, owner);
            at += 1;
        };
        for stream in 1..=streams {
            (0..blocks / 5).for_each(|_| give(&mut space, stream));
            let mark = space.take_mark(0, stream);
            (0..blocks).for_each(|_| give(&mut space, stream));
            space.follow(0, &mark);
        }
        let each = (streams * blocks) as usize / 4;
        let mut followed = Vec::new();
        while !space.books[0].follows.is_empty() {
            let mut in_vain = each;
            while space.take_followed(&tags, 0, &mut in_vain) {}
            followed.push(space.books[0].follows.len());
            assert!(in_vain == 0 || followed.last() == Some(&0), "{followed:?}");
        }
        let quarter = streams as usize / 4;
        let expected: Vec<usize> = (0..4).rev().map(|left| left * quarter).collect();
        assert!(followed.len() <= 5 && followed.starts_with(&expected[..3]), "{followed:?}");
        assert_eq!(space.books[0].units(), u64::from(streams * blocks / 5 * 8));
    }

    #[test]
    fn a_stream_that_follows_many_passes_that_on() {
        let (mut space, _) = of_two_streams();
        let streams = if cfg!(miri) { 20 } else { 4_000 };
        let looked_at = LookedAt::default();
        let of = |stream| Follows { stream, mark: 1, since: 1, looked_at };
        space.books[0].follows.extend((2..streams + 2).map(of));
        space.books[1].follows.extend((2..streams + 2).step_by(2).map(of));
        let mark = space.take_mark(0, 0);
        let begin = Instant::now();
        for _ in 0..8 {
            space.follow(1, &mark);
        }
        let took = begin.elapsed();
        let follows = &space.books[1].follows;
        assert_eq!(follows.len(), streams as usize + 1);
        assert!(follows.iter().map(|of| of.stream).is_sorted());
        assert!(took < Duration::from_millis(25), "{took:?}");
    }
}

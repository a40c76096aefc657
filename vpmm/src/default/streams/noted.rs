//! Allocations that further streams use: their memory is kept, when they are freed, until those
//! streams have come past the free.
//!
//! ```text
//! live ──record_stream──▶ noted ──free──▶ deferred ──the others' epochs have passed──▶ free
//! ```
//!
//! A deferred block waits for the epoch that was open on each further stream when it was freed. For
//! one of a granule or more an event is recorded at the free, too, and asked about at the next such
//! free and when memory is short; for others nothing is but what closes epochs anyway. No stream
//! waits on the GPU.
//!
//! Where one further stream is all that a block waits for, that one need not: its next work comes behind
//! its uses by itself. A host that is a whole step ahead has freed the data of a step or two, which the GPU
//! still reads; a loader that asks for more has to get new memory, but the stream that reads may have it
//! before it grows (`take_deferred`).

use smallvec::SmallVec;

use crate::capture::{BesideCaptures, Recorded, record_beside_captures, stream_is_capturing};
use crate::default::ladder::Request;
use crate::default::space::Space;
use crate::default::space::book::{Fence, Recording};
use crate::default::space::owner::Owner;
use crate::default::space::tags::{Tag, Tags};
use crate::default::streams::deferred::{Deferred, Parked, Wait};
use crate::default::{Core, lock};
use crate::device::StreamHandle;
use crate::error::{Error, Result};
use crate::ordering::Mark;
use crate::units::DevicePtr;

/// Streams asked about for one request.
const ASKED: usize = 16;

/// Streams that have ended asked about for one that an allocation is noted for: twice as many as come.
const ASKED_FOR_ONE: usize = 2;

/// Events for deferred frees on one stream at a time.
pub(in crate::default) const FENCES: usize = 8;

/// A further stream that uses an allocation.
#[derive(Clone, Copy)]
pub(in crate::default) struct Use {
    pub(in crate::default) stream: u32,
    /// Where nobody tells of the stream's end: what to record on at the free, if that is still so.
    on: Option<StreamHandle>,
}

pub(in crate::default) type Uses = SmallVec<[Use; 2]>;

impl Core {
    pub(in crate::default) fn note_use(&self, ptr: DevicePtr, handle: StreamHandle) -> Result<()> {
        let is_live = |start: &u32| self.tags.get(*start).live_units().is_some();
        let Some(start) = self.unit_of(ptr.address()).filter(is_live) else {
            return Err(self.not_live(ptr.address()));
        };
        let admitted = self.admit(handle)?;
        let stream = admitted.stream;
        let mut space = self.space.lock();
        let gone = space.users_gone(start, stream);
        if !gone.is_empty() {
            drop(space);
            self.ask_gone(gone);
            space = self.space.lock();
        }
        let Some(units) = self.tags.get(start).live_units() else {
            drop(space);
            return Err(self.not_live(ptr.address()));
        };
        space.forget_users_gone(start);
        let uses = space.uses.entry(start).or_default();
        if uses.iter().all(|of| of.stream != stream) {
            uses.push(Use { stream, on: admitted.eager.then_some(handle) });
            space.books[stream as usize].pins += 1;
        }
        self.tags.set_noted(start, units);
        Ok(())
    }

    /// Asks about streams that have ended. What fails is as it was, and met by whoever asks next.
    fn ask_gone(&self, gone: SmallVec<[u32; ASKED_FOR_ONE]>) {
        let Ok(_context) = self.device.enter() else { return };
        for stream in gone {
            let _ = self.advance(stream, false);
        }
    }

    /// A free of an allocation that further streams use.
    pub(in crate::default) fn free_noted(
        &self,
        start: u32,
        handle: StreamHandle,
        stream: u32,
        ptr: DevicePtr,
    ) -> Result<()> {
        // Streams whose end nobody tells get their event now, the free's own among them. They are
        // known alive: the caller keeps them until this returns.
        let (uses, recording) = {
            let space = self.space.lock();
            let recording = space.books[stream as usize].recording;
            (space.uses.get(&start).cloned().unwrap_or_default(), recording)
        };
        let eager = recording == Recording::Eager;
        // In a capture the stream of the free has another name, but the same handle.
        let is_own = |of: &Use| {
            let by_handle = recording == Recording::Held && handle != StreamHandle::PER_THREAD;
            of.stream == stream || (by_handle && of.on == Some(handle))
        };
        let mut waits: SmallVec<[Wait; 2]> = SmallVec::new();
        let further = uses.iter().filter(|of| !is_own(of));
        for (of, on) in further.filter_map(|of| Some((of.stream, of.on?))) {
            if self.is_within_reach(of, on)? {
                waits.push(self.record_use(of, on)?);
            }
        }
        let own = if eager { Some(self.record_use(stream, handle)?) } else { None };
        let mut space = self.space.lock();
        // Again, under the lock: two threads may free one pointer at a time.
        let (Tag::Noted(units), Some(uses)) = (self.tags.get(start), space.uses.remove(&start))
        else {
            drop(space);
            return Err(self.not_live(ptr.address()));
        };
        // Without an event only the epoch that is open now is behind the free: one that was open before may count
        // as passed since.
        let is_recorded = |of: &Wait| space.books[of.stream as usize].recording == Recording::Eager;
        waits.retain(|of| is_recorded(of));
        let own = own.filter(is_recorded);
        for of in &uses {
            space.books[of.stream as usize].pins -= 1;
            let covered = is_own(of) || waits.iter().any(|known| known.stream == of.stream);
            if !covered {
                waits.push(space.wait_for_use(of.stream));
            }
        }
        let own = own.unwrap_or_else(|| space.wait_for_open(stream));
        let mut marks: SmallVec<[Mark; 2]> = SmallVec::new();
        if units >= space.memory.granule_units() {
            let further = waits.iter().map(|wait| wait.stream);
            let lazy = further.filter(|stream| {
                matches!(space.books[*stream as usize].recording, Recording::Lazy(_))
            });
            let lazy: SmallVec<[u32; 2]> = lazy.collect();
            marks.extend(lazy.into_iter().map(|stream| space.take_mark(self.number, stream)));
        }
        space.defer(&self.tags, Deferred { start, units, own, waits });
        drop(space);
        if !marks.is_empty()
            && let Ok(_context) = self.device.enter()
        {
            for mark in marks {
                // The free has succeeded whatever comes of it: a failure is met again by the next
                // who asks, and told then.
                let _ = self.ask_fences(mark.stream);
                let _ = self.fence_behind(mark);
            }
        }
        Ok(())
    }

    /// Records an event behind a mark of a further stream, at the free of a block that is worth it:
    /// one that is recorded when somebody lacks memory is behind all that the stream was given
    /// since.
    fn fence_behind(&self, mark: Mark) -> Result<()> {
        // As in `record_closed`.
        let _not_ending = lock(&self.shard(mark.stream).eager);
        let (on, spare) = {
            let mut space = self.space.lock();
            let space = &mut *space;
            let book = &mut space.books[mark.stream as usize];
            let Recording::Lazy(on) = book.recording else { return Ok(()) };
            // The last one is recorded anew where there are many, and is behind more.
            let last = if book.fences.len() < FENCES { None } else { book.fences.pop() };
            (on, last.map(|fence| fence.event).or_else(|| space.events.pop()))
        };
        let recorded = record_beside_captures(self.device.driver(), on, spare);
        let mut space = self.space.lock();
        match recorded {
            Ok(Recorded::On(event)) => {
                let space = &mut *space;
                let book = &mut space.books[mark.stream as usize];
                // Nothing may wait for it any more.
                match book.pins {
                    0 => space.events.push(event),
                    _ => book.fences.push(Fence { mark, event }),
                }
                Ok(())
            }
            // The next who asks closes the epoch.
            Ok(Recorded::Capturing(spare)) => {
                space.events.extend(spare);
                Ok(())
            }
            Err(failure) => {
                space.events.extend(spare);
                Err(failure.into())
            }
        }
    }

    /// Asks about the events that were recorded for deferred frees on a stream, until one is found
    /// that has not passed: whether there is one.
    fn ask_fences(&self, stream: u32) -> Result<bool> {
        let driver = self.device.driver();
        loop {
            let first = self.space.lock().books[stream as usize].fences.first().copied();
            let Some(fence) = first else { return Ok(false) };
            let answer = {
                let _beside = BesideCaptures::enter(driver)?;
                fence.event.is_complete(driver)
            };
            match answer {
                Ok(false) => return Ok(true),
                Ok(true) => {}
                // It is part of a graph, and proves nothing.
                Err(failure) if failure.is_of_capture() => {}
                Err(failure) => return Err(failure.into()),
            }
            let mut space = self.space.lock();
            let book = &mut space.books[stream as usize];
            // Another thread may have asked, too; and events are used again.
            if book.fences.first() == Some(&fence) {
                book.fences.remove(0);
                space.events.push(fence.event);
                if answer.is_ok() {
                    space.settle_epoch(&self.tags, &fence.mark, false);
                }
            }
        }
    }

    /// Whether a handle still means the stream: another thread's default stream cannot be recorded
    /// on. What it uses waits until that thread frees something on it, or until the host has waited
    /// for the whole device.
    fn is_within_reach(&self, stream: u32, on: StreamHandle) -> Result<bool> {
        if on != StreamHandle::PER_THREAD {
            return Ok(true);
        }
        let _context = self.device.enter()?;
        let driver = self.device.driver();
        if stream_is_capturing(driver, on)? {
            return Err(Error::StreamCapturing);
        }
        let mut number = 0;
        // SAFETY: the calling thread's default stream is always alive; the pointer is live.
        unsafe { driver.cuStreamGetId(on.raw(), &mut number) }?;
        Ok(number == self.shard(stream).stream())
    }

    /// Records an event behind everything on a stream whose end nobody tells. One that was lent since it was
    /// noted may have ended, which has been told then: the handle is not looked at, nor needed.
    fn record_use(&self, stream: u32, on: StreamHandle) -> Result<Wait> {
        let _context = self.device.enter()?;
        // So that it does not end meanwhile: see `end_stream`.
        let _in_order = lock(&self.shard(stream).eager);
        {
            let space = self.space.lock();
            if space.books[stream as usize].recording != Recording::Eager {
                return Ok(space.wait_for_open(stream));
            }
        }
        if stream_is_capturing(self.device.driver(), on)? {
            return Err(Error::StreamCapturing);
        }
        let event = self.record_now(on)?;
        let mut space = self.space.lock();
        space.note_record(stream, event);
        Ok(space.wait_for_open(stream))
    }

    /// Has a stream whose whole free extents come to less than a request own the deferred blocks that wait
    /// for nobody but it: its work comes behind its own uses of them anyway. Whether there were any.
    pub(in crate::default) fn take_deferred(&self, request: Request) -> Result<bool> {
        let stream = request.stream;
        let mut freed_on: SmallVec<[u32; 4]> = {
            let space = self.space.lock();
            if space.books[stream as usize].waits == 0 {
                return Ok(false);
            }
            let waiting = space.books[stream as usize].parked.iter();
            let waiting = waiting.filter_map(|parked| space.deferred.get(parked.at));
            let mine = waiting.filter(|block| space.waits_for_it_alone(block, stream));
            let freed_on: SmallVec<[u32; 4]> = mine.map(|block| block.own.stream).collect();
            if freed_on.is_empty()
                || !space.opportunistic
                || !space.lacks_whole(stream, request.units)
            {
                return Ok(false);
            }
            freed_on
        };
        freed_on.sort_unstable();
        freed_on.dedup();
        let advanced = freed_on.into_iter().map(|other| self.advance(other, false).map(drop));
        let advanced = advanced.fold(Ok(()), Result::and);
        let given = self.space.lock().give_deferred(&self.tags, stream);
        if given { Ok(true) } else { advanced.map(|()| false) }
    }

    /// Takes the epochs that deferred frees wait for as far as they go now: of all streams, or of a few, each call
    /// the next ones. Each of them, as [`poll`](Self::poll) does. Returns whether anything may have become free.
    pub(in crate::default) fn poll_deferred(&self, all: bool) -> Result<bool> {
        let (streams, returned) = {
            let mut space = self.space.lock();
            (space.waited_for(all), space.returns)
        };
        if streams.is_empty() {
            return Ok(false);
        }
        let _context = self.device.enter()?;
        let ask = |stream| match self.ask_fences(stream)? {
            true => Ok(()),
            false => self.advance(stream, false).map(drop),
        };
        streams.into_iter().map(ask).fold(Ok(()), Result::and)?;
        Ok(self.space.lock().returns != returned)
    }
}

impl Space {
    /// Streams that an allocation is noted for and that have ended with work to do, a few of them, where another one
    /// comes that it is not noted for yet: it may outlive a great many, as weights outlive requests.
    fn users_gone(&self, start: u32, comes: u32) -> SmallVec<[u32; ASKED_FOR_ONE]> {
        let uses = self.uses.get(&start).filter(|uses| uses.iter().all(|of| of.stream != comes));
        let ended = |stream: &u32| {
            let book = &self.books[*stream as usize];
            book.recording == Recording::Ended && !book.is_over()
        };
        let users = uses.into_iter().flatten().map(|of| of.stream);
        users.filter(ended).take(ASKED_FOR_ONE).collect()
    }

    /// Takes out the noted uses of streams that are over: nothing has to wait for those.
    fn forget_users_gone(&mut self, start: u32) {
        let Self { uses, books, events, .. } = self;
        let Some(uses) = uses.get_mut(&start) else { return };
        uses.retain(|of| {
            let book = &mut books[of.stream as usize];
            let is_over = book.is_over();
            if is_over {
                events.extend(book.unpin());
            }
            !is_over
        });
    }

    /// The streams that deferred frees wait for: all, or a few, each time the next ones.
    fn waited_for(&mut self, all: bool) -> SmallVec<[u32; ASKED]> {
        // There may be many more frees than streams, or the other way round.
        let mut streams: SmallVec<[u32; ASKED]> = if self.deferred.places() < self.books.len() {
            let waits = self.deferred.iter().flat_map(|block| &block.waits);
            waits.map(|wait| wait.stream).collect()
        } else {
            let books = self.books.iter().enumerate();
            books.filter(|(_, book)| book.waits > 0).map(|(at, _)| at as u32).collect()
        };
        streams.sort_unstable();
        streams.dedup();
        if !all && streams.len() > ASKED {
            let next = streams.partition_point(|stream| *stream < self.deferred_asked);
            streams.rotate_left(next);
            streams.truncate(ASKED);
            self.deferred_asked = streams.last().map_or(0, |last| last + 1);
        }
        streams
    }

    /// What has to pass of a stream for everything on it so far to have finished.
    fn wait_for_open(&self, stream: u32) -> Wait {
        let book = &self.books[stream as usize];
        Wait { stream, epoch: book.epoch, mark: book.marks }
    }

    /// The same of one that nothing was recorded on now. An event that another thread's default stream has
    /// for its open epoch was recorded at its last free, before the use perhaps: then the next epoch's counts.
    fn wait_for_use(&self, stream: u32) -> Wait {
        let wait = self.wait_for_open(stream);
        let book = &self.books[stream as usize];
        let is_early = book.recording == Recording::Eager && book.last_record.is_some();
        Wait { epoch: wait.epoch + u64::from(is_early), ..wait }
    }

    fn defer(&mut self, tags: &Tags, block: Deferred) {
        self.out_units -= u64::from(block.units);
        self.out_blocks -= 1;
        self.deferred_units += u64::from(block.units);
        tags.set_cached(block.start, block.units);
        for wait in &block.waits {
            self.books[wait.stream as usize].waits += 1;
        }
        for wait in block.waits.iter().chain([&block.own]) {
            let book = &mut self.books[wait.stream as usize];
            book.pins += 1;
            book.deferred_until = book.deferred_until.max(wait.epoch);
        }
        // Nothing has changed for those before it, of which there may be many: a stream may be far behind.
        let at = self.deferred.add(block);
        self.settle_or_park(tags, at);
    }

    /// Frees a deferred block that waits for nothing any more; else its stream, or one of them, is to have it
    /// looked at again.
    fn settle_or_park(&mut self, tags: &Tags, at: u32) {
        let Some(block) = self.deferred.get(at) else { return };
        match self.blocker_of(block) {
            None => self.settle(tags, at, self.owner_after(block)),
            Some(wait) => self.books[wait.stream as usize].parked.add(Parked { wait, at }),
        }
    }

    /// Frees what has waited long enough, after more of a stream has passed, or was seen to have: of what waited for
    /// that one. There may be a great many that wait for others.
    pub(super) fn settle_deferred_of(&mut self, tags: &Tags, stream: u32) {
        let book = &mut self.books[stream as usize];
        if book.recording == Recording::Eager {
            // What waits for an event that was recorded before others did may come first.
            for parked in book.parked.take_all() {
                self.settle_or_park(tags, parked.at);
            }
            return;
        }
        while let Some(first) = self.books[stream as usize].parked.first()
            && self.is_over(&first.wait)
        {
            self.books[stream as usize].parked.take_first();
            self.settle_or_park(tags, first.at);
        }
    }

    /// Frees a deferred block.
    fn settle(&mut self, tags: &Tags, at: u32, owner: Owner) {
        let Some(Deferred { start, units, own, waits }) = self.deferred.take(at) else { return };
        for of in &waits {
            self.books[of.stream as usize].waits -= 1;
        }
        for of in waits.iter().chain([&own]) {
            self.events.extend(self.books[of.stream as usize].unpin());
        }
        self.deferred_units -= u64::from(units);
        self.returns += 1;
        self.give(tags, start, units, owner);
    }

    /// Whether this stream, which did not free the block, is the only further one that it waits for.
    fn waits_for_it_alone(&self, block: &Deferred, stream: u32) -> bool {
        let lazy = matches!(self.books[stream as usize].recording, Recording::Lazy(_));
        let alone = block.waits.iter().all(|wait| wait.stream == stream || self.is_over(wait));
        lazy && alone && block.own.stream != stream
    }

    /// Frees the deferred blocks that wait for this stream alone, and no more for the one that freed them, as
    /// if it had: whether there were any.
    fn give_deferred(&mut self, tags: &Tags, stream: u32) -> bool {
        let before = self.deferred.len();
        for parked in self.books[stream as usize].parked.take_all() {
            let goes = self.deferred.get(parked.at).is_some_and(|block| {
                self.waits_for_it_alone(block, stream) && self.is_over(&block.own)
            });
            if goes {
                let owner = self.books[stream as usize].open_owner(stream);
                self.settle(tags, parked.at, owner);
            } else {
                self.books[stream as usize].parked.add(parked);
            }
        }
        self.deferred.len() < before
    }

    /// What a deferred block waits for: a further stream, or its own where that is recorded on at every free.
    fn blocker_of(&self, block: &Deferred) -> Option<Wait> {
        let further = block.waits.iter().find(|wait| !self.is_over(wait));
        let is_eager = self.books[block.own.stream as usize].recording == Recording::Eager;
        let own = Some(&block.own).filter(|own| is_eager && !self.is_over(own));
        further.or(own).copied()
    }

    /// Whose a deferred block is that waits for nothing any more.
    fn owner_after(&self, block: &Deferred) -> Owner {
        let stream = block.own.stream;
        let book = &self.books[stream as usize];
        let passed = self.is_over(&block.own);
        match book.recording {
            Recording::Lazy(_) if !(passed && (self.opportunistic || self.awaits > 0)) => {
                book.open_owner(stream)
            }
            // What it did before its capture may not be over.
            Recording::Held => book.open_owner(stream),
            Recording::Ended | Recording::Lost if !passed => book.open_owner(stream),
            // Of an eager one it is over: the event that was recorded at the free is not the open epoch's any more.
            _ => Owner::NOBODY,
        }
    }

    fn is_over(&self, wait: &Wait) -> bool {
        let book = &self.books[wait.stream as usize];
        book.passed >= wait.epoch || book.seen >= wait.mark
    }
}

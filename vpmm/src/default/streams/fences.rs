//! Epochs and the driver: recording the event that closes one, asking about it, and what follows
//! when it has passed. All driver calls are made without the space's lock.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::capture::{
    BesideCaptures, Recorded, device_is_capturing, record_beside_captures, stream_is_capturing,
    wait_for_context,
};
use crate::default::ladder::FREED_UNITS;
use crate::default::space::book::{Book, Recording, Stage};
use crate::default::space::free_set::FreeSet;
use crate::default::space::owner::Owner;
use crate::default::space::tags::Tags;
use crate::default::space::{Part, Space};
use crate::default::streams::noted::Use;
use crate::default::{Core, lock};
use crate::device::StreamHandle;
use crate::driver::Failure;
use crate::error::{Error, Result};
use crate::event::Event;
use crate::ordering::Mark;
use crate::region::State;

/// Streams asked about for one request.
const ASKED: usize = 16;

/// Blocks that become nobody's in one go, so that no request pays for all of a great many.
const DRAINED: usize = 256;

/// Blocks that change their owner in one go where no set changes but in its owner: an eighth of the
/// time each.
const EXCHANGED: u32 = 2048;

/// Mappings that are unmapped by one call where time is short: each takes 14 to 30 microseconds.
const REAPED_AT_ONCE: u64 = 16;

/// One record of an event. Events are used again: an answer about one record, had without the
/// lock, says nothing about a later one on the same event.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::default) struct Record {
    pub(in crate::default) event: Event,
    /// With it the stream's only record in this epoch, but for the last one at its end and for those that captures
    /// took.
    epoch: u64,
    ended: bool,
    taken: u32,
}

impl Space {
    /// The record that a stream's closed epoch waits for now.
    pub(in crate::default) fn record_of(&self, stream: u32) -> Option<Record> {
        let book = &self.books[stream as usize];
        let Stage::Recorded(event) = book.stage else { return None };
        let ended = book.recording == Recording::Ended;
        Some(Record { event, epoch: book.epoch, ended, taken: book.taken_records })
    }

    /// Notes that an event was recorded on an eager stream, behind everything of its open epoch.
    pub(in crate::default) fn note_record(&mut self, stream: u32, event: Event) {
        let book = &mut self.books[stream as usize];
        let unused = match book.recording {
            Recording::Eager => book.last_record.replace(event),
            // It was lent meanwhile, and somebody tells of its end: one is recorded when it is wanted.
            _ => Some(event),
        };
        self.events.extend(unused);
    }

    /// Notes that the event of a stream's closed epoch was seen complete. An answer that comes
    /// after the epoch was settled otherwise is about nothing any more.
    pub(super) fn pass(&mut self, tags: &Tags, stream: u32, record: Record) {
        if self.record_of(stream) != Some(record) {
            return;
        }
        let event = record.event;
        let book = &mut self.books[stream as usize];
        book.stage = Stage::Passed;
        // The last event of a stream that has ended covers its open epoch too.
        let ended = book.recording == Recording::Ended;
        book.passed = if ended { book.epoch } else { book.epoch - 1 };
        self.events.push(event);
        self.epochs_passed(tags, stream);
    }

    /// What follows when more of a stream's epochs have passed.
    pub(super) fn epochs_passed(&mut self, tags: &Tags, stream: u32) {
        let passed = self.books[stream as usize].passed;
        self.memory.pass(stream, passed);
        self.settle_deferred_of(tags, stream);
    }

    /// Notes that a record never came to its stream, but to a graph: one is still to be made.
    fn unrecord(&mut self, stream: u32, record: Record) {
        let lazy = matches!(self.books[stream as usize].recording, Recording::Lazy(_));
        if lazy && self.record_of(stream) == Some(record) {
            let book = &mut self.books[stream as usize];
            book.stage = Stage::Unrecorded;
            book.taken_records = book.taken_records.wrapping_add(1);
            self.events.push(record.event);
        }
    }

    /// Makes blocks of a passed epoch nobody's, some at a time. Where there is only one stream, and
    /// nothing is nobody's, they stay that stream's, and go on coalescing with what it frees.
    pub(super) fn drain(&mut self, tags: &Tags, stream: u32) -> bool {
        let book = &self.books[stream as usize];
        if book.stage != Stage::Passed {
            return false;
        }
        let ended = book.recording == Recording::Ended;
        // What is nobody's already must not stay apart from it: an extent moves in one piece. (A
        // stream of many has most of it in one set that way, and others ask for the block.)
        let alone = self.is_sole(stream) && self.common.iter().all(FreeSet::is_empty);
        let asked = !self.opportunistic && self.awaits == 0 && !ended && book.passed > book.awaited;
        let keeps = alone || asked || self.keeps_its_own(stream);
        if keeps && book.recording == Recording::Eager {
            // Its open epoch is for what an event is recorded for.
            return false;
        }
        if keeps && !self.has_open(stream) {
            // However many blocks there are.
            let book = &mut self.books[stream as usize];
            let gained = !book.is_empty();
            book.open_again();
            return gained;
        }
        let owner = if keeps { book.open_owner(stream) } else { Owner::NOBODY };
        let parities: &[usize] =
            if ended { &[0, 1] } else { &[[1, 0][self.books[stream as usize].open_parity()]] };
        let mut left = DRAINED;
        let mut gained = false;
        for parity in parities {
            for part in Part::ALL {
                gained |= !self.books[stream as usize].sets[*parity][part as usize].is_empty();
                self.exchange_if_more(stream, *parity, part, owner, left as u32);
                while left > 0 {
                    let set = &self.books[stream as usize].sets[*parity][part as usize];
                    let first = set.first().map(|block| (block.id(), block.freed_at()));
                    let Some((id, freed_at)) = first else { break };
                    let (start, units, _) = self.take_whole(tags, id);
                    self.give_freed_at(tags, start, units, owner, freed_at);
                    left -= 1;
                }
            }
        }
        if left > 0 {
            self.books[stream as usize].stage = Stage::Clear;
        }
        gained
    }

    /// Before a passed epoch's blocks go to `owner` one by one: where they are more than the
    /// owner's, the two sets change places, and the owner's go. Only if all of them can go at once:
    /// what is left among the passed ones counts as passed.
    fn exchange_if_more(
        &mut self,
        stream: u32,
        parity: usize,
        part: Part,
        owner: Owner,
        left: u32,
    ) {
        let passed = Owner::stream(stream, parity);
        let of_owner = match owner.of_stream() {
            None => self.common[part as usize].blocks(),
            Some((_, open)) => self.books[stream as usize].sets[open][part as usize].blocks(),
        };
        let of_passed = self.books[stream as usize].sets[parity][part as usize].blocks();
        if of_owner < of_passed && of_passed <= EXCHANGED && of_owner <= left {
            self.exchange(part, passed, owner);
        }
    }

    pub(super) fn close(&mut self, tags: &Tags, stream: u32) {
        let book = &mut self.books[stream as usize];
        book.close();
        self.counters.closed += 1;
        if book.stage == Stage::Passed {
            // Nothing is left to wait for, of what the stream's zombies were either.
            book.passed = book.epoch - 1;
            self.epochs_passed(tags, stream);
        }
    }

    /// Closes what a stream has freed since, too, where its closed epoch is pending and none of its memory is left
    /// there: what else waits for that one waits for the later event. Whether there was any such.
    pub(in crate::default) fn close_again(&mut self, tags: &Tags, stream: u32) -> bool {
        let book = &mut self.books[stream as usize];
        let has_event = match book.recording {
            Recording::Lazy(_) => true,
            Recording::Eager => book.last_record.is_some(),
            Recording::Held | Recording::Ended | Recording::Lost => false,
        };
        let Stage::Recorded(event) = book.stage else { return false };
        if !has_event || book.open_units() == 0 || book.units_of(book.open_parity() ^ 1) > 0 {
            return false;
        }
        book.stage = Stage::Clear;
        self.events.push(event);
        self.close(tags, stream);
        true
    }

    /// Whether a stream has anything that closing its epoch would free.
    pub(in crate::default) fn has_open(&self, stream: u32) -> bool {
        let book = &self.books[stream as usize];
        let deferred = book.deferred_until >= book.epoch;
        book.open_units() > 0 || deferred || self.zombie_waits(stream) || self.split_waits(stream)
    }

    /// The streams that have ended with something freed that nobody may have yet, where that comes to so many units
    /// or to enough to be asked for anyway.
    fn ended_with_frees(&self, units: u32) -> Vec<u32> {
        let books = self.books.iter().enumerate();
        let ended =
            books.filter(|(_, book)| book.recording == Recording::Ended && !book.is_empty());
        let (mut streams, mut freed) = (Vec::new(), 0);
        for (at, book) in ended {
            streams.push(at as u32);
            freed += book.units();
        }
        if freed < FREED_UNITS.min(u64::from(units)) {
            streams.clear();
        }
        streams
    }

    /// Streams that ended without a last event, and those of other threads that deferred frees wait
    /// for: only the whole context's end of work frees what they freed or used.
    pub(in crate::default) fn lost(&self) -> impl Iterator<Item = u32> {
        let waits = |book: &Book| book.is_unproved() || book.recording == Recording::Lost;
        let books = self.books.iter().enumerate();
        books.filter(move |(_, book)| waits(book)).map(|(at, _)| at as u32)
    }

    /// Streams that were lost and that nothing waits for are over.
    fn settle_lost(&mut self, tags: &Tags) {
        for stream in 0..self.books.len() as u32 {
            let book = &self.books[stream as usize];
            let uses = book.pins > 0 || !book.is_empty();
            let waits = || uses || self.zombie_waits(stream) || self.split_waits(stream);
            if book.recording == Recording::Lost && !waits() {
                self.end_lost(tags, stream);
            }
        }
    }

    /// A stream has ended that an event was recorded on at every free: the last one covers all of those.
    pub(in crate::default) fn end_eager(&mut self, tags: &Tags, stream: u32) {
        let is_noted = |of: &Use| of.stream == stream;
        let book = &self.books[stream as usize];
        let last = book.last_record;
        // Of what it uses and nobody has freed yet there is no event, nor will there be one.
        let unproved = book.deferred_until > book.epoch
            || (last.is_none() && (book.open_units() > 0 || book.is_unproved()))
            || (book.pins > 0 && self.uses.values().flatten().any(is_noted));
        let book = &mut self.books[stream as usize];
        book.last_record = None;
        let mut unused = None;
        if unproved {
            book.lose();
            if let Stage::Recorded(event) = book.stage {
                unused = Some(event);
                book.stage = Stage::Unrecorded;
            }
            self.events.extend(last);
        } else {
            book.recording = Recording::Ended;
            match last {
                Some(event) => {
                    if let Stage::Recorded(former) = book.stage {
                        unused = Some(former);
                    }
                    book.stage = Stage::Recorded(event);
                }
                // Its last event is the closed epoch's, or has passed.
                None if matches!(book.stage, Stage::Recorded(_)) => {}
                None => {
                    book.passed = book.epoch;
                    book.stage = Stage::Passed;
                    self.epochs_passed(tags, stream);
                }
            }
        }
        self.events.extend(unused);
    }

    /// A stream that was lost is over.
    pub(super) fn end_lost(&mut self, tags: &Tags, stream: u32) {
        let book = &mut self.books[stream as usize];
        book.recording = Recording::Ended;
        book.passed = book.epoch;
        if let Stage::Recorded(event) = std::mem::replace(&mut book.stage, Stage::Passed) {
            self.events.push(event);
        }
        self.epochs_passed(tags, stream);
        while self.drain(tags, stream) {}
    }

    pub(in crate::default) fn zombie_waits(&self, stream: u32) -> bool {
        self.memory.map.oldest_zombie(crate::fence::TimelineId(stream)).is_some()
    }
}

/// What to do next about one stream's epochs.
enum Next {
    Ask(Record),
    /// The epoch was closed: an event for it is to be recorded, a spare one if there is any.
    Record {
        on: StreamHandle,
        epoch: u64,
        spare: Option<Event>,
    },
    Drained,
    Nothing,
}

impl Core {
    /// Brings what other streams have freed to where `asker` can use it: closes their epochs, asks
    /// about the events, and makes nobody's what has passed. `all` looks at every stream (and at
    /// the asker's own epoch), else at a few, each call the next ones.
    ///
    /// Returns whether anything became nobody's, or free that had waited for further streams; where the driver refuses
    /// something about a stream the others are asked about all the same, and that is told then.
    pub(in crate::default) fn poll(&self, asker: Option<u32>, all: bool) -> Result<bool> {
        let streams = self.space.lock().books.len();
        let most = if all { streams } else { ASKED.min(streams) };
        let first = if all { 0 } else { self.asked.fetch_add(most, Ordering::Relaxed) };
        let asked = (0..most).map(|step| (first.wrapping_add(step) % streams) as u32);
        self.advance_each(asked.map(|stream| (stream, asker == Some(stream) && !all)))
    }

    /// Brings what streams have freed that have ended since to where anybody can use it, of a few of them: the next
    /// ones each time. Returns whether anything became nobody's, as [`poll`](Self::poll) does.
    pub(in crate::default) fn poll_ended(&self, units: u32) -> Result<bool> {
        let mut ended = self.space.lock().ended_with_frees(units);
        if ended.len() > ASKED {
            let first = self.asked.fetch_add(ASKED, Ordering::Relaxed);
            let all = ended.len();
            ended.rotate_left(first % all);
            ended.truncate(ASKED);
        }
        self.advance_each(ended.into_iter().map(|stream| (stream, false)))
    }

    /// Advances each of some streams, whatever comes of the others; the first failure is told when all were asked.
    fn advance_each(&self, streams: impl Iterator<Item = (u32, bool)>) -> Result<bool> {
        let (mut gained, mut failed) = (false, None);
        for (stream, own) in streams {
            match self.advance(stream, own) {
                Ok(more) => gained |= more,
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok(gained), Err)
    }

    /// Takes one stream's epochs as far as they go now. `own` leaves the open one open.
    pub(in crate::default) fn advance(&self, stream: u32, own: bool) -> Result<bool> {
        let driver = self.device.driver();
        let mut gained = false;
        let mut has_recorded = false;
        // Ask, drain, close and record, ask, drain: but for a great many blocks each at most once.
        for _ in 0..5 {
            match self.next_of(stream, own) {
                Next::Nothing => break,
                Next::Drained => gained = true,
                Next::Record { on, epoch, spare } => {
                    if !self.record_closed(stream, on, epoch, spare)? {
                        break;
                    }
                    has_recorded = true;
                }
                Next::Ask(record) => {
                    let answer = {
                        let _beside = BesideCaptures::enter(driver)?;
                        record.event.is_complete(driver)
                    };
                    match answer {
                        Ok(true) => {
                            let mut space = self.space.lock();
                            if space.record_of(stream) == Some(record) {
                                space.books[stream as usize].at_once = has_recorded;
                            }
                            let returned = space.returns;
                            space.pass(&self.tags, stream, record);
                            // What was freed before, and waited for this stream, is somebody's now.
                            gained |= space.returns != returned;
                        }
                        Ok(false) => break,
                        Err(failure) if failure.is_of_capture() => {
                            self.space.lock().unrecord(stream, record);
                            break;
                        }
                        Err(failure) => return Err(failure.into()),
                    }
                }
            }
        }
        Ok(gained)
    }

    fn next_of(&self, stream: u32, own: bool) -> Next {
        let mut space = self.space.lock();
        match space.books[stream as usize].stage {
            Stage::Passed => {
                if space.drain(&self.tags, stream) {
                    return Next::Drained;
                }
            }
            Stage::Recording => return Next::Nothing,
            Stage::Recorded(_) | Stage::Clear | Stage::Unrecorded => {}
        }
        if let Some(record) = space.record_of(stream) {
            return Next::Ask(record);
        }
        if space.books[stream as usize].stage == Stage::Clear {
            let recording = space.books[stream as usize].recording;
            let takes_none = match recording {
                Recording::Lost | Recording::Held | Recording::Ended => true,
                Recording::Lazy(_) | Recording::Eager => false,
            };
            let unproved = space.books[stream as usize].is_unproved();
            if own || takes_none || unproved || !space.has_open(stream) {
                return Next::Nothing;
            }
            space.close(&self.tags, stream);
        }
        if let Some(record) = space.record_of(stream) {
            return Next::Ask(record);
        }
        let book = &mut space.books[stream as usize];
        match (book.stage, book.recording) {
            (Stage::Unrecorded, Recording::Lazy(on)) => {
                book.stage = Stage::Recording;
                let epoch = book.epoch;
                Next::Record { on, epoch, spare: space.events.pop() }
            }
            _ => Next::Nothing,
        }
    }

    /// Records the event of an epoch that was closed. `false` where the stream cannot take one now
    /// (it is capturing: the event would become a node of the graph): the epoch stays closed, and
    /// the next who asks tries again.
    fn record_closed(
        &self,
        stream: u32,
        on: StreamHandle,
        epoch: u64,
        spare: Option<Event>,
    ) -> Result<bool> {
        let driver = self.device.driver();
        // Its owner may be about to destroy the stream, and waits for us here; or has done so, and
        // its last event covers this epoch too.
        let _not_ending = lock(&self.shard(stream).eager);
        {
            let mut space = self.space.lock();
            let book = &space.books[stream as usize];
            if book.stage != Stage::Recording || book.epoch != epoch {
                space.events.extend(spare);
                return Ok(false);
            }
        }
        let recorded = record_beside_captures(driver, on, spare);
        let mut space = self.space.lock();
        let book = &mut space.books[stream as usize];
        match recorded {
            Ok(Recorded::On(event)) => {
                book.stage = Stage::Recorded(event);
                Ok(true)
            }
            Ok(Recorded::Capturing(spare)) => {
                book.stage = Stage::Unrecorded;
                space.events.extend(spare);
                Ok(false)
            }
            Err(failure) => {
                book.stage = Stage::Unrecorded;
                space.events.extend(spare);
                Err(failure.into())
            }
        }
    }

    /// Records an event on a stream whose caller waits for it: never one that is recorded already,
    /// since somebody may be closing an epoch with that one now. `StreamCapturing` where the stream has begun
    /// to capture since it was asked: the event is the graph's then, and a question to it would end the capture.
    pub(in crate::default) fn record_now(&self, on: StreamHandle) -> Result<Event> {
        let driver = self.device.driver();
        let spare = self.space.lock().events.pop();
        let event = spare.map_or_else(|| Event::new(driver), Ok)?;
        let recorded = event.record(driver, on).and_then(|()| stream_is_capturing(driver, on));
        if let Ok(false) = recorded {
            return Ok(event);
        }
        self.space.lock().events.push(event);
        recorded?;
        Err(Error::StreamCapturing)
    }

    /// The library's stream is about to end: a last event covers everything that it freed.
    pub(in crate::default) fn end_stream(&self, handle: StreamHandle, stream: u32) {
        self.flush_stream(stream);
        let driver = self.device.driver();
        let context = self.device.enter();
        // Nobody else records on the stream any more: see `record_closed`.
        let _ending = lock(&self.shard(stream).eager);
        if context.is_err() {
            // It ends all the same, and its handle means nothing from here on.
            let mut space = self.space.lock();
            let book = &mut space.books[stream as usize];
            book.lose();
            // Somebody may be waiting for the lock above, to record an event.
            if book.stage == Stage::Recording {
                book.stage = Stage::Unrecorded;
            }
            let unused = book.last_record.take();
            space.events.extend(unused);
            return;
        }
        let spare = {
            let mut space = self.space.lock();
            let space = &mut *space;
            let book = &mut space.books[stream as usize];
            // Of frees by its bare handle, before it was lent: the one below covers those, too.
            space.events.extend(book.last_record.take());
            match std::mem::replace(&mut book.stage, Stage::Recording) {
                // Recorded anew, it covers more.
                Stage::Recorded(event) => Some(event),
                _ => space.events.pop(),
            }
        };
        let recorded = record_beside_captures(driver, handle, spare);
        let mut space = self.space.lock();
        let book = &mut space.books[stream as usize];
        match recorded {
            Ok(Recorded::On(event)) => {
                book.recording = Recording::Ended;
                book.stage = Stage::Recorded(event);
            }
            Ok(Recorded::Capturing(spare)) => {
                book.lose();
                book.stage = Stage::Unrecorded;
                space.events.extend(spare);
            }
            Err(_) => {
                book.lose();
                book.stage = Stage::Unrecorded;
                space.events.extend(spare);
            }
        }
    }

    /// Waits on the host until everything that streams freed so far may be used by any; where the driver refuses it
    /// for one stream the others are waited for all the same, and that is told then.
    pub(in crate::default) fn wait_for_frees(&self) -> Result<()> {
        let waited = self.wait_for_streams();
        waited.and(self.wait_for_lost())
    }

    /// The same of what events tell of, without a wait for the device.
    pub(in crate::default) fn wait_for_streams(&self) -> Result<()> {
        self.awaiting(|| {
            // Every epoch is closed before one is waited for. What fails here is met again below.
            let _: Result<bool> = self.poll(None, true);
            let streams = self.space.lock().books.len() as u32;
            let waited = (0..streams).map(|stream| {
                let waited = self.wait_for_stream(stream);
                self.drain_whole(stream);
                waited
            });
            waited.fold(Ok(()), Result::and)
        })
    }

    /// What turns out to have passed already during a wait is as good as waited for.
    fn awaiting<T>(&self, wait: impl FnOnce() -> Result<T>) -> Result<T> {
        self.space.lock().awaits += 1;
        let waited = wait();
        self.space.lock().awaits -= 1;
        waited
    }

    fn wait_for_stream(&self, stream: u32) -> Result<()> {
        let driver = self.device.driver();
        // What is freed from here on is not waited for, or a stream that goes on freeing would
        // keep the caller.
        let last = self.space.lock().books[stream as usize].epoch;
        loop {
            self.drain_whole(stream);
            self.advance(stream, false)?;
            let (passed, stage, record) = {
                let space = self.space.lock();
                let book = &space.books[stream as usize];
                (book.passed, book.stage, space.record_of(stream))
            };
            if let Some(record) = record.filter(|_| passed < last) {
                let answer = {
                    let _beside = BesideCaptures::enter(driver)?;
                    record.event.wait(driver)
                };
                let mut space = self.space.lock();
                match answer {
                    Ok(()) => {
                        space.pass(&self.tags, stream, record);
                        space.counters.host_waits += 1;
                    }
                    // As where it is asked about: a capture has it, and another is to be recorded.
                    Err(failure) if failure.is_of_capture() => {
                        space.unrecord(stream, record);
                        if space.record_of(stream) == Some(record) {
                            return Err(failure.into());
                        }
                    }
                    Err(failure) => return Err(failure.into()),
                }
            } else if stage == Stage::Recording {
                // By a thread that closed its own epoch: there is a record in a moment.
                drop(lock(&self.shard(stream).eager));
                std::thread::yield_now();
            } else if stage != Stage::Passed || passed >= last {
                return Ok(());
            }
        }
    }

    /// Makes all blocks of a passed epoch nobody's.
    fn drain_whole(&self, stream: u32) {
        while self.space.lock().drain(&self.tags, stream) {}
    }

    /// Whether there are streams that [are lost](Space::lost).
    pub(in crate::default) fn has_lost(&self) -> bool {
        self.space.lock().lost().next().is_some()
    }

    /// Waits for streams that [are lost](Space::lost), on the whole context's end of work.
    pub(in crate::default) fn wait_for_lost(&self) -> Result<()> {
        // What is lost from here on is not waited for.
        let marks: Vec<Mark> = {
            let mut space = self.space.lock();
            space.settle_lost(&self.tags);
            let lost: Vec<u32> = space.lost().collect();
            lost.into_iter().map(|stream| space.take_mark(self.number, stream)).collect()
        };
        if marks.is_empty() {
            return Ok(());
        }
        self.awaiting(|| {
            self.wait_for_context()?;
            let mut space = self.space.lock();
            for mark in marks {
                space.settle_epoch(&self.tags, &mark, true);
            }
            Ok(())
        })
    }

    /// Waits for everything in the context; where a capture is seen, which that would end, it does not
    /// (`StreamCapturing`).
    pub(in crate::default) fn wait_for_context(&self) -> Result<()> {
        if device_is_capturing(&self.device)? {
            return Err(Error::StreamCapturing);
        }
        let driver = self.device.driver();
        let _beside = BesideCaptures::enter(driver)?;
        if wait_for_context(driver)? { Ok(()) } else { Err(Error::StreamCapturing) }
    }

    /// Unmaps zombies whose fence has passed, at most so many mappings of them, and none any more after so long, nor
    /// after the driver has refused it: why, if so.
    pub(in crate::default) fn reap(&self, most: u64, within: Duration) -> Option<Failure> {
        let begin = Instant::now();
        let mut left = most;
        while left > 0 && begin.elapsed() <= within {
            // A call takes as long as its mappings together.
            let at_once = if within == Duration::MAX { left } else { left.min(REAPED_AT_ONCE) };
            let taken = self.space.lock().memory.take_ready_zombie(at_once);
            let Some(zombie) = taken else { break };
            let bytes = u64::from(zombie.granules) * self.granule_bytes;
            let address = self.base + u64::from(zombie.start) * self.granule_bytes;
            // SAFETY: the range is whole mappings of the pool's, since it ends where the next one begins
            // or the zombie does: of extents that it has mapped elsewhere since, or of a mapping that
            // could not be undone and was never handed out. The host has seen everything complete that
            // was enqueued before their memory was freed, and nobody has had these addresses after that.
            let unmapped = unsafe { crate::mapping::unmap(self.device.driver(), address, bytes) };
            let mut space = self.space.lock();
            space.memory.end_zombie(zombie, unmapped.is_ok());
            if let Err(failure) = unmapped {
                space.counters.failed_unmaps += 1;
                return Some(failure);
            }
            left -= zombie.mappings;
        }
        None
    }

    /// Whether so many addresses are zombies that unmapping them cannot wait.
    pub(in crate::default) fn is_crowded(&self) -> bool {
        let space = self.space.lock();
        let zombies = space.memory.map.totals().bytes(State::Zombie);
        zombies > u64::from(self.granules) / 16
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::default::memory::Memory;
    use crate::default::space::book::Book;

    /// Blocks of 8 units: those at even places of a row passed and the first `nobodys` at odd
    /// places nobody's, so that neighbours become one.
    fn drained(passed: u32, nobodys: u32) -> (Space, u32) {
        let mut space = Space::new(Memory::new(0, 64, 2 << 20, 8), false, true, 0);
        space.books.push(Book::new(Recording::Eager, 0));
        let Some(tags) = Tags::new(64 << 12, 9 << 12) else { panic!("no memory for the tags") };
        let start = 10 << 12;
        for at in 0..passed {
            space.give(&tags, start + 16 * at, 8, Owner::stream(0, 0));
        }
        for at in 0..nobodys {
            space.give(&tags, start + 16 * at + 8, 8, Owner::NOBODY);
        }
        space.books[0].stage = Stage::Passed;
        let mut times = 0;
        while space.drain(&tags, 0) {
            times += 1;
        }
        (space, times)
    }

    #[test]
    fn all_that_passed_is_nobodys_and_one_with_its_neighbours() {
        // Both ways round, and neither of few blocks.
        for (passed, nobodys, blocks, times) in
            [(5, 2, 3, 1), (2, 5, 4, 1), (3, 0, 3, 1), (1000, 900, 100, 4)]
        {
            let (space, taken) = drained(passed, nobodys);
            let common = &space.common[Part::Large as usize];
            assert!(space.books[0].is_empty() && space.books[0].stage == Stage::Clear);
            assert_eq!(common.units(), u64::from(8 * (passed + nobodys)));
            assert!(common.agrees() && common.of_at_least(1).all(|b| b.owner() == Owner::NOBODY));
            assert_eq!(taken, times, "{passed} passed, {nobodys} nobody's");
            assert_eq!(space.blocks.in_use(), common.blocks() as usize);
            assert_eq!(common.blocks(), blocks);
        }
    }

    /// A pool's only stream keeps its memory: each time that somebody looks whether it has passed.
    #[test]
    fn what_a_sole_stream_keeps_is_open_again_at_once() {
        let mut space = Space::new(Memory::new(0, 64, 2 << 20, 8), false, true, 0);
        space.books.push(Book::new(Recording::Lazy(StreamHandle::LEGACY), 0));
        let Some(tags) = Tags::new(64 << 12, 9 << 12) else { panic!("no memory for the tags") };
        let give = |space: &mut Space, at: u32| {
            let owner = space.books[0].open_owner(0);
            space.give(&tags, (10 << 12) + 16 * at, 8, owner);
        };
        (0..EXCHANGED + 1).for_each(|at| give(&mut space, at));
        let drained = |space: &mut Space| {
            space.books[0].stage = Stage::Passed;
            std::iter::from_fn(|| space.drain(&tags, 0).then_some(())).count()
        };
        for _ in 0..2 {
            space.close(&tags, 0);
            assert_eq!(drained(&mut space), 1);
            let book = &space.books[0];
            assert!(book.stage == Stage::Clear && book.passed == book.epoch - 1);
            assert_eq!([book.open_units(), book.units()], [8 * u64::from(EXCHANGED + 1); 2]);
        }
        // Beside what was freed since, some at a time.
        space.close(&tags, 0);
        give(&mut space, EXCHANGED + 1);
        assert_eq!(drained(&mut space), EXCHANGED as usize / DRAINED + 1);
        let book = &space.books[0];
        assert_eq!([book.open_units(), book.units()], [8 * u64::from(EXCHANGED + 2); 2]);
    }
}

//! Which stream a handle means, and its place in the pool.

use std::collections::HashMap;
use std::sync::atomic::{AtomicPtr, Ordering};

use smallvec::SmallVec;

use super::shard::{Shard, Slot, Spare};
use crate::capture::stream_is_capturing;
use crate::default::space::Space;
use crate::default::space::book::{Book, Recording, Stage};
use crate::default::space::tags::LABEL;
use crate::default::{Core, lock};
use crate::device::StreamHandle;
use crate::error::{Error, Result};
use crate::fork::Wiped;
use crate::lock::Token;
use crate::stream::RawHandles;

/// The legacy default stream's number here; the driver's own numbers do not come so far.
pub(in crate::default) const LEGACY: u64 = u64::MAX;

/// A key that no handle has, not even a foreign one.
pub(super) const NO_KEY: u64 = 1;

/// Streams that have gone, or may have, asked about for one that comes: twice as many as come.
const ASKED_FOR_ONE: usize = 2;

/// Of many streams so many are looked at for one that comes, the next ones each time: the thousandth
/// costs what the hundredth did, and of the places that are vacant few stay so.
const LOOKED_AT: usize = 64;

/// A stream that may be served. While this lives its place is not given to another.
pub(in crate::default) struct Admitted<'a> {
    /// Its index among books and shards.
    pub(in crate::default) stream: u32,
    /// Whether an event is recorded at every free.
    pub(in crate::default) eager: bool,
    /// Whether an event is recorded when one is needed.
    is_lazy: bool,
    shard: &'a Shard,
}

impl Drop for Admitted<'_> {
    fn drop(&mut self) {
        self.shard.unpin();
    }
}

/// The place of a stream that something is to be done about: while this lives it is not given to another.
pub(in crate::default) struct Place<'a>(&'a Shard);

impl Place<'_> {
    /// Its index among books and shards.
    pub(in crate::default) fn index(&self) -> u32 {
        self.0.index
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.unpin();
    }
}

/// Every stream's shard, by number. Shards stay where they are until the pool's end.
#[derive(Default)]
pub(in crate::default) struct Registry {
    by_stream: HashMap<u64, u32>,
    /// Of streams whose end nobody tells.
    by_raw: RawHandles,
    /// Boxed, so that they stay where they are while the list grows: routes point to them.
    #[allow(clippy::vec_box)]
    shards: Vec<Box<Shard>>,
    /// What the next new front is made in.
    spare: Option<Spare>,
}

impl Registry {
    /// Has memory ready for a front, all of it taken already.
    pub(in crate::default) fn prepare(&mut self) {
        self.spare = Spare::new();
    }

    /// A stream has ended: its number will not come again.
    fn forget(&mut self, stream: u64) -> Option<u32> {
        let index = self.by_stream.remove(&stream)?;
        self.shards[index as usize].forsake();
        Some(index)
    }

    /// The stream at a place, if it is known still, has it no more.
    fn leave(&mut self, index: u32) {
        let stream = self.stream(index);
        if self.by_stream.get(&stream) == Some(&index) {
            self.by_stream.remove(&stream);
        }
    }

    /// The stream at a place, if it is this one still, is known by the library's handle from here on.
    fn name(&self, index: u32, stream: u64, key: u64) {
        if self.by_stream.get(&stream) == Some(&index) {
            self.shards[index as usize].name(key);
        }
    }

    pub(in crate::default) fn knows(&self, stream: u64) -> bool {
        self.by_stream.contains_key(&stream)
    }

    /// The number of the stream at a place.
    pub(in crate::default) fn stream(&self, index: u32) -> u64 {
        self.shards[index as usize].stream()
    }

    /// The same; of one that has ended, too, while nobody else has its place.
    pub(in crate::default) fn last_stream(&self, index: u32) -> u64 {
        self.shards[index as usize].last_stream()
    }

    pub(in crate::default) fn streams(&self) -> usize {
        self.by_stream.len()
    }
}

const ROUTES: usize = 1 << ROUTE_BITS;
const ROUTE_BITS: u32 = 14;

/// Shortcuts from a stream's key and a thread's number to the front that the one has of the other:
/// a direct-mapped cache of what registry and shards know.
///
/// A fork wipes it, so that a child meets nothing here and is turned away outside.
pub(in crate::default) struct Routes(Wiped);

impl Routes {
    /// `None` where the system has no memory.
    pub(in crate::default) fn new() -> Option<Self> {
        Wiped::new(ROUTES * size_of::<AtomicPtr<Slot>>()).map(Self)
    }

    /// Has the host's memory ready for all of them.
    pub(in crate::default) fn prepare(&self) {
        self.0.populate();
    }

    #[inline(always)]
    fn all(&self) -> &[AtomicPtr<Slot>; ROUTES] {
        // SAFETY: the mapping is page-aligned and as long as that, of zeroes at first, which are
        // null pointers, and alive while `self` is.
        unsafe { self.0.start().cast::<[AtomicPtr<Slot>; ROUTES]>().as_ref() }
    }

    /// Forgets every shortcut.
    pub(in crate::default) fn clear(&self) {
        self.all().iter().for_each(|route| route.store(std::ptr::null_mut(), Ordering::Release));
    }

    #[inline(always)]
    fn at(&self, key: u64, thread: u64) -> &AtomicPtr<Slot> {
        // Fibonacci hashing: the driver counts streams up, and threads are counted, too. Of 32 bits, whose factor is
        // part of the instruction.
        let both = (key as u32).wrapping_add((thread as u32) << 20);
        let hash = both.wrapping_mul(0x9E37_79B9) >> (u32::BITS - ROUTE_BITS);
        &self.all()[hash as usize % ROUTES]
    }
}

impl Core {
    /// The calling thread's front of a stream, where it is known by the handle alone, without any
    /// call or lock.
    #[inline(always)]
    pub(in crate::default) fn route(&self, handle: StreamHandle) -> Option<&Slot> {
        let (key, thread) = (handle.key(), Token::number_at_once());
        let slot = self.routes.at(key, thread).load(Ordering::Acquire);
        // SAFETY: routes hold null or slots of the registry's shards, which live as long as the
        // pool.
        let slot = unsafe { slot.as_ref() }?;
        slot.is_of(key, thread).then_some(slot)
    }

    /// The key of a stream of this number, where its handle has one that fronts serve: no front keeps what an event
    /// is to be recorded for at every free, though there be shortcuts to it from when the stream was lent before.
    fn key_of(&self, stream: u64, recording: Recording) -> u64 {
        match (stream, recording) {
            (LEGACY, _) => StreamHandle::LEGACY_KEY,
            (number, Recording::Lazy(_)) => {
                StreamHandle::key_of(number, self.realm).unwrap_or(NO_KEY)
            }
            _ => NO_KEY,
        }
    }

    #[inline(always)]
    pub(in crate::default) fn number_of(&self, handle: StreamHandle) -> Option<u64> {
        let known = handle.known_to(self.realm);
        known.or_else(|| (handle == StreamHandle::LEGACY).then_some(LEGACY))
    }

    pub(in crate::default) fn shard(&self, index: u32) -> &Shard {
        let shard: *const Shard = &*lock(&self.registry).shards[index as usize];
        // SAFETY: shards are boxed, so they stay where they are when the vector grows; none is
        // dropped before the pool, which `self` borrows.
        unsafe { &*shard }
    }

    pub(in crate::default) fn shards(&self) -> Vec<&Shard> {
        let registry = lock(&self.registry);
        let shards = registry.shards.iter().map(|shard| {
            let shard: *const Shard = &**shard;
            // SAFETY: as in `shard`.
            unsafe { &*shard }
        });
        shards.collect()
    }

    /// What all fronts have, as far as one can see from outside.
    pub(in crate::default) fn units_in_fronts(&self) -> u64 {
        lock(&self.registry).shards.iter().map(|shard| shard.units()).sum()
    }

    /// Finds out which stream a handle means now, and gives it a place where it has none.
    pub(in crate::default) fn admit(&self, handle: StreamHandle) -> Result<Admitted<'_>> {
        if let Some(stream) = self.number_of(handle) {
            return self.admit_as(handle, stream, Recording::Lazy(handle));
        }
        let _context = self.device.enter()?;
        let driver = self.device.driver();
        // First of all: on a capturing stream even the question for its number ends the capture.
        if stream_is_capturing(driver, handle)? {
            return Err(Error::StreamCapturing);
        }
        let mut stream = 0;
        // SAFETY: as in `stream_is_capturing`.
        unsafe { driver.cuStreamGetId(handle.raw(), &mut stream) }?;
        self.admit_as(handle, stream, Recording::Eager)
    }

    pub(in crate::default) fn admit_as(
        &self,
        handle: StreamHandle,
        stream: u64,
        recording: Recording,
    ) -> Result<Admitted<'_>> {
        let index = match self.pin(stream) {
            Some(index) => index,
            None => {
                let _context = self.device.enter()?;
                if handle != StreamHandle::LEGACY {
                    self.device.check_stream(handle)?;
                }
                self.ask_those_gone();
                let index = self.enrol(stream, recording);
                if index == 1 {
                    self.share_what_was_seen(0);
                }
                if recording == Recording::Eager {
                    self.end_former(handle, stream);
                }
                index
            }
        };
        let (recording, turned_out) = {
            let mut space = self.space.lock();
            let space = &mut *space;
            let book = &mut space.books[index as usize];
            // A stream met by its raw handle first may turn out to be the library's own. What it has freed and will
            // free is covered by an event that is recorded when it is wanted: not at a free by this handle, which may
            // be in a capture.
            let turns_out =
                book.recording == Recording::Eager && matches!(recording, Recording::Lazy(_));
            if turns_out {
                book.recording = recording;
                space.events.extend(book.last_record.take());
            }
            (book.recording, turns_out)
        };
        if turned_out {
            lock(&self.registry).name(index, stream, self.key_of(stream, recording));
        }
        Ok(Admitted {
            stream: index,
            eager: recording == Recording::Eager,
            is_lazy: matches!(recording, Recording::Lazy(_)),
            shard: self.shard(index),
        })
    }

    /// The stream that a raw handle meant before has ended, if it was another: what it has freed is for anybody when
    /// its work is over. Nothing else tells, and where questions may give no memory away nobody asks.
    fn end_former(&self, handle: StreamHandle, stream: u64) {
        let mut registry = lock(&self.registry);
        let Registry { by_stream, by_raw, .. } = &mut *registry;
        let is_known = |known| by_stream.contains_key(&known);
        let Some(former) = by_raw.came_by(handle, stream, is_known) else { return };
        let Some(&index) = by_stream.get(&former) else { return };
        let mut space = self.space.lock();
        // One that was lent since has its end told.
        if space.books[index as usize].recording == Recording::Eager {
            registry.forget(former);
            space.end_eager(&self.tags, index);
        }
    }

    /// The place of a stream that is known by its handle alone, if it has one.
    pub(in crate::default) fn known_stream(&self, handle: StreamHandle) -> Option<Place<'_>> {
        let index = self.pin(self.number_of(handle)?)?;
        Some(Place(self.shard(index)))
    }

    /// A stream ends: its number will not come again.
    pub(in crate::default) fn forget(&self, stream: u64) -> Option<Place<'_>> {
        let index = {
            let mut registry = lock(&self.registry);
            let index = registry.forget(stream)?;
            registry.shards[index as usize].pin();
            index
        };
        Some(Place(self.shard(index)))
    }

    fn pin(&self, stream: u64) -> Option<u32> {
        let registry = lock(&self.registry);
        let index = *registry.by_stream.get(&stream)?;
        registry.shards[index as usize].pin();
        Some(index)
    }

    /// Asks about some streams that have ended, or may have, for one that comes: where they come and go and
    /// nobody lacks memory, nobody else asks, and each would leave its place, its event and what it freed.
    fn ask_those_gone(&self) {
        let gone = self.space.lock().next_gone();
        for stream in gone {
            // What fails is as it was, and met by whoever asks next.
            let _ = self.advance(stream, false);
        }
    }

    /// Gives a new stream a place, and pins it.
    fn enrol(&self, stream: u64, recording: Recording) -> u32 {
        let mut registry = lock(&self.registry);
        if let Some(known) = registry.by_stream.get(&stream) {
            registry.shards[*known as usize].pin();
            return *known;
        }
        let key = self.key_of(stream, recording);
        let mut space = self.space.lock();
        let label = space.next_label();
        let unpinned = |index: u32| !registry.shards[index as usize].is_pinned();
        let index = match space.vacant_book(unpinned) {
            Some(index) => {
                let space = &mut *space;
                let book = &mut space.books[index as usize];
                space.events.extend(book.fences.drain(..).map(|fence| fence.event));
                book.reuse(recording, label);
                registry.leave(index);
                registry.shards[index as usize].assign(stream, key, label);
                index
            }
            None => {
                let index = space.books.len() as u32;
                space.books.push(Book::new(recording, label));
                let shard = Shard::new(index, stream, key, label);
                registry.shards.push(Box::new(shard));
                index
            }
        };
        registry.by_stream.insert(stream, index);
        registry.shards[index as usize].pin();
        index
    }

    /// Gives the calling thread a front of the stream, where there is a place for it, and a
    /// shortcut there.
    pub(in crate::default) fn claim_front(&self, admitted: &Admitted<'_>) -> Option<&Slot> {
        let token = Token::current()?;
        let shard = self.shard(admitted.stream);
        if shard.slot_of(token).is_none() {
            let _revoking = lock(&self.revoking);
            let mut registry = lock(&self.registry);
            let may_be_loose = self.config.limit_bytes.is_none();
            // SAFETY: `revoking` is held, so nobody else revokes.
            unsafe { shard.claim(token, self.asymmetry, may_be_loose, &mut registry.spare) };
        }
        let slot = shard.slot_of(token)?;
        // Under the lock that shortcuts are closed under.
        let _registry = lock(&self.registry);
        if admitted.is_lazy && !self.aside.is_closed() {
            let route = self.routes.at(slot.key(), token.number());
            route.store(std::ptr::from_ref(slot).cast_mut(), Ordering::Release);
        }
        Some(slot)
    }
}

impl Space {
    /// What the next stream's allocations are marked with: no number comes again before a hundred million
    /// streams have come.
    fn next_label(&mut self) -> u32 {
        self.labels = (self.labels + 1) & LABEL;
        self.labels
    }

    /// The books that are looked at for a stream that comes.
    fn looked_at(&self) -> impl Iterator<Item = (usize, &Book)> {
        let all = self.books.len();
        let step = if all > LOOKED_AT { LOOKED_AT } else { 1 };
        let first = self.labels as usize * step % all.max(1);
        (first..all).chain(0..first).take(LOOKED_AT).map(|at| (at, &self.books[at]))
    }

    /// Streams with something to be asked about of which nobody tells whether they live, or that have ended:
    /// the next ones each time.
    fn next_gone(&self) -> SmallVec<[u32; ASKED_FOR_ONE]> {
        let waits = |(_, book): &(usize, &Book)| {
            let asked = matches!(book.stage, Stage::Recorded(_) | Stage::Passed);
            match book.recording {
                Recording::Ended => asked,
                Recording::Eager => asked || book.last_record.is_some(),
                _ => false,
            }
        };
        self.looked_at().filter(waits).take(ASKED_FOR_ONE).map(|(at, _)| at as u32).collect()
    }

    /// The place of a stream that has ended, or that nobody may ever name again, and that nothing
    /// waits for.
    fn vacant_book(&self, unused: impl Fn(u32) -> bool) -> Option<u32> {
        let vacant = |(index, book): (usize, &Book)| {
            let gone = matches!(book.recording, Recording::Ended | Recording::Eager);
            let clear = book.stage == Stage::Clear && book.last_record.is_none();
            let index = index as u32;
            let unnamed = book.pins == 0 && !self.zombie_waits(index);
            let free = gone && clear && book.is_empty() && unnamed;
            (free && unused(index)).then_some(index)
        };
        self.looked_at().find_map(vacant)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::default::memory::Memory;

    /// The places that are looked at for this many streams that come, one after the other.
    fn looked_at(books: usize, streams: u32) -> Vec<Vec<usize>> {
        let mut space = Space::new(Memory::new(0, 64, 2 << 20, 8), false, true, 0);
        space.books.extend((0..books).map(|_| Book::new(Recording::Ended, 0)));
        let come = (0..streams).map(|_| {
            space.next_label();
            space.looked_at().map(|(at, _)| at).collect()
        });
        come.collect()
    }

    #[test]
    fn a_stream_that_comes_looks_at_few_places_and_all_are_looked_at_in_time() {
        for (books, streams) in
            [(0, 1), (1, 1), (64, 1), (65, 2), (1000, 16), (1024, 16), (40_000, 625)]
        {
            let looks = looked_at(books, streams);
            assert!(looks.iter().all(|look| look.len() == books.min(LOOKED_AT)));
            let mut all: Vec<usize> = looks.into_iter().flatten().collect();
            all.sort_unstable();
            all.dedup();
            assert_eq!(all.len(), books, "{books} in {streams}");
        }
    }
}

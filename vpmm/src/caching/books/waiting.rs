//! Freed blocks that wait for further streams, as far as no event is needed yet.
//!
//! A stream whose end is told can be recorded on at any time until then. So its blocks are only put
//! together, and one event, when somebody lacks memory, is behind all of them.

#![forbid(unsafe_code)]

use smallvec::SmallVec;

use super::{Books, Found, Freed, Result, Uses};
use crate::error::Error;
use crate::units::DevicePtr;

/// So many blocks of one stream are due an event, though nobody lacks memory: what is enqueued later is
/// not waited for with them.
const DUE_BLOCKS: usize = 32;

/// So many bytes are due one; and this fraction of what is held, if that is more.
const DUE_BYTES: u64 = 64 << 20;
const DUE_OF_HELD: u64 = 16;

/// A block that waits, and since when, in waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::caching) struct Since {
    pub(in crate::caching) block: u32,
    pub(in crate::caching) since: u64,
}

/// What waits for one stream without an event, the oldest first.
#[derive(Debug, Default)]
pub(in crate::caching) struct Open {
    /// Whether anything may: its end is told, and has not been.
    pub(in crate::caching) is_lazy: bool,
    waits: Vec<Since>,
    bytes: u64,
    /// No event is due before so many.
    not_before: usize,
}

impl Open {
    pub(super) fn heap_bytes(&self) -> usize {
        self.waits.capacity() * size_of::<Since>()
    }
}

impl Books {
    /// Whether anything waits without an event.
    #[inline]
    pub(in crate::caching) fn has_open(&self) -> bool {
        self.open_waits != 0
    }

    /// Now, in waits: what begins to wait later has a greater number.
    pub(in crate::caching) fn waits_so_far(&self) -> u64 {
        self.waits
    }

    /// The number of one wait more.
    pub(in crate::caching) fn next_wait(&mut self) -> u64 {
        self.waits += 1;
        self.waits
    }

    /// Frees an allocation that further streams use, if none of them needs an event at once.
    #[cold]
    pub(super) fn free_with_uses(&mut self, found: Found) -> Freed {
        let uses = self.uses.get(&found.node).map_or(&[][..], |uses| uses);
        if !uses.iter().all(|of| self.places[of.place as usize].open.is_lazy) {
            return Freed::Noted(self.arena.get(found.node).tag.get());
        }
        let uses = self.uses.remove(&found.node).unwrap_or_default();
        self.leave_for(found, uses.len() as u32);
        let mut due = None;
        for of in uses {
            self.places[of.place as usize].pins -= 1;
            due = self.wait_for(of.place, found.node).or(due);
        }
        Freed::Done { due }
    }

    /// The further streams that an allocation is noted for.
    pub(in crate::caching) fn uses_of(&self, ptr: DevicePtr) -> Result<Uses> {
        let (found, _) = self.look_up(ptr)?;
        Ok(self.uses.get(&found.node).cloned().unwrap_or_default())
    }

    /// Frees an allocation that nobody noted after what a stream was given, at another place than its
    /// own: `None` where that stream needs an event at once, or one was noted.
    #[inline]
    pub(in crate::caching) fn free_after(
        &mut self,
        ptr: DevicePtr,
        place: u32,
    ) -> Result<Option<Freed>, Error> {
        let (found, block) = self.look_up(ptr)?;
        if block.noted.get() || !self.places[place as usize].open.is_lazy {
            return Ok(None);
        }
        self.leave_for(found, 1);
        Ok(Some(Freed::Done { due: self.wait_for(place, found.node) }))
    }

    /// A block waits for a place's stream from here on. The place, if an event is due.
    pub(in crate::caching) fn wait_for(&mut self, place: u32, block: u32) -> Option<u32> {
        let since = self.next_wait();
        let most = DUE_BYTES.max(self.held_bytes / DUE_OF_HELD);
        let open = &mut self.places[place as usize].open;
        open.waits.push(Since { block, since });
        open.bytes += self.arena.get(block).bytes();
        self.open_waits += 1;
        let much = open.waits.len() >= DUE_BLOCKS || open.bytes >= most;
        (much && open.waits.len() >= open.not_before).then_some(place)
    }

    /// Places with something open.
    pub(in crate::caching) fn open_places(&self) -> SmallVec<[u32; 8]> {
        let is_open = |(_, place): &(usize, &super::Place)| !place.open.waits.is_empty();
        let places = self.places.iter().enumerate().filter(is_open);
        places.map(|(index, _)| index as u32).collect()
    }

    /// Takes out all that waits for a place's stream without an event; `empty` takes its place.
    pub(in crate::caching) fn take_open(&mut self, place: u32, empty: Vec<Since>) -> Vec<Since> {
        let open = &mut self.places[place as usize].open;
        (open.bytes, open.not_before) = (0, 0);
        let waits = std::mem::replace(&mut open.waits, empty);
        self.open_waits -= waits.len();
        waits
    }

    /// Puts waits back: there was no event after all. They are older than what came meanwhile, but for what was
    /// put back before.
    pub(in crate::caching) fn reopen(&mut self, place: u32, waits: &[Since]) {
        let bytes: u64 = waits.iter().map(|wait| self.arena.get(wait.block).bytes()).sum();
        self.open_waits += waits.len();
        let open = &mut self.places[place as usize].open;
        open.bytes += bytes;
        let first = waits.first().map_or(0, |wait| wait.since);
        let at = open.waits.partition_point(|wait| wait.since < first);
        open.waits.splice(at..at, waits.iter().copied());
        open.not_before = open.waits.len() + DUE_BLOCKS;
    }

    /// The host has seen complete what a place's stream was given before `point`.
    pub(in crate::caching) fn pass_open(&mut self, place: u32, point: u64) {
        let waits = self.take_open(place, Vec::new());
        let passed = waits.partition_point(|wait| wait.since <= point);
        self.reopen(place, &waits[passed..]);
        self.places[place as usize].open.not_before = 0;
        waits[..passed].iter().for_each(|wait| self.wait_is_over(wait.block));
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Rules, Use};
    use super::*;
    use crate::caching::block::State;
    use crate::device::StreamHandle;

    #[test]
    fn what_is_put_back_one_after_the_other_is_in_order() {
        let rules =
            Rules { max_split_bytes: u64::MAX, max_non_split_rounding_bytes: 0, ages: false };
        let mut books = Books::new(rules);
        let [own, side] = [1, 2].map(|stream| books.enrol(stream, None, true));
        let wait = |books: &mut Books, at: u64| {
            let bytes = 2 << 20;
            assert!(books.reserve(bytes, None));
            let ptr = DevicePtr::from_address(at << 30);
            let (address, tag) = books.add_segment(own, (ptr, bytes), (bytes, bytes));
            let ptr = DevicePtr::tagged(address, tag);
            let of = Use { place: side, on: StreamHandle::LEGACY };
            assert!(books.note_use(ptr, of).is_ok() && books.free(ptr).is_ok());
        };
        (1..=2).for_each(|at| wait(&mut books, at));
        let older = books.take_open(side, Vec::new());
        (3..=4).for_each(|at| wait(&mut books, at));
        let newer = books.take_open(side, Vec::new());
        (5..=6).for_each(|at| wait(&mut books, at));
        // Two events, and a capture has taken both.
        books.reopen(side, &older);
        books.reopen(side, &newer);
        let waiting = |books: &Books| -> Vec<u64> {
            let heads = books.segments.values().map(|segment| books.arena.get(segment.head));
            let waiting = heads.filter(|block| block.state.get() == State::Waiting);
            waiting.map(|block| block.address() >> 30).collect()
        };
        assert_eq!(waiting(&books), [1, 2, 3, 4, 5, 6]);
        books.pass_open(side, newer[0].since);
        assert_eq!(waiting(&books), [4, 5, 6]);
        assert!(books.validate().is_ok());
    }
}

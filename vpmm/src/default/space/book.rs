//! One stream's part of the space: what it freed, by epoch.
//!
//! ```text
//! frees ──▶ open epoch ──close──▶ closed epoch ──event has passed──▶ nobody's
//!           no event              one event, covers all of it
//! ```
//!
//! The stream may use both at any time. Closing costs one record for everything freed so far,
//! however much that is; it happens when another stream wants memory, or when much is pending.

use smallvec::SmallVec;

use super::Part;
use super::free_set::FreeSet;
use super::owner::Owner;
use crate::default::lifetimes::ways::Course;
use crate::default::streams::deferred::ParkedFrees;
use crate::device::StreamHandle;
use crate::event::Event;
use crate::ordering::Mark;

/// How far the closed epoch has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::default) enum Stage {
    /// Nothing is closed.
    Clear,
    /// Closed, but the event still has to be recorded.
    Unrecorded,
    /// Some thread records the event now.
    Recording,
    /// Recorded: once it has passed the closed epoch has.
    Recorded(Event),
    /// Passed; its blocks are becoming nobody's.
    Passed,
}

/// How a stream's events come to be recorded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::default) enum Recording {
    /// When somebody wants them: the library sees the stream's end (or it has none), so that its
    /// handle is good until then.
    Lazy(StreamHandle),
    /// At every free: nobody tells when the stream ends.
    Eager,
    /// Never while this lasts: the stream takes part in a graph's capture, or is about to. What it
    /// freed stays its own. See [`held`](crate::default::streams::held).
    Held,
    /// The stream has ended. Its last event covers everything.
    Ended,
    /// The stream ended and would not take a last event (it was capturing). Only a wait for the
    /// whole context frees its memory, this pool's or one that it is told of.
    Lost,
}

pub(in crate::default) struct Book {
    /// What allocations of the stream are marked with: no other stream's, whoever had the place before.
    pub(in crate::default) label: u32,
    /// By the epoch's parity, then by part.
    pub(in crate::default) sets: [[FreeSet; 2]; 2],
    /// The open epoch, from 1; the closed one is the one before.
    pub(in crate::default) epoch: u64,
    /// This epoch and all before have passed.
    pub(in crate::default) passed: u64,
    pub(in crate::default) stage: Stage,
    /// Records that captures took, and that were made anew: of one epoch there may be several.
    pub(in crate::default) taken_records: u32,
    pub(in crate::default) recording: Recording,
    /// Whether the closed epoch had passed when its event was recorded: the GPU is not behind.
    pub(in crate::default) at_once: bool,
    /// Whether another stream lacked memory since the open epoch was opened.
    pub(in crate::default) wanted: bool,
    /// The event recorded at the last free, where recording is eager.
    pub(in crate::default) last_record: Option<Event>,
    /// Marks taken so far. What is freed carries the number: a mark covers what has none higher
    /// than its own.
    pub(in crate::default) marks: u64,
    /// Streams that this one comes after, each once, in their order.
    pub(in crate::default) follows: SmallVec<[Follows; 2]>,
    /// The highest mark that the host has seen passed, from 1.
    pub(in crate::default) seen: u64,
    /// Where the stream was lost: marks from this one on are behind all that it did.
    pub(in crate::default) lost_at: u64,
    /// Epochs up to this one the host has waited for.
    pub(in crate::default) awaited: u64,
    /// Deferred frees that wait for this stream as a further one.
    pub(in crate::default) waits: u32,
    /// Deferred frees that are looked at again when more of the stream has passed.
    pub(in crate::default) parked: ParkedFrees,
    /// The highest epoch that a deferred free waits for.
    pub(in crate::default) deferred_until: u64,
    /// Events recorded for deferred frees, in order.
    pub(in crate::default) fences: SmallVec<[Fence; 1]>,
    /// Noted uses and deferred frees that name this book: it is not given to another stream.
    pub(in crate::default) pins: u32,
    /// The large requests and frees so far.
    pub(super) course: Course,
}

/// An event, and the mark that it is behind.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(in crate::default) struct Fence {
    pub(in crate::default) mark: Mark,
    pub(in crate::default) event: Event,
}

/// A stream comes after another one, up to a mark of that.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::default) struct Follows {
    pub(in crate::default) stream: u32,
    pub(in crate::default) mark: u64,
    /// The own marks that were taken before that was told: later ones carry it on.
    pub(in crate::default) since: u64,
    /// How far its blocks have been looked at for those that were freed before the mark, which become no more.
    pub(in crate::default) looked_at: LookedAt,
}

/// How far a stream's blocks have been looked at: in which of its sets, and the block that was the last there.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(in crate::default) struct LookedAt {
    pub(in crate::default) set: usize,
    pub(in crate::default) units: u32,
    pub(in crate::default) start: u32,
}

impl Book {
    pub(in crate::default) fn new(recording: Recording, label: u32) -> Self {
        Self {
            label,
            sets: [const { [const { FreeSet::new() }; 2] }; 2],
            epoch: 1,
            passed: 0,
            stage: Stage::Clear,
            taken_records: 0,
            recording,
            at_once: false,
            wanted: false,
            last_record: None,
            marks: 1,
            follows: SmallVec::new(),
            seen: 0,
            lost_at: 0,
            awaited: 0,
            waits: 0,
            parked: ParkedFrees::default(),
            deferred_until: 0,
            fences: SmallVec::new(),
            pins: 0,
            course: Course::default(),
        }
    }

    #[inline]
    pub(in crate::default) fn open_parity(&self) -> usize {
        (self.epoch & 1) as usize
    }

    #[inline]
    pub(in crate::default) fn open_owner(&self, index: u32) -> Owner {
        Owner::stream(index, self.open_parity())
    }

    /// The owner of memory that was the stream's before, in whichever epoch, and that it has not
    /// used since: covered by the open epoch's event to come, or by one that is recorded already.
    pub(in crate::default) fn own_again(&self, index: u32) -> Owner {
        if self.is_over() {
            return Owner::NOBODY;
        }
        match (self.recording, self.stage) {
            // Its loan ends: the last event, which is behind all of it, is being recorded.
            (Recording::Eager, Stage::Recording) => self.open_owner(index),
            (Recording::Eager, Stage::Recorded(..)) if self.last_record.is_none() => {
                Owner::stream(index, self.open_parity() ^ 1)
            }
            // Its last event has passed.
            (Recording::Eager, _) if self.last_record.is_none() => Owner::NOBODY,
            _ => self.open_owner(index),
        }
    }

    /// The epoch whose passing makes memory of this owner (a block of this stream) safe for all.
    pub(in crate::default) fn epoch_of(&self, parity: usize) -> u64 {
        if parity == self.open_parity() { self.epoch } else { self.epoch - 1 }
    }

    /// Whether deferred frees wait for a stream that nobody could record on: the default stream of
    /// another thread than the one that freed.
    pub(in crate::default) fn is_unproved(&self) -> bool {
        // What was waited for may be over, with something noted that is allocated still.
        let waits = self.waits > 0 && self.deferred_until >= self.epoch;
        waits && self.recording == Recording::Eager && self.last_record.is_none()
    }

    /// Whether the stream has ended and all its work has: nothing of it is waited for any more, and nobody asks
    /// about it again.
    pub(in crate::default) fn is_over(&self) -> bool {
        self.recording == Recording::Ended && self.passed >= self.epoch
    }

    pub(in crate::default) fn units_of(&self, parity: usize) -> u64 {
        Part::ALL.iter().map(|part| self.sets[parity][*part as usize].units()).sum()
    }

    pub(in crate::default) fn open_units(&self) -> u64 {
        self.units_of(self.open_parity())
    }

    /// Everything that waits for the stream.
    pub(in crate::default) fn units(&self) -> u64 {
        self.units_of(0) + self.units_of(1)
    }

    pub(in crate::default) fn is_empty(&self) -> bool {
        self.sets.iter().flatten().all(FreeSet::is_empty)
    }

    /// Closes the open epoch, where none is closed. Whoever calls sees to the event.
    pub(in crate::default) fn close(&mut self) {
        debug_assert!(self.stage == Stage::Clear && self.units_of(self.open_parity() ^ 1) == 0);
        self.epoch += 1;
        self.wanted = false;
        self.at_once = false;
        self.stage = match self.recording {
            // Recorded at the last free, hence after everything that is closed now.
            Recording::Eager => match self.last_record.take() {
                Some(event) => Stage::Recorded(event),
                // Nothing was freed since the last closing: nothing is closed.
                None => Stage::Passed,
            },
            _ => Stage::Unrecorded,
        };
    }
}

impl Book {
    /// What was closed, and has passed, is open again, where nothing was freed since nor waits for the open epoch.
    pub(in crate::default) fn open_again(&mut self) {
        debug_assert!(self.stage == Stage::Passed && self.open_units() == 0);
        self.epoch += 1;
        self.passed = self.epoch - 1;
        self.stage = Stage::Clear;
    }

    /// A noted use or deferred free names the stream no more. With the last the events go that were recorded for such.
    pub(in crate::default) fn unpin(&mut self) -> impl Iterator<Item = Event> + '_ {
        self.pins -= 1;
        let unused = if self.pins == 0 { self.fences.len() } else { 0 };
        if self.pins == 0 {
            self.deferred_until = 0;
        }
        self.fences.drain(..unused).map(|fence| fence.event)
    }

    /// The stream has ended and takes no last event.
    pub(in crate::default) fn lose(&mut self) {
        self.recording = Recording::Lost;
        self.lost_at = self.marks;
    }

    /// Takes the place over for another stream. Epochs go on counting, so that nothing of the
    /// former stream is mistaken for the new one's.
    pub(in crate::default) fn reuse(&mut self, recording: Recording, label: u32) {
        self.label = label;
        self.epoch += 1;
        self.passed = self.epoch - 1;
        self.stage = Stage::Clear;
        self.recording = recording;
        self.follows.clear();
        self.course = Course::default();
    }
}

//! The optional thread that works ahead of requests: see [`Background`](super::Background).
//!
//! Every piece of its work is a short one under `growing`, as a request's would be, so that a
//! request waits for one piece at most and finds nothing half done. The pool's owner holds a
//! [`Helper`], whose drop ends the thread before the pool itself goes.

use std::sync::{Arc, Condvar};
use std::thread::JoinHandle;
use std::time::Duration;

use smallvec::SmallVec;

use super::config::Background;
use super::front::shard::Shard;
use super::growth::plan::{Fill, Job, Piece, Source};
use super::growth::policy::Policy;
use super::growth::remap::Undone;
use super::space::book::{Recording, Stage};
use super::space::owner::Owner;
use super::space::tags::{Tag, Tags};
use super::space::{Part, Space};
use super::{Core, lock};
use crate::capture::BesideCaptures;
use crate::device::StreamHandle;
use crate::error::{Error, Result};
use crate::location::Location;
use crate::lock::{Ordered, Rank};
use crate::physical::Extent;

const SHORTEST_PERIOD: Duration = Duration::from_micros(100);

/// A stream's fronts are emptied when they have held the same at so many looks. A program that
/// goes on allocating and freeing is rarely met at the same point so often; where it is, its next
/// requests are served from behind the front once.
const LOOKS: u8 = 8;

/// Times that a stream's epochs are taken further in one look: each makes some hundred blocks
/// nobody's.
const ADVANCES: usize = 64;

/// Handles made in one piece of work.
const HANDLES: usize = 16;

/// Memory is short where less than this fraction of what the pool may hold would be left.
const SPARE_OF_MOST: u64 = 8;

/// Small blocks have an eighth of the addresses, and so much of what is mapped ahead.
const SMALL_OF_AHEAD: u64 = 8;

/// What the thread is told.
pub(super) struct Bell {
    calls: Ordered<Calls>,
    rings: Condvar,
}

impl Default for Bell {
    fn default() -> Self {
        Self { calls: Ordered::new(Rank::Bell, Calls::default()), rings: Condvar::new() }
    }
}

#[derive(Default)]
struct Calls {
    /// Memory is to be mapped ahead: somebody listens for growth.
    listens: bool,
    grown: bool,
    ends: bool,
}

impl Bell {
    /// Waits for a call, or for the period to pass; `false` at the end.
    fn wait(&self, period: Duration) -> bool {
        let quiet = |calls: &mut Calls| !calls.grown && !calls.ends;
        let mut calls = lock(&self.calls).wait_timeout_while(&self.rings, period, quiet);
        calls.grown = false;
        !calls.ends
    }

    fn has_ended(&self) -> bool {
        lock(&self.calls).ends
    }
}

/// Owns the thread: it ends when this is dropped.
pub(crate) struct Helper {
    core: Arc<Core>,
    /// Taken at drop.
    thread: Option<JoinHandle<()>>,
}

impl Helper {
    /// Starts a pool's helper, where its settings ask for one.
    pub(crate) fn start(core: &Arc<Core>) -> Result<Option<Self>> {
        let Some(background) = core.config.background.clone() else { return Ok(None) };
        lock(&core.bell.calls).listens = background.ahead_bytes > 0;
        let own = Arc::clone(core);
        let work = move || Rounds::new(&own, background).run();
        let builder = std::thread::Builder::new().name("vpmm helper".to_owned());
        let thread = builder.spawn(work).map_err(|error| Error::NoThread(Arc::new(error)))?;
        Ok(Some(Self { core: Arc::clone(core), thread: Some(thread) }))
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        lock(&self.core.bell.calls).ends = true;
        self.core.bell.rings.notify_one();
        // Nothing in it panics; if it did, there is nobody to tell here.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// What the thread knows from one look to the next.
struct Rounds<'a> {
    core: &'a Core,
    period: Duration,
    ahead_granules: u64,
    /// For each shard the units in its fronts, and at how many looks they were as many.
    still: Vec<(u64, u8)>,
    /// Growths when the device had no memory for more: it is not asked again before the next one.
    refused_after: Option<u64>,
}

impl<'a> Rounds<'a> {
    fn new(core: &'a Core, background: Background) -> Self {
        Self {
            core,
            period: background.period.max(SHORTEST_PERIOD),
            ahead_granules: background.ahead_bytes.div_ceil(core.granule_bytes),
            still: Vec::new(),
            refused_after: None,
        }
    }

    fn run(mut self) {
        while self.core.bell.wait(self.period) {
            if self.round().is_err_and(|error| error.is_context_lost()) {
                return;
            }
        }
    }

    /// One look. What fails is as it was, and comes again with the next look.
    fn round(&mut self) -> Result<()> {
        self.empty_still_fronts();
        self.settle_epochs()?;
        self.unmap_zombies()?;
        self.map_ahead()
    }

    /// Empties fronts that have not changed for a while: nobody else can have what is in them.
    fn empty_still_fronts(&mut self) {
        let shards = self.core.shards();
        self.still.resize(shards.len(), (0, 0));
        let mut any = false;
        for (still, shard) in self.still.iter_mut().zip(&shards) {
            let units = shard.units();
            let same = units > 0 && units == still.0;
            *still = (units, if same { (still.1 + 1).min(LOOKS) } else { 0 });
            any |= still.1 == LOOKS;
        }
        if any {
            let _growing = lock(&self.core.growing);
            let still = &self.still;
            let is_still = |shard: &Shard| {
                still.get(shard.index as usize).is_some_and(|(_, looks)| *looks == LOOKS)
            };
            self.core.flush_fronts(is_still);
        }
    }

    /// Takes every stream's epochs as far as they go now.
    fn settle_epochs(&self) -> Result<()> {
        let tended = self.core.space.lock().tended();
        for stream in tended {
            for _ in 0..ADVANCES {
                if self.core.bell.has_ended() {
                    return Ok(());
                }
                let _growing = lock(&self.core.growing);
                let Some(own) = self.core.space.lock().tends(stream) else { break };
                let _context = self.core.device.enter()?;
                match self.core.advance(stream, own) {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(error) if error.is_context_lost() => return Err(error),
                    // One stream's trouble is not the others'.
                    Err(_) => break,
                }
            }
        }
        Ok(())
    }

    fn unmap_zombies(&self) -> Result<()> {
        loop {
            let _growing = lock(&self.core.growing);
            let (waiting, failed) = {
                let space = self.core.space.lock();
                let waiting = space.memory.map.ready_zombies().next().is_some();
                (waiting, space.counters.failed_unmaps)
            };
            if !waiting || self.core.bell.has_ended() {
                return Ok(());
            }
            let _context = self.core.device.enter()?;
            self.core.reap(1, Duration::MAX);
            if self.core.space.lock().counters.failed_unmaps != failed {
                return Ok(());
            }
        }
    }

    fn map_ahead(&mut self) -> Result<()> {
        while self.ahead_granules > 0 && !self.core.bell.has_ended() {
            let _growing = lock(&self.core.growing);
            let growths = self.core.space.lock().counters.growths;
            if self.refused_after == Some(growths) {
                break;
            }
            match self.core.grow_ahead(self.ahead_granules)? {
                Ahead::Mapped => {}
                Ahead::Enough => break,
                Ahead::DeviceFull => self.refused_after = Some(growths),
            }
        }
        Ok(())
    }
}

/// What came of mapping ahead.
enum Ahead {
    Mapped,
    /// Nothing is missing, or nothing more may be mapped.
    Enough,
    DeviceFull,
}

impl Core {
    /// Tells the helper that the pool has grown.
    pub(super) fn call_helper(&self) {
        if self.config.background.is_none() {
            return;
        }
        let mut calls = lock(&self.bell.calls);
        if calls.listens {
            calls.grown = true;
            drop(calls);
            self.bell.rings.notify_one();
        }
    }

    /// Maps some of the free memory that is to be ahead. The caller holds `growing`.
    fn grow_ahead(&self, wanted: u64) -> Result<Ahead> {
        let most = self.most_bytes() / self.granule_bytes;
        let room = self.backing.budget().room() / self.granule_bytes;
        let missing = self.space.lock().missing_ahead(&self.tags, most, room, wanted);
        let Some((start, missing)) = missing else { return Ok(Ahead::Enough) };
        let _context = self.device.enter()?;
        let _beside = BesideCaptures::enter(self.device.driver())?;
        let left = match self.backing.location() {
            Location::Device => self.device.free_memory()? / self.granule_bytes,
            // The driver does not say how much the host has free.
            Location::Host | Location::HostNuma(_) => u64::MAX,
        };
        let left = left.saturating_sub(most / SPARE_OF_MOST);
        if left == 0 {
            return Ok(Ahead::DeviceFull);
        }
        let missing = u64::from(missing).min(left) as u32;
        let job = self.space.lock().plan_ahead(start, missing, &self.policy);
        let Some(job) = job else { return Ok(Ahead::Enough) };
        match self.carry_out(&job) {
            Ok(handles) => {
                self.space.lock().commit_ahead(&self.tags, &job, handles);
                Ok(Ahead::Mapped)
            }
            Err(Undone { failure, .. }) if failure.is_out_of_memory() => Ok(Ahead::DeviceFull),
            Err(Undone { failure, bytes, .. }) => Err(failure.about(bytes)),
        }
    }
}

impl Space {
    /// Streams whose epochs there is something to be done about.
    fn tended(&self) -> Vec<u32> {
        (0..self.books.len() as u32).filter(|stream| self.tends(*stream).is_some()).collect()
    }

    /// Whether there is anything to be done about a stream's epochs, and if so, whether its open one
    /// is to be left open.
    fn tends(&self, stream: u32) -> Option<bool> {
        let book = &self.books[stream as usize];
        let legacy = matches!(book.recording, Recording::Lazy(on) if on == StreamHandle::LEGACY);
        let waits = match book.stage {
            Stage::Recorded(_) | Stage::Passed => true,
            Stage::Recording => false,
            _ if matches!(book.recording, Recording::Lost | Recording::Held | Recording::Ended) => {
                false
            }
            Stage::Unrecorded => matches!(book.recording, Recording::Lazy(_)) && !legacy,
            // A sole stream keeps what it frees; its zombies are the pool's all the same.
            Stage::Clear if self.is_sole(stream) => !legacy && self.zombie_waits(stream),
            Stage::Clear => !legacy && self.has_open(stream),
        };
        waits.then_some(legacy)
    }

    /// The granules that are missing ahead of where the pool grew last, and where they begin. `most`: what the
    /// pool may hold, of which the limit has `room` left.
    /// `None` where enough is free there, where the addresses behind have something else by now,
    /// and where memory is short.
    fn missing_ahead(&self, tags: &Tags, most: u64, room: u64, wanted: u64) -> Option<(u32, u32)> {
        let start = self.growth.frontier?;
        let hole = self.memory.hole_at(start)?;
        let unit = start * self.memory.granule_units();
        let wanted = match self.part_of(unit) {
            Part::Small => wanted.div_ceil(SMALL_OF_AHEAD),
            Part::Large => wanted,
        };
        let granule_units = u64::from(self.memory.granule_units());
        let free = self.free_units_before(tags, unit, wanted * granule_units) / granule_units;
        let left = most.saturating_sub(self.memory.mapped()).min(room);
        let may = left.saturating_sub(most / SPARE_OF_MOST).min(hole.bytes());
        let missing = wanted.saturating_sub(free).min(may) as u32;
        (hole.start() == u64::from(start) && missing > 0).then_some((start, missing))
    }

    /// Free units in a row that end before the unit, whoever owns them; looks no further than
    /// `enough`.
    fn free_units_before(&self, tags: &Tags, unit: u32, enough: u64) -> u64 {
        let mut at = unit;
        while u64::from(unit - at) < enough
            && let Tag::Free(id) = tags.get(at.wrapping_sub(1))
        {
            at = self.blocks.get(id).start();
        }
        u64::from(unit - at)
    }

    /// Takes addresses for as much of what is missing as one piece of work maps.
    fn plan_ahead(&mut self, start: u32, missing: u32, policy: &Policy) -> Option<Job> {
        let mut pieces = SmallVec::new();
        let mut granules = 0;
        while granules < missing && pieces.len() < HANDLES {
            let mapped = self.memory.mapped() + u64::from(granules);
            let largest = u64::from(self.growth.largest);
            // However long the driver takes: nobody waits for it.
            let length = policy.extent(mapped, u64::from(missing), largest, true, false, u32::MAX);
            let length = length.min(missing - granules);
            pieces.push(Piece { source: Source::New, granules: length });
            granules += length;
        }
        self.memory.reserve(start, granules)?;
        let fills = [Fill { start, granules, pieces }].into_iter().collect();
        let first = start * self.memory.granule_units();
        Some(Job { start: first, units: 0, taken: SmallVec::new(), fills, spent: 0 })
    }

    /// Enters what was mapped ahead, as free memory of nobody's, or of the pool's only stream.
    fn commit_ahead(&mut self, tags: &Tags, job: &Job, handles: Vec<Extent>) {
        let owner = if self.is_sole(0) { self.books[0].open_owner(0) } else { Owner::NOBODY };
        let granule_units = self.memory.granule_units();
        let mut handles = handles.into_iter();
        for fill in &job.fills {
            self.memory.settle(fill.start);
            let mut at = fill.start;
            for (piece, handle) in fill.pieces.iter().zip(handles.by_ref()) {
                self.memory.enter(handle, at, piece.granules);
                self.counters.created += 1;
                self.counters.created_granules += u64::from(piece.granules);
                at += piece.granules;
            }
            self.growth.frontier = Some(at);
            self.give(tags, fill.start * granule_units, fill.granules * granule_units, owner);
        }
    }
}

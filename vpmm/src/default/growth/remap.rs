//! Growth carried out: handles made, memory mapped, the plan committed or put back.

use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::plan::{Job, Reach, Source, Wanted};
use crate::backing::LIMIT;
use crate::default::Core;
use crate::default::ladder::Request;
use crate::default::space::Part;
use crate::driver::Failure;
use crate::error::Result;
use crate::location::Location;
use crate::mapping::NewMappings;
use crate::physical::{Extent, release};

/// What came of trying to grow.
pub(super) enum Grown {
    /// The request's block.
    Block(u32),
    /// The device had no memory for a new extent, or the limit has none any more, because another heap grew
    /// meanwhile: of the granules that were to be made so many were.
    NoMore { wanted: u64, made: u64, of_device: bool },
    /// New and movable memory together do not suffice.
    TooLittle,
}

/// A job that failed, and was undone.
pub(in crate::default) struct Undone {
    pub(in crate::default) failure: Failure,
    /// What the failure was about.
    pub(in crate::default) bytes: u64,
    /// Granules that had been made by then.
    made: u64,
}

/// Whether there was no memory for a handle; if so, whether it is the device that has none.
fn lacks_of_device(failure: &Failure) -> Option<bool> {
    let of_device = match failure.call {
        "cuMemCreate" => true,
        LIMIT => false,
        _ => return None,
    };
    failure.is_out_of_memory().then_some(of_device)
}

impl Core {
    /// Plans a request for which so many granules may be made, and carries it out. The space is not locked during
    /// driver calls.
    pub(super) fn grow(
        &self,
        request: Request,
        part: Part,
        room: u64,
        reach: Reach,
    ) -> Result<Grown> {
        let now = self.made.elapsed();
        let Some(job) = self.plan(request, part, Wanted { room, reach, exchanged: false }, now)
        else {
            return Ok(Grown::TooLittle);
        };
        let end_of_stream = self.mark_end(request, &job);
        let done = self.carry_out(&job);
        let unnoticed = self.is_ahead_of(end_of_stream);
        match done {
            Ok(handles) => {
                let mut space = self.space.lock();
                if !unnoticed {
                    space.pace.note(job.moves());
                }
                let rest = space.commit(&self.tags, request.stream, &job, &mut handles.into_iter());
                let granule_units = space.memory.granule_units();
                space.pace.note_growth(self.made.elapsed().saturating_sub(now));
                drop(space);
                self.call_helper();
                if let Some(fill) = job.fills.last()
                    && let end = (fill.start + fill.granules) * granule_units
                    && end > rest + granule_units
                {
                    self.tags.prepare(rest..end);
                }
                Ok(Grown::Block(job.start))
            }
            Err(Undone { failure, bytes, made }) => match lacks_of_device(&failure) {
                Some(of_device) => {
                    Ok(Grown::NoMore { wanted: job.new_granules(), made, of_device })
                }
                None => Err(failure.about(bytes)),
            },
        }
    }

    /// Grows by as much as there is room for, and where the device has less than that by as much as it has: the
    /// rest moves. `None` where all of that does not suffice; `room` is what the device has then.
    pub(in crate::default) fn grow_within(
        &self,
        request: Request,
        room: &mut u64,
        reach: Reach,
    ) -> Result<Option<u32>> {
        self.grow_in(Part::of_size(request.units), request, room, reach)
    }

    /// The same in a part that need not be the size's own.
    pub(in crate::default) fn grow_in(
        &self,
        part: Part,
        request: Request,
        room: &mut u64,
        reach: Reach,
    ) -> Result<Option<u32>> {
        for attempt in 0.. {
            let (wanted, made, of_device) = match self.grow(request, part, *room, reach)? {
                Grown::Block(start) => return Ok(Some(start)),
                Grown::TooLittle => return Ok(None),
                Grown::NoMore { wanted, made, of_device } => (wanted, made, of_device),
            };
            *room = match attempt {
                // What others have left of the limit.
                0 if !of_device => self.room()?.min(wanted.saturating_sub(1)),
                // What it says to have it need not give away: then what it gave away just now, then nothing.
                0 => made.max(self.left_on_device().min(wanted.saturating_sub(1))),
                1 => made,
                _ => 0,
            };
            // That others have had the limit says nothing of the device.
            if of_device {
                let mapped = self.space.lock().memory.mapped();
                self.full.note(mapped + *room, self.made.elapsed());
            }
        }
        Ok(None)
    }

    /// The granules that the device says to have left.
    fn left_on_device(&self) -> u64 {
        match self.backing.location() {
            Location::Device => self.device.free_memory().unwrap_or(0) / self.granule_bytes,
            // The driver does not say how much the host has.
            Location::Host | Location::HostNuma(_) => 0,
        }
    }

    /// Plans a request: once more where memory went back for a long extent instead of many short ones that
    /// move.
    fn plan(&self, request: Request, part: Part, wanted: Wanted, now: Duration) -> Option<Job> {
        let Request { stream, units, .. } = request;
        let mut space = self.space.lock();
        let means = space.means(wanted, now, self.opening.in_time());
        let job = space.plan(&self.tags, stream, units, part, &self.policy, means)?;
        if !space.is_better_exchanged(&job, &self.policy, means) {
            return Some(job);
        }
        let (need, window) = (job.moved_granules(), job.start..job.start + job.units);
        space.abandon(&self.tags, &job, &[]);
        drop(space);
        let exchanged = self.exchange(need, window);
        let mut space = self.space.lock();
        let means = space.means(Wanted { exchanged, ..wanted }, now, self.opening.in_time());
        space.plan(&self.tags, stream, units, part, &self.policy, means)
    }

    /// Does what a job lists, for the caller to commit: its new handles, in order. A job that fails
    /// is undone and abandoned.
    pub(in crate::default) fn carry_out(&self, job: &Job) -> Result<Vec<Extent>, Undone> {
        let mut handles = Vec::new();
        let mut kept = Vec::new();
        match self.build(job, &mut handles, &mut kept) {
            Ok(()) => {
                kept.into_iter().for_each(NewMappings::keep);
                Ok(handles)
            }
            Err((failure, bytes)) => {
                // Nothing has used the new mappings: they go first, then the memory behind them.
                let stuck: SmallVec<[bool; 2]> =
                    kept.into_iter().map(|mappings| mappings.undo().is_err()).collect();
                let made = job.fills.iter().flat_map(|fill| &fill.pieces);
                let made = made.filter(|piece| matches!(piece.source, Source::New));
                let granules = made.take(handles.len()).map(|piece| u64::from(piece.granules));
                let lengths: SmallVec<[u64; 8]> = granules.collect();
                let made = lengths.iter().sum::<u64>();
                self.backing.gave_up(made * self.granule_bytes);
                let each = lengths.iter().map(|granules| granules * self.granule_bytes);
                let mut orphans: Vec<_> = handles.into_iter().zip(each).collect();
                // SAFETY: made by `build` for this job, mapped nowhere any more and in no table; one that goes
                // is forgotten here.
                orphans.retain(|of| unsafe { release(self.device.driver(), of.0) }.is_err());
                let mut space = self.space.lock();
                space.abandon(&self.tags, job, &stuck);
                space.orphans.append(&mut orphans);
                Err(Undone { failure, bytes, made })
            }
        }
    }

    /// Makes and maps what a job lists. The mappings are undone at drop unless kept.
    fn build<'a>(
        &'a self,
        job: &Job,
        handles: &mut Vec<Extent>,
        mapped: &mut Vec<NewMappings<'a>>,
    ) -> Result<(), (Failure, u64)> {
        let driver = self.device.driver();
        // New handles first: what fails most often then fails before anything is mapped.
        for piece in job.fills.iter().flat_map(|fill| &fill.pieces) {
            if let Source::New = piece.source {
                let bytes = u64::from(piece.granules) * self.granule_bytes;
                handles.push(self.backing.create(bytes).map_err(|f| (f, bytes))?);
            }
        }
        let mut new = handles.iter();
        for fill in &job.fills {
            let address = self.base + u64::from(fill.start) * self.granule_bytes;
            mapped.push(NewMappings::at(driver, address));
            let Some(mappings) = mapped.last_mut() else { continue };
            for piece in &fill.pieces {
                let bytes = u64::from(piece.granules) * self.granule_bytes;
                let extent = match piece.source {
                    Source::New => new.next().copied(),
                    Source::Moved { handle, .. } => Some(handle),
                    Source::Shared(rest) => Some(rest.handle),
                };
                let Some(extent) = extent else { continue };
                // SAFETY: the addresses are a reserved part of a hole, this job's alone; the extent
                // is alive and has these bytes, and its memory, if it was mapped before, is free
                // and in this job's hands: of a shared one the part that will be used here.
                unsafe { mappings.push(extent, bytes) }.map_err(|f| (f, bytes))?;
            }
            let bytes = u64::from(fill.granules) * self.granule_bytes;
            let begin = Instant::now();
            self.backing.open(mappings).map_err(|failure| (failure, bytes))?;
            self.opening.note(begin.elapsed(), fill.pieces.len());
        }
        Ok(())
    }
}

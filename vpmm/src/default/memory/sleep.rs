//! Physical memory given back to the device, and addresses kept: a heap that sleeps.
//!
//! ```text
//! awake ── settle ──▶ quiet ── unmap every run ──▶ unmapped ── release every handle ──▶ asleep
//!                       ▲            │ fails: map and open again what was unmapped
//!                       └────────────┘
//! asleep ── make handles ── map and open every run ── (contents) ── commit ──▶ awake
//!    ▲            │                  │                     │
//!    └────────────┴──────────────────┴─────────────────────┘ fails: unmap, release
//! ```
//!
//! Books, tags and free blocks stay as they are meanwhile, so frees go on. The unit is the *run*,
//! mapped addresses without a hole: an allocation lies in one run whole, and is asleep or awake. In
//! the map of addresses a sleeping run is in transit. `growing` is held from one end to the other,
//! so nothing is mapped, moved, or exported on the way.

use std::time::Duration;

use super::{Backed, Memory};
use crate::default::class::UNIT_BYTES;
use crate::default::space::book::{Book, Recording, Stage};
use crate::default::space::tags::Tag;
use crate::default::streams::deferred::{Deferred, Wait};
use crate::default::{Core, lock};
use crate::driver::Failure;
use crate::error::{Error, Result};
use crate::fence::Fence;
use crate::lock::OrderedGuard;
use crate::mapping::{NewMappings, unmap};
use crate::region::State;
use crate::units::DevicePtr;

/// Addresses in a row that have, or had, memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Run {
    pub(crate) start: u64,
    pub(crate) bytes: u64,
}

impl Run {
    pub(crate) fn holds(&self, address: u64) -> bool {
        address.wrapping_sub(self.start) < self.bytes
    }
}

/// Nothing is mapped, moved or exported in the heap while this lives.
pub(crate) type Stillness<'a> = OrderedGuard<'a, ()>;

/// What going to sleep came to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Released {
    /// Bytes that the device has again.
    pub(crate) bytes: u64,
    /// Bytes of handles that the driver would not take back.
    pub(crate) kept_bytes: u64,
}

impl Core {
    /// Stops all requests, waits on the host for what was freed (the work that uses what was not is
    /// the caller's to wait for), and finds out whether the heap can sleep.
    pub(crate) fn settle(&self) -> Result<Stillness<'_>> {
        self.set_asleep(true);
        self.settle_all().inspect_err(|_| self.set_asleep(false))
    }

    fn settle_all(&self) -> Result<Stillness<'_>> {
        let _context = self.device.enter()?;
        self.flush_fronts(|_| true);
        let marks = self.every_mark();
        self.wait_for_frees()?;
        self.poll_deferred(true)?;
        let still = lock(&self.growing);
        // Calls that were under way when the shortcuts went. What one of them has had moved left addresses since
        // that wait for a stream.
        self.flush_fronts(|_| true);
        if self.has_waiting_zombies() {
            self.wait_for_frees()?;
        }
        {
            let space = self.space.lock();
            if space.memory.exported() > 0 {
                return Err(Error::Exported {
                    bytes: space.memory.exported() * self.granule_bytes,
                });
            }
            // Its stream is capturing, or one that uses what was freed cannot be asked: nobody
            // knows when the work before the frees is done.
            let unasked = |book: &Book| {
                let never = matches!(book.recording, Recording::Held | Recording::Lost);
                (never || book.stage == Stage::Unrecorded) && !book.is_empty()
            };
            // What was freed since had not been, and the caller sees to all work with it.
            let is_of_before = |wait: &Wait| {
                let mark = marks.get(wait.stream as usize);
                mark.is_some_and(|mark| wait.mark <= mark.point)
            };
            let waits = |block: &Deferred| {
                let mut waits = block.waits.iter().chain([&block.own]);
                waits.all(is_of_before)
            };
            if space.books.iter().any(unasked) || space.deferred.iter().any(waits) {
                return Err(Error::StreamCapturing);
            }
        }
        let refused = self.reap(u64::MAX, Duration::MAX);
        let space = self.space.lock();
        let zombies = space.zombie_granules();
        if zombies > 0 {
            // Their addresses would keep memory that is to go.
            let code = cuda_sys::types::CUresult::CUDA_ERROR_NOT_READY;
            let failure = refused.unwrap_or(Failure { call: "cuMemUnmap", code });
            return Err(failure.about(zombies * self.granule_bytes));
        }
        drop(space);
        Ok(still)
    }

    fn has_waiting_zombies(&self) -> bool {
        let space = self.space.lock();
        let map = &space.memory.map;
        map.totals().regions(State::Zombie) > map.ready_zombies().count() as u64
    }

    /// A settled heap goes on as it was.
    pub(crate) fn stay_awake(&self, still: Stillness<'_>) {
        self.set_asleep(false);
        drop(still);
    }

    /// Everything mapped that is in use, in runs; less than `gap_bytes` of free memory between two
    /// of them does not part them.
    pub(crate) fn used(&self, _still: &Stillness<'_>, gap_bytes: u64) -> Vec<Run> {
        let space = self.space.lock();
        let mut free: Vec<(u64, u64)> = space
            .every_free_block()
            .map(|block| {
                let start = self.base + u64::from(block.start()) * UNIT_BYTES;
                (start, start + u64::from(block.units()) * UNIT_BYTES)
            })
            .filter(|(start, end)| end - start >= gap_bytes.max(1))
            .collect();
        // What is at another address is copied there.
        free.extend(space.memory.elsewhere().map(|units| {
            let [start, end] =
                [units.start, units.end].map(|unit| self.base + u64::from(unit) * UNIT_BYTES);
            (start, end)
        }));
        free.sort_unstable();
        let mut used = Vec::new();
        let mut put = |start: u64, end: u64| {
            if start < end {
                used.push(Run { start, bytes: end - start });
            }
        };
        for (start, bytes) in space.memory.runs() {
            let mut at = start;
            let first = free.partition_point(|(_, end)| *end <= start);
            for (from, to) in free[first..].iter().take_while(|(from, _)| *from < start + bytes) {
                put(at, *from);
                at = *to;
            }
            put(at, start + bytes);
        }
        used
    }

    /// Unmaps every run and gives the handles back. No work uses the memory any more. On failure the
    /// heap is awake as it was, or the error names what is asleep.
    pub(crate) fn fall_asleep(&self, still: Stillness<'_>) -> Result<Released> {
        let runs = self.space.lock().memory.live_runs();
        for (index, run) in runs.iter().enumerate() {
            if let Err(failure) = self.unmap_run(*run) {
                let undone: Vec<Granules> = runs[..index]
                    .iter()
                    .copied()
                    .filter(|run| self.map_run(*run).is_ok())
                    .collect();
                self.space.lock().memory.mark(&undone, State::Live);
                if undone.len() == index {
                    self.stay_awake(still);
                    return Err(failure.about(u64::from(run.1) * self.granule_bytes));
                }
                return Err(self.half_asleep(failure));
            }
        }
        Ok(self.release_unmapped())
    }

    fn half_asleep(&self, failure: Failure) -> Error {
        let (asleep, awake) = {
            let space = self.space.lock();
            let asleep = space.memory.runs_in(State::Transit);
            let awake = space.memory.runs_in(State::Live);
            (self.live_in(&space, &asleep), self.live_in(&space, &awake))
        };
        let Failure { call, code } = failure;
        Error::HalfAsleep { call, code, asleep: asleep.into(), awake: awake.into() }
    }

    /// The allocations in some runs.
    fn live_in(&self, space: &crate::default::space::Space, runs: &[Granules]) -> Vec<DevicePtr> {
        let granule_units = space.memory.granule_units();
        let mut found = Vec::new();
        for (start, granules) in runs {
            let (mut at, end) = (start * granule_units, (start + granules) * granule_units);
            while at < end {
                at += match self.tags.get(at) {
                    Tag::Live(units) | Tag::Noted(units) => {
                        found.push(self.pointer(at));
                        units
                    }
                    Tag::Cached(units) => units,
                    Tag::Free(id) => space.blocks.get(id).units(),
                    Tag::None => self.tags.step(at),
                };
            }
        }
        found
    }

    fn unmap_run(&self, run: Granules) -> Result<(), Failure> {
        let (address, bytes) = self.span_of(run);
        // SAFETY: whole mappings of the heap; the caller of `fall_asleep` has seen their work
        // complete, or nobody has had the addresses since they were mapped.
        unsafe { unmap(self.device.driver(), address, bytes) }?;
        let mut space = self.space.lock();
        space.memory.mark(&[run], State::Transit);
        space.memory.set_backed(run, Backed::Unmapped);
        Ok(())
    }

    /// Maps the handles of a run where they were and opens them.
    fn map_run(&self, run: Granules) -> Result<(), Failure> {
        let (address, bytes) = self.span_of(run);
        let extents = self.space.lock().memory.extents_in(run);
        let driver = self.device.driver();
        if extents.iter().any(|extent| extent.backed == Backed::Stuck) {
            // SAFETY: mapped for a heap that never woke, so that nobody uses it.
            unsafe { unmap(driver, address, bytes) }?;
            self.space.lock().memory.set_backed(run, Backed::Unmapped);
        }
        let mut mappings = NewMappings::at(driver, address);
        let mapped = extents.iter().try_for_each(|extent| {
            // SAFETY: the addresses are the sleeping run's, unmapped; the handles are the run's own,
            // alive and mapped nowhere, in the order of their addresses.
            unsafe { mappings.push(extent.handle, u64::from(extent.granules) * self.granule_bytes) }
        });
        let opened = mapped.and_then(|()| self.backing.open(&mappings));
        match opened {
            Ok(()) => {
                mappings.keep();
                self.space.lock().memory.set_backed(run, Backed::Mapped);
                Ok(())
            }
            Err(failure) => {
                if mappings.undo().is_err() {
                    self.space.lock().memory.set_backed(run, Backed::Stuck);
                }
                Err(failure)
            }
        }
    }

    fn span_of(&self, run: Granules) -> (u64, u64) {
        let (start, granules) = run;
        let address = self.base + u64::from(start) * self.granule_bytes;
        (address, u64::from(granules) * self.granule_bytes)
    }

    /// Gives back every handle of a sleeping run, and what the driver would not take before that. One that it would
    /// not take now is kept, and used when the heap wakes, or given back with the next call.
    pub(crate) fn release_unmapped(&self) -> Released {
        let unmapped = self.space.lock().memory.numbers_of(Backed::Unmapped);
        let mut released = Released { bytes: self.retry_orphans(), kept_bytes: 0 };
        for number in unmapped {
            let extent = *self.space.lock().memory.extent(number);
            let bytes = u64::from(extent.granules) * self.granule_bytes;
            let mut refused = Vec::new();
            let handles = [extent.handle];
            // SAFETY: the heap's own handle, mapped nowhere; the table forgets it below.
            unsafe {
                crate::physical::release_all(self.device.driver(), handles, &mut refused);
            }
            if refused.is_empty() {
                self.space.lock().memory.set_gone(number);
                self.backing.gave_up(bytes);
                released.bytes += bytes;
            } else {
                released.kept_bytes += bytes;
            }
        }
        released
    }

    /// Keeps requests that wait for the heap's memory out, to wake it.
    pub(crate) fn hold_still(&self) -> Stillness<'_> {
        lock(&self.growing)
    }

    /// Whether there are handles that the driver would not take: of sleeping runs, or of before.
    pub(crate) fn has_kept(&self) -> bool {
        let space = self.space.lock();
        !(space.orphans.is_empty() && space.memory.numbers_of(Backed::Unmapped).is_empty())
    }

    /// Keeps what [`map_asleep`](Self::map_asleep) mapped until the next time, since copies into it
    /// could not be waited for.
    pub(crate) fn strand_asleep(&self) {
        let mut space = self.space.lock();
        let runs = space.memory.runs_in(State::Transit);
        runs.into_iter().for_each(|run| space.memory.set_backed(run, Backed::Stuck));
    }

    /// Makes memory for every sleeping run and opens it at its addresses. The heap serves no request
    /// until [`wake`](Self::wake). On failure it is asleep as it was.
    pub(crate) fn map_asleep(&self, _still: &Stillness<'_>) -> Result<Vec<Run>> {
        let stuck = !self.space.lock().memory.numbers_of(Backed::Stuck).is_empty();
        if stuck {
            // What may still be writing there is on a stream that may be gone.
            self.wait_for_context()?;
        }
        let gone = self.space.lock().memory.numbers_of(Backed::Gone);
        for number in gone {
            let granules = self.space.lock().memory.extent(number).granules;
            let bytes = u64::from(granules) * self.granule_bytes;
            match self.backing.create(bytes) {
                Ok(handle) => self.space.lock().memory.renew(number, handle),
                Err(failure) => {
                    self.release_unmapped();
                    return Err(if failure.is_out_of_memory() {
                        self.out_of_memory((bytes / UNIT_BYTES) as u32)
                    } else {
                        failure.about(bytes)
                    });
                }
            }
        }
        let runs = self.space.lock().memory.runs_in(State::Transit);
        for run in &runs {
            if let Err(failure) = self.map_run(*run) {
                self.unmap_asleep();
                return Err(failure.about(u64::from(run.1) * self.granule_bytes));
            }
        }
        let spans = runs.iter().map(|run| self.span_of(*run));
        Ok(spans.map(|(start, bytes)| Run { start, bytes }).collect())
    }

    /// Undoes [`map_asleep`](Self::map_asleep): nobody has used the memory but for copies into it,
    /// which have finished.
    pub(crate) fn unmap_asleep(&self) {
        let runs = self.space.lock().memory.runs_in(State::Transit);
        for run in runs {
            let mapped = |extents: Vec<super::Resident>| {
                extents.iter().any(|extent| extent.backed == Backed::Mapped)
            };
            if mapped(self.space.lock().memory.extents_in(run)) && self.unmap_run(run).is_err() {
                self.space.lock().memory.set_backed(run, Backed::Stuck);
            }
        }
        self.release_unmapped();
    }

    /// The heap goes on where it fell asleep.
    pub(crate) fn wake(&self, still: Stillness<'_>) {
        {
            let mut space = self.space.lock();
            let runs = space.memory.runs_in(State::Transit);
            space.memory.mark(&runs, State::Live);
        }
        self.set_asleep(false);
        drop(still);
    }
}

/// A run by its first granule and its length.
pub(super) type Granules = (u32, u32);

impl Memory {
    /// Runs of regions in a state, neighbours as one.
    fn runs_in(&self, state: State) -> Vec<Granules> {
        let mut runs: Vec<Granules> = Vec::new();
        for region in self.map.iter().filter(|region| region.state() == state) {
            let (start, granules) = (region.start() as u32, region.bytes() as u32);
            match runs.last_mut() {
                Some((first, length)) if *first + *length == start => *length += granules,
                _ => runs.push((start, granules)),
            }
        }
        runs
    }

    fn live_runs(&self) -> Vec<Granules> {
        self.runs_in(State::Live)
    }

    /// Puts every region of some runs in a state.
    fn mark(&mut self, runs: &[Granules], state: State) {
        for (start, granules) in runs {
            let mut at = u64::from(*start);
            while at < u64::from(start + granules)
                && let Some((id, end)) = self.map.containing(at).map(|of| (of.id(), of.end()))
            {
                self.map.set(id, state, Fence::PASSED);
                at = end;
            }
        }
    }
}

//! One pass of a trace through an allocator.

use std::io;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use vpmm::StreamHandle;

use super::clock::{Costs, Stopwatch, least, times};
use super::lanes::{self, Progress, Step};
use super::live::{self, Times};
use super::longest::{Longest, Search, Spent};
use super::nothing::Nothing;
use crate::backend::{Backend, lacks_memory};
use crate::device::DriverTimer;
use crate::trace::{Action, Trace};

/// Steps between two reports of progress.
const STRIDE: usize = 4096;
/// The same where each waits for its time, and the clock stands still meanwhile anyway.
const PACED_STRIDE: usize = 16;
/// So many threads, and again twice as many as were there then: which of them have ended?
const LOOK_AT: usize = 64;
/// An operation that is due sooner than this is made at once: sleep is no finer.
const SOON: Duration = Duration::from_micros(100);
/// How often one that is due later looks whether another thread has failed: a trace may pause for hours.
const LOOK: Duration = Duration::from_millis(20);

/// Device work around allocations: writes a pattern and looks whether it is still there.
pub trait Checker: Sync {
    /// Enqueues the write of the slot's pattern.
    ///
    /// # Errors
    /// What the driver answers.
    fn write(&self, piece: &Piece) -> vpmm::Result<()>;

    /// Enqueues the check, ordered after the write, on the stream of the free.
    ///
    /// # Errors
    /// What the driver answers.
    fn check(&self, piece: &Piece, free_stream: StreamHandle) -> vpmm::Result<()>;
}

/// A live allocation as a [`Checker`] sees it.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// Which allocation of the trace.
    pub slot: u32,
    /// Where it is.
    pub address: u64,
    /// The bytes that were asked for.
    pub bytes: u64,
    /// The stream that it was allocated on.
    pub stream: StreamHandle,
}

/// What a pass runs on.
#[derive(Clone, Copy)]
pub struct Target<'a> {
    /// The allocator.
    pub backend: &'a dyn Backend,
    /// The device's stream for each stream of the trace.
    pub streams: &'a [StreamHandle],
    /// The device work, if any.
    pub checker: Option<&'a dyn Checker>,
    /// When each operation of the trace is due, counted from the pass's start; `None` for all at once.
    pub due: Option<&'a [Duration]>,
    /// The clock around the allocator's driver calls, if they are timed.
    pub timer: Option<&'a DriverTimer>,
    /// What was spent in driver calls so far, to find the operation that takes the most of it; on one thread.
    pub spent: Option<&'a Spent<'a>>,
    /// Called first on every thread of the pass: makes the context current.
    pub enter: &'a (dyn Fn() -> vpmm::Result<()> + Sync),
    /// Told how many operations have been done since it was told last.
    pub progress: &'a (dyn Fn(u64) + Sync),
}

/// What a pass came to.
#[derive(Debug)]
pub struct Pass {
    /// Calls of the allocator that were made, those for leaks not counted.
    pub operations: u64,
    /// The time inside the allocator, summed over threads, in nanoseconds.
    pub nanoseconds: f64,
    /// What of it was spent in the driver, where driver calls are timed.
    pub driver_nanoseconds: Option<f64>,
    /// The largest sum of bytes live at one time, by the order in which the operations were done.
    pub peak_live_bytes: u64,
    /// The operation that took the most driver time, where that was asked for.
    pub longest: Option<Longest>,
    /// Why the pass ended early, if it did.
    pub stop: Option<Stop>,
}

/// What stopped a pass.
#[derive(Debug)]
pub struct Stop {
    /// What could not be done.
    pub action: Action,
    /// The slot that it was about.
    pub slot: u32,
    /// The operation's index in the trace: the earliest where several threads failed.
    pub row: u32,
    /// Why.
    pub error: vpmm::Error,
    /// The allocator's map at that moment, where memory had run out.
    pub map: Option<String>,
}

impl Stop {
    /// Whether memory ran out, or there never would have been so much.
    pub fn is_out_of_memory(&self) -> bool {
        lacks_memory(&self.error)
    }
}

/// A trace, ready to be run again and again.
#[derive(Debug)]
pub struct Replay<'a> {
    trace: &'a Trace,
    /// One lane runs on the calling thread, more on threads of their own.
    lanes: Vec<Vec<Step>>,
    /// The address of each live allocation, 0 where there is none.
    slots: Vec<AtomicU64>,
    costs: Costs,
}

/// Waits for a moment that is not soon anyway; `false` if the replay was stopped first.
fn wait_until(moment: Instant, progress: &Progress<'_>) -> bool {
    while !progress.is_stopped() {
        let left = moment.saturating_duration_since(Instant::now());
        if left < SOON {
            return true;
        }
        thread::sleep(left.min(LOOK));
    }
    false
}

/// Stops the replay where the thread that has it panics: the others would wait for what that one was to do for ever,
/// and whoever joins it would never come to know.
struct StopsAtPanic<'a>(&'a Progress<'a>);

impl Drop for StopsAtPanic<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.stop();
        }
    }
}

/// What one lane did.
struct LaneResult {
    steps: usize,
    nanoseconds: f64,
    /// When each step happened, where other lanes ran beside this one.
    times: Option<Times>,
    longest: Option<Longest>,
}

impl LaneResult {
    fn nothing() -> Self {
        Self { steps: 0, nanoseconds: 0.0, times: None, longest: None }
    }
}

impl<'a> Replay<'a> {
    /// Lays the trace out, on one thread or on as many as it has, and measures
    /// what the replay loop itself costs.
    pub fn new(trace: &'a Trace, threads: bool) -> Self {
        let mut replay = Self {
            trace,
            lanes: lanes::lanes(trace, false),
            slots: trace.allocations.iter().map(|_| AtomicU64::new(0)).collect(),
            costs: Costs::of_clock(),
        };
        replay.costs.operation_ns = replay.loop_cost();
        if threads {
            replay.lanes = lanes::lanes(trace, true);
        }
        replay
    }

    /// How many threads a pass runs on.
    pub fn threads(&self) -> usize {
        self.lanes.len()
    }

    /// Nanoseconds per operation of a pass through an allocator that does nothing.
    fn loop_cost(&self) -> f64 {
        let streams = vec![StreamHandle::LEGACY; self.trace.streams as usize];
        let target = Target {
            backend: &Nothing,
            streams: &streams,
            checker: None,
            due: None,
            timer: None,
            spent: None,
            enter: &|| Ok(()),
            progress: &|_| {},
        };
        // One lane runs on this thread, so that no pass can fail.
        least(times(self.trace.operations.len()), || match self.pass(&target) {
            Ok(pass) => pass.nanoseconds / pass.operations.max(1) as f64,
            Err(_) => 0.0,
        })
    }

    /// Runs every operation, then frees what the trace leaves allocated.
    ///
    /// The device may still be working when it returns.
    ///
    /// # Errors
    /// The system has no thread for a lane.
    pub fn pass(&self, target: &Target<'_>) -> io::Result<Pass> {
        let progress = Progress::new(&self.lanes, &self.slots);
        let stop = Mutex::new(None);
        let driver = target.timer.map(|timer| (timer, timer.read()));
        let results = match self.lanes.as_slice() {
            [lane] => Ok(vec![match (target.enter)() {
                Ok(()) => self.run_lane(target, 0, lane, &progress, &stop),
                Err(error) => self.not_entered(lane, error, &progress, &stop),
            }]),
            lanes => self.run_threads(target, lanes, &progress, &stop),
        };
        // Before the map and the leaks, which are not the trace's own operations.
        let driver = driver.map(|(timer, before)| timer.since(before));
        let mut stop = stop.into_inner().unwrap_or_else(PoisonError::into_inner);
        if let Some(stop) = stop.as_mut().filter(|stop| stop.is_out_of_memory()) {
            stop.map = Some(target.backend.map());
        }
        self.free_rest(target, &mut stop);
        let mut results = results?;
        let longest = results.iter_mut().filter_map(|result| result.longest.take());
        let longest = longest.reduce(Longest::max);
        let operations: usize = results.iter().map(|result| result.steps).sum();
        let measured: f64 = results.iter().map(|result| result.nanoseconds).sum();
        let loops = self.costs.operation_ns * operations as f64;
        let clock = driver.map_or(0.0, |spent| spent.clock_ns);
        Ok(Pass {
            operations: operations as u64,
            nanoseconds: (measured - loops - clock).max(0.0),
            driver_nanoseconds: driver.map(|spent| spent.driver_ns),
            longest,
            peak_live_bytes: self.peak_live_bytes(results, stop.is_some()),
            stop,
        })
    }

    fn run_threads(
        &self,
        target: &Target<'_>,
        lanes: &[Vec<Step>],
        progress: &Progress<'_>,
        stop: &Mutex<Option<Stop>>,
    ) -> io::Result<Vec<LaneResult>> {
        let run = |index: usize, lane| {
            let _others = StopsAtPanic(progress);
            match (target.enter)() {
                Ok(()) => self.run_lane(target, index, lane, progress, stop),
                Err(error) => self.not_entered(lane, error, progress, stop),
            }
        };
        let run = &run;
        thread::scope(|scope| {
            // A lane that is not begun, since the replay was stopped before, has done nothing.
            let mut results: Vec<LaneResult> =
                lanes.iter().map(|_| LaneResult::nothing()).collect();
            let mut join = |(index, thread): (usize, ScopedJoinHandle<'_, LaneResult>)| {
                results[index] = thread.join().unwrap_or_else(|panic| resume_unwind(panic));
            };
            let (mut threads, mut most) = (Vec::new(), LOOK_AT);
            for (index, lane) in lanes.iter().enumerate() {
                if !progress.begin(index) {
                    break;
                }
                let spawned = thread::Builder::new().spawn_scoped(scope, move || run(index, lane));
                // The others would wait for this lane's allocations for ever.
                threads.push((index, spawned.inspect_err(|_| progress.stop())?));
                // A thread has a stack until somebody has joined it.
                if threads.len() >= most {
                    threads.extract_if(.., |(_, thread)| thread.is_finished()).for_each(&mut join);
                    most = LOOK_AT.max(2 * threads.len());
                }
            }
            threads.into_iter().for_each(join);
            Ok(results)
        })
    }

    /// A thread on which the context could not be made current.
    fn not_entered(
        &self,
        lane: &[Step],
        error: vpmm::Error,
        progress: &Progress<'_>,
        stop: &Mutex<Option<Stop>>,
    ) -> LaneResult {
        if let Some(step) = lane.first() {
            self.fail(*step, error, progress, stop);
        }
        LaneResult::nothing()
    }

    fn run_lane(
        &self,
        target: &Target<'_>,
        index: usize,
        lane: &[Step],
        progress: &Progress<'_>,
        stop: &Mutex<Option<Stop>>,
    ) -> LaneResult {
        let alone = self.lanes.len() == 1;
        let mut horizon = 0;
        let mut times = (!alone).then(|| Times::new(progress.start(), lane.len()));
        let mut watch = Stopwatch::default();
        let mut search = target.spent.map(Search::new);
        let mut steps = 0;
        let stride = if target.due.is_some() { PACED_STRIDE } else { STRIDE };
        'lane: for stride in lane.chunks(stride) {
            watch.start();
            for step in stride {
                if !alone {
                    if progress.is_stopped() {
                        break 'lane;
                    }
                    progress.at(index, step.row);
                    let may_run = u64::from(step.row) < horizon
                        && (step.action == Action::Allocate || progress.is_made(step.slot));
                    if !may_run {
                        watch.stop();
                        if !progress.wait_for(step) {
                            break 'lane;
                        }
                        horizon = progress.horizon();
                        watch.start();
                    }
                }
                if let Some(due) = target.due.and_then(|due| due.get(step.row as usize)) {
                    let moment = progress.start() + *due;
                    if !watch.apart(|| wait_until(moment, progress)) {
                        break 'lane;
                    }
                }
                if let Err(error) = self.run_step(target, step, &mut watch, times.as_mut()) {
                    watch.stop();
                    self.fail(*step, error, progress, stop);
                    break 'lane;
                }
                if let Some(search) = &mut search {
                    watch.apart(|| search.note(step));
                }
                steps += 1;
            }
            watch.stop();
            (target.progress)(stride.len() as u64);
        }
        watch.stop();
        progress.done(index);
        // A note of the time is one reading of the clock, as an empty stretch is.
        let notes = times.as_ref().map_or(0.0, |_| self.costs.stretch_ns * steps as f64);
        let nanoseconds = (watch.nanoseconds(&self.costs) - notes).max(0.0);
        LaneResult { steps, nanoseconds, times, longest: search.and_then(|search| search.longest) }
    }

    /// One call of the allocator, with the device work around it. The watch
    /// runs when it is called and when it returns.
    fn run_step(
        &self,
        target: &Target<'_>,
        step: &Step,
        watch: &mut Stopwatch,
        times: Option<&mut Times>,
    ) -> vpmm::Result<()> {
        let slot = &self.slots[step.slot as usize];
        let stream = target.streams[step.stream as usize];
        if step.action == Action::Allocate {
            let address = target.backend.allocate(step.bytes, stream)?;
            times.map(Times::note);
            if let Some(checker) = target.checker {
                watch.stop();
                let Step { slot, bytes, .. } = *step;
                if let Err(error) = checker.write(&Piece { slot, address, bytes, stream }) {
                    // SAFETY: allocated above, and in no slot yet: nobody else frees it.
                    let _ = unsafe { target.backend.free(address, bytes, stream) };
                    return Err(error);
                }
                watch.start();
            }
            // Only now may another lane see it: after its pattern has been enqueued.
            slot.store(address, Ordering::Release);
        } else {
            let address = slot.load(Ordering::Acquire);
            slot.store(0, Ordering::Relaxed);
            // What is not freed is tried again with the rest, after the pass.
            let keep = |_: &vpmm::Error| slot.store(address, Ordering::Release);
            if let Some(checker) = target.checker {
                watch.stop();
                let piece = self.piece(target, step.slot, address);
                checker.check(&piece, stream).inspect_err(keep)?;
                watch.start();
            }
            times.map(Times::note);
            // SAFETY: the address came from this allocator, and the slot, which the trace frees
            // once, was emptied above: nobody frees it a second time, unless this was refused.
            unsafe { target.backend.free(address, step.bytes, stream) }.inspect_err(keep)?;
        }
        Ok(())
    }

    fn piece(&self, target: &Target<'_>, slot: u32, address: u64) -> Piece {
        let allocation = self.trace.allocations[slot as usize];
        let stream = target.streams[allocation.stream as usize];
        Piece { slot, address, bytes: allocation.bytes, stream }
    }

    /// Frees whatever is still allocated, each on the stream that allocated it.
    /// After a failure it frees what can be freed.
    fn free_rest(&self, target: &Target<'_>, stop: &mut Option<Stop>) {
        for (slot, held) in self.slots.iter().enumerate() {
            let address = held.swap(0, Ordering::Acquire);
            if address == 0 {
                continue;
            }
            let piece = self.piece(target, slot as u32, address);
            let checked = target.checker.map_or(Ok(()), |c| c.check(&piece, piece.stream));
            // SAFETY: the address came from this allocator, and the slot was emptied above.
            let freed = unsafe { target.backend.free(address, piece.bytes, piece.stream) };
            if let Err(error) = checked.and(freed)
                && stop.is_none()
            {
                let row = self.trace.operations.len() as u32;
                *stop =
                    Some(Stop { action: Action::Free, slot: slot as u32, row, error, map: None });
            }
        }
    }

    /// Notes the failure that is earliest in the trace, and stops the other lanes.
    fn fail(
        &self,
        step: Step,
        error: vpmm::Error,
        progress: &Progress<'_>,
        stop: &Mutex<Option<Stop>>,
    ) {
        progress.stop();
        let mut stop = stop.lock().unwrap_or_else(PoisonError::into_inner);
        if stop.as_ref().is_none_or(|known| step.row < known.row) {
            *stop = Some(Stop {
                action: step.action,
                slot: step.slot,
                row: step.row,
                error,
                map: None,
            });
        }
    }

    fn peak_live_bytes(&self, results: Vec<LaneResult>, stopped: bool) -> u64 {
        if let [alone] = results.as_slice() {
            let mut left = if stopped { alone.steps } else { return self.trace.peak_live_bytes };
            return self.trace.peak_live_bytes_of(|_| {
                let done = left > 0;
                left -= usize::from(done);
                done
            });
        }
        // A lane without times has done nothing.
        let times: Vec<Times> = results
            .into_iter()
            .map(|result| result.times.unwrap_or_else(|| Times::new(Instant::now(), 0)))
            .collect();
        live::peak_bytes(&self.lanes, &times)
    }
}

//! One trace through one allocator, from an empty device to a result.

use std::path::PathBuf;

use indicatif::ProgressBar;
use vpmm::{Stream, StreamHandle};

use super::engine::{Checker, Replay, Stop, Target};
use super::longest::{Longest, Spent};
use super::verify::{Mismatch, Verifier};
use crate::backend::{AllocatorSpec, lacks_memory};
use crate::device::{self, Calls, FunctionSpent, Ledger, Machine};
use crate::trace::Trace;

/// How to replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The most device memory that the allocator may hold.
    pub limit_bytes: Option<u64>,
    /// How often the trace is run, one pass after the other on one allocator; at least 1.
    pub passes: u32,
    /// Whether each thread of the trace gets a thread of the replay.
    pub threads: bool,
    /// Whether each operation waits for its time in the trace.
    pub paced: bool,
    /// Whether the operation with the most driver time is sought; on one thread.
    pub longest: bool,
    /// One word in how many bytes is written and checked; `None` for no device work.
    pub verify_stride_bytes: Option<u64>,
}

/// What a replay came to.
#[derive(Debug)]
pub struct Outcome {
    /// Operations of one pass; of the pass that stopped, if one did.
    pub operations: u64,
    /// Threads that called the allocator.
    pub threads: usize,
    /// Nanoseconds per operation of each pass that ran to its end, in order. Of
    /// the pass that stopped, if that was the first.
    pub ns_per_op: Vec<f64>,
    /// The same without what was spent in driver calls, where these are timed.
    pub host_ns_per_op: Vec<f64>,
    /// The most bytes live at one time.
    pub peak_live_bytes: u64,
    /// The most that the allocator held at one time.
    pub peak_mapped_bytes: u64,
    /// Driver calls of the allocator, from its making to the last pass's end.
    pub driver_calls: u64,
    /// The time of these calls: modelled on the simulator, where it is none if device
    /// work of several threads cannot be told from them; measured on a GPU, where it is
    /// none if the machine has no clock for them.
    pub driver_time_us: Option<f64>,
    /// The same of each pass, the one that stopped included, without the allocator's making; none with `--verify`.
    pub pass_driver_time_us: Option<Vec<f64>>,
    /// That time by function, what took the most first; none where it is not known, and of allocators that
    /// do not call through [`vpmm::Driver`].
    pub by_function: Option<Vec<FunctionSpent>>,
    /// The operation of any pass that took the most of it, where that was asked for.
    pub longest: Option<Longest>,
    /// Why it ended early, if it did.
    pub stop: Option<Stop>,
    /// Why the allocator could not be made, where that was for want of memory.
    pub unmade: Option<vpmm::Error>,
    /// Allocations whose contents were lost, by `--verify`.
    pub mismatches: Vec<Mismatch>,
    /// What the simulator found wrong: races, and misuse that a GPU punishes.
    pub findings: Vec<String>,
    /// Logs that the allocator wrote, which lack so many rows: there was no room for them.
    pub lost_rows: Vec<(PathBuf, u64)>,
}

impl Outcome {
    /// The figure to compare: the fastest warm pass, or the only pass.
    pub fn best_ns_per_op(&self) -> Option<f64> {
        best(&self.ns_per_op)
    }

    /// The same without the time in driver calls: of the pass for which that is least.
    pub fn best_host_ns_per_op(&self) -> Option<f64> {
        best(&self.host_ns_per_op)
    }

    /// Peak live by peak mapped.
    pub fn utilisation(&self) -> Option<f64> {
        (self.peak_mapped_bytes > 0)
            .then(|| self.peak_live_bytes as f64 / self.peak_mapped_bytes as f64)
    }

    /// Whether memory ran out.
    pub fn is_out_of_memory(&self) -> bool {
        self.unmade.is_some() || self.stop.as_ref().is_some_and(Stop::is_out_of_memory)
    }

    /// Whether something is wrong that more memory would not mend.
    pub fn is_failure(&self) -> bool {
        let broke = self.stop.is_some() && !self.is_out_of_memory();
        broke || !self.mismatches.is_empty() || !self.findings.is_empty()
    }
}

/// The fastest pass after the first, which is cold, or the only pass.
fn best(passes: &[f64]) -> Option<f64> {
    match passes {
        [] => None,
        [only] => Some(*only),
        [_, warm @ ..] => warm.iter().copied().reduce(f64::min),
    }
}

/// A replay that came to nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// The allocator could not be made, and not for want of memory.
    #[error("{allocator} cannot be set up: {source}")]
    Allocator {
        /// Which.
        allocator: AllocatorSpec,
        /// Why.
        source: vpmm::Error,
    },
    /// What was to be verified is memory that the device does not reach: its work on it would fail it for good.
    #[error("{0}: the device does not reach its memory: not with --verify")]
    Unreachable(AllocatorSpec),
    /// The device failed outside of the allocator.
    #[error("the device failed: {0}")]
    Device(#[from] vpmm::Error),
    /// The system has no thread for each of the trace's.
    #[error("no thread for each thread of the trace: {0}")]
    Threads(#[from] std::io::Error),
}

/// Replays `trace` through the allocator on the machine.
///
/// # Errors
/// [`RunError`]. Running out of memory, an allocator's failure and lost contents
/// are no errors but outcomes.
pub fn run(
    trace: &Trace,
    allocator: &AllocatorSpec,
    machine: &Machine,
    settings: Settings,
    progress: &ProgressBar,
) -> Result<Outcome, RunError> {
    Session::new(trace, machine, settings.threads)?.run(allocator, settings, progress)
}

/// A trace laid out on a machine, to be replayed again and again, through a fresh
/// allocator each time.
pub struct Session<'a> {
    trace: &'a Trace,
    machine: &'a Machine,
    calls: Calls<'a>,
    replay: Replay<'a>,
    /// One for each stream of the trace.
    streams: Vec<Stream>,
}

impl<'a> Session<'a> {
    /// Makes the trace's streams and measures what the replay loop costs.
    ///
    /// # Errors
    /// [`RunError::Device`].
    pub fn new(trace: &'a Trace, machine: &'a Machine, threads: bool) -> Result<Self, RunError> {
        let calls = machine.calls();
        calls.enter()?;
        let streams = machine.streams(trace.streams)?;
        Ok(Self { trace, machine, calls, replay: Replay::new(trace, threads), streams })
    }

    /// Replays the trace through an allocator made for it. `settings.threads` is
    /// the session's already.
    ///
    /// # Errors
    /// As [`run`].
    pub fn run(
        &self,
        allocator: &AllocatorSpec,
        settings: Settings,
        progress: &ProgressBar,
    ) -> Result<Outcome, RunError> {
        let Self { trace, machine, calls, replay, streams } = self;
        calls.enter()?;
        let handles: Vec<StreamHandle> = streams.iter().map(Stream::handle).collect();
        let found_before = Found::on(machine);
        let mut verifier = match settings.verify_stride_bytes {
            Some(stride) => Some(Verifier::new(machine, trace, stride)?),
            None => None,
        };

        device::settle(machine);
        let mut driver_time = DriverTime::on(machine);
        let spent = settings.longest.then(|| spent_on(machine)).flatten();
        let mut outcome = Outcome {
            operations: 0,
            threads: replay.threads(),
            ns_per_op: Vec::new(),
            host_ns_per_op: Vec::new(),
            peak_live_bytes: 0,
            peak_mapped_bytes: 0,
            driver_calls: 0,
            driver_time_us: None,
            pass_driver_time_us: None,
            by_function: None,
            longest: None,
            stop: None,
            unmade: None,
            mismatches: Vec::new(),
            findings: Vec::new(),
            lost_rows: Vec::new(),
        };
        let mut by_pass = Vec::new();
        let opened = driver_time.of(|| allocator.open(machine, settings.limit_bytes));
        let backend = match opened {
            Ok(backend) => backend,
            Err(error) if lacks_memory(&error) => {
                outcome.unmade = Some(error);
                return Ok(outcome);
            }
            Err(source) => {
                return Err(RunError::Allocator { allocator: allocator.clone(), source });
            }
        };
        if verifier.is_some() && !backend.is_for_the_device() {
            return Err(RunError::Unreachable(allocator.clone()));
        }
        for _ in 0..settings.passes.max(1) {
            let before = driver_time.spent_us;
            let pass = driver_time.of(|| {
                replay.pass(&Target {
                    backend: &*backend,
                    streams: &handles,
                    checker: verifier.as_ref().map(|verifier| verifier as &dyn Checker),
                    due: settings.paced.then_some(trace.times.as_slice()),
                    timer: machine.timer(),
                    spent: spent.as_ref(),
                    enter: &|| calls.enter(),
                    progress: &|operations| progress.inc(operations),
                })
            })?;
            by_pass.push(driver_time.spent_us - before);
            outcome.operations = pass.operations;
            outcome.peak_live_bytes = outcome.peak_live_bytes.max(pass.peak_live_bytes);
            let complete = pass.stop.is_none();
            if pass.operations > 0 && (complete || outcome.ns_per_op.is_empty()) {
                let per_operation = |ns: f64| ns / pass.operations as f64;
                outcome.ns_per_op.push(per_operation(pass.nanoseconds));
                if let Some(driver) = pass.driver_nanoseconds {
                    let host = (pass.nanoseconds - driver).max(0.0);
                    outcome.host_ns_per_op.push(per_operation(host));
                }
            }
            let longest = outcome.longest.into_iter().chain(pass.longest);
            outcome.longest = longest.reduce(Longest::max);
            outcome.stop = pass.stop;
            // The next pass begins on an idle device.
            let finished = match &mut verifier {
                Some(verifier) => verifier.finish_pass(),
                None => calls.synchronize().map(|()| Vec::new()),
            };
            match finished {
                Ok(mismatches) => outcome.mismatches = mismatches,
                // What stopped the pass says more than the device's echo of it.
                Err(_) if outcome.stop.is_some() => {}
                Err(error) => return Err(error.into()),
            }
            if outcome.stop.is_some() || !outcome.mismatches.is_empty() {
                break;
            }
        }
        outcome.driver_calls = backend.driver_calls();
        outcome.peak_mapped_bytes = backend.peak_mapped_bytes().unwrap_or(0);
        let verify_us = verifier.as_ref().map_or(0.0, Verifier::modelled_us);
        let told_apart = match machine.simulator() {
            Some(_) => verifier.is_none() || outcome.threads == 1,
            // Device work is done through functions that have no clock.
            None => machine.timer().is_some(),
        };
        if told_apart {
            outcome.driver_time_us = Some((driver_time.spent_us - verify_us).max(0.0));
            outcome.pass_driver_time_us = verifier.is_none().then_some(by_pass);
        }
        if machine.simulator().is_none() || verifier.is_none() {
            outcome.by_function = driver_time.by_function();
        }
        outcome.lost_rows = backend.lost_rows();
        drop(backend);
        drop(verifier);
        outcome.findings = found_before.later(machine);
        Ok(outcome)
    }
}

/// How many races and misuses a simulated machine has found.
#[derive(Clone, Copy, Default)]
struct Found {
    races: usize,
    misuses: usize,
}

impl Found {
    fn on(machine: &Machine) -> Self {
        let report = machine.simulator().map(cuda_sim::Simulator::report);
        report.map_or(Self::default(), |report| Self {
            races: report.races.len(),
            misuses: report.misuse.len(),
        })
    }

    /// What was found after that.
    fn later(self, machine: &Machine) -> Vec<String> {
        let Some(report) = machine.simulator().map(cuda_sim::Simulator::report) else {
            return Vec::new();
        };
        let races = report.races.iter().skip(self.races).map(|race| format!("race: {race}"));
        races.chain(report.misuse.iter().skip(self.misuses).cloned()).collect()
    }
}

/// Microseconds in the allocator's driver calls so far: modelled on a simulated machine, measured on another,
/// none where a machine has no clock.
type DriverClock<'a> = Box<dyn Fn() -> f64 + Sync + 'a>;

fn driver_clock(machine: &Machine) -> Option<DriverClock<'_>> {
    match (machine.simulator(), machine.timer()) {
        (Some(simulator), _) => Some(Box::new(|| simulator.modelled_us())),
        (None, Some(timer)) => {
            let begin = timer.read();
            Some(Box::new(move || timer.since(begin).driver_ns / 1000.0))
        }
        (None, None) => None,
    }
}

fn spent_on(machine: &Machine) -> Option<Spent<'_>> {
    let by_function = Box::new(|| Ledger::of(machine).unwrap_or_default());
    Some(Spent { us: driver_clock(machine)?, by_function })
}

/// What was spent in the allocator's driver calls.
struct DriverTime<'a> {
    machine: &'a Machine,
    clock: Option<DriverClock<'a>>,
    spent_us: f64,
    ledger: Option<Ledger>,
}

impl<'a> DriverTime<'a> {
    fn on(machine: &'a Machine) -> Self {
        Self { machine, clock: driver_clock(machine), spent_us: 0.0, ledger: None }
    }

    /// Runs `work` and counts the calls that it makes.
    fn of<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let now = || self.clock.as_ref().map_or(0.0, |clock| clock());
        let (before, ledger_before) = (now(), Ledger::of(self.machine));
        let done = work();
        self.spent_us += now() - before;
        if let Some((now, before)) = Ledger::of(self.machine).zip(ledger_before) {
            self.ledger.get_or_insert_default().add(&now.since(&before));
        }
        done
    }

    /// The same by function, where there is any.
    fn by_function(&self) -> Option<Vec<FunctionSpent>> {
        self.ledger.as_ref().map(Ledger::by_time).filter(|spent| !spent.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use cuda_sys::types::CUresult;

    use super::*;
    use crate::trace::Action;

    fn outcome() -> Outcome {
        Outcome {
            operations: 2,
            threads: 1,
            ns_per_op: vec![90.0, 20.0, 10.0, 30.0],
            host_ns_per_op: vec![80.0, 15.0, 9.0, 8.0],
            peak_live_bytes: 3,
            peak_mapped_bytes: 4,
            driver_calls: 0,
            driver_time_us: None,
            pass_driver_time_us: None,
            by_function: None,
            longest: None,
            stop: None,
            unmade: None,
            mismatches: Vec::new(),
            findings: Vec::new(),
            lost_rows: Vec::new(),
        }
    }

    fn stopped_by(code: CUresult) -> Outcome {
        let error = vpmm::Error::Driver { call: "cuMemCreate", code, bytes: 0 };
        let stop = Stop { action: Action::Allocate, slot: 0, row: 0, error, map: None };
        Outcome { stop: Some(stop), ..outcome() }
    }

    #[test]
    fn what_the_simulator_finds_is_told_of_the_replay_that_it_is_of() {
        let machine = Machine::simulated(device::Setup::default()).unwrap();
        let misuse = || {
            let stream = machine.device().stream().unwrap();
            let gone = stream.handle().raw();
            drop(stream);
            let query = machine.driver().raw().cuStreamQuery.unwrap();
            // SAFETY: the simulator knows that there is no such stream.
            let code = unsafe { query(gone) };
            assert_ne!(code, CUresult::CUDA_SUCCESS);
        };
        misuse();
        let before = Found::on(&machine);
        assert!(before.later(&machine).is_empty());
        misuse();
        let found = before.later(&machine);
        assert_eq!(found.len(), 1);
        assert!(found[0].contains("was destroyed"), "{found:?}");
    }

    #[test]
    fn the_best_warm_pass_counts() {
        assert_eq!(outcome().best_ns_per_op(), Some(10.0));
        assert_eq!(outcome().best_host_ns_per_op(), Some(8.0));
        let only = Outcome { ns_per_op: vec![90.0], ..outcome() };
        assert_eq!(only.best_ns_per_op(), Some(90.0));
        assert_eq!(Outcome { ns_per_op: vec![], ..outcome() }.best_ns_per_op(), None);
    }

    #[test]
    fn nothing_held_has_no_utilisation() {
        assert_eq!(outcome().utilisation(), Some(0.75));
        assert_eq!(Outcome { peak_mapped_bytes: 0, ..outcome() }.utilisation(), None);
    }

    #[test]
    fn failures_are_told_from_want_of_memory() {
        let kinds = |outcome: Outcome| (outcome.is_failure(), outcome.is_out_of_memory());
        assert_eq!(kinds(outcome()), (false, false));
        assert_eq!(kinds(stopped_by(CUresult::CUDA_ERROR_OUT_OF_MEMORY)), (false, true));
        assert_eq!(kinds(stopped_by(CUresult::CUDA_ERROR_UNKNOWN)), (true, false));
        let mismatches = vec![Mismatch { slot: 0, words: 1 }];
        assert_eq!(kinds(Outcome { mismatches, ..outcome() }), (true, false));
        let findings = vec!["race".to_owned()];
        assert_eq!(kinds(Outcome { findings, ..outcome() }), (true, false));
    }
}

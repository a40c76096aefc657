//! `vpmm replay`.

use std::io::Write;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::remark;
use crate::args::ReplayArgs;
use crate::backend::AllocatorSpec;
use crate::device::{DeviceChoice, Machine, Setup};
use crate::exit::{Abort, Exit};
use crate::replay::{Outcome, RunError, Settings, run};
use crate::report::{Report, table};
use crate::trace::{Action, Trace};

/// On the simulator the host pays for every page that is written.
const SIM_STRIDE_BYTES: u64 = 1 << 20;

/// Mismatches and findings beyond these are only counted.
const SHOWN: usize = 10;

pub(super) fn replay(args: &ReplayArgs, out: &mut dyn Write) -> Result<Exit, Abort> {
    if args.traces.iter().filter(|name| *name == "-").count() > 1 {
        return Err(Abort::bad_input("standard input (-) can be read only once"));
    }
    // All are read first: a mistake in the last one should not cost the work on the others.
    let traces: Vec<Trace> = args
        .traces
        .iter()
        .map(|name| Trace::open(name).map_err(Abort::bad_input))
        .collect::<Result<_, _>>()?;
    traces.iter().for_each(remark_on_oddities);
    let device = args.device.settle(remark);

    let mut exit = Exit::Done;
    let mut reports = Vec::new();
    for trace in &traces {
        for &allocator in &args.allocator.0 {
            let (report, outcome) = replay_one(trace, allocator, device, args)?;
            explain(trace, allocator, &outcome);
            if outcome.is_failure() {
                exit = exit.and(Exit::Failure);
            } else if outcome.is_out_of_memory() {
                exit = exit.and(Exit::OutOfMemory);
            }
            if args.json {
                let line = serde_json::to_string(&report).map_err(Abort::failure)?;
                writeln!(out, "{line}")?;
                out.flush()?;
            } else {
                reports.push(report);
            }
        }
    }
    if !args.json {
        writeln!(out, "{}", table(&reports))?;
        out.flush()?;
    }
    Ok(exit)
}

fn replay_one(
    trace: &Trace,
    allocator: AllocatorSpec,
    device: DeviceChoice,
    args: &ReplayArgs,
) -> Result<(Report, Outcome), Abort> {
    let setup = Setup { detect_races: args.verify, time_driver: true };
    let machine = device.open(setup).map_err(Abort::failure)?;
    let settings = Settings {
        limit_bytes: args.limit.map(|limit| limit.0),
        passes: args.repeat.get(),
        threads: args.threads,
        verify_stride_bytes: args.verify.then(|| verify_stride_bytes(args, &machine)),
    };
    let bar = progress_bar(trace, allocator, settings.passes);
    let outcome = run(trace, allocator, &machine, settings, &bar);
    bar.finish_and_clear();
    let outcome = outcome.map_err(|error| match &error {
        RunError::Allocator { source: vpmm::Error::Config { .. }, .. } => Abort::bad_input(error),
        _ => Abort::failure(format_args!("{}: {error}", trace.name)),
    })?;
    Ok((Report::new(trace, allocator, machine.label(), &settings, &outcome), outcome))
}

fn verify_stride_bytes(args: &ReplayArgs, machine: &Machine) -> u64 {
    match args.verify_stride {
        Some(stride) => stride.0,
        None if machine.simulator().is_some() => SIM_STRIDE_BYTES,
        None => 0,
    }
}

/// A bar on standard error where that is a terminal; hidden elsewhere.
fn progress_bar(trace: &Trace, allocator: AllocatorSpec, passes: u32) -> ProgressBar {
    let length = trace.operations.len() as u64 * u64::from(passes);
    let bar = ProgressBar::with_draw_target(Some(length), ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template("{msg} {bar:40} {percent:>3} % {eta}") {
        bar.set_style(style);
    }
    bar.set_message(format!("{} {allocator}", trace.name));
    // Drawn when the replay reports; a ticker's thread would run beside what is timed.
    bar.tick();
    bar
}

fn remark_on_oddities(trace: &Trace) {
    let odd = trace.oddities;
    let counts = [
        (odd.unknown_frees, "frees of pointers that it never allocated, left out"),
        (odd.missing_frees, "allocations at addresses still allocated, the older ones freed first"),
        (odd.recorded_failures, "allocations that had failed when it was recorded, left out"),
    ];
    for (count, what) in counts {
        if count > 0 {
            remark(&format!("{}: {count} {what}", trace.name));
        }
    }
}

/// Says what went wrong, on standard error.
fn explain(trace: &Trace, allocator: AllocatorSpec, outcome: &Outcome) {
    let name = &trace.name;
    if let Some(stop) = &outcome.stop {
        let allocation = trace.allocations[stop.slot as usize];
        let what = match stop.action {
            Action::Allocate => "the allocation",
            Action::Free => "the free of the allocation",
        };
        remark(&format!(
            "{name}: line {}: {allocator}: {what} of {} bytes failed after {} operations: {}",
            allocation.line, allocation.bytes, outcome.operations, stop.error
        ));
        if let Some(map) = &stop.map {
            remark(&format!("{allocator} at that moment: {map}"));
        }
    }
    for mismatch in outcome.mismatches.iter().take(SHOWN) {
        let allocation = trace.allocations[mismatch.slot as usize];
        remark(&format!(
            "{name}: line {}: {allocator}: the contents of the allocation of {} bytes were lost: \
             {} words differ",
            allocation.line, allocation.bytes, mismatch.words
        ));
    }
    for finding in outcome.findings.iter().take(SHOWN) {
        remark(&format!("{name}: {allocator}: the simulator found: {finding}"));
    }
    let more = outcome.mismatches.len().saturating_sub(SHOWN)
        + outcome.findings.len().saturating_sub(SHOWN);
    if more > 0 {
        remark(&format!("{name}: {allocator}: and {more} more"));
    }
}

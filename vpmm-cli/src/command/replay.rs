//! `vpmm replay`.

use std::io::Write;

use indicatif::ProgressBar;

use super::traces::{abort, check_logs, explain, open_all};
use super::{Rows, bar, finish, remark};
use crate::args::ReplayArgs;
use crate::backend::AllocatorSpec;
use crate::device::{DeviceChoice, Machine, Setup};
use crate::exit::{Abort, Exit};
use crate::replay::{Outcome, Settings, run};
use crate::report::{Report, table};
use crate::trace::Trace;

/// On the simulator the host pays for every page that is written.
const SIM_STRIDE_BYTES: u64 = 1 << 20;

pub(super) fn replay(args: &ReplayArgs, out: &mut dyn Write) -> Result<Exit, Abort> {
    check_logs(&args.traces, &args.allocator.0)?;
    let traces = open_all(&args.traces)?;
    for trace in traces.iter().filter(|_| args.paced) {
        if let Some(line) = trace.untimed_line
            && !trace.operations.is_empty()
        {
            let name = &trace.name;
            return Err(Abort::bad_input(format_args!(
                "{name}: line {line}: --paced needs a time that can be read in every row"
            )));
        }
    }
    let device = args.device.settle(remark);

    let (reports, mut exit) = (Rows::new(args.json, table), Exit::Done);
    let end = replay_all(&traces, device, args, &reports, &mut exit, out);
    finish(end, exit, args.json, &reports, table, out)
}

fn replay_all(
    traces: &[Trace],
    device: DeviceChoice,
    args: &ReplayArgs,
    reports: &Rows<Report>,
    exit: &mut Exit,
    out: &mut dyn Write,
) -> Result<(), Abort> {
    for trace in traces {
        for allocator in &args.allocator.0 {
            let (report, outcome) = replay_one(trace, allocator, device, args)?;
            explain(trace, allocator, &outcome);
            if outcome.is_failure() || !outcome.lost_rows.is_empty() {
                *exit = exit.and(Exit::Failure);
            } else if outcome.is_out_of_memory() {
                *exit = exit.and(Exit::OutOfMemory);
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
    Ok(())
}

fn replay_one(
    trace: &Trace,
    allocator: &AllocatorSpec,
    device: DeviceChoice,
    args: &ReplayArgs,
) -> Result<(Report, Outcome), Abort> {
    let setup = Setup { detect_races: args.verify, time_driver: true };
    let machine = device.open(setup).map_err(Abort::failure)?;
    let settings = Settings {
        limit_bytes: args.limit.map(|limit| limit.0),
        passes: args.repeat.get(),
        threads: args.threads,
        paced: args.paced,
        longest: args.longest,
        verify_stride_bytes: args.verify.then(|| verify_stride_bytes(args, &machine)),
    };
    let bar = progress_bar(trace, allocator, settings.passes);
    let outcome = run(trace, allocator, &machine, settings, &bar);
    bar.finish_and_clear();
    let outcome = outcome.map_err(|error| abort(trace, &error))?;
    Ok((Report::new(trace, allocator, machine.label(), &settings, &outcome), outcome))
}

fn verify_stride_bytes(args: &ReplayArgs, machine: &Machine) -> u64 {
    match args.verify_stride {
        Some(stride) => stride.0,
        None if machine.simulator().is_some() => SIM_STRIDE_BYTES,
        None => 0,
    }
}

fn progress_bar(trace: &Trace, allocator: &AllocatorSpec, passes: u32) -> ProgressBar {
    let bar = bar(trace.operations.len() as u64 * u64::from(passes));
    bar.set_message(format!("{} {allocator}", trace.name));
    // Drawn when the replay reports; a ticker's thread would run beside what is timed.
    bar.tick();
    bar
}

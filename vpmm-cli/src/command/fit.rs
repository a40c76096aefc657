//! `vpmm fit`.

use std::io::Write;

use super::traces::{abort, check_logs, explain, open_all, say_lost};
use super::{Rows, bar, finish, remark};
use crate::args::FitArgs;
use crate::backend::AllocatorSpec;
use crate::bytes::ByteCount;
use crate::device::{DeviceChoice, Machine, Setup};
use crate::exit::{Abort, Exit};
use crate::fit::{Fit, FitError, fit as search};
use crate::replay::Session;
use crate::report::{FitReport, fit_table};
use crate::trace::Trace;

pub(super) fn fit(args: &FitArgs, out: &mut dyn Write) -> Result<Exit, Abort> {
    if let Some(allocator) = args.allocator.0.iter().find(|spec| !spec.has_limit()) {
        return Err(Abort::bad_input(FitError::Unlimited(allocator.clone())));
    }
    check_logs(&args.traces, &args.allocator.0)?;
    let traces = open_all(&args.traces)?;
    let device = args.device.settle(remark);

    let (reports, mut exit) = (Rows::new(args.json, fit_table), Exit::Done);
    let end = fit_all(&traces, device, args, &reports, &mut exit, out);
    finish(end, exit, args.json, &reports, fit_table, out)
}

fn fit_all(
    traces: &[Trace],
    device: DeviceChoice,
    args: &FitArgs,
    reports: &Rows<FitReport>,
    exit: &mut Exit,
    out: &mut dyn Write,
) -> Result<(), Abort> {
    for trace in traces {
        let mut machine = open(device)?;
        for allocator in &args.allocator.0 {
            let (report, end) = fit_one(trace, allocator, &machine)?;
            *exit = exit.and(end);
            if end == Exit::Failure {
                // A device that has failed may answer nothing more.
                drop(machine);
                machine = open(device)?;
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

fn open(device: DeviceChoice) -> Result<Machine, Abort> {
    device.open(Setup { time_driver: true, ..Setup::default() }).map_err(Abort::failure)
}

fn fit_one(
    trace: &Trace,
    allocator: &AllocatorSpec,
    machine: &Machine,
) -> Result<(FitReport, Exit), Abort> {
    let session = Session::new(trace, machine, false).map_err(|error| abort(trace, &error))?;
    let bar = bar(trace.operations.len() as u64);
    let fit = search(trace, allocator, machine, &session, &bar, |attempt, limit_bytes| {
        bar.set_position(0);
        let limit = ByteCount(limit_bytes);
        bar.set_message(format!("{} {allocator}: attempt {attempt}, {limit}", trace.name));
        bar.tick();
    });
    bar.finish_and_clear();
    let (fit, end) = match fit {
        Ok(fit) => {
            let end = if !fit.lost_rows.is_empty() {
                Exit::Failure
            } else if fit.found.is_some() {
                Exit::Done
            } else {
                Exit::OutOfMemory
            };
            (Some(fit), end)
        }
        Err(FitError::Failed(outcome)) => {
            explain(trace, allocator, &outcome);
            (None, Exit::Failure)
        }
        Err(FitError::Run(error)) => return Err(abort(trace, &error)),
        Err(error @ FitError::Unlimited(_)) => return Err(Abort::bad_input(error)),
    };
    if let Some(fit) = &fit {
        say(trace, allocator, fit);
    }
    Ok((FitReport::new(trace, allocator, fit.as_ref()), end))
}

/// Says, on standard error, what a single figure cannot.
fn say(trace: &Trace, allocator: &AllocatorSpec, fit: &Fit) {
    let name = &trace.name;
    say_lost(name, allocator, &fit.lost_rows);
    match &fit.found {
        None => remark(&format!(
            "{name}: {allocator}: it does not complete with all of the device's free memory, or what of that \
             the allocator itself takes"
        )),
        Some(found) if !found.fails_above_bytes.is_empty() => {
            let above: Vec<String> = found.fails_above_bytes.iter().map(u64::to_string).collect();
            remark(&format!(
                "{name}: {allocator}: it completes with {} bytes, but not with {}",
                found.limit_bytes,
                above.join(", ")
            ));
        }
        Some(_) => {}
    }
}

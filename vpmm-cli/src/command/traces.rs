//! What the commands that take traces have in common: opening them, and saying what went wrong.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use indicatif::ProgressDrawTarget;

use super::{bar, remark};
use crate::backend::{AllocatorSpec, is_bad_setting, lost_text};
use crate::device::FunctionSpent;
use crate::exit::Abort;
use crate::replay::{Longest, Outcome, RunError};
use crate::trace::{Action, Trace};

/// Mismatches and findings beyond these are only counted.
const SHOWN: usize = 10;

/// Reads every trace before any is used: a mistake in the last one should not cost the work on
/// the others. Remarks on rows that were left out.
///
/// # Errors
/// [`Abort`] for bad input.
pub(super) fn open_all(names: &[String]) -> Result<Vec<Trace>, Abort> {
    if names.iter().filter(|name| *name == "-").count() > 1 {
        return Err(Abort::bad_input("standard input (-) can be read only once"));
    }
    let traces: Vec<Trace> = names.iter().map(|name| open(name)).collect::<Result<_, _>>()?;
    traces.iter().for_each(remark_on_oddities);
    Ok(traces)
}

/// Reads one, and shows how far it is: millions of rows take seconds. Nobody knows how long standard input is.
fn open(name: &str) -> Result<Trace, Abort> {
    let bar = bar(0);
    let trace = Trace::open_through(name, |source, bytes| {
        match bytes {
            Some(bytes) => bar.set_length(bytes),
            None => bar.set_draw_target(ProgressDrawTarget::hidden()),
        }
        bar.set_message(format!("reading {name}"));
        bar.wrap_read(source)
    });
    bar.finish_and_clear();
    trace.map_err(Abort::bad_input)
}

/// Refuses logs that allocators would write over a trace, over the output, or one over the other.
///
/// # Errors
/// [`Abort`] for bad usage.
pub(super) fn check_logs(traces: &[String], allocators: &[AllocatorSpec]) -> Result<(), Abort> {
    let logs: Vec<&Path> = allocators.iter().flat_map(AllocatorSpec::logs).collect();
    for (at, log) in logs.iter().enumerate() {
        let name = log.display();
        if traces.iter().any(|trace| is_one_file(log, path_of(trace))) {
            return Err(Abort::bad_input(format_args!(
                "{name} is a trace: an allocator's log would be written over it"
            )));
        }
        if is_one_file(log, Path::new("/dev/stdout")) {
            return Err(Abort::bad_input(format_args!(
                "{name}: the output goes there: an allocator's log would be written over it"
            )));
        }
        if logs[..at].iter().any(|other| is_one_file(log, other)) {
            return Err(Abort::bad_input(format_args!(
                "{name}: two logs would be written over each other"
            )));
        }
    }
    Ok(())
}

/// Where a trace is: standard input may be a file, too.
fn path_of(trace: &str) -> &Path {
    Path::new(if trace == "-" { "/dev/stdin" } else { trace })
}

/// Whether two names are one file's. What is there and no file, as a terminal, may be written to by all.
fn is_one_file(one: &Path, other: &Path) -> bool {
    match (fs::metadata(one), fs::metadata(other)) {
        (Ok(one), Ok(other)) => {
            one.is_file() && (one.dev(), one.ino()) == (other.dev(), other.ino())
        }
        // Neither is there yet.
        _ => one == other || place_of(one).is_some_and(|place| Some(place) == place_of(other)),
    }
}

/// Links that one may lead to after the other: as many as the system follows.
const MOST_LINKS: usize = 40;

/// The folder that a file is to be made in, by the one name that it has, and the file's own name: behind links that
/// lead there.
fn place_of(file: &Path) -> Option<(PathBuf, OsString)> {
    let mut file = file.to_owned();
    for _ in 0..MOST_LINKS {
        let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new("."));
        match fs::read_link(&file) {
            Ok(target) => file = folder.join(target),
            Err(_) => return Some((folder.canonicalize().ok()?, file.file_name()?.to_owned())),
        }
    }
    None
}

/// How a replay that came to nothing ends the command.
pub(super) fn abort(trace: &Trace, error: &RunError) -> Abort {
    match error {
        RunError::Allocator { source, .. } if is_bad_setting(source) => Abort::bad_input(error),
        RunError::Unreachable(_) => Abort::bad_input(error),
        _ => Abort::failure(format_args!("{}: {error}", trace.name)),
    }
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

fn what(action: Action) -> &'static str {
    match action {
        Action::Allocate => "the allocation",
        Action::Free => "the free of the allocation",
    }
}

/// `: 1640.2 in 3 calls of cuMemSetAccess, 51.9 in 83 of cuMemMap`: what comes to a hundredth of it.
fn in_functions(longest: &Longest) -> String {
    let much = |of: &&FunctionSpent| of.us >= longest.driver_us / 100.0;
    let each = longest.by_function.iter().filter(much).enumerate();
    let each = each.map(|(at, FunctionSpent { function, calls, us })| {
        let (before, of) = if at == 0 { (": ", "calls of") } else { (", ", "of") };
        format!("{before}{us:.1} in {calls} {of} {function}")
    });
    each.collect()
}

/// Says which logs lack rows, on standard error.
pub(super) fn say_lost(name: &str, allocator: &AllocatorSpec, lost_rows: &[(PathBuf, u64)]) {
    for (log, rows) in lost_rows {
        remark(&format!("{name}: {allocator}: {}", lost_text(log, *rows)));
    }
}

/// Says what went wrong, on standard error.
pub(super) fn explain(trace: &Trace, allocator: &AllocatorSpec, outcome: &Outcome) {
    let name = &trace.name;
    if let Some(error) = &outcome.unmade {
        remark(&format!("{name}: {allocator} cannot be set up: {error}"));
    }
    if let Some(stop) = &outcome.stop {
        let allocation = trace.allocations[stop.slot as usize];
        let what = what(stop.action);
        remark(&format!(
            "{name}: line {}: {allocator}: {what} of {} bytes failed after {} operations: {}",
            allocation.line, allocation.bytes, outcome.operations, stop.error
        ));
        if let Some(map) = &stop.map {
            remark(&format!("{allocator} at that moment: {map}"));
        }
    }
    if let Some(longest) = &outcome.longest {
        let allocation = trace.allocations[longest.slot as usize];
        remark(&format!(
            "{name}: line {}: {allocator}: {} of {} bytes spent the most time in the driver, {:.1} µs{}",
            allocation.line,
            what(longest.action),
            allocation.bytes,
            longest.driver_us,
            in_functions(longest)
        ));
    }
    say_lost(name, allocator, &outcome.lost_rows);
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

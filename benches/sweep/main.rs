//! Compares policies of growth: how much memory the default profile needs for traces, and how much
//! driver time, over many sizes of the same program.
//!
//! ```sh
//! cargo run --release -p vpmm-harness --example sweep -- [OPTIONS] [TRACE...]
//! ```
//!
//! A change to the policy moves every later placement, so that one replay says little: what looks
//! like a gain may be luck with one program's sizes. Here every trace is replayed with its requests
//! scaled by several factors, and the mean and the worst of them are printed. Run it before and
//! after a change.
//!
//! Replays run on the simulated driver. Times are its model of an H200's calls, on any machine the
//! same; a clock has no part in them, since pools get no moves back with time here
//! (`moves_per_second` is 0) unless told so. With a very large number of them a pool has all the time
//! in the world; with the default 1,000 and `--paced`, as much as it had in the program.

#![forbid(unsafe_code)]

mod behind;
mod factors;
mod measure;
mod replay;
mod table;
mod workers;

use std::error::Error;
use std::num::NonZeroU32;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use vpmm_cli::trace::Trace;

use measure::{Figures, measure};
use replay::Run;

/// What went wrong, from any thread.
type Failure = Box<dyn Error + Send + Sync>;

/// The traces of the repository.
const TRACES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/traces");

/// Compare policies of growth: memory and modelled driver time of traces at many sizes.
#[derive(Parser)]
#[command(name = "sweep")]
struct Arguments {
    /// Traces, plain or gzip; those of the repository if none are given.
    #[arg(value_name = "TRACE")]
    traces: Vec<String>,

    /// Scale by N more factors between 0.5 and 1.5 than the six that are always tried.
    #[arg(long, value_name = "N", default_value = "0")]
    factors: u32,

    /// Passes over each trace on one pool, for what is held in the end.
    #[arg(long, value_name = "N", default_value = "4")]
    passes: NonZeroU32,

    /// Moves, and shorter extents, that each second allows a pool.
    #[arg(long, value_name = "N", default_value = "0")]
    moves_per_second: u32,

    /// Make each call at its time in the trace, where no limit is set: what a program holds that works
    /// between its requests. Takes as long as the program did.
    #[arg(long)]
    paced: bool,

    /// Have the GPU come to the work before a call on the first stream N calls later, where no limit is set. What further streams free is in use on the first one up to then, as a loader's batch is.
    #[arg(long, value_name = "N")]
    behind: Option<u64>,

    /// Microseconds of patience that pools have.
    #[arg(long, value_name = "US", default_value = "0")]
    patience: u64,

    /// Print one JSON object per trace and factor, one per line.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let paths =
        if arguments.traces.is_empty() { repository_traces()? } else { arguments.traces.clone() };
    let factors = factors::first(arguments.factors);
    if !arguments.json {
        table::print_header(factors.len(), arguments.passes);
    }
    for path in &paths {
        let Arguments { passes, moves_per_second, paced, behind, .. } = *arguments;
        let patience = Duration::from_micros(arguments.patience);
        let run = Run { passes, moves_per_second, paced, behind, patience };
        let trace = Trace::open(path)?;
        if paced && trace.times.is_empty() {
            return Err(format!("{path}: its rows have no times").into());
        }
        let figures = sweep(&trace, &factors, run).map_err(|error| format!("{path}: {error}"))?;
        let name = short(path);
        if arguments.json {
            figures.iter().for_each(|of_factor| println!("{}", of_factor.json(name)));
        } else {
            table::print_row(name, &figures);
        }
    }
    Ok(())
}

/// The figures of one trace, in the order of `factors`.
fn sweep(trace: &Trace, factors: &[f64], run: Run) -> Result<Vec<Figures>, Failure> {
    workers::map(factors, |&factor| {
        measure(trace, factor, run).map_err(|error| format!("at factor {factor}: {error}").into())
    })
    .into_iter()
    .collect()
}

/// Every `.csv.gz` of the repository's folder, by name.
fn repository_traces() -> Result<Vec<String>, Box<dyn Error>> {
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(TRACES).map_err(|error| format!("{TRACES}: {error}"))? {
        let path = entry?.path().display().to_string();
        if path.ends_with(".csv.gz") {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

/// `gpt_train` for `traces/gpt_train.csv.gz`.
fn short(path: &str) -> &str {
    let name = Path::new(path).file_name().and_then(|name| name.to_str()).unwrap_or(path);
    name.split('.').next().unwrap_or(name)
}

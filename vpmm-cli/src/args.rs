//! The command line.

use std::num::NonZeroU32;

use clap::{Args, Parser, Subcommand};

use crate::backend::AllocatorList;
use crate::bench::CaseList;
use crate::bytes::{ByteCount, ByteCountError};
use crate::device::DeviceChoice;
use crate::serve::{ServeArgs, ServeBenchArgs, SnapshotArgs};

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  something failed: a check, an allocator, the device, a server, the output
  2  bad input or usage: a malformed trace, an unknown option, a bad VPMM_… variable
  3  out of memory: the allocator could not serve the trace or the case";

/// Replay allocation traces through GPU memory pools, measure these, look at devices, and own GPU
/// memory for other processes.
#[derive(Debug, Parser)]
#[command(name = "vpmm", version, after_help = EXIT_CODES)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What the command can do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Replay allocation traces and compare allocators.
    ///
    /// Reads RMM's CSV logs, plain or gzip: Thread, Time, Action, Pointer, Size and
    /// Stream, found by name in any order; Thread, Time and Stream may be missing, and
    /// other columns are not read. Each stream of the trace becomes a stream of the device.
    /// Allocations that the trace never frees are freed at its end, untimed.
    Replay(ReplayArgs),
    /// Find the smallest memory limit at which allocation traces complete.
    ///
    /// By bisection, to one granule of the device (2 MiB), on a fresh allocator each time.
    /// Completion is not quite monotonic in the limit: a few limits above the one that was
    /// found are tried as well, and those that fail are told.
    Fit(FitArgs),
    /// Measure what single calls of allocators cost.
    ///
    /// Cases: pair_512, pair_64KiB, pair_1MiB, pair_4MiB, pair_64MiB, random_4MiB,
    /// random_64MiB, live_100, live_10k, live_100k, live_1M, streams_1000, zombies_10k,
    /// threads_1, threads_2, threads_4, threads_8, threads_16, shared_stream_8, cross_stream,
    /// grow_1GiB, grow_512x2MiB, gather_1GiB. One operation is one allocation or one free. No work is enqueued on the
    /// device: these are the host's costs.
    Bench(BenchArgs),
    /// Show the driver, the devices and what they support.
    Info(InfoArgs),
    /// Own GPU memory for other processes: the GPU memory service.
    ///
    /// Weights outlive the worker that loaded them, and other workers map them instead of loading
    /// them again. Speaks the protocol V0 of the Python service, whose clients may connect. Ends at
    /// SIGTERM or SIGINT.
    Serve(ServeArgs),
    /// Save a layout of the GPU memory service into files, and load it again.
    Snapshot(SnapshotArgs),
    /// Measure what the GPU memory service costs its clients; one JSON object per case.
    ServeBench(ServeBenchArgs),
}

/// A number of bytes that is not 0, which some take for no limit and others for nothing at all.
pub(crate) fn some_bytes(text: &str) -> Result<ByteCount, String> {
    match text.parse() {
        Ok(ByteCount(0)) => Err("expected more than 0 bytes".to_owned()),
        read => read.map_err(|error: ByteCountError| error.to_string()),
    }
}

/// The arguments of `vpmm replay`.
#[derive(Args, Debug)]
#[command(after_help = EXIT_CODES)]
pub struct ReplayArgs {
    /// Traces to replay, each by itself; `-` is standard input.
    #[arg(value_name = "TRACE", required = true)]
    pub traces: Vec<String>,

    /// Where to run: auto (the first GPU, else the simulator), sim, or cuda:N.
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub device: DeviceChoice,

    /// Allocators to compare, separated by commas: default, paged, cuda-async, cuda-malloc, and
    /// resources and stacks of them, like limiting(1GiB,statistics(default)).
    #[arg(long, value_name = "NAMES", default_value = "default")]
    pub allocator: AllocatorList,

    /// The most device memory that an allocator may hold: 4096, 1.5GiB, 20GB.
    #[arg(long, value_name = "BYTES", value_parser = some_bytes)]
    pub limit: Option<ByteCount>,

    /// Run each trace N times on one allocator. The first pass is cold; ns per
    /// operation is the fastest later one's, or the only one's.
    #[arg(long, value_name = "N", default_value = "1")]
    pub repeat: NonZeroU32,

    /// Give each thread of the trace a thread of its own. Each keeps its order;
    /// a free waits for its allocation, and none runs more than 1024 rows ahead.
    #[arg(long)]
    pub threads: bool,

    /// Make each call at its time in the trace, to some 100 microseconds, and not
    /// as soon as the one before it is done. Waits are in no timing.
    #[arg(long)]
    pub paced: bool,

    /// Also say which call spent the most time in the driver, and how much: modelled
    /// on the simulator, measured on a GPU. A look after each call makes calls some
    /// tens of nanoseconds longer: measure ns per operation without.
    #[arg(long, conflicts_with_all = ["threads", "verify"])]
    pub longest: bool,

    /// Write a pattern into every allocation as device work, and check it before
    /// the free. Timings then hold no device work, but no overlap with it either.
    #[arg(long)]
    pub verify: bool,

    /// With --verify, write the words at multiples of BYTES, the first and the last
    /// one. Every word on a GPU, one in 1 MiB on the simulator, if not given.
    #[arg(long, value_name = "BYTES", requires = "verify")]
    pub verify_stride: Option<ByteCount>,

    /// Print one JSON object per trace and allocator, one per line.
    #[arg(long)]
    pub json: bool,
}

/// The arguments of `vpmm fit`.
#[derive(Args, Debug)]
#[command(after_help = EXIT_CODES)]
pub struct FitArgs {
    /// Traces, each by itself, in the format that replay reads; `-` is standard input.
    #[arg(value_name = "TRACE", required = true)]
    pub traces: Vec<String>,

    /// Where to run: auto (the first GPU, else the simulator), sim, or cuda:N.
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub device: DeviceChoice,

    /// Allocators to compare, separated by commas: default, paged, cuda-async, and resources and
    /// stacks of them, like limiting(1GiB,statistics(default)).
    #[arg(long, value_name = "NAMES", default_value = "default")]
    pub allocator: AllocatorList,

    /// Print one JSON object per trace and allocator, one per line.
    #[arg(long)]
    pub json: bool,
}

/// The arguments of `vpmm bench`.
#[derive(Args, Debug)]
#[command(after_help = EXIT_CODES)]
pub struct BenchArgs {
    /// Cases to run, separated by commas; all if not given.
    #[arg(long, value_name = "NAMES")]
    pub case: Option<CaseList>,

    /// Where to run: auto (the first GPU, else the simulator), sim, or cuda:N.
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub device: DeviceChoice,

    /// Allocators to compare, separated by commas: default, paged, cuda-async, cuda-malloc, and
    /// resources and stacks of them, like limiting(1GiB,statistics(default)).
    #[arg(long, value_name = "NAMES", default_value = "default")]
    pub allocator: AllocatorList,

    /// Do as little as shows that every case works. The figures mean nothing.
    #[arg(long)]
    pub quick: bool,

    /// Print one JSON object per case and allocator, one per line.
    #[arg(long)]
    pub json: bool,
}

/// The arguments of `vpmm info`.
#[derive(Args, Debug)]
#[command(after_help = EXIT_CODES)]
pub struct InfoArgs {
    /// auto: this machine's driver; sim: the simulator; cuda:N: one device.
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub device: DeviceChoice,

    /// Also measure what the driver's calls for virtual memory cost now, on handles of 2 MiB, 64 MiB and
    /// 1 GiB: a tenth of a second and 4 GiB of each device. On the simulator, what its model says.
    #[arg(long)]
    pub costs: bool,

    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_help_of_bench_names_every_case() {
        let help = Cli::command()
            .find_subcommand_mut("bench")
            .map(|bench| bench.render_long_help().to_string())
            .unwrap_or_default();
        for case in crate::bench::Case::ALL {
            let name = case.name();
            let names = help.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            assert!(names.into_iter().any(|word| word == name), "{name} is missing");
        }
    }

    #[test]
    fn defaults_are_one_cold_pass_of_the_default_pool() {
        let cli = Cli::parse_from(["vpmm", "replay", "a.csv"]);
        let Command::Replay(args) = cli.command else { panic!("a replay") };
        assert_eq!(args.allocator.0, [crate::backend::AllocatorSpec::Default]);
        assert_eq!((args.repeat.get(), args.device), (1, DeviceChoice::Auto));
        assert!(!args.threads && !args.verify && !args.json);
    }
}

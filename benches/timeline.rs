//! What a pool holds as a trace goes on, on the simulator: a row for each of some equal parts of its calls; and how
//! many calls had how much modelled driver time.
//!
//! ```sh
//! cargo run --release -p vpmm-harness --example timeline -- [OPTIONS] TRACE...
//! ```
//!
//! At full speed pools get no moves back with time unless told so, as in `sweep`; with `--paced` each call is made at its time.

#![forbid(unsafe_code)]

use std::error::Error;
use std::time::{Duration, Instant};

use clap::Parser;
use cuda_sim::{Costs, Simulator};
use vpmm::{Driver, Pool, PoolConfig};
use vpmm_cli::trace::{Action, Trace};

/// What a pool holds as a trace goes on.
#[derive(Parser)]
#[command(name = "timeline")]
struct Arguments {
    /// Traces, plain or gzip.
    #[arg(value_name = "TRACE", required = true)]
    traces: Vec<String>,
    /// Make each call at its time in the trace.
    #[arg(long)]
    paced: bool,
    /// Moves, and shorter extents, that each second allows a pool that is not paced.
    #[arg(long, value_name = "N", default_value = "0")]
    moves_per_second: u32,
    /// Rows of the table.
    #[arg(long, value_name = "N", default_value = "40")]
    rows: usize,
}

/// Bounds of the classes that calls are counted in by their driver time.
const SHORTER_THAN_MS: [f64; 4] = [1.0, 3.0, 5.0, 9.0];

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse();
    for path in &arguments.traces {
        println!("{path}");
        play(&Trace::open(path)?, &arguments)?;
    }
    Ok(())
}

fn play(trace: &Trace, arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let simulator = Simulator::builder().memory_bytes(281 << 30).costs(Costs::h200()).build()?;
    let device = Driver::new(simulator.driver())?.device(0)?;
    let mut config = PoolConfig::default();
    if !arguments.paced {
        config.moves_per_second = arguments.moves_per_second;
    }
    let pool = Pool::new(&device, &config)?;
    let streams = (0..trace.streams).map(|_| device.stream()).collect::<Result<Vec<_>, _>>()?;
    let mut live = vec![None; trace.allocations.len()];
    println!(
        "   call     live     peak     held by peak   small: live   held  in fronts   made  moved  driver ms"
    );
    let mut times = [0_u64; SHORTER_THAN_MS.len() + 1];
    let mut longest: f64 = 0.0;
    let part = trace.operations.len().div_ceil(arguments.rows.max(1));
    let start = Instant::now();
    for (at, operation) in trace.operations.iter().enumerate() {
        if let Some(time) = trace.times.get(at).filter(|_| arguments.paced) {
            let left = (start + *time).saturating_duration_since(Instant::now());
            if left > Duration::from_micros(200) {
                std::thread::sleep(left);
            }
        }
        let before = simulator.modelled_us();
        let (slot, stream) = (operation.slot as usize, &streams[operation.stream as usize]);
        match operation.action {
            Action::Allocate => {
                let bytes = usize::try_from(trace.allocations[slot].bytes)?;
                live[slot] = Some(pool.malloc(bytes, stream)?);
            }
            Action::Free => {
                if let Some(block) = live[slot].take() {
                    pool.free(block, stream)?;
                }
            }
        }
        let took_ms = (simulator.modelled_us() - before) / 1e3;
        times[SHORTER_THAN_MS.partition_point(|bound| *bound <= took_ms)] += 1;
        longest = longest.max(took_ms);
        if (at + 1) % part == 0 || at + 1 == trace.operations.len() {
            let stats = pool.stats();
            let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
            println!(
                "{:7} {:8.1} {:8.1} {:8.1} {:7.4} {:8.1} {:7.1} {:9.1} {:9} {:6} {:9.1}",
                at + 1,
                mib(stats.live_bytes),
                mib(stats.peak_live_bytes),
                mib(stats.mapped_bytes),
                stats.mapped_bytes as f64 / stats.peak_live_bytes as f64,
                mib(stats.small_live_bytes),
                mib(stats.small_mapped_bytes),
                mib(stats.cached_bytes),
                stats.extents_created,
                stats.extents_moved,
                simulator.modelled_us() / 1e3,
            );
        }
    }
    let names = SHORTER_THAN_MS.map(|bound| format!("under {bound} ms"));
    let names = names.iter().map(String::as_str).chain(["longer"]);
    let counts: Vec<String> =
        names.zip(times).map(|(name, calls)| format!("{name}: {calls}")).collect();
    println!("calls by driver time, {}; the longest {longest:.1} ms", counts.join(", "));
    Ok(())
}

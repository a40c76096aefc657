//! A program's allocations, logged in RMM's format, and replayed through two allocators with the
//! library behind the `vpmm` command: which one would need how much memory and time?
//!
//! ```sh
//! cargo run --example log_and_replay            # the GPU, or the simulator without one
//! cargo run --example log_and_replay -- --sim
//! ```
//!
//! The log is a file as any other: `vpmm replay FILE --allocator default,caching` says the same.

mod machine;

use std::error::Error;
use std::path::{Path, PathBuf};

use clap::Parser;
use machine::{Machine, ensure};
use vpmm::resource::{DeviceMalloc, LogFormat, Logging, MIN_ALIGN};
use vpmm::{Device, MemoryResource};
use vpmm_cli::args::Cli;
use vpmm_cli::command;
use vpmm_cli::exit::Exit;
use vpmm_cli::trace::Trace;

const MIB: usize = 1 << 20;
const BATCHES: usize = 24;
const LAYERS: usize = 8;

/// Batches that grow: each layer keeps its activations until the batch's end. What one batch has freed
/// is in pieces that are a little too small for the next. Returns how many calls were made.
fn train(memory: &dyn MemoryResource, device: &Device) -> vpmm::Result<usize> {
    let stream = device.stream()?;
    let mut calls = 0;
    for batch in 0..BATCHES {
        let bytes = |layer: usize| (batch + 1) * (layer + 1) * MIB / 2;
        let mut activations = Vec::with_capacity(LAYERS);
        for layer in 0..LAYERS {
            activations.push(memory.allocate(bytes(layer), MIN_ALIGN, stream.handle())?);
        }
        for (layer, ptr) in activations.into_iter().enumerate().rev() {
            memory.deallocate(ptr, bytes(layer), MIN_ALIGN, stream.handle())?;
        }
        calls += 2 * LAYERS;
    }
    Ok(calls)
}

/// A file of the log's, gone at the end of this.
struct LogFile(PathBuf);

impl LogFile {
    fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for LogFile {
    fn drop(&mut self) {
        // It is in the directory for temporary files: one that stays does no harm.
        let _ = std::fs::remove_file(&self.0);
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let machine = Machine::find()?;
    let name = format!("vpmm-log_and_replay-{}.csv", std::process::id());
    let file = LogFile(std::env::temp_dir().join(name));

    let memory = Logging::to_file(DeviceMalloc::new(&machine.device), LogFormat::Rmm, file.path())?;
    let calls = train(&memory, &machine.device)?;
    ensure(memory.lost_rows() == 0, "the disk had no room for some rows")?;
    drop(memory); // cuts the file to its rows
    machine.check()?;

    let path = file.path().to_str().ok_or("the temporary directory's name is no UTF-8")?;
    let trace = Trace::open(path)?;
    println!("{} calls logged, at most {} MiB", calls, trace.peak_live_bytes / MIB as u64);
    ensure(trace.operations.len() == calls, "the log has not as many rows as there were calls")?;
    ensure(trace.leaked.is_empty(), "the log has an allocation without a free")?;

    // `caching` is PyTorch's scheme. --verify writes into every allocation and checks it before the
    // free.
    let device = if machine.simulator.is_some() { "sim" } else { "cuda:0" };
    let words = ["vpmm", "replay", path, "--allocator", "default,caching", "--verify"];
    let cli = Cli::try_parse_from(words.into_iter().chain(["--device", device]))?;
    let mut table = Vec::new();
    let exit = command::run(cli, &mut table)?;
    println!("{}", String::from_utf8(table)?);
    ensure(exit == Exit::Done, "an allocator could not serve the log")
}

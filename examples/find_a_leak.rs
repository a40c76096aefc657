//! An allocation that is forgotten on one path, and found: `Tracking` with backtraces.
//!
//! ```sh
//! cargo run --example find_a_leak            # the GPU, or the simulator without one
//! cargo run --example find_a_leak -- --sim
//! ```

mod machine;

use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};

use machine::{Machine, ensure};
use vpmm::resource::{Finding, MIN_ALIGN, Report, Tracking, TrackingConfig};
use vpmm::{MemoryResource, Pool, PoolConfig, Stream};

const IMAGE_BYTES: usize = 3 << 20;

/// Takes scratch memory, and forgets it where the image is dark: the `return` passes the free by.
#[inline(never)]
fn sharpen(memory: &dyn MemoryResource, stream: &Stream, brightness: u32) -> vpmm::Result<()> {
    let scratch = memory.allocate(IMAGE_BYTES, MIN_ALIGN, stream.handle())?;
    if brightness < 10 {
        return Ok(());
    }
    // … kernels that use the scratch memory …
    memory.deallocate(scratch, IMAGE_BYTES, MIN_ALIGN, stream.handle())
}

/// Makes no mistake.
#[inline(never)]
fn blur(memory: &dyn MemoryResource, stream: &Stream) -> vpmm::Result<()> {
    let scratch = memory.allocate(IMAGE_BYTES / 4, MIN_ALIGN, stream.handle())?;
    memory.deallocate(scratch, IMAGE_BYTES / 4, MIN_ALIGN, stream.handle())
}

/// The functions of a backtrace that are in this file, each with its place. Functions have their full
/// names or short ones, as the build's debug information has them.
fn own_frames(backtrace: &str) -> impl Iterator<Item = (&str, &str)> {
    let lines = || backtrace.lines().map(str::trim);
    lines().zip(lines().skip(1)).filter(|(_, place)| place.contains("find_a_leak.rs:"))
}

fn main() -> Result<(), Box<dyn Error>> {
    let machine = Machine::find()?;
    let stream = machine.device.stream()?;

    // What is never freed is told at the end of the adaptor, by default on the standard error output
    // with whole backtraces. A function may take it instead: here it prints less, and keeps it.
    let leaks = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&leaks);
    let mut config = TrackingConfig::default();
    config.backtraces = true;
    config.report = Report::Callback(Arc::new(move |finding| match finding {
        Finding::Leaks(outstanding) => {
            let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
            kept.extend(outstanding.iter().cloned());
        }
        other => println!("{other}"),
    }));
    let memory = Tracking::new(Pool::new(&machine.device, &PoolConfig::default())?, config);

    for brightness in [200, 90, 5, 120] {
        blur(&memory, &stream)?;
        sharpen(&memory, &stream, brightness)?;
    }

    // While the program runs, the same list can be asked for.
    println!("still allocated after four images: {} bytes", memory.outstanding_bytes());
    drop(memory);

    let leaks = leaks.lock().unwrap_or_else(PoisonError::into_inner);
    for leak in leaks.iter() {
        println!("never freed: {} bytes at {}, allocation {}", leak.bytes, leak.ptr, leak.number);
        let backtrace = leak.backtrace.as_ref().ok_or("backtraces are on")?.to_string();
        for (function, place) in own_frames(&backtrace) {
            println!("    {function} {place}");
        }
        ensure(
            own_frames(&backtrace).any(|(function, _)| function.ends_with("sharpen")),
            "the backtrace does not name the function that forgot",
        )?;
    }
    // Two allocations for each image, from 0: the sixth is the third image's in `sharpen`.
    let found: Vec<_> = leaks.iter().map(|leak| (leak.number, leak.bytes)).collect();
    ensure(found == [(5, IMAGE_BYTES)], "the leak is not the one that was made")?;
    machine.check()
}

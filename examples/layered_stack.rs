//! Resources and adaptors on one another: a stack, printed as a tree, used, and brought to its limit.
//!
//! ```sh
//! cargo run --example layered_stack            # the GPU, or the simulator without one
//! cargo run --example layered_stack -- --sim
//! ```

mod machine;

use std::error::Error;
use std::sync::Arc;

use machine::{Machine, ensure};
use vpmm::resource::{Binning, CoalescingConfig, CoalescingPool, DeviceMalloc};
use vpmm::resource::{Limiting, Statistics};
use vpmm::{DeviceBuffer, DeviceVec, MemoryResource};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let machine = Machine::find()?;
    let device = &machine.device;
    let stream = device.stream()?;

    // From below: the driver's memory, at most 64 MiB of it; a pool that keeps what is freed; bins for
    // small requests; counts of what the program asks for. Each owns what it stands on; an `Arc` at
    // the top is for many owners.
    let limited = Limiting::new(DeviceMalloc::new(device), 64 * MIB as u64);
    let pool = CoalescingPool::new(limited, device, &CoalescingConfig::default())?;
    let bins = Binning::with_powers(pool, device, 11..=12)?; // of 2 KiB and of 4 KiB
    let memory = Arc::new(Statistics::new(bins));
    println!("{}\n", memory.describe());

    // Containers take any resource. Each frees its memory at its end, on its stream.
    let weights = DeviceVec::filled(0.5_f32, 4 * MIB, &stream, memory.clone())?;
    let biases = DeviceVec::filled(1.0_f32, KIB, &stream, memory.clone())?;
    println!("loaded: {}", memory.counters());

    // What one part of the program does, counted by itself.
    memory.push();
    for _ in 0..10 {
        let mut step = DeviceVec::uninit(2 * MIB, &stream, memory.clone())?;
        step.as_mut_slice().copy_from(&weights.slice(..2 * MIB)?)?;
        ensure(step.get(step.len() - 1)? == 0.5, "a copy of the weights is not what they are")?;
    }
    let steps = memory.pop().ok_or("counting had been pushed")?;
    println!("10 steps: {steps}");
    ensure(steps.bytes.peak == 8 * MIB as i64, "one step at a time has 8 MiB")?;

    // The layers below stay within reach: the pool has kept the memory of the steps.
    let bins = memory.upstream();
    let pool = bins.upstream();
    let limited = pool.upstream();
    println!("bins of {:?} bytes", bins.bins());
    println!(
        "the pool holds {} MiB and lends {} MiB; the limit is {} MiB",
        pool.pool_bytes() >> 20,
        pool.live_bytes() >> 20,
        limited.limit_bytes() >> 20
    );

    // Too much: an error as a value. It says what was asked for and what was left, and nothing has
    // changed.
    let before = memory.counters();
    match DeviceBuffer::uninit(100 * MIB, &stream, memory.clone()) {
        Err(error) if error.is_out_of_memory() => println!("refused: {error}"),
        Err(error) => return Err(error.into()),
        Ok(_) => return Err("100 MiB were found under a limit of 64".into()),
    }
    ensure(memory.counters() == before, "a request that failed was counted")?;
    ensure(biases.get(KIB - 1)? == 1.0, "a request that failed has touched other memory")?;

    drop((weights, biases));
    println!("at the end: {}", memory.counters());
    ensure(memory.counters().bytes.current == 0, "something was not freed")?;
    machine.check()
}

//! Random sizes round after round on one pool: what a loop at full speed still makes and moves once it has
//! gone round. A round is that of `random_4MiB` or `random_64MiB` of `vpmm bench`, with other numbers.
//!
//! ```sh
//! cargo run --release -p vpmm-harness --example rounds -- 4MiB|64MiB [ROUNDS]
//! ```
//!
//! On the GPU if there is one, else on the simulator, whose calls take other times.

mod rig;

use std::process::ExitCode;
use std::time::Instant;

use rig::program::Program;
use rig::{MIB, Machine};
use vpmm::{DevicePtr, PoolConfig};

/// Calls in a round.
const CALLS: usize = 200_000;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let sizes = match arguments.next().as_deref() {
        Some("4MiB") => Some((1, 4 * MIB, 2_500)),
        Some("64MiB") => Some((2 * MIB, 64 * MIB, 100)),
        _ => None,
    };
    let rounds = arguments.next().map_or(Some(100), |rounds| rounds.parse::<u32>().ok());
    let (Some((least, most, live)), Some(rounds)) = (sizes, rounds) else {
        eprintln!("rounds 4MiB|64MiB [ROUNDS]");
        return ExitCode::from(2);
    };
    let machine = Machine::find();
    let stream = machine.handles()[0];
    // At its own pace: time makes up for moves, as for any program.
    let pool = vpmm::Pool::new(&machine.device, &PoolConfig::default()).expect("a pool");
    let Program { steps, .. } = Program::random(least, most, live, CALLS);
    let mut slots: Vec<Option<DevicePtr>> = vec![None; live];
    println!("round   ns/op  driver calls  made  moved  held by peak");
    for round in 0..rounds {
        let (before, calls) = (pool.stats(), machine.device.driver().calls());
        let begin = Instant::now();
        for step in &steps {
            match step.bytes {
                Some(bytes) => slots[step.slot] = Some(pool.malloc(bytes, stream).expect("memory")),
                None => {
                    let block = slots[step.slot].take().expect("it is live");
                    pool.free(block, stream).expect("it is live");
                }
            }
        }
        let each = begin.elapsed().as_nanos() as f64 / steps.len() as f64;
        let calls = machine.device.driver().calls().since(&calls).total();
        let after = pool.stats();
        println!(
            "{round:5} {each:7.1} {calls:13} {:5} {:6} {:13.3}",
            after.extents_created - before.extents_created,
            after.extents_moved - before.extents_moved,
            after.mapped_bytes as f64 / after.peak_live_bytes as f64,
        );
    }
    ExitCode::SUCCESS
}

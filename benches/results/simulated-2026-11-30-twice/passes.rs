//! Replays each trace a number of times on one pool on the simulator, as fast as it goes: what each pass takes,
//! moves and holds, as lines of JSON. `passes PASSES LABEL TRACE…`; with PRIMED a block of that part of what is live at
//! the peak is taken and given back first.

use cuda_sim::{Costs, Simulator};
use vpmm::{Driver, Pool, PoolConfig};
use vpmm_cli::trace::{Action, Trace};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [passes, label, paths @ ..] = &arguments[..] else { return Err("PASSES LABEL TRACE…".into()) };
    for path in paths {
        let trace = Trace::open(path)?;
        let simulator = Simulator::builder().memory_bytes(141 << 30).costs(Costs::h200()).build()?;
        let driver = Driver::new(simulator.driver())?;
        let device = driver.device(0)?;
        let pool = Pool::new(&device, &PoolConfig::default())?;
        let streams = (0..trace.streams).map(|_| device.stream()).collect::<Result<Vec<_>, _>>()?;
        let mut live = vec![None; trace.allocations.len()];
        if let Ok(part) = std::env::var("PRIMED") {
            let bytes = (part.parse::<f64>()? * trace.peak_live_bytes as f64) as usize;
            pool.free(pool.malloc(bytes, &streams[0])?, &streams[0])?;
        }
        for pass in 1..=passes.parse()? {
            let (before, modelled) = (driver.calls(), simulator.modelled_us());
            let begin = std::time::Instant::now();
            for operation in &trace.operations {
                let (slot, stream) = (operation.slot as usize, &streams[operation.stream as usize]);
                match operation.action {
                    Action::Allocate => {
                        let bytes = trace.allocations[slot].bytes as usize;
                        live[slot] = Some(pool.malloc(bytes, stream)?);
                    }
                    Action::Free => {
                        if let Some(block) = live[slot].take() {
                            pool.free(block, stream)?;
                        }
                    }
                }
            }
            let took = begin.elapsed().as_nanos() as f64 / trace.operations.len() as f64;
            for (slot, left) in live.iter_mut().enumerate() {
                if let Some(block) = left.take() {
                    pool.free(block, &streams[trace.allocations[slot].stream as usize])?;
                }
            }
            let name = path.rsplit('/').next().unwrap_or(path).trim_end_matches(".csv.gz");
            println!(
                r#"{{"trace": "{name}", "worth": "{label}", "pass": {pass}, "ns_per_op": {took:.1}, "maps": {}, "driver_ms": {:.2}, "held": {:.4}}}"#,
                driver.calls().since(&before).count("cuMemMap"),
                (simulator.modelled_us() - modelled) / 1000.0,
                pool.stats().peak_mapped_bytes as f64 / trace.peak_live_bytes as f64,
            );
        }
    }
    Ok(())
}

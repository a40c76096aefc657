//! One replay: a trace through a fresh pool on a fresh simulator.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use cuda_sim::{Costs, Simulator};
use vpmm::{DevicePtr, Driver, Pool, PoolConfig, Stream};
use vpmm_cli::trace::{Action, Trace};

use crate::Failure;
use crate::behind::Behind;

/// The simulated device: two H200s' worth, so that scaled traces have room to grow.
pub(crate) const DEVICE_BYTES: u64 = 281 << 30;

/// What a replay came to. Times are modelled driver time.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Outcome {
    /// All passes.
    pub(crate) driver_us: f64,
    /// The last pass.
    pub(crate) last_pass_us: f64,
    /// The longest call of malloc or free in any pass.
    pub(crate) longest_us: f64,
    /// The most that the pool held.
    pub(crate) peak_mapped_bytes: u64,
}

/// How a trace is replayed.
#[derive(Clone, Copy)]
pub(crate) struct Run {
    pub(crate) passes: NonZeroU32,
    pub(crate) moves_per_second: u32,
    /// Whether each call waits for its time in the trace, where no limit is set.
    pub(crate) paced: bool,
    /// By how many calls the GPU is behind on the first stream, where no limit is set.
    pub(crate) behind: Option<u64>,
    pub(crate) patience: Duration,
}

/// Replays `trace` so many times on one pool, or tells with `None` that `limit_bytes` is too little.
/// What the trace never frees is freed after each pass.
pub(crate) fn replay(
    trace: &Trace,
    limit_bytes: Option<u64>,
    run: Run,
) -> Result<Option<Outcome>, Failure> {
    let simulator = Simulator::builder().memory_bytes(DEVICE_BYTES).costs(Costs::h200()).build()?;
    let device = Driver::new(simulator.driver())?.device(0)?;
    let mut config = PoolConfig::default();
    config.limit_bytes = limit_bytes;
    config.moves_per_second = run.moves_per_second;
    config.patience = run.patience;
    let pool = Pool::new(&device, &config)?;
    let streams = (0..trace.streams).map(|_| device.stream()).collect::<Result<Vec<_>, _>>()?;
    let behind = run.behind.filter(|_| limit_bytes.is_none() && trace.streams > 0);
    let mut player = Player {
        simulator: &simulator,
        trace,
        pool: &pool,
        streams: &streams,
        live: vec![None; trace.allocations.len()],
        longest_us: 0.0,
        paced: run.paced && limit_bytes.is_none(),
        behind: behind.map(|calls| Behind::new(&simulator, &streams[0], calls)),
    };
    let start = simulator.modelled_us();
    let mut pass_start = start;
    for _ in 0..run.passes.get() {
        pass_start = simulator.modelled_us();
        let completed = player.pass()?;
        player.free_rest()?;
        if !completed {
            return Ok(None);
        }
    }
    let end = simulator.modelled_us();
    Ok(Some(Outcome {
        driver_us: end - start,
        last_pass_us: end - pass_start,
        longest_us: player.longest_us,
        peak_mapped_bytes: pool.stats().peak_mapped_bytes,
    }))
}

/// Sleeps where there is enough time for it: the calls of one burst come together anyway.
fn wait_until(time: Instant) {
    const WORTH_IT: Duration = Duration::from_micros(200);
    let left = time.saturating_duration_since(Instant::now());
    if left >= WORTH_IT {
        std::thread::sleep(left);
    }
}

/// A trace being replayed.
struct Player<'a> {
    simulator: &'a Simulator,
    trace: &'a Trace,
    pool: &'a Pool,
    streams: &'a [Stream],
    /// Where each allocation of the trace is, while it is live.
    live: Vec<Option<DevicePtr>>,
    longest_us: f64,
    paced: bool,
    behind: Option<Behind<'a>>,
}

impl Player<'_> {
    /// The trace once, to its end or to where memory runs out: `false` there.
    fn pass(&mut self) -> Result<bool, Failure> {
        let mut before = self.simulator.modelled_us();
        let start = Instant::now();
        for (at, operation) in self.trace.operations.iter().enumerate() {
            if self.paced {
                self.trace.times.get(at).into_iter().for_each(|time| wait_until(start + *time));
            }
            let slot = operation.slot as usize;
            match operation.action {
                Action::Allocate => {
                    if !self.allocate(slot, operation.stream)? {
                        return Ok(false);
                    }
                }
                Action::Free => self.free(slot, operation.stream)?,
            }
            if let Some(behind) = &mut self.behind {
                behind.step(operation.stream == 0)?;
            }
            let after = self.simulator.modelled_us();
            self.longest_us = self.longest_us.max(after - before);
            before = after;
        }
        Ok(true)
    }

    fn allocate(&mut self, slot: usize, stream: u32) -> Result<bool, Failure> {
        let bytes = usize::try_from(self.trace.allocations[slot].bytes)?;
        match self.pool.malloc(bytes, &self.streams[stream as usize]) {
            Ok(block) => self.live[slot] = Some(block),
            Err(error) if error.is_out_of_memory() => return Ok(false),
            Err(error) => return Err(error.into()),
        }
        Ok(true)
    }

    /// Nothing where the allocation is not live.
    fn free(&mut self, slot: usize, stream: u32) -> Result<(), Failure> {
        if let Some(block) = self.live[slot].take() {
            if self.behind.is_some() && stream != 0 {
                self.pool.record_stream(block, &self.streams[0])?;
            }
            self.pool.free(block, &self.streams[stream as usize])?;
        }
        Ok(())
    }

    /// Frees what is still live, on the streams it was allocated on.
    fn free_rest(&mut self) -> Result<(), Failure> {
        (0..self.live.len())
            .try_for_each(|slot| self.free(slot, self.trace.allocations[slot].stream))
    }
}

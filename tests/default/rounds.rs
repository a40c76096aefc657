//! Programs that go round and round: recorded ones, replayed on one pool.

use cuda_sim::Simulator;
use vpmm::{DevicePtr, Driver, Pool, PoolConfig, Stream};
use vpmm_cli::trace::{Action, Trace};

/// A recording on a pool for which time does not pass, so that it moves and grows the same in each run.
struct Rounds {
    trace: Trace,
    pool: Pool,
    streams: Vec<Stream>,
    sim: Simulator,
}

impl Rounds {
    fn of(name: &str) -> Self {
        let sim = Simulator::builder().build().unwrap();
        let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
        let mut config = PoolConfig::default();
        config.moves_per_second = 0;
        let pool = Pool::new(&device, &config).unwrap();
        let path = format!("{}/traces/{name}.csv.gz", env!("CARGO_MANIFEST_DIR"));
        let trace = Trace::open(&path).unwrap();
        let streams = (0..trace.streams).map(|_| device.stream().unwrap()).collect();
        Self { trace, pool, streams, sim }
    }

    /// The recording once; what it does not free goes at its end. How many extents were made or moved.
    fn round(&self) -> u64 {
        let changed = || {
            let stats = self.pool.stats();
            stats.extents_created + stats.extents_moved
        };
        let before = changed();
        let mut live: Vec<Option<DevicePtr>> = vec![None; self.trace.allocations.len()];
        for operation in &self.trace.operations {
            let stream = &self.streams[operation.stream as usize];
            let slot = operation.slot as usize;
            match operation.action {
                Action::Allocate => {
                    let bytes = usize::try_from(self.trace.allocations[slot].bytes).unwrap();
                    live[slot] = Some(self.pool.malloc(bytes, stream).unwrap());
                }
                Action::Free => {
                    live[slot]
                        .take()
                        .into_iter()
                        .for_each(|ptr| self.pool.free(ptr, stream).unwrap());
                }
            }
        }
        for (allocation, ptr) in self.trace.allocations.iter().zip(live) {
            let stream = &self.streams[allocation.stream as usize];
            ptr.into_iter().for_each(|ptr| self.pool.free(ptr, stream).unwrap());
        }
        changed() - before
    }

    fn held(&self) -> f64 {
        self.pool.stats().peak_mapped_bytes as f64 / self.trace.peak_live_bytes as f64
    }

    fn end(self) {
        drop(self.pool);
        self.sim.assert_clean();
    }
}

/// The same requests find the same gaps once a round has found all it needs, because fronts leave little
/// of one round to the next.
#[test]
fn trainings_settle() {
    for name in ["gpt_train", "resnet_train"] {
        let rounds = Rounds::of(name);
        let changes: Vec<u64> = (0..30).map(|_| rounds.round()).collect();
        let late: u64 = changes[20..].iter().sum();
        assert!(late < changes[0] / 50, "{name}: {changes:?}");
        assert!(rounds.held() < 1.03, "{name} holds {}", rounds.held());
        rounds.end();
    }
}

/// Requests that never settle in little more than is live are given more, but not ever more.
#[test]
fn a_restless_program_stops_growing() {
    let rounds = Rounds::of("cupy_mix");
    let changes: Vec<u64> = (0..40).map(|_| rounds.round()).collect();
    assert!(rounds.held() < 1.65, "holds {} after {changes:?}", rounds.held());
    rounds.end();
}

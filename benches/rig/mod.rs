//! What the benchmarks run on: the GPU if there is one, else the simulator, whose calls cost other
//! times than a real driver's. Figures of the two do not compare, so names say which is which.

#![allow(dead_code, reason = "each benchmark uses a part")]

pub(crate) mod program;

use std::mem::ManuallyDrop;
use std::sync::Once;
use std::time::{Duration, Instant};

use vpmm::{Device, DevicePtr, Driver, PagedConfig, Pool, PoolConfig, Stream, StreamHandle};

pub(crate) const KIB: usize = 1 << 10;
pub(crate) const MIB: usize = 1 << 20;
pub(crate) const GIB: usize = 1 << 30;

/// A device and two streams of it.
pub(crate) struct Machine {
    /// `gpu` or `sim`.
    pub(crate) name: &'static str,
    pub(crate) device: Device,
    pub(crate) streams: [Stream; 2],
}

impl Machine {
    /// The GPU, or the simulator where the driver says why there is none.
    pub(crate) fn find() -> Self {
        match Driver::load() {
            Ok(driver) => Self::new("gpu", driver),
            Err(reason) => {
                static SAID: Once = Once::new();
                SAID.call_once(|| println!("on the simulator: {reason}"));
                let driver = Driver::new(simulator().driver());
                Self::new("sim", driver.expect("the simulated driver starts"))
            }
        }
    }

    pub(crate) fn new(name: &'static str, driver: Driver) -> Self {
        let device = driver.device(0).expect("device 0");
        let stream = || device.stream().expect("a stream");
        Self { name, streams: [stream(), stream()], device }
    }

    pub(crate) fn is_gpu(&self) -> bool {
        self.name == "gpu"
    }

    pub(crate) fn synchronize(&self) {
        self.device.synchronize().expect("the device finishes");
    }

    /// Has a GPU's driver be done with what earlier pools gave back: it is scrubbed in the background, 2.5 ms for each
    /// GiB, and whoever creates memory next does the books of it. Then the code of both has run a moment ago.
    pub(crate) fn settle(&self, wake: impl Fn()) {
        if self.is_gpu() {
            for _ in 0..2 {
                let since = Instant::now();
                // Not asleep: a core that has slept is a slow one at first.
                while since.elapsed() < Duration::from_millis(5) {
                    std::hint::spin_loop();
                }
                wake();
            }
        }
    }

    /// Handles that know their stream, so that the pool asks the driver nothing about it.
    pub(crate) fn handles(&self) -> [StreamHandle; 2] {
        [self.streams[0].handle(), self.streams[1].handle()]
    }
}

/// A simulator without modelled costs and without the race detector: as fast as it gets. Its
/// device has 32 GiB: callgrind cannot map as much as a large device's memory.
pub(crate) fn simulator() -> cuda_sim::Simulator {
    cuda_sim::Simulator::builder()
        .memory_bytes(32 << 30)
        .detect_races(false)
        .costs(cuda_sim::Costs::free())
        .build()
        .expect("a simulator")
}

/// How a pool is set up.
#[derive(Clone, Copy)]
pub(crate) enum Profile {
    /// Multiples of 512 bytes.
    Default,
    /// Pages of 2 MiB.
    Paged,
}

impl Profile {
    pub(crate) const ALL: [Self; 2] = [Self::Default, Self::Paged];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Paged => "paged",
        }
    }

    /// A pool that holds nothing yet.
    pub(crate) fn pool(self, device: &Device) -> Pool {
        self.limited_pool(device, None)
    }

    /// A pool that may hold so much and no more, so that it moves memory rather than grow.
    pub(crate) fn limited_pool(self, device: &Device, limit_bytes: Option<u64>) -> Pool {
        match self {
            Self::Default => {
                let mut config = PoolConfig::default();
                // The same calls do the same every time, however long they take.
                config.moves_per_second = 0;
                config.limit_bytes = limit_bytes;
                Pool::new(device, &config)
            }
            Self::Paged => {
                let mut config = PagedConfig::default();
                config.limit_bytes = limit_bytes;
                Pool::paged(device, &config)
            }
        }
        .expect("a pool")
    }
}

/// Where memory is allocated or freed: the index of one of the machine's streams.
pub(crate) type Lane = usize;

/// One allocator under measurement. Failures end the benchmark: there is memory for all of them.
pub(crate) trait Subject {
    /// What an allocation is known by.
    type Block: Copy;

    fn malloc(&mut self, bytes: usize, lane: Lane) -> Self::Block;
    fn free(&mut self, block: Self::Block, lane: Lane);
}

/// The pool under measurement, on the machine's two streams, or on those that a program has.
pub(crate) struct Vpmm<H = [StreamHandle; 2]> {
    pub(crate) pool: ManuallyDrop<Pool>,
    handles: H,
}

impl Vpmm {
    pub(crate) fn new(pool: Pool, machine: &Machine) -> Self {
        Self::on(pool, machine.handles())
    }
}

impl<H> Vpmm<H> {
    pub(crate) fn on(pool: Pool, handles: H) -> Self {
        Self { pool: ManuallyDrop::new(pool), handles }
    }
}

/// What a case has not freed goes with the pool, and is not in the way of the next one.
impl<H> Drop for Vpmm<H> {
    fn drop(&mut self) {
        // SAFETY: the pool is not used after.
        let pool = unsafe { ManuallyDrop::take(&mut self.pool) };
        // Refused only where there is another handle, which then ends it.
        let _ = pool.destroy();
    }
}

impl<H: AsRef<[StreamHandle]>> Subject for Vpmm<H> {
    type Block = DevicePtr;

    fn malloc(&mut self, bytes: usize, lane: Lane) -> DevicePtr {
        self.pool.malloc(bytes, self.handles.as_ref()[lane]).expect("memory")
    }

    fn free(&mut self, block: DevicePtr, lane: Lane) {
        self.pool.free(block, self.handles.as_ref()[lane]).expect("a live pointer");
    }
}

/// Xorshift: the same sequence in every run. `vpmm bench` and `benches/peers` draw others.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new() -> Self {
        Self(7)
    }

    /// Uniform in `least..=most`.
    pub(crate) fn between(&mut self, least: usize, most: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        least + (self.0 % (most - least + 1) as u64) as usize
    }
}

/// Allocations of random sizes; a step frees a random one and allocates another in its place.
pub(crate) struct Churn<S: Subject> {
    pub(crate) subject: S,
    live: Vec<S::Block>,
    sizes: [usize; 2],
    random: Random,
}

impl<S: Subject> Churn<S> {
    pub(crate) fn new(mut subject: S, count: usize, least: usize, most: usize) -> Self {
        let mut random = Random::new();
        let live = (0..count).map(|_| subject.malloc(random.between(least, most), 0)).collect();
        Self { subject, live, sizes: [least, most], random }
    }

    /// One free and one malloc.
    pub(crate) fn step(&mut self) {
        let at = self.random.between(0, self.live.len() - 1);
        self.subject.free(self.live[at], 0);
        let bytes = self.random.between(self.sizes[0], self.sizes[1]);
        self.live[at] = self.subject.malloc(bytes, 0);
    }
}

/// Eight allocations of 4 MiB in a ring. For 64 steps all are allocated on one stream and freed on
/// the other, then the streams change places: so nearly every allocation needs memory that the
/// other stream has freed.
pub(crate) struct Ring<S: Subject> {
    pub(crate) subject: S,
    blocks: [(S::Block, Lane); 8],
    steps: usize,
}

impl<S: Subject> Ring<S> {
    const BYTES: usize = 4 * MIB;
    const PHASE: usize = 64;

    pub(crate) fn new(mut subject: S) -> Self {
        let blocks = std::array::from_fn(|_| (subject.malloc(Self::BYTES, 1), 1));
        Self { subject, blocks, steps: 0 }
    }

    /// One free and one malloc.
    pub(crate) fn step(&mut self) {
        let lane = self.steps / Self::PHASE % 2;
        let at = self.steps % self.blocks.len();
        let (block, allocated_on) = self.blocks[at];
        self.subject.free(block, 1 - allocated_on);
        self.blocks[at] = (self.subject.malloc(Self::BYTES, lane), lane);
        self.steps += 1;
    }
}

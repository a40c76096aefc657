//! Host time of the paged profile: a hit, best fit among many free regions, and phase 2.
//!
//! On the GPU if there is one, else on the simulator, whose calls cost other times than a real
//! driver's: figures of the two do not compare, and the names say which is which.
//!
//! One iteration is one allocation or one free, except in `gather`, where it is one request that
//! moves pages.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use vpmm::{Device, DevicePtr, Driver, PagedConfig, Pool, Stream};

const PAGE: usize = 2 << 20;

struct Bench {
    name: &'static str,
    device: Device,
    stream: Stream,
}

impl Bench {
    fn new() -> Self {
        let (name, driver) = match Driver::load() {
            Ok(driver) => ("gpu", driver),
            Err(reason) => {
                println!("on the simulator: {reason}");
                let sim = cuda_sim::Simulator::builder().detect_races(false).build();
                let driver = sim.expect("a simulator").driver();
                ("sim", Driver::new(driver).expect("the simulated driver starts"))
            }
        };
        let device = driver.device(0).expect("device 0");
        let stream = device.stream().expect("a stream");
        Self { name, device, stream }
    }

    fn pool(&self, pages: usize) -> Pool {
        let mut config = PagedConfig::default();
        config.initial_pages = pages as u64;
        Pool::paged(&self.device, &config).expect("a pool")
    }

    fn malloc(&self, pool: &Pool, pages: usize) -> DevicePtr {
        pool.malloc(pages * PAGE, &self.stream).expect("memory")
    }

    fn free(&self, pool: &Pool, ptr: DevicePtr) {
        pool.free(ptr, &self.stream).expect("a live pointer");
    }
}

/// Xorshift: the same sequence in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }
}

/// Allocate and free one size: the first fit every time.
fn pair(criterion: &mut Criterion) {
    let bench = Bench::new();
    let mut group = criterion.benchmark_group(format!("{}/pair", bench.name));
    group.throughput(Throughput::Elements(1));
    for (name, pages) in [("2MiB", 1), ("64MiB", 32)] {
        let pool = bench.pool(64);
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|iterations| {
                let start = Instant::now();
                for _ in 0..iterations.div_ceil(2) {
                    let ptr = black_box(bench.malloc(&pool, pages));
                    bench.free(&pool, ptr);
                }
                start.elapsed()
            });
        });
    }
}

/// Free a random allocation and allocate its size again, among many live ones of 1 to 4 pages.
fn random(criterion: &mut Criterion) {
    let bench = Bench::new();
    let mut group = criterion.benchmark_group(format!("{}/random", bench.name));
    group.throughput(Throughput::Elements(1));
    for live in [100, 1_000, 10_000] {
        let pool = bench.pool(live * 4);
        let mut random = Random(7);
        let mut held: Vec<(DevicePtr, usize)> = (0..live)
            .map(|_| {
                let pages = 1 + random.below(4);
                (bench.malloc(&pool, pages), pages)
            })
            .collect();
        group.bench_function(format!("{live}_live"), |bencher| {
            bencher.iter_custom(|iterations| {
                let start = Instant::now();
                for _ in 0..iterations.div_ceil(2) {
                    let at = random.below(live);
                    bench.free(&pool, held[at].0);
                    held[at].0 = bench.malloc(&pool, held[at].1);
                }
                start.elapsed()
            });
        });
        pool.destroy().expect("the only handle");
    }
}

/// A request for 64 pages that are free one by one: 64 pages mapped elsewhere, none made.
fn gather(criterion: &mut Criterion) {
    let bench = Bench::new();
    let mut group = criterion.benchmark_group(format!("{}/gather", bench.name));
    group.sample_size(10);
    group.bench_function("64x2MiB", |bencher| {
        bencher.iter_custom(|iterations| {
            let mut spent = Duration::ZERO;
            for _ in 0..iterations {
                let pool = bench.pool(128);
                let held: Vec<_> = (0..128).map(|_| bench.malloc(&pool, 1)).collect();
                held.iter().step_by(2).for_each(|ptr| bench.free(&pool, *ptr));
                bench.stream.synchronize().expect("the stream finishes");
                let start = Instant::now();
                black_box(bench.malloc(&pool, 64));
                spent += start.elapsed();
                assert_eq!((pool.stats().pages_moved, pool.stats().pages_created), (64, 128));
                pool.destroy().expect("the only handle");
            }
            spent
        });
    });
}

criterion_group!(benches, pair, random, gather);
criterion_main!(benches);

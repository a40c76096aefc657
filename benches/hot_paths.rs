//! Host time of the pool's paths, from a hit in the front to the movement of memory, beside
//! baselines that do the same on the same sizes (see `baselines`).
//!
//! One element is one malloc or one free, so compare `time / elements`; in `growth` and `movement`
//! an iteration is one pool made anew, and only its requests are timed.

mod baselines;
mod rig;

use std::hint::black_box;
use std::time::{Duration, Instant};

use baselines::{BestFit, CudaMalloc, CudaMallocAsync, Offset, TwoLevel};
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main};
use rig::{Churn, GIB, KIB, MIB, Machine, Profile, Ring, Subject, Vpmm};

type Group<'a> = BenchmarkGroup<'a, WallTime>;

/// Runs one benchmark on every allocator: `$run` is called with the group, the allocator's name and
/// a function that makes one.
macro_rules! on_every_subject {
    ($machine:expr, $group:expr, $run:expr) => {{
        let machine: &Machine = $machine;
        for profile in Profile::ALL {
            let make = || Vpmm::new(profile.pool(&machine.device), machine);
            $run($group, profile.name(), make);
        }
        $run($group, "btree-best-fit", BestFit::new);
        $run($group, "offset-allocator", Offset::new);
        $run($group, "rlsf", TwoLevel::new);
        if machine.is_gpu() {
            $run($group, "cuda-async", || CudaMallocAsync::new(machine));
            $run($group, "cuda-malloc", || CudaMalloc::new(machine));
        }
    }};
}

fn group<'a>(criterion: &'a mut Criterion, machine: &Machine, name: &str) -> Group<'a> {
    let mut group = criterion.benchmark_group(format!("{}/{name}", machine.name));
    group.warm_up_time(Duration::from_millis(500));
    group.measurement_time(Duration::from_secs(2));
    group.sample_size(20);
    group
}

/// Times `iterations` of a step; what it works on was made, and warmed up, before.
fn timed(iterations: u64, mut step: impl FnMut()) -> Duration {
    let start = Instant::now();
    for _ in 0..iterations {
        step();
    }
    start.elapsed()
}

fn pair<S: Subject>(group: &mut Group<'_>, name: String, make: impl Fn() -> S, bytes: usize) {
    group.throughput(Throughput::Elements(2));
    let mut subject = make();
    group.bench_function(name, |bencher| {
        bencher.iter_custom(|iterations| {
            timed(iterations, || {
                let block = black_box(subject.malloc(bytes, 0));
                subject.free(block, 0);
            })
        });
    });
}

/// Allocate and free one size again and again: the front's hit.
fn front_hit(criterion: &mut Criterion) {
    let machine = Machine::find();
    let mut group = group(criterion, &machine, "front_hit");
    for (size, bytes) in [("512", 512), ("1MiB", MIB), ("64MiB", 64 * MIB)] {
        on_every_subject!(&machine, &mut group, |group: &mut Group<'_>, name, make| {
            pair(group, format!("{size}/{name}"), make, bytes);
        });
    }
}

fn churn<S: Subject>(
    group: &mut Group<'_>,
    name: String,
    make: impl Fn() -> S,
    count: usize,
    most: usize,
) {
    group.throughput(Throughput::Elements(2));
    let least = if most > 4 * MIB { 2 * MIB } else { 1 };
    let mut churn = Churn::new(make(), count, least, most);
    group.bench_function(name, |bencher| {
        bencher.iter_custom(|iterations| timed(iterations, || churn.step()));
    });
}

/// Random sizes among many live allocations: a search in the trees, mostly.
fn tree_hit(criterion: &mut Criterion) {
    let machine = Machine::find();
    let mut group = group(criterion, &machine, "tree_hit");
    let cases = [
        ("4KiB_10000_live", 10_000, 4 * KIB),
        ("4MiB_2500_live", 2_500, 4 * MIB),
        ("64MiB_100_live", 100, 64 * MIB),
    ];
    for (case, count, most) in cases {
        on_every_subject!(&machine, &mut group, |group: &mut Group<'_>, name, make| {
            churn(group, format!("{case}/{name}"), make, count, most);
        });
    }
}

fn split_one<S: Subject>(group: &mut Group<'_>, name: &str, make: impl Fn() -> S) {
    group.throughput(Throughput::Elements(8));
    let mut subject = make();
    group.bench_function(name, |bencher| {
        bencher.iter_custom(|iterations| {
            timed(iterations, || {
                let whole = black_box(subject.malloc(24 * MIB, 0));
                subject.free(whole, 0);
                let parts = [6, 10, 8].map(|mib| black_box(subject.malloc(mib * MIB, 0)));
                for part in [1, 0, 2] {
                    subject.free(parts[part], 0);
                }
            })
        });
    });
}

/// One block of 24 MiB, then three that together take its place: each round splits and merges.
fn split_and_coalesce(criterion: &mut Criterion) {
    let machine = Machine::find();
    let mut group = group(criterion, &machine, "split_and_coalesce");
    on_every_subject!(&machine, &mut group, split_one);
}

fn ring<S: Subject>(group: &mut Group<'_>, name: &str, make: impl Fn() -> S) {
    group.throughput(Throughput::Elements(2));
    let mut ring = Ring::new(make());
    group.bench_function(name, |bencher| {
        bencher.iter_custom(|iterations| timed(iterations, || ring.step()));
    });
}

/// Frees on another stream than the allocation's. The books know no streams and pay for none.
fn cross_stream(criterion: &mut Criterion) {
    let machine = Machine::find();
    let mut group = group(criterion, &machine, "cross_stream");
    on_every_subject!(&machine, &mut group, ring);
}

/// Another allocator's first request.
fn another(subject: &mut impl Subject) {
    let block = subject.malloc(2 * MIB, 0);
    subject.free(block, 0);
}

/// The time of what takes a fresh pool each: on a GPU there is a wait before each that is not timed.
fn cold_group<'a>(criterion: &'a mut Criterion, machine: &Machine, name: &str) -> Group<'a> {
    let mut group = group(criterion, machine, name);
    group.sample_size(10);
    if machine.is_gpu() {
        group.measurement_time(Duration::from_millis(50));
    }
    group
}

fn grow<S: Subject>(group: &mut Group<'_>, machine: &Machine, name: &str, make: impl Fn() -> S) {
    for (case, count, bytes) in [("1GiB", 1, GIB), ("512x2MiB", 512, 2 * MIB)] {
        group.throughput(Throughput::Elements(count as u64));
        group.bench_function(format!("{case}/{name}"), |bencher| {
            bencher.iter_custom(|iterations| {
                let mut spent = Duration::ZERO;
                for _ in 0..iterations {
                    let mut subject = make();
                    let mut blocks = Vec::with_capacity(count);
                    machine.settle(|| another(&mut make()));
                    let start = Instant::now();
                    blocks.extend((0..count).map(|_| subject.malloc(bytes, 0)));
                    spent += start.elapsed();
                    blocks.iter().for_each(|block| subject.free(*block, 0));
                    machine.synchronize();
                }
                spent
            });
        });
    }
}

/// From an empty allocator to 1 GiB. Those that only keep books have nothing to grow.
fn growth(criterion: &mut Criterion) {
    let machine = Machine::find();
    let mut group = cold_group(criterion, &machine, "growth");
    for profile in Profile::ALL {
        let make = || Vpmm::new(profile.pool(&machine.device), &machine);
        grow(&mut group, &machine, profile.name(), make);
    }
    if machine.is_gpu() {
        grow(&mut group, &machine, "cuda-async", || CudaMallocAsync::new(&machine));
        grow(&mut group, &machine, "cuda-malloc", || CudaMalloc::new(&machine));
    }
}

/// A request for 256 MiB where as much is free in pieces of 2 MiB and no more may be mapped. Nobody
/// else can serve it at all.
fn movement(criterion: &mut Criterion) {
    const PIECES: usize = 256;
    let machine = Machine::find();
    let mut group = cold_group(criterion, &machine, "movement");
    group.throughput(Throughput::Elements(1));
    for profile in Profile::ALL {
        group.bench_function(format!("128x2MiB/{}", profile.name()), |bencher| {
            bencher.iter_custom(|iterations| {
                let mut spent = Duration::ZERO;
                for _ in 0..iterations {
                    let limit = (PIECES * 2 * MIB) as u64;
                    let pool = profile.limited_pool(&machine.device, Some(limit));
                    let mut subject = Vpmm::new(pool, &machine);
                    let pieces: Vec<_> = (0..PIECES).map(|_| subject.malloc(2 * MIB, 0)).collect();
                    for piece in pieces.iter().step_by(2) {
                        subject.free(*piece, 0);
                    }
                    machine.synchronize();
                    machine.settle(|| {
                        another(&mut Vpmm::new(profile.pool(&machine.device), &machine))
                    });
                    let start = Instant::now();
                    let whole = black_box(subject.malloc(PIECES * MIB, 0));
                    spent += start.elapsed();
                    subject.free(whole, 0);
                    for piece in pieces.iter().skip(1).step_by(2) {
                        subject.free(*piece, 0);
                    }
                    machine.synchronize();
                }
                spent
            });
        });
    }
}

criterion_group!(benches, front_hit, tree_hit, split_and_coalesce, cross_stream, growth, movement);
criterion_main!(benches);

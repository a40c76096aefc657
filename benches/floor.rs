//! How near the pool's books are to those that do the least: traces and random sizes pass by pass through the
//! pool and through the baselines, which know no streams, no fences, no threads and no driver, on one machine.
//!
//! ```sh
//! cargo run --release -p vpmm-harness --example floor -- [--passes N] [TRACE]...
//! ```
//!
//! A pass of the pool is timed whole, its driver calls included: they are printed, and a pass that makes none
//! says what the books take. It is on the GPU if there is one, else on the simulator.

#[allow(dead_code, unused_imports, reason = "the driver's own allocators are for other benchmarks")]
mod baselines;
mod rig;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use baselines::{BestFit, Offset, TwoLevel};
use rig::program::Program;
use rig::{Lane, MIB, Machine, Subject, Vpmm};
use vpmm::{Pool, PoolConfig, Stream, StreamHandle};
use vpmm_cli::trace::Trace;

/// The passes before those that are timed: a pool takes some until it makes and moves no more.
const WARMING: usize = 12;

fn main() -> ExitCode {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut passes = 24;
    if arguments.first().is_some_and(|first| first == "--passes") {
        match arguments.get(1).and_then(|number| number.parse().ok()).filter(|number| *number > 0) {
            Some(number) => passes = number,
            None => return usage(),
        }
        arguments.drain(..2);
    }
    if arguments.iter().any(|argument| argument.starts_with('-')) {
        return usage();
    }
    println!("{:24} {:12} {:>7} {:>7}  driver calls", "ns a call", "", "fastest", "median");
    measure("random_4MiB", &Program::random(1, 4 * MIB, 2_500, 200_000), passes);
    measure("random_64MiB", &Program::random(2 * MIB, 64 * MIB, 100, 200_000), passes);
    for path in arguments {
        let trace = match Trace::open(&path) {
            Ok(trace) => trace,
            Err(error) => {
                eprintln!("{error}");
                return ExitCode::FAILURE;
            }
        };
        let name = path.rsplit('/').next().unwrap_or(&path);
        measure(name, &Program::of_trace(&trace), passes);
    }
    ExitCode::SUCCESS
}

fn usage() -> ExitCode {
    eprintln!("floor [--passes N] [TRACE]...");
    ExitCode::from(2)
}

fn measure(name: &str, program: &Program, passes: usize) {
    let machine = Machine::find();
    let mut nothing = Player::new(Nothing, program);
    let mut two_level = Player::new(TwoLevel::new(), program);
    let mut offset = Player::new(Offset::new(), program);
    let mut best_fit = Player::new(BestFit::new(), program);
    // Streams outlive the pool.
    let streams = (0..program.lanes).map(|_| machine.device.stream().expect("a stream"));
    let streams: Vec<Stream> = streams.collect();
    let handles: Vec<StreamHandle> = streams.iter().map(Stream::handle).collect();
    let pool = Pool::new(&machine.device, &PoolConfig::default()).expect("a pool");
    let mut pool = Player::new(Vpmm::on(pool, handles), program);
    // A pool that is left alone for a while may move again: each goes its passes in one go.
    let calls = pool.passes(passes, &machine);
    nothing.passes(passes, &machine);
    two_level.passes(passes, &machine);
    offset.passes(passes, &machine);
    best_fit.passes(passes, &machine);
    nothing.print(name, "loop alone", "");
    two_level.print("", "rlsf", "");
    offset.print("", "offset", "");
    best_fit.print("", "BTreeMap", "");
    pool.print("", "vpmm", &format!("{:10.1} a pass", calls as f64 / passes as f64));
}

/// A program that goes through an allocator.
struct Player<'a, S: Subject> {
    subject: S,
    program: &'a Program,
    live: Vec<Option<S::Block>>,
    times: Vec<Duration>,
}

impl<'a, S: Subject> Player<'a, S> {
    fn new(subject: S, program: &'a Program) -> Self {
        Self { subject, program, live: vec![None; program.slots], times: Vec::new() }
    }

    /// The driver calls of those that are timed.
    fn passes(&mut self, passes: usize, machine: &Machine) -> u64 {
        (0..WARMING).for_each(|_| self.pass());
        self.times.clear();
        let before = machine.device.driver().calls();
        (0..passes).for_each(|_| self.pass());
        machine.device.driver().calls().since(&before).total()
    }

    fn pass(&mut self) {
        let begin = Instant::now();
        for step in &self.program.steps {
            match step.bytes {
                Some(bytes) => self.live[step.slot] = Some(self.subject.malloc(bytes, step.lane)),
                None => self.free(step.slot, step.lane),
            }
        }
        self.times.push(begin.elapsed());
        self.program.left.iter().for_each(|&(slot, lane)| self.free(slot, lane));
    }

    fn free(&mut self, slot: usize, lane: Lane) {
        if let Some(block) = self.live[slot].take() {
            self.subject.free(block, lane);
        }
    }

    fn print(&mut self, program: &str, subject: &str, more: &str) {
        self.times.sort_unstable();
        let each = |time: Duration| time.as_nanos() as f64 / self.program.steps.len() as f64;
        let [fastest, median] = [0, self.times.len() / 2].map(|at| each(self.times[at]));
        println!("{program:24} {subject:12} {fastest:7.1} {median:7.1} {more}");
    }
}

/// What the loop takes by itself.
struct Nothing;

impl Subject for Nothing {
    type Block = usize;

    fn malloc(&mut self, bytes: usize, _lane: Lane) -> usize {
        std::hint::black_box(bytes)
    }

    fn free(&mut self, block: usize, _lane: Lane) {
        std::hint::black_box(block);
    }
}

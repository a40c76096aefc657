//! Random programs over pools that are full nearly always: memory goes from stream to stream in every way
//! that there is, and every byte of it is in some pattern.

use cuda_sys::types::CUstream_flags_enum;
use vpmm::resource::*;
use vpmm::{DevicePtr, MemoryResource, PendingPolicy, Stream, StreamHandle};

use crate::subjects::malloc;
use crate::support::{Lcg, Rig, call, streams};

/// Patterns are written by the unit: who overlaps another does so in whole units, so that none of the few
/// words that a simulated pattern touches is missed.
const UNIT: u64 = 256;
/// What the pools have, in units.
const ALL: u64 = 64;
const STEPS: usize = 400;

struct Held {
    ptr: DevicePtr,
    units: u64,
    seed: u64,
    stream: StreamHandle,
}

impl Held {
    fn bytes(&self) -> usize {
        (self.units * UNIT) as usize
    }

    fn each_unit(&self, with: impl Fn(u64, u64)) {
        for unit in 0..self.units {
            with(self.ptr.address() + unit * UNIT, self.seed * ALL + unit);
        }
    }
}

struct Program<'a> {
    rig: &'a Rig,
    resource: &'a dyn MemoryResource,
    /// What one request has at most, in units.
    most: u64,
    own: Vec<Stream>,
    others: Vec<StreamHandle>,
    held: Vec<Held>,
    random: Lcg,
    seeds: u64,
    refused: usize,
}

impl Program<'_> {
    fn any_stream(&mut self) -> StreamHandle {
        let which = self.random.below((self.own.len() + self.others.len()) as u64) as usize;
        match self.own.get(which) {
            Some(stream) => stream.handle(),
            None => self.others[which - self.own.len()],
        }
    }

    fn allocate(&mut self) {
        let (units, stream) = (self.random.below(self.most) + 1, self.any_stream());
        self.seeds += 1;
        let mut held = Held { ptr: DevicePtr::NULL, units, seed: self.seeds, stream };
        match self.resource.allocate(held.bytes(), 256, stream) {
            Ok(ptr) => {
                held.ptr = ptr;
                held.each_unit(|at, seed| self.rig.fill(at, UNIT, seed, stream));
                self.held.push(held);
            }
            Err(error) => {
                assert!(error.is_out_of_memory(), "{error}");
                self.refused += 1;
                (0..3).for_each(|_| self.free());
            }
        }
    }

    /// Frees one on its own stream, or on another that comes after it.
    fn free(&mut self) {
        if self.held.is_empty() {
            return;
        }
        let which = self.random.below(self.held.len() as u64) as usize;
        let held = self.held.swap_remove(which);
        let stream = if self.random.below(3) == 0 { self.any_stream() } else { held.stream };
        if stream != held.stream {
            self.rig.order(held.stream, stream);
        }
        held.each_unit(|at, seed| self.rig.check(at, UNIT, seed, stream));
        self.resource.deallocate(held.ptr, held.bytes(), 256, stream).expect("freed");
    }

    /// A stream of the library ends, with whatever is under way, and another one comes. What was allocated
    /// on it is another's to free.
    fn end_a_stream(&mut self) {
        let which = self.random.below(self.own.len() as u64) as usize;
        let next = self.rig.stream();
        let ended = self.own[which].handle();
        self.rig.order(ended, &next);
        for held in self.held.iter_mut().filter(|held| held.stream == ended) {
            held.stream = next.handle();
        }
        self.own[which] = next;
    }

    fn run(&mut self) {
        for _ in 0..STEPS {
            match self.random.below(100) {
                0..58 => self.allocate(),
                58..96 => self.free(),
                96..98 => self.end_a_stream(),
                _ => {
                    let which = self.random.below(self.own.len() as u64) as usize;
                    self.own[which].synchronize().expect("the stream finishes");
                }
            }
        }
        while !self.held.is_empty() {
            self.free();
        }
        assert_eq!(self.rig.mismatches(), 0, "contents were changed");
        self.rig.assert_clean();
    }
}

fn programs(most: u64, make: impl Fn(&Rig, PendingPolicy) -> Box<dyn MemoryResource>) {
    Rig::everywhere(|rig| {
        for seed in 0..6 {
            let policy =
                if seed % 2 == 0 { PendingPolicy::WaitFirst } else { PendingPolicy::GrowFirst };
            let resource = make(rig, policy);
            let (raw, foreign) = streams::make(rig, CUstream_flags_enum::CU_STREAM_NON_BLOCKING.0);
            let mut program = Program {
                rig,
                resource: &resource,
                most,
                own: (0..3).map(|_| rig.stream()).collect(),
                others: vec![foreign, StreamHandle::LEGACY, StreamHandle::PER_THREAD],
                held: Vec::new(),
                random: Lcg(seed),
                seeds: 0,
                refused: 0,
            };
            program.run();
            assert!(program.refused > 0, "there was always enough: little was tested");
            drop(program);
            drop(resource);
            call!(rig.driver, cuStreamDestroy_v2(raw));
            rig.assert_clean();
        }
    });
}

fn driver_pool(rig: &Rig) -> DriverPool {
    DriverPool::new(&rig.device, &DriverPoolConfig::default()).expect("a pool of the driver's")
}

fn full<R: MemoryResource + 'static>(
    rig: &Rig,
    upstream: R,
    policy: PendingPolicy,
) -> Box<dyn MemoryResource> {
    let mut config = CoalescingConfig::default();
    config.max_bytes = Some(ALL * UNIT);
    config.pending_policy = policy;
    Box::new(CoalescingPool::new(upstream, &rig.device, &config).expect("a pool"))
}

#[test]
fn a_full_pool() {
    programs(12, |rig, policy| full(rig, malloc(rig), policy));
}

#[test]
fn a_full_pool_over_the_drivers() {
    programs(12, |rig, policy| full(rig, driver_pool(rig), policy));
}

/// Pieces go up and down between the two.
#[test]
fn a_full_pool_over_a_full_pool() {
    programs(12, |rig, policy| {
        let below = full(rig, malloc(rig), policy);
        let mut config = CoalescingConfig::default();
        config.pending_policy = policy;
        Box::new(CoalescingPool::new(below, &rig.device, &config).expect("a pool"))
    });
}

#[test]
fn few_blocks_of_fixed_size() {
    programs(2, |rig, _| {
        let mut config = FixedSizeConfig::default();
        config.block_bytes = 2 * UNIT as usize;
        config.blocks_at_once = 8;
        config.at_start = false;
        let upstream = Limiting::new(driver_pool(rig), 24 * 2 * UNIT);
        Box::new(FixedSize::new(upstream, &rig.device, &config).expect("blocks"))
    });
}

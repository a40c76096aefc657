//! Programs on stacks of resources, found by what they reach in their code: blocks overlap nowhere, work meets nobody
//! else's in memory, and nothing stays at the end.

#![no_main]

mod machine;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use machine::{MOST_STEPS, Machine, Setup, Size, lane_of};
use stacks::{Builder, Stack};
use vpmm::resource::MIN_ALIGN;
use vpmm::{DevicePtr, MemoryResource};

/// Each with something of its own.
const STACKS: [&str; 14] = [
    "coalescing(cuda-malloc)",
    "coalescing(initial=4MiB,max=16MiB,cuda-malloc)",
    "coalescing(default)",
    "fixed-size(1MiB,blocks=4,cuda-malloc)",
    "binning(10,20,coalescing(cuda-malloc))",
    "binning(18,22,cuda-malloc)",
    "arena(8MiB,cuda-malloc)",
    "caching(cuda-malloc)",
    "caching(max_split_size_mb=21,garbage_collection_threshold=0.5,limiting(24MiB,cuda-malloc))",
    "caching(roundup_power2_divisions=4,default)",
    "limiting(16MiB,statistics(tracking(coalescing(cuda-malloc))))",
    "aligned(4096,from=64KiB,coalescing(cuda-malloc))",
    "thread-safe(cuda-async(max=16MiB))",
    "paged",
];

#[derive(Arbitrary, Debug)]
struct Program {
    setup: Setup,
    stack: u8,
    steps: Vec<Step>,
}

#[derive(Arbitrary, Debug)]
enum Step {
    Allocate { size: Size, align_log2: u8, lane: u8 },
    Free { which: u8, lane: u8 },
    Order { from: u8, to: u8 },
    Wait { lane: u8 },
    Advance { lane: u8, all: bool },
    Replace { lane: u8 },
    Fault { call: u8 },
}

struct Block {
    ptr: DevicePtr,
    bytes: u64,
    align: usize,
    lane: usize,
}

struct Run<'a> {
    machine: &'a mut Machine,
    resource: &'a dyn MemoryResource,
    live: Vec<Block>,
}

impl Run<'_> {
    fn allocate(&mut self, bytes: u64, align: usize, lane: usize) {
        let resource = self.resource;
        let made = self
            .machine
            .call(|machine| resource.allocate(bytes as usize, align, machine.lanes[lane].handle()));
        // What there is no memory for, no such size of, or a fault in.
        let Some(Ok(ptr)) = made else { return };
        assert_eq!(ptr.address() % align as u64, 0);
        self.machine.take(ptr, bytes, lane);
        self.live.push(Block { ptr, bytes, align, lane });
    }

    fn free(&mut self, index: usize, lane: usize) {
        let Block { ptr, bytes, align, lane: of } = self.live[index];
        if of != lane {
            self.machine.order(of, lane);
        }
        let (resource, count) = (self.resource, bytes as usize);
        let freed = self
            .machine
            .call(|machine| resource.deallocate(ptr, count, align, machine.lanes[lane].handle()));
        let Some(freed) = freed else { return };
        freed.unwrap();
        self.live.swap_remove(index);
        self.machine.leave(ptr);
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Allocate { ref size, align_log2, lane } => {
                self.allocate(size.bytes(), MIN_ALIGN << (align_log2 % 5), lane_of(lane));
            }
            Step::Free { which, lane } => {
                if !self.live.is_empty() {
                    self.free(usize::from(which) % self.live.len(), lane_of(lane));
                }
            }
            Step::Order { from, to } => self.machine.order(lane_of(from), lane_of(to)),
            Step::Wait { lane } => self.machine.lanes[lane_of(lane)].synchronize().unwrap(),
            Step::Advance { lane, all } => self.machine.advance(lane, all),
            Step::Replace { lane } => {
                let lane = lane_of(lane);
                while let Some(index) = self.live.iter().position(|block| block.lane == lane) {
                    self.free(index, lane);
                }
                self.machine.lanes[lane] = self.machine.device.stream().unwrap();
            }
            Step::Fault { call } => self.machine.fault = Some(u64::from(call % 12) + 1),
        }
    }
}

fuzz_target!(|program: Program| {
    let Some(mut machine) = Machine::new(&program.setup) else { return };
    let stack: Stack = STACKS[usize::from(program.stack) % STACKS.len()].parse().unwrap();
    // Not where the device has less than it takes at the start.
    let Ok(built) = Builder::new(&machine.device).build(&stack) else { return };
    let mut run = Run { machine: &mut machine, resource: built.resource(), live: Vec::new() };
    for step in program.steps.iter().take(MOST_STEPS) {
        run.step(step);
    }
    run.machine.fault = None;
    while let Some(last) = run.live.len().checked_sub(1) {
        run.free(last, run.live[last].lane);
    }
    machine.settle();
    drop(built);
    machine.end();
});

//! Programs whose streams capture graphs with memory of a pool, of either profile, found by what they reach in its code:
//! blocks overlap nowhere, the books are right, launches meet nobody else's work in memory, and nothing stays at the end.

#![no_main]

mod machine;

use std::ptr;

use arbitrary::Arbitrary;
use cuda_sim::race::AccessKind;
use cuda_sys::types::*;
use libfuzzer_sys::fuzz_target;
use machine::{GRANULE, LANES, MOST_STEPS, Machine, Setup, Size, done, lane_of};
use vpmm::{DevicePtr, Driver, Error, GraphPool, PagedConfig, Pool, PoolConfig, WaitPolicy};

const CHECKED_EACH: usize = 8;
/// Each graph's pool has a stream that captures, and one more that may take part.
const GRAPHS: usize = 2;

#[derive(Arbitrary, Debug)]
struct Program {
    setup: Setup,
    is_paged: bool,
    limit_granules: Option<u8>,
    steps: Vec<Step>,
}

#[derive(Arbitrary, Debug)]
enum Step {
    Malloc { size: Size, lane: u8 },
    Free { which: u8, lane: u8 },
    Use { which: u8 },
    Begin { graph: u8, strict: bool },
    Fork { graph: u8 },
    Join { graph: u8 },
    End { graph: u8, prepares_late: bool },
    Launch { graph: u8, which: u8 },
    Release { graph: u8, only_drops: bool },
    Wait { lane: u8 },
    Advance { lane: u8, all: bool },
    Replace { lane: u8 },
    Trim { keep_granules: u8 },
    Fault { call: u8 },
}

struct Block {
    ptr: DevicePtr,
    bytes: u64,
    lane: usize,
    /// Whose it is, if it is not the pool's own.
    graph: Option<usize>,
    /// Still in the capture that it was made in.
    is_captured: bool,
}

/// A graph that can be launched.
struct Graph {
    driver: Driver,
    graph: CUgraph,
    executable: CUgraphExec,
}

impl Drop for Graph {
    fn drop(&mut self) {
        let raw = self.driver.raw();
        // SAFETY: both are this value's, and alive.
        unsafe {
            done(raw.cuGraphExecDestroy.unwrap()(self.executable));
            done(raw.cuGraphDestroy.unwrap()(self.graph));
        }
    }
}

#[derive(Default)]
struct Slot {
    pool: Option<GraphPool>,
    graphs: Vec<Graph>,
    is_capturing: bool,
    /// No call that could break a capture may be made by the program.
    is_strict: bool,
    is_forked: bool,
    /// The paged profile's own memory that was freed in the capture, and goes at its end.
    postponed: u64,
}

struct Run {
    machine: Machine,
    pool: Pool,
    is_paged: bool,
    slots: [Slot; GRAPHS],
    live: Vec<Block>,
}

impl Run {
    fn new(program: &Program) -> Option<Self> {
        let machine = Machine::new(&program.setup)?;
        let limit = program.limit_granules.map(|granules| u64::from(granules % 28 + 1) * GRANULE);
        let pool = if program.is_paged {
            let mut config = PagedConfig::default();
            config.limit_bytes = limit;
            config.va_size_bytes = 64 * GRANULE;
            config.out_of_memory = WaitPolicy::FailAtOnce;
            Pool::paged(&machine.device, &config)
        } else {
            let mut config = PoolConfig::default();
            config.limit_bytes = limit;
            config.va_size_bytes = Some(64 * GRANULE);
            config.out_of_memory = WaitPolicy::FailAtOnce;
            Pool::new(&machine.device, &config)
        };
        let (pool, is_paged) = (pool.unwrap(), program.is_paged);
        Some(Self { machine, pool, is_paged, slots: Default::default(), live: Vec::new() })
    }

    /// The capture that a stream takes part in.
    fn capture_of(&self, lane: usize) -> Option<usize> {
        let graph = lane % GRAPHS;
        let slot = &self.slots[graph];
        let takes_part = lane < GRAPHS || slot.is_forked;
        (slot.is_capturing && takes_part).then_some(graph)
    }

    fn is_strict(&self) -> bool {
        self.slots.iter().any(|slot| slot.is_capturing && slot.is_strict)
    }

    fn malloc(&mut self, bytes: u64, lane: usize) {
        let graph = self.capture_of(lane);
        let made =
            self.machine.call(|machine| self.pool.malloc(bytes as usize, &machine.lanes[lane]));
        match made {
            Some(Ok(ptr)) => {
                self.machine.take(ptr, bytes, lane);
                let is_captured = graph.is_some();
                self.live.push(Block { ptr, bytes, lane, graph, is_captured });
            }
            Some(Err(error)) => assert!(
                error.is_out_of_memory() || matches!(error, Error::AddressSpaceExhausted { .. }),
                "{error}"
            ),
            None => {}
        }
    }

    /// The stream that a block is freed on, if that may be now; what comes before it there is told.
    fn frees_on(&self, block: &Block, lane: usize) -> Option<usize> {
        match (self.capture_of(block.lane), self.capture_of(lane)) {
            (None, None) => Some(lane),
            // What was before the capture comes before its graph on the stream that launches it.
            (Some(_), _) if block.is_captured || block.lane < GRAPHS => Some(block.lane),
            _ => None,
        }
    }

    fn free(&mut self, index: usize, lane: usize) {
        let block = &self.live[index];
        let (ptr, of) = (block.ptr, block.lane);
        let Some(lane) = self.frees_on(block, lane) else { return };
        if of != lane {
            self.machine.order(of, lane);
        }
        let freed = self.machine.call(|machine| self.pool.free(ptr, &machine.lanes[lane]));
        let Some(freed) = freed else { return };
        freed.unwrap();
        let block = self.live.swap_remove(index);
        if let Some(graph) = self.capture_of(lane)
            && self.is_paged
            && block.graph.is_none()
        {
            self.slots[graph].postponed += 1;
        }
        self.machine.leave(ptr);
    }

    fn use_again(&self, block: &Block) {
        // A graph that used what is the pool's own would do so in every launch.
        if self.capture_of(block.lane).is_none() || block.is_captured {
            self.machine.work(block.ptr, block.bytes, block.lane, AccessKind::Write);
        }
    }

    fn begin(&mut self, graph: usize, is_strict: bool) {
        let slot = &mut self.slots[graph];
        if slot.is_capturing {
            return;
        }
        if slot.pool.is_none() {
            match self.machine.call(|_| self.pool.graph_pool()) {
                Some(Ok(pool)) => slot.pool = Some(pool),
                Some(Err(error)) => {
                    assert!(matches!(error, Error::AddressSpaceExhausted { .. }), "{error}");
                    return;
                }
                None => return,
            }
        }
        let stream = &self.machine.lanes[graph];
        slot.pool.as_ref().unwrap().begin(stream).unwrap();
        let mode = if is_strict {
            CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL
        } else {
            CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED
        };
        let raw = self.machine.device.driver().raw();
        // SAFETY: the stream is alive.
        done(unsafe { raw.cuStreamBeginCapture_v2.unwrap()(stream.handle().raw(), mode) });
        (slot.is_capturing, slot.is_strict) = (true, is_strict);
    }

    fn fork(&mut self, graph: usize) {
        if self.slots[graph].is_capturing && !self.slots[graph].is_forked {
            self.machine.order(graph, graph + GRAPHS);
            self.slots[graph].is_forked = true;
        }
    }

    /// The end of the graph comes after the other stream's part, which goes on.
    fn join(&self, graph: usize) {
        if self.slots[graph].is_forked {
            self.machine.order(graph + GRAPHS, graph);
        }
    }

    fn end_capture(&mut self, graph: usize, prepares_late: bool) {
        if !self.slots[graph].is_capturing {
            return;
        }
        self.join(graph);
        let driver = self.machine.device.driver().clone();
        let raw = driver.raw();
        let stream = &self.machine.lanes[graph];
        let (mut captured, mut executable) = (ptr::null_mut(), ptr::null_mut());
        let slot = &mut self.slots[graph];
        let end = |slot: &Slot| slot.pool.as_ref().unwrap().end(stream).unwrap();
        // SAFETY: pointers to live values, and handles that are alive.
        unsafe {
            done(raw.cuStreamEndCapture.unwrap()(stream.handle().raw(), &mut captured));
            if prepares_late {
                end(slot);
            }
            done(raw.cuGraphInstantiateWithFlags.unwrap()(&mut executable, captured, 0));
        }
        if !prepares_late {
            end(slot);
        }
        slot.graphs.push(Graph { driver: driver.clone(), graph: captured, executable });
        (slot.is_capturing, slot.is_forked, slot.postponed) = (false, false, 0);
        for block in self.live.iter_mut().filter(|block| block.graph == Some(graph)) {
            // What the other stream had there is known to be done only behind a launch.
            (block.is_captured, block.lane) = (false, graph);
        }
    }

    fn launch(&mut self, graph: usize, which: u8) {
        let slot = &self.slots[graph];
        if slot.is_capturing || slot.graphs.is_empty() {
            return;
        }
        let of_slot = &slot.graphs[usize::from(which) % slot.graphs.len()];
        let raw = self.machine.device.driver().raw();
        // SAFETY: the graph and the stream are alive.
        done(unsafe {
            raw.cuGraphLaunch.unwrap()(of_slot.executable, self.machine.handle(graph).raw())
        });
    }

    fn release(&mut self, graph: usize, only_drops: bool) {
        if self.slots[graph].is_capturing || self.slots[graph].pool.is_none() {
            return;
        }
        let slot = std::mem::take(&mut self.slots[graph]);
        drop(slot.graphs);
        let pool = slot.pool.unwrap();
        if !only_drops {
            pool.release(&self.machine.lanes[graph]).unwrap();
        }
    }

    fn replace(&mut self, lane: usize) {
        if self.capture_of(lane).is_some() || self.is_strict() {
            return;
        }
        while let Some(index) = self.live.iter().position(|block| block.lane == lane) {
            self.free(index, lane);
        }
        // Launches go on after those before.
        self.machine.lanes.push(self.machine.device.stream().unwrap());
        self.machine.order(lane, LANES);
        self.machine.lanes.swap_remove(lane);
    }

    fn step(&mut self, step: &Step) {
        let index_of =
            |which: u8| (!self.live.is_empty()).then(|| usize::from(which) % self.live.len());
        let graph_of = |graph: u8| usize::from(graph) % GRAPHS;
        match *step {
            Step::Malloc { ref size, lane } => self.malloc(size.bytes(), lane_of(lane)),
            Step::Free { which, lane } => {
                if let Some(index) = index_of(which) {
                    self.free(index, lane_of(lane));
                }
            }
            Step::Use { which } => {
                if let Some(index) = index_of(which) {
                    self.use_again(&self.live[index]);
                }
            }
            Step::Begin { graph, strict } => self.begin(graph_of(graph), strict),
            Step::Fork { graph } => self.fork(graph_of(graph)),
            Step::Join { graph } => self.join(graph_of(graph)),
            Step::End { graph, prepares_late } => self.end_capture(graph_of(graph), prepares_late),
            Step::Launch { graph, which } => self.launch(graph_of(graph), which),
            Step::Release { graph, only_drops } => self.release(graph_of(graph), only_drops),
            Step::Wait { lane } => {
                let lane = lane_of(lane);
                if self.capture_of(lane).is_none() && !self.is_strict() {
                    self.machine.lanes[lane].synchronize().unwrap();
                }
            }
            Step::Advance { lane, all } => self.machine.advance(lane, all),
            Step::Replace { lane } => self.replace(lane_of(lane)),
            Step::Trim { keep_granules } => {
                if let Some(trimmed) =
                    self.machine.call(|_| self.pool.trim_to(u64::from(keep_granules) * GRANULE))
                {
                    trimmed.unwrap();
                }
            }
            Step::Fault { call } => self.machine.fault = Some(u64::from(call % 12) + 1),
        }
    }

    fn check(&self) {
        self.pool.validate().unwrap();
        let stats = self.pool.stats();
        let small = if self.is_paged { stats.small_live_count } else { 0 };
        let postponed: u64 = self.slots.iter().map(|slot| slot.postponed).sum();
        assert_eq!(stats.live_count + small, self.live.len() as u64 + postponed);
    }

    fn end(mut self) {
        self.machine.fault = None;
        for graph in 0..GRAPHS {
            self.end_capture(graph, false);
            self.release(graph, graph > 0);
        }
        while let Some(last) = self.live.len().checked_sub(1) {
            self.free(last, self.live[last].lane);
        }
        self.check();
        let Self { machine, pool, .. } = self;
        // What the first trims ask about is done by the next: a schedule may wait for somebody who waits.
        for _ in 0..3 {
            machine.settle();
            // What was dropped only goes behind a wait for the device.
            machine.device.synchronize().unwrap();
            pool.trim_to(0).unwrap();
        }
        assert_eq!(pool.stats().mapped_bytes, 0);
        drop(pool);
        machine.end();
    }
}

fuzz_target!(|program: Program| {
    let Some(mut run) = Run::new(&program) else { return };
    for (step, number) in program.steps.iter().zip(1..=MOST_STEPS) {
        run.step(step);
        if number % CHECKED_EACH == 0 {
            run.check();
        }
    }
    run.end();
});

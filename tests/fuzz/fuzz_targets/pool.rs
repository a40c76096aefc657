//! Programs on a pool of the default profile, found by what they reach in its code: blocks overlap nowhere, the books
//! are right after every call, work meets nobody else's in memory, and nothing stays at the end.

#![no_main]

use std::collections::BTreeMap;

use arbitrary::Arbitrary;
use cuda_sim::race::AccessKind;
use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::CUresult;
use libfuzzer_sys::fuzz_target;
use vpmm::{
    Buffers, Contents, Device, DevicePtr, Driver, Error, PendingPolicy, Pool, PoolConfig, Stream,
    StreamHandle, WaitPolicy,
};

const GRANULE: u64 = 2 << 20;
const MOST_STEPS: usize = 200;
const LANES: usize = 4;
const TAG: &str = "tag";
/// A check looks at every unit of the addresses.
const CHECKED_EACH: usize = 8;

#[derive(Arbitrary, Debug)]
struct Program {
    schedule: Order,
    seed: u64,
    limit_granules: Option<u8>,
    device_granules: u8,
    address_granules: u8,
    waits_first: bool,
    reuse: [bool; 3],
    moves: Moves,
    steps: Vec<Step>,
}

#[derive(Arbitrary, Debug)]
enum Order {
    Eager,
    Late { patience: u8 },
    Random,
    Manual,
}

#[derive(Arbitrary, Debug)]
enum Moves {
    None,
    Some(u16),
    All,
}

#[derive(Arbitrary, Debug)]
enum Size {
    Small(u16),
    Middle(u16),
    Granules { count: u8, beside: i8 },
}

impl Size {
    fn bytes(&self) -> u64 {
        match self {
            Self::Small(bytes) => u64::from(*bytes) + 1,
            Self::Middle(steps) => (u64::from(*steps) + 1) * 64,
            Self::Granules { count, beside } => {
                (u64::from(*count % 12 + 1) * GRANULE).saturating_add_signed((*beside).into())
            }
        }
    }
}

#[derive(Arbitrary, Debug)]
enum Step {
    Malloc { size: Size, lane: u8, tagged: bool },
    Free { which: u8, lane: u8 },
    Use { which: u8, lane: u8 },
    Follow { from: u8, to: u8 },
    Wait { lane: u8, tells: bool },
    Advance { lane: u8, all: bool },
    Replace { lane: u8 },
    Trim { keep_granules: u8 },
    Limit { granules: Option<u8> },
    Sleep { lane: u8, keeps: bool },
    Wake { lane: u8 },
    Fault { call: u8 },
}

fn done(code: CUresult) {
    assert_eq!(code, CUresult::CUDA_SUCCESS);
}

struct Block {
    ptr: DevicePtr,
    bytes: u64,
    lane: usize,
    uses: Vec<usize>,
    /// Of the heap that can sleep.
    tagged: bool,
}

struct Run {
    simulator: Simulator,
    device: Device,
    pool: Pool,
    lanes: Vec<Stream>,
    live: Vec<Block>,
    /// Ends of live blocks by their starts.
    taken: BTreeMap<u64, u64>,
    /// Which driver call of the next request or free fails.
    fault: Option<u64>,
    is_asleep: bool,
}

impl Run {
    fn new(program: &Program) -> Option<Self> {
        let schedule = match program.schedule {
            Order::Eager => Schedule::Eager,
            Order::Late { patience } => Schedule::Late { patience: u32::from(patience % 20) + 1 },
            Order::Random => Schedule::Random,
            Order::Manual => Schedule::Manual,
        };
        let device_bytes = u64::from(program.device_granules % 28 + 4) * GRANULE;
        let simulator = Simulator::builder()
            .schedule(schedule)
            .seed(program.seed)
            .memory_bytes(device_bytes)
            .build()
            .ok()?;
        let device = Driver::new(simulator.driver()).unwrap().device(0).unwrap();
        let mut config = PoolConfig::default();
        config.limit_bytes =
            program.limit_granules.map(|granules| u64::from(granules % 28 + 1) * GRANULE);
        config.va_size_bytes = Some(u64::from(program.address_granules % 64 + 16) * GRANULE);
        config.out_of_memory = WaitPolicy::FailAtOnce;
        if program.waits_first {
            config.pending_policy = PendingPolicy::WaitFirst;
        }
        [
            config.reuse.follow_event_dependencies,
            config.reuse.opportunistic,
            config.reuse.internal_dependencies,
        ] = program.reuse;
        config.moves_per_second = match program.moves {
            Moves::None => 0,
            Moves::Some(number) => number.into(),
            Moves::All => u32::MAX,
        };
        let pool = Pool::new(&device, &config).unwrap();
        let lanes = (0..LANES).map(|_| device.stream().unwrap()).collect();
        let (live, taken) = (Vec::new(), BTreeMap::new());
        Some(Self { simulator, device, pool, lanes, live, taken, fault: None, is_asleep: false })
    }

    fn handle(&self, lane: usize) -> StreamHandle {
        self.lanes[lane].handle()
    }

    /// Has a stream's work read or write a block.
    fn work(&self, ptr: DevicePtr, bytes: u64, lane: usize, kind: AccessKind) {
        let start = ptr.address();
        self.simulator
            .enqueue(self.handle(lane).raw(), "use", move |memory| {
                memory.count_as_used(start, bytes, kind)
            })
            .unwrap();
    }

    /// Has one stream's work come after what another has now, and tells the pool or not.
    fn order(&self, from: usize, to: usize, tells: bool) {
        let mark = self.pool.mark(&self.lanes[from]).unwrap();
        let raw = self.device.driver().raw();
        let mut event = std::ptr::null_mut();
        // SAFETY: pointers to live values, and handles that are alive.
        unsafe {
            done(raw.cuCtxSetCurrent.unwrap()(self.device.context()));
            done(raw.cuEventCreate.unwrap()(&mut event, 2));
            done(raw.cuEventRecord.unwrap()(event, self.handle(from).raw()));
            done(raw.cuStreamWaitEvent.unwrap()(self.handle(to).raw(), event, 0));
            done(raw.cuEventDestroy_v2.unwrap()(event));
        }
        if tells {
            self.pool.follows(&self.lanes[to], &mark).unwrap();
        }
    }

    /// A call of the pool in which the step's fault comes; `None` where it failed by that.
    fn call<T>(&mut self, call: impl FnOnce(&Self) -> vpmm::Result<T>) -> Option<vpmm::Result<T>> {
        let fault = self.fault.take();
        if let Some(number) = fault {
            self.simulator.fail_call(number, CUresult::CUDA_ERROR_UNKNOWN);
        }
        let result = call(self);
        self.simulator.clear_faults();
        match result {
            Err(Error::Driver { code: CUresult::CUDA_ERROR_UNKNOWN, .. }) if fault.is_some() => {
                None
            }
            result => Some(result),
        }
    }

    fn malloc(&mut self, bytes: u64, lane: usize, tagged: bool) {
        let made = self.call(|run| {
            let (bytes, stream) = (bytes as usize, &run.lanes[lane]);
            if tagged {
                run.pool.tagged(TAG)?.malloc(bytes, stream)
            } else {
                run.pool.malloc(bytes, stream)
            }
        });
        match made {
            Some(Ok(ptr)) => {
                let (start, end) = (ptr.address(), ptr.address() + bytes);
                let before = self.taken.range(..end).next_back();
                assert!(before.is_none_or(|(_, of)| *of <= start), "a block of two owners");
                self.taken.insert(start, end);
                self.work(ptr, bytes, lane, AccessKind::Write);
                self.live.push(Block { ptr, bytes, lane, uses: Vec::new(), tagged });
            }
            Some(Err(Error::Asleep { .. })) => assert!(tagged && self.is_asleep),
            Some(Err(error)) => assert!(error.is_out_of_memory(), "{error}"),
            None => {}
        }
    }

    /// All that uses the heap comes before.
    fn sleep(&mut self, lane: usize, keeps: bool) {
        for other in (0..LANES).filter(|other| *other != lane) {
            self.order(other, lane, false);
        }
        let contents = if keeps { Contents::Keep(Buffers::Release) } else { Contents::Discard };
        let slept = self.call(|run| run.pool.suspend(TAG, &run.lanes[lane], &contents));
        match slept {
            Some(Ok(_)) => self.is_asleep = true,
            Some(Err(Error::Asleep { .. })) => assert!(self.is_asleep),
            Some(Err(error)) => assert!(matches!(error, Error::UnknownTag { .. }), "{error}"),
            None => {}
        }
    }

    /// All that uses the heap comes after.
    fn wake(&mut self, lane: usize) {
        let woken = self.call(|run| run.pool.resume(TAG, &run.lanes[lane]));
        match woken {
            Some(Ok(_)) => {
                self.is_asleep = false;
                for other in (0..LANES).filter(|other| *other != lane) {
                    self.order(lane, other, false);
                }
            }
            Some(Err(Error::NotAsleep { .. } | Error::UnknownTag { .. })) => {
                assert!(!self.is_asleep)
            }
            Some(Err(error)) => assert!(error.is_out_of_memory(), "{error}"),
            None => {}
        }
    }

    fn free(&mut self, index: usize, lane: usize) {
        let (ptr, of) = (self.live[index].ptr, self.live[index].lane);
        if of != lane {
            self.order(of, lane, false);
        }
        let Some(freed) = self.call(|run| run.pool.free(ptr, &run.lanes[lane])) else { return };
        freed.unwrap();
        let block = self.live.swap_remove(index);
        self.taken.remove(&block.ptr.address());
    }

    fn step(&mut self, step: &Step) {
        let lane_of = |lane: u8| usize::from(lane) % LANES;
        let index_of =
            |which: u8| (!self.live.is_empty()).then(|| usize::from(which) % self.live.len());
        match *step {
            Step::Malloc { ref size, lane, tagged } => {
                self.malloc(size.bytes(), lane_of(lane), tagged)
            }
            Step::Free { which, lane } => {
                let Some(index) = index_of(which) else { return };
                self.free(index, lane_of(lane));
            }
            Step::Use { which, lane } => {
                let (Some(index), lane) = (index_of(which), lane_of(lane)) else { return };
                if self.live[index].tagged && self.is_asleep {
                    return;
                }
                let (ptr, bytes, of) =
                    (self.live[index].ptr, self.live[index].bytes, self.live[index].lane);
                if of != lane {
                    self.order(of, lane, false);
                    self.pool.record_stream(ptr, &self.lanes[lane]).unwrap();
                    self.live[index].uses.push(lane);
                }
                // Two further streams may do so at one time.
                self.work(ptr, bytes, lane, AccessKind::Read);
            }
            Step::Follow { from, to } => self.order(lane_of(from), lane_of(to), true),
            Step::Wait { lane, tells } => {
                let lane = lane_of(lane);
                if tells {
                    let mark = self.pool.mark(&self.lanes[lane]).unwrap();
                    self.lanes[lane].synchronize().unwrap();
                    self.pool.passed(&mark).unwrap();
                } else {
                    self.lanes[lane].synchronize().unwrap();
                }
            }
            Step::Advance { lane, all } => {
                if all {
                    self.simulator.advance_all();
                } else {
                    self.simulator.advance(self.handle(lane_of(lane)).raw());
                }
            }
            Step::Replace { lane } => {
                let lane = lane_of(lane);
                let of_lane = |block: &Block| block.lane == lane || block.uses.contains(&lane);
                while let Some(index) = self.live.iter().position(of_lane) {
                    self.free(index, self.live[index].lane);
                }
                self.lanes[lane] = self.device.stream().unwrap();
            }
            Step::Trim { keep_granules } => {
                self.pool.trim_to(u64::from(keep_granules) * GRANULE).unwrap();
            }
            Step::Limit { granules } => {
                self.pool.limit_to(granules.map(|count| u64::from(count) * GRANULE)).unwrap();
            }
            Step::Sleep { lane, keeps } => self.sleep(lane_of(lane), keeps),
            Step::Wake { lane } => self.wake(lane_of(lane)),
            Step::Fault { call } => self.fault = Some(u64::from(call % 12) + 1),
        }
    }

    fn check(&self) {
        self.pool.validate().unwrap();
        let tagged = self.pool.tagged(TAG).unwrap().stats();
        let count = self.live.iter().filter(|block| block.tagged).count();
        assert_eq!(self.pool.stats().live_count, self.live.len() as u64);
        assert_eq!(tagged.live_count, count as u64);
    }

    fn end(mut self) {
        self.fault = None;
        while let Some(last) = self.live.len().checked_sub(1) {
            self.free(last, self.live[last].lane);
        }
        self.check();
        // What the first trims ask about is done by the next: a schedule may wait for somebody who waits.
        for _ in 0..3 {
            self.simulator.run_until_idle();
            for lane in &self.lanes {
                lane.synchronize().unwrap();
            }
            self.pool.trim_to(0).unwrap();
            self.pool.tagged(TAG).unwrap().trim_to(0).unwrap();
        }
        assert_eq!(self.pool.tagged(TAG).unwrap().stats().mapped_bytes, 0);
        assert_eq!(self.pool.stats().mapped_bytes, 0);
        let Self { simulator, pool, lanes, .. } = self;
        drop((pool, lanes));
        assert_eq!(simulator.memory_used(0), 0);
        simulator.assert_clean();
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

//! Programs on a pool of either profile, found by what they reach in its code: blocks overlap nowhere, the books
//! are right after every call, work meets nobody else's in memory, and nothing stays at the end.

#![no_main]

mod machine;

use arbitrary::Arbitrary;
use cuda_sim::race::AccessKind;
use libfuzzer_sys::fuzz_target;
use machine::{GRANULE, LANES, MOST_STEPS, Machine, Setup, Size, lane_of};
use vpmm::{
    Buffers, Contents, DevicePtr, Error, PagedConfig, PendingPolicy, Pool, PoolConfig, Reuse,
    Stats, WaitPolicy,
};

const TAG: &str = "tag";
/// A check looks at every unit of the addresses.
const CHECKED_EACH: usize = 8;

#[derive(Arbitrary, Debug)]
struct Program {
    setup: Setup,
    is_paged: bool,
    limit_granules: Option<u8>,
    address_granules: u8,
    waits_first: bool,
    reuse: [bool; 3],
    moves: Moves,
    steps: Vec<Step>,
}

#[derive(Arbitrary, Debug)]
enum Moves {
    None,
    Some(u16),
    All,
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

impl Program {
    fn limit_bytes(&self) -> Option<u64> {
        self.limit_granules.map(|granules| u64::from(granules % 28 + 1) * GRANULE)
    }

    fn va_size_bytes(&self) -> u64 {
        u64::from(self.address_granules % 64 + 16) * GRANULE
    }

    fn pending_policy(&self) -> PendingPolicy {
        if self.waits_first { PendingPolicy::WaitFirst } else { PendingPolicy::default() }
    }

    fn reuse(&self) -> Reuse {
        let mut reuse = Reuse::default();
        [reuse.follow_event_dependencies, reuse.opportunistic, reuse.internal_dependencies] =
            self.reuse;
        reuse
    }

    fn config(&self) -> PoolConfig {
        let mut config = PoolConfig::default();
        config.limit_bytes = self.limit_bytes();
        config.va_size_bytes = Some(self.va_size_bytes());
        config.out_of_memory = WaitPolicy::FailAtOnce;
        config.pending_policy = self.pending_policy();
        config.reuse = self.reuse();
        config.moves_per_second = match self.moves {
            Moves::None => 0,
            Moves::Some(number) => number.into(),
            Moves::All => u32::MAX,
        };
        config
    }

    fn paged_config(&self) -> PagedConfig {
        let mut config = PagedConfig::default();
        config.limit_bytes = self.limit_bytes();
        config.va_size_bytes = self.va_size_bytes();
        config.out_of_memory = WaitPolicy::FailAtOnce;
        config.pending_policy = self.pending_policy();
        config.reuse = self.reuse();
        config
    }
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
    machine: Machine,
    pool: Pool,
    is_paged: bool,
    live: Vec<Block>,
    is_asleep: bool,
}

impl Run {
    fn new(program: &Program) -> Option<Self> {
        let machine = Machine::new(&program.setup)?;
        let pool = if program.is_paged {
            Pool::paged(&machine.device, &program.paged_config())
        } else {
            Pool::new(&machine.device, &program.config())
        };
        let (pool, is_paged) = (pool.unwrap(), program.is_paged);
        Some(Self { machine, pool, is_paged, live: Vec::new(), is_asleep: false })
    }

    /// Has one stream's work come after what another has now, and tells the pool.
    fn follow(&self, from: usize, to: usize) {
        let lanes = &self.machine.lanes;
        let mark = self.pool.mark(&lanes[from]).unwrap();
        self.machine.order(from, to);
        self.pool.follows(&lanes[to], &mark).unwrap();
    }

    fn malloc(&mut self, bytes: u64, lane: usize, tagged: bool) {
        let made = self.machine.call(|machine| {
            let (count, stream) = (bytes as usize, &machine.lanes[lane]);
            if tagged {
                self.pool.tagged(TAG)?.malloc(count, stream)
            } else {
                self.pool.malloc(count, stream)
            }
        });
        match made {
            Some(Ok(ptr)) => {
                self.machine.take(ptr, bytes, lane);
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
            self.machine.order(other, lane);
        }
        let contents = if keeps { Contents::Keep(Buffers::Release) } else { Contents::Discard };
        let slept =
            self.machine.call(|machine| self.pool.suspend(TAG, &machine.lanes[lane], &contents));
        match slept {
            Some(Ok(_)) => self.is_asleep = true,
            Some(Err(Error::Asleep { .. })) => assert!(self.is_asleep),
            Some(Err(error)) => assert!(matches!(error, Error::UnknownTag { .. }), "{error}"),
            None => {}
        }
    }

    /// All that uses the heap comes after.
    fn wake(&mut self, lane: usize) {
        let woken = self.machine.call(|machine| self.pool.resume(TAG, &machine.lanes[lane]));
        match woken {
            Some(Ok(_)) => {
                self.is_asleep = false;
                for other in (0..LANES).filter(|other| *other != lane) {
                    self.machine.order(lane, other);
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
            self.machine.order(of, lane);
        }
        let freed = self.machine.call(|machine| self.pool.free(ptr, &machine.lanes[lane]));
        let Some(freed) = freed else { return };
        freed.unwrap();
        self.live.swap_remove(index);
        self.machine.leave(ptr);
    }

    fn step(&mut self, step: &Step) {
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
                    self.machine.order(of, lane);
                    self.pool.record_stream(ptr, &self.machine.lanes[lane]).unwrap();
                    self.live[index].uses.push(lane);
                }
                // Two further streams may do so at one time.
                self.machine.work(ptr, bytes, lane, AccessKind::Read);
            }
            Step::Follow { from, to } => self.follow(lane_of(from), lane_of(to)),
            Step::Wait { lane, tells } => {
                let stream = &self.machine.lanes[lane_of(lane)];
                let mark = tells.then(|| self.pool.mark(stream).unwrap());
                stream.synchronize().unwrap();
                if let Some(mark) = mark {
                    self.pool.passed(&mark).unwrap();
                }
            }
            Step::Advance { lane, all } => self.machine.advance(lane, all),
            Step::Replace { lane } => {
                let lane = lane_of(lane);
                let of_lane = |block: &Block| block.lane == lane || block.uses.contains(&lane);
                while let Some(index) = self.live.iter().position(of_lane) {
                    self.free(index, self.live[index].lane);
                }
                self.machine.lanes[lane] = self.machine.device.stream().unwrap();
            }
            Step::Trim { keep_granules } => {
                self.pool.trim_to(u64::from(keep_granules) * GRANULE).unwrap();
            }
            Step::Limit { granules } => {
                self.pool.limit_to(granules.map(|count| u64::from(count) * GRANULE)).unwrap();
            }
            Step::Sleep { lane, keeps } => self.sleep(lane_of(lane), keeps),
            Step::Wake { lane } => self.wake(lane_of(lane)),
            Step::Fault { call } => self.machine.fault = Some(u64::from(call % 12) + 1),
        }
    }

    fn check(&self) {
        self.pool.validate().unwrap();
        let tagged = self.pool.tagged(TAG).unwrap().stats();
        let small = |stats: Stats| if self.is_paged { stats.small_live_count } else { 0 };
        let count = |stats: Stats| stats.live_count + small(stats);
        let in_tagged = self.live.iter().filter(|block| block.tagged).count();
        assert_eq!(count(self.pool.stats()), self.live.len() as u64);
        assert_eq!(count(tagged), in_tagged as u64);
    }

    fn end(mut self) {
        self.machine.fault = None;
        while let Some(last) = self.live.len().checked_sub(1) {
            self.free(last, self.live[last].lane);
        }
        self.check();
        let Self { machine, pool, .. } = self;
        let tagged = pool.tagged(TAG).unwrap();
        // What the first trims ask about is done by the next: a schedule may wait for somebody who waits.
        for _ in 0..3 {
            machine.settle();
            pool.trim_to(0).unwrap();
            tagged.trim_to(0).unwrap();
        }
        assert_eq!((pool.stats().mapped_bytes, tagged.stats().mapped_bytes), (0, 0));
        drop((tagged, pool));
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

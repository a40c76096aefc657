//! A program that a seed stands for, over several pools, made up as it goes.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Mutex, PoisonError, mpsc};
use std::time::Duration;

use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::{CUresult, CUstream};
use vpmm::{
    Access, Background, Buffers, Contents, DevicePtr, Error, GraphPool, Imported, PendingPolicy,
    Pool, PoolConfig, Sharing, Stats, Stream, StreamHandle, WaitPolicy,
};

use crate::graph::{self, Graph};
use crate::support::{Lcg, Rig, call};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GRANULE: u64 = 2 * MIB;
const LIMIT: u64 = 20;
const FAULT: CUresult = CUresult::CUDA_ERROR_UNKNOWN;
const TAGS: [&str; 2] = ["weights", "cache"];

static REACHED: Mutex<BTreeMap<&'static str, u64>> = Mutex::new(BTreeMap::new());

fn reach(what: &'static str) {
    *REACHED.lock().unwrap_or_else(PoisonError::into_inner).entry(what).or_default() += 1;
}

/// How often programs came to what they are for.
pub(crate) fn reached() -> BTreeMap<&'static str, u64> {
    REACHED.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

enum Of {
    Owned(Stream),
    Raw(usize),
    Legacy,
    PerThread(usize),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Begun,
    Capturing,
    Captured,
}

/// What a lane does for a graph's pool.
#[derive(Clone, Copy, Debug)]
struct Part {
    gp: usize,
    phase: Phase,
    fork: Option<usize>,
    is_fork: bool,
}

struct Lane {
    of: Of,
    part: Option<Part>,
    /// Raw, and the pool may still record on it.
    must_live: bool,
}

impl Lane {
    fn handle(&self) -> StreamHandle {
        match &self.of {
            Of::Owned(stream) => stream.handle(),
            // SAFETY: alive until the lane is replaced.
            Of::Raw(raw) => unsafe { StreamHandle::from_raw(*raw as CUstream) },
            Of::Legacy => StreamHandle::LEGACY,
            Of::PerThread(_) => StreamHandle::PER_THREAD,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Home {
    Main,
    Tag(usize),
    /// Of a graph's pool, by its serial number; of which graph of it.
    Graph(u64, usize),
}

#[derive(Clone, Debug)]
struct Live {
    pool: u64,
    home: Home,
    ptr: DevicePtr,
    bytes: u64,
    seed: u64,
    of: usize,
    uses: BTreeSet<usize>,
    /// In a capture under way: by which lane's.
    capture: Option<usize>,
}

struct Gp<'a> {
    serial: u64,
    pool: u64,
    gp: GraphPool,
    graphs: Vec<Executable<'a>>,
    last: Option<usize>,
    /// What a launch comes after.
    before: BTreeSet<usize>,
    busy: bool,
    /// Captures so far.
    captures: usize,
}

struct Executable<'a> {
    graph: Graph<'a>,
    number: usize,
}
// SAFETY: tokens for the driver.
unsafe impl Send for Executable<'_> {}

struct Slot {
    id: u64,
    pool: Pool,
    shares: bool,
    helped: bool,
    asleep: [bool; 2],
    kept: [bool; 2],
    access: Access,
    exported: bool,
}

pub(crate) struct World<'a> {
    rig: &'a Rig,
    peer: &'a Rig,
    peer_stream: Stream,
    sim: Simulator,
    random: Lcg,
    lanes: Vec<Lane>,
    slots: Vec<Slot>,
    /// Pools without handles.
    orphans: BTreeMap<u64, bool>,
    live: Vec<Live>,
    gps: Vec<Gp<'a>>,
    next: u64,
    /// Whether anything may follow the clock, or another thread: then a seed is not one run.
    timed: bool,
    faulty: bool,
    had_faults: bool,
    verbose: bool,
    step: usize,
    thread: usize,
    /// Whether the call at hand is of a main heap alone.
    kept_to_main: bool,
}

enum Turn {
    On,
    Exits,
}

fn held(stats: &Stats) -> [u64; 5] {
    let free = stats.free_bytes() + stats.cached_bytes;
    [stats.live_bytes, stats.live_count, free, stats.mapped_bytes, stats.transit_bytes]
}

macro_rules! note {
    ($world:expr, $($what:tt)*) => {
        if $world.verbose { eprintln!("{:4} t{} {}", $world.step, $world.thread, format!($($what)*)); }
    };
}

mod blocks;
mod books;
mod graphs;
mod pools;
mod program;
mod sleep;
mod streams;

pub(crate) use program::run;

impl<'a> World<'a> {
    fn below(&mut self, bound: usize) -> usize {
        self.random.below(bound as u64) as usize
    }

    fn one_in(&mut self, of: usize) -> bool {
        self.below(of) == 0
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn bytes(&mut self) -> u64 {
        let (low, high) = [
            (1, 2 * KIB),
            (1, 64 * KIB),
            (63 * KIB, 66 * KIB),
            (64 * KIB, 2 * MIB),
            (64 * KIB, 2 * MIB),
            (2 * MIB - 2 * KIB, 2 * MIB + 2 * KIB),
            (2 * MIB, 12 * MIB),
            (12 * MIB, 44 * MIB),
        ][self.below(8)];
        if self.one_in(5) {
            return (1 + self.random.below(9)) * GRANULE;
        }
        low + self.random.below(high - low)
    }

    fn lane(&mut self, thread: usize) -> Option<usize> {
        let usable = self.usable(thread);
        let at = self.below(usable.len().max(1));
        usable.get(at).copied()
    }

    fn usable(&self, thread: usize) -> Vec<usize> {
        let is_usable = |lane: &Lane| {
            lane.part.is_none() && !matches!(lane.of, Of::PerThread(of) if of != thread)
        };
        (0..self.lanes.len()).filter(|at| is_usable(&self.lanes[*at])).collect()
    }

    fn shared(&self, thread: usize) -> Vec<usize> {
        let mut usable = self.usable(thread);
        usable.retain(|at| !matches!(self.lanes[*at].of, Of::PerThread(_)));
        usable
    }

    fn pick(&mut self, of: &[usize]) -> Option<usize> {
        let at = self.below(of.len().max(1));
        of.get(at).copied()
    }

    fn order(&self, from: usize, to: usize) {
        if from != to {
            self.rig.order(self.lanes[from].handle(), self.lanes[to].handle());
        }
    }

    fn is_capturing(&self) -> bool {
        self.lanes.iter().any(|lane| lane.part.is_some_and(|part| part.phase == Phase::Capturing))
    }

    fn slot(&self, id: u64) -> Option<usize> {
        self.slots.iter().position(|slot| slot.id == id)
    }

    /// A handle of the pool of an allocation.
    fn pool_of(&self, live: &Live) -> Pool {
        match self.slot(live.pool) {
            Some(slot) => self.slots[slot].pool.clone(),
            None => Pool::of(&self.rig.driver, live.ptr.address()).expect("an orphan"),
        }
    }

    fn validate(&self) {
        for slot in &self.slots {
            slot.pool.validate().unwrap_or_else(|violation| panic!("{violation}\n{:?}", slot.pool));
        }
        for live in &self.live {
            if self.slot(live.pool).is_none() {
                let pool = self.pool_of(live);
                pool.validate().unwrap_or_else(|violation| panic!("orphan: {violation}\n{pool:?}"));
            }
        }
    }

    /// A call of a pool, in which a driver call may fail first.
    fn attempt<T>(
        &mut self,
        pool: &Pool,
        unchanged: bool,
        call: impl Fn() -> Result<T, Error>,
    ) -> Result<T, Error> {
        if !self.faulty || !self.one_in(4) {
            return call();
        }
        let n = 1 + self.random.below(12);
        let before = held(&pool.stats());
        let all = self.one_in(4);
        let code = if self.one_in(5) { CUresult::CUDA_ERROR_OUT_OF_MEMORY } else { FAULT };
        note!(self, "  fault at {n}{} {code}", if all { " and after" } else { "" });
        if all {
            self.sim.fail_all_calls_after(n - 1, code);
        } else {
            self.sim.fail_call(n, code);
        }
        let result = call();
        self.sim.clear_faults();
        self.had_faults = true;
        if matches!(&result, Err(Error::Driver { code: of, .. } | Error::HalfAsleep { code: of, .. }) if *of == code)
        {
            note!(self, "  failed {:?}", result.as_ref().err());
            reach("faults met");
            self.validate();
            let helped = self.slots.iter().any(|slot| slot.helped);
            if unchanged && !helped {
                // Other heaps may have made room for it.
                let same = if self.gps.is_empty() && self.kept_to_main { 5 } else { 2 };
                assert_eq!(held(&pool.stats())[..same], before[..same], "a call that failed");
            }
            return call();
        }
        result
    }
}

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

    fn make_pool(&mut self) {
        let mut config = PoolConfig::default();
        config.moves_per_second = [0, 0, 1000, u32::MAX][self.below(4)];
        config.limit_bytes = (self.one_in(2)).then_some(LIMIT * GRANULE);
        config.va_size_bytes = Some([8 * LIMIT, 8 * LIMIT, 24][self.below(3)] * GRANULE);
        if self.one_in(2) {
            config.pending_policy = PendingPolicy::WaitFirst;
        }
        if self.one_in(3) {
            config.reuse.follow_event_dependencies = self.one_in(2);
            config.reuse.opportunistic = self.one_in(2);
            config.reuse.internal_dependencies = self.one_in(2);
        }
        config.patience = Duration::from_micros(if self.one_in(2) { 100 } else { 0 });
        config.out_of_memory = match self.below(3) {
            0 => WaitPolicy::FailAtOnce,
            1 => WaitPolicy::WaitUpTo(Duration::from_micros(300)),
            _ => WaitPolicy::WaitForPending,
        };
        if self.one_in(5) {
            config.release_threshold_bytes = Some(self.random.below(LIMIT) * GRANULE);
        }
        let shares = self.one_in(2);
        if shares {
            config.sharing = Sharing::FileDescriptor;
        }
        let helped = self.one_in(6);
        if helped {
            let mut background = Background::default();
            background.period = Duration::ZERO;
            background.ahead_bytes = self.random.below(6) * GRANULE;
            config.background = Some(background);
        }
        if !self.timed {
            config.moves_per_second *= u32::from(config.moves_per_second == u32::MAX);
            config.patience = Duration::ZERO;
            config.background = None;
            if matches!(config.out_of_memory, WaitPolicy::WaitUpTo(_)) {
                config.out_of_memory = WaitPolicy::FailAtOnce;
            }
        }
        let helped = config.background.is_some();
        let pool = Pool::new(&self.rig.device, &config).expect("a pool");
        let id = self.number();
        note!(self, "pool {id}: {config:?}");
        let (asleep, kept, exported) = ([false; 2], [true; 2], false);
        self.slots.push(Slot {
            id,
            pool,
            shares,
            helped,
            asleep,
            kept,
            access: Access::None,
            exported,
        });
        let handle = &self.slots.last().unwrap().pool;
        if self.random.below(4) == 0 {
            handle.on_out_of_memory_for_test();
        }
    }

    fn malloc(&mut self, thread: usize) {
        let Some(lane) = self.lane(thread) else { return };
        let slot = self.below(self.slots.len());
        let bytes = self.bytes();
        let home = if self.one_in(3) { Home::Tag(self.below(2)) } else { Home::Main };
        let stream = self.lanes[lane].handle();
        let pool = self.slots[slot].pool.clone();
        let id = self.slots[slot].id;
        let result = match home {
            Home::Tag(tag) => match self.attempt(&pool, false, || pool.tagged(TAGS[tag])) {
                Ok(tagged) => self.attempt(&pool, true, || tagged.malloc(bytes as usize, stream)),
                Err(error) => Err(error),
            },
            _ => {
                self.kept_to_main = true;
                let result = self.attempt(&pool, true, || pool.malloc(bytes as usize, stream));
                self.kept_to_main = false;
                result
            }
        };
        note!(self, "malloc {bytes} pool {id} {home:?} lane {lane}: {result:x?}");
        match result {
            Ok(ptr) => self.enter(id, home, ptr, bytes, lane, None),
            Err(Error::Asleep) => {
                let Home::Tag(tag) = home else { panic!("not a tag's") };
                assert!(self.slots[slot].asleep[tag]);
                reach("requests of sleeping heaps");
            }
            Err(error) if error.is_out_of_memory() => reach("requests refused"),
            Err(Error::AddressSpaceExhausted { .. }) => reach("requests without addresses"),
            Err(error) => panic!("{error}"),
        }
    }

    fn enter(
        &mut self,
        pool: u64,
        home: Home,
        ptr: DevicePtr,
        bytes: u64,
        of: usize,
        capture: Option<usize>,
    ) {
        reach(match home {
            Home::Main => "requests",
            Home::Tag(_) => "requests of tags",
            Home::Graph(..) => "requests of graphs",
        });
        assert!(ptr.address().is_multiple_of(512));
        for other in &self.live {
            let (start, end) = (other.ptr.address(), other.ptr.address() + other.bytes);
            assert!(ptr.address() >= end || ptr.address() + bytes <= start, "overlap");
        }
        let seed = self.number() << 40;
        self.rig.fill(ptr.address(), bytes, seed, self.lanes[of].handle());
        self.live.push(Live { pool, home, ptr, bytes, seed, of, uses: BTreeSet::new(), capture });
    }

    fn is_asleep(&self, live: &Live) -> bool {
        match (live.home, self.slot(live.pool)) {
            (Home::Tag(tag), Some(slot)) => self.slots[slot].asleep[tag],
            (Home::Tag(tag), None) => self.pool_of(live).tagged(TAGS[tag]).unwrap().is_asleep(),
            _ => false,
        }
    }

    /// Those that a thread can do something with, on lanes that do not capture.
    fn reachable(&self, thread: usize) -> Vec<usize> {
        let usable = self.usable(thread);
        (0..self.live.len()).filter(|at| {
            let live = &self.live[*at];
            live.capture.is_none() && usable.contains(&live.of)
                && !live.uses.iter().any(|used| {
                    let lane = &self.lanes[*used];
                    lane.part.is_some_and(|part| part.phase == Phase::Capturing) && !matches!(lane.of, Of::Owned(_))
                })
                // A graph's pool that is open to a capture is somebody's.
                && match live.home {
                    Home::Graph(serial, _) => !self.gps.iter().any(|gp| {
                        gp.serial == serial
                            && (gp.busy || gp.before.iter().any(|before| !usable.contains(before)))
                    }),
                    _ => true,
                }
        }).collect()
    }

    /// Has a lane come after everything that an allocation is used by.
    fn after_uses(&self, live: &Live, lane: usize) {
        self.order(live.of, lane);
        if let Home::Graph(serial, _) = live.home
            && let Some(gp) = self.gps.iter().find(|gp| gp.serial == serial)
        {
            for before in &gp.before {
                self.order(*before, lane);
            }
        }
    }

    /// Enqueues a check of the contents, where they are known.
    fn check(&self, live: &Live, lane: usize) {
        let known = match live.home {
            _ if self.is_asleep(live) => false,
            Home::Graph(serial, graph) => match self.gps.iter().find(|gp| gp.serial == serial) {
                _ if graph == usize::MAX => true,
                Some(gp) => gp.last == Some(graph),
                None => false,
            },
            _ => true,
        };
        if known {
            self.rig.check(live.ptr.address(), live.bytes, live.seed, self.lanes[lane].handle());
        }
    }

    fn free(&mut self, thread: usize) {
        let reachable = self.reachable(thread);
        let Some(index) = self.pick(&reachable) else { return };
        let Some(lane) = self.lane(thread) else { return };
        self.free_on(index, lane);
    }

    fn free_on(&mut self, index: usize, lane: usize) {
        let live = self.live[index].clone();
        // The end of a pool may wait for the context.
        if self.slot(live.pool).is_none() && self.is_capturing() {
            return;
        }
        // Launches come after what uses a graph's memory, and only the thread could see to that.
        if matches!((live.home, &self.lanes[lane].of), (Home::Graph(..), Of::PerThread(_))) {
            return;
        }
        self.after_uses(&live, lane);
        self.check(&live, lane);
        if let Home::Graph(serial, _) = live.home
            && let Some(gp) = self.gps.iter_mut().find(|gp| gp.serial == serial)
            && !matches!(self.lanes[lane].of, Of::PerThread(_))
        {
            gp.before.insert(lane);
        }
        let stream = self.lanes[lane].handle();
        let way = self.below(3);
        let is_orphan = self.slot(live.pool).is_none();
        let pool = self.pool_of(&live);
        let driver = self.rig.driver.clone();
        note!(
            self,
            "free {:x?} pool {} {:?} of {} uses {:?} lane {lane} way {way} orphan {is_orphan}",
            live.ptr,
            live.pool,
            live.home,
            live.of,
            live.uses
        );
        let result = self.attempt(&pool, true, || match (way, live.home) {
            (0, _) => Pool::free_any(&driver, live.ptr, stream),
            (1, Home::Tag(tag)) => pool.tagged(TAGS[tag]).unwrap().free(live.ptr, stream),
            _ => pool.free(live.ptr, stream),
        });
        result.expect("a free");
        if live.uses.iter().any(|used| *used != lane) {
            reach("frees with uses");
        }
        if is_orphan {
            reach("frees of orphans");
        }
        let again = pool.free(live.ptr, stream);
        match again {
            Err(
                Error::DoubleFree { .. }
                | Error::ForeignPointer { .. }
                | Error::InteriorPointer { .. }
                | Error::StalePointer { .. },
            ) => {}
            other => panic!("a second free: {other:?}"),
        }
        self.live.swap_remove(index);
        drop(pool);
        if is_orphan && !self.live.iter().any(|other| other.pool == live.pool) {
            note!(self, "orphan {} ends", live.pool);
            assert!(Pool::of(&driver, live.ptr.address()).is_none());
            self.orphans.remove(&live.pool);
        }
    }

    fn use_further(&mut self, thread: usize) {
        let reachable = self.reachable(thread);
        let Some(index) = self.pick(&reachable) else { return };
        let Some(lane) = self.lane(thread) else { return };
        let live = self.live[index].clone();
        if self.is_asleep(&live) || matches!(live.home, Home::Graph(..)) {
            return;
        }
        self.after_uses(&live, lane);
        self.check(&live, lane);
        let (pool, stream) = (self.pool_of(&live), self.lanes[lane].handle());
        note!(self, "use {:x?} pool {} lane {lane}", live.ptr, live.pool);
        self.attempt(&pool, true, || pool.record_stream(live.ptr, stream)).expect("a use");
        self.live[index].uses.insert(lane);
        reach("uses");
    }

    fn follow(&mut self, thread: usize) {
        let (Some(from), Some(to)) = (self.lane(thread), self.lane(thread)) else { return };
        let slot = self.below(self.slots.len());
        let pool = self.slots[slot].pool.clone();
        let (on, after) = (self.lanes[from].handle(), self.lanes[to].handle());
        note!(self, "lane {to} follows {from} in {}", self.slots[slot].id);
        let mark = self.attempt(&pool, true, || pool.mark(on)).expect("a mark");
        if self.one_in(2) {
            self.order(from, to);
            self.attempt(&pool, true, || pool.follows(after, &mark)).expect("an order");
        } else if !self.is_capturing() {
            call!(self.rig.driver, cuCtxSetCurrent(self.rig.device.context()));
            call!(self.rig.driver, cuStreamSynchronize(on.raw()));
            self.attempt(&pool, false, || pool.passed(&mark)).expect("a mark that passed");
        }
    }

    fn synchronize(&mut self, thread: usize) {
        if self.is_capturing() {
            return;
        }
        if self.one_in(4) {
            note!(self, "device sync");
            self.rig.device.synchronize().expect("the device finishes");
            return;
        }
        let Some(lane) = self.lane(thread) else { return };
        note!(self, "sync lane {lane}");
        match &self.lanes[lane].of {
            Of::Owned(stream) => stream.synchronize().expect("it finishes"),
            Of::Legacy => Stream::legacy(&self.rig.device).synchronize().expect("it finishes"),
            Of::PerThread(_) => {
                Stream::per_thread(&self.rig.device).synchronize().expect("it finishes")
            }
            Of::Raw(raw) => {
                call!(self.rig.driver, cuCtxSetCurrent(self.rig.device.context()));
                call!(self.rig.driver, cuStreamSynchronize(*raw as CUstream));
            }
        }
    }

    fn trim(&mut self) {
        let slot = self.below(self.slots.len());
        let keep = self.random.below(LIMIT) * GRANULE * self.random.below(2);
        let pool = self.slots[slot].pool.clone();
        let (free, before) = (self.rig.device.free_memory().unwrap(), pool.stats().mapped_bytes);
        let has_faults = self.had_faults;
        let tag = self.one_in(3).then(|| self.below(2));
        let gone = match tag {
            Some(tag) => {
                let tagged = pool.tagged(TAGS[tag]).expect("a tag");
                self.attempt(&pool, false, || tagged.trim_to(keep)).expect("a trim")
            }
            None => self.attempt(&pool, false, || pool.trim_to(keep)).expect("a trim"),
        };
        note!(self, "trim {tag:?} {} to {keep}: {gone}", self.slots[slot].id);
        if !self.slots.iter().any(|slot| slot.helped)
            && self.orphans.is_empty()
            && !has_faults
            && !self.had_faults
        {
            assert_eq!(self.rig.device.free_memory().unwrap() - free, gone);
            assert!(before - pool.stats().mapped_bytes <= gone);
        }
        reach("trims");
    }

    fn limit(&mut self) {
        let slot = self.below(self.slots.len());
        let most = (!self.one_in(3)).then(|| self.random.below(LIMIT) * GRANULE);
        note!(self, "limit {} to {most:?}", self.slots[slot].id);
        self.slots[slot].pool.limit_to(most).expect("a limit");
    }

    fn look(&mut self) {
        note!(self, "look");
        for slot in &self.slots {
            let stats = slot.pool.stats();
            assert!(stats.live_bytes <= stats.mapped_bytes + (16 << 30), "{stats:?}");
            let live: Vec<&Live> = self.live.iter().filter(|live| live.pool == slot.id).collect();
            assert_eq!(stats.live_count, live.len() as u64, "{stats:?}");
            slot.pool.snapshot();
            let _ = slot.pool.layout().to_string();
            for one in live {
                let found =
                    slot.pool.allocation(one.ptr.address() + one.bytes - 1).expect("it is live");
                assert_eq!(found.start.address(), one.ptr.address());
            }
        }
    }

    fn sleep(&mut self, thread: usize) {
        let (slot, tag) = (self.below(self.slots.len()), self.below(2));
        let id = self.slots[slot].id;
        let Some(lane) = self.lane(thread) else { return };
        let home = Home::Tag(tag);
        let of_tag: Vec<usize> = (0..self.live.len())
            .filter(|at| self.live[*at].pool == id && self.live[*at].home == home)
            .collect();
        let pool = self.slots[slot].pool.clone();
        let stream = self.lanes[lane].handle();
        if self.slots[slot].asleep[tag] {
            let empty = self.one_in(4);
            let result = self.attempt(&pool, true, || {
                if empty {
                    pool.resume_empty(TAGS[tag], stream)
                } else {
                    pool.resume(TAGS[tag], stream)
                }
            });
            note!(self, "resume {} {id} empty {empty} lane {lane}: {result:?}", TAGS[tag]);
            match result {
                Ok(_) => {
                    reach("wakes");
                    self.slots[slot].asleep[tag] = false;
                    let kept = self.slots[slot].kept[tag] && !empty;
                    for at in of_tag {
                        self.live[at].of = lane;
                        if !kept {
                            let live = &self.live[at];
                            self.rig.fill(live.ptr.address(), live.bytes, live.seed, stream);
                        }
                    }
                }
                Err(error) if error.is_out_of_memory() => reach("wakes refused"),
                // What could not be undone before waits for the context.
                Err(Error::StreamCapturing)
                    if self.lanes.iter().any(|lane| lane.part.is_some()) => {}
                Err(error) => panic!("{error}"),
            }
            return;
        }
        if pool.tagged(TAGS[tag]).is_err() {
            return;
        }
        // All work of the heap's allocations comes before.
        let reachable = self.reachable(thread);
        if of_tag.iter().any(|at| !reachable.contains(at)) {
            return;
        }
        for at in &of_tag {
            let live = &self.live[*at];
            if live.uses.iter().any(|used| !self.usable(thread).contains(used)) {
                return;
            }
        }
        for at in &of_tag {
            let live = &self.live[*at];
            self.order(live.of, lane);
            live.uses.iter().for_each(|used| self.order(*used, lane));
        }
        let contents = match self.below(4) {
            0 => Contents::Discard,
            1 => Contents::Keep(Buffers::Retain),
            _ => Contents::Keep(Buffers::Release),
        };
        let result = self.attempt(&pool, false, || pool.suspend(TAGS[tag], stream, &contents));
        note!(self, "suspend {} {id} {contents:?} lane {lane}: {result:?}", TAGS[tag]);
        let tagged = pool.tagged(TAGS[tag]).unwrap();
        match result {
            Ok(_) => {
                reach("sleeps");
                assert!(tagged.is_asleep());
            }
            Err(Error::Exported { .. }) => assert!(self.slots[slot].exported),
            Err(Error::StreamCapturing)
                if self.lanes.iter().any(|lane| lane.part.is_some() || lane.must_live) =>
            {
                reach("sleeps refused")
            }
            Err(Error::Asleep) if tagged.is_asleep() => {} // half, by a fault
            Err(Error::OutOfMemory { .. } | Error::Driver { .. }) if self.faulty => {}
            Err(error) => panic!("{error}"),
        }
        if tagged.is_asleep() {
            self.slots[slot].asleep[tag] = true;
            self.slots[slot].kept[tag] = contents != Contents::Discard;
        }
        for at in of_tag {
            self.live[at].of = lane;
        }
    }

    fn export(&mut self, thread: usize) {
        if self.is_capturing() {
            return;
        }
        let reachable = self.reachable(thread);
        let Some(index) = self.pick(&reachable) else { return };
        let live = self.live[index].clone();
        let Some(slot) = self.slot(live.pool) else { return };
        if !self.slots[slot].shares || matches!(live.home, Home::Graph(..)) || self.is_asleep(&live)
        {
            return;
        }
        call!(self.rig.driver, cuCtxSetCurrent(self.rig.device.context()));
        call!(self.rig.driver, cuStreamSynchronize(self.lanes[live.of].handle().raw()));
        let pool = self.slots[slot].pool.clone();
        let (here, there) = UnixStream::pair().unwrap();
        let whole = self.one_in(3) && live.home == Home::Main;
        note!(self, "export {:x?} of {} whole {whole}", live.ptr, live.pool);
        let rig = self.rig;
        std::thread::scope(|scope| {
            let importer = scope.spawn(|| {
                let memory =
                    Imported::receive(&rig.device, &there, Access::ReadWrite).expect("an import");
                let stream = rig.stream();
                let ptr = memory.translate(live.ptr.address()).expect("it is there");
                rig.check(ptr.address(), live.bytes, live.seed, stream.handle());
                stream.synchronize().unwrap();
            });
            let mut export = match live.home {
                _ if whole => pool.export_all(),
                Home::Main => pool.export(live.ptr),
                Home::Tag(tag) => {
                    let tagged = pool.tagged(TAGS[tag]).unwrap();
                    tagged.export(live.ptr).unwrap().send(&here).expect("sent");
                    importer.join().expect("imported");
                    return;
                }
                Home::Graph(..) => unreachable!(),
            }
            .expect("an export");
            export.send(&here).expect("sent");
            importer.join().expect("imported");
        });
        self.slots[slot].exported = true;
        reach("exports");
    }

    fn access(&mut self) {
        let slot = self.below(self.slots.len());
        if self.is_capturing() {
            return;
        }
        let access =
            [Access::None, Access::Read, Access::ReadWrite, Access::ReadWrite][self.below(4)];
        let pool = self.slots[slot].pool.clone();
        let device = self.peer.device.clone();
        note!(self, "access {} {access:?}", self.slots[slot].id);
        self.attempt(&pool, true, || pool.set_access(&device, access)).expect("access");
        self.slots[slot].access = access;
    }

    fn look_from_peer(&mut self, thread: usize) {
        if self.is_capturing() {
            return;
        }
        let reachable = self.reachable(thread);
        let Some(index) = self.pick(&reachable) else { return };
        let live = self.live[index].clone();
        let Some(slot) = self.slot(live.pool) else { return };
        if self.slots[slot].access == Access::None
            || matches!(live.home, Home::Graph(..))
            || self.is_asleep(&live)
        {
            return;
        }
        note!(self, "look {:x?} from the peer", live.ptr);
        call!(self.rig.driver, cuCtxSetCurrent(self.rig.device.context()));
        call!(self.rig.driver, cuStreamSynchronize(self.lanes[live.of].handle().raw()));
        self.peer.check(live.ptr.address(), live.bytes, live.seed, self.peer_stream.handle());
        self.peer_stream.synchronize().unwrap();
        reach("looks from a peer");
    }

    fn replace(&mut self, thread: usize) {
        let shared = self.shared(thread);
        let Some(lane) = self.pick(&shared) else { return };
        if self.lanes[lane].must_live || matches!(self.lanes[lane].of, Of::Legacy) {
            return;
        }
        let others: Vec<usize> = shared.iter().copied().filter(|other| *other != lane).collect();
        let Some(heir) = self.pick(&others) else { return };
        note!(self, "replace lane {lane}, heir {heir}");
        self.leave(thread, lane, heir);
        let rig = self.rig;
        let raw = !self.one_in(2);
        let former = std::mem::replace(&mut self.lanes[lane].of, Of::Legacy);
        match former {
            Of::Owned(stream) => {
                let fault = self.faulty && self.one_in(6);
                if fault {
                    self.had_faults = true;
                    let n = 1 + self.random.below(4);
                    note!(self, "  fault at {n} of the end");
                    self.sim.fail_call(n, FAULT);
                }
                drop(stream);
                self.sim.clear_faults();
            }
            Of::Raw(raw) => {
                call!(rig.driver, cuCtxSetCurrent(rig.device.context()));
                call!(rig.driver, cuStreamDestroy_v2(raw as CUstream));
            }
            _ => unreachable!(),
        }
        note!(self, "  raw {raw}");
        self.lanes[lane].of = if raw { self.raw() } else { Of::Owned(rig.stream()) };
        reach("streams replaced");
    }

    fn raw(&mut self) -> Of {
        let (raw, _) = crate::support::streams::make(self.rig, u32::from(!self.one_in(4)));
        Of::Raw(raw as usize)
    }

    /// What is a lane's becomes another's, before it ends.
    fn leave(&mut self, thread: usize, lane: usize, heir: usize) {
        self.order(lane, heir);
        let is_owned = matches!(self.lanes[lane].of, Of::Owned(_));
        for at in (0..self.live.len()).rev() {
            if self.live[at].of == lane {
                self.live[at].of = heir;
            }
            if self.live[at].uses.contains(&lane) {
                if is_owned {
                    self.live[at].uses.remove(&lane);
                } else if self.reachable(thread).contains(&at) {
                    self.free_on(at, heir);
                } else {
                    panic!("used by {lane}, and nobody can free it");
                }
            }
        }
        for gp in &mut self.gps {
            if gp.before.remove(&lane) {
                gp.before.insert(heir);
            }
        }
    }

    fn can_leave(&self, thread: usize, lane: usize) -> bool {
        let reachable = self.reachable(thread);
        let owned = matches!(self.lanes[lane].of, Of::Owned(_));
        self.live
            .iter()
            .enumerate()
            .all(|(at, live)| !live.uses.contains(&lane) || owned || reachable.contains(&at))
    }

    // ---- graphs

    fn begin(&mut self, thread: usize) {
        let lanes: Vec<usize> = self.capturable(thread);
        let Some(lane) = self.pick(&lanes) else { return };
        let slot = self.below(self.slots.len());
        let (id, pool) = (self.slots[slot].id, self.slots[slot].pool.clone());
        let known: Vec<usize> = (0..self.gps.len())
            .filter(|at| !self.gps[*at].busy && self.gps[*at].pool == id)
            .collect();
        let gp = match self.pick(&known) {
            Some(gp) if !self.one_in(3) => {
                if self.gps[gp].before.iter().any(|before| !self.shared(thread).contains(before)) {
                    return;
                }
                gp
            }
            _ => {
                if self.gps.len() > 3 {
                    return;
                }
                let gp = match self.attempt(&pool, true, || pool.graph_pool()) {
                    Ok(gp) => gp,
                    Err(error) if error.is_out_of_memory() => return,
                    Err(Error::AddressSpaceExhausted { .. }) if self.faulty => return,
                    Err(error) => panic!("{error}"),
                };
                let serial = self.number();
                self.gps.push(Gp {
                    serial,
                    pool: id,
                    gp,
                    graphs: vec![],
                    last: None,
                    before: BTreeSet::new(),
                    busy: false,
                    captures: 0,
                });
                self.gps.len() - 1
            }
        };
        let stream = self.lanes[lane].handle();
        note!(self, "begin gp {} of {id} lane {lane}", self.gps[gp].serial);
        let n = self.faulty && self.one_in(4);
        if n {
            let at = 1 + self.random.below(6);
            self.had_faults = true;
            self.sim.fail_call(at, FAULT);
        }
        let begun = self.gps[gp].gp.begin(stream);
        self.sim.clear_faults();
        match begun {
            Ok(()) => {}
            Err(Error::Driver { code: FAULT, .. }) if n => {
                self.gps[gp].gp.begin(stream).expect("begun")
            }
            Err(error) => panic!("{error}"),
        }
        self.gps[gp].busy = true;
        // What is allocated before the capture is no graph's, but was perhaps.
        for before in self.gps[gp].before.iter().copied().collect::<Vec<_>>() {
            self.order(before, lane);
        }
        self.gps[gp].before.insert(lane);
        self.lanes[lane].part = Some(Part { gp, phase: Phase::Begun, fork: None, is_fork: false });
        reach("begun");
    }

    fn capturable(&self, thread: usize) -> Vec<usize> {
        let mut lanes = self.shared(thread);
        lanes.retain(|at| match self.lanes[*at].of {
            Of::Owned(_) => true,
            Of::Raw(raw) => {
                let mut flags = 0;
                call!(self.rig.driver, cuStreamGetFlags(raw as CUstream, &mut flags));
                flags == 1
            }
            _ => false,
        });
        lanes
    }

    /// The next thing on a lane that takes part in a capture, or will.
    fn capture(&mut self, thread: usize) {
        let parts: Vec<usize> = (0..self.lanes.len())
            .filter(|at| self.lanes[*at].part.is_some_and(|part| !part.is_fork))
            .collect();
        let Some(lane) = self.pick(&parts) else { return self.begin(thread) };
        let part = self.lanes[lane].part.unwrap();
        let serial = self.gps[part.gp].serial;
        let stream = self.lanes[lane].handle();
        let id = self.gps[part.gp].pool;
        let pool = self.slots[self.slot(id).unwrap()].pool.clone();
        match part.phase {
            Phase::Begun => match self.below(4) {
                0 => self.malloc_for_graph(lane, lane, usize::MAX, None),
                1 if self.one_in(3) => {
                    note!(self, "end without a capture gp {serial} lane {lane}");
                    self.end_part(lane);
                }
                _ => {
                    note!(self, "capture gp {serial} lane {lane}");
                    call!(self.rig.driver, cuCtxSetCurrent(self.rig.device.context()));
                    // One that another thread ends is relaxed.
                    graph::begin(self.rig, stream, graph::RELAXED);
                    let others: Vec<usize> = self.capturable(thread);
                    let fork = if self.one_in(2) { self.pick(&others) } else { None };
                    if let Some(fork) = fork {
                        note!(self, "  with lane {fork}");
                        self.order(lane, fork);
                        self.lanes[fork].part = Some(Part {
                            gp: part.gp,
                            phase: Phase::Capturing,
                            fork: None,
                            is_fork: true,
                        });
                        self.gps[part.gp].before.insert(fork);
                    }
                    self.gps[part.gp].captures += 1;
                    self.lanes[lane].part = Some(Part { phase: Phase::Capturing, fork, ..part });
                }
            },
            Phase::Capturing => {
                let on = match part.fork {
                    Some(fork) if self.one_in(2) => fork,
                    _ => lane,
                };
                match self.below(8) {
                    0..3 => {
                        let graph = self.gps[part.gp].captures;
                        self.malloc_for_graph(lane, on, graph, Some(lane));
                    }
                    3..5 => {
                        let mine: Vec<usize> = (0..self.live.len())
                            .filter(|at| self.live[*at].capture == Some(lane))
                            .collect();
                        let Some(index) = self.pick(&mine) else { return };
                        let live = self.live[index].clone();
                        self.order(live.of, on);
                        self.rig.check(
                            live.ptr.address(),
                            live.bytes,
                            live.seed,
                            self.lanes[on].handle(),
                        );
                        let stream = self.lanes[on].handle();
                        note!(self, "free {:x?} in the capture of {lane} on {on}", live.ptr);
                        self.attempt(&pool, true, || pool.free(live.ptr, stream))
                            .expect("a free in a capture");
                        self.live.swap_remove(index);
                        reach("frees in captures");
                    }
                    5 => {
                        // Ordinary memory, whose work on this lane was before the capture.
                        let mine: Vec<usize> = (0..self.live.len())
                            .filter(|at| {
                                let live = &self.live[*at];
                                live.of == on
                                    && live.capture.is_none()
                                    && !matches!(live.home, Home::Graph(..))
                                    && !live.uses.iter().any(|used| {
                                        *used != on
                                            && (self.lanes[*used].part.is_some()
                                                || matches!(self.lanes[*used].of, Of::PerThread(_)))
                                    })
                            })
                            .collect();
                        let Some(index) = self.pick(&mine) else { return };
                        let live = self.live[index].clone();
                        let (of, stream) = (self.pool_of(&live), self.lanes[on].handle());
                        if self.slot(live.pool).is_none() {
                            return;
                        }
                        // A pool that is not open to the capture knows raw streams in captures not.
                        if live.pool != id && matches!(self.lanes[on].of, Of::Raw(_)) {
                            return;
                        }
                        note!(
                            self,
                            "free {:x?} of {} {:?}, ordinary, in the capture of {lane} on {on}",
                            live.ptr,
                            live.pool,
                            live.home
                        );
                        self.attempt(&of, true, || of.free(live.ptr, stream))
                            .expect("a free in a capture");
                        let again = of.free(live.ptr, stream);
                        assert!(
                            matches!(
                                again,
                                Err(Error::DoubleFree { .. } | Error::ForeignPointer { .. })
                            ),
                            "{again:?}"
                        );
                        self.live.swap_remove(index);
                        reach("ordinary frees in captures");
                    }
                    _ => {
                        if let Some(fork) = part.fork {
                            self.order(fork, lane);
                            self.lanes[fork].part = None;
                        }
                        let way = self.below(8);
                        note!(self, "stop gp {serial} lane {lane} way {way}");
                        if way == 0 {
                            let fork = part.fork;
                            self.end_part(lane);
                            for lane in [Some(lane), fork].into_iter().flatten() {
                                self.lanes[lane].must_live |=
                                    matches!(self.lanes[lane].of, Of::Raw(_));
                            }
                        }
                        let mut graph = graph::stop(self.rig, stream);
                        graph.prepare();
                        let number = self.gps[part.gp].captures;
                        self.gps[part.gp].graphs.push(Executable { graph, number });
                        for live in self.live.iter_mut().filter(|live| live.capture == Some(lane)) {
                            live.capture = None;
                            live.of = lane;
                        }
                        if way > 0 {
                            self.lanes[lane].part =
                                Some(Part { phase: Phase::Captured, fork: None, ..part });
                        }
                        reach("captures");
                    }
                }
            }
            Phase::Captured => {
                note!(self, "end gp {serial} lane {lane}");
                self.end_part(lane);
            }
        }
    }

    fn end_part(&mut self, lane: usize) {
        let part = self.lanes[lane].part.take().unwrap();
        let stream = self.lanes[lane].handle();
        let fault = self.faulty && self.one_in(4);
        if fault {
            self.had_faults = true;
            let n = 1 + self.random.below(6);
            note!(self, "  fault at {n}");
            self.sim.fail_call(n, FAULT);
        }
        let ended = self.gps[part.gp].gp.end(stream);
        self.sim.clear_faults();
        match ended {
            Ok(()) => {}
            Err(Error::Driver { code: FAULT, .. }) if fault => {
                // Where entering the context failed it has not ended.
                let again = self.gps[part.gp].gp.end(stream);
                assert!(matches!(again, Ok(()) | Err(Error::GraphPool { .. })), "{again:?}");
            }
            Err(error) => panic!("{error}"),
        }
        self.gps[part.gp].busy = false;
    }

    fn malloc_for_graph(&mut self, lane: usize, on: usize, graph: usize, capture: Option<usize>) {
        let part = self.lanes[lane].part.unwrap();
        let (serial, id) = (self.gps[part.gp].serial, self.gps[part.gp].pool);
        let pool = self.slots[self.slot(id).unwrap()].pool.clone();
        let bytes = self.bytes();
        let stream = self.lanes[on].handle();
        let result = self.attempt(&pool, true, || pool.malloc(bytes as usize, stream));
        note!(self, "malloc {bytes} for gp {serial} on {on} of {lane}: {result:x?}");
        match result {
            Ok(ptr) => self.enter(id, Home::Graph(serial, graph), ptr, bytes, on, capture),
            Err(error) if error.is_out_of_memory() => reach("requests of graphs refused"),
            Err(error) => panic!("{error}"),
        }
    }

    fn launch(&mut self, thread: usize) {
        let ready: Vec<usize> = (0..self.gps.len())
            .filter(|at| !self.gps[*at].busy && !self.gps[*at].graphs.is_empty())
            .collect();
        let Some(at) = self.pick(&ready) else { return };
        let shared = self.shared(thread);
        let Some(lane) = self.pick(&shared) else { return };
        if self.gps[at].before.iter().any(|before| !shared.contains(before)) {
            return;
        }
        let which = self.below(self.gps[at].graphs.len());
        note!(self, "launch graph {which} of gp {} on {lane}", self.gps[at].serial);
        let before: Vec<usize> = self.gps[at].before.iter().copied().collect();
        for before in before {
            self.order(before, lane);
        }
        let gp = &mut self.gps[at];
        call!(self.rig.driver, cuCtxSetCurrent(self.rig.device.context()));
        gp.graphs[which].graph.launch(self.lanes[lane].handle());
        gp.before.insert(lane);
        gp.last = Some(gp.graphs[which].number);
        // It may write over what is no graph's, but was its own scratch memory before.
        let serial = gp.serial;
        for live in &mut self.live {
            if live.home == Home::Graph(serial, usize::MAX) {
                live.home = Home::Graph(serial, usize::MAX - 1);
            }
        }
        reach("launches");
    }

    fn release(&mut self, thread: usize) {
        let ready: Vec<usize> = (0..self.gps.len()).filter(|at| !self.gps[*at].busy).collect();
        let Some(at) = self.pick(&ready) else { return };
        self.release_one(thread, at);
    }

    fn release_one(&mut self, thread: usize, at: usize) -> bool {
        let shared = self.shared(thread);
        let Some(lane) = self.pick(&shared) else { return false };
        if self.gps[at].before.iter().any(|before| !shared.contains(before)) {
            return false;
        }
        let before: Vec<usize> = self.gps[at].before.iter().copied().collect();
        for before in before {
            self.order(before, lane);
        }
        let serial = self.gps[at].serial;
        let way = self.one_in(3);
        note!(self, "release gp {serial} on {lane}, by drop {way}");
        if !way {
            let slot = self.slot(self.gps[at].pool);
            let pool = slot.map(|slot| self.slots[slot].pool.clone());
            let stream = self.lanes[lane].handle();
            if let Some(pool) = pool {
                let gp = self.gps.swap_remove(at);
                self.moved_gp(at);
                let released = self.attempt(&pool, false, || gp.gp.release(stream));
                assert!(matches!(released, Ok(()) | Err(Error::GraphPool { .. })), "{released:?}");
                self.end_gp(gp, serial, lane);
                return true;
            }
        }
        let gp = self.gps.swap_remove(at);
        self.moved_gp(at);
        self.end_gp(gp, serial, lane);
        true
    }

    fn moved_gp(&mut self, at: usize) {
        let from = self.gps.len();
        for lane in &mut self.lanes {
            if let Some(part) = &mut lane.part
                && part.gp == from
            {
                part.gp = at;
            }
        }
    }

    fn end_gp(&mut self, gp: Gp<'a>, serial: u64, lane: usize) {
        drop(gp.graphs);
        drop(gp.gp);
        for live in &mut self.live {
            if matches!(live.home, Home::Graph(of, _) if of == serial) {
                live.of = lane;
            }
        }
        reach("graph pools gone");
    }

    // ---- ends

    fn end_pool(&mut self, thread: usize) {
        if self.is_capturing() {
            return;
        }
        let slot = self.below(self.slots.len());
        let id = self.slots[slot].id;
        for at in (0..self.gps.len()).rev() {
            if self.gps[at].pool == id && (self.gps[at].busy || !self.release_one(thread, at)) {
                return;
            }
        }
        if self.live.iter().any(|live| live.pool == id && live.capture.is_some()) {
            return;
        }
        let in_use = self.live.iter().any(|live| live.pool == id);
        let destroys = self.one_in(2);
        note!(self, "end pool {id}, destroy {destroys}, in use {in_use}");
        let Slot { pool, .. } = self.slots.swap_remove(slot);
        if destroys {
            let fault = self.faulty && self.one_in(4);
            if fault {
                self.had_faults = true;
                let n = 1 + self.random.below(20);
                note!(self, "  fault at {n}");
                self.sim.fail_call(n, FAULT);
            }
            let ended = pool.destroy();
            self.sim.clear_faults();
            if let Err((_, error)) = ended {
                panic!("{error}");
            }
            self.live.retain(|live| live.pool != id);
            reach("pools destroyed");
        } else {
            drop(pool);
            if in_use {
                self.orphans.insert(id, true);
                reach("orphans");
            }
        }
        self.make_pool();
    }

    fn exit(&mut self, thread: usize) -> Turn {
        let Some(lane) =
            self.lanes.iter().position(|lane| matches!(lane.of, Of::PerThread(of) if of == thread))
        else {
            return Turn::On;
        };
        if !self.can_leave(thread, lane) {
            return Turn::On;
        }
        let shared = self.shared(thread);
        let Some(heir) = self.pick(&shared) else { return Turn::On };
        note!(self, "thread {thread} ends, heir {heir}");
        self.leave(thread, lane, heir);
        reach("threads ended");
        Turn::Exits
    }

    fn turn(&mut self, thread: usize) -> Turn {
        match self.below(64) {
            0..16 => self.malloc(thread),
            16..28 => self.free(thread),
            28..31 => self.use_further(thread),
            31..33 => self.follow(thread),
            33..35 => self.synchronize(thread),
            35..37 => self.trim(),
            37 => self.limit(),
            38 => self.look(),
            39..42 => self.sleep(thread),
            42 => self.export(thread),
            43 => self.access(),
            44 => self.look_from_peer(thread),
            45..47 => {
                let shared = self.shared(thread);
                if shared.iter().all(|lane| self.can_leave(thread, *lane)) {
                    self.replace(thread)
                }
            }
            47..54 => self.capture(thread),
            54..56 => self.launch(thread),
            56 => {
                if self.one_in(2) {
                    self.release(thread)
                }
            }
            57 => {
                if self.one_in(3) {
                    self.end_pool(thread)
                }
            }
            58 => return self.exit(thread),
            _ => {
                let steps = 1 + self.below(12);
                note!(self, "advance {steps}");
                for _ in 0..steps {
                    self.sim.advance_all();
                }
            }
        }
        Turn::On
    }

    fn step(&mut self, thread: usize) -> Turn {
        self.step += 1;
        self.thread = thread;
        let turn = self.turn(thread);
        self.validate();
        self.sim.assert_clean();
        for (at, lane) in self.lanes.iter().enumerate() {
            if lane.part.is_some_and(|part| part.phase == Phase::Capturing) {
                let mut status =
                    cuda_sys::types::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
                call!(self.rig.driver, cuStreamIsCapturing(lane.handle().raw(), &mut status));
                assert_eq!(
                    status,
                    cuda_sys::types::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE,
                    "the capture of lane {at}"
                );
            }
        }
        turn
    }

    /// Ends captures, in any thread.
    fn quiesce(&mut self) {
        for lane in 0..self.lanes.len() {
            while self.lanes[lane].part.is_some_and(|part| !part.is_fork) {
                let part = self.lanes[lane].part.unwrap();
                match part.phase {
                    Phase::Begun | Phase::Captured => self.end_part(lane),
                    Phase::Capturing => {
                        if let Some(fork) = part.fork {
                            self.order(fork, lane);
                            self.lanes[fork].part = None;
                        }
                        drop(graph::stop(self.rig, self.lanes[lane].handle()));
                        for live in self.live.iter_mut().filter(|live| live.capture == Some(lane)) {
                            live.capture = None;
                            live.of = lane;
                        }
                        self.lanes[lane].part =
                            Some(Part { phase: Phase::Captured, fork: None, ..part });
                    }
                }
            }
        }
    }
}

trait ForTest {
    fn on_out_of_memory_for_test(&self);
}
impl ForTest for Pool {
    fn on_out_of_memory_for_test(&self) {
        let again = std::sync::atomic::AtomicU64::new(0);
        let callback = self.on_out_of_memory(move |pool, _| {
            if again.fetch_add(1, std::sync::atomic::Ordering::Relaxed).is_multiple_of(2) {
                let _ = pool.trim_to(0);
                vpmm::Recovery::Retry
            } else {
                vpmm::Recovery::GiveUp
            }
        });
        std::mem::forget(callback);
    }
}

/// Runs a program to its end, or so many steps of it.
pub(crate) fn run(seed: u64, timed: bool, most_steps: u64) {
    let mut random = Lcg(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 77);
    let schedule = match random.below(7) {
        0 => Schedule::Eager,
        1 | 2 => Schedule::Late { patience: 1 + random.below(20) as u32 },
        3 | 4 => Schedule::Random,
        _ => Schedule::Manual,
    };
    let device = [2 * LIMIT, 2 * LIMIT, LIMIT / 2 + random.below(LIMIT)][random.below(3) as usize];
    let sim = Simulator::builder()
        .devices(2)
        .schedule(schedule)
        .deadlock_after(Duration::from_secs(2))
        .seed(seed)
        .memory_bytes((device + 1) * GRANULE)
        .build()
        .expect("a simulator");
    let rig = Rig::on(sim.clone());
    let peer = rig.beside(1);
    let threads = 1 + random.below(4) as usize;
    let verbose = std::env::var_os("VPMM_TOGETHER_SAYS").is_some();
    let faulty = random.below(3) == 0;
    let mut world = World {
        rig: &rig,
        peer: &peer,
        peer_stream: peer.stream(),
        sim: sim.clone(),
        random,
        lanes: Vec::new(),
        slots: Vec::new(),
        orphans: BTreeMap::new(),
        live: Vec::new(),
        gps: Vec::new(),
        next: 0,
        timed,
        faulty,
        had_faults: false,
        verbose,
        step: 0,
        thread: 0,
        kept_to_main: false,
    };
    note!(
        world,
        "seed {seed} schedule {schedule:?} device {device} threads {threads} faulty {faulty}"
    );
    for _ in 0..1 + world.below(3) {
        world.make_pool();
    }
    for at in 0..2 + world.below(4) {
        let of = match world.below(8) {
            0 if at > 1 => Of::Legacy,
            1..4 => world.raw(),
            _ => Of::Owned(rig.stream()),
        };
        world.lanes.push(Lane { of, part: None, must_live: false });
    }
    for (at, lane) in world.lanes.iter().enumerate() {
        let kind = match lane.of {
            Of::Owned(_) => "owned",
            Of::Raw(_) => "raw",
            Of::Legacy => "legacy",
            _ => "own",
        };
        note!(world, "lane {at} {kind}");
    }
    for thread in 0..threads {
        world.lanes.push(Lane { of: Of::PerThread(thread), part: None, must_live: false });
    }
    let steps = 1 + world.random.below(250);
    let steps = steps.min(most_steps);
    let world = Mutex::new(world);
    std::thread::scope(|scope| {
        let world = &world;
        let spawn = |thread: usize| {
            let (go, turns) = mpsc::channel::<()>();
            let (tell, told) = mpsc::channel();
            let worker = scope.spawn(move || {
                for () in turns {
                    let outcome = catch_unwind(AssertUnwindSafe(|| {
                        world.lock().unwrap_or_else(PoisonError::into_inner).step(thread)
                    }));
                    if tell.send(outcome).is_err() {
                        return;
                    }
                }
            });
            (go, told, worker)
        };
        let mut workers: Vec<_> = (0..threads).map(spawn).collect();
        for _ in 0..steps {
            let thread = world.lock().unwrap().below(threads);
            workers[thread].0.send(()).unwrap();
            match workers[thread].1.recv().unwrap() {
                Ok(Turn::On) => {}
                Ok(Turn::Exits) => {
                    let (go, _, worker) = std::mem::replace(&mut workers[thread], spawn(thread));
                    drop(go);
                    worker.join().unwrap();
                    let world = world.lock().unwrap();
                    world.validate();
                }
                Err(panic) => resume_unwind(panic),
            }
        }
    });
    let had_faults = end_all(world.into_inner().unwrap(), &rig, &sim);
    assert!(had_faults || sim.leaks().events == 0, "{:?}", sim.leaks());
    drop(peer);
    drop(rig);
    sim.assert_clean();
    // A heap whose end a fault comes to leaves the rest to the driver.
    assert!(had_faults || sim.leaks().is_empty(), "{:?}", sim.leaks());
}

fn end_all(mut world: World<'_>, rig: &Rig, _sim: &Simulator) -> bool {
    note!(world, "the end");
    world.quiesce();
    world.validate();
    world.look();
    // Threads are gone, and their default streams with them.
    rig.device.synchronize().expect("the device finishes");
    for live in &world.live {
        if !live.uses.is_empty() {
            continue;
        }
        if let Of::PerThread(_) = world.lanes[live.of].of {
            continue;
        }
        world.check(live, live.of);
    }
    if world.one_in(2) {
        let live = std::mem::take(&mut world.live);
        rig.device.synchronize().expect("the device finishes");
        for live in live {
            // Foreign handles of uses are gone with their threads: nothing runs any more.
            let used_by_thread =
                live.uses.iter().any(|used| matches!(world.lanes[*used].of, Of::PerThread(_)));
            if used_by_thread {
                world.live.push(live);
                continue;
            }
            let stream = world.lanes[0].handle();
            world.pool_of(&live).free(live.ptr, stream).expect("a free at the end");
        }
        world.validate();
    }
    let World { slots, lanes, gps, peer_stream, live, had_faults, .. } = world;
    let mut lanes = lanes.into_iter();
    let end = |lane: Lane| {
        if let Of::Raw(raw) = lane.of {
            call!(rig.driver, cuCtxSetCurrent(rig.device.context()));
            call!(rig.driver, cuStreamDestroy_v2(raw as CUstream));
        }
    };
    lanes.next().into_iter().for_each(end);
    drop(gps);
    for slot in slots {
        slot.pool.destroy().map_err(|(_, error)| error).expect("an end");
    }
    let mut rest: BTreeMap<u64, Live> = BTreeMap::new();
    for live in live {
        rest.insert(live.pool, live);
    }
    for live in rest.into_values() {
        if let Some(pool) = Pool::of(&rig.driver, live.ptr.address()) {
            pool.destroy().map_err(|(_, error)| error).expect("an orphan's end");
        }
    }
    assert_eq!(rig.mismatches(), 0, "words differ from what was written");
    lanes.for_each(end);
    drop(peer_stream);
    had_faults
}

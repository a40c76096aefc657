//! The heaps of one pool in several threads at a time: what is ordinary, what sleeps, what graphs have; with
//! trims, limits and accesses that change, in some programs memory that is shared, and in some driver calls that
//! fail.
//!
//! What the threads meet in differs from run to run: a program that fails is printed, and comes again by many
//! runs of it. `VPMM_CROWD_FIRST` and `VPMM_CROWD_CASES` choose others.

mod pools;
mod sharing;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use cuda_sim::{Schedule, Simulator};
use vpmm::{
    Access, Background, Buffers, Contents, DevicePtr, Error, GraphPool, PagedConfig, PendingPolicy,
    Pool, PoolConfig, Sharing, Stream, WaitPolicy,
};

use crate::graph::{self, Graph};
use crate::rig::{GRANULE, MIB, Profile};
use crate::support::chance::{self, FAULT, Reached, chance, failing, number, with_faults};
use crate::support::changed::changed;
use crate::support::{Lcg, Meeting, Rig};

const MOST: u64 = 20;
const TAGS: [&str; 2] = ["weights", "cache"];

failing! {
    put_failing:
    create: cuMemCreate(
        handle: *mut CUmemGenericAllocationHandle,
        bytes: usize,
        properties: *const CUmemAllocationProp,
        flags: u64
    );
    map: cuMemMap(
        address: CUdeviceptr,
        bytes: usize,
        offset: usize,
        handle: CUmemGenericAllocationHandle,
        flags: u64
    );
    access: cuMemSetAccess(
        address: CUdeviceptr,
        bytes: usize,
        access: *const CUmemAccessDesc,
        count: usize
    );
    unmap: cuMemUnmap(address: CUdeviceptr, bytes: usize);
    release: cuMemRelease(handle: CUmemGenericAllocationHandle);
    record: cuEventRecord(event: CUevent, stream: CUstream);
    query: cuEventQuery(event: CUevent);
    hold_back: cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: u32);
    capture_question: cuStreamIsCapturing(stream: CUstream, status: *mut CUstreamCaptureStatus);
    export: cuMemExportToShareableHandle(
        out: *mut std::ffi::c_void,
        handle: CUmemGenericAllocationHandle,
        kind: CUmemAllocationHandleType,
        flags: u64
    );
}

static REACHED: Reached = Reached::new();

fn reach(what: &'static str) {
    REACHED.count(what);
}

fn locked<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A tagged heap, as its users know it: they agree on when it sleeps.
#[derive(Default)]
struct Sleeper {
    is_asleep: bool,
    keeps: bool,
    /// How often what was in it has been lost.
    losses: u64,
    /// Whose work a sleep comes after.
    users: Mutex<Vec<Arc<Stream>>>,
    /// What all work comes after.
    woken_on: Option<Arc<Stream>>,
    /// Some of it is another process's, and stays.
    is_exported: AtomicBool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Home {
    Main,
    /// And how often the heap had lost what was in it before.
    Tag(usize, u64),
    /// Of the thread's graph.
    Graph(usize),
}

struct Block {
    ptr: DevicePtr,
    bytes: u64,
    seed: u64,
    home: Home,
    of: Arc<Stream>,
    /// Other streams read it.
    is_used: bool,
}

/// What threads have in common.
struct Crowd<'a> {
    rig: &'a Rig,
    peer: &'a Rig,
    sim: &'a Simulator,
    pool: &'a Pool,
    is_faulty: bool,
    /// Another process's machine, where the pool can be shared.
    abroad: Option<&'a Rig>,
    shared: Arc<Stream>,
    sleepers: [RwLock<Sleeper>; 2],
    /// What was given to each of the threads.
    given: Vec<Mutex<Vec<Block>>>,
    seeds: AtomicU64,
    live: Live,
}

/// A call that may fail where driver calls do.
fn attempt<T>(is_faulty: bool, call: impl Fn() -> Result<T, Error>) -> Result<T, Error> {
    if !is_faulty || !chance(4) {
        return call();
    }
    match with_faults(10, &call) {
        Err(Error::Driver { code: FAULT, .. } | Error::HalfAsleep { code: FAULT, .. }) => {
            reach("faults met");
            call()
        }
        result => result,
    }
}

/// What is allocated: bytes by address.
#[derive(Default)]
struct Live(Mutex<BTreeMap<u64, u64>>);

impl Live {
    fn enter(&self, start: u64, bytes: u64) {
        let mut live = locked(&self.0);
        assert!(start.is_multiple_of(256), "{start:#x}");
        if let Some((other, length)) = live.range(..start + bytes).next_back() {
            assert!(other + length <= start, "{start:#x} +{bytes:#x} overlaps {other:#x}");
        }
        live.insert(start, bytes);
    }

    /// Before a free: from there on another thread may be given the address.
    fn leave(&self, start: u64, bytes: u64) {
        assert_eq!(locked(&self.0).remove(&start), Some(bytes));
    }
}

impl Crowd<'_> {
    fn attempt<T>(&self, call: impl Fn() -> Result<T, Error>) -> Result<T, Error> {
        attempt(self.is_faulty, call)
    }

    fn sleeper(&self, home: Home) -> Option<RwLockReadGuard<'_, Sleeper>> {
        let Home::Tag(tag, _) = home else { return None };
        Some(self.sleepers[tag].read().unwrap_or_else(PoisonError::into_inner))
    }

    fn order(&self, before: &Arc<Stream>, after: &Arc<Stream>) {
        if !Arc::ptr_eq(before, after) {
            self.rig.order(&**before, &**after);
        }
    }

    /// A request, written to on its stream.
    fn malloc(&self, bytes: u64, home: Home, of: &Arc<Stream>) -> Option<Block> {
        let sleeper = self.sleeper(home);
        let mut home = home;
        let asked = match (&mut home, &sleeper) {
            (Home::Tag(tag, losses), Some(sleeper)) => {
                *losses = sleeper.losses;
                self.attempt(|| self.pool.tagged(TAGS[*tag]))
                    .and_then(|tagged| self.attempt(|| tagged.malloc(bytes as usize, &**of)))
            }
            _ => self.attempt(|| self.pool.malloc(bytes as usize, &**of)),
        };
        let ptr = match asked {
            Ok(ptr) => ptr,
            Err(Error::Asleep) if sleeper.is_some_and(|sleeper| sleeper.is_asleep) => {
                reach("requests of sleeping heaps");
                return None;
            }
            Err(error) if error.is_out_of_memory() => {
                reach("requests refused");
                return None;
            }
            Err(Error::AddressSpaceExhausted { .. }) => return None,
            Err(error) => panic!("{home:?}: {error}"),
        };
        self.live.enter(ptr.address(), bytes);
        let seed = self.seeds.fetch_add(1 << 40, Ordering::Relaxed);
        if let Some(sleeper) = &sleeper {
            assert!(!sleeper.is_asleep);
            self.uses(sleeper, of);
        }
        self.rig.fill(ptr.address(), bytes, seed, of.handle());
        reach(match home {
            Home::Main => "requests",
            Home::Tag(..) => "requests of tags",
            Home::Graph(_) => "requests of graphs",
        });
        Some(Block { ptr, bytes, seed, home, of: Arc::clone(of), is_used: false })
    }

    /// Work of a stream on a heap that may sleep.
    fn uses(&self, sleeper: &Sleeper, stream: &Arc<Stream>) {
        if let Some(woken_on) = &sleeper.woken_on {
            self.order(woken_on, stream);
        }
        let mut users = locked(&sleeper.users);
        if !users.iter().any(|user| Arc::ptr_eq(user, stream)) {
            users.push(Arc::clone(stream));
        }
    }

    /// Looks at what is in a block, in a stream's order.
    fn check(&self, block: &Block, sleeper: Option<&Sleeper>, stream: &Arc<Stream>) {
        if let Some(sleeper) = sleeper {
            if sleeper.is_asleep {
                return;
            }
            self.uses(sleeper, stream);
            if !matches!(block.home, Home::Tag(_, losses) if losses == sleeper.losses) {
                return;
            }
        }
        self.rig.check(block.ptr.address(), block.bytes, block.seed, stream.handle());
    }

    fn free(&self, block: Block, stream: &Arc<Stream>, is_known: bool) {
        let sleeper = self.sleeper(block.home);
        // The program's own duty: the freeing stream comes after the writing one.
        self.order(&block.of, stream);
        if is_known {
            self.check(&block, sleeper.as_deref(), stream);
        }
        self.live.leave(block.ptr.address(), block.bytes);
        let free = || match chance(2) {
            true => Pool::free_any(&self.rig.driver, block.ptr, &**stream),
            false => self.pool.free(block.ptr, &**stream),
        };
        self.attempt(free).unwrap_or_else(|error| panic!("{:?}: {error}", block.home));
    }
}

fn some_bytes(random: &mut Lcg) -> u64 {
    let (low, high) = [
        (1, 2048),
        (1, 64 << 10),
        (64 << 10, 2 * MIB),
        (64 << 10, 2 * MIB),
        (2 * MIB, 12 * MIB),
        (2 * MIB, 30 * MIB),
    ][random.below(6) as usize];
    if random.below(5) == 0 {
        return (1 + random.below(6)) * GRANULE;
    }
    low + random.below(high - low)
}

/// A thread under way.
struct Member<'a> {
    crowd: &'a Crowd<'a>,
    number: usize,
    random: Lcg,
    own: Arc<Stream>,
    live: Vec<Block>,
    /// Captures, and is known to nobody else.
    capturing: Arc<Stream>,
    /// Ordinary blocks of that.
    aside: Vec<Block>,
    graphs: Option<Graphs<'a>>,
    is_capturing: bool,
    shares: sharing::Shares<'a>,
}

/// A graph's pool, its graphs, and what they have.
struct Graphs<'a> {
    pool: GraphPool,
    graphs: Vec<Graph<'a>>,
    kept: Vec<Block>,
    last: Option<usize>,
}

impl<'a> Member<'a> {
    fn below(&mut self, bound: u64) -> u64 {
        self.random.below(bound)
    }

    fn bytes(&mut self) -> u64 {
        some_bytes(&mut self.random)
    }

    fn lane(&mut self) -> Arc<Stream> {
        Arc::clone(if self.below(3) == 0 { &self.crowd.shared } else { &self.own })
    }

    fn pick(&mut self) -> Option<usize> {
        let len = self.live.len() as u64;
        (len > 0).then(|| self.below(len) as usize)
    }

    fn act(&mut self) {
        let crowd = self.crowd;
        match self.below(if crowd.abroad.is_some() { 44 } else { 40 }) {
            0..10 => {
                let (bytes, of) = (self.bytes(), self.lane());
                let home = match self.below(5) {
                    0..3 => Home::Main,
                    tag => Home::Tag(tag as usize - 3, 0),
                };
                self.live.extend(crowd.malloc(bytes, home, &of));
            }
            10..18 => {
                if let Some(at) = self.pick() {
                    let (block, stream) = (self.live.swap_remove(at), self.lane());
                    crowd.free(block, &stream, true);
                }
            }
            18..20 => {
                if let Some(at) = self.pick() {
                    let to = self.below(crowd.given.len() as u64) as usize;
                    locked(&crowd.given[to]).push(self.live.swap_remove(at));
                    reach("given");
                }
            }
            20 => {
                let stream = self.lane();
                self.free_given(&stream);
            }
            21..23 => {
                let (at, stream) = (self.pick(), self.lane());
                if let Some(at) = at {
                    self.use_further(at, &stream);
                }
            }
            23 => {
                let mark = crowd.attempt(|| crowd.pool.mark(&*crowd.shared)).expect("a mark");
                crowd.order(&crowd.shared, &self.own);
                crowd.attempt(|| crowd.pool.follows(&*self.own, &mark)).expect("an order");
            }
            24 if !self.is_capturing => {
                self.lane().synchronize().expect("the stream finishes");
            }
            25 => {
                let keep = self.below(MOST) * GRANULE;
                match self.below(3) {
                    0 => {
                        let tagged = crowd.pool.tagged(TAGS[self.below(2) as usize]);
                        let tagged = tagged.expect("a tag");
                        crowd.attempt(|| tagged.trim_to(keep)).expect("a trim");
                    }
                    _ => {
                        crowd.attempt(|| crowd.pool.trim_to(keep)).expect("a trim");
                    }
                }
            }
            26 => {
                let limit = (self.below(3) > 0).then(|| (4 + self.below(MOST)) * GRANULE);
                crowd.pool.limit_to(limit).expect("a limit");
            }
            27 => self.own = Arc::new(crowd.rig.stream()),
            28 => {
                let stats = crowd.pool.stats();
                assert!(stats.live_bytes <= stats.mapped_bytes + (16 << 30), "{stats:?}");
                crowd.pool.snapshot();
                let _ = crowd.pool.layout().to_string();
                if let Some(at) = self.pick() {
                    let block = &self.live[at];
                    let found = crowd.pool.allocation(block.ptr.address() + block.bytes - 1);
                    assert_eq!(found.expect("it is live").start, block.ptr);
                }
            }
            29 if !self.is_capturing => {
                let access = [Access::None, Access::ReadWrite][self.below(2) as usize];
                let set = || crowd.pool.set_access(&crowd.peer.device, access);
                crowd.attempt(set).expect("access");
            }
            30..32 if !self.is_capturing => self.sleep(),
            32..34 if !self.is_capturing => self.capture(),
            34 => self.launch(),
            35 if self.below(3) == 0 && !self.is_capturing => self.release(),
            40.. if !self.is_capturing => self.share(),
            _ => {
                for _ in 0..1 + self.below(8) {
                    crowd.sim.advance_all();
                }
            }
        }
    }

    fn free_given(&mut self, stream: &Arc<Stream>) {
        let given = std::mem::take(&mut *locked(&self.crowd.given[self.number]));
        given.into_iter().for_each(|block| self.crowd.free(block, stream, true));
    }

    fn use_further(&mut self, at: usize, stream: &Arc<Stream>) {
        let (crowd, block) = (self.crowd, &mut self.live[at]);
        let sleeper = crowd.sleeper(block.home);
        if sleeper.as_ref().is_some_and(|sleeper| sleeper.is_asleep) {
            return;
        }
        crowd.order(&block.of, stream);
        crowd.check(block, sleeper.as_deref(), stream);
        crowd.attempt(|| crowd.pool.record_stream(block.ptr, &**stream)).expect("a noted use");
        block.is_used = true;
        reach("uses");
    }

    /// Has a heap sleep, or wakes it.
    fn sleep(&mut self) {
        let (crowd, tag, stream) = (self.crowd, self.below(2) as usize, self.lane());
        let (pool, choice) = (crowd.pool, self.below(4));
        let Ok(tagged) = crowd.attempt(|| pool.tagged(TAGS[tag])) else { return };
        let mut sleeper = crowd.sleepers[tag].write().unwrap_or_else(PoisonError::into_inner);
        assert_eq!(tagged.is_asleep(), sleeper.is_asleep);
        if sleeper.is_asleep {
            let is_given_up = choice == 0;
            let woken = crowd.attempt(|| match is_given_up {
                true => pool.resume_empty(TAGS[tag], &*stream),
                false => pool.resume(TAGS[tag], &*stream),
            });
            match woken {
                Ok(_) => {
                    sleeper.is_asleep = false;
                    sleeper.losses += u64::from(is_given_up || !sleeper.keeps);
                    sleeper.woken_on = Some(stream);
                    reach("wakes");
                }
                Err(error) if error.is_out_of_memory() => reach("wakes refused"),
                // What could not be undone before waits for the context, and not beside a capture.
                Err(Error::StreamCapturing) if crowd.is_faulty => {}
                Err(error) => panic!("{error}"),
            }
            return;
        }
        for user in std::mem::take(&mut *locked(&sleeper.users)) {
            crowd.order(&user, &stream);
        }
        if let Some(woken_on) = &sleeper.woken_on {
            crowd.order(woken_on, &stream);
        }
        let contents = match choice {
            0 => Contents::Discard,
            1 => Contents::Keep(Buffers::Retain),
            _ => Contents::Keep(Buffers::Release),
        };
        match crowd.attempt(|| pool.suspend(TAGS[tag], &*stream, &contents)) {
            Ok(_) => {
                assert!(!sleeper.is_exported.load(Ordering::Relaxed));
                reach("sleeps");
            }
            Err(Error::Exported { .. }) if sleeper.is_exported.load(Ordering::Relaxed) => {
                reach("sleeps refused");
            }
            // Half, by a fault.
            Err(Error::Asleep) if crowd.is_faulty && tagged.is_asleep() => {}
            // Another thread's record has just failed: a stream that cannot be asked is taken to capture.
            Err(Error::Driver { .. } | Error::HalfAsleep { .. } | Error::StreamCapturing)
                if crowd.is_faulty => {}
            Err(error) => panic!("{error}"),
        }
        sleeper.is_asleep = tagged.is_asleep();
        sleeper.keeps = contents != Contents::Discard;
        // Where it did not come to that, what it waited for is over.
        sleeper.woken_on = None;
        if !sleeper.is_asleep {
            sleeper.woken_on = Some(stream);
        }
    }

    /// A graph, with whatever else comes to the thread meanwhile.
    fn capture(&mut self) {
        let crowd = self.crowd;
        if self.graphs.is_none() {
            let pool = match crowd.attempt(|| crowd.pool.graph_pool()) {
                Ok(pool) => pool,
                Err(error) if error.is_out_of_memory() => return,
                Err(Error::AddressSpaceExhausted { .. }) => return,
                Err(error) => panic!("{error}"),
            };
            let (graphs, kept) = (Vec::new(), Vec::new());
            self.graphs = Some(Graphs { pool, graphs, kept, last: None });
        }
        for _ in 0..self.below(3) {
            let bytes = self.bytes();
            self.aside.extend(crowd.malloc(bytes, Home::Main, &Arc::clone(&self.capturing)));
        }
        let stream = Arc::clone(&self.capturing);
        let graphs = self.graphs.take().expect("made above");
        let number = graphs.graphs.len();
        graphs.pool.begin(&*stream).expect("begun");
        let mode = graph::MODES[1 + self.below(2) as usize];
        graph::begin(crowd.rig, &*stream, mode);
        self.is_capturing = true;
        let mut scratch: Vec<Block> = Vec::new();
        for _ in 0..self.below(10) {
            match self.below(6) {
                0..3 => {
                    let bytes = self.bytes();
                    scratch.extend(crowd.malloc(bytes, Home::Graph(number), &stream));
                }
                3 if !scratch.is_empty() => {
                    let at = self.below(scratch.len() as u64) as usize;
                    crowd.free(scratch.swap_remove(at), &stream, true);
                    reach("frees in captures");
                }
                4 if !self.aside.is_empty() => {
                    // Its work was before the capture.
                    crowd.free(self.aside.swap_remove(0), &stream, false);
                    reach("ordinary frees in captures");
                }
                _ => self.act(),
            }
        }
        self.is_capturing = false;
        let mut captured = graph::stop(crowd.rig, &*stream);
        captured.prepare();
        graphs.pool.end(&*stream).expect("ended");
        reach("captures");
        let mut graphs = graphs;
        graphs.graphs.push(captured);
        graphs.kept.extend(scratch);
        self.graphs = Some(graphs);
        for block in std::mem::take(&mut self.aside) {
            crowd.free(block, &stream, true);
        }
    }

    fn launch(&mut self) {
        if self.is_capturing {
            return;
        }
        let Some(mut graphs) = self.graphs.take() else { return };
        if !graphs.graphs.is_empty() {
            let at = self.below(graphs.graphs.len() as u64) as usize;
            graphs.graphs[at].launch(&*self.capturing);
            graphs.last = Some(at);
            reach("launches");
            if self.below(2) == 0 && !graphs.kept.is_empty() {
                let block = graphs.kept.swap_remove(self.below(graphs.kept.len() as u64) as usize);
                let is_known = block.home == Home::Graph(at);
                self.crowd.free(block, &self.capturing, is_known);
            }
        }
        self.graphs = Some(graphs);
    }

    fn release(&mut self) {
        let Some(graphs) = self.graphs.take() else { return };
        let (crowd, stream) = (self.crowd, Arc::clone(&self.capturing));
        let Graphs { pool, graphs, kept, last } = graphs;
        drop(graphs);
        if self.below(3) > 0 {
            crowd.attempt(|| pool.release(&*stream)).expect("released");
        }
        drop(pool);
        for block in kept {
            let is_known = last.is_some_and(|last| block.home == Home::Graph(last));
            crowd.free(block, &stream, is_known);
        }
        reach("graph pools gone");
    }

    fn end(mut self) {
        self.release();
        self.shares = sharing::Shares::default();
        let stream = self.lane();
        for block in std::mem::take(&mut self.live) {
            self.crowd.free(block, &stream, true);
        }
        self.free_given(&stream);
    }
}

/// Three rounds of so many steps, each thread its own, with a look at the whole pool after each.
fn run_threads(crowd: &Crowd<'_>, threads: usize, steps: u64, seed: u64) {
    let meeting = Meeting::of(threads);
    std::thread::scope(|scope| {
        for number in 0..threads {
            let meeting = &meeting;
            scope.spawn(move || {
                let mut random = Lcg(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ number as u64);
                chance::seed(random.below(u64::MAX));
                let mut member = Member {
                    crowd,
                    number,
                    random,
                    own: Arc::new(crowd.rig.stream()),
                    live: Vec::new(),
                    capturing: Arc::new(crowd.rig.stream()),
                    aside: Vec::new(),
                    graphs: None,
                    is_capturing: false,
                    shares: sharing::Shares::default(),
                };
                for _ in 0..3 {
                    let part = || (0..steps).for_each(|_| member.act());
                    if !meeting.after(part, || validate(crowd.pool)) {
                        return;
                    }
                }
                member.end();
            });
        }
    });
}

fn validate(pool: &Pool) {
    pool.validate().unwrap_or_else(|violation| panic!("{violation}\n{pool:?}"));
}

fn open(profile: Profile, rig: &Rig, sharing: Sharing, random: &mut Lcg) -> Pool {
    let wait = match random.below(3) {
        0 => WaitPolicy::FailAtOnce,
        1 => WaitPolicy::WaitUpTo(Duration::from_micros(300)),
        _ => WaitPolicy::WaitForPending,
    };
    let policy = [PendingPolicy::GrowFirst, PendingPolicy::WaitFirst][random.below(2) as usize];
    let limit = (random.below(2) == 0).then_some(MOST * GRANULE);
    let threshold = [None, None, Some(0), Some(6 * GRANULE)][random.below(4) as usize];
    let pool = match profile {
        Profile::Default => {
            let mut config = PoolConfig::default();
            config.moves_per_second = [0, u32::MAX][random.below(2) as usize];
            config.limit_bytes = limit;
            config.va_size_bytes = Some(8 * MOST * GRANULE);
            config.pending_policy = policy;
            config.out_of_memory = wait;
            config.sharing = sharing;
            config.release_threshold_bytes = threshold;
            config.patience = Duration::from_micros(100 * random.below(2));
            if random.below(4) == 0 {
                let mut background = Background::default();
                background.period = Duration::ZERO;
                background.ahead_bytes = 2 * GRANULE;
                config.background = Some(background);
            }
            Pool::new(&rig.device, &config)
        }
        Profile::Paged => {
            let mut config = PagedConfig::default();
            config.limit_bytes = limit;
            config.va_size_bytes = 8 * MOST * GRANULE;
            config.pending_policy = policy;
            config.out_of_memory = wait;
            config.sharing = sharing;
            config.release_threshold_bytes = threshold;
            Pool::paged(&rig.device, &config)
        }
    };
    pool.expect("a pool")
}

fn some_schedule(random: &mut Lcg) -> Schedule {
    match random.below(4) {
        0 => Schedule::Eager,
        1 => Schedule::Late { patience: 1 + random.below(20) as u32 },
        2 => Schedule::Random,
        _ => Schedule::Manual,
    }
}

fn run(seed: u64, profile: Profile) {
    let mut random = Lcg(seed ^ 0x5DEE_CE66);
    random.below(1);
    let schedule = some_schedule(&mut random);
    let is_faulty = random.below(3) == 0;
    let sharing = match random.below(4) {
        0 => Sharing::FileDescriptor,
        1 => Sharing::Fabric,
        _ => Sharing::None,
    };
    let sim = Simulator::builder()
        .devices(2)
        .schedule(schedule)
        .seed(seed)
        .memory_bytes((2 * MOST + 1) * GRANULE)
        .fabric(true)
        .build()
        .expect("a simulator");
    let rig = Rig::with(changed(&sim, put_failing), sim.clone());
    let peer = rig.beside(1);
    let abroad = (sharing != Sharing::None).then(|| sharing::abroad(schedule, seed));
    let pool = open(profile, &rig, sharing, &mut random);
    let threads = 2 + random.below(3) as usize;
    let steps = random.below(60);
    println!(
        "{profile:?} {seed}: {threads} threads, {schedule:?}, {sharing:?}, faulty {is_faulty}"
    );
    {
        let crowd = Crowd {
            rig: &rig,
            peer: &peer,
            sim: &sim,
            pool: &pool,
            is_faulty,
            abroad: abroad.as_ref(),
            shared: Arc::new(rig.stream()),
            sleepers: Default::default(),
            given: (0..threads).map(|_| Mutex::default()).collect(),
            seeds: AtomicU64::new(1 << 40),
            live: Live::default(),
        };
        run_threads(&crowd, threads, steps, seed);
        // What was given to threads that had ended.
        for block in crowd.given.iter().flat_map(|given| std::mem::take(&mut *locked(given))) {
            crowd.free(block, &crowd.shared, true);
        }
    }
    let stats = pool.stats();
    assert_eq!((stats.live_count, stats.live_bytes), (0, 0));
    validate(&pool);
    for rig in [&rig, &peer].into_iter().chain(&abroad) {
        assert_eq!(rig.mismatches(), 0, "words differ from what was written");
    }
    pool.destroy().map_err(|(_, error)| error).expect("an end");
    let abroad = abroad.map(|rig| {
        // What could not be unmapped there waits for this.
        rig.device.synchronize().expect("the device finishes");
        rig.sim.clone().expect("it is one")
    });
    drop(peer);
    drop(rig);
    sim.assert_clean();
    let leaks = sim.leaks();
    assert!(is_faulty || leaks.is_empty(), "{leaks:?}");
    if let Some(sim) = abroad {
        sim.assert_clean();
        assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
    }
}

/// One crowd at a time: what fails is one simulator's.
static ALONE: Mutex<()> = Mutex::new(());

/// What is allocated never overlaps, keeps what was written into it through sleeps and launches, and meets no
/// use that comes unordered; no capture is harmed; the books agree whenever the threads stand still; nothing
/// is left at the end.
#[test]
fn heaps_in_several_threads() {
    const CASES: u64 = 40;
    let _alone = locked(&ALONE);
    let first = number("VPMM_CROWD_FIRST", 0);
    let cases = number("VPMM_CROWD_CASES", CASES);
    for seed in first..first + cases {
        Profile::BOTH.iter().for_each(|profile| run(seed, *profile));
    }
    let expected = [
        "allocations shared",
        "captures",
        "faults met",
        "given",
        "launches",
        "requests of graphs",
        "requests of sleeping heaps",
        "requests refused",
        "sleeps",
        "uses",
        "wakes",
        "wakes refused",
        "whole pools shared",
    ];
    REACHED.assert_all(if cases < CASES { &[] } else { &expected });
}

//! Random programs in several threads at a time on one pool, on streams of every kind: the library's, raw ones whose
//! handles come again, threads' own, the legacy one; with captures beside them, uses on further streams, marks,
//! trims, limits, and in some programs driver calls that fail.
//!
//! What the threads meet in differs from run to run: a program that fails is printed, and comes again by many runs of
//! it. `VPMM_CROWD_FIRST` and `VPMM_CROWD_CASES` choose others.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::{CUstream, CUstreamCaptureMode, CUstreamCaptureStatus};
use vpmm::{
    Device, DevicePtr, Driver, Error, PendingPolicy, Pool, Stream, StreamHandle, WaitPolicy,
};

use crate::rig::{MIB, PAGE, config};
use crate::support::chance::{self, FAULT, Reached, chance, failing, number, with_faults};
use crate::support::changed::changed;
use crate::support::{Lcg, Meeting, Rig, call};

/// Pages.
const MOST: u64 = 20;

failing! {
    put_failing:
    reserve: cuMemAddressReserve(
        address: *mut CUdeviceptr,
        bytes: usize,
        alignment: usize,
        hint: CUdeviceptr,
        flags: u64
    );
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
    event: cuEventCreate(event: *mut CUevent, flags: u32);
    record: cuEventRecord(event: CUevent, stream: CUstream);
    query: cuEventQuery(event: CUevent);
    wait: cuEventSynchronize(event: CUevent);
    hold_back: cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: u32);
    small: cuMemAllocFromPoolAsync(
        address: *mut CUdeviceptr,
        bytes: usize,
        pool: CUmemoryPool,
        stream: CUstream
    );
    small_free: cuMemFreeAsync(address: CUdeviceptr, stream: CUstream);
    small_trim: cuMemPoolTrimTo(pool: CUmemoryPool, bytes: usize);
    own_stream: cuStreamCreate(stream: *mut CUstream, flags: u32);
    capture_question: cuStreamIsCapturing(stream: CUstream, status: *mut CUstreamCaptureStatus);
}

static REACHED: Reached = Reached::new();

fn reach(what: &'static str) {
    REACHED.count(what);
}

fn locked<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A stream that the library knows nothing of, destroyed at drop.
struct Raw {
    driver: Driver,
    device: Device,
    stream: usize,
}

impl Raw {
    fn new(rig: &Rig, flags: u32) -> Self {
        let mut stream = std::ptr::null_mut();
        call!(rig.driver, cuCtxSetCurrent(rig.device.context()));
        call!(rig.driver, cuStreamCreate(&mut stream, flags));
        Self { driver: rig.driver.clone(), device: rig.device.clone(), stream: stream as usize }
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            call!(self.driver, cuCtxSetCurrent(self.device.context()));
            call!(self.driver, cuStreamDestroy_v2(self.stream as CUstream));
        }
    }
}

#[derive(Clone)]
enum Lane {
    Owned(Arc<Stream>),
    Raw(Arc<Raw>),
    /// Of the thread of this number.
    PerThread(usize),
    Legacy,
}

impl Lane {
    fn handle(&self) -> StreamHandle {
        match self {
            Self::Owned(stream) => stream.handle(),
            // SAFETY: alive while `self` is.
            Self::Raw(raw) => unsafe { StreamHandle::from_raw(raw.stream as CUstream) },
            Self::PerThread(_) => StreamHandle::PER_THREAD,
            Self::Legacy => StreamHandle::LEGACY,
        }
    }

    fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Owned(one), Self::Owned(other)) => Arc::ptr_eq(one, other),
            (Self::Raw(one), Self::Raw(other)) => Arc::ptr_eq(one, other),
            (Self::PerThread(one), Self::PerThread(other)) => one == other,
            (Self::Legacy, Self::Legacy) => true,
            _ => false,
        }
    }
}

struct Block {
    ptr: DevicePtr,
    bytes: u64,
    seed: u64,
    of: Lane,
    /// What others read it on, which lives until it is freed.
    users: Vec<Lane>,
}

struct Crowd<'a> {
    rig: &'a Rig,
    sim: &'a Simulator,
    pool: &'a Pool,
    is_faulty: bool,
    has_limits: bool,
    shared: Lane,
    given: Vec<Mutex<Vec<Block>>>,
    seeds: AtomicU64,
    /// Bytes by address.
    live: Mutex<BTreeMap<u64, u64>>,
    /// Held as a capture begins: one that begins after a request has looked for captures, and before it waits for the
    /// device, is ended by that.
    begins: RwLock<()>,
}

impl Crowd<'_> {
    fn attempt<T>(&self, call: impl Fn() -> Result<T, Error>) -> Result<T, Error> {
        if !self.is_faulty || !chance(4) {
            return call();
        }
        match with_faults(10, &call) {
            Err(Error::Driver { code: FAULT, .. }) => {
                reach("faults met");
                call()
            }
            result => result,
        }
    }

    fn order(&self, before: &Lane, after: &Lane) {
        if !before.is(after) {
            self.rig.order(before.handle(), after.handle());
        }
    }

    fn malloc(&self, bytes: u64, of: &Lane) -> Option<Block> {
        let asked = {
            let _none_begins = self.begins.read().unwrap_or_else(PoisonError::into_inner);
            self.attempt(|| self.pool.malloc(bytes as usize, of.handle()))
        };
        let ptr = match asked {
            Ok(ptr) => ptr,
            Err(error) if error.is_out_of_memory() => {
                reach("requests refused");
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        {
            let mut live = locked(&self.live);
            let (start, end) = (ptr.address(), ptr.address() + bytes);
            if let Some((other, length)) = live.range(..end).next_back() {
                assert!(other + length <= start, "{start:#x} +{bytes:#x} overlaps {other:#x}");
            }
            live.insert(start, bytes);
        }
        let seed = self.seeds.fetch_add(1 << 40, Ordering::Relaxed);
        self.rig.fill(ptr.address(), bytes, seed, of.handle());
        reach(if bytes < PAGE { "small requests" } else { "requests" });
        Some(Block { ptr, bytes, seed, of: of.clone(), users: Vec::new() })
    }

    fn check(&self, block: &Block, on: &Lane) {
        self.rig.check(block.ptr.address(), block.bytes, block.seed, on.handle());
    }

    fn free(&self, block: Block, on: &Lane) {
        // The program's own duty: the freeing stream comes after the writing one.
        self.order(&block.of, on);
        self.check(&block, on);
        assert_eq!(locked(&self.live).remove(&block.ptr.address()), Some(block.bytes));
        self.attempt(|| self.pool.free(block.ptr, on.handle())).expect("a free");
        reach(if block.users.is_empty() { "frees" } else { "frees of what others use" });
    }
}

struct Member<'a> {
    crowd: &'a Crowd<'a>,
    number: usize,
    random: Lcg,
    own: Lane,
    raw: Lane,
    live: Vec<Block>,
    /// Captures.
    aside: Lane,
    is_capturing: bool,
}

impl Member<'_> {
    fn below(&mut self, bound: u64) -> u64 {
        self.random.below(bound)
    }

    fn bytes(&mut self) -> u64 {
        match self.below(6) {
            0 => 1 + self.below(2048),
            1 => 1 + self.below(PAGE - 1),
            2 => 1 + self.below(6 * PAGE),
            _ => (1 + self.below(6)) * PAGE,
        }
    }

    fn lane(&mut self) -> Lane {
        match self.below(8) {
            0..3 => self.own.clone(),
            3..5 => self.raw.clone(),
            5 => self.crowd.shared.clone(),
            6 => Lane::PerThread(self.number),
            _ => Lane::Legacy,
        }
    }

    fn pick(&mut self) -> Option<usize> {
        let len = self.live.len() as u64;
        (len > 0).then(|| self.below(len) as usize)
    }

    fn act(&mut self) {
        let crowd = self.crowd;
        match self.below(40) {
            0..10 => {
                let (bytes, of) = (self.bytes(), self.lane());
                self.live.extend(crowd.malloc(bytes, &of));
            }
            10..18 => {
                if let Some(at) = self.pick() {
                    let (block, on) = (self.live.swap_remove(at), self.lane());
                    crowd.free(block, &on);
                }
            }
            18..20 => {
                if let Some(at) = self.pick() {
                    let to = self.below(crowd.given.len() as u64) as usize;
                    let mut block = self.live.swap_remove(at);
                    // Nobody else can name a thread's own stream.
                    if let Lane::PerThread(_) = block.of {
                        crowd.order(&block.of, &crowd.shared);
                        block.of = crowd.shared.clone();
                    }
                    locked(&crowd.given[to]).push(block);
                    reach("given");
                }
            }
            20 => {
                let on = self.lane();
                self.free_given(&on);
            }
            21..24 => {
                let (at, on) = (self.pick(), self.lane());
                if let Some(at) = at {
                    self.use_further(at, &on);
                }
            }
            24..26 => {
                let (before, after) = (self.lane(), self.lane());
                let mark = crowd.attempt(|| crowd.pool.mark(before.handle())).expect("a mark");
                crowd.order(&before, &after);
                let follows = || crowd.pool.follows(after.handle(), &mark);
                crowd.attempt(follows).expect("an order");
            }
            26 if !self.is_capturing => match self.lane() {
                Lane::Owned(stream) => stream.synchronize().expect("the stream finishes"),
                lane => {
                    let mark = crowd.attempt(|| crowd.pool.mark(lane.handle())).expect("a mark");
                    call!(crowd.rig.driver, cuCtxSetCurrent(crowd.rig.device.context()));
                    call!(crowd.rig.driver, cuStreamSynchronize(lane.handle().raw()));
                    crowd.attempt(|| crowd.pool.passed(&mark)).expect("told");
                }
            },
            27 => {
                let keep = self.below(MOST) * PAGE;
                crowd.attempt(|| crowd.pool.trim_to(keep)).expect("a trim");
                reach("trims");
            }
            28 if crowd.has_limits => {
                let limit = (self.below(3) > 0).then(|| (4 + self.below(MOST)) * PAGE);
                crowd.pool.limit_to(limit).expect("a limit");
            }
            29 => self.own = Lane::Owned(Arc::new(crowd.rig.stream())),
            30..32 => {
                // Most often the same handle again.
                self.raw = Lane::Legacy;
                self.raw = Lane::Raw(Arc::new(Raw::new(crowd.rig, 1 - self.below(2) as u32)));
                reach("raw streams");
            }
            32 => {
                let stats = crowd.pool.stats();
                assert!(stats.live_bytes <= stats.mapped_bytes, "{stats:?}");
                crowd.pool.snapshot();
                let _ = crowd.pool.layout().to_string();
                if let Some(at) = self.pick() {
                    let block = &self.live[at];
                    let found = crowd.pool.allocation(block.ptr.address() + block.bytes - 1);
                    assert_eq!(found.expect("it is live").start, block.ptr);
                }
            }
            33..35 if !self.is_capturing => self.capture(),
            _ => {
                for _ in 0..1 + self.below(8) {
                    crowd.sim.advance_all();
                }
            }
        }
    }

    fn free_given(&mut self, on: &Lane) {
        let given = std::mem::take(&mut *locked(&self.crowd.given[self.number]));
        given.into_iter().for_each(|block| self.crowd.free(block, on));
    }

    fn use_further(&mut self, at: usize, on: &Lane) {
        let (crowd, block) = (self.crowd, &mut self.live[at]);
        crowd.order(&block.of, on);
        crowd.check(block, on);
        crowd.attempt(|| crowd.pool.record_stream(block.ptr, on.handle())).expect("a noted use");
        block.users.push(on.clone());
        reach("uses");
    }

    /// A stream captures while the thread goes on with the others; it has used some memory before.
    fn capture(&mut self) {
        let crowd = self.crowd;
        let aside = self.aside.clone();
        for _ in 0..self.below(3) {
            if let Some(at) = self.pick() {
                self.use_further(at, &aside);
            }
        }
        let bytes = self.bytes();
        let before = crowd.malloc(bytes, &aside);
        let mode = [
            CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
            CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED,
        ][self.below(2) as usize];
        call!(crowd.rig.driver, cuCtxSetCurrent(crowd.rig.device.context()));
        {
            let _begins = crowd.begins.write().unwrap_or_else(PoisonError::into_inner);
            call!(crowd.rig.driver, cuStreamBeginCapture_v2(aside.handle().raw(), mode));
        }
        self.is_capturing = true;
        for _ in 0..self.below(12) {
            if chance(4) {
                let bytes = self.bytes();
                let refused = crowd.attempt(|| crowd.pool.malloc(bytes as usize, aside.handle()));
                assert!(matches!(refused, Err(Error::StreamCapturing)), "{refused:?}");
                if let Some(block) = &before {
                    let refused = crowd.attempt(|| crowd.pool.free(block.ptr, aside.handle()));
                    assert!(matches!(refused, Err(Error::StreamCapturing)), "{refused:?}");
                }
            }
            self.act();
        }
        self.is_capturing = false;
        let mut graph = std::ptr::null_mut();
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        call!(crowd.rig.driver, cuCtxSetCurrent(crowd.rig.device.context()));
        call!(crowd.rig.driver, cuStreamIsCapturing(aside.handle().raw(), &mut status));
        assert_eq!(status, CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE);
        call!(crowd.rig.driver, cuStreamEndCapture(aside.handle().raw(), &mut graph));
        call!(crowd.rig.driver, cuGraphDestroy(graph));
        if let Some(block) = before {
            crowd.free(block, &aside);
        }
        if chance(4) {
            self.aside = Lane::Owned(Arc::new(crowd.rig.stream()));
        }
        reach("captures");
    }

    fn end(mut self) {
        let on = self.lane();
        for block in std::mem::take(&mut self.live) {
            self.crowd.free(block, &on);
        }
        self.free_given(&on);
    }
}

fn validate(pool: &Pool) {
    pool.validate().unwrap_or_else(|violation| panic!("{violation}\n{pool:?}"));
}

fn run_threads(crowd: &Crowd<'_>, threads: usize, steps: u64, seed: u64) {
    let meeting = Meeting::of(threads);
    std::thread::scope(|scope| {
        for number in 0..threads {
            let meeting = &meeting;
            scope.spawn(move || {
                let mut random = Lcg(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ number as u64);
                chance::seed(random.below(u64::MAX));
                let owned = || Lane::Owned(Arc::new(crowd.rig.stream()));
                let (own, aside) = (owned(), owned());
                let raw = Lane::Raw(Arc::new(Raw::new(crowd.rig, 0)));
                let (live, is_capturing) = (Vec::new(), false);
                let mut member =
                    Member { crowd, number, random, own, raw, live, aside, is_capturing };
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

fn run(seed: u64) {
    let mut random = Lcg(seed ^ 0x5DEE_CE66);
    random.below(1);
    let schedule = match random.below(4) {
        0 => Schedule::Eager,
        1 => Schedule::Late { patience: 1 + random.below(20) as u32 },
        2 => Schedule::Random,
        _ => Schedule::Manual,
    };
    let is_faulty = random.below(3) == 0;
    let has_limits = random.below(2) == 0;
    let device = (MOST + random.below(2 * MOST)) * PAGE + 40 * MIB;
    let sim =
        Simulator::builder().schedule(schedule).seed(seed).memory_bytes(device).build().unwrap();
    let rig = Rig::with(changed(&sim, put_failing), sim.clone());
    let mut config = config(PAGE, random.below(3));
    config.va_size_bytes = (8 + random.below(60)) * PAGE;
    config.limit_bytes = (random.below(2) == 0).then_some(MOST * PAGE);
    config.out_of_memory = match random.below(3) {
        0 => WaitPolicy::FailAtOnce,
        1 => WaitPolicy::WaitUpTo(Duration::from_micros(300)),
        _ => WaitPolicy::WaitForPending,
    };
    config.pending_policy =
        [PendingPolicy::GrowFirst, PendingPolicy::WaitFirst][random.below(2) as usize];
    config.reuse.follow_event_dependencies = random.below(4) > 0;
    config.reuse.opportunistic = random.below(2) > 0;
    config.reuse.internal_dependencies = random.below(2) > 0;
    config.release_threshold_bytes =
        [None, None, Some(0), Some(6 * PAGE)][random.below(4) as usize];
    let most = config.limit_bytes.unwrap_or(u64::MAX);
    let threads = 1 + random.below(4) as usize;
    let steps = random.below(80);
    println!(
        "{seed}: {threads} threads, {steps} steps, {schedule:?}, faulty {is_faulty}, {config:?}"
    );
    let pool = Pool::paged(&rig.device, &config).expect("a pool");
    {
        let crowd = Crowd {
            rig: &rig,
            sim: &sim,
            pool: &pool,
            is_faulty,
            has_limits,
            shared: Lane::Owned(Arc::new(rig.stream())),
            given: (0..threads).map(|_| Mutex::default()).collect(),
            seeds: AtomicU64::new(1 << 40),
            live: Mutex::default(),
            begins: RwLock::default(),
        };
        run_threads(&crowd, threads, steps, seed);
        for block in crowd.given.iter().flat_map(|given| std::mem::take(&mut *locked(given))) {
            crowd.free(block, &crowd.shared);
        }
    }
    validate(&pool);
    rig.device.synchronize().unwrap();
    validate(&pool);
    let stats = pool.stats();
    assert_eq!((stats.live_count, stats.live_bytes, stats.small_live_count), (0, 0, 0));
    assert_eq!((stats.pending_bytes, stats.transit_bytes), (0, 0), "{pool:?}");
    pool.limit_to(None).unwrap();
    // What waited for further streams goes to the driver by the first, which has it back when its stream has come to
    // that.
    pool.trim_to(0).unwrap();
    rig.device.synchronize().unwrap();
    pool.trim_to(0).unwrap();
    let stats = pool.stats();
    assert_eq!(
        (stats.mapped_bytes, stats.small_mapped_bytes, stats.zombie_bytes),
        (0, 0, 0),
        "{pool:?}"
    );
    // Nothing is lost.
    let stream = rig.stream();
    let rest = rig.device.free_memory().unwrap().min(most) / PAGE * PAGE;
    let all = pool.malloc(rest as usize, &stream).expect("all that there is");
    pool.free(all, &stream).unwrap();
    assert_eq!(rig.mismatches(), 0, "words differ from what was written");
    pool.destroy().map_err(|(_, error)| error).expect("an end");
    drop(stream);
    drop(rig);
    sim.assert_clean();
    let leaks = sim.leaks();
    assert!(is_faulty || leaks.is_empty(), "{leaks:?}");
}

static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn streams_of_every_kind_in_several_threads() {
    const CASES: u64 = 100;
    let _alone = locked(&ALONE);
    let first = number("VPMM_CROWD_FIRST", 0);
    let cases = number("VPMM_CROWD_CASES", CASES);
    for seed in first..first + cases {
        run(seed);
    }
    let expected = [
        "captures",
        "faults met",
        "frees of what others use",
        "given",
        "raw streams",
        "requests refused",
        "small requests",
        "uses",
    ];
    REACHED.assert_all(if cases < CASES { &[] } else { &expected });
}

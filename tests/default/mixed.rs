//! Threads that come and go, each with streams of every kind, on one pool: what is rarely called beside ordinary
//! requests, limits of every size, a device that others fill, a heap that sleeps, streams that capture meanwhile, and
//! driver calls that fail.
//!
//! What the threads meet in differs from run to run: a program that fails is printed, and comes again by many
//! runs of it. `VPMM_MIXED_FIRST` and `VPMM_MIXED_CASES` choose others.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::*;
use vpmm::{
    Access, Background, Buffers, Contents, DevicePtr, Error, Location, Mark, PendingPolicy, Pool,
    PoolConfig, Recovery, Sharing, Stream, StreamHandle, Tagged, WaitPolicy,
};

use crate::rig::{GRANULE, MIB};
use crate::support::chance::{self, FAULT, Reached, chance, failing, number, with_faults};
use crate::support::changed::changed;
use crate::support::streams::{begin_quiet_capture, make};
use crate::support::{Lcg, Meeting, Rig, call};

const MOST: u64 = 20;
const THREADS: usize = 3;

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
    wait: cuEventSynchronize(event: CUevent);
    hold_back: cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: u32);
    capture_question: cuStreamIsCapturing(stream: CUstream, status: *mut CUstreamCaptureStatus);
    which: cuStreamGetId(stream: CUstream, id: *mut u64);
    left: cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    mode: cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode);
}

static REACHED: Reached = Reached::new();

fn reach(what: &'static str) {
    REACHED.count(what);
}

fn locked<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Work that a block's next use comes behind.
enum Behind {
    /// All of a lane of the thread's.
    Lane(usize),
    /// An event, of a stream that another thread has, or that is gone.
    Event(usize),
}

struct Block {
    ptr: DevicePtr,
    bytes: u64,
    seed: u64,
    behind: Behind,
    /// Lanes of the thread's that read it.
    uses: Vec<usize>,
}

/// What threads have in common.
struct Common<'a> {
    rig: &'a Rig,
    peer: &'a Rig,
    sim: &'a Simulator,
    pool: &'a Pool,
    is_faulty: bool,
    shares: bool,
    /// Whether questions give memory away.
    asks: bool,
    shared: Stream,
    given: Vec<Mutex<Vec<Block>>>,
    /// Marks, each with an event behind it.
    marks: Mutex<Vec<(Mark, usize)>>,
    /// Held by who captures, and alone by who waits for the device.
    captures: RwLock<()>,
    tagged: Tagged,
    seeds: AtomicU64,
    live: Mutex<BTreeMap<u64, u64>>,
}

impl Common<'_> {
    fn enter(&self, ptr: DevicePtr, bytes: u64) {
        let (mut live, start) = (locked(&self.live), ptr.address());
        if let Some((other, length)) = live.range(..start + bytes).next_back() {
            assert!(other + length <= start, "{start:#x} +{bytes:#x} overlaps {other:#x}");
        }
        live.insert(start, bytes);
    }
}

fn attempt<T>(is_faulty: bool, call: impl Fn() -> Result<T, Error>) -> Result<T, Error> {
    if !is_faulty || !chance(3) {
        return call();
    }
    match with_faults(chance::below(40), &call) {
        Err(Error::Driver { code: FAULT, .. }) => {
            reach("faults met");
            call()
        }
        result => result,
    }
}

const OWN: usize = 0;
const RAW: usize = 1;
const PER_THREAD: usize = 2;
const LEGACY: usize = 3;
const SHARED: usize = 4;
const LENT: usize = 5;
const LANES: u64 = 6;

/// A thread's things, which the next thread in its place has after it.
struct Member<'a> {
    common: &'a Common<'a>,
    number: usize,
    random: Lcg,
    own: Stream,
    raw: usize,
    lent_raw: usize,
    lent: Option<Stream>,
    live: Vec<Block>,
    /// Whether its own stream does.
    captures: bool,
}

impl Member<'_> {
    fn below(&mut self, bound: u64) -> u64 {
        self.random.below(bound)
    }

    fn attempt<T>(&self, call: impl Fn() -> Result<T, Error>) -> Result<T, Error> {
        attempt(self.common.is_faulty, call)
    }

    fn handle(&self, lane: usize) -> StreamHandle {
        // SAFETY: the streams are alive until the member replaces or drops them.
        let raw = |raw: usize| unsafe { StreamHandle::from_raw(raw as CUstream) };
        match lane {
            OWN => self.own.handle(),
            RAW => raw(self.raw),
            PER_THREAD => StreamHandle::PER_THREAD,
            LEGACY => StreamHandle::LEGACY,
            SHARED => self.common.shared.handle(),
            _ => match &self.lent {
                // By either of its names.
                Some(lent) if chance(3) => lent.handle(),
                _ => raw(self.lent_raw),
            },
        }
    }

    fn lane(&mut self) -> usize {
        match self.below(LANES) as usize {
            // It takes no work now.
            OWN if self.captures => SHARED,
            lane => lane,
        }
    }

    fn event_behind(&self, lane: usize) -> usize {
        let driver = &self.common.rig.driver;
        call!(driver, cuCtxSetCurrent(self.common.rig.device.context()));
        let mut event = std::ptr::null_mut();
        call!(driver, cuEventCreate(&mut event, 2));
        call!(driver, cuEventRecord(event, self.handle(lane).raw()));
        event as usize
    }

    /// Has a lane come behind what a block was written by.
    fn order(&self, behind: &Behind, lane: usize) {
        let (rig, to) = (self.common.rig, self.handle(lane));
        match behind {
            Behind::Lane(of) if *of == lane => {}
            Behind::Lane(of) => rig.order(self.handle(*of), to),
            Behind::Event(event) => {
                call!(rig.driver, cuCtxSetCurrent(rig.device.context()));
                call!(rig.driver, cuStreamWaitEvent(to.raw(), *event as CUevent, 0));
            }
        }
    }

    fn bytes(&mut self) -> u64 {
        let (low, high) = [
            (1, 2048),
            (1, 64 << 10),
            (64 << 10, 2 * MIB),
            (64 << 10, 2 * MIB),
            (2 * MIB, 12 * MIB),
            (2 * MIB, 30 * MIB),
        ][self.below(6) as usize];
        match self.below(12) {
            0 => (1 + self.below(6)) * GRANULE,
            1 => (1 + self.below(4)) * GRANULE - 512,
            _ => low + self.below(high - low),
        }
    }

    fn malloc(&mut self) {
        let (bytes, lane) = (self.bytes(), self.lane());
        let (common, stream) = (self.common, self.handle(lane));
        let is_tagged = self.below(5) == 0;
        let malloc = || match is_tagged {
            true => common.tagged.malloc(bytes as usize, stream),
            false => common.pool.malloc(bytes as usize, stream),
        };
        let ptr = match self.attempt(malloc) {
            Ok(ptr) => ptr,
            Err(error) if error.is_out_of_memory() => return reach("requests refused"),
            Err(error) => panic!("{error}"),
        };
        reach("requests");
        common.enter(ptr, bytes);
        let seed = common.seeds.fetch_add(1 << 40, Ordering::Relaxed);
        common.rig.fill(ptr.address(), bytes, seed, stream);
        self.live.push(Block { ptr, bytes, seed, behind: Behind::Lane(lane), uses: Vec::new() });
    }

    fn free(&mut self, block: Block, lane: usize) {
        let (common, stream) = (self.common, self.handle(lane));
        self.order(&block.behind, lane);
        common.rig.check(block.ptr.address(), block.bytes, block.seed, stream);
        assert_eq!(locked(&common.live).remove(&block.ptr.address()), Some(block.bytes));
        let any = chance(3);
        let free = || match any {
            true => Pool::free_any(&common.rig.driver, block.ptr, stream),
            false => common.pool.free(block.ptr, stream),
        };
        self.attempt(free).unwrap_or_else(|error| panic!("{error}"));
        if let Behind::Event(event) = block.behind {
            call!(common.rig.driver, cuEventDestroy_v2(event as CUevent));
        }
        if block.uses.iter().any(|used| *used != lane) {
            reach("frees with uses");
        }
    }

    fn pick(&mut self) -> Option<usize> {
        let len = self.live.len() as u64;
        (len > 0).then(|| self.below(len) as usize)
    }

    /// A lane means another stream from here on, or one that others have.
    fn leave(&mut self, lane: usize) {
        // A stream that was noted by its handle is there until the free, but for the library's.
        if lane == OWN {
            self.live.iter_mut().for_each(|block| block.uses.retain(|used| *used != OWN));
        }
        while let Some(at) = self.live.iter().position(|block| block.uses.contains(&lane)) {
            let block = self.live.swap_remove(at);
            let to = if matches!(block.behind, Behind::Lane(of) if of == PER_THREAD) {
                PER_THREAD
            } else if self.captures {
                SHARED
            } else {
                OWN
            };
            self.free(block, to);
        }
        if self.live.iter().all(|block| !matches!(block.behind, Behind::Lane(of) if of == lane)) {
            return;
        }
        for at in 0..self.live.len() {
            if matches!(self.live[at].behind, Behind::Lane(of) if of == lane) {
                self.live[at].behind = Behind::Event(self.event_behind(lane));
            }
        }
    }

    fn destroy(&self, raw: usize) -> usize {
        call!(self.common.rig.driver, cuStreamDestroy_v2(raw as CUstream));
        make(self.common.rig, self.common.seeds.load(Ordering::Relaxed) as u32 >> 8 & 1).0 as usize
    }

    fn replace(&mut self) {
        match self.below(4) {
            0 if self.captures => {}
            0 => {
                self.leave(OWN);
                self.own = self.common.rig.stream();
                reach("streams replaced");
            }
            1 => {
                self.leave(RAW);
                self.raw = self.destroy(self.raw);
                reach("raw streams replaced");
            }
            2 => {
                self.lent = match self.lent.take() {
                    Some(_) => None,
                    None => {
                        // SAFETY: the stream is alive until it is destroyed below, which takes the loan first.
                        let lent = unsafe {
                            Stream::borrowed(
                                &self.common.rig.device,
                                StreamHandle::from_raw(self.lent_raw as CUstream),
                            )
                        };
                        Some(lent.expect("a loan"))
                    }
                };
                reach("streams lent or not");
            }
            _ => {
                self.leave(LENT);
                self.lent = None;
                self.lent_raw = self.destroy(self.lent_raw);
                reach("lent streams replaced");
            }
        }
    }

    fn act(&mut self) {
        let common = self.common;
        match self.below(52) {
            48 => self.capture(),
            49..51 => self.mark(),
            0..16 => self.malloc(),
            16..26 => {
                if let Some(at) = self.pick() {
                    let lane = self.lane();
                    let block = self.live.swap_remove(at);
                    self.free(block, lane);
                }
            }
            26..28 => {
                let stays = |used: &usize| [OWN, SHARED, LEGACY].contains(used);
                if let Some(at) = self.pick().filter(|at| self.live[*at].uses.iter().all(stays)) {
                    let to = self.below(THREADS as u64) as usize;
                    let mut block = self.live.swap_remove(at);
                    block.uses.clear();
                    if let Behind::Lane(of) = block.behind {
                        block.behind = Behind::Event(self.event_behind(of));
                    }
                    locked(&common.given[to]).push(block);
                    reach("given");
                }
            }
            28 => {
                let given = std::mem::take(&mut *locked(&common.given[self.number]));
                for block in given {
                    let lane = self.lane();
                    self.free(block, lane);
                }
            }
            29..31 => {
                let lane = self.lane();
                if let Some(at) = self.pick() {
                    let stream = self.handle(lane);
                    self.order(&self.live[at].behind, lane);
                    let block = &self.live[at];
                    common.rig.check(block.ptr.address(), block.bytes, block.seed, stream);
                    self.attempt(|| common.pool.record_stream(block.ptr, stream)).expect("a use");
                    self.live[at].uses.push(lane);
                    reach("uses");
                }
            }
            31 if !self.captures => {
                let (from, to) = (self.lane(), self.lane());
                let on = self.handle(from);
                let mark = self.attempt(|| common.pool.mark(on)).expect("a mark");
                if self.below(2) == 0 {
                    self.order(&Behind::Lane(from), to);
                    let to = self.handle(to);
                    self.attempt(|| common.pool.follows(to, &mark)).expect("an order");
                } else {
                    call!(common.rig.driver, cuCtxSetCurrent(common.rig.device.context()));
                    call!(common.rig.driver, cuStreamSynchronize(on.raw()));
                    self.attempt(|| common.pool.passed(&mark)).expect("passed");
                }
            }
            32 => match self.below(6) {
                0 => {
                    if let Ok(_alone) = common.captures.try_write() {
                        common.rig.device.synchronize().expect("it finishes");
                    }
                }
                1 => common.shared.synchronize().expect("it finishes"),
                _ if self.captures => {}
                _ => self.own.synchronize().expect("it finishes"),
            },
            33..35 => {
                let keep = self.below(MOST) * GRANULE;
                self.attempt(|| common.pool.trim_to(keep)).expect("a trim");
                reach("trims");
            }
            35 => {
                let most = match self.below(6) {
                    0 => Some(0),
                    1 => Some(self.below(4 * GRANULE)),
                    2 => Some(self.below(MOST * GRANULE)),
                    3 => Some(self.below(MOST) * GRANULE),
                    _ => None,
                };
                common.pool.limit_to(most).expect("a limit");
            }
            36 => {
                let access =
                    [Access::None, Access::Read, Access::ReadWrite][self.below(3) as usize];
                let set = || common.pool.set_access(&common.peer.device, access);
                self.attempt(set).expect("access");
            }
            37 => {
                let stats = common.pool.stats();
                assert!(stats.live_bytes <= stats.mapped_bytes, "{stats:?}");
                common.pool.snapshot();
                let _ = common.pool.layout().to_string();
                let _ = format!("{:?}", common.pool);
                if let Some(at) = self.pick() {
                    let block = &self.live[at];
                    let found = common.pool.allocation(block.ptr.address() + block.bytes - 1);
                    assert_eq!(found.expect("it is live").start, block.ptr);
                }
                common.pool.reset_peaks();
            }
            38..41 => self.replace(),
            41 => {
                let used = common.sim.memory_used(0);
                let bytes = match self.below(4) {
                    0 => used,
                    1 => used + self.below(8 * GRANULE),
                    _ => (2 * MOST + 1) * GRANULE,
                };
                common.sim.set_memory_limit(0, bytes);
                reach("a device that others fill");
            }
            42 => {
                let stream = self.handle(OWN);
                let bytes =
                    [0, 1 << 40, usize::MAX, (MOST * 3 * GRANULE) as usize][self.below(4) as usize];
                assert!(common.pool.malloc(bytes, stream).is_err());
            }
            43 if common.shares => {
                if let Some(at) = self.pick() {
                    let ptr = self.live[at].ptr;
                    match self.attempt(|| common.pool.export(ptr).map(drop)) {
                        // What may sleep is not shared.
                        Err(Error::ForeignPointer { .. }) => {}
                        exported => exported.map(|()| reach("exports")).expect("an export"),
                    }
                }
            }
            _ => {
                for _ in 0..1 + self.below(8) {
                    common.sim.advance_all();
                }
            }
        }
    }

    /// The thread's own stream captures while the thread does other things.
    fn capture(&mut self) {
        if self.captures {
            return;
        }
        let common = self.common;
        for at in 0..self.live.len() {
            if matches!(self.live[at].behind, Behind::Lane(OWN)) {
                self.live[at].behind = Behind::Event(self.event_behind(OWN));
            }
        }
        let Ok(_captures) = common.captures.try_read() else { return };
        let own = self.own.handle();
        begin_quiet_capture(common.rig, own.raw());
        self.captures = true;
        // What is asked for on it and given back, without work.
        let mut kept = Vec::new();
        for _ in 0..self.below(12) {
            match self.below(3) {
                0 => {
                    let bytes = self.bytes() as usize;
                    if let Ok(ptr) = self.attempt(|| common.pool.malloc(bytes, own)) {
                        common.enter(ptr, bytes as u64);
                        kept.push(ptr);
                    }
                }
                1 => {
                    if let Some(ptr) = kept.pop() {
                        locked(&common.live).remove(&ptr.address());
                        self.attempt(|| common.pool.free(ptr, own)).expect("a free in a capture");
                    }
                }
                _ => self.act(),
            }
        }
        for ptr in kept {
            locked(&common.live).remove(&ptr.address());
            self.attempt(|| common.pool.free(ptr, own)).expect("a free in a capture");
        }
        call!(common.rig.driver, cuCtxSetCurrent(common.rig.device.context()));
        let mut graph = std::ptr::null_mut();
        let end = common.rig.driver.raw().cuStreamEndCapture.expect("the function");
        // SAFETY: the stream is alive, and captures or did until somebody's call ended that.
        let _ = unsafe { end(own.raw(), &mut graph) };
        if !graph.is_null() {
            call!(common.rig.driver, cuGraphDestroy(graph));
            reach("captures");
        } else {
            reach("captures that were lost");
        }
        self.captures = false;
    }

    /// Takes a mark, or tells of one that anybody took.
    fn mark(&mut self) {
        let common = self.common;
        let lane = self.lane();
        let on = self.handle(lane);
        let marks = locked(&common.marks).len() as u64;
        if marks < 12 && self.below(2) == 0 {
            let mark = self.attempt(|| common.pool.mark(on)).expect("a mark");
            let event = self.event_behind(lane);
            locked(&common.marks).push((mark, event));
            return;
        }
        let Some((mark, event)) = (marks > 0)
            .then(|| {
                let at = self.below(marks) as usize;
                let mut marks = locked(&common.marks);
                (at < marks.len()).then(|| marks.swap_remove(at))
            })
            .flatten()
        else {
            return;
        };
        call!(common.rig.driver, cuCtxSetCurrent(common.rig.device.context()));
        match self.below(3) {
            0 if !self.captures => {
                call!(common.rig.driver, cuEventSynchronize(event as CUevent));
                self.attempt(|| common.pool.passed(&mark)).expect("passed");
                reach("old marks passed");
            }
            _ => {
                call!(common.rig.driver, cuStreamWaitEvent(on.raw(), event as CUevent, 0));
                self.attempt(|| common.pool.follows(on, &mark)).expect("an order");
                reach("old marks followed");
            }
        }
        match self.below(2) {
            0 => locked(&common.marks).push((mark, event)),
            _ => call!(common.rig.driver, cuEventDestroy_v2(event as CUevent)),
        }
    }

    /// The thread ends; another has its things.
    fn end_thread(&mut self) {
        self.leave(PER_THREAD);
    }

    fn end(mut self) {
        let given = std::mem::take(&mut *locked(&self.common.given[self.number]));
        self.live.extend(given);
        for block in std::mem::take(&mut self.live) {
            let lane = match block.behind {
                Behind::Lane(of) => of,
                Behind::Event(_) => self.lane(),
            };
            self.free(block, lane);
        }
        self.lent = None;
        for raw in [self.raw, self.lent_raw] {
            call!(self.common.rig.driver, cuStreamDestroy_v2(raw as CUstream));
        }
    }
}

fn validate(pool: &Pool) {
    pool.validate().unwrap_or_else(|violation| panic!("{violation}\n{pool:?}"));
}

/// While all stand still.
fn look(common: &Common<'_>, has_helper: bool, base: u64) {
    let pool = common.pool;
    validate(pool);
    let live = locked(&common.live).len() as u64;
    let stats = pool.stats();
    assert_eq!(stats.live_count, live, "{stats:?}");
    if has_helper {
        return;
    }
    let there = stats.live_bytes + stats.cached_bytes + stats.free_bytes() + stats.transit_bytes;
    assert_eq!(there, stats.mapped_bytes, "{stats:?}");
    assert_eq!(there + stats.zombie_bytes + stats.hole_bytes, stats.reserved_bytes, "{stats:?}");
    let idle = locked(&common.live).values().map(|bytes| bytes.div_ceil(512) * 512).sum::<u64>();
    assert!(stats.live_bytes >= idle && stats.live_bytes <= idle + idle / 16 + live * 4096);
    if chance(2) {
        sleep(common);
        validate(pool);
    }
    if chance(2) {
        wait_and_trim(common);
        validate(pool);
        let stats = pool.stats();
        assert_eq!(stats.zombie_bytes, 0, "{pool:?}");
        let used = common.sim.memory_used(0) + common.sim.host_memory_used() - base;
        assert_eq!(used, stats.mapped_bytes, "{stats:?}");
        // The only stream of the heap with a tag keeps its memory, as far as that is no whole extent.
        assert_eq!(stats.cached_bytes, 0, "{pool:?}");
        assert_eq!(stats.deferred_bytes, 0, "{pool:?}");
        reach("everything given back");
    }
}

/// Waits for the device, and tells or not, and has what is free given back. What a trim makes whole again leaves
/// addresses that are waited for by the next.
fn wait_and_trim(common: &Common<'_>) {
    let tells = chance(2) || !common.asks;
    for _ in 0..6 {
        if tells {
            common.rig.device.synchronize().expect("it finishes");
        } else {
            call!(common.rig.driver, cuCtxSetCurrent(common.rig.device.context()));
            call!(common.rig.driver, cuCtxSynchronize());
            reach("waits that nobody told of");
        }
        common.pool.trim_to(0).expect("a trim");
        common.tagged.trim_to(0).expect("a trim");
    }
}

/// Has what may sleep do so, behind all work.
fn sleep(common: &Common<'_>) {
    let stream = common.shared.handle();
    call!(common.rig.driver, cuCtxSetCurrent(common.rig.device.context()));
    if chance(2) {
        call!(common.rig.driver, cuCtxSynchronize());
    } else {
        common.rig.device.synchronize().expect("it finishes");
    }
    let contents = Contents::Keep([Buffers::Release, Buffers::Retain][chance::below(2) as usize]);
    let suspend = || attempt(common.is_faulty, || common.pool.suspend("tag", stream, &contents));
    match suspend() {
        Ok(_) | Err(Error::HalfAsleep { .. } | Error::Asleep) => {}
        // By a fault: something is not waited for, or not unmapped.
        Err(_) if common.is_faulty => match common.pool.suspend("tag", stream, &contents) {
            Ok(_) | Err(Error::Asleep) => {}
            Err(error) => panic!("{error}"),
        },
        Err(error) => panic!("{error}"),
    }
    validate(common.pool);
    match attempt(common.is_faulty, || common.pool.resume("tag", stream)) {
        Ok(_) => {}
        Err(error) if error.is_out_of_memory() => {
            common.sim.set_memory_limit(0, 8 * MOST * GRANULE);
            common.pool.limit_to(None).expect("a limit");
            common.pool.resume("tag", stream).expect("there is memory");
        }
        Err(error) => panic!("{error}"),
    }
    reach("sleeps");
    call!(common.rig.driver, cuCtxSynchronize());
}

fn some_config(random: &mut Lcg) -> PoolConfig {
    let mut config = PoolConfig::default();
    config.moves_per_second = [0, 1000, u32::MAX][random.below(3) as usize];
    config.limit_bytes = match random.below(6) {
        0 => Some(random.below(MOST * GRANULE)),
        1 => Some(random.below(3) * GRANULE),
        2 | 3 => Some(MOST * GRANULE),
        _ => None,
    };
    config.va_size_bytes =
        [Some(16 * GRANULE), Some((16 + random.below(40)) * GRANULE), Some(8 * MOST * GRANULE)]
            [random.below(3) as usize];
    config.pending_policy =
        [PendingPolicy::GrowFirst, PendingPolicy::WaitFirst][random.below(2) as usize];
    config.out_of_memory = match random.below(3) {
        0 => WaitPolicy::FailAtOnce,
        1 => WaitPolicy::WaitUpTo(Duration::from_micros(300)),
        _ => WaitPolicy::WaitForPending,
    };
    config.reuse.follow_event_dependencies = random.below(4) > 0;
    config.reuse.opportunistic = random.below(4) > 0;
    config.reuse.internal_dependencies = random.below(4) > 0;
    config.release_threshold_bytes = [None, None, Some(6 * GRANULE)][random.below(3) as usize];
    config.patience = Duration::from_micros(100 * random.below(2));
    config.sharing =
        [Sharing::None, Sharing::None, Sharing::FileDescriptor][random.below(3) as usize];
    if random.below(6) == 0 {
        config.location = Location::HostNuma(0);
    }
    if random.below(4) == 0 {
        let mut background = Background::default();
        background.period = Duration::ZERO;
        background.ahead_bytes = random.below(4) * GRANULE;
        config.background = Some(background);
    }
    config
}

fn run(seed: u64) {
    let mut random = Lcg(seed ^ 0x5DEE_CE66);
    random.below(1);
    chance::seed(seed);
    let schedule = match random.below(4) {
        0 => Schedule::Eager,
        1 => Schedule::Late { patience: 1 + random.below(20) as u32 },
        2 => Schedule::Random,
        _ => Schedule::Manual,
    };
    let sim = Simulator::builder()
        .devices(2)
        .schedule(schedule)
        .seed(seed)
        .memory_bytes((2 * MOST + 1) * GRANULE)
        .build()
        .expect("a simulator");
    let mut rig = Rig::with(changed(&sim, put_failing), sim.clone());
    rig.by_page = true;
    let peer = rig.beside(1);
    let config = some_config(&mut random);
    let is_faulty = random.below(2) == 0;
    let steps = 10 + random.below(70);
    println!("{seed}: {schedule:?}, {steps} steps, faulty {is_faulty}, {config:?}");
    let base = sim.memory_used(0) + sim.host_memory_used();
    let pool = Pool::new(&rig.device, &config).expect("a pool");
    let callback = (random.below(3) == 0).then(|| {
        let times = AtomicU64::new(0);
        pool.on_out_of_memory(move |pool, _| {
            match times.fetch_add(1, Ordering::Relaxed).is_multiple_of(3) {
                true => {
                    let _ = pool.trim_to(0);
                    Recovery::Retry
                }
                false => Recovery::GiveUp,
            }
        })
    });
    {
        let common = Common {
            rig: &rig,
            peer: &peer,
            sim: &sim,
            pool: &pool,
            is_faulty,
            shares: config.sharing != Sharing::None,
            asks: config.reuse.opportunistic,
            shared: rig.stream(),
            marks: Mutex::default(),
            captures: RwLock::new(()),
            tagged: pool.tagged("tag").expect("a tag"),
            given: (0..THREADS).map(|_| Mutex::default()).collect(),
            seeds: AtomicU64::new(1 << 40),
            live: Mutex::default(),
        };
        let mut members: Vec<Member<'_>> = (0..THREADS)
            .map(|number| Member {
                common: &common,
                number,
                random: Lcg(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ number as u64),
                own: rig.stream(),
                raw: make(&rig, 1).0 as usize,
                lent_raw: make(&rig, 1).0 as usize,
                lent: None,
                live: Vec::new(),
                captures: false,
            })
            .collect();
        for round in 0..4 {
            let meeting = Meeting::of(THREADS);
            std::thread::scope(|scope| {
                for member in &mut members {
                    let meeting = &meeting;
                    let has_helper = config.background.is_some();
                    let common = &common;
                    scope.spawn(move || {
                        chance::seed(seed ^ member.number as u64 ^ round << 8);
                        let part = || (0..steps).for_each(|_| member.act());
                        if meeting.after(part, || look(common, has_helper, base)) {
                            member.end_thread();
                        }
                    });
                }
            });
        }
        members.into_iter().for_each(Member::end);
        for (_, event) in std::mem::take(&mut *locked(&common.marks)) {
            call!(rig.driver, cuEventDestroy_v2(event as CUevent));
        }
        // All of it is found to be free.
        wait_and_trim(&common);
        let stats = pool.stats();
        let is_helped = config.background.is_some_and(|of| of.ahead_bytes > 0);
        assert!(is_helped || stats.mapped_bytes <= stats.exported_bytes, "{pool:?}");
    }
    drop(callback);
    let stats = pool.stats();
    assert_eq!((stats.live_count, stats.live_bytes), (0, 0));
    validate(&pool);
    let mismatches = rig.mismatches();
    sim.assert_clean();
    assert_eq!(mismatches, 0, "words differ from what was written");
    pool.destroy().map_err(|(_, error)| error).expect("an end");
    drop(peer);
    drop(rig);
    sim.assert_clean();
    let leaks = sim.leaks();
    assert!(leaks.is_empty(), "{leaks:?}");
}

/// One program at a time: what fails is one simulator's.
static ALONE: Mutex<()> = Mutex::new(());

/// What is allocated never overlaps, keeps what was written into it and meets no use that comes unordered; books and
/// numbers agree whenever the threads stand still; what is not in use goes back; nothing is left at the end.
#[test]
fn threads_with_streams_of_every_kind() {
    const CASES: u64 = 40;
    let _alone = locked(&ALONE);
    let first = number("VPMM_MIXED_FIRST", 0);
    let cases = number("VPMM_MIXED_CASES", CASES);
    (first..first + cases).for_each(run);
    let expected = [
        "a device that others fill",
        "captures",
        "everything given back",
        "exports",
        "faults met",
        "frees with uses",
        "given",
        "lent streams replaced",
        "old marks followed",
        "old marks passed",
        "raw streams replaced",
        "requests",
        "requests refused",
        "sleeps",
        "streams lent or not",
        "streams replaced",
        "trims",
        "uses",
        "waits that nobody told of",
    ];
    REACHED.assert_all(if cases < CASES { &[] } else { &expected });
}

//! Random stacks of resources in several threads at a time, which allocate from every level of them.
//!
//! What the threads meet in differs from run to run: a program that fails is printed, and comes again by many
//! runs of it. `VPMM_RESOURCE_CROWD_FIRST` and `VPMM_RESOURCE_CROWD_CASES` choose others.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::CUstream_flags_enum;
use vpmm::{Error, Stream, StreamHandle};

use crate::stacks::{CACHING, KINDS, Level, MEMORY, can_refuse, random_stack};
use crate::subjects::MIB;
use crate::support::chance::{FAULT, Reached, chance, failing, number, seed, with_faults};
use crate::support::changed::changed;
use crate::support::{Lcg, Meeting, Rig, call, streams};
use crate::watched::{Held, Watched};

failing! {
    put_failing:
    alloc: cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize);
    free: cuMemFree_v2(address: CUdeviceptr);
    alloc_managed: cuMemAllocManaged(address: *mut CUdeviceptr, bytes: usize, flags: u32);
    alloc_async: cuMemAllocFromPoolAsync(
        address: *mut CUdeviceptr,
        bytes: usize,
        pool: CUmemoryPool,
        stream: CUstream,
    );
    free_async: cuMemFreeAsync(address: CUdeviceptr, stream: CUstream);
    create: cuEventCreate(event: *mut CUevent, flags: u32);
    record: cuEventRecord(event: CUevent, stream: CUstream);
    query: cuEventQuery(event: CUevent);
    hold_back: cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: u32);
    capture_question: cuStreamIsCapturing(stream: CUstream, status: *mut CUstreamCaptureStatus);
    which: cuStreamGetId(stream: CUstream, number: *mut u64);
}

static REACHED: Reached = Reached::new();

/// A stream, that lasts as long as who has it.
#[derive(Clone)]
struct Lane {
    handle: StreamHandle,
    kept: Option<Arc<Stream>>,
}

impl Lane {
    fn of(stream: Stream) -> Self {
        Self { handle: stream.handle(), kept: Some(Arc::new(stream)) }
    }

    fn raw(handle: StreamHandle) -> Self {
        Self { handle, kept: None }
    }
}

struct Block {
    held: Held,
    level: usize,
    of: Lane,
    /// Noted streams, that may go on using it.
    noted: Vec<Lane>,
    /// Nothing was written into it.
    is_blank: bool,
}

/// What threads have in common.
struct Crowd<'a> {
    rig: &'a Rig,
    sim: &'a Simulator,
    levels: &'a [Level],
    watched: Vec<Watched<'a>>,
    is_faulty: bool,
    /// Whether streams capture, beside which nobody has work that only a wait for the device ends.
    captures: bool,
    shared: Lane,
    foreign: Lane,
    /// Somebody else's as well, and only ever lent: it counts as ended whenever nobody has it.
    lent: StreamHandle,
    /// What was given to each of the threads.
    given: Vec<Mutex<Vec<Block>>>,
}

impl Crowd<'_> {
    /// A call that may fail where driver calls do.
    fn attempt<T>(&self, call: impl Fn() -> Result<T, Error>) -> Result<T, Error> {
        if !self.is_faulty || !chance(4) {
            return call();
        }
        match with_faults(10, &call) {
            // A stream that cannot be asked is taken to capture.
            Err(Error::Driver { code: FAULT, .. } | Error::StreamCapturing) => {
                REACHED.count("faults met");
                call()
            }
            result => result,
        }
    }

    fn order(&self, before: &Lane, after: &Lane) {
        if before.handle != after.handle {
            self.rig.order(before.handle, after.handle);
        }
    }

    /// A request, written to on its stream; `is_blank` where that captures.
    fn allocate(
        &self,
        level: usize,
        size: (usize, usize),
        of: &Lane,
        is_blank: bool,
    ) -> Option<Block> {
        let watched = &self.watched[level];
        let (bytes, align) = size;
        let asked = self.attempt(|| watched.resource.allocate(bytes, align, of.handle));
        let ptr = match asked {
            Ok(ptr) => ptr,
            Err(error) if can_refuse(&error) => {
                REACHED.count("requests refused");
                return None;
            }
            Err(Error::StreamCapturing) if is_blank => return None,
            Err(error) => panic!("{error}\n{}", watched.resource.describe()),
        };
        let held = watched.enter(ptr, bytes, align);
        if !is_blank {
            watched.fill(&held, of.handle);
        }
        REACHED.count(if is_blank { "requests in captures" } else { "requests" });
        Some(Block { held, level, of: of.clone(), noted: Vec::new(), is_blank })
    }

    /// Frees on a stream that comes after the block's own; gives the block back where that captures and cannot.
    fn free(&self, block: Block, lane: &Lane, is_capturing: bool) -> Option<Block> {
        let watched = &self.watched[block.level];
        if !is_capturing {
            self.order(&block.of, lane);
            if !block.is_blank {
                watched.check(&block.held, lane.handle);
            }
        }
        let Held { ptr, bytes, align, .. } = block.held;
        watched.give_up(&block.held);
        match self.attempt(|| watched.resource.deallocate(ptr, bytes, align, lane.handle)) {
            Ok(()) => None,
            Err(Error::StreamCapturing) if is_capturing => {
                watched.take_back(&block.held);
                Some(block)
            }
            Err(error) => panic!("{error}\n{}", watched.resource.describe()),
        }
    }
}

/// A thread under way.
struct Member<'a> {
    crowd: &'a Crowd<'a>,
    number: usize,
    random: Lcg,
    own: Lane,
    live: Vec<Block>,
    is_capturing: bool,
}

impl Member<'_> {
    fn below(&mut self, bound: u64) -> u64 {
        self.random.below(bound)
    }

    fn level(&mut self) -> usize {
        let levels = self.crowd.levels.len();
        // The top, as a rule.
        if self.below(2) == 0 { self.below(levels as u64) as usize } else { levels - 1 }
    }

    /// Bytes and an alignment that a level can give.
    fn size(&mut self, level: usize) -> (usize, usize) {
        let (low, high) =
            [(1, 2048), (1, 64 << 10), (64 << 10, MIB), (MIB, 6 * MIB)][self.below(4) as usize];
        let bytes = (low + self.below(high - low)) as usize;
        let facts = self.crowd.levels[level].resource.facts();
        let bytes = facts.max_bytes.map_or(bytes, |most| bytes.min(most));
        let align = 256 << if self.below(4) == 0 { self.below(6) } else { 0 };
        (bytes, align.min(facts.max_align))
    }

    fn lane(&mut self) -> Lane {
        let crowd = self.crowd;
        match self.below(16) {
            0..9 => self.own.clone(),
            9..12 => crowd.shared.clone(),
            12 => {
                // SAFETY: the stream outlasts the crowd, and nobody uses it by its bare handle.
                let lent = unsafe { Stream::borrowed(&crowd.rig.device, crowd.lent) };
                Lane::of(lent.expect("a stream"))
            }
            13 => crowd.foreign.clone(),
            14 if !crowd.captures => Lane::raw(StreamHandle::LEGACY),
            15 if !crowd.captures => Lane::raw(StreamHandle::PER_THREAD),
            _ => self.own.clone(),
        }
    }

    fn pick(&mut self) -> Option<usize> {
        let len = self.live.len() as u64;
        (len > 0).then(|| self.below(len) as usize)
    }

    fn act(&mut self) {
        let crowd = self.crowd;
        match self.below(40) {
            0..14 => {
                let (level, of) = (self.level(), self.lane());
                let size = self.size(level);
                self.live.extend(crowd.allocate(level, size, &of, false));
            }
            14..23 => {
                if let Some(at) = self.pick() {
                    let (block, lane) = (self.live.swap_remove(at), self.lane());
                    crowd.free(block, &lane, false);
                }
            }
            23..25 => self.give(),
            25 => {
                let lane = self.lane();
                self.free_given(&lane);
            }
            26..29 => {
                let Some(at) = self.pick() else { return };
                if !self.use_again(at) {
                    // As a rule one that ends before the block is freed.
                    let passing = self.below(2) == 0;
                    let lane = if passing { Lane::of(crowd.rig.stream()) } else { self.lane() };
                    self.use_further(at, &lane);
                }
            }
            29 if !self.is_capturing => {
                let lane = self.lane();
                call!(crowd.rig.driver, cuStreamSynchronize(lane.handle.raw()));
            }
            30 if !self.is_capturing => {
                // By the library, which learns of it.
                crowd.shared.kept.as_ref().expect("a stream").synchronize().expect("finished");
            }
            31..33 => {
                let (level, lane) = (self.level(), self.lane());
                let seed = self.below(u64::MAX);
                let chore = || crowd.levels[level].chore(&mut Lcg(seed), lane.handle);
                match crowd.attempt(chore) {
                    Ok(()) => REACHED.count("chores"),
                    Err(error) => assert!(can_refuse(&error), "{error}"),
                }
            }
            33 => self.replace(),
            34 => {
                let resource = &crowd.levels[self.level()].resource;
                let _ = (resource.describe().to_string(), resource.held_bytes());
            }
            35..37 if crowd.captures && !self.is_capturing => self.capture(),
            _ => {
                for _ in 0..1 + self.below(8) {
                    crowd.sim.advance_all();
                }
            }
        }
    }

    /// A block becomes another thread's.
    fn give(&mut self) {
        let crowd = self.crowd;
        let Some(at) = self.pick() else { return };
        let mut block = self.live.swap_remove(at);
        if block.of.handle == StreamHandle::PER_THREAD {
            // To that thread this would be its own.
            crowd.order(&block.of, &crowd.shared);
            block.of = crowd.shared.clone();
        }
        block.noted.retain(|lane| lane.handle != StreamHandle::PER_THREAD);
        let to = self.below(crowd.given.len() as u64) as usize;
        crowd.given[to].lock().unwrap_or_else(PoisonError::into_inner).push(block);
        REACHED.count("given");
    }

    fn free_given(&mut self, lane: &Lane) {
        let mut given =
            self.crowd.given[self.number].lock().unwrap_or_else(PoisonError::into_inner);
        let given = std::mem::take(&mut *given);
        for block in given {
            self.crowd.free(block, lane, false);
        }
    }

    /// A further stream uses a block. Where the level takes no note of that the block's own comes after it.
    fn use_further(&mut self, at: usize, lane: &Lane) {
        let (uses_first, goes_on) = (self.below(2) == 0, self.below(4) > 0);
        let (crowd, block) = (self.crowd, &mut self.live[at]);
        let watched = &crowd.watched[block.level];
        if block.is_blank {
            return;
        }
        crowd.order(&block.of, lane);
        let is_noted = watched.resource.facts().records_streams;
        if uses_first || !is_noted {
            watched.check(&block.held, lane.handle);
        }
        if !is_noted {
            crowd.order(lane, &block.of);
            return;
        }
        let note = || watched.resource.record_stream(block.held.ptr, lane.handle);
        crowd.attempt(note).expect("a noted use");
        block.noted.extend(goes_on.then(|| lane.clone()));
        REACHED.count("uses noted");
    }

    /// A stream that was noted for a block uses it once more, and may end then. `false` where there is none.
    fn use_again(&mut self, at: usize) -> bool {
        let goes_on = self.below(4) > 0;
        let block = &mut self.live[at];
        let Some(lane) = block.noted.pop() else { return false };
        self.crowd.watched[block.level].check(&block.held, lane.handle);
        block.noted.extend(goes_on.then_some(lane));
        REACHED.count("noted uses that went on");
        true
    }

    /// Another stream takes the place of the thread's own, which ends with its last block.
    fn replace(&mut self) {
        let next = Lane::of(self.crowd.rig.stream());
        for block in &mut self.live {
            if block.of.handle == self.own.handle && chance(2) {
                self.crowd.order(&block.of, &next);
                block.of = next.clone();
            }
        }
        let last = std::mem::replace(&mut self.own, next);
        if self.crowd.is_faulty {
            // Nobody can say where the work of a stream ends that ends so.
            with_faults(10, || drop(last));
        }
        REACHED.count("streams replaced");
    }

    /// A stream of the thread's captures, and allocates and frees meanwhile; with whatever else comes to the thread.
    fn capture(&mut self) {
        let crowd = self.crowd;
        let lane = Lane::of(crowd.rig.stream());
        let mut aside = Vec::new();
        for _ in 0..self.below(4) {
            let level = self.level();
            let size = self.size(level);
            aside.extend(crowd.allocate(level, size, &lane, false));
        }
        streams::begin_quiet_capture(crowd.rig, lane.handle.raw());
        self.is_capturing = true;
        for _ in 0..self.below(10) {
            match self.below(4) {
                0 => {
                    let level = self.level();
                    let size = self.size(level);
                    aside.extend(crowd.allocate(level, size, &lane, true));
                }
                1 if !aside.is_empty() => {
                    let at = self.below(aside.len() as u64) as usize;
                    let left = crowd.free(aside.swap_remove(at), &lane, true);
                    aside.extend(left);
                }
                _ => self.act(),
            }
        }
        self.is_capturing = false;
        assert_eq!(streams::end_capture(crowd.rig, lane.handle.raw()), 0, "nodes of the library's");
        REACHED.count("captures");
        self.live.append(&mut aside);
    }

    fn end(mut self) {
        let lane = self.lane();
        for block in std::mem::take(&mut self.live) {
            self.crowd.free(block, &lane, false);
        }
        self.free_given(&lane);
    }
}

/// Three rounds of so many steps, each thread its own.
fn run_threads(crowd: &Crowd<'_>, threads: usize, steps: u64, program: u64) {
    let meeting = Meeting::of(threads);
    std::thread::scope(|scope| {
        for number in 0..threads {
            let meeting = &meeting;
            scope.spawn(move || {
                call!(crowd.rig.driver, cuCtxSetCurrent(crowd.rig.device.context()));
                let mut random = Lcg(program.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ number as u64);
                seed(random.below(u64::MAX));
                let own = Lane::of(crowd.rig.stream());
                let (live, is_capturing) = (Vec::new(), false);
                let mut member = Member { crowd, number, random, own, live, is_capturing };
                for _ in 0..3 {
                    let part = || (0..steps).for_each(|_| member.act());
                    if !meeting.after(part, || assert_eq!(crowd.rig.mismatches(), 0)) {
                        return;
                    }
                }
                member.end();
                // The driver hangs where a thread ends before its default stream's work.
                call!(crowd.rig.driver, cuStreamSynchronize(StreamHandle::PER_THREAD.raw()));
            });
        }
    });
}

fn run(program: u64, top: usize) {
    let mut random = Lcg(program ^ 0x5DEE_CE66);
    random.below(1);
    let schedule = match random.below(4) {
        0 => Schedule::Eager,
        1 => Schedule::Late { patience: 1 + random.below(20) as u32 },
        2 => Schedule::Random,
        _ => Schedule::Manual,
    };
    let is_faulty = random.below(3) == 0;
    let captures = !is_faulty && random.below(3) == 0;
    let sim = Simulator::builder()
        .schedule(schedule)
        .deadlock_after(Duration::from_secs(2))
        .seed(program)
        .memory_bytes(MEMORY)
        .build()
        .expect("a simulator");
    let rig = Rig::with(changed(&sim, put_failing), sim.clone());
    let (threads, steps) = (2 + random.below(3) as usize, random.below(60));
    let levels = random_stack(&rig, &mut random, top);
    let top = &levels[levels.len() - 1].resource;
    println!("{program}: {threads} threads, {schedule:?}, faulty {is_faulty}, captures {captures}");
    println!("{}", top.describe());
    let flags = CUstream_flags_enum::CU_STREAM_NON_BLOCKING.0;
    let [(raw, foreign), (raw_lent, lent)] = [(); 2].map(|()| streams::make(&rig, flags));
    {
        let first = Watched::new(&rig, &levels[0].resource);
        let others = levels[1..].iter().map(|level| first.beside(&level.resource));
        let watched: Vec<_> = others.collect();
        let crowd = Crowd {
            rig: &rig,
            sim: &sim,
            levels: &levels,
            watched: std::iter::once(first).chain(watched).collect(),
            is_faulty,
            captures,
            shared: Lane::of(rig.stream()),
            foreign: Lane::raw(foreign),
            lent,
            given: (0..threads).map(|_| Mutex::default()).collect(),
        };
        run_threads(&crowd, threads, steps, program);
        // What was given to threads that had ended.
        for given in &crowd.given {
            for block in std::mem::take(&mut *given.lock().expect("no panic")) {
                crowd.free(block, &crowd.shared, false);
            }
        }
    }
    let mut levels = levels;
    while let Some(level) = levels.pop() {
        level.look_at_end();
    }
    assert_eq!(rig.mismatches(), 0, "contents were changed");
    for raw in [raw, raw_lent] {
        call!(rig.driver, cuStreamDestroy_v2(raw));
    }
    drop(rig);
    sim.assert_clean();
    let leaks = sim.leaks();
    assert!(leaks.is_empty(), "{leaks:?}");
}

/// Runs so many programs, or as many as are asked for: how many.
fn run_all(cases: u64, top: impl Fn(u64) -> usize) -> u64 {
    // A driver function that was replaced is one simulator's.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let first = number("VPMM_RESOURCE_CROWD_FIRST", 0);
    let cases = number("VPMM_RESOURCE_CROWD_CASES", cases);
    for program in first..first + cases {
        run(program, top(program));
    }
    cases
}

/// What is allocated of whichever level never overlaps, keeps what was written into it, and meets no use that
/// comes unordered; no capture is harmed; every level's account is right at the end, and nothing is left.
#[test]
fn stacks_in_several_threads() {
    const CASES: u64 = 65;
    let cases = run_all(CASES, |program| program as usize % KINDS.len());
    let expected = [
        "captures",
        "chores",
        "faults met",
        "given",
        "noted uses that went on",
        "requests",
        "requests in captures",
        "requests refused",
        "streams replaced",
        "uses noted",
    ];
    REACHED.assert_all(if cases < CASES { &[] } else { &expected });
}

/// The same of caching allocators, which have the most of their own to do where streams end.
#[test]
fn caching_allocators_in_several_threads() {
    run_all(20, |_| CACHING);
}

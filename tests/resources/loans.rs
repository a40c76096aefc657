//! Random programs with streams that others made: lent and used by their bare handles by turns, lent again, destroyed,
//! and followed by others at the same handle; with captures, where whoever lacks memory can ask every stream about
//! its own. Over resources that are full nearly always.
//!
//! `VPMM_LOANS_FIRST` and `VPMM_LOANS_CASES` choose other programs than the first few, `VPMM_LOANS_SAYS` has each tell
//! its steps.

use cuda_sys::types::{CUstream, CUstream_flags_enum, CUstreamCaptureMode};
use vpmm::resource::*;
use vpmm::{
    DevicePtr, MemoryResource, PagedConfig, PendingPolicy, Pool, PoolConfig, Stream, StreamHandle,
};

use crate::subjects::malloc;
use crate::support::{Lcg, Rig, call, streams};

/// As in `program`: patterns are written by the unit.
const WORDS: u64 = 256;
const STEPS: usize = 300;

struct Held {
    ptr: DevicePtr,
    units: u64,
    seed: u64,
    /// Where it is at home, by its number in `lanes`.
    lane: usize,
    /// Further streams that were noted by a bare handle.
    noted: Vec<usize>,
}

/// A stream.
struct Lane {
    raw: CUstream,
    /// Of the library's, or lent.
    value: Option<Stream>,
    is_foreign: bool,
    captures: bool,
}

struct Program<'a> {
    rig: &'a Rig,
    resource: &'a dyn MemoryResource,
    unit: u64,
    most: u64,
    lanes: Vec<Lane>,
    held: Vec<Held>,
    random: Lcg,
    seeds: u64,
    refused: usize,
    says: bool,
    /// Whether streams capture at times.
    captures: bool,
}

impl Lane {
    fn foreign(rig: &Rig) -> Self {
        let (raw, _) = streams::make(rig, CUstream_flags_enum::CU_STREAM_NON_BLOCKING.0);
        Self { raw, value: None, is_foreign: true, captures: false }
    }

    fn own(rig: &Rig) -> Self {
        let stream = rig.stream();
        Self { raw: stream.handle().raw(), value: Some(stream), is_foreign: false, captures: false }
    }

    fn bare(&self) -> StreamHandle {
        // SAFETY: the stream is alive while its lane is.
        unsafe { StreamHandle::from_raw(self.raw) }
    }
}

impl Program<'_> {
    fn say(&self, what: std::fmt::Arguments<'_>) {
        if self.says {
            println!("{what}");
        }
    }

    fn below(&mut self, bound: usize) -> usize {
        self.random.below(bound as u64) as usize
    }

    fn any_lane(&mut self) -> usize {
        loop {
            let count = self.lanes.len();
            let lane = self.below(count);
            if !self.lanes[lane].captures {
                return lane;
            }
        }
    }

    /// One of a lane's handles, and whether it is the bare one.
    fn handle(&mut self, lane: usize) -> (StreamHandle, bool) {
        let bare = self.below(2) == 0;
        match &self.lanes[lane].value {
            Some(stream) if !bare => (stream.handle(), false),
            _ => (self.lanes[lane].bare(), true),
        }
    }

    fn each(&self, held: &Held, with: impl Fn(u64, u64)) {
        for unit in 0..held.units {
            with(held.ptr.address() + unit * self.unit, held.seed * 4096 + unit);
        }
    }

    fn allocate(&mut self) {
        let (units, lane) = (self.random.below(self.most) + 1, self.any_lane());
        let (handle, bare) = self.handle(lane);
        self.seeds += 1;
        match self.resource.allocate((units * self.unit) as usize, 256, handle) {
            Ok(ptr) => {
                let held = Held { ptr, units, seed: self.seeds, lane, noted: Vec::new() };
                self.say(format_args!("allocate {units} on {lane} bare {bare}: {ptr}"));
                let on = self.lanes[lane].bare();
                self.each(&held, |at, seed| self.rig.fill(at, WORDS.min(self.unit), seed, on));
                self.held.push(held);
            }
            Err(error) => {
                assert!(error.is_out_of_memory(), "{error}");
                self.say(format_args!("refused {units} on {lane} bare {bare}"));
                self.refused += 1;
                (0..3).for_each(|_| self.free());
            }
        }
    }

    fn check(&self, held: &Held, lane: usize) {
        let on = self.lanes[lane].bare();
        self.each(held, |at, seed| self.rig.check(at, WORDS.min(self.unit), seed, on));
    }

    fn free(&mut self) {
        if self.held.is_empty() {
            return;
        }
        let which = self.below(self.held.len());
        self.free_at(which);
    }

    fn free_at(&mut self, which: usize) {
        let held = self.held.swap_remove(which);
        if self.lanes[held.lane].captures {
            // What was enqueued before is still ahead; no look, which would be a node.
            let lane = &self.lanes[held.lane];
            let handle = lane.value.as_ref().map(Stream::handle);
            if let Some(handle) = handle {
                self.say(format_args!("free {} in the capture of {}", held.ptr, held.lane));
                let bytes = (held.units * self.unit) as usize;
                match self.resource.deallocate(held.ptr, bytes, 256, handle) {
                    Ok(()) => {}
                    Err(vpmm::Error::StreamCapturing) => self.held.push(held),
                    Err(error) => panic!("{error}"),
                }
            } else {
                self.held.push(held);
            }
            return;
        }
        let lane = if self.below(3) == 0 { self.any_lane() } else { held.lane };
        if lane != held.lane {
            self.rig.order(self.lanes[held.lane].bare(), self.lanes[lane].bare());
        }
        self.check(&held, lane);
        let (handle, bare) = self.handle(lane);
        self.say(format_args!("free {} of {} on {lane} bare {bare}", held.ptr, held.lane));
        let bytes = (held.units * self.unit) as usize;
        match self.resource.deallocate(held.ptr, bytes, 256, handle) {
            Ok(()) => {}
            // What was noted by a bare handle is recorded on now.
            Err(vpmm::Error::StreamCapturing) if self.lanes.iter().any(|lane| lane.captures) => {
                let mut held = held;
                held.lane = lane;
                self.held.push(held);
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// A look from another stream, which is noted.
    fn note(&mut self) {
        if self.held.is_empty() || !self.resource.facts().records_streams {
            return;
        }
        let (which, lane) = (self.below(self.held.len()), self.any_lane());
        if self.lanes[self.held[which].lane].captures {
            return;
        }
        let (handle, bare) = self.handle(lane);
        let held = &self.held[which];
        self.rig.order(self.lanes[held.lane].bare(), self.lanes[lane].bare());
        self.check(held, lane);
        self.say(format_args!("note {} of {} on {lane} bare {bare}", held.ptr, held.lane));
        self.resource.record_stream(held.ptr, handle).expect("noted");
        if !self.held[which].noted.contains(&lane) {
            self.held[which].noted.push(lane);
        }
    }

    /// A stream is lent, or a loan is over.
    fn lend(&mut self) {
        let lane = self.below(self.lanes.len());
        if !self.lanes[lane].is_foreign || self.lanes[lane].captures {
            return;
        }
        self.say(format_args!("lend {lane}: {}", self.lanes[lane].value.is_none()));
        if self.lanes[lane].value.take().is_none() {
            let bare = self.lanes[lane].bare();
            // SAFETY: the stream is alive until its lane is destroyed, which drops this first.
            let lent = unsafe { Stream::borrowed(&self.rig.device, bare) }.expect("lent");
            self.lanes[lane].value = Some(lent);
        }
    }

    /// A capture begins on a stream that is known by its handle, or ends.
    fn capture(&mut self) {
        if let Some(lane) = self.lanes.iter().position(|lane| lane.captures) {
            self.say(format_args!("capture of {lane} ends"));
            streams::end_capture(self.rig, self.lanes[lane].raw);
            self.lanes[lane].captures = false;
            return;
        }
        let lane = self.any_lane();
        if let Some(stream) = &self.lanes[lane].value {
            // So that it is known by this handle.
            let handle = stream.handle();
            let bytes = self.unit as usize;
            let Ok(ptr) = self.resource.allocate(bytes, 256, handle) else { return };
            self.resource.deallocate(ptr, bytes, 256, handle).expect("freed");
            self.say(format_args!("capture of {lane}"));
            let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
            call!(self.rig.driver, cuStreamBeginCapture_v2(self.lanes[lane].raw, mode));
            self.lanes[lane].captures = true;
        }
    }

    /// A loan is over in a capture: no event can be recorded behind what was freed in it.
    fn lose(&mut self) {
        let lane = self.any_lane();
        if !self.lanes[lane].is_foreign || self.lanes[lane].value.is_none() {
            return;
        }
        self.say(format_args!("lose {lane}"));
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        call!(self.rig.driver, cuStreamBeginCapture_v2(self.lanes[lane].raw, mode));
        self.lanes[lane].captures = true;
        let of_it = self.held.iter().position(|held| held.lane == lane);
        if let Some(which) = of_it {
            let held = self.held.swap_remove(which);
            let last = self.held.len();
            self.held.push(held);
            self.free_at(last);
        }
        self.lanes[lane].value = None;
        streams::end_capture(self.rig, self.lanes[lane].raw);
        self.lanes[lane].captures = false;
    }

    /// A stream ends with whatever is under way, and another comes.
    fn replace(&mut self) {
        let lane = self.any_lane();
        let is_foreign = self.lanes[lane].is_foreign;
        // One of another's that was noted by its bare handle is to live until the free, or to be lent.
        let was_noted = self.held.iter().any(|held| held.noted.contains(&lane));
        if is_foreign && was_noted && self.lanes[lane].value.is_none() {
            return;
        }
        let to = (lane + 1) % self.lanes.len();
        if self.lanes[to].captures {
            return;
        }
        self.rig.order(self.lanes[lane].bare(), self.lanes[to].bare());
        for held in &mut self.held {
            if held.lane == lane {
                held.lane = to;
            }
            held.noted.retain(|noted| *noted != lane);
        }
        self.say(format_args!("replace {lane}, {to} has its memory"));
        self.lanes[lane].value = None;
        if is_foreign {
            call!(self.rig.driver, cuStreamDestroy_v2(self.lanes[lane].raw));
            self.lanes[lane] = Lane::foreign(self.rig);
        } else {
            self.lanes[lane] = Lane::own(self.rig);
        }
    }

    fn synchronize(&mut self) {
        if self.lanes.iter().any(|lane| lane.captures) {
            return;
        }
        let lane = self.any_lane();
        match &self.lanes[lane].value {
            Some(stream) => stream.synchronize().expect("it finishes"),
            None => call!(self.rig.driver, cuStreamSynchronize(self.lanes[lane].raw)),
        }
    }

    fn run(&mut self) {
        for _ in 0..STEPS {
            match self.below(100) {
                0..46 => self.allocate(),
                46..74 => self.free(),
                74..84 => self.note(),
                84..92 => self.lend(),
                92..94 => self.replace(),
                94 if self.captures => self.lose(),
                95 if self.captures => self.capture(),
                94..98 => self.synchronize(),
                _ => {
                    if self.below(3) == 0 && !self.lanes.iter().any(|lane| lane.captures) {
                        self.rig.device.synchronize().expect("it finishes");
                    }
                }
            }
        }
        if self.lanes.iter().any(|lane| lane.captures) {
            self.capture();
        }
        while !self.held.is_empty() {
            self.free();
        }
        assert_eq!(self.rig.mismatches(), 0, "contents were changed");
        self.rig.assert_clean();
    }
}

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|set| set.parse().ok()).unwrap_or(otherwise)
}

fn programs(
    unit: u64,
    most: u64,
    captures: bool,
    make: impl Fn(&Rig, PendingPolicy) -> Box<dyn MemoryResource>,
) {
    Rig::everywhere(|rig| {
        let first = number("VPMM_LOANS_FIRST", 0);
        let mut refused = 0;
        for seed in first..first + number("VPMM_LOANS_CASES", 12) {
            let policy =
                if seed % 2 == 0 { PendingPolicy::WaitFirst } else { PendingPolicy::GrowFirst };
            let resource = make(rig, policy);
            println!("program {seed} of {}", resource.describe());
            let mut program = Program {
                rig,
                resource: &resource,
                unit,
                most,
                lanes: vec![
                    Lane::own(rig),
                    Lane::foreign(rig),
                    Lane::foreign(rig),
                    Lane::own(rig),
                    Lane::foreign(rig),
                ],
                held: Vec::new(),
                random: Lcg(seed),
                captures,
                seeds: 0,
                refused: 0,
                says: number("VPMM_LOANS_SAYS", 0) > 0,
            };
            program.run();
            let lanes = std::mem::take(&mut program.lanes);
            refused += program.refused;
            drop(resource);
            for mut lane in lanes {
                lane.value = None;
                if lane.is_foreign {
                    call!(rig.driver, cuStreamDestroy_v2(lane.raw));
                }
            }
            rig.assert_clean();
        }
        assert!(refused > 0, "there was always enough: little was tested");
    });
}

fn full<R: MemoryResource + 'static>(
    rig: &Rig,
    upstream: R,
    bytes: u64,
    policy: PendingPolicy,
) -> Box<dyn MemoryResource> {
    let mut config = CoalescingConfig::default();
    (config.max_bytes, config.pending_policy) = (Some(bytes), policy);
    Box::new(CoalescingPool::new(upstream, &rig.device, &config).expect("a pool"))
}

#[test]
fn a_full_pool() {
    programs(256, 12, true, |rig, policy| full(rig, malloc(rig), 64 * 256, policy));
}

#[test]
fn a_full_pool_over_a_full_pool() {
    programs(256, 12, false, |rig, policy| {
        let below = full(rig, malloc(rig), 64 * 256, policy);
        full(rig, below, 64 * 256, policy)
    });
}

#[test]
fn few_blocks_of_fixed_size() {
    programs(256, 2, true, |rig, policy| {
        let mut config = FixedSizeConfig::default();
        (config.block_bytes, config.blocks_at_once, config.at_start) = (512, 8, false);
        let upstream = full(rig, malloc(rig), 24 * 512, policy);
        Box::new(FixedSize::new(upstream, &rig.device, &config).expect("blocks"))
    });
}

#[test]
fn bins() {
    programs(256, 12, false, |rig, policy| {
        let upstream = full(rig, malloc(rig), 64 * 256, policy);
        Box::new(Binning::with_powers(upstream, &rig.device, 9..=10).expect("bins"))
    });
}

#[test]
fn an_arena() {
    programs(128 << 10, 12, false, |rig, _| {
        let mut config = ArenaConfig::default();
        config.arena_bytes = Some(8 << 20);
        Box::new(Arena::new(malloc(rig), &rig.device, &config).expect("an arena"))
    });
}

#[test]
fn a_caching_allocator() {
    programs(512, 12, true, |rig, policy| {
        let upstream = full(rig, malloc(rig), 64 * 512, policy);
        let config = vpmm::caching::CachingConfig::default();
        Box::new(vpmm::CachingAllocator::over(upstream, &rig.device, &config).expect("one"))
    });
}

#[test]
fn a_caching_allocator_over_the_driver() {
    programs(512 << 10, 12, true, |rig, _| {
        let upstream = Limiting::new(malloc(rig), 48 << 20);
        let config =
            "max_split_size_mb:20,garbage_collection_threshold:0.0004".parse().expect("settings");
        Box::new(vpmm::CachingAllocator::over(upstream, &rig.device, &config).expect("one"))
    });
}

#[test]
fn the_default_profile() {
    programs(256 << 10, 12, true, |rig, policy| {
        let mut config = PoolConfig::default();
        (config.limit_bytes, config.pending_policy) = (Some(16 << 20), policy);
        Box::new(Pool::new(&rig.device, &config).expect("a pool"))
    });
}

#[test]
fn the_paged_profile() {
    programs(256 << 10, 20, true, |rig, policy| {
        let mut config = PagedConfig::default();
        (config.limit_bytes, config.pending_policy) = (Some(24 << 20), policy);
        config.va_size_bytes = 1 << 30;
        Box::new(Pool::paged(&rig.device, &config).expect("a pool"))
    });
}

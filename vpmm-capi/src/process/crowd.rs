//! Random calls of all that plugs into the process, in several threads: streams that are kept and forgotten, tags that
//! sleep, graphs' pools, a history that is on and off, and wrong pointers.
//!
//! What the threads meet in differs from run to run. `VPMM_PROCESS_CROWD_CASES` sets how many programs there are,
//! `VPMM_PROCESS_CROWD_FIRST` which is the first.

use std::ffi::{CStr, c_char, c_void};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cuda_sys::types::{CUresult, CUstream, CUstream_flags_enum, CUstreamCaptureMode};

use super::captures::{self, Filter};
use super::*;
use crate::driver::vpmm_driver_release;
use crate::guard::vpmm_last_error;
use crate::pool::{
    vpmm_free, vpmm_malloc, vpmm_pool_allocation, vpmm_pool_release, vpmm_pool_stats,
    vpmm_pool_trim_to, vpmm_pool_validate,
};
use crate::stats::{vpmm_stats, vpmm_stats_init};
use crate::stream::{vpmm_stream_lend, vpmm_stream_take_back};
use crate::tagged::{vpmm_resume, vpmm_suspend};
use crate::torch::{
    vpmm_torch_alloc, vpmm_torch_base_alloc, vpmm_torch_failed_requests, vpmm_torch_free,
};
use vpmm_status::*;

/// No other test's.
const DEVICE: u32 = 3;
const THREADS: u64 = 3;
const STEPS: u64 = 150;
const TAGS: [&CStr; 2] = [c"weights", c"cache"];
/// The longest request.
const MOST: u64 = 6 << 20;

/// A generator of Knuth's numbers.
struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % bound
    }

    fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }
}

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|set| set.parse().ok()).unwrap_or(otherwise)
}

fn last_error() -> String {
    // SAFETY: this thread's text, until its next failure.
    unsafe { CStr::from_ptr(vpmm_last_error()) }.to_string_lossy().into_owned()
}

fn ok(answer: vpmm_status) {
    assert_eq!(answer, VPMM_OK, "{}", last_error());
}

/// A stream that one thread has, whose handle is also the filters' to ask about.
struct Lane {
    raw: *mut c_void,
    /// By what calls its requests are.
    is_torchs: bool,
    is_kept: bool,
    is_lent: bool,
    captures: bool,
}

#[derive(Clone)]
struct Block {
    address: usize,
    bytes: usize,
    /// What it was filled with.
    value: u8,
    /// Whether it may sleep, or is a graph's.
    tag: Option<usize>,
    of_graph: bool,
}

impl Block {
    fn pointer(&self) -> *mut c_void {
        ptr::with_exposed_provenance_mut(self.address)
    }
}

/// A graph's pool that takes some streams, which it is told of.
struct Takes(Arc<Mutex<Vec<usize>>>);

impl Filter for Takes {
    fn takes(&self, stream: *mut c_void) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains(&stream.addr())
    }
}

/// What threads have in common.
#[derive(Default)]
struct Shared {
    given: Mutex<Vec<Block>>,
    /// Who sleeps is nobody's to use: a thread that uses tagged memory has its tag's number.
    awake: [std::sync::RwLock<bool>; TAGS.len()],
    numbers: AtomicUsize,
    /// Read by who captures.
    capturing: std::sync::RwLock<()>,
}

struct Thread<'a> {
    shared: &'a Shared,
    pool: usize,
    driver: usize,
    chance: Chance,
    lanes: Vec<Lane>,
    blocks: Vec<Block>,
    tags: Vec<usize>,
}

fn driver() -> Arc<Loaded> {
    process().loaded().ok().unwrap()
}

macro_rules! raw {
    ($name:ident($($argument:expr),*)) => {{
        let function = driver().raw().$name.unwrap();
        // SAFETY: live handles and pointers.
        let answer = unsafe { function($($argument),*) };
        assert_eq!(answer, CUresult::CUDA_SUCCESS, stringify!($name));
    }};
}

impl Thread<'_> {
    fn pool(&self) -> *const vpmm_pool {
        ptr::with_exposed_provenance(self.pool)
    }

    fn driver(&self) -> *const vpmm_driver {
        ptr::with_exposed_provenance(self.driver)
    }

    /// Lends a stream to who has handles, beside whatever the process knows of it, or takes it back.
    fn lend(&mut self) {
        let at = self.lane();
        let (driver, lane) = (self.driver(), &mut self.lanes[at]);
        if lane.is_lent {
            // SAFETY: a handle; the stream is alive, and this thread's.
            ok(unsafe { vpmm_stream_take_back(driver, lane.raw) });
        } else {
            // SAFETY: as above.
            ok(unsafe { vpmm_stream_lend(driver, DEVICE, lane.raw) });
        }
        lane.is_lent = !lane.is_lent;
    }

    fn new_lane(&mut self) {
        let (mut stream, flags): (CUstream, _) =
            (ptr::null_mut(), CUstream_flags_enum::CU_STREAM_NON_BLOCKING.0);
        raw!(cuStreamCreate(&raw mut stream, flags));
        let is_torchs = self.chance.once_in(2);
        let raw = stream.cast();
        let is_kept = !is_torchs && self.chance.once_in(2);
        if is_kept {
            // SAFETY: it lasts until it is forgotten.
            ok(unsafe { vpmm_process_keep_stream(DEVICE, raw) });
        }
        self.lanes.push(Lane { raw, is_torchs, is_kept, is_lent: false, captures: false });
    }

    fn end_lane(&mut self, at: usize) {
        let mut lane = self.lanes.swap_remove(at);
        assert!(!lane.captures);
        if lane.is_lent && self.chance.once_in(2) {
            // SAFETY: a handle; the stream is alive, and this thread's.
            ok(unsafe { vpmm_stream_take_back(self.driver(), lane.raw) });
            lane.is_lent = false;
        }
        let mut known = 7;
        // SAFETY: alive, and this thread's.
        ok(unsafe { vpmm_process_forget_stream(DEVICE, lane.raw, &raw mut known) });
        assert!(known == 1 || !lane.is_kept, "{known}");
        // SAFETY: as above.
        ok(unsafe { vpmm_process_forget_stream(DEVICE, lane.raw, &raw mut known) });
        assert_eq!(known, 0);
        if lane.is_lent {
            // SAFETY: as above.
            ok(unsafe { vpmm_stream_take_back(self.driver(), lane.raw) });
        }
        raw!(cuStreamDestroy_v2(lane.raw.cast()));
    }

    fn lane(&mut self) -> usize {
        self.chance.below(self.lanes.len() as u64) as usize
    }

    /// The tag that this thread's requests have.
    fn tag(&self) -> Option<usize> {
        self.tags.last().copied()
    }

    fn allocate(&mut self, at: usize, of_graph: bool) {
        let bytes = match self.chance.below(6) {
            0 => 0,
            1 => 1 + self.chance.below(2000),
            2 => MOST + self.chance.below(MOST),
            _ => 1 + self.chance.below(MOST),
        } as usize;
        let lane = &self.lanes[at];
        let mut pointer = ptr::dangling_mut();
        let tag = self.tag().filter(|_| !of_graph);
        let awake = tag.map(|tag| self.shared.awake[tag].read().unwrap());
        let sleeps = awake.as_ref().is_some_and(|awake| !**awake);
        let by_handle = self.chance.once_in(4) && tag.is_none() && !of_graph && bytes > 0;
        if by_handle {
            // SAFETY: a handle, a live stream, room for a pointer.
            let made = unsafe { vpmm_malloc(self.pool(), bytes, lane.raw, &raw mut pointer) };
            let refused = matches!(made, VPMM_OUT_OF_MEMORY | VPMM_BAD_STREAM);
            assert!(made == VPMM_OK || refused, "{made:?}: {}", last_error());
            if refused {
                return;
            }
        } else if lane.is_torchs && !sleeps && bytes < 1 << 20 {
            let refused = vpmm_torch_failed_requests(DEVICE);
            // SAFETY: the stream lasts until it is forgotten. Where there is no memory null is answered, as nothing
            // of C++ is here to be thrown.
            pointer = unsafe { vpmm_torch_alloc(bytes as isize, DEVICE as i32, lane.raw) };
            if pointer.is_null() && bytes > 0 {
                assert!(vpmm_torch_failed_requests(DEVICE) > refused, "of_graph {of_graph}");
                return;
            }
        } else {
            // SAFETY: a live stream, room for a pointer.
            let made = unsafe { vpmm_process_malloc(DEVICE, bytes, lane.raw, &raw mut pointer) };
            let refused = [VPMM_OUT_OF_MEMORY, VPMM_BAD_STREAM];
            match made {
                VPMM_BAD_STATE => assert!(sleeps, "{}", last_error()),
                VPMM_OK => {}
                _ => assert!(refused.contains(&made), "{made:?}: {}", last_error()),
            }
            if made != VPMM_OK {
                assert!(pointer == ptr::dangling_mut(), "it is written on success only");
                return;
            }
        }
        if pointer.is_null() {
            assert_eq!(bytes, 0);
            return;
        }
        assert!(!sleeps || bytes == 0);
        let value = self.chance.below(255) as u8;
        let block = Block { address: pointer.expose_provenance(), bytes, value, tag, of_graph };
        if !lane.captures && !of_graph {
            // SAFETY: the memory is this thread's.
            ok(unsafe { vpmm_process_fill(DEVICE, pointer, value, bytes, lane.raw) });
            // SAFETY: a live stream.
            ok(unsafe { vpmm_process_synchronize(DEVICE, lane.raw) });
        }
        drop(awake);
        self.blocks.push(block);
    }

    fn check(&mut self, block: &Block, at: usize) {
        let lane = &self.lanes[at];
        if lane.captures || block.of_graph {
            return;
        }
        let awake = block.tag.map(|tag| self.shared.awake[tag].read().unwrap());
        if awake.as_ref().is_some_and(|awake| !**awake) {
            return;
        }
        let mut found = vec![0_u8; block.bytes.min(600)];
        let (to, bytes) = (found.as_mut_ptr().cast(), found.len());
        // SAFETY: both have so many bytes.
        ok(unsafe { vpmm_process_download(DEVICE, to, block.pointer(), bytes, lane.raw) });
        assert!(found.iter().all(|byte| *byte == block.value), "another's");
    }

    fn free(&mut self, block: Block, at: usize) {
        self.check(&block, at);
        let lane = &self.lanes[at];
        let pointer = block.pointer();
        if self.chance.once_in(8) {
            let inside = pointer.map_addr(|address| address + 256);
            // SAFETY: no allocation begins there, so that nothing is freed.
            let freed = unsafe { vpmm_process_free(DEVICE, inside, lane.raw) };
            assert!(
                matches!(freed, VPMM_BAD_POINTER | VPMM_DOUBLE_FREE | VPMM_BAD_STREAM),
                "{freed:?}: {}",
                last_error()
            );
        }
        let by_handle = self.chance.once_in(4);
        if by_handle {
            // SAFETY: a handle; nobody uses the memory.
            let freed = unsafe { vpmm_free(self.pool(), pointer, lane.raw) };
            if freed == VPMM_BAD_STREAM {
                assert!(lane.captures, "{}", last_error());
                self.blocks.push(block);
                return;
            }
            ok(freed);
        } else if lane.is_torchs {
            // SAFETY: nobody uses the memory.
            unsafe { vpmm_torch_free(pointer, block.bytes as isize, DEVICE as i32, lane.raw) };
        } else {
            // SAFETY: as above.
            let freed = unsafe { vpmm_process_free(DEVICE, pointer, lane.raw) };
            if freed == VPMM_BAD_STREAM {
                assert!(lane.captures, "{}", last_error());
                self.blocks.push(block);
                return;
            }
            ok(freed);
        }
    }

    fn some_block(&mut self) -> Option<Block> {
        if self.chance.once_in(3)
            && let Some(block) = self.shared.given.lock().unwrap().pop()
        {
            return Some(block);
        }
        let count = self.blocks.len() as u64;
        (count > 0).then(|| self.blocks.swap_remove(self.chance.below(count) as usize))
    }

    fn capture(&mut self) {
        let shared = self.shared;
        let _captures = shared.capturing.read().unwrap();
        let at = self.lane();
        let taken = Arc::new(Mutex::new(vec![self.lanes[at].raw.addr()]));
        let number = (77, self.shared.numbers.fetch_add(1, Ordering::Relaxed) as u64);
        let pool = super::pool(DEVICE).ok().unwrap();
        super::begin(pool, number, Takes(Arc::clone(&taken))).ok().unwrap();
        if self.chance.once_in(4) {
            assert!(super::begin(pool, number, Takes(taken)).is_err());
        }
        let raw = self.lanes[at].raw;
        let is_real = !self.chance.once_in(4);
        // Requests before the capture are the graph's, too.
        if self.chance.once_in(2) {
            self.allocate(at, true);
        }
        if is_real {
            let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
            raw!(cuStreamBeginCapture_v2(raw.cast(), mode));
            self.lanes[at].captures = true;
        }
        let first = self.blocks.len();
        for _ in 0..self.chance.below(6) {
            match self.chance.below(3) {
                0 if self.blocks.len() > first => {
                    let block = self.blocks.pop().unwrap();
                    self.free(block, at);
                }
                1 if self.lanes.len() > 1 => {
                    let other = (at + 1) % self.lanes.len();
                    self.allocate(other, false);
                }
                _ => self.allocate(at, true),
            }
        }
        if is_real {
            let mut graph = ptr::null_mut();
            raw!(cuStreamEndCapture(raw.cast(), &raw mut graph));
            raw!(cuGraphDestroy(graph));
            self.lanes[at].captures = false;
        }
        let is_released_first = self.chance.once_in(4);
        if !is_released_first {
            super::end(DEVICE, number).ok().unwrap();
            if self.chance.once_in(3) {
                super::begin(pool, number, Takes(Arc::default())).ok().unwrap();
                super::end(DEVICE, number).ok().unwrap();
                super::release(DEVICE, number).ok().unwrap();
            }
        }
        super::release(DEVICE, number).ok().unwrap();
        assert!(super::end(DEVICE, number).is_err());
        assert!(super::release(DEVICE, number).is_err());
    }

    fn sleep(&mut self) {
        let tag = self.chance.below(TAGS.len() as u64) as usize;
        let at = self.lane();
        let raw = self.lanes[at].raw;
        let mut awake = self.shared.awake[tag].write().unwrap();
        let (name, mut bytes) = (TAGS[tag].as_ptr(), 0);
        let answer = if *awake {
            // SAFETY: a handle; a live stream, before which all work of the tag's memory has ended.
            unsafe { vpmm_suspend(self.pool(), name, raw, 1, ptr::null(), &raw mut bytes) }
        } else {
            // SAFETY: as above.
            unsafe { vpmm_resume(self.pool(), name, raw, 0, &raw mut bytes) }
        };
        match answer {
            VPMM_OK => *awake = !*awake,
            // Where it was never used; beside captures; where others have the memory.
            VPMM_NOT_FOUND | VPMM_BAD_STREAM | VPMM_OUT_OF_MEMORY => {}
            _ => panic!("{answer:?}: {}", last_error()),
        }
    }

    fn step(&mut self) {
        match self.chance.below(25) {
            24 => self.lend(),
            0 => {
                let at = self.lane();
                if self.lanes.len() > 1 {
                    self.end_lane(at);
                }
            }
            1 if self.lanes.len() < 4 => self.new_lane(),
            2 => {
                let tag = self.chance.below(TAGS.len() as u64) as usize;
                let device = if self.chance.once_in(2) { DEVICE } else { VPMM_EVERY_DEVICE };
                // SAFETY: it ends with a zero byte.
                ok(unsafe { vpmm_process_push_tag_on(TAGS[tag].as_ptr(), device) });
                self.tags.push(tag);
            }
            3 | 4 => {
                let popped = vpmm_process_pop_tag();
                match self.tags.pop() {
                    Some(_) => ok(popped),
                    None => assert_eq!(popped, VPMM_INVALID_ARGUMENT),
                }
            }
            5 => self.capture(),
            6 => self.sleep(),
            7 => {
                let most = if self.chance.once_in(2) { 0 } else { 1 + self.chance.below(40) };
                // SAFETY: no function.
                ok(unsafe { vpmm_process_record_history(most as usize, None, ptr::null_mut()) });
            }
            8 => {
                unsafe extern "C" fn take(context: *mut c_void, _: *const c_char, length: usize) {
                    // SAFETY: the number below.
                    unsafe { *context.cast::<usize>() += length };
                }
                let mut written = 0_usize;
                // SAFETY: a function that may be called with the number.
                ok(unsafe { vpmm_process_snapshot(Some(take), (&raw mut written).cast()) });
                assert!(written > 0);
            }
            9 => {
                let at = self.lane();
                // As `empty_cache` does, which the program sees to that no capture is there for.
                match self.shared.capturing.try_write() {
                    Ok(_nobody) => {
                        super::pool(DEVICE).ok().unwrap().device().synchronize().unwrap()
                    }
                    // SAFETY: a live stream.
                    Err(_) => ok(unsafe { vpmm_process_synchronize(DEVICE, self.lanes[at].raw) }),
                }
            }
            10 => {
                if let Some(block) = self.some_block() {
                    let at = self.lane();
                    let lane = &self.lanes[at];
                    if lane.is_kept {
                        // SAFETY: a live stream, which is kept.
                        ok(unsafe { vpmm_process_record_stream(block.pointer(), lane.raw) });
                    }
                    self.blocks.push(block);
                }
            }
            11 => {
                if let Some(block) = self.some_block() {
                    let (mut start, mut bytes) = (ptr::null_mut(), 0);
                    let inside = block.pointer().map_addr(|address| address + block.bytes / 2);
                    // SAFETY: a handle, room for both.
                    ok(unsafe {
                        vpmm_pool_allocation(self.pool(), inside, &raw mut start, &raw mut bytes)
                    });
                    assert_eq!(start.addr(), block.address);
                    assert!(bytes >= block.bytes as u64);
                    // SAFETY: room for nothing.
                    let start = unsafe { vpmm_torch_base_alloc(inside, ptr::null_mut()) };
                    assert_eq!(start.addr(), block.address);
                    self.shared.given.lock().unwrap().push(block);
                }
            }
            12 => {
                let mut returned = 0;
                // SAFETY: a handle, room for a number.
                ok(unsafe { vpmm_pool_trim_to(self.pool(), 0, &raw mut returned) });
            }
            13..18 => {
                if let Some(block) = self.some_block() {
                    let at = self.lane();
                    self.free(block, at);
                }
            }
            _ => {
                let at = self.lane();
                self.allocate(at, false);
            }
        }
    }

    fn end(mut self) {
        for _ in self.tags.drain(..) {
            ok(vpmm_process_pop_tag());
        }
        while !self.blocks.is_empty() {
            let block = self.blocks.swap_remove(0);
            self.free(block, 0);
        }
        while !self.lanes.is_empty() {
            self.end_lane(0);
        }
    }
}

fn enter_context() {
    let mut context = ptr::null_mut();
    raw!(cuDevicePrimaryCtxRetain(&raw mut context, DEVICE as i32));
    raw!(cuCtxSetCurrent(context));
}

fn program(seed: u64) {
    let mut pool = ptr::null_mut();
    // SAFETY: room for a pointer.
    ok(unsafe { vpmm_process_pool(DEVICE, &raw mut pool) });
    let shared = Shared { awake: std::array::from_fn(|_| true.into()), ..Shared::default() };
    let mut driver = ptr::null_mut();
    // SAFETY: room for a pointer.
    ok(unsafe { vpmm_process_driver(&raw mut driver) });
    let (at, by) = (pool.expose_provenance(), driver.expose_provenance());
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let shared = &shared;
            scope.spawn(move || {
                enter_context();
                let chance = Chance(seed * THREADS + thread);
                let (lanes, blocks, tags) = (Vec::new(), Vec::new(), Vec::new());
                let mut it = Thread { shared, pool: at, driver: by, chance, lanes, blocks, tags };
                it.new_lane();
                (0..STEPS).for_each(|_| it.step());
                it.end();
            });
        }
    });
    enter_context();
    for (tag, awake) in shared.awake.iter().enumerate() {
        if !*awake.read().unwrap() {
            let (name, mut bytes) = (TAGS[tag].as_ptr(), 0);
            // SAFETY: a handle, the legacy stream, room for a number.
            ok(unsafe { vpmm_resume(pool, name, ptr::null_mut(), 0, &raw mut bytes) });
        }
    }
    for block in shared.given.into_inner().unwrap() {
        // SAFETY: nobody uses it.
        ok(unsafe { vpmm_process_free(DEVICE, block.pointer(), ptr::null_mut()) });
    }
    let mut stats = std::mem::MaybeUninit::<vpmm_stats>::uninit();
    // SAFETY: room for so many bytes; set by the first, filled by the second.
    let stats = unsafe {
        vpmm_stats_init(stats.as_mut_ptr(), size_of::<vpmm_stats>());
        ok(vpmm_pool_stats(pool, stats.as_mut_ptr()));
        stats.assume_init()
    };
    assert_eq!((stats.live_count, stats.live_bytes), (0, 0));
    // SAFETY: a handle, which nobody else uses.
    ok(unsafe { vpmm_pool_validate(pool) });
    assert!(captures::is_idle_on(DEVICE));
    // SAFETY: handles, given back once.
    unsafe { (vpmm_pool_release(pool), vpmm_driver_release(driver)) };
}

#[test]
fn threads_with_all_that_plugs_in_do_as_the_model_says() {
    use_simulator();
    let _alone = alone();
    let first = number("VPMM_PROCESS_CROWD_FIRST", 1);
    for seed in first..first + number("VPMM_PROCESS_CROWD_CASES", 8) {
        println!("program {seed}");
        program(seed);
    }
    // SAFETY: no function.
    ok(unsafe { vpmm_process_record_history(0, None, ptr::null_mut()) });
}

//! Events that captures have taken: a capture began on the stream just before the record, in another thread, and
//! ended before or after the question whether the stream captures.

use std::ffi::c_void;
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::*;
use vpmm::CachingAllocator;
use vpmm::caching::CachingConfig;
use vpmm::resource::*;

use crate::subjects::{MIB, malloc};
use crate::support::changed::{changed, replaced};
use crate::support::{Rig, call};
use crate::watched::Watched;

/// What becomes of the next record.
static NEXT: AtomicU32 = AtomicU32::new(NOTHING);
const NOTHING: u32 = 0;
/// A capture takes it, and has ended.
const TAKEN: u32 = 1;
/// A capture takes it, and goes on.
const GOES_ON: u32 = 2;

mod record {
    use super::replaced;
    replaced!(
        cuEventRecord(event: CUevent, stream: CUstream),
        super::before(stream),
        super::after(stream)
    );
}

type Begin = unsafe extern "C" fn(CUstream, CUstreamCaptureMode) -> CUresult;
type End = unsafe extern "C" fn(CUstream, *mut CUgraph) -> CUresult;
/// Those of the simulator that there is: the next one has its own, and others may have these.
static CAPTURE: Mutex<Option<(Begin, End)>> = Mutex::new(None);

fn capture() -> (Begin, End) {
    CAPTURE.lock().expect("no panic").expect("set")
}

fn before(stream: CUstream) {
    if NEXT.load(Ordering::Relaxed) != NOTHING {
        let (begin, _) = capture();
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is alive, as it is about to be recorded on.
        let code = unsafe { begin(stream, mode) };
        assert_eq!(code, CUresult::CUDA_SUCCESS);
    }
}

fn after(stream: CUstream) {
    if NEXT.swap(NOTHING, Ordering::Relaxed) == TAKEN {
        end(stream);
    }
}

fn end(stream: CUstream) {
    let (_, end) = capture();
    let mut graph: CUgraph = ptr::null_mut::<c_void>().cast();
    // SAFETY: the stream is alive and captures; the pointer is live.
    let code = unsafe { end(stream, &mut graph) };
    assert_eq!(code, CUresult::CUDA_SUCCESS);
}

/// A pool of so many bytes at first, with pieces that do not touch.
fn rig() -> Rig {
    let sim = Simulator::builder().schedule(Schedule::Late { patience: 3 }).build();
    let sim = sim.expect("a simulator");
    let driver = changed(&sim, |api| {
        let (begin, end) = (api.cuStreamBeginCapture_v2, api.cuStreamEndCapture);
        *CAPTURE.lock().expect("no panic") = Some((begin.expect("there"), end.expect("there")));
        record::put(api);
    });
    Rig::with(driver, sim)
}

fn pool(rig: &Rig) -> CoalescingPool<DeviceMalloc> {
    let mut config = CoalescingConfig::default();
    (config.initial_bytes, config.max_bytes) = (40 * MIB, Some(56 * MIB));
    CoalescingPool::new(malloc(rig), &rig.device, &config).expect("a pool")
}

#[test]
fn another_record_is_made() {
    // The capture is over: the event that it has taken says so when it is asked about.
    let rig_of_first = rig();
    {
        let rig = &rig_of_first;
        let mut config = CoalescingConfig::default();
        (config.initial_bytes, config.max_bytes) = (16 * MIB, Some(16 * MIB));
        let pool = CoalescingPool::new(malloc(rig), &rig.device, &config).expect("a pool");
        let watched = Watched::new(rig, &pool);
        let (first, second) = (rig.stream(), rig.stream());
        let held = watched.allocate(16 << 20, &first);
        watched.check(&held, &first);
        watched.free(held, &first);
        NEXT.store(TAKEN, Ordering::Relaxed);
        let again = watched.allocate(16 << 20, &second);
        watched.free(again, &second);
        watched.assert_intact();
        // At a stream's end nobody can make another.
        let held = watched.allocate(16 << 20, &first);
        watched.free(held, &first);
        NEXT.store(TAKEN, Ordering::Relaxed);
        drop(first);
        let again = watched.allocate(16 << 20, &second);
        watched.free(again, &second);
        watched.assert_intact();
    }
    drop(rig_of_first);
    // So it is where another stream was to wait for it: with a second event, as the first is still asked about.
    let rig_of_second = rig();
    {
        let rig = &rig_of_second;
        let mut config = CoalescingConfig::default();
        (config.initial_bytes, config.max_bytes) = (16 * MIB, Some(16 * MIB));
        let pool = CoalescingPool::new(malloc(rig), &rig.device, &config).expect("a pool");
        let watched = Watched::new(rig, &pool);
        let (first, second) = (rig.stream(), rig.stream());
        let [one, two] = [(); 2].map(|()| watched.allocate(8 << 20, &first));
        let stall = rig.stall(first.handle());
        watched.free(one, &first);
        let one = watched.allocate(8 << 20, &second);
        watched.free(two, &first);
        NEXT.store(TAKEN, Ordering::Relaxed);
        // A third is recorded when nothing else is left.
        let two = watched.allocate(8 << 20, &second);
        drop(stall);
        watched.free(one, &second);
        watched.free(two, &second);
        watched.assert_intact();
    }
    drop(rig_of_second);
    // A caching allocator records another one, too, before it gives up.
    let rig_of_third = rig();
    {
        let rig = &rig_of_third;
        let limit = Limiting::new(malloc(rig), 12 * MIB);
        let config = CachingConfig::default();
        let allocator = CachingAllocator::over(limit, &rig.device, &config).expect("one");
        let watched = Watched::new(rig, &allocator);
        let (own, side) = (rig.stream(), rig.stream());
        let held = watched.allocate(12 << 20, &own);
        rig.order(&own, &side);
        watched.check(&held, &side);
        allocator.record_stream(held.ptr, &side).expect("noted");
        watched.free(held, &own);
        NEXT.store(TAKEN, Ordering::Relaxed);
        let again = watched.allocate(12 << 20, &own);
        assert_eq!(NEXT.load(Ordering::Relaxed), NOTHING);
        watched.free(again, &own);
        watched.assert_intact();
    }
    drop(rig_of_third);
    // The capture goes on: nobody waits for the event that it has taken, nor asks about it.
    let rig = rig();
    let pool = pool(&rig);
    let watched = Watched::new(&rig, &pool);
    let (first, second, third) = (rig.stream(), rig.stream(), rig.stream());
    let pieces = [8, 8, 8, 12].map(|mib| {
        let piece = watched.allocate(mib << 20, &first);
        (piece, watched.allocate(256, &third))
    });
    let [(one, _), (two, _), (three, _), (long, _)] = pieces;
    let stall = rig.stall(first.handle());
    watched.free(one, &first);
    let one = watched.allocate(8 << 20, &second);
    watched.free(two, &first);
    watched.free(three, &first);
    let two = watched.allocate(8 << 20, &second);
    watched.free(long, &first);
    NEXT.store(GOES_ON, Ordering::Relaxed);
    let elsewhere = watched.allocate(12 << 20, &second);
    assert_ne!(elsewhere.ptr.address(), long.ptr.address());
    let refused = watched.try_allocate(8 << 20, 256, &third);
    assert!(refused.is_err_and(|error| error.is_out_of_memory()), "nobody can record on the first");
    end(first.handle().raw());
    drop(stall);
    let three = watched.allocate(8 << 20, &third);
    let long = watched.allocate(12 << 20, &third);
    for (held, stream) in
        [(one, &second), (two, &second), (elsewhere, &second), (three, &third), (long, &third)]
    {
        watched.free(held, stream);
    }
    call!(rig.driver, cuCtxSynchronize());
    pieces.into_iter().for_each(|(_, between)| watched.free(between, &third));
    watched.assert_intact();
}

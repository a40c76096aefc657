//! How many instructions a hit takes: the program that `scripts/instructions.sh` runs under
//! callgrind, once for each case, to compare with `instructions.json`. Counts do not depend on the
//! machine's load as times do.
//!
//! ```text
//! instructions            prints the names of the cases with a baseline
//! instructions CASE       runs one and prints `calls=N driver_calls=N`
//! ```
//!
//! Callgrind is told to collect inside [`vpmm_counted`], and not inside [`vpmm_not_counted`],
//! through which the calls of the simulated driver go: what a driver call takes is not the pool's.

mod rig;

use std::ffi::{CStr, c_uint, c_ulonglong, c_void};
use std::hint::black_box;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use cuda_sys::types::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUmemAccessDesc, CUmemAllocationProp,
    CUmemGenericAllocationHandle, CUmemoryPool, CUresult, CUstream, CUstreamCaptureMode,
    CUstreamCaptureStatus,
};
use rig::{Churn, MIB, Machine, Profile, Ring, Subject, Vpmm, simulator};
use vpmm::{DevicePtr, Driver, Stream, StreamHandle};
use vpmm_cli::trace::{Action, Trace};

/// Steps of a case before counting, so that the pool is warm, and while counting. A step is two
/// calls: a malloc and a free.
/// So many that random sizes have all the memory that they come to need: growth is not what is counted.
const WARM_UP: usize = 20_000;
const COUNTED: usize = 5_000;

/// One case on a pool: calls [`measure`] with its step.
type Case = fn(Vpmm);

const CASES: [(&str, Case); 3] =
    [("pair_1MiB", pair), ("random_4MiB", random), ("cross_stream", cross_stream)];

/// To look at with callgrind. They have no baseline: how a pool grows depends on time as well.
const FURTHER: [(&str, Case); 5] = [
    ("random_64MiB", random_large),
    ("gpt_train", |subject| replay(subject, "gpt_train")),
    ("resnet_train", |subject| replay(subject, "resnet_train")),
    ("cupy_mix", |subject| replay(subject, "cupy_mix")),
    ("serve_streams", |subject| replay(subject, "serve_streams")),
];

fn main() -> ExitCode {
    let Some(name) = std::env::args().nth(1) else {
        CASES.iter().for_each(|(case, _)| println!("{case}"));
        return ExitCode::SUCCESS;
    };
    let Some((_, run)) = CASES.iter().chain(&FURTHER).find(|(case, _)| *case == name) else {
        eprintln!("there is no case {name}");
        return ExitCode::from(2);
    };
    let driver = Driver::new(driver_that_is_not_counted()).expect("the simulated driver starts");
    let machine = Machine::new("sim", driver);
    run(Vpmm::new(Profile::Default.pool(&machine.device), &machine));
    ExitCode::SUCCESS
}

fn pair(mut subject: Vpmm) {
    let driver = subject.pool.device().driver().clone();
    measure(&driver, || {
        let block = black_box(subject.malloc(MIB, 0));
        subject.free(block, 0);
    });
}

fn random(subject: Vpmm) {
    let driver = subject.pool.device().driver().clone();
    let mut churn = Churn::new(subject, 2_500, 1, 4 * MIB);
    measure(&driver, || churn.step());
}

fn random_large(subject: Vpmm) {
    let driver = subject.pool.device().driver().clone();
    let mut churn = Churn::new(subject, 100, 2 * MIB, 64 * MIB);
    measure(&driver, || churn.step());
}

fn cross_stream(subject: Vpmm) {
    let driver = subject.pool.device().driver().clone();
    let mut ring = Ring::new(subject);
    measure(&driver, || ring.step());
}

/// One of the repository's traces, on as many streams: a pass over a pool that has seen many.
fn replay(subject: Vpmm, name: &str) {
    const BEFORE: usize = 16;
    let device = subject.pool.device().clone();
    let path = format!("{}/traces/{name}.csv.gz", env!("CARGO_MANIFEST_DIR"));
    let trace = Trace::open(&path).expect("the repository's trace");
    let streams: Vec<Stream> =
        (0..trace.streams).map(|_| device.stream().expect("a stream")).collect();
    let mut player = Player {
        subject,
        streams: streams.iter().map(Stream::handle).collect(),
        live: vec![None; trace.allocations.len()],
    };
    let mut steps: Vec<Step> = trace
        .operations
        .iter()
        .map(|operation| Step {
            slot: operation.slot as usize,
            stream: operation.stream as usize,
            bytes: match operation.action {
                Action::Allocate => {
                    let bytes = trace.allocations[operation.slot as usize].bytes;
                    Some(usize::try_from(bytes).expect("sizes are usize"))
                }
                Action::Free => None,
            },
        })
        .collect();
    // What the trace leaves allocated.
    let mut left: Vec<Option<usize>> = vec![None; trace.allocations.len()];
    steps.iter().for_each(|step| left[step.slot] = step.bytes.map(|_| step.stream));
    let left = left.iter().enumerate().filter_map(|(slot, stream)| Some((slot, (*stream)?)));
    steps.extend(left.map(|(slot, stream)| Step { slot, stream, bytes: None }));
    (0..BEFORE).for_each(|_| player.pass(&steps));
    count(device.driver(), steps.len(), || player.pass(&steps));
}

/// One call of a trace: an allocation of so many bytes, or a free.
struct Step {
    slot: usize,
    stream: usize,
    bytes: Option<usize>,
}

struct Player {
    subject: Vpmm,
    streams: Vec<StreamHandle>,
    live: Vec<Option<DevicePtr>>,
}

impl Player {
    fn pass(&mut self, steps: &[Step]) {
        let pool = &self.subject.pool;
        for step in steps {
            let stream = self.streams[step.stream];
            match step.bytes {
                Some(bytes) => {
                    self.live[step.slot] = Some(pool.malloc(bytes, stream).expect("memory"));
                }
                None => {
                    let block = self.live[step.slot].take().expect("it is live");
                    pool.free(block, stream).expect("it is live");
                }
            }
        }
    }
}

fn measure(driver: &Driver, mut step: impl FnMut()) {
    (0..WARM_UP).for_each(|_| step());
    count(driver, 2 * COUNTED, || (0..COUNTED).for_each(|_| step()));
}

/// Runs what makes so many calls, and counts.
fn count(driver: &Driver, calls: usize, mut run: impl FnMut()) {
    let before = driver.calls();
    COUNTING.store(true, Ordering::Relaxed);
    vpmm_counted(&mut run);
    COUNTING.store(false, Ordering::Relaxed);
    let driver_calls = driver.calls().since(&before).total();
    println!("calls={calls} driver_calls={driver_calls}");
}

/// Whether callgrind is collecting: it turns over at each entry of the functions below, so that
/// [`vpmm_not_counted`] must be entered only from within [`vpmm_counted`].
static COUNTING: AtomicBool = AtomicBool::new(false);

// SAFETY: no other symbol of the program has this name.
#[unsafe(no_mangle)]
#[inline(never)]
fn vpmm_counted(run: &mut dyn FnMut()) {
    run();
    // Something after the call, so that it is a call and no jump.
    black_box(());
}

// SAFETY: no other symbol of the program has this name.
#[unsafe(no_mangle)]
#[inline(never)]
fn vpmm_not_counted(call: &mut dyn FnMut() -> CUresult) -> CUresult {
    black_box(call())
}

/// The simulator, behind the functions below.
static SIMULATOR: OnceLock<cuda_sys::Driver> = OnceLock::new();

/// A function of the driver's table that has the simulator do its work uncounted.
macro_rules! uncounted {
    ($( $name:ident($( $argument:ident: $type:ty ),*); )*) => {
        $(
            #[allow(non_snake_case, reason = "the driver's name")]
            unsafe extern "C" fn $name($( $argument: $type ),*) -> CUresult {
                let function = SIMULATOR.get().and_then(|driver| driver.$name);
                let Some(function) = function else { return CUresult::CUDA_ERROR_NOT_FOUND };
                // SAFETY: the same function with the same arguments, whose contract is the
                // caller's to keep.
                let mut call = || unsafe { function($( $argument ),*) };
                if COUNTING.load(Ordering::Relaxed) { vpmm_not_counted(&mut call) } else { call() }
            }
        )*

        /// One of the functions above, by name.
        fn uncounted(name: &CStr) -> Option<*const c_void> {
            match name.to_str().ok()? {
                $( stringify!($name) => {
                    let function: unsafe extern "C" fn($( $type ),*) -> CUresult = $name;
                    Some(function as *const c_void)
                } )*
                _ => None,
            }
        }
    };
}

// Whatever a pool may call on a hit, and as it grows. A call that is not here would be counted, and seen.
uncounted! {
    cuCtxGetCurrent(context: *mut CUcontext);
    cuCtxPushCurrent_v2(context: CUcontext);
    cuCtxPopCurrent_v2(context: *mut CUcontext);
    cuCtxGetDevice(device: *mut CUdevice);
    cuCtxGetId(context: CUcontext, id: *mut u64);
    cuStreamGetId(stream: CUstream, id: *mut u64);
    cuStreamGetCtx(stream: CUstream, context: *mut CUcontext);
    cuStreamIsCapturing(stream: CUstream, status: *mut CUstreamCaptureStatus);
    cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
    cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode);
    cuEventCreate(event: *mut CUevent, flags: c_uint);
    cuEventRecord(event: CUevent, stream: CUstream);
    cuEventQuery(event: CUevent);
    cuMemAllocFromPoolAsync(
        address: *mut CUdeviceptr,
        bytes: usize,
        pool: CUmemoryPool,
        stream: CUstream
    );
    cuMemFreeAsync(address: CUdeviceptr, stream: CUstream);
    cuMemCreate(
        handle: *mut CUmemGenericAllocationHandle,
        bytes: usize,
        properties: *const CUmemAllocationProp,
        flags: c_ulonglong
    );
    cuMemRelease(handle: CUmemGenericAllocationHandle);
    cuMemMap(
        address: CUdeviceptr,
        bytes: usize,
        offset: usize,
        handle: CUmemGenericAllocationHandle,
        flags: c_ulonglong
    );
    cuMemSetAccess(
        address: CUdeviceptr,
        bytes: usize,
        access: *const CUmemAccessDesc,
        count: usize
    );
    cuMemUnmap(address: CUdeviceptr, bytes: usize);
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
}

fn driver_that_is_not_counted() -> cuda_sys::Driver {
    let simulator = SIMULATOR.get_or_init(|| simulator().driver());
    // SAFETY: (1) each function has the signature of its name: the macro's were compared with the
    // table's by the call, the simulator's come from its own table; (2) the simulator lives in a
    // static.
    unsafe {
        cuda_sys::Driver::from_symbols(
            "simulator, uncounted",
            |name| uncounted(name).unwrap_or_else(|| simulator.symbol(name)),
            Arc::new(()),
        )
    }
}

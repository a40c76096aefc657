//! Threads stopped inside a driver call, so that what others do meanwhile is no accident.

use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::*;
use vpmm::{Driver, Pool, Stream, StreamHandle};

use crate::rig::{GRANULE, call, config};

/// A gate in a driver function: the next call that comes to it is held until it is opened.
pub(crate) struct Gate {
    pub(crate) real: AtomicPtr<()>,
    state: AtomicU32,
}

const OPEN: u32 = 0;
const ARMED: u32 = 1;
const HOLDS: u32 = 2;

impl Gate {
    pub(crate) const fn new() -> Self {
        Self { real: AtomicPtr::new(std::ptr::null_mut()), state: AtomicU32::new(OPEN) }
    }

    pub(crate) fn arm(&self) {
        self.state.store(ARMED, Ordering::SeqCst);
    }

    /// Holds the caller if it is the first since the gate was armed.
    pub(crate) fn pass(&self) {
        let first =
            self.state.compare_exchange(ARMED, HOLDS, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        while first && self.state.load(Ordering::SeqCst) == HOLDS {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until somebody is held.
    pub(crate) fn wait(&self) {
        let start = Instant::now();
        while self.state.load(Ordering::SeqCst) != HOLDS {
            assert!(start.elapsed() < Duration::from_secs(5), "nobody came to the gate");
            std::thread::yield_now();
        }
    }

    pub(crate) fn open(&self) {
        self.state.store(OPEN, Ordering::SeqCst);
    }
}

/// The simulator's driver with some of its functions replaced.
pub(crate) fn changed(sim: &Simulator, change: impl FnOnce(&mut cuda_sys::DriverApi)) -> Driver {
    let inner = sim.driver();
    let mut api = *inner;
    change(&mut api);
    // SAFETY: the functions are the simulator's, which is kept alive, and replacements of the same
    // signatures.
    let driver = unsafe {
        cuda_sys::Driver::from_symbols(
            "changed",
            |name| api.symbol(name),
            std::sync::Arc::new(inner),
        )
    };
    Driver::new(driver).unwrap()
}

const BYTES: usize = GRANULE as usize;

/// A stream by its handle alone: what is freed with it goes past the front.
pub(crate) fn bare(stream: &Stream) -> StreamHandle {
    // SAFETY: the stream is alive while it is borrowed, which is longer than any call with this.
    unsafe { StreamHandle::from_raw(stream.handle().raw()) }
}

static RECORD: Gate = Gate::new();

unsafe extern "C" fn held_before_recording(
    stream: CUstream,
    status: *mut CUstreamCaptureStatus,
) -> CUresult {
    type Real = unsafe extern "C" fn(CUstream, *mut CUstreamCaptureStatus) -> CUresult;
    RECORD.pass();
    // SAFETY: stored before any call, from a slot of this type.
    let real = unsafe { std::mem::transmute::<*mut (), Real>(RECORD.real.load(Ordering::SeqCst)) };
    // SAFETY: the arguments are passed on as they came.
    unsafe { real(stream, status) }
}

/// One thread is about to record on a stream that another destroys: the record comes first, or
/// not at all, and never goes to a handle that is dead.
#[test]
fn a_stream_that_ends_while_its_event_is_recorded() {
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let driver = changed(&sim, |api| {
        let real = api.cuStreamIsCapturing.map_or(std::ptr::null_mut(), |real| real as *mut ());
        RECORD.real.store(real, Ordering::SeqCst);
        api.cuStreamIsCapturing = Some(held_before_recording);
    });
    let device = driver.device(0).unwrap();
    let pool = Pool::new(&device, &config(11, 96)).unwrap();
    let (ending, other) = (device.stream().unwrap(), device.stream().unwrap());
    let of_other = pool.malloc(BYTES, &other).unwrap();
    let ptr = pool.malloc(9 * BYTES, &ending).unwrap();
    // By the bare handle, it goes past the front.
    pool.free(ptr, bare(&ending)).unwrap();
    RECORD.arm();
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| pool.malloc(8 * BYTES, &other).unwrap());
        RECORD.wait();
        let ender = scope.spawn(move || drop(ending));
        // Long enough for a thread that does not wait for the record; one that does is not held
        // up by this.
        let start = Instant::now();
        while !ender.is_finished() && start.elapsed() < Duration::from_millis(200) {
            std::thread::yield_now();
        }
        RECORD.open();
        ender.join().unwrap();
        let taken = asking.join().unwrap();
        pool.validate().unwrap();
        for ptr in [taken, of_other] {
            pool.free(ptr, &other).unwrap();
        }
    });
    pool.validate().unwrap();
    drop((pool, other, device));
    sim.assert_clean();
    assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
}

static QUERY: Gate = Gate::new();

unsafe extern "C" fn held_after_asking(event: CUevent) -> CUresult {
    type Real = unsafe extern "C" fn(CUevent) -> CUresult;
    // SAFETY: stored before any call, from a slot of this type.
    let real = unsafe { std::mem::transmute::<*mut (), Real>(QUERY.real.load(Ordering::SeqCst)) };
    // SAFETY: the argument is passed on as it came.
    let answer = unsafe { real(event) };
    QUERY.pass();
    answer
}

/// A thread is told that an event is complete and stops. Meanwhile the event is recorded again, at
/// the end of its stream, for memory that is in use: the answer is not about that.
#[test]
fn an_answer_about_an_event_that_was_recorded_again_meanwhile() {
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let driver = changed(&sim, |api| {
        let real = api.cuEventQuery.map_or(std::ptr::null_mut(), |real| real as *mut ());
        QUERY.real.store(real, Ordering::SeqCst);
        api.cuEventQuery = Some(held_after_asking);
    });
    let device = driver.device(0).unwrap();
    let pool = Pool::new(&device, &config(17, 128)).unwrap();
    let [freeing, asking] = [(); 2].map(|()| device.stream().unwrap());
    let malloc = |granules: usize, stream: &Stream| pool.malloc(granules * BYTES, stream).unwrap();
    let (first, second) = (malloc(9, &freeing), malloc(5, &freeing));
    // Others want memory, so that the epoch is closed as soon as it is worth it.
    let _of_asking = malloc(2, &asking);
    pool.free(first, bare(&freeing)).unwrap();
    sim.run_until_idle();
    QUERY.arm();
    std::thread::scope(|scope| {
        let asker = scope.spawn(|| malloc(4, &asking));
        QUERY.wait();
        call!(driver, cuCtxSetCurrent(device.context()));
        sim.enqueue(freeing.handle().raw(), "uses the second", move |memory| {
            memory.write(second.address(), &[1; 64])
        })
        .unwrap();
        pool.free(second, bare(&freeing)).unwrap();
        drop(freeing);
        QUERY.open();
        let mut given = vec![asker.join().unwrap(), malloc(5, &asking), malloc(4, &asking)];
        pool.validate().unwrap();
        for ptr in given.drain(..) {
            sim.enqueue(asking.handle().raw(), "uses what it was given", move |memory| {
                memory.write(ptr.address(), &[2; 64])
            })
            .unwrap();
        }
    });
    device.synchronize().unwrap();
    drop(pool);
    sim.assert_clean();
}

static EAGER: Gate = Gate::new();

unsafe extern "C" fn held_while_recording(event: CUevent, stream: CUstream) -> CUresult {
    type Real = unsafe extern "C" fn(CUevent, CUstream) -> CUresult;
    EAGER.pass();
    // SAFETY: stored before any call, from a slot of this type.
    let real = unsafe { std::mem::transmute::<*mut (), Real>(EAGER.real.load(Ordering::SeqCst)) };
    // SAFETY: the arguments are passed on as they came.
    unsafe { real(event, stream) }
}

/// A foreign stream's epoch is closed with the event of its last free while the next free records.
#[test]
fn an_epoch_is_closed_while_a_foreign_stream_frees() {
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let driver = changed(&sim, |api| {
        let real = api.cuEventRecord.map_or(std::ptr::null_mut(), |real| real as *mut ());
        EAGER.real.store(real, Ordering::SeqCst);
        api.cuEventRecord = Some(held_while_recording);
    });
    let device = driver.device(0).unwrap();
    let pool = Pool::new(&device, &config(5, 64)).unwrap();
    let other = device.stream().unwrap();
    call!(driver, cuCtxSetCurrent(device.context()));
    let mut raw = std::ptr::null_mut();
    call!(driver, cuStreamCreate(&mut raw, 1));
    // SAFETY: the stream is destroyed at the end of the test.
    let foreign = unsafe { StreamHandle::from_raw(raw) };
    let held = [(); 2].map(|()| pool.malloc(2 * BYTES, foreign).unwrap());
    pool.free(held[0], foreign).unwrap();
    EAGER.arm();
    std::thread::scope(|scope| {
        let freeing = scope.spawn(|| pool.free(held[1], foreign));
        EAGER.wait();
        let ptr = pool.malloc(2 * BYTES, &other).unwrap();
        EAGER.open();
        freeing.join().unwrap().unwrap();
        pool.validate().unwrap();
        pool.free(ptr, &other).unwrap();
    });
    let again = pool.malloc(4 * BYTES, &other).unwrap();
    pool.validate().unwrap();
    pool.free(again, &other).unwrap();
    drop(pool);
    call!(driver, cuStreamDestroy_v2(raw));
    drop((other, device));
    sim.assert_clean();
    assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
}

static CLOSE: Gate = Gate::new();

unsafe extern "C" fn held_while_closing(event: CUevent, stream: CUstream) -> CUresult {
    type Real = unsafe extern "C" fn(CUevent, CUstream) -> CUresult;
    CLOSE.pass();
    // SAFETY: stored before any call, from a slot of this type.
    let real = unsafe { std::mem::transmute::<*mut (), Real>(CLOSE.real.load(Ordering::SeqCst)) };
    // SAFETY: the arguments are passed on as they came.
    unsafe { real(event, stream) }
}

/// A thread closes its own stream's epoch while another has nothing left to look for but that:
/// memory is not refused that there is an event for in a moment.
#[test]
fn an_epoch_that_is_being_closed_is_waited_for() {
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let driver = changed(&sim, |api| {
        let real = api.cuEventRecord.map_or(std::ptr::null_mut(), |real| real as *mut ());
        CLOSE.real.store(real, Ordering::SeqCst);
        api.cuEventRecord = Some(held_while_closing);
    });
    let device = driver.device(0).unwrap();
    let pool = Pool::new(&device, &config(16, 128)).unwrap();
    let [freeing, asking] = [(); 2].map(|()| device.stream().unwrap());
    let large = pool.malloc(9 * BYTES, &freeing).unwrap();
    // Lacks memory, so that others close their epochs when they free much.
    let held = pool.malloc(5 * BYTES, &asking).unwrap();
    CLOSE.arm();
    std::thread::scope(|scope| {
        let closer = scope.spawn(|| pool.free(large, bare(&freeing)));
        CLOSE.wait();
        let asker = scope.spawn(|| pool.malloc(8 * BYTES, &asking));
        // Long enough for a request that is refused at once; one that waits is not held up by this.
        let start = Instant::now();
        while !asker.is_finished() && start.elapsed() < Duration::from_millis(100) {
            std::thread::yield_now();
        }
        CLOSE.open();
        closer.join().unwrap().unwrap();
        let taken = asker.join().unwrap().unwrap();
        [held, taken].into_iter().for_each(|ptr| pool.free(ptr, &asking).unwrap());
    });
    pool.validate().unwrap();
    drop((pool, freeing, asking, device));
    sim.assert_clean();
    assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
}

static CREATE: Gate = Gate::new();

unsafe extern "C" fn held_before_making(
    handle: *mut u64,
    bytes: usize,
    properties: *const CUmemAllocationProp,
    flags: u64,
) -> CUresult {
    type Real = unsafe extern "C" fn(*mut u64, usize, *const CUmemAllocationProp, u64) -> CUresult;
    CREATE.pass();
    // SAFETY: stored before any call, from a slot of this type.
    let real = unsafe { std::mem::transmute::<*mut (), Real>(CREATE.real.load(Ordering::SeqCst)) };
    // SAFETY: the arguments are passed on as they came.
    unsafe { real(handle, bytes, properties, flags) }
}

#[test]
fn a_slow_driver_call_does_not_stop_other_threads() {
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let driver = changed(&sim, |api| {
        let real = api.cuMemCreate.map_or(std::ptr::null_mut(), |real| real as *mut ());
        CREATE.real.store(real, Ordering::SeqCst);
        api.cuMemCreate = Some(held_before_making);
    });
    let device = driver.device(0).unwrap();
    let pool = Pool::new(&device, &config(64, 256)).unwrap();
    let (a, b) = (device.stream().unwrap(), device.stream().unwrap());
    let warm = pool.malloc(4 * BYTES, &b).unwrap();
    pool.free(warm, &b).unwrap();
    CREATE.arm();
    std::thread::scope(|scope| {
        let growing = scope.spawn(|| pool.malloc(32 * BYTES, &a).unwrap());
        CREATE.wait();
        // The other thread is inside the driver now, and stays there until these are done.
        for step in 0..100 {
            let held = [BYTES, 100_000 + 4096 * step, 3 * BYTES / 2]
                .map(|bytes| pool.malloc(bytes, &b).unwrap());
            held.into_iter().for_each(|ptr| pool.free(ptr, &b).unwrap());
        }
        assert!(!growing.is_finished());
        CREATE.open();
        let ptr = growing.join().unwrap();
        pool.free(ptr, &a).unwrap();
    });
    pool.validate().unwrap();
    drop(pool);
    sim.assert_clean();
}

//! Threads stopped inside a driver call, so that what others do meanwhile is no accident.

use std::time::{Duration, Instant};

use cuda_sim::{Schedule, Simulator};
use vpmm::{Pool, Stream, StreamHandle};

use crate::rig::{GRANULE, bare, config};
use crate::support::call;
use crate::support::changed::{changed, gated};

const BYTES: usize = GRANULE as usize;

gated!(capture_question: cuStreamIsCapturing(stream: CUstream, status: *mut CUstreamCaptureStatus));

/// One thread is about to record on a stream that another destroys: the record comes first, or
/// not at all, and never goes to a handle that is dead.
#[test]
fn a_stream_that_ends_while_its_event_is_recorded() {
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let driver = changed(&sim, capture_question::put);
    let device = driver.device(0).unwrap();
    let pool = Pool::new(&device, &config(11, 96)).unwrap();
    let (ending, other) = (device.stream().unwrap(), device.stream().unwrap());
    let of_other = pool.malloc(BYTES, &other).unwrap();
    let ptr = pool.malloc(9 * BYTES, &ending).unwrap();
    // By the bare handle, it goes past the front.
    pool.free(ptr, bare(&ending)).unwrap();
    capture_question::BEFORE.arm();
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| pool.malloc(8 * BYTES, &other).unwrap());
        capture_question::BEFORE.wait();
        let ender = scope.spawn(move || drop(ending));
        // Long enough for a thread that does not wait for the record; one that does is not held
        // up by this.
        let start = Instant::now();
        while !ender.is_finished() && start.elapsed() < Duration::from_millis(200) {
            std::thread::yield_now();
        }
        capture_question::BEFORE.open();
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

gated!(query: cuEventQuery(event: CUevent));

/// A thread is told that an event is complete and stops. Meanwhile the event is recorded again, at
/// the end of its stream, for memory that is in use: the answer is not about that.
#[test]
fn an_answer_about_an_event_that_was_recorded_again_meanwhile() {
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let driver = changed(&sim, query::put);
    let device = driver.device(0).unwrap();
    let pool = Pool::new(&device, &config(17, 128)).unwrap();
    let [freeing, asking] = [(); 2].map(|()| device.stream().unwrap());
    let malloc = |granules: usize, stream: &Stream| pool.malloc(granules * BYTES, stream).unwrap();
    let (first, second) = (malloc(9, &freeing), malloc(5, &freeing));
    // Others want memory, so that the epoch is closed as soon as it is worth it.
    let _of_asking = malloc(2, &asking);
    pool.free(first, bare(&freeing)).unwrap();
    sim.run_until_idle();
    query::AFTER.arm();
    std::thread::scope(|scope| {
        let asker = scope.spawn(|| malloc(4, &asking));
        query::AFTER.wait();
        call!(driver, cuCtxSetCurrent(device.context()));
        sim.enqueue(freeing.handle().raw(), "uses the second", move |memory| {
            memory.write(second.address(), &[1; 64])
        })
        .unwrap();
        pool.free(second, bare(&freeing)).unwrap();
        drop(freeing);
        query::AFTER.open();
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

gated!(eager_record: cuEventRecord(event: CUevent, stream: CUstream));

/// A foreign stream's epoch is closed with the event of its last free while the next free records.
#[test]
fn an_epoch_is_closed_while_a_foreign_stream_frees() {
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let driver = changed(&sim, eager_record::put);
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
    eager_record::BEFORE.arm();
    std::thread::scope(|scope| {
        let freeing = scope.spawn(|| pool.free(held[1], foreign));
        eager_record::BEFORE.wait();
        let ptr = pool.malloc(2 * BYTES, &other).unwrap();
        eager_record::BEFORE.open();
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

gated!(closing_record: cuEventRecord(event: CUevent, stream: CUstream));

/// A thread closes its own stream's epoch while another has nothing left to look for but that:
/// memory is not refused that there is an event for in a moment.
#[test]
fn an_epoch_that_is_being_closed_is_waited_for() {
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let driver = changed(&sim, closing_record::put);
    let device = driver.device(0).unwrap();
    let pool = Pool::new(&device, &config(16, 128)).unwrap();
    let [freeing, asking] = [(); 2].map(|()| device.stream().unwrap());
    let large = pool.malloc(9 * BYTES, &freeing).unwrap();
    // Lacks memory, so that others close their epochs when they free much.
    let held = pool.malloc(5 * BYTES, &asking).unwrap();
    closing_record::BEFORE.arm();
    std::thread::scope(|scope| {
        let closer = scope.spawn(|| pool.free(large, bare(&freeing)));
        closing_record::BEFORE.wait();
        let asker = scope.spawn(|| pool.malloc(8 * BYTES, &asking));
        // Long enough for a request that is refused at once; one that waits is not held up by this.
        let start = Instant::now();
        while !asker.is_finished() && start.elapsed() < Duration::from_millis(100) {
            std::thread::yield_now();
        }
        closing_record::BEFORE.open();
        closer.join().unwrap().unwrap();
        let taken = asker.join().unwrap().unwrap();
        [held, taken].into_iter().for_each(|ptr| pool.free(ptr, &asking).unwrap());
    });
    pool.validate().unwrap();
    drop((pool, freeing, asking, device));
    sim.assert_clean();
    assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
}

gated!(create: cuMemCreate(
    handle: *mut u64,
    bytes: usize,
    properties: *const CUmemAllocationProp,
    flags: u64,
));

#[test]
fn a_slow_driver_call_does_not_stop_other_threads() {
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let driver = changed(&sim, create::put);
    let device = driver.device(0).unwrap();
    let pool = Pool::new(&device, &config(64, 256)).unwrap();
    let (a, b) = (device.stream().unwrap(), device.stream().unwrap());
    let warm = pool.malloc(4 * BYTES, &b).unwrap();
    pool.free(warm, &b).unwrap();
    create::BEFORE.arm();
    std::thread::scope(|scope| {
        let growing = scope.spawn(|| pool.malloc(32 * BYTES, &a).unwrap());
        create::BEFORE.wait();
        // The other thread is inside the driver now, and stays there until these are done.
        for step in 0..100 {
            let held = [BYTES, 100_000 + 4096 * step, 3 * BYTES / 2]
                .map(|bytes| pool.malloc(bytes, &b).unwrap());
            held.into_iter().for_each(|ptr| pool.free(ptr, &b).unwrap());
        }
        assert!(!growing.is_finished());
        create::BEFORE.open();
        let ptr = growing.join().unwrap();
        pool.free(ptr, &a).unwrap();
    });
    pool.validate().unwrap();
    drop(pool);
    sim.assert_clean();
}

//! Threads stopped inside a driver call, so that what others do meanwhile is no accident.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use cuda_sim::{Schedule, Simulator};
use vpmm::snapshot::BlockState;
use vpmm::{Error, Pool, Stream, StreamHandle, WaitPolicy};

use crate::rig::{GRANULE, bare, config};
use crate::support::changed::{changed, gated};
use crate::support::streams::{begin_capture, begin_quiet_capture, end_capture, make};
use crate::support::{Rig, call};

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

gated!(creation: cuMemCreate(
    handle: *mut CUmemGenericAllocationHandle,
    bytes: usize,
    properties: *const CUmemAllocationProp,
    flags: u64,
));

/// A request that grows has taken free memory: what lies behind that in the same granule is in a snapshot all
/// the same.
#[test]
fn a_snapshot_has_what_lies_behind_memory_on_its_way() {
    let sim = Simulator::builder().build().unwrap();
    let driver = changed(&sim, creation::put);
    let device = driver.device(0).unwrap();
    let pool = Pool::new(&device, &config(11, 96)).unwrap();
    let stream = device.stream().unwrap();
    // A granule that goes back, and one of which a half stays.
    let [whole, free, stays] =
        [BYTES, BYTES / 2, BYTES / 2].map(|bytes| pool.malloc(bytes, &stream).unwrap());
    for ptr in [whole, free] {
        // By the bare handle, it goes past the front.
        pool.free(ptr, bare(&stream)).unwrap();
    }
    pool.trim_to(0).unwrap();
    assert_eq!(pool.stats().mapped_bytes, GRANULE);
    creation::BEFORE.arm();
    std::thread::scope(|scope| {
        let growing = scope.spawn(|| pool.malloc(BYTES + BYTES / 4, &stream).unwrap());
        creation::BEFORE.wait();
        let segments = pool.snapshot();
        creation::BEFORE.open();
        let blocks = segments.iter().flat_map(|segment| &segment.blocks);
        let seen: Vec<_> = blocks.map(|block| (block.address, block.state)).collect();
        assert_eq!(seen, [(stays.address(), BlockState::Live)]);
        let taken = growing.join().unwrap();
        assert_eq!(taken.address() + BYTES as u64 + GRANULE / 4, stays.address());
        for ptr in [taken, stays] {
            pool.free(ptr, &stream).unwrap();
        }
    });
    pool.validate().unwrap();
}

/// Questions of a thread that comes behind a stream's end are held until the stream is gone.
mod question_behind_the_end {
    use std::cell::Cell;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::{Duration, Instant};

    use crate::support::changed::{Gate, replaced};

    pub(super) static BEFORE: Gate = Gate::new();
    pub(super) static GONE: AtomicBool = AtomicBool::new(false);

    thread_local! {
        pub(super) static IS_BEHIND: Cell<bool> = const { Cell::new(false) };
    }

    fn hold() {
        if !IS_BEHIND.get() {
            return BEFORE.pass();
        }
        // Where it has come before the end after all, that waits for this.
        let start = Instant::now();
        while !GONE.load(Ordering::SeqCst) && start.elapsed() < Duration::from_millis(200) {
            std::thread::yield_now();
        }
    }

    replaced!(
        cuStreamIsCapturing(stream: CUstream, status: *mut CUstreamCaptureStatus),
        hold(),
        hold()
    );
}

/// One thread has closed a stream's epoch and is not yet at the lock under which it is to record; the stream's
/// end, which waits for that lock too, comes before it: nothing is recorded behind the last event.
#[test]
fn a_stream_that_ends_before_its_closed_epoch_is_recorded() {
    use question_behind_the_end::{BEFORE, GONE, IS_BEHIND};
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let driver = changed(&sim, question_behind_the_end::put);
    let device = driver.device(0).unwrap();
    let pool = Pool::new(&device, &config(14, 96)).unwrap();
    let [ending, own, other] = [(); 3].map(|()| device.stream().unwrap());
    let of_other = pool.malloc(BYTES, &other).unwrap();
    let used = pool.malloc(3 * BYTES, &own).unwrap();
    let ptr = pool.malloc(9 * BYTES, &ending).unwrap();
    pool.record_stream(used, &ending).unwrap();
    pool.free(ptr, bare(&ending)).unwrap();
    BEFORE.arm();
    std::thread::scope(|scope| {
        // Has the lock, to record behind the use.
        let freer = scope.spawn(|| pool.free(used, &own));
        BEFORE.wait();
        let (ender, asleep) = started(scope, || drop(ending));
        asleep();
        let (asker, asleep) = started(scope, || {
            IS_BEHIND.set(true);
            pool.malloc(8 * BYTES, &other)
        });
        asleep();
        BEFORE.open();
        ender.join().unwrap();
        GONE.store(true, Ordering::SeqCst);
        freer.join().unwrap().unwrap();
        let taken = asker.join().unwrap().unwrap();
        pool.validate().unwrap();
        [of_other, taken].into_iter().for_each(|ptr| pool.free(ptr, &other).unwrap());
    });
    pool.validate().unwrap();
    drop((pool, own, other, device));
    sim.assert_clean();
    assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
}

/// A thread, and what waits until it sleeps: in turn for a lock.
fn started<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> T + Send + 'scope,
) -> (ScopedJoinHandle<'scope, T>, impl FnOnce()) {
    let (told, hear) = mpsc::channel();
    let thread = scope.spawn(move || {
        // A thread of its own number in each process: "1234/task/1240".
        told.send(std::fs::read_link("/proc/thread-self").unwrap()).unwrap();
        work()
    });
    let asleep = move || {
        let path = Path::new("/proc").join(hear.recv().unwrap()).join("stat");
        let start = Instant::now();
        let mut looks = 0;
        while looks < 20 {
            assert!(start.elapsed() < Duration::from_secs(30), "it does not come to wait");
            // Its name has no parenthesis, behind which the state is.
            let stat = std::fs::read_to_string(&path).unwrap();
            looks = if stat.contains(") S ") { looks + 1 } else { 0 };
            std::thread::sleep(Duration::from_micros(100));
        }
    };
    (thread, asleep)
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

gated!(pinned_record: cuEventRecord(event: CUevent, stream: CUstream));

/// A thread is about to free something on a foreign stream that nothing else is known of: meanwhile its place is not
/// another stream's, which would have the memory at once.
#[test]
fn a_place_is_not_given_away_during_a_call() {
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let driver = changed(&sim, pinned_record::put);
    let device = driver.device(0).unwrap();
    let pool = Pool::new(&device, &config(8, 64)).unwrap();
    call!(driver, cuCtxSetCurrent(device.context()));
    let raws = [(); 2].map(|()| {
        let mut raw = std::ptr::null_mut();
        call!(driver, cuStreamCreate(&mut raw, 1));
        raw
    });
    // SAFETY: the streams are destroyed at the end of the test.
    let [freeing, next] = raws.map(|raw| unsafe { StreamHandle::from_raw(raw) });
    let held = pool.malloc(2 * BYTES, freeing).unwrap();
    sim.enqueue(freeing.raw(), "uses what is freed", move |memory| {
        memory.write(held.address(), &[1; 64])
    })
    .unwrap();
    pinned_record::BEFORE.arm();
    std::thread::scope(|scope| {
        let freer = scope.spawn(|| pool.free(held, freeing));
        pinned_record::BEFORE.wait();
        // It comes to be known meanwhile.
        let other = pool.malloc(BYTES, next).unwrap();
        pinned_record::BEFORE.open();
        freer.join().unwrap().unwrap();
        pool.validate().unwrap();
        let taken = pool.malloc(2 * BYTES, next).unwrap();
        assert_ne!(taken, held, "the other stream has yet to use it");
        [other, taken].into_iter().for_each(|ptr| pool.free(ptr, next).unwrap());
    });
    pool.validate().unwrap();
    drop(pool);
    raws.into_iter().for_each(|raw| call!(driver, cuStreamDestroy_v2(raw)));
    drop(device);
    sim.assert_clean();
    assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
}

gated!(context_question: cuCtxGetId(context: CUcontext, id: *mut u64));

/// A stream that was used by its bare handle only is lent and ends: meanwhile its place is not another stream's, which
/// would have ended with it.
#[test]
fn a_place_is_not_given_away_while_its_stream_ends() {
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let driver = changed(&sim, context_question::put);
    let device = driver.device(0).unwrap();
    let mut config = config(8, 64);
    config.reuse.internal_dependencies = false;
    config.out_of_memory = WaitPolicy::FailAtOnce;
    let pool = Pool::new(&device, &config).unwrap();
    call!(driver, cuCtxSetCurrent(device.context()));
    let raws = [(); 2].map(|()| {
        let mut raw = std::ptr::null_mut();
        call!(driver, cuStreamCreate(&mut raw, 1));
        raw
    });
    // SAFETY: the streams are destroyed at the end of the test.
    let [ending, next] = raws.map(|raw| unsafe { StreamHandle::from_raw(raw) });
    pool.free(pool.malloc(BYTES, ending).unwrap(), ending).unwrap();
    sim.run_until_idle();
    pool.trim_to(0).unwrap();
    // SAFETY: as above.
    let lent = unsafe { Stream::borrowed(&device, ending) }.unwrap();
    context_question::BEFORE.arm();
    let held = std::thread::scope(|scope| {
        let ender = scope.spawn(move || drop(lent));
        context_question::BEFORE.wait();
        let held = pool.malloc(5 * BYTES, next).unwrap();
        context_question::BEFORE.open();
        ender.join().unwrap();
        held
    });
    sim.run_until_idle();
    sim.enqueue(next.raw(), "uses what is freed", move |memory| {
        memory.write(held.address(), &[1; 64])
    })
    .unwrap();
    pool.free(held, next).unwrap();
    pool.validate().unwrap();
    let other = device.stream().unwrap();
    let error = pool.malloc(5 * BYTES, &other).unwrap_err();
    assert!(error.is_out_of_memory(), "the stream that freed it has yet to use it: {error}");
    pool.trim_to(0).unwrap();
    sim.run_until_idle();
    pool.free(pool.malloc(5 * BYTES, &other).unwrap(), &other).unwrap();
    pool.validate().unwrap();
    drop(pool);
    raws.into_iter().for_each(|raw| call!(driver, cuStreamDestroy_v2(raw)));
    drop((other, device));
    sim.assert_clean();
    assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
}

gated!(free_record: cuEventRecord(event: CUevent, stream: CUstream));

/// Two threads free on one foreign stream: the event that counts for both is the one that was recorded last, whichever
/// thread comes back first.
#[test]
fn frees_on_a_foreign_stream_are_entered_as_they_are_recorded() {
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let driver = changed(&sim, free_record::put);
    let device = driver.device(0).unwrap();
    let pool = Pool::new(&device, &config(8, 64)).unwrap();
    let other = device.stream().unwrap();
    call!(driver, cuCtxSetCurrent(device.context()));
    let mut raw = std::ptr::null_mut();
    call!(driver, cuStreamCreate(&mut raw, 1));
    // SAFETY: the stream is destroyed at the end of the test.
    let foreign = unsafe { StreamHandle::from_raw(raw) };
    let held = [(); 2].map(|()| pool.malloc(2 * BYTES, foreign).unwrap());
    free_record::AFTER.arm();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| pool.free(held[0], foreign));
        free_record::AFTER.wait();
        sim.enqueue(raw, "uses the second", move |memory| {
            memory.write(held[1].address(), &[1; 64])
        })
        .unwrap();
        let second = scope.spawn(|| pool.free(held[1], foreign));
        // Long enough for a free that does not wait for the other.
        let start = Instant::now();
        while !second.is_finished() && start.elapsed() < Duration::from_millis(200) {
            std::thread::yield_now();
        }
        free_record::AFTER.open();
        [first, second].into_iter().for_each(|freed| freed.join().unwrap().unwrap());
    });
    // The first event, and no more.
    assert!(sim.advance(raw));
    let ptr = pool.malloc(4 * BYTES, &other).unwrap();
    pool.validate().unwrap();
    sim.enqueue(other.handle().raw(), "uses what it was given", move |memory| {
        memory.write(ptr.address(), &[2; 64])?;
        memory.write(ptr.address() + 2 * GRANULE, &[2; 64])
    })
    .unwrap();
    pool.free(ptr, &other).unwrap();
    drop(pool);
    call!(driver, cuStreamDestroy_v2(raw));
    drop((other, device));
    sim.assert_clean();
    assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
}

gated!(hold_back: cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: u32));

/// A request has its stream wait for what another one freed, and is about to take it over. Meanwhile that was had again,
/// used, and freed anew: the wait was not for this.
#[test]
fn what_was_freed_anew_meanwhile_is_not_taken_over() {
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let driver = changed(&sim, hold_back::put);
    let device = driver.device(0).unwrap();
    let pool = Pool::new(&device, &config(5, 96)).unwrap();
    let [freeing, asking] = [(); 2].map(|()| device.stream().unwrap());
    let uses = |stream: &Stream, address: u64| {
        let write = move |memory: &mut cuda_sim::DeviceMemory<'_>| memory.write(address, &[1; 64]);
        sim.enqueue(stream.handle().raw(), "uses it", write).unwrap();
    };
    let of_asking = pool.malloc(BYTES, &asking).unwrap();
    let first = pool.malloc(4 * BYTES, &freeing).unwrap();
    uses(&freeing, first.address());
    pool.free(first, bare(&freeing)).unwrap();
    hold_back::AFTER.arm();
    std::thread::scope(|scope| {
        let asker = scope.spawn(|| pool.malloc(4 * BYTES, &asking).unwrap());
        hold_back::AFTER.wait();
        sim.run_until_idle();
        freeing.synchronize().unwrap();
        let again = pool.malloc(4 * BYTES, &freeing).unwrap();
        assert_eq!(again, first, "nobody's by now");
        uses(&freeing, again.address());
        pool.free(again, bare(&freeing)).unwrap();
        drop(freeing);
        hold_back::AFTER.open();
        let taken = asker.join().unwrap();
        pool.validate().unwrap();
        (0..4).for_each(|granule| uses(&asking, taken.address() + granule * GRANULE));
        [of_asking, taken].into_iter().for_each(|ptr| pool.free(ptr, &asking).unwrap());
    });
    drop((pool, asking, device));
    sim.assert_clean();
    assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
}

gated!(record_behind: cuEventRecord(event: CUevent, stream: CUstream));

/// As between two frees, where a foreign stream is made to wait for another one's memory: an event is recorded behind
/// that, and another thread frees meanwhile.
#[test]
fn a_wait_on_a_foreign_stream_is_entered_as_it_is_recorded() {
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let driver = changed(&sim, record_behind::put);
    let device = driver.device(0).unwrap();
    let pool = Pool::new(&device, &config(7, 64)).unwrap();
    let last = device.stream().unwrap();
    call!(driver, cuCtxSetCurrent(device.context()));
    let raws = [(); 2].map(|()| {
        let mut raw = std::ptr::null_mut();
        call!(driver, cuStreamCreate(&mut raw, 1));
        raw
    });
    // SAFETY: the streams are destroyed at the end of the test.
    let [freeing, asking] = raws.map(|raw| unsafe { StreamHandle::from_raw(raw) });
    let uses = |stream: StreamHandle, address: u64| {
        let write = move |memory: &mut cuda_sim::DeviceMemory<'_>| memory.write(address, &[1; 64]);
        sim.enqueue(stream.raw(), "uses it", write).unwrap();
    };
    let held = pool.malloc(2 * BYTES, asking).unwrap();
    let apart = pool.malloc(BYTES, &last).unwrap();
    let given = pool.malloc(4 * BYTES, freeing).unwrap();
    uses(freeing, given.address());
    pool.free(given, freeing).unwrap();
    record_behind::AFTER.arm();
    let taken = std::thread::scope(|scope| {
        let asker = scope.spawn(|| pool.malloc(4 * BYTES, asking).unwrap());
        record_behind::AFTER.wait();
        uses(asking, held.address());
        let freer = scope.spawn(|| pool.free(held, asking));
        // Long enough for a free that does not wait for the other thread.
        let start = Instant::now();
        while !freer.is_finished() && start.elapsed() < Duration::from_millis(200) {
            std::thread::yield_now();
        }
        record_behind::AFTER.open();
        freer.join().unwrap().unwrap();
        asker.join().unwrap()
    });
    assert_eq!((taken, pool.stats().device_waits), (given, 1));
    // Up to the event behind the wait, and no further.
    while sim.advance(raws[0]) {}
    (0..2).for_each(|_| assert!(sim.advance(raws[1])));
    let ptr = pool.malloc(2 * BYTES, &last).unwrap();
    assert_eq!(ptr, held);
    pool.validate().unwrap();
    uses(last.handle(), ptr.address());
    [ptr, apart].into_iter().for_each(|ptr| pool.free(ptr, &last).unwrap());
    pool.free(taken, asking).unwrap();
    drop(pool);
    raws.into_iter().for_each(|raw| call!(driver, cuStreamDestroy_v2(raw)));
    drop((last, device));
    sim.assert_clean();
    assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
}

gated!(lender_question: cuStreamIsCapturing(stream: CUstream, status: *mut CUstreamCaptureStatus));

/// A patient pool is about to borrow a block of a stream that ends just then: nothing is recorded on that any more.
#[test]
fn nothing_is_borrowed_of_a_stream_that_has_ended_meanwhile() {
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let driver = changed(&sim, lender_question::put);
    let device = driver.device(0).unwrap();
    let mut settings = config(16, 96);
    settings.patience = Duration::from_nanos(1);
    let pool = Pool::new(&device, &settings).unwrap();
    let [lending, asking] = [(); 2].map(|()| device.stream().unwrap());
    let of_asking = pool.malloc(BYTES, &asking).unwrap();
    let lent = pool.malloc(2 * BYTES, &lending).unwrap();
    pool.free(lent, bare(&lending)).unwrap();
    lender_question::BEFORE.arm();
    std::thread::scope(|scope| {
        let ender = scope.spawn(move || drop(lending));
        // Before its last event, with the stream to itself.
        lender_question::BEFORE.wait();
        let asker = scope.spawn(|| pool.malloc(2 * BYTES, &asking).unwrap());
        // It has taken the block, and waits for the stream.
        let start = Instant::now();
        while pool.stats().transit_bytes != 2 * GRANULE {
            assert!(start.elapsed() < Duration::from_secs(30), "{pool:?}");
            std::thread::yield_now();
        }
        // Behind its last event, and then before the first question of the other thread.
        for _ in 0..2 {
            lender_question::BEFORE.open();
            lender_question::BEFORE.arm();
            lender_question::BEFORE.wait();
        }
        ender.join().unwrap();
        lender_question::BEFORE.open();
        let taken = asker.join().unwrap();
        pool.validate().unwrap();
        assert_eq!(pool.stats().device_waits, 0);
        [of_asking, taken].into_iter().for_each(|ptr| pool.free(ptr, &asking).unwrap());
    });
    drop((pool, asking, device));
    sim.assert_clean();
    assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
}

gated!(fence_record: cuEventRecord(event: CUevent, stream: CUstream));

/// An event that is to tell when a further stream's use is over becomes part of a graph, whose capture begins after the
/// question for one and ends before the next: it tells nothing.
#[test]
fn an_event_that_fell_into_a_capture_proves_nothing_about_a_use() {
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let driver = changed(&sim, fence_record::put);
    let device = driver.device(0).unwrap();
    let pool = Pool::new(&device, &config(8, 64)).unwrap();
    let [own, side] = [(); 2].map(|()| device.stream().unwrap());
    let held = pool.malloc(2 * BYTES, &own).unwrap();
    let uses = |stream: &Stream, address: u64| {
        let write = move |memory: &mut cuda_sim::DeviceMemory<'_>| memory.write(address, &[1; 64]);
        sim.enqueue(stream.handle().raw(), "uses it", write).unwrap();
    };
    uses(&side, held.address());
    pool.record_stream(held, &side).unwrap();
    call!(driver, cuCtxSetCurrent(device.context()));
    fence_record::BEFORE.arm();
    std::thread::scope(|scope| {
        let freer = scope.spawn(|| pool.free(held, &own));
        fence_record::BEFORE.wait();
        let mode = cuda_sys::types::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        call!(driver, cuStreamBeginCapture_v2(side.handle().raw(), mode));
        fence_record::AFTER.arm();
        fence_record::BEFORE.open();
        fence_record::AFTER.wait();
        let mut graph = std::ptr::null_mut();
        call!(driver, cuStreamEndCapture(side.handle().raw(), &mut graph));
        call!(driver, cuGraphDestroy(graph));
        fence_record::AFTER.open();
        freer.join().unwrap().unwrap();
    });
    let early = pool.malloc(2 * BYTES, &own).unwrap();
    assert_ne!(early, held, "the other stream has yet to use it");
    uses(&own, early.address());
    pool.validate().unwrap();
    device.synchronize().unwrap();
    let late = pool.malloc(2 * BYTES, &own).unwrap();
    assert_eq!(late, held);
    uses(&own, late.address());
    [early, late].into_iter().for_each(|ptr| pool.free(ptr, &own).unwrap());
    drop((pool, own, side, device));
    sim.assert_clean();
    assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
}

gated!(making: cuMemCreate(
    handle: *mut u64,
    bytes: usize,
    properties: *const CUmemAllocationProp,
    flags: u64,
));

/// A request fails in the driver, after the host has waited for the stream whose free memory it took: nothing is closed
/// any more that this could go back to.
#[test]
fn what_a_failed_request_had_taken_goes_back_to_what_its_owner_is_by_then() {
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let driver = changed(&sim, making::put);
    let device = driver.device(0).unwrap();
    let pool = Pool::new(&device, &config(64, 256)).unwrap();
    let [stream, other] = [(); 2].map(|()| device.stream().unwrap());
    let mut live = vec![pool.malloc(BYTES, &other).unwrap()];
    let small = [(); 2].map(|()| pool.malloc(4096, &stream).unwrap());
    let [apart, between, last] =
        [1, 1, 4].map(|count| pool.malloc(count * BYTES, &stream).unwrap());
    live.extend([small[1], between]);
    // Something to close an epoch for stays where it is; one extent moves, and a window begins with the last.
    [small[0], apart, last].into_iter().for_each(|ptr| pool.free(ptr, bare(&stream)).unwrap());
    making::BEFORE.arm();
    sim.fail_nth("cuMemCreate", 1, cuda_sys::types::CUresult::CUDA_ERROR_UNKNOWN);
    std::thread::scope(|scope| {
        let growing = scope.spawn(|| pool.malloc(6 * BYTES, &stream));
        making::BEFORE.wait();
        stream.synchronize().unwrap();
        making::BEFORE.open();
        let failed = growing.join().unwrap();
        assert!(matches!(failed, Err(vpmm::Error::Driver { .. })), "{failed:?}");
    });
    pool.validate().unwrap();
    let again = pool.malloc(6 * BYTES, &stream).unwrap();
    assert_eq!((again, pool.stats().extents_moved), (last, 1));
    pool.validate().unwrap();
    live.push(again);
    live.into_iter().for_each(|ptr| pool.free(ptr, &stream).unwrap());
    drop((pool, stream, other, device));
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

gated!(creation_at_the_limit: cuMemCreate(
    handle: *mut CUmemGenericAllocationHandle,
    bytes: usize,
    properties: *const CUmemAllocationProp,
    flags: u64,
));

/// Two heaps of a pool grow at the same time, and what the one has takes the limit's rest from the other. That says
/// nothing of the device: when the one gives it back the other grows again at once, and has no stream wait for it.
#[test]
fn what_another_heap_takes_of_the_limit_does_not_pass_for_a_full_device() {
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let driver = changed(&sim, creation_at_the_limit::put);
    let device = driver.device(0).unwrap();
    let pool = Pool::new(&device, &config(24, 192)).unwrap();
    let tagged = pool.tagged("beside").unwrap();
    let [one, other, third, its] = [(); 4].map(|()| device.stream().unwrap());
    let freed = pool.malloc(8 * BYTES, &other).unwrap();
    pool.free(freed, bare(&other)).unwrap();
    creation_at_the_limit::AFTER.arm();
    let (held, of_tagged) = std::thread::scope(|scope| {
        let growing = scope.spawn(|| pool.malloc(8 * BYTES, &one));
        creation_at_the_limit::AFTER.wait();
        let of_tagged = tagged.malloc(12 * BYTES, &its);
        creation_at_the_limit::AFTER.open();
        (growing.join().unwrap().unwrap(), of_tagged.unwrap())
    });
    assert_eq!(
        pool.stats().device_waits,
        1,
        "it had to do with what was freed: the case that is meant"
    );
    tagged.free(of_tagged, &its).unwrap();
    sim.run_until_idle();
    its.synchronize().unwrap();
    tagged.trim_to(0).unwrap();
    pool.free(held, bare(&one)).unwrap();
    let last = pool.malloc(12 * BYTES, &third).unwrap();
    assert_eq!(pool.stats().device_waits, 1, "{}", pool.layout());
    pool.free(last, &third).unwrap();
    pool.validate().unwrap();
}

gated!(context_wait: cuCtxSynchronize());

/// A request has waited for the device, for what a stream had freed that ended in its capture. What another one leaves so
/// after that was not waited for.
#[test]
fn what_is_lost_after_a_wait_for_the_device_is_in_use_still() {
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let rig = Rig::with(changed(&sim, context_wait::put), sim.clone());
    let watched = rig.pool(&config(8, 64));
    let [lost, late, asking] = [(); 3].map(|()| rig.stream());
    let held = watched.malloc(4 * GRANULE, &late);
    let freed = watched.malloc(3 * GRANULE, &lost);
    watched.free(freed, &lost);
    begin_capture(&rig, lost.handle().raw());
    drop(lost);
    context_wait::AFTER.arm();
    let served = std::thread::scope(|scope| {
        let request = scope.spawn(|| watched.malloc(4 * GRANULE, &asking));
        context_wait::AFTER.wait();
        watched.free(held, &late);
        begin_capture(&rig, late.handle().raw());
        drop(late);
        context_wait::AFTER.open();
        request.join().unwrap()
    });
    assert_ne!(served.address(), held.address(), "what was written there has not been looked at");
    watched.free(served, &asking);
    watched.assert_intact();
}

gated!(captured_record: cuEventRecord(event: CUevent, stream: CUstream));
gated!(captured_query: cuEventQuery(event: CUevent));

/// A capture takes the event of a closed epoch. A thread is about to ask about that and stops, and again when it has the
/// answer: meanwhile the event was another stream's, and is the epoch's once more. The answer is not about that.
#[test]
fn an_answer_about_an_event_that_a_capture_had_taken() {
    let sim = Simulator::builder().schedule(Schedule::Eager).build().unwrap();
    let put = |api: &mut cuda_sys::DriverApi| {
        captured_record::put(api);
        captured_query::put(api);
    };
    let rig = Rig::with(changed(&sim, put), sim.clone());
    let mut settings = config(15, 128);
    settings.reuse.internal_dependencies = false;
    settings.out_of_memory = WaitPolicy::FailAtOnce;
    let pool = Pool::new(&rig.device, &settings).unwrap();
    let [freeing, other, asking] = [(); 3].map(|()| rig.stream());
    let malloc = |granules: usize, stream: &Stream| pool.malloc(granules * BYTES, stream);
    let (busy, of_other) = (malloc(9, &freeing).unwrap(), malloc(4, &other).unwrap());
    // Others want memory, so that the epoch is closed as soon as it is worth it.
    let of_asking = malloc(2, &asking).unwrap();
    let spin = sim.spin(freeing.handle().raw()).unwrap();
    let raw = freeing.handle().raw();
    captured_record::BEFORE.arm();
    let taken = std::thread::scope(|scope| {
        let free = scope.spawn(|| pool.free(busy, bare(&freeing)));
        captured_record::BEFORE.wait();
        begin_quiet_capture(&rig, raw);
        captured_record::AFTER.arm();
        captured_record::BEFORE.open();
        captured_record::AFTER.wait();
        assert_eq!(end_capture(&rig, raw), 0);
        captured_query::BEFORE.arm();
        captured_record::AFTER.open();
        captured_query::BEFORE.wait();
        pool.free(of_other, bare(&other)).unwrap();
        let taken = malloc(4, &asking).unwrap();
        captured_query::AFTER.arm();
        captured_query::BEFORE.open();
        captured_query::AFTER.wait();
        assert!(malloc(9, &asking).is_err());
        captured_query::AFTER.open();
        free.join().unwrap().unwrap();
        taken
    });
    pool.validate().unwrap();
    assert!(malloc(9, &asking).is_err(), "the stream is busy still");
    spin.release();
    freeing.synchronize().unwrap();
    let again = malloc(9, &asking).unwrap();
    [of_asking, taken, again].into_iter().for_each(|ptr| pool.free(ptr, &asking).unwrap());
    pool.validate().unwrap();
}

gated!(last_record: cuEventRecord(event: CUevent, stream: CUstream));

/// A loan of a foreign stream ends, and its last event is being recorded. Meanwhile what it has freed is a part of an
/// extent that becomes whole again: it waits for the stream still.
#[test]
fn what_moves_while_a_loan_ends_is_the_streams_still() {
    const SHORT: u64 = 204 << 12;
    const LONG: u64 = GRANULE - SHORT;
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let rig = Rig::with(changed(&sim, last_record::put), sim.clone());
    let mut settings = config(2, 64);
    settings.reuse.internal_dependencies = false;
    settings.out_of_memory = WaitPolicy::FailAtOnce;
    let watched = rig.pool(&settings);
    let (stream, other) = (rig.stream(), rig.stream());
    let (raw, foreign) = make(&rig, 1);
    let [a, kept, c, d] = [SHORT, LONG, LONG, SHORT].map(|bytes| watched.malloc(bytes, &stream));
    [a, d].into_iter().for_each(|held| watched.free(held, &stream));
    let split = watched.malloc(2 * SHORT, &stream);
    rig.order(&stream, foreign);
    watched.free(c, foreign);
    // SAFETY: the stream is destroyed when the loan is over.
    let loan = unsafe { Stream::borrowed(&rig.device, foreign) }.unwrap();
    watched.free(split, &stream);
    stream.synchronize().unwrap();
    last_record::BEFORE.arm();
    let early = std::thread::scope(|scope| {
        scope.spawn(|| drop(loan));
        last_record::BEFORE.wait();
        let early = watched.pool.malloc(BYTES, &other);
        last_record::BEFORE.open();
        early
    });
    assert!(early.is_err(), "what was written there has not been looked at");
    watched.validate();
    rig.device.synchronize().unwrap();
    let whole = watched.malloc(GRANULE, &other);
    [kept, whole].into_iter().for_each(|held| watched.free(held, &other));
    call!(rig.driver, cuStreamDestroy_v2(raw));
    watched.assert_intact();
}

gated!(foreign_record: cuEventRecord(event: CUevent, stream: CUstream));

/// A foreign stream begins to capture while a thread frees on it, so that the event of the free is the graph's: nobody
/// asks about that, which would end the capture, and the free is refused.
#[test]
fn a_free_that_a_capture_takes_the_event_of_is_refused() {
    for noted in [false, true] {
        let sim = Simulator::builder().schedule(Schedule::Eager).build().unwrap();
        let rig = Rig::with(changed(&sim, foreign_record::put), sim.clone());
        let mut settings = config(8, 64);
        settings.out_of_memory = WaitPolicy::FailAtOnce;
        let watched = rig.pool(&settings);
        let (pool, other) = (&watched.pool, rig.stream());
        let (raw, foreign) = make(&rig, 1);
        let ptr = pool.malloc(2 * BYTES, foreign).unwrap();
        if noted {
            pool.record_stream(ptr, &other).unwrap();
        }
        foreign_record::BEFORE.arm();
        let freed = std::thread::scope(|scope| {
            let free = scope.spawn(|| pool.free(ptr, foreign));
            foreign_record::BEFORE.wait();
            begin_quiet_capture(&rig, raw);
            foreign_record::BEFORE.open();
            free.join().unwrap()
        });
        watched.validate();
        assert!(pool.malloc(7 * BYTES, &other).is_err(), "there are six");
        assert_eq!(end_capture(&rig, raw), 0, "nodes");
        assert!(matches!(freed, Err(Error::StreamCapturing)), "{freed:?}");
        pool.free(ptr, foreign).unwrap();
        let all = pool.malloc(8 * BYTES, &other).unwrap();
        pool.free(all, &other).unwrap();
        call!(rig.driver, cuStreamDestroy_v2(raw));
        watched.assert_intact();
    }
}

gated!(unmap: cuMemUnmap(address: CUdeviceptr, bytes: usize));

/// Memory that goes back is in nobody's hands for a while, once.
#[test]
fn what_a_trim_gives_back_counts_once_meanwhile() {
    let sim = Simulator::builder().build().unwrap();
    let driver = changed(&sim, unmap::put);
    let device = driver.device(0).unwrap();
    let pool = Pool::new(&device, &config(11, 96)).unwrap();
    let stream = device.stream().unwrap();
    let [kept, freed] = [1, 3].map(|of| pool.malloc(of * BYTES, &stream).unwrap());
    pool.free(freed, &stream).unwrap();
    unmap::BEFORE.arm();
    std::thread::scope(|scope| {
        let trimming = scope.spawn(|| pool.trim_to(0).unwrap());
        unmap::BEFORE.wait();
        let now = pool.stats();
        unmap::BEFORE.open();
        assert_eq!(trimming.join().unwrap(), 3 * GRANULE);
        assert_eq!((now.transit_bytes, now.mapped_bytes), (3 * GRANULE, 4 * GRANULE));
        let of_memory = now.live_bytes + now.cached_bytes + now.free_bytes() + now.transit_bytes;
        assert_eq!(of_memory + now.hole_bytes + now.zombie_bytes, now.reserved_bytes);
    });
    assert_eq!(pool.stats().transit_bytes, 0);
    pool.free(kept, &stream).unwrap();
    pool.validate().unwrap();
}

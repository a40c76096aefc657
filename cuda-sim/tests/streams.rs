//! Streams, events, schedules, and what the race detector makes of them.

mod support;

use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::{
    CUdevice_attribute, CUresult, CUstream, CUstreamCaptureMode, CUstreamWaitValue_flags,
};
use support::{GRANULE, Gpu, call, ok};

const READY: CUresult = CUresult::CUDA_SUCCESS;
const NOT_READY: CUresult = CUresult::CUDA_ERROR_NOT_READY;
const LATE: Schedule = Schedule::Late { patience: 3 };

#[test]
fn late_work_runs_only_when_waited_for() {
    let gpu = Gpu::new(Simulator::builder().schedule(LATE));
    let (a, b) = (gpu.stream(), gpu.stream());
    let memory = gpu.alloc(8);
    gpu.fill(memory, 7, 1, a);
    gpu.fill(memory + 4, 8, 1, b);
    assert_eq!((gpu.word(memory), gpu.word(memory + 4)), (0, 0));
    ok!(gpu, cuStreamSynchronize(a));
    assert_eq!((gpu.word(memory), gpu.word(memory + 4)), (7, 0));
    // A wait pulls in what it depends on, and nothing else.
    let event = gpu.record(b);
    ok!(gpu, cuStreamWaitEvent(a, event, 0));
    assert_eq!(gpu.word(memory + 4), 0);
    ok!(gpu, cuStreamSynchronize(a));
    assert_eq!(gpu.word(memory + 4), 8);
    gpu.sim.assert_clean();
}

#[test]
fn a_patient_poller_makes_progress() {
    let gpu = Gpu::new(Simulator::builder().schedule(LATE));
    let stream = gpu.stream();
    let memory = gpu.alloc(4);
    gpu.fill(memory, 1, 1, stream);
    let event = gpu.record(stream);
    let answers: Vec<_> = (0..5).map(|_| gpu.query(event)).collect();
    assert_eq!(answers, [NOT_READY, NOT_READY, NOT_READY, READY, READY]);
}

#[test]
fn one_seed_is_one_run() {
    let run = |seed| {
        let gpu = Gpu::new(Simulator::builder().schedule(Schedule::Random).seed(seed));
        let order = Arc::new(Mutex::new(Vec::new()));
        let streams: Vec<_> = (0..4).map(|_| gpu.stream()).collect();
        for step in 0..40 {
            let order = Arc::clone(&order);
            let work = move |_: &mut cuda_sim::DeviceMemory<'_>| {
                order.lock().unwrap().push(step);
                Ok(())
            };
            gpu.sim.enqueue(streams[step % 4], "step", work).unwrap();
            call!(gpu, cuStreamQuery(streams[(step * 7) % 4]));
        }
        ok!(gpu, cuCtxSynchronize());
        let order = order.lock().unwrap().clone();
        assert_eq!(order.len(), 40);
        order
    };
    assert_eq!(run(5), run(5));
    assert_ne!(run(5), run(6));
    assert_ne!(run(5), (0..40).collect::<Vec<_>>());
}

#[test]
fn manual_schedules_stand_still() {
    let gpu = Gpu::new(Simulator::builder().schedule(Schedule::Manual));
    let stream = gpu.stream();
    let memory = gpu.alloc(8);
    gpu.fill(memory, 1, 1, stream);
    gpu.fill(memory, 2, 1, stream);
    for _ in 0..10 {
        assert_eq!(call!(gpu, cuStreamQuery(stream)), NOT_READY);
    }
    assert!(gpu.sim.advance(stream));
    assert_eq!(gpu.word(memory), 1);
    assert_eq!(gpu.sim.advance_all(), 1);
    assert_eq!(gpu.word(memory), 2);
    assert!(!gpu.sim.advance(stream));
    assert_eq!(gpu.sim.run_until_idle(), 0);
}

#[test]
fn a_spin_holds_its_stream_and_what_waits_for_it() {
    let gpu = Gpu::new(Simulator::builder());
    let (a, b, free) = (gpu.stream(), gpu.stream(), gpu.stream());
    let memory = gpu.alloc(12);
    let spin = gpu.sim.spin(a).unwrap();
    gpu.fill(memory, 1, 1, a);
    let event = gpu.record(a);
    ok!(gpu, cuStreamWaitEvent(b, event, 0));
    gpu.fill(memory + 4, 2, 1, b);
    gpu.fill(memory + 8, 3, 1, free);
    assert_eq!(gpu.query(event), NOT_READY);
    assert_eq!([0, 4, 8].map(|at| gpu.word(memory + at)), [0, 0, 3]);
    spin.release();
    assert_eq!([0, 4, 8].map(|at| gpu.word(memory + at)), [1, 2, 3]);
    assert_eq!(gpu.query(event), READY);
    gpu.sim.assert_clean();
}

#[test]
fn another_thread_may_release_a_spin() {
    let gpu = Gpu::new(Simulator::builder().schedule(LATE));
    let stream = gpu.stream();
    let spin = gpu.sim.spin(stream).unwrap();
    let helper = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(20));
        spin.release();
    });
    ok!(gpu, cuStreamSynchronize(stream));
    helper.join().unwrap();
    gpu.sim.assert_clean();
}

#[test]
fn a_wait_that_cannot_end_is_an_error() {
    let gpu = Gpu::new(Simulator::builder().deadlock_after(Duration::from_millis(30)));
    let stream = gpu.stream();
    let _spin = gpu.sim.spin(stream).unwrap();
    let code = call!(gpu, cuStreamSynchronize(stream));
    assert_eq!(code, CUresult::CUDA_ERROR_LAUNCH_TIMEOUT);
    assert!(gpu.sim.report().misuse[0].contains("deadlock"));
}

#[test]
fn a_wait_may_have_all_the_time_that_there_is() {
    let gpu = Gpu::new(Simulator::builder().deadlock_after(Duration::MAX));
    let stream = gpu.stream();
    let spin = gpu.sim.spin(stream).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(20));
            spin.release();
        });
        assert_eq!(call!(gpu, cuStreamSynchronize(stream)), READY);
    });
    gpu.sim.assert_clean();
}

/// Which of two streams' fills were done when the second one was waited for.
fn first_done_with(first: u32, second: Option<u32>) -> bool {
    let gpu = Gpu::new(Simulator::builder().schedule(LATE));
    let (first, second) = match second {
        Some(flags) => (gpu.stream_with(first), gpu.stream_with(flags)),
        None => (gpu.stream_with(first), null_mut()),
    };
    let memory = gpu.alloc(8);
    gpu.fill(memory, 1, 1, first);
    gpu.fill(memory + 4, 1, 1, second);
    ok!(gpu, cuStreamSynchronize(second));
    assert_eq!(gpu.word(memory + 4), 1);
    gpu.word(memory) == 1
}

#[test]
fn the_legacy_stream_orders_with_blocking_streams_only() {
    assert!(first_done_with(0, None), "legacy after blocking");
    assert!(!first_done_with(1, None), "legacy after non-blocking");
    assert!(!first_done_with(0, Some(0)), "blocking after blocking");
}

#[test]
fn blocking_streams_wait_for_the_legacy_stream() {
    for (stream, waits) in [(0_u32, true), (1, false)] {
        let gpu = Gpu::new(Simulator::builder().schedule(LATE));
        let stream = gpu.stream_with(stream);
        let memory = gpu.alloc(8);
        ok!(gpu, cuMemsetD32_v2(memory, 1, 1));
        gpu.fill(memory + 4, 1, 1, stream);
        ok!(gpu, cuStreamSynchronize(stream));
        assert_eq!(gpu.word(memory) == 1, waits);
    }
    // The per-thread stream is a blocking one.
    let gpu = Gpu::new(Simulator::builder().schedule(LATE));
    let memory = gpu.alloc(8);
    ok!(gpu, cuMemsetD32_v2(memory, 1, 1));
    gpu.fill(memory + 4, 1, 1, 2 as _);
    ok!(gpu, cuStreamSynchronize(2 as _));
    assert_eq!(gpu.word(memory), 1);
}

#[test]
fn the_legacy_stream_orders_with_destroyed_blocking_streams() {
    let gpu = Gpu::new(Simulator::builder().schedule(LATE));
    let stream = gpu.stream_with(0);
    let memory = gpu.alloc(4);
    gpu.fill(memory, 1, 1, stream);
    ok!(gpu, cuStreamDestroy_v2(stream));
    gpu.fill(memory, 2, 1, null_mut());
    ok!(gpu, cuStreamSynchronize(null_mut()));
    assert_eq!(gpu.word(memory), 2);
    gpu.sim.assert_clean();
}

/// Its own work, what blocking streams have, and those that were destroyed; as an H100 answers.
#[test]
fn the_legacy_stream_is_idle_when_all_that_it_orders_with_is() {
    let gpu = Gpu::new(Simulator::builder().schedule(Schedule::Manual));
    let legacy = || call!(gpu, cuStreamQuery(null_mut()));
    let (blocking, other, destroyed) = (gpu.stream_with(0), gpu.stream_with(0), gpu.stream_with(0));
    let apart = gpu.stream_with(1);
    let memory = gpu.alloc(16);
    gpu.fill(memory, 1, 1, apart);
    assert_eq!(legacy(), READY);
    gpu.fill(memory + 4, 1, 1, blocking);
    assert_eq!(legacy(), NOT_READY);
    // A question orders nothing.
    gpu.fill(memory + 8, 1, 1, other);
    assert!(gpu.sim.advance(other));
    assert!(gpu.sim.advance(blocking));
    assert_eq!(legacy(), READY);
    gpu.fill(memory + 12, 1, 1, destroyed);
    ok!(gpu, cuStreamDestroy_v2(destroyed));
    assert_eq!(legacy(), NOT_READY);
    gpu.sim.run_until_idle();
    assert_eq!(legacy(), READY);
}

/// Who is told that the legacy stream is busy is told nothing of the streams that it orders with.
#[test]
fn the_host_learns_nothing_of_streams_by_an_answer_that_all_are_not_done() {
    let gpu = Gpu::new(Simulator::builder().schedule(Schedule::Manual));
    let (done, busy) = (gpu.stream_with(0), gpu.stream_with(0));
    let address = gpu.reserve(GRANULE);
    let handle = gpu.create(GRANULE);
    gpu.map(address, GRANULE, handle);
    gpu.fill(address, 1, 4, done);
    gpu.fill(gpu.alloc(4), 1, 1, busy);
    assert!(gpu.sim.advance(done));
    let query = || call!(gpu, cuStreamQuery(null_mut()));
    assert_eq!(query(), NOT_READY);
    let unmap = || call!(gpu, cuMemUnmap(address, GRANULE));
    assert_eq!(unmap(), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(gpu.sim.report().misuse.len(), 1, "in use, for all that the host knows");
    assert!(gpu.sim.advance(busy));
    assert_eq!([query(), unmap()], [READY; 2]);
}

/// They come back before they have waited for anything.
#[test]
fn the_host_learns_nothing_by_calls_that_are_refused() {
    let gpu = Gpu::new(Simulator::builder().schedule(Schedule::Manual));
    let stream = gpu.stream_with(0);
    let address = gpu.reserve(GRANULE);
    gpu.map(address, GRANULE, gpu.create(GRANULE));
    gpu.fill(address, 1, 4, stream);
    assert!(gpu.sim.advance(stream));
    let mut bytes = [0_u8; 8];
    let host = bytes.as_mut_ptr().cast();
    let nowhere = address + GRANULE as u64;
    let invalid = CUresult::CUDA_ERROR_INVALID_VALUE;
    let refused = [
        (call!(gpu, cuMemHostUnregister(host)), CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED),
        (call!(gpu, cuMemFreeHost(host)), invalid),
        (call!(gpu, cuMemcpyHtoD_v2(nowhere, host, 8)), invalid),
        (call!(gpu, cuMemcpyDtoH_v2(host, nowhere, 8)), invalid),
        (call!(gpu, cuMemcpy(nowhere, host as u64, 8)), invalid),
    ];
    for (at, (code, wanted)) in refused.into_iter().enumerate() {
        assert_eq!(code, wanted, "{at}");
    }
    assert_eq!(call!(gpu, cuMemUnmap(address, GRANULE)), invalid);
    assert_eq!(gpu.sim.report().misuse.len(), 1);
    ok!(gpu, cuCtxSynchronize());
    ok!(gpu, cuMemUnmap(address, GRANULE));
}

#[test]
fn the_per_thread_handle_is_another_stream_on_each_thread() {
    let gpu = Gpu::new(Simulator::builder());
    let id_here = || {
        let mut id = 0;
        ok!(gpu, cuStreamGetId(2 as _, &mut id));
        id
    };
    let mine = id_here();
    assert_eq!(mine, id_here());
    let context = gpu.retain(0) as usize;
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            ok!(gpu, cuCtxSetCurrent(context as _));
            id_here()
        });
        assert_ne!(mine, other.join().unwrap());
    });
}

#[test]
fn handles_come_back_and_ids_do_not() {
    let gpu = Gpu::new(Simulator::builder().schedule(LATE));
    let id = |stream| {
        let mut id = 0;
        ok!(gpu, cuStreamGetId(stream, &mut id));
        id
    };
    let memory = gpu.alloc(4);
    let first = gpu.stream();
    let first_id = id(first);
    gpu.fill(memory, 1, 1, first);
    let event = gpu.record(first);
    ok!(gpu, cuStreamDestroy_v2(first));
    let second = gpu.stream();
    assert_eq!(first, second);
    assert_ne!(first_id, id(second));
    // The old stream's work goes on behind the new stream's back.
    assert_eq!(gpu.query(event), NOT_READY);
    ok!(gpu, cuStreamSynchronize(second));
    assert_eq!(gpu.query(event), NOT_READY);
    ok!(gpu, cuEventSynchronize(event));
    assert_eq!(gpu.word(memory), 1);
    gpu.sim.assert_clean();
}

#[test]
fn stale_handles_are_misuse() {
    let gpu = Gpu::new(Simulator::builder());
    let stream = gpu.stream();
    let event = gpu.event();
    ok!(gpu, cuStreamDestroy_v2(stream));
    ok!(gpu, cuEventDestroy_v2(event));
    assert_eq!(call!(gpu, cuStreamQuery(stream)), CUresult::CUDA_ERROR_INVALID_HANDLE);
    assert_eq!(gpu.query(event), CUresult::CUDA_ERROR_INVALID_HANDLE);
    let misuse = gpu.sim.report().misuse;
    assert!(misuse[0].starts_with("cuStreamQuery: stream 0x"), "{misuse:?}");
    assert!(misuse[1].starts_with("cuEventQuery: event 0x"), "{misuse:?}");
}

#[test]
fn events_are_snapshots() {
    let gpu = Gpu::new(Simulator::builder().schedule(LATE));
    let (a, b) = (gpu.stream(), gpu.stream());
    let event = gpu.event();
    assert_eq!(gpu.query(event), READY, "never recorded");
    let memory = gpu.alloc(12);
    gpu.fill(memory, 1, 1, a);
    ok!(gpu, cuEventRecord(event, a));
    ok!(gpu, cuStreamWaitEvent(b, event, 0));
    // Recording again does not move the wait that was enqueued before.
    gpu.fill(memory + 4, 1, 1, a);
    ok!(gpu, cuEventRecord(event, a));
    ok!(gpu, cuStreamSynchronize(b));
    assert_eq!((gpu.word(memory), gpu.word(memory + 4)), (1, 0));
    // A pending event may be destroyed.
    ok!(gpu, cuEventDestroy_v2(event));
    ok!(gpu, cuStreamSynchronize(a));
    gpu.sim.assert_clean();
}

#[test]
fn events_belong_to_a_context() {
    let gpu = Gpu::new(Simulator::builder().devices(2));
    let event = gpu.event();
    gpu.retain(1);
    let stream = gpu.stream();
    let code = call!(gpu, cuEventRecord(event, stream));
    assert_eq!(code, CUresult::CUDA_ERROR_INVALID_HANDLE);
}

#[test]
fn time_runs_between_events_of_one_context() {
    let gpu = Gpu::new(Simulator::builder().devices(2));
    let timed = |stream| {
        let mut event = null_mut();
        ok!(gpu, cuEventCreate(&mut event, 0));
        ok!(gpu, cuEventRecord(event, stream));
        event
    };
    let first = timed(gpu.stream());
    gpu.retain(1);
    let second = timed(gpu.stream());
    let elapsed = |start, end| call!(gpu, cuEventElapsedTime(&mut 0.0, start, end));
    assert_eq!(elapsed(first, first), READY);
    assert_eq!(elapsed(first, second), CUresult::CUDA_ERROR_INVALID_HANDLE);
}

/// What was reached before is another record's.
#[test]
fn an_event_that_a_capture_recorded_last_has_no_time() {
    let gpu = Gpu::new(Simulator::builder());
    let stream = gpu.stream();
    let mut events = [null_mut(); 2];
    for event in &mut events {
        ok!(gpu, cuEventCreate(event, 0));
        ok!(gpu, cuEventRecord(*event, stream));
    }
    ok!(gpu, cuStreamSynchronize(stream));
    let [first, second] = events;
    let elapsed = || call!(gpu, cuEventElapsedTime(&mut 0.0, first, second));
    assert_eq!(elapsed(), READY);
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    ok!(gpu, cuStreamBeginCapture_v2(stream, mode));
    ok!(gpu, cuEventRecord(second, stream));
    let mut graph = null_mut();
    ok!(gpu, cuStreamEndCapture(stream, &mut graph));
    assert_eq!(elapsed(), CUresult::CUDA_ERROR_CAPTURED_EVENT);
    ok!(gpu, cuGraphDestroy(graph));
}

#[test]
fn unordered_writes_are_a_race() {
    let gpu = Gpu::new(Simulator::builder());
    let (a, b) = (gpu.stream(), gpu.stream());
    let memory = gpu.alloc(8);
    gpu.fill(memory, 1, 2, a);
    gpu.fill(memory + 4, 2, 1, b);
    let races = gpu.sim.report().races;
    assert_eq!(races.len(), 1, "{races:?}");
    assert_eq!(&*races[0].first.what, "cuMemsetD32Async");
}

#[test]
fn events_waits_and_the_host_order() {
    let gpu = Gpu::new(Simulator::builder());
    let (a, b) = (gpu.stream(), gpu.stream());
    let memory = gpu.alloc(8);
    gpu.fill(memory, 1, 2, a);
    let event = gpu.record(a);
    ok!(gpu, cuStreamWaitEvent(b, event, 0));
    gpu.fill(memory, 2, 2, b);
    ok!(gpu, cuStreamSynchronize(b));
    gpu.fill(memory, 3, 2, a);
    let event = gpu.record(a);
    assert_eq!(gpu.query(event), READY);
    gpu.fill(memory, 4, 2, b);
    gpu.sim.assert_clean();
}

#[test]
fn written_values_order_nothing_but_can_be_waited_for() {
    let gpu = Gpu::new(Simulator::builder().schedule(LATE));
    let (a, b) = (gpu.stream(), gpu.stream());
    let mut host = null_mut();
    ok!(gpu, cuMemAllocHost_v2(&mut host, 8));
    let memory = gpu.alloc(4);
    ok!(gpu, cuStreamWaitValue64_v2(b, host as u64, 5, 0));
    gpu.fill(memory, 2, 1, b);
    gpu.fill(memory, 1, 1, a);
    ok!(gpu, cuStreamWriteValue64_v2(a, host as u64, 5, 0));
    // b can end only if a runs, though no edge says so.
    ok!(gpu, cuStreamSynchronize(b));
    assert_eq!(gpu.word(memory), 2);
    assert_eq!(gpu.sim.report().races.len(), 1);
    ok!(gpu, cuMemFreeHost(host));
}

fn attribute(gpu: &Gpu, of: CUdevice_attribute) -> i32 {
    let mut value = -1;
    ok!(gpu, cuDeviceGetAttribute(&mut value, of, 0));
    value
}

/// A program asks before it waits for a word so.
#[test]
fn what_words_can_be_waited_for_is_told() {
    let gpu = Gpu::new(Simulator::builder());
    let (stream, memory) = (gpu.stream(), gpu.alloc(8));
    ok!(gpu, cuMemsetD8_v2(memory, 0, 8));
    ok!(
        gpu,
        cuStreamWaitValue64_v2(
            stream,
            memory,
            1,
            CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_NOR.0
        )
    );
    ok!(gpu, cuStreamSynchronize(stream));
    for of in [
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS,
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR,
    ] {
        assert_eq!(attribute(&gpu, of), 1, "{of:?}");
    }
}

static HOST_CALLS: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" fn count_and_call(driver: *mut core::ffi::c_void) {
    // SAFETY: the test passes a pointer to a driver that outlives the stream's work.
    let driver = unsafe { &*driver.cast::<cuda_sys::Driver>() };
    let mut count = 0;
    let get_count = driver.cuDeviceGetCount.unwrap();
    // SAFETY: a pointer to a live local.
    let code = unsafe { get_count(&mut count) };
    assert_eq!(code, CUresult::CUDA_ERROR_NOT_PERMITTED);
    HOST_CALLS.fetch_add(1, Ordering::SeqCst);
}

#[test]
fn host_functions_run_in_order_and_may_not_call() {
    let gpu = Gpu::new(Simulator::builder().schedule(LATE));
    let stream = gpu.stream();
    let driver = &raw const gpu.driver;
    ok!(gpu, cuLaunchHostFunc(stream, Some(count_and_call), driver as *mut _));
    assert_eq!(HOST_CALLS.load(Ordering::SeqCst), 0);
    ok!(gpu, cuStreamSynchronize(stream));
    assert_eq!(HOST_CALLS.load(Ordering::SeqCst), 1);
    gpu.sim.assert_clean();
}

unsafe extern "C" fn keep_status(_: CUstream, status: CUresult, kept: *mut core::ffi::c_void) {
    // SAFETY: the test passes a pointer to a word that outlives the stream's work.
    let kept = unsafe { &*kept.cast::<AtomicU32>() };
    kept.store(status.0, Ordering::SeqCst);
}

/// As its documentation says; of cuLaunchHostFunc's it says that they are not called.
#[test]
fn callbacks_are_called_with_the_error_that_came_before() {
    let gpu = Gpu::new(Simulator::builder().schedule(LATE));
    let stream = gpu.stream();
    let statuses = [AtomicU32::new(99), AtomicU32::new(99)];
    let add = |status: &AtomicU32| {
        let status = std::ptr::from_ref(status).cast_mut().cast();
        ok!(gpu, cuStreamAddCallback(stream, Some(keep_status), status, 0));
    };
    add(&statuses[0]);
    let illegal = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
    gpu.sim.enqueue(stream, "stray", move |_| Err(illegal)).unwrap();
    add(&statuses[1]);
    assert_eq!(call!(gpu, cuStreamSynchronize(stream)), illegal);
    assert_eq!(statuses.map(AtomicU32::into_inner), [READY.0, illegal.0]);
}

static GATE: (Mutex<bool>, Condvar) = (Mutex::new(false), Condvar::new());

unsafe extern "C" fn wait_at_gate(_: *mut core::ffi::c_void) {
    let open = GATE.0.lock().unwrap();
    drop(GATE.1.wait_while(open, |open| !*open).unwrap());
}

#[test]
fn a_host_function_may_wait_for_the_enqueuing_thread() {
    for schedule in [Schedule::Eager, LATE] {
        *GATE.0.lock().unwrap() = false;
        let gpu = Gpu::new(Simulator::builder().schedule(schedule));
        let stream = gpu.stream();
        let memory = gpu.alloc(4);
        ok!(gpu, cuLaunchHostFunc(stream, Some(wait_at_gate), null_mut()));
        gpu.fill(memory, 1, 1, stream);
        let event = gpu.record(stream);
        assert_eq!(gpu.query(event), NOT_READY);
        assert_eq!(gpu.word(memory), 0);
        *GATE.0.lock().unwrap() = true;
        GATE.1.notify_all();
        ok!(gpu, cuEventSynchronize(event));
        assert_eq!(gpu.word(memory), 1);
        gpu.sim.assert_clean();
    }
}

/// Destroys an event of a driver when it goes, and tells how that went.
struct EndsAnEvent(cuda_sys::Driver, usize, mpsc::Sender<CUresult>);

impl Drop for EndsAnEvent {
    fn drop(&mut self) {
        let destroy = self.0.cuEventDestroy_v2.unwrap();
        // SAFETY: an event of that driver, which nothing else destroys meanwhile.
        let _ = self.2.send(unsafe { destroy(self.1 as _) });
    }
}

#[test]
fn work_that_goes_may_not_call_either() {
    let gpu = Gpu::new(Simulator::builder());
    let (stream, event) = (gpu.stream() as usize, gpu.event());
    let (answer, answers) = mpsc::channel();
    let owned = EndsAnEvent(gpu.sim.driver(), event as usize, answer);
    let sim = gpu.sim.clone();
    // On a thread of its own, so that a lock taken twice is told.
    std::thread::spawn(move || {
        let work = move |_: &mut cuda_sim::DeviceMemory<'_>| {
            let _ = &owned;
            Ok(())
        };
        sim.enqueue(stream as _, "owner", work)
    });
    let answer = answers.recv_timeout(Duration::from_secs(10));
    assert_eq!(answer, Ok(CUresult::CUDA_ERROR_NOT_PERMITTED));
    ok!(gpu, cuEventDestroy_v2(event));
    gpu.sim.assert_clean();
}

#[test]
fn a_failed_kernel_spoils_its_context() {
    let gpu = Gpu::new(Simulator::builder());
    let stream = gpu.stream();
    gpu.sim.enqueue(stream, "stray", |memory| memory.write(0x1000, &[1])).unwrap();
    let illegal = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
    assert_eq!(call!(gpu, cuStreamSynchronize(stream)), illegal);
    assert_eq!(call!(gpu, cuCtxSynchronize()), illegal);
    assert!(gpu.sim.report().misuse[0].contains("`stray`"));
}

#[test]
fn kernels_by_name() {
    let gpu = Gpu::new(Simulator::builder());
    let (mut module, mut function) = (null_mut(), null_mut());
    ok!(gpu, cuModuleLoadData(&mut module, cuda_sim::kernels::PTX.as_ptr().cast()));
    ok!(gpu, cuModuleGetFunction(&mut function, module, c"vpmm_fill".as_ptr()));
    let code = call!(gpu, cuModuleGetFunction(&mut function.clone(), module, c"none".as_ptr()));
    assert_eq!(code, CUresult::CUDA_ERROR_NOT_FOUND);
    let stream = gpu.stream();
    let (mut address, mut words, mut stride, mut seed) = (gpu.alloc(80), 10_u64, 1_u64, 3_u64);
    let mut parameters =
        [&mut address, &mut words, &mut stride, &mut seed].map(|p| (p as *mut u64).cast());
    ok!(
        gpu,
        cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, parameters.as_mut_ptr(), null_mut())
    );
    ok!(gpu, cuStreamSynchronize(stream));
    let mut word = [0; 8];
    gpu.sim.peek(address + 72, &mut word).unwrap();
    assert_eq!(u64::from_le_bytes(word), cuda_sim::kernels::mix(3, 9));
    ok!(gpu, cuModuleUnload(module));
    gpu.sim.assert_clean();
}

#[test]
fn what_no_device_launches() {
    let gpu = Gpu::new(Simulator::builder().devices(2));
    let (mut module, mut function) = (null_mut(), null_mut());
    ok!(gpu, cuModuleLoadData(&mut module, cuda_sim::kernels::PTX.as_ptr().cast()));
    ok!(gpu, cuModuleGetFunction(&mut function, module, c"vpmm_spin_clocks".as_ptr()));
    let clocks = 0_u64;
    let launch = |stream, [x, y, z]: [u32; 3], shared| {
        let mut parameters = [(&raw const clocks).cast_mut().cast()];
        let parameters = parameters.as_mut_ptr();
        call!(
            gpu,
            cuLaunchKernel(function, x, y, z, 32, 1, 1, shared, stream, parameters, null_mut())
        )
    };
    let stream = gpu.stream();
    let invalid = CUresult::CUDA_ERROR_INVALID_VALUE;
    assert_eq!(launch(stream, [i32::MAX as u32, 65_535, 65_535], 48 << 10), READY);
    let most = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK;
    assert_eq!(attribute(&gpu, most), 48 << 10);
    for grid in [[1 << 31, 1, 1], [1, 1 << 16, 1], [1, 1, 1 << 16], [1, 0, 1]] {
        assert_eq!(launch(stream, grid, 0), invalid, "{grid:?}");
    }
    assert_eq!(launch(stream, [1; 3], (48 << 10) + 1), invalid, "shared memory");
    // A function is a context's, as a stream is.
    gpu.retain(1);
    let elsewhere = gpu.stream();
    assert_eq!(launch(elsewhere, [1; 3], 0), CUresult::CUDA_ERROR_INVALID_HANDLE);
    assert_eq!(launch(stream, [1; 3], 0), READY);
}

/// Two kernels, each with words far apart, none of them the other's: what lies between is theirs, too.
#[test]
fn words_apart_stand_for_all_between_them() {
    let gpu = Gpu::new(Simulator::builder());
    let (mut module, mut function) = (null_mut(), null_mut());
    ok!(gpu, cuModuleLoadData(&mut module, cuda_sim::kernels::PTX.as_ptr().cast()));
    ok!(gpu, cuModuleGetFunction(&mut function, module, c"vpmm_fill".as_ptr()));
    let memory = gpu.alloc(1 << 16);
    let fill = |offset: u64| {
        let (mut address, mut words, mut stride, mut seed) =
            (memory + offset, 4_u64, 500_u64, 3_u64);
        let mut parameters =
            [&mut address, &mut words, &mut stride, &mut seed].map(|p| (p as *mut u64).cast());
        let (stream, parameters) = (gpu.stream(), parameters.as_mut_ptr());
        ok!(gpu, cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, parameters, null_mut()));
    };
    fill(0);
    fill(3 * 4000 + 8); // behind the last word of the first
    fill(80);
    ok!(gpu, cuCtxSynchronize());
    let races = gpu.sim.report().races;
    assert_eq!(races.len(), 2, "the third with each of the two before: {races:?}");
}

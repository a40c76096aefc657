//! The engine with allocators made for the test: order, failures, and that a
//! broken allocator is found out.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cuda_sys::types::CUresult;
use indicatif::ProgressBar;
use vpmm::{Stream, StreamHandle};

use super::engine::Checker;
use super::*;
use crate::backend::{AllocatorSpec, Backend};
use crate::device::{Calls, Ledger, Machine, Setup};
use crate::trace::{Action, Trace};

const HEADER: &str = "Thread,Time,Action,Pointer,Size,Stream\n";

fn trace(rows: &str) -> Trace {
    Trace::read("test.csv", format!("{HEADER}{rows}").as_bytes()).unwrap()
}

/// Notes every call; refuses what would pass its limit.
struct Noting {
    next: AtomicU64,
    live: Mutex<HashMap<u64, u64>>,
    log: Mutex<Vec<(Action, u64)>>,
    limit_bytes: u64,
}

impl Noting {
    fn new(limit_bytes: u64) -> Self {
        let next = AtomicU64::new(0x1000);
        Self { next, live: Mutex::default(), log: Mutex::default(), limit_bytes }
    }
}

impl Backend for Noting {
    fn allocate(&self, bytes: u64, _stream: StreamHandle) -> vpmm::Result<u64> {
        let mut live = self.live.lock().unwrap();
        let mapped_bytes: u64 = live.values().sum();
        if mapped_bytes + bytes > self.limit_bytes {
            return Err(vpmm::Error::OutOfMemory {
                requested_bytes: bytes,
                free_bytes: 0,
                largest_free_bytes: 0,
                mapped_bytes,
                live_bytes: mapped_bytes,
                limit_bytes: Some(self.limit_bytes),
                map: None,
            });
        }
        let address = self.next.fetch_add(0x1000, Ordering::Relaxed);
        live.insert(address, bytes);
        self.log.lock().unwrap().push((Action::Allocate, bytes));
        Ok(address)
    }

    unsafe fn free(&self, address: u64, _bytes: u64, _stream: StreamHandle) -> vpmm::Result<()> {
        let bytes = self.live.lock().unwrap().remove(&address);
        let bytes = bytes.ok_or(vpmm::Error::ForeignPointer { address })?;
        self.log.lock().unwrap().push((Action::Free, bytes));
        Ok(())
    }

    fn peak_mapped_bytes(&self) -> vpmm::Result<u64> {
        Ok(0)
    }

    fn driver_calls(&self) -> u64 {
        0
    }

    fn map(&self) -> String {
        format!("{} live", self.live.lock().unwrap().len())
    }
}

fn pass(trace: &Trace, threads: bool, backend: &dyn Backend) -> Pass {
    pass_when(trace, threads, backend, None)
}

fn pass_when(
    trace: &Trace,
    threads: bool,
    backend: &dyn Backend,
    due: Option<&[Duration]>,
) -> Pass {
    let streams = vec![StreamHandle::LEGACY; trace.streams as usize];
    let pass = Replay::new(trace, threads).pass(&Target {
        backend,
        streams: &streams,
        checker: None,
        due,
        timer: None,
        spent: None,
        enter: &|| Ok(()),
        progress: &|_| {},
    });
    pass.unwrap()
}

#[test]
fn one_thread_keeps_the_order_and_frees_what_is_left() {
    let trace = trace(
        "1,x,allocate,0x1,10,0\n2,x,allocate,0x2,20,0\n1,x,free,0x2,0,0\n2,x,allocate,0x2,30,0\n",
    );
    let backend = Noting::new(u64::MAX);
    let pass = pass(&trace, false, &backend);
    use Action::{Allocate, Free};
    assert_eq!(
        *backend.log.lock().unwrap(),
        [(Allocate, 10), (Allocate, 20), (Free, 20), (Allocate, 30), (Free, 10), (Free, 30)]
    );
    assert_eq!((pass.operations, pass.peak_live_bytes), (4, 40));
    assert!(pass.stop.is_none());
}

#[test]
fn threads_wait_for_the_allocations_that_they_free() {
    // Each thread frees what the other has allocated, over more rows than the window.
    let mut rows = String::new();
    for i in 0..4000_u64 {
        let (a, b) = (2 * i + 1, 2 * i + 2);
        rows += &format!("1,x,allocate,{a:#x},8,0\n2,x,allocate,{b:#x},8,0\n");
        rows += &format!("1,x,free,{b:#x},8,0\n2,x,free,{a:#x},8,0\n");
    }
    let trace = trace(&rows);
    let backend = Noting::new(u64::MAX);
    let pass = pass(&trace, true, &backend);
    assert!(pass.stop.is_none(), "{:?}", pass.stop);
    assert_eq!(pass.operations, 16_000);
    assert!(backend.live.lock().unwrap().is_empty());
}

#[test]
fn more_threads_than_rows_in_the_window_do_not_block_each_other() {
    let rows: String = (1..50_u64)
        .map(|i| format!("{i},x,allocate,{i:#x},8,0\n"))
        .chain((1..50_u64).map(|i| format!("{},x,free,{:#x},8,0\n", 50 - i, i)))
        .collect();
    let trace = trace(&rows);
    let backend = Noting::new(u64::MAX);
    let pass = pass(&trace, true, &backend);
    assert_eq!((pass.operations, pass.stop.is_none()), (98, true));
}

/// As in the log of a server that makes a thread for each request: none is there before its first row.
#[test]
fn threads_that_come_late_hold_nobody_up() {
    let rows: String = (1..=4000)
        .map(|i| format!("{i},x,allocate,{i:#x},100,0\n{i},x,free,{i:#x},100,0\n"))
        .collect();
    let begin = Instant::now();
    let pass = pass(&trace(&rows), true, &Noting::new(u64::MAX));
    assert_eq!((pass.operations, pass.stop.is_none()), (8000, true));
    let took = begin.elapsed();
    assert!(took < Duration::from_secs(20), "{took:?}");
}

/// What this process has had of all processors.
fn processors_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.try_into().unwrap()
}

/// As many as there are wait at nearly every row: each goes far beyond the window with its next one.
#[test]
fn thousands_of_threads_at_once_wait_without_a_look_of_each() {
    let rows: String = (0..40)
        .flat_map(|turn| (1..=2000).map(move |thread| (turn, thread)))
        .map(|(turn, thread)| {
            let action = if turn % 2 == 0 { "allocate" } else { "free" };
            format!("{thread},x,{action},{thread:#x},100,0\n")
        })
        .collect();
    let trace = trace(&rows);
    // The processors' time, with that of the tests beside this one: the clock's is anything on a busy machine.
    let begin = processors_time();
    let pass = pass(&trace, true, &super::nothing::Nothing);
    assert_eq!((pass.operations, pass.stop.is_none()), (80_000, true));
    let took = processors_time() - begin;
    assert!(took < Duration::from_secs(16), "{took:?}");
}

/// One that has panicked makes no allocation for the others, and gets out of nobody's way.
#[test]
fn a_panic_on_one_thread_ends_the_others() {
    struct Panicking;

    impl Backend for Panicking {
        fn allocate(&self, bytes: u64, _stream: StreamHandle) -> vpmm::Result<u64> {
            assert_ne!(bytes, 13, "for the test");
            Ok(1)
        }

        unsafe fn free(&self, _: u64, _: u64, _: StreamHandle) -> vpmm::Result<()> {
            Ok(())
        }

        fn peak_mapped_bytes(&self) -> vpmm::Result<u64> {
            Ok(0)
        }

        fn driver_calls(&self) -> u64 {
            0
        }

        fn map(&self) -> String {
            String::new()
        }
    }

    // The second waits for an allocation, the third for the first to go on, and the fourth begins after that.
    let mut rows = "1,x,allocate,0x1,13,0\n2,x,free,0x1,13,0\n".to_owned();
    for i in 2..1500 {
        rows += &format!("3,x,allocate,{i:#x},8,0\n");
    }
    rows += "4,x,allocate,0x5000,8,0\n";
    let (done, is_done) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let trace = trace(&rows);
        let panicked = std::panic::catch_unwind(|| pass(&trace, true, &Panicking)).is_err();
        done.send(panicked).unwrap();
    });
    assert_eq!(is_done.recv_timeout(Duration::from_secs(20)), Ok(true));
}

#[test]
fn out_of_memory_tells_the_row_the_peak_and_the_map() {
    let trace = trace(
        "1,x,allocate,0x1,10,0\n1,x,allocate,0x2,20,0\n1,x,allocate,0x3,30,0\n\
         1,x,allocate,0x4,1,0\n",
    );
    let backend = Noting::new(40);
    let pass = pass(&trace, false, &backend);
    let stop = pass.stop.expect("it stops");
    assert_eq!((stop.action, stop.slot, stop.row), (Action::Allocate, 2, 2));
    assert_eq!((pass.operations, pass.peak_live_bytes), (2, 30));
    assert_eq!(stop.map.as_deref(), Some("2 live"), "taken before the rest was freed");
    assert!(backend.live.lock().unwrap().is_empty());
}

#[test]
fn out_of_memory_on_one_thread_stops_the_others() {
    // Thread 2 would wait for an allocation that thread 1 never makes.
    let trace = trace("1,x,allocate,0x1,10,0\n1,x,allocate,0x2,50,0\n2,x,free,0x2,50,0\n");
    let pass = pass(&trace, true, &Noting::new(40));
    assert_eq!(pass.stop.expect("it stops").row, 1);
}

/// The other thread sleeps until then.
#[test]
fn a_failure_is_told_before_the_other_threads_next_call_is_due() {
    let trace = trace(
        "1,00:00:00.0,allocate,0x1,100,0\n2,00:00:00.1,allocate,0x2,11,0\n\
         1,00:10:00.0,free,0x1,100,0\n",
    );
    let started = Instant::now();
    let pass = pass_when(&trace, true, &Noting::new(110), Some(&trace.times));
    assert!(started.elapsed() < Duration::from_secs(300), "{:?}", started.elapsed());
    assert_eq!((pass.operations, pass.stop.map(|stop| stop.row)), (1, Some(1)));
}

/// Whoever waits sees how far it is: a program at its own pace may take minutes for as many operations as are done
/// in a millisecond else.
#[test]
fn progress_at_the_programs_pace_is_told_in_small_steps() {
    let rows: String = (1..=1000)
        .map(|i| format!("1,0:0:0,allocate,{i:#x},8,0\n1,0:0:0,free,{i:#x},8,0\n"))
        .collect();
    let trace = trace(&rows);
    let told = |due: Option<&[Duration]>| {
        let told = Mutex::new(Vec::new());
        let pass = Replay::new(&trace, false).pass(&Target {
            backend: &Noting::new(u64::MAX),
            streams: &[StreamHandle::LEGACY],
            checker: None,
            due,
            timer: None,
            spent: None,
            enter: &|| Ok(()),
            progress: &|operations| told.lock().unwrap().push(operations),
        });
        assert_eq!(pass.unwrap().operations, 2000);
        told.into_inner().unwrap()
    };
    assert_eq!(told(None), [2000]);
    let paced = told(Some(&trace.times));
    assert_eq!(paced.iter().sum::<u64>(), 2000);
    assert!(paced.iter().all(|operations| *operations <= 20), "{paced:?}");
}

#[test]
fn a_context_that_cannot_be_entered_is_a_stop() {
    let trace = trace("1,x,allocate,0x1,10,0\n2,x,allocate,0x2,10,0\n");
    for threads in [false, true] {
        let pass = Replay::new(&trace, threads).pass(&Target {
            backend: &Noting::new(u64::MAX),
            streams: &[StreamHandle::LEGACY],
            checker: None,
            due: None,
            timer: None,
            spent: None,
            enter: &|| Err(vpmm::Error::ZeroSize),
            progress: &|_| {},
        });
        let pass = pass.unwrap();
        assert_eq!((pass.operations, pass.stop.is_some()), (0, true));
    }
}

/// Fails once: the n-th of its calls.
struct FailingOnce(AtomicU64);

impl FailingOnce {
    fn at(call: u64) -> Self {
        Self(AtomicU64::new(call))
    }

    fn call(&self) -> vpmm::Result<()> {
        match self.0.fetch_sub(1, Ordering::Relaxed) {
            1 => Err(vpmm::Error::ZeroSize),
            _ => Ok(()),
        }
    }
}

impl Checker for FailingOnce {
    fn write(&self, _piece: &Piece) -> vpmm::Result<()> {
        self.call()
    }

    fn check(&self, _piece: &Piece, _free_stream: StreamHandle) -> vpmm::Result<()> {
        self.call()
    }
}

/// Refuses one free, as a pool does on a stream that captures, and has what it refused still.
struct RefusingAFree {
    inner: Noting,
    refusals: FailingOnce,
}

impl Backend for RefusingAFree {
    fn allocate(&self, bytes: u64, stream: StreamHandle) -> vpmm::Result<u64> {
        self.inner.allocate(bytes, stream)
    }

    unsafe fn free(&self, address: u64, bytes: u64, stream: StreamHandle) -> vpmm::Result<()> {
        self.refusals.call()?;
        // SAFETY: the caller keeps the same contract.
        unsafe { self.inner.free(address, bytes, stream) }
    }

    fn peak_mapped_bytes(&self) -> vpmm::Result<u64> {
        Ok(0)
    }

    fn driver_calls(&self) -> u64 {
        0
    }

    fn map(&self) -> String {
        String::new()
    }
}

/// Whatever fails, and wherever: the pool that the next allocator is measured beside would else keep
/// its memory.
#[test]
fn what_is_allocated_when_a_pass_stops_is_freed() {
    let trace = trace(
        "1,x,allocate,0x1,10,0\n2,x,allocate,0x2,20,0\n2,x,free,0x1,10,0\n1,x,free,0x2,20,0\n\
         1,x,allocate,0x3,30,0\n",
    );
    let streams = [StreamHandle::LEGACY];
    let run = |threads: bool, backend: &dyn Backend, checker: &dyn Checker| {
        let target = Target {
            backend,
            streams: &streams,
            checker: Some(checker),
            due: None,
            timer: None,
            spent: None,
            enter: &|| Ok(()),
            progress: &|_| {},
        };
        Replay::new(&trace, threads).pass(&target).unwrap()
    };
    for threads in [false, true] {
        // Three writes, and as many checks.
        for call in 1..=6 {
            let backend = Noting::new(u64::MAX);
            let pass = run(threads, &backend, &FailingOnce::at(call));
            assert!(pass.stop.is_some(), "call {call}");
            assert_eq!(*backend.live.lock().unwrap(), HashMap::new(), "call {call}");
        }
        // What is not in the trace is freed at the end, and not once more.
        for refused in 1..=2 {
            let refusals = FailingOnce::at(refused);
            let backend = RefusingAFree { inner: Noting::new(u64::MAX), refusals };
            let pass = run(threads, &backend, &FailingOnce::at(0));
            assert!(pass.stop.is_some(), "free {refused}");
            assert_eq!(*backend.inner.live.lock().unwrap(), HashMap::new(), "free {refused}");
        }
    }
}

/// Runs a pass on one thread or more, with what is done beside the calls.
fn pass_beside(
    trace: &Trace,
    threads: bool,
    backend: &dyn Backend,
    spent: Option<&Spent<'_>>,
    progress: &(dyn Fn(u64) + Sync),
) -> Pass {
    let streams = vec![StreamHandle::LEGACY; trace.streams as usize];
    let pass = Replay::new(trace, threads).pass(&Target {
        backend,
        streams: &streams,
        checker: None,
        due: None,
        timer: None,
        spent,
        enter: &|| Ok(()),
        progress,
    });
    pass.unwrap()
}

/// Takes its time for requests of 13 bytes.
struct Slow;

const SLOWLY: Duration = Duration::from_millis(100);

impl Backend for Slow {
    fn allocate(&self, bytes: u64, _stream: StreamHandle) -> vpmm::Result<u64> {
        if bytes == 13 {
            std::thread::sleep(SLOWLY);
        }
        Ok(bytes)
    }

    unsafe fn free(&self, _address: u64, _bytes: u64, _stream: StreamHandle) -> vpmm::Result<()> {
        Ok(())
    }

    fn peak_mapped_bytes(&self) -> vpmm::Result<u64> {
        Ok(0)
    }

    fn driver_calls(&self) -> u64 {
        0
    }

    fn map(&self) -> String {
        String::new()
    }
}

/// What a program waits for is the allocator alone: not the other threads, not whoever is told of the progress, not
/// what looks for the longest call.
#[test]
fn only_the_allocators_time_counts() {
    let slowly_ns = SLOWLY.as_nanos() as f64;
    // The second thread waits all the time for the first.
    let two = trace("1,x,allocate,0x1,13,0\n2,x,free,0x1,13,0\n");
    let pass = pass_beside(&two, true, &Slow, None, &|_| {});
    assert!((slowly_ns..1.7 * slowly_ns).contains(&pass.nanoseconds), "{pass:?}");

    let one = trace("1,x,allocate,0x1,8,0\n1,x,free,0x1,8,0\n");
    let tell = |_| std::thread::sleep(SLOWLY);
    let pass = pass_beside(&one, false, &Slow, None, &tell);
    assert!(pass.nanoseconds < slowly_ns / 2.0, "{pass:?}");

    let us = Box::new(|| {
        std::thread::sleep(SLOWLY);
        0.0
    });
    let spent = Spent { us, by_function: Box::new(Ledger::default) };
    let pass = pass_beside(&one, false, &Slow, Some(&spent), &|_| {});
    assert!(pass.nanoseconds < slowly_ns / 2.0, "{pass:?}");
}

/// Nor the loop around it.
#[test]
fn an_allocator_that_does_nothing_takes_no_time() {
    let rows: String =
        (1..=20_000).map(|i| format!("1,x,allocate,{i:#x},8,0\n1,x,free,{i:#x},8,0\n")).collect();
    let trace = trace(&rows);
    let target = Target {
        backend: &super::nothing::Nothing,
        streams: &[StreamHandle::LEGACY],
        checker: None,
        due: None,
        timer: None,
        spent: None,
        enter: &|| Ok(()),
        progress: &|_| {},
    };
    // Whatever else runs on the machine makes some longer, and a core that has become slower all: what the loop costs
    // is measured anew each time.
    let is_so = || {
        let replay = Replay::new(&trace, false);
        let began = Instant::now();
        let pass = replay.pass(&target).unwrap();
        pass.nanoseconds < began.elapsed().as_nanos() as f64 / 3.0
    };
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(10), "the loop's own time counts");
    }
}

fn simulated(
    trace: &Trace,
    passes: u32,
    before: impl FnOnce(&cuda_sim::Simulator),
) -> (Machine, Outcome) {
    let machine = Machine::simulated(Setup { time_driver: true, ..Setup::default() }).unwrap();
    let settings = Settings {
        limit_bytes: None,
        passes,
        threads: false,
        paced: false,
        longest: false,
        verify_stride_bytes: None,
    };
    before(machine.simulator().unwrap());
    let bar = ProgressBar::hidden();
    let outcome = run(trace, &AllocatorSpec::CudaMalloc, &machine, settings, &bar).unwrap();
    (machine, outcome)
}

#[test]
fn a_pass_that_stops_is_no_pass_among_others() {
    let trace = trace(
        "1,x,allocate,0x1,10,0\n1,x,allocate,0x2,20,0\n1,x,free,0x2,0,0\n1,x,free,0x1,30,0\n",
    );
    // The second pass fails at its second call.
    let fails = |simulator: &cuda_sim::Simulator| {
        simulator.fail_nth("cuMemAlloc_v2", 4, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    };
    let (_, outcome) = simulated(&trace, 3, fails);
    assert!(outcome.is_out_of_memory());
    assert_eq!((outcome.operations, outcome.ns_per_op.len()), (1, 1));
    assert_eq!((outcome.host_ns_per_op.len(), outcome.peak_live_bytes), (1, 30));
    // One that is the only one is told all the same.
    let fails = |simulator: &cuda_sim::Simulator| {
        simulator.fail_nth("cuMemAlloc_v2", 2, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    };
    let (_, outcome) = simulated(&trace, 3, fails);
    assert_eq!((outcome.operations, outcome.ns_per_op.len()), (1, 1));
}

/// Each pass begins on an idle device, and the first one behind what settles the driver; what is spent in the driver
/// is told apart.
#[test]
fn passes_begin_alike_and_the_drivers_time_is_apart() {
    let rows: String = (1..=50).map(|i| format!("1,x,allocate,{i:#x},8,0\n")).collect();
    let (machine, outcome) = simulated(&trace(&rows), 3, |_| {});
    let counts = machine.simulator().unwrap().call_counts();
    // The allocator itself makes none.
    assert!(counts["cuMemCreate"] >= 2, "{counts:?}");
    assert!(counts["cuCtxSynchronize"] >= 3, "{counts:?}");
    for (all, host) in outcome.ns_per_op.iter().zip(&outcome.host_ns_per_op) {
        // Each operation is one call.
        assert!(*host < 0.9 * all, "{outcome:?}");
    }
}

/// Device memory from `cuMemAlloc`, handed out wrongly: every allocation after
/// the first is given the address of the first again, or so many bytes behind it.
struct Aliasing<'a> {
    calls: Calls<'a>,
    only: Mutex<Option<u64>>,
    behind_bytes: u64,
}

impl Backend for Aliasing<'_> {
    fn allocate(&self, _bytes: u64, _stream: StreamHandle) -> vpmm::Result<u64> {
        let mut only = self.only.lock().unwrap();
        match *only {
            Some(address) => Ok(address + self.behind_bytes),
            None => {
                let address = self.calls.allocate((8 << 20) + 2 * self.behind_bytes)?;
                *only = Some(address);
                Ok(address)
            }
        }
    }

    unsafe fn free(&self, _address: u64, _bytes: u64, _stream: StreamHandle) -> vpmm::Result<()> {
        Ok(())
    }

    fn peak_mapped_bytes(&self) -> vpmm::Result<u64> {
        Ok(8 << 20)
    }

    fn driver_calls(&self) -> u64 {
        self.calls.count()
    }

    fn map(&self) -> String {
        String::new()
    }
}

/// Slots that were found overwritten when the trace runs through `backend`.
fn mismatches(
    trace: &Trace,
    stride_bytes: u64,
    backend: for<'a> fn(&'a Machine) -> Box<dyn Backend + 'a>,
) -> Vec<u32> {
    // Without the race detector, which would find the same by other means.
    let machine = Machine::simulated(Setup::default()).unwrap();
    let calls = machine.calls();
    calls.enter().unwrap();
    let streams = machine.streams(trace.streams).unwrap();
    let handles: Vec<StreamHandle> = streams.iter().map(Stream::handle).collect();
    let mut verifier = Verifier::new(&machine, trace, stride_bytes).unwrap();
    let backend = backend(&machine);
    let pass = Replay::new(trace, false).pass(&Target {
        backend: &*backend,
        streams: &handles,
        checker: Some(&verifier as &dyn Checker),
        due: None,
        timer: None,
        spent: None,
        enter: &|| calls.enter(),
        progress: &|_| {},
    });
    let stop = pass.unwrap().stop;
    assert!(stop.is_none(), "{stop:?}");
    let slots = verifier.finish_pass().unwrap().iter().map(|found| found.slot).collect();
    assert_eq!(verifier.finish_pass().unwrap(), [], "counters start afresh");
    slots
}

fn aliasing(machine: &Machine) -> Box<dyn Backend + '_> {
    Box::new(Aliasing { calls: machine.calls(), only: Mutex::new(None), behind_bytes: 0 })
}

fn overlapping_by_half(machine: &Machine) -> Box<dyn Backend + '_> {
    let behind_bytes = 8 << 20;
    Box::new(Aliasing { calls: machine.calls(), only: Mutex::new(None), behind_bytes })
}

fn sound(machine: &Machine) -> Box<dyn Backend + '_> {
    AllocatorSpec::CudaMalloc.open(machine, None).unwrap()
}

#[test]
fn an_address_handed_out_twice_is_found() {
    // Two at once on one stream; the second's pattern is over the first's.
    let overlapping = trace(
        "1,x,allocate,0x1,5000000,0\n1,x,allocate,0x2,3000001,0\n\
         1,x,free,0x1,1,0\n1,x,free,0x2,1,0\n",
    );
    for stride_bytes in [0, 64 << 10, 1 << 20] {
        assert_eq!(mismatches(&overlapping, stride_bytes, aliasing), [0], "{stride_bytes}");
        assert!(mismatches(&overlapping, stride_bytes, sound).is_empty());
    }
    // One after the other is no harm, and no false alarm.
    let in_turn = trace(
        "1,x,allocate,0x1,5000000,0\n1,x,free,0x1,1,7\n\
         1,x,allocate,0x2,64,7\n1,x,free,0x2,1,7\n",
    );
    assert!(mismatches(&in_turn, 1 << 20, aliasing).is_empty());
}

/// Sizes are often powers of two, and so is how far one allocation lies behind the other: then no word
/// of the one's pattern may be the other's.
#[test]
fn two_allocations_that_share_a_half_are_found() {
    let overlapping = trace(
        "1,x,allocate,0x1,16777216,0\n1,x,allocate,0x2,16777216,0\n\
         1,x,free,0x1,1,0\n1,x,free,0x2,1,0\n",
    );
    assert_eq!(mismatches(&overlapping, 0, overlapping_by_half), [0]);
}

#[test]
fn what_is_left_at_the_end_is_checked_too() {
    let leaking = trace("1,x,allocate,0x1,4096,0\n1,x,allocate,0x2,4096,3\n");
    assert_eq!(mismatches(&leaking, 0, aliasing), [0]);
}

#[test]
fn pieces_smaller_than_a_word_are_left_alone() {
    let tiny = trace("1,x,allocate,0x1,7,0\n1,x,allocate,0x2,1,0\n");
    assert!(mismatches(&tiny, 0, aliasing).is_empty());
}

#[test]
fn every_allocator_serves_threads_streams_and_passes() {
    let mut rows = String::new();
    for i in 1..200_u64 {
        let (thread, bytes) = (i % 3, 1000 + i * 77_777 % 9_000_000);
        rows += &format!("{thread},x,allocate,{i:#x},{bytes},{}\n", i % 4);
        if i > 20 {
            let old = i - 20;
            rows += &format!("{},x,free,{old:#x},1,{}\n", (i + 1) % 3, i % 5);
        }
    }
    let trace = trace(&rows);
    for allocator in &AllocatorSpec::DIRECT {
        for threads in [false, true] {
            let machine =
                Machine::simulated(Setup { detect_races: true, ..Setup::default() }).unwrap();
            let settings = Settings {
                limit_bytes: Some(1 << 30),
                passes: 2,
                threads,
                paced: false,
                longest: false,
                verify_stride_bytes: Some(1 << 20),
            };
            let bar = ProgressBar::hidden();
            let outcome = run(&trace, allocator, &machine, settings, &bar).unwrap();
            assert!(!outcome.is_failure(), "{allocator}: {outcome:?}");
            assert_eq!(outcome.ns_per_op.len(), 2);
            assert_eq!(outcome.operations, 378);
            assert!(outcome.driver_calls > 0);
            assert_eq!(outcome.driver_time_us.is_some(), !threads);
            let utilisation = outcome.utilisation().unwrap();
            assert!(utilisation > 0.2 && utilisation <= 1.0, "{allocator}: {utilisation}");
        }
    }
}

#[test]
fn verifying_does_not_change_what_the_driver_is_said_to_cost() {
    let trace = trace("1,x,allocate,0x1,5000000,0\n1,x,free,0x1,1,3\n1,x,allocate,0x2,900,0\n");
    for allocator in &AllocatorSpec::DIRECT {
        let time = |verify_stride_bytes| {
            let machine = Machine::simulated(Setup::default()).unwrap();
            let settings = Settings {
                limit_bytes: None,
                passes: 1,
                threads: false,
                paced: false,
                longest: false,
                verify_stride_bytes,
            };
            let outcome =
                run(&trace, allocator, &machine, settings, &ProgressBar::hidden()).unwrap();
            (outcome.driver_calls, outcome.driver_time_us.unwrap())
        };
        let (plain, verified) = (time(None), time(Some(0)));
        assert_eq!(plain.0, verified.0);
        assert!((plain.1 - verified.1).abs() < 1e-6, "{allocator}: {plain:?} {verified:?}");
    }
}

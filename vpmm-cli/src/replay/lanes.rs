//! The order of a replay: one lane for one thread.
//!
//! With one lane the rows run in the order of the trace. With a lane per trace
//! thread each lane keeps its own order, and lanes wait for each other in two
//! cases only, so that the allocator sees real concurrency:
//!
//! 1. A free waits until the allocation, made by another lane, is there.
//! 2. No lane runs further ahead of the slowest than [`WINDOW_ROWS`] rows of
//!    the trace, so that what is live at one time stays near the trace's own.
//!
//! A program may make a thread for each of its requests. So a lane begins when its
//! first row is in the window, and is at that row until then: none holds the others
//! up before it is there, and no more are there at a time than the window has rows.
//!
//! No lane waits for ever: the lane with the lowest row is never held by 2, nor kept
//! from beginning, and what 1 waits for is a row before it.
//!
//! What a lane does says nothing to those that wait, since its calls are timed. A few
//! threads, as many as there are processors, look again and again. All others sleep, and
//! one of those that wait, the *lookout*, looks for all of them and wakes whom it may:
//! were each to look, thousands would take the processors from those that work.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use crate::trace::{Action, Operation, Trace};

/// How many rows a lane may be ahead of the slowest.
pub(super) const WINDOW_ROWS: u64 = 1024;

/// One call of the allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Step {
    /// The bytes of the allocation, also where it is freed: a program that frees has its own size
    /// at hand, and a table of sizes would be one more cache miss in the time of the allocator.
    pub(super) bytes: u64,
    /// The operation's index in the trace.
    pub(super) row: u32,
    pub(super) slot: u32,
    pub(super) stream: u32,
    pub(super) action: Action,
}

/// The steps of each lane, in order; the lanes in the order of their first rows.
pub(super) fn lanes(trace: &Trace, one_per_thread: bool) -> Vec<Vec<Step>> {
    let count = if one_per_thread { trace.threads.max(1) as usize } else { 1 };
    let mut lanes = vec![Vec::new(); count];
    for (row, operation) in trace.operations.iter().enumerate() {
        let Operation { action, slot, stream, .. } = *operation;
        let bytes = trace.allocations[slot as usize].bytes;
        let lane = if one_per_thread { operation.thread as usize } else { 0 };
        // At most two operations per slot, and slots are numbered in u32.
        let row = row as u32;
        lanes[lane].push(Step { bytes, row, slot, stream, action });
    }
    lanes
}

/// A counter on a cache line of its own: every lane writes its own all the time.
#[repr(align(128))]
#[derive(Debug)]
struct Position(AtomicU64);

/// What a thread waits for.
#[derive(Clone, Copy, Debug)]
struct Wants {
    /// That this row is near enough.
    row: u64,
    /// That this slot has an address.
    slot: Option<u32>,
}

/// A thread that sleeps until the lookout wakes it.
#[derive(Debug)]
struct Sleeper {
    thread: Thread,
    wants: Wants,
    /// `ASLEEP`, and then one of the others.
    word: AtomicU8,
}

const ASLEEP: u8 = 0;
/// What it waits for is there, or the replay was stopped.
const GO: u8 = 1;
/// It is the lookout from now on.
const LOOK_OUT: u8 = 2;

impl Sleeper {
    fn wake(&self, word: u8) {
        self.word.store(word, Ordering::Release);
        self.thread.unpark();
    }

    /// What it is woken with.
    fn sleep(&self) -> u8 {
        loop {
            match self.word.load(Ordering::Acquire) {
                ASLEEP => thread::park(),
                word => return word,
            }
        }
    }
}

/// Those that wait, and where the lanes were when one of them looked.
#[derive(Debug)]
struct Room {
    /// Rows and lanes, the slowest lane on top. A lane may have gone on since; those that are done go when they
    /// come to the top.
    seen: BinaryHeap<Reverse<(u64, usize)>>,
    /// While there is any there is a lookout, which is not among them.
    sleepers: Vec<Arc<Sleeper>>,
    has_lookout: bool,
}

/// Where the lanes are, and whether one has failed.
#[derive(Debug)]
pub(super) struct Progress<'a> {
    start: Instant,
    positions: Vec<Position>,
    /// The address of each live allocation, 0 where there is none.
    slots: &'a [AtomicU64],
    /// The row of the slowest lane when somebody looked: none is before it.
    floor: AtomicU64,
    /// Threads that look again and again, and how many may.
    awake: AtomicUsize,
    most_awake: usize,
    room: Mutex<Room>,
    stopped: AtomicBool,
}

impl<'a> Progress<'a> {
    pub(super) fn new(lanes: &[Vec<Step>], slots: &'a [AtomicU64]) -> Self {
        let first = |lane: &Vec<Step>| lane.first().map_or(u64::MAX, |step| u64::from(step.row));
        let seen = lanes.iter().enumerate().map(|(index, lane)| Reverse((first(lane), index)));
        let room = Room { seen: seen.collect(), sleepers: Vec::new(), has_lookout: false };
        // One lane waits for nobody.
        let most_awake = match lanes.len() {
            0..2 => 1,
            _ => thread::available_parallelism().map_or(1, NonZeroUsize::get),
        };
        Self {
            start: Instant::now(),
            positions: lanes.iter().map(|lane| Position(AtomicU64::new(first(lane)))).collect(),
            slots,
            floor: AtomicU64::new(0),
            awake: AtomicUsize::new(0),
            most_awake,
            room: Mutex::new(room),
            stopped: AtomicBool::new(false),
        }
    }

    /// When the pass began.
    pub(super) fn start(&self) -> Instant {
        self.start
    }

    /// Waits until a lane's first row is near enough; `false` if the replay was stopped first.
    pub(super) fn begin(&self, lane: usize) -> bool {
        let row = self.positions[lane].0.load(Ordering::Relaxed);
        self.wait(Wants { row, slot: None })
    }

    /// Says that `lane` is at `row`.
    pub(super) fn at(&self, lane: usize, row: u32) {
        self.positions[lane].0.store(u64::from(row), Ordering::Relaxed);
    }

    /// Says that `lane` is done and holds nobody up any more.
    pub(super) fn done(&self, lane: usize) {
        self.positions[lane].0.store(u64::MAX, Ordering::Relaxed);
    }

    /// The first row that is too far ahead, as of when somebody looked.
    pub(super) fn horizon(&self) -> u64 {
        self.floor.load(Ordering::Relaxed).saturating_add(WINDOW_ROWS)
    }

    /// Whether the slot has an address, so that it can be freed.
    pub(super) fn is_made(&self, slot: u32) -> bool {
        self.slots[slot as usize].load(Ordering::Acquire) != 0
    }

    /// Makes every lane stop at its next step.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// Waits until nothing has to be done before the step; `false` if the replay was stopped first.
    pub(super) fn wait_for(&self, step: &Step) -> bool {
        let slot = (step.action == Action::Free).then_some(step.slot);
        self.wait(Wants { row: u64::from(step.row), slot })
    }

    fn wait(&self, wants: Wants) -> bool {
        let may_stay = self.awake.fetch_add(1, Ordering::Relaxed) < self.most_awake;
        let done = self.stay_awake(wants, if may_stay { 256 } else { 1 });
        self.awake.fetch_sub(1, Ordering::Relaxed);
        if let Some(ready) = done {
            return ready;
        }
        let sleeper =
            Arc::new(Sleeper { thread: thread::current(), wants, word: AtomicU8::new(ASLEEP) });
        let mut room = self.room();
        if room.has_lookout {
            room.sleepers.push(Arc::clone(&sleeper));
            drop(room);
            if sleeper.sleep() == GO {
                return self.is_ready(wants);
            }
        } else {
            room.has_lookout = true;
            drop(room);
        }
        self.look_out(wants)
    }

    /// Looks so many times; `None` if there was nothing to end the wait.
    fn stay_awake(&self, wants: Wants, turns: u32) -> Option<bool> {
        for turn in 0..turns {
            if wants.row >= self.horizon()
                && let Ok(mut room) = self.room.try_lock()
            {
                self.look(&mut room);
            }
            if self.is_ready(wants) {
                return Some(true);
            }
            if self.is_stopped() {
                return Some(false);
            }
            if turn < 64 { std::hint::spin_loop() } else { thread::yield_now() }
        }
        None
    }

    /// Looks until the lookout's own wait is over, and wakes the others meanwhile.
    fn look_out(&self, wants: Wants) -> bool {
        let mut quiet = 0_u32;
        loop {
            let mut room = self.room();
            let mut moved = self.look(&mut room);
            let stopped = self.is_stopped();
            room.sleepers.retain(|sleeper| {
                let goes = stopped || self.is_ready(sleeper.wants);
                if goes {
                    sleeper.wake(GO);
                    moved = true;
                }
                !goes
            });
            let ready = self.is_ready(wants);
            if ready || stopped {
                match room.sleepers.pop() {
                    Some(next) => next.wake(LOOK_OUT),
                    None => room.has_lookout = false,
                }
                return ready;
            }
            drop(room);
            // Where nothing happens it looks less often.
            quiet = if moved { 0 } else { quiet.saturating_add(1) };
            thread::sleep(Duration::from_micros(20 << (quiet / 16).min(6)));
        }
    }

    /// Looks which lane is the slowest; whether that one has moved. Each lane is looked at once at most for each
    /// time that it came to the top and had gone on.
    fn look(&self, room: &mut Room) -> bool {
        let mut floor = u64::MAX;
        while let Some(mut slowest) = room.seen.peek_mut() {
            let Reverse((seen, lane)) = *slowest;
            let row = self.positions[lane].0.load(Ordering::Relaxed);
            if row == u64::MAX {
                PeekMut::pop(slowest);
            } else if row == seen {
                floor = row;
                break;
            } else {
                *slowest = Reverse((row, lane));
            }
        }
        self.floor.swap(floor, Ordering::Relaxed) != floor
    }

    fn is_ready(&self, wants: Wants) -> bool {
        wants.row < self.horizon() && wants.slot.is_none_or(|slot| self.is_made(slot))
    }

    fn room(&self) -> MutexGuard<'_, Room> {
        self.room.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(rows: &str) -> Trace {
        Trace::read("t", format!("Thread,Action,Pointer,Size,Stream\n{rows}").as_bytes()).unwrap()
    }

    #[test]
    fn one_lane_keeps_the_order_of_the_trace() {
        let trace = trace("7,allocate,0x1,64,0\n9,allocate,0x2,32,3\n7,free,0x2,32,0\n");
        let lanes = lanes(&trace, false);
        assert_eq!(
            lanes,
            [[
                Step { bytes: 64, row: 0, slot: 0, stream: 0, action: Action::Allocate },
                Step { bytes: 32, row: 1, slot: 1, stream: 1, action: Action::Allocate },
                Step { bytes: 32, row: 2, slot: 1, stream: 0, action: Action::Free },
            ]]
        );
    }

    #[test]
    fn a_lane_per_thread_keeps_the_order_of_each() {
        let trace = trace("7,allocate,0x1,64,0\n9,allocate,0x2,32,3\n7,free,0x2,32,0\n");
        let rows: Vec<Vec<u32>> = lanes(&trace, true)
            .iter()
            .map(|lane| lane.iter().map(|step| step.row).collect())
            .collect();
        assert_eq!(rows, [vec![0, 2], vec![1]]);
    }

    #[test]
    fn an_empty_trace_has_an_empty_lane() {
        assert_eq!(lanes(&trace(""), true), [[]]);
    }

    #[test]
    fn the_slowest_lane_sets_the_horizon() {
        let trace = trace("7,allocate,0x1,64,0\n7,free,0x1,64,0\n9,allocate,0x2,32,3\n");
        let progress = Progress::new(&lanes(&trace, true), &[]);
        let horizon = || {
            progress.look(&mut progress.room());
            progress.horizon()
        };
        assert!(progress.begin(0) && horizon() == WINDOW_ROWS);
        progress.at(0, 500);
        assert_eq!(horizon(), 2 + WINDOW_ROWS, "the other begins there");
        assert!(progress.begin(1));
        progress.at(1, 700);
        assert_eq!(horizon(), 500 + WINDOW_ROWS);
        progress.done(0);
        assert_eq!(horizon(), 700 + WINDOW_ROWS);
        progress.done(1);
        assert_eq!(horizon(), u64::MAX);
    }

    const AT_ONCE: Wants = Wants { row: 0, slot: None };

    #[test]
    fn a_wait_ends_when_the_replay_stops() {
        let slots = [AtomicU64::new(0)];
        let progress = Progress::new(&[Vec::new(), Vec::new()], &slots);
        assert!(progress.wait(AT_ONCE));
        progress.stop();
        assert!(!progress.wait(Wants { slot: Some(0), ..AT_ONCE }));
    }

    /// Whoever is the lookout when its own wait is over leaves that to another.
    #[test]
    fn all_that_sleep_are_woken_in_any_order() {
        let slots: Vec<AtomicU64> = (0..40).map(|_| AtomicU64::new(0)).collect();
        for stops in [false, true] {
            slots.iter().for_each(|slot| slot.store(0, Ordering::Relaxed));
            let progress = Progress::new(&[Vec::new(), Vec::new()], &slots);
            let (done, is_done) = std::sync::mpsc::channel();
            thread::scope(|scope| {
                for slot in 0..40 {
                    let (done, progress) = (done.clone(), &progress);
                    let wants = Wants { slot: Some(slot), ..AT_ONCE };
                    scope.spawn(move || done.send((slot, progress.wait(wants))));
                }
                let asleep = || progress.room().sleepers.len();
                while asleep() < 39 {
                    thread::yield_now();
                }
                for slot in (0..40).map(|slot| slot * 7 % 40).take(if stops { 20 } else { 40 }) {
                    slots[slot as usize].store(1, Ordering::Release);
                    assert_eq!(is_done.recv().unwrap(), (slot, true));
                }
                if stops {
                    progress.stop();
                    assert!((0..20).all(|_| !is_done.recv().unwrap().1));
                }
            });
            assert!(!progress.room().has_lookout && progress.room().sleepers.is_empty());
        }
    }
}

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

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
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

/// Where the lanes are, and whether one has failed.
#[derive(Debug)]
pub(super) struct Progress {
    start: Instant,
    positions: Vec<Position>,
    /// Lanes that have begun: the first so many.
    begun: AtomicUsize,
    /// Lanes that are done, of which there is none before them that is not.
    over: AtomicUsize,
    stopped: AtomicBool,
}

impl Progress {
    pub(super) fn new(lanes: &[Vec<Step>]) -> Self {
        let first = |lane: &Vec<Step>| lane.first().map_or(u64::MAX, |step| u64::from(step.row));
        Self {
            start: Instant::now(),
            positions: lanes.iter().map(|lane| Position(AtomicU64::new(first(lane)))).collect(),
            begun: AtomicUsize::new(0),
            over: AtomicUsize::new(0),
            stopped: AtomicBool::new(false),
        }
    }

    /// When the pass began.
    pub(super) fn start(&self) -> Instant {
        self.start
    }

    /// Waits until the next lane's first row is near enough; `false` if the replay was stopped first.
    pub(super) fn begin(&self, lane: usize) -> bool {
        let first = self.positions[lane].0.load(Ordering::Relaxed);
        let may_begin = self.wait(|| first < self.horizon());
        self.begun.store(lane + 1, Ordering::Relaxed);
        may_begin
    }

    /// Says that `lane` is at `row`.
    pub(super) fn at(&self, lane: usize, row: u32) {
        self.positions[lane].0.store(u64::from(row), Ordering::Relaxed);
    }

    /// Says that `lane` is done and holds nobody up any more.
    pub(super) fn done(&self, lane: usize) {
        self.positions[lane].0.store(u64::MAX, Ordering::Relaxed);
    }

    /// The first row that is too far ahead just now.
    pub(super) fn horizon(&self) -> u64 {
        let row = |position: &Position| position.0.load(Ordering::Relaxed);
        let over = self.over.load(Ordering::Relaxed);
        let more = self.positions[over..].iter().take_while(|lane| row(lane) == u64::MAX).count();
        if more > 0 {
            self.over.fetch_max(over + more, Ordering::Relaxed);
        }
        // Of those that have not begun the next one is the slowest.
        let there = self.begun.load(Ordering::Relaxed) + 1;
        let lanes = &self.positions[over + more..self.positions.len().min(there).max(over + more)];
        lanes.iter().map(row).min().unwrap_or(u64::MAX).saturating_add(WINDOW_ROWS)
    }

    /// Makes every lane stop at its next step.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// Waits until `ready`; `false` if the replay was stopped first.
    pub(super) fn wait(&self, ready: impl Fn() -> bool) -> bool {
        for turn in 0_u32.. {
            if ready() {
                return true;
            }
            if self.is_stopped() {
                return false;
            }
            match turn {
                0..64 => std::hint::spin_loop(),
                64..256 => std::thread::yield_now(),
                // There may be far more lanes than processors: those that wait long look seldom.
                _ => std::thread::sleep(Duration::from_micros(20 << ((turn - 256) / 16).min(6))),
            }
        }
        ready()
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
        let progress = Progress::new(&lanes(&trace, true));
        assert!(progress.begin(0) && progress.horizon() == WINDOW_ROWS);
        progress.at(0, 500);
        assert_eq!(progress.horizon(), 2 + WINDOW_ROWS, "the other begins there");
        assert!(progress.begin(1));
        progress.at(1, 700);
        assert_eq!(progress.horizon(), 500 + WINDOW_ROWS);
        progress.done(0);
        assert_eq!(progress.horizon(), 700 + WINDOW_ROWS);
        progress.done(1);
        assert_eq!(progress.horizon(), u64::MAX);
    }

    #[test]
    fn a_wait_ends_when_the_replay_stops() {
        let progress = Progress::new(&[Vec::new()]);
        assert!(progress.wait(|| true));
        progress.stop();
        assert!(!progress.wait(|| false));
    }
}

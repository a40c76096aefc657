//! Where the threads of a case begin and end each round together.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// A meeting of a fixed number of threads.
pub(super) struct Meeting {
    threads: usize,
    barrier: Barrier,
    /// Arrivals at all starts together.
    arrivals: AtomicUsize,
    failed: AtomicBool,
}

impl Meeting {
    pub(super) fn new(threads: usize) -> Self {
        Self {
            threads,
            barrier: Barrier::new(threads),
            arrivals: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
        }
    }

    /// Waits for every thread, the last bit by spinning: a barrier wakes its threads one after
    /// another, over a time in which a fast allocator serves thousands of calls. `round` counts
    /// the starts from 0.
    pub(super) fn start(&self, round: usize) {
        self.barrier.wait();
        self.arrivals.fetch_add(1, Ordering::AcqRel);
        for turn in 0_u32.. {
            if self.arrivals.load(Ordering::Acquire) >= self.threads * (round + 1) {
                return;
            }
            // There may be more threads than processors.
            if turn < 1000 { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
    }

    /// Waits for every thread to say whether its part went well; whether all did.
    ///
    /// Nobody says anything between this and the next start, so all get the same answer.
    pub(super) fn end(&self, well: bool) -> bool {
        if !well {
            self.failed.store(true, Ordering::Relaxed);
        }
        self.barrier.wait();
        !self.failed.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn all_hear_of_a_failure_in_the_round_in_which_it_happens() {
        let meeting = Meeting::new(4);
        let rounds = |lane: usize| {
            for round in 0..10 {
                meeting.start(round);
                if !meeting.end(!(lane == 2 && round == 5)) {
                    return round;
                }
            }
            10
        };
        let rounds = &rounds;
        thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|lane| scope.spawn(move || rounds(lane))).collect();
            for thread in threads {
                assert_eq!(thread.join().unwrap(), 5);
            }
        });
    }
}

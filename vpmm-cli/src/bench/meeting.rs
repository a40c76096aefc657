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

/// One thread's place in a meeting. Each thread takes one, and goes through as many phases as
/// the others do.
pub(super) struct Seat<'a> {
    meeting: &'a Meeting,
    phases: usize,
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

    pub(super) fn seat(&self) -> Seat<'_> {
        Seat { meeting: self, phases: 0 }
    }
}

impl Seat<'_> {
    /// Begins `work` when every thread is here and ends when every thread is done. `None` where
    /// another thread failed, after which there is no further phase.
    pub(super) fn phase<T, E>(
        &mut self,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<Option<T>, E> {
        self.start();
        let done = work();
        let meeting = self.meeting;
        if done.is_err() {
            meeting.failed.store(true, Ordering::Relaxed);
        }
        meeting.barrier.wait();
        // Nobody fails between this and the next start, so all get the same answer.
        let failed = meeting.failed.load(Ordering::Relaxed);
        done.map(|value| (!failed).then_some(value))
    }

    /// Waits for every thread, the last bit by spinning: a barrier wakes its threads one after
    /// another, over a time in which a fast allocator serves thousands of calls.
    fn start(&mut self) {
        let meeting = self.meeting;
        self.phases += 1;
        meeting.barrier.wait();
        meeting.arrivals.fetch_add(1, Ordering::AcqRel);
        for turn in 0_u32.. {
            if meeting.arrivals.load(Ordering::Acquire) >= meeting.threads * self.phases {
                return;
            }
            // There may be more threads than processors.
            if turn < 1000 { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
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
            let mut seat = meeting.seat();
            for round in 0..10 {
                let work = || if lane == 2 && round == 5 { Err(()) } else { Ok(()) };
                match seat.phase(work) {
                    Ok(Some(())) => {}
                    Ok(None) => return (round, true),
                    Err(()) => return (round, false),
                }
            }
            (10, true)
        };
        let rounds = &rounds;
        thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|lane| scope.spawn(move || rounds(lane))).collect();
            for (lane, thread) in threads.into_iter().enumerate() {
                assert_eq!(thread.join().unwrap(), (5, lane != 2));
            }
        });
    }
}

//! Threads that do a part each and meet behind it.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};

/// Where they meet, and one of them looks at everything while all stand still.
pub(crate) struct Meeting {
    all_here: Barrier,
    failed: AtomicBool,
}

impl Meeting {
    pub(crate) fn of(threads: usize) -> Self {
        Self { all_here: Barrier::new(threads), failed: AtomicBool::new(false) }
    }

    /// Does this thread's part and meets the others; one looks. Panics where that failed here, and is `false`
    /// where it failed elsewhere: who fails comes to the meeting all the same, since the others wait for it there.
    pub(crate) fn after(&self, part: impl FnOnce(), look: impl FnOnce()) -> bool {
        let done = self.attempt(part);
        let is_leader = self.all_here.wait().is_leader();
        let looked = self.attempt(|| {
            if is_leader && !self.failed.load(Ordering::Relaxed) {
                look();
            }
        });
        self.all_here.wait();
        if let Err(panic) = done.and(looked) {
            resume_unwind(panic);
        }
        !self.failed.load(Ordering::Relaxed)
    }

    fn attempt(&self, part: impl FnOnce()) -> std::thread::Result<()> {
        let outcome = catch_unwind(AssertUnwindSafe(part));
        self.failed.fetch_or(outcome.is_err(), Ordering::Relaxed);
        outcome
    }
}

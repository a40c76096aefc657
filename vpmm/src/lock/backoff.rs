//! How long a thread stays away from a lock that another holds.

use std::time::Duration;

/// The longest pause between two looks, in spin hints: some microseconds where a hint takes 40 ns.
const LONGEST: u32 = 128;
/// Then the holder may be waiting for a processor, and has the thread's so many times.
const YIELDS: u32 = 8;
/// Then it may be waiting for the driver, and the thread sleeps.
const NAP: Duration = Duration::from_micros(20);
const LONGEST_NAP: Duration = Duration::from_micros(500);

/// Pauses that double. Who looks at a lock takes its cache line from whoever is about to use it next, so
/// threads that look without a pause make every section wait for the line, and for all lines of what is
/// guarded, too, as those go from hand to hand with the lock. While the others pause, the thread that
/// has them goes on.
pub(super) struct Backoff {
    hints: u32,
    yields: u32,
    nap: Duration,
}

impl Backoff {
    pub(super) const fn new() -> Self {
        Self { hints: 4, yields: 0, nap: NAP }
    }

    pub(super) fn pause(&mut self) {
        if self.hints <= LONGEST {
            (0..self.hints).for_each(|_| std::hint::spin_loop());
            self.hints *= 2;
        } else if self.yields < YIELDS {
            std::thread::yield_now();
            self.yields += 1;
        } else {
            std::thread::sleep(self.nap);
            self.nap = (self.nap * 2).min(LONGEST_NAP);
        }
    }
}

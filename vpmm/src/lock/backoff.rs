//! How long a thread stays away from a lock that another holds.

/// The longest pause between two looks, in spin hints: some microseconds where a hint takes 40 ns.
const LONGEST: u32 = 128;

/// Pauses that double. Who looks at a lock takes its cache line from whoever is about to use it next, so
/// threads that look without a pause make every section wait for the line, and for all lines of what is
/// guarded, too, as those go from hand to hand with the lock. While the others pause, the thread that
/// has them goes on.
pub(super) struct Backoff {
    next: u32,
}

impl Backoff {
    pub(super) const fn new() -> Self {
        Self { next: 4 }
    }

    /// Pauses. Not if the pauses have become as long as they may: then the holder may be waiting for a
    /// processor, and the caller does better to give its own away.
    pub(super) fn pause(&mut self) -> bool {
        if self.next > LONGEST {
            return false;
        }
        (0..self.next).for_each(|_| std::hint::spin_loop());
        self.next *= 2;
        true
    }

    /// Begins with short pauses again.
    pub(super) fn reset(&mut self) {
        *self = Self::new();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_end() {
        let mut backoff = Backoff::new();
        assert_eq!(std::iter::from_fn(|| backoff.pause().then_some(())).count(), 6);
        backoff.reset();
        assert!(backoff.pause());
    }
}

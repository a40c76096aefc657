//! How much memory the device turned out to have, where that is less than the pool may have.
//!
//! A pool without a limit learns it from a request for memory that the driver refuses. What could not be
//! made has to come from what is free already, but for as much as there is: the two together may serve
//! what neither does.

#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How long that is taken for granted, in microseconds: others give memory back, too, but an attempt in
/// vain costs a driver call for each extent that it makes and gives back.
const TAKEN_FOR_GRANTED: u64 = 1_000_000;

/// The most granules that the pool can have.
#[derive(Default)]
pub(in crate::default) struct Full {
    most: AtomicU64,
    /// On the pool's clock; 0 for never.
    until: AtomicU64,
}

/// Microseconds on the pool's clock.
fn micros(now: Duration) -> u64 {
    u64::try_from(now.as_micros()).unwrap_or(u64::MAX)
}

impl Full {
    /// The device has room for so many granules altogether.
    pub(in crate::default) fn note(&self, most: u64, now: Duration) {
        self.most.store(most, Ordering::Relaxed);
        self.until.store(micros(now).saturating_add(TAKEN_FOR_GRANTED), Ordering::Relaxed);
    }

    /// Before memory is refused the device is asked once more.
    pub(in crate::default) fn forget(&self) {
        self.until.store(0, Ordering::Relaxed);
    }

    /// The most that the pool can have, as far as is known. Whoever asks holds `growing`, as whoever notes.
    pub(in crate::default) fn most(&self, now: impl FnOnce() -> Duration) -> u64 {
        let until = self.until.load(Ordering::Relaxed);
        if until > 0 && micros(now()) < until {
            self.most.load(Ordering::Relaxed)
        } else {
            u64::MAX
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_device_has_is_taken_for_granted_for_a_second() {
        let full = Full::default();
        let most = |millis| full.most(|| Duration::from_millis(millis));
        assert_eq!(most(0), u64::MAX);
        full.note(40, Duration::from_millis(500));
        assert_eq!([500, 1499, 1500].map(most), [40, 40, u64::MAX]);
        full.note(30, Duration::from_millis(2000));
        assert_eq!(most(2001), 30);
        full.forget();
        assert_eq!(most(2001), u64::MAX);
    }
}

//! Imports that ended while their device could not be waited for, as while a stream of it captures: what they
//! mapped stays until somebody has waited for the device.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use smallvec::{SmallVec, smallvec};

use super::import::Mappings;
use crate::device::StreamHandle;
use crate::driver::{Awaited, Driver, StreamWatcher};
use crate::ordering::Mark;

/// A driver's, which keep it, and so themselves, until then or until the process ends.
#[derive(Default)]
pub(super) struct Limbo(Mutex<Left>);

#[derive(Default)]
struct Left {
    last: u64,
    /// By ascending number.
    mappings: Vec<(u64, Mappings)>,
}

impl Limbo {
    pub(super) fn keep(driver: &Driver, mappings: Mappings) {
        let limbo = driver.companion::<Self>();
        {
            let mut left = limbo.left();
            left.last += 1;
            let number = left.last;
            left.mappings.push((number, mappings));
        }
        let watcher: Weak<dyn StreamWatcher> = Arc::downgrade(limbo) as _;
        driver.watch_streams(watcher);
    }

    fn left(&self) -> MutexGuard<'_, Left> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StreamWatcher for Limbo {
    fn stream_ends(&self, _: StreamHandle) {}

    fn marks(&self, of: Awaited) -> SmallVec<[Mark; 2]> {
        match of {
            Awaited::Device(ordinal) => {
                smallvec![Mark { pool: 0, stream: ordinal, point: self.left().last, epoch: 0 }]
            }
            Awaited::Stream(..) => SmallVec::new(),
        }
    }

    fn passed(&self, mark: &Mark) {
        let is_over = |(number, mappings): &mut (u64, Mappings)| {
            *number <= mark.point && mappings.device().ordinal() == mark.stream
        };
        let over: Vec<_> = self.left().mappings.extract_if(.., is_over).collect();
        // Without the lock, and in the device's context, which has just been waited for.
        over.into_iter().for_each(|(_, mappings)| mappings.unmap());
    }
}

//! The operation of a pass that spends the most time in the driver, and in which calls.

use super::lanes::Step;
use crate::device::{FunctionSpent, Ledger};
use crate::trace::Action;

/// An operation, and its time in driver calls.
#[derive(Clone, Debug)]
pub struct Longest {
    /// What it was.
    pub action: Action,
    /// The slot that it was about.
    pub slot: u32,
    /// Microseconds in driver calls.
    pub driver_us: f64,
    /// In which functions, where that is known: what took the most time first.
    pub by_function: Vec<FunctionSpent>,
}

impl Longest {
    /// Whichever took longer.
    pub fn max(self, other: Self) -> Self {
        if other.driver_us > self.driver_us { other } else { self }
    }
}

/// What an allocator has spent in driver calls so far.
pub struct Spent<'a> {
    /// Microseconds.
    pub us: Box<dyn Fn() -> f64 + Sync + 'a>,
    /// The same by function.
    pub by_function: Box<dyn Fn() -> Ledger + Sync + 'a>,
}

/// The search for it over the operations of one thread.
pub(super) struct Search<'a> {
    spent: &'a Spent<'a>,
    /// What had been spent before the operation.
    us: f64,
    by_function: Ledger,
    pub(super) longest: Option<Longest>,
}

impl<'a> Search<'a> {
    pub(super) fn new(spent: &'a Spent<'a>) -> Self {
        Self { us: (spent.us)(), by_function: (spent.by_function)(), spent, longest: None }
    }

    /// An operation was made.
    pub(super) fn note(&mut self, step: &Step) {
        let us = (self.spent.us)();
        let driver_us = us - std::mem::replace(&mut self.us, us);
        // Most operations make no call.
        if driver_us <= 0.0 {
            return;
        }
        let now = (self.spent.by_function)();
        let before = std::mem::replace(&mut self.by_function, now);
        if self.longest.as_ref().is_none_or(|longest| driver_us > longest.driver_us) {
            let by_function = self.by_function.since(&before).by_time();
            let Step { action, slot, .. } = *step;
            self.longest = Some(Longest { action, slot, driver_us, by_function });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_two_the_longer_is_the_longest() {
        let of = |slot, driver_us| {
            let (action, by_function) = (Action::Allocate, Vec::new());
            Longest { action, slot, driver_us, by_function }
        };
        assert_eq!(of(1, 5.0).max(of(2, 7.0)).slot, 2);
        assert_eq!(of(1, 7.0).max(of(2, 5.0)).slot, 1);
        assert_eq!(of(1, 7.0).max(of(2, 7.0)).slot, 1, "the first of two");
    }
}

//! What was spent in which driver function.

use std::collections::BTreeMap;

use serde::Serialize;

use super::Machine;

/// How often one driver function was called, and the time that this took.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FunctionSpent {
    /// Its name.
    pub function: &'static str,
    /// Its calls.
    pub calls: u64,
    /// Their time in microseconds: modelled on a simulated machine, measured on another.
    pub us: f64,
}

/// The calls through a machine's [`Driver`](vpmm::Driver) so far, and their time, by function. What the
/// command calls itself is not in it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ledger(BTreeMap<&'static str, (u64, f64)>);

impl Ledger {
    /// As it stands now. None where calls are not timed.
    pub fn of(machine: &Machine) -> Option<Self> {
        let calls = machine.driver().calls();
        if let Some(simulator) = machine.simulator() {
            // With what only the command has called so far: the driver's first call of it costs no more for that.
            let counts: BTreeMap<_, _> = calls.iter().collect();
            let count = |function| counts.get(function).copied().unwrap_or_default();
            let modelled = simulator.modelled_us_by_function().into_iter();
            let spent = modelled.map(|(function, us)| (function, (count(function), us)));
            return Some(Self(spent.collect()));
        }
        let timer = machine.timer()?;
        let times: BTreeMap<_, _> = calls.times().collect();
        let us_of = |function, count| {
            let shown = times.get(function).copied().unwrap_or_default();
            timer.without_clock(count, shown).as_secs_f64() * 1e6
        };
        let spent =
            calls.iter().map(|(function, count)| (function, (count, us_of(function, count))));
        Some(Self(spent.collect()))
    }

    /// What was spent since `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        let spent = self.0.iter().map(|(function, (calls, us))| {
            let (calls_then, us_then) = earlier.0.get(function).copied().unwrap_or_default();
            (*function, (calls.saturating_sub(calls_then), (us - us_then).max(0.0)))
        });
        Self(spent.filter(|(_, (calls, _))| *calls > 0).collect())
    }

    /// Adds what was spent another time.
    pub fn add(&mut self, more: &Self) {
        for (function, (calls, us)) in &more.0 {
            let sum = self.0.entry(function).or_default();
            *sum = (sum.0 + calls, sum.1 + us);
        }
    }

    /// What took the most time first.
    pub fn by_time(&self) -> Vec<FunctionSpent> {
        let spent = self.0.iter();
        let mut spent: Vec<_> = spent
            .map(|(function, (calls, us))| FunctionSpent { function, calls: *calls, us: *us })
            .collect();
        spent.sort_by(|a, b| b.us.total_cmp(&a.us));
        spent
    }
}

#[cfg(test)]
mod tests {
    use vpmm::{Pool, PoolConfig};

    use super::*;
    use crate::device::{Setup, settle};

    #[test]
    fn calls_and_their_time_are_kept_by_function() {
        let machine = Machine::simulated(Setup::default()).unwrap();
        let stream = machine.device().stream().unwrap();
        let pool = Pool::new(machine.device(), &PoolConfig::default()).unwrap();
        // What the command itself has called so far is in neither.
        settle(&machine);
        let (before, all_before) =
            (Ledger::of(&machine).unwrap(), machine.simulator().unwrap().modelled_us());
        let ptr = pool.malloc(64 << 20, &stream).unwrap();
        let now = Ledger::of(&machine).unwrap();
        let all = machine.simulator().unwrap().modelled_us() - all_before;
        let spent = now.since(&before);
        let list = spent.by_time();
        let sum: f64 = list.iter().map(|of| of.us).sum();
        assert!((sum - all).abs() < 1e-6, "{list:?} make {sum}, not {all}");
        assert!(list.windows(2).all(|two| two[0].us >= two[1].us), "{list:?}");
        let creates = list.iter().find(|of| of.function == "cuMemCreate").unwrap();
        assert!(creates.calls >= 1 && creates.us > 5.0, "{creates:?}");
        assert!(now.since(&now).by_time().is_empty());
        let mut twice = spent.clone();
        twice.add(&spent);
        assert!(twice.by_time().iter().zip(&list).all(|(two, one)| two.calls == 2 * one.calls));
        pool.free(ptr, &stream).unwrap();
    }
}

//! Faults at every driver call of a program.

use cuda_sim::Simulator;
use cuda_sys::types::CUresult;
use vpmm::{Device, Driver, Error, Pool};

#[derive(Clone, Copy)]
pub(crate) enum Fault {
    /// The n-th call from now fails, once.
    Once(u64, CUresult),
    /// The n-th call from now and all after it fail.
    FromThen(u64, CUresult),
}

impl Fault {
    pub(crate) fn arm(self, sim: &Simulator) {
        match self {
            Self::Once(n, code) => sim.fail_call(n, code),
            Self::FromThen(n, code) => sim.fail_all_calls_after(n - 1, code),
        }
    }
}

/// Runs a program of so many steps again and again, with a fault armed before one of them: at its
/// first call, then at its second, and so on. `run` tells whether the step failed.
///
/// Past a step's last call the fault is never met. One in a call that may fail without harm (the
/// undoing of a failed step, memory that the device has not) is met and not seen: `unseen` such in
/// a row end a step.
pub(crate) fn every_call_of_every_step(
    steps: usize,
    unseen: u32,
    fault: impl Fn(u64) -> Fault,
    run: impl Fn(usize, Fault) -> bool,
) -> usize {
    let mut failures = 0;
    for step in 0..steps {
        let mut in_a_row = 0;
        for n in 1.. {
            let failed = run(step, fault(n));
            failures += usize::from(failed);
            in_a_row = if failed { 0 } else { in_a_row + 1 };
            if in_a_row > unseen {
                break;
            }
        }
    }
    failures
}

/// Fails each call of a pool's making in turn: nothing is left of the attempt, nor of a pool that was made
/// all the same. Answers how many there were that the making failed with.
pub(crate) fn every_call_of_making(open: impl Fn(&Device) -> Result<Pool, Error>) -> u64 {
    let sim = Simulator::builder().build().unwrap();
    let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
    let before = sim.leaks();
    let mut failures = 0;
    for n in 1.. {
        let calls = sim.calls();
        sim.fail_call(n, CUresult::CUDA_ERROR_UNKNOWN);
        let result = open(&device);
        sim.clear_faults();
        let is_met = sim.calls() - calls >= n;
        failures += u64::from(result.is_err());
        assert!(is_met || result.is_ok(), "call {n}: {:?}", result.err());
        drop(result);
        assert_eq!(sim.leaks(), before, "call {n}");
        if !is_met {
            break;
        }
    }
    sim.assert_clean();
    failures
}

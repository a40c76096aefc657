//! What was live at one time when threads ran side by side.
//!
//! The order of a trace says nothing about it then. So each thread notes the
//! time of every step, an allocation after it was made and a free before it is:
//! what is summed up from the notes was live in truth at that moment, and is
//! never more than what the allocator held.

use std::time::Instant;

use super::lanes::Step;
use crate::trace::Action;

/// When each step of one lane happened, in nanoseconds from the pass's start.
#[derive(Debug)]
pub(super) struct Times {
    start: Instant,
    steps: Vec<u64>,
}

impl Times {
    /// Room for `steps` notes, so that taking one never allocates.
    pub(super) fn new(start: Instant, steps: usize) -> Self {
        Self { start, steps: Vec::with_capacity(steps) }
    }

    /// Notes the time of the lane's next step.
    pub(super) fn note(&mut self) {
        // 584 years of nanoseconds fit.
        self.steps.push(self.start.elapsed().as_nanos() as u64);
    }
}

/// The largest sum of bytes live at one time over all lanes.
pub(super) fn peak_bytes(lanes: &[Vec<Step>], times: &[Times]) -> u64 {
    // At equal times frees come first: false sorts before true.
    let mut changes: Vec<(u64, bool, u64)> = Vec::new();
    for (lane, times) in lanes.iter().zip(times) {
        changes.extend(
            lane.iter()
                .zip(&times.steps)
                .map(|(step, time)| (*time, step.action == Action::Allocate, step.bytes)),
        );
    }
    changes.sort_unstable();
    let (mut live, mut peak) = (0_u128, 0_u128);
    for (_, made, bytes) in changes {
        if made {
            live += u128::from(bytes);
            peak = peak.max(live);
        } else {
            live = live.saturating_sub(u128::from(bytes));
        }
    }
    u64::try_from(peak).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::super::lanes::lanes;
    use super::*;
    use crate::trace::Trace;

    #[test]
    fn the_peak_follows_the_times_not_the_rows() {
        let rows = "Thread,Action,Pointer,Size\n1,allocate,0x1,10\n2,allocate,0x2,20\n\
                    1,free,0x1,10\n2,free,0x2,20\n";
        let trace = Trace::read("t", rows.as_bytes()).unwrap();
        let lanes = lanes(&trace, true);
        let peak = |first: &[u64], second: &[u64]| {
            let times =
                [first, second].map(|steps| Times { start: Instant::now(), steps: steps.to_vec() });
            peak_bytes(&lanes, &times)
        };
        assert_eq!(peak(&[1, 3], &[2, 4]), 30);
        assert_eq!(peak(&[1, 2], &[3, 4]), 20);
        assert_eq!(peak(&[1, 2], &[2, 4]), 20, "a free at the same time comes first");
        assert_eq!(peak(&[1], &[]), 10, "steps that did not happen do not count");
    }
}

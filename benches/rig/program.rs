//! Programs that go through an allocator pass by pass: traces, and random sizes.

use vpmm_cli::trace::{Action, Trace};

use super::{Lane, Random};

/// What is asked of the allocator: so many bytes for a slot, or none any more.
#[derive(Clone, Copy)]
pub(crate) struct Step {
    pub(crate) slot: usize,
    pub(crate) lane: Lane,
    pub(crate) bytes: Option<usize>,
}

/// One pass.
pub(crate) struct Program {
    pub(crate) steps: Vec<Step>,
    /// What the steps leave live, and where it is freed: no part of the pass.
    pub(crate) left: Vec<(usize, Lane)>,
    pub(crate) slots: usize,
    pub(crate) lanes: usize,
}

impl Program {
    /// The calls of a trace, each on its stream.
    pub(crate) fn of_trace(trace: &Trace) -> Self {
        let step = |operation: &vpmm_cli::trace::Operation| {
            let slot = operation.slot as usize;
            let bytes = match operation.action {
                Action::Allocate => {
                    Some(usize::try_from(trace.allocations[slot].bytes).expect("a host of 64 bits"))
                }
                Action::Free => None,
            };
            Step { slot, lane: operation.stream as Lane, bytes }
        };
        let left = |&slot: &u32| (slot as usize, trace.allocations[slot as usize].stream as Lane);
        Self {
            steps: trace.operations.iter().map(step).collect(),
            left: trace.leaked.iter().map(left).collect(),
            slots: trace.allocations.len(),
            lanes: trace.streams as usize,
        }
    }

    /// Three allocations for each free until so many are live, then around that many, in the end frees
    /// only: what a round of `vpmm bench`'s random cases is, with other numbers.
    pub(crate) fn random(least: usize, most: usize, live: usize, calls: usize) -> Self {
        let mut random = Random::new();
        let mut steps = Vec::with_capacity(calls);
        let mut held = Vec::new();
        let mut vacant: Vec<usize> = (0..live).collect();
        while steps.len() < calls {
            let left = calls - steps.len();
            let frees = held.len() >= left || vacant.is_empty() || random.between(0, 3) == 0;
            if frees && !held.is_empty() {
                let slot = held.swap_remove(random.between(0, held.len() - 1));
                vacant.push(slot);
                steps.push(Step { slot, lane: 0, bytes: None });
            } else if let Some(slot) = vacant.pop() {
                held.push(slot);
                steps.push(Step { slot, lane: 0, bytes: Some(random.between(least, most)) });
            }
        }
        Self { steps, left: Vec::new(), slots: live, lanes: 1 }
    }
}

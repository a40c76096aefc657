//! A driver that has nothing left to do for those before.

use std::hint::spin_loop;
use std::time::{Duration, Instant};

use super::Machine;
use super::handles::Handles;

/// What is created and given back: as little as can be.
const BYTES: u64 = 2 << 20;
/// Two GiB are scrubbed meanwhile, on an H200.
const WINDOW: Duration = Duration::from_millis(5);
/// The books of two GiB take 500 µs, the creation alone 8 to 70.
const QUICK: Duration = Duration::from_micros(100);
/// After so many quick creations nothing is left, as far as can be seen.
const QUIET: u32 = 2;
/// A whole GPU's memory is scrubbed by then.
const PATIENCE: Duration = Duration::from_secs(1);

/// Has the driver be done with memory that was given back, by whomever. It is scrubbed in the background, 2.5 ms
/// for each GiB, and whichever cuMemCreate comes next does the books of all that is scrubbed by then: another
/// quarter of a millisecond for each GiB, however little it creates. So that this is not charged to what is
/// measured next, small handles are created until they are quick.
///
/// Takes ten milliseconds where nothing was given back, and a second at most. Only a help: where the driver refuses,
/// what is measured will meet the same, and say so.
pub fn settle(machine: &Machine) {
    let _ = try_settle(machine);
}

fn try_settle(machine: &Machine) -> vpmm::Result<()> {
    // A model has nothing in the background.
    let window = if machine.simulator().is_some() { Duration::ZERO } else { WINDOW };
    let bytes = BYTES.next_multiple_of(machine.device().granularity()?);
    let (began, mut quiet) = (Instant::now(), 0);
    while quiet < QUIET && began.elapsed() < PATIENCE {
        // Not asleep: a core that has slept is a slow one at first.
        let since = Instant::now();
        while since.elapsed() < window {
            spin_loop();
        }
        let mut handles = Handles::reserve(machine.calls(), 1, bytes)?;
        let since = Instant::now();
        handles.create()?;
        quiet = if since.elapsed() < QUICK { quiet + 1 } else { 0 };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Setup;

    #[test]
    fn nothing_of_it_stays() {
        let machine = Machine::simulated(Setup::default()).unwrap();
        let simulator = machine.simulator().unwrap();
        settle(&machine);
        let calls = simulator.call_counts();
        assert!(calls["cuMemCreate"] >= u64::from(QUIET), "{calls:?}");
        assert_eq!(calls["cuMemCreate"], calls["cuMemRelease"]);
        assert_eq!(simulator.memory_used(0), 0);
        assert!(simulator.report().misuse.is_empty());
    }
}

//! The smallest limit at which a trace completes.
//!
//! ```text
//! search ─ limit ─▶ Session (a fresh allocator, one pass) ─▶ completes or not
//! ```
//!
//! The limit is what an allocator may hold; the fit is that limit by the peak of
//! live bytes. No attempt does device work, so a fit says what the allocator's own
//! placement needs, not what waiting for the GPU would.

mod search;

use std::path::PathBuf;

use indicatif::ProgressBar;

use crate::backend::AllocatorSpec;
use crate::device::Machine;
use crate::replay::{Outcome, RunError, Session, Settings};
use crate::trace::Trace;
use search::search;

/// What a search came to.
#[derive(Debug)]
pub struct Fit {
    /// The limit that was found: `None` where the trace does not complete with all of
    /// the device's free memory.
    pub found: Option<Found>,
    /// How many limits were tried.
    pub attempts: u32,
    /// The unit in which limits were tried.
    pub granule_bytes: u64,
    /// Logs that the last attempt has left, and that lack so many rows.
    pub lost_rows: Vec<(PathBuf, u64)>,
}

/// The limit that was found, and the replay at it.
#[derive(Debug)]
pub struct Found {
    /// The limit.
    pub limit_bytes: u64,
    /// Limits above it at which the trace does not complete, of those that were tried.
    pub fails_above_bytes: Vec<u64>,
    /// The replay at the limit.
    pub outcome: Outcome,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FitError {
    /// The allocator takes no limit.
    #[error("{0} has no limit that could be searched for; allocators that have one: {list}", list = limited())]
    Unlimited(AllocatorSpec),
    /// A replay came to nothing.
    #[error(transparent)]
    Run(#[from] RunError),
    /// A replay failed, and not for want of memory.
    #[error("a replay failed")]
    Failed(Box<Outcome>),
}

fn limited() -> String {
    let names = AllocatorSpec::DIRECT.iter().filter(|spec| spec.has_limit());
    names.map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// Searches for the smallest limit at which `trace` completes through `allocator`, each
/// attempt on an allocator of its own. Says each limit to `attempt` before it is tried.
///
/// # Errors
/// [`FitError`]. Running out of memory is none.
pub fn fit(
    trace: &Trace,
    allocator: &AllocatorSpec,
    machine: &Machine,
    session: &Session<'_>,
    progress: &ProgressBar,
    mut attempt: impl FnMut(u32, u64),
) -> Result<Fit, FitError> {
    if !allocator.has_limit() {
        return Err(FitError::Unlimited(allocator.clone()));
    }
    let device = machine.device();
    let granule_bytes = device.granularity().map_err(RunError::Device)?;
    let free_bytes = device.free_memory().map_err(RunError::Device)?;
    // A limit of 0 is none to some allocators, and a trace of nothing completes with any.
    let least = trace.peak_live_bytes.div_ceil(granule_bytes).max(1);
    let (mut attempts, mut lost_rows) = (0, Vec::new());
    let found = search(least..=free_bytes / granule_bytes, |granules| {
        attempts += 1;
        let limit_bytes = granules * granule_bytes;
        attempt(attempts, limit_bytes);
        let settings = Settings {
            limit_bytes: Some(limit_bytes),
            passes: 1,
            threads: false,
            paced: false,
            longest: false,
            verify_stride_bytes: None,
        };
        let run = session.run(allocator, settings, progress);
        lost_rows = run.as_ref().map_or_else(|_| Vec::new(), |outcome| outcome.lost_rows.clone());
        match run {
            Ok(outcome) if outcome.is_failure() => Err(FitError::Failed(Box::new(outcome))),
            Ok(outcome) => Ok((!outcome.is_out_of_memory()).then_some(outcome)),
            Err(error) => Err(error.into()),
        }
    })?;
    let found = found.map(|enough| Found {
        limit_bytes: enough.granules * granule_bytes,
        fails_above_bytes: enough.fails_above.iter().map(|g| g * granule_bytes).collect(),
        outcome: enough.result,
    });
    Ok(Fit { found, attempts, granule_bytes, lost_rows })
}

#[cfg(test)]
mod tests {
    use cuda_sys::types::CUresult;

    use super::*;
    use crate::device::Setup;

    /// Else the search would go on, and tell a limit at which nothing completes.
    #[test]
    fn a_failure_is_no_want_of_memory() {
        let rows = "Thread,Time,Action,Pointer,Size,Stream\n1,x,allocate,0x1,1000,0\n";
        let trace = Trace::read("t", rows.as_bytes()).unwrap();
        let machine = Machine::simulated(Setup::default()).unwrap();
        let session = Session::new(&trace, &machine, false).unwrap();
        let call = "cuMemAllocFromPoolAsync";
        machine.simulator().unwrap().fail_nth(call, 1, CUresult::CUDA_ERROR_UNKNOWN);
        let mut attempts = 0;
        let allocator = AllocatorSpec::CudaAsync;
        let bar = ProgressBar::hidden();
        let found = fit(&trace, &allocator, &machine, &session, &bar, |_, _| attempts += 1);
        let Err(FitError::Failed(outcome)) = found else { panic!("{found:?}") };
        assert!(outcome.is_failure() && outcome.stop.is_some() && attempts == 1, "{outcome:?}");
    }
}

//! What is measured of a trace at one factor.

use std::num::NonZeroU32;

use serde_json::{Value, json};
use vpmm_cli::trace::Trace;

use crate::Failure;
use crate::replay::{DEVICE_BYTES, Outcome, Run, replay};

const GRANULE_BYTES: u64 = 2 << 20;

/// Scaled requests are multiples of this, as those of most programs are.
const SIZE_STEP: u64 = 512;

/// The search for a limit stops at this fraction of the peak, or at one granule.
const PRECISION: u64 = 10_000;

/// One trace at one factor. Memory is by the peak of what was live.
pub(crate) struct Figures {
    /// The factor.
    factor: f64,
    /// The peak of what was live.
    live_bytes: u64,
    /// The smallest limit that was found to be enough.
    limit_bytes: u64,
    /// One pass at that limit.
    pub(crate) at_limit: Outcome,
    /// One pass without a limit.
    pub(crate) roomy: Outcome,
    /// Several passes without one.
    pub(crate) settled: Outcome,
}

impl Figures {
    /// The smallest limit.
    pub(crate) fn limit(&self) -> f64 {
        self.by_live(self.limit_bytes)
    }

    /// The most that was held with room to grow, in one pass.
    pub(crate) fn held(&self) -> f64 {
        self.by_live(self.roomy.peak_mapped_bytes)
    }

    /// The same in several passes.
    pub(crate) fn held_settled(&self) -> f64 {
        self.by_live(self.settled.peak_mapped_bytes)
    }

    fn by_live(&self, bytes: u64) -> f64 {
        bytes as f64 / self.live_bytes as f64
    }

    /// Everything, under the trace's name.
    pub(crate) fn json(&self, trace: &str) -> Value {
        json!({
            "trace": trace,
            "factor": self.factor,
            "peak_live_bytes": self.live_bytes,
            "limit_bytes": self.limit_bytes,
            "limit": outcome_json(&self.at_limit),
            "one_pass": outcome_json(&self.roomy),
            "all_passes": outcome_json(&self.settled),
        })
    }
}

fn outcome_json(outcome: &Outcome) -> Value {
    json!({
        "peak_mapped_bytes": outcome.peak_mapped_bytes,
        "driver_time_us": outcome.driver_us,
        "last_pass_driver_time_us": outcome.last_pass_us,
        "longest_call_us": outcome.longest_us,
    })
}

/// Measures `trace` with its requests scaled by `factor`.
pub(crate) fn measure(trace: &Trace, factor: f64, run: Run) -> Result<Figures, Failure> {
    let trace = scaled(trace, factor);
    let live_bytes = trace.peak_live_bytes;
    if live_bytes == 0 {
        return Err("the trace allocates nothing".into());
    }
    let once = Run { passes: NonZeroU32::MIN, ..run };
    let (limit_bytes, at_limit) = smallest_limit(&trace, once)?;
    let unlimited =
        |run| replay(&trace, None, run)?.ok_or_else(|| Failure::from("more than the device has"));
    let roomy = unlimited(once)?;
    let settled = unlimited(run)?;
    Ok(Figures { factor, live_bytes, limit_bytes, at_limit, roomy, settled })
}

/// The trace with its requests scaled, all but those of factor 1 rounded up to [`SIZE_STEP`].
fn scaled(trace: &Trace, factor: f64) -> Trace {
    let mut trace = trace.clone();
    if factor != 1.0 {
        for allocation in &mut trace.allocations {
            let bytes = (allocation.bytes as f64 * factor) as u64;
            allocation.bytes = bytes.max(1).next_multiple_of(SIZE_STEP);
        }
        trace.peak_live_bytes = trace.peak_live_bytes_of(|_| true);
    }
    trace
}

/// A limit that is enough, in bytes, although one lower by a granule, or by [`PRECISION`] where that
/// is more, is not; and one pass at it. Outwards from 4 % above the peak, then by halves.
fn smallest_limit(trace: &Trace, run: Run) -> Result<(u64, Outcome), Failure> {
    let attempt = |granules: u64| replay(trace, Some(granules * GRANULE_BYTES), run);
    let least = trace.peak_live_bytes.div_ceil(GRANULE_BYTES);
    // What is live alone needs `least`: one less is not enough.
    let mut short = least - 1;
    let most = DEVICE_BYTES / GRANULE_BYTES;
    let mut enough = (least * 104 / 100).min(most);
    let mut outcome = loop {
        if let Some(outcome) = attempt(enough)? {
            break outcome;
        }
        if enough >= most {
            return Err("no limit that the device has memory for is enough".into());
        }
        short = enough;
        enough = (enough * 106 / 100 + 1).min(most);
    };
    let precision = 1 + least / PRECISION;
    while enough - short > precision {
        let middle = short + (enough - short) / 2;
        match attempt(middle)? {
            Some(better) => (enough, outcome) = (middle, better),
            None => short = middle,
        }
    }
    Ok((enough * GRANULE_BYTES, outcome))
}

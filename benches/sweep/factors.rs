//! The factors that a trace's requests are scaled by.

/// Always tried, 1 first: the trace as it is.
const ALWAYS: [f64; 6] = [1.0, 0.9, 1.13, 0.77, 1.31, 0.55];

/// The golden ratio's fraction: its multiples fall evenly between whole numbers, however many there
/// are, so that more factors refine a sweep and do not move it.
const STEP: f64 = 0.618034;
/// Where the sequence begins.
const START: f64 = 0.37;

/// The factors that are always tried, and `more` between 0.5 and 1.5.
pub(crate) fn first(more: u32) -> Vec<f64> {
    let between = (0..more).map(|k| 0.5 + ((f64::from(k) + START) * STEP).fract());
    ALWAYS.into_iter().chain(between).collect()
}

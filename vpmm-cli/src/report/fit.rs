//! The smallest limits, for people and for programs.

use serde::Serialize;

use super::{figure, name_among, or_dash, render, round, short_name};
use crate::backend::AllocatorSpec;
use crate::bytes::ByteCount;
use crate::fit::Fit;
use crate::trace::Trace;

/// One result, as `--json` prints it: these keys, in this order.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FitReport {
    /// The trace as it was named on the command line.
    pub trace: String,
    /// The allocator.
    pub allocator: String,
    /// The trace's peak of live bytes.
    pub peak_live_bytes: u64,
    /// The limit that was found; null where the trace completes with none.
    pub limit_bytes: Option<u64>,
    /// The one by the other.
    pub ratio: Option<f64>,
    /// Host nanoseconds inside the allocator per operation at that limit, driver calls included.
    pub ns_per_op: Option<f64>,
    /// The time in driver calls at that limit.
    pub driver_time_us: Option<f64>,
    /// The greatest limit above it at which the trace fails again, of those that were tried; null where
    /// it completes at all of them.
    #[serde(rename = "fails_above")]
    pub fails_above_bytes: Option<u64>,
    /// Limits that were tried.
    #[serde(skip)]
    pub attempts: u32,
    /// How far above the limit the trace fails again, in granules, wherever it was tried.
    #[serde(skip)]
    pub fails_above_granules: Vec<u64>,
}

impl FitReport {
    /// Puts a search's result into figures; `None` where it came to nothing.
    pub fn new(trace: &Trace, allocator: &AllocatorSpec, fit: Option<&Fit>) -> Self {
        let found = fit.and_then(|fit| fit.found.as_ref());
        let outcome = found.map(|found| &found.outcome);
        let ratio = |limit_bytes: u64| limit_bytes as f64 / trace.peak_live_bytes as f64;
        let fails_above_granules = found.zip(fit).map(|(found, fit)| {
            let above = found.fails_above_bytes.iter();
            above.map(|bytes| (bytes - found.limit_bytes) / fit.granule_bytes).collect()
        });
        Self {
            trace: trace.name.clone(),
            allocator: allocator.to_string(),
            peak_live_bytes: trace.peak_live_bytes,
            limit_bytes: found.map(|found| found.limit_bytes),
            ratio: found
                .filter(|_| trace.peak_live_bytes > 0)
                .map(|found| round(ratio(found.limit_bytes), 6)),
            ns_per_op: outcome.and_then(|o| o.best_ns_per_op()).map(|ns| round(ns, 2)),
            driver_time_us: outcome.and_then(|o| o.driver_time_us).map(|us| round(us, 2)),
            fails_above_bytes: found.and_then(|found| found.fails_above_bytes.last().copied()),
            attempts: fit.map_or(0, |fit| fit.attempts),
            fails_above_granules: fails_above_granules.unwrap_or_default(),
        }
    }
}

const HEADER: [&str; 9] = [
    "trace",
    "allocator",
    "peak live",
    "limit",
    "limit / live",
    "ns/op",
    "driver time",
    "attempts",
    "fails again at",
];

/// The results as a table, without a line end.
pub fn fit_table(reports: &[FitReport]) -> String {
    let names = || reports.iter().map(|report| report.trace.as_str());
    let rows = reports.iter().map(|report| {
        let mut row = row(report);
        row[0] = name_among(&report.trace, names()).to_owned();
        row
    });
    render(HEADER, 2, rows)
}

fn row(report: &FitReport) -> [String; HEADER.len()] {
    let above: Vec<String> =
        report.fails_above_granules.iter().map(|granules| format!("+{granules}")).collect();
    [
        short_name(&report.trace).to_owned(),
        report.allocator.clone(),
        ByteCount(report.peak_live_bytes).to_string(),
        // Three figures would hide the fit: whole granules come to whole MiB.
        or_dash(report.limit_bytes.map(|bytes| format!("{} MiB", bytes >> 20))),
        or_dash(report.ratio.map(|ratio| format!("{ratio:.5}"))),
        or_dash(report.ns_per_op.map(figure)),
        or_dash(report.driver_time_us.map(|us| format!("{:.2} ms", us / 1000.0))),
        report.attempts.to_string(),
        or_dash((!above.is_empty()).then(|| above.join(" "))),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> FitReport {
        FitReport {
            trace: "traces/gpt_train.csv.gz".into(),
            allocator: "paged".into(),
            peak_live_bytes: 17_240_000_000,
            limit_bytes: Some(8231 << 21),
            ratio: Some(1.001_26),
            ns_per_op: Some(312.4),
            driver_time_us: Some(21_400.0),
            fails_above_bytes: Some(8273 << 21),
            attempts: 14,
            fails_above_granules: vec![1, 42],
        }
    }

    #[test]
    fn the_keys_are_these_and_no_others() {
        assert_eq!(
            serde_json::to_string(&report()).unwrap(),
            "{\"trace\":\"traces/gpt_train.csv.gz\",\"allocator\":\"paged\",\
             \"peak_live_bytes\":17240000000,\"limit_bytes\":17261658112,\"ratio\":1.00126,\
             \"ns_per_op\":312.4,\"driver_time_us\":21400.0,\"fails_above\":17349738496}"
        );
        let monotonic = FitReport { fails_above_bytes: None, ..report() };
        let line = serde_json::to_string(&monotonic).unwrap();
        assert!(line.ends_with(",\"fails_above\":null}"), "{line}");
    }

    #[test]
    fn rows_of_two_traces_with_one_name_can_be_told_apart() {
        let other = FitReport { trace: "serve/gpt_train.csv".into(), ..report() };
        let table = fit_table(&[report(), other]);
        for name in ["traces/gpt_train.csv.gz ", "serve/gpt_train.csv "] {
            assert!(table.contains(name), "{table}");
        }
    }

    #[test]
    fn a_row_tells_where_it_fails_again() {
        assert_eq!(
            row(&report()),
            [
                "gpt_train",
                "paged",
                "17.2 GB",
                "16462 MiB",
                "1.00126",
                "312",
                "21.40 ms",
                "14",
                "+1 +42"
            ]
        );
        let none =
            FitReport { limit_bytes: None, ratio: None, fails_above_granules: vec![], ..report() };
        assert_eq!(row(&none)[3..5], ["–", "–"]);
        assert_eq!(row(&none)[8], "–");
    }
}

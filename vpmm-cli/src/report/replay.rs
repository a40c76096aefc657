//! What replays came to, for people and for programs.

use serde::Serialize;

use super::{figure, name_among, or_dash, render, round, short_name};
use crate::backend::AllocatorSpec;
use crate::bytes::ByteCount;
use crate::device::FunctionSpent;
use crate::replay::Outcome;

/// One result, as `--json` prints it. The keys up to `oom` are fixed, in this
/// order; what follows may grow.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The trace as it was named on the command line.
    pub trace: String,
    /// The allocator.
    pub allocator: String,
    /// The device: `sim`, or `cuda:N` and the GPU's name.
    pub device: String,
    /// Operations of one pass; how many were done where the pass stopped.
    pub ops: u64,
    /// Host nanoseconds inside the allocator per operation: of the fastest pass
    /// after the first, or of the only one.
    pub ns_per_op: Option<f64>,
    /// The most bytes live at one time: the trace's own peak, or with threads what
    /// their order came to.
    pub peak_live_bytes: u64,
    /// The most bytes of device memory that the allocator held at one time.
    pub peak_mapped_bytes: u64,
    /// The one by the other.
    pub utilisation: Option<f64>,
    /// The allocator's driver calls over all passes, its making included.
    pub driver_calls: u64,
    /// Their time: modelled on the simulator, measured on a GPU.
    pub driver_time_us: Option<f64>,
    /// Whether memory ran out.
    pub oom: bool,
    /// Nanoseconds per operation of every pass in order; the first is cold.
    pub pass_ns_per_op: Vec<f64>,
    /// Threads that called the allocator.
    pub threads: usize,
    /// Streams of the trace.
    pub streams: u32,
    /// The limit that was set.
    pub limit_bytes: Option<u64>,
    /// Whether contents were checked.
    pub verified: bool,
    /// Allocations whose contents were lost.
    pub mismatches: usize,
    /// What ended the replay early, or kept the allocator from being made.
    pub error: Option<String>,
    /// The line of the trace that could not be served.
    pub error_line: Option<u64>,
    /// `ns_per_op` without the time in driver calls.
    pub host_ns_per_op: Option<f64>,
    /// The most driver time of one operation of any pass, where that was asked for.
    pub longest_driver_us: Option<f64>,
    /// The line of the trace that its allocation is in.
    pub longest_line: Option<u64>,
    /// `driver_calls` and `driver_time_us` by function, what took the most time first.
    pub driver_by_function: Option<Vec<FunctionSpent>>,
    /// `longest_driver_us` by function.
    pub longest_by_function: Option<Vec<FunctionSpent>>,
    /// `driver_time_us` of every pass in order, without the allocator's making.
    pub pass_driver_time_us: Option<Vec<f64>>,
}

impl Report {
    /// Puts an outcome into figures.
    pub fn new(
        trace: &crate::trace::Trace,
        allocator: &AllocatorSpec,
        device: &str,
        settings: &crate::replay::Settings,
        outcome: &Outcome,
    ) -> Self {
        let (stop, longest) = (outcome.stop.as_ref(), outcome.longest.as_ref());
        Self {
            trace: trace.name.clone(),
            allocator: allocator.to_string(),
            device: device.to_owned(),
            ops: outcome.operations,
            ns_per_op: outcome.best_ns_per_op().map(|ns| round(ns, 2)),
            peak_live_bytes: outcome.peak_live_bytes,
            peak_mapped_bytes: outcome.peak_mapped_bytes,
            utilisation: outcome.utilisation().map(|u| round(u, 5)),
            driver_calls: outcome.driver_calls,
            driver_time_us: outcome.driver_time_us.map(|us| round(us, 2)),
            oom: outcome.is_out_of_memory(),
            pass_ns_per_op: outcome.ns_per_op.iter().map(|ns| round(*ns, 2)).collect(),
            threads: outcome.threads,
            streams: trace.streams,
            limit_bytes: settings.limit_bytes,
            verified: settings.verify_stride_bytes.is_some(),
            mismatches: outcome.mismatches.len(),
            error: stop
                .map(|stop| &stop.error)
                .or(outcome.unmade.as_ref())
                .map(ToString::to_string),
            error_line: stop.map(|stop| trace.allocations[stop.slot as usize].line),
            host_ns_per_op: outcome.best_host_ns_per_op().map(|ns| round(ns, 2)),
            longest_driver_us: longest.map(|longest| round(longest.driver_us, 2)),
            longest_line: longest.map(|of| trace.allocations[of.slot as usize].line),
            driver_by_function: outcome.by_function.as_deref().map(rounded),
            longest_by_function: longest
                .map(|longest| rounded(&longest.by_function))
                .filter(|functions| !functions.is_empty()),
            pass_driver_time_us: outcome
                .pass_driver_time_us
                .as_deref()
                .map(|passes| passes.iter().map(|us| round(*us, 2)).collect()),
        }
    }
}

fn rounded(spent: &[FunctionSpent]) -> Vec<FunctionSpent> {
    spent.iter().map(|of| FunctionSpent { us: round(of.us, 2), ..of.clone() }).collect()
}

const HEADER: [&str; 12] = [
    "trace",
    "allocator",
    "device",
    "operations",
    "ns/op",
    "host ns/op",
    "cold ns/op",
    "peak live",
    "peak mapped",
    "utilisation",
    "driver calls",
    "driver time",
];

/// The results as a table, without a line end.
pub fn table(reports: &[Report]) -> String {
    let names = || reports.iter().map(|report| report.trace.as_str());
    let rows = reports.iter().map(|report| {
        let mut row = row(report);
        row[0] = name_among(&report.trace, names()).to_owned();
        row
    });
    render(HEADER, 3, rows)
}

fn row(report: &Report) -> [String; HEADER.len()] {
    let device = report.device.split(' ').next().unwrap_or_default();
    let operations = match (report.oom, report.error.is_some()) {
        (true, _) => format!("{} (out of memory)", report.ops),
        (false, true) => format!("{} (failed)", report.ops),
        _ => report.ops.to_string(),
    };
    [
        short_name(&report.trace).to_owned(),
        report.allocator.clone(),
        device.to_owned(),
        operations,
        or_dash(report.ns_per_op.map(figure)),
        or_dash(report.host_ns_per_op.map(figure)),
        or_dash(report.pass_ns_per_op.first().copied().map(figure)),
        ByteCount(report.peak_live_bytes).to_string(),
        ByteCount(report.peak_mapped_bytes).to_string(),
        or_dash(report.utilisation.map(|u| format!("{u:.4}"))),
        report.driver_calls.to_string(),
        or_dash(report.driver_time_us.map(|us| format!("{:.2} ms", us / 1000.0))),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        Report {
            trace: "traces/gpt_train.csv.gz".into(),
            allocator: "paged".into(),
            device: "cuda:0 NVIDIA H200".into(),
            ops: 145_973,
            ns_per_op: Some(35.25),
            peak_live_bytes: 17_240_000_000,
            peak_mapped_bytes: 18_000_000_000,
            utilisation: Some(0.9577),
            driver_calls: 12,
            driver_time_us: None,
            oom: false,
            pass_ns_per_op: vec![1234.5, 35.25],
            threads: 1,
            streams: 1,
            limit_bytes: None,
            verified: false,
            mismatches: 0,
            error: None,
            error_line: None,
            host_ns_per_op: Some(12.5),
            longest_driver_us: None,
            longest_line: None,
            driver_by_function: None,
            longest_by_function: None,
            pass_driver_time_us: None,
        }
    }

    #[test]
    fn fixed_keys_come_first_and_in_order() {
        let json = serde_json::to_string(&report()).unwrap();
        let keys = [
            "trace",
            "allocator",
            "device",
            "ops",
            "ns_per_op",
            "peak_live_bytes",
            "peak_mapped_bytes",
            "utilisation",
            "driver_calls",
            "driver_time_us",
            "oom",
        ];
        let mut from = 0;
        for (i, key) in keys.into_iter().enumerate() {
            let quoted = format!("{}\"{key}\":", if i == 0 { '{' } else { ',' });
            let at = json[from..].find(&quoted);
            assert!(at.is_some(), "{key} is missing or out of order in {json}");
            from += at.unwrap_or_default();
        }
        assert!(json.contains("\"driver_time_us\":null"));
    }

    #[test]
    fn a_row_is_short_and_readable() {
        assert_eq!(
            row(&report()),
            [
                "gpt_train",
                "paged",
                "cuda:0",
                "145973",
                "35.2",
                "12.5",
                "1234",
                "17.2 GB",
                "18.0 GB",
                "0.9577",
                "12",
                "–"
            ]
        );
        assert_eq!(table(&[report(), report()]).lines().count(), 3);
    }

    #[test]
    fn rows_of_two_traces_with_one_name_can_be_told_apart() {
        let other = Report { trace: "serve/gpt_train.csv".into(), ..report() };
        let table = table(&[report(), other]);
        for name in ["traces/gpt_train.csv.gz ", "serve/gpt_train.csv "] {
            assert!(table.contains(name), "{table}");
        }
    }

    #[test]
    fn a_row_says_why_it_stopped() {
        let oom = Report { oom: true, error: Some("x".into()), ..report() };
        assert_eq!(row(&oom)[3], "145973 (out of memory)");
        let failed = Report { error: Some("x".into()), ..report() };
        assert_eq!(row(&failed)[3], "145973 (failed)");
    }
}

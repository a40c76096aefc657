//! Figures per call, for people and for programs.

use serde::Serialize;

use super::{figure, or_dash, render, round};
use crate::backend::AllocatorSpec;
use crate::bench::{BenchError, Case, Figures};
use crate::bytes::ByteCount;

/// One result, as `--json` prints it: these keys, in this order, and `error` after them
/// where there are no figures.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BenchReport {
    /// The case.
    pub case: String,
    /// The allocator.
    pub allocator: String,
    /// The device: `sim`, or `cuda:N` and the GPU's name.
    pub device: String,
    /// Threads that called the allocator.
    pub threads: u32,
    /// Calls that were timed together, over all threads. One is an allocation or a free.
    pub ops: Option<u64>,
    /// Host nanoseconds per call, of one thread.
    pub ns_per_op: Option<f64>,
    /// The median of single calls.
    pub p50_ns: Option<f64>,
    /// What 99 of 100 calls took at most.
    pub p99_ns: Option<f64>,
    /// What 999 of 1000 calls took at most.
    pub p999_ns: Option<f64>,
    /// The slowest call.
    pub max_ns: Option<f64>,
    /// Calls of all threads together, in millions a second.
    pub mops_per_s: Option<f64>,
    /// The most bytes live at one time.
    pub peak_live_bytes: Option<u64>,
    /// The most bytes of device memory that the allocator held at one time.
    pub peak_mapped_bytes: Option<u64>,
    /// Driver calls during the timed calls.
    pub driver_calls: Option<u64>,
    /// Why there are no figures.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl BenchReport {
    /// Puts a result into a row.
    pub fn new(
        case: Case,
        allocator: &AllocatorSpec,
        device: &str,
        result: &Result<Figures, BenchError>,
    ) -> Self {
        let figures = result.as_ref().ok();
        let ns = |of: fn(&Figures) -> f64| figures.map(|figures| round(of(figures), 2));
        Self {
            case: case.name().to_owned(),
            allocator: allocator.to_string(),
            device: device.to_owned(),
            threads: case.thread_count(),
            ops: figures.map(|f| f.ops),
            ns_per_op: ns(|f| f.ns_per_op),
            p50_ns: ns(|f| f.p50_ns),
            p99_ns: ns(|f| f.p99_ns),
            p999_ns: ns(|f| f.p999_ns),
            max_ns: ns(|f| f.max_ns),
            // Growth is some thousand calls a second, and two digits would hide it.
            mops_per_s: figures.map(|f| round(f.mops_per_s, 6)),
            peak_live_bytes: figures.map(|f| f.peak_live_bytes),
            peak_mapped_bytes: figures.map(|f| f.peak_mapped_bytes),
            driver_calls: figures.map(|f| f.driver_calls),
            error: result.as_ref().err().map(BenchError::to_string),
        }
    }
}

const HEADER: [&str; 14] = [
    "case",
    "allocator",
    "device",
    "threads",
    "operations",
    "ns/op",
    "p50",
    "p99",
    "p99.9",
    "max",
    "Mops/s",
    "peak live",
    "peak mapped",
    "driver calls",
];

/// The results as a table, without a line end.
pub fn bench_table(reports: &[BenchReport]) -> String {
    render(HEADER, 3, reports.iter().map(row))
}

fn row(report: &BenchReport) -> [String; HEADER.len()] {
    let ns = |ns: Option<f64>| or_dash(ns.map(figure));
    let bytes = |bytes: Option<u64>| or_dash(bytes.map(|bytes| ByteCount(bytes).to_string()));
    let count = |count: Option<u64>| or_dash(count.map(|count| count.to_string()));
    let rate = |rate: f64| if rate < 1.0 { format!("{rate:.4}") } else { format!("{rate:.1}") };
    [
        report.case.clone(),
        report.allocator.clone(),
        report.device.split(' ').next().unwrap_or_default().to_owned(),
        report.threads.to_string(),
        count(report.ops),
        ns(report.ns_per_op),
        ns(report.p50_ns),
        ns(report.p99_ns),
        ns(report.p999_ns),
        ns(report.max_ns),
        or_dash(report.mops_per_s.map(rate)),
        bytes(report.peak_live_bytes),
        bytes(report.peak_mapped_bytes),
        count(report.driver_calls),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures() -> Figures {
        Figures {
            threads: 2,
            ops: 4_000_000,
            ns_per_op: 7.254_9,
            p50_ns: 7.0,
            p99_ns: 31.0,
            p999_ns: 128.0,
            max_ns: 12_345.0,
            mops_per_s: 275.7,
            peak_live_bytes: 2 << 20,
            peak_mapped_bytes: 4 << 20,
            driver_calls: 0,
        }
    }

    #[test]
    fn the_keys_are_these_and_no_others() {
        let case: Case = "threads_2".parse().unwrap();
        let report = BenchReport::new(case, &AllocatorSpec::Paged, "sim", &Ok(figures()));
        assert_eq!(
            serde_json::to_string(&report).unwrap(),
            "{\"case\":\"threads_2\",\"allocator\":\"paged\",\"device\":\"sim\",\"threads\":2,\
             \"ops\":4000000,\"ns_per_op\":7.25,\"p50_ns\":7.0,\"p99_ns\":31.0,\"p999_ns\":128.0,\
             \"max_ns\":12345.0,\"mops_per_s\":275.7,\"peak_live_bytes\":2097152,\
             \"peak_mapped_bytes\":4194304,\"driver_calls\":0}"
        );
    }

    #[test]
    fn without_figures_there_is_a_reason() {
        let error = BenchError::TooSlow { calls: 1_000_000, call_ns: 24_000.0 };
        let report = BenchReport::new(Case::Gather, &AllocatorSpec::CudaMalloc, "sim", &Err(error));
        let json = serde_json::to_string(&report).unwrap();
        assert!(json.contains("\"ns_per_op\":null"), "{json}");
        assert!(json.ends_with("each have to be made first\"}"), "{json}");
        assert!(row(&report)[4..].iter().all(|cell| cell == "–"));
    }
}

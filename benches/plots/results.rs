//! The lines of a results file, as far as plots need them.

use std::error::Error;
use std::fs;
use std::path::Path;

use serde_json::Value;

/// Everything measured in one run.
pub(crate) struct Results {
    /// Machine, driver, commit and date, as a plot's last line.
    pub(crate) source: String,
    /// Cases in the order in which they were run.
    pub(crate) cases: Vec<Case>,
    /// Traces replayed.
    pub(crate) replays: Vec<Replay>,
}

/// One case on one allocator.
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) allocator: String,
    pub(crate) threads: u64,
    pub(crate) ns_per_op: f64,
    pub(crate) mops_per_s: Option<f64>,
}

/// One trace replayed through one allocator.
pub(crate) struct Replay {
    pub(crate) trace: String,
    pub(crate) allocator: String,
    /// Memory held by memory live, at their peaks.
    pub(crate) held: f64,
}

impl Results {
    pub(crate) fn read(path: &Path) -> Result<Self, Box<dyn Error>> {
        let text = fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
        let mut results =
            Self { source: "unknown machine".to_owned(), cases: Vec::new(), replays: Vec::new() };
        for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
            let line: Value = serde_json::from_str(line)
                .map_err(|e| format!("{}:{number}: {e}", path.display()))?;
            results.add(&line);
        }
        Ok(results)
    }

    /// Lines without a figure, of cases that could not be measured, are left out; so are those of
    /// other kinds, and those of replays that did not come to their end.
    fn add(&mut self, line: &Value) {
        let text = |key: &str| line[key].as_str().map(str::to_owned);
        if line.get("header").is_some() {
            self.source = source(line);
        } else if line["error"].is_string() {
            // A replay that ended half-way has the figures of that half.
        } else if let (Some(name), Some(allocator)) = (text("case"), text("allocator")) {
            let Some(ns_per_op) = line["ns_per_op"].as_f64().filter(|ns| *ns > 0.0) else { return };
            let case = Case {
                name,
                allocator,
                threads: line["threads"].as_u64().unwrap_or(1),
                ns_per_op,
                mops_per_s: line["mops_per_s"].as_f64().filter(|rate| *rate > 0.0),
            };
            let same = |of: &&mut Case| of.name == case.name && of.allocator == case.allocator;
            match self.cases.iter_mut().find(same) {
                // Of several turns the fastest.
                Some(earlier) if case.ns_per_op < earlier.ns_per_op => *earlier = case,
                Some(_) => {}
                None => self.cases.push(case),
            }
        } else if let (Some(trace), Some(allocator)) = (text("trace"), text("allocator")) {
            let mapped = line["peak_mapped_bytes"].as_f64();
            let live = line["peak_live_bytes"].as_f64().filter(|bytes| *bytes > 0.0);
            let (Some(mapped), Some(live)) = (mapped, live) else { return };
            let replay = Replay { trace: short(&trace).to_owned(), allocator, held: mapped / live };
            let same = |of: &Replay| of.trace == replay.trace && of.allocator == replay.allocator;
            // Later turns hold as much.
            if !self.replays.iter().any(same) {
                self.replays.push(replay);
            }
        }
    }
}

fn source(header: &Value) -> String {
    let of = |key: &str| header[key].as_str().unwrap_or("unknown").to_owned();
    format!("{}, driver {}; commit {}; {}", of("machine"), of("driver"), of("commit"), of("date"))
}

/// `gpt_train` for `traces/gpt_train.csv.gz`.
fn short(path: &str) -> &str {
    let file = path.rsplit('/').next().unwrap_or(path);
    let file = file.strip_suffix(".gz").unwrap_or(file);
    file.strip_suffix(".csv").unwrap_or(file)
}

/// Each name once, in the order of first appearance.
pub(crate) fn in_order<'a>(names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut seen = Vec::new();
    for name in names {
        if !seen.contains(&name) {
            seen.push(name);
        }
    }
    seen
}

//! What the commands came to, for people and for programs.

mod bench;
mod fit;
mod replay;

pub use bench::{BenchReport, bench_table};
pub use fit::{FitReport, fit_table};
pub use replay::{Report, table};

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};

/// Digits beyond these are noise, and make lines hard to read.
fn round(value: f64, places: i32) -> f64 {
    let scale = 10_f64.powi(places);
    (value * scale).round() / scale
}

/// Nanoseconds with the digits that mean something.
fn figure(ns: f64) -> String {
    if ns < 100.0 { format!("{ns:.1}") } else { format!("{ns:.0}") }
}

fn or_dash(text: Option<String>) -> String {
    text.unwrap_or_else(|| "–".to_owned())
}

/// `gpt_train` for `traces/gpt_train.csv.gz`.
fn short_name(path: &str) -> &str {
    let file = path.rsplit('/').next().unwrap_or(path);
    let file = file.strip_suffix(".gz").unwrap_or(file);
    file.strip_suffix(".csv").unwrap_or(file)
}

/// The short name, or the path where another of the traces has the same: `train/log.csv`, `serve/log.csv`.
fn name_among<'a>(path: &'a str, mut traces: impl Iterator<Item = &'a str>) -> &'a str {
    let name = short_name(path);
    let is_shared = traces.any(|other| other != path && short_name(other) == name);
    if is_shared { path } else { name }
}

/// Rows under a header, without a line end: the first `names` columns to the left,
/// the figures to the right.
fn render<const N: usize>(
    header: [&str; N],
    names: usize,
    rows: impl Iterator<Item = [String; N]>,
) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING).set_header(header);
    for row in rows {
        table.add_row(row);
    }
    for column in table.column_iter_mut().skip(names) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.trim_fmt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_shortened() {
        assert_eq!(short_name("a/b/x.csv.gz"), "x");
        assert_eq!(short_name("x.csv"), "x");
        assert_eq!(short_name("-"), "-");
    }

    #[test]
    fn no_two_traces_have_one_name() {
        let traces = ["a/x.csv", "b/x.csv.gz", "a/y.csv", "a/x.csv"];
        let names = traces.map(|path| name_among(path, traces.into_iter()));
        assert_eq!(names, ["a/x.csv", "b/x.csv.gz", "y", "a/x.csv"]);
    }
}

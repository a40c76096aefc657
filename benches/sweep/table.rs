//! The table: a row for each trace.

use std::num::NonZeroU32;

use crate::measure::Figures;

/// Explains the columns and prints their heads.
pub(crate) fn print_header(factors: usize, passes: NonZeroU32) {
    println!(
        "{factors} factors, the first of them 1. Memory is by the peak of what is live; ms are"
    );
    println!("modelled driver time of one pass; `longest` is the longest call of any factor.");
    println!();
    println!(
        "{:14} | {:^38} | {:^29} | after {passes} passes, ms of the last",
        "", "at the smallest limit", "with room to grow",
    );
    println!(
        "{:14} | {:>6} {:>6} {:>6} {:>8} {:>8} | {:>6} {:>6} {:>7} {:>7} | {:>6} {:>6} {:>7} {:>7}",
        "trace",
        "mean",
        "at 1",
        "most",
        "ms",
        "longest",
        "mean",
        "most",
        "ms",
        "longest",
        "mean",
        "most",
        "ms",
        "most ms"
    );
}

/// One trace: `figures` of every factor, the first of them 1.
pub(crate) fn print_row(trace: &str, figures: &[Figures]) {
    let limit = Spread::of(figures, Figures::limit);
    let limit_ms = Spread::of(figures, |f| f.at_limit.driver_us / 1e3);
    let limit_longest = Spread::of(figures, |f| f.at_limit.longest_us / 1e3);
    let held = Spread::of(figures, Figures::held);
    let held_ms = Spread::of(figures, |f| f.roomy.driver_us / 1e3);
    let held_longest = Spread::of(figures, |f| f.roomy.longest_us / 1e3);
    let settled = Spread::of(figures, Figures::held_settled);
    let settled_ms = Spread::of(figures, |f| f.settled.last_pass_us / 1e3);
    print!("{trace:14} | {:6.4} {:6.4} {:6.4} ", limit.mean, limit.first, limit.most);
    print!("{:8.1} {:8.1} | ", limit_ms.mean, limit_longest.most);
    print!("{:6.4} {:6.4} {:7.1} {:7.1} | ", held.mean, held.most, held_ms.mean, held_longest.most);
    print!("{:6.4} {:6.4} ", settled.mean, settled.most);
    println!("{:7.1} {:7.1}", settled_ms.mean, settled_ms.most);
}

/// A figure over all factors.
#[derive(Default)]
struct Spread {
    first: f64,
    mean: f64,
    most: f64,
}

impl Spread {
    fn of(figures: &[Figures], figure: impl Fn(&Figures) -> f64) -> Self {
        let values = || figures.iter().map(&figure);
        Self {
            first: values().next().unwrap_or_default(),
            mean: values().sum::<f64>() / figures.len() as f64,
            most: values().fold(0.0, f64::max),
        }
    }
}

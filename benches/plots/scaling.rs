//! Operations per second by threads: both axes logarithmic, so that perfect scaling is a straight
//! line that goes up.

use std::path::Path;

use plotters::prelude::*;

use crate::Drawn;
use crate::frame::{decades, frame, small, tick};
use crate::palette::{colour, is_ours};
use crate::results::{Results, in_order};

pub(crate) fn draw(results: &Results, path: &Path) -> Drawn {
    let cases = || results.cases.iter().filter(|case| case.name.starts_with("threads_"));
    let rates = || cases().filter_map(|case| case.mops_per_s);
    let allocators = in_order(cases().map(|case| case.allocator.as_str()));
    let most_threads = cases().map(|case| case.threads).max().unwrap_or(0);
    if most_threads < 2 || rates().next().is_none() {
        return Ok(false);
    }
    let title = "Threads with a stream each, pairs of 1 MiB";
    let (whole, area) = frame(path, (960, 520), title, &results.source, &allocators)?;
    let mut chart = ChartBuilder::on(&area)
        .margin_left(16)
        .margin_right(16)
        .x_label_area_size(44)
        .y_label_area_size(70)
        .build_cartesian_2d(
            (0.9..most_threads as f64 * 1.1)
                .log_scale()
                .base(2.0)
                .with_key_points(powers_of_two(most_threads)),
            decades(rates()).log_scale(),
        )?;
    chart
        .configure_mesh()
        .x_label_formatter(&tick)
        .y_label_formatter(&tick)
        .x_desc("threads")
        .y_desc("million operations per second; more is better")
        .label_style(small())
        .light_line_style(RGBColor(240, 240, 240))
        .draw()?;
    for allocator in allocators {
        let mut points: Vec<(f64, f64)> = cases()
            .filter(|case| case.allocator == allocator)
            .filter_map(|case| Some((case.threads as f64, case.mops_per_s?)))
            .collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let width = if is_ours(allocator) { 3 } else { 2 };
        let style = colour(allocator).stroke_width(width);
        chart.draw_series(LineSeries::new(points.iter().copied(), style))?;
        chart.draw_series(
            points.iter().map(|point| Circle::new(*point, 3, colour(allocator).filled())),
        )?;
    }
    whole.present()?;
    Ok(true)
}

fn powers_of_two(most: u64) -> Vec<f64> {
    (0..64).map(|power| 1_u64 << power).take_while(|n| *n <= most).map(|n| n as f64).collect()
}

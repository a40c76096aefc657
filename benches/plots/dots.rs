//! Time per operation: one row a case, one dot an allocator, on a logarithmic axis. With ten
//! allocators and twenty cases a dot's place is easier to read than two hundred bars.

use std::path::Path;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::Drawn;
use crate::frame::{decades, frame, small, tick};
use crate::palette::{colour, is_ours};
use crate::results::{Results, in_order};

const ROW_HEIGHT: usize = 26;

pub(crate) fn draw(results: &Results, path: &Path) -> Drawn {
    let cases = in_order(results.cases.iter().map(|case| case.name.as_str()));
    let allocators = in_order(results.cases.iter().map(|case| case.allocator.as_str()));
    if cases.is_empty() {
        return Ok(false);
    }
    let height = (ROW_HEIGHT * cases.len() + 130) as u32;
    let title = "Host time per operation (one malloc or one free)";
    let (whole, area) = frame(path, (960, height), title, &results.source, &allocators)?;

    let rows = cases.len() as f64;
    let mut chart = ChartBuilder::on(&area)
        .margin_right(16)
        .x_label_area_size(44)
        .y_label_area_size(130)
        .build_cartesian_2d(
            decades(results.cases.iter().map(|case| case.ns_per_op)).log_scale(),
            0_f64..rows,
        )?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .y_labels(0)
        .x_label_formatter(&tick)
        .x_desc("nanoseconds per operation, logarithmic; less is better")
        .label_style(small())
        .light_line_style(RGBColor(240, 240, 240))
        .draw()?;

    for (row, case) in cases.iter().enumerate() {
        // The first case is on top.
        let y = rows - row as f64 - 0.5;
        let of_case: Vec<_> = results.cases.iter().filter(|result| result.name == *case).collect();
        let reach = of_case.iter().map(|result| result.ns_per_op);
        let least = reach.clone().fold(f64::INFINITY, f64::min);
        let most = reach.fold(0_f64, f64::max);
        let grey = RGBColor(205, 205, 205);
        chart.draw_series([PathElement::new(vec![(least, y), (most, y)], grey)])?;
        // Ours last, so that nothing covers them.
        for ours in [false, true] {
            chart.draw_series(
                of_case.iter().filter(|result| is_ours(&result.allocator) == ours).map(|result| {
                    let size = if ours { 6 } else { 4 };
                    Circle::new((result.ns_per_op, y), size, colour(&result.allocator).filled())
                }),
            )?;
        }
        let (_, pixel) = chart.backend_coord(&(least, y));
        let right = small().pos(Pos::new(HPos::Right, VPos::Center));
        whole.draw(&Text::new((*case).to_owned(), (122, pixel), right))?;
    }
    whole.present()?;
    Ok(true)
}

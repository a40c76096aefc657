//! Memory held in replays: bars by trace and allocator, each with its figure, because what matters
//! next to 1 is too small to see.

use std::path::Path;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::Drawn;
use crate::frame::{frame, small};
use crate::palette::colour;
use crate::results::{Results, in_order};

const BAR_HEIGHT: usize = 15;
/// Empty room between two traces, in bars.
const GAP: usize = 1;

pub(crate) fn draw(results: &Results, path: &Path) -> Drawn {
    let replays = &results.replays;
    let traces = in_order(replays.iter().map(|replay| replay.trace.as_str()));
    let allocators = in_order(replays.iter().map(|replay| replay.allocator.as_str()));
    if traces.is_empty() {
        return Ok(false);
    }
    let rows = replays.len() + GAP * (traces.len() + 1);
    let height = (BAR_HEIGHT * rows + 120) as u32;
    let title = "Memory held / memory in use, both at their peak, in replays";
    let (whole, area) = frame(path, (960, height), title, &results.source, &allocators)?;

    let most = replays.iter().map(|replay| replay.held).fold(1_f64, f64::max);
    let mut chart = ChartBuilder::on(&area)
        .margin_right(16)
        .x_label_area_size(44)
        .y_label_area_size(130)
        // Room for the figure at the longest bar's end.
        .build_cartesian_2d(0_f64..most * 1.1, 0_f64..rows as f64)?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .y_labels(0)
        .x_desc("peak bytes mapped / peak bytes live; 1 is perfect, less is better")
        .label_style(small())
        .light_line_style(RGBColor(240, 240, 240))
        .draw()?;

    // From the top.
    let mut y = rows as f64 - GAP as f64;
    for trace in traces {
        let of_trace: Vec<_> = replays.iter().filter(|replay| replay.trace == trace).collect();
        let middle = y - of_trace.len() as f64 / 2.0;
        let (_, pixel) = chart.backend_coord(&(0.0, middle));
        let right = small().pos(Pos::new(HPos::Right, VPos::Center));
        whole.draw(&Text::new(trace.to_owned(), (122, pixel), right))?;
        for replay in of_trace {
            chart.draw_series([Rectangle::new(
                [(0.0, y - 0.9), (replay.held, y - 0.1)],
                colour(&replay.allocator).filled(),
            )])?;
            let left = small().pos(Pos::new(HPos::Left, VPos::Center));
            let (x, pixel) = chart.backend_coord(&(replay.held, y - 0.5));
            whole.draw(&Text::new(format!("{:.3}", replay.held), (x + 4, pixel), left))?;
            y -= 1.0;
        }
        y -= GAP as f64;
    }
    let line = vec![(1.0, 0.0), (1.0, rows as f64)];
    chart.draw_series([PathElement::new(line, BLACK.stroke_width(1))])?;
    whole.present()?;
    Ok(true)
}

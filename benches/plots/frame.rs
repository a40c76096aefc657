//! What every plot has around it: a title, a legend at the right, and where the figures come from.

use std::error::Error;
use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::palette::colour;

/// Where plotters draws.
pub(crate) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

const LEGEND_WIDTH: i32 = 160;
const TITLE_HEIGHT: i32 = 34;
const SOURCE_HEIGHT: i32 = 24;

/// One size of letters for everything but the title.
pub(crate) fn small() -> TextStyle<'static> {
    ("sans-serif", 13).into_font().color(&BLACK)
}

/// A new plot; the answer is the room for the chart itself. `present` must be called at the end on
/// the first of the two areas.
pub(crate) fn frame<'a>(
    path: &'a Path,
    size: (u32, u32),
    title: &str,
    source: &str,
    allocators: &[&str],
) -> Result<(Area<'a>, Area<'a>), Box<dyn Error>> {
    let whole = SVGBackend::new(path, size).into_drawing_area();
    whole.fill(&WHITE)?;
    whole.draw(&Text::new(title.to_owned(), (12, 10), ("sans-serif", 18).into_font()))?;
    let (width, height) = (size.0 as i32, size.1 as i32);
    let grey = ("sans-serif", 11).into_font().color(&RGBColor(110, 110, 110));
    whole.draw(&Text::new(source.to_owned(), (12, height - 18), grey))?;

    for (row, allocator) in (0..).zip(allocators) {
        let (x, y) = (width - LEGEND_WIDTH + 8, TITLE_HEIGHT + 12 + row * 19);
        whole.draw(&Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour(allocator).filled()))?;
        let left = small().pos(Pos::new(HPos::Left, VPos::Center));
        whole.draw(&Text::new((*allocator).to_owned(), (x + 19, y), left))?;
    }

    let (_, below_title) = whole.split_vertically(TITLE_HEIGHT);
    let (chart, _) = below_title.split_vertically(height - TITLE_HEIGHT - SOURCE_HEIGHT);
    let (chart, _) = chart.split_horizontally(width - LEGEND_WIDTH);
    Ok((whole, chart))
}

/// The decades around the figures, as ends of a logarithmic axis.
pub(crate) fn decades(figures: impl Iterator<Item = f64>) -> std::ops::Range<f64> {
    let (least, most) =
        figures.fold((f64::INFINITY, 0_f64), |(least, most), x| (least.min(x), most.max(x)));
    10_f64.powf(least.log10().floor())..10_f64.powf(most.log10().ceil())
}

/// A number on an axis: powers of ten in words that people read.
pub(crate) fn tick(value: &f64) -> String {
    match *value {
        v if v >= 1e9 => format!("{} G", v / 1e9),
        v if v >= 1e6 => format!("{} M", v / 1e6),
        v if v >= 1e3 => format!("{} k", v / 1e3),
        v => format!("{v}"),
    }
}

//! A colour for each allocator, the same in every plot: ours warm and dark, families of peers in
//! one hue each.

use plotters::style::RGBColor;

const KNOWN: [(&str, RGBColor); 11] = [
    ("default", RGBColor(178, 24, 43)),
    ("paged", RGBColor(239, 138, 98)),
    ("cuda-async", RGBColor(64, 64, 64)),
    ("cuda-malloc", RGBColor(160, 160, 160)),
    ("rmm-cuda-async", RGBColor(199, 233, 192)),
    ("rmm-pool", RGBColor(116, 196, 118)),
    ("rmm-arena", RGBColor(49, 163, 84)),
    ("rmm-binning", RGBColor(0, 90, 50)),
    ("torch", RGBColor(33, 102, 172)),
    ("torch-expandable", RGBColor(103, 169, 207)),
    ("torch-cuda-async", RGBColor(190, 170, 220)),
];

/// The colour of an allocator; those not known share one.
pub(crate) fn colour(allocator: &str) -> RGBColor {
    KNOWN
        .iter()
        .find(|(name, _)| *name == allocator)
        .map_or(RGBColor(200, 180, 60), |(_, colour)| *colour)
}

/// Whether an allocator is ours: drawn larger.
pub(crate) fn is_ours(allocator: &str) -> bool {
    matches!(allocator, "default" | "paged")
}

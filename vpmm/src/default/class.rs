//! Sizes: in units of 512 bytes, and in the classes that the front and the trees sort them by.

#![forbid(unsafe_code)]

/// What addresses and sizes are multiples of.
pub(super) const UNIT_BYTES: u64 = 512;

/// Sizes of up to this many units (64 KiB) are small: rounded to one of 64 classes, and kept away
/// from the rest, because one small block that lives long holds a whole granule in its place.
pub(super) const SMALL_UNITS: u32 = 128;

/// What large sizes, and everything at the addresses of large blocks, are multiples of: 4 KiB. It
/// makes their tags lie eight times closer together in the host's memory.
pub(super) const LARGE_STEP: u32 = 8;

/// The most units of one block: 512 GiB.
pub(super) const MAX_UNITS: u32 = (1 << 30) - LARGE_STEP;

const SMALL_BYTES: u64 = SMALL_UNITS as u64 * UNIT_BYTES;
const STEP_BYTES: u64 = LARGE_STEP as u64 * UNIT_BYTES;
const MAX_BYTES: u64 = MAX_UNITS as u64 * UNIT_BYTES;

/// How many classes small sizes have.
pub(super) const SMALL_CLASSES: usize = 64;

/// How many classes large sizes have: 16 for each doubling.
pub(super) const LARGE_CLASSES: usize = 23 * 16;

/// The units that a request takes: above 64 KiB whole pages of 4 KiB; below it rounded up by at
/// most a sixteenth (and to whole units). `None` for none and for more than a block can have.
#[inline(always)]
pub(super) fn units_of(bytes: u64) -> Option<u32> {
    if bytes > SMALL_BYTES {
        let pages = (bytes <= MAX_BYTES).then(|| bytes.div_ceil(STEP_BYTES))?;
        return Some(pages as u32 * LARGE_STEP);
    }
    let units = bytes.div_ceil(UNIT_BYTES) as u32;
    match units {
        0 => None,
        1..=32 => Some(units),
        33..=64 => Some(units.next_multiple_of(2)),
        _ => Some(units.next_multiple_of(4)),
    }
}

/// The class of a small size, as [`units_of`] rounds it.
#[inline]
pub(super) fn small_class(units: u32) -> usize {
    debug_assert!((1..=SMALL_UNITS).contains(&units));
    (match units {
        ..=32 => units - 1,
        33..=64 => 32 + (units - 33) / 2,
        _ => 48 + (units - 65) / 4,
    }) as usize
}

/// The units of a small class.
pub(super) const fn small_units(class: usize) -> u32 {
    let class = class as u32;
    match class {
        ..=31 => class + 1,
        32..=47 => 34 + (class - 32) * 2,
        _ => 68 + (class - 48) * 4,
    }
}

/// The class that a large size is in: sizes of one class differ by less than a sixteenth.
#[inline]
pub(super) fn large_class(units: u32) -> usize {
    debug_assert!(units > SMALL_UNITS && units <= MAX_UNITS);
    let doubling = units.ilog2();
    ((doubling - 7) * 16 + ((units >> (doubling - 4)) & 15)) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_sizes_round_to_their_class_and_waste_at_most_a_sixteenth() {
        for units in 1..=SMALL_UNITS {
            let rounded = units_of(u64::from(units) * UNIT_BYTES).unwrap_or(0);
            assert!(rounded >= units && f64::from(rounded) <= f64::from(units) * 1.0625, "{units}");
            assert_eq!(small_units(small_class(rounded)), rounded);
        }
        assert_eq!(small_class(SMALL_UNITS), SMALL_CLASSES - 1);
    }

    #[test]
    fn large_sizes_are_whole_pages_and_classes_are_in_order() {
        assert_eq!(units_of(64 * 1024 + 1), Some(136));
        assert_eq!(units_of((64 << 20) + 1), Some(131_080));
        assert_eq!(units_of(64 << 20), Some(131_072));
        let mut last = 0;
        for units in (129..2_000_000).step_by(7).chain([MAX_UNITS]) {
            let class = large_class(units);
            assert!(class >= last && class < LARGE_CLASSES);
            last = class;
        }
    }

    #[test]
    fn what_no_block_can_have_is_refused() {
        assert_eq!(units_of(0), None);
        assert_eq!(units_of(u64::MAX), None);
        assert_eq!(units_of(u64::from(MAX_UNITS) * UNIT_BYTES), Some(MAX_UNITS));
        assert_eq!(units_of(u64::from(MAX_UNITS) * UNIT_BYTES + 1), None);
    }
}

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

/// How many classes large sizes have: 16 for each doubling, and one to which the largest round.
pub(super) const LARGE_CLASSES: usize = 23 * 16 + 1;

/// By whole units, up to [`SMALL_UNITS`]: what a small size of so many takes, and its class. Looked
/// up, since programs mix small sizes in ways that no processor foresees; and as long as a byte
/// goes, so that nothing is out of bounds.
const SMALL: [(u8, u8); 256] = {
    let mut sizes = [(0, 0); 256];
    let (mut units, mut class) = (1, 0);
    while units <= SMALL_UNITS {
        if units > small_units(class) {
            class += 1;
        }
        sizes[units as usize] = (small_units(class) as u8, class as u8);
        units += 1;
    }
    sizes
};

/// The units that a request takes: above 64 KiB whole pages of 4 KiB; below it rounded up by at
/// most a sixteenth (and to whole units). `None` for none and for more than a block can have.
#[inline(always)]
pub(super) fn units_of(bytes: u64) -> Option<u32> {
    if bytes > SMALL_BYTES {
        let pages = (bytes <= MAX_BYTES).then(|| bytes.div_ceil(STEP_BYTES))?;
        return Some(pages as u32 * LARGE_STEP);
    }
    match SMALL[usize::from(bytes.div_ceil(UNIT_BYTES) as u8)].0 {
        0 => None,
        units => Some(u32::from(units)),
    }
}

/// The class of a small size, as [`units_of`] rounds it.
#[inline]
pub(super) fn small_class(units: u32) -> usize {
    debug_assert!((1..=SMALL_UNITS).contains(&units));
    usize::from(SMALL[usize::from(units as u8)].1)
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
///
/// It is the exponent and the first four bits of the fraction that the size has as a float, which
/// takes a third of the instructions that finding the highest bit does. What has more bits than a
/// float rounds, at the upper end of a class to the next one.
#[inline]
pub(super) fn large_class(units: u32) -> usize {
    debug_assert!(units > SMALL_UNITS && units <= MAX_UNITS);
    const FRACTION: u32 = f32::MANTISSA_DIGITS - 1;
    const FIRST: u32 = (SMALL_UNITS as f32).to_bits() >> (FRACTION - 4);
    // Signed, since that is one instruction.
    let float = units.cast_signed() as f32;
    ((float.to_bits() >> (FRACTION - 4)) - FIRST) as usize
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

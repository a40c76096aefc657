//! A tag in 32 bits: of a unit of the small part, or of a page of the large one.

#![forbid(unsafe_code)]

use super::Tag;
use crate::default::class::{LARGE_STEP, SMALL_UNITS};

/// A tag: 2 bits of its kind above 30 of a size or a node.
pub(super) const KIND: u32 = 3 << 30;
const LIVE: u32 = 1 << 30;
const CACHED: u32 = 2 << 30;
const FREE: u32 = 3 << 30;

/// Nodes have 29 bits. With the next bit it is an allocation instead: one that is as short as can
/// be, with its stream, or a noted one, with its size in short.
const RARE: u32 = FREE | 1 << 29;
const NOTED: u32 = RARE | 1 << 28;
const NOTED_VALUE: u32 = (1 << 28) - 1;
/// Of those as short as can be: a page of the large part.
const PAGE: u32 = 1 << 27;
const RARE_VALUE: u32 = PAGE - 1;

/// Streams' labels have so many bits.
pub(in crate::default) const LABEL: u32 = RARE_VALUE;

/// The tag of an allocation, and what is noted behind it: nothing, of one that has a single tag of so many
/// units.
#[inline(always)]
pub(super) fn live(units: u32, step: u32, label: u32) -> (u32, Option<u32>) {
    if units > step {
        (LIVE | units, Some(label & LABEL))
    } else {
        let page = if units == 1 { 0 } else { PAGE };
        (RARE | page | (label & LABEL), None)
    }
}

#[inline(always)]
pub(super) fn cached(units: u32) -> u32 {
    CACHED | units
}

#[inline(always)]
pub(super) fn free(node: u32) -> u32 {
    FREE | node
}

pub(super) fn noted(units: u32) -> u32 {
    NOTED | short(units)
}

/// The label in the tag of an allocation that is as short as can be, and not noted.
pub(super) fn label(raw: u32) -> Option<u32> {
    (raw & NOTED != NOTED).then_some(raw & LABEL)
}

/// Whether it is a tag.
pub(super) fn is_tag(raw: u32) -> bool {
    raw & KIND != 0
}

/// The node of a free block.
#[inline(always)]
pub(super) fn free_node(raw: u32) -> Option<u32> {
    (raw & RARE == FREE).then_some(raw & !KIND)
}

#[inline(always)]
pub(super) fn read(raw: u32) -> Tag {
    let value = raw & !KIND;
    match raw & KIND {
        LIVE => Tag::Live(value),
        CACHED => Tag::Cached(value),
        FREE if raw & RARE == RARE => rare(raw),
        FREE => Tag::Free(value),
        _ => Tag::None,
    }
}

/// The units of the allocation that starts there, about which nothing more is noted.
#[inline(always)]
pub(super) fn live_units(raw: u32) -> Option<u32> {
    if raw & KIND == LIVE {
        Some(raw & !KIND)
    } else if raw & NOTED == RARE {
        Some(if raw & PAGE == 0 { 1 } else { LARGE_STEP })
    } else {
        None
    }
}

/// What a tag says that is neither a node nor a size.
#[cold]
#[inline(never)]
fn rare(raw: u32) -> Tag {
    if raw & NOTED == NOTED {
        Tag::Noted(long(raw & NOTED_VALUE))
    } else {
        Tag::Live(if raw & PAGE == 0 { 1 } else { LARGE_STEP })
    }
}

/// A size in 28 bits: large ones are whole pages.
fn short(units: u32) -> u32 {
    if units <= SMALL_UNITS { units } else { SMALL_UNITS + units / LARGE_STEP }
}

/// The size that is so in short.
fn long(short: u32) -> u32 {
    if short <= SMALL_UNITS { short } else { (short - SMALL_UNITS) * LARGE_STEP }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_size_fits_a_noted_tag() {
        let most = crate::default::class::MAX_UNITS;
        for units in [1, SMALL_UNITS, SMALL_UNITS + LARGE_STEP, most] {
            assert!(short(units) <= NOTED_VALUE, "{units}");
            assert_eq!(read(noted(units)), Tag::Noted(units));
        }
    }
}

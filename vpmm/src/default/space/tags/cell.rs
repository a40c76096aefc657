//! Tags of a cell of the large part: of the block that starts there, and of the one that ends there.
//!
//! A cell is as long as the longest short block, so no two longer ones start in it, nor end.

#![forbid(unsafe_code)]

use super::Tag;
use super::word::LABEL;
use crate::default::class::{LARGE_STEP, MAX_UNITS, SMALL_UNITS};

/// Units in a cell.
pub(in crate::default::space) const CELL_UNITS: u32 = SMALL_UNITS;

/// Of a start, from its lowest bit on: which unit of the cell it is; the kind; and a size in pages below a label, or
/// a node.
const UNIT: u64 = CELL_UNITS as u64 - 1;
const UNIT_BITS: u32 = UNIT.count_ones();
const LIVE: u64 = 1 << UNIT_BITS;
const NOTED: u64 = 2 << UNIT_BITS;
const CACHED: u64 = 3 << UNIT_BITS;
const FREE: u64 = 4 << UNIT_BITS;
const KIND: u64 = 7 << UNIT_BITS;
const VALUE: u32 = UNIT_BITS + 3;
const SIZE_BITS: u32 = 27;
const SIZE: u64 = (1 << SIZE_BITS) - 1;
const LABEL_AT: u32 = VALUE + SIZE_BITS;

const _: () = assert!(MAX_UNITS / LARGE_STEP <= SIZE as u32);
// What of a label is too much falls off its end.
const _: () = assert!(LABEL_AT + LABEL.count_ones() == 64);

/// Pages in a cell.
const PAGES: u32 = CELL_UNITS / LARGE_STEP;

/// Of an end: how many of the cell's pages have tags of their own; whether a free block ends here, with which page, and
/// of how many pages it is where it is short; and its node.
const SHORT: u64 = 31;
const ENDS: u64 = 32;
const PAGE_OF_END: u32 = 6;
const LENGTH: u32 = 10;
const NODE: u32 = 32;

/// Which page of its cell a unit is in.
#[inline(always)]
fn page(unit: u32) -> u64 {
    u64::from(unit / LARGE_STEP % PAGES)
}

/// Of a start: what says where it is, and of which kind.
#[inline(always)]
fn head(kind: u64, unit: u32) -> u64 {
    kind | u64::from(unit) & UNIT
}

/// The size in its place: units are multiples of a page, so shifting is by less.
#[inline(always)]
fn size(units: u32) -> u64 {
    u64::from(units) << (VALUE - LARGE_STEP.ilog2())
}

#[inline(always)]
fn units(word: u64) -> u32 {
    (word >> (VALUE - LARGE_STEP.ilog2())) as u32 & (SIZE as u32 * LARGE_STEP)
}

#[inline(always)]
pub(super) fn live(unit: u32, units: u32, label: u32) -> u64 {
    head(LIVE, unit) | size(units) | u64::from(label) << LABEL_AT
}

#[inline(always)]
pub(super) fn cached(unit: u32, units: u32) -> u64 {
    head(CACHED, unit) | size(units)
}

/// The same of what says that it is live. The label stays, and says nothing.
#[inline(always)]
pub(super) fn live_cached(word: u64) -> u64 {
    const { assert!(LIVE | CACHED == CACHED) };
    word | CACHED
}

#[inline(always)]
pub(super) fn free(unit: u32, node: u32) -> u64 {
    head(FREE, unit) | u64::from(node) << VALUE
}

/// The same allocation, as one about which more is noted elsewhere.
pub(super) fn noted(word: u64) -> u64 {
    word & !KIND | NOTED
}

pub(super) fn label(word: u64) -> u32 {
    (word >> LABEL_AT) as u32
}

/// The units of the allocation that starts at the unit, about which nothing more is noted.
#[inline(always)]
pub(super) fn live_units(word: u64, unit: u32) -> Option<u32> {
    (word & (KIND | UNIT) == head(LIVE, unit)).then(|| units(word))
}

/// The node of the free block that starts at the unit.
#[inline(always)]
pub(super) fn free_node(word: u64, unit: u32) -> Option<u32> {
    (word & (KIND | UNIT) == head(FREE, unit)).then_some((word >> VALUE) as u32)
}

/// Of numbers beside tags: where the first one begins in the place of a start, above its kind, and the second one in
/// that of an end, above what says whether one is there. What there is room for of the third one is behind either.
const FIRST: u32 = VALUE;
const SECOND: u32 = PAGE_OF_END;
const NUMBER_BITS: u32 = 30;
const NUMBER: u64 = (1 << NUMBER_BITS) - 1;
const THIRD: u32 = FIRST + NUMBER_BITS;
const THIRD_BITS: u32 = 64 - THIRD;
const REST: u32 = SECOND + NUMBER_BITS;

const _: () = assert!(THIRD_BITS + (64 - REST) >= NUMBER_BITS);

/// A start and an end for a cell that lies within an allocation, with three numbers of 30 bits: nothing starts or ends
/// there by them.
pub(super) fn beside([first, second, third]: [u32; 3]) -> [u64; 2] {
    let [first, second, third] = [first, second, third].map(u64::from);
    [first << FIRST | third << THIRD, second << SECOND | third >> THIRD_BITS << REST]
}

/// And back.
pub(super) fn of_beside([start, end]: [u64; 2]) -> [u32; 3] {
    let third = start >> THIRD | end >> REST << THIRD_BITS;
    [start >> FIRST, end >> SECOND, third].map(|number| (number & NUMBER) as u32)
}

/// Whether anything starts in the cell.
pub(super) fn has_start(word: u64) -> bool {
    word & KIND != 0
}

/// Whether nothing ends in the cell, and no page of it has a tag of its own.
pub(super) fn is_bare_end(word: u64) -> bool {
    word & (ENDS | SHORT) == 0
}

/// Whether what starts in the cell starts at the unit.
#[inline(always)]
pub(super) fn starts(word: u64, unit: u32) -> bool {
    word & KIND != 0 && word & UNIT == u64::from(unit) & UNIT
}

/// What starts at the unit.
#[inline]
pub(super) fn read(word: u64, unit: u32) -> Tag {
    if !starts(word, unit) {
        return Tag::None;
    }
    match word & KIND {
        LIVE => Tag::Live(units(word)),
        NOTED => Tag::Noted(units(word)),
        CACHED => Tag::Cached(units(word)),
        _ => Tag::Free((word >> VALUE) as u32),
    }
}

/// Whether no free block ends in the cell.
#[inline(always)]
pub(super) fn may_end(word: u64) -> bool {
    word & ENDS == 0
}

/// An end with the last page of a free block of so many units, that of the unit.
#[inline(always)]
pub(super) fn with_end(word: u64, unit: u32, units: u32, node: u32) -> u64 {
    let length = if units <= CELL_UNITS { u64::from(units / LARGE_STEP) << LENGTH } else { 0 };
    word & SHORT | ENDS | page(unit) << PAGE_OF_END | length | u64::from(node) << NODE
}

/// The short free block that ends in a cell: the first unit behind it, counted from the cell's first, its units, and its
/// node.
pub(super) fn short(word: u64) -> Option<(u32, u32, u32)> {
    let length = (word >> LENGTH) as u32 & 31;
    let behind = (word >> PAGE_OF_END) as u32 % PAGES + 1;
    (word & ENDS != 0 && length > 0).then_some((
        behind * LARGE_STEP,
        length * LARGE_STEP,
        (word >> NODE) as u32,
    ))
}

/// An end where no block ends.
#[inline(always)]
pub(super) fn without_end(word: u64) -> u64 {
    word & SHORT
}

/// The node of the free block whose last page is that of the unit.
#[inline(always)]
pub(super) fn ending_node(word: u64, unit: u32) -> Option<u32> {
    const OF_END: u64 = ENDS | (PAGES as u64 - 1) << PAGE_OF_END;
    (word & OF_END == ENDS | page(unit) << PAGE_OF_END).then_some((word >> NODE) as u32)
}

/// Whether pages of the cell have tags of their own.
#[inline(always)]
pub(super) fn has_short(word: u64) -> bool {
    word & SHORT != 0
}

/// An end of a cell of which one page more has a tag.
pub(super) fn with_short(word: u64) -> u64 {
    debug_assert!(word & SHORT < PAGES.into());
    word + 1
}

/// The same, of one page less.
pub(super) fn without_short(word: u64) -> u64 {
    debug_assert!(has_short(word));
    word - 1
}

//! The ways that large requests come by, and what became of those that came by each.
//!
//! A program's next request is told by what it did before: by the large requests and frees of its stream. Not
//! their sizes count but each one's ratio to the one before, which batches and lengths that vary leave as it is
//! for the most part. The *exact* way tells ratios apart by a sixteenth. Where lengths vary some sizes go by
//! their square, and hardly any step comes by the ways of another: so the *broad* way has ratios by octaves
//! only, and more of what came before.

#![forbid(unsafe_code)]

/// Entries of a table: 16 KiB. A round of a training has some hundreds to some thousands of large requests.
pub(super) const ENTRIES: u32 = 1 << TABLE_BITS;
const TABLE_BITS: u32 = 13;
/// What a way comes to: an entry, and what tells the way from most others that come to the same one.
pub(super) const KEY_BITS: u32 = TABLE_BITS + 15;
pub(super) const KEY: u32 = (1 << KEY_BITS) - 1;

/// Ratios: an exponent, and so many bits of a fraction.
const EXPONENT_BITS: u32 = 8;
const FRACTION_BITS: u32 = 4;
const RATIO_BITS: u32 = EXPONENT_BITS + FRACTION_BITS;

/// A way is so many ratios, that to the request itself among them, and of each event before it what it was.
/// With fewer different requests look alike, with more alike ones different.
const EVENTS: u32 = 4;
const EVENT_BITS: u32 = RATIO_BITS + 1;
const BEFORE: u64 = (1 << (EVENT_BITS * (EVENTS - 1))) - 1;

/// A broad way.
const BROAD_EVENTS: u32 = 6;
const BROAD_EVENT_BITS: u32 = EXPONENT_BITS + 1;
const BROADLY_BEFORE: u64 = (1 << (BROAD_EVENT_BITS * (BROAD_EVENTS - 1))) - 1;

/// What becomes of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::default) enum Fate {
    Goes,
    Stays,
}

/// The keys of the way that a request came by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Way {
    pub(super) exact: u32,
    pub(super) broad: u32,
}

/// The large requests and frees of a stream, as far as what comes next is told by them.
#[derive(Clone, Copy, Default)]
pub(in crate::default) struct Course {
    /// The last one's size.
    last: f32,
    events: u64,
    broad_events: u64,
}

impl Course {
    /// The ratio of a size to the last one. Rounded, not cut off: many are powers of two, or nearly.
    pub(super) fn ratio(&self, units: u32) -> u64 {
        const CUT: u32 = f32::MANTISSA_DIGITS - 1 - FRACTION_BITS;
        let ratio = units.cast_signed() as f32 / self.last;
        u64::from((ratio.to_bits() + (1 << (CUT - 1))) >> CUT)
    }

    /// The key of the way that a request comes which comes now, of such a ratio.
    pub(super) fn key(&self, ratio: u64) -> u32 {
        key_of(self.events << RATIO_BITS | ratio)
    }

    /// The key of its broad way.
    pub(super) fn broad_key(&self, ratio: u64) -> u32 {
        key_of(self.broad_events << EXPONENT_BITS | octave(ratio))
    }

    pub(super) fn note(&mut self, units: u32, ratio: u64, freed: bool) {
        let event = ratio << 1 | u64::from(freed);
        self.events = (self.events << EVENT_BITS | event) & BEFORE;
        let event = octave(ratio) << 1 | u64::from(freed);
        self.broad_events = (self.broad_events << BROAD_EVENT_BITS | event) & BROADLY_BEFORE;
        self.last = units.cast_signed() as f32;
    }
}

/// A ratio's exponent, rounded.
fn octave(ratio: u64) -> u64 {
    (ratio + (1 << (FRACTION_BITS - 1))) >> FRACTION_BITS
}

fn key_of(way: u64) -> u32 {
    (way.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (u64::BITS - KEY_BITS)) as u32
}

/// What became of requests, by keys; or nothing, without entries.
#[derive(Default)]
pub(super) struct Table {
    /// By a key's low bits: its other bits, above one bit for the fate; or 0.
    entries: Vec<u16>,
}

impl Table {
    pub(super) fn new() -> Self {
        Self { entries: vec![0; ENTRIES as usize] }
    }

    pub(super) fn fate(&self, key: u32) -> Option<Fate> {
        let entry = *self.entries.get((key % ENTRIES) as usize)?;
        let same = entry != 0 && u32::from(entry >> 1) == key >> TABLE_BITS;
        same.then_some(if entry & 1 == 0 { Fate::Goes } else { Fate::Stays })
    }

    pub(super) fn learn(&mut self, key: u32, fate: Fate) {
        if let Some(entry) = self.entries.get_mut((key % ENTRIES) as usize) {
            // A key of zeros whose blocks go looks as if there were none, and is not known.
            *entry = (key >> TABLE_BITS << 1) as u16 | fate as u16;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The way of the last of these requests (or frees, by negative sizes).
    fn way(sizes: &[i32]) -> Way {
        let mut course = Course::default();
        let (last, before) = sizes.split_last().unwrap_or_else(|| panic!("no request"));
        for size in before {
            let units = size.unsigned_abs();
            course.note(units, course.ratio(units), *size < 0);
        }
        let ratio = course.ratio(last.unsigned_abs());
        Way { exact: course.key(ratio), broad: course.broad_key(ratio) }
    }

    #[test]
    fn ways_are_the_same_at_any_scale_and_broad_ones_for_sizes_that_differ_some() {
        let first = way(&[1, 300, 400, -360, 250, 700, 900, 1000]);
        assert_eq!(first, way(&[1, 3000, 4000, -3600, 2500, 7000, 9000, 10_000]));
        // Lengths between them are others.
        let others = way(&[1, 300, 420, -360, 250, 700, 800, 1000]);
        assert_ne!(first.exact, others.exact);
        assert_eq!(first.broad, others.broad);
        // Another one before, or a request instead of a free.
        let different = [
            way(&[1, 300, 400, -360, 250, 150, 900, 1000]),
            way(&[1, 300, 400, 360, 250, 700, 900, 1000]),
        ];
        assert!(different.iter().all(|way| way.broad != first.broad));
        // What came long before is no part of it.
        assert_eq!(first.exact, way(&[5, 9, 1, 360, 250, 700, 900, 1000]).exact);
        assert_eq!(first.broad, way(&[7, 320, 400, -360, 250, 700, 900, 1000]).broad);
    }

    #[test]
    fn a_table_knows_what_it_was_told_last_and_nothing_by_other_keys() {
        let mut table = Table::new();
        let key = way(&[1, 300, 400]).exact;
        let same_entry = key ^ 1 << TABLE_BITS;
        assert_eq!(table.fate(key), None);
        table.learn(key, Fate::Goes);
        assert_eq!([key, same_entry].map(|key| table.fate(key)), [Some(Fate::Goes), None]);
        table.learn(key, Fate::Stays);
        table.learn(key + 1, Fate::Goes);
        assert_eq!(table.fate(key), Some(Fate::Stays));
        table.learn(same_entry, Fate::Goes);
        assert_eq!(table.fate(key), None);
        let mut none = Table::default();
        none.learn(key, Fate::Goes);
        assert_eq!(none.fate(key), None);
    }
}

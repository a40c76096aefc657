//! Random blocks in both parts against a plain list of what is where: every tag, from both sides, after each step.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// The small part, the granule that is never mapped, and the large part.
const SMALL: Range<u32> = 0..2;
const LARGE: Range<u32> = 3..8;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Is {
    /// Memory that is on its way.
    Nothing,
    /// With a label, and numbers noted inside where there are some.
    Live(u32),
    Noted(u32),
    Cached,
    Free(u32),
}

#[derive(Clone, Copy, Debug)]
struct Piece {
    units: u32,
    is: Is,
    inside: Option<[u32; 3]>,
}

#[derive(Clone, Debug)]
enum Step {
    /// Units of a free block, which an allocation has, or nobody yet.
    Take {
        which: usize,
        units: u32,
        tail: bool,
        is_live: bool,
    },
    /// What nobody has yet is an allocation, all of it or in two.
    HandOut {
        which: usize,
        units: u32,
    },
    /// To a front, and out of it again.
    Pass {
        which: usize,
    },
    Note {
        which: usize,
    },
    /// Free, and one with what is free before and behind, or not.
    Give {
        which: usize,
        joins: [bool; 2],
    },
    /// A span's memory goes to another span, or away and comes again.
    Carry {
        from: usize,
        to: usize,
    },
    Bring {
        which: usize,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let step = LARGE_STEP;
    let units = || {
        prop_oneof![
            4 => 1..=4 * step,
            3 => 1..=CELL_UNITS,
            3 => (CELL_UNITS - 2 * step)..(CELL_UNITS + 4 * step),
            1 => 1..8 * CELL_UNITS,
            1 => (SPAN_UNITS - 2 * CELL_UNITS)..(SPAN_UNITS + CELL_UNITS),
        ]
    };
    let (which, joins) = (any::<usize>, any::<[bool; 2]>());
    prop_oneof![
        8 => (which(), units(), any::<bool>(), any::<bool>())
            .prop_map(|(which, units, tail, is_live)| Step::Take { which, units, tail, is_live }),
        2 => (which(), units()).prop_map(|(which, units)| Step::HandOut { which, units }),
        1 => which().prop_map(|which| Step::Pass { which }),
        1 => which().prop_map(|which| Step::Note { which }),
        6 => (which(), joins).prop_map(|(which, joins)| Step::Give { which, joins }),
        1 => (which(), which()).prop_map(|(from, to)| Step::Carry { from, to }),
        1 => which().prop_map(|which| Step::Bring { which }),
    ]
}

/// The tags and the list side by side.
struct Both {
    tags: Tags,
    pieces: BTreeMap<u32, Piece>,
    /// Of nodes, labels and whatever is noted.
    last: u32,
}

impl Both {
    fn new() -> Self {
        let Some(tags) = Tags::new(LARGE.end * SPAN_UNITS, LARGE.start * SPAN_UNITS) else {
            panic!("no memory for the tags")
        };
        let mut both = Self { tags, pieces: BTreeMap::new(), last: 0 };
        [0..1, LARGE.start..LARGE.start + 2, LARGE.end - 1..LARGE.end]
            .into_iter()
            .for_each(|spans| both.add(spans));
        both
    }

    fn next(&mut self) -> u32 {
        self.last += 1;
        self.last
    }

    fn add(&mut self, spans: Range<u32>) {
        let units = spans.start * SPAN_UNITS..spans.end * SPAN_UNITS;
        self.put(units.start, units.end - units.start, Is::Nothing);
        self.give(units.start, [false; 2]);
    }

    fn put(&mut self, start: u32, units: u32, is: Is) {
        let before = self.pieces.insert(start, Piece { units, is, inside: None });
        assert!(before.is_none());
    }

    /// A piece like this, if there is one.
    fn some(&self, which: usize, like: impl Fn(Is) -> bool) -> Option<(u32, Piece)> {
        let found: Vec<_> = self.pieces.iter().filter(|(_, piece)| like(piece.is)).collect();
        let (start, piece) = found.get(which.checked_rem(found.len())?)?;
        Some((**start, **piece))
    }

    fn is_short(&self, start: u32, units: u32) -> bool {
        !self.tags.is_small(start) && units <= CELL_UNITS
    }

    /// So many units as a size has them, and no more than there are.
    fn size(&self, start: u32, units: u32, most: u32) -> u32 {
        let units = units.next_multiple_of(self.tags.step(start)).min(most);
        // Large sizes are whole pages, wherever they are.
        if units > SMALL_UNITS { units - units % LARGE_STEP } else { units }
    }

    fn hand_out(&mut self, start: u32, units: u32) {
        let label = self.next();
        if self.tags.is_small(start) {
            self.tags.hand_out_in::<false>(start, units, label);
        } else {
            self.tags.hand_out_in::<true>(start, units, label);
        }
        self.put(start, units, Is::Live(label));
        if units >= 5 && !self.is_short(start, units) {
            let numbers = [(); 3].map(|()| self.next());
            self.tags.set_inside(start, units, numbers);
            self.pieces.entry(start).and_modify(|piece| piece.inside = Some(numbers));
        }
    }

    /// As [`Space::give`](crate::default::space::Space) does.
    fn give(&mut self, start: u32, joins: [bool; 2]) {
        let Some(Piece { units, .. }) = self.pieces.remove(&start) else { return };
        let (mut first, mut end) = (start, start + units);
        if self.is_short(start, units) {
            self.tags.clear_start(start);
        }
        let free = |(start, piece): (&u32, &Piece)| match piece.is {
            Is::Free(_) => Some((*start, piece.units)),
            _ => None,
        };
        let left = self.pieces.range(..first).next_back().and_then(free);
        let left = left.filter(|(left, units)| joins[0] && left + units == first);
        let right = self.pieces.range(end..).next().and_then(free);
        let right = right.filter(|(right, _)| joins[1] && *right == end);
        if let Some((left, units)) = left {
            self.tags.clear_start(first);
            self.tags.clear_end(first);
            if self.is_short(left, units) {
                self.tags.clear_start(left);
            }
            self.pieces.remove(&left);
            first = left;
        }
        if let Some((right, units)) = right {
            self.tags.clear_start(end);
            if self.is_short(right, units) {
                self.tags.clear_end(end + units);
            }
            self.pieces.remove(&right);
            end += units;
        }
        let node = self.next();
        self.tags.set_free(first, end - first, node);
        self.put(first, end - first, Is::Free(node));
    }

    /// Takes a whole free block out.
    fn take_whole(&mut self, start: u32) {
        let Some(piece) = self.pieces.get_mut(&start) else { return };
        piece.is = Is::Nothing;
        self.tags.clear_start(start);
        self.tags.clear_end(start + piece.units);
    }

    fn take(&mut self, start: u32, all: u32, node: u32, units: u32, tail: bool, is_live: bool) {
        self.pieces.remove(&start);
        let rest = all - units;
        let tail = tail && rest > 0;
        let (at, left) = if tail { (start + rest, start) } else { (start, start + units) };
        let is_small = self.tags.is_small(start);
        if !tail && !is_live {
            self.tags.clear_start(start);
        }
        match (tail, is_small) {
            (true, true) => self.tags.cut_tail_in::<false>(start, rest, units, node),
            (true, false) => self.tags.cut_tail_in::<true>(start, rest, units, node),
            (false, true) => self.tags.cut_head_in::<false>(start, units, rest, node),
            (false, false) => self.tags.cut_head_in::<true>(start, units, rest, node),
        }
        if rest > 0 {
            self.put(left, rest, Is::Free(node));
        }
        if is_live {
            self.hand_out(at, units);
        } else {
            self.put(at, units, Is::Nothing);
        }
    }

    /// Has nothing in a span that is anybody's, nor free.
    fn empty(&mut self, span: u32) {
        let (from, to) = (span * SPAN_UNITS, (span + 1) * SPAN_UNITS);
        let first = self.pieces.range(..=from).next_back().map_or(from, |(start, _)| *start);
        let all: Vec<u32> = self.pieces.range(first..to).map(|(start, _)| *start).collect();
        for start in all {
            let Piece { units, is, .. } = self.pieces[&start];
            if start + units <= from {
                continue;
            }
            match is {
                Is::Free(_) => {}
                Is::Noted(_) => {
                    self.tags.set_cached(start, units);
                    self.give(start, [false; 2]);
                }
                _ => self.give(start, [false; 2]),
            }
            self.take_whole(start);
            self.pieces.remove(&start);
            for (at, end) in [(start, from), (to, start + units)] {
                if at < end {
                    self.put(at, end - at, Is::Nothing);
                    self.give(at, [false; 2]);
                }
            }
        }
    }

    fn spans(&self, with: bool) -> Vec<u32> {
        let spans = SMALL.chain(LARGE);
        let has_memory = |span: &u32| {
            let piece = self.pieces.range(..=span * SPAN_UNITS).next_back();
            piece.is_some_and(|(start, piece)| start + piece.units > span * SPAN_UNITS)
        };
        spans.filter(|span| has_memory(span) == with).collect()
    }

    fn run(&mut self, step: &Step) {
        let is_free = |is| matches!(is, Is::Free(_));
        match *step {
            Step::Take { which, units, tail, is_live } => {
                let Some((start, piece)) = self.some(which, is_free) else { return };
                let Is::Free(node) = piece.is else { return };
                let units = self.size(start, units, piece.units);
                self.take(start, piece.units, node, units, tail, is_live);
            }
            Step::HandOut { which, units } => {
                let nothing = |is| is == Is::Nothing;
                let Some((start, piece)) = self.some(which, nothing) else { return };
                let units = self.size(start, units, piece.units);
                self.pieces.remove(&start);
                self.hand_out(start, units);
                if units < piece.units {
                    self.put(start + units, piece.units - units, Is::Nothing);
                }
            }
            Step::Pass { which } => {
                let held = |is| matches!(is, Is::Live(_) | Is::Cached);
                let Some((start, Piece { units, is, inside })) = self.some(which, held) else {
                    return;
                };
                let is = match is {
                    Is::Live(_) => {
                        self.tags.set_cached(start, units);
                        Is::Cached
                    }
                    // In fronts are small ones of the small part and large ones of the large.
                    _ if self.tags.is_small(start) != (units <= SMALL_UNITS) => return,
                    _ => {
                        let label = self.next();
                        self.tags.set_live_again(start, units, label);
                        Is::Live(label)
                    }
                };
                self.pieces.insert(start, Piece { units, is, inside });
            }
            Step::Note { which } => {
                let live = |is| matches!(is, Is::Live(_) | Is::Noted(_));
                let Some((start, piece)) = self.some(which, live) else { return };
                let (Is::Live(label) | Is::Noted(label)) = piece.is else { return };
                self.tags.set_noted(start, piece.units);
                self.pieces.insert(start, Piece { is: Is::Noted(label), ..piece });
            }
            Step::Give { which, joins } => {
                let Some((start, piece)) = self.some(which, |is| !is_free(is)) else { return };
                if matches!(piece.is, Is::Noted(_)) {
                    self.tags.set_cached(start, piece.units);
                }
                self.give(start, joins);
            }
            Step::Carry { from, to } => {
                let (with, without) = (self.spans(true), self.spans(false));
                let Some(from) = with.get(from % with.len().max(1)).copied() else { return };
                self.empty(from);
                if let Some(to) = without.get(to % (without.len() + 1)).map(|to| to * SPAN_UNITS) {
                    self.put(to, SPAN_UNITS, Is::Nothing);
                    self.give(to, [true; 2]);
                }
            }
            Step::Bring { which } => {
                let without = self.spans(false);
                if let Some(span) = without.get(which % without.len().max(1)) {
                    self.add(*span..span + 1);
                }
            }
        }
    }

    /// What the list says of a unit's tag.
    fn expected(&self, unit: u32) -> Tag {
        let unit = self.tags.first_with(unit);
        let Some((start, piece)) = self.pieces.range(..=unit).next_back() else { return Tag::None };
        let is_first = *start == unit;
        match piece.is {
            Is::Free(node) if is_first || start + piece.units == unit + self.tags.step(unit) => {
                Tag::Free(node)
            }
            Is::Live(_) if is_first => Tag::Live(piece.units),
            Is::Noted(_) if is_first => Tag::Noted(piece.units),
            Is::Cached if is_first => Tag::Cached(piece.units),
            _ => Tag::None,
        }
    }

    /// What is where each piece begins and ends, and between.
    fn check(&self) {
        let tags = &self.tags;
        let mut free_end = None;
        for (start, piece) in &self.pieces {
            let (start, Piece { units, is, inside }) = (*start, *piece);
            let (last, step) = (start + units - 1, tags.step(start));
            let free = match is {
                Is::Free(node) => Some(node),
                _ => None,
            };
            let seen = [start, last].map(|unit| tags.get(unit));
            assert_eq!(seen, [start, last].map(|unit| self.expected(unit)), "unit {start}");
            let before = free_end.filter(|(at, _)| *at == start).map(|(_, node)| node);
            let seen = (tags.free_at(start), tags.free_before(start));
            assert_eq!(seen, (free, before), "unit {start}");
            free_end = free.map(|node| (start + units, node));
            let label = match is {
                Is::Live(label) => Some(label),
                Is::Noted(label) if units > step => Some(label),
                _ => None,
            };
            assert_eq!(tags.label_at(start), label, "unit {start}");
            if let Some(numbers) = inside {
                assert_eq!(tags.inside(start, units), numbers, "unit {start}");
            }
            // Each of the small part has its own word.
            if !tags.is_small(start) {
                let tag = free.filter(|_| units > step).map(|_| tags.first_with(last));
                assert_eq!(tags.first_in(start + step..start + units), tag, "unit {start}");
                for unit in [start, start + units / 2, last] {
                    let is_last = tags.first_with(unit) == tags.first_with(last);
                    let tag = tag.filter(|_| is_last).or((is != Is::Nothing).then_some(start));
                    assert_eq!(tags.last_up_to(unit, start), tag, "unit {unit}");
                }
            }
        }
    }

    /// What every unit's tag is, where there is memory and where there is none.
    fn check_all(&self) {
        let tags = &self.tags;
        self.check();
        let units = |spans: Range<u32>| spans.start * SPAN_UNITS..spans.end * SPAN_UNITS;
        let pages = || units(LARGE).step_by(LARGE_STEP as usize);
        for unit in units(SMALL).chain(pages()) {
            let expected = self.expected(unit);
            // Nothing starts at a unit that is no page's first, whatever starts with the page.
            for at in unit..unit + tags.step(unit) {
                assert_eq!(tags.get(at), expected, "unit {at}");
                let live = expected.live_units().filter(|units| {
                    let is_usual = tags.is_small(unit) == (*units <= SMALL_UNITS);
                    at == unit && is_usual && matches!(expected, Tag::Live(_))
                });
                assert_eq!(tags.live_at(at), live, "unit {at}");
            }
        }
        // A cell says that its pages have words where one has, and nowhere else.
        let has_tag = |unit: &u32| word::is_tag(tags.page(*unit).load(Relaxed));
        for cell in units(LARGE).step_by(CELL_UNITS as usize) {
            let has_short = cell::has_short(tags.end(cell).load(Relaxed));
            let mut pages = (cell..cell + CELL_UNITS).step_by(LARGE_STEP as usize);
            assert_eq!(has_short, pages.any(|unit| has_tag(&unit)), "cell {cell}");
        }
    }
}

/// How many programs: few by default, `PROPTEST_CASES` where it is set.
fn cases() -> u32 {
    let set = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    set.unwrap_or(96)
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: cases(),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    #[cfg_attr(miri, ignore = "too slow; the tests beside it take the same paths")]
    fn tags_are_what_the_list_says(program in prop::collection::vec(step(), 1..200)) {
        let mut both = Both::new();
        for step in &program {
            both.run(step);
            both.check();
        }
        both.check_all();
        // Nothing is left behind where all has gone.
        for span in both.spans(true) {
            both.empty(span);
        }
        both.check_all();
        prop_assert!(both.pieces.is_empty());
    }
}

//! PyTorch's scheme written down as plainly as possible, and random programs that must go the same
//! way in it and in the books: every address, and everything that is counted.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::books::{Books, Freed, Leaving, Rules, Use};
use super::size::{Kind, LARGE_BUFFER, round_plain, segment_bytes};
use super::stats::Stat;
use crate::device::StreamHandle;
use crate::units::DevicePtr;

const MIB: u64 = 1 << 20;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Is {
    Allocated,
    Waiting(u32),
    Free,
}

#[derive(Clone, Copy, Debug)]
struct Piece {
    bytes: u64,
    requested: u64,
    segment: u64,
    stream: u64,
    kind: Kind,
    is: Is,
    freed_at: u64,
}

/// Pieces by address; nothing is kept that can be searched for.
struct Model {
    pieces: BTreeMap<u64, Piece>,
    rules: Rules,
    searches: [u64; 2],
    current: BTreeMap<&'static str, [Stat; 3]>,
}

impl Model {
    fn new(rules: Rules) -> Self {
        Self { pieces: BTreeMap::new(), rules, searches: [0; 2], current: BTreeMap::new() }
    }

    fn count(&mut self, name: &'static str, kind: Kind, by: i64) {
        let of = self.current.entry(name).or_default();
        for at in [0, 1 + kind as usize] {
            let stat = &mut of[at];
            if by > 0 {
                stat.allocated += by.unsigned_abs();
                stat.current += by.unsigned_abs();
                stat.peak = stat.peak.max(stat.current);
            } else {
                stat.freed += by.unsigned_abs();
                stat.current -= by.unsigned_abs();
            }
        }
    }

    fn is_split(&self, at: u64) -> bool {
        let piece = &self.pieces[&at];
        self.pieces.iter().any(|(other, of)| *other != at && of.segment == piece.segment)
    }

    fn allocate(&mut self, stream: u64, bytes: u64, requested: u64) -> Option<u64> {
        let kind = Kind::of(bytes);
        self.searches[kind as usize] += 1;
        // The set of (stream, size, address), made anew each time.
        let set: BTreeSet<(u64, u64, u64)> = self
            .pieces
            .iter()
            .filter(|(_, of)| of.is == Is::Free && of.kind == kind)
            .map(|(at, of)| (of.stream, of.bytes, *at))
            .collect();
        let (_, found, at) = *set.range((stream, bytes, 0)..).next().filter(|of| of.0 == stream)?;
        let most = self.rules.max_split_bytes;
        if bytes < most && found >= most {
            return None;
        }
        if bytes >= most && found >= bytes + self.rules.max_non_split_rounding_bytes {
            return None;
        }
        self.hand_out(at, bytes, requested);
        Some(at)
    }

    fn add_segment(&mut self, stream: u64, at: u64, segment: u64, bytes: u64, requested: u64) {
        let kind = Kind::of(bytes);
        let piece = Piece {
            bytes: segment,
            requested: 0,
            segment: at,
            stream,
            kind,
            is: Is::Free,
            freed_at: 0,
        };
        self.pieces.insert(at, piece);
        self.count("segment", kind, 1);
        self.count("reserved_bytes", kind, segment as i64);
        self.hand_out(at, bytes, requested);
    }

    fn hand_out(&mut self, at: u64, bytes: u64, requested: u64) {
        let was_split = self.is_split(at);
        let whole = self.pieces[&at];
        let left = whole.bytes - bytes;
        let splits = match whole.kind {
            Kind::Small => left >= 512,
            Kind::Large => left > MIB && bytes < self.rules.max_split_bytes,
        };
        let kind = whole.kind;
        if splits {
            let rest = Piece {
                bytes: left,
                freed_at: self.searches[kind as usize],
                is: Is::Free,
                ..whole
            };
            self.pieces.insert(at + bytes, rest);
            if was_split {
                self.count("inactive_split_bytes", kind, -(bytes as i64));
            } else {
                self.count("inactive_split_bytes", kind, left as i64);
                self.count("inactive_split", kind, 1);
            }
        } else if was_split {
            self.count("inactive_split_bytes", kind, -(whole.bytes as i64));
            self.count("inactive_split", kind, -1);
        }
        let bytes = if splits { bytes } else { whole.bytes };
        self.pieces.insert(at, Piece { bytes, requested, is: Is::Allocated, ..whole });
        self.count("allocation", kind, 1);
        self.count("allocated_bytes", kind, bytes as i64);
        self.count("active", kind, 1);
        self.count("active_bytes", kind, bytes as i64);
        self.count("requested_bytes", kind, requested as i64);
    }

    fn free(&mut self, at: u64, waits: u32) {
        let Piece { kind, bytes, .. } = self.pieces[&at];
        self.count("allocation", kind, -1);
        self.count("allocated_bytes", kind, -(bytes as i64));
        let Some(piece) = self.pieces.get_mut(&at) else { panic!("a piece") };
        piece.is = Is::Waiting(waits);
        if waits == 0 {
            self.become_free(at);
        }
    }

    fn wait_is_over(&mut self, at: u64) {
        let Some(piece) = self.pieces.get_mut(&at) else { panic!("a piece") };
        let Is::Waiting(waits) = piece.is else { panic!("it waits for nothing") };
        piece.is = Is::Waiting(waits - 1);
        if waits == 1 {
            self.become_free(at);
        }
    }

    fn become_free(&mut self, at: u64) {
        let piece = self.pieces[&at];
        let kind = piece.kind;
        let (mut start, mut bytes) = (at, piece.bytes);
        let (mut blocks, mut split) = (0, 0);
        let free = |of: &Piece| of.is == Is::Free && of.segment == piece.segment;
        let before = self.pieces.range(..at).next_back().filter(|of| free(of.1));
        if let Some((before, of)) = before.map(|(at, of)| (*at, *of)) {
            self.pieces.remove(&at);
            (start, bytes) = (before, bytes + of.bytes);
            (blocks, split) = (blocks - 1, split - of.bytes as i64);
        }
        let after = self.pieces.range(at + 1..).next().filter(|of| free(of.1));
        if let Some((after, of)) = after.map(|(at, of)| (*at, *of)) {
            self.pieces.remove(&after);
            bytes += of.bytes;
            (blocks, split) = (blocks - 1, split - of.bytes as i64);
        }
        let freed_at = self.searches[kind as usize];
        self.pieces.insert(start, Piece { bytes, is: Is::Free, freed_at, ..piece });
        if self.is_split(start) {
            (blocks, split) = (blocks + 1, split + bytes as i64);
        }
        if blocks != 0 {
            self.count("inactive_split", kind, blocks);
        }
        if split != 0 {
            self.count("inactive_split_bytes", kind, split);
        }
        self.count("active", kind, -1);
        self.count("active_bytes", kind, -(piece.bytes as i64));
        self.count("requested_bytes", kind, -(piece.requested as i64));
    }

    /// Whole free segments, by address.
    fn idle(&self) -> Vec<u64> {
        let free = self.pieces.iter().filter(|(_, of)| of.is == Is::Free);
        free.map(|(at, _)| *at).filter(|at| !self.is_split(*at)).collect()
    }

    fn release(&mut self, at: u64) {
        let Some(piece) = self.pieces.remove(&at) else { panic!("a segment") };
        self.count("segment", piece.kind, -1);
        self.count("reserved_bytes", piece.kind, -(piece.bytes as i64));
    }

    /// PyTorch's garbage collection: what goes.
    fn aged(&self, bytes: u64) -> BTreeSet<u64> {
        let age = |at: &u64| self.searches[Kind::Large as usize] - self.pieces[at].freed_at;
        let mut left: BTreeSet<u64> =
            self.idle().into_iter().filter(|at| self.pieces[at].kind == Kind::Large).collect();
        let (mut gone, mut sum) = (BTreeSet::new(), 0);
        while sum < bytes && !left.is_empty() {
            let mean = left.iter().map(age).sum::<u64>() as f64 / left.len() as f64;
            let old: Vec<u64> = left.iter().filter(|at| age(at) as f64 >= mean).copied().collect();
            for at in old {
                left.remove(&at);
                sum += self.pieces[&at].bytes;
                gone.insert(at);
            }
        }
        gone
    }
}

#[derive(Clone, Debug)]
enum Step {
    Allocate { stream: u64, bytes: u64 },
    Free { which: usize, waits: u32 },
    Pass { which: usize },
    Release,
    Oversize { stream: u64, bytes: u64 },
    Collect { bytes: u64 },
    ResetPeaks,
}

fn step() -> impl Strategy<Value = Step> {
    let bytes = prop_oneof![
        4 => 1..4096_u64,
        3 => 1..2 * MIB,
        3 => MIB..12 * MIB,
        2 => 9 * MIB..70 * MIB,
        1 => prop_oneof![Just(MIB), Just(MIB + 1), Just(10 * MIB), Just(20 * MIB), Just(512)],
    ];
    let stream = 1..4_u64;
    prop_oneof![
        8 => (stream.clone(), bytes.clone())
            .prop_map(|(stream, bytes)| Step::Allocate { stream, bytes }),
        6 => (any::<usize>(), prop_oneof![4 => Just(0), 1 => 1..3_u32])
            .prop_map(|(which, waits)| Step::Free { which, waits }),
        2 => any::<usize>().prop_map(|which| Step::Pass { which }),
        1 => Just(Step::Release),
        1 => (stream, bytes.clone()).prop_map(|(stream, bytes)| Step::Oversize { stream, bytes }),
        1 => bytes.prop_map(|bytes| Step::Collect { bytes }),
        1 => Just(Step::ResetPeaks),
    ]
}

/// The books and the model side by side.
struct Both {
    books: Books,
    model: Model,
    places: BTreeMap<u64, u32>,
    /// Addresses and numbers.
    live: Vec<(u64, u32)>,
    waiting: Vec<(u64, u32)>,
    upstream: u64,
}

impl Both {
    fn new(rules: Rules) -> Self {
        let mut books = Books::new(rules);
        let places = (1..4).map(|stream| (stream, books.enrol(stream, None, false))).collect();
        let (live, waiting) = (Vec::new(), Vec::new());
        Self { books, model: Model::new(rules), places, live, waiting, upstream: 0x7F00_0000_0000 }
    }

    fn run(&mut self, step: &Step) {
        match *step {
            Step::Allocate { stream, bytes: requested } => self.allocate(stream, requested),
            Step::Free { which, waits } if !self.live.is_empty() => {
                let (at, tag) = self.live.swap_remove(which % self.live.len());
                let ptr = DevicePtr::tagged(at, tag);
                if waits == 0 {
                    assert!(matches!(self.books.free(ptr), Ok(Freed::Done { due: None })));
                } else {
                    // A use on a place of its own for each wait.
                    for of in 0..waits {
                        let place = (self.books.arena.get(self.books.live.get(at).unwrap_or(0)))
                            .place
                            .get();
                        let place = (place + 1 + of) % 3;
                        let on = StreamHandle::LEGACY;
                        assert!(self.books.note_use(ptr, Use { place, on }).is_ok());
                    }
                    assert!(matches!(self.books.free(ptr), Ok(Freed::Noted(of)) if of == tag));
                    let uses = self.books.uses_of(ptr);
                    assert!(uses.is_ok_and(|uses| uses.len() == waits as usize));
                    let Ok(block) = self.books.free_noted(ptr, waits) else { panic!("live") };
                    self.waiting.extend((0..waits).map(|_| (at, block)));
                }
                self.model.free(at, waits);
                assert!(self.books.find(ptr).is_err(), "it was freed");
            }
            Step::Pass { which } if !self.waiting.is_empty() => {
                let (at, block) = self.waiting.swap_remove(which % self.waiting.len());
                self.books.wait_is_over(block);
                self.model.wait_is_over(at);
            }
            Step::Release => {
                let taken = self.books.take_idle();
                assert_eq!(self.release(taken), self.model_idle());
            }
            Step::Oversize { stream, bytes } => {
                let Some(bytes) = round_plain(bytes) else { return };
                let (taken, enough) = self.books.take_oversize(self.places[&stream], bytes);
                let least = self.model.rules.max_split_bytes;
                let sum: u64 = taken.iter().map(|of| of.bytes).sum();
                assert!(taken.iter().all(|of| of.bytes >= least));
                assert_eq!(enough, least < u64::MAX && sum >= bytes.max(least));
                // No fewer would do, unless one block is as long.
                let shortest = taken.iter().map(|of| of.bytes).min().unwrap_or(0);
                assert!(sum - shortest < bytes.max(least));
                let gone = self.release(taken);
                gone.into_iter().for_each(|at| self.model.release(at));
            }
            Step::Collect { bytes } => {
                let taken = self.books.take_aged(bytes);
                let gone = self.release(taken);
                assert_eq!(gone, self.model.aged(bytes));
                gone.into_iter().for_each(|at| self.model.release(at));
            }
            Step::ResetPeaks => {
                self.books.tallies.reset_peaks();
                for of in self.model.current.values_mut().flatten() {
                    of.peak = of.current;
                }
            }
            Step::Free { .. } | Step::Pass { .. } => {}
        }
        self.compare();
    }

    fn allocate(&mut self, stream: u64, requested: u64) {
        let Some(bytes) = round_plain(requested) else { return };
        let place = self.places[&stream];
        let served = self.books.allocate(place, bytes, requested);
        let expected = self.model.allocate(stream, bytes, requested);
        assert_eq!(served.map(|(at, _)| at), expected);
        let served = served.unwrap_or_else(|| {
            let Some(segment) = segment_bytes(bytes, LARGE_BUFFER as u64) else {
                panic!("no overflow here")
            };
            let at = self.upstream;
            // Some touch: they are segments of their own all the same.
            self.upstream += segment + (segment & (4 * MIB));
            assert!(self.books.reserve(segment, None));
            self.model.add_segment(stream, at, segment, bytes, requested);
            let ptr = DevicePtr::from_address(at);
            self.books.add_segment(place, (ptr, segment), (bytes, requested))
        });
        self.live.push(served);
    }

    /// Gives back what was taken out, but for a first try that fails.
    fn release(&mut self, taken: Vec<Leaving>) -> BTreeSet<u64> {
        for segment in &taken {
            self.books.segment_stays(*segment);
        }
        let again = self.books.take_idle();
        let mut gone = BTreeSet::new();
        for segment in again {
            if taken.contains(&segment) {
                gone.insert(segment.ptr.address());
                self.books.segment_left(segment);
            } else {
                self.books.segment_stays(segment);
            }
        }
        gone
    }

    fn model_idle(&mut self) -> BTreeSet<u64> {
        let idle = self.model.idle();
        idle.iter().for_each(|at| self.model.release(*at));
        idle.into_iter().collect()
    }

    fn compare(&self) {
        if let Err(violation) = self.books.validate() {
            panic!("{violation}");
        }
        let blocks = self.books.snapshot(0).into_iter().flat_map(|segment| {
            segment
                .blocks
                .into_iter()
                .map(move |block| (block.address, block.size, segment.address))
        });
        let pieces = self.model.pieces.iter().map(|(at, of)| (*at, of.bytes, of.segment));
        assert!(blocks.eq(pieces), "{:?}", self.model.pieces);
        let stats = self.books.tallies.stats(None);
        for (name, of) in &self.model.current {
            let array = match *name {
                "allocation" => stats.allocation,
                "segment" => stats.segment,
                "active" => stats.active,
                "inactive_split" => stats.inactive_split,
                "allocated_bytes" => stats.allocated_bytes,
                "reserved_bytes" => stats.reserved_bytes,
                "active_bytes" => stats.active_bytes,
                "inactive_split_bytes" => stats.inactive_split_bytes,
                "requested_bytes" => stats.requested_bytes,
                name => panic!("{name} is not counted"),
            };
            assert_eq!([array.all, array.small_pool, array.large_pool], *of, "{name}");
        }
    }
}

fn rules() -> impl Strategy<Value = Rules> {
    let max = prop_oneof![2 => Just(u64::MAX), 1 => Just(20 * MIB), 1 => Just(33 * MIB)];
    (max, 20..40_u64).prop_map(|(max_split_bytes, rounding)| Rules {
        max_split_bytes,
        max_non_split_rounding_bytes: rounding * MIB,
        ages: true,
    })
}

/// How many programs: few by default, `PROPTEST_CASES` where it is set.
fn cases() -> u32 {
    let set = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    set.unwrap_or(192)
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: cases(),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    #[cfg_attr(miri, ignore = "too slow; the test below takes the same paths")]
    fn books_go_the_way_of_the_model(
        rules in rules(),
        program in prop::collection::vec(step(), 1..160),
    ) {
        let mut both = Both::new(rules);
        program.iter().for_each(|step| both.run(step));
    }
}

#[test]
fn nodes_are_as_many_as_blocks_however_long_it_goes_on() {
    let rules = Rules { max_split_bytes: u64::MAX, max_non_split_rounding_bytes: 0, ages: false };
    let mut both = Both::new(rules);
    let mut seed = 7_u64;
    let mut random = |bound: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (seed >> 33) % bound
    };
    let mut bytes_at = Vec::new();
    let rounds = if cfg!(miri) { 4 } else { 40 };
    for round in 0..rounds {
        for _ in 0..if cfg!(miri) { 50 } else { 2_000 } {
            if both.live.len() < 100 && random(3) > 0 {
                let (stream, doubling) = (1 + random(3), random(24));
                both.allocate(stream, 1 + random(1 << doubling));
            } else if !both.live.is_empty() {
                let (at, tag) = both.live.swap_remove(random(both.live.len() as u64) as usize);
                let freed = both.books.free(DevicePtr::tagged(at, tag));
                assert!(freed.is_ok());
                both.model.free(at, 0);
            }
        }
        if !cfg!(miri) || round == rounds - 1 {
            both.compare();
        }
        if round % 10 == 9 {
            let taken = both.books.take_idle();
            assert_eq!(both.release(taken), both.model_idle());
        }
        bytes_at.push(both.books.metadata_bytes());
    }
    let (early, late) = (bytes_at[rounds / 4], bytes_at[rounds - 1]);
    assert!(late <= early + early / 4, "from {early} bytes to {late}");
}

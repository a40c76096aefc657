use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

const M: u64 = 1 << 20;
const P: PhysicalId = PhysicalId(7);

/// Streams and events as a simulator would drive the detector.
#[derive(Default)]
struct Machine {
    streams: BTreeMap<StreamKey, Clock>,
    events: BTreeMap<u8, Clock>,
    detector: Detector,
}

impl Machine {
    fn use_bytes(&mut self, stream: u64, kind: AccessKind, range: Range<u64>) -> Vec<Race> {
        let stream = StreamKey(stream);
        let clock = self.streams.entry(stream).or_default();
        clock.tick(stream);
        let races =
            self.detector.access(Access { physical: P, range, kind, stream, clock, what: "work" });
        self.detector.extents.values().for_each(Cells::validate);
        races
    }

    fn write(&mut self, stream: u64, range: Range<u64>) -> Vec<Race> {
        self.use_bytes(stream, AccessKind::Write, range)
    }

    fn read(&mut self, stream: u64, range: Range<u64>) -> Vec<Race> {
        self.use_bytes(stream, AccessKind::Read, range)
    }

    fn record(&mut self, event: u8, stream: u64) {
        let clock = self.streams.entry(StreamKey(stream)).or_default().clone();
        self.events.insert(event, clock);
    }

    fn wait(&mut self, stream: u64, event: u8) {
        if let Some(clock) = self.events.get(&event) {
            self.streams.entry(StreamKey(stream)).or_default().join(clock);
        }
    }

    /// Makes all work of `to` after all work so far of `from`.
    fn order(&mut self, from: u64, to: u64) {
        self.record(0, from);
        self.wait(to, 0);
    }
}

#[test]
fn work_on_one_stream_is_in_order() {
    let mut machine = Machine::default();
    for _ in 0..3 {
        assert_eq!(machine.write(1, 0..M), []);
        assert_eq!(machine.read(1, 0..M), []);
    }
}

#[test]
fn two_streams_without_an_event_race() {
    let mut machine = Machine::default();
    machine.write(1, 0..4 * M);
    let races = machine.read(2, 3 * M..8 * M);
    assert_eq!(races.len(), 1);
    assert_eq!(races[0].range, 3 * M..4 * M);
    assert_eq!((races[0].first.stream, races[0].first.kind), (StreamKey(1), AccessKind::Write));
    assert_eq!((races[0].second.stream, races[0].second.kind), (StreamKey(2), AccessKind::Read));
}

#[test]
fn an_event_orders() {
    let mut machine = Machine::default();
    machine.write(1, 0..M);
    machine.order(1, 2);
    assert_eq!(machine.write(2, 0..M), []);
    machine.order(2, 3);
    assert_eq!(machine.read(3, 0..M), [], "order is transitive");
}

#[test]
fn an_event_covers_only_what_came_before_it() {
    let mut machine = Machine::default();
    machine.write(1, 0..M);
    machine.record(0, 1);
    machine.write(1, M..2 * M);
    machine.wait(2, 0);
    assert_eq!(machine.write(2, 0..M), []);
    assert_eq!(machine.write(2, M..2 * M).len(), 1);
}

#[test]
fn reads_need_no_order_but_a_write_after_them_does() {
    let mut machine = Machine::default();
    machine.write(1, 0..M);
    machine.order(1, 2);
    machine.order(1, 3);
    assert_eq!(machine.read(2, 0..M), []);
    assert_eq!(machine.read(3, 0..M), []);
    machine.order(2, 1);
    let races = machine.write(1, 0..M);
    assert_eq!(races.len(), 1, "only stream 3's read is unordered");
    assert_eq!(races[0].first.stream, StreamKey(3));
}

#[test]
fn one_race_per_earlier_work_and_run() {
    let mut machine = Machine::default();
    machine.write(1, 0..4 * M);
    machine.read(1, M..2 * M);
    machine.write(3, 8 * M..9 * M);
    let races = machine.write(2, 0..16 * M);
    let found: Vec<_> =
        races.iter().map(|r| (r.first.stream.0, r.first.kind, r.range.clone())).collect();
    assert_eq!(
        found,
        [
            (1, AccessKind::Write, 0..4 * M),
            (1, AccessKind::Read, M..2 * M),
            (3, AccessKind::Write, 8 * M..9 * M),
        ]
    );
}

#[test]
fn extents_are_apart_and_can_be_forgotten() {
    let mut machine = Machine::default();
    machine.write(1, 0..M);
    let other = PhysicalId(8);
    let clock = Clock::new();
    let access = Access {
        physical: other,
        range: 0..M,
        kind: AccessKind::Write,
        stream: StreamKey(2),
        clock: &clock,
        what: "other",
    };
    assert_eq!(machine.detector.access(access), []);
    machine.detector.forget(P);
    assert_eq!(machine.write(2, 0..M), []);
}

#[test]
fn the_host_must_have_seen_every_use() {
    let mut machine = Machine::default();
    machine.write(1, 0..M);
    machine.record(0, 1);
    machine.read(1, 2 * M..3 * M);
    let mut host = Clock::new();
    let seen = |machine: &Machine, range, host: &Clock| {
        machine.detector.unordered_with_host(P, range, host)
    };
    let race = seen(&machine, 0..4 * M, &host).expect("nothing is seen yet");
    assert_eq!((race.range, race.second.stream), (0..M, StreamKey::HOST));
    host.join(&machine.events[&0]);
    assert_eq!(seen(&machine, 0..2 * M, &host), None);
    let race = seen(&machine, 0..4 * M, &host).expect("the read came after the event");
    assert_eq!((race.range, race.first.kind), (2 * M..3 * M, AccessKind::Read));
    assert_eq!(seen(&machine, 4 * M..5 * M, &host), None);
}

#[test]
fn a_race_reads_as_a_sentence() {
    let mut machine = Machine::default();
    machine.write(1, 0..4096);
    let race = machine.read(2, 0..4096).remove(0);
    assert_eq!(
        race.to_string(),
        "race on bytes 0x0..0x1000 of physical extent 7: nothing orders the write by `work` on \
         stream 1 (tick 1) and the read by `work` on stream 2 (tick 1)"
    );
}

#[test]
fn state_follows_distinct_ranges_not_uses() {
    let mut machine = Machine::default();
    for round in 0..200 {
        for page in 0..16 {
            machine.write(1, page * 2 * M..(page + 1) * 2 * M);
            machine.read(1, page * 2 * M + round..(page + 1) * 2 * M - round);
        }
        assert!(machine.detector.cells() <= 16 * 3, "{} cells", machine.detector.cells());
    }
    machine.write(1, 0..32 * M);
    assert_eq!(machine.detector.cells(), 1, "one write leaves one run");
}

#[test]
fn names_that_nothing_holds_are_dropped() {
    let mut detector = Detector::new();
    let mut clock = Clock::new();
    for round in 0..10 * Names::FIRST_SWEEP {
        clock.tick(StreamKey(1));
        let what = format!("work {round}");
        detector.access(Access {
            physical: P,
            range: 0..M,
            kind: AccessKind::Write,
            stream: StreamKey(1),
            clock: &clock,
            what: &what,
        });
    }
    assert!(detector.names.known.len() <= Names::FIRST_SWEEP);
}

#[test]
fn empty_ranges_use_nothing() {
    let mut machine = Machine::default();
    machine.write(1, 0..M);
    assert_eq!(machine.write(2, 5..5), []);
    let backwards = Range { start: 9, end: 3 };
    assert_eq!(machine.write(2, backwards.clone()), []);
    assert_eq!(machine.detector.unordered_with_host(P, backwards, &Clock::new()), None);
}

#[test]
fn clocks_join_and_cover() {
    let (a, b, c) = (StreamKey(3), StreamKey(1), StreamKey(2));
    let mut left = Clock::new();
    left.tick(a);
    left.tick(a);
    left.tick(b);
    let mut right = Clock::new();
    right.tick(a);
    right.tick(c);
    assert!(!left.covers(&right) && !right.covers(&left));
    let mut both = left.clone();
    both.join(&right);
    assert_eq!((both.get(a), both.get(b), both.get(c)), (2, 1, 1));
    assert!(both.covers(&left) && both.covers(&right) && both.covers(&Clock::new()));
}

/// What a program does in one step.
#[derive(Clone, Debug)]
enum Step {
    Use { stream: u64, kind: AccessKind, range: Range<u64> },
    Record { event: u8, stream: u64 },
    Wait { stream: u64, event: u8 },
}

const BYTES: u64 = 24;

fn step() -> impl Strategy<Value = Step> {
    let kind = prop_oneof![Just(AccessKind::Read), Just(AccessKind::Write)];
    prop_oneof![
        3 => (0..4u64, kind, 0..BYTES, 1..=BYTES / 2).prop_map(|(stream, kind, start, len)| {
            Step::Use { stream, kind, range: start..(start + len).min(BYTES) }
        }),
        2 => (0..3u8, 0..4u64).prop_map(|(event, stream)| Step::Record { event, stream }),
        2 => (0..3u8, 0..4u64).prop_map(|(event, stream)| Step::Wait { stream, event }),
    ]
}

/// Every use of every byte, for ever: nothing is split, joined or dropped.
#[derive(Default)]
struct Model {
    uses: Vec<(u64, Work)>,
}

impl Model {
    /// The bytes of `range` with an earlier conflicting use that is not before `clock`. With
    /// `last_write_only`, uses that a later write of that byte hides do not count.
    fn racy_bytes(
        &self,
        range: &Range<u64>,
        kind: AccessKind,
        clock: &Clock,
        last_write_only: bool,
    ) -> Vec<u64> {
        let racy = |byte: u64| {
            let of_byte = self.uses.iter().filter(|(at, _)| *at == byte).map(|(_, work)| work);
            let uses: Vec<&Work> = of_byte.collect();
            let hidden = if last_write_only {
                uses.iter().rposition(|work| work.kind == AccessKind::Write).unwrap_or(0)
            } else {
                0
            };
            uses[hidden..].iter().any(|work| {
                let conflict = kind == AccessKind::Write || work.kind == AccessKind::Write;
                conflict && clock.get(work.stream) < work.tick
            })
        };
        range.clone().filter(|&byte| racy(byte)).collect()
    }
}

proptest! {
    /// The detector, with its runs and dropped reads, says of every byte what a record of all
    /// uses of that byte says; and it is silent only if no use of the whole program races.
    #[test]
    fn agrees_with_a_record_of_every_byte(steps in prop::collection::vec(step(), 1..80)) {
        let mut machine = Machine::default();
        let mut model = Model::default();
        let mut clean = [true; BYTES as usize];
        for step in steps {
            let (stream, kind, range) = match step {
                Step::Record { event, stream } => { machine.record(event, stream); continue }
                Step::Wait { stream, event } => { machine.wait(stream, event); continue }
                Step::Use { stream, kind, range } => (stream, kind, range),
            };
            let races = machine.use_bytes(stream, kind, range.clone());
            let clock = &machine.streams[&StreamKey(stream)];
            let mut found: Vec<u64> = races.iter().flat_map(|race| race.range.clone()).collect();
            found.sort_unstable();
            found.dedup();
            prop_assert_eq!(&found, &model.racy_bytes(&range, kind, clock, true));
            // Up to its first race a byte's last write comes after all before it, so that
            // looking at the last write alone misses nothing.
            for byte in model.racy_bytes(&range, kind, clock, false) {
                prop_assert!(!clean[byte as usize] || found.contains(&byte));
            }
            for &byte in &found {
                clean[byte as usize] = false;
            }
            let work = Work {
                stream: StreamKey(stream),
                tick: clock.get(StreamKey(stream)),
                kind,
                what: "work".into(),
            };
            for byte in range {
                model.uses.push((byte, work.clone()));
            }
        }
    }
}

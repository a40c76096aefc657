//! Random programs on the simulator against an order computed by hand.
//!
//! A program enqueues fills and copies on streams, orders some of them by events, by the legacy
//! stream and by the host, and moves memory to fresh addresses. The test keeps, for each piece
//! of work, the set of all work that comes before it, which is simple enough to trust. From
//! these sets follow three things that must hold under every schedule:
//!
//! - the race detector speaks exactly if two conflicting uses are unordered;
//! - without a race, memory ends as if all work had run when it was enqueued;
//! - misuse is reported exactly if an address was unmapped while the host did not know all work
//!   through it to be over, whether that work had run by then or finds its address gone.

mod support;

use std::ptr::null_mut;

use cuda_sim::{Report, Schedule, Simulator};
use cuda_sys::types::*;
use proptest::prelude::*;
use support::{DONE, GRANULE, call, create, enter, map_anew, ok};

/// Independent places in the memory, apart enough that fills are many bytes.
const SLOTS: usize = 4;
const SLOT_BYTES: u64 = 4096;
/// Addresses of the one handle.
const ALIASES: usize = 2;
const EVENTS: usize = 3;
/// Stream 0 is the legacy one, stream 1 is blocking, the others are not.
const STREAMS: usize = 4;
/// Streams that order with nothing by themselves, so that waiting for one says what it means.
const FREE_STREAMS: std::ops::Range<usize> = 2..STREAMS;

#[derive(Clone, Debug)]
enum Step {
    Fill {
        stream: usize,
        alias: usize,
        slot: usize,
    },
    Copy {
        stream: usize,
        alias: usize,
        from: usize,
        to: usize,
    },
    Record {
        event: usize,
        stream: usize,
    },
    Wait {
        stream: usize,
        event: usize,
    },
    StreamSync {
        stream: usize,
    },
    EventSync {
        event: usize,
    },
    /// Unmaps an alias and maps the memory at a fresh address.
    Move {
        alias: usize,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let (stream, alias, slot, event) = (0..STREAMS, 0..ALIASES, 0..SLOTS, 0..EVENTS);
    prop_oneof![
        5 => (stream.clone(), alias.clone(), slot.clone())
            .prop_map(|(stream, alias, slot)| Step::Fill { stream, alias, slot }),
        3 => (stream.clone(), alias.clone(), slot.clone(), 1..SLOTS).prop_map(
            |(stream, alias, from, by)| Step::Copy { stream, alias, from, to: (from + by) % SLOTS }
        ),
        4 => (event.clone(), stream.clone())
            .prop_map(|(event, stream)| Step::Record { event, stream }),
        4 => (stream, event.clone()).prop_map(|(stream, event)| Step::Wait { stream, event }),
        1 => FREE_STREAMS.prop_map(|stream| Step::StreamSync { stream }),
        1 => event.prop_map(|event| Step::EventSync { event }),
        1 => alias.prop_map(|alias| Step::Move { alias }),
    ]
}

/// A set of work by its number in the program.
type Set = u128;

/// What is known of a program without running it.
#[derive(Clone, Default)]
struct Model {
    /// For each piece of work: what it reads, what it writes, what comes before it.
    work: Vec<(Option<usize>, usize, Set)>,
    /// Work through each alias since it was mapped.
    through: [Set; ALIASES],
    streams: [Set; STREAMS],
    events: [Set; EVENTS],
    host: Set,
    memory: [u32; SLOTS],
    /// Whether a [`Step::Move`] came while work through its alias may not have been over.
    moved_too_early: bool,
}

impl Model {
    fn of(program: &[Step]) -> Self {
        let mut model = Self::default();
        program.iter().for_each(|step| model.take(step));
        model
    }

    /// What comes before the next thing on a stream.
    fn before(&self, stream: usize) -> Set {
        let partner = match stream {
            0 => self.streams[1],
            1 => self.streams[0],
            _ => 0,
        };
        self.streams[stream] | partner | self.host
    }

    fn enqueue(&mut self, stream: usize, alias: usize, read: Option<usize>, write: usize) {
        let (before, this) = (self.before(stream), 1 << self.work.len());
        self.work.push((read, write, before));
        self.streams[stream] = before | this;
        self.through[alias] |= this;
    }

    fn take(&mut self, step: &Step) {
        match *step {
            Step::Fill { stream, alias, slot } => {
                self.enqueue(stream, alias, None, slot);
                self.memory[slot] = self.work.len() as u32;
            }
            Step::Copy { stream, alias, from, to } => {
                self.enqueue(stream, alias, Some(from), to);
                self.memory[to] = self.memory[from];
            }
            Step::Record { event, stream } => {
                self.streams[stream] = self.before(stream);
                self.events[event] = self.streams[stream];
            }
            Step::Wait { stream, event } => {
                self.streams[stream] = self.before(stream) | self.events[event];
            }
            Step::StreamSync { stream } => self.host |= self.streams[stream],
            Step::EventSync { event } => self.host |= self.events[event],
            Step::Move { alias } => {
                self.moved_too_early |= self.through[alias] & !self.host != 0;
                self.through[alias] = 0;
            }
        }
    }

    /// Whether two pieces of work use the same slot, one of them writing, with no order.
    fn races(&self) -> bool {
        self.work.iter().enumerate().any(|(later, &(read, write, before))| {
            self.work[..later].iter().enumerate().any(|(earlier, &(read_0, write_0, _))| {
                let conflict = write == write_0 || read == Some(write_0) || read_0 == Some(write);
                conflict && before & (1 << earlier) == 0
            })
        })
    }
}

/// What a run left to look at.
#[derive(Debug)]
struct Run {
    /// `None` if work failed.
    memory: Option<[u32; SLOTS]>,
    report: Report,
    modelled_us: f64,
}

fn run(program: &[Step], schedule: Schedule, seed: u64) -> Run {
    let simulator = Simulator::builder().schedule(schedule).seed(seed).build().expect("a slot");
    let driver = simulator.driver();
    enter(&driver);

    let mut streams = [CU_STREAM_LEGACY; STREAMS];
    for (stream, flags) in streams[1..].iter_mut().zip([0, 1, 1]) {
        ok!(driver, cuStreamCreate(stream, flags));
    }
    let mut events = [null_mut(); EVENTS];
    for event in &mut events {
        ok!(driver, cuEventCreate(event, CUevent_flags::CU_EVENT_DISABLE_TIMING.0));
    }
    let handle = create(&driver, GRANULE);
    let mut aliases = [map_anew(&driver, handle, GRANULE), map_anew(&driver, handle, GRANULE)];
    let slot = |alias: u64, slot: usize| alias + slot as u64 * SLOT_BYTES;
    ok!(driver, cuMemsetD32Async(aliases[0], 0, GRANULE as usize / 4, streams[2]));
    ok!(driver, cuCtxSynchronize());

    let mut number = 0;
    for step in program {
        match *step {
            Step::Fill { stream, alias, slot: at } => {
                number += 1;
                let (at, words) = (slot(aliases[alias], at), SLOT_BYTES as usize / 4);
                ok!(driver, cuMemsetD32Async(at, number, words, streams[stream]));
            }
            Step::Copy { stream, alias, from, to } => {
                number += 1;
                let (from, to) = (slot(aliases[alias], from), slot(aliases[alias], to));
                let bytes = SLOT_BYTES as usize;
                ok!(driver, cuMemcpyDtoDAsync_v2(to, from, bytes, streams[stream]));
            }
            Step::Record { event, stream } => {
                ok!(driver, cuEventRecord(events[event], streams[stream]));
            }
            Step::Wait { stream, event } => {
                ok!(driver, cuStreamWaitEvent(streams[stream], events[event], 0));
            }
            Step::StreamSync { stream } => ok!(driver, cuStreamSynchronize(streams[stream])),
            Step::EventSync { event } => ok!(driver, cuEventSynchronize(events[event])),
            Step::Move { alias } => {
                // Where work through the mapping has run the simulator refuses; where it has
                // not, the work will fault.
                if call!(driver, cuMemUnmap(aliases[alias], GRANULE as usize)) == DONE {
                    aliases[alias] = map_anew(&driver, handle, GRANULE);
                }
            }
        }
    }
    if call!(driver, cuCtxSynchronize()) != DONE {
        let (report, modelled_us) = (simulator.report(), simulator.modelled_us());
        return Run { memory: None, report, modelled_us };
    }
    let memory = std::array::from_fn(|at| {
        let mut slot_bytes = vec![0; SLOT_BYTES as usize];
        simulator.peek(slot(aliases[0], at), &mut slot_bytes).expect("mapped");
        let (words, _) = slot_bytes.as_chunks::<4>();
        assert!(words.iter().all(|word| word == &words[0]), "work is not torn");
        u32::from_le_bytes(words[0])
    });
    let (report, modelled_us) = (simulator.report(), simulator.modelled_us());
    Run { memory: Some(memory), report, modelled_us }
}

fn schedules() -> impl Iterator<Item = (Schedule, u64)> {
    let fixed = [(Schedule::Eager, 0), (Schedule::Late { patience: 2 }, 0)];
    fixed.into_iter().chain((0..4).map(|seed| (Schedule::Random, seed)))
}

/// Programs of which no step but the last may be a bad move, because a fault ends everything
/// behind it. In half of them steps that would race, and in most of them moves that come too
/// early, are left out: otherwise few long programs would be without either.
fn program() -> impl Strategy<Value = Vec<Step>> {
    let wild = (any::<bool>(), prop::bool::weighted(0.2));
    (prop::collection::vec(step(), 1..120), wild).prop_map(|(steps, (may_race, may_hurry))| {
        let (mut model, mut program) = (Model::default(), Vec::new());
        for step in steps {
            let mut next = model.clone();
            next.take(&step);
            if !may_race && next.races() || !may_hurry && next.moved_too_early {
                continue;
            }
            model = next;
            program.push(step);
            if model.moved_too_early {
                break;
            }
        }
        program
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    #[test]
    fn every_schedule_keeps_the_order_and_finds_what_has_none(program in program()) {
        let model = Model::of(&program);
        for (schedule, seed) in schedules() {
            let run = run(&program, schedule, seed);
            prop_assert_eq!(
                !run.report.misuse.is_empty(), model.moved_too_early,
                "{:?}, seed {}: {:?}", schedule, seed, run.report.misuse
            );
            if model.moved_too_early {
                continue;
            }
            prop_assert_eq!(
                !run.report.races.is_empty(), model.races(),
                "{:?}, seed {}: {:?}", schedule, seed, run.report.races
            );
            prop_assert!(run.memory.is_some(), "work failed");
            if !model.races() {
                prop_assert_eq!(run.memory, Some(model.memory), "{:?}, seed {}", schedule, seed);
            }
        }
    }

    #[test]
    fn a_seed_is_a_run(program in program(), seed: u64) {
        let first = run(&program, Schedule::Random, seed);
        let second = run(&program, Schedule::Random, seed);
        prop_assert_eq!(first.memory, second.memory);
        prop_assert_eq!(first.report.races, second.report.races);
        prop_assert_eq!(first.report.misuse.len(), second.report.misuse.len());
        prop_assert_eq!(first.modelled_us, second.modelled_us);
    }
}

/// The two halves of a race: schedules must be able to bring out both, or a program could rely
/// on an order that a GPU does not keep.
#[test]
fn seeds_bring_out_both_outcomes_of_a_race() {
    let program =
        [Step::Fill { stream: 2, alias: 0, slot: 0 }, Step::Fill { stream: 3, alias: 1, slot: 0 }];
    let outcome = |seed| run(&program, Schedule::Random, seed).memory.expect("no fault")[0];
    let mut outcomes: Vec<u32> = (0..64).map(outcome).collect();
    outcomes.sort_unstable();
    outcomes.dedup();
    assert_eq!(outcomes, [1, 2]);
}

/// Memory that moved: the new use is ordered after the old, but the old address goes while the
/// host has not seen the old use end.
#[test]
fn a_zombie_must_outlive_its_work() {
    let moved = |sync: &[Step], schedule| {
        let mut program = vec![
            Step::Fill { stream: 2, alias: 0, slot: 1 },
            Step::Record { event: 0, stream: 2 },
            Step::Wait { stream: 3, event: 0 },
            Step::Fill { stream: 3, alias: 1, slot: 1 },
        ];
        program.extend_from_slice(sync);
        program.push(Step::Move { alias: 0 });
        run(&program, schedule, 0)
    };
    for (schedule, _) in schedules() {
        let too_early = moved(&[], schedule);
        assert_eq!(too_early.report.misuse.len(), 1, "{:?}", too_early.report.misuse);
        let in_time = moved(&[Step::EventSync { event: 0 }], schedule);
        assert_eq!(in_time.memory.map(|slots| slots[1]), Some(2));
        assert!(in_time.report.misuse.is_empty() && in_time.report.races.is_empty());
    }
}

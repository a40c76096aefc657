//! Cases on a warm pool: rounds that are timed as a whole, then one with a clock at every call.

use std::slice::from_ref;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use vpmm::StreamHandle;

use super::figures::{Figures, Percentiles};
use super::loops::{Hands, Samples, clock_ns, loop_ns};
use super::meeting::Meeting;
use super::script::{Body, Lane, Warm};
use super::subject::Subject;
use super::{Bench, BenchError};

/// Single calls whose time is noted, over all threads: their median is steady long before.
const MOST_SAMPLES: usize = 1_000_000;

/// How often, and for how long, a body that settles late is done untimed.
const MOST_UNTIMED: usize = 32;
const LONGEST_UNTIMED: Duration = Duration::from_secs(2);

/// One thread's part of a round.
struct Span {
    begin: Instant,
    end: Instant,
    calls: u64,
}

/// What one thread measured.
#[derive(Default)]
struct Measured {
    rounds: Vec<Span>,
    /// Nanoseconds of single calls, the clock's included.
    samples: Vec<u32>,
}

/// A round over all threads.
struct Round {
    /// From the first thread's begin to the last one's end.
    wall: Duration,
    /// Every thread's own time, summed.
    busy: Duration,
    /// Calls of all threads.
    calls: u64,
    driver_calls: u64,
}

impl Round {
    fn calls_per_ns(&self) -> f64 {
        self.calls as f64 / (self.wall.as_nanos() as f64).max(1.0)
    }

    /// Nanoseconds of one thread's call, and the calls of all `lanes` in millions a second: both without the loop
    /// around each call, which takes `loop_ns`.
    fn told(&self, lanes: usize, loop_ns: f64) -> (f64, f64) {
        let (ops, lanes) = (self.calls as f64, lanes as f64);
        let ops_of_lane = ops / lanes;
        let loops_ns = loop_ns * ops_of_lane;
        let wall_ns = (self.wall.as_nanos() as f64 - loops_ns).max(1.0);
        let busy_ns = (self.busy.as_nanos() as f64 / lanes - loops_ns).max(0.0);
        (busy_ns / ops_of_lane, ops / wall_ns * 1e3)
    }
}

/// The round with the most calls in a time, of those that every lane has done: whatever disturbs one only ever makes
/// it slower.
fn fastest(measured: &[Measured], driver_calls: &[u64]) -> Option<Round> {
    let rounds = driver_calls.iter().enumerate().filter_map(|(index, &driver_calls)| {
        let spans = || measured.iter().filter_map(|lane| lane.rounds.get(index));
        let begin = spans().map(|span| span.begin).min()?;
        let end = spans().map(|span| span.end).max()?;
        let busy = spans().map(|span| span.end - span.begin).sum();
        let calls = spans().map(|span| span.calls).sum();
        Some(Round { wall: end - begin, busy, calls, driver_calls })
    });
    rounds.max_by(|a, b| a.calls_per_ns().total_cmp(&b.calls_per_ns()))
}

/// What the threads have in common.
struct Shared<'a, S> {
    bench: &'a Bench<'a>,
    subject: &'a S,
    streams: &'a [StreamHandle],
    rounds: usize,
    lanes: usize,
    meeting: Meeting,
    /// Rounds whose time is over.
    over: AtomicUsize,
    /// Driver calls of each round, noted by the first thread.
    driver_calls: Mutex<Vec<u64>>,
}

pub(super) fn run<S: Subject>(
    script: &Warm,
    rounds: usize,
    bench: &Bench<'_>,
    subject: &S,
    streams: &[StreamHandle],
) -> Result<Figures, BenchError> {
    // All lanes have the same loop.
    let loop_ns = script.lanes.first().map_or(0.0, |lane| loop_ns(&lane.body, lane.slots, streams));
    let shared = Shared {
        bench,
        subject,
        streams,
        rounds,
        lanes: script.lanes.len().max(1),
        meeting: Meeting::new(script.lanes.len()),
        over: AtomicUsize::new(0),
        driver_calls: Mutex::default(),
    };
    let measured = on_threads(script, &shared)?;
    let driver_calls = shared.driver_calls.into_inner().unwrap_or_else(PoisonError::into_inner);

    let best = fastest(&measured, &driver_calls).ok_or(BenchError::Nothing)?;
    let (ns_per_op, mops_per_s) = best.told(script.lanes.len(), loop_ns);
    let samples = measured.into_iter().flat_map(|lane| lane.samples).map(f64::from).collect();
    let Percentiles { p50_ns, p99_ns, p999_ns, max_ns } = Percentiles::of(samples, clock_ns());
    Ok(Figures {
        threads: script.lanes.len() as u32,
        ops: best.calls,
        ns_per_op,
        p50_ns,
        p99_ns,
        p999_ns,
        max_ns,
        mops_per_s,
        peak_live_bytes: script.peak_live_bytes(),
        peak_mapped_bytes: subject.peak_mapped_bytes()?,
        driver_calls: best.driver_calls,
    })
}

/// Runs every lane on a thread of its own; a single one on this thread.
fn on_threads<S: Subject>(
    script: &Warm,
    shared: &Shared<'_, S>,
) -> Result<Vec<Measured>, BenchError> {
    if let [lane] = script.lanes.as_slice() {
        return Ok(vec![run_lane(lane, 0, shared)?]);
    }
    // Closed until all threads are there: those of a meeting that is not complete would wait
    // for ever.
    let gate = RwLock::new(false);
    thread::scope(|scope| {
        let mut open = gate.write().unwrap_or_else(PoisonError::into_inner);
        let gate = &gate;
        let spawned: Result<Vec<_>, _> = (0..)
            .zip(&script.lanes)
            .map(|(index, lane)| {
                thread::Builder::new().spawn_scoped(scope, move || {
                    let open = *gate.read().unwrap_or_else(PoisonError::into_inner);
                    if open { run_lane(lane, index, shared) } else { Ok(Measured::default()) }
                })
            })
            .collect();
        *open = spawned.is_ok();
        drop(open);
        spawned?
            .into_iter()
            .map(|thread| match thread.join() {
                Ok(measured) => measured.map_err(BenchError::from),
                Err(panic) => std::panic::resume_unwind(panic),
            })
            .collect()
    })
}

fn run_lane<S: Subject>(
    lane: &Lane,
    index: usize,
    shared: &Shared<'_, S>,
) -> vpmm::Result<Measured> {
    let mut hands = Hands::new(shared.subject, shared.streams, lane.slots);
    let measured = measure(lane, index, shared, &mut hands);
    let freed = hands.let_go();
    let measured = measured?;
    freed.map(|()| measured)
}

fn measure<S: Subject>(
    lane: &Lane,
    index: usize,
    shared: &Shared<'_, S>,
    hands: &mut Hands<'_, S>,
) -> vpmm::Result<Measured> {
    let mut seat = shared.meeting.seat();
    let mut measured = Measured::default();
    let most_samples = (MOST_SAMPLES / shared.lanes).min(lane.body.calls() as usize);
    let mut samples = Samples::with_room_for(most_samples);

    // Where another thread fails, this one ends with what it has, and that one tells.
    let prepared =
        seat.phase(|| shared.bench.enter().and_then(|()| hands.run_steps(&lane.setup)))?;
    if prepared.is_none() {
        return Ok(measured);
    }
    for step in lane.together.iter().flatten() {
        if seat.phase(|| hands.run_steps(from_ref(step)))?.is_none() {
            return Ok(measured);
        }
    }
    if seat.phase(|| settle(lane, shared, hands))?.is_none() {
        return Ok(measured);
    }
    for number in 0..shared.rounds {
        // Between two phases, so that no other thread is calling.
        let calls_before = (index == 0).then(|| shared.subject.driver_calls());
        let round = seat.phase(|| run_round(&lane.body, number, shared, hands))?;
        let Some(round) = round else { return Ok(measured) };
        measured.rounds.push(round);
        if let Some(before) = calls_before {
            let calls = shared.subject.driver_calls() - before;
            let mut all = shared.driver_calls.lock().unwrap_or_else(PoisonError::into_inner);
            all.push(calls);
        }
    }
    seat.phase(|| hands.sample(&lane.body, &mut samples))?;
    measured.samples = samples.into_nanoseconds();
    Ok(measured)
}

/// Does the body untimed: once, or where that is not enough until it needs no driver call, if ever.
fn settle<S: Subject>(
    lane: &Lane,
    shared: &Shared<'_, S>,
    hands: &mut Hands<'_, S>,
) -> vpmm::Result<()> {
    let begin = Instant::now();
    // Nine times have been seen.
    for _ in 0..if lane.settles { MOST_UNTIMED } else { 1 } {
        let before = shared.subject.driver_calls();
        hands.run(&lane.body)?;
        if shared.subject.driver_calls() == before || begin.elapsed() > LONGEST_UNTIMED {
            break;
        }
    }
    Ok(())
}

/// One thread's part of a round. Where any number of calls will do, all threads go on until the
/// round's time is over for the first of them: one that came late or was interrupted then has made
/// fewer calls, and keeps nobody waiting. Else the body is done once.
fn run_round<S: Subject>(
    body: &Body,
    number: usize,
    shared: &Shared<'_, S>,
    hands: &mut Hands<'_, S>,
) -> vpmm::Result<Span> {
    let begin = Instant::now();
    let (Some(time), Some(part)) = (shared.bench.round_time(), body.part()) else {
        hands.run(body)?;
        return Ok(Span { begin, end: Instant::now(), calls: body.calls() });
    };
    let mut calls = 0;
    while shared.over.load(Ordering::Relaxed) <= number {
        hands.run(&part)?;
        calls += part.calls();
        if begin.elapsed() >= time {
            shared.over.store(number + 1, Ordering::Relaxed);
        }
    }
    Ok(Span { begin, end: Instant::now(), calls })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounds of one lane: begin and end in microseconds, and calls.
    fn lane(start: Instant, rounds: &[(u64, u64, u64)]) -> Measured {
        let at = |us| start + Duration::from_micros(us);
        let spans = rounds.iter().map(|&(begin, end, calls)| Span {
            begin: at(begin),
            end: at(end),
            calls,
        });
        Measured { rounds: spans.collect(), samples: Vec::new() }
    }

    #[test]
    fn the_fastest_round_is_told_of_one_thread_and_of_all() {
        let start = Instant::now();
        let measured = [
            lane(start, &[(0, 200, 100), (300, 400, 100), (500, 900, 100)]),
            lane(start, &[(0, 200, 100), (310, 420, 50), (500, 900, 100)]),
        ];
        let best = fastest(&measured, &[7, 8, 9]).unwrap();
        // From the first begin to the last end, and both lanes' own times.
        let us = Duration::from_micros;
        assert_eq!((best.wall, best.busy), (us(120), us(210)));
        assert_eq!((best.calls, best.driver_calls), (150, 8));
        let near = |told: (f64, f64), expected: (f64, f64)| {
            let is_near = |a: f64, b: f64| (a - b).abs() < 1e-6 * b;
            assert!(is_near(told.0, expected.0) && is_near(told.1, expected.1), "{told:?}");
        };
        // 105 us for the 75 calls of a thread; 150 calls in 120 us.
        near(best.told(2, 0.0), (1_400.0, 1.25));
        // The loop takes a thread 7.5 us of that, while the other one's runs beside it.
        near(best.told(2, 100.0), (1_300.0, 150.0 / 112.5));
        assert_eq!(best.told(2, 1e6).0, 0.0, "never less than nothing");
        assert!(fastest(&measured, &[]).is_none());
    }
}

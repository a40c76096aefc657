//! The loops that are timed.
//!
//! Everything that is not the allocator's was done before: sizes, slots and streams are
//! read from a list. What the loops cost all the same is measured on [`Nothing`].

use std::hint::black_box;
use std::time::Instant;

use vpmm::StreamHandle;

use super::figures::median;
use super::script::{Body, Step};
use super::subject::{Nothing, Subject};

/// The pointers of one lane, and what they are used with.
pub(super) struct Hands<'a, S: Subject> {
    subject: &'a S,
    streams: &'a [StreamHandle],
    held: Vec<S::Ptr>,
}

/// What happens after every call of the allocator.
trait Observer {
    fn called(&mut self);
}

/// Nothing: for the figure per call.
struct Blind;

impl Observer for Blind {
    #[inline(always)]
    fn called(&mut self) {}
}

/// The time of every call, from the end of the one before it.
pub(super) struct Samples {
    nanoseconds: Vec<u32>,
    /// How many of them are noted.
    noted: usize,
    last: Instant,
}

impl Samples {
    /// Room for so many: what comes after that is not noted.
    pub(super) fn with_room_for(calls: usize) -> Self {
        // Written, since the first touch of a page would be part of some call's time.
        Self { nanoseconds: vec![u32::MAX; calls], noted: 0, last: Instant::now() }
    }

    /// The times in nanoseconds.
    pub(super) fn into_nanoseconds(mut self) -> Vec<u32> {
        self.nanoseconds.truncate(self.noted);
        self.nanoseconds
    }
}

impl Observer for Samples {
    #[inline(always)]
    fn called(&mut self) {
        let now = Instant::now();
        if let Some(place) = self.nanoseconds.get_mut(self.noted) {
            let spent = (now - self.last).as_nanos();
            *place = u32::try_from(spent).unwrap_or(u32::MAX);
            self.noted += 1;
        }
        self.last = now;
    }
}

impl<'a, S: Subject> Hands<'a, S> {
    pub(super) fn new(subject: &'a S, streams: &'a [StreamHandle], slots: u32) -> Self {
        Self { subject, streams, held: vec![S::NONE; slots as usize] }
    }

    /// Makes the calls.
    pub(super) fn run(&mut self, body: &Body) -> vpmm::Result<()> {
        self.observed(body, &mut Blind)
    }

    /// Makes the calls and notes the time of each.
    pub(super) fn sample(&mut self, body: &Body, samples: &mut Samples) -> vpmm::Result<()> {
        samples.last = Instant::now();
        self.observed(body, samples)
    }

    /// Makes the calls of a list once.
    pub(super) fn run_steps(&mut self, steps: &[Step]) -> vpmm::Result<()> {
        self.steps(steps, &mut Blind)
    }

    /// Makes the calls of a list once and notes the time of each.
    pub(super) fn sample_steps(
        &mut self,
        steps: &[Step],
        samples: &mut Samples,
    ) -> vpmm::Result<()> {
        samples.last = Instant::now();
        self.steps(steps, samples)
    }

    /// Puts what the first so many slots hold in the order of addresses.
    pub(super) fn sort(&mut self, slots: u32) {
        self.held[..slots as usize].sort_unstable_by_key(|ptr| S::address(*ptr));
    }

    fn observed(&mut self, body: &Body, observer: &mut impl Observer) -> vpmm::Result<()> {
        match body {
            Body::Pairs { bytes, stream, pairs } => {
                let stream = self.streams[*stream as usize];
                self.pairs(*bytes, stream, *pairs, observer)
            }
            Body::Steps { steps, times } => {
                (0..*times).try_for_each(|_| self.steps(steps, observer))
            }
        }
    }

    // Not inlined, so that one loop serves every caller and is compiled for itself.
    #[inline(never)]
    fn pairs(
        &mut self,
        bytes: u64,
        stream: StreamHandle,
        pairs: u64,
        observer: &mut impl Observer,
    ) -> vpmm::Result<()> {
        for _ in 0..pairs {
            let ptr = self.subject.allocate(black_box(bytes), stream)?;
            observer.called();
            // SAFETY: allocated above, freed once.
            unsafe { self.subject.free(black_box(ptr), stream) }?;
            observer.called();
        }
        Ok(())
    }

    #[inline(never)]
    fn steps(&mut self, steps: &[Step], observer: &mut impl Observer) -> vpmm::Result<()> {
        for (index, step) in steps.iter().enumerate() {
            if let Some(soon) = steps.get(index + AHEAD) {
                prefetch(&self.held[soon.slot as usize]);
            }
            let stream = self.streams[step.stream as usize];
            let held = &mut self.held[step.slot as usize];
            if step.bytes > 0 {
                *held = self.subject.allocate(step.bytes, stream)?;
            } else {
                let ptr = std::mem::replace(held, S::NONE);
                // SAFETY: the scripts free full slots only, so that the pointer came from this
                // allocator; the slot was emptied, so that nobody frees it a second time.
                unsafe { self.subject.free(ptr, stream) }?;
            }
            observer.called();
        }
        Ok(())
    }

    /// Frees whatever is still held, on the first stream; the first error is told.
    pub(super) fn let_go(&mut self) -> vpmm::Result<()> {
        let mut first = Ok(());
        for held in &mut self.held {
            let ptr = std::mem::replace(held, S::NONE);
            if ptr == S::NONE {
                continue;
            }
            // SAFETY: as in `steps`.
            let freed = unsafe { self.subject.free(ptr, self.streams[0]) };
            first = first.and(freed);
        }
        first
    }
}

/// How many steps ahead the slot is fetched: a program has the pointers that it frees at hand,
/// so that a miss in the table of them is none of the allocator's costs.
const AHEAD: usize = 16;

#[inline(always)]
fn prefetch<T>(place: &T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: every x86-64 processor has the instruction; the address is a reference's.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(place).cast::<i8>()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}

/// Nanoseconds per call of the loop around a body's calls, as [`Hands::run`] goes through it.
pub(super) fn loop_ns(body: &Body, slots: u32, streams: &[StreamHandle]) -> f64 {
    const ROUNDS: usize = 3;
    let calls = body.calls().max(1);
    let mut hands = Hands::new(&Nothing, streams, slots);
    let round = |_| {
        let started = Instant::now();
        // It never fails.
        let _ = hands.run(body);
        started.elapsed().as_nanos() as f64 / calls as f64
    };
    (0..ROUNDS).map(round).reduce(f64::min).unwrap_or(0.0)
}

/// Nanoseconds that the clock at every call adds to a sample.
pub(super) fn clock_ns() -> f64 {
    const PAIRS: u64 = 50_000;
    let body = Body::Pairs { bytes: 1, stream: 0, pairs: PAIRS };
    let mut samples = Samples::with_room_for(2 * PAIRS as usize);
    let _ = Hands::new(&Nothing, &[StreamHandle::LEGACY], 0).sample(&body, &mut samples);
    let samples = samples.into_nanoseconds().into_iter().map(f64::from).collect();
    median(samples)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::Mutex;

    use super::super::case::Case;
    use super::super::script::{Extent, Script};
    use super::*;

    /// Notes what is live; a wrong free panics.
    #[derive(Default)]
    struct Noting {
        next: Mutex<u64>,
        live: Mutex<HashSet<u64>>,
        calls: Mutex<u64>,
    }

    impl Subject for Noting {
        type Ptr = u64;

        const NONE: u64 = 0;

        fn address(ptr: u64) -> u64 {
            ptr
        }

        fn allocate(&self, bytes: u64, _stream: StreamHandle) -> vpmm::Result<u64> {
            assert!(bytes > 0);
            *self.calls.lock().unwrap() += 1;
            let mut next = self.next.lock().unwrap();
            *next += 1;
            self.live.lock().unwrap().insert(*next);
            Ok(*next)
        }

        unsafe fn free(&self, ptr: u64, _stream: StreamHandle) -> vpmm::Result<()> {
            *self.calls.lock().unwrap() += 1;
            assert!(self.live.lock().unwrap().remove(&ptr), "{ptr} is not live");
            Ok(())
        }

        fn peak_mapped_bytes(&self) -> vpmm::Result<u64> {
            Ok(0)
        }

        fn driver_calls(&self) -> u64 {
            0
        }
    }

    #[test]
    fn every_case_frees_what_it_has_allocated_and_nothing_else() {
        let streams = [StreamHandle::LEGACY; 1000];
        for case in Case::ALL {
            let subject = Noting::default();
            let extent = Extent { calls: case.calls().least, live_divisor: 100 };
            match case.script(extent) {
                Script::Warm(warm) => {
                    let mut set_up = 0;
                    if let Some(zombies) = &warm.zombies {
                        let mut hands = Hands::new(&subject, &streams, zombies.slots);
                        for steps in [&zombies.scatter, &zombies.free, &zombies.gather] {
                            hands.run_steps(steps).unwrap();
                            set_up += steps.len() as u64;
                        }
                        let live = subject.live.lock().unwrap().len() as u64;
                        hands.let_go().unwrap();
                        set_up += live;
                    }
                    let mut hands: Vec<_> = warm
                        .lanes
                        .iter()
                        .map(|lane| Hands::new(&subject, &streams, lane.slots))
                        .collect();
                    let mut calls = set_up;
                    for (lane, hands) in warm.lanes.iter().zip(&mut hands) {
                        hands.run_steps(&lane.setup).unwrap();
                        hands.run(&lane.body).unwrap();
                        let mut samples = Samples::with_room_for(lane.body.calls() as usize);
                        hands.sample(&lane.body, &mut samples).unwrap();
                        assert_eq!(samples.into_nanoseconds().len() as u64, lane.body.calls());
                        calls += lane.setup.len() as u64 + 2 * lane.body.calls();
                    }
                    assert_eq!(*subject.calls.lock().unwrap(), calls, "{case}");
                    hands.iter_mut().for_each(|hands| hands.let_go().unwrap());
                }
                Script::Cold(cold) => {
                    let mut hands = Hands::new(&subject, &streams, cold.slots);
                    hands.run_steps(&cold.setup).unwrap();
                    let mut samples = Samples::with_room_for(cold.timed.len());
                    hands.sample_steps(&cold.timed, &mut samples).unwrap();
                    hands.let_go().unwrap();
                }
            }
            assert!(subject.live.lock().unwrap().is_empty(), "{case}");
        }
    }

    /// Between the making of the room and the first call other things are done, which may take long.
    #[test]
    fn the_first_sample_is_the_first_calls() {
        let body = Body::Pairs { bytes: 512, stream: 0, pairs: 2 };
        let steps = [Step { bytes: 512, slot: 0, stream: 0 }];
        let mut hands = Hands::new(&Nothing, &[StreamHandle::LEGACY], 1);
        let mut first = |of_steps| {
            let mut samples = Samples::with_room_for(4);
            std::thread::sleep(std::time::Duration::from_millis(20));
            let done = match of_steps {
                false => hands.sample(&body, &mut samples),
                true => hands.sample_steps(&steps, &mut samples),
            };
            done.unwrap();
            samples.into_nanoseconds()[0]
        };
        for of_steps in [false, true] {
            assert!((0..8).any(|_| first(of_steps) < 10_000_000), "{of_steps}");
        }
    }

    #[test]
    fn loops_cost_little_and_clocks_more() {
        let body = Body::Pairs { bytes: 512, stream: 0, pairs: 10_000 };
        let loop_ns = loop_ns(&body, 0, &[StreamHandle::LEGACY]);
        assert!(loop_ns > 0.0 && loop_ns < 1_000.0, "{loop_ns}");
        assert!(clock_ns() >= 1.0);
    }
}

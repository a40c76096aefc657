//! What each case asks of an allocator, written down before any clock runs.

use super::case::Case;
use super::random::Random;

/// One call of the allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Step {
    /// The bytes to allocate, 0 for a free.
    pub(super) bytes: u64,
    /// Where the pointer is kept: each lane has its own slots.
    pub(super) slot: u32,
    /// Which of the case's streams.
    pub(super) stream: u32,
}

impl Step {
    fn allocate(slot: u32, bytes: u64, stream: u32) -> Self {
        Self { bytes, slot, stream }
    }

    fn free(slot: u32, stream: u32) -> Self {
        Self { bytes: 0, slot, stream }
    }
}

/// The calls that are timed.
#[derive(Clone, Debug)]
pub(super) enum Body {
    /// Allocations, each freed at once; apart from [`Body::Steps`], because the loop
    /// around them would cost as much as they do.
    Pairs {
        /// The size of each.
        bytes: u64,
        /// The stream of all.
        stream: u32,
        /// How many.
        pairs: u64,
    },
    /// A list of steps, run several times over.
    Steps {
        /// The steps; run once, they leave as many allocations as they found, in the same slots.
        steps: Vec<Step>,
        /// How often.
        times: u64,
    },
}

/// What one thread does.
#[derive(Clone, Debug)]
pub(super) struct Lane {
    /// How many pointers are kept.
    pub(super) slots: u32,
    /// Done first, untimed.
    pub(super) setup: Vec<Step>,
    /// Done next by all lanes, which wait for each other between the two steps: so that all
    /// that will be live at one time has been live at one time when the clock starts.
    pub(super) together: Option<[Step; 2]>,
    /// Done again and again.
    pub(super) body: Body,
}

/// A case whose pool is warm: everything was done once before.
#[derive(Clone, Debug)]
pub(super) struct Warm {
    /// One for each thread.
    pub(super) lanes: Vec<Lane>,
    /// Streams of all lanes together.
    pub(super) streams: u32,
}

/// A case of which every measurement needs a fresh pool.
#[derive(Clone, Debug)]
pub(super) struct Cold {
    /// The most that the pool may hold.
    pub(super) limit_bytes: Option<u64>,
    /// How many pointers are kept.
    pub(super) slots: u32,
    /// Done first, untimed; then the stream is waited for.
    pub(super) setup: Vec<Step>,
    /// What is timed.
    pub(super) timed: Vec<Step>,
}

/// What a case does.
#[derive(Clone, Debug)]
pub(super) enum Script {
    Warm(Warm),
    Cold(Cold),
}

impl Script {
    /// How many streams the steps are on.
    pub(super) fn streams(&self) -> u32 {
        match self {
            Self::Warm(warm) => warm.streams,
            Self::Cold(_) => 1,
        }
    }
}

/// How many calls of a warm case one thread makes in one round, and how much of the case's
/// own size there is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    pub(super) calls: u64,
    /// Divides the number of live allocations: 1, or more for a smoke test.
    pub(super) live_divisor: u32,
}

/// Calls of a warm case in a round: what figures are meant to be taken from, and the least
/// that is still the case.
pub(super) struct Calls {
    pub(super) full: u64,
    pub(super) least: u64,
}

/// The size of [`Case::Threads`].
const THREAD_BYTES: u64 = 1 << 20;

/// Sizes of [`Case::Live`].
const SMALL_BYTES: (u64, u64) = (512, 4096);

/// The size and the number of [`Case::CrossStream`].
const CROSS_BYTES: u64 = 4 << 20;
const CROSS_LIVE: u32 = 8;

/// Allocations on one stream before the streams of [`Case::CrossStream`] change places.
const CROSS_PHASE: u32 = 64;

/// [`Case::Gather`]: pieces, the size of each, and the request.
const GATHER_PIECES: u32 = 1024;
/// Every so manyth is freed: 1 GiB in all, scattered over 32 GiB.
const GATHER_FREED: usize = 32;
const GATHER_PIECE_BYTES: u64 = 32 << 20;
const GATHER_BYTES: u64 = 1 << 30;

impl Case {
    /// How long a round of the case is; for cold cases it is what it is.
    pub(super) fn calls(self) -> Calls {
        match self {
            Self::Pair { .. } | Self::Threads { .. } => Calls { full: 2_000_000, least: 400 },
            // A ramp up to all that may be live, some time there, and the way back to nothing.
            Self::Random { live, .. } => Calls { full: 200_000, least: 4 * u64::from(live) },
            Self::Live { .. } => Calls { full: 400_000, least: 400 },
            Self::CrossStream => Calls { full: 1_000_000, least: u64::from(4 * CROSS_PHASE) },
            Self::Grow { .. } | Self::Gather => Calls { full: 1, least: 1 },
        }
    }

    /// What the case does.
    pub(super) fn script(self, extent: Extent) -> Script {
        let fewer = |live: u32| (live / extent.live_divisor).max(1);
        match self {
            Self::Pair { bytes, .. } => one_lane(1, pairs(bytes, 0, extent.calls)),
            Self::Random { least_bytes, most_bytes, live, .. } => {
                let live = fewer(live);
                let steps = random(least_bytes, most_bytes, live, extent.calls);
                one_lane(1, Lane { slots: live, setup: vec![], together: None, body: once(steps) })
            }
            Self::Live { live, .. } => one_lane(1, replacements(fewer(live), extent.calls)),
            Self::Threads { threads, shared_stream, .. } => {
                let stream = |lane| if shared_stream { 0 } else { lane };
                let lanes =
                    (0..threads).map(|lane| pairs(THREAD_BYTES, stream(lane), extent.calls));
                Script::Warm(Warm {
                    lanes: lanes.collect(),
                    streams: if shared_stream { 1 } else { threads },
                })
            }
            Self::CrossStream => one_lane(2, to_and_fro(extent.calls)),
            Self::Grow { requests, bytes, .. } => Script::Cold(Cold {
                limit_bytes: None,
                slots: requests,
                setup: vec![],
                timed: (0..requests).map(|slot| Step::allocate(slot, bytes, 0)).collect(),
            }),
            Self::Gather => Script::Cold(gather()),
        }
    }
}

fn one_lane(streams: u32, lane: Lane) -> Script {
    Script::Warm(Warm { lanes: vec![lane], streams })
}

fn once(steps: Vec<Step>) -> Body {
    Body::Steps { steps, times: 1 }
}

fn pairs(bytes: u64, stream: u32, calls: u64) -> Lane {
    let body = Body::Pairs { bytes, stream, pairs: (calls / 2).max(1) };
    let together = Some([Step::allocate(0, bytes, stream), Step::free(0, stream)]);
    Lane { slots: 1, setup: vec![], together, body }
}

/// About `calls` calls from nothing to nothing: three allocations for each free until `live`
/// are live, then around that many, in the end frees only. What is freed is random.
fn random(least_bytes: u64, most_bytes: u64, live: u32, calls: u64) -> Vec<Step> {
    let mut random = Random::new(1);
    let mut steps = Vec::new();
    let mut held: Vec<u32> = Vec::new();
    let mut vacant: Vec<u32> = (0..live).rev().collect();
    while ((steps.len() + held.len()) as u64) < calls {
        let may_free = !held.is_empty();
        let slot = if may_free && random.below(4) == 0 { None } else { vacant.pop() };
        match slot {
            Some(slot) => {
                steps.push(Step::allocate(slot, random.between(least_bytes, most_bytes), 0));
                held.push(slot);
            }
            None => steps.push(free_one(&mut held, &mut vacant, &mut random)),
        }
    }
    while !held.is_empty() {
        steps.push(free_one(&mut held, &mut vacant, &mut random));
    }
    steps
}

fn free_one(held: &mut Vec<u32>, vacant: &mut Vec<u32>, random: &mut Random) -> Step {
    let slot = held.swap_remove(random.below(held.len() as u64) as usize);
    vacant.push(slot);
    Step::free(slot, 0)
}

/// `live` small allocations, of which random ones are freed and allocated anew.
fn replacements(live: u32, calls: u64) -> Lane {
    let mut random = Random::new(2);
    let (least, most) = SMALL_BYTES;
    let setup =
        (0..live).map(|slot| Step::allocate(slot, random.between(least, most), 0)).collect();
    let replace = |_| {
        let slot = random.below(u64::from(live)) as u32;
        [Step::free(slot, 0), Step::allocate(slot, random.between(least, most), 0)]
    };
    let steps = (0..(calls / 2).max(1)).flat_map(replace).collect();
    Lane { slots: live, setup, together: None, body: once(steps) }
}

/// A ring of live blocks. For some time all are allocated on stream 0 and freed on stream 1, then
/// the other way round: so nearly every allocation needs memory that the other stream has freed.
fn to_and_fro(calls: u64) -> Lane {
    let ring = |step: u32| step % CROSS_LIVE;
    let setup = (0..CROSS_LIVE).map(|slot| Step::allocate(slot, CROSS_BYTES, 1)).collect();
    let mut allocated_on = [1; CROSS_LIVE as usize];
    let mut steps = Vec::new();
    for stream in [0, 1] {
        for slot in (0..CROSS_PHASE).map(ring) {
            let earlier = std::mem::replace(&mut allocated_on[slot as usize], stream);
            steps.push(Step::free(slot, 1 - earlier));
            steps.push(Step::allocate(slot, CROSS_BYTES, stream));
        }
    }
    let times = (calls / steps.len() as u64).max(1);
    Lane { slots: CROSS_LIVE, setup, together: None, body: Body::Steps { steps, times } }
}

fn gather() -> Cold {
    let pieces = (0..GATHER_PIECES).map(|slot| Step::allocate(slot, GATHER_PIECE_BYTES, 0));
    let scattered = (0..GATHER_PIECES).step_by(GATHER_FREED).map(|slot| Step::free(slot, 0));
    Cold {
        limit_bytes: Some(u64::from(GATHER_PIECES) * GATHER_PIECE_BYTES),
        slots: GATHER_PIECES + 1,
        setup: pieces.chain(scattered).collect(),
        timed: vec![Step::allocate(GATHER_PIECES, GATHER_BYTES, 0)],
    }
}

impl Body {
    /// Calls of the allocator.
    pub(super) fn calls(&self) -> u64 {
        match self {
            Self::Pairs { pairs, .. } => 2 * pairs,
            Self::Steps { steps, times } => steps.len() as u64 * times,
        }
    }

    /// A short part of the body that may be done any number of times; `None` where only the whole
    /// is the case.
    pub(super) fn part(&self) -> Option<Self> {
        const PARTS: u64 = 256;
        match *self {
            Self::Pairs { bytes, stream, pairs } => {
                Some(Self::Pairs { bytes, stream, pairs: (pairs / PARTS).max(1) })
            }
            Self::Steps { .. } => None,
        }
    }
}

impl Lane {
    /// The most bytes live at one time.
    pub(super) fn peak_live_bytes(&self) -> u64 {
        match &self.body {
            Body::Pairs { bytes, .. } => *bytes,
            Body::Steps { steps, .. } => peak_live_bytes(self.slots, &[&self.setup, steps]),
        }
    }
}

impl Cold {
    /// The most bytes live at one time.
    pub(super) fn peak_live_bytes(&self) -> u64 {
        peak_live_bytes(self.slots, &[&self.setup, &self.timed])
    }
}

fn peak_live_bytes(slots: u32, parts: &[&[Step]]) -> u64 {
    let mut held = vec![0; slots as usize];
    let (mut live, mut peak) = (0, 0);
    for step in parts.iter().copied().flatten() {
        live -= std::mem::replace(&mut held[step.slot as usize], step.bytes);
        live += step.bytes;
        peak = peak.max(live);
    }
    peak
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Which slots hold how many bytes on which stream after the steps; every allocation must be
    /// into an empty slot and every free of a full one.
    fn follow(held: &mut [Option<(u64, u32)>], steps: &[Step], streams: u32) {
        for step in steps {
            assert!(step.stream < streams);
            let slot = &mut held[step.slot as usize];
            if step.bytes > 0 {
                assert_eq!(slot.replace((step.bytes, step.stream)), None);
            } else {
                assert!(slot.take().is_some());
            }
        }
    }

    fn full(case: Case) -> Extent {
        Extent { calls: case.calls().full, live_divisor: 1 }
    }

    #[test]
    fn every_body_ends_as_it_began() {
        for case in Case::ALL {
            for calls in [case.calls().least, 3 * case.calls().least + 17] {
                let Script::Warm(warm) = case.script(Extent { calls, live_divisor: 1 }) else {
                    continue;
                };
                for lane in &warm.lanes {
                    let Body::Steps { steps, .. } = &lane.body else { continue };
                    let mut held = vec![None; lane.slots as usize];
                    follow(&mut held, &lane.setup, warm.streams);
                    let places = |held: &[Option<(u64, u32)>]| -> Vec<_> {
                        held.iter().map(|block| block.map(|(_, stream)| stream)).collect()
                    };
                    let before = places(&held);
                    follow(&mut held, steps, warm.streams);
                    assert_eq!(places(&held), before, "{case}");
                    let count = lane.body.calls();
                    assert!(count >= calls / 2 && count <= calls + 1, "{case}: {count} {calls}");
                }
            }
        }
    }

    #[test]
    fn cold_scripts_hold_together() {
        for case in Case::ALL {
            let Script::Cold(cold) = case.script(full(case)) else { continue };
            let mut held = vec![None; cold.slots as usize];
            follow(&mut held, &cold.setup, 1);
            follow(&mut held, &cold.timed, 1);
        }
        let Script::Cold(gather) = Case::Gather.script(full(Case::Gather)) else { panic!() };
        assert_eq!(gather.limit_bytes, Some(32 << 30));
        assert_eq!(gather.setup.len(), 1024 + 32);
        assert_eq!(gather.peak_live_bytes(), 32 << 30);
        assert_eq!(gather.timed, [Step::allocate(1024, 1 << 30, 0)]);
    }

    #[test]
    fn sizes_and_numbers_are_the_cases_own() {
        let sizes = |steps: &[Step]| -> (u64, u64) {
            let sizes = steps.iter().map(|step| step.bytes).filter(|bytes| *bytes > 0);
            (sizes.clone().min().unwrap(), sizes.max().unwrap())
        };
        let steps = |name: &str| {
            let case: Case = name.parse().unwrap();
            match case.script(full(case)) {
                Script::Warm(warm) => match &warm.lanes[0].body {
                    Body::Steps { steps, .. } => (warm.lanes[0].clone(), steps.clone()),
                    Body::Pairs { .. } => panic!("{name} is pairs"),
                },
                Script::Cold(_) => panic!("{name} is cold"),
            }
        };
        let most_live = |steps: &[Step]| {
            let mut live = 0_i64;
            let each = steps.iter().map(|step| {
                live += if step.bytes > 0 { 1 } else { -1 };
                live
            });
            each.max().unwrap()
        };
        let (_, random) = steps("random_4MiB");
        let (least, most) = sizes(&random);
        assert!(least < 4096 && most > (4 << 20) - 4096 && most <= 4 << 20);
        assert_eq!(most_live(&random), 2_500);
        let (_, random) = steps("random_64MiB");
        let (least, most) = sizes(&random);
        assert!((2 << 20..3 << 20).contains(&least) && (63 << 20..=64 << 20).contains(&most));
        assert_eq!(most_live(&random), 100);
        let (lane, replace) = steps("live_10k");
        assert_eq!((lane.setup.len(), sizes(&replace)), (10_000, (512, 4096)));
    }

    #[test]
    fn nearly_all_memory_crosses_streams() {
        let lane = to_and_fro(1_000);
        let Body::Steps { steps, times } = &lane.body else { panic!() };
        assert_eq!((steps.len(), *times), (256, 3));
        // Each free is followed by the allocation; where both are on one stream nothing crosses.
        let crossing = steps.chunks(2).filter(|pair| pair[0].stream != pair[1].stream).count();
        assert_eq!(crossing, 2 * (64 - 8));
        assert_eq!(lane.peak_live_bytes(), 8 * (4 << 20));
    }

    #[test]
    fn a_smoke_test_is_small() {
        let Script::Warm(warm) = Case::ALL[9].script(Extent { calls: 400, live_divisor: 100 })
        else {
            panic!()
        };
        assert_eq!(warm.lanes[0].setup.len(), 10_000);
    }
}

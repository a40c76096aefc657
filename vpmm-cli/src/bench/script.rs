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
    /// Whether streams take from each other at first, for longer than the body is: then it is done
    /// untimed until it needs no driver call any more.
    pub(super) settles: bool,
}

/// A case whose pool is warm: everything was done once before.
#[derive(Clone, Debug)]
pub(super) struct Warm {
    /// One for each thread.
    pub(super) lanes: Vec<Lane>,
    /// Streams of all lanes together.
    pub(super) streams: u32,
    /// What waits meanwhile.
    pub(super) zombies: Option<Zombies>,
}

/// Memory that moves while its stream does not go on, so that its old addresses wait for that.
#[derive(Clone, Debug)]
pub(super) struct Zombies {
    /// How many blocks are to have moved.
    pub(super) count: u32,
    /// How long each is.
    pub(super) bytes_each: u64,
    /// The stream that does not go on.
    pub(super) stream: u32,
    /// How many pointers are kept.
    pub(super) slots: u32,
    /// The most that may be held until all have moved.
    pub(super) most_bytes: u64,
    /// Done first: blocks side by side, all that may be held.
    pub(super) scatter: Vec<Step>,
    /// So many, in the first slots, where they are sorted by their addresses.
    pub(super) blocks: u32,
    /// Done when the stream stands still: every other one goes.
    pub(super) free: Vec<Step>,
    /// Done next: requests for what is free in pieces.
    pub(super) gather: Vec<Step>,
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

/// [`Case::Zombies`]: the size of what moves, a granule; how many for one request; and how many more
/// are free, so that the last request need not take the last of them.
const ZOMBIE_BYTES: u64 = 2 << 20;
const ZOMBIES_EACH: u32 = 250;
const ZOMBIES_SPARE: u32 = 16;

/// A pool that grows five times in a row, with nothing freed between, maps ahead, and a block that is
/// only a part of an extent cannot move. So after every few blocks so many small ones are allocated
/// and freed: more than a front keeps of them.
const BLOCKS_IN_A_ROW: u32 = 4;
const BETWEEN: u32 = 64;
const BETWEEN_BYTES: u64 = 64 << 10;

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
            // Each stream has its turn.
            Self::Live { streams, .. } => {
                Calls { full: 400_000, least: 400.max(2 * u64::from(streams)) }
            }
            Self::Zombies { .. } => Self::RANDOM_4MIB.calls(),
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
                let (setup, body) = (vec![], once(steps));
                one_lane(1, Lane { slots: live, setup, together: None, body, settles: false })
            }
            Self::Live { live, streams, .. } => {
                one_lane(streams, replacements(fewer(live).max(streams), streams, extent.calls))
            }
            Self::Zombies { count, .. } => {
                let Script::Warm(random) = Self::RANDOM_4MIB.script(extent) else {
                    unreachable!("random sizes are a warm case");
                };
                let zombies = Some(zombies(fewer(count), random.streams));
                Script::Warm(Warm { streams: random.streams + 1, zombies, ..random })
            }
            Self::Threads { threads, shared_stream, .. } => {
                let stream = |lane| if shared_stream { 0 } else { lane };
                let lanes =
                    (0..threads).map(|lane| pairs(THREAD_BYTES, stream(lane), extent.calls));
                Script::Warm(Warm {
                    lanes: lanes.collect(),
                    streams: if shared_stream { 1 } else { threads },
                    zombies: None,
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
    Script::Warm(Warm { lanes: vec![lane], streams, zombies: None })
}

fn once(steps: Vec<Step>) -> Body {
    Body::Steps { steps, times: 1 }
}

fn pairs(bytes: u64, stream: u32, calls: u64) -> Lane {
    let body = Body::Pairs { bytes, stream, pairs: (calls / 2).max(1) };
    let together = Some([Step::allocate(0, bytes, stream), Step::free(0, stream)]);
    Lane { slots: 1, setup: vec![], together, body, settles: false }
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

/// `live` small allocations, as many on each stream, of which random ones are freed and allocated
/// anew: one stream's after the other's.
fn replacements(live: u32, streams: u32, calls: u64) -> Lane {
    let mut random = Random::new(2);
    let (least, most) = SMALL_BYTES;
    let setup =
        (0..live).map(|slot| Step::allocate(slot, random.between(least, most), slot % streams));
    let setup = setup.collect();
    let replace = |turn: u64| {
        let stream = (turn % u64::from(streams)) as u32;
        let slot = streams * random.below(u64::from(live / streams)) as u32 + stream;
        [Step::free(slot, stream), Step::allocate(slot, random.between(least, most), stream)]
    };
    let steps = (0..(calls / 2).max(u64::from(streams))).flat_map(replace).collect();
    Lane { slots: live, setup, together: None, body: once(steps), settles: streams > 1 }
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
    let body = Body::Steps { steps, times };
    Lane { slots: CROSS_LIVE, setup, together: None, body, settles: false }
}

fn zombies(count: u32, stream: u32) -> Zombies {
    let each = count.min(ZOMBIES_EACH);
    let requests = count.div_ceil(each);
    let blocks = 2 * (count + ZOMBIES_SPARE);
    let long = blocks..blocks + requests;
    let small = long.end..long.end + BETWEEN;
    let allocate = |slot, blocks| Step::allocate(slot, u64::from(blocks) * ZOMBIE_BYTES, stream);
    let scatter = (0..blocks).flat_map(|slot| {
        let between = if slot % BLOCKS_IN_A_ROW == 0 { small.clone() } else { 0..0 };
        let made = between.clone().map(|slot| Step::allocate(slot, BETWEEN_BYTES, stream));
        let freed = between.map(|slot| Step::free(slot, stream));
        made.chain(freed).chain([allocate(slot, 1)])
    });
    Zombies {
        count,
        bytes_each: ZOMBIE_BYTES,
        stream,
        slots: small.end,
        most_bytes: u64::from(blocks) * ZOMBIE_BYTES,
        scatter: scatter.collect(),
        blocks,
        free: (0..blocks).step_by(2).map(|slot| Step::free(slot, stream)).collect(),
        gather: long.map(|slot| allocate(slot, each)).collect(),
    }
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

impl Warm {
    /// The most bytes live at one time; of several lanes, the sum of what each has.
    pub(super) fn peak_live_bytes(&self) -> u64 {
        let lanes: u64 = self.lanes.iter().map(Lane::peak_live_bytes).sum();
        self.zombies.as_ref().map_or(lanes, |zombies| zombies.peak_live_bytes(lanes))
    }
}

impl Zombies {
    /// The most bytes live at one time, with so many more once all have moved.
    fn peak_live_bytes(&self, beside: u64) -> u64 {
        let parts = [&self.scatter[..], &self.free, &self.gather];
        let after = Step::allocate(self.slots, beside, 0);
        peak_live_bytes(self.slots + 1, &[parts[0], parts[1], parts[2], &[after]])
    }

    /// Device memory that the case takes of an allocator which moves nothing, beside the lanes'.
    pub(super) fn needed_bytes(&self) -> u64 {
        self.most_bytes + self.gather.iter().map(|step| step.bytes).sum::<u64>()
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
        let (lane, replace) = steps("streams_1000");
        assert_eq!((lane.setup.len(), sizes(&replace)), (10_000, (512, 4096)));
    }

    #[test]
    fn a_thousand_streams_take_turns() {
        let case: Case = "streams_1000".parse().unwrap();
        for extent in [full(case), Extent { calls: case.calls().least, live_divisor: 100 }] {
            let Script::Warm(warm) = case.script(extent) else { panic!() };
            assert_eq!((warm.streams, warm.lanes.len()), (1_000, 1));
            let Body::Steps { steps, .. } = &warm.lanes[0].body else { panic!() };
            assert!(steps.len() >= 2_000);
            for (turn, pair) in steps.chunks(2).enumerate() {
                let stream = turn as u32 % 1_000;
                assert_eq!([pair[0].stream, pair[1].stream], [stream; 2]);
                assert_eq!(pair[0].slot % 1_000, stream, "a block of that stream");
            }
        }
    }

    #[test]
    fn zombies_are_ten_thousand_and_the_work_is_that_of_random_sizes() {
        let case: Case = "zombies_10k".parse().unwrap();
        let (Script::Warm(warm), Script::Warm(random)) =
            (case.script(full(case)), Case::RANDOM_4MIB.script(full(case)))
        else {
            panic!()
        };
        let steps = |warm: &Warm| match &warm.lanes[0].body {
            Body::Steps { steps, .. } => steps.clone(),
            Body::Pairs { .. } => panic!("pairs"),
        };
        assert_eq!(steps(&warm), steps(&random));
        let zombies = warm.zombies.as_ref().unwrap();
        assert_eq!((zombies.count, zombies.stream, warm.streams), (10_000, 1, 2));
        let mut held = vec![None; zombies.slots as usize];
        for steps in [&zombies.scatter, &zombies.free, &zombies.gather] {
            follow(&mut held, steps, warm.streams);
        }
        let granules = |steps: &[Step]| -> u64 {
            steps
                .iter()
                .filter(|step| step.bytes >= ZOMBIE_BYTES)
                .map(|step| step.bytes)
                .sum::<u64>()
                / ZOMBIE_BYTES
        };
        assert_eq!((granules(&zombies.scatter), granules(&zombies.gather)), (20_032, 10_000));
        // What is asked for is there, in pieces.
        assert_eq!(zombies.free.len(), 10_016);
        let beside = random.peak_live_bytes();
        assert_eq!(warm.peak_live_bytes(), (20_032 - 16) * ZOMBIE_BYTES + beside);
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
        let Script::Warm(warm) = Case::ALL[10].script(Extent { calls: 400, live_divisor: 100 })
        else {
            panic!()
        };
        assert_eq!(warm.lanes[0].setup.len(), 10_000);
    }
}

//! Several pools of two devices in several threads at a time: pools come and go while their memory is passed on,
//! lose their last handles, end with all that is allocated, are made current, and take memory from each other where
//! it runs out.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};
use std::time::Duration;

use cuda_sim::Simulator;
use vpmm::{
    Access, Buffers, Contents, CurrentPool, DevicePtr, Driver, Error, GraphPool, Mark, Pool,
    Recovery, Sharing, Stream,
};

use super::{
    ALONE, Live, MOST, REACHED, Sleeper, attempt, locked, open, put_failing, reach, some_bytes,
    some_schedule, validate,
};
use crate::rig::{GRANULE, Profile};
use crate::support::chance::{self, below, number, with_faults};
use crate::support::changed::changed;
use crate::support::{Lcg, Meeting, Rig, call};

const DEVICES: usize = 2;
const TAG: &str = "cache";

/// A stream and its device's number.
#[derive(Clone)]
struct Lane {
    stream: Arc<Stream>,
    device: usize,
}

/// A pool, as its users know it.
struct Home {
    device: usize,
    /// The other device may use it.
    is_open_to_peer: bool,
    state: RwLock<State>,
    /// What of it is allocated: bytes by address.
    blocks: Mutex<BTreeMap<u64, u64>>,
    /// The tagged heap.
    sleeper: RwLock<Sleeper>,
}

enum State {
    Open(Pool),
    /// Nobody keeps a handle.
    Orphan,
    Gone,
}

impl Home {
    fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn sleeper(&self) -> RwLockReadGuard<'_, Sleeper> {
        self.sleeper.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn pool(&self) -> Option<&Pool> {
        match self {
            Self::Open(pool) => Some(pool),
            Self::Orphan | Self::Gone => None,
        }
    }

    fn is_gone(&self) -> bool {
        matches!(self, Self::Gone)
    }
}

/// By what an allocation's pool is known.
enum Keeper {
    Home(Arc<Home>),
    /// A handle, of what was current.
    Handle(Pool),
}

struct Block {
    ptr: DevicePtr,
    bytes: u64,
    seed: u64,
    keeper: Keeper,
    of: Lane,
    /// Of the tagged heap, and how often that had lost what was in it before.
    losses: Option<u64>,
}

impl Block {
    /// The heap that it is in, if it may sleep.
    fn sleeper(&self) -> Option<RwLockReadGuard<'_, Sleeper>> {
        match (&self.keeper, self.losses) {
            (Keeper::Home(home), Some(_)) => Some(home.sleeper()),
            _ => None,
        }
    }
}

/// What callbacks may use, too.
struct Common {
    driver: Driver,
    /// The pools that requests are made of, and the devices' numbers by turns.
    slots: Vec<RwLock<Arc<Home>>>,
    /// Blocks that nobody needs.
    cache: Mutex<Vec<Block>>,
    live: Live,
    is_faulty: bool,
}

impl Common {
    fn slot(&self, at: usize) -> Arc<Home> {
        Arc::clone(&self.slots[at].read().unwrap_or_else(PoisonError::into_inner))
    }

    /// A request that found memory.
    fn enter(&self, home: Option<&Home>, ptr: DevicePtr, bytes: u64) {
        self.live.enter(ptr.address(), bytes);
        if let Some(home) = home {
            locked(&home.blocks).insert(ptr.address(), bytes);
        }
    }

    /// Before a free.
    fn leave(&self, home: Option<&Home>, ptr: DevicePtr, bytes: u64) {
        if let Some(home) = home {
            assert_eq!(locked(&home.blocks).remove(&ptr.address()), Some(bytes));
        }
        self.live.leave(ptr.address(), bytes);
    }

    /// Frees by a handle, by one that is found, or by the address.
    fn free(&self, pool: Option<&Pool>, home: Option<&Home>, block: &Block, stream: &Stream) {
        self.leave(home, block.ptr, block.bytes);
        let way = chance::below(3);
        let free = || match (way, pool) {
            (0, Some(pool)) => pool.free(block.ptr, stream),
            (0 | 1, _) => {
                let address = block.ptr.address() + block.bytes - 1;
                Pool::of(&self.driver, address).expect("it is live").free(block.ptr, stream)
            }
            _ => Pool::free_any(&self.driver, block.ptr, stream),
        };
        attempt(self.is_faulty, free).expect("freed");
    }

    /// What a pool's callback does, holding nobody up: whoever asked for memory may keep others from theirs.
    fn make_room(&self, pool: &Pool) -> Recovery {
        let other = self.slots[below(self.slots.len() as u64) as usize].try_read();
        let Ok(other) = other.map(|home| Arc::clone(&home)) else { return Recovery::GiveUp };
        match below(6) {
            0 | 1 => {
                let Some(block) = locked(&self.cache).pop() else { return Recovery::GiveUp };
                let stream = &block.of.stream;
                let is_held = match &block.keeper {
                    Keeper::Handle(pool) => {
                        self.free(Some(pool), None, &block, stream);
                        false
                    }
                    Keeper::Home(home) => match home.state.try_read() {
                        Ok(state) if state.is_gone() => false,
                        Ok(state) => {
                            self.free(state.pool(), Some(home), &block, stream);
                            false
                        }
                        Err(_) => true,
                    },
                };
                if is_held {
                    locked(&self.cache).push(block);
                    return Recovery::GiveUp;
                }
                reach("frees by callbacks");
                Recovery::Retry
            }
            2 => {
                let Ok(state) = other.state.try_read() else { return Recovery::GiveUp };
                let given_back = state.pool().map_or(0, |pool| pool.trim_to(0).expect("a trim"));
                reach("trims by callbacks");
                if given_back > 0 { Recovery::Retry } else { Recovery::GiveUp }
            }
            3 => {
                let Ok(mut state) = other.state.try_write() else { return Recovery::GiveUp };
                if state.pool().is_none() {
                    return Recovery::GiveUp;
                }
                let State::Open(gone) = std::mem::replace(&mut *state, State::Orphan) else {
                    unreachable!("seen above")
                };
                drop(state);
                drop(gone);
                reach("handles dropped by callbacks");
                Recovery::Retry
            }
            4 => {
                pool.device().synchronize().expect("the device finishes");
                Recovery::Retry
            }
            _ => Recovery::GiveUp,
        }
    }
}

/// What threads have in common.
struct Crowd<'a> {
    rigs: [&'a Rig; DEVICES],
    sim: &'a Simulator,
    common: Arc<Common>,
    shared: [Lane; DEVICES],
    given: Vec<Mutex<Vec<Block>>>,
    seeds: AtomicU64,
}

impl Crowd<'_> {
    fn attempt<T>(&self, call: impl Fn() -> Result<T, Error>) -> Result<T, Error> {
        attempt(self.common.is_faulty, call)
    }

    fn lane(&self, device: usize) -> Lane {
        Lane { stream: Arc::new(self.rigs[device].stream()), device }
    }

    fn order(&self, before: &Lane, after: &Lane) {
        if !Arc::ptr_eq(&before.stream, &after.stream) {
            self.rigs[before.device].order(&*before.stream, &*after.stream);
        }
    }

    /// Looks at what is in a block, in a stream's order; not where its heap sleeps, or has lost it.
    fn check(&self, block: &Block, lane: &Lane) {
        // Until the work is in its stream: a sleep comes after it, or before all of this.
        let sleeper = block.sleeper();
        if let Some(sleeper) = &sleeper {
            if sleeper.is_asleep {
                return;
            }
            self.uses(sleeper, lane);
            if block.losses != Some(sleeper.losses) {
                return;
            }
        }
        self.rigs[lane.device].check(
            block.ptr.address(),
            block.bytes,
            block.seed,
            lane.stream.handle(),
        );
    }

    /// Work of a stream on a heap that may sleep.
    fn uses(&self, sleeper: &Sleeper, lane: &Lane) {
        if let Some(woken_on) = &sleeper.woken_on
            && !Arc::ptr_eq(woken_on, &lane.stream)
        {
            // In the context of the stream that is waited for.
            self.rigs[woken_on.device().ordinal() as usize].order(&**woken_on, &*lane.stream);
        }
        let mut users = locked(&sleeper.users);
        if !users.iter().any(|user| Arc::ptr_eq(user, &lane.stream)) {
            users.push(Arc::clone(&lane.stream));
        }
    }

    /// An answer to a request, written to on its stream.
    fn asked(
        &self,
        answer: Result<DevicePtr, Error>,
        bytes: u64,
        keeper: Keeper,
        of: &Lane,
        sleeper: Option<&Sleeper>,
    ) -> Option<Block> {
        let ptr = match answer {
            Ok(ptr) => ptr,
            Err(error) if error.is_out_of_memory() => {
                reach("requests refused of pools");
                return None;
            }
            Err(Error::AddressSpaceExhausted { .. }) => return None,
            Err(Error::Asleep) if sleeper.is_some_and(|sleeper| sleeper.is_asleep) => return None,
            Err(error) => panic!("{error}"),
        };
        if let Some(sleeper) = sleeper {
            assert!(!sleeper.is_asleep);
            self.uses(sleeper, of);
        }
        let home = match &keeper {
            Keeper::Home(home) => Some(&**home),
            Keeper::Handle(_) => None,
        };
        self.common.enter(home, ptr, bytes);
        let seed = self.seeds.fetch_add(1 << 40, Ordering::Relaxed);
        self.rigs[of.device].fill(ptr.address(), bytes, seed, of.stream.handle());
        reach("requests of pools");
        let losses = sleeper.map(|sleeper| sleeper.losses);
        Some(Block { ptr, bytes, seed, keeper, of: of.clone(), losses })
    }

    /// Does something with a block, if its pool has not ended with it.
    fn with<T>(
        &self,
        block: &Block,
        act: impl FnOnce(Option<&Pool>, Option<&Home>) -> T,
    ) -> Option<T> {
        match &block.keeper {
            Keeper::Handle(pool) => Some(act(Some(pool), None)),
            Keeper::Home(home) => {
                let state = home.read();
                (!state.is_gone()).then(|| act(state.pool(), Some(home)))
            }
        }
    }

    fn free(&self, block: &Block, lane: &Lane) {
        self.with(block, |pool, home| {
            self.order(&block.of, lane);
            self.check(block, lane);
            self.common.free(pool, home, block, &lane.stream);
        });
    }

    /// A new pool in a place, in which the former one loses its handle.
    fn renew(&self, at: usize, random: &mut Lcg) {
        let new = new_home(self.rigs, at % DEVICES, &self.common, random);
        let mut slot = self.common.slots[at].write().unwrap_or_else(PoisonError::into_inner);
        let former = std::mem::replace(&mut *slot, new);
        drop(slot);
        let mut state = former.write();
        if let State::Open(_) = &*state {
            let pool = std::mem::replace(&mut *state, State::Orphan);
            drop(state);
            drop(pool);
        }
        reach("pools renewed");
    }

    /// Ends a pool with all that is allocated, unless others have handles.
    fn destroy(&self, home: &Home) {
        let mut state = home.write();
        let first = locked(&home.blocks).keys().next().copied();
        let pool = match (std::mem::replace(&mut *state, State::Gone), first) {
            (State::Open(pool), _) => pool,
            (State::Orphan, Some(address)) => {
                Pool::of(&self.common.driver, address).expect("something is allocated")
            }
            (other, _) => {
                *state = other;
                return;
            }
        };
        let blocks = std::mem::take(&mut *locked(&home.blocks));
        blocks.iter().for_each(|(start, bytes)| self.common.live.leave(*start, *bytes));
        match pool.destroy() {
            Ok(()) => reach("pools destroyed"),
            Err((pool, Error::PoolShared { .. })) => {
                blocks.iter().for_each(|(start, bytes)| self.common.live.enter(*start, *bytes));
                *locked(&home.blocks) = blocks;
                *state = State::Open(pool);
                reach("pools shared");
            }
            Err((_, error)) => panic!("{error}"),
        }
    }
}

fn new_home(
    rigs: [&Rig; DEVICES],
    device: usize,
    common: &Arc<Common>,
    random: &mut Lcg,
) -> Arc<Home> {
    let profile = Profile::BOTH[random.below(2) as usize];
    let pool = open(profile, rigs[device], Sharing::None, random);
    let is_open_to_peer = random.below(2) == 0;
    if is_open_to_peer {
        pool.set_access(&rigs[1 - device].device, Access::ReadWrite).expect("access");
    }
    for _ in 0..random.below(3) {
        let common: Weak<Common> = Arc::downgrade(common);
        let callback = pool.on_out_of_memory(move |pool, _| {
            let Some(common) = common.upgrade() else { return Recovery::GiveUp };
            reach("callbacks");
            with_faults(0, || common.make_room(pool))
        });
        callback.keep();
    }
    let (state, blocks) = (RwLock::new(State::Open(pool)), Mutex::default());
    Arc::new(Home { device, is_open_to_peer, state, blocks, sleeper: RwLock::default() })
}

/// A thread under way.
struct Member<'a> {
    crowd: &'a Crowd<'a>,
    number: usize,
    random: Lcg,
    own: [Lane; DEVICES],
    live: Vec<Block>,
    scope: Option<CurrentPool>,
    mark: Option<(Arc<Home>, Mark)>,
    /// And the streams that they were open to.
    graphs: Vec<(GraphPool, Lane)>,
}

impl Member<'_> {
    fn below(&mut self, bound: u64) -> u64 {
        self.random.below(bound)
    }

    fn lane(&mut self, device: usize) -> Lane {
        let shared = self.below(3) == 0;
        if shared { self.crowd.shared[device].clone() } else { self.own[device].clone() }
    }

    fn pick(&mut self) -> Option<usize> {
        let len = self.live.len() as u64;
        (len > 0).then(|| self.below(len) as usize)
    }

    fn home(&mut self) -> Arc<Home> {
        let at = self.below(self.crowd.common.slots.len() as u64) as usize;
        self.crowd.common.slot(at)
    }

    fn act(&mut self) {
        let (crowd, device) = (self.crowd, self.below(DEVICES as u64) as usize);
        let the_device = &crowd.rigs[device].device;
        match self.below(44) {
            0..10 => self.ask(),
            10..12 => {
                let (bytes, of) = (some_bytes(&mut self.random), self.lane(device));
                let pool = crowd.attempt(|| Pool::current(the_device)).expect("a pool");
                let asked = crowd.attempt(|| pool.malloc(bytes as usize, &*of.stream));
                self.live.extend(crowd.asked(asked, bytes, Keeper::Handle(pool), &of, None));
                reach("requests of what is current");
            }
            12..20 => {
                if let Some(at) = self.pick() {
                    let block = self.live.swap_remove(at);
                    let lane = self.lane(block.of.device);
                    crowd.free(&block, &lane);
                }
            }
            20..22 => {
                if let Some(at) = self.pick() {
                    let (block, to) = (self.live.swap_remove(at), self.below(4) as usize);
                    match crowd.given.get(to) {
                        Some(given) => locked(given).push(block),
                        None => locked(&crowd.common.cache).push(block),
                    }
                }
            }
            22 => self.free_given(),
            23..25 => self.use_further(),
            25..27 => self.tell(),
            27 => {
                let lane = self.lane(device);
                lane.stream.synchronize().expect("the stream finishes");
            }
            28 => the_device.synchronize().expect("the device finishes"),
            29 => self.limits(),
            30 => self.own[device] = crowd.lane(device),
            31 => {
                let at = self.below(crowd.common.slots.len() as u64) as usize;
                crowd.renew(at, &mut self.random);
            }
            32 => {
                let home = match self.pick().map(|at| &self.live[at].keeper) {
                    Some(Keeper::Home(home)) if self.random.below(2) == 0 => Arc::clone(home),
                    _ => self.home(),
                };
                crowd.destroy(&home);
            }
            33..35 => self.adopt(),
            35 | 36 => self.make_current(device),
            37 | 38 => self.sleep(),
            39 => self.open_graph(),
            _ => {
                for _ in 0..1 + self.below(8) {
                    crowd.sim.advance_all();
                }
            }
        }
    }

    fn ask(&mut self) {
        let (crowd, home) = (self.crowd, self.home());
        let (bytes, of) = (some_bytes(&mut self.random), self.lane(home.device));
        let is_tagged = self.below(5) == 0;
        let state = home.read();
        let Some(pool) = state.pool() else { return };
        let sleeper = is_tagged.then(|| home.sleeper());
        let asked = match is_tagged {
            true => crowd
                .attempt(|| pool.tagged(TAG))
                .and_then(|tagged| crowd.attempt(|| tagged.malloc(bytes as usize, &*of.stream))),
            false => crowd.attempt(|| pool.malloc(bytes as usize, &*of.stream)),
        };
        let keeper = Keeper::Home(Arc::clone(&home));
        self.live.extend(crowd.asked(asked, bytes, keeper, &of, sleeper.as_deref()));
    }

    /// Has a tagged heap sleep, or wakes it.
    fn sleep(&mut self) {
        let (crowd, home, choice) = (self.crowd, self.home(), self.below(4));
        let lane = self.lane(home.device);
        let state = home.read();
        let Some(pool) = state.pool() else { return };
        let Ok(tagged) = crowd.attempt(|| pool.tagged(TAG)) else { return };
        let mut sleeper = home.sleeper.write().unwrap_or_else(PoisonError::into_inner);
        assert_eq!(tagged.is_asleep(), sleeper.is_asleep);
        let users = std::mem::take(sleeper.users.get_mut().unwrap_or_else(PoisonError::into_inner));
        for user in users.iter().chain(&sleeper.woken_on) {
            if !Arc::ptr_eq(user, &lane.stream) {
                crowd.rigs[user.device().ordinal() as usize].order(&**user, &*lane.stream);
            }
        }
        if sleeper.is_asleep {
            let is_given_up = choice == 0;
            let woken = crowd.attempt(|| match is_given_up {
                true => pool.resume_empty(TAG, &*lane.stream),
                false => pool.resume(TAG, &*lane.stream),
            });
            match woken {
                Ok(_) => reach("wakes in pools"),
                Err(error) if error.is_out_of_memory() => return,
                // What could not be undone before.
                Err(Error::StreamCapturing) if crowd.common.is_faulty => return,
                Err(error) => panic!("{error}"),
            }
            sleeper.losses += u64::from(is_given_up || !sleeper.keeps);
        } else {
            let contents = match choice {
                0 => Contents::Discard,
                1 => Contents::Keep(Buffers::Retain),
                _ => Contents::Keep(Buffers::Release),
            };
            match crowd.attempt(|| pool.suspend(TAG, &*lane.stream, &contents)) {
                Ok(_) => reach("sleeps in pools"),
                Err(Error::Driver { .. } | Error::HalfAsleep { .. } | Error::StreamCapturing)
                    if crowd.common.is_faulty => {}
                Err(Error::Asleep) if crowd.common.is_faulty && tagged.is_asleep() => {}
                Err(error) => panic!("{error}"),
            }
            sleeper.keeps = contents != Contents::Discard;
        }
        sleeper.is_asleep = tagged.is_asleep();
        sleeper.woken_on = (!sleeper.is_asleep).then(|| Arc::clone(&lane.stream));
    }

    /// Memory of a graph's pool, which is open to a capture that never begins.
    fn open_graph(&mut self) {
        if self.graphs.len() > 2 {
            let at = self.below(3) as usize;
            let (graph, lane) = self.graphs.swap_remove(at);
            if self.below(2) == 0 {
                self.crowd.attempt(|| graph.release(&*lane.stream)).expect("released");
            }
            return reach("graph pools of pools gone");
        }
        let (crowd, home) = (self.crowd, self.home());
        let (bytes, of) = (some_bytes(&mut self.random), crowd.lane(home.device));
        let state = home.read();
        let Some(pool) = state.pool() else { return };
        let graph = match crowd.attempt(|| pool.graph_pool()) {
            Ok(graph) => graph,
            Err(error) if error.is_out_of_memory() => return,
            Err(Error::AddressSpaceExhausted { .. }) => return,
            Err(error) => panic!("{error}"),
        };
        graph.begin(&*of.stream).expect("begun");
        let asked = crowd.attempt(|| pool.malloc(bytes as usize, &*of.stream));
        let keeper = Keeper::Home(Arc::clone(&home));
        self.live.extend(crowd.asked(asked, bytes, keeper, &of, None));
        graph.end(&*of.stream).expect("ended");
        self.graphs.push((graph, of));
        reach("graph pools of pools");
    }

    fn free_given(&mut self) {
        let given = std::mem::take(&mut *locked(&self.crowd.given[self.number]));
        for block in given {
            let lane = self.lane(block.of.device);
            self.crowd.free(&block, &lane);
        }
    }

    /// A use on another stream, of the other device where that may.
    fn use_further(&mut self) {
        let Some(at) = self.pick() else { return };
        let device = self.live[at].of.device;
        let (lane, peers, stranger) = (self.lane(device), self.lane(1 - device), self.home());
        let (crowd, block) = (self.crowd, &self.live[at]);
        crowd.with(block, |pool, home| {
            let found = Pool::of(&crowd.common.driver, block.ptr.address()).expect("it is live");
            assert!(pool.is_none_or(|pool| *pool == found));
            if home.is_some_and(|home| home.is_open_to_peer) {
                crowd.order(&block.of, &peers);
                crowd.check(block, &peers);
                crowd.order(&peers, &block.of);
                reach("uses by the other device");
            }
            let refused = found.record_stream(block.ptr, &*peers.stream);
            assert!(matches!(refused, Err(Error::WrongDevice { .. })), "{refused:?}");
            crowd.order(&block.of, &lane);
            crowd.check(block, &lane);
            crowd.attempt(|| found.record_stream(block.ptr, &*lane.stream)).expect("a noted use");
            reach("uses of pools");
            if let Ok(state) = stranger.state.try_read()
                && let Some(stranger) = state.pool().filter(|stranger| **stranger != found)
            {
                let stream = &crowd.shared[stranger.device().ordinal() as usize].stream;
                let refused = stranger.free(block.ptr, &**stream);
                assert!(matches!(refused, Err(Error::ForeignPointer { .. })), "{refused:?}");
                assert_eq!(stranger.allocation(block.ptr.address()), None);
            }
        });
    }

    /// Says what comes after what.
    fn tell(&mut self) {
        let (crowd, home, waits) = (self.crowd, self.home(), self.below(2) == 0);
        let (before, after) = (&crowd.shared[home.device], &self.own[home.device]);
        let state = home.read();
        let Some(pool) = state.pool() else { return };
        let mark = crowd.attempt(|| pool.mark(&*before.stream)).expect("a mark");
        if waits {
            call!(
                crowd.rigs[home.device].driver,
                cuStreamSynchronize(before.stream.handle().raw())
            );
            crowd.attempt(|| pool.passed(&mark)).expect("it is over");
        } else {
            crowd.order(before, after);
            crowd.attempt(|| pool.follows(&*after.stream, &mark)).expect("an order");
        }
        if let Some((of, former)) = &self.mark
            && !Arc::ptr_eq(of, &home)
        {
            let refused = pool.passed(former);
            assert!(matches!(refused, Err(Error::ForeignMark)), "{refused:?}");
        }
        drop(state);
        self.mark = Some((home, mark));
        reach("orders told");
    }

    fn limits(&mut self) {
        let (crowd, home, what) = (self.crowd, self.home(), self.below(4));
        let most = self.below(MOST);
        let state = home.read();
        let Some(pool) = state.pool() else { return };
        match what {
            0 => pool.limit_to((most > 5).then_some(most * GRANULE)).expect("a limit"),
            1 => {
                let stats = pool.stats();
                assert!(stats.live_bytes <= stats.mapped_bytes + (16 << 30), "{stats:?}");
                pool.snapshot();
                let _ = (pool.layout().to_string(), format!("{pool:?}"));
            }
            _ => {
                crowd.attempt(|| pool.trim_to(most * GRANULE)).expect("a trim");
            }
        }
    }

    /// A handle again, of a pool that may have none.
    fn adopt(&mut self) {
        let Some(at) = self.pick() else { return };
        let Keeper::Home(home) = &self.live[at].keeper else { return };
        let mut state = home.write();
        if let State::Orphan = &*state {
            let found = Pool::of(&self.crowd.common.driver, self.live[at].ptr.address());
            *state = State::Open(found.expect("something is allocated"));
            reach("orphans adopted");
        } else if let State::Open(_) = &*state {
            let pool = std::mem::replace(&mut *state, State::Orphan);
            drop(state);
            drop(pool);
            reach("handles dropped");
        }
    }

    fn make_current(&mut self, device: usize) {
        let (crowd, home) = (self.crowd, self.home());
        match self.below(6) {
            0 => Pool::forget_current(&crowd.rigs[device].device),
            1 => self.scope = None,
            2 => {
                let default = Pool::default_of(&crowd.rigs[device].device).expect("a pool");
                default.trim_to(0).expect("a trim");
                match default.destroy() {
                    Ok(()) => reach("default pools destroyed"),
                    Err((_, Error::PoolShared { .. })) => {}
                    Err((_, error)) => panic!("{error}"),
                }
            }
            what => {
                let state = home.read();
                let Some(pool) = state.pool() else { return };
                let former = match what {
                    3 => self.scope.replace(pool.current_for_scope()).map(drop).and(None),
                    _ => pool.make_current(),
                };
                drop(state);
                drop(former);
                reach("made current");
            }
        }
    }

    fn end(mut self) {
        self.free_given();
        for block in std::mem::take(&mut self.live) {
            let lane = self.lane(block.of.device);
            self.crowd.free(&block, &lane);
        }
    }
}

fn run_threads(crowd: &Crowd<'_>, threads: usize, steps: u64, seed: u64) {
    let meeting = Meeting::of(threads);
    std::thread::scope(|scope| {
        for number in 0..threads {
            let meeting = &meeting;
            scope.spawn(move || {
                let mut random = Lcg(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ number as u64);
                chance::seed(random.below(u64::MAX));
                let own = [0, 1].map(|device| crowd.lane(device));
                let (live, graphs, scope, mark) = (Vec::new(), Vec::new(), None, None);
                let mut member = Member { crowd, number, random, own, live, scope, mark, graphs };
                for _ in 0..3 {
                    let part = || (0..steps).for_each(|_| member.act());
                    if !meeting.after(part, || look(crowd)) {
                        return;
                    }
                }
                member.end();
            });
        }
    });
}

/// Every pool that is known by a place or by something allocated.
fn look(crowd: &Crowd<'_>) {
    for slot in 0..crowd.common.slots.len() {
        if let Some(pool) = crowd.common.slot(slot).read().pool() {
            validate(pool);
        }
    }
    let live: Vec<(u64, u64)> =
        locked(&crowd.common.live.0).iter().map(|(start, bytes)| (*start, *bytes)).collect();
    for (start, bytes) in live {
        let pool = Pool::of(&crowd.common.driver, start).expect("it is live");
        let found = pool.allocation(start + bytes - 1).expect("it is live");
        assert_eq!(found.start.address(), start);
        validate(&pool);
    }
}

fn run(seed: u64) {
    let mut random = Lcg(seed ^ 0x5DEE_CE66);
    random.below(1);
    let schedule = some_schedule(&mut random);
    let is_faulty = random.below(3) == 0;
    let sim = Simulator::builder()
        .devices(DEVICES)
        .schedule(schedule)
        .deadlock_after(Duration::from_secs(2))
        .seed(seed)
        .memory_bytes((2 * MOST + 1) * GRANULE)
        .build()
        .expect("a simulator");
    let rig = Rig::with(changed(&sim, put_failing), sim.clone());
    let peer = rig.beside(1);
    let rigs = [&rig, &peer];
    let threads = 2 + random.below(3) as usize;
    let slots = DEVICES + random.below(4) as usize;
    let steps = random.below(80);
    println!("{seed}: {threads} threads, {slots} pools, {schedule:?}, faulty {is_faulty}");
    let placeholder = || {
        let (state, blocks) = (RwLock::new(State::Gone), Mutex::default());
        let (device, is_open_to_peer, sleeper) = (0, false, RwLock::default());
        RwLock::new(Arc::new(Home { device, is_open_to_peer, state, blocks, sleeper }))
    };
    let common = Arc::new(Common {
        driver: rig.driver.clone(),
        slots: (0..slots).map(|_| placeholder()).collect(),
        cache: Mutex::default(),
        live: Live::default(),
        is_faulty,
    });
    {
        let lane = |device: usize| Lane { stream: Arc::new(rigs[device].stream()), device };
        let crowd = Crowd {
            rigs,
            sim: &sim,
            common: Arc::clone(&common),
            shared: [lane(0), lane(1)],
            given: (0..threads).map(|_| Mutex::default()).collect(),
            seeds: AtomicU64::new(1 << 40),
        };
        (0..slots).for_each(|at| crowd.renew(at, &mut random));
        run_threads(&crowd, threads, steps, seed);
        // What was given to threads that had ended.
        let given = crowd.given.iter().chain([&common.cache]);
        for block in given.flat_map(|given| std::mem::take(&mut *locked(given))) {
            crowd.free(&block, &crowd.shared[block.of.device]);
        }
        assert!(locked(&common.live.0).is_empty());
        rigs.iter().for_each(|rig| Pool::forget_current(&rig.device));
        for slot in 0..slots {
            let home = common.slot(slot);
            let state = std::mem::replace(&mut *home.write(), State::Gone);
            if let Some(pool) = state.pool() {
                let stats = pool.stats();
                assert_eq!((stats.live_count, stats.live_bytes), (0, 0));
                validate(pool);
            }
        }
    }
    for rig in rigs {
        assert_eq!(rig.mismatches(), 0, "words differ from what was written");
    }
    drop(common);
    drop(peer);
    drop(rig);
    sim.assert_clean();
    let leaks = sim.leaks();
    assert!(is_faulty || leaks.is_empty(), "{leaks:?}");
}

/// As with one pool; and no pool ends before its time, or stays beyond it.
#[test]
fn pools_in_several_threads() {
    const CASES: u64 = 40;
    let _alone = locked(&ALONE);
    let first = number("VPMM_CROWD_FIRST", 0);
    let cases = number("VPMM_CROWD_CASES", CASES);
    for seed in first..first + cases {
        run(seed);
    }
    let expected = [
        "callbacks",
        "default pools destroyed",
        "graph pools of pools",
        "handles dropped",
        "made current",
        "orders told",
        "orphans adopted",
        "pools destroyed",
        "pools renewed",
        "pools shared",
        "requests of pools",
        "requests of what is current",
        "requests refused of pools",
        "sleeps in pools",
        "trims by callbacks",
        "uses by the other device",
        "uses of pools",
        "wakes in pools",
    ];
    REACHED.assert_all(if cases < CASES { &[] } else { &expected });
}

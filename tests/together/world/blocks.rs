//! Allocations, their uses and frees, and what is said of the order of streams.

use super::*;

impl<'a> World<'a> {
    pub(super) fn malloc(&mut self, thread: usize) {
        let Some(lane) = self.lane(thread) else { return };
        let slot = self.below(self.slots.len());
        let bytes = self.bytes();
        let home = if self.one_in(3) { Home::Tag(self.below(2)) } else { Home::Main };
        let stream = self.lanes[lane].handle();
        let pool = self.slots[slot].pool.clone();
        let id = self.slots[slot].id;
        let result = match home {
            Home::Tag(tag) => match self.attempt(&pool, false, || pool.tagged(TAGS[tag])) {
                Ok(tagged) => self.attempt(&pool, true, || tagged.malloc(bytes as usize, stream)),
                Err(error) => Err(error),
            },
            _ => {
                self.kept_to_main = true;
                let result = self.attempt(&pool, true, || pool.malloc(bytes as usize, stream));
                self.kept_to_main = false;
                result
            }
        };
        note!(self, "malloc {bytes} pool {id} {home:?} lane {lane}: {result:x?}");
        match result {
            Ok(ptr) => self.enter(id, home, ptr, bytes, lane, None),
            Err(Error::Asleep) => {
                let Home::Tag(tag) = home else { panic!("not a tag's") };
                assert!(self.slots[slot].asleep[tag]);
                reach("requests of sleeping heaps");
            }
            Err(error) if error.is_out_of_memory() => reach("requests refused"),
            Err(Error::AddressSpaceExhausted { .. }) => reach("requests without addresses"),
            Err(error) => panic!("{error}"),
        }
    }

    pub(super) fn enter(
        &mut self,
        pool: u64,
        home: Home,
        ptr: DevicePtr,
        bytes: u64,
        of: usize,
        capture: Option<usize>,
    ) {
        reach(match home {
            Home::Main => "requests",
            Home::Tag(_) => "requests of tags",
            Home::Graph(..) => "requests of graphs",
        });
        assert!(ptr.address().is_multiple_of(512));
        for other in &self.live {
            let (start, end) = (other.ptr.address(), other.ptr.address() + other.bytes);
            assert!(ptr.address() >= end || ptr.address() + bytes <= start, "overlap");
        }
        let seed = self.number() << 40;
        self.rig.fill(ptr.address(), bytes, seed, self.lanes[of].handle());
        self.live.push(Live { pool, home, ptr, bytes, seed, of, uses: BTreeSet::new(), capture });
    }

    pub(super) fn is_asleep(&self, live: &Live) -> bool {
        match (live.home, self.slot(live.pool)) {
            (Home::Tag(tag), Some(slot)) => self.slots[slot].asleep[tag],
            (Home::Tag(tag), None) => self.pool_of(live).tagged(TAGS[tag]).unwrap().is_asleep(),
            _ => false,
        }
    }

    /// Those that a thread can do something with, on lanes that do not capture.
    pub(super) fn reachable(&self, thread: usize) -> Vec<usize> {
        let usable = self.usable(thread);
        (0..self.live.len()).filter(|at| {
            let live = &self.live[*at];
            live.capture.is_none() && usable.contains(&live.of)
                && !live.uses.iter().any(|used| {
                    let lane = &self.lanes[*used];
                    lane.part.is_some_and(|part| part.phase == Phase::Capturing) && !matches!(lane.of, Of::Owned(_))
                })
                // A graph's pool that is open to a capture is somebody's.
                && match live.home {
                    Home::Graph(serial, _) => !self.gps.iter().any(|gp| {
                        gp.serial == serial
                            && (gp.busy || gp.before.iter().any(|before| !usable.contains(before)))
                    }),
                    _ => true,
                }
        }).collect()
    }

    /// Has a lane come after everything that an allocation is used by.
    pub(super) fn after_uses(&self, live: &Live, lane: usize) {
        self.order(live.of, lane);
        if let Home::Graph(serial, _) = live.home
            && let Some(gp) = self.gps.iter().find(|gp| gp.serial == serial)
        {
            for before in &gp.before {
                self.order(*before, lane);
            }
        }
    }

    /// Enqueues a check of the contents, where they are known.
    pub(super) fn check(&self, live: &Live, lane: usize) {
        let known = match live.home {
            _ if self.is_asleep(live) => false,
            Home::Graph(serial, graph) => match self.gps.iter().find(|gp| gp.serial == serial) {
                _ if graph == usize::MAX => true,
                Some(gp) => gp.last == Some(graph),
                None => false,
            },
            _ => true,
        };
        if known {
            self.rig.check(live.ptr.address(), live.bytes, live.seed, self.lanes[lane].handle());
        }
    }

    pub(super) fn free(&mut self, thread: usize) {
        let reachable = self.reachable(thread);
        let Some(index) = self.pick(&reachable) else { return };
        let Some(lane) = self.lane(thread) else { return };
        self.free_on(index, lane);
    }

    pub(super) fn free_on(&mut self, index: usize, lane: usize) {
        let live = self.live[index].clone();
        // The end of a pool may wait for the context.
        if self.slot(live.pool).is_none() && self.is_capturing() {
            return;
        }
        // Launches come after what uses a graph's memory, and only the thread could see to that.
        if matches!((live.home, &self.lanes[lane].of), (Home::Graph(..), Of::PerThread(_))) {
            return;
        }
        self.after_uses(&live, lane);
        self.check(&live, lane);
        if let Home::Graph(serial, _) = live.home
            && let Some(gp) = self.gps.iter_mut().find(|gp| gp.serial == serial)
            && !matches!(self.lanes[lane].of, Of::PerThread(_))
        {
            gp.before.insert(lane);
        }
        let stream = self.lanes[lane].handle();
        let way = self.below(3);
        let is_orphan = self.slot(live.pool).is_none();
        let pool = self.pool_of(&live);
        let driver = self.rig.driver.clone();
        note!(
            self,
            "free {:x?} pool {} {:?} of {} uses {:?} lane {lane} way {way} orphan {is_orphan}",
            live.ptr,
            live.pool,
            live.home,
            live.of,
            live.uses
        );
        let result = self.attempt(&pool, true, || match (way, live.home) {
            (0, _) => Pool::free_any(&driver, live.ptr, stream),
            (1, Home::Tag(tag)) => pool.tagged(TAGS[tag]).unwrap().free(live.ptr, stream),
            _ => pool.free(live.ptr, stream),
        });
        result.expect("a free");
        if live.uses.iter().any(|used| *used != lane) {
            reach("frees with uses");
        }
        if is_orphan {
            reach("frees of orphans");
        }
        let again = pool.free(live.ptr, stream);
        match again {
            Err(
                Error::DoubleFree { .. }
                | Error::ForeignPointer { .. }
                | Error::InteriorPointer { .. }
                | Error::StalePointer { .. },
            ) => {}
            other => panic!("a second free: {other:?}"),
        }
        self.live.swap_remove(index);
        drop(pool);
        if is_orphan && !self.live.iter().any(|other| other.pool == live.pool) {
            note!(self, "orphan {} ends", live.pool);
            assert!(Pool::of(&driver, live.ptr.address()).is_none());
            self.orphans.remove(&live.pool);
        }
    }

    pub(super) fn use_further(&mut self, thread: usize) {
        let reachable = self.reachable(thread);
        let Some(index) = self.pick(&reachable) else { return };
        let Some(lane) = self.lane(thread) else { return };
        let live = self.live[index].clone();
        if self.is_asleep(&live) || matches!(live.home, Home::Graph(..)) {
            return;
        }
        self.after_uses(&live, lane);
        self.check(&live, lane);
        let (pool, stream) = (self.pool_of(&live), self.lanes[lane].handle());
        note!(self, "use {:x?} pool {} lane {lane}", live.ptr, live.pool);
        self.attempt(&pool, true, || pool.record_stream(live.ptr, stream)).expect("a use");
        self.live[index].uses.insert(lane);
        reach("uses");
    }

    pub(super) fn follow(&mut self, thread: usize) {
        let (Some(from), Some(to)) = (self.lane(thread), self.lane(thread)) else { return };
        let slot = self.below(self.slots.len());
        let pool = self.slots[slot].pool.clone();
        let (on, after) = (self.lanes[from].handle(), self.lanes[to].handle());
        note!(self, "lane {to} follows {from} in {}", self.slots[slot].id);
        let mark = self.attempt(&pool, true, || pool.mark(on)).expect("a mark");
        if self.one_in(2) {
            self.order(from, to);
            self.attempt(&pool, true, || pool.follows(after, &mark)).expect("an order");
        } else if !self.is_capturing() {
            call!(self.rig.driver, cuCtxSetCurrent(self.rig.device.context()));
            call!(self.rig.driver, cuStreamSynchronize(on.raw()));
            self.attempt(&pool, false, || pool.passed(&mark)).expect("a mark that passed");
        }
    }

    pub(super) fn synchronize(&mut self, thread: usize) {
        if self.is_capturing() {
            return;
        }
        if self.one_in(4) {
            note!(self, "device sync");
            self.rig.device.synchronize().expect("the device finishes");
            return;
        }
        let Some(lane) = self.lane(thread) else { return };
        note!(self, "sync lane {lane}");
        match &self.lanes[lane].of {
            Of::Owned(stream) => stream.synchronize().expect("it finishes"),
            Of::Legacy => Stream::legacy(&self.rig.device).synchronize().expect("it finishes"),
            Of::PerThread(_) => {
                Stream::per_thread(&self.rig.device).synchronize().expect("it finishes")
            }
            Of::Raw(raw) => {
                call!(self.rig.driver, cuCtxSetCurrent(self.rig.device.context()));
                call!(self.rig.driver, cuStreamSynchronize(*raw as CUstream));
            }
        }
    }
}

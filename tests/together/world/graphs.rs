//! Graphs' pools: captures with forks, launches, releases.

use super::*;

impl<'a> World<'a> {
    pub(super) fn begin(&mut self, thread: usize) {
        let lanes: Vec<usize> = self.capturable(thread);
        let Some(lane) = self.pick(&lanes) else { return };
        let slot = self.below(self.slots.len());
        let (id, pool) = (self.slots[slot].id, self.slots[slot].pool.clone());
        let known: Vec<usize> = (0..self.gps.len())
            .filter(|at| !self.gps[*at].busy && self.gps[*at].pool == id)
            .collect();
        let gp = match self.pick(&known) {
            Some(gp) if !self.one_in(3) => {
                if self.gps[gp].before.iter().any(|before| !self.shared(thread).contains(before)) {
                    return;
                }
                gp
            }
            _ => {
                if self.gps.len() > 3 {
                    return;
                }
                let gp = match self.attempt(&pool, true, || pool.graph_pool()) {
                    Ok(gp) => gp,
                    Err(error) if error.is_out_of_memory() => return,
                    Err(Error::AddressSpaceExhausted { .. }) if self.faulty => return,
                    Err(error) => panic!("{error}"),
                };
                let serial = self.number();
                self.gps.push(Gp {
                    serial,
                    pool: id,
                    gp,
                    graphs: vec![],
                    last: None,
                    before: BTreeSet::new(),
                    busy: false,
                    captures: 0,
                });
                self.gps.len() - 1
            }
        };
        let stream = self.lanes[lane].handle();
        note!(self, "begin gp {} of {id} lane {lane}", self.gps[gp].serial);
        let n = self.faulty && self.one_in(4);
        if n {
            let at = 1 + self.random.below(6);
            self.had_faults = true;
            self.sim.fail_call(at, FAULT);
        }
        let begun = self.gps[gp].gp.begin(stream);
        self.sim.clear_faults();
        match begun {
            Ok(()) => {}
            Err(Error::Driver { code: FAULT, .. }) if n => {
                self.gps[gp].gp.begin(stream).expect("begun")
            }
            Err(error) => panic!("{error}"),
        }
        self.gps[gp].busy = true;
        // What is allocated before the capture is no graph's, but was perhaps.
        for before in self.gps[gp].before.iter().copied().collect::<Vec<_>>() {
            self.order(before, lane);
        }
        self.gps[gp].before.insert(lane);
        self.lanes[lane].part = Some(Part { gp, phase: Phase::Begun, fork: None, is_fork: false });
        reach("begun");
    }

    pub(super) fn capturable(&self, thread: usize) -> Vec<usize> {
        let mut lanes = self.shared(thread);
        lanes.retain(|at| match self.lanes[*at].of {
            Of::Owned(_) => true,
            Of::Raw(raw) => {
                let mut flags = 0;
                call!(self.rig.driver, cuStreamGetFlags(raw as CUstream, &mut flags));
                flags == 1
            }
            _ => false,
        });
        lanes
    }

    /// The next thing on a lane that takes part in a capture, or will.
    pub(super) fn capture(&mut self, thread: usize) {
        let parts: Vec<usize> = (0..self.lanes.len())
            .filter(|at| self.lanes[*at].part.is_some_and(|part| !part.is_fork))
            .collect();
        let Some(lane) = self.pick(&parts) else { return self.begin(thread) };
        let part = self.lanes[lane].part.unwrap();
        let serial = self.gps[part.gp].serial;
        let stream = self.lanes[lane].handle();
        let id = self.gps[part.gp].pool;
        let pool = self.slots[self.slot(id).unwrap()].pool.clone();
        match part.phase {
            Phase::Begun => match self.below(4) {
                0 => self.malloc_for_graph(lane, lane, usize::MAX, None),
                1 if self.one_in(3) => {
                    note!(self, "end without a capture gp {serial} lane {lane}");
                    self.end_part(lane);
                }
                _ => {
                    note!(self, "capture gp {serial} lane {lane}");
                    call!(self.rig.driver, cuCtxSetCurrent(self.rig.device.context()));
                    // One that another thread ends is relaxed.
                    graph::begin(self.rig, stream, graph::RELAXED);
                    let others: Vec<usize> = self.capturable(thread);
                    let fork = if self.one_in(2) { self.pick(&others) } else { None };
                    if let Some(fork) = fork {
                        note!(self, "  with lane {fork}");
                        self.order(lane, fork);
                        self.lanes[fork].part = Some(Part {
                            gp: part.gp,
                            phase: Phase::Capturing,
                            fork: None,
                            is_fork: true,
                        });
                        self.gps[part.gp].before.insert(fork);
                    }
                    self.gps[part.gp].captures += 1;
                    self.lanes[lane].part = Some(Part { phase: Phase::Capturing, fork, ..part });
                }
            },
            Phase::Capturing => {
                let on = match part.fork {
                    Some(fork) if self.one_in(2) => fork,
                    _ => lane,
                };
                match self.below(8) {
                    0..3 => {
                        let graph = self.gps[part.gp].captures;
                        self.malloc_for_graph(lane, on, graph, Some(lane));
                    }
                    3..5 => {
                        let mine: Vec<usize> = (0..self.live.len())
                            .filter(|at| self.live[*at].capture == Some(lane))
                            .collect();
                        let Some(index) = self.pick(&mine) else { return };
                        let live = self.live[index].clone();
                        self.order(live.of, on);
                        self.rig.check(
                            live.ptr.address(),
                            live.bytes,
                            live.seed,
                            self.lanes[on].handle(),
                        );
                        let stream = self.lanes[on].handle();
                        note!(self, "free {:x?} in the capture of {lane} on {on}", live.ptr);
                        self.attempt(&pool, true, || pool.free(live.ptr, stream))
                            .expect("a free in a capture");
                        self.live.swap_remove(index);
                        reach("frees in captures");
                    }
                    5 => {
                        // Ordinary memory, whose work on this lane was before the capture.
                        let mine: Vec<usize> = (0..self.live.len())
                            .filter(|at| {
                                let live = &self.live[*at];
                                live.of == on
                                    && live.capture.is_none()
                                    && !matches!(live.home, Home::Graph(..))
                                    && !live.uses.iter().any(|used| {
                                        *used != on
                                            && (self.lanes[*used].part.is_some()
                                                || matches!(self.lanes[*used].of, Of::PerThread(_)))
                                    })
                            })
                            .collect();
                        let Some(index) = self.pick(&mine) else { return };
                        let live = self.live[index].clone();
                        let (of, stream) = (self.pool_of(&live), self.lanes[on].handle());
                        if self.slot(live.pool).is_none() {
                            return;
                        }
                        // A pool that is not open to the capture knows raw streams in captures not.
                        if live.pool != id && matches!(self.lanes[on].of, Of::Raw(_)) {
                            return;
                        }
                        note!(
                            self,
                            "free {:x?} of {} {:?}, ordinary, in the capture of {lane} on {on}",
                            live.ptr,
                            live.pool,
                            live.home
                        );
                        self.attempt(&of, true, || of.free(live.ptr, stream))
                            .expect("a free in a capture");
                        let again = of.free(live.ptr, stream);
                        assert!(
                            matches!(
                                again,
                                Err(Error::DoubleFree { .. } | Error::ForeignPointer { .. })
                            ),
                            "{again:?}"
                        );
                        self.live.swap_remove(index);
                        reach("ordinary frees in captures");
                    }
                    _ => {
                        if let Some(fork) = part.fork {
                            self.order(fork, lane);
                            self.lanes[fork].part = None;
                        }
                        let way = self.below(8);
                        note!(self, "stop gp {serial} lane {lane} way {way}");
                        if way == 0 {
                            let fork = part.fork;
                            self.end_part(lane);
                            for lane in [Some(lane), fork].into_iter().flatten() {
                                self.lanes[lane].must_live |=
                                    matches!(self.lanes[lane].of, Of::Raw(_));
                            }
                        }
                        let mut graph = graph::stop(self.rig, stream);
                        graph.prepare();
                        let number = self.gps[part.gp].captures;
                        self.gps[part.gp].graphs.push(Executable { graph, number });
                        for live in self.live.iter_mut().filter(|live| live.capture == Some(lane)) {
                            live.capture = None;
                            live.of = lane;
                        }
                        if way > 0 {
                            self.lanes[lane].part =
                                Some(Part { phase: Phase::Captured, fork: None, ..part });
                        }
                        reach("captures");
                    }
                }
            }
            Phase::Captured => {
                note!(self, "end gp {serial} lane {lane}");
                self.end_part(lane);
            }
        }
    }

    pub(super) fn end_part(&mut self, lane: usize) {
        let part = self.lanes[lane].part.take().unwrap();
        let stream = self.lanes[lane].handle();
        let fault = self.faulty && self.one_in(4);
        if fault {
            self.had_faults = true;
            let n = 1 + self.random.below(6);
            note!(self, "  fault at {n}");
            self.sim.fail_call(n, FAULT);
        }
        let ended = self.gps[part.gp].gp.end(stream);
        self.sim.clear_faults();
        match ended {
            Ok(()) => {}
            Err(Error::Driver { code: FAULT, .. }) if fault => {
                // Where entering the context failed it has not ended.
                let again = self.gps[part.gp].gp.end(stream);
                assert!(matches!(again, Ok(()) | Err(Error::GraphPool { .. })), "{again:?}");
            }
            Err(error) => panic!("{error}"),
        }
        self.gps[part.gp].busy = false;
    }

    pub(super) fn malloc_for_graph(
        &mut self,
        lane: usize,
        on: usize,
        graph: usize,
        capture: Option<usize>,
    ) {
        let part = self.lanes[lane].part.unwrap();
        let (serial, id) = (self.gps[part.gp].serial, self.gps[part.gp].pool);
        let pool = self.slots[self.slot(id).unwrap()].pool.clone();
        let bytes = self.bytes();
        let stream = self.lanes[on].handle();
        let result = self.attempt(&pool, true, || pool.malloc(bytes as usize, stream));
        note!(self, "malloc {bytes} for gp {serial} on {on} of {lane}: {result:x?}");
        match result {
            Ok(ptr) => self.enter(id, Home::Graph(serial, graph), ptr, bytes, on, capture),
            Err(error) if error.is_out_of_memory() => reach("requests of graphs refused"),
            Err(error) => panic!("{error}"),
        }
    }

    pub(super) fn launch(&mut self, thread: usize) {
        let ready: Vec<usize> = (0..self.gps.len())
            .filter(|at| !self.gps[*at].busy && !self.gps[*at].graphs.is_empty())
            .collect();
        let Some(at) = self.pick(&ready) else { return };
        let shared = self.shared(thread);
        let Some(lane) = self.pick(&shared) else { return };
        if self.gps[at].before.iter().any(|before| !shared.contains(before)) {
            return;
        }
        let which = self.below(self.gps[at].graphs.len());
        note!(self, "launch graph {which} of gp {} on {lane}", self.gps[at].serial);
        let before: Vec<usize> = self.gps[at].before.iter().copied().collect();
        for before in before {
            self.order(before, lane);
        }
        let gp = &mut self.gps[at];
        call!(self.rig.driver, cuCtxSetCurrent(self.rig.device.context()));
        gp.graphs[which].graph.launch(self.lanes[lane].handle());
        gp.before.insert(lane);
        gp.last = Some(gp.graphs[which].number);
        // It may write over what is no graph's, but was its own scratch memory before.
        let serial = gp.serial;
        for live in &mut self.live {
            if live.home == Home::Graph(serial, usize::MAX) {
                live.home = Home::Graph(serial, usize::MAX - 1);
            }
        }
        reach("launches");
    }

    pub(super) fn release(&mut self, thread: usize) {
        let ready: Vec<usize> = (0..self.gps.len()).filter(|at| !self.gps[*at].busy).collect();
        let Some(at) = self.pick(&ready) else { return };
        self.release_one(thread, at);
    }

    pub(super) fn release_one(&mut self, thread: usize, at: usize) -> bool {
        let shared = self.shared(thread);
        let Some(lane) = self.pick(&shared) else { return false };
        if self.gps[at].before.iter().any(|before| !shared.contains(before)) {
            return false;
        }
        let before: Vec<usize> = self.gps[at].before.iter().copied().collect();
        for before in before {
            self.order(before, lane);
        }
        let serial = self.gps[at].serial;
        let way = self.one_in(3);
        note!(self, "release gp {serial} on {lane}, by drop {way}");
        if !way {
            let slot = self.slot(self.gps[at].pool);
            let pool = slot.map(|slot| self.slots[slot].pool.clone());
            let stream = self.lanes[lane].handle();
            if let Some(pool) = pool {
                let gp = self.gps.swap_remove(at);
                self.moved_gp(at);
                let released = self.attempt(&pool, false, || gp.gp.release(stream));
                assert!(matches!(released, Ok(()) | Err(Error::GraphPool { .. })), "{released:?}");
                self.end_gp(gp, serial, lane);
                return true;
            }
        }
        let gp = self.gps.swap_remove(at);
        self.moved_gp(at);
        self.end_gp(gp, serial, lane);
        true
    }

    pub(super) fn moved_gp(&mut self, at: usize) {
        let from = self.gps.len();
        for lane in &mut self.lanes {
            if let Some(part) = &mut lane.part
                && part.gp == from
            {
                part.gp = at;
            }
        }
    }

    pub(super) fn end_gp(&mut self, gp: Gp<'a>, serial: u64, lane: usize) {
        drop(gp.graphs);
        drop(gp.gp);
        for live in &mut self.live {
            if matches!(live.home, Home::Graph(of, _) if of == serial) {
                live.of = lane;
            }
        }
        reach("graph pools gone");
    }

    // ---- ends
}

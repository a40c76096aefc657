//! A program from its first step to its end.

use super::*;

impl<'a> World<'a> {
    pub(super) fn exit(&mut self, thread: usize) -> Turn {
        let Some(lane) =
            self.lanes.iter().position(|lane| matches!(lane.of, Of::PerThread(of) if of == thread))
        else {
            return Turn::On;
        };
        if !self.can_leave(thread, lane) {
            return Turn::On;
        }
        let shared = self.shared(thread);
        let Some(heir) = self.pick(&shared) else { return Turn::On };
        note!(self, "thread {thread} ends, heir {heir}");
        self.leave(thread, lane, heir);
        reach("threads ended");
        Turn::Exits
    }

    pub(super) fn turn(&mut self, thread: usize) -> Turn {
        match self.below(64) {
            0..16 => self.malloc(thread),
            16..28 => self.free(thread),
            28..31 => self.use_further(thread),
            31..33 => self.follow(thread),
            33..35 => self.synchronize(thread),
            35..37 => self.trim(),
            37 => self.limit(),
            38 => self.look(),
            39..42 => self.sleep(thread),
            42 => self.export(thread),
            43 => self.access(),
            44 => self.look_from_peer(thread),
            45..47 => {
                let shared = self.shared(thread);
                if shared.iter().all(|lane| self.can_leave(thread, *lane)) {
                    self.replace(thread)
                }
            }
            47..54 => self.capture(thread),
            54..56 => self.launch(thread),
            56 => {
                if self.one_in(2) {
                    self.release(thread)
                }
            }
            57 => {
                if self.one_in(3) {
                    self.end_pool(thread)
                }
            }
            58 => return self.exit(thread),
            _ => {
                let steps = 1 + self.below(12);
                note!(self, "advance {steps}");
                for _ in 0..steps {
                    self.sim.advance_all();
                }
            }
        }
        Turn::On
    }

    pub(super) fn step(&mut self, thread: usize) -> Turn {
        self.step += 1;
        self.thread = thread;
        let turn = self.turn(thread);
        self.validate();
        self.compare_books();
        self.sim.assert_clean();
        for (at, lane) in self.lanes.iter().enumerate() {
            if lane.part.is_some_and(|part| part.phase == Phase::Capturing) {
                let mut status =
                    cuda_sys::types::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
                call!(self.rig.driver, cuStreamIsCapturing(lane.handle().raw(), &mut status));
                assert_eq!(
                    status,
                    cuda_sys::types::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE,
                    "the capture of lane {at}"
                );
            }
        }
        turn
    }

    /// Ends captures, in any thread.
    pub(super) fn quiesce(&mut self) {
        for lane in 0..self.lanes.len() {
            while self.lanes[lane].part.is_some_and(|part| !part.is_fork) {
                let part = self.lanes[lane].part.unwrap();
                match part.phase {
                    Phase::Begun | Phase::Captured => self.end_part(lane),
                    Phase::Capturing => {
                        if let Some(fork) = part.fork {
                            self.order(fork, lane);
                            self.lanes[fork].part = None;
                        }
                        drop(graph::stop(self.rig, self.lanes[lane].handle()));
                        for live in self.live.iter_mut().filter(|live| live.capture == Some(lane)) {
                            live.capture = None;
                            live.of = lane;
                        }
                        self.lanes[lane].part =
                            Some(Part { phase: Phase::Captured, fork: None, ..part });
                    }
                }
            }
        }
    }
}

/// Runs a program to its end, or so many steps of it.
pub(crate) fn run(seed: u64, timed: bool, most_steps: u64) {
    let mut random = Lcg(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 77);
    let schedule = match random.below(7) {
        0 => Schedule::Eager,
        1 | 2 => Schedule::Late { patience: 1 + random.below(20) as u32 },
        3 | 4 => Schedule::Random,
        _ => Schedule::Manual,
    };
    let device = [2 * LIMIT, 2 * LIMIT, LIMIT / 2 + random.below(LIMIT)][random.below(3) as usize];
    let sim = Simulator::builder()
        .devices(2)
        .schedule(schedule)
        .seed(seed)
        .memory_bytes((device + 1) * GRANULE)
        .build()
        .expect("a simulator");
    let rig = Rig::on(sim.clone());
    let peer = rig.beside(1);
    let threads = 1 + random.below(4) as usize;
    let verbose = std::env::var_os("VPMM_TOGETHER_SAYS").is_some();
    let faulty = random.below(3) == 0;
    let mut world = World {
        rig: &rig,
        peer: &peer,
        peer_stream: peer.stream(),
        sim: sim.clone(),
        random,
        lanes: Vec::new(),
        slots: Vec::new(),
        orphans: BTreeMap::new(),
        live: Vec::new(),
        gps: Vec::new(),
        next: 0,
        timed,
        faulty,
        had_faults: false,
        verbose,
        step: 0,
        thread: 0,
        kept_to_main: false,
    };
    note!(
        world,
        "seed {seed} schedule {schedule:?} device {device} threads {threads} faulty {faulty}"
    );
    for _ in 0..1 + world.below(3) {
        world.make_pool();
    }
    for at in 0..2 + world.below(4) {
        let of = match world.below(8) {
            0 if at > 1 => Of::Legacy,
            1..4 => world.raw(),
            _ => Of::Owned(rig.stream()),
        };
        world.lanes.push(Lane { of, part: None, must_live: false });
    }
    for (at, lane) in world.lanes.iter().enumerate() {
        let kind = match lane.of {
            Of::Owned(_) => "owned",
            Of::Raw(_) => "raw",
            Of::Legacy => "legacy",
            _ => "own",
        };
        note!(world, "lane {at} {kind}");
    }
    for thread in 0..threads {
        world.lanes.push(Lane { of: Of::PerThread(thread), part: None, must_live: false });
    }
    let steps = 1 + world.random.below(250);
    let steps = steps.min(most_steps);
    let world = Mutex::new(world);
    std::thread::scope(|scope| {
        let world = &world;
        let spawn = |thread: usize| {
            let (go, turns) = mpsc::channel::<()>();
            let (tell, told) = mpsc::channel();
            let worker = scope.spawn(move || {
                for () in turns {
                    let outcome = catch_unwind(AssertUnwindSafe(|| {
                        world.lock().unwrap_or_else(PoisonError::into_inner).step(thread)
                    }));
                    if tell.send(outcome).is_err() {
                        return;
                    }
                }
            });
            (go, told, worker)
        };
        let mut workers: Vec<_> = (0..threads).map(spawn).collect();
        for _ in 0..steps {
            let thread = world.lock().unwrap().below(threads);
            workers[thread].0.send(()).unwrap();
            match workers[thread].1.recv().unwrap() {
                Ok(Turn::On) => {}
                Ok(Turn::Exits) => {
                    let (go, _, worker) = std::mem::replace(&mut workers[thread], spawn(thread));
                    drop(go);
                    worker.join().unwrap();
                    let world = world.lock().unwrap();
                    world.validate();
                }
                Err(panic) => resume_unwind(panic),
            }
        }
    });
    let had_faults = end_all(world.into_inner().unwrap(), &rig, &sim);
    assert!(had_faults || sim.leaks().events == 0, "{:?}", sim.leaks());
    drop(peer);
    drop(rig);
    sim.assert_clean();
    // A heap whose end a fault comes to leaves the rest to the driver.
    assert!(had_faults || sim.leaks().is_empty(), "{:?}", sim.leaks());
}

fn end_all(mut world: World<'_>, rig: &Rig, _sim: &Simulator) -> bool {
    note!(world, "the end");
    world.quiesce();
    world.validate();
    world.look();
    // Threads are gone, and their default streams with them.
    rig.device.synchronize().expect("the device finishes");
    for live in &world.live {
        if !live.uses.is_empty() {
            continue;
        }
        if let Of::PerThread(_) = world.lanes[live.of].of {
            continue;
        }
        world.check(live, live.of);
    }
    if world.one_in(2) {
        let live = std::mem::take(&mut world.live);
        rig.device.synchronize().expect("the device finishes");
        for live in live {
            // Foreign handles of uses are gone with their threads: nothing runs any more.
            let used_by_thread =
                live.uses.iter().any(|used| matches!(world.lanes[*used].of, Of::PerThread(_)));
            if used_by_thread {
                world.live.push(live);
                continue;
            }
            let stream = world.lanes[0].handle();
            world.pool_of(&live).free(live.ptr, stream).expect("a free at the end");
        }
        world.validate();
    }
    let World { slots, lanes, gps, peer_stream, live, had_faults, .. } = world;
    let mut lanes = lanes.into_iter();
    let end = |lane: Lane| {
        if let Of::Raw(raw) = lane.of {
            call!(rig.driver, cuCtxSetCurrent(rig.device.context()));
            call!(rig.driver, cuStreamDestroy_v2(raw as CUstream));
        }
    };
    lanes.next().into_iter().for_each(end);
    drop(gps);
    for slot in slots {
        slot.pool.destroy().map_err(|(_, error)| error).expect("an end");
    }
    let mut rest: BTreeMap<u64, Live> = BTreeMap::new();
    for live in live {
        rest.insert(live.pool, live);
    }
    for live in rest.into_values() {
        if let Some(pool) = Pool::of(&rig.driver, live.ptr.address()) {
            pool.destroy().map_err(|(_, error)| error).expect("an orphan's end");
        }
    }
    assert_eq!(rig.mismatches(), 0, "words differ from what was written");
    lanes.for_each(end);
    drop(peer_stream);
    had_faults
}

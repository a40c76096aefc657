//! Pools: made, trimmed, limited, shared, looked at, ended.

use super::*;

impl<'a> World<'a> {
    pub(super) fn make_pool(&mut self) {
        let mut config = PoolConfig::default();
        config.moves_per_second = [0, 0, 1000, u32::MAX][self.below(4)];
        config.limit_bytes = (self.one_in(2)).then_some(LIMIT * GRANULE);
        config.va_size_bytes = Some([8 * LIMIT, 8 * LIMIT, 24][self.below(3)] * GRANULE);
        if self.one_in(2) {
            config.pending_policy = PendingPolicy::WaitFirst;
        }
        if self.one_in(3) {
            config.reuse.follow_event_dependencies = self.one_in(2);
            config.reuse.opportunistic = self.one_in(2);
            config.reuse.internal_dependencies = self.one_in(2);
        }
        config.patience = Duration::from_micros(if self.one_in(2) { 100 } else { 0 });
        config.out_of_memory = match self.below(3) {
            0 => WaitPolicy::FailAtOnce,
            1 => WaitPolicy::WaitUpTo(Duration::from_micros(300)),
            _ => WaitPolicy::WaitForPending,
        };
        if self.one_in(5) {
            config.release_threshold_bytes = Some(self.random.below(LIMIT) * GRANULE);
        }
        let shares = self.one_in(2);
        if shares {
            config.sharing = Sharing::FileDescriptor;
        }
        let helped = self.one_in(6);
        if helped {
            let mut background = Background::default();
            background.period = Duration::ZERO;
            background.ahead_bytes = self.random.below(6) * GRANULE;
            config.background = Some(background);
        }
        if !self.timed {
            config.moves_per_second *= u32::from(config.moves_per_second == u32::MAX);
            config.patience = Duration::ZERO;
            config.background = None;
            if matches!(config.out_of_memory, WaitPolicy::WaitUpTo(_)) {
                config.out_of_memory = WaitPolicy::FailAtOnce;
            }
        }
        let helped = config.background.is_some();
        let pool = Pool::new(&self.rig.device, &config).expect("a pool");
        let id = self.number();
        note!(self, "pool {id}: {config:?}");
        let (asleep, kept, exported) = ([false; 2], [true; 2], false);
        self.slots.push(Slot {
            id,
            pool,
            shares,
            helped,
            asleep,
            kept,
            access: Access::None,
            exported,
        });
        let handle = &self.slots.last().unwrap().pool;
        if self.random.below(4) == 0 {
            handle.on_out_of_memory_for_test();
        }
    }

    pub(super) fn trim(&mut self) {
        let slot = self.below(self.slots.len());
        let keep = self.random.below(LIMIT) * GRANULE * self.random.below(2);
        let pool = self.slots[slot].pool.clone();
        let (free, before) = (self.rig.device.free_memory().unwrap(), pool.stats().mapped_bytes);
        let has_faults = self.had_faults;
        let tag = self.one_in(3).then(|| self.below(2));
        let gone = match tag {
            Some(tag) => {
                let tagged = pool.tagged(TAGS[tag]).expect("a tag");
                self.attempt(&pool, false, || tagged.trim_to(keep)).expect("a trim")
            }
            None => self.attempt(&pool, false, || pool.trim_to(keep)).expect("a trim"),
        };
        note!(self, "trim {tag:?} {} to {keep}: {gone}", self.slots[slot].id);
        if !self.slots.iter().any(|slot| slot.helped)
            && self.orphans.is_empty()
            && !has_faults
            && !self.had_faults
        {
            assert_eq!(self.rig.device.free_memory().unwrap() - free, gone);
            assert!(before - pool.stats().mapped_bytes <= gone);
        }
        reach("trims");
    }

    pub(super) fn limit(&mut self) {
        let slot = self.below(self.slots.len());
        let most = (!self.one_in(3)).then(|| self.random.below(LIMIT) * GRANULE);
        note!(self, "limit {} to {most:?}", self.slots[slot].id);
        self.slots[slot].pool.limit_to(most).expect("a limit");
    }

    pub(super) fn look(&mut self) {
        note!(self, "look");
        for slot in &self.slots {
            let stats = slot.pool.stats();
            assert!(stats.live_bytes <= stats.mapped_bytes + (16 << 30), "{stats:?}");
            let live: Vec<&Live> = self.live.iter().filter(|live| live.pool == slot.id).collect();
            assert_eq!(stats.live_count, live.len() as u64, "{stats:?}");
            slot.pool.snapshot();
            let _ = slot.pool.layout().to_string();
            for one in live {
                let found =
                    slot.pool.allocation(one.ptr.address() + one.bytes - 1).expect("it is live");
                assert_eq!(found.start.address(), one.ptr.address());
            }
        }
    }

    pub(super) fn export(&mut self, thread: usize) {
        if self.is_capturing() {
            return;
        }
        let reachable = self.reachable(thread);
        let Some(index) = self.pick(&reachable) else { return };
        let live = self.live[index].clone();
        let Some(slot) = self.slot(live.pool) else { return };
        if !self.slots[slot].shares || matches!(live.home, Home::Graph(..)) || self.is_asleep(&live)
        {
            return;
        }
        call!(self.rig.driver, cuCtxSetCurrent(self.rig.device.context()));
        call!(self.rig.driver, cuStreamSynchronize(self.lanes[live.of].handle().raw()));
        let pool = self.slots[slot].pool.clone();
        let (here, there) = UnixStream::pair().unwrap();
        let whole = self.one_in(3) && live.home == Home::Main;
        note!(self, "export {:x?} of {} whole {whole}", live.ptr, live.pool);
        let rig = self.rig;
        std::thread::scope(|scope| {
            let importer = scope.spawn(|| {
                let memory =
                    Imported::receive(&rig.device, &there, Access::ReadWrite).expect("an import");
                let stream = rig.stream();
                let ptr = memory.translate(live.ptr.address()).expect("it is there");
                rig.check(ptr.address(), live.bytes, live.seed, stream.handle());
                stream.synchronize().unwrap();
            });
            let mut export = match live.home {
                _ if whole => pool.export_all(),
                Home::Main => pool.export(live.ptr),
                Home::Tag(tag) => {
                    let tagged = pool.tagged(TAGS[tag]).unwrap();
                    tagged.export(live.ptr).unwrap().send(&here).expect("sent");
                    importer.join().expect("imported");
                    return;
                }
                Home::Graph(..) => unreachable!(),
            }
            .expect("an export");
            export.send(&here).expect("sent");
            importer.join().expect("imported");
        });
        self.slots[slot].exported = true;
        reach("exports");
    }

    pub(super) fn access(&mut self) {
        let slot = self.below(self.slots.len());
        if self.is_capturing() {
            return;
        }
        let access =
            [Access::None, Access::Read, Access::ReadWrite, Access::ReadWrite][self.below(4)];
        let pool = self.slots[slot].pool.clone();
        let device = self.peer.device.clone();
        note!(self, "access {} {access:?}", self.slots[slot].id);
        self.attempt(&pool, true, || pool.set_access(&device, access)).expect("access");
        self.slots[slot].access = access;
    }

    pub(super) fn look_from_peer(&mut self, thread: usize) {
        if self.is_capturing() {
            return;
        }
        let reachable = self.reachable(thread);
        let Some(index) = self.pick(&reachable) else { return };
        let live = self.live[index].clone();
        let Some(slot) = self.slot(live.pool) else { return };
        if self.slots[slot].access == Access::None
            || matches!(live.home, Home::Graph(..))
            || self.is_asleep(&live)
        {
            return;
        }
        note!(self, "look {:x?} from the peer", live.ptr);
        call!(self.rig.driver, cuCtxSetCurrent(self.rig.device.context()));
        call!(self.rig.driver, cuStreamSynchronize(self.lanes[live.of].handle().raw()));
        self.peer.check(live.ptr.address(), live.bytes, live.seed, self.peer_stream.handle());
        self.peer_stream.synchronize().unwrap();
        reach("looks from a peer");
    }

    pub(super) fn end_pool(&mut self, thread: usize) {
        if self.is_capturing() {
            return;
        }
        let slot = self.below(self.slots.len());
        let id = self.slots[slot].id;
        for at in (0..self.gps.len()).rev() {
            if self.gps[at].pool == id && (self.gps[at].busy || !self.release_one(thread, at)) {
                return;
            }
        }
        if self.live.iter().any(|live| live.pool == id && live.capture.is_some()) {
            return;
        }
        let in_use = self.live.iter().any(|live| live.pool == id);
        let destroys = self.one_in(2);
        note!(self, "end pool {id}, destroy {destroys}, in use {in_use}");
        let Slot { pool, .. } = self.slots.swap_remove(slot);
        if destroys {
            let fault = self.faulty && self.one_in(4);
            if fault {
                self.had_faults = true;
                let n = 1 + self.random.below(20);
                note!(self, "  fault at {n}");
                self.sim.fail_call(n, FAULT);
            }
            let ended = pool.destroy();
            self.sim.clear_faults();
            if let Err((_, error)) = ended {
                panic!("{error}");
            }
            self.live.retain(|live| live.pool != id);
            reach("pools destroyed");
        } else {
            drop(pool);
            if in_use {
                self.orphans.insert(id, true);
                reach("orphans");
            }
        }
        self.make_pool();
    }
}

trait ForTest {
    fn on_out_of_memory_for_test(&self);
}
impl ForTest for Pool {
    fn on_out_of_memory_for_test(&self) {
        let again = std::sync::atomic::AtomicU64::new(0);
        let callback = self.on_out_of_memory(move |pool, _| {
            if again.fetch_add(1, std::sync::atomic::Ordering::Relaxed).is_multiple_of(2) {
                let _ = pool.trim_to(0);
                vpmm::Recovery::Retry
            } else {
                vpmm::Recovery::GiveUp
            }
        });
        std::mem::forget(callback);
    }
}

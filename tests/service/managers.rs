//! Managers of several processes that do at random whatever they can, each for itself, beside driver calls that fail and
//! servers that go: what they say is mapped has its allocation's contents, whatever came before, and what fails changes
//! nothing.
//!
//! `GMS_MANAGERS_FIRST` and `PROPTEST_CASES` choose other programs.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use cuda_sys::types::CUresult;
use gms::client::{ClientError, ConnectOptions, MappingInfo, MemoryManager};
use gms::lock::{Granted, Requested};

use crate::random::{Lcg, cases};
use crate::rig::{GRANULE, Local, Machine, eventually};

const TAGS: [&str; 2] = ["weights", "cache"];
const LOCKS: [Requested; 4] =
    [Requested::Rw, Requested::Ro, Requested::RwOrRo, Requested::RwDataOrRw];

/// What a server has, which is more than it is ever asked for.
const MEMORY: u64 = 4096 * GRANULE;

/// Calls that fail now and then.
const CALLS: [&str; 6] = [
    "cuMemAddressReserve",
    "cuMemImportFromShareableHandle",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuCtxSynchronize",
];

struct Worker {
    machine: Machine,
    manager: MemoryManager,
    /// Addresses without an allocation, and their bytes.
    reserved: BTreeMap<u64, u64>,
    scratches: Vec<u64>,
    /// Mappings that were made by a writer.
    writable: Vec<u64>,
    /// Whether its server is gone.
    is_lost: bool,
}

struct World {
    local: Local,
    workers: Vec<Worker>,
    /// What was written to allocations, by their names.
    contents: HashMap<String, u8>,
    chance: Lcg,
    is_faulty: bool,
}

/// Whether a call of the driver's has failed.
fn is_fault(error: &ClientError) -> bool {
    matches!(error, ClientError::Cuda(_))
}

impl Worker {
    fn new(local: &Local) -> Self {
        let machine = Machine::new();
        let mut manager = machine.manager(local.socket());
        manager.set_scratch_block(2 * GRANULE).unwrap();
        let (reserved, scratches, writable) = Default::default();
        Self { machine, manager, reserved, scratches, writable, is_lost: false }
    }

    fn mappings(&self) -> Vec<MappingInfo> {
        self.manager.mappings()
    }

    /// Checks everything that it says of itself.
    fn check(&self, contents: &HashMap<String, u8>, why: &str) {
        let mut end = 0;
        for mapping in self.mappings() {
            assert!(mapping.address >= end, "{why}: two mappings overlap");
            end = mapping.address + mapping.bytes;
            if mapping.is_mapped {
                let expected = contents.get(&mapping.allocation_id).copied().unwrap_or(0);
                for at in [mapping.address, end - 1] {
                    let found = self.machine.read(at, 1);
                    assert_eq!(found, [expected], "{why}: {mapping:?}");
                }
            }
        }
        let summary = self.manager.scratch_summary();
        assert_eq!(summary.count, self.scratches.len(), "{why}");
    }
}

impl World {
    fn below(&mut self, bound: u64) -> u64 {
        self.chance.below(bound)
    }

    fn tag(&mut self) -> &'static str {
        TAGS[self.below(2) as usize]
    }

    fn bytes(&mut self) -> u64 {
        1 + self.below(4 * GRANULE)
    }

    fn some_mapping(&mut self, of: usize) -> Option<MappingInfo> {
        let mut all = self.workers[of].mappings();
        let count = all.len() as u64;
        (count > 0).then(|| all.swap_remove(self.below(count) as usize))
    }

    fn connect(&mut self, of: usize) -> Result<(), ClientError> {
        let lock = LOCKS[self.below(4) as usize];
        // The server hears of an end a moment later.
        let time = Duration::from_millis(if self.below(4) == 0 { 3 } else { 0 });
        let options =
            ConnectOptions::new(lock).timeout(time).batch(self.below(3) > 0).spin(Duration::ZERO);
        let others = self.workers.iter().enumerate().filter(|(at, it)| *at != of && !it.is_lost);
        let has = |lock| {
            let mut locks = others.clone().filter_map(|(_, it)| it.manager.granted_lock());
            locks.any(|has| has == lock)
        };
        let (reads, writes) = (has(Granted::Ro), has(Granted::Rw) || has(Granted::RwData));
        let was = self.workers[of].manager.granted_lock();
        match self.workers[of].manager.connect(options) {
            Ok(granted) => {
                assert!(was.is_none() && !writes, "{granted:?} beside a writer");
                assert!(granted == Granted::Ro || !reads, "{granted:?} beside a reader");
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Something of one of them; what it was, what came of it, and whether its server was gone.
    fn step(&mut self) -> (usize, &'static str, Result<(), ClientError>, bool) {
        if self.below(50) == 0 {
            self.local.restart();
            for worker in &mut self.workers {
                worker.is_lost = worker.manager.is_connected();
            }
        }
        let of = self.below(self.workers.len() as u64) as usize;
        if self.is_faulty && self.below(4) == 0 {
            let call = CALLS[self.below(CALLS.len() as u64) as usize];
            let nth = 1 + self.below(3);
            self.workers[of].machine.sim.fail_nth(call, nth, CUresult::CUDA_ERROR_UNKNOWN);
        }
        if self.is_faulty && self.below(8) == 0 {
            // What a server lacks is an error to who asks for it.
            let (call, nth) = ("cuMemExportToShareableHandle", 1 + self.below(3));
            self.local.sim.fail_nth(call, nth, CUresult::CUDA_ERROR_OPERATING_SYSTEM);
            let left = self.below(6) * GRANULE;
            let limit = self.local.sim.memory_used(0) + left;
            self.local.sim.set_memory_limit(0, limit);
        }
        let (what, done) = self.something(of);
        self.workers[of].machine.sim.clear_faults();
        self.local.sim.clear_faults();
        self.local.sim.set_memory_limit(0, MEMORY);
        let worker = &mut self.workers[of];
        let was_lost = worker.is_lost;
        if was_lost && matches!(done, Err(ClientError::Disconnected)) {
            assert!(worker.manager.is_broken() || !worker.manager.is_connected());
        }
        // What it connects to then is there.
        worker.is_lost &= worker.manager.is_connected();
        (of, what, done, was_lost)
    }

    fn something(&mut self, of: usize) -> (&'static str, Result<(), ClientError>) {
        let before = self.workers[of].mappings();
        let may_write = self.workers[of].manager.granted_lock().is_some_and(|it| it != Granted::Ro);
        let granted = self.workers[of].manager.granted_lock();
        let choice = self.below(28);
        // Without a lock there is little to do, and with a writer's much.
        let choice = match granted {
            None if self.below(3) > 0 => 0,
            Some(Granted::Rw) if self.below(3) == 0 => 7 + self.below(4),
            _ => choice,
        };
        let (tag, bytes) = (self.tag(), self.bytes());
        let one = self.some_mapping(of);
        let count = 1 + self.below(3);
        let worker = &mut self.workers[of];
        let manager = &mut worker.manager;
        // What fails as a whole leaves what was mapped as it was.
        let (what, done, is_whole) = match choice {
            0..3 => return ("connect", self.connect(of)),
            3 => {
                manager.abort();
                ("abort", Ok(()), true)
            }
            4 | 5 => ("commit", manager.commit(), false),
            6 => ("commit_layout", manager.commit_layout().map(drop), true),
            7..10 => {
                let made = manager.create_mapping(bytes, tag);
                worker.writable.extend(made.as_ref().ok());
                ("create_mapping", made.map(drop), true)
            }
            10 => {
                let sizes = vec![bytes; count as usize];
                let made = manager.create_mappings(&sizes, tag);
                worker.writable.extend(made.as_ref().ok().into_iter().flatten());
                ("create_mappings", made.map(drop), true)
            }
            11..13 => {
                let tag = (count == 1).then_some(tag);
                let all = manager.import_all(tag);
                if may_write && let Ok(all) = &all {
                    let new = all.iter().map(|(_, at)| *at);
                    let was = |at: &u64| before.iter().any(|it| it.address == *at && it.is_mapped);
                    worker.writable.extend(new.filter(|at| !was(at)));
                }
                ("import_all", all.map(drop), true)
            }
            13 => {
                let made = manager.reserve(bytes);
                if let Ok(at) = made {
                    worker.reserved.insert(at, bytes.next_multiple_of(GRANULE));
                }
                ("reserve", made.map(drop), true)
            }
            14 => {
                let mapped = map_somewhere(worker, may_write, bytes);
                ("map", mapped, true)
            }
            15 => match one {
                Some(one) => ("unmap", manager.unmap(one.address), true),
                None => ("unmap", manager.unmap(7), true),
            },
            16 | 17 => match one {
                Some(one) => ("destroy_mapping", manager.destroy_mapping(one.address), false),
                None => ("destroy_mapping", manager.destroy_mapping(7), true),
            },
            18 => match one {
                Some(one) => {
                    let freed = manager.free_address(one.address);
                    assert_eq!(freed.is_ok(), !one.is_mapped);
                    ("free_address", freed, true)
                }
                None => ("free_address", manager.free_address(7), true),
            },
            19 => {
                let done = manager.unmap_all();
                if done.is_ok() {
                    assert!(manager.mappings().iter().all(|it| !it.is_mapped));
                }
                ("unmap_all", done, false)
            }
            20 | 21 => {
                let was = manager.is_unmapped();
                let done = manager.remap_all();
                if may_write && done.is_ok() && was {
                    let without = before.iter().filter(|it| !it.is_mapped);
                    worker.writable.extend(without.map(|it| it.address));
                }
                ("remap_all", done, true)
            }
            22 => {
                // As it is done, and as it is not.
                let away = if count > 1 { manager.unmap_all() } else { Ok(()) };
                ("reallocate_all", away.and_then(|()| manager.reallocate_all(tag)), false)
            }
            23 => {
                let made = manager.create_scratch_mapping(bytes, tag);
                worker.scratches.extend(made.as_ref().ok());
                ("create_scratch", made.map(drop), true)
            }
            24 => {
                let at = worker.scratches.first().copied().unwrap_or(7);
                let done = manager.destroy_scratch_mapping(at);
                if let Ok(gone) = done {
                    assert_eq!(gone, at != 7);
                    worker.scratches.retain(|it| *it != at);
                }
                ("destroy_scratch", done.map(drop), true)
            }
            25 => {
                let done = manager.prepare_scratch_for_reallocation();
                if done.is_ok() {
                    worker.scratches.clear();
                }
                ("prepare_scratch", done, false)
            }
            26 => match one {
                Some(one) => {
                    let freed = manager.free_handle(&one.allocation_id);
                    ("free_handle", freed.map(drop), true)
                }
                None => ("free_handle", manager.free_handle("none").map(drop), true),
            },
            _ => match one {
                Some(one) if one.is_mapped => {
                    let value = 1 + (bytes % 255) as u8;
                    let is_writable = worker.writable.contains(&one.address);
                    if is_writable {
                        let all = vec![value; one.bytes as usize];
                        worker.machine.write(one.address, &all);
                        self.contents.insert(one.allocation_id, value);
                    }
                    ("write", Ok(()), true)
                }
                _ => ("write", Ok(()), true),
            },
        };
        let worker = &mut self.workers[of];
        let after = worker.mappings();
        worker.writable.retain(|at| after.iter().any(|it| it.address == *at && it.is_mapped));
        worker.writable.dedup();
        if let (Err(error), true) = (&done, is_whole) {
            let mapped = |all: &[MappingInfo]| -> Vec<_> {
                all.iter().map(|it| (it.address, it.bytes, it.is_mapped)).collect()
            };
            assert_eq!(mapped(&after), mapped(&before), "{what}: {error}");
        }
        if !self.is_faulty && what == "create_mapping" {
            let may = granted == Some(Granted::Rw) && !worker.is_lost;
            assert_eq!(done.is_ok(), may, "{done:?}");
        }
        (what, done)
    }

    fn end(mut self) {
        for worker in &mut self.workers {
            worker.machine.sim.clear_faults();
        }
        for worker in std::mem::take(&mut self.workers) {
            let Worker { machine, manager, .. } = worker;
            manager.close().unwrap();
            let leaks = machine.sim.leaks();
            assert_eq!((leaks.handles, leaks.mappings, leaks.reservations), (0, 0, 0), "{leaks:?}");
        }
        eventually("sessions end", || self.local.metric("connections") == 0);
        drop(self.local.session(Requested::Rw));
        self.local.await_state("EMPTY");
        self.local.await_memory(0);
        self.local.sim.assert_clean();
    }
}

/// Some allocation at some address that was reserved, of its size or not.
fn map_somewhere(worker: &mut Worker, writes: bool, bytes: u64) -> Result<(), ClientError> {
    let all = worker.manager.list_handles(None)?;
    let Some(one) = all.get(bytes as usize % all.len().max(1)) else { return Ok(()) };
    let Some((&at, &room)) = worker.reserved.iter().next() else { return Ok(()) };
    let file = worker.manager.export_handle(&one.allocation_id)?;
    let mapped = worker.manager.map(at, file, one.clone());
    if room != one.aligned_size {
        assert!(matches!(mapped, Err(ClientError::MappingState { .. })), "{mapped:?}");
    }
    if mapped.is_ok() {
        worker.reserved.remove(&at);
        if writes {
            worker.writable.push(at);
        }
    }
    mapped
}

fn program(seed: u64, reached: &mut BTreeMap<&str, [u64; 2]>) {
    let local = Local::with(MEMORY, |settings| {
        settings.retry_interval = Duration::from_millis(1);
        settings.retry_timeout = Some(Duration::from_millis(4));
    });
    let mut chance = Lcg(seed * 2 + 1);
    let is_faulty = chance.below(2) == 0;
    let workers = (0..1 + chance.below(3)).map(|_| Worker::new(&local)).collect();
    let mut world = World { local, workers, contents: HashMap::new(), chance, is_faulty };
    let mut past = Vec::new();
    for step in 0..80 {
        let (of, what, done, had_lost) = world.step();
        let said = done.as_ref().map_err(ToString::to_string);
        past.push(format!("{step}: {of} {what} {said:?}"));
        reached.entry(what).or_default()[usize::from(done.is_err())] += 1;
        match &done {
            Ok(())
            | Err(
                ClientError::LockTimeout
                | ClientError::AlreadyConnected { .. }
                | ClientError::NotConnected
                | ClientError::WrongLock { .. }
                | ClientError::StaleLayout { .. }
                | ClientError::MappingState { .. }
                | ClientError::UnknownAddress { .. }
                | ClientError::Refused { .. },
            ) => {}
            Err(error) if is_fault(error) && is_faulty => {}
            Err(ClientError::Disconnected | ClientError::Socket(_)) if had_lost => {}
            Err(error) => panic!("program {seed}: {error}\n{past:#?}"),
        }
        let why = || format!("program {seed}\n{past:#?}\n");
        for worker in &world.workers {
            worker.check(&world.contents, &why());
        }
    }
    world.end();
}

#[test]
fn managers_do_what_they_say_whatever_came_before() {
    let first = std::env::var("GMS_MANAGERS_FIRST").ok().and_then(|it| it.parse().ok());
    let first = first.unwrap_or(1);
    let mut reached = BTreeMap::new();
    for seed in first..first + u64::from(cases() / 8).max(1) {
        program(seed, &mut reached);
    }
    // How often each went well, and failed.
    println!("{reached:#?}");
    if cases() >= 512 {
        assert!(reached.values().all(|[well, _]| *well > 0) && reached.len() == 20);
    }
}

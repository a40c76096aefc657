//! Addresses that stand on one block until a layout's memory comes to them.

use cuda_sys::types::CUresult;
use gms::client::{ClientError, ConnectOptions, MemoryManager, ScratchSummary};
use gms::lock::Requested;

use crate::rig::{GRANULE, Local, Machine, PATIENCE};

const BLOCK: u64 = 2 * GRANULE;

fn manager(local: &Local, machine: &Machine) -> MemoryManager {
    let mut manager = machine.manager(local.socket());
    manager.set_scratch_block(BLOCK).unwrap();
    manager
}

fn connect(manager: &mut MemoryManager, lock: Requested) {
    manager.connect(ConnectOptions::new(lock).timeout(PATIENCE)).unwrap();
}

#[test]
fn a_worker_that_takes_over_keeps_the_addresses_that_it_had_before_there_was_memory() {
    let local = Local::start();
    let machine = Machine::new();
    let mut manager = manager(&local, &machine);
    // The second lies before the first where addresses are given out downwards: slots are not to
    // depend on it.
    let sizes = [5 * GRANULE + 7, GRANULE, 4 * GRANULE];
    let at = sizes.map(|bytes| manager.create_scratch_mapping(bytes, "kv_cache").unwrap());
    assert_eq!(machine.sim.memory_used(0), BLOCK, "one block behind all of it");
    let virtual_bytes = sizes.iter().sum();
    let whole = ScratchSummary { count: 3, virtual_bytes, physical_bytes: BLOCK };
    assert_eq!(manager.scratch_summary(), whole);
    assert_eq!((manager.total_bytes(), at.map(|at| at % BLOCK)), (0, [0; 3]));
    machine.write(at[0] + 4 * GRANULE, b"anywhere");
    assert_eq!(machine.read(at[0], 8), b"anywhere", "it is the same memory everywhere");
    assert_eq!(machine.read(at[2] + BLOCK, 8), b"anywhere");

    let early = manager.prepare_scratch_for_reallocation();
    assert!(matches!(early, Err(ClientError::MappingState { state: "still mapped", .. })));
    manager.unmap_all().unwrap();
    assert_eq!(machine.sim.memory_used(0), 0);
    assert_eq!(manager.scratch_summary(), ScratchSummary { physical_bytes: 0, ..whole });
    assert_ne!(machine.try_write(at[1], b"x"), CUresult::CUDA_SUCCESS);
    let _ = machine.sim.report();

    connect(&mut manager, Requested::Rw);
    manager.prepare_scratch_for_reallocation().unwrap();
    assert_eq!(manager.scratch_summary(), ScratchSummary::default());
    manager.reallocate_all("kv_cache").unwrap();
    manager.remap_all().unwrap();
    let made = manager.list_handles(None).unwrap();
    assert_eq!(made.iter().map(|one| one.size).collect::<Vec<_>>(), sizes, "in their order");
    for (number, at) in (0..).zip(at) {
        machine.write(at, &[number; 4]);
    }
    assert_eq!(machine.read(at[0] + BLOCK, 4), [0; 4], "memory of its own");
    assert_eq!(at.map(|at| machine.read(at, 1)[0]), [0, 1, 2]);
    let slots = at.map(|at| manager.allocation_at(at).unwrap().layout_slot);
    assert_eq!(slots, [0, 1, 2]);
    manager.close().unwrap();
    machine.sim.assert_clean();
}

/// Who waits for a sealed layout adopts it at the addresses that it has captured.
#[test]
fn a_sealed_layout_comes_to_scratch_addresses() {
    let local = Local::start();
    let (first, second) = (Machine::new(), Machine::new());
    let mut writer = first.connected(local.socket(), Requested::RwDataOrRw);
    let cache = writer.create_mapping(3 * GRANULE, "kv_cache").unwrap();
    first.write(cache, b"kept");
    writer.commit_layout().unwrap();
    let mut standby = manager(&local, &second);
    let at = standby.create_scratch_mapping(3 * GRANULE, "kv_cache").unwrap();
    standby.unmap_all().unwrap();
    writer.close().unwrap();
    connect(&mut standby, Requested::RwDataOrRw);
    standby.prepare_scratch_for_reallocation().unwrap();
    standby.remap_all().unwrap();
    assert_eq!(second.read(at, 4), b"kept");
    standby.close().unwrap();
    second.sim.assert_clean();
}

#[test]
fn one_goes_by_itself_and_the_block_with_the_last() {
    let local = Local::start();
    let machine = Machine::new();
    let mut manager = manager(&local, &machine);
    let one = manager.create_scratch_mapping(1, "t").unwrap();
    let two = manager.create_scratch_mapping(BLOCK + 1, "t").unwrap();
    let late = manager.set_scratch_block(GRANULE);
    assert!(matches!(late, Err(ClientError::ScratchBlock { .. })), "{late:?}");
    assert!(manager.destroy_scratch_mapping(one).unwrap());
    assert!(!manager.destroy_scratch_mapping(one).unwrap());
    assert_eq!(machine.sim.memory_used(0), BLOCK);
    assert!(manager.destroy_scratch_mapping(two).unwrap());
    assert_eq!(machine.sim.memory_used(0), 0);
    for bytes in [0, GRANULE / 2, 3 * GRANULE] {
        let refused = manager.set_scratch_block(bytes);
        assert!(matches!(refused, Err(ClientError::ScratchBlock { .. })), "{bytes}");
    }
    assert!(matches!(manager.create_scratch_mapping(0, "t"), Err(ClientError::Size { .. })));
    manager.create_scratch_mapping(9, "t").unwrap();
    drop(manager);
    machine.sim.assert_clean();
}

#[test]
fn one_that_fails_leaves_nothing() {
    let local = Local::start();
    let machine = Machine::new();
    let mut manager = manager(&local, &machine);
    manager.create_scratch_mapping(1, "t").unwrap();
    let before = machine.sim.leaks();
    for (call, nth) in [("cuMemAddressReserve", 1), ("cuMemMap", 2), ("cuMemSetAccess", 1)] {
        machine.sim.fail_nth(call, nth, CUresult::CUDA_ERROR_UNKNOWN);
        let failed = manager.create_scratch_mapping(3 * BLOCK, "t");
        assert!(matches!(failed, Err(ClientError::Cuda(_))), "{call}: {failed:?}");
        assert_eq!(machine.sim.leaks(), before, "{call}");
    }
    manager.close().unwrap();
    machine.sim.assert_clean();
}

#[test]
fn one_that_the_driver_would_not_unmap_is_as_before() {
    let local = Local::start();
    let machine = Machine::new();
    let before = machine.sim.leaks();
    let mut manager = manager(&local, &machine);
    let at = manager.create_scratch_mapping(3 * BLOCK, "t").unwrap();
    let fail = |call, nth| machine.sim.fail_nth(call, nth, CUresult::CUDA_ERROR_UNKNOWN);
    fail("cuMemUnmap", 1);
    let failed = manager.destroy_scratch_mapping(at);
    assert!(matches!(failed, Err(ClientError::Cuda(_))), "{failed:?}");
    machine.write(at, b"here");
    assert!(manager.destroy_scratch_mapping(at).unwrap());
    // One that was only begun, until the next.
    fail("cuMemMap", 2);
    fail("cuMemUnmap", 1);
    assert!(manager.create_scratch_mapping(3 * BLOCK, "t").is_err());
    let at = manager.create_scratch_mapping(BLOCK, "t").unwrap();
    assert!(manager.destroy_scratch_mapping(at).unwrap());
    drop(manager);
    assert_eq!(machine.sim.leaks(), before);
    machine.sim.assert_clean();
}

/// Not taken for one whose memory is there, where all else has had its own back.
#[test]
fn one_without_memory_is_told_by_the_next_who_maps() {
    let local = Local::start();
    let machine = Machine::new();
    let mut manager = manager(&local, &machine);
    let at = manager.create_scratch_mapping(GRANULE, "kv_cache").unwrap();
    manager.unmap_all().unwrap();
    connect(&mut manager, Requested::Rw);
    manager.remap_all().unwrap();
    assert!(!manager.is_unmapped());
    manager.prepare_scratch_for_reallocation().unwrap();
    assert!(manager.is_unmapped());
    let stale = manager.remap_all();
    assert!(matches!(stale, Err(ClientError::StaleLayout { .. })), "{stale:?}");
    manager.allocate_handle(GRANULE, "kv_cache").unwrap();
    manager.remap_all().unwrap();
    machine.write(at, b"here");
    manager.close().unwrap();
    machine.sim.assert_clean();
}

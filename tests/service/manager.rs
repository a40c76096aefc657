//! Memory that is mapped, given up, and had back at the same addresses.

use cuda_sys::types::CUresult;
use gms::client::{ClientError, ConnectOptions};
use gms::lock::{Granted, Requested};

use crate::rig::{GRANULE, Local, Machine, PATIENCE, pattern};

fn options(lock: Requested) -> ConnectOptions {
    ConnectOptions::new(lock).timeout(PATIENCE)
}

/// The whole life of a worker: writes, publishes, reads at the same addresses, sleeps, wakes.
#[test]
fn addresses_stay_while_memory_comes_and_goes() {
    let local = Local::start();
    let worker = Machine::new();
    let mut manager = worker.connected(local.socket(), Requested::RwOrRo);
    let addresses: Vec<u64> =
        (1..4).map(|n| manager.create_mapping(n * GRANULE, "weights").unwrap()).collect();
    for (seed, at) in (0..).zip(&addresses) {
        worker.write(*at, &pattern(seed, 5_000));
    }
    assert_eq!(manager.total_bytes(), 6 * GRANULE);
    manager.commit().unwrap();
    assert!(!manager.is_connected() && manager.is_unmapped());
    assert_eq!(worker.sim.leaks().handles, 0, "nothing is held but addresses");

    manager.connect(options(Requested::Ro)).unwrap();
    manager.remap_all().unwrap();
    let check = |machine: &Machine| {
        for (seed, at) in (0..).zip(&addresses) {
            assert_eq!(machine.read(*at, 5_000), pattern(seed, 5_000));
        }
    };
    check(&worker);
    let denied = worker.try_write(addresses[0], b"x");
    assert_ne!(denied, CUresult::CUDA_SUCCESS, "readers cannot write");
    let _ = worker.sim.report();

    let reader = Machine::new();
    let mut other = reader.connected(local.socket(), Requested::RwOrRo);
    assert_eq!(other.granted_lock(), Some(Granted::Ro));
    for ((allocation, at), seed) in other.import_all(Some("weights")).unwrap().into_iter().zip(0..)
    {
        assert_eq!(allocation.aligned_size, (seed + 1) * GRANULE);
        assert_eq!(reader.read(at, 5_000), pattern(seed, 5_000));
        assert_eq!(other.import_mapping(&allocation.allocation_id).unwrap(), at, "only once");
    }
    other.close().unwrap();

    manager.unmap_all().unwrap();
    manager.abort();
    assert_eq!(worker.sim.leaks().handles, 0);
    manager.connect(options(Requested::Ro)).unwrap();
    manager.remap_all().unwrap();
    check(&worker);
    manager.close().unwrap();
    assert_eq!(worker.sim.leaks(), reader.sim.leaks());
    reader.sim.assert_clean();
}

#[test]
fn another_layout_is_told_by_its_hash() {
    let local = Local::start();
    let machine = Machine::new();
    let mut manager = machine.connected(local.socket(), Requested::Rw);
    let at = manager.create_mapping(GRANULE, "weights").unwrap();
    manager.commit().unwrap();
    manager.connect(options(Requested::Ro)).unwrap();
    manager.remap_all().unwrap();
    manager.unmap_all().unwrap();
    manager.abort();

    // The same shape, written anew: other allocations, the same hash.
    let mut writer = local.session(Requested::Rw);
    writer.allocate(GRANULE, "weights").unwrap();
    writer.commit().unwrap();
    manager.connect(options(Requested::Ro)).unwrap();
    manager.remap_all().unwrap();
    assert_eq!(manager.mappings()[0].address, at);
    manager.unmap_all().unwrap();
    manager.abort();

    let mut writer = local.session(Requested::Rw);
    writer.allocate(2 * GRANULE, "weights").unwrap();
    writer.commit().unwrap();
    manager.connect(options(Requested::Ro)).unwrap();
    let stale = manager.remap_all();
    assert!(matches!(stale, Err(ClientError::StaleLayout { .. })), "{stale:?}");
    assert!(manager.is_unmapped() && machine.sim.leaks().handles == 0);
    machine.sim.assert_clean();
}

#[test]
fn without_a_hash_the_shape_tells() {
    let local = Local::start();
    let machine = Machine::new();
    let mut manager = machine.connected(local.socket(), Requested::Rw);
    manager.create_mapping(GRANULE, "weights").unwrap();
    manager.commit().unwrap();
    for (bytes, tag) in [(2 * GRANULE, "weights"), (GRANULE, "other")] {
        let mut writer = local.session(Requested::Rw);
        writer.allocate(bytes, tag).unwrap();
        writer.commit().unwrap();
        manager.connect(options(Requested::Ro)).unwrap();
        let stale = manager.remap_all();
        assert!(matches!(stale, Err(ClientError::StaleLayout { .. })), "{stale:?}");
        manager.abort();
    }
}

/// A key-value cache: its contents do not matter, its addresses do.
#[test]
fn a_cache_is_given_up_and_allocated_anew_at_its_addresses() {
    let local = Local::with(8 * GRANULE, |_| {});
    let machine = Machine::new();
    let mut manager = machine.connected(local.socket(), Requested::Rw);
    let addresses = manager.create_mappings(&[2 * GRANULE, 3 * GRANULE], "kv_cache").unwrap();
    assert_eq!(addresses[1], addresses[0] + 2 * GRANULE, "side by side");
    machine.write(addresses[1], b"old");
    manager.unmap_all().unwrap();
    manager.abort();
    local.await_memory(0);

    manager.connect(options(Requested::Rw)).unwrap();
    manager.reallocate_all("kv_cache").unwrap();
    manager.remap_all().unwrap();
    assert_eq!(local.sim.memory_used(0), 5 * GRANULE);
    assert_eq!(machine.read(addresses[1], 3), b"\0\0\0", "fresh memory");
    machine.write(addresses[1], b"new");
    assert_eq!(machine.read(addresses[1], 3), b"new");
    manager.close().unwrap();
    machine.sim.assert_clean();
}

/// A writer may go on while the rest is asleep.
#[test]
fn what_was_made_while_the_rest_slept_stays_as_it_is() {
    let local = Local::with(8 * GRANULE, |_| {});
    let machine = Machine::new();
    let mut manager = machine.connected(local.socket(), Requested::Rw);
    let slept = manager.create_mapping(2 * GRANULE, "weights").unwrap();
    machine.write(slept, b"before");
    manager.unmap_all().unwrap();
    let new = manager.create_mapping(GRANULE, "weights").unwrap();
    machine.write(new, b"new");
    manager.remap_all().unwrap();
    assert_eq!(machine.read(slept, 6), b"before");
    assert_eq!(machine.read(new, 3), b"new");

    // Of a layout that is gone it is not mixed with the one that came after.
    manager.unmap_all().unwrap();
    let new = manager.create_mapping(GRANULE, "weights").unwrap();
    manager.abort();
    let mut other = Machine::new().connected(local.socket(), Requested::Rw);
    other.create_mappings(&[2 * GRANULE, GRANULE, GRANULE], "weights").unwrap();
    other.commit().unwrap();
    other.close().unwrap();
    manager.connect(options(Requested::Ro)).unwrap();
    let state = "mapped still, of a layout that is gone";
    let mixed = manager.remap_all();
    assert!(
        matches!(mixed, Err(ClientError::MappingState { address, state: is }) if (address, is) == (new, state)),
        "{mixed:?}"
    );
    manager.unmap_all().unwrap();
    manager.remap_all().unwrap();
    assert_eq!(machine.read(new, 3), b"\0\0\0");
    manager.close().unwrap();
    machine.sim.assert_clean();
}

#[test]
fn single_steps_do_what_they_say_and_no_more() {
    let local = Local::start();
    let machine = Machine::new();
    let mut manager = machine.connected(local.socket(), Requested::Rw);
    let made = manager.allocate_handle(5, "t").unwrap();
    assert_eq!((made.size, made.aligned_size), (GRANULE, GRANULE), "whole granules are asked for");
    let at = manager.reserve(GRANULE).unwrap();
    let file = manager.export_handle(&made.allocation_id).unwrap();
    manager.map(at, file, made.clone()).unwrap();
    machine.write(at, b"abc");
    let twice = manager.export_handle(&made.allocation_id).unwrap();
    assert!(matches!(
        manager.map(at, twice, made.clone()),
        Err(ClientError::MappingState { state: "mapped already", .. })
    ));
    assert!(matches!(manager.free_address(at), Err(ClientError::MappingState { .. })));
    manager.unmap(at).unwrap();
    assert!(matches!(
        manager.import_mapping(&made.allocation_id),
        Err(ClientError::MappingState { state: "not mapped", .. })
    ));
    manager.free_address(at).unwrap();
    assert!(matches!(manager.unmap(at), Err(ClientError::UnknownAddress { .. })));
    let at = manager.import_mapping(&made.allocation_id).unwrap();
    assert_eq!(machine.read(at, 3), b"abc");
    manager.destroy_mapping(at).unwrap();
    assert_eq!(manager.list_handles(None).unwrap(), []);
    local.await_memory(0);
    assert!(matches!(
        manager.connect(options(Requested::Ro)),
        Err(ClientError::AlreadyConnected { has: Granted::Rw })
    ));
    manager.abort();
    assert!(matches!(manager.create_mapping(1, "t"), Err(ClientError::NotConnected)));
    manager.close().unwrap();
    machine.sim.assert_clean();
}

/// The driver refuses at every call in turn: nothing is left of what was begun.
#[test]
fn a_mapping_that_fails_leaves_nothing() {
    let local = Local::start();
    local.publish(5);
    let machine = Machine::new();
    let calls =
        ["cuMemAddressReserve", "cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"];
    for call in calls {
        let mut manager = machine.connected(local.socket(), Requested::Ro);
        let before = machine.sim.leaks();
        machine.sim.fail_nth(call, 1, CUresult::CUDA_ERROR_UNKNOWN);
        let failed = manager.import_all(None);
        assert!(matches!(failed, Err(ClientError::Cuda(_))), "{call}: {failed:?}");
        assert_eq!(machine.sim.leaks(), before, "{call}");
        assert_eq!(manager.import_all(None).unwrap().len(), 5, "{call}");
        manager.close().unwrap();
    }
}

/// What is asked for by itself fails and is as before; what fails on the way is unmapped before anything else
/// comes to its address, or at the end.
#[test]
fn memory_that_the_driver_would_not_unmap_is_not_forgotten() {
    let local = Local::start();
    let machine = Machine::new();
    let fail = |call, times| {
        (1..=times).for_each(|n| machine.sim.fail_nth(call, n, CUresult::CUDA_ERROR_UNKNOWN));
    };
    let before = machine.sim.leaks();
    let mut manager = machine.connected(local.socket(), Requested::Rw);
    let at = manager.create_mapping(GRANULE, "t").unwrap();
    for _ in 0..2 {
        fail("cuMemUnmap", 1);
        assert!(matches!(manager.unmap(at), Err(ClientError::Cuda(_))));
        fail("cuMemUnmap", 1);
        assert!(matches!(manager.destroy_mapping(at), Err(ClientError::Cuda(_))));
        assert!(manager.mappings()[0].is_mapped);
        machine.write(at, b"here");
    }
    // Whoever reads would find memory that can be written here.
    fail("cuMemUnmap", 2);
    assert!(matches!(manager.commit(), Err(ClientError::Cuda(_))));
    assert_eq!(local.state(), "RW");
    manager.commit().unwrap();
    assert_ne!(machine.try_write(at, b"late"), CUresult::CUDA_SUCCESS);
    let _ = machine.sim.report();

    manager.connect(options(Requested::Ro)).unwrap();
    for others in [0, 1] {
        fail("cuMemSetAccess", 1);
        fail("cuMemUnmap", 1 + others);
        assert!(matches!(manager.remap_all(), Err(ClientError::Cuda(_))));
        if others == 1 {
            assert!(matches!(manager.remap_all(), Err(ClientError::Cuda(_))), "still there");
        }
        manager.remap_all().unwrap();
        assert_eq!(machine.read(at, 4), b"here");
        // By the second try.
        fail("cuMemUnmap", 1);
        manager.unmap_all().unwrap();
        assert_eq!(machine.sim.leaks().handles, before.handles);
    }
    // With its addresses, which nobody else has meanwhile.
    manager.remap_all().unwrap();
    fail("cuMemUnmap", 2);
    assert!(matches!(manager.close(), Err(ClientError::Cuda(_))));
    assert_eq!(machine.sim.leaks(), before);
    let mut manager = machine.connected(local.socket(), Requested::Ro);
    manager.import_all(None).unwrap();
    fail("cuMemUnmap", 1);
    drop(manager);
    assert_eq!(machine.sim.leaks(), before);
    machine.sim.assert_clean();
}

/// A writer's as well, at the server, too: with batches, and with a server that has none, where the
/// allocation is there before its descriptor is asked for.
#[test]
fn an_allocation_that_cannot_be_mapped_is_given_back() {
    let local = Local::with(141 << 30, |settings| settings.ahead_bytes = 0);
    let machine = Machine::new();
    let code = CUresult::CUDA_ERROR_OPERATING_SYSTEM;
    for batch in [true, false] {
        let mut manager = machine.manager(local.socket());
        manager.connect(options(Requested::Rw).batch(batch)).unwrap();
        let before = machine.sim.leaks();
        for call in ["cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"] {
            machine.sim.fail_nth(call, 1, code);
            let failed = manager.create_mapping(GRANULE, "t");
            assert!(matches!(failed, Err(ClientError::Cuda(_))), "{call}: {failed:?}");
            assert_eq!(machine.sim.leaks().handles, before.handles, "{call}");
            assert_eq!(manager.list_handles(None).unwrap(), [], "{call}, batch: {batch}");
        }
        // Without batches: once as the allocation is answered, and once as it is asked for.
        for nth in 1..=if batch { 1 } else { 2 } {
            local.sim.fail_nth("cuMemExportToShareableHandle", nth, code);
        }
        let refused = manager.create_mapping(GRANULE, "t");
        assert!(matches!(refused, Err(ClientError::Refused { .. })), "{refused:?}");
        assert_eq!(manager.list_handles(None).unwrap(), [], "batch: {batch}");
        manager.close().unwrap();
        local.await_state("EMPTY");
        local.await_memory(0);
    }
}

/// Of a layout of which one address is only kept, nothing is mapped.
#[test]
fn a_layout_is_mapped_whole_or_not_at_all() {
    let local = Local::start();
    local.publish(3);
    let machine = Machine::new();
    let mut manager = machine.connected(local.socket(), Requested::Ro);
    let id = manager.list_handles(None).unwrap()[1].allocation_id.clone();
    let kept = manager.import_mapping(&id).unwrap();
    manager.unmap(kept).unwrap();
    let failed = manager.import_all(None);
    assert!(
        matches!(failed, Err(ClientError::MappingState { address, .. }) if address == kept),
        "{failed:?}"
    );
    assert_eq!((machine.sim.leaks().handles, manager.mappings().len()), (0, 1));
    manager.free_address(kept).unwrap();
    assert_eq!(manager.import_all(None).unwrap().len(), 3);
    manager.close().unwrap();
    machine.sim.assert_clean();
}

/// An allocation that is mapped at two addresses is found at the later one when the other has gone.
#[test]
fn an_address_that_goes_takes_no_other_along() {
    let local = Local::start();
    let machine = Machine::new();
    let mut manager = machine.connected(local.socket(), Requested::Rw);
    let made = manager.allocate_handle(GRANULE, "t").unwrap();
    let [first, second] = [(); 2].map(|()| {
        let at = manager.reserve(GRANULE).unwrap();
        let file = manager.export_handle(&made.allocation_id).unwrap();
        manager.map(at, file, made.clone()).unwrap();
        at
    });
    assert_eq!(manager.import_mapping(&made.allocation_id).unwrap(), second);
    manager.unmap(first).unwrap();
    manager.free_address(first).unwrap();
    assert_eq!(manager.import_mapping(&made.allocation_id).unwrap(), second);
    manager.close().unwrap();
    machine.sim.assert_clean();
}

/// Whoever is refused memory asks again, and finds as many allocations as there are addresses.
#[test]
fn a_cache_that_there_is_no_memory_for_is_allocated_anew_later() {
    let local = Local::with(6 * GRANULE, |settings| {
        settings.retry_timeout = Some(std::time::Duration::from_millis(1));
        settings.ahead_bytes = 0;
    });
    let machine = Machine::new();
    for batch in [false, true] {
        let mut manager = machine.manager(local.socket());
        manager.connect(options(Requested::Rw).batch(batch)).unwrap();
        let addresses = manager.create_mappings(&[2 * GRANULE, 3 * GRANULE], "t").unwrap();
        manager.unmap_all().unwrap();
        manager.abort();
        local.await_memory(0);
        manager.connect(options(Requested::Rw).batch(batch)).unwrap();
        // As another process would have it.
        let taken = manager.allocate_handle(3 * GRANULE, "t").unwrap();
        assert!(matches!(manager.reallocate_all("t"), Err(ClientError::Refused { .. })), "{batch}");
        assert!(manager.free_handle(&taken.allocation_id).unwrap());
        local.await_memory(0);
        manager.reallocate_all("t").unwrap();
        manager.remap_all().unwrap();
        machine.write(addresses[1], b"new");
        manager.close().unwrap();
        local.await_memory(0);
    }
    machine.sim.assert_clean();
}

//! What a mapping costs in calls of the driver and in messages, so that it cannot rise unseen, and the
//! memory that a session makes before it is asked for.

use std::collections::BTreeMap;
use std::time::Duration;

use gms::client::{ClientError, ConnectOptions, MemoryManager};
use gms::lock::Requested;
use gms::server::Settings;

use crate::rig::{GRANULE, Local, Machine, PATIENCE, eventually, pattern};

type Counts = BTreeMap<&'static str, u64>;

/// The calls that were made between two countings.
fn since(before: &Counts, now: &Counts) -> Counts {
    let made = now.iter().map(|(name, count)| (*name, count - before.get(name).unwrap_or(&0)));
    made.filter(|(_, count)| *count > 0).collect()
}

/// What something costs: the client's calls, the server's calls, the messages to the server.
fn cost(local: &Local, machine: &Machine, work: impl FnOnce()) -> (Counts, Counts, u64) {
    let (client, server) = (machine.sim.call_counts(), local.sim.call_counts());
    let requests = local.metric("requests_total");
    work();
    let requests = local.metric("requests_total") - requests;
    let server = since(&server, &local.sim.call_counts());
    (since(&client, &machine.sim.call_counts()), server, requests)
}

/// Nothing is made ahead: all calls of a mapping are its own.
fn without() -> Local {
    Local::with(141 << 30, |settings| settings.ahead_bytes = 0)
}

/// What is made ahead stays, however slow the machine is.
fn patient(settings: &mut Settings) {
    settings.ahead_time = PATIENCE;
}

/// Waits for what is made ahead of a writer that fills what it got. Of one that comes back at once none
/// may be made.
fn await_ahead(local: &Local, bytes: u64) {
    std::thread::sleep(Duration::from_millis(1));
    eventually("memory made ahead", || local.metric("ahead_bytes") == bytes);
}

/// The calls that take the device time, for a mapping of memory that is there.
const MAP: [(&str, u64); 3] =
    [("cuMemImportFromShareableHandle", 1), ("cuMemMap", 1), ("cuMemSetAccess", 1)];

/// To find that the context is current already: for all of them, to import and map, to open.
const LOOK: (&str, u64) = ("cuCtxGetCurrent", 3);

fn counts<const N: usize>(calls: [(&'static str, u64); N]) -> Counts {
    calls.into_iter().collect()
}

fn map_and_look() -> Counts {
    MAP.into_iter().chain([LOOK]).collect()
}

#[test]
fn a_mapping_costs_so_many_calls_and_messages() {
    let (local, writer, reader) = (without(), Machine::new(), Machine::new());
    let mut manager = writer.connected(local.socket(), Requested::Rw);
    // The first one reserves addresses for the others.
    manager.create_mapping(GRANULE, "t").unwrap();
    let (client, server, requests) = cost(&local, &writer, || {
        manager.create_mapping(GRANULE, "t").unwrap();
    });
    assert_eq!(client, map_and_look());
    let make = counts([("cuMemCreate", 1), ("cuMemExportToShareableHandle", 1)]);
    assert_eq!((server, requests), (make, 1));

    // In a thread that has no context, or another's.
    std::thread::scope(|scope| {
        let elsewhere = scope.spawn(|| {
            cost(&local, &writer, || {
                manager.create_mapping(GRANULE, "t").unwrap();
            })
        });
        let (mut client, _, _) = elsewhere.join().unwrap();
        assert_eq!(client.remove("cuCtxPushCurrent_v2"), Some(1));
        assert_eq!(client.remove("cuCtxPopCurrent_v2"), Some(1));
        assert_eq!(client, map_and_look());
    });
    manager.commit().unwrap();

    let mut manager = reader.connected(local.socket(), Requested::Ro);
    let ids: Vec<String> =
        manager.list_handles(None).unwrap().into_iter().map(|made| made.allocation_id).collect();
    manager.import_mapping(&ids[0]).unwrap();
    let (client, server, requests) = cost(&local, &reader, || {
        manager.import_mapping(&ids[1]).unwrap();
    });
    assert_eq!((client, server, requests), (map_and_look(), Counts::new(), 1));
}

/// The messages of a server that knows no batches: the allocation, and its descriptor.
#[test]
fn without_batches_a_mapping_costs_one_message_more() {
    let (local, machine) = (without(), Machine::new());
    let mut manager = machine.manager(local.socket());
    let options = ConnectOptions::new(Requested::Rw).timeout(PATIENCE).batch(false);
    manager.connect(options).unwrap();
    manager.create_mapping(GRANULE, "t").unwrap();
    let (client, _, requests) = cost(&local, &machine, || {
        manager.create_mapping(GRANULE, "t").unwrap();
    });
    assert_eq!((client, requests), (map_and_look(), 2));
}

#[test]
fn many_mappings_share_what_they_can() {
    let (local, writer, reader) = (without(), Machine::new(), Machine::new());
    let mut manager = writer.connected(local.socket(), Requested::Rw);
    manager.create_mappings(&[GRANULE; 600], "t").unwrap();
    manager.commit().unwrap();
    let mut manager = reader.connected(local.socket(), Requested::Ro);
    let each = [("cuMemImportFromShareableHandle", 600), ("cuMemMap", 600)];
    let (mut client, server, requests) = cost(&local, &reader, || {
        manager.import_all(None).unwrap();
    });
    assert_eq!(client.remove("cuMemAddressReserve"), Some(1));
    assert_eq!(client.remove("cuMemSetAccess"), Some(1), "of the whole range");
    assert!(client.remove(LOOK.0).is_some_and(|count| count <= 604));
    assert_eq!(client, counts(each));
    // The list, and 253 descriptors in a message.
    assert_eq!((server, requests), (Counts::new(), 1 + 3));

    manager.unmap_all().unwrap();
    let (mut client, _, requests) = cost(&local, &reader, || manager.remap_all().unwrap());
    assert_eq!(client.remove("cuMemSetAccess"), Some(1), "of the whole range");
    assert!(client.remove(LOOK.0).is_some_and(|count| count <= 604));
    assert_eq!(client, counts(each), "the addresses were kept");
    assert_eq!(requests, 2 + 3, "the hash, the list, the descriptors");
}

/// A writer that has made so many mappings one by one, with the next one's memory made ahead.
fn writer_of(local: &Local, machine: &Machine, count: usize) -> (MemoryManager, Vec<u64>) {
    let mut manager = machine.connected(local.socket(), Requested::Rw);
    let mut addresses = Vec::new();
    for made in 1..=count {
        addresses.push(manager.create_mapping(GRANULE, "t").unwrap());
        await_ahead(local, if made > 1 { GRANULE } else { 0 });
    }
    (manager, addresses)
}

#[test]
fn the_next_of_a_size_is_made_before_it_is_asked_for() {
    let (local, machine) = (Local::with(141 << 30, patient), Machine::new());
    let (mut manager, addresses) = writer_of(&local, &machine, 6);
    // Not the first of its size, nor the second, which tells that there are more.
    assert_eq!((local.metric("ahead_total"), local.metric("allocations_total")), (4, 6));
    // It is nowhere but on the device.
    assert_eq!(local.sim.memory_used(0), 7 * GRANULE);
    assert_eq!(manager.session().unwrap().allocation_count().unwrap(), 6);
    assert_eq!(local.metric("allocated_bytes"), 6 * GRANULE);
    let made = manager.list_handles(None).unwrap();
    assert_eq!(made.iter().map(|it| it.layout_slot).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
    // Each has memory of its own, which is there for readers.
    for (seed, at) in (0..).zip(&addresses) {
        machine.write(*at, &pattern(seed, 999));
    }
    manager.commit().unwrap();
    local.await_memory(6 * GRANULE);
    let reader = Machine::new();
    let mut other = reader.connected(local.socket(), Requested::Ro);
    for ((_, at), seed) in other.import_all(None).unwrap().into_iter().zip(0..) {
        assert_eq!(reader.read(at, 999), pattern(seed, 999));
    }
    other.close().unwrap();
    manager.close().unwrap();
    local.sim.assert_clean();
}

/// On machines with processors to spare; and a client that now comes back at once and now does not gets
/// what it asks for, whatever was made.
#[test]
fn sessions_that_do_not_sleep_make_it_too() {
    let spinning = |settings: &mut Settings| {
        patient(settings);
        settings.spin = Duration::from_micros(300);
    };
    let (local, machine) = (Local::with(141 << 30, spinning), Machine::new());
    let (mut manager, _) = writer_of(&local, &machine, 4);
    assert_eq!(local.metric("ahead_total"), 2);
    for made in 4..300 {
        assert_eq!(manager.session().unwrap().allocation_count().unwrap(), made);
        manager.create_mapping(GRANULE, "t").unwrap();
        // Every other time the client has something to do.
        if made % 20 > 10 {
            std::thread::sleep(Duration::from_micros(made * 5));
        }
    }
    manager.commit().unwrap();
    local.await_memory(300 * GRANULE);
    assert_eq!(local.metric("ahead_bytes"), 0);
}

/// With a client that knows no batches: while it maps what it got, not before it has its descriptor.
#[test]
fn clients_without_batches_have_it_too() {
    let (local, machine) = (Local::with(141 << 30, patient), Machine::new());
    let mut manager = machine.manager(local.socket());
    let options = ConnectOptions::new(Requested::Rw).timeout(PATIENCE).batch(false);
    manager.connect(options).unwrap();
    for made in 1..=4 {
        manager.create_mapping(GRANULE, "t").unwrap();
        await_ahead(&local, if made > 1 { GRANULE } else { 0 });
    }
    assert_eq!(local.metric("ahead_total"), 2);
    // Allocations alone: the next request comes at once, and is not to wait.
    let used = local.sim.memory_used(0);
    let session = manager.session().unwrap();
    for _ in 0..4 {
        session.allocate(2 * GRANULE, "t").unwrap();
    }
    assert_eq!(local.sim.memory_used(0) - used, 8 * GRANULE);
}

#[test]
fn it_is_given_back_when_the_layout_is_done() {
    let (local, machine) = (Local::with(141 << 30, patient), Machine::new());
    // Before the session's end is answered.
    let (mut manager, _) = writer_of(&local, &machine, 3);
    manager.commit().unwrap();
    assert_eq!((local.sim.memory_used(0), local.metric("ahead_bytes")), (3 * GRANULE, 0));
    let (mut manager, _) = writer_of(&local, &machine, 2);
    // The layout before goes in the background.
    local.await_memory(3 * GRANULE);
    manager.commit_layout().unwrap();
    assert_eq!((local.sim.memory_used(0), local.metric("ahead_bytes")), (2 * GRANULE, 0));
    drop(manager);
    // Before somebody else may write.
    let (manager, _) = writer_of(&local, &machine, 2);
    drop(manager);
    local.await_state("EMPTY");
    local.await_memory(0);
    assert_eq!(local.metric("ahead_bytes"), 0);
}

/// A session that has sealed its layout makes no more allocations, whatever it asked for just before.
#[test]
fn none_is_made_once_the_layout_is_sealed() {
    let (local, machine) = (Local::with(141 << 30, patient), Machine::new());
    let mut manager = machine.manager(local.socket());
    let options = ConnectOptions::new(Requested::Rw).timeout(PATIENCE).batch(false);
    manager.connect(options).unwrap();
    // Without a request for a descriptor in between, so that there is no time to make one.
    let session = manager.session().unwrap();
    for _ in 0..2 {
        session.allocate(GRANULE, "t").unwrap();
    }
    session.commit_layout().unwrap();
    let before = local.sim.call_counts()["cuMemCreate"];
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(session.allocation_count().unwrap(), 2);
    assert_eq!(local.sim.call_counts()["cuMemCreate"], before);
    assert_eq!((local.sim.memory_used(0), local.metric("ahead_bytes")), (2 * GRANULE, 0));
}

#[test]
fn it_is_given_back_when_another_size_is_asked_for() {
    let (local, machine) = (Local::with(141 << 30, patient), Machine::new());
    let (mut manager, _) = writer_of(&local, &machine, 2);
    manager.create_mapping(2 * GRANULE, "t").unwrap();
    local.await_memory(4 * GRANULE);
    // Told after it has gone.
    eventually("none ahead", || local.metric("ahead_bytes") == 0);
    assert_eq!(local.metric("ahead_total"), 0);
    manager.create_mapping(GRANULE, "t").unwrap();
    local.await_memory(5 * GRANULE);
    // Many at a time tell nothing of what comes next.
    manager.create_mappings(&[GRANULE; 3], "t").unwrap();
    assert_eq!(local.sim.memory_used(0), 8 * GRANULE);
}

#[test]
fn it_is_given_back_when_the_writer_does_something_else() {
    let local = Local::with(141 << 30, |settings| {
        settings.ahead_time = Duration::from_millis(1);
    });
    let machine = Machine::new();
    let mut manager = machine.connected(local.socket(), Requested::Rw);
    let released = || local.sim.call_counts().get("cuMemRelease").copied().unwrap_or(0);
    for made in 1..4 {
        manager.create_mapping(GRANULE, "t").unwrap();
        // One is made for each but the first.
        eventually("it is given back", || released() == made - 1);
        eventually("no figure has it", || local.metric("ahead_bytes") == 0);
        assert_eq!(local.sim.memory_used(0), made * GRANULE);
    }
}

/// Whoever is short of memory has it, before anybody waits.
#[test]
fn it_never_takes_memory_that_is_asked_for() {
    let local = Local::with(5 * GRANULE, patient);
    let machine = Machine::new();
    let (mut manager, _) = writer_of(&local, &machine, 3);
    assert_eq!(local.sim.memory_used(0), 4 * GRANULE);
    manager.create_mapping(2 * GRANULE, "t").unwrap();
    assert_eq!(local.sim.memory_used(0), 5 * GRANULE);
    assert_eq!((local.metric("memory_waits_total"), local.metric("ahead_bytes")), (0, 0));
    assert_eq!(local.events(), [("rw_connected".to_owned(), 0)]);
    manager.abort();
    local.await_memory(0);
    // All of the memory, one by one: the last one cannot be followed by another.
    let (mut manager, _) = writer_of(&local, &machine, 4);
    manager.create_mapping(GRANULE, "t").unwrap();
    assert_eq!(manager.session().unwrap().allocation_count().unwrap(), 5);
    assert_eq!((local.metric("memory_waits_total"), local.metric("ahead_bytes")), (0, 0));
}

#[test]
fn there_is_a_limit_to_it() {
    let limited = |settings: &mut Settings| {
        patient(settings);
        settings.ahead_bytes = GRANULE;
    };
    let (local, machine) = (Local::with(141 << 30, limited), Machine::new());
    let mut manager = machine.connected(local.socket(), Requested::Rw);
    for made in 1..4 {
        manager.create_mapping(2 * GRANULE, "t").unwrap();
        await_ahead(&local, 0);
        assert_eq!(local.sim.memory_used(0), 2 * made * GRANULE);
    }
    drop(manager);
    writer_of(&local, &machine, 2);
}

/// A failure of the driver's is the server's end wherever it comes; too little memory is not.
#[test]
fn a_driver_that_fails_meanwhile_ends_the_server() {
    use cuda_sys::types::CUresult;
    let (local, machine) = (Local::with(141 << 30, patient), Machine::new());
    let mut manager = machine.connected(local.socket(), Requested::Rw);
    manager.create_mapping(GRANULE, "t").unwrap();
    await_ahead(&local, 0);
    let before = local.sim.call_counts()["cuMemCreate"];
    local.sim.fail_nth("cuMemCreate", 2, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    manager.create_mapping(GRANULE, "t").unwrap();
    eventually("an attempt", || local.sim.call_counts()["cuMemCreate"] == before + 2);
    manager.create_mapping(GRANULE, "t").unwrap();
    await_ahead(&local, GRANULE);
    // The descriptor is not the server's to fail for: whoever asks for it is told.
    manager.create_mapping(GRANULE, "t").unwrap();
    await_ahead(&local, GRANULE);
    local.sim.fail_nth("cuMemCreate", 1, CUresult::CUDA_ERROR_ECC_UNCORRECTABLE);
    manager.create_mapping(GRANULE, "t").unwrap();
    eventually("the server ends", || {
        matches!(
            manager.list_handles(None),
            Err(ClientError::Disconnected | ClientError::Socket(_))
        )
    });
    let failed = local.stop().unwrap_err().to_string();
    assert!(failed.contains("cuMemCreate"), "{failed}");
}

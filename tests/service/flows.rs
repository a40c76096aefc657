//! Sessions from connect to commit, and what the server tells of them.

use gms::client::ConnectOptions;
use gms::client::{ClientError, Session};
use gms::lock::{Granted, Requested};

use crate::rig::{Folder, GRANULE, Local, PATIENCE, open_descriptors};
use crate::roles::Process;

#[test]
fn a_layout_is_published_with_its_metadata() {
    let local = Local::start();
    let mut writer = local.session(Requested::RwOrRo);
    assert_eq!((writer.granted(), writer.committed()), (Granted::Rw, false));
    let made = writer.allocate(5, "weights").unwrap();
    assert_eq!((made.size, made.aligned_size, made.layout_slot), (5, GRANULE, 0));
    writer.metadata_put("a.b", &made.allocation_id, 16, b"\0\xff").unwrap();
    assert_eq!(writer.lock_state().unwrap().state, "RW");
    assert_eq!(writer.layout_hash().unwrap(), "");
    writer.commit().unwrap();
    local.await_state("COMMITTED");

    let mut reader = local.session(Requested::RwOrRo);
    assert_eq!((reader.granted(), reader.committed()), (Granted::Ro, true));
    assert_eq!(reader.list(None).unwrap(), std::slice::from_ref(&made));
    assert_eq!(reader.list(Some("kv_cache")).unwrap(), []);
    assert_eq!(reader.get(&made.allocation_id).unwrap(), made);
    let entry = reader.metadata_get("a.b").unwrap().unwrap();
    assert_eq!((entry.offset_bytes, &*entry.value), (16, &b"\0\xff"[..]));
    assert_eq!(reader.metadata_get("a.c").unwrap(), None);
    assert_eq!(reader.layout_hash().unwrap().len(), 64);
    let (about, _file) = reader.export(&made.allocation_id).unwrap();
    assert_eq!(about, made);
    assert_eq!(local.state(), "RO");
}

#[test]
fn a_writer_that_leaves_takes_its_layout_along() {
    let local = Local::start();
    let mut writer = local.session(Requested::Rw);
    writer.allocate(GRANULE, "weights").unwrap();
    writer.allocate(GRANULE, "weights").unwrap();
    assert_eq!(local.sim.memory_used(0), 2 * GRANULE);
    drop(writer);
    local.await_state("EMPTY");
    local.await_memory(0);
    let events = [("rw_connected", 0), ("rw_aborted", 0), ("allocations_cleared", 2)];
    assert_eq!(local.events(), events.map(|(kind, count)| (kind.to_owned(), count)));
}

#[test]
fn a_new_writer_replaces_the_published_layout() {
    let local = Local::start();
    local.publish(3);
    local.await_state("COMMITTED");
    let mut writer = local.session(Requested::Rw);
    assert_eq!(writer.allocation_count().unwrap(), 0);
    assert_eq!(writer.metadata_list("").unwrap(), [""; 0]);
    assert_eq!(writer.allocate(1, "weights").unwrap().layout_slot, 0, "slots begin anew");
    local.await_memory(GRANULE);
    let events =
        [("rw_connected", 0), ("committed", 0), ("allocations_cleared", 3), ("rw_connected", 0)];
    assert_eq!(local.events(), events.map(|(kind, count)| (kind.to_owned(), count)));
}

#[test]
fn a_sealed_layout_outlives_its_writers() {
    let local = Local::start();
    let mut writer = local.session(Requested::RwDataOrRw);
    assert_eq!(writer.granted(), Granted::Rw);
    let made = writer.allocate(GRANULE, "kv_cache").unwrap();
    let hash = writer.commit_layout().unwrap();
    assert_eq!((hash.len(), writer.granted()), (64, Granted::RwData));
    let refused = writer.allocate(GRANULE, "kv_cache").unwrap_err().to_string();
    let text = "AllocateRequest not allowed: the layout is committed. \
                Reconnect with RW to replace it.";
    assert_eq!(refused, text);
    drop(writer);
    local.await_state("LAYOUT_COMMITTED");
    let timeout = std::time::Duration::from_millis(20);
    let reader =
        Session::connect(local.socket(), ConnectOptions::new(Requested::Ro).timeout(timeout));
    assert!(matches!(reader, Err(ClientError::LockTimeout)), "contents are nobody's promise yet");
    for _ in 0..2 {
        let mut next = local.session(Requested::RwDataOrRw);
        assert_eq!(next.granted(), Granted::RwData);
        let same = std::slice::from_ref(&made);
        assert_eq!(next.list(None).unwrap(), same, "the same memory");
        assert_eq!(next.layout_hash().unwrap(), hash);
        drop(next);
        local.await_state("LAYOUT_COMMITTED");
    }
    // It is nobody's to publish any more, or to seal again.
    let last = local.session(Requested::RwDataOrRw);
    let refused = last.commit().unwrap_err().to_string();
    assert_eq!(refused, "CommitRequest not allowed for RW_DATA session in state RW");
    local.await_state("LAYOUT_COMMITTED");
    let refused = local.session(Requested::RwDataOrRw).commit_layout().unwrap_err().to_string();
    assert_eq!(refused, "CommitLayoutRequest not allowed for RW_DATA session in state RW");
    local.await_state("LAYOUT_COMMITTED");
    assert_eq!(local.session(Requested::Rw).allocation_count().unwrap(), 0);
    let events = local.events();
    assert_eq!(events[1], ("layout_committed".to_owned(), 1));
    let kinds: Vec<String> = events.into_iter().map(|(kind, _)| kind).collect();
    let expected = "rw_connected layout_committed rw_disconnected rw_connected rw_disconnected \
                    rw_connected rw_disconnected rw_connected rw_disconnected rw_connected \
                    rw_disconnected rw_connected";
    assert_eq!(kinds[..12].join(" "), expected);
}

#[test]
fn probes_change_nothing() {
    let local = Local::start();
    local.publish(2);
    local.await_state("COMMITTED");
    let probe = || gms::client::runtime_state(local.socket(), PATIENCE).unwrap();
    let state = probe();
    assert!(state.committed && state.is_ready && state.layout_committed && !state.has_rw_session);
    assert_eq!((state.allocation_count, state.memory_layout_hash.len()), (2, 64));
    assert_eq!(probe(), state);
    assert_eq!(local.events().len(), 2);
}

/// The Python service leaks a descriptor for each.
#[test]
fn exports_leave_no_descriptors_open() {
    // A process of its own, as other tests open descriptors in this one.
    let folder = Folder::new();
    let mut server = Process::server(&folder.socket());
    let options = |lock| ConnectOptions::new(lock).timeout(PATIENCE);
    let mut writer = Session::connect(folder.socket(), options(Requested::Rw)).unwrap();
    let id = writer.allocate(GRANULE, "t").unwrap().allocation_id;
    writer.commit().unwrap();
    let mut reader = Session::connect(folder.socket(), options(Requested::Ro)).unwrap();
    drop(reader.export(&id).unwrap());
    let before = open_descriptors(server.id());
    for _ in 0..2_000 {
        drop(reader.export(&id).unwrap());
    }
    assert!(open_descriptors(server.id()) <= before);
    drop(reader);
    assert_eq!(server.ask("stop"), "stopped");
}

/// Looking for messages without sleeping changes nothing but the time.
#[test]
fn sessions_that_spin_do_the_same() {
    let spin = std::time::Duration::from_micros(300);
    let local = Local::with(1 << 30, |settings| settings.spin = spin);
    let options = |lock| ConnectOptions::new(lock).timeout(PATIENCE).spin(spin);
    for round in 0..50 {
        let mut writer = Session::connect(local.socket(), options(Requested::Rw)).unwrap();
        let made = writer.allocate(GRANULE, "weights").unwrap();
        if round % 3 == 0 {
            // Long enough to fall asleep.
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        writer.commit().unwrap();
        let mut reader = Session::connect(local.socket(), options(Requested::Ro)).unwrap();
        let (about, _file) = reader.export(&made.allocation_id).unwrap();
        assert_eq!(about, made);
    }
}

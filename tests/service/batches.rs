//! The batch extension, beside the same requests one by one.

use gms::client::{ClientError, ConnectOptions, MetadataValue, Session};
use gms::lock::Requested;

use crate::rig::{GRANULE, Local, PATIENCE};

fn session(local: &Local, lock: Requested, batch: bool) -> Session {
    let options = ConnectOptions::new(lock).timeout(PATIENCE).batch(batch);
    let session = Session::connect(local.socket(), options).unwrap();
    assert_eq!(session.batches(), batch);
    session
}

/// A layout of 300 allocations with an entry each: its hash, and what is read of it.
fn written_and_read(batch: bool) -> (String, Vec<u64>, Vec<(String, u64, Vec<u8>)>) {
    let local = Local::start();
    let mut writer = session(&local, Requested::Rw, batch);
    let sizes: Vec<u64> = (0..300).map(|n| n % 3 * GRANULE + 1).collect();
    let made = writer.allocate_many(&sizes, "weights").unwrap();
    let entries: Vec<_> = made
        .iter()
        .enumerate()
        .map(|(n, allocation)| {
            let value = MetadataValue {
                allocation_id: allocation.allocation_id.clone(),
                offset_bytes: n as u64,
                value: vec![n as u8; 2_000],
            };
            (format!("layer.{n:03}"), value)
        })
        .collect();
    writer.metadata_put_many(&entries).unwrap();
    writer.commit().unwrap();
    let mut reader = session(&local, Requested::Ro, batch);
    let ids: Vec<String> = made.into_iter().map(|allocation| allocation.allocation_id).collect();
    let mut slots = Vec::new();
    let each = |about: gms::client::AllocationInfo, _file| {
        slots.push(about.layout_slot);
        Ok(())
    };
    reader.export_many(&ids, each).unwrap();
    let read = reader.metadata_get_many("layer.").unwrap();
    assert_eq!(read.len(), 300, "in several messages");
    let read = read.into_iter().map(|(key, value)| (key, value.offset_bytes, value.value));
    (reader.layout_hash().unwrap(), slots, read.collect())
}

#[test]
fn batches_do_what_single_requests_do() {
    assert_eq!(written_and_read(true), written_and_read(false));
}

#[test]
fn a_batch_is_done_whole_or_not_at_all() {
    let local = Local::with(16 * GRANULE, |settings| {
        settings.retry_timeout = Some(std::time::Duration::from_millis(1));
    });
    let mut writer = session(&local, Requested::Rw, true);
    let refused = writer.allocate_many(&[GRANULE, 4 * GRANULE, 15 * GRANULE], "t");
    assert!(matches!(refused, Err(ClientError::Refused { .. })), "{refused:?}");
    assert_eq!(writer.allocation_count().unwrap(), 0);
    local.await_memory(0);
    let id = writer.allocate(GRANULE, "t").unwrap().allocation_id;
    let value = |id: &str| MetadataValue {
        allocation_id: id.to_owned(),
        offset_bytes: 0,
        value: Vec::new(),
    };
    let entries = [("a".to_owned(), value(&id)), ("b".to_owned(), value("x"))];
    let refused = writer.metadata_put_many(&entries).unwrap_err();
    assert_eq!(refused.to_string(), "Unknown allocation: x");
    assert_eq!(writer.metadata_list("").unwrap(), [""; 0]);
    let unknown = [id, "x".to_owned()];
    let refused = writer.export_many(&unknown, |_, _| panic!("nothing comes")).unwrap_err();
    assert_eq!(refused.to_string(), "Unknown allocation: x");
}

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

/// What is read of a layout.
#[derive(Debug, PartialEq)]
struct Read {
    hash: String,
    slots: Vec<u64>,
    /// Names, offsets, values.
    metadata: Vec<(String, u64, Vec<u8>)>,
}

/// A layout of 300 allocations with an entry each, written and read.
fn written_and_read(batch: bool) -> Read {
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
    let metadata = read.into_iter().map(|(key, value)| (key, value.offset_bytes, value.value));
    Read { hash: reader.layout_hash().unwrap(), slots, metadata: metadata.collect() }
}

#[test]
fn batches_do_what_single_requests_do() {
    assert_eq!(written_and_read(true), written_and_read(false));
}

/// A message has the entries that it counts, whatever came before: each of these may be put by itself, and the
/// last two are too much for one message.
#[test]
fn large_entries_are_put_with_small_ones() {
    let local = Local::start();
    let mut writer = session(&local, Requested::Rw, true);
    let id = writer.allocate(GRANULE, "t").unwrap().allocation_id;
    let entry = |(key, bytes): (&str, usize)| {
        let value =
            MetadataValue { allocation_id: id.clone(), offset_bytes: 0, value: vec![0; bytes] };
        (key.to_owned(), value)
    };
    let entries = [("a", 1), ("b", 900 << 10), ("c", 200 << 10)].map(entry);
    writer.metadata_put_many(&entries).unwrap();
    assert_eq!(writer.metadata_get_many("").unwrap(), entries);
}

#[test]
fn a_batch_is_done_whole_or_not_at_all() {
    let local = Local::with(16 * GRANULE, |settings| {
        settings.retry_timeout = Some(std::time::Duration::from_millis(1));
    });
    for batch in [false, true] {
        let mut writer = session(&local, Requested::Rw, batch);
        let refused = writer.allocate_many(&[GRANULE, 4 * GRANULE, 15 * GRANULE], "t");
        assert!(matches!(refused, Err(ClientError::Refused { .. })), "{batch}: {refused:?}");
        assert_eq!(writer.allocation_count().unwrap(), 0, "{batch}");
        local.await_memory(0);
    }
    let mut writer = session(&local, Requested::Rw, true);
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

/// What no message can ask for is refused before anything is made, also where that would be in an earlier message.
#[test]
fn a_size_that_cannot_be_leaves_nothing_of_the_others() {
    let local = Local::start();
    for batch in [false, true] {
        let mut writer = session(&local, Requested::Rw, batch);
        let sizes = [vec![1; 4096], vec![u64::MAX]].concat();
        let refused = writer.allocate_many(&sizes, "t");
        assert!(matches!(refused, Err(ClientError::Size { bytes: u64::MAX })), "{refused:?}");
        assert_eq!(writer.allocation_count().unwrap(), 0, "{batch}");
    }
}

/// Wherever taking descriptors breaks off, the session goes on: no answer is left under way.
#[test]
fn exports_may_break_off_anywhere() {
    let local = Local::start();
    let mut writer = session(&local, Requested::Rw, true);
    let made = writer.allocate_many(&vec![1; 700], "t").unwrap();
    let ids: Vec<String> = made.into_iter().map(|allocation| allocation.allocation_id).collect();
    for end in [0, 1, 252, 253, 254, 505, 506, 600, 699] {
        let mut taken = 0;
        let broken = writer.export_many(&ids, |_, _| {
            taken += 1;
            if taken > end { Err(ClientError::NotConnected) } else { Ok(()) }
        });
        assert!(matches!(broken, Err(ClientError::NotConnected)), "{end}: {broken:?}");
        assert_eq!(taken, end + 1, "not called again");
        assert_eq!(writer.allocation_count().unwrap(), 700, "{end}");
    }
    for unknown in [0, 252, 253, 500, 699] {
        let mut ids = ids.clone();
        ids[unknown] = "x".to_owned();
        let mut taken = 0;
        let refused = writer.export_many(&ids, |_, _| {
            taken += 1;
            Ok(())
        });
        assert_eq!(refused.unwrap_err().to_string(), "Unknown allocation: x");
        assert_eq!(taken, unknown / 253 * 253);
        assert_eq!(writer.allocation_count().unwrap(), 700, "{unknown}");
    }
    let mut slots = Vec::new();
    let each = |about: gms::client::AllocationInfo, _| {
        slots.push(about.layout_slot);
        Ok(())
    };
    writer.export_many(&ids, each).unwrap();
    assert_eq!(slots, (0..700).collect::<Vec<u64>>());
}

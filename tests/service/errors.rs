//! What the server says where something cannot be done, in the Python service's words, and that the
//! session lives on.

use std::io::{Read, Write};
use std::time::Duration;

use gms::client::{ClientError, Session};
use gms::lock::Requested;
use gms::wire::{self, FrameReader, Message, encode_frame};

use crate::rig::{GRANULE, Local, raw};

fn words<T: std::fmt::Debug>(answer: Result<T, ClientError>) -> String {
    match answer {
        Err(ClientError::Refused { error }) => error,
        other => panic!("{other:?}"),
    }
}

/// Sends messages and reads an answer for each.
fn conversation(stream: &mut (impl Read + Write), messages: &[Message]) -> Vec<Message> {
    let mut reader = FrameReader::new(1 << 20);
    messages
        .iter()
        .map(|message| {
            let mut out = Vec::new();
            encode_frame(message, &mut out);
            stream.write_all(&out).unwrap();
            loop {
                if let Some(bytes) = reader.next_frame().unwrap() {
                    return Message::decode(bytes).unwrap();
                }
                let bytes = stream.read(reader.space()).unwrap();
                assert!(bytes > 0, "closed");
                reader.arrived(bytes);
            }
        })
        .collect()
}

fn handshake(lock_type: Requested) -> Message {
    let extensions = wire::Extensions::default();
    wire::HandshakeRequest { lock_type, timeout_ms: None, extensions }.into()
}

fn error_of(message: &Message) -> &str {
    let Message::ErrorResponse(error) = message else { panic!("{message:?}") };
    assert_eq!(error.code, 0);
    &error.error
}

/// Numbers come from a launcher, or from CUDA_VISIBLE_DEVICES.
#[test]
fn a_device_that_is_not_there_is_told_by_its_number() {
    let sim = cuda_sim::Simulator::builder().devices(2).build().unwrap();
    let driver = sim.driver();
    for ordinal in [2, 7, u32::MAX] {
        let text = format!("there is no device {ordinal}: the driver has 2");
        let served = gms::memory::Memory::open(&driver, ordinal).unwrap_err();
        assert_eq!(served.to_string(), text);
        let manager = gms::client::MemoryManager::new(&driver, ordinal, "nowhere").unwrap_err();
        assert_eq!(manager.to_string(), text);
    }
}

#[test]
fn refusals_are_in_the_words_that_clients_know() {
    let local = Local::start();
    let mut writer = local.session(Requested::Rw);
    assert_eq!(words(writer.allocate(0, "t")), "size must be > 0, got 0");
    let id = writer.allocate(1, "t").unwrap().allocation_id;
    assert_eq!(words(writer.get("x")), "Unknown allocation: x");
    assert_eq!(words(writer.export("x")), "Unknown allocation: x");
    assert_eq!(words(writer.metadata_put("k", "x", 0, b"")), "Unknown allocation: x");
    let behind = words(writer.metadata_put("k", &id, GRANULE, b""));
    let text =
        format!("offset_bytes {GRANULE} out of range for allocation {id} (aligned_size={GRANULE})");
    assert_eq!(behind, text);
    assert_eq!(writer.metadata_list("").unwrap(), [""; 0], "what is refused leaves nothing");
    assert!(!writer.free("x").unwrap());
    assert!(!writer.metadata_delete("k").unwrap());
    writer.commit().unwrap();

    let mut reader: Session = local.session(Requested::Ro);
    let not_allowed = |request: &str| format!("{request} not allowed for RO session in state RO");
    assert_eq!(words(reader.allocate(1, "t")), not_allowed("AllocateRequest"));
    assert_eq!(words(reader.free(&id)), not_allowed("FreeAllocationRequest"));
    assert_eq!(words(reader.metadata_put("k", &id, 0, b"")), not_allowed("MetadataPutRequest"));
    assert_eq!(words(reader.metadata_delete("k")), not_allowed("MetadataDeleteRequest"));
    assert_eq!(words(reader.commit_layout()), not_allowed("CommitLayoutRequest"));
    assert_eq!(reader.allocation_count().unwrap(), 1, "the session lives");
    assert_eq!(words(reader.commit()), not_allowed("CommitRequest"));
}

#[test]
fn what_is_no_request_is_refused_and_the_session_lives() {
    let local = Local::start();
    let mut stream = raw(local.socket());
    let negative = wire::MetadataPutRequest {
        key: "k".to_owned(),
        allocation_id: "x".to_owned(),
        offset_bytes: -1,
        value: Vec::new(),
    };
    let made = conversation(
        &mut stream,
        &[handshake(Requested::Rw), wire::AllocateRequest { size: 1, tag: "t".to_owned() }.into()],
    );
    let Message::AllocateResponse(made) = &made[1] else { panic!("{made:?}") };
    let negative =
        wire::MetadataPutRequest { allocation_id: made.allocation_id.clone(), ..negative };
    let answers = conversation(
        &mut stream,
        &[
            handshake(Requested::Ro),
            wire::GetRuntimeStateRequest {}.into(),
            wire::GetEventHistoryRequest {}.into(),
            wire::CommitResponse { success: true }.into(),
            wire::AllocateRequest { size: -3, tag: "t".to_owned() }.into(),
            negative.into(),
            wire::BatchMetadataGetRequest { prefix: String::new(), after: None }.into(),
        ],
    );
    let errors: Vec<&str> = answers.iter().map(error_of).collect();
    let expected = [
        "HandshakeRequest not allowed for RW session in state RW",
        "GetRuntimeStateRequest not allowed for RW session in state RW",
        "GetEventHistoryRequest not allowed for RW session in state RW",
        "CommitResponse not allowed for RW session in state RW",
        "size must be > 0, got -3",
        "offset_bytes must be >= 0, got -1",
        "BatchMetadataGetRequest not allowed: the handshake did not ask for \"batch\"",
    ];
    assert_eq!(errors, expected);
    let alive = conversation(&mut stream, &[wire::GetAllocationStateRequest {}.into()]);
    assert_eq!(alive, [wire::GetAllocationStateResponse { allocation_count: 1 }.into()]);
}

/// A peer that asks for no extension gets the bytes that the Python service sends.
#[test]
fn answers_without_extensions_are_the_python_services() {
    let local = Local::start();
    let mut stream = raw(local.socket());
    let granted = conversation(&mut stream, &[handshake(Requested::Rw)]).remove(0);
    let mut frame = Vec::new();
    encode_frame(&granted, &mut frame);
    let expected = b"\0\0\0\x42\x84\xa4type\xb2handshake_response\xa7success\xc3\xa9committed\xc2\
                     \xb1granted_lock_type\xa2rw";
    assert_eq!(frame, expected);
}

fn closes_after(stream: &mut impl Read) {
    let mut rest = Vec::new();
    let end = stream.read_to_end(&mut rest);
    // A reset is an end as well; that nothing comes for so long is none.
    let is_end = |error: &std::io::Error| error.kind() == std::io::ErrorKind::ConnectionReset;
    assert!(end.as_ref().err().is_none_or(is_end), "{end:?}");
    assert_eq!(rest, b"");
}

#[test]
fn another_first_message_is_refused_and_the_connection_closed() {
    let local = Local::start();
    let mut stream = raw(local.socket());
    let answers = conversation(&mut stream, &[wire::CommitRequest {}.into()]);
    assert_eq!(error_of(&answers[0]), "Expected HandshakeRequest");
    closes_after(&mut stream);
}

/// The Python service leaves such a socket open for ever.
#[test]
fn a_first_message_that_cannot_be_read_closes_the_connection() {
    let local = Local::start();
    for bytes in [&b"\0\0\0\x01\xc1"[..], b"\0\0\0\x02\x81\xa4", b"\0\0\0\x05abcde"] {
        let mut stream = raw(local.socket());
        stream.write_all(bytes).unwrap();
        closes_after(&mut stream);
    }
}

#[test]
fn a_message_that_cannot_be_read_ends_the_writer() {
    let local = Local::start();
    let mut stream = raw(local.socket());
    conversation(
        &mut stream,
        &[handshake(Requested::Rw), wire::AllocateRequest { size: 1, tag: "t".to_owned() }.into()],
    );
    stream.write_all(b"\0\0\0\x01\xc1").unwrap();
    closes_after(&mut stream);
    local.await_state("EMPTY");
    local.await_memory(0);
}

/// The Python service waits for four gigabytes.
#[test]
fn a_message_over_the_limit_is_told_of() {
    let local = Local::with(1 << 30, |settings| settings.max_message_bytes = 1000);
    let mut stream = raw(local.socket());
    conversation(&mut stream, &[handshake(Requested::Rw)]);
    let long = wire::AllocateRequest { size: 1, tag: "t".repeat(1000) };
    let answers = conversation(&mut stream, &[long.into()]);
    let text = error_of(&answers[0]);
    assert!(text.ends_with("bytes is longer than the limit of 1000"), "{text}");
    closes_after(&mut stream);
    local.await_state("EMPTY");
}

/// Whatever a writer sends, the server keeps a bounded part of it, and the session goes on.
#[test]
fn metadata_beyond_the_limit_is_refused() {
    const LIMIT: u64 = 10_000;
    let local = Local::with(1 << 30, |settings| settings.max_metadata_bytes = LIMIT);
    let mut writer = local.session(Requested::Rw);
    let id = writer.allocate(1, "t").unwrap().allocation_id;
    let mut put = 0;
    let refused = loop {
        match writer.metadata_put(&format!("key {put}"), &id, 0, &[7; 1000]) {
            Ok(()) => put += 1,
            refused => break words(refused),
        }
        assert!(put < 100, "nothing is refused");
    };
    assert!(refused.starts_with("Metadata limit exceeded: metadata_bytes="), "{refused}");
    assert!(refused.ends_with(&format!("limit_bytes={LIMIT}")), "{refused}");
    assert_eq!((put, local.metric("metadata_entries")), (7, 7));

    // Entries without a value take something, too, and a batch is put as a whole or not at all.
    let value = gms::client::MetadataValue {
        allocation_id: id.clone(),
        offset_bytes: 0,
        value: Vec::new(),
    };
    let many: Vec<_> = (0..100).map(|n| (format!("batch {n}"), value.clone())).collect();
    assert!(words(writer.metadata_put_many(&many)).starts_with("Metadata limit exceeded"));
    assert_eq!(local.metric("metadata_entries"), 7);

    // The tags of allocations count as well, and no memory is left of what is refused.
    let used = local.sim.memory_used(0);
    let long = "t".repeat(LIMIT as usize);
    assert!(words(writer.allocate(1, &long)).starts_with("Metadata limit exceeded"));
    assert!(words(writer.allocate_many(&[1; 8], &long[..500])).starts_with("Metadata limit"));
    local.await_memory(used);

    // What goes makes room, and what is replaced needs none.
    writer.metadata_put("key 0", &id, 1, &[8; 1000]).unwrap();
    assert!(writer.metadata_delete("key 0").unwrap());
    writer.metadata_put("another", &id, 0, &[7; 1000]).unwrap();
    assert!(local.metric("metadata_bytes") <= LIMIT);
    writer.commit().unwrap();
    // The next layout begins with nothing.
    let mut writer = local.session(Requested::Rw);
    assert_eq!(local.metric("metadata_bytes"), 0);
    let id = writer.allocate(1, "t").unwrap().allocation_id;
    writer.metadata_put("key", &id, 0, &[7; 9000]).unwrap();
}

/// The client learns why, though the server closes before all of its message was sent.
#[test]
fn a_client_hears_that_its_message_is_too_long() {
    let local = Local::start();
    let mut writer = local.session(Requested::Rw);
    let id = writer.allocate(1, "t").unwrap().allocation_id;
    // More than sockets hold.
    let text = words(writer.metadata_put("k", &id, 0, &vec![7; 8 << 20]));
    assert!(text.ends_with("bytes is longer than the limit of 1048576"), "{text}");
    let after = writer.allocation_count();
    assert!(matches!(after, Err(ClientError::Disconnected)), "{after:?}");
    local.await_state("EMPTY");
}

#[test]
fn who_connects_and_says_nothing_is_closed() {
    let local =
        Local::with(1 << 30, |settings| settings.handshake_timeout = Duration::from_millis(30));
    closes_after(&mut raw(local.socket()));
}

#[test]
fn memory_that_does_not_come_is_told_of() {
    let local = Local::with(4 * GRANULE, |settings| {
        settings.retry_interval = Duration::from_millis(5);
        settings.retry_timeout = Some(Duration::from_millis(60));
    });
    let mut writer = local.session(Requested::Rw);
    writer.allocate(3 * GRANULE, "t").unwrap();
    let text = words(writer.allocate(2 * GRANULE, "kv"));
    let start = format!(
        "Timed out waiting for GPU memory: requested_size={}, aligned_size={}, tag=kv, waited_sec=",
        2 * GRANULE,
        2 * GRANULE
    );
    let waited = text.strip_prefix(&start).and_then(|waited| waited.parse::<f64>().ok());
    assert!(waited.is_some_and(|seconds| seconds >= 0.06), "{text}");
    assert!(local.events().contains(&("allocation_oom".to_owned(), 1)));
    let never = words(writer.allocate(5 * GRANULE, "kv"));
    assert!(never.starts_with("More than the device has"), "{never}");
    assert_eq!(writer.allocate(GRANULE, "t").unwrap().layout_slot, 1, "the session lives");
}

//! The protocol's bytes against frames that the Python implementation wrote.

use gms::lock::{Granted, Requested};
use gms::wire::{self, DecodeError, FrameReader, Message, encode_frame};
use proptest::prelude::*;
use serde_json::Value;

fn bytes(hexadecimal: &str) -> Vec<u8> {
    let pair = |i| u8::from_str_radix(&hexadecimal[2 * i..2 * i + 2], 16).unwrap();
    (0..hexadecimal.len() / 2).map(pair).collect()
}

/// What the Python class printed, and the frame.
fn golden() -> Vec<(String, Vec<u8>)> {
    let golden: Value = serde_json::from_str(include_str!("golden/v0.json")).unwrap();
    let frames = golden["frames"].as_array().unwrap();
    frames
        .iter()
        .map(|frame| {
            (frame["repr"].as_str().unwrap().to_owned(), bytes(frame["frame"].as_str().unwrap()))
        })
        .collect()
}

fn frame(message: &Message) -> Vec<u8> {
    let mut out = Vec::new();
    encode_frame(message, &mut out);
    out
}

#[test]
fn every_golden_frame_is_read_and_written_to_the_byte() {
    let golden = golden();
    assert_eq!(golden.len(), 47);
    for (repr, expected) in &golden {
        let mut reader = FrameReader::new(1 << 20);
        reader.space()[..expected.len()].copy_from_slice(expected);
        reader.arrived(expected.len());
        let message = Message::decode(reader.next_frame().unwrap().unwrap()).unwrap();
        assert_eq!(message.name(), repr.split('(').next().unwrap());
        assert_eq!(frame(&message), *expected, "{repr}");
    }
}

/// That the fields mean what the Python service means by them.
#[test]
fn golden_frames_hold_what_python_says() {
    let message = |start: &str| {
        let (_, frame) = golden().into_iter().find(|(repr, _)| repr.starts_with(start)).unwrap();
        Message::decode(&frame[wire::HEADER_BYTES..]).unwrap()
    };
    let handshake = wire::HandshakeRequest {
        lock_type: Requested::Ro,
        timeout_ms: Some(250),
        extensions: wire::Extensions::default(),
    };
    assert_eq!(message("HandshakeRequest(lock_type=<RequestedLockType.RO:"), handshake.into());
    let sealed = wire::CommitLayoutResponse {
        success: true,
        memory_layout_hash: "ab".to_owned(),
        granted_lock_type: Some(Granted::RwData),
    };
    assert_eq!(message("CommitLayoutResponse"), sealed.into());
    let put = wire::MetadataPutRequest {
        key: "k".to_owned(),
        allocation_id: "11111111-2222-4333-8444-555555555555".to_owned(),
        offset_bytes: 16,
        value: b"\0\xffv".to_vec(),
    };
    assert_eq!(message("MetadataPutRequest"), put.into());
    let large = wire::AllocateRequest { size: 70_000_000_000, tag: "weights".to_owned() };
    assert_eq!(message("AllocateRequest(size=7"), large.into());
    let Message::GetEventHistoryResponse(history) = message("GetEventHistoryResponse") else {
        panic!("a history")
    };
    let events: Vec<_> =
        history.events.iter().map(|event| (event.kind.as_str(), event.allocation_count)).collect();
    assert_eq!(events, [("rw_connected", 0), ("allocations_cleared", 3)]);
}

#[test]
fn keys_may_come_in_any_order_with_others_and_without_defaults() {
    // {"later": [1, {}], "size": 5, "type": "allocate_request"}
    let odd = b"\x83\xa5later\x92\x01\x80\xa4size\x05\xa4type\xb0allocate_request";
    let expected = wire::AllocateRequest { size: 5, tag: "default".to_owned() };
    assert_eq!(Message::decode(odd), Ok(expected.into()));
    let minimal = b"\x82\xa4type\xb1handshake_request\xa9lock_type\xa2ro";
    let Ok(Message::HandshakeRequest(handshake)) = Message::decode(minimal) else {
        panic!("a handshake")
    };
    assert_eq!((handshake.timeout_ms, handshake.extensions.0.len()), (None, 0));
}

#[test]
fn what_does_not_fit_is_refused() {
    let missing = DecodeError::Missing { message: "AllocateRequest", field: "size" };
    assert_eq!(Message::decode(b"\x81\xa4type\xb0allocate_request"), Err(missing));
    let text = Message::decode(b"\x82\xa4type\xb0allocate_request\xa4size\xa15");
    assert!(matches!(text, Err(DecodeError::WrongType { expected: "an int", .. })), "{text:?}");
    let lock = Message::decode(b"\x82\xa4type\xb1handshake_request\xa9lock_type\xa2rx");
    assert!(matches!(lock, Err(DecodeError::UnknownValue { .. })), "{lock:?}");
    let unknown = Message::decode(b"\x81\xa4type\xa1x");
    assert_eq!(unknown, Err(DecodeError::UnknownType("x".to_owned())));
    assert_eq!(Message::decode(b"\x80"), Err(DecodeError::NoType));
    let trailing = Message::decode(b"\x81\xa4type\xaecommit_request\xc0");
    assert_eq!(trailing, Err(DecodeError::Trailing { bytes: 1 }));
    assert!(matches!(Message::decode(b"\x93\x01\x02\x03"), Err(DecodeError::WrongType { .. })));
    assert_eq!(Message::decode(b""), Err(DecodeError::Truncated));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4_000, ..ProptestConfig::default() })]

    #[test]
    fn bytes_of_anybody_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = Message::decode(&bytes);
    }

    /// Closer to what is read than noise is: golden frames with some bytes changed, or cut off.
    #[test]
    fn frames_with_faults_are_read_or_refused(
        which in 0..47_usize,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        cut in any::<prop::sample::Index>(),
        cuts in any::<bool>(),
    ) {
        let (_, mut frame) = golden().swap_remove(which);
        for (at, byte) in changes {
            let at = at.index(frame.len());
            frame[at] = byte;
        }
        if cuts {
            frame.truncate(cut.index(frame.len()).max(wire::HEADER_BYTES));
        }
        if let Ok(message) = Message::decode(&frame[wire::HEADER_BYTES..]) {
            let mut again = Vec::new();
            encode_frame(&message, &mut again);
            prop_assert_eq!(Message::decode(&again[wire::HEADER_BYTES..]), Ok(message));
        }
    }
}

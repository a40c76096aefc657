//! What comes over the memory service's socket: whatever the bytes are, they are read or refused; and a message that was
//! read is written as it is read.

#![no_main]

use gms::wire::{FrameReader, Message, encode_frame};
use libfuzzer_sys::fuzz_target;

const LIMIT: u64 = 1 << 16;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(message) = Message::decode(bytes) {
        let mut frame = Vec::new();
        encode_frame(&message, &mut frame);
        assert_eq!(Message::decode(&frame[gms::wire::HEADER_BYTES..]), Ok(message));
    }

    let mut reader = FrameReader::new(LIMIT);
    // By parts as long as the bytes say.
    let mut rest = bytes;
    while let Some((&length, after)) = rest.split_first() {
        let (part, after) = after.split_at(after.len().min(length.into()));
        let space = reader.space();
        space[..part.len()].copy_from_slice(part);
        reader.arrived(part.len());
        rest = after;
        loop {
            match reader.next_frame() {
                Ok(Some(frame)) => drop(Message::decode(frame)),
                Ok(None) => break,
                Err(error) => return assert!(error.bytes > error.limit),
            }
        }
    }
});

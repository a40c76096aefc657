//! Messages in a stream of bytes.

use std::ops::Range;

use super::define::Encode;
use super::pack::Packer;

/// Bytes of the length before each message.
pub const HEADER_BYTES: usize = 4;

/// The longest message that a length tells: the next one stands for all that are longer.
const MOST_BYTES: u32 = u32::MAX - 1;

/// The least room that is offered for reading.
const CHUNK_BYTES: usize = 16 << 10;

/// A message that is longer than its reader takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a message of {bytes} bytes is longer than the limit of {limit}")]
pub struct FrameError {
    /// Its length, as it says.
    pub bytes: u64,
    /// The longest that is taken.
    pub limit: u64,
}

/// Appends a message as a frame. One of 4 GiB or more, whose length 32 bits do not hold, is refused by whoever
/// reads it.
pub fn encode_frame(message: &impl Encode, out: &mut Vec<u8>) {
    let start = out.len();
    let mut bytes = std::mem::take(out);
    bytes.extend_from_slice(&[0; HEADER_BYTES]);
    let mut packer = Packer::appending(bytes);
    message.encode(&mut packer);
    *out = packer.into_bytes();
    let length = u32::try_from(out.len() - start - HEADER_BYTES).unwrap_or(u32::MAX);
    out[start..start + HEADER_BYTES].copy_from_slice(&length.to_be_bytes());
}

/// Cuts a stream of bytes into frames, however the bytes come: in parts, or several frames at once.
///
/// Holds what has arrived and not been taken, and no more room than twice that and 16 KiB; what a
/// frame says of its length takes no memory before its bytes come.
#[derive(Debug)]
pub struct FrameReader {
    buffer: Vec<u8>,
    /// What has arrived and was not taken, in `buffer`.
    filled: Range<usize>,
    limit: u64,
}

impl FrameReader {
    /// For messages of at most `limit` bytes each, and less than 4 GiB.
    pub fn new(limit: u64) -> Self {
        let limit = limit.min(MOST_BYTES.into());
        Self { buffer: Vec::new(), filled: 0..0, limit }
    }

    /// The next whole message, without its length; `None` while more bytes are needed.
    ///
    /// # Errors
    /// [`FrameError`] as soon as the length is there and too large. The stream is of no use then.
    pub fn next_frame(&mut self) -> Result<Option<&[u8]>, FrameError> {
        let arrived = &self.buffer[self.filled.clone()];
        let Some((length, rest)) = arrived.split_first_chunk::<HEADER_BYTES>() else {
            return Ok(None);
        };
        let length = u32::from_be_bytes(*length);
        if u64::from(length) > self.limit {
            return Err(FrameError { bytes: length.into(), limit: self.limit });
        }
        let length = length as usize;
        if rest.len() < length {
            return Ok(None);
        }
        let start = self.filled.start + HEADER_BYTES;
        self.filled.start = start + length;
        Ok(Some(&self.buffer[start..start + length]))
    }

    /// Room for further bytes; [`arrived`](Self::arrived) tells how many were put there.
    pub fn space(&mut self) -> &mut [u8] {
        let waiting = self.filled.len();
        self.buffer.copy_within(self.filled.clone(), 0);
        self.filled = 0..waiting;
        let wanted = waiting + waiting.max(CHUNK_BYTES);
        if self.buffer.len() < wanted {
            self.buffer.resize(wanted, 0);
        } else if self.buffer.len() > 4 * wanted {
            // A long message has passed: its room is not kept.
            self.buffer.truncate(wanted);
            self.buffer.shrink_to_fit();
        }
        &mut self.buffer[waiting..]
    }

    /// So many bytes were put at the front of [`space`](Self::space).
    pub fn arrived(&mut self, bytes: usize) {
        self.filled.end = (self.filled.end + bytes).min(self.buffer.len());
    }

    /// Bytes that have arrived and belong to no message that was taken.
    pub fn pending(&self) -> usize {
        self.filled.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn feed(reader: &mut FrameReader, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let space = reader.space();
            let now = bytes.len().min(space.len());
            space[..now].copy_from_slice(&bytes[..now]);
            reader.arrived(now);
            bytes = &bytes[now..];
        }
    }

    proptest! {
        #[test]
        fn frames_come_out_as_they_went_in(
            frames in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40_000), 0..6),
            cuts in prop::collection::vec(1..50_000_usize, 1..20),
        ) {
            let mut stream = Vec::new();
            for frame in &frames {
                stream.extend((frame.len() as u32).to_be_bytes());
                stream.extend(frame);
            }
            let mut reader = FrameReader::new(1 << 20);
            let (mut at, mut out) = (0, Vec::new());
            for cut in cuts.iter().cycle() {
                while let Some(frame) = reader.next_frame().unwrap() {
                    out.push(frame.to_vec());
                }
                if at == stream.len() {
                    break;
                }
                let end = (at + cut).min(stream.len());
                feed(&mut reader, &stream[at..end]);
                at = end;
            }
            prop_assert_eq!(out, frames);
            prop_assert_eq!(reader.pending(), 0);
        }

        #[test]
        fn no_bytes_take_more_memory_than_they_are(stream in prop::collection::vec(any::<u8>(), 0..100_000)) {
            let mut reader = FrameReader::new(1 << 16);
            let mut whole = true;
            for part in stream.chunks(5_000) {
                feed(&mut reader, part);
                while whole && let Some(frame) = reader.next_frame().transpose() {
                    whole = frame.is_ok();
                }
                prop_assert!(!whole || reader.pending() < HEADER_BYTES + (1 << 16));
                prop_assert!(reader.buffer.capacity() <= 2 * reader.pending() + 4 * 5_000 + 4 * 2 * CHUNK_BYTES);
            }
        }
    }

    #[test]
    fn a_length_over_the_limit_is_refused_before_the_bytes_come() {
        let mut reader = FrameReader::new(1 << 20);
        feed(&mut reader, &[0xff, 0xff, 0xff]);
        assert_eq!(reader.next_frame(), Ok(None));
        feed(&mut reader, &[0xff]);
        let refused = FrameError { bytes: 0xffff_ffff, limit: 1 << 20 };
        assert_eq!(reader.next_frame(), Err(refused));
        assert!(reader.buffer.capacity() < 64 << 10);
    }

    /// Which is what a longer message has that was encoded all the same.
    #[test]
    fn the_greatest_length_is_refused_whatever_the_limit() {
        let mut reader = FrameReader::new(u64::MAX);
        feed(&mut reader, &[0xff; HEADER_BYTES]);
        let refused = FrameError { bytes: 0xffff_ffff, limit: 0xffff_fffe };
        assert_eq!(reader.next_frame(), Err(refused));
    }
}

//! Writing msgpack, each value in its shortest form.

use std::convert::Infallible;

use rmp::encode::{self, ByteBuf, RmpWriteErr, ValueWriteError};

/// Appends values to a buffer, which cannot fail.
#[derive(Debug, Default)]
pub(crate) struct Packer(ByteBuf);

/// Takes the value out of a result whose error cannot be made.
fn sure<T>(written: Result<T, ValueWriteError<Infallible>>) -> T
where
    Infallible: RmpWriteErr,
{
    let Ok(value) = written;
    value
}

/// A length as msgpack has it. Longer ones do not fit into a frame, whose own length is of 32 bits.
fn length(items: usize) -> u32 {
    u32::try_from(items).unwrap_or(u32::MAX)
}

impl Packer {
    /// Goes on at the end of `bytes`.
    pub(crate) fn appending(bytes: Vec<u8>) -> Self {
        Self(ByteBuf::from_vec(bytes))
    }

    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.0.into_vec()
    }

    pub(crate) fn nil(&mut self) {
        let Ok(()) = encode::write_nil(&mut self.0);
    }

    pub(crate) fn bool(&mut self, value: bool) {
        let Ok(()) = encode::write_bool(&mut self.0, value);
    }

    pub(crate) fn int(&mut self, value: i64) {
        sure(encode::write_sint(&mut self.0, value));
    }

    pub(crate) fn str(&mut self, value: &str) {
        sure(encode::write_str(&mut self.0, value));
    }

    pub(crate) fn bin(&mut self, value: &[u8]) {
        sure(encode::write_bin(&mut self.0, value));
    }

    pub(crate) fn array(&mut self, items: usize) {
        sure(encode::write_array_len(&mut self.0, length(items)));
    }

    pub(crate) fn map(&mut self, entries: usize) {
        sure(encode::write_map_len(&mut self.0, length(entries)));
    }
}

//! Reading msgpack from bytes that anybody may have written.

use rmp::Marker;

/// Why bytes are not a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The bytes end within a value.
    #[error("the message ends within a value")]
    Truncated,
    /// Something follows the message.
    #[error("{bytes} bytes follow the message")]
    Trailing {
        /// How many.
        bytes: usize,
    },
    /// A value is of another type than the field's.
    #[error("expected {expected}, found msgpack marker {marker:#04x}")]
    WrongType {
        /// What the field holds.
        expected: &'static str,
        /// The first byte of the value that is there.
        marker: u8,
    },
    /// A number that 64 signed bits do not hold.
    #[error("the number {0} is out of range")]
    OutOfRange(u64),
    /// A string that is not UTF-8.
    #[error("a string is not UTF-8")]
    NotUtf8,
    /// A field without a default is missing.
    #[error("{message} lacks {field}")]
    Missing {
        /// The message.
        message: &'static str,
        /// The field.
        field: &'static str,
    },
    /// There is no "type".
    #[error("the message has no type")]
    NoType,
    /// No message has this type.
    #[error("unknown message type {0:?}")]
    UnknownType(String),
    /// A value that its enumeration does not have.
    #[error("{value:?} is not {expected}")]
    UnknownValue {
        /// What it was to be.
        expected: &'static str,
        /// What it is.
        value: String,
    },
}

type Result<T> = std::result::Result<T, DecodeError>;

/// Takes values from the front of a slice.
#[derive(Clone, Debug)]
pub(crate) struct Unpacker<'a> {
    rest: &'a [u8],
}

impl<'a> Unpacker<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// How many bytes are left.
    pub(crate) fn remaining(&self) -> usize {
        self.rest.len()
    }

    /// Checks that everything was read.
    pub(crate) fn finish(&self) -> Result<()> {
        match self.rest.len() {
            0 => Ok(()),
            bytes => Err(DecodeError::Trailing { bytes }),
        }
    }

    fn take(&mut self, bytes: usize) -> Result<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(bytes).ok_or(DecodeError::Truncated)?;
        self.rest = rest;
        Ok(taken)
    }

    /// A big-endian number of so many bytes, at most eight.
    fn unsigned(&mut self, bytes: usize) -> Result<u64> {
        Ok(self.take(bytes)?.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    /// The same, in two's complement.
    fn signed(&mut self, bytes: usize) -> Result<i64> {
        let unused_bits = 64 - 8 * bytes as u32;
        Ok((self.unsigned(bytes)? << unused_bits) as i64 >> unused_bits)
    }

    fn peek(&self) -> Result<u8> {
        self.rest.first().copied().ok_or(DecodeError::Truncated)
    }

    fn marker(&mut self) -> Result<Marker> {
        Ok(Marker::from_u8(self.take(1)?[0]))
    }

    /// Whether a nil is next, which is taken then.
    pub(crate) fn take_nil(&mut self) -> Result<bool> {
        let nil = Marker::from_u8(self.peek()?) == Marker::Null;
        if nil {
            self.take(1)?;
        }
        Ok(nil)
    }

    pub(crate) fn bool(&mut self) -> Result<bool> {
        match self.marker()? {
            Marker::True => Ok(true),
            Marker::False => Ok(false),
            other => Err(wrong("a bool", other)),
        }
    }

    pub(crate) fn int(&mut self) -> Result<i64> {
        let number = match self.marker()? {
            Marker::FixPos(number) => return Ok(i64::from(number)),
            Marker::FixNeg(number) => return Ok(i64::from(number)),
            Marker::I8 => return self.signed(1),
            Marker::I16 => return self.signed(2),
            Marker::I32 => return self.signed(4),
            Marker::I64 => return self.signed(8),
            Marker::U8 => self.unsigned(1)?,
            Marker::U16 => self.unsigned(2)?,
            Marker::U32 => self.unsigned(4)?,
            Marker::U64 => self.unsigned(8)?,
            other => return Err(wrong("an int", other)),
        };
        i64::try_from(number).map_err(|_| DecodeError::OutOfRange(number))
    }

    pub(crate) fn str(&mut self) -> Result<&'a str> {
        let bytes = match self.marker()? {
            Marker::FixStr(bytes) => u64::from(bytes),
            Marker::Str8 => self.unsigned(1)?,
            Marker::Str16 => self.unsigned(2)?,
            Marker::Str32 => self.unsigned(4)?,
            other => return Err(wrong("a str", other)),
        };
        std::str::from_utf8(self.take(bytes as usize)?).map_err(|_| DecodeError::NotUtf8)
    }

    pub(crate) fn bin(&mut self) -> Result<&'a [u8]> {
        let bytes = match self.marker()? {
            Marker::Bin8 => self.unsigned(1)?,
            Marker::Bin16 => self.unsigned(2)?,
            Marker::Bin32 => self.unsigned(4)?,
            other => return Err(wrong("bytes", other)),
        };
        self.take(bytes as usize)
    }

    /// The number of items of an array.
    pub(crate) fn array(&mut self) -> Result<usize> {
        let items = match self.marker()? {
            Marker::FixArray(items) => u64::from(items),
            Marker::Array16 => self.unsigned(2)?,
            Marker::Array32 => self.unsigned(4)?,
            other => return Err(wrong("an array", other)),
        };
        Ok(items as usize)
    }

    /// The number of entries of a map.
    pub(crate) fn map(&mut self) -> Result<usize> {
        let entries = match self.marker()? {
            Marker::FixMap(entries) => u64::from(entries),
            Marker::Map16 => self.unsigned(2)?,
            Marker::Map32 => self.unsigned(4)?,
            other => return Err(wrong("a map", other)),
        };
        Ok(entries as usize)
    }

    /// Passes over a value, whatever it is and however deep.
    pub(crate) fn skip(&mut self) -> Result<()> {
        // Values still to pass. Each takes a byte at least, so that this ends with the bytes.
        let mut values = 1_u64;
        while values > 0 {
            values -= 1;
            let (bytes, within) = match self.marker()? {
                Marker::FixPos(_) | Marker::FixNeg(_) => (0, 0),
                Marker::Null | Marker::True | Marker::False => (0, 0),
                Marker::U8 | Marker::I8 => (1, 0),
                Marker::U16 | Marker::I16 => (2, 0),
                Marker::U32 | Marker::I32 | Marker::F32 => (4, 0),
                Marker::U64 | Marker::I64 | Marker::F64 => (8, 0),
                Marker::FixStr(bytes) => (u64::from(bytes), 0),
                Marker::Str8 | Marker::Bin8 => (self.unsigned(1)?, 0),
                Marker::Str16 | Marker::Bin16 => (self.unsigned(2)?, 0),
                Marker::Str32 | Marker::Bin32 => (self.unsigned(4)?, 0),
                Marker::FixArray(items) => (0, u64::from(items)),
                Marker::Array16 => (0, self.unsigned(2)?),
                Marker::Array32 => (0, self.unsigned(4)?),
                Marker::FixMap(entries) => (0, 2 * u64::from(entries)),
                Marker::Map16 => (0, 2 * self.unsigned(2)?),
                Marker::Map32 => (0, 2 * self.unsigned(4)?),
                // The type of an extension takes one byte more.
                Marker::FixExt1 => (2, 0),
                Marker::FixExt2 => (3, 0),
                Marker::FixExt4 => (5, 0),
                Marker::FixExt8 => (9, 0),
                Marker::FixExt16 => (17, 0),
                Marker::Ext8 => (self.unsigned(1)? + 1, 0),
                Marker::Ext16 => (self.unsigned(2)? + 1, 0),
                Marker::Ext32 => (self.unsigned(4)? + 1, 0),
                other @ Marker::Reserved => return Err(wrong("a value", other)),
            };
            self.take(usize::try_from(bytes).map_err(|_| DecodeError::Truncated)?)?;
            values = values.saturating_add(within);
        }
        Ok(())
    }
}

fn wrong(expected: &'static str, marker: Marker) -> DecodeError {
    DecodeError::WrongType { expected, marker: marker.to_u8() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::pack::Packer;

    #[test]
    fn integers_come_back_from_their_shortest_form() {
        let edges = [0, 1, 127, 128, 255, 256, 65_535, 65_536, 0xffff_ffff, 0x1_0000_0000];
        let numbers = edges.iter().flat_map(|n| [*n, -*n, -*n - 1]).chain([i64::MAX, i64::MIN]);
        for number in numbers {
            let mut packer = Packer::default();
            packer.int(number);
            let bytes = packer.into_bytes();
            let mut unpacker = Unpacker::new(&bytes);
            assert_eq!((unpacker.int(), unpacker.finish()), (Ok(number), Ok(())), "{bytes:x?}");
        }
        let mut large = Unpacker::new(&[0xcf, 0x80, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(large.int(), Err(DecodeError::OutOfRange(1 << 63)));
    }

    #[test]
    fn any_value_is_passed_over() {
        // {"a": [1, 2.0, {"b": nil}], "c": ext} and then 7.
        let bytes = b"\x82\xa1a\x93\x01\xcb\0\0\0\0\0\0\0\0\x81\xa1b\xc0\xa1c\xc7\x02\x05xy\x07";
        let mut unpacker = Unpacker::new(bytes);
        assert_eq!((unpacker.skip(), unpacker.int()), (Ok(()), Ok(7)));
        for end in 0..bytes.len() - 1 {
            assert_eq!(Unpacker::new(&bytes[..end]).skip(), Err(DecodeError::Truncated));
        }
        let endless = b"\xdf\xff\xff\xff\xff\xdf\xff\xff\xff\xff";
        assert_eq!(Unpacker::new(endless).skip(), Err(DecodeError::Truncated));
    }
}

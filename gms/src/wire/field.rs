//! What may stand in a field of a message.

use super::pack::Packer;
use super::unpack::{DecodeError, Unpacker};
use crate::lock::{Granted, Requested};

/// A value of a message's field.
pub(crate) trait Field: Sized {
    fn pack(&self, packer: &mut Packer);

    fn unpack(unpacker: &mut Unpacker<'_>) -> Result<Self, DecodeError>;

    /// Whether the field is not written at all: true only of what older peers do not have.
    fn is_left_out(&self) -> bool {
        false
    }
}

impl Field for bool {
    fn pack(&self, packer: &mut Packer) {
        packer.bool(*self);
    }

    fn unpack(unpacker: &mut Unpacker<'_>) -> Result<Self, DecodeError> {
        unpacker.bool()
    }
}

impl Field for i64 {
    fn pack(&self, packer: &mut Packer) {
        packer.int(*self);
    }

    fn unpack(unpacker: &mut Unpacker<'_>) -> Result<Self, DecodeError> {
        unpacker.int()
    }
}

impl Field for String {
    fn pack(&self, packer: &mut Packer) {
        packer.str(self);
    }

    fn unpack(unpacker: &mut Unpacker<'_>) -> Result<Self, DecodeError> {
        unpacker.str().map(str::to_owned)
    }
}

/// Bytes, which msgpack tells from text.
impl Field for Vec<u8> {
    fn pack(&self, packer: &mut Packer) {
        packer.bin(self);
    }

    fn unpack(unpacker: &mut Unpacker<'_>) -> Result<Self, DecodeError> {
        unpacker.bin().map(<[u8]>::to_vec)
    }
}

impl<T: Field> Field for Option<T> {
    fn pack(&self, packer: &mut Packer) {
        match self {
            Some(value) => value.pack(packer),
            None => packer.nil(),
        }
    }

    fn unpack(unpacker: &mut Unpacker<'_>) -> Result<Self, DecodeError> {
        if unpacker.take_nil()? { Ok(None) } else { T::unpack(unpacker).map(Some) }
    }
}

/// What an array may hold: everything but bytes, which are no array.
pub(crate) trait Item: Field {}
impl Item for i64 {}
impl Item for String {}

impl<T: Item> Field for Vec<T> {
    fn pack(&self, packer: &mut Packer) {
        packer.array(self.len());
        self.iter().for_each(|item| item.pack(packer));
    }

    fn unpack(unpacker: &mut Unpacker<'_>) -> Result<Self, DecodeError> {
        let items = unpacker.array()?;
        // The number is the sender's word: memory is taken as items really come.
        let mut list = Vec::with_capacity(items.min(unpacker.remaining()).min(1024));
        for _ in 0..items {
            list.push(T::unpack(unpacker)?);
        }
        Ok(list)
    }
}

/// Names of extensions of the protocol, asked for or agreed to. Not written where there are none,
/// so that a peer that knows of no extensions sees the messages that it knows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Extensions(pub Vec<String>);

impl Extensions {
    /// Whether an extension is named.
    pub fn contains(&self, name: &str) -> bool {
        self.0.iter().any(|known| known == name)
    }
}

impl Field for Extensions {
    fn pack(&self, packer: &mut Packer) {
        self.0.pack(packer);
    }

    fn unpack(unpacker: &mut Unpacker<'_>) -> Result<Self, DecodeError> {
        Vec::unpack(unpacker).map(Self)
    }

    fn is_left_out(&self) -> bool {
        self.0.is_empty()
    }
}

/// An enumeration, written as its name.
macro_rules! names {
    ($type:ty, $what:literal, $( $variant:ident = $name:literal ),* $(,)?) => {
        impl $type {
            /// The name that the protocol has for it.
            pub fn name(self) -> &'static str {
                match self {
                    $( Self::$variant => $name, )*
                }
            }
        }

        impl Field for $type {
            fn pack(&self, packer: &mut Packer) {
                packer.str(self.name());
            }

            fn unpack(unpacker: &mut Unpacker<'_>) -> Result<Self, DecodeError> {
                match unpacker.str()? {
                    $( $name => Ok(Self::$variant), )*
                    other => {
                        let value = other.to_owned();
                        Err(DecodeError::UnknownValue { expected: $what, value })
                    }
                }
            }
        }
    };
}

names!(
    Requested,
    "a lock that can be asked for",
    Rw = "rw",
    Ro = "ro",
    RwOrRo = "rw_or_ro",
    RwDataOrRw = "rw_data_or_rw",
);
names!(Granted, "a lock that can be granted", Rw = "rw", Ro = "ro", RwData = "rw_data");

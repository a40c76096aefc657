//! How messages are declared: each once, as a list of fields with their defaults.

use super::pack::Packer;
use super::unpack::{DecodeError, Unpacker};

/// What can be written as the body of a frame.
pub trait Encode: sealed::Body {
    /// Writes it.
    #[doc(hidden)]
    #[allow(private_interfaces)]
    fn encode(&self, packer: &mut Packer);
}

pub(super) mod sealed {
    /// Implemented here and nowhere else.
    pub trait Body {}
}

/// The fields of a map, with or without a type.
macro_rules! body {
    ($name:ident, $tag:expr, { $( $field:ident : $type:ty $( = $default:expr )? ),* }) => {
        impl Field for $name {
            fn pack(&self, packer: &mut Packer) {
                let tag: Option<&str> = $tag;
                let fields = usize::from(tag.is_some()) $( + usize::from(!self.$field.is_left_out()) )*;
                packer.map(fields);
                if let Some(tag) = tag {
                    packer.str("type");
                    packer.str(tag);
                }
                $(
                    if !self.$field.is_left_out() {
                        packer.str(stringify!($field));
                        self.$field.pack(packer);
                    }
                )*
            }

            fn unpack(unpacker: &mut Unpacker<'_>) -> Result<Self, DecodeError> {
                let tag: Option<&str> = $tag;
                $( let mut $field: Option<$type> = None; )*
                for _ in 0..unpacker.map()? {
                    match unpacker.str()? {
                        "type" => {
                            let found = unpacker.str()?;
                            if tag.is_some_and(|tag| tag != found) {
                                return Err(DecodeError::UnknownType(found.to_owned()));
                            }
                        }
                        $( stringify!($field) => $field = Some(Field::unpack(unpacker)?), )*
                        _ => unpacker.skip()?,
                    }
                }
                Ok(Self { $( $field: body!(@value $name, $field $(, $default)?), )* })
            }
        }
    };
    (@value $name:ident, $field:ident, $default:expr) => {
        $field.unwrap_or_else(|| $default)
    };
    (@value $name:ident, $field:ident) => {
        $field.ok_or(DecodeError::Missing {
            message: stringify!($name),
            field: stringify!($field),
        })?
    };
}

macro_rules! messages {
    ($(
        $( #[$doc:meta] )*
        $name:ident = $tag:literal {
            $( $( #[$field_doc:meta] )* $field:ident : $type:ty $( = $default:expr )?, )*
        }
    )*) => {
        $(
            $( #[$doc] )*
            #[derive(Clone, Debug, PartialEq, Eq)]
            pub struct $name {
                $( $( #[$field_doc] )* pub $field: $type, )*
            }

            body!($name, Some($tag), { $( $field : $type $( = $default )? ),* });

            impl sealed::Body for $name {}

            impl Encode for $name {
                #[allow(private_interfaces)]
                fn encode(&self, packer: &mut Packer) {
                    self.pack(packer);
                }
            }

            impl From<$name> for Message {
                fn from(message: $name) -> Self {
                    Self::$name(message)
                }
            }
        )*

        /// Any message.
        #[derive(Clone, Debug, PartialEq, Eq)]
        #[allow(missing_docs)]
        pub enum Message {
            $( $name($name), )*
        }

        impl Message {
            /// What error texts call it: the name of its class in the Python service.
            pub fn name(&self) -> &'static str {
                match self {
                    $( Self::$name(_) => stringify!($name), )*
                }
            }

            /// Reads the body of a frame.
            ///
            /// # Errors
            /// What [`DecodeError`] tells.
            pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
                let mut unpacker = Unpacker::new(bytes);
                let message = match type_of(unpacker.clone())? {
                    $( $tag => Self::$name(Field::unpack(&mut unpacker)?), )*
                    other => return Err(DecodeError::UnknownType(other.to_owned())),
                };
                unpacker.finish()?;
                Ok(message)
            }
        }

        impl sealed::Body for Message {}

        impl Encode for Message {
            #[allow(private_interfaces)]
            fn encode(&self, packer: &mut Packer) {
                match self {
                    $( Self::$name(message) => message.pack(packer), )*
                }
            }
        }
    };
}

/// The value of "type", which is first in what this service writes, but may be anywhere.
pub(super) fn type_of<'a>(mut unpacker: Unpacker<'a>) -> Result<&'a str, DecodeError> {
    for _ in 0..unpacker.map()? {
        if unpacker.str()? == "type" {
            return unpacker.str();
        }
        unpacker.skip()?;
    }
    Err(DecodeError::NoType)
}

pub(super) use {body, messages};

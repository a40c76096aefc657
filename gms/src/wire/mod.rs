//! The protocol's bytes: frames, the msgpack in them, and the messages that it says.
//!
//! ```text
//! ┌──────────────┬──────────────────────────────────────────┐
//! │ length, u32  │ one msgpack map: "type" first, then      │
//! │ big-endian   │ every field in declared order            │
//! └──────────────┴──────────────────────────────────────────┘
//! ```
//!
//! What is written is what the Python service writes, to the byte. What is read may have its keys
//! in any order, keys that are not known, and lack those that have a default; anything else that
//! does not fit is a [`DecodeError`]. Descriptors travel beside the first byte of a frame.
//!
//! Nothing here calls the system or allocates more than the bytes that have arrived ask for.

#![forbid(unsafe_code)]

mod define;
mod field;
mod frame;
mod message;
mod pack;
mod unpack;

pub use define::Encode;
pub use field::Extensions;
pub use frame::{FrameError, FrameReader, HEADER_BYTES, encode_frame};
pub use message::*;
pub use unpack::DecodeError;

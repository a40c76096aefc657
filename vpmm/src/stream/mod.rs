//! Streams and events as values with an owner, or borrowed.

mod copies;
mod event;
mod owned;
mod owner;
mod pool;
mod raw;

pub use event::Event;
pub use owned::Stream;
pub use pool::StreamPool;
pub(crate) use raw::RawHandles;

//! Streams and events as values with an owner, or borrowed.

mod copies;
mod event;
mod owned;
mod owner;
mod pool;

pub use event::Event;
pub use owned::Stream;
pub use pool::StreamPool;

//! Memory shared between processes: the owner exports handles, others import them and map them as
//! they lie there.

mod export;
mod import;
mod limbo;
mod socket;
mod wire;

pub use export::Export;
pub(crate) use export::{SharedExtent, Source};
pub use import::Imported;
pub(crate) use wire::Span;

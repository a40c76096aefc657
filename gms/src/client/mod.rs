//! The client: who writes a layout, or maps one that is there.
//!
//! Two tiers. A [`Session`] is a connection that has a lock, with a method for each request. A
//! [`MemoryManager`] holds a session and what this process has mapped, and keeps addresses while the
//! memory behind them goes and comes back.

mod bulk;
mod channel;
mod connect;
mod error;
mod floor;
mod manager;
mod mappings;
mod session;

pub use channel::Interrupt;
pub use connect::{ConnectOptions, event_history, runtime_state};
pub use error::ClientError;
pub use floor::MappingFloor;
pub use manager::{KeptAddresses, MemoryManager, ScratchSummary};
pub use mappings::MappingInfo;
pub use session::{AllocationInfo, MetadataValue, Session};

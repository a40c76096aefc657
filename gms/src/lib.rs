//! The GPU memory service: a process that owns GPU memory for others, so that weights outlive the
//! worker that loaded them and a second worker maps them instead of loading them again.
//!
//! | room | what it is |
//! |---|---|
//! | [`wire`] | frames and messages, to the byte those of the Python service's protocol V0 |
//! | [`layout`] | allocations in their slots, metadata, the hash |
//! | [`lock`] | who may write and who may read |
//! | [`memory`] | physical memory: made, exported, given back |
//! | [`server`] | the process that owns it |
//! | [`client`] | the processes that use it |
//! | [`storage`] | a layout in files, and back |

pub mod client;
mod cuda;
pub mod layout;
pub mod lock;
pub mod memory;
mod paths;
pub mod server;
mod socket;
pub mod storage;
mod wake;
pub mod wire;

pub use cuda::CudaError;
pub use paths::{SOCKET_DIR, socket_path};

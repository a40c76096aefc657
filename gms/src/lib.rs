//! The GPU memory service: a process that owns GPU memory for others, so that weights outlive the
//! worker that loaded them and a second worker maps them instead of loading them again.
//!
//! ```
//! use gms::client::{ConnectOptions, MemoryManager};
//! use gms::lock::{Granted, Requested};
//! use gms::memory::Memory;
//! use gms::server::{Server, Settings};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // On a GPU: let driver = cuda_sys::Driver::load()?;
//! let driver = cuda_sim::Simulator::builder().build()?.driver();
//! let socket = std::env::temp_dir().join(format!("gms-example-{}.sock", std::process::id()));
//! // Usually a process of its own: `vpmm serve`.
//! let server = Server::bind(Memory::open(&driver, 0)?, Settings::new(&socket))?;
//! let stopper = server.stopper();
//! let server = std::thread::spawn(move || server.run());
//!
//! let mut worker = MemoryManager::new(&driver, 0, &socket)?;
//! assert_eq!(worker.connect(ConnectOptions::new(Requested::RwOrRo))?, Granted::Rw);
//! let at = worker.create_mapping(64 << 20, "weights")?; // fill it, and say what it is:
//! let id = worker.allocation_at(at).ok_or("no allocation")?.allocation_id.clone();
//! worker.metadata_put("layer.0", &id, 0, b"f32, 4096 x 4096")?;
//! worker.commit()?; // waits for the device, then publishes
//!
//! let mut other = MemoryManager::new(&driver, 0, &socket)?;
//! assert_eq!(other.connect(ConnectOptions::new(Requested::RwOrRo))?, Granted::Ro);
//! assert_eq!(other.import_all(Some("weights"))?.len(), 1); // all of it, side by side
//!
//! worker.connect(ConnectOptions::new(Requested::Ro))?;
//! worker.remap_all()?; // at the same address, read-only
//! worker.unmap_all()?; // asleep: the address stays, and no memory is held
//! worker.abort();
//! worker.connect(ConnectOptions::new(Requested::Ro))?;
//! worker.remap_all()?; // awake, or an error if another layout was published meanwhile
//! # worker.close()?;
//! # other.close()?;
//! stopper.stop();
//! server.join().map_err(|_| "the server panicked")??;
//! # Ok(())
//! # }
//! ```
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

/// Compiles the README's example.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

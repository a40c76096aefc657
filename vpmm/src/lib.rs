//! A GPU memory manager on CUDA's virtual memory management: it removes fragmentation by mapping
//! memory elsewhere, not by copying it.
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let sim = cuda_sim::Simulator::builder().build()?;
//! # let driver = vpmm::Driver::new(sim.driver())?;
//! # if false {
//! let driver = vpmm::Driver::load()?;
//! # }
//! let device = driver.device(0)?;
//! let pool = vpmm::Pool::new(&device, &vpmm::PoolConfig::default())?;
//! let stream = device.stream()?;
//!
//! let ptr = pool.malloc(64 << 20, &stream)?;
//! // … kernels on `stream` that use `ptr.address()` …
//! pool.free(ptr, &stream)?;
//! # Ok(())
//! # }
//! ```
//!
//! [`Pool::new`] makes a pool of the default profile, [`Pool::paged`] one of whole pages.
//!
//! # Where to look
//!
//! | | |
//! |---|---|
//! | [`Driver`], [`Device`] | the start: a driver that is loaded, or simulated (`cuda_sim`), and one of its devices |
//! | [`Stream`], [`Event`], [`StreamHandle`] | streams with an owner, borrowed, or by their bare handle |
//! | [`Pool`], [`PoolConfig`], [`PagedConfig`], [`DevicePtr`] | pools, what they are made with, what they give out |
//! | [`Pool::stats`], [`Pool::layout`], [`Pool::snapshot`], [`Pool::validate`] | what a pool holds, where, and whether its books are right |
//! | [`Error`], [`Pool::on_out_of_memory`], [`WaitPolicy`] | how calls fail, and what can be done where memory runs out |
//! | [`MemoryResource`], [`resource`], [`CachingAllocator`] | everything that gives out memory behind one trait, and adaptors on it |
//! | [`DeviceVec`], [`DeviceBuffer`], [`DeviceScalar`], [`PinnedVec`] | containers on any resource |
//! | [`Pool::export`], [`Imported`] | memory for other processes, and of them |
//!
//! # Rooms
//! For whoever changes the code: its modules, most of them private. A module imports only from those above it, but that `driver` makes `device`s and tells watchers of
//! `ordering`'s marks.
//!
//! | room | what it is |
//! |---|---|
//! | `units`, `location` | numbers, where memory is and whose |
//! | `arena`, `pages`, `lock` | storage of nodes, the system's memory; locks for short sections (no driver) |
//! | `fence` | what streams still have to finish (no driver) |
//! | `region` | the map of addresses and its trees (no driver) |
//! | `stats`, `layout`, `memory_map`, `snapshot` | what a pool holds, and where |
//! | `error` | failures |
//! | `fork` | what a child of the process finds |
//! | `driver` | the driver's functions; all calls into it |
//! | `device` | devices, contexts, handles of streams |
//! | `physical`, `reservation`, `mapping`, `event` | one kind of driver object each |
//! | `capture` | streams whose work becomes a graph, and what may not be done beside them |
//! | `stream` | streams and events with an owner, or borrowed |
//! | `budget`, `backing` | how much a pool may hold, and what its memory is made of |
//! | `ordering`, `allocation` | what callers say about streams and ask about pointers |
//! | `out_of_memory` | what callers say about waiting for memory |
//! | `validate` | what a check of a pool found |
//! | `sharing` | memory of other processes, and for them |
//! | `heap` | what both profiles can do |
//! | `paged` | the paged profile |
//! | `default` | the default profile |
//! | `heaps` | heaps beside a pool's main one: of graphs, of tags |
//! | `pool` | the public face |
//! | `resource` | memory resources and adaptors |
//! | `container` | memory with an owner |
//! | `caching` | PyTorch's caching scheme |

mod allocation;
mod arena;
mod backing;
mod budget;
pub mod caching;
mod capture;
mod container;
mod default;
mod device;
mod driver;
mod error;
mod event;
mod fence;
mod fork;
mod heap;
mod heaps;
mod layout;
mod location;
mod lock;
mod mapping;
mod memory_map;
mod ordering;
mod out_of_memory;
mod paged;
mod pages;
mod physical;
mod pool;
mod region;
mod reservation;
pub mod resource;
mod sharing;
pub mod snapshot;
mod stats;
mod stream;
mod units;
mod validate;

pub use allocation::Allocation;
pub use caching::CachingAllocator;
pub use container::{
    DeviceBuffer, DeviceScalar, DeviceSlice, DeviceSliceMut, DeviceVec, PinnedVec, Pod, Transfer,
};
pub use default::{Background, PoolConfig};
pub use device::{Device, StreamHandle};
pub use driver::{Driver, DriverCalls};
pub use error::{Error, Result};
pub use heaps::{Buffers, Contents, Resumed, Suspended};
pub use layout::Layout;
pub use location::{Access, Location, Sharing};
pub use memory_map::{FreePiece, Holder, MemoryMap};
pub use ordering::{Mark, PendingPolicy, Reuse};
pub use out_of_memory::{Recovery, WaitPolicy};
pub use paged::PagedConfig;
pub use pool::{CurrentPool, GraphPool, OutOfMemoryCallback, Pool, Tagged};
pub use resource::MemoryResource;
pub use sharing::{Export, Imported};
pub use stats::Stats;
pub use stream::{Event, Stream, StreamPool};
pub use units::DevicePtr;
pub use validate::Violation;

/// Compiles the README's example.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

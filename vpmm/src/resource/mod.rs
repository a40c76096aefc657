//! Memory resources: anything that gives out memory, behind one trait, and adaptors that stack on it.
//!
//! ```text
//! allocate, deallocate ─▶ adaptor ─▶ adaptor ─▶ … ─▶ resource ─▶ driver
//!                         any of them on any other
//! ```
//!
//! [`MemoryResource`] is what callers see.
//!
//! | what makes memory | RMM's name | |
//! |---|---|---|
//! | [`Pool`](crate::Pool) | | this crate's pools, of both profiles |
//! | [`DeviceMalloc`] | `cuda_memory_resource` | `cuMemAlloc` |
//! | [`DriverPool`] | `cuda_async_memory_resource` | a pool of the driver's, its own or a borrowed one |
//! | [`Managed`] | `managed_memory_resource` | `cuMemAllocManaged` |
//! | [`PinnedHost`] | `pinned_host_memory_resource` | `cuMemHostAlloc` |
//! | [`Callback`] | `callback_memory_resource` | two functions of the caller's |
//! | [`HostMalloc`] | | the program's own memory, for tests |
//!
//! | what divides memory of another resource | RMM's name | |
//! |---|---|---|
//! | [`CoalescingPool`] | `pool_memory_resource` | best fit, free neighbours become one |
//! | [`FixedSize`] | `fixed_size_memory_resource` | blocks of one size |
//! | [`Binning`] | `binning_memory_resource` | a resource for each range of sizes |
//! | [`Arena`] | `arena_memory_resource` | a part for each stream, and one that they share |
//!
//! | what stands on one other and does more | RMM's name | |
//! |---|---|---|
//! | [`Logging`] | `logging_resource_adaptor` | a row for each call, in RMM's format or a fuller one |
//! | [`Statistics`] | `statistics_resource_adaptor` | now, at most, in total; nested |
//! | [`Tracking`] | `tracking_resource_adaptor` | what is allocated, and what was never freed |
//! | [`Limiting`] | `limiting_resource_adaptor` | a limit |
//! | [`FailureCallback`] | `failure_callback_resource_adaptor` | a function that makes room |
//! | [`Aligned`] | `aligned_resource_adaptor` | any alignment |
//! | [`ThreadSafe`] | `thread_safe_resource_adaptor` | one call at a time |
//! | [`Prefetch`] | `prefetch_resource_adaptor` | managed memory on the device before it is used |
//!
//! [`current`] is a device's current resource. The names in the middle are those of RMM's documentation,
//! <https://docs.rapids.ai/api/librmm/stable/>.
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let sim = cuda_sim::Simulator::builder().build()?;
//! # let driver = vpmm::Driver::new(sim.driver())?;
//! # let device = driver.device(0)?;
//! # let stream = device.stream()?;
//! use std::sync::Arc;
//! use vpmm::{MemoryResource, Pool, PoolConfig, resource::DeviceMalloc};
//!
//! let resources: [Arc<dyn MemoryResource>; 2] = [
//!     Arc::new(Pool::new(&device, &PoolConfig::default())?),
//!     Arc::new(DeviceMalloc::new(&device)),
//! ];
//! for resource in &resources {
//!     let ptr = resource.allocate(1000, 256, stream.handle())?;
//!     resource.deallocate(ptr, 1000, 256, stream.handle())?;
//!     println!("{}", resource.describe());
//! }
//! # Ok(())
//! # }
//! ```

mod adaptors;
mod callback;
mod current;
mod description;
mod device_malloc;
mod driver_pool;
mod facts;
mod forward;
mod host;
mod host_memory;
mod identity;
mod live;
mod managed;
mod memory_resource;
mod pinned_host;
mod plain;
mod pool;
mod pools;
mod request;

pub(crate) use adaptors::or_undo;
pub use adaptors::{
    Aligned, Counter, Counters, FailureCallback, Finding, Limiting, LogFormat, Logging,
    Outstanding, Outstandings, Prefetch, Report, Statistics, ThreadSafe, Tracking, TrackingConfig,
};
pub use callback::Callback;
pub use current::{CurrentResource, current, current_for_scope, reset_current, set_current};
pub use description::Description;
pub use device_malloc::DeviceMalloc;
pub use driver_pool::{DriverPool, DriverPoolConfig};
pub use facts::{Checks, Facts};
pub use host::HostMalloc;
pub use host_memory::HostMemory;
pub use identity::Identity;
pub use managed::Managed;
pub use memory_resource::MemoryResource;
pub use pinned_host::PinnedHost;
pub use pools::{
    Arena, ArenaConfig, ArenaDump, Binning, CoalescingConfig, CoalescingPool, FixedSize,
    FixedSizeConfig,
};
pub use request::MIN_ALIGN;
pub(crate) use request::{check_align, check_device, is_of_nothing};

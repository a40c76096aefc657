//! Memory resources: anything that gives out memory, behind one trait, and adaptors that stack on it.
//!
//! ```text
//! allocate, deallocate ─▶ adaptor ─▶ adaptor ─▶ … ─▶ resource ─▶ driver
//!                         any of them on any other
//! ```
//!
//! [`MemoryResource`] is what callers see. What is at the bottom of a stack makes memory
//! ([`DeviceMalloc`], [`DriverPool`], [`Managed`], [`PinnedHost`], [`HostMalloc`], a
//! [`Pool`](crate::Pool)).
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
mod pool;
mod pools;
mod request;

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
pub(crate) use request::{check_align, is_of_nothing};

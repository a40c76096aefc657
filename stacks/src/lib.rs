//! Stacks of resources by name: `limiting(1GiB,arena(cuda-malloc))`.
//!
//! ```text
//! text ─ parse ─▶ Expression ─ kinds ─▶ Stack ─ build ─▶ a resource of vpmm, with those below it
//! ```
//!
//! The command line and the C ABI take resources by these names.
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let sim = cuda_sim::Simulator::builder().build()?;
//! # let device = vpmm::Driver::new(sim.driver())?.device(0)?;
//! use stacks::{Builder, Face, Stack};
//!
//! let stack: Stack = "statistics(limiting(1MiB,cuda-malloc))".parse()?;
//! let built = Builder::new(&device).build(&stack)?;
//! let Face::Statistics(counted) = built.face() else { unreachable!() };
//! let ptr = built.resource().allocate(1000, 256, vpmm::StreamHandle::LEGACY)?;
//! assert_eq!(counted.counters().bytes.current, 1000);
//! built.resource().deallocate(ptr, 1000, 256, vpmm::StreamHandle::LEGACY)?;
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod build;
pub mod bytes;
mod kinds;
mod parse;

pub use build::{Any, Builder, Built, Face, Peak};
pub use kinds::{Kind, Stack};
pub use parse::{StackError, quoted, split_list};

/// Compiles the README's example.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

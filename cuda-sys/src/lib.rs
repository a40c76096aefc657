//! Raw bindings to the CUDA driver and runtime APIs, loaded at run time.

#[macro_use]
mod macros;
mod bindings;
mod constants;
mod loader;
pub mod status;

pub use bindings::driver::DriverApi;
pub use bindings::runtime::RuntimeApi;
pub use loader::Driver;

/// Every type, enum and constant of both APIs, generated from the headers, and
/// the few constants that are casts there. Layouts are asserted when this compiles.
pub mod types {
    pub use crate::bindings::types::*;
    pub use crate::constants::*;
}

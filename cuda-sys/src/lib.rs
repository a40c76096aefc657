//! Raw bindings to the CUDA driver and runtime APIs, loaded at run time.

#[macro_use]
mod macros;
mod bindings;
mod loader;

pub use bindings::driver::DriverApi;
pub use bindings::runtime::RuntimeApi;
pub use bindings::types;
pub use loader::Driver;

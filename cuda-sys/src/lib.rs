//! Raw bindings to the whole CUDA driver API (`cu*`) and runtime API (`cuda*`) of
//! CUDA 13.0, loaded at run time.
//!
//! Nothing is linked: building needs no CUDA toolkit, no header and no libclang, and
//! a program that uses these bindings starts on a machine without a driver. There is
//! no policy here: functions keep their C names, signatures and contracts, for which
//! [NVIDIA's reference][reference] is the word.
//!
//! # A table of optional functions
//!
//! [`Driver::load`] and [`Runtime::load`] open the library and look up every symbol
//! once. Each function of [`DriverApi`] and [`RuntimeApi`] is a field that is `None`
//! where the library lacks the symbol, so absence is data: [`require!`] turns it into
//! an error that names the function, `missing()` lists all of them, and nothing panics.
//!
//! ```
//! use cuda_sys::types::CUresult;
//! use cuda_sys::{Driver, require};
//!
//! fn device_count(driver: &Driver) -> Result<i32, Box<dyn std::error::Error>> {
//!     let init = require!(driver, cuInit)?;
//!     let get_count = require!(driver, cuDeviceGetCount)?;
//!     let mut count = 0;
//!     // SAFETY: cuInit takes no pointer, and its flags must be 0.
//!     let mut code = unsafe { init(0) };
//!     if code == CUresult::CUDA_SUCCESS {
//!         // SAFETY: the driver is initialised and `count` is a valid place for an int.
//!         code = unsafe { get_count(&mut count) };
//!     }
//!     match code {
//!         CUresult::CUDA_SUCCESS => Ok(count),
//!         code => Err(code.into()),
//!     }
//! }
//!
//! match Driver::load() {
//!     Ok(driver) => match device_count(&driver) {
//!         Ok(count) => println!("{count} devices, driver of {:?}", driver.version()),
//!         Err(error) => println!("{error}"),
//!     },
//!     Err(error) => println!("{error}"),
//! }
//! ```
//!
//! A hot path should not test an `Option` at every call: check once what is needed and
//! keep the function pointers.
//!
//! The table can also be filled by a closure that answers symbol names
//! ([`Driver::from_symbols`]), which is how a simulator or a test double plugs in:
//!
//! ```
//! use core::ffi::{CStr, c_uint, c_void};
//! use cuda_sys::{Driver, types::CUresult};
//! use std::sync::Arc;
//!
//! unsafe extern "C" fn init(_flags: c_uint) -> CUresult {
//!     CUresult::CUDA_ERROR_NO_DEVICE
//! }
//!
//! let lookup = |name: &'static CStr| match name.to_bytes() {
//!     b"cuInit" => init as *const c_void,
//!     _ => core::ptr::null(),
//! };
//! // SAFETY: `init` has cuInit's signature and lives as long as the program.
//! let driver = unsafe { Driver::from_symbols("example", lookup, Arc::new(())) };
//! assert_eq!(driver.missing().count(), cuda_sys::DriverApi::SYMBOLS.len() - 1);
//! ```
//!
//! # Names and versions of functions
//!
//! A library exports a function that changed under several names: `cuCtxCreate_v2`,
//! `cuCtxCreate_v4`. C headers hide this behind macros that pick the newest; here every
//! exported name is a field of its own, and the caller picks the oldest that does the
//! work, so that old drivers still serve.
//!
//! - **A plain name may be the oldest version.** `cuMemAlloc` without a suffix is the
//!   interface of CUDA 3.1, with 32-bit device addresses and sizes. That interface is
//!   left out on purpose, so that nobody calls it by mistake: call `cuMemAlloc_v2`.
//! - **`_ptsz` and `_ptds`** are the variants for which the default stream is the
//!   per-thread one. They are present, but naming the stream does the same without them:
//!   [`types::CU_STREAM_PER_THREAD`].
//! - **Virtual memory management** (`cuMemAddressReserve`, `cuMemCreate`, `cuMemMap` and
//!   what belongs to them) has no suffixes.
//!
//! # Values that the headers do not know
//!
//! C enums are newtypes over an integer, such as `CUresult(2)`, with associated
//! constants. A newer driver may answer with a value that these headers do not have;
//! that is a value like any other here, where a Rust `enum` would be undefined behaviour.
//! [`status`] names result codes.
//!
//! # Support
//!
//! 64-bit Linux: x86_64, and aarch64, where the compile-time layout assertions hold but
//! nothing was run yet. The driver may be of any version: what it lacks is absent. The
//! runtime must be of major version 13, for its structs change with the major
//! ([`Runtime::load`] checks). Libraries are never closed.
//!
//! # Licence
//!
//! These are declarations of an interface, generated from NVIDIA's headers with every
//! comment left out; no header is part of this crate. CUDA's libraries are not part of
//! it either and come under NVIDIA's own terms.
//!
//! [reference]: https://docs.nvidia.com/cuda/cuda-driver-api/

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("vpmm-cuda-sys binds CUDA on 64-bit Linux (x86_64 and aarch64) only");

#[macro_use]
mod macros;
mod bindings;
mod constants;
mod loader;
mod missing;
pub mod status;
pub mod version;

pub use bindings::driver::DriverApi;
pub use bindings::runtime::RuntimeApi;
pub use loader::{Attempt, Driver, LoadError, Runtime};
pub use missing::MissingSymbol;

/// Every type, enum and constant of both APIs, generated from the headers, and
/// the few constants that are casts there. Layouts are asserted when this compiles.
///
/// Names are C's, and so is the meaning, for which NVIDIA's reference is the word.
/// Both APIs share one set of types: `cudaStream_t` and `CUstream` are the same.
pub mod types {
    pub use crate::bindings::types::*;
    pub use crate::constants::*;
}

/// Compiles the README's example.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

//! The C ABI of `vpmm`: what `vpmm.h` declares.
//!
//! ```text
//! C, C++ ─▶ a function of `pool`, `driver`, `stream` ─▶ guard ─▶ vpmm
//!                                                       └ a status; the text stays with the thread
//! ```
//!
//! - Handles are opaque. Each is given back once, by its `release` function; null is no handle, and
//!   ignored there.
//! - Structures begin with their own size, which their `init` function sets, so that they can grow:
//!   a program that was built with an older header has the newer fields at their defaults.
//! - Every function that can fail answers a [`vpmm_status`]; [`vpmm_last_error`] has the text. What it
//!   would write through its pointers is written on success only.
//! - No panic leaves a function: it is caught and answered as `VPMM_PANIC`.
//! - All functions may be called from any thread, on the same handles too, except that a handle is
//!   used by nobody while or after it is released.

#![allow(non_camel_case_types, reason = "names as C has them")]

mod driver;
mod guard;
mod options;
mod pool;
mod process;
mod stats;
mod status;
mod stream;
mod torch;
mod version;

pub use driver::{
    vpmm_driver, vpmm_driver_device_count, vpmm_driver_load, vpmm_driver_memory,
    vpmm_driver_release,
};
pub use guard::vpmm_last_error;
pub use options::{vpmm_pool_options, vpmm_pool_options_init, vpmm_profile};
pub use pool::{
    vpmm_free, vpmm_free_any, vpmm_malloc, vpmm_pool, vpmm_pool_create, vpmm_pool_destroy,
    vpmm_pool_layout, vpmm_pool_release, vpmm_pool_reset_peaks, vpmm_pool_stats, vpmm_pool_trim_to,
    vpmm_pool_validate, vpmm_record_stream,
};
pub use process::{
    VPMM_EVERY_DEVICE, vpmm_process_configure, vpmm_process_copy, vpmm_process_download,
    vpmm_process_driver, vpmm_process_fill, vpmm_process_forget_stream, vpmm_process_free,
    vpmm_process_malloc, vpmm_process_pool, vpmm_process_record_stream, vpmm_process_synchronize,
    vpmm_process_upload, vpmm_process_wait_for,
};
pub use stats::{vpmm_stats, vpmm_stats_init};
pub use status::{vpmm_status, vpmm_status_name};
pub use stream::{
    vpmm_stream_create, vpmm_stream_destroy, vpmm_stream_lend, vpmm_stream_synchronize,
    vpmm_stream_take_back,
};

pub use torch::{
    vpmm_torch_alloc, vpmm_torch_base_alloc, vpmm_torch_begin_allocate_to_pool,
    vpmm_torch_end_allocate_to_pool, vpmm_torch_failed_frees, vpmm_torch_free, vpmm_torch_init,
    vpmm_torch_memory_fraction, vpmm_torch_record_stream, vpmm_torch_release_pool,
    vpmm_torch_reset,
};
pub use version::vpmm_version;

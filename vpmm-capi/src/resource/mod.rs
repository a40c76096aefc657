//! Resources and adaptors: memory from anywhere, behind one kind of handle.
//!
//! ```text
//! a text, pools, functions ─▶ vpmm_resource ─▶ the same, standing on it ─▶ …
//! ```
//!
//! - `open`: handles made of texts, pools and other handles
//! - `calls`: memory
//! - `ask`: what a resource is
//! - `books`: counters, what is outstanding, limits, logs, bins
//! - `current`: a device's current resource
//! - `callbacks`: functions of the program as resources

mod ask;
mod books;
mod callbacks;
mod calls;
mod current;
mod open;
mod process_pool;

pub use ask::{
    vpmm_facts, vpmm_facts_init, vpmm_resource_describe, vpmm_resource_facts,
    vpmm_resource_held_bytes, vpmm_resource_is_equal,
};
pub use books::{
    vpmm_counter, vpmm_counters, vpmm_counters_init, vpmm_resource_add_bin,
    vpmm_resource_allocated_bytes, vpmm_resource_counters, vpmm_resource_flush_log,
    vpmm_resource_limit_bytes, vpmm_resource_log_file, vpmm_resource_outstanding,
    vpmm_resource_pop_counters, vpmm_resource_push_counters,
};
pub use callbacks::{
    vpmm_resource_allocate_function, vpmm_resource_callback, vpmm_resource_deallocate_function,
    vpmm_resource_failure_callback, vpmm_resource_failure_function,
};
pub use calls::{vpmm_resource_allocate, vpmm_resource_deallocate, vpmm_resource_record_stream};
pub use current::{vpmm_resource_current, vpmm_resource_set_current};
pub use open::{
    vpmm_resource, vpmm_resource_of_pool, vpmm_resource_open, vpmm_resource_pool,
    vpmm_resource_release, vpmm_resource_upstream,
};

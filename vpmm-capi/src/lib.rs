//! The C ABI of `vpmm`: what `vpmm.h` declares.
//!
//! ```text
//! C, C++ ─▶ a function of `pool`, `driver`, `stream` ─▶ guard ─▶ vpmm
//!                                                       └ a status; the text stays with the thread
//! ```
//!
//! - Handles are opaque. Each is given back once, by its `release` function; null is no handle, and
//!   ignored there.
//! - Structures begin with their own size, which the program tells their `init` function, so that they
//!   can grow: a program that was built with an older header has the newer fields at their defaults.
//! - Every function that can fail answers a [`vpmm_status`], but for those that PyTorch calls, which
//!   throw where it expects that; [`vpmm_last_error`] has the text. What it
//!   would write through its pointers is written on success only.
//! - No panic leaves a function: it is caught and answered as `VPMM_PANIC`.
//! - All functions may be called from any thread, on the same handles too, except that a handle is
//!   used by nobody while or after it is released.

#![allow(non_camel_case_types, reason = "names as C has them")]

mod context;
mod driver;
mod graph;
mod grows;
mod guard;
mod kept;
mod known;
mod options;
mod pool;
mod process;
mod python;
mod resource;
mod service;
mod share;
mod shortage;
mod snapshot;
mod stats;
mod status;
mod stream;
mod tagged;
mod torch;
mod version;

pub use context::vpmm_finish;
pub use driver::{
    vpmm_driver, vpmm_driver_device_count, vpmm_driver_load, vpmm_driver_memory,
    vpmm_driver_release,
};
pub use graph::{
    vpmm_graph_pool, vpmm_graph_pool_begin, vpmm_graph_pool_create, vpmm_graph_pool_end,
    vpmm_graph_pool_finish, vpmm_graph_pool_release,
};
pub use guard::vpmm_last_error;
pub use options::{
    vpmm_location, vpmm_pool_flag, vpmm_pool_options, vpmm_pool_options_init, vpmm_profile,
    vpmm_reuse_off, vpmm_sharing,
};
pub use pool::{
    vpmm_free, vpmm_free_any, vpmm_malloc, vpmm_pool, vpmm_pool_allocation, vpmm_pool_create,
    vpmm_pool_destroy, vpmm_pool_layout, vpmm_pool_limit_to, vpmm_pool_release,
    vpmm_pool_reset_peaks, vpmm_pool_stats, vpmm_pool_trim_to, vpmm_pool_validate,
    vpmm_record_stream,
};
pub use process::{
    VPMM_EVERY_DEVICE, vpmm_process_configure, vpmm_process_copy, vpmm_process_download,
    vpmm_process_driver, vpmm_process_fill, vpmm_process_forget_stream, vpmm_process_free,
    vpmm_process_has_pool, vpmm_process_keep_stream, vpmm_process_malloc, vpmm_process_pool,
    vpmm_process_pop_tag, vpmm_process_push_tag, vpmm_process_push_tag_on,
    vpmm_process_record_history, vpmm_process_record_stream, vpmm_process_snapshot,
    vpmm_process_synchronize, vpmm_process_upload, vpmm_process_wait_for, vpmm_where,
};
pub use python::{
    vpmm_python_allocate, vpmm_python_begin_torch, vpmm_python_check, vpmm_python_close,
    vpmm_python_deallocate, vpmm_python_delete, vpmm_python_delete_versioned, vpmm_python_end,
    vpmm_python_end_capsule, vpmm_python_end_memory, vpmm_python_end_torch, vpmm_python_finish,
    vpmm_python_forked, vpmm_python_free_memory, vpmm_python_functions, vpmm_python_go_on,
    vpmm_python_make_memory, vpmm_python_make_room, vpmm_python_memory, vpmm_python_push_heap,
    vpmm_python_push_tag, vpmm_python_rest, vpmm_python_visit_allocation, vpmm_python_visit_key,
    vpmm_python_visit_value, vpmm_python_where, vpmm_python_write,
};
pub use resource::{
    vpmm_counter, vpmm_counters, vpmm_counters_init, vpmm_facts, vpmm_facts_init, vpmm_resource,
    vpmm_resource_add_bin, vpmm_resource_allocate, vpmm_resource_allocate_function,
    vpmm_resource_allocated_bytes, vpmm_resource_callback, vpmm_resource_counters,
    vpmm_resource_current, vpmm_resource_deallocate, vpmm_resource_deallocate_function,
    vpmm_resource_describe, vpmm_resource_facts, vpmm_resource_failure_callback,
    vpmm_resource_failure_function, vpmm_resource_flush_log, vpmm_resource_held_bytes,
    vpmm_resource_is_equal, vpmm_resource_limit_bytes, vpmm_resource_log_file,
    vpmm_resource_of_pool, vpmm_resource_open, vpmm_resource_outstanding, vpmm_resource_pool,
    vpmm_resource_pop_counters, vpmm_resource_push_counters, vpmm_resource_record_stream,
    vpmm_resource_release, vpmm_resource_set_current, vpmm_resource_upstream,
};
pub use service::{
    vpmm_gms, vpmm_gms_abort, vpmm_gms_allocate_handle, vpmm_gms_allocation, vpmm_gms_check,
    vpmm_gms_close, vpmm_gms_commit, vpmm_gms_commit_layout, vpmm_gms_connect,
    vpmm_gms_create_mapping, vpmm_gms_create_mappings, vpmm_gms_create_scratch_mapping,
    vpmm_gms_destroy_mapping, vpmm_gms_destroy_scratch_mapping, vpmm_gms_export_handle,
    vpmm_gms_free_address, vpmm_gms_free_handle, vpmm_gms_grant, vpmm_gms_handle_info,
    vpmm_gms_heap, vpmm_gms_heap_open, vpmm_gms_heap_push, vpmm_gms_heap_release,
    vpmm_gms_import_all, vpmm_gms_layout_hash, vpmm_gms_list_handles, vpmm_gms_list_mappings,
    vpmm_gms_lock, vpmm_gms_map, vpmm_gms_metadata_delete, vpmm_gms_metadata_get,
    vpmm_gms_metadata_list, vpmm_gms_metadata_put, vpmm_gms_open, vpmm_gms_prepare_scratch,
    vpmm_gms_reallocate_all, vpmm_gms_release, vpmm_gms_remap_all, vpmm_gms_reserve,
    vpmm_gms_scratch_summary, vpmm_gms_set_answer_timeout, vpmm_gms_set_check,
    vpmm_gms_set_interruptible, vpmm_gms_set_scratch_block, vpmm_gms_set_tag, vpmm_gms_socket_path,
    vpmm_gms_state, vpmm_gms_state_init, vpmm_gms_state_of, vpmm_gms_torch_alloc,
    vpmm_gms_torch_begin, vpmm_gms_torch_end, vpmm_gms_torch_free, vpmm_gms_unmap,
    vpmm_gms_unmap_all, vpmm_gms_visit_allocation, vpmm_gms_visit_key, vpmm_gms_visit_value,
};
pub use share::{
    vpmm_access, vpmm_export, vpmm_export_create, vpmm_export_release, vpmm_export_send,
    vpmm_export_send_all, vpmm_import, vpmm_import_memory, vpmm_import_receive,
    vpmm_import_receive_more, vpmm_import_release, vpmm_import_translate, vpmm_pool_access,
    vpmm_pool_set_access,
};
pub use shortage::{
    vpmm_pool_on_out_of_memory, vpmm_shortage, vpmm_shortage_function, vpmm_shortage_release,
};
pub use snapshot::{vpmm_pool_snapshot, vpmm_write};
pub use stats::{vpmm_stats, vpmm_stats_init};
pub use status::{vpmm_status, vpmm_status_name};
pub use stream::{
    vpmm_stream_create, vpmm_stream_destroy, vpmm_stream_lend, vpmm_stream_synchronize,
    vpmm_stream_take_back,
};
pub use tagged::{
    vpmm_contents, vpmm_resume, vpmm_suspend, vpmm_tagged, vpmm_tagged_is_asleep,
    vpmm_tagged_malloc, vpmm_tagged_open, vpmm_tagged_release, vpmm_tagged_stats,
    vpmm_tagged_trim_to,
};

pub use torch::{
    vpmm_torch_alloc, vpmm_torch_answer_cache_info, vpmm_torch_base_alloc,
    vpmm_torch_begin_allocate_to_pool, vpmm_torch_end_allocate_to_pool, vpmm_torch_failed_frees,
    vpmm_torch_failed_requests, vpmm_torch_free, vpmm_torch_init, vpmm_torch_memory_fraction,
    vpmm_torch_record_stream, vpmm_torch_release_pool, vpmm_torch_reset,
};
pub use version::vpmm_version;

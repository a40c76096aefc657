//! Pools for the memory of CUDA graphs.

use std::ffi::c_void;
use std::sync::Arc;

use vpmm_core::GraphPool;

use crate::driver::Loaded;
use crate::guard::{given, make, release, with};
use crate::pool::vpmm_pool;
use crate::status::vpmm_status;

/// A pool for the memory of one CUDA graph, or of several that never run at the same time.
pub struct vpmm_graph_pool {
    // First, so that its driver is there when it ends.
    graph: GraphPool,
    loaded: Arc<Loaded>,
}

/// Makes a pool for the memory of a graph. It counts towards the pool's limit.
///
/// # Safety
/// `pool` is null or a handle; `out` is null or has room for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_graph_pool_create(
    pool: *const vpmm_pool,
    out: *mut *mut vpmm_graph_pool,
) -> vpmm_status {
    let work = || {
        // SAFETY: the caller vouches for it.
        let pool = unsafe { given(pool, "pool") }?;
        let graph = pool.pool().graph_pool()?;
        let graph = vpmm_graph_pool { graph, loaded: Arc::clone(pool.loaded()) };
        let handle = Box::into_raw(Box::new(graph));
        Ok(handle)
    };
    // SAFETY: the caller vouches for it.
    unsafe { make(out, work) }
}

/// From now on until `vpmm_graph_pool_end`, what is allocated of the pool on `stream`, and on streams
/// that take part in the same capture, comes from here. Before the capture, or in it.
///
/// # Safety
/// `graph` is null or a handle; the stream is alive until the end.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_graph_pool_begin(
    graph: *const vpmm_graph_pool,
    stream: *mut c_void,
) -> vpmm_status {
    let work = |graph: &vpmm_graph_pool| {
        // SAFETY: the caller vouches for it.
        Ok(graph.graph.begin(unsafe { graph.loaded.stream(stream) })?)
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(graph, "graph", work) }
}

/// The capture on `stream` needs no more memory: best called when it has ended.
///
/// # Safety
/// `graph` is null or a handle; the stream is alive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_graph_pool_end(
    graph: *const vpmm_graph_pool,
    stream: *mut c_void,
) -> vpmm_status {
    let work = |graph: &vpmm_graph_pool| {
        // SAFETY: the caller vouches for it.
        Ok(graph.graph.end(unsafe { graph.loaded.stream(stream) })?)
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(graph, "graph", work) }
}

/// Gives the memory back once everything enqueued on `stream` so far has finished: all launches of the
/// graphs come before that. Does not wait.
///
/// # Safety
/// `graph` is null or a handle; the stream is alive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_graph_pool_finish(
    graph: *const vpmm_graph_pool,
    stream: *mut c_void,
) -> vpmm_status {
    let work = |graph: &vpmm_graph_pool| {
        // SAFETY: the caller vouches for it.
        Ok(graph.graph.release(unsafe { graph.loaded.stream(stream) })?)
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(graph, "graph", work) }
}

/// Gives a handle back, which says that the graphs are launched no more. Without
/// `vpmm_graph_pool_finish` the memory goes back once the host has waited for the whole device, or with
/// the pool.
///
/// # Safety
/// `graph` is null, or a handle that is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_graph_pool_release(graph: *mut vpmm_graph_pool) {
    // SAFETY: made by `Box::into_raw` in `vpmm_graph_pool_create`, given back once.
    unsafe { release(graph) };
}

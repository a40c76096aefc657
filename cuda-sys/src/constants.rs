//! Constants that the headers define as macros with a cast, which bindgen leaves out.
//!
//! They are re-exported from [`crate::types`] beside the generated ones. The
//! harness's drift test compares this list with the headers, so none is missing.

use core::ffi::{c_int, c_void};
use core::ptr::without_provenance_mut;

use crate::bindings::types::{
    CU_LAUNCH_PARAM_BUFFER_POINTER_AS_INT, CU_LAUNCH_PARAM_BUFFER_SIZE_AS_INT,
    CU_LAUNCH_PARAM_END_AS_INT, CUdevice, CUstream, cudaStream_t,
};

/// The legacy default stream: it synchronises with every blocking stream of its context.
pub const CU_STREAM_LEGACY: CUstream = without_provenance_mut(0x1);

/// The calling thread's own default stream. The handle means another stream on every thread.
pub const CU_STREAM_PER_THREAD: CUstream = without_provenance_mut(0x2);

/// [`CU_STREAM_LEGACY`] as the runtime API spells it.
#[allow(non_upper_case_globals)]
pub const cudaStreamLegacy: cudaStream_t = CU_STREAM_LEGACY;

/// [`CU_STREAM_PER_THREAD`] as the runtime API spells it.
#[allow(non_upper_case_globals)]
pub const cudaStreamPerThread: cudaStream_t = CU_STREAM_PER_THREAD;

/// Ends the `extra` array of `cuLaunchKernel`.
pub const CU_LAUNCH_PARAM_END: *mut c_void =
    without_provenance_mut(CU_LAUNCH_PARAM_END_AS_INT as usize);

/// In the `extra` array of `cuLaunchKernel`: the next entry points to the packed parameters.
pub const CU_LAUNCH_PARAM_BUFFER_POINTER: *mut c_void =
    without_provenance_mut(CU_LAUNCH_PARAM_BUFFER_POINTER_AS_INT as usize);

/// In the `extra` array of `cuLaunchKernel`: the next entry points to the packed parameters' size.
pub const CU_LAUNCH_PARAM_BUFFER_SIZE: *mut c_void =
    without_provenance_mut(CU_LAUNCH_PARAM_BUFFER_SIZE_AS_INT as usize);

/// The device number that stands for the CPU.
pub const CU_DEVICE_CPU: CUdevice = -1;

/// A device number that no device has.
pub const CU_DEVICE_INVALID: CUdevice = -2;

/// [`CU_DEVICE_CPU`] as the runtime API spells it.
#[allow(non_upper_case_globals)]
pub const cudaCpuDeviceId: c_int = CU_DEVICE_CPU;

/// [`CU_DEVICE_INVALID`] as the runtime API spells it.
#[allow(non_upper_case_globals)]
pub const cudaInvalidDeviceId: c_int = CU_DEVICE_INVALID;

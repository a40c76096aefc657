//! The driver's functions, each of which is there once the table is.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

use cuda_sys::types::*;

use super::CudaError;

macro_rules! driver_calls {
    ($( $name:ident ( $( $arg:ident : $ty:ty ),* $(,)? ) ; )*) => {
        #[allow(non_snake_case)]
        pub(super) struct Table {
            $( $name: unsafe extern "C" fn($( $ty ),*) -> CUresult, )*
        }

        #[allow(non_snake_case, clippy::missing_safety_doc, clippy::too_many_arguments)]
        impl Table {
            /// Takes every function, or names the first that is missing.
            pub(super) fn resolve(api: &cuda_sys::DriverApi) -> Result<Self, CudaError> {
                Ok(Self { $( $name: api.$name.ok_or(CudaError::Missing(stringify!($name)))?, )* })
            }

            $(
                /// Calls the driver function of this name.
                ///
                /// # Safety
                /// Its contract in the CUDA driver API reference: pointers valid for what it reads
                /// and writes, handles alive.
                pub(super) unsafe fn $name(&self, $( $arg: $ty ),*) -> Result<(), CudaError> {
                    // SAFETY: the pointer has this signature (cuda_sys declares it from the
                    // header), the library stays loaded while its `Driver` lives, which is beside
                    // the table, and the caller keeps the function's own contract.
                    match unsafe { (self.$name)($( $arg ),*) } {
                        CUresult::CUDA_SUCCESS => Ok(()),
                        code => Err(CudaError::Call { call: stringify!($name), code }),
                    }
                }
            )*
        }
    };
}

driver_calls! {
    cuInit(flags: c_uint);
    cuDeviceGetCount(count: *mut c_int);
    cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
    cuDeviceGetAttribute(value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice);
    cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice);
    cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice);
    cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
    cuDevicePrimaryCtxRelease_v2(device: CUdevice);
    cuCtxGetCurrent(context: *mut CUcontext);
    cuCtxPushCurrent_v2(context: CUcontext);
    cuCtxPopCurrent_v2(context: *mut CUcontext);
    cuCtxSynchronize();
    cuMemGetAllocationGranularity(
        bytes: *mut usize,
        properties: *const CUmemAllocationProp,
        option: CUmemAllocationGranularity_flags,
    );
    cuMemCreate(
        handle: *mut CUmemGenericAllocationHandle,
        bytes: usize,
        properties: *const CUmemAllocationProp,
        flags: c_ulonglong,
    );
    cuMemRelease(handle: CUmemGenericAllocationHandle);
    cuMemExportToShareableHandle(
        shared: *mut c_void,
        handle: CUmemGenericAllocationHandle,
        kind: CUmemAllocationHandleType,
        flags: c_ulonglong,
    );
    cuMemImportFromShareableHandle(
        handle: *mut CUmemGenericAllocationHandle,
        shared: *mut c_void,
        kind: CUmemAllocationHandleType,
    );
    cuMemAddressReserve(
        address: *mut CUdeviceptr,
        bytes: usize,
        alignment: usize,
        hint: CUdeviceptr,
        flags: c_ulonglong,
    );
    cuMemAddressFree(address: CUdeviceptr, bytes: usize);
    cuMemMap(
        address: CUdeviceptr,
        bytes: usize,
        offset: usize,
        handle: CUmemGenericAllocationHandle,
        flags: c_ulonglong,
    );
    cuMemUnmap(address: CUdeviceptr, bytes: usize);
    cuMemSetAccess(
        address: CUdeviceptr,
        bytes: usize,
        access: *const CUmemAccessDesc,
        count: usize,
    );
    cuMemAllocHost_v2(memory: *mut *mut c_void, bytes: usize);
    cuMemFreeHost(memory: *mut c_void);
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream);
    cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream);
    cuStreamCreate(stream: *mut CUstream, flags: c_uint);
    cuStreamSynchronize(stream: CUstream);
    cuStreamDestroy_v2(stream: CUstream);
}

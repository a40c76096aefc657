//! The C functions of many simulators in one process.
//!
//! A slot of the driver's table is a bare function without context. So there is a fixed number
//! of simulator slots, and a set of functions for each, which know their slot as a constant and
//! hand it to the one real body of each call.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::{Arc, OnceLock, Weak};

use cuda_sys::DriverApi;
use cuda_sys::types::*;
use parking_lot::{Mutex, RwLock};

use crate::arguments::FromC;
use crate::call::{Call, Shared};
use crate::stream_calls as stream;
use crate::{allocate, capture, context, copy, device, event, managed, module, pool, vmm};

/// How many simulators can live in a process at a time.
pub(crate) const SLOTS: usize = 64;

static SIMULATORS: [RwLock<Weak<Shared>>; SLOTS] = [const { RwLock::new(Weak::new()) }; SLOTS];
static CLAIMING: Mutex<()> = Mutex::new(());

/// Which function of the table a call goes through: its index in [`NAMES`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Function(pub(crate) usize);

/// Puts a new simulator into a free slot; `None` if there is none.
pub(crate) fn claim(build: impl FnOnce(usize, Weak<Shared>) -> Shared) -> Option<Arc<Shared>> {
    let _one_at_a_time = CLAIMING.lock();
    let slot = SIMULATORS.iter().position(|slot| slot.read().strong_count() == 0)?;
    let shared = Arc::new_cyclic(|me| build(slot, me.clone()));
    *SIMULATORS[slot].write() = Arc::downgrade(&shared);
    Some(shared)
}

fn enter(
    slot: usize,
    function: Function,
    body: &mut dyn FnMut(&mut Call<'_>) -> Result<(), CUresult>,
) -> CUresult {
    let shared = SIMULATORS[slot].read().upgrade();
    shared.map_or(CUresult::CUDA_ERROR_DEINITIALIZED, |shared| shared.enter(function, body))
}

/// The C function of a slot by its exact name.
pub(crate) fn address(slot: usize, name: &str) -> Option<*const c_void> {
    static INDEX: OnceLock<HashMap<&'static str, usize>> = OnceLock::new();
    let index =
        INDEX.get_or_init(|| NAMES.iter().enumerate().map(|(i, &name)| (name, i)).collect());
    index.get(name).map(|&at| ADDRESSES[slot]()[at])
}

/// As [`address`], for a loader: null if there is none.
pub(crate) fn symbol(slot: usize, name: &CStr) -> *const c_void {
    name.to_str().ok().and_then(|name| address(slot, name)).unwrap_or(std::ptr::null())
}

/// Declares the functions: the C name and arguments, and the handler that does the work.
macro_rules! functions {
    ($( $name:ident ( $( $arg:ident : $ty:ty ),* ) = $handler:path; )*) => {
        /// The names of the functions that the simulator has.
        pub(crate) const NAMES: &[&str] = &[ $( stringify!($name) ),* ];

        #[allow(non_camel_case_types, clippy::enum_variant_names)]
        enum Index { $( $name ),* }

        /// The one body of each function.
        #[allow(non_snake_case, clippy::too_many_arguments)]
        mod bodies {
            use super::*;

            $(
                pub(super) unsafe fn $name(slot: usize, $( $arg: $ty ),*) -> CUresult {
                    enter(slot, Function(Index::$name as usize), &mut |_call| {
                        // SAFETY: the caller of the C function keeps to its contract, so that
                        // each pointer is null or valid for what the call documents.
                        $handler(_call, $( unsafe { FromC::from_c($arg) } ),*)
                    })
                }
            )*
        }

        /// The C functions, once for each slot.
        #[allow(non_snake_case, clippy::too_many_arguments)]
        mod entries {
            use super::*;

            $(
                pub(super) unsafe extern "C" fn $name<const SLOT: usize>(
                    $( $arg: $ty ),*
                ) -> CUresult {
                    // SAFETY: passes on the caller's own arguments under the same contract.
                    unsafe { bodies::$name(SLOT, $( $arg ),*) }
                }
            )*
        }

        // Each function has the signature that the bindings declare for its name.
        const _: DriverApi = DriverApi {
            $( $name: Some(entries::$name::<0>), )*
            ..DriverApi::EMPTY
        };

        fn addresses<const SLOT: usize>() -> [*const c_void; NAMES.len()] {
            [ $(
                entries::$name::<SLOT> as unsafe extern "C" fn($( $ty ),*) -> CUresult
                    as *const c_void
            ),* ]
        }
    };
}

macro_rules! for_each_slot {
    ($( $slot:literal )*) => {
        static ADDRESSES: [fn() -> [*const c_void; NAMES.len()]; SLOTS] =
            [ $( addresses::<$slot> ),* ];
    };
}

for_each_slot! {
    0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
    32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63
}

functions! {
    cuInit(flags: c_uint) = device::init;
    cuDriverGetVersion(version: *mut c_int) = device::driver_version;
    cuGetErrorName(code: CUresult, out: *mut *const c_char) = device::error_name;
    cuGetErrorString(code: CUresult, out: *mut *const c_char) = device::error_string;
    cuGetProcAddress_v2(
        symbol: *const c_char, out: *mut *mut c_void, version: c_int, flags: cuuint64_t,
        status: *mut CUdriverProcAddressQueryResult
    ) = device::proc_address;

    cuDeviceGet(out: *mut CUdevice, ordinal: c_int) = device::get;
    cuDeviceGetCount(out: *mut c_int) = device::count;
    cuDeviceGetName(out: *mut c_char, length: c_int, device: CUdevice) = device::name;
    cuDeviceGetUuid(out: *mut CUuuid, device: CUdevice) = device::uuid;
    cuDeviceGetUuid_v2(out: *mut CUuuid, device: CUdevice) = device::uuid;
    cuDeviceTotalMem_v2(out: *mut usize, device: CUdevice) = device::total_memory;
    cuDeviceGetAttribute(out: *mut c_int, attribute: CUdevice_attribute, device: CUdevice) =
        device::attribute;
    cuDeviceGetPCIBusId(out: *mut c_char, length: c_int, device: CUdevice) = device::pci_bus_id;
    cuDeviceCanAccessPeer(out: *mut c_int, device: CUdevice, peer: CUdevice) =
        device::can_access_peer;
    cuDeviceGetP2PAttribute(
        out: *mut c_int, attribute: CUdevice_P2PAttribute, device: CUdevice, peer: CUdevice
    ) = device::p2p_attribute;
    cuDeviceGetDefaultMemPool(out: *mut CUmemoryPool, device: CUdevice) = pool::device_default;
    cuDeviceGetMemPool(out: *mut CUmemoryPool, device: CUdevice) = pool::device_current;
    cuDeviceSetMemPool(device: CUdevice, pool: CUmemoryPool) = pool::set_device_current;

    cuDevicePrimaryCtxRetain(out: *mut CUcontext, device: CUdevice) = context::primary_retain;
    cuDevicePrimaryCtxRelease_v2(device: CUdevice) = context::primary_release;
    cuDevicePrimaryCtxReset_v2(device: CUdevice) = context::primary_reset;
    cuDevicePrimaryCtxSetFlags_v2(device: CUdevice, flags: c_uint) = context::primary_flags;
    cuDevicePrimaryCtxGetState(device: CUdevice, flags: *mut c_uint, active: *mut c_int) =
        context::primary_state;
    cuCtxCreate_v2(out: *mut CUcontext, flags: c_uint, device: CUdevice) = context::create;
    cuCtxCreate_v3(
        out: *mut CUcontext, affinity: *mut CUexecAffinityParam, count: c_int, flags: c_uint,
        device: CUdevice
    ) = context::create_with_affinity;
    cuCtxCreate_v4(
        out: *mut CUcontext, params: *mut CUctxCreateParams, flags: c_uint, device: CUdevice
    ) = context::create_with_params;
    cuCtxDestroy_v2(context: CUcontext) = context::destroy;
    cuCtxPushCurrent_v2(context: CUcontext) = context::push_current;
    cuCtxPopCurrent_v2(out: *mut CUcontext) = context::pop_current;
    cuCtxSetCurrent(context: CUcontext) = context::set_current;
    cuCtxGetCurrent(out: *mut CUcontext) = context::get_current;
    cuCtxGetDevice(out: *mut CUdevice) = context::get_device;
    cuCtxGetDevice_v2(out: *mut CUdevice, context: CUcontext) = context::get_device_of;
    cuCtxGetFlags(out: *mut c_uint) = context::get_flags;
    cuCtxGetId(context: CUcontext, out: *mut u64) = context::get_id;
    cuCtxGetApiVersion(context: CUcontext, out: *mut c_uint) = context::get_api_version;
    cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) = context::priority_range;
    cuCtxSynchronize() = context::synchronize;
    cuCtxSynchronize_v2(context: CUcontext) = context::synchronize_of;
    cuCtxEnablePeerAccess(peer: CUcontext, flags: c_uint) = context::enable_peer_access;
    cuCtxDisablePeerAccess(peer: CUcontext) = context::disable_peer_access;

    cuStreamCreate(out: *mut CUstream, flags: c_uint) = stream::create;
    cuStreamCreateWithPriority(out: *mut CUstream, flags: c_uint, priority: c_int) =
        stream::create_with_priority;
    cuStreamDestroy_v2(stream: CUstream) = stream::destroy;
    cuStreamQuery(stream: CUstream) = stream::query;
    cuStreamSynchronize(stream: CUstream) = stream::synchronize;
    cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint) = event::wait;
    cuStreamGetId(stream: CUstream, out: *mut u64) = stream::get_id;
    cuStreamGetFlags(stream: CUstream, out: *mut c_uint) = stream::get_flags;
    cuStreamGetPriority(stream: CUstream, out: *mut c_int) = stream::get_priority;
    cuStreamGetCtx(stream: CUstream, out: *mut CUcontext) = stream::get_context;
    cuStreamGetDevice(stream: CUstream, out: *mut CUdevice) = stream::get_device;
    cuLaunchHostFunc(stream: CUstream, function: CUhostFn, data: *mut c_void) =
        stream::launch_host_function;
    cuStreamAddCallback(
        stream: CUstream, function: CUstreamCallback, data: *mut c_void, flags: c_uint
    ) = stream::add_callback;
    cuStreamWriteValue32_v2(stream: CUstream, to: CUdeviceptr, value: cuuint32_t, flags: c_uint) =
        stream::values::write32;
    cuStreamWriteValue64_v2(stream: CUstream, to: CUdeviceptr, value: cuuint64_t, flags: c_uint) =
        stream::values::write64;
    cuStreamWaitValue32_v2(stream: CUstream, at: CUdeviceptr, value: cuuint32_t, flags: c_uint) =
        stream::values::wait32;
    cuStreamWaitValue64_v2(stream: CUstream, at: CUdeviceptr, value: cuuint64_t, flags: c_uint) =
        stream::values::wait64;

    cuEventCreate(out: *mut CUevent, flags: c_uint) = event::create;
    cuEventDestroy_v2(event: CUevent) = event::destroy;
    cuEventRecord(event: CUevent, stream: CUstream) = event::record;
    cuEventRecordWithFlags(event: CUevent, stream: CUstream, flags: c_uint) =
        event::record_with_flags;
    cuEventQuery(event: CUevent) = event::query;
    cuEventSynchronize(event: CUevent) = event::synchronize;
    cuEventElapsedTime(out: *mut f32, start: CUevent, end: CUevent) = event::elapsed;
    cuEventElapsedTime_v2(out: *mut f32, start: CUevent, end: CUevent) = event::elapsed;

    cuStreamBeginCapture_v2(stream: CUstream, mode: CUstreamCaptureMode) = capture::begin;
    cuStreamEndCapture(stream: CUstream, out: *mut CUgraph) = capture::end;
    cuStreamIsCapturing(stream: CUstream, out: *mut CUstreamCaptureStatus) = capture::is_capturing;
    cuStreamGetCaptureInfo(
        stream: CUstream, status: *mut CUstreamCaptureStatus, id: *mut cuuint64_t
    ) = capture::info;
    cuStreamGetCaptureInfo_v2(
        stream: CUstream, status: *mut CUstreamCaptureStatus, id: *mut cuuint64_t,
        graph: *mut CUgraph, nodes: *mut *const CUgraphNode, count: *mut usize
    ) = capture::info_v2;
    cuStreamGetCaptureInfo_v3(
        stream: CUstream, status: *mut CUstreamCaptureStatus, id: *mut cuuint64_t,
        graph: *mut CUgraph, nodes: *mut *const CUgraphNode, edges: *mut *const CUgraphEdgeData,
        count: *mut usize
    ) = capture::info_v3;
    cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode) = capture::exchange_mode;
    cuGraphDestroy(graph: CUgraph) = capture::destroy_graph;
    cuGraphGetNodes(graph: CUgraph, nodes: *mut CUgraphNode, count: *mut usize) =
        capture::graph_nodes;
    cuGraphInstantiateWithFlags(out: *mut CUgraphExec, graph: CUgraph, flags: u64) =
        capture::instantiate;
    cuGraphExecDestroy(executable: CUgraphExec) = capture::destroy_executable;
    cuGraphLaunch(executable: CUgraphExec, stream: CUstream) = capture::launch;

    cuMemAddressReserve(
        out: *mut CUdeviceptr, size: usize, alignment: usize, hint: CUdeviceptr, flags: u64
    ) = vmm::reserve;
    cuMemAddressFree(start: CUdeviceptr, size: usize) = vmm::address_free;
    cuMemGetAllocationGranularity(
        out: *mut usize, prop: *const CUmemAllocationProp, option: CUmemAllocationGranularity_flags
    ) = vmm::granularity;
    cuMemCreate(
        out: *mut CUmemGenericAllocationHandle, size: usize, prop: *const CUmemAllocationProp,
        flags: u64
    ) = vmm::create;
    cuMemRelease(handle: CUmemGenericAllocationHandle) = vmm::release;
    cuMemRetainAllocationHandle(out: *mut CUmemGenericAllocationHandle, at: *mut c_void) =
        vmm::retain;
    cuMemMap(
        at: CUdeviceptr, size: usize, offset: usize, handle: CUmemGenericAllocationHandle,
        flags: u64
    ) = vmm::map;
    cuMemUnmap(at: CUdeviceptr, size: usize) = vmm::unmap;
    cuMemSetAccess(at: CUdeviceptr, size: usize, list: *const CUmemAccessDesc, count: usize) =
        vmm::set_access;
    cuMemGetAccess(out: *mut u64, location: *const CUmemLocation, at: CUdeviceptr) =
        vmm::get_access;
    cuMemGetAllocationPropertiesFromHandle(
        out: *mut CUmemAllocationProp, handle: CUmemGenericAllocationHandle
    ) = vmm::properties;
    cuMemExportToShareableHandle(
        out: *mut c_void, handle: CUmemGenericAllocationHandle,
        handle_type: CUmemAllocationHandleType, flags: u64
    ) = vmm::export;
    cuMemImportFromShareableHandle(
        out: *mut CUmemGenericAllocationHandle, shared: *mut c_void,
        handle_type: CUmemAllocationHandleType
    ) = vmm::import;

    cuMemAlloc_v2(out: *mut CUdeviceptr, bytes: usize) = allocate::allocate;
    cuMemFree_v2(at: CUdeviceptr) = allocate::free;
    cuMemAllocManaged(out: *mut CUdeviceptr, bytes: usize, flags: c_uint) = managed::allocate;
    cuMemPrefetchAsync(at: CUdeviceptr, bytes: usize, device: CUdevice, stream: CUstream) =
        managed::prefetch;
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) = allocate::info;
    cuMemGetAddressRange_v2(start: *mut CUdeviceptr, size: *mut usize, at: CUdeviceptr) =
        allocate::address_range;
    cuMemAllocHost_v2(out: *mut *mut c_void, bytes: usize) = allocate::host_allocate;
    cuMemHostAlloc(out: *mut *mut c_void, bytes: usize, flags: c_uint) =
        allocate::host_allocate_with_flags;
    cuMemFreeHost(at: *mut c_void) = allocate::host_free;
    cuMemHostRegister_v2(at: *mut c_void, bytes: usize, flags: c_uint) = allocate::host_register;
    cuMemHostUnregister(at: *mut c_void) = allocate::host_unregister;
    cuMemHostGetDevicePointer_v2(out: *mut CUdeviceptr, at: *mut c_void, flags: c_uint) =
        allocate::host_device_pointer;
    cuMemHostGetFlags(out: *mut c_uint, at: *mut c_void) = allocate::host_flags;
    cuPointerGetAttribute(out: *mut c_void, attribute: CUpointer_attribute, at: CUdeviceptr) =
        allocate::pointer_attribute;
    cuPointerGetAttributes(
        count: c_uint, attributes: *mut CUpointer_attribute, out: *mut *mut c_void, at: CUdeviceptr
    ) = allocate::pointer_attributes;

    cuMemAllocAsync(out: *mut CUdeviceptr, bytes: usize, stream: CUstream) = pool::allocate_async;
    cuMemAllocFromPoolAsync(
        out: *mut CUdeviceptr, bytes: usize, pool: CUmemoryPool, stream: CUstream
    ) = pool::allocate_from_pool_async;
    cuMemFreeAsync(at: CUdeviceptr, stream: CUstream) = pool::free_async;
    cuMemPoolCreate(out: *mut CUmemoryPool, props: *const CUmemPoolProps) = pool::create;
    cuMemPoolDestroy(pool: CUmemoryPool) = pool::destroy;
    cuMemPoolTrimTo(pool: CUmemoryPool, keep: usize) = pool::trim_to;
    cuMemPoolSetAttribute(pool: CUmemoryPool, attribute: CUmemPool_attribute, value: *mut c_void) =
        pool::set_attribute;
    cuMemPoolGetAttribute(pool: CUmemoryPool, attribute: CUmemPool_attribute, value: *mut c_void) =
        pool::get_attribute;
    cuMemPoolSetAccess(pool: CUmemoryPool, list: *const CUmemAccessDesc, count: usize) =
        pool::set_access;
    cuMemPoolGetAccess(
        out: *mut CUmemAccess_flags, pool: CUmemoryPool, location: *mut CUmemLocation
    ) = pool::get_access;

    cuMemcpy(to: CUdeviceptr, from: CUdeviceptr, bytes: usize) = copy::any;
    cuMemcpyAsync(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream) =
        copy::any_async;
    cuMemcpyHtoD_v2(to: CUdeviceptr, from: *const c_void, bytes: usize) = copy::to_device;
    cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream) =
        copy::to_device_async;
    cuMemcpyDtoH_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize) = copy::to_host;
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream) =
        copy::to_host_async;
    cuMemcpyDtoD_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize) = copy::on_device;
    cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream) =
        copy::on_device_async;
    cuMemcpyPeer(
        to: CUdeviceptr, to_context: CUcontext, from: CUdeviceptr, from_context: CUcontext,
        bytes: usize
    ) = copy::peer;
    cuMemcpyPeerAsync(
        to: CUdeviceptr, to_context: CUcontext, from: CUdeviceptr, from_context: CUcontext,
        bytes: usize, stream: CUstream
    ) = copy::peer_async;
    cuMemsetD8_v2(to: CUdeviceptr, value: u8, count: usize) = copy::set_d8;
    cuMemsetD8Async(to: CUdeviceptr, value: u8, count: usize, stream: CUstream) =
        copy::set_d8_async;
    cuMemsetD16_v2(to: CUdeviceptr, value: u16, count: usize) = copy::set_d16;
    cuMemsetD16Async(to: CUdeviceptr, value: u16, count: usize, stream: CUstream) =
        copy::set_d16_async;
    cuMemsetD32_v2(to: CUdeviceptr, value: c_uint, count: usize) = copy::set_d32;
    cuMemsetD32Async(to: CUdeviceptr, value: c_uint, count: usize, stream: CUstream) =
        copy::set_d32_async;

    cuModuleLoadData(out: *mut CUmodule, image: *const c_void) = module::load;
    cuModuleLoadDataEx(
        out: *mut CUmodule, image: *const c_void, count: c_uint, options: *mut CUjit_option,
        values: *mut *mut c_void
    ) = module::load_with_options;
    cuModuleUnload(module: CUmodule) = module::unload;
    cuModuleGetFunction(out: *mut CUfunction, module: CUmodule, name: *const c_char) =
        module::function;
    cuLaunchKernel(
        function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint,
        block_y: c_uint, block_z: c_uint, shared_bytes: c_uint, stream: CUstream,
        parameters: *mut *mut c_void, extra: *mut *mut c_void
    ) = module::launch;
}

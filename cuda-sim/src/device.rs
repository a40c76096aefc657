//! Initialisation, devices and their properties, names of errors, look-up of functions.

use std::ffi::{CStr, c_char};

use cuda_sys::types::{
    CUdevice, CUdevice_P2PAttribute, CUdevice_attribute, CUdriverProcAddressQueryResult, CUresult,
    CUuuid,
};

use crate::arguments::{Out, Text};
use crate::call::Call;
use crate::module::MAX_SHARED_BYTES;
use crate::physical::Seat;
use crate::{names, slots};

/// CUDA 13.0.
const DRIVER_VERSION: i32 = 13_000;
const NAME: &CStr = c"NVIDIA H200 (simulated)";

pub(crate) fn init(call: &mut Call<'_>, flags: u32) -> Result<(), CUresult> {
    if flags != 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    if call.lost.is_empty() {
        return Err(CUresult::CUDA_ERROR_NO_DEVICE);
    }
    call.initialized = true;
    Ok(())
}

pub(crate) fn driver_version(_: &mut Call<'_>, out: Out<i32>) -> Result<(), CUresult> {
    out.set(DRIVER_VERSION)
}

pub(crate) fn get(call: &mut Call<'_>, out: Out<CUdevice>, ordinal: i32) -> Result<(), CUresult> {
    call.device(ordinal)?;
    out.set(ordinal)
}

pub(crate) fn count(call: &mut Call<'_>, out: Out<i32>) -> Result<(), CUresult> {
    out.set(call.lost.len() as i32)
}

pub(crate) fn name(
    call: &mut Call<'_>,
    out: Out<c_char>,
    length: i32,
    device: CUdevice,
) -> Result<(), CUresult> {
    call.device(device)?;
    let room = usize::try_from(length).ok().filter(|room| *room > 0);
    let room = room.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    let text = NAME.to_bytes();
    for (at, &byte) in text.iter().take(room - 1).enumerate() {
        out.set_at(at, byte as c_char)?;
    }
    out.set_at(text.len().min(room - 1), 0)
}

pub(crate) fn uuid(
    call: &mut Call<'_>,
    out: Out<CUuuid>,
    device: CUdevice,
) -> Result<(), CUresult> {
    let index = call.device(device)?;
    let mut uuid = CUuuid::default();
    for (byte, &text) in uuid.bytes.iter_mut().zip(b"cuda-sim device") {
        *byte = text as c_char;
    }
    uuid.bytes[15] = index as c_char;
    out.set(uuid)
}

pub(crate) fn total_memory(
    call: &mut Call<'_>,
    out: Out<usize>,
    device: CUdevice,
) -> Result<(), CUresult> {
    let index = call.device(device)?;
    out.set(call.space.physical.limit(index) as usize)
}

pub(crate) fn pci_bus_id(
    call: &mut Call<'_>,
    out: Out<c_char>,
    length: i32,
    device: CUdevice,
) -> Result<(), CUresult> {
    let index = call.device(device)?;
    let text = format!("0000:{:02X}:00.0", index + 1);
    let room = usize::try_from(length).ok().filter(|room| *room > text.len());
    room.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    for (at, byte) in text.bytes().chain([0]).enumerate() {
        out.set_at(at, byte as c_char)?;
    }
    Ok(())
}

pub(crate) fn attribute(
    call: &mut Call<'_>,
    out: Out<i32>,
    attribute: CUdevice_attribute,
    device: CUdevice,
) -> Result<(), CUresult> {
    use CUdevice_attribute as A;
    let index = call.device(device)?;
    let value = match attribute {
        A::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        | A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        | A::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED
        | A::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING
        | A::CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY
        | A::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED
        | A::CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS
        | A::CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY
        | A::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS
        | A::CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED
        | A::CU_DEVICE_ATTRIBUTE_ECC_ENABLED
        | A::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
        | A::CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR
        | A::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM => 1,
        A::CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        | A::CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        | A::CU_DEVICE_ATTRIBUTE_HOST_MEMORY_POOLS_SUPPORTED
        | A::CU_DEVICE_ATTRIBUTE_HOST_NUMA_MEMORY_POOLS_SUPPORTED => {
            i32::from(call.space.physical.has(Seat::Host))
        }
        A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED => i32::from(call.fabric),
        A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED
        | A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED => {
            i32::from(call.gpu_direct_rdma)
        }
        A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => 9,
        A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => 132,
        A::CU_DEVICE_ATTRIBUTE_WARP_SIZE => 32,
        A::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT => 3,
        A::CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT => 512,
        A::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID => index as i32 + 1,
        A::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK
        | A::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X
        | A::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y => 1024,
        A::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z => 64,
        A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK => MAX_SHARED_BYTES as i32,
        A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X => i32::MAX,
        A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y | A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z => 65_535,
        // Pools cannot be exported here.
        A::CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES => 0,
        attribute if attribute.0 == 0 || attribute.0 >= A::CU_DEVICE_ATTRIBUTE_MAX.0 => {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // What is not modelled is not there.
        _ => 0,
    };
    out.set(value)
}

pub(crate) fn can_access_peer(
    call: &mut Call<'_>,
    out: Out<i32>,
    device: CUdevice,
    peer: CUdevice,
) -> Result<(), CUresult> {
    let (device, peer) = (call.device(device)?, call.device(peer)?);
    out.set(i32::from(device != peer && call.peer_access))
}

pub(crate) fn p2p_attribute(
    call: &mut Call<'_>,
    out: Out<i32>,
    attribute: CUdevice_P2PAttribute,
    device: CUdevice,
    peer: CUdevice,
) -> Result<(), CUresult> {
    use CUdevice_P2PAttribute as A;
    let (device, peer) = (call.device(device)?, call.device(peer)?);
    if device == peer {
        return Err(CUresult::CUDA_ERROR_INVALID_DEVICE);
    }
    match attribute {
        A::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED
        | A::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED => {
            out.set(i32::from(call.peer_access))
        }
        A::CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK => out.set(0),
        _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
    }
}

pub(crate) fn error_name(
    _: &mut Call<'_>,
    code: CUresult,
    out: Out<*const c_char>,
) -> Result<(), CUresult> {
    answer_text(names::name(code), &out)
}

pub(crate) fn error_string(
    _: &mut Call<'_>,
    code: CUresult,
    out: Out<*const c_char>,
) -> Result<(), CUresult> {
    answer_text(names::words(code), &out)
}

fn answer_text(text: Option<&'static CStr>, out: &Out<*const c_char>) -> Result<(), CUresult> {
    out.set(text.map_or(std::ptr::null(), CStr::as_ptr))?;
    text.map(|_| ()).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
}

/// Functions that the simulator has with different arguments, with the CUDA version that each came in. Of
/// what is not here the newest serves whatever version is asked for.
const CAME_IN: [(&str, i32); 6] = [
    ("cuCtxCreate_v3", 11_040),
    ("cuCtxCreate_v4", 12_050),
    ("cuCtxGetDevice_v2", 13_000),
    ("cuCtxSynchronize_v2", 13_000),
    ("cuStreamGetCaptureInfo_v2", 11_030),
    ("cuStreamGetCaptureInfo_v3", 12_030),
];

pub(crate) fn proc_address(
    call: &mut Call<'_>,
    symbol: Text,
    out: Out<*mut std::ffi::c_void>,
    version: i32,
    _flags: u64,
    status: Out<CUdriverProcAddressQueryResult>,
) -> Result<(), CUresult> {
    use CUdriverProcAddressQueryResult as Status;
    let name = symbol.get()?.to_str().map_err(|_| CUresult::CUDA_ERROR_INVALID_VALUE)?;
    let slot = call.shared.slot;
    // Names here are without a version: the newest one is meant that the version asked for has.
    let is_later = |name: &str| CAME_IN.iter().any(|(of, since)| *of == name && *since > version);
    let versions = ["_v4", "_v3", "_v2", ""].map(|version| format!("{name}{version}"));
    let mut versions = versions.iter().filter(|name| !is_later(name));
    match versions.find_map(|name| slots::address(slot, name)) {
        Some(address) => {
            status.set_optional(Status::CU_GET_PROC_ADDRESS_SUCCESS);
            out.set(address.cast_mut())
        }
        None => {
            status.set_optional(Status::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
            out.set(std::ptr::null_mut())?;
            Err(CUresult::CUDA_ERROR_NOT_FOUND)
        }
    }
}

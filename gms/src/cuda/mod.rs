//! The driver, as far as this crate calls it: every foreign call is here and in
//! [`context`], with its answer checked in one place.

mod context;
mod handle;
mod table;

pub(crate) use context::{Aliases, Context, HostBuffer, Mapping, Reservation, Stream};
pub(crate) use handle::PhysicalHandle;

use std::ffi::c_int;
use std::sync::{Arc, OnceLock};

use cuda_sys::types::*;

use table::Table;

/// Why the driver cannot be used, or what it answered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// The driver is too old.
    #[error("the driver has no {0}")]
    Missing(&'static str),
    /// A call failed.
    #[error("{call}: {code}")]
    Call {
        /// The function.
        call: &'static str,
        /// What it answered.
        code: CUresult,
    },
    /// The driver has no device of that number.
    #[error("there is no device {ordinal}: the driver has {count}")]
    NoDevice {
        /// The number that was asked for.
        ordinal: u32,
        /// How many devices there are.
        count: u32,
    },
}

impl CudaError {
    /// Whether there was no memory left.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Call { code: CUresult::CUDA_ERROR_OUT_OF_MEMORY, .. })
    }
}

/// An initialised driver and one of its devices. Clones are the same.
#[derive(Clone)]
pub(crate) struct Cuda(Arc<Inner>);

struct Inner {
    table: Table,
    device: CUdevice,
    ordinal: u32,
    granularity: u64,
    /// Whether physical memory is made for GPUDirect RDMA.
    rdma: bool,
    /// Told of memory that the driver does not take back.
    on_lost: OnceLock<Box<dyn Fn(CudaError) + Send + Sync>>,
    /// Keeps the functions callable.
    _driver: cuda_sys::Driver,
}

impl std::fmt::Debug for Cuda {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cuda").field("device", &self.0.ordinal).finish_non_exhaustive()
    }
}

impl Cuda {
    /// Initialises the driver. Makes no context.
    pub(crate) fn open(driver: &cuda_sys::Driver, ordinal: u32) -> Result<Self, CudaError> {
        let table = Table::resolve(driver)?;
        // SAFETY: cuInit may be called at any time and takes no pointer; its flags must be 0.
        unsafe { table.cuInit(0) }?;
        let mut device: CUdevice = 0;
        let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: the pointer is to a live CUdevice.
        if let Err(error) = unsafe { table.cuDeviceGet(&mut device, number) } {
            return Err(match (&error, count(&table)) {
                (CudaError::Call { code: CUresult::CUDA_ERROR_INVALID_DEVICE, .. }, Ok(count)) => {
                    CudaError::NoDevice { ordinal, count }
                }
                _ => error,
            });
        }
        let mut granularity = 0;
        let minimum = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let rdma = can_map_for_rdma(&table, device);
        let properties = properties(ordinal, rdma);
        // SAFETY: the pointers are to a live size and live properties.
        unsafe { table.cuMemGetAllocationGranularity(&mut granularity, &properties, minimum) }?;
        let granularity = (granularity as u64).max(1);
        let (on_lost, _driver) = (OnceLock::new(), driver.clone());
        Ok(Self(Arc::new(Inner { table, device, ordinal, granularity, rdma, on_lost, _driver })))
    }

    /// Has somebody told of memory that the driver does not take back, by whatever thread drops it. The
    /// first who is named here stays.
    pub(crate) fn on_lost(&self, tell: impl Fn(CudaError) + Send + Sync + 'static) {
        let _ = self.0.on_lost.set(Box::new(tell));
    }

    fn table(&self) -> &Table {
        &self.0.table
    }

    /// The device's number.
    pub(crate) fn ordinal(&self) -> u32 {
        self.0.ordinal
    }

    /// What physical memory is made as.
    fn properties(&self) -> CUmemAllocationProp {
        properties(self.0.ordinal, self.0.rdma)
    }

    /// What sizes of physical memory are multiples of.
    pub(crate) fn granularity(&self) -> u64 {
        self.0.granularity
    }

    /// Bytes in whole granules; `None` where no number of 63 bits is that large.
    pub(crate) fn aligned(&self, bytes: u64) -> Option<u64> {
        bytes.checked_next_multiple_of(self.0.granularity).filter(|bytes| *bytes <= i64::MAX as u64)
    }

    /// All memory of the device.
    pub(crate) fn total_bytes(&self) -> Result<u64, CudaError> {
        let mut bytes = 0;
        // SAFETY: the pointer is to a live size, and the device was found at the start.
        unsafe { self.table().cuDeviceTotalMem_v2(&mut bytes, self.0.device) }?;
        Ok(bytes as u64)
    }

    /// The device's identity, as `GPU-` and hexadecimal digits in five groups.
    pub(crate) fn uuid(&self) -> Result<String, CudaError> {
        let mut uuid = CUuuid::default();
        // SAFETY: the pointer is to a live UUID, and the device was found at the start.
        unsafe { self.table().cuDeviceGetUuid_v2(&mut uuid, self.0.device) }?;
        let bytes = uuid.bytes.map(|byte| byte as u8);
        Ok(format!("GPU-{}", uuid::Uuid::from_bytes(bytes).hyphenated()))
    }
}

/// How many devices there are.
pub(crate) fn device_count(driver: &cuda_sys::Driver) -> Result<u32, CudaError> {
    let table = Table::resolve(driver)?;
    // SAFETY: cuInit may be called at any time and takes no pointer; its flags must be 0.
    unsafe { table.cuInit(0) }?;
    count(&table)
}

/// Of a driver that is initialised.
fn count(table: &Table) -> Result<u32, CudaError> {
    let mut count = 0;
    // SAFETY: the pointer is to a live int.
    unsafe { table.cuDeviceGetCount(&mut count) }?;
    Ok(u32::try_from(count).unwrap_or(0))
}

/// The type of handle that processes pass to each other.
const FILE_DESCRIPTOR: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

fn location(ordinal: u32) -> CUmemLocation {
    let id = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id }
}

/// What physical memory is made as; with `rdma` so that network cards may reach it (GPUDirect RDMA).
fn properties(ordinal: u32, rdma: bool) -> CUmemAllocationProp {
    let mut properties = CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: FILE_DESCRIPTOR,
        location: location(ordinal),
        ..CUmemAllocationProp::default()
    };
    properties.allocFlags.gpuDirectRDMACapable = u8::from(rdma);
    properties
}

/// Whether memory that is mapped can be made for GPUDirect RDMA: see the pool's function of that name.
fn can_map_for_rdma(table: &Table, device: CUdevice) -> bool {
    use CUdevice_attribute as A;
    let has = |attribute| {
        let mut value = 0;
        // SAFETY: the pointer is to a live int, and the device was found just now.
        let answer = unsafe { table.cuDeviceGetAttribute(&mut value, attribute, device) };
        answer.is_ok() && value != 0
    };
    has(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED)
        && has(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)
}

//! The driver's own allocators, called straight through the bindings.

use std::ffi::c_void;
use std::ptr::{from_mut, null_mut};

use cuda_sys::types::{
    CUcontext, CUdeviceptr, CUmemAllocationType, CUmemLocationType, CUmemPool_attribute,
    CUmemPoolProps, CUmemoryPool, CUresult, CUstream,
};
use vpmm::Driver;

use crate::rig::{Lane, Machine, Subject};

/// Calls a driver function; a failure ends the benchmark.
macro_rules! call {
    ($driver:expr, $name:ident($($argument:expr),* $(,)?)) => {{
        let function = $driver.raw().$name.expect(stringify!($name));
        // SAFETY: pointers are to live locals; handles belong to the subject that calls.
        let code = unsafe { function($($argument),*) };
        assert_eq!(code, CUresult::CUDA_SUCCESS, stringify!($name));
    }};
}

fn make_current(driver: &Driver, context: CUcontext) {
    call!(driver, cuCtxSetCurrent(context));
}

/// cudaMalloc and cudaFree, which wait for the device.
pub(crate) struct CudaMalloc {
    driver: Driver,
}

impl CudaMalloc {
    pub(crate) fn new(machine: &Machine) -> Self {
        let driver = machine.device.driver().clone();
        make_current(&driver, machine.device.context());
        Self { driver }
    }
}

impl Subject for CudaMalloc {
    type Block = CUdeviceptr;

    fn malloc(&mut self, bytes: usize, _lane: Lane) -> CUdeviceptr {
        let mut address = CUdeviceptr::default();
        call!(self.driver, cuMemAlloc_v2(&mut address, bytes));
        address
    }

    fn free(&mut self, block: CUdeviceptr, _lane: Lane) {
        call!(self.driver, cuMemFree_v2(block));
    }
}

/// cudaMallocAsync from a pool of its own that keeps what it has.
pub(crate) struct CudaMallocAsync {
    driver: Driver,
    pool: CUmemoryPool,
    streams: [CUstream; 2],
}

impl CudaMallocAsync {
    pub(crate) fn new(machine: &Machine) -> Self {
        let driver = machine.device.driver().clone();
        make_current(&driver, machine.device.context());
        let mut properties = CUmemPoolProps {
            allocType: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            ..CUmemPoolProps::default()
        };
        properties.location.type_ = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        let mut pool: CUmemoryPool = null_mut();
        call!(driver, cuMemPoolCreate(&mut pool, &properties));
        let mut keep_all = u64::MAX;
        let threshold = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        let value = from_mut(&mut keep_all).cast::<c_void>();
        call!(driver, cuMemPoolSetAttribute(pool, threshold, value));
        Self { driver, pool, streams: machine.handles().map(|handle| handle.raw()) }
    }
}

impl Subject for CudaMallocAsync {
    type Block = CUdeviceptr;

    fn malloc(&mut self, bytes: usize, lane: Lane) -> CUdeviceptr {
        let mut address = CUdeviceptr::default();
        let stream = self.streams[lane];
        call!(self.driver, cuMemAllocFromPoolAsync(&mut address, bytes, self.pool, stream));
        address
    }

    fn free(&mut self, block: CUdeviceptr, lane: Lane) {
        call!(self.driver, cuMemFreeAsync(block, self.streams[lane]));
    }
}

impl Drop for CudaMallocAsync {
    fn drop(&mut self) {
        // What is still live goes with the pool once the device is done with it.
        call!(self.driver, cuCtxSynchronize());
        call!(self.driver, cuMemPoolDestroy(self.pool));
    }
}

//! A simulated machine with a current context, and calls in one line.

#![allow(dead_code, unused_macros, unused_imports, reason = "each test file uses a part")]

use std::ptr::null_mut;

use cuda_sim::{Builder, Simulator};
use cuda_sys::Driver;
use cuda_sys::types::*;

pub(crate) const MIB: usize = 1 << 20;
pub(crate) const GRANULE: usize = 2 * MIB;

/// Makes a driver call and answers its code.
macro_rules! call {
    ($gpu:expr, $name:ident ( $($arg:expr),* $(,)? )) => {{
        let function = $gpu.driver.$name.expect(concat!("the simulator has ", stringify!($name)));
        // SAFETY: the tests pass pointers to live locals, or what the simulator must survive.
        unsafe { function($($arg),*) }
    }};
}

/// Makes a driver call that must succeed.
macro_rules! ok {
    ($gpu:expr, $name:ident ( $($arg:expr),* $(,)? )) => {
        assert_eq!(
            call!($gpu, $name($($arg),*)),
            cuda_sys::types::CUresult::CUDA_SUCCESS,
            stringify!($name)
        )
    };
}

pub(crate) use {call, ok};

pub(crate) struct Gpu {
    pub(crate) sim: Simulator,
    pub(crate) driver: Driver,
}

impl Gpu {
    pub(crate) fn new(builder: Builder) -> Self {
        let sim = builder.build().expect("a slot is free");
        let gpu = Self { driver: sim.driver(), sim };
        ok!(gpu, cuInit(0));
        gpu.retain(0);
        gpu
    }

    /// Makes a device's primary context current.
    pub(crate) fn retain(&self, device: i32) -> CUcontext {
        let mut context = null_mut();
        ok!(self, cuDevicePrimaryCtxRetain(&mut context, device));
        ok!(self, cuCtxSetCurrent(context));
        context
    }

    pub(crate) fn stream(&self) -> CUstream {
        self.stream_with(1)
    }

    pub(crate) fn stream_with(&self, flags: u32) -> CUstream {
        let mut stream = null_mut();
        ok!(self, cuStreamCreate(&mut stream, flags));
        stream
    }

    pub(crate) fn event(&self) -> CUevent {
        let mut event = null_mut();
        ok!(self, cuEventCreate(&mut event, 2));
        event
    }

    pub(crate) fn record(&self, stream: CUstream) -> CUevent {
        let event = self.event();
        ok!(self, cuEventRecord(event, stream));
        event
    }

    pub(crate) fn alloc(&self, bytes: usize) -> u64 {
        let mut address = 0;
        ok!(self, cuMemAlloc_v2(&mut address, bytes));
        address
    }

    pub(crate) fn reserve(&self, bytes: usize) -> u64 {
        let mut address = 0;
        ok!(self, cuMemAddressReserve(&mut address, bytes, 0, 0, 0));
        address
    }

    pub(crate) fn create(&self, bytes: usize) -> u64 {
        let mut handle = 0;
        ok!(self, cuMemCreate(&mut handle, bytes, &prop(0), 0));
        handle
    }

    pub(crate) fn open(&self, address: u64, bytes: usize) {
        ok!(self, cuMemSetAccess(address, bytes, &access(0, 3), 1));
    }

    /// Maps a handle and opens it to device 0.
    pub(crate) fn map(&self, address: u64, bytes: usize, handle: u64) {
        ok!(self, cuMemMap(address, bytes, 0, handle, 0));
        self.open(address, bytes);
    }

    pub(crate) fn fill(&self, address: u64, value: u32, words: usize, stream: CUstream) {
        ok!(self, cuMemsetD32Async(address, value, words, stream));
    }

    pub(crate) fn word(&self, address: u64) -> u32 {
        let mut word = [0; 4];
        self.sim.peek(address, &mut word).expect("it is mapped");
        u32::from_le_bytes(word)
    }

    pub(crate) fn query(&self, event: CUevent) -> CUresult {
        call!(self, cuEventQuery(event))
    }
}

pub(crate) fn prop(device: i32) -> CUmemAllocationProp {
    CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        location: location(device),
        ..Default::default()
    }
}

pub(crate) fn exportable(device: i32) -> CUmemAllocationProp {
    CUmemAllocationProp {
        requestedHandleTypes: CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        ..prop(device)
    }
}

pub(crate) fn location(device: i32) -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device }
}

pub(crate) fn access(device: i32, flags: u32) -> CUmemAccessDesc {
    CUmemAccessDesc { location: location(device), flags: CUmemAccess_flags(flags) }
}

//! Faults on demand, lost devices, and many simulators side by side.

mod support;

use std::ptr::null_mut;

use cuda_sim::Simulator;
use cuda_sys::types::*;
use support::{GRANULE, Gpu, call, ok, prop};

const OOM: CUresult = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
const LOST: CUresult = CUresult::CUDA_ERROR_ECC_UNCORRECTABLE;

#[test]
fn the_nth_call_of_a_name_fails_and_has_no_effect() {
    let gpu = Gpu::new(Simulator::builder());
    gpu.sim.fail_nth("cuMemCreate", 2, OOM);
    let mut handle = 0;
    let mut codes = Vec::new();
    for _ in 0..3 {
        codes.push(call!(gpu, cuMemCreate(&mut handle, GRANULE, &prop(0), 0)));
        gpu.event();
    }
    let good = CUresult::CUDA_SUCCESS;
    assert_eq!(codes, [good, OOM, good]);
    assert_eq!(gpu.sim.leaks().handles, 2);
    assert_eq!(gpu.sim.call_counts()["cuMemCreate"], 3);
}

#[test]
#[should_panic = "no function cuMemAlloc"]
fn a_call_that_there_is_not_cannot_be_made_to_fail() {
    // The table has cuMemAlloc_v2.
    Simulator::builder().build().unwrap().fail_nth("cuMemAlloc", 1, OOM);
}

#[test]
fn calls_fail_by_number_and_from_a_number_on() {
    let gpu = Gpu::new(Simulator::builder());
    let before = gpu.sim.calls();
    gpu.sim.fail_call(2, LOST);
    let query = || call!(gpu, cuStreamQuery(null_mut()));
    let good = CUresult::CUDA_SUCCESS;
    assert_eq!([query(), query(), query()], [good, LOST, good]);
    assert_eq!(gpu.sim.calls(), before + 3);
    gpu.sim.fail_all_calls_after(1, OOM);
    assert_eq!([query(), query(), query()], [good, OOM, OOM]);
    gpu.sim.clear_faults();
    assert_eq!(query(), good);
}

#[test]
fn a_lost_device_stays_lost() {
    let gpu = Gpu::new(Simulator::builder().devices(2));
    let stream = gpu.stream();
    let event = gpu.record(stream);
    let spin = gpu.sim.spin(stream).unwrap();
    gpu.sim.lose_device(0, LOST);
    assert_eq!(call!(gpu, cuStreamSynchronize(stream)), LOST);
    assert_eq!(gpu.query(event), LOST);
    assert_eq!(call!(gpu, cuCtxSynchronize()), LOST);
    let mut handle = 0;
    assert_eq!(call!(gpu, cuMemCreate(&mut handle, GRANULE, &prop(0), 0)), LOST);
    gpu.retain(1);
    ok!(gpu, cuMemCreate(&mut handle, GRANULE, &prop(1), 0));
    ok!(gpu, cuCtxSynchronize());
    drop(spin);
}

/// What an H200's driver (580.159.04) answers once a kernel has written where there is no memory.
#[test]
fn after_a_failed_kernel_a_context_s_calls_fail_and_those_on_the_device_s_memory_do_not() {
    const FAILED: CUresult = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
    const GOOD: CUresult = CUresult::CUDA_SUCCESS;
    let gpu = Gpu::new(Simulator::builder());
    let [stream, other, capturing] = [(); 3].map(|()| gpu.stream());
    let [event, recorded] = [gpu.event(), gpu.record(stream)];
    let [mut start, mut mapped, mut free, mut plain, mut asynchronous] = [0; 5];
    let (mut used, mut unused) = (0, 0);
    let mut locked = null_mut();
    let access = CUmemAccessDesc {
        location: prop(0).location,
        flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    ok!(gpu, cuMemAddressReserve(&mut mapped, 2 * GRANULE, 0, 0, 0));
    ok!(gpu, cuMemAddressReserve(&mut free, GRANULE, 0, 0, 0));
    ok!(gpu, cuMemCreate(&mut used, GRANULE, &prop(0), 0));
    ok!(gpu, cuMemCreate(&mut unused, GRANULE, &prop(0), 0));
    ok!(gpu, cuMemMap(mapped, GRANULE, 0, used, 0));
    ok!(gpu, cuMemAlloc_v2(&mut plain, GRANULE));
    ok!(gpu, cuMemHostAlloc(&mut locked, 4096, 3));
    ok!(gpu, cuMemAllocAsync(&mut asynchronous, GRANULE, stream));
    gpu.sim.enqueue(stream, "stray", |_| Err(FAILED)).unwrap();
    assert_eq!(call!(gpu, cuStreamSynchronize(stream)), FAILED);

    let (mut number, mut context, mut id, mut flags) = (0, null_mut(), 0, 0);
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    let (mut left, mut all) = (0, 0);
    let (mut made, mut made_event, mut pool) = (null_mut(), null_mut(), null_mut());
    let kind = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    let relaxed = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    let answers = [
        ("cuCtxGetCurrent", call!(gpu, cuCtxGetCurrent(&mut context)), GOOD),
        ("cuCtxSetCurrent", call!(gpu, cuCtxSetCurrent(context)), GOOD),
        ("cuCtxGetId", call!(gpu, cuCtxGetId(context, &mut id)), GOOD),
        ("cuCtxSynchronize", call!(gpu, cuCtxSynchronize()), FAILED),
        ("cuDeviceGetAttribute", call!(gpu, cuDeviceGetAttribute(&mut number, kind, 0)), GOOD),
        ("cuMemGetInfo", call!(gpu, cuMemGetInfo_v2(&mut left, &mut all)), FAILED),
        ("cuStreamIsCapturing", call!(gpu, cuStreamIsCapturing(stream, &mut status)), FAILED),
        ("cuStreamGetId", call!(gpu, cuStreamGetId(stream, &mut id)), FAILED),
        ("cuStreamGetCtx", call!(gpu, cuStreamGetCtx(stream, &mut context)), FAILED),
        ("cuStreamGetFlags", call!(gpu, cuStreamGetFlags(stream, &mut flags)), FAILED),
        ("exchange mode", call!(gpu, cuThreadExchangeStreamCaptureMode(&mut mode)), GOOD),
        ("cuStreamQuery", call!(gpu, cuStreamQuery(stream)), FAILED),
        ("cuEventQuery", call!(gpu, cuEventQuery(recorded)), FAILED),
        ("cuEventSynchronize", call!(gpu, cuEventSynchronize(recorded)), FAILED),
        ("cuEventRecord", call!(gpu, cuEventRecord(event, stream)), FAILED),
        ("cuStreamWaitEvent", call!(gpu, cuStreamWaitEvent(stream, recorded, 0)), FAILED),
        ("cuStreamCreate", call!(gpu, cuStreamCreate(&mut made, 1)), FAILED),
        ("cuEventCreate", call!(gpu, cuEventCreate(&mut made_event, 2)), FAILED),
        ("cuStreamDestroy", call!(gpu, cuStreamDestroy_v2(other)), FAILED),
        ("cuEventDestroy", call!(gpu, cuEventDestroy_v2(event)), FAILED),
        ("cuMemCreate", call!(gpu, cuMemCreate(&mut id, GRANULE, &prop(0), 0)), GOOD),
        ("cuMemRelease", call!(gpu, cuMemRelease(id)), GOOD),
        (
            "cuMemAddressReserve",
            call!(gpu, cuMemAddressReserve(&mut start, GRANULE, 0, 0, 0)),
            GOOD,
        ),
        ("cuMemAddressFree", call!(gpu, cuMemAddressFree(start, GRANULE)), GOOD),
        ("cuMemMap", call!(gpu, cuMemMap(mapped + GRANULE as u64, GRANULE, 0, unused, 0)), GOOD),
        ("cuMemSetAccess", call!(gpu, cuMemSetAccess(mapped, GRANULE, &access, 1)), GOOD),
        ("cuMemUnmap", call!(gpu, cuMemUnmap(mapped, GRANULE)), GOOD),
        ("cuMemRelease", call!(gpu, cuMemRelease(used)), GOOD),
        ("cuMemAddressFree", call!(gpu, cuMemAddressFree(free, GRANULE)), GOOD),
        ("cuMemFree", call!(gpu, cuMemFree_v2(plain)), FAILED),
        ("cuMemFreeHost", call!(gpu, cuMemFreeHost(locked)), FAILED),
        ("cuMemAllocAsync", call!(gpu, cuMemAllocAsync(&mut plain, GRANULE, stream)), FAILED),
        ("cuMemFreeAsync", call!(gpu, cuMemFreeAsync(asynchronous, stream)), FAILED),
        ("default pool", call!(gpu, cuDeviceGetDefaultMemPool(&mut pool, 0)), GOOD),
        ("cuMemPoolTrimTo", call!(gpu, cuMemPoolTrimTo(pool, 0)), GOOD),
        ("cuMemsetD8Async", call!(gpu, cuMemsetD8Async(plain, 0, 16, stream)), FAILED),
        ("begin capture", call!(gpu, cuStreamBeginCapture_v2(capturing, relaxed)), FAILED),
    ];
    let wrong: Vec<_> = answers.iter().filter(|(_, got, wanted)| got != wanted).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
fn memory_ends_at_the_limit() {
    let gpu = Gpu::new(Simulator::builder());
    gpu.sim.set_memory_limit(0, 4 * GRANULE as u64);
    let handle = gpu.create(3 * GRANULE);
    let mut other = 0;
    assert_eq!(call!(gpu, cuMemCreate(&mut other, 2 * GRANULE, &prop(0), 0)), OOM);
    ok!(gpu, cuMemRelease(handle));
    ok!(gpu, cuMemCreate(&mut other, 2 * GRANULE, &prop(0), 0));
}

#[test]
fn nothing_works_before_init_or_without_a_context() {
    let sim = Simulator::builder().build().unwrap();
    let gpu = Gpu { driver: sim.driver(), sim };
    let mut version = 0;
    ok!(gpu, cuDriverGetVersion(&mut version));
    assert_eq!(version, 13_000);
    let mut count = 0;
    let code = call!(gpu, cuDeviceGetCount(&mut count));
    assert_eq!(code, CUresult::CUDA_ERROR_NOT_INITIALIZED);
    ok!(gpu, cuInit(0));
    ok!(gpu, cuDeviceGetCount(&mut count));
    assert_eq!(count, 1);
    let code = call!(gpu, cuStreamCreate(&mut null_mut(), 0));
    assert_eq!(code, CUresult::CUDA_ERROR_INVALID_CONTEXT);
    // Handles of physical memory need no context.
    gpu.create(GRANULE);
}

#[test]
fn contexts_end() {
    let gpu = Gpu::new(Simulator::builder());
    let mut context = null_mut();
    ok!(gpu, cuCtxCreate_v2(&mut context, 0, 0));
    let (stream, event) = (gpu.stream(), gpu.event());
    ok!(gpu, cuCtxDestroy_v2(context));
    let code = call!(gpu, cuCtxPushCurrent_v2(context));
    assert_eq!(code, CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED);
    assert_eq!(call!(gpu, cuStreamQuery(stream)), CUresult::CUDA_ERROR_INVALID_HANDLE);
    assert_eq!(gpu.query(event), CUresult::CUDA_ERROR_INVALID_HANDLE);
    // The primary one is current again, until it is released.
    gpu.stream();
    ok!(gpu, cuDevicePrimaryCtxRelease_v2(0));
    let code = call!(gpu, cuCtxSynchronize());
    assert_eq!(code, CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED);
    assert!(gpu.sim.leaks().is_empty(), "{:?}", gpu.sim.leaks());
}

/// As the documentation of cuCtxDestroy says.
#[test]
fn memory_that_is_a_contexts_goes_with_it() {
    let gpu = Gpu::new(Simulator::builder());
    let (kept, stream) = (gpu.alloc(64), gpu.stream());
    let mut context = null_mut();
    ok!(gpu, cuCtxCreate_v2(&mut context, 0, 0));
    let block = gpu.alloc(64);
    let (mut locked, mut managed, mut own) = (null_mut(), 0, [0_u32; 16]);
    ok!(gpu, cuMemAllocHost_v2(&mut locked, 64));
    ok!(gpu, cuMemAllocManaged(&mut managed, 64, 1));
    ok!(gpu, cuMemHostRegister_v2(own.as_mut_ptr().cast(), 64, 0));
    let mut pooled = 0;
    ok!(gpu, cuMemAllocAsync(&mut pooled, 64, null_mut()));
    let handle = gpu.create(GRANULE);
    ok!(gpu, cuCtxDestroy_v2(context));
    let leaks = gpu.sim.leaks();
    assert_eq!((leaks.allocations, leaks.host_allocations, leaks.handles), (2, 0, 1));
    let invalid = CUresult::CUDA_ERROR_INVALID_VALUE;
    assert_eq!(call!(gpu, cuMemFree_v2(block)), invalid);
    assert_eq!(call!(gpu, cuMemFree_v2(managed)), invalid);
    assert_eq!(call!(gpu, cuMemFreeHost(locked)), invalid);
    let unregistered = call!(gpu, cuMemHostUnregister(own.as_mut_ptr().cast()));
    assert_eq!(unregistered, CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    // What is no context's, or another's, stays.
    gpu.fill(pooled, 1, 4, stream);
    gpu.fill(kept, 1, 4, stream);
    ok!(gpu, cuStreamSynchronize(stream));
    ok!(gpu, cuMemFreeAsync(pooled, stream));
    ok!(gpu, cuMemRelease(handle));
    gpu.sim.assert_clean();
    gpu.fill(block, 1, 4, stream);
    assert_eq!(gpu.sim.report().misuse.len(), 1, "a use of what is gone");
    ok!(gpu, cuDevicePrimaryCtxReset_v2(0));
    assert_eq!(gpu.sim.leaks().allocations, 0);
}

/// As the documentation says: who has retained a primary context releases it also after somebody's reset.
#[test]
fn a_primary_context_that_was_reset_is_still_its_holders_to_release() {
    let gpu = Gpu::new(Simulator::builder());
    let first = gpu.retain(0);
    let released = || call!(gpu, cuDevicePrimaryCtxRelease_v2(0));
    let active = || {
        let (mut flags, mut active) = (0, -1);
        ok!(gpu, cuDevicePrimaryCtxGetState(0, &mut flags, &mut active));
        active
    };
    ok!(gpu, cuDevicePrimaryCtxReset_v2(0));
    assert_eq!((active(), gpu.sim.leaks().contexts), (0, 2), "retained twice, and reset");
    // One of them goes on with a new one, which stays when the other lets go of the old.
    assert_eq!((gpu.retain(0), active()), (first, 1));
    for _ in 0..2 {
        assert_eq!((released(), active()), (CUresult::CUDA_SUCCESS, 1));
    }
    gpu.stream();
    assert_eq!((released(), active()), (CUresult::CUDA_SUCCESS, 0));
    assert_eq!(released(), CUresult::CUDA_ERROR_INVALID_CONTEXT);
    // Also where nobody has retained it again.
    gpu.retain(0);
    ok!(gpu, cuDevicePrimaryCtxReset_v2(0));
    assert_eq!((released(), active()), (CUresult::CUDA_SUCCESS, 0));
    assert!(gpu.sim.leaks().is_empty(), "{:?}", gpu.sim.leaks());
}

#[test]
fn names_and_addresses() {
    let gpu = Gpu::new(Simulator::builder());
    let mut text = std::ptr::null();
    ok!(gpu, cuGetErrorName(OOM, &mut text));
    // SAFETY: the driver answered with a string that lives for ever.
    let name = unsafe { std::ffi::CStr::from_ptr(text) };
    assert_eq!(name, c"CUDA_ERROR_OUT_OF_MEMORY");
    let mut address = null_mut();
    let symbol = c"cuMemAlloc".as_ptr();
    ok!(gpu, cuGetProcAddress_v2(symbol, &mut address, 13_000, 0, null_mut()));
    assert_eq!(address as usize, gpu.driver.cuMemAlloc_v2.unwrap() as usize);
}

/// Whoever asks for a version calls with the arguments that the function had in it.
#[test]
fn a_function_is_looked_up_as_it_was_in_a_version() {
    let gpu = Gpu::new(Simulator::builder());
    let of = |symbol: &std::ffi::CStr, version| {
        let mut address = null_mut();
        let mut status = CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
        let code =
            call!(gpu, cuGetProcAddress_v2(symbol.as_ptr(), &mut address, version, 0, &mut status));
        (code, address as usize, status)
    };
    let driver = &gpu.driver;
    let expected = [
        (c"cuCtxSynchronize", 12_090, driver.cuCtxSynchronize.unwrap() as usize),
        (c"cuCtxSynchronize", 13_000, driver.cuCtxSynchronize_v2.unwrap() as usize),
        (c"cuCtxGetDevice", 11_000, driver.cuCtxGetDevice.unwrap() as usize),
        (c"cuCtxGetDevice", 13_000, driver.cuCtxGetDevice_v2.unwrap() as usize),
        (c"cuCtxCreate", 11_000, driver.cuCtxCreate_v2.unwrap() as usize),
        (c"cuCtxCreate", 12_000, driver.cuCtxCreate_v3.unwrap() as usize),
        (c"cuCtxCreate", 13_000, driver.cuCtxCreate_v4.unwrap() as usize),
        (c"cuStreamGetCaptureInfo", 11_000, driver.cuStreamGetCaptureInfo.unwrap() as usize),
        (c"cuStreamGetCaptureInfo", 12_000, driver.cuStreamGetCaptureInfo_v2.unwrap() as usize),
        (c"cuStreamGetCaptureInfo", 12_030, driver.cuStreamGetCaptureInfo_v3.unwrap() as usize),
        (c"cuMemAlloc", 11_000, driver.cuMemAlloc_v2.unwrap() as usize),
        (c"cuMemCreate", 12_000, driver.cuMemCreate.unwrap() as usize),
    ];
    let found = CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SUCCESS;
    for (symbol, version, address) in expected {
        let answer = (CUresult::CUDA_SUCCESS, address, found);
        assert_eq!(of(symbol, version), answer, "{symbol:?} of {version}");
    }
    let missing = CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    assert_eq!(of(c"cuNothing", 13_000), (CUresult::CUDA_ERROR_NOT_FOUND, 0, missing));
}

#[test]
fn simulators_share_nothing() {
    let machines: Vec<_> = (0..20).map(|_| Gpu::new(Simulator::builder())).collect();
    std::thread::scope(|scope| {
        for (index, gpu) in machines.iter().enumerate() {
            scope.spawn(move || {
                gpu.retain(0);
                let stream = gpu.stream();
                for _ in 0..200 {
                    let memory = gpu.alloc(64);
                    gpu.fill(memory, index as u32, 16, stream);
                    ok!(gpu, cuStreamSynchronize(stream));
                    assert_eq!(gpu.word(memory + 60), index as u32);
                    ok!(gpu, cuMemFree_v2(memory));
                }
            });
        }
    });
    for gpu in &machines {
        gpu.sim.assert_clean();
    }
}

#[test]
fn a_driver_keeps_its_simulator() {
    let driver = {
        let sim = Simulator::builder().build().unwrap();
        sim.driver()
    };
    // SAFETY: cuInit takes no pointers.
    assert_eq!(unsafe { driver.cuInit.unwrap()(0) }, CUresult::CUDA_SUCCESS);
}

#[test]
fn null_pointers_are_errors() {
    let gpu = Gpu::new(Simulator::builder());
    let invalid = CUresult::CUDA_ERROR_INVALID_VALUE;
    assert_eq!(call!(gpu, cuMemAlloc_v2(null_mut(), 8)), invalid);
    assert_eq!(call!(gpu, cuMemCreate(null_mut(), GRANULE, &prop(0), 0)), invalid);
    assert_eq!(call!(gpu, cuMemCreate(&mut 0, GRANULE, std::ptr::null(), 0)), invalid);
    assert_eq!(call!(gpu, cuStreamCreate(null_mut(), 0)), invalid);
    assert!(gpu.sim.leaks().handles == 0 && gpu.sim.leaks().streams == 0);
}

#[test]
fn memory_beyond_all_addresses_is_not_taken_for_registered() {
    let gpu = Gpu::new(Simulator::builder());
    let mut own = [0_u8; 64];
    let mut register = |bytes| call!(gpu, cuMemHostRegister_v2(own.as_mut_ptr().cast(), bytes, 0));
    assert_eq!(register(usize::MAX), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(register(64), CUresult::CUDA_SUCCESS);
    assert_eq!(register(64), CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    ok!(gpu, cuMemHostUnregister(own.as_mut_ptr().cast()));
}

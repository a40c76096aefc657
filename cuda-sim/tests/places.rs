//! Memory on the host, and on devices that reach each other's or do not.

mod support;

use cuda_sim::Simulator;
use cuda_sys::types::*;
use support::{GRANULE, Gpu, access, call, exportable, location, ok, prop};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

fn host() -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST, id: 0 }
}

fn node(id: i32) -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA, id }
}

fn at(location: CUmemLocation) -> CUmemAllocationProp {
    CUmemAllocationProp { location, ..prop(0) }
}

fn right(location: CUmemLocation) -> CUmemAccessDesc {
    CUmemAccessDesc { location, ..access(0, 3) }
}

impl Gpu {
    fn create_at(&self, prop: &CUmemAllocationProp) -> Result<u64, CUresult> {
        let mut handle = 0;
        match call!(self, cuMemCreate(&mut handle, GRANULE, prop, 0)) {
            CUresult::CUDA_SUCCESS => Ok(handle),
            code => Err(code),
        }
    }

    fn set(&self, address: u64, rights: &[CUmemAccessDesc]) -> CUresult {
        call!(self, cuMemSetAccess(address, GRANULE, rights.as_ptr(), rights.len()))
    }

    fn right_of(&self, location: CUmemLocation, address: u64) -> u64 {
        let mut flags = 0;
        ok!(self, cuMemGetAccess(&mut flags, &location, address));
        flags
    }
}

#[test]
fn device_work_uses_memory_of_the_host() {
    let gpu = Gpu::new(Simulator::builder());
    for place in [host(), node(1)] {
        let handle = gpu.create_at(&at(place)).unwrap();
        assert_eq!((gpu.sim.memory_used(0), gpu.sim.host_memory_used()), (0, GRANULE as u64));
        let address = gpu.reserve(GRANULE);
        ok!(gpu, cuMemMap(address, GRANULE, 0, handle, 0));
        let stream = gpu.stream();
        assert_eq!(call!(gpu, cuMemsetD32Async(address, 1, 4, stream)), INVALID, "no access yet");
        // Both in one call.
        assert_eq!(gpu.set(address, &[access(0, 3), right(place)]), CUresult::CUDA_SUCCESS);
        assert_eq!((gpu.right_of(location(0), address), gpu.right_of(place, address)), (3, 3));
        gpu.fill(address, 7, 4, stream);
        ok!(gpu, cuStreamSynchronize(stream));
        assert_eq!(gpu.word(address + 12), 7);
        let mut found = CUmemAllocationProp::default();
        ok!(gpu, cuMemGetAllocationPropertiesFromHandle(&mut found, handle));
        assert_eq!((found.location.type_, found.location.id), (place.type_, place.id));
        ok!(gpu, cuMemUnmap(address, GRANULE));
        ok!(gpu, cuMemRelease(handle));
        assert_eq!(gpu.sim.host_memory_used(), 0);
    }
    gpu.sim.assert_clean();
}

#[test]
fn who_can_reach_what() {
    let gpu = Gpu::new(Simulator::builder());
    let map = |location: CUmemLocation| {
        let address = gpu.reserve(GRANULE);
        ok!(gpu, cuMemMap(address, GRANULE, 0, gpu.create_at(&at(location)).unwrap(), 0));
        address
    };
    let (of_device, of_host, of_node) = (map(location(0)), map(host()), map(node(0)));
    assert_eq!(gpu.set(of_device, &[right(host())]), CUresult::CUDA_ERROR_NOT_SUPPORTED);
    assert_eq!(gpu.set(of_device, &[right(node(0))]), INVALID);
    assert_eq!(gpu.set(of_host, &[right(node(0))]), INVALID);
    assert_eq!(gpu.set(of_node, &[right(host())]), CUresult::CUDA_SUCCESS);
}

/// Not only the first of them.
#[test]
fn every_mapping_of_a_range_must_be_within_reach() {
    let gpu = Gpu::new(Simulator::builder());
    let range = gpu.reserve(2 * GRANULE);
    for (index, place) in [host(), location(0)].into_iter().enumerate() {
        let handle = gpu.create_at(&at(place)).unwrap();
        ok!(gpu, cuMemMap(range + (index * GRANULE) as u64, GRANULE, 0, handle, 0));
    }
    let code = call!(gpu, cuMemSetAccess(range, 2 * GRANULE, &right(host()), 1));
    assert_eq!(code, CUresult::CUDA_ERROR_NOT_SUPPORTED);
    assert_eq!(gpu.right_of(host(), range), 0, "nor is the first opened");
    gpu.open(range, 2 * GRANULE);
}

#[test]
fn places_that_are_not_there() {
    let gpu = Gpu::new(Simulator::builder());
    let current = CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT;
    assert_eq!(gpu.create_at(&at(CUmemLocation { type_: current, id: 0 })), Err(INVALID));
    let missing = Err(CUresult::CUDA_ERROR_INVALID_DEVICE);
    assert_eq!(gpu.create_at(&at(node(99))), missing);
    let shared = CUmemAllocationProp { location: host(), ..exportable(0) };
    assert_eq!(gpu.create_at(&shared), Err(INVALID), "memory of the host at large stays here");
    let none = Gpu::new(Simulator::builder().host_memory_bytes(0));
    let unsupported = Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    assert_eq!(none.create_at(&at(host())), unsupported);
    assert_eq!(none.create_at(&at(node(0))), unsupported);
}

#[test]
fn a_memory_pool_on_the_host() {
    let gpu = Gpu::new(Simulator::builder());
    let props = CUmemPoolProps {
        allocType: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        location: host(),
        ..Default::default()
    };
    let mut pool = std::ptr::null_mut();
    ok!(gpu, cuMemPoolCreate(&mut pool, &props));
    let stream = gpu.stream();
    let mut address = 0;
    ok!(gpu, cuMemAllocFromPoolAsync(&mut address, 64, pool, stream));
    assert!(gpu.sim.host_memory_used() > 0);
    // At first it is the host's alone.
    assert_eq!(call!(gpu, cuMemsetD32Async(address, 5, 4, stream)), INVALID);
    let right = access(0, 3);
    ok!(gpu, cuMemPoolSetAccess(pool, &right, 1));
    gpu.fill(address, 5, 4, stream);
    ok!(gpu, cuStreamSynchronize(stream));
    assert_eq!(gpu.word(address), 5);
    ok!(gpu, cuMemFreeAsync(address, stream));
    ok!(gpu, cuMemPoolDestroy(pool));
    ok!(gpu, cuStreamSynchronize(stream));
    assert_eq!(gpu.sim.host_memory_used(), 0);
    gpu.sim.assert_clean();
}

#[test]
fn a_right_is_taken_while_the_work_of_others_goes_on() {
    use cuda_sim::Schedule;
    let gpu = Gpu::new(Simulator::builder().devices(2).schedule(Schedule::Manual));
    let address = gpu.reserve(GRANULE);
    gpu.map(address, GRANULE, gpu.create(GRANULE));
    assert_eq!(gpu.set(address, &[access(1, 3)]), CUresult::CUDA_SUCCESS);
    let own = gpu.stream();
    gpu.fill(address, 1, 4, own);
    gpu.sim.run_until_idle();
    // The owner's work may not have ended; the peer has none.
    assert_eq!(gpu.set(address, &[access(1, 0)]), CUresult::CUDA_SUCCESS);
    gpu.sim.assert_clean();
    assert_eq!(gpu.set(address, &[access(1, 3)]), CUresult::CUDA_SUCCESS);
    gpu.retain(1);
    let peer = gpu.stream();
    ok!(gpu, cuStreamWaitEvent(peer, gpu_event_on(&gpu, own), 0));
    gpu.fill(address, 2, 4, peer);
    gpu.sim.run_until_idle();
    assert_eq!(gpu.set(address, &[access(1, 0)]), INVALID);
    assert!(gpu.sim.report().misuse[0].contains("mapping in use"));
}

/// An event after everything on a stream of the first device.
fn gpu_event_on(gpu: &Gpu, stream: CUstream) -> CUevent {
    gpu.retain(0);
    let event = gpu.record(stream);
    gpu.retain(1);
    event
}

/// As an H200 beside another one does it: [measured](../../benches/results/h200-2026-11-30-two/README.md).
#[test]
fn a_free_waits_for_the_device_that_the_memory_was_made_on_and_for_no_other() {
    use cuda_sim::Schedule;
    const WORDS: usize = 16;
    for kind in 0..4 {
        for (current, worker) in [(0, 0), (1, 0), (0, 1), (1, 1)] {
            let gpu = Gpu::new(Simulator::builder().devices(2).schedule(Schedule::Manual));
            let contexts = [0, 1].map(|device| gpu.retain(device));
            gpu.retain(0);
            let (mut host, mut own, mut address) = (std::ptr::null_mut(), [0_u32; WORDS], 0);
            match kind {
                0 => address = gpu.alloc(4 * WORDS),
                1 => ok!(gpu, cuMemHostAlloc(&mut host, 4 * WORDS, CU_MEMHOSTALLOC_PORTABLE)),
                2 => {
                    host = own.as_mut_ptr().cast();
                    ok!(gpu, cuMemHostRegister_v2(host, 4 * WORDS, 1));
                }
                _ => ok!(gpu, cuMemAllocManaged(&mut address, 4 * WORDS, 1)),
            }
            address = if host.is_null() { address } else { host.expose_provenance() as u64 };
            ok!(gpu, cuCtxSetCurrent(contexts[1]));
            if kind == 0 {
                ok!(gpu, cuCtxEnablePeerAccess(contexts[0], 0));
            }
            ok!(gpu, cuCtxSetCurrent(contexts[worker]));
            let stream = gpu.stream();
            gpu.fill(address, 1, WORDS, stream);
            ok!(gpu, cuCtxSetCurrent(contexts[current]));
            match kind {
                0 | 3 => ok!(gpu, cuMemFree_v2(address)),
                1 => ok!(gpu, cuMemFreeHost(host)),
                _ => ok!(gpu, cuMemHostUnregister(host)),
            }
            ok!(gpu, cuCtxSetCurrent(contexts[worker]));
            if worker == 0 {
                assert_eq!(call!(gpu, cuStreamQuery(stream)), CUresult::CUDA_SUCCESS);
                gpu.sim.assert_clean();
            } else {
                gpu.sim.run_until_idle();
                assert!(gpu.sim.report().misuse[0].contains("cannot reach"), "{kind}");
            }
        }
    }
}

/// The same where the other device's work is over and nobody has waited for it.
#[test]
fn a_free_beside_another_devices_work_is_a_race() {
    use cuda_sim::Schedule;
    for is_seen in [false, true] {
        let gpu = Gpu::new(Simulator::builder().devices(2).schedule(Schedule::Manual));
        let mut host = std::ptr::null_mut();
        gpu.retain(0);
        ok!(gpu, cuMemHostAlloc(&mut host, 64, CU_MEMHOSTALLOC_PORTABLE));
        gpu.retain(1);
        let stream = gpu.stream();
        gpu.fill(host.expose_provenance() as u64, 1, 16, stream);
        gpu.sim.run_until_idle();
        if is_seen {
            ok!(gpu, cuStreamSynchronize(stream));
        }
        ok!(gpu, cuMemFreeHost(host));
        assert_eq!(gpu.sim.report().races.is_empty(), is_seen);
    }
}

#[test]
fn peer_access_ends_with_either_context() {
    let gpu = Gpu::new(Simulator::builder().devices(2));
    let (block, first) = (gpu.alloc(64), gpu.retain(0));
    let (second, stream) = (gpu.retain(1), gpu.stream());
    let reach = |address, stream| call!(gpu, cuMemsetD32Async(address, 1, 4, stream));
    assert_eq!(reach(block, stream), INVALID);
    // Of two contexts that asked one takes it back.
    let mut created = std::ptr::null_mut();
    ok!(gpu, cuCtxCreate_v2(&mut created, 0, 1));
    for context in [created, second] {
        ok!(gpu, cuCtxSetCurrent(context));
        ok!(gpu, cuCtxEnablePeerAccess(first, 0));
    }
    ok!(gpu, cuCtxDisablePeerAccess(first));
    assert_eq!(reach(block, stream), CUresult::CUDA_SUCCESS);
    ok!(gpu, cuCtxDestroy_v2(created));
    assert_eq!(reach(block, stream), INVALID);
    ok!(gpu, cuCtxEnablePeerAccess(first, 0));
    assert_eq!(reach(block, stream), CUresult::CUDA_SUCCESS);
    // Which the reset of the owner would not wait for.
    ok!(gpu, cuStreamSynchronize(stream));
    ok!(gpu, cuDevicePrimaryCtxReset_v2(0));
    gpu.retain(0);
    let block = gpu.alloc(64);
    assert_eq!(reach(block, stream), INVALID, "whose context is another one");
    gpu.sim.assert_clean();
}

#[test]
fn devices_without_peer_access() {
    let gpu = Gpu::new(Simulator::builder().devices(2).peer_access(false));
    let first = gpu.retain(0);
    gpu.retain(1);
    let code = call!(gpu, cuCtxEnablePeerAccess(first, 0));
    assert_eq!(code, CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
    gpu.retain(0);
    let mut can = -1;
    ok!(gpu, cuDeviceCanAccessPeer(&mut can, 1, 0));
    assert_eq!(can, 0);
    let address = gpu.reserve(GRANULE);
    gpu.map(address, GRANULE, gpu.create(GRANULE));
    assert_eq!(gpu.set(address, &[access(1, 3)]), CUresult::CUDA_ERROR_INVALID_DEVICE);
    assert_eq!(gpu.right_of(location(1), address), 0);
}

/// As two H200s have it: [each case](../../benches/results/h200-2026-11-30-peers/copies.txt).
#[test]
fn copies_between_devices_that_were_not_opened_to_each_other() {
    const BYTES: usize = 64;
    // What cuMemAlloc gave, mapped memory, a driver's pool's.
    for case in 0..18 {
        let (from, to, on) = (case / 6, case / 2 % 3, case % 2);
        let gpu = Gpu::new(Simulator::builder().devices(2));
        let memory = |device: usize, kind: usize| {
            let context = gpu.retain(device as i32);
            let mut address = 0;
            match kind {
                0 => address = gpu.alloc(BYTES),
                1 => {
                    address = gpu.reserve(GRANULE);
                    let handle = gpu.create_at(&prop(device as i32)).unwrap();
                    ok!(gpu, cuMemMap(address, GRANULE, 0, handle, 0));
                    assert_eq!(
                        gpu.set(address, &[access(device as i32, 3)]),
                        CUresult::CUDA_SUCCESS
                    );
                }
                _ => {
                    ok!(gpu, cuMemAllocAsync(&mut address, BYTES, std::ptr::null_mut()));
                    ok!(gpu, cuCtxSynchronize());
                }
            }
            (context, address)
        };
        let ((first, source), (second, target)) = (memory(0, from), memory(1, to));
        ok!(gpu, cuCtxSetCurrent(first));
        let words = [7_u32; BYTES / 4];
        ok!(gpu, cuMemcpyHtoD_v2(source, words.as_ptr().cast(), BYTES));
        ok!(gpu, cuCtxSynchronize());
        ok!(gpu, cuCtxSetCurrent([first, second][on]));
        let stream = gpu.stream();
        // The end on the stream's own device is reached anyway.
        let is_made = if on == 0 { to == 0 } else { from == 0 };
        let expected = if is_made { CUresult::CUDA_SUCCESS } else { INVALID };
        for how in 0..3 {
            let code = match how {
                0 => call!(gpu, cuMemcpyDtoDAsync_v2(target, source, BYTES, stream)),
                1 => call!(gpu, cuMemcpyAsync(target, source, BYTES, stream)),
                _ => call!(gpu, cuMemcpyDtoD_v2(target, source, BYTES)),
            };
            assert_eq!(code, expected, "{from} to {to} on {on}, {how}");
            ok!(gpu, cuCtxSynchronize());
        }
        if !is_made {
            ok!(gpu, cuMemcpyPeerAsync(target, second, source, first, BYTES, stream));
            ok!(gpu, cuCtxSynchronize());
        }
        ok!(gpu, cuCtxSetCurrent(second));
        let mut arrived = [0_u32; BYTES / 4];
        ok!(gpu, cuMemcpyDtoH_v2(arrived.as_mut_ptr().cast(), target, BYTES));
        assert_eq!(arrived, words);
        gpu.sim.assert_clean();
    }
}

#[test]
fn a_mapping_costs_for_each_device_that_it_is_open_to() {
    let gpu = Gpu::new(Simulator::builder().devices(2).costs(cuda_sim::Costs::h200()));
    gpu.retain(1);
    gpu.retain(0);
    let address = gpu.reserve(GRANULE);
    let costs_of = |rights: &[CUmemAccessDesc]| {
        let handle = gpu.create(GRANULE);
        ok!(gpu, cuMemMap(address, GRANULE, 0, handle, 0));
        let start = gpu.sim.modelled_us();
        assert_eq!(gpu.set(address, rights), CUresult::CUDA_SUCCESS);
        let opened = gpu.sim.modelled_us();
        ok!(gpu, cuMemUnmap(address, GRANULE));
        let unmapped = gpu.sim.modelled_us();
        ok!(gpu, cuMemRelease(handle));
        (opened - start, unmapped - opened)
    };
    let own = costs_of(&[access(0, 3)]);
    let both = costs_of(&[access(0, 3), access(1, 1)]);
    assert!(own.0 > 10.0 && own.1 > 10.0, "{own:?}");
    let twice = |of: f64, once: f64| (of - 2.0 * once).abs() < 0.001;
    assert!(twice(both.0, own.0) && twice(both.1, own.1), "{own:?} {both:?}");
}

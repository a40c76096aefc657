//! Bad arguments: each is a named error, and nothing has changed after it.

use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::*;
use vpmm::{DevicePtr, Error};

use crate::rig::{PAGE, config};
use crate::support::streams::assert_second_context_refused;
use crate::support::{Rig, call};

#[test]
fn every_bad_pointer_is_named() {
    Rig::everywhere(|rig| {
        let watched = rig.small_pool(4);
        let stream = rig.stream();
        let (two, small) = (watched.pages(2, &stream), watched.malloc(4096, &stream));
        let free = |address: u64| watched.pool.free(DevicePtr::from_address(address), &stream);
        let before = watched.layout();
        for address in [0, 1, u64::MAX, 0xdead_0000] {
            assert!(matches!(free(address), Err(Error::ForeignPointer { .. })), "{address:#x}");
        }
        for offset in [1, 8, 512, PAGE, 2 * PAGE - 1] {
            let error = free(two.address() + offset).unwrap_err();
            assert!(
                matches!(error, Error::InteriorPointer { start, .. } if start == two.address()),
                "{error}"
            );
        }
        let error = free(small.address() + 256).unwrap_err();
        assert!(
            matches!(error, Error::InteriorPointer { start, .. } if start == small.address()),
            "{error}"
        );
        // Mapped and never handed out.
        assert!(matches!(free(two.address() + 2 * PAGE), Err(Error::DoubleFree { .. })));
        // Reserved and never mapped.
        assert!(matches!(free(two.address() + 100 * PAGE), Err(Error::StalePointer { .. })));
        assert_eq!(watched.layout(), before);
        watched.free(two, &stream);
        watched.free(small, &stream);
        for held in [two, small] {
            let error = watched.pool.free(held.ptr, &stream).unwrap_err();
            assert!(matches!(error, Error::DoubleFree { .. }), "{error}");
        }
        assert!(matches!(free(two.address()), Err(Error::DoubleFree { .. })));
        watched.assert_intact();
    });
}

#[test]
fn a_pointer_whose_memory_has_moved_is_stale() {
    Rig::everywhere(|rig| {
        let watched = rig.small_pool(0);
        let stream = rig.stream();
        let held = [(); 4].map(|()| watched.pages(1, &stream));
        watched.free(held[0], &stream);
        watched.free(held[2], &stream);
        let two = watched.pages(2, &stream);
        for held in [held[0], held[2]] {
            let error = watched.pool.free(held.ptr, &stream).unwrap_err();
            assert!(matches!(error, Error::StalePointer { .. }), "{error}");
        }
        watched.free(two, &stream);
        watched.assert_intact();
    });
}

#[test]
fn zero_bytes_are_refused_and_the_pool_goes_on() {
    Rig::everywhere(|rig| {
        let watched = rig.small_pool(1);
        let stream = rig.stream();
        assert!(matches!(watched.pool.malloc(0, &stream), Err(Error::ZeroSize)));
        let held = watched.pages(1, &stream);
        watched.free(held, &stream);
        watched.assert_intact();
    });
}

#[test]
fn streams_of_other_devices_and_contexts_are_refused() {
    let sim = Simulator::builder().devices(2).build().unwrap();
    let driver = vpmm::Driver::new(sim.driver()).unwrap();
    let (zero, one) = (driver.device(0).unwrap(), driver.device(1).unwrap());
    let pool = vpmm::Pool::paged(&zero, &config(PAGE, 0)).unwrap();
    let (right, wrong) = (zero.stream().unwrap(), one.stream().unwrap());
    let ptr = pool.malloc(PAGE as usize, &right).unwrap();
    for error in
        [pool.malloc(PAGE as usize, &wrong).unwrap_err(), pool.free(ptr, &wrong).unwrap_err()]
    {
        assert!(
            matches!(error, Error::WrongDevice { stream_device: 1, pool_device: 0 }),
            "{error}"
        );
    }
    assert!(matches!(pool.malloc(1, &wrong), Err(Error::WrongDevice { .. })), "small requests too");
    // The device current on the thread does not matter, the stream's does.
    call!(driver, cuCtxSetCurrent(one.context()));
    let again = pool.malloc(PAGE as usize, &right).unwrap();
    let mut current = std::ptr::null_mut();
    call!(driver, cuCtxGetCurrent(&mut current));
    assert_eq!(current, one.context(), "the caller's context is current again");
    for ptr in [ptr, again] {
        pool.free(ptr, &right).unwrap();
    }
    pool.validate().unwrap();
    sim.assert_clean();
}

#[test]
fn a_stream_of_a_second_context_of_the_device_is_refused() {
    let rig = Rig::simulated(cuda_sim::Schedule::Eager);
    assert_second_context_refused(&rig.small_pool(0), PAGE as usize);
}

#[test]
fn settings_that_do_not_fit_the_device_are_named() {
    Rig::everywhere(|rig| {
        for (page, pages, va, name) in [
            (Some(3 << 19), 0, 8 << 40, "page_size_bytes"),
            (None, 0, 1 << 20, "va_size_bytes"),
            (None, u64::MAX, 8 << 40, "initial_pages"),
        ] {
            let mut config = vpmm::PagedConfig::default();
            (config.page_size_bytes, config.initial_pages, config.va_size_bytes) =
                (page, pages, va);
            let error = vpmm::Pool::paged(&rig.device, &config).unwrap_err();
            assert!(matches!(error, Error::Config { name: named, .. } if named == name), "{error}");
        }
        let mut config = config(PAGE, 8);
        config.limit_bytes = Some(7 * PAGE);
        assert!(matches!(
            vpmm::Pool::paged(&rig.device, &config),
            Err(Error::Config { name: "initial_pages", .. })
        ));
    });
}

#[test]
fn a_context_that_is_gone_is_an_error_and_no_crash() {
    // The second is what a driver answers that was shut down at the process's end.
    gone(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED);
    gone(CUresult::CUDA_ERROR_DEINITIALIZED);
}

fn gone(code: CUresult) {
    let sim = Simulator::builder().build().unwrap();
    let driver = vpmm::Driver::new(sim.driver()).unwrap();
    let device = driver.device(0).unwrap();
    let pool = vpmm::Pool::paged(&device, &config(PAGE, 0)).unwrap();
    let stream = device.stream().unwrap();
    let held = [(); 2].map(|()| pool.malloc(PAGE as usize, &stream).unwrap());
    pool.free(held[0], &stream).unwrap();
    sim.lose_device(0, code);
    for error in
        [pool.malloc(PAGE as usize, &stream).unwrap_err(), pool.free(held[1], &stream).unwrap_err()]
    {
        assert!(error.is_context_lost(), "{error}");
    }
    pool.validate().unwrap();
    pool.destroy().unwrap(); // and no panic here
}

/// What cannot be served takes no addresses: they would stay the pool's, and another request like it would take more.
#[test]
fn a_request_beyond_all_memory_reserves_nothing() {
    for limit in [None, Some(8 * PAGE)] {
        let rig = Rig::simulated(Schedule::Eager);
        let mut config = config(PAGE, 0);
        config.limit_bytes = limit;
        let watched = rig.pool(&config);
        let stream = rig.stream();
        let held = watched.malloc(PAGE, &stream);
        let reserved = watched.pool.stats().reserved_bytes;
        for times in 1..=4_u64 {
            let refused = watched.try_malloc(times << 40, &stream);
            assert!(refused.is_err_and(|error| error.is_out_of_memory()));
        }
        assert_eq!(watched.pool.stats().reserved_bytes, reserved);
        watched.free(held, &stream);
        watched.assert_intact();
    }
}

//! A pool's end, of each of several devices, and never.

use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::CUresult;
use vpmm::StreamHandle;

use crate::rig::{GRANULE, config};
use crate::support::Rig;

/// Work that nothing was freed behind is waited for all the same.
#[test]
fn a_pool_that_ends_with_something_allocated_waits_for_the_work_on_it() {
    let rig = Rig::simulated(Schedule::Manual);
    let watched = rig.pool(&config(4, 64));
    let stream = rig.stream();
    watched.malloc(GRANULE, &stream).check(&rig, &stream);
    // The wait that is to find out whether a pool may end with that: the end waits itself.
    rig.sim.as_ref().unwrap().fail_nth("cuCtxSynchronize", 1, CUresult::CUDA_ERROR_UNKNOWN);
    drop(watched);
    assert_eq!(rig.mismatches(), 0);
    rig.assert_clean();
}

#[test]
fn everything_is_given_back_at_the_end() {
    for schedule in [Schedule::Late { patience: 100 }, Schedule::Manual, Schedule::Random] {
        let rig = Rig::simulated(schedule);
        let sim = rig.sim.clone().expect("a simulated rig");
        {
            let watched = rig.small_pool();
            let (one, two) = (rig.stream(), rig.stream());
            let held = [(); 4].map(|()| watched.malloc(GRANULE, &one));
            watched.free(held[1], &one);
            rig.order(&one, &two);
            watched.free(held[3], &two);
            let _never_freed = watched.malloc(2 * GRANULE, &two);
            let _small = watched.malloc(1000, StreamHandle::PER_THREAD);
        }
        drop(rig);
        sim.assert_clean();
        assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
    }
}

#[test]
fn each_device_gives_its_own_memory() {
    let sim = Simulator::builder().devices(2).build().unwrap();
    let driver = vpmm::Driver::new(sim.driver()).unwrap();
    let device = driver.device(1).unwrap();
    let pool = vpmm::Pool::new(&device, &config(16, 96)).unwrap();
    let stream = device.stream().unwrap();
    let ptr = pool.malloc(8 * GRANULE as usize, &stream).unwrap();
    assert_eq!((sim.memory_used(0), sim.memory_used(1)), (0, 8 * GRANULE));
    pool.free(ptr, &stream).unwrap();
    drop(pool);
    sim.assert_clean();
}

/// Statics are never dropped: the process ends with the pool alive, and ends well.
#[test]
fn a_pool_in_a_static_lives_to_the_end_of_the_process() {
    static POOL: std::sync::OnceLock<(Simulator, vpmm::Pool)> = std::sync::OnceLock::new();
    let (sim, pool) = POOL.get_or_init(|| {
        let sim = Simulator::builder().build().unwrap();
        let device = vpmm::Driver::new(sim.driver()).unwrap().device(0).unwrap();
        (sim, vpmm::Pool::new(&device, &config(16, 96)).unwrap())
    });
    let stream = pool.device().stream().unwrap();
    let freed = pool.malloc(GRANULE as usize, &stream).unwrap();
    pool.malloc(GRANULE as usize, &stream).unwrap();
    pool.free(freed, &stream).unwrap();
    pool.validate().unwrap();
    sim.assert_clean();
}

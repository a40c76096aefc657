//! A process that ends with pools alive.

use std::cell::RefCell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cuda_sim::Schedule;
use vpmm::{GraphPool, Pool, Stream, StreamHandle, Tagged};

use crate::rig::{GRANULE, Profile, SIZES, beside, bounded, elsewhere};
use crate::support::Rig;

/// Everything that a process may have when it ends.
struct Everything {
    pool: Pool,
    stream: Stream,
    _heaps: (GraphPool, [Tagged; 2]),
}

/// Pools of every kind with memory live, free, pending on streams of several kinds, and asleep; and an
/// orphan of each.
fn everything(rig: &Rig) -> [Everything; 3] {
    Profile::ALL.map(|profile| {
        let (pool, orphan) = (profile.open(&rig.device), profile.open(&rig.device));
        let stream = rig.stream();
        orphan.malloc(GRANULE as usize, &stream).unwrap();
        drop(orphan);
        for by in [stream.handle(), StreamHandle::LEGACY, StreamHandle::PER_THREAD] {
            let held = SIZES.map(|bytes| pool.malloc(bytes as usize, by).unwrap());
            rig.fill(held[0].address(), SIZES[0], 1, by);
            pool.free(held[0], by).unwrap();
        }
        let heaps = beside(&pool, &stream);
        Everything { pool, stream, _heaps: heaps }
    })
}

/// The devices that a process is tested with. They stay: statics are never dropped.
fn devices() -> Vec<Rig> {
    let simulated = Schedule::Late { patience: 3 };
    let only_gpu = std::env::var_os("VPMM_TEST_DEVICE").is_some_and(|device| device == "gpu");
    let simulated = (!only_gpu).then(|| Rig::simulated(simulated));
    simulated.into_iter().chain(Rig::gpu()).collect()
}

static POOLS: OnceLock<Vec<[Everything; 3]>> = OnceLock::new();

/// Fills the static, and leaves the devices as they are, work under way.
fn fill_the_static() {
    POOLS.get_or_init(|| {
        let devices = devices();
        let pools = devices.iter().map(everything).collect();
        devices.into_iter().for_each(std::mem::forget);
        pools
    });
}

const STATUS: i32 = 42;

#[test]
fn main_returns_with_pools_in_a_static() {
    bounded("processes::main_returns_with_pools_in_a_static", fill_the_static);
}

#[test]
fn a_process_exits_with_pools_in_a_static() {
    let status = elsewhere("processes::a_process_exits_with_pools_in_a_static", || {
        fill_the_static();
        std::process::exit(STATUS);
    });
    assert_eq!(status.expect("the other process does not come here").code(), Some(STATUS));
}

/// The end comes by one thread, while others are anywhere in the pools.
#[test]
fn a_process_exits_while_threads_are_at_work() {
    let status = elsewhere("processes::a_process_exits_while_threads_are_at_work", || {
        static ROUNDS: AtomicU64 = AtomicU64::new(0);
        let rig = Rig::simulated(Schedule::Random);
        let pools = POOLS.get_or_init(|| vec![everything(&rig)]);
        for of_profile in &pools[0] {
            std::thread::spawn(move || {
                loop {
                    for bytes in SIZES {
                        let ptr = of_profile.pool.malloc(bytes as usize, &of_profile.stream);
                        of_profile.pool.free(ptr.unwrap(), &of_profile.stream).unwrap();
                        ROUNDS.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        while ROUNDS.load(Ordering::Relaxed) < 1000 {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::process::exit(STATUS);
    });
    assert_eq!(status.expect("the other process does not come here").code(), Some(STATUS));
}

/// Pools that are dropped at the very end, when a driver may have been shut down before: by a variable
/// of the main thread's, by a function that runs at the exit.
#[test]
fn pools_are_dropped_at_the_exit() {
    static LAST: std::sync::Mutex<Vec<[Everything; 3]>> = std::sync::Mutex::new(Vec::new());
    thread_local! {
        static OWN: RefCell<Vec<[Everything; 3]>> = const { RefCell::new(Vec::new()) };
    }
    extern "C" fn at_exit() {
        // What is left behind stays for the system to take back.
        let pools = std::mem::take(&mut *LAST.lock().unwrap());
        assert!(!pools.is_empty());
        drop(pools);
    }
    let status = elsewhere("processes::pools_are_dropped_at_the_exit", || {
        // SAFETY: a function of this program, which does not unwind into C: a panic in it aborts. It
        // runs after those that a driver registers later, when it is loaded.
        assert_eq!(unsafe { libc::atexit(at_exit) }, 0);
        let devices = devices();
        LAST.lock().unwrap().extend(devices.iter().map(everything));
        OWN.with_borrow_mut(|own| own.extend(devices.iter().map(everything)));
        devices.into_iter().for_each(std::mem::forget);
        std::process::exit(STATUS);
    });
    assert_eq!(status.expect("the other process does not come here").code(), Some(STATUS));
}

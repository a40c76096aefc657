//! Real traces on a simulated device that finishes its work at times of its own choosing: the
//! books of the default pool hold throughout.

use cuda_sim::{Costs, Schedule, Simulator};
use vpmm::{DevicePtr, Driver, Pool, PoolConfig, Stream};
use vpmm_cli::trace::{Action, Trace};

/// `room` is how much of the trace's peak the pool may hold, if that is limited.
fn books_hold(name: &str, schedule: Schedule, seed: u64, room: Option<f64>) {
    // From the package's folder, where tests are run: the folder at build time may be another machine's.
    let trace = Trace::open(&format!("traces/{name}.csv.gz")).unwrap();
    let sim = Simulator::builder().memory_bytes(141 << 30).costs(Costs::free()).seed(seed);
    let sim = sim.schedule(schedule).build().unwrap();
    let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
    let mut config = PoolConfig::default();
    // A check looks at every address.
    config.va_size_bytes = Some(64 << 30);
    config.limit_bytes = room.map(|room| (trace.peak_live_bytes as f64 * room) as u64);
    let pool = Pool::new(&device, &config).unwrap();
    let streams: Vec<Stream> = (0..trace.streams).map(|_| device.stream().unwrap()).collect();
    let mut slots: Vec<Option<DevicePtr>> = vec![None; trace.allocations.len()];
    for (number, operation) in trace.operations.iter().enumerate() {
        let (slot, stream) = (operation.slot as usize, &streams[operation.stream as usize]);
        match operation.action {
            Action::Allocate => {
                let bytes = trace.allocations[slot].bytes as usize;
                slots[slot] = Some(pool.malloc(bytes, stream).unwrap());
            }
            Action::Free => pool.free(slots[slot].take().unwrap(), stream).unwrap(),
        }
        if number % 10_000 == 0 {
            pool.validate().unwrap();
        }
    }
    pool.validate().unwrap();
    assert!(pool.stats().extents_moved > 0, "nothing had to move");
}

/// Rests of blocks that extents were taken from once became one with neighbours that were still
/// to be taken themselves.
#[test]
fn of_nine_streams_with_work_that_ends_at_random() {
    (0..8).for_each(|seed| books_hold("serve_streams", Schedule::Random, seed, None));
}

#[test]
fn of_two_streams_with_work_that_ends_late() {
    books_hold("resnet_train", Schedule::Late { patience: 200 }, 0, None);
}

/// Where the limit is near, large blocks go where the least movable memory is lost, and requests
/// wait for what other streams have freed.
#[test]
fn of_pools_with_hardly_more_than_what_is_live() {
    books_hold("cupy_mix", Schedule::Random, 1, Some(1.06));
    books_hold("serve_streams", Schedule::Random, 2, Some(1.06));
    books_hold("resnet_train", Schedule::Late { patience: 200 }, 3, Some(1.01));
}

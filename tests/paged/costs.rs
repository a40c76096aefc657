//! What a request costs does not follow how much there is: counted in driver calls.

use cuda_sim::{Schedule, Simulator};
use vpmm::{DevicePtr, Driver, Pool, Stream};

use crate::rig::{PAGE, config};

/// A stream's events pass in their order: how far it has come is found in a few questions, however many frees it
/// has come past since somebody asked last.
#[test]
fn how_far_a_stream_has_come_is_asked_a_few_times() {
    const FREES: usize = 2000;
    for opportunistic in [true, false] {
        let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
        let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
        let mut config = config(PAGE, 0);
        config.reuse.opportunistic = opportunistic;
        let pool = Pool::paged(&device, &config).unwrap();
        let [own, side, other] = [(); 3].map(|()| device.stream().unwrap());
        let some = |count| -> Vec<DevicePtr> {
            (0..count).map(|_| pool.malloc(PAGE as usize, &own).unwrap()).collect()
        };
        let free = |ptr: DevicePtr, stream: &Stream| {
            pool.record_stream(ptr, stream).unwrap();
            pool.free(ptr, &own).unwrap();
        };
        let held = some(FREES);
        let last = some(1);
        // Apart from each other, so that they stay as many.
        held.iter().for_each(|ptr| free(*ptr, &side));
        sim.run_until_idle();
        for stream in [&own, &side] {
            sim.enqueue(stream.handle().raw(), "keeps it busy", |_| Ok(())).unwrap();
        }
        last.iter().for_each(|ptr| free(*ptr, &side));
        let before = device.driver().calls();
        pool.malloc(2 * PAGE as usize, &other).unwrap();
        let calls = device.driver().calls().since(&before);
        assert!(calls.count("cuEventQuery") <= 64, "{calls:?}");
        pool.validate().unwrap();
        assert_eq!(pool.stats().pending_count > 1, !opportunistic);
        sim.run_until_idle();
        device.synchronize().unwrap();
        pool.validate().unwrap();
        assert_eq!(pool.stats().pending_bytes, 0);
    }
}

//! The simulator's modelled driver time against what was measured.

mod support;

use cuda_sim::Simulator;
use support::{create, enter, ok, reserve, set_access};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Handle size in MiB, then the µs that an H200 took to create, map, open, unmap and release
/// 1 GiB of such handles.
const MEASURED: [(u64, [f64; 5]); 4] = [
    (2, [3778.0, 233.0, 11003.0, 7328.0, 4429.0]),
    (16, [467.0, 26.0, 1219.0, 818.0, 860.0]),
    (128, [73.0, 4.0, 181.0, 124.0, 534.0]),
    (1024, [34.0, 1.0, 48.0, 23.0, 230.0]),
];

#[test]
fn a_gib_costs_what_was_measured() {
    for (mib, measured) in MEASURED {
        let simulator = Simulator::builder().build().expect("a slot");
        let driver = simulator.driver();
        enter(&driver);
        let (bytes, at) = (mib * MIB, reserve(&driver, GIB));
        let mut before = simulator.modelled_us();
        let mut lap = || {
            let now = simulator.modelled_us();
            now - std::mem::replace(&mut before, now)
        };
        let handles: Vec<u64> = (0..GIB / bytes).map(|_| create(&driver, bytes)).collect();
        let created = lap();
        for (place, &handle) in (0..).zip(&handles) {
            ok!(driver, cuMemMap(at + place * bytes, bytes as usize, 0, handle, 0));
        }
        let mapped = lap();
        set_access(&driver, at, GIB);
        let opened = lap();
        ok!(driver, cuMemUnmap(at, GIB as usize));
        let unmapped = lap();
        for handle in handles {
            ok!(driver, cuMemRelease(handle));
        }
        let released = lap();
        for (modelled, measured) in
            [created, mapped, opened, unmapped, released].into_iter().zip(measured)
        {
            let near = (modelled - measured).abs() <= 0.02 * measured;
            assert!(near, "handles of {mib} MiB: {modelled} µs for {measured} µs");
        }
    }
}

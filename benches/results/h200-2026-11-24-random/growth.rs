//! A pool's first requests: what they take beside the driver's calls, and how many page faults they meet; and the
//! same of the pool's making. A program of its own, with `vpmm` and `libc` as dependencies: medians of 31 pools.

use std::time::Instant;

use vpmm::{Driver, Pool, PoolConfig};

fn faults() -> f64 {
    // SAFETY: zeros are such a structure, and the pointer is live for the call.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage.ru_minflt as f64
    }
}

fn main() {
    let driver = Driver::load().unwrap();
    driver.measure_calls(true);
    let device = driver.device(0).unwrap();
    let stream = device.stream().unwrap();
    let in_calls = || driver.time_in_calls().as_nanos() as f64;
    for (requests, bytes) in [(1, 1 << 30), (512, 2 << 20)] {
        let mut rows: [Vec<f64>; 5] = Default::default();
        for _ in 0..31 {
            let (met, begin) = (faults(), Instant::now());
            let pool = Pool::new(&device, &PoolConfig::default()).unwrap();
            let made = begin.elapsed().as_nanos() as f64;
            let made_faults = faults() - met;
            let mut live = Vec::with_capacity(requests);
            let (before, met, begin) = (in_calls(), faults(), Instant::now());
            live.extend((0..requests).map(|_| pool.malloc(bytes, &stream).unwrap()));
            let all = begin.elapsed().as_nanos() as f64;
            let (met, calls) = (faults() - met, in_calls() - before);
            live.into_iter().for_each(|block| pool.free(block, &stream).unwrap());
            pool.destroy().unwrap();
            let row = [all - calls, calls, met, made, made_faults];
            rows.iter_mut().zip(row).for_each(|(of, value)| of.push(value));
        }
        let [host, calls, met, made, made_faults] = rows.map(|mut of| {
            of.sort_by(f64::total_cmp);
            of[of.len() / 2]
        });
        println!(
            "{requests} x {bytes}: host {host:.0} ns driver {calls:.0} ns faults {met} \
             | new {made:.0} ns faults {made_faults}"
        );
    }
}

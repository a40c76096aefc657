// How much one thread loses when others work: a loop of registers only with several instructions in a cycle,
// and a chain of multiplications; pinned to processors, or not.
use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;
unsafe extern "C" {
    fn sched_setaffinity(pid: i32, size: usize, mask: *const u64) -> i32;
}
fn pin(cpu: usize) {
    let mut mask = [0u64; 16];
    mask[cpu / 64] |= 1 << (cpu % 64);
    unsafe { sched_setaffinity(0, 128, mask.as_ptr()) };
}
fn wide(n: u64) -> u64 {
    let (mut a, mut b, mut c, mut d, mut e, mut f) = (1u64, 2u64, 3u64, 4u64, 5u64, 6u64);
    for i in 0..n {
        a = a.wrapping_add(i) ^ 3;
        b = (b ^ i).wrapping_add(7);
        c = c.wrapping_sub(i) ^ 9;
        d = d.rotate_left(3).wrapping_add(1);
        e = e.wrapping_add(d) ^ 5;
        f = f.rotate_left(7) ^ i;
        unsafe {
            std::arch::asm!("/* {} {} {} {} {} {} */", inout(reg) a, inout(reg) b, inout(reg) c, inout(reg) d, inout(reg) e, inout(reg) f)
        };
    }
    a ^ b ^ c ^ d ^ e ^ f
}
fn chain(n: u64) -> u64 {
    let mut x = 1u64;
    for _ in 0..n {
        x = black_box(x.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 1);
    }
    x
}
fn measure(work: fn(u64) -> u64, n: u64, cpus: &[Option<usize>]) -> (f64, f64) {
    let b = Barrier::new(cpus.len());
    let mut best = (f64::MAX, f64::MAX);
    for _ in 0..5 {
        let times: Vec<f64> = std::thread::scope(|s| {
            let hs: Vec<_> = cpus
                .iter()
                .map(|&cpu| {
                    let b = &b;
                    s.spawn(move || {
                        if let Some(c) = cpu {
                            pin(c)
                        }
                        black_box(work(n / 20));
                        b.wait();
                        let t = Instant::now();
                        black_box(work(n));
                        t.elapsed().as_nanos() as f64 / n as f64
                    })
                })
                .collect();
            hs.into_iter().map(|h| h.join().unwrap()).collect()
        });
        let mean = times.iter().sum::<f64>() / times.len() as f64;
        let worst = times.iter().cloned().fold(0.0, f64::max);
        if mean < best.0 {
            best = (mean, worst);
        }
    }
    best
}
fn main() {
    let n = std::thread::available_parallelism().unwrap().get();
    println!("{n} processors");
    for (name, work, count) in
        [("wide", wide as fn(u64) -> u64, 20_000_000u64), ("chain", chain, 10_000_000)]
    {
        let show = |what: String, cpus: &[Option<usize>]| {
            let (mean, worst) = measure(work, count, cpus);
            println!("{name:6} {what:28} best of 5: mean {mean:.3} worst {worst:.3} ns");
        };
        for cpu in [0, 1, 2, 5] {
            show(format!("cpu {cpu} alone"), &[Some(cpu)]);
        }
        for other in [1, 2, 3, 4, n / 2, n / 2 + 1] {
            show(format!("cpus 0 and {other}"), &[Some(0), Some(other)]);
        }
        show("every second cpu".into(), &(0..n).step_by(2).map(Some).collect::<Vec<_>>());
        show("the first half".into(), &(0..n / 2).map(Some).collect::<Vec<_>>());
        show("all cpus, pinned".into(), &(0..n).map(Some).collect::<Vec<_>>());
        for threads in [1, 2, 4, 8, 16] {
            show(format!("{threads} threads, not pinned"), &vec![None; threads]);
        }
    }
}

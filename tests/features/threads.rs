//! Several threads that use each other's memory on one pool.

use cuda_sim::Schedule;

use crate::rig::{GRANULE, Profile, Settings};
use crate::support::{Lcg, Rig, Watched};

#[test]
fn threads_share_streams_memory_and_trims() {
    for schedule in [Schedule::Eager, Schedule::Late { patience: 3 }, Schedule::Random] {
        let rig = Rig::simulated(schedule);
        for profile in Profile::TESTED {
            share(&rig, *profile);
        }
        rig.assert_clean();
    }
    if let Some(rig) = Rig::gpu() {
        Profile::TESTED.iter().for_each(|profile| share(&rig, *profile));
    }
}

fn share(rig: &Rig, profile: Profile) {
    let pool = profile.open(&rig.device, &Settings::default()).expect("a pool");
    let alignment = if profile == Profile::Default { 512 } else { 256 };
    // Checked at every step only where other threads may go on meanwhile.
    let watched = Watched::new(rig, pool, alignment, profile == Profile::Paged);
    let copies = rig.stream();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (watched, copies) = (&watched, &copies);
            scope.spawn(move || program(watched, copies, Lcg(thread)));
        }
    });
    watched.assert_intact();
    drop(copies);
    watched.pool.trim_to(0).expect("a trim");
    assert_eq!(watched.pool.stats().live_bytes, 0);
    watched.assert_intact();
}

/// Requests on a stream of its own, which comes and goes; looks at them from one that all threads use
/// and from a short-lived one; tells the pool of order.
fn program(watched: &Watched<'_>, copies: &vpmm::Stream, mut random: Lcg) {
    let rig = watched.rig;
    let mut own = rig.stream();
    for step in 0..60 {
        let bytes = [700, 64 << 10, GRANULE, 5 * GRANULE][random.below(4) as usize];
        let held = watched.malloc(bytes, &own);
        if random.below(2) == 0 {
            watched.look_from(&held, &own, copies);
        }
        if random.below(3) == 0 {
            watched.look_from(&held, &own, &rig.stream()); // which ends at once
        }
        let found = watched.pool.allocation(held.address() + bytes - 1).expect("it is live");
        assert_eq!((found.start.address(), found.stream), (held.address(), Some(own.handle())));
        watched.free(held, &own);
        match step % 12 {
            3 => {
                let next = rig.stream();
                let mark = watched.pool.mark(&own).expect("a mark");
                rig.order(&own, &next);
                watched.pool.follows(&next, &mark).expect("an order");
                own = next; // the former ends
            }
            6 => own.synchronize().expect("the stream finishes"),
            9 => drop(watched.pool.trim_to(random.below(8) * GRANULE).expect("a trim")),
            _ => {}
        }
    }
}

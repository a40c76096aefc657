//! The current resource of a device.

use std::sync::Arc;

use cuda_sim::Simulator;
use vpmm::resource::*;
use vpmm::{Driver, MemoryResource, Pool};

use crate::subjects::Shared;

fn named(resource: &Shared) -> String {
    resource.describe().name().to_owned()
}

#[test]
fn it_is_the_one_made_so_last_and_else_the_current_pool() {
    let sim = Simulator::builder().devices(2).build().expect("a simulator");
    let driver = Driver::new(sim.driver()).expect("a driver");
    let [device, other] = [0, 1].map(|ordinal| driver.device(ordinal).expect("a device"));
    let pool = Pool::current(&device).expect("a pool");
    assert!(current(&device).expect("a resource").is_equal(&pool));
    assert!(!current(&other).expect("a resource").is_equal(&pool));

    let malloc: Shared = Arc::new(DeviceMalloc::new(&device));
    assert!(set_current(&device, Arc::clone(&malloc)).expect("set").is_none());
    // Of the device, however often it is opened, on every thread; of no other.
    let again = driver.clone().device(0).expect("a device");
    let seen = std::thread::spawn(move || named(&current(&again).expect("a resource")));
    assert_eq!(seen.join().expect("an answer"), "device-malloc");
    assert_eq!(named(&current(&other).expect("a resource")), "vpmm");
    {
        let _outer = current_for_scope(&device, Arc::new(PinnedHost::new(&device))).expect("set");
        {
            let tracking = Tracking::new(Arc::clone(&malloc), TrackingConfig::default());
            let _inner = current_for_scope(&device, Arc::new(tracking)).expect("set");
            assert_eq!(named(&current(&device).expect("a resource")), "tracking");
        }
        assert_eq!(named(&current(&device).expect("a resource")), "pinned-host");
        // Who is replaced meanwhile leaves the new one where it is.
        let scope = current_for_scope(&device, Arc::clone(&malloc)).expect("set");
        set_current(&device, Arc::new(HostMalloc::new())).expect("set");
        drop(scope);
        assert_eq!(named(&current(&device).expect("a resource")), "host-malloc");
        set_current(&device, Arc::clone(&malloc)).expect("set");
    }
    assert_eq!(named(&current(&device).expect("a resource")), "device-malloc");
    assert!(reset_current(&device).expect("reset").is_some());
    assert_eq!(named(&current(&device).expect("a resource")), "vpmm");

    // Nothing is left of a driver whose values are gone.
    Pool::forget_current(&device);
    Pool::forget_current(&other);
    drop((device, other, pool, malloc, driver));
    sim.assert_clean();
    assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
}

#[test]
fn two_drivers_have_nothing_in_common() {
    let sims = [0, 1].map(|_| Simulator::builder().build().expect("a simulator"));
    let drivers = [&sims[0], &sims[1]].map(|sim| Driver::new(sim.driver()).expect("a driver"));
    let [one, two] = [&drivers[0], &drivers[1]].map(|driver| driver.device(0).expect("a device"));
    set_current(&one, Arc::new(HostMalloc::new())).expect("set");
    assert_eq!(named(&current(&two).expect("a resource")), "vpmm");
    reset_current(&one).expect("reset");
    Pool::forget_current(&two);
}

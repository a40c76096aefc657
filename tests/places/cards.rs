//! Network cards, which a driver lets reach memory of a device that was made for it (GPUDirect RDMA).

use cuda_sim::Simulator;
use cuda_sys::types::*;
use vpmm::{Error, Location, Pool, Sharing};

use crate::rig::{GRANULE, Profile};
use crate::support::{Rig, call};

fn open(rig: &Rig, profile: Profile, location: Location) -> Result<Pool, Error> {
    profile.open_for(&rig.device, location, Sharing::None, true)
}

/// Whether cards may reach what is at an address.
fn may_be_reached(rig: &Rig, address: u64) -> bool {
    let attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE;
    let mut answer = 7_u32;
    call!(rig.driver, cuPointerGetAttribute((&raw mut answer).cast(), attribute, address));
    assert!(answer <= 1, "{answer}");
    answer == 1
}

/// A message-passing library registers such a pool's memory with its cards as it does cudaMalloc's.
#[test]
fn cards_reach_the_memory_of_a_pool_that_is_made_for_them() {
    Rig::everywhere(|rig| {
        let mut own = 0;
        call!(rig.driver, cuCtxSetCurrent(rig.device.context()));
        call!(rig.driver, cuMemAlloc_v2(&mut own, 1000));
        let can_be = may_be_reached(rig, own);
        call!(rig.driver, cuMemFree_v2(own));
        for (profile, for_cards) in
            Profile::BOTH.into_iter().flat_map(|of| [(of, false), (of, true)])
        {
            let watched = match open(rig, profile, Location::Device) {
                Ok(pool) if for_cards => rig.watch(profile, pool),
                Err(error @ Error::Config { .. }) if rig.sim.is_none() && for_cards => {
                    println!("skipped: {error}");
                    continue;
                }
                _ => rig.pool(profile, Location::Device),
            };
            let stream = rig.stream();
            let mut held: Vec<_> = (0..5).map(|_| watched.malloc(2 * GRANULE, &stream)).collect();
            // What has moved, too.
            for index in [3, 1] {
                watched.free(held.remove(index), &stream);
            }
            held.push(watched.malloc(4 * GRANULE, &stream));
            assert!(watched.moved() > 0);
            for of in &held {
                assert_eq!(may_be_reached(rig, of.ptr.address()), for_cards && can_be);
            }
            held.into_iter().for_each(|held| watched.free(held, &stream));
            watched.assert_intact();
        }
    });
}

#[test]
fn a_device_without_such_memory_says_so() {
    let sim = Simulator::builder().gpu_direct_rdma(false).build().unwrap();
    let rig = Rig::on(sim);
    for profile in Profile::BOTH {
        for (location, reason) in [
            (Location::Device, "device 0 has none for mapped memory"),
            (Location::Host, "it is of memory on the device, not of "),
        ] {
            let error = open(&rig, profile, location).unwrap_err();
            assert!(matches!(error, Error::Config { name: "gpu_direct_rdma", .. }), "{error}");
            assert!(error.to_string().contains(reason), "{error}");
        }
    }
}

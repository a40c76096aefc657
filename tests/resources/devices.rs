//! Two devices in one program.

use std::sync::Arc;

use vpmm::caching::CachingConfig;
use vpmm::resource::*;
use vpmm::{CachingAllocator, Error};

use crate::subjects::{SUBJECTS, malloc};
use crate::support::Rig;
use crate::watched::Watched;

const BYTES: usize = 3 << 20;

#[test]
fn each_device_has_its_own_whichever_is_current() {
    Rig::everywhere_with_peers(|here, there| {
        for subject in SUBJECTS {
            let (one, two) = (subject.make(here), subject.make(there));
            let (in_one, in_two) = (Watched::new(here, &one), Watched::new(there, &two));
            let streams = (here.stream(), there.stream());
            for _ in 0..3 {
                let kept = in_one.allocate(BYTES, &streams.0);
                let other = in_two.allocate(BYTES, &streams.1);
                in_one.free(kept, &streams.0);
                in_two.free(other, &streams.1);
            }
            in_one.assert_intact();
            in_two.assert_intact();
            // Their ends come while the other device is current.
            drop((one, two));
            here.assert_clean();
        }
    });
}

#[test]
fn a_stream_of_another_device_is_refused_where_streams_are_kept() {
    Rig::everywhere_with_peers(|here, there| {
        for subject in SUBJECTS {
            let resource = subject.make(here);
            if !["pool", "fixed-size", "arena", "vpmm"].contains(&resource.describe().name()) {
                continue;
            }
            let (own, foreign) = (here.stream(), there.stream());
            let ptr = resource.allocate(1000, 256, own.handle()).expect("memory");
            let refused = resource.allocate(1000, 256, foreign.handle());
            assert!(matches!(refused, Err(Error::WrongDevice { .. })), "{refused:?}");
            let refused = resource.deallocate(ptr, 1000, 256, foreign.handle());
            assert!(matches!(refused, Err(Error::WrongDevice { .. })), "{refused:?}");
            resource.deallocate(ptr, 1000, 256, own.handle()).expect("freed");
        }
    });
}

#[test]
fn memory_of_another_device_is_refused_where_streams_are_passed_on() {
    Rig::everywhere_with_peers(|here, there| {
        let (device, below) = (&here.device, || malloc(there));
        let refused = |result: Result<(), Error>| {
            let named =
                matches!(result, Err(Error::WrongDevice { stream_device: 0, pool_device: 1 }));
            assert!(named, "{result:?}");
        };
        refused(CoalescingPool::new(below(), device, &CoalescingConfig::default()).map(drop));
        refused(FixedSize::new(below(), device, &FixedSizeConfig::default()).map(drop));
        let mut config = ArenaConfig::default();
        config.arena_bytes = Some(64 << 20);
        refused(Arena::new(below(), device, &config).map(drop));
        refused(CachingAllocator::over(below(), device, &CachingConfig::default()).map(drop));
        refused(Binning::with_powers(below(), device, 18..=20).map(drop));
        refused(Binning::new(below(), device).add_own_bin(1 << 20));
        refused(Binning::new(malloc(here), device).add_bin(1 << 20, Arc::new(below())));
        // Through what passes the question on.
        let deep = Limiting::new(Arc::new(below()), 1 << 30);
        refused(CoalescingPool::new(deep, device, &CoalescingConfig::default()).map(drop));
        here.assert_clean();
    });
}

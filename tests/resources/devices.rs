//! Two devices in one program.

use vpmm::Error;

use crate::subjects::SUBJECTS;
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

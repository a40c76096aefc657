//! Driver calls that fail, one after the other.

use cuda_sys::types::CUresult;
use vpmm::MemoryResource;

use crate::subjects::SUBJECTS;
use crate::support::Rig;
use crate::watched::Watched;

/// Whichever driver call of a request fails, the request fails by name or is served all the same; what was
/// allocated keeps its contents, and the next request is served.
#[test]
fn a_call_that_fails_costs_one_request() {
    for subject in SUBJECTS {
        let rig = Rig::simulated(cuda_sim::Schedule::Late { patience: 3 });
        let sim = rig.sim.as_ref().expect("simulated");
        let resource = subject.make(&rig);
        let watched = Watched::new(&rig, &resource);
        let (one, two) = (rig.stream(), rig.stream());
        let kept = watched.allocate(100_000, &one);
        let mut failures = 0;
        for (round, bytes) in [1000, 3 << 20, 7 << 20].into_iter().enumerate() {
            for call in 1..40 {
                // What the other stream has freed is looked at on the way.
                let others = watched.allocate(bytes, &two);
                watched.free(others, &two);
                sim.fail_call(call, CUresult::CUDA_ERROR_UNKNOWN);
                let result = resource.allocate(bytes, 256, one.handle());
                sim.clear_faults();
                match result {
                    Ok(ptr) => {
                        sim.fail_call(call, CUresult::CUDA_ERROR_UNKNOWN);
                        let freed = resource.deallocate(ptr, bytes, 256, one.handle());
                        sim.clear_faults();
                        if freed.is_err() {
                            failures += 1;
                            resource.deallocate(ptr, bytes, 256, one.handle()).expect("freed");
                        }
                    }
                    Err(error) => {
                        failures += 1;
                        assert!(!error.is_out_of_memory(), "{}: {round} {error}", subject.name);
                    }
                }
            }
        }
        println!("{}: {failures} failures", subject.name);
        watched.free(kept, &one);
        watched.assert_intact();
        drop(resource);
        rig.assert_clean();
    }
}

/// Nothing is left of a resource whose making failed at any call.
#[test]
fn a_making_that_fails_leaves_nothing() {
    for subject in SUBJECTS {
        let rig = Rig::simulated(cuda_sim::Schedule::Eager);
        let sim = rig.sim.as_ref().expect("simulated");
        drop(subject.make(&rig));
        let (before, used) = (sim.leaks(), sim.memory_used(0));
        for call in 1..60 {
            sim.fail_call(call, CUresult::CUDA_ERROR_UNKNOWN);
            let made = subject.try_make(&rig);
            sim.clear_faults();
            // Past the last call, or one that may fail without harm.
            if made.is_ok() {
                break;
            }
            assert_eq!(sim.leaks(), before, "{} at call {call}", subject.name);
        }
        assert!(sim.memory_used(0) <= used, "{}", subject.name);
        rig.assert_clean();
    }
}

/// Everything goes back to the device, what was never freed too.
#[test]
fn an_end_gives_everything_back() {
    for subject in SUBJECTS {
        let rig = Rig::simulated(cuda_sim::Schedule::Late { patience: 3 });
        let sim = rig.sim.as_ref().expect("simulated");
        let before = sim.leaks();
        let stream = rig.stream();
        let resource = subject.make(&rig);
        let watched = Watched::new(&rig, &resource);
        let held = [1000, 3 << 20, 7 << 20].map(|bytes| watched.allocate(bytes, &stream));
        held.into_iter().for_each(|held| watched.free(held, &stream));
        drop(watched);
        drop(resource);
        stream.synchronize().expect("the stream finishes");
        drop(stream);
        assert_eq!(sim.leaks(), before, "{}", subject.name);
        rig.assert_clean();
    }
}

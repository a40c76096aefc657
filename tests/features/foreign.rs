//! Streams that are known by their raw handles alone: nobody tells of their end. A handle that comes again is another
//! stream's, and the one that had it before is gone.

use cuda_sim::Schedule;
use cuda_sys::types::CUstream;
use vpmm::{Stream, StreamHandle};

use crate::rig::{BLOCK, GRANULE, Profile, Settings};
use crate::support::{Rig, call};

const NON_BLOCKING: u32 = 1;

fn make(rig: &Rig) -> (CUstream, StreamHandle) {
    let mut raw = std::ptr::null_mut();
    call!(rig.driver, cuStreamCreate(&mut raw, NON_BLOCKING));
    // SAFETY: each test destroys it after its last use.
    (raw, unsafe { StreamHandle::from_raw(raw) })
}

fn settings() -> Settings {
    let mut settings = Settings::default();
    settings.reuse.opportunistic = false;
    settings
}

const SCHEDULES: [Schedule; 2] = [Schedule::Eager, Schedule::Late { patience: 2 }];

/// Without questions that give memory away each stream would take what it has freed along.
#[test]
fn what_streams_freed_whose_handle_has_come_again_is_for_anybody() {
    for schedule in SCHEDULES {
        for profile in Profile::BOTH {
            for used in [false, true] {
                let rig = Rig::simulated(schedule);
                let sim = rig.sim.clone().unwrap();
                let watched = rig.pool_with(profile, &settings());
                let own = rig.stream();
                let (first, foreign) = make(&rig);
                let round = |foreign: StreamHandle| {
                    let held = watched.malloc(3 * GRANULE, foreign);
                    if used {
                        rig.order(foreign, &own);
                        watched.pool.record_stream(held.ptr, &own).unwrap();
                        held.check(&rig, &own);
                    }
                    watched.free(held, foreign);
                    own.synchronize().unwrap();
                };
                round(foreign);
                call!(rig.driver, cuStreamDestroy_v2(first));
                let events = sim.leaks().events;
                for _ in 0..200 {
                    let (raw, foreign) = make(&rig);
                    assert_eq!(raw, first, "the simulator hands the last handle out again");
                    round(foreign);
                    call!(rig.driver, cuStreamSynchronize(raw));
                    call!(rig.driver, cuStreamDestroy_v2(raw));
                }
                let stats = watched.pool.stats();
                let what = format!("{profile:?}, used {used}: {stats:?}");
                assert!(stats.mapped_bytes <= 12 * GRANULE, "{what}");
                assert!(stats.stream_count <= 80, "{what}");
                assert!(sim.leaks().events <= events + 16, "{what}: {:?}", sim.leaks());
                watched.assert_intact();
            }
        }
    }
}

/// It is when its work is done, and not when its handle comes again.
#[test]
fn what_a_stream_freed_whose_handle_has_come_again_waits_for_its_work() {
    for profile in Profile::BOTH {
        for opportunistic in [true, false] {
            let rig = Rig::simulated(Schedule::Manual);
            let mut settings = settings();
            settings.reuse.opportunistic = opportunistic;
            settings.reuse.internal_dependencies = false;
            let watched = rig.pool_with(profile, &settings);
            let other = rig.stream();
            let (old, foreign) = make(&rig);
            let held = watched.malloc(BLOCK, foreign);
            watched.free(held, foreign);
            call!(rig.driver, cuStreamDestroy_v2(old));
            let (new, foreign) = make(&rig);
            assert_eq!(new, old);
            let early = watched.malloc(BLOCK, foreign);
            let beside = watched.malloc(BLOCK, &other);
            assert_ne!(early.address(), held.address(), "{profile:?}: its check has not run");
            assert_ne!(beside.address(), held.address(), "{profile:?}: its check has not run");
            rig.sim.as_ref().unwrap().run_until_idle();
            let late = watched.malloc(BLOCK, &other);
            assert_eq!(late.address(), held.address(), "{profile:?}: {}", watched.layout());
            watched.free(early, foreign);
            watched.free(beside, &other);
            watched.free(late, &other);
            call!(rig.driver, cuStreamSynchronize(new));
            call!(rig.driver, cuStreamDestroy_v2(new));
            watched.assert_intact();
        }
    }
}

/// What it frees by the loan is kept until its work is done, whichever way it was known meanwhile.
#[test]
fn a_stream_that_was_lent_is_used_by_its_handle_and_lent_again() {
    for profile in Profile::BOTH {
        for bytes in [1000, GRANULE] {
            let rig = Rig::simulated(Schedule::Manual);
            let idle = || rig.sim.as_ref().unwrap().run_until_idle();
            let mut settings = Settings::default();
            settings.reuse.internal_dependencies = false;
            let watched = rig.pool_with(profile, &settings);
            let (raw, bare) = make(&rig);
            // SAFETY: the stream is destroyed behind the last loan.
            let lend = || unsafe { Stream::borrowed(&rig.device, bare) }.unwrap();
            let use_by = |stream: StreamHandle| {
                let held = watched.malloc(bytes, stream);
                watched.free(held, stream);
                held.address()
            };
            for _ in 0..3 {
                use_by(lend().handle());
                idle();
                use_by(bare);
                idle();
                let lent = lend();
                let address = use_by(lent.handle());
                watched.validate();
                let other = rig.stream();
                let beside = watched.malloc(bytes, &other);
                assert_ne!(beside.address(), address, "{profile:?}: its check has not run");
                watched.pool.trim_to(0).unwrap();
                watched.validate();
                watched.free(beside, &other);
                watched.pool.trim_to(0).unwrap();
                watched.validate();
                drop(lent);
                idle();
            }
            call!(rig.driver, cuStreamDestroy_v2(raw));
            watched.assert_intact();
        }
    }
}

//! A context that is destroyed under a pool: every call that needs it says so, and the rest ends
//! quietly.

use cuda_sim::Schedule;
use cuda_sys::types::CUresult;
use vpmm::{Contents, Error, Result, StreamHandle};

use crate::rig::{ASLEEP, AWAKE, GRANULE, LIMIT, Profile, SIZES, beside, bounded};
use crate::support::{Rig, call};

/// How a context goes.
#[derive(Clone, Copy, Debug)]
enum Loss {
    /// Everything on the device answers this from now on.
    Answer(CUresult),
    /// The driver's own call, which takes streams and events with it.
    Reset,
}

impl Loss {
    fn happen(self, rig: &Rig) {
        match self {
            Self::Answer(code) => {
                rig.sim.as_ref().expect("a simulated device").lose_device(0, code);
            }
            Self::Reset => call!(rig.driver, cuDevicePrimaryCtxReset_v2(0)),
        }
    }
}

impl Loss {
    /// The call needed the context, and says that it is gone.
    #[track_caller]
    fn named<T>(self, result: Result<T>, what: &str) {
        match result {
            Err(Error::ContextLost { .. }) => {}
            // The first that the driver looks at is the stream, which went with the context.
            Err(Error::Driver { .. }) if matches!(self, Self::Reset) => {}
            Err(error) => panic!("{what}: {error}"),
            Ok(_) => panic!("{what}: it went well without a context"),
        }
    }

    /// The call was served without the context, or says that it is gone.
    #[track_caller]
    fn served_or_named<T>(self, result: Result<T>, what: &str) {
        if result.is_err() {
            self.named(result, what);
        }
    }
}

fn goes(rig: &Rig, profile: Profile, loss: Loss) {
    let (pool, orphan) = (profile.open(&rig.device), profile.open(&rig.device));
    let (stream, ended) = (rig.stream(), rig.stream());
    let held = [(); 4].map(|()| pool.malloc(SIZES[1] as usize, &stream).unwrap());
    let small = pool.malloc(SIZES[2] as usize, &stream).unwrap();
    pool.free(held[0], &stream).unwrap();
    pool.free(held[1], StreamHandle::LEGACY).unwrap();
    let of_orphan = orphan.malloc(GRANULE as usize, &stream).unwrap();
    drop(orphan);
    let heaps = beside(&pool, &ended);
    let (graph, tagged) = &heaps;
    loss.happen(rig);
    let large = (LIMIT / 2 * GRANULE) as usize;
    loss.named(pool.malloc(large, &stream), "malloc");
    loss.named(pool.malloc(large, StreamHandle::PER_THREAD), "malloc of a thread");
    loss.named(pool.free(held[2], StreamHandle::PER_THREAD), "free on another stream");
    loss.served_or_named(pool.free(small, &stream), "free");
    loss.served_or_named(pool.record_stream(held[3], StreamHandle::LEGACY), "record_stream");
    loss.served_or_named(pool.mark(&stream), "mark");
    loss.served_or_named(pool.trim_to(0), "trim_to");
    loss.named(tagged[0].malloc(large, &stream), "malloc of a tag");
    loss.named(pool.suspend(AWAKE, &stream, &Contents::Discard), "suspend");
    loss.named(pool.resume(ASLEEP, &stream), "resume");
    // Addresses are no context's.
    loss.served_or_named(pool.tagged("new"), "a new heap");
    loss.served_or_named(pool.graph_pool(), "a new graph's pool");
    loss.served_or_named(graph.end(&ended), "the graph's end");
    loss.served_or_named(graph.release(&stream), "the graph's release");
    loss.named(stream.synchronize(), "synchronize");
    loss.named(rig.device.synchronize(), "synchronize the device");
    loss.named(rig.device.stream(), "a new stream");
    let freed = vpmm::Pool::free_any(&rig.driver, of_orphan, &stream);
    loss.served_or_named(freed, "the orphan's last free");
    pool.validate().unwrap();
    assert!(pool.stats().live_count >= 2, "what is allocated stays so");
    // Now the ends, each of them quiet, in the order that is hardest: streams before the pool.
    drop((stream, ended));
    drop(heaps);
    let another = pool.clone();
    drop(pool);
    another.destroy().unwrap();
}

#[test]
fn a_context_is_destroyed_under_a_pool() {
    bounded("contexts::a_context_is_destroyed_under_a_pool", || {
        for code in [
            CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED,
            // What a driver answers that was shut down at the process's end.
            CUresult::CUDA_ERROR_DEINITIALIZED,
            // What is left after a kernel that went wrong.
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
        ] {
            for profile in Profile::ALL {
                let rig = Rig::simulated(Schedule::Random);
                goes(&rig, profile, Loss::Answer(code));
                std::mem::forget(rig);
            }
        }
    });
}

#[test]
fn a_context_is_reset_under_a_pool() {
    bounded("contexts::a_context_is_reset_under_a_pool", || {
        for schedule in [Schedule::Eager, Schedule::Late { patience: 3 }, Schedule::Random] {
            for profile in Profile::ALL {
                let rig = Rig::simulated(schedule);
                goes(&rig, profile, Loss::Reset);
                // Its own objects went with the context.
                std::mem::forget(rig);
            }
        }
    });
}

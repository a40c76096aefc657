//! A context that is destroyed under a pool: every call that needs it says so, and the rest ends
//! quietly.

use cuda_sim::Schedule;
use cuda_sys::types::CUresult;
use vpmm::{
    Contents, DevicePtr, Error, GraphPool, PagedConfig, Pool, PoolConfig, Result, Stream,
    StreamHandle, Tagged,
};

use crate::rig::{ASLEEP, AWAKE, GRANULE, LIMIT, MIB, Profile, SIZES, beside, bounded};
use crate::support::{Rig, call};

/// How a context goes.
#[derive(Clone, Copy, Debug)]
enum Loss {
    /// Everything on the device answers this from now on.
    Answer(CUresult),
    /// The driver's own call, which takes streams and events with it.
    Reset,
    /// A kernel writes where no memory is.
    Fault,
}

/// What a call must come to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Needs {
    /// It says that the context is gone.
    Context,
    /// It was served without the context, or says that it is gone.
    Perhaps,
}

impl Loss {
    fn happen(self, rig: &Rig) {
        match self {
            Self::Answer(code) => {
                rig.sim.as_ref().expect("a simulated device").lose_device(0, code);
            }
            Self::Reset => call!(rig.driver, cuDevicePrimaryCtxReset_v2(0)),
            Self::Fault => rig.fill(0x1000, 4096, 1, StreamHandle::LEGACY),
        }
    }

    #[track_caller]
    fn check<T>(self, rig: &Rig, needs: Needs, what: &str, result: Result<T>) {
        match result {
            Err(Error::ContextLost { .. }) => {}
            // The first that the driver looks at is the stream, which went with the context.
            Err(Error::Driver { .. }) if matches!(self, Self::Reset) => {}
            Err(error) => panic!("{self:?}, {what}: {error}"),
            // A GPU's driver makes and maps memory even then.
            Ok(_) if needs == Needs::Perhaps || rig.sim.is_none() => {}
            Ok(_) => panic!("{self:?}, {what}: it went well without a context"),
        }
    }
}

/// A pool with everything that it can have.
struct Full {
    pool: Pool,
    streams: [Stream; 2],
    held: [DevicePtr; 3],
    of_orphan: DevicePtr,
    graph: GraphPool,
    tagged: [Tagged; 2],
}

impl Full {
    fn new(rig: &Rig, profile: Profile) -> Self {
        let (pool, orphan) = (profile.open(&rig.device), profile.open(&rig.device));
        let streams = [(); 2].map(|()| rig.stream());
        let [held @ .., freed, of_legacy] = [SIZES[1], SIZES[1], SIZES[2], SIZES[1], SIZES[1]]
            .map(|bytes| pool.malloc(bytes as usize, &streams[0]).unwrap());
        pool.free(freed, &streams[0]).unwrap();
        pool.free(of_legacy, StreamHandle::LEGACY).unwrap();
        let of_orphan = orphan.malloc(GRANULE as usize, &streams[0]).unwrap();
        drop(orphan);
        let (graph, tagged) = beside(&pool, &streams[1]);
        Self { pool, streams, held, of_orphan, graph, tagged }
    }

    /// Every call names what happened, and the ends are quiet.
    fn goes_on_without(self, rig: &Rig, loss: Loss) {
        use Needs::{Context, Perhaps};
        let Self { pool, streams, held, of_orphan, graph, tagged } = self;
        let stream = &streams[0];
        let large = (LIMIT / 2 * GRANULE) as usize;
        loss.check(rig, Context, "malloc", pool.malloc(large, stream));
        let of_thread = pool.malloc(large, StreamHandle::PER_THREAD);
        loss.check(rig, Context, "malloc of a thread", of_thread);
        let elsewhere = pool.free(held[0], StreamHandle::PER_THREAD);
        loss.check(rig, Context, "free on another stream", elsewhere);
        loss.check(rig, Perhaps, "free", pool.free(held[2], stream));
        let noted = pool.record_stream(held[1], StreamHandle::LEGACY);
        loss.check(rig, Perhaps, "record_stream", noted);
        loss.check(rig, Perhaps, "mark", pool.mark(stream));
        loss.check(rig, Perhaps, "trim_to", pool.trim_to(0));
        loss.check(rig, Context, "malloc of a tag", tagged[0].malloc(large, stream));
        loss.check(rig, Context, "suspend", pool.suspend(AWAKE, stream, &Contents::Discard));
        loss.check(rig, Context, "resume", pool.resume(ASLEEP, stream));
        // Addresses are no context's.
        loss.check(rig, Perhaps, "a new heap", pool.tagged("new"));
        loss.check(rig, Perhaps, "a new graph's pool", pool.graph_pool());
        loss.check(rig, Perhaps, "the graph's end", graph.end(&streams[1]));
        loss.check(rig, Perhaps, "the graph's release", graph.release(stream));
        loss.check(rig, Context, "synchronize", stream.synchronize());
        loss.check(rig, Context, "a new stream", rig.device.stream());
        let freed = Pool::free_any(&rig.driver, of_orphan, stream);
        loss.check(rig, Perhaps, "the orphan's last free", freed);
        pool.validate().unwrap();
        assert!(pool.stats().live_count >= 1, "what is allocated stays so");
        // The order that is hardest: streams before the pool.
        drop(streams);
        drop((graph, tagged));
        let another = pool.clone();
        drop(pool);
        another.destroy().unwrap();
    }
}

fn goes(rig: Rig, loss: Loss) {
    let pools = Profile::ALL.map(|profile| Full::new(&rig, profile));
    loss.happen(&rig);
    let told = rig.device.synchronize();
    assert!(told.is_err(), "{loss:?}: the device was waited for without a context");
    loss.check(&rig, Needs::Context, "synchronize the device", told);
    for pool in pools {
        pool.goes_on_without(&rig, loss);
    }
    // Handles of memory are no context's, and went back: all but what nobody could free, of two pools that nobody has a
    // handle of, and the driver's pool for small requests. Of a driver that was shut down nothing more is asked.
    let is_shut_down = matches!(loss, Loss::Answer(CUresult::CUDA_ERROR_DEINITIALIZED));
    if let Some(sim) = rig.sim.as_ref().filter(|_| !is_shut_down) {
        assert!(sim.memory_used(0) <= 2 * GRANULE + 32 * MIB, "{loss:?}: {}", sim.memory_used(0));
    }
    // Its own objects cannot be ended any more.
    std::mem::forget(rig);
}

const SCHEDULES: [Schedule; 3] =
    [Schedule::Eager, Schedule::Late { patience: 3 }, Schedule::Random];

#[test]
fn a_device_is_lost_under_a_pool() {
    bounded("contexts::a_device_is_lost_under_a_pool", || {
        for code in [
            CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED,
            // What a driver answers that was shut down at the process's end.
            CUresult::CUDA_ERROR_DEINITIALIZED,
            CUresult::CUDA_ERROR_ECC_UNCORRECTABLE,
        ] {
            SCHEDULES
                .into_iter()
                .for_each(|schedule| goes(Rig::simulated(schedule), Loss::Answer(code)));
        }
    });
}

#[test]
fn a_context_is_reset_under_a_pool() {
    bounded("contexts::a_context_is_reset_under_a_pool", || {
        SCHEDULES.into_iter().for_each(|schedule| goes(Rig::simulated(schedule), Loss::Reset));
        if let Some(rig) = Rig::gpu() {
            goes(rig, Loss::Reset);
        }
    });
}

/// What tells a pool of a reset: the handle stays, also to the next primary context, the number does not.
#[test]
fn a_context_that_was_reset_has_no_number_and_the_next_one_another() {
    let goes = |rig: Rig| {
        let api = &rig.driver;
        let number = |context| {
            let mut number = 0;
            // SAFETY: the handle is a primary context's, and the pointer is to a live number.
            let code = unsafe { api.raw().cuCtxGetId.expect("a function")(context, &mut number) };
            (code, number)
        };
        let context = rig.device.context();
        let (code, former) = number(context);
        assert_eq!(code, CUresult::CUDA_SUCCESS);
        call!(api, cuDevicePrimaryCtxReset_v2(0));
        assert_eq!(number(context).0, CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED);
        let mut next = std::ptr::null_mut();
        call!(api, cuDevicePrimaryCtxRetain(&mut next, 0));
        assert_eq!(next, context, "the handle stays");
        let (code, number) = number(next);
        assert!(code == CUresult::CUDA_SUCCESS && number != former, "{code:?}: {number}, {former}");
        let told = rig.device.stream().map(drop);
        assert!(matches!(told, Err(Error::ContextLost { .. })), "{told:?}");
        std::mem::forget(rig);
    };
    bounded("contexts::a_context_that_was_reset_has_no_number_and_the_next_one_another", || {
        goes(Rig::simulated(Schedule::Eager));
        Rig::gpu().into_iter().for_each(goes);
    });
}

/// Handles of memory are no context's: who goes on with a new one has what pools behind the old one held.
#[test]
fn a_device_that_was_reset_has_its_memory_again() {
    let goes = |rig: Rig| {
        // Others may use a GPU, too.
        let (bytes, others) = if rig.sim.is_some() { (64 * MIB, 0) } else { (4 << 30, 1 << 30) };
        let before = rig.device.free_memory().unwrap();
        let stream = rig.stream();
        let pools = [Pool::new(&rig.device, &PoolConfig::default()), {
            let mut config = PagedConfig::default();
            config.va_size_bytes = 2 * bytes;
            Pool::paged(&rig.device, &config)
        }];
        let pools = pools.map(|pool| pool.unwrap());
        for pool in &pools {
            pool.malloc(bytes as usize, &stream).unwrap();
        }
        assert!(rig.device.free_memory().unwrap() + 2 * bytes <= before + others);
        call!(rig.driver, cuDevicePrimaryCtxReset_v2(0));
        pools.into_iter().for_each(|pool| pool.destroy().unwrap());
        let again = rig.driver.device(0).unwrap();
        assert!(again.free_memory().unwrap() + others >= before);
        std::mem::forget((rig, stream));
    };
    bounded("contexts::a_device_that_was_reset_has_its_memory_again", || {
        goes(Rig::simulated(Schedule::Eager));
        Rig::gpu().into_iter().for_each(goes);
    });
}

/// What is allocated outlives its context, too: who goes on with the one after a reset may use it there.
#[test]
fn what_the_context_after_a_reset_uses_is_waited_for() {
    let rig = Rig::simulated(Schedule::Eager);
    let sim = rig.sim.as_ref().unwrap();
    let stream = rig.stream();
    let pools = [Pool::new(&rig.device, &PoolConfig::default()), {
        Pool::paged(&rig.device, &PagedConfig::default())
    }];
    let pools = pools.map(|pool| pool.unwrap());
    let [one, other] =
        pools.each_ref().map(|pool| pool.malloc(GRANULE as usize, &stream).unwrap().address());
    call!(rig.driver, cuDevicePrimaryCtxReset_v2(0));
    let after = rig.driver.device(0).unwrap();
    let next = after.stream().unwrap();
    let spin = sim.spin(next.handle().raw()).unwrap();
    sim.enqueue(next.handle().raw(), "uses what was allocated before", move |memory| {
        memory.write(one, &[1; 64])?;
        memory.write(other, &[1; 64])
    })
    .unwrap();
    std::thread::scope(|scope| {
        let ends = scope.spawn(|| pools.into_iter().for_each(|pool| pool.destroy().unwrap()));
        std::thread::sleep(std::time::Duration::from_millis(50));
        spin.release();
        ends.join().unwrap();
    });
    next.synchronize().unwrap();
    sim.assert_clean();
    drop((next, after));
    std::mem::forget((rig, stream));
}

#[test]
fn a_kernel_fails_under_a_pool() {
    bounded("contexts::a_kernel_fails_under_a_pool", || {
        SCHEDULES.into_iter().for_each(|schedule| goes(Rig::simulated(schedule), Loss::Fault));
        if let Some(rig) = Rig::gpu() {
            goes(rig, Loss::Fault);
        }
    });
}

//! A fault at every driver call: an error by name, nothing lost, nothing used too early.

use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::{CUresult, CUstream_flags_enum};
use vpmm::{DevicePtr, MemoryResource, Stream};

use crate::rig::{Cached, MIB};
use crate::support::faults::{Fault, every_call_of_every_step};
use crate::support::{Rig, call, streams};

/// What a step works with.
struct Hands<'a> {
    cached: Cached<'a>,
    own: Stream,
    side: Stream,
    held: Vec<DevicePtr>,
}

type Step = fn(&mut Hands<'_>) -> vpmm::Result<()>;

/// Requests of every kind; each does all or nothing.
const STEPS: [Step; 8] = [
    |of| {
        of.held.push(of.cached.allocator.malloc(3 << 20, &of.own)?);
        Ok(())
    },
    |of| of.cached.allocator.record_stream(of.held[0], &of.side),
    |of| of.cached.allocator.record_stream(of.held[0], vpmm::StreamHandle::LEGACY),
    |of| {
        of.cached.allocator.free(of.held[0])?;
        of.held.remove(0);
        Ok(())
    },
    |of| {
        of.held.push(of.cached.allocator.malloc(30 << 20, &of.own)?);
        Ok(())
    },
    |of| of.cached.allocator.alloc_zeros::<u8>(5000, &of.side).map(drop),
    |of| {
        of.cached.allocator.free(of.held[0])?;
        of.held.remove(0);
        Ok(())
    },
    |of| of.cached.allocator.empty_cache(),
];

#[test]
fn a_fault_at_any_call_loses_nothing() {
    let codes = [CUresult::CUDA_ERROR_UNKNOWN, CUresult::CUDA_ERROR_OUT_OF_MEMORY];
    let run = |step: usize, fault: Fault| {
        let sim = Simulator::builder().schedule(Schedule::Late { patience: 2 }).build().unwrap();
        let rig = Rig::on(sim.clone());
        let leaks = sim.leaks();
        let (own, side) = (rig.stream(), rig.stream());
        let mut hands = Hands { cached: rig.cached(), own, side, held: Vec::new() };
        for before in &STEPS[..step] {
            before(&mut hands).expect("no fault yet");
        }
        let live = hands.cached.allocator.memory_allocated();
        let held = hands.held.len();
        fault.arm(&sim);
        let failed = STEPS[step](&mut hands).is_err();
        sim.clear_faults();
        hands.cached.validate();
        if failed {
            assert_eq!(hands.cached.allocator.memory_allocated(), live, "step {step}");
            assert_eq!(hands.held.len(), held);
            STEPS[step](&mut hands).expect("as if nothing had been");
        }
        for after in &STEPS[step + 1..] {
            after(&mut hands).expect("the fault is over");
        }
        let Hands { cached, own, side, held } = hands;
        held.into_iter().for_each(|ptr| cached.allocator.free(ptr).unwrap());
        cached.allocator.empty_cache().unwrap();
        assert_eq!(cached.reserved(), 0);
        cached.assert_intact();
        drop((cached, own, side));
        assert_eq!(sim.leaks(), leaks);
        failed
    };
    for code in codes {
        let failures = every_call_of_every_step(STEPS.len(), 6, |n| Fault::Once(n, code), run);
        assert!(failures > 15, "{failures} of {code}");
    }
}

#[test]
fn a_lost_context_is_an_error_everywhere_and_no_panic() {
    let sim = Simulator::builder().build().unwrap();
    let rig = Rig::on(sim.clone());
    let cached = rig.cached();
    let (own, side) = (rig.stream(), rig.stream());
    let [first, second] = [(); 2].map(|()| cached.allocator.malloc(3 << 20, &own).unwrap());
    cached.allocator.record_stream(first, &side).unwrap();
    cached.allocator.free(second).unwrap();
    sim.fail_all_calls_after(0, CUresult::CUDA_ERROR_LAUNCH_FAILED);
    for error in [
        cached.allocator.malloc(64 << 20, &own).unwrap_err(),
        cached.allocator.empty_cache().unwrap_err(),
    ] {
        assert!(error.is_context_lost(), "{error}");
    }
    // What needs no driver goes on: a free too, the event of which is recorded when memory is lacking.
    cached.allocator.free(first).unwrap();
    let third = cached.allocator.malloc(MIB as usize + 1, &own).unwrap();
    cached.allocator.free(third).unwrap();
    cached.validate();
    drop((side, cached));
    sim.clear_faults();
}

/// A stream that a failed free was given may be gone at the next: it is no use of the allocation.
#[test]
fn a_free_that_failed_on_a_foreign_stream_is_made_on_another() {
    let rig = Rig::simulated(Schedule::Eager);
    let sim = rig.sim.as_ref().expect("simulated");
    let (cached, own) = (rig.cached(), rig.stream());
    for captures in [true, false] {
        let (raw, foreign) = streams::make(&rig, CUstream_flags_enum::CU_STREAM_NON_BLOCKING.0);
        let ptr = cached.allocator.allocate(1000, 256, own.handle()).expect("memory");
        // Its place is known.
        cached.allocator.free(cached.allocator.malloc(1, foreign).expect("memory")).expect("freed");
        if captures {
            streams::begin_capture(&rig, raw);
        } else {
            sim.fail_nth("cuEventRecord", 1, CUresult::CUDA_ERROR_UNKNOWN);
        }
        cached.allocator.deallocate(ptr, 1000, 256, foreign).expect_err("refused");
        cached.validate();
        if captures {
            assert_eq!(streams::end_capture(&rig, raw), 0);
        }
        call!(rig.driver, cuStreamDestroy_v2(raw));
        cached.allocator.deallocate(ptr, 1000, 256, own.handle()).expect("freed");
    }
    assert_eq!(cached.allocator.memory_allocated(), 0);
    cached.assert_intact();
}

//! A fault at every driver call: an error by name, nothing lost, nothing used too early.

use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::CUresult;
use vpmm::{DevicePtr, Stream};

use crate::rig::{Cached, MIB};
use crate::support::Rig;
use crate::support::faults::{Fault, every_call_of_every_step};

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

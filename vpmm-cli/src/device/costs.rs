//! What the driver's calls for virtual memory cost on a machine, now: the same driver takes half as
//! long again on another machine, or on another day.

use std::time::Instant;

use serde::Serialize;

use super::Machine;
use super::handles::Handles;

/// Bytes of a handle, and how many of them are measured at a time.
const MEASURED: [(u64, usize); 3] = [(2 << 20, 64), (64 << 20, 16), (1 << 30, 4)];
/// Times that each is measured; the median counts.
const ROUNDS: usize = 9;

/// What handles of one length cost.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HandleCosts {
    /// Bytes of each.
    pub handle_bytes: u64,
    /// How many were measured together.
    pub handles: usize,
    /// Microseconds for each handle; none where it could not be measured.
    #[serde(flatten)]
    pub each: Option<EachCosts>,
    /// Why not.
    pub error: Option<String>,
}

/// Microseconds for one handle, as the median of some rounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct EachCosts {
    /// cuMemCreate.
    pub create_us: f64,
    /// cuMemMap.
    pub map_us: f64,
    /// cuMemSetAccess, one call for all.
    pub set_access_us: f64,
    /// cuMemUnmap, one call for all.
    pub unmap_us: f64,
    /// cuMemRelease.
    pub release_us: f64,
}

/// Measures them: modelled on a simulated machine. Takes 4 GiB of the device's memory at most, for a
/// tenth of a second.
///
/// # Errors
/// What the driver answers to making the context current. Anything else is told beside the length that
/// it was about.
pub fn handle_costs(machine: &Machine) -> vpmm::Result<Vec<HandleCosts>> {
    machine.calls().enter()?;
    let costs = MEASURED.map(|(handle_bytes, handles)| {
        let measured = measure(machine, handles, handle_bytes);
        let error = measured.as_ref().err().map(ToString::to_string);
        HandleCosts { handle_bytes, handles, each: measured.ok(), error }
    });
    Ok(costs.into())
}

fn measure(machine: &Machine, count: usize, bytes_each: u64) -> vpmm::Result<EachCosts> {
    let mut handles = Handles::reserve(machine.calls(), count, bytes_each)?;
    let began = Instant::now();
    let now = || match machine.simulator() {
        Some(simulator) => simulator.modelled_us(),
        None => began.elapsed().as_secs_f64() * 1e6,
    };
    let mut rounds: [Vec<f64>; 5] = std::array::from_fn(|_| Vec::with_capacity(ROUNDS));
    for _ in 0..ROUNDS {
        let steps: [fn(&mut Handles<'_>) -> vpmm::Result<()>; 5] = [
            |handles| handles.create(),
            |handles| handles.map(),
            |handles| handles.set_access(),
            |handles| handles.unmap(),
            |handles| handles.release(),
        ];
        for (step, of_step) in steps.into_iter().zip(&mut rounds) {
            let before = now();
            step(&mut handles)?;
            of_step.push((now() - before) / count as f64);
        }
    }
    let [create_us, map_us, set_access_us, unmap_us, release_us] = rounds.map(median);
    Ok(EachCosts { create_us, map_us, set_access_us, unmap_us, release_us })
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    let middle = of.get(of.len() / 2).copied().unwrap_or_default();
    (middle * 100.0).round() / 100.0
}

#[cfg(test)]
mod tests {
    use cuda_sys::types::CUresult;

    use super::*;
    use crate::device::Setup;

    #[test]
    fn the_model_is_measured_as_it_is_and_nothing_stays() {
        let machine = Machine::simulated(Setup::default()).unwrap();
        let model = cuda_sim::Costs::h200();
        for costs in handle_costs(&machine).unwrap() {
            let each = costs.each.unwrap();
            let near = |measured: f64, modelled: f64| (measured - modelled).abs() < 0.01;
            assert!(near(each.create_us, model.create(costs.handle_bytes)), "{costs:?}");
            assert!(near(each.map_us, model.map(costs.handle_bytes)), "{costs:?}");
            assert!(near(each.set_access_us, model.set_access([costs.handle_bytes])), "{costs:?}");
            assert!(near(each.unmap_us, model.unmap([costs.handle_bytes])), "{costs:?}");
            assert!(near(each.release_us, model.release(costs.handle_bytes)), "{costs:?}");
        }
        let simulator = machine.simulator().unwrap();
        assert_eq!(simulator.memory_used(0), 0);
        assert!(simulator.report().misuse.is_empty());
    }

    #[test]
    fn what_does_not_fit_is_told_and_the_others_are_measured() {
        let machine = Machine::simulated(Setup::default()).unwrap();
        let simulator = machine.simulator().unwrap();
        simulator.set_memory_limit(0, 2 << 30);
        let [small, middle, large] = handle_costs(&machine).unwrap().try_into().unwrap();
        assert!(small.each.is_some() && middle.each.is_some());
        let out_of_memory = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        let told = vpmm::Error::Driver { call: "cuMemCreate", code: out_of_memory, bytes: 1 << 30 };
        assert_eq!((large.each, large.error), (None, Some(told.to_string())));
        assert_eq!(simulator.memory_used(0), 0, "what was made goes back");
        let call = "cuMemUnmap";
        simulator.fail_nth(call, 1, CUresult::CUDA_ERROR_UNKNOWN);
        assert!(handle_costs(&machine).unwrap()[0].error.as_ref().unwrap().contains(call));
    }
}

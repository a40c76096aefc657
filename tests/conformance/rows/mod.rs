//! The list, by subject.

mod addresses;
mod capture;
mod data;
mod graphs;
mod managed;
mod mappings;
mod physical;
mod pools;
mod streams;

pub(crate) use cuda_sys::types::*;

pub(crate) use crate::probe::*;

/// Where a row may be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Where {
    Everywhere,
    /// A real driver crashes or is undefined here; the simulator must report misuse.
    SimulatorOnly,
}

/// One call with the answers that are right.
pub(crate) struct Row {
    pub(crate) name: &'static str,
    /// One code, or several where the driver's documentation leaves it open.
    pub(crate) expect: &'static [CUresult],
    pub(crate) asked: Where,
    /// Prepares the call, makes it and returns its code.
    pub(crate) run: fn(&Probe<'_>) -> Answer,
}

pub(crate) type Answer = Result<CUresult, Trouble>;

const fn row(
    name: &'static str,
    expect: &'static [CUresult],
    run: fn(&Probe<'_>) -> Answer,
) -> Row {
    Row { name, expect, asked: Where::Everywhere, run }
}

const fn simulator_only(
    name: &'static str,
    expect: &'static [CUresult],
    run: fn(&Probe<'_>) -> Answer,
) -> Row {
    Row { name, expect, asked: Where::SimulatorOnly, run }
}

const SUCCESS: &[CUresult] = &[CUresult::CUDA_SUCCESS];
const INVALID_VALUE: &[CUresult] = &[CUresult::CUDA_ERROR_INVALID_VALUE];
const INVALID_HANDLE: &[CUresult] = &[CUresult::CUDA_ERROR_INVALID_HANDLE];
const INVALID_CONTEXT: &[CUresult] = &[CUresult::CUDA_ERROR_INVALID_CONTEXT];
const INVALID_DEVICE: &[CUresult] = &[CUresult::CUDA_ERROR_INVALID_DEVICE];
const NOT_SUPPORTED: &[CUresult] = &[CUresult::CUDA_ERROR_NOT_SUPPORTED];
const OUT_OF_MEMORY: &[CUresult] = &[CUresult::CUDA_ERROR_OUT_OF_MEMORY];
const NOT_READY: &[CUresult] = &[CUresult::CUDA_ERROR_NOT_READY];

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;

/// Every row.
pub(crate) fn all() -> Vec<Row> {
    [
        addresses::rows(),
        physical::rows(),
        mappings::rows(),
        data::rows(),
        streams::rows(),
        capture::rows(),
        graphs::rows(),
        pools::rows(),
        managed::rows(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

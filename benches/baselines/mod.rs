//! What the pool is compared with. The first three only keep books, of addresses or of host memory:
//! for one thread, without streams, without a driver, and without growing. They are a floor for
//! what the same placement costs, not allocators that could take the pool's place. The last two
//! are the driver's own, on a GPU only.

mod best_fit;
mod driver;
mod offset;
mod tlsf;

pub(crate) use best_fit::BestFit;
pub(crate) use driver::{CudaMalloc, CudaMallocAsync};
pub(crate) use offset::Offset;
pub(crate) use tlsf::TwoLevel;

/// What the books are of, in bytes: more than any benchmark uses.
const SPACE: u64 = 32 << 30;

/// Placement is at multiples of this, as in the pool.
const UNIT: u64 = 512;

/// A request in units, rounded up.
fn units(bytes: usize) -> u64 {
    (bytes as u64).div_ceil(UNIT)
}

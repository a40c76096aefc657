//! When what one stream freed may be another's.
//!
//! ```text
//! fences          events, recorded late, for all that a stream freed before
//! order           what callers say about which stream comes after which
//! noted           blocks that further streams use beside their own
//! deferred        such blocks, freed, by what they wait for
//! held            streams in a graph's capture, of which nothing can be asked
//! patience        a look at what is about to be ready, before the pool grows
//! borrow          a block taken with a wait on the GPU, before the pool grows
//! ```

pub(super) mod borrow;
pub(super) mod deferred;
pub(super) mod fences;
pub(super) mod held;
pub(super) mod noted;
pub(super) mod order;
pub(super) mod patience;

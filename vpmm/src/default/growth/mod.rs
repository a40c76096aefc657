//! Where a request goes that no free block has room for.
//!
//! ```text
//! policy, pace    how long new extents are, how much moves, what is saved up for either
//! again           whether the program is in a hurry that goes through the same again
//! plan            a window of addresses with the least to map, without the driver
//! sources         the free extents that move there
//! remap           the plan carried out, committed or put back
//! exchange        short extents given up for long ones
//! opening         how long the driver takes for a mapping, and how many a request has time for
//! lead            whether the stream noticed
//! ```

mod again;
pub(super) mod exchange;
pub(super) mod lead;
pub(super) mod opening;
pub(super) mod pace;
pub(super) mod plan;
pub(super) mod policy;
pub(super) mod remap;
pub(super) mod sources;

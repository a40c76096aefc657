//! What a check of the invariants found.

#![forbid(unsafe_code)]

/// An invariant that does not hold: a defect of this crate, never of its user.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{invariant} is broken: {detail}")]
#[non_exhaustive]
pub struct Violation {
    /// Which one, by number and name.
    pub invariant: &'static str,
    /// Where and how.
    pub detail: String,
}

//! Owns the cross-crate tests and benchmarks of the workspace; exports nothing.

/// Makes the README's example a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

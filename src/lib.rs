//! Owns the cross-crate tests and benchmarks of the workspace; exports nothing.

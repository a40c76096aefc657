//! Generated declarations: one `types` module that both APIs share, a function
//! table for each, and the names of the result codes.

#[allow(missing_docs, non_camel_case_types, non_snake_case, non_upper_case_globals, clippy::all)]
#[allow(clippy::undocumented_unsafe_blocks)]
#[rustfmt::skip]
pub(crate) mod types;

#[allow(non_snake_case)]
#[rustfmt::skip]
pub(crate) mod driver;

#[allow(non_snake_case)]
#[rustfmt::skip]
pub(crate) mod runtime;

#[rustfmt::skip]
pub(crate) mod status;

//! Stacks of resources by name: `limiting(1GiB,arena(cuda-malloc))`.
//!
//! ```text
//! text ─ parse ─▶ Expression ─ kinds ─▶ Stack ─ build ─▶ a resource of vpmm, behind Backend
//! ```

mod backend;
mod build;
mod kinds;
mod parse;

pub(crate) use backend::StackBackend;
pub use kinds::{Kind, Stack};
pub use parse::StackError;
pub(super) use parse::split_list;

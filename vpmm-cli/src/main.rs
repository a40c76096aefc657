//! The `vpmm` command.
fn main() {}

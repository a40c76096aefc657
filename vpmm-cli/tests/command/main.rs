//! The `vpmm` command as a user meets it, on the simulator.

mod bench;
mod fit;
mod output;
mod replay;
mod rig;
mod serve;
mod stacks;

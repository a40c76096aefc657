//! The GPU memory service over real sockets and processes, on the simulator: the server, writers and
//! readers share memory through real descriptors.

mod batches;
mod errors;
mod flows;
mod locks;
mod manager;
mod processes;
mod rig;
mod roles;

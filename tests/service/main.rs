//! The GPU memory service over real sockets and processes, on the simulator: the server, writers and
//! readers share memory through real descriptors.

mod ahead;
mod batches;
mod crashes;
mod errors;
mod flows;
mod hostile;
mod locks;
mod manager;
mod managers;
mod processes;
#[path = "../support/random.rs"]
mod random;
mod rig;
mod roles;
mod scratch;
mod silent;
mod storage;

//! Replaying a trace through an allocator: order, time, checks.
//!
//! ```text
//! Trace ─ lanes ─▶ engine ─▶ Backend (the allocator, timed)
//!                    └─────▶ Checker (device work of --verify, not timed)
//! ```
//!
//! **Streams.** Each stream of the trace is a stream that the replay makes,
//! non-blocking, the default streams too: nothing else runs on the device, and a
//! per-thread default stream is then the same stream with and without threads.
//!
//! **Time.** Only the host's time inside the allocator counts. The clock runs
//! over stretches of the replay loop, not over single calls, which it would
//! cost as much as; it is stopped for device work, for waits between threads and
//! for the progress bar. What the clock and the loop themselves cost is measured
//! and taken off. With threads the time is the sum over them.

mod clock;
mod engine;
mod lanes;
mod live;
mod longest;
mod nothing;
mod run;
mod verify;

pub use engine::{Checker, Pass, Piece, Replay, Stop, Target};
pub use longest::{Longest, Spent};
pub use run::{Outcome, RunError, Session, Settings, run};
pub use verify::{Mismatch, Verifier};

#[cfg(test)]
mod tests;

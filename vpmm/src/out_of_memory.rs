//! What callers say about requests that find no memory.

#![forbid(unsafe_code)]

use std::time::Duration;

/// How long a request that finds no memory waits for some, once there is nothing to move, to make,
/// or to take over from another stream. A request for more than the limit, or than the device has, waits for nothing.
///
/// ```
/// let mut config = vpmm::PoolConfig::default();
/// config.out_of_memory = vpmm::WaitPolicy::WaitUpTo(std::time::Duration::from_millis(50));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum WaitPolicy {
    /// Not at all: the host never waits for the GPU, but in a pool that is told to be patient
    /// ([`PoolConfig::patience`](crate::PoolConfig::patience)). What has finished by then is found all
    /// the same.
    FailAtOnce,
    /// Until the GPU has finished with everything that was freed before, however long that takes.
    /// Where a stream can be made to wait instead
    /// ([`Reuse::internal_dependencies`](crate::Reuse::internal_dependencies)), that comes before.
    #[default]
    WaitForPending,
    /// Up to a time, for what was freed before and for what other threads free meanwhile: the
    /// request is tried again after pauses of 20 µs at first and 1 ms later. The pool's callbacks
    /// ([`Pool::on_out_of_memory`](crate::Pool::on_out_of_memory)) are asked before; their time does
    /// not count. The calling thread sleeps.
    WaitUpTo(Duration),
}

/// What a callback of [`Pool::on_out_of_memory`](crate::Pool::on_out_of_memory) answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Recovery {
    /// The request is to be tried again. If it fails again, the callback is asked again.
    Retry,
    /// There is nothing more that it can do: the next callback is asked.
    GiveUp,
}

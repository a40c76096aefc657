//! What can go wrong at a client.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::cuda::CudaError;
use crate::lock::Granted;
use crate::wire::{DecodeError, FrameError};

/// Why something was not done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The lock was not to be had in the time for it. The one failure that a client may simply
    /// try again after.
    #[error("Timeout waiting for lock")]
    LockTimeout,
    /// A signal came while a server or the lock was waited for, see
    /// [`ConnectOptions::interruptible`](super::ConnectOptions::interruptible), or an answer, see
    /// [`Interrupt`](super::Interrupt). The connection is of no further use.
    #[error("a signal came before the answer")]
    Interrupted,
    /// No server could be reached in the time for it.
    #[error("no server at {}: {source}", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// What the last attempt said.
        source: io::Error,
    },
    /// A server is there and does not answer: it is stopped, or stuck. The connection is given up. See
    /// [`ConnectOptions::answer_timeout`](super::ConnectOptions::answer_timeout).
    #[error("the server has not answered for {} s", time.as_secs_f64())]
    Silent {
        /// How long an answer may take.
        time: Duration,
    },
    /// Another server is where the one was that does not answer, which can be asked nothing any more. The
    /// connection is given up.
    #[error(
        "another server is in the place of the one that was asked, which has not answered for {} s",
        time.as_secs_f64()
    )]
    Replaced {
        /// How long an answer may take.
        time: Duration,
    },
    /// The process was forked: the connection is its parent's.
    #[error("the process was forked, and the connection is its parent's")]
    Forked,
    /// The server has closed the connection, or died.
    #[error("the server is gone")]
    Disconnected,
    /// The socket failed.
    #[error("the connection failed: {0}")]
    Socket(#[from] io::Error),
    /// The server's answer cannot be read.
    #[error("the server's answer cannot be read: {0}")]
    Decode(#[from] DecodeError),
    /// The server's answer is too long.
    #[error("the server's answer: {0}")]
    Frame(#[from] FrameError),
    /// The server answered something else than was asked.
    #[error("the server answered {found} where {expected} was due")]
    Unexpected {
        /// What was due.
        expected: &'static str,
        /// What came.
        found: String,
    },
    /// The answer came with another number of descriptors than it should have.
    #[error("the server's answer has {found} descriptors beside it, not {expected}")]
    Descriptors {
        /// How many there should be.
        expected: usize,
        /// How many there are.
        found: usize,
    },
    /// The server would not do it.
    #[error("{error}")]
    Refused {
        /// Why, in the server's words.
        error: String,
    },
    /// The driver failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// There is no session.
    #[error("not connected")]
    NotConnected,
    /// There is a session already.
    #[error("already connected with {}", has.name())]
    AlreadyConnected {
        /// The lock that it has.
        has: Granted,
    },
    /// It needs the right to write.
    #[error("requires {needed} session, current mode: {}", has.name())]
    WrongLock {
        /// What it needs.
        needed: &'static str,
        /// The lock that the session has.
        has: Granted,
    },
    /// The published layout is not the one whose addresses were kept.
    #[error("stale memory layout: {reason}")]
    StaleLayout {
        /// What differs.
        reason: String,
    },
    /// No mapping is at this address.
    #[error("nothing is reserved at {address:#x}")]
    UnknownAddress {
        /// The address.
        address: u64,
    },
    /// The mapping is not in the state that this needs.
    #[error("the memory at {address:#x} is {state}")]
    MappingState {
        /// Its address.
        address: u64,
        /// What it is.
        state: &'static str,
    },
    /// A size that the block behind scratch mappings cannot have, or not any more.
    #[error(
        "a scratch block of {bytes} bytes: it must be a power of two, a multiple of {granularity}, and \
         be set before there are scratch mappings"
    )]
    ScratchBlock {
        /// The size.
        bytes: u64,
        /// What it must be a multiple of.
        granularity: u64,
    },
    /// A size that is no size of memory.
    #[error("a size of {bytes} bytes cannot be")]
    Size {
        /// The size.
        bytes: u64,
    },
}

impl From<rustix::io::Errno> for ClientError {
    fn from(error: rustix::io::Errno) -> Self {
        use rustix::io::Errno;
        match error {
            Errno::PIPE | Errno::CONNRESET => Self::Disconnected,
            error => Self::Socket(error.into()),
        }
    }
}

//! From a path to a socket, and requests that need no lock.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use super::ClientError;
use super::session::Channel;
use crate::lock::Requested;
use crate::socket::default_spin;
use crate::wire::*;

/// How a session is begun.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct ConnectOptions {
    /// The lock to ask for.
    pub lock: Requested,
    /// How long to wait for the lock, and for a server to be there; for the lock without end, and
    /// half a minute for a server, if not said.
    pub timeout: Option<Duration>,
    /// Whether to use the batch extension if the server has it.
    pub batch: bool,
    /// How long to look for an answer without sleeping: 50 µs, or nothing on machines with fewer than
    /// four processors. It saves the time that waking a thread takes.
    pub spin: Duration,
}

impl ConnectOptions {
    /// Without a time limit, and with batches.
    pub fn new(lock: Requested) -> Self {
        Self { lock, timeout: None, batch: true, spin: default_spin() }
    }

    /// Waits so long and no longer.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Looks so long for an answer without sleeping.
    pub fn spin(mut self, spin: Duration) -> Self {
        self.spin = spin;
        self
    }

    /// Whether to use the batch extension.
    pub fn batch(mut self, batch: bool) -> Self {
        self.batch = batch;
        self
    }
}

/// How long a server may take to be there, where nothing else is said.
const SERVER_START: Duration = Duration::from_secs(30);

/// Between two attempts to reach it, at first and at most: a server that was started just now is
/// there within milliseconds of its driver.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

/// Connects to a server that is there, or will be before the time is up.
pub(super) fn reach(path: &Path, timeout: Option<Duration>) -> Result<OwnedFd, ClientError> {
    let failed = |error: Errno| ClientError::Connect { path: path.into(), source: error.into() };
    let address = SocketAddrUnix::new(path).map_err(failed)?;
    // A time that no clock reaches is none.
    let deadline = Instant::now().checked_add(timeout.unwrap_or(SERVER_START));
    let mut pause = FIRST_PAUSE;
    loop {
        let (family, flags) = (AddressFamily::UNIX, SocketFlags::CLOEXEC);
        let socket = socket_with(family, SocketType::STREAM, flags, None).map_err(failed)?;
        match connect(&socket, &address) {
            Ok(()) => return Ok(socket),
            Err(error @ (Errno::NOENT | Errno::CONNREFUSED | Errno::AGAIN | Errno::INTR)) => {
                let left = |deadline: Instant| deadline.saturating_duration_since(Instant::now());
                let left = deadline.map_or(pause, left);
                if left.is_zero() {
                    return Err(failed(error));
                }
                std::thread::sleep(left.min(pause));
                pause = (pause * 3 / 2).min(LONGEST_PAUSE);
            }
            Err(error) => return Err(failed(error)),
        }
    }
}

/// The state of a server's lock and layout. Takes no lock and changes nothing.
///
/// # Errors
/// [`ClientError::Connect`] and what goes wrong with connections.
pub fn runtime_state(
    path: impl AsRef<Path>,
    timeout: Duration,
) -> Result<GetRuntimeStateResponse, ClientError> {
    let mut channel = Channel::new(reach(path.as_ref(), Some(timeout))?, Duration::ZERO);
    match channel.call(&GetRuntimeStateRequest {}, 0)?.0 {
        Message::GetRuntimeStateResponse(state) => Ok(state),
        other => Err(unexpected("GetRuntimeStateResponse", other)),
    }
}

/// What has happened at a server, oldest first. Takes no lock and changes nothing.
///
/// # Errors
/// As [`runtime_state`].
pub fn event_history(
    path: impl AsRef<Path>,
    timeout: Duration,
) -> Result<Vec<RuntimeEvent>, ClientError> {
    let mut channel = Channel::new(reach(path.as_ref(), Some(timeout))?, Duration::ZERO);
    match channel.call(&GetEventHistoryRequest {}, 0)?.0 {
        Message::GetEventHistoryResponse(history) => Ok(history.events),
        other => Err(unexpected("GetEventHistoryResponse", other)),
    }
}

/// The error for an answer that is not the one that was due.
pub(super) fn unexpected(expected: &'static str, found: Message) -> ClientError {
    match found {
        Message::ErrorResponse(ErrorResponse { error, .. }) => ClientError::Refused { error },
        other => ClientError::Unexpected { expected, found: other.name().to_owned() },
    }
}

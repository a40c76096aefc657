//! The server: a socket, a thread for each session, and the state that they share.
//!
//! ```text
//!            ┌ accept ─► session ─┐            ┌ layout ─ lock ─ history   (a mutex, held for
//!   socket ──┤           session ─┼─► service ─┤                            microseconds)
//!            └           session ─┘            └ memory ─► reclaim          (driver calls, outside it)
//! ```
//!
//! A thread for each session, rather than one loop for all: a request is two system calls in the
//! thread that the kernel wakes for it, so that a round trip costs as little as can be, and a session
//! that makes memory, sends to a reader who does not read, or waits for a lock stops nobody else.
//!
//! 1. Driver calls, sending and receiving are never made with the state's mutex held.
//! 2. A session's lock ends with its thread, however that ends.
//! 3. A client can end its own session and no other; a driver that fails ends the server.

mod ahead;
mod allocate;
mod descriptors;
mod history;
mod limits;
mod listener;
mod metrics;
mod peer;
mod requests;
mod service;
mod session;

pub use limits::raise_descriptor_limit;
pub use listener::ListenError;
pub use metrics::{Metrics, serve_metrics};

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};

use crate::cuda::CudaError;
use crate::memory::Memory;
use crate::wake::Waker;
use listener::Listener;
use service::Service;

/// Settings of a server.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Settings {
    /// Where clients connect.
    pub socket_path: PathBuf,
    /// What its messages call it; a tag.
    pub name: String,
    /// A group that may connect beside this user and root.
    pub group: Option<u32>,
    /// How long to wait before memory is asked for again that there was not enough of; a millisecond at least.
    pub retry_interval: Duration,
    /// How long to go on asking; for ever if not said.
    pub retry_timeout: Option<Duration>,
    /// The longest message that is taken. A client's batches of metadata come to 256 KiB and a little more.
    pub max_message_bytes: u64,
    /// What a layout's metadata may take of the server's memory: the keys and the values, 256 bytes for
    /// each entry beside them, and the tags of allocations.
    pub max_metadata_bytes: u64,
    /// The most connections at a time.
    pub max_connections: usize,
    /// How long a client that has connected may take to say what it wants; also how long an answer
    /// waits while the kernel has as many descriptors under way as it takes.
    pub handshake_timeout: Duration,
    /// How long a session looks for the next request without sleeping, once it has answered one: 50 µs,
    /// or nothing on machines with fewer than four processors. Not done where there are more
    /// connections than half the processors.
    pub spin: Duration,
    /// The largest allocation of which a session that makes one after the other has the next one made
    /// ahead, between two requests; 0 for none.
    pub ahead_bytes: u64,
    /// How long that is kept for a writer that asks for nothing.
    pub ahead_time: Duration,
}

/// Above it the driver's calls that are saved are little beside those that are not, and one made for
/// nothing costs more than several save: to release 1 GiB takes an H200 as long as to make and export
/// ten of them, 64 MiB less than one.
const AHEAD_BYTES: u64 = 64 << 20;

/// As long as reading so much from a disk may take, and short beside what happens before somebody else
/// misses the memory.
const AHEAD_TIME: Duration = Duration::from_millis(100);

/// Many times what the largest models have, a few hundred bytes for each tensor; all keys still fit into
/// the longest answer that a client reads.
const METADATA_BYTES: u64 = 256 << 20;

impl Settings {
    /// The defaults: memory is asked for again every half second for a minute, messages are at most
    /// a mebibyte, metadata at most 256, connections at most 4096, and who connects says within half a
    /// minute what for.
    pub fn new(socket_path: impl Into<PathBuf>) -> Self {
        Self {
            socket_path: socket_path.into(),
            name: "default".to_owned(),
            group: None,
            retry_interval: Duration::from_millis(500),
            retry_timeout: Some(Duration::from_secs(60)),
            max_message_bytes: 1 << 20,
            max_metadata_bytes: METADATA_BYTES,
            max_connections: 4096,
            handshake_timeout: Duration::from_secs(30),
            spin: crate::socket::default_spin(),
            ahead_bytes: AHEAD_BYTES,
            ahead_time: AHEAD_TIME,
        }
    }
}

/// Why a server ended, or did not begin.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// The socket cannot be had.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The driver failed: the memory may be lost.
    #[error("the driver failed: {0}")]
    Driver(#[from] CudaError),
    /// What the server believes of itself is not so.
    #[error("the layout is broken: {0}")]
    Broken(String),
    /// The system failed.
    #[error("{what}: {source}")]
    System {
        /// What was to be done.
        what: &'static str,
        /// Why it was not.
        source: std::io::Error,
    },
}

/// Stops a server, from any thread.
#[derive(Clone, Debug)]
pub struct Stopper(Arc<Waker>);

impl Stopper {
    /// Lets [`Server::run`] come to its end: no further connections, those that are there are closed,
    /// the socket is removed.
    pub fn stop(&self) {
        self.0.wake();
    }
}

/// A server that has its socket. Clients that connect wait for [`run`](Self::run).
#[derive(Debug)]
pub struct Server {
    listener: Listener,
    service: Arc<Service>,
    stop: Arc<Waker>,
}

/// How long sessions have, once their sockets are shut, and the memory then, before the server ends
/// without them.
const LAST_WORDS: Duration = Duration::from_secs(5);

impl Server {
    /// Takes the socket: one that a dead server left is replaced, one that lives is not.
    ///
    /// # Errors
    /// [`ServerError::Listen`], [`ServerError::System`].
    pub fn bind(memory: Memory, settings: Settings) -> Result<Self, ServerError> {
        let listener = Listener::bind(&settings.socket_path, settings.group)?;
        let stop = Waker::new();
        let stop = stop.map_err(|source| ServerError::System { what: "eventfd", source })?;
        let stop = Arc::new(stop);
        let service = Arc::new(Service::new(memory, settings, Stopper(Arc::clone(&stop))));
        Ok(Self { listener, service, stop })
    }

    /// Where clients connect.
    pub fn socket_path(&self) -> &Path {
        &self.service.settings.socket_path
    }

    /// What stops this server.
    pub fn stopper(&self) -> Stopper {
        Stopper(Arc::clone(&self.stop))
    }

    /// The figures of this server.
    pub fn metrics(&self) -> Metrics {
        Metrics::of(&self.service)
    }

    /// Serves until it is stopped or the driver fails.
    ///
    /// # Errors
    /// [`ServerError::Driver`], [`ServerError::Broken`], [`ServerError::System`]. The socket is
    /// removed in any case.
    pub fn run(self) -> Result<(), ServerError> {
        let Self { mut listener, service, stop } = self;
        let settings = &service.settings;
        tracing::info!(
            name = settings.name,
            socket = %settings.socket_path.display(),
            device = service.memory.ordinal(),
            granularity = service.memory.granularity(),
            "serving"
        );
        let served = accept_until_stopped(&mut listener, &service, &stop);
        drop(listener);
        service.close_sessions(LAST_WORDS);
        service.release_memory(LAST_WORDS);
        tracing::info!(name = service.settings.name, "stopped");
        match service.take_failure() {
            Some(failure) => Err(failure),
            None => served,
        }
    }
}

fn accept_until_stopped(
    listener: &mut Listener,
    service: &Arc<Service>,
    stop: &Waker,
) -> Result<(), ServerError> {
    loop {
        let mut ready = [
            PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(stop.as_fd(), PollFlags::IN),
        ];
        match poll(&mut ready, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => {
                return Err(ServerError::System { what: "poll", source: error.into() });
            }
        }
        if !ready[1].revents().is_empty() {
            return Ok(());
        }
        if ready[0].revents().is_empty() {
            continue;
        }
        match accept_with(listener.as_fd(), SocketFlags::CLOEXEC) {
            Ok(socket) => session::start(service, socket),
            // Who connected has gone again, or was never quite there.
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
            Err(Errno::MFILE | Errno::NFILE) => {
                tracing::warn!("no descriptor left for a connection: it is closed");
                listener.turn_one_away();
            }
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }
}

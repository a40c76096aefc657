//! One connection, from its first message to its end.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::ServerError;
use super::ahead::Ahead;
use super::peer::may_connect;
use super::service::Service;
use crate::lock::{Entered, Granted, Requested, SessionId};
use crate::socket::{self, Spin, Waited};
use crate::wire::{
    BATCH, Encode, ErrorResponse, Extensions, FrameReader, GetEventHistoryResponse,
    HandshakeRequest, HandshakeResponse, Message, encode_frame,
};

/// Stack of a session's thread: addresses, of which pages are taken as they are touched. The driver is
/// called on it.
const STACK_BYTES: usize = 1 << 20;

/// Why a session ends.
#[derive(Debug, thiserror::Error)]
pub(super) enum End {
    /// It has done what it came for.
    #[error("done")]
    Done,
    /// The client has closed, or died.
    #[error("the client is gone")]
    Gone,
    /// The client sent what cannot be read.
    #[error("{0}")]
    Unreadable(String),
    /// The socket failed.
    #[error("{0}")]
    Socket(#[from] io::Error),
    /// The server cannot go on.
    #[error("{0}")]
    Server(ServerError),
}

impl From<Errno> for End {
    fn from(error: Errno) -> Self {
        match error {
            Errno::PIPE | Errno::CONNRESET => Self::Gone,
            error => Self::Socket(error.into()),
        }
    }
}

/// A connection with its thread's buffers.
pub(super) struct Session {
    pub(super) service: Arc<Service>,
    pub(super) id: SessionId,
    pub(super) granted: Granted,
    /// Whether the client speaks the batch extension.
    pub(super) batches: bool,
    /// The next allocation's memory, perhaps.
    pub(super) ahead: Ahead,
    /// What is to be sent.
    pub(super) out: Vec<u8>,
    socket: Arc<OwnedFd>,
    frames: FrameReader,
    spin: Spin,
    /// Whether something was answered, so that a further request may soon be there.
    answered: bool,
}

/// Begins a session in a thread of its own, unless it may not or cannot be.
pub(super) fn start(service: &Arc<Service>, socket: OwnedFd) {
    if let Err(reason) = may_connect(socket.as_fd(), service.settings.group) {
        service.counters.refused.add(1);
        tracing::warn!(reason, "a connection is refused");
        return;
    }
    let socket = Arc::new(socket);
    let Some(id) = service.admit(&socket) else {
        service.counters.refused.add(1);
        tracing::warn!(most = service.settings.max_connections, "too many connections");
        return;
    };
    service.counters.connections.add(1);
    let session = Session {
        service: Arc::clone(service),
        id,
        granted: Granted::Ro,
        batches: false,
        ahead: Ahead::default(),
        out: Vec::new(),
        socket,
        frames: FrameReader::new(service.settings.max_message_bytes),
        spin: Spin::default(),
        answered: false,
    };
    let thread = std::thread::Builder::new().name(format!("gms-{id}")).stack_size(STACK_BYTES);
    if let Err(error) = thread.spawn(move || session.run()) {
        // The session went with the closure, and so did its place in the list.
        tracing::warn!(%error, "no thread for a connection: it is closed");
    }
}

impl Drop for Session {
    /// However the thread ends, its lock does.
    fn drop(&mut self) {
        // Whoever gets the lock may need the room.
        self.give_up_ahead();
        self.service.forget(self.id);
    }
}

impl Session {
    fn run(mut self) {
        let end = match self.serve() {
            Ok(()) => End::Done,
            Err(end) => end,
        };
        match end {
            End::Done | End::Gone => tracing::debug!(session = self.id, %end, "session ends"),
            End::Unreadable(_) => {
                self.service.counters.unreadable.add(1);
                tracing::warn!(session = self.id, %end, "session dropped");
            }
            End::Socket(_) => tracing::warn!(session = self.id, %end, "session dropped"),
            End::Server(failure) => self.service.fail(failure),
        }
    }

    /// Whether a request, or the begin of one, was read already.
    pub(super) fn has_bytes(&self) -> bool {
        self.frames.pending() > 0
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn serve(&mut self) -> Result<(), End> {
        let deadline = Instant::now().checked_add(self.service.settings.handshake_timeout);
        match self.receive(deadline)? {
            Message::HandshakeRequest(handshake) => {
                if !self.handshake(&handshake)? {
                    return Ok(());
                }
            }
            Message::GetRuntimeStateRequest(_) => {
                let state = self.runtime_state();
                return self.answer(&state);
            }
            Message::GetEventHistoryRequest(_) => {
                let events = self.service.core().history.told();
                return self.answer(&GetEventHistoryResponse { events });
            }
            _ => return self.refuse("Expected HandshakeRequest".to_owned()),
        }
        loop {
            self.answered = true;
            let message = self.receive(None)?;
            self.service.counters.requests.add(1);
            // The descriptor of what was allocated is asked for next, and is not to wait.
            let export_follows = matches!(message, Message::AllocateRequest(_));
            self.request(message)?;
            if !export_follows {
                self.make_ahead()?;
            }
        }
    }

    /// The next message; until the deadline, if there is one.
    fn receive(&mut self, deadline: Option<Instant>) -> Result<Message, End> {
        loop {
            match self.frames.next_frame() {
                Ok(Some(bytes)) => {
                    return Message::decode(bytes).map_err(|e| End::Unreadable(e.to_string()));
                }
                Ok(None) => {}
                Err(error) => {
                    self.refuse(error.to_string())?;
                    return Err(End::Unreadable(error.to_string()));
                }
            }
            if let Some(deadline) = deadline {
                let left = deadline.saturating_duration_since(Instant::now());
                if !socket::readable(self.socket(), left)? {
                    return Err(End::Unreadable("no request within the time for it".to_owned()));
                }
            }
            let given = if self.answered { self.service.spin() } else { Duration::ZERO };
            let space = self.frames.space();
            let (socket, ahead, service) = (self.socket.as_fd(), &mut self.ahead, &self.service);
            let before_sleep = || {
                // Kept for a while, and not for a client that has something else to do.
                if ahead.is_held() && !socket::readable(socket, service.settings.ahead_time)? {
                    ahead.give_up(&service.counters.ahead_bytes);
                }
                Ok(())
            };
            match socket::receive_bytes(socket, space, &mut self.spin, given, before_sleep)? {
                0 => return Err(End::Gone),
                bytes => self.frames.arrived(bytes),
            }
        }
    }

    /// Sends a message with descriptors beside it; false where the client got a refusal in its place, as the
    /// kernel has too many descriptors under way.
    pub(super) fn send(
        &mut self,
        message: &impl Encode,
        files: &[BorrowedFd<'_>],
    ) -> Result<bool, End> {
        self.out.clear();
        encode_frame(message, &mut self.out);
        let started = Instant::now();
        let mut pause = Duration::from_micros(200);
        loop {
            match socket::send_all(self.socket.as_fd(), &self.out, files) {
                // More descriptors are under way than this user may have open, to readers that
                // import what they got before. Nothing was sent.
                Err(Errno::TOOMANYREFS) => {}
                sent => {
                    sent?;
                    return Ok(true);
                }
            }
            if started.elapsed() > self.service.settings.handshake_timeout {
                let text = "Too many descriptors are on their way to clients";
                self.refuse(text.to_owned())?;
                return Ok(false);
            }
            if socket::wait(self.socket(), None, Some(pause))? == Waited::HungUp {
                return Err(End::Gone);
            }
            pause = (pause * 2).min(Duration::from_millis(10));
        }
    }

    pub(super) fn answer(&mut self, message: &impl Encode) -> Result<(), End> {
        self.send(message, &[]).map(drop)
    }

    /// Says why a request is not done.
    pub(super) fn refuse(&mut self, error: String) -> Result<(), End> {
        self.service.counters.errors.add(1);
        tracing::debug!(session = self.id, error, "request refused");
        self.out.clear();
        encode_frame(&ErrorResponse { error, code: 0 }, &mut self.out);
        Ok(socket::send_all(self.socket.as_fd(), &self.out, &[])?)
    }

    /// Gets the lock that is asked for; false if the time was up first.
    fn handshake(&mut self, handshake: &HandshakeRequest) -> Result<bool, End> {
        self.batches = handshake.extensions.contains(BATCH);
        let names = if self.batches { vec![BATCH.to_owned()] } else { Vec::new() };
        let extensions = Extensions(names);
        let entered = self.acquire(handshake.lock_type, handshake.timeout_ms)?;
        let Some(entered) = entered else {
            let committed = self.service.core().lock.snapshot().committed;
            let granted_lock_type = None;
            let late =
                HandshakeResponse { success: false, committed, granted_lock_type, extensions };
            self.answer(&late)?;
            return Ok(false);
        };
        self.granted = entered.granted;
        tracing::debug!(session = self.id, lock = entered.granted.name(), "lock granted");
        self.answer(&HandshakeResponse {
            success: true,
            committed: entered.committed,
            granted_lock_type: Some(entered.granted),
            extensions,
        })?;
        Ok(true)
    }

    /// Waits for a lock, and for the client's end, and takes the lock if there is still somebody who
    /// wants it.
    fn acquire(
        &mut self,
        requested: Requested,
        timeout_ms: Option<i64>,
    ) -> Result<Option<Entered>, End> {
        let time = timeout_ms.map(|time| Duration::from_millis(time.try_into().unwrap_or(0)));
        let deadline = time.and_then(|time| Instant::now().checked_add(time));
        let waker = match self.service.request(self.id, requested) {
            Ok(waker) => waker,
            Err(error) => {
                self.refuse(format!("The server cannot let anybody wait: {error}"))?;
                return Err(End::Socket(error));
            }
        };
        if let Some(waker) = waker {
            self.service.counters.waits.add(1);
            while !self.service.is_granted(self.id) {
                let left = deadline.map(|time| time.saturating_duration_since(Instant::now()));
                match socket::wait(self.socket(), Some(waker.as_fd()), left)? {
                    Waited::HungUp => return Err(End::Gone),
                    Waited::Woken => {}
                    // Unless it was granted at the last moment.
                    Waited::TimedOut if !self.service.is_granted(self.id) => {
                        self.service.leave(self.id);
                        return Ok(None);
                    }
                    Waited::TimedOut => {}
                }
            }
        }
        // A client that has died meanwhile replaces nothing: its lock goes to the next.
        if socket::is_hung_up(self.socket()) {
            return Err(End::Gone);
        }
        self.service.enter(self.id).map(Some).ok_or(End::Gone)
    }
}

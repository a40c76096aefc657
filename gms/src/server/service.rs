//! What all sessions share: the lock, the layout, its memory.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::{Shutdown, shutdown};

use super::history::{Event, History};
use super::metrics::Counters;
use super::{ServerError, Settings, Stopper};
use crate::layout::Layout;
use crate::lock::{Entered, Granted, Left, Lock, SessionId};
use crate::memory::{Extent, Memory};
use crate::wake::Waker;

/// One layout with everything around it.
#[derive(Debug)]
pub(super) struct Service {
    pub(super) memory: Memory,
    pub(super) settings: Settings,
    pub(super) counters: Counters,
    core: Mutex<Core>,
    sessions: Mutex<HashMap<SessionId, Arc<OwnedFd>>>,
    session_ended: Condvar,
    next_session: AtomicU64,
    /// As many as there are in `sessions`.
    connections: AtomicUsize,
    /// Connections up to which sessions may spin.
    spinning: usize,
    stopping: AtomicBool,
    failure: Arc<Failure>,
}

/// Why the server ends before it is told to.
#[derive(Debug)]
struct Failure {
    first: Mutex<Option<ServerError>>,
    stopper: Stopper,
}

impl Failure {
    fn set(&self, failure: ServerError) {
        tracing::error!(%failure, "the server stops");
        let mut first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        first.get_or_insert(failure);
        self.stopper.stop();
    }
}

/// What is behind the mutex. Nothing that waits is done with it.
#[derive(Debug, Default)]
pub(super) struct Core {
    pub(super) lock: Lock,
    /// Shared with requests that read it, and copied if it is changed meanwhile; that does not
    /// happen, as who changes it is alone.
    pub(super) layout: Arc<Layout>,
    pub(super) extents: HashMap<Arc<str>, Arc<Extent>>,
    /// The hash of the layout once it is sealed or published; empty before.
    pub(super) hash: String,
    pub(super) history: History,
    /// Sessions that wait for their lock.
    wakers: HashMap<SessionId, Arc<Waker>>,
}

impl Core {
    /// Wakes the sessions that got their lock. To be called after everything that may give one.
    fn tell_granted(&mut self) {
        for session in self.lock.take_newly_granted() {
            if let Some(waker) = self.wakers.remove(&session) {
                waker.wake();
            }
        }
    }

    /// Throws the layout away; its memory is the caller's to give back.
    fn clear(&mut self) -> Vec<Arc<Extent>> {
        self.layout = Arc::default();
        self.hash.clear();
        std::mem::take(&mut self.extents).into_values().collect()
    }
}

impl Service {
    pub(super) fn new(memory: Memory, settings: Settings, stopper: Stopper) -> Self {
        let failure = Arc::new(Failure { first: Mutex::default(), stopper });
        // Not the service: the thread that gives memory back would keep what it is itself a part of.
        let told = Arc::clone(&failure);
        memory.on_lost(move |error| told.set(ServerError::Driver(error)));
        Self {
            memory,
            settings,
            counters: Counters::default(),
            core: Mutex::default(),
            sessions: Mutex::default(),
            session_ended: Condvar::new(),
            next_session: AtomicU64::new(1),
            connections: AtomicUsize::new(0),
            spinning: std::thread::available_parallelism().map_or(1, usize::from) / 2,
            stopping: AtomicBool::new(false),
            failure,
        }
    }

    pub(super) fn core(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sessions(&self) -> MutexGuard<'_, HashMap<SessionId, Arc<OwnedFd>>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a connection into the list of those that are closed at the end; `None` where there are
    /// as many as there may be, or the end has come.
    pub(super) fn admit(&self, socket: &Arc<OwnedFd>) -> Option<SessionId> {
        let mut sessions = self.sessions();
        if self.stopping.load(Ordering::Acquire) || sessions.len() >= self.settings.max_connections
        {
            return None;
        }
        let session = self.next_session.fetch_add(1, Ordering::Relaxed);
        sessions.insert(session, Arc::clone(socket));
        self.connections.store(sessions.len(), Ordering::Relaxed);
        Some(session)
    }

    /// How many connections there are.
    pub(super) fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    /// How long a session may look for its next request without sleeping.
    pub(super) fn spin(&self) -> Duration {
        if self.connections() > self.spinning { Duration::ZERO } else { self.settings.spin }
    }

    /// A session asks for a lock. What it can wait with comes back if it has to.
    pub(super) fn request(
        &self,
        session: SessionId,
        requested: crate::lock::Requested,
    ) -> std::io::Result<Option<Arc<Waker>>> {
        let mut core = self.core();
        core.lock.request(session, requested);
        core.tell_granted();
        if core.lock.granted(session).is_some() {
            return Ok(None);
        }
        match Waker::new() {
            Ok(waker) => {
                let waker = Arc::new(waker);
                core.wakers.insert(session, Arc::clone(&waker));
                Ok(Some(waker))
            }
            Err(error) => {
                core.lock.leave(session);
                core.tell_granted();
                Err(error)
            }
        }
    }

    /// Whether a lock is reserved for the session.
    pub(super) fn is_granted(&self, session: SessionId) -> bool {
        self.core().lock.granted(session).is_some()
    }

    /// A session takes the lock that is reserved for it. A writer of a new layout begins with
    /// nothing; the old layout's memory is given back in the background.
    pub(super) fn enter(&self, session: SessionId) -> Option<Entered> {
        let mut core = self.core();
        let entered = core.lock.enter(session)?;
        core.wakers.remove(&session);
        let mut old = Vec::new();
        if entered.granted == Granted::Rw {
            let allocations = core.layout.len();
            old = core.clear();
            if entered.replaces_committed {
                core.history.add(Event::Cleared(allocations));
            }
        }
        if entered.granted != Granted::Ro {
            core.history.add(Event::WriterConnected);
        }
        drop(core);
        self.memory.reclaim(old);
        Some(entered)
    }

    /// A session gives up what it has or waits for; it may go on to ask again.
    pub(super) fn leave(&self, session: SessionId) {
        let mut core = self.core();
        let mut old = Vec::new();
        core.wakers.remove(&session);
        let left = core.lock.leave(session);
        let allocations = core.layout.len();
        match left {
            Left::WriterAborted => {
                old = core.clear();
                core.history.add(Event::WriterAborted);
                core.history.add(Event::Cleared(allocations));
                tracing::warn!(session, allocations, "a writer left: its layout is void");
            }
            Left::WriterOfSealed => core.history.add(Event::WriterDisconnected(allocations)),
            Left::Reader | Left::Nothing => {}
        }
        core.tell_granted();
        drop(core);
        self.memory.reclaim(old);
    }

    /// A connection has ended.
    pub(super) fn forget(&self, session: SessionId) {
        self.leave(session);
        let mut sessions = self.sessions();
        sessions.remove(&session);
        self.connections.store(sessions.len(), Ordering::Relaxed);
        drop(sessions);
        self.session_ended.notify_all();
    }

    /// The writer publishes the layout.
    pub(super) fn commit(&self, session: SessionId, hash: String) -> bool {
        let mut core = self.core();
        if !core.lock.commit(session) {
            return false;
        }
        core.hash = hash;
        core.history.add(Event::Committed);
        // Only now: who is let in finds the hash.
        core.tell_granted();
        true
    }

    /// The writer seals the layout.
    pub(super) fn seal(&self, session: SessionId, hash: String) -> bool {
        let mut core = self.core();
        if !core.lock.seal(session) {
            return false;
        }
        core.hash = hash;
        let allocations = core.layout.len();
        core.history.add(Event::LayoutCommitted(allocations));
        true
    }

    /// Something failed that no client did: the server stops, with this as its reason.
    pub(super) fn fail(&self, failure: ServerError) {
        self.failure.set(failure);
    }

    pub(super) fn take_failure(&self) -> Option<ServerError> {
        self.failure.first.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Gives all memory back, and waits until that is done or the time is up.
    pub(super) fn release_memory(&self, time: Duration) {
        let deadline = Instant::now() + time;
        let all = self.core().clear();
        self.memory.reclaim(all);
        while self.memory.progress().pending_bytes() > 0 {
            if Instant::now() >= deadline {
                let bytes = self.memory.progress().pending_bytes();
                tracing::warn!(bytes, "memory has not been given back in time");
                return self.memory.leave();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Shuts every connection, and waits until their sessions have ended or the time is up.
    pub(super) fn close_sessions(&self, time: Duration) {
        let deadline = Instant::now() + time;
        let mut sessions = self.sessions();
        self.stopping.store(true, Ordering::Release);
        for socket in sessions.values() {
            let _ = shutdown(socket.as_fd(), Shutdown::Both);
        }
        while !sessions.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                tracing::warn!(sessions = sessions.len(), "sessions have not ended in time");
                return;
            }
            let waited = self.session_ended.wait_timeout(sessions, left);
            sessions = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

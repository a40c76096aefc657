//! From a path to a socket, and requests that need no lock.

use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::{Errno, ioctl_fionbio};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use super::ClientError;
use super::channel::{Channel, Waits};
use crate::lock::Requested;
use crate::socket::{self, Signals, default_spin};
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
    /// How long a server that is there may take for an answer before the connection is given up,
    /// [`ClientError::Silent`]: a minute, if nothing else is said; none waits for ever. What waits by its
    /// nature may take longer: a lock, and memory that there is too little of. Where that lasts this long
    /// the server is asked for its state, over a connection of its own, and has as long again to give it.
    pub answer_timeout: Option<Duration>,
    /// Whether a signal that this thread handles ends the wait for a server and for the lock,
    /// [`ClientError::Interrupted`]: not, if nothing else is said. For programs whose handlers do no more
    /// than note the signal, as an interpreter's.
    pub interruptible: bool,
}

/// How long an answer may take where nothing else is said: many times what a server needs that is alive,
/// and swapped, or one of hundreds of processes that ask the driver.
const ANSWER: Duration = Duration::from_secs(60);

impl ConnectOptions {
    /// As long as it takes to get the lock, and with batches.
    pub fn new(lock: Requested) -> Self {
        let (spin, answer_timeout) = (default_spin(), Some(ANSWER));
        Self { lock, timeout: None, batch: true, spin, answer_timeout, interruptible: false }
    }

    /// Whether a signal ends the wait.
    pub fn interruptible(mut self, interruptible: bool) -> Self {
        self.interruptible = interruptible;
        self
    }

    /// Waits so long and no longer.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Gives a server up that takes longer than this for an answer; one that takes for ever if `None`.
    pub fn answer_timeout(mut self, time: Option<Duration>) -> Self {
        self.answer_timeout = time;
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

/// What a server is waited for by that may still be about to start.
const TO_START: &[Errno] = &[Errno::NOENT, Errno::CONNREFUSED, Errno::AGAIN, Errno::INTR];

/// And one that is there, or has been, which does not start again meanwhile.
const TO_ACCEPT: &[Errno] = &[Errno::AGAIN, Errno::INTR];

/// Which server is at a path: the device and the number of its socket's file. As long as a server listens
/// no other file has these, even where its own has been removed. A process's number tells less: those of
/// other containers are 0 here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Identity(u64, u64);

impl Identity {
    /// Of who is at the path now, if anybody is.
    fn at(path: &Path) -> Option<Self> {
        std::fs::metadata(path).ok().map(|file| Self(file.dev(), file.ino()))
    }
}

/// A connection, and to which server; not known where nobody is at the path any more once it is made.
pub(super) type Reached = (OwnedFd, Option<Identity>);

/// Connects to a server that is there, or will be before the time is up, or before a signal comes.
pub(super) fn reach(
    path: &Path,
    timeout: Option<Duration>,
    signals: Signals<'_>,
) -> Result<Reached, ClientError> {
    reach_by(path, timeout, TO_START, signals)
}

/// The same, trying again after these errors.
fn reach_by(
    path: &Path,
    timeout: Option<Duration>,
    again: &[Errno],
    signals: Signals<'_>,
) -> Result<Reached, ClientError> {
    let failed = |error: Errno| ClientError::Connect { path: path.into(), source: error.into() };
    let address = SocketAddrUnix::new(path).map_err(failed)?;
    // A time that no clock reaches is none.
    let deadline = Instant::now().checked_add(timeout.unwrap_or(SERVER_START));
    let mut pause = FIRST_PAUSE;
    loop {
        // A server that accepts nobody has connections queue up, and a blocking one waits for its turn
        // without end.
        let (family, flags) = (AddressFamily::UNIX, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
        let socket = socket_with(family, SocketType::STREAM, flags, None).map_err(failed)?;
        let server = Identity::at(path);
        match connect(&socket, &address) {
            Ok(()) => {
                let now = Identity::at(path);
                // Another has come meanwhile, and nobody can tell which of them this leads to. It is asked
                // for nothing: one more attempt leads to who is there now.
                if now.is_some() && now != server {
                    continue;
                }
                ioctl_fionbio(&socket, false).map_err(failed)?;
                return Ok((socket, now));
            }
            Err(error) if again.contains(&error) => {
                let left = |deadline: Instant| deadline.saturating_duration_since(Instant::now());
                let left = deadline.map_or(pause, left);
                if left.is_zero() {
                    return Err(failed(error));
                }
                if socket::sleep(left.min(pause), signals).is_err() {
                    return Err(ClientError::Interrupted);
                }
                pause = (pause * 3 / 2).min(LONGEST_PAUSE);
            }
            Err(error) => return Err(failed(error)),
        }
    }
}

/// A question over a connection of its own, whose answer may take as long as it may take to connect.
fn ask(path: &Path, timeout: Duration, question: &impl Encode) -> Result<Message, ClientError> {
    let reached = reach(path, Some(timeout), Signals::Ignored)?;
    ask_over(reached, path, timeout, question, Signals::Ignored)
}

fn ask_over(
    reached: Reached,
    path: &Path,
    timeout: Duration,
    question: &impl Encode,
    signals: Signals<'_>,
) -> Result<Message, ClientError> {
    let mut channel = Channel::new(reached, path.into(), Duration::ZERO, Some(timeout));
    channel.begin(question, Waits::Not, signals)
}

/// The state of a server's lock and layout, within a time each for connecting and for the answer. Takes no
/// lock and changes nothing.
///
/// # Errors
/// [`ClientError::Connect`], [`ClientError::Silent`] and what goes wrong with connections.
pub fn runtime_state(
    path: impl AsRef<Path>,
    timeout: Duration,
) -> Result<GetRuntimeStateResponse, ClientError> {
    match ask(path.as_ref(), timeout, &GetRuntimeStateRequest {})? {
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
    match ask(path.as_ref(), timeout, &GetEventHistoryRequest {})? {
        Message::GetEventHistoryResponse(history) => Ok(history.events),
        other => Err(unexpected("GetEventHistoryResponse", other)),
    }
}

/// How a server is that has not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Health {
    /// It is alive, or nobody can tell.
    Alive,
    /// It answers nobody, not even who asks for its state, which waits for nothing.
    Silent,
    /// Another has come to where it was.
    Replaced,
    /// Nobody knows: a signal came before the answer.
    Interrupted,
}

/// Asks who is at the path how the server is that a connection leads to. One that turns the question away is
/// alive. Where nobody is at the path that is known at once, as the answer that is waited for is not looked
/// for meanwhile: a server whose socket's file somebody has removed, which goes on with those that it has, or
/// one that ends, and closes the connection then. Where another is there (the first is stopped, or stuck in
/// the driver where nothing kills it, and somebody has made room) its answer says nothing of the first, which
/// nobody can ask any more, nor find.
pub(super) fn health(
    path: &Path,
    server: Option<Identity>,
    time: Duration,
    signals: Signals<'_>,
) -> Health {
    let is_other =
        |there: Option<Identity>| matches!((server, there), (Some(a), Some(b)) if a != b);
    let reached = match reach_by(path, Some(time), TO_ACCEPT, signals) {
        Ok((_, there)) if is_other(there) => return Health::Replaced,
        Ok(reached) => reached,
        // It has not taken those that came before, either.
        Err(ClientError::Connect { source, .. }) if source.kind() == ErrorKind::WouldBlock => {
            return if is_other(Identity::at(path)) { Health::Replaced } else { Health::Silent };
        }
        Err(ClientError::Interrupted) => return Health::Interrupted,
        Err(_) => return Health::Alive,
    };
    match ask_over(reached, path, time, &GetRuntimeStateRequest {}, signals) {
        Err(ClientError::Silent { .. }) => Health::Silent,
        Err(ClientError::Interrupted) => Health::Interrupted,
        _ => Health::Alive,
    }
}

/// The error for an answer that is not the one that was due.
pub(super) fn unexpected(expected: &'static str, found: Message) -> ClientError {
    match found {
        Message::ErrorResponse(ErrorResponse { error, .. }) => ClientError::Refused { error },
        other => ClientError::Unexpected { expected, found: other.name().to_owned() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A clean-up of old files may take the socket's: a lock that is granted then is not left lying.
    #[test]
    fn whoever_cannot_be_asked_is_not_waited_for() {
        let folder = std::env::temp_dir().join(format!("gms-nobody-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let path = folder.join("s");
        let started = Instant::now();
        let server = Some(Identity(0, 0));
        assert_eq!(
            health(&path, server, Duration::from_secs(20), Signals::Ignored),
            Health::Alive,
            "no file"
        );
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert_eq!(
            health(&path, server, Duration::from_secs(20), Signals::Ignored),
            Health::Alive,
            "nobody listens"
        );
        assert!(started.elapsed() < Duration::from_secs(20));
        std::fs::remove_dir_all(folder).unwrap();
    }

    /// By the file, as long as the first is there, whatever the other answers, or whether it takes anybody.
    #[test]
    fn another_server_is_not_taken_for_the_one_that_was_asked() {
        use std::os::unix::net::UnixListener;
        let folder = std::env::temp_dir().join(format!("gms-other-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let path = folder.join("s");
        let time = Duration::from_secs(20);
        let first = UnixListener::bind(&path).unwrap();
        let (_socket, server) = reach(&path, Some(time), Signals::Ignored).unwrap();
        assert!(server.is_some() && server == Identity::at(&path));
        let short = Duration::from_millis(1);
        assert_eq!(health(&path, server, short, Signals::Ignored), Health::Silent);
        std::fs::remove_file(&path).unwrap();
        let second = UnixListener::bind(&path).unwrap();
        assert_eq!(health(&path, server, time, Signals::Ignored), Health::Replaced);
        // Where nothing is known of the first the other one's answer counts.
        assert_eq!(health(&path, None, short, Signals::Ignored), Health::Silent);
        drop((first, second));
        std::fs::remove_dir_all(folder).unwrap();
    }

    /// Whoever is reached as one server makes room for another is waited for as long as that one is there
    /// only if it is known which of them it is.
    #[test]
    fn who_is_reached_while_another_comes_is_known() {
        use std::os::unix::net::UnixListener;
        use std::sync::atomic::{AtomicBool, Ordering};
        let folder = std::env::temp_dir().join(format!("gms-comes-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let path = &folder.join("s");
        let time = Duration::from_secs(20);
        let first = UnixListener::bind(path).unwrap();
        let done = &AtomicBool::new(false);
        std::thread::scope(|threads| {
            threads.spawn(|| {
                let next = folder.join("next");
                let mut servers = vec![first];
                while !done.load(Ordering::Relaxed) {
                    servers.push(UnixListener::bind(&next).unwrap());
                    std::fs::rename(&next, path).unwrap();
                    // One that is there so short is gone before anybody has reached it.
                    std::thread::sleep(Duration::from_micros(200));
                    servers.drain(..servers.len().saturating_sub(100));
                }
            });
            let known =
                (0..3_000).all(|_| reach(path, Some(time), Signals::Ignored).unwrap().1.is_some());
            done.store(true, Ordering::Relaxed);
            assert!(known);
        });
        std::fs::remove_dir_all(folder).unwrap();
    }
}

//! A socket on which each request has one answer, and how long that may take.
//!
//! 1. A server that is there and does not answer is given up after a time ([`ClientError::Silent`]).
//! 2. What waits by its nature is not: there the server is asked for its state, each time that this time
//!    has passed, over a connection of its own, which every server that is alive answers at once. Where
//!    another has come to its place it cannot be asked, and is given up ([`ClientError::Replaced`]).
//! 3. What went wrong with a connection ends it: also that somebody would wait no longer ([`Interrupt`]), as
//!    the answer is still to come then. Where it comes soon after all there is no harm done.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::ClientError;
use super::connect::{Health, Identity, Reached, health};
use crate::socket::{self, Signals, Spin};
use crate::wire::*;

type Result<T> = std::result::Result<T, ClientError>;

/// The longest answer that is read: a list of more than a million allocations.
const MAX_ANSWER_BYTES: u64 = 256 << 20;

/// How long an answer may take still that somebody would not wait for: more than it takes but where it waits for
/// something else. It is better had, as the connection goes with it.
const GRACE: Duration = Duration::from_millis(500);

/// Whether an answer waits for something else than the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waits {
    /// It does not.
    Not,
    /// So long at most, by what the server was told.
    For(Duration),
    /// As long as it takes.
    ForEver,
}

/// Who is asked whether a wait for an answer ends: where a signal has come to the thread that waits, and ten
/// times a second. For programs whose handlers note signals for later, as an interpreter's do, with
/// what runs them then. An answer that comes within half a second is taken all the same, and nobody is asked again
/// before [`set_interrupt`](super::Session::set_interrupt).
#[derive(Clone)]
pub struct Interrupt(Arc<dyn Fn() -> bool + Send + Sync>);

impl Interrupt {
    /// By a function that says whether. It does not use what waits.
    pub fn new(ends: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self(Arc::new(ends))
    }

    /// What signals do then.
    pub(super) fn signals(&self) -> Signals<'_> {
        Signals::Ask(&*self.0)
    }
}

impl std::fmt::Debug for Interrupt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Interrupt")
    }
}

/// A connection to a server.
#[derive(Debug)]
pub(super) struct Channel {
    socket: OwnedFd,
    frames: FrameReader,
    out: Vec<u8>,
    /// Descriptors that have come and belong to no answer yet.
    files: Vec<OwnedFd>,
    spin: Spin,
    spin_time: Duration,
    /// Where the server is, to ask whether it is alive.
    path: Box<Path>,
    /// Which server it is, if that is known.
    server: Option<Identity>,
    /// How long an answer may take that waits for nothing else.
    answer_time: Option<Duration>,
    /// Whether something went wrong with the connection: what is received then need not begin with an
    /// answer.
    broken: bool,
    /// Whether that is because somebody has ended a wait.
    interrupted: bool,
    /// Who says whether a signal ends a wait for an answer; nobody where none does.
    interrupt: Option<Interrupt>,
    /// Whether somebody has said so: answers that come soon are taken.
    hurries: bool,
    /// Whose connection it is: a child of the process has the same socket, and would take its parent's answers.
    process: u32,
}

impl Channel {
    /// Looks for answers without sleeping for so long, and gives a server up that takes longer than
    /// `answer_time`.
    pub(super) fn new(
        (socket, server): Reached,
        path: Box<Path>,
        spin: Duration,
        answer_time: Option<Duration>,
    ) -> Self {
        let frames = FrameReader::new(MAX_ANSWER_BYTES);
        let (out, files) = (Vec::new(), Vec::new());
        let (spin, spin_time) = (Spin::default(), spin);
        let (broken, interrupted, interrupt) = (false, false, None);
        let process = std::process::id();
        Self {
            socket,
            frames,
            out,
            files,
            spin,
            spin_time,
            path,
            server,
            answer_time,
            broken,
            interrupted,
            interrupt,
            hurries: false,
            process,
        }
    }

    /// Has waits for answers end where somebody says so.
    pub(super) fn set_interrupt(&mut self, interrupt: Option<Interrupt>) {
        (self.interrupt, self.hurries) = (interrupt, false);
    }

    /// Whether something went wrong with it, so that all that it is asked for since fails.
    pub(super) fn is_broken(&self) -> bool {
        self.broken
    }

    /// Whether it is broken as somebody has ended a wait.
    pub(super) fn is_interrupted(&self) -> bool {
        self.interrupted
    }

    /// Sends a request and waits for the answer, with so many descriptors beside it unless it is an
    /// error.
    pub(super) fn call(
        &mut self,
        request: &impl Encode,
        descriptors: usize,
        waits: Waits,
    ) -> Result<(Message, Vec<OwnedFd>)> {
        self.call_by(request, descriptors, waits, None)
    }

    /// `signals` instead of what the connection has for all requests.
    fn call_by(
        &mut self,
        request: &impl Encode,
        descriptors: usize,
        waits: Waits,
        signals: Option<Signals<'_>>,
    ) -> Result<(Message, Vec<OwnedFd>)> {
        // Of one that has failed before, what comes is for nobody.
        let is_over = self.broken;
        match self.send_by(request, signals) {
            Err(ClientError::Disconnected) if !is_over => return self.last_words(),
            sent => sent?,
        }
        let answer = self.unless_broken(|channel| channel.receive(descriptors, waits, signals))?;
        match self.files.len() {
            0 => Ok(answer),
            more => {
                self.broken = true;
                let (expected, found) = (descriptors, descriptors + more);
                Err(ClientError::Descriptors { expected, found })
            }
        }
    }

    /// The same with the first request, and what signals do to that one's wait.
    pub(super) fn begin(
        &mut self,
        request: &impl Encode,
        waits: Waits,
        signals: Signals<'_>,
    ) -> Result<Message> {
        Ok(self.call_by(request, 0, waits, Some(signals))?.0)
    }

    /// Sends a request. Several may be under way: answers come in the order of the requests.
    pub(super) fn send(&mut self, request: &impl Encode) -> Result<()> {
        self.send_by(request, None)
    }

    fn send_by(&mut self, request: &impl Encode, signals: Option<Signals<'_>>) -> Result<()> {
        self.unless_broken(|channel| {
            channel.out.clear();
            encode_frame(request, &mut channel.out);
            let deadline = channel.answer_time.and_then(after);
            let signals = signals.unwrap_or_else(|| by(channel.interrupt.as_ref()));
            match socket::send_until(channel.socket.as_fd(), &channel.out, deadline, signals) {
                Err(Errno::TIMEDOUT) => Err(channel.silent()),
                Err(Errno::INTR) => Err(ClientError::Interrupted),
                sent => Ok(sent?),
            }
        })
    }

    /// Waits for the next answer.
    pub(super) fn answer(
        &mut self,
        descriptors: usize,
        waits: Waits,
    ) -> Result<(Message, Vec<OwnedFd>)> {
        self.unless_broken(|channel| channel.receive(descriptors, waits, None))
    }

    /// Does something with the connection that is not done again once it has failed.
    fn unless_broken<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if std::process::id() != self.process {
            return Err(ClientError::Forked);
        }
        if self.broken {
            return Err(ClientError::Disconnected);
        }
        work(self).inspect_err(|error| {
            self.broken = true;
            self.interrupted = matches!(error, ClientError::Interrupted);
        })
    }

    /// What a server said before it closed, which it may do while it is still being sent something: why.
    fn last_words(&mut self) -> Result<(Message, Vec<OwnedFd>)> {
        match self.receive(0, Waits::Not, None) {
            Ok(said @ (Message::ErrorResponse(_), _)) => Ok(said),
            _ => Err(ClientError::Disconnected),
        }
    }

    fn receive(
        &mut self,
        descriptors: usize,
        waits: Waits,
        signals: Option<Signals<'_>>,
    ) -> Result<(Message, Vec<OwnedFd>)> {
        let started = Instant::now();
        let last = self.answer_time.and_then(|time| match waits {
            Waits::Not => started.checked_add(time),
            Waits::For(most) => started.checked_add(most)?.checked_add(time),
            Waits::ForEver => None,
        });
        // With a first answer nothing is lost.
        let (gives_grace, asked) = (signals.is_none(), by(self.interrupt.as_ref()));
        let signals = signals.unwrap_or(asked);
        let mut grace = self.hurries.then(|| started + GRACE);
        // When to ask whether the server is alive, or to give it up.
        let mut next = self.answer_time.and_then(after);
        let message = loop {
            if let Some(bytes) = self.frames.next_frame()? {
                break Message::decode(bytes)?;
            }
            let due = next.map(|next| last.map_or(next, |last| next.min(last)));
            let (deadline, signals) = match grace {
                Some(grace) => (Some(due.map_or(grace, |due| due.min(grace))), Signals::Ignored),
                None => (due, signals),
            };
            let space = self.frames.space();
            let (spin, given) = (&mut self.spin, self.spin_time);
            match socket::receive(
                self.socket.as_fd(),
                space,
                &mut self.files,
                spin,
                given,
                deadline,
                signals,
            ) {
                Ok(0) => return Err(ClientError::Disconnected),
                Ok(bytes) => self.frames.arrived(bytes),
                Err(Errno::TIMEDOUT) if grace.is_some() => return Err(ClientError::Interrupted),
                Err(Errno::TIMEDOUT) => {
                    let over = last.is_some_and(|last| last <= Instant::now());
                    let Some(time) = self.answer_time.filter(|_| !over) else {
                        return Err(self.silent());
                    };
                    match health(&self.path, self.server, time, signals) {
                        Health::Alive => next = after(time),
                        Health::Silent => return Err(self.silent()),
                        Health::Replaced => return Err(ClientError::Replaced { time }),
                        Health::Interrupted => return Err(ClientError::Interrupted),
                    }
                }
                // Told only of a wait that a signal is to end.
                Err(Errno::INTR) if gives_grace => {
                    self.hurries = true;
                    grace = Some(Instant::now() + GRACE);
                }
                Err(Errno::INTR) => return Err(ClientError::Interrupted),
                Err(error) => return Err(error.into()),
            }
        };
        let expected = match &message {
            Message::ErrorResponse(_) => 0,
            _ => descriptors,
        };
        // They come with a frame's first byte, in order; those behind are the next answer's.
        match self.files.len() {
            found if found < expected => Err(ClientError::Descriptors { expected, found }),
            _ => Ok((message, self.files.drain(..expected).collect())),
        }
    }

    fn silent(&self) -> ClientError {
        ClientError::Silent { time: self.answer_time.unwrap_or_default() }
    }
}

/// What signals do where somebody is asked, or nobody.
fn by(interrupt: Option<&Interrupt>) -> Signals<'_> {
    interrupt.map_or(Signals::Ignored, Interrupt::signals)
}

/// The moment after a time; none for a time that no clock reaches.
fn after(time: Duration) -> Option<Instant> {
    Instant::now().checked_add(time)
}

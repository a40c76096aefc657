//! The names of the lock's states, and what is told of it.

use super::Lock;

/// What the lock is in, derived from who is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// No layout.
    Empty,
    /// There is a writer.
    Rw,
    /// A sealed layout, whose contents are nobody's promise.
    LayoutCommitted,
    /// A published layout.
    Committed,
    /// A published layout with readers.
    Ro,
}

impl State {
    /// The name that the protocol has for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Empty => "EMPTY",
            Self::Rw => "RW",
            Self::LayoutCommitted => "LAYOUT_COMMITTED",
            Self::Committed => "COMMITTED",
            Self::Ro => "RO",
        }
    }
}

/// The lock at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// What it is in.
    pub state: State,
    /// Whether there is a writer.
    pub has_writer: bool,
    /// How many readers there are.
    pub readers: usize,
    /// How many sessions wait for the writer's place and nothing else.
    pub waiting_writers: usize,
    /// How many sessions wait, for whatever.
    pub waiting: usize,
    /// Whether a layout is published.
    pub committed: bool,
    /// Whether a layout's shape outlives its writer.
    pub layout_committed: bool,
}

impl Snapshot {
    /// Whether a layout is published and nobody is replacing it.
    pub fn is_ready(&self) -> bool {
        self.committed && !self.has_writer
    }
}

impl Lock {
    /// What the lock is in. Who has not entered yet does not count.
    pub fn state(&self) -> State {
        if self.writer.is_some_and(|writer| writer.entered) {
            State::Rw
        } else if self.readers.values().any(|entered| *entered) {
            State::Ro
        } else if self.committed {
            State::Committed
        } else if self.sealed {
            State::LayoutCommitted
        } else {
            State::Empty
        }
    }

    /// Everything that is told of it.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot {
            state: self.state(),
            has_writer: self.writer.is_some_and(|writer| writer.entered),
            readers: self.readers.values().filter(|entered| **entered).count(),
            waiting_writers: self.waiting_writers(),
            waiting: self.waiting.len(),
            committed: self.committed,
            layout_committed: self.committed || self.sealed,
        }
    }
}

//! Who may write and who may read: the state of the lock, which is nothing but who is connected and
//! what the last writer left behind.
//!
//! ```text
//!            writer        commit            reader
//!   EMPTY ──────────► RW ─────────► COMMITTED ────► RO
//!     ▲                │  ◄──────────┘    ▲          │ last one leaves
//!     └── not sealed ──┤   next writer    └──────────┘
//!                      └── sealed ──► LAYOUT_COMMITTED ──► RW
//! ```
//!
//! 1. There is one writer at most, and no reader beside it.
//! 2. Readers come in only where a layout is published and no writer waits.
//! 3. Of those who wait for the same, the first is served first.
//! 4. A lock is granted in two steps: it is reserved, and its session [enters](Lock::enter) once it is
//!    known to be there still. What a writer replaces is lost only then.
//!
//! Pure: no time and no sockets. Sessions that time out or die are [taken out](Lock::leave) by whoever
//! watches them.

#![forbid(unsafe_code)]

#[cfg(test)]
mod model;
mod state;

use std::collections::{BTreeMap, VecDeque};

pub use state::{Snapshot, State};

/// A session, by its number.
pub type SessionId = u64;

/// A lock that can be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Requested {
    /// To write a new layout; the one before is lost.
    Rw,
    /// To read the published layout.
    Ro,
    /// To read the published layout or, where there is none, to write one.
    RwOrRo,
    /// To write into the sealed layout or, where there is none, to write a new one.
    RwDataOrRw,
}

/// A lock that was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Granted {
    /// To write a new layout.
    Rw,
    /// To read the published one.
    Ro,
    /// To write contents, alone, without changing the layout.
    RwData,
}

impl Requested {
    /// Whether nothing but the writer's place will do. Such sessions keep readers out as they wait.
    fn waits_to_write(self) -> bool {
        matches!(self, Self::Rw | Self::RwDataOrRw)
    }
}

/// What a session that entered found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entered {
    /// The lock that it has.
    pub granted: Granted,
    /// Whether it replaces a published layout.
    pub replaces_committed: bool,
    /// Whether a layout is published.
    pub committed: bool,
}

/// What a session that left leaves behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// It had no lock.
    Nothing,
    /// It was a reader.
    Reader,
    /// It was a writer that published nothing and sealed nothing: its layout is void.
    WriterAborted,
    /// It was a writer of a sealed layout, which stays.
    WriterOfSealed,
}

/// The lock of one layout.
#[derive(Clone, Debug, Default)]
pub struct Lock {
    writer: Option<Writer>,
    /// Readers, and whether they have entered.
    readers: BTreeMap<SessionId, bool>,
    waiting: VecDeque<(SessionId, Requested)>,
    committed: bool,
    sealed: bool,
    /// Sessions whose lock was reserved since this was taken.
    newly_granted: Vec<SessionId>,
}

#[derive(Clone, Copy, Debug)]
struct Writer {
    session: SessionId,
    granted: Granted,
    entered: bool,
}

impl Lock {
    /// Nothing is published, nobody is there.
    pub fn new() -> Self {
        Self::default()
    }

    /// A session asks for a lock, once. [`granted`](Self::granted) says whether it is reserved at once.
    pub fn request(&mut self, session: SessionId, requested: Requested) {
        self.waiting.push_back((session, requested));
        self.settle();
    }

    /// The lock that is reserved for a session, or that it has.
    pub fn granted(&self, session: SessionId) -> Option<Granted> {
        match self.writer {
            Some(writer) if writer.session == session => Some(writer.granted),
            _ => self.readers.contains_key(&session).then_some(Granted::Ro),
        }
    }

    /// A session takes the lock that is reserved for it; `None` if none is, or it has it already.
    pub fn enter(&mut self, session: SessionId) -> Option<Entered> {
        if let Some(entered) = self.readers.get_mut(&session) {
            let first = !std::mem::replace(entered, true);
            let (granted, committed) = (Granted::Ro, self.committed);
            return first.then_some(Entered { granted, replaces_committed: false, committed });
        }
        let writer = self.writer.as_mut().filter(|writer| writer.session == session)?;
        if std::mem::replace(&mut writer.entered, true) {
            return None;
        }
        let replaces_committed = std::mem::take(&mut self.committed);
        if writer.granted == Granted::Rw {
            self.sealed = false;
        }
        Some(Entered { granted: writer.granted, replaces_committed, committed: false })
    }

    /// A session is gone, whatever it had or waited for.
    pub fn leave(&mut self, session: SessionId) -> Left {
        let left = match self.writer {
            Some(writer) if writer.session == session => {
                self.writer = None;
                match (writer.entered, self.sealed) {
                    (false, _) => Left::Nothing,
                    (true, false) => Left::WriterAborted,
                    (true, true) => Left::WriterOfSealed,
                }
            }
            _ => {
                self.waiting.retain(|(waiting, _)| *waiting != session);
                match self.readers.remove(&session) {
                    Some(true) => Left::Reader,
                    _ => Left::Nothing,
                }
            }
        };
        self.settle();
        left
    }

    /// The writer publishes its layout and has the lock no more; false if that is not a writer of
    /// layouts, as who has sealed one is not any more.
    #[must_use]
    pub fn commit(&mut self, session: SessionId) -> bool {
        let writes = |writer: &Writer| {
            writer.session == session && writer.entered && writer.granted == Granted::Rw
        };
        if !self.writer.as_ref().is_some_and(writes) {
            return false;
        }
        self.writer = None;
        self.committed = true;
        self.settle();
        true
    }

    /// The writer seals its layout and may write only contents from now on; false if that is not a
    /// writer of layouts.
    #[must_use]
    pub fn seal(&mut self, session: SessionId) -> bool {
        match &mut self.writer {
            Some(writer) if writer.session == session && writer.entered => {
                let first = writer.granted == Granted::Rw;
                writer.granted = Granted::RwData;
                self.sealed = true;
                first
            }
            _ => false,
        }
    }

    /// Sessions whose lock was reserved since this was last called: those that wait are to be told.
    pub fn take_newly_granted(&mut self) -> Vec<SessionId> {
        std::mem::take(&mut self.newly_granted)
    }

    fn waiting_writers(&self) -> usize {
        self.waiting.iter().filter(|(_, requested)| requested.waits_to_write()).count()
    }

    /// What would be granted now, with so many writers waiting.
    fn grant(&self, requested: Requested, waiting_writers: usize) -> Option<Granted> {
        if self.writer.is_some() {
            return None;
        }
        let alone = self.readers.is_empty();
        let readable = self.committed && waiting_writers == 0;
        match requested {
            Requested::Rw => alone.then_some(Granted::Rw),
            Requested::RwDataOrRw => alone.then_some(match self.state() {
                State::LayoutCommitted => Granted::RwData,
                _ => Granted::Rw,
            }),
            Requested::Ro => readable.then_some(Granted::Ro),
            Requested::RwOrRo if self.committed => readable.then_some(Granted::Ro),
            Requested::RwOrRo => alone.then_some(Granted::Rw),
        }
    }

    /// Reserves locks until nobody who waits can have one.
    fn settle(&mut self) {
        // A grant never makes another possible that was refused before it in the same pass, but for
        // readers behind the last waiting writer: these are looked at again.
        loop {
            let writers = self.waiting_writers();
            let next = self.waiting.iter().enumerate().find_map(|(index, (session, requested))| {
                Some((index, *session, self.grant(*requested, writers)?))
            });
            let Some((index, session, granted)) = next else { return };
            self.waiting.remove(index);
            match granted {
                Granted::Ro => {
                    self.readers.insert(session, false);
                }
                Granted::Rw | Granted::RwData => {
                    self.writer = Some(Writer { session, granted, entered: false });
                }
            }
            self.newly_granted.push(session);
        }
    }
}

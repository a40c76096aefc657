//! Which thread is calling, and whether another one has ended.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// A thread's number: its own for the life of the process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Token(u64);

/// Not asked for yet.
const UNKNOWN: u64 = 0;
/// What every thread answers while its last destructors run: it owns nothing any more.
const ENDED: u64 = u64::MAX;

thread_local! {
    /// Without a destructor, so that reading it is one load.
    static TOKEN: Cell<u64> = const { Cell::new(UNKNOWN) };
    static LIFE: Living = Living(Arc::new(()));
}

struct Living(Arc<()>);

impl Drop for Living {
    fn drop(&mut self) {
        TOKEN.with(|token| token.set(ENDED));
    }
}

impl Token {
    /// The calling thread's; `None` when it is ending.
    #[inline(always)]
    pub(crate) fn current() -> Option<Self> {
        match TOKEN.with(Cell::get) {
            UNKNOWN => Self::first(),
            ENDED => None,
            token => Some(Self(token)),
        }
    }

    /// The calling thread's number where it has one; else what no thread's is.
    #[inline(always)]
    pub(crate) fn number_at_once() -> u64 {
        TOKEN.with(Cell::get)
    }

    #[cold]
    fn first() -> Option<Self> {
        /// Counts threads: nothing but their names depends on it.
        static THREADS: AtomicU64 = AtomicU64::new(1);
        // Makes the destructor run at the thread's end; where it has run already, that is now.
        if LIFE.try_with(|_| ()).is_err() {
            TOKEN.with(|token| token.set(ENDED));
            return None;
        }
        let token = THREADS.fetch_add(1, Ordering::Relaxed);
        TOKEN.with(|of_thread| of_thread.set(token));
        Some(Self(token))
    }

    /// Never 0.
    #[inline(always)]
    pub(crate) fn number(self) -> u64 {
        self.0
    }

    /// Spreads threads over so many places; neighbours in age never meet.
    #[inline(always)]
    pub(crate) fn place(self, places: usize) -> usize {
        self.0 as usize % places
    }
}

/// Whether a thread has ended, from outside.
#[derive(Clone, Debug, Default)]
pub(crate) struct Life(Weak<()>);

impl Life {
    /// The calling thread's.
    pub(crate) fn current() -> Self {
        Self(LIFE.try_with(|life| Arc::downgrade(&life.0)).unwrap_or_default())
    }

    /// Once true, the thread owns nothing and will not own anything. It orders nothing: whoever
    /// takes over what the thread had revokes that first.
    pub(crate) fn has_ended(&self) -> bool {
        self.0.strong_count() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_keeps_its_token_and_its_end_is_seen() {
        let mine = Token::current();
        assert!(mine.is_some() && mine == Token::current());
        let theirs = std::thread::spawn(|| (Token::current(), Life::current())).join();
        let Ok((theirs, life)) = theirs else { panic!("the thread panicked") };
        assert!(theirs.is_some() && theirs != mine);
        assert!(life.has_ended() && !Life::current().has_ended());
    }

    #[test]
    fn an_ending_thread_owns_nothing() {
        struct Late(std::sync::mpsc::Sender<Option<Token>>);
        impl Drop for Late {
            fn drop(&mut self) {
                let _ = self.0.send(Token::current());
            }
        }
        thread_local!(static LATE: Cell<Option<Late>> = const { Cell::new(None) });
        let (sender, receiver) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            // Destructors run in any order: whichever runs last may find the token gone.
            LATE.set(Some(Late(sender)));
            Token::current()
        });
        let Ok(during) = thread.join() else { panic!("the thread panicked") };
        let late = receiver.recv();
        assert!(late.is_ok_and(|late| late.is_none() || late == during));
    }
}

//! Vector clocks over streams.

use super::StreamKey;

/// How much of every stream's work is known to come before a point: a vector clock that
/// stores only the streams it has heard of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Clock {
    /// Ascending by stream; no entry is 0.
    ticks: Vec<(StreamKey, u64)>,
}

impl Clock {
    /// The clock of a point that comes after nothing.
    pub const fn new() -> Self {
        Self { ticks: Vec::new() }
    }

    /// The last tick of `stream` that comes before this point, 0 if none does.
    pub fn get(&self, stream: StreamKey) -> u64 {
        self.find(stream).map_or(0, |at| self.ticks[at].1)
    }

    /// Begins the next piece of work on `stream`, whose own clock this must be, and returns
    /// its tick. Call it before each piece of work, so that an event recorded between two
    /// pieces covers the one and not the other.
    pub fn tick(&mut self, stream: StreamKey) -> u64 {
        match self.find(stream) {
            Ok(at) => {
                self.ticks[at].1 += 1;
                self.ticks[at].1
            }
            Err(at) => {
                self.ticks.insert(at, (stream, 1));
                1
            }
        }
    }

    /// Comes after everything that `other` comes after, too: what waiting does.
    pub fn join(&mut self, other: &Self) {
        if other.ticks.is_empty() {
            return;
        }
        let mut joined = Vec::with_capacity(self.ticks.len().max(other.ticks.len()));
        let (mut mine, mut theirs) =
            (self.ticks.iter().copied().peekable(), other.ticks.iter().copied().peekable());
        loop {
            let next = match (mine.peek(), theirs.peek()) {
                (Some(&a), Some(&b)) if a.0 == b.0 => {
                    theirs.next();
                    mine.next();
                    (a.0, a.1.max(b.1))
                }
                (Some(&a), Some(&b)) if a.0 < b.0 => {
                    mine.next();
                    a
                }
                (Some(&a), None) => {
                    mine.next();
                    a
                }
                (_, Some(&b)) => {
                    theirs.next();
                    b
                }
                (None, None) => break,
            };
            joined.push(next);
        }
        self.ticks = joined;
    }

    /// Whether everything that `other` comes after is before this point as well.
    pub fn covers(&self, other: &Self) -> bool {
        other.ticks.iter().all(|&(stream, tick)| self.get(stream) >= tick)
    }

    fn find(&self, stream: StreamKey) -> Result<usize, usize> {
        self.ticks.binary_search_by_key(&stream, |entry| entry.0)
    }
}

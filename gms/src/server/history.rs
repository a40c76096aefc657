//! What has happened, as far back as is told.

use std::collections::VecDeque;

use crate::wire::RuntimeEvent;

/// How many events are kept.
const MOST: usize = 256;

/// Something that happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// A writer entered.
    WriterConnected,
    /// A layout was published.
    Committed,
    /// A layout of so many allocations was sealed.
    LayoutCommitted(usize),
    /// A writer left without either.
    WriterAborted,
    /// A writer left a sealed layout of so many allocations.
    WriterDisconnected(usize),
    /// So many allocations were thrown away.
    Cleared(usize),
    /// Memory ran out with so many allocations made.
    OutOfMemory(usize),
}

impl Event {
    fn told(self) -> RuntimeEvent {
        let (kind, allocations) = match self {
            Self::WriterConnected => ("rw_connected", 0),
            Self::Committed => ("committed", 0),
            Self::LayoutCommitted(allocations) => ("layout_committed", allocations),
            Self::WriterAborted => ("rw_aborted", 0),
            Self::WriterDisconnected(allocations) => ("rw_disconnected", allocations),
            Self::Cleared(allocations) => ("allocations_cleared", allocations),
            Self::OutOfMemory(allocations) => ("allocation_oom", allocations),
        };
        RuntimeEvent { kind: kind.to_owned(), allocation_count: allocations as i64 }
    }
}

/// The last events, oldest first.
#[derive(Debug, Default)]
pub(super) struct History(VecDeque<Event>);

impl History {
    pub(super) fn add(&mut self, event: Event) {
        if self.0.len() == MOST {
            self.0.pop_front();
        }
        self.0.push_back(event);
    }

    pub(super) fn told(&self) -> Vec<RuntimeEvent> {
        self.0.iter().map(|event| event.told()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_events_go_first() {
        let mut history = History::default();
        (0..300).for_each(|n| history.add(Event::Cleared(n)));
        let told = history.told();
        assert_eq!(
            (told.len(), told[0].allocation_count, told[255].allocation_count),
            (256, 44, 299)
        );
    }
}

//! Streams whose end nobody tells, by their raw handles.

#![forbid(unsafe_code)]

use std::collections::HashMap;

use crate::device::StreamHandle;

/// Handles are looked through for those of streams that are not known any more when they have doubled, from here on.
const FEW: usize = 64;

/// Which stream had a raw handle last, by the driver's number.
#[derive(Debug)]
pub(crate) struct RawHandles {
    by_raw: HashMap<usize, u64>,
    sweep_at: usize,
}

impl Default for RawHandles {
    fn default() -> Self {
        Self { by_raw: HashMap::new(), sweep_at: FEW }
    }
}

impl RawHandles {
    /// A stream has come by a handle, for the first time as far as is known. Two live ones have none in common, so that
    /// the one that had it before has ended: its number, if that is another and known still.
    ///
    /// The default stream of each thread has the same handle.
    pub(crate) fn came_by(
        &mut self,
        handle: StreamHandle,
        stream: u64,
        is_known: impl Fn(u64) -> bool,
    ) -> Option<u64> {
        if handle == StreamHandle::PER_THREAD {
            return None;
        }
        if self.by_raw.len() >= self.sweep_at {
            self.by_raw.retain(|_, known| is_known(*known));
            self.sweep_at = (2 * self.by_raw.len()).max(FEW);
        }
        let former = self.by_raw.insert(handle.raw().addr(), stream)?;
        (former != stream && is_known(former)).then_some(former)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handle(raw: usize) -> StreamHandle {
        StreamHandle::foreign(std::ptr::without_provenance_mut(raw))
    }

    #[test]
    fn the_one_that_had_a_handle_before_has_ended() {
        let mut handles = RawHandles::default();
        let all = |_: u64| true;
        assert_eq!(handles.came_by(handle(0x100), 7, all), None);
        assert_eq!(handles.came_by(handle(0x200), 8, all), None);
        assert_eq!(handles.came_by(handle(0x100), 7, all), None, "it had lost its place");
        assert_eq!(handles.came_by(handle(0x100), 9, all), Some(7));
        assert_eq!(handles.came_by(handle(0x100), 10, |stream| stream != 9), None, "gone already");
        for thread in 20..30 {
            assert_eq!(handles.came_by(StreamHandle::PER_THREAD, thread, all), None);
        }
    }

    #[test]
    fn of_streams_that_are_not_known_no_handles_are_kept() {
        let mut handles = RawHandles::default();
        for stream in 0..1000 {
            let is_known = |known| known + 10 > stream;
            assert_eq!(
                handles.came_by(handle(0x100 + 0x100 * stream as usize), stream, is_known),
                None
            );
            assert!(handles.by_raw.len() <= 2 * FEW);
        }
    }
}

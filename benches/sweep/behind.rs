//! A GPU that is behind the host.

use std::collections::VecDeque;

use cuda_sim::{Simulator, SpinHandle};
use vpmm::Stream;

use crate::Failure;

/// Calls between two marks of how far the GPU has come.
const APART: u64 = 8;

/// What the GPU has not come to: after so many further calls of the host it does.
pub(crate) struct Behind<'a> {
    simulator: &'a Simulator,
    /// The stream that has the work; all others have none.
    stream: &'a Stream,
    distance: u64,
    calls: u64,
    /// Work that has not ended, with the call that it ends at.
    ahead: VecDeque<(u64, SpinHandle)>,
}

impl<'a> Behind<'a> {
    pub(crate) fn new(simulator: &'a Simulator, stream: &'a Stream, distance: u64) -> Self {
        Self { simulator, stream, distance, calls: 0, ahead: VecDeque::new() }
    }

    /// The host has made a call; on the stream it was, if it was, behind some work.
    pub(crate) fn step(&mut self, on_stream: bool) -> Result<(), Failure> {
        self.calls += 1;
        if !self.calls.is_multiple_of(APART) {
            return Ok(());
        }
        if on_stream {
            let work = self.simulator.spin(self.stream.handle().raw());
            let work = work.map_err(|code| format!("the simulator: {code:?}"))?;
            self.ahead.push_back((self.calls + self.distance, work));
        }
        while self.ahead.front().is_some_and(|(end, _)| *end <= self.calls) {
            self.ahead.pop_front().into_iter().for_each(|(_, work)| work.release());
        }
        self.simulator.run_until_idle();
        Ok(())
    }
}

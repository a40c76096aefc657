//! Streams to take turns with.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::Stream;
use crate::device::Device;
use crate::error::{Error, Result};

/// A fixed set of streams, handed out in turn: for work that is to run side by side without a stream
/// made for each piece. RMM has `cuda_stream_pool`.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let sim = cuda_sim::Simulator::builder().build()?;
/// # let driver = vpmm::Driver::new(sim.driver())?;
/// # let device = driver.device(0)?;
/// let streams = vpmm::StreamPool::new(&device, 2)?;
/// let [first, second, third] = [(); 3].map(|()| streams.next().handle());
/// assert!(first != second && first == third);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct StreamPool {
    streams: Box<[Stream]>,
    next: AtomicUsize,
}

impl StreamPool {
    /// Makes so many streams.
    ///
    /// # Errors
    /// [`Error::Config`] for none; [`Error::Driver`], [`Error::ContextLost`].
    pub fn new(device: &Device, streams: usize) -> Result<Self> {
        if streams == 0 {
            return Err(Error::Config {
                name: "streams",
                value: "0".to_owned(),
                reason: "a pool of streams has at least one".to_owned(),
            });
        }
        let streams = (0..streams).map(|_| device.stream()).collect::<Result<_>>()?;
        Ok(Self { streams, next: AtomicUsize::new(0) })
    }

    /// The stream whose turn it is. Threads may call it at a time.
    #[allow(clippy::should_implement_trait, reason = "it has no end, and takes no `&mut`")]
    pub fn next(&self) -> &Stream {
        let turn = self.next.fetch_add(1, Ordering::Relaxed);
        self.get(turn)
    }

    /// The stream with a number, counted round: always the same one.
    pub fn get(&self, number: usize) -> &Stream {
        &self.streams[number % self.streams.len()]
    }

    /// How many there are.
    #[allow(clippy::len_without_is_empty, reason = "there is at least one")]
    pub fn len(&self) -> usize {
        self.streams.len()
    }

    /// All of them.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Stream> {
        self.streams.iter()
    }
}

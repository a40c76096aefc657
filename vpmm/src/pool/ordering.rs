//! The order between streams, as far as callers tell it.

use super::Pool;
use crate::device::StreamHandle;
use crate::error::{Error, Result};
use crate::ordering::Mark;
use crate::units::DevicePtr;

impl Pool {
    /// Notes that work on `stream`, too, uses an allocation of another stream. When it is
    /// [freed](Self::free) its memory is kept until everything enqueued on `stream` up to then has
    /// finished; no stream is made to wait for that. Noting a stream twice, or the one that the
    /// allocation is freed on, changes nothing.
    ///
    /// A handle that was not made by this library must stay alive until the allocation is freed:
    /// the event is recorded then. One of the library's own may end before.
    ///
    /// No driver call but for such handles (which stream it is), for a stream that the pool has not met
    /// before (whether it is one of its device), and for two streams at most that the
    /// allocation was noted for and that have ended since (whether their work is over: then nothing
    /// of them is kept). What PyTorch's allocators call `record_stream`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let sim = cuda_sim::Simulator::builder().build()?;
    /// # let driver = vpmm::Driver::new(sim.driver())?;
    /// # let device = driver.device(0)?;
    /// let pool = vpmm::Pool::new(&device, &vpmm::PoolConfig::default())?;
    /// let (compute, copies) = (device.stream()?, device.stream()?);
    /// let ptr = pool.malloc(1 << 20, &compute)?;
    /// // … an event orders `copies` after `compute`, and a copy out of `ptr` is enqueued there …
    /// pool.record_stream(ptr, &copies)?;
    /// pool.free(ptr, &compute)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Those of [`free`](Self::free) about pointers and streams. Nothing is noted then.
    pub fn record_stream(&self, ptr: DevicePtr, stream: impl Into<StreamHandle>) -> Result<()> {
        self.check_process()?;
        let address = ptr.address();
        // Freed already, though it waits for a capture's end.
        if self.family.heaps.is_postponed(address) {
            return Err(Error::DoubleFree { address });
        }
        match self.family.heaps.heap_of(address) {
            Some(heap) => heap.record_stream(ptr, stream.into()),
            None => self
                .heap()
                .record_stream(ptr, stream.into())
                .map_err(|error| self.unless_foreign(error, ptr)),
        }
    }

    /// Marks a stream: everything that was freed on it so far. Take the mark *before* recording
    /// the event or beginning the wait that [`follows`](Self::follows) or [`passed`](Self::passed)
    /// tells of: what other threads free on the stream after the mark is not covered by it, what
    /// they freed before it is covered only as far as the pool has it already.
    ///
    /// Host-side, no driver call for a stream of the library's that the pool has met before.
    ///
    /// # Errors
    /// [`Error::WrongDevice`](crate::Error::WrongDevice),
    /// [`Error::WrongContext`](crate::Error::WrongContext),
    /// [`Error::StreamCapturing`](crate::Error::StreamCapturing),
    /// [`Error::StreamEnded`](crate::Error::StreamEnded),
    /// [`Error::ContextLost`](crate::Error::ContextLost), [`Error::Driver`](crate::Error::Driver).
    pub fn mark(&self, stream: impl Into<StreamHandle>) -> Result<Mark> {
        self.check_process()?;
        self.heap().mark(stream.into())
    }

    /// Tells that work enqueued on `stream` from now on comes after everything that the marked
    /// stream was given before the mark: an event recorded there after the mark was taken is one
    /// that `stream` has been made to wait for (`cuStreamWaitEvent`). What was freed there before
    /// the mark may then serve `stream` at once, without a question to the driver, and its own
    /// stream too.
    ///
    /// Host-side, no driver call for a stream of the library's that the pool has met before. It is the
    /// pool's form of `CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES`; without
    /// [`Reuse::follow_event_dependencies`](crate::Reuse::follow_event_dependencies) it does nothing.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let sim = cuda_sim::Simulator::builder().build()?;
    /// # let driver = vpmm::Driver::new(sim.driver())?;
    /// # let device = driver.device(0)?;
    /// let pool = vpmm::Pool::new(&device, &vpmm::PoolConfig::default())?;
    /// let (first, second) = (device.stream()?, device.stream()?);
    /// let ptr = pool.malloc(64 << 20, &first)?;
    /// pool.free(ptr, &first)?;
    ///
    /// let mark = pool.mark(&first)?;
    /// // … cuEventRecord(event, first); cuStreamWaitEvent(second, event, 0) …
    /// pool.follows(&second, &mark)?;
    /// let again = pool.malloc(64 << 20, &second)?;
    /// assert_eq!(again.address(), ptr.address());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`mark`](Self::mark), and [`Error::ForeignMark`](crate::Error::ForeignMark).
    pub fn follows(&self, stream: impl Into<StreamHandle>, mark: &Mark) -> Result<()> {
        self.check_process()?;
        self.heap().follows(stream.into(), mark)
    }

    /// Tells that the host has seen everything complete that the marked stream was given before the
    /// mark, by whatever wait or question. What was freed there before is everybody's then; and
    /// [what is held above the threshold](crate::PoolConfig::release_threshold_bytes) is given back.
    ///
    /// [`Stream::synchronize`](crate::Stream::synchronize) and
    /// [`Device::synchronize`](crate::Device::synchronize) tell every pool by themselves.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let sim = cuda_sim::Simulator::builder().build()?;
    /// # let driver = vpmm::Driver::new(sim.driver())?;
    /// # let device = driver.device(0)?;
    /// let pool = vpmm::Pool::new(&device, &vpmm::PoolConfig::default())?;
    /// let (first, second) = (device.stream()?, device.stream()?);
    /// let ptr = pool.malloc(64 << 20, &first)?;
    /// pool.free(ptr, &first)?;
    ///
    /// let mark = pool.mark(&first)?;
    /// // … cuStreamSynchronize(first), by whatever library …
    /// pool.passed(&mark)?;
    /// let again = pool.malloc(64 << 20, &second)?;
    /// assert_eq!(again.address(), ptr.address());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::ForeignMark`](crate::Error::ForeignMark); those of [`trim_to`](Self::trim_to) where
    /// there is a threshold.
    pub fn passed(&self, mark: &Mark) -> Result<()> {
        self.check_process()?;
        self.heap().passed(mark)
    }
}

//! How much the pool holds, and what of it.

use super::Pool;
use crate::allocation::Allocation;
use crate::error::Result;

impl Pool {
    /// Gives free physical memory back to the device, or the host, until the pool holds no more
    /// than `keep_bytes` or nothing more is free for good; returns how many bytes it gave back.
    ///
    /// Asks about every stream's frees, for a tenth of a millisecond where it has to record the
    /// event first, but waits for none: memory that the GPU may still be using is kept, so are
    /// exported handles. A handle goes back whole: one of which some byte is in use
    /// stays. So it is with the driver's pieces of 32 MiB for small requests of the paged profile.
    /// Requests that have to grow the pool wait meanwhile. `cuMemPoolTrimTo` in the CUDA
    /// driver API's "Stream Ordered Memory Allocator" does the same for a driver's pool.
    ///
    /// Two driver calls for each handle given back. The driver scrubs that memory in the background, and charges the
    /// next growth for it, whosever that is: 0.2 to 0.5 ms for each GiB on an H200, in one call.
    ///
    /// # Errors
    /// [`Error::ContextLost`](crate::Error::ContextLost), [`Error::Driver`](crate::Error::Driver):
    /// what was given back before the failure stays given back.
    pub fn trim_to(&self, keep_bytes: u64) -> Result<u64> {
        self.check_process()?;
        self.family.heaps.trim_to(keep_bytes)
    }

    /// Changes the most physical memory that the pool may hold, with everything beside its main heap;
    /// `None` for what it was made with, which is also the most that can be set. What it holds beyond
    /// that stays until it is free and [trimmed](Self::trim_to); until then the pool does not grow.
    ///
    /// A pool that is made with a limit also keeps closer to it in how it places memory; a limit that
    /// is set later changes nothing in that.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let sim = cuda_sim::Simulator::builder().build()?;
    /// # let driver = vpmm::Driver::new(sim.driver())?;
    /// # let device = driver.device(0)?;
    /// # let stream = device.stream()?;
    /// let pool = vpmm::Pool::new(&device, &vpmm::PoolConfig::default())?;
    /// pool.limit_to(Some(64 << 20))?;
    /// assert!(pool.malloc(100 << 20, &stream).is_err_and(|error| error.is_out_of_memory()));
    /// pool.limit_to(None)?;
    /// let ptr = pool.malloc(100 << 20, &stream)?;
    /// # pool.free(ptr, &stream)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Forked`](crate::Error::Forked).
    pub fn limit_to(&self, bytes: Option<u64>) -> Result<()> {
        self.check_process()?;
        self.family.heaps.limit_to(bytes);
        Ok(())
    }

    /// Sets the peaks in [`Stats`](crate::Stats) to what is in use and held now. One driver call
    /// in the paged profile, for the memory of small requests; none in the default one.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let sim = cuda_sim::Simulator::builder().build()?;
    /// # let driver = vpmm::Driver::new(sim.driver())?;
    /// # let device = driver.device(0)?;
    /// # let stream = device.stream()?;
    /// let pool = vpmm::Pool::new(&device, &vpmm::PoolConfig::default())?;
    /// let ptr = pool.malloc(8 << 20, &stream)?;
    /// pool.free(ptr, &stream)?;
    /// assert_eq!(pool.stats().peak_live_bytes, 8 << 20);
    /// pool.reset_peaks();
    /// assert_eq!(pool.stats().peak_live_bytes, 0);
    /// # Ok(())
    /// # }
    /// ```
    pub fn reset_peaks(&self) {
        if self.check_process().is_ok() {
            self.family.heaps.reset_peaks();
        }
    }

    /// The allocation that an address is in; `None` where it is in none of this pool. Host-side,
    /// no driver call, a look at the table (from inside a long allocation at several places of it).
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let sim = cuda_sim::Simulator::builder().build()?;
    /// # let driver = vpmm::Driver::new(sim.driver())?;
    /// # let device = driver.device(0)?;
    /// # let stream = device.stream()?;
    /// let pool = vpmm::Pool::new(&device, &vpmm::PoolConfig::default())?;
    /// let ptr = pool.malloc(1 << 20, &stream)?;
    /// let found = pool.allocation(ptr.address() + 1000).expect("it is inside");
    /// assert_eq!((found.start.address(), found.bytes), (ptr.address(), 1 << 20));
    /// assert_eq!(found.stream, Some(stream.handle()));
    /// # Ok(())
    /// # }
    /// ```
    pub fn allocation(&self, address: u64) -> Option<Allocation> {
        self.check_process().ok()?;
        match self.family.heaps.heap_of(address) {
            Some(heap) => heap.allocation(address),
            None => self.heap().allocation(address),
        }
    }
}

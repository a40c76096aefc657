//! The pool of a pointer, and the end of a pool.

use std::sync::Arc;

use super::Pool;
use super::registry::Registry;
use crate::capture::synchronize_beside_captures;
use crate::device::StreamHandle;
use crate::driver::Driver;
use crate::error::{Error, Result};
use crate::units::DevicePtr;

impl Pool {
    /// The pool of this driver that an address belongs to: it is in one of the pool's reservations,
    /// allocated or not, or in a small allocation of the paged profile. `None` for memory from
    /// elsewhere. Also finds a pool that nobody has a handle of any more: see
    /// [the end of a pool](Self#the-end-of-a-pool).
    ///
    /// Host-side, no driver call: logarithmic in the number of reservations, for small allocations
    /// (and addresses from elsewhere) a look at every pool.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let sim = cuda_sim::Simulator::builder().build()?;
    /// # let driver = vpmm::Driver::new(sim.driver())?;
    /// # let device = driver.device(0)?;
    /// # let stream = device.stream()?;
    /// # use vpmm::{Pool, PoolConfig};
    /// let pools = [(); 2].map(|()| Pool::new(&device, &PoolConfig::default()).unwrap());
    /// let ptr = pools[1].malloc(1 << 20, &stream)?;
    /// assert_eq!(Pool::of(&driver, ptr.address() + 1000), Some(pools[1].clone()));
    /// assert_eq!(Pool::of(&driver, 0), None);
    /// # pools[1].free(ptr, &stream)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn of(driver: &Driver, address: u64) -> Option<Self> {
        driver.check_process().ok()?;
        Registry::of(driver).find(address)
    }

    /// [Frees](Self::free) an allocation of whichever pool of this driver it is. Where that pool has no
    /// handles and this was its last allocation, the pool ends, which waits on the host for the work
    /// before its frees.
    ///
    /// # Errors
    /// As [`free`](Self::free), with [`Error::ForeignPointer`] for an address of no pool.
    pub fn free_any(
        driver: &Driver,
        ptr: DevicePtr,
        stream: impl Into<StreamHandle>,
    ) -> Result<()> {
        driver.check_process()?;
        let (registry, stream) = (Registry::of(driver), stream.into());
        if let Some(freed) = registry.by_address.free_at_hand(ptr, stream) {
            return freed;
        }
        let pool = registry.find(ptr.address());
        let pool = pool.ok_or(Error::ForeignPointer { address: ptr.address() })?;
        pool.free(ptr, stream)
    }

    /// Of small requests a paged pool knows those that it has: one that another pool has was never freed.
    #[cold]
    pub(super) fn unless_foreign(&self, error: Error, ptr: DevicePtr) -> Error {
        let address = ptr.address();
        let is_anothers = |pool: Self| {
            pool != *self && pool.allocation(address).is_some_and(|found| found.start == ptr)
        };
        match error {
            Error::DoubleFree { .. } if self.registry().find(address).is_some_and(is_anothers) => {
                Error::ForeignPointer { address }
            }
            error => error,
        }
    }

    /// Ends the pool now, and gives everything back, allocations included: their addresses are no
    /// longer to be used. Waits for the work before its frees; for the whole context where something is
    /// allocated, but not beside a capture, which that would end.
    ///
    /// If it is its device's [current](Self::current) or [default](Self::default_of) pool it is that no
    /// longer. An error of the driver's on the way leaves the rest to the driver, which reclaims it with the process.
    /// Where the context has failed or was reset all that the pool mapped goes back all the same, unless another device
    /// [has access](Self::set_access): nothing runs there any more. Where something is allocated, the primary context
    /// that has come after a reset is waited for.
    ///
    /// # Errors
    /// [`Error::PoolShared`] where there are other handles; [`Error::StreamCapturing`] where something is
    /// allocated while a stream of the context captures, which the wait would end. The pool comes back with
    /// it, as it was, and captures of the library's streams, or of blocking ones, go on; of another stream's, which
    /// only the driver knows of, the wait that it has refused is the end.
    pub fn destroy(self) -> Result<(), (Self, Error)> {
        if let Err(error) = self.check_process() {
            return Err((self, error));
        }
        if let Err(error) = self.check_waits() {
            return Err((self, error));
        }
        if let Err(others) = self.registry().end(&self) {
            return Err((self, Error::PoolShared { others }));
        }
        let Self { profile, family, handles } = self;
        drop((profile, handles));
        // Another thread may just be asking the pool about an address that is not its own.
        while Arc::strong_count(&family) > 1 {
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Finds out whether the end can wait for the device, where it has to: without that it would give
    /// nothing back, ever.
    fn check_waits(&self) -> Result<()> {
        // Who would be told of other handles ends no capture for it.
        if self.registry().others(self) > 0 || !self.family.is_in_use() {
            return Ok(());
        }
        match synchronize_beside_captures(self.device()) {
            Err(Error::StreamCapturing) => Err(Error::StreamCapturing),
            // What else is wrong is met by the end itself.
            _ => Ok(()),
        }
    }
}

//! Who may reach the memory, and how it leaves the process.

use super::Pool;
use crate::device::Device;
use crate::error::Result;
use crate::location::Access;
use crate::sharing::Export;
use crate::units::DevicePtr;

impl Pool {
    /// Sets what another device may do with the pool's memory: all that it holds, and all that it
    /// will hold, wherever it is mapped. At first no other device may do anything.
    ///
    /// The work that uses the memory there must be ordered by its caller, as on any stream that is
    /// not the allocation's. A right that is given is there for work enqueued after the call. One is
    /// taken away at once: work of that device that uses the memory, also what was freed already,
    /// must have finished, since the call does not wait for it. Other devices' work goes on.
    ///
    /// One driver call for each run of mapped addresses, some 10 µs for each physical handle in it on
    /// an H200; requests that have to grow the pool wait meanwhile. `cuMemSetAccess`, in the
    /// CUDA driver API's "Virtual Memory Management"; for the small requests of the paged profile
    /// `cuMemPoolSetAccess`, in "Stream Ordered Memory Allocator". Every later growth opens its
    /// memory to all devices in the one call that it makes anyway.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let sim = cuda_sim::Simulator::builder().devices(2).build()?;
    /// # let driver = vpmm::Driver::new(sim.driver())?;
    /// use vpmm::Access;
    ///
    /// let (device, peer) = (driver.device(0)?, driver.device(1)?);
    /// let pool = vpmm::Pool::new(&device, &vpmm::PoolConfig::default())?;
    /// if peer.can_access(&device)? {
    ///     pool.set_access(&peer, Access::ReadWrite)?;
    /// }
    /// assert_eq!(pool.access(&peer), Access::ReadWrite);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// In the paged profile small requests come from a pool of the driver's, which knows no read-only
    /// access: with [`Access::Read`](crate::Access::Read) those can be written, too.
    ///
    /// # Errors
    /// [`Error::PeerUnsupported`] where the device cannot reach the memory, [`Error::OwnerAccess`] for
    /// less than everything to the pool's own device, [`Error::ContextLost`], [`Error::Driver`]. The
    /// device then has the access that it had; where the driver refuses to set that back, too, the next
    /// call does, whichever access it asks for.
    ///
    /// [`Error::PeerUnsupported`]: crate::Error::PeerUnsupported
    /// [`Error::OwnerAccess`]: crate::Error::OwnerAccess
    /// [`Error::ContextLost`]: crate::Error::ContextLost
    /// [`Error::Driver`]: crate::Error::Driver
    pub fn set_access(&self, device: &Device, access: Access) -> Result<()> {
        self.check_process()?;
        self.family.heaps.set_access(device, access)
    }

    /// What a device may do with the pool's memory. No driver call.
    pub fn access(&self, device: &Device) -> Access {
        match self.check_process() {
            Ok(()) => self.heap().access_of(device),
            Err(_) => Access::None,
        }
    }

    /// One allocation, to be sent to another process: see [`Export`]. The pool must have been made with
    /// [`sharing`](crate::PoolConfig::sharing). With it go the physical handles that it lies on, whole; they
    /// never move again (in the paged profile no page of the pool does). Free the allocation only when
    /// the other process has finished with it: its memory is the pool's again from then on.
    ///
    /// Host-side, no driver call; a request that has to grow the pool waits meanwhile. Memory of a
    /// tagged heap is exported by [`Tagged::export`](crate::Tagged::export); a graph's is not.
    ///
    /// # Errors
    /// [`Error::NotShareable`] for a pool without sharing, and for a request of the paged profile that
    /// is smaller than a page; [`Error::ForeignPointer`], [`Error::InteriorPointer`],
    /// [`Error::DoubleFree`], [`Error::StalePointer`].
    ///
    /// [`Error::NotShareable`]: crate::Error::NotShareable
    /// [`Error::ForeignPointer`]: crate::Error::ForeignPointer
    /// [`Error::InteriorPointer`]: crate::Error::InteriorPointer
    /// [`Error::DoubleFree`]: crate::Error::DoubleFree
    /// [`Error::StalePointer`]: crate::Error::StalePointer
    pub fn export(&self, ptr: DevicePtr) -> Result<Export<'_>> {
        self.check_process()?;
        Export::new(self.heap(), Some(ptr.address()))
    }

    /// The whole pool but for tagged heaps and graphs' memory, to be sent to another process, and sent again when it
    /// has grown: see [`Export`]. The other process finds every address of what was sent by
    /// [`Imported::translate`](crate::Imported::translate). No driver call.
    ///
    /// # Errors
    /// [`Error::NotShareable`](crate::Error::NotShareable) for a pool without sharing.
    pub fn export_all(&self) -> Result<Export<'_>> {
        self.check_process()?;
        Export::new(self.heap(), None)
    }
}

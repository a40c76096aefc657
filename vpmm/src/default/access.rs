//! Other devices' access to the pool's memory.

use super::{Core, lock};
use crate::device::Device;
use crate::error::Result;
use crate::location::Access;

impl Core {
    pub(crate) fn access_of(&self, device: &Device) -> Access {
        self.backing.access_of(device)
    }

    pub(crate) fn set_access(&self, device: &Device, access: Access) -> Result<()> {
        if !self.backing.may_set(device, access)? {
            return Ok(());
        }
        let _context = self.device.enter()?;
        // Nothing is mapped or unmapped meanwhile, by requests or by the helper.
        let _growing = lock(&self.growing);
        let runs = self.space.lock().memory.runs();
        // SAFETY: a mapped region is whole extents, and these are all but zombies, which nobody is to
        // use any more.
        unsafe { self.backing.set_access(device, access, &runs) }
    }
}

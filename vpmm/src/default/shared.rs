//! The pool's memory as other processes are to have it.

use super::class::UNIT_BYTES;
use super::{Core, lock};
use crate::backing::Backing;
use crate::device::Device;
use crate::error::Result;
use crate::sharing::{SharedExtent, Source, Span};

impl Source for Core {
    fn backing(&self) -> &Backing {
        &self.backing
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn windows(&self) -> Vec<Span> {
        vec![Span { start: self.base, bytes: u64::from(self.granules) * self.granule_bytes }]
    }

    fn pin_block(&self, address: u64) -> Result<(Vec<SharedExtent>, Span)> {
        // What is moving is in no table at its new address yet.
        let _growing = lock(&self.growing);
        self.check_awake()?;
        let mut space = self.space.lock();
        let block = self
            .unit_of(address)
            .and_then(|start| Some((start, self.tags.get(start).live_units()?)));
        let Some((start, units)) = block else {
            drop(space);
            return Err(self.not_live(address));
        };
        let first = space.memory.granule_of(start);
        let end = space.memory.granule_of(start + units - 1) + 1;
        let extents = space.memory.pin(first, end);
        Ok((extents, Span { start: address, bytes: u64::from(units) * UNIT_BYTES }))
    }

    fn pin_all(&self) -> Vec<SharedExtent> {
        let _growing = lock(&self.growing);
        self.space.lock().memory.pin(0, self.granules)
    }
}

//! The pool's memory as other processes are to have it.
//!
//! Once something has been shared, no page moves any more: free memory is regions of many pages,
//! which are not told apart by whether they were shared.

use super::PagedPool;
use super::space::Space;
use crate::backing::Backing;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::region::State;
use crate::sharing::{SharedExtent, Source, Span};
use crate::units::DevicePtr;

impl PagedPool {
    /// Whether a pointer can be freed, or what it is instead.
    pub(crate) fn check_live(&self, ptr: DevicePtr) -> Result<()> {
        match &self.small {
            Some(small) if small.check_live(ptr)? => Ok(()),
            _ => self.lock_space().check_live(ptr),
        }
    }

    fn check_is_of_pages(&self, address: u64) -> Result<()> {
        match &self.small {
            Some(small) if small.holds(address) => Err(Error::NotShareable {
                reason: "requests smaller than a page are the driver's memory",
            }),
            _ => Ok(()),
        }
    }
}

impl Source for PagedPool {
    fn backing(&self) -> &Backing {
        &self.backing
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn windows(&self) -> Vec<Span> {
        let space = self.lock_space();
        let spans =
            space.chunks.iter().map(|chunk| Span { start: chunk.base(), bytes: chunk.bytes() });
        let mut spans: Vec<Span> = spans.collect();
        spans.sort_unstable_by_key(|span| span.start);
        spans
    }

    fn pin_block(&self, address: u64) -> Result<(Vec<SharedExtent>, Span)> {
        self.check_is_of_pages(address)?;
        let _growing = self.lock_growing();
        let mut space = self.lock_space();
        let region = space.live_at(address)?;
        let block = Span { start: address, bytes: space.map.region(region).bytes() };
        let extents = space.extents_in(block);
        Ok((extents, block))
    }

    fn pin_all(&self) -> Vec<SharedExtent> {
        let _growing = self.lock_growing();
        let mut space = self.lock_space();
        let spans: Vec<Span> = space
            .map
            .iter()
            .filter(|region| !matches!(region.state(), State::Hole | State::Zombie))
            .map(|region| Span { start: region.start(), bytes: region.bytes() })
            .collect();
        spans.into_iter().flat_map(|span| space.extents_in(span)).collect()
    }
}

impl Space {
    /// The pages in a span, which count as shared from now on.
    fn extents_in(&mut self, span: Span) -> Vec<SharedExtent> {
        let Some(chunk) = self.chunks.iter().find(|chunk| chunk.contains(span.start)) else {
            return Vec::new();
        };
        let starts = (span.start..).step_by(self.page as usize);
        let pages = starts.zip(chunk.extents(span.start, span.bytes));
        let extents: Vec<SharedExtent> = pages
            .filter_map(|(start, handle)| {
                Some(SharedExtent { handle: handle?, span: Span { start, bytes: self.page } })
            })
            .collect();
        self.shared.extend(extents.iter().map(|extent| extent.handle));
        extents
    }
}

//! What a resource is able to do.

#![forbid(unsafe_code)]

use super::request::MIN_ALIGN;

/// What a resource is able to do: [`MemoryResource::facts`](super::MemoryResource::facts).
///
/// ```
/// use vpmm::resource::{Checks, Facts};
///
/// let facts = Facts::of_device_memory().with_checks(Checks::PointersAndSizes);
/// assert!(facts.device_accessible && !facts.host_accessible);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Facts {
    /// Work on the device can use the memory.
    pub device_accessible: bool,
    /// The host can use the memory through its address.
    pub host_accessible: bool,
    /// The memory moves between host and device as it is used, so that it can be prefetched.
    pub managed: bool,
    /// Both calls are ordered by their stream and do not wait for the GPU. Where this is `false`
    /// memory that was freed is nobody's, and new memory is everybody's at once, whatever the stream.
    pub stream_ordered: bool,
    /// Uses on further streams can be noted.
    pub records_streams: bool,
    /// Every address is a multiple of this, at least 256 bytes.
    pub min_align: usize,
    /// The greatest alignment that can be asked for, in bytes.
    pub max_align: usize,
    /// The longest request that can ever be served, in bytes, where that is fixed.
    pub max_bytes: Option<usize>,
    /// Which wrong frees are found.
    pub checks: Checks,
}

/// Which wrong frees a resource finds, and refuses with an error.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[non_exhaustive]
pub enum Checks {
    /// None for certain.
    Nothing,
    /// Pointers that are not allocated: freed already, of something else, or inside an allocation.
    Pointers,
    /// These, and a size other than that of the allocation.
    PointersAndSizes,
}

impl Facts {
    /// Memory on a device, freed without regard to streams, aligned to 256 bytes; nothing is checked.
    /// The other makers begin from this.
    pub const fn of_device_memory() -> Self {
        Self {
            device_accessible: true,
            host_accessible: false,
            managed: false,
            stream_ordered: false,
            records_streams: false,
            min_align: MIN_ALIGN,
            max_align: MIN_ALIGN,
            max_bytes: None,
            checks: Checks::Nothing,
        }
    }

    /// The same, accessible to these.
    #[must_use]
    pub const fn accessible(mut self, device: bool, host: bool) -> Self {
        self.device_accessible = device;
        self.host_accessible = host;
        self
    }

    /// The same, managed or not.
    #[must_use]
    pub const fn with_managed(mut self, managed: bool) -> Self {
        self.managed = managed;
        self
    }

    /// The same, in the order of streams or not.
    #[must_use]
    pub const fn with_stream_order(mut self, stream_ordered: bool) -> Self {
        self.stream_ordered = stream_ordered;
        self
    }

    /// The same, able to note uses on further streams or not.
    #[must_use]
    pub const fn with_recorded_streams(mut self, records_streams: bool) -> Self {
        self.records_streams = records_streams;
        self
    }

    /// The same, with every address aligned to `least` bytes, and up to `most` on demand.
    #[must_use]
    pub const fn aligned(mut self, least: usize, most: usize) -> Self {
        self.min_align = least;
        self.max_align = most;
        self
    }

    /// The same, with a longest request.
    #[must_use]
    pub const fn with_max_bytes(mut self, max_bytes: Option<usize>) -> Self {
        self.max_bytes = max_bytes;
        self
    }

    /// The same, with these checks.
    #[must_use]
    pub const fn with_checks(mut self, checks: Checks) -> Self {
        self.checks = checks;
        self
    }
}

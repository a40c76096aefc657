//! Physical memory: extents, the handles that name them, and each device's budget.
//!
//! Extents of a device are ranges of a few large sparse files ([`Segment`]); one that was
//! exported moves to a file of its own, so that the descriptor that leaves the simulator covers
//! that extent and nothing else.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use cuda_sys::types::CUresult;

use crate::race::PhysicalId;
use crate::ranges::Ranges;
use crate::segment::Segment;

/// The driver's granule: physical handles are multiples of it.
pub(crate) const GRANULE: u64 = 2 << 20;

/// The most bytes that a file is made for before it is known that more are needed.
const MAX_FILE: u64 = 1 << 40;

/// What the name of an exported file begins with; the device's ordinal follows.
const EXPORT_NAME: &str = "cuda-sim:device=";

/// The bytes behind one handle, or behind a chunk of an allocator inside the driver.
#[derive(Debug)]
pub(crate) struct Extent {
    pub(crate) device: usize,
    pub(crate) size: u64,
    segment: Arc<Segment>,
    offset: u64,
    home: Home,
    /// Handles and mappings that keep it alive.
    references: u64,
    touched: bool,
}

/// Where an extent's bytes lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Home {
    /// In the device's segment of that index.
    Shared(usize),
    /// In a file of its own; `imported` memory is another simulator's, and not counted here.
    Own { imported: bool, file: FileIdentity },
}

/// Device number and inode.
type FileIdentity = (u64, u64);

#[derive(Debug)]
struct Device {
    limit: u64,
    used: u64,
    segments: Vec<(Arc<Segment>, Ranges)>,
}

/// Every extent of every device of one simulator.
#[derive(Debug)]
pub(crate) struct Physical {
    devices: Vec<Device>,
    extents: HashMap<PhysicalId, Extent>,
    /// Extents with files of their own.
    files: HashMap<FileIdentity, PhysicalId>,
    next: u64,
}

impl Physical {
    pub(crate) fn new(devices: usize, bytes: u64) -> Self {
        let device = || Device { limit: bytes, used: 0, segments: Vec::new() };
        Self {
            devices: (0..devices).map(|_| device()).collect(),
            extents: HashMap::new(),
            files: HashMap::new(),
            next: 1,
        }
    }

    pub(crate) fn limit(&self, device: usize) -> u64 {
        self.devices[device].limit
    }

    pub(crate) fn set_limit(&mut self, device: usize, bytes: u64) {
        self.devices[device].limit = bytes;
    }

    pub(crate) fn used(&self, device: usize) -> u64 {
        self.devices[device].used
    }

    pub(crate) fn get(&self, id: PhysicalId) -> Option<&Extent> {
        self.extents.get(&id)
    }

    /// A fresh zeroed extent with one reference.
    pub(crate) fn create(&mut self, device: usize, size: u64) -> Result<PhysicalId, CUresult> {
        let budget = &mut self.devices[device];
        if budget.used.checked_add(size).is_none_or(|used| used > budget.limit) {
            return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        }
        let (index, offset) = budget.place(size).map_err(|_| CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        budget.used += size;
        let segment = Arc::clone(&budget.segments[index].0);
        let home = Home::Shared(index);
        Ok(self.insert(Extent {
            device,
            size,
            segment,
            offset,
            home,
            references: 1,
            touched: false,
        }))
    }

    fn insert(&mut self, extent: Extent) -> PhysicalId {
        let id = PhysicalId(self.next);
        self.next += 1;
        self.extents.insert(id, extent);
        id
    }

    /// An identity for memory that is not the device's, such as page-locked host memory.
    pub(crate) fn foreign_id(&mut self) -> PhysicalId {
        let id = PhysicalId(self.next);
        self.next += 1;
        id
    }

    pub(crate) fn retain(&mut self, id: PhysicalId) {
        if let Some(extent) = self.extents.get_mut(&id) {
            extent.references += 1;
        }
    }

    /// Drops one reference; true if that was the last and the memory is free again.
    pub(crate) fn release(&mut self, id: PhysicalId) -> bool {
        let Some(extent) = self.extents.get_mut(&id) else { return false };
        extent.references -= 1;
        if extent.references > 0 {
            return false;
        }
        let Some(extent) = self.extents.remove(&id) else { return false };
        let device = &mut self.devices[extent.device];
        match extent.home {
            Home::Shared(index) => {
                device.used -= extent.size;
                device.segments[index].1.give_back(extent.offset, extent.size);
                if extent.touched {
                    // A host that cannot punch holes keeps the bytes, and they stay readable.
                    let _ = extent.segment.discard(extent.offset, extent.size);
                }
            }
            Home::Own { imported, file } => {
                if !imported {
                    device.used -= extent.size;
                }
                self.files.remove(&file);
            }
        }
        true
    }

    /// The host address of bytes of an extent, which count as touched from now on.
    pub(crate) fn pointer(&mut self, id: PhysicalId, offset: u64, length: u64) -> Option<*mut u8> {
        let extent = self.extents.get_mut(&id)?;
        if offset.checked_add(length)? > extent.size {
            return None;
        }
        extent.touched = true;
        extent.segment.pointer(extent.offset + offset, length)
    }

    /// A descriptor that names the extent in any process.
    pub(crate) fn export(&mut self, id: PhysicalId) -> io::Result<OwnedFd> {
        let extent = self.extents.get_mut(&id).ok_or(io::ErrorKind::NotFound)?;
        if let Home::Shared(index) = extent.home {
            let own = Segment::create(&format!("{EXPORT_NAME}{}", extent.device), extent.size)?;
            if extent.touched {
                extent.segment.copy_data_to(extent.offset, extent.size, &own)?;
                let _ = extent.segment.discard(extent.offset, extent.size);
            }
            self.devices[extent.device].segments[index].1.give_back(extent.offset, extent.size);
            let file = file_identity(&own)?;
            self.files.insert(file, id);
            extent.segment = Arc::new(own);
            extent.offset = 0;
            extent.home = Home::Own { imported: false, file };
        }
        Ok(rustix::io::fcntl_dupfd_cloexec(extent.segment.as_fd(), 0)?)
    }

    /// The extent behind a descriptor, with one reference more.
    pub(crate) fn import(&mut self, file: OwnedFd) -> Result<PhysicalId, CUresult> {
        let bad = |_| CUresult::CUDA_ERROR_UNKNOWN;
        let identity = file_identity(&file).map_err(bad)?;
        if let Some(&id) = self.files.get(&identity) {
            self.retain(id);
            return Ok(id);
        }
        let device = exported_device(&file).ok_or(CUresult::CUDA_ERROR_UNKNOWN)?;
        if device >= self.devices.len() {
            return Err(CUresult::CUDA_ERROR_INVALID_DEVICE);
        }
        let segment = Arc::new(Segment::adopt(file).map_err(bad)?);
        let size = segment.size();
        let home = Home::Own { imported: true, file: identity };
        let id = self.insert(Extent {
            device,
            size,
            segment,
            offset: 0,
            home,
            references: 1,
            touched: true,
        });
        self.files.insert(identity, id);
        Ok(id)
    }
}

impl Device {
    /// Finds room for an extent in the files: the segment's index and the offset.
    fn place(&mut self, size: u64) -> io::Result<(usize, u64)> {
        for (index, (_, free)) in self.segments.iter_mut().enumerate() {
            if let Some(offset) = free.take(size, GRANULE) {
                return Ok((index, offset));
            }
        }
        // Files are sparse, so a generous one costs no more than a small one.
        let length = self.limit.clamp(GRANULE, MAX_FILE).max(size) / GRANULE * GRANULE;
        let segment = Segment::create("cuda-sim", length)?;
        let mut free = Ranges::new(0, length);
        let offset = free.take(size, GRANULE).ok_or(io::ErrorKind::OutOfMemory)?;
        self.segments.push((Arc::new(segment), free));
        Ok((self.segments.len() - 1, offset))
    }
}

fn file_identity(file: &impl AsFd) -> io::Result<FileIdentity> {
    let status = rustix::fs::fstat(file)?;
    Ok((status.st_dev, status.st_ino))
}

/// The device named by a file that [`Physical::export`] made; `None` for any other file.
fn exported_device(file: &OwnedFd) -> Option<usize> {
    use std::os::fd::AsRawFd;
    let link = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
    let name = link.to_str()?.strip_prefix("/memfd:")?.strip_prefix(EXPORT_NAME)?;
    name.strip_suffix(" (deleted)").unwrap_or(name).parse().ok()
}

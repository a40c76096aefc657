//! Physical memory: extents, the handles that name them, and each device's budget.
//!
//! Extents of a device, or of the host, are ranges of a few large sparse files ([`Segment`]); one that was
//! exported moves to a file of its own, so that the descriptor that leaves the simulator covers
//! that extent and nothing else.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use cuda_sys::types::{CUmemLocation, CUmemLocationType, CUresult};
use rustc_hash::FxHashMap;

use crate::address::HOST;
use crate::race::PhysicalId;
use crate::ranges::Ranges;
use crate::segment::Segment;

/// The driver's granule: physical handles are multiples of it.
pub(crate) const GRANULE: u64 = 2 << 20;

/// The most bytes that a file is made for before it is known that more are needed.
const MAX_FILE: u64 = 1 << 40;

/// What the name of an exported file begins with; a device's ordinal follows.
const DEVICE_NAME: &str = "cuda-sim:device=";
/// The same for host memory; the number of the node follows.
const NUMA_NAME: &str = "cuda-sim:numa=";

/// The NUMA nodes of the host.
pub(crate) const NUMA_NODES: i32 = 2;

/// Where memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seat {
    /// On a device, by index.
    Device(usize),
    /// On the host, wherever.
    Host,
    /// On one NUMA node of the host.
    HostNuma(i32),
}

impl Seat {
    /// The party that owns the memory: a device's index, or [`HOST`].
    pub(crate) fn owner(self) -> usize {
        match self {
            Self::Device(index) => index,
            Self::Host | Self::HostNuma(_) => HOST,
        }
    }

    /// As the driver says it.
    pub(crate) fn location(self) -> CUmemLocation {
        let (type_, id) = match self {
            Self::Device(index) => (CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, index as i32),
            Self::Host => (CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST, 0),
            Self::HostNuma(node) => (CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA, node),
        };
        CUmemLocation { type_, id }
    }

    /// What a file with the memory is called.
    fn file_name(self) -> String {
        match self {
            Self::Device(index) => format!("{DEVICE_NAME}{index}"),
            Self::Host => format!("{NUMA_NAME}0"),
            Self::HostNuma(node) => format!("{NUMA_NAME}{node}"),
        }
    }

    /// The seat that a file's name says.
    fn of_file_name(name: &str) -> Option<Self> {
        match name.strip_prefix(DEVICE_NAME) {
            Some(index) => index.parse().ok().map(Self::Device),
            None => name.strip_prefix(NUMA_NAME)?.parse().ok().map(Self::HostNuma),
        }
    }
}

/// The bytes behind one handle, or behind a chunk of an allocator inside the driver.
#[derive(Debug)]
pub(crate) struct Extent {
    pub(crate) seat: Seat,
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

/// Every extent of every device of one simulator, and of its host.
#[derive(Debug)]
pub(crate) struct Physical {
    /// The devices by index, and the host behind them.
    devices: Vec<Device>,
    extents: FxHashMap<PhysicalId, Extent>,
    /// Extents with files of their own.
    files: FxHashMap<FileIdentity, PhysicalId>,
    next: u64,
}

impl Physical {
    pub(crate) fn new(devices: usize, bytes: u64, host_bytes: u64) -> Self {
        let limits = std::iter::repeat_n(bytes, devices).chain([host_bytes]);
        Self {
            devices: limits.map(|limit| Device { limit, used: 0, segments: Vec::new() }).collect(),
            extents: FxHashMap::default(),
            files: FxHashMap::default(),
            next: 1,
        }
    }

    /// Where an owner's budget is in the table.
    fn index(&self, owner: usize) -> usize {
        owner.min(self.devices.len() - 1)
    }

    pub(crate) fn limit(&self, owner: usize) -> u64 {
        self.devices[self.index(owner)].limit
    }

    pub(crate) fn set_limit(&mut self, owner: usize, bytes: u64) {
        let index = self.index(owner);
        self.devices[index].limit = bytes;
    }

    pub(crate) fn used(&self, owner: usize) -> u64 {
        self.devices[self.index(owner)].used
    }

    /// Whether there is such a place.
    pub(crate) fn has(&self, seat: Seat) -> bool {
        match seat {
            Seat::Device(index) => index < self.devices.len() - 1,
            Seat::Host => self.limit(HOST) > 0,
            Seat::HostNuma(node) => self.limit(HOST) > 0 && (0..NUMA_NODES).contains(&node),
        }
    }

    pub(crate) fn get(&self, id: PhysicalId) -> Option<&Extent> {
        self.extents.get(&id)
    }

    /// A fresh zeroed extent with one reference.
    pub(crate) fn create(&mut self, seat: Seat, size: u64) -> Result<PhysicalId, CUresult> {
        let owner = self.index(seat.owner());
        let budget = &mut self.devices[owner];
        if budget.used.checked_add(size).is_none_or(|used| used > budget.limit) {
            return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        }
        let (index, offset) = budget.place(size).map_err(|_| CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        budget.used += size;
        let segment = Arc::clone(&budget.segments[index].0);
        let home = Home::Shared(index);
        Ok(self.insert(Extent { seat, size, segment, offset, home, references: 1, touched: false }))
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
        let owner = self.index(extent.seat.owner());
        let device = &mut self.devices[owner];
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
        Ok(rustix::io::fcntl_dupfd_cloexec(self.own_file(id)?.as_fd(), 0)?)
    }

    /// What a fabric handle holds: bytes that name the extent in any process of this host, while
    /// it is alive in this one.
    pub(crate) fn export_by_name(&mut self, id: PhysicalId) -> io::Result<FabricName> {
        use std::os::fd::AsRawFd;
        let segment = self.own_file(id)?;
        let (device, inode) = file_identity(&**segment)?;
        let descriptor = segment.as_fd().as_raw_fd() as u64;
        let mut name = [0; 64];
        name[..8].copy_from_slice(FABRIC_MAGIC);
        let fields = [u64::from(std::process::id()), descriptor, device, inode];
        for (field, to) in fields.iter().zip(name[8..].chunks_exact_mut(8)) {
            to.copy_from_slice(&field.to_le_bytes());
        }
        Ok(name)
    }

    /// Puts an extent into a file of its own, where it is not in one.
    fn own_file(&mut self, id: PhysicalId) -> io::Result<&Arc<Segment>> {
        let last = self.devices.len() - 1;
        let extent = self.extents.get_mut(&id).ok_or(io::ErrorKind::NotFound)?;
        if let Home::Shared(index) = extent.home {
            let own = Segment::create(&extent.seat.file_name(), extent.size)?;
            if extent.touched {
                extent.segment.copy_data_to(extent.offset, extent.size, &own)?;
                let _ = extent.segment.discard(extent.offset, extent.size);
            }
            let owner = extent.seat.owner().min(last);
            self.devices[owner].segments[index].1.give_back(extent.offset, extent.size);
            let file = file_identity(&own)?;
            self.files.insert(file, id);
            extent.segment = Arc::new(own);
            extent.offset = 0;
            extent.home = Home::Own { imported: false, file };
        }
        Ok(&extent.segment)
    }

    /// The extent behind a descriptor, with one reference more.
    pub(crate) fn import(&mut self, file: OwnedFd) -> Result<PhysicalId, CUresult> {
        let bad = |_| CUresult::CUDA_ERROR_UNKNOWN;
        let identity = file_identity(&file).map_err(bad)?;
        if let Some(&id) = self.files.get(&identity) {
            self.retain(id);
            return Ok(id);
        }
        let seat = exported_seat(&file).ok_or(CUresult::CUDA_ERROR_UNKNOWN)?;
        if !self.has(seat) {
            return Err(CUresult::CUDA_ERROR_INVALID_DEVICE);
        }
        let segment = Arc::new(Segment::adopt(file).map_err(bad)?);
        let size = segment.size();
        let home = Home::Own { imported: true, file: identity };
        let id = self.insert(Extent {
            seat,
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

/// What a fabric handle holds.
type FabricName = [u8; 64];

const FABRIC_MAGIC: &[u8; 8] = b"cuda-sim";

/// The file that [`Physical::export_by_name`] named, in whichever process of this user's.
pub(crate) fn open_by_name(name: &FabricName) -> Option<OwnedFd> {
    let (magic, fields) = name.split_at(8);
    let mut fields = fields.chunks_exact(8).map(|field| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(field);
        u64::from_le_bytes(bytes)
    });
    let (process, descriptor) = (fields.next()?, fields.next()?);
    let identity = (fields.next()?, fields.next()?);
    if magic != FABRIC_MAGIC {
        return None;
    }
    let path = format!("/proc/{process}/fd/{descriptor}");
    let file = std::fs::File::options().read(true).write(true).open(path).ok()?;
    (file_identity(&file).ok()? == identity).then(|| file.into())
}

fn file_identity(file: &impl AsFd) -> io::Result<FileIdentity> {
    let status = rustix::fs::fstat(file)?;
    Ok((status.st_dev, status.st_ino))
}

/// The seat named by a file that [`Physical::export`] made; `None` for any other file.
fn exported_seat(file: &OwnedFd) -> Option<Seat> {
    use std::os::fd::AsRawFd;
    let link = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
    let name = link.to_str()?.strip_prefix("/memfd:")?;
    Seat::of_file_name(name.strip_suffix(" (deleted)").unwrap_or(name))
}

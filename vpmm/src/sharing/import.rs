//! The other process's side.

use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cuda_sys::types::*;

use super::limbo::Limbo;
use super::socket;
use super::wire::{self, BATCH, FABRIC_BYTES, HEADER_BYTES, Header, Span, WINDOW_BYTES};
use crate::backing::wait_for_next_context;
use crate::capture::{BesideCaptures, wait_at_end};
use crate::device::Device;
use crate::driver::{Awaited, Driver, Failure};
use crate::error::{Error, Result};
use crate::location::{Access, Sharing};
use crate::mapping;
use crate::reservation::Reservation;
use crate::stats::Stats;
use crate::units::DevicePtr;

/// Addresses of the owner's, and those that stand for them here.
struct Window {
    there: Span,
    here: Reservation,
}

impl Window {
    /// Whether an address of this process is in it.
    fn holds(&self, here: u64) -> bool {
        here.wrapping_sub(self.here.base()) < self.here.bytes()
    }
}

/// An extent where it is mapped here.
#[derive(Clone, Copy)]
struct Mapped {
    here: u64,
    bytes: u64,
    /// Where its window is there.
    window: u64,
}

/// Memory of another process's pool, mapped in this one: an allocation, or a whole pool.
///
/// It is laid out as there: what is contiguous there is contiguous here. No allocation is made from
/// it, and it cannot be shared further. It is the owner's to say what lies where, and that work of
/// both processes on it is in order. When it is dropped, it waits for the work of the device's primary
/// context, then unmaps the memory; the owner's part of it stays. While a stream captures that wait is refused,
/// which ends no capture of the library's streams, or of blocking ones: then the memory is unmapped when
/// [`Device::synchronize`], or the drop of another import, has waited for the device. So is what the driver would
/// not unmap.
pub struct Imported {
    device: Device,
    access: Access,
    pool: [u8; 16],
    granule: u64,
    handles: Sharing,
    block: Option<Span>,
    /// Held while a message is taken, however long the sender makes that: before the books, which nobody else
    /// changes.
    taking: Mutex<()>,
    /// Held for moments, so that others may ask meanwhile what is there.
    books: Mutex<Books>,
}

/// What an import has mapped, and where.
#[derive(Default)]
struct Books {
    /// By their addresses there; and so are the extents.
    windows: BTreeMap<u64, Window>,
    extents: BTreeMap<u64, Mapped>,
    /// Of messages that came to nothing: what the driver would not unmap, and the windows that were made for it,
    /// which are no part of `windows`. Some of it may lie in one of those.
    left: Vec<Mapped>,
    left_windows: Vec<Window>,
}

impl Books {
    fn mapped_bytes(&self) -> u64 {
        self.extents.values().map(|extent| extent.bytes).sum()
    }

    /// Whether some of an extent is mapped already.
    fn is_known(&self, span: Span) -> bool {
        let before = self.extents.range(..span.end()).next_back();
        before.is_some_and(|(start, mapped)| start + mapped.bytes > span.start)
    }

    /// Unmaps what is left of messages, and gives the windows back in which nothing is then. The device's context
    /// is current.
    fn unmap_left(&mut self, driver: &Driver) {
        self.left.retain(|extent| {
            // SAFETY: a whole mapping made for a message, which nobody was told of.
            unsafe { mapping::unmap(driver, extent.here, extent.bytes) }.is_err()
        });
        let left = &self.left;
        self.left_windows.retain(|window| left.iter().any(|extent| window.holds(extent.here)));
    }
}

impl Imported {
    /// Takes the memory that the process at the other end of a connected Unix stream socket sends
    /// with [`Export::send`](crate::Export::send), and maps it for a device, to read or to read and
    /// write. Blocks until it has come; timeouts are set on the socket.
    ///
    /// The device is the one that the memory is on, or one that reaches it. Some 50 µs for each
    /// physical handle on an H200: `cuMemImportFromShareableHandle`, `cuMemMap` and
    /// `cuMemSetAccess`, in the CUDA driver API's "Virtual Memory Management".
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let (one, other) = [(); 2].map(|()| cuda_sim::Simulator::builder().build()).into();
    /// # let (one, other) = (one?, other?);
    /// # let (driver, other_driver) = (vpmm::Driver::new(one.driver())?, vpmm::Driver::new(other.driver())?);
    /// use std::os::unix::net::UnixStream;
    /// use vpmm::{Access, Imported, Pool, PoolConfig, Sharing};
    ///
    /// let (here, there) = UnixStream::pair()?;
    /// // In one process:
    /// let mut config = PoolConfig::default();
    /// config.sharing = Sharing::FileDescriptor;
    /// let device = driver.device(0)?;
    /// let pool = Pool::new(&device, &config)?;
    /// let stream = device.stream()?;
    /// let ptr = pool.malloc(64 << 20, &stream)?;
    /// let sending = || pool.export(ptr)?.send(&here);
    /// // In another:
    /// let device_there = other_driver.device(0)?;
    /// let receiving = || Imported::receive(&device_there, &there, Access::Read);
    ///
    /// let memory = std::thread::scope(|scope| {
    ///     let receiver = scope.spawn(receiving);
    ///     sending()?;
    ///     receiver.join().expect("no panic")
    /// })?;
    /// assert_eq!(memory.bytes(), 64 << 20);
    /// assert!(memory.ptr().is_some());
    /// # drop(memory);
    /// # pool.free(ptr, &stream)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Config`] for [`Access::None`], [`Error::Socket`], [`Error::BadMessage`],
    /// [`Error::ImportRefused`] for a descriptor or handle that names no shared memory,
    /// [`Error::PeerUnsupported`], [`Error::AddressSpaceExhausted`], [`Error::ContextLost`],
    /// [`Error::Driver`]. Nothing stays mapped, the sender is told, and the socket is of no further
    /// use.
    ///
    /// [`Error::Config`]: crate::Error::Config
    /// [`Error::Socket`]: crate::Error::Socket
    /// [`Error::BadMessage`]: crate::Error::BadMessage
    /// [`Error::ImportRefused`]: crate::Error::ImportRefused
    /// [`Error::PeerUnsupported`]: crate::Error::PeerUnsupported
    /// [`Error::AddressSpaceExhausted`]: crate::Error::AddressSpaceExhausted
    /// [`Error::ContextLost`]: crate::Error::ContextLost
    /// [`Error::Driver`]: crate::Error::Driver
    pub fn receive(device: &Device, socket: impl AsFd, access: Access) -> Result<Self> {
        if access == Access::None {
            return Err(Error::Config {
                name: "access",
                value: "None".to_owned(),
                reason: "imported memory is there to be read at least".to_owned(),
            });
        }
        let socket = socket.as_fd();
        telling(socket, || {
            let header = receive_header(socket)?;
            let imported = Self {
                device: device.clone(),
                access,
                pool: header.pool,
                granule: header.granule,
                handles: header.handles,
                block: header.block,
                taking: Mutex::default(),
                books: Mutex::default(),
            };
            imported.take(socket, &header)?;
            Ok(imported)
        })
    }

    /// Takes what a pool has made since it was sent last, from the same
    /// [`Export`](crate::Export) of a whole pool. Blocks until it has come; other threads may ask
    /// meanwhile what is there, and wait where they take more.
    ///
    /// # Errors
    /// As [`receive`](Self::receive); [`Error::BadMessage`] for memory of another export. What was
    /// there before stays, nothing is added.
    ///
    /// [`Error::BadMessage`]: crate::Error::BadMessage
    pub fn receive_more(&self, socket: impl AsFd) -> Result<()> {
        let socket = socket.as_fd();
        // Before a lock that a thread of the parent may hold.
        self.device.driver().check_process()?;
        let _taking = self.taking.lock().unwrap_or_else(PoisonError::into_inner);
        telling(socket, || {
            let header = receive_header(socket)?;
            let same = header.pool == self.pool
                && header.granule == self.granule
                && header.handles == self.handles;
            if !same || header.block.is_some() || self.block.is_some() {
                return Err(Error::BadMessage { reason: "it is not of the same whole pool" });
            }
            self.take(socket, &header)
        })
    }

    /// The start of the allocation that was shared; nothing where it was a whole pool.
    pub fn ptr(&self) -> Option<DevicePtr> {
        self.translate(self.block?.start)
    }

    /// The bytes of the allocation, rounded as the owner's pool rounds; of a whole pool all that is
    /// mapped.
    pub fn bytes(&self) -> u64 {
        let mapped = || self.books().map_or(0, |books| books.mapped_bytes());
        self.block.map_or_else(mapped, |block| block.bytes)
    }

    /// Where an address of the owner's process is here; nothing where it has no memory here.
    pub fn translate(&self, there: u64) -> Option<DevicePtr> {
        let books = self.books()?;
        let (start, mapped) = books.extents.range(..=there).next_back()?;
        let offset = there - start;
        (offset < mapped.bytes).then(|| DevicePtr::from_address(mapped.here + offset))
    }

    /// What the device may do with the memory.
    pub fn access(&self) -> Access {
        self.access
    }

    /// `None` in a child of the process, where nothing is mapped and the lock may be held for ever.
    fn books(&self) -> Option<MutexGuard<'_, Books>> {
        self.device.driver().check_process().ok()?;
        Some(self.books.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The memory that this process holds by the import: mapped and reserved bytes, extents,
    /// reservations. It is the owner's physical memory, and counted by the owner's pool too. No
    /// driver call.
    pub fn stats(&self) -> Stats {
        let Some(books) = self.books() else { return Stats::default() };
        let mapped_bytes = books.mapped_bytes();
        let windows = || books.windows.values().chain(&books.left_windows);
        let reserved_bytes = windows().map(|window| window.here.bytes()).sum();
        Stats {
            mapped_bytes,
            peak_mapped_bytes: mapped_bytes,
            reserved_bytes,
            hole_bytes: reserved_bytes - mapped_bytes,
            reservation_count: windows().count() as u64,
            extent_count: books.extents.len() as u64,
            page_size_bytes: self.granule,
            ..Stats::default()
        }
    }

    /// Maps what follows a header, all of it or nothing. Nobody else takes a message meanwhile.
    fn take(&self, socket: BorrowedFd<'_>, header: &Header) -> Result<()> {
        let mut bytes = vec![0; header.windows as usize * WINDOW_BYTES];
        socket::receive(socket, &mut bytes)?;
        let spans = header.read_windows(&bytes)?;
        let device = self.device.clone();
        let (_context, driver) = (device.enter()?, device.driver());
        let mut reserved = BTreeMap::new();
        let mut books = self.books().ok_or(Error::Forked)?;
        // Some of what is to come may go there.
        books.unmap_left(driver);
        for span in &spans {
            match books.windows.get(&span.start) {
                None => {}
                Some(known) if known.there == *span => continue,
                Some(_) => {
                    return Err(Error::BadMessage { reason: "a window is another than it was" });
                }
            }
            let here = Reservation::new(driver, span.bytes).map_err(|failure| {
                let bytes = span.bytes;
                let exhausted = Error::AddressSpaceExhausted { bytes };
                if failure.is_out_of_memory() { exhausted } else { failure.about(bytes) }
            })?;
            reserved.insert(span.start, Window { there: *span, here });
        }
        drop(books);
        let mut arrived = Vec::new();
        let taken = self.map_all(socket, header, &spans, &reserved, &mut arrived);
        let mut books = self.books().ok_or(Error::Forked)?;
        if taken.is_ok() {
            books.extents.extend(arrived);
            books.windows.append(&mut reserved);
        } else {
            books.left.extend(arrived.into_iter().map(|(_, extent)| extent));
            books.left_windows.extend(reserved.into_values());
            books.unmap_left(driver);
        }
        taken
    }

    /// Maps the extents of a message in these windows, known ones and new ones.
    fn map_all(
        &self,
        socket: BorrowedFd<'_>,
        header: &Header,
        spans: &[Span],
        reserved: &BTreeMap<u64, Window>,
        arrived: &mut Vec<(u64, Mapped)>,
    ) -> Result<()> {
        let driver = self.device.driver();
        let (mut left, mut last) = (header.extents as usize, 0);
        loop {
            let count = left.min(BATCH);
            let mut bytes = vec![0; count * header.entry_bytes()];
            let mut files = socket::receive(socket, &mut bytes)?.into_iter();
            let expected = if header.handles == Sharing::Fabric { 0 } else { count };
            if files.len() != expected {
                return Err(Error::BadMessage {
                    reason: "its descriptors are not one for each extent",
                });
            }
            let first = arrived.len();
            let batch = header.read_batch(&bytes, spans, &mut last)?;
            for ((span, at), entry) in batch.iter().zip(bytes.chunks_exact(header.entry_bytes())) {
                let start = spans[*at].start;
                let here = self.place(*span, start, reserved)?;
                let handle = match files.next() {
                    Some(file) => import_descriptor(driver, &file, span.bytes)?,
                    None => import_fabric(driver, entry, span.bytes)?,
                };
                let mapped = Mapped { here, bytes: span.bytes, window: start };
                self.map(handle, mapped)?;
                arrived.push((span.start, mapped));
            }
            self.open(&arrived[first..])?;
            left -= count;
            if left == 0 {
                break;
            }
            socket::send(socket, &[wire::TAKEN], &[])?;
        }
        if self.block.is_some_and(|block| last < block.end()) {
            return Err(Error::BadMessage { reason: "its block has not all its memory" });
        }
        socket::send(socket, &[wire::TAKEN], &[])
    }

    /// Where an extent goes here, in a window that begins so there.
    fn place(&self, span: Span, window: u64, reserved: &BTreeMap<u64, Window>) -> Result<u64> {
        let books = self.books().ok_or(Error::Forked)?;
        let known = books.windows.get(&window).or_else(|| reserved.get(&window));
        let Some(window) = known.filter(|_| !books.is_known(span)) else {
            return Err(Error::BadMessage { reason: "it repeats an extent" });
        };
        Ok(window.here.base() + (span.start - window.there.start))
    }

    /// Maps an imported handle, which is given up: the mapping keeps the memory.
    fn map(&self, handle: CUmemGenericAllocationHandle, to: Mapped) -> Result<()> {
        let driver = self.device.driver();
        let mapped = self.check_place(handle).and_then(|()| {
            // SAFETY: the handle was imported just now. The addresses are reserved here, and nothing
            // is mapped there, since extents do not overlap. A handle of another length is refused.
            unsafe { driver.cuMemMap(to.here, to.bytes as usize, 0, handle, 0) }
                .map_err(|failure| failure.about(to.bytes))
        });
        // SAFETY: the one reference that the import made; its value is not used after.
        let _ = unsafe { driver.cuMemRelease(handle) };
        mapped
    }

    /// The device must reach the memory where it is.
    fn check_place(&self, handle: CUmemGenericAllocationHandle) -> Result<()> {
        let driver = self.device.driver();
        let mut kind = CUmemAllocationProp::default();
        // SAFETY: the pointer is to live properties, and the handle is alive.
        unsafe { driver.cuMemGetAllocationPropertiesFromHandle(&mut kind, handle) }?;
        let (place, own) = (kind.location, self.device.location());
        if place.type_ != own.type_ || place.id == own.id {
            return Ok(());
        }
        let mut can = 0;
        // SAFETY: the pointer is to a live c_int.
        unsafe { driver.cuDeviceCanAccessPeer(&mut can, own.id, place.id) }?;
        if can != 0 {
            return Ok(());
        }
        let device = u32::try_from(place.id).unwrap_or(u32::MAX);
        Err(Error::PeerUnsupported { device, peer: self.device.ordinal() })
    }

    /// Opens new mappings to the device, in one call for each run without a hole.
    fn open(&self, extents: &[(u64, Mapped)]) -> Result<()> {
        let access =
            [CUmemAccessDesc { location: self.device.location(), flags: self.access.flags() }];
        let joined = |a: &(u64, Mapped), b: &(u64, Mapped)| {
            a.1.window == b.1.window && a.1.here + a.1.bytes == b.1.here
        };
        for run in extents.chunk_by(joined) {
            let bytes = run.iter().map(|(_, extent)| extent.bytes).sum();
            let start = run[0].1.here;
            // SAFETY: whole mappings made just now, side by side in one reservation.
            unsafe { mapping::set_access(self.device.driver(), start, bytes, &access) }
                .map_err(|failure| failure.about(bytes))?;
        }
        Ok(())
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        let driver = self.device.driver();
        let context = match self.device.enter() {
            Err(error) if !error.is_context_dead() => return,
            entered => entered.ok(),
        };
        let books = std::mem::take(self.books.get_mut().unwrap_or_else(PoisonError::into_inner));
        if books.extents.is_empty() && books.left.is_empty() {
            return;
        }
        let waited = if books.extents.is_empty() {
            // Nobody was told of what is left.
            Ok(())
        } else if context.is_none() {
            // Nothing runs there any more; but the mappings are the next one's, too.
            wait_for_next_context(&self.device)
        } else {
            BesideCaptures::enter(driver).map_err(Error::from).and_then(|_beside| {
                let awaited = Awaited::Device(self.device.ordinal());
                driver.tell_wait_for(awaited, || wait_at_end(&self.device))
            })
        };
        // Another thread may have reset the device meanwhile.
        let waited = match waited {
            Err(error) if error.is_context_dead() => wait_for_next_context(&self.device),
            waited => waited,
        };
        let mappings = Mappings {
            device: self.device.clone(),
            extents: books.extents.into_values().chain(books.left).collect(),
            _windows: books.windows.into_values().chain(books.left_windows).collect(),
        };
        match waited {
            Ok(()) => mappings.unmap(),
            // Nor does anything run in a context that has failed. Mappings are no context's.
            Err(error) if error.is_context_dead() => mappings.unmap(),
            // A driver that was shut down takes them back with the process.
            Err(error) if error.is_context_lost() => {}
            Err(_) => Limbo::keep(driver, mappings),
        }
    }
}

/// What an import has mapped, when it has ended.
pub(super) struct Mappings {
    device: Device,
    extents: Vec<Mapped>,
    /// Dropped after what is mapped in them.
    _windows: Vec<Window>,
}

impl Mappings {
    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// The device has been waited for since, unless nobody was told of any of these, and its context is current; or
    /// that is gone with all that ran in it, and the context that came next was waited for.
    /// What the driver refuses to unmap is tried again when it has been waited for once more.
    pub(super) fn unmap(mut self) {
        let driver = self.device.driver().clone();
        self.extents.retain(|extent| {
            // SAFETY: a whole mapping of the import, which no other device may use; all work on the device has
            // finished, or ended with its context, or nobody was told of it.
            let unmapped = unsafe { mapping::unmap(&driver, extent.here, extent.bytes) };
            unmapped.is_err_and(|failure| !Error::from(failure).is_context_lost())
        });
        if !self.extents.is_empty() {
            Limbo::keep(&driver, self);
        }
    }
}

impl fmt::Debug for Imported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Imported")
            .field("device", &self.device.ordinal())
            .field("access", &self.access)
            .field("stats", &self.stats())
            .finish()
    }
}

/// Does something about a message, and tells the sender where that fails.
fn telling<T>(socket: BorrowedFd<'_>, work: impl FnOnce() -> Result<T>) -> Result<T> {
    work().inspect_err(|_| {
        // The error to report is the first one.
        let _ = socket::send(socket, &[wire::REFUSED], &[]);
    })
}

fn receive_header(socket: BorrowedFd<'_>) -> Result<Header> {
    let mut bytes = [0; HEADER_BYTES];
    socket::receive(socket, &mut bytes)?;
    Header::read(&bytes)
}

fn import_descriptor(
    driver: &Driver,
    file: &OwnedFd,
    bytes: u64,
) -> Result<CUmemGenericAllocationHandle> {
    let mut handle = 0;
    let number = ptr::without_provenance_mut(file.as_raw_fd() as usize);
    let kind = Sharing::FileDescriptor.handle_type();
    // SAFETY: the pointer is to a live handle; the descriptor, which travels in the pointer's place,
    // is open. The driver takes no ownership of it.
    unsafe { driver.cuMemImportFromShareableHandle(&mut handle, number, kind) }
        .map_err(|failure| refused(failure, bytes))?;
    Ok(handle)
}

fn import_fabric(
    driver: &Driver,
    entry: &[u8],
    bytes: u64,
) -> Result<CUmemGenericAllocationHandle> {
    let mut name = CUmemFabricHandle::default();
    let tail = entry.len().saturating_sub(FABRIC_BYTES);
    for (to, from) in name.data.iter_mut().zip(&entry[tail..]) {
        *to = *from;
    }
    let mut handle = 0;
    let (from, kind) = ((&raw mut name).cast(), Sharing::Fabric.handle_type());
    // SAFETY: both pointers are to live values of the types that this kind of handle has.
    unsafe { driver.cuMemImportFromShareableHandle(&mut handle, from, kind) }
        .map_err(|failure| refused(failure, bytes))?;
    Ok(handle)
}

fn refused(failure: Failure, bytes: u64) -> Error {
    match failure.about(bytes) {
        Error::Driver { code, .. } if !failure.is_out_of_memory() => Error::ImportRefused { code },
        other => other,
    }
}

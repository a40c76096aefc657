//! The owner's side.

use std::collections::HashSet;
use std::ffi::c_int;
use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

use cuda_sys::types::*;

use super::socket;
use super::wire::{self, BATCH, FABRIC_BYTES, Header, Span};
use crate::backing::Backing;
use crate::device::Device;
use crate::driver::{Driver, Failure};
use crate::error::{Error, Result};
use crate::location::Sharing;
use crate::physical::Extent;

/// An extent that is shared, at its address in this process. It stays there from then on.
#[derive(Clone, Copy)]
pub(crate) struct SharedExtent {
    pub(crate) handle: Extent,
    pub(crate) span: Span,
}

/// A pool whose memory can be shared.
pub(crate) trait Source: Sync {
    fn backing(&self) -> &Backing;
    fn device(&self) -> &Device;
    /// The reservations, in ascending order.
    fn windows(&self) -> Vec<Span>;
    /// The extents that a live allocation is on, in ascending order, and where the allocation is.
    /// They never move again.
    fn pin_block(&self, address: u64) -> Result<(Vec<SharedExtent>, Span)>;
    /// Every extent, in ascending order. None ever moves again.
    fn pin_all(&self) -> Vec<SharedExtent>;
}

/// Memory of a pool on its way to other processes: one allocation, or the whole pool. Made by
/// [`Pool::export`](crate::Pool::export) and [`Pool::export_all`](crate::Pool::export_all).
///
/// What is sent stays where it is in this process for the pool's life; everything else goes on
/// moving, but in the paged profile, where from the making of this value on nothing moves any more. The other process keeps the memory alive, also when this one ends. Whole physical handles
/// are shared: with an allocation come the others that lie on the same ones.
pub struct Export<'a> {
    source: &'a dyn Source,
    pool: [u8; 16],
    /// One allocation, with its extents; the whole pool where there is none.
    block: Option<(Vec<SharedExtent>, Span)>,
    /// What has been sent of a whole pool, by address.
    sent: HashSet<u64>,
}

impl fmt::Debug for Export<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Export").field("sent", &self.sent.len()).finish_non_exhaustive()
    }
}

impl<'a> Export<'a> {
    pub(crate) fn new(source: &'a dyn Source, block: Option<u64>) -> Result<Self> {
        if source.backing().sharing() == Sharing::None {
            let reason = "the pool was made without sharing";
            return Err(Error::NotShareable { reason });
        }
        let block = block.map(|address| source.pin_block(address)).transpose()?;
        // A number that no other export has, so that an import takes no other pool's memory in. The
        // standard library's hashers have random keys.
        let random = || RandomState::new().build_hasher().finish().to_le_bytes();
        let mut pool = [0; 16];
        pool[..8].copy_from_slice(&random());
        pool[8..].copy_from_slice(&random());
        Ok(Self { source, pool, block, sent: HashSet::new() })
    }

    /// Sends the memory to a process that is in [`Imported::receive`](crate::Imported::receive) at the
    /// other end of a connected Unix stream socket; waits until that process has mapped it. Of a
    /// whole pool, a second and later call sends what the pool has made since, for
    /// [`Imported::receive_more`](crate::Imported::receive_more).
    ///
    /// Host-side only: work on streams is the processes' to order, and what the memory holds is there
    /// for work of the other process that begins after this one's has finished. Blocks as long as
    /// the other end takes; timeouts are set on the socket. Some 17 µs for each physical handle here
    /// and 50 µs there on an H200. `cuMemExportToShareableHandle`, in the CUDA driver API's "Virtual
    /// Memory Management".
    ///
    /// # Errors
    /// [`Error::Socket`], [`Error::PeerRefused`] where the other process would not take it,
    /// [`Error::BadMessage`] for an answer that is none, [`Error::ContextLost`], [`Error::Driver`].
    /// The pool is as before, except that what may have been sent does not move any more. The socket
    /// is of no further use then.
    ///
    /// [`Error::Socket`]: crate::Error::Socket
    /// [`Error::PeerRefused`]: crate::Error::PeerRefused
    /// [`Error::BadMessage`]: crate::Error::BadMessage
    /// [`Error::ContextLost`]: crate::Error::ContextLost
    /// [`Error::Driver`]: crate::Error::Driver
    pub fn send(&mut self, socket: impl AsFd) -> Result<()> {
        let socket = socket.as_fd();
        let driver = self.source.device().driver();
        driver.check_process()?;
        let (extents, windows, block) = match &self.block {
            Some((extents, block)) => {
                let start = extents.first().map_or(0, |extent| extent.span.start);
                let end = extents.last().map_or(0, |extent| extent.span.end());
                (extents.clone(), vec![Span { start, bytes: end - start }], Some(*block))
            }
            None => {
                let mut new = self.source.pin_all();
                new.retain(|extent| !self.sent.contains(&extent.span.start));
                // Afterwards: memory is only made at addresses reserved before.
                (new, self.source.windows(), None)
            }
        };
        let backing = self.source.backing();
        let header = Header {
            handles: backing.sharing(),
            windows: windows.len() as u32,
            extents: extents.len() as u32,
            granule: backing.granule_bytes(),
            pool: self.pool,
            block,
        };
        let mut bytes = header.write().to_vec();
        windows.iter().for_each(|window| wire::write_span(*window, &mut bytes));
        socket::send(socket, &bytes, &[])?;
        if extents.is_empty() {
            wait_for_answer(socket)?;
        }
        for batch in extents.chunks(BATCH) {
            let mut bytes = Vec::new();
            let mut files = Vec::new();
            for extent in batch {
                wire::write_span(extent.span, &mut bytes);
                let about = |failure: Failure| failure.about(extent.span.bytes);
                if header.handles == Sharing::Fabric {
                    bytes.extend(fabric_handle(driver, extent.handle).map_err(about)?);
                } else {
                    files.push(descriptor(driver, extent.handle).map_err(about)?);
                }
            }
            let files: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
            socket::send(socket, &bytes, &files)?;
            wait_for_answer(socket)?;
        }
        self.sent.extend(extents.iter().map(|extent| extent.span.start));
        Ok(())
    }
}

fn wait_for_answer(socket: BorrowedFd<'_>) -> Result<()> {
    let mut answer = [0];
    socket::receive(socket, &mut answer)?;
    match answer[0] {
        wire::TAKEN => Ok(()),
        wire::REFUSED => Err(Error::PeerRefused),
        _ => Err(Error::BadMessage { reason: "the answer is none" }),
    }
}

fn descriptor(driver: &Driver, extent: Extent) -> Result<OwnedFd, Failure> {
    let mut file: c_int = -1;
    let (out, kind) = ((&raw mut file).cast(), Sharing::FileDescriptor.handle_type());
    // SAFETY: the handle is alive while its pool is; the pointer is to a live c_int, which this kind
    // of handle is; flags must be 0.
    unsafe { driver.cuMemExportToShareableHandle(out, extent.0, kind, 0) }?;
    // SAFETY: a new descriptor that the driver made for its caller, who closes it.
    let file = unsafe { OwnedFd::from_raw_fd(file) };
    // Whether the driver's is closed in programs that are started is not said anywhere, and the other end
    // may take its time to answer.
    let _ = rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::CLOEXEC);
    Ok(file)
}

fn fabric_handle(driver: &Driver, extent: Extent) -> Result<[u8; FABRIC_BYTES], Failure> {
    let mut handle = CUmemFabricHandle::default();
    let (out, kind) = ((&raw mut handle).cast(), Sharing::Fabric.handle_type());
    // SAFETY: the handle is alive while its pool is; the pointer is to a live fabric handle; flags
    // must be 0.
    unsafe { driver.cuMemExportToShareableHandle(out, extent.0, kind, 0) }?;
    Ok(handle.data)
}

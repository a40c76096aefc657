//! A session together with what is mapped through it.

mod addresses;
mod create;
mod handles;
mod scratch;
mod sleep;

pub use addresses::KeptAddresses;
use addresses::Room;
pub use scratch::ScratchSummary;
use scratch::Scratches;

use std::path::{Path, PathBuf};

use super::mappings::Places;
use super::{AllocationInfo, ClientError, ConnectOptions, Interrupt, MappingInfo, Session};
use crate::cuda::{Context, Cuda};
use crate::lock::{Granted, Requested};

type Result<T> = std::result::Result<T, ClientError>;

/// What a process uses the service through: writes a layout and publishes it, or maps one that is
/// there; gives the memory up and has it back at the same addresses.
///
/// It takes part in the device's primary context. Work of the process on the memory is the process's
/// own to order: what takes memory away here waits for the device first.
///
/// ```no_run
/// use gms::client::{ConnectOptions, MemoryManager};
/// use gms::lock::Requested;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let driver = cuda_sys::Driver::load()?;
/// let mut manager = MemoryManager::new(&driver, 0, "/tmp/gms.sock")?;
/// manager.connect(ConnectOptions::new(Requested::RwOrRo))?;
/// let weights = manager.create_mapping(64 << 20, "weights")?;
/// // … fill the memory at `weights` …
/// manager.commit()?;
/// manager.connect(ConnectOptions::new(Requested::Ro))?;
/// manager.remap_all()?; // at the same address, read-only
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct MemoryManager {
    session: Option<Session>,
    places: Places,
    scratches: Scratches,
    room: Option<Room>,
    context: Context,
    path: PathBuf,
    /// The tag whose server is looked for where that is, if it is at the device's usual place.
    tag: Option<String>,
    /// Whether a session was given up since the path was last found.
    aborted: bool,
    /// Who says whether a wait for an answer ends.
    interrupt: Option<Interrupt>,
    /// The hash of the layout whose addresses are kept; empty where it is not known.
    hash: String,
    unmapped: bool,
}

impl MemoryManager {
    /// For a device and the server at a path. Does not connect.
    ///
    /// # Errors
    /// [`ClientError::Cuda`].
    pub fn new(
        driver: &cuda_sys::Driver,
        ordinal: u32,
        socket_path: impl Into<PathBuf>,
    ) -> Result<Self> {
        let context = Context::retain(&Cuda::open(driver, ordinal)?)?;
        Ok(Self {
            session: None,
            places: Places::default(),
            scratches: Scratches::default(),
            room: None,
            context,
            path: socket_path.into(),
            tag: None,
            aborted: false,
            interrupt: None,
            hash: String::new(),
            unmapped: false,
        })
    }

    /// The lock that it has.
    pub fn granted_lock(&self) -> Option<Granted> {
        self.session.as_ref().map(Session::granted)
    }

    /// Whether it has a session.
    pub fn is_connected(&self) -> bool {
        self.session.is_some()
    }

    /// Whether the memory was given up and only the addresses are kept.
    pub fn is_unmapped(&self) -> bool {
        self.unmapped
    }

    /// Bytes of all mappings, whether the memory is there or not.
    pub fn total_bytes(&self) -> u64 {
        self.places.iter().map(|(_, place)| place.bytes).sum()
    }

    /// What sizes are rounded up to.
    pub fn granularity(&self) -> u64 {
        self.context.cuda().granularity()
    }

    /// Says which tag's server it is. If that is at the device's usual place ([`crate::socket_path`]), it
    /// is looked for anew by the first [`connect`](Self::connect) after each [`abort`](Self::abort): a
    /// process that was moved to another GPU meanwhile, as a checkpoint that is restored elsewhere, finds
    /// that one's server, whose socket has another name. A path of the caller's own stays.
    ///
    /// # Errors
    /// [`ClientError::Cuda`].
    pub fn set_tag(&mut self, tag: &str) -> Result<()> {
        let is_usual = self.path == self.usual_path(tag)?;
        self.tag = is_usual.then(|| tag.to_owned());
        Ok(())
    }

    fn usual_path(&self, tag: &str) -> Result<PathBuf> {
        Ok(crate::socket_path(&self.context.cuda().uuid()?, tag))
    }

    /// The server's socket.
    pub fn socket_path(&self) -> &Path {
        &self.path
    }

    /// What is mapped, or kept an address for, by address.
    pub fn mappings(&self) -> Vec<MappingInfo> {
        let known = self.places.iter().filter_map(|(address, place)| {
            let allocation = place.allocation.as_ref()?;
            Some(MappingInfo {
                address,
                bytes: place.bytes,
                allocation_id: allocation.allocation_id.clone(),
                tag: allocation.tag.clone(),
                layout_slot: allocation.layout_slot,
                is_mapped: place.mapping.is_some(),
            })
        });
        known.collect()
    }

    /// The allocation that belongs at an address, if there is one.
    pub fn allocation_at(&self, address: u64) -> Option<&AllocationInfo> {
        self.places.get(address).ok()?.allocation.as_ref()
    }

    /// The device's number.
    pub fn ordinal(&self) -> u32 {
        self.context.cuda().ordinal()
    }

    /// As [`Session::set_interrupt`], for this session and those to come; and while a server and the lock are
    /// waited for, whatever [`ConnectOptions::interruptible`] says: a signal that ends nothing leaves the place
    /// among those who wait as it is.
    pub fn set_interrupt(&mut self, interrupt: Option<Interrupt>) {
        if let Some(session) = &mut self.session {
            session.set_interrupt(interrupt.clone());
        }
        self.interrupt = interrupt;
    }

    /// Whether the session's connection has failed: [`Session::is_broken`].
    pub fn is_broken(&self) -> bool {
        self.session.as_ref().is_some_and(Session::is_broken)
    }

    /// Whether somebody has ended a wait of the session's: [`Session::is_interrupted`].
    pub fn is_interrupted(&self) -> bool {
        self.session.as_ref().is_some_and(Session::is_interrupted)
    }

    /// Connects and waits for a lock. A writer's hash is not known; a reader takes the published
    /// layout's, unless it keeps addresses of one it knew.
    ///
    /// # Errors
    /// [`ClientError::AlreadyConnected`], [`ClientError::Connect`], [`ClientError::LockTimeout`].
    pub fn connect(&mut self, options: ConnectOptions) -> Result<Granted> {
        if let Some(session) = &self.session {
            return Err(ClientError::AlreadyConnected { has: session.granted() });
        }
        if let (true, Some(tag)) = (self.aborted, &self.tag) {
            self.path = self.usual_path(tag)?;
        }
        self.aborted = false;
        let mut session = Session::connect_by(&self.path, options, self.interrupt.as_ref())?;
        session.set_interrupt(self.interrupt.clone());
        let granted = session.granted();
        let keeps = !self.places.is_empty() && !self.hash.is_empty();
        match granted {
            Granted::Rw => self.hash.clear(),
            Granted::Ro | Granted::RwData if !keeps => self.hash = session.layout_hash()?,
            Granted::Ro | Granted::RwData => {}
        }
        self.session = Some(session);
        Ok(granted)
    }

    /// Gives the lock up. What is mapped stays mapped.
    pub fn abort(&mut self) {
        self.session = None;
        self.aborted = true;
    }

    /// The session, for requests that this has no method for.
    ///
    /// # Errors
    /// [`ClientError::NotConnected`].
    pub fn session(&mut self) -> Result<&mut Session> {
        self.session.as_mut().ok_or(ClientError::NotConnected)
    }

    pub(super) fn writer(&mut self) -> Result<&mut Session> {
        let session = self.session()?;
        match session.granted() {
            Granted::Rw => Ok(session),
            has => Err(ClientError::WrongLock { needed: "RW", has }),
        }
    }

    pub(super) fn may_write(&self) -> bool {
        self.granted_lock().is_some_and(|granted| granted != Granted::Ro)
    }

    /// Gives everything up: memory, addresses, the lock. Waits for the device first.
    ///
    /// # Errors
    /// [`ClientError::Cuda`] where waiting fails, or the driver would not unmap something, though asked
    /// twice; everything else is given up all the same.
    pub fn close(mut self) -> Result<()> {
        let waited = self.context.synchronize();
        self.places.clear();
        self.scratches.clear();
        Ok(waited.and(self.context.unmap_left(|_| true))?)
    }

    /// Gives memory and addresses up, whatever the device says.
    pub(crate) fn forget_all(&mut self) {
        if let Err(error) = self.context.synchronize() {
            tracing::warn!(%error, "the device cannot be waited for");
        }
        self.places.clear();
        self.scratches.clear();
        self.unmapped = false;
    }

    /// The context, for copies.
    pub(crate) fn context(&self) -> &Context {
        &self.context
    }
}

impl Drop for MemoryManager {
    fn drop(&mut self) {
        if !(self.places.is_empty() && self.scratches.is_empty())
            && let Err(error) = self.context.synchronize()
        {
            tracing::warn!(%error, "the device cannot be waited for");
        }
    }
}

/// The lock that a process asks for that writes a layout where there is none and reads it where there
/// is one.
impl Default for ConnectOptions {
    fn default() -> Self {
        Self::new(Requested::RwOrRo)
    }
}

//! What the driver itself takes for a mapping: no client of a server can be quicker.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use super::ClientError;
use crate::cuda::{Context, Cuda, Mapping, PhysicalHandle, Reservation};

/// The driver's calls for a mapping, each at the median, when one process makes all of them.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct MappingFloor {
    /// To make the memory: the server's.
    pub create: Duration,
    /// To make a descriptor for it: the server's.
    pub export: Duration,
    /// To take part in another process's memory and put it at an address, which is reserved.
    pub import_and_map: Duration,
    /// To open it to the device.
    pub set_access: Duration,
}

impl MappingFloor {
    /// A writer's: makes memory so many times, of so many bytes each, exports it, and maps what the
    /// descriptor names, as memory that nobody had before. Everything is given back.
    ///
    /// # Errors
    /// [`ClientError::Cuda`], [`ClientError::Size`].
    pub fn writer(
        driver: &cuda_sys::Driver,
        ordinal: u32,
        bytes: u64,
        count: usize,
    ) -> Result<Self, ClientError> {
        let context = Context::retain(&Cuda::open(driver, ordinal)?)?;
        let _current = context.enter()?;
        // Kept to the end, so that nothing is timed but what is named.
        let (mut handles, mut files) = (Vec::with_capacity(count), Vec::with_capacity(count));
        let (mut create, mut export) = (Vec::with_capacity(count), Vec::with_capacity(count));
        let mut maps = Maps::new(&context, bytes, count, true)?;
        for _ in 0..count {
            let started = Instant::now();
            let handle = PhysicalHandle::create(context.cuda(), bytes)?;
            let created = Instant::now();
            let file = handle.export()?;
            export.push(created.elapsed());
            create.push(created - started);
            maps.add(&file)?;
            handles.push(handle);
            files.push(file);
        }
        Ok(Self { create: middle(create), export: middle(export), ..maps.floor() })
    }

    /// A reader's: maps what the descriptors name, of so many bytes each, one after the other. Everything
    /// is given back.
    ///
    /// # Errors
    /// [`ClientError::Cuda`], [`ClientError::Size`].
    pub fn reader(
        driver: &cuda_sys::Driver,
        ordinal: u32,
        bytes: u64,
        files: &[OwnedFd],
    ) -> Result<Self, ClientError> {
        let context = Context::retain(&Cuda::open(driver, ordinal)?)?;
        let _current = context.enter()?;
        let mut maps = Maps::new(&context, bytes, files.len(), false)?;
        files.iter().try_for_each(|file| maps.add(file))?;
        Ok(maps.floor())
    }

    /// All of it.
    pub fn total(&self) -> Duration {
        self.create + self.export + self.import_and_map + self.set_access
    }

    /// The middle ones of several, each by itself.
    pub fn middle(of: &[Self]) -> Self {
        let of = |part: fn(&Self) -> Duration| middle(of.iter().map(part).collect());
        Self {
            create: of(|floor| floor.create),
            export: of(|floor| floor.export),
            import_and_map: of(|floor| floor.import_and_map),
            set_access: of(|floor| floor.set_access),
        }
    }
}

/// Mappings side by side, and how long each took.
struct Maps<'a> {
    /// Before the addresses, so that they go first.
    mappings: Vec<Mapping>,
    _reservation: Reservation,
    context: &'a Context,
    next: u64,
    bytes: u64,
    write: bool,
    import_and_map: Vec<Duration>,
    set_access: Vec<Duration>,
}

impl<'a> Maps<'a> {
    fn new(
        context: &'a Context,
        bytes: u64,
        count: usize,
        write: bool,
    ) -> Result<Self, ClientError> {
        let total = bytes.checked_mul(count as u64).filter(|total| *total > 0);
        let reservation = Reservation::new(context, total.ok_or(ClientError::Size { bytes })?)?;
        Ok(Self {
            mappings: Vec::with_capacity(count),
            next: reservation.address(),
            _reservation: reservation,
            context,
            bytes,
            write,
            import_and_map: Vec::with_capacity(count),
            set_access: Vec::with_capacity(count),
        })
    }

    fn add(&mut self, file: &OwnedFd) -> Result<(), ClientError> {
        let started = Instant::now();
        self.mappings.push(Mapping::import(self.context, file, self.bytes, self.next)?);
        let mapped = Instant::now();
        self.context.set_access(self.next, self.bytes, self.write)?;
        self.set_access.push(mapped.elapsed());
        self.import_and_map.push(mapped - started);
        self.next += self.bytes;
        Ok(())
    }

    fn floor(self) -> MappingFloor {
        MappingFloor {
            import_and_map: middle(self.import_and_map),
            set_access: middle(self.set_access),
            ..MappingFloor::default()
        }
    }
}

fn middle(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

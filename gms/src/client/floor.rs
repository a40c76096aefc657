//! What the driver itself takes for a mapping: no client of a server can be quicker.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use super::ClientError;
use crate::cuda::{Context, Cuda, Mapping, PhysicalHandle, Reservation};

/// The driver's calls for a mapping, each at the median.
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
    /// What a writer cannot do without.
    pub fn writer(&self) -> Duration {
        self.create + self.export + self.reader()
    }

    /// What a reader cannot do without.
    pub fn reader(&self) -> Duration {
        self.import_and_map + self.set_access
    }

    /// The middle ones of several, each by itself.
    pub fn middle(of: &[Self]) -> Self {
        Self::of([
            of.iter().map(|floor| floor.create).collect(),
            of.iter().map(|floor| floor.export).collect(),
            of.iter().map(|floor| floor.import_and_map).collect(),
            of.iter().map(|floor| floor.set_access).collect(),
        ])
    }

    fn of(times: [Vec<Duration>; 4]) -> Self {
        let [create, export, import_and_map, set_access] = times.map(|mut times| {
            times.sort_unstable();
            times.get(times.len() / 2).copied().unwrap_or_default()
        });
        Self { create, export, import_and_map, set_access }
    }

    /// Makes as much memory as there are descriptors, of so many bytes each, and maps what the
    /// descriptors name, one after the other, also for writing if that is said. Everything is given back.
    ///
    /// # Errors
    /// [`ClientError::Cuda`], [`ClientError::Size`].
    pub fn measure(
        driver: &cuda_sys::Driver,
        ordinal: u32,
        bytes: u64,
        files: &[OwnedFd],
        write: bool,
    ) -> Result<Self, ClientError> {
        let context = Context::retain(&Cuda::open(driver, ordinal)?)?;
        let _current = context.enter()?;
        let total = bytes.checked_mul(files.len() as u64).filter(|total| *total > 0);
        let reservation = Reservation::new(&context, total.ok_or(ClientError::Size { bytes })?)?;
        // Kept to the end, so that nothing is timed but what is named.
        let (mut handles, mut mappings, mut exported) = (Vec::new(), Vec::new(), Vec::new());
        let mut times: [Vec<Duration>; 4] = Default::default();
        let mut at = reservation.address();
        for file in files {
            let started = Instant::now();
            let handle = PhysicalHandle::create(context.cuda(), bytes)?;
            let created = Instant::now();
            exported.push(handle.export()?);
            let out = Instant::now();
            mappings.push(Mapping::import(&context, file, bytes, at)?);
            let mapped = Instant::now();
            context.set_access(at, bytes, write)?;
            let opened = Instant::now();
            handles.push(handle);
            at += bytes;
            let ends = [started, created, out, mapped, opened];
            for (times, ends) in times.iter_mut().zip(ends.windows(2)) {
                times.push(ends[1] - ends[0]);
            }
        }
        // Before the addresses go.
        drop(mappings);
        Ok(Self::of(times))
    }
}

//! The pools that everybody finds by their device: its default one and its current one.

use super::Pool;
use super::registry::Registry;
use crate::default::PoolConfig;
use crate::device::Device;
use crate::error::Result;

impl Pool {
    /// The device's default pool, made by [`Pool::new`] with default settings when it is first asked
    /// for: one for each device of a [`Driver`](crate::Driver) and its clones, however often the device
    /// was opened. What `cuDeviceGetDefaultMemPool` is to the driver's pools.
    ///
    /// The driver's value keeps it, and so keeps itself, until [`forget_current`](Self::forget_current)
    /// or the process ends.
    ///
    /// # Errors
    /// Those of [`Pool::new`], when it is made.
    pub fn default_of(device: &Device) -> Result<Self> {
        device.driver().check_process()?;
        let registry = Registry::of(device.driver());
        let ordinal = device.ordinal();
        let known = registry.read().devices.get(&ordinal).and_then(|of| of.default.clone());
        if let Some(pool) = known {
            return Ok(pool);
        }
        // Without the lock, which is for look-ups: the loser of two threads gives its pool back.
        let made = Self::new(device, &PoolConfig::default())?;
        let mut book = registry.write();
        Ok(book
            .devices
            .entry(ordinal)
            .or_default()
            .default
            .get_or_insert_with(|| made.clone())
            .clone())
    }

    /// The device's current pool: the one that was [made current](Self::make_current) last, else the
    /// [default one](Self::default_of). The same for all threads.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let sim = cuda_sim::Simulator::builder().build()?;
    /// # let driver = vpmm::Driver::new(sim.driver())?;
    /// # let device = driver.device(0)?;
    /// # let stream = device.stream()?;
    /// use vpmm::{Pool, PoolConfig};
    ///
    /// let ptr = Pool::current(&device)?.malloc(1 << 20, &stream)?;
    /// let own = Pool::new(&device, &PoolConfig::default())?;
    /// {
    ///     let _scope = own.current_for_scope();
    ///     assert_eq!(Pool::current(&device)?, own);
    /// }
    /// assert_ne!(Pool::current(&device)?, own);
    /// Pool::current(&device)?.free(ptr, &stream)?;
    /// Pool::forget_current(&device);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Those of [`Pool::new`], when the default pool is made.
    pub fn current(device: &Device) -> Result<Self> {
        device.driver().check_process()?;
        let registry = Registry::of(device.driver());
        let current = |of: &super::registry::OfDevice| of.current.clone();
        let known = registry.read().devices.get(&device.ordinal()).and_then(current);
        known.map_or_else(|| Self::default_of(device), Ok)
    }

    /// Makes this its device's current pool, for all threads; returns the one that was made current
    /// before, `None` where it was the default pool. The driver's value keeps a handle of the current
    /// pool. What `cuDeviceSetMemPool` is to the driver's pools.
    pub fn make_current(&self) -> Option<Self> {
        self.check_process().ok()?;
        let mut book = self.registry().write();
        let of = book.devices.entry(self.device().ordinal()).or_default();
        let former = of.current.replace(self.clone());
        drop(book);
        former
    }

    /// [Makes this the current pool](Self::make_current) until the guard is dropped, which makes the
    /// former one current again; unless somebody has made another one current meanwhile.
    pub fn current_for_scope(&self) -> CurrentPool {
        CurrentPool { former: self.make_current(), pool: self.clone() }
    }

    /// Lets go of the device's current and default pool: the next question for either makes a new
    /// default pool. Each goes on for whoever has a handle or an allocation of it.
    pub fn forget_current(device: &Device) {
        if device.driver().check_process().is_err() {
            return;
        }
        let registry = Registry::of(device.driver());
        let gone = registry.write().devices.remove(&device.ordinal());
        // Without the lock: this may be the end of both.
        drop(gone);
    }
}

/// Keeps a pool current: see [`Pool::current_for_scope`].
#[must_use = "dropping it makes the former pool current again"]
#[derive(Debug)]
pub struct CurrentPool {
    pool: Pool,
    former: Option<Pool>,
}

impl Drop for CurrentPool {
    fn drop(&mut self) {
        if self.pool.check_process().is_err() {
            return;
        }
        let mut book = self.pool.registry().write();
        let ordinal = self.pool.device().ordinal();
        let Some(of) = book.devices.get_mut(&ordinal) else { return };
        if of.current.as_ref() == Some(&self.pool) {
            // Not its last handle, which is here.
            of.current = self.former.take();
        }
    }
}

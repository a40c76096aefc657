//! Every pool of a driver: by address, by device, and those that nobody has a handle of.
//!
//! ```text
//! Pool ─┬─▶ Handles ──▶ Family ──▶ heap        handles of a pool; its end is the last handle's drop
//! Pool ─┘      ▲           ▲
//!              ┊           ┊ (owned while there is no handle and something is allocated)
//!           Registry ──────┘                   one for each driver and its clones
//! ```
//!
//! What the registry owns keeps the driver alive, which owns the registry: such a ring ends when the
//! last allocation is freed, or another pool is made current.
//!
//! The lock is held for look-ups only: no driver call is made under it, and no pool ends under it. A free's hit needs
//! neither it nor a handle: [`ByAddress`].

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};

use super::by_address::ByAddress;
use super::family::Family;
use super::{Pool, Profile};
use crate::driver::Driver;
use crate::sharing::Span;

/// A driver's pools.
#[derive(Default)]
pub(super) struct Registry {
    book: RwLock<Book>,
    /// Pools of the default profile, from their first handle to the drop of the last one.
    pub(super) by_address: ByAddress,
}

#[derive(Default)]
pub(super) struct Book {
    last_id: u64,
    pools: BTreeMap<u64, Entry>,
    /// Reservations by their start, as far as they are known.
    windows: BTreeMap<u64, Window>,
    /// The default and the current pool by the device's number.
    pub(super) devices: BTreeMap<u32, OfDevice>,
}

/// A device's pools that everybody finds.
#[derive(Default)]
pub(super) struct OfDevice {
    pub(super) default: Option<Pool>,
    /// In place of the default one.
    pub(super) current: Option<Pool>,
}

struct Entry {
    family: Weak<Family>,
    /// The handles that there are, or the last that there were.
    handles: Weak<Handles>,
    /// Keeps the pool while there is no handle.
    orphan: Option<Arc<Family>>,
    /// Starts of its windows.
    windows: Vec<u64>,
}

#[derive(Clone, Copy)]
struct Window {
    bytes: u64,
    pool: u64,
}

/// The handles of a pool, from the first to the drop of the last one.
pub(super) struct Handles {
    registry: Arc<Registry>,
    id: u64,
    family: Arc<Family>,
    /// The pool ends with all that is allocated.
    ends: AtomicBool,
}

impl Drop for Handles {
    fn drop(&mut self) {
        if self.family.main().device().driver().is_forked() {
            // The parent's, and nothing that a child could end: its threads are not here.
            std::mem::forget(Arc::clone(&self.family));
            return;
        }
        if self.ends.load(Ordering::Relaxed) {
            return;
        }
        self.registry.hide(&self.family);
        // Only who has a handle can change this, and whoever gets one meanwhile decides instead.
        let in_use = self.family.is_in_use();
        if in_use {
            self.family.abandon();
        }
        if self.registry.last_handle_goes(self, in_use) {
            // Another thread may just be asking the pool about an address that is not its own. It ends
            // here, not there: streams that end after this call are not told to it any more.
            while Arc::strong_count(&self.family) > 1 {
                std::thread::yield_now();
            }
        }
    }
}

impl Registry {
    /// The registry of a driver.
    pub(super) fn of(driver: &Driver) -> &Arc<Self> {
        driver.companion()
    }

    pub(super) fn read(&self) -> RwLockReadGuard<'_, Book> {
        self.book.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn write(&self) -> RwLockWriteGuard<'_, Book> {
        self.book.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a new pool, and makes its first handle.
    pub(super) fn enter(self: &Arc<Self>, family: Arc<Family>) -> Pool {
        let windows = family.windows();
        let mut book = self.write();
        book.last_id += 1;
        let id = book.last_id;
        let handles = self.handles_of(id, &family);
        let entry = Entry {
            family: Arc::downgrade(&family),
            handles: Arc::downgrade(&handles),
            orphan: None,
            windows: Vec::new(),
        };
        book.pools.insert(id, entry);
        book.set_windows(id, &windows);
        if let (Profile::Default(core), [window]) = (family.profile(), windows.as_slice()) {
            self.by_address.add(*window, &core);
        }
        Pool { profile: family.profile(), family, handles }
    }

    /// Has every free of a pool's allocations take a handle, and waits for those that did not. Each of several last
    /// handles, of which one was made while another was on its way out.
    fn hide(&self, family: &Family) {
        if family.hidden.load(Ordering::Acquire) {
            return;
        }
        if let Profile::Default(_) = family.profile() {
            family.windows().iter().for_each(|window| self.by_address.remove(window.start));
        }
        family.hidden.store(true, Ordering::Release);
    }

    fn handles_of(self: &Arc<Self>, id: u64, family: &Arc<Family>) -> Arc<Handles> {
        let (registry, family) = (Arc::clone(self), Arc::clone(family));
        Arc::new(Handles { registry, id, family, ends: AtomicBool::new(false) })
    }

    /// A handle of a pool: one more, or the first again of one that has none.
    fn handle(self: &Arc<Self>, id: u64) -> Option<Pool> {
        if let Some(handles) = self.read().pools.get(&id)?.handles.upgrade() {
            return Some(Pool::from_handles(handles));
        }
        let mut book = self.write();
        let entry = book.pools.get_mut(&id)?;
        if let Some(handles) = entry.handles.upgrade() {
            return Some(Pool::from_handles(handles));
        }
        // The last handle may be on its way out, and the pool not an orphan yet.
        let family = entry.orphan.take().or_else(|| entry.family.upgrade())?;
        let handles = self.handles_of(id, &family);
        entry.handles = Arc::downgrade(&handles);
        Some(Pool { profile: family.profile(), family, handles })
    }

    /// The pool that an address belongs to.
    pub(super) fn find(self: &Arc<Self>, address: u64) -> Option<Pool> {
        let known = self.read().pool_at(address);
        self.handle(known.or_else(|| self.find_unknown(address))?)
    }

    /// An address that is in no window known so far: that of a reservation that a pool has made since,
    /// or of a small request, which lies in memory of the driver's.
    #[cold]
    fn find_unknown(&self, address: u64) -> Option<u64> {
        let families: Vec<(u64, Arc<Family>)> = {
            let book = self.read();
            let alive = |(id, entry): (&u64, &Entry)| Some((*id, entry.family.upgrade()?));
            book.pools.iter().filter_map(alive).collect()
        };
        let mut found = None;
        for (id, family) in &families {
            let windows = family.windows();
            self.write().set_windows(*id, &windows);
            // In the list itself: another thread may enter an older one in between.
            let holds = |window: &Span| {
                address.checked_sub(window.start).is_some_and(|offset| offset < window.bytes)
            };
            if windows.iter().any(holds) {
                found = Some(*id);
            }
        }
        found.or_else(|| {
            let holds = families.iter().find(|(_, family)| family.holds_outside(address));
            holds.map(|(id, _)| *id)
        })
    }

    /// The end of a pool (`true`), or the begin of its life without handles.
    fn last_handle_goes(&self, handles: &Handles, in_use: bool) -> bool {
        let mut book = self.write();
        let Some(entry) = book.pools.get_mut(&handles.id) else { return false };
        // Somebody may have got a handle meanwhile; whose drop this then is.
        if !std::ptr::eq(entry.handles.as_ptr(), handles) {
            return false;
        }
        if in_use {
            entry.orphan = Some(Arc::clone(&handles.family));
        } else {
            book.remove(handles.id);
        }
        !in_use
    }

    /// How many handles there are beside this one. As a device's pool it does not count.
    pub(super) fn others(&self, pool: &Pool) -> usize {
        self.read().others(pool)
    }

    /// Takes a pool out, to be ended by its last handle, which this must be; else says how many
    /// others there are. As a device's pool it does not count.
    pub(super) fn end(&self, pool: &Pool) -> Result<(), usize> {
        let mut book = self.write();
        // Nobody makes one of it now: there is none but this, and the lock is held.
        let others = book.others(pool);
        if others > 0 {
            return Err(others);
        }
        for of in book.devices.values_mut() {
            // Not the last handles: `pool` is left.
            of.default.take_if(|kept| kept == pool);
            of.current.take_if(|kept| kept == pool);
        }
        book.remove(pool.handles.id);
        pool.handles.ends.store(true, Ordering::Relaxed);
        drop(book);
        self.hide(&pool.family);
        Ok(())
    }
}

impl Book {
    fn pool_at(&self, address: u64) -> Option<u64> {
        let (start, window) = self.windows.range(..=address).next_back()?;
        (address - start < window.bytes).then_some(window.pool)
    }

    fn others(&self, pool: &Pool) -> usize {
        let of_devices = self.devices.values().flat_map(|of| [&of.default, &of.current]);
        let kept = of_devices.flatten().filter(|kept| *kept == pool).count();
        Arc::strong_count(&pool.handles) - 1 - kept
    }

    /// Enters what a pool's windows are now.
    fn set_windows(&mut self, id: u64, windows: &[Span]) {
        // A pool that has ended meanwhile has no addresses.
        let Some(entry) = self.pools.get_mut(&id) else { return };
        let starts = windows.iter().map(|window| window.start).collect();
        for gone in std::mem::replace(&mut entry.windows, starts) {
            self.windows.remove(&gone);
        }
        for window in windows {
            self.windows.insert(window.start, Window { bytes: window.bytes, pool: id });
        }
    }

    fn remove(&mut self, id: u64) {
        self.set_windows(id, &[]);
        // Not the pool's last owner: an orphan is taken out by a handle, which owns it then.
        self.pools.remove(&id);
    }
}

impl Pool {
    fn from_handles(handles: Arc<Handles>) -> Self {
        let family = Arc::clone(&handles.family);
        Self { profile: family.profile(), family, handles }
    }

    pub(super) fn registry(&self) -> &Arc<Registry> {
        &self.handles.registry
    }
}

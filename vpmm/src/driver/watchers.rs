//! Who is told about the streams that the library owns.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use smallvec::SmallVec;

use crate::device::{Device, StreamHandle};
use crate::ordering::Mark;

/// Somebody with a stake in streams that the library owns.
pub(crate) trait StreamWatcher: Send + Sync {
    /// The stream is about to be destroyed, and nobody has been told of its end yet. Who passes it on, on behalf of
    /// other threads, does so no more when this returns: whoever is below is told once.
    fn stream_leaves(&self, _stream: StreamHandle) {}

    /// Whether this thread is in a call that the stream was passed on to, and that its end waits for.
    fn has_passed_on(&self, _stream: StreamHandle) -> bool {
        false
    }

    /// The stream is about to be destroyed: the last chance to record on it.
    fn stream_ends(&self, stream: StreamHandle);

    /// The host is about to wait for this: marks of what it has seen complete then.
    fn marks(&self, of: Awaited) -> SmallVec<[Mark; 2]>;

    /// The host has waited for what was marked.
    fn passed(&self, mark: &Mark);
}

/// What the host waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Awaited {
    /// What a stream was given, of the device with this number: a default stream's handle is the same on every one.
    Stream(StreamHandle, u32),
    /// Everything in the primary context of the device with this number.
    Device(u32),
}

impl Awaited {
    /// Whether it is work of this device: a wait for another's says nothing of that.
    pub(crate) fn is_of(self, device: &Device) -> bool {
        let (Self::Stream(_, ordinal) | Self::Device(ordinal)) = self;
        ordinal == device.ordinal()
    }
}

/// Which watcher: a number that does not come again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct WatcherId(u64);

struct Entry {
    id: WatcherId,
    watcher: Weak<dyn StreamWatcher>,
    /// Calls of it that are under way.
    calls: usize,
    /// It is being removed: no more calls.
    leaves: bool,
}

#[derive(Default)]
struct List {
    last_id: u64,
    /// By their numbers, which rise.
    entries: Vec<Entry>,
}

impl List {
    fn find(&mut self, id: WatcherId) -> Option<&mut Entry> {
        let index = self.entries.binary_search_by_key(&id, |entry| entry.id).ok()?;
        self.entries.get_mut(index)
    }
}

/// The watchers of a driver.
///
/// They are called outside the lock, since they call the driver and take locks of their own; and one
/// at a time, since a call may end another watcher, which waits for the calls of that one.
#[derive(Default)]
pub(super) struct Watchers {
    list: Mutex<List>,
    /// A call of one that leaves is over.
    over: Condvar,
}

impl Watchers {
    fn list(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Once, however often: whose first heap cannot be made comes again.
    pub(super) fn add(&self, watcher: Weak<dyn StreamWatcher>) {
        let mut list = self.list();
        // Nobody else is at its address, not even when it has ended.
        let is_it = |entry: &Entry| std::ptr::addr_eq(entry.watcher.as_ptr(), watcher.as_ptr());
        if list.entries.iter().any(is_it) {
            return;
        }
        // One that was never removed, because it could not be made to the end.
        list.entries.retain(|entry| entry.calls > 0 || entry.watcher.strong_count() > 0);
        list.last_id += 1;
        let id = WatcherId(list.last_id);
        list.entries.push(Entry { id, watcher, calls: 0, leaves: false });
    }

    /// Takes a watcher out. No call of it is under way afterwards, and nobody here owns it for a
    /// moment: it ends where its owners say.
    ///
    /// Not to be called within a call of the same watcher, whose end it would wait for.
    pub(super) fn remove<T>(&self, watcher: &T) {
        // Alive, so nobody else is at its address.
        let is_it = |entry: &Entry| std::ptr::addr_eq(entry.watcher.as_ptr(), watcher);
        let mut list = self.list();
        while let Some(index) = list.entries.iter().position(is_it) {
            if list.entries[index].calls == 0 {
                list.entries.remove(index);
                return;
            }
            list.entries[index].leaves = true;
            list = self.over.wait(list).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Those that there are now.
    pub(super) fn ids(&self) -> SmallVec<[WatcherId; 8]> {
        self.list().entries.iter().map(|entry| entry.id).collect()
    }

    /// Calls a watcher, if it is still there.
    pub(super) fn call<R>(
        &self,
        id: WatcherId,
        call: impl FnOnce(&dyn StreamWatcher) -> R,
    ) -> Option<R> {
        // Declared first, so that the call is over when nothing is owned here any more.
        let _under_way;
        let watcher: Arc<dyn StreamWatcher>;
        {
            let mut list = self.list();
            let entry = list.find(id).filter(|entry| !entry.leaves)?;
            watcher = entry.watcher.upgrade()?;
            entry.calls += 1;
            _under_way = UnderWay { watchers: self, id };
        }
        Some(call(&*watcher))
    }
}

struct UnderWay<'a> {
    watchers: &'a Watchers,
    id: WatcherId,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let mut list = self.watchers.list();
        if let Some(entry) = list.find(self.id) {
            entry.calls -= 1;
            if entry.leaves {
                self.watchers.over.notify_all();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[derive(Default)]
    struct Counting(AtomicU32);

    impl StreamWatcher for Counting {
        fn stream_ends(&self, _: StreamHandle) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }

        fn marks(&self, _: Awaited) -> SmallVec<[Mark; 2]> {
            SmallVec::new()
        }

        fn passed(&self, _: &Mark) {}
    }

    #[test]
    fn one_that_is_added_again_is_told_once_and_then_nothing() {
        let (watchers, one, other) =
            (Watchers::default(), Arc::new(Counting::default()), Arc::new(Counting::default()));
        for watcher in [&one, &one, &other] {
            let watcher: Weak<dyn StreamWatcher> = Arc::downgrade(watcher) as _;
            watchers.add(watcher);
        }
        let tell = || {
            for id in watchers.ids() {
                watchers.call(id, |watcher| watcher.stream_ends(StreamHandle::LEGACY));
            }
            [&one, &other].map(|of| of.0.load(Ordering::Relaxed))
        };
        assert_eq!(tell(), [1, 1]);
        watchers.remove(&*one);
        assert_eq!(tell(), [1, 2]);
    }

    /// Each `Stream::synchronize` tells all of them, and an arena has one for each of its streams.
    #[test]
    fn telling_many_takes_no_time_by_their_square() {
        let watchers = Watchers::default();
        let many: Vec<Arc<Counting>> = (0..16_000).map(|_| Arc::default()).collect();
        for watcher in &many {
            let watcher: Weak<dyn StreamWatcher> = Arc::downgrade(watcher) as _;
            watchers.add(watcher);
        }
        // One that leaves the middle does not take the others out of their order.
        watchers.remove(&*many[8000]);
        let start = std::time::Instant::now();
        for _ in 0..50 {
            for id in watchers.ids() {
                watchers.call(id, |watcher| watcher.stream_ends(StreamHandle::LEGACY));
            }
        }
        let took = start.elapsed();
        let told = |of: &Arc<Counting>| of.0.load(Ordering::Relaxed);
        assert_eq!(many.iter().map(told).sum::<u32>(), 50 * 15_999);
        assert!(took < std::time::Duration::from_secs(2), "{took:?}");
    }
}

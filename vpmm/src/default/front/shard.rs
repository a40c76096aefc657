//! One stream's part of the pool that needs no lock: its fronts, one for each thread that uses it.

use std::mem::ManuallyDrop;
use std::ops::DerefMut;
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use super::admit::NO_KEY;
use super::{Cached, Counts, Front};
use crate::default::space::{Part, Share};
use crate::lock::{Asymmetry, Biased, BiasedGuard, Life, Ordered, Rank, Token};
use crate::pages::Pages;

/// Threads that can have a front of one stream at a time; more go to the space behind.
const SLOTS: usize = 32;

/// Places within a page where a slot may begin: 4 KiB of them.
const COLOURS: usize = 4096 / align_of::<Slot>();

/// A front with its owner. What every call needs comes first, in one line of the processor's cache.
#[repr(C, align(128))]
pub(in crate::default) struct Slot {
    /// The key of the stream's handles, as the shard has it.
    key: AtomicU64,
    owner: AtomicU64,
    /// What allocations of the stream are marked with.
    label: AtomicU32,
    /// What is in the front, for those too who only want to know whether to look.
    counts: Counts,
    front: Biased<Front>,
    /// Units in the front when the space was told last: it takes the front for that full until it is told
    /// again, though blocks go out.
    told: AtomicU32,
    /// The stream's place among the books.
    pub(in crate::default) index: u32,
    life: Mutex<Life>,
    /// What the slot is in. Of its own, so that pages are taken as they are needed: few fronts ever fill
    /// many of their stacks.
    pages: ManuallyDrop<Pages>,
}

/// Memory for a slot.
pub(super) struct Spare(Pages);

impl Spare {
    /// All of it taken already.
    pub(super) fn new() -> Option<Self> {
        let spare = Self::untouched()?;
        spare.0.populate();
        Some(spare)
    }

    fn untouched() -> Option<Self> {
        Pages::new(size_of::<Slot>() + COLOURS * align_of::<Slot>()).map(Self)
    }
}

impl Slot {
    /// A slot with an empty front, until [`drop_leaked`](Self::drop_leaked); `None` where the
    /// system has no memory for it.
    fn leak(
        shard: &Shard,
        owner: u64,
        asymmetry: Asymmetry,
        may_be_loose: bool,
        spare: &mut Option<Spare>,
    ) -> Option<*mut Self> {
        // All at the beginning of a page the fronts of many streams would take each other's place in the
        // processor's cache, which goes by the address within a page.
        let colour = shard.index as usize % COLOURS * align_of::<Self>();
        let Spare(pages) = spare.take().or_else(Spare::untouched)?;
        // SAFETY: the mapping is longer than a slot by all colours.
        let slot = unsafe { pages.start().byte_add(colour) }.cast::<Self>().as_ptr();
        // SAFETY: the memory is long enough, aligned by what a page is and a multiple of what it has to be, and
        // nobody else's; every field is written, but what of the front is zeros, which are an empty one.
        unsafe {
            (&raw mut (*slot).key).write(AtomicU64::new(shard.key.load(Ordering::Relaxed)));
            (&raw mut (*slot).owner).write(AtomicU64::new(owner));
            (&raw mut (*slot).label).write(AtomicU32::new(shard.label.load(Ordering::Relaxed)));
            (&raw mut (*slot).index).write(shard.index);
            (&raw mut (*slot).counts).write(Counts::default());
            let front = Biased::make_around(&raw mut (*slot).front, asymmetry);
            (*front).begin(may_be_loose);
            (&raw mut (*slot).told).write(AtomicU32::new(0));
            (&raw mut (*slot).life).write(Mutex::new(Life::current()));
            (&raw mut (*slot).pages).write(ManuallyDrop::new(pages));
        }
        Some(slot)
    }

    /// # Safety
    /// It was leaked, was not dropped before, and nobody has or gets a reference to it.
    unsafe fn drop_leaked(slot: *mut Self) {
        // SAFETY: by the caller's word nobody uses the slot, nor takes its pages again; these go last.
        unsafe {
            let _pages = ManuallyDrop::take(&mut (*slot).pages);
            ptr::drop_in_place(slot);
        }
    }

    /// Whether this is the front that the calling thread, by its number, has of the stream whose
    /// handles have this key.
    #[inline(always)]
    pub(super) fn is_of(&self, key: u64, thread: u64) -> bool {
        self.key.load(Ordering::Relaxed) == key && self.owner.load(Ordering::Relaxed) == thread
    }

    pub(super) fn key(&self) -> u64 {
        self.key.load(Ordering::Relaxed)
    }

    /// What allocations of the stream are marked with.
    #[inline(always)]
    pub(in crate::default) fn label(&self) -> u32 {
        self.label.load(Ordering::Relaxed)
    }

    /// The front, unless somebody has revoked it.
    ///
    /// # Safety
    /// The owner is the calling thread, and is not inside already.
    pub(in crate::default) unsafe fn enter(&self) -> Option<Entered<'_>> {
        // SAFETY: the owner calls, and changes only when it has ended; guards do not outlive a call
        // of the pool, and no call is made from within another.
        let front = unsafe { self.front.enter() }?;
        Some(Entered { slot: self, front })
    }

    /// As [`enter`](Self::enter), but only where that takes no time.
    ///
    /// # Safety
    /// As for [`enter`](Self::enter).
    #[inline(always)]
    pub(in crate::default) unsafe fn enter_at_once(&self) -> Option<Entered<'_>> {
        // SAFETY: as in `enter`.
        let front = unsafe { self.front.enter_at_once() }?;
        Some(Entered { slot: self, front })
    }
}

/// A stream's fronts.
pub(in crate::default) struct Shard {
    /// The stream's number; 0 while the shard serves none.
    stream: AtomicU64,
    /// The same, of the one before while it serves none.
    last_stream: AtomicU64,
    /// The key of the stream's handles.
    key: AtomicU64,
    /// What allocations of the stream are marked with.
    label: AtomicU32,
    /// Calls under way that count on the shard's serving their stream.
    pins: AtomicU32,
    /// Its place among the books.
    pub(in crate::default) index: u32,
    slots: [AtomicPtr<Slot>; SLOTS],
    /// Held while anything is recorded on the stream, so that the stream does not end meanwhile;
    /// at an eager stream's free until the block is entered, so that the event recorded last is
    /// behind every block.
    pub(in crate::default) eager: Ordered<()>,
}

impl Shard {
    pub(super) fn new(index: u32, stream: u64, key: u64, label: u32) -> Self {
        Self {
            stream: AtomicU64::new(stream),
            last_stream: AtomicU64::new(stream),
            key: AtomicU64::new(key),
            label: AtomicU32::new(label),
            pins: AtomicU32::new(0),
            index,
            slots: [const { AtomicPtr::new(ptr::null_mut()) }; SLOTS],
            eager: Ordered::new(Rank::Eager, ()),
        }
    }

    pub(in crate::default) fn stream(&self) -> u64 {
        self.stream.load(Ordering::Relaxed)
    }

    /// The number of the stream that the shard serves, or served last.
    pub(super) fn last_stream(&self) -> u64 {
        self.last_stream.load(Ordering::Relaxed)
    }

    /// Takes the shard from a stream that is gone. Under the registry's lock, as are claims.
    pub(super) fn forsake(&self) {
        self.set_stream(0, NO_KEY);
    }

    /// Gives the shard to a stream. Under the registry's lock.
    pub(super) fn assign(&self, stream: u64, key: u64, label: u32) {
        self.label.store(label, Ordering::Relaxed);
        self.all().for_each(|slot| slot.label.store(label, Ordering::Relaxed));
        self.last_stream.store(stream, Ordering::Relaxed);
        self.set_stream(stream, key);
    }

    fn set_stream(&self, stream: u64, key: u64) {
        self.stream.store(stream, Ordering::Relaxed);
        self.name(key);
    }

    /// Gives the shard's fronts the key that handles of its stream have. Under the registry's lock.
    pub(super) fn name(&self, key: u64) {
        self.key.store(key, Ordering::Relaxed);
        self.all().for_each(|slot| slot.key.store(key, Ordering::Relaxed));
    }

    /// Under the registry's lock, as is the look at it.
    pub(super) fn pin(&self) {
        self.pins.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn unpin(&self) {
        // Releases what the call did to whoever sees the shard unused.
        self.pins.fetch_sub(1, Ordering::Release);
    }

    pub(super) fn is_pinned(&self) -> bool {
        self.pins.load(Ordering::Acquire) > 0
    }

    fn slot(&self, place: usize) -> Option<&Slot> {
        let slot = self.slots[place].load(Ordering::Acquire);
        // SAFETY: slots are leaked, and freed when the shard is dropped.
        unsafe { slot.as_ref() }
    }

    fn all(&self) -> impl Iterator<Item = &Slot> + Clone {
        (0..SLOTS).filter_map(|place| self.slot(place))
    }

    /// The calling thread's front, where it has one.
    pub(super) fn slot_of(&self, token: Token) -> Option<&Slot> {
        let slot = self.slot(token.place(SLOTS));
        slot.filter(|slot| slot.owner.load(Ordering::Relaxed) == token.number())
    }

    /// The calling thread is inside its front, unless it has none or somebody has revoked it.
    pub(in crate::default) fn enter(&self, token: Token) -> Option<Entered<'_>> {
        let slot = self.slot_of(token)?;
        // SAFETY: the owner is the calling thread, which leaves a front before it calls further.
        unsafe { slot.enter() }
    }

    /// Gives the calling thread a front, if its place is free, or that of a thread that has ended.
    /// Under the registry's lock, so that the stream does not change meanwhile.
    ///
    /// # Safety
    /// The caller is the one thread that revokes fronts of this pool now.
    pub(super) unsafe fn claim(
        &self,
        token: Token,
        asymmetry: Asymmetry,
        may_be_loose: bool,
        spare: &mut Option<Spare>,
    ) -> bool {
        let place = token.place(SLOTS);
        let Some(slot) = self.slot(place) else {
            let leaked = Slot::leak(self, token.number(), asymmetry, may_be_loose, spare);
            let Some(slot) = leaked else { return false };
            // Claims are made one at a time, so the place is still empty.
            self.slots[place].store(slot, Ordering::Release);
            return true;
        };
        let mut life = slot.life.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if !life.has_ended() {
            return false;
        }
        // SAFETY: the caller vouches that it is the only revoker; the owner has ended. What is in
        // the front stays: it was freed on the same stream.
        unsafe { Biased::revoke(std::iter::once(&slot.front), asymmetry, |_| ()) };
        *life = Life::current();
        slot.owner.store(token.number(), Ordering::Relaxed);
        true
    }

    /// Units in all fronts, as far as one can see from outside.
    pub(in crate::default) fn units(&self) -> u64 {
        self.all().map(|slot| u64::from(slot.counts.units())).sum()
    }

    /// Reaches into every front of these shards that holds something, or that the space takes to.
    ///
    /// # Safety
    /// The calling thread is the only one that revokes, and is inside no front.
    pub(in crate::default) unsafe fn reach<'a>(
        shards: impl Iterator<Item = &'a Shard> + Clone,
        asymmetry: Asymmetry,
        mut visit: impl FnMut(&'a Shard, &mut Entered<'a, &mut Front>),
    ) {
        let held = |slot: &&Slot| slot.counts.units() > 0 || slot.told.load(Ordering::Relaxed) > 0;
        let slots = shards.flat_map(|shard| shard.all().filter(held).map(move |s| (shard, s)));
        // What is held may change until the fronts are revoked: look at one list throughout.
        let slots: smallvec::SmallVec<[(&Shard, &Slot); 8]> = slots.collect();
        if slots.is_empty() {
            return;
        }
        let mut reached = slots.iter();
        let fronts = slots.iter().map(|(_, slot)| &slot.front);
        let work = |front: &mut Front| {
            if let Some((shard, slot)) = reached.next() {
                visit(shard, &mut Entered { slot, front });
            }
        };
        // SAFETY: passed on to the caller.
        unsafe { Biased::revoke(fronts, asymmetry, work) };
    }
}

impl Drop for Shard {
    fn drop(&mut self) {
        for slot in &mut self.slots {
            let slot = std::mem::replace(slot.get_mut(), ptr::null_mut());
            if !slot.is_null() {
                // SAFETY: leaked in `claim`; nobody else can reach the shard now.
                unsafe { Slot::drop_leaked(slot) };
            }
        }
    }
}

/// The calling thread is inside its front, until drop; or inside a revoked one.
pub(in crate::default) struct Entered<'a, F = BiasedGuard<'a, Front>> {
    slot: &'a Slot,
    front: F,
}

impl<F: DerefMut<Target = Front>> Entered<'_, F> {
    #[inline(always)]
    pub(in crate::default) fn pop<const LARGE: bool>(&mut self, units: u32) -> Option<u32> {
        self.front.pop::<LARGE>(units, &self.slot.counts)
    }

    #[inline(always)]
    pub(in crate::default) fn is_loose(&self) -> bool {
        self.front.is_loose()
    }

    #[inline(always)]
    pub(in crate::default) fn pop_loose(&mut self, units: u32) -> Option<(u32, u32)> {
        self.front.pop_loose(units, &self.slot.counts)
    }

    #[inline(always)]
    pub(in crate::default) fn push<const LARGE: bool>(&mut self, start: u32, units: u32) -> bool {
        self.front.push::<LARGE>(start, units, &self.slot.counts)
    }

    pub(in crate::default) fn cached(&mut self) -> Cached {
        let cached = self.front.cached(&self.slot.counts);
        self.slot.told.store(self.front.told(), Ordering::Relaxed);
        cached
    }

    pub(in crate::default) fn take_longer(&mut self, units: u32) -> Option<(u32, u32)> {
        self.front.take_longer(units, &self.slot.counts)
    }

    pub(in crate::default) fn refuses(&self, units: u32, share: Share) -> bool {
        self.front.refuses(units, share, &self.slot.counts)
    }

    pub(in crate::default) fn make_room(
        &mut self,
        units: u32,
        share: Share,
        spill: impl FnMut(u32, u32),
    ) {
        self.front.make_room(units, share, &self.slot.counts, spill);
    }

    pub(in crate::default) fn spill(&mut self, sizes: Option<Part>, spill: impl FnMut(u32, u32)) {
        self.front.spill(sizes, &self.slot.counts, spill);
    }

    pub(in crate::default) fn blocks(&self) -> u64 {
        self.front.blocks()
    }

    /// Every block: start and units.
    pub(in crate::default) fn each(&self, visit: impl FnMut(u32, u32)) {
        self.front.each(visit);
    }

    /// Whether what the front is said to hold is what it holds.
    pub(in crate::default) fn agrees(&self) -> bool {
        self.front.agrees(&self.slot.counts)
    }
}

#[cfg(all(test, not(loom), not(miri)))]
mod tests {
    use super::*;

    /// A program of many threads and streams has thousands of fronts, most of which hold a few sizes.
    #[test]
    fn a_front_takes_pages_of_the_host_as_it_needs_them() {
        let shard = Shard::new(0, 1, 1, 0);
        let token = Token::current().unwrap();
        // SAFETY: nobody else has the shard.
        assert!(unsafe { shard.claim(token, Asymmetry::None, true, &mut None) });
        let slot = shard.slot_of(token).unwrap();
        // SAFETY: the front is this thread's, which is not inside.
        let mut front = unsafe { slot.enter() }.unwrap();
        assert!(front.push::<false>(0, 8));
        assert!(front.push::<true>(1 << 12, 1 << 12) && front.push::<true>(1 << 13, 1 << 12));
        assert_eq!(front.blocks(), 3);
        drop(front);

        // SAFETY: no arguments that matter.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap();
        let mut resident = vec![0u8; size_of::<Slot>().div_ceil(page)];
        let pages = slot.pages.start().as_ptr().cast();
        // SAFETY: the slot's own mapping, and a byte for each of its pages.
        let asked = unsafe { libc::mincore(pages, size_of::<Slot>(), resident.as_mut_ptr()) };
        assert_eq!(asked, 0);
        let touched: usize = resident.iter().map(|page| usize::from(page & 1)).sum();
        assert!((1..=5).contains(&touched), "{touched} of {} pages", resident.len());
    }

    /// A front goes to the next thread of its place when its own has ended, and only then: again and again.
    #[test]
    fn a_front_is_its_threads_to_the_end() {
        let shard = Shard::new(0, 1, 1, 0);
        let claim = || {
            let token = Token::current().unwrap();
            // SAFETY: one thread at a time claims here, and nobody revokes.
            unsafe { shard.claim(token, Asymmetry::None, true, &mut None) }
        };
        let place = Token::current().unwrap().place(SLOTS);
        // Other threads have other places, but one in so many.
        let in_place = |during: &(dyn Fn() + Sync)| {
            let tried = || {
                let here = Token::current().unwrap().place(SLOTS) == place;
                here.then(|| {
                    let claimed = claim();
                    during();
                    claimed
                })
            };
            std::iter::repeat(())
                .find_map(|()| std::thread::scope(|scope| scope.spawn(tried).join().unwrap()))
        };
        for _ in 0..2 {
            let refused = || assert_eq!(in_place(&|| ()), Some(false), "its owner lives");
            assert_eq!(in_place(&refused), Some(true));
        }
    }

    /// Who has a shortcut to a front finds it by the key of the stream that has the place now, and marks what it
    /// hands out as that one's.
    #[test]
    fn fronts_are_those_of_the_stream_that_has_the_place() {
        let shard = Shard::new(0, 1, 5, 3);
        let token = Token::current().unwrap();
        // SAFETY: nobody else has the shard.
        assert!(unsafe { shard.claim(token, Asymmetry::None, true, &mut None) });
        let slot = shard.slot_of(token).unwrap();
        let is_of = |key| slot.is_of(key, token.number());
        assert!(is_of(5) && slot.label() == 3);
        shard.forsake();
        assert!(!is_of(5) && is_of(NO_KEY) && shard.stream() == 0);
        shard.assign(2, 7, 4);
        assert!(is_of(7) && !is_of(5) && slot.label() == 4 && shard.stream() == 2);
        assert!(!slot.is_of(7, token.number() + 1));
    }
}

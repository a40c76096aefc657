//! The biased lock in every order that its threads' steps can take, and with every value that the
//! memory model lets a load read: see "Testing" in docs/design.md for how to run this.
//!
//! A model checker knows fences, not `membarrier`. That is modelled by what the kernel promises:
//! between the call's beginning and its end every other thread passes a full fence somewhere among
//! its steps, or is off its processor, which takes one too. So a thread of a model asks at each of
//! the places where a fence can make a difference whether a call is under way, and fences if so
//! ([`interrupt`]); the call waits for that ([`membarrier`]). The checker tries every place. An owner
//! runs no other fence then.

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use loom::sync::{Arc, Mutex};
use loom::thread;

use super::{Asymmetry, Biased};

/// The kernel, for models with one owner.
struct Kernel {
    /// Calls of `membarrier`, ever.
    calls: AtomicUsize,
    /// Calls that the owner has fenced for.
    served: AtomicUsize,
    /// Whether the owner is on a processor.
    runs: AtomicBool,
}

loom::lazy_static! {
    static ref KERNEL: Kernel = Kernel {
        calls: AtomicUsize::new(0),
        served: AtomicUsize::new(0),
        runs: AtomicBool::new(true),
    };
}

pub(super) fn register() -> bool {
    true
}

/// A step of the owner's at which a call may fence.
pub(super) fn interrupt() {
    let calls = KERNEL.calls.load(Ordering::Relaxed);
    if calls != KERNEL.served.load(Ordering::Relaxed) {
        fence(Ordering::SeqCst);
        KERNEL.served.store(calls, Ordering::Relaxed);
    }
}

/// The owner leaves its processor for good.
fn switched_out() {
    fence(Ordering::SeqCst);
    KERNEL.runs.store(false, Ordering::Relaxed);
}

/// The call, as one revoker at a time makes it.
pub(super) fn membarrier() {
    fence(Ordering::SeqCst);
    let call = KERNEL.calls.load(Ordering::Relaxed) + 1;
    KERNEL.calls.store(call, Ordering::Relaxed);
    while KERNEL.served.load(Ordering::Relaxed) != call && KERNEL.runs.load(Ordering::Relaxed) {
        thread::yield_now();
    }
    fence(Ordering::SeqCst);
}

/// A number that the checker watches: two unordered accesses fail the model.
struct Count(UnsafeCell<u64>);

impl Count {
    fn new() -> Self {
        Self(UnsafeCell::new(0))
    }

    fn add(&self) {
        // SAFETY: the lock under test has to see to it that nobody else is here; the checker fails
        // where it does not.
        self.0.with_mut(|count| unsafe { *count += 1 });
    }

    fn get(&self) -> u64 {
        // SAFETY: as above.
        self.0.with(|count| unsafe { *count })
    }
}

/// A lock of one front, with what the pool has around it.
struct Place {
    asymmetry: Asymmetry,
    /// Held by whoever revokes.
    revoking: Mutex<()>,
    lock: Biased<Count>,
}

impl Place {
    fn new(asymmetry: Asymmetry) -> Arc<Self> {
        let lock = Biased::new(Count::new(), asymmetry);
        Arc::new(Self { asymmetry, revoking: Mutex::new(()), lock })
    }

    /// The owner's way in, once; whether it was let in.
    fn enter(&self) -> bool {
        // SAFETY: each model has one owner at a time, and no guard outlives the call.
        let guard = unsafe {
            match self.asymmetry {
                Asymmetry::Kernel => self.lock.enter_at_once(),
                // Where owners fence the other way in is never open.
                Asymmetry::None => self.lock.enter(),
            }
        };
        let entered = guard.is_some();
        if let Some(count) = guard {
            self.interrupt();
            count.add();
        }
        self.interrupt();
        entered
    }

    fn interrupt(&self) {
        if self.asymmetry == Asymmetry::Kernel {
            interrupt();
        }
    }

    /// The owner's life: two entries.
    fn own(&self) -> u64 {
        self.interrupt();
        let entered = (0..2).map(|_| u64::from(self.enter())).sum();
        if self.asymmetry == Asymmetry::Kernel {
            switched_out();
        }
        entered
    }

    fn revoke(&self, work: impl FnMut(&mut Count)) {
        let _only = self.revoking.lock().unwrap();
        // SAFETY: `revoking` is held; the thread is not inside.
        unsafe { Biased::revoke(std::iter::once(&self.lock), self.asymmetry, work) };
    }

    /// What the number is, after everybody has ended.
    fn total(&self) -> u64 {
        let mut total = 0;
        self.revoke(|count| total = count.get());
        total
    }
}

/// At most so many threads are stopped where they could go on: else three are too many to try all.
fn bounded() -> loom::model::Builder {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model
}

fn join(thread: thread::JoinHandle<u64>) -> u64 {
    thread.join().unwrap()
}

/// An owner comes and goes, and again, while another thread reaches in.
fn an_owner_and_a_revoker(asymmetry: Asymmetry) {
    loom::model(move || {
        let place = Place::new(asymmetry);
        let owner = thread::spawn({
            let place = Arc::clone(&place);
            move || place.own()
        });
        place.revoke(|count| count.add());
        let entered = join(owner);
        assert_eq!(place.total(), entered + 1);
    });
}

#[test]
fn an_owner_and_a_revoker_with_fences() {
    an_owner_and_a_revoker(Asymmetry::None);
}

#[test]
fn an_owner_and_a_revoker_with_the_kernel() {
    an_owner_and_a_revoker(Asymmetry::Kernel);
}

/// Two revokers, one after the other in either order, and an owner: what the first restores the
/// second revokes.
fn an_owner_and_two_revokers(asymmetry: Asymmetry) {
    bounded().check(move || {
        let place = Place::new(asymmetry);
        let owner = thread::spawn({
            let place = Arc::clone(&place);
            move || place.own()
        });
        let revoker = thread::spawn({
            let place = Arc::clone(&place);
            move || place.revoke(|count| count.add())
        });
        place.revoke(|count| count.add());
        revoker.join().unwrap();
        let entered = join(owner);
        assert_eq!(place.total(), entered + 2);
    });
}

#[test]
fn an_owner_and_two_revokers_with_fences() {
    an_owner_and_two_revokers(Asymmetry::None);
}

#[test]
fn an_owner_and_two_revokers_with_the_kernel() {
    an_owner_and_two_revokers(Asymmetry::Kernel);
}

/// A thread ends that owned the place; another sees that and takes the place over, as a shard's
/// `claim` does, while a third reaches in. Nothing orders the two owners but the revocation: that
/// the first has ended is seen by a relaxed load, as of a count of references.
#[test]
fn a_place_goes_from_a_thread_that_has_ended_to_another() {
    bounded().check(|| {
        let place = Place::new(Asymmetry::None);
        let alive = Arc::new(AtomicBool::new(true));
        let first = thread::spawn({
            let (place, alive) = (Arc::clone(&place), Arc::clone(&alive));
            move || {
                let entered = place.enter();
                alive.store(false, Ordering::Relaxed);
                u64::from(entered)
            }
        });
        let second = thread::spawn({
            let place = Arc::clone(&place);
            move || {
                if alive.load(Ordering::Relaxed) {
                    return 0;
                }
                place.revoke(|_| ());
                u64::from(place.enter())
            }
        });
        place.revoke(|count| count.add());
        let added = join(first) + join(second);
        assert_eq!(place.total(), added + 1);
    });
}

/// Several locks are revoked by one fence, and restored one by one.
#[test]
fn two_owners_and_one_revoker_of_both() {
    bounded().check(|| {
        let places = [Place::new(Asymmetry::None), Place::new(Asymmetry::None)];
        let owners = places.each_ref().map(|place| {
            let place = Arc::clone(place);
            thread::spawn(move || u64::from(place.enter()))
        });
        let locks = places.iter().map(|place| &place.lock);
        // SAFETY: the only revoker, and inside neither.
        unsafe { Biased::revoke(locks, Asymmetry::None, |count| count.add()) };
        for (place, owner) in places.iter().zip(owners) {
            let entered = join(owner);
            assert_eq!(place.total(), entered + 1);
        }
    });
}

//! What PyTorch's `CUDAPluggableAllocator` calls for a `MemPool` whose memory is the service's, and the
//! process's own [`heap`](super::heap): each of the pool's segments is an allocation of a writer's layout,
//! or a scratch mapping.
//!
//! 1. An allocation comes from the manager whose pool the thread uses, or, in a thread that uses none
//!    (autograd's, say), from the only one in use.
//! 2. A free finds its manager by the address. It waits for nobody: where another call has the manager,
//!    which may be waiting for Python's lock that this thread holds, the address is taken down and freed
//!    later: with the next request or free, and before a layout is sealed or published.
//! 3. What is freed while its manager does not write, or has lost its server, stays mapped, or reserved, until
//!    it writes anew or ends: the layout's other addresses go with it.
//! 4. Where the program gives an address up by itself, or the manager ends, before PyTorch has given that back, it is
//!    nobody else's until then.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};

use gms::client::{ClientError, KeptAddresses, MemoryManager};
use gms::lock::Granted;

use super::{Held, Shared, vpmm_gms};
use crate::guard::{Failure, given, guard, text};
use crate::status::vpmm_status;
use crate::torch::{guarded, tell_failed_free, throw};

type Owner = Weak<Mutex<Option<MemoryManager>>>;

/// Where a pool's memory comes from.
struct Source {
    /// Tells it from all others.
    number: u64,
    manager: Shared,
    tag: String,
    scratch: bool,
}

/// What all threads know.
#[derive(Default)]
struct Registry {
    /// The pools in use, however often.
    used: Vec<Arc<Source>>,
    /// Whose memory is at an address that PyTorch has.
    owners: HashMap<u64, Owner>,
    /// What PyTorch gave back of each manager's, and that is there still.
    given: Vec<Given>,
    /// Addresses that PyTorch has of managers that have ended.
    left: HashMap<u64, KeptAddresses>,
}

/// Addresses of one manager's that PyTorch gave back.
struct Given {
    owner: Owner,
    /// Those that nobody has tried to free yet.
    fresh: BTreeSet<u64>,
    /// Those that stay until the manager writes.
    kept: BTreeSet<u64>,
}

impl Registry {
    fn given(&mut self, shared: &Shared) -> Option<&mut Given> {
        self.given.iter_mut().find(|given| is(&given.owner, shared))
    }

    fn give_back(&mut self, shared: &Shared, address: u64) {
        if let Some(given) = self.given(shared) {
            given.fresh.insert(address);
            return;
        }
        // Of managers that have ended everything is gone.
        self.given.retain(|given| given.owner.strong_count() > 0);
        self.given.push(Given {
            owner: Arc::downgrade(shared),
            fresh: BTreeSet::from([address]),
            kept: BTreeSet::new(),
        });
    }

    /// Takes out what may be freed now.
    fn take(&mut self, shared: &Shared, writes: bool) -> BTreeSet<u64> {
        let Some(given) = self.given(shared) else { return BTreeSet::new() };
        let mut taken = std::mem::take(&mut given.fresh);
        if writes {
            taken.append(&mut given.kept);
        }
        taken
    }

    fn keep(&mut self, shared: &Shared, addresses: impl Iterator<Item = u64>) {
        if let Some(given) = self.given(shared) {
            given.kept.extend(addresses);
        }
    }
}

static REGISTRY: Mutex<Option<Registry>> = Mutex::new(None);

/// The process that has begun to use pools, if any has.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Whether this is a child of that one: the managers are its parent's, whose threads may hold any lock for ever.
fn is_childs() -> bool {
    let process = PROCESS.load(Ordering::Relaxed);
    process != 0 && process != std::process::id()
}

/// The pools that a thread uses, the innermost last. One that ends uses none any more.
struct Used(Vec<Arc<Source>>);

impl Drop for Used {
    fn drop(&mut self) {
        self.0.drain(..).for_each(|source| forget_use(&source));
    }
}

thread_local! {
    static USED_HERE: RefCell<Used> = const { RefCell::new(Used(Vec::new())) };
}

/// Does something short with the registry.
fn registry<T>(work: impl FnOnce(&mut Registry) -> T) -> T {
    let mut registry: MutexGuard<'_, _> = REGISTRY.lock().unwrap_or_else(PoisonError::into_inner);
    work(registry.get_or_insert_default())
}

fn is(owner: &Owner, shared: &Shared) -> bool {
    ptr::eq(owner.as_ptr(), Arc::as_ptr(shared))
}

/// Has allocations of PyTorch's in this thread come from a manager, until `vpmm_gms_torch_end`: as
/// allocations of a tag, or with `scratch` (1) as scratch mappings for them.
///
/// # Safety
/// `gms` is null or a handle; `tag` is null or ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_torch_begin(
    gms: *const vpmm_gms,
    tag: *const c_char,
    scratch: u32,
) -> vpmm_status {
    guard(|| {
        // SAFETY: the caller vouches for both.
        let (gms, tag) = unsafe { (given(gms, "gms")?, text(tag, "tag")?) };
        gms.begin_torch(tag, scratch != 0).map(drop)
    })
}

impl vpmm_gms {
    /// Answers what [`end`] takes.
    pub(crate) fn begin_torch(&self, tag: &str, scratch: bool) -> Result<u64, Failure> {
        static NUMBERS: AtomicU64 = AtomicU64::new(1);
        self.loaded.check_process()?;
        PROCESS.store(std::process::id(), Ordering::Relaxed);
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        let (manager, tag) = (Arc::clone(&self.manager), tag.to_owned());
        let source = Arc::new(Source { number, manager, tag, scratch });
        registry(|registry| registry.used.push(Arc::clone(&source)));
        USED_HERE.with_borrow_mut(|used| used.0.push(source));
        Ok(number)
    }
}

/// Ends what this thread has begun, wherever it is among the others; nothing where another thread has.
pub(crate) fn end(number: u64) {
    let ended = USED_HERE.try_with(|used| {
        let used = &mut used.borrow_mut().0;
        let at = used.iter().rposition(|source| source.number == number)?;
        Some(used.remove(at))
    });
    if let Some(source) = ended.ok().flatten() {
        forget_use(&source);
    }
}

/// A thread uses a pool no more.
fn forget_use(source: &Arc<Source>) {
    // A thread of the parent may have the registry for ever.
    if is_childs() {
        return;
    }
    registry(|registry| {
        let at = registry.used.iter().rposition(|used| Arc::ptr_eq(used, source));
        at.map(|at| registry.used.remove(at));
    });
}

/// Ends what this thread began last.
#[unsafe(no_mangle)]
pub extern "C" fn vpmm_gms_torch_end() -> vpmm_status {
    guard(|| {
        let Some(source) = USED_HERE.with_borrow_mut(|used| used.0.pop()) else {
            let text = "this thread has begun nothing";
            return Err(Failure::new(vpmm_status::VPMM_BAD_STATE, text));
        };
        forget_use(&source);
        Ok(())
    })
}

fn source() -> Result<Arc<Source>, Failure> {
    if is_childs() {
        return Err(vpmm_core::Error::Forked.into());
    }
    if let Some(source) = USED_HERE.with_borrow(|used| used.0.last().cloned()) {
        return Ok(source);
    }
    registry(|registry| match registry.used.as_slice() {
        [only] => Ok(Arc::clone(only)),
        _ => {
            Err(Failure::new(vpmm_status::VPMM_BAD_STATE, "no pool of the service is in use here"))
        }
    })
}

/// Makes an allocation with the manager that this thread uses: its address.
pub(super) fn allocate(bytes: usize, device: u32) -> Result<u64, Failure> {
    let source = source()?;
    let mut held = Held::of(&source.manager)?;
    let manager = held.manager()?;
    if device != manager.ordinal() {
        let text = format!("the pool is of device {}", manager.ordinal());
        return Err(Failure::new(vpmm_status::VPMM_INVALID_ARGUMENT, text));
    }
    settle(&source.manager, manager);
    let bytes = bytes as u64;
    let made = match source.scratch {
        true => manager.create_scratch_mapping(bytes, &source.tag),
        false => manager.create_mapping(bytes, &source.tag),
    };
    let address = made.map_err(out_of_memory)?;
    registry(|registry| registry.owners.insert(address, Arc::downgrade(&source.manager)));
    Ok(address)
}

/// The service says that there is too little memory in words; PyTorch's programs look for the kind of
/// error.
fn out_of_memory(error: ClientError) -> Failure {
    let is_full = match &error {
        ClientError::Refused { error } => {
            error.starts_with("Timed out waiting for GPU memory")
                || error.starts_with("More than the device has")
        }
        ClientError::Cuda(error) => error.is_out_of_memory(),
        _ => false,
    };
    match is_full {
        true => Failure::new(vpmm_status::VPMM_OUT_OF_MEMORY, error.to_string()),
        false => error.into(),
    }
}

/// Whether what is freed can be freed now. Not over a connection that has failed: the lock that it had is no more.
fn writes(manager: &MemoryManager) -> bool {
    manager.granted_lock() == Some(Granted::Rw) && !manager.is_broken()
}

/// Frees what was given back meanwhile, as far as that can be now.
pub(super) fn settle(shared: &Shared, manager: &mut MemoryManager) {
    let writes = writes(manager);
    let mut stays = registry(|registry| registry.take(shared, writes));
    stays.retain(|address| !release(manager, *address));
    if !stays.is_empty() {
        registry(|registry| registry.keep(shared, stays.into_iter()));
    }
}

/// The program has given an address up by itself, which `kept` keeps. Where PyTorch has it still, it is nobody else's
/// before that gives it back.
pub(super) fn forget(shared: &Shared, address: u64, kept: Option<KeptAddresses>) {
    // Outside of the registry: where nothing else has them the driver is asked.
    let unused = registry(|registry| {
        if let Some(given) = registry.given(shared) {
            given.fresh.remove(&address);
            given.kept.remove(&address);
        }
        if !registry.owners.get(&address).is_some_and(|owner| is(owner, shared)) {
            return kept;
        }
        registry.owners.remove(&address);
        kept.and_then(|kept| registry.left.insert(address, kept))
    });
    drop(unused);
}

/// A manager is about to end before tensors, or pools, that have memory of it: their addresses are nobody else's before
/// they give them back.
pub(super) fn leave(shared: &Shared, manager: &MemoryManager) {
    registry(|Registry { owners, left, .. }| {
        owners.retain(|address, owner| {
            let is_its = is(owner, shared);
            if let Some(kept) = manager.keep_addresses(*address).filter(|_| is_its) {
                left.insert(*address, kept);
            }
            !is_its
        });
    });
}

/// Frees what `allocate` has made, now or later.
pub(super) fn give_back(address: u64) {
    // The memory is the parent's, and its addresses here are none.
    if is_childs() {
        return;
    }
    // At once: were the program to give the address up in between, another allocation could be there.
    let (left, owner) = registry(|registry| {
        let left = registry.left.remove(&address);
        let shared = registry.owners.remove(&address).and_then(|owner| owner.upgrade());
        shared.iter().for_each(|shared| registry.give_back(shared, address));
        (left, shared)
    });
    // Of a manager that has ended, with everything else.
    drop(left);
    let Some(shared) = owner else { return };
    let held = match shared.try_lock() {
        Ok(held) => held,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => return,
    };
    let mut held = Held::at_once(held);
    if let Ok(manager) = held.manager() {
        settle(&shared, manager);
    }
}

/// Frees an address; false if it has to stay for now.
fn release(manager: &mut MemoryManager, address: u64) -> bool {
    let released = match manager.destroy_scratch_mapping(address) {
        Ok(true) => Ok(()),
        Ok(false) if !writes(manager) => return false,
        Ok(false) => match manager.destroy_mapping(address) {
            // An address of a layout before this one, which the server knows no allocation for.
            Err(ClientError::Refused { .. }) => manager.free_address(address),
            done => done,
        },
        Err(error) => Err(error),
    };
    match released {
        // Taken away by its address already.
        Ok(()) | Err(ClientError::UnknownAddress { .. }) => {}
        Err(_) if manager.is_broken() => return false,
        Err(error) => {
            let pointer = ptr::without_provenance_mut(address as usize);
            tell_failed_free(pointer, manager.ordinal() as c_int, &error.into());
        }
    }
    true
}

/// A PyTorch pool's `alloc`, for `CUDAPluggableAllocator`. Throws.
///
/// # Safety
/// The caller is C++, or built to be unwound through.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn vpmm_gms_torch_alloc(
    size: isize,
    device: c_int,
    stream: *mut c_void,
) -> *mut c_void {
    // The memory is fresh, so that no stream has to be waited for.
    let _ = stream;
    // What is negative is no size, and no device either.
    match guarded(|| allocate(size as usize, device as u32)) {
        Ok(address) => ptr::without_provenance_mut(address as usize),
        Err(failure) => {
            let text = format!(
                "CUDA out of memory. Tried to allocate {size} bytes on device {device} from the GPU \
                 memory service."
            );
            throw(match failure.status() {
                vpmm_status::VPMM_OUT_OF_MEMORY => failure.under(text),
                _ => failure.under(format!(
                    "vpmm: {size} bytes on device {device} could not be had from the GPU memory service"
                )),
            });
            ptr::null_mut()
        }
    }
}

/// A PyTorch pool's `free`. Throws nothing, and waits for no other call.
///
/// # Safety
/// The pointer is `vpmm_gms_torch_alloc`'s, or null, and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_torch_free(
    pointer: *mut c_void,
    size: isize,
    device: c_int,
    stream: *mut c_void,
) {
    let _ = (size, stream);
    let address = pointer.addr() as u64;
    let done = guarded(|| {
        give_back(address);
        Ok(())
    });
    if let Err(failure) = done {
        tell_failed_free(pointer, device, &failure);
    }
}

/// For tests: held by each that uses a pool of the service, or that depends on nobody's doing so. The addresses of one
/// simulator are those of the other's, too, and the only pool in use is every thread's.
#[cfg(test)]
pub(super) fn alone() -> std::sync::MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::Arc;
    use std::time::Duration;

    use gms::client::{ConnectOptions, runtime_state};
    use gms::lock::Requested;
    use gms::memory::Memory;
    use gms::server::{Server, Settings};

    use super::end as end_use;
    use super::*;
    use crate::driver::Loaded;
    use crate::service::{
        vpmm_gms_close, vpmm_gms_commit, vpmm_gms_commit_layout, vpmm_gms_destroy_mapping,
        vpmm_gms_free_address, vpmm_gms_reallocate_all, vpmm_gms_remap_all, vpmm_gms_unmap,
        vpmm_gms_unmap_all,
    };

    /// A client of a server of its own, whose socket is there; and what ends that, after the client.
    fn served(name: &str) -> (vpmm_gms, PathBuf, impl FnOnce() + use<>) {
        let loaded = Loaded::load(Some("sim")).ok().unwrap();
        let socket = format!("vpmm-{name}-{}.sock", std::process::id());
        let socket = std::env::temp_dir().join(socket);
        let memory = Memory::open(loaded.raw(), 0).unwrap();
        let server = Server::bind(memory, Settings::new(&socket)).unwrap();
        let stopper = server.stopper();
        let server = std::thread::spawn(move || server.run());
        let manager = MemoryManager::new(loaded.raw(), 0, &socket).unwrap();
        let gms = vpmm_gms {
            manager: Arc::new(Mutex::new(Some(manager))),
            answer_time: Mutex::new(None),
            is_interruptible: false.into(),
            check: Mutex::new(None),
            loaded,
        };
        let end = move || {
            stopper.stop();
            server.join().unwrap().unwrap();
        };
        (gms, socket, end)
    }

    /// A tensor that goes while another call has the manager, of whatever thread, is none of what is published
    /// after that call.
    #[test]
    fn what_was_freed_during_another_call_is_not_published() {
        let _alone = alone();
        let (gms, socket, end) = served("freed");
        let time = Duration::from_secs(30);
        let left = || runtime_state(&socket, time).unwrap().allocation_count;
        for seals in [true, false] {
            let [kept, freed] = {
                let mut held = gms.held().ok().unwrap();
                let manager = held.manager().ok().unwrap();
                let options = ConnectOptions::new(Requested::Rw).timeout(time);
                manager.connect(options).unwrap();
                [(); 2].map(|()| manager.create_mapping(1, "weights").unwrap())
            };
            for address in [kept, freed] {
                registry(|all| all.owners.insert(address, Arc::downgrade(&gms.manager)));
            }
            let another = gms.held().ok().unwrap();
            give_back(freed);
            drop(another);
            assert_eq!(left(), 2, "it waits for nobody");
            if seals {
                // SAFETY: a handle; null is for nothing.
                let sealed = unsafe { vpmm_gms_commit_layout(&gms, None, ptr::null_mut()) };
                assert_eq!((sealed, left()), (vpmm_status::VPMM_OK, 1));
                gms.held().ok().unwrap().manager().ok().unwrap().abort();
            } else {
                // SAFETY: a handle.
                let published = unsafe { vpmm_gms_commit(&gms) };
                assert_eq!((published, left()), (vpmm_status::VPMM_OK, 1));
            }
            assert!(gms.held().ok().unwrap().manager().ok().unwrap().allocation_at(kept).is_some());
        }
        drop(gms);
        end();
    }

    /// The program has taken a mapping away by itself that a pool of PyTorch's still has, unused. When the pool lets
    /// go of it another allocation may be at that address.
    #[test]
    fn an_address_that_was_given_up_is_no_pools_any_more() {
        let _alone = alone();
        let (gms, _socket, end) = served("given-up");
        // Of its own addresses, which the driver gives out again.
        const BYTES: u64 = 300 << 20;
        let create = || {
            let mut held = gms.held().ok().unwrap();
            held.manager().ok().unwrap().create_mapping(BYTES, "weights").unwrap()
        };
        let options = ConnectOptions::new(Requested::Rw);
        gms.held().ok().unwrap().manager().ok().unwrap().connect(options).unwrap();
        for (was_freed, splits) in [(false, false), (true, false), (false, true)] {
            let segment = create();
            registry(|all| all.owners.insert(segment, Arc::downgrade(&gms.manager)));
            if was_freed {
                let another = gms.held().ok().unwrap();
                give_back(segment);
                drop(another);
            }
            let given_up = if splits {
                // SAFETY: a handle; nobody uses the memory.
                unsafe { (vpmm_gms_unmap(&gms, segment), vpmm_gms_free_address(&gms, segment)) }
            } else {
                // SAFETY: as above.
                (vpmm_status::VPMM_OK, unsafe { vpmm_gms_destroy_mapping(&gms, segment) })
            };
            assert_eq!(given_up, (vpmm_status::VPMM_OK, vpmm_status::VPMM_OK));
            // A pool's as well. Where the first is another pool's still, it lets go of it now.
            let other = create();
            registry(|all| all.owners.insert(other, Arc::downgrade(&gms.manager)));
            if !was_freed {
                give_back(segment);
            }
            let mut held = gms.held().ok().unwrap();
            let manager = held.manager().ok().unwrap();
            settle(&gms.manager, manager);
            assert!(manager.allocation_at(other).is_some(), "{was_freed} {splits}");
            drop(held);
            give_back(other);
            let again = create();
            assert_eq!(again, segment, "nobody has it");
            gms.held().ok().unwrap().manager().ok().unwrap().destroy_mapping(again).unwrap();
        }
        drop(gms);
        end();
    }

    /// A tensor that goes when the server has: at its address there is nothing to have memory in the next layout.
    #[test]
    fn what_was_freed_while_the_server_was_gone_is_no_part_of_what_comes_next() {
        let _alone = alone();
        let (gms, socket, end) = served("gone");
        let connect = || {
            let options = ConnectOptions::new(Requested::Rw).timeout(Duration::from_secs(30));
            gms.held().ok().unwrap().manager().ok().unwrap().connect(options).unwrap();
        };
        connect();
        let [kept, freed] = [(); 2].map(|()| {
            let mut held = gms.held().ok().unwrap();
            let address = held.manager().ok().unwrap().create_mapping(1, "cache").unwrap();
            registry(|all| all.owners.insert(address, Arc::downgrade(&gms.manager)));
            address
        });
        end();
        give_back(freed);
        let memory = Memory::open(gms.loaded.raw(), 0).unwrap();
        let server = Server::bind(memory, Settings::new(&socket)).unwrap();
        let stopper = server.stopper();
        let server = std::thread::spawn(move || server.run());
        gms.held().ok().unwrap().manager().ok().unwrap().abort();
        connect();
        // SAFETY: a handle, and a text that ends with a zero byte; nobody uses the memory.
        let answers = unsafe {
            [
                vpmm_gms_unmap_all(&gms),
                vpmm_gms_reallocate_all(&gms, c"cache".as_ptr()),
                vpmm_gms_remap_all(&gms),
            ]
        };
        assert_eq!(answers, [vpmm_status::VPMM_OK; 3]);
        let mappings = gms.held().ok().unwrap().manager().ok().unwrap().mappings();
        assert_eq!(mappings.iter().map(|one| one.address).collect::<Vec<_>>(), [kept]);
        drop(gms);
        stopper.stop();
        server.join().unwrap().unwrap();
    }

    /// The program takes a mapping away at the moment at which PyTorch's pool lets go of it.
    #[test]
    fn an_address_that_goes_from_both_sides_at_once_is_nobodys() {
        let _alone = alone();
        let (gms, _socket, end) = served("both");
        // Another call has the manager, so that what was given back stays.
        let another = gms.held().ok().unwrap();
        let (manager, come) = (&gms.manager, &AtomicU64::new(0));
        // Without a sleep: whoever is woken comes too late.
        let meet = |turn: u64| {
            come.fetch_add(1, Ordering::SeqCst);
            for looks in 1_u64.. {
                if come.load(Ordering::SeqCst) >= 2 * turn {
                    break;
                }
                // There may be one processor for both.
                if looks % 4096 == 0 { std::thread::yield_now() } else { std::hint::spin_loop() }
            }
        };
        let mut left = Vec::new();
        std::thread::scope(|scope| {
            let turns = 0..20_000_u64;
            let address = |turn: u64| (turn + 1) << 21;
            scope.spawn({
                let turns = turns.clone();
                move || {
                    for turn in turns {
                        let address = address(turn);
                        registry(|all| all.owners.insert(address, Arc::downgrade(manager)));
                        meet(2 * turn + 1);
                        give_back(address);
                        meet(2 * turn + 2);
                    }
                }
            });
            for turn in turns {
                let address = address(turn);
                meet(2 * turn + 1);
                // Now sooner and now later.
                (0..turn % 24).for_each(|_| std::hint::spin_loop());
                forget(manager, address, None);
                meet(2 * turn + 2);
                let is_given = |all: &mut Registry| {
                    all.given(manager).is_some_and(|given| given.fresh.contains(&address))
                };
                left.extend(registry(is_given).then_some(address));
            }
        });
        assert!(left.is_empty(), "{} addresses", left.len());
        drop(another);
        drop(gms);
        end();
    }

    /// Its tensors, and what a pool of PyTorch's keeps for the next, are there still, and go later.
    #[test]
    fn a_client_that_ends_before_its_tensors_leaves_their_addresses_to_nobody_else() {
        let _alone = alone();
        // Of its own addresses, which the driver gives out again.
        const BYTES: usize = 300 << 20;
        for (closes, is_scratch) in [(true, false), (false, false), (true, true), (false, true)] {
            let (gms, socket, end) = served("ends-first");
            let client = || vpmm_gms {
                manager: Arc::new(Mutex::new(Some(
                    MemoryManager::new(gms.loaded.raw(), 0, &socket).unwrap(),
                ))),
                answer_time: Mutex::new(None),
                is_interruptible: false.into(),
                check: Mutex::new(None),
                loaded: Arc::clone(&gms.loaded),
            };
            let make = |of: &vpmm_gms, is_scratch| {
                let options = ConnectOptions::new(Requested::Rw).timeout(Duration::from_secs(30));
                of.held().ok().unwrap().manager().ok().unwrap().connect(options).unwrap();
                let source = of.begin_torch("weights", is_scratch).ok().unwrap();
                let address = allocate(BYTES, 0).ok().unwrap();
                end_use(source);
                address
            };
            let first = client();
            let early = make(&first, is_scratch);
            if closes {
                // SAFETY: a handle.
                assert_eq!(unsafe { vpmm_gms_close(&first) }, vpmm_status::VPMM_OK);
            } else {
                drop(first);
            }
            let next = client();
            let late = make(&next, false);
            give_back(early);
            assert_ne!(early, late, "{closes} {is_scratch}");
            let is_there = |address| {
                let mut held = next.held().ok().unwrap();
                held.manager().ok().unwrap().allocation_at(address).is_some()
            };
            assert!(is_there(late), "{closes} {is_scratch}");
            // Nobody has it now.
            let source = next.begin_torch("weights", false).ok().unwrap();
            let again = allocate(BYTES, 0).ok().unwrap();
            assert_eq!(again, early, "{closes} {is_scratch}");
            end_use(source);
            give_back(again);
            assert!(!is_there(again) && is_there(late), "{closes} {is_scratch}");
            drop((next, gms));
            end();
        }
    }

    /// One that is cancelled, say. Threads that use none by themselves have the only one that there is.
    #[test]
    fn a_thread_that_ends_uses_nothing_any_more() {
        let _alone = alone();
        let (gms, _socket, end) = served("thread");
        let options = ConnectOptions::new(Requested::Rw);
        gms.held().ok().unwrap().manager().ok().unwrap().connect(options).unwrap();
        let elsewhere = |work: fn(&vpmm_gms) -> bool| {
            std::thread::scope(|scope| scope.spawn(|| work(&gms)).join().unwrap())
        };
        assert!(elsewhere(|gms| gms.begin_torch("early", false).is_ok()));
        assert!(elsewhere(|_| allocate(1, 0).is_err()), "nobody uses any");
        let source = gms.begin_torch("weights", false).ok().unwrap();
        assert!(elsewhere(|_| allocate(1, 0).map(give_back).is_ok()));
        end_use(source);
        drop(gms);
        end();
    }

    /// What stays until its manager writes is not looked at for every tensor that goes meanwhile.
    #[test]
    fn a_free_beside_many_that_have_to_stay_costs_what_one_does() {
        let _alone = alone();
        let (gms, _socket, end) = served("stays");
        const MANY: u64 = 50_000;
        let addresses = (1..=MANY).map(|at| at << 21);
        let start = std::time::Instant::now();
        for address in addresses.clone() {
            registry(|all| all.owners.insert(address, Arc::downgrade(&gms.manager)));
            give_back(address);
        }
        let took = start.elapsed();
        assert!(took < Duration::from_secs(2), "{took:?}");
        // They are looked at when it writes; no manager knows them.
        let options = ConnectOptions::new(Requested::Rw);
        let mut held = gms.held().ok().unwrap();
        let manager = held.manager().ok().unwrap();
        manager.connect(options).unwrap();
        settle(&gms.manager, manager);
        assert_eq!(
            registry(|all| all.given(&gms.manager).map_or(0, |of| of.fresh.len() + of.kept.len())),
            0
        );
        drop(held);
        drop(gms);
        end();
    }
}

//! Stream-ordered allocation: memory pools, cuMemAllocAsync and cuMemFreeAsync.
//!
//! A pool gives a freed block to the stream that freed it at once. Another stream gets it if
//! an event already orders it after the free, if the free has run, or, when the device has no
//! memory left, by being made to wait. Each of the three can be switched off.

use std::collections::BTreeMap;
use std::sync::Arc;

use cuda_sys::types::{
    CUdevice, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType, CUmemAllocationType,
    CUmemLocation, CUmemPool_attribute, CUmemPoolProps, CUmemoryPool, CUresult, CUstream,
};
use rustc_hash::FxHashMap;

use crate::allocate::free_name;
use crate::arguments::{In, Out, Untyped};
use crate::call::Call;
use crate::context::ContextKey;
use crate::handles::Handles;
use crate::heap::{Heap, Taken, Wish};
use crate::physical::Seat;
use crate::race::StreamKey;
use crate::stream::{Streams, Work};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;
/// Pools take memory from the device in chunks of at least this.
const CHUNK: u64 = 32 << 20;

/// A pool for the life of the simulator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct PoolKey(u64);

#[derive(Debug)]
struct Pool {
    handle: usize,
    heap: Heap,
    release_threshold: u64,
    follow_events: bool,
    opportunistic: bool,
    internal_dependencies: bool,
    /// Destroyed; it goes when its last allocation is freed.
    destroyed: bool,
}

#[derive(Debug)]
pub(crate) struct Pools {
    by_key: BTreeMap<PoolKey, Pool>,
    handles: Handles<PoolKey>,
    /// Each device's default pool, and its current one.
    of_device: Vec<(PoolKey, PoolKey)>,
    /// The pool of each live allocation by its address.
    owners: FxHashMap<u64, PoolKey>,
    next: u64,
}

impl Pools {
    pub(crate) fn new(devices: usize) -> Self {
        let mut pools = Self {
            by_key: BTreeMap::new(),
            handles: Handles::new(6),
            of_device: Vec::new(),
            owners: FxHashMap::default(),
            next: 1,
        };
        for device in 0..devices {
            let key = pools.create(Seat::Device(device), 0);
            pools.of_device.push((key, key));
        }
        pools
    }

    fn create(&mut self, seat: Seat, max_bytes: u64) -> PoolKey {
        let key = PoolKey(self.next);
        self.next += 1;
        let handle = self.handles.insert(key);
        let mut heap = Heap::new(seat, CHUNK);
        heap.max_bytes = max_bytes;
        self.by_key.insert(
            key,
            Pool {
                handle,
                heap,
                release_threshold: 0,
                follow_events: true,
                opportunistic: true,
                internal_dependencies: true,
                destroyed: false,
            },
        );
        key
    }

    /// Live allocations of all pools.
    pub(crate) fn allocations(&self) -> usize {
        self.owners.len()
    }

    /// Pools that the caller made and did not destroy.
    pub(crate) fn created(&self) -> usize {
        self.handles.len() - self.of_device.len()
    }

    pub(crate) fn handle_of(&self, key: PoolKey) -> u64 {
        self.by_key.get(&key).map_or(0, |pool| pool.handle as u64)
    }

    /// The live allocation that holds an address in the chunk that begins at `chunk`.
    pub(crate) fn find(&self, chunk: u64, address: u64) -> Option<(PoolKey, (u64, u64))> {
        let in_pool = |(&key, pool): (&PoolKey, &Pool)| {
            Some((key, pool.heap.find(address).filter(|(start, _)| *start >= chunk)?))
        };
        self.by_key.iter().find_map(in_pool)
    }

    /// Removes a destroyed pool when nothing of it is allocated and all of its frees have been passed;
    /// where some have not, the next wait of the host does.
    fn remove_if_unused(
        &mut self,
        key: PoolKey,
        space: &mut crate::memory::Space,
        completed: impl Fn(StreamKey) -> u64,
    ) {
        let Some(pool) = self.by_key.get_mut(&key) else { return };
        if pool.destroyed && pool.heap.live == 0 {
            pool.heap.settle(completed);
            if !pool.heap.has_pending() {
                pool.heap.trim(space, 0);
                self.by_key.remove(&key);
            }
        }
    }
}

/// How far a stream has come; one that is gone has finished.
fn completed(streams: &Streams) -> impl Fn(StreamKey) -> u64 + '_ {
    |key| streams.by_key.get(&key).map_or(u64::MAX, |stream| stream.completed)
}

impl Call<'_> {
    fn pool(&mut self, handle: CUmemoryPool) -> Result<PoolKey, CUresult> {
        let value = handle as usize;
        if let Some(&key) = self.pools.handles.get(value) {
            return Ok(key);
        }
        if self.pools.handles.is_stale(value) {
            self.misuse(&format!("memory pool {value:#x} was destroyed"));
        }
        Err(INVALID)
    }

    /// Allocates from a pool for work on a stream.
    fn allocate_from_pool(
        &mut self,
        key: PoolKey,
        bytes: u64,
        stream: StreamKey,
    ) -> Result<u64, CUresult> {
        let state = &mut *self.state;
        let pool = state.pools.by_key.get_mut(&key).ok_or(INVALID)?;
        let lost = state.lost.get(pool.heap.seat.owner()).copied().flatten();
        lost.map_or(Ok(()), Err)?;
        let streams = &state.streams;
        let completed = |key| streams.by_key.get(&key).map_or(u64::MAX, |stream| stream.completed);
        if pool.opportunistic {
            pool.heap.settle(completed);
        } else {
            let host = &state.host;
            pool.heap.settle(|key| host.get(key));
        }
        let clock = streams.by_key.get(&stream).map(|stream| Arc::clone(&stream.clock));
        let knows = clock.as_deref().filter(|_| pool.follow_events);
        let wish = Wish { bytes, stream: Some(stream), knows, common: true };
        let taken = match pool.heap.take(wish) {
            Some(taken) => taken,
            None => match pool.heap.grow(&mut state.space, bytes) {
                Ok(()) => pool.heap.take(wish).ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?,
                Err(code) => {
                    let waiting = pool.internal_dependencies.then(|| pool.heap.take_any(bytes));
                    waiting.flatten().ok_or(code)?
                }
            },
        };
        let Taken { address, after } = taken;
        state.pools.owners.insert(address, key);
        let (physical, range) = self.bytes_at(address, bytes).ok_or(INVALID)?;
        let what = self.name.into();
        self.append(stream, &[after], Work::Take { physical, range }, &what)?;
        self.settle();
        Ok(address)
    }

    /// Frees an allocation for work that comes after what a stream has now.
    pub(crate) fn free_to_pool(&mut self, address: u64, stream: StreamKey) -> Result<(), CUresult> {
        let key = *self.pools.owners.get(&address).ok_or(INVALID)?;
        let pool = self.pools.by_key.get(&key).ok_or(INVALID)?;
        let (_, bytes) = pool.heap.find(address).ok_or(INVALID)?;
        let (physical, range) = self.bytes_at(address, bytes).ok_or(INVALID)?;
        let after = self.append(stream, &[], Work::Return { physical, range }, &free_name())?;
        let state = &mut *self.state;
        let pool = state.pools.by_key.get_mut(&key).ok_or(INVALID)?;
        pool.heap.free(address, Some(after)).ok_or(INVALID)?;
        state.pools.owners.remove(&address);
        self.settle();
        let state = &mut *self.state;
        state.pools.remove_if_unused(key, &mut state.space, completed(&state.streams));
        Ok(())
    }

    /// The host has waited: the pools of the context's device give back what is beyond their
    /// release thresholds.
    pub(crate) fn trim_pools_at_sync(&mut self, context: ContextKey) {
        let state = &mut *self.state;
        let Some(device) = state.contexts.by_key.get(&context).map(|context| context.device) else {
            return;
        };
        let completed = completed(&state.streams);
        for pool in state.pools.by_key.values_mut() {
            if pool.heap.seat == Seat::Device(device) && pool.heap.reserved > pool.release_threshold
            {
                pool.heap.settle(&completed);
                pool.heap.trim(&mut state.space, pool.release_threshold);
            }
        }
        let destroyed = state.pools.by_key.iter().filter(|(_, pool)| pool.destroyed);
        let destroyed: Vec<PoolKey> = destroyed.map(|(key, _)| *key).collect();
        for key in destroyed {
            state.pools.remove_if_unused(key, &mut state.space, &completed);
        }
    }
}

pub(crate) fn allocate_async(
    call: &mut Call<'_>,
    out: Out<u64>,
    bytes: usize,
    stream: CUstream,
) -> Result<(), CUresult> {
    let stream = call.stream(stream)?;
    let device = call.device_of(stream)?;
    let pool = call.pools.of_device[device].1;
    allocate(call, &out, bytes, pool, stream)
}

pub(crate) fn allocate_from_pool_async(
    call: &mut Call<'_>,
    out: Out<u64>,
    bytes: usize,
    pool: CUmemoryPool,
    stream: CUstream,
) -> Result<(), CUresult> {
    let stream = call.stream(stream)?;
    let pool = call.pool(pool)?;
    allocate(call, &out, bytes, pool, stream)
}

fn allocate(
    call: &mut Call<'_>,
    out: &Out<u64>,
    bytes: usize,
    pool: PoolKey,
    stream: StreamKey,
) -> Result<(), CUresult> {
    // Allocation nodes of graphs are not modelled.
    call.forbid_on_capturing(stream)?;
    call.forbid_in_capture()?;
    out.required()?;
    if bytes == 0 {
        return Err(INVALID);
    }
    let address = call.allocate_from_pool(pool, bytes as u64, stream)?;
    out.set(address)
}

pub(crate) fn free_async(
    call: &mut Call<'_>,
    address: u64,
    stream: CUstream,
) -> Result<(), CUresult> {
    let stream = call.stream(stream)?;
    call.forbid_on_capturing(stream)?;
    call.forbid_in_capture()?;
    if address == 0 {
        return Ok(());
    }
    if call.pools.owners.contains_key(&address) {
        return call.free_to_pool(address, stream);
    }
    call.allocation_at(address).ok_or(INVALID)?;
    call.enqueue(stream, &[], Work::Free { address }, &free_name()).map(|_| ())
}

pub(crate) fn create(
    call: &mut Call<'_>,
    out: Out<CUmemoryPool>,
    props: In<CUmemPoolProps>,
) -> Result<(), CUresult> {
    call.forbid_in_capture()?;
    out.required()?;
    let props = props.get()?;
    let pinned = props.allocType == CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    if !pinned {
        return Err(INVALID);
    }
    if props.handleTypes != CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE {
        return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    }
    let seat = call.seat(props.location)?;
    call.usable(seat.owner())?;
    let key = call.pools.create(seat, props.maxSize as u64);
    let handle = call.pools.by_key[&key].handle;
    out.set(handle as CUmemoryPool)
}

pub(crate) fn destroy(call: &mut Call<'_>, handle: CUmemoryPool) -> Result<(), CUresult> {
    call.forbid_in_capture()?;
    let key = call.pool(handle)?;
    if call.pools.of_device.iter().any(|(default, _)| *default == key) {
        return Err(INVALID);
    }
    let state = &mut *call.state;
    state.pools.handles.remove(handle as usize);
    for (default, current) in &mut state.pools.of_device {
        if *current == key {
            *current = *default;
        }
    }
    if let Some(pool) = state.pools.by_key.get_mut(&key) {
        pool.destroyed = true;
    }
    state.pools.remove_if_unused(key, &mut state.space, completed(&state.streams));
    Ok(())
}

pub(crate) fn trim_to(
    call: &mut Call<'_>,
    handle: CUmemoryPool,
    keep: usize,
) -> Result<(), CUresult> {
    call.forbid_in_capture()?;
    let key = call.pool(handle)?;
    let state = &mut *call.state;
    let pool = state.pools.by_key.get_mut(&key).ok_or(INVALID)?;
    let streams = &state.streams;
    let completed = |key| streams.by_key.get(&key).map_or(u64::MAX, |stream| stream.completed);
    pool.heap.settle(completed);
    pool.heap.trim(&mut state.space, keep as u64);
    Ok(())
}

pub(crate) fn get_attribute(
    call: &mut Call<'_>,
    handle: CUmemoryPool,
    attribute: CUmemPool_attribute,
    out: Untyped,
) -> Result<(), CUresult> {
    use CUmemPool_attribute as A;
    call.forbid_in_capture()?;
    let key = call.pool(handle)?;
    let pool = &call.pools.by_key[&key];
    let heap = &pool.heap;
    match attribute {
        A::CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES => {
            out.set(i32::from(pool.follow_events))
        }
        A::CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC => out.set(i32::from(pool.opportunistic)),
        A::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES => {
            out.set(i32::from(pool.internal_dependencies))
        }
        A::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD => out.set(pool.release_threshold),
        A::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT => out.set(heap.reserved),
        A::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH => out.set(heap.reserved_high),
        A::CU_MEMPOOL_ATTR_USED_MEM_CURRENT => out.set(heap.used),
        A::CU_MEMPOOL_ATTR_USED_MEM_HIGH => out.set(heap.used_high),
        _ => Err(INVALID),
    }
}

pub(crate) fn set_attribute(
    call: &mut Call<'_>,
    handle: CUmemoryPool,
    attribute: CUmemPool_attribute,
    value: Untyped,
) -> Result<(), CUresult> {
    use CUmemPool_attribute as A;
    call.forbid_in_capture()?;
    let key = call.pool(handle)?;
    let pool = call.pools.by_key.get_mut(&key).ok_or(INVALID)?;
    let switch = || value.get::<i32>().map(|value| value != 0);
    match attribute {
        A::CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES => pool.follow_events = switch()?,
        A::CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC => pool.opportunistic = switch()?,
        A::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES => {
            pool.internal_dependencies = switch()?;
        }
        A::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD => pool.release_threshold = value.get()?,
        A::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH if value.get::<u64>()? == 0 => {
            pool.heap.reserved_high = pool.heap.reserved;
        }
        A::CU_MEMPOOL_ATTR_USED_MEM_HIGH if value.get::<u64>()? == 0 => {
            pool.heap.used_high = pool.heap.used;
        }
        _ => return Err(INVALID),
    }
    Ok(())
}

pub(crate) fn set_access(
    call: &mut Call<'_>,
    handle: CUmemoryPool,
    descriptors: In<CUmemAccessDesc>,
    count: usize,
) -> Result<(), CUresult> {
    call.forbid_in_capture()?;
    let key = call.pool(handle)?;
    let wanted = call.access_rights(&descriptors, count)?;
    let seat = call.pools.by_key[&key].heap.seat;
    call.reachable(seat, &wanted)?;
    let wanted: Vec<_> = wanted.iter().map(|right| (right.party(), right.flags)).collect();
    // Pools know no read-only access.
    if wanted.iter().any(|&(_, flags)| flags == 1) {
        return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    }
    let state = &mut *call.state;
    let pool = state.pools.by_key.get_mut(&key).ok_or(INVALID)?;
    // The owner keeps its access.
    if wanted.iter().any(|&(party, flags)| party == seat.owner() && flags != 3) {
        return Err(INVALID);
    }
    let rights =
        wanted.iter().fold(pool.heap.rights, |rights, &(party, flags)| rights.with(party, flags));
    pool.heap.set_rights(&mut state.space, rights);
    Ok(())
}

pub(crate) fn get_access(
    call: &mut Call<'_>,
    out: Out<CUmemAccess_flags>,
    handle: CUmemoryPool,
    location: In<CUmemLocation>,
) -> Result<(), CUresult> {
    call.forbid_in_capture()?;
    let key = call.pool(handle)?;
    let party = call.accessor(location.get()?)?.owner();
    let flags = call.pools.by_key[&key].heap.rights.of(party);
    out.set(CUmemAccess_flags(flags as u32))
}

pub(crate) fn device_default(
    call: &mut Call<'_>,
    out: Out<CUmemoryPool>,
    device: CUdevice,
) -> Result<(), CUresult> {
    let device = call.device(device)?;
    let key = call.pools.of_device[device].0;
    out.set(call.pools.handle_of(key) as CUmemoryPool)
}

pub(crate) fn device_current(
    call: &mut Call<'_>,
    out: Out<CUmemoryPool>,
    device: CUdevice,
) -> Result<(), CUresult> {
    let device = call.device(device)?;
    let key = call.pools.of_device[device].1;
    out.set(call.pools.handle_of(key) as CUmemoryPool)
}

pub(crate) fn set_device_current(
    call: &mut Call<'_>,
    device: CUdevice,
    handle: CUmemoryPool,
) -> Result<(), CUresult> {
    let device = call.device(device)?;
    call.forbid_in_capture()?;
    let key = call.pool(handle)?;
    if call.pools.by_key[&key].heap.seat != Seat::Device(device) {
        return Err(INVALID);
    }
    call.pools.of_device[device].1 = key;
    Ok(())
}

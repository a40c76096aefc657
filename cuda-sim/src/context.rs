//! Contexts, primary and created, and what is current on each thread.

use std::collections::BTreeSet;

use cuda_sys::types::{CUcontext, CUdevice, CUresult, CUstreamCaptureMode};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::arguments::{Out, Untyped};
use crate::call::{Call, State};
use crate::handles::Handles;
use crate::race::StreamKey;
use crate::stream::Kind;

/// A context for the life of the simulator; handle values are used again, keys are not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ContextKey(pub(crate) u64);

#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) device: usize,
    pub(crate) handle: usize,
    /// The version that cuCtxGetApiVersion answers.
    api_version: u32,
    pub(crate) flags: u32,
    pub(crate) legacy: StreamKey,
    /// What the host itself frees of memory pools: it orders with no stream.
    pub(crate) frees: StreamKey,
    /// Each thread's own default stream.
    pub(crate) per_thread: FxHashMap<u64, StreamKey>,
    /// The streams that the legacy stream orders with.
    pub(crate) blocking: Vec<StreamKey>,
    pub(crate) peers: FxHashSet<ContextKey>,
    /// Where memory begins that cuMemAlloc gave out in it.
    pub(crate) allocations: BTreeSet<u64>,
    /// What a failed kernel left: every later call answers it.
    pub(crate) sticky: Option<CUresult>,
}

#[derive(Debug, Default)]
pub(crate) struct Primary {
    /// Retained so many times; a reset takes none away.
    pub(crate) references: usize,
    pub(crate) context: Option<ContextKey>,
    /// Given out once and kept: the value outlives resets.
    handle: Option<usize>,
    flags: u32,
}

#[derive(Debug)]
pub(crate) struct Contexts {
    pub(crate) by_key: FxHashMap<ContextKey, Context>,
    pub(crate) handles: Handles<ContextKey>,
    pub(crate) primaries: Vec<Primary>,
    next: u64,
}

/// What the driver remembers of a host thread.
#[derive(Debug)]
pub(crate) struct Thread {
    stack: Vec<ContextKey>,
    pub(crate) capture_mode: CUstreamCaptureMode,
}

impl Default for Thread {
    fn default() -> Self {
        let capture_mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        Self { stack: Vec::new(), capture_mode }
    }
}

impl Contexts {
    pub(crate) fn new(devices: usize) -> Self {
        Self {
            by_key: FxHashMap::default(),
            handles: Handles::new(2),
            primaries: (0..devices).map(|_| Primary::default()).collect(),
            next: 1,
        }
    }

    /// References that the caller holds: created contexts, and retained primary ones.
    pub(crate) fn references(&self) -> usize {
        let primaries = self.primaries.iter();
        let active = primaries.clone().filter(|primary| primary.context.is_some()).count();
        let retained: usize = primaries.map(|primary| primary.references).sum();
        self.by_key.len() - active + retained
    }
}

const API_VERSION: u32 = 3020;

impl Call<'_> {
    fn thread(&mut self) -> &mut Thread {
        let thread = self.thread;
        self.threads.entry(thread).or_default()
    }

    /// This thread's capture mode, for a call that may change it.
    pub(crate) fn capture_mode(&mut self) -> &mut CUstreamCaptureMode {
        &mut self.thread().capture_mode
    }

    /// The context on top of this thread's stack, dead or alive.
    pub(crate) fn top(&mut self) -> Option<ContextKey> {
        self.thread().stack.last().copied()
    }

    /// The current context, which must exist and be healthy.
    pub(crate) fn current(&mut self) -> Result<ContextKey, CUresult> {
        let key = self.top().ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
        self.healthy(key)?;
        Ok(key)
    }

    /// The device of the current context.
    pub(crate) fn current_device(&mut self) -> Result<usize, CUresult> {
        let key = self.current()?;
        Ok(self.contexts.by_key[&key].device)
    }

    /// What a context's calls answer: its error or its device's, if there is one.
    pub(crate) fn healthy(&self, key: ContextKey) -> Result<(), CUresult> {
        let context = self.contexts.by_key.get(&key);
        let context = context.ok_or(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED)?;
        self.usable(context.device)?;
        context.sticky.map_or(Ok(()), Err)
    }

    /// The error of a device that was lost. The host never is.
    pub(crate) fn usable(&self, device: usize) -> Result<(), CUresult> {
        self.lost.get(device).copied().flatten().map_or(Ok(()), Err)
    }

    /// A device ordinal as an index.
    pub(crate) fn device(&self, device: CUdevice) -> Result<usize, CUresult> {
        let index = usize::try_from(device).ok().filter(|index| *index < self.lost.len());
        index.ok_or(CUresult::CUDA_ERROR_INVALID_DEVICE)
    }

    pub(crate) fn context(&mut self, handle: CUcontext) -> Result<ContextKey, CUresult> {
        let value = handle as usize;
        if let Some(&key) = self.contexts.handles.get(value) {
            return Ok(key);
        }
        if self.contexts.handles.is_stale(value) {
            return Err(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED);
        }
        Err(CUresult::CUDA_ERROR_INVALID_CONTEXT)
    }

    /// As [`Self::context`], where null means the current one.
    fn context_or_current(&mut self, handle: CUcontext) -> Result<ContextKey, CUresult> {
        if handle.is_null() {
            return self.top().ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT);
        }
        self.context(handle)
    }

    fn new_context(&mut self, device: usize, handle: Option<usize>, flags: u32) -> ContextKey {
        let key = ContextKey(self.contexts.next);
        self.contexts.next += 1;
        let State { streams, host, .. } = &mut *self.state;
        let legacy = streams.create(key, device, Kind::Legacy, 0, host);
        let frees = streams.create(key, device, Kind::NonBlocking, 0, host);
        let handle = handle.unwrap_or_else(|| self.contexts.handles.insert(key));
        self.contexts.by_key.insert(
            key,
            Context {
                device,
                handle,
                api_version: API_VERSION,
                flags,
                legacy,
                frees,
                per_thread: FxHashMap::default(),
                blocking: Vec::new(),
                peers: FxHashSet::default(),
                allocations: BTreeSet::new(),
                sticky: None,
            },
        );
        key
    }

    /// Waits for a context's work and ends its streams and events, and its memory of cuMemAlloc, on
    /// the host and managed; handles of memory and what pools gave out are no context's, and stay.
    fn end_context(&mut self, key: ContextKey) -> Result<(), CUresult> {
        let waited = self.wait_context(key);
        let streams: Vec<_> = self
            .streams
            .by_key
            .values()
            .filter(|stream| stream.context == key)
            .map(|stream| stream.key)
            .collect();
        let handles: Vec<_> = self
            .streams
            .handles
            .iter()
            .filter(|(_, stream)| streams.contains(stream))
            .map(|(value, _)| value)
            .collect();
        for value in handles {
            self.streams.handles.remove(value);
        }
        for stream in streams {
            self.abandon_capture(stream);
            self.streams.destroy(stream);
        }
        self.streams.forget_context(key);
        self.events.end_context(key);
        self.modules.end_context(key);
        self.end_memory_of(key);
        let device = self.contexts.by_key.remove(&key).map(|context| context.device);
        for context in self.contexts.by_key.values_mut() {
            context.peers.remove(&key);
        }
        if let Some(device) = device {
            for other in 0..self.lost.len() {
                self.settle_peers(device, other);
                self.settle_peers(other, device);
            }
        }
        waited
    }

    /// Opens what cuMemAlloc gives out on one device to another one while a context there has asked for
    /// it that has not ended, nor has the context that it asked.
    fn settle_peers(&mut self, owner: usize, user: usize) {
        let contexts = &self.contexts.by_key;
        let is_owner = |key| contexts.get(key).is_some_and(|context| context.device == owner);
        let mut users = contexts.values().filter(|context| context.device == user);
        let open = users.any(|context| context.peers.iter().any(is_owner));
        if owner != user {
            self.open_to_peer(owner, user, open);
        }
    }
}

pub(crate) fn primary_retain(
    call: &mut Call<'_>,
    out: Out<CUcontext>,
    device: CUdevice,
) -> Result<(), CUresult> {
    let device = call.device(device)?;
    call.usable(device)?;
    out.required()?;
    let key = match call.contexts.primaries[device].context {
        Some(key) => key,
        None => {
            let flags = call.contexts.primaries[device].flags;
            let old = call.contexts.primaries[device].handle;
            let key = call.new_context(device, old, flags);
            if let Some(value) = old
                && let Some(slot) = call.contexts.handles.get_mut(value)
            {
                *slot = key;
            }
            let handle = call.contexts.by_key[&key].handle;
            let primary = &mut call.contexts.primaries[device];
            primary.context = Some(key);
            primary.handle = Some(handle);
            key
        }
    };
    call.contexts.primaries[device].references += 1;
    out.set(call.contexts.by_key[&key].handle as CUcontext)
}

pub(crate) fn primary_release(call: &mut Call<'_>, device: CUdevice) -> Result<(), CUresult> {
    let device = call.device(device)?;
    let primary = &mut call.contexts.primaries[device];
    if primary.references == 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
    }
    primary.references -= 1;
    if primary.references == 0
        && let Some(key) = primary.context.take()
    {
        return call.end_context(key);
    }
    Ok(())
}

pub(crate) fn primary_reset(call: &mut Call<'_>, device: CUdevice) -> Result<(), CUresult> {
    let device = call.device(device)?;
    // Whoever has retained it still has it to release.
    match call.contexts.primaries[device].context.take() {
        Some(key) => call.end_context(key),
        None => Ok(()),
    }
}

pub(crate) fn primary_state(
    call: &mut Call<'_>,
    device: CUdevice,
    flags: Out<u32>,
    active: Out<i32>,
) -> Result<(), CUresult> {
    let device = call.device(device)?;
    let primary = &call.contexts.primaries[device];
    flags.set(primary.flags)?;
    active.set(i32::from(primary.context.is_some()))
}

pub(crate) fn primary_flags(
    call: &mut Call<'_>,
    device: CUdevice,
    flags: u32,
) -> Result<(), CUresult> {
    let device = call.device(device)?;
    call.contexts.primaries[device].flags = flags;
    Ok(())
}

pub(crate) fn create(
    call: &mut Call<'_>,
    out: Out<CUcontext>,
    flags: u32,
    device: CUdevice,
) -> Result<(), CUresult> {
    let device = call.device(device)?;
    call.usable(device)?;
    out.required()?;
    let key = call.new_context(device, None, flags);
    call.thread().stack.push(key);
    out.set(call.contexts.by_key[&key].handle as CUcontext)
}

pub(crate) fn destroy(call: &mut Call<'_>, handle: CUcontext) -> Result<(), CUresult> {
    let key = call.context(handle)?;
    if call.contexts.primaries.iter().any(|primary| primary.handle == Some(handle as usize)) {
        return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
    }
    if !call.contexts.by_key.contains_key(&key) {
        return Err(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED);
    }
    if call.top() == Some(key) {
        call.thread().stack.pop();
    }
    call.contexts.handles.remove(handle as usize);
    call.end_context(key)
}

pub(crate) fn push_current(call: &mut Call<'_>, handle: CUcontext) -> Result<(), CUresult> {
    if handle.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
    }
    let key = call.context(handle)?;
    call.thread().stack.push(key);
    Ok(())
}

pub(crate) fn pop_current(call: &mut Call<'_>, out: Out<CUcontext>) -> Result<(), CUresult> {
    let key = call.thread().stack.pop().ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
    let handle = call.contexts.by_key.get(&key).map_or(0, |context| context.handle);
    out.set_optional(handle as CUcontext);
    Ok(())
}

pub(crate) fn set_current(call: &mut Call<'_>, handle: CUcontext) -> Result<(), CUresult> {
    if handle.is_null() {
        call.thread().stack.pop();
        return Ok(());
    }
    let key = call.context(handle)?;
    let stack = &mut call.thread().stack;
    stack.pop();
    stack.push(key);
    Ok(())
}

pub(crate) fn get_current(call: &mut Call<'_>, out: Out<CUcontext>) -> Result<(), CUresult> {
    let key = call.top();
    let context = key.and_then(|key| call.contexts.by_key.get(&key));
    out.set(context.map_or(0, |context| context.handle) as CUcontext)
}

pub(crate) fn get_device(call: &mut Call<'_>, out: Out<CUdevice>) -> Result<(), CUresult> {
    let device = call.current_device()?;
    out.set(device as CUdevice)
}

pub(crate) fn get_device_of(
    call: &mut Call<'_>,
    out: Out<CUdevice>,
    handle: CUcontext,
) -> Result<(), CUresult> {
    let key = call.context_or_current(handle)?;
    call.healthy(key)?;
    out.set(call.contexts.by_key[&key].device as CUdevice)
}

pub(crate) fn get_id(
    call: &mut Call<'_>,
    handle: CUcontext,
    out: Out<u64>,
) -> Result<(), CUresult> {
    let key = call.context_or_current(handle)?;
    // The handle of a primary context that was reset stays known.
    if !call.contexts.by_key.contains_key(&key) {
        return Err(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED);
    }
    out.set(key.0)
}

pub(crate) fn get_flags(call: &mut Call<'_>, out: Out<u32>) -> Result<(), CUresult> {
    let key = call.current()?;
    out.set(call.contexts.by_key[&key].flags)
}

pub(crate) fn get_api_version(
    call: &mut Call<'_>,
    handle: CUcontext,
    out: Out<u32>,
) -> Result<(), CUresult> {
    let key = call.context_or_current(handle)?;
    let context = call.contexts.by_key.get(&key);
    out.set(context.ok_or(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED)?.api_version)
}

pub(crate) fn synchronize(call: &mut Call<'_>) -> Result<(), CUresult> {
    let key = call.current()?;
    call.forbid_beside_capture(key)?;
    call.wait_context(key)?;
    call.healthy(key)?;
    call.trim_pools_at_sync(key);
    Ok(())
}

pub(crate) fn synchronize_of(call: &mut Call<'_>, handle: CUcontext) -> Result<(), CUresult> {
    let key = call.context_or_current(handle)?;
    call.healthy(key)?;
    call.forbid_beside_capture(key)?;
    call.wait_context(key)?;
    call.healthy(key)?;
    call.trim_pools_at_sync(key);
    Ok(())
}

/// The range of stream priorities: least, then greatest.
pub(crate) const PRIORITIES: (i32, i32) = (0, -5);

pub(crate) fn priority_range(
    call: &mut Call<'_>,
    least: Out<i32>,
    greatest: Out<i32>,
) -> Result<(), CUresult> {
    call.current()?;
    least.set_optional(PRIORITIES.0);
    greatest.set_optional(PRIORITIES.1);
    Ok(())
}

pub(crate) fn enable_peer_access(
    call: &mut Call<'_>,
    peer: CUcontext,
    flags: u32,
) -> Result<(), CUresult> {
    let current = call.current()?;
    let peer = call.context(peer)?;
    if flags != 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let device = |key| call.contexts.by_key.get(&key).map(|context: &Context| context.device);
    if device(peer) == device(current) {
        return Err(CUresult::CUDA_ERROR_INVALID_DEVICE);
    }
    if !call.peer_access {
        return Err(CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
    }
    let owner = device(peer).ok_or(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED)?;
    let user = device(current).ok_or(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED)?;
    let context = call.contexts.by_key.get_mut(&current);
    if !context.is_some_and(|context| context.peers.insert(peer)) {
        return Err(CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
    }
    call.settle_peers(owner, user);
    Ok(())
}

pub(crate) fn disable_peer_access(call: &mut Call<'_>, peer: CUcontext) -> Result<(), CUresult> {
    let current = call.current()?;
    let peer = call.context(peer)?;
    let context = call.contexts.by_key.get_mut(&current);
    if !context.is_some_and(|context| context.peers.remove(&peer)) {
        return Err(CUresult::CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
    }
    let device = |key| call.contexts.by_key.get(&key).map(|context: &Context| context.device);
    if let (Some(owner), Some(user)) = (device(peer), device(current)) {
        call.settle_peers(owner, user);
    }
    Ok(())
}

/// Execution affinity needs MPS, which is not modelled.
pub(crate) fn create_with_affinity(
    call: &mut Call<'_>,
    out: Out<CUcontext>,
    _affinity: Untyped,
    count: i32,
    flags: u32,
    device: CUdevice,
) -> Result<(), CUresult> {
    if count != 0 {
        return Err(CUresult::CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY);
    }
    create(call, out, flags, device)
}

/// Of the parameters only their absence is modelled.
pub(crate) fn create_with_params(
    call: &mut Call<'_>,
    out: Out<CUcontext>,
    params: Untyped,
    flags: u32,
    device: CUdevice,
) -> Result<(), CUresult> {
    if params.0 != 0 {
        return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    }
    create(call, out, flags, device)
}

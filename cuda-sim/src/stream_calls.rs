//! The driver's stream calls.

use std::sync::Arc;

use cuda_sys::types::{CUcontext, CUdevice, CUhostFn, CUresult, CUstream, CUstreamCallback};

use crate::arguments::{Out, Untyped};
use crate::call::Call;
use crate::context::{ContextKey, PRIORITIES};
use crate::race::StreamKey;
use crate::stream::{Kind, Recorded, Stream, Work};

const LEGACY: usize = 1;
const PER_THREAD: usize = 2;
const NON_BLOCKING: u32 = 1;

impl Call<'_> {
    /// The stream behind a handle. The special handles mean a stream of the current context,
    /// the per-thread one also of this thread.
    pub(crate) fn stream(&mut self, handle: CUstream) -> Result<StreamKey, CUresult> {
        let key = match handle as usize {
            0 | LEGACY => {
                let context = self.current()?;
                return Ok(self.contexts.by_key[&context].legacy);
            }
            PER_THREAD => {
                let context = self.current()?;
                return self.per_thread_stream(context);
            }
            value => match self.streams.handles.get(value) {
                Some(&key) => key,
                None => {
                    if self.streams.handles.is_stale(value) {
                        self.misuse(&format!("stream {value:#x} was destroyed"));
                    }
                    return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
                }
            },
        };
        let context = self.context_of(key).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
        self.healthy(context)?;
        Ok(key)
    }

    fn per_thread_stream(&mut self, context: ContextKey) -> Result<StreamKey, CUresult> {
        let thread = self.thread;
        let state = &mut *self.state;
        let entry = state.contexts.by_key.get_mut(&context);
        let entry = entry.ok_or(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED)?;
        if let Some(&key) = entry.per_thread.get(&thread) {
            return Ok(key);
        }
        let key = state.streams.create(context, entry.device, Kind::PerThread, 0, &state.host);
        entry.per_thread.insert(thread, key);
        entry.blocking.push(key);
        Ok(key)
    }

    /// The device that a stream's work runs on.
    pub(crate) fn device_of(&self, stream: StreamKey) -> Result<usize, CUresult> {
        let stream = self.streams.by_key.get(&stream);
        Ok(stream.ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?.device)
    }
}

pub(crate) fn create(call: &mut Call<'_>, out: Out<CUstream>, flags: u32) -> Result<(), CUresult> {
    create_with_priority(call, out, flags, 0)
}

pub(crate) fn create_with_priority(
    call: &mut Call<'_>,
    out: Out<CUstream>,
    flags: u32,
    priority: i32,
) -> Result<(), CUresult> {
    let context = call.current()?;
    out.required()?;
    let kind = match flags {
        0 => Kind::Blocking,
        NON_BLOCKING => Kind::NonBlocking,
        _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
    };
    let priority = priority.clamp(PRIORITIES.1, PRIORITIES.0);
    let device = call.current_device()?;
    let state = &mut *call.state;
    let key = state.streams.create(context, device, kind, priority, &state.host);
    if kind == Kind::Blocking
        && let Some(context) = call.contexts.by_key.get_mut(&context)
    {
        context.blocking.push(key);
    }
    let value = call.streams.handles.insert(key);
    out.set(value as CUstream)
}

pub(crate) fn destroy(call: &mut Call<'_>, handle: CUstream) -> Result<(), CUresult> {
    if handle as usize <= PER_THREAD {
        return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
    let Some(key) = call.streams.handles.remove(handle as usize) else {
        // Says whether it ever was a stream.
        return call.stream(handle).map(|_| ());
    };
    call.abandon_capture(key);
    let context = call.context_of(key);
    if let Some(context) = context
        && let Some(context) = call.contexts.by_key.get_mut(&context)
    {
        context.blocking.retain(|other| *other != key);
    }
    call.destroy_in_order(key);
    // It is gone, whatever has failed in its context.
    context.map_or(Ok(()), |context| call.healthy(context))
}

impl Call<'_> {
    /// Its work goes on, and the legacy stream still orders with that.
    fn destroy_in_order(&mut self, key: StreamKey) {
        let busy = self.streams.by_key.get(&key).is_some_and(|s| s.is_blocking() && !s.is_idle());
        if busy {
            let end = self.streams.by_key[&key].end();
            let legacy = self
                .context_of(key)
                .and_then(|context| self.contexts.by_key.get(&context))
                .map(|context| context.legacy);
            if let Some(legacy) = legacy {
                self.streams.leave_behind(legacy, end);
            }
        }
        self.streams.destroy(key);
    }
}

pub(crate) fn query(call: &mut Call<'_>, handle: CUstream) -> Result<(), CUresult> {
    let stream = call.stream(handle)?;
    call.forbid_on_capturing(stream)?;
    call.forbid_in_capture()?;
    let ends = call.ends_of(stream);
    let done = call.poll(&ends);
    // What ran may have failed.
    call.stream(handle)?;
    if done { Ok(()) } else { Err(CUresult::CUDA_ERROR_NOT_READY) }
}

pub(crate) fn synchronize(call: &mut Call<'_>, handle: CUstream) -> Result<(), CUresult> {
    let stream = call.stream(handle)?;
    call.forbid_on_capturing(stream)?;
    call.forbid_in_capture()?;
    let context = call.context_of(stream).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
    call.wait_stream(stream)?;
    call.healthy(context)?;
    call.trim_pools_at_sync(context);
    Ok(())
}

impl Call<'_> {
    /// What a stream has to come to before it is idle: the legacy stream, what it orders with, too. Nothing is
    /// enqueued for that, which would order other streams' later work.
    fn ends_of(&self, stream: StreamKey) -> Vec<Recorded> {
        let Some(entry) = self.streams.by_key.get(&stream) else { return Vec::new() };
        let mut ends = vec![entry.end()];
        if entry.kind == Kind::Legacy {
            let context = self.contexts.by_key.get(&entry.context);
            let siblings = context.into_iter().flat_map(|context| &context.blocking);
            ends.extend(siblings.filter_map(|key| self.streams.by_key.get(key)).map(Stream::end));
            ends.extend_from_slice(self.streams.left_behind(stream));
        }
        ends
    }

    /// Waits for a stream; the legacy stream stands for every stream that it orders with.
    pub(crate) fn wait_stream(&mut self, stream: StreamKey) -> Result<(), CUresult> {
        let entry = self.streams.by_key.get(&stream).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
        if entry.kind == Kind::Legacy {
            let what: Arc<str> = self.name.into();
            let end = self.append(stream, &[], Work::Order, &what)?;
            return self.wait_and_observe(&end);
        }
        let end = entry.end();
        self.wait_and_observe(&end)
    }
}

pub(crate) fn get_id(call: &mut Call<'_>, handle: CUstream, out: Out<u64>) -> Result<(), CUresult> {
    let stream = call.stream(handle)?;
    call.forbid_on_capturing(stream)?;
    out.set(call.streams.by_key[&stream].id)
}

pub(crate) fn get_flags(
    call: &mut Call<'_>,
    handle: CUstream,
    out: Out<u32>,
) -> Result<(), CUresult> {
    let stream = call.stream(handle)?;
    call.forbid_on_capturing(stream)?;
    let kind = call.streams.by_key[&stream].kind;
    out.set(if kind == Kind::NonBlocking { NON_BLOCKING } else { 0 })
}

pub(crate) fn get_priority(
    call: &mut Call<'_>,
    handle: CUstream,
    out: Out<i32>,
) -> Result<(), CUresult> {
    let stream = call.stream(handle)?;
    out.set(call.streams.by_key[&stream].priority)
}

pub(crate) fn get_context(
    call: &mut Call<'_>,
    handle: CUstream,
    out: Out<CUcontext>,
) -> Result<(), CUresult> {
    let stream = call.stream(handle)?;
    let context = call.context_of(stream).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
    out.set(call.contexts.by_key[&context].handle as CUcontext)
}

pub(crate) fn get_device(
    call: &mut Call<'_>,
    handle: CUstream,
    out: Out<CUdevice>,
) -> Result<(), CUresult> {
    let stream = call.stream(handle)?;
    let device = call.device_of(stream)?;
    out.set(device as CUdevice)
}

pub(crate) fn launch_host_function(
    call: &mut Call<'_>,
    handle: CUstream,
    function: CUhostFn,
    data: Untyped,
) -> Result<(), CUresult> {
    let stream = call.stream(handle)?;
    let function = function.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    // SAFETY: whoever enqueues a host function vouches that it may be called with that pointer
    // when its turn comes, on any thread.
    let run = move || unsafe { function(data.0 as *mut _) };
    call.submit(stream, Work::Host(Arc::new(run)), &"cuLaunchHostFunc".into()).map(|_| ())
}

pub(crate) fn add_callback(
    call: &mut Call<'_>,
    handle: CUstream,
    function: CUstreamCallback,
    data: Untyped,
    flags: u32,
) -> Result<(), CUresult> {
    let stream = call.stream(handle)?;
    let function = function.filter(|_| flags == 0).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    call.forbid_on_capturing(stream)?;
    let handle = handle as usize;
    // SAFETY: whoever adds a callback vouches that it may be called with that pointer when its
    // turn comes, on any thread.
    let run = move |status| unsafe {
        function(handle as CUstream, status, data.0 as *mut _);
    };
    call.submit(stream, Work::Callback(Arc::new(run)), &"cuStreamAddCallback".into()).map(|_| ())
}

/// Stream memory operations: a word is written, or waited for, when its turn comes.
pub(crate) mod values {
    use std::sync::{Arc, Mutex};

    use cuda_sys::types::{CUresult, CUstream};

    use crate::call::Call;
    use crate::race::AccessKind;
    use crate::stream::{Kernel, Work};

    fn write(
        call: &mut Call<'_>,
        stream: CUstream,
        address: u64,
        value: u64,
        flags: u32,
        bytes: u64,
    ) -> Result<(), CUresult> {
        let stream = call.stream(stream)?;
        let device = call.device_of(stream)?;
        let aligned = address.is_multiple_of(bytes);
        if flags > 1 || !aligned || !call.space.accessible(device, address, bytes, true) {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        call.cost = Some(call.costs.write_value(flags == 0));
        let kernel: Kernel =
            Arc::new(Mutex::new(move |memory: &mut crate::memory::DeviceMemory<'_>| {
                memory.store(address, value, bytes)?;
                memory.detect_gone(address, bytes, AccessKind::Write);
                Ok(())
            }));
        let what = call.name.into();
        call.submit(stream, Work::Kernel(kernel), &what).map(|_| ())
    }

    fn wait(
        call: &mut Call<'_>,
        stream: CUstream,
        address: u64,
        value: u64,
        flags: u32,
        bytes: u64,
    ) -> Result<(), CUresult> {
        const FLUSH: u32 = 1 << 30;
        let stream = call.stream(stream)?;
        let device = call.device_of(stream)?;
        let condition = flags & !FLUSH;
        let aligned = address.is_multiple_of(bytes);
        if condition > 3 || !aligned || !call.space.accessible(device, address, bytes, false) {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // No modelled device can flush what others wrote.
        if flags & FLUSH != 0 {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        let mut looked = false;
        let kernel: Kernel =
            Arc::new(Mutex::new(move |memory: &mut crate::memory::DeviceMemory<'_>| {
                let word = memory.load(address, bytes)?;
                // Not once for each time that it is looked at.
                if !std::mem::replace(&mut looked, true) {
                    memory.detect_gone(address, bytes, AccessKind::Read);
                }
                // The difference is taken as a signed number of the word's width.
                let ahead = match bytes {
                    4 => i64::from((word as u32).wrapping_sub(value as u32) as i32),
                    _ => word.wrapping_sub(value) as i64,
                };
                let met = match condition {
                    0 => ahead >= 0,
                    1 => word == value,
                    2 => word & value != 0,
                    _ => !(word | value) << (64 - 8 * bytes) != 0,
                };
                if met { Ok(()) } else { Err(CUresult::CUDA_ERROR_NOT_READY) }
            }));
        let what = call.name.into();
        call.submit(stream, Work::Kernel(kernel), &what).map(|_| ())
    }

    pub(crate) fn write32(
        call: &mut Call<'_>,
        stream: CUstream,
        address: u64,
        value: u32,
        flags: u32,
    ) -> Result<(), CUresult> {
        write(call, stream, address, u64::from(value), flags, 4)
    }

    pub(crate) fn write64(
        call: &mut Call<'_>,
        stream: CUstream,
        address: u64,
        value: u64,
        flags: u32,
    ) -> Result<(), CUresult> {
        write(call, stream, address, value, flags, 8)
    }

    pub(crate) fn wait32(
        call: &mut Call<'_>,
        stream: CUstream,
        address: u64,
        value: u32,
        flags: u32,
    ) -> Result<(), CUresult> {
        wait(call, stream, address, u64::from(value), flags, 4)
    }

    pub(crate) fn wait64(
        call: &mut Call<'_>,
        stream: CUstream,
        address: u64,
        value: u64,
        flags: u32,
    ) -> Result<(), CUresult> {
        wait(call, stream, address, value, flags, 8)
    }
}

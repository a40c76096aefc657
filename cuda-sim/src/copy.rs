//! Copies and memsets.
//!
//! A copy between page-locked host memory and the device runs in stream order like any work. One
//! from pageable host memory takes its bytes at the call, and one to pageable host memory has
//! arrived when the call returns, as the driver's staging has it. Memsets and copies within the
//! device return at once, also in their synchronous forms; so do copies from pageable memory, once
//! the stream's earlier work is done: where the bytes arrive, only the stream's order tells.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use cuda_sys::types::{CUcontext, CUresult, CUstream};

use crate::address::BASE;
use crate::arguments::Untyped;
use crate::call::Call;
use crate::memory::DeviceMemory;
use crate::race::StreamKey;
use crate::stream::{Kernel, Work};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// Where one end of a copy is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Mapped device memory, or page-locked host memory.
    Reachable,
    /// Host memory that the driver knows nothing of.
    Pageable,
}

fn kernel(
    body: impl FnMut(&mut DeviceMemory<'_>) -> Result<(), CUresult> + Send + 'static,
) -> Kernel {
    Arc::new(Mutex::new(body))
}

impl Call<'_> {
    fn legacy_stream(&mut self) -> Result<StreamKey, CUresult> {
        self.stream(std::ptr::null_mut())
    }

    fn submit_kernel(&mut self, stream: StreamKey, kernel: Kernel) -> Result<(), CUresult> {
        let what = self.name.into();
        self.submit(stream, Work::Kernel(kernel), &what).map(|_| ())
    }

    /// Every device address of a copy must be mapped when the call is made.
    fn require(
        &self,
        stream: StreamKey,
        address: u64,
        bytes: u64,
        write: bool,
    ) -> Result<(), CUresult> {
        let device = self.device_of(stream)?;
        if self.space.accessible(device, address, bytes, write) { Ok(()) } else { Err(INVALID) }
    }

    /// Whether a range is in one piece of cuMemAlloc's memory of any device: copies within the devices reach
    /// that without peer access, beside what the stream's own device can use.
    fn is_allocated(&self, address: u64, bytes: u64) -> bool {
        let holds = |(start, size)| address - start <= size && bytes <= size - (address - start);
        self.heaps.iter().any(|heap| heap.find(address).is_some_and(holds))
    }

    fn host_place(&self, address: u64, bytes: u64) -> Place {
        if self.space.host.holds(address, bytes) { Place::Reachable } else { Place::Pageable }
    }

    /// Where the end of a copy is that the call says is the host's: nobody on the host can follow an
    /// address of the device.
    fn host_end(&mut self, address: u64, bytes: u64) -> Result<Place, CUresult> {
        if address >= BASE {
            self.misuse(&format!("{address:#x} is no address of the host"));
            return Err(INVALID);
        }
        Ok(self.host_place(address, bytes))
    }

    /// Where either end of a copy is: no device address is a host address.
    fn place(&self, address: u64, bytes: u64) -> Place {
        if address >= BASE { Place::Reachable } else { self.host_place(address, bytes) }
    }

    /// Gives a copy to a stream. The caller of the driver vouches for the host's end.
    fn copy(
        &mut self,
        stream: StreamKey,
        to: (u64, Place),
        from: (u64, Place),
        bytes: u64,
    ) -> Result<(), CUresult> {
        let ((to, to_place), (from, from_place)) = (to, from);
        if bytes == 0 {
            return Ok(());
        }
        let within_devices = to.min(from) >= BASE;
        let mut by_others = false;
        for (place, address, write) in [(to_place, to, true), (from_place, from, false)] {
            if place == Place::Reachable && self.require(stream, address, bytes, write).is_err() {
                if !within_devices || !self.is_allocated(address, bytes) {
                    return Err(INVALID);
                }
                by_others = true;
            }
        }
        let capturing = self.capture_of(stream)?.is_some();
        match (to_place, from_place) {
            (Place::Reachable, Place::Reachable) if by_others => {
                let body = move |memory: &mut DeviceMemory<'_>| {
                    memory.copy_between_devices(to, from, bytes)
                };
                self.submit_kernel(stream, kernel(body))
            }
            (Place::Reachable, Place::Reachable) => {
                self.submit_kernel(stream, kernel(move |memory| memory.copy(to, from, bytes)))
            }
            // SAFETY: whoever captures a copy vouches that the host memory is there whenever
            // the graph runs.
            (Place::Reachable, Place::Pageable) if capturing => self.submit_kernel(
                stream,
                kernel(move |memory| unsafe { memory.write_from_host(to, from, bytes) }),
            ),
            (Place::Reachable, Place::Pageable) => {
                let staged = Untyped(from).bytes(bytes as usize)?;
                self.submit_kernel(stream, kernel(move |memory| memory.write(to, &staged)))
            }
            (Place::Pageable, Place::Reachable) => {
                if to == 0 {
                    return Err(INVALID);
                }
                let given_up = Arc::new(AtomicBool::new(false));
                let seen = Arc::clone(&given_up);
                let body = kernel(move |memory| {
                    if seen.load(Ordering::Relaxed) {
                        return Ok(());
                    }
                    // SAFETY: the caller vouches for the target, and the call does not return
                    // before the copy is done or given up, unless it is captured: see above.
                    unsafe { memory.read_to_host(to, from, bytes) }
                });
                self.submit_kernel(stream, body)?;
                if capturing {
                    return Ok(());
                }
                let done = self.finish_copy(stream);
                given_up.store(done.is_err(), Ordering::Relaxed);
                done
            }
            (Place::Pageable, Place::Pageable) if capturing => {
                if to == 0 || from == 0 {
                    return Err(INVALID);
                }
                let body = kernel(move |_| {
                    // SAFETY: whoever captures a copy vouches that the memory of both ends is there whenever
                    // the graph runs, and that nobody else uses it meanwhile; the two may overlap.
                    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes as usize) };
                    Ok(())
                });
                self.submit_kernel(stream, body)
            }
            (Place::Pageable, Place::Pageable) => {
                let staged = Untyped(from).bytes(bytes as usize)?;
                if to == 0 {
                    return Err(INVALID);
                }
                self.wait_stream(stream)?;
                // SAFETY: the caller vouches for both ends; the source was copied out first,
                // so that they may overlap.
                unsafe {
                    std::ptr::copy_nonoverlapping(staged.as_ptr(), to as *mut u8, staged.len());
                }
                Ok(())
            }
        }
    }

    /// A synchronous copy with an end on the host. From pageable memory it is staged once the stream
    /// is done with what it has: whether the bytes have arrived the host does not know.
    fn copy_now(
        &mut self,
        to: (u64, Place),
        from: (u64, Place),
        bytes: u64,
    ) -> Result<(), CUresult> {
        let stream = self.legacy_stream()?;
        self.forbid_in_capture()?;
        self.capture_of(stream)?;
        if bytes == 0 {
            return Ok(());
        }
        if from.1 == Place::Pageable && to.0 >= BASE {
            // What is refused waits for nothing.
            self.require(stream, to.0, bytes, true)?;
            self.finish_copy(stream)?;
            return self.copy(stream, to, from, bytes);
        }
        self.copy(stream, to, from, bytes)?;
        self.finish_copy(stream)
    }

    /// Ends a synchronous copy: it is done, or has failed, when the call returns.
    fn finish_copy(&mut self, stream: StreamKey) -> Result<(), CUresult> {
        self.wait_stream(stream)?;
        let context = self.context_of(stream).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
        self.healthy(context)
    }
}

pub(crate) fn to_device(
    call: &mut Call<'_>,
    to: u64,
    from: Untyped,
    bytes: usize,
) -> Result<(), CUresult> {
    let place = call.host_end(from.0, bytes as u64)?;
    call.copy_now((to, Place::Reachable), (from.0, place), bytes as u64)
}

pub(crate) fn to_host(
    call: &mut Call<'_>,
    to: Untyped,
    from: u64,
    bytes: usize,
) -> Result<(), CUresult> {
    let place = call.host_end(to.0, bytes as u64)?;
    call.copy_now((to.0, place), (from, Place::Reachable), bytes as u64)
}

pub(crate) fn on_device(
    call: &mut Call<'_>,
    to: u64,
    from: u64,
    bytes: usize,
) -> Result<(), CUresult> {
    call.forbid_in_capture()?;
    on_device_async(call, to, from, bytes, std::ptr::null_mut())
}

pub(crate) fn to_device_async(
    call: &mut Call<'_>,
    to: u64,
    from: Untyped,
    bytes: usize,
    stream: CUstream,
) -> Result<(), CUresult> {
    let stream = call.stream(stream)?;
    let place = call.host_end(from.0, bytes as u64)?;
    call.copy(stream, (to, Place::Reachable), (from.0, place), bytes as u64)
}

pub(crate) fn to_host_async(
    call: &mut Call<'_>,
    to: Untyped,
    from: u64,
    bytes: usize,
    stream: CUstream,
) -> Result<(), CUresult> {
    let stream = call.stream(stream)?;
    let place = call.host_end(to.0, bytes as u64)?;
    call.copy(stream, (to.0, place), (from, Place::Reachable), bytes as u64)
}

pub(crate) fn on_device_async(
    call: &mut Call<'_>,
    to: u64,
    from: u64,
    bytes: usize,
    stream: CUstream,
) -> Result<(), CUresult> {
    let stream = call.stream(stream)?;
    call.copy(stream, (to, Place::Reachable), (from, Place::Reachable), bytes as u64)
}

pub(crate) fn any_async(
    call: &mut Call<'_>,
    to: u64,
    from: u64,
    bytes: usize,
    stream: CUstream,
) -> Result<(), CUresult> {
    let stream = call.stream(stream)?;
    let bytes = bytes as u64;
    let (to_place, from_place) = (call.place(to, bytes), call.place(from, bytes));
    call.copy(stream, (to, to_place), (from, from_place), bytes)
}

pub(crate) fn any(call: &mut Call<'_>, to: u64, from: u64, bytes: usize) -> Result<(), CUresult> {
    let within_device = to.min(from) >= BASE;
    if within_device {
        return on_device(call, to, from, bytes);
    }
    let bytes = bytes as u64;
    let (to_place, from_place) = (call.place(to, bytes), call.place(from, bytes));
    call.copy_now((to, to_place), (from, from_place), bytes)
}

pub(crate) fn peer_async(
    call: &mut Call<'_>,
    to: u64,
    to_context: CUcontext,
    from: u64,
    from_context: CUcontext,
    bytes: usize,
    stream: CUstream,
) -> Result<(), CUresult> {
    let stream = call.stream(stream)?;
    for (context, address, write) in [(to_context, to, true), (from_context, from, false)] {
        let context = call.context(context)?;
        call.healthy(context)?;
        let device = call.contexts.by_key[&context].device;
        if !call.space.accessible(device, address, bytes as u64, write) {
            return Err(INVALID);
        }
    }
    let bytes = bytes as u64;
    // The copy engine moves bytes between devices that cannot reach each other.
    call.submit_kernel(stream, kernel(move |memory| memory.copy_between_devices(to, from, bytes)))
}

pub(crate) fn peer(
    call: &mut Call<'_>,
    to: u64,
    to_context: CUcontext,
    from: u64,
    from_context: CUcontext,
    bytes: usize,
) -> Result<(), CUresult> {
    call.forbid_in_capture()?;
    peer_async(call, to, to_context, from, from_context, bytes, std::ptr::null_mut())
}

/// Memsets of one width: the synchronous form and the one on a stream.
macro_rules! memset {
    ($sync:ident, $async:ident, $word:ty, $fill:ident) => {
        pub(crate) fn $async(
            call: &mut Call<'_>,
            to: u64,
            value: $word,
            count: usize,
            stream: CUstream,
        ) -> Result<(), CUresult> {
            const WIDTH: u64 = size_of::<$word>() as u64;
            let stream = call.stream(stream)?;
            let count = count as u64;
            let bytes = count.checked_mul(WIDTH).ok_or(INVALID)?;
            if bytes == 0 {
                return Ok(());
            }
            if !to.is_multiple_of(WIDTH) {
                return Err(INVALID);
            }
            call.require(stream, to, bytes, true)?;
            call.submit_kernel(stream, kernel(move |memory| memory.$fill(to, value, count)))
        }

        pub(crate) fn $sync(
            call: &mut Call<'_>,
            to: u64,
            value: $word,
            count: usize,
        ) -> Result<(), CUresult> {
            call.forbid_in_capture()?;
            $async(call, to, value, count, std::ptr::null_mut())
        }
    };
}

memset!(set_d8, set_d8_async, u8, fill_u8);
memset!(set_d16, set_d16_async, u16, fill_u16);
memset!(set_d32, set_d32_async, u32, fill_u32);

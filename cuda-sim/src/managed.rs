//! Managed memory: cuMemAllocManaged and cuMemPrefetchAsync.
//!
//! It is host memory that every device reaches at its host address. Where its pages are at a time is
//! not modelled: it takes no device memory, and a prefetch only keeps its place in the stream's order.

use cuda_sys::types::{CUdevice, CUmemAttach_flags_enum, CUresult, CUstream};

use crate::arguments::Out;
use crate::call::Call;
use crate::context::ContextKey;
use crate::memory::HostKind;
use crate::stream::Work;

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;
/// The host, where a prefetch takes a device (`CU_DEVICE_CPU`).
const CPU: CUdevice = -1;

/// Whether managed memory begins at an address.
pub(crate) fn is_start(call: &Call<'_>, address: u64) -> bool {
    let found = call.space.host.find(address);
    found.is_some_and(|(start, host)| start == address && host.is_managed())
}

pub(crate) fn allocate(
    call: &mut Call<'_>,
    out: Out<u64>,
    bytes: usize,
    flags: u32,
) -> Result<(), CUresult> {
    use CUmemAttach_flags_enum as Attach;
    let context = call.current()?;
    call.forbid_in_capture()?;
    out.required()?;
    let attached = [Attach::CU_MEM_ATTACH_GLOBAL.0, Attach::CU_MEM_ATTACH_HOST.0].contains(&flags);
    if bytes == 0 || !attached {
        return Err(INVALID);
    }
    let id = call.space.physical.foreign_id();
    let start = call.space.host.allocate(bytes as u64, 0, id, HostKind::Managed, context)?;
    out.set(start)
}

/// cuMemFree of managed memory: it waits for the device that it was made on, though any may use it.
pub(crate) fn free(call: &mut Call<'_>, address: u64, context: ContextKey) -> Result<(), CUresult> {
    call.wait_for_users_of(address)?;
    let id = call.space.host.remove(address, HostKind::Managed).ok_or(INVALID)?;
    call.space.forget(id);
    call.healthy(context)
}

pub(crate) fn prefetch(
    call: &mut Call<'_>,
    address: u64,
    bytes: usize,
    device: CUdevice,
    stream: CUstream,
) -> Result<(), CUresult> {
    let stream = call.stream(stream)?;
    call.forbid_on_capturing(stream)?;
    if device != CPU {
        call.device(device)?;
    }
    let managed = call.space.host.find(address).is_some_and(|(_, host)| host.is_managed());
    if bytes == 0 || !managed || !call.space.host.holds(address, bytes as u64) {
        return Err(INVALID);
    }
    let what = call.name.into();
    call.enqueue(stream, &[], Work::Order, &what).map(|_| ())
}

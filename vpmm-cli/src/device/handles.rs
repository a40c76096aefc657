//! Physical handles of one length, side by side in a reservation of their own: what the driver's
//! calls for virtual memory are measured on.

use cuda_sys::types::*;

use super::calls::{Calls, call, host_size};

/// So many handles and the addresses for them. Whatever of it is made goes at drop.
#[derive(Debug)]
pub(super) struct Handles<'a> {
    calls: Calls<'a>,
    bytes_each: u64,
    count: usize,
    base: u64,
    made: Vec<CUmemGenericAllocationHandle>,
    mapped: usize,
}

impl<'a> Handles<'a> {
    /// Reserves addresses for `count` handles of `bytes_each` bytes, a multiple of the granule.
    pub(super) fn reserve(calls: Calls<'a>, count: usize, bytes_each: u64) -> vpmm::Result<Self> {
        let mut base = 0;
        let bytes = bytes_each * count as u64;
        // SAFETY: the pointer is to a live CUdeviceptr; no address is asked for.
        unsafe { call!(calls, bytes, cuMemAddressReserve(&mut base, host_size(bytes), 0, 0, 0))? };
        Ok(Self { calls, bytes_each, count, base, made: Vec::with_capacity(count), mapped: 0 })
    }

    fn location(&self) -> CUmemLocation {
        CUmemLocation {
            type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            // A device's number is an int in the driver's own interface.
            id: i32::try_from(self.calls.device().ordinal()).unwrap_or(-1),
        }
    }

    /// Makes all of them.
    pub(super) fn create(&mut self) -> vpmm::Result<()> {
        let kind = CUmemAllocationProp {
            type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            location: self.location(),
            ..CUmemAllocationProp::default()
        };
        let (calls, bytes) = (&self.calls, self.bytes_each);
        while self.made.len() < self.count {
            let mut handle = 0;
            // SAFETY: both pointers are to live values of the right types; flags must be 0.
            unsafe { call!(calls, bytes, cuMemCreate(&mut handle, host_size(bytes), &kind, 0))? };
            self.made.push(handle);
        }
        Ok(())
    }

    /// Maps all that are made, each behind the one before it.
    pub(super) fn map(&mut self) -> vpmm::Result<()> {
        let (calls, bytes) = (&self.calls, self.bytes_each);
        while let Some(handle) = self.made.get(self.mapped) {
            let at = self.base + bytes * self.mapped as u64;
            // SAFETY: the handle is alive and so long, and nothing is mapped at these addresses, which
            // are of the reservation.
            unsafe { call!(calls, bytes, cuMemMap(at, host_size(bytes), 0, *handle, 0))? };
            self.mapped += 1;
        }
        Ok(())
    }

    /// Lets the device at all that are mapped, in one call.
    pub(super) fn set_access(&self) -> vpmm::Result<()> {
        let access = CUmemAccessDesc {
            location: self.location(),
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let (calls, bytes) = (&self.calls, self.bytes_each * self.mapped as u64);
        // SAFETY: the range is whole mappings; the pointer is to one live description.
        unsafe { call!(calls, bytes, cuMemSetAccess(self.base, host_size(bytes), &access, 1)) }
    }

    /// Unmaps all that are mapped, in one call. Nothing has ever used them.
    pub(super) fn unmap(&mut self) -> vpmm::Result<()> {
        let (calls, bytes) = (&self.calls, self.bytes_each * self.mapped as u64);
        // SAFETY: the range is whole mappings, whose addresses nobody was given.
        unsafe { call!(calls, bytes, cuMemUnmap(self.base, host_size(bytes)))? };
        self.mapped = 0;
        Ok(())
    }

    /// Gives all of them back.
    pub(super) fn release(&mut self) -> vpmm::Result<()> {
        let calls = &self.calls;
        while let Some(handle) = self.made.pop() {
            // SAFETY: made in `create`, and given back once, here.
            unsafe { call!(calls, 0, cuMemRelease(handle))? };
        }
        Ok(())
    }
}

impl Drop for Handles<'_> {
    fn drop(&mut self) {
        // A failure leaves nothing to do; addresses that are still mapped cannot be given back.
        if (self.mapped == 0 || self.unmap().is_ok()) && self.release().is_ok() {
            let (calls, bytes) = (&self.calls, self.bytes_each * self.count as u64);
            // SAFETY: the whole reservation, with nothing mapped in it any more.
            let _ = unsafe { call!(calls, bytes, cuMemAddressFree(self.base, host_size(bytes))) };
        }
    }
}

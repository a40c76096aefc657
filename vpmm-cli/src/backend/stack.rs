//! A stack of resources as an allocator under test.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use stacks::{Any, Builder, Peak, Stack};
use vpmm::resource::MIN_ALIGN;
use vpmm::{DevicePtr, MemoryResource, StreamHandle};

use super::Backend;
use crate::device::Machine;

pub(crate) struct StackBackend<'a> {
    machine: &'a Machine,
    resource: Any,
    peaks: Vec<Peak>,
    calls_before: vpmm::DriverCalls,
    /// Pointers that are more than their address, of resources that want them back.
    tagged: Mutex<HashMap<u64, DevicePtr>>,
}

impl<'a> StackBackend<'a> {
    pub(crate) fn new(
        stack: &Stack,
        machine: &'a Machine,
        limit_bytes: Option<u64>,
    ) -> vpmm::Result<Self> {
        let calls_before = machine.driver().calls();
        let mut builder = Builder::new(machine.device()).limited(limit_bytes).measured();
        let resource = builder.build(stack)?.resource().clone();
        let peaks = builder.into_peaks();
        Ok(Self { machine, resource, peaks, calls_before, tagged: Mutex::default() })
    }

    /// The stack itself.
    pub(crate) fn resource(&self) -> &dyn MemoryResource {
        &*self.resource
    }
}

impl Backend for StackBackend<'_> {
    fn allocate(&self, bytes: u64, stream: StreamHandle) -> vpmm::Result<u64> {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let ptr = self.resource.allocate(bytes, MIN_ALIGN, stream)?;
        let address = ptr.address();
        if ptr != DevicePtr::from_address(address) {
            let mut tagged = self.tagged.lock().unwrap_or_else(PoisonError::into_inner);
            tagged.insert(address, ptr);
        }
        Ok(address)
    }

    unsafe fn free(&self, address: u64, bytes: u64, stream: StreamHandle) -> vpmm::Result<()> {
        let tagged = self.tagged.lock().unwrap_or_else(PoisonError::into_inner).remove(&address);
        let ptr = tagged.unwrap_or(DevicePtr::from_address(address));
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        self.resource.deallocate(ptr, bytes, MIN_ALIGN, stream)
    }

    fn peak_mapped_bytes(&self) -> vpmm::Result<u64> {
        self.peaks.iter().map(|peak| peak()).sum()
    }

    fn driver_calls(&self) -> u64 {
        self.machine.driver().calls().since(&self.calls_before).total()
    }

    fn map(&self) -> String {
        let peak = self.peak_mapped_bytes().unwrap_or(0);
        format!("{peak} bytes were held at most by\n{}", self.resource.describe())
    }
}

//! A stack of resources as an allocator under test.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use stacks::{Any, Builder, Built, Face, Peak, Stack};
use vpmm::resource::MIN_ALIGN;
use vpmm::{DevicePtr, MemoryResource, StreamHandle};

use super::Backend;
use crate::device::Machine;

pub(crate) struct StackBackend<'a> {
    machine: &'a Machine,
    resource: Any,
    built: Arc<Built>,
    peaks: Vec<Peak>,
    calls_before: vpmm::DriverCalls,
    /// Host memory is freed by the very pointer that was given out, and not by its address.
    wants_pointers: bool,
    /// Those pointers. Of such resources alone: it takes as long as a fast call, and calls are timed.
    pointers: Mutex<HashMap<u64, DevicePtr>>,
}

impl<'a> StackBackend<'a> {
    pub(crate) fn new(
        stack: &Stack,
        machine: &'a Machine,
        limit_bytes: Option<u64>,
    ) -> vpmm::Result<Self> {
        let calls_before = machine.driver().calls();
        let mut builder = Builder::new(machine.device()).limited(limit_bytes).measured();
        let built = builder.build(stack)?;
        let resource = built.resource().clone();
        let peaks = builder.into_peaks();
        let facts = resource.facts();
        let wants_pointers = facts.host_accessible && !facts.managed;
        let pointers = Mutex::default();
        Ok(Self { machine, resource, built, peaks, calls_before, wants_pointers, pointers })
    }

    /// The stack itself.
    pub(crate) fn resource(&self) -> &dyn MemoryResource {
        &*self.resource
    }

    fn pointers(&self) -> MutexGuard<'_, HashMap<u64, DevicePtr>> {
        self.pointers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Backend for StackBackend<'_> {
    fn allocate(&self, bytes: u64, stream: StreamHandle) -> vpmm::Result<u64> {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let ptr = self.resource.allocate(bytes, MIN_ALIGN, stream)?;
        let address = ptr.address();
        if self.wants_pointers {
            self.pointers().insert(address, ptr);
        }
        Ok(address)
    }

    unsafe fn free(&self, address: u64, bytes: u64, stream: StreamHandle) -> vpmm::Result<()> {
        let mut ptr = DevicePtr::from_address(address);
        if self.wants_pointers {
            ptr = self.pointers().remove(&address).unwrap_or(ptr);
        }
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let freed = self.resource.deallocate(ptr, bytes, MIN_ALIGN, stream);
        if freed.is_err() && self.wants_pointers {
            self.pointers().insert(address, ptr);
        }
        freed
    }

    fn peak_mapped_bytes(&self) -> vpmm::Result<u64> {
        self.peaks.iter().map(|peak| peak()).sum()
    }

    fn is_for_the_device(&self) -> bool {
        self.resource.facts().device_accessible
    }

    fn lost_rows(&self) -> Vec<(PathBuf, u64)> {
        let lost = |built: &Arc<Built>| match built.face() {
            Face::Logging(log, path) => Some((path.clone(), log.lost_rows())),
            _ => None,
        };
        let logs =
            std::iter::successors(Some(&self.built), |built| built.upstream()).filter_map(lost);
        logs.filter(|(_, rows)| *rows > 0).collect()
    }

    fn driver_calls(&self) -> u64 {
        self.machine.driver().calls().since(&self.calls_before).total()
    }

    fn map(&self) -> String {
        let peak = self.peak_mapped_bytes().unwrap_or(0);
        format!("{peak} bytes were held at most by\n{}", self.resource.describe())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use cuda_sys::types::CUresult;

    use super::*;
    use crate::device::Setup;

    fn backend<'a>(stack: &str, machine: &'a Machine) -> StackBackend<'a> {
        StackBackend::new(&stack.parse().unwrap(), machine, None).unwrap()
    }

    /// Calls are timed, on several threads: a lock of the command's own would count as the resource's time,
    /// and have the threads wait for each other.
    #[test]
    fn calls_take_no_lock_of_the_commands_own() {
        let machine = Machine::simulated(Setup::default()).unwrap();
        let stream = machine.device().stream().unwrap();
        // The first two give out pointers that are more than their address, and take bare ones.
        for stack in ["caching", "statistics(paged)", "arena", "managed"] {
            let backend = backend(stack, &machine);
            let held = backend.pointers();
            let (done, is_done) = mpsc::channel();
            thread::scope(|scope| {
                scope.spawn(|| {
                    machine.calls().enter().unwrap();
                    let address = backend.allocate(1000, stream.handle()).unwrap();
                    // SAFETY: allocated above, freed once.
                    unsafe { backend.free(address, 1000, stream.handle()) }.unwrap();
                    done.send(()).unwrap();
                });
                let is_done = is_done.recv_timeout(Duration::from_secs(20));
                drop(held);
                assert_eq!(is_done, Ok(()), "{stack} waits for nobody");
            });
        }
    }

    #[test]
    fn host_memory_is_freed_by_its_pointer() {
        let machine = Machine::simulated(Setup::default()).unwrap();
        let stream = machine.device().stream().unwrap();
        for stack in ["host", "statistics(pinned)", "coalescing(pinned)"] {
            let backend = backend(stack, &machine);
            for _ in 0..3 {
                let address = backend.allocate(1000, stream.handle()).unwrap();
                // SAFETY: allocated above, freed once.
                unsafe { backend.free(address, 1000, stream.handle()) }.unwrap();
            }
            assert!(backend.wants_pointers && backend.pointers().is_empty());
        }
    }

    #[test]
    fn host_memory_whose_free_was_refused_can_be_freed_again() {
        let machine = Machine::simulated(Setup::default()).unwrap();
        let simulator = machine.simulator().unwrap();
        let stream = machine.device().stream().unwrap();
        let backend = backend("pinned", &machine);
        let address = backend.allocate(1000, stream.handle()).unwrap();
        simulator.fail_nth("cuMemFreeHost", 1, CUresult::CUDA_ERROR_UNKNOWN);
        // SAFETY: allocated above, and freed once: the first is refused.
        let free = || unsafe { backend.free(address, 1000, stream.handle()) };
        assert!(free().is_err());
        free().unwrap();
        assert_eq!(simulator.leaks().host_allocations, 0);
    }
}

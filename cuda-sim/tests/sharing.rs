//! Exported handles: between two simulators, and between two processes.

mod support;

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::process::Command;

use cuda_sim::Simulator;
use cuda_sys::types::*;
use support::{GRANULE, Gpu, call, exportable, ok};

const FILE: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
const FABRIC: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC;
/// Set in the process that a test starts: the descriptor it inherits.
const DESCRIPTOR: &str = "CUDA_SIM_TEST_DESCRIPTOR";

impl Gpu {
    fn create_exportable(&self, bytes: usize) -> u64 {
        let mut handle = 0;
        ok!(self, cuMemCreate(&mut handle, bytes, &exportable(0), 0));
        handle
    }

    fn export(&self, handle: u64) -> OwnedFd {
        let mut descriptor = -1_i32;
        let out = (&raw mut descriptor).cast();
        ok!(self, cuMemExportToShareableHandle(out, handle, FILE, 0));
        // SAFETY: the driver answered with a new descriptor that is the caller's.
        unsafe { OwnedFd::from_raw_fd(descriptor) }
    }

    fn import(&self, file: &impl AsRawFd) -> Result<u64, CUresult> {
        let mut handle = 0;
        let number = file.as_raw_fd() as usize as *mut _;
        match call!(self, cuMemImportFromShareableHandle(&mut handle, number, FILE)) {
            CUresult::CUDA_SUCCESS => Ok(handle),
            code => Err(code),
        }
    }

    fn map_new(&self, bytes: usize, handle: u64) -> u64 {
        let address = self.reserve(bytes);
        self.map(address, bytes, handle);
        address
    }
}

#[test]
fn two_simulators_share_bytes() {
    let [owner, user] = [(); 2].map(|()| Gpu::new(Simulator::builder()));
    let handle = owner.create_exportable(2 * GRANULE);
    let mine = owner.map_new(2 * GRANULE, handle);
    let stream = owner.stream();
    // What was written before the first export is still there after it.
    owner.fill(mine + GRANULE as u64, 1, 4, stream);
    ok!(owner, cuStreamSynchronize(stream));
    let file = owner.export(handle);
    owner.fill(mine, 2, 4, stream);
    ok!(owner, cuStreamSynchronize(stream));
    let imported = user.import(&file).unwrap();
    drop(file);
    let theirs = user.map_new(2 * GRANULE, imported);
    assert_eq!((user.word(theirs), user.word(theirs + GRANULE as u64)), (2, 1));
    let stream = user.stream();
    user.fill(theirs + 4, 3, 1, stream);
    ok!(user, cuStreamSynchronize(stream));
    assert_eq!(owner.word(mine + 4), 3);
    // The memory is the owner's to count, and outlives it.
    assert_eq!((owner.sim.memory_used(0), user.sim.memory_used(0)), (2 * GRANULE as u64, 0));
    ok!(owner, cuMemUnmap(mine, 2 * GRANULE));
    ok!(owner, cuMemRelease(handle));
    assert_eq!(owner.sim.memory_used(0), 0);
    assert_eq!(user.word(theirs), 2);
    let mut prop = CUmemAllocationProp::default();
    ok!(user, cuMemGetAllocationPropertiesFromHandle(&mut prop, imported));
    assert_eq!((prop.location.id, prop.requestedHandleTypes), (0, FILE));
    ok!(user, cuMemUnmap(theirs, 2 * GRANULE));
    ok!(user, cuMemRelease(imported));
    assert_eq!(user.sim.leaks().handles, 0);
}

#[test]
fn an_import_by_the_owner_is_the_same_memory() {
    let gpu = Gpu::new(Simulator::builder());
    let handle = gpu.create_exportable(GRANULE);
    let (first, again) = (gpu.export(handle), gpu.export(handle));
    let imported = gpu.import(&first).unwrap();
    assert_ne!(imported, handle);
    let (a, b) = (gpu.map_new(GRANULE, handle), gpu.map_new(GRANULE, imported));
    let (s, t) = (gpu.stream(), gpu.stream());
    gpu.fill(a, 1, 1, s);
    gpu.fill(b, 2, 1, t);
    assert_eq!(gpu.sim.report().races.len(), 1, "one memory, two streams");
    drop(again);
    assert_eq!(gpu.sim.memory_used(0), GRANULE as u64);
}

#[test]
fn fabric_handles_name_memory_of_this_host() {
    let fabric = || Gpu::new(Simulator::builder().fabric(true));
    let [owner, user] = [(); 2].map(|()| fabric());
    let prop = CUmemAllocationProp { requestedHandleTypes: FABRIC, ..exportable(0) };
    let mut handle = 0;
    ok!(owner, cuMemCreate(&mut handle, GRANULE, &prop, 0));
    let memory = owner.map_new(GRANULE, handle);
    let stream = owner.stream();
    owner.fill(memory, 9, 4, stream);
    ok!(owner, cuStreamSynchronize(stream));
    let mut name = CUmemFabricHandle::default();
    ok!(owner, cuMemExportToShareableHandle((&raw mut name).cast(), handle, FABRIC, 0));
    let import = |gpu: &Gpu, name: &mut CUmemFabricHandle| {
        let mut handle = 0;
        let name = std::ptr::from_mut(name).cast();
        (call!(gpu, cuMemImportFromShareableHandle(&mut handle, name, FABRIC)), handle)
    };
    let (code, imported) = import(&user, &mut name);
    assert_eq!(code, CUresult::CUDA_SUCCESS);
    assert_eq!(user.word(user.map_new(GRANULE, imported)), 9);
    name.data[0] ^= 1;
    assert_eq!(import(&user, &mut name).0, CUresult::CUDA_ERROR_INVALID_VALUE);
    let none = Gpu::new(Simulator::builder());
    assert_eq!(import(&none, &mut name).0, CUresult::CUDA_ERROR_NOT_SUPPORTED);
    assert_eq!(
        call!(none, cuMemCreate(&mut handle, GRANULE, &prop, 0)),
        CUresult::CUDA_ERROR_INVALID_VALUE
    );
}

#[test]
fn what_cannot_be_shared() {
    let gpu = Gpu::new(Simulator::builder());
    let private = gpu.create(GRANULE);
    let mut descriptor = -1_i32;
    let out = (&raw mut descriptor).cast();
    let code = call!(gpu, cuMemExportToShareableHandle(out, private, FILE, 0));
    assert_eq!(code, CUresult::CUDA_ERROR_INVALID_VALUE);
    let foreign = std::fs::File::open("/dev/null").unwrap();
    assert_eq!(gpu.import(&foreign), Err(CUresult::CUDA_ERROR_UNKNOWN));
    let name = std::ffi::CString::new(format!("cuda-sim:device={}", usize::MAX)).unwrap();
    let named = rustix::fs::memfd_create(&name, rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    assert_eq!(gpu.import(&named), Err(CUresult::CUDA_ERROR_INVALID_DEVICE));
    gpu.sim.assert_clean();
    // A file of a device that this machine does not have.
    let owner = Gpu::new(Simulator::builder().devices(2));
    let mut handle = 0;
    ok!(owner, cuMemCreate(&mut handle, GRANULE, &exportable(1), 0));
    let missing = Err(CUresult::CUDA_ERROR_INVALID_DEVICE);
    assert_eq!(gpu.import(&owner.export(handle)), missing);
}

#[test]
fn two_processes_share_bytes() {
    if let Ok(descriptor) = std::env::var(DESCRIPTOR) {
        return write_in_child(descriptor.parse().unwrap());
    }
    let gpu = Gpu::new(Simulator::builder());
    let handle = gpu.create_exportable(GRANULE);
    let memory = gpu.map_new(GRANULE, handle);
    let stream = gpu.stream();
    gpu.fill(memory, 41, 1, stream);
    ok!(gpu, cuStreamSynchronize(stream));
    let file = gpu.export(handle);
    // A plain duplicate, unlike the exported descriptor, is inherited.
    let inherited = rustix::io::dup(&file).unwrap();
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "two_processes_share_bytes"])
        .env(DESCRIPTOR, inherited.as_raw_fd().to_string())
        .status()
        .unwrap();
    assert!(status.success());
    assert_eq!(gpu.word(memory), 42);
    gpu.sim.assert_clean();
}

fn write_in_child(descriptor: i32) {
    // SAFETY: the parent left this descriptor open for its child.
    let file = unsafe { BorrowedFd::borrow_raw(descriptor) };
    let gpu = Gpu::new(Simulator::builder());
    let handle = gpu.import(&file).unwrap();
    let memory = gpu.map_new(GRANULE, handle);
    assert_eq!(gpu.word(memory), 41);
    let stream = gpu.stream();
    gpu.fill(memory, 42, 1, stream);
    ok!(gpu, cuStreamSynchronize(stream));
}

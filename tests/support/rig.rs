//! A device to test pools on, simulated or real, with kernels that write and check patterns.

#![allow(dead_code, reason = "each test uses a part")]

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cuda_sim::{Schedule, Simulator, kernels};
use cuda_sys::types::*;
use vpmm::{Device, Driver, Stream, StreamHandle};

/// Calls a driver function by name; anything but success fails the test.
macro_rules! call {
    ($driver:expr, $name:ident ( $( $arg:expr ),* $(,)? )) => {{
        let function = $driver.raw().$name.expect(concat!("the driver has no ", stringify!($name)));
        // SAFETY: the test passes live pointers of the right types and live handles.
        let code = unsafe { function($( $arg ),*) };
        assert_eq!(code, cuda_sys::types::CUresult::CUDA_SUCCESS, concat!(stringify!($name), ": {}"), code);
    }};
}
pub(crate) use call;

/// A device with the test kernels loaded.
pub(crate) struct Rig {
    pub(crate) driver: Driver,
    pub(crate) device: Device,
    pub(crate) sim: Option<Simulator>,
    module: CUmodule,
    fill: CUfunction,
    check: CUfunction,
    spin: CUfunction,
    /// A counter of mismatches in device memory.
    errors: CUdeviceptr,
    /// Whether the simulator touches the first word of each page of a long pattern: then whoever has the memory
    /// touches the same words, and uses that nothing orders are found where they first meet.
    pub(crate) by_page: bool,
    /// Flags of stalls, freed at the end: a kernel may still have to see that it was released.
    flags: Mutex<Vec<*mut u32>>,
    /// Whether events may be left at the end.
    leaves_events: AtomicBool,
    /// One test at a time on a GPU: some calls wait for the whole device, and would wait for
    /// another test's stall while that test waits for the driver's lock.
    _alone: Option<MutexGuard<'static, ()>>,
}

static GPU: Mutex<()> = Mutex::new(());

// SAFETY: the handles are tokens that any thread may pass to the driver; the flags are locked.
unsafe impl Sync for Rig {}

/// A kernel that keeps its stream busy until this is dropped.
pub(crate) struct Stall<'a> {
    flag: *mut u32,
    _rig: std::marker::PhantomData<&'a Rig>,
}

// SAFETY: the flag is host memory that any thread may write, as long as the rig lives.
unsafe impl Send for Stall<'_> {}

impl Rig {
    /// A simulated device whose work runs by this schedule.
    pub(crate) fn simulated(schedule: Schedule) -> Self {
        Self::on(Simulator::builder().schedule(schedule).seed(11).build().expect("a simulator"))
    }

    pub(crate) fn on(sim: Simulator) -> Self {
        let driver = Driver::new(sim.driver()).expect("the simulated driver starts");
        Self::new(driver, Some(sim), None)
    }

    /// A simulator by a driver that some of its functions were replaced in.
    pub(crate) fn with(driver: Driver, sim: Simulator) -> Self {
        Self::new(driver, Some(sim), None)
    }

    /// The first GPU, or nothing (with a word on the way) where there is none.
    pub(crate) fn gpu() -> Option<Self> {
        match Driver::load() {
            Ok(driver) => {
                let alone = GPU.lock().unwrap_or_else(PoisonError::into_inner);
                println!("{} runs on the GPU", std::thread::current().name().unwrap_or("a test"));
                Some(Self::new(driver, None, Some(alone)))
            }
            Err(error) => {
                println!("the GPU part is skipped: {error}");
                None
            }
        }
    }

    /// Runs a test on simulators whose work completes at once, late, and at random; and on a GPU.
    /// `VPMM_TEST_DEVICE=gpu` leaves the simulators out.
    pub(crate) fn everywhere(test: impl Fn(&Self)) {
        if std::env::var_os("VPMM_TEST_DEVICE").is_some_and(|device| device == "gpu") {
            test(&Self::gpu().expect("VPMM_TEST_DEVICE=gpu needs a GPU"));
            return;
        }
        Self::simulators(1, &test);
        if let Some(rig) = Self::gpu() {
            test(&rig);
        }
    }

    /// Runs a test on simulators with so many devices, by each schedule.
    fn simulators(devices: usize, test: impl Fn(&Self)) {
        for schedule in [Schedule::Eager, Schedule::Late { patience: 3 }, Schedule::Random] {
            let sim = Simulator::builder().devices(devices).schedule(schedule).seed(11);
            let rig = Self::on(sim.build().expect("a simulator"));
            test(&rig);
            rig.assert_clean();
        }
    }

    /// As [`everywhere`](Self::everywhere), on two devices that can reach each other's memory. A
    /// machine without skips the GPU's part, and says why.
    pub(crate) fn everywhere_with_peers(test: impl Fn(&Self, &Self)) {
        let gpu_only = std::env::var_os("VPMM_TEST_DEVICE").is_some_and(|device| device == "gpu");
        if !gpu_only {
            Self::simulators(2, |rig| test(rig, &rig.beside(1)));
        }
        let Some(rig) = Self::gpu() else { return };
        if rig.driver.device_count().expect("a count") < 2 {
            println!("the GPU part is skipped: it needs two devices");
            return;
        }
        let peer = rig.beside(1);
        let reach = |from: &Self, to: &Self| from.device.can_access(&to.device).expect("an answer");
        if reach(&rig, &peer) && reach(&peer, &rig) {
            test(&rig, &peer);
        } else {
            println!("the GPU part is skipped: the devices have no peer access");
        }
    }

    /// The same machine seen from another of its devices.
    pub(crate) fn beside(&self, ordinal: u32) -> Self {
        Self::of_device(self.driver.clone(), self.sim.clone(), None, ordinal)
    }

    fn new(driver: Driver, sim: Option<Simulator>, alone: Option<MutexGuard<'static, ()>>) -> Self {
        Self::of_device(driver, sim, alone, 0)
    }

    fn of_device(
        driver: Driver,
        sim: Option<Simulator>,
        alone: Option<MutexGuard<'static, ()>>,
        ordinal: u32,
    ) -> Self {
        let device = driver.device(ordinal).expect("the device");
        call!(driver, cuCtxSetCurrent(device.context()));
        let mut module = ptr::null_mut();
        call!(driver, cuModuleLoadData(&mut module, kernels::PTX.as_ptr().cast()));
        let function = |name: &std::ffi::CStr| {
            let mut function = ptr::null_mut();
            call!(driver, cuModuleGetFunction(&mut function, module, name.as_ptr()));
            function
        };
        let (fill, check, spin) =
            (function(c"vpmm_fill"), function(c"vpmm_check"), function(c"vpmm_spin"));
        let mut errors = 0;
        call!(driver, cuMemAlloc_v2(&mut errors, 8));
        call!(driver, cuMemsetD32_v2(errors, 0, 2));
        Self {
            driver,
            device,
            sim,
            module,
            fill,
            check,
            spin,
            errors,
            by_page: false,
            flags: Mutex::default(),
            leaves_events: AtomicBool::new(false),
            _alone: alone,
        }
    }

    pub(crate) fn stream(&self) -> Stream {
        self.device.stream().expect("a stream")
    }

    /// How many words a pattern touches over so many bytes, and how far apart: all of them on a
    /// GPU; few in the simulator, whose device memory is the host's.
    fn words(&self, bytes: u64) -> (u64, u64) {
        let all = bytes / 8;
        if self.sim.is_none() || all < 2 {
            return (all, 1);
        }
        const PAGE: u64 = 4096 / 8;
        if self.by_page && all >= 16 * PAGE {
            return (all.div_ceil(PAGE), PAGE);
        }
        let words = all.div_ceil(256 * 1024 / 8).max(6).min(all);
        (words, (all - 1) / (words - 1))
    }

    /// Enqueues the writing of a pattern over an allocation.
    pub(crate) fn fill(&self, address: u64, bytes: u64, seed: u64, stream: StreamHandle) {
        let (mut words, mut stride) = self.words(bytes);
        let (mut address, mut seed) = (address, seed);
        let arguments = stream_args([&mut address, &mut words, &mut stride, &mut seed]);
        self.launch(self.fill, arguments, stream);
    }

    /// Enqueues a check of that pattern; see [`mismatches`](Self::mismatches).
    pub(crate) fn check(&self, address: u64, bytes: u64, seed: u64, stream: StreamHandle) {
        let (mut words, mut stride) = self.words(bytes);
        let (mut address, mut seed, mut errors) = (address, seed, self.errors);
        let arguments =
            stream_args([&mut address, &mut words, &mut stride, &mut seed, &mut errors]);
        self.launch(self.check, arguments, stream);
    }

    fn launch<const N: usize>(
        &self,
        kernel: CUfunction,
        mut arguments: [*mut c_void; N],
        stream: StreamHandle,
    ) {
        call!(self.driver, cuCtxSetCurrent(self.device.context()));
        let (none, arguments) = (ptr::null_mut(), arguments.as_mut_ptr());
        call!(
            self.driver,
            cuLaunchKernel(kernel, 64, 1, 1, 256, 1, 1, 0, stream.raw(), arguments, none)
        );
    }

    /// Keeps a stream busy until the stall is dropped.
    pub(crate) fn stall(&self, stream: StreamHandle) -> Stall<'_> {
        call!(self.driver, cuCtxSetCurrent(self.device.context()));
        let mut host = ptr::null_mut();
        call!(self.driver, cuMemHostAlloc(&mut host, 8, CU_MEMHOSTALLOC_DEVICEMAP));
        let flag = host.cast::<u32>();
        // SAFETY: eight bytes of host memory, just allocated.
        unsafe { flag.write_volatile(0) };
        let mut address: CUdeviceptr = 0;
        call!(self.driver, cuMemHostGetDevicePointer_v2(&mut address, host, 0));
        let mut arguments = stream_args([&mut address]);
        let (none, arguments) = (ptr::null_mut(), arguments.as_mut_ptr());
        call!(
            self.driver,
            cuLaunchKernel(self.spin, 1, 1, 1, 1, 1, 1, 0, stream.raw(), arguments, none)
        );
        self.flags.lock().unwrap().push(flag);
        Stall { flag, _rig: std::marker::PhantomData }
    }

    /// Makes later work of `after` wait for what `before` has been given so far.
    pub(crate) fn order(&self, before: impl Into<StreamHandle>, after: impl Into<StreamHandle>) {
        let (before, after) = (before.into(), after.into());
        call!(self.driver, cuCtxSetCurrent(self.device.context()));
        let mut event = ptr::null_mut();
        call!(
            self.driver,
            cuEventCreate(&mut event, CUevent_flags_enum::CU_EVENT_DISABLE_TIMING.0)
        );
        call!(self.driver, cuEventRecord(event, before.raw()));
        call!(self.driver, cuStreamWaitEvent(after.raw(), event, 0));
        call!(self.driver, cuEventDestroy_v2(event));
    }

    /// Waits for the device and says how many words checked so far were not what was written.
    pub(crate) fn mismatches(&self) -> u64 {
        self.device.synchronize().expect("the device finishes");
        call!(self.driver, cuCtxSetCurrent(self.device.context()));
        let mut count = 0_u64;
        call!(self.driver, cuMemcpyDtoH_v2((&raw mut count).cast(), self.errors, 8));
        count
    }

    /// What has events may outlive this, or cannot give them back.
    pub(crate) fn may_leave_events(&self) {
        self.leaves_events.store(true, Ordering::Relaxed);
    }

    /// The simulator saw no race and no misuse.
    pub(crate) fn assert_clean(&self) {
        if let Some(sim) = &self.sim {
            sim.assert_clean();
        }
    }
}

fn stream_args<const N: usize>(arguments: [&mut u64; N]) -> [*mut c_void; N] {
    arguments.map(|argument| ptr::from_mut(argument).cast())
}

impl Drop for Rig {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        let mismatches = self.mismatches();
        // Whatever a test has checked, also where it has not asked what came of it. Who means uses to meet
        // unordered looks at what the simulator found.
        let raced = self.sim.as_ref().is_some_and(|sim| !sim.report().races.is_empty());
        assert!(raced || mismatches == 0, "{mismatches} words differ from what was written");
        for flag in std::mem::take(&mut *self.flags.lock().unwrap()) {
            call!(self.driver, cuMemFreeHost(flag.cast()));
        }
        call!(self.driver, cuMemFree_v2(self.errors));
        call!(self.driver, cuModuleUnload(self.module));
        call!(self.driver, cuCtxSetCurrent(ptr::null_mut()));
        // The pools of the test are gone, and their events with them: but where something is allocated still, or the
        // driver has refused to take things back.
        let leaks = self.sim.as_ref().map(Simulator::leaks).unwrap_or_default();
        let has_others = leaks.handles + leaks.pools + leaks.streams > 0;
        let may_leave = has_others || self.leaves_events.load(Ordering::Relaxed);
        assert!(may_leave || leaks.events == 0, "{leaks:?}");
    }
}

impl Drop for Stall<'_> {
    fn drop(&mut self) {
        // SAFETY: the flag is host memory that lives as long as the rig, and an aligned word.
        unsafe { AtomicU32::from_ptr(self.flag) }.store(1, Ordering::Release);
    }
}

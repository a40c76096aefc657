//! A driver with a clock around the calls that allocators make.
//!
//! A function of the driver's table carries no context, so the clock and the
//! functions behind it are the process's: one driver is timed at a time, and
//! [`DriverTimer::wrap`] refuses a second while the first is in use.
//!
//! Reading the clock costs as much as the cheapest driver calls. What it adds is
//! measured when a driver is wrapped and taken off in [`DriverTimer::spent`].

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::time::Instant;

use cuda_sys::DriverApi;
use cuda_sys::types::*;

/// Whether a driver is being timed.
static CLAIMED: AtomicBool = AtomicBool::new(false);
static CALLS: AtomicU64 = AtomicU64::new(0);
static NANOSECONDS: AtomicU64 = AtomicU64::new(0);

/// Makes one function per driver function that reads the clock around it, the
/// table of them, and where each finds the function behind it.
macro_rules! timed {
    ($( $name:ident ( $( $arg:ident : $ty:ty ),* $(,)? ); )*) => {
        /// The function behind each clock: the wrapped driver's, null before there was one.
        #[allow(non_upper_case_globals)]
        mod behind {
            use super::*;

            $( pub(super) static $name: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut()); )*
        }

        #[allow(non_snake_case)]
        mod clocked {
            use super::*;

            $(
                pub(super) unsafe extern "C" fn $name($( $arg: $ty ),*) -> CUresult {
                    let address = behind::$name.load(Ordering::Acquire);
                    // SAFETY: `wrap` stored the driver's own function of this name and signature,
                    // or nothing: null is `None`.
                    let function = unsafe {
                        std::mem::transmute::<
                            *mut c_void,
                            Option<unsafe extern "C" fn($( $ty ),*) -> CUresult>,
                        >(address)
                    };
                    let Some(function) = function else {
                        return CUresult::CUDA_ERROR_NOT_INITIALIZED;
                    };
                    // SAFETY: the caller keeps the function's contract, and the driver is loaded.
                    timed(|| unsafe { function($( $arg ),*) })
                }
            )*
        }

        /// The clocked functions. That this compiles proves that each has the signature
        /// that the bindings declare for its name.
        const CLOCKED: DriverApi = DriverApi {
            $( $name: Some(clocked::$name), )*
            ..DriverApi::EMPTY
        };

        /// Where the function of this name goes that is behind the clock.
        fn place(name: &CStr) -> Option<&'static AtomicPtr<c_void>> {
            match name.to_str() {
                $( Ok(stringify!($name)) => Some(&behind::$name), )*
                _ => None,
            }
        }
    };
}

timed! {
    cuCtxGetCurrent(context: *mut CUcontext);
    cuCtxPushCurrent_v2(context: CUcontext);
    cuCtxPopCurrent_v2(context: *mut CUcontext);
    cuCtxSetCurrent(context: CUcontext);
    cuCtxGetDevice(device: *mut CUdevice);
    cuCtxSynchronize();
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize);
    cuMemFree_v2(address: CUdeviceptr);
    cuStreamQuery(stream: CUstream);
    cuStreamSynchronize(stream: CUstream);
    cuStreamGetId(stream: CUstream, id: *mut u64);
    cuStreamGetCtx(stream: CUstream, context: *mut CUcontext);
    cuStreamGetFlags(stream: CUstream, flags: *mut c_uint);
    cuStreamIsCapturing(stream: CUstream, status: *mut CUstreamCaptureStatus);
    cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
    cuStreamWriteValue32_v2(stream: CUstream, at: CUdeviceptr, value: cuuint32_t, flags: c_uint);
    cuStreamWriteValue64_v2(stream: CUstream, at: CUdeviceptr, value: cuuint64_t, flags: c_uint);
    cuStreamWaitValue32_v2(stream: CUstream, at: CUdeviceptr, value: cuuint32_t, flags: c_uint);
    cuStreamWaitValue64_v2(stream: CUstream, at: CUdeviceptr, value: cuuint64_t, flags: c_uint);
    cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode);
    cuLaunchHostFunc(stream: CUstream, function: CUhostFn, argument: *mut c_void);
    cuEventCreate(event: *mut CUevent, flags: c_uint);
    cuEventDestroy_v2(event: CUevent);
    cuEventRecord(event: CUevent, stream: CUstream);
    cuEventRecordWithFlags(event: CUevent, stream: CUstream, flags: c_uint);
    cuEventQuery(event: CUevent);
    cuEventSynchronize(event: CUevent);
    cuDeviceGetAttribute(value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice);
    cuMemGetAllocationGranularity(
        granularity: *mut usize,
        properties: *const CUmemAllocationProp,
        option: CUmemAllocationGranularity_flags,
    );
    cuMemAddressReserve(
        address: *mut CUdeviceptr,
        bytes: usize,
        alignment: usize,
        hint: CUdeviceptr,
        flags: u64,
    );
    cuMemAddressFree(address: CUdeviceptr, bytes: usize);
    cuMemCreate(
        handle: *mut CUmemGenericAllocationHandle,
        bytes: usize,
        properties: *const CUmemAllocationProp,
        flags: u64,
    );
    cuMemRelease(handle: CUmemGenericAllocationHandle);
    cuMemMap(
        address: CUdeviceptr,
        bytes: usize,
        offset: usize,
        handle: CUmemGenericAllocationHandle,
        flags: u64,
    );
    cuMemUnmap(address: CUdeviceptr, bytes: usize);
    cuMemSetAccess(address: CUdeviceptr, bytes: usize, access: *const CUmemAccessDesc, count: usize);
    cuMemPoolCreate(pool: *mut CUmemoryPool, properties: *const CUmemPoolProps);
    cuMemPoolDestroy(pool: CUmemoryPool);
    cuMemPoolTrimTo(pool: CUmemoryPool, keep_bytes: usize);
    cuMemPoolSetAttribute(pool: CUmemoryPool, attribute: CUmemPool_attribute, value: *mut c_void);
    cuMemPoolGetAttribute(pool: CUmemoryPool, attribute: CUmemPool_attribute, value: *mut c_void);
    cuMemAllocAsync(address: *mut CUdeviceptr, bytes: usize, stream: CUstream);
    cuMemAllocFromPoolAsync(
        address: *mut CUdeviceptr,
        bytes: usize,
        pool: CUmemoryPool,
        stream: CUstream,
    );
    cuMemFreeAsync(address: CUdeviceptr, stream: CUstream);
}

/// Runs a driver call with the clock running.
#[inline(always)]
fn timed(call: impl FnOnce() -> CUresult) -> CUresult {
    let started = Instant::now();
    let code = call();
    let nanoseconds = started.elapsed().as_nanos();
    // 584 years of nanoseconds fit.
    NANOSECONDS.fetch_add(nanoseconds as u64, Ordering::Relaxed);
    CALLS.fetch_add(1, Ordering::Relaxed);
    code
}

/// Gives the clock back when the last clone of a wrapped driver is gone.
struct Claim {
    _behind: cuda_sys::Driver,
}

impl Drop for Claim {
    fn drop(&mut self) {
        CLAIMED.store(false, Ordering::Release);
    }
}

/// The clock around the calls of the driver that was wrapped.
#[derive(Clone, Copy, Debug)]
pub struct DriverTimer {
    /// How much longer than the call itself the clock shows, in nanoseconds.
    shown_ns: f64,
    /// How much longer than without the clock the caller waits, in nanoseconds.
    added_ns: f64,
}

/// A reading of the clock: calls so far, and their time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    calls: u64,
    nanoseconds: u64,
}

/// What lies between two readings, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DriverSpent {
    /// Time in the driver, as it would have been without the clock.
    pub driver_ns: f64,
    /// What the clock itself took, for whoever measured the whole from outside.
    pub clock_ns: f64,
}

impl DriverTimer {
    /// The same driver with a clock around every call that an allocator makes;
    /// `None` while another driver is being timed in this process.
    pub fn wrap(driver: &cuda_sys::Driver) -> Option<(cuda_sys::Driver, Self)> {
        CLAIMED.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).ok()?;
        let claim = Arc::new(Claim { _behind: driver.clone() });
        let timer = Self::calibrated();
        let lookup = |name: &'static CStr| {
            let own = driver.symbol(name);
            match place(name) {
                // What the driver lacks stays lacking.
                Some(place) if !own.is_null() => {
                    place.store(own.cast_mut(), Ordering::Release);
                    CLOCKED.symbol(name)
                }
                _ => own,
            }
        };
        // SAFETY: every answer is the driver's own function of that name, or a clocked one with
        // the same signature that calls it; `claim` keeps the driver and with it the functions.
        let timed = unsafe { cuda_sys::Driver::from_symbols(driver.origin(), lookup, claim) };
        Some((timed, timer))
    }

    /// The clock as it stands.
    pub fn read(&self) -> Reading {
        Reading {
            calls: CALLS.load(Ordering::Relaxed),
            nanoseconds: NANOSECONDS.load(Ordering::Relaxed),
        }
    }

    /// What was spent in the driver since `earlier`, by all threads together.
    pub fn since(&self, earlier: Reading) -> DriverSpent {
        let now = self.read();
        let calls = (now.calls - earlier.calls) as f64;
        let shown = (now.nanoseconds - earlier.nanoseconds) as f64;
        DriverSpent {
            driver_ns: (shown - calls * self.shown_ns).max(0.0),
            clock_ns: calls * self.added_ns,
        }
    }

    /// Measures the clock around a call that does nothing.
    fn calibrated() -> Self {
        const ROUNDS: usize = 21;
        const CALLS_A_ROUND: u32 = 500;
        extern "C" fn nothing() -> CUresult {
            CUresult::CUDA_SUCCESS
        }
        let nothing: extern "C" fn() -> CUresult = black_box(nothing);
        let round = |call: &dyn Fn() -> CUresult| {
            let started = Instant::now();
            (0..CALLS_A_ROUND).for_each(|_| {
                black_box(call());
            });
            started.elapsed().as_nanos() as f64 / f64::from(CALLS_A_ROUND)
        };
        let unmeasured = Self { shown_ns: 0.0, added_ns: 0.0 };
        let mut best = Self { shown_ns: f64::INFINITY, added_ns: f64::INFINITY };
        // The least of each: interruptions only ever lengthen a round.
        for _ in 0..ROUNDS {
            let bare = round(&|| nothing());
            let before = unmeasured.read();
            let with_clock = round(&|| timed(|| nothing()));
            let shown = unmeasured.since(before).driver_ns / f64::from(CALLS_A_ROUND);
            best.shown_ns = best.shown_ns.min((shown - bare).max(0.0));
            best.added_ns = best.added_ns.min((with_clock - bare).max(0.0));
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::backend::AllocatorSpec;
    use crate::device::{Machine, Setup, timed_machine};

    #[test]
    fn one_driver_is_timed_at_a_time() {
        let machine = timed_machine();
        let other = cuda_sim::Simulator::builder().build().unwrap();
        assert!(DriverTimer::wrap(&other.driver()).is_none());
        drop(machine);
    }

    #[test]
    fn the_time_between_two_readings_is_that_of_the_calls() {
        let machine = timed_machine();
        let timer = machine.timer().unwrap();
        let before = timer.read();
        thread::sleep(Duration::from_millis(2));
        assert_eq!(timer.since(before), DriverSpent::default(), "no call was made");
        let calls = machine.allocator_calls();
        calls.enter().unwrap();
        let address = calls.allocate(1 << 20).unwrap();
        let spent = timer.since(before);
        assert!(spent.driver_ns > 0.0 && spent.driver_ns < 1e9, "{spent:?}");
        assert!(spent.clock_ns > 0.0);
        let before = timer.read();
        // SAFETY: allocated above, freed once; through functions that have no clock.
        unsafe { machine.calls().free(address) }.unwrap();
        assert_eq!(timer.since(before), DriverSpent::default());
    }

    #[test]
    fn a_machine_without_a_clock_is_not_timed() {
        let machine = Machine::simulated(Setup::default()).unwrap();
        assert!(machine.timer().is_none());
    }

    /// The driver time would otherwise be too small, and nobody would see it.
    #[test]
    fn every_call_of_every_allocator_has_a_clock() {
        // What only setting up and showing a device needs.
        const SETUP: [&str; 9] = [
            "cuInit",
            "cuDriverGetVersion",
            "cuDeviceGetCount",
            "cuDeviceGet",
            "cuDeviceGetName",
            "cuDeviceTotalMem_v2",
            "cuDevicePrimaryCtxRetain",
            "cuStreamCreate",
            "cuStreamDestroy_v2",
        ];
        let machine = Machine::simulated(Setup::default()).unwrap();
        machine.calls().enter().unwrap();
        let streams = machine.streams(2).unwrap();
        for allocator in AllocatorSpec::ALL {
            let backend = allocator.open(&machine, Some(16 << 20)).unwrap();
            let handles: Vec<_> = streams.iter().map(vpmm::Stream::handle).collect();
            for bytes in [700, 3 << 20, 5 << 20, 64 << 20] {
                let Ok(address) = backend.allocate(bytes, handles[0]) else { continue };
                // SAFETY: allocated above, freed once.
                unsafe { backend.free(address, handles[1]) }.unwrap();
            }
        }
        let simulator = machine.simulator().unwrap();
        for (name, _) in simulator.call_counts() {
            let clocked = CLOCKED.symbol(&std::ffi::CString::new(name).unwrap());
            assert!(SETUP.contains(&name) || !clocked.is_null(), "{name} has no clock");
        }
    }
}

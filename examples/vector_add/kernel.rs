//! The kernel: as PTX for a GPU, and what it means for the simulator. Loaded and launched alike.

use std::error::Error;
use std::ffi::c_void;
use std::ptr;

use cuda_sim::Simulator;
use cuda_sys::types::CUresult;
use vpmm::{Device, Stream};

/// NUL-terminated, as the driver wants it.
const PTX: &str = concat!(include_str!("add.ptx"), "\0");

const THREADS: u32 = 256;

/// Calls a function that `vpmm` has no use for itself. Each is optional: an old driver has not all.
macro_rules! call {
    ($device:ident, $name:ident($($argument:expr),* $(,)?)) => {
        match $device.driver().raw().$name.ok_or(concat!("no ", stringify!($name)))?($($argument),*) {
            CUresult::CUDA_SUCCESS => Ok(()),
            code => Err(format!("{} failed with {code}", stringify!($name))),
        }
    };
}

/// Adds `n` values at two addresses, to a third, on a stream; waits for it.
///
/// # Safety
/// At each address there are `n` values of memory of the device, which work that comes on the stream
/// may use.
pub(crate) unsafe fn add(
    device: &Device,
    stream: &Stream,
    [mut a, mut b, mut sum]: [u64; 3],
    mut n: u32,
) -> Result<(), Box<dyn Error>> {
    let (mut module, mut function) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: the device keeps its context alive.
    unsafe { call!(device, cuCtxSetCurrent(device.context()))? };
    // SAFETY: the place for the module is live, and the text ends in NUL.
    unsafe { call!(device, cuModuleLoadData(&mut module, PTX.as_ptr().cast()))? };
    // SAFETY: the place for the function is live, the module loaded, and the name ends in NUL.
    unsafe { call!(device, cuModuleGetFunction(&mut function, module, c"add".as_ptr()))? };

    let mut arguments: [*mut c_void; 4] =
        [(&raw mut a).cast(), (&raw mut b).cast(), (&raw mut sum).cast(), (&raw mut n).cast()];
    let blocks = n.div_ceil(THREADS).max(1);
    // SAFETY: (1) the function's module is loaded until the stream has finished; (2) the arguments are
    // four of its parameters' types, which the driver copies before it returns; (3) the stream is
    // alive; (4) the caller vouches for the memory, of which the kernel uses no more than `n` values.
    unsafe {
        call!(
            device,
            cuLaunchKernel(
                function,
                blocks,
                1,
                1,
                THREADS,
                1,
                1,
                0,
                stream.handle().raw(),
                arguments.as_mut_ptr(),
                ptr::null_mut(),
            )
        )?;
    }
    stream.synchronize()?;
    // SAFETY: loaded above and unloaded once; its kernel has ended.
    unsafe { call!(device, cuModuleUnload(module))? };
    Ok(())
}

/// Tells the simulator, which finds only names in PTX, what the kernel does.
pub(crate) fn register(simulator: &Simulator) {
    simulator.register_kernel("add", &[8, 8, 8, 4], |launch, memory| {
        let bytes = 4 * launch.u32(3)? as usize;
        let (mut a, mut b) = (vec![0; bytes], vec![0; bytes]);
        memory.read(launch.u64(0)?, &mut a)?;
        memory.read(launch.u64(1)?, &mut b)?;
        let pairs = a.as_chunks().0.iter().zip(b.as_chunks().0);
        let sums = pairs.map(|(x, y)| f32::from_le_bytes(*x) + f32::from_le_bytes(*y));
        let sums: Vec<u8> = sums.flat_map(f32::to_le_bytes).collect();
        memory.write(launch.u64(2)?, &sums)
    });
}

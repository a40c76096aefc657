//! Two vectors added on the device: memory with an owner, an upload beside the host, a kernel of one's
//! own on its addresses, and the result back.
//!
//! ```sh
//! cargo run --example vector_add            # the GPU, or the simulator without one
//! cargo run --example vector_add -- --sim
//! ```

mod kernel;
#[path = "../machine/mod.rs"]
mod machine;

use std::error::Error;
use std::sync::Arc;

use machine::{Machine, ensure};
use vpmm::resource::PinnedHost;
use vpmm::{DeviceVec, MemoryResource, PinnedVec, Pool, PoolConfig};

const LEN: u32 = 1_000_003;

fn main() -> Result<(), Box<dyn Error>> {
    let machine = Machine::find()?;
    let device = &machine.device;
    machine.simulator.iter().for_each(kernel::register);

    let stream = device.stream()?;
    let memory: Arc<dyn MemoryResource> = Arc::new(Pool::new(device, &PoolConfig::default())?);
    let first: Vec<f32> = (0..LEN).map(|i| i as f32).collect();
    let second: Vec<f32> = (0..LEN).map(|i| 0.5 * i as f32).collect();

    // From ordinary memory: copied when it returns.
    let a = DeviceVec::from_slice(&first, &stream, memory.clone())?;

    // From page-locked memory: the copy goes on beside the host, and owns the values until it is done.
    // What comes on the stream finds them on the device.
    let pinned = PinnedVec::from_slice(&second, &stream, PinnedHost::new(device))?;
    let mut b = DeviceVec::uninit(second.len(), &stream, memory.clone())?;
    let upload = pinned.upload(&mut b.as_mut_slice())?;

    // No contents yet: the kernel writes all of them.
    let sum = DeviceVec::<f32>::uninit(first.len(), &stream, memory)?;
    let addresses = [a.ptr().address(), b.ptr().address(), sum.ptr().address()];
    // SAFETY: three vectors of `LEN` values, all of this stream, which live until the end.
    unsafe { kernel::add(device, &stream, addresses, LEN)? };
    let pinned = upload.wait()?; // the host may have its values again
    ensure(pinned[..] == second[..], "the upload has changed what it read")?;

    let sum = sum.to_vec()?;
    let right = |i: &usize| sum[*i] == first[*i] + second[*i];
    let wrong = (0..sum.len()).filter(|i| !right(i)).count();
    println!("{} sums, {wrong} wrong; the last is {}", sum.len(), sum[sum.len() - 1]);
    ensure(wrong == 0, "the sums are wrong")?;
    machine.check()
}

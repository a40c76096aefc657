//! Real traces, held against what PyTorch's own allocator does with them.

use std::sync::atomic::{AtomicU64, Ordering};

use cuda_sim::{Schedule, Simulator};
use vpmm::caching::{CachingAllocator, CachingConfig};
use vpmm::resource::{Description, Facts};
use vpmm::{Device, DevicePtr, Driver, MemoryResource, Stream, StreamHandle};
use vpmm_cli::trace::{Action, Trace};

use crate::support::Rig;

/// Bytes that PyTorch 2.11's allocator held at most, on an H200, in three passes of each trace:
/// `benches/results/h200-2026-11-21-limits/traces.jsonl`, the rows of `torch`.
const HELD_BY_PYTORCH: [(&str, u64); 4] = [
    ("cupy_mix", 1_539_309_568),
    ("gpt_train", 31_608_274_944),
    ("resnet_train", 16_819_159_040),
    ("serve_streams", 21_101_543_424),
];

fn open(name: &str) -> Trace {
    let path = format!("{}/traces/{name}.csv.gz", env!("CARGO_MANIFEST_DIR"));
    Trace::open(&path).expect("a trace of the repository")
}

/// Three passes as the peers' programs make them: a free on another stream than the allocation's is
/// told of before, and what the trace leaves is freed in the end. The most that was held.
fn replay(allocator: &CachingAllocator, device: &Device, trace: &Trace) -> u64 {
    let streams: Vec<_> = (0..trace.streams).map(|_| device.stream().expect("a stream")).collect();
    for _ in 0..3 {
        pass(allocator, trace, &streams);
        device.synchronize().expect("the device finishes");
    }
    allocator.validate().expect("the books agree");
    assert_eq!(allocator.memory_allocated(), 0);
    allocator.empty_cache().expect("all goes back");
    assert_eq!((allocator.memory_reserved(), allocator.block_count()), (0, 0));
    allocator.max_memory_reserved()
}

fn pass(allocator: &CachingAllocator, trace: &Trace, streams: &[Stream]) {
    let mut live = vec![DevicePtr::NULL; trace.allocations.len()];
    for operation in &trace.operations {
        let (slot, stream) = (operation.slot as usize, &streams[operation.stream as usize]);
        let allocation = &trace.allocations[slot];
        match operation.action {
            Action::Allocate => {
                live[slot] = allocator.malloc(allocation.bytes as usize, stream).expect("memory");
            }
            Action::Free => {
                if operation.stream != allocation.stream {
                    allocator.record_stream(live[slot], stream).expect("a note");
                }
                allocator.free(live[slot]).expect("a free");
            }
        }
    }
    for slot in &trace.leaked {
        allocator.free(live[*slot as usize]).expect("a free");
    }
}

/// Addresses without memory, each below the one before.
struct Falling(AtomicU64);

impl MemoryResource for Falling {
    fn allocate(&self, bytes: usize, _: usize, _: StreamHandle) -> vpmm::Result<DevicePtr> {
        let bytes = bytes as u64;
        Ok(DevicePtr::from_address(self.0.fetch_sub(bytes, Ordering::Relaxed) - bytes))
    }

    fn deallocate(&self, _: DevicePtr, _: usize, _: usize, _: StreamHandle) -> vpmm::Result<()> {
        Ok(())
    }

    fn facts(&self) -> Facts {
        Facts::of_device_memory()
    }

    fn describe(&self) -> Description {
        Description::new("falling")
    }
}

#[test]
fn as_much_is_held_as_pytorch_holds() {
    // Of free blocks of one size the lowest is taken, so what is held depends, a little, on where
    // segments lie. Where they come from above it is what PyTorch held, to the byte.
    let sim = Simulator::builder().schedule(Schedule::Eager).build().expect("a simulator");
    let device = Driver::new(sim.driver()).and_then(|driver| driver.device(0)).expect("a device");
    for (name, held) in HELD_BY_PYTORCH {
        let falling = Falling(AtomicU64::new(1 << 46));
        let config = CachingConfig::default();
        let allocator = CachingAllocator::over(falling, &device, &config).expect("an allocator");
        assert_eq!(replay(&allocator, &device, &open(name)), held, "{name}");
    }
}

#[test]
fn wherever_segments_lie_it_is_within_a_thousandth() {
    let replay_all = |rig: &Rig| {
        for (name, held) in HELD_BY_PYTORCH {
            let config = CachingConfig::default();
            let allocator = CachingAllocator::new(&rig.device, &config).expect("an allocator");
            let ours = replay(&allocator, &rig.device, &open(name));
            println!("{name}: {ours} bytes held, by PyTorch {held}");
            assert!(ours.abs_diff(held) <= held / 1000, "{name}: {ours}, not {held}");
        }
    };
    let rig = Rig::simulated(Schedule::Eager);
    replay_all(&rig);
    rig.assert_clean();
    if let Some(rig) = Rig::gpu() {
        replay_all(&rig);
    }
}

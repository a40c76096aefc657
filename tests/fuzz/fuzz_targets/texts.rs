//! Texts that users type: whatever they are, they are read or refused, and what was read is written as it is read.

#![no_main]

use libfuzzer_sys::fuzz_target;
use stacks::bytes::ByteCount;
use stacks::{Builder, Stack};
use vpmm::caching::CachingConfig;
use vpmm::{Device, Driver};
use vpmm_cli::backend::{AllocatorList, AllocatorSpec};
use vpmm_cli::bench::CaseList;
use vpmm_cli::device::DeviceChoice;

thread_local! {
    static DEVICE: Device = {
        let simulator = cuda_sim::Simulator::builder().build().unwrap();
        Driver::new(simulator.driver()).unwrap().device(0).unwrap()
    };
}

fuzz_target!(|text: &str| {
    if let Ok(count) = text.parse::<ByteCount>() {
        let _ = count.to_string();
    }
    let _ = text.parse::<DeviceChoice>();
    let _ = text.parse::<CaseList>();
    let _ = text.parse::<AllocatorList>();
    let _ = text.parse::<CachingConfig>();
    if let Ok(spec) = text.parse::<AllocatorSpec>() {
        let again: AllocatorSpec = spec.to_string().parse().unwrap();
        assert_eq!(again.to_string(), spec.to_string());
    }
    // What cannot be made is refused. No files: a log's name may be any.
    if let Ok(stack) = text.parse::<Stack>()
        && !stack.to_string().contains("logging")
    {
        DEVICE.with(|device| drop(Builder::new(device).build(&stack)));
    }
});

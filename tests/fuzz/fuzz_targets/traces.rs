//! Logs of allocations: whatever their bytes are, they are read or refused, and what was read keeps its own books.

#![no_main]

use libfuzzer_sys::fuzz_target;
use vpmm_cli::trace::Trace;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(trace) = Trace::read("bytes", bytes) {
        assert!(trace.leaked.len() <= trace.allocations.len());
        assert!(trace.times.is_empty() || trace.times.len() == trace.operations.len());
        assert!(trace.times.is_sorted());
    }
});

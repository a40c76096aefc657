//! Adaptors: resources that stand on one other and do something more.

/// The questions that an adaptor answers with what is below it, its field `upstream`.
macro_rules! passes_on {
    ($( $question:ident ),* $(,)?) => { $( passes_on!(@ $question); )* };
    (@ facts) => {
        fn facts(&self) -> $crate::resource::Facts {
            self.upstream.facts()
        }
    };
    (@ identity) => {
        fn identity(&self) -> $crate::resource::Identity {
            self.upstream.identity()
        }
    };
    (@ device) => {
        fn device(&self) -> Option<&$crate::Device> {
            self.upstream.device()
        }
    };
    (@ held_bytes) => {
        fn held_bytes(&self) -> Option<u64> {
            self.upstream.held_bytes()
        }
    };
    (@ record_stream) => {
        fn record_stream(
            &self,
            ptr: $crate::DevicePtr,
            stream: $crate::StreamHandle,
        ) -> $crate::Result<()> {
            self.upstream.record_stream(ptr, stream)
        }
    };
}

mod aligned;
mod failure_callback;
mod limiting;
mod logging;
mod prefetch;
mod statistics;
mod thread_safe;
mod tracking;
mod undo;

pub use aligned::Aligned;
pub use failure_callback::FailureCallback;
pub use limiting::Limiting;
pub use logging::{LogFormat, Logging};
pub use prefetch::Prefetch;
pub use statistics::{Counter, Counters, Statistics};
pub use thread_safe::ThreadSafe;
pub use tracking::{Finding, Outstanding, Outstandings, Report, Tracking, TrackingConfig};
pub(crate) use undo::or_undo;

//! How many descriptors the process may have.

use rustix::process::{Resource, getrlimit, setrlimit};

/// Lets the process have as many descriptors as it may ask for: a server has one for each allocation
/// and each connection. How many that is comes back; `None` is without limit.
pub fn raise_descriptor_limit() -> Option<u64> {
    let mut limit = getrlimit(Resource::Nofile);
    let before = limit.current;
    limit.current = limit.maximum;
    match setrlimit(Resource::Nofile, limit) {
        Ok(()) => limit.maximum,
        Err(error) => {
            tracing::warn!(%error, "the limit of descriptors stays as it is");
            before
        }
    }
}

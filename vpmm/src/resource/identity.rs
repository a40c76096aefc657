//! Whose memory it is.

#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

use crate::device::Device;

/// The kind of this crate's pools.
const POOL: &str = "vpmm";

/// Whose memory a resource gives out: two with equal identities may free each other's.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Identity {
    /// The kind of resource.
    kind: &'static str,
    /// Which of that kind, in two numbers.
    of: (u64, u64),
}

impl Identity {
    /// One that no other resource has: to be made once, and kept.
    pub fn unique() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self { kind: "", of: (NEXT.fetch_add(1, Ordering::Relaxed), 0) }
    }

    /// The value itself, as long as it stays where it is.
    pub(super) fn of_value<R: ?Sized>(value: &R) -> Self {
        let address = std::ptr::from_ref(value).cast::<()>() as u64;
        // A value may begin with another of a different type, at the same address.
        Self { kind: std::any::type_name::<R>(), of: (address, u64::MAX) }
    }

    /// All resources of a kind on one device of one driver.
    pub(super) fn of_device(kind: &'static str, device: &Device) -> Self {
        Self { kind, of: (device.driver().realm().number(), u64::from(device.ordinal())) }
    }

    /// A pool of this crate, by its number.
    pub(super) fn of_pool(number: u64) -> Self {
        Self::of_kind(POOL, number)
    }

    /// Whether it is one of a pool's, which knows what it gave.
    pub(super) fn is_of_a_pool(self) -> bool {
        self.kind == POOL
    }

    /// A resource of a kind by a number that no other of that kind has while it lives.
    pub(super) fn of_kind(kind: &'static str, number: u64) -> Self {
        Self { kind, of: (number, 0) }
    }
}

//! Where a pool's memory is, who may reach it, and how it can leave the process.

#![forbid(unsafe_code)]

use std::fmt;

use cuda_sys::types::{CUmemAccess_flags, CUmemAllocationHandleType};

/// Where the physical memory of a pool is.
///
/// Streams, and the kernels and copies on them, are the device's in every case. What follows is a
/// matter of the driver: memory on the host is page-locked, and a device reaches it over its link.
///
/// ```
/// let mut config = vpmm::PoolConfig::default();
/// config.location = vpmm::Location::HostNuma(0);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum Location {
    /// On the pool's device.
    #[default]
    Device,
    /// On the host, wherever the driver puts it. The host, too, may read and write at the addresses
    /// that the pool hands out. Such memory cannot be shared with other processes. Needs a driver
    /// for CUDA 12.2 or newer.
    Host,
    /// On one NUMA node of the host, by the system's number. The host, too, may read and write at
    /// the addresses that the pool hands out.
    HostNuma(u32),
}

impl Location {
    /// The most memory that a pool may hold there: by default as much as the device has, which there is no more of
    /// on the device itself.
    pub(crate) fn most(self, limit_bytes: Option<u64>, device_bytes: u64) -> u64 {
        match (self, limit_bytes) {
            (Self::Host | Self::HostNuma(_), Some(limit)) => limit,
            (_, limit) => limit.unwrap_or(device_bytes).min(device_bytes),
        }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device => f.write_str("device memory"),
            Self::Host => f.write_str("host memory"),
            Self::HostNuma(node) => write!(f, "memory of host NUMA node {node}"),
        }
    }
}

/// What a device may do with memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Access {
    /// Nothing: a use is an illegal address.
    None,
    /// Read.
    Read,
    /// Read and write.
    ReadWrite,
}

impl Access {
    pub(crate) fn flags(self) -> CUmemAccess_flags {
        match self {
            Self::None => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE,
            Self::Read => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ,
            Self::ReadWrite => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        }
    }
}

/// How a pool's memory can be shared with other processes. It has to be known before memory is
/// made.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum Sharing {
    /// Not at all.
    #[default]
    None,
    /// By file descriptors, with processes of this machine.
    FileDescriptor,
    /// By fabric handles, with processes of every machine on the NVLink fabric. Both ends need a
    /// fabric manager and the right to an IMEX channel.
    Fabric,
}

impl Sharing {
    /// What handles are asked to be exportable as.
    pub(crate) fn handle_type(self) -> CUmemAllocationHandleType {
        match self {
            Self::None => CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
            Self::FileDescriptor => {
                CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            }
            Self::Fabric => CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC,
        }
    }
}

impl fmt::Display for Sharing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "no sharing",
            Self::FileDescriptor => "sharing by file descriptor",
            Self::Fabric => "sharing by fabric handle",
        })
    }
}

//! Every way a call can fail, by name.

#![forbid(unsafe_code)]

use std::io;
use std::path::Path;
use std::sync::Arc;

use cuda_sys::types::CUresult;

use crate::location::{Location, Sharing};
use crate::memory_map::MemoryMap;
use crate::units::{Bytes, DevicePtr};

/// The result of this crate's calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call failed. A call that fails has changed nothing, unless it says what.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No usable CUDA driver was found.
    #[error("no CUDA driver: {0}")]
    NoDriver(#[source] Arc<cuda_sys::LoadError>),

    /// The driver is older than what the pool needs: it lacks a function.
    #[error(
        "the CUDA driver ({origin}) has no function {name}; a driver for CUDA 12.0 or newer is needed"
    )]
    MissingSymbol {
        /// The function that is not there.
        name: &'static str,
        /// The library that was asked.
        origin: String,
    },

    /// A driver call failed.
    #[error("{call} failed with {code}{}", amount(*bytes))]
    Driver {
        /// The driver function.
        call: &'static str,
        /// What it answered.
        code: CUresult,
        /// The bytes that the call was about, or 0 where it is not about memory.
        bytes: u64,
    },

    /// The context is destroyed or the device has failed for good: no call on it can succeed.
    #[error("the CUDA context is lost: {call} failed with {code}")]
    ContextLost {
        /// The driver function that told.
        call: &'static str,
        /// What it answered.
        code: CUresult,
    },

    /// The driver has no device of that number.
    #[error("there is no device {ordinal}: the driver has {count}")]
    NoDevice {
        /// The number that was asked for.
        ordinal: u32,
        /// How many devices there are.
        count: u32,
    },

    /// The device has no virtual memory management.
    #[error("device {ordinal} does not support virtual memory management")]
    VmmUnsupported {
        /// The device.
        ordinal: u32,
    },

    /// The device cannot use memory of this kind.
    #[error("device {ordinal} has no pools of {location}")]
    LocationUnsupported {
        /// The device.
        ordinal: u32,
        /// Where the memory was to be.
        location: Location,
    },

    /// The device's memory cannot be shared like this: the hardware, the driver or a missing right.
    #[error("device {ordinal} has no {sharing}")]
    SharingUnsupported {
        /// The device.
        ordinal: u32,
        /// How it was to be shared.
        sharing: Sharing,
    },

    /// A device that cannot reach the memory of the pool's device was to be given access.
    #[error("device {peer} cannot reach the memory of device {device}")]
    PeerUnsupported {
        /// The pool's device.
        device: u32,
        /// The one that cannot reach it.
        peer: u32,
    },

    /// The pool's own device was to lose its access.
    #[error("device {device} owns the pool and keeps its access")]
    OwnerAccess {
        /// The pool's device.
        device: u32,
    },

    /// Memory that cannot be shared was to be exported.
    #[error("the memory cannot be shared: {reason}")]
    NotShareable {
        /// Why not.
        reason: &'static str,
    },

    /// What came from another process names no memory that this one can import.
    #[error("the driver would not import shared memory: {code}")]
    ImportRefused {
        /// The driver's answer.
        code: CUresult,
    },

    /// The other process would not take the memory; it knows why.
    #[error("the other process refused the shared memory")]
    PeerRefused,

    /// What came over the socket is not what is sent to share memory.
    #[error("the message about shared memory is wrong: {reason}")]
    BadMessage {
        /// What is wrong with it.
        reason: &'static str,
    },

    /// The socket to the other process failed.
    #[error("the socket that memory is shared over failed: {0}")]
    Socket(#[source] Arc<std::io::Error>),

    /// Neither free memory nor new memory covers the request.
    #[error(
        "out of memory: {} requested, {} free (largest piece {}), {} mapped{}, {} live",
        Bytes(*requested_bytes), Bytes(*free_bytes), Bytes(*largest_free_bytes), Bytes(*mapped_bytes),
        limit(*limit_bytes), Bytes(*live_bytes)
    )]
    OutOfMemory {
        /// What was asked for, rounded up as the pool rounds.
        requested_bytes: u64,
        /// What the pool holds free, whether or not its fences have passed; with what threads keep for
        /// their next requests.
        free_bytes: u64,
        /// The largest contiguous free range of the heap that was asked; of what threads keep, and what further
        /// streams still use, none.
        largest_free_bytes: u64,
        /// Physical memory that the pool holds, that for small requests included.
        mapped_bytes: u64,
        /// Bytes in the hands of callers, small requests included.
        live_bytes: u64,
        /// The pool's limit, where it has one.
        limit_bytes: Option<u64>,
        /// What stood where when the request was given up; none in the error that a callback gets,
        /// since the request is not given up yet. See [`Error::map`].
        map: Option<Arc<MemoryMap>>,
    },

    /// The driver gave no further range of addresses.
    #[error("out of address space: no room for a reservation of {}", Bytes(*bytes))]
    AddressSpaceExhausted {
        /// The size of the reservation that was refused.
        bytes: u64,
    },

    /// A request for no bytes.
    #[error("an allocation of 0 bytes was requested")]
    ZeroSize,

    /// A request that overflows when it is rounded up.
    #[error("a request of {bytes} bytes overflows when rounded up to {unit_bytes}")]
    SizeOverflow {
        /// What was asked for.
        bytes: u64,
        /// The unit it had to be rounded to.
        unit_bytes: u64,
    },

    /// An alignment that is no power of two.
    #[error("an alignment of {align} bytes is no power of two")]
    BadAlignment {
        /// What was asked for.
        align: usize,
    },

    /// An alignment that the resource cannot give.
    #[error("an alignment of {align} bytes was requested of a resource that gives at most {most}")]
    AlignmentUnsupported {
        /// What was asked for.
        align: usize,
        /// The greatest that can be had.
        most: usize,
    },

    /// A request that the resource can never serve, whatever is freed.
    #[error("{} were requested of a resource that gives at most {}", Bytes(*bytes), Bytes(*most_bytes))]
    RequestTooLong {
        /// What was asked for.
        bytes: u64,
        /// The longest request.
        most_bytes: u64,
    },

    /// The allocation has another size than the one that it was to be freed with.
    #[error(
        "the allocation at {address:#x} has {bytes} bytes, and was to be freed with {given_bytes}"
    )]
    WrongSize {
        /// The pointer.
        address: u64,
        /// The size given.
        given_bytes: u64,
        /// The size of the allocation.
        bytes: u64,
    },

    /// A part of a container that it does not have.
    #[error("values {first} to {end} of {len} were asked for")]
    OutOfRange {
        /// The first value.
        first: usize,
        /// The end: one past the last.
        end: usize,
        /// How many there are.
        len: usize,
    },

    /// Two sides of a copy have different lengths.
    #[error("{given} values were given for a copy of {len}")]
    LengthMismatch {
        /// What came from the caller.
        given: usize,
        /// What the container has.
        len: usize,
    },

    /// A resource cannot do that.
    #[error("the resource has no {what}")]
    Unsupported {
        /// What was asked of it.
        what: &'static str,
    },

    /// The file that allocations are logged to cannot be made or written.
    #[error("the log of allocations failed: {0}")]
    LogFile(#[source] Arc<std::io::Error>),

    /// A resource of the caller's own failed.
    #[error("a resource failed: {0}")]
    Resource(#[source] Arc<dyn std::error::Error + Send + Sync>),

    /// The pointer's memory was freed before.
    #[error("double free: {address:#x} was freed already")]
    DoubleFree {
        /// The pointer.
        address: u64,
    },

    /// The pointer's memory was freed before, and its address means something else now.
    #[error(
        "stale pointer: the allocation at {address:#x} was freed, and the address has been used for something else since"
    )]
    StalePointer {
        /// The pointer.
        address: u64,
    },

    /// The pointer is inside an allocation, not at its start.
    #[error("{address:#x} is inside the allocation at {start:#x}, not its start")]
    InteriorPointer {
        /// The pointer.
        address: u64,
        /// The start of the allocation that it is in.
        start: u64,
    },

    /// The pointer never came from this pool.
    #[error("{address:#x} does not come from this pool")]
    ForeignPointer {
        /// The pointer.
        address: u64,
    },

    /// The memory sleeps: it was given to the device by [`Pool::suspend`](crate::Pool::suspend).
    #[error("the heap is asleep: resume it first")]
    Asleep,

    /// What is not asleep was to be resumed.
    #[error("the heap is not asleep")]
    NotAsleep,

    /// No heap of the pool has the tag.
    #[error("the pool has no heap with this tag")]
    UnknownTag,

    /// Memory that other processes may have was to be given back.
    #[error("{} of the heap are exported, and stay", Bytes(*bytes))]
    Exported {
        /// Bytes of handles that were exported.
        bytes: u64,
    },

    /// [`Pool::suspend`](crate::Pool::suspend) failed half way, and so did going back. No memory or
    /// contents are lost: [`Pool::resume`](crate::Pool::resume) wakes what is asleep.
    #[error(
        "{call} failed with {code} half way to sleep, and so did going back: {} allocations are asleep, {} awake",
        asleep.len(), awake.len()
    )]
    HalfAsleep {
        /// The driver function that failed first.
        call: &'static str,
        /// What it answered.
        code: CUresult,
        /// The allocations whose memory is not at their addresses.
        asleep: std::sync::Arc<[DevicePtr]>,
        /// The allocations that can be used.
        awake: std::sync::Arc<[DevicePtr]>,
    },

    /// The file that contents were saved in cannot be written or read.
    #[error("the file with a heap's contents failed: {0}")]
    ContentsFile(#[source] std::sync::Arc<std::io::Error>),

    /// The file that contents were saved in is not what was written.
    #[error("the file with a heap's contents was changed: {reason}")]
    ContentsChanged {
        /// What is wrong with it.
        reason: &'static str,
    },

    /// A [`GraphPool`](crate::GraphPool) cannot do that now.
    #[error("a graph's pool: {reason}")]
    GraphPool {
        /// Why not.
        reason: &'static str,
    },

    /// A pool was to be destroyed that others have handles of.
    #[error("the pool has {others} other handles")]
    PoolShared {
        /// Handles beside the one given.
        others: usize,
    },

    /// The process is a child of the one that started the driver, which does not work in it. Nothing
    /// of the parent's is of use here, and nothing of it is harmed.
    #[error(
        "the process was forked after the CUDA driver was started, which does not work in a child"
    )]
    Forked,

    /// A mark of another pool.
    #[error("the mark is of another pool")]
    ForeignMark,

    /// The stream belongs to another device than the pool; or a pool for streams of one device was to stand on a
    /// resource for those of another.
    #[error("a stream of device {stream_device} was used with a pool of device {pool_device}")]
    WrongDevice {
        /// The stream's device.
        stream_device: u32,
        /// The pool's device.
        pool_device: u32,
    },

    /// The stream belongs to another context of the pool's device.
    #[error("the stream belongs to another context of device {device} than the pool")]
    WrongContext {
        /// The device of both.
        device: u32,
    },

    /// The stream is capturing a graph, and the pool cannot serve it meanwhile: the paged profile
    /// never does, the default one not through a handle from elsewhere, unless a
    /// [`GraphPool`](crate::GraphPool) is open to the capture.
    #[error(
        "the stream is capturing a graph, and the pool can neither allocate nor free on it now"
    )]
    StreamCapturing,

    /// A handle ([`Stream::handle`](crate::Stream::handle)) has outlived its stream: the last of its values, or
    /// of those that borrowed it, was dropped.
    #[error("the stream has ended: a handle of it is left, but no Stream")]
    StreamEnded,

    /// The system would not start the thread that [`Background`](crate::Background) asks for.
    #[error("the pool's helper cannot be started: {0}")]
    NoThread(#[source] Arc<std::io::Error>),

    /// A setting does not hold a value that can be used.
    #[error("{name}={value}: {reason}")]
    Config {
        /// The environment variable, or the field of the configuration.
        name: &'static str,
        /// What it was set to.
        value: String,
        /// Why that will not do.
        reason: String,
    },
}

impl Error {
    /// Whether more memory, or less of it in use, would let the call succeed.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::OutOfMemory { .. })
            || matches!(self, Self::Driver { code, .. } if *code == CUresult::CUDA_ERROR_OUT_OF_MEMORY)
    }

    /// Whether it is of a request that would not fit into the empty pool, with the limit as it is.
    pub(crate) fn is_hopeless(&self) -> bool {
        matches!(self, Self::OutOfMemory { requested_bytes, limit_bytes: Some(limit), .. }
            if requested_bytes > limit)
    }

    /// What the pool held, and where, when a request was given up: with [`Error::OutOfMemory`] from
    /// [`Pool::malloc`](crate::Pool::malloc).
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let sim = cuda_sim::Simulator::builder().build()?;
    /// # let driver = vpmm::Driver::new(sim.driver())?;
    /// # let device = driver.device(0)?;
    /// # let stream = device.stream()?;
    /// let mut config = vpmm::PoolConfig::default();
    /// config.limit_bytes = Some(64 << 20);
    /// let pool = vpmm::Pool::new(&device, &config)?;
    /// if let Err(error) = pool.malloc(65 << 20, &stream) {
    ///     eprintln!("{error}"); // one line
    ///     let map = error.map().expect("the pool says what it holds");
    ///     eprintln!("{map}"); // many
    ///     assert_eq!(map.stats, pool.stats());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn map(&self) -> Option<&MemoryMap> {
        match self {
            Self::OutOfMemory { map, .. } => map.as_deref(),
            _ => None,
        }
    }

    /// Whether the device or its context is gone for good.
    pub fn is_context_lost(&self) -> bool {
        matches!(self, Self::ContextLost { .. })
    }

    /// Whether nothing runs any more in the context that answered this, since it failed or was reset. Of a driver that
    /// has been shut down nothing is known.
    pub(crate) fn is_context_dead(&self) -> bool {
        matches!(self, Self::ContextLost { code, .. } if *code != CUresult::CUDA_ERROR_DEINITIALIZED)
    }

    /// A request that there is no memory for, where nothing is known of free memory.
    pub(crate) fn exhausted(bytes: u64, live_bytes: u64, limit_bytes: Option<u64>) -> Self {
        Self::OutOfMemory {
            requested_bytes: bytes,
            free_bytes: 0,
            largest_free_bytes: 0,
            mapped_bytes: live_bytes,
            live_bytes,
            limit_bytes,
            map: None,
        }
    }

    /// Sorts a driver's answer: those that no later call can recover from are [`Error::ContextLost`].
    pub(crate) fn from_driver(call: &'static str, code: CUresult, bytes: u64) -> Self {
        if is_sticky(code) {
            Self::ContextLost { call, code }
        } else {
            Self::Driver { call, code, bytes }
        }
    }
}

/// The answers after which every call on the context fails the same way.
fn is_sticky(code: CUresult) -> bool {
    matches!(
        code,
        CUresult::CUDA_ERROR_DEINITIALIZED
            | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
            | CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
            | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
            | CUresult::CUDA_ERROR_ASSERT
            | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
            | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUresult::CUDA_ERROR_INVALID_PC
            | CUresult::CUDA_ERROR_LAUNCH_FAILED
            | CUresult::CUDA_ERROR_CONTAINED
            | CUresult::CUDA_ERROR_TENSOR_MEMORY_LEAK
            | CUresult::CUDA_ERROR_MPS_CLIENT_TERMINATED
    )
}

/// What the system says of a file, with which one.
pub(crate) fn of_path(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

fn amount(bytes: u64) -> String {
    if bytes == 0 { String::new() } else { format!(" for {}", Bytes(bytes)) }
}

fn limit(limit_bytes: Option<u64>) -> String {
    limit_bytes.map_or_else(String::new, |bytes| format!(" of at most {}", Bytes(bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn out_of_memory_says_every_number() {
        let error = Error::OutOfMemory {
            requested_bytes: 4 << 20,
            free_bytes: 2 << 20,
            largest_free_bytes: 1 << 20,
            mapped_bytes: 8 << 20,
            live_bytes: 6 << 20,
            limit_bytes: Some(9 << 20),
            map: None,
        };
        assert!(error.is_out_of_memory());
        let text = error.to_string();
        for number in
            ["4 MiB requested", "2 MiB free", "1 MiB)", "8 MiB mapped", "9 MiB", "6 MiB live"]
        {
            assert!(text.contains(number), "{number} is missing in: {text}");
        }
    }

    #[test]
    fn a_lost_context_is_told_apart() {
        for code in [
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
            CUresult::CUDA_ERROR_CONTAINED,
            CUresult::CUDA_ERROR_TENSOR_MEMORY_LEAK,
            CUresult::CUDA_ERROR_MPS_CLIENT_TERMINATED,
        ] {
            assert!(Error::from_driver("cuEventQuery", code, 0).is_context_lost(), "{code}");
        }
        let failed = Error::from_driver("cuMemMap", CUresult::CUDA_ERROR_INVALID_VALUE, 2 << 20);
        assert!(!failed.is_context_lost() && !failed.is_out_of_memory());
        assert!(
            failed.to_string().contains("cuMemMap") && failed.to_string().contains("2 MiB"),
            "{failed}"
        );
    }
}

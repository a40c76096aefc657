//! What a pool is made with.

use std::time::Duration;

use vpmm_core::{
    Background, Location, PagedConfig, PendingPolicy, PoolConfig, Reuse, Sharing, WaitPolicy,
};

use crate::grows::{self, Grows};
use crate::guard::Failure;
use crate::status::vpmm_status;

/// The kind of a pool.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum vpmm_profile {
    /// Placed to 512 bytes, in extents of many sizes.
    VPMM_PROFILE_DEFAULT = 0,
    /// Whole pages, one physical handle each.
    VPMM_PROFILE_PAGED = 1,
}

/// What a pool is made with: set by `vpmm_pool_options_init`, then changed. What is set for a pool of the
/// other profile is `VPMM_INVALID_ARGUMENT`. Nothing is read from the environment.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vpmm_pool_options {
    /// The bytes of this structure, as the program was built with it.
    pub size: usize,
    /// The device's number. At first 0.
    pub device: u32,
    /// A `vpmm_profile`. At first the default one.
    pub profile: u32,
    /// The most bytes of device memory that the pool may hold; 0, as at first, for no limit.
    pub limit_bytes: u64,
    /// Bytes of addresses to reserve; 0, as at first, for the profile's own measure.
    pub va_size_bytes: u64,
    /// Free memory beyond this goes back to the device when the host has waited for a stream or the
    /// device. At first `UINT64_MAX`: none does.
    pub release_threshold_bytes: u64,
    /// How long a request waits on the host for memory that was freed but is still in use: 0 not at
    /// all, `UINT64_MAX`, as at first, for what was freed until then, anything else so many nanoseconds
    /// for whatever comes.
    pub wait_nanoseconds: u64,
    /// Pages that a paged pool maps when it is made. At first 0.
    pub initial_pages: u64,
    /// The bytes of a paged pool's pages; 0, as at first, for the device's granule.
    pub page_size_bytes: u64,
    /// Where only other streams' memory is free: 0, as at first, the profile's own way, 1 grow first,
    /// 2 take it with a wait on the GPU first.
    pub pending_policy: u32,
    /// How the memory can be shared with other processes, a `vpmm_sharing`. At first not at all.
    pub sharing: u32,
    /// Where the memory is, a `vpmm_location`. At first on the device.
    pub location: u32,
    /// The number of the host's NUMA node, for `VPMM_LOCATION_HOST_NUMA`.
    pub numa_node: u32,
    /// Ways in which a stream gets no memory that another stream freed, a sum of `vpmm_reuse_off`. At
    /// first 0: all ways are on.
    pub reuse_off: u32,
    /// Extents of a default pool that may move each second where new memory could be had instead, and
    /// handles that shorter extents may take beyond the need; 0, as at first, for the pool's own
    /// measure. 1 is next to none, for the least of the host's time; more hold less memory.
    pub moves_per_second: u32,
    /// How long a request of a default pool may look whether memory that other streams freed becomes
    /// ready, before the pool grows; in sum never for more than a 64th of the time since the pool was
    /// made, nor for more than 64 ms and a 1024th of it. Where it is more than 0, and
    /// `VPMM_REUSE_OFF_INTERNAL_DEPENDENCIES` is not set, the stream first waits on the GPU for one
    /// block of such memory, 128 times and 16 times more each second. Both for requests of more than
    /// 64 KiB only. `UINT64_MAX`, as at first, for the pool's own measure: 0, but 20 ms in the
    /// process's own pools, which are for programs that would rather hold less.
    pub patience_nanoseconds: u64,
    /// The time between two looks of a thread of a default pool's own, which makes what streams freed
    /// everybody's, empties what threads keep at hand and no longer use, and unmaps what has moved, so
    /// that requests need not: 100 us at least. 0, as at first, for no such thread, or for 5 ms where it
    /// is to map ahead.
    pub background_period_nanoseconds: u64,
    /// Free memory that this thread keeps mapped where the pool grew last. At first 0.
    pub background_ahead_bytes: u64,
    /// A sum of `vpmm_pool_flag`. At first 0.
    pub flags: u64,
}

/// How a pool's memory can be shared with other processes.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum vpmm_sharing {
    /// Not at all.
    VPMM_SHARING_NONE = 0,
    /// By file descriptors, with processes of this machine.
    VPMM_SHARING_FILE_DESCRIPTOR = 1,
    /// By fabric handles, with processes of every machine on the NVLink fabric.
    VPMM_SHARING_FABRIC = 2,
}

/// What else a pool's memory is for.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum vpmm_pool_flag {
    /// Network cards and other devices of the bus may reach it, by GPUDirect RDMA, as they may what cudaMalloc gives;
    /// in a paged pool not what is smaller than a page. Each mapping takes the driver a tenth longer.
    VPMM_POOL_GPU_DIRECT_RDMA = 1,
}

/// Where a pool's memory is.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum vpmm_location {
    /// On the device.
    VPMM_LOCATION_DEVICE = 0,
    /// On the host.
    VPMM_LOCATION_HOST = 1,
    /// On one NUMA node of the host.
    VPMM_LOCATION_HOST_NUMA = 2,
}

/// A way in which a stream gets no memory that another stream freed.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum vpmm_reuse_off {
    /// Not where the pool finds by an event that the other stream has come past the free.
    VPMM_REUSE_OFF_OPPORTUNISTIC = 1,
    /// Not by a wait on the GPU that the pool adds.
    VPMM_REUSE_OFF_INTERNAL_DEPENDENCIES = 2,
}

// SAFETY: numbers without padding, the size first.
unsafe impl Grows for vpmm_pool_options {
    const NAME: &'static str = "vpmm_pool_options";
    const INITIAL: Self = Self {
        size: size_of::<Self>(),
        device: 0,
        profile: vpmm_profile::VPMM_PROFILE_DEFAULT as u32,
        limit_bytes: 0,
        va_size_bytes: 0,
        release_threshold_bytes: u64::MAX,
        wait_nanoseconds: u64::MAX,
        initial_pages: 0,
        page_size_bytes: 0,
        pending_policy: 0,
        sharing: 0,
        location: 0,
        numa_node: 0,
        reuse_off: 0,
        moves_per_second: 0,
        patience_nanoseconds: u64::MAX,
        background_period_nanoseconds: 0,
        background_ahead_bytes: 0,
        flags: 0,
    };
}

impl vpmm_pool_options {
    pub(crate) fn initial(device: u32) -> Self {
        Self { device, ..Self::INITIAL }
    }

    fn pending_policy(&self, own: PendingPolicy) -> Result<PendingPolicy, Failure> {
        match self.pending_policy {
            0 => Ok(own),
            1 => Ok(PendingPolicy::GrowFirst),
            2 => Ok(PendingPolicy::WaitFirst),
            other => Err(wrong("pending_policy", u64::from(other))),
        }
    }

    fn gpu_direct_rdma(&self) -> Result<bool, Failure> {
        const RDMA: u64 = vpmm_pool_flag::VPMM_POOL_GPU_DIRECT_RDMA as u64;
        if self.flags & !RDMA != 0 {
            return Err(wrong("flags", self.flags));
        }
        Ok(self.flags & RDMA != 0)
    }

    fn sharing(&self) -> Result<Sharing, Failure> {
        match self.sharing {
            0 => Ok(Sharing::None),
            1 => Ok(Sharing::FileDescriptor),
            2 => Ok(Sharing::Fabric),
            other => Err(wrong("sharing", u64::from(other))),
        }
    }

    fn location(&self) -> Result<Location, Failure> {
        if self.location != 2 && self.numa_node != 0 {
            let text = format!("numa_node {} is for VPMM_LOCATION_HOST_NUMA", self.numa_node);
            return Err(Failure::new(vpmm_status::VPMM_INVALID_ARGUMENT, text));
        }
        match self.location {
            0 => Ok(Location::Device),
            1 => Ok(Location::Host),
            2 => Ok(Location::HostNuma(self.numa_node)),
            other => Err(wrong("location", u64::from(other))),
        }
    }

    fn reuse(&self) -> Result<Reuse, Failure> {
        if self.reuse_off > 3 {
            return Err(wrong("reuse_off", u64::from(self.reuse_off)));
        }
        let mut reuse = Reuse::default();
        reuse.opportunistic = self.reuse_off & 1 == 0;
        reuse.internal_dependencies = self.reuse_off & 2 == 0;
        Ok(reuse)
    }

    fn wait(&self) -> WaitPolicy {
        match self.wait_nanoseconds {
            0 => WaitPolicy::FailAtOnce,
            u64::MAX => WaitPolicy::WaitForPending,
            nanoseconds => WaitPolicy::WaitUpTo(Duration::from_nanos(nanoseconds)),
        }
    }

    fn background(&self) -> Option<Background> {
        let period = some(self.background_period_nanoseconds, 0).map(Duration::from_nanos);
        let ahead_bytes = self.background_ahead_bytes;
        (period.is_some() || ahead_bytes > 0).then(|| {
            let mut background = Background::default();
            background.period = period.unwrap_or(background.period);
            background.ahead_bytes = ahead_bytes;
            background
        })
    }

    pub(crate) fn default_profile(&self) -> Result<PoolConfig, Failure> {
        let of_paged = [
            ("initial_pages", self.initial_pages != 0),
            ("page_size_bytes", self.page_size_bytes != 0),
        ];
        of_one_profile(of_paged, "paged")?;
        let mut config = PoolConfig::default();
        if self.moves_per_second != 0 {
            config.moves_per_second = self.moves_per_second;
        }
        if self.patience_nanoseconds != u64::MAX {
            config.patience = Duration::from_nanos(self.patience_nanoseconds);
        }
        config.background = self.background();
        config.limit_bytes = some(self.limit_bytes, 0);
        config.va_size_bytes = some(self.va_size_bytes, 0);
        config.release_threshold_bytes = some(self.release_threshold_bytes, u64::MAX);
        config.out_of_memory = self.wait();
        config.pending_policy = self.pending_policy(config.pending_policy)?;
        config.sharing = self.sharing()?;
        config.gpu_direct_rdma = self.gpu_direct_rdma()?;
        config.location = self.location()?;
        config.reuse = self.reuse()?;
        Ok(config)
    }

    pub(crate) fn paged_profile(&self) -> Result<PagedConfig, Failure> {
        let of_default = [
            ("moves_per_second", self.moves_per_second != 0),
            ("patience_nanoseconds", self.patience_nanoseconds != u64::MAX),
            ("background_period_nanoseconds", self.background_period_nanoseconds != 0),
            ("background_ahead_bytes", self.background_ahead_bytes != 0),
        ];
        of_one_profile(of_default, "default")?;
        let mut config = PagedConfig::default();
        config.limit_bytes = some(self.limit_bytes, 0);
        config.release_threshold_bytes = some(self.release_threshold_bytes, u64::MAX);
        config.page_size_bytes = some(self.page_size_bytes, 0);
        config.initial_pages = self.initial_pages;
        config.va_size_bytes = some(self.va_size_bytes, 0).unwrap_or(config.va_size_bytes);
        config.out_of_memory = self.wait();
        config.pending_policy = self.pending_policy(config.pending_policy)?;
        config.sharing = self.sharing()?;
        config.gpu_direct_rdma = self.gpu_direct_rdma()?;
        config.location = self.location()?;
        config.reuse = self.reuse()?;
        Ok(config)
    }

    pub(crate) fn is_paged(&self) -> Result<bool, Failure> {
        match self.profile {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(wrong("profile", u64::from(other))),
        }
    }
}

fn some(value: u64, none: u64) -> Option<u64> {
    (value != none).then_some(value)
}

fn wrong(name: &str, value: u64) -> Failure {
    Failure::new(vpmm_status::VPMM_INVALID_ARGUMENT, format!("{name} cannot be {value}"))
}

/// Refuses what was set of fields that a pool of the other profile would not look at.
fn of_one_profile<const N: usize>(fields: [(&str, bool); N], profile: &str) -> Result<(), Failure> {
    let Some((name, _)) = fields.into_iter().find(|(_, is_set)| *is_set) else { return Ok(()) };
    let text = format!("{name} is of the {profile} profile, and the pool is of the other");
    Err(Failure::new(vpmm_status::VPMM_INVALID_ARGUMENT, text))
}

/// Sets everything to its first value. `size` is `sizeof (vpmm_pool_options)`, as the program has it.
///
/// # Safety
/// `options` is null or has room for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_pool_options_init(options: *mut vpmm_pool_options, size: usize) {
    // SAFETY: the caller vouches for it.
    unsafe { grows::init(options, size) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_is_none_unless_it_is_asked_for() {
        let patience = |patience_nanoseconds| {
            let options = vpmm_pool_options { patience_nanoseconds, ..vpmm_pool_options::INITIAL };
            options.default_profile().map(|config| config.patience).ok()
        };
        let initial = vpmm_pool_options::INITIAL.patience_nanoseconds;
        assert_eq!([initial, 0].map(patience), [Some(Duration::ZERO); 2]);
        assert_eq!(patience(3_000_000), Some(Duration::from_millis(3)));
    }

    #[test]
    fn a_thread_works_ahead_where_either_number_says_so() {
        let background = |background_period_nanoseconds, background_ahead_bytes| {
            let options = vpmm_pool_options {
                background_period_nanoseconds,
                background_ahead_bytes,
                ..vpmm_pool_options::INITIAL
            };
            let background = options.default_profile().ok()?.background?;
            Some((background.period.as_millis(), background.ahead_bytes))
        };
        assert_eq!(background(0, 0), None);
        assert_eq!(background(2_000_000, 0), Some((2, 0)));
        assert_eq!(background(0, 64 << 20), Some((5, 64 << 20)));
    }

    #[test]
    fn a_node_is_refused_where_the_memory_is_elsewhere() {
        let made = |location, numa_node| vpmm_pool_options {
            location,
            numa_node,
            ..vpmm_pool_options::INITIAL
        };
        for location in [0, 1] {
            assert!(made(location, 0).location().is_ok());
            let refused = made(location, 1).default_profile().err().map(|failure| failure.status());
            assert_eq!(refused, Some(vpmm_status::VPMM_INVALID_ARGUMENT));
            assert!(made(location, 1).paged_profile().is_err());
        }
        assert!(matches!(made(2, 1).location(), Ok(Location::HostNuma(1))));
    }

    #[test]
    fn what_is_of_the_other_profile_is_refused_by_name() {
        const INITIAL: vpmm_pool_options = vpmm_pool_options::INITIAL;
        let of_paged = [
            ("initial_pages", vpmm_pool_options { initial_pages: 1, ..INITIAL }),
            ("page_size_bytes", vpmm_pool_options { page_size_bytes: 2 << 20, ..INITIAL }),
        ];
        let of_default = [
            ("moves_per_second", vpmm_pool_options { moves_per_second: 1, ..INITIAL }),
            ("patience_nanoseconds", vpmm_pool_options { patience_nanoseconds: 0, ..INITIAL }),
            (
                "background_period_nanoseconds",
                vpmm_pool_options { background_period_nanoseconds: 1, ..INITIAL },
            ),
            ("background_ahead_bytes", vpmm_pool_options { background_ahead_bytes: 1, ..INITIAL }),
        ];
        let refused = |name: &str, made: Option<Failure>| {
            let failure = made.unwrap_or_else(|| panic!("{name} is taken"));
            assert_eq!(failure.status(), vpmm_status::VPMM_INVALID_ARGUMENT);
            assert!(failure.text().starts_with(name), "{}", failure.text());
        };
        for (name, options) in of_paged {
            refused(name, options.default_profile().err());
            assert!(options.paged_profile().is_ok(), "{name}");
        }
        for (name, options) in of_default {
            refused(name, options.paged_profile().err());
            assert!(options.default_profile().is_ok(), "{name}");
        }
    }
}

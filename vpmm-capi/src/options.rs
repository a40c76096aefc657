//! What a pool is made with.

use std::time::Duration;

use vpmm_core::{PagedConfig, PendingPolicy, PoolConfig, WaitPolicy};

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

/// What a pool is made with: set by `vpmm_pool_options_init`, then changed.
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
    /// Reserved: 0.
    pub reserved: u32,
}

impl vpmm_pool_options {
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
        reserved: 0,
    };

    pub(crate) fn initial(device: u32) -> Self {
        Self { device, ..Self::INITIAL }
    }

    /// What a program gave: the fields that it knows of, and the others at their first values.
    ///
    /// # Safety
    /// `given` is null, or to as many bytes as its first field says.
    pub(crate) unsafe fn read(given: *const Self) -> Result<Self, Failure> {
        let mut options = Self::INITIAL;
        if given.is_null() {
            return Ok(options);
        }
        // SAFETY: the caller vouches for the first field.
        let size = unsafe { given.cast::<usize>().read() };
        if size < size_of::<usize>() || size > 4096 {
            let text = format!("options of {size} bytes: vpmm_pool_options_init was not called");
            return Err(Failure::new(vpmm_status::VPMM_INVALID_ARGUMENT, text));
        }
        let bytes = size.min(size_of::<Self>());
        // SAFETY: both have so many bytes, of plain numbers, and do not overlap.
        unsafe {
            std::ptr::copy_nonoverlapping(
                given.cast::<u8>(),
                (&raw mut options).cast::<u8>(),
                bytes,
            );
        }
        Ok(options)
    }

    fn pending_policy(&self, own: PendingPolicy) -> Result<PendingPolicy, Failure> {
        match self.pending_policy {
            0 => Ok(own),
            1 => Ok(PendingPolicy::GrowFirst),
            2 => Ok(PendingPolicy::WaitFirst),
            other => Err(wrong("pending_policy", u64::from(other))),
        }
    }

    fn wait(&self) -> WaitPolicy {
        match self.wait_nanoseconds {
            0 => WaitPolicy::FailAtOnce,
            u64::MAX => WaitPolicy::WaitForPending,
            nanoseconds => WaitPolicy::WaitUpTo(Duration::from_nanos(nanoseconds)),
        }
    }

    pub(crate) fn default_profile(&self) -> Result<PoolConfig, Failure> {
        let mut config = PoolConfig::default();
        config.limit_bytes = some(self.limit_bytes, 0);
        config.va_size_bytes = some(self.va_size_bytes, 0);
        config.release_threshold_bytes = some(self.release_threshold_bytes, u64::MAX);
        config.out_of_memory = self.wait();
        config.pending_policy = self.pending_policy(config.pending_policy)?;
        Ok(config)
    }

    pub(crate) fn paged_profile(&self) -> Result<PagedConfig, Failure> {
        let mut config = PagedConfig::default();
        config.limit_bytes = some(self.limit_bytes, 0);
        config.release_threshold_bytes = some(self.release_threshold_bytes, u64::MAX);
        config.page_size_bytes = some(self.page_size_bytes, 0);
        config.initial_pages = self.initial_pages;
        config.va_size_bytes = some(self.va_size_bytes, 0).unwrap_or(config.va_size_bytes);
        config.out_of_memory = self.wait();
        config.pending_policy = self.pending_policy(config.pending_policy)?;
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

/// Sets everything to its first value.
///
/// # Safety
/// `options` is null or has room for the structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_pool_options_init(options: *mut vpmm_pool_options) {
    if !options.is_null() {
        // SAFETY: the caller vouches for it.
        unsafe { options.write(vpmm_pool_options::INITIAL) };
    }
}

//! What a caching allocator is made with.

#![forbid(unsafe_code)]

use super::size::{Divisions, LARGE_BUFFER, segment_bytes};
use crate::error::{Error, Result};

/// The settings of a [`CachingAllocator`](super::CachingAllocator), which are those of PyTorch's.
///
/// They can be read from the text that PyTorch takes, by [`FromStr`](std::str::FromStr), or from its
/// environment variables, by [`from_env`](Self::from_env).
///
/// ```
/// # fn main() -> Result<(), vpmm::caching::SettingError> {
/// use vpmm::caching::CachingConfig;
/// let config: CachingConfig = "max_split_size_mb:128,garbage_collection_threshold:0.8".parse()?;
/// assert_eq!(config.max_split_size_bytes, Some(128 << 20));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct CachingConfig {
    /// Blocks of at least so many bytes are not split, and serve requests of at least as many only
    /// (`max_split_size_mb`). `None`: every block is split. At least 20 MiB and
    /// [`large_segment_bytes`](Self::large_segment_bytes), as PyTorch 2.11 has it; better more: a free segment that
    /// is as long serves none of the requests again that it is made for.
    pub max_split_size_bytes: Option<u64>,
    /// A block that is not split serves a request that is less than this shorter
    /// (`max_non_split_rounding_mb`). At least 20 MiB.
    pub max_non_split_rounding_bytes: u64,
    /// The segments for requests above 1 MiB and below 10 MiB (`large_segment_size_mb`). At least
    /// 10 MiB, and a multiple of 2 MiB.
    pub large_segment_bytes: u64,
    /// Into how many steps each doubling of sizes is divided (`roundup_power2_divisions`).
    pub roundup_power2_divisions: Divisions,
    /// Where more than this fraction of what may be held is held, a request that nothing cached
    /// serves first gives back large blocks that were not used for long
    /// (`garbage_collection_threshold`). Between 0 and 1.
    ///
    /// What may be held is the device's memory, or the fraction of it below. (PyTorch collects
    /// nothing until such a fraction was set.)
    pub garbage_collection_threshold: Option<f64>,
    /// How much of the device's memory may be held (`per_process_memory_fraction`). Between 0 and 1.
    pub memory_fraction: Option<f64>,
}

impl Default for CachingConfig {
    fn default() -> Self {
        Self {
            max_split_size_bytes: None,
            max_non_split_rounding_bytes: LARGE_BUFFER as u64,
            large_segment_bytes: LARGE_BUFFER as u64,
            roundup_power2_divisions: Divisions::default(),
            garbage_collection_threshold: None,
            memory_fraction: None,
        }
    }
}

impl CachingConfig {
    /// Refuses what the scheme cannot work with.
    pub(super) fn check(&self) -> Result<()> {
        let refuse = |name, value: &dyn std::fmt::Display, reason: &str| {
            Err(Error::Config { name, value: value.to_string(), reason: reason.to_owned() })
        };
        let least = LARGE_BUFFER as u64;
        let longest = self.large_segment_bytes.max(least);
        if let Some(bytes) = self.max_split_size_bytes.filter(|bytes| *bytes < longest) {
            let reason = "it must be at least 20 MiB, and at least large_segment_bytes";
            return refuse("max_split_size_bytes", &bytes, reason);
        }
        let bytes = self.max_non_split_rounding_bytes;
        if bytes < least {
            return refuse("max_non_split_rounding_bytes", &bytes, "it must be at least 20 MiB");
        }
        let bytes = self.large_segment_bytes;
        if bytes < super::MIN_LARGE_ALLOC as u64 || segment_bytes(bytes, 0) != Some(bytes) {
            let reason = "it must be at least 10 MiB and a multiple of 2 MiB";
            return refuse("large_segment_bytes", &bytes, reason);
        }
        let threshold = self.garbage_collection_threshold;
        if let Some(value) = threshold.filter(|value| !(*value > 0.0 && *value < 1.0)) {
            let reason = "it must be above 0 and below 1";
            return refuse("garbage_collection_threshold", &value, reason);
        }
        self.memory_fraction.map_or(Ok(()), check_fraction)
    }
}

/// A fraction of the device's memory: from 0 to 1.
pub(super) fn check_fraction(fraction: f64) -> Result<()> {
    if (0.0..=1.0).contains(&fraction) {
        return Ok(());
    }
    Err(Error::Config {
        name: "memory_fraction",
        value: fraction.to_string(),
        reason: "it must be from 0 to 1".to_owned(),
    })
}

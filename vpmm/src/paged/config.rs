//! Settings of the paged profile, from code or from the environment.

#![forbid(unsafe_code)]

use std::ffi::OsString;

use crate::error::{Error, Result};
use crate::location::{Location, Sharing};
use crate::ordering::{PendingPolicy, Reuse};
use crate::out_of_memory::WaitPolicy;

/// A number that a variable may give.
struct Setting {
    field: &'static str,
    variable: &'static str,
    /// Its place among what variables gave.
    at: usize,
}

const PAGE_SIZE: Setting = Setting { field: "page_size_bytes", variable: "VPMM_PAGE_SIZE", at: 0 };
const PAGES: Setting = Setting { field: "initial_pages", variable: "VPMM_PAGES", at: 1 };
const VA_SIZE: Setting = Setting { field: "va_size_bytes", variable: "VPMM_VA_SIZE", at: 2 };

/// No device has this many bytes of addresses: a page of this size or more means no pages at all.
const ADDRESS_SPACE_BYTES: u64 = 1 << 47;

/// Settings of [`Pool::paged`](crate::Pool::paged).
///
/// ```
/// let mut config = vpmm::PagedConfig::default();
/// config.initial_pages = 16;
/// config.limit_bytes = Some(1 << 30);
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PagedConfig {
    /// Bytes of a page, the unit of everything: a multiple of the device's granularity, which is
    /// also the default (`VPMM_PAGE_SIZE`). Smaller requests go to the driver's stream-ordered
    /// allocator; so does every request when the page is larger than any (`u64::MAX`).
    pub page_size_bytes: Option<u64>,
    /// Pages mapped when the pool is made; none by default (`VPMM_PAGES`).
    pub initial_pages: u64,
    /// Bytes of addresses reserved at a time; 8 TiB by default (`VPMM_VA_SIZE`).
    /// Addresses cost no memory.
    pub va_size_bytes: u64,
    /// The most physical memory that the pool may hold; what the device has by default. A request
    /// smaller than a page counts by its bytes, though the driver's pool takes memory for it in pieces of
    /// its own (32 MiB), with which the pool may hold more; a request for pages counts all of those.
    pub limit_bytes: Option<u64>,
    /// Whether to grow or to wait when only other streams' memory is free.
    pub pending_policy: PendingPolicy,
    /// How long a request that finds no memory waits for some.
    pub out_of_memory: WaitPolicy,
    /// In which ways memory goes from one stream to another. What is switched off here is also
    /// switched off in the driver's pool that serves requests smaller than a page.
    pub reuse: Reuse,
    /// Held memory above this, that for requests smaller than a page included, is given back, as far as it is
    /// free, when the host has waited for the GPU: by [`Stream::synchronize`](crate::Stream::synchronize),
    /// [`Device::synchronize`](crate::Device::synchronize) or [`Pool::passed`](crate::Pool::passed). What
    /// [graphs' pools](crate::Pool::graph_pool) and [tagged heaps](crate::Pool::tagged) hold counts; what
    /// is free in a tagged one goes back when the host has waited for a stream that freed there; by its measure
    /// requests smaller than a page count by their bytes, and not by the driver's pieces.
    /// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD` of the driver's pools, which have 0 by default; here
    /// everything is kept by default.
    pub release_threshold_bytes: Option<u64>,
    /// Where the memory is; on the device by default. Smaller requests are served there, too: where
    /// the driver has no memory pools at the location, each takes a page.
    pub location: Location,
    /// How memory can be shared with other processes; not at all by default. Requests smaller than
    /// a page cannot be shared.
    pub sharing: Sharing,
    /// As [`PoolConfig::gpu_direct_rdma`](crate::PoolConfig::gpu_direct_rdma). Requests smaller than a page are served
    /// from a pool of the driver's, which cards do not reach.
    pub gpu_direct_rdma: bool,
    of_variables: OfVariables,
}

/// What variables gave, so that an error names one only where it is its number. Settings are equal by what
/// they are, not by where that came from.
#[derive(Clone, Debug)]
struct OfVariables([Option<u64>; 3]);

impl PartialEq for OfVariables {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for OfVariables {}

impl Default for PagedConfig {
    fn default() -> Self {
        Self {
            page_size_bytes: None,
            initial_pages: 0,
            va_size_bytes: 8 << 40,
            limit_bytes: None,
            pending_policy: PendingPolicy::default(),
            out_of_memory: WaitPolicy::default(),
            reuse: Reuse::default(),
            release_threshold_bytes: None,
            location: Location::default(),
            sharing: Sharing::default(),
            gpu_direct_rdma: false,
            of_variables: OfVariables([None; 3]),
        }
    }
}

/// The settings with the device's granularity applied: every number is usable.
#[derive(Clone, Debug)]
pub(super) struct Checked {
    /// `u64::MAX` where there are no pages.
    pub(super) page: u64,
    pub(super) initial_bytes: u64,
    /// A multiple of `page`.
    pub(super) va_bytes: u64,
    pub(super) pending_policy: PendingPolicy,
    pub(super) reuse: Reuse,
    pub(super) release_threshold_bytes: Option<u64>,
}

impl Checked {
    /// When a stream may be made to wait for another one's memory; `None` for never.
    pub(super) fn waits(&self) -> Option<PendingPolicy> {
        self.reuse.internal_dependencies.then_some(self.pending_policy)
    }
}

impl PagedConfig {
    /// Defaults, changed by `VPMM_PAGE_SIZE`, `VPMM_PAGES` and `VPMM_VA_SIZE` where they are set:
    /// plain decimal numbers, sizes in bytes.
    ///
    /// # Errors
    /// [`Error::Config`] for a variable that is no such number.
    pub fn from_env() -> Result<Self> {
        Self::from_vars(|name| std::env::var_os(name))
    }

    /// As [`from_env`](Self::from_env), with the variables from a function.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    pub fn from_vars(get: impl Fn(&str) -> Option<OsString>) -> Result<Self> {
        let mut config = Self::default();
        for setting in [PAGE_SIZE, PAGES, VA_SIZE] {
            config.of_variables.0[setting.at] = number(setting.variable, &get)?;
        }
        let OfVariables([page_size, pages, va_size]) = config.of_variables;
        config.page_size_bytes = page_size;
        config.initial_pages = pages.unwrap_or(config.initial_pages);
        config.va_size_bytes = va_size.unwrap_or(config.va_size_bytes);
        Ok(config)
    }

    /// What a number is called where it came from.
    fn name(&self, setting: &Setting, value: u64) -> &'static str {
        if self.of_variables.0[setting.at] == Some(value) {
            setting.variable
        } else {
            setting.field
        }
    }

    /// Of a device without pools of its own for requests that no page is for.
    pub(super) fn nothing_serves(&self, page: u64) -> Error {
        let reason = "the device has no memory pools to serve requests without pages".to_owned();
        self.bad(&PAGE_SIZE, self.page_size_bytes.unwrap_or(page), reason)
    }

    fn bad(&self, setting: &Setting, value: u64, reason: String) -> Error {
        Error::Config { name: self.name(setting, value), value: value.to_string(), reason }
    }

    pub(super) fn check(&self, granularity: u64) -> Result<Checked> {
        let page = self.page_size_bytes.unwrap_or(granularity);
        if page >= ADDRESS_SPACE_BYTES {
            if self.initial_pages > 0 {
                let size = self.name(&PAGE_SIZE, page);
                let reason = format!("{size}={page} leaves no room for a page");
                return Err(self.bad(&PAGES, self.initial_pages, reason));
            }
            return Ok(self.checked(u64::MAX, 0, 0));
        }
        if page == 0 || !page.is_multiple_of(granularity) {
            let reason = format!("not a multiple of the granularity, {granularity} bytes");
            return Err(self.bad(&PAGE_SIZE, page, reason));
        }
        let va_bytes = self.va_size_bytes / page * page;
        if va_bytes == 0 {
            let reason = format!("less than one page of {page} bytes");
            return Err(self.bad(&VA_SIZE, self.va_size_bytes, reason));
        }
        if va_bytes > ADDRESS_SPACE_BYTES {
            let reason = "more than the address space".to_owned();
            return Err(self.bad(&VA_SIZE, self.va_size_bytes, reason));
        }
        let initial_bytes =
            self.initial_pages.checked_mul(page).filter(|bytes| *bytes <= ADDRESS_SPACE_BYTES);
        let Some(initial_bytes) = initial_bytes else {
            let reason = format!("more than the address space in pages of {page} bytes");
            return Err(self.bad(&PAGES, self.initial_pages, reason));
        };
        if let Some(limit) = self.limit_bytes.filter(|limit| initial_bytes > *limit) {
            let reason = format!("{initial_bytes} bytes, more than the limit of {limit}");
            return Err(self.bad(&PAGES, self.initial_pages, reason));
        }
        Ok(self.checked(page, initial_bytes, va_bytes))
    }

    fn checked(&self, page: u64, initial_bytes: u64, va_bytes: u64) -> Checked {
        Checked {
            page,
            initial_bytes,
            va_bytes,
            pending_policy: self.pending_policy,
            reuse: self.reuse,
            release_threshold_bytes: self.release_threshold_bytes,
        }
    }
}

fn number(name: &'static str, get: &impl Fn(&str) -> Option<OsString>) -> Result<Option<u64>> {
    let Some(value) = get(name) else { return Ok(None) };
    let text = value.to_string_lossy();
    match text.trim().parse() {
        Ok(number) => Ok(Some(number)),
        Err(error) => Err(Error::Config {
            name,
            value: text.into_owned(),
            reason: format!("a decimal number is needed ({error})"),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRANULE: u64 = 2 << 20;

    fn from(vars: &[(&str, &str)]) -> Result<Checked> {
        let get = |name: &str| {
            vars.iter().find(|(known, _)| *known == name).map(|(_, value)| OsString::from(value))
        };
        PagedConfig::from_vars(get)?.check(GRANULE)
    }

    #[test]
    fn nothing_set_gives_the_defaults() {
        let checked = from(&[]).unwrap();
        assert_eq!((checked.page, checked.initial_bytes, checked.va_bytes), (GRANULE, 0, 8 << 40));
    }

    #[test]
    fn variables_are_taken() {
        let vars = [
            (PAGE_SIZE.variable, "4194304"),
            (PAGES.variable, " 16 "),
            (VA_SIZE.variable, "10000000"),
        ];
        let checked = from(&vars).unwrap();
        assert_eq!(checked.page, 4 << 20);
        assert_eq!(checked.initial_bytes, 64 << 20);
        assert_eq!(checked.va_bytes, 8 << 20, "whole pages");
    }

    #[test]
    fn a_bad_value_is_named_with_its_variable() {
        for (name, value) in [
            (PAGE_SIZE.variable, "2MB"),
            (PAGE_SIZE.variable, ""),
            (PAGE_SIZE.variable, "0"),
            (PAGE_SIZE.variable, "2097153"),
            (PAGES.variable, "-1"),
            (PAGES.variable, "18446744073709551615"),
            (VA_SIZE.variable, "1048576"),
            (VA_SIZE.variable, "18446744073709551616"),
            (VA_SIZE.variable, "18446744073709551615"),
        ] {
            let error = from(&[(name, value)]).unwrap_err();
            assert!(matches!(error, Error::Config { name: named, .. } if named == name), "{error}");
            assert!(error.to_string().contains(&format!("{name}={value}:")), "{error}");
        }
    }

    /// By what can be read, and so set by hand.
    #[test]
    fn settings_of_variables_are_equal_to_the_same_set_by_hand() {
        let get = |name: &str| (name == PAGES.variable).then(|| OsString::from("5"));
        let of_variables = PagedConfig::from_vars(get).unwrap();
        let by_hand = PagedConfig { initial_pages: 5, ..PagedConfig::default() };
        assert_eq!(of_variables, by_hand);
        assert_ne!(of_variables, PagedConfig::default());
    }

    #[test]
    fn a_bad_value_that_no_variable_gave_is_named_with_its_field() {
        let get = |name: &str| (name == PAGES.variable).then(|| OsString::from("5"));
        let mut config = PagedConfig::from_vars(get).unwrap();
        config.limit_bytes = Some(GRANULE);
        let text = |config: &PagedConfig| config.check(GRANULE).unwrap_err().to_string();
        assert!(text(&config).starts_with("VPMM_PAGES=5: "), "{}", text(&config));
        config.initial_pages = 6;
        assert!(text(&config).starts_with("initial_pages=6: "), "{}", text(&config));
        config.page_size_bytes = Some(ADDRESS_SPACE_BYTES);
        let both = format!("initial_pages=6: page_size_bytes={ADDRESS_SPACE_BYTES} leaves no room");
        assert!(text(&config).starts_with(&both), "{}", text(&config));
        config.page_size_bytes = Some(1);
        assert!(text(&config).starts_with("page_size_bytes=1: "), "{}", text(&config));
        (config.page_size_bytes, config.va_size_bytes) = (None, 7);
        assert!(text(&config).starts_with("va_size_bytes=7: "), "{}", text(&config));
    }

    #[test]
    fn a_page_larger_than_any_request_turns_pages_off() {
        let checked = from(&[(PAGE_SIZE.variable, "18446744073709551615")]).unwrap();
        assert_eq!(checked.page, u64::MAX);
        assert!(
            from(&[(PAGE_SIZE.variable, "18446744073709551615"), (PAGES.variable, "1")]).is_err()
        );
        assert_eq!(from(&[(PAGE_SIZE.variable, "34359738368")]).unwrap().page, 32 << 30);
    }
}

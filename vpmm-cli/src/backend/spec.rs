//! Allocators by name.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use super::Backend;
use super::cuda_async::CudaAsync;
use super::cuda_malloc::CudaMalloc;
use super::pool::PoolBackend;
use super::stack::StackBackend;
use super::{Kind, Stack, StackError};
use crate::device::Machine;

/// An allocator as the command line names it.
#[derive(Clone, Debug, PartialEq)]
pub enum AllocatorSpec {
    /// `vpmm`'s pool in the default profile.
    Default,
    /// `vpmm`'s pool in the paged profile, set by `VPMM_PAGE_SIZE`, `VPMM_PAGES` and `VPMM_VA_SIZE`.
    Paged,
    /// `cuMemAllocFromPoolAsync` from a pool of its own that keeps what it has.
    CudaAsync,
    /// `cuMemAlloc` and `cuMemFree`.
    CudaMalloc,
    /// A resource, or a stack of them.
    Stack(Box<Stack>),
}

impl AllocatorSpec {
    /// The allocators that are called directly, in the order of the help.
    pub const DIRECT: [Self; 4] = [Self::Default, Self::Paged, Self::CudaAsync, Self::CudaMalloc];

    /// Whether the allocator itself keeps to a limit of device memory, so that it can
    /// give memory back or move it when that is reached. For `cuMemAlloc` the command
    /// only counts what was asked for.
    pub const fn has_limit(&self) -> bool {
        !matches!(self, Self::CudaMalloc)
    }

    /// The files that it writes logs to.
    pub fn logs(&self) -> impl Iterator<Item = &Path> {
        let top = match self {
            Self::Stack(stack) => Some(&**stack),
            _ => None,
        };
        std::iter::successors(top, |stack| stack.upstream()).filter_map(|stack| {
            match stack.kind() {
                Kind::Logging { file, .. } => Some(file.as_path()),
                _ => None,
            }
        })
    }

    /// Makes the allocator on a machine, holding at most `limit_bytes` of device memory.
    ///
    /// # Errors
    /// What the allocator or the driver answers; a bad environment variable.
    pub fn open<'a>(
        &self,
        machine: &'a Machine,
        limit_bytes: Option<u64>,
    ) -> vpmm::Result<Box<dyn Backend + 'a>> {
        Ok(match self {
            Self::Default => Box::new(PoolBackend::standard(machine, limit_bytes)?),
            Self::Paged => Box::new(PoolBackend::paged(machine, limit_bytes)?),
            Self::CudaAsync => Box::new(CudaAsync::new(machine, limit_bytes)?),
            Self::CudaMalloc => Box::new(CudaMalloc::new(machine, limit_bytes)),
            Self::Stack(stack) => Box::new(StackBackend::new(stack, machine, limit_bytes)?),
        })
    }
}

/// The name on the command line and in reports.
impl fmt::Display for AllocatorSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.pad("default"),
            Self::Paged => f.pad("paged"),
            Self::CudaAsync => f.pad("cuda-async"),
            Self::CudaMalloc => f.pad("cuda-malloc"),
            Self::Stack(stack) => stack.fmt(f),
        }
    }
}

/// A text that names no allocator.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SpecError {
    /// There is no such allocator, or not with these settings.
    #[error(transparent)]
    Stack(#[from] StackError),
    /// One allocator twice: two rows that nothing tells apart.
    #[error("{0} is named twice")]
    Twice(AllocatorSpec),
}

impl FromStr for AllocatorSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        let direct = Self::DIRECT.into_iter().find(|spec| spec.to_string() == text.trim());
        match direct {
            Some(direct) => Ok(direct),
            None => Ok(Self::Stack(Box::new(text.parse()?))),
        }
    }
}

/// Allocators to compare, separated by commas.
#[derive(Clone, Debug, PartialEq)]
pub struct AllocatorList(pub Vec<AllocatorSpec>);

impl FromStr for AllocatorList {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        let mut list = Vec::new();
        for name in stacks::split_list(text)? {
            let spec = name.parse()?;
            if list.contains(&spec) {
                return Err(SpecError::Twice(spec));
            }
            list.push(spec);
        }
        Ok(Self(list))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_read_back() {
        for spec in AllocatorSpec::DIRECT {
            assert_eq!(spec.to_string().parse(), Ok(spec));
        }
    }

    #[test]
    fn lists_keep_their_order() {
        let list: AllocatorList = "cuda-malloc, limiting(1GiB,paged) ,paged".parse().unwrap();
        let [malloc, stack, paged] = &list.0[..] else { panic!("{list:?}") };
        assert_eq!((malloc, paged), (&AllocatorSpec::CudaMalloc, &AllocatorSpec::Paged));
        assert_eq!(stack.to_string(), "limiting(1GiB,paged)");
    }

    #[test]
    fn unknown_and_repeated_names_are_refused() {
        for (text, part) in [("page", "\"page\""), ("", "\"\""), ("paged,paged", "twice")] {
            let error = text.parse::<AllocatorList>().unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        assert!("x".parse::<AllocatorSpec>().unwrap_err().to_string().contains("cuda-async"));
    }
}

//! The resources that there are by name, and what each is set to.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use vpmm::caching::CachingConfig;

use super::parse::{Argument, Expression, StackError, bytes, number, parse};

/// A resource, and what it stands on.
#[derive(Clone, Debug, PartialEq)]
pub struct Stack {
    kind: Kind,
    upstream: Option<Box<Stack>>,
    /// As it was written.
    text: Box<str>,
}

/// A resource with its settings.
#[derive(Clone, Debug, PartialEq)]
pub enum Kind {
    /// The pool of this project, default profile.
    Default,
    /// The pool of this project, paged profile.
    Paged,
    /// A pool of the driver's.
    CudaAsync,
    /// `cuMemAlloc`.
    CudaMalloc,
    /// Managed memory.
    Managed,
    /// Page-locked host memory.
    Pinned,
    /// The program's own memory.
    Host,
    /// At most so many bytes.
    Limiting(u64),
    /// Counts.
    Statistics,
    /// Keeps what is outstanding.
    Tracking,
    /// Writes RMM's rows to a file.
    Logging(PathBuf),
    /// Addresses at multiples of so many bytes.
    Aligned(u64),
    /// One call at a time.
    ThreadSafe,
    /// Brings managed memory to the device.
    Prefetch,
    /// A pool over anything, RMM's way.
    Coalescing {
        /// Taken at the start.
        initial_bytes: u64,
        /// The most that it may hold.
        max_bytes: Option<u64>,
    },
    /// Blocks of one size.
    FixedSize {
        /// Of each block.
        block_bytes: u64,
    },
    /// Blocks of powers of two.
    Binning {
        /// The least power.
        least: u32,
        /// The greatest.
        most: u32,
    },
    /// One piece of memory, divided among streams.
    Arena {
        /// Of all of it.
        bytes: Option<u64>,
    },
    /// PyTorch's scheme, set as PyTorch is.
    Caching(Box<CachingConfig>),
}

/// A name, its form, and how it is read.
struct Entry {
    name: &'static str,
    form: &'static str,
    /// What it stands on where nothing is said: nothing, for what makes memory itself.
    over: Over,
    read: fn(&mut Arguments) -> Result<Kind, StackError>,
}

#[derive(Clone, Copy, PartialEq)]
enum Over {
    /// It makes memory.
    Nothing,
    /// It has to be said.
    Something,
    /// This, where nothing is said.
    Else(&'static str),
}

const ENTRIES: &[Entry] = &[
    Entry { name: "default", form: "default", over: Over::Nothing, read: |_| Ok(Kind::Default) },
    Entry { name: "paged", form: "paged", over: Over::Nothing, read: |_| Ok(Kind::Paged) },
    Entry {
        name: "cuda-async",
        form: "cuda-async",
        over: Over::Nothing,
        read: |_| Ok(Kind::CudaAsync),
    },
    Entry {
        name: "cuda-malloc",
        form: "cuda-malloc",
        over: Over::Nothing,
        read: |_| Ok(Kind::CudaMalloc),
    },
    Entry { name: "managed", form: "managed", over: Over::Nothing, read: |_| Ok(Kind::Managed) },
    Entry { name: "pinned", form: "pinned", over: Over::Nothing, read: |_| Ok(Kind::Pinned) },
    Entry { name: "host", form: "host", over: Over::Nothing, read: |_| Ok(Kind::Host) },
    Entry {
        name: "limiting",
        form: "limiting(BYTES,UPSTREAM)",
        over: Over::Something,
        read: |given| Ok(Kind::Limiting(given.bytes("limit")?)),
    },
    Entry {
        name: "statistics",
        form: "statistics(UPSTREAM)",
        over: Over::Something,
        read: |_| Ok(Kind::Statistics),
    },
    Entry {
        name: "tracking",
        form: "tracking(UPSTREAM)",
        over: Over::Something,
        read: |_| Ok(Kind::Tracking),
    },
    Entry {
        name: "logging",
        form: "logging(FILE,UPSTREAM)",
        over: Over::Something,
        read: |given| Ok(Kind::Logging(given.text("file")?.as_ref().into())),
    },
    Entry {
        name: "aligned",
        form: "aligned(BYTES,UPSTREAM)",
        over: Over::Something,
        read: |given| Ok(Kind::Aligned(given.bytes("alignment")?)),
    },
    Entry {
        name: "thread-safe",
        form: "thread-safe(UPSTREAM)",
        over: Over::Something,
        read: |_| Ok(Kind::ThreadSafe),
    },
    Entry {
        name: "prefetch",
        form: "prefetch(UPSTREAM)",
        over: Over::Something,
        read: |_| Ok(Kind::Prefetch),
    },
    Entry {
        name: "coalescing",
        form: "coalescing(initial=BYTES,max=BYTES,UPSTREAM)",
        over: Over::Else("cuda-malloc"),
        read: |given| {
            let initial_bytes = given.bytes_if("initial")?.unwrap_or(0);
            Ok(Kind::Coalescing { initial_bytes, max_bytes: given.bytes_if("max")? })
        },
    },
    Entry {
        name: "fixed-size",
        form: "fixed-size(BYTES,UPSTREAM)",
        over: Over::Else("cuda-malloc"),
        read: |given| Ok(Kind::FixedSize { block_bytes: given.bytes("block")? }),
    },
    Entry {
        name: "binning",
        form: "binning(LEAST,MOST,UPSTREAM), powers of two",
        over: Over::Else("cuda-malloc"),
        read: |given| {
            Ok(Kind::Binning { least: given.power("least")?, most: given.power("most")? })
        },
    },
    Entry {
        name: "arena",
        form: "arena(BYTES,UPSTREAM)",
        over: Over::Else("cuda-malloc"),
        read: |given| Ok(Kind::Arena { bytes: given.bytes_if("bytes")? }),
    },
    Entry {
        name: "caching",
        form: "caching(KEY=VALUE,...,UPSTREAM), with the keys of PYTORCH_CUDA_ALLOC_CONF",
        over: Over::Else("cuda-malloc"),
        read: |given| Ok(Kind::Caching(Box::new(given.caching()?))),
    },
];

/// What is in a resource's brackets, as far as nobody has read it.
struct Arguments {
    name: &'static str,
    form: &'static str,
    left: Vec<Argument>,
}

impl Arguments {
    /// The next value, by its key or by its place.
    fn take(&mut self, key: &str) -> Option<Box<str>> {
        let by_key = self.left.iter().position(|one| one.key.as_deref() == Some(key));
        let by_place =
            || self.left.iter().position(|one| one.key.is_none() && !is_stack(&one.text));
        by_key.or_else(by_place).map(|at| self.left.remove(at).text)
    }

    fn text(&mut self, what: &'static str) -> Result<Box<str>, StackError> {
        let Self { name, form, .. } = *self;
        self.take(what).ok_or(StackError::Missing { name, what, form })
    }

    fn bytes(&mut self, what: &'static str) -> Result<u64, StackError> {
        self.text(what).and_then(|text| bytes(self.name, &text))
    }

    fn bytes_if(&mut self, what: &'static str) -> Result<Option<u64>, StackError> {
        self.take(what).map(|text| bytes(self.name, &text)).transpose()
    }

    fn power(&mut self, what: &'static str) -> Result<u32, StackError> {
        self.text(what).and_then(|text| number(self.name, &text))
    }

    /// All settings, as PyTorch reads them from its variable.
    fn caching(&mut self) -> Result<CachingConfig, StackError> {
        let mut settings = Vec::new();
        while let Some(at) = self.left.iter().position(|one| one.key.is_some()) {
            let Argument { key, text } = self.left.remove(at);
            settings.push(format!("{}:{text}", key.unwrap_or_default()));
        }
        let settings = settings.join(",");
        let name = self.name;
        settings.parse().map_err(|source| StackError::Settings { name, source })
    }

    fn upstream(&mut self) -> Option<Box<str>> {
        let by_key = self.left.iter().position(|one| one.key.as_deref() == Some("upstream"));
        let by_place = || self.left.iter().position(|one| one.key.is_none() && is_stack(&one.text));
        by_key.or_else(by_place).map(|at| self.left.remove(at).text)
    }
}

/// Whether a text begins with a resource's name.
fn is_stack(text: &str) -> bool {
    let name = text.split('(').next().unwrap_or_default().trim();
    ENTRIES.iter().any(|entry| entry.name == name) || text.contains('(')
}

impl Stack {
    /// The forms of all resources, for help.
    pub fn forms() -> impl Iterator<Item = &'static str> {
        ENTRIES.iter().map(|entry| entry.form)
    }

    pub(super) fn kind(&self) -> &Kind {
        &self.kind
    }

    pub(super) fn upstream(&self) -> Option<&Self> {
        self.upstream.as_deref()
    }

    fn read(expression: Expression, text: &str) -> Result<Self, StackError> {
        let known = || ENTRIES.iter().map(|entry| entry.name).collect::<Vec<_>>().join(", ").into();
        let entry = ENTRIES.iter().find(|entry| *entry.name == *expression.name);
        let Some(entry) = entry else {
            return Err(StackError::Unknown { name: expression.name, known: known() });
        };
        let Entry { name, form, over, read } = *entry;
        let mut given = Arguments { name, form, left: expression.arguments };
        let mut upstream = if over == Over::Nothing { None } else { given.upstream() };
        let kind = read(&mut given)?;
        // A name that there is none of was taken for a value.
        if over != Over::Nothing && upstream.is_none() {
            let at = given.left.iter().position(|one| one.key.is_none());
            upstream = at.map(|at| given.left.remove(at).text);
        }
        if let Some(excess) = given.left.first() {
            return Err(StackError::Excess { name, given: excess.text.clone(), form });
        }
        let upstream = match (upstream, over) {
            (Some(text), _) => Some(Box::new(text.parse()?)),
            (None, Over::Nothing) => None,
            (None, Over::Else(default)) => Some(Box::new(default.parse()?)),
            (None, Over::Something) => {
                return Err(StackError::Missing { name, what: "upstream", form });
            }
        };
        Ok(Self { kind, upstream, text: text.into() })
    }
}

impl FromStr for Stack {
    type Err = StackError;

    fn from_str(text: &str) -> Result<Self, StackError> {
        Self::read(parse(text)?, text.trim())
    }
}

impl fmt::Display for Stack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        text.parse::<Stack>().unwrap_err().to_string()
    }

    #[test]
    fn stacks_are_read() {
        let stack: Stack = "limiting(1GiB,statistics(default))".parse().unwrap();
        assert_eq!(*stack.kind(), Kind::Limiting(1 << 30));
        let below = stack.upstream().unwrap();
        assert_eq!(*below.kind(), Kind::Statistics);
        assert_eq!(*below.upstream().unwrap().kind(), Kind::Default);
        assert_eq!(stack.to_string(), "limiting(1GiB,statistics(default))");
        // In any order, and by name.
        let same: Stack = "limiting(upstream=default, limit=4096)".parse().unwrap();
        assert_eq!(*same.kind(), Kind::Limiting(4096));
        let logging: Stack = "logging(cuda-malloc,a log.csv)".parse().unwrap();
        assert_eq!(*logging.kind(), Kind::Logging("a log.csv".into()));
    }

    #[test]
    fn settings_of_the_caching_allocator() {
        let text = "caching(roundup_power2_divisions=[256:1,>:8],max_split_size_mb=64,paged)";
        let stack: Stack = text.parse().unwrap();
        let Kind::Caching(config) = stack.kind() else { panic!("{stack:?}") };
        assert_eq!(config.max_split_size_bytes, Some(64 << 20));
        assert_eq!(config.roundup_power2_divisions.of(1 << 40), 8);
        assert_eq!(*stack.upstream().unwrap().kind(), Kind::Paged);
        let plain: Stack = "caching".parse().unwrap();
        assert_eq!(*plain.upstream().unwrap().kind(), Kind::CudaMalloc);
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (text, part) in [
            ("arenas", "no allocator \"arenas\""),
            ("", "no allocator \"\""),
            ("limiting(1GiB)", "lacks its upstream; its form is limiting(BYTES,UPSTREAM)"),
            ("limiting(default)", "lacks its limit"),
            ("limiting(1GiB,2GiB,default)", "takes no \"2GiB\""),
            ("limiting(1XB,default)", "\"1XB\" is no number of bytes"),
            ("default(5)", "default takes no \"5\""),
            ("statistics(nothing(5))", "no allocator \"nothing\""),
            ("statistics(default", "brackets"),
            ("statistics(default,paged)", "takes no \"paged\""),
            ("caching(max_split_size_mb=1x)", "caching: max_split_size_mb:1x"),
            ("caching(expandable_segments=True)", "expandable_segments:True does not apply"),
            ("caching(5)", "no allocator \"5\""),
            ("limiting(size=1GiB,default)", "lacks its limit"),
        ] {
            assert!(error(text).contains(part), "{text}: {}", error(text));
        }
    }
}

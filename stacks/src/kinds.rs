//! The resources that there are by name, and what each is set to.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use vpmm::caching::CachingConfig;
use vpmm::resource::LogFormat;

use crate::parse::{Argument, Expression, StackError, bytes, number, parse, unquoted};

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
    CudaAsync {
        /// Taken at the start.
        initial_bytes: u64,
        /// The most that it may hold.
        max_bytes: Option<u64>,
        /// What it keeps when the host has waited.
        threshold_bytes: Option<u64>,
    },
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
    Tracking {
        /// Whether to note where each allocation was made.
        backtraces: bool,
    },
    /// Writes rows to a file.
    Logging {
        /// Its name.
        file: PathBuf,
        /// RMM's rows, or fuller ones.
        format: LogFormat,
    },
    /// Addresses at multiples of so many bytes.
    Aligned {
        /// The multiple.
        bytes: u64,
        /// Of requests of at least so many bytes.
        from_bytes: u64,
    },
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
        /// Taken at a time, if not the resource's own number.
        blocks_at_once: Option<u32>,
    },
    /// Blocks of powers of two.
    Binning {
        /// The least and the greatest power; `None` for no bins yet.
        powers: Option<(u32, u32)>,
    },
    /// One piece of memory, divided among streams.
    Arena {
        /// Of all of it.
        bytes: Option<u64>,
    },
    /// PyTorch's scheme, set as PyTorch is.
    Caching(Box<CachingConfig>),
    /// What the stack is to stand on, made before.
    Given,
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
        form: "cuda-async(initial=BYTES,max=BYTES,threshold=BYTES)",
        over: Over::Nothing,
        read: |given| {
            Ok(Kind::CudaAsync {
                initial_bytes: given.bytes_by_key("initial")?.unwrap_or(0),
                max_bytes: given.bytes_by_key("max")?,
                threshold_bytes: given.bytes_by_key("threshold")?,
            })
        },
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
        form: "tracking(backtraces=on,UPSTREAM)",
        over: Over::Something,
        read: |given| {
            let backtraces = given.choice("backtraces", "on or off", &["off", "on"])? == 1;
            Ok(Kind::Tracking { backtraces })
        },
    },
    Entry {
        name: "logging",
        form: "logging(FILE,format=rmm,UPSTREAM), or format=full",
        over: Over::Something,
        read: |given| {
            let format = match given.choice("format", "format: rmm or full", &["rmm", "full"])? {
                0 => LogFormat::Rmm,
                _ => LogFormat::Full,
            };
            Ok(Kind::Logging { file: given.text("file")?.as_ref().into(), format })
        },
    },
    Entry {
        name: "aligned",
        form: "aligned(BYTES,from=BYTES,UPSTREAM)",
        over: Over::Something,
        read: |given| {
            let from_bytes = given.bytes_by_key("from")?.unwrap_or(0);
            Ok(Kind::Aligned { bytes: given.bytes("alignment")?, from_bytes })
        },
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
        form: "fixed-size(BYTES,blocks=NUMBER,UPSTREAM)",
        over: Over::Else("cuda-malloc"),
        read: |given| {
            let blocks_at_once = given.number_by_key("blocks")?;
            Ok(Kind::FixedSize { block_bytes: given.bytes("block")?, blocks_at_once })
        },
    },
    Entry {
        name: "binning",
        form: "binning(LEAST,MOST,UPSTREAM), powers of two, or binning(UPSTREAM) without bins",
        over: Over::Else("cuda-malloc"),
        read: |given| {
            let Some(least) = given.power_if("least")? else {
                return Ok(Kind::Binning { powers: None });
            };
            let most = given.power("most")?;
            if most < least {
                // It would have no bins at all.
                let (name, what) = (given.name, "power that is at least the first");
                return Err(StackError::Malformed { name, given: most.to_string().into(), what });
            }
            Ok(Kind::Binning { powers: Some((least, most)) })
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

/// Resources that may stand on each other in one text.
const MOST: usize = 100;

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

    /// A value that only its key stands for.
    fn take_by_key(&mut self, key: &str) -> Option<Box<str>> {
        let at = self.left.iter().position(|one| one.key.as_deref() == Some(key));
        at.map(|at| self.left.remove(at).text)
    }

    fn text(&mut self, what: &'static str) -> Result<Box<str>, StackError> {
        let Self { name, form, .. } = *self;
        self.take(what).map(|text| unquoted(&text)).ok_or(StackError::Missing { name, what, form })
    }

    fn bytes(&mut self, what: &'static str) -> Result<u64, StackError> {
        self.text(what).and_then(|text| bytes(self.name, &text))
    }

    fn bytes_if(&mut self, what: &'static str) -> Result<Option<u64>, StackError> {
        self.take(what).map(|text| bytes(self.name, &text)).transpose()
    }

    fn bytes_by_key(&mut self, key: &'static str) -> Result<Option<u64>, StackError> {
        self.take_by_key(key).map(|text| bytes(self.name, &text)).transpose()
    }

    fn number_by_key(&mut self, key: &'static str) -> Result<Option<u32>, StackError> {
        self.take_by_key(key).map(|text| number(self.name, &text)).transpose()
    }

    fn power(&mut self, what: &'static str) -> Result<u32, StackError> {
        self.text(what).and_then(|text| number(self.name, &text))
    }

    fn power_if(&mut self, what: &'static str) -> Result<Option<u32>, StackError> {
        self.take(what).map(|text| number(self.name, &text)).transpose()
    }

    /// Which of some words a setting is; the first where it is not there.
    fn choice(
        &mut self,
        key: &str,
        what: &'static str,
        words: &[&str],
    ) -> Result<usize, StackError> {
        let Some(given) = self.take_by_key(key) else { return Ok(0) };
        let name = self.name;
        let at = words.iter().position(|word| **word == *given);
        at.ok_or(StackError::Malformed { name, given, what })
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
    if text.starts_with('"') {
        return false;
    }
    let name = text.split('(').next().unwrap_or_default().trim();
    ENTRIES.iter().any(|entry| entry.name == name) || text.contains('(')
}

impl Stack {
    /// The forms of all resources, for help.
    pub fn forms() -> impl Iterator<Item = &'static str> {
        ENTRIES.iter().map(|entry| entry.form)
    }

    /// What it is.
    pub fn kind(&self) -> &Kind {
        &self.kind
    }

    /// What it stands on.
    pub fn upstream(&self) -> Option<&Self> {
        self.upstream.as_deref()
    }

    /// How many stand on each other, without what is there already.
    pub fn height(&self) -> usize {
        let below = self.upstream().map_or(0, Self::height);
        if self.kind == Kind::Given { below } else { below + 1 }
    }

    /// A stack that is to stand on a resource which is there already: the lowest that the text names says
    /// nothing of what it stands on, as `limiting(1GiB)` or `statistics(arena)`.
    ///
    /// # Errors
    /// [`StackError`]; [`StackError::OnNothing`] where the lowest makes memory itself.
    pub fn over_given(text: &str) -> Result<Self, StackError> {
        Self::read(parse(text)?, text.trim(), true, 1)
    }

    /// What stands on it.
    fn given() -> Self {
        Self { kind: Kind::Given, upstream: None, text: "".into() }
    }

    /// `number` counts from the top.
    fn read(
        expression: Expression,
        text: &str,
        is_given: bool,
        number: usize,
    ) -> Result<Self, StackError> {
        if number > MOST {
            return Err(StackError::TooMany { most: MOST });
        }
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
            let Argument { key, text } = excess;
            let given = key.as_ref().map_or(text.clone(), |key| format!("{key}={text}").into());
            return Err(StackError::Excess { name, given, form });
        }
        let upstream = match (upstream, over) {
            (Some(text), _) => {
                Some(Box::new(Self::read(parse(&text)?, text.trim(), is_given, number + 1)?))
            }
            (None, Over::Nothing) if is_given => return Err(StackError::OnNothing { name }),
            (None, Over::Nothing) => None,
            (None, _) if is_given => Some(Box::new(Self::given())),
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
        Self::read(parse(text)?, text.trim(), false, 1)
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
        let rmm = |file: &str| Kind::Logging { file: file.into(), format: LogFormat::Rmm };
        assert_eq!(*logging.kind(), rmm("a log.csv"));
        let odd: Stack = "logging(\"a,b(c)=\"\"d.csv\",cuda-malloc)".parse().unwrap();
        assert_eq!(*odd.kind(), rmm("a,b(c)=\"d.csv"));
    }

    #[test]
    fn so_many_stand_on_each_other() {
        let text = |of: usize| format!("{}default{}", "statistics(".repeat(of), ")".repeat(of));
        assert!(text(MOST - 1).parse::<Stack>().is_ok());
        for of in [MOST, 200_000] {
            assert_eq!(text(of).parse::<Stack>(), Err(StackError::TooMany { most: MOST }));
        }
    }

    #[test]
    fn settings_that_only_their_keys_stand_for() {
        let stack: Stack = "cuda-async(max=1GiB,initial=2MiB)".parse().unwrap();
        let kind = Kind::CudaAsync {
            initial_bytes: 2 << 20,
            max_bytes: Some(1 << 30),
            threshold_bytes: None,
        };
        assert_eq!(*stack.kind(), kind);
        let stack: Stack = "fixed-size(4096,blocks=7)".parse().unwrap();
        assert_eq!(*stack.kind(), Kind::FixedSize { block_bytes: 4096, blocks_at_once: Some(7) });
        let stack: Stack = "aligned(4096,from=1MiB,default)".parse().unwrap();
        assert_eq!(*stack.kind(), Kind::Aligned { bytes: 4096, from_bytes: 1 << 20 });
        let stack: Stack = "tracking(backtraces=on,default)".parse().unwrap();
        assert_eq!(*stack.kind(), Kind::Tracking { backtraces: true });
        let stack: Stack = "binning(default)".parse().unwrap();
        assert_eq!(*stack.kind(), Kind::Binning { powers: None });
        let stack: Stack = "binning(18,20)".parse().unwrap();
        assert_eq!(*stack.kind(), Kind::Binning { powers: Some((18, 20)) });
    }

    #[test]
    fn a_stack_on_something_given() {
        let stack = Stack::over_given("limiting(1GiB,arena)").unwrap();
        let arena = stack.upstream().unwrap();
        assert_eq!(*arena.kind(), Kind::Arena { bytes: None });
        assert_eq!(*arena.upstream().unwrap().kind(), Kind::Given);
        let refused = Stack::over_given("limiting(1GiB,default)").unwrap_err();
        assert_eq!(refused, StackError::OnNothing { name: "default" });
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
            ("binning(18,default)", "lacks its most"),
            ("binning(22,18,default)", "\"18\" is no power that is at least the first"),
            ("cuda-async(5)", "cuda-async takes no \"5\""),
            ("tracking(backtrace=on,default)", "tracking takes no \"backtrace=on\""),
            ("logging(a.csv,format=xml,default)", "\"xml\" is no format"),
            ("tracking(backtraces=1,default)", "\"1\" is no on or off"),
            ("limiting(size=1GiB,default)", "lacks its limit"),
        ] {
            assert!(error(text).contains(part), "{text}: {}", error(text));
        }
    }
}

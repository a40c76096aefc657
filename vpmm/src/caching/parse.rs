//! PyTorch's text of settings.

#![forbid(unsafe_code)]

use std::env::VarError;
use std::str::FromStr;

use super::config::CachingConfig;
use super::size::Divisions;

/// The variables that PyTorch reads, in that order: the first that is set counts.
const VARIABLES: [&str; 2] = ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"];

/// Why a text of settings is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SettingError {
    /// Nothing has this name.
    #[error(
        "there is no setting {key:?}; known: max_split_size_mb, max_non_split_rounding_mb, \
         large_segment_size_mb, roundup_power2_divisions, garbage_collection_threshold, \
         per_process_memory_fraction"
    )]
    Unknown {
        /// What stands where a setting's name should.
        key: String,
    },
    /// PyTorch knows the setting, and it means nothing here.
    #[error("{key}:{value} does not apply: {reason}")]
    NotApplicable {
        /// The setting.
        key: String,
        /// What it was set to.
        value: String,
        /// Why it does not.
        reason: &'static str,
    },
    /// The setting cannot have this value.
    #[error("{key}:{value}: {reason}")]
    Value {
        /// The setting.
        key: String,
        /// What it was set to.
        value: String,
        /// What it may be.
        reason: &'static str,
    },
    /// The text is not settings and values: `key:value,key:[a:b,c:d]`.
    #[error("{expected:?} is expected after {after:?}")]
    Syntax {
        /// What should come.
        expected: &'static str,
        /// What stands before.
        after: String,
    },
    /// An environment variable does not hold text.
    #[error("{name} does not hold text")]
    NotText {
        /// The variable.
        name: &'static str,
    },
}

type Parsed<T> = Result<T, SettingError>;

impl CachingConfig {
    /// The settings in `PYTORCH_CUDA_ALLOC_CONF`, or else in `PYTORCH_ALLOC_CONF`; the default where
    /// neither is set.
    ///
    /// # Errors
    /// Those of [`FromStr`]; [`SettingError::NotText`].
    pub fn from_env() -> Parsed<Self> {
        Self::from_variables(|name| std::env::var(name))
    }

    fn from_variables(value: impl Fn(&str) -> Result<String, VarError>) -> Parsed<Self> {
        for name in VARIABLES {
            match value(name) {
                Ok(text) => return text.parse(),
                Err(VarError::NotPresent) => {}
                Err(VarError::NotUnicode(_)) => return Err(SettingError::NotText { name }),
            }
        }
        Ok(Self::default())
    }
}

/// Reads what PyTorch reads: settings and values with colons between, commas between settings,
/// spaces anywhere.
///
/// - `expandable_segments:False`, `backend:native` and `release_lock_on_cudamalloc` say what is so
///   here in any case, and change nothing: what serves cached memory is never locked during a call of the
///   driver.
/// - `expandable_segments:True`, other backends and settings of page-locked memory or of graphs'
///   pools are refused as [not applicable](SettingError::NotApplicable).
///
/// ```
/// use vpmm::caching::{CachingConfig, SettingError};
/// let text = "roundup_power2_divisions:[256:1,512:2,1024:4,>:8],max_split_size_mb:64";
/// let config: CachingConfig = text.parse().unwrap();
/// assert_eq!(config.roundup_power2_divisions.of(600 << 20), 2);
///
/// let refused = "max_split_size:64".parse::<CachingConfig>();
/// assert!(matches!(refused, Err(SettingError::Unknown { key }) if key == "max_split_size"));
/// ```
impl FromStr for CachingConfig {
    type Err = SettingError;

    fn from_str(text: &str) -> Parsed<Self> {
        let mut config = Self::default();
        let mut tokens = Tokens::of(text);
        while let Some(key) = tokens.next() {
            tokens.expect(":")?;
            config.take(key, &mut tokens)?;
            if !tokens.is_over() {
                tokens.expect(",")?;
            }
        }
        Ok(config)
    }
}

impl CachingConfig {
    fn take(&mut self, key: &str, tokens: &mut Tokens<'_>) -> Parsed<()> {
        match key {
            "max_split_size_mb" => {
                self.max_split_size_bytes = Some(mebibytes(key, tokens.value()?, 20)?);
            }
            "max_non_split_rounding_mb" => {
                self.max_non_split_rounding_bytes = mebibytes(key, tokens.value()?, 20)?;
            }
            "large_segment_size_mb" => {
                let value = tokens.value()?;
                let bytes = mebibytes(key, value, 10)?;
                if !bytes.is_multiple_of(super::ROUND_LARGE as u64) {
                    return Err(bad(key, value, "it must be even"));
                }
                self.large_segment_bytes = bytes;
            }
            "garbage_collection_threshold" => {
                let reason = "it must be a fraction, above 0 and below 1";
                let valid = |value| value > 0.0 && value < 1.0;
                self.garbage_collection_threshold =
                    Some(fraction(key, tokens.value()?, reason, valid)?);
            }
            "per_process_memory_fraction" => {
                let reason = "it must be a fraction, from 0 to 1";
                let valid = |value| (0.0..=1.0).contains(&value);
                self.memory_fraction = Some(fraction(key, tokens.value()?, reason, valid)?);
            }
            "roundup_power2_divisions" => divisions(&mut self.roundup_power2_divisions, tokens)?,
            "expandable_segments" => {
                if switch(key, tokens.value()?)? {
                    let reason = "segments are made by cuMemAlloc and do not grow; vpmm::Pool is \
                                  what grows and moves memory";
                    return Err(not_here(key, "True", reason));
                }
            }
            "backend" => match tokens.value()? {
                "native" => {}
                value @ "cudaMallocAsync" => {
                    let reason = "this is the native backend; the driver's pool is a memory \
                                  resource of its own";
                    return Err(not_here(key, value, reason));
                }
                value => return Err(bad(key, value, "known: native, cudaMallocAsync")),
            },
            "release_lock_on_cudamalloc" => {
                switch(key, tokens.value()?)?;
            }
            "graph_capture_record_stream_reuse" => {
                let reason = "uses in a capture are kept until it is over";
                return Err(not_here(key, tokens.value()?, reason));
            }
            key if key.starts_with("pinned_") => {
                let reason = "it is about page-locked host memory";
                return Err(not_here(key, tokens.value()?, reason));
            }
            key => return Err(SettingError::Unknown { key: key.to_owned() }),
        }
        Ok(())
    }
}

/// A number for all sizes, or a list of the least MiB and the number for a doubling. Sizes below
/// the list's first get its number; `>` stands for the last one's doubling and all above.
fn divisions(rule: &mut Divisions, tokens: &mut Tokens<'_>) -> Parsed<()> {
    const KEY: &str = "roundup_power2_divisions";
    const POWER: &str = "the number of divisions must be 0 or a power of two";
    let number = |text: &str| match text.parse::<u32>() {
        Ok(number) if number == 0 || number.is_power_of_two() => Ok(number),
        _ => Err(bad(KEY, text, POWER)),
    };
    let first = tokens.value()?;
    if first != "[" {
        rule.fill(.., number(first)?);
        return Ok(());
    }
    let mut last: Option<usize> = None;
    loop {
        let from = tokens.value()?;
        if from == "]" {
            return Ok(());
        }
        tokens.expect(":")?;
        let of = number(tokens.value()?)?;
        if from == ">" {
            rule.fill(last.unwrap_or(0).., of);
        } else {
            let mib = from.parse::<u64>().ok().filter(|mib| mib.is_power_of_two());
            let Some(mib) = mib else {
                return Err(bad(KEY, from, "a list's sizes must be powers of two, in MiB"));
            };
            let interval = (mib.ilog2() as usize).min(Divisions::INTERVALS - 1);
            let start = if last.is_none() { 0 } else { interval };
            rule.fill(start..=interval, of);
            last = Some(interval);
        }
        match tokens.value()? {
            "]" => return Ok(()),
            "," => {}
            _ => return Err(tokens.unlike("] or ,")),
        }
    }
}

fn bad(key: &str, value: &str, reason: &'static str) -> SettingError {
    SettingError::Value { key: key.to_owned(), value: value.to_owned(), reason }
}

fn not_here(key: &str, value: &str, reason: &'static str) -> SettingError {
    SettingError::NotApplicable { key: key.to_owned(), value: value.to_owned(), reason }
}

fn mebibytes(key: &str, value: &str, least: u64) -> Parsed<u64> {
    let Ok(mib) = value.parse::<u64>() else {
        return Err(bad(key, value, "it must be a number of MiB"));
    };
    if mib < least {
        let reason = if least == 20 { "it must be at least 20" } else { "it must be at least 10" };
        return Err(bad(key, value, reason));
    }
    // More than any device has is as good as without bounds.
    Ok(mib.min(1 << 43) << 20)
}

fn fraction(
    key: &str,
    value: &str,
    reason: &'static str,
    valid: impl Fn(f64) -> bool,
) -> Parsed<f64> {
    match value.parse::<f64>() {
        Ok(fraction) if valid(fraction) => Ok(fraction),
        _ => Err(bad(key, value, reason)),
    }
}

fn switch(key: &str, value: &str) -> Parsed<bool> {
    match value {
        "True" => Ok(true),
        "False" => Ok(false),
        _ => Err(bad(key, value, "it must be True or False")),
    }
}

/// Words, and the signs between them.
struct Tokens<'a> {
    rest: &'a str,
    last: &'a str,
}

impl<'a> Tokens<'a> {
    fn of(text: &'a str) -> Self {
        Self { rest: text.trim(), last: "" }
    }

    fn is_over(&self) -> bool {
        self.rest.is_empty()
    }

    fn next(&mut self) -> Option<&'a str> {
        const SIGNS: [char; 4] = [',', ':', '[', ']'];
        let length = match self.rest.find(SIGNS) {
            Some(0) => 1,
            Some(length) => length,
            None => self.rest.len(),
        };
        let (token, rest) = self.rest.split_at(length);
        if token.is_empty() {
            return None;
        }
        self.rest = rest.trim_start();
        self.last = token.trim_end();
        Some(self.last)
    }

    fn value(&mut self) -> Parsed<&'a str> {
        let before = self.last;
        let missing = SettingError::Syntax { expected: "a value", after: before.to_owned() };
        self.next().ok_or(missing)
    }

    fn expect(&mut self, sign: &'static str) -> Parsed<()> {
        let before = self.last;
        match self.next() {
            Some(token) if token == sign => Ok(()),
            _ => Err(SettingError::Syntax { expected: sign, after: before.to_owned() }),
        }
    }

    /// The token just read is not what should come.
    fn unlike(&self, expected: &'static str) -> SettingError {
        SettingError::Syntax { expected, after: self.last.to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> CachingConfig {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn divisions_are_shown_as_they_are_read() {
        for shown in
            ["0", "8", "[1:2,2:4,>:4]", "[128:0,256:1,512:2,1024:8,>:8]", "[16384:4,32768:2,>:2]"]
        {
            let config = parsed(&format!("roundup_power2_divisions:{shown}"));
            assert_eq!(config.roundup_power2_divisions.to_string(), shown);
        }
        let config = parsed("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]");
        let shown = config.roundup_power2_divisions.to_string();
        let again = parsed(&format!("roundup_power2_divisions:{shown}"));
        assert_eq!(again, config, "{shown}");
    }

    fn refused(text: &str) -> String {
        match text.parse::<CachingConfig>() {
            Ok(config) => panic!("{text} was taken: {config:?}"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn every_setting_is_read() {
        let config = parsed(
            "max_split_size_mb:128, garbage_collection_threshold:0.8,\
             roundup_power2_divisions:[256:1,512:2,1024:4,>:8] , max_non_split_rounding_mb : 40,\
             large_segment_size_mb:32,per_process_memory_fraction:0.5",
        );
        assert_eq!(config.max_split_size_bytes, Some(128 << 20));
        assert_eq!(config.garbage_collection_threshold, Some(0.8));
        assert_eq!(config.max_non_split_rounding_bytes, 40 << 20);
        assert_eq!(config.large_segment_bytes, 32 << 20);
        assert_eq!(config.memory_fraction, Some(0.5));
        // PyTorch's reading of the list: the first number for all below it, and `>` from the last
        // size upwards, which takes that one's number away.
        let of = |mib: u64| config.roundup_power2_divisions.of(mib << 20);
        assert_eq!([1, 255, 256, 512, 1023, 1024, 4096].map(of), [1, 1, 1, 2, 2, 8, 8]);
        assert_eq!(config.check().err().map(|error| error.to_string()), None);
    }

    #[test]
    fn nothing_is_the_default_and_one_number_is_for_all() {
        assert_eq!(parsed("  "), CachingConfig::default());
        let config = parsed("roundup_power2_divisions:8");
        assert_eq!(Divisions::uniform(8), Some(config.roundup_power2_divisions));
        let list = parsed("roundup_power2_divisions:[]").roundup_power2_divisions;
        assert_eq!(list, Divisions::default());
    }

    #[test]
    fn the_first_variable_that_is_set_counts() {
        let with = |set: &'static [(&str, &str)]| {
            CachingConfig::from_variables(move |name| {
                let found = set.iter().find(|(of, _)| *of == name);
                found.map(|(_, value)| (*value).to_owned()).ok_or(VarError::NotPresent)
            })
        };
        let [first, second] = VARIABLES;
        assert_eq!((first, second), ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"));
        assert_eq!(with(&[]), Ok(CachingConfig::default()));
        const BOTH: &[(&str, &str)] = &[
            ("PYTORCH_ALLOC_CONF", "max_split_size_mb:30"),
            ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:40"),
        ];
        assert_eq!(with(BOTH), Ok(parsed("max_split_size_mb:40")));
        assert_eq!(with(&BOTH[..1]), Ok(parsed("max_split_size_mb:30")));
        let not_text = |_: &str| Err(VarError::NotUnicode("x".into()));
        let refused = CachingConfig::from_variables(not_text);
        assert_eq!(refused, Err(SettingError::NotText { name: first }));
    }

    #[test]
    fn what_is_so_anyway_is_taken() {
        let text = "backend:native,expandable_segments:False,release_lock_on_cudamalloc:True";
        assert_eq!(parsed(text), CachingConfig::default());
    }

    #[test]
    fn what_does_not_apply_is_told() {
        for (text, part) in [
            ("expandable_segments:True", "vpmm::Pool"),
            ("backend:cudaMallocAsync", "native backend"),
            ("pinned_use_background_threads:True", "page-locked"),
            ("graph_capture_record_stream_reuse:True", "capture"),
        ] {
            let error = refused(text);
            assert!(error.contains("does not apply") && error.contains(part), "{error}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, part) in [
            ("max_split_size:128", "\"max_split_size\""),
            ("max_split_size_mb:19", "at least 20"),
            ("max_non_split_rounding_mb:19", "at least 20"),
            ("max_split_size_mb:many", "max_split_size_mb:many"),
            ("max_split_size_mb:-1", "max_split_size_mb:-1"),
            ("large_segment_size_mb:21", "even"),
            ("large_segment_size_mb:8", "at least 10"),
            ("garbage_collection_threshold:1.0", "fraction"),
            ("garbage_collection_threshold:NaN", "fraction"),
            ("per_process_memory_fraction:2", "fraction"),
            ("backend:other", "cudaMallocAsync"),
            ("expandable_segments:true", "True or False"),
            ("roundup_power2_divisions:3", "power of two"),
            ("roundup_power2_divisions:[100:2]", "powers of two"),
            ("roundup_power2_divisions:[256:3]", "power of two"),
            ("roundup_power2_divisions:[256:2", "\"] or ,\"|a value"),
            ("roundup_power2_divisions:[256", "\":\""),
            ("max_split_size_mb", "\":\""),
            ("max_split_size_mb:", "\"a value\""),
            ("max_split_size_mb:64;x:1", "64;x"),
            ("max_split_size_mb:64 max_non_split_rounding_mb:64", "64 max"),
            ("max_split_size_mb:64]", "\",\""),
        ] {
            let error = refused(text);
            let found = part.split('|').any(|part| error.contains(part));
            assert!(found, "{text}: {part} is missing in: {error}");
        }
    }

    #[test]
    fn values_without_bounds_do_not_overflow() {
        let config = parsed("max_split_size_mb:18446744073709551615");
        assert_eq!(config.max_split_size_bytes, Some(1 << 63));
        assert!(refused("max_split_size_mb:18446744073709551616").contains("number of MiB"));
    }
}

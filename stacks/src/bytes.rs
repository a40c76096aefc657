//! Numbers of bytes, as people write and read them.

use std::fmt;
use std::str::FromStr;

/// The units that [`ByteCount`] reads. KB, MB … are decimal, KiB, MiB … binary.
const UNITS: [(&str, u64); 10] = [
    ("", 1),
    ("B", 1),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
];

/// A number of bytes given on the command line: `4096`, `1.5GiB`, `20 GB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteCount(pub u64);

/// A text that is no number of bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ByteCountError {
    /// Not a decimal number followed by a unit.
    #[error("expected a number and B, KB, MB, GB, TB, KiB, MiB, GiB or TiB")]
    Malformed,
    /// A fraction that comes to no whole number of bytes.
    #[error("not a whole number of bytes")]
    Fraction,
    /// More than 64 bits hold.
    #[error("more bytes than 64 bits can count")]
    TooLarge,
}

impl FromStr for ByteCount {
    type Err = ByteCountError;

    fn from_str(text: &str) -> Result<Self, ByteCountError> {
        let text = text.trim();
        let end = text.find(|c: char| c != '.' && !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(end);
        let unit = unit.trim_start();
        let (_, scale) = UNITS
            .into_iter()
            .find(|(name, _)| name.eq_ignore_ascii_case(unit))
            .ok_or(ByteCountError::Malformed)?;
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if whole.is_empty() || number.ends_with('.') || fraction.contains('.') {
            return Err(ByteCountError::Malformed);
        }
        let digits: u128 =
            format!("{whole}{fraction}").parse().map_err(|_| ByteCountError::TooLarge)?;
        let places = u32::try_from(fraction.len()).map_err(|_| ByteCountError::TooLarge)?;
        let divisor = 10_u128.checked_pow(places).ok_or(ByteCountError::TooLarge)?;
        let scaled = digits.checked_mul(u128::from(scale)).ok_or(ByteCountError::TooLarge)?;
        if !scaled.is_multiple_of(divisor) {
            return Err(ByteCountError::Fraction);
        }
        u64::try_from(scaled / divisor).map(Self).map_err(|_| ByteCountError::TooLarge)
    }
}

/// Decimal units and three figures: `17.2 GB`.
impl fmt::Display for ByteCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0;
        if bytes < 1_000 {
            return f.pad(&format!("{bytes} B"));
        }
        let (name, scale) = UNITS[2..6]
            .iter()
            .rev()
            .find(|(_, scale)| bytes >= *scale)
            .copied()
            .unwrap_or(UNITS[2]);
        let value = bytes as f64 / scale as f64;
        let places = match value {
            v if v < 9.995 => 2,
            v if v < 99.95 => 1,
            _ => 0,
        };
        f.pad(&format!("{value:.places$} {name}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_their_units() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("1B", 1),
            ("2KiB", 2048),
            ("2 kib", 2048),
            ("1.5GiB", 3 << 29),
            ("17.25GB", 17_250_000_000),
            ("1TiB", 1 << 40),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(text.parse(), Ok(ByteCount(bytes)), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused() {
        use ByteCountError::{Fraction, Malformed, TooLarge};
        for (text, error) in [
            ("", Malformed),
            ("GiB", Malformed),
            ("-1", Malformed),
            ("1.GiB", Malformed),
            ("1.2.3GB", Malformed),
            ("1 gallon", Malformed),
            ("0.5", Fraction),
            ("1.0000001KB", Fraction),
            ("18446744073709551616", TooLarge),
            ("999999999TiB", TooLarge),
            ("99999999999999999999999999999999999999999999", TooLarge),
        ] {
            assert_eq!(text.parse::<ByteCount>(), Err(error), "{text}");
        }
    }

    #[test]
    fn sizes_are_shown_with_three_figures() {
        for (bytes, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "1.00 KB"),
            (17_243_000_000, "17.2 GB"),
            (999_999, "1000 KB"),
            (530_000_000, "530 MB"),
            (u64::MAX, "18446744 TB"),
        ] {
            assert_eq!(ByteCount(bytes).to_string(), text);
        }
    }
}

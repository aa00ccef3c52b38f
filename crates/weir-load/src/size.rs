//! Sizes as people write them: `4k`, `4KiB`, `1G`, `1GiB`, `4096`.

use std::fmt;
use std::str::FromStr;

/// Binary units, largest first: letter, full name, bytes.
const UNITS: [(char, &str, u64); 5] = [
    ('p', "PiB", 1 << 50),
    ('t', "TiB", 1 << 40),
    ('g', "GiB", 1 << 30),
    ('m', "MiB", 1 << 20),
    ('k', "KiB", 1 << 10),
];

/// A number of bytes that is read and printed with binary units.
///
/// Printing is exact: the largest unit that divides the number, or plain bytes.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(transparent)]
pub struct Size(pub u64);

/// Why a text is not a size. Says what to write instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// Nothing, or no digits at the start.
    #[error("`{0}` is not a size: expected digits and a unit, such as 4096, 4k, 4KiB or 1G")]
    NoNumber(String),
    /// A fraction.
    #[error(
        "`{0}` is not a whole number of bytes: write it in the next smaller unit, such as 1536M for 1.5G"
    )]
    Fraction(String),
    /// `KB` and its like mean 1000 to some and 1024 to others.
    #[error("`{text}` is ambiguous: write {number}{binary} for multiples of 1024")]
    Ambiguous {
        /// What was given.
        text: String,
        /// Its digits.
        number: String,
        /// The unit that is not ambiguous.
        binary: &'static str,
    },
    /// An unknown unit.
    #[error(
        "`{text}` has an unknown unit `{unit}`: use k, M, G, T or P (or KiB, MiB, GiB, TiB, PiB), all multiples of 1024"
    )]
    UnknownUnit {
        /// What was given.
        text: String,
        /// The part that was not understood.
        unit: String,
    },
    /// Does not fit 64 bits.
    #[error("`{0}` is too large: sizes go up to 16383 PiB")]
    TooLarge(String),
}

/// Reads a size: digits, then nothing or `B` (bytes), `k`/`KiB`, `M`/`MiB`, `G`/`GiB`, `T`/`TiB`, `P`/`PiB`
/// in either case. Every unit is a multiple of 1024, as in fio.
///
/// # Errors
/// Anything else, with a text that says what to write.
pub fn parse_size(text: &str) -> Result<u64, SizeError> {
    let trimmed = text.trim();
    let digits = trimmed.len() - trimmed.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = trimmed.split_at(digits);
    if number.is_empty() {
        return Err(SizeError::NoNumber(text.into()));
    }
    if unit.starts_with(['.', ',']) {
        return Err(SizeError::Fraction(text.into()));
    }
    let factor = factor(text, number, unit.trim_start())?;
    let number: u64 = number.parse().map_err(|_| SizeError::TooLarge(text.into()))?;
    number.checked_mul(factor).ok_or_else(|| SizeError::TooLarge(text.into()))
}

fn factor(text: &str, number: &str, unit: &str) -> Result<u64, SizeError> {
    let lower = unit.to_ascii_lowercase();
    if matches!(lower.as_str(), "" | "b") {
        return Ok(1);
    }
    let mut letters = lower.chars();
    let first = letters.next();
    if let Some(&(_, name, bytes)) = UNITS.iter().find(|(letter, ..)| Some(*letter) == first) {
        match letters.as_str() {
            "" | "i" | "ib" => return Ok(bytes),
            "b" => {
                return Err(SizeError::Ambiguous { text: text.into(), number: number.into(), binary: name });
            }
            _ => {}
        }
    }
    Err(SizeError::UnknownUnit { text: text.into(), unit: unit.into() })
}

/// `bytes` with the largest unit that divides it: `4KiB`, `1GiB`, `4100`.
#[must_use]
pub fn format_size(bytes: u64) -> String {
    match UNITS.iter().find(|(_, _, unit)| bytes != 0 && bytes.is_multiple_of(*unit)) {
        Some((_, name, unit)) => format!("{}{name}", bytes / unit),
        None => bytes.to_string(),
    }
}

impl FromStr for Size {
    type Err = SizeError;
    fn from_str(text: &str) -> Result<Size, SizeError> {
        parse_size(text).map(Size)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format_size(self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn all_spellings_are_binary() {
        for (text, bytes) in [
            ("4096", 4096),
            ("512B", 512),
            ("4k", 4096),
            ("4K", 4096),
            ("4KiB", 4096),
            ("4 kib", 4096),
            ("1MiB", 1 << 20),
            ("1m", 1 << 20),
            ("1G", 1 << 30),
            ("1GiB", 1 << 30),
            ("2T", 2 << 40),
            ("0", 0),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn errors_say_what_to_write() {
        for (text, hint) in [
            ("", "4KiB"),
            ("k4", "4KiB"),
            ("-1", "4KiB"),
            ("1.5G", "1536M"),
            ("4KB", "write 4KiB"),
            ("7x", "unknown unit `x`"),
            ("4kk", "unknown unit `kk`"),
            ("99999999999999999999", "too large"),
            ("99999P", "too large"),
        ] {
            let error = parse_size(text).unwrap_err().to_string();
            assert!(error.contains(hint), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn what_is_printed_is_read_back(bytes: u64, shift in 0u32..50) {
            let bytes = bytes >> shift << shift.min(40) >> shift.min(40);
            prop_assert_eq!(parse_size(&format_size(bytes)), Ok(bytes));
        }
    }
}

//! Sizes as people write them, on the command line, in configurations and in job files: `4k`, `1.5GiB`, `1GB`, `4096`.
//!
//! `k`, `M`, `G`, `T`, `P` and `KiB` to `PiB` are multiples of 1024, as in fio; `kB`, `MB`, `GB`, `TB`, `PB` are multiples of
//! 1000, as on the label of a disk. Case does not matter, and a space may stand before the unit.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serializer};

/// Units, largest first: letter, name, bytes, and bytes of the decimal unit.
const UNITS: [(char, &str, u64, u64); 5] = [
    ('p', "PiB", 1 << 50, 1_000_000_000_000_000),
    ('t', "TiB", 1 << 40, 1_000_000_000_000),
    ('g', "GiB", 1 << 30, 1_000_000_000),
    ('m', "MiB", 1 << 20, 1_000_000),
    ('k', "KiB", 1 << 10, 1_000),
];

/// Maximum number of decimal places.
const MOST_PLACES: usize = 18;

/// A number of bytes: parsed by [`parse_size`], printed with binary units.
///
/// Printing is exact: the largest unit that divides the number, or plain bytes. In JSON it is the number of bytes; where a
/// person writes it, the field says `#[serde(with = "weir_block::size::as_text")]`.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(transparent)]
pub struct Size(pub u64);

/// The reason why a text is not a size, with the correction.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// Not a number, a negative one, or an unknown unit.
    #[error(
        "`{0}` is not a size: write bytes, or a number with k, M, G, T, P (or KiB to PiB: multiples of 1024) or with kB to PB \
         (multiples of 1000), such as 4096, 4k, 1.5GiB or 1GB"
    )]
    NotASize(String),
    /// A fraction that is not a number of bytes.
    #[error("`{0}` is not a whole number of bytes: write it in a smaller unit, such as 1536k for 1.5M")]
    Fraction(String),
    /// Does not fit 64 bits.
    #[error("`{0}` is too large: sizes are below 16384 PiB")]
    TooLarge(String),
    /// Zero, where the size must be positive.
    #[error("`{0}` is no size here: it must be at least one byte, such as 4k or 1GiB")]
    Zero(String),
}

/// Reads a size: a number, which may have a fraction, and a unit. Zero is a size: see [`parse_size_above_zero`].
///
/// # Errors
/// Anything else, with a sentence that says what to write.
pub fn parse_size(text: &str) -> Result<u64, SizeError> {
    let trimmed = text.trim();
    let end = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(end);
    let not_a_size = || SizeError::NotASize(text.into());
    let factor = factor(unit.trim_start()).ok_or_else(not_a_size)?;
    let (whole, fraction) = match number.split_once('.') {
        None => (number, "0"),
        Some((_, fraction)) if fraction.is_empty() || fraction.contains('.') => return Err(not_a_size()),
        Some((whole, fraction)) => (whole, fraction),
    };
    if whole.is_empty() {
        return Err(not_a_size());
    }
    let too_large = || SizeError::TooLarge(text.into());
    let whole: u64 = whole.parse().map_err(|_| too_large())?;
    let part = part_of(fraction, factor).ok_or_else(|| SizeError::Fraction(text.into()))?;
    whole.checked_mul(factor).and_then(|bytes| bytes.checked_add(part)).ok_or_else(too_large)
}

/// Reads a size that must not be zero.
///
/// # Errors
/// As [`parse_size`], and for zero.
pub fn parse_size_above_zero(text: &str) -> Result<Size, SizeError> {
    match parse_size(text)? {
        0 => Err(SizeError::Zero(text.into())),
        bytes => Ok(Size(bytes)),
    }
}

/// Bytes of one `unit`.
fn factor(unit: &str) -> Option<u64> {
    let lower = unit.to_ascii_lowercase();
    if matches!(lower.as_str(), "" | "b") {
        return Some(1);
    }
    let mut letters = lower.chars();
    let first = letters.next()?;
    let (.., binary, decimal) = UNITS.iter().find(|(letter, ..)| *letter == first)?;
    match letters.as_str() {
        "" | "i" | "ib" => Some(*binary),
        "b" => Some(*decimal),
        _ => None,
    }
}

/// `0.fraction` of `factor`, when that is a whole number.
fn part_of(fraction: &str, factor: u64) -> Option<u64> {
    let digits = fraction.trim_end_matches('0');
    if digits.is_empty() {
        return Some(0);
    }
    if digits.len() > MOST_PLACES {
        return None;
    }
    let product = digits.parse::<u128>().ok()? * u128::from(factor);
    let scale = 10u128.pow(digits.len() as u32);
    if product.is_multiple_of(scale) { u64::try_from(product / scale).ok() } else { None }
}

/// `bytes` with the largest binary unit that divides it: `4KiB`, `1GiB`, `4100`.
#[must_use]
pub fn format_size(bytes: u64) -> String {
    match UNITS.iter().find(|(_, _, unit, _)| bytes != 0 && bytes.is_multiple_of(*unit)) {
        Some((_, name, unit, _)) => format!("{}{name}", bytes / unit),
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

/// For fields of files that people write: a [`Size`] as text, such as `64MiB`.
pub mod as_text {
    use super::{Deserialize, Deserializer, Serializer, Size};

    /// Writes the size as text.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn serialize<S: Serializer>(size: &Size, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(size)
    }

    /// Reads the size from text.
    ///
    /// # Errors
    /// It is no text, or not a size.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Size, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn letters_are_binary_and_decimal_units_say_so() {
        for (text, bytes) in [
            ("4096", 4096),
            ("512B", 512),
            ("4k", 4096),
            ("4K", 4096),
            ("4KiB", 4096),
            ("4 kib", 4096),
            ("4Ki", 4096),
            ("1MiB", 1 << 20),
            ("1m", 1 << 20),
            ("1G", 1 << 30),
            ("1GiB", 1 << 30),
            ("2T", 2 << 40),
            ("0", 0),
            ("0k", 0),
            ("4kB", 4000),
            ("4KB", 4000),
            ("1MB", 1_000_000),
            ("1GB", 1_000_000_000),
            ("2 tb", 2_000_000_000_000),
            ("1.5GiB", 3 << 29),
            ("1.5G", 3 << 29),
            ("1.50g", 3 << 29),
            ("0.5k", 512),
            ("1.234kB", 1234),
            ("2.0", 2),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn errors_say_what_to_write() {
        for text in [
            "", " ", "k", "k4", "-1", "-4k", "+4k", "7x", "4kk", "4kibb", "1.", ".5G", "1.5.5G", "1,5G",
            "4k 4k", "1e3", "é",
        ] {
            let error = parse_size(text).unwrap_err();
            assert_eq!(error, SizeError::NotASize(text.into()));
            let said = error.to_string();
            assert!(said.contains("such as 4096, 4k, 1.5GiB or 1GB") && !said.contains('\n'), "{said}");
        }
        for (text, hint) in [
            ("1.5", "whole number"),
            ("0.0001k", "whole number"),
            ("1.1234567890123456789G", "whole number"),
            ("99999999999999999999", "too large"),
            ("16384P", "too large"),
            ("16383.9999999P", "whole number"),
        ] {
            let error = parse_size(text).unwrap_err().to_string();
            assert!(error.contains(hint), "{text}: {error}");
        }
        assert!(parse_size_above_zero("0").unwrap_err().to_string().contains("at least one byte"));
        assert_eq!(parse_size_above_zero("1k"), Ok(Size(1024)));
    }

    #[derive(Debug, PartialEq, serde::Serialize, Deserialize)]
    struct Written {
        #[serde(with = "as_text")]
        text: Size,
        number: Size,
    }

    #[test]
    fn people_write_text_and_programs_numbers() {
        let written = Written { text: Size(64 << 20), number: Size(4096) };
        let json = serde_json::to_string(&written).unwrap();
        assert_eq!(json, r#"{"text":"64MiB","number":4096}"#);
        assert_eq!(serde_json::from_str::<Written>(&json).unwrap(), written);
        let error = serde_json::from_str::<Written>(r#"{"text":"-1","number":1}"#).unwrap_err().to_string();
        assert!(error.contains("such as 4096"), "{error}");
    }

    proptest! {
        #[test]
        fn what_is_printed_is_read_back(bytes: u64, shift in 0u32..50) {
            let bytes = bytes >> shift << shift.min(40) >> shift.min(40);
            prop_assert_eq!(parse_size(&format_size(bytes)), Ok(bytes));
        }

        #[test]
        fn no_text_is_a_panic(text in "\\PC{0,12}") {
            let _ = parse_size(&text);
        }

        /// Reference implementation: thousandths of a unit by multiplication.
        #[test]
        fn fractions_are_exact(thousandths in 0u64..4_000_000, unit in 0usize..5, decimal: bool) {
            let (letter, _, binary, thousand) = UNITS[unit];
            let (factor, suffix) = if decimal { (thousand, "b") } else { (binary, "") };
            let text = format!("{}.{:03}{letter}{suffix}", thousandths / 1000, thousandths % 1000);
            let product = u128::from(thousandths) * u128::from(factor);
            let expected = (product.is_multiple_of(1000)).then_some((product / 1000) as u64);
            prop_assert_eq!(parse_size(&text).ok(), expected);
        }
    }
}

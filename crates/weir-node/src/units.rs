//! Periods as people write them: `1.5 s`, and numbers with nouns. (Sizes: [`weir_block::size`].)

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// `1 disk`, `2 disks`: a number and a noun that takes an `s`, or a `y` that becomes `ies`.
#[must_use]
pub fn count(number: u64, noun: &str) -> String {
    match (number, noun.strip_suffix('y')) {
        (1, _) => format!("1 {noun}"),
        (_, Some(stem)) => format!("{number} {stem}ies"),
        (_, None) => format!("{number} {noun}s"),
    }
}

/// `1 client is`, `2 clients are`, as [`count`] has the number and noun.
#[must_use]
pub fn count_are(number: u64, noun: &str) -> String {
    format!("{} {}", count(number, noun), if number == 1 { "is" } else { "are" })
}

/// A stretch of time, kept as text: `250 ms`, `5 s`, `2 min`, `1 h`, `2m30s`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Period(pub Duration);

/// Why a period could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PeriodError {
    /// A number without a unit.
    #[error("{0:?} has no unit: write {0}s for seconds, {0}ms, {0}m for minutes, {0}h or {0}d")]
    NoUnit(String),
    /// Less than nothing.
    #[error("{0:?} is negative: a time is 0s or longer, for example 5s, 90m or 2m30s")]
    Negative(String),
    /// Anything else.
    #[error(
        "{0:?} is not a time: write numbers with ms, s, m (or min), h or d, the largest first, for example 5s, 1.5h or 2m30s"
    )]
    Unknown(String),
}

/// Names of units and their milliseconds, the largest first; of several names the first is shown.
const PERIODS: [(&str, u64); 6] =
    [("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];

/// Milliseconds of `12.5 s` or `2m30s`, when they are a whole number that fits. Units descend; each occurs once.
fn parse_period(text: &str) -> Option<u64> {
    let (mut rest, mut smallest, mut sum) = (text.trim(), u64::MAX, 0_u64);
    loop {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, tail) = rest.split_at(end);
        let tail = tail.trim_start();
        let (unit, tail) = tail.split_at(tail.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(tail.len()));
        let (_, factor) = PERIODS.iter().find(|(name, _)| *name == unit)?;
        if *factor >= smallest {
            return None;
        }
        (smallest, sum) = (*factor, sum.checked_add(milliseconds(number, *factor)?)?);
        rest = tail.trim_start();
        if rest.is_empty() {
            return Some(sum);
        }
    }
}

/// `number` times `factor`, when that is a whole number that fits. Takes at most three decimal places.
fn milliseconds(number: &str, factor: u64) -> Option<u64> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    if fraction.is_empty() || fraction.len() > 3 {
        return None;
    }
    let fraction: u64 = format!("{fraction:0<3}").parse().ok()?;
    let thousandths = whole.parse::<u64>().ok()?.checked_mul(1000)?.checked_add(fraction)?;
    let product = thousandths.checked_mul(factor)?;
    product.is_multiple_of(1000).then_some(product / 1000)
}

impl FromStr for Period {
    type Err = PeriodError;
    fn from_str(text: &str) -> Result<Period, PeriodError> {
        let trimmed = text.trim();
        match parse_period(trimmed) {
            Some(ms) => Ok(Period(Duration::from_millis(ms))),
            None if trimmed.starts_with('-') => Err(PeriodError::Negative(trimmed.to_owned())),
            None if trimmed.parse::<f64>().is_ok_and(f64::is_finite) => {
                Err(PeriodError::NoUnit(trimmed.to_owned()))
            }
            None => Err(PeriodError::Unknown(text.to_owned())),
        }
    }
}

impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = u64::try_from(self.0.as_millis()).unwrap_or(u64::MAX);
        let unit = PERIODS.iter().find(|(_, factor)| ms >= *factor && ms.is_multiple_of(*factor));
        let (name, factor) = unit.copied().unwrap_or(("ms", 1));
        f.pad(&format!("{} {name}", ms / factor))
    }
}

/// Bytes for people, with the largest unit that leaves a number of at least one: `1.4 GiB`. Not exact.
#[must_use]
pub fn about(bytes: u64) -> String {
    const UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    match UNITS.iter().find(|(_, unit)| bytes >= *unit) {
        Some((name, unit)) if bytes.is_multiple_of(*unit) => format!("{} {name}", bytes / unit),
        Some((name, unit)) => format!("{:.1} {name}", bytes as f64 / *unit as f64),
        None => format!("{bytes} B"),
    }
}

impl Serialize for Period {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Period {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Period, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nouns_follow_their_numbers() {
        let counts = [0, 1, 2].map(|number| count(number, "disk"));
        assert_eq!(counts, ["0 disks", "1 disk", "2 disks"]);
        assert_eq!([1, 2].map(|number| count(number, "copy")), ["1 copy", "2 copies"]);
        assert_eq!([1, 2].map(|number| count_are(number, "client")), ["1 client is", "2 clients are"]);
    }

    #[test]
    fn periods_as_people_write_them() {
        for (text, ms) in [
            ("1.5 s", 1500),
            ("250ms", 250),
            (" 2 min ", 120_000),
            ("1h", 3_600_000),
            ("0 s", 0),
            ("2m30s", 150_000),
            ("2m 30s", 150_000),
            ("1h 0.5m", 3_630_000),
            ("90m", 5_400_000),
            ("1 h 2 min 3 s 4 ms", 3_723_004),
            ("7d", 604_800_000),
            ("1d 12h", 129_600_000),
        ] {
            assert_eq!(text.parse(), Ok(Period(Duration::from_millis(ms))), "{text}");
        }
        for text in [
            "",
            "s",
            "-1 s",
            "1. s",
            "0.0001 s",
            "0.5 ms",
            "1 w",
            "9999999999999999 h",
            "1 é",
            "30s2m",
            "1s1s",
            "2m30",
            "2m,30s",
            "1m 1min",
            "5 S",
        ] {
            let error = text.parse::<Period>().unwrap_err().to_string();
            assert!(error.contains("5s") && error.contains("2m30s"), "{text}: {error}");
        }
        let unit = "5".parse::<Period>().unwrap_err().to_string();
        assert!(unit.contains("5s for seconds"), "{unit}");
    }

    #[test]
    fn what_is_shown_reads_back() {
        for ms in [0, 1, 250, 1000, 1500, 60_000, 3_600_000, 90_000, 86_400_000, 129_600_000] {
            let period = Period(Duration::from_millis(ms));
            assert_eq!(period.to_string().parse(), Ok(period));
        }
        assert_eq!(Period(Duration::from_millis(1500)).to_string(), "1500 ms");
        assert_eq!(about(1_503_238_553), "1.4 GiB");
        assert_eq!(about(512), "512 B");
    }
}

//! Periods as people write them: `1.5 s`. (Sizes: [`weir_block::size`].)

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A stretch of time, kept as text: `250 ms`, `5 s`, `2 min`, `1 h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Period(pub Duration);

/// Why a period could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a time: a number and ms, s, min or h, for example \"5 s\"")]
pub struct PeriodError(String);

const PERIODS: [(&str, u64); 4] = [("h", 3_600_000), ("min", 60_000), ("s", 1_000), ("ms", 1)];

/// Milliseconds of `12.5 s`, when they are a whole number that fits.
fn parse_period(text: &str) -> Option<u64> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    let (number, unit) = text.split_at(end);
    let (_, factor) = PERIODS.iter().find(|(name, _)| *name == unit.trim())?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    if fraction.is_empty() || fraction.len() > 3 {
        return None;
    }
    let fraction: u64 = format!("{fraction:0<3}").parse().ok()?;
    let thousandths = whole.parse::<u64>().ok()?.checked_mul(1000)?.checked_add(fraction)?;
    let product = thousandths.checked_mul(*factor)?;
    product.is_multiple_of(1000).then_some(product / 1000)
}

impl FromStr for Period {
    type Err = PeriodError;
    fn from_str(text: &str) -> Result<Period, PeriodError> {
        let period = parse_period(text).map(|ms| Period(Duration::from_millis(ms)));
        period.ok_or_else(|| PeriodError(text.to_owned()))
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
    fn periods_as_people_write_them() {
        for (text, ms) in
            [("1.5 s", 1500), ("250ms", 250), (" 2 min ", 120_000), ("1h", 3_600_000), ("0 s", 0)]
        {
            assert_eq!(text.parse(), Ok(Period(Duration::from_millis(ms))), "{text}");
        }
        for text in ["", "5", "s", "-1 s", "1. s", "0.0001 s", "0.5 ms", "1 d", "9999999999999999 h", "1 é"]
        {
            let error = text.parse::<Period>().unwrap_err().to_string();
            assert!(error.contains("5 s"), "{text}: {error}");
        }
    }

    #[test]
    fn what_is_shown_reads_back() {
        for ms in [0, 1, 250, 1000, 1500, 60_000, 3_600_000, 90_000] {
            let period = Period(Duration::from_millis(ms));
            assert_eq!(period.to_string().parse(), Ok(period));
        }
        assert_eq!(Period(Duration::from_millis(1500)).to_string(), "1500 ms");
        assert_eq!(about(1_503_238_553), "1.4 GiB");
        assert_eq!(about(512), "512 B");
    }
}

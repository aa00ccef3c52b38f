//! Times: seconds since 1970, and how messages write them.

use rustls::pki_types::UnixTime;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// Greatest difference between two hosts' clocks with which they still work together, in seconds. A certificate starts to be
/// valid this long before it was issued.
pub const MOST_SKEW: u64 = 300;

/// The last second that certificates can carry (RFC 5280 §4.1.2.5): 9999-12-31T23:59:59Z.
const LAST_SECOND: u64 = 253_402_300_799;

/// `seconds` since 1970 as a calendar time, at most the end of 9999.
pub(crate) fn calendar(seconds: u64) -> OffsetDateTime {
    let seconds = i64::try_from(seconds.min(LAST_SECOND)).unwrap_or(i64::MAX);
    // Within the years that `time` knows, by the line above.
    OffsetDateTime::from_unix_timestamp(seconds).unwrap_or(OffsetDateTime::UNIX_EPOCH)
}

/// `seconds` since 1970 as the time type of certificate checks.
#[must_use]
pub fn unix(seconds: u64) -> UnixTime {
    UnixTime::since_unix_epoch(std::time::Duration::from_secs(seconds))
}

/// `seconds` since 1970 in words, such as `2026-11-23T18:14:02Z`.
pub(crate) fn at(seconds: u64) -> String {
    // All times up to the end of 9999 have this form.
    calendar(seconds).format(&Rfc3339).unwrap_or_else(|_| format!("second {seconds} since 1970"))
}

/// A number of seconds in words, such as `1 h 5 min`. The two largest units that differ from zero.
#[must_use]
pub fn span(seconds: u64) -> String {
    let units = [(86_400, "d"), (3600, "h"), (60, "min"), (1, "s")];
    let mut rest = seconds;
    let mut parts = Vec::new();
    for (size, unit) in units {
        if rest >= size && parts.len() < 2 {
            parts.push(format!("{} {unit}", rest / size));
        }
        rest %= size;
    }
    if parts.is_empty() { "0 s".into() } else { parts.join(" ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_read_like_times() {
        assert_eq!(at(0), "1970-01-01T00:00:00Z");
        assert_eq!(at(u64::MAX), "9999-12-31T23:59:59Z");
        for (seconds, words) in
            [(0, "0 s"), (59, "59 s"), (3600, "1 h"), (3661, "1 h 1 min"), (90_000, "1 d 1 h")]
        {
            assert_eq!(span(seconds), words);
        }
    }
}

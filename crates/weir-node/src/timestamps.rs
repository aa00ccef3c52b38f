//! Points in time as the API and the command line show them: RFC 3339, UTC, milliseconds.

use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// `2026-11-23T10:45:01.250Z`, from milliseconds since 1970. A time beyond the calendar (after the year 9999) becomes its
/// last moment.
#[must_use]
pub fn rfc3339(unix_ms: u64) -> String {
    let last = i128::from(u32::MAX) * 1_000_000_000 * 58;
    let nanos = (i128::from(unix_ms) * 1_000_000).min(last);
    let time = OffsetDateTime::from_unix_timestamp_nanos(nanos).unwrap_or(OffsetDateTime::UNIX_EPOCH);
    // Always three digits, so that the columns of a list stay in line.
    let whole = time.replace_nanosecond(0).unwrap_or(time);
    let text = whole.format(&Rfc3339).unwrap_or_default();
    format!("{}.{:03}Z", text.trim_end_matches('Z'), time.millisecond())
}

#[cfg(test)]
mod tests {
    use super::rfc3339;

    #[test]
    fn times_have_dates() {
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(rfc3339(1_795_430_701_250), "2026-11-23T10:45:01.250Z");
        assert_eq!(rfc3339(1_709_164_799_999), "2024-02-28T23:59:59.999Z");
        assert!(rfc3339(u64::MAX).starts_with("9"), "{}", rfc3339(u64::MAX));
    }
}

//! Times as people read them.

/// `2026-11-23 21:07:44.125`, UTC, of milliseconds since 1970.
pub fn date_and_time(ms: u64) -> String {
    let (seconds, ms) = (ms / 1000, ms % 1000);
    let (year, month, day) = civil(seconds / 86_400);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}.{ms:03}")
}

/// Year, month and day of the Gregorian calendar, of days since 1970-01-01. Years are counted from March, so that the leap day
/// ends one.
fn civil(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (era * 400 + year + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00:00.000"),
            (951_782_400, "2000-02-29 00:00:00.000"),
            (951_868_799, "2000-02-29 23:59:59.000"),
            (1_709_251_199, "2024-02-29 23:59:59.000"),
            (1_795_468_064, "2026-11-23 21:07:44.000"),
            (4_107_542_400, "2100-03-01 00:00:00.000"),
        ] {
            assert_eq!(date_and_time(seconds * 1000), text);
        }
        assert!(date_and_time(125).ends_with("00.125"));
    }
}

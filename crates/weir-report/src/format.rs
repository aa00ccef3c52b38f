//! Numbers for people: three significant digits and a unit, the same in every table, sentence and chart.

/// A value with three significant digits and no exponent. Non-finite or negative numbers do not occur here; they would print in
/// Rust's format.
fn three_digits(value: f64) -> String {
    if value >= 99.95 {
        format!("{value:.0}")
    } else if value >= 9.995 {
        format!("{value:.1}")
    } else {
        format!("{value:.2}")
    }
}

/// Nanoseconds as `812 ns`, `45.2 µs`, `1.20 ms` or `3.10 s`.
#[must_use]
pub fn duration(nanoseconds: f64) -> String {
    let sign = if nanoseconds < 0.0 { "−" } else { "" };
    let ns = nanoseconds.abs();
    let (value, unit) = if ns < 999.5 {
        return format!("{sign}{ns:.0} ns");
    } else if ns < 999.5e3 {
        (ns / 1e3, "µs")
    } else if ns < 999.5e6 {
        (ns / 1e6, "ms")
    } else {
        (ns / 1e9, "s")
    };
    format!("{sign}{} {unit}", three_digits(value))
}

/// A difference of nanoseconds with its sign: `+38.2 µs`, `−1.20 ms`.
#[must_use]
pub fn signed_duration(nanoseconds: f64) -> String {
    let plus = if nanoseconds >= 0.0 { "+" } else { "" };
    format!("{plus}{}", duration(nanoseconds))
}

/// A rate or a count as `622`, `24.1k`, `1.52M`.
#[must_use]
pub fn count(value: f64) -> String {
    if value < 999.5 {
        if value >= 99.95 { format!("{value:.0}") } else { trim_zeroes(&three_digits(value)) }
    } else if value < 999.5e3 {
        format!("{}k", three_digits(value / 1e3))
    } else {
        format!("{}M", three_digits(value / 1e6))
    }
}

/// An exact rate, with commas: `17,788`. For numbers that readers compare with recorded ones.
#[must_use]
pub fn whole(value: f64) -> String {
    let digits = format!("{value:.0}");
    let (sign, digits) = digits.strip_prefix('-').map_or(("", digits.as_str()), |digits| ("−", digits));
    if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return format!("{sign}{digits}");
    }
    let groups: Vec<&str> = digits
        .as_bytes()
        .rchunks(3)
        .rev()
        .map(|group| std::str::from_utf8(group).expect("digits are ASCII"))
        .collect();
    format!("{sign}{}", groups.join(","))
}

/// MiB per second with three significant digits.
#[must_use]
pub fn throughput(mib_per_s: f64) -> String {
    three_digits(mib_per_s)
}

/// A factor: `×4.2`, `×0.31`, `×120`.
#[must_use]
pub fn factor(value: f64) -> String {
    if value >= 99.5 {
        format!("×{value:.0}")
    } else if value >= 9.95 {
        format!("×{value:.1}")
    } else {
        format!("×{value:.2}")
    }
}

/// A share as a whole percentage, with one decimal below 1 %.
#[must_use]
pub fn percent(share: f64) -> String {
    let percent = share * 100.0;
    if percent.abs() < 0.95 && percent != 0.0 { format!("{percent:.1} %") } else { format!("{percent:.0} %") }
}

/// A block size in the field's way: `512`, `4K`, `256K`, `1M`.
#[must_use]
pub fn block_size(bytes: u32) -> String {
    if bytes >= 1 << 20 && bytes.is_multiple_of(1 << 20) {
        format!("{}M", bytes >> 20)
    } else if bytes >= 1 << 10 && bytes.is_multiple_of(1 << 10) {
        format!("{}K", bytes >> 10)
    } else {
        bytes.to_string()
    }
}

/// Bytes of memory in GiB with one decimal.
#[must_use]
pub fn gibibytes(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

fn trim_zeroes(number: &str) -> String {
    if number.contains('.') {
        number.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        number.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_keep_three_digits_over_the_edges_of_units() {
        let cases = [
            (812.4, "812 ns"),
            (999.6, "1.00 µs"),
            (9_994.0, "9.99 µs"),
            (9_996.0, "10.0 µs"),
            (45_230.0, "45.2 µs"),
            (999_600.0, "1.00 ms"),
            (1.2e6, "1.20 ms"),
            (3.1e9, "3.10 s"),
            (2.5e11, "250 s"),
            (-1500.0, "−1.50 µs"),
        ];
        for (ns, text) in cases {
            assert_eq!(duration(ns), text);
        }
        assert_eq!(signed_duration(38_200.0), "+38.2 µs");
        assert_eq!(signed_duration(-38_200.0), "−38.2 µs");
    }

    #[test]
    fn counts_factors_and_sizes() {
        assert_eq!(count(622.0), "622");
        assert_eq!(count(1.0), "1");
        assert_eq!(count(24_130.0), "24.1k");
        assert_eq!(count(999_600.0), "1.00M");
        assert_eq!(whole(17_788.0), "17,788");
        assert_eq!(whole(359.4), "359");
        assert_eq!(whole(-1e6), "−1,000,000");
        assert_eq!(whole(f64::INFINITY), "inf");
        assert_eq!(factor(0.312), "×0.31");
        assert_eq!(factor(120.4), "×120");
        assert_eq!(percent(0.315), "32 %");
        assert_eq!(percent(0.021), "2 %");
        assert_eq!(percent(0.0042), "0.4 %");
        assert_eq!(block_size(512), "512");
        assert_eq!(block_size(1 << 20), "1M");
        assert_eq!(block_size(5 << 9), "2560");
    }
}

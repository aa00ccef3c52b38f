//! A chart with its title, and the short labels that all charts use.

/// One drawing with its title.
#[derive(Debug)]
pub struct Panel {
    /// The title.
    pub title: String,
    /// A complete `svg` element.
    pub svg: String,
}

/// A name truncated to this many characters, so that it leaves room for the text beside it.
#[must_use]
pub fn clipped(name: &str, longest: usize) -> String {
    if name.chars().count() <= longest {
        return name.to_owned();
    }
    name.chars().take(longest.saturating_sub(1)).chain(['…']).collect()
}

/// A round number of nanoseconds without insignificant digits: `0`, `50 µs`, `2.5 ms`.
#[must_use]
pub fn tick_duration(nanoseconds: f64) -> String {
    let (value, unit) = match nanoseconds {
        ns if ns <= 0.0 => return "0".to_owned(),
        ns if ns < 999.5 => (ns, "ns"),
        ns if ns < 999.5e3 => (ns / 1e3, "µs"),
        ns if ns < 999.5e6 => (ns / 1e6, "ms"),
        ns => (ns / 1e9, "s"),
    };
    format!("{} {unit}", (value * 100.0).round() / 100.0)
}

/// A round rate in the same way: `0`, `50k`, `2.5M`.
#[must_use]
pub fn tick_count(rate: f64) -> String {
    let (value, unit) = match rate {
        rate if rate < 999.5 => (rate, ""),
        rate if rate < 999.5e3 => (rate / 1e3, "k"),
        rate => (rate / 1e6, "M"),
    };
    format!("{}{unit}", (value * 100.0).round() / 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_leave_room_for_the_numbers() {
        assert_eq!(clipped("accel write-back+1", 28), "accel write-back+1");
        assert_eq!(clipped("größer als alles", 8), "größer …");
    }

    #[test]
    fn ticks_are_short() {
        assert_eq!(tick_duration(0.0), "0");
        assert_eq!(tick_duration(50e3), "50 µs");
        assert_eq!(tick_duration(2.5e6), "2.5 ms");
        assert_eq!(tick_duration(1e6), "1 ms");
        assert_eq!(tick_count(50e3), "50k");
        assert_eq!(tick_count(2.5e6), "2.5M");
        assert_eq!(tick_count(0.0), "0");
    }
}

//! Whether a row can be true at all.
//!
//! A row that fails is kept, shown with its reason, and no finding rests on it. The checks need nothing
//! but the row: the mean number in flight is rate times mean latency (Little 1961), and a rate times a
//! size is a throughput.

use crate::cell::Cell;
use crate::result::Measurement;

/// The mean number in flight may exceed the queue depth by this share, for rounding, and by the part that
/// I/Os which straddle the ends of the measured time can have in it.
pub const MOST_ABOVE_DEPTH: f64 = 0.05;

/// The mean number in flight may stay below the queue depth by this share: the time between an answer and
/// the next request. Beyond it the row says more about the load generator than about the layer.
pub const MOST_BELOW_DEPTH: f64 = 0.20;

/// Agreement that is asked of two ways to the same rate.
pub const RATE_TOLERANCE: f64 = 0.02;

/// A row of fewer I/Os has no 99th percentile.
pub const FEWEST_IOS: u64 = 100;

impl Measurement {
    /// Whether every number is one that JSON and arithmetic can handle.
    #[must_use]
    pub fn is_finite(&self) -> bool {
        let numbers = [
            self.iops,
            self.mib_per_s,
            self.mean_ns,
            self.p50_ns,
            self.p99_ns,
            self.p99_9_ns,
            self.cpu_seconds.unwrap_or(0.0),
            self.runtime_seconds,
        ];
        numbers.iter().all(|number| number.is_finite())
    }

    /// The mean number of I/Os in flight, by Little's law: IOPS times mean latency.
    #[must_use]
    pub fn in_flight(&self) -> f64 {
        self.iops * self.mean_ns / 1e9
    }
}

/// Why the row cannot be used, in words for the report; `None` when it can.
#[must_use]
pub fn objection(cell: &Cell, row: &Measurement) -> Option<String> {
    possible(row)
        .or_else(|| enough(row))
        .or_else(|| rates_agree(cell, row))
        .or_else(|| littles_law(f64::from(cell.queue_depth), row))
}

fn possible(row: &Measurement) -> Option<String> {
    let positive = [row.iops, row.mib_per_s, row.mean_ns, row.p50_ns, row.runtime_seconds];
    if !row.is_finite()
        || positive.iter().any(|&number| number <= 0.0)
        || row.cpu_seconds.is_some_and(|seconds| seconds < 0.0)
    {
        return Some("a rate, a latency or a time is not a positive number".to_owned());
    }
    if row.p50_ns > row.p99_ns || row.p99_ns > row.p99_9_ns {
        return Some("the percentiles are not in order".to_owned());
    }
    None
}

fn enough(row: &Measurement) -> Option<String> {
    if row.errors > 0 {
        return Some(format!("{} I/Os failed", row.errors));
    }
    if row.ios < FEWEST_IOS {
        return Some(format!("only {} I/Os: fewer than {FEWEST_IOS} have no 99th percentile", row.ios));
    }
    None
}

fn rates_agree(cell: &Cell, row: &Measurement) -> Option<String> {
    let apart = |a: f64, b: f64| (a - b).abs() > RATE_TOLERANCE * a.max(b);
    let block = f64::from(cell.shape.block_bytes);
    let reported = row.mib_per_s * f64::from(1 << 20);
    let pairs = [
        ("IOPS x block size", row.iops * block, "throughput", reported),
        ("bytes / time", row.bytes as f64 / row.runtime_seconds, "throughput", reported),
        ("I/Os / time", row.ios as f64 / row.runtime_seconds, "IOPS", row.iops),
    ];
    let (left, a, right, b) = pairs.into_iter().find(|&(_, a, _, b)| apart(a, b))?;
    Some(format!("{left} and {right} disagree: {a:.0} and {b:.0} per second"))
}

fn littles_law(depth: f64, row: &Measurement) -> Option<String> {
    let in_flight = row.in_flight();
    // An I/O that began before the measured time counts with its whole latency, and the queue runs empty at
    // the end: up to a queue's worth of the longest latency on either side, which stalls can make much longer
    // than the mean. Nothing in a run that is long enough.
    let straddling = row.p99_9_ns / 1e9 / row.runtime_seconds;
    if in_flight > depth * (1.0 + MOST_ABOVE_DEPTH + straddling) {
        return Some(format!("Little's law: {in_flight:.2} in flight at QD {depth} is not possible"));
    }
    if in_flight < depth * (1.0 - MOST_BELOW_DEPTH - straddling) {
        return Some(format!(
            "Little's law: {in_flight:.2} in flight at QD {depth}; the generator did not keep the queue full"
        ));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::measurement;

    fn cell(depth: u32) -> Cell {
        Cell { queue_depth: depth, ..Cell::standard()[2] }
    }

    fn why(depth: u32, change: impl FnOnce(&mut Measurement)) -> String {
        let mut row = measurement(&cell(depth), 100e3);
        change(&mut row);
        objection(&cell(depth), &row).unwrap_or_default()
    }

    #[test]
    fn a_sound_row_passes_at_any_depth() {
        for depth in [1, 32, 256] {
            assert_eq!(why(depth, |_| ()), "");
        }
    }

    #[test]
    fn littles_law_catches_both_sides() {
        assert!(why(32, |row| row.mean_ns *= 1.06).contains("not possible"));
        assert_eq!(why(32, |row| row.mean_ns *= 1.04), "");
        assert!(why(1, |row| row.mean_ns *= 0.79).contains("did not keep the queue full"));
        assert_eq!(why(1, |row| row.mean_ns *= 0.81), "");
    }

    #[test]
    fn ios_that_straddle_the_ends_of_a_short_run_are_allowed_for() {
        // Ten seconds of I/Os that take up to one: a tenth of the queue may come from before.
        let mut row = measurement(&cell(32), 100e6);
        row.p99_9_ns = 1e9;
        row.mean_ns *= 1.12;
        assert_eq!(objection(&cell(32), &row), None);
        row.mean_ns *= 1.12;
        assert!(objection(&cell(32), &row).unwrap().contains("not possible"));
    }

    #[test]
    fn rates_must_agree() {
        assert!(why(1, |row| row.mib_per_s *= 1.03).contains("IOPS x block size"));
        assert!(why(1, |row| row.bytes /= 2).contains("bytes / time"));
        assert!(why(1, |row| row.ios /= 2).contains("I/Os / time"));
        assert_eq!(why(1, |row| row.mib_per_s *= 1.01), "");
    }

    #[test]
    fn errors_few_ios_and_nonsense_are_objected_to() {
        assert_eq!(why(1, |row| row.errors = 3), "3 I/Os failed");
        assert!(why(1, |row| row.ios = 99).contains("only 99"));
        assert!(why(1, |row| row.p50_ns = row.p99_ns + 1.0).contains("order"));
        for number in [f64::NAN, f64::INFINITY, 0.0, -1.0] {
            assert!(why(1, |row| row.iops = number).contains("not a positive number"), "{number}");
        }
    }
}

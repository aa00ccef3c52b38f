//! Whether a row can be true at all.
//!
//! A row that fails is kept, shown with its reason, and no finding rests on it. The checks need nothing but the row: the mean
//! number in flight is rate times mean latency (Little 1961), and a rate times a size is a throughput. They hold for our own
//! rows and for imported ones alike; a figure that a row lacks is not checked.

use serde::Serialize;

use crate::cell::Cell;
use crate::result::Measurement;
use weir_report::format;

/// The mean number in flight may exceed the queue depth by this share, for rounding, and by the part that
/// I/Os which straddle the ends of the measured time can have in it.
pub const MOST_ABOVE_DEPTH: f64 = 0.05;

/// The mean number in flight may stay below the queue depth by this share: the time between an answer and
/// the next request. Beyond it the row says more about the load generator than about the layer.
pub const MOST_BELOW_DEPTH: f64 = 0.20;

/// Required agreement of two ways to compute the same rate.
pub const RATE_TOLERANCE: f64 = 0.02;

/// A row of fewer I/Os has no 99th percentile.
pub const FEWEST_IOS: u64 = 100;

/// Slips that are common when numbers are copied: one number is too large by a factor.
const SLIPS: [(f64, &str); 6] = [
    (10.0, "a digit too many"),
    (100.0, "two digits too many"),
    (1000.0, "a factor of a thousand"),
    (1024.0, "KiB for MiB"),
    (8.0, "bits for bytes"),
    (1.048_576, "10^6 bytes for 2^20"),
];

/// The check that a row fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A number is not finite, or not positive where it must be.
    NotPositive,
    /// Percentiles are not in order.
    Percentiles,
    /// I/Os failed.
    Errors,
    /// Fewer than [`FEWEST_IOS`].
    TooFew,
    /// Size × rate and throughput disagree.
    Rates,
    /// More in flight than the queue depth allows.
    TooManyInFlight,
    /// Fewer in flight than the queue depth: the generator did not keep the queue full.
    GeneratorIdle,
}

/// Why a row cannot be used.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Objection {
    /// The failed check.
    pub kind: Kind,
    /// In words for the report.
    pub reason: String,
    /// IOPS with which the row would agree with itself, when one slip explains it. Proposed, never used.
    pub proposed_iops: Option<f64>,
}

impl Objection {
    fn new(kind: Kind, reason: String) -> Objection {
        Objection { kind, reason, proposed_iops: None }
    }
}

impl Measurement {
    /// Whether every number is one that JSON and arithmetic can handle.
    #[must_use]
    pub fn is_finite(&self) -> bool {
        let known = [
            Some(self.iops),
            Some(self.mib_per_s_step),
            self.mib_per_s,
            self.mean_ns,
            self.p50_ns,
            self.p99_ns,
            self.p99_9_ns,
            self.max_ns,
            self.cpu_seconds,
            self.runtime_seconds,
        ];
        known.into_iter().flatten().all(f64::is_finite)
    }

    /// The mean number of I/Os in flight, by Little's law: IOPS times mean latency.
    #[must_use]
    pub fn in_flight(&self) -> Option<f64> {
        Some(self.iops * self.mean_ns? / 1e9)
    }
}

/// Why the row cannot be used; `None` when it can.
#[must_use]
pub fn objection(cell: &Cell, row: &Measurement) -> Option<Objection> {
    possible(row)
        .or_else(|| enough(row))
        .or_else(|| size_times_rate(cell, row))
        .or_else(|| rates_agree(row))
        .or_else(|| littles_law(f64::from(cell.queue_depth), row))
}

fn possible(row: &Measurement) -> Option<Objection> {
    let positive = [
        Some(row.iops),
        row.mib_per_s,
        row.mean_ns,
        row.p50_ns,
        row.p99_ns,
        row.p99_9_ns,
        row.max_ns,
        row.runtime_seconds,
    ];
    if !row.is_finite()
        || positive.into_iter().flatten().any(|number| number <= 0.0)
        || row.cpu_seconds.is_some_and(|seconds| seconds < 0.0)
    {
        let reason = "a rate, a latency or a time is not a positive number".to_owned();
        return Some(Objection::new(Kind::NotPositive, reason));
    }
    let percentiles: Vec<f64> =
        [row.p50_ns, row.p99_ns, row.p99_9_ns, row.max_ns].into_iter().flatten().collect();
    if !percentiles.is_sorted() {
        return Some(Objection::new(Kind::Percentiles, "the percentiles are not in order".to_owned()));
    }
    None
}

fn enough(row: &Measurement) -> Option<Objection> {
    if row.errors > 0 {
        return Some(Objection::new(Kind::Errors, format!("{} I/Os failed", row.errors)));
    }
    let ios = row.ios.filter(|ios| *ios < FEWEST_IOS)?;
    let reason = format!("only {ios} I/Os: fewer than {FEWEST_IOS} have no 99th percentile");
    Some(Objection::new(Kind::TooFew, reason))
}

/// Whether two numbers are the same up to the tolerance and an absolute rounding.
fn apart(a: f64, b: f64, rounding: f64) -> bool {
    (a - b).abs() > RATE_TOLERANCE * a.max(b) + rounding
}

fn size_times_rate(cell: &Cell, row: &Measurement) -> Option<Objection> {
    let mib = f64::from(cell.shape.block_bytes) / f64::from(1 << 20);
    let (product, given) = (row.iops * mib, row.mib_per_s?);
    if !apart(product, given, row.mib_per_s_step) {
        return None;
    }
    let says = format!(
        "size × rate: {} IOPS of {} are {} MiB/s, but {} MiB/s are given",
        format::whole(row.iops),
        format::block_size(cell.shape.block_bytes),
        format::throughput(product),
        format::throughput(given)
    );
    let slip = |(factor, name): (f64, &'static str)| {
        let iops = row.iops / factor;
        (!apart(iops * mib, given, row.mib_per_s_step)).then_some((iops, name))
    };
    let Some((iops, name)) = SLIPS.into_iter().find_map(slip) else {
        let fitting = format::whole(given / mib);
        return Some(Objection::new(Kind::Rates, format!("{says}, which would be {fitting} IOPS")));
    };
    let reason = format!("{says}; {} IOPS would agree ({name})", format::whole(iops));
    Some(Objection { kind: Kind::Rates, reason, proposed_iops: Some(iops) })
}

fn rates_agree(row: &Measurement) -> Option<Objection> {
    let seconds = row.runtime_seconds?;
    let throughput = row.mib_per_s.map(|rate| rate * f64::from(1 << 20));
    let pairs = [
        ("bytes / time", row.bytes.map(|bytes| bytes as f64), "throughput", throughput),
        ("I/Os / time", row.ios.map(|ios| ios as f64), "IOPS", Some(row.iops)),
    ];
    let disagree = |(left, count, right, rate): (_, Option<f64>, _, Option<f64>)| {
        let (measured, given) = (count? / seconds, rate?);
        let reason = || format!("{left} and {right} disagree: {measured:.0} and {given:.0} per second");
        apart(measured, given, 0.0).then(reason)
    };
    pairs.into_iter().find_map(disagree).map(|reason| Objection::new(Kind::Rates, reason))
}

fn littles_law(depth: f64, row: &Measurement) -> Option<Objection> {
    let in_flight = row.in_flight()?;
    // An I/O that began before the measured time counts with its whole latency, and the queue runs empty at the end:
    // up to a queue's worth of the longest latency on either side. Nothing in a run that is long enough.
    let straddling = match (row.max_ns, row.runtime_seconds) {
        (Some(longest), Some(seconds)) => longest / 1e9 / seconds,
        _ => 0.0,
    };
    if in_flight > depth * (1.0 + MOST_ABOVE_DEPTH + straddling) {
        let reason = format!("Little's law: {in_flight:.2} in flight at QD {depth} is not possible");
        return Some(Objection::new(Kind::TooManyInFlight, reason));
    }
    if in_flight < depth * (1.0 - MOST_BELOW_DEPTH - straddling) {
        let reason = format!(
            "Little's law: {in_flight:.2} in flight at QD {depth}; the generator did not keep the queue full"
        );
        return Some(Objection::new(Kind::GeneratorIdle, reason));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cell::{Direction, Pattern, Shape};
    use crate::sample::measurement;
    use proptest::prelude::*;

    fn cell(depth: u32) -> Cell {
        Shape::new(4096, Pattern::Random, Direction::Read).at(depth)
    }

    fn why(depth: u32, change: impl FnOnce(&mut Measurement)) -> String {
        let mut row = measurement(&cell(depth), 100e3);
        change(&mut row);
        objection(&cell(depth), &row).map_or_else(String::new, |objection| objection.reason)
    }

    fn times(number: &mut Option<f64>, factor: f64) {
        *number = number.map(|number| number * factor);
    }

    #[test]
    fn a_sound_row_passes_at_any_depth() {
        for depth in [1, 32, 256] {
            assert_eq!(why(depth, |_| ()), "");
        }
    }

    #[test]
    fn a_row_that_says_little_is_not_asked_for_more() {
        let bare = Measurement { iops: 359.0, ..Measurement::default() };
        assert_eq!(objection(&cell(8), &bare), None);
    }

    #[test]
    fn littles_law_catches_both_sides() {
        assert!(why(32, |row| times(&mut row.mean_ns, 1.06)).contains("not possible"));
        assert_eq!(why(32, |row| times(&mut row.mean_ns, 1.04)), "");
        assert!(why(1, |row| times(&mut row.mean_ns, 0.79)).contains("did not keep the queue full"));
        assert_eq!(why(1, |row| times(&mut row.mean_ns, 0.81)), "");
    }

    #[test]
    fn ios_that_straddle_the_ends_of_a_short_run_are_allowed_for() {
        // Ten seconds of I/Os that take up to one: a tenth of the queue may come from before.
        let mut row = measurement(&cell(32), 100e6);
        row.max_ns = Some(1e9);
        times(&mut row.mean_ns, 1.12);
        assert_eq!(objection(&cell(32), &row), None);
        times(&mut row.mean_ns, 1.12);
        assert_eq!(objection(&cell(32), &row).unwrap().kind, Kind::TooManyInFlight);
    }

    #[test]
    fn rates_must_agree() {
        assert!(why(1, |row| times(&mut row.mib_per_s, 1.03)).contains("size × rate"));
        assert!(why(1, |row| row.bytes = row.bytes.map(|bytes| bytes / 2)).contains("bytes / time"));
        assert!(why(1, |row| row.ios = row.ios.map(|ios| ios / 2)).contains("I/Os / time"));
        assert_eq!(why(1, |row| times(&mut row.mib_per_s, 1.01)), "");
    }

    #[test]
    fn a_slip_is_recognised_and_the_number_that_would_agree_is_proposed() {
        let proposed = |iops: f64, mib_per_s: f64, step: f64| {
            let row = Measurement {
                iops,
                mib_per_s: Some(mib_per_s),
                mib_per_s_step: step,
                ..Measurement::default()
            };
            let objection = objection(&cell(8), &row);
            objection.map(|objection| (objection.proposed_iops, objection.reason))
        };
        // 25600 × 4 KiB are 100 MiB/s.
        assert_eq!(proposed(25_600.0, 100.0, 1.0), None);
        let (iops, reason) = proposed(256_000.0, 100.0, 1.0).unwrap();
        assert_eq!(iops, Some(25_600.0));
        assert!(reason.contains("256,000 IOPS of 4K") && reason.contains("a digit too many"), "{reason}");
        assert_eq!(proposed(25_600.0 * 1.048_576, 100.0, 0.0).unwrap().0.map(f64::round), Some(25_600.0));
        let (none, reason) = proposed(77_000.0, 100.0, 1.0).unwrap();
        assert_eq!(none, None);
        assert!(reason.ends_with("which would be 25,600 IOPS"), "{reason}");
        // 359 × 4 KiB are 1.4 MiB/s: "1" is that, cut to whole MiB/s.
        assert_eq!(proposed(359.0, 1.0, 1.0), None);
        assert!(proposed(359.0, 1.0, 0.0).is_some());
    }

    #[test]
    fn errors_few_ios_and_nonsense_are_objected_to() {
        assert_eq!(why(1, |row| row.errors = 3), "3 I/Os failed");
        assert!(why(1, |row| row.ios = Some(99)).contains("only 99"));
        assert!(why(1, |row| row.p50_ns = row.p99_ns.map(|ns| ns + 1.0)).contains("order"));
        for number in [f64::NAN, f64::INFINITY, 0.0, -1.0] {
            assert!(why(1, |row| row.iops = number).contains("not a positive number"), "{number}");
        }
    }

    proptest! {
        /// A row that agrees with itself passes; the same row with a digit too many is rejected, and the number
        /// before the slip is proposed.
        #[test]
        fn a_digit_too_many_is_always_found(iops in 10.0..1e7_f64, kib in 1..1024_u32, rounded in any::<bool>()) {
            let cell = Shape::new(kib << 10, Pattern::Random, Direction::Read).at(8);
            let mib = iops * f64::from(kib) / 1024.0;
            // Cut to whole MiB/s, as programs print it, where that leaves a number worth the name.
            let (given, step) = if rounded && mib > 100.0 { (mib.floor(), 1.0) } else { (mib, 0.0) };
            let row = Measurement { iops, mib_per_s: Some(given), mib_per_s_step: step, ..Measurement::default() };
            prop_assert_eq!(objection(&cell, &row), None);
            let slipped = Measurement { iops: iops * 10.0, ..row.clone() };
            let objection = objection(&cell, &slipped).unwrap();
            prop_assert_eq!(objection.kind, Kind::Rates);
            prop_assert!((objection.proposed_iops.unwrap() / iops - 1.0).abs() < 1e-9);
        }

        /// Any closed loop obeys Little's law, whatever its depth and latency; one that claims twice its depth does not.
        #[test]
        fn closed_loops_pass_and_impossible_ones_do_not(depth in 1..4096_u32, latency_ns in 1e3..1e8_f64) {
            let row = measurement(&cell(depth), latency_ns);
            prop_assume!(row.ios.unwrap() >= FEWEST_IOS);
            let found = objection(&cell(depth), &row);
            prop_assert_eq!(found, None);
            let doubled = Measurement { mean_ns: row.mean_ns.map(|ns| ns * 2.0), ..row };
            prop_assert_eq!(objection(&cell(depth), &doubled).unwrap().kind, Kind::TooManyInFlight);
        }
    }
}

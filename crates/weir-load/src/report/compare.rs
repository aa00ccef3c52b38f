//! Comparison of two results: differences, and figures that cannot be compared.

use serde::Serialize;

use crate::summary::{KindSummary, Summary};
use crate::tally::IoKind;

/// Differences up to this many percent count as equal: single runs are not more repeatable.
pub const MARGIN_PERCENT: f64 = 5.0;

/// Fewest requests beyond a percentile that make it significant.
const FEWEST_BEYOND: f64 = 10.0;

/// The classification of a difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// Within [`MARGIN_PERCENT`].
    Same,
    /// The second is better.
    Better,
    /// The second is worse.
    Worse,
    /// Too few requests lie beyond this percentile to compare it, or there is nothing to compare.
    Unknown,
}

/// One figure of both.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Read or write.
    pub kind: IoKind,
    /// `iops`, `mib_per_second`, `mean_ns`, `p50_ns` …
    pub figure: &'static str,
    /// Of the first result.
    pub a: f64,
    /// Of the second one.
    pub b: f64,
    /// From the first to the second, in percent of the first; `None` when that is zero.
    pub percent: Option<f64>,
    /// Its classification.
    pub change: Change,
}

/// Two results of one job.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Other differences between the runs: fields of the workload, and each run's end.
    pub differences: Vec<String>,
    /// Figure by figure.
    pub rows: Vec<Row>,
}

/// Compares two results of one run each. This has no confidence interval: see `weir diagnose` for one.
#[must_use]
pub fn compare(a: &Summary, b: &Summary) -> Comparison {
    let kinds = IoKind::ALL.into_iter().filter_map(|kind| Some((a.kind(kind)?, b.kind(kind)?)));
    Comparison { differences: differences(a, b), rows: kinds.flat_map(|(a, b)| rows(a, b)).collect() }
}

fn rows(a: &KindSummary, b: &KindSummary) -> Vec<Row> {
    let (first, second) = (&a.latency_ns, &b.latency_ns);
    let figures = [
        ("iops", a.iops, b.iops, 0.0),
        ("mib_per_second", a.mib_per_second, b.mib_per_second, 0.0),
        ("mean_ns", first.mean, second.mean, 0.0),
        ("p50_ns", first.p50 as f64, second.p50 as f64, 50.0),
        ("p90_ns", first.p90 as f64, second.p90 as f64, 90.0),
        ("p99_ns", first.p99 as f64, second.p99 as f64, 99.0),
        ("p99_9_ns", first.p99_9 as f64, second.p99_9 as f64, 99.9),
        ("p99_999_ns", first.p99_999 as f64, second.p99_999 as f64, 99.999),
    ];
    let (kind, fewest) = (a.kind, a.ios.min(b.ios) as f64);
    let row = |(figure, a, b, percentile): (&'static str, f64, f64, f64)| {
        let percent = (a > 0.0).then(|| (b - a) / a * 100.0);
        let more_is_better = matches!(figure, "iops" | "mib_per_second");
        let change = match percent {
            _ if fewest * (100.0 - percentile) / 100.0 < FEWEST_BEYOND => Change::Unknown,
            None => Change::Unknown,
            Some(percent) if percent.abs() <= MARGIN_PERCENT => Change::Same,
            Some(percent) if (percent > 0.0) == more_is_better => Change::Better,
            Some(_) => Change::Worse,
        };
        Row { kind, figure, a, b, percent, change }
    };
    figures.into_iter().map(row).collect()
}

fn differences(a: &Summary, b: &Summary) -> Vec<String> {
    let fields = |summary: &Summary| match serde_json::to_value(&summary.workload) {
        Ok(serde_json::Value::Object(fields)) => fields,
        _ => serde_json::Map::new(),
    };
    let (first, second) = (fields(a), fields(b));
    let mut found: Vec<String> = first
        .iter()
        .filter(|(name, value)| second.get(*name) != Some(value))
        .map(|(name, value)| {
            format!("{name}: {value} and {}", second.get(name).unwrap_or(&serde_json::Value::Null))
        })
        .collect();
    for (name, first, second) in [("target", &a.target, &b.target), ("engine", &a.engine, &b.engine)] {
        if first != second {
            found.push(format!("{name}: {first} and {second}"));
        }
    }
    for (which, summary) in [("first", a), ("second", b)] {
        if let Some(reason) = &summary.incomplete {
            found.push(format!("the {which} is incomplete: {reason}"));
        }
        if summary.errors() > 0 {
            found.push(format!("the {which} has {} failed requests", summary.errors()));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::summary;

    #[test]
    fn better_worse_and_what_cannot_be_said() {
        let comparison = compare(&summary(1), &summary(2));
        let of = |figure| comparison.rows.iter().find(|row| row.figure == figure).unwrap();
        // The second took twice as long: half the requests per second, twice the latency.
        assert_eq!((of("iops").change, of("p50_ns").change), (Change::Worse, Change::Worse));
        assert_eq!(of("iops").percent, Some(-50.0));
        assert_eq!(of("p99_999_ns").change, Change::Unknown, "of 1000 requests");
        assert_eq!(comparison.rows.len(), 16);
        assert!(compare(&summary(2), &summary(1)).rows.iter().any(|row| row.change == Change::Better));
        let same = compare(&summary(1), &summary(1));
        assert!(same.differences.is_empty());
        assert!(same.rows.iter().all(|row| matches!(row.change, Change::Same | Change::Unknown)));
    }

    #[test]
    fn what_was_not_alike_is_named() {
        let (a, mut b) = (summary(1), summary(1));
        b.workload.queue_depth = 8;
        b.target = "other".into();
        b.incomplete = Some("stopped".into());
        let found = compare(&a, &b).differences.join("\n");
        for word in ["queue_depth: 32 and 8", "other", "second is incomplete: stopped"] {
            assert!(found.contains(word), "{word} is not in {found}");
        }
    }
}

//! Comparison of two profiles: the original and its replay.

use serde::Serialize;

use super::record::{Class, Direction, Profile};

/// Cache sizes at which hits are compared, as divisors of the original's working set.
const CACHES: [u64; 4] = [16, 4, 2, 1];

/// One figure of both.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Its name, with its unit.
    pub name: String,
    /// The original's value.
    pub original: f64,
    /// The replay's value.
    pub replay: f64,
    /// Difference of the replay, in percent of the original; for figures that are percentages, and for the size
    /// histogram, in points. `None` when the original has none.
    pub difference: Option<f64>,
}

/// All figures, those of [`Row::name`] in the order in which they are shown.
#[must_use]
pub fn compare(original: &Profile, replay: &Profile) -> Vec<Row> {
    let mut rows = Vec::new();
    let mut relative = |name: &str, of: &dyn Fn(&Profile) -> f64| {
        let (original, replay) = (of(original), of(replay));
        let difference = (original != 0.0).then(|| (replay / original - 1.0) * 100.0);
        rows.push(Row { name: name.to_owned(), original, replay, difference });
    };
    relative("IOPS", &|profile| profile.iops().unwrap_or(0.0));
    relative("MiB/s", &|profile| profile.summary().mib_per_second.unwrap_or(0.0));
    relative("mean read, bytes", &|profile| profile.summary().mean_bytes[0]);
    relative("mean write, bytes", &|profile| profile.summary().mean_bytes[1]);
    relative("working set, MiB", &|profile| profile.working_set.bytes / 1_048_576.0);
    let mut points = |name: String, of: &dyn Fn(&Profile) -> f64| {
        let (original, replay) = (of(original) * 100.0, of(replay) * 100.0);
        rows.push(Row { name, original, replay, difference: Some(replay - original) });
    };
    points("reads, %".into(), &Profile::read_share);
    points("sequential, %".into(), &|profile| profile.class_share(Class::Sequential));
    for divisor in CACHES {
        let cache = original.working_set.bytes as u64 / divisor;
        let name = match divisor {
            1 => "hits in a cache of the working set, %".to_owned(),
            _ => format!("hits in a cache of 1/{divisor} of it, %"),
        };
        points(name, &|profile| profile.hit_ratio(cache, None));
    }
    let log = 64 << 20;
    points("absorbed by a log of 64 MiB, %".into(), &|profile| profile.absorbed_by_bytes(log));
    for direction in Direction::ALL {
        let distance = size_distance(original, replay, direction);
        if let Some(distance) = distance {
            rows.push(Row {
                name: format!("{}s of another size, %", direction.name()),
                original: 0.0,
                replay: distance,
                difference: Some(distance),
            });
        }
    }
    rows
}

/// Percentage of the requests that would need another size for the histograms to be equal (total variation distance); `None` when
/// a side has no requests of that direction.
#[must_use]
pub fn size_distance(original: &Profile, replay: &Profile, direction: Direction) -> Option<f64> {
    let (mine, theirs) = (original.kind(direction).sizes(), replay.kind(direction).sizes());
    let (all_mine, all_theirs) = (mine.total(), theirs.total());
    if all_mine == 0.0 || all_theirs == 0.0 {
        return None;
    }
    let mut shares = std::collections::BTreeMap::new();
    for (size, count) in mine.0 {
        *shares.entry(size).or_insert(0.0) += count / all_mine;
    }
    for (size, count) in theirs.0 {
        *shares.entry(size).or_insert(0.0) -= count / all_theirs;
    }
    Some(shares.values().map(|share: &f64| share.abs()).sum::<f64>() * 50.0)
}

//! Weir against a peer: two medians, their ratio, and the target ratio.

use serde::Serialize;

use crate::row::{Metric, Row};

/// One line of the results.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Cell and metric: `nbd unix randread 4k qd32 iops`.
    pub name: String,
    /// Weir's median.
    pub value: f64,
    /// Unit of `value` and `peer_value`.
    pub unit: &'static str,
    /// The peer's name.
    pub peer: String,
    /// The peer's median.
    pub peer_value: f64,
    /// One median over the other; above 1 means that Weir is better, for latencies too.
    pub ratio: f64,
    /// Number of rounds; the smaller one of the two rows.
    pub n: usize,
    /// The driver of Weir's load.
    pub driver: &'static str,
    /// The driver of the peer's load.
    pub peer_driver: &'static str,
    /// The target ratio, if there is one.
    pub target_ratio: Option<f64>,
    /// Whether the ratio reaches the target.
    pub target_met: Option<bool>,
    /// The measured configuration of Weir: `weir`, or one of several.
    pub subject: String,
    /// The cell, for the table.
    #[serde(skip)]
    pub cell: String,
    /// The figure, for the table.
    #[serde(skip)]
    pub metric: Metric,
}

impl Comparison {
    /// Compares two rows of a cell. `None` when a figure is missing (a server too short for the CPU clock).
    pub fn of(cell: &str, metric: Metric, ours: &Row, theirs: &Row) -> Option<Comparison> {
        let (value, peer_value) = (ours.median(metric)?, theirs.median(metric)?);
        Some(Comparison {
            name: format!("{cell} {}", metric.name()),
            value,
            unit: metric.unit(),
            peer: theirs.subject.clone(),
            peer_value,
            ratio: metric.ratio(value, peer_value),
            n: ours.samples.len().min(theirs.samples.len()),
            driver: ours.driver,
            peer_driver: theirs.driver,
            target_ratio: None,
            target_met: None,
            subject: ours.subject.clone(),
            cell: cell.into(),
            metric,
        })
    }

    /// Sets the target ratio.
    pub fn aiming_at(self, ratio: f64) -> Comparison {
        Comparison { target_ratio: Some(ratio), target_met: Some(self.ratio >= ratio), ..self }
    }

    /// Its text in the last line of the output if it misses its target.
    pub fn miss(&self) -> Option<String> {
        let target = self.target_ratio.filter(|_| self.target_met == Some(false))?;
        Some(format!("{} beside {}: {:.2} of {target:.2}", self.name, self.peer, self.ratio))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::row_of;

    #[test]
    fn above_one_means_better_for_latencies_too() {
        let ours = row_of("weir", "weir", &[(300.0, 1000.0), (100.0, 9000.0), (200.0, 1000.0)]);
        let theirs = row_of("peer", "fio", &[(100.0, 2000.0), (100.0, 2000.0), (100.0, 2000.0)]);
        let iops = Comparison::of("cell", Metric::Iops, &ours, &theirs).unwrap();
        assert_eq!((iops.value, iops.peer_value, iops.ratio, iops.n), (200.0, 100.0, 2.0, 3));
        assert_eq!((iops.name.as_str(), iops.driver, iops.peer_driver), ("cell iops", "weir", "fio"));
        let p50 = Comparison::of("cell", Metric::P50, &ours, &theirs).unwrap();
        assert_eq!((p50.value, p50.peer_value, p50.ratio), (1.0, 2.0, 2.0));
        let cpu = Comparison::of("cell", Metric::PerServerCpu, &ours, &theirs).unwrap();
        assert_eq!((cpu.value, cpu.ratio), (400.0, 2.0));
        let driver = Comparison::of("cell", Metric::PerDriverCpu, &ours, &theirs).unwrap();
        assert_eq!(driver.value, 400.0);
    }

    #[test]
    fn what_was_not_measured_is_not_compared() {
        let mut idle = row_of("idle", "weir", &[(100.0, 10.0)]);
        idle.samples[0].server_cpu = 0.0;
        let other = row_of("other", "weir", &[(100.0, 10.0)]);
        assert!(Comparison::of("cell", Metric::PerServerCpu, &idle, &other).is_none());
        assert!(Comparison::of("cell", Metric::Iops, &row_of("none", "weir", &[]), &other).is_none());
    }

    #[test]
    fn a_missed_target_is_said() {
        let ours = row_of("weir", "weir", &[(200.0, 1000.0)]);
        let theirs = row_of("bare echo", "-", &[(500.0, 2000.0)]);
        let compared = Comparison::of("nbd", Metric::Iops, &ours, &theirs).unwrap();
        assert_eq!(compared.clone().aiming_at(0.4).miss(), None, "as much as is aimed at is enough");
        let missed = compared.aiming_at(0.5);
        assert_eq!(missed.target_met, Some(false));
        assert_eq!(missed.miss().unwrap(), "nbd iops beside bare echo: 0.40 of 0.50");
    }

    #[test]
    fn the_file_has_the_agreed_fields() {
        let (ours, theirs) = (row_of("a", "weir", &[(2.0, 1.0)]), row_of("b", "fio", &[(1.0, 1.0)]));
        let entry = Comparison::of("c", Metric::Iops, &ours, &theirs).unwrap().aiming_at(3.0);
        let json = serde_json::to_value(vec![entry]).unwrap();
        let expected = serde_json::json!([{"name": "c iops", "value": 2.0, "unit": "1/s", "peer": "b",
            "peer_value": 1.0, "ratio": 2.0, "n": 1, "driver": "weir", "peer_driver": "fio",
            "target_ratio": 3.0, "target_met": false, "subject": "a"}]);
        assert_eq!(json, expected);
    }
}

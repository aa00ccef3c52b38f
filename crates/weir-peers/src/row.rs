//! Measurements: samples, rows of samples, and the criterion of a complete row.

use crate::driver::Figures;

/// Rounds of a row may differ by this factor, highest to lowest, before the suite adds rounds.
pub const STEADY: f64 = 1.5;
/// Maximum number of rounds added to an unsteady row.
pub const EXTRA_ROUNDS: usize = 3;

/// One measurement.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sample {
    /// The driver's figures.
    pub figures: Figures,
    /// CPU seconds of the server's processes for each second of load.
    pub server_cpu: f64,
    /// Steps of a neighbour's computation per second, if there is a neighbour.
    pub neighbour: Option<f64>,
    /// The fraction of the machine's processor time that its hypervisor stole, 0 to 1.
    pub steal: f64,
}

/// All measurements of one subject (such as a server) under one driver in one cell, in chronological order.
#[derive(Clone, Debug)]
pub struct Row {
    /// The subject: `weir`, `nbdkit memory`.
    pub subject: String,
    /// The driver: `weir`, `fio`, or `-` if the subject has its own.
    pub driver: &'static str,
    /// One for each round.
    pub samples: Vec<Sample>,
    /// Of these, the rounds added because the others differed.
    pub extra_rounds: usize,
    /// No other driver gives this subject better figures.
    pub best: bool,
}

/// One load and all measurements under it.
#[derive(Clone, Debug)]
pub struct Cell {
    /// `nbd unix randread 4k qd32`.
    pub name: String,
    /// Weir's rows, its peers' and the floor's.
    pub rows: Vec<Row>,
}

/// A compared figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    /// Requests per second.
    Iops,
    /// Requests for each CPU second of the server.
    PerServerCpu,
    /// Requests for each CPU second of the driver.
    PerDriverCpu,
    /// Median latency, in microseconds.
    P50,
    /// Steps of a neighbour's computation per second.
    Neighbour,
}

impl Metric {
    /// Its name at the end of a result's name.
    pub fn name(self) -> &'static str {
        match self {
            Metric::Iops => "iops",
            Metric::PerServerCpu => "iops-per-cpu-second",
            Metric::PerDriverCpu => "ios-per-cpu-second",
            Metric::P50 => "p50-latency",
            Metric::Neighbour => "neighbour-steps",
        }
    }

    /// The unit of the values.
    pub fn unit(self) -> &'static str {
        match self {
            Metric::Iops | Metric::Neighbour => "1/s",
            Metric::PerServerCpu | Metric::PerDriverCpu => "1/CPU s",
            Metric::P50 => "us",
        }
    }

    fn of(self, sample: &Sample) -> f64 {
        let figures = &sample.figures;
        match self {
            Metric::Iops => figures.iops,
            Metric::PerServerCpu => figures.iops / sample.server_cpu,
            Metric::PerDriverCpu => figures.iops * figures.seconds / figures.cpu,
            Metric::P50 => figures.p50 / 1e3,
            Metric::Neighbour => sample.neighbour.unwrap_or(f64::NAN),
        }
    }

    /// Ratio of `ours` to `theirs`: above 1 means that Weir is better, for latencies too.
    pub fn ratio(self, ours: f64, theirs: f64) -> f64 {
        match self {
            Metric::P50 => theirs / ours,
            _ => ours / theirs,
        }
    }
}

impl Row {
    /// The median of all rounds. `None` when nothing was measured, or too little for a CPU clock.
    pub fn median(&self, metric: Metric) -> Option<f64> {
        median(self.values(metric))
    }

    fn values(&self, metric: Metric) -> Vec<f64> {
        let values = self.samples.iter().map(|sample| metric.of(sample));
        values.filter(|value| value.is_finite() && *value > 0.0).collect()
    }

    /// The row's main metric: requests per second, or the neighbour's steps if there is a neighbour.
    pub fn main_metric(&self) -> Metric {
        let has_neighbour = self.samples.iter().any(|sample| sample.neighbour.is_some());
        if has_neighbour { Metric::Neighbour } else { Metric::Iops }
    }

    /// Lowest and highest of the main metric.
    pub fn range(&self) -> Option<(f64, f64)> {
        let values = self.values(self.main_metric());
        let lowest = values.iter().copied().min_by(f64::total_cmp)?;
        Some((lowest, values.iter().copied().max_by(f64::total_cmp)?))
    }

    /// Whether the row needs another round: fewer rounds agree than the requested number.
    pub fn is_unsteady(&self) -> bool {
        let mut values = self.values(self.main_metric());
        values.sort_by(f64::total_cmp);
        let asked_for = values.len().saturating_sub(self.extra_rounds);
        asked_for > 1 && !values.windows(asked_for).any(|some| some[asked_for - 1] / some[0] <= STEADY)
    }

    /// Whether the row lacks samples, or its samples lack figures: a failure of its section.
    pub fn is_empty(&self) -> bool {
        self.values(self.main_metric()).len() != self.samples.len() || self.samples.is_empty()
    }

    /// The mean stolen share of processor time during the row's measurements, 0 to 1.
    pub fn steal(&self) -> f64 {
        self.samples.iter().map(|sample| sample.steal).sum::<f64>() / self.samples.len().max(1) as f64
    }
}

impl Cell {
    /// The row of `subject` under the driver that serves it best by `metric`.
    pub fn best(&self, subject: &str, metric: Metric) -> Option<&Row> {
        let rows = self.rows.iter().filter(|row| row.subject == subject);
        let measured = rows.filter_map(|row| Some((row, row.median(metric)?)));
        let better = |one: &(&Row, f64), other: &(&Row, f64)| metric.ratio(one.1, other.1).total_cmp(&1.0);
        measured.max_by(better).map(|(row, _)| row)
    }

    /// The row of `subject` under one driver.
    pub fn under(&self, subject: &str, driver: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.subject == subject && row.driver == driver)
    }

    /// Marks the best driver of each subject by `metric`.
    pub fn mark_best(&mut self, metric: Metric) {
        let is_best =
            |row: &Row| self.best(&row.subject, metric).is_some_and(|best| best.driver == row.driver);
        let marks: Vec<bool> = self.rows.iter().map(is_best).collect();
        self.rows.iter_mut().zip(marks).for_each(|(row, mark)| row.best = mark);
    }
}

/// The middle value; the mean of the two middle ones when their number is even.
pub fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        odd if odd % 2 == 1 => Some(values[middle]),
        _ => Some(f64::midpoint(values[middle - 1], values[middle])),
    }
}

/// A row with these requests per second and median latencies in nanoseconds.
#[cfg(test)]
pub fn row_of(subject: &str, driver: &'static str, values: &[(f64, f64)]) -> Row {
    let sample = |&(iops, p50): &(f64, f64)| Sample {
        figures: Figures { iops, p50, p99: 2.0 * p50, seconds: 2.0, under_load: 2.0, cpu: 1.0 },
        server_cpu: 0.5,
        neighbour: None,
        steal: 0.25,
    };
    let samples = values.iter().map(sample).collect();
    Row { subject: subject.into(), driver, samples, extra_rounds: 0, best: false }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median(vec![]), None);
    }

    /// The pair of a published run: 38 k, and 140 k in the next one.
    #[test]
    fn rounds_that_differ_ask_for_more_until_the_others_agree() {
        let row = |values: &[f64], extra_rounds| {
            let values: Vec<(f64, f64)> = values.iter().map(|&iops| (iops, 1000.0)).collect();
            Row { extra_rounds, ..row_of("weir", "weir", &values) }
        };
        assert!(!row(&[100.0, 149.0, 120.0], 0).is_unsteady());
        assert!(row(&[140.0, 38.0, 139.0], 0).is_unsteady());
        assert!(!row(&[140.0, 38.0, 139.0, 141.0], 1).is_unsteady(), "one outlier among four is left out");
        assert!(row(&[140.0, 38.0, 60.0, 141.0], 1).is_unsteady());
        assert!(!row(&[140.0], 0).is_unsteady(), "one round cannot differ");
        assert!(!row(&[], 0).is_unsteady());
        assert_eq!(row(&[140.0, 38.0, 139.0], 0).range(), Some((38.0, 140.0)));
    }

    #[test]
    fn the_best_driver_is_the_fastest_or_the_quickest() {
        let rows = vec![
            row_of("quorum", "weir", &[(16_700.0, 1000.0)]),
            row_of("quorum", "fio", &[(30_800.0, 2000.0)]),
            row_of("weir", "weir", &[(90_000.0, 500.0)]),
        ];
        let mut cell = Cell { name: "c".into(), rows };
        assert_eq!(cell.best("quorum", Metric::Iops).unwrap().driver, "fio");
        assert_eq!(cell.best("quorum", Metric::P50).unwrap().driver, "weir");
        assert!(cell.best("nobody", Metric::Iops).is_none());
        cell.mark_best(Metric::Iops);
        assert_eq!(cell.rows.iter().map(|row| row.best).collect::<Vec<_>>(), [false, true, true]);
    }

    #[test]
    fn a_row_without_a_figure_is_empty() {
        assert!(row_of("a", "weir", &[]).is_empty());
        assert!(row_of("a", "weir", &[(1.0, 1.0), (0.0, 1.0)]).is_empty());
        assert!(!row_of("a", "weir", &[(1.0, 1.0)]).is_empty());
        let mut neighbour = row_of("alone", "-", &[(0.0, 0.0)]);
        neighbour.samples[0].neighbour = Some(1e9);
        assert!(!neighbour.is_empty(), "without a disk, only the neighbour's steps count");
    }
}

//! From samples to medians and ratios, to a table and a file.

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use crate::driver::Figures;

/// One measurement of one contestant.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// What the driver saw.
    pub figures: Figures,
    /// CPU seconds of the server's processes for each second of load.
    pub server_cpu: f64,
}

/// All measurements of one contestant in one cell; the rounds are in the order in which they were run.
#[derive(Clone, Debug)]
pub struct Series {
    /// Whose.
    pub contestant: String,
    /// One sample for each round.
    pub samples: Vec<Sample>,
}

/// A figure that is compared.
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
}

impl Metric {
    /// As at the end of a result's name.
    pub fn name(self) -> &'static str {
        match self {
            Metric::Iops => "iops",
            Metric::PerServerCpu => "iops-per-cpu-second",
            Metric::PerDriverCpu => "ios-per-cpu-second",
            Metric::P50 => "p50-latency",
        }
    }

    fn unit(self) -> &'static str {
        match self {
            Metric::Iops => "1/s",
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
        }
    }

    /// How much better `ours` is: above 1 means that Weir is better, for latencies too.
    fn ratio(self, ours: f64, theirs: f64) -> f64 {
        match self {
            Metric::P50 => theirs / ours,
            _ => ours / theirs,
        }
    }
}

/// One line of the results.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Entry {
    /// What was measured: `nbd unix randread 4k qd32 iops`.
    pub name: String,
    /// Weir's median.
    pub value: f64,
    /// Of `value` and `peer_value`.
    pub unit: &'static str,
    /// Who stands beside it.
    pub peer: String,
    /// The peer's median.
    pub peer_value: f64,
    /// Median of the ratios of the paired rounds; above 1 means that Weir is better.
    pub ratio: f64,
    /// Paired rounds.
    pub n: usize,
    /// The ratio that is aimed at, where one is; for the table only.
    #[serde(skip)]
    pub target: Option<f64>,
}

impl Entry {
    /// Notes the ratio that is aimed at.
    pub fn aiming_at(self, ratio: f64) -> Entry {
        Entry { target: Some(ratio), ..self }
    }
}

/// Compares two series round by round. `None` when a figure is missing (a server too short for the CPU clock).
pub fn compare(cell: &str, metric: Metric, ours: &Series, theirs: &Series) -> Option<Entry> {
    let pairs = ours.samples.iter().zip(&theirs.samples).map(|(a, b)| (metric.of(a), metric.of(b)));
    let pairs: Vec<(f64, f64)> =
        pairs.filter(|(a, b)| a.is_finite() && b.is_finite() && *a > 0.0 && *b > 0.0).collect();
    let median_of = |of: &dyn Fn(&(f64, f64)) -> f64| median(pairs.iter().map(of).collect());
    Some(Entry {
        name: format!("{cell} {}", metric.name()),
        value: median_of(&|pair| pair.0)?,
        unit: metric.unit(),
        peer: theirs.contestant.clone(),
        peer_value: median_of(&|pair| pair.1)?,
        ratio: median_of(&|pair| metric.ratio(pair.0, pair.1))?,
        n: pairs.len(),
        target: None,
    })
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

/// Every contestant of every cell: medians.
pub fn table_of_medians(cells: &[(String, Vec<Series>)]) -> Table {
    let mut table =
        new_table(["cell", "contestant", "IOPS", "p50 us", "p99 us", "server CPU", "driver CPU", "n"], 2);
    for (cell, series) in cells {
        for Series { contestant, samples } in series {
            let of = |figure: &dyn Fn(&Sample) -> f64, digits| {
                number(median(samples.iter().map(figure).collect()), digits)
            };
            table.add_row([
                cell.clone(),
                contestant.clone(),
                of(&|sample| sample.figures.iops, 0),
                of(&|sample| sample.figures.p50 / 1e3, 1),
                of(&|sample| sample.figures.p99 / 1e3, 1),
                of(&|sample| sample.server_cpu, 2),
                of(&|sample| sample.figures.cpu / sample.figures.seconds, 2),
                samples.len().to_string(),
            ]);
        }
    }
    table
}

/// Weir beside each peer.
pub fn table_of_ratios(entries: &[Entry]) -> Table {
    let mut table = new_table(["name", "peer", "weir", "peer has", "unit", "ratio", "target", "n"], 2);
    for entry in entries {
        let digits = usize::from(entry.value < 1000.0);
        table.add_row([
            entry.name.clone(),
            entry.peer.clone(),
            number(Some(entry.value), digits),
            number(Some(entry.peer_value), digits),
            entry.unit.to_string(),
            number(Some(entry.ratio), 2),
            entry.target.map_or_else(String::new, |target| format!("{target:.2}")),
            entry.n.to_string(),
        ]);
    }
    table
}

fn new_table<const N: usize>(head: [&str; N], texts: usize) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(head);
    table.column_iter_mut().skip(texts).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    table
}

fn number(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "-".into(), |value| format!("{value:.digits$}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(contestant: &str, values: &[(f64, f64)]) -> Series {
        let sample = |&(iops, p50): &(f64, f64)| Sample {
            figures: Figures { iops, p50, p99: 2.0 * p50, seconds: 2.0, cpu: 1.0 },
            server_cpu: 0.5,
        };
        Series { contestant: contestant.into(), samples: values.iter().map(sample).collect() }
    }

    #[test]
    fn above_one_means_better_for_latencies_too() {
        let ours = series("weir", &[(300.0, 1000.0), (100.0, 9000.0), (200.0, 1000.0)]);
        let theirs = series("peer", &[(100.0, 2000.0), (100.0, 2000.0), (100.0, 2000.0)]);
        let iops = compare("cell", Metric::Iops, &ours, &theirs).unwrap();
        assert_eq!((iops.value, iops.peer_value, iops.ratio, iops.n), (200.0, 100.0, 2.0, 3));
        assert_eq!(iops.name, "cell iops");
        let p50 = compare("cell", Metric::P50, &ours, &theirs).unwrap();
        assert_eq!((p50.value, p50.peer_value, p50.ratio), (1.0, 2.0, 2.0));
        let cpu = compare("cell", Metric::PerServerCpu, &ours, &theirs).unwrap();
        assert_eq!((cpu.value, cpu.ratio), (400.0, 2.0));
        let driver = compare("cell", Metric::PerDriverCpu, &ours, &theirs).unwrap();
        assert_eq!(driver.value, 400.0);
    }

    #[test]
    fn what_was_not_measured_is_not_compared() {
        let mut idle = series("idle", &[(100.0, 10.0)]);
        idle.samples[0].server_cpu = 0.0;
        let other = series("other", &[(100.0, 10.0)]);
        assert!(compare("cell", Metric::PerServerCpu, &idle, &other).is_none());
        assert!(compare("cell", Metric::Iops, &series("none", &[]), &other).is_none());
    }

    #[test]
    fn medians() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median(vec![]), None);
    }

    #[test]
    fn the_file_has_the_agreed_fields() {
        let entry =
            compare("c", Metric::Iops, &series("a", &[(2.0, 1.0)]), &series("b", &[(1.0, 1.0)])).unwrap();
        let json = serde_json::to_value(vec![entry]).unwrap();
        let expected = serde_json::json!([{"name": "c iops", "value": 2.0, "unit": "1/s", "peer": "b",
            "peer_value": 1.0, "ratio": 2.0, "n": 1}]);
        assert_eq!(json, expected);
    }
}

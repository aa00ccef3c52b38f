//! The result of a load, as text and as JSON.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use weir_block::size::format_size;

pub use crate::buckets::Buckets;
use crate::device::DeviceBytes;
use crate::steady::SteadyState;
use crate::tally::{IoKind, KindTally, Tally};
use crate::timeline::Timeline;
use crate::workload::Workload;

/// Version of the JSON form. Grows when a field changes its meaning or goes; new fields do not count.
pub const VERSION: u32 = 1;

/// What was written before a load. Neither its time nor its bytes are in the load's result.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Filled {
    /// Bytes that were written.
    pub bytes: u64,
    /// Time that it took, in seconds, until all of it was durable.
    pub seconds: f64,
}

impl fmt::Display for Filled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "filled {} in {:.1} s before the load; that is not in its figures",
            format_size(self.bytes),
            self.seconds
        )
    }
}

/// The result of one load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// [`VERSION`].
    pub version: u32,
    /// The job's name in a job file; `None` for a load of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The target as it was named.
    pub target: String,
    /// `null`, `io_uring`, `nbd` or `layer`.
    pub engine: String,
    /// What was asked for.
    pub workload: Workload,
    /// What was written before the load, so that it does not measure holes; `None` when that was not needed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill: Option<Filled>,
    /// Seconds that were counted (without the warm-up and the prefill).
    pub runtime_seconds: f64,
    /// CPU seconds of the load's own threads in that time, user and system; `None` when they did other work too.
    pub cpu_seconds: Option<f64>,
    /// What `latency_ns` counts from: `issue`, or with a rate `intended_start`.
    #[serde(default)]
    pub latency_from: LatencyFrom,
    /// With a rate: requests that were due before the end and never made, because the queue was full. They are in no
    /// histogram; with any of them the latencies are those of a load that the target does not sustain.
    #[serde(default)]
    pub never_made: u64,
    /// Reads, writes and flushes, as far as there were any.
    pub kinds: Vec<KindSummary>,
    /// The error of the first failed request.
    pub first_error: Option<String>,
    /// Why the load ended before its time, if it did: everything above is what was measured until then.
    #[serde(default)]
    pub incomplete: Option<String>,
    /// How the load came to rest, if it was to run until it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steady: Option<SteadyState>,
    /// What it did over time; `None` when nothing was answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeline: Option<Timeline>,
    /// What the device under the target moved in the same time; `None` when it has none that can be seen.
    #[serde(default)]
    pub device: Option<DeviceBytes>,
    /// Why the figures may not mean what they seem to, in sentences.
    #[serde(default)]
    pub notes: Vec<String>,
    /// What verification found; `None` when it was not asked for.
    pub verification: Option<Verification>,
}

/// One kind of request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KindSummary {
    /// Read or write.
    pub kind: IoKind,
    /// Successful requests.
    pub ios: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Failed requests.
    pub errors: u64,
    /// Successful requests per second.
    pub iops: f64,
    /// Their bytes per second, in MiB.
    pub mib_per_second: f64,
    /// From issue (with a rate: from the intended start) to answer, in nanoseconds.
    pub latency_ns: Latency,
    /// With a rate: from issue to answer, in nanoseconds. It leaves out the wait for room in the queue, so it
    /// hides stalls (coordinated omission); `None` without a rate, where `latency_ns` is that already.
    #[serde(default)]
    pub issue_latency_ns: Option<Latency>,
    /// What `latency_ns` was made of, for merging and for other percentiles.
    #[serde(default)]
    pub buckets_ns: Buckets,
    /// What `issue_latency_ns` was made of.
    #[serde(default, skip_serializing_if = "Buckets::is_empty")]
    pub issue_buckets_ns: Buckets,
}

/// The moment that a latency counts from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LatencyFrom {
    /// When the request was handed to the target.
    #[default]
    Issue,
    /// When the request was due by the rate's clock.
    IntendedStart,
}

/// A distribution of latencies, in nanoseconds; percentiles are within 1 %.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// Shortest.
    #[serde(default)]
    pub min: u64,
    /// Arithmetic mean.
    pub mean: f64,
    /// Median.
    pub p50: u64,
    /// 90 % are not longer.
    pub p90: u64,
    /// 99 % are not longer.
    pub p99: u64,
    /// 99.9 % are not longer.
    pub p99_9: u64,
    /// 99.999 % are not longer.
    pub p99_999: u64,
    /// Longest.
    pub max: u64,
}

/// What verification found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verification {
    /// Blocks that were read and judged.
    pub checked: u64,
    /// How many were not what they must be.
    pub mismatches: u64,
    /// The first of them, in words.
    pub first: Vec<String>,
    /// How many of them there are of each kind: `lost`, `stale`, `torn`, `misplaced`, `foreign`, `corrupt`, `unissued`.
    #[serde(default)]
    pub faults: BTreeMap<String, u64>,
}

impl Verification {
    /// Mismatches that are described; the rest is counted.
    pub(crate) const DESCRIBED: usize = 10;

    /// Counts one judgement.
    pub(crate) fn count(&mut self, judged: Result<(), crate::verify::Mismatch>) {
        self.checked += 1;
        if let Err(mismatch) = judged {
            self.mismatches += 1;
            *self.faults.entry(mismatch.fault.name().into()).or_default() += 1;
            if self.first.len() < Verification::DESCRIBED {
                self.first.push(mismatch.to_string());
            }
        }
    }

    pub(crate) fn add(&mut self, other: Verification) {
        self.checked += other.checked;
        self.mismatches += other.mismatches;
        self.first.extend(other.first);
        self.first.truncate(Verification::DESCRIBED);
        other.faults.into_iter().for_each(|(fault, count)| *self.faults.entry(fault).or_default() += count);
    }
}

impl Latency {
    /// The figures of a histogram of nanoseconds.
    #[must_use]
    pub fn of(histogram: &Histogram<u64>) -> Latency {
        if histogram.is_empty() {
            return Latency::default();
        }
        // The histogram gives the upper end of a bucket, which can lie above the longest value that was seen.
        let at = |quantile| histogram.value_at_quantile(quantile).min(histogram.max());
        Latency {
            min: histogram.min(),
            mean: histogram.mean(),
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p99_9: at(0.999),
            p99_999: at(0.99999),
            max: histogram.max(),
        }
    }
}

impl KindSummary {
    /// A row of the table.
    fn cells(&self, name: &str, latency: &Latency) -> Vec<String> {
        let mut cells =
            vec![name.to_string(), format!("{:.0}", self.iops), format!("{:.1}", self.mib_per_second)];
        cells.push(format_latency(latency.mean));
        let percentiles =
            [latency.p50, latency.p90, latency.p99, latency.p99_9, latency.p99_999, latency.max];
        cells.extend(percentiles.map(|value| format_latency(value as f64)));
        cells.push(self.errors.to_string());
        cells
    }

    fn of(kind: IoKind, tally: &KindTally, runtime: Duration) -> KindSummary {
        let per_second = |count: f64| if runtime.is_zero() { 0.0 } else { count / runtime.as_secs_f64() };
        KindSummary {
            kind,
            ios: tally.ios,
            bytes: tally.bytes,
            errors: tally.errors,
            iops: per_second(tally.ios as f64),
            mib_per_second: per_second(tally.bytes as f64 / f64::from(1 << 20)),
            latency_ns: Latency::of(&tally.latency),
            buckets_ns: Buckets::of(&tally.latency),
            issue_buckets_ns: Buckets::of(&tally.service),
            issue_latency_ns: (!tally.service.is_empty()).then(|| Latency::of(&tally.service)),
        }
    }
}

impl Summary {
    /// Puts together what was counted in `runtime`.
    #[must_use]
    pub fn new(target: &str, engine: &str, workload: &Workload, tally: &Tally, runtime: Duration) -> Summary {
        let seen = |kind: &IoKind| tally.kind(*kind).ios + tally.kind(*kind).errors > 0;
        Summary {
            version: VERSION,
            name: None,
            target: target.into(),
            engine: engine.into(),
            workload: workload.clone(),
            prefill: None,
            runtime_seconds: runtime.as_secs_f64(),
            cpu_seconds: None,
            latency_from: match workload.rate {
                Some(_) => LatencyFrom::IntendedStart,
                None => LatencyFrom::Issue,
            },
            never_made: 0,
            kinds: IoKind::ALL
                .into_iter()
                .filter(seen)
                .map(|kind| KindSummary::of(kind, tally.kind(kind), runtime))
                .collect(),
            first_error: None,
            incomplete: None,
            steady: None,
            timeline: tally.timeline.timeline(),
            device: None,
            notes: Vec::new(),
            verification: None,
        }
    }

    /// The part of one kind, if there was any.
    #[must_use]
    pub fn kind(&self, kind: IoKind) -> Option<&KindSummary> {
        self.kinds.iter().find(|summary| summary.kind == kind)
    }

    /// Successful reads and writes per second.
    #[must_use]
    pub fn iops(&self) -> f64 {
        self.kinds.iter().filter(|kind| kind.kind != IoKind::Flush).map(|kind| kind.iops).sum()
    }

    /// Failed requests of all kinds.
    #[must_use]
    pub fn errors(&self) -> u64 {
        self.kinds.iter().map(|kind| kind.errors).sum()
    }

    /// Successful requests per CPU second of the load.
    #[must_use]
    pub fn ios_per_cpu_second(&self) -> Option<f64> {
        let made = self.kinds.iter().filter(|kind| kind.kind != IoKind::Flush);
        let ios: u64 = made.map(|kind| kind.ios).sum();
        self.cpu_seconds.filter(|&seconds| seconds > 0.0).map(|seconds| ios as f64 / seconds)
    }

    /// Whether every request succeeded and everything that was checked was right.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.errors() == 0 && self.verification.as_ref().is_none_or(|found| found.mismatches == 0)
    }

    /// Everything that has to be said beside the figures, in sentences.
    pub fn remarks(&self) -> impl Iterator<Item = String> {
        let device = self.device.iter().flat_map(|device| {
            device.differences.iter().map(move |difference| format!("{}: {difference}", device.device))
        });
        let steady = self.steady.iter().map(|state| {
            let figures = match (state.excursion_percent, state.slope_percent) {
                (Some(excursion), Some(slope)) => {
                    format!("excursion {excursion:.1} % (at most 20), slope {slope:.1} % (at most 10)")
                }
                _ => "too few rounds to judge".into(),
            };
            let reached = if state.reached { "steady" } else { "NOT steady" };
            format!("{reached} after {} rounds: {figures}; the figures are of the last 5", state.rounds.len())
        });
        self.notes.iter().cloned().chain(steady).chain(device)
    }

    /// The JSON form, one line.
    ///
    /// # Errors
    /// None in practice: every figure is finite.
    pub fn to_json(&self) -> serde_json::Result<String> {
        serde_json::to_string(self)
    }
}

/// Nanoseconds with three digits and a unit: `850 ns`, `45.2 us`, `1.30 ms`.
#[must_use]
pub fn format_latency(nanoseconds: f64) -> String {
    let (value, unit) = match nanoseconds {
        ns if ns < 1e3 => return format!("{ns:.0} ns"),
        ns if ns < 1e6 => (ns / 1e3, "us"),
        ns if ns < 1e9 => (ns / 1e6, "ms"),
        ns => (ns / 1e9, "s"),
    };
    let digits = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
    format!("{value:.digits$} {unit}")
}

impl fmt::Display for Summary {
    /// A table: one row for each kind.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} on {} ({}), {:.2} s", self.workload, self.target, self.engine, self.runtime_seconds)?;
        let names = ["", "IOPS", "MiB/s", "mean", "p50", "p90", "p99", "p99.9", "p99.999", "max", "errors"];
        row(f, &names.map(String::from))?;
        for kind in &self.kinds {
            row(f, &kind.cells(kind.kind.name(), &kind.latency_ns))?;
        }
        if self.latency_from == LatencyFrom::IntendedStart {
            writeln!(f, "latency above: from the intended start; below: from the issue, blind to waiting")?;
            for kind in &self.kinds {
                let issue = kind.issue_latency_ns.unwrap_or_default();
                row(f, &kind.cells(kind.kind.name(), &issue))?;
            }
        }
        if self.never_made > 0 {
            writeln!(f, "{} requests were due and never made: the queue was full", self.never_made)?;
        }
        if let (Some(cpu), Some(rate)) = (self.cpu_seconds, self.ios_per_cpu_second()) {
            writeln!(f, "load: {cpu:.2} CPU seconds, {rate:.0} requests per CPU second")?;
        }
        if let Some(reason) = &self.incomplete {
            writeln!(f, "INCOMPLETE: {reason}")?;
        }
        self.remarks().try_for_each(|remark| writeln!(f, "note: {remark}"))?;
        if let Some(error) = &self.first_error {
            writeln!(f, "first error: {error}")?;
        }
        if let Some(found) = &self.verification {
            writeln!(f, "verified: {} blocks checked, {} mismatches", found.checked, found.mismatches)?;
            found.first.iter().try_for_each(|line| writeln!(f, "  {line}"))?;
        }
        Ok(())
    }
}

fn row(f: &mut fmt::Formatter<'_>, cells: &[String]) -> fmt::Result {
    for (index, cell) in cells.iter().enumerate() {
        match index {
            0 => write!(f, "{cell:<6}")?,
            _ => write!(f, " {cell:>9}")?,
        }
    }
    writeln!(f)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary() -> Summary {
        let mut tally = Tally::default();
        for latency in 1..=1000 {
            tally.count(IoKind::Read, 4096, latency * 1000, true);
        }
        tally.count(IoKind::Read, 4096, 5, false);
        let mut summary =
            Summary::new("null", "null", &Workload::default(), &tally, Duration::from_millis(500));
        summary.cpu_seconds = Some(0.25);
        summary
    }

    #[test]
    fn figures_follow_from_the_counts() {
        let summary = summary();
        let read = summary.kind(IoKind::Read).unwrap();
        assert_eq!((read.ios, read.errors, read.iops, read.bytes), (1000, 1, 2000.0, 4_096_000));
        assert!((read.mib_per_second - 7.8125).abs() < 1e-9);
        let within =
            |value: u64, exact: u64| assert!(value.abs_diff(exact) * 100 <= exact, "{value} {exact}");
        within(read.latency_ns.p50, 500_000);
        within(read.latency_ns.p90, 900_000);
        within(read.latency_ns.p99, 990_000);
        within(read.latency_ns.max, 1_000_000);
        assert!((read.latency_ns.mean - 500_500.0).abs() < 5_005.0);
        assert_eq!(summary.ios_per_cpu_second(), Some(4000.0));
        assert!(summary.kind(IoKind::Write).is_none());
        assert!(!summary.is_clean());
        assert_eq!((read.buckets_ns.count(), read.buckets_ns.percentile(99.0)), (1000, read.latency_ns.p99));
        assert_eq!(read.buckets_ns.percentile(100.0), read.latency_ns.max);
        // Of 1, 2, … 1000 microseconds: 1000 / sqrt(12).
        let deviation = read.buckets_ns.deviation(read.latency_ns.mean);
        assert!((deviation - 288_675.0).abs() < 5_000.0, "{deviation}");
        assert_eq!(Buckets::default().percentile(99.0), 0);
    }

    #[test]
    fn json_is_versioned_and_read_back() {
        let summary = summary();
        let text = summary.to_json().unwrap();
        assert!(text.starts_with("{\"version\":1,") && text.contains("\"p99_999\":"), "{text}");
        assert_eq!(serde_json::from_str::<Summary>(&text).unwrap(), summary);
    }

    #[test]
    fn the_table_names_every_figure() {
        let text = summary().to_string();
        for word in ["randread 4KiB depth 32", "p99.999", "2000", "CPU seconds", "1.00 ms"] {
            assert!(text.contains(word), "{word} in\n{text}");
        }
    }

    #[test]
    fn latencies_have_three_digits() {
        for (value, text) in
            [(850.0, "850 ns"), (45_210.0, "45.2 us"), (1_304_000.0, "1.30 ms"), (2.5e11, "250 s")]
        {
            assert_eq!(format_latency(value), text);
        }
    }
}

//! The result of a load, and its JSON.

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

/// Name and version of the JSON form. The version grows when a field changes its meaning or goes; new fields do not count.
pub const SCHEMA: &str = "weir.load/1";

fn schema() -> String {
    SCHEMA.to_owned()
}

/// Of the requests that were due, more than this share was never made: it was not only the last moment's queue.
const NOT_SUSTAINED: f64 = 0.01;

/// The prefill of a load. Neither its time nor its bytes are in the load's result.
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
    /// [`SCHEMA`]. What an earlier Weir wrote has a `version` 1 instead.
    #[serde(default = "schema")]
    pub schema: String,
    /// The job's name in a job file; `None` for a load of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The target, as given.
    pub target: String,
    /// `null`, `io_uring`, `nbd` or `layer`.
    pub engine: String,
    /// The requested workload.
    pub workload: Workload,
    /// The prefill before the load, so that it does not measure holes; `None` when none was needed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill: Option<Filled>,
    /// Seconds measured (without the warm-up and the prefill).
    pub runtime_seconds: f64,
    /// CPU seconds of the load's own threads in that time, user and system; `None` when they did other work too.
    pub cpu_seconds: Option<f64>,
    /// Starting point of `latency_ns`: `issue`, or with a rate `intended_start`.
    #[serde(default)]
    pub latency_from: LatencyFrom,
    /// With a rate: requests that were due before the end and never issued, because the queue was full. They are in no histogram;
    /// if there are any, the latencies are those of a load that the target does not sustain.
    #[serde(default)]
    pub never_made: u64,
    /// Reads, writes and flushes, if there were any.
    pub kinds: Vec<KindSummary>,
    /// The error of the first failed request.
    pub first_error: Option<String>,
    /// The reason of an early end, if any: all figures above are from the time until then.
    #[serde(default)]
    pub incomplete: Option<String>,
    /// The steady state, if the load was to run until it is reached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steady: Option<SteadyState>,
    /// Completions over time; `None` when nothing was answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeline: Option<Timeline>,
    /// Bytes that the device under the target moved in the same time; `None` without a visible device.
    #[serde(default)]
    pub device: Option<DeviceBytes>,
    /// Reasons why the figures may be misleading, as sentences.
    #[serde(default)]
    pub notes: Vec<String>,
    /// Results of verification; `None` when it was not requested.
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
    /// With a rate: from issue to answer, in nanoseconds. It excludes the wait for room in the queue, so it hides stalls
    /// (coordinated omission); `None` without a rate, where `latency_ns` is that already.
    #[serde(default)]
    pub issue_latency_ns: Option<Latency>,
    /// The distribution of `latency_ns`, for merging and for other percentiles.
    #[serde(default)]
    pub buckets_ns: Buckets,
    /// The distribution of `issue_latency_ns`.
    #[serde(default, skip_serializing_if = "Buckets::is_empty")]
    pub issue_buckets_ns: Buckets,
}

/// The starting point of a latency.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LatencyFrom {
    /// The submission of the request to the target.
    #[default]
    Issue,
    /// The request's due time by the rate's clock.
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

/// The results of verification.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verification {
    /// Blocks read and verified.
    pub checked: u64,
    /// Number of incorrect blocks.
    pub mismatches: u64,
    /// Descriptions of the first of them.
    pub first: Vec<String>,
    /// Their number by kind: `lost`, `stale`, `torn`, `misplaced`, `foreign`, `corrupt`, `unissued`.
    #[serde(default)]
    pub faults: BTreeMap<String, u64>,
}

impl Verification {
    /// Number of mismatches to describe; the others are only counted.
    pub(crate) const DESCRIBED: usize = 10;

    /// Counts one judgement.
    pub(crate) fn count(&mut self, judged: Result<(), crate::verify::Mismatch>) {
        self.count_with(judged, String::new);
    }

    /// As [`Verification::count`], with what is known of an incorrect block.
    pub(crate) fn count_with(
        &mut self,
        judged: Result<(), crate::verify::Mismatch>,
        known: impl FnOnce() -> String,
    ) {
        self.checked += 1;
        if let Err(mismatch) = judged {
            self.mismatches += 1;
            *self.faults.entry(mismatch.fault.name().into()).or_default() += 1;
            if self.first.len() < Verification::DESCRIBED {
                let known = known();
                let known = if known.is_empty() { known } else { format!(" ({known})") };
                self.first.push(format!("{mismatch}{known}"));
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
    /// Builds the summary of the counts in `runtime`.
    #[must_use]
    pub fn new(target: &str, engine: &str, workload: &Workload, tally: &Tally, runtime: Duration) -> Summary {
        let seen = |kind: &IoKind| tally.kind(*kind).ios + tally.kind(*kind).errors > 0;
        Summary {
            schema: schema(),
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

    /// The figures of one kind, if there was any.
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

    /// Whether every request succeeded and every verified block was correct.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.errors() == 0 && self.verification.as_ref().is_none_or(|found| found.mismatches == 0)
    }

    /// All remarks on the figures, as sentences.
    pub fn remarks(&self) -> impl Iterator<Item = String> {
        let filled = self.prefill.iter().map(Filled::to_string);
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
        let notes = self.notes.iter().cloned();
        filled.chain(self.late()).chain(notes).chain(steady).chain(device)
    }

    /// With a rate: what was due and never made.
    fn late(&self) -> Option<String> {
        let made: u64 = self.kinds.iter().map(|kind| kind.ios + kind.errors).sum();
        let (late, due) = (self.never_made, self.never_made + made);
        let why = match late as f64 > NOT_SUSTAINED * due as f64 {
            true => "the queue was full, and the target does not sustain the rate",
            false => "the queue was full at the end",
        };
        (late > 0).then(|| format!("{late} of {due} requests that were due were never made: {why}"))
    }

    /// The JSON form, one line.
    ///
    /// # Errors
    /// None in practice: every figure is finite.
    pub fn to_json(&self) -> serde_json::Result<String> {
        serde_json::to_string(self)
    }
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
        assert!(text.starts_with("{\"schema\":\"weir.load/1\",") && text.contains("\"p99_999\":"), "{text}");
        assert_eq!(serde_json::from_str::<Summary>(&text).unwrap(), summary);
    }

    /// One request that was due at the very end says nothing about the rate.
    #[test]
    fn requests_that_were_never_made_and_a_fill_are_remarked() {
        let remarks = |never_made| {
            let filled = Filled { bytes: 4 << 20, seconds: 0.5 };
            let summary = Summary { never_made, prefill: Some(filled), ..summary() };
            summary.remarks().collect::<Vec<_>>()
        };
        assert!(remarks(0)[0].starts_with("filled 4MiB in 0.5 s before the load"));
        assert_eq!(remarks(0).len(), 1);
        assert_eq!(
            remarks(1)[1],
            "1 of 1002 requests that were due were never made: the queue was full at the end"
        );
        assert!(remarks(50)[1].ends_with("the queue was full, and the target does not sustain the rate"));
    }
}

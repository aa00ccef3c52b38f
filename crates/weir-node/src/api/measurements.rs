//! Meters, loads and profiles.

use serde::{Deserialize, Serialize};
use weir_block::{KindMeter, LayerMeter, RequestKind};
use weir_load::Workload;

use crate::shard::messages::LoadLayer;

/// The meters of a disk.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.meters/1")]
pub struct Meters {
    /// From the top.
    pub meters: Vec<MeterView>,
}

/// Runs a load on a layer of an open disk.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunLoad {
    /// Where.
    pub layer: LoadLayer,
    /// What.
    pub workload: Workload,
    /// Also when clients are connected: a load measures theirs as well, and one that writes destroys their data.
    #[serde(default)]
    pub force: bool,
}

/// Records a disk's profile, from now on and for some time.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordProfile {
    /// Milliseconds, 100 to 604 800 000 (7 days).
    pub length_ms: u64,
}

/// The meter of one layer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MeterView {
    /// `export`, `accel`, `backing`, …
    pub layer: String,
    /// Requests in flight now.
    pub in_flight: u64,
    /// Integral of the number in flight, in request-seconds.
    #[serde(rename = "occupancy_request_seconds")]
    pub occupancy: f64,
    /// The kinds that were seen.
    pub kinds: Vec<KindView>,
}

/// The figures of one layer for one kind of request. Latencies in microseconds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct KindView {
    /// `read`, `write`, …
    pub kind: RequestKind,
    /// Requests taken.
    pub arrivals: u64,
    /// Answered with success.
    pub completions: u64,
    /// Answered with an error.
    pub errors: u64,
    /// Bytes of successful requests.
    pub bytes: u64,
    /// Extra requests made out of one.
    pub splits: u64,
    /// Requests saved by joining.
    pub merges: u64,
    /// Mean.
    pub mean_us: f64,
    /// Median.
    pub p50_us: f64,
    /// 99 of 100 were faster.
    pub p99_us: f64,
    /// 999 of 1000 were faster.
    pub p999_us: f64,
    /// The slowest.
    pub max_us: f64,
    /// The whole histogram: nanoseconds (within 1 %) and how many took about as long. Differences of two of them are
    /// the histogram of the time between.
    pub latency_ns: Vec<(u64, u64)>,
}

impl From<&LayerMeter> for MeterView {
    fn from(meter: &LayerMeter) -> MeterView {
        let kinds = RequestKind::ALL.iter().map(|&kind| (kind, meter.meter.kind(kind)));
        MeterView {
            layer: meter.layer.to_owned(),
            in_flight: meter.meter.in_flight(),
            occupancy: meter.meter.occupancy() as f64 / 1e9,
            kinds: kinds
                .filter(|(_, seen)| seen.arrivals > 0)
                .map(|(kind, seen)| KindView::new(kind, seen))
                .collect(),
        }
    }
}

impl KindView {
    fn new(kind: RequestKind, seen: &KindMeter) -> KindView {
        let quantile = |q: f64| seen.latency.value_at_quantile(q) as f64 / 1e3;
        KindView {
            kind,
            arrivals: seen.arrivals,
            completions: seen.completions,
            errors: seen.errors,
            bytes: seen.bytes,
            splits: seen.splits,
            merges: seen.merges,
            mean_us: seen.latency.mean() / 1e3,
            p50_us: quantile(0.5),
            p99_us: quantile(0.99),
            p999_us: quantile(0.999),
            max_us: seen.latency.max() as f64 / 1e3,
            latency_ns: seen
                .latency
                .iter_recorded()
                .map(|at| (at.value_iterated_to(), at.count_at_value()))
                .collect(),
        }
    }
}

//! The layout of `fio --output-format=json` (fio 3), for tools that read it.
//!
//! `clat_ns` is the time from the issue, `lat_ns` with a rate the one from the intended start. Figures that Weir does not measure
//! (separate submission latency, context switches, page faults, per-disk utilisation) are zero with `N` 0 where fio always has
//! the key, and omitted otherwise.

use serde_json::{Map, Value, json};

use weir_load::summary::{Buckets, KindSummary, Latency, Summary};
use weir_load::tally::IoKind;

/// The percentiles that fio lists by default.
const PERCENTILES: [f64; 17] =
    [1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.95, 99.99];

/// Upper ends of fio's latency bins, in their unit.
const BINS: [u64; 10] = [2, 4, 10, 20, 50, 100, 250, 500, 750, 1000];

/// The jobs in fio's layout; `seconds` is the time of the end, in seconds since 1970.
#[must_use]
pub fn to_json(jobs: &[Summary], seconds: f64) -> Value {
    json!({
        "fio version": concat!("weir-", env!("CARGO_PKG_VERSION")),
        "timestamp": seconds as u64,
        "timestamp_ms": (seconds * 1000.0) as u64,
        "jobs": jobs.iter().map(job).collect::<Vec<_>>(),
    })
}

fn job(summary: &Summary) -> Value {
    let milliseconds = (summary.runtime_seconds * 1000.0).round() as u64;
    let workload = &summary.workload;
    let mut job = json!({
        "jobname": summary.name.as_deref().unwrap_or("weir"),
        "groupid": 0,
        // fio gives the first error's number; a load that continued after errors has none.
        "error": u8::from(summary.incomplete.is_some()),
        "elapsed": summary.runtime_seconds.ceil() as u64,
        "job options": {
            "filename": summary.target,
            "ioengine": summary.engine,
            "rw": workload.access.to_string().split(':').next(),
            "bs": workload.block_size.0.to_string(),
            "iodepth": workload.queue_depth.to_string(),
            "numjobs": workload.threads.to_string(),
        },
        "read": direction(summary.kind(IoKind::Read), milliseconds),
        "write": direction(summary.kind(IoKind::Write), milliseconds),
        "trim": direction(None, 0),
        "sync": sync(summary.kind(IoKind::Flush)),
        "job_runtime": milliseconds * u64::from(workload.threads),
        "total_err": summary.errors(),
    });
    let moving = summary.kinds.iter().filter(|kind| kind.kind != IoKind::Flush);
    let all: Vec<&Buckets> = moving.map(|kind| &kind.buckets_ns).collect();
    for (unit, factor) in [("ns", 1), ("us", 1_000), ("ms", 1_000_000)] {
        job[format!("latency_{unit}")] = bins(&all, factor, unit == "ms");
    }
    job
}

fn sync(flushes: Option<&KindSummary>) -> Value {
    let (latency, none) = (Latency::default(), Buckets::default());
    let (ios, latency, buckets) =
        flushes.map_or((0, latency, &none), |kind| (kind.ios, kind.latency_ns, &kind.buckets_ns));
    json!({ "total_ios": ios, "lat_ns": figures(&latency, buckets) })
}

fn direction(kind: Option<&KindSummary>, milliseconds: u64) -> Value {
    let (latency, none) = (Latency::default(), Buckets::default());
    let (total, buckets) = kind.map_or((latency, &none), |kind| (kind.latency_ns, &kind.buckets_ns));
    let (issue, issue_buckets) = match kind {
        Some(KindSummary { issue_latency_ns: Some(latency), issue_buckets_ns, .. }) => {
            (*latency, issue_buckets_ns)
        }
        _ => (total, buckets),
    };
    let (ios, bytes) = kind.map_or((0, 0), |kind| (kind.ios, kind.bytes));
    let iops = kind.map_or(0.0, |kind| kind.iops);
    let rate = kind.map_or(0.0, |kind| kind.mib_per_second * f64::from(1 << 20));
    let mut clat = figures(&issue, issue_buckets);
    if ios > 0 {
        let percentile = |percent: &f64| (format!("{percent:.6}"), issue_buckets.percentile(*percent).into());
        clat["percentile"] = Value::Object(PERCENTILES.iter().map(percentile).collect::<Map<_, _>>());
    }
    json!({
        "io_bytes": bytes,
        "io_kbytes": bytes / 1024,
        "bw_bytes": rate as u64,
        "bw": (rate / 1024.0) as u64,
        "iops": iops,
        "runtime": if kind.is_some() { milliseconds } else { 0 },
        "total_ios": ios,
        "short_ios": 0,
        "drop_ios": kind.map_or(0, |kind| kind.errors),
        "slat_ns": figures(&Latency::default(), &none),
        "clat_ns": clat,
        "lat_ns": figures(&total, buckets),
        // Weir takes no samples; fio has the same values then.
        "bw_min": 0, "bw_max": 0, "bw_agg": 0.0, "bw_mean": 0.0, "bw_dev": 0.0, "bw_samples": 0,
        "iops_min": 0, "iops_max": 0, "iops_mean": 0.0, "iops_stddev": 0.0, "iops_samples": 0,
    })
}

fn figures(latency: &Latency, buckets: &Buckets) -> Value {
    json!({
        "min": latency.min,
        "max": latency.max,
        "mean": latency.mean,
        "stddev": buckets.deviation(latency.mean),
        "N": buckets.count(),
    })
}

/// Percentage of the requests in each bin of one unit; the next unit's bins begin above a unit's last bin.
fn bins(all: &[&Buckets], factor: u64, is_last: bool) -> Value {
    let total: u64 = all.iter().map(|buckets| buckets.count()).sum();
    let within = |low: u64, high: u64| {
        let buckets = all.iter().flat_map(|buckets| &buckets.0);
        let count: u64 =
            buckets.filter(|bucket| (low..high).contains(&bucket.0)).map(|bucket| bucket.1).sum();
        if total == 0 { 0.0 } else { count as f64 * 100.0 / total as f64 }
    };
    let mut low = if factor == 1 { 0 } else { factor };
    let mut bins = Map::new();
    let mut add = |name: String, high: u64| {
        bins.insert(name, within(low, high).into());
        low = high;
    };
    for high in BINS {
        add(high.to_string(), high * factor);
    }
    if is_last {
        add("2000".into(), 2000 * factor);
        add(">=2000".into(), u64::MAX);
    }
    Value::Object(bins)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use weir_load::tally::Tally;
    use weir_load::workload::Workload;

    /// 1000 reads of 1 to 1000 µs, and 500 writes of twice that.
    fn summary() -> Summary {
        let mut tally = Tally::default();
        for latency in 1..=1000 {
            tally.count(IoKind::Read, 4096, latency * 1000, true);
            if latency % 2 == 0 {
                tally.count(IoKind::Write, 4096, latency * 2000, true);
            }
        }
        Summary::new("a \"disk\"", "nbd", &Workload::default(), &tally, Duration::from_secs(1))
    }

    #[test]
    fn the_bins_hold_every_request_once() {
        let value = to_json(&[summary()], 0.0);
        let job = &value["jobs"][0];
        let sum: f64 = ["latency_ns", "latency_us", "latency_ms"]
            .iter()
            .flat_map(|unit| job[unit].as_object().unwrap().values())
            .map(|share| share.as_f64().unwrap())
            .sum();
        assert!((sum - 100.0).abs() < 1e-9, "{job:#}");
        assert_eq!((&job["read"]["total_ios"], &job["write"]["total_ios"]), (&json!(1000), &json!(500)));
        assert_eq!(job["read"]["clat_ns"]["N"], 1000);
    }
}

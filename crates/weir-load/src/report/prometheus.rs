//! Prometheus' text format, version 0.0.4: for a node exporter's text file directory, or a push gateway.

use std::fmt::Write;

use crate::summary::{KindSummary, LatencyFrom, Summary};

/// A metric: name, type, help, and the function of its value.
type Metric = (&'static str, &'static str, &'static str, fn(&Summary, &KindSummary) -> f64);

const METRICS: [Metric; 6] = [
    ("weir_bench_requests_total", "counter", "Successful requests", |_, kind| kind.ios as f64),
    ("weir_bench_bytes_total", "counter", "Bytes of successful requests", |_, kind| kind.bytes as f64),
    ("weir_bench_errors_total", "counter", "Failed requests", |_, kind| kind.errors as f64),
    ("weir_bench_iops", "gauge", "Successful requests per second", |_, kind| kind.iops),
    ("weir_bench_runtime_seconds", "gauge", "Time that was counted", |job, _| job.runtime_seconds),
    ("weir_bench_complete", "gauge", "1, or 0 when the load ended before its time", |job, _| {
        f64::from(u8::from(job.incomplete.is_none()))
    }),
];

/// The jobs as metrics. The latency is a summary in seconds, labelled with its starting point.
#[must_use]
pub fn to_prometheus(jobs: &[Summary]) -> String {
    let mut text = String::new();
    for (name, kind_of_metric, help, value) in METRICS {
        head(&mut text, name, kind_of_metric, help);
        each(jobs, |job, kind, labels| line(&mut text, name, labels, value(job, kind)));
    }
    let name = "weir_bench_latency_seconds";
    head(&mut text, name, "summary", "Time to the answer; label from: where it counts from");
    each(jobs, |job, kind, labels| {
        let from = match job.latency_from {
            LatencyFrom::Issue => "issue",
            LatencyFrom::IntendedStart => "intended_start",
        };
        let mut all = vec![(from, Some(kind.latency_ns))];
        if job.latency_from == LatencyFrom::IntendedStart {
            all.push(("issue", kind.issue_latency_ns));
        }
        for (from, latency) in all {
            let latency = latency.unwrap_or_default();
            let labels = format!("{labels},from=\"{from}\"");
            let quantiles = [
                ("0.5", latency.p50),
                ("0.9", latency.p90),
                ("0.99", latency.p99),
                ("0.999", latency.p99_9),
                ("0.99999", latency.p99_999),
                ("1", latency.max),
            ];
            for (quantile, value) in quantiles {
                line(&mut text, name, &format!("{labels},quantile=\"{quantile}\""), value as f64 / 1e9);
            }
            line(&mut text, &format!("{name}_sum"), &labels, latency.mean * kind.ios as f64 / 1e9);
            line(&mut text, &format!("{name}_count"), &labels, kind.ios as f64);
        }
    });
    text
}

fn each(jobs: &[Summary], mut act: impl FnMut(&Summary, &KindSummary, &str)) {
    for job in jobs {
        for kind in &job.kinds {
            let labels = [
                ("job_name", job.name.clone().unwrap_or_default()),
                ("target", job.target.clone()),
                ("workload", job.workload.to_string()),
                ("kind", kind.kind.name().into()),
            ];
            let labels = labels.map(|(name, value)| format!("{name}=\"{}\"", escaped(&value)));
            act(job, kind, &labels.join(","));
        }
    }
}

fn head(text: &mut String, name: &str, kind: &str, help: &str) {
    text.push_str(&format!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
}

fn line(text: &mut String, name: &str, labels: &str, value: f64) {
    writeln!(text, "{name}{{{labels}}} {value}").expect("writing to a string cannot fail");
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::summary;

    #[test]
    fn metrics_are_grouped_and_escaped() {
        let text = to_prometheus(&[summary(1)]);
        let labels =
            "job_name=\"\",target=\"a \\\"disk\\\"\",workload=\"randrw:67 4KiB depth 32\",kind=\"read\"";
        for line in [
            format!("weir_bench_requests_total{{{labels}}} 1000"),
            format!("weir_bench_latency_seconds_count{{{labels},from=\"issue\"}} 1000"),
            "# TYPE weir_bench_latency_seconds summary".into(),
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        // Every metric is described once, and everything else is a sample with a number.
        let names: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
        assert_eq!(names.len(), METRICS.len() + 1);
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            assert!(line.rsplit_once("} ").unwrap().1.parse::<f64>().is_ok(), "{line}");
        }
    }
}

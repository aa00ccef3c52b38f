//! A node's metrics, in Prometheus' text format, version 0.0.4.

use std::fmt::Write;

use crate::api::ShardView;
use crate::shard::health::Delayed;
use crate::throttles;

/// The content type of [`to_prometheus`].
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A metric: name, type, help, and how its value is taken.
type Metric = (&'static str, &'static str, &'static str, fn(&ShardView) -> f64);

const METRICS: [Metric; 7] = [
    ("weir_shard_turns_total", "counter", "Turns of a shard", |shard| shard.turns as f64),
    ("weir_shard_disk_turns_total", "counter", "Turns of single disks", |shard| shard.disk_turns as f64),
    ("weir_shard_long_turns_total", "counter", "Turns that took longer than 10 ms", |shard| {
        shard.long_turns as f64
    }),
    ("weir_shard_spins_total", "counter", "Times that it was found spinning", |shard| shard.spins as f64),
    ("weir_shard_longest_turn_seconds", "gauge", "The longest turn since the node started", |shard| {
        shard.longest_turn_ms / 1e3
    }),
    ("weir_shard_hangs", "gauge", "1 while a turn has lasted for over a second", |shard| {
        f64::from(u8::from(shard.state == "hangs"))
    }),
    ("weir_shard_spinning", "gauge", "1 when it was found spinning within the last second", |shard| {
        f64::from(u8::from(shard.state == "spins"))
    }),
];

/// A metric of a disk: name, help, and how its value is taken. A counter.
type DiskMetric = (&'static str, &'static str, fn(&Delayed) -> f64);

const OF_LIMITS: [DiskMetric; 2] = [
    ("weir_disk_limit_delayed_requests_total", "Requests that waited for the disk's limit", |disk| {
        disk.requests as f64
    }),
    ("weir_disk_limit_delay_seconds_total", "The sum of their waits", |disk| disk.waited.as_secs_f64()),
];

/// The shards of `node`, the limits of its open disks, and its suppressed log lines, as metrics.
#[must_use]
pub fn to_prometheus(node: &str, shards: &[ShardView], delays: &[Delayed]) -> String {
    let mut text = String::new();
    for (name, kind, help, value) in METRICS {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for shard in shards {
            let _ = writeln!(text, "{name}{{node=\"{node}\",shard=\"{}\"}} {}", shard.shard, value(shard));
        }
    }
    for (name, help, value) in OF_LIMITS {
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} counter");
        for disk in delays {
            let _ = writeln!(text, "{name}{{node=\"{node}\",disk=\"{}\"}} {}", disk.disk, value(disk));
        }
    }
    let name = "weir_log_lines_suppressed_total";
    let _ = writeln!(text, "# HELP {name} Log lines left out, by cause\n# TYPE {name} counter");
    for throttle in throttles::all() {
        let (what, count) = (throttle.name(), throttle.suppressed());
        let _ = writeln!(text, "{name}{{node=\"{node}\",what=\"{what}\"}} {count}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::health::Health;
    use weir_block::Nanos;

    #[test]
    fn each_metric_has_a_line_for_each_shard() {
        let well = ShardView::new(0, &Health::default().look(Nanos(1)));
        let ill = ShardView { shard: 1, state: "hangs".into(), longest_turn_ms: 1500.0, ..well.clone() };
        let waited = std::time::Duration::from_millis(1500);
        let delayed = Delayed { disk: "db".into(), requests: 3, waited };
        let text = to_prometheus("n1", &[well, ill], &[delayed]);
        assert!(text.contains(
            "weir_disk_limit_delayed_requests_total counter\nweir_disk_limit_delayed_requests_total{node=\"n1\",disk=\"db\"} 3\n"
        ));
        assert!(
            text.contains("weir_disk_limit_delay_seconds_total{node=\"n1\",disk=\"db\"} 1.5\n"),
            "{text}"
        );
        assert!(text.contains(
            "# TYPE weir_shard_turns_total counter\nweir_shard_turns_total{node=\"n1\",shard=\"0\"} 0\n"
        ));
        assert!(
            text.contains("weir_log_lines_suppressed_total{node=\"n1\",what=\"peer-unproven\"} "),
            "{text}"
        );
        assert!(text.contains("weir_shard_hangs{node=\"n1\",shard=\"1\"} 1\n"), "{text}");
        assert!(text.contains("weir_shard_longest_turn_seconds{node=\"n1\",shard=\"1\"} 1.5\n"), "{text}");
    }
}

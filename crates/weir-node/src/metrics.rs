//! A node's metrics, in Prometheus' text format, version 0.0.4.
//!
//! | metric | labels | value |
//! |---|---|---|
//! | `weir_shard_…` | `shard` | the turns of a shard |
//! | `weir_disk_limit_…` | `disk` | what the limit of a disk that is open here has delayed |
//! | `weir_disk_route` | `disk`, `state` | 1 for the state that the I/O of a disk on a LUN is in, 0 for all others |
//! | `weir_disk_route_reason` | `disk`, `reason`, `benign` | 1 for each reason that holds, 0 for all others |
//! | `weir_disk_route_parts_total` | `disk`, `route` | parts of requests by route; `zeroes`: parts of reads in holes, without I/O |
//! | `weir_disk_route_split_parts_total` | `disk` | those of requests that crossed from one extent to another |
//! | `weir_log_lines_suppressed_total` | `what` | log lines left out |
//!
//! All have the label `node`. Every state and every reason has a line, so that an alert can wait for one: `weir_disk_route_reason{benign="false"}
//! == 1`.

use std::fmt::Write;

use weir_volume::lun::route_status::{Reason, RouteCounts, RouteState};

use crate::api::ShardView;
use crate::shard::counters::DiskCounts;
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
type DiskMetric = (&'static str, &'static str, fn(&DiskCounts) -> f64);

const OF_LIMITS: [DiskMetric; 2] = [
    ("weir_disk_limit_delayed_requests_total", "Requests that waited for the disk's limit", |disk| {
        disk.delayed as f64
    }),
    ("weir_disk_limit_delay_seconds_total", "The sum of their waits", |disk| disk.waited.as_secs_f64()),
];

/// A route: its name, and how its parts are taken.
type OfRoute = (&'static str, fn(&RouteCounts) -> u64);

const ROUTES: [OfRoute; 4] = [
    (RouteState::Direct.name(), |counts| counts.direct),
    (RouteState::BlockRedirected.name(), |counts| counts.block),
    (RouteState::FileRedirected.name(), |counts| counts.file),
    ("zeroes", |counts| counts.zeroes),
];

/// The shards of `node`, the limits and routes of its open disks, the clients that it forwards, and its suppressed log lines, as
/// metrics.
#[must_use]
pub fn to_prometheus(node: &str, shards: &[ShardView], disks: &[DiskCounts], forwarded: usize) -> String {
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
        for disk in disks {
            let _ = writeln!(text, "{name}{{node=\"{node}\",disk=\"{}\"}} {}", disk.disk, value(disk));
        }
    }
    routes(&mut text, node, disks);
    let name = "weir_forwarded_clients";
    let _ =
        writeln!(text, "# HELP {name} Clients of other nodes' disks that it forwards\n# TYPE {name} gauge");
    let _ = writeln!(text, "{name}{{node=\"{node}\"}} {forwarded}");
    let name = "weir_log_lines_suppressed_total";
    let _ = writeln!(text, "# HELP {name} Log lines left out, by cause\n# TYPE {name} counter");
    for throttle in throttles::all() {
        let (what, count) = (throttle.name(), throttle.suppressed());
        let _ = writeln!(text, "{name}{{node=\"{node}\",what=\"{what}\"}} {count}");
    }
    text
}

/// The routes of the disks that are on LUNs.
fn routes(text: &mut String, node: &str, disks: &[DiskCounts]) {
    let routed = || disks.iter().filter_map(|one| Some((&one.disk, one.route.as_ref()?)));
    let name = "weir_disk_route";
    let _ = writeln!(text, "# HELP {name} 1 for the way of the disk's I/O\n# TYPE {name} gauge");
    for (disk, route) in routed() {
        for state in RouteState::ALL {
            let (label, value) = (state.name(), u8::from(state == route.state));
            let _ = writeln!(text, "{name}{{node=\"{node}\",disk=\"{disk}\",state=\"{label}\"}} {value}");
        }
    }
    let name = "weir_disk_route_reason";
    let _ = writeln!(text, "# HELP {name} 1 for each reason of that\n# TYPE {name} gauge");
    for (disk, route) in routed() {
        for reason in Reason::ALL {
            let value = u8::from(route.reasons.iter().any(|one| one == reason));
            let (reason, benign) = (reason.name(), reason.is_benign());
            let _ = writeln!(
                text,
                "{name}{{node=\"{node}\",disk=\"{disk}\",reason=\"{reason}\",benign=\"{benign}\"}} {value}"
            );
        }
    }
    let name = "weir_disk_route_parts_total";
    let _ = writeln!(text, "# HELP {name} Parts of requests, by route\n# TYPE {name} counter");
    for (disk, status) in routed() {
        for (route, value) in ROUTES {
            let value = value(&status.counts);
            let _ = writeln!(text, "{name}{{node=\"{node}\",disk=\"{disk}\",route=\"{route}\"}} {value}");
        }
    }
    let name = "weir_disk_route_split_parts_total";
    let help = "Parts of requests that crossed from one extent to another";
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} counter");
    for (disk, route) in routed() {
        let _ = writeln!(text, "{name}{{node=\"{node}\",disk=\"{disk}\"}} {}", route.counts.splits);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::health::Health;
    use weir_block::Nanos;
    use weir_volume::lun::route_status::{Reasons, RouteStatus};

    #[test]
    fn each_metric_has_a_line_for_each_shard() {
        let well = ShardView::new(0, &Health::default().look(Nanos(1)));
        let ill = ShardView { shard: 1, state: "hangs".into(), longest_turn_ms: 1500.0, ..well.clone() };
        let waited = std::time::Duration::from_millis(1500);
        let delayed = DiskCounts { disk: "db".into(), delayed: 3, waited, route: None };
        let text = to_prometheus("n1", &[well, ill], &[delayed], 2);
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
        assert!(
            text.contains("# TYPE weir_forwarded_clients gauge\nweir_forwarded_clients{node=\"n1\"} 2\n")
        );
        assert!(text.contains("weir_shard_hangs{node=\"n1\",shard=\"1\"} 1\n"), "{text}");
        assert!(text.contains("weir_shard_longest_turn_seconds{node=\"n1\",shard=\"1\"} 1.5\n"), "{text}");
    }

    #[test]
    fn routes_have_their_state_their_reasons_and_their_parts() {
        let reasons = Reasons::default().with(Reason::NoDiskConnectivity, true);
        let counts = RouteCounts { direct: 5, block: 4, file: 3, zeroes: 2, splits: 1 };
        let route = RouteStatus { state: RouteState::BlockRedirected, reasons, counts };
        let disk = |name: &str, route| {
            let waited = std::time::Duration::ZERO;
            DiskCounts { disk: name.into(), delayed: 0, waited, route }
        };
        let text = to_prometheus("n1", &[], &[disk("a", Some(route)), disk("b", None)], 0);
        let values: Vec<&str> = text.lines().filter(|line| line.starts_with("weir_disk_route")).collect();
        let of = |labels: &str| {
            let line = values.iter().find(|line| line.contains(labels));
            line.and_then(|line| line.rsplit_once(' ')).unwrap_or_else(|| panic!("{labels} in {text}")).1
        };
        for (labels, value) in [
            ("weir_disk_route{node=\"n1\",disk=\"a\",state=\"block-redirected\"}", "1"),
            ("disk=\"a\",state=\"direct\"}", "0"),
            ("disk=\"a\",reason=\"no-disk-connectivity\",benign=\"false\"}", "1"),
            ("weir_disk_route_reason{node=\"n1\",disk=\"a\",reason=\"user-request\",benign=\"true\"}", "0"),
            ("weir_disk_route_parts_total{node=\"n1\",disk=\"a\",route=\"direct\"}", "5"),
            ("route=\"block-redirected\"}", "4"),
            ("route=\"file-redirected\"}", "3"),
            ("route=\"zeroes\"}", "2"),
            ("weir_disk_route_split_parts_total{node=\"n1\",disk=\"a\"}", "1"),
        ] {
            assert_eq!(of(labels), value, "{labels}");
        }
        let present = values.iter().filter(|line| line.contains("state=") && line.ends_with(" 1"));
        assert_eq!(present.count(), 1, "{text}");
        assert!(!text.contains("disk=\"b\",state") && !text.contains("disk=\"b\",route"), "{text}");
    }
}

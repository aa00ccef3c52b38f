//! `weir explain`

use std::time::Duration;

use serde::Serialize;
use weir_block::Nanos;
use weir_diagnose::live::{Acknowledged, Explanation, HeldBack, Look, Totals, Window, explain};
use weir_node::api::{DiskView, MeterView};
use weir_node::units::{Period, about};
use weir_report::format;

use crate::cluster::owner_of;
use crate::failure::Failure;
use crate::options::Global;
use crate::output::{print_as, table};

#[derive(Serialize)]
struct Explained {
    disk: DiskView,
    #[serde(flatten)]
    explanation: Explanation,
}

/// Samples the meters of a disk twice, and shows the layers in which its requests spent their time in between.
pub fn run(global: &Global, name: &str, between: Period) -> Result<(), Failure> {
    let client = owner_of(global, name)?;
    let held_before = held_back(&client.disk(name)?);
    let before = look(&client.meters(name)?);
    let start = Nanos::now();
    std::thread::sleep(between.0.max(Duration::from_millis(100)));
    let after = look(&client.meters(name)?);
    let elapsed = Nanos::now() - start;
    let disk = client.disk(name)?;
    let mut explanation = explain(&before, &after, elapsed, acknowledged(&disk));
    explanation.findings.extend(held_back(&disk).since(held_before).finding(&limit(&disk)));
    print_as(global.output, "weir.explanation/1", &Explained { disk, explanation }, text)
}

/// What the disk's limit has held back so far.
pub fn held_back(disk: &DiskView) -> HeldBack {
    let delays = disk.detail.as_ref().map(|detail| detail.limit_delays).unwrap_or_default();
    HeldBack { requests: delays.requests, seconds: delays.seconds, waiting: delays.waiting }
}

/// The disk's limit. One that ended during the time between may have held requests back, too.
pub fn limit(disk: &DiskView) -> String {
    disk.limit.map_or_else(|| "none now".to_owned(), |limit| limit.to_string())
}

/// The present point of acknowledgement of the disk's writes.
pub fn acknowledged(disk: &DiskView) -> Acknowledged {
    if disk.effective == "write-through" { Acknowledged::FromBacking } else { Acknowledged::FromLog }
}

/// A sample of the meters.
pub fn look(meters: &[MeterView]) -> Look {
    let kinds = |meter: &MeterView| {
        let of = |kind: &weir_node::api::KindView| {
            let totals = Totals {
                requests: kind.completions,
                bytes: kind.bytes,
                errors: kind.errors,
                latency: kind.latency_ns.iter().copied().collect(),
            };
            (kind.kind.name().to_owned(), totals)
        };
        meter.kinds.iter().map(of).collect()
    };
    meters.iter().map(|meter| (meter.layer.clone(), kinds(meter))).collect()
}

fn text(explained: &Explained) -> String {
    let Explained { disk, explanation } = explained;
    let micros = |value: f64| format::duration(value * 1e3);
    let row = |window: &Window| {
        vec![
            window.kind.clone(),
            window.layer.clone(),
            format!("{:.0}/s", window.rate),
            format!("{}/s", about(window.bytes_per_second as u64)),
            micros(window.mean_us),
            micros(window.p50_us),
            micros(window.p99_us),
            format!("{:.1}", window.in_flight),
            window.own_us.map_or_else(|| "-".into(), micros),
            window.share.map_or_else(|| "-".into(), |share| format!("{:.0} %", share * 100.0)),
        ]
    };
    let header = ["KIND", "LAYER", "RATE", "BYTES", "MEAN", "P50", "P99", "IN FLIGHT", "OWN", "SHARE"];
    let mut lines = Vec::new();
    if !explanation.windows.is_empty() {
        let rows = explanation.windows.iter().map(row);
        lines.extend([table(&header, &[2, 3, 4, 5, 6, 7, 8, 9], rows), String::new()]);
    }
    lines.extend(explanation.findings.iter().cloned());
    lines.extend(destage(disk));
    lines.join("\n")
}

/// The state of the log: when it fills, the owner slows writes to the storage's rate.
fn destage(disk: &DiskView) -> Option<String> {
    let detail = disk.detail.as_ref().filter(|detail| detail.dirty_bytes > 0)?;
    let clean = super::disk::clean_in(detail)
        .map_or_else(|why| format!("time to clean unknown: {why}"), |time| format!("clean in {time}"));
    let full = detail.log_used_bytes as f64 / detail.log_bytes.max(1) as f64;
    let slowed = if full > 0.5 { "; writes are being slowed to what the storage takes" } else { "" };
    Some(format!("log: {} dirty, {:.0} % full, {clean}{slowed}", about(detail.dirty_bytes), full * 100.0))
}

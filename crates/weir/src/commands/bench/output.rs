//! The results of a load, for people and in each format for programs.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;
use weir_formats::fio;
use weir_load::report::{Report, to_csv, to_prometheus};
use weir_load::summary::{KindSummary, Latency, LatencyFrom, Summary};
use weir_report::format;

use crate::cli::BenchFormat;
use crate::failure::Failure;
use crate::output::{say, table};

/// The results of all loads that ran, and the reason if some did not complete.
pub type Outcome = (Vec<Summary>, Option<Failure>);

/// Prints the measurements.
pub fn print(format: BenchFormat, summaries: &[Summary]) -> Result<(), Failure> {
    match format {
        BenchFormat::Text => {
            let named = |summary: &Summary| match &summary.name {
                Some(name) => {
                    format!("{name}: {} on {}\n{}", summary.workload, summary.target, text(summary))
                }
                None => text(summary),
            };
            say(&summaries.iter().map(named).collect::<Vec<_>>().join("\n\n"))
        }
        BenchFormat::Json => match summaries {
            [summary] if summary.name.is_none() => json(summary),
            _ => json(&Report::new(summaries.to_vec())),
        },
        BenchFormat::Jsonl => summaries
            .iter()
            .try_for_each(|summary| say(&serde_json::to_string(summary).map_err(Failure::failed)?)),
        BenchFormat::Csv => say(to_csv(summaries).trim_end()),
        BenchFormat::Prom => say(to_prometheus(summaries).trim_end()),
        BenchFormat::Fio => json(&fio::to_json(summaries, time_of_day().as_secs_f64())),
    }
}

/// Since 1970.
#[expect(clippy::disallowed_methods, reason = "fio's JSON carries the time of day, for people")]
fn time_of_day() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

fn json<T: Serialize>(value: &T) -> Result<(), Failure> {
    say(&serde_json::to_string_pretty(value).map_err(Failure::failed)?)
}

fn text(summary: &Summary) -> String {
    let header = ["KIND", "IOPS", "MIB/S", "MEAN", "P50", "P99", "P99.9", "P99.999", "MAX", "ERRORS"];
    let rows = |latency: fn(&KindSummary) -> Latency| {
        table(
            &header,
            &[1, 2, 3, 4, 5, 6, 7, 8, 9],
            summary.kinds.iter().map(|kind| row(kind, &latency(kind))),
        )
    };
    let mut text = rows(|kind| kind.latency_ns);
    if summary.latency_from == LatencyFrom::IntendedStart {
        text = format!(
            "latency from the intended start:\n{text}\n\nlatency from the issue (without the wait for room in the queue):\n{}",
            rows(|kind| kind.issue_latency_ns.unwrap_or_default())
        );
    }
    if let (Some(cpu), Some(rate)) = (summary.cpu_seconds, summary.ios_per_cpu_second()) {
        text.push_str(&format!("\nload generator: {cpu:.2} CPU seconds, {rate:.0} requests per CPU second"));
    }
    for remark in summary.remarks() {
        text.push_str(&format!("\nnote: {remark}"));
    }
    if let Some(reason) = &summary.incomplete {
        text.push_str(&format!("\nINCOMPLETE: {reason}"));
    }
    if let Some(error) = &summary.first_error {
        text.push_str(&format!("\nfirst error: {error}"));
    }
    if let Some(found) = &summary.verification {
        text.push_str(&format!("\nchecked {} blocks, {} wrong", found.checked, found.mismatches));
        let kinds: Vec<String> =
            found.faults.iter().map(|(fault, count)| format!("{count} {fault}")).collect();
        if !kinds.is_empty() {
            text.push_str(&format!(": {}", kinds.join(", ")));
        }
        for line in &found.first {
            text.push_str(&format!("\n  {line}"));
        }
    }
    text
}

fn row(kind: &KindSummary, latency: &Latency) -> Vec<String> {
    vec![
        kind.kind.name().to_owned(),
        format!("{:.0}", kind.iops),
        format!("{:.1}", kind.mib_per_second),
        format::duration(latency.mean),
        format::duration(latency.p50 as f64),
        format::duration(latency.p99 as f64),
        format::duration(latency.p99_9 as f64),
        format::duration(latency.p99_999 as f64),
        format::duration(latency.max as f64),
        kind.errors.to_string(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_load::tally::{IoKind, Tally};
    use weir_load::workload::Workload;

    #[test]
    fn the_table_names_every_figure() {
        let mut tally = Tally::default();
        for latency in 1..=1000 {
            tally.count(IoKind::Read, 4096, latency * 1000, true);
        }
        let mut summary =
            Summary::new("null", "null", &Workload::default(), &tally, Duration::from_millis(500));
        summary.cpu_seconds = Some(0.25);
        summary.never_made = 3;
        let text = text(&summary);
        for word in ["P99.999", " 2000 ", "0.25 CPU seconds, 4000 requests", "1.00 ms", "note: 3 of 1003"] {
            assert!(text.contains(word), "{word} in\n{text}");
        }
    }
}

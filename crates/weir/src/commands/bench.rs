//! `weir bench`

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use weir_load::Arrivals;
use weir_load::run::Monitor;
use weir_load::size::Size;
use weir_load::summary::{KindSummary, Latency, LatencyFrom, Summary, format_latency};
use weir_load::target::Target;
use weir_load::workload::Workload;
use weir_node::api::RunLoad;

use crate::cli::{BenchArgs, Global};
use crate::cluster::owner_of;
use crate::failure::Failure;
use crate::output::{print, table};

/// Carries out `weir bench`.
pub fn run(global: &Global, arguments: &BenchArgs) -> Result<(), Failure> {
    let workload = workload(arguments);
    workload.validate().map_err(Failure::usage)?;
    let total = arguments.runtime.0 + arguments.warmup.0;
    let summary = match (&arguments.disk, &arguments.target, arguments.layer) {
        (Some(disk), _, Some(layer)) => {
            if workload.access.writes() && !arguments.destroy {
                return Err(Failure::refused(format!(
                    "a writing load overwrites disk {disk}; --destroy allows it"
                )));
            }
            let client = owner_of(global, disk)?;
            with_progress(total, &format!("{disk} {layer:?}"), || {
                client.load(disk, &RunLoad { layer: layer.into(), workload }).map_err(Failure::from)
            })?
        }
        (_, Some(target), _) => {
            let target: Target = target.parse().map_err(Failure::usage)?;
            let monitor = Monitor::new();
            with_progress(total, &target.to_string(), || {
                weir_load::run::run(&target, &workload, arguments.destroy, &monitor).map_err(Failure::failed)
            })?
        }
        _ => return Err(Failure::usage("name a target, or --disk and --layer")),
    };
    print(global.output, &summary, text)?;
    if summary.is_clean() {
        Ok(())
    } else {
        Err(Failure::failed("there were errors, or data was wrong; see above"))
    }
}

fn workload(arguments: &BenchArgs) -> Workload {
    Workload {
        access: arguments.access,
        pattern: arguments.pattern,
        block_size: arguments.block_sizes.largest(),
        mix: (arguments.block_sizes.shares().len() > 1).then(|| arguments.block_sizes.clone()),
        alignment: arguments.align.map(|size| Size(size.0)),
        queue_depth: arguments.depth,
        threads: arguments.threads,
        runtime: Some(arguments.runtime.0),
        bytes: arguments.bytes.map(|size| Size(size.0)),
        warmup: arguments.warmup.0,
        offset: Size(arguments.offset.0),
        size: arguments.size.map(|size| Size(size.0)),
        rate: arguments.rate,
        arrivals: if arguments.poisson { Arrivals::Poisson } else { Arrivals::Fixed },
        seed: arguments.seed,
        verify: arguments.verify,
        fua: arguments.fua,
    }
}

/// Shows how far a load of a known length is, on a terminal only.
pub fn with_progress<T>(total: Duration, what: &str, work: impl FnOnce() -> T) -> T {
    let bar = ProgressBar::new(total.as_millis() as u64).with_message(what.to_owned());
    let style = ProgressStyle::with_template("{msg} {bar:40} {elapsed}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let ticking = bar.clone();
    let done = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let ended = std::sync::Arc::clone(&done);
    let ticker = std::thread::spawn(move || {
        while !ended.load(std::sync::atomic::Ordering::Relaxed) {
            ticking.set_position(ticking.elapsed().as_millis() as u64);
            std::thread::park_timeout(Duration::from_millis(100));
        }
    });
    let result = work();
    done.store(true, std::sync::atomic::Ordering::Relaxed);
    ticker.thread().unpark();
    let _ = ticker.join();
    bar.finish_and_clear();
    result
}

fn text(summary: &Summary) -> String {
    let header = ["KIND", "IOPS", "MIB/S", "MEAN", "P50", "P99", "P99.9", "MAX", "ERRORS"];
    let rows = |latency: fn(&KindSummary) -> Latency| {
        table(&header, &[1, 2, 3, 4, 5, 6, 7, 8], summary.kinds.iter().map(|kind| row(kind, &latency(kind))))
    };
    let mut text = rows(|kind| kind.latency_ns);
    if summary.latency_from == LatencyFrom::IntendedStart {
        text = format!(
            "latency from the intended start:\n{text}\n\nlatency from the issue (hides what waited for room in the queue):\n{}",
            rows(|kind| kind.issue_latency_ns.unwrap_or_default())
        );
    }
    if summary.never_made > 0 {
        text.push_str(&format!(
            "\n{} requests were due and never made: the queue was full at the end",
            summary.never_made
        ));
    }
    if let Some(error) = &summary.first_error {
        text.push_str(&format!("\nfirst error: {error}"));
    }
    if let Some(found) = &summary.verification {
        text.push_str(&format!("\nchecked {} blocks, {} wrong", found.checked, found.mismatches));
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
        format_latency(latency.mean),
        format_latency(latency.p50 as f64),
        format_latency(latency.p99 as f64),
        format_latency(latency.p99_9 as f64),
        format_latency(latency.max as f64),
        kind.errors.to_string(),
    ]
}

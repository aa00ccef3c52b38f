//! The measurement of a disk or of a described stack: its extent, its duration, and the saving of its rows.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use weir_block::Nanos;
use weir_diagnose::counters::Tracer;
use weir_diagnose::load::{LoadOptions, LoadTarget};
use weir_diagnose::tier::{self, RUNTIME};
use weir_diagnose::{Diagnosis, Environment, Plan, Progress, RunOutcome, Start, Target, measure};
use weir_load::run::Monitor;
use weir_node::client::Client;
use weir_node::units::about;

use super::files::{Outcome, check_writable, json_of, replace};
use super::layers::Disk;
use super::progress::{Shown, minutes};
use super::settings::Settings;
use super::subject::Subject;
use super::trace;
use crate::failure::Failure;
use crate::output::note;

/// Maximum size of the measured range, in bytes: larger than the caches of a small machine's processor, and fast to fill.
const RANGE: u64 = 256 << 20;

/// The range is a multiple of this: it is filled in such pieces.
const FILL_BLOCK: u64 = 1 << 20;

/// Longest interval between saves of the rows.
const SAVE_EVERY: Duration = Duration::from_secs(5);

/// A resumed measurement must have runs of the same length, within this share.
const SAME_LENGTH: f64 = 0.2;

/// Measures a disk through the API of its owner and writes the report.
pub fn diagnose(client: &Client, disk: &str, settings: &Settings) -> Result<Outcome, Failure> {
    let disk = Disk::open(client, disk, settings)?;
    disk.is_alone()?;
    let outcome = conduct(&disk, settings);
    // Restore also after a failure.
    disk.restore().and(outcome)
}

/// Measures the subject's layers and writes the report.
pub fn conduct(subject: &dyn Subject, settings: &Settings) -> Result<Outcome, Failure> {
    let range = range(subject)?;
    let start = start(subject, settings)?;
    let seed = match &start {
        Start::Fresh(environment) => settings.seed.unwrap_or(environment.started_unix),
        Start::Resume(earlier) => settings.seed.unwrap_or(earlier.seed),
    };
    let monitor = Monitor::new();
    // The number of layers decides how long each run may be.
    let any = options(settings, range, RUNTIME, seed);
    let count = settings.wanted(subject.layers(&any, &monitor)?)?.len();
    let (runtime, left) = settings.time(count)?;
    same_length(&start, runtime)?;
    let start = with_command(start, seed, settings);
    let (extra_runs, follow_ups) = settings.shares(left);
    let plan = Plan { cells: settings.cells(), repeats: settings.repeats, extra_runs, follow_ups, seed };
    let options = options(settings, range, runtime, seed);
    announce(&plan, count, runtime);
    subject.caution(settings.destroy).into_iter().for_each(|caution| note(&format!("note: {caution}")));
    // Fail early if the report cannot be written.
    check_writable(&settings.report)?;
    if settings.destroy {
        subject.fill(&options, &monitor)?;
        note(&format!("filled {} before the measurement", about(range)));
    }
    let mut targets = settings.wanted(subject.layers(&options, &monitor)?)?;
    let tracer = settings.trace.as_deref().and_then(trace::start);
    let start = with_source(start, settings, tracer.as_ref());
    if let Some(tracer) = tracer {
        targets = trace::traced(targets, tracer);
    }
    let alone = LoadTarget::new("generator alone", alone(range), options, &monitor).as_reference();
    targets.push(Box::new(alone));
    let diagnosis = go(&plan, &mut targets, start, settings)?;
    Outcome::write(diagnosis, &settings.report, &settings.thresholds)
}

pub(super) fn range(subject: &dyn Subject) -> Result<u64, Failure> {
    match subject.size().min(RANGE) & !(FILL_BLOCK - 1) {
        0 => Err(Failure::refused(format!("{} is smaller than {}", subject.name(), about(FILL_BLOCK)))),
        range => Ok(range),
    }
}

fn start(subject: &dyn Subject, settings: &Settings) -> Result<Start, Failure> {
    let name = subject.name();
    if !settings.resume {
        let mut environment = Environment::here(name, &subject.node(), std::env::args());
        environment.versions.insert("weir".to_owned(), env!("CARGO_PKG_VERSION").to_owned());
        return Ok(Start::Fresh(environment));
    }
    let json = json_of(&settings.report);
    let wrong = |problem: &dyn std::fmt::Display| Failure::usage(format!("{}: {problem}", json.display()));
    let text = std::fs::read_to_string(&json).map_err(|error| Failure::unreadable(&json, &error))?;
    let earlier = Diagnosis::from_json(&text).map_err(|error| wrong(&error))?;
    if earlier.environment.disk != name {
        return Err(wrong(&format!("it is of {}", earlier.environment.disk)));
    }
    Ok(Start::Resume(earlier))
}

/// Refuses to mix short and long runs in one measurement. Compares the median: on a busy machine a few runs end late.
fn same_length(start: &Start, runtime: Duration) -> Result<(), Failure> {
    let Start::Resume(earlier) = start else { return Ok(()) };
    let lengths = earlier.rows.iter().filter_map(|row| match &row.outcome {
        RunOutcome::Measured(measurement) => measurement.runtime_seconds,
        _ => None,
    });
    let mut lengths: Vec<f64> = lengths.collect();
    lengths.sort_by(f64::total_cmp);
    let length = lengths.get(lengths.len() / 2).copied();
    let same = |length: &f64| (length / runtime.as_secs_f64() - 1.0).abs() <= SAME_LENGTH;
    match length.filter(|length| !same(length)) {
        Some(length) => Err(Failure::usage(format!(
            "the runs to be gone on with took {length:.2} s each, these would take {:.2} s; give the same --runtime or --budget",
            runtime.as_secs_f64()
        ))),
        None => Ok(()),
    }
}

/// A seed from the clock is part of the command that repeats the measurement.
fn with_command(start: Start, seed: u64, settings: &Settings) -> Start {
    match start {
        Start::Fresh(mut environment) if settings.seed.is_none() => {
            environment.command.push_str(&format!(" --seed {seed}"));
            Start::Fresh(environment)
        }
        start => start,
    }
}

/// The source of the block layer's numbers is part of the result.
fn with_source(start: Start, settings: &Settings, tracer: Option<&Tracer>) -> Start {
    let source = match (tracer, &settings.trace) {
        (Some(tracer), _) => format!("tracepoints of {}, by bpftrace", tracer.device()),
        (None, Some(device)) => format!("/proc/diskstats; {device} could not be traced"),
        (None, None) => "/proc/diskstats".to_owned(),
    };
    match start {
        Start::Fresh(mut environment) => {
            environment.versions.insert("block layer counted by".to_owned(), source);
            Start::Fresh(environment)
        }
        start => start,
    }
}

fn announce(plan: &Plan, layers: usize, runtime: Duration) {
    let runs = plan.cells.len() * layers * plan.repeats as usize;
    note(&format!(
        "{} cells × {layers} layers × {} repeats: {runs} runs of {:.1} s, {}, {} at most; seed {}",
        plan.cells.len(),
        plan.repeats,
        runtime.as_secs_f64(),
        minutes(tier::time_of(runs, runtime)),
        minutes(tier::time_of(runs + plan.extra_runs + plan.follow_ups, runtime)),
        plan.seed
    ));
}

fn go(
    plan: &Plan,
    targets: &mut [Box<dyn Target + '_>],
    start: Start,
    settings: &Settings,
) -> Result<Diagnosis, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    let mut shown = Shown::new();
    let json = json_of(&settings.report);
    let mut saved = Nanos::now();
    let mut show = |progress: Progress<'_>| match progress {
        Progress::Starting { done, total, layer, run } => {
            shown.step(done, total, &format!("{layer}: {}", run.cell));
        }
        Progress::Finished { done, total, so_far, .. } => {
            shown.step(done, total, "");
            if Nanos::now().since(saved) >= SAVE_EVERY {
                saved = Nanos::now();
                // A disk that is full now may have space at the end: the measurement continues, with the rows in memory.
                let text = so_far.to_json().map_err(Failure::failed);
                if let Err(failure) = text.and_then(|text| replace(&json, &text)) {
                    shown.say(&format!("weir: {}", failure.message));
                }
            }
        }
    };
    let diagnosis = interruptible(&stop, || measure(plan, targets, start, &stop, &mut show))?;
    diagnosis.map_err(Failure::usage)
}

/// Ctrl-C ends the measurement after the current run, and keeps the rows.
fn interruptible<T>(stop: &Arc<AtomicBool>, work: impl FnOnce() -> T) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let stop = Arc::clone(stop);
    runtime.spawn(async move {
        if tokio::signal::ctrl_c().await.is_ok() {
            stop.store(true, Ordering::Relaxed);
        }
    });
    let result = work();
    runtime.shutdown_background();
    Ok(result)
}

/// The null target: measures the generator alone.
fn alone(size: u64) -> weir_load::Target {
    weir_load::Target::Null { size }
}

/// The common options of all runs.
pub(super) fn options(settings: &Settings, range: u64, runtime: Duration, seed: u64) -> LoadOptions {
    let warmup = tier::warmup(runtime);
    LoadOptions { runtime, warmup, size: Some(range), seed, destroy: settings.destroy }
}

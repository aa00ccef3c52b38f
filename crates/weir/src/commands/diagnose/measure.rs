//! The measurement of a disk or of a described stack: how much, how long, and that nothing of it is lost.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use weir_block::Nanos;
use weir_diagnose::counters::Tracer;
use weir_diagnose::load::{LoadOptions, LoadTarget};
use weir_diagnose::tier::{self, RUNTIME};
use weir_diagnose::{
    Cell, Diagnosis, Direction, Environment, Plan, Progress, RunOutcome, Start, Target, Threshold, measure,
};
use weir_load::run::Monitor;
use weir_node::api::DiskView;
use weir_node::client::Client;
use weir_node::units::about;

use super::files::{Outcome, check_writable, json_of, replace};
use super::layers::Disk;
use super::trace;
use crate::cli::{DiagnoseArgs, Global};
use crate::failure::Failure;
use crate::output::print;

/// Bytes that are measured on, at most: more than any cache of a small machine's processor, soon filled.
const RANGE: u64 = 256 << 20;

/// The range is a multiple of this: it is filled in such pieces.
const FILL_BLOCK: u64 = 1 << 20;

/// What was measured so far is written down at least this often.
const SAVE_EVERY: Duration = Duration::from_secs(5);

/// The part of a budget that the planned repeats take; the rest is for steps that need more.
const PLANNED_SHARE: f64 = 0.75;

/// Time for everything when neither a budget nor a run's time is given.
const BUDGET: Duration = Duration::from_secs(600);

/// A resumed measurement must have runs of the same length, within this share.
const SAME_LENGTH: f64 = 0.2;

/// What is to be measured, apart from the disk.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Writes are allowed.
    pub destroy: bool,
    /// The cells; those that write are left out unless `destroy` is set.
    pub cells: Vec<Cell>,
    /// Runs of each cell on each layer.
    pub repeats: u32,
    /// Runs for steps that cannot be told, at most; `None`: as many as fit.
    pub more: Option<usize>,
    /// Whether hypotheses get the runs that they ask for.
    pub follow_ups: bool,
    /// Layers whose names begin like this are left out.
    pub without: Vec<String>,
    /// Time for each run, unless a budget shortens it.
    pub runtime: Duration,
    /// Time for everything.
    pub budget: Option<Duration>,
    /// Seed of the order; `None` takes one from the clock.
    pub seed: Option<u64>,
    /// Goes on with what is beside the report.
    pub resume: bool,
    /// The report's HTML file; JSON and JUnit go beside it.
    pub report: PathBuf,
    /// Other policies to measure; `None`: all that the nodes allow.
    pub policies: Option<Vec<String>>,
    /// Process ids of other nodes on this machine, whose processor time is watched.
    pub replicas: Vec<u32>,
    /// A block device whose requests are traced, by its name in `/sys/class/block`.
    pub trace: Option<String>,
    /// What JUnit counts as a failure.
    pub thresholds: Vec<Threshold>,
}

impl Settings {
    /// What the command line asks for.
    pub fn of(arguments: &DiagnoseArgs) -> Settings {
        Settings {
            destroy: arguments.destroy,
            cells: arguments.tier.tier().cells(),
            repeats: arguments.repeats,
            more: arguments.more,
            follow_ups: true,
            without: arguments.without.clone(),
            runtime: arguments.runtime.as_ref().map_or(RUNTIME, |period| period.0),
            budget: match (&arguments.budget, &arguments.runtime) {
                (Some(budget), _) => Some(budget.0),
                (None, Some(_)) => None,
                (None, None) => Some(BUDGET),
            },
            seed: arguments.seed,
            resume: arguments.resume,
            report: arguments.report.clone(),
            policies: (!arguments.policies.is_empty())
                .then(|| arguments.policies.iter().filter(|policy| *policy != "none").cloned().collect()),
            replicas: Vec::new(),
            trace: arguments.trace.clone(),
            thresholds: arguments.fail_on.clone(),
        }
    }

    /// Runs for steps that cannot be told, and runs that hypotheses may ask for: half of what is left each.
    fn shares(&self, left: usize) -> (usize, usize) {
        let more = (left - left / 2).min(self.more.unwrap_or(usize::MAX));
        (more, if self.follow_ups { left / 2 } else { 0 })
    }

    /// The layers that are not left out.
    fn wanted<'a>(
        &self,
        mut layers: Vec<Box<dyn Target + 'a>>,
    ) -> Result<Vec<Box<dyn Target + 'a>>, Failure> {
        for start in &self.without {
            let count = layers.len();
            layers.retain(|layer| !layer.name().starts_with(start.as_str()));
            if layers.len() == count {
                let names: Vec<&str> = layers.iter().map(|layer| layer.name()).collect();
                return Err(Failure::usage(format!(
                    "--without {start}: no layer begins so; there are {}",
                    names.join(", ")
                )));
            }
        }
        Ok(layers)
    }

    fn cells(&self) -> Vec<Cell> {
        let allowed = |cell: &&Cell| self.destroy || cell.shape.direction == Direction::Read;
        self.cells.iter().filter(allowed).copied().collect()
    }

    /// The time of each run and the runs beyond the planned ones, for so many layers.
    fn time(&self, layers: usize) -> Result<(Duration, usize), Failure> {
        if self.runtime.is_zero() {
            return Err(Failure::usage("--runtime must be longer than zero"));
        }
        let runs = self.cells().len() * layers * self.repeats as usize;
        let Some(budget) = self.budget else {
            return Ok((self.runtime, runs));
        };
        let runtime = tier::runtime_within(budget.mul_f64(PLANNED_SHARE), runs, self.runtime).map_err(|least| {
            let least = least.div_f64(PLANNED_SHARE);
            Failure::usage(format!(
                "{runs} runs do not fit into {}: the smallest possible budget is {}; use --budget {}, a smaller --tier or fewer \
                 --repeats",
                spelled(budget),
                spelled(least),
                spelled(least)
            ))
        })?;
        let left = budget.saturating_sub(tier::time_of(runs, runtime)).as_secs_f64();
        let more = (left / tier::time_of(1, runtime).as_secs_f64()) as usize;
        Ok((runtime, more.min(runs)))
    }
}

/// What is measured: layers that lead to the same storage.
pub trait Subject {
    /// The disk's name, or the stack's.
    fn name(&self) -> &str;

    /// The node that measures, or has the disk.
    fn node(&self) -> String;

    /// Bytes.
    fn size(&self) -> u64;

    /// The layers, those on the way from the bottom up.
    fn layers<'a>(
        &'a self,
        options: &LoadOptions,
        monitor: &'a Monitor,
    ) -> Result<Vec<Box<dyn Target + 'a>>, Failure>;

    /// Writes the whole range once, so that nothing measures holes.
    fn fill(&self, options: &LoadOptions, monitor: &Monitor) -> Result<(), Failure>;

    /// What is taken on trust.
    fn caution(&self, _destroy: bool) -> Option<&'static str> {
        None
    }
}

/// What a measurement will do.
#[derive(Debug, Serialize)]
struct Intent {
    cells: Vec<String>,
    layers: Vec<String>,
    repeats: u32,
    runs: usize,
    extra_runs_at_most: usize,
    /// Bytes of the disk that are filled first and then overwritten again and again; 0 when only reads are measured.
    bytes_overwritten: u64,
    /// Bytes of the disk that are measured on.
    bytes_range: u64,
    seconds_per_run: f64,
    seconds: f64,
    seconds_at_most: f64,
}

impl Intent {
    fn text(&self) -> String {
        let mut lines: Vec<String> = self.cells.iter().map(|cell| format!("  {cell}")).collect();
        lines.insert(0, format!("{} cells:", self.cells.len()));
        lines.push(format!("{} layers: {}", self.layers.len(), self.layers.join(", ")));
        lines.push(format!(
            "{} runs of {:.1} s ({} repeats), up to {} more where a step is inconclusive",
            self.runs, self.seconds_per_run, self.repeats, self.extra_runs_at_most
        ));
        lines.push(match self.bytes_overwritten {
            0 => format!("bytes: {} are read, none written (no --destroy)", about(self.bytes_range)),
            bytes => format!("bytes: {} are filled, then overwritten in every writing run", about(bytes)),
        });
        let time = |seconds: f64| minutes(Duration::from_secs_f64(seconds));
        lines.push(format!("time: {}, {} at most", time(self.seconds), time(self.seconds_at_most)));
        lines.join("\n")
    }
}

/// Says what would be done.
pub fn dry_run(global: &Global, subject: &dyn Subject, settings: &Settings) -> Result<(), Failure> {
    let range = range(subject)?;
    let (monitor, options) = (Monitor::new(), options(settings, range, RUNTIME, 0));
    let targets = settings.wanted(subject.layers(&options, &monitor)?)?;
    let (cells, (runtime, extra)) = (settings.cells(), settings.time(targets.len())?);
    let runs = cells.len() * targets.len() * settings.repeats as usize;
    let (more, follow_ups) = settings.shares(extra);
    let intent = Intent {
        cells: cells.iter().map(Cell::to_string).collect(),
        layers: targets.iter().map(|target| target.name().to_owned()).collect(),
        repeats: settings.repeats,
        runs,
        extra_runs_at_most: more + follow_ups,
        bytes_overwritten: if settings.destroy { range } else { 0 },
        bytes_range: range,
        seconds_per_run: runtime.as_secs_f64(),
        seconds: tier::time_of(runs, runtime).as_secs_f64(),
        seconds_at_most: tier::time_of(runs + more + follow_ups, runtime).as_secs_f64(),
    };
    print(global.output, &intent, Intent::text)
}

/// Measures a disk through the API of its owner and writes the report.
pub fn diagnose(client: &Client, disk: &str, settings: &Settings) -> Result<Outcome, Failure> {
    let disk = Disk::open(client, disk, settings)?;
    disk.is_alone()?;
    let outcome = conduct(&disk, settings);
    // Whatever became of it.
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
    subject.caution(settings.destroy).into_iter().for_each(|caution| eprintln!("note: {caution}"));
    // What cannot be written in the end is not worth the time.
    check_writable(&settings.report)?;
    if settings.destroy {
        subject.fill(&options, &monitor)?;
        eprintln!("filled {} before the measurement", about(range));
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

/// A disk that is open on the node that is asked, and exported.
pub fn open_disk(client: &Client, disk: &str) -> Result<DiskView, Failure> {
    let view = client.disk(disk)?;
    let Some(owner) = view.owner.clone().filter(|_| view.detail.is_some()) else {
        return Err(Failure::refused(format!(
            "disk {disk} is not open on the node asked; run `weir disk export {disk}`"
        )));
    };
    if view.uris.is_empty() {
        return Err(Failure::refused(format!("node {owner} exports nothing; set nbd.unix or nbd.tcp")));
    }
    Ok(view)
}

fn range(subject: &dyn Subject) -> Result<u64, Failure> {
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

/// Short runs and long ones must not end up in one measurement. The middle one counts: on a busy machine one or the other
/// run ends late.
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

/// Where the block layer's numbers come from is part of the result.
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
    eprintln!(
        "{} cells × {layers} layers × {} repeats: {runs} runs of {:.1} s, {}, {} at most; seed {}",
        plan.cells.len(),
        plan.repeats,
        runtime.as_secs_f64(),
        minutes(tier::time_of(runs, runtime)),
        minutes(tier::time_of(runs + plan.extra_runs + plan.follow_ups, runtime)),
        plan.seed
    );
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
                // A disk that is full now may not be in the end: the measurement goes on, and the rows are in memory.
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

/// A time that `--budget` reads, rounded up: `95s`, `14m`.
fn spelled(time: Duration) -> String {
    let seconds = time.as_secs() + u64::from(time.subsec_nanos() > 0);
    if seconds < 120 { format!("{seconds}s") } else { format!("{}m", seconds.div_ceil(60)) }
}

/// About how long, as people say it.
fn minutes(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    if seconds < 300.0 {
        format!("about {seconds:.0} s")
    } else if seconds < 5400.0 {
        format!("about {:.0} min", seconds / 60.0)
    } else {
        format!("about {:.1} h", seconds / 3600.0)
    }
}

/// How far the measurement is: a bar on a terminal, and a line now and then in a pipe or a file.
enum Shown {
    Bar(ProgressBar),
    Lines { began: Nanos, last: Option<Nanos> },
}

/// A line in a pipe at least this often, as long as runs end.
const LINE_EVERY: Duration = Duration::from_secs(10);

impl Shown {
    fn new() -> Shown {
        if !std::io::stderr().is_terminal() {
            return Shown::Lines { began: Nanos::now(), last: None };
        }
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {msg}");
        Shown::Bar(ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar())))
    }

    /// So many runs are done; `now` is what begins, or empty.
    fn step(&mut self, done: usize, total: usize, now: &str) {
        match self {
            Shown::Bar(bar) => {
                bar.set_length(total as u64);
                bar.set_position(done as u64);
                bar.set_message(now.to_owned());
            }
            Shown::Lines { began, last } => {
                let time = Nanos::now();
                let first_or_last = last.is_none() || done == total;
                if first_or_last || last.is_some_and(|last| time.since(last) >= LINE_EVERY) {
                    *last = Some(time);
                    eprintln!("{}", line(done, total, time.since(*began), now));
                }
            }
        }
    }

    fn say(&self, text: &str) {
        match self {
            Shown::Bar(bar) => bar.suspend(|| eprintln!("{text}")),
            Shown::Lines { .. } => eprintln!("{text}"),
        }
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        if let Shown::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}

/// `48 of 240 runs, 80s elapsed; nbd unix: 4K random read, QD 32`.
fn line(done: usize, total: usize, elapsed: Duration, now: &str) -> String {
    let now = if now.is_empty() { String::new() } else { format!("; {now}") };
    format!("{done} of {total} runs, {} s elapsed{now}", elapsed.as_secs())
}

/// Ctrl-C ends the measurement after the run under way; what was measured is kept.
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

/// Nothing to wait for: what the generator can do by itself.
fn alone(size: u64) -> weir_load::Target {
    weir_load::Target::Null { size }
}

/// What all runs have in common.
fn options(settings: &Settings, range: u64, runtime: Duration, seed: u64) -> LoadOptions {
    let warmup = tier::warmup(runtime);
    LoadOptions { runtime, warmup, size: Some(range), seed, destroy: settings.destroy }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// The budget that a refusal names is one that is taken, and hardly more than what the runs need.
    #[test]
    fn the_smallest_possible_budget_is_named() {
        let cli = |line: &str| {
            use clap::Parser;
            let words = format!("weir diagnose --disk d {line}");
            match crate::cli::Cli::try_parse_from(words.split(' ')).unwrap().command {
                crate::cli::Command::Diagnose(arguments) => Settings::of(&arguments),
                _ => unreachable!("it is diagnose"),
            }
        };
        assert_eq!(cli("--tier quick").budget, Some(BUDGET));
        assert_eq!(cli("--runtime 1s").budget, None, "the time of each run decides");
        for tier in ["quick", "standard"] {
            let refused = cli(&format!("--destroy --budget 5s --tier {tier}")).time(6).unwrap_err().message;
            let least = refused.split("use --budget ").nth(1).unwrap().split(',').next().unwrap();
            let taken = cli(&format!("--destroy --budget {least} --tier {tier}"));
            assert!(taken.time(6).is_ok(), "{refused}");
            let budget = taken.budget.unwrap();
            let less = Settings {
                budget: Some(budget.mul_f64(0.9).saturating_sub(Duration::from_secs(60))),
                ..taken
            };
            assert!(less.time(6).is_err(), "{refused}");
        }
    }

    #[test]
    fn progress_in_a_pipe_is_plain_lines() {
        let text = line(48, 240, Duration::from_millis(80_500), "nbd unix: 4K random read, QD 32");
        assert_eq!(text, "48 of 240 runs, 80 s elapsed; nbd unix: 4K random read, QD 32");
        assert_eq!(line(240, 240, Duration::from_secs(1), ""), "240 of 240 runs, 1 s elapsed");
    }
}

//! `weir diagnose`: the same load on every layer of a disk. The method is `weir-diagnose`'s; here are the layers.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use weir_block::Nanos;
use weir_diagnose::load::{LoadOptions, LoadTarget};
use weir_diagnose::{
    Cell, Diagnosis, Direction, Environment, Findings, Measurement, Pattern, Plan, Position, Progress, Shape,
    Target, TargetError, find, measure,
};
use weir_load::run::Monitor;
use weir_node::api::{DiskView, RunLoad};
use weir_node::client::Client;
use weir_node::shard::messages::LoadLayer;
use weir_node::units::about;

use crate::cli::{DiagnoseArgs, Global};
use crate::cluster::owner_of;
use crate::failure::Failure;
use crate::output::print;

/// Bytes that are measured on, at most: more than any cache of a small machine's processor, soon filled.
const RANGE: u64 = 256 << 20;

/// The range is a multiple of this: it is filled in such pieces.
const FILL_BLOCK: u64 = 1 << 20;

/// The policy with the most replicas is `write-back+2`.
const MOST_REPLICAS: usize = 2;

/// Longest wait for what earlier runs left dirty, and for a policy.
const SETTLE: Duration = Duration::from_secs(60);

/// What is to be measured, apart from the disk.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Writes are allowed.
    pub destroy: bool,
    /// Time for each run.
    pub runtime: Duration,
    /// Runs of each cell on each layer.
    pub repeats: u32,
    /// Only the cells that matter most.
    pub quick: bool,
    /// Seed of the order.
    pub seed: u64,
    /// The report's HTML file; the JSON goes beside it.
    pub report: PathBuf,
}

/// What came of it.
#[derive(Debug)]
pub struct Outcome {
    /// The rows.
    pub diagnosis: Diagnosis,
    /// What follows from them.
    pub findings: Findings,
    /// The HTML file.
    pub report: PathBuf,
    /// The JSON file.
    pub json: PathBuf,
}

#[derive(Serialize)]
struct Files<'a> {
    report: &'a Path,
    json: &'a Path,
    interrupted: bool,
}

/// Carries out `weir diagnose`.
pub fn run(global: &Global, arguments: &DiagnoseArgs) -> Result<(), Failure> {
    let settings = Settings {
        destroy: arguments.destroy,
        runtime: arguments.runtime.0,
        repeats: arguments.repeats,
        quick: arguments.quick,
        seed: arguments.seed,
        report: arguments.report.clone(),
    };
    let client = owner_of(global, &arguments.disk)?;
    let outcome = diagnose(&client, &arguments.disk, &settings)?;
    let files =
        Files { report: &outcome.report, json: &outcome.json, interrupted: outcome.diagnosis.interrupted };
    print(global.output, &files, |files| {
        let table = weir_diagnose::table::render(&outcome.diagnosis, &outcome.findings);
        format!("{table}\n\nreport: {}\ndata:   {}", files.report.display(), files.json.display())
    })
}

/// Measures a disk through the API of its owner and writes the report.
pub fn diagnose(client: &Client, disk: &str, settings: &Settings) -> Result<Outcome, Failure> {
    let view = client.disk(disk)?;
    let Some(owner) = view.owner.clone().filter(|_| view.detail.is_some()) else {
        return Err(Failure::refused(format!(
            "disk {disk} is not open on the node that was asked; `weir disk export {disk}`"
        )));
    };
    if let Some(clients @ 1..) = view.detail.as_ref().map(|detail| detail.clients) {
        let message =
            format!("{clients} clients are connected to disk {disk}; their load would be measured with ours");
        return Err(Failure::refused(message));
    }
    if view.uris.is_empty() {
        return Err(Failure::refused(format!("node {owner} exports nothing; set nbd.unix or nbd.tcp")));
    }
    let range = view.size.min(RANGE) & !(FILL_BLOCK - 1);
    if range == 0 {
        return Err(Failure::refused(format!("disk {disk} is smaller than {}", about(FILL_BLOCK))));
    }
    let (options, monitor) = (options(settings, range), Monitor::new());
    let exports = exports(&view, &options, &monitor)?;
    if settings.destroy {
        exports[0].prefill().map_err(Failure::failed)?;
        progress(&format!("filled {} before the measurement", about(range)));
    }
    let other_policies = other_policies(client, &view)?;
    let mut targets = layers(client, &view, &options, &other_policies, exports);
    let plan = Plan { cells: cells(settings), repeats: settings.repeats, seed: settings.seed };
    let environment = Environment::here(disk, &owner, std::env::args());
    let stop = Arc::new(AtomicBool::new(false));
    let bar = progress_bar();
    let mut show = |progress: Progress<'_>| match progress {
        Progress::Starting { done, total, layer, run } => {
            bar.set_length(total as u64);
            bar.set_position(done as u64);
            bar.set_message(format!("{layer}: {}", run.cell));
        }
        Progress::Finished { done, .. } => bar.set_position(done as u64),
    };
    let diagnosis = interruptible(&stop, || measure(&plan, &mut targets, environment, &stop, &mut show))?;
    bar.finish_and_clear();
    drop(targets);
    client.set_policy(disk, &view.requested)?;
    write_report(diagnosis.map_err(Failure::usage)?, &settings.report)
}

/// A line for people; standard output is for the result.
fn progress(text: &str) {
    eprintln!("{text}");
}

fn progress_bar() -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {msg}");
    ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
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

fn write_report(diagnosis: Diagnosis, report: &Path) -> Result<Outcome, Failure> {
    let findings = find(&diagnosis);
    let html = weir_diagnose::report::html(&diagnosis, &findings).map_err(Failure::failed)?;
    let json = report.with_extension("json");
    let unwritten = |path: &Path| {
        let path = path.display().to_string();
        move |error: std::io::Error| Failure::failed(format!("cannot write {path}: {error}"))
    };
    std::fs::write(report, html).map_err(unwritten(report))?;
    let text = serde_json::to_string_pretty(&diagnosis).map_err(Failure::failed)?;
    std::fs::write(&json, text).map_err(unwritten(&json))?;
    Ok(Outcome { diagnosis, findings, report: report.to_owned(), json })
}

fn cells(settings: &Settings) -> Vec<Cell> {
    let quick = || {
        let shape = |direction| Shape::new(4096, Pattern::Random, direction);
        let depths = [1, 32].into_iter();
        depths
            .flat_map(|depth| [shape(Direction::Read).at(depth), shape(Direction::Write).at(depth)])
            .collect()
    };
    let cells = if settings.quick { quick() } else { Cell::standard() };
    cells.into_iter().filter(|cell| settings.destroy || cell.shape.direction == Direction::Read).collect()
}

/// What all runs have in common.
fn options(settings: &Settings, range: u64) -> LoadOptions {
    LoadOptions {
        runtime: settings.runtime,
        warmup: settings.runtime / 5,
        size: Some(range),
        seed: settings.seed,
        destroy: settings.destroy,
    }
}

/// The exports, the first on the way, others in its place.
fn exports<'a>(
    view: &DiskView,
    options: &LoadOptions,
    monitor: &'a Monitor,
) -> Result<Vec<LoadTarget<'a>>, Failure> {
    let mut exports: Vec<LoadTarget<'a>> = Vec::new();
    for uri in &view.uris {
        let name = if uri.starts_with("nbd+unix:") { "nbd unix" } else { "nbd tcp" };
        let target = LoadTarget::new(name, uri.parse().map_err(Failure::failed)?, options.clone(), monitor);
        exports.push(match exports.first() {
            Some(first) => target.instead_of(Target::name(first)),
            None => target,
        });
    }
    Ok(exports)
}

/// The policies that the disk can have with the nodes that are up, other than the one that it has.
fn other_policies(client: &Client, view: &DiskView) -> Result<Vec<String>, Failure> {
    let peers = client.status()?.nodes.iter().filter(|node| node.state == "up").count().saturating_sub(1);
    let write_back = (0..=peers.min(MOST_REPLICAS)).map(|replicas| format!("write-back+{replicas}"));
    let all = std::iter::once("write-through".to_owned()).chain(write_back);
    Ok(all.filter(|policy| *policy != view.effective).collect())
}

/// The layers, from the bottom. Each waits, before it runs, for what an earlier one left dirty, and for its policy.
fn layers<'a>(
    client: &'a Client,
    view: &DiskView,
    options: &LoadOptions,
    other_policies: &[String],
    exports: Vec<LoadTarget<'a>>,
) -> Vec<Box<dyn Target + 'a>> {
    let inside = |layer, name, position| -> Box<dyn Target + 'a> {
        Box::new(Inside { client, disk: view.name.clone(), layer, name, position, options: options.clone() })
    };
    let prepared = |policy: &str, target| -> Box<dyn Target + 'a> {
        Box::new(Prepared { client, disk: view.name.clone(), policy: policy.to_owned(), target })
    };
    let accel = format!("accel {}", view.effective);
    let on_the_way = [
        inside(LoadLayer::Backing, "backing".to_owned(), Position::OnTheWay),
        inside(LoadLayer::Accel, accel.clone(), Position::OnTheWay),
    ];
    let alternatives = other_policies.iter().map(|policy| {
        let position = Position::AlternativeTo(accel.clone());
        prepared(policy, inside(LoadLayer::Accel, format!("accel {policy}"), position))
    });
    let exports = exports.into_iter().map(|export| -> Box<dyn Target + 'a> { Box::new(export) });
    let mut layers: Vec<_> = on_the_way.map(|layer| prepared(&view.effective, layer)).into();
    layers.extend(alternatives);
    layers.extend(exports.map(|export| prepared(&view.effective, export)));
    layers
}

/// A layer inside the owner's process.
struct Inside<'a> {
    client: &'a Client,
    disk: String,
    layer: LoadLayer,
    name: String,
    position: Position,
    options: LoadOptions,
}

impl Target for Inside<'_> {
    fn name(&self) -> &str {
        &self.name
    }

    fn position(&self) -> Position {
        self.position.clone()
    }

    fn run(&mut self, cell: &Cell) -> Result<Measurement, TargetError> {
        let load = RunLoad { layer: self.layer, workload: self.options.workload(cell) };
        let summary = self.client.load(&self.disk, &load);
        Measurement::of(
            &summary.map_err(|error| TargetError::Failed(error.to_string()))?,
            cell.shape.direction,
        )
    }
}

/// A layer that runs only when the disk has come to rest under the policy that is to be measured.
struct Prepared<'a> {
    client: &'a Client,
    disk: String,
    policy: String,
    target: Box<dyn Target + 'a>,
}

impl Target for Prepared<'_> {
    fn name(&self) -> &str {
        self.target.name()
    }

    fn position(&self) -> Position {
        self.target.position()
    }

    fn run(&mut self, cell: &Cell) -> Result<Measurement, TargetError> {
        prepare(self.client, &self.disk, &self.policy)?;
        self.target.run(cell)
    }
}

/// Has the policy in effect, and waits until the log is empty and nobody is connected: no run pays for what an
/// earlier one left.
fn prepare(client: &Client, disk: &str, policy: &str) -> Result<(), TargetError> {
    let failed = |error: weir_node::api::ApiError| TargetError::Failed(error.to_string());
    let deadline = Nanos::now() + SETTLE;
    loop {
        let view = client.disk(disk).map_err(failed)?;
        if view.requested != policy {
            client.set_policy(disk, policy).map_err(failed)?;
            continue;
        }
        match view.detail {
            Some(detail) if view.effective == policy && detail.dirty_bytes == 0 && detail.clients == 0 => {
                return Ok(());
            }
            Some(_) if Nanos::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
            Some(detail) => {
                return Err(TargetError::Failed(format!(
                    "after {} s the policy is {} and not {policy}, {} bytes are dirty and {} clients connected",
                    SETTLE.as_secs(),
                    view.effective,
                    detail.dirty_bytes,
                    detail.clients
                )));
            }
            None => return Err(TargetError::Failed(format!("disk {disk} is no longer open there"))),
        }
    }
}

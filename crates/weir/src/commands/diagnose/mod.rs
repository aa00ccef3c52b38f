//! `weir diagnose`: the same load on every layer of a disk, or imported rows, and the findings from them. The
//! method is `weir-diagnose`'s; here are the arguments, the files and the exit code.

mod dry_run;
mod files;
mod import;
mod layers;
mod measure;
mod observed;
mod progress;
mod settings;
mod stack;
mod subject;
mod trace;

use std::path::Path;

use weir_diagnose::{Findings, Threshold, reliability};
use weir_node::client::Client;

use crate::cli::DiagnoseArgs;
use crate::cluster::{lab, owner_of};
use crate::failure::{Failure, FailureKind};
use crate::options::Global;
use crate::output::print;

use layers::Disk;
use stack::Stack;

pub use files::{Outcome, replace};
pub use measure::diagnose;
pub use settings::Settings;

/// Executes `weir diagnose`.
pub fn run(global: &Global, arguments: &DiagnoseArgs) -> Result<(), Failure> {
    let outcome = match (&arguments.disk, &arguments.stack, arguments.import.as_slice()) {
        (Some(disk), None, []) => of_disk(global, arguments, disk),
        (None, Some(file), []) => of_stack(global, arguments, file),
        (None, None, files @ [_, ..]) => {
            import::import(files, &arguments.report, &arguments.fail_on).map(Some)
        }
        _ => Err(Failure::usage("name a disk, a --stack, or files to --import")),
    };
    let Some(outcome) = outcome.map_err(for_pipelines)? else { return Ok(()) };
    print(global.output, &outcome.summary(), |_| outcome.text())?;
    judge(&outcome, &arguments.fail_on)
}

/// `None` for a dry run.
fn of_disk(global: &Global, arguments: &DiagnoseArgs, disk: &str) -> Result<Option<Outcome>, Failure> {
    let client = owner_of(global, disk)?;
    let replicas = processes_of_others(global, &client)?;
    let settings = Settings { replicas, ..Settings::of(arguments) };
    if arguments.dry_run {
        dry_run::dry_run(global, &Disk::open(&client, disk, &settings)?, &settings)?;
        return Ok(None);
    }
    measure::diagnose(&client, disk, &settings).map(Some)
}

/// `None` for a dry run.
fn of_stack(global: &Global, arguments: &DiagnoseArgs, file: &Path) -> Result<Option<Outcome>, Failure> {
    let (stack, settings) = (Stack::open(global, file)?, Settings::of(arguments));
    if arguments.dry_run {
        dry_run::dry_run(global, &stack, &settings)?;
        return Ok(None);
    }
    measure::conduct(&stack, &settings).map(Some)
}

/// For a lab's disk: the processes of its other nodes.
fn processes_of_others(global: &Global, owner: &Client) -> Result<Vec<u32>, Failure> {
    let Ok(lab) = lab(global) else { return Ok(Vec::new()) };
    let owner = owner.status()?.pid;
    let processes = lab.nodes().iter().filter_map(|node| node.process);
    Ok(processes.map(|process| process.pid).filter(|pid| *pid != owner).collect())
}

/// The exit code of the outcome: an untrusted measurement neither meets nor violates a threshold.
fn judge(outcome: &Outcome, thresholds: &[Threshold]) -> Result<(), Failure> {
    let (diagnosis, findings): (_, &Findings) = (&outcome.diagnosis, &outcome.findings);
    if let Some(why) = reliability::distrust(diagnosis, findings) {
        return Err(not_trusted(format!("measured, but not to be trusted: {why}")));
    }
    let broken: Vec<String> =
        thresholds.iter().filter_map(|threshold| threshold.broken(diagnosis, findings)).collect();
    if broken.is_empty() {
        return Ok(());
    }
    Err(Failure::failed(format!("a threshold failed: {}", broken.join("; "))))
}

fn not_trusted(message: impl std::fmt::Display) -> Failure {
    Failure::new(FailureKind::NotTrusted, message)
}

/// Distinguishes a failure of the measurement from a violated threshold.
fn for_pipelines(failure: Failure) -> Failure {
    match failure.kind {
        FailureKind::Failed => Failure { kind: FailureKind::NotTrusted, ..failure },
        _ => failure,
    }
}

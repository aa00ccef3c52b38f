//! `weir bench`

mod compare;
mod layer;
mod output;
mod report;
mod verify;
pub mod watch;

pub use watch::with_progress;

use std::collections::BTreeSet;
use std::path::Path;

use weir_formats::fio::read_jobs;
use weir_load::job::Job;
use weir_load::target::Target;
use weir_load::workload::Workload;
use weir_load::{Access, Arrivals, IoEngine};
use weir_profile::replay::parse_bench;

use crate::cli::{BenchArgs, BenchCommand, BenchEngine, BenchFormat};
use crate::cluster::owner_of;
use crate::commands::in_use::{Harm, refuse_export_beside_clients};
use crate::commands::moved::Whereabouts;
use crate::failure::Failure;
use crate::options::{Global, Output};

use output::Outcome;

/// Executes `weir bench`.
pub fn run(global: &Global, arguments: &BenchArgs) -> Result<(), Failure> {
    match &arguments.command {
        Some(BenchCommand::Compare(files)) => return compare::run(global, files),
        Some(BenchCommand::Verify(arguments)) => return verify::run(global, arguments),
        None => {}
    }
    let format = arguments.format.unwrap_or(match global.output {
        Output::Text => BenchFormat::Text,
        Output::Json => BenchFormat::Json,
    });
    let (summaries, failure) = match &arguments.jobs {
        Some(file) => job_file(global, file, arguments, format)?,
        None => one(global, arguments, format)?,
    };
    output::print(format, &summaries)?;
    arguments.report.as_ref().map_or(Ok(()), |file| report::write(file, &summaries))?;
    match failure {
        Some(failure) => Err(failure),
        None if summaries.iter().all(|summary| summary.is_clean()) => Ok(()),
        None => Err(Failure::failed("there were errors, or data was wrong; see above")),
    }
}

/// The load that the command line describes.
fn one(global: &Global, arguments: &BenchArgs, format: BenchFormat) -> Result<Outcome, Failure> {
    let workload = workload(arguments);
    workload.validate().map_err(Failure::usage)?;
    if arguments.history.is_some() && !workload.access.writes() {
        return Err(Failure::usage(
            "--history records writes: give a writing --rw, such as randwrite or randrw:30",
        ));
    }
    match (&arguments.disk, &arguments.target, arguments.layer) {
        (Some(disk), _, Some(layer)) => {
            if workload.access.writes() && !arguments.destroy {
                return Err(Failure::refused(format!(
                    "a writing load overwrites disk {disk}; --destroy allows it"
                )));
            }
            let client = owner_of(global, disk)?;
            let load = layer::Load {
                client: &client,
                disk,
                layer: layer.into(),
                workload: &workload,
                force: arguments.force,
            };
            load.run(arguments, format)
        }
        (_, Some(target), _) => {
            let target = driven_by(target.parse().map_err(Failure::usage)?, arguments.engine, &workload)?;
            leave_alone(global, arguments, &target, &workload)?;
            let interrupted = watch::heed_interrupts()?;
            watch::run(
                vec![watch::Job {
                    name: None,
                    whereabouts: Whereabouts::of(global, &target),
                    target,
                    workload,
                    destroy: arguments.destroy,
                    prefill: arguments.prefill.limits(),
                    rounds: arguments.steady.then_some(arguments.max_rounds),
                    profiler: None,
                    history: arguments.history.clone(),
                }],
                format,
                &interrupted,
            )
        }
        _ => Err(Failure::usage("name a target, or --disk and --layer")),
    }
}

/// Refuses to overwrite a disk of the cluster through its export while clients are connected to it.
fn leave_alone(
    global: &Global,
    arguments: &BenchArgs,
    target: &Target,
    workload: &Workload,
) -> Result<(), Failure> {
    if arguments.force || !(workload.access.writes() || arguments.destroy) {
        return Ok(());
    }
    refuse_export_beside_clients(global, target, Harm::Overwrites)
}

/// The target of the engine. The null target replaces any other of the same size.
fn driven_by(target: Target, engine: Option<BenchEngine>, workload: &Workload) -> Result<Target, Failure> {
    match (engine, &target) {
        (Some(BenchEngine::Null), _) => {
            // Nothing is written, so no permission is needed.
            let reading =
                Workload { access: Access::RandRead, flush_every: None, fua: false, ..workload.clone() };
            Ok(Target::Null { size: target.prepare(&reading, false)? })
        }
        (Some(BenchEngine::IoUring), Target::Null { .. } | Target::Nbd(_)) => Err(Failure::usage(format!(
            "engine io_uring is for files and block devices, and {target} is neither: leave --engine out"
        ))),
        _ => Ok(target),
    }
}

/// The loads of a job file: those of a group concurrently, the groups in sequence.
fn job_file(
    global: &Global,
    file: &Path,
    arguments: &BenchArgs,
    format: BenchFormat,
) -> Result<Outcome, Failure> {
    let named = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
    let text = std::fs::read_to_string(file).map_err(|error| Failure::unreadable(file, &error))?;
    // The output of `weir profile export --format bench` is JSON; no job file of fio begins like that.
    let jobs = match text.trim_start().starts_with('{') {
        true => parse_bench(&text).map_err(|error| Failure::usage(named(&error)))?,
        false => read_jobs(&text).map_err(|error| Failure::usage(named(&error)))?,
    };
    // Before the search for data, which connects to the export and is itself a client for a moment.
    for Job { target, workload, .. } in &jobs {
        leave_alone(global, arguments, target, workload)?;
    }
    let shared = if arguments.destroy { BTreeSet::new() } else { refuse_data(&jobs)? };
    let mut groups: Vec<Vec<watch::Job>> = Vec::new();
    for job in jobs {
        groups.resize_with(groups.len().max(job.group as usize + 1), Vec::new);
        let Job { name, target, workload, group } = job;
        let destroy = arguments.destroy || (workload.access.writes() && shared.contains(&target.to_string()));
        let prefill = arguments.prefill.limits();
        groups[group as usize].push(watch::Job {
            name: Some(name),
            whereabouts: Whereabouts::of(global, &target),
            target,
            workload,
            destroy,
            prefill,
            rounds: None,
            profiler: None,
            history: None,
        });
    }
    let interrupted = watch::heed_interrupts()?;
    let (mut all, mut unwritten) = (Vec::new(), shared);
    for group in groups {
        if let Err(failure) = refuse_new_data(&group, &mut unwritten) {
            return if all.is_empty() { Err(failure) } else { Ok((all, Some(failure))) };
        }
        match watch::run(group, format, &interrupted) {
            Ok((summaries, None)) => all.extend(summaries),
            Ok((summaries, failure)) => {
                all.extend(summaries);
                return Ok((all, failure));
            }
            // Keep the measurements of earlier groups.
            Err(failure) if !all.is_empty() => return Ok((all, Some(failure))),
            Err(failure) => return Err(failure),
        }
    }
    Ok((all, None))
}

/// Before any job runs: refuses a job that would overwrite data. Returns the targets that several jobs write: what is in them
/// later is the jobs' own.
fn refuse_data(jobs: &[Job]) -> Result<BTreeSet<String>, Failure> {
    let (mut written, mut shared) = (BTreeSet::new(), BTreeSet::new());
    for Job { name, target, .. } in jobs.iter().filter(|job| job.workload.access.writes()) {
        if !written.insert(target.to_string()) {
            shared.insert(target.to_string());
            continue;
        }
        target.refuse_data().map_err(|error| {
            let message = format!("job {name}: {error}; no job has run");
            Failure::from(error).said(message)
        })?;
    }
    Ok(shared)
}

/// Before the first group that writes one of the `unwritten` targets: refuses data that came there since [`refuse_data`]. Its jobs
/// do not look themselves, because they might find each other's data.
fn refuse_new_data(group: &[watch::Job], unwritten: &mut BTreeSet<String>) -> Result<(), Failure> {
    let writers = group.iter().filter(|job| job.workload.access.writes());
    for watch::Job { name, target, .. } in writers {
        if unwritten.remove(&target.to_string()) {
            target.refuse_data().map_err(|error| {
                let message = format!("job {}: {error}", name.as_deref().unwrap_or_default());
                Failure::from(error).said(message)
            })?;
        }
    }
    Ok(())
}

fn workload(arguments: &BenchArgs) -> Workload {
    let is_psync = arguments.engine == Some(BenchEngine::Psync);
    Workload {
        access: arguments.access,
        pattern: arguments.pattern,
        block_size: arguments.block_sizes.largest(),
        mix: (arguments.block_sizes.shares().len() > 1).then(|| arguments.block_sizes.clone()),
        alignment: arguments.align,
        queue_depth: arguments.depth.unwrap_or(if is_psync { 1 } else { 32 }),
        engine: if is_psync { IoEngine::Psync } else { IoEngine::IoUring },
        poll: arguments.poll,
        threads: arguments.threads,
        runtime: Some(arguments.runtime.0),
        bytes: arguments.bytes,
        warmup: arguments.warmup.0,
        offset: arguments.offset,
        size: arguments.size,
        rate: arguments.rate,
        arrivals: if arguments.poisson { Arrivals::Poisson } else { Arrivals::Fixed },
        seed: arguments.seed,
        verify: arguments.verify,
        fua: arguments.fua,
        flush_every: arguments.flush_every,
        compress_percent: arguments.compress,
        repeat_percent: arguments.repeat_data,
    }
}

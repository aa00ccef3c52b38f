//! `weir profile`

mod replay;
mod text;

use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Serialize;
use weir_formats::fio::write_jobs;
use weir_formats::trace::import;
use weir_load::Target;
use weir_profile::replay::{Export, export};
use weir_profile::{Profile, ProfileSummary};

use super::bench::with_progress;
use crate::cli::{ExportFormat, ProfileCommand, ProfileSource};
use crate::cluster::owner_of;
use crate::failure::Failure;
use crate::options::Global;
use crate::output::{note, print_as, say};

/// A profile with its derived figures.
#[derive(Serialize)]
struct Shown<'a> {
    #[serde(flatten)]
    profile: &'a Profile,
    summary: ProfileSummary,
}

/// Executes a `weir profile` command.
pub fn run(global: &Global, command: ProfileCommand) -> Result<(), Failure> {
    match command {
        ProfileCommand::Record { disk, length, to } => {
            let client = owner_of(global, &disk)?;
            let profile = with_progress(length.0, &disk, || client.record_profile(&disk, length.0))?;
            keep(&profile, &to.unwrap_or_else(|| PathBuf::from(format!("{disk}.profile.json"))))?;
            show(global, &profile)
        }
        ProfileCommand::Show { source } => show(global, &profile_of(&source, global)?),
        ProfileCommand::Export { source, format, target, length } => {
            let profile = profile_of(&source, global)?;
            let target: Target = target.parse().map_err(Failure::usage)?;
            let exported =
                export(&profile, &target, length.map(|length| length.0)).map_err(Failure::refused)?;
            match format {
                ExportFormat::Bench => {
                    exported.notes.iter().for_each(|text| note(&format!("note: {text}")));
                    say(&exported.to_bench())
                }
                ExportFormat::Fio => say(fio_jobs(&exported, &profile.source)?.trim_end()),
            }
        }
        ProfileCommand::Replay { source, target, length, destroy, create, force, prefill } => {
            let profile = profile_of(&source, global)?;
            let target = target.parse().map_err(Failure::usage)?;
            let length = length.map(|length| length.0);
            let allowed = replay::Use { length, destroy, create, force, prefill: prefill.limits() };
            replay::run(global, profile, &target, &allowed)
        }
        ProfileCommand::Import { trace, device, to } => {
            let name = trace.display().to_string();
            let bytes = read(&trace).map_err(|error| Failure::unreadable(&trace, &error))?;
            let profile = import(&bytes, &name, device.as_deref())
                .map_err(|error| Failure::usage(format!("{name}: {error}")))?;
            let beside = if name == "-" { "trace".to_owned() } else { name };
            keep(&profile, &to.unwrap_or_else(|| PathBuf::from(format!("{beside}.profile.json"))))?;
            show(global, &profile)
        }
    }
}

/// A job file of fio that names its source.
fn fio_jobs(exported: &Export, source: &str) -> Result<String, Failure> {
    let mut comments = vec![format!("what `weir profile` saw of {source}")];
    comments.extend_from_slice(&exported.notes);
    write_jobs(&exported.jobs, &comments).map_err(Failure::usage)
}

fn read(trace: &Path) -> std::io::Result<Vec<u8>> {
    if trace.as_os_str() != "-" {
        return std::fs::read(trace);
    }
    let mut bytes = Vec::new();
    std::io::stdin().read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn profile_of(source: &ProfileSource, global: &Global) -> Result<Profile, Failure> {
    if let Some(disk) = &source.disk {
        return Ok(owner_of(global, disk)?.profile(disk)?);
    }
    let mut sum: Option<Profile> = None;
    for file in &source.from {
        let wrong = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
        let text = std::fs::read_to_string(file).map_err(|error| Failure::unreadable(file, &error))?;
        let profile = Profile::from_json(&text).map_err(|error| Failure::usage(wrong(&error)))?;
        match &mut sum {
            None => sum = Some(profile),
            Some(sum) => sum.add(&profile),
        }
    }
    sum.ok_or_else(|| Failure::usage("name a disk, or profiles with --from"))
}

fn keep(profile: &Profile, file: &Path) -> Result<(), Failure> {
    let wrong = |error: &dyn std::fmt::Display| Failure::failed(format!("{}: {error}", file.display()));
    let text = serde_json::to_string(profile).map_err(|error| wrong(&error))?;
    std::fs::write(file, text + "\n").map_err(|error| wrong(&error))?;
    note(&format!("kept in {}", file.display()));
    Ok(())
}

fn show(global: &Global, profile: &Profile) -> Result<(), Failure> {
    print_as(global.output, "weir.profile/1", &Shown { profile, summary: profile.summary() }, |shown| {
        text::show(shown.profile)
    })
}

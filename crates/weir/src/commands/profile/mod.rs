//! `weir profile`

mod replay;
mod text;

use std::io::Read;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;
use weir_formats::fio::write_jobs;
use weir_formats::trace::import;
use weir_load::Target;
use weir_node::units::Period;
use weir_profile::replay::{Export, export};
use weir_profile::{Profile, ProfileSummary};

use super::bench::with_progress;
use crate::cli::Global;
use crate::cluster::owner_of;
use crate::completion;
use crate::failure::Failure;
use crate::output::{print, say};

/// Shown below the help.
pub const EXAMPLES: &str = "\
Every open disk is profiled all the time, in about 1 MiB of memory; `show` prints what was seen since the disk was opened on its \
node. Blocks are 4 KiB. Reuse, working set, caches and logs are estimated from a sample of blocks (SHARDS, FAST 2015), to about 2 \
points. The profile of a disk that moves or is opened again starts anew.

Examples:
  weir profile show db                      since the disk was opened
  weir profile record db --for 10m          the next ten minutes, kept in
                                            db.profile.json
  weir profile show --from db.profile.json
  weir profile export --from db.profile.json --format fio \\
    --target /dev/nvme1n1 > db.fio
  weir profile export db --format bench --target scratch.img > db.jobs
  weir bench --jobs db.jobs --destroy
  weir profile replay --from db.profile.json --target scratch.img --for 1m
  blkparse -i sda | weir profile import - --to sda.profile.json";

/// What can be done with profiles.
#[derive(Debug, Subcommand)]
pub enum ProfileCommand {
    /// Watch a disk for a time, from now on, and keep its profile in a file.
    Record {
        /// The disk.
        #[arg(add = completion::disks())]
        disk: String,
        /// How long, such as 10m: 100 ms to 7 days.
        #[arg(long = "for", value_name = "TIME", default_value = "1 min")]
        length: Period,
        /// Where it is kept; default: DISK.profile.json.
        #[arg(long, value_name = "FILE")]
        to: Option<PathBuf>,
    },
    /// Print what a disk was asked for since it was opened, or what a file keeps.
    Show {
        #[command(flatten)]
        source: Source,
    },
    /// Print a load that asks for about the same.
    ///
    /// Reads and writes, random and sequential ones, become a job each, with their rates and sizes. The random ones get the
    /// distribution (uniform, Zipf, or hot and cold) whose miss-ratio curve and working set are closest.
    Export {
        #[command(flatten)]
        source: Source,
        /// For which program.
        #[arg(long, value_enum, default_value = "bench")]
        format: ExportFormat,
        /// What the load is for: a file, a block device, nbd://HOST:PORT/DISK, nbd+unix:///DISK?socket=PATH, or null.
        #[arg(long)]
        target: String,
        /// How long it runs; default: as long as was watched.
        #[arg(long = "for", value_name = "TIME")]
        length: Option<Period>,
    },
    /// Run the load that asks for about the same, and print both profiles side by side.
    ///
    /// Differences are in percent of the original; those of percentages are in points. Hits are those of caches that are
    /// simulated, with the requests that the load has made. A range that was never written is written first.
    Replay {
        #[command(flatten)]
        source: Source,
        /// What it is aimed at: a file, a block device, nbd://HOST:PORT/DISK, nbd+unix:///DISK?socket=PATH, or null.
        #[arg(long)]
        target: String,
        /// How long it runs; default: as long as was watched.
        #[arg(long = "for", value_name = "TIME")]
        length: Option<Period>,
        /// Overwrite what the target holds.
        #[arg(long)]
        destroy: bool,
    },
    /// Make a profile of a trace: text of blkparse, a fio I/O log (version 2 or 3), or a binary vscsi trace.
    Import {
        /// The trace; `-` for standard input.
        trace: PathBuf,
        /// Which device (blkparse: MAJOR,MINOR) or file (fio), when the trace has several.
        #[arg(long, value_name = "NAME")]
        device: Option<String>,
        /// Where the profile is kept; default: TRACE.profile.json.
        #[arg(long, value_name = "FILE")]
        to: Option<PathBuf>,
    },
}

/// Where a profile comes from.
#[derive(Debug, Args)]
pub struct Source {
    /// The disk, as it was watched since it was opened.
    #[arg(required_unless_present = "from", conflicts_with = "from", add = completion::disks())]
    pub disk: Option<String>,
    /// A profile that was kept instead; several, of one stretch of time each, are added up.
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub from: Vec<PathBuf>,
}

/// The form of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ExportFormat {
    /// Jobs for `weir bench --jobs`, as JSON.
    Bench,
    /// A job file of fio.
    Fio,
}

/// A profile with the figures that follow from it.
#[derive(Serialize)]
struct Shown<'a> {
    #[serde(flatten)]
    profile: &'a Profile,
    summary: ProfileSummary,
}

/// Carries out a `weir profile` command.
pub fn run(global: &Global, command: ProfileCommand) -> Result<(), Failure> {
    match command {
        ProfileCommand::Record { disk, length, to } => {
            let client = owner_of(global, &disk)?;
            let profile = with_progress(length.0, &disk, || client.record_profile(&disk, length.0))?;
            keep(&profile, &to.unwrap_or_else(|| PathBuf::from(format!("{disk}.profile.json"))))?;
            show(global, &profile)
        }
        ProfileCommand::Show { source } => show(global, &source.profile(global)?),
        ProfileCommand::Export { source, format, target, length } => {
            let profile = source.profile(global)?;
            let target: Target = target.parse().map_err(Failure::usage)?;
            let exported =
                export(&profile, &target, length.map(|length| length.0)).map_err(Failure::refused)?;
            match format {
                ExportFormat::Bench => {
                    exported.notes.iter().for_each(|note| eprintln!("note: {note}"));
                    say(&exported.to_bench())
                }
                ExportFormat::Fio => say(fio_jobs(&exported, &profile.source).trim_end()),
            }
        }
        ProfileCommand::Replay { source, target, length, destroy } => {
            let profile = source.profile(global)?;
            let target = target.parse().map_err(Failure::usage)?;
            replay::run(global.output, profile, &target, length.map(|length| length.0), destroy)
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

/// A job file of fio that says where it comes from.
fn fio_jobs(exported: &Export, source: &str) -> String {
    let mut comments = vec![format!("what `weir profile` saw of {source}")];
    comments.extend_from_slice(&exported.notes);
    write_jobs(&exported.jobs, &comments)
}

fn read(trace: &Path) -> std::io::Result<Vec<u8>> {
    if trace.as_os_str() != "-" {
        return std::fs::read(trace);
    }
    let mut bytes = Vec::new();
    std::io::stdin().read_to_end(&mut bytes)?;
    Ok(bytes)
}

impl Source {
    fn profile(&self, global: &Global) -> Result<Profile, Failure> {
        if let Some(disk) = &self.disk {
            return Ok(owner_of(global, disk)?.profile(disk)?);
        }
        let mut sum: Option<Profile> = None;
        for file in &self.from {
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
}

fn keep(profile: &Profile, file: &Path) -> Result<(), Failure> {
    let wrong = |error: &dyn std::fmt::Display| Failure::failed(format!("{}: {error}", file.display()));
    let text = serde_json::to_string(profile).map_err(|error| wrong(&error))?;
    std::fs::write(file, text + "\n").map_err(|error| wrong(&error))?;
    eprintln!("kept in {}", file.display());
    Ok(())
}

fn show(global: &Global, profile: &Profile) -> Result<(), Failure> {
    print(global.output, &Shown { profile, summary: profile.summary() }, |shown| text::show(shown.profile))
}

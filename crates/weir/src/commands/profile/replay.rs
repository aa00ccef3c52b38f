//! `weir profile replay`

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::Serialize;
use weir_block::Nanos;
use weir_block::size::format_size;
use weir_load::Target;
use weir_load::job::Job;
use weir_load::prefill::{Limits, Prefill, look};
use weir_load::run::Monitor;
use weir_load::summary::{Filled, Summary};
use weir_load::workload::{Access, Workload};
use weir_profile::compare::{Row, compare};
use weir_profile::replay::{Export, export};
use weir_profile::{Profile, Profiler, Settings};

use crate::cli::BenchFormat;
use crate::commands::bench::watch;
use crate::commands::in_use::{Harm, refuse_export_beside_clients};
use crate::commands::moved::Whereabouts;
use crate::failure::{Failure, FailureKind};
use crate::options::Global;
use crate::output::{note, print_as, table};

/// The result of a replay.
#[derive(Serialize)]
struct Replay {
    /// Figure by figure.
    rows: Vec<Row>,
    /// Differences from the original profile, with reasons.
    notes: Vec<String>,
    /// The profile of the load.
    replay: Profile,
    /// The target's performance.
    loads: Vec<Summary>,
}

/// A replay's use of its target.
pub struct Use {
    /// Length of the load; `None`: that of the profile.
    pub length: Option<Duration>,
    /// The load may overwrite data.
    pub destroy: bool,
    /// A missing file is created.
    pub create: bool,
    /// Run also while clients of the target are connected.
    pub force: bool,
    /// Limits of the prefill; `None`: no prefill.
    pub prefill: Option<Limits>,
}

/// Runs the load, profiles it, and prints both profiles.
pub fn run(global: &Global, mut original: Profile, target: &Target, allowed: &Use) -> Result<(), Failure> {
    refuse_missing(target, allowed.create)?;
    // The load has to fit its target. A file is grown as needed.
    let looking = Workload { access: Access::Read, size: None, ..Workload::default() };
    let grows = matches!(target, Target::Path(path) if path.is_file());
    if !grows && let Ok(size) = target.prepare(&looking, false) {
        original.disk_bytes = Some(original.disk_bytes.unwrap_or(size).min(size));
    }
    let Export { jobs, mut notes } = export(&original, target, allowed.length).map_err(Failure::refused)?;
    let writes = jobs.iter().any(|job| job.workload.access.writes());
    if let Target::Path(path) = target
        && !writes
        && !path.exists()
    {
        let message =
            format!("target {} does not exist, and a load that only reads makes no file", path.display());
        return Err(Failure::new(FailureKind::NotFound, message));
    }
    if !allowed.force && (allowed.destroy || writes) {
        refuse_export_beside_clients(global, target, Harm::Overwrites)?;
    }
    let mut filled = prepare(&jobs, allowed)?;
    let interrupted = watch::heed_interrupts()?;
    let interval = Duration::from_secs_f64(original.working_set.interval_seconds.clamp(1.0, 3600.0));
    let settings = Settings { interval, ..Settings::default() };
    let start = Nanos::now();
    let profiler = Arc::new(Mutex::new(Profiler::new(settings, start, Duration::ZERO)));
    let watched = jobs.into_iter().map(|Job { name, target, workload, .. }| watch::Job {
        name: Some(name),
        whereabouts: Whereabouts::of(global, &target),
        target,
        workload,
        destroy: true,
        prefill: None,
        rounds: None,
        profiler: Some(Arc::clone(&profiler)),
        history: None,
    });
    let (mut loads, failure) = watch::run(watched.collect(), BenchFormat::Text, &interrupted)?;
    for load in &mut loads {
        load.prefill = load.name.as_ref().and_then(|name| filled.remove(name));
    }
    let ran = loads.iter().map(|load| load.runtime_seconds).fold(0.0, f64::max);
    let end = start + Duration::from_secs_f64(ran);
    let replay = profiler.lock().unwrap_or_else(PoisonError::into_inner).profile(end, &target.to_string());
    let late: u64 = loads.iter().map(|load| load.never_made).sum();
    if late > 0 {
        notes.push(format!("the target is too slow: {late} requests were due and never made"));
    }
    let errors: u64 = loads.iter().map(Summary::errors).sum();
    let shown = Replay { rows: compare(&original, &replay), notes, replay, loads };
    print_as(global.output, "weir.replay/1", &shown, text)?;
    match failure {
        Some(failure) => Err(failure),
        None if errors > 0 => Err(Failure::failed(format!("{errors} requests failed"))),
        None => Ok(()),
    }
}

/// A mistyped path must not become a file that is as large as a disk.
fn refuse_missing(target: &Target, create: bool) -> Result<(), Failure> {
    let Target::Path(path) = target else { return Ok(()) };
    match path.symlink_metadata() {
        Err(error) if error.kind() == ErrorKind::NotFound && !create => {
            Err(Failure::new(FailureKind::NotFound, format!("target {} does not exist", path.display()))
                .hint("--create makes a file of the size that the load needs"))
        }
        _ => Ok(()),
    }
}

/// Checks that the load may use the target before anything is written, then fills holes within `prefill`'s limits. The time of
/// filling is not the load's. Returns the prefills, by the name of the job whose range it is.
fn prepare(jobs: &[Job], allowed: &Use) -> Result<BTreeMap<String, Filled>, Failure> {
    let writes = jobs.iter().any(|job| job.workload.access.writes());
    let mut all = BTreeMap::new();
    // The largest range first: a missing file is created as large as the last job needs.
    let mut order: Vec<&Job> = jobs.iter().collect();
    order.sort_by_key(|job| {
        let end = job.workload.offset.0 + job.workload.size.map_or(0, |size| size.0);
        (std::cmp::Reverse(job.workload.access.writes()), std::cmp::Reverse(end))
    });
    for job in &order {
        job.target.prepare(&job.workload, allowed.destroy)?;
    }
    let Some(limits) = allowed.prefill else { return Ok(all) };
    for job in &order {
        let destroy = allowed.destroy || writes;
        if let Prefill::Needed(fill) = look(&job.target, &job.workload, destroy)? {
            let bytes = format_size(fill.bytes());
            note(&format!("filling {bytes} of {} before the load ({})", job.target, fill.found));
            let filled = fill.run(&job.target, job.workload.seed, destroy, limits, &Monitor::new())?;
            note(&filled.to_string());
            all.insert(job.name.clone(), filled);
        }
    }
    Ok(all)
}

fn text(replay: &Replay) -> String {
    let figure = |value: f64| match value.abs() {
        large if large >= 1000.0 => format!("{value:.0}"),
        _ => format!("{value:.1}"),
    };
    let row = |row: &Row| {
        let difference = row.difference.map_or_else(|| "-".to_owned(), |value| format!("{value:+.1}"));
        vec![row.name.clone(), figure(row.original), figure(row.replay), difference]
    };
    let rows = replay.rows.iter().map(row);
    let mut text = table(&["FIGURE", "ORIGINAL", "REPLAY", "DIFFERENCE, %"], &[1, 2, 3], rows);
    for load in &replay.loads {
        let name = load.name.as_deref().unwrap_or_default();
        text.push_str(&format!("\nload: {name}: {}", load.workload));
    }
    for note in &replay.notes {
        text.push_str(&format!("\nnote: {note}"));
    }
    text
}

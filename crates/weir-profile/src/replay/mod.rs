//! Loads that resemble a profile.
//!
//! Reads and writes, random and sequential ones, are a job each, with their own rate and mix of sizes. The random ones get
//! the distribution whose miss-ratio curve and working set are closest: one for both, so that writes hit what reads read,
//! or one for each, whichever is closer in a rehearsal. [`Export::notes`] lists the features that the load cannot reproduce.

mod area;
mod fit;
mod rehearse;
mod share;

use std::time::Duration;

use serde::{Deserialize, Serialize};

use weir_block::size::Size;
use weir_load::arrivals::Arrivals;
use weir_load::job::Job;
use weir_load::pattern::{BlockMix, Pattern};
use weir_load::target::Target;
use weir_load::workload::{Access, LARGEST_BLOCK, SECTOR, Workload};

use self::area::Area;
pub use self::rehearse::rehearse;
use self::share::{SMALLEST_PART, Share, shares, stride};
use crate::observer::Settings;
use crate::record::{BLOCK, Class, Direction, Part, Profile};

/// Version of the layout of [`Jobs`]. In version 1, which is read too, times were `runtime` and `warmup` in two parts.
const JOBS_VERSION: u32 = 2;

/// Maximum number of requests in flight.
const DEPTH: u32 = 64;

/// Limit of requests, and of seconds, of profiles that are rehearsed: more would take seconds.
const REHEARSED: u64 = 1_000_000;

/// Required improvement of separate ranges over a common one: half a point.
const MARGIN: f64 = 0.005;

/// Reads and writes with at least this share of distinct blocks have separate ranges.
const DIFFERENT: f64 = 0.95;

/// Larger deviations of hits get a note.
const FAR: f64 = 0.05;

/// Below it, arrivals are regular.
const REGULAR: f64 = 0.5;

/// Above it, requests come in bursts that independent arrivals do not have.
const BURSTY: f64 = 3.0;

/// A load made of a profile.
#[derive(Clone, Debug)]
pub struct Export {
    /// The jobs; all run at once.
    pub jobs: Vec<Job>,
    /// Differences from the profile, in sentences.
    pub notes: Vec<String>,
}

/// The document that `weir bench --jobs` reads.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Jobs {
    version: u32,
    jobs: Vec<NamedWorkload>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct NamedWorkload {
    name: String,
    target: String,
    workload: Workload,
}

/// The reason why there is no load.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The profile has no reads or writes.
    #[error("the profile shows neither reads nor writes: there is nothing to ask for")]
    Empty,
    /// The target is smaller than the used range.
    #[error("the target has no room for what was used: it needs at least the working set, and 32 MiB")]
    NoRoom,
    /// An invalid document.
    #[error("it is not a list of jobs that `weir profile export --format bench` wrote: {0}")]
    Json(#[from] serde_json::Error),
    /// Another layout.
    #[error("it is a list of jobs of version {0}, and this program reads versions 1 to {JOBS_VERSION}")]
    Version(u32),
    /// An invalid job.
    #[error("job {name}: {error}")]
    Job {
        /// The job.
        name: String,
        /// The reason.
        error: String,
    },
}

/// Makes a load of `profile` for `target`, as long as the profile's observation or for `runtime`.
///
/// # Errors
/// The profile has no reads or writes.
pub fn export(profile: &Profile, target: &Target, runtime: Option<Duration>) -> Result<Export, ExportError> {
    let mut notes = Vec::new();
    if profile.requests() == 0 {
        return Err(ExportError::Empty);
    }
    let shares = shares(profile);
    let base = base(profile, runtime, &mut notes);
    let plan = |layout| assemble(profile, target, &shares, &base, layout);
    let together = plan(Layout::Together);
    // Writes may share the range of reads or not: the closer alternative in a rehearsal is used.
    let off = |jobs: &[Job]| distance(profile, jobs).unwrap_or(f64::INFINITY);
    let mut jobs = together.ok_or(ExportError::NoRoom)?;
    slow_jobs(profile, &shares, &mut notes);
    if is_filled_first(&shares) {
        if are_apart(&shares)
            && let Some(apart) = plan(Layout::Apart)
        {
            jobs = apart;
        }
        notes.push(
            "other requests had used most blocks of the random ones before these (as a fill of the disk does): in the load, the \
             first use of a block is a miss, so its hits are fewer"
                .into(),
        );
    } else if profile.requests() <= REHEARSED && profile.seconds <= REHEARSED as f64 {
        let mut least = off(&jobs);
        if let Some(apart) = plan(Layout::Apart) {
            let other = off(&apart);
            if other < least - MARGIN {
                (jobs, least) = (apart, other);
            }
        }
        if least > FAR && least.is_finite() {
            notes.push(format!(
                "hits in caches of up to the working set are {:.0} points off on average: no distribution that a load can have \
                 comes closer",
                least * 100.0
            ));
        }
    }
    what_is_missing(profile, &mut notes);
    Ok(Export { jobs, notes })
}

/// Whether other requests had used most blocks of the random ones before these. A rehearsal, which begins with an empty cache,
/// then compares nothing.
fn is_filled_first(shares: &[Share]) -> bool {
    let (cold, used) = random_use(shares, |part| (part.curve.cold, part.curve.used_by_class()));
    cold < used / 2.0
}

/// Whether random reads and writes used different blocks.
fn are_apart(shares: &[Share]) -> bool {
    let (of_both, of_each) =
        random_use(shares, |part| (part.curve.used_by_class(), part.curve.used_by_part()));
    of_both > of_each * DIFFERENT
}

fn random_use(shares: &[Share], of: impl Fn(&Part) -> (f64, f64)) -> (f64, f64) {
    let random = shares.iter().filter(|share| share.class == Class::Random);
    random.map(|share| of(&share.part)).fold((0.0, 0.0), |sum, part| (sum.0 + part.0, sum.1 + part.1))
}

/// Ranges of random reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    /// One range and one distribution for both: writes hit what reads read.
    Together,
    /// A range and a distribution for each.
    Apart,
}

/// The jobs; `None` when the disk has no room for them.
fn assemble(
    profile: &Profile,
    target: &Target,
    shares: &[Share],
    base: &Workload,
    layout: Layout,
) -> Option<Vec<Job>> {
    let mut jobs: Vec<Job> = Vec::new();
    let mut add = |class: &str, share: &Share, workload: Workload| {
        let name = format!("{class}-{}", share.direction.name());
        jobs.push(Job { name, target: target.clone(), workload, group: 0 });
    };
    let of = |class: Class| shares.iter().filter(move |share| share.class == class);
    let random: Vec<&Share> = of(Class::Random).collect();
    let areas: Vec<&[&Share]> = match layout {
        Layout::Together if random.is_empty() => Vec::new(),
        Layout::Together => vec![&random],
        Layout::Apart if random.len() < 2 => return None,
        Layout::Apart => random.chunks(1).collect(),
    };
    let mut end = 0;
    for shares in areas {
        let area = Area::of(profile, shares, end);
        for share in shares {
            let workload = area.workload(share, rated(profile, share, base));
            end = end.max(workload.offset.0 + workload.size.map_or(0, |size| size.0));
            add("random", share, workload);
        }
    }
    if profile.disk_bytes.is_some_and(|disk| end > disk) {
        return None;
    }
    // A stream over blocks that others have used (it reads what was written) shares their range.
    let (second, first): (Vec<&Share>, Vec<&Share>) =
        of(Class::Sequential).partition(|share| is_shared(share));
    let mut shared = None;
    for share in first {
        let (workload, after) = sequential(profile, share, rated(profile, share, base), end);
        end = after;
        shared = shared.or(Some(workload.offset.0));
        add("sequential", share, workload);
    }
    for share in second {
        add(
            "sequential",
            share,
            sequential(profile, share, rated(profile, share, base), shared.unwrap_or(0)).0,
        );
    }
    for share in of(Class::Strided) {
        add("strided", share, strided(profile, share, rated(profile, share, base)));
    }
    Some(jobs)
}

/// Distance of the jobs' cache hits and log absorption from the profile's: the mean over caches and logs of up to the working
/// set, of all requests and of each direction, 0 to 1. `None` when the jobs are invalid.
fn distance(profile: &Profile, jobs: &[Job]) -> Option<f64> {
    let end = |job: &Job| job.workload.offset.0 + job.workload.size.map_or(0, |size| size.0);
    let mut jobs = jobs.to_vec();
    if profile.seconds > 0.0 {
        // Compares a shorter load at the profile's length.
        jobs.iter_mut().for_each(|job| job.workload.runtime = Some(Duration::from_secs_f64(profile.seconds)));
    }
    let size = jobs.iter().map(end).max()?;
    let heard = rehearse(&jobs, size, Settings::default()).ok()?;
    let caches = [64, 32, 16, 8, 4, 2, 1].map(|divisor| profile.working_set.bytes as u64 / divisor);
    let off = |of| {
        let each = caches.map(|cache| (profile.hit_ratio(cache, of) - heard.hit_ratio(cache, of)).abs());
        each.iter().sum::<f64>() / caches.len() as f64
    };
    let absorbed = caches.map(|log| (profile.absorbed_by_bytes(log) - heard.absorbed_by_bytes(log)).abs());
    let absorbed = absorbed.iter().sum::<f64>() / caches.len() as f64;
    Some((off(None) + off(Some(Direction::Read)) + off(Some(Direction::Write)) + absorbed) / 4.0)
}

/// The common part of all jobs.
fn base(profile: &Profile, runtime: Option<Duration>, notes: &mut Vec<String>) -> Workload {
    let watched =
        (profile.seconds > 0.0).then(|| Duration::from_millis((profile.seconds * 1000.0).ceil() as u64));
    if let (Some(runtime), Some(watched)) = (runtime, watched)
        && runtime.as_secs_f64() < watched.as_secs_f64() * 0.9
    {
        notes.push(format!(
            "the load is shorter than what was watched ({runtime:?} instead of {watched:?}): it uses fewer distinct blocks, \
             and a larger share of its requests are first uses"
        ));
    }
    if watched.is_none() {
        notes.push(
            "the times of the requests are not known: the load asks for as much as the target takes".into(),
        );
    }
    let arrivals = match profile.dispersion() {
        _ if watched.is_none() => Arrivals::Fixed,
        Some(dispersion) if dispersion < REGULAR => Arrivals::Fixed,
        _ => Arrivals::Poisson,
    };
    Workload { queue_depth: DEPTH, runtime: runtime.or(watched), arrivals, ..Workload::default() }
}

/// The volume of this part: a rate, or, if times are not known, its bytes.
fn rated(profile: &Profile, share: &Share, base: &Workload) -> Workload {
    let mut workload = base.clone();
    if profile.seconds > 0.0 {
        workload.rate = Some(((share.requests / profile.seconds).round() as u64).max(1));
    } else {
        let bytes: f64 = share.part.sizes.0.iter().map(|&(size, count)| size as f64 * count).sum();
        workload.bytes = Some(Size((bytes as u64).max(u64::from(SECTOR))));
    }
    let mix = mix(&share.part);
    workload.block_size = mix.largest();
    workload.mix = (mix.shares().len() > 1).then_some(mix);
    if share.direction == Direction::Write && profile.flushes > 0 {
        let writes = profile.write.requests() as f64 / profile.flushes as f64;
        workload.flush_every = Some((writes.round() as u64).max(1));
    }
    // Each job draws numbers of its own.
    workload.seed = 1 + 3 * share.direction as u64 + share.class as u64;
    workload
}

/// The sizes in whole percent, by largest remainder; sizes of less than half a percent go to the others.
fn mix(part: &Part) -> BlockMix {
    let largest = u64::from(LARGEST_BLOCK);
    let sizes: Vec<(u64, f64)> =
        part.sizes.0.iter().map(|&(size, count)| (size.min(largest), count)).collect();
    let total: f64 = sizes.iter().map(|&(_, count)| count).sum();
    let exact: Vec<f64> = sizes.iter().map(|&(_, count)| count / total * 100.0).collect();
    let mut percent: Vec<u8> = exact.iter().map(|share| share.floor() as u8).collect();
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    order.sort_by(|&a, &b| exact[b].fract().total_cmp(&exact[a].fract()));
    let left = 100 - percent.iter().map(|&share| u32::from(share)).sum::<u32>();
    for &index in order.iter().cycle().take(if sizes.is_empty() { 0 } else { left as usize }) {
        percent[index] += 1;
    }
    let shares: Vec<(Size, u8)> = sizes
        .iter()
        .zip(percent)
        .filter(|&(_, percent)| percent > 0)
        .map(|(&(size, _), percent)| (Size(size), percent))
        .collect();
    let text: Vec<String> = shares.iter().map(|(size, percent)| format!("{size}:{percent}")).collect();
    text.join(",").parse().unwrap_or_else(|_| BlockMix::of(Size(BLOCK)))
}

/// Whether others had used most of its blocks before.
fn is_shared(share: &Share) -> bool {
    share.part.curve.cold < share.part.curve.used_by_part() / 2.0
}

/// One stream over as many bytes as were used, after the random requests' range if there is room; also returns its end.
fn sequential(profile: &Profile, share: &Share, base: Workload, behind: u64) -> (Workload, u64) {
    let disk = profile.disk_bytes.unwrap_or(u64::MAX);
    let smallest = base.mix.as_ref().map_or(base.block_size, BlockMix::smallest).0;
    let (Part { blocks, curve, .. }, largest) = (&share.part, base.block_size.0);
    let used = curve.used_by_part() * BLOCK as f64 * (*blocks as f64 / curve.weight.max(1.0)).min(1.0);
    let length = (used as u64).max(largest * 16).min(disk) / largest * largest;
    let behind = behind.div_ceil(smallest) * smallest;
    let fits = behind.checked_add(length).is_some_and(|end| end <= disk);
    let offset = if fits { behind } else { 0 };
    let access = match share.direction {
        Direction::Read => Access::Read,
        Direction::Write => Access::Write,
    };
    let workload = Workload { access, offset: Size(offset), size: Some(Size(length.max(largest))), ..base };
    (workload, offset + length)
}

fn strided(profile: &Profile, share: &Share, base: Workload) -> Workload {
    let (distance, size) = stride(profile, share.direction).unwrap_or((BLOCK, BLOCK));
    let used = (share.part.curve.used_by_part() * BLOCK as f64) as u64 / size;
    let used = used.saturating_mul(distance);
    // The steps of a trace that wrapped around stay within its range.
    let end = (profile.end_bytes > 0).then_some(profile.end_bytes);
    let room = profile.disk_bytes.or(end).unwrap_or(u64::MAX);
    let length = used.max(distance.saturating_mul(16)).min(room);
    Workload {
        access: match share.direction {
            Direction::Read => Access::Read,
            Direction::Write => Access::Write,
        },
        pattern: Pattern::Stride { bytes: Size(distance) },
        block_size: Size(size),
        mix: None,
        size: Some(Size(length.max(size))),
        ..base
    }
}

/// Rates are whole numbers, at least one request a second.
fn slow_jobs(profile: &Profile, shares: &[Share], notes: &mut Vec<String>) {
    for share in shares.iter().filter(|share| share.requests < profile.seconds * 0.9) {
        notes.push(format!(
            "{}s were fewer than one a second ({:.3}); the load has one a second of them",
            share.direction.name(),
            share.requests / profile.seconds
        ));
    }
}

fn what_is_missing(profile: &Profile, notes: &mut Vec<String>) {
    if let Some(dispersion) = profile.dispersion().filter(|&dispersion| dispersion > BURSTY) {
        notes.push(format!(
            "requests came in bursts (their number in 100 ms varies {dispersion:.0} times as much as that of independent ones); \
             the load spreads them evenly over the time"
        ));
    }
    let gone = profile.write_zeroes + profile.discards;
    if gone > 0 {
        notes.push(format!("{gone} requests to write zeroes or to discard are left out"));
    }
    let lost: f64 = profile.requests() as f64 * SMALLEST_PART;
    for direction in Direction::ALL {
        let requests = profile.kind(direction).requests() as f64;
        if requests > 0.0 && requests < lost {
            notes.push(format!("the few {}s ({requests}) are left out", direction.name()));
        }
    }
}

impl Export {
    /// The document that `weir bench --jobs` reads.
    #[must_use]
    pub fn to_bench(&self) -> String {
        let named = |job: &Job| NamedWorkload {
            name: job.name.clone(),
            target: job.target.to_string(),
            workload: job.workload.clone(),
        };
        let jobs = Jobs { version: JOBS_VERSION, jobs: self.jobs.iter().map(named).collect() };
        serde_json::to_string_pretty(&jobs).expect("workloads have no keys that JSON lacks")
    }
}

/// Reads the output of [`Export::to_bench`].
///
/// # Errors
/// It is something else, or a job is not possible.
pub fn parse_bench(text: &str) -> Result<Vec<Job>, ExportError> {
    #[derive(Deserialize)]
    struct Versioned {
        version: u32,
    }
    // The version first: fields of another one are not known.
    let Versioned { version } = serde_json::from_str(text)?;
    if !(1..=JOBS_VERSION).contains(&version) {
        return Err(ExportError::Version(version));
    }
    let jobs: Jobs = serde_json::from_str(text)?;
    let job = |NamedWorkload { name, target, workload }: NamedWorkload| {
        let wrong = |error: String| ExportError::Job { name: name.clone(), error };
        workload.validate().map_err(|error| wrong(error.to_string()))?;
        let target = target.parse().map_err(|error: weir_load::LoadError| wrong(error.to_string()))?;
        Ok(Job { name, target, workload, group: 0 })
    };
    jobs.jobs.into_iter().map(job).collect()
}

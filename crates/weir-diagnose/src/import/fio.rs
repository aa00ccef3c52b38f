//! fio's JSON (`--output-format=json`, fio 3): each job is a run. With `json+` a run has its distribution too.

use std::collections::BTreeMap;

use serde::Deserialize;
use weir_formats::fio::parse_fio_size;
use weir_load::summary::Buckets;

use super::{Parsed, cell, mix};
use crate::cell::{Direction, Pattern};
use crate::result::Measurement;

/// Of jobs at the same time in one group, all numbers add up; without this there is no saying what a layer did.
const TOGETHER: &str =
    "ran at the same time as another job: run one after the other (stonewall), or one job with numjobs";

/// Requests in a distribution at most: more is no measurement, and sums of several stay numbers.
const MOST_REQUESTS: u64 = 1 << 48;

#[derive(Deserialize)]
struct Output {
    #[serde(rename = "global options", default)]
    global: BTreeMap<String, String>,
    jobs: Vec<Job>,
}

#[derive(Deserialize)]
struct Job {
    jobname: String,
    #[serde(default)]
    groupid: u64,
    #[serde(default)]
    error: i64,
    #[serde(rename = "job options", default)]
    options: BTreeMap<String, String>,
    read: Part,
    write: Part,
}

/// One direction of a job.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Part {
    io_bytes: u64,
    total_ios: u64,
    iops: f64,
    bw_bytes: f64,
    /// Milliseconds.
    runtime: f64,
    lat_ns: Latency,
    clat_ns: Latency,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Latency {
    mean: f64,
    max: f64,
    percentile: BTreeMap<String, f64>,
    /// Nanoseconds, and requests that took about as long; `json+` alone has them.
    bins: BTreeMap<u64, u64>,
}

impl Latency {
    fn buckets(&self) -> Buckets {
        let all = self.bins.values().try_fold(0u64, |all, count| all.checked_add(*count));
        if all.is_none_or(|all| all > MOST_REQUESTS) {
            return Buckets::default();
        }
        let counted = self.bins.iter().filter(|(_, count)| **count > 0);
        Buckets(counted.map(|(latency, count)| (*latency, *count)).collect()).thinned()
    }
}

type Problem = (String, String);

/// The runs of a file.
pub fn parse(text: &str) -> Result<Vec<Parsed>, Problem> {
    // fio's notes may stand before the document.
    let start = text.find('{').ok_or((String::new(), "neither fio's JSON nor DiskSpd's XML".to_owned()))?;
    let mut documents = serde_json::Deserializer::from_str(&text[start..]).into_iter::<Output>();
    let output = documents.next().unwrap_or_else(|| serde_json::from_str(""));
    let output = output.map_err(|error| (String::new(), format!("not fio's JSON: {error}")))?;
    groups(&output).map(|jobs| run(&output.global, &jobs)).collect()
}

/// The jobs of one group: with `numjobs` and without `group_reporting` one run is several entries.
fn groups(output: &Output) -> impl Iterator<Item = Vec<&Job>> {
    let mut groups: BTreeMap<u64, Vec<&Job>> = BTreeMap::new();
    for job in &output.jobs {
        groups.entry(job.groupid).or_default().push(job);
    }
    groups.into_values()
}

fn run(global: &BTreeMap<String, String>, jobs: &[&Job]) -> Result<Parsed, Problem> {
    let first = jobs[0];
    let place = format!(", job {:?}", first.jobname);
    if jobs.iter().any(|job| job.jobname != first.jobname) {
        return Err((place, TOGETHER.to_owned()));
    }
    let parsed = parse_run(global, first, jobs).map_err(|problem| (place.clone(), problem))?;
    Ok(Parsed { place, ..parsed })
}

fn parse_run(global: &BTreeMap<String, String>, first: &Job, jobs: &[&Job]) -> Result<Parsed, String> {
    let option = |names: &[&str]| {
        let named =
            |options: &'_ BTreeMap<String, String>| names.iter().find_map(|name| options.get(*name).cloned());
        named(&first.options).or_else(|| named(global))
    };
    let number = |names: &[&str], default: u64| match option(names) {
        None => Ok(default),
        Some(text) => text.parse().map_err(|_| format!("{} is {text:?}: a whole number is needed", names[0])),
    };
    let access = option(&["rw", "readwrite"]).unwrap_or_else(|| "read".to_owned());
    let access = access_of(&access, || number(&["rwmixread"], 50))?;
    let block = match option(&["bs", "blocksize"]) {
        None => 4096,
        Some(text) => parse_fio_size(&text)
            .map_err(|error| format!("bs is {text:?}: one block size is needed ({error})"))?,
    };
    let threads = number(&["numjobs"], 1)?;
    if jobs.len() > 1 && jobs.len() as u64 != threads {
        return Err(TOGETHER.to_owned());
    }
    let depth = number(&["iodepth"], 1)?.checked_mul(threads).and_then(|depth| u32::try_from(depth).ok());
    let threads = u32::try_from(threads).map_err(|_| format!("{threads} jobs are too many"))?;
    let sync = option(&["sync"]).is_some_and(|sync| !["0", "none"].contains(&sync.as_str()));
    let cell = cell(block, access, sync, depth.ok_or("iodepth times numjobs is too large")?, threads)?;
    let parts = jobs.iter().map(|job| measurement(job, access.1));
    let measurement = parts.reduce(|a, b| Ok(a?.beside(&b?))).ok_or("there is no job")??;
    // A number of the system's error, not of failed I/Os.
    let error = jobs.iter().map(|job| job.error).find(|error| *error != 0);
    let failed = error.map(|error| format!("fio's job ended with error {error}"));
    Ok(Parsed { place: String::new(), cell, measurement, failed })
}

fn access_of(text: &str, reads: impl Fn() -> Result<u64, String>) -> Result<(Pattern, Direction), String> {
    Ok(match text {
        "read" => (Pattern::Sequential, Direction::Read),
        "write" => (Pattern::Sequential, Direction::Write),
        "randread" => (Pattern::Random, Direction::Read),
        "randwrite" => (Pattern::Random, Direction::Write),
        "rw" | "readwrite" => (Pattern::Sequential, mix(reads()?)?),
        "randrw" => (Pattern::Random, mix(reads()?)?),
        other => return Err(format!("rw is {other:?}: reads, writes and their mixes can be compared")),
    })
}

fn measurement(job: &Job, direction: Direction) -> Result<Measurement, String> {
    let measurement = match direction {
        Direction::Read => of_part(&job.read),
        Direction::Write => of_part(&job.write),
        Direction::Mixed(_) => of_part(&job.read).beside(&of_part(&job.write)),
    };
    if measurement.ios == Some(0) && job.error == 0 {
        return Err("no I/O was completed".to_owned());
    }
    Ok(measurement)
}

/// The total latency where it has percentiles (`lat_percentiles=1`), else that from submission to completion.
fn of_part(part: &Part) -> Measurement {
    let latency = if part.lat_ns.percentile.is_empty() { &part.clat_ns } else { &part.lat_ns };
    let percentile = |name: &str| latency.percentile.get(name).copied();
    Measurement {
        iops: part.iops,
        mib_per_s: Some(part.bw_bytes / f64::from(1 << 20)),
        mib_per_s_step: 0.0,
        mean_ns: Some(part.lat_ns.mean).filter(|mean| *mean > 0.0),
        p50_ns: percentile("50.000000"),
        p99_ns: percentile("99.000000"),
        p99_9_ns: percentile("99.900000"),
        max_ns: Some(part.lat_ns.max).filter(|max| *max > 0.0),
        ios: Some(part.total_ios),
        errors: 0,
        cpu_seconds: None,
        bytes: Some(part.io_bytes),
        runtime_seconds: Some(part.runtime / 1e3).filter(|seconds| *seconds > 0.0),
        buckets_ns: latency.buckets(),
        ..Measurement::default()
    }
}

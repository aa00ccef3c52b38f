//! A load made from a profile has the same profile again: in virtual time, on simulated targets.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use weir_block::size::Size;
use weir_block::{Nanos, Observe, RequestKind};
use weir_formats::fio::{read_jobs, write_jobs};
use weir_load::job::Job;
use weir_load::{Arrivals, Target, Workload};
use weir_profile::compare::{Row, compare};
use weir_profile::replay::{Export, export, parse_bench, rehearse};
use weir_profile::{Profile, Profiler, Settings};

const DISK: u64 = 4 << 30;

fn job(rw: &str, sizes: &str, pattern: &str, rate: u64, seed: u64) -> Job {
    let mix: weir_load::BlockMix = sizes.parse().unwrap();
    let workload = Workload {
        access: rw.parse().unwrap(),
        pattern: pattern.parse().unwrap(),
        block_size: mix.largest(),
        mix: (mix.shares().len() > 1).then_some(mix),
        rate: Some(rate),
        arrivals: Arrivals::Poisson,
        runtime: Some(Duration::from_secs(30)),
        size: Some(Size(256 << 20)),
        seed,
        ..Workload::default()
    };
    Job { name: rw.replace(':', "-"), target: target(), workload, group: 0 }
}

fn target() -> Target {
    "null:4G".parse().unwrap()
}

fn profile(jobs: &[Job]) -> Profile {
    let settings = Settings { interval: Duration::from_secs(1), ..Settings::default() };
    let profile = rehearse(jobs, DISK, settings).unwrap();
    Profile { disk_bytes: Some(DISK), ..profile }
}

fn show(rows: &[Row], exported: &Export) -> String {
    let row =
        |row: &Row| format!("{}: {:.1} {:.1} {:?}\n", row.name, row.original, row.replay, row.difference);
    let jobs = exported
        .jobs
        .iter()
        .map(|job| format!("{}: {} over {:?}\n", job.name, job.workload, job.workload.size));
    rows.iter().map(row).chain(jobs).collect()
}

/// All figures are reproduced within `percent`.
fn comes_back(jobs: &[Job], percent: f64) -> Export {
    let original = profile(jobs);
    let exported = export(&original, &target(), None).unwrap();
    let rows = compare(&original, &profile(&exported.jobs));
    for row in &rows {
        let off = row.difference.unwrap_or_default().abs();
        assert!(off <= percent, "{}: {}", row.name, show(&rows, &exported));
    }
    exported
}

#[test]
fn a_load_of_one_kind_comes_back() {
    for (rw, sizes, pattern) in [
        ("randrw:70", "4k", "zipf:1.1"),
        ("randread", "4k", "zipf:0.8"),
        ("randrw:30", "8k", "hot:90/10"),
        ("randwrite", "16k", "plain"),
        ("randrw:70", "4k:70,16k:30", "zipf:0.9"),
        ("randrw:50", "4k:60,64k:40", "plain"),
    ] {
        let exported = comes_back(&[job(rw, sizes, pattern, 2_000, 9)], 10.0);
        assert_eq!(exported.jobs.len(), if rw.contains(':') { 2 } else { 1 }, "{rw}");
    }
}

#[test]
fn a_database_with_its_journal_comes_back() {
    let pages = job("randrw:75", "8k", "zipf:0.95", 1_500, 3);
    let mut journal = job("write", "4k:50,16k:50", "plain", 400, 4);
    (journal.workload.offset, journal.workload.size) = (Size(1 << 30), Some(Size(16 << 20)));
    journal.workload.flush_every = Some(2);
    let exported = comes_back(&[pages, journal], 10.0);
    let names: Vec<&str> = exported.jobs.iter().map(|job| job.name.as_str()).collect();
    assert_eq!(names, ["random-read", "random-write", "sequential-write"]);
    assert!(exported.jobs[2].workload.flush_every.is_some());
}

#[test]
fn steps_come_back() {
    let mut steps = job("read", "4k", "stride:64k", 1_000, 5);
    steps.workload.arrivals = Arrivals::Fixed;
    let exported = comes_back(&[steps], 10.0);
    let job = &exported.jobs[0];
    assert_eq!(
        (job.name.as_str(), job.workload.pattern.to_string().as_str()),
        ("strided-read", "stride:64KiB")
    );
    assert_eq!(job.workload.arrivals, Arrivals::Fixed, "it came as if by a clock");
    assert!(write_jobs(&exported.jobs, &[]).unwrap().contains("\nrw=read:61440\n"));
}

#[test]
fn a_shorter_load_and_bursts_are_said() {
    let mut profiler = Profiler::new(Settings::default(), Nanos(0), Duration::ZERO);
    for request in 0..20_000u64 {
        let at = request / 1_000 * 500_000_000 + request % 1_000 * 1_000;
        profiler.observe(Nanos(at), RequestKind::Write, request * 7_919 % 65_536 * 4096, 4096);
        profiler.observe(Nanos(at), RequestKind::Discard, 0, 4096);
    }
    let bursts = profiler.profile(Nanos(10_000_000_000), "x");
    let exported = export(&bursts, &target(), Some(Duration::from_secs(2))).unwrap();
    let notes = exported.notes.join("\n");
    for hint in
        ["shorter than what was watched", "came in bursts", "20000 requests to write zeroes or to discard"]
    {
        assert!(notes.contains(hint), "{hint}: {notes}");
    }
    assert_eq!(exported.jobs[0].workload.runtime, Some(Duration::from_secs(2)));
    let empty = Profiler::new(Settings::default(), Nanos(0), Duration::ZERO).profile(Nanos(1), "x");
    assert!(export(&empty, &target(), None).unwrap_err().to_string().contains("nothing to ask for"));
}

#[test]
fn documents_and_job_files_are_read_back() {
    let pages = job("randrw:75", "4k:70,8k:30", "hot:80/20", 1_500, 3);
    let journal = job("write", "4k", "plain", 400, 4);
    let exported = export(&profile(&[pages, journal]), &target(), None).unwrap();
    assert_eq!(parse_bench(&exported.to_bench()).unwrap(), exported.jobs);
    let text = write_jobs(&exported.jobs, &["disk\nx".into()]).unwrap();
    let jobs = read_jobs(&text).unwrap();
    assert_eq!(jobs.len(), exported.jobs.len());
    for (from_fio, job) in jobs.iter().zip(&exported.jobs) {
        assert_eq!(from_fio.workload.to_string(), job.workload.to_string(), "{text}");
        assert_eq!(
            (from_fio.workload.size, from_fio.workload.runtime),
            (job.workload.size, job.workload.runtime)
        );
    }
    let mut former: serde_json::Value = serde_json::from_str(&exported.to_bench()).unwrap();
    assert_eq!(former["version"], 2);
    former["version"] = 1.into();
    for job in former["jobs"].as_array_mut().unwrap() {
        let workload = job["workload"].as_object_mut().unwrap();
        for (now, before) in [("runtime_seconds", "runtime"), ("warmup_seconds", "warmup")] {
            let time = Duration::from_secs_f64(workload.remove(now).unwrap().as_f64().unwrap());
            workload.insert(
                before.into(),
                serde_json::json!({"secs": time.as_secs(), "nanos": time.subsec_nanos()}),
            );
        }
    }
    assert_eq!(parse_bench(&former.to_string()).unwrap(), exported.jobs);
    for (text, hint) in [
        ("{", "not a list of jobs"),
        ("{\"version\": 9, \"jobs\": []}", "version 9"),
        ("{\"version\": 3, \"jobs\": [{\"colour\": 1}]}", "version 3"),
        (&exported.to_bench().replace("\"rate\": ", "\"rate\": 0"), "not a list of jobs"),
        (&exported.to_bench().replace("\"queue_depth\": 64", "\"queue_depth\": 0"), "job random-read"),
    ] {
        let error = parse_bench(text).unwrap_err().to_string();
        assert!(error.contains(hint), "{text}: {error}");
    }
}

#[test]
fn reads_and_writes_of_different_blocks_come_back() {
    // A cold table that is read, and a few pages that are repeatedly written.
    let table = job("randread", "8k", "plain", 900, 3);
    let mut pages = job("randwrite", "8k:60,16k:40", "hot:60/3", 600, 4);
    (pages.workload.offset, pages.workload.size) = (Size(1 << 30), Some(Size(64 << 20)));
    comes_back(&[table, pages], 6.0);
}

#[test]
fn damaged_numbers_and_slow_disks_make_no_harm() {
    let mut profiler = Profiler::new(Settings::default(), Nanos(0), Duration::ZERO);
    for request in 0..200u64 {
        profiler.observe(Nanos(request * 10_000_000_000), RequestKind::Read, request % 7 * 4096, 4096);
    }
    let slow = profiler.profile(Nanos(2_000_000_000_000), "x");
    let exported = export(&slow, &target(), None).unwrap();
    assert!(exported.notes.join("\n").contains("fewer than one a second (0.0"), "{:?}", exported.notes);

    let mut odd = profile(&[job("read", "4k", "stride:64k", 100, 5)]);
    odd.read.strides = vec![(0, 3_000)];
    odd.read.alignments.0 = vec![(5_001, 1.0)];
    odd.read.random.curve.distances.0 = vec![(1 << 50, 3.0), (u64::MAX, 1.0)];
    odd.disk_bytes = Some(1 << 60);
    assert!(odd.hit_ratio(u64::MAX, None) <= 1.0 && odd.cache_for(0.5, None).is_none_or(|bytes| bytes > 0));
    if let Ok(exported) = export(&odd, &target(), None) {
        assert!(
            !write_jobs(&exported.jobs, &exported.notes).unwrap().is_empty()
                && !exported.to_bench().is_empty()
        );
    }
    odd.disk_bytes = Some(0);
    let _ = export(&odd, &target(), None);
}

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

    // A former version's profile, of so many first uses that a range for all of them is longer than 64 bits can say.
    let mut vast = profile(&[job("randread", "4k", "plain", 100, 5)]);
    (vast.disk_bytes, vast.end_bytes) = (None, 0);
    let part = &mut vast.read.random;
    (part.requests, part.blocks, part.curve.cold) = (100_000_000_000_000, 100_000_000_000_000, 1e14);
    let exported = export(&vast, &target(), None).unwrap();
    assert!(exported.jobs.iter().all(|job| job.workload.size.is_some_and(|size| size.0 <= 1 << 61)));
}

/// A disk that was filled in order before the requests of `random`, which get the time and the number of a request and return
/// its kind and block.
fn filled_first(bytes: u64, requests: u64, mut random: impl FnMut(u64) -> (RequestKind, u64)) -> Profile {
    const FILL: u64 = 1 << 20;
    let settings = Settings { sampled_per_second: u32::MAX, ..Settings::default() };
    let mut profiler = Profiler::new(settings, Nanos(0), Duration::ZERO);
    for block in 0..bytes / FILL {
        profiler.observe(Nanos(block * 1_000_000), RequestKind::Write, block * FILL, FILL);
    }
    let start = Nanos(bytes / FILL * 1_000_000);
    for request in 0..requests {
        let (kind, block) = random(request);
        profiler.observe(start + Duration::from_micros(request * 200), kind, block * 4096, 4096);
    }
    let profile = profiler.profile(start + Duration::from_micros(requests * 200), "filled");
    Profile { disk_bytes: Some(bytes), ..profile }
}

/// The jobs by name, with the start, length and pattern of each.
fn ranges(exported: &Export) -> Vec<(&str, u64, u64, String)> {
    let range = |job: &'_ Job| (job.workload.offset.0, job.workload.size.unwrap().0);
    let jobs = exported.jobs.iter();
    jobs.map(|job| (&*job.name, range(job).0, range(job).1, job.workload.pattern.to_string())).collect()
}

/// `weir bench` fills a disk before it measures. Nothing after that is the first use of a block, and the load's ranges are
/// what each kind of request has used all the same.
#[test]
fn a_disk_that_was_filled_before_comes_back() {
    const DISK: u64 = 256 << 20;
    let mut random = fastrand::Rng::with_seed(8);
    for (blocks, least, most) in [(65_536, 200 << 20, 256 << 20), (16_384, 60 << 20, 68 << 20)] {
        let profile = filled_first(DISK, 150_000, |request| {
            let kind = if request % 4 == 0 { RequestKind::Write } else { RequestKind::Read };
            (kind, random.u64(0..blocks))
        });
        let exported = export(&profile, &target(), None).unwrap();
        let ranges = ranges(&exported);
        let names: Vec<&str> = ranges.iter().map(|range| range.0).collect();
        assert_eq!(
            names,
            ["random-read", "random-write"],
            "the filling is less than a hundredth: {ranges:?}"
        );
        for (name, start, length, pattern) in ranges {
            assert_eq!((start, &*pattern), (0, "plain"), "{name}");
            assert!((least..=most).contains(&length), "{name}: {length} of {blocks} blocks");
        }
    }
    // Few requests after it: the filling is a job, over all of the disk; what reads it in order afterwards reads the same range.
    let profile = filled_first(DISK, 20_000, |_| (RequestKind::Read, random.u64(0..65_536)));
    let exported = export(&profile, &target(), None).unwrap();
    let [(first, _, used, _), (second, at, filled, _)] = &ranges(&exported)[..] else {
        panic!("{:?}", exported.jobs)
    };
    assert_eq!((*first, *second, *at), ("random-read", "sequential-write", 0));
    // The first request of a stream is not yet at its end.
    assert!((DISK - (1 << 20)..=DISK).contains(filled), "{filled}");
    assert!(*used > 150 << 20, "{used}");
    let profile = filled_first(DISK, 65_536, |request| (RequestKind::Read, request));
    let exported = export(&profile, &target(), None).unwrap();
    let [(name, at, length, _)] = &ranges(&exported)[..] else { panic!("{:?}", exported.jobs) };
    assert_eq!((*name, *at), ("sequential-read", 0));
    assert!(*length > 250 << 20, "{length}");
}

/// A trace tells where its requests went, and nothing of the size of the disk. Without reuse, no range is too large for the
/// requests; the load stays within the trace's.
#[test]
fn a_trace_without_reuse_gets_its_own_range() {
    const END: u64 = 1 << 30;
    let trace = |blocks: &[u64]| {
        let mut profiler = Profiler::new(Settings::default(), Nanos(0), Duration::ZERO);
        for (request, block) in (0..20_000).zip(blocks) {
            profiler.observe(Nanos(request * 1_000_000), RequestKind::Read, block * 4096, 4096);
        }
        profiler.profile(Nanos(20_000_000_000), "trace")
    };
    let mut blocks: Vec<u64> = (0..END / 4096).collect();
    fastrand::Rng::with_seed(9).shuffle(&mut blocks);
    let profile = trace(&blocks);
    assert_eq!(profile.disk_bytes, None);
    let exported = export(&profile, &target(), None).unwrap();
    let [(_, 0, length, _)] = ranges(&exported)[..] else { panic!("{:?}", exported.jobs) };
    assert!((END / 2..=END).contains(&length), "{length}");
    // A profile of a former version does not have the range.
    let former = Profile { end_bytes: 0, ..profile };
    let exported = export(&former, &target(), None).unwrap();
    let [(_, 0, length, _)] = ranges(&exported)[..] else { panic!("{:?}", exported.jobs) };
    assert!(length <= 100 * 20_000 * 4096, "{length}");
    // Equal steps that begin again at the start of the disk: the number of blocks and 7919 have no common divisor.
    let steps: Vec<u64> = (0..20_000).map(|request| request * 7_919 % (END / 4096)).collect();
    let exported = export(&trace(&steps), &target(), None).unwrap();
    assert!(exported.jobs.iter().any(|job| job.name == "strided-read"), "{:?}", exported.jobs);
    for (name, start, length, _) in ranges(&exported) {
        assert!(start + length <= END, "{name}: {start} + {length}");
    }
}

//! The profiler compared with simple reference implementations: simulated caches, lists and counts of the same requests.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use proptest::prelude::*;
use weir_block::{Nanos, Observe, RequestKind};
use weir_profile::{BLOCK, Class, Direction, Profile, Profiler, Settings};

#[derive(Clone, Copy, Debug)]
struct Request {
    at: Nanos,
    kind: RequestKind,
    offset: u64,
    length: u64,
}

impl Request {
    fn blocks(self) -> std::ops::RangeInclusive<u64> {
        self.offset / BLOCK..=(self.offset + self.length - 1) / BLOCK
    }
}

const UNBOUNDED: Settings =
    Settings { samples: 8192, sampled_per_second: u32::MAX, interval: Duration::from_secs(1) };

fn profile(settings: Settings, trace: &[Request]) -> Profile {
    let mut profiler = Profiler::new(settings, Nanos(0), Duration::ZERO);
    let memory = profiler.memory();
    for request in trace {
        profiler.observe(request.at, request.kind, request.offset, request.length);
    }
    assert_eq!(profiler.memory(), memory, "it does not grow");
    let end = trace.last().map_or(Nanos(0), |request| request.at);
    let profile = profiler.profile(end, "test");
    let text = serde_json::to_string(&profile).unwrap();
    assert!(Profile::from_json(&text).unwrap() == profile, "what is written is read back");
    profile
}

/// Hits of an LRU cache of `size` blocks, by simulation.
fn play(trace: &[Request], size: usize) -> f64 {
    let (mut used_at, mut by_age) = (HashMap::new(), BTreeMap::new());
    let (mut hits, mut all) = (0u64, 0u64);
    for request in trace {
        for block in request.blocks() {
            all += 1;
            if let Some(before) = used_at.insert(block, all) {
                hits += 1;
                by_age.remove(&before);
            } else if used_at.len() > size {
                let (_, oldest) = by_age.pop_first().unwrap();
                used_at.remove(&oldest);
            }
            by_age.insert(all, block);
        }
    }
    hits as f64 / all as f64
}

/// Zipf by inversion of the summed formula: slow and plain. Ranks are scattered over the range.
struct Zipf(Vec<f64>);

impl Zipf {
    fn new(count: usize, theta: f64) -> Zipf {
        let mut sum = 0.0;
        let weight = |rank: usize| {
            sum += (rank as f64).powf(-theta);
            sum
        };
        Zipf((1..=count).map(weight).collect())
    }

    fn draw(&self, random: &mut fastrand::Rng) -> u64 {
        let drawn = random.f64() * self.0.last().unwrap();
        let rank = self.0.partition_point(|&sum| sum < drawn) as u64;
        rank.wrapping_mul(1_000_003) % self.0.len() as u64
    }
}

#[derive(Clone, Copy, Debug)]
enum Shape {
    Zipf(f64),
    Scan,
    Mixed(f64),
}

/// `count` requests to a range of `blocks`, 5,000 a second.
fn trace(shape: Shape, blocks: usize, count: usize, seed: u64) -> Vec<Request> {
    let mut random = fastrand::Rng::with_seed(seed);
    let zipf =
        Zipf::new(blocks, if let Shape::Zipf(theta) | Shape::Mixed(theta) = shape { theta } else { 0.0 });
    let mut scanned = 0;
    let next = |number: usize| {
        let scans = match shape {
            Shape::Zipf(_) => false,
            Shape::Scan => true,
            // Sequential scans alternating with random requests.
            Shape::Mixed(_) => number / 4_000 % 3 == 2,
        };
        let block = if scans { scanned } else { zipf.draw(&mut random) };
        let length = if scans { 16 } else { [1, 1, 2, 4][random.usize(0..4)] };
        if scans {
            scanned = (scanned + 16) % blocks as u64;
        }
        let kind = if random.u8(0..10) < 7 { RequestKind::Read } else { RequestKind::Write };
        Request { at: Nanos(number as u64 * 200_000), kind, offset: block * BLOCK, length: length * BLOCK }
    };
    (0..count).map(next).collect()
}

fn check_curve(
    shape: Shape,
    blocks: usize,
    count: usize,
    seed: u64,
    settings: Settings,
) -> Result<(), TestCaseError> {
    let trace = trace(shape, blocks, count, seed);
    let profile = profile(settings, &trace);
    let sizes: Vec<usize> = (1..=6).map(|sixth| blocks * sixth * sixth / 34).collect();
    let mut off = 0.0;
    for &size in &sizes {
        let (is, should) = (profile.hit_ratio(size as u64 * BLOCK, None), play(&trace, size));
        off += (is - should).abs();
        if (is - should).abs() <= 0.02 {
            continue;
        }
        // A curve with a cliff (a loop) cannot be compared at the cliff: there, a few percent of the cache's size decide.
        let (less, more) = (play(&trace, size * 95 / 100), play(&trace, size * 105 / 100));
        prop_assert!(
            less - 0.02 <= is && is <= more + 0.02,
            "{shape:?} {blocks} seed {seed}, {size} blocks: {is} instead of {should} ({less} to {more}), sample {:?}",
            profile.sampling
        );
    }
    let mean = off / sizes.len() as f64;
    prop_assert!(
        mean < 0.02 || matches!(shape, Shape::Scan),
        "{shape:?} {blocks} seed {seed}: mean error {mean}"
    );
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]

    #[test]
    fn the_sampled_curve_is_that_of_played_caches(
        which in 0usize..3, theta in 0.5f64..1.2, blocks in 20_000usize..50_000, seed: u64,
    ) {
        let shape = [Shape::Zipf(theta), Shape::Scan, Shape::Mixed(theta)][which];
        check_curve(shape, blocks, 60_000, seed, UNBOUNDED)?;
    }
}

#[test]
fn each_shape_has_its_curve_also_when_the_time_for_sampling_is_bounded() {
    for shape in [Shape::Zipf(0.9), Shape::Scan, Shape::Mixed(0.8)] {
        check_curve(shape, 40_000, 80_000, 11, UNBOUNDED).unwrap();
        check_curve(shape, 40_000, 80_000, 12, Settings { sampled_per_second: 2_000, ..UNBOUNDED }).unwrap();
    }
}

/// Compares the figures that need no sample, and all figures while the sample has room for every block, with plain counts.
fn check_counts(trace: &[Request], profile: &Profile) {
    for direction in Direction::ALL {
        let kind = if direction == Direction::Read { RequestKind::Read } else { RequestKind::Write };
        let mine: Vec<_> = trace.iter().filter(|request| request.kind == kind).collect();
        let is = profile.kind(direction);
        assert_eq!(is.requests() as usize, mine.len());
        assert_eq!(is.bytes(), mine.iter().map(|request| request.length).sum::<u64>());
        assert_eq!(is.blocks(), mine.iter().map(|request| request.blocks().count() as u64).sum::<u64>());
        let mut sizes: BTreeMap<u64, f64> = BTreeMap::new();
        mine.iter().for_each(|request| *sizes.entry(request.length).or_default() += 1.0);
        assert_eq!(is.sizes().0, sizes.into_iter().collect::<Vec<_>>());
    }
    let (mut read, mut written, mut last) = (HashSet::new(), HashSet::new(), HashMap::new());
    let (mut first_reads, mut re_reads, mut after_write, mut new_writes, mut overwrites) = (0, 0, 0, 0, 0);
    for request in trace {
        for block in request.blocks() {
            let before = last.insert(block, request.kind);
            match (request.kind, before) {
                (RequestKind::Read, None) => first_reads += 1,
                (RequestKind::Read, Some(RequestKind::Write)) => after_write += 1,
                (RequestKind::Read, _) => re_reads += 1,
                _ if written.contains(&block) => overwrites += 1,
                _ => new_writes += 1,
            }
            if request.kind == RequestKind::Read {
                read.insert(block)
            } else {
                written.insert(block)
            };
        }
    }
    let reuse = profile.reuse;
    let reads = [reuse.first_reads, reuse.re_reads, reuse.reads_after_write];
    assert_eq!(reads, [first_reads, re_reads, after_write].map(f64::from));
    assert_eq!([reuse.new_writes, reuse.overwrites], [new_writes, overwrites].map(f64::from));
    assert_eq!(profile.working_set.bytes as u64, read.union(&written).count() as u64 * BLOCK);
}

/// The share of written blocks that are written again before `room` more blocks have been written.
fn absorbed(trace: &[Request], room: u64) -> f64 {
    let (mut at, mut clock, mut absorbed) = (HashMap::new(), 0u64, 0u64);
    for request in trace.iter().filter(|request| request.kind == RequestKind::Write) {
        let now = clock;
        for block in request.blocks() {
            absorbed += u64::from(at.insert(block, now).is_some_and(|before| now - before <= room));
            clock += 1;
        }
    }
    absorbed as f64 / clock as f64
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn counts_are_exact_while_every_block_is_sampled(theta in 0.2f64..1.3, blocks in 50usize..6_000, seed: u64) {
        let trace = trace(Shape::Zipf(theta), blocks, 8_000, seed);
        let profile = profile(UNBOUNDED, &trace);
        prop_assert_eq!(profile.sampling.rate, 1.0);
        check_counts(&trace, &profile);
        for room in [15, 63, 255, 1023] {
            let (is, should) = (profile.absorbed_by_bytes(room * BLOCK), absorbed(&trace, room));
            prop_assert!((is - should).abs() < 0.02, "{room} blocks: {is} {should}");
        }
        let size = blocks / 4;
        prop_assert!((profile.hit_ratio(size as u64 * BLOCK, None) - play(&trace, size)).abs() < 0.01);
    }
}

#[test]
fn streams_among_random_requests_are_told_apart() {
    let mut random = fastrand::Rng::with_seed(4);
    let mut ends = [0u64, 1 << 40, 2 << 40];
    let mut went_on = 0;
    let next = |number: u64| {
        let stream = random.usize(0..6);
        let (kind, length) = (RequestKind::Write, 512 * random.u64(1..100));
        let offset = match ends.get_mut(stream) {
            Some(end) => {
                went_on += u64::from(!end.is_multiple_of(1 << 40));
                std::mem::replace(end, *end + length)
            }
            // Far from each other: none begins where another has ended.
            None => (8 << 40) + random.u64(0..1 << 20) * (1 << 20),
        };
        Request { at: Nanos(number * 1_000), kind, offset, length }
    };
    let trace: Vec<Request> = (0..20_000).map(next).collect();
    let profile = profile(UNBOUNDED, &trace);
    // A stream that is idle while some 16 others begin is evicted.
    let found = profile.write.sequential.requests;
    assert!(found <= went_on && found > went_on * 99 / 100, "{found} of {went_on}");
    assert_eq!((profile.write.strided.requests, profile.read.requests()), (0, 0));
    assert!(
        (9_500..10_500).contains(&went_on) && (profile.class_share(Class::Sequential) - 0.5).abs() < 0.025
    );
}

#[test]
fn a_sample_says_how_much_is_read_again_and_absorbed() {
    let trace = trace(Shape::Zipf(0.9), 60_000, 200_000, 3);
    let all = profile(Settings { samples: 1 << 20, ..UNBOUNDED }, &trace);
    let sampled = profile(UNBOUNDED, &trace);
    assert!(all.sampling.rate == 1.0 && sampled.sampling.rate < 0.3, "{:?}", sampled.sampling);
    let close =
        |is: f64, should: f64| assert!((is - should).abs() < should * 0.06, "{is} instead of {should}");
    close(sampled.working_set.bytes, all.working_set.bytes);
    close(sampled.reuse.first_reads, all.reuse.first_reads);
    close(sampled.reuse.re_reads, all.reuse.re_reads);
    close(sampled.reuse.reads_after_write, all.reuse.reads_after_write);
    close(sampled.reuse.new_writes, all.reuse.new_writes);
    close(sampled.reuse.overwrites, all.reuse.overwrites);
    for room in [1_000, 10_000, 60_000] {
        let (is, should) = (sampled.absorbed_by_bytes(room * BLOCK), absorbed(&trace, room));
        assert!((is - should).abs() < 0.02, "{room} blocks: {is} {should}");
    }
    assert_eq!(sampled.working_set.over_time.len(), 39, "seconds of 40 that are over at its last request");
}

#[test]
fn memory_and_sampling_stay_in_bounds_whatever_comes() {
    let mut profiler = Profiler::new(Settings::default(), Nanos(0), Duration::ZERO);
    let memory = profiler.memory();
    assert!(memory < 1_400_000, "{memory}");
    let mut random = fastrand::Rng::with_seed(8);
    let mut now = 0;
    for number in 0..600_000u64 {
        now += random.u64(0..20_000);
        let kind = RequestKind::ALL[random.usize(0..6)];
        let (offset, length) = match number % 4 {
            0 => (random.u64(0..u64::MAX >> 10) << 9, 512 << random.u64(0..12)),
            1 => (u64::MAX - 511, 512),
            2 => (number * 4096, 4096),
            _ => (random.u64(0..64) * 4096, 4096),
        };
        profiler.observe(Nanos(now), kind, offset, length);
    }
    assert_eq!(profiler.memory(), memory);
    let profile = profiler.profile(Nanos(now), "test");
    assert!((512..=8_192).contains(&profile.sampling.blocks), "{:?}", profile.sampling);
    let text = serde_json::to_string(&profile).unwrap();
    assert!(text.len() < 300_000, "{}", text.len());
    assert!(Profile::from_json(&text).unwrap() == profile, "what is written is read back");
}

#[test]
fn profiles_of_stretches_add_up() {
    let trace = trace(Shape::Mixed(0.9), 4_000, 20_000, 5);
    let (first, second) = trace.split_at(9_000);
    let shifted = |trace: &[Request]| {
        let start = trace[0].at;
        let shift = |request: &Request| Request { at: Nanos(request.at.0 - start.0), ..*request };
        trace.iter().map(shift).collect::<Vec<_>>()
    };
    let mut sum = profile(UNBOUNDED, &shifted(first));
    sum.add(&profile(UNBOUNDED, &shifted(second)));
    let whole = profile(UNBOUNDED, &trace);
    assert_eq!((sum.read.requests(), sum.write.bytes()), (whole.read.requests(), whole.write.bytes()));
    assert_eq!(sum.sizes(), whole.sizes());
    assert_eq!(sum.source, "test");
    let most = sum.most_hits(None);
    assert!(most < whole.most_hits(None) && most > 0.5, "each stretch begins cold: {most}");
    let text = serde_json::to_string(&sum).unwrap();
    assert!(Profile::from_json(&text).is_ok());
}

#[test]
fn what_is_not_a_profile_is_refused_with_a_reason() {
    let text = serde_json::to_string(&profile(UNBOUNDED, &trace(Shape::Scan, 100, 50, 1))).unwrap();
    for (from, to, hint) in [
        ("\"version\":1", "\"version\":7", "version 7"),
        ("\"version\":1,", "", "weir profile record"),
        ("{", "[", "not a profile"),
        ("\"seconds\":", "\"seconds\":-", "counts cannot be"),
        ("[[65536,", "[[65537,", "sizes cannot be"),
        ("\"seconds\":", "\"seconds\":1e300,\"second\":", "counts cannot be"),
        ("\"disk_bytes\":null", "\"disk_bytes\":18446744073709551615", "size of the disk cannot be"),
        ("\"requests\":", "\"requests\":9999999999999999", "requests cannot be"),
        ("\"flushes\":0", "\"flushes\":\"x\"", "not a profile"),
        // Everything that several profiles add up is bounded, so that no sum overflows.
        ("\"ticks\":", "\"ticks\":9999999999999999", "times cannot be"),
        ("\"tick_peak\":", "\"tick_peak\":9999999999999999", "times cannot be"),
        ("\"skipped\":", "\"skipped\":9999999999999999", "times cannot be"),
        ("\"burst_seconds\":", "\"burst_seconds\":-", "times cannot be"),
        ("\"active_seconds\":", "\"active_seconds\":9999999999999999", "times cannot be"),
        ("\"watched_seconds\":", "\"watched_seconds\":-", "hours cannot be"),
        ("\"reads\":", "\"reads\":9999999999999999", "hours cannot be"),
        ("\"strides\":[]", "\"strides\":[[1,9999999999999999]]", "strides cannot be"),
    ] {
        assert!(text.contains(from), "{from} in {text}");
        let error = Profile::from_json(&text.replacen(from, to, 1)).unwrap_err().to_string();
        assert!(error.contains(hint), "{from}: {error}");
    }
}

//! A profile for people: small tables and lines.

use weir_node::units::about;
use weir_profile::buckets::Spread;
use weir_profile::{Class, Direction, Hour, KindProfile, Profile};

use crate::output::{list, table};

/// Number of sizes shown; the others are summed.
const SIZES: usize = 5;

/// Cache sizes shown, as divisors of the working set.
const CACHES: [u64; 5] = [32, 8, 4, 2, 1];

/// Everything about a profile.
pub fn show(profile: &Profile) -> String {
    let parts = [
        list(&head(profile)),
        requests(profile),
        list(&times(profile)),
        reuse(profile),
        caches(profile),
        log(profile),
    ];
    parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("\n\n")
}

fn head(profile: &Profile) -> Vec<(&'static str, String)> {
    let sampling = profile.sampling;
    let sample = match sampling.rate {
        rate if rate >= 1.0 => format!("every block that was used ({})", sampling.blocks),
        rate if rate > 0.0 => format!("{} blocks, 1 of {:.0}", sampling.blocks, 1.0 / rate),
        _ => "none".to_owned(),
    };
    let watched = match profile.seconds {
        0.0 => "times are not known".to_owned(),
        seconds => duration(seconds),
    };
    vec![("profile of", profile.source.clone()), ("watched", watched), ("sample", sample)]
}

fn requests(profile: &Profile) -> String {
    let per_second = |count: f64, format: fn(f64) -> String| match profile.seconds {
        0.0 => "-".to_owned(),
        seconds => format(count / seconds),
    };
    let kinds = Direction::ALL.map(|direction| profile.kind(direction));
    let row = |name: &str, of: &dyn Fn(&KindProfile) -> String| {
        let mut row = vec![name.to_owned()];
        row.extend(kinds.iter().map(|kind| of(kind)));
        row
    };
    let class = |class: Class| {
        move |kind: &KindProfile| percent(kind.part(class).requests as f64, kind.requests() as f64)
    };
    let rows = [
        row("requests", &|kind| kind.requests().to_string()),
        row("share", &|kind| percent(kind.requests() as f64, profile.requests() as f64)),
        row("IOPS", &|kind| per_second(kind.requests() as f64, |rate| format!("{rate:.0}"))),
        row("bytes/s", &|kind| per_second(kind.bytes() as f64, |rate| about(rate as u64))),
        row("mean size", &|kind| about(kind.bytes().checked_div(kind.requests()).unwrap_or(0))),
        row("sequential", &class(Class::Sequential)),
        row("strided", &class(Class::Strided)),
        row("random", &class(Class::Random)),
        row("run, median", &|kind| {
            kind.runs.quantile(0.5).map_or_else(|| "-".to_owned(), |run| format!("{run}+ requests"))
        }),
    ];
    let mut text = table(&["", "READS", "WRITES"], &[1, 2], rows);
    for direction in Direction::ALL {
        let sizes = profile.kind(direction).sizes();
        if !sizes.0.is_empty() {
            text.push_str(&format!("\n{} sizes: {}", direction.name(), shares(&sizes)));
        }
    }
    let others = [
        ("flushes", profile.flushes),
        ("discards", profile.discards),
        ("write zeroes", profile.write_zeroes),
    ];
    let others: Vec<String> =
        others.iter().filter(|other| other.1 > 0).map(|(name, count)| format!("{name} {count}")).collect();
    if !others.is_empty() {
        text.push_str(&format!("\nalso: {}", others.join(", ")));
    }
    text
}

/// The most frequent sizes with their shares.
fn shares(sizes: &Spread) -> String {
    let total = sizes.total();
    let mut most: Vec<(u64, f64)> = sizes.0.clone();
    most.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    let named =
        most.iter().take(SIZES).map(|&(size, count)| format!("{} {}", about(size), percent(count, total)));
    let mut named: Vec<String> = named.collect();
    let rest: f64 = most.iter().skip(SIZES).map(|&(_, count)| count).sum();
    if rest > 0.0 {
        named.push(format!("others {}", percent(rest, total)));
    }
    named.join(", ")
}

fn times(profile: &Profile) -> Vec<(&'static str, String)> {
    if profile.seconds == 0.0 {
        return Vec::new();
    }
    let arrival = &profile.arrival;
    let summary = profile.summary();
    let gap = |quantile: f64| {
        arrival.gaps_ns.quantile(quantile).map_or_else(|| "-".to_owned(), |gap| duration(gap as f64 / 1e9))
    };
    let bursts = arrival.bursts.quantile(0.5).map_or_else(String::new, |median| {
        format!(
            "{:.0}, median {median}+ requests; {} of the time",
            arrival.bursts.total(),
            percent(arrival.burst_seconds, profile.seconds)
        )
    });
    let how = summary.dispersion.map_or_else(String::new, |dispersion| {
        let word = match dispersion {
            low if low < 0.5 => "as if by a clock",
            high if high > 3.0 => "in bursts",
            _ => "independently of each other",
        };
        format!("{word} (variance by mean in 100 ms: {dispersion:.1}; Poisson: 1)")
    });
    vec![
        ("between requests", format!("median {}, 90 % {}, 99 % {}", gap(0.5), gap(0.9), gap(0.99))),
        ("they come", how),
        ("busiest 100 ms", format!("{} requests", arrival.tick_peak)),
        ("bursts", bursts),
        (
            "duty cycle",
            summary.duty_percent.map_or_else(String::new, |duty| format!("{duty:.0} % of the seconds")),
        ),
        ("hours, UTC", hours(&profile.hours)),
    ]
}

/// Requests of each hour, relative to its observed time; a dot for an hour without observation.
fn hours(hours: &[Hour]) -> String {
    let rate = |hour: &Hour| {
        (hour.watched_seconds > 0.0).then(|| (hour.reads + hour.writes) as f64 / hour.watched_seconds)
    };
    let rates: Vec<Option<f64>> = hours.iter().map(rate).collect();
    if rates.is_empty() {
        return String::new();
    }
    format!("0 {} 23", spark(&rates))
}

fn reuse(profile: &Profile) -> String {
    let reuse = profile.reuse;
    let reads = reuse.first_reads + reuse.re_reads + reuse.reads_after_write;
    let writes = reuse.new_writes + reuse.overwrites;
    let set = &profile.working_set;
    let mut pairs = vec![(
        "blocks read",
        format!(
            "{} for the first time, {} again, {} after a write",
            percent(reuse.first_reads, reads),
            percent(reuse.re_reads, reads),
            percent(reuse.reads_after_write, reads)
        ),
    )];
    pairs.push((
        "blocks written",
        format!(
            "{} for the first time, {} again",
            percent(reuse.new_writes, writes),
            percent(reuse.overwrites, writes)
        ),
    ));
    pairs.push(("working set", about(set.bytes as u64)));
    if let Some(most) = set.over_time.iter().copied().reduce(f64::max) {
        let points: Vec<Option<f64>> =
            set.over_time.iter().rev().take(60).rev().map(|&bytes| Some(bytes)).collect();
        let line = format!(
            "{} (up to {} in {})",
            spark(&points),
            about(most as u64),
            duration(set.interval_seconds)
        );
        pairs.push(("over time", line));
    }
    list(&pairs)
}

fn caches(profile: &Profile) -> String {
    let hits = |bytes: u64, of: Option<Direction>| format!("{:.1} %", profile.hit_ratio(bytes, of) * 100.0);
    let set = profile.working_set.bytes as u64;
    let row = |name: String, bytes: u64| {
        vec![name, hits(bytes, None), hits(bytes, Some(Direction::Read)), hits(bytes, Some(Direction::Write))]
    };
    let rows = CACHES.iter().map(|divisor| row(about(set / divisor), set / divisor));
    let mut text = table(&["CACHE", "HITS", "OF READS", "OF WRITES"], &[0, 1, 2, 3], rows);
    let summary = profile.summary();
    let needed = summary.cache_for_hits.iter().map(|&(target, bytes)| match bytes {
        Some(bytes) => format!("{target} %: {}", about(bytes)),
        None => format!("{target} %: no cache has so many"),
    });
    text.push_str(&format!(
        "\ncache for hits: {}; at most {:.1} %",
        needed.collect::<Vec<_>>().join(", "),
        summary.most_hits_percent
    ));
    text
}

fn log(profile: &Profile) -> String {
    if profile.write.requests() == 0 {
        return String::new();
    }
    let summary = profile.summary();
    let line = |pairs: Vec<(String, f64)>| {
        let each = pairs.into_iter().map(|(name, percent)| format!("{name}: {percent:.0} %"));
        each.collect::<Vec<_>>().join(", ")
    };
    let bytes = summary.absorbed_by_bytes.iter().map(|&(bytes, percent)| (about(bytes), percent)).collect();
    let mut text = format!("writes absorbed by a log of the last … written bytes: {}", line(bytes));
    if profile.seconds > 0.0 {
        let times = summary.absorbed_by_seconds.iter();
        let times = times.map(|&(seconds, percent)| (duration(seconds as f64), percent)).collect();
        text.push_str(&format!("\nwrites absorbed by a log of the last …: {}", line(times)));
    }
    text
}

/// One character for each value, by its share of the largest.
fn spark(values: &[Option<f64>]) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let most = values.iter().flatten().copied().fold(0.0, f64::max);
    let bar = |value: &Option<f64>| match value {
        None => '·',
        Some(value) if *value <= 0.0 || most <= 0.0 => ' ',
        Some(value) => BARS[((value / most * BARS.len() as f64).ceil() as usize).clamp(1, BARS.len()) - 1],
    };
    values.iter().map(bar).collect()
}

fn percent(part: f64, whole: f64) -> String {
    if whole > 0.0 { format!("{:.1} %", part / whole * 100.0) } else { "-".to_owned() }
}

/// A duration with a suitable unit.
fn duration(seconds: f64) -> String {
    match seconds {
        short if short < 1e-6 => format!("{:.0} ns", short * 1e9),
        short if short < 1e-3 => format!("{:.0} us", short * 1e6),
        short if short < 1.0 => format!("{:.0} ms", short * 1e3),
        short if short < 120.0 => format!("{short:.0} s"),
        long if long < 7200.0 => format!("{:.0} min", long / 60.0),
        long if long < 172_800.0 => format!("{:.1} h", long / 3600.0),
        long => format!("{:.1} days", long / 86_400.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_bars_and_times() {
        assert_eq!(spark(&[None, Some(0.0), Some(1.0), Some(4.0), Some(8.0)]), "· ▁▄█");
        assert_eq!(spark(&[Some(0.0)]), " ");
        for (seconds, text) in
            [(2e-8, "20 ns"), (0.0042, "4 ms"), (60.0, "60 s"), (600.0, "10 min"), (90_000.0, "25.0 h")]
        {
            assert_eq!(duration(seconds), text);
        }
    }

    #[test]
    fn nothing_is_shown_of_nothing() {
        let text = show(&Profile { source: "disk d".into(), ..Profile::default() });
        assert!(text.contains("disk d") && text.contains("times are not known"), "{text}");
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
    }
}

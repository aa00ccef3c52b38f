//! The results of `weir bench` as one HTML file: rates, the spread of the latencies, the runs over time.

use weir_load::steady::{EXCURSION_PERCENT, WINDOW};
use weir_load::summary::{KindSummary, LatencyFrom, Summary};
use weir_report::distribution::{self, Distribution, MOST_LINES, Series};
use weir_report::over_time::{self, Course};
use weir_report::page::{Block, Cell, Group, Page, Row, Section, Table};
use weir_report::panel::Panel;
use weir_report::rounds::{self, Rounds};
use weir_report::svg::WIDTH;
use weir_report::{RenderError, format};

use super::chart::{Chart, HEAT};
use super::{course, view};
use crate::environment::Environment;

const COLUMNS: [&str; 10] =
    ["IOPS", "MiB/s", "mean", "p50", "p90", "p99", "p99.9", "p99.999", "max", "errors"];

/// The report of loads that ran side by side or one after the other.
///
/// # Errors
/// Never in practice: the page is rendered to memory.
pub fn loads(summaries: &[Summary], environment: &Environment) -> Result<String, RenderError> {
    let mut sections = vec![numbers(summaries)];
    let remarks: Vec<String> = summaries.iter().flat_map(remarks).collect();
    if !remarks.is_empty() {
        sections.push(Section {
            heading: "What limits these figures".to_owned(),
            blocks: vec![Block::List("caution", remarks)],
            ..Section::default()
        });
    }
    sections.extend(charts(summaries).into_iter().map(Chart::section));
    sections.extend(super::closing(facts(summaries, environment), environment, limits(summaries)));
    let page = Page {
        title: format!("Load on {}", environment.disk),
        eyebrow: "Weir · load".to_owned(),
        heading: environment.disk.clone(),
        byline: format!("measured on {} · {}", environment.node, environment.started()),
        footer: String::new(),
        sections,
    };
    page.html()
}

fn numbers(summaries: &[Summary]) -> Section {
    let from_due =
        " Latency counts from the time at which a request was due, and includes waiting for the queue.";
    let from_due = if summaries.iter().any(from_intended_start) { from_due } else { "" };
    let table = Table {
        class: "",
        first: "load".to_owned(),
        groups: vec![Group::of(COLUMNS)],
        rows: summaries.iter().flat_map(lines).collect(),
    };
    Section {
        heading: "What was measured".to_owned(),
        lead: format!("Rates and latencies of the measured time, without warm-up.{from_due}"),
        blocks: vec![Block::Table(table)],
        ..Section::default()
    }
}

fn from_intended_start(summary: &Summary) -> bool {
    summary.latency_from == LatencyFrom::IntendedStart
}

/// The name of a load: its job's, or its workload.
fn name(summary: &Summary) -> String {
    summary.name.clone().unwrap_or_else(|| summary.workload.to_string())
}

fn lines(summary: &Summary) -> impl Iterator<Item = Row> {
    summary.kinds.iter().map(|kind| Row {
        name: format!("{}: {}", name(summary), kind.kind.name()),
        cells: cells(kind),
        ..Row::default()
    })
}

fn cells(kind: &KindSummary) -> Vec<Cell> {
    let latency = &kind.latency_ns;
    let mut numbers = vec![format::count(kind.iops), format::throughput(kind.mib_per_second)];
    numbers.push(format::duration(latency.mean));
    let percentiles = [latency.p50, latency.p90, latency.p99, latency.p99_9, latency.p99_999, latency.max];
    numbers.extend(percentiles.map(|nanoseconds| format::duration(nanoseconds as f64)));
    numbers.push(kind.errors.to_string());
    numbers.into_iter().map(Cell::text).collect()
}

/// Limits of the figures.
fn remarks(summary: &Summary) -> Vec<String> {
    let mut remarks: Vec<String> =
        summary.incomplete.iter().map(|why| format!("Incomplete: {why}.")).collect();
    if let Some(error) = &summary.first_error {
        remarks.push(format!("{} requests failed; the first error: {error}", summary.errors()));
    }
    if let Some(found) = summary.verification.as_ref().filter(|found| found.mismatches > 0) {
        remarks
            .push(format!("{} of {} blocks did not hold what was written.", found.mismatches, found.checked));
    }
    remarks.extend(summary.remarks());
    match &summary.name {
        Some(name) => remarks.into_iter().map(|remark| format!("{name}: {remark}")).collect(),
        None => remarks,
    }
}

const SPREAD: &str = "Latency distribution";
const OVER_TIME: &str = "Latency and rate over time";

const READ_SPREAD: &str = "The share of I/Os completed within a given time. Each nine has the same height, so that the tail is as readable \
                           as the middle. Further right is slower.";
const READ_OVER_TIME: &str = "In the heat map, the stronger the colour, the larger the share of I/Os with that latency; the rate is \
                              below it. Only the window under the bracket counts; the veiled part before it is warm-up, or the \
                              rounds before the steady ones.";

fn charts(summaries: &[Summary]) -> Vec<Chart> {
    let mut charts = pictures(summaries);
    let rounds_of = |summary: &Summary| -> Option<Panel> {
        let state = summary.steady.as_ref()?;
        let rounds = Rounds {
            rates: &state.rounds,
            window: WINDOW,
            band: EXCURSION_PERCENT / 100.0,
            reached: state.reached,
        };
        rounds::panel(&name(summary), &rounds)
    };
    charts.push(Chart {
        title: "Approach to steady state",
        how_to_read: format!(
            "I/Os per second of each round. The last {WINDOW} are steady when none lies further from another than 20 % of their \
             average, the band between the dotted lines, and the line through them rises or falls by 10 % at most (SNIA PTS)."
        ),
        legend: &[("base", "rounds that the figures are of"), ("beside", "rounds before")],
        groups: Chart::only(summaries.iter().filter_map(rounds_of).collect()),
    });
    charts.into_iter().filter(Chart::is_drawn).collect()
}

/// Latencies and rates: of one load side by side, of several one chart after the other.
fn pictures(summaries: &[Summary]) -> Vec<Chart> {
    // A load has no repeats.
    let heat = &HEAT[..HEAT.len() - 1];
    let (mut spread, mut over_time) = (distributions(summaries), courses(summaries));
    let chart = |title, how_to_read, legend, panels| Chart {
        title,
        how_to_read,
        legend,
        groups: Chart::only(panels),
    };
    if let ([left], [right]) = (spread.as_mut_slice(), over_time.as_mut_slice()) {
        (left.title, right.title) = (SPREAD.to_owned(), OVER_TIME.to_owned());
        spread.append(&mut over_time);
        return vec![chart("Latencies and rate", format!("{READ_SPREAD} {READ_OVER_TIME}"), heat, spread)];
    }
    vec![
        chart(SPREAD, READ_SPREAD.to_owned(), &[], spread),
        chart(OVER_TIME, READ_OVER_TIME.to_owned(), heat, over_time),
    ]
}

/// One panel for each few lines: every kind of every load is a line.
fn distributions(summaries: &[Summary]) -> Vec<Panel> {
    let kinds = summaries.iter().flat_map(|summary| summary.kinds.iter().map(move |kind| (summary, kind)));
    let names: Vec<(String, &KindSummary)> = kinds
        .map(|(summary, kind)| match (&summary.name, summaries.len()) {
            (None, 1) => (kind.kind.name().to_owned(), kind),
            _ => (format!("{}, {}", name(summary), kind.kind.name()), kind),
        })
        .collect();
    let panel = |names: &[(String, &KindSummary)]| {
        let series = names.iter().map(|(name, kind)| Series {
            name,
            latencies: Distribution::of(std::iter::once(&kind.buckets_ns.0[..])),
        });
        distribution::panel(&title(summaries), &series.collect::<Vec<_>>())
    };
    names.chunks(MOST_LINES).filter_map(panel).collect()
}

fn title(summaries: &[Summary]) -> String {
    match summaries {
        [one] => name(one),
        _ => format!("{} loads", summaries.len()),
    }
}

fn courses(summaries: &[Summary]) -> Vec<Panel> {
    let course = |summary| -> Option<Course> {
        let summary: &Summary = summary;
        let window = match &summary.steady {
            Some(state) if state.reached => "steady window",
            Some(_) => "last window: not steady",
            None => "measured",
        };
        let run = course::of(summary.timeline.as_ref()?);
        Some(Course { title: name(summary), run, others: Vec::new(), window })
    };
    // Jobs of one file may have nothing in common: each has its own scales.
    let panels = summaries.iter().filter_map(course).flat_map(|course| over_time::panels(&[course], WIDTH));
    panels.collect()
}

fn facts(summaries: &[Summary], environment: &Environment) -> Vec<(&'static str, String)> {
    let mut facts = vec![("Target", environment.disk.clone())];
    for summary in summaries {
        let time = format::duration(summary.runtime_seconds * 1e9);
        facts.push(("Load", format!("{}, by {}, {time} measured", summary.workload, summary.engine)));
        if let Some(cpu) = summary.cpu_seconds.filter(|_| summary.runtime_seconds > 0.0) {
            let share = cpu / summary.runtime_seconds / f64::from(summary.workload.threads.max(1));
            facts.push(("Processor time of its threads", format!("{} of the time", format::percent(share))));
        }
    }
    facts.extend(view::machine(environment));
    facts
}

fn limits(summaries: &[Summary]) -> Vec<String> {
    let mut limits = vec![
        "It is one run, without a measure of scatter. weir diagnose repeats loads and gives intervals.",
        "Percentiles are within 1 %; those beyond the number of requests, such as 99.999 % of a thousand, are those of the \
         slowest few.",
        "Reads of a caching target depend on what its cache held. Writes that are acknowledged before they reach the storage \
         show the speed of the acknowledgement.",
    ];
    if !summaries.iter().all(from_intended_start) {
        limits.push(
            "Without a rate the load is a closed loop: a request waits for an answer before the next one is sent, so few requests \
             see a stall. --rate gives an open-loop clock.",
        );
    }
    limits.into_iter().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;
    use std::time::Duration;
    use weir_load::run::{Monitor, run, run_steady};
    use weir_load::workload::{Access, Workload};

    fn load() -> Workload {
        Workload {
            access: Access::RandRw { read_percent: 70 },
            rate: Some(20_000),
            runtime: Some(Duration::from_millis(80)),
            warmup: Duration::from_millis(20),
            ..Workload::default()
        }
    }

    #[test]
    fn a_load_has_a_report_of_its_own_that_needs_no_network() {
        let summary = run(&"null".parse().unwrap(), &load(), false, &Monitor::new()).unwrap();
        let environment = crate::Environment { disk: "<null>".into(), ..sample::environment() };
        let html = loads(&[summary], &environment).unwrap();
        for text in ["http:", "https:", "<script", "@import", "url(", "src=", "<null>"] {
            assert!(!html.contains(text), "{text}");
        }
        for text in ["default-src 'none'", "measured", "I/Os per second", "p99.9", "randrw", "Example CPU"] {
            assert!(html.contains(text), "{text}");
        }
        assert_eq!(html.matches("<svg").count(), 2);
    }

    #[test]
    fn rounds_are_shown_with_the_window_that_counts() {
        let workload =
            Workload { access: Access::RandRead, runtime: Some(Duration::from_millis(20)), ..load() };
        let mut summary = run_steady(&"null".parse().unwrap(), &workload, false, 6, &Monitor::new()).unwrap();
        summary.name = Some("job".into());
        summary.never_made = 12_345_678;
        summary.runtime_seconds = 10.0;
        summary.prefill = Some(weir_load::summary::Filled { bytes: 4 << 20, seconds: 0.5 });
        let html = loads(&[summary.clone(), summary], &sample::environment()).unwrap();
        assert!(html.contains("Approach to steady state") && html.contains("job: 12345678 of "), "{html}");
        assert_eq!(html.matches("job: filled 4MiB in 0.5 s before the load").count(), 2, "{html}");
        // They may have run at once: nobody adds up their times.
        assert!(html.matches("10.0 s measured").count() == 2 && !html.contains("20.0 s"), "{html}");
        assert_eq!(html.matches("<svg").count(), 5);
    }

    #[test]
    fn a_load_that_answered_nothing_still_has_a_report() {
        let nothing = Summary::new("x", "null", &load(), &weir_load::tally::Tally::default(), Duration::ZERO);
        let html = loads(&[nothing], &sample::environment()).unwrap();
        assert!(!html.contains("<svg") && !html.contains("NaN"));
        assert!(loads(&[], &sample::environment()).is_ok());
    }
}

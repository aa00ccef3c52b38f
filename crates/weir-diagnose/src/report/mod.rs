//! The findings as one HTML file, as JSON and as JUnit.
//!
//! The HTML file has the verdict and how far it can be relied on, every cell against the layer below, the charts of the cells that
//! tell most, the suspicions, the numbers, the environment, and what the report does not say.
//! It asks the network for nothing: style and drawings are inside it, there is no script, and its
//! own content policy forbids to load anything.

mod axis;
mod bench;
mod charts;
mod choice;
mod course;
mod distribution;
mod junit;
mod matrix;
mod rounds;
mod suspicions;
mod svg;
mod validity;
mod view;

pub use bench::loads;
pub use junit::junit;

use askama::Template;
use serde::Serialize;

use crate::finding::{Findings, Quantity};
use crate::json;
use crate::result::Diagnosis;
use crate::verdict::Grade;

/// Everything that the template shows, in the words in which it shows it.
#[derive(Template)]
#[template(path = "report.html")]
struct Page<'a> {
    diagnosis: &'a Diagnosis,
    findings: &'a Findings,
    standing: &'static str,
    figures: Vec<validity::Figure>,
    against: Vec<String>,
    chain: Vec<view::Stop<'a>>,
    matrix: Option<matrix::Matrix>,
    charts: Vec<Chart>,
    suspicions: Vec<suspicions::Suspicion>,
    tables: Vec<view::NumbersOfShape>,
    unused: Vec<String>,
    facts: Vec<(&'static str, String)>,
    limits: Vec<String>,
}

/// A chart: one question, one panel for each load.
struct Chart {
    title: &'static str,
    how_to_read: String,
    legend: &'static [(&'static str, &'static str)],
    groups: Vec<Group>,
}

impl Chart {
    fn is_drawn(&self) -> bool {
        self.groups.iter().any(|group| !group.panels.is_empty())
    }
}

/// Panels that are compared with each other.
struct Group {
    /// Above them; may be empty.
    title: String,
    /// `two` or `three` in a row.
    class: &'static str,
    panels: Vec<charts::Panel>,
}

impl Group {
    fn only(panels: Vec<charts::Panel>) -> Vec<Group> {
        vec![Group { title: String::new(), class: "two", panels }]
    }
}

/// The shades of a heat map over time, and the lines below it.
const HEAT: &[(&str, &str)] = &[
    ("heat0", "a few"),
    ("heat1", "0.2 %"),
    ("heat2", "2 %"),
    ("heat3", "10 %"),
    ("heat4", "30 %"),
    ("heat5", "60 % of a moment’s answers and more"),
    ("rate", "I/Os per second of this run"),
    ("repeat", "of its repeats"),
];

/// Cells of a bar chart: small multiples, not a wall.
const MOST_BARS: usize = 4;

/// Cells of the chart of latencies that are deeper than queue depth 1.
const MOST_DEEP_WATERFALLS: usize = 2;

/// Cells whose distributions are drawn, at queue depth 1 and deeper.
const MOST_DISTRIBUTIONS: usize = 2;

/// The report as one HTML document.
///
/// # Errors
/// Never in practice: the template only fails when its output cannot be written, and it writes to memory.
pub fn html(diagnosis: &Diagnosis, findings: &Findings) -> Result<String, askama::Error> {
    let page = Page {
        diagnosis,
        findings,
        standing: match findings.verdict.grade {
            Grade::Confirmed | Grade::Likely => "cost",
            Grade::NoBottleneckFound => "even",
            Grade::Inconclusive | Grade::GeneratorLimited => "unknown",
        },
        figures: validity::figures(diagnosis, findings),
        against: validity::against(diagnosis, findings),
        chain: view::chain(diagnosis),
        matrix: matrix::matrix(diagnosis, findings),
        charts: all_charts(diagnosis, findings),
        suspicions: suspicions::suspicions(findings),
        tables: view::numbers(diagnosis, findings),
        unused: crate::table::unused_lines(diagnosis, findings),
        facts: view::facts(diagnosis),
        limits: view::limits(diagnosis),
    };
    page.render()
}

/// Rows and findings as one JSON document, indented; [`Diagnosis::from_json`] reads the rows back.
///
/// # Errors
/// A number in a row is not finite; neither measurement nor import leaves such a row.
pub fn json(diagnosis: &Diagnosis, findings: &Findings) -> Result<String, serde_json::Error> {
    #[derive(Serialize)]
    struct Document<'a> {
        #[serde(flatten)]
        diagnosis: &'a Diagnosis,
        findings: &'a Findings,
    }
    json::indented(&Document { diagnosis, findings })
}

fn all_charts(diagnosis: &Diagnosis, findings: &Findings) -> Vec<Chart> {
    const STEPS: &[(&str, &str)] = &[
        ("base", "lowest layer"),
        ("below", "what comes from below"),
        ("cost", "added"),
        ("gain", "saved"),
        ("flat", "same, or cannot be told"),
    ];
    const DEPTHS: &[(&str, &str)] = &[("shallow", "queue depth 1"), ("deep", "greater depth")];
    let telling = |quantity, most| choice::telling(diagnosis, findings, quantity, most);
    let both = |most| [telling(Quantity::Latency, most), telling(Quantity::Iops, most)].concat();
    let (shallow, deep) = (telling(Quantity::Latency, MOST_BARS), telling(Quantity::Iops, MOST_BARS));
    let waterfalls = [&shallow[..], &telling(Quantity::Iops, MOST_DEEP_WATERFALLS)].concat();
    let mut shapes: Vec<_> = [&shallow[..], &deep].concat().iter().map(|cell| cell.shape).collect();
    shapes.sort();
    shapes.dedup();
    let charts = [
        Chart {
            title: "Where the time goes",
            how_to_read: format!(
                "Median latency. Each bar ends at the time that a layer answers in; its coloured part is what the layer adds to the one \
                 below, or saves, at queue depth 1 with the 95 % interval in brackets. The thin line is the range over the repeats. In \
                 the cells at depth, those that lose most, a request also waits for those before it: there the judgement, and the \
                 colour, is that of the IOPS.{}",
                chosen(diagnosis, findings, Quantity::Latency, shallow.len())
            ),
            legend: STEPS,
            groups: Group::only(charts::bars(diagnosis, findings, &waterfalls, Quantity::Latency)),
        },
        Chart {
            title: "What the way can carry",
            how_to_read: format!(
                "I/Os per second with a full queue. The factor compares a layer with the one below it on the way: ×0.50 keeps \
                 half; its 95 % interval stands in brackets.{}",
                chosen(diagnosis, findings, Quantity::Iops, deep.len())
            ),
            legend: &[],
            groups: Group::only(charts::bars(diagnosis, findings, &deep, Quantity::Iops)),
        },
        Chart {
            title: "How the latencies are spread",
            how_to_read: "Which share of the I/Os was answered within which time, all repeats together, in the cells that tell \
                          most. Each nine has the same room, so the slow end is as easy to read as the middle; a line further \
                          to the right is slower."
                .to_owned(),
            legend: &[],
            groups: Group::only(choice::distributions(diagnosis, findings, &both(MOST_DISTRIBUTIONS))),
        },
        Chart {
            title: "How it went over time",
            how_to_read: "One repeat of each layer, the middle one by its rate, in the cells that tell most; all layers of a cell \
                          have the same scales. Above, the latencies: the stronger the colour, the more of that moment’s answers \
                          took that long. Below, the rate. Only the measured window counts; what is before it, veiled, is \
                          warm-up."
                .to_owned(),
            legend: HEAT,
            groups: choice::courses(diagnosis, findings, &both(1)),
        },
        Chart {
            title: "How even it is",
            how_to_read: "The filled dot is the median latency, the open one the 99th percentile: one I/O in a \
                          hundred takes longer. The scale is logarithmic."
                .to_owned(),
            legend: DEPTHS,
            groups: Group::only(charts::dots(diagnosis, findings, &shapes)),
        },
    ];
    charts.into_iter().filter(Chart::is_drawn).collect()
}

/// Says that not all cells are drawn.
fn chosen(diagnosis: &Diagnosis, findings: &Findings, quantity: Quantity, drawn: usize) -> String {
    let all = diagnosis.cells.iter().filter(|cell| findings.quantity(cell) == quantity).count();
    if drawn == all {
        String::new()
    } else {
        format!(" Drawn are {drawn} of {all} such cells, those that lose most.")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::find;
    use crate::result::{Position, RunOutcome};
    use crate::sample;
    use proptest::prelude::*;

    fn page(diagnosis: &Diagnosis) -> String {
        html(diagnosis, &find(diagnosis)).unwrap()
    }

    #[test]
    fn the_report_says_what_was_found_and_how_to_run_it_again() {
        let html = page(&sample::write_back());
        for text in [
            "Confirmed: the step from accel write-back+1 to nbd export costs most.",
            "weir diagnose --disk db1 --seed 7",
            "2023-11-14 22:13:20 UTC",
            "Where the time goes",
            "What this report does not say",
        ] {
            assert!(html.contains(text), "{text}");
        }
        assert!(html.matches("<svg").count() >= 12);
    }

    #[test]
    fn it_needs_no_network_and_runs_no_script() {
        let html = page(&sample::write_back());
        for text in ["http:", "https:", "<script", "@import", "url(", "src="] {
            assert!(!html.contains(text), "{text}");
        }
        assert!(html.contains("default-src 'none'"));
    }

    #[test]
    fn names_are_text_wherever_they_stand() {
        let evil = "<img src=x onerror=\"alert('1')\">&";
        let mut diagnosis = sample::write_back();
        for row in &mut diagnosis.rows {
            if row.layer == "accel write-back+1" {
                row.layer = evil.into();
            }
        }
        for layer in &mut diagnosis.layers {
            match &mut layer.position {
                Position::OnTheWay if layer.name == "accel write-back+1" => layer.name = evil.into(),
                Position::AlternativeTo(other) => *other = evil.into(),
                Position::OnTheWay | Position::Reference => {}
            }
        }
        diagnosis.rows[0].outcome = RunOutcome::Failed(evil.into());
        let environment = &mut diagnosis.environment;
        for text in [
            &mut environment.disk,
            &mut environment.node,
            &mut environment.kernel,
            &mut environment.cpu,
            &mut environment.command,
        ] {
            *text = evil.into();
        }
        environment.versions.insert(evil.into(), evil.into());
        let html = page(&diagnosis);
        assert!(!html.contains("<img"), "escaped everywhere");
        assert!(html.matches("&#60;img").count() + html.matches("&lt;img").count() > 20);
    }

    #[test]
    fn partial_results_are_marked_and_rows_left_out_are_listed() {
        let mut diagnosis = sample::write_back();
        diagnosis.interrupted = true;
        diagnosis.rows.truncate(60);
        diagnosis.rows[3].outcome = RunOutcome::Failed("connection refused".into());
        let html = page(&diagnosis);
        assert!(html.contains("Interrupted: 60 of 240 runs were done"));
        assert!(html.contains("connection refused"));
        diagnosis.rows.clear();
        assert!(page(&diagnosis).contains("Nothing was measured that could be used."));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Whatever rows say, also what no machine could have measured: every drawing has coordinates that are numbers.
        #[test]
        fn any_rows_can_be_drawn(numbers in prop::collection::vec(prop::array::uniform4(any_number()), 12)) {
            let way = [("backing", sample::Numbers::steady(40e3)), ("export", sample::Numbers::steady(90e3))];
            let mut diagnosis = sample::chain(&way);
            diagnosis.cells.truncate(2);
            diagnosis.rows.retain(|row| diagnosis.cells.contains(&row.cell) && row.repeat <= 3);
            for (row, [iops, p50, p99, p99_9]) in diagnosis.rows.iter_mut().zip(numbers) {
                row.outcome = RunOutcome::Measured(crate::Measurement {
                    iops,
                    p50_ns: Some(p50),
                    p99_ns: Some(p50 + p99),
                    p99_9_ns: Some(p50 + p99 + p99_9),
                    ..crate::Measurement::default()
                });
            }
            let findings = find(&diagnosis);
            let charts = all_charts(&diagnosis, &findings);
            for panel in charts.iter().flat_map(|chart| &chart.groups).flat_map(|group| &group.panels) {
                prop_assert!(svg::is_drawable(&panel.svg), "{}", panel.svg);
            }
            prop_assert!(html(&diagnosis, &findings).is_ok());
        }
    }

    /// Mostly sensible ones, so that some rows pass the checks.
    fn any_number() -> impl Strategy<Value = f64> {
        prop_oneof![6 => 1e-3..1e9_f64, 1 => 1e200..1e300_f64, 1 => 1e-300..1e-200_f64, 1 => any::<f64>()]
    }
}

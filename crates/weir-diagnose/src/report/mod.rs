//! The findings as one HTML file, as JSON and as JUnit.
//!
//! The HTML file has the verdict, the charts, the numbers, the environment, and what the report does not say.
//! It asks the network for nothing: style and drawings are inside it, there is no script, and its
//! own content policy forbids to load anything.

mod axis;
mod charts;
mod junit;
mod svg;
mod view;

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
    chain: Vec<view::Stop<'a>>,
    charts: Vec<Chart>,
    tables: Vec<view::NumbersOfShape>,
    unused: Vec<String>,
    facts: Vec<(&'static str, String)>,
    limits: Vec<String>,
}

/// A chart: one question, one panel for each load.
struct Chart {
    title: &'static str,
    how_to_read: &'static str,
    legend: &'static [(&'static str, &'static str)],
    panels: Vec<charts::Panel>,
}

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
        chain: view::chain(diagnosis),
        charts: all_charts(diagnosis, findings),
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
    let charts = [
        Chart {
            title: "Where the time goes",
            how_to_read: "Median latency at queue depth 1, one I/O after the other. Each bar ends at the time \
                          that a layer answers in; its coloured part is what the layer adds to the one below, \
                          or saves. The thin line is the range over the repeats.",
            legend: STEPS,
            panels: charts::bars(diagnosis, findings, Quantity::Latency),
        },
        Chart {
            title: "What the way can carry",
            how_to_read: "I/Os per second with a full queue. The factor compares a layer with the one below it \
                          on the way: ×0.50 keeps half.",
            legend: &[],
            panels: charts::bars(diagnosis, findings, Quantity::Iops),
        },
        Chart {
            title: "How even it is",
            how_to_read: "The filled dot is the median latency, the open one the 99th percentile: one I/O in a \
                          hundred takes longer. The scale is logarithmic.",
            legend: DEPTHS,
            panels: charts::dots(diagnosis, findings),
        },
    ];
    charts.into_iter().filter(|chart| !chart.panels.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::find;
    use crate::result::{Position, RunOutcome};
    use crate::sample;

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
}

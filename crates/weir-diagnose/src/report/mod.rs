//! The findings as one HTML file, as JSON and as JUnit.
//!
//! The HTML file has the verdict and its reliability, every cell against the layer below, the charts of the most telling
//! cells, the suspicions, the numbers, the environment, and the report's limits. It needs no network: style and drawings are
//! inside it, there is no script, and its own content policy forbids to load anything.

mod chart;
mod charts;
mod choice;
mod course;
mod junit;
mod load;
mod matrix;
mod suspicions;
mod validity;
mod view;

pub use junit::junit;
pub use load::loads;

use serde::Serialize;
use weir_report::RenderError;
use weir_report::page::{Block, Key, Page, Section};

use crate::comparison::Quantity;
use crate::environment::Environment;
use crate::finding::Findings;
use crate::json;
use crate::reliability;
use crate::result::{Diagnosis, WithoutSchema};
use crate::table;
use crate::verdict::{Grade, Verdict};
use chart::{Chart, HEAT, Panels};

/// Cells of a bar chart: small multiples, not a wall.
const MOST_BARS: usize = 4;

/// Cells of the chart of latencies that are deeper than queue depth 1.
const MOST_DEEP_WATERFALLS: usize = 2;

/// Cells whose distributions are drawn, at queue depth 1 and deeper.
const MOST_DISTRIBUTIONS: usize = 2;

/// The report as one HTML document.
///
/// # Errors
/// Never in practice: the page is rendered to memory.
pub fn html(diagnosis: &Diagnosis, findings: &Findings) -> Result<String, RenderError> {
    let environment = &diagnosis.environment;
    let imported = !environment.imported_from.is_empty();
    let mut sections = vec![verdict(&findings.verdict), reliability_of(diagnosis, findings), path(diagnosis)];
    sections.extend(against_below(diagnosis, findings));
    sections.extend(all_charts(diagnosis, findings).into_iter().map(Chart::section));
    sections.extend([hypotheses(findings), numbers(diagnosis, findings)]);
    sections.extend(unused(diagnosis, findings));
    sections.extend(closing(view::facts(diagnosis), environment, view::limits(diagnosis)));
    let measured = if imported { "imported".to_owned() } else { format!("measured on {}", environment.node) };
    let page = Page {
        title: format!("Layered measurement of {}", environment.disk),
        eyebrow: "Weir · layered measurement".to_owned(),
        heading: environment.disk.clone(),
        byline: format!("{measured} · {}", environment.started()),
        footer: format!(" · {} · every row is in the JSON file beside this one.", diagnosis.schema),
        sections,
    };
    page.html()
}

fn verdict(verdict: &Verdict) -> Section {
    let standing = match verdict.grade {
        Grade::Confirmed | Grade::Likely => "cost",
        Grade::NoBottleneckFound => "even",
        Grade::Inconclusive | Grade::GeneratorLimited => "unknown",
    };
    let mut blocks = Vec::new();
    if !verdict.evidence.is_empty() {
        blocks.push(Block::List("", verdict.evidence.clone()));
    }
    if !verdict.to_improve.is_empty() {
        let improve = "To improve confidence".to_owned();
        blocks.push(Block::Box("guess", improve, verdict.to_improve.clone()));
    }
    Section {
        class: format!("verdict {standing}"),
        eyebrow: format!("Verdict · {}", verdict.grade),
        heading: verdict.headline.clone(),
        blocks,
        ..Section::default()
    }
}

fn reliability_of(diagnosis: &Diagnosis, findings: &Findings) -> Section {
    let against = reliability::against(diagnosis, findings);
    let judged = if against.is_empty() {
        Block::Note("Nothing was found that speaks against this measurement.".to_owned())
    } else {
        Block::Box("caution", "What speaks against this measurement".to_owned(), against)
    };
    Section {
        class: "validity".to_owned(),
        heading: "Reliability".to_owned(),
        blocks: vec![Block::Figures(validity::figures(diagnosis, findings)), judged],
        ..Section::default()
    }
}

fn path(diagnosis: &Diagnosis) -> Section {
    // Of rows from elsewhere nobody here knows how they were measured.
    let apart = match diagnosis.environment.imported_from.as_slice() {
        [] => " The same load was put on each layer separately.",
        _ => "",
    };
    Section {
        heading: "I/O path".to_owned(),
        lead: format!("From the lowest layer up.{apart}"),
        blocks: vec![Block::Chain(view::chain(diagnosis))],
        ..Section::default()
    }
}

fn against_below(diagnosis: &Diagnosis, findings: &Findings) -> Option<Section> {
    let colours = |colours: &[&'static str], meaning: &str| Key {
        colours: colours.to_vec(),
        meaning: meaning.to_owned(),
    };
    let legend = vec![
        colours(&["slow4", "slow3", "slow2", "slow1"], "▲ slower (4×, 2×, 1.25×, 1.05× and more)"),
        colours(&["even"], "= shown to be the same"),
        colours(&["fast1", "fast2", "fast3", "fast4"], "▼ faster"),
        colours(&["slow3 hatched"], "△ ▽ inconclusive, or a single run"),
    ];
    let table = matrix::matrix(diagnosis, findings)?;
    Some(Section {
        heading: "Each layer against the layer below".to_owned(),
        lead: "How many times slower or faster a layer is than the layer below it: by median latency at queue depth 1, by \
               IOPS at greater depth. The marks repeat what the colours say."
            .to_owned(),
        blocks: vec![Block::Legend(legend), Block::Table(table)],
        ..Section::default()
    })
}

fn hypotheses(findings: &Findings) -> Section {
    let (lead, blocks) = if findings.verdict.hypotheses.is_empty() {
        ("No number suggests a cause for a step, or for the latency of the lowest layer.", Vec::new())
    } else {
        let lead = "Why a step, or the lowest layer, may be slow. Each hypothesis predicts a number and names the run that \
                    decides. A cause is named only when its run measured what was predicted.";
        (lead, vec![Block::Table(suspicions::table(findings))])
    };
    Section { heading: "Hypotheses".to_owned(), lead: lead.to_owned(), blocks, ..Section::default() }
}

fn numbers(diagnosis: &Diagnosis, findings: &Findings) -> Section {
    let tables = view::numbers(diagnosis, findings).into_iter();
    Section {
        heading: "Numbers".to_owned(),
        lead: "Medians over the repeats; ± is the greatest distance of a repeat from the median. A step is the change from \
               the layer below, with the factor's 95 % interval in brackets: “same” is shown to be within 5 %, “slower” and \
               “faster” to be beyond it, “?” is neither. An alternative is compared with the layer that it replaces."
            .to_owned(),
        blocks: tables.flat_map(|(title, table)| [Block::Heading(title), Block::Table(table)]).collect(),
        ..Section::default()
    }
}

fn unused(diagnosis: &Diagnosis, findings: &Findings) -> Option<Section> {
    let lines = table::unused_lines(diagnosis, findings);
    (!lines.is_empty()).then(|| Section {
        heading: "Unused rows".to_owned(),
        lead: "The JSON file has them as they came; no finding rests on them. A number that would agree is a proposal."
            .to_owned(),
        blocks: vec![Block::List("plain", lines)],
        ..Section::default()
    })
}

/// The end of every report: the environment, the command that repeats it, and the report's limits.
fn closing(
    facts: Vec<(&'static str, String)>,
    environment: &Environment,
    limits: Vec<String>,
) -> [Section; 2] {
    let facts = facts.into_iter().map(|(word, fact)| (word.to_owned(), fact)).collect();
    [
        Section {
            heading: "Environment, and how to repeat the measurement".to_owned(),
            blocks: vec![Block::Facts(facts), Block::Command(environment.command.clone())],
            ..Section::default()
        },
        Section {
            heading: "What this report does not say".to_owned(),
            blocks: vec![Block::List("limits", limits)],
            ..Section::default()
        },
    ]
}

/// Rows and findings as one JSON document, indented; [`Diagnosis::from_json`] reads the rows back. `JSON.md` describes it.
///
/// # Errors
/// A number in a row is not finite; neither measurement nor import leaves such a row.
pub fn json(diagnosis: &Diagnosis, findings: &Findings) -> Result<String, serde_json::Error> {
    #[derive(Serialize)]
    struct Document<'a> {
        schema: &'a str,
        headline: &'a str,
        grade: Grade,
        unreliable: Vec<String>,
        #[serde(flatten)]
        diagnosis: WithoutSchema<'a>,
        findings: &'a Findings,
    }
    json::indented(&Document {
        schema: &diagnosis.schema,
        headline: &findings.verdict.headline,
        grade: findings.verdict.grade,
        unreliable: reliability::against(diagnosis, findings),
        diagnosis: diagnosis.without_schema(),
        findings,
    })
}

fn all_charts(diagnosis: &Diagnosis, findings: &Findings) -> Vec<Chart> {
    const STEPS: &[(&str, &str)] = &[
        ("base", "lowest layer"),
        ("below", "layers below"),
        ("cost", "added"),
        ("gain", "saved"),
        ("flat", "same, or inconclusive"),
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
            title: "Latency by layer",
            how_to_read: format!(
                "Median latency. The coloured part of a bar is what the layer adds to the layer below, or saves, at queue depth 1 with \
                 the 95 % interval in brackets. Error bars are the range over the repeats, where it exceeds 5 %. At greater depth a \
                 request also waits for the requests before it: there the colour is the judgement of the IOPS.{}",
                chosen(diagnosis, findings, Quantity::Latency, shallow.len())
            ),
            legend: STEPS,
            groups: Chart::only(charts::bars(diagnosis, findings, &waterfalls, Quantity::Latency)),
        },
        Chart {
            title: "IOPS by layer",
            how_to_read: format!(
                "I/Os per second with a full queue. The factor compares a layer with the layer below: ×0.50 is half; its 95 % \
                 interval is in brackets. Error bars are the range over the repeats, where it exceeds 5 %.{}",
                chosen(diagnosis, findings, Quantity::Iops, deep.len())
            ),
            legend: &[],
            groups: Chart::only(charts::bars(diagnosis, findings, &deep, Quantity::Iops)),
        },
        Chart {
            title: "Latency distribution",
            how_to_read: "The share of I/Os completed within a given time, all repeats together, in the cells with the greatest losses. \
                          Each nine has the same height, so that the tail is as readable as the middle. Further right is \
                          slower."
                .to_owned(),
            legend: &[],
            groups: Chart::only(choice::distributions(diagnosis, findings, &both(MOST_DISTRIBUTIONS))),
        },
        Chart {
            title: "Latency and rate over time",
            how_to_read: "The repeat with the median rate of each layer, in the cells with the greatest losses; all layers of a cell \
                          share their scales. Above, latencies: the stronger the colour, the larger the share of I/Os with that \
                          latency. Below, the rate. Only the measured window counts; the veiled part before it is \
                          warm-up."
                .to_owned(),
            legend: HEAT,
            groups: choice::courses(diagnosis, findings, &both(1))
                .into_iter()
                .map(|(title, panels)| Panels { title, class: "three", panels })
                .collect(),
        },
        Chart {
            title: "Tail latency",
            how_to_read: "The filled dot is the median latency, the open one the 99th percentile: one I/O in a \
                          hundred takes longer. The scale is logarithmic."
                .to_owned(),
            legend: DEPTHS,
            groups: Chart::only(charts::dots(diagnosis, findings, &shapes)),
        },
    ];
    charts.into_iter().filter(Chart::is_drawn).collect()
}

/// Says that not all cells are drawn.
fn chosen(diagnosis: &Diagnosis, findings: &Findings, quantity: Quantity, drawn: usize) -> String {
    let all = diagnosis.cells.iter().filter(|cell| findings.compared.quantity(cell) == quantity).count();
    if drawn == all {
        String::new()
    } else {
        format!(" The chart has {drawn} of {all} such cells, those with the greatest losses.")
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
            "Confirmed: nbd export adds 54.0 µs to accel write-back+1 at QD 1",
            "weir diagnose --disk db1 --seed 7",
            "2023-11-14 22:13:20 UTC",
            "Latency by layer",
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
                Position::OnPath if layer.name == "accel write-back+1" => layer.name = evil.into(),
                Position::AlternativeTo(other) => *other = evil.into(),
                Position::OnPath | Position::Reference => {}
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

    /// The document, whole, of a small measurement: two layers, one cell, two repeats. Every field is described in `JSON.md`.
    #[test]
    fn the_json_document_is_the_golden_one_and_described() {
        let chain = [("backing", sample::Numbers::steady(40e3)), ("export", sample::Numbers::steady(90e3))];
        let mut diagnosis = sample::chain(&chain);
        diagnosis.cells.truncate(1);
        diagnosis.repeats = 2;
        diagnosis.rows.retain(|row| row.cell == diagnosis.cells[0] && row.repeat <= 2);
        diagnosis.rows[3].counters = Some(crate::Counters::default());
        let text = json(&diagnosis, &find(&diagnosis)).unwrap();
        assert!(text == include_str!("../../tests/golden/diagnosis.json"), "the document changed:\n{text}");
        assert_eq!(Diagnosis::from_json(&text).unwrap(), diagnosis);
        let described = include_str!("../../JSON.md");
        let keys = text.lines().filter_map(|line| line.trim().strip_prefix('"')?.split_once("\":"));
        for (key, _) in keys {
            assert!(!["secs", "nanos"].contains(&key), "{key} has no unit");
            assert!(described.contains(&format!("`{key}`")), "JSON.md does not describe {key}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// With any rows, even impossible ones, every drawing has coordinates that are numbers.
        #[test]
        fn any_rows_can_be_drawn(numbers in prop::collection::vec(prop::array::uniform4(any_number()), 12)) {
            let path = [("backing", sample::Numbers::steady(40e3)), ("export", sample::Numbers::steady(90e3))];
            let mut diagnosis = sample::chain(&path);
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
                prop_assert!(weir_report::svg::is_drawable(&panel.svg), "{}", panel.svg);
            }
            prop_assert!(html(&diagnosis, &findings).is_ok());
        }
    }

    /// Mostly sensible ones, so that some rows pass the checks.
    fn any_number() -> impl Strategy<Value = f64> {
        prop_oneof![6 => 1e-3..1e9_f64, 1 => 1e200..1e300_f64, 1 => 1e-300..1e-200_f64, 1 => any::<f64>()]
    }
}

//! The findings as JUnit XML, for pipelines that show it: each threshold, each step in each cell, each row left out.
//!
//! A test fails when a threshold is broken or the measurement is not to be trusted, never because of a difference
//! that nobody set a limit for. What cannot be told is skipped. (The form is that of the Ant task's `junitreport`,
//! as CI systems read it.)

use askama::Template;

use crate::finding::{Difference, Findings, Judgement};
use crate::result::Diagnosis;
use crate::threshold::Threshold;
use crate::{table, verdict};

#[derive(Template)]
#[template(path = "junit.xml", escape = "html")]
struct Page {
    thresholds: Vec<Limit>,
    broken: usize,
    distrust: Option<String>,
    steps: Vec<Case>,
    failed_steps: usize,
    skipped_steps: usize,
    rows: Vec<String>,
}

struct Limit {
    name: String,
    failure: Option<String>,
}

struct Case {
    class: String,
    name: String,
    failure: Option<String>,
    skipped: Option<&'static str>,
    said: String,
}

/// The document, for the thresholds that were asked for.
///
/// # Errors
/// Never in practice: the template only fails when its output cannot be written, and it writes to memory.
pub fn junit(
    diagnosis: &Diagnosis,
    findings: &Findings,
    thresholds: &[Threshold],
) -> Result<String, askama::Error> {
    let limit = |threshold: &Threshold| Limit {
        name: threshold.to_string(),
        failure: threshold.broken(diagnosis, findings).map(printable),
    };
    let limits: Vec<Limit> = thresholds.iter().map(limit).collect();
    let steps: Vec<Case> = findings.steps.iter().map(|step| case(diagnosis, step, thresholds)).collect();
    let page = Page {
        broken: limits.iter().filter(|limit| limit.failure.is_some()).count(),
        thresholds: limits,
        distrust: verdict::distrust(diagnosis, findings).map(printable),
        failed_steps: steps.iter().filter(|case| case.failure.is_some()).count(),
        skipped_steps: steps.iter().filter(|case| case.failure.is_none() && case.skipped.is_some()).count(),
        steps,
        rows: table::unused_lines(diagnosis, findings).into_iter().map(printable).collect(),
    };
    page.render()
}

fn case(diagnosis: &Diagnosis, step: &Difference, thresholds: &[Threshold]) -> Case {
    let name = |layer: usize| &diagnosis.layers[layer].name;
    let said = verdict::describe(step);
    let broken = thresholds.iter().find(|threshold| threshold.is_broken_by(step));
    Case {
        class: printable(format!("weir.diagnose.{} to {}", name(step.from), name(step.to))),
        name: step.cell.to_string(),
        failure: broken.map(|threshold| format!("{said} ({threshold})")),
        skipped: match step.judgement {
            Judgement::Inconclusive => Some("cannot be told"),
            Judgement::Untested => Some("a single run"),
            Judgement::Slower | Judgement::Faster | Judgement::Same => None,
        },
        said,
    }
}

/// XML 1.0 has no word for most control characters, not even an escaped one.
fn printable(text: String) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::find;
    use crate::result::RunOutcome;
    use crate::sample;

    fn document(diagnosis: &Diagnosis, thresholds: &[&str]) -> String {
        let thresholds: Vec<Threshold> = thresholds.iter().map(|text| text.parse().unwrap()).collect();
        junit(diagnosis, &find(diagnosis), &thresholds).unwrap()
    }

    fn count(document: &str, tag: &str) -> usize {
        let document = roxmltree::Document::parse(document).unwrap();
        document.descendants().filter(|node| node.has_tag_name(tag)).count()
    }

    #[test]
    fn only_thresholds_make_a_test_fail() {
        let diagnosis = sample::write_back();
        let quiet = document(&diagnosis, &[]);
        assert_eq!((count(&quiet, "failure"), count(&quiet, "testcase")), (0, 1 + 16));
        let strict = document(&diagnosis, &["loss:1.5", "confirmed", "rejected"]);
        // Two thresholds, and the step to the export in all eight cells.
        assert_eq!(count(&strict, "failure"), 2 + 8);
        assert!(strict.contains(r#"name="thresholds" tests="3" failures="2""#), "{strict}");
    }

    #[test]
    fn the_document_stays_xml_whatever_a_name_or_a_reason_holds() {
        let mut diagnosis = sample::write_back();
        let evil = "a\u{1}\"<b>&'\n";
        diagnosis.rows[0].outcome = RunOutcome::Failed(evil.into());
        for row in diagnosis.rows.iter_mut().filter(|row| row.layer == "nbd export") {
            row.layer = evil.into();
        }
        diagnosis.layers[5].name = evil.into();
        diagnosis.interrupted = true;
        let text = document(&diagnosis, &["likely"]);
        assert_eq!(count(&text, "failure"), 2, "the threshold, and that it was interrupted: {text}");
    }
}

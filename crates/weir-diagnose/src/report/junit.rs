//! The findings as JUnit XML, for pipelines that show it: each threshold, each step in each cell, each row left out.
//!
//! A test fails when a threshold is broken or the measurement is not to be trusted, as the exit code has it, never because of a
//! warning or of a difference that has no threshold. Inconclusive steps are skipped. (The form is that of the Ant task's `junitreport`,
//! as CI systems read it.)

use weir_report::RenderError;
use weir_report::junit::{Case, Document, Outcome, Suite};

use crate::comparison::{Difference, Judgement};
use crate::finding::Findings;
use crate::result::Diagnosis;
use crate::threshold::Threshold;
use crate::{reliability, table, verdict};

/// The document, for the requested thresholds.
///
/// # Errors
/// Never in practice: it is rendered to memory.
pub fn junit(
    diagnosis: &Diagnosis,
    findings: &Findings,
    thresholds: &[Threshold],
) -> Result<String, RenderError> {
    let failed = |why: Option<String>| why.map_or(Outcome::Passed, Outcome::Failed);
    let limit = |threshold: &Threshold| {
        case("weir.diagnose.thresholds", threshold.to_string(), failed(threshold.broken(diagnosis, findings)))
    };
    let trusted = case(
        "weir.diagnose.reliability",
        "the measurement can be trusted".to_owned(),
        failed(reliability::distrust(diagnosis, findings)),
    );
    let warnings = reliability::against(diagnosis, findings).join("\n");
    let trusted = Case { said: warnings, ..trusted };
    let row = |line| case("weir.diagnose.rows", line, Outcome::Skipped("not used".to_owned()));
    let suite = |name: &str, cases| Suite { name: name.to_owned(), cases };
    let steps = findings.compared.steps.iter().map(|step| of_step(diagnosis, step, thresholds)).collect();
    let suites = vec![
        suite("thresholds", thresholds.iter().map(limit).collect()),
        suite("reliability", vec![trusted]),
        suite("steps", steps),
        suite("rows", table::unused_lines(diagnosis, findings).into_iter().map(row).collect()),
    ];
    Document { name: "weir diagnose".to_owned(), suites }.xml()
}

fn case(class: &str, name: String, outcome: Outcome) -> Case {
    Case { class: class.to_owned(), name, outcome, said: String::new() }
}

fn of_step(diagnosis: &Diagnosis, step: &Difference, thresholds: &[Threshold]) -> Case {
    let name = |layer: usize| &diagnosis.layers[layer].name;
    let said = verdict::describe(step);
    let broken = thresholds.iter().find(|threshold| threshold.is_broken_by(step));
    let outcome = match (broken, step.judgement) {
        (Some(threshold), _) => Outcome::Failed(format!("{said} ({threshold})")),
        (None, Judgement::Inconclusive) => Outcome::Skipped("inconclusive".to_owned()),
        (None, Judgement::Untested) => Outcome::Skipped("a single run".to_owned()),
        (None, Judgement::Slower | Judgement::Faster | Judgement::Same) => Outcome::Passed,
    };
    let class = format!("weir.diagnose.{} to {}", name(step.from), name(step.to));
    Case { said, ..case(&class, step.cell.to_string(), outcome) }
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

    /// A warning is printed, word for word as in the report, and no failure; what makes the exit code 6 is one.
    #[test]
    fn warnings_are_said_and_distrust_fails() {
        let mut diagnosis = sample::write_back();
        diagnosis.environment.load_average = 7.5;
        let mut once = sample::write_back();
        once.rows.retain(|row| row.repeat == 1);
        for (diagnosis, warning) in [(&diagnosis, "load average 7.50"), (&once, "single runs")] {
            let findings = find(diagnosis);
            let text = document(diagnosis, &[]);
            let against = reliability::against(diagnosis, &findings);
            assert_eq!((against.len(), count(&text, "failure")), (1, 0), "{against:?}\n{text}");
            assert!(text.contains(warning), "{text}");
            assert!(crate::report::html(diagnosis, &findings).unwrap().contains(&against[0]));
            assert_eq!(reliability::distrust(diagnosis, &findings), None);
        }
        diagnosis.interrupted = true;
        let text = document(&diagnosis, &[]);
        assert_eq!(count(&text, "failure"), 1);
        let why = reliability::distrust(&diagnosis, &find(&diagnosis)).unwrap();
        assert!(text.contains(&why) && text.contains("load average 7.50"), "{text}");
    }
}

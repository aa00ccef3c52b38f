//! The reliability of the numbers: the rows used, their precision, and objections to this run.

use crate::check::Kind;
use crate::comparison::{Judgement, Point, Why};
use crate::finding::Findings;
use weir_report::format;
use weir_report::page::Figure;

use crate::reliability;
use crate::result::Diagnosis;
use crate::verdict::FEWEST_REPEATS;
use crate::verdict::UNSTEADY;

/// The figures of the box, those that are known.
pub fn figures(diagnosis: &Diagnosis, findings: &Findings) -> Vec<Figure> {
    let all = [
        Some(rows(diagnosis, findings)),
        repeats(diagnosis, findings),
        nearness(diagnosis, findings),
        lowest(diagnosis, findings),
        steps(findings),
        steal(diagnosis),
    ];
    all.into_iter().flatten().collect()
}

fn rows(diagnosis: &Diagnosis, findings: &Findings) -> Figure {
    let (all, unused) = (diagnosis.rows.len(), findings.compared.unused.len());
    Figure {
        of: "Rows used".to_owned(),
        value: format!("{} of {all}", all - unused.min(all)),
        remark: if unused == 0 { "every row is consistent".to_owned() } else { reasons(findings) },
    }
}

/// The number of unused rows by reason, the most frequent first.
fn reasons(findings: &Findings) -> String {
    let mut counts: Vec<(&'static str, usize)> = Vec::new();
    for unused in &findings.compared.unused {
        let word = word(unused.why);
        match counts.iter_mut().find(|(known, _)| *known == word) {
            Some((_, count)) => *count += 1,
            None => counts.push((word, 1)),
        }
    }
    counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let texts: Vec<String> = counts.into_iter().map(|(word, count)| format!("{count} {word}")).collect();
    texts.join(", ")
}

fn word(why: Why) -> &'static str {
    match why {
        Why::Skipped => "not supported by the layer",
        Why::Failed => "failed",
        Why::Objection(Kind::GeneratorIdle) => "with an idle load generator",
        Why::Objection(Kind::TooManyInFlight) => "that violate Little's law",
        Why::Objection(Kind::Rates) => "with contradictory rates",
        Why::Objection(Kind::TooFew) => "with too few I/Os",
        Why::Objection(Kind::Errors) => "with failed I/Os",
        Why::Objection(Kind::Percentiles | Kind::NotPositive) => "with impossible numbers",
    }
}

fn planned<'a>(diagnosis: &'a Diagnosis, findings: &'a Findings) -> impl Iterator<Item = &'a Point> {
    findings.compared.points.iter().filter(|point| diagnosis.cells.contains(&point.cell))
}

fn repeats(diagnosis: &Diagnosis, findings: &Findings) -> Option<Figure> {
    let counts = || planned(diagnosis, findings).map(|point| point.repeats);
    let (least, most) = (counts().min()?, counts().max()?);
    Some(Figure {
        of: "Repeats of each load".to_owned(),
        value: if least == most { least.to_string() } else { format!("{least} to {most}") },
        remark: format!("usable; {} planned, {FEWEST_REPEATS} needed to confirm", diagnosis.repeats),
    })
}

/// The shares within which these points are known, the best first.
fn widths<'a>(findings: &Findings, points: impl Iterator<Item = &'a Point>) -> Vec<f64> {
    let mut widths: Vec<f64> =
        points.filter_map(|point| point.half_width(findings.compared.quantity(&point.cell))).collect();
    widths.retain(|width| width.is_finite());
    widths.sort_by(f64::total_cmp);
    widths
}

fn nearness(diagnosis: &Diagnosis, findings: &Findings) -> Option<Figure> {
    let widths = widths(findings, planned(diagnosis, findings));
    Some(Figure {
        of: "Precision of the numbers".to_owned(),
        value: format!("±{}", format::percent(*widths.get(widths.len() / 2)?)),
        remark: match *widths.last()? {
            worst if worst < 1.0 => {
                format!("half of them; ±{} at worst (95 % interval)", format::percent(worst))
            }
            worst => {
                format!("half of them; {} and more at worst (95 % interval)", format::factor(1.0 + worst))
            }
        },
    })
}

fn lowest(diagnosis: &Diagnosis, findings: &Findings) -> Option<Figure> {
    let (lowest, entry) = diagnosis.chain().next()?;
    let widths = widths(findings, planned(diagnosis, findings).filter(|point| point.layer == lowest));
    let unsteady = widths.iter().filter(|width| **width > UNSTEADY).count();
    Some(Figure {
        of: "Precision of the lowest layer".to_owned(),
        value: format!("±{}", format::percent(*widths.get(widths.len() / 2)?)),
        remark: match unsteady {
            0 => {
                format!("{}: within ±{} in every cell (95 % interval)", entry.name, format::percent(UNSTEADY))
            }
            cells => {
                format!(
                    "{}: ±{} or worse in {cells} of {} (95 % interval)",
                    entry.name,
                    format::percent(UNSTEADY),
                    widths.len()
                )
            }
        },
    })
}

fn steps(findings: &Findings) -> Option<Figure> {
    let all = findings.compared.steps.len();
    let with = |judgement| findings.compared.steps.iter().filter(|step| step.judgement == judgement).count();
    let (open, single) = (with(Judgement::Inconclusive), with(Judgement::Untested));
    (all > 0).then(|| Figure {
        of: "Steps decided".to_owned(),
        value: format!("{} of {all}", all - open - single),
        remark: match (open, single) {
            (0, 0) => "each is slower, faster or the same".to_owned(),
            (open, 0) => format!("{open} inconclusive"),
            (0, single) => format!("{single} single runs"),
            (open, single) => format!("{open} inconclusive, {single} single runs"),
        },
    })
}

fn steal(diagnosis: &Diagnosis) -> Option<Figure> {
    Some(Figure {
        of: "Processor time taken by other guests".to_owned(),
        value: format::percent(reliability::most_steal(diagnosis)?),
        remark: "steal time in the worst run".to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counters::Counters;
    use crate::finding::find;
    use crate::result::RunOutcome;
    use crate::sample;

    fn value(figures: &[Figure], of: &str) -> String {
        figures.iter().find(|figure| figure.of == of).unwrap().value.clone()
    }

    #[test]
    fn a_sound_run_has_figures_and_nothing_against_it() {
        let diagnosis = sample::write_back();
        let findings = find(&diagnosis);
        let figures = figures(&diagnosis, &findings);
        assert_eq!(value(&figures, "Rows used"), "240 of 240");
        assert_eq!(value(&figures, "Repeats of each load"), "5");
        assert_eq!(value(&figures, "Precision of the numbers"), "±2 %");
        assert_eq!(value(&figures, "Precision of the lowest layer"), "±2 %");
        assert!(
            figures.iter().all(|figure| figure.of != "Processor time taken by other guests"),
            "nobody looked"
        );
        assert!(reliability::against(&diagnosis, &findings).is_empty());
    }

    #[test]
    fn what_makes_a_run_untrustworthy_is_said() {
        let mut diagnosis = sample::write_back();
        diagnosis.environment.load_average = 7.5;
        diagnosis.rows.truncate(100);
        diagnosis.interrupted = true;
        for row in &mut diagnosis.rows {
            row.counters = Some(Counters { steal: 0.08, ..Counters::default() });
            if let RunOutcome::Measured(measurement) = &mut row.outcome {
                // A tenth of the time, and a tenth of what was done in it.
                measurement.runtime_seconds = Some(0.5);
                measurement.ios = measurement.ios.map(|ios| ios / 20);
                measurement.bytes = measurement.bytes.map(|bytes| bytes / 20);
            }
        }
        diagnosis.rows[0].outcome = RunOutcome::Failed("no".into());
        let findings = find(&diagnosis);
        let figures = figures(&diagnosis, &findings);
        assert_eq!(value(&figures, "Rows used"), "99 of 100");
        assert_eq!(value(&figures, "Processor time taken by other guests"), "8 %");
        let against = reliability::against(&diagnosis, &findings).join(" ");
        for words in ["nterrupted", "load average 7.50", "more than 2 %", "short (500 ms)"] {
            assert!(against.contains(words), "{words} in {against}");
        }
        assert_eq!(against.matches("nterrupted").count(), 1, "{against}");
    }

    #[test]
    fn nothing_measured_has_no_nearness() {
        let mut diagnosis = sample::write_back();
        diagnosis.rows.clear();
        let findings = find(&diagnosis);
        let figures = figures(&diagnosis, &findings);
        assert_eq!(figures.len(), 1);
        assert_eq!(value(&figures, "Rows used"), "0 of 0");
    }
}

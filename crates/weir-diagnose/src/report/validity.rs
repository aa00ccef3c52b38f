//! How far the numbers can be relied on: what was used, how near it is known, and what speaks against this run.

use crate::check::Kind;
use crate::comparison::{Judgement, Point, Why};
use crate::finding::Findings;
use weir_report::format;
use weir_report::page::Figure;

use crate::reliability;
use crate::result::{Diagnosis, RunOutcome};
use crate::verdict::FEWEST_REPEATS;
use crate::verdict::UNSTEADY;

/// Processor time taken by other guests of the same host beyond which latencies are partly theirs.
const MUCH_STEAL: f64 = 0.02;

/// Runs shorter than this have few slow requests in them, in seconds.
const SHORT: f64 = 1.0;

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
        remark: if unused == 0 { "every row agrees with itself".to_owned() } else { reasons(findings) },
    }
}

/// How many rows fell for which reason, the most frequent first.
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
        Why::Skipped => "not possible at the layer",
        Why::Failed => "failed",
        Why::Objection(Kind::GeneratorIdle) => "with a queue that was not kept full",
        Why::Objection(Kind::TooManyInFlight) => "against Little's law",
        Why::Objection(Kind::Rates) => "with rates that contradict each other",
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
        remark: format!("usable; {} planned, {FEWEST_REPEATS} are needed to confirm", diagnosis.repeats),
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
        of: "Numbers are known within".to_owned(),
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
        of: "The lowest layer scatters by".to_owned(),
        value: format!("±{}", format::percent(*widths.get(widths.len() / 2)?)),
        remark: match unsteady {
            0 => format!("{}: steady in every cell (±{} at most)", entry.name, format::percent(UNSTEADY)),
            cells => {
                format!(
                    "{}: more than ±{} in {cells} of {}",
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
        of: "Steps that can be told".to_owned(),
        value: format!("{} of {all}", all - open - single),
        remark: match (open, single) {
            (0, 0) => "each is slower, faster or the same".to_owned(),
            (open, 0) => format!("{open} scatter too much to tell"),
            (0, single) => format!("{single} rest on single runs"),
            (open, single) => format!("{open} scatter too much, {single} rest on single runs"),
        },
    })
}

/// The greatest share of the processors that others had in a run.
fn most_steal(diagnosis: &Diagnosis) -> Option<f64> {
    diagnosis.rows.iter().filter_map(|row| Some(row.counters.as_ref()?.steal)).reduce(f64::max)
}

fn steal(diagnosis: &Diagnosis) -> Option<Figure> {
    Some(Figure {
        of: "Processor time lost to others".to_owned(),
        value: format::percent(most_steal(diagnosis)?),
        remark: "in the worst run (steal, as the hypervisor tells)".to_owned(),
    })
}

/// What speaks against the run as a whole, in sentences.
pub fn against(diagnosis: &Diagnosis, findings: &Findings) -> Vec<String> {
    let mut against = findings.verdict.cautions.clone();
    if let Some(why) = reliability::distrust(diagnosis, findings) {
        let told = diagnosis.interrupted && against.iter().any(|caution| caution.contains("nterrupted"));
        against.extend((!told).then(|| format!("A pipeline should not act on it: {why}.")));
    }
    if planned(diagnosis, findings).any(|point| point.repeats == 1) {
        against.push("Some numbers are single runs: how far they scatter is not known.".to_owned());
    }
    if most_steal(diagnosis).is_some_and(|share| share > MUCH_STEAL) {
        against.push(format!(
            "Other guests of the same host took more than {} of the processors in some run: latencies are partly theirs.",
            format::percent(MUCH_STEAL)
        ));
    }
    let environment = &diagnosis.environment;
    if environment.imported_from.is_empty()
        && environment.cores > 0
        && environment.load_average > environment.cores as f64 / 2.0
    {
        against.push(format!(
            "The machine was busy when the measurement began: load average {:.2} on {} logical processors.",
            environment.load_average, environment.cores
        ));
    }
    against.extend(short_runs(diagnosis));
    against
}

fn short_runs(diagnosis: &Diagnosis) -> Option<String> {
    let seconds = |row: &crate::Row| match &row.outcome {
        RunOutcome::Measured(measurement) => measurement.runtime_seconds,
        RunOutcome::Skipped(_) | RunOutcome::Failed(_) => None,
    };
    let mut times: Vec<f64> = diagnosis.rows.iter().filter_map(seconds).collect();
    times.sort_by(f64::total_cmp);
    let middle = times.get(times.len() / 2).copied().filter(|seconds| *seconds < SHORT)?;
    Some(format!(
        "The runs were short ({}): the slowest one in a thousand is a few requests, and caches were not filled and drained.",
        format::duration(middle * 1e9)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counters::Counters;
    use crate::finding::find;
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
        assert_eq!(value(&figures, "Numbers are known within"), "±2 %");
        assert_eq!(value(&figures, "The lowest layer scatters by"), "±2 %");
        assert!(figures.iter().all(|figure| figure.of != "Processor time lost to others"), "nobody looked");
        assert!(against(&diagnosis, &findings).is_empty());
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
        assert_eq!(value(&figures, "Processor time lost to others"), "8 %");
        let against = against(&diagnosis, &findings).join(" ");
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

//! The step that costs most, in words that say only what the numbers support.
//!
//! No cause is named here: a step says between which layers time is lost, not why.

use serde::Serialize;

use crate::finding::{Difference, Findings, Judgement, PRACTICAL_MARGIN, Quantity};
use crate::format;
use crate::result::Diagnosis;

/// What kind of statement the headline is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Standing {
    /// A step is named.
    StepCosts,
    /// Steps were compared, and none is a loss that can be told from none.
    NoLoss,
    /// Nothing can be said.
    #[default]
    Unknown,
}

/// The statement at the top of the report.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Verdict {
    /// What kind of statement it is.
    pub standing: Standing,
    /// One sentence.
    pub headline: String,
    /// Sentences with the numbers behind it.
    pub evidence: Vec<String>,
    /// Sentences that limit it: interrupted, rows left out.
    pub cautions: Vec<String>,
}

/// Sums up the steps of a measurement.
#[must_use]
pub fn conclude(diagnosis: &Diagnosis, findings: &Findings) -> Verdict {
    let mut verdict = statement(diagnosis, findings);
    verdict.cautions = cautions(diagnosis, findings);
    verdict
}

fn statement(diagnosis: &Diagnosis, findings: &Findings) -> Verdict {
    let unknown = |headline: &str| Verdict { headline: headline.to_owned(), ..Verdict::default() };
    if findings.points.is_empty() {
        return unknown("Nothing was measured that could be used.");
    }
    if diagnosis.chain().count() < 2 {
        return unknown("Only one layer was measured: there is no step to compare.");
    }
    if findings.steps.is_empty() {
        return unknown("No cell has usable rows at two layers: there is no step to compare.");
    }
    if findings.steps.iter().all(|step| step.judgement == Judgement::OneRepeat) {
        return unknown("Each step rests on one repeat: the differences are shown, none is judged.");
    }
    match costliest_step(diagnosis, findings) {
        Some(leader) => name_step(diagnosis, findings, &leader),
        None => Verdict {
            standing: Standing::NoLoss,
            headline: "No step from layer to layer is a loss that these repeats can tell from none."
                .to_owned(),
            evidence: gains(diagnosis, findings).into_iter().collect(),
            cautions: Vec::new(),
        },
    }
}

/// A pair of layers and the cells in which its step is the greatest loss.
struct Leader<'a> {
    from: usize,
    to: usize,
    leads: Vec<&'a Difference>,
    cells_compared: usize,
    /// Cells in which no step is a loss that can be told from none.
    cells_without_loss: usize,
}

/// The step that is the greatest loss in the most cells; among equals, the one with the greatest factor.
fn costliest_step<'a>(diagnosis: &Diagnosis, findings: &'a Findings) -> Option<Leader<'a>> {
    let mut leaders: Vec<Leader<'a>> = Vec::new();
    let (mut cells_compared, mut cells_with_loss) = (0, 0);
    for cell in &diagnosis.cells {
        let steps = || {
            findings.steps.iter().filter(|step| step.cell == *cell && step.judgement != Judgement::OneRepeat)
        };
        cells_compared += usize::from(steps().next().is_some());
        let losses = steps().filter(|step| step.judgement == Judgement::Cost);
        // Within a cell every step ends in the same currency: nanoseconds add up along the way, factors
        // of IOPS multiply.
        let size = |step: &Difference| match step.quantity {
            Quantity::Latency => step.change(),
            Quantity::Iops => step.loss_factor(),
        };
        let Some(greatest) = losses.max_by(|a, b| size(a).total_cmp(&size(b))) else { continue };
        cells_with_loss += 1;
        match leaders.iter_mut().find(|leader| (leader.from, leader.to) == (greatest.from, greatest.to)) {
            Some(leader) => leader.leads.push(greatest),
            None => leaders.push(Leader {
                from: greatest.from,
                to: greatest.to,
                leads: vec![greatest],
                cells_compared: 0,
                cells_without_loss: 0,
            }),
        }
    }
    let mut leader = leaders.into_iter().max_by(|a, b| {
        a.leads.len().cmp(&b.leads.len()).then_with(|| greatest_factor(a).total_cmp(&greatest_factor(b)))
    })?;
    leader.cells_compared = cells_compared;
    leader.cells_without_loss = cells_compared - cells_with_loss;
    Some(leader)
}

fn greatest_factor(leader: &Leader<'_>) -> f64 {
    leader.leads.iter().map(|step| step.loss_factor()).fold(0.0, f64::max)
}

fn name_step(diagnosis: &Diagnosis, findings: &Findings, leader: &Leader<'_>) -> Verdict {
    let name = |layer: usize| &diagnosis.layers[layer].name;
    let headline = format!("The step from {} to {} costs most.", name(leader.from), name(leader.to));
    let (leads, compared) = (leader.leads.len(), plural(leader.cells_compared, "cell", "cells"));
    let mut evidence = vec![match leader.cells_without_loss {
        0 => format!("It is the greatest loss in {leads} of {compared} compared."),
        even => {
            format!("It is the greatest loss in {leads} of {compared} compared; in {even} no loss shows.")
        }
    }];
    let worst = |quantity: Quantity| {
        let losses = leader.leads.iter().filter(move |step| step.quantity == quantity);
        losses.max_by(|a, b| a.loss_factor().total_cmp(&b.loss_factor()))
    };
    evidence
        .extend([Quantity::Latency, Quantity::Iops].into_iter().filter_map(worst).map(|step| describe(step)));
    evidence.extend(elsewhere(diagnosis, findings, leader));
    evidence.extend(whole_way(diagnosis, findings));
    evidence.extend(gains(diagnosis, findings));
    Verdict { standing: Standing::StepCosts, headline, evidence, cautions: Vec::new() }
}

/// Cells in which another step is a loss, when there are any.
fn elsewhere(diagnosis: &Diagnosis, findings: &Findings, leader: &Leader<'_>) -> Option<String> {
    let others = findings
        .steps
        .iter()
        .filter(|step| step.judgement == Judgement::Cost && (step.from, step.to) != (leader.from, leader.to));
    let worst = others.max_by(|a, b| a.loss_factor().total_cmp(&b.loss_factor()))?;
    Some(format!("The greatest loss elsewhere is {}", between(diagnosis, worst)))
}

/// Where the way has several steps: what all of them together cost at worst.
fn whole_way(diagnosis: &Diagnosis, findings: &Findings) -> Option<String> {
    let losses = findings.whole_way.iter().filter(|way| way.judgement == Judgement::Cost);
    let worst = losses.max_by(|a, b| a.loss_factor().total_cmp(&b.loss_factor()))?;
    let name = |layer: usize| &diagnosis.layers[layer].name;
    Some(format!(
        "The whole way, from {} to {}, loses most here: {}",
        name(worst.from),
        name(worst.to),
        describe(worst)
    ))
}

fn gains(diagnosis: &Diagnosis, findings: &Findings) -> Option<String> {
    let gains = findings.steps.iter().filter(|step| step.judgement == Judgement::Gain);
    let best = gains.min_by(|a, b| a.loss_factor().total_cmp(&b.loss_factor()))?;
    Some(format!("The greatest gain is {}", between(diagnosis, best)))
}

fn between(diagnosis: &Diagnosis, step: &Difference) -> String {
    let name = |layer: usize| &diagnosis.layers[layer].name;
    format!("from {} to {}; {}", name(step.from), name(step.to), describe(step))
}

/// One step in numbers: `4K random read, QD 1: median latency 12.1 µs → 50.3 µs (+38.2 µs, ×4.16).`
#[must_use]
pub fn describe(step: &Difference) -> String {
    let (before, after) = (step.before.median, step.after.median);
    match step.quantity {
        Quantity::Latency => format!(
            "{}: median latency {} → {} ({}, {}).",
            step.cell,
            format::duration(before),
            format::duration(after),
            format::signed_duration(step.change()),
            format::factor(step.ratio())
        ),
        Quantity::Iops => format!(
            "{}: {} → {} IOPS ({}).",
            step.cell,
            format::count(before),
            format::count(after),
            format::factor(step.ratio())
        ),
    }
}

/// What may be said about a difference, in the few words of a table's cell.
#[must_use]
pub fn in_short(difference: &Difference) -> String {
    let numbers = match difference.quantity {
        Quantity::Latency => format::signed_duration(difference.change()),
        Quantity::Iops => format::factor(difference.ratio()),
    };
    match difference.judgement {
        Judgement::Cost => numbers,
        Judgement::Gain => format!("{numbers} gain"),
        Judgement::NotDistinguishable => "indistinct".to_owned(),
        Judgement::TooSmall => format!("under {}", format::percent(PRACTICAL_MARGIN)),
        Judgement::OneRepeat => format!("{numbers} (one repeat)"),
    }
}

fn cautions(diagnosis: &Diagnosis, findings: &Findings) -> Vec<String> {
    let mut cautions = Vec::new();
    if diagnosis.interrupted {
        cautions.push(format!(
            "Interrupted: {} of {} were done, so some cells rest on fewer repeats or are missing.",
            diagnosis.rows.len(),
            plural(diagnosis.planned_runs(), "run", "runs")
        ));
    }
    if !findings.unused.is_empty() {
        cautions.push(format!(
            "{} of {} not used; the reasons are listed below.",
            findings.unused.len(),
            plural(diagnosis.rows.len(), "row is", "rows are")
        ));
    }
    cautions
}

fn plural(number: usize, one: &str, many: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { many })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::find;
    use crate::result::RunOutcome;
    use crate::sample::{self, Numbers};

    fn conclude_chain(layers: &[(&str, Numbers)]) -> Verdict {
        find(&sample::chain(layers)).verdict
    }

    #[test]
    fn the_step_that_costs_most_is_named_with_its_numbers() {
        let verdict = find(&sample::write_back()).verdict;
        assert_eq!(verdict.standing, Standing::StepCosts);
        assert_eq!(verdict.headline, "The step from accel write-back+1 to nbd export costs most.");
        let evidence = verdict.evidence.join("\n");
        assert!(evidence.starts_with("It is the greatest loss in 8 of 8 cells compared."), "{evidence}");
        assert!(evidence.contains("median latency 38.0 µs → 92.0 µs (+54.0 µs, ×2.42)"), "{evidence}");
        let whole = "The whole way, from backing to nbd export, loses most here: ";
        assert!(evidence.contains(whole) && evidence.contains("(×0.62)"), "{evidence}");
        assert!(evidence.contains("greatest gain is from backing to accel write-back+1; 8K"), "{evidence}");
        assert!(verdict.cautions.is_empty());
    }

    #[test]
    fn in_a_cell_the_greatest_addition_counts_and_not_the_greatest_factor() {
        let verdict = conclude_chain(&[
            ("a", Numbers::steady(1e3)),
            ("b", Numbers::steady(5e3)),
            ("c", Numbers::steady(20e3)),
        ]);
        // QD 1: b → c adds more; QD 32: a → b loses the greater share. Four cells each: the factor decides.
        assert_eq!(verdict.headline, "The step from a to b costs most.");
        assert!(verdict.evidence[0].contains("in 4 of 8 cells"));
        assert!(
            verdict
                .evidence
                .iter()
                .any(|line| line.starts_with("The greatest loss elsewhere is from b to c; "))
        );
    }

    #[test]
    fn cells_in_which_no_loss_shows_are_counted() {
        let mut diagnosis =
            sample::chain(&[("backing", Numbers::steady(40e3)), ("export", Numbers::steady(90e3))]);
        let even = diagnosis.cells[..3].to_vec();
        for row in diagnosis.rows.iter_mut().filter(|row| even.contains(&row.cell)) {
            row.outcome = RunOutcome::Measured(sample::measurement(&row.cell, 40e3));
        }
        let verdict = find(&diagnosis).verdict;
        assert_eq!(
            verdict.evidence[0],
            "It is the greatest loss in 5 of 8 cells compared; in 3 no loss shows."
        );
    }

    #[test]
    fn no_loss_is_said_as_such() {
        let verdict =
            conclude_chain(&[("backing", Numbers::steady(40e3)), ("accel", Numbers([40.2e3, 39.9e3, 40e3]))]);
        assert_eq!(verdict.standing, Standing::NoLoss);
        assert!(verdict.evidence.is_empty());

        let faster = conclude_chain(&[("backing", Numbers::steady(40e3)), ("accel", Numbers::steady(10e3))]);
        assert_eq!(faster.standing, Standing::NoLoss);
        assert!(faster.evidence[0].starts_with("The greatest gain is from backing to accel; "));
    }

    #[test]
    fn where_nothing_can_be_said_nothing_is() {
        let single = conclude_chain(&[("backing", Numbers::steady(40e3))]);
        assert_eq!(single.standing, Standing::Unknown);
        assert!(single.headline.contains("Only one layer"));

        let two = [("backing", Numbers::steady(40e3)), ("export", Numbers::steady(90e3))];
        let mut once = sample::chain(&two);
        once.rows.retain(|row| row.repeat == 1);
        once.interrupted = true;
        let verdict = find(&once).verdict;
        assert_eq!(verdict.standing, Standing::Unknown);
        assert!(verdict.headline.contains("one repeat"));
        assert!(verdict.cautions[0].starts_with("Interrupted: 16 of 48 runs were done"));

        let mut apart = sample::chain(&two);
        apart.rows.retain(|row| (row.layer == "backing") == (row.cell.queue_depth == 1));
        assert!(find(&apart).verdict.headline.contains("No cell has usable rows at two layers"));

        let mut empty = sample::chain(&two);
        empty.rows.clear();
        assert!(find(&empty).verdict.headline.contains("Nothing was measured"));
    }
}

//! The step with the greatest loss, with a grade, in words that say only what the numbers support.
//!
//! A step says between which layers time is lost; why is a matter of [`crate::hypothesis`]. No layer is named
//! below the grade *likely*, and the verdict says what would improve confidence in it.

mod words;

#[cfg(test)]
mod tests;

use std::fmt;

use serde::Serialize;

use crate::Counters;
use crate::check::Kind;
use crate::comparison::{Comparisons, Difference, Judgement, Point, Quantity, SUSPICIOUS_FACTOR, Why};
use crate::hypothesis::processor::IDLE;
use crate::hypothesis::{self, Cause, Hypothesis, Standing};
use crate::result::{Diagnosis, RunOutcome};
use crate::stats::PRACTICAL_MARGIN;
use weir_report::format;
use words::{between, cost, plural};
pub use words::{describe, factor, in_short, interval};

/// With fewer repeats on a side nothing is called confirmed.
pub const FEWEST_REPEATS: u32 = 5;

/// The lowest layer is unsteady where its own repeats do not determine it to within this share (half of the 95 % interval): a
/// step from it cannot then be known better.
pub const UNSTEADY: f64 = 0.10;

/// A generator whose threads were on a processor for this share of the time had no more to give.
pub const BUSY_GENERATOR: f64 = 0.95;

/// Processors' worth of time that other processes use when the machine is not ours.
const FOREIGN_WORK: f64 = 0.5;

/// More repeats than this are no advice.
const SENSIBLE_REPEATS: u32 = 50;

/// The reliability of the verdict.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Grade {
    /// A step is named; at least five repeats on each side show it and nothing speaks against it.
    Confirmed,
    /// A step is named, and the gaps in its evidence.
    Likely,
    /// No step is shown to be a loss. Single runs may name a suspicion.
    #[default]
    Inconclusive,
    /// Every step was compared, and each is shown to be the same or faster.
    NoBottleneckFound,
    /// The load generator, not a layer, set the rate.
    GeneratorLimited,
}

impl fmt::Display for Grade {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Grade::Confirmed => "confirmed",
            Grade::Likely => "likely",
            Grade::Inconclusive => "inconclusive",
            Grade::NoBottleneckFound => "no bottleneck found",
            Grade::GeneratorLimited => "generator-limited",
        })
    }
}

/// A step that is named: places in [`Diagnosis::layers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Step {
    /// The lower layer.
    pub from: usize,
    /// The upper layer.
    pub to: usize,
}

/// The statement at the top of the report.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Verdict {
    /// Its reliability.
    pub grade: Grade,
    /// The step that is named; under `inconclusive` only a suspicion from single runs.
    pub step: Option<Step>,
    /// The cause that a run has confirmed, of the step or of the lowest layer's own rate.
    pub cause: Option<Cause>,
    /// Place in [`Diagnosis::layers`] of the layer whose doing that is; absent without a cause, and where it is a process
    /// that is short of processor time.
    pub cause_layer: Option<usize>,
    /// One sentence.
    pub headline: String,
    /// Sentences with the numbers behind it.
    pub evidence: Vec<String>,
    /// Guesses at the cause.
    pub hypotheses: Vec<Hypothesis>,
    /// Sentences that limit it: interrupted, an unsteady lowest layer, a machine without idle processors.
    pub cautions: Vec<String>,
    /// Steps that would improve confidence in it.
    pub to_improve: Vec<String>,
}

/// Sums up the steps of a measurement. The precision of the lowest layer is looked at first.
#[must_use]
pub fn conclude(diagnosis: &Diagnosis, compared: &Comparisons) -> Verdict {
    let unsteady = unsteady_cells(diagnosis, compared);
    let hypotheses = hypothesis::explain(diagnosis, compared);
    let confirmed = hypothesis::confirmed(&hypotheses);
    let mut verdict = match confirmed {
        Some(guess) if guess.cause == Cause::Generator => short_of_processor(guess),
        _ => statement(diagnosis, compared, &unsteady),
    };
    if let (Grade::Inconclusive, None, Some((cause, layer))) =
        (verdict.grade, verdict.step, confirmed.and_then(|guess| Some((guess.cause, guess.layer?))))
    {
        let layer = &diagnosis.layers[layer].name;
        verdict.headline =
            format!("A cause is confirmed at {layer}, although no step is shown to be a loss: {cause}.");
    }
    verdict.cause = confirmed.map(|guess| guess.cause);
    verdict.cause_layer = confirmed.and_then(|guess| guess.layer);
    verdict.evidence.extend(confirmed.map(|guess| confirmed_by(diagnosis, guess)));
    let open = hypotheses.iter().filter(|guess| guess.standing == Standing::Open);
    verdict.to_improve.extend(open.map(|guess| guess.run.clone()));
    verdict.hypotheses = hypotheses;
    verdict.cautions = cautions(diagnosis, &unsteady);
    if diagnosis.interrupted {
        verdict.to_improve.push("Measure the missing runs: --resume continues.".to_owned());
    }
    verdict
}

/// The generator's own run has shown that it, not a layer, set the rate.
fn short_of_processor(guess: &Hypothesis) -> Verdict {
    Verdict {
        grade: Grade::GeneratorLimited,
        headline: "The load generator was the limit, not a layer.".to_owned(),
        evidence: guess.grounds.clone(),
        to_improve: vec!["Give the load generator a processor of its own.".to_owned()],
        ..Verdict::default()
    }
}

/// The prediction and the measurement.
fn confirmed_by(diagnosis: &Diagnosis, guess: &Hypothesis) -> String {
    let layer = guess.layer.map_or(String::new(), |layer| format!(", at {}", diagnosis.layers[layer].name));
    let outcome = guess.outcome().unwrap_or_default();
    format!("Cause, confirmed by a run: {}{layer}. {outcome}", guess.cause).trim_end().to_owned()
}

/// Cells in which the lowest layer's own repeats do not determine it to within [`UNSTEADY`], in the quantity that the cell is judged by.
fn unsteady_cells<'a>(diagnosis: &Diagnosis, compared: &'a Comparisons) -> Vec<&'a crate::Cell> {
    let Some((lowest, _)) = diagnosis.chain().next() else { return Vec::new() };
    let unsteady = |point: &&Point| {
        let width = point.half_width(compared.quantity(&point.cell));
        point.layer == lowest
            && diagnosis.cells.contains(&point.cell)
            && width.is_some_and(|width| width > UNSTEADY)
    };
    compared.points.iter().filter(unsteady).map(|point| &point.cell).collect()
}

fn statement(diagnosis: &Diagnosis, compared: &Comparisons, unsteady: &[&crate::Cell]) -> Verdict {
    let leader = costliest_step(diagnosis, compared);
    if let Some(verdict) = generator_limited(diagnosis, compared, leader.is_some()) {
        return verdict;
    }
    let unknown = |headline: &str| Verdict { headline: headline.to_owned(), ..Verdict::default() };
    if compared.points.is_empty() {
        return unknown("Nothing was measured that could be used.");
    }
    if diagnosis.chain().count() < 2 {
        return unknown("Only one layer was measured: there is no step to compare.");
    }
    if compared.steps.is_empty() {
        return unknown("No cell has usable rows at two layers: there is no step to compare.");
    }
    match leader {
        Some(leader) => name_step(diagnosis, compared, &leader, unsteady),
        None => name_none(diagnosis, compared),
    }
}

/// Most runs were limited by the generator, or no loss shows because it was.
fn generator_limited(diagnosis: &Diagnosis, compared: &Comparisons, loss: bool) -> Option<Verdict> {
    let measured = diagnosis.rows.iter().filter(|row| matches!(row.outcome, RunOutcome::Measured(_))).count();
    let idle = |why: &Why| *why == Why::Objection(Kind::GeneratorIdle);
    let idle = compared.unused.iter().filter(|unused| idle(&unused.why)).count();
    let share = |point: &&Point| point.cpu_share.is_some_and(|share| share.median >= BUSY_GENERATOR);
    let busy = compared.points.iter().filter(share).count();
    let (evidence, change) = if idle > 0 && 2 * idle >= measured {
        (
            format!(
                "In {idle} of {measured} runs fewer requests were in flight than the queue depth asks for."
            ),
            "Keep the queue full: stop other programs on the generator's processors, or use more threads.",
        )
    } else if !loss && busy > 0 && 2 * busy >= compared.points.len() {
        (
            format!(
                "In {busy} of {} combinations of layer and cell its threads used a processor for {} of the time or more.",
                compared.points.len(),
                format::percent(BUSY_GENERATOR)
            ),
            "Use more generator threads or a faster processor: a layer that is faster than the generator looks like the generator.",
        )
    } else {
        return None;
    };
    Some(Verdict {
        grade: Grade::GeneratorLimited,
        headline: "The load generator was the limit, not a layer.".to_owned(),
        evidence: vec![evidence],
        to_improve: vec![change.to_owned()],
        ..Verdict::default()
    })
}

/// A pair of layers and the cells in which its step is the greatest loss.
struct Leader<'a> {
    from: usize,
    to: usize,
    leads: Vec<&'a Difference>,
    cells_compared: usize,
    cells_with_loss: usize,
}

impl<'a> Leader<'a> {
    fn new(greatest: &'a Difference) -> Leader<'a> {
        let (from, to, leads) = (greatest.from, greatest.to, vec![greatest]);
        Leader { from, to, leads, cells_compared: 0, cells_with_loss: 0 }
    }

    /// The losses that repeats have shown.
    fn tested(&self) -> Vec<&'a Difference> {
        self.leads.iter().filter(|step| step.judgement == Judgement::Slower).copied().collect()
    }

    /// Of these, what confirms the step: enough repeats above a lowest layer that is steady.
    fn sound(&self, unsteady: &[&crate::Cell]) -> Vec<&'a Difference> {
        let mut sound = self.tested();
        sound.retain(|step| has_repeats(step) && !unsteady.contains(&&step.cell));
        sound
    }

    /// The loss that the headline has the numbers of: one of those that its grade rests on. At queue depth 1, where one request
    /// waits for itself alone, if it shows there; the greatest such.
    fn shown(&self, unsteady: &[&crate::Cell]) -> &'a Difference {
        let by_weight = [self.sound(unsteady), self.tested(), self.leads.clone()];
        let leads = by_weight.into_iter().find(|leads| !leads.is_empty()).unwrap_or_default();
        let latencies = leads.iter().filter(|step| step.quantity == Quantity::Latency);
        let greatest = |steps: &mut dyn Iterator<Item = &&'a Difference>| {
            steps.max_by(|a, b| a.loss_factor().total_cmp(&b.loss_factor())).copied()
        };
        greatest(&mut latencies.into_iter())
            .or_else(|| greatest(&mut leads.iter()))
            .expect("it leads somewhere")
    }

    /// Its greatest loss. One that repeats have shown comes before any that a single run suggests.
    fn rank(&self) -> (bool, f64) {
        let tested = self.tested();
        if tested.is_empty() { (false, worst(&self.leads)) } else { (true, worst(&tested)) }
    }
}

fn has_repeats(step: &Difference) -> bool {
    step.repeats >= FEWEST_REPEATS as usize
}

/// The step with the greatest loss that repeats have shown, or that single runs suggest, as a factor; among equals, the one that is the greatest loss in the most cells.
fn costliest_step<'a>(diagnosis: &Diagnosis, compared: &'a Comparisons) -> Option<Leader<'a>> {
    let mut leaders: Vec<Leader<'a>> = Vec::new();
    let (mut cells_compared, mut cells_with_loss) = (0, 0);
    for cell in &diagnosis.cells {
        let steps = || compared.steps.iter().filter(|step| step.cell == *cell);
        cells_compared += usize::from(steps().next().is_some());
        let losses = steps().filter(|step| step.is_loss());
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
            None => leaders.push(Leader::new(greatest)),
        }
    }
    let mut leader = leaders.into_iter().max_by(|a, b| {
        let ((a_tested, a_worst), (b_tested, b_worst)) = (a.rank(), b.rank());
        a_tested
            .cmp(&b_tested)
            .then_with(|| a_worst.total_cmp(&b_worst))
            .then_with(|| a.leads.len().cmp(&b.leads.len()))
    })?;
    (leader.cells_compared, leader.cells_with_loss) = (cells_compared, cells_with_loss);
    Some(leader)
}

fn worst(steps: &[&Difference]) -> f64 {
    steps.iter().map(|step| step.loss_factor()).fold(0.0, f64::max)
}

fn name_step(
    diagnosis: &Diagnosis,
    compared: &Comparisons,
    leader: &Leader<'_>,
    unsteady: &[&crate::Cell],
) -> Verdict {
    let missing = missing_to_confirm(diagnosis, compared, leader, unsteady);
    let grade = match leader.leads.iter().all(|step| step.judgement == Judgement::Untested) {
        // Nothing says how far a single run is from the next: the step is worth a second look, and no more.
        true => Grade::Inconclusive,
        false if missing.is_empty() && !diagnosis.interrupted => Grade::Confirmed,
        false => Grade::Likely,
    };
    let losses: Vec<&Difference> = compared
        .steps
        .iter()
        .filter(|step| (step.from, step.to) == (leader.from, leader.to) && step.is_loss())
        .collect();
    let word = match grade {
        Grade::Confirmed => "Confirmed",
        Grade::Likely => "Likely",
        _ => "Inconclusive, from single runs",
    };
    let headline =
        format!("{word}: {}", cost(diagnosis, leader.shown(unsteady), alone(compared, leader, &losses)));
    Verdict {
        grade,
        step: Some(Step { from: leader.from, to: leader.to }),
        headline,
        evidence: evidence(diagnosis, compared, leader),
        to_improve: missing,
        ..Verdict::default()
    }
}

/// Whether the loss shows in one shape alone, and other shapes were compared.
fn alone(compared: &Comparisons, leader: &Leader<'_>, losses: &[&Difference]) -> bool {
    let Some(shape) = losses.first().map(|loss| loss.cell.shape) else { return false };
    let others = compared.steps.iter().filter(|step| (step.from, step.to) == (leader.from, leader.to));
    let elsewhere = others.filter(|step| step.cell.shape != shape).collect::<Vec<_>>();
    !elsewhere.is_empty() && elsewhere.iter().all(|step| step.seems_even())
}

/// The gaps between this step and `confirmed`, each with the step that would close it.
fn missing_to_confirm(
    diagnosis: &Diagnosis,
    compared: &Comparisons,
    leader: &Leader<'_>,
    unsteady: &[&crate::Cell],
) -> Vec<String> {
    let mut missing = Vec::new();
    let tested = leader.tested();
    let repeated: Vec<&Difference> = tested.iter().filter(|step| has_repeats(step)).copied().collect();
    if tested.is_empty() {
        missing.push(format!(
            "Repeat the runs: single runs have no scatter to judge by, and a factor of {SUSPICIOUS_FACTOR} or more is only a \
             suspicion. {FEWEST_REPEATS} repeats on each side would confirm or reject it."
        ));
    } else if repeated.is_empty() {
        missing.push(format!(
            "{FEWEST_REPEATS} repeats on each side: every cell that shows the loss has fewer."
        ));
    }
    // Of the cells that have repeats, where there are any: one that lacks them does not make up for an unsteady one.
    let judged = [&repeated, &tested, &leader.leads].into_iter().find(|steps| !steps.is_empty());
    if judged.is_some_and(|steps| steps.iter().all(|step| unsteady.contains(&&step.cell))) {
        missing.push(format!(
            "A steadier lowest layer, or more repeats of it: in the cells that show the loss its repeats determine it only to \
             within ±{} or worse.",
            format::percent(UNSTEADY)
        ));
    }
    if 2 * leader.leads.len() < leader.cells_with_loss {
        missing.push(format!(
            "More agreement between cells: the step is the greatest loss in {} of the {} that show a loss.",
            leader.leads.len(),
            leader.cells_with_loss
        ));
    }
    let here =
        |layer: &str| [leader.from, leader.to].iter().any(|index| diagnosis.layers[*index].name == layer);
    let of_step = diagnosis.rows.iter().filter(|row| here(&row.layer)).count();
    let unused = compared.unused.iter().filter(|unused| here(&diagnosis.rows[unused.row].layer)).count();
    if 10 * unused > of_step {
        missing.push(format!("More usable rows: {unused} of {of_step} at these two layers are not used."));
    }
    missing
}

fn evidence(diagnosis: &Diagnosis, compared: &Comparisons, leader: &Leader<'_>) -> Vec<String> {
    let (leads, cells) = (leader.leads.len(), plural(leader.cells_compared, "cell", "cells"));
    let mut evidence = vec![match leader.cells_compared - leader.cells_with_loss {
        0 => format!("It is the greatest loss in {leads} of {cells} compared."),
        even => {
            format!("It is the greatest loss in {leads} of {cells} compared; in {even} no loss is shown.")
        }
    }];
    let worst = |quantity: Quantity| {
        let losses = leader.leads.iter().filter(move |step| step.quantity == quantity);
        losses.max_by(|a, b| a.loss_factor().total_cmp(&b.loss_factor()))
    };
    let greatest = [Quantity::Latency, Quantity::Iops].into_iter().filter_map(worst);
    evidence.extend(greatest.clone().map(|step| describe(step)));
    evidence.extend(
        greatest.max_by_key(|step| step.cell.queue_depth).and_then(|step| upward(diagnosis, compared, step)),
    );
    evidence.extend(elsewhere(diagnosis, compared, leader));
    evidence.extend(whole_path(diagnosis, compared));
    evidence.extend(gains(diagnosis, compared));
    evidence
}

/// Whether the loss stays at every layer above: then it was not that layer's own peculiarity.
fn upward(diagnosis: &Diagnosis, compared: &Comparisons, step: &Difference) -> Option<String> {
    let base = compared.point(step.from, &step.cell)?.iops.median;
    let above = diagnosis.chain().skip_while(|(index, _)| *index != step.to);
    let points: Vec<f64> = above
        .filter_map(|(index, _)| compared.point(index, &step.cell))
        .map(|point| point.iops.median)
        .collect();
    let slower = points.iter().all(|iops| *iops < base / (1.0 + PRACTICAL_MARGIN));
    if points.len() < 2 || !slower {
        return None;
    }
    let list: Vec<String> = points.iter().map(|iops| format::count(*iops)).collect();
    Some(format!(
        "From {} upward every layer's median is below that of {}: {}: {} IOPS against {}.",
        diagnosis.layers[step.to].name,
        diagnosis.layers[step.from].name,
        step.cell,
        list.join(", "),
        format::count(base)
    ))
}

/// Nothing is a loss: that is shown, or nothing is.
fn name_none(diagnosis: &Diagnosis, compared: &Comparisons) -> Verdict {
    let told = |step: &&Difference| matches!(step.judgement, Judgement::Same | Judgement::Faster);
    let (steps, told) = (compared.steps.len(), compared.steps.iter().filter(told).count());
    let gains: Vec<String> = gains(diagnosis, compared).into_iter().collect();
    if steps == told {
        return Verdict {
            grade: Grade::NoBottleneckFound,
            headline: "No bottleneck found: every step from layer to layer is the same or faster.".to_owned(),
            evidence: not_compared(diagnosis, compared).into_iter().chain(gains).collect(),
            to_improve: vec!["Measure other block sizes, depths and patterns.".to_owned()],
            ..Verdict::default()
        };
    }
    let untested = compared.steps.iter().filter(|step| step.judgement == Judgement::Untested).count();
    let evidence = format!(
        "Of {} in {}, {told} are shown to be the same or faster, {} are inconclusive, {untested} are single runs.",
        plural(steps, "step", "steps"),
        plural(cells_compared(diagnosis, compared), "cell", "cells"),
        steps - told - untested
    );
    Verdict {
        headline: "Inconclusive: no step is shown to be a loss, and some could still be one.".to_owned(),
        evidence: [evidence].into_iter().chain(not_compared(diagnosis, compared)).chain(gains).collect(),
        to_improve: vec![more_repeats(compared)],
        ..Verdict::default()
    }
}

fn cells_compared(diagnosis: &Diagnosis, compared: &Comparisons) -> usize {
    let is_compared = |cell: &&crate::Cell| compared.steps.iter().any(|step| step.cell == **cell);
    diagnosis.cells.iter().filter(is_compared).count()
}

/// Cells of which nothing is known, when there are any: no two layers have a usable row there.
fn not_compared(diagnosis: &Diagnosis, compared: &Comparisons) -> Option<String> {
    let (all, with) = (diagnosis.cells.len(), cells_compared(diagnosis, compared));
    (with < all).then(|| {
        format!(
            "Layers could be compared in {with} of {}: in the others no two have usable rows.",
            plural(all, "cell", "cells")
        )
    })
}

/// The number of repeats that the scatter so far requires to decide half of the inconclusive steps.
fn more_repeats(compared: &Comparisons) -> String {
    let open = compared.steps.iter().filter(|step| step.judgement == Judgement::Inconclusive);
    let mut needed: Vec<u32> = open.map(|step| step.repeats_needed.unwrap_or(u32::MAX)).collect();
    needed.sort_unstable();
    match needed.get(needed.len().saturating_sub(1) / 2) {
        Some(&repeats) if repeats <= SENSIBLE_REPEATS => format!(
            "More repeats: about {} on each side would decide half of the inconclusive steps.",
            repeats.max(FEWEST_REPEATS)
        ),
        Some(_) => {
            "A quieter machine and longer runs: with this scatter more repeats would hardly help.".to_owned()
        }
        None => format!("At least {FEWEST_REPEATS} repeats on each side."),
    }
}

/// Cells in which another step is a loss, when there are any.
fn elsewhere(diagnosis: &Diagnosis, compared: &Comparisons, leader: &Leader<'_>) -> Option<String> {
    let others = compared
        .steps
        .iter()
        .filter(|step| step.is_loss() && (step.from, step.to) != (leader.from, leader.to));
    let worst = others.max_by(|a, b| a.loss_factor().total_cmp(&b.loss_factor()))?;
    Some(format!("The greatest loss elsewhere is {}", between(diagnosis, worst)))
}

/// The worst cost of the whole path, if it has several steps.
fn whole_path(diagnosis: &Diagnosis, compared: &Comparisons) -> Option<String> {
    let losses = compared.whole_path.iter().filter(|path| path.is_loss());
    let worst = losses.max_by(|a, b| a.loss_factor().total_cmp(&b.loss_factor()))?;
    let name = |layer: usize| &diagnosis.layers[layer].name;
    Some(format!(
        "The whole path, from {} to {}, loses most here: {}",
        name(worst.from),
        name(worst.to),
        describe(worst)
    ))
}

fn gains(diagnosis: &Diagnosis, compared: &Comparisons) -> Option<String> {
    let gains = compared.steps.iter().filter(|step| step.judgement == Judgement::Faster);
    let best = gains.min_by(|a, b| a.loss_factor().total_cmp(&b.loss_factor()))?;
    Some(format!("The greatest gain is {}", between(diagnosis, best)))
}

fn cautions(diagnosis: &Diagnosis, unsteady: &[&crate::Cell]) -> Vec<String> {
    let mut cautions = Vec::new();
    if !unsteady.is_empty() {
        let lowest = diagnosis.chain().next().map_or("", |(_, layer)| layer.name.as_str());
        let named: Vec<String> = unsteady.iter().take(3).map(|cell| cell.to_string()).collect();
        let more = if unsteady.len() > 3 { "; …" } else { "" };
        cautions.push(format!(
            "The lowest layer, {lowest}, is not steady: in {} of {} its repeats determine it only to within ±{} or worse (95 % \
             interval): {}{more}. Steps from it are no more precise.",
            unsteady.len(),
            plural(diagnosis.cells.len(), "cell", "cells"),
            format::percent(UNSTEADY),
            named.join("; ")
        ));
    }
    cautions.extend(short_machine(diagnosis));
    if diagnosis.interrupted {
        cautions.push(match diagnosis.done_of_plan() {
            None => "Interrupted during further runs; all planned runs were done.".to_owned(),
            Some((done, planned)) => format!(
                "Interrupted: {done} of {} were done. Some cells have fewer repeats or none.",
                plural(planned, "run", "runs")
            ),
        });
    }
    cautions
}

/// The machine had no processor to spare in most of the runs, and not because of the load alone.
fn short_machine(diagnosis: &Diagnosis) -> Option<String> {
    let counted: Vec<_> = diagnosis.rows.iter().filter_map(|row| row.counters.as_ref()).collect();
    let full = |counters: &&&Counters| {
        counters.idle_processors < IDLE && counters.foreign_processors >= FOREIGN_WORK
    };
    let (runs, full) = (counted.len(), counted.iter().filter(full).count());
    (2 * full > runs).then(|| {
        format!(
            "In {full} of {} no processor was idle, and other processes used {FOREIGN_WORK} of one or more: their effect cannot be told \
             from that of the layers.",
            plural(runs, "run", "runs")
        )
    })
}
